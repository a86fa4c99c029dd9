"""The row loop as a traced kernel: blocks walk over tiles of rows.
See `cutesuper.skeletons.rows.plan`.

A thread has the same columns of all its rows. Its computation is traced piece by piece, on
fragments of these columns; the values of a piece live in a `Values`, which evaluates an operation
when it is first used.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barriers
from cutesuper.device.cluster import announce, wait_for_cluster
from cutesuper.device.fragments import NEUTRAL, combine, filled, packed, reduced, result
from cutesuper.device.launch import start_successor, wait_for_predecessor
from cutesuper.device.pipeline import Ring
from cutesuper.ir.block import LOAD
from cutesuper.ir.relations import reachable
from cutesuper.skeletons.kernel.arguments import handed_over, unravel
from cutesuper.skeletons.rows.kernel.access import Access
from cutesuper.skeletons.rows.kernel.context import Known, Memory, Place
from cutesuper.skeletons.rows.kernel.exchange import Exchange
from cutesuper.skeletons.rows.kernel.finish import Finish
from cutesuper.skeletons.rows.kernel.picks import Picks
from cutesuper.skeletons.rows.kernel.slices import Slices
from cutesuper.skeletons.rows.kernel.stages import Stages
from cutesuper.skeletons.rows.kernel.tiles import Tiles
from cutesuper.skeletons.rows.kernel.values import Sources, Values, add_rows
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowSum


class RowLoopKernel:
    """The kernel of a row loop."""

    def __init__(self, plan: RowLoopPlan) -> None:
        self.plan = plan
        self.k = known = Known.of(plan)
        self.access, self.stages = Access(known), Stages(known)
        self.picks = Picks(known, self.access, self.stages)
        self.tiles = Tiles(known, self.access, self.stages, self.picks)
        self.exchange, self.finish = Exchange(known), Finish(known)
        self.slices = Slices(known, self.access, self.stages, self.picks, self.tiles, self.finish)

    @cute.jit
    def __call__(self, *args):
        """Launch; the arguments are the plan's tensors in order, its scratch, then the stream."""
        plan = self.plan
        tensors, scratch, stream = handed_over(plan.arguments, args)
        blocks = self.walkers(tensors) * plan.parts
        for d in plan.outer:
            blocks = blocks * self.k.extents.of(d, tensors)
        self.kernel(tensors, scratch).launch(
            grid=(blocks, 1, 1),
            block=(plan.threads, 1, 1),
            stream=stream,
            use_pdl=plan.schedule.dependent_launch,
            cooperative=plan.meets and not plan.alone,
            min_blocks_per_mp=plan.schedule.resident,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Launch options: the cluster, and the share of an SM's memory that is shared memory."""
        plan, found = self.plan, dict[str, Any]()
        if plan.cluster > 1:  # a launch in clusters of 1 would be one of clusters still
            found["cluster"] = (plan.cluster, 1, 1)
        if plan.shared_percent:
            found["preferred_smem_carveout"] = plan.shared_percent
        return found

    def walkers(self, tensors: list[cute.Tensor]) -> Any:
        """Number of blocks (or clusters) that share the rows of one element of the outer labels."""
        if self.plan.walkers is not None:
            return self.plan.walkers
        tiles = self.stages.count(tensors)
        if self.plan.schedule.blocks == 0:
            return tiles
        if isinstance(tiles, int):
            return min(tiles, self.plan.schedule.blocks)
        return cutlass.min(tiles, self.plan.schedule.blocks)

    @cute.kernel
    def kernel(self, tensors: list[cute.Tensor], scratch: list[cute.Tensor]):
        plan = self.plan
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        memory = self.allocate()
        place = self.place(block, tensors, tidx)
        self.tiles.start_barriers(memory, tidx)
        self.exchange.start_barriers(memory, tidx)
        if cutlass.const_expr(plan.schedule.dependent_launch):
            wait_for_predecessor()
            start_successor()
        # requested before the ring: behind it they would arrive after all of it, and delay the
        # first tile
        vectors = self.load_vectors(tensors, place)
        sources = Sources(self.k, self.access, self.stages, self.picks, tensors, place, vectors)
        count = self.stages.of_block(tensors, place)
        # the warp that fills the ring has made its barriers: it need not wait for the other warps
        for s in cutlass.range_constexpr(plan.schedule.stages):
            self.tiles.fill(Int32(s), count, memory, tensors, place)
        here, asked = place, []
        if cutlass.const_expr(plan.schedule.sliced):
            here = self.slices.place(place, tensors)
            asked = self.slices.ask(here.y, tensors, here)
        cute.arch.sync_threads()
        if cutlass.const_expr(plan.cluster > 1):
            announce()
            if cutlass.const_expr(not plan.waits_late):
                wait_for_cluster()
        sums = [self.new_sum(s) for s in plan.sums] if plan.meets else []
        last = count - int(plan.leaves_early)
        if cutlass.const_expr(plan.carries_sums):
            some = [self.new_sum(s) for s in plan.sums]
            for first in cutlass.range(0, last, plan.sum_tiles, unroll=1):
                for it in cutlass.range(first, cutlass.min(first + plan.sum_tiles, last), unroll=1):
                    self.tile(it, count, memory, sources, some)
                self.carry(some, sums)
        else:
            for it in cutlass.range(last, unroll=1):
                self.tile(it, count, memory, sources, sums)
        if cutlass.const_expr(plan.meets):
            self.leave(count, memory, sources, scratch, sums)
            self.finish.run(memory, tensors, scratch, place)
        if cutlass.const_expr(plan.schedule.sliced):
            self.slices.run(asked, memory, tensors, here)
        # no cluster barrier is needed here: a block has waited for all values that the cluster
        # sends to it, and its memory is not read from outside

    def allocate(self) -> Memory:
        """Allocate shared memory: the ring (reused at the end), slots of reductions, barriers."""
        plan = self.plan
        alloc = cutlass.memory.SmemAllocator()
        ring = alloc.allocate_array(Int32, plan.ring_bytes // 4, byte_alignment=128)
        slots = alloc.allocate_array(Float32, max(4, plan.slots), byte_alignment=16)
        stages = plan.schedule.stages
        full = Barriers.allocate(alloc, max(1, stages), self.tiles.arrivals)
        levels = 2 * len(plan.levels)
        reduced = Barriers.allocate(alloc, levels) if plan.cluster > 1 else None
        return Memory(ring, slots, Ring(stages, full), reduced)

    def place(self, block: Any, tensors: list[cute.Tensor], tidx: Any) -> Place:
        """Coordinates of this block and thread."""
        plan = self.plan
        rank = block % plan.cluster
        rest = block // plan.cluster
        part = rest % plan.column_parts
        rest = rest // plan.column_parts
        walkers = self.walkers(tensors)
        outer = unravel(rest // walkers, {d: self.k.extents.of(d, tensors) for d in plan.outer})
        walker = rest
        if plan.outer or isinstance(walkers, int):  # of a known number the compiler uses the range
            walker = rest % walkers
        lane, group = tidx % self.k.lanes, tidx // self.k.lanes
        own = part * plan.cluster + rank
        if plan.parts == 1:
            own = 0
        first = lane * self.k.vector
        left = plan.length
        if plan.parts > 1:
            left = cutlass.min(plan.length - own * plan.width, plan.width)
        return Place(
            block, tidx, rank, walker, walkers, outer, own, lane, group, first, left, self.k.piece
        )

    # --------------------------------------------------------------------------------------- a tile

    @cute.jit
    def leave(self, count, memory, sources, scratch, sums):
        """Hand over this block's sums.
        If possible as soon as the last tile has been added, before its results are computed and
        stored (4096x4096 backward, prototype: 28.6 us, 29.3 after them).

        The last tile is code of its own: a branch in the loop cost 4% at 32768x4096.
        """
        if cutlass.const_expr(self.plan.leaves_early):
            if count > 0:
                self.tile(count - 1, count, memory, sources, sums, scratch)
            else:
                self.finish.leave_all(sums, memory, scratch, sources.place)
        else:
            self.finish.leave_all(sums, memory, scratch, sources.place)

    def tile(
        self,
        it: Any,
        count: Any,
        memory: Memory,
        sources: Sources,
        sums: list[Any],
        scratch: list[cute.Tensor] | None = None,
    ) -> None:
        """Process one tile, from one exchange to the next.
        ``scratch`` is given for the last one, where the sums are handed over as soon as they
        include it."""
        plan, tensors, place = self.plan, sources.tensors, sources.place
        self.exchange.arm(it, memory, place)
        rows = self.tiles.read(it, memory, tensors, place)
        if plan.waits_late:
            wait_for_cluster()
        known: list[dict[int, Any]] = [dict(row.scalars) for row in rows]
        for n, level in enumerate(plan.levels):
            partial: dict[tuple[int, int], Any] = {}
            for r, row in enumerate(rows):
                for p in range(self.k.pieces):
                    values = Values(sources, row, p, known[r])
                    for i in level.reductions:
                        x = self.reduced(i, values, p, place)
                        old = partial.get((i, r))
                        partial[i, r] = x if old is None else combine(self.k.kind(i), old, x)
                    for k in level.sums if plan.meets else ():
                        x = values.of(plan.sums[k].source)
                        if plan.has_columns(plan.sums[k]):
                            add_rows(self.k, sums[k][p], x, row.valid, plan.sums[k].op)
                        elif p == 0:
                            self.add_number(sums[k][0], x, row.valid, plan.sums[k].op)
                    for i in level.stores:
                        value = values.of(plan.program.ops[i].inputs[0])
                        self.access.store(i, value, p, row, tensors, place)
            if level.reductions:
                reduced = self.exchange.meet(n, it, partial, memory, place)
            elif n == 0:
                reduced = {}
                self.tiles.everybody_has_read()
            else:
                continue
            if n == 0 and plan.schedule.kept and scratch is None:
                self.tiles.refill(it, count, memory, tensors, place)
            if n == plan.last_sum and scratch is not None:
                self.finish.leave_all(sums, memory, scratch, place)
            for (i, r), x in self.exchange.gather(n, it, reduced, memory, place).items():
                factor = plan.program.factor(plan.program.ops[i])
                known[r][plan.complete[i]] = result(self.k.kind(i), x) * factor
        if not plan.schedule.kept and scratch is None:
            self.tiles.everybody_has_read()
            self.tiles.refill(it, count, memory, tensors, place)

    def reduced(self, i: int, values: Values, p: int, place: Place) -> Any:
        """The thread's part of a reduction along the row."""
        source, kind = self.plan.program.ops[i].inputs[0], self.k.kind(i)
        exact = self.plan.program.ops[i].facets.selects
        if exact and self.plan.program.ops[source].kind == LOAD:
            registers = values.registers(source)
            if packed(registers):
                return reduced(kind, registers, self.k.inside(p, place))
        starts = [self.k.chunk_at(p, c) for c in range(self.k.piece)]
        first = place.first + place.part * self.plan.width
        return reduced(kind, values.of(source), self.k.inside(p, place), first, starts)

    def new_sum(self, s: RowSum) -> list[Any]:
        """New accumulators: an fp32 fragment for each piece, or one number."""
        shape = (self.k.vector, self.k.piece) if self.plan.has_columns(s) else (1, 1)
        found = []
        for _ in range(self.k.pieces if self.plan.has_columns(s) else 1):
            found.append(filled(shape, NEUTRAL[s.op]))
        return found

    def carry(self, some: list[list[Any]], sums: list[list[Any]]) -> None:
        """Add the sums of some tiles to the totals, and reset them."""
        for s, parts, wholes in zip(self.plan.sums, some, sums, strict=True):
            for part, whole in zip(parts, wholes, strict=True):
                for n in range(cute.size(whole.shape)):
                    whole[n] = combine(s.op, whole[n], part[n])
                part.fill(NEUTRAL[s.op])

    @cute.jit
    def add_number(self, acc, value, valid, op: cutlass.Constexpr):
        """Take a value of a row into an accumulator; rows past the end do not count."""
        if valid:
            acc[0] = combine(op, acc[0], Float32(value))

    # ------------------------------------------------------------------------------------- memory

    def load_vectors(self, tensors: list[cute.Tensor], place: Place) -> dict[int, Any]:
        """Values common to all rows: fragments for loads with the column, else numbers.

        If a thread has many columns, fragments are read again at each use instead.
        """
        plan, found = self.plan, {}
        for i, view in plan.loads.items():
            if plan.varies(view) or self.only_after(i):
                continue
            if plan.column in view.labels:
                if plan.keeps_vectors:
                    found[i] = [
                        self.access.read(view, tensors, Int32(0), p, place)
                        for p in range(self.k.pieces)
                    ]
            else:
                found[i] = self.access.number(view, tensors, place)
        return found

    def only_after(self, i: int) -> bool:
        """True if nothing in the loop uses a load."""
        plan = self.plan
        work = [plan.sums[k].source for level in plan.levels for k in level.sums]
        work += [
            j
            for level in plan.levels
            for s in (*level.stores, *level.reductions)
            for j in plan.program.ops[s].inputs
        ]
        return i not in reachable(work, lambda j: plan.program.ops[j].inputs)
