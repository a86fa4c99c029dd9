"""Reductions of accumulators along the columns: one value for each row of the tile.

A thread has some columns of a quarter of the rows. Threads of a warp combine theirs by shuffles,
warps combine theirs in shared memory, and blocks of a cluster, each with a part of the columns,
send theirs to every other block. The order is fixed: results are the same bits every time.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.cluster import float_bits, push
from cutesuper.device.fragments import NEUTRAL, filled
from cutesuper.device.memory import element, one, put
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.matmul.kernel.context import Here, Known
from cutesuper.skeletons.matmul.kernel.leaves import Leaves
from cutesuper.skeletons.matmul.kernel.vectors import VectorTile


class ColumnReductions:
    """The column reductions of one kernel, and its outputs without columns."""

    def __init__(self, known: Known, leaves: Leaves, vectors: VectorTile) -> None:
        self.k, self.leaves, self.vectors = known, leaves, vectors
        self.reduced = leaves.reduced
        plan = known.plan
        self.reductions = plan.reductions
        self.ragged = plan.program.covered(plan.column) != plan.program.dims[plan.column]
        self.outputs = [o for o in plan.outputs if plan.column not in o.view.labels]

    def allocate(self, alloc: Any) -> tuple[Any, Any]:
        """Allocate an fp32 slot of every row for each warp, and for each block of the cluster."""
        k, count = self.k, len(self.reductions)
        if not count:
            return None, None
        sizes = count * k.consumers * k.m, count * k.plan.column_cluster * k.m
        warps, blocks = (
            alloc.allocate_array(Float32, max(4, size), byte_alignment=16) for size in sizes
        )
        return warps, blocks

    @cute.jit
    def run(self, accumulators, vectors, here):
        """Compute all reductions, in order: one may need those before it."""
        for r in cutlass.range_constexpr(len(self.reductions)):
            self.reduce_tile(r, accumulators, vectors, here)
            self.k.consumers_meet()
            if cutlass.const_expr(self.k.plan.column_cluster > 1):
                self.exchange(r, here)
                here.memory.columns_reduced[r].wait(0)

    @cute.jit
    def reduce_tile(self, r: cutlass.Constexpr, accumulators, vectors, here):
        """Reduce this warp's columns into its slots."""
        k, neutral = self.k, NEUTRAL[self.reductions[r].op]
        totals = filled(k.values, neutral)
        for i in cutlass.range_constexpr(k.blocks // k.warpgroups):
            block = k.block(i, here.warp)
            for half in cutlass.range_constexpr(2):
                column = here.tile.column * k.n + self.leaves.column_in_tile(block, half, here)
                sums = [self.leaves.column_of(row[i], half) for row in accumulators]
                sums += self.vectors.own(vectors, i, half, here)
                self.add_column(r, totals, sums, column, here)
        for v in cutlass.range_constexpr(k.values):
            total = totals[v]
            for distance in (4, 8, 16):
                total = self.reduced.combine(r, total, cute.arch.shuffle_sync_bfly(total, distance))
            row = self.leaves.row_of(v, here.quarter)
            if here.lane < 4:
                slot = here.memory.warp_sums + ((r * k.consumers + here.warp) * k.m + row)
                put(slot, total)

    @cute.jit
    def add_column(self, r: cutlass.Constexpr, totals, sums, column, here):
        """Add one column; those past the end of the tensor are left out."""
        plan = self.k.plan
        source = self.reductions[r].source
        if cutlass.const_expr(self.ragged):
            if column < plan.program.dims[plan.column]:
                self.add_inside(r, source, totals, sums, column, here)
        else:
            self.add_inside(r, source, totals, sums, column, here)

    @cute.jit
    def add_inside(
        self,
        r: cutlass.Constexpr,
        source: cutlass.Constexpr,
        totals,
        sums,
        column,
        here,
    ):
        """Apply the source to one column and add it."""
        k = self.k
        own = self.leaves.column(sums, column, here.quarter)
        value = self.leaves.evaluate(source, own, here)
        for v in cutlass.range_constexpr(k.values):
            totals[v] = self.reduced.combine(r, totals[v], value[v])

    @cute.jit
    def exchange(self, r: cutlass.Constexpr, here):
        """Send this block's totals to every block of the cluster."""
        k, memory = self.k, here.memory
        blocks = k.plan.column_cluster
        for item in cutlass.range(here.thread, k.m * blocks, 32 * k.consumers, unroll=1):
            row, peer = item % k.m, item // k.m
            total = Float32(NEUTRAL[self.reductions[r].op])
            for w in cutlass.range_constexpr(k.consumers):
                part = element(memory.warp_sums, (r * k.consumers + w) * k.m + row)
                total = self.reduced.combine(r, total, part)
            slot = memory.block_sums + ((r * blocks + here.tile.column) * k.m + row)
            push(slot, (float_bits(total),), memory.columns_reduced[r], peer)

    @cute.jit
    def store_rows(self, here):
        """Store outputs without columns: thread i has row i.
        The first block of a cluster stores."""
        k = self.k
        rows = k.extents.of(k.plan.row, here.tensors)
        for row in cutlass.range(here.thread, k.m, 32 * k.consumers, unroll=1):
            m = here.tile.row * k.m + row
            if m < rows and here.tile.column == 0:
                for output in self.outputs:
                    self.store_row(output, m, row, here)

    @cute.jit
    def store_row(self, output: cutlass.Constexpr, m, row, here):
        """Store one element of an output without columns."""
        k, view = self.k, output.view
        leaves = [self.row_leaf(i, m, row, here) for i in output.expression.leaves]
        value = output.expression.evaluate(leaves, k.math)
        offset = k.batch_offset(view, here) + k.along(view, k.plan.row, m, here)
        put(here.tensors[view.argument].iterator + offset, value.to(dtype_of(k.plan, view)))

    def row_leaf(self, i: int, m: Any, row: Any, here: Here) -> Any:
        """A leaf of an output without columns, as a scalar."""
        k, plan = self.k, self.k.plan
        if i in self.reduced.place:
            return self.reduced.row_value(self.reduced.place[i], here.memory, row)
        if i in plan.row_values:
            base = list(plan.row_values).index(i) * k.m
            return element(here.memory.row_values, base + row)
        view = plan.loads[i]
        offset = k.batch_offset(view, here) + k.along(view, plan.row, m, here)
        return one(here.tensors[view.argument].iterator + offset)[0].to(Float32)
