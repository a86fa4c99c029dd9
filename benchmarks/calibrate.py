"""Fit of the cost model's constants to candidates that `rank` has timed.

    python -m benchmarks calibrate benchmarks/results/rank.json
    python -m benchmarks calibrate benchmarks/results/rank.json --half

Finds the timed programs again (nothing is compiled, no GPU is needed), fits the constants that no
single measurement shows, and prints them with the quality of the model's order for the present and
for the fitted constants. Nothing is written: constants and their origin are in `cutesuper.targets`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import cutesuper as cs
from benchmarks.rank import summarize
from benchmarks.rank_report import SUMMARY, overall, summary_rows
from benchmarks.tables import print_table
from benchmarks.workloads import RANKED, find_workload
from cutesuper.ir.block import BlockProgram, KernelStep, MuGraph, TensorSpec
from cutesuper.search.search import SearchOptions, search, show
from cutesuper.skeletons.matmul.cost import price as matmul_price
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.cost import price as rows_price
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.targets import TARGETS, Target, find_target

#: fitted constants; the others have measurements of their own
OF_TARGET = ("launch_us", "l2_bandwidth")
OF_RATES = (
    "sm_bytes_per_us", "iteration_us", "prologue_per_us", "statistic_per_us", "first_stage",
    "block_us", "store_us", "cluster_store_us", "exchange_us_per_kb", "row_load_us",
    "reduction_us",
)  # fmt: skip
#: structures requested from the search, one size of each: RMSNorm + Linear with a gain has some 900
STRUCTURES = 4096
#: weight of a case's mean error against errors within the case: the order matters more
MEAN_WEIGHT = 0.5
#: a candidate twice as slow as the best weighs ``FAR_WEIGHT + exp(-FAR_DECAY)`` of it
FAR_WEIGHT, FAR_DECAY = 0.15, 3.0
#: relative errors beyond which a candidate counts as an outlier
OUTLIER = 0.1
#: steps for estimating the derivatives, and number of evaluations
STEP, EVALUATIONS = 1e-2, 12

Kernel = Callable[[Target], float]


@dataclass(frozen=True)
class Timed:
    """A timed candidate whose program was found again.

    Attributes:
        entry: its entry in the results.
        kernels: microseconds that the model predicts for each kernel on a target.
    """

    entry: Mapping[str, Any]
    kernels: tuple[Kernel, ...]

    @property
    def measured(self) -> float:
        """Median, microseconds."""
        return float(self.entry["time_us"]["median"])

    def predicted(self, target: Target) -> float:
        """Microseconds of all kernels."""
        return sum(kernel(target) for kernel in self.kernels)


@dataclass(frozen=True)
class Case:
    """The candidates of a workload at a shape, and the entry of the results."""

    entry: Mapping[str, Any]
    timed: tuple[Timed, ...]


# ------------------------------------------------------------------------ programs, found again


def find_case(entry: Mapping[str, Any], dtype: str, target: Target) -> Case:
    """The programs of a case: structures from the search, extents from the text.

    Candidates of structures that the search no longer finds are left out.
    """
    workload = find_workload(entry["workload"], RANKED)
    graph = workload.graph(cs, tuple(entry["shape"]), dtype)
    options = SearchOptions(keep=STRUCTURES, sizes_per_structure=1, lowered=True)
    candidates = search(graph, target, options=options).candidates
    found = {structure_of(c.mugraph): c.mugraph for c in candidates}
    timed = [
        Timed(c, _kernels(found[c["structure"]].steps, found[c["structure"]].tensors, c, target))
        for c in entry["candidates"]
        if c["time_us"] and c["structure"] in found
    ]
    return Case(entry, tuple(timed))


def structure_of(mugraph: MuGraph) -> str:
    """The program of every kernel without extents, in the form of the results."""
    return "; ".join(f"{s.name}: {show(s.program).split(' with ', 1)[0]}" for s in mugraph.steps)


def _kernels(
    steps: Sequence[KernelStep],
    tensors: dict[str, TensorSpec],
    candidate: Mapping[str, Any],
    target: Target,
) -> tuple[Kernel, ...]:
    texts = candidate["sizes"].split("; ")
    sized = [
        replace(step, program=with_sizes(step.program, text))
        for step, text in zip(steps, texts, strict=True)
    ]
    return tuple(_kernel(step, tensors, target) for step in sized)


def with_sizes(program: BlockProgram, text: str) -> BlockProgram:
    """A program with the extents that `sizing.describe` wrote.

    before: any extents and ``"N.grid(64) K.loop(16), tile M=16 N=64 K=256"``; after: those.
    """
    axes, tile = text.split(", tile ")
    extents = {a.name: 1 for a in program.axes}
    for axis in axes.split() if "(" in axes else ():
        name, count = axis.rstrip(")").split("(")
        extents[name] = int(count)
    tiles = (piece.split("=") for piece in tile.split())
    return program.resized(dict(program.dims), extents, {d: int(n) for d, n in tiles})


def _kernel(step: KernelStep, tensors: dict[str, TensorSpec], target: Target) -> Kernel:
    plan = make_plan(step, tensors, target)
    if isinstance(plan, MatmulPlan):
        return lambda t: matmul_price(plan, t).total
    assert isinstance(plan, RowPlan | RowLoopPlan)
    return lambda t: rows_price(plan, t).total


# ---------------------------------------------------------------------------------------- the fit


def fit(cases: Sequence[Case], target: Target) -> Target:
    """The target with constants that predict the candidates best.

    Least squares of relative errors: within a case, with more weight on fast candidates, and of the
    mean of each case; outliers count less.
    """
    from scipy.optimize import least_squares  # nothing else needs SciPy

    names = (*OF_TARGET, *OF_RATES)
    start = [log(getattr(target if n in OF_TARGET else target.rates, n)) for n in names]

    def errors(x: Sequence[float]) -> list[float]:
        changed = with_constants(target, dict(zip(names, map(exp, x), strict=True)))
        return [e for case in cases for e in _errors(case, changed)]

    solved = least_squares(
        errors, start, loss="soft_l1", f_scale=OUTLIER, diff_step=STEP, max_nfev=EVALUATIONS
    )
    return with_constants(target, dict(zip(names, map(exp, solved.x), strict=True)))


def with_constants(target: Target, values: Mapping[str, float]) -> Target:
    """The target with other constants, its own or those of its rates."""
    own = {n: v for n, v in values.items() if n in OF_TARGET}
    rates = {n: v for n, v in values.items() if n not in OF_TARGET}
    return replace(target, **own, rates=replace(target.rates, **rates))


def _errors(case: Case, target: Target) -> list[float]:
    best = min(t.measured for t in case.timed)
    weights = [FAR_WEIGHT + exp(-FAR_DECAY * (t.measured / best - 1)) for t in case.timed]
    total = sum(weights)
    errors = [log(t.predicted(target) / t.measured) for t in case.timed]
    mean = sum(w * e for w, e in zip(weights, errors, strict=True)) / total
    within = [sqrt(w / total) * (e - mean) for w, e in zip(weights, errors, strict=True)]
    return [*within, MEAN_WEIGHT * mean]


def predicted(results: Mapping[str, Any], cases: Sequence[Case], target: Target) -> dict[str, Any]:
    """The results in the form of `rank`, with the model's predictions for a target."""
    entries: list[dict[str, Any]] = []
    for case in cases:
        candidates = [dict(t.entry) | {"predicted_us": t.predicted(target)} for t in case.timed]
        # candidates of equal cost are in the order of the search, not in that of rounding errors
        candidates.sort(key=lambda c: round(c["predicted_us"], 6))
        summary = summarize(candidates)
        entries.append(dict(case.entry) | {"candidates": candidates, "summary": summary})
    return dict(results) | {"cases": entries}


