"""Products whose columns consumers multiply by a vector, in registers.

``(X * G) W`` is ``X (G W)``: the column operand is the first one of the instruction, which may come
from registers. A chunk of 64 elements of the contracted label, or half of it, is brought and
multiplied by the vector while the tensor cores are at the one before.

Source of the method: operands that are converted on their way to the registers of WGMMA, as in
products of mixed types (CUTLASS, example 55).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import fence_warp
from cutesuper.device.fragments import PIECE, fetched, fragment
from cutesuper.device.memory import neighbours, rows_atom
from cutesuper.skeletons.matmul.kernel.context import Here, Known
from cutesuper.skeletons.matmul.kernel.mainloop import Mainloop, TileProducts
from cutesuper.skeletons.matmul.kernel.multicast import Sharing
from cutesuper.skeletons.matmul.plan import STEP


class ScaledProducts:
    """The products of a tile, in groups of steps; a thread holds the words of two groups."""

    def __init__(self, known: Known, mainloop: Mainloop, sharing: Sharing) -> None:
        self.k, self.loop, self.sharing = known, mainloop, sharing
        self.group = known.groups[0]
        #: of columns, of all products, that a thread multiplies
        self.blocks = len(known.plan.products) * mainloop.per_group
        #: steps of a group, and groups of a stage
        self.together = known.plan.scaled_steps
        self.groups = known.k // STEP // self.together

    def registers(self) -> list[list[list[cute.Tensor]]]:
        """Words of two groups, by step and block of columns."""
        steps = range(self.together)
        return [[[fragment(4, Int32) for _ in range(self.blocks)] for _ in steps] for _ in range(2)]

    @cute.jit
    def run(self, cores, work: cutlass.Constexpr, here, at):
        """Multiply all stages; return the next slot of the ring, and the last stage, still held.
        Two stages at a time, since the words of each have registers of their own."""
        words, previous = self.registers(), Int32(-1)
        for _ in cutlass.range(here.tile.iterations // 2, unroll=1):
            at, previous = self.multiply(cores, work, words, here, at, previous, 0)
            at, previous = self.multiply(cores, work, words, here, at, previous, 1)
        if cutlass.const_expr(here.tile.iterations % 2 == 1):
            at, previous = self.multiply(cores, work, words, here, at, previous, 0)
        cores.wait(0)
        fence_warp()
        return at, previous

    @cute.jit
    def multiply(
        self,
        cores,
        work: cutlass.Constexpr,
        words: cutlass.Constexpr,
        here,
        at,
        previous,
        turn: cutlass.Constexpr,
    ):
        """Multiply a stage, and give the ``previous`` one back, once its products are done."""
        ring = here.memory.ring
        ring.wait(at)
        for group in cutlass.range_constexpr(self.groups):
            own = words[(turn * self.groups + group) % 2]
            first = group * self.together
            for n in cutlass.range_constexpr(self.together):
                self.bring(own[n], here, at.stage, first + n)
            cores.begin()
            with cores.issue():
                for n in cutlass.range_constexpr(self.together):
                    self.issue(work, own[n], at.stage, first + n)
            cores.end()
            # the words of the group before are free then
            cores.wait(1)
            if cutlass.const_expr(group == 0):
                if previous >= 0:
                    fence_warp()  # bulk loads write the stage through another proxy
                    ring.release(previous, here.lane, self.sharing.parts)
        return ring.next(at), at.stage

    def bring(self, words: list[cute.Tensor], here: Here, stage: Any, step: int) -> None:
        """Bring a step of the columns of a stage to registers, multiplied by the vector."""
        k, left = self.k, iter(words)
        factor = self.factors(here, stage, step)
        atom = rows_atom(k.dtype, self.group.column_major)
        for w in range(len(k.plan.products)):
            for i in range(self.loop.per_group):
                slot = stage * self.group.boxes + w * k.blocks + k.block(i, here.warp)
                to = neighbours(cute.recast_ptr(next(left).iterator, dtype=k.dtype), PIECE)
                cute.copy(atom, neighbours(self.place(here, slot, step), PIECE), to)
                to.store(self.scaled(to, factor))

    def place(self, here: Here, slot: Any, step: int) -> cute.Pointer:
        """The 16 bytes whose address this lane gives: lane ``8 j + r`` those of block ``j``.
        Blocks have 8 columns and 8 elements of the step; both halves of the columns come first."""
        memory, lane = here.memory.columns, here.lane
        block, r = lane // 8, lane % 8
        column = here.warp % 4 * 16 + block % 2 * 8
        depth = step * STEP + block // 2 * 8
        column, depth = (column, depth + r) if self.group.column_major else (column + r, depth)
        base = cute.crd2idx((0, 0, slot), memory.layout)
        piece = cute.crd2idx((column, depth, 0), memory.layout) // PIECE
        at = base + (piece ^ (piece // 8 % 8)) * PIECE  # rows of 128 bytes, swizzled
        first = cute.recast_ptr(memory.iterator, dtype=self.k.dtype)  # without its swizzle
        return first + cute.assume(at, divby=PIECE)

    def factors(self, here: Here, stage: Any, step: int) -> cute.Tensor:
        """The numbers by which a thread's words of a step are multiplied, in their order.
        As they are in memory if nothing is computed, else fp32."""
        k, factor = self.k, self.k.plan.factor
        assert factor is not None
        rings = dict(zip(k.plan.vectors, here.memory.vectors, strict=True))
        found = fragment(PIECE, k.dtype if factor.trivial else Float32)
        for half in range(2):
            at = stage * k.k + step * STEP + half * 8 + here.lane % 4 * 2
            pairs = [
                fetched(neighbours(rings[op].iterator + cute.assume(at, divby=2), 2))
                for op in factor.leaves
            ]
            if factor.trivial:
                pair = pairs[0]
            else:
                pair = fragment(2)
                pair.store(factor.evaluate([p.load().to(Float32) for p in pairs], k.math))
            for n in range(4):
                found[4 * half + n] = pair[n % 2]
        return found

    def scaled(self, words: cute.Tensor, factor: cute.Tensor) -> cute.TensorSSA:
        """A step's words times their factors, rounded once."""
        if factor.element_type is Float32:
            return (words.load().to(Float32) * factor.load()).to(self.k.dtype)
        return words.load() * factor.load()

    def issue(self, work: TileProducts, words: list[cute.Tensor], stage: Any, step: int) -> None:
        """Issue the products of a step."""
        k, per_group = self.k, self.loop.per_group
        row = k.row_step(work.rows, stage, step)
        for w, (_, final) in enumerate(k.plan.products):
            for i in range(per_group):
                operand = work.product.packed(words[w * per_group + i])
                sums = work.sums[k.plan.finals[final]][i]
                work.product.multiply(sums, operand[None, None, 0], row)
