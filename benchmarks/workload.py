"""Workloads: a computation with the tensors, shapes and definitions to measure it by.

A workload defines its tensors, the computation in PyTorch (the peer) and in float64 (the judge),
the same program for cutesuper, and the least bytes and operations. Shapes are plain tuples of
extents; ``Workload.axes`` names them. The workloads themselves are in `workloads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

Shape = tuple[int, ...]
Outputs = tuple[torch.Tensor, ...]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HALVES = ("float16", "bfloat16")
EPS = 1e-6


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a workload.

    Values are drawn from a normal distribution of this ``mean`` and ``std``. ``constant`` marks
    tensors that no kernel writes while they are in use (weights). ``rows`` marks a first dimension
    whose rows are independent, so that a subset of them can be checked. ``values`` replace drawn
    ones, row by row, and make the tensor int32 (lengths, tables). ``moved`` is the part of it that
    must be read or written.

    Attributes:
        dtype: if it is not that of the workload.
        fill: makes the values instead: ``fill(generator, dims)``.
        summed: an output that is a sum over the rows (the gradient of a weight): its reference is
            added up from all rows, whereas only some rows of outputs with ``rows`` are computed.
        wider: an output that may also be float32.
    """

    name: str
    dims: Shape
    mean: float = 0.0
    std: float = 1.0
    constant: bool = False
    rows: bool = False
    values: tuple[int, ...] | None = None
    moved: float = 1.0
    dtype: torch.dtype | None = None
    fill: Callable[[torch.Generator, Shape], torch.Tensor] | None = None
    summed: bool = False
    wider: bool = False

    def element(self, dtype: torch.dtype) -> torch.dtype:
        """The tensor's element type in a workload of ``dtype``."""
        return self.dtype or (dtype if self.values is None else torch.int32)

    def size(self, dtype: torch.dtype) -> int:
        """Bytes of the tensor."""
        return prod(self.dims) * self.element(dtype).itemsize


Specs = Callable[[Shape], tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class Computation:
    """One function in two precisions: as PyTorch users write it, and the float64 definition.

    Both take the workload's inputs in order; ``reference`` gets float64 tensors, of which those
    with ``rows`` may hold only some rows. Both return the outputs as a tuple.

    Attributes:
        into: as ``eager``, plus ``out=(tensors to write)``.
        outputs: if they are not the workload's (two products whose results the rest combines);
            ``into`` is not possible then.
    """

    eager: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    into: Callable[..., Outputs] | None = None
    outputs: Specs | None = None


@dataclass(frozen=True)
class Workload:
    """A named computation with the shapes it is measured at.

    ``computations`` has at least ``"full"``; other entries are parts of it (``"matmul"``: the
    matrix products alone) that show the cost of the rest. ``graph(cs, shape, dtype name)`` builds
    the program with the cutesuper module ``cs``.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    inputs: Specs
    outputs: Specs
    computations: dict[str, Computation]
    flops: Callable[[Shape], int]
    graph: Callable[[ModuleType, Shape, str], Any]

    def outputs_of(self, computation: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """The outputs of ``computations[computation]``."""
        return (self.computations[computation].outputs or self.outputs)(shape)

    def bytes_moved(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes that must cross device memory: every input read once, every output written once."""
        specs = (*self.inputs(shape), *self.outputs(shape))
        return sum(round(spec.size(dtype) * spec.moved) for spec in specs)

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


def norm64(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + EPS)`` by its definition, for float64."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def layer_norm_program(g: Any, x: Any, gain: Any, bias: Any) -> Any:
    """LayerNorm over the last dimension in a kernel graph."""
    centred = g.sub(x, g.mean(x, -1))
    scale = g.rsqrt(g.add(g.mean(g.square(centred), -1), EPS))
    return g.add(g.mul(g.mul(centred, scale), gain), bias)


def build(
    cs: ModuleType, specs: Sequence[TensorSpec], dtype: str, program: Callable[..., Any]
) -> Any:
    """The kernel graph of ``program(graph, *inputs)``, which returns the only output."""
    graph = cs.new_kernel_graph()
    tensors = [
        graph.new_input(
            spec.dims,
            dtype=getattr(cs, dtype if spec.values is None else "int32"),
            name=spec.name,
            constant=spec.constant,
        )
        for spec in specs
    ]
    graph.mark_output(program(graph, *tensors))
    return graph
