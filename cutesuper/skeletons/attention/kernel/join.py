"""The end of the attention loop: results of a tile of rows are combined, then stored.
They come from warpgroups, blocks and clusters.

A thread's part of the result is cut into *items* of 16 bytes, in the order of its registers. The
thread that combines an item has the same number as those that wrote it, so that nothing is
rearranged and no banks conflict. At every level the items are divided among the participants, each
of which combines a part:

* warpgroups along the keys: through shared memory, half of the items each. Half as many bytes then
  go through distributed shared memory (6.6 -> 6.1 us at 256x4096 keys in a cluster of 8).
* blocks of a cluster: pushed into the owner's shared memory, added in the order of the ranks.
* clusters of the grid: left in device memory; the last one to arrive adds them all, in order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barriers, Meeting
from cutesuper.device.cluster import float_bits, push
from cutesuper.device.fragments import fetched, fragment
from cutesuper.device.grid import is_last, tell, told
from cutesuper.device.memory import element, neighbours, put
from cutesuper.skeletons.attention.kernel.context import ROWS_BARRIER, Here, Known, Memory, Place
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.attention.kernel.scores import exp2
from cutesuper.skeletons.attention.kernel.wide import is_wide, pieces, store
from cutesuper.skeletons.base import Output
from cutesuper.skeletons.kernel.arguments import dtype_of

#: fp32 values of an item
ITEM = 4


class Join:
    """The steps that combine partial results and store the outputs of one kernel."""

    def __init__(self, known: Known, rows: Rows) -> None:
        self.k, self.rows = known, rows
        self.plan = plan = known.plan
        self.active = plan.active_threads
        self.items, self.half, self.owned = plan.items, plan.group_items, plan.owned_items
        #: blocks of a cluster that own any of a warpgroup's items
        self.owners = -(-self.half // self.owned)
        self.few = plan.few_rows
        self.cluster, self.parts = plan.cluster, plan.grid_parts
        self.shifted = plan.maximum is not None
        self.of_rows = [o for o in plan.outputs if plan.columns not in o.view.labels]
        self.of_columns = [o for o in plan.outputs if plan.columns in o.view.labels]
        #: outputs of which threads store 16 bytes: they have all columns of their rows
        self.wide = [o for o in self.of_columns if self.is_wide(o)]

    def is_wide(self, output: Output) -> bool:
        plan, view = self.plan, output.view
        if plan.parts * self.k.key_groups > 1 or self.few:
            return False
        return is_wide(view, plan.columns, plan.extent(plan.columns), plan.itemsize(view))

    def allocate(self, alloc: Any) -> tuple[Any, Any, Barriers, Any]:
        """Allocate the shared memory through which items are exchanged: see `context.Memory`.
        Warpgroups and blocks exchange them."""
        meeting, exchange = (
            alloc.allocate_array(Float32, max(4, count // 4), byte_alignment=128)
            for count in (self.plan.meeting_bytes, self.plan.exchange_bytes)
        )
        received = Barriers.allocate(alloc, self.k.warpgroups)
        return meeting, exchange, received, alloc.allocate_array(Int32, 4, byte_alignment=16)

    @cute.jit
    def expect(self, memory, place):
        """Arm the barriers with the number of bytes that the cluster will send to this block."""
        for g in cutlass.range_constexpr(self.k.warpgroups):
            share = self.share(g, place)
            owned = cutlass.min(self.owned, cutlass.max(self.half - share * self.owned, 0))
            count = 16 * self.cluster * owned * self.active
            if share < self.owners:
                # statistics come from one thread of the four that share a row
                count += 4 * self.cluster * self.active
            memory.received[g].expect_once(count)

    @cute.jit
    def run(self, result, state, rows, here):
        """Combine the results of all warpgroups and store them.

        ``result`` is the fp32 fragment of ``(64, width)``, ``state`` that of `Scores.start`.
        """
        thread = here.member
        for r in cutlass.range_constexpr(2):
            total = state[2 * r + 1]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            state[2 * r + 1] = total
        items = fragment(ITEM * self.half)
        if cutlass.const_expr(self.k.key_groups > 1):
            self.meet(result, items, state, here)
        else:
            for i in cutlass.range_constexpr(self.items):
                for e in cutlass.range_constexpr(ITEM):
                    items[ITEM * i + e] = result[self.register(i, e)]
        owned = items
        if cutlass.const_expr(self.cluster > 1):
            owned = fragment(ITEM * self.owned)
            if thread < self.active:
                self.exchange(items, owned, state, here)
        if cutlass.const_expr(self.parts > 1):
            self.join_grid(owned, state, here)
            last = told(here.memory.last + here.group)
            if last != 0 and thread < self.active:
                self.store(owned, state, rows, here)
        else:
            if thread < self.active:
                self.store(owned, state, rows, here)

    def share(self, group: Any, place: Place) -> Any:
        """Index of the share of a warpgroup's items that this block owns.

        With fewer items than blocks, the warpgroups along the keys give theirs to different blocks:
        6.8 -> 6.6 us at 256x4096 keys in a cluster of 8, where half of the blocks received
        everything.
        """
        if self.k.key_groups == 1 or self.owners == self.cluster:
            return place.rank
        begin = (group % 2) * (self.cluster // 2)
        return (place.rank + self.cluster - begin) % self.cluster

    def owner(self, share: int, group: Any) -> Any:
        """The rank that owns a share; the inverse of `share`."""
        if self.k.key_groups == 1 or self.owners == self.cluster:
            return Int32(share)
        return (share + (group % 2) * (self.cluster // 2)) % self.cluster

    def register(self, item: int, e: int) -> int:
        """Register of an item's element in the accumulator.
        An item is two blocks of columns of one row, or one block of two rows."""
        return 8 * item + (e if e < 2 else e + 2) if self.few else ITEM * item + e

    def row_of(self, e: int) -> int:
        """Index of the thread's row that an item's element belongs to."""
        return 0 if self.few else e // 2

    # ------------------------------------------------------------------------ warpgroups of a block

    @cute.jit
    def meet(self, result, items, state, here):
        """Exchange items between two warpgroups: both write all items, and each combines its half.
        The half is picked by address: when it was picked from registers by a run-time condition,
        the compiler lost copies."""
        group, thread = here.group, here.member
        own = self.meeting(here.memory, group)
        if thread < self.active:
            for i in cutlass.range_constexpr(self.items):
                self.put(own, i, thread, [result[self.register(i, e)] for e in range(ITEM)])
            self.put(own, self.items, thread, [state[n] for n in range(4)])
        # there are at most two warpgroups along the keys
        Meeting(ROWS_BARRIER, 256).meet()
        if thread < self.active:
            other = self.meeting(here.memory, group ^ 1)
            theirs = self.get(other, self.items, thread)
            mine, added = self.merge(state, theirs)
            for i in cutlass.range_constexpr(self.half):
                item = (group % 2) * self.half + i
                if cutlass.const_expr(self.items % 2 == 0) or item < self.items:
                    self.add(items, i, own, other, item, thread, mine, added)

    @cute.jit
    def add(self, items, i: cutlass.Constexpr, own, other, item, thread, mine, added):
        """Combine one item of both warpgroups."""
        a, b = self.get(own, item, thread), self.get(other, item, thread)
        for e in cutlass.range_constexpr(ITEM):
            r = self.row_of(e)
            items[ITEM * i + e] = a[e] * mine[r] + b[e] * added[r]

    def meeting(self, memory: Memory, group: Any) -> Any:
        """Part of shared memory that belongs to a warpgroup."""
        return memory.meeting + group * (ITEM * self.active * (self.items + 1))

    def merge(self, state: Any, theirs: Any) -> tuple[list[Any], list[Any]]:
        """Merge another part into the maxima and sums; return the factors of both parts."""
        mine, added = [], []
        for r in range(2):
            a: Any = 1.0
            b: Any = 1.0
            if self.shifted:
                top = cute.arch.fmax(state[2 * r], theirs[2 * r])
                a, b = exp2(state[2 * r] - top), exp2(theirs[2 * r] - top)
                state[2 * r] = top
            state[2 * r + 1] = state[2 * r + 1] * a + theirs[2 * r + 1] * b
            mine.append(a)
            added.append(b)
        return mine, added

    def put(self, base: Any, slot: Any, thread: Any, values: list[Any]) -> None:
        """Write 16 bytes of a thread."""
        register = fragment(ITEM)
        for e in range(ITEM):
            register[e] = values[e]
        cute.autovec_copy(register, self.place(base, slot, thread))

    def get(self, base: Any, slot: Any, thread: Any) -> cute.Tensor:
        """Read the item written by the thread of the same number."""
        return fetched(self.place(base, slot, thread))

    def place(self, base: Any, slot: Any, thread: Any) -> cute.Tensor:
        offset = cute.assume((slot * self.active + thread) * ITEM, divby=ITEM)
        return neighbours(base + offset, ITEM)

    # -------------------------------------------------------------------------- blocks of a cluster

    @cute.jit
    def exchange(self, items, owned, state, here):
        """Push every item to the block that owns it; add those that arrive."""
        group, thread, place = here.group, here.member, here.place
        each = self.plan.part_words
        base = here.memory.exchange + group * (self.cluster * each)
        mine = base + place.rank * each
        words = cute.recast_tensor(items, Int32)
        barrier = here.memory.received[group]
        for i in cutlass.range_constexpr(self.half):
            data = tuple(words[ITEM * i + e] for e in range(ITEM))
            slot = ((i % self.owned) * self.active + thread) * ITEM
            push(mine + slot, data, barrier, self.owner(i // self.owned, group))
        if here.lane % 4 == 0:
            data = tuple(float_bits(state[n]) for n in range(4))
            slot = self.owned * self.active * ITEM + thread // 4 * ITEM
            for d in cutlass.range_constexpr(self.owners):
                push(mine + slot, data, barrier, self.owner(d, group))
        if self.share(group, place) < self.owners:
            barrier.wait(0)
            self.gather(owned, state, base, self.cluster, thread)

    @cute.jit
    def gather(self, owned, state, base, count: cutlass.Constexpr, thread):
        """Add the items of all parts in their order.

        The statistics are read twice: when they were kept in registers, those of 16 parts spilled.
        """
        tops = [Float32(state[0]), Float32(state[2])]
        each, statistic = self.plan.part_words, thread // 4
        behind = self.owned * self.active * ITEM
        if cutlass.const_expr(self.shifted):
            for s in cutlass.range_constexpr(count):
                theirs = self.get(base + s * each + behind, 0, statistic)
                tops = [cute.arch.fmax(tops[r], theirs[2 * r]) for r in range(2)]
        sums = [Float32(0.0), Float32(0.0)]
        owned.fill(0.0)
        for s in cutlass.range(count, unroll=min(count, 16)):
            part = base + s * each
            statistics = self.get(part + behind, 0, statistic)
            factors = [Float32(1.0), Float32(1.0)]
            if cutlass.const_expr(self.shifted):
                factors = [exp2(statistics[2 * r] - tops[r]) for r in range(2)]
            sums = [sums[r] + statistics[2 * r + 1] * factors[r] for r in range(2)]
            for j in cutlass.range_constexpr(self.owned):
                x = self.get(part, j, thread)
                for e in cutlass.range_constexpr(ITEM):
                    r = self.row_of(e)
                    owned[ITEM * j + e] = owned[ITEM * j + e] + x[e] * factors[r]
        for r in cutlass.range_constexpr(2):
            state[2 * r] = tops[r]
            state[2 * r + 1] = sums[r]

    # --------------------------------------------------------------------------- parts of the grid

    @cute.jit
    def join_grid(self, owned, state, here):
        """Leave the items in device memory; the last part to arrive adds those of all parts.

        No block waits for another, so blocks may run in any order.
        """
        partials, counters = here.scratch
        group, thread, place = here.group, here.member, here.place
        unit = (place.tile * self.cluster + place.rank) * self.k.warpgroups + group
        each = self.plan.part_words
        base = partials.iterator + unit * (self.parts * each)
        own = base + (place.part // self.cluster) * each
        if thread < self.active:
            for j in cutlass.range_constexpr(self.owned):
                self.put(own, j, thread, [owned[ITEM * j + e] for e in range(ITEM)])
            if thread % 4 == 0:
                behind = own + self.owned * self.active * ITEM
                self.put(behind, 0, thread // 4, [state[n] for n in range(4)])
        here.group_meets()
        if thread == 0:
            counter = counters.iterator + unit
            last = is_last(counter, self.parts)
            tell(here.memory.last + group, last)
        here.group_meets()
        last = told(here.memory.last + group)
        if last != 0 and thread < self.active:
            self.gather(owned, state, base, self.parts, thread)

    # --------------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, owned, state, rows, here):
        """Apply the epilogue to the items that this thread owns, and store them."""
        plan, k, place, group = self.plan, self.k, here.place, here.group
        finals = []
        for r in cutlass.range_constexpr(self.rows.per_thread):
            known = dict(zip(plan.row_values, rows.values[r], strict=True)) | self.read(r, here)
            for s in plan.row_sums:
                total = state[2 * r + 1]
                known[s.final] = total
                if cutlass.const_expr(s.inverse is not None):
                    # a row without visible keys is 0, not 0 / 0
                    known[s.inverse] = 1.0 / total if total != 0.0 else Float32(0.0)
            if cutlass.const_expr(plan.maximum is not None):
                known[plan.maximum] = state[2 * r] * 0.6931471805599453
            finals.append(known)
        count = self.owned
        own = self.share(group, place) * self.owned
        first = (group % k.key_groups) * self.half + own
        for r in cutlass.range_constexpr(self.rows.per_thread):
            row = self.rows.row(here.warp, here.lane, r)
            positions, inside = self.rows.positions(place, group, row)
            found = [self.pieces(owned, r, output, finals[r], here.lane) for output in self.wide]
            if self.rows.exists(here.tensors, positions, inside):
                for n in cutlass.range_constexpr(len(self.wide)):
                    store(found[n], self.row_start(self.wide[n], positions, here), here.lane)
                for j in cutlass.range_constexpr(count):
                    # the last owners may have padding in place of items
                    if own + j < self.half and first + j < self.items:
                        self.store_item(owned, j, first + j, r, finals[r], positions, here)
                if cutlass.const_expr(len(self.of_rows) > 0):
                    # by the owner of the row's first item, and one of the threads that share a row
                    if first == 0 and here.lane % 4 == 0:
                        self.store_row(finals[r], positions, here)

    def read(self, r: int, here: Here) -> dict[int, Any]:
        """The numbers of a thread's r-th row that outputs read from memory.

        For padding those of the last row.
        """
        if not self.plan.row_loads:
            return {}
        row = self.rows.row(here.warp, here.lane, r)
        positions, _ = self.rows.positions(here.place, here.group, row)
        found: dict[int, Any] = {}
        for i, view in self.plan.row_loads.items():
            offset = self.rows.line(view, positions, here.tensors)
            found[i] = Float32(element(here.tensors[view.argument].iterator, offset))
        return found

    def store_row(self, known: dict[int, Any], positions: dict[str, Any], here: Here) -> None:
        """Store the outputs that have one number for each row."""
        for output in self.of_rows:
            leaves = [known[i] for i in output.expression.leaves]
            x = Float32(output.expression.evaluate(leaves, self.k.math))
            offset = self.rows.offset(output.view, positions, here.tensors)
            base = here.tensors[output.view.argument].iterator
            put(base + offset, x.to(dtype_of(self.plan, output.view)))

    def numbers(self, owned: Any, first: int, output: Output, known: dict[int, Any]) -> cute.Tensor:
        """Two neighbouring numbers of an output, from the results ``first`` and the next."""
        register = fragment(2, dtype_of(self.plan, output.view))
        for b in range(2):
            values = {**known, self.plan.result.final: owned[first + b]}
            leaves = [values[i] for i in output.expression.leaves]
            x = Float32(output.expression.evaluate(leaves, self.k.math))
            register[b] = x.to(register.element_type)
        return register

    def pieces(
        self, owned: Any, r: int, output: Output, known: dict[int, Any], lane: Any
    ) -> list[cute.Tensor]:
        """A thread's r-th row of an output, as `wide.store` takes it."""

        def pair(block: int) -> cute.Tensor:
            return self.numbers(owned, ITEM * block + 2 * r, output, known)

        return pieces(pair, self.items, lane)

    def row_start(self, output: Output, positions: dict[str, Any], here: Here) -> cute.Pointer:
        """The place of a row's first column in an output that is stored 16 bytes at a time."""
        offset = self.rows.offset(output.view, positions, here.tensors)
        return here.tensors[output.view.argument].iterator + cute.assume(offset, divby=8)

    @cute.jit
    def store_item(
        self,
        owned,
        j: cutlass.Constexpr,
        item,
        r: cutlass.Constexpr,
        known,
        positions,
        here,
    ):
        """Store an item: two columns of one row, or two columns each of two blocks."""
        plan = self.plan
        pairs = [(0, 2 * item), (2, 2 * item + 1)] if self.few else [(2 * r, item)]
        for e, block in pairs:
            column = 8 * block + 2 * (here.lane % 4)
            if column < plan.tile(plan.columns):
                for output in [o for o in self.of_columns if o not in self.wide]:
                    register = self.numbers(owned, ITEM * j + e, output, known)
                    offset = self.rows.offset(output.view, positions, here.tensors) + column
                    base = here.tensors[output.view.argument].iterator
                    target = neighbours(base + cute.assume(offset, divby=2), 2)
                    cute.autovec_copy(register, target)
