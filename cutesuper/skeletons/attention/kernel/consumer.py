"""Consumer warpgroups of the attention loop: matrix products and the work between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.barriers import Meeting, fence_warp
from cutesuper.device.cluster import wait_for_cluster
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.pipeline import Slot
from cutesuper.skeletons.attention.kernel.rows import TURN_BARRIER

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
        # two products of scores, because the flag cannot change inside a run-time loop
        begin, more = self.k.score_product(), self.k.score_product()
        second = self.k.value_product()
        begin.accumulate(False)
        more.accumulate(True)
        second.accumulate(True)
        a = begin.first(smem["rows"])
        a = a[None, None, None, group // self.k.key_groups]
        b = begin.second(smem["keys"])
        v = second.second(smem["values"])
        scores = begin.accumulator(self.k.key_tile)
        result = second.accumulator(self.k.width)
        result.fill(0.0)
        words = cute.make_rmem_tensor(cute.make_layout(self.k.key_tile // 4), Int32)
        # the accumulators' order (2 columns, row and row + 8, blocks of 8 columns) is that of an A
        # operand in registers: 8 values for 16 keys
        layout = cute.make_layout(((2, 2, 2), 1, self.k.key_tile // 16), stride=((1, 2, 4), 0, 8))
        weights = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.k.dtype), layout)
        state = self.k.scores.start(warp, lane)
        if cutlass.const_expr(self.k.dependent and len(self.k.plan.vectors) > 0):
            wait_for_predecessor()  # they are read with ordinary loads
        rows = self.k.rows.prepare(smem, tensors, thread, group, lane, warp, place)
        keys = (first + lead) * self.k.key_tile
        steps = (count - lead + self.k.key_groups - 1) // self.k.key_groups
        fragments = (a, b, v, scores, weights, words, result)
        if cutlass.const_expr(self.k.plan.schedule.overlapped):
            self.overlapped(
                (begin, more, second),
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
                (begin, more, second),
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
            wait_for_cluster()
        if cutlass.const_expr(self.k.dependent):
            wait_for_predecessor()
        self.k.join.run(result, state, smem, scratch, tensors, tidx, warp, lane, place, rows)

    @cute.jit
    def plain(self, products, fragments, smem, state, rows, group, thread, lane, lead, keys, steps):
        """Process one tile after the other.

        ``scores`` and ``result`` are fp32 accumulator fragments of ``(64, key tile)`` and
        ``(64, width)``; ``weights`` is the 16-bit A operand in the registers of ``words`` (Int32).
        """
        a, b, v, scores, weights, words, result = fragments
        cores, key_ring, value_ring = self.k.cores, smem["key_ring"], smem["value_ring"]
        at = Slot(Int32(0) + lead, Int32(0))
        for _ in cutlass.range(steps, unroll=1):
            key_ring.wait(at)
            cores.begin()
            self.multiply_keys(products, scores, a, b, at.stage)
            cores.wait(0)
            self.release(key_ring, at.stage, lane)
            self.k.scores.weigh(scores, state, smem, at, lane, rows, keys)
            self.k.scores.pack(scores, words)
            self.k.scores.rescale(result, state)
            value_ring.wait(at)
            self.k.key_values.clean(smem, thread, group, at.stage, keys, rows)
            cores.begin()
            self.multiply_values(products[2], result, weights, v, at.stage)
            cores.wait(0)
            self.release(value_ring, at.stage, lane)
            keys += self.k.key_tile * self.k.key_groups
            at = key_ring.skip(at, self.k.key_groups)

    @cute.jit
    def overlapped(
        self, products, fragments, smem, state, rows, group, thread, lane, lead, keys, steps
    ):
        """Multiply the next tile's scores before this tile's weights, so that exponentials are
        computed during a product: 14.5 -> 13.9 us at 16x256 rows and 4096 keys, with lazy
        rescaling. Parameters as in `plain`."""
        a, b, v, scores, weights, words, result = fragments
        cores, key_ring, value_ring = self.k.cores, smem["key_ring"], smem["value_ring"]
        at = Slot(Int32(0) + lead, Int32(0))
        before = Slot(Int32(0) + lead, Int32(0))
        if cutlass.const_expr(self.turns):
            if group == 1:
                self.turn(0).arrive()
        if steps > 0:
            key_ring.wait(at)
            if cutlass.const_expr(self.turns):
                self.turn(group).meet()
            cores.begin()
            self.multiply_keys(products, scores, a, b, at.stage)
            if cutlass.const_expr(self.turns):
                self.turn_of_other(group).arrive()
            cores.wait(0)
            self.release(key_ring, at.stage, lane)
            self.k.scores.weigh(scores, state, smem, at, lane, rows, keys)
            self.k.scores.pack(scores, words)
        for _ in cutlass.range(1, steps, unroll=1):
            at = key_ring.skip(at, self.k.key_groups)
            key_ring.wait(at)
            if cutlass.const_expr(self.turns):
                self.turn(group).meet()
            cores.begin()
            self.multiply_keys(products, scores, a, b, at.stage)
            value_ring.wait(before)
            self.k.key_values.clean(smem, thread, group, before.stage, keys, rows)
            self.multiply_values(products[2], result, weights, v, before.stage)
            if cutlass.const_expr(self.turns):
                self.turn_of_other(group).arrive()
            keys += self.k.key_tile * self.k.key_groups
            cores.wait(1)
            self.release(key_ring, at.stage, lane)
            self.k.scores.weigh(scores, state, smem, at, lane, rows, keys)
            cores.wait(0)
            self.release(value_ring, before.stage, lane)
            self.k.scores.rescale(result, state)
            # only now: packed earlier, the weights get the registers of those being multiplied, and
            # the compiler serialises all products
            self.k.scores.pack(scores, words)
            before = at
        if cutlass.const_expr(self.turns):
            if group == 0:
                self.turn(0).meet()
        if steps > 0:
            value_ring.wait(before)
            self.k.key_values.clean(smem, thread, group, before.stage, keys, rows)
            cores.begin()
            self.multiply_values(products[2], result, weights, v, before.stage)
            cores.wait(0)
            # no release: nothing is loaded into this stage any more

    @cute.jit
    def multiply_keys(self, products, scores, a, b, stage):
        """Compute the fp32 scores ``(64, key tile)`` of one stage, as one group of products."""
        for kk in cutlass.range_constexpr(self.k.depth // 16):
            product = products[0] if kk == 0 else products[1]
            product.multiply(scores, a[None, None, kk], b[None, None, kk, stage])
        self.k.cores.end()

    @cute.jit
    def multiply_values(self, product, result, weights, v, stage):
        """Add one tile's weighted values to the fp32 result ``(64, width)``."""
        for kk in cutlass.range_constexpr(self.k.key_tile // 16):
            product.multiply(result, weights[None, None, kk], v[None, None, kk, stage])
        self.k.cores.end()

    @cute.jit
    def release(self, ring, stage, lane):
        """Give a stage back to the producer."""
        barrier = ring.empty[stage]
        if cutlass.const_expr(self.k.key_values.clears):
            fence_warp()
        barrier.arrive_warp(lane)

    def turn(self, group: Any) -> Meeting:
        """The barrier at which a warpgroup waits for its turn."""
        return Meeting(TURN_BARRIER + group, 256)

    def turn_of_other(self, group: Any) -> Meeting:
        """The barrier of the other warpgroup."""
        return Meeting(TURN_BARRIER + 1 - group, 256)
