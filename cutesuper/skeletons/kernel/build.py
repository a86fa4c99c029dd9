"""The entry of the lowering: a plan in, something `cute.compile` takes out."""

from __future__ import annotations

from typing import Any

from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.rows.loop_plan import RowLoopPlan


def build(plan: KernelPlan) -> tuple[Any, tuple[Any, ...]]:
    """The traced kernel and arguments to compile it with: tensors, then scratch memory (the stream
    comes after them).

    Imports CuTe DSL, which reads its environment at that moment.
    """
    from cutesuper.skeletons.kernel.arguments import fake_arguments, fake_scratch

    arguments = (*fake_arguments(plan.arguments), *fake_scratch(plan.scratch))
    if isinstance(plan, MatmulPlan):
        from cutesuper.skeletons.matmul.kernel.loop import MatmulKernel

        return MatmulKernel(plan), arguments
    if isinstance(plan, AttentionPlan):
        from cutesuper.skeletons.attention.kernel.loop import AttentionKernel

        return AttentionKernel(plan), arguments
    if isinstance(plan, RowLoopPlan):
        from cutesuper.skeletons.rows.kernel.loop import RowLoopKernel

        return RowLoopKernel(plan), arguments
    from cutesuper.skeletons.rows.kernel.rows import RowKernel

    return RowKernel(plan), arguments
