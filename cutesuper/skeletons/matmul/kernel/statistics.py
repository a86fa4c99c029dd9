"""The helper warps of the matmul loop: row statistics and the row operand's prologue."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Meeting, fence_reads, fence_warp, release_warp
from cutesuper.device.cluster import float_bits, push, wait_for_cluster
from cutesuper.device.fragments import NEUTRAL, combine, folded, fragment, stored
from cutesuper.device.memory import element, put
from cutesuper.device.tf32 import rounded_all, split_all
from cutesuper.skeletons.matmul.kernel.context import HELPERS_BARRIER, Known
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.row_tile import LANES, RowTile
from cutesuper.skeletons.matmul.kernel.shift import RowShift
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.kernel.vectors import VectorTile

BATCH = 8  # rows of a thread that are read together


class RowSide:
    """The helper warps' work on the row operand: statistics and prologue."""

    def __init__(
        self, known: Known, tile: RowTile, sharing: Sharing, walk: Walk, vectors: VectorTile
    ) -> None:
        self.k, self.tile, self.sharing, self.walk = known, tile, sharing, walk
        self.vectors = vectors
        self.rows, self.passes = tile.rows, tile.passes
        self.shift = RowShift(known, tile)
        # shifts take registers too: 120 bytes of stack with 8 rows of 256x128 tiles
        self.batch = BATCH if known.plan.shift is None else 1

    @cute.jit
    def run(self, here, pieces):
        """Compute the statistics of all tiles of this block."""
        at, turn = here.memory.ring.first(), Int32(0)
        shifts = self.shift.sample(pieces, here)
        if cutlass.const_expr(self.sharing.active):
            wait_for_cluster()
        if cutlass.const_expr(self.walk.persistent):

            def visit(step, state):
                return self.visit(here, step, state, shifts)

            self.walk.each(here, visit, (at, turn))
        else:
            self.read_tile(here, at, turn, True, shifts)

    @cute.jit
    def visit(self, here, step, state, shifts):
        """Read the tile of a step; ``state`` is the slot of the ring, and the turn of the sums."""
        at, turn = state
        fresh = self.walk.fresh(step, here.tensors)
        if cutlass.const_expr(self.tile.split and self.k.plan.rewrites_rows):
            fresh = True
        at = self.read_tile(here, at, turn, fresh, shifts)
        turn = turn ^ 1 if fresh else turn
        return at, turn

    @cute.jit
    def read_tile(self, here, at, turn, fresh, shifts):
        """Read every stage once; then reduce over the cluster and compute the row values.
        Without a prologue there is nothing to do if the previous tile had the same rows (``fresh``
        false). Return the next slot of the ring."""
        k, plan, memory, ring = self.k, self.k.plan, here.memory, here.memory.ring
        thread = here.thread
        if cutlass.const_expr(plan.rewrites_rows):
            fresh = True
        if cutlass.const_expr(self.tile.split and len(plan.statistics) > 0):
            if thread < 32 and fresh:
                memory.reduced.only.expect_once(4 * k.m * len(plan.statistics))
        first = Int32(0)
        if cutlass.const_expr(self.tile.split):
            first = self.sharing.rank() * self.rows
        totals = fragment(max(1, len(plan.statistics) * self.passes))
        for s, statistic in enumerate(plan.statistics):
            for p in cutlass.range_constexpr(self.passes):
                totals[s * self.passes + p] = Float32(NEUTRAL[statistic.op])
        for i in cutlass.range(here.tile.iterations, unroll=1):
            ring.wait(at)
            depth = k.step(here.tile, i) * k.k
            row = thread // LANES
            # with fewer rows than one pass covers, the remaining threads have nothing to read
            if fresh and row < self.rows:
                held = self.sharing.first_held(first)
                self.read_rows(here, totals, shifts, held, at.stage, depth)
            self.vectors.write(memory, thread, at.stage, depth)
            if cutlass.const_expr(plan.rewrites):
                # the tensor cores read the results of ordinary stores
                release_warp(memory.ready[at.stage], here.lane)
            fence_warp()
            ring.release(at.stage, here.lane, self.sharing.parts)
            at = ring.next(at)
        if cutlass.const_expr(k.cluster > 1):
            wait_for_cluster()
        if cutlass.const_expr(plan.exchange_in_ring):
            memory.drained.only.arrive_warp(here.lane, k.cluster)
        if cutlass.const_expr(len(plan.statistics) > 0):
            if fresh:
                self.reduce(here, totals, first)
                self.row_values(memory, thread, turn)
            k.row_values_meeting().arrive()
        return at

    @cute.jit
    def read_rows(self, here, totals, shifts, first_row, stage, depth):
        """Process a thread's rows of one stage: add to the statistics, apply the prologue."""
        own, lane8 = here.thread // LANES, here.thread % LANES
        k, memory, row, width = self.k, here.memory, first_row + own, self.tile.width
        place = (lane8 ^ (row % 8)) * width  # the same for all rows, which are 8 or 16 apart
        # short loops are unrolled whole, so that their reads are all in flight together
        for c in cutlass.range(k.chunks, unroll=k.chunks if k.chunks * self.passes <= 16 else 1):
            at = c * k.plan.chunk + place
            offset = ((stage * k.chunks + c) * k.plan.held_rows + row) * k.plan.chunk
            offset = offset + lane8 * width
            vectors = self.tile.pieces(memory.vectors, list(k.plan.vectors), stage * k.k + at)
            for first in cutlass.range_constexpr(0, self.passes, self.batch):
                batch = range(first, min(first + self.batch, self.passes))
                found = [self.tile.place(own, p) for p in batch]
                places = [offset + p * (self.tile.height * k.plan.chunk) for p, _ in found]
                rows = [self.tile.pieces(memory.rows, list(k.plan.rows), x) for x in places]
                if cutlass.const_expr(len(rows) > 1):
                    # without this fence the compiler issues every read just before its use: 16 rows
                    # of a thread took about 1500 cycles, more than the products of 256x128x64
                    fence_reads()
                for p, loaded, x, (_, inside) in zip(batch, rows, places, found, strict=True):
                    pieces = {**loaded, **vectors}
                    values = {op: piece.load().to(Float32) for op, piece in pieces.items()}
                    shifted = self.shift.applied(values, shifts[p], depth + at)
                    for s, statistic in enumerate(k.plan.statistics):
                        self.add(totals, s * self.passes + p, statistic, shifted, depth + at)
                    if cutlass.const_expr(k.plan.rewrites_rows):
                        if cutlass.const_expr(self.shift.of_products):
                            values = shifted
                        self.rewrite(memory, values, x, depth + at, inside)

    @cute.jit
    def add(self, totals, index: cutlass.Constexpr, statistic: cutlass.Constexpr, values, at):
        """Add 16 bytes of elements to a statistic."""
        neutral = NEUTRAL[statistic.op]
        leaves = [values[op] for op in statistic.source.leaves]
        v = statistic.source.evaluate(leaves, self.k.math)
        if cutlass.const_expr(self.tile.needs_mask(statistic.source, neutral)):
            v = cute.where(self.tile.inside(at), v, cute.full_like(v, neutral))
        totals[index] = folded(totals[index], v, statistic.op)

    @cute.jit
    def rewrite(self, memory, values, offset, at, inside):
        """Replace 16 bytes of the row operand by the operand of the products.
        Only if they are ``inside`` the tile."""
        k, prologue = self.k, self.k.plan.prologue
        if cutlass.const_expr(prologue is None):
            (v,) = (values[op] for op in k.plan.rows)
        else:
            v = prologue.evaluate([values[op] for op in prologue.leaves], k.math)
            if cutlass.const_expr(self.tile.needs_mask(prologue, 0.0)):
                v = cute.where(self.tile.inside(at), v, cute.full_like(v, 0.0))
        if cutlass.const_expr(k.plan.element_bytes == 2):
            parts = [(memory.rows[0], stored(v, self.tile.width, k.dtype))]
        elif cutlass.const_expr(k.plan.split):
            parts = list(zip((memory.rows[0], memory.low_rows), split_all(v), strict=True))
        else:
            parts = [(memory.rows[0], rounded_all(v))]
        if cutlass.const_expr(inside is None) or inside:
            for ring, register in parts:
                cute.autovec_copy(register, self.tile.linear(ring, offset))

    @cute.jit
    def reduce(self, here, totals, first):
        """Combine the threads of a row, then send the result to every block that needs it."""
        k, memory, thread = self.k, here.memory, here.thread
        lane8 = thread % LANES
        for s, statistic in enumerate(k.plan.statistics):
            for p in cutlass.range_constexpr(self.passes):
                v = totals[s * self.passes + p]
                for distance in (4, 2, 1):
                    other = cute.arch.shuffle_sync_bfly(v, distance)
                    v = combine(statistic.op, v, other)
                row = thread // LANES + p * self.tile.height
                slot = memory.statistics + ((s * k.cluster + here.tile.rank) * k.m + first + row)
                if row < self.rows and lane8 < self.tile.receivers:
                    if cutlass.const_expr(self.tile.receivers > 1):
                        push(slot, (float_bits(v),), memory.reduced.only, lane8)
                    else:
                        put(slot, v)

    @cute.jit
    def row_values(self, memory, thread, turn):
        """Compute the row scalars of the epilogue, each once: thread i computes row i."""
        k, plan = self.k, self.k.plan
        if cutlass.const_expr(self.tile.receivers > 1):
            memory.reduced.only.wait(turn)
        else:
            Meeting(HELPERS_BARRIER, 32 * k.helpers).meet()
        for p in cutlass.range_constexpr(-(-k.m // (32 * k.helpers))):
            row = thread + p * 32 * k.helpers
            if row < k.m:
                totals = {}
                for s, statistic in enumerate(plan.statistics):
                    v = Float32(NEUTRAL[statistic.op])
                    for source in cutlass.range_constexpr(k.cluster):
                        part = element(memory.statistics, (s * k.cluster + source) * k.m + row)
                        v = combine(statistic.op, v, part)
                    totals[statistic.value] = v * statistic.scale
                for j, e in enumerate(plan.row_values.values()):
                    value = e.evaluate([totals[i] for i in e.leaves], k.math)
                    put(memory.row_values + (j * k.m + row), value)
