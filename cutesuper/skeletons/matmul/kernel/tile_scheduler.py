"""Assignment of tiles to blocks: one tile each, or every n-th of a sequence (persistent blocks).

The sequence goes through groups of row tiles (`MatmulPlan.group`) column by column, every second
group backwards, so that the tiles of one moment need few rows and columns, and the next ones find
some of them in L2. Runs of neighbouring tiles along the columns read what row tiles share at
different times: three tiles of 128x128 a block took 108 us at 384x4096x14336, 34 each; such tiles
take 28 where the same columns are read at the same time (512x4096x4096).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.skeletons.matmul.kernel.context import Known, Tile
from cutesuper.skeletons.matmul.kernel.multicast import Sharing


class Walk:
    """The tiles of a block."""

    def __init__(self, known: Known, sharing: Sharing) -> None:
        self.k, self.sharing = known, sharing
        s = known.plan.schedule
        self.persistent = s.persistent > 0
        self.clusters = s.persistent // s.share_rows

    def columns(self) -> int:
        """Number of steps along the columns; each covers a cluster's tiles."""
        return sum(self.k.plan.section_tiles) // self.sharing.blocks

    def section(self, column: Any) -> tuple[Any, Any]:
        """Index in `MatmulPlan.sections`, and the tile among its columns, of the ``column``-th tile
        of all."""
        section, own, start = 0, column, 0
        for n, tiles in enumerate(self.k.plan.section_tiles[:-1]):
            start += tiles
            beyond = column >= start
            section = select_(beyond, Int32(n + 1), Int32(section))
            own = select_(beyond, column - start, own)
        return section, own

    def rows(self, tensors: list[cute.Tensor]) -> Any:
        """Number of row tiles."""
        return cute.ceil_div(self.k.extents.of(self.k.plan.row, tensors), self.k.m)

    @cute.jit
    def run(self, tensors):
        """First step of this block's cluster, and end; the steps are `clusters` apart."""
        k = self.k
        total = Int32(self.columns() * self.rows(tensors))
        for label in k.plan.batch:
            total = total * k.extents.of(label, tensors)
        bx, _, _ = cute.arch.block_idx()
        return bx // self.sharing.blocks, total

    @cute.jit
    def place(self, step, tensors):
        """Row tile, column step and slice of the batch of one step."""
        columns, rows = self.columns(), self.rows(tensors)
        of_group = self.k.plan.group * columns
        inside = step % (columns * rows)
        group = inside // of_group
        first = group * self.k.plan.group
        height = rows - first
        if height > self.k.plan.group:
            height = Int32(self.k.plan.group)
        within = inside - group * of_group
        column = within // height
        if group % 2 == 1:
            column = columns - 1 - column
        return first + within % height, column, step // (columns * rows)

    @cute.jit
    def tile(self, step, tensors):
        """The tile of one step."""
        row, column, part = self.place(step, tensors)
        section, column = self.section(column * self.sharing.blocks + self.sharing.rank())
        k, turn = self.k, step // self.clusters
        batch = k.batch_index(part, tensors)
        return Tile(row, column, Int32(0), batch, k.iterations(tensors), turn, section)

    @cute.jit
    def fresh(self, step, first, tensors):
        """True if the tile of a step has other rows than the tile before it in this block."""
        row, _, part = self.place(step, tensors)
        before, _, other = self.place(step - self.clusters, tensors)
        return step == first or row != before or part != other
