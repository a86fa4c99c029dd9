"""Schedules worth timing beside the default one: each differs from it in one knob.

The values to try are given by the schedules (`schedule.Schedule.knobs`); schedules that planning or
`schedule.Schedule.mistake` refuses are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.skeletons.schedule import Schedule
from cutesuper.targets import Target


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
    """Plan a kernel with a given schedule.

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
    """Plan a kernel, unless `make_plan` does not check a knob because it only ever chose it."""
    same = type(schedule) is type(default.schedule)
    why = schedule.mistake(default) if same else "it is of another skeleton"
    if why:
        raise ScheduleError(f"kernel {step.name}: schedule {schedule}: {why}")
    return make_plan(step, tensors, target, schedule)


def neighbours(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that differ in one knob, legal or not; the first value of every knob first."""
    columns = [[(f.name, v) for v in _values(schedule, f.name)] for f in fields(schedule)]
    for i in range(max(map(len, columns))):
        for name, value in (column[i] for column in columns if i < len(column)):
            yield replace(schedule, **{name: value}).settled(schedule, name)


def changed(schedule: Schedule, default: Schedule) -> str:
    """The knobs in which a schedule differs from another: ``stages=5 head=2``."""
    names = [f.name for f in fields(schedule)]
    values = [(n, getattr(schedule, n), getattr(default, n)) for n in names]
    return " ".join(f"{n}={_show(value)}" for n, value, other in values if value != other)


def _show(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _values(schedule: Schedule, name: str) -> Iterable[Any]:
    now = getattr(schedule, name)
    if name in schedule.fixed:
        return ()
    if isinstance(now, bool):
        return (not now,)
    return [v for v in schedule.knobs[name](schedule) if v >= 0]
