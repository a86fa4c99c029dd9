"""Several processes, each with its share of the programs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.needs import NOTHING
from tests.fuzz.outcome import Outcome, Tally
from tests.fuzz.runs import Plan

#: seconds that a process may take longer than it was told, with its last program and minimising
GRACE = 900.0


def in_processes(plan: Plan, jobs: int) -> Tally:
    """Run a plan in so many processes; one that dies is a finding.

    Ctrl-C ends them all; what they have found until then counts.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        started = [_start(plan, k, jobs, Path(folder)) for k in range(jobs)]
        tally = Tally()
        try:
            for k, process in enumerate(started):
                tally.merge(_result(process, Path(folder), k, plan))
        except KeyboardInterrupt:
            for process in started:
                process.kill()
            tally = Tally()
            for file in Path(folder).glob("*.json"):
                tally.merge(Tally.read(file))
        return tally


def _start(plan: Plan, k: int, jobs: int, folder: Path) -> subprocess.Popen[bytes]:
    options = {
        "--seed": plan.seed, "--first": plan.first + k, "--step": jobs, "--seconds": plan.seconds,
        "--front": plan.front, "--budget": plan.budget_s, "--limit": plan.limit_s,
        "--compile": plan.compile, "--json": folder / f"{k}.json", "--journal": folder / f"{k}.at",
    }  # fmt: skip
    if plan.cases is not None:
        options["--cases"] = -(-plan.cases // jobs)
    command = [sys.executable, "-m", "tests.fuzz"]
    command += [str(x) for pair in options.items() for x in pair]
    command += plan.options.split() + ["--no-minimise"] * (not plan.minimise)
    return subprocess.Popen(command)


def _result(process: subprocess.Popen[bytes], folder: Path, k: int, plan: Plan) -> Tally:
    why = ""
    try:
        process.wait(plan.seconds + GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        why = "it did not end"
    file = folder / f"{k}.json"
    tally = Tally.read(file) if file.exists() else Tally()
    if not why and process.returncode in (0, 1, NOTHING):
        return tally
    at = folder / f"{k}.at"
    name = at.read_text(encoding="utf-8") if at.exists() else "nothing yet"
    outcome = Outcome("crash", name, why or f"the process ended with {process.returncode}")
    tally.add(outcome, set())
    tally.findings.append({"key": outcome.key, "drawn": name, "detail": outcome.detail,
                           "replay": name, "code": ""})  # fmt: skip
    return tally
