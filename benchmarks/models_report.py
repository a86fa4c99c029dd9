"""Tables of what torch.compile gets: steps of models of a library, and single modules."""

from __future__ import annotations

from math import exp, log
from typing import Any

from benchmarks.sweep_report import environments, failures, ratio_cell, time_cell
from benchmarks.tables import LABELS, Row, markdown_table, number, ratio_to_best_peer

Case = dict[str, Any]

COLUMNS = ("eager-graph", "compile", "cutesuper-patch", "cutesuper-backend")
HEADINGS = LABELS | {
    "cutesuper-patch": "**cs.patch**",
    "cutesuper-backend": '**torch.compile(backend="cutesuper")**',
    "cutesuper-optim": "**the same, cs.optim.AdamW**",
}
METHOD = (
    "Milliseconds of a step, median; every implementation is one CUDA graph, and all columns of a "
    "line are interleaved in one run; logits checked against float64 before and after. Random "
    "weights, bfloat16, a half full StaticCache, rings of `cs.generate` for windows. Floor: a "
    "kernel that reads the weights and the filled part of the cache. Speedup: over the fastest "
    "correct PyTorch column. First call: seconds until a step can be captured, of torch.compile "
    "and of ours. Host: milliseconds that a call takes the host where no graph is replayed."
)


def models_markdown(results: Case) -> str:
    """A line for each model and number of sequences."""
    names = [n for n in COLUMNS if any(_entry(c, n) for c in results["cases"])]
    ours = [n for n in names if n.startswith("cutesuper")]
    header = ["model", "sequences", "tokens", *(HEADINGS[n] for n in names), "floor", "speedup"]
    header += ["first call", "host"]
    rows = [_row(case, names, ours) for case in results["cases"]]
    parts = [markdown_table(header, rows), METHOD, *failures(results), f"{environments(results)}."]
    return "\n\n".join(parts)


MODULES_METHOD = (
    "Microseconds per call, median; cold L2; all columns of a line interleaved in one run, outputs "
    "checked against float64 before and after. Floor: a kernel that only reads as many bytes. "
    "Speedup: over the fastest correct PyTorch column."
)


def modules_markdown(results: Case) -> str:
    """A line for each module, and the mean of the ratios."""
    names = ("eager", "compile", "cutesuper-backend")
    header = ["module", *(HEADINGS[n] for n in names), "floor", "speedup"]
    rows: list[Row] = []
    ratios: list[float] = []
    for case in results["cases"]:
        ours = _entry(case, names[-1])
        floor = number(case["floor_us"]["plain"]) or "?"
        times = [time_cell(_entry(case, n)) for n in names]
        rows.append([case["title"], *times, floor, ratio_cell(ours, case) or "-"])
        if ours is not None and (ratio := ratio_to_best_peer(ours, case)) is not None:
            ratios.append(ratio)
    mean = exp(sum(map(log, ratios)) / len(ratios)) if ratios else 0.0
    least = min(ratios, default=0.0)
    said = f"{len(ratios)} modules: {mean:.2f}x in the geometric mean, {least:.2f}x at least."
    parts = [said, markdown_table(header, rows), MODULES_METHOD, *failures(results)]
    return "\n\n".join([*parts, f"{environments(results)}."])


STEPS_METHOD = (
    "Forward, loss, backward and AdamW (PyTorch's fused one, where nothing else is said) of models "
    "of transformers with random weights, bfloat16, random tokens, sequences x tokens as said. "
    "Milliseconds of a step, median of the wall clock, waiting for each; peak of allocated memory; "
    "seconds of the first step with empty caches / in a second process. Every cell is a process of "
    "its own, one after the other on one machine. Losses of all steps within 1 % of each other. "
    "Speedup: over the fastest correct PyTorch column."
)


def steps_markdown(results: Case) -> str:
    """A line for each model and implementation, and where the time of kernels goes."""
    header = ["model", "layers", "tokens", "", "ms", "GiB", "first step, s", "speedup"]
    rows, kernels = list[Row](), list[Row]()
    kinds = sorted({k for c in results["cases"] for e in c["implementations"]
                    for k in e.get("kernels_ms", ())})  # fmt: skip
    for case in results["cases"]:
        batch, tokens = case["shape"]
        for e in case["implementations"]:
            name = str(HEADINGS.get(e["name"], e["name"]))
            same: list[str] = [case["title"], str(case["layers"]), f"{batch} x {tokens}", name]
            if e["status"] != "ok":
                rows.append([*same, e["status"], "", "", ""])
                continue
            ours = e["kind"] == "ours"
            first = f"{e['cold_s']:.0f} / {e['first_s']:.0f}"
            ratio = (ratio_cell(e, case) or "-") if ours else ""
            rows.append([*same, _time(e), number(e["peak_gib"], 2), first, ratio])
            spent = (e["kernels_ms"].get(k) for k in kinds)
            kernels.append([case["title"], name, *(number(ms, 2) if ms else "" for ms in spent)])
    parts = [
        markdown_table(header, rows), STEPS_METHOD,
        "Milliseconds of kernels in a step, by kind:",
        markdown_table(["model", "", *kinds], kernels), *failures(results),
    ]  # fmt: skip
    return "\n\n".join([*parts, f"{environments(results)}."])


def _row(case: Case, names: list[str], ours: list[str]) -> Row:
    floor = case["floor_us"]["plain"]
    return [
        case["group"], *map(str, case["shape"]), *(_time(_entry(case, n)) for n in names),
        number(floor and floor / 1e3, 3) or "?",
        " / ".join(ratio_cell(_entry(case, n), case) or "-" for n in ours),
        *_of_calls(_entry(case, "compile"), _entry(case, "cutesuper-backend")),
    ]  # fmt: skip


def _of_calls(*entries: Case | None) -> tuple[str, str]:
    """Seconds of first calls, and milliseconds of the host in later ones."""
    first = [number(e["prepare_seconds"], 0) if e else "-" for e in entries]
    spent = [e["host_us"]["median"] / 1e3 if e and e["host_us"] else None for e in entries]
    return " / ".join(first), " / ".join(number(ms, 1) or "-" for ms in spent)


def _entry(case: Case, name: str) -> Case | None:
    return next((e for e in case["implementations"] if e["name"] == name), None)


def _time(entry: Case | None) -> str:
    if entry is None or entry["time_us"] is None:
        return time_cell(entry)
    return number(entry["time_us"]["median"] / 1e3, 3)
