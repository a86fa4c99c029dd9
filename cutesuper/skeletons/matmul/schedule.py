"""The schedule (knobs) of a matmul-loop kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cutesuper.skeletons.schedule import Schedule, Values


@dataclass(frozen=True)
class MatmulSchedule(Schedule):
    """Knobs of a matmul-loop kernel.

    Attributes:
        stages: slots of the shared-memory ring.
        warpgroups: consumer warpgroups; each owns every n-th block of 64 columns.
        head: stages the producer fills before the block's first barrier. On 16x4096x4096 the
            first loads leave 0.2 us earlier with 4 than with 0; more than 6 delays the barrier.
        stream_columns: read the column operands with the evict-first hint: weights are read once
            and should not push activations out of L2 (0.3 us on 16x4096x4096).
        share_rows: neighbouring blocks along the columns that form a cluster and load the row
            tile, which they all need, together: each a part, multicast to all. 209.0 us at
            4096x4096x4096 in pairs of blocks that walk, 215.3 alone. Sharing column tiles along
            the rows took 215.4, and leaves the statistics with every block.
        persistent: blocks that are launched and walk over the tiles; 0 launches a block for each
            tile. At 2048x4096x4096 109.0 us, 118.6 with a block for each tile: loads of the next
            tile hide the epilogue.
        helpers: warps that reduce row statistics or compute the row operand. With 2, the producer
            is in their warpgroup, and 384 threads instead of 512 keep 168 registers each.
        bulk_store: tiles leave through bulk stores of pieces of 32 rows and 64 columns. At
            300x4096x4096 31.1 us, 32.9 through the ring; elsewhere equal. Blocks that walk need
            it, since their ring holds the next tile by then.
    """

    kind: ClassVar[str] = "matmul"
    knobs: ClassVar[dict[str, Values]] = {
        "stages": lambda s: (s.stages - 1, s.stages + 1, s.stages - 2, s.stages + 2),
        "warpgroups": lambda s: (3 - s.warpgroups,),
        "head": lambda s: (s.head - 2, s.head + 2),
        "share_rows": lambda s: (3 - s.share_rows,),
        "persistent": lambda s: (0,) if s.persistent else (),
        "helpers": lambda s: (6 - s.helpers,),
    }

    stages: int
    warpgroups: int = 1
    head: int = 4
    stream_columns: bool = True
    share_rows: int = 1
    persistent: int = 0
    helpers: int = 4
    bulk_store: bool = False

    def settled(self, old: MatmulSchedule, knob: str) -> MatmulSchedule:
        """This schedule, adjusted: the producer fills no more stages ahead than there are."""
        return replace(self, head=min(self.head, self.stages)) if knob == "stages" else self

    def mistake(self, default: Any) -> str:
        """Check warpgroups and stages ahead; planning checks the rest."""
        if self.warpgroups not in (1, 2):
            return "there are one or two consumer warpgroups"
        if self.head > self.stages:
            return f"{self.head} of {self.stages} stages cannot be filled ahead"
        return ""
