"""Row statistics that blocks share out: each row is reduced once, from device memory.

Every block that multiplies rows would read them again, from its stages: a quarter more of what
128x128 tiles read from shared memory, and as many arrivals before a stage is free. Here the warps
of all blocks take every n-th row, leave its sums in device memory, and meet; the helper warps of a
tile compute its row values from them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Meeting
from cutesuper.device.cluster import wait_for_cluster
from cutesuper.device.fragments import NEUTRAL, PIECE, combine, fetched, folded, fragment
from cutesuper.device.grid import arrive_in_grid, wait_for_grid
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours, one, put
from cutesuper.ir.dims import extent
from cutesuper.skeletons.matmul.kernel.context import HELPERS_BARRIER, Known
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.plan import grid_shape

#: pieces of a row that a lane has on their way
DEEP = 8


class SharedStatistics:
    """The helper warps' work if each row is reduced once."""

    def __init__(self, known: Known, sharing: Sharing, walk: Walk) -> None:
        self.k, self.sharing, self.walk = known, sharing, walk
        dims = known.plan.program.dims
        self.rows, self.pieces = extent(dims[known.plan.row]), extent(dims[known.plan.contracted])
        self.pieces //= PIECE
        self.blocks = known.plan.launched

    @cute.jit
    def run(self, here):
        """Reduce this block's rows, then compute the row values of its tiles."""
        k = self.k
        if cutlass.const_expr(self.sharing.active):
            wait_for_cluster()
        if cutlass.const_expr(k.dependent):
            wait_for_predecessor()
        self.reduce(here)
        self.meet(here)
        if cutlass.const_expr(self.walk.persistent):

            def visit(step, turn):
                return self.visit(here, step, turn)

            if self.walk.each(here, visit, Int32(0)) > 0:
                k.rows_read_meeting().meet()
        else:
            self.write(here, here.tile.row)
            k.row_values_meeting().arrive()

    @cute.jit
    def visit(self, here, step, turn):
        """Compute the row values of the tile of a step, once those of the tile before are read.
        Nothing if that had the same rows."""
        k = self.k
        if turn > 0:
            k.rows_read_meeting().meet()
        if self.walk.fresh(step, here.tensors):
            self.write(here, self.walk.tile(step, here.tensors).row)
        k.row_values_meeting().arrive()
        return turn + 1

    @cute.jit
    def reduce(self, here):
        """Reduce every n-th row, a warp each."""
        k = self.k
        first = self.block() * k.helpers + here.thread // 32
        for row in cutlass.range(first, self.rows, self.blocks * k.helpers, unroll=1):
            totals = fragment(len(k.plan.statistics))
            for s, statistic in enumerate(k.plan.statistics):
                totals[s] = Float32(NEUTRAL[statistic.op])
            whole = self.pieces // 32
            for n in cutlass.range(whole // DEEP, unroll=1):
                self.add(here, totals, row, n * DEEP, DEEP)
            if cutlass.const_expr(whole % DEEP > 0):
                self.add(here, totals, row, Int32(whole // DEEP * DEEP), whole % DEEP)
            if cutlass.const_expr(self.pieces % 32 > 0):
                if here.lane < self.pieces % 32:
                    self.add(here, totals, row, Int32(whole), 1)
            for s, statistic in enumerate(k.plan.statistics):
                v = totals[s]
                for distance in (16, 8, 4, 2, 1):
                    v = combine(statistic.op, v, cute.arch.shuffle_sync_bfly(v, distance))
                if here.lane == 0:
                    put(here.scratch[0].iterator + (s * self.rows + row), v)

    def block(self) -> Any:
        """Number of this block in the grid."""
        columns, rows, _ = grid_shape(self.k.plan)
        bx, by, bz = cute.arch.block_idx()
        return bx + columns * (by + rows * bz)

    def add(self, here: Any, totals: cute.Tensor, row: Any, first: Any, count: int) -> None:
        """Add pieces of a row to its statistics: one in 32 from the ``first`` pass on."""
        k, statistics = self.k, self.k.plan.statistics
        leaves = dict.fromkeys(op for s in statistics for op in s.source.leaves)
        found = [
            {op: self.piece(here, op, row, (first + n) * 32 + here.lane) for op in leaves}
            for n in range(count)
        ]
        for pieces in found:
            values = {op: piece.load().to(Float32) for op, piece in pieces.items()}
            for s, statistic in enumerate(statistics):
                v = statistic.source.evaluate(
                    [values[op] for op in statistic.source.leaves], k.math
                )
                totals[s] = folded(totals[s], v, statistic.op)

    def piece(self, here: Any, operation: int, row: Any, place: Any) -> cute.Tensor:
        """16 bytes of a row, or of a vector along it."""
        k, view = self.k, self.k.plan.staged(operation)
        offset = k.along(view, k.plan.row, row, here) + place * PIECE
        source = here.tensors[view.argument].iterator + offset
        return fetched(neighbours(source.align(16), PIECE))

    @cute.jit
    def meet(self, here):
        """Wait until the warps of all blocks have left the sums of their rows."""
        helpers = Meeting(HELPERS_BARRIER, 32 * self.k.helpers)
        helpers.meet()
        if here.thread == 0:
            counter = here.scratch[1].iterator
            arrive_in_grid(counter, self.block(), self.blocks)
            wait_for_grid(counter)
        helpers.meet()

    @cute.jit
    def write(self, here, tile):
        """Compute the row values of a row tile: thread i those of row i."""
        k, plan, threads = self.k, self.k.plan, 32 * self.k.helpers
        for p in cutlass.range_constexpr(-(-k.m // threads)):
            own = here.thread + p * threads
            if own < k.m:
                row = tile * k.m + own
                row = row if row < self.rows else Int32(self.rows - 1)
                totals = {}
                for s, statistic in enumerate(plan.statistics):
                    total = one(here.scratch[0].iterator + (s * self.rows + row))[0]
                    totals[statistic.value] = total * statistic.scale
                for j, e in enumerate(plan.row_values.values()):
                    value = e.evaluate([totals[i] for i in e.leaves], k.math)
                    put(here.memory.row_values + (j * k.m + own), value)
