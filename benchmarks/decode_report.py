"""Tables of whole models: tokens per second of a step of decoding, and regions of other models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.sweep_report import environments, failures, ratio_cell, time_cell
from benchmarks.tables import LABELS, Row, markdown_table, number, ratio_to_best_peer, tally_text

Case = dict[str, Any]

COLUMNS = ("eager", "eager-graph", "compile", "compile-max", "cutesuper-backend", "cutesuper")
HEADINGS = LABELS | {
    "eager-graph": "SDPA in a CUDA graph",
    "cutesuper-backend": '**torch.compile(backend="cutesuper")**',
}
STEP_METHOD = (
    "Tokens per second of all sequences together, from the median step, which computes the last "
    "token that the cache has room for. All but eager, which is launched from Python, are one CUDA "
    'graph a step (for torch.compile this is its mode "reduce-overhead"); attention of PyTorch is '
    "scaled_dot_product_attention by cuDNN. A column cutesuper: kernels of cs.superoptimize by "
    "hand, and rotary positions by torch.compile. Floor: a kernel that reads the weights and the "
    "cache. All columns of a line interleaved in one run; logits checked against float64 before "
    "and after. Speedup: over the fastest correct PyTorch column."
)
REGION_METHOD = (
    "Microseconds per call, median; cold L2; all columns of a line interleaved in one run, outputs "
    "checked against float64 before and after. cutesuper: cs.superoptimize of the PyTorch function."
)


def decode_markdown(results: Case) -> str:
    """A table of steps, and one of regions."""
    parts = []
    steps = [case for case in results["cases"] if case["group"].startswith("llama")]
    regions = [case for case in results["cases"] if not case["group"].startswith("llama")]
    if steps:
        parts += [_outcome(steps), _steps(steps), STEP_METHOD]
    if regions:
        parts += [_regions(regions), REGION_METHOD]
    return "\n\n".join([*parts, *failures(results), f"{environments(results)}."])


def _outcome(cases: Sequence[Case]) -> str:
    """Wins, ties and losses of the best of ours."""
    best: dict[str, float] = {}
    for case in cases:
        ours = [e for e in case["implementations"] if e["kind"] == "ours"]
        ratios = [r for e in ours if (r := ratio_to_best_peer(e, case)) is not None]
        if ratios:
            best[case["key"]] = max(ratios)
    return (
        f"cutesuper against the fastest PyTorch column, in {len(cases)} cases: {tally_text(best)}."
    )


def _model(case: Case) -> str:
    return str(case["title"]).partition(",")[0]


def _entry(case: Case, name: str) -> Case | None:
    return next((e for e in case["implementations"] if e["name"] == name), None)


def _names(cases: Sequence[Case]) -> list[str]:
    return [n for n in COLUMNS if any(_entry(case, n) for case in cases)]


def _steps(cases: Sequence[Case]) -> str:
    names = _names(cases)
    ours = [n for n in names if n.startswith("cutesuper")]
    extents = ("batch", "tokens in the cache", "layers")
    header = ["model", *extents, *(HEADINGS[n] for n in names), "floor"]
    rows = []
    for case in cases:
        floor = case["floor_us"]["plain"]
        row: Row = [_model(case), *map(str, case["shape"])]
        row += [_rate(case, _entry(case, n)) for n in names]
        rows.append([*row, _tokens(case, floor) if floor else "?", _ratios(case, ours)])
    return markdown_table([*header, "speedup"], rows)


def _rate(case: Case, entry: Case | None) -> str:
    if entry is None or entry["time_us"] is None:
        return time_cell(entry)
    return _tokens(case, entry["time_us"]["median"])


def _tokens(case: Case, us: float) -> str:
    return number(case["shape"][0] / us * 1e6, 0)


def _regions(cases: Sequence[Case]) -> str:
    names = _names(cases)
    ours = [n for n in names if n.startswith("cutesuper")]
    header = ["region", "shape", *(HEADINGS[n] for n in names), "floor", "speedup"]
    rows = [
        [case["title"], case["label"], *(time_cell(_entry(case, n)) for n in names),
         number(case["floor_us"]["plain"]) or "?", _ratios(case, ours)]
        for case in cases
    ]  # fmt: skip
    return markdown_table(header, rows)


def _ratios(case: Case, ours: Sequence[str]) -> str:
    return " / ".join(ratio_cell(_entry(case, n), case) or "-" for n in ours)
