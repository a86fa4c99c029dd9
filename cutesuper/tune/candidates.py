"""Candidates: the best muGraphs of the search with several schedules each, planned and compiled.

Nothing here needs a GPU. Candidates that cannot be planned or compiled stay in the list with the
reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from cutesuper.errors import CompileError, LoweringError, ScheduleError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.unseen import followed
from cutesuper.pipeline import Options, compile_request
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import CompileRequest, compile_kernel, compile_many
from cutesuper.runtime.kernel import CompiledStep, Variant
from cutesuper.runtime.toolchain import available_processors
from cutesuper.search.search import Candidate
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.skeletons.variants import changed, variants
from cutesuper.targets import Target

#: kernels compiled per processor between two checks of the deadline: a worker takes 5 s to start
#: and 0.9 s for a kernel
WAVE = 4

Plans = tuple[KernelPlan, ...]


@dataclass(frozen=True)
class Program:
    """A candidate whose kernels are in the compile cache at ``cache_root``; can be pickled."""

    name: str
    mugraph: MuGraph
    plans: Plans
    requests: tuple[CompileRequest, ...]
    cache_root: str

    def variant(self) -> Variant:
        """The candidate's kernels, from the cache."""
        cache = KernelCache(self.cache_root)
        steps = tuple(
            CompiledStep(plan, compile_kernel(request, cache))
            for plan, request in zip(self.plans, self.requests, strict=True)
        )
        return Variant(self.mugraph, steps)


@dataclass
class Trial:
    """A candidate and its result.

    Attributes:
        program: the one that is launched.
        rank: of its muGraph in the model's order, 1 for the first.
        structure: of its muGraph.
        predicted_us: of its muGraph.
        change: knobs that are not the default: ``k0: stages=5``; "" for the default schedule.
        status: "waiting", then "ok", "wrong", "failed" or "left out".
        reason: why it is not "ok".
        samples: microseconds, one for each round of the last stage that it took part in.
        final: whether it took part in the last stage, with the most rounds.
    """

    program: Program
    rank: int
    structure: str
    predicted_us: float
    change: str
    status: str = "waiting"
    reason: str = ""
    samples: list[float] = field(default_factory=list)
    final: bool = False

    @property
    def name(self) -> str:
        """Short name, such as ``c007``."""
        return self.program.name

    def stop(self, status: str, reason: str) -> None:
        """Drop the candidate; its samples no longer count."""
        self.status, self.reason, self.samples = status, reason, []


def make_trials(
    options: Options,
    candidates: Sequence[Candidate],
    count: int,
    cache: KernelCache,
) -> list[Trial]:
    """The first ``count`` of muGraphs x schedules, with the model's choice at the front.

    Both lists are in the order of likelihood, so they are taken along diagonals: the first muGraph
    with its default schedule, the first with its second and the second with its default, ...
    MuGraphs that make the same kernels (row tiles that the plan decides anyway) count once; those
    without a schedule do not count.

    Args:
        options: target and launch mode.
        candidates: in the model's order.
        count: how many at most.
        cache: where the kernels will be stored.
    """
    rows: list[tuple[Candidate, list[Plans]]] = []
    seen: set[tuple[str, ...]] = set()
    for candidate in candidates:
        # diagonals that end before the next row are full
        if sum(min(len(choices), len(rows) - i) for i, (_, choices) in enumerate(rows)) >= count:
            break
        mu = candidate.mugraph
        choices = _schedules(mu, options)
        key = tuple(p.key for p in choices[0]) if choices else ()
        if not choices or key in seen:
            continue
        seen.add(key)
        rows.append((candidate, choices))
    cells = [(i + j, i, j) for i, (_, choices) in enumerate(rows) for j in range(len(choices))]
    return [
        _trial(n, i + 1, *rows[i], j, options.target, cache)
        for n, (_, i, j) in enumerate(sorted(cells)[:count], start=1)
    ]


def _trial(
    number: int,
    rank: int,
    candidate: Candidate,
    choices: list[Plans],
    choice: int,
    target: Target,
    cache: KernelCache,
) -> Trial:
    mu, plans = candidate.mugraph, choices[choice]
    # named like their steps, so that kernels made from the stored file are found in the cache
    requests = tuple(
        compile_request(plan, step.name, target) for plan, step in zip(plans, mu.steps, strict=True)
    )
    changes = [
        f"{step.name}: {text}" if len(plans) > 1 else text
        for step, plan, default in zip(mu.steps, plans, choices[0], strict=True)
        if (text := changed(plan.schedule, default.schedule))
    ]
    program = Program(f"c{number:03d}", mu, plans, requests, str(cache.root))
    return Trial(program, rank, candidate.structure, candidate.cost_us, "; ".join(changes))


def _schedules(mu: MuGraph, options: Options) -> list[Plans]:
    """Plans of all kernels: the default ones, then those that differ from them in one kernel."""
    tensors = followed(mu)
    try:
        default = tuple(
            make_plan(s, tensors, options.target, dependent_launch=options.dependent_launch)
            for s in mu.steps
        )
    except (LoweringError, ScheduleError):
        return []
    others = [
        [(*default[:n], plan, *default[n + 1 :]) for plan in plans]
        for n, (step, first) in enumerate(zip(mu.steps, default, strict=True))
        for plans in [variants(step, tensors, options.target, first)[1:]]
    ]
    # one for each kernel in turn
    return [default, *(p for turn in zip_longest(*others) for p in turn if p is not None)]


# ---------------------------------------------------------------------------------------- compiling


def compile_trials(trials: Sequence[Trial], cache: KernelCache, deadline: float) -> None:
    """Compile in worker processes until the deadline (`time.monotonic`).
    A wave that was started is finished. Trials that are not reached are left out."""
    for wave in _waves(trials):
        if wave[0] is not trials[0] and time.monotonic() > deadline:
            for trial in wave:
                trial.stop("left out", "the budget was used up before it was compiled")
            continue
        owners = [(trial, request) for trial in wave for request in trial.program.requests]
        results = compile_many([r for _, r in owners], cache=cache, keep_errors=True)
        for (trial, _), result in zip(owners, results, strict=True):
            if isinstance(result, CompileError) and trial.status == "waiting":
                trial.stop("failed", f"compile: {result}")


def _waves(trials: Sequence[Trial]) -> Iterator[Sequence[Trial]]:
    size = WAVE * available_processors()
    for i in range(0, len(trials), size):
        yield trials[i : i + size]
