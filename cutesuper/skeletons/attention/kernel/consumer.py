"""Consumer warpgroups of the attention loop: matrix products and the work between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cutesuper.device.memory import fence_reads
from cutesuper.skeletons.attention.kernel.rows import TURN_BARRIER
from cutesuper.skeletons.attention.plan import ROW_BLOCK

if TYPE_CHECKING:
    from cutesuper.skeletons.attention.kernel.loop import AttentionKernel


class Consumer:
    """The loop over the key tiles of one consumer warpgroup (128 threads, 64 rows)."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.k = kernel
        even = kernel.steps is not None and kernel.steps % kernel.key_groups == 0
        #: True if two warpgroups take turns in issuing their products, so that they do not drift
        #: together
        self.turns = (
            kernel.plan.schedule.overlapped
            and kernel.warpgroups == 2
            and (kernel.key_groups == 1 or even)
        )

    @cute.jit
    def consume(self, smem, tensors, scratch, tidx, warp, lane, place, first, count):
        """Walk the tiles of this warpgroup, then combine and store.

        ``smem`` maps names to shared-memory tensors, ``tensors`` are the kernel's arguments and
        ``scratch`` its device memory; ``first`` and ``count`` (Int32) select the key tiles of this
        block.
        """
        group = warp // 4
        lead = group % self.k.key_groups  # this warpgroup's first stage
        thread = tidx % 128
        mma, more, second = self.k.score_mma(), self.k.score_mma(), self.k.value_mma()
        # two atoms, because the accumulate flag of a WGMMA cannot change inside a run-time loop
        mma.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        second.set(warpgroup.Field.ACCUMULATE, True)
        a = mma.make_fragment_A(mma.get_slice(0).partition_A(smem["rows"]))
        a = a[None, None, None, group // self.k.key_groups]
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(smem["keys"]))
        v = second.make_fragment_B(second.get_slice(0).partition_B(smem["values"]))
        scores = cute.make_rmem_tensor(mma.partition_shape_C((ROW_BLOCK, self.k.key_tile)), Float32)
        result = cute.make_rmem_tensor(second.partition_shape_C((ROW_BLOCK, self.k.width)), Float32)
        result.fill(0.0)
        words = cute.make_rmem_tensor(cute.make_layout(self.k.key_tile // 4), Int32)
        # the accumulators' order (2 columns, row and row + 8, blocks of 8 columns) is that of an A
        # operand in registers: 8 values for 16 keys
        layout = cute.make_layout(((2, 2, 2), 1, self.k.key_tile // 16), stride=((1, 2, 4), 0, 8))
        weights = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.k.dtype), layout)
        state = self.k.scores.start(warp, lane)
        if cutlass.const_expr(self.k.dependent and len(self.k.plan.vectors) > 0):
            cute.arch.griddepcontrol_wait()  # they are read with ordinary loads
        rows = self.k.rows.prepare(smem, tensors, thread, group, lane, warp, place)
        keys = (first + lead) * self.k.key_tile
        steps = (count - lead + self.k.key_groups - 1) // self.k.key_groups
        fragments = (a, b, v, scores, weights, words, result)
        if cutlass.const_expr(self.k.plan.schedule.overlapped):
            self.overlapped(
                (mma, more, second),
                fragments,
                smem,
                state,
                rows,
                group,
                thread,
                lane,
                lead,
                keys,
                steps,
            )
        else:
            self.plain(
                (mma, more, second),
                fragments,
                smem,
                state,
                rows,
                group,
                thread,
                lane,
                lead,
                keys,
                steps,
            )
        if cutlass.const_expr(self.k.plan.cluster > 1):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.k.dependent):
            cute.arch.griddepcontrol_wait()
        self.k.join.run(result, state, smem, scratch, tensors, tidx, warp, lane, place, rows)

    @cute.jit
    def plain(self, mmas, fragments, smem, state, rows, group, thread, lane, lead, keys, steps):
        """Process one tile after the other.

        ``scores`` and ``result`` are fp32 accumulator fragments of ``(64, key tile)`` and
        ``(64, width)``; ``weights`` is the 16-bit A operand in the registers of ``words`` (Int32).
        """
        a, b, v, scores, weights, words, result = fragments
        stage, phase = Int32(0) + lead, Int32(0)
        for _ in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(smem["keys_full"] + stage, phase)
            warpgroup.fence()
            self.multiply_keys(mmas, scores, a, b, stage)
            warpgroup.wait_group(0)
            self.release(smem["keys_empty"] + stage, lane)
            self.k.scores.weigh(scores, state, smem, stage, phase, lane, rows, keys)
            self.k.scores.pack(scores, words)
            self.k.scores.rescale(result, state)
            cute.arch.mbarrier_wait(smem["values_full"] + stage, phase)
            self.k.key_values.clean(smem, thread, group, stage, keys, rows)
            warpgroup.fence()
            self.multiply_values(mmas[2], result, weights, v, stage)
            warpgroup.wait_group(0)
            self.release(smem["values_empty"] + stage, lane)
            keys += self.k.key_tile * self.k.key_groups
            stage += self.k.key_groups
            if stage >= self.k.stages:
                stage -= self.k.stages
                phase = phase ^ 1

    @cute.jit
    def overlapped(
        self, mmas, fragments, smem, state, rows, group, thread, lane, lead, keys, steps
    ):
        """Multiply the next tile's scores before this tile's weights, so that exponentials are
        computed during a product: 14.5 -> 13.9 us at 16x256 rows and 4096 keys, with lazy
        rescaling. Parameters as in `plain`."""
        a, b, v, scores, weights, words, result = fragments
        stage, phase = Int32(0) + lead, Int32(0)
        before, before_phase = Int32(0) + lead, Int32(0)
        if cutlass.const_expr(self.turns):
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=256)
        if steps > 0:
            cute.arch.mbarrier_wait(smem["keys_full"] + stage, phase)
            if cutlass.const_expr(self.turns):
                cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=256)
            warpgroup.fence()
            self.multiply_keys(mmas, scores, a, b, stage)
            if cutlass.const_expr(self.turns):
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=256)
            warpgroup.wait_group(0)
            self.release(smem["keys_empty"] + stage, lane)
            self.k.scores.weigh(scores, state, smem, stage, phase, lane, rows, keys)
            self.k.scores.pack(scores, words)
        for _ in cutlass.range(1, steps, unroll=1):
            stage += self.k.key_groups
            if stage >= self.k.stages:
                stage -= self.k.stages
                phase = phase ^ 1
            cute.arch.mbarrier_wait(smem["keys_full"] + stage, phase)
            if cutlass.const_expr(self.turns):
                cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=256)
            warpgroup.fence()
            self.multiply_keys(mmas, scores, a, b, stage)
            cute.arch.mbarrier_wait(smem["values_full"] + before, before_phase)
            self.k.key_values.clean(smem, thread, group, before, keys, rows)
            self.multiply_values(mmas[2], result, weights, v, before)
            if cutlass.const_expr(self.turns):
                cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=256)
            keys += self.k.key_tile * self.k.key_groups
            warpgroup.wait_group(1)
            self.release(smem["keys_empty"] + stage, lane)
            self.k.scores.weigh(scores, state, smem, stage, phase, lane, rows, keys)
            warpgroup.wait_group(0)
            self.release(smem["values_empty"] + before, lane)
            self.k.scores.rescale(result, state)
            # only now: packed earlier, the weights get the registers of those being multiplied, and
            # the compiler serialises all products
            self.k.scores.pack(scores, words)
            before, before_phase = stage, phase
        if cutlass.const_expr(self.turns):
            if group == 0:
                cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=256)
        if steps > 0:
            cute.arch.mbarrier_wait(smem["values_full"] + before, before_phase)
            self.k.key_values.clean(smem, thread, group, before, keys, rows)
            warpgroup.fence()
            self.multiply_values(mmas[2], result, weights, v, before)
            warpgroup.wait_group(0)
            # no release: nothing is loaded into this stage any more

    @cute.jit
    def multiply_keys(self, mmas, scores, a, b, stage):
        """Compute the fp32 scores ``(64, key tile)`` of one stage, as one group of WGMMAs."""
        for kk in cutlass.range_constexpr(self.k.depth // 16):
            mma = mmas[0] if kk == 0 else mmas[1]
            cute.gemm(mma, scores, a[None, None, kk], b[None, None, kk, stage], scores)
        warpgroup.commit_group()

    @cute.jit
    def multiply_values(self, mma, result, weights, v, stage):
        """Add one tile's weighted values to the fp32 result ``(64, width)``."""
        for kk in cutlass.range_constexpr(self.k.key_tile // 16):
            cute.gemm(mma, result, weights[None, None, kk], v[None, None, kk, stage], result)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier, lane):
        """Give a stage back to the producer."""
        if cutlass.const_expr(self.k.key_values.clears):
            fence_reads()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
