"""Many cases of several workloads in one run and one table, which a later run can complete.

A run that is given the results of an earlier one keeps the cases that are complete there. If an
implementation hung or broke the device, its case is measured again without it, and the reason stays
in the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cli import add_options, supervise
from benchmarks.device import Backend, CudaBackend, environment
from benchmarks.harness import SCHEMA, Case, Monitor, Settings, measure_case
from benchmarks.peers import PEERS, Implementation
from benchmarks.report import load_results, save_results
from benchmarks.workload import Shape, Workload

DTYPE = "float16"
#: results that differ in one of these do not belong to one table
MACHINE = ("gpu", "driver", "torch", "triton", "cutlass_dsl", "commit")


class ResumeError(ValueError):
    """The earlier results cannot be completed by this run."""


@dataclass(frozen=True)
class Item:
    """One case of a sweep.

    Attributes:
        key: name of the case in the results, for example ``"llama3-8b/qkv/16"``.
        workload, shape: the measured ones.
        labels: more fields of its results, for the table.
        dtype: element type.
        absent: implementations that do not take part in this case.
        case: class that measures it.
    """

    key: str
    workload: Workload
    shape: Shape
    labels: dict[str, Any] = field(default_factory=dict)
    dtype: str = DTYPE
    absent: frozenset[str] = frozenset()
    case: type[Case] = Case


@dataclass(frozen=True)
class Sweep:
    """The cases of one table.

    Attributes:
        kind: of the results, which is also their name.
        title: of the table.
        items: in the order of the table.
        implementations: those that take part, floors included.
        prepare: called before the first case, with those that will be measured.
        notes: more fields of the results.
    """

    kind: str
    title: str
    items: tuple[Item, ...]
    implementations: tuple[Implementation, ...]
    prepare: Callable[[Sequence[Item]], None] | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def present(self, item: Item) -> tuple[Implementation, ...]:
        """The implementations that take part in a case."""
        return tuple(i for i in self.implementations if i.name not in item.absent)


def run(
    sweep: Sweep,
    settings: Settings,
    *,
    earlier: dict[str, Any] | None = None,
    backend: Backend | None = None,
    monitor: Monitor | None = None,
) -> dict[str, Any]:
    """Measure the cases that ``earlier`` (results of this kind) lacks.
    Returns plain data, ready for JSON.

    Raises:
        ResumeError: ``earlier`` is of another kind, or of another machine or version.
        DeviceLostError: an implementation broke the device; the monitor has what was finished.
    """
    backend, monitor = backend or CudaBackend(), monitor or Monitor()
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": sweep.kind,
        "name": sweep.kind,
        "title": sweep.title,
        "dtype": DTYPE,
        "settings": asdict(settings),
        "environment": environment(backend),
        "cases": [],
        **sweep.notes,
    }
    known = _earlier_cases(earlier, results)
    missing = [
        item
        for item in sweep.items
        if item.key not in known or not _complete(known[item.key], sweep.present(item))
    ]
    again = {item.key for item in missing}
    # first, so that they are in the file from the first case on
    results["cases"] += [case for key, case in known.items() if key not in again]
    monitor.started(results)
    if sweep.prepare is not None:
        with monitor.step("preparation"):
            sweep.prepare(missing)
    for item in missing:
        case = item.case(
            item.workload, item.shape, item.dtype, sweep.present(item), settings, backend, monitor
        )
        case.data |= {"key": item.key, "title": item.workload.title, "dtype": item.dtype}
        case.data |= item.labels
        case.refuse(_culprits(known.get(item.key)))
        measure_case(results, case)
    place = {item.key: i for i, item in enumerate(sweep.items)}
    results["cases"].sort(key=lambda case: place.get(case["key"], -1))
    return results


def _earlier_cases(
    earlier: dict[str, Any] | None, results: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    if earlier is None:
        return {}
    if earlier.get("kind") != results["kind"]:
        raise ResumeError(f"results of {earlier['name']} cannot be completed by {results['name']}")
    then, now = earlier["environment"], results["environment"]
    for name in MACHINE:
        if then.get(name) != now.get(name):
            raise ResumeError(
                f"the earlier results are of {name} {then.get(name)}, this machine has "
                f"{now.get(name)}; start afresh in another file (a table may be of several)"
            )
    return {case["key"]: case for case in earlier["cases"]}


def _complete(case: dict[str, Any], wanted: Sequence[Implementation]) -> bool:
    """True if all requested implementations have taken part, with any result."""
    there = {entry["name"] for entry in case["implementations"]}
    return {i.name for i in wanted} <= there and not _broken_off(case)


def _broken_off(case: dict[str, Any]) -> bool:
    return any(e["status"] in ("pending", "unfinished") for e in case["implementations"])


def _culprits(case: dict[str, Any] | None) -> dict[str, str]:
    """The implementations that kept a case from ending, with the reason."""
    if case is None or not _broken_off(case):
        return {}
    return {
        entry["name"]: entry["error"]
        for entry in case["implementations"]
        if entry["status"] in ("unfinished", "failed")
    }


def names_of(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """``"a,b"`` -> ``["a", "b"]``; all of ``known`` for None.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    names = list(known) if text is None else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{what} {unknown[0]!r}: one of {', '.join(known)}")
    return names


def add_sweep_options(
    parser: argparse.ArgumentParser, known: Sequence[Implementation] = PEERS
) -> None:
    """The options of every sweep, whose peers are among ``known``."""
    add_options(parser, known)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep the complete cases of these results and measure the others; what hung or broke "
        "the device in a case is left out of it",
    )


def sweep_main(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    sweep: Sweep,
    settings: Settings,
) -> int:
    """Run on the current device. Returns and raises as `cli.supervise`."""
    path = arguments.resume
    try:
        earlier = load_results(path) if path is not None else None
    except (OSError, ValueError) as error:
        parser.error(f"--resume: {error}")

    def measure(monitor: Monitor) -> None:
        results = run(sweep, settings, earlier=earlier, monitor=monitor)
        if arguments.json is not None:  # in the order of the table
            save_results(results, arguments.json)

    try:
        return supervise(arguments, measure)
    except ResumeError as error:
        parser.error(f"--resume {path}: {error}")
