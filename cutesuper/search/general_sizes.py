"""Sizes of block programs of any form: all extents of a structure as arrays, priced at once.

A structure has about a thousand possible sizes. Bytes, registers, instructions and waves are
products of extents, so one NumPy operation gives them for all candidates; 2,000 candidates of an
attention program take 3 ms.

before: ``acc_S(exp(Q K) V) / acc_S(sum exp(Q K))`` with S split over a cluster and a loop; after:
tile B=1 M=128 S=64, B.grid(2) M.grid(2) S.cluster(8) S.loop(8).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.ir.block import Axis, AxisKind, BlockProgram
from cutesuper.ir.check import ValueState, check_block_program, pass_of
from cutesuper.ir.dims import Symbol, extent
from cutesuper.targets import Target

Numbers = NDArray[np.int64]

#: tiles of the dimensions of matrix products; whole 128-byte lines of 16-bit elements
MATRIX_TILES = (16, 64, 128, 256)
#: tiles of a contracted dimension that a loop walks over
INNER_TILES = (64, 128)
#: tiles of a dimension that only element-wise operators and plain reductions use
ROW_TILES = (1, 2, 4, 8, 16)
#: strips of a long dimension in such programs
STRIPS = (1024, 4096)
CLUSTERS = (2, 4, 8)
#: numbers of parts into which the grid may divide a reduced dimension
GRID_PARTS = (2, 4, 8, 16, 32, 64)
#: most sizes of one structure
MAX_SIZES = 6000


@dataclass(frozen=True)
class Sizes:
    """Candidate extents of a structure, one array element for each candidate.

    Attributes:
        tile: tile of every label.
        parts: extent of every axis by name.
    """

    tile: dict[str, Numbers]
    parts: dict[str, Numbers]

    def where(self, keep: NDArray[Any]) -> Sizes:
        """The candidates that ``keep`` selects."""
        return Sizes(
            {d: n[keep] for d, n in self.tile.items()}, {a: n[keep] for a, n in self.parts.items()}
        )

    @property
    def count(self) -> int:
        """Number of candidates."""
        return len(next(iter(self.tile.values()), np.zeros(0)))

    def elements(self, dims: tuple[str, ...]) -> Numbers:
        """Number of elements of a tile with these labels."""
        return _product([self.tile[d] for d in dims], self.count)

    def times(self, axes: list[str]) -> Numbers:
        """Product of the extents of axes."""
        return _product([self.parts[a] for a in axes], self.count)

    def program(self, structure: BlockProgram, i: int) -> BlockProgram:
        """The structure at the extents of candidate ``i``."""
        tile = {d: int(n[i]) for d, n in self.tile.items()}
        extents: dict[str, Any] = {}
        for a in structure.axes:
            opened = a.kind == AxisKind.GRID and isinstance(structure.dims[a.dim], Symbol)
            extents[a.name] = None if opened else int(self.parts[a.name][i])
        return structure.resized(dict(structure.dims), extents, tile)


def _product(factors: list[Numbers], count: int) -> Numbers:
    total = np.ones(count, dtype=np.int64)
    for f in factors:
        total = total * f
    return total


@dataclass(frozen=True)
class Product:
    """A contraction: the labels of rows, of columns, and those that both operands share."""

    rows: frozenset[str]
    columns: frozenset[str]
    over: str


class Shape:
    """Properties of a structure that extents do not change: roles of labels, states of values.

    Args:
        structure: a legal block program.
    """

    def __init__(self, structure: BlockProgram) -> None:
        self.structure = structure
        self.states: list[ValueState] = check_block_program(structure)
        ops = structure.ops
        self.products: dict[int, Product] = {}
        for i, op in enumerate(ops):
            if op.facets.contracts:
                a, b = (set(ops[j].dims) for j in op.inputs)
                over = op.attributes["over"]
                self.products[i] = Product(frozenset(a - b), frozenset(b - a), over)
        self.matrix = self._matrix_labels()
        self.reduced = {op.attributes["over"] for op in ops if "over" in op.attributes}
        self.runs = self._runs()

    def _matrix_labels(self) -> set[str]:
        """Labels that the tensor cores tile; of several row labels (batches) the innermost."""
        found: set[str] = set()
        for p in self.products.values():
            found.add(p.over)
            for side in (p.rows, p.columns):
                ordered = [d for d in self.structure.dims if d in side]
                found |= set(ordered[-1:])
        return found

    def _runs(self) -> list[int]:
        """Number of passes of the loop in which each operation is needed; 1 outside of loops."""
        ops, loops = self.structure.ops, self.structure.of_kind(AxisKind.LOOP)
        if not loops:
            return [1] * len(ops)
        loop = loops[0].name
        needed: list[set[int]] = [set() for _ in ops]
        for i in reversed(range(len(ops))):
            state = self.states[i]
            for j in ops[i].inputs:
                if loop not in self.states[j].inside:
                    continue
                if loop in state.inside:
                    needed[j] |= needed[i] or {pass_of(state, loop)}
                else:
                    needed[j].add(pass_of(self.states[j], loop))
        return [max(1, len(n)) for n in needed]

    def iterated(self, i: int) -> list[str]:
        """Loop and persistent axes inside which operation i runs."""
        return sorted(self.states[i].inside)


def candidates(shape: Shape, target: Target) -> Sizes:
    """All extents worth pricing, at most `MAX_SIZES`."""
    structure = shape.structure
    inner = {a.name: _parts(shape, a) for a in structure.axes if _is_chosen(shape, a)}
    # if all axes are chosen, the tile has no choice left
    derived = [
        d
        for d in structure.dims
        if (axes := structure.axes_of(d)) and all(a.name in inner for a in axes)
    ]
    tiles = {d: [1] if d in derived else _tiles(shape, d) for d in structure.dims}
    names = [*tiles, *inner]
    options = [*tiles.values(), *inner.values()]
    while np.prod([float(len(o)) for o in options]) > MAX_SIZES:
        longest = max(range(len(options)), key=lambda k: len(options[k]))
        options[longest] = options[longest][:-1]
    table = np.array(list(product(*options)), dtype=np.int64).reshape(-1, len(names))
    columns = {n: table[:, k] for k, n in enumerate(names)}
    for d in derived:
        left = np.full(len(table), extent(structure.dims[d]))
        for a in structure.axes_of(d):
            left = -(-left // columns[a.name])
        columns[d] = left
    sizes = Sizes({d: columns[d] for d in tiles}, {a: columns[a] for a in inner})
    return _covered(shape, sizes, target)


def _is_chosen(shape: Shape, axis: Axis) -> bool:
    """True if an axis's extent is a choice, not the number of tiles needed to cover a label."""
    if axis.kind == AxisKind.CLUSTER:
        return True
    stored = any(axis.dim in op.attributes["map"] for op in shape.structure.stores())
    return axis.kind == AxisKind.GRID and axis.dim in shape.reduced and not stored


