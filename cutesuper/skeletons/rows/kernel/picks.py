"""Sums along a row with a single element that is not 0: that element, read by itself.

before: ``sum(pick(x, label))``, a comparison, a choice and an addition for every element; after:
``x[label]``, or 0 if the label is no column, with as many loads as x depends on. Every thread of a
row, and every block of a cluster, reads the same elements, so nothing is exchanged and results are
the same bits. They are requested with the tile: from the stage if it has whole rows, else from
device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.memory import element
from cutesuper.ir.block import LOAD
from cutesuper.ir.relations import reachable
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.rows.kernel.access import Access
from cutesuper.skeletons.rows.kernel.context import Known, Place, Row
from cutesuper.skeletons.rows.kernel.stages import Stages


@dataclass(frozen=True)
class Asked:
    """The picked element of a row.

    Attributes:
        column: its position (Int32); 0 if the label is no column.
        inside: true if the label is a column.
        elements: by load, for all loads with the column, in their stored types.
    """

    column: Any
    inside: Any
    elements: dict[int, Any]


class Picks:
    """The elements that one kernel reads by themselves."""

    def __init__(self, known: Known, access: Access, stages: Stages) -> None:
        self.k, self.access, self.stages = known, access, stages
        self.plan = known.plan
        #: loads with the column that each element depends on
        self.leaves = {end: self._leaves(self.source(end)) for end in self.plan.picked}

    def source(self, end: int) -> int:
        """The `pick` operation: one element of each row, and zeros."""
        ops = self.plan.program.ops
        return ops[self.plan.picked[end]].inputs[0]

    def _leaves(self, i: int) -> list[int]:
        ops, column = self.plan.program.ops, self.plan.column
        found = reachable([i], lambda j: [n for n in ops[j].inputs[::-1] if column in ops[n].dims])
        return [j for j in found if ops[j].kind == LOAD]

    def ask(self, end: int, row: Row, tensors: list[cute.Tensor], place: Place) -> Asked:
        """Read the elements of a row whose sum is operation ``end``."""
        k, plan = self.k, self.plan
        label = plan.program.ops[self.source(end)].inputs[1]
        found = row.scalars.get(label)
        if found is None:
            found = self.access.number(plan.loads[label], tensors, place)
        column = k.math.position(found)
        inside = (column >= 0) & (column < plan.length)
        column = Int32(select_(inside, column, Int32(0)))
        elements = {i: self.element(i, column, row, tensors, place) for i in self.leaves[end]}
        return Asked(column, inside, elements)

    def element(
        self,
        i: int,
        column: Any,
        row: Row,
        tensors: list[cute.Tensor],
        place: Place,
    ) -> Any:
        """Read one element of a row of a load."""
        plan, stages = self.plan, self.stages
        view = plan.loads[i]
        if plan.varies(view) and row.memory is not None and plan.parts == 1:
            base = stages.row_memory(i, row, dtype_of(plan, view))
        else:
            existing = stages.existing(row.row, tensors) if plan.varies(view) else Int32(0)
            start = self.access.offset(view, tensors, existing, replace(place, part=0))
            base = tensors[view.argument].iterator + start
            column = column * self.k.extents.stride(view, plan.column, tensors)
        return element(base, column)
