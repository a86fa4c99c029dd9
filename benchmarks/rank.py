"""Predicted against measured times: how well the cost model orders the search's candidates.

    python -m benchmarks rank --json rank.json                  # everything in `all_cases`
    python -m benchmarks rank softmax rmsnorm_linear:16x4096x4096 --top 12

For each case: search, choose candidates (`candidates.sample`), compile them in worker processes,
check each against float64, and time them with cold L2, interleaved in rounds. While one case is
timed the next ones are compiled. A candidate that cannot be compiled, is wrong or hangs is listed
with the reason and costs the others nothing but time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidates import POOL, Offer, Prepared, prepare
from benchmarks.correlation import kendall, spearman
from benchmarks.device import Backend, CudaBackend
from benchmarks.harness import SCHEMA, Settings
from benchmarks.isolate import Job, Lost, Worker
from benchmarks.peers import Implementation
from benchmarks.rank_report import print_case, print_summary
from benchmarks.report import save_results
from benchmarks.tables import describe_environment
from benchmarks.workloads import (
    RANKED,
    WORKLOADS,
    Shape,
    Workload,
    find_workload,
    shape_label,
)
from cutesuper.pipeline import current_target

Case = tuple[Workload, Shape]
Prepare = Callable[[Sequence[Case]], list[Prepared]]

DTYPE = "float16"
TOP = 24
EXIT_INCOMPLETE, EXIT_NO_DEVICE, EXIT_LOST = 1, 2, 3
#: shapes of RMSNorm + Linear besides those with which the search's constants were chosen
UNLISTED: tuple[Shape, ...] = ((300, 1024, 1000), (64, 8192, 1280), (1, 4096, 14336))
#: a round of 36 candidates of 4096x4096x4096 takes 0.3 s; host time is irrelevant here
SETTINGS = Settings(rounds=20, warm_seconds=0.1, host_batches=1, host_batch_calls=1, least_sets=32)
#: cases that are compiled together: starting the compiler takes a worker 5 s, a kernel 0.9 s
CHUNK = 4
#: seconds of silence after which a candidate counts as hung
HANG_SECONDS = 30.0
#: most hung or crashed candidates of a case; with more, the case is abandoned
MOST_LOST = 4
#: the measured best should be among this many in the model's order, those that a tuner would time
NEAR = 5
STATISTICS = ("spearman", "spearman_alike", "kendall", "best_place", "best_in_top5", "regret",
              "error")  # fmt: skip


def all_cases() -> list[Case]:
    """Every ranked workload at its shapes, and RMSNorm + Linear at further ones."""
    more: dict[str, tuple[Shape, ...]] = dict.fromkeys(WORKLOADS, UNLISTED)
    return [(w, s) for w in RANKED.values() for s in (*w.shapes, *more.get(w.name, ()))]


def parse_case(text: str) -> list[Case]:
    """``"softmax"`` -> all its cases; ``"softmax:128x4096"`` -> that one.

    Raises:
        ValueError: an unknown workload or a malformed shape.
    """
    name, _, shape = text.partition(":")
    workload = find_workload(name, RANKED)
    if shape:
        return [(workload, workload.parse_shape(shape))]
    return [case for case in all_cases() if case[0].name == name]


def run(
    cases: Sequence[Case],
    prepare_cases: Prepare,
    *,
    top: int = TOP,
    budget_s: float | None = None,
    settings: Settings = SETTINGS,
    make_backend: Callable[[], Backend] = CudaBackend,
    hang_s: float = HANG_SECONDS,
    case_done: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Rank the candidates of several cases and return everything as plain data, ready for JSON.

    Args:
        cases: workloads and shapes.
        prepare_cases: finds and compiles candidates, as `candidates.prepare` does; called in
            another thread.
        top: recorded in the results; see `candidates.sample`.
        budget_s: cases that have not begun after this many seconds are left out.
        settings: of the measurement.
        make_backend: makes the device in the process that measures; a module-level callable.
        hang_s: seconds without progress after which a candidate counts as hung.
        case_done: called with the results after every case.

    Raises:
        Lost: the process that measures does not start.
    """
    deadline = None if budget_s is None else time.monotonic() + budget_s
    worker, executor = Worker(make_backend, hang_s), ThreadPoolExecutor(1)
    chunks = [cases[i : i + CHUNK] for i in range(0, len(cases), CHUNK)]
    waiting = [(chunk, executor.submit(prepare_cases, chunk)) for chunk in chunks]
    try:
        results: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "rank",
            "name": "rank",
            "title": "Predicted against measured",
            "dtype": DTYPE,
            "top": top,
            "pool": POOL,
            "settings": asdict(settings),
            "environment": worker.environment(),
            "cases": [],
        }
        for prepared in _in_time(waiting, deadline):
            results["cases"].append(_measured(worker, prepared, settings, deadline))
            case_done(results)
    finally:
        worker.close()
        executor.shutdown(cancel_futures=True)
    return results


