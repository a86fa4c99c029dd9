"""The consumer warpgroups of the matmul loop: products of all stages, then the end of the tile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.products import Product
from cutesuper.skeletons.matmul.kernel.context import Known, Memory
from cutesuper.skeletons.matmul.kernel.epilogue import Epilogue
from cutesuper.skeletons.matmul.kernel.gathered import GatheredProducts
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.prefetch import Prefetch
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk
from cutesuper.skeletons.matmul.kernel.vectors import VectorConsumer


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
        self.main, self.inner, self.after = known.groups
        self.per_group = known.blocks // known.warpgroups
        self.instruction_rows = known.plan.instruction_rows
        self.gathered = GatheredProducts(known, self.per_group)

    @cute.jit
    def run(self, here, outs):
        """Walk over the tiles; ``outs`` are the copies of `TileStore.partition`, by section."""
        k, at = self.k, here.memory.ring.first()
        # blocks of columns that are multiplied together share an accumulator
        registers = k.plan.multiplied // (128 * k.warpgroups * k.together)
        joint = self.sharing.joint
        cores = k.cores.open(here.memory.cores, k.warpgroups, registers, k.dependent, joint)
        if cutlass.const_expr(self.walk.persistent):

            def visit(step, at):
                return self.consume(cores, here.at(self.walk.tile(step, here.tensors)), outs, at)

            self.walk.each(here, visit, at)
        else:
            self.consume(cores, here, outs, at)
        cores.close(k.warpgroups)
        self.epilogue.tile_store.drain()

    @cute.jit
    def consume(self, cores, here, outs, at):
        """Multiply all stages, then finish the tile; return the next slot of the ring."""
        k, memory, ring = self.k, here.memory, here.memory.ring
        rows, group = self.instruction_rows, here.warp // 4
        for n, prefetch in enumerate(self.prefetches):
            if here.tile.section == n:
                prefetch.run(here)
        self.epilogue.tile_store.ask(here, outs[0], True)
        # the columns' instruction, or that of a hidden label if the loop multiplies nothing else
        inner = [g for g in self.inner if g.views]
        lead = self.main if self.main.views else inner[0]
        double = k.together > 1
        product = lead.product(cores, k.dtype, rows, k.plan.turned, k.plan.gathers, double)
        along_hidden = [g.product(cores, k.dtype, rows, k.plan.turned) for g in inner]
        behind = [g.product(cores, k.dtype, rows) for g in self.after]
        b = product.second(memory.rows[0])
        accumulators = cores.zeroed(product, k.m, k.results, self.per_group // k.together)
        hidden = self.tails.accumulators(cores, along_hidden)
        vectors = self.epilogue.vectors.consumer(cores, lead, memory, self.per_group)
        for instruction in (product, *along_hidden):
            instruction.accumulate(True)
        totals = self.gathered.totals(cores, accumulators)
        previous = Int32(-1)
        for _ in cutlass.range(here.tile.iterations, unroll=1):
            ring.wait(at)
            if cutlass.const_expr(k.plan.rewrites):
                memory.ready[at.stage].wait(at.phase)
            if cutlass.const_expr(k.plan.gathers):
                self.gathered.multiply(cores, product, accumulators, totals, here, at.stage)
            else:
                cores.begin()
                with cores.issue():
                    for kk in cutlass.range_constexpr(k.k // k.plan.step):
                        self.multiply(
                            product, accumulators, vectors, memory, b, at.stage, kk, group
                        )
                        self.tails.multiply_stage(
                            along_hidden, hidden, memory, b, at.stage, kk, group
                        )
                cores.end()
            # one group of products stays in flight: waiting for this stage's own costs 0.2 us
            cores.wait(1)
            if previous >= 0:
                ring.release(previous, here.lane, self.sharing.parts)
            previous = at.stage
            at = ring.next(at)
        cores.wait(0)
        if cutlass.const_expr(k.plan.rounds):
            self.gathered.settle(product, accumulators)
        if cutlass.const_expr(self.walk.persistent):
            if cutlass.const_expr(not k.plan.open_depth) or previous >= 0:
                ring.release(previous, here.lane, self.sharing.parts)
        self.epilogue.begin()
        self.epilogue.tile_store.ask(here, outs[0], False)
        if cutlass.const_expr(len(self.after) > 0):
            self.tails.run(cores, behind, accumulators, hidden, here)
        sums = self.gathered.sums(cores, accumulators, totals)
        of_vectors = cores.fetched(vectors.accumulators)
        for n, epilogue in enumerate(self.epilogues):
            if here.tile.section == n:
                epilogue.run(sums, of_vectors, here, outs[n])
        return at

    def multiply(
        self,
        product: Product,
        accumulators: Any,
        vectors: VectorConsumer,
        memory: Memory,
        b: cute.Tensor,
        stage: Any,
        kk: int,
        group: Any,
    ) -> None:
        """Issue one step for the products of the columns.

        ``accumulators`` are those of ``(64, rows)``, by product and block of 64 columns, or of
        ``(128, rows)``, by two blocks.
        """
        k, both = self.k, self.k.together
        columns = memory.columns if both == 1 else self.main.doubled(memory.columns, k.dtype)
        for w, (_, final) in enumerate(k.plan.products):
            a = product.first(columns)
            for i in range(self.per_group // both):
                slot = stage * (self.main.boxes // both) + w * (k.blocks // both)
                slot = slot + group + k.warpgroups * i
                acc = accumulators[k.plan.finals[final]][i]
                row = k.row_step(b, stage, kk)
                product.multiply(acc, a[None, None, kk, slot], row)
                vectors.multiply(w, i, kk, slot, stage)
