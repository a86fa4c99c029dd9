"""Kernel graphs as functions of tensors, which is how the examples have fused products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import cutesuper as cs


class Fused:
    """A kernel graph that is made, searched and compiled for the shapes of a call.

    Each is launched before the one before it has ended, and lets the next one in. Weights are
    constant: they are loaded while the kernel before is still running.

    Args:
        build: `build(graph, *inputs)` returns the result.
        weights: which of the inputs are weights.
    """

    def __init__(self, build: Callable[..., Any], weights: tuple[int, ...] = ()) -> None:
        self._build, self._weights = build, weights
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
            self._kernels[key] = g.superoptimize(dependent_launch=True)
        return self._kernels[key](*tensors)


def times(g: Any, x: Any, weight: Any) -> Any:
    """The product, in a kernel graph, of x and a weight as nn.Linear has it."""
    return g.matmul(x, g.transpose(weight))
