"""Extents for structures whose rows one block holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cutesuper.ir.block import (
    BlockProgram,
)
from cutesuper.ir.dims import extent
from cutesuper.skeletons.cost import (
    RESERVED_BYTES,
    Sized,
    resize,
    tile_bytes,
)
from cutesuper.skeletons.rows.cost import row_cost
from cutesuper.skeletons.rows.form import RowForm
from cutesuper.targets import Target

ROWS_PER_BLOCK = (1, 2, 4, 8, 16)
#: most elements of the last dimension that a block of an element-wise program takes
MAX_STRIP = 8192
#: fewest elements of a tile of an element-wise program, if the tensor has as many
MIN_STRIP = 1024


def row_sizes(
    structure: BlockProgram,
    form: RowForm,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[Sized]:
    """All sizes worth pricing, with their costs; ``pruned`` counts rejected ones, by reason."""
    for tile in _row_tiles(structure, form):
        program = resize(structure, tile, {})
        held = sum(tile_bytes(program, op, itemsizes) for op in program.loads())
        if held + RESERVED_BYTES > target.shared_bytes:
            pruned["rows exceed the shared memory"] += 1
            continue
        yield Sized(program, row_cost(program, target, itemsizes))


def _row_tiles(structure: BlockProgram, form: RowForm) -> Iterator[dict[str, int]]:
    """Tiles with the last label whole or in strips, and some rows of the one before it."""
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
