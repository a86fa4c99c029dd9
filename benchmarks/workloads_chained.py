"""Workloads with a product of a product: LoRA and a whole MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.workload import (
    HALVES,
    Computation,
    Outputs,
    Shape,
    TensorSpec,
    Workload,
    build,
)
from benchmarks.workloads_linear import result, rows, same, weight


def lora() -> Workload:
    """``X W + (X A) B`` with A of few columns (the rank)."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, inner, columns, rank = shape
        low, high = (batch, inner, rank), (batch, rank, columns)
        return (rows("x", shape), weight("w", shape[:3]), weight("a", low), weight("b", high))

    def eager(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Outputs:
        # the sum inside the last product: one kernel less than x @ w + (x @ a) @ b
        return (torch.addmm(x @ w, x @ a, b),)

    def products(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Outputs:
        return x @ w, (x @ a) @ b

    def outputs(shape: Shape) -> tuple[TensorSpec, ...]:
        return (result("y", shape),)

    def program(g: Any, x: Any, w: Any, a: Any, b: Any) -> Any:
        return g.add(g.matmul(x, w), g.matmul(g.matmul(x, a), b))

    def flops(shape: Shape) -> int:
        batch, inner, columns, rank = shape
        return 2 * batch * (inner * columns + rank * (inner + columns))

    return Workload(
        name="lora",
        title="LoRA: X W + (X A) B",
        axes=("batch", "inner", "columns", "rank"),
        shapes=((16, 256, 4096, 16), (16, 4096, 4096, 16)),
        dtypes=HALVES,
        inputs=inputs,
        outputs=outputs,
        computations={
            "full": Computation(eager, lambda x, w, a, b: (x @ w + (x @ a) @ b,)),
            "matmul": Computation(
                products, products, outputs=lambda s: (result("base", s), result("update", s))
            ),
        },
        flops=flops,
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
    )


def dlrm_mlp() -> Workload:
    """``sigmoid(relu(X W1 + b1) W2 + b2)``: the top MLP of DLRM, one output per row."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, _, hidden = shape
        last = (batch, hidden, 1)
        return (
            rows("x", shape),
            weight("w1", shape),
            TensorSpec("b1", (hidden,), std=0.5, constant=True),
            weight("w2", last),
            TensorSpec("b2", (1,), std=0.5, constant=True),
        )

    def eager(
        x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
    ) -> Outputs:
        return (torch.sigmoid(torch.addmm(b2, F.relu(torch.addmm(b1, x, w1)), w2)),)

    def program(g: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        hidden = g.relu(g.add(g.matmul(x, w1), b1))
        return g.sigmoid(g.add(g.matmul(hidden, w2), b2))

    return Workload(
        name="dlrm_mlp",
        title="MLP of DLRM: sigmoid(relu(X W1 + b1) W2 + b2)",
        axes=("batch", "inner", "hidden"),
        shapes=((2048, 512, 256),),
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda s: (TensorSpec("y", (s[0], 1), rows=True),),
        computations={
            "full": same(eager),
            "matmul": same(lambda x, w1, b1, w2, b2: ((x @ w1) @ w2,)),
        },
        flops=lambda s: 2 * s[0] * s[2] * (s[1] + 1),
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
    )
