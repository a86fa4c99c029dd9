"""Kernels with fewer blocks and iterations, for checks whose time grows with both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from cutesuper.ir.block import (
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    TensorSpec,
    mapped_labels,
)
from cutesuper.ir.dims import Dim, extent

NONE: Mapping[str, int] = MappingProxyType({})
#: most parts of an axis beside those of the grid; clusters stay whole
PARTS = {AxisKind.PERSISTENT: 2, AxisKind.LOOP: 2}


def shrunk(
    step: KernelStep,
    tensors: Mapping[str, TensorSpec],
    parts: int = 2,
    beside: Mapping[str, int] = NONE,
) -> tuple[KernelStep, dict[str, TensorSpec]]:
    """The same tiles, clusters and operations over at most `PARTS` of each axis.

    What a tile reaches past the end of a label stays; a label that a table of pages or an index
    divides keeps its extent, as what they read from does. Symbols count with their hint.

    Args:
        step: the kernel.
        tensors: of its muGraph.
        parts: most parts of the grid along one label, the first that it divides; one along others.
        beside: tiles of a part by label, where blocks share what tiles beside each other read.
    """
    program = _smaller(step.program, _most(step.program, parts, beside))
    shapes = {
        op.attributes["tensor"]: _shape(op, program)
        for op in (*program.loads(), *program.stores())
        if not (op.gathering or op.puts)
    }
    fitted = {n: replace(t, shape=shapes.get(n, t.shape)) for n, t in tensors.items()}
    return replace(step, program=program), fitted


def _most(program: BlockProgram, parts: int, beside: Mapping[str, int]) -> dict[str, int]:
    """Most parts of every axis, by its name."""
    most = {a.name: min(program.parts(a), PARTS.get(a.kind, 1 << 30)) for a in program.axes}
    grid = {a.name: a.dim for a in program.of_kind(AxisKind.GRID)}
    most |= {name: beside.get(label, 1) for name, label in grid.items()}
    split = [a.name for a in program.of_kind(AxisKind.GRID) if program.parts(a) > 1]
    # another label, if the grid divides one
    for name in sorted(split, key=lambda n: grid[n] in beside)[:1]:
        most[name] *= parts
    return {a.name: min(program.parts(a), most[a.name]) for a in program.axes}


def _smaller(program: BlockProgram, most: Mapping[str, int]) -> BlockProgram:
    kept = {d for op in program.ops if op.gathering or op.puts for d in op.dims}
    parts = {a.name: program.parts(a) if a.dim in kept else most[a.name] for a in program.axes}
    dims: dict[str, Dim] = {}
    for d, whole in program.dims.items():
        axes = program.axes_of(d)
        less = prod(program.parts(a) for a in axes) - prod(parts[a.name] for a in axes)
        dims[d] = max(1, extent(whole) - less * program.tile[d])
    return program.resized(dims, parts, program.tile)


def _shape(op: BlockOp, program: BlockProgram) -> tuple[Dim, ...]:
    """The shape of what it loads or stores: products of labels, or parts of an axis."""
    sizes = {d: extent(n) for d, n in program.dims.items()}
    sizes |= {a.name: program.parts(a) for a in program.axes}
    return tuple(prod(sizes[d] for d in mapped_labels(entry)) for entry in op.attributes["map"])
