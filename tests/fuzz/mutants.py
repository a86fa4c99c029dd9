"""Programs that the verifier has to refuse: the block program of another program, with one thing
changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import CutesuperError
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import bucketed
from cutesuper.targets import H200
from tests.fuzz import judge
from tests.fuzz.arithmetic import Balls
from tests.fuzz.blocks import at_rows
from tests.fuzz.check import Settings, Stage, Wrong
from tests.fuzz.formulas import FUNCTIONS, PAIRS
from tests.fuzz.programs import Case, Step, renamed

#: operators that take the place of each other
ALIKE = (tuple(sorted(FUNCTIONS)), tuple(sorted(PAIRS)), ("sum", "mean", "max"),
         ("softmax", "log_softmax"), ("rms_norm", "layer_norm"))  # fmt: skip
FLAGS = {"is_causal": (False, True), "causal": (False, True), "lower": (False, True),
         "alignment": ("top_left", "bottom_right"), "ignore_index": (-100, 0)}  # fmt: skip
#: mutants of one program that are tried until one differs
TRIES = 6


def check_mutant(
    case: Case, graph: KernelGraph, inputs: Sequence[Tensor], settings: Settings, stage: Stage
) -> None:
    """The verifier refuses what is found for a program that computes something else.

    Raises:
        Wrong: it does not.
    """
    stage("mutant")
    rng = random.Random(case.seed)
    found = list(mutants(case))
    for mutant in rng.sample(found, min(TRIES, len(found))):
        try:
            other = mutant.graph()
            if not _differ(graph, other, inputs, case):
                continue
            hinted = other.with_hints(bucketed(other))
            options = pipeline.Options(H200, budget_s=settings.budget_s, tuned=False)
            _, choice = pipeline.choose(hinted, options, keep=1)
        except CutesuperError:
            continue
        stage("verify a mutant")
        same = graph.with_hints(bucketed(graph))
        if _interfaces(same, hinted) and cs.verify(same, choice.candidate.mugraph):
            raise Wrong("wrong", "the verifier accepts another program", mutant.code())
        return


def mutants(case: Case) -> Iterator[Case]:
    """Programs with the same inputs, one operator or flag of which is another one."""
    for k, step in enumerate(case.steps):
        for other in _other_steps(step):
            yield replace(case, steps=(*case.steps[:k], other, *case.steps[k + 1 :]))
        numbers = [o for o in step.operands if isinstance(o, int)]
        if numbers and len(case.steps) > 1:
            yield _left_out(case, k, numbers[0])


def _other_steps(step: Step) -> Iterator[Step]:
    for names in ALIKE:
        if step.operator in names:
            yield from (replace(step, operator=n) for n in names if n != step.operator)
    for flag, values in FLAGS.items():
        if flag in step.attributes:
            for value in values:
                if value != step.attributes[flag]:
                    yield replace(step, attributes={**step.attributes, flag: value})
    if len(step.operands) == 2 and step.operator in (
        "sub",
        "div",
        "at_least",
        "keep",
        "hide",
        "lift",
    ):
        yield replace(step, operands=step.operands[::-1])


def _left_out(case: Case, k: int, operand: int) -> Case:
    """Users of a value use its operand."""
    n = len(case.sources)
    new: dict[int, int | float] = {i: i for i in range(n + len(case.steps))}
    new[n + k] = operand
    return replace(case, steps=tuple(renamed(s, new) for s in case.steps))


def _differ(a: KernelGraph, b: KernelGraph, inputs: Sequence[Tensor], case: Case) -> bool:
    """An element is clearly another one, with finite numbers."""
    if not _interfaces(a, b):
        return False
    here = [at_rows(g, case.rows[1]) if case.symbolic else g for g in (a, b)]
    for x, y in zip(*(judge.run(g, inputs, Balls()) for g in here), strict=True):
        sure = x.e.isfinite() & y.e.isfinite() & x.v.isfinite() & y.v.isfinite()
        if (sure & ((x.v - y.v).abs() > 100 * (x.e + y.e) + 0.01 * torch.maximum(
                x.v.abs(), y.v.abs()))).any():  # fmt: skip
            return True
    return False


def _interfaces(a: KernelGraph, b: KernelGraph) -> bool:
    def border(g: KernelGraph) -> list[tuple[object, object]]:
        return [(g.nodes[i].shape, g.nodes[i].dtype) for i in (*g.inputs, *g.outputs)]

    return len(a.outputs) == len(b.outputs) and border(a) == border(b)
