"""Assignment of tiles to blocks: one tile each, or a run of tiles (persistent blocks).

Persistent blocks take neighbouring tiles along the columns, so that most of them need the same rows
as the tile before, whose statistics are known. Groups of 8 row tiles that are walked column by
column need fewer tiles at a time, but took as long: 218.8 us at 4096x4096x4096, runs 216.6.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutesuper.skeletons.matmul.kernel.context import Known, Tile
from cutesuper.skeletons.matmul.kernel.multicast import Sharing


class Walk:
    """The tiles of a block."""

    def __init__(self, known: Known, sharing: Sharing) -> None:
        self.k, self.sharing = known, sharing
        s = known.plan.schedule
        self.persistent = s.persistent > 0
        self.clusters = s.persistent // s.share_rows

    def columns(self, tensors: list[cute.Tensor]) -> Any:
        """Number of steps along the columns; each covers a cluster's tiles."""
        k = self.k
        return cute.ceil_div(k.extents.of(k.plan.column, tensors), k.n * self.sharing.blocks)

    def rows(self, tensors: list[cute.Tensor]) -> Any:
        """Number of row tiles."""
        return cute.ceil_div(self.k.extents.of(self.k.plan.row, tensors), self.k.m)

    @cute.jit
    def run(self, tensors):
        """Range of steps of this block's cluster: first, end."""
        k = self.k
        total = Int32(self.columns(tensors) * self.rows(tensors))
        for label in k.plan.batch:
            total = total * k.extents.of(label, tensors)
        length = cute.ceil_div(total, self.clusters)
        bx, _, _ = cute.arch.block_idx()
        first = (bx // self.sharing.blocks) * length
        end = first + length
        return first, end if end < total else total

    def tile(self, step: Any, tensors: list[cute.Tensor]) -> Tile:
        """The tile of one step."""
        columns, rows = self.columns(tensors), self.rows(tensors)
        column = (step % columns) * self.sharing.blocks + self.sharing.rank()
        batch = self.k.batch_index(step // (columns * rows), tensors)
        return Tile(step // columns % rows, column, Int32(0), batch)

    @cute.jit
    def fresh(self, step, first, tensors):
        """True if the tile of a step has other rows than the tile before it in this run."""
        return step == first or step % self.columns(tensors) == 0
