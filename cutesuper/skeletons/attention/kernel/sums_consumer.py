"""Consumer warpgroups of an attention loop with plain sums: products, and the work between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Meeting, fence_warp
from cutesuper.device.fragments import PIECE, fetched, filled, fragment, rounded
from cutesuper.device.math import choose
from cutesuper.device.memory import neighbours, one, operand_layout, put
from cutesuper.device.products import Consumers, Product, Products
from cutesuper.ir.operators.base import CONSTANT, LARGEST, lookup
from cutesuper.skeletons.attention.kernel.context import ROWS_BARRIER
from cutesuper.skeletons.attention.kernel.rows import byte_piece, chunk_of
from cutesuper.skeletons.attention.kernel.scores import LOG2E, exp2
from cutesuper.skeletons.attention.kernel.sums_place import Places
from cutesuper.skeletons.attention.kernel.wide import is_wide, pieces, store
from cutesuper.skeletons.attention.plan import ROW_BLOCK
from cutesuper.skeletons.attention.sums.plan import Phase
from cutesuper.skeletons.kernel.arguments import dtype_of


@dataclass(frozen=True)
class SumsThread:
    """The values that a consumer thread reads while it works.

    Attributes:
        memory: of the block.
        tensors: the arguments.
        place: of the block.
        warp, lane: indices in the block and in the warp.
        group: the warpgroup.
        member: index of the thread in its warpgroup.
    """

    memory: Any
    tensors: list[cute.Tensor]
    place: Any
    warp: Any
    lane: Any
    group: Any
    member: Any


@dataclass(frozen=True)
class Registers:
    """Products of a warpgroup, their operands, and a thread's values in registers.

    Attributes:
        cores: the tensor cores.
        fresh, more: products of scores, which replace and add.
        rows, tiles: their operands in shared memory.
        last: products of sums.
        streams: their second operands in shared memory.
        scores: fp32 accumulators of a tile ``(64, loop tile)``.
        fragments: fp32 numbers of a tile; the first are those of the scores.
        words: 16-bit operands of sums, as Int32, and ``operands``, the same as the products take
            them.
        sums: fp32 accumulators ``(64, width)``, and ``results``, fragments of all tiles so far.
    """

    cores: Products
    fresh: list[Product]
    more: list[Product]
    rows: list[cute.Tensor]
    tiles: list[cute.Tensor]
    last: list[Product]
    streams: list[cute.Tensor]
    scores: list[Any]
    fragments: list[cute.Tensor]
    words: list[cute.Tensor]
    operands: list[Any]
    sums: list[Any]
    results: list[cute.Tensor]


@dataclass(frozen=True)
class OwnRows:
    """The two rows of a thread.

    Attributes:
        at: their positions.
        values: fp32 numbers of each.
        beside: for each load that meets the scores, the offsets of the rows in its tensor.
        low, high: what each sees of the loop.
        inner_low, inner_high: what all rows of the warpgroup see.
    """

    at: list[Any]
    values: list[list[Any]]
    beside: dict[int, list[Any]]
    low: list[Any]
    high: list[Any]
    inner_low: Any
    inner_high: Any


class SumsConsumer:
    """The loop of one consumer warpgroup (128 threads, 64 rows)."""

    def __init__(self, places: Places) -> None:
        self.p, self.plan, self.cores = places, places.plan, places.cores
        self.tile = places.plan.loop_tile
        plan = places.plan
        #: streamed operands of sums, which must not hold NaN where scores are hidden
        self.summed = tuple(dict.fromkeys(plan.streams.index(s.stream) for s in plan.sums))

    @cute.jit
    def run(self, thread, span):
        """Walk over the tiles of a block, then store."""
        ring, plan = thread.memory.ring, self.plan
        cores = self.cores.open(
            thread.memory.cores, Consumers(plan.schedule.row_groups), plan.product_registers,
            plan.schedule.dependent_launch,
        )  # fmt: skip
        r = self.registers(cores, thread)
        rows = self.own_rows(thread)
        thread.memory.rows_full.only.wait(0)
        at, before = ring.first(), ring.first()
        tile = Int32(0) + span.first
        for i in cutlass.range(span.total, unroll=1):
            ring.wait(at)
            if cutlass.const_expr(self.plan.clears):
                self.clear_hidden(thread, at.stage, tile * self.tile)
            cores.begin()
            for n in cutlass.range_constexpr(len(self.plan.scores)):
                self.multiply_score(r, n, at.stage)
            beside = self.beside(rows, thread, tile * self.tile, i, span)
            cores.wait(len(self.plan.scores) - self.done_with(0))
            self.compute(r, rows, thread, at.stage, beside, 0)
            # here, since without a branch the compiler moves exponentials behind the next wait
            if i > 0:
                self.release(ring, before.stage, thread.lane)
            self.work(r, rows, thread, at.stage, tile * self.tile, beside)
            if cutlass.const_expr(not self.plan.schedule.overlapped):
                cores.wait(0)
            before = at
            at = ring.next(at)
            tile += 1
            if tile == span.first + span.count:
                tile = Int32(0) + span.first
        cores.wait(0)
        if cutlass.const_expr(len(plan.stores) > 0 and len(plan.sights) > 0):
            self.store_unseen(rows, thread, span)
        if span.total > 0:
            for accumulator, result in zip(r.sums, r.results, strict=True):
                cores.add(accumulator, result)
        cores.close()
        self.store(r, rows, thread)

    # ------------------------------------------------------------------------------- preparation

    def registers(self, cores: Products, thread: SumsThread) -> Registers:
        """Products, operands and registers; the accumulators are 0."""
        plan, memory = self.plan, thread.memory
        dtype, tile = self.p.dtype, self.tile
        fresh, more, rows, tiles = list[Any](), list[Any](), list[Any](), list[Any]()
        for s in plan.scores:
            for products, adds in ((fresh, False), (more, True)):
                product = cores.product(dtype, tile, (True, True))
                product.accumulate(adds)
                products.append(product)
            a = fresh[-1].first(memory.residents[plan.residents.index(s.resident)])
            rows.append(a[None, None, None, thread.group])
            tiles.append(fresh[-1].second(memory.streams[plan.streams.index(s.stream)]))
        last, streams, sums, results = list[Any](), list[Any](), list[Any](), list[Any]()
        for s in plan.sums:
            width = plan.width(s.columns)
            product = cores.product(dtype, width, (True, False), registers=True)
            product.accumulate(True)
            smem = memory.streams[plan.streams.index(s.stream)]
            # the same memory, where the loop's label is the contracted one
            across = operand_layout(dtype, (width, tile), plan.schedule.stages, False)
            streams.append(product.second(cute.make_tensor(smem.iterator, across.outer)))
            last.append(product)
            sums.append(product.accumulator(width))
            results.append(cores.total(sums[-1]))
        scores = [product.accumulator(tile) for product in fresh]
        fragments = [cores.registers(score) for score in scores]
        fragments += [fragment(tile // 2) for _ in range(plan.fragments - len(scores))]
        words = [fragment(tile // 4, Int32) for _ in plan.operands]
        operands = [last[0].packed(w) for w in words]
        return Registers(
            cores, fresh, more, rows, tiles, last, streams, scores, fragments, words, operands,
            sums, results,
        )  # fmt: skip

    def own_rows(self, thread: SumsThread) -> OwnRows:
        """Positions, values and limits of this thread's rows."""
        first = thread.place.tile * self.p.row_tile + thread.group * ROW_BLOCK
        at = [first + (thread.warp % 4) * 16 + thread.lane // 4 + 8 * r for r in range(2)]
        values = [self.p.row_values(thread.place, row, thread.tensors) for row in at]
        limits = [self.p.window(thread.place, row, thread.tensors) for row in at]
        _, low, high, _ = self.p.windows(thread.place, first, ROW_BLOCK, thread.tensors)
        beside = {
            i: [self.p.line(view, thread.place, row, thread.tensors) for row in at]
            for i, view in self.plan.beside.items()
        }
        return OwnRows(
            at, values, beside, [x for x, _ in limits], [x for _, x in limits], low, high
        )

    # ---------------------------------------------------------------------------------- products

    @cute.jit
    def multiply_score(self, r, n: cutlass.Constexpr, stage):
        """Compute a product of rows and a tile, as one group."""
        depth = self.plan.width(self.plan.scores[n].inner)
        with r.cores.issue():
            for kk in cutlass.range_constexpr(depth // 16):
                product = r.fresh[n] if kk == 0 else r.more[n]
                a, b = r.rows[n][None, None, kk], r.tiles[n][None, None, kk, stage]
                product.multiply(r.scores[n], a, b)
        r.cores.end()

    @cute.jit
    def multiply_sum(self, r, n: cutlass.Constexpr, stage):
        """Add the products of a tile to a sum, as one group."""
        operand = r.operands[self.plan.operands.index(self.plan.sums[n].operand)]
        with r.cores.issue():
            for kk in cutlass.range_constexpr(self.tile // 16):
                a, b = operand[None, None, kk], r.streams[n][None, None, kk, stage]
                r.last[n].multiply(r.sums[n], a, b)
        r.cores.end()

    @cute.jit
    def release(self, ring, stage, lane):
        """Give a stage back to the producer."""
        if cutlass.const_expr(self.plan.clears):
            fence_warp()
        ring.empty[stage].arrive_warp(lane)

    # ---------------------------------------------------------------------------------- the work

    def beside(
        self, rows: OwnRows, thread: SumsThread, first: Any, turn: Any, span: Any
    ) -> dict[int, cute.Tensor]:
        """Read the operands that meet the scores of a tile, before these are there.
        ``first`` (Int32) is its first element, ``turn`` the number of the tile in all walks.
        Columns behind the end of the loop, which are hidden, get numbers of the last ones."""
        found: dict[int, cute.Tensor] = {}
        for load, view in self.plan.beside.items():
            source = thread.tensors[view.argument].iterator
            register = fragment(self.tile // 2, dtype_of(self.plan, view))
            at = {} if self.plan.visits is None else {self.plan.visits: turn // span.count}
            visit = self.p.offset(view, at, thread.tensors)
            for i in range(self.tile // 2):
                column = first + 2 * (thread.lane % 4) + i // 4 * 8 + i % 2
                if self.plan.ragged:
                    column = cutlass.min(column, thread.place.end - 1)
                own = self.p.offset(view, {self.plan.loop: column}, thread.tensors)
                register[i] = one(source + (rows.beside[load][i % 4 // 2] + visit + own))[0]
            found[load] = register
        return found

    @cute.jit
    def work(self, r, rows, thread, stage, first, beside):
        """Do the work between the products of a tile, then multiply the operands of the sums.
        Each part is done as soon as its scores are there. ``first`` (Int32) is the tile's first
        element."""
        boundary = Int32(0)
        if cutlass.const_expr(self.plan.ragged):
            if (first < rows.inner_low) | (first + self.tile > rows.inner_high):
                boundary = Int32(1)
        for k in cutlass.range_constexpr(1, len(self.plan.phases)):
            r.cores.wait(len(self.plan.scores) - self.done_with(k))
            self.compute(r, rows, thread, stage, beside, k)
        if cutlass.const_expr(self.plan.ragged):
            if boundary != 0:
                self.hide(r, rows, thread, first)
        for n in cutlass.range_constexpr(len(self.plan.stores)):
            values = r.fragments[self.fragment_of(self.plan.stores[n].value)]
            self.store_tile(rows, thread, n, first, values)
        for n in cutlass.range_constexpr(len(self.plan.operands)):
            self.pack(r, n)
        r.cores.begin()
        for n in cutlass.range_constexpr(len(self.plan.sums)):
            self.multiply_sum(r, n, stage)

    def done_with(self, k: int) -> int:
        """Number of scores that a phase needs."""
        return self.plan.phases[k].score + 1

    def compute(
        self, r: Registers, rows: OwnRows, thread: SumsThread, stage: Any,
        beside: dict[int, cute.Tensor], k: int,
    ) -> None:  # fmt: skip
        """Compute a phase for all elements of a thread, pair by pair, both rows."""
        plan, phase = self.plan, self.plan.phases[k]
        before = plan.phases[k - 1] if k else None
        new = range(before.score + 1 if before else 0, phase.score + 1)
        for n in new:
            r.cores.fetch(r.scores[n], r.fragments[n])
        kept = before.slots if before else {}
        for block in range(self.tile // 8):
            column = 8 * block + 2 * (thread.lane % 4)
            pairs = [self.pair(thread, n, stage, column) for n in range(len(plan.loop_vectors))]
            for b in range(2):
                for row in range(2):
                    i = 4 * block + 2 * row + b
                    known: dict[int, Any] = {v: r.fragments[f][i] for v, f in kept.items()}
                    known |= {plan.scores[n].value: r.fragments[n][i] for n in new}
                    known |= dict(zip(plan.row_vectors, rows.values[row], strict=True))
                    known |= {v: pair[b] for v, pair in zip(plan.loop_vectors, pairs, strict=True)}
                    known |= {v: Float32(numbers[i]) for v, numbers in beside.items()}
                    self.evaluate(phase, known)
                    for v, f in phase.slots.items():
                        r.fragments[f][i] = Float32(known[v])

    def evaluate(self, phase: Phase, known: dict[int, Any]) -> None:
        """Add the values of a phase's operations to those of one element."""
        for i in phase.ops:
            op = self.plan.program.ops[i]
            if op.facets.masks:
                known[i] = known[op.inputs[0]]  # what is hidden is made 0 where it is multiplied
            elif op.facets.exponential:
                known[i] = exp2(self.in_log2(op.inputs[0], known))
            else:
                args = [known[j] for j in op.inputs]
                known[i] = lookup(op.kind).scalar(self.p.math, args, op.attributes)

    def in_log2(self, i: int, known: dict[int, Any]) -> Any:
        """A value in units of log2, as one multiply-add.
        before: ``(s * c - l) * log2(e)``; after: ``s * (c * log2(e)) - l * log2(e)``, of which the
        last term is one of a row or column."""
        op = self.plan.program.ops[i]
        if i in self.plan.between and op.facets.masks:
            return self.in_log2(op.inputs[0], known)
        if i in self.plan.between and op.facets.subtracts:
            a, b = (self.in_log2(j, known) for j in op.inputs)
            if op.inputs[1] in self.plan.between:
                # a guard of a row that sees nothing, the lowest number, stays finite
                b = cute.arch.fmax(b, -LARGEST)
            return a - b
        if i in self.plan.between and op.facets.multiplies:
            factor = self.plan.program.ops[op.inputs[1]]
            if factor.kind == CONSTANT:
                return known[op.inputs[0]] * (factor.attributes["value"] * LOG2E)
        return known[i] * LOG2E

    def pair(self, thread: SumsThread, n: int, stage: Any, column: Any) -> cute.Tensor:
        """Numbers of two neighbouring elements of the loop, the first of which is even."""
        slot = (stage * len(self.plan.loop_vectors) + n) * self.tile + column
        return fetched(neighbours(thread.memory.vectors + cute.assume(slot, divby=2), 2))

    @cute.jit
    def hide(self, r, rows, thread, first):
        """Set values made of the scores to 0 where a row does not see the element."""
        column = first + 2 * (thread.lane % 4)
        for row in cutlass.range_constexpr(2):
            low, high = rows.low[row] - column, rows.high[row] - column
            for j in cutlass.range_constexpr(self.tile // 4):
                i, own = 4 * (j // 2) + 2 * row + j % 2, 8 * (j // 2) + j % 2
                seen = (own >= low) & (own < high)
                for made in self.plan.made:
                    values = r.fragments[self.fragment_of(made)]
                    values[i] = choose(seen, values[i], 0.0)

    def fragment_of(self, made: int) -> int:
        """The fragment in which an operand, or a value to be stored, is left."""
        return self.plan.phases[-1].slots[made]

    def pack(self, r: Registers, n: int) -> None:
        """Convert an operand to 16 bits."""
        values = r.fragments[self.fragment_of(self.plan.operands[n])]
        rounded(values, r.words[n], self.p.dtype)
        r.last[0].put(r.operands[n], r.words[n])

    @cute.jit
    def clear_hidden(self, thread, stage, first):
        """Set streamed operands of sums to 0 behind a length.
        Memory there may hold NaN, and 0 times NaN is NaN. One warpgroup does, before any multiplies
        the tile."""
        end = self.p.written(thread.place)
        if first + self.tile > end:
            own = (thread.group == 0) & (thread.member < self.tile)
            if own & (first + thread.member >= end):
                for n in cutlass.range_constexpr(len(self.summed)):
                    self.clear(thread, self.summed[n], stage)
            fence_warp()
            Meeting(ROWS_BARRIER, 128 * self.plan.schedule.row_groups).meet()

    def clear(self, thread: SumsThread, n: int, stage: Any) -> None:
        """Set one element's row of a streamed operand to 0."""
        width = self.plan.width(self.plan.inner(self.plan.streams[n]))
        chunk, row = chunk_of(width), thread.member
        zeros = filled(PIECE, 0.0, self.p.dtype)
        base = cute.recast_ptr(thread.memory.streams[n].iterator, dtype=self.p.dtype)
        for piece in range(width // PIECE):
            inside = byte_piece(width, piece % (chunk // PIECE), row)
            line = piece // (chunk // PIECE) * self.tile + row
            offset = stage * (self.tile * width) + line * chunk + inside * PIECE
            cute.autovec_copy(zeros, neighbours(base + cute.assume(offset, divby=PIECE), PIECE))

    # ------------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, r, rows, thread):
        """Apply the outputs' expressions to the sums, and store them."""
        end = self.p.extents.of(self.plan.rows, thread.tensors)
        for n in cutlass.range_constexpr(len(self.plan.outputs)):
            for row in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.is_wide(n)):
                    found = self.pieces(r, rows, n, row, thread.lane)
                    if rows.at[row] < end:
                        store(found, self.row_start(rows, thread, n, row, 8), thread.lane)
                elif rows.at[row] < end:
                    self.store_row(r, rows, thread, n, row)

    def is_wide(self, n: int) -> bool:
        """True if threads store 16 bytes of an output."""
        plan, view, columns = self.plan, self.plan.outputs[n].view, self.columns_of(n)
        return is_wide(view, columns, plan.extent(columns), plan.itemsize(view))

    def pieces(self, r: Registers, rows: OwnRows, n: int, row: int, lane: Any) -> list[cute.Tensor]:
        """A row of an output, as `wide.store` takes it."""
        blocks = self.plan.extent(self.columns_of(n)) // 8
        return pieces(lambda block: self.numbers(r, rows, n, row, block), blocks, lane)

    def row_start(
        self, rows: OwnRows, thread: SumsThread, n: int, row: int, aligned: int
    ) -> cute.Pointer:
        """The place of a row's first column, a multiple of ``aligned`` elements."""
        view = self.plan.outputs[n].view
        at = {**thread.place.batch, self.plan.rows: rows.at[row]}
        offset = cute.assume(self.p.offset(view, at, thread.tensors), divby=aligned)
        return thread.tensors[view.argument].iterator + offset

    @cute.jit
    def store_row(self, r, rows, thread, n: cutlass.Constexpr, row: cutlass.Constexpr):
        """Store this thread's columns of a row of one output, in pairs."""
        columns, start = self.columns_of(n), self.row_start(rows, thread, n, row, 2)
        for block in cutlass.range_constexpr(self.plan.width(columns) // 8):
            column = 8 * block + 2 * (thread.lane % 4)
            if column < self.plan.extent(columns):
                register = self.numbers(r, rows, n, row, block)
                target = neighbours(start + cute.assume(column, divby=2), 2)
                cute.autovec_copy(register, target)

    def numbers(self, r: Registers, rows: OwnRows, n: int, row: int, block: int) -> cute.Tensor:
        """A thread's two numbers of a block of 8 columns, of one of its rows of an output."""
        plan, output = self.plan, self.plan.outputs[n]
        register = fragment(2, dtype_of(plan, output.view))
        given = dict(zip(plan.row_vectors, rows.values[row], strict=True))
        for b in range(2):
            i = 4 * block + 2 * row + b
            known = given | {s.final: x[i] for s, x in zip(plan.sums, r.results, strict=True)}
            leaves = [known[v] for v in output.expression.leaves]
            x = Float32(output.expression.evaluate(leaves, self.p.math))
            register[b] = x.to(register.element_type)
        return register

    @cute.jit
    def store_unseen(self, rows, thread, span):
        """Store 0 in the tiles that this block does not walk over: none of its rows sees them."""
        zeros = filled(self.tile // 2, 0.0, Float32)
        for tile in cutlass.range((thread.place.end + self.tile - 1) // self.tile, unroll=1):
            if (tile < span.first) | (tile >= span.first + span.count):
                for n in cutlass.range_constexpr(len(self.plan.stores)):
                    self.store_tile(rows, thread, n, tile * self.tile, zeros)

    @cute.jit
    def store_tile(self, rows, thread, n: cutlass.Constexpr, first, values):
        """Store this thread's numbers of a tile of scores, both rows."""
        view, tensors = self.plan.stores[n].view, thread.tensors
        end = self.p.extents.of(self.plan.rows, tensors)
        for row in cutlass.range_constexpr(2):
            if rows.at[row] < end:
                line = self.p.line(view, thread.place, rows.at[row], tensors)
                for block in cutlass.range_constexpr(self.tile // 8):
                    column = first + 8 * block + 2 * (thread.lane % 4)
                    target = tensors[view.argument].iterator + (line + column)
                    pair = [values[4 * block + 2 * row + b] for b in range(2)]
                    for b in cutlass.range_constexpr(2):
                        if column + b < thread.place.end:
                            put(target + b, pair[b].to(dtype_of(self.plan, view)))

    def columns_of(self, n: int) -> str:
        """The label of an output's columns."""
        leaves = self.plan.outputs[n].expression.leaves
        return next(s.columns for s in self.plan.sums if s.final in leaves)
