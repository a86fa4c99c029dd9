"""Uses of a matmul loop's accumulators besides storing them: products after the loop, and
reductions along the columns.

before: ``X W + (X A) B`` with A of 16 columns; after: one loop accumulates X W and H = X A, then
``H B`` is added from shared memory: one kernel, which reads X once.

before: ``sum_N relu(X W) v``; after: every block sums over its columns, and the blocks of a cluster
that have the other columns add their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutesuper.ir.dims import ceil_div
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.base import View
from cutesuper.skeletons.matmul.hidden import hidden_width


@dataclass(frozen=True)
class Tail:
    """A product after the loop, whose operand the loop has accumulated.

    Attributes:
        hidden: the label that it contracts; a block holds the whole of it.
        extent: extent of that label.
        products: products of the loop, ``[row, hidden]``: column operand, and operation of the
            accumulator.
        source: the row operand, an expression over accumulators of ``products``, row values and
            loads.
        load: its column operand ``[hidden, column]``.
        view: the view of ``load``.
        final: the operation that its result completes; a product of the loop with the same one
            shares its accumulators.
        once: True if it is complete although a cluster shares the loop: one block adds it.
    """

    hidden: str
    extent: int
    products: tuple[tuple[int, int], ...]
    source: ThreadExpression
    load: int
    view: View
    final: int
    once: bool

    @property
    def blocks(self) -> int:
        """Number of 64-element blocks that the hidden label takes in the WGMMA instruction."""
        return ceil_div(self.extent, 64)

    @property
    def padded(self) -> int:
        """Elements of the hidden label in the row operand."""
        return 64 * self.blocks

    def width(self, narrow: bool) -> int:
        """Number of columns staged of every product of the loop; see `skeletons.matmul.hidden`."""
        return hidden_width(self.extent, narrow)


@dataclass(frozen=True)
class ColumnReduction:
    """A reduction of accumulators along the columns, one value for each row.

    Attributes:
        value: the operation that completes it.
        source: the reduced expression over accumulators, row values, loads and earlier reductions.
        op: "sum" or "max".
        scale: factor applied to the complete reduction (1/N for a mean).
    """

    value: int
    source: ThreadExpression
    op: str
    scale: float
