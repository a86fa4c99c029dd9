"""Tables of training operators: a summary of all, and for each operator and pass a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

from benchmarks.sweep_report import OURS, environments, outcome, ratio_cell, time_cell
from benchmarks.tables import LABELS, Row, markdown_table, number, ratio_to_best_peer, tally

TITLES = {
    "rmsnorm": "RMSNorm",
    "layernorm": "LayerNorm",
    "softmax": "Softmax",
    "crossentropy": "Cross-entropy, a loss for each row",
    "activations": "Activations",
    "host": "Host time of a call in eager mode",
}
PEERS = ("eager", "compile", "liger", "quack")
METHOD = (
    "Microseconds per call, median; cold L2; all columns of a line interleaved in one run, outputs "
    "checked against float64 before and after. Floor: an element-wise kernel of PyTorch that moves "
    "as many bytes, or (cross-entropy forward, SwiGLU backward) a kernel that only reads as many. "
    "Speedup: fastest correct other column over each cutesuper column."
)
HOST_METHOD = (
    "Microseconds of host time per call, median: of the call, operands requiring gradients, and of "
    "torch.autograd.grad of its result."
)

#: ratio of errors that differ only by a few elements rounded the other way
MARGIN = 1.01

Case = dict[str, Any]


def summary_markdown(results: Case) -> str:
    """A line for each operator and pass."""
    cases = [case for case in results["cases"] if case["group"] != "host"]
    names = [n for n in PEERS if any(_entry(case, n) for case in cases)]
    header = ["operator", "pass", "shapes", "wins / ties / losses"]
    header += [f"over {LABELS[n]}" for n in names] + ["of the floor's speed"]
    rows = []
    for key in dict.fromkeys((case["operator"], case["step"]) for case in cases):
        some = [case for case in cases if (case["operator"], case["step"]) == key]
        rows.append([*key, str(len(some)), _tally(some), *(_over(some, n) for n in names),
                     _of_floor(some)])  # fmt: skip
    note = (
        "Speedups are geometric means over the shapes (least to most), of plain launches. "
        f"Every shape: docs/performance.md. {_note(METHOD, results)}"
    )
    parts = [markdown_table(header, rows)] if rows else []
    host = [case for case in results["cases"] if case["group"] == "host"]
    parts += [_host_table(host), HOST_METHOD] if host else []
    return "\n\n".join([*_outcome(results), *parts, note])


def details_markdown(results: Case) -> str:
    """A table for each operator and pass, with a line for each shape."""
    parts = []
    for group in dict.fromkeys(case["group"] for case in results["cases"]):
        cases = [case for case in results["cases"] if case["group"] == group]
        parts.append(f"**{TITLES[group]}**")
        if group == "host":
            parts += [_host_table(cases), HOST_METHOD]
            continue
        for key in dict.fromkeys((case["title"], case["dtype"]) for case in cases):
            some = [case for case in cases if (case["title"], case["dtype"]) == key]
            parts += [f"{key[0]}, {key[1]}:", _table(some)]
    return "\n\n".join([*_outcome(results), *parts, _note(METHOD, results)])


def _outcome(results: Case) -> list[str]:
    """Wins, ties, losses and failures; a call timed only on the host has only failures."""
    timed = [case for case in results["cases"] if case["group"] != "host"]
    hosts = [case for case in results["cases"] if case["group"] == "host"]
    sentence, *failures = outcome(results | {"cases": timed}, "other")
    _, *more = outcome(results | {"cases": hosts}, "other")
    accuracy = _accuracy(timed)
    return [sentence, *([accuracy] if accuracy else []), *failures, *more]


def _accuracy(cases: Sequence[Case]) -> str:
    """Errors of the weight's gradient, ours beside quack's.
    Not for LayerNorm, where quack takes the weight, and returns its gradient, in float32."""
    pairs: dict[str, tuple[float, float]] = {}
    for case in (c for c in cases if c["group"] != "layernorm"):
        ours, quack = (_weight_error(case, name) for name in (OURS[0], "quack"))
        if ours is not None and quack is not None:
            pairs[f"{case['title']} {case['label']}"] = ours, quack
    if not pairs:
        return ""
    larger = [
        f"{name} ({a:.2e}, quack {b:.2e})" for name, (a, b) in pairs.items() if a > MARGIN * b
    ]
    text = (
        "The relative error of the weight's gradient against float64 is no larger than quack's "
        f"(within {MARGIN - 1:.0%}) in {len(pairs) - len(larger)} of {len(pairs)} cases"
    )
    return f"{text}; larger: {', '.join(larger)}." if larger else f"{text}."


def _weight_error(case: Case, name: str) -> float | None:
    entry = _entry(case, name)
    check = entry["check_before"] if entry else None
    if not check or "weight" not in case["gradients"] or not check["errors"]:
        return None
    return check["errors"][case["gradients"].index("weight")]


def _table(cases: Sequence[Case]) -> str:
    names = [n for n in (*PEERS, *OURS) if any(_entry(c, n) for c in cases)]
    peers, ours = [n for n in names if n in PEERS], [n for n in names if n in OURS]
    target = any("target_us" in case for case in cases)
    errors = any(_weight_error(case, n) is not None for case in cases for n in ours)
    header = ["rows x columns", *(LABELS[n] for n in peers), "floor"]
    header += ["target"] * target + [*(LABELS[n] for n in ours), "GB/s"]
    header += ["speedup (plain / dependent)", *(["error of dw (cutesuper / quack)"] * errors)]
    rows = []
    for case in cases:
        row = [case["label"], *(time_cell(_entry(case, n)) for n in peers)]
        row.append(number(case["floor_us"]["plain"]) or "?")
        row += [number(case.get("target_us"), 1)] * target
        row += [*(time_cell(_entry(case, n)) for n in ours), _rate(case)]
        row.append(" / ".join(_ratio(case, n) or "-" for n in ours))
        row += [_errors(case)] * errors
        rows.append(row)
    return markdown_table(header, rows)


def _host_table(cases: Sequence[Case]) -> str:
    names = [n for n in (*PEERS, OURS[0]) if any(_entry(c, n) for c in cases)]
    header = ["operator", "pass", *(LABELS[n] for n in names)]
    rows = [[case["operator"], case["step"], *(_host_cell(case, n) for n in names)]
            for case in cases]  # fmt: skip
    return markdown_table(header, rows)


def _host_cell(case: Case, name: str) -> str:
    entry = _entry(case, name)
    if entry is None:
        return ""
    return number(entry["host_us"]["median"], 1) if entry["host_us"] else entry["status"]


def _entry(case: Case, name: str) -> Case | None:
    return next((e for e in case["implementations"] if e["name"] == name), None)


def _ratio(case: Case, name: str) -> str:
    entry = _entry(case, name)
    return ratio_cell(entry, case) if entry else ""


def _rate(case: Case) -> str:
    entry = _entry(case, OURS[0])
    return number(entry["bandwidth_gbs"], 0) if entry else ""


def _errors(case: Case) -> str:
    pair = (_weight_error(case, name) for name in (OURS[0], "quack"))
    return " / ".join("-" if error is None else f"{error:.1e}" for error in pair)


# ------------------------------------------------------------------------------------------ summary


def _median(case: Case, name: str) -> float | None:
    entry = _entry(case, name)
    return entry["time_us"]["median"] if entry and entry["time_us"] else None


def _tally(cases: Sequence[Case]) -> str:
    entries = [(case, _entry(case, OURS[0])) for case in cases]
    ratios = [ratio_to_best_peer(entry, case) for case, entry in entries if entry]
    return " / ".join(map(str, tally(r for r in ratios if r is not None).values()))


def _over(cases: Sequence[Case], name: str) -> str:
    """The speed-up over one peer, where both ran."""
    pairs = [(_median(case, name), _median(case, OURS[0])) for case in cases]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    if not ratios:
        return "-"
    mean = exp(sum(map(log, ratios)) / len(ratios))
    return f"{mean:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _of_floor(cases: Sequence[Case]) -> str:
    entries = [_entry(case, OURS[0]) for case in cases]
    shares = [e["floor_percent"] for e in entries if e and e["floor_percent"] is not None]
    return f"{min(shares):.0f} to {max(shares):.0f} %" if shares else "-"


def _note(method: str, results: Case) -> str:
    e = results["environment"]
    versions: Row = [f"{LABELS[n]} {e[n]}" for n in ("quack", "liger") if e.get(n)]
    mixed = results["mix_order_reduction"]
    versions.append(
        f"torch.compile with its default options (mix_order_reduction {'on' if mixed else 'off'})"
    )
    return f"{method} {environments(results)}, {', '.join(versions)}."