def _in_time(
    waiting: Sequence[tuple[Sequence[Case], Future[list[Prepared]]]], deadline: float | None
) -> Iterator[Prepared]:
    """Cases in order, each as soon as its chunk is compiled; without candidates when time is up."""
    late = "left out: the budget was used up"
    for chunk, future in waiting:
        try:
            ready = future.result(_left(deadline))
        except FutureTimeoutError:
            ready = [Prepared(*case, error=late) for case in chunk]
        for p in ready:
            yield Prepared(p.workload, p.shape, error=late) if _left(deadline) == 0 else p


def _left(deadline: float | None) -> float | None:
    """Seconds until the deadline, at least 0; None without one."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


# ------------------------------------------------------------------------------------- one case


def _measured(
    worker: Worker, prepared: Prepared, settings: Settings, deadline: float | None
) -> dict[str, Any]:
    """Time the candidates that can be launched and describe the case."""
    ready = [Implementation(o.name, "ours", o.make) for o in prepared.offers if o.make]
    lost: dict[str, str] = {}
    data: dict[str, Any] = {}
    error = prepared.error
    if ready:
        job = Job(prepared.workload.name, prepared.shape, DTYPE, tuple(ready), settings)
        data, error = _attempt(worker, job, lost, deadline)
    entries = {entry["name"]: entry for entry in data.get("implementations", ())}
    candidates = [_describe(o, entries.get(o.name), lost, error) for o in prepared.offers]
    return {
        "workload": prepared.workload.name,
        "title": prepared.workload.title,
        "shape": list(prepared.shape),
        "label": shape_label(prepared.shape),
        "error": error or None,
        "search": {
            "found": prepared.found,
            "structures": prepared.structures,
            "seconds": prepared.search_s,
        },
        "sets": data.get("sets"),
        "clocks": data.get("clocks"),
        "summary": summarize(candidates),
        "candidates": candidates,
    }


def _attempt(
    worker: Worker, job: Job, lost: dict[str, str], deadline: float | None
) -> tuple[dict[str, Any], str]:
    """Measure a case; again without each candidate that hangs or breaks the device.

    Returns:
        The harness's results of the case, and why there are none ("" if there are); ``lost`` gets
        the reason of every candidate that was left out on the way.
    """
    while True:
        try:
            data = worker.measure(job)
            return data, data["error"] or ""
        except Lost as problem:
            culprit = problem.culprit(job.names)
            if culprit is None:
                return {}, str(problem)
            lost[culprit] = str(problem)
        job = job.without([culprit])
        if not job.implementations:
            return {}, ""
        if len(lost) == MOST_LOST or _left(deadline) == 0:
            return {}, f"given up after {len(lost)} candidates hung or broke the device"


def _describe(
    offer: Offer, entry: dict[str, Any] | None, lost: dict[str, str], error: str
) -> dict[str, Any]:
    if offer.refused or offer.name in lost:
        status, why = "failed", offer.refused or lost[offer.name]
    elif entry is None:
        status, why = "failed", error
    else:
        status, why = entry["status"], entry["error"]
    return {
        "name": offer.name,
        "position": offer.position,
        "structure": offer.structure,
        "sizes": offer.sizes,
        "kernels": len(offer.mugraph.steps),
        "predicted_us": offer.predicted_us,
        "parts": offer.parts,
        "status": status,
        "error": why,
        "time_us": entry["time_us"] if entry else None,
    }


def summarize(candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correlations, place of the best, regret and error of the candidates that were timed.

    Args:
        candidates: in the model's order, with ``predicted_us``, ``time_us`` and ``kernels``.

    Returns:
        ``timed``; ``spearman`` and ``kendall``; ``spearman_alike``: over those with as many kernels
        as the model's first; ``best_place``: of the fastest, 1 for the model's first;
        ``best_in_top5``; ``regret``: time of the model's first over the fastest, less 1; ``error``:
        mean of |predicted - measured| / measured. None where undefined.
    """
    timed = [c for c in candidates if c["time_us"]]
    predicted = [c["predicted_us"] for c in timed]
    measured = [c["time_us"]["median"] for c in timed]
    if not timed:
        return {"timed": 0} | dict.fromkeys(STATISTICS)
    place = measured.index(min(measured)) + 1
    alike = [i for i, c in enumerate(timed) if c["kernels"] == timed[0]["kernels"]]
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    return {
        "timed": len(timed),
        "spearman": spearman(predicted, measured),
        "spearman_alike": spearman([predicted[i] for i in alike], [measured[i] for i in alike]),
        "kendall": kendall(predicted, measured),
        "best_place": place,
        "best_in_top5": place <= NEAR,
        "regret": measured[0] / min(measured) - 1,
        "error": sum(errors) / len(errors),
    }


