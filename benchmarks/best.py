"""The fastest choice of a peer in several runs, put into the results of one of them.

torch.compile's max-autotune times its candidates anew in every run, and its choice differs by up to
1.7x (RMSNorm + Linear, 16 rows: 14 to 21 us). A table made of one run would show its luck::

    python -m benchmarks.best new.json old.json older.json --json inference.json

The results are those of the first file. In each case the peer's entry is the fastest correct one of
all files, and the environment says of how many runs it is the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.report import load_results, save_results


def with_best(
    results: dict[str, Any], others: Sequence[dict[str, Any]], peer: str
) -> dict[str, Any]:
    """Results with the fastest correct entry of a peer, of their own and of other runs.

    Raises:
        ValueError: another run is of another workload or another GPU.
    """
    for other in others:
        for what in ("kind", "name"):
            if other.get(what) != results.get(what):
                raise ValueError(f"{what} {other.get(what)!r} beside {results.get(what)!r}")
        if other["environment"]["gpu"] != results["environment"]["gpu"]:
            raise ValueError(f"measured on {other['environment']['gpu']}")
    cases = []
    for case in results["cases"]:
        same = [c for run in others for c in run["cases"] if c["key"] == case["key"]]
        known = [i for c in same for i in c["implementations"] if i["name"] == peer]
        cases.append(case | {"implementations": [
            min([i, *known], key=_us) if i["name"] == peer else i for i in case["implementations"]
        ]})  # fmt: skip
    best_of = results["environment"].get("best_of", {}) | {peer: 1 + len(others)}
    return results | {
        "cases": cases, "environment": results["environment"] | {"best_of": best_of}
    }  # fmt: skip


def _us(entry: dict[str, Any]) -> float:
    return entry["time_us"]["median"] if entry["time_us"] and entry["status"] == "ok" else inf


def main(args: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.best", description=__doc__)
    parser.add_argument("results", type=Path, help="whose other entries stay")
    parser.add_argument("others", type=Path, nargs="+", help="further runs")
    parser.add_argument("--peer", default="compile-max", help="default: compile-max")
    parser.add_argument("--json", type=Path, required=True, help="write the results here")
    given = parser.parse_args(args)
    try:
        results, *others = (load_results(p) for p in (given.results, *given.others))
        save_results(with_best(results, others, given.peer), given.json)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
