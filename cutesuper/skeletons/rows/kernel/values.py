"""The values of one piece of one row, each evaluated at its first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.fragments import widen
from cutesuper.device.math import choose
from cutesuper.ir.block import LOAD, BlockOp
from cutesuper.ir.operators.base import lookup
from cutesuper.ir.operators.monoid import monoid
from cutesuper.skeletons.rows.kernel.access import Access
from cutesuper.skeletons.rows.kernel.context import Known, Place, Row
from cutesuper.skeletons.rows.kernel.picks import Asked, Picks
from cutesuper.skeletons.rows.kernel.stages import Stages


@dataclass(frozen=True)
class Sources:
    """The sources of values: parts of the kernel, and loads common to all rows.

    Attributes:
        known, access, stages, picks: parts.
        tensors: the arguments.
        place: of the thread.
        vectors: by load, fragments for loads with the column, else numbers.
    """

    known: Known
    access: Access
    stages: Stages
    picks: Picks
    tensors: list[cute.Tensor]
    place: Place
    vectors: dict[int, Any]


class Values:
    """The values of one piece of one row, each evaluated at its first use.

    Args:
        sources: of values.
        row: the result of `Tiles.read` for it.
        piece: index among the pieces of the thread's columns.
        known: known values of the row: loads, complete reductions, and values computed from them,
            which all pieces share.
        element: one element of the row, in place of a piece.
    """

    def __init__(
        self,
        sources: Sources,
        row: Row,
        piece: int,
        known: dict[int, Any],
        element: Asked | None = None,
    ) -> None:
        self.sources, self.k, self.place = sources, sources.known, sources.place
        self.row, self.piece, self.known = row, piece, known
        self.element = element
        self.found: dict[int, Any] = {}
        self.read: dict[int, cute.Tensor] = {}

    def at(self, element: Asked) -> Values:
        """The values of one element of the same row."""
        return Values(self.sources, self.row, self.piece, self.known, element)

    def of(self, i: int) -> Any:
        """The value of an operation: a fragment, or a number."""
        stack = [i]
        while stack:
            j = stack.pop()
            if self._is_known(j):
                continue
            waiting = [n for n in self._needs(j) if not self._is_known(n)]
            if waiting:
                stack += [j, *reversed(waiting)]
            else:
                self._store(j)[j] = self.compute(j)
        return self._store(i)[i]

    def picked(self, end: int) -> Any:
        """The sum (or mean) of operation ``end``: one element, or 0."""
        plan, sources = self.k.plan, self.sources
        if self.row.picked is not None:
            asked = self.row.picked[end]
        else:  # a block with a slice of all rows
            asked = sources.picks.ask(end, self.row, sources.tensors, self.place)
        source = plan.program.ops[sources.picks.source(end)].inputs[0]
        found = choose(asked.inside, self.at(asked).of(source), 0.0)
        return found * plan.program.factor(plan.program.ops[plan.picked[end]])

    def _store(self, i: int) -> dict[int, Any]:
        """The dictionary for a value: that of this piece, or that of the row."""
        plan = self.k.plan
        return self.found if plan.column in plan.program.ops[i].dims else self.known

    def _is_known(self, i: int) -> bool:
        return i in self._store(i)

    def _needs(self, i: int) -> tuple[int, ...]:
        """The operands that `compute` needs: long chains are computed in order."""
        plan = self.k.plan
        return () if i in plan.picked else plan.program.ops[i].inputs

    def compute(self, i: int) -> Any:
        """Evaluate an operation."""
        plan = self.k.plan
        op = plan.program.ops[i]
        if op.kind == LOAD:
            return self.load(i)
        if i in plan.picked:
            return self.picked(i)
        args = [self.of(j) for j in op.inputs]
        operator = lookup(op.kind)
        if operator.masks:
            return self.masked(op, args)
        return operator.scalar(self.k.math, args, op.attributes)

    def masked(self, op: BlockOp, args: list[Any]) -> Any:
        """Evaluate an operator that takes positions.
        Columns along the row, rows if they are walked."""
        k, place = self.k, self.place
        rows, columns = (op.attributes.get(name) for name in ("rows", "columns"))
        extents = tuple(k.extents.of(d, self.sources.tensors) if d else 1 for d in (rows, columns))
        operator, at = lookup(op.kind), self.positions()
        if operator.one_column and self.element is None:
            # a constant for each element: one comparison, and no registers for positions
            first = place.first + place.part * k.plan.width
            args = [args[0], *(k.math.position(i) - first for i in args[1:])]
            at = k.columns(self.piece, place.piece, 0)
        row = self.row.row if rows in k.plan.rows else place.outer.get(rows, 0)
        return operator.at(k.math, args, row, at, extents, op.attributes)

    def positions(self) -> Any:
        """Columns of the elements in the whole row."""
        k, place = self.k, self.place
        if self.element is not None:
            return self.element.column
        return k.columns(self.piece, place.piece, place.first) + place.part * k.plan.width

    def load(self, i: int) -> Any:
        """A load in fp32."""
        view = self.k.plan.loads[i]
        if self.element is not None and i in self.element.elements:
            return self.element.elements[i].to(Float32)
        if self.k.plan.column not in view.labels:
            return self.sources.vectors[i]
        return widen(self.registers(i))

    def registers(self, i: int) -> cute.Tensor:
        """A load with the column as it is stored: from registers, the ring, or device memory."""
        k, view, sources = self.k, self.k.plan.loads[i], self.sources
        if i in self.read:
            return self.read[i]
        if not k.plan.varies(view):
            if i in sources.vectors:
                return sources.vectors[i][self.piece]
            found = sources.access.read(view, sources.tensors, Int32(0), self.piece, self.place)
        elif i in self.row.fragments:
            return self.row.fragments[i]
        else:
            found = sources.stages.fragment(i, self.row, self.piece, self.place)
        self.read[i] = found
        return found


@cute.jit
def add_rows(known: cutlass.Constexpr, acc, value, valid, kind: cutlass.Constexpr):
    """Take a row into an accumulator; rows past the end do not count."""
    if valid:
        acc.store(monoid(kind).combine(known.math, acc.load(), value))
