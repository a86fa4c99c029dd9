"""Products after the mainloop: accumulators go back to shared memory as a row operand.

``X W + (X A) B``: the loop accumulates X W and H = X A; here H is rounded to the operands' type,
written as a tile ``[row, hidden]`` and multiplied by B, whose tile waits in shared memory. If a
cluster shares the loop (split-K), every block does this with its part of H (the product is linear
in it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.barriers import fence_copies
from cutesuper.device.fragments import filled
from cutesuper.device.memory import EVICT_LAST, bulk_load, operand, tile_atom
from cutesuper.device.products import Product, Products
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
from cutesuper.skeletons.matmul.kernel.context import Known, Memory
from cutesuper.skeletons.matmul.kernel.leaves import Leaves
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK


@dataclass(frozen=True)
class HiddenMemory:
    """Shared memory of `Tails`.
    Operands along hidden labels in the ring, the same as products read them, and both operands of
    the products after the loop."""

    inner: list[cute.Tensor]
    inner_read: list[cute.Tensor]
    after: list[cute.Tensor]
    hidden: list[cute.Tensor]


class Tails:
    """The products after the mainloop of one kernel."""

    def __init__(self, known: Known, leaves: Leaves) -> None:
        self.k, self.leaves = known, leaves
        _, self.inner, self.after = known.groups
        self.tails = known.plan.tails
        finals = known.plan.finals
        self.targets = [finals[t.final] for t in self.tails]
        #: tails whose row operand the loop accumulates
        self.multiplied = [t for t in self.tails if t.products]
        #: row operands loaded by TMA, by product
        self.loaded = {t: v for t, x in enumerate(self.tails) if (v := known.plan.loaded(x))}
        #: products whose column operand is loaded by TMA
        self.bulk = [t for t, x in enumerate(self.tails) if x.load not in known.plan.copied]
        #: number of bulk loads of both
        self.bulk_count = len(self.bulk) + len(self.loaded)

    def allocate(self, alloc: Any) -> HiddenMemory:
        """Allocate shared memory."""
        k, inner, read = self.k, list[cute.Tensor](), list[cute.Tensor]()
        for g in self.inner:
            if g.views:
                ring = self._boxes(alloc, g, g.slots * g.boxes)
                layout = g.read_layout(k.dtype, g.slots * g.boxes)
                inner.append(ring)
                read.append(cute.make_tensor(ring.iterator, layout.outer))
        after = [self._boxes(alloc, g, g.boxes) for g in self.after]
        hidden = [operand(alloc, k.dtype, k.row_layout(k.m, t.blocks)) for t in self.tails]
        return HiddenMemory(inner, read, after, hidden)

    def _boxes(self, alloc: Any, group: ColumnGroup, boxes: int) -> cute.Tensor:
        return operand(alloc, self.k.dtype, group.layout(self.k.dtype, boxes))

    # -------------------------------------------------------------------------------- producer

    def row_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """TMA atoms of the row operands that are tensors in memory, one chunk per box."""
        k = self.k
        layout = cute.select(k.row_layout(k.m, 1), [0, 1])
        return [
            tile_atom(k.row_tensor(v, self.tails[t].hidden, tensors, False), layout, (k.m, CHUNK))
            for t, v in self.loaded.items()
        ]

    @cute.jit
    def load_operands(self, loads, memory, tile, early: cutlass.Constexpr):
        """Load the operands of the products after the loop: columns, then rows."""
        k, full = self.k, memory.after_full.only
        atoms, slots, sources = loads.atoms, loads.slots, loads.sources
        if cutlass.const_expr(early):
            groups = [self.after[t] for t in self.bulk]
            total = sum(g.boxes * COLUMN_BLOCK * g.depth for g in groups)
            total += sum(k.m * self.tails[t].padded for t in self.loaded)
            full.expect_once(k.plan.element_bytes * total)
        for i, (t, view) in enumerate(self.loaded.items()):
            if cutlass.const_expr(k.is_early(self.tails[t].source.leaves[0]) == early):
                at = tuple(tile.batch[d] for d in k.batch_of(view))
                n = len(self.bulk) + i
                for c in cutlass.range_constexpr(self.tails[t].blocks):
                    source = sources[n][(None, tile.row, c, *at)]
                    bulk_load(atoms[n], source, slots[n][None, c], full, EVICT_LAST)
        for n, tail in enumerate(self.tails[t] for t in self.bulk):
            if cutlass.const_expr(k.is_early(tail.load) == early):
                at = tuple(tile.batch[d] for d in k.batch_of(tail.view))
                for b in cutlass.range_constexpr(k.blocks):
                    source = sources[n][(None, tile.column * k.blocks + b, 0, *at)]
                    bulk_load(atoms[n], source, slots[n][None, b], full, EVICT_LAST)

    # ------------------------------------------------------------------------------- consumers

    def accumulators(self, cores: Products, products: list[Product]) -> list[list[list[Any]]]:
        """Zeroed accumulators by product after the loop, product of the loop, and block."""
        return [
            cores.zeroed(product, self.k.m, len(tail.products), tail.blocks // self.k.warpgroups)
            for tail, product in zip(self.multiplied, products, strict=True)
        ]

    def multiply_stage(
        self,
        products: list[Product],
        inner: Any,
        memory: Memory,
        b: cute.Tensor,
        stage: Any,
        kk: int,
        group: Any,
    ) -> None:
        """Issue one k-step of 16 of the loop, for the products along hidden labels."""
        k = self.k
        for t, (tail, product) in enumerate(zip(self.multiplied, products, strict=True)):
            a = product.first(memory.hidden.inner_read[t])
            for p in range(len(tail.products)):
                for i in range(tail.blocks // k.warpgroups):
                    slot = stage * len(tail.products) * tail.blocks + p * tail.blocks
                    slot = slot + group + k.warpgroups * i
                    acc = inner[t][p][i]
                    row = k.row_step(b, stage, kk)
                    product.multiply(acc, a[None, None, kk, slot], row)

    @cute.jit
    def run(self, cores, products, accumulators, inner, here):
        """Write every row operand, then multiply; parameters as in `Epilogue`."""
        k = self.k
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(t not in self.loaded):
                looped = bool(self.tails[t].products)
                held = inner[self.multiplied.index(self.tails[t])] if looped else []
                fragments = cores.fetched(held)
                self.write(t, fragments, here)
        # the tensor cores read the results of ordinary stores
        fence_copies()
        k.consumers_meet()
        here.memory.after_full.only.wait(0)
        cores.begin()
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(not self.tails[t].once):  # noqa: SIM114
                self.multiply(t, cores, products, accumulators, here)
            elif here.tile.rank == 0:
                self.multiply(t, cores, products, accumulators, here)
        cores.end()
        cores.wait(0)

    @cute.jit
    def multiply(self, t: cutlass.Constexpr, cores, products, accumulators, here):
        """Multiply one product after the loop."""
        k, product = self.k, products[t]
        product.accumulate(True)
        memory = here.memory.hidden
        a, b = product.first(memory.after[t]), product.second(memory.hidden[t])
        with cores.issue():
            for kk in cutlass.range_constexpr(self.tails[t].padded // 16):
                for i in cutlass.range_constexpr(k.blocks // k.warpgroups):
                    acc = accumulators[self.targets[t]][i]
                    slot = here.warp // 4 + k.warpgroups * i
                    product.multiply(acc, a[None, None, kk, slot], b[None, None, kk % 4, kk // 4])

    @cute.jit
    def write(self, t: cutlass.Constexpr, fragments, here):
        """Apply a product's source to the accumulators and write its row operand."""
        k, tail = self.k, self.tails[t]
        places = {final: p for p, (_, final) in enumerate(tail.products)}
        for i in cutlass.range_constexpr(-(-tail.blocks // k.warpgroups)):
            block = here.warp // 4 + k.warpgroups * i
            for half in cutlass.range_constexpr(2):
                column = self.leaves.column_in_tile(block, half, here)
                sums = [self.leaves.column_of(f[i], half) for f in fragments]
                if cutlass.const_expr(tail.blocks % k.warpgroups == 0):  # noqa: SIM114
                    self.write_column(t, places, sums, column, here)
                elif block < tail.blocks:
                    self.write_column(t, places, sums, column, here)

    @cute.jit
    def write_column(self, t: cutlass.Constexpr, places: cutlass.Constexpr, sums, column, here):
        """Write one column of a row operand; zeros past the end of the hidden label."""
        register = filled(self.k.values, 0.0, self.k.dtype)
        quarter = here.quarter
        if column < self.tails[t].extent:
            self.evaluate(t, register, places, sums, column, quarter, here)
        target = here.memory.hidden.hidden[t]
        for v in cutlass.range_constexpr(self.k.values):
            row = self.leaves.row_of(v, quarter)
            target[row, column % CHUNK, column // CHUNK] = register[v]

    @cute.jit
    def evaluate(
        self,
        t: cutlass.Constexpr,
        register,
        places: cutlass.Constexpr,
        sums,
        column,
        quarter,
        here,
    ):
        """Evaluate the source of a product on one column, rounded to the operands' type."""
        k, tail = self.k, self.tails[t]
        own = self.leaves.hidden_column(places, sums, column, tail.hidden, quarter)
        register.store(self.leaves.evaluate(tail.source, own, here).to(k.dtype))