# ------------------------------------------------------------------------------- command line


def main(argv: Sequence[str], prog: str) -> int:
    """Fit, print tables and constants. Returns 0. Raises SystemExit: 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Fit the cost model's constants to the results of a ranking run."
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="what rank --json wrote")
    parser.add_argument(
        "--half", action="store_true",
        help="fit every second case only and print how the others come out",
    )  # fmt: skip
    parser.add_argument("--target", choices=TARGETS, default="h200", help="default %(default)s")
    arguments = parser.parse_args(argv)
    start = find_target(arguments.target)
    try:
        results = json.loads(arguments.results.read_text())
        if results.get("kind") != "rank":
            raise ValueError(f"{arguments.results}: not written by rank --json")
    except (OSError, ValueError) as error:
        parser.error(str(error))  # exits with code 2
    cases = [find_case(entry, results["dtype"], start) for entry in results["cases"]]
    cases = [case for case in cases if case.timed]
    count = sum(len(case.timed) for case in cases)
    print(f"{count} candidates of {len(cases)} cases found again", flush=True)
    half = arguments.half and len(cases) > 1
    fitted = fit(cases[::2] if half else cases, start)
    shown = cases[1::2] if half else cases
    for title, target in (("present constants", start), ("fitted constants", fitted)):
        _show(title, predicted(results, shown, target))
    for name in (*OF_TARGET, *OF_RATES):
        old, new = ((t if name in OF_TARGET else t.rates) for t in (start, fitted))
        print(f"  {name:20} {getattr(old, name):10.4g} -> {getattr(new, name):10.4g}")
    return 0


def _show(title: str, results: dict[str, Any]) -> None:
    print_table(title, SUMMARY, summary_rows(results))
    print(overall(results), flush=True)
