"""The matmul loop: products that share a row operand, and what surrounds them."""

from __future__ import annotations

from typing import Any

from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.skeletons.legality import refuse_running_maxima, refuse_tables
from cutesuper.skeletons.matmul.explain import matmul_lines
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.matmul.planner import plan_matmul
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.targets import Target


class Matmul(Skeleton):
    """See the module."""

    name = "a matmul loop"
    plans = (MatmulPlan,)
    schedules = (MatmulSchedule,)

    def runs(self, step: KernelStep) -> bool:
        """There is a product."""
        return any(op.kind == "matmul" for op in step.program.ops)

    def plan(
        self,
        step: KernelStep,
        tensors: dict[str, TensorSpec],
        target: Target,
        schedule: Any,
        dependent_launch: bool,
    ) -> Plan[Any]:
        """See `matmul.planner.plan_matmul`."""
        refuse_running_maxima(step)
        refuse_tables(step)
        return plan_matmul(step, tensors, target, schedule, dependent_launch)

    def explain(self, plan: Any) -> list[str]:
        """See `matmul.explain.matmul_lines`."""
        return matmul_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `matmul.kernel.loop`."""
        from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

        return MatmulKernel(plan)
