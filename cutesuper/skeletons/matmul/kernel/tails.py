"""Products after the mainloop: accumulators go back to shared memory as a row operand.

``X W + (X A) B``: the loop accumulates X W and H = X A; here H is rounded to the operands' type,
written as a tile ``[row, hidden]`` and multiplied by B, whose tile waits in shared memory. If a
cluster shares the loop (split-K), every block does this with its part of H (the product is linear
in it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute

from cutesuper.device.barriers import fence_copies
from cutesuper.device.memory import EVICT_LAST, bulk_load, operand, tile_atom
from cutesuper.device.products import Product
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel


class Tails:
    """The products after the mainloop of one kernel."""

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        self.tails = kernel.plan.tails
        finals = kernel.plan.finals
        self.targets = [finals[t.final] for t in self.tails]
        #: tails whose row operand the loop accumulates
        self.multiplied = [t for t in self.tails if t.products]
        #: row operands loaded by TMA, by product
        self.loaded = {t: v for t, x in enumerate(self.tails) if (v := kernel.plan.loaded(x))}

    def allocate(self, alloc: Any, smem: dict[str, Any]) -> None:
        """Allocate shared memory: rings of the hidden column operands, and both operands of each
        product."""
        k = self.k
        smem["inner"], smem["inner_read"] = [], []
        for g in k.inner:
            if g.views:
                ring = self._boxes(alloc, g, g.slots * g.boxes)
                layout = g.read_layout(k.dtype, g.slots * g.boxes)
                smem["inner"].append(ring)
                smem["inner_read"].append(cute.make_tensor(ring.iterator, layout.outer))
        smem["after"] = [self._boxes(alloc, g, g.boxes) for g in k.after]
        smem["hidden"] = [operand(alloc, k.dtype, k.row_layout(k.m, t.blocks)) for t in self.tails]

    def _boxes(self, alloc: Any, group: Any, boxes: int) -> cute.Tensor:
        return operand(alloc, self.k.dtype, group.layout(self.k.dtype, boxes))

    # -------------------------------------------------------------------------------- producer

    def row_atoms(self, tensors: list[cute.Tensor]) -> list[Any]:
        """TMA atoms of the row operands that are tensors in memory, one chunk per box."""
        k = self.k
        layout = cute.slice_(k.row_layout(k.m, 1), (None, None, 0))
        return [
            tile_atom(k.row_tensor(v, self.tails[t].hidden, tensors, False), layout, (k.m, CHUNK))
            for t, v in self.loaded.items()
        ]

    @cute.jit
    def load_operands(self, atoms, sources, slots, smem, where, early: cutlass.Constexpr):
        """Load the operands of the products after the loop: columns, then rows."""
        k, full = self.k, smem["after_full"].only
        if cutlass.const_expr(early):
            total = sum(g.boxes * COLUMN_BLOCK * g.depth * 2 for g in k.after)
            total += sum(k.m * self.tails[t].padded * 2 for t in self.loaded)
            full.expect_once(total)
        for i, (t, view) in enumerate(self.loaded.items()):
            if cutlass.const_expr(k.is_early(self.tails[t].source.leaves[0]) == early):
                at = tuple(where[3][d] for d in k.batch_of(view))
                n = len(self.tails) + i
                for c in cutlass.range_constexpr(self.tails[t].blocks):
                    source = sources[n][(None, where[0], c, *at)]
                    bulk_load(atoms[n], source, slots[n][None, c], full, EVICT_LAST)
        for t, tail in enumerate(self.tails):
            if cutlass.const_expr(k.is_early(tail.load) == early):
                at = tuple(where[3][d] for d in k.batch_of(tail.view))
                for b in cutlass.range_constexpr(k.blocks):
                    source = sources[t][(None, where[1] * k.blocks + b, 0, *at)]
                    bulk_load(atoms[t], source, slots[t][None, b], full, EVICT_LAST)

    # ------------------------------------------------------------------------------- consumers

    def accumulators(self, products: list[Product]) -> list[list[list[cute.Tensor]]]:
        """Zeroed fragments by product after the loop, product of the loop, and block."""
        found = []
        for tail, product in zip(self.multiplied, products, strict=True):
            count = tail.blocks // self.k.warpgroups
            fragments = [
                [product.accumulator(self.k.m) for _ in range(count)] for _ in tail.products
            ]
            for row in fragments:
                for fragment in row:
                    fragment.fill(0.0)
            found.append(fragments)
        return found

    def multiply_stage(
        self,
        products: list[Product],
        inner: Any,
        smem: dict[str, Any],
        b: cute.Tensor,
        stage: Any,
        kk: int,
        group: Any,
    ) -> None:
        """Issue one k-step of 16 of the loop, for the products along hidden labels."""
        k = self.k
        for t, (tail, product) in enumerate(zip(self.multiplied, products, strict=True)):
            a = product.first(smem["inner_read"][t])
            for p in range(len(tail.products)):
                for i in range(tail.blocks // k.warpgroups):
                    slot = stage * len(tail.products) * tail.blocks + p * tail.blocks
                    slot = slot + group + k.warpgroups * i
                    acc = inner[t][p][i]
                    row = b[None, None, kk % 4, stage * k.chunks + kk // 4]
                    product.multiply(acc, a[None, None, kk, slot], row)

    @cute.jit
    def run(self, products, accumulators, inner, smem, tensors, warp, lane, where):
        """Write every row operand, then multiply; parameters as in `Epilogue`."""
        k = self.k
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(t not in self.loaded):
                looped = bool(self.tails[t].products)
                fragments = inner[self.multiplied.index(self.tails[t])] if looped else []
                self.write(t, fragments, smem, tensors, warp, lane, where)
        # the tensor cores read the results of ordinary stores
        fence_copies()
        k.epilogue.consumers_meet()
        smem["after_full"].only.wait(0)
        k.cores.begin()
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(not self.tails[t].once):  # noqa: SIM114
                self.multiply(t, products, accumulators, smem, warp)
            elif where[2] == 0:
                self.multiply(t, products, accumulators, smem, warp)
        k.cores.end()
        k.cores.wait(0)

    @cute.jit
    def multiply(self, t: cutlass.Constexpr, products, accumulators, smem, warp):
        """Multiply one product after the loop."""
        k, product = self.k, products[t]
        product.accumulate(True)
        a, b = product.first(smem["after"][t]), product.second(smem["hidden"][t])
        for kk in cutlass.range_constexpr(self.tails[t].padded // 16):
            for i in cutlass.range_constexpr(k.blocks // k.warpgroups):
                acc = accumulators[self.targets[t]][i]
                slot = warp // 4 + k.warpgroups * i
                product.multiply(acc, a[None, None, kk, slot], b[None, None, kk % 4, kk // 4])

    @cute.jit
    def write(self, t: cutlass.Constexpr, fragments, smem, tensors, warp, lane, where):
        """Apply a product's source to the accumulators and write its row operand."""
        k, tail = self.k, self.tails[t]
        places = {final: p for p, (_, final) in enumerate(tail.products)}
        for i in cutlass.range_constexpr(-(-tail.blocks // k.warpgroups)):
            block = warp // 4 + k.warpgroups * i
            for half in cutlass.range_constexpr(2):
                column = k.epilogue.column_in_tile(block, half, warp, lane)
                sums = [k.epilogue.column_of(f[i], half) for f in fragments]
                if cutlass.const_expr(tail.blocks % k.warpgroups == 0):  # noqa: SIM114
                    self.write_column(t, places, sums, column, smem, tensors, lane % 4, where)
                elif block < tail.blocks:
                    self.write_column(t, places, sums, column, smem, tensors, lane % 4, where)

    @cute.jit
    def write_column(
        self,
        t: cutlass.Constexpr,
        places: cutlass.Constexpr,
        sums,
        column,
        smem,
        tensors,
        quarter,
        where,
    ):
        """Write one column of a row operand; zeros past the end of the hidden label."""
        register = cute.make_rmem_tensor(cute.make_layout(self.k.epilogue.values), self.k.dtype)
        register.fill(0.0)
        if column < self.tails[t].extent:
            self.evaluate(t, register, places, sums, column, smem, tensors, quarter, where)
        target = smem["hidden"][t]
        for v in cutlass.range_constexpr(self.k.epilogue.values):
            row = self.k.epilogue.row_of(v, quarter)
            target[row, column % CHUNK, column // CHUNK] = register[v]

    @cute.jit
    def evaluate(
        self,
        t: cutlass.Constexpr,
        register,
        places: cutlass.Constexpr,
        sums,
        column,
        smem,
        tensors,
        quarter,
        where,
    ):
        """Evaluate the source of a product on one column, rounded to the operands' type."""
        k, tail = self.k, self.tails[t]
        leaves = [
            k.epilogue.leaf(i, places, sums, smem, tensors, column, tail.hidden, where, quarter)
            for i in tail.source.leaves
        ]
        register.store(tail.source.evaluate(leaves, k.math).to(k.dtype))
