"""The backend with worker processes: the same decisions, whatever happens to the processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cutesuper as cs  # noqa: E402
from cutesuper import pipeline  # noqa: E402
from cutesuper.runtime import cache  # noqa: E402
from cutesuper.runtime.cache import ROOT_VARIABLE, KernelCache  # noqa: E402
from cutesuper.runtime.programs import Kept  # noqa: E402
from cutesuper.runtime.workers import WorkerLost, Workers  # noqa: E402
from cutesuper.torch.compile import ahead, records, region_operator, selection  # noqa: E402
from cutesuper.torch.compile.case import Case, Patience  # noqa: E402
from cutesuper.torch.compile.region_operator import key_of, program_of  # noqa: E402
from tests.backends import Between, GatedMLP, compiled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*please report")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    cache.warn_once.cache_clear()


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


Verdicts = list[tuple[bool, str, Any]]


def decided(pool: Executor | None) -> tuple[Verdicts, int]:
    """The verdicts on a model and its gradients with an executor, in a process that knows nothing,
    and the number of searches in this process."""
    here: list[int] = []
    find = pipeline.find
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(ahead, "shared", lambda: pool)
        patch.setattr(pipeline, "find", lambda *a: here.append(1) or find(*a))
        for name, module in (("_verdicts", selection), ("_programs", region_operator)):
            patch.setattr(module, name, Kept())
        stack.callback(KernelCache().clear)
        model = torch.nn.Sequential(GatedMLP(16, 24), Between(), torch.nn.Linear(16, 16)).bfloat16()
        call, reports = compiled(model, take="modelled")
        call(torch.randn(4, 16).bfloat16()).float().sum().backward()
    assert all(r.seconds.search >= 0 for g in reports for r in g.regions)
    found = [(r.verdict.taken, r.verdict.reason, r.verdict.kernels)
             for g in reports for r in g.regions]  # fmt: skip
    return found, len(here)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, str(tmp_path_factory.mktemp("alone")))
        found, searches = decided(None)
    assert searches and {taken for taken, _, _ in found} == {True, False}
    return found


def test_two_workers_decide_the_same(two: Workers, alone: Verdicts) -> None:
    assert decided(two) == (alone, 0)


def waiting(place: str, saves_little: bool = False, patience: Patience | None = None) -> Any:
    """A case that waits for its turn, with 0 us of Inductor's kernels."""
    patience = patience or Patience()
    return SimpleNamespace(
        place=place, patience=patience, saves_little=lambda expected: saves_little,
        saved_us=lambda ours: -ours,
        is_awaited=lambda expected: expected is not None and -expected >= patience.least_us,
    )  # fmt: skip


def test_what_is_too_small_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "shared", lambda: None)
    work, jobs = ahead.Ahead(()), [Future[Any](), Future[Any]()]
    work._jobs = {"a": jobs[:1], "b": jobs[1:]}
    assert work.next([waiting("a"), waiting("b", saves_little=True)]) == 1
    assert jobs[1].cancelled() and not jobs[0].done()


def test_there_is_an_end_to_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "shared", lambda: None)
    work, search = ahead.Ahead(()), Future[Any]()
    patience = Patience(most=time.monotonic() + 0.05)
    work._jobs, work._searches = {"a": [search]}, {search: waiting("a")}
    assert work.next([waiting("a", patience=patience)]) == 0
    assert search.cancelled() and patience.left == {"a"}


def test_what_saves_much_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cases whose kernels are being compiled, the one that saves 30 us is waited for."""
    monkeypatch.setattr(ahead, "shared", lambda: None)
    work, now = ahead.Ahead(()), time.monotonic()
    patience = Patience(least_us=20.0, most=now - 1, last=now + 0.2)
    work._jobs = {"a": [Future[Any]()], "b": [Future[Any]()]}
    work._expected = {"a": -30.0, "b": -10.0}
    cases = [waiting(name, patience=patience) for name in "ab"]
    assert work.next(cases) == 1 and patience.left == {"b"} and time.monotonic() < now + 0.2
    assert work.next(cases[:1]) == 0 and patience.left == {"a", "b"}
    assert time.monotonic() >= now + 0.2


def test_what_saves_most_is_decided_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is ready; what nothing was sent away for takes no time."""
    monkeypatch.setattr(ahead, "shared", lambda: None)
    cases: list[Any] = [waiting(name) for name in "abcde"]
    work = ahead.Ahead(())
    work._expected = {"a": 5.0, "b": -3.0, "c": -7.0, "d": -2.0}
    compiles = Future[Any]()
    work._jobs = {"c": [compiles]}
    order = [cases.pop(work.next(cases)).place for _ in range(2)]
    compiles.set_result(None)
    order += [cases.pop(work.next(cases)).place for _ in range(3)]
    assert "".join(order) == "ebcda"


def test_what_raises_is_decided_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "shared", lambda: None)
    work, search = ahead.Ahead(()), Future[Any]()
    case: Any = waiting("a")
    work._jobs, work._searches = {"a": [search]}, {search: case}
    search.set_result(None)

    def follow(*_: Any) -> None:
        raise cs.errors.DeviceError("no such target")

    monkeypatch.setattr(work, "_follow", follow)
    assert work.next([case]) == 0 and not work._searches


