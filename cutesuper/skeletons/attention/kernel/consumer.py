"""Consumer warpgroups of the attention loop: matrix products and the work between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.barriers import Meeting, fence_warp
from cutesuper.device.cluster import wait_for_cluster
from cutesuper.device.fragments import fragment
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.pipeline import Slot
from cutesuper.device.products import Consumers, Product, Products
from cutesuper.skeletons.attention.kernel.context import TURN_BARRIER, Here, Known, RowFacts
from cutesuper.skeletons.attention.kernel.join import Join
from cutesuper.skeletons.attention.kernel.keys import KeyValues
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.attention.kernel.scores import Scores


@dataclass(frozen=True)
class Chain:
    """The two products of a warpgroup, and its values in registers.

    Attributes:
        cores: the tensor cores.
        fresh, more: products of rows and keys, which replace and add to the scores: two, because
            the flag cannot change inside a run-time loop.
        second: of weights and values.
        a, b, v: operands in shared memory: rows, keys, values.
        products: fp32 accumulators of ``(64, key tile)`` and ``(64, width)``, of a warpgroup.
        scores, result: registers for them; those of the result are of all tiles so far.
        weights: the 16-bit first operand, whose numbers are in the registers of ``words`` (Int32).
        state: that of `Scores.start`.
        rows: facts of the rows.
    """

    cores: Products
    fresh: Product
    more: Product
    second: Product
    a: cute.Tensor
    b: cute.Tensor
    v: cute.Tensor
    products: tuple[Any, Any]
    scores: cute.Tensor
    result: cute.Tensor
    weights: Any
    words: cute.Tensor
    state: cute.Tensor
    rows: RowFacts


class Consumer:
    """The loop over the key tiles of one consumer warpgroup (128 threads, 64 rows)."""

    def __init__(self, known: Known, rows: Rows, key_values: KeyValues) -> None:
        self.k, self.rows, self.key_values = known, rows, key_values
        self.scores = Scores(known, rows, key_values)
        self.join = Join(known, rows)
        self.warpgroups = Consumers(known.warpgroups, together=known.plan.schedule.together)
        even = known.steps is not None and known.steps % known.key_groups == 0
        #: True if two warpgroups have rows of their own
        self.apart = known.row_groups > 1 and not known.plan.schedule.together
        #: True if two warpgroups take turns in issuing their products, so that they do not drift
        #: together
        self.turns = known.plan.schedule.overlapped and (
            self.apart or (known.key_groups == 2 and even)
        )

    @cute.jit
    def run(self, here, lead, first, count):
        """Walk the key tiles of this warpgroup, then combine and store.
        ``lead`` is its first stage, ``first`` and ``count`` (Int32) are those of the block."""
        k = self.k
        registers = k.plan.product_registers
        cores = k.cores.open(here.memory.cores, self.warpgroups, registers, k.dependent)
        chain = self.chain(cores, here)
        keys = (first + lead) * k.key_tile
        steps = (count - lead + k.key_groups - 1) // k.key_groups
        if cutlass.const_expr(k.plan.schedule.overlapped):
            self.overlapped(chain, here, lead, keys, steps)
        else:
            self.plain(chain, here, lead, keys, steps)
        cores.close()
        if cutlass.const_expr(k.plan.cluster > 1):
            wait_for_cluster()
        if cutlass.const_expr(k.dependent):
            wait_for_predecessor()
        self.join.run(chain.result, chain.state, chain.rows, here.after_loop())

    def products(self, cores: Products) -> tuple[Product, Product, Product]:
        """The products of `Chain`."""
        k = self.k
        keys, values = (True, k.inner_major), (True, not k.column_major)
        fresh, more = (cores.product(k.dtype, k.key_tile, keys) for _ in range(2))
        second = cores.product(k.dtype, k.width, values, registers=True)
        fresh.accumulate(False)
        more.accumulate(True)
        second.accumulate(True)
        return fresh, more, second

    @cute.jit
    def chain(self, cores, here):
        """Products, operands and registers; waits for the rows."""
        k, memory = self.k, here.memory
        fresh, more, second = self.products(cores)
        a = fresh.first(memory.rows)
        a = a[None, None, None, self.rows.block_of(here.group)]
        b = fresh.second(memory.keys)
        v = second.second(memory.values)
        products = fresh.accumulator(k.key_tile), second.accumulator(k.width)
        scores, result = cores.registers(products[0]), cores.total(products[1])
        words = fragment(k.key_tile // 4, Int32)
        weights = second.packed(words)
        state = self.scores.start(here.warp, here.lane)
        if cutlass.const_expr(k.dependent and len(k.plan.vectors) + len(k.plan.beside) > 0):
            wait_for_predecessor()  # they are read with ordinary loads
        rows = self.rows.prepare(here)
        return Chain(
            cores, fresh, more, second, a, b, v, products, scores, result, weights, words, state,
            rows,
        )  # fmt: skip

    @cute.jit
    def plain(self, chain, here, lead, keys, steps):
        """Process one tile after the other."""
        cores, key_ring, value_ring = chain.cores, here.memory.key_ring, here.memory.value_ring
        at = Slot(Int32(0) + lead, Int32(0))
        for _ in cutlass.range(steps, unroll=1):
            key_ring.wait(at)
            cores.begin()
            self.multiply_keys(chain, at.stage)
            beside = self.scores.beside(chain.rows, keys, here)
            cores.wait(0)
            cores.fetch(chain.products[0], chain.scores)
            self.release(key_ring, at.stage, here.lane)
            found = self.maxima(chain, at, keys, here, beside)
            self.weigh(chain, found, at, keys, here, beside)
            self.pack(chain)
            self.scores.rescale(chain.result, chain.state)
            value_ring.wait(at)
            self.key_values.clean(here, at.stage, keys, chain.rows)
            cores.begin()
            self.multiply_values(chain, at.stage)
            cores.wait(0)
            cores.add(chain.products[1], chain.result)
            self.release(value_ring, at.stage, here.lane)
            keys += self.k.key_tile * self.k.key_groups
            at = key_ring.skip(at, self.k.key_groups)

    @cute.jit
    def overlapped(self, chain, here, lead, keys, steps):
        """Multiply the next tile's scores before this tile's weights.
        Exponentials are then computed during a product: 14.5 -> 13.9 us at 16x256 rows and 4096
        keys, with lazy rescaling."""
        cores, key_ring, value_ring = chain.cores, here.memory.key_ring, here.memory.value_ring
        group = here.group
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
            self.multiply_keys(chain, at.stage)
            if cutlass.const_expr(self.turns):
                self.turn_of_other(group).arrive()
            beside = self.scores.beside(chain.rows, keys, here)
            cores.wait(0)
            cores.fetch(chain.products[0], chain.scores)
            self.release(key_ring, at.stage, here.lane)
            found = self.maxima(chain, at, keys, here, beside)
            self.weigh(chain, found, at, keys, here, beside)
            self.pack(chain)
        for _ in cutlass.range(1, steps, unroll=1):
            at = key_ring.skip(at, self.k.key_groups)
            key_ring.wait(at)
            if cutlass.const_expr(self.turns):
                self.turn(group).meet()
            cores.begin()
            self.multiply_keys(chain, at.stage)
            value_ring.wait(before)
            self.key_values.clean(here, before.stage, keys, chain.rows)
            self.multiply_values(chain, before.stage)
            if cutlass.const_expr(self.turns):
                self.turn_of_other(group).arrive()
            keys += self.k.key_tile * self.k.key_groups
            beside = self.scores.beside(chain.rows, keys, here)
            cores.wait(1)
            cores.fetch(chain.products[0], chain.scores)
            self.release(key_ring, at.stage, here.lane)
            found = self.maxima(chain, at, keys, here, beside)
            if cutlass.const_expr(self.apart):
                # The wait for a stage that is full already has a branch, which keeps the maxima in
                # front of the product's end: ptxas had moved all behind it. With the exponentials
                # in front as well, the warpgroups drift: 3579 us at 16384 causal tokens, 3494 so
                value_ring.wait(before)
                self.end_values(chain, before.stage, here)
            self.weigh(chain, found, at, keys, here, beside)
            if cutlass.const_expr(not self.apart):
                self.end_values(chain, before.stage, here)
            self.scores.rescale(chain.result, chain.state)
            # only now: packed earlier, the weights get the registers of those being multiplied, and
            # the compiler serialises all products
            self.pack(chain)
            before = at
        if cutlass.const_expr(self.turns):
            if group == 0:
                self.turn(0).meet()
        if steps > 0:
            value_ring.wait(before)
            self.key_values.clean(here, before.stage, keys, chain.rows)
            cores.begin()
            self.multiply_values(chain, before.stage)
            cores.wait(0)
            cores.add(chain.products[1], chain.result)
            # no release: nothing is loaded into this stage any more

    def maxima(self, chain: Chain, at: Slot, keys: Any, here: Here, beside: Any) -> Any:
        """Do what comes before the exponentials of a tile; see `Scores.maxima`."""
        return self.scores.maxima(chain.scores, chain.state, at, chain.rows, keys, here, beside)

    def weigh(self, chain: Chain, found: Any, at: Slot, keys: Any, here: Here, beside: Any) -> None:
        """Replace the scores of a tile by weights, with the maxima that were ``found``."""
        self.scores.weigh(chain.scores, chain.state, found, at, chain.rows, keys, here, beside)

    @cute.jit
    def end_values(self, chain, stage, here):
        """Wait for the product of values, and give its stage back."""
        chain.cores.wait(0)
        chain.cores.add(chain.products[1], chain.result)
        self.release(here.memory.value_ring, stage, here.lane)

    def pack(self, chain: Chain) -> None:
        """Make the weights an operand."""
        self.scores.pack(chain.scores, chain.words)
        chain.second.put(chain.weights, chain.words)

    @cute.jit
    def multiply_keys(self, chain, stage):
        """Compute the fp32 scores ``(64, key tile)`` of one stage, as one group of products."""
        with chain.cores.issue():
            for kk in cutlass.range_constexpr(self.k.depth // 16):
                product = chain.fresh if kk == 0 else chain.more
                rows, keys = chain.a[None, None, kk], chain.b[None, None, kk, stage]
                product.multiply(chain.products[0], rows, keys)
        chain.cores.end()

    @cute.jit
    def multiply_values(self, chain, stage):
        """Add one tile's weighted values to the fp32 result ``(64, width)``."""
        with chain.cores.issue():
            for kk in cutlass.range_constexpr(self.k.key_tile // 16):
                weights, values = chain.weights[None, None, kk], chain.v[None, None, kk, stage]
                chain.second.multiply(chain.products[1], weights, values)
        chain.cores.end()

    @cute.jit
    def release(self, ring, stage, lane):
        """Give a stage back to the producer."""
        barrier = ring.empty[stage]
        if cutlass.const_expr(self.key_values.clears):
            fence_warp()
        barrier.arrive_warp(lane)

    def turn(self, group: Any) -> Meeting:
        """The barrier at which a warpgroup waits for its turn."""
        return Meeting(TURN_BARRIER + group, 256)

    def turn_of_other(self, group: Any) -> Meeting:
        """The barrier of the other warpgroup."""
        return Meeting(TURN_BARRIER + 1 - group, 256)
