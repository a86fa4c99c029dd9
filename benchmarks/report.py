"""Results for people: a table on the terminal, a table in Markdown, and the tables of pages.

Everything here reads the dictionary that a benchmark returns (or its JSON) and needs no GPU::

    python -m benchmarks.report results.json                               # print
    python -m benchmarks.report --page docs/benchmarks.md results.json     # rewrite a page's table
    python -m benchmarks.report --page docs/performance.md a.json b.json   # one table of two

Several files of the same sweep make one table; of a case in more than one, the last counts.
A page's tables stand between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``, NAME being
the ``name`` of the results: the workload (followed by ``-bfloat16`` where that is the dtype), or
the command where that is not the comparison with peers (`KINDS`). Where there is a longer version
too, it stands in the page that has NAME-details. ``--page`` may be given several times: results go
to the pages that have their markers. The README is `benchmarks.summary`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    attention_report,
    decode_report,
    heads_report,
    models_report,
    rank_report,
    sweep_report,
    tables,
    training_report,
)
from benchmarks.search import report as search_report
from benchmarks.tables import (
    LABELS,
    Row,
    describe_environment,
    markdown_table,
    number,
    outcome_of,
    print_table,
    ratio_to_best_peer,
)

SCHEMA = 1
HEADER = ["implementation", "us", "p10..p90", "vs best peer", "% floor", "GB/s", "TFLOP/s",
          "host us", "rel. error", "status"]  # fmt: skip


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
    kind = KINDS.get(str(results.get("kind", "peers")))
    if kind is None:
        raise ValueError(f"{path}: results of the unknown kind {results['kind']!r}")
    missing = kind.fields - results.keys()
    if missing:
        raise ValueError(f"{path}: incomplete results, no {', '.join(sorted(missing))}")
    return results


def save_results(results: dict[str, Any], path: Path) -> None:
    """Write JSON so that a reader never sees a partial file."""
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


def _verdict(entry: dict[str, Any], ratio: float | None) -> str:
    if entry["status"] != "ok":
        return f"{entry['status']}: {entry['error']}"
    if entry["kind"] != "ours" or ratio is None:
        return entry["status"] if entry["kind"] != "part" else "ok (only a part)"
    return outcome_of(ratio)


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
        number(time["median"]) if time else "",
        f"{time['p10']:.2f}..{time['p90']:.2f}" if time else "",
        f"{ratio:.2f}x" if ratio is not None and entry["kind"] in ("ours", "peer") else "",
        number(entry["floor_percent"], 0),
        number(entry["bandwidth_gbs"], 0),
        number(entry["tflops"], 1) if entry["kind"] != "floor" else "",
        number(host["median"], 1) if host else "",
        f"{error:.1e}" if error is not None else "",
        _verdict(entry, ratio),
    ]


def case_title(case: dict[str, Any], results: dict[str, Any]) -> str:
    """The line above a table: the workload and the method."""
    sets = case["sets"]
    cold = "" if sets is None else f", {sets['count']} input sets"
    cold += ", L2 evicted between replays" if sets and sets["flush"] else ""
    dtype = case.get("dtype", results["dtype"])
    return (
        f"{case.get('title', results['title'])} {case['label']} {dtype}: "
        f"{case['bytes'] / 1e6:.1f} MB, {case['flops'] / 1e9:.2f} GFLOP{cold}"
    )


def print_results(results: dict[str, Any]) -> None:
    """Print device and versions, then every case."""
    print(describe_environment(results))
    for case in results["cases"]:
        print_case(case, results)


def print_case(case: dict[str, Any], results: dict[str, Any]) -> None:
    """Print one case."""
    rows = case_rows(case)
    ours = [row[0] for row in rows if row[0].startswith("cutesuper")]
    print_table(case_title(case, results), HEADER, rows, bold=ours)
    if case["error"]:
        print(f"  {case['error']}")
    sys.stdout.flush()


def plain_table(title: str, rows: Sequence[Row]) -> str:
    """Rows of HEADER as aligned text."""
    return tables.plain_table(title, HEADER, rows)


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
    table = markdown_table(header, [_markdown_case(case, names) for case in cases])
    note = (
        "Microseconds per call, median; cold L2, all columns interleaved in one run. Speedup: "
        "fastest correct PyTorch column over the fastest cutesuper column. "
        + describe_environment(results)
        + "."
    )
    return f"{table}\n\n{note}"


def _markdown_case(case: dict[str, Any], names: Sequence[str]) -> Row:
    entries = {i["name"]: i for i in case["implementations"]}
    cells = []
    for name in names:
        entry = entries.get(name)
        if entry is None:
            cells.append("")
        else:
            cells.append(number(entry["time_us"]["median"]) if entry["time_us"]
                         else entry["status"])  # fmt: skip
    floors = case["floor_us"]
    floor = " / ".join(number(floors[k]) or "?" for k in ("plain", "pdl"))
    ratios = [ratio_to_best_peer(i, case) for i in case["implementations"] if i["kind"] == "ours"]
    speedup = max((r for r in ratios if r is not None), default=None)
    return [case["label"], *cells, floor, f"{speedup:.2f}x" if speedup is not None else ""]


@dataclass(frozen=True)
class Kind:
    """Operations on the results of one command.

    Attributes:
        fields: required fields of a results file.
        show: prints the results.
        markdown: the table for a page.
        details: a longer version of it, for other pages.
        merges: whether several results make one table; their cases have a ``key`` then.
    """

    fields: frozenset[str]
    show: Callable[[dict[str, Any]], None]
    markdown: Callable[[dict[str, Any]], str]
    merges: bool = False
    details: Callable[[dict[str, Any]], str] | None = None


_COMMON = frozenset({"name", "title", "environment", "cases"})

#: by the ``kind`` of the results; a comparison with peers has none
KINDS: dict[str, Kind] = {
    "peers": Kind(_COMMON | {"dtype", "workload"}, print_results, markdown),
    "inference": Kind(
        _COMMON | {"dtype"}, print_results, sweep_report.inference_markdown, merges=True
    ),
    "layers": Kind(_COMMON | {"dtype"}, print_results, sweep_report.layers_markdown, merges=True),
    "attention": Kind(
        _COMMON | {"dtype"}, print_results, attention_report.attention_markdown, merges=True
    ),
    "prefill": Kind(
        _COMMON | {"dtype"}, print_results, attention_report.prefill_markdown, merges=True
    ),
    "training": Kind(
        _COMMON | {"dtype", "mix_order_reduction"},
        print_results,
        training_report.summary_markdown,
        merges=True,
        details=training_report.details_markdown,
    ),
    "decode": Kind(_COMMON | {"dtype"}, print_results, decode_report.decode_markdown, merges=True),
    "models": Kind(_COMMON | {"dtype"}, print_results, models_report.models_markdown, merges=True),
    "modules": Kind(
        _COMMON | {"dtype"}, print_results, models_report.modules_markdown, merges=True
    ),
    "steps": Kind(
        _COMMON | {"dtype"},
        lambda results: print(models_report.steps_markdown(results)),
        models_report.steps_markdown,
        merges=True,
    ),
    "heads": Kind(
        _COMMON | {"dtype"},
        lambda results: print(heads_report.heads_markdown(results)),
        heads_report.heads_markdown,
        merges=True,
    ),
    "chain": Kind(_COMMON | {"dtype", "layers"}, print_results, sweep_report.chain_markdown),
    "rank": Kind(_COMMON | {"dtype", "top"}, rank_report.print_results, rank_report.markdown),
    "search": Kind(_COMMON | {"target"}, search_report.print_search, search_report.search_markdown),
    "ablation": Kind(
        _COMMON | {"limit_s"}, search_report.print_ablation, search_report.ablation_markdown
    ),
}


def _kind(results: dict[str, Any]) -> Kind:
    return KINDS[results.get("kind", "peers")]


def merged(loaded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result per name if several make one table; ``environments`` then has all of them."""
    kept: list[dict[str, Any]] = []
    by_name: dict[str, dict[str, Any]] = {}
    for results in loaded:
        first = by_name.get(results["name"])
        runs = results.get("environments", [results["environment"]])
        if not _kind(results).merges:
            kept.append(results)
        elif first is None:
            by_name[results["name"]] = results | {"environments": list(runs)}
            kept.append(by_name[results["name"]])
        else:
            cases = {case["key"]: case for case in (*first["cases"], *results["cases"])}
            first["cases"] = list(cases.values())
            first["environments"] += [e for e in runs if e not in first["environments"]]
    return kept


