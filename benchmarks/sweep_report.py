"""Tables of the measurements of many cases: inference workloads, layers of models, the chain."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.tables import (
    LABELS,
    Row,
    describe_environment,
    markdown_table,
    number,
    ratio_to_best_peer,
    tally_text,
)

PEERS = ("eager", "compile", "compile-max", "matmul-alone")
OURS = ("cutesuper", "cutesuper-pdl")
#: a workload of these tables may have several products
PRODUCTS = LABELS | {"matmul-alone": "cuBLAS products alone"}
METHOD = (
    "Microseconds per call, median; cold L2; all columns of a line interleaved in one run, outputs "
    "checked against float64 before and after. Floor: a kernel that only reads as many bytes. "
    "Speedup: fastest correct PyTorch column over each cutesuper column."
)
LAYERS_METHOD = f"{METHOD} Tensors are float16 where the title of a table names no other type."

#: rows from which layers are held against their products alone; the default batches end below
MANY_ROWS = 65
#: characters of an error that are shown unchanged
LONG_REASON = 200


def inference_markdown(results: dict[str, Any]) -> str:
    """One line for each workload and shape."""
    names = _present(results)
    header = ["workload", "shape", *_columns(names)]
    rows = [[case["title"], case["label"], *_cells(case, names)] for case in results["cases"]]
    notes = [*outcome(results), f"{METHOD} {environments(results)}."]
    return "\n\n".join([markdown_table(header, rows), *notes])


def layers_markdown(results: dict[str, Any]) -> str:
    """A table for each model, with a line for each layer and batch size.
    Above them, how we compare with PyTorch and, from MANY_ROWS on, with products alone."""
    names = _present(results)
    header = ["layer", "batch", "inner x columns", *_columns(names)]
    parts = []
    for model in dict.fromkeys(case["model"] for case in results["cases"]):
        rows = [_layer_row(case, names) for case in results["cases"] if case["model"] == model]
        parts.append(f"**{model}**\n\n{markdown_table(header, rows)}")
    tally, *failed = outcome(results)
    whole = not {"eager", "compile", "compile-max"}.isdisjoint(names)
    said = [*[tally] * whole, *_beside_products(results), *failed]
    return "\n\n".join([*said, *parts, f"{LAYERS_METHOD} {environments(results)}."])


def _beside_products(results: dict[str, Any]) -> list[str]:
    """A sentence on the layers with many rows, if any was measured beside its products alone."""
    found = {
        _case_name(case): ratio
        for case in results["cases"]
        if case["batch"] >= MANY_ROWS and (ratio := _ratio_to_products(case)) is not None
    }
    if not found:
        return []
    worst, count = max(found, key=lambda name: found[name]), len(found)
    text = (
        f"From a batch of {MANY_ROWS} rows on, cutesuper, launched like the others, takes for a "
        f"whole layer, norms, residuals and gates included, {median(found.values()):.2f}x the time "
        "of cuBLAS for the layer's matrix products alone, in the median of "
        f"{count} case{'s' * (count > 1)}, and {found[worst]:.2f}x at worst ({worst}); it takes no "
        f"longer than these products in {sum(r <= 1 for r in found.values())} of {count}."
    )
    return [text]


def _ratio_to_products(case: dict[str, Any]) -> float | None:
    """Our time with a plain launch over that of the products; None if either was not timed."""
    times = {i["name"]: i["time_us"] for i in case["implementations"]}
    ours, products = times.get(OURS[0]), times.get("matmul-alone")
    return ours["median"] / products["median"] if ours and products else None


def _layer_row(case: dict[str, Any], names: list[str]) -> Row:
    _, inner, columns = case["shape"]
    return [case["layer"], str(case["batch"]), f"{inner} x {columns}", *_cells(case, names)]


def chain_markdown(results: dict[str, Any]) -> str:
    """A line for each implementation, and the floor."""
    [case] = results["cases"]
    rows = [
        _chain_row(LABELS[entry["name"]], entry, case, results["layers"])
        for entry in case["implementations"]
        if entry["kind"] != "floor"
    ]
    for launch, label in (("plain", "floor"), ("pdl", "floor, dependent launch")):
        us = case["floor_us"][launch]
        rows.append([label, number(us), number(us and us * results["layers"], 0), "", ""])
    header = ["", "us per layer", "us in all", "speedup", "rel. error at the end"]
    note = (
        f"{results['layers']} layers {case['label']}, {results['dtype']}, different weights, each "
        "layer reading what the one before writes, in one CUDA graph (for torch.compile this is "
        'its mode "reduce-overhead"). Speedup: over the fastest correct PyTorch line. The end of '
        "the chain is checked against float64: at most twice PyTorch's own error through the "
        "same chain, plus 2 ulp."
    )
    notes = [*failures(results), f"{note} {environments(results)}."]
    return "\n\n".join([markdown_table(header, rows), *notes])


def _chain_row(label: str, entry: dict[str, Any], case: dict[str, Any], layers: int) -> Row:
    time, check = entry["time_us"], entry["check_after"]
    if time is None:
        return [label, entry["status"], "", "", ""]
    error = f"{check['relative_error']:.1e}" if check else ""
    total = number(time["median"] * layers, 0)
    ratio = ratio_cell(entry, case) if entry["kind"] == "ours" else ""
    return [label, number(time["median"]), total, ratio, error]


def _present(results: dict[str, Any]) -> list[str]:
    """Peers that took part in any case, and ours."""
    there = {i["name"] for case in results["cases"] for i in case["implementations"]}
    return [name for name in (*PEERS, *OURS) if name in there]


def _columns(names: list[str]) -> Row:
    peers = [PRODUCTS[n] for n in names if n in PEERS]
    ours = [PRODUCTS[n] for n in names if n in OURS]
    return [*peers, "floor (plain / dependent)", *ours, "speedup (plain / dependent)"]


def _cells(case: dict[str, Any], names: list[str]) -> Row:
    entries = {i["name"]: i for i in case["implementations"]}
    peers = [time_cell(entries.get(n)) for n in names if n in PEERS]
    ours = [time_cell(entries.get(n)) for n in names if n in OURS]
    floor = " / ".join(number(case["floor_us"][k]) or "?" for k in ("plain", "pdl"))
    ratios = " / ".join(ratio_cell(entries.get(n), case) or "-" for n in names if n in OURS)
    return [*peers, floor, *ours, ratios]


def time_cell(entry: dict[str, Any] | None) -> str:
    """Microseconds of an implementation, or why there are none; empty if it took no part."""
    if entry is None:
        return ""
    if entry["time_us"] is None:
        return entry["status"] if entry["status"] != "ok" else "not timed"
    return number(entry["time_us"]["median"])


def ratio_cell(entry: dict[str, Any] | None, case: dict[str, Any]) -> str:
    """The speed-up over the best peer."""
    ratio = ratio_to_best_peer(entry, case) if entry else None
    return "" if ratio is None else f"{ratio:.2f}x"


def outcome(results: dict[str, Any], others: str = "PyTorch") -> list[str]:
    """Wins, ties and losses of plain launches in a sentence, and everything that failed.
    ``others`` is the name of the peers' columns."""
    ratios: dict[str, float] = {}
    for case in results["cases"]:
        entry = next((i for i in case["implementations"] if i["name"] == OURS[0]), None)
        ratio = ratio_to_best_peer(entry, case) if entry else None
        if ratio is not None:
            ratios[_case_name(case)] = ratio
    text = (
        f"cutesuper, launched like the others, against the fastest {others} column, in "
        f"{len(results['cases'])} cases: {tally_text(ratios)}."
    )
    return [text, *failures(results)]


