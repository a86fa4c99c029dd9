"""The consumer warpgroups of the matmul loop: products of all stages, then the end of the tile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.skeletons.matmul.kernel.context import Known
from cutesuper.skeletons.matmul.kernel.epilogue import Epilogue
from cutesuper.skeletons.matmul.kernel.gathered import GatheredProducts
from cutesuper.skeletons.matmul.kernel.mainloop import Mainloop
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.prefetch import Prefetch
from cutesuper.skeletons.matmul.kernel.scaled import ScaledProducts
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk


class Consumer:
    """Multiplies all tiles of this block, each finished before the next."""

    def __init__(
        self, known: Known, sharing: Sharing, walk: Walk, tails: Tails, epilogues: list[Epilogue]
    ) -> None:
        self.k, self.sharing, self.walk = known, sharing, walk
        self.tails, self.epilogues = tails, epilogues
        #: what all sections have in common is that of the first one
        self.epilogue = epilogues[0]
        self.prefetches = [Prefetch(e.k) for e in epilogues]
        self.mainloop = Mainloop(known, sharing, tails, self.epilogue.vectors)
        self.gathered = GatheredProducts(known, self.mainloop.per_group)
        self.scaled = ScaledProducts(known, self.mainloop, sharing)

    @cute.jit
    def run(self, here, outs):
        """Walk over the tiles; ``outs`` are the copies of `TileStore.partition`, by section."""
        k, loop, at = self.k, self.mainloop, here.memory.ring.first()
        cores = k.cores.open(here.memory.cores, loop.consumers, loop.registers, k.dependent)
        if cutlass.const_expr(self.walk.persistent):

            def visit(step, at):
                return self.consume(cores, here.at(self.walk.tile(step, here.tensors)), outs, at)

            self.walk.each(here, visit, at)
        else:
            self.consume(cores, here, outs, at)
        cores.close()
        self.epilogue.tile_store.drain()

    @cute.jit
    def consume(self, cores, here, outs, at):
        """Multiply all stages, then finish the tile; return the next slot of the ring."""
        k, after, group = self.k, self.mainloop.after, here.warp // 4
        if cutlass.const_expr(k.plan.many_rows and not self.walk.persistent):
            # the first stage goes before what is needed at the end
            here.memory.ring.wait(at)
        for n, prefetch in enumerate(self.prefetches):
            if here.tile.section == n:
                prefetch.run(here)
        self.epilogue.tile_store.ask(here, outs[0], True)
        work = self.mainloop.prepare(cores, here.memory, group)
        behind = [g.product(cores, k.dtype, self.mainloop.instruction_rows) for g in after]
        totals = self.gathered.totals(cores, work.sums)
        if cutlass.const_expr(self.mainloop.consumers.issuer):
            cores.begin()
            cores.end()
            cores.wait(0)
        elif cutlass.const_expr(k.plan.schedule.scales_columns):
            at, last = self.scaled.run(cores, work, here, at)
            if cutlass.const_expr(self.walk.persistent):
                here.memory.ring.release(last, here.lane, self.sharing.parts)
        else:
            at = self.multiply(cores, work, totals, here, at)
        self.epilogue.begin()
        self.epilogue.tile_store.ask(here, outs[0], False)
        if cutlass.const_expr(len(after) > 0):
            self.tails.run(cores, behind, work.sums, work.hidden, here)
        sums = self.gathered.sums(cores, work.sums, totals)
        of_vectors = cores.fetched(work.vectors.accumulators)
        for n, epilogue in enumerate(self.epilogues):
            if here.tile.section == n:
                epilogue.run(sums, of_vectors, here, outs[n])
        if cutlass.const_expr(k.plan.schedule.reduces_once and self.walk.persistent):
            k.rows_read_meeting().arrive()
        return at

    @cute.jit
    def multiply(self, cores, work: cutlass.Constexpr, totals: cutlass.Constexpr, here, at):
        """Multiply all stages and give them back; return the next slot of the ring."""
        k, memory, ring = self.k, here.memory, here.memory.ring
        previous = Int32(-1)
        for _ in cutlass.range(here.tile.iterations, unroll=1):
            ring.wait(at)
            if cutlass.const_expr(k.plan.rewrites):
                memory.ready[at.stage].wait(at.phase)
            if cutlass.const_expr(k.plan.gathers):
                self.gathered.multiply(cores, work.product, work.sums, totals, here, at.stage)
            else:
                cores.begin()
                with cores.issue():
                    self.mainloop.issue(work, memory, at.stage)
                cores.end()
            # one group of products stays in flight: waiting for this stage's own costs 0.2 us
            cores.wait(1)
            if previous >= 0:
                ring.release(previous, here.lane, self.sharing.parts)
            previous = at.stage
            at = ring.next(at)
        cores.wait(0)
        if cutlass.const_expr(k.plan.rounds):
            self.gathered.settle(work.product, work.sums)
        if cutlass.const_expr(self.walk.persistent):
            if cutlass.const_expr(not k.plan.open_depth) or previous >= 0:
                ring.release(previous, here.lane, self.sharing.parts)
        return at
