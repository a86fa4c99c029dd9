"""python -m tests.fuzz: random programs until the time is over, and what came of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tests.fuzz.needs import NOTHING, NOTHING_LAUNCHED, missing
from tests.fuzz.outcome import Tally
from tests.fuzz.runs import Plan, Replay, replayed, run
from tests.fuzz.workers import in_processes
from tests.ptx.device import emulated_gpu


def arguments(given: list[str]) -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    p.add_argument("--seconds", type=float, default=60.0, help="when to stop (default: 60)")
    p.add_argument("--cases", type=int, help="when to stop, in programs")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--first", type=int, default=0, metavar="INDEX", help="where to start")
    p.add_argument("--step", type=int, default=1, help="every so manieth program")
    p.add_argument(
        "--front",
        choices=("graph", "torch", "pieces", "both"),
        default="both",
        help="kernel graphs, functions of PyTorch, or both (default); or programs around one "
        "concatenation",
    )
    p.add_argument("--budget", type=float, default=1.0, help="seconds of one search (default: 1)")
    p.add_argument(
        "--limit",
        type=float,
        default=120.0,
        help="processor seconds after which a program hangs (default: 120)",
    )
    p.add_argument(
        "--compile",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="compile the kernels of this share of the programs (default: 0)",
    )
    p.add_argument("--gpu", action="store_true", help="compile and launch the kernels of all")
    p.add_argument(
        "--ptx", action="store_true", help="as --gpu, on the machine of tests/ptx, without a GPU"
    )
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    p.add_argument("--no-minimise", action="store_true", help="print findings as they were drawn")
    p.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    p.add_argument(
        "--replay",
        metavar="PROGRAM",
        help="SEED:INDEX, the JSON of a program, or a file of such lines; nothing else is run",
    )
    p.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    return p.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Returns 1 where something was found, 2 where kernels should have been launched and none was:
    for want of something, which is said before anything else is done."""
    a = arguments(sys.argv[1:] if given is None else given)
    if why := missing(a.gpu, a.ptx, a.compile > 0):
        print(why, file=sys.stderr)
        return NOTHING
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    plan = Plan(
        a.seed, a.first, a.step, a.seconds, a.cases, a.front, a.budget, a.limit, a.compile, a.gpu,
        a.ptx, not a.no_minimise, a.json, a.journal,
    )  # fmt: skip
    with emulated_gpu() if a.ptx and a.jobs == 1 else nullcontext():
        return _run(a, plan)


def _run(a: argparse.Namespace, plan: Plan) -> int:
    if a.replay:
        return max(replayed(r, plan) for r in Replay.all_of(a.replay))
    start = time.monotonic()
    tally: Tally = in_processes(plan, a.jobs) if a.jobs > 1 else run(plan)
    tally = replace(tally, seconds=time.monotonic() - start)
    print(tally.text())
    if a.json:
        tally.save(a.json)
    if (a.gpu or a.ptx) and not tally.launched:
        print(NOTHING_LAUNCHED, file=sys.stderr)
        return NOTHING
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