def test_errors_are_those_of_this_process(two: Workers) -> None:
    """A search that finds nothing says why, wherever it ran."""
    g = cs.new_kernel_graph()
    x = g.new_input((4, 40000), cs.bfloat16)
    g.mark_output(g.softmax(x))
    options = pipeline.Options(cs.H200, budget_s=1e-6)
    away = two.submit(pipeline.outcome, g, options).result()
    here = pipeline.outcome(g, options)
    assert isinstance(here.found, cs.errors.SearchError)
    assert (type(away.found), str(away.found)) == (type(here.found), str(here.found))


class Pool(Executor):
    """Processes that are busy, or not."""

    are_idle = False


class Loses(Pool):
    """Loses every job with its process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_exception(WorkerLost("process died (SIGKILL)"))
        return future


def test_what_is_lost_is_searched_here(alone: Verdicts) -> None:
    with pytest.warns(RuntimeWarning, match="a search process died") as said:
        found, searches = decided(Loses())
    assert found == alone and searches > 1
    assert len([w for w in said if "a search process" in str(w.message)]) == 1


def test_processes_that_die_meanwhile(alone: Verdicts) -> None:
    class Dies(Workers):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(os._exit, 1)

    with Dies(2) as pool, pytest.warns(RuntimeWarning, match=r"process died \(exit code 1\)"):
        assert decided(pool)[0] == alone
    assert not pool._workers


def test_a_compiler_that_dies_is_not_tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiles(Loses):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn)
            if fn is pipeline.outcome:
                future = Future[Any]()
                future.set_result(fn(*args))
            return future

    monkeypatch.setattr(ahead, "shared", Compiles)
    monkeypatch.setattr(Case, "runs", True)
    monkeypatch.setattr(Case, "record", None)
    monkeypatch.setattr(selection, "_known_or_judged", selection._judge)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64, bias=False))
    call, reports = compiled(model.bfloat16(), take="modelled")
    with torch.no_grad():
        call(torch.randn(4, 64).bfloat16())
    reasons = [r.verdict.reason for g in reports for r in g.regions]
    assert reasons == ["no kernels: a kernel: the compiler process died (SIGKILL)"]


def test_what_cannot_be_pickled_is_searched_here(alone: Verdicts) -> None:
    class Refuses(Pool):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise PicklingError("Can't pickle")

    assert decided(Refuses())[0] == alone


def test_an_interrupt_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the compilation; what had not begun is dropped."""
    futures: list[Future[Any]] = []

    class Waits(Pool):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            futures.append(Future[Any]())
            return futures[-1]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decided(Waits())
    assert futures and all(f.cancelled() for f in futures)


class Late(Pool):
    """Searches when somebody waits; kernels are not compiled, but noted."""

    def __init__(self, idle: bool) -> None:
        self.are_idle = idle
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.sent: list[int] = []
        self.kernels: list[str] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        if fn is pipeline.outcome:
            self.jobs.append((future, partial(fn, *args, **kwargs)))
        else:
            self.kernels.append(repr(args[0]))
            future.set_result(None)
        return future

    def wait(self, futures: Any, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(len(self.jobs))
        while not (done := {f for f in futures if f.done()}):
            future, job = self.jobs.pop(0)
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        return done, set()


@pytest.mark.parametrize("idle", [False, True])
def test_halves_are_searched_on_idle_processors(alone: Verdicts, idle: bool) -> None:
    """Before it is known whether they are needed; what is decided is the same."""
    pool = Late(idle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "wait", pool.wait)
        assert decided(pool)[0] == alone
    assert (pool.sent[0] > 2) == idle, "the model has two regions"


def test_halves_are_compiled_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "runs", True)
    monkeypatch.setattr(Case, "record", None)
    monkeypatch.setattr(selection, "_known_or_judged", selection._judge)
    monkeypatch.setattr(selection, "_compile", lambda case: None)
    monkeypatch.setattr(selection, "_checked", lambda verdict, case: verdict)
    kernels: list[list[str]] = []
    for pool in (Late(False), Late(True)):
        with monkeypatch.context() as patch:
            patch.setattr(ahead, "wait", pool.wait)
            decided(pool)
        kernels.append(sorted(pool.kernels))
    assert kernels[0] == kernels[1] != []


def test_what_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that other processes do not know, and what is known, recorded or tuned."""
    g = cs.new_kernel_graph()
    g.mark_output(g.rms_norm(g.new_input((4, 64), cs.bfloat16), normalized_shape=(64,)))
    monkeypatch.setattr(region_operator, "_programs", Kept())
    program = program_of(key_of(g))
    wanted = program.wanted((), cs.H200)
    assert wanted is not None and wanted[0].nodes == program.graph.nodes
    for name, value in ((region_operator, "added"), (records, "tuned"), (pipeline, "is_known")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value, lambda *a: ("something",))
            assert program.wanted((), cs.H200) is None
    program.bring((), cs.H200, 100.0, pipeline.outcome(*wanted, 100.0))
    monkeypatch.setattr(pipeline, "find", None)
    assert program.found((), cs.H200, 100.0)[1].plans and program.searched_s > 0
    assert program.wanted((), cs.H200) is None
