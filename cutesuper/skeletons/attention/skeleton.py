"""The attention loop: two chained products with running state between them."""

from __future__ import annotations

from typing import Any

from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.attention.planner import plan_attention
from cutesuper.skeletons.attention.roles import is_chained
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.base import Plan, Skeleton
from cutesuper.targets import Target


class Attention(Skeleton):
    """See the module."""

    name = "an attention loop"
    plans = (AttentionPlan,)
    schedules = (AttentionSchedule,)

    def runs(self, step: KernelStep) -> bool:
        """A product is multiplied by something that is computed from another product."""
        return is_chained(step)

    def plan(
        self,
        step: KernelStep,
        tensors: dict[str, TensorSpec],
        target: Target,
        schedule: Any,
        dependent_launch: bool,
    ) -> Plan[Any]:
        """See `attention.planner.plan_attention`."""
        return plan_attention(step, tensors, target, schedule, dependent_launch)

    def explain(self, plan: Any) -> list[str]:
        """See `attention.explain.attention_lines`."""
        return attention_lines(plan)

    def build(self, plan: Any) -> Any:
        """The kernel of `attention.kernel.loop`."""
        from cutesuper.skeletons.attention.kernel.loop import AttentionKernel

        return AttentionKernel(plan)
