"""Results for people: a table on the terminal, a table in Markdown, and the tables of the README.

Everything here reads the dictionary that `harness.run` returns (or its JSON) and needs no GPU::

    python -m benchmarks.report results.json                     # print
    python -m benchmarks.report --readme README.md results.json  # rewrite between the markers

The README's tables stand between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``, NAME being
the ``name`` of the results (the workload, followed by ``-bfloat16`` where that is the dtype).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
Row = list[str]
HEADER = ["implementation", "us", "p10..p90", "vs best peer", "% floor", "GB/s", "TFLOP/s",
          "host us", "rel. error", "status"]  # fmt: skip
LABELS = {
    "cutesuper": "**cutesuper**",
    "cutesuper-pdl": "**cutesuper, dependent launch**",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "compile-max": "torch.compile max-autotune",
    "matmul-alone": "cuBLAS matmul alone",
}


def load_results(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        ValueError: not JSON, or not results of this schema.
    """
    try:
        results = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not benchmark results of schema {SCHEMA}")
    missing = {"name", "workload", "title", "dtype", "environment", "cases"} - results.keys()
    if missing:
        raise ValueError(f"{path}: incomplete results, no {', '.join(sorted(missing))}")
    return results


def save_results(results: dict[str, Any], path: Path) -> None:
    """Write JSON so that a reader never sees half a file."""
    write_atomically(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file, then rename over it."""
    handle, temporary = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def best_peer(case: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest peer that computes the whole workload correctly."""
    peers = [i for i in case["implementations"] if i["kind"] == "peer" and i["time_us"]]
    return min(peers, key=lambda i: i["time_us"]["median"], default=None)


def ratio_to_best_peer(entry: dict[str, Any], case: dict[str, Any]) -> float | None:
    """Best peer's time over this one's: above 1 is faster than every peer."""
    best = best_peer(case)
    if best is None or entry["time_us"] is None:
        return None
    return best["time_us"]["median"] / entry["time_us"]["median"]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _verdict(entry: dict[str, Any], ratio: float | None) -> str:
    if entry["status"] != "ok":
        return f"{entry['status']}: {entry['error']}"
    if entry["kind"] != "ours" or ratio is None:
        return entry["status"] if entry["kind"] != "part" else "ok (only a part)"
    return "faster" if ratio > 1 else "SLOWER than a peer"


def case_rows(case: dict[str, Any]) -> list[Row]:
    """One row of HEADER per implementation, fastest first, failures last."""

    def key(entry: dict[str, Any]) -> float:
        return entry["time_us"]["median"] if entry["time_us"] else float("inf")

    return [_entry_row(entry, case) for entry in sorted(case["implementations"], key=key)]


def _entry_row(entry: dict[str, Any], case: dict[str, Any]) -> Row:
    ratio = ratio_to_best_peer(entry, case)
    time, host, check = entry["time_us"], entry["host_us"], entry["check_before"]
    error = check["relative_error"] if check else None
    return [
        entry["name"],
        _number(time["median"]) if time else "",
        f"{time['p10']:.2f}..{time['p90']:.2f}" if time else "",
        f"{ratio:.2f}x" if ratio is not None and entry["kind"] in ("ours", "peer") else "",
        _number(entry["floor_percent"], 0),
        _number(entry["bandwidth_gbs"], 0),
        _number(entry["tflops"], 1) if entry["kind"] != "floor" else "",
        _number(host["median"], 1) if host else "",
        f"{error:.1e}" if error is not None else "",
        _verdict(entry, ratio),
    ]


def case_title(case: dict[str, Any], results: dict[str, Any]) -> str:
    """One line above a table: what was measured and how."""
    sets = case["sets"]
    cold = "" if sets is None else f", {sets['count']} input sets"
    cold += ", L2 evicted between replays" if sets and sets["flush"] else ""
    return (
        f"{results['title']} {case['label']} {results['dtype']}: "
        f"{case['bytes'] / 1e6:.1f} MB, {case['flops'] / 1e9:.2f} GFLOP{cold}"
    )


def print_results(results: dict[str, Any]) -> None:
    """Print device and versions, then every case."""
    print(describe_environment(results))
    for case in results["cases"]:
        print_case(case, results)


def print_case(case: dict[str, Any], results: dict[str, Any]) -> None:
    """Print one case; with rich when it is installed, aligned plain text otherwise."""
    title, rows = case_title(case, results), case_rows(case)
    try:
        _print_rich(title, rows)
    except ImportError:
        print(plain_table(title, rows))
    if case["error"]:
        print(f"  {case['error']}")
    sys.stdout.flush()


def _print_rich(title: str, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(HEADER):
        last = len(HEADER) - 1
        table.add_column(column, justify="left" if i in (0, last) else "right", no_wrap=i != last)
    for row in rows:
        style = "bold" if row[0].startswith("cutesuper") else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    # a log file has no width; the default of 80 columns would cut the numbers off
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def plain_table(title: str, rows: Sequence[Row]) -> str:
    """The same table as aligned text."""
    lines = [HEADER, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(HEADER) - 1)]
    text = [title]
    for row in lines:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        text.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(text)


def describe_environment(results: dict[str, Any]) -> str:
    """One line with device, versions and commit."""
    e = results["environment"]
    parts = [e.get("gpu"), _named("driver", e.get("driver")), _named("CUDA", e.get("cuda"))]
    parts += [_named("torch", e.get("torch")), _named("Triton", e.get("triton"))]
    parts += [_named("CuTe DSL", e.get("cutlass_dsl")), e.get("date")]
    commit = e.get("commit")
    if commit:
        parts.append(f"commit {commit[:10]}{' (modified)' if e.get('dirty') else ''}")
    return ", ".join(part for part in parts if part)


def _named(name: str, value: str | None) -> str | None:
    return f"{name} {value}" if value else None


def markdown(results: dict[str, Any]) -> str:
    """A Markdown table: a row per shape, a column per implementation, microseconds per call."""
    cases = results["cases"]
    names: list[str] = list(
        dict.fromkeys(
            i["name"] for case in cases for i in case["implementations"] if i["kind"] != "floor"
        )
    )
    header: Row = [
        "shape",
        *(LABELS.get(n, n) for n in names),
        "floor (plain / dependent)",
        "speedup",
    ]
    lines = [_markdown_row(header), _markdown_row(["---"] + ["---:"] * (len(header) - 1))]
    lines += [_markdown_row(_markdown_case(case, names)) for case in cases]
    note = (
        "Microseconds per call, median; cold L2, all columns interleaved in one run. Speedup: "
        "fastest correct PyTorch column over the fastest cutesuper column. "
        + describe_environment(results)
        + "."
    )
    return "\n".join([*lines, "", note])


def _markdown_case(case: dict[str, Any], names: Sequence[str]) -> Row:
    entries = {i["name"]: i for i in case["implementations"]}
    cells = []
    for name in names:
        entry = entries.get(name)
        if entry is None:
            cells.append("")
        else:
            cells.append(_number(entry["time_us"]["median"]) if entry["time_us"]
                         else entry["status"])  # fmt: skip
    floors = case["floor_us"]
    floor = " / ".join(_number(floors[k]) or "?" for k in ("plain", "pdl"))
    ratios = [ratio_to_best_peer(i, case) for i in case["implementations"] if i["kind"] == "ours"]
    speedup = max((r for r in ratios if r is not None), default=None)
    return [case["label"], *cells, floor, f"{speedup:.2f}x" if speedup is not None else ""]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rewrite_readme(text: str, results: dict[str, Any]) -> str:
    """Replace what stands between the markers of these results.

    Raises:
        ValueError: the markers are missing, or not exactly one pair.
    """
    name = results["name"]
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected exactly one {begin} followed by one {end}")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{markdown(results)}\n{end}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.report``; 0 when all files were used, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", nargs="+", type=Path, help="JSON written by a benchmark run")
    parser.add_argument("--readme", type=Path, help="file whose marked tables are rewritten")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args(argv)
    try:
        loaded = [load_results(path) for path in arguments.results]
        if arguments.readme:
            text = arguments.readme.read_text()
            for results in loaded:
                text = rewrite_readme(text, results)
            write_atomically(arguments.readme, text)
            return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    for results in loaded:
        if arguments.markdown:
            print(markdown(results))
        else:
            print_results(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
