"""Clusters whose blocks load their row tile together (TMA multicast).

The blocks of a cluster are neighbours along the columns and need the same row tile. Each loads its
part of the rows for all of them, and the full barrier of each counts the bytes of all parts. A slot
may be written again once all blocks have read it, so every reader signals all blocks.

Two blocks whose products are `joint` keep their parts: one instruction reads those of both. Each
fills and empties its own ring.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from cutesuper.device.cluster import leave_together, rank_in_cluster
from cutesuper.skeletons.matmul.plan import MatmulPlan


class Sharing:
    """Division of the row loads among the blocks of a cluster."""

    def __init__(self, plan: MatmulPlan) -> None:
        self.blocks = plan.schedule.share_rows
        self.active = self.blocks > 1
        self.joint = plan.schedule.joint
        #: blocks whose parts a block has in its shared memory, and that wait for its readers
        self.parts = 1 if self.joint else self.blocks
        #: rows of a row tile that one block loads, and whose statistics it reduces
        self.rows = plan.tile[0] // self.blocks

    def rank(self) -> Any:
        """Rank of this block in its cluster, uniform in a warp: its position along the columns."""
        return rank_in_cluster() if self.active else Int32(0)

    def mask(self) -> Any:
        """Bit mask of the ranks that receive this block's part of the row tile.
        None if only this block does."""
        return Int16((1 << self.parts) - 1) if self.parts > 1 else None

    def first_held(self, first: Any) -> Any:
        """Place in this block's shared memory of ``first``, the row that its part begins with."""
        return Int32(0) if self.joint else first

    @cute.jit
    def leave(self):
        """Wait for the blocks that share rows, at the end."""
        if cutlass.const_expr(self.active):
            leave_together()
