"""The entry of the lowering: a plan in, something `cute.compile` takes out."""

from __future__ import annotations

from typing import Any

from cutesuper.schedule.attention import AttentionPlan
from cutesuper.schedule.matmul import MatmulPlan
from cutesuper.schedule.planner import KernelPlan
from cutesuper.schedule.row_loop import RowLoopPlan


def build(plan: KernelPlan) -> tuple[Any, tuple[Any, ...]]:
    """The traced kernel and arguments to compile it with: tensors, then scratch memory (the stream
    comes after them).

    Imports CuTe DSL, which reads its environment at that moment.
    """
    from cutesuper.lower.common import fake_arguments, fake_scratch

    arguments = (*fake_arguments(plan.arguments), *fake_scratch(plan.scratch))
    if isinstance(plan, MatmulPlan):
        from cutesuper.lower.matmul import MatmulKernel

        return MatmulKernel(plan), arguments
    if isinstance(plan, AttentionPlan):
        from cutesuper.lower.attention import AttentionKernel

        return AttentionKernel(plan), arguments
    if isinstance(plan, RowLoopPlan):
        from cutesuper.lower.row_loop import RowLoopKernel

        return RowLoopKernel(plan), arguments
    from cutesuper.lower.rows import RowKernel

    return RowKernel(plan), arguments
