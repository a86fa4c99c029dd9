"""The issuer of the matmul loop: a warp that issues the products of all consumer warpgroups."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cutesuper.skeletons.matmul.kernel.context import Known
from cutesuper.skeletons.matmul.kernel.mainloop import Mainloop
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.tile_scheduler import Walk


class Issuer:
    """Issues the products of all stages, which these give back themselves once they are done."""

    def __init__(self, known: Known, sharing: Sharing, walk: Walk, mainloop: Mainloop) -> None:
        self.k, self.sharing, self.walk, self.mainloop = known, sharing, walk, mainloop

    @cute.jit
    def run(self, here):
        """Walk over the tiles."""
        loop, at = self.mainloop, here.memory.ring.first()
        cores = self.k.cores.issuers(here.memory.cores, loop.consumers, loop.registers)
        if cutlass.const_expr(self.walk.persistent):

            def visit(step, at):
                return self.issue(cores, here.at(self.walk.tile(step, here.tensors)), at)

            self.walk.each(here, visit, at)
        else:
            self.issue(cores, here, at)

    @cute.jit
    def issue(self, cores: cutlass.Constexpr, here, at):
        """Issue the products of a tile; return the next slot of the ring."""
        k, memory, ring = self.k, here.memory, here.memory.ring
        work = [self.mainloop.prepare(own, memory, n) for n, own in enumerate(cores)]
        for own in cores:
            own.begin()
        for _ in cutlass.range(here.tile.iterations, unroll=1):
            ring.wait(at)
            if cutlass.const_expr(k.plan.rewrites):
                memory.ready[at.stage].wait(at.phase)
            for own, products in zip(cores, work, strict=True):
                with own.issue():
                    self.mainloop.issue(products, memory, at.stage)
            cores[0].release(ring.empty[at.stage], self.sharing.parts)
            at = ring.next(at)
        for own in cores:
            own.end()
        return at