def rewrite_pages(pages: Mapping[Path, str], results: dict[str, Any]) -> dict[Path, str]:
    """The pages, with the table of these results in each one that has its markers.

    Raises:
        ValueError: no page has the markers, or one has not exactly one pair.
    """
    markers = re.compile(f"<!-- /?bench:{re.escape(results['name'])}(-details)? -->")
    having = [path for path, text in pages.items() if markers.search(text)]
    return {
        path: _rewritten(text, results) if path in having or not having else text
        for path, text in pages.items()
    }


def _rewritten(text: str, results: dict[str, Any]) -> str:
    name, kind = results["name"], _kind(results)
    if kind.details is not None and f"<!-- bench:{name}-details -->" in text:
        return replace_table(text, f"{name}-details", kind.details(results))
    return replace_table(text, name, kind.markdown(results))


def replace_table(text: str, name: str, table: str) -> str:
    """Replace what stands between the markers of a name.

    Raises:
        ValueError: the markers are missing, or not exactly one pair.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected exactly one {begin} followed by one {end}")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.report``; 0 when all files were used, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", nargs="+", type=Path, help="JSON written by a benchmark run")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", action="append",
        help="page whose marked tables are rewritten",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args(argv)
    try:
        loaded = merged([load_results(path) for path in arguments.results])
        if arguments.page:
            pages = {path: path.read_text() for path in arguments.page}
            for results in loaded:
                pages = rewrite_pages(pages, results)
            for path, text in pages.items():
                write_atomically(path, text)
            return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    for results in loaded:
        if arguments.markdown:
            print(_kind(results).markdown(results))
        else:
            _kind(results).show(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
