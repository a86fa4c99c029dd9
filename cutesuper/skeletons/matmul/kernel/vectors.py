"""Products of vectors in the matmul loop: an extra tile of vectors, its writers, multipliers and
readers.

A stage has one more K-major tile of 8 rows with the 128-byte swizzle, whose first rows are the
vectors; the remaining rows are never read back, as the rows of a product do not mix. A WGMMA of 8
rows multiplies it, after that of the row operand and by the same tile of the column operand. In its
fragment row ``2 q + e`` of a column belongs to lane quarter q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.memory import operand, push
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK, MAX_VECTORS

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
    from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

PIECE = 8  # elements of a 16-byte access


class VectorTile:
    """The tile of vectors and its products; all methods do nothing for a plan without any."""

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        plan = kernel.plan
        self.rows = plan.vector_rows
        self.pairs = plan.vector_pairs
        weights = list(plan.columns)
        #: indices of the column operands to be multiplied, in the order of their accumulators
        self.weights = [weights.index(op) for op in plan.vector_columns]
        self.products = [
            (plan.vector_columns.index(p.column), p.vector) for p in plan.vector_products
        ]

    def allocate(self, alloc: Any, smem: dict[str, Any]) -> None:
        """Allocate shared memory: one slot for each chunk of each stage."""
        k = self.k
        if self.rows:
            layout = k.row_layout(MAX_VECTORS, k.stages * k.chunks)
            smem["vector_rows"] = operand(alloc, k.dtype, layout)

    # ---------------------------------------------------------------------------------- helpers

    @cute.jit
    def write(self, smem, thread, stage, depth):
        """Fill one stage's tile; each warp writes one vector."""
        k = self.k
        warp, lane = thread // 32, thread % 32
        pieces = k.k // PIECE
        for j, vector in enumerate(self.rows):
            if warp == j % k.helpers:
                for p in cutlass.range_constexpr(-(-pieces // 32)):
                    piece = lane + 32 * p
                    if piece < pieces:
                        self.write_piece(smem, j, vector, piece, stage, depth)

    @cute.jit
    def write_piece(
        self, smem, j: cutlass.Constexpr, vector: cutlass.Constexpr, piece, stage, depth
    ):
        """Write eight elements of a vector to their swizzled place."""
        k = self.k
        chunk, place = piece // (CHUNK // PIECE), (piece % (CHUNK // PIECE)) ^ j
        offset = ((stage * k.chunks + chunk) * MAX_VECTORS + j) * CHUNK + place * PIECE
        register = cute.make_rmem_tensor(cute.make_layout(PIECE), k.dtype)
        if cutlass.const_expr(vector is None):
            register.fill(1.0)
        else:
            at = piece * PIECE
            staged = {
                op: k.row_side.piece(smem["vectors"][i], stage * k.k + at)
                for i, op in enumerate(k.plan.vectors)
            }
            values = [staged[op].load().to(Float32) for op in vector.leaves]
            v = vector.evaluate(values, k.math)
            if cutlass.const_expr(k.row_side.needs_mask(vector, 0.0)):
                v = cute.where(k.row_side.inside(depth + at), v, cute.full_like(v, 0.0))
            register.store(v.to(k.dtype))
        cute.autovec_copy(register, k.row_side.linear(smem["vector_rows"], offset))

    # -------------------------------------------------------------------------------- consumers

    def consumer(self, group: ColumnGroup, smem: dict[str, Any], blocks: int) -> VectorConsumer:
        """The instruction, its operands, and zeros for ``blocks`` blocks of 64 columns."""
        if not self.rows:
            return VectorConsumer(self, None, None, [])
        mma = group.mma(self.k.dtype, MAX_VECTORS)
        part, shape = mma.get_slice(0), mma.partition_shape_C((COLUMN_BLOCK, MAX_VECTORS))
        operands = (
            mma.make_fragment_A(part.partition_A(smem["columns"])),
            mma.make_fragment_B(part.partition_B(smem["vector_rows"])),
        )
        made = [
            [cute.make_rmem_tensor(shape, Float32) for _ in range(blocks)] for _ in self.weights
        ]
        for fragments in made:
            for fragment in fragments:
                fragment.fill(0.0)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        return VectorConsumer(self, mma, operands, made)

    # --------------------------------------------------------------------------------- epilogue

    def own(self, accumulators: list[list[Any]], i: int, half: int, lane: Any) -> list[Any]:
        """Every product's value for one column of a thread, for all of its rows."""
        found = []
        for w, j in self.products:
            mine = accumulators[w][i][j % 2 + 2 * half]
            found.append(self.spread(cute.arch.shuffle_sync(mine, lane // 4 * 4 + j // 2)))
        return found

    def spread(self, value: Any) -> Any:
        """A fragment with one value for all rows."""
        out = cute.make_rmem_tensor(cute.make_layout(self.k.epilogue.values), Float32)
        out.fill(value)
        return out.load()

    def slot(self, source: Any, w: int, column: Any) -> Any:
        """Offset of a peer's partial sums for one column, behind those of the rows."""
        k = self.k
        before = k.m * k.n * k.epilogue.results
        columns = k.epilogue.columns
        return before + ((source * len(self.weights) + w) * columns + column) * 2 * self.pairs

    @cute.jit
    def send(
        self,
        accumulators,
        smem,
        w: cutlass.Constexpr,
        i: cutlass.Constexpr,
        half: cutlass.Constexpr,
        n,
        lane,
        rank,
    ):
        """Push a column's partial sums to the block that finishes it."""
        quarter, columns = lane % 4, self.k.epilogue.columns
        words = cute.recast_tensor(accumulators[w][i], Int32)
        if quarter < self.pairs:
            slot = self.slot(rank, w, n % columns) + 2 * quarter
            data = (words[2 * half], words[2 * half + 1])
            push(smem["partials"] + slot, data, smem["received"], n // columns)

    def collect(self, smem: dict[str, Any], column: Any) -> list[Any]:
        """Every product's value for one column: the sum over the cluster, in rank order."""
        found = []
        for w, j in self.products:
            total = Float32(0.0)
            for source in range(self.k.cluster):
                place = smem["partials"] + (self.slot(source, w, column) + j)
                total += cute.make_tensor(place, cute.make_layout(1))[0]
            found.append(self.spread(total))
        return found


@dataclass(frozen=True)
class VectorConsumer:
    """State of a consumer warpgroup for the products of vectors; empty without any.

    Attributes:
        tile: the tile of vectors.
        mma: the instruction.
        operands: fragments of the column operands and of the vectors.
        accumulators: for each column operand one fragment for each block of 64 columns.
    """

    tile: VectorTile
    mma: cute.TiledMma | None
    operands: Any
    accumulators: list[list[cute.Tensor]]

    def multiply(self, w: int, i: int, kk: int, slot: Any, stage: Any) -> None:
        """Issue one WGMMA for column operand ``w``: 64 columns, 16 deep."""
        if w not in self.tile.weights:
            return
        a, b = self.operands
        acc = self.accumulators[self.tile.weights.index(w)][i]
        row = b[None, None, kk % 4, stage * self.tile.k.chunks + kk // 4]
        cute.gemm(self.mma, acc, a[None, None, kk, slot], row, acc)
