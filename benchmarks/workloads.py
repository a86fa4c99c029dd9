"""What is measured: each workload once, as data.

A workload says which tensors exist, how PyTorch computes the result (the peer), how float64 does
(the judge), how the same program is written for cutesuper, and how many bytes and operations it
cannot avoid. Shapes are plain tuples of extents; ``Workload.axes`` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from types import ModuleType

Shape = tuple[int, ...]
Outputs = tuple[torch.Tensor, ...]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
EPS = 1e-6


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a workload.

    Values are drawn from a normal distribution of this ``mean`` and ``std``. ``constant`` marks
    what no kernel writes while it is in use (weights). ``rows`` marks a first dimension whose rows
    are independent, so that a subset of them can be checked.
    """

    name: str
    dims: Shape
    mean: float = 0.0
    std: float = 1.0
    constant: bool = False
    rows: bool = False

    def size(self, dtype: torch.dtype) -> int:
        """Bytes of the tensor."""
        return prod(self.dims) * dtype.itemsize


@dataclass(frozen=True)
class Computation:
    """One function in two precisions: what PyTorch users write, and the float64 definition.

    Both take the workload's inputs in order; ``reference`` gets float64 tensors, of which those
    with ``rows`` may hold only some rows. Both return the outputs as a tuple.
    """

    eager: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    into: Callable[..., Outputs] | None = None  # as eager, plus out=(tensors to write)


@dataclass(frozen=True)
class Workload:
    """A named computation with the shapes it is measured at.

    ``computations`` has at least ``"full"``; other entries are parts of it (``"matmul"``: the
    matrix product alone) that show what the rest costs. ``graph(cs, shape, dtype name)`` builds
    the program with the cutesuper module ``cs``.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    inputs: Callable[[Shape], tuple[TensorSpec, ...]]
    outputs: Callable[[Shape], tuple[TensorSpec, ...]]
    computations: dict[str, Computation]
    flops: Callable[[Shape], int]
    graph: Callable[[ModuleType, Shape, str], Any]

    def bytes_moved(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes that must cross device memory: every input read once, every output written once."""
        return sum(spec.size(dtype) for spec in (*self.inputs(shape), *self.outputs(shape)))

    def parse_shape(self, text: str) -> Shape:
        """``"16x4096x4096"`` -> ``(16, 4096, 4096)``.

        Raises:
            ValueError: not one positive extent per axis.
        """
        parts = text.lower().split("x")
        if len(parts) != len(self.axes) or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise ValueError(
                f"shape {text!r} of {self.name}: expected {'x'.join(self.axes)}, "
                f"for example {shape_label(self.shapes[0])}"
            )
        return tuple(int(p) for p in parts)


def shape_label(shape: Shape) -> str:
    """``(16, 4096, 4096)`` -> ``"16x4096x4096"``."""
    return "x".join(str(extent) for extent in shape)


# RMSNorm followed by a linear layer: y = (x / sqrt(mean(x^2) + eps) [* gain]) @ w


