"""Products whose column operand the consumers bring to registers.
fp32 operands that are split, or that lie the other way.

A chunk of 128 bytes along the contracted label is multiplied at a time. Split operands give three
products, of which the small ones come first; their sum is added to the tile's by ordinary
instructions, which round, while the tensor cores cut off: 4 steps of positive numbers lose 1 ulp,
128 of them 22.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from cutesuper.device.barriers import fence_warp
from cutesuper.device.products import GatheredProduct, Products
from cutesuper.device.tf32 import split
from cutesuper.skeletons.matmul.kernel.context import Here, Known

#: steps of a chunk
STEPS = 4


class GatheredProducts:
    """The products of stages; ``per_group`` blocks of 64 columns belong to a warpgroup."""

    def __init__(self, known: Known, per_group: int) -> None:
        self.k, self.per_group = known, per_group
        self.main = known.groups[0]

    def totals(self, cores: Products, accumulators: list[list[Any]]) -> list[list[cute.Tensor]]:
        """Zeros for the sums of the tile; none if the accumulators hold these."""
        if not self.k.plan.split:
            return []
        made = [[cute.make_fragment_like(cores.registers(a)) for a in row] for row in accumulators]
        for row in made:
            for total in row:
                total.fill(0.0)
        return made

    def sums(
        self, cores: Products, accumulators: list[list[Any]], totals: list[list[cute.Tensor]]
    ) -> list[list[cute.Tensor]]:
        """The sums of the tile behind the last wait."""
        return totals if self.k.plan.split else cores.fetched(accumulators)

    def multiply(
        self,
        cores: Products,
        product: GatheredProduct,
        accumulators: list[list[Any]],
        totals: list[list[cute.Tensor]],
        here: Here,
        stage: Any,
    ) -> None:
        """Multiply a stage, and wait for its products."""
        k, memory = self.k, here.memory
        rings = [memory.rows[0], memory.low_rows] if k.plan.split else [memory.rows[0]]
        operands = [product.second(ring) for ring in rings]
        blocks = [(w, i) for w in range(len(k.plan.products)) for i in range(self.per_group)]
        for chunk in range(k.chunks):
            steps = range(STEPS * chunk, STEPS * chunk + STEPS)
            words = [
                part
                for w, i in blocks
                for s in steps
                for part in self.words(product, here, stage, w, i, s)
            ]
            left = iter(product.bring(words))
            cores.begin()
            with cores.issue():
                for w, i in blocks:
                    sums = accumulators[k.plan.finals[k.plan.products[w][1]]][i]
                    columns = [[next(left) for _ in operands] for _ in steps]
                    rows = [[k.row_step(x, stage, s) for x in operands] for s in steps]
                    self.issue(product, sums, columns, rows)
            cores.end()
            cores.wait(0)
            if k.plan.split:
                self.add(cores, product, accumulators, totals)
        fence_warp()  # bulk loads write the stage through another proxy

    def words(
        self, product: GatheredProduct, here: Here, stage: Any, w: int, i: int, step: int
    ) -> list[list[Any]]:
        """A thread's numbers of a column operand, or their high and low parts.
        Bulk loads have rounded the numbers."""
        k = self.k
        block = k.block(i, here.warp)
        slot = stage * self.main.boxes + w * k.blocks + block
        found = product.gathered(here.memory.columns, step, slot, here.thread)
        if not k.plan.split:
            return [found]
        return [list(part) for part in zip(*map(split, found), strict=True)]

    def issue(
        self, product: GatheredProduct, sums: Any, columns: list[Any], rows: list[list[Any]]
    ) -> None:
        """Issue the products of a chunk."""
        if not self.k.plan.split:
            for (words,), (row,) in zip(columns, rows, strict=True):
                product.multiply(sums, words, row)
            return
        for n, ((high, low), (row, low_row)) in enumerate(zip(columns, rows, strict=True)):
            (product.multiply if n else product.replace)(sums, low, row)
            product.multiply(sums, high, low_row)
        for (high, _), (row, _) in zip(columns, rows, strict=True):
            product.multiply(sums, high, row)

    def add(
        self,
        cores: Products,
        product: GatheredProduct,
        accumulators: list[list[Any]],
        totals: list[list[cute.Tensor]],
    ) -> None:
        """Add a chunk's sums to those of the tile."""
        self.settle(product, accumulators)
        for row, into in zip(cores.fetched(accumulators), totals, strict=True):
            for sums, total in zip(row, into, strict=True):
                total.store(total.load() + sums.load())

    def settle(self, product: GatheredProduct, accumulators: list[list[Any]]) -> None:
        """Keep what reads sums behind the wait for them."""
        for row in accumulators:
            for sums in row:
                product.settle(sums)
