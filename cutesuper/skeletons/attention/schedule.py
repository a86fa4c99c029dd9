"""The schedule (knobs) of an attention-loop kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cutesuper.skeletons.schedule import Schedule, Values


@dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """Knobs of an attention-loop kernel.

    Attributes:
        stages: slots of the ring, each for a tile of keys and one of values.
        row_groups: consumer warpgroups along the rows, 64 rows each.
        key_groups: consumer warpgroups along the keys: they take stages in turn, so that one
            computes exponentials while the other one multiplies.
        overlapped: multiply the next tile's rows and keys before this tile's values, so that
            exponentials are computed during a product.
        resident: blocks that share an SM.
        stream_keys: read keys and values with the evict-first hint.
    """

    kind: ClassVar[str] = "attention"
    knobs: ClassVar[dict[str, Values]] = {
        "stages": lambda s: (s.stages - s.key_groups, s.stages + s.key_groups),
        "row_groups": lambda s: (),
        "key_groups": lambda s: (3 - s.key_groups,),
        "resident": lambda s: (3 - s.resident,),
    }

    stages: int
    row_groups: int = 1
    key_groups: int = 2
    overlapped: bool = False
    resident: int = 1
    stream_keys: bool = True

    def settled(self, old: AttentionSchedule, knob: str) -> AttentionSchedule:
        """This schedule, adjusted: two blocks share an SM if each has one consumer warpgroup and
        half the ring; warpgroups along the keys take whole rounds of stages."""
        if knob == "resident" and self.resident == 2:
            return replace(self, key_groups=1, stages=max(1, min(self.stages // 2, 2)))
        return replace(self, stages=self.stages // self.key_groups * self.key_groups)
