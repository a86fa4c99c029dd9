"""The schedule (knobs) of an attention loop with plain sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutesuper.skeletons.schedule import Schedule, Values


@dataclass(frozen=True)
class SumsSchedule(Schedule):
    """Knobs of an attention loop with plain sums.

    Attributes:
        stages: slots of the ring, each for a tile of everything that streams by.
        row_groups: consumer warpgroups along the rows, 64 rows each.
        overlapped: multiply the next tile's scores before this tile's sums, so that the work
            between them is done during a product.
    """

    kind: ClassVar[str] = "attention sums"
    knobs: ClassVar[dict[str, Values]] = {
        "stages": lambda s: (s.stages - 1, s.stages + 1),
        "row_groups": lambda s: (3 - s.row_groups,),
    }

    stages: int
    row_groups: int = 2
    overlapped: bool = True
