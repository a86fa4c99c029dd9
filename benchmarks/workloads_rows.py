"""Workloads without a product: programs of rows."""

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
    TensorSpec,
    Workload,
    build,
    layer_norm_program,
    norm64,
)


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
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("y", shape, rows=True),),
        computations={"full": full},
        flops=lambda shape: 8 * prod(shape),  # operations per element; the bytes decide
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
    )


def rmsnorm() -> Workload:
    """RMSNorm with gain."""

    def eager(x: torch.Tensor, gain: torch.Tensor) -> Outputs:
        return (F.rms_norm(x, (x.shape[-1],), weight=gain, eps=EPS),)

    return _rows(
        "rmsnorm",
        "RMSNorm with gain",
        ((4096, 4096), (128, 4096)),
        Computation(eager, lambda x, gain: (norm64(x) * gain,)),
        lambda g, x, gain: g.rms_norm(x, gain, eps=EPS),
        vectors=("gain",),
    )


def softmax() -> Workload:
    """Softmax over the columns."""

    def eager(x: torch.Tensor) -> Outputs:
        return (F.softmax(x, -1),)

    return _rows(
        "softmax",
        "softmax",
        ((4096, 4096),),
        Computation(eager, reference=eager),
        lambda g, x: g.softmax(x),
    )


def layernorm() -> Workload:
    """LayerNorm with gain and bias."""

    def eager(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor) -> Outputs:
        return (F.layer_norm(x, (x.shape[-1],), weight=gain, bias=bias, eps=EPS),)

    return _rows(
        "layernorm",
        "LayerNorm with gain and bias",
        ((4096, 4096),),
        Computation(eager, reference=eager),
        layer_norm_program,
        vectors=("gain", "bias"),
    )
