"""The products of the matmul loop: instructions, operands, accumulators, and those of a stage.
Consumer warpgroups issue them, or a warp of its own for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from cutesuper.device.products import Consumers, Product, Products
from cutesuper.skeletons.matmul.kernel.context import Known, Memory
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.kernel.tails import Tails
from cutesuper.skeletons.matmul.kernel.vectors import VectorConsumer, VectorTile


@dataclass(frozen=True)
class TileProducts:
    """The products of a warpgroup for a tile.

    Attributes:
        group: the warpgroup.
        product, along_hidden: instructions of the columns, and of the hidden labels.
        rows: the second operand.
        sums: accumulators of ``(64, rows)``, by product and block of 64 columns, or of
            ``(128, rows)``, by two blocks.
        hidden: those of the hidden labels.
        vectors: products of vectors.
    """

    group: Any
    product: Product
    along_hidden: list[Product]
    rows: cute.Tensor
    sums: list[list[Any]]
    hidden: list[list[list[Any]]]
    vectors: VectorConsumer


class Mainloop:
    """Makes and issues the products of stages."""

    def __init__(self, known: Known, sharing: Sharing, tails: Tails, vectors: VectorTile) -> None:
        self.k, self.tails, self.vectors = known, tails, vectors
        self.main, self.inner, self.after = known.groups
        #: blocks of columns of a warpgroup
        self.per_group = known.blocks // known.warpgroups
        self.instruction_rows = known.plan.instruction_rows
        self.consumers = Consumers(
            known.warpgroups, joint=sharing.joint, issuer=known.plan.schedule.issuer
        )
        # blocks of columns that are multiplied together share an accumulator
        each = 128 * known.warpgroups * known.together
        #: numbers of a thread that products read and write
        self.registers = known.plan.multiplied // each

    def prepare(self, cores: Products, memory: Memory, group: Any) -> TileProducts:
        """The products of a warpgroup; its accumulators are zeros."""
        k, rows = self.k, self.instruction_rows
        # the columns' instruction, or that of a hidden label if the loop multiplies nothing else
        inner = [g for g in self.inner if g.views]
        lead = self.main if self.main.views else inner[0]
        double = k.together > 1
        in_registers = k.plan.gathers or k.plan.schedule.scales_columns
        product = lead.product(cores, k.dtype, rows, k.plan.turned, in_registers, double)
        along_hidden = [g.product(cores, k.dtype, rows, k.plan.turned) for g in inner]
        b = product.second(memory.rows[0])
        sums = cores.zeroed(product, k.m, k.results, self.per_group // k.together)
        hidden = self.tails.accumulators(cores, along_hidden)
        vectors = self.vectors.consumer(cores, lead, memory, self.per_group)
        for instruction in (product, *along_hidden):
            instruction.accumulate(True)
        return TileProducts(group, product, along_hidden, b, sums, hidden, vectors)

    def issue(self, work: TileProducts, memory: Memory, stage: Any) -> None:
        """Issue the products of a stage for a warpgroup."""
        for kk in range(self.k.k // self.k.plan.step):
            self.multiply(work, memory, stage, kk)
            self.tails.multiply_stage(
                work.along_hidden, work.hidden, memory, work.rows, stage, kk, work.group
            )

    def multiply(self, work: TileProducts, memory: Memory, stage: Any, kk: int) -> None:
        """Issue one step for the products of the columns."""
        k, both = self.k, self.k.together
        columns = memory.columns if both == 1 else self.main.doubled(memory.columns, k.dtype)
        for w, (_, final) in enumerate(k.plan.products):
            a = work.product.first(columns)
            for i in range(self.per_group // both):
                slot = stage * (self.main.boxes // both) + w * (k.blocks // both)
                slot = slot + work.group + k.warpgroups * i
                acc = work.sums[k.plan.finals[final]][i]
                row = k.row_step(work.rows, stage, kk)
                work.product.multiply(acc, a[None, None, kk, slot], row)
                work.vectors.multiply(w, i, kk, slot, stage)
