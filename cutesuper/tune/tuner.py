"""The tuner: finds candidates, times them within a budget, decides, stores.

    search (a quarter of the budget) -> trials -> compile (until 60 %)
      -> a short look at each (until 85 %) -> the best few against the model's choice, interleaved
      -> `decide` -> `cutesuper.store`

Each candidate is checked before and after it is timed. One that does not compile, is wrong, hangs
or breaks the device costs only itself and the time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cutesuper import store
from cutesuper.errors import DeviceError, TuningError
from cutesuper.ir.arguments import check_options
from cutesuper.ir.check import check_graph
from cutesuper.ir.definitions import added, names_of
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options, as_target, check_definition, choose, fault
from cutesuper.runtime.cache import KernelCache, cache_or_default
from cutesuper.runtime.kernel import bucket_of
from cutesuper.targets import Target
from cutesuper.tune.candidates import Trial, compile_trials, make_trials
from cutesuper.tune.isolate import Lost, Worker

if TYPE_CHECKING:
    from cutesuper.tune.device import Device
    from cutesuper.tune.process import Outcome

BUDGET_S = 60.0
CANDIDATES = 24
#: candidates requested from the search: many have the same kernels
POOL = 64
#: parts of the budget after which the search, compiling and the short looks end
SEARCH_SHARE, COMPILE_SHARE, LOOK_SHARE = 0.25, 0.6, 0.85
#: rounds of a short look, and of the last stage
LOOK_ROUNDS, FINAL_ROUNDS = 5, 40
#: replays before the last stage, seconds
WARM_S = 0.2
#: candidates of the last stage, the model's choice not counted
FINALISTS = 4
#: seconds of silence after which a candidate counts as hung
HANG_S = 10.0


@dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    Attributes:
        path: the file that was written.
        winner: the candidate stored in it.
        model: the cost model's choice with its default schedule.
        trials: all candidates, the model's choice first.
        measured: the measurements in the file.
        seconds: total time.
    """

    path: Path
    winner: Trial
    model: Trial
    trials: tuple[Trial, ...]
    measured: store.Measured
    seconds: float


@dataclass(frozen=True)
class _Run:
    """State shared by all stages."""

    worker: Worker
    begin: float
    budget_s: float
    on_step: Callable[[str], None]

    def until(self, share: float) -> float:
        """The time by `time.monotonic` when this part of the budget is used up."""
        return self.begin + share * self.budget_s


