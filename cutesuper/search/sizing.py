"""Sizing: extents of tiles and axes for a structure, under what the device and the lowering allow.

before: ``acc_K(X W) / sqrt(..)`` with K split over a cluster and a loop; after, for
``[16, 4096] @ [4096, 4096]`` on an H200: tile M=16 N=64 K=128, N.grid(64) K.cluster(2) K.loop(16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cutesuper.ir.block import Axis, AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.search.forms import MatmulForm, RowForm
from cutesuper.skeletons.attention.cost import ChainedModel
from cutesuper.skeletons.attention.form import ChainedForm
from cutesuper.skeletons.attention.sizes import chained_sizes
from cutesuper.skeletons.matmul.cost import (
    Cost,
    accumulators,
    column_blocks,
    fixed_bytes,
    matmul_cost,
    padded,
    stage_bytes,
    tile_bytes,
    vector_accumulators,
)
from cutesuper.skeletons.matmul.shift import MAX_SHIFTED_ROWS, find_shift
from cutesuper.skeletons.rows.cost import row_cost
from cutesuper.skeletons.rows.loop_form import PersistentForm
from cutesuper.skeletons.rows.loop_sizes import cluster_sizes, persistent_sizes
from cutesuper.targets import Target

SMALL_ROWS = (8, 16, 32, 64)
#: of equal costs the first one wins: 4096x4096x4096 takes 209.0 us with 128x256 tiles and 218.2
#: with 256x128 ones, whose statistics need twice as long; without statistics 215.3 and 214.1
LARGE_ROWS = (128, 256, 64)
#: whole 128-byte lines of 16-bit elements: 96 columns (64 + 32) ran 15.4 us where 128 ran 14.2
COLUMNS = (64, 128, 192, 256)
INNER = (64, 128, 256)
CLUSTERS = (1, 2, 4, 8)
MIN_STAGES = 3
#: fp32 accumulators of one block: 256 x 128 over two warpgroups are 128 registers of each thread
MAX_ACCUMULATORS = 256 * 128
#: accumulators that one warpgroup holds (96 registers of each thread); with more, two warpgroups
#: share the columns, in blocks of 64
ONE_WARPGROUP = 96 * 128
#: barriers, row scalars
RESERVED_BYTES = 4096
ROWS_PER_BLOCK = (1, 2, 4, 8, 16)
#: elements of the last dimension that a block of an element-wise program takes at most
MAX_STRIP = 8192
#: elements of a tile of an element-wise program, at least where the tensor has as many
MIN_STRIP = 1024


@dataclass(frozen=True)
class Sized:
    """A structure with extents, and what it is expected to cost."""

    program: BlockProgram
    cost: Cost


def sized(
    structure: BlockProgram,
    form: MatmulForm | ChainedForm | RowForm | PersistentForm,
    target: Target,
    itemsizes: dict[str, int],
    keep: int,
    pruned: Counter[str],
    dependent_launch: bool = False,
) -> list[Sized]:
    """The best extents for a structure, cheapest first.

    Args:
        structure: a block program with any extents.
        form: how it will be lowered.
        target: the device.
        itemsizes: bytes per element of every tensor of the program.
        keep: how many to return.
        pruned: counts what was left out, by reason.
        dependent_launch: see `search.region.SearchOptions`; only chained products are priced by it.
    """
    if isinstance(form, MatmulForm):
        found = _matmul_sizes(structure, form, target, itemsizes, pruned)
    elif isinstance(form, ChainedForm):
        model = ChainedModel(structure, form, target, itemsizes, dependent_launch)
        found = (Sized(*s) for s in chained_sizes(structure, form, model, pruned))
    elif isinstance(form, PersistentForm):
        sizes = persistent_sizes(structure, form, target, itemsizes, pruned)
        found = (Sized(*s) for s in sizes)
    elif form.clustered:
        found = (Sized(*s) for s in cluster_sizes(structure, form.row, target, itemsizes, pruned))
    else:
        found = _row_sizes(structure, form, target, itemsizes, pruned)
    return sorted(found, key=lambda s: s.cost.total)[:keep]


def _resize(structure: BlockProgram, tile: dict[str, int], inner: dict[str, int]) -> BlockProgram:
    """Tiles and the extents of cluster and loop axes; grid axes cover the rest."""
    axes: list[Axis] = []
    for a in structure.axes:
        if a.kind != AxisKind.GRID:
            axes.append(replace(a, extent=inner[a.name]))
        else:
            dim = structure.dims[a.dim]
            blocks = None if isinstance(dim, Symbol) else ceil_div(dim, tile[a.dim])
            axes.append(replace(a, extent=blocks))
    return replace(structure, axes=tuple(axes), tile=tile)


# -------------------------------------------------------------------------------------- products


def row_tiles(rows: int) -> tuple[int, ...]:
    """Row tiles worth trying: the smallest that covers few rows, the large ones for many."""
    if rows > SMALL_ROWS[-1]:
        return LARGE_ROWS
    return (next(t for t in SMALL_ROWS if t >= rows),)


def _matmul_sizes(
    structure: BlockProgram,
    form: MatmulForm,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[Sized]:
    shifted = form.vectors and find_shift(structure, form.row, form.column, form.contracted)
    for tile, cluster in _matmul_tiles(structure, form):
        if shifted and tile[form.row] > MAX_SHIFTED_ROWS:
            pruned["too many rows to be shifted"] += 1
            continue
        parts = 1 if form.reduced else cluster  # of the contracted label
        loop = ceil_div(extent(structure.dims[form.contracted]), parts * tile[form.contracted])
        inner = {f"{form.contracted}.loop": loop, f"{form.contracted}.cluster": cluster,
                 f"{form.column}.cluster": cluster}
        program = _resize(structure, tile, inner)
        odd = any(b % 2 for b in column_blocks(program, form))
        held = accumulators(program, form)
        vectors = vector_accumulators(program, form)
        if held > MAX_ACCUMULATORS or (odd and held + vectors > ONE_WARPGROUP):
            pruned["accumulators exceed the registers"] += 1
            continue
        if _matmul_bytes(program, form, itemsizes) > target.shared_bytes:
            pruned["stages exceed the shared memory"] += 1
            continue
        yield Sized(program, matmul_cost(program, form, target, itemsizes))


def _matmul_tiles(
    structure: BlockProgram, form: MatmulForm
) -> Iterator[tuple[dict[str, int], int]]:
    """Tiles and cluster sizes; a cluster splits whole K tiles, and into at least two parts."""
    split = bool(structure.of_kind(AxisKind.CLUSTER))
    k, n = (extent(structure.dims[d]) for d in (form.contracted, form.column))
    hidden = {d: extent(structure.dims[d]) for d in form.hidden}
    rows = extent(structure.dims[form.row])
    for row in _row_choices(form, rows, sum(map(padded, hidden.values()))):
        for columns in COLUMNS:
            for inner in INNER:
                tile = {
                    **dict.fromkeys(form.batch, 1), **hidden,
                    form.row: row, form.column: columns, form.contracted: inner,
                }
                for cluster in CLUSTERS[1:] if split else CLUSTERS[:1]:
                    if form.reduced:
                        whole = ceil_div(n, columns) == cluster
                    else:
                        whole = ceil_div(k, inner) % cluster == 0
                    if whole:
                        yield {d: tile[d] for d in structure.dims}, cluster


def _row_choices(form: MatmulForm, rows: int, between: int) -> tuple[int, ...]:
    """Row tiles for a form with ``between`` columns between two products.

    What has no columns to divide is divided by its rows, and so are many rows whose products go on.
    Few rows are not if a warpgroup holds them: weights would be read again (16 rows of LoRA
    16x256x4096 in one tile take 3.2 us, 8 and 8 3.75).
    """
    if not form.reduced and not form.hidden:
        return row_tiles(rows)
    covering = row_tiles(rows)[0]
    held = covering * (between + COLUMNS[0])
    few = not form.reduced and rows <= SMALL_ROWS[-1] and held <= ONE_WARPGROUP
    return (covering,) if few else every_row_tile(rows)


def every_row_tile(rows: int) -> tuple[int, ...]:
    """All row tiles up to the smallest that covers the rows."""
    tiles = (*SMALL_ROWS, *reversed(LARGE_ROWS[:-1]))
    return tuple(t for n, t in enumerate(tiles) if n == 0 or tiles[n - 1] < rows)


def _matmul_bytes(program: BlockProgram, form: MatmulForm, itemsizes: dict[str, int]) -> int:
    """Shared memory with the least number of stages."""
    return MIN_STAGES * stage_bytes(program, form, itemsizes) + fixed_bytes(program, form)


# ------------------------------------------------------------------------------------------ rows


def _row_sizes(
    structure: BlockProgram,
    form: RowForm,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[Sized]:
    for tile in _row_tiles(structure, form):
        program = _resize(structure, tile, {})
        held = sum(tile_bytes(program, op, itemsizes) for op in program.loads())
        if held + RESERVED_BYTES > target.shared_bytes:
            pruned["rows exceed the shared memory"] += 1
            continue
        yield Sized(program, row_cost(program, target, itemsizes))


def _row_tiles(structure: BlockProgram, form: RowForm) -> Iterator[dict[str, int]]:
    """The last label whole or in strips, some rows of the one before it."""
    others = [d for d in structure.dims if d != form.row]
    ones = dict.fromkeys(others, 1)
    for strip in _strips(structure, form):
        width = {form.row: strip}
        yield {d: (ones | width)[d] for d in structure.dims}
        for rows in ROWS_PER_BLOCK[1:]:
            if others and rows <= 2 * extent(structure.dims[others[-1]]) - 1:
                tile = ones | {others[-1]: rows} | width
                yield {d: tile[d] for d in structure.dims}


def _strips(structure: BlockProgram, form: RowForm) -> tuple[int, ...]:
    whole = extent(structure.dims[form.row])
    if form.reduced:
        return (whole,)
    strips = [s for s in (MIN_STRIP, 2 * MIN_STRIP, 4 * MIN_STRIP, MAX_STRIP) if s < whole]
    return (*strips, whole) if whole <= MAX_STRIP else tuple(strips)


def describe(program: BlockProgram) -> str:
    """Axes and tile on one line."""
    tile = " ".join(f"{d}={t}" for d, t in program.tile.items())
    axes = " ".join(str(a) for a in program.axes if a.extent != 1)
    return f"{axes or 'one block'}, tile {tile}"
