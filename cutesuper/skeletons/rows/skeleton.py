"""Rows: element-wise programs and reductions, by blocks that hold rows or walk over them."""

from __future__ import annotations

from typing import Any

from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.legality import refuse_running_maxima, refuse_tables
from cutesuper.skeletons.rows.explain import row_lines, row_loop_lines
from cutesuper.skeletons.rows.loop_plan import RowLoopPlan
from cutesuper.skeletons.rows.loop_planner import plan_row_loop
from cutesuper.skeletons.rows.loop_roles import walks
from cutesuper.skeletons.rows.plan import RowPlan, plan_rows
from cutesuper.skeletons.rows.schedule import RowLoopSchedule, RowSchedule
from cutesuper.targets import Target


class Rows(Skeleton):
    """See the module."""

    name = "a row kernel"
    plans = (RowPlan, RowLoopPlan,)
    schedules = (RowSchedule, RowLoopSchedule,)

    def runs(self, step: KernelStep) -> bool:
        """There is no product."""
        return all(op.kind != "matmul" for op in step.program.ops)

    def plan(
        self,
        step: KernelStep,
        tensors: dict[str, TensorSpec],
        target: Target,
        schedule: Any,
        dependent_launch: bool,
    ) -> Plan[Any]:
        """A row loop where the program or the schedule asks for one, else a row kernel."""
        refuse_running_maxima(step)
        refuse_tables(step)
        if isinstance(schedule, RowLoopSchedule) or (schedule is None and walks(step)):
            return plan_row_loop(step, tensors, target, schedule, dependent_launch)
        return plan_rows(step, tensors, target, schedule, dependent_launch)

    def explain(self, plan: Any) -> list[str]:
        """See `rows.explain`."""
        return row_loop_lines(plan) if isinstance(plan, RowLoopPlan) else row_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `rows.kernel.loop`, or of `rows.kernel.rows`."""
        if isinstance(plan, RowLoopPlan):
            from cutesuper.skeletons.rows.kernel.loop import RowLoopKernel

            return RowLoopKernel(plan)
        from cutesuper.skeletons.rows.kernel.rows import RowKernel

        return RowKernel(plan)
