"""Tables of attention: a row for each case, the best of PyTorch's fused kernels in one column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.sweep_report import OURS, environments, outcome, ratio_cell, time_cell
from benchmarks.tables import LABELS, markdown_table, number

TITLES = {
    "few": "Few queries, keys stored (d, S)",
    "decode": "Decoding: one token, 32 query heads, 8 of keys and values, d = 128",
    "models": "Decoding: other numbers of heads",
    "lengths": "Decoding: sequences of mixed lengths up to the one given",
}
#: columns of peers; a prefix is the best of all whose names begin with it
DEFINITION = ("eager", "compile", "compile-max")
SDPA = "sdpa-"
METHOD = (
    "Microseconds per call, median; cold L2; all columns of a line interleaved in one run, outputs "
    "checked against float64 before and after. PyTorch eager and torch.compile compute the "
    "definition; SDPA is the fastest of PyTorch's fused kernels, which is named. Fused calls have "
    "their own layouts, copied before the clock runs. Floor: a kernel that only reads as many "
    "bytes. Speedup: fastest correct other column over each cutesuper column."
)
PREFILL_METHOD = (
    "Microseconds per call, median, and TFLOP/s (half of the scores count); cold L2; all columns "
    "of a line interleaved in one run, outputs checked against float64 before and after. "
    "One sequence, 32 query heads, 8 of keys and values, d = 128."
)

Case = dict[str, Any]


def attention_markdown(results: Case) -> str:
    """A table for each group of cases."""
    parts = []
    for group in dict.fromkeys(case["group"] for case in results["cases"]):
        cases = [case for case in results["cases"] if case["group"] == group]
        parts.append(f"**{TITLES[group]}**\n\n{_table(cases)}")
    return "\n\n".join([*outcome(results, "other"), *parts, _note(METHOD, results)])


def prefill_markdown(results: Case) -> str:
    """A line for each length."""
    names = [n for n in (SDPA, "fa4", *OURS) if any(_entry(c, n) for c in results["cases"])]
    header = ["tokens", *(_label(n) for n in names), "speedup (plain / dependent)"]
    rows = [
        [str(case["shape"][1]), *(_rate_cell(case, n) for n in names), _speedups(case, names)]
        for case in results["cases"]
    ]
    table = markdown_table(header, rows)
    return "\n\n".join([*outcome(results, "other"), table, _note(PREFILL_METHOD, results)])


def _table(cases: Sequence[Case]) -> str:
    names = [n for n in (*DEFINITION, SDPA, "fa4", *OURS) if any(_entry(c, n) for c in cases)]
    peers, ours = [n for n in names if n not in OURS], [n for n in names if n in OURS]
    target = any("target_us" in case for case in cases)
    header = ["workload", "shape", *map(_label, peers), "floor (plain / dependent)"]
    header += ["target"] * target + [*map(_label, ours), "speedup (plain / dependent)"]
    rows = []
    for case in cases:
        floor = " / ".join(number(case["floor_us"][k]) or "?" for k in ("plain", "pdl"))
        row = [f"{case['title']}, {case['dtype']}", case["label"]]
        row += [*(_cell(case, n) for n in peers), floor]
        row += [number(case.get("target_us"), 1)] * target
        rows.append([*row, *(_cell(case, n) for n in ours), _speedups(case, ours)])
    return markdown_table(header, rows)


def _label(name: str) -> str:
    return "SDPA (best)" if name == SDPA else LABELS[name]


def _entry(case: Case, name: str) -> Case | None:
    """The entry of this name; for a prefix the fastest one, or the first if all failed."""
    entries = case["implementations"]
    if not name.endswith("-"):
        return next((e for e in entries if e["name"] == name), None)
    family = [e for e in entries if e["name"].startswith(name)]
    timed = [e for e in family if e["time_us"]]
    if timed:
        return min(timed, key=lambda e: e["time_us"]["median"])
    return family[0] if family else None


def _cell(case: Case, name: str) -> str:
    entry = _entry(case, name)
    text = time_cell(entry)
    if entry is None or not entry["time_us"] or name == entry["name"]:
        return text
    return f"{text} ({entry['name'].removeprefix(name)})"


def _rate_cell(case: Case, name: str) -> str:
    entry = _entry(case, name)
    if entry is None or not entry["time_us"]:
        return time_cell(entry)
    return f"{_cell(case, name)}: {number(entry['tflops'], 0)}"


def _speedups(case: Case, names: Sequence[str]) -> str:
    ours = [n for n in names if n in OURS]
    return " / ".join(ratio_cell(_entry(case, n), case) or "-" for n in ours)


def _note(method: str, results: Case) -> str:
    version = results["environment"].get("flash_attn_4")
    named = f", flash-attn-4 {version}" if version else ""
    return f"{method} {environments(results)}{named}."
