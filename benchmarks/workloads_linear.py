"""Workloads around one layer of matrix products: ``[batch, inner] -> [batch, columns]``.

Weights are stored (inner, columns) or, with ``transposed=True``, (columns, inner) as in PyTorch's
``nn.Linear``. They are drawn with a standard deviation of 1 / sqrt(inner), which keeps outputs near
1, where a half is most accurate.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.workload import (
    EPS,
    HALVES,
    Computation,
    Outputs,
    Shape,
    Specs,
    TensorSpec,
    Workload,
    build,
    layer_norm_program,
    norm64,
)

Part = Callable[..., Outputs]


def rows(name: str, shape: Shape) -> TensorSpec:
    """The activations ``[batch, inner]``."""
    return TensorSpec(name, shape[:2], rows=True)


def weight(name: str, shape: Shape, transposed: bool = False) -> TensorSpec:
    """A weight ``[inner, columns]``, or ``[columns, inner]``."""
    _, inner, columns = shape
    dims = (columns, inner) if transposed else (inner, columns)
    return TensorSpec(name, dims, std=inner**-0.5, constant=True)


def gain_of(shape: Shape) -> TensorSpec:
    """The gain of a norm, ``[inner]``."""
    return TensorSpec("gain", shape[1:2], mean=1.0, std=0.25, constant=True)


def result(name: str, shape: Shape) -> TensorSpec:
    """The result, ``[batch, columns]``."""
    return TensorSpec(name, (shape[0], shape[2]), rows=True)


def same(function: Part) -> Computation:
    """A computation whose float64 definition is the code of PyTorch users."""
    return Computation(function, reference=function)


def _turned(w: torch.Tensor, transposed: bool) -> torch.Tensor:
    return w.t() if transposed else w


def _times(g: Any, x: Any, w: Any, transposed: bool) -> Any:
    return g.matmul(x, g.transpose(w) if transposed else w)


def _normed(x: torch.Tensor, gains: list[torch.Tensor]) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), *gains, eps=EPS)


def _layer(
    name: str,
    title: str,
    shapes: tuple[Shape, ...],
    inputs: Specs,
    computations: dict[str, Computation],
    program: Callable[..., Any],
    products: int = 1,
) -> Workload:
    """A workload that stores ``[batch, columns]``; ``products`` weights are multiplied."""
    return Workload(
        name=name,
        title=title,
        axes=("batch", "inner", "columns"),
        shapes=shapes,
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda shape: (result("y", shape),),
        computations=computations,
        # the element-wise rest adds under 0.1 %
        flops=lambda shape: 2 * products * prod(shape),
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
    )


def _last_product(transposed: bool = False) -> Computation:
    """The first input times the last one."""

    def eager(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        return (x @ _turned(rest[-1], transposed),)

    def into(x: torch.Tensor, *rest: torch.Tensor, out: Outputs) -> Outputs:
        torch.mm(x, _turned(rest[-1], transposed), out=out[0])
        return out

    return Computation(eager, reference=eager, into=into)


def _two_products(transposed: bool) -> Computation:
    """The first input times each of the last two, neither combined nor normalized."""

    def eager(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        return tuple(x @ _turned(w, transposed) for w in rest[-2:])

    return Computation(
        eager, reference=eager, outputs=lambda s: (result("gate", s), result("up", s))
    )


# y = (x / sqrt(mean(x^2) + eps) [* gain]) @ w


def norm_linear(gain: bool, transposed: bool = False) -> Workload:
    """RMSNorm, with or without a gain, and a linear layer."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        x, w = rows("x", shape), weight("w", shape, transposed)
        return (x, gain_of(shape), w) if gain else (x, w)

    def eager(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        *gains, w = rest
        return (_normed(x, gains) @ _turned(w, transposed),)

    def into(x: torch.Tensor, *rest: torch.Tensor, out: Outputs) -> Outputs:
        *gains, w = rest
        torch.mm(_normed(x, gains), _turned(w, transposed), out=out[0])
        return out

    def reference(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        *gains, w = rest
        return (prod(gains, start=norm64(x)) @ _turned(w, transposed),)

    def program(g: Any, x: Any, *rest: Any) -> Any:
        *gains, w = rest
        return _times(g, g.rms_norm(x, *gains, eps=EPS), w, transposed)

    square, wide = (16, 4096, 4096), (16, 4096, 28672)
    shapes = (square, (2, 4096, 6144), (16, 4096, 6144), wide, (4096, 4096, 4096))
    return _layer(
        f"rmsnorm{'_gain' * gain}_linear{'_nk' * transposed}",
        f"RMSNorm{' (with gain)' * gain} + Linear{', W stored (N, K)' * transposed}",
        (square, wide) if transposed else shapes,
        inputs,
        {"full": Computation(eager, reference, into), "matmul": _last_product(transposed)},
        program,
    )


def gated_mlp(norm: bool = False, transposed: bool = False) -> Workload:
    """``silu(X W1) (X W2)``; with ``norm``, X goes through an RMSNorm with gain first."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        weights = (weight("gate", shape, transposed), weight("up", shape, transposed))
        gains = (gain_of(shape),) if norm else ()
        return (rows("x", shape), *gains, *weights)

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Outputs:
        return (F.silu(x @ _turned(gate, transposed)) * (x @ _turned(up, transposed)),)

    def eager(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        *gains, gate, up = rest
        return gated(_normed(x, gains) if norm else x, gate, up)

    def reference(x: torch.Tensor, *rest: torch.Tensor) -> Outputs:
        *gains, gate, up = rest
        return gated(prod(gains, start=norm64(x)) if norm else x, gate, up)

    def program(g: Any, x: Any, *rest: Any) -> Any:
        *gains, gate, up = rest
        x = g.rms_norm(x, *gains, eps=EPS) if norm else x
        return g.mul(g.silu(_times(g, x, gate, transposed)), _times(g, x, up, transposed))

    return _layer(
        f"{'rmsnorm_' * norm}gated_mlp{'_nk' * transposed}",
        "RMSNorm (with gain) + GatedMLP" if norm else "GatedMLP: silu(X W1) (X W2)",
        ((8, 4096, 4096),),
        inputs,
        {"full": Computation(eager, reference), "matmul": _two_products(transposed)},
        program,
        products=2,
    )


def residual_norm_linear() -> Workload:
    """``rms_norm(X + R) W``."""

    def eager(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Outputs:
        return (_normed(x + residual, []) @ w,)

    full = Computation(eager, lambda x, residual, w: (norm64(x + residual) @ w,))
    return _layer(
        "residual_rmsnorm_linear",
        "residual + RMSNorm + Linear",
        ((16, 4096, 4096),),
        lambda s: (rows("x", s), rows("residual", s), weight("w", s)),
        {"full": full, "matmul": _last_product()},
        lambda g, x, residual, w: g.matmul(g.rms_norm(g.add(x, residual), eps=EPS), w),
    )


def layernorm_linear() -> Workload:
    """LayerNorm with gain and bias, and a linear layer."""

    def eager(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, w: torch.Tensor) -> Outputs:
        return (F.layer_norm(x, (x.shape[-1],), weight=gain, bias=bias, eps=EPS) @ w,)

    return _layer(
        "layernorm_linear",
        "LayerNorm + Linear",
        ((16, 4096, 4096),),
        lambda s: (
            rows("x", s),
            gain_of(s),
            TensorSpec("bias", s[1:2], std=0.25, constant=True),
            weight("w", s),
        ),
        {"full": same(eager), "matmul": _last_product()},
        lambda g, x, gain, bias, w: g.matmul(layer_norm_program(g, x, gain, bias), w),
    )


def linear_bias_relu() -> Workload:
    """``relu(X W + bias)``."""

    def eager(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Outputs:
        return (F.relu(torch.addmm(bias, x, w)),)

    return _layer(
        "linear_bias_relu",
        "relu(X W + bias)",
        ((16, 4096, 4096), (2048, 512, 256)),
        lambda s: (rows("x", s), weight("w", s), TensorSpec("bias", (s[2],), constant=True)),
        {"full": same(eager), "matmul": same(lambda x, w, bias: (x @ w,))},
        lambda g, x, w, bias: g.relu(g.add(g.matmul(x, w), bias)),
    )


def linear_residual(transposed: bool = False) -> Workload:
    """``residual + X W``; PyTorch leaves the sum to cuBLAS."""

    def eager(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Outputs:
        return (torch.addmm(residual, x, _turned(w, transposed)),)

    def into(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, out: Outputs) -> Outputs:
        torch.addmm(residual, x, _turned(w, transposed), out=out[0])
        return out

    return _layer(
        f"linear_residual{'_nk' * transposed}",
        "Linear + residual",
        ((16, 4096, 4096),),
        lambda s: (rows("x", s), result("residual", s), weight("w", s, transposed)),
        {"full": Computation(eager, eager, into), "matmul": _last_product(transposed)},
        lambda g, x, residual, w: g.add(residual, _times(g, x, w, transposed)),
    )
