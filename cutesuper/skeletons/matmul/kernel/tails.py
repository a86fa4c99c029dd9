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
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from cutesuper.device.memory import EVICT_LAST, bulk_load, expect_bytes, operand, tile_atom
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
                layout = g.read_layout(k.dtype, k.m, g.slots * g.boxes)
                smem["inner"].append(ring)
                smem["inner_read"].append(cute.make_tensor(ring.iterator, layout.outer))
        smem["after"] = [self._boxes(alloc, g, g.boxes) for g in k.after]
        smem["hidden"] = [operand(alloc, k.dtype, k.row_layout(k.m, t.blocks)) for t in self.tails]

    def _boxes(self, alloc: Any, group: Any, boxes: int) -> cute.Tensor:
        return operand(alloc, self.k.dtype, group.layout(self.k.dtype, self.k.m, boxes))

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
        k = self.k
        if cutlass.const_expr(early):
            total = sum(g.boxes * COLUMN_BLOCK * g.depth * 2 for g in k.after)
            total += sum(k.m * self.tails[t].padded * 2 for t in self.loaded)
            expect_bytes(smem["after_full"], total)
        for i, (t, view) in enumerate(self.loaded.items()):
            if cutlass.const_expr(k.is_early(self.tails[t].source.leaves[0]) == early):
                at = tuple(where[3][d] for d in k.batch_of(view))
                n = len(self.tails) + i
                for c in cutlass.range_constexpr(self.tails[t].blocks):
                    source = sources[n][(None, where[0], c, *at)]
                    bulk_load(atoms[n], source, slots[n][None, c], smem["after_full"], EVICT_LAST)
        for t, tail in enumerate(self.tails):
            if cutlass.const_expr(k.is_early(tail.load) == early):
                at = tuple(where[3][d] for d in k.batch_of(tail.view))
                for b in cutlass.range_constexpr(k.blocks):
                    source = sources[t][(None, where[1] * k.blocks + b, 0, *at)]
                    bulk_load(atoms[t], source, slots[t][None, b], smem["after_full"], EVICT_LAST)

    # ------------------------------------------------------------------------------- consumers

    def accumulators(self, mmas: list[cute.TiledMma]) -> list[list[list[cute.Tensor]]]:
        """Zeroed fragments by product after the loop, product of the loop, and block."""
        found = []
        for tail, mma in zip(self.multiplied, mmas, strict=True):
            shape = mma.partition_shape_C((COLUMN_BLOCK, self.k.m))
            count = tail.blocks // self.k.warpgroups
            fragments = [
                [cute.make_rmem_tensor(shape, Float32) for _ in range(count)] for _ in tail.products
            ]
            for row in fragments:
                for fragment in row:
                    fragment.fill(0.0)
            found.append(fragments)
        return found

    def multiply_stage(
        self,
        mmas: list[cute.TiledMma],
        inner: Any,
        smem: dict[str, Any],
        b: cute.Tensor,
        stage: Any,
        kk: int,
        group: Any,
    ) -> None:
        """Issue one k-step of 16 of the loop, for the products along hidden labels."""
        k = self.k
        for t, (tail, mma) in enumerate(zip(self.multiplied, mmas, strict=True)):
            a = mma.make_fragment_A(mma.get_slice(0).partition_A(smem["inner_read"][t]))
            for p in range(len(tail.products)):
                for i in range(tail.blocks // k.warpgroups):
                    slot = stage * len(tail.products) * tail.blocks + p * tail.blocks
                    slot = slot + group + k.warpgroups * i
                    acc = inner[t][p][i]
                    row = b[None, None, kk % 4, stage * k.chunks + kk // 4]
                    cute.gemm(mma, acc, a[None, None, kk, slot], row, acc)

    @cute.jit
    def run(self, mmas, accumulators, inner, smem, tensors, warp, lane, where):
        """Write every row operand, then multiply; parameters as in `Epilogue`."""
        k = self.k
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(t not in self.loaded):
                looped = bool(self.tails[t].products)
                fragments = inner[self.multiplied.index(self.tails[t])] if looped else []
                self.write(t, fragments, smem, tensors, warp, lane, where)
        # the tensor cores read the results of ordinary stores
        cute.arch.fence_proxy("async.shared", space="cta")
        k.epilogue.consumers_meet()
        cute.arch.mbarrier_wait(smem["after_full"], 0)
        warpgroup.fence()
        for t in cutlass.range_constexpr(len(self.tails)):
            if cutlass.const_expr(not self.tails[t].once):  # noqa: SIM114
                self.multiply(t, mmas, accumulators, smem, warp)
            elif where[2] == 0:
                self.multiply(t, mmas, accumulators, smem, warp)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def multiply(self, t: cutlass.Constexpr, mmas, accumulators, smem, warp):
        """Multiply one product after the loop."""
        k, mma = self.k, mmas[t]
        mma.set(warpgroup.Field.ACCUMULATE, True)
        a = mma.make_fragment_A(mma.get_slice(0).partition_A(smem["after"][t]))
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(smem["hidden"][t]))
        for kk in cutlass.range_constexpr(self.tails[t].padded // 16):
            for i in cutlass.range_constexpr(k.blocks // k.warpgroups):
                acc = accumulators[self.targets[t]][i]
                slot = warp // 4 + k.warpgroups * i
                cute.gemm(mma, acc, a[None, None, kk, slot], b[None, None, kk % 4, kk // 4], acc)

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
