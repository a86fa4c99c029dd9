"""Paged keys and values: a table in device memory names the page of each position.

A stage of keys (or values) is filled by one TMA load for each page, or part of a page, that it
holds, always of whole boxes of ``min(page, tile)`` positions::

    table[b]    7 2 9 4 ...        pages of 32, tile of 64 keys
    stage 0     page 7, page 2     two boxes, the second 32 rows below the first
    stage 1     page 9, page 4

Rows of a swizzled tile are permuted in groups of 8, and boxes have 16 rows or more, so a box lands
where the same rows of a whole tile would.

The producer warp reads the table 32 entries at a time, one per lane. It holds the current window
and the next one, so that only the first load waits for an entry. A page behind the sequence's end
is never read: its entry counts as -1, a coordinate outside of the cache, for which the TMA load
writes zeros (and counts their bytes).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.fragments import fragment
from cutesuper.device.memory import bulk_load, neighbours, partition, tile_atom
from cutesuper.skeletons.attention.kernel.context import Known, Place
from cutesuper.skeletons.attention.kernel.rows import Rows, chunk_of
from cutesuper.skeletons.base import Pages
from cutesuper.skeletons.kernel.arguments import described

#: entries of a window, one for each lane
WINDOW = 32
#: entry of a page that does not exist
NOWHERE = -1


class PagedLoads:
    """Tables, TMA atoms and loads of the paged operands."""

    def __init__(self, known: Known, rows: Rows) -> None:
        self.k, self.query = known, rows
        views = (known.key_view, known.value_view)
        #: one table for each argument; keys and values usually share one
        self.tables = {v.table: v for v in views if isinstance(v, Pages)}

    # ------------------------------------------------------------------------------- operands

    def rows(self, view: Pages) -> int:
        """Number of positions in a box."""
        return min(view.size, self.k.key_tile)

    def box(self, view: Pages, stages: int) -> cute.Layout:
        """Layout of a ring ``[position, inner, box of the stage, stage]`` without its swizzle.
        Without the last two modes for 0 stages. Keys and values have the same order: rows of one
        chunk each, all keys of a chunk one after the other."""
        rows, depth = self.rows(view), self.depth(view)
        chunk, tile = chunk_of(depth), self.k.key_tile
        shape: tuple[Any, ...] = (rows, (chunk, depth // chunk), tile // rows, stages)
        stride: tuple[Any, ...] = (chunk, (1, tile * chunk), rows * chunk, tile * depth)
        count = 4 if stages else 2
        return cute.make_layout(shape[:count], stride=stride[:count])

    def depth(self, view: Pages) -> int:
        """Elements of a position, with padding."""
        return self.k.depth if view is self.k.key_view else self.k.width

    def inner(self, view: Pages) -> str:
        """The contiguous label of a position in memory."""
        return self.k.plan.inner if view is self.k.key_view else self.k.plan.columns

    def atom(self, view: Pages, layout: cute.ComposedLayout, tensors: list[cute.Tensor]) -> Any:
        """The TMA load of a box of a cache ``[position, inner, heads..., page]``.
        ``layout`` is that of a stage and provides the swizzle."""
        cache = tensors[view.argument]
        heads = self.k.batch_of(view)
        shape = [view.size, *(self.k.extents.of(d, tensors) for d in (self.inner(view), *heads))]
        stride = [view.stride(d) for d in (self.k.plan.keys, self.inner(view), *heads)]
        extents = tuple(described(n) for n in (*shape, cache.shape[0]))
        paged = cute.make_layout(extents, stride=(*stride, view.page_stride))
        box = cute.make_composed_layout(layout.inner, 0, self.box(view, 0))
        tile = (self.rows(view), self.depth(view))
        return tile_atom(cute.make_tensor(cache.iterator, paged), box, tile)

    def partition(self, view: Pages, atom: Any, coord: Any, ring: cute.Tensor) -> Any:
        """Boxes of the ring and of the cache, partitioned for the TMA load."""
        slots = cute.make_tensor(ring.iterator, self.box(view, self.k.stages))
        tile = (self.rows(view), self.depth(view))
        return partition(atom, slots, cute.local_tile(coord, tile, (None,) * cute.rank(coord)), 2)

    # ---------------------------------------------------------------------------------- tables

    def tiles(self, view: Pages) -> int:
        """Number of key tiles whose pages are in one window."""
        return max(1, WINDOW * view.size // self.k.key_tile)

    def open(self, tensors: list[cute.Tensor], place: Place, first: Any) -> dict[int, Any]:
        """Open every table: this sequence's entries (int32), their number, and two windows."""
        found = {}
        for argument, view in self.tables.items():
            count = place.keys // view.size
            offset = 0 if view.sequences is None else place.batch[view.sequences] * count
            row = neighbours(tensors[argument].iterator + offset, count)
            end = (self.query.last_key(place) + view.size - 1) // view.size
            window = fragment(2, Int32)
            for n in range(2):
                window[n] = self.entry(row, end, first // self.tiles(view) + n)
            found[argument] = (row, end, window)
        return found

    @cute.jit
    def entry(self, row, end, window):
        """The lane's entry (Int32) of a window."""
        at = window * WINDOW + cute.arch.lane_idx()
        found = Int32(NOWHERE)
        if at < end:
            found = row[at]
        return found

    def turn(self, tables: dict[int, Any], first: Any, tile: Any) -> None:
        """Move to the window of a tile and prefetch the next one, before the tile's loads."""
        for argument, table in tables.items():
            self.turn_table(table, self.tiles(self.tables[argument]), first, tile)

    @cute.jit
    def turn_table(self, table, tiles: cutlass.Constexpr, first, tile):
        """`turn` for one table."""
        row, end, window = table
        if tile % tiles == 0 and tile != first:
            window[0] = window[1]
            window[1] = self.entry(row, end, tile // tiles + 1)

    @cute.jit
    def load(self, view: cutlass.Constexpr, load, table, place, tile, stage, barrier):
        """Load one tile of keys or values."""
        rows = self.rows(view)
        _, _, window = table
        heads = self.k.coordinates(view, place)
        parts = view.size // rows  # boxes of a page: more than one where pages are larger
        # unrolled: from a run-time loop the compiler made a loop over lanes of every TMA load
        for n in cutlass.range_constexpr(self.k.key_tile // rows):
            at = tile * (self.k.key_tile // rows) + n
            page = cute.arch.shuffle_sync(window[0], at // parts % WINDOW)
            box = load.tiles[(None, at % parts, 0, *heads, page)]
            bulk_load(load.atom, box, load.slots[None, n, stage], barrier, self.k.hint)
