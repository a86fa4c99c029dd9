"""The helper warps of the matmul loop: row statistics and the row operand's prologue.

Eight threads share a row and read 16-byte pieces of the 128-byte rows of a chunk. The 128-byte
swizzle permutes the pieces inside a row by the row's number modulo 8, so a linear read meets every
element once; the piece's place gives its position along the contracted label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Meeting, fence_reads, fence_warp, release_warp
from cutesuper.device.cluster import float_bits, push, wait_for_cluster
from cutesuper.device.fragments import NEUTRAL
from cutesuper.device.math import nan_max
from cutesuper.device.memory import element
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.kernel.hostmath import HostMath
from cutesuper.skeletons.matmul.kernel.shift import RowShift
from cutesuper.skeletons.matmul.plan import CHUNK

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

PIECE = 8  # elements of a 16-byte access
LANES = CHUNK // PIECE  # threads that share a row
BATCH = 8  # rows of a thread that are read together
#: named barrier on which the epilogue waits for the row values (0 is that of the whole block)
ROW_VALUES_BARRIER = 1
#: named barrier of the helper warps (2 is that of the consumers)
HELPERS_BARRIER = 3


def folded(total: Any, v: Any, op: str) -> Any:
    """Fold the elements of a vector into a running sum or maximum."""
    if op == "max":
        return nan_max(total, v.reduce(cute.ReductionOp.MAX, Float32(NEUTRAL[op]), 0))
    return total + v.reduce(cute.ReductionOp.ADD, Float32(NEUTRAL[op]), 0)


class RowSide:
    """The helper warps' work on the row operand: statistics and prologue."""

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        plan = kernel.plan
        #: rows in one pass of the helper warps
        self.height = max(1, plan.helpers * 32 // LANES)
        # blocks that share a row tile each reduce a part of its rows, unless each has to compute
        # the operand in its own shared memory anyway
        self.split = kernel.sharing.active and plan.prologue is None
        self.rows = kernel.sharing.rows if self.split else kernel.m
        self.passes = -(-self.rows // self.height)
        #: number of blocks that receive one row's statistics, and of parts that a block receives
        self.receivers = kernel.sharing.blocks if self.split else kernel.cluster
        extent = plan.program.dims[plan.contracted]
        covered = plan.program.covered(plan.contracted)
        self.extent = extent
        self.ragged = covered != extent
        self.shift = RowShift(self)
        # shifts take registers too: 120 bytes of stack with 8 rows of 256x128 tiles
        self.batch = BATCH if plan.shift is None else 1

    def needs_mask(self, e: ThreadExpression, neutral: float) -> bool:
        """True if the zeros that pad the last tile would change the result."""
        if not self.ragged:
            return False
        try:
            return float(e.evaluate([0.0] * len(e.leaves), HostMath())) != neutral
        except (ArithmeticError, ValueError):
            return True

    @cute.jit
    def run(self, smem, tensors, thread, lane, where, pieces):
        """Compute the statistics of all tiles of this block."""
        at, turn = smem["ring"].first(), Int32(0)
        rank = where[2]
        shifts = self.shift.sample(pieces, tensors, thread, where)
        if cutlass.const_expr(self.k.sharing.active):
            wait_for_cluster()
        if cutlass.const_expr(self.k.walk.persistent):
            first, end = self.k.walk.run(tensors)
            for step in cutlass.range(first, end, unroll=1):
                fresh = self.k.walk.fresh(step, first, tensors)
                at = self.tile(smem, thread, lane, rank, at, turn, fresh, shifts)
                turn = turn ^ 1 if fresh else turn
        else:
            self.tile(smem, thread, lane, rank, at, turn, True, shifts)

    @cute.jit
    def tile(self, smem, thread, lane, rank, at, turn, fresh, shifts):
        """Read every stage once; then reduce over the cluster and compute the row values. Without a
        prologue there is nothing to do if the previous tile had the same rows (``fresh`` false).
        Return the next slot of the ring."""
        k, plan, ring = self.k, self.k.plan, smem["ring"]
        if cutlass.const_expr(plan.prologue is not None):
            fresh = True
        if cutlass.const_expr(self.split and len(plan.statistics) > 0):
            if thread < 32 and fresh:
                smem["reduced"].only.expect_once(4 * k.m * len(plan.statistics))
        first = Int32(0)
        if cutlass.const_expr(self.split):
            first = k.sharing.rank() * self.rows
        totals = cute.make_rmem_tensor(
            cute.make_layout(max(1, len(plan.statistics) * self.passes)), Float32
        )
        for s, statistic in enumerate(plan.statistics):
            for p in cutlass.range_constexpr(self.passes):
                totals[s * self.passes + p] = Float32(NEUTRAL[statistic.op])
        for i in cutlass.range(k.iterations, unroll=1):
            ring.wait(at)
            depth = (rank * k.iterations + i) * k.k
            row = thread // LANES
            # with fewer rows than one pass covers, the remaining threads have nothing to read
            if fresh and row < self.rows:
                self.read_rows(smem, totals, shifts, first + row, thread % LANES, at.stage, depth)
            self.k.vectors.write(smem, thread, at.stage, depth)
            if cutlass.const_expr(plan.rewrites):
                # the tensor cores read the results of ordinary stores
                release_warp(smem["ready"][at.stage], lane)
            fence_warp()
            ring.release(at.stage, lane, k.sharing.blocks)
            at = ring.next(at)
        if cutlass.const_expr(k.cluster > 1):
            wait_for_cluster()
        if cutlass.const_expr(len(plan.statistics) > 0):
            if fresh:
                self.reduce(smem, totals, thread, rank, first)
                self.row_values(smem, thread, turn)
            k.epilogue.row_values_meeting().arrive()
        return at

    @cute.jit
    def read_rows(self, smem, totals, shifts, row, lane8, stage, depth):
        """Process a thread's rows of one stage: add to the statistics, apply the prologue."""
        k = self.k
        place = (lane8 ^ (row % 8)) * PIECE  # the same for all rows, which are 8 or 16 apart
        # short loops are unrolled whole, so that their reads are all in flight together
        for c in cutlass.range(k.chunks, unroll=k.chunks if k.chunks * self.passes <= 16 else 1):
            at = c * CHUNK + place
            offset = ((stage * k.chunks + c) * k.m + row) * CHUNK + lane8 * PIECE
            vectors = self.pieces(smem["vectors"], list(k.plan.vectors), stage * k.k + at)
            for first in cutlass.range_constexpr(0, self.passes, self.batch):
                batch = range(first, min(first + self.batch, self.passes))
                places = [offset + p * (self.height * CHUNK) for p in batch]
                rows = [self.pieces(smem["rows"], list(k.plan.rows), x) for x in places]
                if cutlass.const_expr(len(rows) > 1):
                    # without this fence the compiler issues every read just before its use: 16 rows
                    # of a thread took about 1500 cycles, more than the products of 256x128x64
                    fence_reads()
                for p, loaded, x in zip(batch, rows, places, strict=True):
                    pieces = {**loaded, **vectors}
                    values = {op: piece.load().to(Float32) for op, piece in pieces.items()}
                    shifted = self.shift.applied(values, shifts[p], depth + at)
                    for s, statistic in enumerate(k.plan.statistics):
                        self.add(totals, s * self.passes + p, statistic, shifted, depth + at)
                    if cutlass.const_expr(k.plan.prologue is not None):
                        if cutlass.const_expr(self.shift.of_products):
                            values = shifted
                        self.rewrite(smem, values, x, depth + at)

    def pieces(self, rings: list[Any], ops: list[int], offset: Any) -> dict[int, Any]:
        """16 bytes of every ring at this thread's place, by the operation staged in the ring."""
        return {op: self.piece(ring, offset) for op, ring in zip(ops, rings, strict=True)}

    def piece(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        cute.autovec_copy(self.linear(ring, offset), register)
        return register

    def linear(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        """View of eight elements of a ring by byte order, whatever its swizzle."""
        pointer = cute.recast_ptr(ring.iterator, dtype=self.k.dtype)
        # `assume`, because `align` rounds the address: two instructions for each piece
        return cute.make_tensor(pointer + cute.assume(offset, divby=PIECE), cute.make_layout(PIECE))

    @cute.jit
    def add(self, totals, index: cutlass.Constexpr, statistic: cutlass.Constexpr, values, at):
        """Add eight elements to a statistic."""
        neutral = NEUTRAL[statistic.op]
        leaves = [values[op] for op in statistic.source.leaves]
        v = statistic.source.evaluate(leaves, self.k.math)
        if cutlass.const_expr(self.needs_mask(statistic.source, neutral)):
            v = cute.where(self.inside(at), v, cute.full_like(v, neutral))
        totals[index] = folded(totals[index], v, statistic.op)

    @cute.jit
    def rewrite(self, smem, values, offset, at):
        """Replace eight elements of the row operand by the operand of the products."""
        prologue = self.k.plan.prologue
        v = prologue.evaluate([values[op] for op in prologue.leaves], self.k.math)
        if cutlass.const_expr(self.needs_mask(prologue, 0.0)):
            v = cute.where(self.inside(at), v, cute.full_like(v, 0.0))
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        register.store(v.to(self.k.dtype))
        cute.autovec_copy(register, self.linear(smem["rows"][0], offset))

    def inside(self, at: Any) -> Any:
        """Predicates of eight elements: true before the end of the contracted label."""
        index = cute.make_rmem_tensor(cute.make_layout(PIECE), Int32)
        for e in range(PIECE):
            index[e] = at + e
        return index.load() < self.extent

    @cute.jit
    def reduce(self, smem, totals, thread, rank, first):
        """Combine the threads of a row, then send the result to every block that needs it."""
        k, lane8 = self.k, thread % LANES
        for s, statistic in enumerate(k.plan.statistics):
            for p in cutlass.range_constexpr(self.passes):
                v = totals[s * self.passes + p]
                for distance in (4, 2, 1):
                    other = cute.arch.shuffle_sync_bfly(v, distance)
                    if cutlass.const_expr(statistic.op == "max"):
                        v = nan_max(v, other)
                    else:
                        v += other
                row = thread // LANES + p * self.height
                slot = smem["statistics"] + ((s * k.cluster + rank) * k.m + first + row)
                if row < self.rows and lane8 < self.receivers:
                    if cutlass.const_expr(self.receivers > 1):
                        push(slot, (float_bits(v),), smem["reduced"].only, lane8)
                    else:
                        cute.make_tensor(slot, cute.make_layout(1))[0] = v

    @cute.jit
    def row_values(self, smem, thread, turn):
        """Compute the row scalars of the epilogue, each once: thread i computes row i."""
        k, plan = self.k, self.k.plan
        if cutlass.const_expr(self.receivers > 1):
            smem["reduced"].only.wait(turn)
        else:
            Meeting(HELPERS_BARRIER, 32 * k.helpers).meet()
        for p in cutlass.range_constexpr(-(-k.m // (32 * k.helpers))):
            row = thread + p * 32 * k.helpers
            if row < k.m:
                totals = {}
                for s, statistic in enumerate(plan.statistics):
                    v = Float32(NEUTRAL[statistic.op])
                    for source in cutlass.range_constexpr(k.cluster):
                        part = element(smem["statistics"], (s * k.cluster + source) * k.m + row)
                        v = nan_max(v, part) if statistic.op == "max" else v + part
                    totals[statistic.value] = v * statistic.scale
                for j, e in enumerate(plan.row_values.values()):
                    value = e.evaluate([totals[i] for i in e.leaves], k.math)
                    target = cute.make_tensor(
                        smem["row_values"] + (j * k.m + row), cute.make_layout(1)
                    )
                    target[0] = value
