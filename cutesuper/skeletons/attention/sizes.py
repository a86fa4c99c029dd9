"""Extents for structures of two chained products.

before: ``softmax(Q K) V`` with the keys N divided by grid, cluster and loop; after, for one token,
32 query heads on 8 heads of K and V, and 4096 keys on an H200: tile M=4 N=64, ``B.grid(8)
N.cluster(8) N.loop(8)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.skeletons.attention.cost import (
    MAX_REGISTERS,
    WARPGROUP_ROWS,
    AttentionModel,
    AttentionSize,
)
from cutesuper.skeletons.attention.form import AttentionForm
from cutesuper.skeletons.cost import Cost

#: rows of a block: those of one warpgroup, and of two
ROWS = (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS)
KEYS = (64, 128)
CLUSTERS = (2, 4, 8)
#: blocks beyond which the grid does not divide keys any further, in waves of the device
MOST_WAVES = 2


def attention_sizes(
    structure: BlockProgram,
    form: AttentionForm,
    model: AttentionModel,
    pruned: Counter[str],
) -> Iterator[tuple[BlockProgram, Cost]]:
    """All sizes worth pricing, with their costs.

    Args:
        structure: a block program of the form, with any extents.
        form: labels of the structure.
        model: the cost model of the structure.
        pruned: counts rejected sizes, by reason.
    """
    for size in _candidates(structure, form, model):
        if model.registers(size) > MAX_REGISTERS:
            pruned["accumulators exceed the registers"] += 1
        elif model.shared_bytes(size) > model.target.shared_bytes:
            pruned["stages exceed the shared memory"] += 1
        else:
            yield _resized(structure, form, model, size), model.cost(size)


def _candidates(
    structure: BlockProgram, form: AttentionForm, model: AttentionModel
) -> Iterator[AttentionSize]:
    axes = {a.kind for a in structure.axes_of(form.keys)}
    for rows, held in row_tiles([structure.dims[d] for d in form.rows]):
        for keys in KEYS:
            for cluster in CLUSTERS if AxisKind.CLUSTER in axes else (1,):
                one = AttentionSize(rows, held, keys, cluster, 1)
                if AxisKind.GRID not in axes:
                    yield from [one] if model.loop(one) > 1 or cluster == 1 else []
                else:
                    yield from _divided(model, one)


def row_tiles(extents: list[Dim]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Tiles of the row labels, and the rows that warpgroups compute for them.

    Short labels are held whole, and one is divided to fill the rows: for 7 heads and 512 positions,
    7 x 9 are 63 of 64 rows. A symbolic label counts with its hint.
    """
    whole = prod(extent(n) for n in extents)
    for held in ROWS:
        if held > ROWS[0] and whole <= held // 2:
            return
        left, tiles = held, dict[int, int]()
        for k in sorted(range(len(extents)), key=lambda k: extent(extents[k])):
            tiles[k] = min(extent(extents[k]), left)
            left //= tiles[k]
        yield tuple(tiles[k] for k in range(len(extents))), held


def _divided(model: AttentionModel, one: AttentionSize) -> Iterator[AttentionSize]:
    """The size with a grid over the keys: for every length of the loop the fewest parts."""
    whole, target = model.loop(one), model.target
    most = MOST_WAVES * target.sms // max(1, model.tiles(one) * one.cluster)
    known = set[int]()
    for parts in range(2, min(most, whole) + 1):
        loop = ceil_div(whole, parts)
        if loop not in known:
            known.add(loop)
            yield AttentionSize(one.rows, one.held, one.keys, one.cluster, parts)


def _resized(
    structure: BlockProgram, form: AttentionForm, model: AttentionModel, size: AttentionSize
) -> BlockProgram:
    rows = dict(zip(form.rows, size.rows, strict=True))
    tile: dict[str, int] = {}
    for d in structure.dims:
        whole = d in (form.inner, form.columns)
        tile[d] = model.dims[d] if whole else size.keys if d == form.keys else rows.get(d, 1)
    extents: dict[str, int | None] = {}
    for a in structure.axes:
        if a.dim == form.keys:
            own = {AxisKind.GRID: size.grid, AxisKind.CLUSTER: size.cluster}
            extents[a.name] = own.get(a.kind, model.loop(size))
        else:
            dim = structure.dims[a.dim]
            opened = isinstance(dim, Symbol)
            extents[a.name] = None if opened else ceil_div(dim, tile[a.dim])
    return structure.resized(structure.dims, extents, tile)
