"""Sizes and costs shared by all skeletons; costs in microseconds.

`additive_price` knows no sizes: it ranks programs while they are extracted. A skeleton's own model
knows the sizes and ranks sized programs. The aim is the right order, not the right number: on one
H200 the candidates of 24 cases come out within 5% in the mean. Constants stand with the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any

from cutesuper.egraph.extract import Price
from cutesuper.egraph.saturate import Derivation, Table
from cutesuper.ir.block import (
    ENDING,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    TensorSpec,
)
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.ir.operators.base import CONSTANT, facets
from cutesuper.targets import Target

#: rows of a block while sizes are unknown
NOMINAL_TILE = 64
#: fewest stages of a mainloop
MIN_STAGES = 3
#: barriers, row scalars
RESERVED_BYTES = 4096

#: instructions from which on an operator is a special function, whose unit is apart from the lanes
SPECIAL = 4


@dataclass(frozen=True)
class Cost:
    """Microseconds by cause; ``total`` is not their sum (memory and arithmetic overlap)."""

    total: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Sized:
    """A structure with extents, and its predicted cost."""

    program: BlockProgram
    cost: Cost


@dataclass(frozen=True)
class Setting:
    """The inputs of sizing and planning besides the program: GPU, tensors, kind of launch.

    Attributes:
        target: the GPU.
        tensors: every tensor that the program reads or writes, by name.
        dependent_launch: kernels are launched before their predecessor has ended.
    """

    target: Target
    tensors: dict[str, TensorSpec]
    dependent_launch: bool = False

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element of every tensor, by name."""
        return {name: t.dtype.itemsize for name, t in self.tensors.items()}

    def beside(self, tensors: Mapping[str, TensorSpec]) -> Setting:
        """The same with more tensors."""
        return replace(self, tensors={**self.tensors, **tensors})


def additive_price(table: Table, staged: str | None, target: Target, itemsize: int) -> Price:
    """Cost of one derivation while sizes are unknown; see `egraph.extract`.

    A value that lacks a grid label is computed again by every block along it: a prologue on
    ``X[M, K]`` is paid once for each block of columns, a division of ``[M, N]`` only once.

    Args:
        table: the saturated classes.
        staged: the label of operands that pass through registers on their way to a product.
        target: the device.
        itemsize: bytes per element of loaded tensors.
    """
    dims = table.space.program.dims
    rate = target.rates.lanes_per_us * target.sms

    def elements(labels: frozenset[str]) -> float:
        own = prod(extent(dims[x]) for x in labels)
        again = prod(
            max(1.0, extent(dims[a.dim]) / NOMINAL_TILE)
            for a in table.split.axes
            if a.kind == AxisKind.GRID and a.dim not in labels
        )
        return own * again

    def cost(i: int, d: Derivation) -> float:
        labels = table.classes[i].labels
        if d.kind == CONSTANT:
            return 0.0
        if d.kind == LOAD:
            return prod(extent(dims[x]) for x in labels) * itemsize / target.bandwidth * 1e6
        over = extent(dims[d.over]) if d.over in dims else 1
        if facets(d.kind).contracts:
            return 2.0 * elements(labels) * over / target.tensor_flops * 1e6
        if staged is not None and staged in labels:
            over = 2  # a prologue: operands pass through registers on their way
        return max(1e-4, elements(labels) * over * target.rates.instructions.get(d.kind, 1) / rate)

    return cost


def bytes_moved(program: BlockProgram, itemsizes: dict[str, int]) -> float:
    """Bytes that device memory must read and write: each tensor once."""
    tensors = {
        op.attributes["tensor"]: prod(
            extent(program.dims[x]) for x in op.attributes["map"] if x in program.dims
        )
        for op in program.ops
        if op.kind in (LOAD, STORE)
    }
    return sum(n * itemsizes[t] for t, n in tensors.items())


def overlapped(exponent: float, *us: Any) -> Any:
    """Time of work that overlaps only in part: the longest time, and somewhat more.

    before: 12 us of memory, 5 us of arithmetic; after, with exponent 4: 12.1. Two equal ones of 12
    take 14.3.
    """
    if exponent == inf:
        return max(us)
    return sum(x**exponent for x in us) ** (1 / exponent)


def computes(op: BlockOp) -> bool:
    """True if an operation does arithmetic."""
    return op.kind not in (LOAD, STORE, CONSTANT, *ENDING) and not op.facets.contracts


def instructions(program: BlockProgram, op: BlockOp, target: Target) -> float:
    """Instructions per element; a value of the row divides through its reciprocal."""
    if op.facets.divides and len(program.ops[op.inputs[1]].dims) < len(op.dims):
        return 1.0
    return target.rates.instructions.get(op.kind, 1)


def resize(
    structure: BlockProgram, tile: dict[str, int], inner: Mapping[str, int | None]
) -> BlockProgram:
    """A structure with these tiles and extents of axes, by name.
    The extent is None for a loop over a symbolic extent; all other grid axes cover the rest."""
    axes: list[Axis] = []
    for a in structure.axes:
        if a.kind != AxisKind.GRID or a.name in inner:
            axes.append(Axis(a.dim, a.kind, inner[a.name]))
        else:
            dim = structure.dims[a.dim]
            blocks = None if isinstance(dim, Symbol) else ceil_div(dim, tile[a.dim])
            axes.append(Axis(a.dim, a.kind, blocks))
    return structure.at(tuple(axes), tile)


def cheapest(sizes: Iterable[Sized], keep: int) -> list[Sized]:
    """The cheapest sizes, cheapest first; among equal costs the first ones."""
    return sorted(sizes, key=lambda s: s.cost.total)[:keep]


def describe(program: BlockProgram) -> str:
    """Axes and tile on one line."""
    tile = " ".join(f"{d}={t}" for d, t in program.tile.items())
    axes = " ".join(str(a) for a in program.axes if a.extent != 1)
    return f"{axes or 'one block'}, tile {tile}"
