"""The two passes of an operator as workloads: inputs, outputs, references.

Inputs of a backward pass are the operands and the cotangent of the result. Each implementation
makes the values that its own forward pass saves before the clock runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import torch

from benchmarks.training_operators import Operator, Traffic
from benchmarks.workload import HALVES, Computation, Outputs, Shape, TensorSpec, Workload

#: operations per element; the bytes decide
FLOPS = 8


class Step(Enum):
    """The measured pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class TrainingWorkload(Workload):
    """A pass of an operator.

    Attributes:
        operator: the operator.
        step: the pass.
        host: whether the host's time of a call in eager mode is measured: through autograd, from
            Python to the last launch.
    """

    operator: Operator
    step: Step
    host: bool = False

    @property
    def traffic(self) -> Traffic:
        """The data that the pass moves."""
        op = self.operator
        return op.forward if self.step is Step.FORWARD else op.backward

    def operands(self, inputs: Outputs) -> Outputs:
        """The operands among the inputs of a set; a cotangent comes after them."""
        return inputs if self.step is Step.FORWARD else inputs[:-1]


def workload_of(operator: Operator, step: Step, *, host: bool = False) -> TrainingWorkload:
    """A pass of an operator, for any shape."""
    forward = step is Step.FORWARD
    name = f"{operator.name}/{step.value}{'/host' if host else ''}"
    return TrainingWorkload(
        name=name,
        title=f"{operator.title}, {step.value}",
        axes=("rows", "columns"),
        shapes=((4096, 4096),),
        dtypes=HALVES,
        inputs=operator.operands if forward else lambda shape: _given(operator, shape),
        outputs=lambda shape: (operator.result(shape),) if forward else _asked(operator, shape),
        computations={"full": _forward(operator) if forward else _backward(operator)},
        flops=lambda shape: FLOPS * prod(shape),
        graph=lambda _, shape, dtype: _graph(operator, step, shape, dtype),
        operator=operator,
        step=step,
        host=host,
    )


def _given(operator: Operator, shape: Shape) -> tuple[TensorSpec, ...]:
    """Operands and cotangent."""
    result = operator.result(shape)
    cotangent = replace(result, name=f"d{result.name}")
    if result.wider:
        # exact in every type that a result may have
        cotangent = replace(cotangent, dtype=torch.float32, fill=_representable)
    return (*operator.operands(shape), cotangent)


def _representable(generator: torch.Generator, dims: Shape) -> torch.Tensor:
    """Normal numbers that bfloat16 and float32 hold exactly, and float16 nearly always."""
    drawn = torch.randn(dims, generator=generator, device=generator.device)
    return drawn.to(torch.bfloat16).float()


def _asked(operator: Operator, shape: Shape) -> tuple[TensorSpec, ...]:
    """The gradients: as large as the operands; those of vectors are sums over the rows."""
    return tuple(
        replace(spec, name=f"d{spec.name}", summed=not spec.rows, constant=False, wider=True)
        for spec in operator.operands(shape)
        if spec.name in operator.gradients
    )


def _forward(operator: Operator) -> Computation:
    return Computation(
        eager=lambda *operands: (operator.torch(*operands),),
        reference=lambda *operands: (operator.exact(*operands),),
    )


def _backward(operator: Operator) -> Computation:
    return Computation(
        eager=_gradients(operator, operator.torch), reference=_gradients(operator, operator.exact)
    )


def _gradients(operator: Operator, function: Callable[..., torch.Tensor]) -> Callable[..., Outputs]:
    def gradients(*given: torch.Tensor) -> Outputs:
        *operands, cotangent = given
        leaves, wrt = trainable(operator, tuple(operands))
        with torch.enable_grad():
            y = function(*leaves)
        return torch.autograd.grad(y, wrt, cotangent.to(y.dtype))

    return gradients


def trainable(operator: Operator, operands: Outputs) -> tuple[Outputs, Outputs]:
    """The operands as leaves of autograd, and those that get a gradient."""
    names = [spec.name for spec in operator.operands((2, 2))]
    leaves = tuple(
        t.detach().requires_grad_(name in operator.gradients)
        for name, t in zip(names, operands, strict=True)
    )
    return leaves, tuple(t for t in leaves if t.requires_grad)


def _graph(operator: Operator, step: Step, shape: Shape, dtype: str) -> Any:
    # only there: the definitions of the operators import most of the library
    from benchmarks.training_programs import graph_of

    return graph_of(operator, step, shape, dtype)
