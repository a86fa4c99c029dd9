"""Prefetch into L2 of the tensors that the epilogue loads, before the mainloop.
Biases, residuals, the indices by which rows are put.

While weights stream, a load from memory waits 2 to 5 us in the queue; after the loop nothing hides
that. Only L2 is filled, which all writers share, so the prefetch is also correct for tensors that
the preceding kernel has not finished yet.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutesuper.skeletons.base import Indexed, View
from cutesuper.skeletons.kernel.arguments import dtype_of
from cutesuper.skeletons.matmul.kernel.context import Here, Known, Tile

LINE_BITS = 1024


class Prefetch:
    """The epilogue's loads of a tile, except those done by TMA."""

    def __init__(self, known: Known) -> None:
        self.k = known
        plan = known.plan
        bulk = [t.source.leaves[0] for t in plan.tails if plan.loaded(t) is not None]
        self.views = [v for op, v in plan.loads.items() if op not in bulk]
        put = [o.view for o in plan.outputs if isinstance(o.view, Indexed)]
        self.views += [named.index for view in put for named in view.named]

    @cute.jit
    def run(self, here):
        """Prefetch all lines of this block's tile; thread i takes every n-th line."""
        for view in self.views:
            self.lines_of(view, here)

    @cute.jit
    def lines_of(self, view: cutlass.Constexpr, here):
        """Prefetch the lines of one tensor along its contiguous label.
        For each index of the other one."""
        k = self.k
        along = next((d for d in self.inner(view) if view.stride(d) == 1), None)
        across = next((d for d in self.inner(view) if d != along), None)
        width = LINE_BITS // dtype_of(k.plan, view).width
        pieces = -(-self.count(along) // width)
        base = k.batch_offset(view, here)
        for item in cutlass.range(
            here.thread, pieces * self.count(across), 32 * k.consumers, unroll=1
        ):
            inner = self.start(along, here.tile) + (item % pieces) * width
            outer = self.start(across, here.tile) + item // pieces
            if inner < self.extent(along, here) and outer < self.extent(across, here):
                offset = base + inner
                if cutlass.const_expr(across is not None):
                    offset = offset + k.along(view, across, outer, here)
                pointer = here.tensors[view.argument].iterator + offset
                cute.arch.prefetch(pointer.llvm_ptr, cache_level="L2")

    def inner(self, view: View) -> list[str]:
        """Labels of a view other than batch labels."""
        return [d for d in view.labels if d not in self.k.plan.batch]

    def count(self, label: str | None) -> int:
        """Elements of a label in a tile."""
        return 1 if label is None else self.k.plan.program.tile[label]

    def start(self, label: str | None, tile: Tile) -> Any:
        """Start of the tile along a label; labels between two products are whole."""
        plan = self.k.plan
        if label == plan.row:
            return tile.row * self.k.m
        return tile.column * self.k.n if label == plan.column else 0

    def extent(self, label: str | None, here: Here) -> Any:
        """The end of a label."""
        return 1 if label is None else self.k.extents.of(label, here.tensors)
