"""Weights from scores, in registers: running maximum, sums, and the operand for the values.

A thread holds, for one or two rows (8 apart), the columns ``8 j + 2 (lane % 4) + {0, 1}`` of a
tile; four threads share a row. Maxima are kept in units of log2: ``exp(c s - M)`` is one
multiply-add and one ``ex2``. A maximum starts as a large negative number in place of -inf, so that
rows without any visible key need no special case: their weights and sums are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import e as EULER
from math import log2
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import fragment, rounded, stored
from cutesuper.device.math import choose
from cutesuper.device.memory import neighbours, one
from cutesuper.device.pipeline import Slot
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.attention.kernel.context import Here, Known, Memory, RowFacts
from cutesuper.skeletons.attention.kernel.keys import KeyValues
from cutesuper.skeletons.attention.kernel.rows import Rows
from cutesuper.skeletons.kernel.arguments import dtype_of

LOG2E = log2(EULER)
#: initial maximum; below all scores of 16-bit operands that are not -inf
LOWEST = -3.0e38
#: a result is rescaled only if its maximum has risen by more than this, in units of log2: weights
#: stay below 64, fine in 16 bits
LAZY = 6.0


def exp2(x: Any) -> Any:
    """2^x."""
    return cute.math.exp2(x, fastmath=True)


@dataclass(frozen=True)
class KeyColumns:
    """The columns of a thread in a tile of scores.

    Attributes:
        memory: of the block.
        at: the slot of the tile in the ring.
        first: column.
        beside: what meets the scores, in the order of a row's columns, row after row.
    """

    memory: Memory
    at: Slot
    first: Any
    beside: dict[int, cute.Tensor]


class Scores:
    """The element-wise part of the loop, on fp32 accumulator fragments."""

    def __init__(self, known: Known, rows: Rows, key_values: KeyValues) -> None:
        self.k, self.query, self.key_values = known, rows, key_values
        self.plan = plan = known.plan
        self.blocks = known.key_tile // 8
        self.rows = rows.per_thread
        self.shifted = plan.maximum is not None
        # sums and results may be relative to a maximum that lags behind, but it may not be an
        # output
        self.lazy = plan.schedule.overlapped and not any(map(plan.tells_maximum, plan.outputs))
        #: True if values of keys are needed before the weights
        self.keyed_early = any(i in plan.key_values for i in plan.scores.leaves)
        self.scale = plan.factor * LOG2E

    def start(self, warp: Any, lane: Any) -> cute.Tensor:
        """Initial state, 6 fp32 registers.
        Maximum and sum of two rows, then the factors of the last rescaling.

        Rows that are padding contain arbitrary shared memory. Their maximum never rises, so that
        they do not decide whether a warp rescales, and every run gives the same bits.
        """
        state = fragment(6)
        for r in range(2):
            row = self.query.row(warp, lane, r)
            state[2 * r] = choose(row < self.query.count, LOWEST, float("inf"))
            state[2 * r + 1] = 0.0
            state[4 + r] = 1.0
        return state

    def elements(self, r: int) -> list[tuple[int, int]]:
        """Accumulator indices of a row's elements, and their columns from the thread's first on."""
        return [(4 * j + 2 * r + b, 8 * j + b) for j in range(self.blocks) for b in range(2)]

    def beside(self, rows: RowFacts, keys: Any, here: Here) -> dict[int, cute.Tensor]:
        """Read the operands that meet the scores of a tile, before these are there.
        ``keys`` (Int32) is its first key. Columns behind the last key, which are hidden, get
        numbers of the last ones."""
        found: dict[int, cute.Tensor] = {}
        for i, view in self.plan.beside.items():
            source = here.tensors[view.argument].iterator
            register = fragment(2 * self.rows * self.blocks, dtype_of(self.plan, view))
            step = self.k.extents.stride(view, self.plan.keys, here.tensors)
            for r in range(self.rows):
                for block in range(self.blocks):
                    key = keys + 2 * (here.lane % 4) + 8 * block
                    for b in range(2):
                        own = key + b
                        if self.plan.ragged:
                            own = cutlass.min(own, here.place.keys - 1)
                        place = 2 * (self.blocks * r + block) + b
                        register[place] = one(source + (rows.beside[i][r] + own * step))[0]
            found[i] = register
        return found

    @cute.jit
    def maxima(self, scores, state, at, rows, keys, here, beside):
        """Do what comes before the exponentials: expressions of scores, and what is hidden.
        Returns the new maxima of a thread's rows, in units of log2, and 1 for a tile in which
        something is hidden (Int32).

        ``scores`` is an fp32 accumulator fragment of ``(64, key tile)``, ``state`` that of `start`;
        ``keys`` (Int32) is the first key of the tile, ``beside`` what meets its scores.
        """
        first, tops = 2 * (here.lane % 4), []
        values = KeyColumns(here.memory, at, first, beside)
        if cutlass.const_expr(self.keyed_early):
            self.key_values.wait(here.memory, at)
        if cutlass.const_expr(self.shifted and not self.plan.scores.trivial):
            self.apply(self.plan.scores, scores, rows, values, self.plan.product)
        boundary = Int32(0)
        if cutlass.const_expr(self.plan.ragged):
            if keys + self.k.key_tile > rows.least:
                boundary = Int32(1)
        if cutlass.const_expr(self.plan.begins):
            if keys < rows.latest:
                boundary = Int32(1)
        if cutlass.const_expr(self.shifted):
            if cutlass.const_expr(self.plan.ragged):
                if boundary != 0:
                    self.hide(scores, rows, keys + first, -float("inf"))
            tops = self.raised(scores, state, rows)
        return tops, boundary

    @cute.jit
    def weigh(self, scores, state, found, at, rows, keys, here, beside):
        """Replace scores by weights, with what `maxima` has ``found``; update maxima and sums."""
        tops, boundary = found
        first = 2 * (here.lane % 4)
        values = KeyColumns(here.memory, at, first, beside)
        if cutlass.const_expr(self.shifted):
            self.shift(scores, state, tops, rows)
            self.accumulate(scores, state, rows, values, self.plan.weight)
        else:
            self.accumulate(scores, state, rows, values, self.plan.product, boundary, keys + first)

    @cute.jit
    def hide(self, scores, rows, first, value: cutlass.Constexpr):
        """Set the elements that a row does not see to ``value``."""
        for r in cutlass.range_constexpr(self.rows):
            limit = rows.limits[r] - first
            for i, column in self.elements(r):
                seen = column < limit
                if cutlass.const_expr(self.plan.begins):
                    seen = seen & (column >= rows.begins[r] - first)
                scores[i] = choose(seen, scores[i], value)

    @cute.jit
    def raised(self, scores, state, rows):
        """Maxima of a thread's rows over all tiles so far, in units of log2."""
        tops, scales = [], [self.scale_of(r, rows) for r in range(self.rows)]
        for r in cutlass.range_constexpr(self.rows):
            best = [scores[i] for i, _ in self.elements(r)[:4]]
            for n, (i, _) in enumerate(self.elements(r)[4:]):
                best[n % 4] = cute.arch.fmax(best[n % 4], scores[i])
            top = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 2))
            tops.append(cute.arch.fmax(state[2 * r], top * scales[r]))
        return tops

    @cute.jit
    def shift(self, scores, state, tops, rows):
        """Replace scores by exp(score - maximum), where ``tops`` are the maxima."""
        scales = [self.scale_of(r, rows) for r in range(self.rows)]
        if cutlass.const_expr(self.lazy):
            risen = tops[0] - state[0]
            if cutlass.const_expr(self.rows == 2):
                risen = cute.arch.fmax(risen, tops[1] - state[2])
            if not cute.arch.vote_any_sync(risen > LAZY):
                for r in cutlass.range_constexpr(self.rows):
                    tops[r] = state[2 * r]
        for r in cutlass.range_constexpr(self.rows):
            state[4 + r] = exp2(state[2 * r] - tops[r])
            state[2 * r] = tops[r]
            for i, _ in self.elements(r):
                scores[i] = exp2(scores[i] * scales[r] - tops[r])

    @cute.jit
    def accumulate(
        self, scores, state, rows, values, leaf: cutlass.Constexpr, boundary=None, first=None
    ):
        """Add to the sums of rows, and replace the scores by the operand for the values."""
        for r in cutlass.range_constexpr(self.rows):
            if cutlass.const_expr(self.shifted):
                state[2 * r + 1] *= state[4 + r]
        if cutlass.const_expr(len(self.plan.key_values) > 0 and not self.keyed_early):
            # the values of keys have been computed during the exponentials
            self.key_values.wait(values.memory, values.at)
        for s in self.plan.row_sums:
            parts = [[Float32(0.0) for _ in range(4)] for _ in range(self.rows)]
            for n, (j, keyed) in enumerate(self.columns(s.source, values)):
                for r in cutlass.range_constexpr(self.rows):
                    x = self.evaluate(s.source, scores[self.place(j, r)], r, keyed[r], rows, leaf)
                    if cutlass.const_expr(boundary is not None and self.plan.ragged):
                        column = Int32(first) + j // 2 * 8 + j % 2
                        x = choose(column < rows.limits[r], x, 0.0)
                    parts[r][n % 4] += x
            for r in cutlass.range_constexpr(self.rows):
                p = parts[r]
                state[2 * r + 1] += (p[0] + p[1]) + (p[2] + p[3])
        if cutlass.const_expr(not self.plan.result.source.trivial):
            self.apply(self.plan.result.source, scores, rows, values, leaf)
        if cutlass.const_expr(boundary is not None and self.plan.ragged):
            if boundary != 0:
                self.hide(scores, rows, first, 0.0)

    def scale_of(self, r: int, rows: RowFacts) -> Any:
        """Factor of a row's scores, in units of log2."""
        if self.plan.row_factor is None:
            return self.scale
        place = list(self.plan.row_values).index(self.plan.row_factor)
        return self.scale * rows.values[r][place]

    def place(self, column: int, r: int) -> int:
        """Accumulator index of the n-th column of a thread's row."""
        return 4 * (column // 2) + 2 * r + column % 2

    def columns(
        self, e: ThreadExpression, values: KeyColumns
    ) -> Iterator[tuple[int, list[dict[int, Any]]]]:
        """Yield a thread's columns, each with the key's values of an expression, for both rows.

        They come in pairs, for both rows. Values are read at their use: 32 values of a tile of 128
        keys kept in registers took 184 to 504 bytes of stack.
        """
        needed = [i for i in e.leaves if i in self.plan.key_values]
        met = [i for i in e.leaves if i in self.plan.beside]
        for block in range(self.blocks):
            key, stage = values.first + 8 * block, values.at.stage
            pairs = {i: self.key_values.pair(values.memory, i, stage, key) for i in needed}
            for b in range(2):
                keyed = {i: pair[b] for i, pair in pairs.items()}
                at = [2 * (self.blocks * r + block) + b for r in range(self.rows)]
                beside = [{i: Float32(values.beside[i][n]) for i in met} for n in at]
                yield 2 * block + b, [keyed | own for own in beside]

    def apply(
        self, e: ThreadExpression, scores: Any, rows: RowFacts, values: KeyColumns, leaf: int | None
    ) -> None:
        """Replace every element of the accumulator by an expression."""
        for j, keyed in self.columns(e, values):
            for r in range(self.rows):
                i = self.place(j, r)
                scores[i] = self.evaluate(e, scores[i], r, keyed[r], rows, leaf)

    def evaluate(
        self,
        e: ThreadExpression,
        x: Any,
        r: int,
        keyed: dict[int, Any],
        rows: RowFacts,
        leaf: int | None,
    ) -> Any:
        """Evaluate an expression for one element, with the values of its row and its key."""
        known = dict(zip(self.plan.row_values, rows.values[r], strict=True)) | keyed
        leaves = [x if i == leaf else known[i] for i in e.leaves]
        return Float32(e.evaluate(leaves, self.k.math))

    def pack(self, scores: Any, words: Any) -> None:
        """Convert the weights to a 16-bit operand."""
        if self.k.row_groups > 1:
            rounded(scores, words, self.k.dtype)
            return
        # the short loops of warpgroups along the keys: 16.5 us so at 16x256 queries, 17.1 with that
        count = self.k.key_tile // 2
        narrow = stored(neighbours(scores.iterator, count).load(), count, self.k.dtype)
        words.store(cute.recast_tensor(narrow, Int32).load())

    @cute.jit
    def rescale(self, result, state):
        """Multiply the result by exp(old maximum - new maximum)."""
        if cutlass.const_expr(self.shifted):
            if cutlass.const_expr(self.lazy):
                low = state[4]
                if cutlass.const_expr(self.rows == 2):
                    low = cute.arch.fmin(low, state[5])
                if cute.arch.vote_any_sync(low < 1.0):
                    self.multiply(result, state)
            else:
                self.multiply(result, state)

    @cute.jit
    def multiply(self, result, state):
        """Multiply all columns of a thread's rows."""
        for j in cutlass.range_constexpr(self.k.width // 8):
            for r in cutlass.range_constexpr(self.rows):
                for b in cutlass.range_constexpr(2):
                    result[4 * j + 2 * r + b] = result[4 * j + 2 * r + b] * state[4 + r]
