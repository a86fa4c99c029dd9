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

from cutesuper.device.math import nan_max
from cutesuper.device.memory import float_bits, push, release_warp
from cutesuper.graph.thread import ThreadExpression
from cutesuper.lower.hostmath import HostMath
from cutesuper.lower.shift import RowShift
from cutesuper.schedule.matmul import CHUNK, HELPER_WARPS

if TYPE_CHECKING:
    from cutesuper.lower.matmul import MatmulKernel

PIECE = 8  # elements of a 16-byte access
LANES = CHUNK // PIECE  # threads that share a row
ROWS = HELPER_WARPS * 32 // LANES  # rows in one pass of the helper warps
NEUTRAL = {"sum": 0.0, "max": float("-inf")}
#: named barrier on which the epilogue waits for the row values (0 is the block's own)
ROW_VALUES_BARRIER = 1
#: named barrier of the helper warps (2 is the consumers')
HELPERS_BARRIER = 3


class RowSide:
    """What the helper warps do with the row operand."""

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        plan = kernel.plan
        self.passes = -(-kernel.m // ROWS)
        extent = plan.program.dims[plan.contracted]
        covered = plan.program.covered(plan.contracted)
        self.extent = extent
        self.ragged = covered != extent
        self.shift = RowShift(self)

    def needs_mask(self, e: ThreadExpression, neutral: float) -> bool:
        """Whether the zeros that pad the last tile would change the result."""
        if not self.ragged:
            return False
        try:
            return float(e.evaluate([0.0] * len(e.leaves), HostMath())) != neutral
        except (ArithmeticError, ValueError):
            return True

    @cute.jit
    def run(self, smem, tensors, thread, lane, where):
        """Read every stage once; then reduce over the cluster and compute the row values."""
        k, plan = self.k, self.k.plan
        rank = where[2]
        shifts = self.shift.sample(tensors, thread, where, ROWS)
        totals = cute.make_rmem_tensor(
            cute.make_layout(max(1, len(plan.statistics) * self.passes)), Float32
        )
        for s, statistic in enumerate(plan.statistics):
            for p in cutlass.range_constexpr(self.passes):
                totals[s * self.passes + p] = Float32(NEUTRAL[statistic.op])
        stage = Int32(0)
        phase = Int32(0)
        for i in cutlass.range(k.iterations, unroll=1):
            cute.arch.mbarrier_wait(smem["full"] + stage, phase)
            depth = (rank * k.iterations + i) * k.k
            for p in cutlass.range_constexpr(self.passes):
                row = thread // LANES + p * ROWS
                if cutlass.const_expr(k.m % ROWS == 0):  # noqa: SIM114 (a traced `or` is a branch)
                    self.read_row(smem, totals, shifts, p, row, thread % LANES, stage, depth)
                elif row < k.m:
                    self.read_row(smem, totals, shifts, p, row, thread % LANES, stage, depth)
            self.k.vectors.write(smem, thread, stage, depth)
            if cutlass.const_expr(plan.rewrites):
                # the tensor cores read what ordinary stores have just written
                release_warp(smem["ready"] + stage, lane)
            release_warp(smem["empty"] + stage, lane)
            stage += 1
            if stage == k.stages:
                stage = Int32(0)
                phase = phase ^ 1
        if cutlass.const_expr(k.cluster > 1):
            cute.arch.cluster_wait()
        if cutlass.const_expr(len(plan.statistics) > 0):
            self.reduce(smem, totals, thread, rank)
            self.row_values(smem, thread)

    @cute.jit
    def read_row(self, smem, totals, shifts, p: cutlass.Constexpr, row, lane8, stage, depth):
        """One row of one stage: add to the statistics, apply the prologue."""
        k = self.k
        offset = (stage * k.chunks * k.m + row) * CHUNK + lane8 * PIECE
        place = ((lane8 ^ (row % 8)) * PIECE)
        # short loops are unrolled whole, so that their reads are all in flight together
        for c in cutlass.range(k.chunks, unroll=k.chunks if k.chunks * self.passes <= 16 else 1):
            at = c * CHUNK + place
            pieces = self.pieces(smem, offset + c * (k.m * CHUNK), stage * k.k + at)
            values = {op: piece.load().to(Float32) for op, piece in pieces.items()}
            shifted = self.shift.applied(values, shifts[p], depth + at)
            for s, statistic in enumerate(k.plan.statistics):
                self.add(totals, s * self.passes + p, statistic, shifted, depth + at)
            if cutlass.const_expr(k.plan.prologue is not None):
                if cutlass.const_expr(self.shift.of_products):
                    values = shifted
                self.rewrite(smem, values, offset + c * (k.m * CHUNK), depth + at)

    def pieces(self, smem: dict[str, Any], row_offset: Any, vector_offset: Any) -> dict[int, Any]:
        """16 bytes of every row-side load at this thread's place."""
        k, loaded = self.k, {}
        for i, op in enumerate(k.plan.rows):
            loaded[op] = self.piece(smem["rows"][i], row_offset)
        for i, op in enumerate(k.plan.vectors):
            loaded[op] = self.piece(smem["vectors"][i], vector_offset)
        return loaded

    def piece(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        cute.autovec_copy(self.linear(ring, offset), register)
        return register

    def linear(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        """Eight elements of a ring by byte order, whatever its swizzle."""
        pointer = cute.recast_ptr(ring.iterator, dtype=self.k.dtype) + offset
        return cute.make_tensor(pointer.align(16), cute.make_layout(PIECE))

    @cute.jit
    def add(self, totals, index: cutlass.Constexpr, statistic: cutlass.Constexpr, values, at):
        """Add eight elements to a statistic."""
        neutral = NEUTRAL[statistic.op]
        leaves = [values[op] for op in statistic.source.leaves]
        v = statistic.source.evaluate(leaves, self.k.math)
        if cutlass.const_expr(self.needs_mask(statistic.source, neutral)):
            v = cute.where(self.inside(at), v, cute.full_like(v, neutral))
        if cutlass.const_expr(statistic.op == "max"):
            largest = v.reduce(cute.ReductionOp.MAX, Float32(neutral), 0)
            totals[index] = nan_max(totals[index], largest)
        else:
            totals[index] += v.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def rewrite(self, smem, values, offset, at):
        """Replace eight elements of the row operand by what the products take."""
        prologue = self.k.plan.prologue
        v = prologue.evaluate([values[op] for op in prologue.leaves], self.k.math)
        if cutlass.const_expr(self.needs_mask(prologue, 0.0)):
            v = cute.where(self.inside(at), v, cute.full_like(v, 0.0))
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), self.k.dtype)
        register.store(v.to(self.k.dtype))
        cute.autovec_copy(register, self.linear(smem["rows"][0], offset))

    def inside(self, at: Any) -> Any:
        """Which of eight elements lie before the end of the contracted label."""
        index = cute.make_rmem_tensor(cute.make_layout(PIECE), Int32)
        for e in range(PIECE):
            index[e] = at + e
        return index.load() < self.extent

    @cute.jit
    def reduce(self, smem, totals, thread, rank):
        """Combine the threads of a row, then send the result to every block of the cluster."""
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
                row = thread // LANES + p * ROWS
                slot = smem["statistics"] + ((s * k.cluster + rank) * k.m + row)
                if row < k.m and lane8 < k.cluster:
                    if cutlass.const_expr(k.cluster > 1):
                        push(slot, (float_bits(v),), smem["reduced"], lane8)
                    else:
                        cute.make_tensor(slot, cute.make_layout(1))[0] = v

    @cute.jit
    def row_values(self, smem, thread):
        """Row scalars of the epilogue, each once: thread i computes row i."""
        k, plan = self.k, self.k.plan
        if cutlass.const_expr(k.cluster > 1):
            cute.arch.mbarrier_wait(smem["reduced"], 0)
        else:
            cute.arch.barrier(barrier_id=HELPERS_BARRIER, number_of_threads=32 * k.helpers)
        for p in cutlass.range_constexpr(-(-k.m // 128)):
            row = thread + p * 128
            if row < k.m:
                totals = {}
                for s, statistic in enumerate(plan.statistics):
                    v = Float32(NEUTRAL[statistic.op])
                    for source in cutlass.range_constexpr(k.cluster):
                        part = self.scalar(smem["statistics"], (s * k.cluster + source) * k.m + row)
                        v = nan_max(v, part) if statistic.op == "max" else v + part
                    totals[statistic.value] = v * statistic.scale
                for j, e in enumerate(plan.row_values.values()):
                    value = e.evaluate([totals[i] for i in e.leaves], k.math)
                    target = cute.make_tensor(
                        smem["row_values"] + (j * k.m + row), cute.make_layout(1)
                    )
                    target[0] = value
        cute.arch.barrier_arrive(
            barrier_id=ROW_VALUES_BARRIER,
            number_of_threads=32 * (k.helpers + k.consumers),
        )

    def scalar(self, array: cute.Pointer, index: Any) -> Float32:
        """One element of a shared-memory array."""
        return cute.make_tensor(array + index, cute.make_layout(1))[0]
