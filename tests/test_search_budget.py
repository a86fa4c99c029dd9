"""Budgets, interrupts, determinism and executors: what is returned, and what is said if nothing."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from benchmarks.search.programs import PROGRAMS
from cutesuper.errors import SearchError, VerificationError
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.pipeline import Options, choose
from cutesuper.search import cuts, region, region_cache
from cutesuper.search.region import SearchOptions
from cutesuper.search.region_cache import KnownRegions
from cutesuper.search.search import Progress, SearchResult, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify


def several(name: str = "softmax(X W)") -> KernelGraph:
    """A program of several regions that is searched in half a second."""
    return PROGRAMS[name].build(**PROGRAMS[name].small)


def fingerprint(result: SearchResult) -> str:
    """Every candidate with its sizes and costs."""
    return hashlib.sha256(repr(result.candidates).encode()).hexdigest()


# ---------------------------------------------------------------------------------------- budget


class Clock:
    """``time.perf_counter`` and ``time.monotonic``, a second later at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes by looking at it, so that a budget ends at the same place everywhere."""
    clock = Clock()
    monkeypatch.setattr("cutesuper.search.search.time.perf_counter", clock)
    monkeypatch.setattr("cutesuper.egraph.clock.time.monotonic", clock)
    return clock


def test_a_small_budget_gives_what_was_found_until_then(ticking: Clock) -> None:
    g = several()
    search(g, H200, budget_s=1e6)
    whole = ticking.now
    outcomes: list[bool | None] = []
    for budget in range(1, int(whole) + 20, max(1, int(whole) // 12)):
        ticking.now = 0.0
        try:
            result = search(g, H200, budget_s=float(budget))
        except SearchError as error:
            outcomes.append(None)
            assert f"the budget of {budget} s is used up; raise budget_s" in str(error)  # noqa: PT017
            continue
        outcomes.append(result.statistics.complete)
        assert verify(g, result.candidates[0].mugraph)
    # nothing, then something, then everything
    assert outcomes == sorted(outcomes, key=[None, False, True].index)
    assert set(outcomes) == {None, False, True}


def test_a_large_budget_changes_nothing() -> None:
    g = several()
    result = search(g, H200, budget_s=600.0)
    assert result.statistics.complete
    assert result.candidates == search(g, H200).candidates


def test_a_small_budget_is_the_reason(ticking: Clock) -> None:
    """Not that a first operator, which no kernel runs alone, was met with no others yet."""
    g = new_kernel_graph()
    scale, x, w, v = (
        g.new_input(shape, name=name)
        for name, shape in {"s": (1,), "x": (64, 128), "w": (128, 64), "v": (64, 64)}.items()
    )
    scaled = g.exp(g.relu(scale)) * x
    g.mark_output(g.softmax(g.matmul(g.softmax(g.matmul(scaled, w), -1), v), -1))
    options = SearchOptions(lowered=True)
    search(g, H200, options=options, budget_s=1e6)
    whole, reasons = int(ticking.now), list[str]()
    for budget in range(1, whole + 20, whole // 6):
        ticking.now = 0.0
        try:
            search(g, H200, options=options, budget_s=float(budget))
        except SearchError as error:
            reasons.append(str(error))
    assert 0 < len(reasons) < 7
    assert all("s is used up; raise budget_s" in reason for reason in reasons), reasons


def test_a_small_budget_is_the_reason_where_what_was_found_is_refused(
    ticking: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is found stores a value that its type does not hold; more time may find another."""

    def refuse(*_: Any) -> None:
        raise VerificationError("stored as float16, which cannot hold it")

    monkeypatch.setattr("cutesuper.pipeline.check_numbers", refuse)
    reasons = set[str]()
    for budget in (100, 300, 1000):
        ticking.now = 0.0
        with pytest.raises(SearchError) as refused:
            choose(several(), Options(target=H200, budget_s=float(budget)))
        reasons.add(str(refused.value))
    assert any("float16, which cannot hold it; raise budget_s" in r for r in reasons), reasons
    assert all("s is used up" in r and r.endswith("raise budget_s") for r in reasons), reasons
    with pytest.raises(SearchError, match="no program that was found can be run: stored as"):
        choose(several(), Options(target=H200, budget_s=1e9))