def _norm64(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def _norm_linear_inputs(shape: Shape, gain: bool) -> tuple[TensorSpec, ...]:
    batch, inner, columns = shape
    x = TensorSpec("x", (batch, inner), rows=True)
    g = TensorSpec("gain", (inner,), mean=1.0, std=0.25, constant=True)
    # std 1/sqrt(inner) keeps the outputs near 1, where a half is as accurate as it gets
    w = TensorSpec("w", (inner, columns), std=inner**-0.5, constant=True)
    return (x, g, w) if gain else (x, w)


def _norm_linear_outputs(shape: Shape) -> tuple[TensorSpec, ...]:
    return (TensorSpec("y", (shape[0], shape[2]), rows=True),)


def _norm_linear_flops(shape: Shape) -> int:
    """Operations of the matrix product; the norm adds under 0.1 %."""
    return 2 * prod(shape)


def _plain_eager(x: torch.Tensor, w: torch.Tensor) -> Outputs:
    return (F.rms_norm(x, (x.shape[-1],), eps=EPS) @ w,)


def _plain_into(x: torch.Tensor, w: torch.Tensor, out: Outputs) -> Outputs:
    torch.mm(F.rms_norm(x, (x.shape[-1],), eps=EPS), w, out=out[0])
    return out


def _gain_eager(x: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> Outputs:
    return (F.rms_norm(x, (x.shape[-1],), weight=gain, eps=EPS) @ w,)


def _gain_into(x: torch.Tensor, gain: torch.Tensor, w: torch.Tensor, out: Outputs) -> Outputs:
    torch.mm(F.rms_norm(x, (x.shape[-1],), weight=gain, eps=EPS), w, out=out[0])
    return out


def _matmul_into(x: torch.Tensor, *rest: torch.Tensor, out: Outputs) -> Outputs:
    torch.mm(x, rest[-1], out=out[0])
    return out


_MATMUL = Computation(
    eager=lambda x, *rest: (x @ rest[-1],),
    reference=lambda x, *rest: (x @ rest[-1],),
    into=_matmul_into,
)


def _build(
    cs: ModuleType, specs: Sequence[TensorSpec], dtype: str, program: Callable[..., Any]
) -> Any:
    """The kernel graph of ``program(graph, *inputs)``, which returns the one output."""
    graph = cs.new_kernel_graph()
    tensors = [
        graph.new_input(spec.dims, dtype=getattr(cs, dtype), name=spec.name, constant=spec.constant)
        for spec in specs
    ]
    graph.mark_output(program(graph, *tensors))
    return graph


def _norm_linear_program(graph: Any, x: Any, *rest: Any) -> Any:
    *gains, w = rest
    return graph.matmul(graph.rms_norm(x, *gains, eps=EPS), w)


def _norm_linear(gain: bool) -> Workload:
    full = (
        Computation(_gain_eager, lambda x, g, w: ((_norm64(x) * g) @ w,), _gain_into)
        if gain
        else Computation(_plain_eager, lambda x, w: (_norm64(x) @ w,), _plain_into)
    )
    return Workload(
        name="rmsnorm_gain_linear" if gain else "rmsnorm_linear",
        title="RMSNorm (with gain) + Linear" if gain else "RMSNorm + Linear",
        axes=("batch", "inner", "columns"),
        shapes=(
            (16, 4096, 4096),
            (2, 4096, 6144),
            (16, 4096, 6144),
            (16, 4096, 28672),
            (4096, 4096, 4096),
        ),
        dtypes=("float16", "bfloat16"),
        inputs=lambda shape: _norm_linear_inputs(shape, gain),
        outputs=_norm_linear_outputs,
        computations={"full": full, "matmul": _MATMUL},
        flops=_norm_linear_flops,
        graph=lambda cs, shape, dtype: _build(
            cs, _norm_linear_inputs(shape, gain), dtype, _norm_linear_program
        ),
    )


# Other programs around a product


def _product(
    name: str,
    title: str,
    shapes: tuple[Shape, ...],
    inputs: Callable[[Shape], tuple[TensorSpec, ...]],
    full: Computation,
    program: Callable[..., Any],
    products: int = 1,
) -> Workload:
    """A workload with the extents of a product, which stores ``[batch, columns]``."""
    return Workload(
        name=name,
        title=title,
        axes=("batch", "inner", "columns"),
        shapes=shapes,
        dtypes=("float16", "bfloat16"),
        inputs=inputs,
        outputs=_norm_linear_outputs,
        computations={"full": full},
        flops=lambda shape: 2 * products * prod(shape),
        graph=lambda cs, shape, dtype: _build(cs, inputs(shape), dtype, program),
    )


def _weight(name: str, shape: Shape) -> TensorSpec:
    _, inner, columns = shape
    return TensorSpec(name, (inner, columns), std=inner**-0.5, constant=True)


def _gated_mlp() -> Workload:
    def eager(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Outputs:
        return (F.silu(x @ gate) * (x @ up),)

    return _product(
        "gated_mlp",
        "GatedMLP: silu(X W1) (X W2)",
        ((8, 4096, 4096),),
        lambda s: (TensorSpec("x", s[:2], rows=True), _weight("gate", s), _weight("up", s)),
        Computation(eager, reference=eager),
        lambda g, x, gate, up: g.mul(g.silu(g.matmul(x, gate)), g.matmul(x, up)),
        products=2,
    )


def _residual_norm_linear() -> Workload:
    def eager(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Outputs:
        return (F.rms_norm(x + residual, (x.shape[-1],), eps=EPS) @ w,)

    return _product(
        "residual_rmsnorm_linear",
        "residual + RMSNorm + Linear",
        ((16, 4096, 4096),),
        lambda s: (
            TensorSpec("x", s[:2], rows=True),
            TensorSpec("residual", s[:2], rows=True),
            _weight("w", s),
        ),
        Computation(eager, lambda x, residual, w: (_norm64(x + residual) @ w,)),
        lambda g, x, residual, w: g.matmul(g.rms_norm(g.add(x, residual), eps=EPS), w),
    )


def _linear_bias_relu() -> Workload:
    def eager(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Outputs:
        return (F.relu(torch.addmm(bias, x, w)),)

    return _product(
        "linear_bias_relu",
        "relu(X W + bias)",
        ((16, 4096, 4096), (2048, 512, 256)),
        lambda s: (
            TensorSpec("x", s[:2], rows=True),
            _weight("w", s),
            TensorSpec("bias", (s[2],), constant=True),
        ),
        Computation(eager, reference=eager),
        lambda g, x, w, bias: g.relu(g.add(g.matmul(x, w), bias)),
    )


# Programs of rows


def _rows(
    name: str,
    title: str,
    shapes: tuple[Shape, ...],
    full: Computation,
    program: Callable[..., Any],
    vectors: tuple[str, ...] = (),
) -> Workload:
    """A workload that maps ``[rows, columns]`` to the same, with vectors along the columns."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        gains = [TensorSpec(v, shape[1:], mean=1.0, std=0.25, constant=True) for v in vectors]
        return (TensorSpec("x", shape, rows=True), *gains)

    return Workload(
        name=name,
        title=title,
        axes=("rows", "columns"),
        shapes=shapes,
        dtypes=("float16", "bfloat16"),
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("y", shape, rows=True),),
        computations={"full": full},
        flops=lambda shape: 8 * prod(shape),  # operations of an element; the bytes decide
        graph=lambda cs, shape, dtype: _build(cs, inputs(shape), dtype, program),
    )


def _norm_rows() -> Workload:
    def eager(x: torch.Tensor, gain: torch.Tensor) -> Outputs:
        return (F.rms_norm(x, (x.shape[-1],), weight=gain, eps=EPS),)

    return _rows(
        "rmsnorm",
        "RMSNorm with gain",
        ((4096, 4096), (128, 4096)),
        Computation(eager, lambda x, gain: (_norm64(x) * gain,)),
        lambda g, x, gain: g.rms_norm(x, gain, eps=EPS),
        vectors=("gain",),
    )


def _softmax_rows() -> Workload:
    def eager(x: torch.Tensor) -> Outputs:
        return (F.softmax(x, -1),)

    return _rows(
        "softmax",
        "softmax",
        ((4096, 4096),),
        Computation(eager, reference=eager),
        lambda g, x: g.softmax(x),
    )


def _layernorm_rows() -> Workload:
    def eager(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor) -> Outputs:
        return (F.layer_norm(x, (x.shape[-1],), weight=gain, bias=bias, eps=EPS),)

    def program(g: Any, x: Any, gain: Any, bias: Any) -> Any:
        centred = g.sub(x, g.mean(x, -1))
        scale = g.rsqrt(g.add(g.mean(g.square(centred), -1), EPS))
        return g.add(g.mul(g.mul(centred, scale), gain), bias)

    return _rows(
        "layernorm",
        "LayerNorm with gain and bias",
        ((4096, 4096),),
        Computation(eager, reference=eager),
        program,
        vectors=("gain", "bias"),
    )


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {w.name: w for w in workloads}


#: measured against peers; each has a "matmul" part
WORKLOADS: dict[str, Workload] = _named(_norm_linear(False), _norm_linear(True))

#: candidates of the search are timed against each other for these; varied ones first, so that a
#: budget that ends early has seen every kind of kernel
RANKED: dict[str, Workload] = _named(
    WORKLOADS["rmsnorm_linear"],
    _norm_rows(),
    _softmax_rows(),
    _layernorm_rows(),
    _gated_mlp(),
    _residual_norm_linear(),
    _linear_bias_relu(),
    WORKLOADS["rmsnorm_gain_linear"],
)


def find_workload(name: str, known: Mapping[str, Workload] = WORKLOADS) -> Workload:
    """The registered workload of that name.

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    if name not in known:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(sorted(known))}")
    return known[name]
