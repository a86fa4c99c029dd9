"""Which skeleton runs a block program."""

from __future__ import annotations

from dataclasses import replace

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.check import check_block_program, passes
from cutesuper.ir.unseen import guarded
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.attention.planner import plan_attention
from cutesuper.skeletons.attention.roles import is_chained
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.matmul.planner import plan_matmul
from cutesuper.skeletons.rows.loop_plan import RowLoopPlan
from cutesuper.skeletons.rows.loop_planner import plan_row_loop
from cutesuper.skeletons.rows.loop_roles import walks
from cutesuper.skeletons.rows.plan import RowPlan, plan_rows
from cutesuper.skeletons.schedule import (
    AttentionSchedule,
    MatmulSchedule,
    RowLoopSchedule,
    RowSchedule,
    Schedule,
)
from cutesuper.targets import Target

KernelPlan = MatmulPlan | RowPlan | RowLoopPlan | AttentionPlan


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
        schedule: knobs to use; None chooses them.
        dependent_launch: for a chosen schedule: launch before the predecessor has ended.

    Raises:
        LoweringError: no skeleton runs this program.
        ScheduleError: it does not fit the target, or the schedule is of another skeleton.
        GraphError: it is illegal.
    """
    _check_one_walk(step)
    _check_maps(step)
    if is_chained(step):
        if schedule is not None and not isinstance(schedule, AttentionSchedule):
            raise ScheduleError(f"kernel {step.name}: an attention loop needs an AttentionSchedule")
        return plan_attention(step, tensors, target, schedule, dependent_launch)
    _check_no_maximum(step)
    _check_no_table(step)
    step = replace(step, program=guarded(step.program, tensors))
    if any(op.kind == "matmul" for op in step.program.ops):
        if schedule is not None and not isinstance(schedule, MatmulSchedule):
            raise ScheduleError(f"kernel {step.name}: a matmul loop needs a MatmulSchedule")
        return plan_matmul(step, tensors, target, schedule, dependent_launch)
    if isinstance(schedule, RowLoopSchedule) or (schedule is None and walks(step)):
        return plan_row_loop(step, tensors, target, schedule, dependent_launch)
    if schedule is not None and not isinstance(schedule, RowSchedule):
        raise ScheduleError(f"kernel {step.name}: a row kernel needs a RowSchedule")
    return plan_rows(step, tensors, target, schedule, dependent_launch)


def _check_one_walk(step: KernelStep) -> None:
    """Refuse what no skeleton runs: loops that are walked again."""
    where = f"kernel {step.name}"
    for name, count in passes(step.program, check_block_program(step.program)).items():
        if count > 1:
            raise LoweringError(
                f"{where}: it walks {name} {count} times, and kernels walk a loop once; split the "
                "program where a walk ends, or let a block hold the whole label"
            )


def _check_no_maximum(step: KernelStep) -> None:
    """Refuse what only the attention loop runs: running maxima."""
    for i, op in enumerate(step.program.ops):
        if op.rescaled:
            raise LoweringError(
                f"kernel {step.name}: operation {i} is a sum rescaled by a running maximum over "
                f"{op.attributes['axis']}, which only a loop between two products keeps; let a "
                "block hold the whole label"
            )


def _check_no_table(step: KernelStep) -> None:
    """Refuse what only the attention loop reads: pages through a table."""
    for op in step.program.loads():
        if "table" in op.attributes:
            raise LoweringError(
                f"kernel {step.name}, load of {op.attributes['tensor']} through the table "
                f"{op.attributes['table']}: only the keys and values of attention are read through "
                "a table; gather the pages before"
            )


def _check_maps(step: KernelStep) -> None:
    """Refuse dimensions of tensors that several labels share."""
    for op in (*step.program.loads(), *step.program.stores()):
        shared = next((e for e in op.attributes["map"] if isinstance(e, tuple)), None)
        if shared is not None:
            raise LoweringError(
                f"kernel {step.name}, {op.kind} of {op.attributes['tensor']}: the labels "
                f"{', '.join(shared)} share a dimension; skeletons take one label for each"
            )
