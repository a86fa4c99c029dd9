"""The end of the matmul loop: finish accumulators, apply the fused expression, store.

A thread holds, for one column of the output and a quarter of the rows, ``m / 4`` accumulators:
rows ``8 j + 2 (lane % 4) + {0, 1}``. With a cluster every block first sends each peer the partial
sums of the columns that the peer finishes, and adds up what it receives in the order of the ranks,
so the result does not depend on timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.memory import push
from cutesuper.skeletons.kernel.arguments import ELEMENT
from cutesuper.skeletons.matmul.kernel.statistics import PIECE, ROW_VALUES_BARRIER
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

#: named barrier of the consumer warps
CONSUMERS_BARRIER = 2


class Epilogue:
    """All steps after the last product of a tile.

    ``accumulators`` are fp32 fragments of ``(64 columns, rows)``, by product and block of columns;
    ``where`` is ``(row tile, column tile, rank of the split, batch index)``.
    """

    def __init__(self, kernel: MatmulKernel) -> None:
        self.k = kernel
        self.values = kernel.m // 4  # accumulators of one thread and column
        self.columns = kernel.n // kernel.cluster  # columns this block finishes
        plan = kernel.plan
        self.results = len(plan.finals)
        #: index into a column's sums by the operation that they complete: products, then vectors
        self.places = dict(plan.finals)
        for n, p in enumerate(plan.vector_products):
            self.places[p.value] = self.results + n
        # outputs without columns are stored by the reductions
        self.outputs = [n for n, o in enumerate(plan.outputs) if plan.column in o.view.labels]
        between = [x.source for x in (*plan.tails, *plan.reductions)]
        self.early_rows = any(i in plan.row_values for e in between for i in e.leaves)
        self.staged = self._stageable()

    def _stageable(self) -> bool:
        """True if tiles can be stored through shared memory: direct stores write 16 bytes of a row
        at a time (4096x4096x4096: 330 us), which is fine only while there are few rows."""
        k, plan = self.k, self.k.plan
        ring = k.main.boxes * COLUMN_BLOCK * k.k * 2 * plan.schedule.stages
        fits = k.m * (k.n + PIECE) * 2 <= ring
        own = k.cluster == 1 and not k.walk.persistent  # the ring is empty when the tile ends
        return own and k.m >= 32 and plan.stored_in_pieces and fits

    @cute.jit
    def begin(self):
        """Wait for everything that the steps after the loop may need."""
        if cutlass.const_expr(self.k.dependent):
            # loads and stores after the loop may touch tensors of the predecessor
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.early_rows):
            self.wait_row_values()

    @cute.jit
    def run(self, accumulators, vectors, smem, tensors, tidx, warp, lane, where, outs):
        """Take the accumulators of all consumer warps to memory."""
        k = self.k
        if cutlass.const_expr(k.cluster > 1):
            self.send(accumulators, vectors, smem, warp, lane, where)
        if cutlass.const_expr(not self.early_rows):
            self.wait_row_values()
        if cutlass.const_expr(len(k.plan.reductions) > 0):
            k.reductions.run(accumulators, vectors, smem, tensors, tidx, warp, lane, where)
            k.reductions.store_rows(smem, tensors, tidx, where)
        if cutlass.const_expr(k.cluster > 1):
            cute.arch.mbarrier_wait(smem["received"], 0)
            self.finish_received(smem, tensors, tidx, where)
        elif cutlass.const_expr(k.plan.schedule.bulk_store):
            k.tile_store.run(accumulators, smem, tensors, warp, lane, where, outs)
        elif cutlass.const_expr(self.staged):
            self.finish_staged(accumulators, vectors, smem, tensors, tidx, warp, lane, where)
        elif cutlass.const_expr(len(self.outputs) > 0):
            self.finish_own(accumulators, vectors, smem, tensors, warp, lane, where)

    @cute.jit
    def wait_row_values(self):
        """Wait until the helper warps have written the row values."""
        if cutlass.const_expr(len(self.k.plan.statistics) > 0):
            cute.arch.barrier(
                barrier_id=ROW_VALUES_BARRIER,
                number_of_threads=32 * (self.k.helpers + self.k.consumers),
            )

    # -------------------------------------------------------------------------------- exchange

    @cute.jit
    def send(self, accumulators, vectors, smem, warp, lane, where):
        """Push every column's partial sums to the block that finishes it."""
        k, count = self.k, self.values
        rank = where[2]
        width = min(4, count)
        for w in cutlass.range_constexpr(self.results):
            for i in cutlass.range_constexpr(len(accumulators[w])):
                words = cute.recast_tensor(accumulators[w][i], Int32)
                block = warp // 4 + k.warpgroups * i
                for half in cutlass.range_constexpr(2):
                    n = self.column_in_tile(block, half, warp, lane)
                    slot = self.slot(rank, w, n % self.columns, lane % 4)
                    peer = n // self.columns
                    for v in cutlass.range_constexpr(0, count, width):
                        data = tuple(words[self.position(v + e, half)] for e in range(width))
                        push(smem["partials"] + (slot + v), data, smem["received"], peer)
        for w in cutlass.range_constexpr(len(vectors)):
            for i in cutlass.range_constexpr(len(vectors[w])):
                for half in cutlass.range_constexpr(2):
                    block = warp // 4 + k.warpgroups * i
                    n = self.column_in_tile(block, half, warp, lane)
                    k.vectors.send(vectors, smem, w, i, half, n, lane, rank)

    def slot(self, source: Any, product: int, column: Any, quarter: Any) -> Any:
        """Offset of a peer's partial sums for one column and quarter of the rows."""
        index = ((source * self.results + product) * self.columns + column) * 4 + quarter
        return index * self.values

    @staticmethod
    def column_in_tile(block: Any, half: int, warp: Any, lane: Any) -> Any:
        """The column of one half of a thread's accumulator fragment."""
        return block * COLUMN_BLOCK + (warp % 4) * 16 + half * 8 + lane // 4

    @staticmethod
    def position(v: int, half: int) -> int:
        """Index of value ``v`` in an accumulator fragment: (row bit, column half, row block)."""
        return v % 2 + 2 * half + 4 * (v // 2)

    @cute.jit
    def finish_received(self, smem, tensors, tidx, where):
        """Add up the partial sums of this block's columns and store them."""
        k, items = self.k, 4 * self.columns
        threads = 32 * k.consumers
        _, tile_n, rank, _ = where
        for p in cutlass.range_constexpr(-(-items // threads)):
            item = tidx + p * threads
            if item < items:
                # neighbouring threads take neighbouring columns: stores coalesce
                column, quarter = item % self.columns, item // self.columns
                sums = self.collect_all(smem, column, quarter)
                n = tile_n * k.n + rank * self.columns + column
                self.store(sums, smem, tensors, n, where, quarter)

    def collect_all(self, smem: dict[str, Any], column: Any, quarter: Any) -> list[Any]:
        """Every product's complete sums for one column, then those of vectors."""
        sums = [self.collect(smem, w, column, quarter) for w in range(self.results)]
        return sums + self.k.vectors.collect(smem, column)

    def collect(self, smem: dict[str, Any], product: int, column: Any, quarter: Any) -> Any:
        """The sum over the cluster, in the order of the ranks."""
        layout = cute.make_layout(self.values)
        total = None
        for source in range(self.k.cluster):
            part = cute.make_rmem_tensor(layout, Float32)
            pointer = smem["partials"] + self.slot(source, product, column, quarter)
            align = 4 * min(4, self.values)
            cute.autovec_copy(cute.make_tensor(pointer.align(align), layout), part)
            total = part.load() if total is None else total + part.load()
        return total

    @cute.jit
    def finish_own(self, accumulators, vectors, smem, tensors, warp, lane, where):
        """Store a tile that is complete in this block."""
        k = self.k
        for i in cutlass.range_constexpr(len(accumulators[0])):
            block = warp // 4 + k.warpgroups * i
            for half in cutlass.range_constexpr(2):
                n = where[1] * k.n + self.column_in_tile(block, half, warp, lane)
                sums = self.own(accumulators, vectors, i, half, lane)
                self.store(sums, smem, tensors, n, where, lane % 4)

    # ---------------------------------------------------------------- tiles through shared memory

    @cute.jit
    def finish_staged(self, accumulators, vectors, smem, tensors, tidx, warp, lane, where):
        """Write the tile row by row into the ring, which is empty now, and store whole rows."""
        k, plan = self.k, self.k.plan
        for o in self.outputs:
            output = plan.outputs[o]
            dtype = ELEMENT[plan.arguments[output.view.argument].dtype]
            tile = cute.recast_ptr(smem["columns"].iterator, dtype=dtype)
            self.consumers_meet()  # every warpgroup has read its last stage, or stored its rows
            for i in cutlass.range_constexpr(len(accumulators[0])):
                block = warp // 4 + k.warpgroups * i
                for half in cutlass.range_constexpr(2):
                    column = self.column_in_tile(block, half, warp, lane)
                    sums = self.own(accumulators, vectors, i, half, lane)
                    self.stage(sums, o, tile, smem, tensors, column, where, lane % 4)
            self.consumers_meet()
            self.store_tile(o, tile, tensors, tidx, where)

    @cute.jit
    def consumers_meet(self):
        """Wait for all consumer warps at their barrier."""
        cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=32 * self.k.consumers)

    @cute.jit
    def stage(self, sums, o: cutlass.Constexpr, tile, smem, tensors, column, where, quarter):
        """Apply an output's expression to one column and write it to the tile in shared memory."""
        plan = self.k.plan
        output = plan.outputs[o]
        last = self.k.extents.of(plan.column, tensors) - 1
        n = where[1] * self.k.n + column
        inside = n if n < last else last  # loads of the epilogue stay inside their tensors
        leaves = [
            self.leaf(i, self.places, sums, smem, tensors, inside, plan.column, where, quarter)
            for i in output.expression.leaves
        ]
        dtype = ELEMENT[plan.arguments[output.view.argument].dtype]
        value = output.expression.evaluate(leaves, self.k.math).to(dtype)
        register = cute.make_rmem_tensor(cute.make_layout(self.values), dtype)
        register.store(value)
        pitch = self.k.n + PIECE  # the padding keeps the four row groups in different banks
        for v in cutlass.range_constexpr(self.values):
            place = tile + (self.row_of(v, quarter) * pitch + column)
            cute.make_tensor(place, cute.make_layout(1))[0] = register[v]

    @cute.jit
    def store_tile(self, o: cutlass.Constexpr, tile, tensors, tidx, where):
        """Copy the tile to memory, 16 bytes at a time, where rows and columns exist."""
        k, plan = self.k, self.k.plan
        tile_m, tile_n, _, batch = where
        view = plan.outputs[o].view
        dtype = ELEMENT[plan.arguments[view.argument].dtype]
        rows, columns = k.extents.of(plan.row, tensors), k.extents.of(plan.column, tensors)
        base = self.batch_offset(view, batch)
        pieces = k.n // PIECE
        for item in cutlass.range(tidx, k.m * pieces, 32 * k.consumers, unroll=4):
            row, column = item // pieces, (item % pieces) * PIECE
            m, n = tile_m * k.m + row, tile_n * k.n + column
            if m < rows and n < columns:
                source = (tile + (row * (k.n + PIECE) + column)).align(16)
                offset = base + m * view.stride(plan.row) + n
                target = (tensors[view.argument].iterator + offset).align(16)
                layout = cute.make_layout(PIECE)
                register = cute.make_rmem_tensor(layout, dtype)
                cute.autovec_copy(cute.make_tensor(source, layout), register)
                cute.autovec_copy(register, cute.make_tensor(target, layout))

    def batch_offset(self, view: Any, batch: dict[str, Any]) -> Any:
        """Offset of this block's slice of a tensor, in elements."""
        offset = 0
        for label in self.k.plan.batch:
            offset = offset + batch[label] * view.stride(label)
        return offset

    def own(self, accumulators: Any, vectors: Any, i: int, half: int, lane: Any) -> list[Any]:
        """Every product's sums for one column of a thread, then those of vectors."""
        sums = [self.column_of(row[i], half) for row in accumulators]
        return sums + self.k.vectors.own(vectors, i, half, lane)

    def column_of(self, accumulator: cute.Tensor, half: int) -> Any:
        """One column of an accumulator fragment."""
        column = cute.make_rmem_tensor(cute.make_layout(self.values), Float32)
        for v in range(self.values):
            column[v] = accumulator[self.position(v, half)]
        return column.load()

    # ----------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, sums, smem, tensors, n, where, quarter):
        """Apply the outputs' expressions to one column and store the rows that exist."""
        k, plan = self.k, self.k.plan
        rows = k.extents.of(plan.row, tensors)
        columns = k.extents.of(plan.column, tensors)
        if n < columns:
            for o in self.outputs:
                output = plan.outputs[o]
                leaves = [
                    self.leaf(i, self.places, sums, smem, tensors, n, plan.column, where, quarter)
                    for i in output.expression.leaves
                ]
                value = output.expression.evaluate(leaves, k.math)
                self.store_rows(value, o, tensors, n, where, quarter, rows)

    def leaf(
        self,
        i: int,
        places: dict[int, int],
        sums: Any,
        smem: Any,
        tensors: Any,
        n: Any,
        label: str,
        where: Any,
        quarter: Any,
    ) -> Any:
        """A leaf of an expression on one column: accumulator, row value, reduction or load.

        ``places`` maps every operation that completes an accumulator to its index in ``sums``;
        ``n`` is the column's coordinate along ``label``.
        """
        local = [self.row_of(v, quarter) for v in range(self.values)]
        return self.leaf_of(i, places, sums, smem, tensors, n, label, where, local)

    def leaf_of(
        self,
        i: int,
        places: dict[int, int],
        sums: Any,
        smem: Any,
        tensors: Any,
        n: Any,
        label: str,
        where: Any,
        local: list[Any],
    ) -> Any:
        """`leaf` for some rows of the tile; ``sums`` are of these rows."""
        k, plan = self.k, self.k.plan
        if i in places:
            return sums[places[i]]
        if i in plan.row_values:
            base = list(plan.row_values).index(i) * k.m
            return self.gather(smem["row_values"], [base + m for m in local])
        if i in k.reductions.place:
            out = cute.make_rmem_tensor(cute.make_layout(len(local)), Float32)
            for v, m in enumerate(local):
                out[v] = k.reductions.row_value(k.reductions.place[i], smem, m)
            return out.load()
        return self.fetch(plan.loads[i], tensors, n, label, where, local)

    @staticmethod
    def row_of(v: int, quarter: Any) -> Any:
        """Row of value ``v`` within the tile."""
        return 8 * (v // 2) + 2 * quarter + v % 2

    def gather(self, array: cute.Pointer, places: list[Any]) -> Any:
        """Elements of a shared-memory array as a fragment."""
        out = cute.make_rmem_tensor(cute.make_layout(len(places)), Float32)
        for v, place in enumerate(places):
            out[v] = cute.make_tensor(array + place, cute.make_layout(1))[0]
        return out.load()

    @cute.jit
    def fetch(self, view: cutlass.Constexpr, tensors, n, label: cutlass.Constexpr, where, local):
        """Load a bias, residual or the like for one column, as fp32."""
        k, plan = self.k, self.k.plan
        base = self.batch_offset(view, where[3]) + n * view.stride(label)
        source = tensors[view.argument].iterator
        out = cute.make_rmem_tensor(cute.make_layout(len(local)), Float32)
        if cutlass.const_expr(plan.row in view.labels):
            rows = k.extents.of(plan.row, tensors)
            for v in cutlass.range_constexpr(len(local)):
                m = where[0] * k.m + local[v]
                out[v] = Float32(0.0)
                if m < rows:
                    element = cute.make_tensor(
                        source + (base + m * view.stride(plan.row)), cute.make_layout(1)
                    )
                    out[v] = element[0].to(Float32)
        else:
            element = cute.make_tensor(source + base, cute.make_layout(1))
            out.fill(element[0].to(Float32))
        return out.load()

    @cute.jit
    def store_rows(self, value, o: cutlass.Constexpr, tensors, n, where, quarter, rows):
        """Store one column's rows, converted, where they exist."""
        k, plan = self.k, self.k.plan
        view = plan.outputs[o].view
        dtype = ELEMENT[plan.arguments[view.argument].dtype]
        base = self.batch_offset(view, where[3]) + n * view.stride(plan.column)
        converted = cute.make_rmem_tensor(cute.make_layout(self.values), dtype)
        converted.store(value.to(dtype))
        for v in cutlass.range_constexpr(self.values):
            m = where[0] * k.m + self.row_of(v, quarter)
            if m < rows:
                place = tensors[view.argument].iterator + (base + m * view.stride(plan.row))
                cute.make_tensor(place, cute.make_layout(1))[0] = converted[v]
