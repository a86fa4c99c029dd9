"""Leaves of the expressions after the loop, for one column of a thread.

A thread holds, for one column of the output and a quarter of the rows, ``m / 4`` accumulators:
rows ``8 j + 2 (lane % 4) + {0, 1}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutesuper.device.fragments import combine, fragment
from cutesuper.device.memory import element, one
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Memory
from cutesuper.skeletons.matmul.plan import MatmulPlan


@dataclass(frozen=True)
class Column:
    """One column of a thread.

    Attributes:
        places: index into ``sums`` by the operation that completes an accumulator.
        sums: fragments of complete accumulators.
        n: the column's coordinate along ``label``.
        label: the output's column label, or a hidden one.
        rows: of the tile that the fragments have (Int32 each).
    """

    places: dict[int, int]
    sums: list[Any]
    n: Any
    label: str
    rows: list[Any]


class Reduced:
    """Complete reductions along the columns, as they lie in shared memory."""

    def __init__(self, known: Known) -> None:
        self.k, plan = known, known.plan
        self.reductions = plan.reductions
        self.place = {r.value: n for n, r in enumerate(self.reductions)}
        self.wide = plan.column_cluster > 1
        self.parts = plan.column_cluster if self.wide else known.consumers

    def combine(self, r: int, x: Any, y: Any) -> Any:
        """Combine two partial results of reduction ``r``."""
        return combine(self.reductions[r].op, x, y)

    def row_value(self, r: int, memory: Memory, row: Any) -> Float32:
        """The complete reduction ``r`` of one row."""
        sums = memory.block_sums if self.wide else memory.warp_sums
        total = None
        for part in range(self.parts):
            x = element(sums, (r * self.parts + part) * self.k.m + row)
            total = x if total is None else self.combine(r, total, x)
        assert total is not None
        return total * self.reductions[r].scale


class Leaves:
    """Accumulators, values of rows, reductions and loads of one column."""

    def __init__(self, known: Known) -> None:
        self.k = known
        self.reduced = Reduced(known)
        self.places = places_of(known.plan)

    def column(self, sums: list[Any], n: Any, quarter: Any) -> Column:
        """A column of the output, with all rows of a thread."""
        return self.hidden_column(self.places, sums, n, self.k.plan.column, quarter)

    def hidden_column(
        self, places: dict[int, int], sums: list[Any], n: Any, label: str, quarter: Any
    ) -> Column:
        """A column along any label, with all rows of a thread."""
        rows = [self.row_of(v, quarter) for v in range(self.k.values)]
        return Column(places, sums, n, label, rows)

    def evaluate(self, expression: ThreadExpression, column: Column, here: Here) -> Any:
        """The value of an expression for one column, as a fragment."""
        leaves = [self.of(i, column, here) for i in expression.leaves]
        return expression.evaluate(leaves, self.k.math)

    def of(self, i: int, column: Column, here: Here) -> Any:
        """The fragment of a leaf: an accumulator, row value, reduction or load."""
        plan, rows = self.k.plan, column.rows
        if i in column.places:
            return column.sums[column.places[i]]
        if i in plan.row_values:
            base = list(plan.row_values).index(i) * self.k.m
            return self.gather(here.memory.row_values, [base + m for m in rows])
        if i in self.reduced.place:
            out = fragment(len(rows))
            for v, m in enumerate(rows):
                out[v] = self.reduced.row_value(self.reduced.place[i], here.memory, m)
            return out.load()
        return self.fetch(plan.loads[i], column, here)

    def gather(self, array: cute.Pointer, places: list[Any]) -> Any:
        """Elements of a shared-memory array as a fragment."""
        out = fragment(len(places))
        for v, place in enumerate(places):
            out[v] = one(array + place)[0]
        return out.load()

    @cute.jit
    def fetch(self, view: cutlass.Constexpr, column, here):
        """Load a bias, residual or the like for one column, as fp32."""
        k, plan = self.k, self.k.plan
        base = k.batch_offset(view, here) + k.along(view, column.label, column.n, here)
        source = here.tensors[view.argument].iterator
        out = fragment(len(column.rows))
        if cutlass.const_expr(plan.row in view.labels):
            rows = k.extents.of(plan.row, here.tensors)
            for v in cutlass.range_constexpr(len(column.rows)):
                m = here.tile.row * k.m + column.rows[v]
                out[v] = Float32(0.0)
                if m < rows:
                    place = source + (base + k.along(view, plan.row, m, here))
                    out[v] = one(place)[0].to(Float32)
        else:
            out.fill(one(source + base)[0].to(Float32))
        return out.load()

    # --------------------------------------------------------------------- accumulator fragments

    def column_in_tile(self, block: Any, half: int, here: Here) -> Any:
        """The column of one half of a thread's accumulator fragment."""
        return self.k.cores.row(block, half, here.warp, here.lane)

    def column_of(self, accumulator: cute.Tensor, half: int) -> Any:
        """One column of an accumulator fragment."""
        column = fragment(self.k.values)
        for v in range(self.k.values):
            column[v] = accumulator[self.position(v, half)]
        return column.load()

    @staticmethod
    def position(v: int, half: int) -> int:
        """Index of value ``v`` in an accumulator fragment: (row bit, column half, row block)."""
        return v % 2 + 2 * half + 4 * (v // 2)

    @staticmethod
    def row_of(v: int, quarter: Any) -> Any:
        """Row of value ``v`` within the tile."""
        return 8 * (v // 2) + 2 * quarter + v % 2


def places_of(plan: MatmulPlan) -> dict[int, int]:
    """Index into a column's sums by the operation that they complete: products, then vectors."""
    vectors = {p.value: len(plan.finals) + n for n, p in enumerate(plan.vector_products)}
    return dict(plan.finals) | vectors