def failures(results: dict[str, Any]) -> list[str]:
    """A line for each implementation and reason, with the cases it happened in."""
    lines = [f"* {_case_name(c)}: {c['error']}" for c in results["cases"] if c["error"]]
    found: dict[str, list[str]] = {}
    for case in results["cases"]:
        for entry in case["implementations"]:
            if entry["status"] != "ok" and entry["kind"] != "floor":
                reason = entry["error"] or "not reached"
                if len(reason) > LONG_REASON:  # the sentences after the first are advice
                    reason = reason.split(". ")[0]
                text = f"{entry['name']}: {entry['status']}: {reason}"
                found.setdefault(text, []).append(_case_name(case))
    for text, names in found.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"* {'; '.join(names[:2])}{more}, {text}")
    return ["\n".join(["Failures:", "", *lines])] if lines else []


def _case_name(case: dict[str, Any]) -> str:
    if "model" in case:
        return f"{case['model']} {case['layer']} {case['batch']}"
    return f"{case.get('title', '')} {case['label']}".strip()


def environments(results: dict[str, Any]) -> str:
    """The environment of the measurements; several if the table is from several files."""
    all_of_them = results.get("environments", [results["environment"]])
    lines = dict.fromkeys(describe_environment({"environment": e}) for e in all_of_them)
    return "; ".join(lines)
