"""The entry of the lowering: turns a plan into the input of `cute.compile`."""

from __future__ import annotations

from typing import Any

from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.registry import skeleton_of


def build(plan: KernelPlan) -> tuple[Any, tuple[Any, ...]]:
    """The traced kernel and its compile-time arguments: tensors, then scratch memory.
    The stream comes after them.

    Imports CuTe DSL, which reads its environment at that moment.
    """
    from cutesuper.skeletons.kernel.arguments import fake_arguments, fake_scratch

    arguments = (*fake_arguments(plan.arguments), *fake_scratch(plan.scratch))
    return skeleton_of(plan).build(plan), arguments