# ------------------------------------------------------------------------------- command line


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Options of a ranking run."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Compare the cost model's order with measurements (needs a GPU)."
    )
    parser.add_argument(
        "cases", nargs="*", metavar="WORKLOAD[:AxBxC]",
        help=f"what to rank, default everything: {', '.join(RANKED)}",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=int, default=TOP,
        help="candidates from the front of the search's order (default %(default)s); half as "
        "many more come from the rest",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--budget-s", type=float, metavar="SECONDS",
        help="leave out the cases that have not begun by then",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str], prog: str) -> int:
    """Rank, print tables, write JSON after every case.

    Returns 0, or 1 when a case was left out or could not be measured. Raises SystemExit: 2 without
    a CUDA GPU or for wrong arguments, 3 when the process that measures does not start.
    """
    parser = build_parser(prog)
    arguments = parser.parse_args(argv)
    try:
        cases = [case for text in arguments.cases or RANKED for case in parse_case(text)]
        if arguments.top < 2:
            raise ValueError(f"--top {arguments.top}: an order needs at least 2 candidates")
        if arguments.budget_s is not None and arguments.budget_s <= 0:
            raise ValueError(f"--budget-s {arguments.budget_s}: a positive number of seconds")
    except ValueError as error:
        parser.error(str(error))  # exits with code 2
    if not torch.cuda.is_available():
        print("error: ranking needs a CUDA GPU and PyTorch sees none here", file=sys.stderr)
        raise SystemExit(EXIT_NO_DEVICE)
    try:
        results = run(
            cases,
            partial(prepare, dtype=DTYPE, top=arguments.top, target=current_target()),
            top=arguments.top,
            budget_s=arguments.budget_s,
            case_done=partial(_show, arguments.json),
        )
    except Lost as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(EXIT_LOST) from problem
    print_summary(results)
    print(describe_environment(results))
    return EXIT_INCOMPLETE if any(case["error"] for case in results["cases"]) else 0


def _show(path: Path | None, results: dict[str, Any]) -> None:
    print_case(results["cases"][-1])
    if path is not None:
        save_results(results, path)
