"""Reductions of accumulators along the columns: one value for each row of the tile.

A thread has some columns of a quarter of the rows. Threads of a warp combine theirs by shuffles,
warps combine theirs in shared memory, and blocks of a cluster, each with a part of the columns,
send theirs to every other block. The order is fixed: results are the same bits every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.cluster import float_bits, push
from cutesuper.device.fragments import NEUTRAL
from cutesuper.device.math import nan_max
from cutesuper.device.memory import element
from cutesuper.skeletons.kernel.arguments import ELEMENT

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel


class ColumnReductions:
    """The column reductions of one kernel, and its outputs without columns."""

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        plan = kernel.plan
        self.reductions = plan.reductions
        self.place = {r.value: n for n, r in enumerate(self.reductions)}
        self.parts = plan.column_cluster if plan.column_cluster > 1 else kernel.consumers
        self.ragged = plan.program.covered(plan.column) != plan.program.dims[plan.column]
        self.outputs = [o for o in plan.outputs if plan.column not in o.view.labels]

    def allocate(self, alloc: Any, smem: dict[str, Any]) -> None:
        """Allocate an fp32 slot of every row for each warp, and for each block of the cluster."""
        k, count = self.k, len(self.reductions)
        warps = max(4, count * k.consumers * k.m)
        smem["warp_sums"] = alloc.allocate_array(Float32, warps, byte_alignment=16)
        blocks = max(4, count * k.plan.column_cluster * k.m)
        smem["block_sums"] = alloc.allocate_array(Float32, blocks, byte_alignment=16)

    @cute.jit
    def run(self, accumulators, vectors, smem, tensors, tidx, warp, lane, where):
        """Compute all reductions, in order: one may need those before it."""
        for r in cutlass.range_constexpr(len(self.reductions)):
            self.reduce_tile(r, accumulators, vectors, smem, tensors, warp, lane, where)
            self.k.epilogue.consumers_meet()
            if cutlass.const_expr(self.k.plan.column_cluster > 1):
                self.exchange(r, smem, tidx, where)
                smem["columns_reduced"][r].wait(0)

    def combine(self, r: int, x: Any, y: Any) -> Any:
        """Combine two partial results of reduction ``r``."""
        return nan_max(x, y) if self.reductions[r].op == "max" else x + y

    @cute.jit
    def reduce_tile(
        self, r: cutlass.Constexpr, accumulators, vectors, smem, tensors, warp, lane, where
    ):
        """Reduce this warp's columns into its slots."""
        k, neutral = self.k, NEUTRAL[self.reductions[r].op]
        totals = cute.make_rmem_tensor(cute.make_layout(k.epilogue.values), Float32)
        totals.fill(neutral)
        for i in cutlass.range_constexpr(k.blocks // k.warpgroups):
            block = warp // 4 + k.warpgroups * i
            for half in cutlass.range_constexpr(2):
                column = where[1] * k.n + k.epilogue.column_in_tile(block, half, warp, lane)
                sums = k.epilogue.own(accumulators, vectors, i, half, lane)
                self.add_column(r, totals, sums, column, smem, tensors, lane % 4, where)
        for v in cutlass.range_constexpr(k.epilogue.values):
            total = totals[v]
            for distance in (4, 8, 16):
                total = self.combine(r, total, cute.arch.shuffle_sync_bfly(total, distance))
            row = k.epilogue.row_of(v, lane % 4)
            if lane < 4:
                slot = smem["warp_sums"] + ((r * k.consumers + warp) * k.m + row)
                cute.make_tensor(slot, cute.make_layout(1))[0] = total

    @cute.jit
    def add_column(self, r: cutlass.Constexpr, totals, sums, column, smem, tensors, quarter, where):
        """Add one column; those past the end of the tensor are left out."""
        plan = self.k.plan
        source = self.reductions[r].source
        if cutlass.const_expr(self.ragged):
            if column < plan.program.dims[plan.column]:
                self.add_inside(r, source, totals, sums, column, smem, tensors, quarter, where)
        else:
            self.add_inside(r, source, totals, sums, column, smem, tensors, quarter, where)

    @cute.jit
    def add_inside(
        self,
        r: cutlass.Constexpr,
        source: cutlass.Constexpr,
        totals,
        sums,
        column,
        smem,
        tensors,
        quarter,
        where,
    ):
        """Apply the source to one column and add it."""
        k = self.k
        leaves = [
            k.epilogue.leaf(
                i, k.epilogue.places, sums, smem, tensors, column, k.plan.column, where, quarter
            )
            for i in source.leaves
        ]
        value = source.evaluate(leaves, k.math)
        for v in cutlass.range_constexpr(k.epilogue.values):
            totals[v] = self.combine(r, totals[v], value[v])

    @cute.jit
    def exchange(self, r: cutlass.Constexpr, smem, tidx, where):
        """Send this block's totals to every block of the cluster."""
        k = self.k
        blocks = k.plan.column_cluster
        for item in cutlass.range(tidx, k.m * blocks, 32 * k.consumers, unroll=1):
            row, peer = item % k.m, item // k.m
            total = Float32(NEUTRAL[self.reductions[r].op])
            for w in cutlass.range_constexpr(k.consumers):
                part = element(smem["warp_sums"], (r * k.consumers + w) * k.m + row)
                total = self.combine(r, total, part)
            slot = smem["block_sums"] + ((r * blocks + where[1]) * k.m + row)
            push(slot, (float_bits(total),), smem["columns_reduced"][r], peer)

    def row_value(self, r: int, smem: dict[str, Any], row: Any) -> Float32:
        """The complete reduction ``r`` of one row."""
        name = "block_sums" if self.k.plan.column_cluster > 1 else "warp_sums"
        total = None
        for part in range(self.parts):
            x = element(smem[name], (r * self.parts + part) * self.k.m + row)
            total = x if total is None else self.combine(r, total, x)
        assert total is not None
        return total * self.reductions[r].scale

    @cute.jit
    def store_rows(self, smem, tensors, tidx, where):
        """Store outputs without columns: thread i has row i; the first block of a cluster
        stores."""
        k = self.k
        rows = k.extents.of(k.plan.row, tensors)
        for row in cutlass.range(tidx, k.m, 32 * k.consumers, unroll=1):
            m = where[0] * k.m + row
            if m < rows and where[1] == 0:
                for output in self.outputs:
                    self.store_row(output, smem, tensors, m, row, where)

    @cute.jit
    def store_row(self, output: cutlass.Constexpr, smem, tensors, m, row, where):
        """Store one element of an output without columns."""
        k, view = self.k, output.view
        leaves = [self.row_leaf(i, smem, tensors, m, row, where) for i in output.expression.leaves]
        value = output.expression.evaluate(leaves, k.math)
        offset = k.epilogue.batch_offset(view, where[3]) + m * view.stride(k.plan.row)
        target = cute.make_tensor(tensors[view.argument].iterator + offset, cute.make_layout(1))
        target[0] = value.to(ELEMENT[k.plan.arguments[view.argument].dtype])

    def row_leaf(self, i: int, smem: Any, tensors: Any, m: Any, row: Any, where: Any) -> Any:
        """A leaf of an output without columns, as a scalar."""
        k, plan = self.k, self.k.plan
        if i in self.place:
            return self.row_value(self.place[i], smem, row)
        if i in plan.row_values:
            base = list(plan.row_values).index(i) * k.m
            return element(smem["row_values"], base + row)
        view = plan.loads[i]
        offset = k.epilogue.batch_offset(view, where[3]) + m * view.stride(plan.row)
        source = cute.make_tensor(tensors[view.argument].iterator + offset, cute.make_layout(1))
        return source[0].to(Float32)
