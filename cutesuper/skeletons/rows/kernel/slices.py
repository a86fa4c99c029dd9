"""Sums over few rows without a grid barrier: every block sums some columns over all rows by itself.

Rows are read twice, the second time mostly from L2, but there are no partial results, no counters
and no waiting: 3.4 us at 128x4096, where a grid barrier takes 6. Only for programs without a
reduction along the row, since a block has no whole rows here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.fragments import NEUTRAL, combine, filled
from cutesuper.device.memory import put
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.kernel.arguments import unravel
from cutesuper.skeletons.rows.kernel.access import Access
from cutesuper.skeletons.rows.kernel.context import Known, Place, Row, SlicePlace
from cutesuper.skeletons.rows.kernel.finish import ITEM, Finish
from cutesuper.skeletons.rows.kernel.picks import Picks
from cutesuper.skeletons.rows.kernel.stages import Stages
from cutesuper.skeletons.rows.kernel.tiles import Tiles
from cutesuper.skeletons.rows.kernel.values import Sources, Values, add_rows
from cutesuper.skeletons.rows.schedule import power_of_two


class Slices:
    """Sums over rows, one slice of columns per block."""

    def __init__(
        self,
        known: Known,
        access: Access,
        stages: Stages,
        picks: Picks,
        tiles: Tiles,
        finish: Finish,
    ) -> None:
        self.k, self.access, self.stages = known, access, stages
        self.picks, self.tiles, self.finish = picks, tiles, finish
        plan = self.plan = known.plan
        self.vector = plan.schedule.vector
        columns = plan.slice_columns if plan.sums else ITEM
        self.across = min(plan.threads, power_of_two(ceil_div(columns, self.vector)))
        self.down = plan.threads // self.across
        self.rows_left = plan.threads // max(32, self.across)

    def place(self, place: Place, tensors: list[cute.Tensor]) -> SlicePlace:
        """Coordinates of this thread in the block's slice."""
        plan = self.plan
        slices = ceil_div(plan.length, plan.slice_columns)
        unit, index = place.block // slices, place.block % slices
        x = place.thread % self.across
        column = index * plan.slice_columns
        extents = {d: self.k.extents.of(d, tensors) for d in plan.outer}
        outer = unravel(cutlass.min(unit, plan.units - 1), extents)
        return SlicePlace(
            place.block, place.thread, place.rank, place.walker, place.walkers, outer, 0,
            place.lane, place.group, column + x * self.vector,
            cutlass.min(column + plan.slice_columns, plan.length), 1,
            column, unit, x, place.thread // self.across, unit < plan.units,
        )  # fmt: skip

    def ask(self, first: Any, tensors: list[cute.Tensor], here: SlicePlace) -> list[Row]:
        """Read the columns of the next rows of this thread."""
        plan, found = self.plan, list[Row]()
        for n in range(plan.slice_rows):
            row = first + n * self.down
            entry = Row(row, self.valid(row, here, tensors))
            for i in plan.streamed:
                if i in plan.summed_loads:
                    existing = self.stages.existing(row, tensors)
                    view = plan.loads[i]
                    entry.fragments[i] = self.access.read(view, tensors, existing, 0, here)
            for i in plan.scalars:
                if i in plan.summed_loads:
                    entry.scalars[i] = self.tiles.scalar(i, entry, tensors, here)
            found.append(entry)
        return found

    @cute.jit
    def valid(self, row, here, tensors):
        """Predicate that is true if a row exists and the thread has columns of it."""
        inside = row < self.stages.row_count(tensors)
        return inside and here.first < here.left and here.exists

    def vectors(self, tensors: list[cute.Tensor], here: SlicePlace) -> dict[int, Any]:
        """Values common to all rows, for the columns and the outer labels of the slice."""
        plan = self.plan
        found: dict[int, Any] = {}
        for i in sorted(plan.summed_loads):
            view = plan.loads[i]
            if plan.column in view.labels and not plan.varies(view):
                found[i] = [self.access.read(view, tensors, Int32(0), 0, here)]
            elif not plan.varies(view):
                found[i] = self.access.number(view, tensors, here)
        return found

    @cute.jit
    def run(self, asked, memory, tensors, here):
        """Sum the rows read ahead and those after them, then store what follows."""
        plan = self.plan
        sources = self.sources(tensors, here)
        sums = []
        for s in cutlass.range_constexpr(len(plan.sums)):
            sums.append(filled((self.vector, 1), NEUTRAL[plan.sums[s].op]))
        self.take(asked, sums, sources)
        rows = self.stages.row_count(tensors)
        step = self.down * plan.slice_rows
        for first in cutlass.range(here.y + step, rows, step, unroll=1):
            self.take(self.ask(first, tensors, here), sums, sources)
        floats = memory.floats
        totals = floats + self.rows_left * len(plan.sums) * plan.slice_columns
        cute.arch.sync_threads()
        for s in cutlass.range_constexpr(len(plan.sums)):
            self.down_warp(s, sums[s], floats, here)
        cute.arch.sync_threads()
        if here.exists:
            items = len(plan.sums) * plan.slice_columns // ITEM
            for item in cutlass.range(here.thread, items, plan.threads, unroll=1):
                self.down_block(item, floats, totals)
        cute.arch.sync_threads()
        if here.exists:
            for quad in cutlass.range(
                here.thread, plan.slice_columns // ITEM, plan.threads, unroll=1
            ):
                self.finish.finish_quad(here.unit, here.column, quad, totals, tensors)

    def sources(self, tensors: list[cute.Tensor], here: SlicePlace) -> Sources:
        """The sources of the slice's values."""
        vectors = self.vectors(tensors, here)
        return Sources(self.k, self.access, self.stages, self.picks, tensors, here, vectors)

    def take(self, entries: list[Row], sums: list[Any], sources: Sources) -> None:
        """Add some rows."""
        for entry in entries:
            values = Values(sources, entry, 0, dict(entry.scalars))
            for s, acc in zip(self.plan.sums, sums, strict=True):
                add_rows(self.k, acc, values.of(s.source), entry.valid, s.op)

    @cute.jit
    def down_warp(self, s: cutlass.Constexpr, acc, floats, here):
        """Combine over the lanes of a warp that have the same columns; the first of them write."""
        op = self.plan.sums[s].op
        distance = 16
        while cutlass.const_expr(distance >= self.across):
            for e in cutlass.range_constexpr(self.vector):
                acc[e] = combine(op, acc[e], cute.arch.shuffle_sync_bfly(acc[e], distance))
            distance = distance // 2
        row = here.thread // max(32, self.across)
        base = floats + (row * len(self.plan.sums) + s) * self.plan.slice_columns
        own = here.thread % 32 < self.across or self.across > 32
        if own and here.x * self.vector < self.plan.slice_columns:
            for e in cutlass.range_constexpr(self.vector):
                at = base + (here.x * self.vector + e)
                put(at, acc[e])

    @cute.jit
    def down_block(self, item, floats, totals):
        """Combine the partial results of the warps for 4 columns of one sum."""
        finish, plan = self.finish, self.plan
        each = len(plan.sums) * plan.slice_columns
        values = finish.get(floats + item * ITEM)
        for n in cutlass.range_constexpr(1, self.rows_left):
            finish.merge(values, finish.get(floats + (n * each + item * ITEM)), item)
        finish.put(values, totals + item * ITEM)
