"""Column operands: tensors in memory whose free label is the 64-row side (M) of the product.

The operands of a group share one instruction: they have the same labels, stored in the same order.
The loop has one group for the columns and one for each hidden label; a product after the loop has a
group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from cutesuper.device.memory import operand_layout, swizzle
from cutesuper.device.products import Product, Products
from cutesuper.skeletons.base import View
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, MatmulPlan


@dataclass(frozen=True)
class ColumnGroup:
    """Column operands and their shared memory: ``slots`` boxes of 64 columns for each block.

    Attributes:
        views: the operands by operation; none if the group is not needed.
        column, contracted: their labels.
        blocks: of 64 columns, of each operand.
        depth: elements of the contracted label in a box.
        slots: number of copies of all boxes: the stages of the ring, or one.
        width: columns of a box; with fewer than 64 the instruction reads on behind them, and the
            results of those extra columns are not used.
    """

    views: dict[int, View]
    column: str
    contracted: str
    blocks: int
    depth: int
    slots: int
    width: int = COLUMN_BLOCK

    @property
    def boxes(self) -> int:
        """Number of boxes in one slot."""
        return len(self.views) * self.blocks

    @property
    def column_major(self) -> bool:
        """True if the column label is the contiguous one (weights stored (K, N))."""
        return next(iter(self.views.values())).stride(self.column) == 1

    def product(
        self,
        cores: Products,
        dtype: Any,
        rows: int,
        turned: bool = False,
        registers: bool = False,
        double: bool = False,
    ) -> Product:
        """The product with ``rows`` as its N extent.
        See `MatmulPlan.turned` and ``doubles``; ``registers``: consumers bring the columns."""
        along = registers or not self.column_major
        return cores.product(dtype, rows, (along, not turned), registers, double)

    def layout(self, dtype: Any, boxes: int) -> cute.ComposedLayout:
        """Layout of some boxes ``[width, depth, box]`` in shared memory, swizzled."""
        if self.width == COLUMN_BLOCK:
            return operand_layout(dtype, (self.width, self.depth), boxes, not self.column_major)
        return self._narrow(dtype, self.width, boxes)

    def read_layout(self, dtype: Any, boxes: int) -> cute.ComposedLayout:
        """Layout of the same memory as the tensor cores read it, ``[64, depth, box]``."""
        if self.width == COLUMN_BLOCK:
            return self.layout(dtype, boxes)
        return self._narrow(dtype, COLUMN_BLOCK, boxes)

    def double_layout(self, dtype: Any, boxes: int) -> cute.ComposedLayout:
        """Layout of the same memory, ``[16, 2, 4, depth, two boxes]``.
        16 columns of one block and 16 of the next take turns."""
        one = operand_layout(dtype, (2 * self.width, self.depth), 1, True)
        strides = self.depth * 16, self.depth * 32, 1, self.depth * 2 * self.width
        layout = cute.make_layout((16, 2, 4, self.depth, boxes // 2), stride=(self.depth, *strides))
        return cute.make_composed_layout(one.inner, 0, layout)

    def doubled(self, memory: cute.Tensor, dtype: Any) -> cute.Tensor:
        """Some boxes as an instruction reads two of them, ``[128, depth, two boxes]``."""
        boxes = cute.size(memory, mode=[2])
        layout = operand_layout(dtype, (2 * self.width, self.depth), boxes // 2, True)
        return cute.make_tensor(memory.iterator, layout.outer)

    def _narrow(self, dtype: Any, columns: int, boxes: int) -> cute.ComposedLayout:
        """Boxes of ``width`` columns one after the other, seen ``columns`` wide."""
        w, k = self.width, self.depth
        if self.column_major:
            # rows of `width` columns, swizzled over 8 of them: 32 bytes for 16 columns
            shape = ((w, columns // w), (8, k // 8), boxes)
            stride = ((1, w * k), (w, 8 * w), w * k)
        else:
            shape = ((8, columns // 8), (64, k // 64), boxes)
            stride = ((64, 512), (1, 64 * w), w * k)
        inner = swizzle(
            dtype, w * dtype.width // 8 if self.column_major else 128, not self.column_major
        )
        return cute.make_composed_layout(inner, 0, cute.make_layout(shape, stride=stride))


def column_groups(plan: MatmulPlan) -> tuple[ColumnGroup, list[ColumnGroup], list[ColumnGroup]]:
    """The groups of the columns, of the hidden labels, and of the products after the loop."""
    _, n, k = plan.tile
    stages, hidden = plan.schedule.stages, plan.hidden
    inner = [
        ColumnGroup({load: hidden[load] for load, _ in t.products}, t.hidden, plan.contracted,
                    t.blocks, k, stages, min(COLUMN_BLOCK, t.width(plan.narrow)))
        for t in plan.tails
    ]  # fmt: skip
    after = [
        ColumnGroup({t.load: t.view}, plan.column, t.hidden, n // COLUMN_BLOCK, t.padded, 1)
        for t in plan.tails
    ]
    main = ColumnGroup(plan.columns, plan.column, plan.contracted, n // COLUMN_BLOCK, k, stages)
    return main, inner, after
