"""Compilation of a muGraph given by the user: verified, and resized where the target needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from cutesuper.errors import CutesuperError, LoweringError, ScheduleError, VerificationError
from cutesuper.ir.block import BlockProgram, KernelStep, MuGraph
from cutesuper.ir.check import check_is_mugraph
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.unseen import followed
from cutesuper.pipeline import (
    Choice,
    Options,
    as_target,
    check_definition,
    check_numbers,
    compiled,
    verified,
)
from cutesuper.runtime.cache import KernelCache, cache_or_default
from cutesuper.runtime.kernel import Kernel, Variant
from cutesuper.search.search import Candidate, SearchResult, Statistics, show
from cutesuper.skeletons.cost import Cost, Setting, cheapest
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.skeletons.registry import SKELETONS
from cutesuper.targets import Target

#: limit on the extents tried in place of those of a given kernel
EXTENTS = 16


def compile_mugraph(
    graph: KernelGraph,
    mugraph: MuGraph,
    *,
    target: Target | str | None = None,
    dependent_launch: bool = False,
    cache: KernelCache | None = None,
) -> Kernel:
    """Verify a muGraph against its definition and compile it.

    If a kernel's extents cannot be lowered (tiles of 24 columns, say), its structure is kept and
    gets the extents that the cost model prefers.

    Args:
        graph: the definition.
        mugraph: written by hand, loaded, or read with `cutesuper.load_mirage`.
        target: a `Target`, or a name such as ``"h200"``; None takes the current GPU.
        dependent_launch: see `cutesuper.superoptimize`.
        cache: the store of compiled kernels; default ``~/.cache/cutesuper``.

    Raises:
        VerificationError: it computes something else; says where the two differ. Or it rounds to
            float16 a value that float16 cannot hold (`cutesuper.ir.rounding`); names the value.
        LoweringError, ScheduleError: a kernel that no skeleton of the lowering runs.
        GraphError, ShapeError, CompileError: as for `cutesuper.superoptimize`.
    """
    check_definition("compile_mugraph", graph)
    check_is_mugraph("compile_mugraph", mugraph)
    options = Options(as_target(target), dependent_launch)
    store = cache_or_default(cache)

    def make(hints: dict[str, int]) -> Variant:
        here = graph.with_hints(hints)
        choice = _choice(here, mugraph, options)
        result = SearchResult((choice.candidate,), Statistics())
        return compiled(here, options, store, result, choice)

    return Kernel(graph, options.target, make)


def _choice(graph: KernelGraph, mugraph: MuGraph, options: Options) -> Choice:
    verification = verified(graph, mugraph)
    if not verification:
        raise VerificationError(
            f"compile_mugraph: the muGraph does not compute the graph: {verification.summary()}"
        )
    check_numbers(graph, mugraph)
    found = [_planned(step, mugraph, options) for step in mugraph.steps]
    steps = tuple(step for step, _, _ in found)
    if steps != mugraph.steps:
        mugraph = replace(mugraph, steps=steps)
        verification = verified(graph, mugraph)
    if not verification:
        raise VerificationError(
            "compile_mugraph: with the extents that the target can run, the muGraph does not "
            f"compute the graph: {verification.summary()}"
        )
    costs = tuple(cost for _, _, cost in found if cost is not None)
    costs = costs if len(costs) == len(steps) else ()
    text = "; ".join(f"{s.name}: {show(s.program)}" for s in steps)
    candidate = Candidate(mugraph, sum(c.total for c in costs), costs, text, True)
    return Choice(candidate, tuple(plan for _, plan, _ in found), verification, ())


def _planned(
    step: KernelStep, mugraph: MuGraph, options: Options
) -> tuple[KernelStep, KernelPlan, Cost | None]:
    """Plan a kernel as it is, or else with other extents. Raises LoweringError, ScheduleError."""

    tensors = followed(mugraph)

    def plan(s: KernelStep) -> KernelPlan:
        return make_plan(s, tensors, options.target, dependent_launch=options.dependent_launch)

    try:
        return step, plan(step), None
    except (LoweringError, ScheduleError) as refusal:
        for program, cost in _other_extents(step, mugraph, options.target):
            try:
                other = replace(step, program=program)
                return other, plan(other), cost
            except CutesuperError:
                continue
        raise refusal


def _other_extents(
    step: KernelStep, mugraph: MuGraph, target: Target
) -> Iterator[tuple[BlockProgram, Cost]]:
    """The structure of a kernel at the extents that the cost model prefers, cheapest first."""
    setting = Setting(target, mugraph.tensors)
    for skeleton in SKELETONS:
        if (found := skeleton.restructured(step.program, setting)) is not None:
            for s in cheapest(skeleton.sizes(*found, setting, Counter()), EXTENTS):
                yield s.program, s.cost
            return
