"""The search on all programs: states, time, memory, and the muGraphs found.

    python -m benchmarks search --json search.json             # everything in `programs.PROGRAMS`
    python -m benchmarks search "RMSNorm + Linear" GQA

Needs no GPU. Each program is searched once, in a separate process, and every structure found is
verified. Time is CPU time of that process (it has one thread) beside wall time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import SCHEMA, save_results
from benchmarks.search.fresh import environment, in_fresh_process
from benchmarks.search.measure import TARGET, measure
from benchmarks.search.programs import PROGRAMS
from benchmarks.search.report import case_line, print_search

EXIT_INCOMPLETE = 1


def run(
    names: Sequence[str], case_done: Callable[[dict[str, Any]], None] = lambda results: None
) -> dict[str, Any]:
    """Measure programs one after the other and return everything as plain data, ready for JSON.

    Args:
        names: of PROGRAMS.
        case_done: called with the results after every program.
    """
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "search",
        "name": "search",
        "title": "The search on all programs",
        "target": TARGET.name,
        "environment": environment(),
        "cases": [],
    }
    for name in names:
        case = {"program": name, "paper": PROGRAMS[name].paper, "error": None}
        results["cases"].append(case | in_fresh_process(measure, name))
        case_done(results)
    return results


def parse_programs(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The requested programs, or all known ones.

    Raises:
        ValueError: an unknown program.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown program {unknown[0]!r}; one of: {', '.join(known)}")
    return list(names or known)


def main(argv: Sequence[str], prog: str) -> int:
    """Measure, print the table, write JSON after every program.

    Returns 0, or 1 when a program could not be searched, or a structure was rejected. Raises
    SystemExit: 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure the search: states, time, memory, what it finds."
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="default: all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    try:
        names = parse_programs(arguments.programs, list(PROGRAMS))
    except ValueError as error:
        parser.error(str(error))

    def done(results: dict[str, Any]) -> None:
        print(case_line(results["cases"][-1]), flush=True)
        if arguments.json is not None:
            save_results(results, arguments.json)

    results = run(names, done)
    print_search(results)
    bad = any(case["error"] or case["rejected"] for case in results["cases"])
    return EXIT_INCOMPLETE if bad else 0
