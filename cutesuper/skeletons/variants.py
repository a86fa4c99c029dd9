"""Schedules worth timing beside the default one: each differs from it in one knob.

A knob is a line in `KNOBS`: its name, and the values to try given the schedule they start from,
likeliest first. Knobs that are true or false need no line; they are turned over. What `make_plan`
or `check_schedule` refuses is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.skeletons.rows.loop_plan import RowLoopPlan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.skeletons.schedule import (
    AttentionSchedule,
    MatmulSchedule,
    RowLoopSchedule,
    RowSchedule,
    Schedule,
)
from cutesuper.targets import Target

Values = Callable[[Any], Iterable[int]]
KNOBS: dict[type[Schedule], dict[str, Values]] = {
    MatmulSchedule: {
        "stages": lambda s: (s.stages - 1, s.stages + 1, s.stages - 2, s.stages + 2),
        "warpgroups": lambda s: (3 - s.warpgroups,),
        "head": lambda s: (s.head - 2, s.head + 2),
        "share_rows": lambda s: (3 - s.share_rows,),
        "persistent": lambda s: (0,) if s.persistent else (),
        "helpers": lambda s: (6 - s.helpers,),
    },
    RowSchedule: {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "rows": lambda s: (s.rows * 2, s.rows // 2),
        "vector": lambda s: (s.vector // 2,),
        "chunks": lambda s: (s.chunks // 2,),
    },
    RowLoopSchedule: {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "vector": lambda s: (),
        "chunks": lambda s: (),
        "groups": lambda s: (s.groups * 2, s.groups // 2),
        "depth": lambda s: (s.depth * 2, s.depth // 2),
        "stages": lambda s: (s.stages + 1, s.stages - 1) if s.stages else (),
        "blocks": lambda s: (s.blocks * 2, s.blocks // 2),
        "resident": lambda s: (s.resident % 3 + 1, (s.resident + 1) % 3 + 1),
    },
    AttentionSchedule: {
        "stages": lambda s: (s.stages - s.key_groups, s.stages + s.key_groups),
        "row_groups": lambda s: (),
        "key_groups": lambda s: (3 - s.key_groups,),
        "resident": lambda s: (3 - s.resident,),
    },
}
#: set by whoever asks for the kernel, or by how its tensors lie in memory
FIXED = ("dependent_launch", "interleaved")


def variants(
    step: KernelStep, tensors: dict[str, TensorSpec], target: Target, default: KernelPlan
) -> tuple[KernelPlan, ...]:
    """The default plan, then the legal plans that differ from it in one knob.

    before: ``stages=6 head=4``; after: that, ``stages=5``, ``warpgroups=2``, ``head=2``, ...,
    ``stages=7``, ...: the first value of every knob comes before the second of any.
    """
    found = [default]
    for schedule in neighbours(default.schedule):
        try:
            plan = _planned(step, tensors, target, schedule, default)
        except (ScheduleError, LoweringError):
            continue
        if plan.key not in {p.key for p in found}:
            found.append(plan)
    return tuple(found)


def planned(
    step: KernelStep, tensors: dict[str, TensorSpec], target: Target, schedule: Schedule
) -> KernelPlan:
    """A plan with a schedule that comes from outside.

    Raises:
        LoweringError, ScheduleError: as `make_plan`, and for knobs that no kernel can run with.
    """
    default = make_plan(step, tensors, target, dependent_launch=schedule.dependent_launch)
    return _planned(step, tensors, target, schedule, default)


def _planned(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: Schedule,
    default: KernelPlan,
) -> KernelPlan:
    check_schedule(schedule, default, step.name)
    return make_plan(step, tensors, target, schedule)


def neighbours(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that differ in one knob, legal or not; the first value of every knob first."""
    columns = [[(f.name, v) for v in _values(schedule, f.name)] for f in fields(schedule)]
    for i in range(max(map(len, columns))):
        for name, value in (column[i] for column in columns if i < len(column)):
            yield _settled(schedule, replace(schedule, **{name: value}), name)


def changed(schedule: Schedule, default: Schedule) -> str:
    """The knobs in which a schedule differs from another: ``stages=5 head=2``."""
    names = [f.name for f in fields(schedule)]
    values = [(n, getattr(schedule, n), getattr(default, n)) for n in names]
    return " ".join(f"{n}={_show(value)}" for n, value, other in values if value != other)