def _tiles(shape: Shape, label: str) -> list[int]:
    structure = shape.structure
    whole = extent(structure.dims[label])
    kinds = {a.kind for a in structure.axes_of(label)}
    if not kinds:
        return [whole]
    if label in shape.matrix:
        inner = AxisKind.LOOP in kinds and label in shape.reduced
        return _fitting(INNER_TILES if inner else MATRIX_TILES, whole)
    if label in shape.reduced:
        if AxisKind.LOOP in kinds and whole <= INNER_TILES[0]:
            return [t for t in ROW_TILES if t < whole] + [whole]
        if AxisKind.LOOP in kinds or AxisKind.PERSISTENT not in kinds:
            return _fitting(STRIPS if not shape.products else INNER_TILES, whole)
        return [t for t in ROW_TILES if t < 2 * whole]
    if shape.products:
        return [1]
    last = list(structure.dims)[-1] == label
    return _fitting(STRIPS, whole) if last else [t for t in ROW_TILES if t < 2 * whole]


def _fitting(tiles: tuple[int, ...], whole: int) -> list[int]:
    """The tiles up to the first that covers the dimension; a small dimension gets a single tile."""
    below = [t for t in tiles if t < whole]
    if len(below) == len(tiles):
        return below
    # the next power of two covers it, and no more padding than that is computed
    return [*below, min(tiles[len(below)], max(8, 1 << (whole - 1).bit_length()))]


def _parts(shape: Shape, axis: Axis) -> list[int]:
    whole = extent(shape.structure.dims[axis.dim])
    options = CLUSTERS if axis.kind == AxisKind.CLUSTER else GRID_PARTS
    return [n for n in options if n * 8 <= whole] or [options[0]]


def _covered(shape: Shape, sizes: Sizes, target: Target) -> Sizes:
    """Add the extents of the other axes, so that axes and tiles cover every label."""
    structure = shape.structure
    parts = dict(sizes.parts)
    blocks = np.ones(sizes.count, dtype=np.int64)
    persistent = None
    for d, dim in structure.dims.items():
        axes = structure.axes_of(d)
        left = -(-extent(dim) // sizes.tile[d])
        for a in axes:
            if a.name in parts:
                left = -(-left // parts[a.name])
        open_ = [a for a in axes if a.name not in parts]
        kinds = {a.kind for a in open_}
        if AxisKind.PERSISTENT in kinds and AxisKind.GRID in kinds:
            persistent = (d, left)
            continue
        for a in open_:
            parts[a.name] = left
            blocks = blocks * left if a.kind == AxisKind.GRID else blocks
    if persistent is not None:
        d, left = persistent
        # two blocks on every SM visit all tiles
        grid = np.minimum(left, np.maximum(1, 2 * target.sms // blocks))
        parts[f"{d}.grid"], parts[f"{d}.persistent"] = grid, -(-left // grid)
    found = Sizes(sizes.tile, parts)
    fits = np.ones(sizes.count, dtype=bool)
    for d, dim in structure.dims.items():
        # no part of a cluster or grid axis may be without elements
        inner = found.tile[d] * found.times([a.name for a in structure.axes_of(d)][1:])
        outer = found.times([a.name for a in structure.axes_of(d)][:1])
        fits &= (outer - 1) * inner < extent(dim)
    return found.where(fits)
