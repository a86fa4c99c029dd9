"""Sums over few rows without a grid barrier: every block sums some columns over all rows by itself.

Rows are read twice, the second time mostly from L2, but there are no partial results, no counters
and no waiting: 3.4 us at 128x4096, where a grid barrier takes 6. Only for programs without a
reduction along the row, since a block has no whole rows here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import NEUTRAL, combine
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.kernel.arguments import unravel
from cutesuper.skeletons.rows.kernel.finish import ITEM
from cutesuper.skeletons.rows.schedule import power_of_two

if TYPE_CHECKING:
    from cutesuper.skeletons.rows.kernel.loop import RowLoopKernel


class Slices:
    """Sums over rows, one slice of columns per block."""

    def __init__(self, kernel: RowLoopKernel) -> None:
        self.k = kernel
        plan = self.plan = kernel.plan
        self.vector = plan.schedule.vector
        columns = plan.slice_columns if plan.sums else ITEM
        self.across = min(plan.threads, power_of_two(ceil_div(columns, self.vector)))
        self.down = plan.threads // self.across
        self.rows_left = plan.threads // max(32, self.across)

    def place(self, place: dict[str, Any], tensors: list[cute.Tensor]) -> dict[str, Any]:
        """Coordinates of this thread in the block's slice: those of `RowLoopKernel.place`, with the
        slice's first ``column``, its ``unit`` of the outer labels, and the thread's place ``x``,
        ``y`` in it."""
        plan = self.plan
        slices = ceil_div(plan.length, plan.slice_columns)
        unit, index = place["block"] // slices, place["block"] % slices
        x = place["thread"] % self.across
        column = index * plan.slice_columns
        extents = {d: self.k.extents.of(d, tensors) for d in plan.outer}
        outer = unravel(cutlass.min(unit, plan.units - 1), extents)
        return place | {
            "outer": outer, "part": 0, "piece": 1, "first": column + x * self.vector,
            "column": column, "unit": unit, "x": x, "y": place["thread"] // self.across,
            "left": cutlass.min(column + plan.slice_columns, plan.length),
            "exists": unit < plan.units,
        }  # fmt: skip

    def ask(self, first: Any, tensors: list[cute.Tensor], here: dict[str, Any]) -> list[Any]:
        """Read the columns of the next rows of this thread."""
        plan, k = self.plan, self.k
        found = []
        for n in range(plan.slice_rows):
            row = first + n * self.down
            valid = self.valid(row, here, tensors)
            entry = {"row": row, "valid": valid, "memory": None}
            entry["fragments"] = {
                i: k.read(plan.loads[i], tensors, k.tiles.existing(row, tensors), 0, here)
                for i in plan.streamed
                if i in plan.summed_loads
            }
            entry["scalars"] = {
                i: k.tiles.scalar(i, entry, tensors, here)
                for i in plan.scalars
                if i in plan.summed_loads
            }
            found.append(entry)
        return found

    @cute.jit
    def valid(self, row, here, tensors):
        """Predicate that is true if a row exists and the thread has columns of it."""
        inside = row < self.k.tiles.row_count(tensors)
        return inside and here["first"] < here["left"] and here["exists"]

    def vectors(self, tensors: list[cute.Tensor], here: dict[str, Any]) -> dict[int, Any]:
        """Values common to all rows, for the columns and the outer labels of the slice."""
        plan, k = self.plan, self.k
        found: dict[int, Any] = {}
        for i in sorted(plan.summed_loads):
            view = plan.loads[i]
            if plan.column in view.labels and not plan.varies(view):
                found[i] = [k.read(view, tensors, Int32(0), 0, here)]
            elif not plan.varies(view):
                found[i] = k.number(view, tensors, here)
        return found

    @cute.jit
    def run(self, asked, smem, tensors, here):
        """Sum the rows read ahead and those after them, then apply and store the operations that
        follow."""
        plan, k = self.plan, self.k
        vectors = self.vectors(tensors, here)
        sums = []
        for s in cutlass.range_constexpr(len(plan.sums)):
            acc = cute.make_rmem_tensor(cute.make_layout((self.vector, 1)), Float32)
            acc.fill(NEUTRAL[plan.sums[s].op])
            sums.append(acc)
        self.take(asked, sums, tensors, here, vectors)
        rows = k.tiles.row_count(tensors)
        step = self.down * plan.slice_rows
        for first in cutlass.range(here["y"] + step, rows, step, unroll=1):
            self.take(self.ask(first, tensors, here), sums, tensors, here, vectors)
        memory = cute.recast_ptr(smem["ring"], dtype=Float32)
        totals = memory + self.rows_left * len(plan.sums) * plan.slice_columns
        cute.arch.sync_threads()
        for s in cutlass.range_constexpr(len(plan.sums)):
            self.down_warp(s, sums[s], memory, here)
        cute.arch.sync_threads()
        if here["exists"]:
            items = len(plan.sums) * plan.slice_columns // ITEM
            for item in cutlass.range(here["thread"], items, plan.threads, unroll=1):
                self.down_block(item, memory, totals)
        cute.arch.sync_threads()
        if here["exists"]:
            for quad in cutlass.range(
                here["thread"], plan.slice_columns // ITEM, plan.threads, unroll=1
            ):
                self.k.finish.finish_quad(here["unit"], here["column"], quad, totals, tensors)

    def take(
        self,
        entries: list[Any],
        sums: list[Any],
        tensors: list[cute.Tensor],
        here: dict[str, Any],
        vectors: dict[int, Any],
    ) -> None:
        """Add some rows."""
        from cutesuper.skeletons.rows.kernel.loop import Values

        for entry in entries:
            known = dict(entry["scalars"])
            values = Values(self.k, entry, 0, known, tensors, here, vectors)
            for s, acc in zip(self.plan.sums, sums, strict=True):
                self.k.add(acc, values.of(s.source), entry["valid"], s.op == "max")

    @cute.jit
    def down_warp(self, s: cutlass.Constexpr, acc, memory, here):
        """Combine over the lanes of a warp that have the same columns; the first of them write."""
        op = self.plan.sums[s].op
        distance = 16
        while cutlass.const_expr(distance >= self.across):
            for e in cutlass.range_constexpr(self.vector):
                acc[e] = combine(op, acc[e], cute.arch.shuffle_sync_bfly(acc[e], distance))
            distance = distance // 2
        row = here["thread"] // max(32, self.across)
        base = memory + (row * len(self.plan.sums) + s) * self.plan.slice_columns
        own = here["thread"] % 32 < self.across or self.across > 32
        if own and here["x"] * self.vector < self.plan.slice_columns:
            for e in cutlass.range_constexpr(self.vector):
                at = base + (here["x"] * self.vector + e)
                cute.make_tensor(at, cute.make_layout(1))[0] = acc[e]

    @cute.jit
    def down_block(self, item, memory, totals):
        """Combine the partial results of the warps for 4 columns of one sum."""
        finish, plan = self.k.finish, self.plan
        each = len(plan.sums) * plan.slice_columns
        values = finish.get(memory + item * ITEM)
        for n in cutlass.range_constexpr(1, self.rows_left):
            finish.merge(values, finish.get(memory + (n * each + item * ITEM)), item)
        finish.put(values, totals + item * ITEM)
