"""Which skeleton runs a block program."""

from __future__ import annotations

from cutesuper.errors import ScheduleError
from cutesuper.graph.block import KernelStep, TensorSpec
from cutesuper.graph.target import Target
from cutesuper.schedule.matmul import MatmulPlan, plan_matmul
from cutesuper.schedule.rows import RowPlan, plan_rows
from cutesuper.schedule.schedule import MatmulSchedule, RowSchedule, Schedule

KernelPlan = MatmulPlan | RowPlan


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
        tensors: the muGraph's tensors by name.
        target: the GPU.
        schedule: knobs to use; None chooses them.
        dependent_launch: for a chosen schedule: launch before the predecessor has ended.

    Raises:
        LoweringError: no skeleton runs this program.
        ScheduleError: it does not fit the target, or the schedule is of the other skeleton.
    """
    if any(op.kind == "matmul" for op in step.program.ops):
        if schedule is not None and not isinstance(schedule, MatmulSchedule):
            raise ScheduleError(f"kernel {step.name}: a matmul loop needs a MatmulSchedule")
        return plan_matmul(step, tensors, target, schedule, dependent_launch)
    if schedule is not None and not isinstance(schedule, RowSchedule):
        raise ScheduleError(f"kernel {step.name}: a row kernel needs a RowSchedule")
    return plan_rows(step, tensors, target, schedule, dependent_launch)
