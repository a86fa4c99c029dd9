"""The schedule (knobs) of an attention-loop kernel, and its default values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.attention.settings import SETTINGS
from cutesuper.skeletons.schedule import Schedule, Values
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.skeletons.attention.plan import AttentionPlan


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
        together: two warpgroups along the rows multiply with one instruction, of 128 rows, and wait
            for each other. Where such instructions run at a higher rate (`Target.doubled`), it is
            what planning chooses; not measured.
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
    together: bool = False
    resident: int = 1
    stream_keys: bool = True

    def settled(self, old: AttentionSchedule, knob: str) -> AttentionSchedule:
        """The schedule, adjusted to blocks that share an SM, and to whole rounds of stages.
        Two blocks share an SM if each has one consumer warpgroup and half the ring; warpgroups
        along the keys take whole rounds of stages."""
        if knob == "resident" and self.resident == 2:
            return replace(self, key_groups=1, stages=max(1, min(self.stages // 2, 2)))
        return replace(self, stages=self.stages // self.key_groups * self.key_groups)


def scheduled(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with its default schedule of two warpgroups.
    They lie along the rows if these are over 64, else along the keys."""
    row_groups = plan.row_blocks
    key_groups = 2 if row_groups == 1 and plan.loop > 1 else 1
    rows, values = plan.block_rows, bool(plan.key_values)
    overlapped = SETTINGS.choose(target, "overlap", rows=rows, values=values)["overlapped"]
    schedule = replace(
        plan.schedule,
        row_groups=row_groups,
        key_groups=key_groups,
        overlapped=bool(overlapped) and plan.loop > key_groups,
        together=row_groups == 2 and target.doubled > 1,
        stream_keys=bool(SETTINGS.choose(target, "stream", rows=rows)["streamed"]),
    )
    plan = replace(plan, schedule=schedule)
    return _sharing(plan, target) or _with_stages(plan, target)


def _sharing(plan: AttentionPlan, target: Target) -> AttentionPlan | None:
    """The plan with blocks of one consumer warpgroup that share an SM.
    None if they had better not, or there is no room."""
    found = SETTINGS.choose(
        target, "resident", rows=plan.block_rows, depth=plan.depth, cluster=plan.cluster,
        waves=ceil_div(plan.program.blocks(), target.sms),
    )  # fmt: skip
    blocks, stages = found["blocks"], found["stages"]
    if blocks == 1:
        return None
    knobs = replace(plan.schedule, key_groups=1, stages=stages, resident=blocks)
    shared = replace(plan, schedule=knobs)
    return shared if shared.shared_bytes <= room(target, blocks) else None


def room(target: Target, resident: int) -> int:
    """Shared memory of a block of which ``resident`` share an SM."""
    return min(target.shared_bytes, target.sm_shared_bytes // resident - target.reserved_bytes)


def _with_stages(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with the stages that there is room for."""
    groups = plan.schedule.key_groups
    most = min(max(2, plan.loop), SETTINGS.choose(target, "ring")["stages"])
    stages = min((target.shared_bytes - plan.fixed_bytes) // plan.slot_bytes, most)
    if groups > 1 and stages < groups:
        return _with_stages(replace(plan, schedule=replace(plan.schedule, key_groups=1)), target)
    stages = max(1, stages // groups * groups)
    return replace(plan, schedule=replace(plan.schedule, stages=stages))
