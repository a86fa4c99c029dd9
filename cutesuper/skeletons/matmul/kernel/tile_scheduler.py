"""Assignment of tiles to blocks: one each, every n-th of a sequence, or the next one.
Persistent blocks take every n-th; the next one is one that no block has.

The sequence goes through groups of row tiles (`MatmulPlan.group`) column by column, every second
group backwards, so that the tiles of one moment need few rows and columns, and the next ones find
some of them in L2. Runs of neighbouring tiles along the columns read what row tiles share at
different times: three tiles of 128x128 a block took 108 us at 384x4096x14336, 34 each; such tiles
take 28 where the same columns are read at the same time (512x4096x4096).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.handout import Handout
from cutesuper.skeletons.matmul.kernel.context import Known, Tile
from cutesuper.skeletons.matmul.kernel.multicast import Sharing


@dataclass(frozen=True)
class Step:
    """A step of a block's walk.

    Attributes:
        index: in the sequence of tiles.
        first: index of the block's first step.
        before: index of the step before, where tiles are handed out; anything in the first step.
        turn: number of steps before it, where tiles are handed out.
    """

    index: Any
    first: Any
    before: Any = None
    turn: Any = None


#: what a role does in a step with what it carries along; returns that for the next step
Visit = Callable[[Step, Any], Any]


class Walk:
    """The tiles of a block."""

    def __init__(self, known: Known, sharing: Sharing) -> None:
        self.k, self.sharing = known, sharing
        s = known.plan.schedule
        self.persistent = s.persistent > 0
        self.hands_out = s.hand_out
        self.clusters = s.persistent // s.share_rows

    def columns(self) -> int:
        """Number of steps along the columns; each covers a cluster's tiles."""
        return sum(self.k.plan.section_tiles) // self.sharing.blocks

    def section(self, column: Any) -> tuple[Any, Any]:
        """Index in `MatmulPlan.sections` of the ``column``-th tile, and its place there."""
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

    def allocate(self, alloc: cutlass.memory.SmemAllocator) -> Handout | None:
        """Allocate the answers that all warps of a block read; None if tiles are not handed out."""
        warps = self.k.producer + 1 + self.k.plan.schedule.issuer
        return Handout.allocate(alloc, warps, self.sharing.blocks) if self.hands_out else None

    @cute.jit
    def each(self, here, visit: cutlass.Constexpr[Visit], carried, asks: cutlass.Constexpr = False):
        """Walk over the tiles of this block, in every warp of it; one of them ``asks`` for tiles.
        Returns what the last step has left."""
        if cutlass.const_expr(self.hands_out):
            carried = self.take(here, visit, carried, asks)
        else:
            first, end = self.run(here.tensors)
            for step in cutlass.range(first, end, self.clusters, unroll=1):
                carried = visit(Step(step, first), carried)
        return carried

    @cute.jit
    def take(self, here, visit: cutlass.Constexpr[Visit], carried, asks: cutlass.Constexpr):
        """Begin with the tile of this block's index, and go on with those that are handed out.
        The next one is asked for before the tile is loaded."""
        handout = here.memory.handout
        bx, _, _ = cute.arch.block_idx()
        first = bx // self.sharing.blocks
        step, before, turn = first, first, Int32(0)
        at, more = handout.ring.first(), Int32(1)
        while more == 1:
            if cutlass.const_expr(asks):
                handout.ask(at)
            carried = visit(Step(step, first, before, turn), carried)
            more, block = handout.answer(at, here.lane)
            step, before = block // self.sharing.blocks, step
            turn, at = turn + 1, handout.ring.next(at)
        return carried

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
        row, column, part = self.place(step.index, tensors)
        section, column = self.section(column * self.sharing.blocks + self.sharing.rank())
        k, turn = self.k, step.index // self.clusters if step.turn is None else step.turn
        batch = k.batch_index(part, tensors)
        return Tile(row, column, Int32(0), batch, k.iterations(tensors), turn, section)

    @cute.jit
    def fresh(self, step, tensors):
        """True if the tile of a step has other rows than the tile before it in this block."""
        row, _, part = self.place(step.index, tensors)
        last = step.index - self.clusters if step.before is None else step.before
        before, _, other = self.place(last, tensors)
        return step.index == step.first or row != before or part != other