def test_no_budget_at_all() -> None:
    with pytest.raises(SearchError, match=r"budget of 0 s is used up; raise budget_s"):
        search(several(), H200, budget_s=0.0)


# ------------------------------------------------------------------------------------- interrupts


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where this process was started to ignore it, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupt_after(parts: int, how: Callable[[], None]) -> Callable[[Progress], None]:
    def on_progress(p: Progress) -> None:
        if p.stage == "kernels" and p.done == parts:
            how()

    return on_progress


def _raise() -> None:
    raise KeyboardInterrupt


def _signal() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [_raise, _signal])
def test_an_interrupt_gives_what_was_found_until_then(how: Callable[[], None]) -> None:
    g, parts = several(), list[int]()
    search(g, H200, on_progress=lambda p: parts.append(p.total))
    result = search(g, H200, on_progress=_interrupt_after(max(parts) - 1, how))
    assert not result.statistics.complete
    assert verify(g, result.candidates[0].mugraph)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives in the middle of a region."""
    g, calls, saturate = several("LayerNorm backward"), count(), region.saturate

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return saturate(*args, **kwargs)

    monkeypatch.setattr(region, "saturate", interrupted)
    result = search(g, H200)
    assert next(calls) == 61
    assert not result.statistics.complete
    assert verify(g, result.candidates[0].mugraph)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [_raise, _signal])
def test_an_interrupt_before_anything_is_found(how: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(several(), H200, on_progress=_interrupt_after(1, how))


# ------------------------------------------------------------------------------------ what is known


def test_known_regions_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, and without, the same comes out; with a budget they are not asked."""
    options = SearchOptions(keep=4, lowered=True)
    alone = search(several(), H200, options=options)
    regions = KnownRegions()
    first = search(several(), H200, options=options, known=regions)
    assert fingerprint(first) == fingerprint(alone)

    def never(*_: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(region_cache, "search_region", never)
    again = search(several(), H200, options=options, known=regions)
    assert fingerprint(again) == fingerprint(alone)
    other = replace(options, seed=1)
    with pytest.raises(AssertionError, match="searched"):
        search(several(), H200, options=other, known=regions)
    assert search(several(), H200, options=other, known=regions, budget_s=1e6).candidates


def test_long_graphs_are_not_cut_inside_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer regions, the same program: `(silu(X W) + 1) * V`, divided after the product at most."""
    g = new_kernel_graph()
    x, w, v = (g.new_input(s) for s in ((16, 256), (256, 256), (256, 256)))
    g.mark_output(g.matmul(g.mul(g.add(g.silu(g.matmul(x, w)), 1.0), 0.5), v))
    options = SearchOptions(keep=4, lowered=True)
    short = search(g, H200, options=options)
    monkeypatch.setattr(cuts, "MANY_OPERATORS", 0)
    long = search(g, H200, options=options)
    assert long.candidates[0] == short.candidates[0]
    assert long.statistics.regions < short.statistics.regions


def test_long_graphs_are_not_cut_on_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor between silu(y) and exp(y), where y and one of them would have to be stored."""
    g = new_kernel_graph()
    x, w, v = (g.new_input(s) for s in ((16, 256), (256, 256), (256, 256)))
    y = g.matmul(x, w)
    g.mark_output(g.matmul(g.add(g.silu(y), g.exp(y)), v))
    options = SearchOptions(keep=4, lowered=True)
    short = search(g, H200, options=options)
    monkeypatch.setattr(cuts, "MANY_OPERATORS", 0)
    long = search(g, H200, options=options)
    for rule in ("slopes", "inside_runs"):  # a cut on this slope could also move on to its foot
        monkeypatch.setattr(cuts.Segments, rule, lambda self, order: set[int]())
    chains = search(g, H200, options=options)
    assert long.candidates[0] == short.candidates[0]
    assert long.statistics.regions < chains.statistics.regions <= short.statistics.regions


# ------------------------------------------------------------------------------------ determinism

_NAMES = ["softmax(X W)", "GQA", "attention, scale", "nTrans", "LoRA"]
_OTHER_PROCESS = """
import json, sys
from tests.test_search_budget import fingerprint, several
from cutesuper.targets import H200
from cutesuper.search.search import search
print(json.dumps({name: fingerprint(search(several(name), H200)) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, dict[str, str]]:
    """The results of other processes, whose sets and dictionaries of strings have other orders."""
    found: dict[str, dict[str, str]] = {}
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS, *_NAMES],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found[seed] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", _NAMES)
def test_the_same_in_every_process(name: str, elsewhere: dict[str, dict[str, str]]) -> None:
    here = fingerprint(search(several(name), H200))
    assert here == fingerprint(search(several(name), H200))
    for seed, found in elsewhere.items():
        assert found[name] == here, f"PYTHONHASHSEED={seed}"


# -------------------------------------------------------------------------------------- executors


@pytest.fixture(scope="module")
def serial() -> SearchResult:
    return search(several(), H200)


def _same(found: SearchResult, serial: SearchResult) -> None:
    assert found.candidates == serial.candidates
    assert found.statistics.pruned == serial.statistics.pruned
    assert found.statistics.classes == serial.statistics.classes
    assert found.statistics.complete


def test_threads(serial: SearchResult) -> None:
    with ThreadPoolExecutor(2) as executor:
        _same(search(several(), H200, executor=executor), serial)


def test_processes(serial: SearchResult) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as executor:
        _same(search(several(), H200, executor=executor), serial)


@pytest.mark.parametrize("processes", [False, True])
def test_dask(processes: bool, serial: SearchResult) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the extra [distributed]")
    with distributed.Client(
        processes=processes, n_workers=1, threads_per_worker=1, dashboard_address=None
    ) as client:
        _same(search(several(), H200, executor=client.get_executor()), serial)


def test_a_budget_with_an_executor(serial: SearchResult) -> None:
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(SearchError, match="raise budget_s"):
            search(several(), H200, executor=executor, budget_s=0.0)
        result = search(several(), H200, executor=executor, budget_s=600.0)
    assert result.candidates == serial.candidates


def test_what_a_region_raises_is_raised_here() -> None:
    g = new_kernel_graph()
    g.mark_output(g.apply("rotate_half", g.new_input((4, 1 << 20))))
    with ThreadPoolExecutor(1) as executor, pytest.raises(SearchError) as there:
        search(g, H200, executor=executor)
    with pytest.raises(SearchError, match="a block holds one row") as here:
        search(g, H200)
    assert str(there.value) == str(here.value)


class Dying(Executor):
    """Every worker ends itself at its first task."""

    def __init__(self) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def submit(self, *_: object, **__: object) -> Future[object]:  # type: ignore[override]
        return self.pool.submit(os._exit, 1)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.pool.shutdown(wait, cancel_futures=cancel_futures)


def test_a_worker_that_dies() -> None:
    died = pytest.raises(SearchError, match=r"executor Dying.*BrokenProcessPool")
    with Dying() as executor, died:
        search(several(), H200, executor=executor)


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_an_executor_that_was_shut_down(pool: type[Executor]) -> None:
    executor = pool()
    executor.shutdown()
    with pytest.raises(SearchError, match=f"executor {pool.__name__}.*shutdown"):
        search(several(), H200, executor=executor)


class Cancelling(ThreadPoolExecutor):
    """Gives up what it was given, as a cluster that loses its scheduler does."""

    def submit(self, *args: object, **kwargs: object) -> Future[object]:  # type: ignore[override]
        future: Future[object] = Future()
        future.cancel()
        return future


def test_tasks_that_are_cancelled() -> None:
    with Cancelling() as executor, pytest.raises(SearchError, match=r"Cancelling.*CancelledError"):
        search(several(), H200, executor=executor)


# --------------------------------------------------------------------------- through superoptimize


def test_options_of_superoptimize_reach_the_search() -> None:
    g = several("RMSNorm + Linear")
    result, plain = choose(g, Options(H200))
    assert result.statistics.complete
    with ThreadPoolExecutor(2) as executor:
        _, threaded = choose(g, Options(H200, executor=executor))
    assert threaded.candidate == plain.candidate
    with pytest.raises(SearchError, match="raise budget_s"):
        choose(g, Options(H200, budget_s=0.0))
    _, seeded = choose(g, Options(H200, seed=7, budget_s=600.0))
    assert seeded.candidate.structure == plain.candidate.structure
