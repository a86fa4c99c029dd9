"""The plan of a block program, made by the first skeleton that runs it."""

from __future__ import annotations

from typing import Any

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.legality import (
    refuse_further_walks,
    refuse_many_blocks,
    refuse_products,
    refuse_shared_dims,
)
from cutesuper.skeletons.registry import SKELETONS
from cutesuper.skeletons.schedule import Schedule
from cutesuper.targets import Target

KernelPlan = Plan[Any]


def make_plan(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: Schedule | None = None,
    dependent_launch: bool = False,
) -> KernelPlan:
    """Plan one kernel of a muGraph.

    Args:
        step: the kernel.
        tensors: the muGraph's tensors by name, as `cutesuper.ir.unseen.followed` gives them.
        target: the GPU.
        schedule: the schedule to use; None chooses one.
        dependent_launch: for a chosen schedule: launch before the predecessor ends.

    Raises:
        LoweringError: no skeleton runs this program.
        ScheduleError: the kernel does not fit the target, or the schedule is another skeleton's.
        GraphError: the program is illegal.
    """
    refuse_further_walks(step)
    refuse_shared_dims(step)
    refuse_products(step, target)
    refuse_many_blocks(step)
    skeleton = _skeleton_for(step)
    if schedule is not None and not isinstance(schedule, skeleton.schedules):
        names = " or ".join(s.__name__ for s in skeleton.schedules)
        raise ScheduleError(
            f"kernel {step.name}: {skeleton.name} takes {names}, not {type(schedule).__name__}"
        )
    return skeleton.plan(step, Setting(target, tensors, dependent_launch), schedule)


def _skeleton_for(step: KernelStep) -> Skeleton:
    for skeleton in SKELETONS:
        if skeleton.runs(step):
            return skeleton
    raise LoweringError(f"kernel {step.name}: no skeleton runs it")
