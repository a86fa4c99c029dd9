"""Operators of a training step: definitions, operands, and the data that they must move.

Each has a forward and a backward pass, and both are workloads of their own (`workloads_training`).
Extents are ``(rows, columns)``. Element types are those of the workload unless a tensor has its
own; labels are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

import cutesuper as cs
from benchmarks.workload import Shape, Specs, TensorSpec

#: epsilon of norms, unless an operator has another
EPS = 1e-6
#: standard deviation of logits: with 1, no element of a row of 262144 would matter
LOGITS = 4.0
SCALE = 0.5

#: an element-wise kernel of PyTorch that moves the same bytes; "read": there is none
Traffic = Literal["copy", "add", "read"]


@dataclass(frozen=True)
class Operator:
    """A differentiable operator with one result.

    Attributes:
        name: as in `cutesuper.ops`; a variant has a suffix after a ``"/"``.
        title: a readable name.
        operands: tensors of a call.
        result: the returned tensor.
        gradients: names of the operands that have one.
        torch: the call as PyTorch users write it.
        exact: the definition, for float64 operands with all rows or some.
        options: arguments of the call in `cutesuper.ops` that are not tensors, by name.
        forward, backward: the traffic of each pass.
    """

    name: str
    title: str
    operands: Specs
    result: Callable[[Shape], TensorSpec]
    gradients: tuple[str, ...]
    torch: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]
    options: tuple[tuple[str, float | int | str], ...] = ()
    forward: Traffic = "copy"
    backward: Traffic = "add"

    @property
    def call(self) -> str:
        """The operator's name in `cutesuper.ops`."""
        return self.name.partition("/")[0]

    def of_ops(self, *operands: torch.Tensor) -> torch.Tensor:
        """The call in `cutesuper.ops`, with losses per row."""
        more = {"reduction": "none"} if self.call == "cross_entropy" else {}
        return getattr(cs.ops, self.call)(*operands, **dict(self.options), **more)


def _rows(name: str, shape: Shape, std: float = 1.0) -> TensorSpec:
    return TensorSpec(name, shape, std=std, rows=True)


def _vector(
    name: str, shape: Shape, mean: float = 0.0, dtype: torch.dtype | None = None
) -> TensorSpec:
    return TensorSpec(name, shape[1:], mean=mean, std=0.25, constant=True, dtype=dtype)


def _result(shape: Shape) -> TensorSpec:
    return TensorSpec("y", shape, rows=True)


def rms_norm(weight: torch.dtype | None = None) -> Operator:
    """``x / sqrt(mean(x^2) + EPS) * weight``; the weight in the type of x or in ``weight``."""

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), w, EPS)

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w

    kind = "" if weight is None else str(weight).removeprefix("torch.")
    return Operator(
        f"rms_norm/{kind}" if kind else "rms_norm",
        f"RMSNorm, {kind} weight" if kind else "RMSNorm",
        lambda shape: (_rows("x", shape), _vector("weight", shape, 1.0, weight)),
        _result,
        ("x", "weight"),
        norm,
        exact,
        (("eps", EPS), ("weight_offset", 0.0)),
    )


def layer_norm() -> Operator:
    """LayerNorm with weight and bias."""

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), w, b, EPS)

    return Operator(
        "layer_norm",
        "LayerNorm",
        lambda shape: (_rows("x", shape), _vector("weight", shape, 1.0), _vector("bias", shape)),
        _result,
        ("x", "weight", "bias"),
        norm,
        norm,
        (("eps", EPS),),
    )


def softmax() -> Operator:
    """Softmax of the last dimension."""

    def along(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    def operands(shape: Shape) -> tuple[TensorSpec, ...]:
        return (_rows("x", shape, LOGITS),)

    return Operator("softmax", "softmax", operands, _result, ("x",), along, along)


def cross_entropy() -> Operator:
    """The loss of each row; labels drawn evenly, none of them ignored.

    PyTorch returns losses in the type of the logits; float32 ones may be returned as well.
    """

    def operands(shape: Shape) -> tuple[TensorSpec, ...]:
        rows, columns = shape

        def drawn(generator: torch.Generator, dims: Shape) -> torch.Tensor:
            return torch.randint(columns, dims, generator=generator, device=generator.device)

        target = TensorSpec("target", (rows,), rows=True, dtype=torch.int64, fill=drawn)
        return _rows("logits", shape, LOGITS), target

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target, reduction="none")

    return Operator(
        "cross_entropy",
        "cross-entropy",
        operands,
        lambda shape: TensorSpec("loss", shape[:1], rows=True, wider=True),
        ("logits",),
        loss,
        loss,
        (("ignore_index", -100),),
        forward="read",
        backward="copy",
    )


def swiglu() -> Operator:
    """``silu(gate) * up``."""

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    return Operator(
        "swiglu",
        "SwiGLU",
        lambda shape: (_rows("gate", shape), _rows("up", shape)),
        _result,
        ("gate", "up"),
        gated,
        gated,
        forward="add",
        backward="read",
    )


def add_activation(activation: Literal["relu", "sigmoid"]) -> Operator:
    """``activation(x + SCALE p + bias)``: the end of an MLP layer with LoRA."""
    function = getattr(torch, activation)

    def added(x: torch.Tensor, p: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return function(torch.add(x, p, alpha=SCALE) + bias)

    return Operator(
        f"add_activation/{activation}",
        f"{activation}(x + {SCALE} p + bias)",
        lambda shape: (_rows("x", shape), _rows("p", shape), _vector("bias", shape)),
        _result,
        ("x", "p", "bias"),
        added,
        added,
        (("scale", SCALE), ("activation", activation)),
        forward="add",
        backward="read",
    )


def normalized_update() -> Operator:
    """``rms(x + alpha (rms(h) + x))``, norms without weight and epsilon: an update of nGPT."""

    def rms(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=0.0)

    def rms64(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    return Operator(
        "normalized_update",
        "nTrans: rms(x + alpha (rms(h) + x))",
        lambda shape: (_rows("x", shape), _rows("h", shape), _vector("alpha", shape)),
        _result,
        ("x", "h", "alpha"),
        lambda x, h, alpha: rms(x + alpha * (rms(h) + x)),
        lambda x, h, alpha: rms64(x + alpha * (rms64(h) + x)),
        forward="add",
        backward="read",
    )


__all__ = [
    "EPS",
    "Operator",
    "Traffic",
    "add_activation",
    "cross_entropy",
    "layer_norm",
    "normalized_update",
    "rms_norm",
    "softmax",
    "swiglu",
]
