"""The end of the matmul loop: finish accumulators, apply the fused expression, store.

With a cluster every block first sends each peer the partial sums of the columns that the peer
finishes, and adds up what it receives in the order of the ranks, so the result does not depend on
timing.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.cluster import push
from cutesuper.device.fragments import PIECE, fetched, fragment, stored
from cutesuper.device.launch import wait_for_predecessor
from cutesuper.device.memory import neighbours, one, put
from cutesuper.skeletons.base import Indexed, View
from cutesuper.skeletons.kernel.arguments import dtype_of, named_row
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory
from cutesuper.skeletons.matmul.kernel.grid_parts import GridParts
from cutesuper.skeletons.matmul.kernel.leaves import Leaves
from cutesuper.skeletons.matmul.kernel.reductions import ColumnReductions
from cutesuper.skeletons.matmul.kernel.tile_store import TileStore
from cutesuper.skeletons.matmul.kernel.vectors import VectorTile
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK


class Epilogue:
    """All steps after the last product of a tile.

    ``accumulators`` are fp32 fragments of ``(64 columns, rows)``, by product and block of columns.
    """

    def __init__(
        self,
        known: Known,
        leaves: Leaves,
        vectors: VectorTile,
        reductions: ColumnReductions,
        tile_store: TileStore,
    ) -> None:
        self.k, self.leaves, self.vectors = known, leaves, vectors
        self.reductions, self.tile_store = reductions, tile_store
        self.parts = GridParts(known, leaves)
        plan = known.plan
        # outputs without columns are stored by the reductions
        self.outputs = [n for n, o in enumerate(plan.outputs) if plan.column in o.view.labels]
        between = [x.source for x in (*plan.tails, *plan.reductions)]
        self.early_rows = any(i in plan.row_values for e in between for i in e.leaves)
        self.staged = self._stageable()
        #: partial sums that are sent at once, and the distance of two that are not, for each row
        self.width = gcd(4, known.values)
        self.pitch = 4 * known.columns if plan.exchange_in_ring else 1

    def _stageable(self) -> bool:
        """True if tiles can be stored through shared memory.
        Direct stores write 16 bytes of a row at a time (4096x4096x4096: 330 us), which is fine only
        while there are few rows."""
        k, plan = self.k, self.k.plan
        ring = k.groups[0].boxes * COLUMN_BLOCK * k.k * plan.schedule.stages
        fits = k.m * (k.n + PIECE) <= ring  # elements of operands are as wide, or wider
        # the ring is empty when the tile ends
        own = k.cluster == 1 and not plan.schedule.persistent
        return own and k.m >= 32 and plan.store_piece > 0 and fits

    @cute.jit
    def begin(self):
        """Wait for everything that the steps after the loop may need."""
        if cutlass.const_expr(self.k.dependent):
            # loads and stores after the loop may touch tensors of the predecessor
            wait_for_predecessor()
        if cutlass.const_expr(self.early_rows):
            self.wait_row_values()

    @cute.jit
    def run(self, accumulators, vectors, here, outs):
        """Take the accumulators of all consumer warps to memory."""
        k = self.k
        if cutlass.const_expr(k.cluster > 1):
            self.send(accumulators, vectors, here)
        if cutlass.const_expr(not self.early_rows):
            self.wait_row_values()
        if cutlass.const_expr(len(k.plan.reductions) > 0):
            self.reductions.run(accumulators, vectors, here)
            self.reductions.store_rows(here)
        if cutlass.const_expr(k.cluster > 1):
            here.memory.received.only.wait(0)
            self.finish_received(here)
        elif cutlass.const_expr(k.plan.parts > 1):
            self.parts.leave(accumulators, here)
            self.finish_part(here)
        elif cutlass.const_expr(k.plan.schedule.bulk_store):
            self.tile_store.run(accumulators, here, outs)
        elif cutlass.const_expr(self.staged):
            self.finish_staged(accumulators, vectors, here)
        elif cutlass.const_expr(len(self.outputs) > 0):
            self.finish_own(accumulators, vectors, here)

    @cute.jit
    def wait_row_values(self):
        """Wait until the helper warps have written the row values."""
        if cutlass.const_expr(len(self.k.plan.statistics) > 0):
            self.k.row_values_meeting().meet()

    # -------------------------------------------------------------------------------- exchange

    @cute.jit
    def send(self, accumulators, vectors, here):
        """Push every column's partial sums to the block that finishes it."""
        k, count, memory = self.k, self.k.values, here.memory
        if cutlass.const_expr(k.plan.exchange_in_ring):
            memory.drained.only.arrive_warp(here.lane, k.cluster)
            memory.drained.only.wait(0)
        width = self.width
        for w in cutlass.range_constexpr(k.results):
            for i in cutlass.range_constexpr(len(accumulators[w])):
                words = cute.recast_tensor(accumulators[w][i], Int32)
                block = k.block(i, here.warp)
                for half in cutlass.range_constexpr(2):
                    n = self.leaves.column_in_tile(block, half, here)
                    slot = self.slot(here.tile.rank, w, n % k.columns, here.quarter)
                    peer = n // k.columns
                    for v in cutlass.range_constexpr(0, count, width):
                        at = [self.leaves.position(v + e, half) for e in range(width)]
                        data = tuple(words[p] for p in at)
                        place = memory.partials + (slot + v * self.pitch)
                        push(place, data, memory.received.only, peer)
        for w in cutlass.range_constexpr(len(vectors)):
            for i in cutlass.range_constexpr(len(vectors[w])):
                for half in cutlass.range_constexpr(2):
                    block = k.block(i, here.warp)
                    n = self.leaves.column_in_tile(block, half, here)
                    self.vectors.send(vectors, w, i, half, n, here)

    def slot(self, source: Any, product: int, column: Any, quarter: Any) -> Any:
        """Offset of a peer's partial sums for one column and quarter of the rows.
        Those that belong to other rows follow `pitch` elements apart for each.

        Many rows of a thread, one behind the other, would put all lanes into the same banks: those
        that send are 4 quarters of 8 columns, those that receive 32 columns of one quarter. So
        sums of the same rows lie together, and columns of the same banks have their quarters in
        another order.
        """
        k = self.k
        if not k.plan.exchange_in_ring:
            index = ((source * k.results + product) * k.columns + column) * 4 + quarter
            return index * k.values
        quarter = quarter ^ (column // (8 // self.width) % 4)
        first = (source * k.results + product) * k.columns * 4 * k.values
        return first + (column * 4 + quarter) * self.width

    @cute.jit
    def finish_received(self, here):
        """Add up the partial sums of this block's columns and store them."""
        k, items = self.k, 4 * self.k.columns
        threads = 32 * k.consumers
        for p in cutlass.range_constexpr(-(-items // threads)):
            item = here.thread + p * threads
            if item < items:
                # neighbouring threads take neighbouring columns: stores coalesce
                column, quarter = item % k.columns, item // k.columns
                sums = self.collect_all(here.memory, column, quarter)
                n = here.tile.column * k.n + here.tile.rank * k.columns + column
                self.store(self.leaves.column(sums, n, quarter), here)

    def collect_all(self, memory: Memory, column: Any, quarter: Any) -> list[Any]:
        """Every product's complete sums for one column, then those of vectors."""
        sums = [self.collect(memory, w, column, quarter) for w in range(self.k.results)]
        return sums + self.vectors.collect(memory, column)

    def collect(self, memory: Memory, product: int, column: Any, quarter: Any) -> Any:
        """The sum over the cluster, in the order of the ranks."""
        total = None
        for source in range(self.k.cluster):
            part = self.part(memory.partials + self.slot(source, product, column, quarter))
            total = part if total is None else total + part
        return total

    def part(self, pointer: cute.Pointer) -> Any:
        """One peer's partial sums for a column and a quarter of the rows."""
        count, width = self.k.values, self.width
        if not self.k.plan.exchange_in_ring:
            return fetched(neighbours(pointer.align(4 * width), count)).load()
        sums = fragment(count)
        for v in range(0, count, width):
            piece = neighbours((pointer + v * self.pitch).align(4 * width), width)
            cute.autovec_copy(piece, neighbours(sums.iterator + v, width))
        return sums.load()

    @cute.jit
    def finish_part(self, here):
        """Add up this block's part of a tile over the blocks that share it, and store it."""
        own, end, threads = self.parts.own, self.parts.items, 32 * self.k.consumers
        for p in cutlass.range_constexpr(-(-own // threads)):
            at = here.thread + p * threads
            item = here.tile.rank * own + at
            if at < own and item < end:
                self.store(self.parts.column(item, here), here)

    @cute.jit
    def finish_own(self, accumulators, vectors, here):
        """Store a tile that is complete in this block."""
        k = self.k
        for i in cutlass.range_constexpr(len(accumulators[0])):
            block = k.block(i, here.warp)
            for half in cutlass.range_constexpr(2):
                n = here.tile.column * k.n + self.leaves.column_in_tile(block, half, here)
                sums = self.own(accumulators, vectors, i, half, here)
                self.store(self.leaves.column(sums, n, here.quarter), here)

    # ---------------------------------------------------------------- tiles through shared memory

    @cute.jit
    def finish_staged(self, accumulators, vectors, here):
        """Write the tile row by row into the ring, which is empty now, and store whole rows."""
        k, plan = self.k, self.k.plan
        for o in self.outputs:
            output = plan.outputs[o]
            dtype = dtype_of(plan, output.view)
            tile = cute.recast_ptr(here.memory.columns.iterator, dtype=dtype)
            k.consumers_meet()  # every warpgroup has read its last stage, or stored its rows
            for i in cutlass.range_constexpr(len(accumulators[0])):
                block = k.block(i, here.warp)
                for half in cutlass.range_constexpr(2):
                    column = self.leaves.column_in_tile(block, half, here)
                    sums = self.own(accumulators, vectors, i, half, here)
                    self.stage(sums, o, tile, column, here)
            k.consumers_meet()
            self.store_tile(o, tile, here)

    @cute.jit
    def stage(self, sums, o: cutlass.Constexpr, tile, column, here):
        """Apply an output's expression to one column and write it to the tile in shared memory."""
        k, output = self.k, self.k.plan.outputs[o]
        quarter = here.quarter
        last = k.extents.of(k.plan.column, here.tensors) - 1
        n = here.tile.column * k.n + column
        inside = n if n < last else last  # loads of the epilogue stay inside their tensors
        own = self.leaves.column(sums, inside, quarter)
        value = self.leaves.evaluate(output.expression, own, here)
        register = stored(value, k.values, dtype_of(k.plan, output.view))
        pitch = k.n + PIECE  # the padding keeps the four row groups in different banks
        for v in cutlass.range_constexpr(k.values):
            place = tile + (self.leaves.row_of(v, quarter) * pitch + column)
            put(place, register[v])

    @cute.jit
    def store_tile(self, o: cutlass.Constexpr, tile, here):
        """Copy the tile to memory, up to 16 bytes at a time, where rows and columns exist."""
        k, plan, tensors = self.k, self.k.plan, here.tensors
        view = plan.outputs[o].view
        rows, columns = k.extents.of(plan.row, tensors), k.extents.of(plan.column, tensors)
        base = k.batch_offset(view, here)
        size = plan.store_piece
        aligned = size * plan.itemsize(view)
        pieces = k.n // size
        for item in cutlass.range(here.thread, k.m * pieces, 32 * k.consumers, unroll=4):
            row, column = item // pieces, (item % pieces) * size
            m, n = here.tile.row * k.m + row, here.tile.column * k.n + column
            if m < rows and n < columns:
                source = (tile + (row * (k.n + PIECE) + column)).align(aligned)
                place, known = self.row(view, m, here)
                target = (tensors[view.argument].iterator + (base + place + n)).align(aligned)
                if known:
                    cute.autovec_copy(fetched(neighbours(source, size)), neighbours(target, size))

    def own(self, accumulators: Any, vectors: Any, i: int, half: int, here: Here) -> list[Any]:
        """Every product's sums for one column of a thread, then those of vectors."""
        sums = [self.leaves.column_of(row[i], half) for row in accumulators]
        return sums + self.vectors.own(vectors, i, half, here)

    # ----------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, column, here):
        """Apply the outputs' expressions to one column and store the rows that exist."""
        k, plan = self.k, self.k.plan
        if column.n < k.extents.of(plan.column, here.tensors):
            for o in self.outputs:
                value = self.leaves.evaluate(plan.outputs[o].expression, column, here)
                self.store_rows(value, o, column, here)

    @cute.jit
    def store_rows(self, value, o: cutlass.Constexpr, column, here):
        """Store one column's rows, converted, where they exist."""
        k, plan = self.k, self.k.plan
        rows, view = k.extents.of(plan.row, here.tensors), plan.outputs[o].view
        base = k.batch_offset(view, here) + k.along(view, plan.column, column.n, here)
        converted = stored(value, len(column.rows), dtype_of(plan, view))
        for v in cutlass.range_constexpr(len(column.rows)):
            m = here.tile.row * k.m + column.rows[v]
            if m < rows:
                row, known = self.row(view, m, here)
                place = here.tensors[view.argument].iterator + (base + row)
                if known:
                    put(place, converted[v])

    def row(self, view: View, m: Any, here: Here) -> tuple[Any, Any]:
        """Offset of a row of an output, and true if there is such a row."""
        k, label = self.k, self.k.plan.row
        own = k.along(view, label, m, here)  # 0 where the index names the places of rows
        if not isinstance(view, Indexed):
            return own, True
        indices: list[Any] = []
        for index in (named.index for named in view.named):
            at = k.batch_offset(index, here) + k.along(index, label, m, here)
            indices.append(one(here.tensors[index.argument].iterator + at)[0])
        place, known = named_row(view, indices)
        return own + place, known
