"""Worker processes: results and errors whole, deaths, hangs, Ctrl-C, scripts without a guard."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutesuper.errors import SearchError
from cutesuper.runtime import workers as module
from cutesuper.runtime.workers import WorkerLost, Workers, shared
from cutesuper.search.bounds import TooDear
from tests import jobs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def pool() -> Iterator[Workers]:
    with Workers(2) as made:
        yield made
    assert not made._workers and not made._threads


def alive(pid: int) -> bool:
    """True for a process that runs, or that nobody has waited for."""
    return Path(f"/proc/{pid}").exists()


def test_results_and_errors_come_whole(pool: Workers) -> None:
    futures = [pool.submit(pow, n, 2) for n in range(20)]
    assert [f.result() for f in futures] == [n * n for n in range(20)]
    with pytest.raises(SearchError, match=r"^nothing fits$"):
        pool.submit(jobs.fail, "search").result()
    with pytest.raises(TooDear, match=r"at least 7\.5 us, and 3\.2 are allowed") as dear:
        pool.submit(jobs.fail, "dear").result()
    assert (dear.value.least_us, dear.value.most_us) == (7.5, 3.25)
    with pytest.raises(RuntimeError, match="Secretive: 1 and 2"):
        pool.submit(jobs.fail, "secretive").result()
    with pytest.raises((TypeError, RuntimeError), match="pickle"):
        pool.submit(jobs.lock).result()
    with pytest.raises(Exception, match="lambda"):
        pool.submit(lambda: 1)
    assert len(pool._threads) <= 2


def test_they_are_idle_while_most_have_no_job() -> None:
    with Workers(4) as pool:
        assert pool.are_idle
        jobs = [pool.submit(time.sleep, 1.0) for _ in range(2)]
        assert not pool.are_idle, "two of four"
        for job in jobs:
            job.result()
        deadline = time.monotonic() + 20
        while not pool.are_idle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.are_idle


def test_one_that_dies_is_replaced(pool: Workers) -> None:
    first = pool.submit(os.getpid).result()
    with pytest.raises(WorkerLost, match=r"^process died \(exit code 3\)"):
        pool.submit(os._exit, 3).result()
    with pytest.raises(WorkerLost, match=r"^process died \(SIGABRT\)"):
        pool.submit(os.abort).result()
    assert pool.submit(operator.add, 1, 2).result() == 3
    assert not alive(first)


def test_one_that_hangs_is_replaced(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.3)
    pid = pool.submit(os.getpid).result()
    assert pool.submit(jobs.compute, 1.0).result() == "computed"
    with pytest.raises(WorkerLost, match=r"process hung: it did nothing for 0\.3 s"):
        pool.submit(time.sleep, 60).result()
    assert pool.submit(operator.add, 1, 2).result() == 3 and not alive(pid)


def test_none_can_be_started(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(3):
        with pytest.raises(WorkerLost, match=r"process cannot be started: .*/nowhere/python"):
            pool.submit(operator.add, 1, 2).result()
    monkeypatch.undo()
    assert pool.submit(operator.add, 1, 2).result() == 3


def test_idle_ones_end(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    pid = pool.submit(os.getpid).result()
    for _ in range(100):
        time.sleep(0.02)
        if not alive(pid) and not pool._threads:
            break
    assert not alive(pid) and not pool._workers
    assert pool.submit(os.getpid).result() != pid


def test_an_end_that_does_not_wait() -> None:
    pool = Workers(1)
    running, queued = pool.submit(time.sleep, 60), pool.submit(time.sleep, 60)
    while not running.running():
        time.sleep(0.01)
    start = time.perf_counter()
    pool.shutdown(cancel_futures=True)
    assert time.perf_counter() - start < 20
    assert queued.cancelled() and isinstance(running.exception(), WorkerLost)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(os.getpid)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_forked_process_has_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_processors", lambda: 2)
    shared.cache_clear()
    mine = shared()
    assert mine is shared() is not None
    if (pid := os.fork()) == 0:
        os._exit(0 if shared() is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shared.cache_clear()


def test_one_processor_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    shared.cache_clear()
    monkeypatch.setattr(module, "available_processors", lambda: 1)
    assert shared() is None
    shared.cache_clear()


SCRIPT = """
import os, signal, time
from cutesuper.runtime.workers import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs behind a shell's & ignore it
print("script", flush=True)
pool = Workers(2)
print(pool.submit(os.getpid).result(), flush=True)
running = pool.submit(time.sleep, 60)
while not running.done():  # CPython 3.11 can miss a signal just before a wait without end
    time.sleep(0.05)
"""


def test_interrupts_end_a_script_without_a_guard(tmp_path: Path) -> None:
    """It runs once, not once more in each worker; Ctrl-C goes to it alone, and leaves nothing."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(path)], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "script\n"
    worker = int(process.stdout.readline())
    start = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert time.perf_counter() - start < 20 and rest == ""
    assert errors.rstrip().endswith("KeyboardInterrupt") and errors.count("Traceback") == 1
    for _ in range(200):
        if not alive(worker):
            break
        time.sleep(0.05)
    assert not alive(worker), "it sees that its pipe is closed"
