"""Ablation of the search: states and time against the number of operators.

    python -m benchmarks ablation --json ablation.json         # the programs in SPLITS
    python -m benchmarks ablation LoRA --limit-s 5

The paper's Table 5 (arXiv:2405.05751) for our search, saturation with extraction, and for the
methods it replaces: forward enumeration with the expression test, the same without a canonical
order, the same without the expression test (`forward`). One split for each program, that of its
fused kernel. Needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import SCHEMA, save_results
from benchmarks.search.forward import AnySpace, Count, Enumeration, saturated
from benchmarks.search.fresh import environment, in_fresh_process
from benchmarks.search.programs import PROGRAMS
from benchmarks.search.report import VARIANTS, print_ablation
from benchmarks.search.table import parse_programs
from cutesuper.egraph.labelled import LabelledProgram, label
from cutesuper.egraph.space import Space
from cutesuper.egraph.splits import Split, splits
from cutesuper.search.cuts import Flat

#: the fused kernel of each program
SPLITS = {
    "RMSNorm + Linear": "M:grid N:grid K:loop",
    "GatedMLP": "M:grid N:grid K:loop",
    "LoRA": "M:grid N:grid K:loop N2:whole",
    "GQA": "B:grid M:grid N2:grid K:whole N:loop",
    "nTrans": "M:grid K:whole",
    "RMSNorm backward": "M:grid+persistent K:whole",
}
#: operators of a program at most; with 3 even the slowest variant ends (1 s)
OPERATORS = tuple(range(3, 15))
LIMIT_S = 20.0
EXIT_INCOMPLETE = 1


def problem(name: str) -> tuple[LabelledProgram, Split]:
    """A program as one region, and the split of its fused kernel.

    Raises:
        ValueError: the split no longer exists.
    """
    flat = Flat(PROGRAMS[name].build().expanded())
    program = label(flat.segment(flat.order).region)
    found = {str(split): split for split in splits(program)}
    if SPLITS[name] not in found:
        raise ValueError(f"{name}: no split {SPLITS[name]!r}; one of: {'; '.join(found)}")
    return program, found[SPLITS[name]]


def measure(name: str, operators: Sequence[int], limit_s: float) -> dict[str, Any]:
    """All variants for one program; plain data, ready for JSON.

    Args:
        name: of SPLITS.
        operators: numbers of operators, ascending; a variant ends where it runs out of time.
        limit_s: CPU seconds of each run.

    Returns:
        ``saturation``: ``classes``, ``tried``, ``cpu_s``, and ``programs`` by operators;
        ``cells``: for each variant and number of operators ``states``, ``complete``, ``programs``,
        ``finished``, ``cpu_s``, and ``same``: whether saturation has the same programs.
    """
    program, split = problem(name)
    saturated(Space(program), split)  # the tables of the field are made once per process
    ours = saturated(Space(program), split)
    cells: list[dict[str, Any]] = []
    for variant in VARIANTS:
        for most in operators:
            count = enumerate_forwards(program, split, variant, most, limit_s)
            expected = {p for p, length in ours.programs.items() if length <= most}
            cells.append({"variant": variant, "most": most, **_cell(count, expected)})
            if not count.finished:
                break
    return {
        "split": str(split),
        "saturation": {
            "classes": ours.classes,
            "tried": ours.tried,
            "cpu_s": ours.cpu_s,
            "programs": dict(sorted(Counter(ours.programs.values()).items())),
        },
        "cells": cells,
    }


def enumerate_forwards(
    program: LabelledProgram, split: Split, variant: str, most: int, limit_s: float
) -> Count:
    """A run of one of VARIANTS."""
    gc.collect()  # garbage of the previous run, which took 14 ms in a run of 8 ms
    space = AnySpace(program) if variant == "no expression test" else Space(program)
    ordered = variant != "no order"
    return Enumeration(space, split, most, ordered=ordered, limit_s=limit_s).run()


def _cell(count: Count, expected: set[tuple[str, ...]]) -> dict[str, Any]:
    return {
        "states": count.states,
        "complete": count.complete,
        "programs": len(count.programs),
        "same": count.programs == expected,
        "finished": count.finished,
        "cpu_s": count.cpu_s,
    }


def run(
    names: Sequence[str],
    *,
    operators: Sequence[int] = OPERATORS,
    limit_s: float = LIMIT_S,
    case_done: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Measure programs one after the other and return everything as plain data, ready for JSON.

    Raises:
        ValueError: a program could not be measured.
    """
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "ablation",
        "name": "ablation",
        "title": "What the parts of the search are worth",
        "limit_s": limit_s,
        "environment": environment(),
        "cases": [],
    }
    for name in names:
        case = in_fresh_process(measure, name, tuple(operators), limit_s)
        if "error" in case:
            raise ValueError(f"{name}: {case['error']}")
        results["cases"].append({"program": name, **case})
        case_done(results)
    return results


def main(argv: Sequence[str], prog: str) -> int:
    """Measure, print tables, write JSON after every program.

    Returns 0, or 1 when a program could not be measured, or a finished enumeration and saturation
    found different programs. Raises SystemExit: 2 for
    wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Forward enumeration against saturation, by number of operators."
    )
    parser.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"default: {', '.join(SPLITS)}"
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="SECONDS",
        help="CPU seconds of one run (default %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    try:
        names = parse_programs(arguments.programs, list(SPLITS))
        if arguments.limit_s <= 0:
            raise ValueError(f"--limit-s {arguments.limit_s:g}: a positive number of seconds")
    except ValueError as error:
        parser.error(str(error))

    def done(results: dict[str, Any]) -> None:
        print(f"{results['cases'][-1]['program']}: done", flush=True)
        if arguments.json is not None:
            save_results(results, arguments.json)

    try:
        results = run(names, limit_s=arguments.limit_s, case_done=done)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INCOMPLETE
    print_ablation(results)
    cells = [cell for case in results["cases"] for cell in case["cells"]]
    return 0 if all(c["same"] for c in cells if c["finished"]) else EXIT_INCOMPLETE
