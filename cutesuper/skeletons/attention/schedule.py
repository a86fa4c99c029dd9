"""The schedule (knobs) of an attention-loop kernel, and its default values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cutesuper.skeletons.schedule import Schedule, Values
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.skeletons.attention.plan import AttentionPlan

#: rows of a WGMMA instruction that one warp has
WARP_ROWS = 16
#: elements of the inner label up to which two blocks share an SM
SHARED_DEPTH = 128


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


def scheduled(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with its default schedule: two warpgroups, along the rows if these are over 64, else
    along the keys."""
    row_groups = plan.row_blocks
    key_groups = 2 if row_groups == 1 and plan.loop > 1 else 1
    few = plan.block_rows <= WARP_ROWS
    schedule = replace(
        plan.schedule,
        row_groups=row_groups,
        key_groups=key_groups,
        # 6.6 -> 6.4 us even with two tiles for each warpgroup (256x4096 keys in clusters of 8);
        # with few rows it only costs registers, and with values of keys it gains nothing
        overlapped=not few and plan.loop > key_groups and not plan.key_values,
        # 8.8 -> 8.35 us at 1x4096 keys; if many rows share keys these come from L2 anyway
        stream_keys=few,
    )
    if few and plan.cluster == 1 and plan.program.blocks() > target.sms:
        # with one consumer warpgroup and 2 stages two blocks share an SM: 120.8 us at 32x4096
        # keys, 121.3 with one block of two warpgroups
        half = replace(plan, schedule=replace(schedule, key_groups=1, stages=2, resident=2))
        if half.shared_bytes <= room(target, 2) and plan.depth <= SHARED_DEPTH:
            return half
    return _with_stages(replace(plan, schedule=schedule), target)


def room(target: Target, resident: int) -> int:
    """Shared memory of a block of which ``resident`` share an SM."""
    return min(target.shared_bytes, target.sm_shared_bytes // resident - target.reserved_bytes)


def _with_stages(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with the stages that there is room for."""
    groups = plan.schedule.key_groups
    # 4 stages keep 128 KB in flight at 128 columns: 33.1 us at 8x4096, 33.3 with 6
    stages = min((target.shared_bytes - plan.fixed_bytes) // plan.slot_bytes, max(2, plan.loop), 4)
    if groups > 1 and stages < groups:
        return _with_stages(replace(plan, schedule=replace(plan.schedule, key_groups=1)), target)
    stages = max(1, stages // groups * groups)
    return replace(plan, schedule=replace(plan.schedule, stages=stages))