def tune(
    graph: KernelGraph,
    *,
    target: Target | str | None = None,
    dependent_launch: bool = False,
    seed: int = 0,
    budget_s: float = BUDGET_S,
    candidates: int = CANDIDATES,
    folder: str | os.PathLike[str] | None = None,
    cache: KernelCache | None = None,
    hang_s: float = HANG_S,
    make_device: Callable[[], Device] | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Tuned:
    """Time the best few muGraphs with several schedules each on the GPU, and store the winner.

    `cutesuper.superoptimize` uses it from then on. Symbolic extents are tuned at the bucket of
    their hint.

    Args:
        graph: what to compute.
        target: as for `cutesuper.superoptimize`.
        dependent_launch: the same; each launch mode is tuned separately.
        seed: of the inputs and the search.
        budget_s: seconds. Work in progress is finished: a wave of compiles, a timed candidate.
        candidates: how many to time at most.
        folder: where to store; default the user's folder.
        cache: of compiled kernels; default ``~/.cache/cutesuper``.
        hang_s: seconds without progress after which a candidate counts as hung.
        make_device: makes the device in the measuring process, a module-level callable; default
            the current GPU.
        on_step: receives progress messages.

    Raises:
        DeviceError: no GPU.
        TuningError: no candidate could be timed; says why. Also for a graph with operators that
            were added to the package's own, which the measuring process does not have.
        GraphError, SearchError, LoweringError, ScheduleError: as for `cutesuper.superoptimize`.
        OSError: the folder cannot be written.
    """
    check_graph("tune", graph)
    check_options(candidates=candidates, budget_s=budget_s, seed=seed)
    if not budget_s or budget_s <= 0:
        raise TuningError(f"tune(budget_s={budget_s}): must be positive")
    check_definition("tune", graph)
    if outside := added(names_of(graph)):
        raise TuningError(
            f"tune: {', '.join(outside)}: operators that were added in this process, which the one "
            "that measures does not know; use superoptimize, whose choice needs no measuring"
        )
    begin = time.monotonic()
    graph = graph.with_hints({s.name: bucket_of(s.hint) for s in _symbols(graph)})
    make_device = make_device or _cuda()
    options = Options(as_target(target), dependent_launch, seed, SEARCH_SHARE * budget_s)
    cache = cache_or_default(cache)
    # started first: it needs some seconds to import PyTorch
    run = _Run(_worker(make_device, graph, seed, hang_s), begin, budget_s, on_step)
    try:
        trials = _prepare(graph, options, candidates, cache, run)
        _look(trials, run)
        _final(trials, run)
        environment = _greeting(run.worker)
    finally:
        run.worker.close()
    model, winner = trials[0], _verified_winner(graph, trials)
    measured = _measured(winner, model, trials, environment)
    path = store.save(
        graph,
        options.target.arch,
        dependent_launch,
        winner.program.mugraph,
        [plan.schedule for plan in winner.program.plans],
        measured,
        None if folder is None else Path(folder),
    )
    return Tuned(path, winner, model, tuple(trials), measured, time.monotonic() - begin)


def _symbols(graph: KernelGraph) -> set[Symbol]:
    return {d for n in graph.nodes for d in n.shape if isinstance(d, Symbol)}


def _cuda() -> Callable[[], Device]:
    """A factory for the current GPU. Raises DeviceError."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("tune: timing needs a CUDA GPU and PyTorch sees none here")
    from cutesuper.tune.device import CudaDevice

    return CudaDevice


def _worker(
    make_device: Callable[[], Device], graph: KernelGraph, seed: int, hang_s: float
) -> Worker:
    from cutesuper.tune.process import serve

    return Worker(serve, (make_device, graph, seed), hang_s)


def _greeting(worker: Worker) -> dict[str, Any]:
    try:
        return worker.greeting()
    except Lost as problem:
        raise TuningError(f"tune: the measuring process does not come up: {problem}") from problem


# ------------------------------------------------------------------------------------------ stages


def _prepare(
    graph: KernelGraph, options: Options, count: int, cache: KernelCache, run: _Run
) -> list[Trial]:
    """Search, plan and compile; the model's choice comes first."""
    run.on_step("searching")
    result, choice = choose(graph, options, keep=POOL)
    first = result.candidates.index(choice.candidate)
    trials = make_trials(options, result.candidates[first:], count, cache)
    run.on_step(f"compiling {len(trials)} candidates")
    compile_trials(trials, cache, run.until(COMPILE_SHARE))
    return trials


def _look(trials: Sequence[Trial], run: _Run) -> None:
    """Time each briefly; one after the other, so that a hang loses no others."""
    _greeting(run.worker)
    for trial in trials:
        if trial.status != "waiting":
            continue
        if trial is not trials[0] and time.monotonic() > run.until(LOOK_SHARE):
            trial.stop("left out", "the budget was used up before it was timed")
            continue
        run.on_step(f"timing {trial.name}")
        _measure([trial], LOOK_ROUNDS, run.until(1), 0.0, run)
    if not any(t.status == "ok" for t in trials):
        reasons = dict.fromkeys(f"{t.status}: {t.reason}" for t in trials)
        raise TuningError(f"tune: no candidate could be timed: {'; '.join(reasons)[:600]}")


def _final(trials: Sequence[Trial], run: _Run) -> None:
    """Time the best few and the model's choice against each other.
    Again without any that is lost."""
    while True:
        good = sorted((t for t in trials if t.status == "ok"), key=median)
        chosen = [t for t in good if t is not trials[0]][:FINALISTS]
        chosen += [t for t in good if t is trials[0]]
        if not chosen:
            raise TuningError("tune: every candidate failed in the end: " + trials[0].reason)
        run.on_step(f"timing the best {len(chosen)} against each other")
        if _measure(chosen, FINAL_ROUNDS, run.until(1), WARM_S, run):
            break
    for trial in chosen:
        trial.final = True


def _measure(
    trials: Sequence[Trial], rounds: int, deadline: float, warm_s: float, run: _Run
) -> bool:
    """Time trials in the other process; False when it was lost and one of them is to blame.

    Raises:
        TuningError: it was lost and no trial is to blame, for example for lack of memory.
    """
    from cutesuper.tune.process import Job

    seconds = max(0.0, deadline - time.monotonic())
    job = Job(tuple(t.program for t in trials), rounds, seconds, warm_s)
    try:
        outcomes: dict[str, Outcome] = run.worker.ask(job)
    except Lost as problem:
        culprit = problem.culprit([t.name for t in trials])
        if culprit is None:
            raise TuningError(f"tune: nothing can be measured here: {problem}") from problem
        next(t for t in trials if t.name == culprit).stop("failed", str(problem))
        return False
    for trial in trials:
        outcome = outcomes[trial.name]
        if outcome.status == "ok":
            trial.status, trial.samples = "ok", outcome.samples
        else:
            trial.stop(outcome.status, outcome.reason)
    return all(t.status == "ok" for t in trials)


# ---------------------------------------------------------------------------------------- decision


def median(trial: Trial) -> float:
    """Median time in microseconds."""
    return float(np.median(trial.samples))


def spread(trial: Trial) -> float:
    """Microseconds between the 10th and the 90th percentile."""
    low, high = np.percentile(trial.samples, (10, 90))
    return float(high - low)


def _verified_winner(graph: KernelGraph, trials: Sequence[Trial]) -> Trial:
    """The winner, which must also verify at real extents if `superoptimize` requires that.
    The search has verified only its structure.

    Raises:
        TuningError: no candidate is left.
    """
    while any(t.final for t in trials):
        winner = decide(trials)
        why = fault(graph, winner.program.mugraph)
        if why is None:
            return winner
        winner.final = False
        winner.stop("wrong", why)
    raise TuningError("tune: no candidate of the last stage verifies at real extents")


def decide(trials: Sequence[Trial]) -> Trial:
    """The fastest of the last stage.
    The model's choice unless it is beaten by more than the larger of the two spreads.

    Args:
        trials: the model's choice first.
    """
    model, finals = trials[0], [t for t in trials if t.final]
    best = min(finals, key=median)
    if model.final and median(model) - median(best) <= max(spread(model), spread(best)):
        return model
    return best


def _measured(
    winner: Trial, model: Trial, trials: Sequence[Trial], environment: dict[str, Any]
) -> store.Measured:
    measured = store.Measured(
        median_us=round(median(winner), 3),
        spread_us=round(spread(winner), 3),
        model_us=round(median(model), 3) if model.final else None,
        predicted_us=round(winner.predicted_us, 3),
        timed=sum(t.status == "ok" for t in trials),
        cutlass_dsl=_version("nvidia-cutlass-dsl"),
        cutesuper=_version("cutesuper"),
        commit=_commit(),
    )
    return replace(measured, **environment)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that contains the package; None for an installed package."""
    if told := os.environ.get("CUTESUPER_COMMIT"):  # a copied tree has its commit in this variable
        return told
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = partial(subprocess.run, cwd=root, capture_output=True, text=True, check=False, timeout=20)
    try:
        head = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        dirty = git(["git", "status", "--porcelain"]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head} (modified)" if head and dirty else head or None
