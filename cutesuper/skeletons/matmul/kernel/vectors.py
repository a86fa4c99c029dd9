"""Products of vectors in the matmul loop: an extra tile, its writers and its readers.
Multipliers read it, too.

A stage has one more K-major tile of 8 rows with the 128-byte swizzle, whose first rows are the
vectors; the remaining rows are never read back, as the rows of a product do not mix. A product of 8
rows takes it, after that of the row operand and by the same tile of the column operand. In its
fragment row ``2 q + e`` of a column belongs to lane quarter q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.cluster import push
from cutesuper.device.fragments import PIECE, filled, fragment
from cutesuper.device.memory import one, operand
from cutesuper.device.products import Product, Products
from cutesuper.skeletons.matmul.kernel.columns import ColumnGroup
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory
from cutesuper.skeletons.matmul.kernel.row_tile import RowTile
from cutesuper.skeletons.matmul.plan import CHUNK, MAX_VECTORS


class VectorTile:
    """The tile of vectors and its products; all methods do nothing for a plan without any."""

    def __init__(self, known: Known, tile: RowTile) -> None:
        self.k, self.tile = known, tile
        plan = known.plan
        self.rows = plan.vector_rows
        self.pairs = plan.vector_pairs
        weights = list(plan.columns)
        #: indices of the column operands to be multiplied, in the order of their accumulators
        self.weights = [weights.index(op) for op in plan.vector_columns]
        self.products = [
            (plan.vector_columns.index(p.column), p.vector) for p in plan.vector_products
        ]

    def allocate(self, alloc: Any) -> Any:
        """Allocate shared memory: one slot for each chunk of each stage; None without vectors."""
        k = self.k
        if not self.rows:
            return None
        return operand(alloc, k.dtype, k.row_layout(MAX_VECTORS, k.stages * k.chunks))

    # ---------------------------------------------------------------------------------- helpers

    @cute.jit
    def write(self, memory, thread, stage, depth):
        """Fill one stage's tile; each warp writes one vector."""
        k = self.k
        warp, lane = thread // 32, thread % 32
        pieces = k.k // PIECE
        for j, vector in enumerate(self.rows):
            if warp == j % k.helpers:
                for p in cutlass.range_constexpr(-(-pieces // 32)):
                    piece = lane + 32 * p
                    if piece < pieces:
                        self.write_piece(memory, j, vector, piece, stage, depth)

    @cute.jit
    def write_piece(
        self, memory, j: cutlass.Constexpr, vector: cutlass.Constexpr, piece, stage, depth
    ):
        """Write eight elements of a vector to their swizzled place."""
        k = self.k
        chunk, place = piece // (CHUNK // PIECE), (piece % (CHUNK // PIECE)) ^ j
        offset = ((stage * k.chunks + chunk) * MAX_VECTORS + j) * CHUNK + place * PIECE
        register = fragment(PIECE, k.dtype)
        if cutlass.const_expr(vector is None):
            register.fill(1.0)
        else:
            at = piece * PIECE
            staged = {
                op: self.tile.piece(memory.vectors[i], stage * k.k + at)
                for i, op in enumerate(k.plan.vectors)
            }
            values = [staged[op].load().to(Float32) for op in vector.leaves]
            v = vector.evaluate(values, k.math)
            if cutlass.const_expr(self.tile.needs_mask(vector, 0.0)):
                v = cute.where(self.tile.inside(depth + at), v, cute.full_like(v, 0.0))
            register.store(v.to(k.dtype))
        cute.autovec_copy(register, self.tile.linear(memory.vector_rows, offset))

    # -------------------------------------------------------------------------------- consumers

    def consumer(
        self, cores: Products, group: ColumnGroup, memory: Memory, blocks: int
    ) -> VectorConsumer:
        """The instruction, its operands, and zeros for ``blocks`` blocks of 64 columns."""
        if not self.rows:
            return VectorConsumer(self, None, None, [])
        product = group.product(cores, self.k.dtype, MAX_VECTORS)
        operands = product.first(memory.columns), product.second(memory.vector_rows)
        made = [[product.accumulator(MAX_VECTORS) for _ in range(blocks)] for _ in self.weights]
        for fragments in made:
            for zeros in fragments:
                cores.clear(zeros)
        product.accumulate(True)
        return VectorConsumer(self, product, operands, made)

    # --------------------------------------------------------------------------------- epilogue

    def own(self, accumulators: list[list[Any]], i: int, half: int, here: Here) -> list[Any]:
        """Every product's value for one column of a thread, for all of its rows."""
        found = []
        for w, j in self.products:
            mine = accumulators[w][i][j % 2 + 2 * half]
            found.append(self.spread(cute.arch.shuffle_sync(mine, here.lane // 4 * 4 + j // 2)))
        return found

    def spread(self, value: Any) -> Any:
        """A fragment with one value for all rows."""
        return filled(self.k.values, value).load()

    def slot(self, source: Any, w: int, column: Any) -> Any:
        """Offset of a peer's partial sums for one column, behind those of the rows."""
        k = self.k
        before = k.m * k.n * k.results
        columns = k.columns
        return before + ((source * len(self.weights) + w) * columns + column) * 2 * self.pairs

    @cute.jit
    def send(
        self,
        accumulators,
        w: cutlass.Constexpr,
        i: cutlass.Constexpr,
        half: cutlass.Constexpr,
        n,
        here,
    ):
        """Push a column's partial sums to the block that finishes it."""
        quarter, columns = here.quarter, self.k.columns
        words = cute.recast_tensor(accumulators[w][i], Int32)
        if quarter < self.pairs:
            slot = self.slot(here.tile.rank, w, n % columns) + 2 * quarter
            data = (words[2 * half], words[2 * half + 1])
            push(here.memory.partials + slot, data, here.memory.received.only, n // columns)

    def collect(self, memory: Memory, column: Any) -> list[Any]:
        """Every product's value for one column: the sum over the cluster, in rank order."""
        found = []
        for w, j in self.products:
            total = Float32(0.0)
            for source in range(self.k.cluster):
                total += one(memory.partials + (self.slot(source, w, column) + j))[0]
            found.append(self.spread(total))
        return found


@dataclass(frozen=True)
class VectorConsumer:
    """State of a consumer warpgroup for the products of vectors; empty without any.

    Attributes:
        tile: the tile of vectors.
        product: the instruction.
        operands: fragments of the column operands and of the vectors.
        accumulators: for each column operand one for each block of 64 columns.
    """

    tile: VectorTile
    product: Product | None
    operands: Any
    accumulators: list[list[Any]]

    def multiply(self, w: int, i: int, kk: int, slot: Any, stage: Any) -> None:
        """Issue one product for column operand ``w``: 64 columns, 16 deep."""
        if self.product is None or w not in self.tile.weights:
            return
        a, b = self.operands
        acc = self.accumulators[self.tile.weights.index(w)][i]
        row = b[None, None, kk % 4, stage * self.tile.k.chunks + kk // 4]
        self.product.multiply(acc, a[None, None, kk, slot], row)
