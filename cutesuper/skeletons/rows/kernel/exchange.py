"""Exchange of row reductions: shuffles, then slots shared by all warps and blocks of a row.

Every warp writes (or, in a cluster, sends to every block) one value for each reduction and row, and
every warp adds up all of them in the same order. In larger clusters the warps of a block are
combined first, and one of them sends the block's value: 8 blocks of 16 warps would send 128 values
to each block, which 512 threads would all add up (a third of the instructions of LayerNorm's
backward pass).

There are two sets of slots, for even and odd tiles, so one barrier per level suffices: a warp that
writes a set again has passed the barrier in between.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.barriers import Barrier, publish
from cutesuper.device.cluster import float_bits, push
from cutesuper.device.fragments import combine, element_of, fragment, shuffled, tree, words
from cutesuper.device.memory import neighbours, put
from cutesuper.ir.operators.monoid import monoid
from cutesuper.skeletons.rows.kernel.context import Known, Memory, Place
from cutesuper.skeletons.rows.plan import words_of


class Exchange:
    """The steps that complete the reductions of a level."""

    def __init__(self, known: Known) -> None:
        self.k = known
        plan = self.plan = known.plan
        self.warps = plan.warps_per_row
        self.senders = plan.senders
        counts = [words_of(plan.program, level.reductions) for level in plan.levels]
        #: number of slots before those of each level, in values of rows
        self.before = [sum(counts[:n]) for n in range(len(counts))]
        #: slots of a set; the slots of this block's warps, if combined first, follow those of the
        #: cluster
        self.each = plan.slots // 2

    @cute.jit
    def start_barriers(self, memory, tidx):
        """Initialise one barrier for each level and set of slots.
        It counts the values sent by the cluster."""
        if cutlass.const_expr(self.plan.cluster > 1):
            if tidx == 0:
                memory.reduced.initialise()
                publish()

    def barrier(self, n: int, it: Any, memory: Memory) -> Barrier:
        """The barrier of a level in a tile."""
        assert memory.reduced is not None  # there is a cluster
        return memory.reduced[2 * n + it % 2]

    @cute.jit
    def arm(self, it, memory, place):
        """Expect this tile's values from the cluster."""
        if cutlass.const_expr(self.plan.cluster > 1):
            if place.thread == 0:
                for n in cutlass.range_constexpr(len(self.plan.levels)):
                    count = words_of(self.plan.program, self.plan.levels[n].reductions)
                    if cutlass.const_expr(count > 0):
                        size = 4 * count * self.plan.tile_rows * self.senders
                        self.barrier(n, it, memory).expect(size)

    def meet(
        self,
        n: int,
        it: Any,
        partial: dict[tuple[int, int], Any],
        memory: Memory,
        place: Place,
    ) -> dict[tuple[int, int], Any]:
        """Hand over this warp's part of every reduction of level n and row.
        After it returns, all warps of the block have done so, and have read their tile."""
        plan, k = self.plan, self.k
        reduced = {key: self.warp(k.kind(key[0]), x) for key, x in partial.items()}
        warp = (place.lane // 32) % self.warps
        if self.senders > 1:
            for (i, r), x in reduced.items():
                base = self.slot(n, i, r, it, memory, place)
                if plan.meets_in_block:
                    self.put(self.block_slot(n, i, r, it, memory, place) + warp, x, place)
                elif plan.cluster > 1:
                    self.send(base + place.rank * self.warps + warp, x, n, it, memory, place)
                else:
                    self.put(base + warp, x, place)
        alone = plan.cluster == 1 or plan.meets_in_block
        if (n == 0 and plan.schedule.stages) or (self.senders > 1 and alone):
            cute.arch.sync_threads()
        if plan.meets_in_block:
            for index, (i, r) in enumerate(reduced):
                self.send_block(n, i, r, it, warp == index % self.warps, memory, place)
        return reduced

    @cute.jit
    def send_block(
        self,
        n: cutlass.Constexpr,
        i: cutlass.Constexpr,
        r: cutlass.Constexpr,
        it,
        mine,
        memory,
        place,
    ):
        """Send the combined values of this block's warps to all blocks; called by one warp."""
        if mine:
            kind = self.k.kind(i)
            slots = self.block_slot(n, i, r, it, memory, place)
            x = self.add(kind, slots, self.warps)
            to = self.slot(n, i, r, it, memory, place) + place.rank
            self.send(to, x, n, it, memory, place)

    def gather(
        self,
        n: int,
        it: Any,
        reduced: dict[tuple[int, int], Any],
        memory: Memory,
        place: Place,
    ) -> dict[tuple[int, int], Any]:
        """Complete values of all reductions of level n, for every row of this thread."""
        if self.senders == 1 or not reduced:
            return reduced
        if self.plan.cluster > 1:
            self.barrier(n, it, memory).wait((it // 2) % 2)
        return {
            (i, r): self.add(self.k.kind(i), self.slot(n, i, r, it, memory, place), self.senders)
            for i, r in reduced
        }

    def warp(self, kind: str, x: Any) -> Any:
        """Combine over the lanes of a warp that share a row."""
        distance = min(self.k.lanes, 32) // 2
        while distance:
            x = combine(kind, x, shuffled(x, distance))
            distance //= 2
        return x

    def slot(self, n: int, i: int, r: int, it: Any, memory: Memory, place: Place) -> cute.Pointer:
        """Slots for the values of a reduction and row."""
        at = self.value_of(n, i, r, place) * self.senders
        return memory.slots + ((it % 2) * self.each + at)

    def block_slot(
        self, n: int, i: int, r: int, it: Any, memory: Memory, place: Place
    ) -> cute.Pointer:
        """Slots for the values of this block's warps, written only by them."""
        at = self.plan.sent_slots + self.value_of(n, i, r, place) * self.warps
        return memory.slots + ((it % 2) * self.each + at)

    def value_of(self, n: int, i: int, r: int, place: Place) -> Any:
        """Index of a reduction and row."""
        reductions = self.plan.levels[n].reductions
        before = words_of(self.plan.program, reductions[: reductions.index(i)])
        index = self.before[n] + before
        return index * self.plan.tile_rows + place.group * self.plan.schedule.depth + r

    @cute.jit
    def put(self, slot, value, place):
        """Write a warp's value: the second number of a pair behind the first of all rows."""
        given, apart = words(value), self.plan.tile_rows * self.warps
        if place.lane % 32 == 0:
            for k in cutlass.range_constexpr(len(given)):
                put(slot + k * apart, given[k])

    @cute.jit
    def send(self, slot, value, n: cutlass.Constexpr, it, memory, place):
        """Send a warp's value to all blocks of the cluster: each lane has a receiver."""
        peer = place.thread % 32
        sends = peer < self.plan.cluster
        if cutlass.const_expr(self.k.lanes < 32):
            # a warp has several rows; the first lanes of each send its value
            peer = place.lane
            sends = peer < self.plan.cluster
        given, apart = words(value), self.plan.tile_rows * self.senders
        if sends:
            for k in cutlass.range_constexpr(len(given)):
                data = (float_bits(given[k]),)
                push(slot + k * apart, data, self.barrier(n, it, memory), peer)

    def add(self, kind: str, slot: cute.Pointer, count: int) -> Any:
        """Combine ``count`` values (fp32, or pairs) in their order."""
        apart = self.plan.tile_rows * count
        found = [self.read(slot + k * apart, count) for k in range(monoid(kind).words)]
        return tree(kind, [element_of(x) for x in zip(*found, strict=True)])

    def read(self, slot: cute.Pointer, count: int) -> list[Any]:
        """The values of ``count`` neighbouring slots."""
        wide = next(n for n in (4, 2, 1) if count % n == 0)
        registers = fragment(count)
        for s in range(0, count, wide):
            source = neighbours((slot + s).align(4 * wide), wide)
            cute.autovec_copy(source, neighbours(registers.iterator + s, wide))
        return [registers[s] for s in range(count)]
