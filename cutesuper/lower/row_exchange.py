"""How reductions along a row travel: shuffles, then slots of all warps and blocks that share it.

Every warp writes (or, in a cluster, sends to every block) one value for each reduction and row, and
everybody adds up all of them in the same order. In larger clusters the warps of a block meet first,
and one of them sends what the block has: 8 blocks of 16 warps would send 128 values to each block,
which 512 threads would all add up (a third of the instructions of LayerNorm's backward pass).

A maximum and the sum of exponentials below it travel together (`row_pairs`), and are merged where
others are added up.

There are two sets of slots, for even and odd tiles, so one barrier a level does: who writes a set
again has passed the barrier in between.
"""

from __future__ import annotations

from functools import partial as given
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.fragments import NEUTRAL, combine, tree
from cutesuper.device.math import choose
from cutesuper.device.memory import element, float_bits, push
from cutesuper.lower.online import merged
from cutesuper.schedule.rows import power_of_two

if TYPE_CHECKING:
    from cutesuper.lower.row_loop import RowLoopKernel


class Exchange:
    """Completes the reductions of a level."""

    def __init__(self, kernel: RowLoopKernel) -> None:
        self.k = kernel
        plan = self.plan = kernel.plan
        self.warps = plan.warps_per_row
        self.senders = plan.senders
        counts = [len(level.reductions) for level in plan.levels]
        #: slots before those of each level, in values of rows
        self.before = [sum(counts[:n]) for n in range(len(counts))]
        #: slots of a set: of the warps of this block, where they meet first, behind those of all
        self.each = plan.slots // 2

    @cute.jit
    def start_barriers(self, smem, tidx):
        """One barrier for each level and set of slots, which counts what a cluster sends."""
        if cutlass.const_expr(self.plan.cluster > 1):
            if tidx == 0:
                for n in cutlass.range_constexpr(2 * len(self.plan.levels)):
                    cute.arch.mbarrier_init(smem["reduced"] + n, 1)
                cute.arch.mbarrier_init_fence()

    @cute.jit
    def arm(self, it, smem, place):
        """Expect this tile's values from the cluster."""
        if cutlass.const_expr(self.plan.cluster > 1):
            if place["thread"] == 0:
                for n in cutlass.range_constexpr(len(self.plan.levels)):
                    count = len(self.plan.levels[n].reductions)
                    if cutlass.const_expr(count > 0):
                        size = 4 * count * self.plan.tile_rows * self.senders
                        barrier = smem["reduced"] + (2 * n + it % 2)
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def meet(self, n: int, it: Any, partial: dict[tuple[int, int], Any], smem: dict[str, Any],
             place: dict[str, Any], read: bool = False) -> dict[tuple[int, int], Any]:
        """Hand over what this warp has of every reduction of level n and row; when it returns,
        everybody in the block has, and has read its tile (``read``: had so before)."""
        plan, k = self.plan, self.k
        tops = k.pairs.tops  # those of a warp, or block, already
        reduced = {
            key: x if key[0] in tops else self.warp(k.kind(key[0]), x) for key, x in partial.items()
        }
        warp = (place["lane"] // 32) % self.warps
        if self.senders > 1:
            for (i, r), x in reduced.items():
                base = self.slot(n, i, r, it, smem, place)
                if plan.meets_in_block and i in tops:
                    continue  # the block's already
                if plan.meets_in_block:
                    self.leave(n, i, r, it, x, smem, place)
                elif plan.cluster > 1:
                    self.send(base + place["rank"] * self.warps + warp, x, n, it, smem, place)
                else:
                    self.put(base + warp, x, place)
        alone = plan.cluster == 1 or plan.meets_in_block
        if (n == 0 and k.tiles.stages and not read) or (self.senders > 1 and alone):
            cute.arch.sync_threads()
        if plan.meets_in_block:
            for index, ((i, r), x) in enumerate(reduced.items()):
                self.send_block(n, i, r, it, x, warp == index % self.warps, smem, place)
        return reduced

    @cute.jit
    def send_block(self, n: cutlass.Constexpr, i: cutlass.Constexpr, r: cutlass.Constexpr, it, x,
                   mine, smem, place):
        """What all warps of this block have, to all blocks, by one of them, which has x."""
        if mine:
            if cutlass.const_expr(i not in self.k.pairs.tops):
                x = self.of_block(n, i, r, it, smem, place)
            self.send(self.slot(n, i, r, it, smem, place) + place["rank"], x, n, it, smem, place)

    def leave(self, n: int, i: int, r: int, it: Any, x: Any, smem: dict[str, Any],
              place: dict[str, Any]) -> None:
        """A warp's value of a reduction and row, for the others of its block."""
        warp = (place["lane"] // 32) % self.warps
        self.put(self.block_slot(n, i, r, it, smem, place) + warp, x, place)

    def of_block(self, n: int, i: int, r: int, it: Any, smem: dict[str, Any],
                 place: dict[str, Any]) -> Any:
        """What the warps of this block have left, combined."""
        slot = self.block_slot(n, i, r, it, smem, place)
        return self.add(self.k.kind(i), slot, self.warps)

    def gather(self, n: int, it: Any, reduced: dict[tuple[int, int], Any], smem: dict[str, Any],
               place: dict[str, Any]) -> dict[tuple[int, int], Any]:
        """Complete values of all reductions of level n, for every row of this thread."""
        if reduced and self.plan.cluster > 1:
            cute.arch.mbarrier_wait(smem["reduced"] + (2 * n + it % 2), (it // 2) % 2)
        found = {}
        for (i, r), x in reduced.items():
            if i in self.plan.pairs:
                own = reduced[self.plan.pairs[i], r], x
                pair = self.merge(n, i, r, it, own, smem, place)
                found[self.plan.pairs[i], r], found[i, r] = pair
            elif i not in self.k.pairs.tops:
                slot = self.slot(n, i, r, it, smem, place)
                alone = self.senders == 1
                found[i, r] = x if alone else self.add(self.k.kind(i), slot, self.senders)
        return found

    def merge(self, n: int, i: int, r: int, it: Any, own: tuple[Any, Any], smem: dict[str, Any],
              place: dict[str, Any]) -> tuple[Any, Any]:
        """The pairs of all senders, at most 32 and no more than lanes share a row, one each: a
        thread that read them all would compute an exponential for each. ``own`` is that of a warp
        that has the row alone; the sum of a row of -inf is not yet NaN there."""
        wide, pair = power_of_two(self.senders), list(own)
        if self.senders > 1:
            at = place["lane"] % wide
            slots = [self.slot(n, j, r, it, smem, place) for j in (self.plan.pairs[i], i)]
            pair = [element(slot, cutlass.min(at, self.senders - 1)) for slot in slots]
            if self.senders < wide:
                pair = [choose(at < self.senders, x, NEUTRAL[kind])
                        for kind, x in zip(("max", "sum"), pair, strict=True)]
        over = given(self.over, wide)
        return merged(pair[0], pair[1], given(over, "max"), given(over, "sum"), self.k.math)

    def warp(self, kind: str, x: Any) -> Any:
        """Combine over the lanes of a warp that share a row."""
        return self.over(min(self.k.lanes, 32), kind, x)

    def over(self, lanes: int, kind: str, x: Any) -> Any:
        """Combine over neighbouring lanes, a power of two; the same bits in all of them."""
        distance = lanes // 2
        while distance:
            x = combine(kind, x, cute.arch.shuffle_sync_bfly(x, distance))
            distance //= 2
        return x

    def slot(self, n: int, i: int, r: int, it: Any, smem: dict[str, Any],
             place: dict[str, Any]) -> cute.Pointer:
        """Where the values of a reduction and row are."""
        at = self.value_of(n, i, r, place) * self.senders
        return smem["slots"] + ((it % 2) * self.each + at)

    def block_slot(self, n: int, i: int, r: int, it: Any, smem: dict[str, Any],
                   place: dict[str, Any]) -> cute.Pointer:
        """The same of the warps of this block, which only they write."""
        at = self.plan.sent_slots + self.value_of(n, i, r, place) * self.warps
        return smem["slots"] + ((it % 2) * self.each + at)

    def value_of(self, n: int, i: int, r: int, place: dict[str, Any]) -> Any:
        """The number of a reduction and row."""
        index = self.before[n] + self.plan.levels[n].reductions.index(i)
        return index * self.plan.tile_rows + place["group"] * self.plan.schedule.depth + r

    @cute.jit
    def put(self, slot, value, place):
        """A warp's value."""
        if place["lane"] % 32 == 0:
            cute.make_tensor(slot, cute.make_layout(1))[0] = value

    @cute.jit
    def send(self, slot, value, n: cutlass.Constexpr, it, smem, place):
        """A warp's value, to all blocks of the cluster: each lane has a receiver."""
        peer = place["thread"] % 32
        sends = peer < self.plan.cluster
        if cutlass.const_expr(self.k.lanes < 32):
            # a warp has several rows; the first lanes of each send its value
            peer = place["lane"]
            sends = peer < self.plan.cluster
        if sends:
            push(slot, (float_bits(value),), smem["reduced"] + (2 * n + it % 2), peer)

    def add(self, kind: str, slot: cute.Pointer, count: int) -> Any:
        """Combine ``count`` values, in their order."""
        wide = next(n for n in (4, 2, 1) if count % n == 0)
        registers = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        for s in range(0, count, wide):
            source = cute.make_tensor((slot + s).align(4 * wide), cute.make_layout(wide))
            cute.autovec_copy(source, cute.make_tensor(registers.iterator + s,
                                                       cute.make_layout(wide)))
        return tree(kind, [registers[s] for s in range(count)])


__all__ = ["Exchange"]
