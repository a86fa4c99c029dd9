"""The command line of the benchmarks: exit codes, JSON, the watchdog."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cli, harness, report
from benchmarks.harness import DeviceLostError, Settings
from tests.benchmark_fakes import (
    FLOORS,
    KNOBS,
    TINY,
    FakeBackend,
    entries_of,
    measure,
    right,
    writer,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_the_exit_code_is_2(no_gpu, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["rmsnorm_linear"])
    assert caught.value.code == 2
    assert "need a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["rmsnorm_linear", "--shape", "1x2"],
        ["rmsnorm_linear", "--peers", "torch"],
        ["rmsnorm_linear", "--skip", "torch"],
        ["rmsnorm_linear", "--dtype", "int8"],
        ["rmsnorm_linear", "--rounds", "0"],
        ["rmsnorm_linear", "--timeout", "0"],
    ],
)
def test_wrong_arguments(no_gpu, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.fixture
def scripted(monkeypatch):
    """The command line on the scripted backend; returns what run() was asked for."""
    asked = {}

    def run(workload, **options):
        asked.update(options, workload=workload)
        settings = harness.replace(KNOBS, rounds=options["settings"].rounds)
        shapes = options.pop("shapes") or [TINY]
        options["settings"] = settings
        return harness.run(workload, shapes=shapes, floors=FLOORS, backend=FakeBackend(), **options)

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return asked


def test_command_line_runs_prints_and_saves(scripted, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["rmsnorm_linear", "--shape", "4x64x32", "--shape", "2x64x32", "--json", str(path)]
    assert cli.main([*arguments, "--peers", "eager,matmul-alone", "--rounds", "3"]) == 0
    results = report.load_results(path)
    assert [case["label"] for case in results["cases"]] == ["4x64x32", "2x64x32"]
    assert "matmul-alone" in capsys.readouterr().out
    assert scripted["settings"].rounds == 3


def test_quick_and_skip(scripted, capsys):
    assert cli.main(["rmsnorm_linear", "--quick", "--skip", "cutesuper,cutesuper-pdl,compile"]) == 0
    assert [p.name for p in scripted["peers"]] == ["eager", "matmul-alone"]
    assert scripted["settings"] == Settings().quick()


def test_exit_code_1_when_ours_is_wrong(scripted, monkeypatch, capsys):
    wrong = writer(lambda x, w: right(x, w) + 1)
    monkeypatch.setattr(cli, "choose", lambda names, **_: [wrong])
    with pytest.raises(SystemExit) as caught:
        cli.main(["rmsnorm_linear"])
    assert caught.value.code == 1
    assert "wrong: before timing" in capsys.readouterr().out


def test_exit_code_3_when_the_device_is_lost(scripted, monkeypatch, tmp_path, capsys):
    def run(workload, **options):
        monitor = options["monitor"]
        results = measure(writer(right), monitor=monitor)
        del results["cases"][0]["implementations"][0]
        raise DeviceLostError("illegal address")

    monkeypatch.setattr(cli, "run", run)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as caught:
        cli.main(["rmsnorm_linear", "--json", str(path)])
    assert caught.value.code == 3
    results = report.load_results(path)
    assert "illegal address" in results["aborted"]
    assert results["cases"][-1]["error"] == results["aborted"]


def test_watchdog_expires_only_on_slow_steps(monkeypatch):
    """Time passes between two looks of the watchdog, however long those take on a busy machine."""
    expired, looked, now = [], threading.Event(), [0.0]

    def clock():
        looked.set()
        return now[0]

    def pass_by(seconds):
        now[0] += seconds
        for _ in range(2):  # the first look may have begun before
            looked.clear()
            assert looked.wait(600)

    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(cli, "GRACE_SECONDS", 3600.0)  # of real ones
    watchdog = cli.Watchdog(0.2, expired.append)
    for _ in range(3):
        with watchdog.guard("quick"):
            pass_by(0.15)
    assert expired == []
    with watchdog.guard("slow"):
        now[0] += 0.3
        watchdog._thread.join(600)
    watchdog.close()
    assert expired == ["slow"]


HANG = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.benchmark_fakes import KNOBS, PLAIN, TINY, FakeBackend, Implementation
from benchmarks import cli, harness

clock = time.monotonic

def hang(problem):
    cli.time = SimpleNamespace(monotonic=lambda: clock() + 700)
    while True:
        time.sleep(0.1)

# 600 s without waiting for them: on a busy machine a step that does not hang may take some
monitor = cli.CliMonitor(600.0, Path(sys.argv[1]))
harness.run(PLAIN, shapes=[TINY], peers=["eager", Implementation("stuck", "peer", hang)],
            floors=(), settings=KNOBS, backend=FakeBackend(), monitor=monitor)
"""


def test_a_hang_ends_with_code_3_and_partial_results(tmp_path):
    path = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 3, done.stderr
    results = report.load_results(path)
    assert "stuck: prepare" in results["aborted"]
    entries = entries_of(results)
    assert entries["stuck"]["error"] == "did not finish: prepare"
    assert entries["eager"]["check_before"]["passed"]
    assert "stuck" in done.stdout
