"""Tables of a linear layer and its cross entropy."""

from __future__ import annotations

from typing import Any

from benchmarks.sweep_report import environments, failures, ratio_cell
from benchmarks.tables import LABELS, markdown_table, number

Case = dict[str, Any]

METHOD = (
    "Milliseconds of a forward and a backward pass, median, implementations in turns; gigabytes "
    "beyond the inputs at the peak, gradients included; seconds of the first call. bfloat16; every "
    "tenth token is ignored. Gradients are checked against float64 before and after: at most twice "
    "the error of PyTorch eager plus 2 ulp. TFLOP/s: of the three products, which is all that has "
    "to be computed. Speedup: over the fastest correct column of others."
)


def heads_markdown(results: Case) -> str:
    """A line for each number of tokens, hidden width and number of words."""
    names = list(dict.fromkeys(e["name"] for c in results["cases"] for e in c["implementations"]))
    names.sort(key=lambda n: n == "cutesuper")
    columns = [str(LABELS.get(n, n)) for n in names]
    rows: list[list[str]] = []
    for case in results["cases"]:
        found = {e["name"]: e for e in case["implementations"]}
        ours = found.get("cutesuper")
        cells = [_cell(found.get(name)) for name in names]
        rows.append([*map(str, case["shape"]), *cells, _rate(ours, case), ratio_cell(ours, case)])
    header = ["tokens", "hidden", "words", *columns, "TFLOP/s", "speedup"]
    parts = [markdown_table(header, rows), METHOD, *failures(results), f"{environments(results)}."]
    return "\n\n".join(parts)


def _cell(entry: Case | None) -> str:
    if entry is None:
        return ""
    if entry["time_us"] is None:
        return str(entry["status"])
    took = number(entry["time_us"]["median"] / 1e3)
    return f"{took} ms, {number(entry['peak_gb'], 1)} GB, {number(entry['first_s'], 0)} s"


def _rate(entry: Case | None, case: Case) -> str:
    if entry is None or entry["time_us"] is None:
        return ""
    return number(case["flops"] / entry["time_us"]["median"] / 1e6, 0)
