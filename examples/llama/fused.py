"""Kernel graphs as functions of tensors, which is how the examples have fused products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import cutesuper as cs

#: rows up to which dependent launch pays: a step of 32 sequences takes 8.56 ms with it, and 8.19
#: with plain launches and a slower attention
FEW_ROWS = 16


class Fused:
    """A kernel graph that is made, searched and compiled for the shapes of a call.

    Weights are constant: a dependent launch loads its own while the kernel before is still running.

    Args:
        build: `build(graph, *inputs)` returns the result.
        weights: which of the inputs are weights.
        dependent: whether it is launched before the one before it has ended, for up to
            `FEW_ROWS` rows. What follows a kernel that lets nobody in early is faster without:
            9.4 us in place of 10.2 for the output projection of Llama-3-8B behind its attention.
    """

    def __init__(
        self, build: Callable[..., Any], weights: tuple[int, ...], dependent: bool = True
    ) -> None:
        self._build, self._weights, self._dependent = build, weights, dependent
        self._kernels: dict[Any, cs.Kernel] = {}

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run it."""
        key = tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key not in self._kernels:
            g = cs.new_kernel_graph()
            inputs = [
                g.new_input(tuple(t.shape), dtype=t.dtype, constant=i in self._weights)
                for i, t in enumerate(tensors)
            ]
            g.mark_output(self._build(g, *inputs))
            dependent = self._dependent and len(tensors[0]) <= FEW_ROWS
            self._kernels[key] = g.superoptimize(dependent_launch=dependent)
        return self._kernels[key](*tensors)


def times(g: Any, x: Any, weight: Any) -> Any:
    """In a kernel graph, x by a weight as nn.Linear has it."""
    return g.matmul(x, g.transpose(weight))
