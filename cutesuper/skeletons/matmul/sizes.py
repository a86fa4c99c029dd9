"""Extents of tiles and axes for matmul-loop structures.

before: ``acc_K(X W) / sqrt(..)`` with K split over a cluster and a loop; after, for
``[16, 4096] @ [4096, 4096]`` on an H200: tile M=16 N=64 K=128, N.grid(64) K.cluster(2) K.loop(16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cutesuper.ir.block import (
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.cost import (
    MIN_STAGES,
    Sized,
    resize,
)
from cutesuper.skeletons.matmul.cost import (
    accumulators,
    column_blocks,
    fixed_bytes,
    matmul_cost,
    padded,
    stage_bytes,
    vector_accumulators,
)
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.shift import MAX_SHIFTED_ROWS, find_shift
from cutesuper.targets import Target

SMALL_ROWS = (8, 16, 32, 64)
#: if costs are equal, the first one wins: 4096x4096x4096 takes 209.0 us with 128x256 tiles and
#: 218.2 with 256x128 ones, whose statistics need twice as long; without statistics 215.3 and 214.1
LARGE_ROWS = (128, 256, 64)
#: whole 128-byte lines of 16-bit elements: tiles of 96 columns (64 + 32) took 15.4 us, of 128 14.2
COLUMNS = (64, 128, 192, 256)
INNER = (64, 128, 256)
CLUSTERS = (1, 2, 4, 8)
#: most fp32 accumulators of one block: 256 x 128 over two warpgroups are 128 registers of each
#: thread
MAX_ACCUMULATORS = 256 * 128
#: most accumulators for one warpgroup (96 registers of each thread); with more, two warpgroups
#: share the columns, in blocks of 64
ONE_WARPGROUP = 96 * 128


def matmul_sizes(
    structure: BlockProgram,
    form: MatmulForm,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[Sized]:
    """All sizes worth pricing, with their costs; ``pruned`` counts rejected ones, by reason."""
    shifted = form.vectors and find_shift(structure, form.row, form.column, form.contracted)
    for tile, cluster in _matmul_tiles(structure, form):
        if shifted and tile[form.row] > MAX_SHIFTED_ROWS:
            pruned["too many rows to be shifted"] += 1
            continue
        parts = 1 if form.reduced else cluster  # of the contracted label
        loop = ceil_div(extent(structure.dims[form.contracted]), parts * tile[form.contracted])
        inner = {
            f"{form.contracted}.loop": loop,
            f"{form.contracted}.cluster": cluster,
            f"{form.column}.cluster": cluster,
        }
        program = resize(structure, tile, inner)
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
                    **dict.fromkeys(form.batch, 1),
                    **hidden,
                    form.row: row,
                    form.column: columns,
                    form.contracted: inner,
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

    Without columns to divide, the rows are divided, and so are many rows if more products follow.
    Few rows that a warpgroup holds are not divided: weights would be read again (16 rows of LoRA
    16x256x4096 in one tile take 3.2 us, 8 and 8 3.75).
    """
    if not form.reduced and not form.hidden:
        return row_tiles(rows)
    covering = row_tiles(rows)[0]
    held = covering * (between + COLUMNS[0])
    few = not form.reduced and rows <= SMALL_ROWS[-1] and held <= ONE_WARPGROUP
    return (covering,) if few else every_row_tile(rows)


def row_tiles(rows: int) -> tuple[int, ...]:
    """Row tiles worth trying: the smallest that covers few rows, the large ones for many."""
    if rows > SMALL_ROWS[-1]:
        return LARGE_ROWS
    return (next(t for t in SMALL_ROWS if t >= rows),)


def every_row_tile(rows: int) -> tuple[int, ...]:
    """All row tiles up to the smallest that covers the rows."""
    tiles = (*SMALL_ROWS, *reversed(LARGE_ROWS[:-1]))
    return tuple(t for n, t in enumerate(tiles) if n == 0 or tiles[n - 1] < rows)


def _matmul_bytes(program: BlockProgram, form: MatmulForm, itemsizes: dict[str, int]) -> int:
    """Shared memory with the fewest stages, in bytes."""
    return MIN_STAGES * stage_bytes(program, form, itemsizes) + fixed_bytes(program, form)