def _show(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _values(schedule: Schedule, name: str) -> Iterable[Any]:
    now = getattr(schedule, name)
    if name in FIXED:
        return ()
    if isinstance(now, bool):
        return (not now,)
    return [v for v in KNOBS[type(schedule)][name](schedule) if v >= 0]


def _settled(old: Schedule, new: Schedule, knob: str) -> Schedule:
    """What follows from a changed knob: rows of other lanes or vectors still cover their width, and
    no more stages are filled ahead than there are."""
    if isinstance(new, MatmulSchedule):
        return replace(new, head=min(new.head, new.stages)) if knob == "stages" else new
    if isinstance(new, AttentionSchedule):
        return _settled_attention(new, knob)
    if isinstance(new, RowLoopSchedule) and isinstance(old, RowLoopSchedule):
        return _settled_row_loop(old, new, knob)
    if isinstance(old, RowSchedule) and knob in ("lanes", "vector") and new.lanes and new.vector:
        width = old.lanes * old.vector * old.chunks
        return replace(new, chunks=ceil_div(width, new.lanes * new.vector))
    return new


def _settled_row_loop(
    old: RowLoopSchedule, new: RowLoopSchedule, knob: str
) -> RowLoopSchedule:
    """Lanes cover as much of a row, and a tile keeps its threads and rows: with more lanes, or
    fewer threads, a group takes more of them. Slices are read without a ring; what meets has one.
    """
    if knob == "lanes" and new.lanes:
        groups = max(1, old.lanes * old.groups // new.lanes)
        width, rows = old.lanes * old.vector * old.chunks, old.groups * old.depth
        chunks = ceil_div(width, new.lanes * new.vector)
        return replace(new, chunks=chunks, groups=groups, depth=max(1, rows // groups))
    if knob == "groups" and new.groups:
        return replace(new, depth=max(1, old.groups * old.depth // new.groups))
    if knob == "sliced":
        return replace(new, stages=0 if new.sliced else 2, kept=True)
    return new


def _settled_attention(new: AttentionSchedule, knob: str) -> AttentionSchedule:
    """Two blocks share an SM if each has one consumer warpgroup and half the ring; warpgroups along
    the keys take whole rounds of stages."""
    if knob == "resident" and new.resident == 2:
        return replace(new, key_groups=1, stages=max(1, min(new.stages // 2, 2)))
    return replace(new, stages=new.stages // new.key_groups * new.key_groups)


# ------------------------------------------------------------------------------------ legality


def check_schedule(schedule: Schedule, default: KernelPlan, name: str) -> None:
    """Refuse knobs that `make_plan` takes as they are, because it only ever chose them itself.

    Args:
        schedule: the knobs in question.
        default: the kernel with the knobs that `make_plan` chooses.
        name: of the kernel, for the message.

    Raises:
        ScheduleError: says which knob.
    """
    if isinstance(default, MatmulPlan) and isinstance(schedule, MatmulSchedule):
        why = _matmul_mistake(schedule)
    elif isinstance(default, RowPlan) and isinstance(schedule, RowSchedule):
        why = _row_mistake(schedule, default.schedule)
    elif isinstance(default, RowLoopPlan) and isinstance(schedule, RowLoopSchedule):
        why = _row_loop_mistake(schedule, default)
    elif isinstance(default, AttentionPlan) and isinstance(schedule, AttentionSchedule):
        why = ""  # `make_plan` takes no knob as it is
    else:
        why = "it is of another skeleton"
    if why:
        raise ScheduleError(f"kernel {name}: schedule {schedule}: {why}")


def _matmul_mistake(s: MatmulSchedule) -> str:
    if s.warpgroups not in (1, 2):
        return "there are one or two consumer warpgroups"
    if s.head > s.stages:
        return f"{s.head} of {s.stages} stages cannot be filled ahead"
    return ""


def _row_mistake(s: RowSchedule, default: RowSchedule) -> str:
    if any(n < 1 or n & (n - 1) for n in (s.lanes, s.vector, s.rows)) or s.chunks < 1:
        return "lanes, vector and rows must be powers of two, chunks at least 1"
    if s.lanes * s.rows % 32:
        return f"{s.lanes * s.rows} threads are no whole warps"
    if s.interleaved != default.interleaved:
        return "interleaved is decided by how the tensors lie in memory"
    if default.vector % s.vector:
        return f"the tensors are not aligned for accesses of {s.vector} elements"
    if s.interleaved and (s.lanes, s.vector) != (default.lanes, default.vector):
        return "interleaved rows keep their lanes and vectors"
    return ""


def _row_loop_mistake(s: RowLoopSchedule, default: RowLoopPlan) -> str:
    fixed = default.sums and not s.sliced and not default.schedule.sliced
    if fixed and s.blocks != default.schedule.blocks:
        return f"the program says that {default.schedule.blocks} blocks walk over the rows"
    return ""
