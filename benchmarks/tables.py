"""Text and Markdown tables; the best peer; a line on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Row = list[str]
LABELS = {
    "cutesuper": "**cutesuper**",
    "cutesuper-pdl": "**cutesuper, dependent launch**",
    "eager": "PyTorch eager",
    "eager-graph": "PyTorch eager in a CUDA graph",
    "compile": "torch.compile",
    "compile-max": "torch.compile max-autotune",
    "matmul-alone": "cuBLAS matmul alone",
    "sdpa-flash": "SDPA, flash",
    "sdpa-cudnn": "SDPA, cuDNN",
    "sdpa-efficient": "SDPA, memory-efficient",
    "fa4": "FlashAttention-4",
    "liger": "Liger",
    "quack": "quack",
}


def number(value: float | None, digits: int = 2) -> str:
    """A number with fixed point; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def print_table(title: str, header: Row, rows: Sequence[Row], bold: Collection[str] = ()) -> None:
    """Print a table with rich if it is installed, else as aligned plain text.

    Args:
        title: the line above.
        header: of the columns; the first and the last are aligned left, and the last may wrap.
        rows: as wide as ``header``.
        bold: first cells of rows that stand out.
    """
    try:
        _print_rich(title, header, rows, bold)
    except ImportError:
        print(plain_table(title, header, rows))


def _print_rich(title: str, header: Row, rows: Sequence[Row], bold: Collection[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for i, column in enumerate(header):
        last = len(header) - 1
        table.add_column(column, justify="left" if i in (0, last) else "right", no_wrap=i != last)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style="bold" if row[0] in bold else "")
    # a log file has no width; the default of 80 columns would cut the numbers off
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def plain_table(title: str, header: Row, rows: Sequence[Row]) -> str:
    """A table as aligned text."""
    lines = [header, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header) - 1)]
    text = [title]
    for row in lines:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        text.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(text)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown; columns after the first are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(_markdown_row(line) for line in lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def describe_environment(results: dict[str, Any]) -> str:
    """One line with device, versions and commit."""
    e = results["environment"]
    parts = [e.get("gpu"), _named("driver", e.get("driver")), _named("CUDA", e.get("cuda"))]
    parts += [_named("torch", e.get("torch")), _named("Triton", e.get("triton"))]
    parts += [_named("CuTe DSL", e.get("cutlass_dsl")), e.get("date")]
    commit = e.get("commit")
    if commit:
        parts.append(f"commit {commit[:10]}{' (modified)' if e.get('dirty') else ''}")
    parts += several_runs(e)
    return ", ".join(part for part in parts if part)


def several_runs(environment: dict[str, Any]) -> list[str]:
    """The peers whose times are the fastest of several runs; see `benchmarks.best`."""
    best_of = environment.get("best_of", {})
    return [f"{LABELS.get(p, p)}: the fastest of {runs} runs" for p, runs in best_of.items()]


def _named(name: str, value: str | None) -> str | None:
    return f"{name} {value}" if value else None


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


#: medians of one run that differ by no more than this part are a tie
TIE = 0.01


def outcome_of(ratio: float) -> str:
    """``win``, ``tie`` or ``loss``, for the best peer's time over ours."""
    if abs(ratio - 1) <= TIE:
        return "tie"
    return "win" if ratio > 1 else "loss"


def tally(ratios: Iterable[float]) -> dict[str, int]:
    """Numbers of wins, ties and losses, in this order."""
    found = Counter(map(outcome_of, ratios))
    return {word: found[word] for word in ("win", "tie", "loss")}


def tally_text(ratios: Mapping[str, float]) -> str:
    """``5 wins, 1 tie (within 1 %), 1 loss; tie: a (1.003x); loss: b (0.900x)``."""
    counts = tally(ratios.values())
    words = {w: w if n == 1 else {"loss": "losses"}.get(w, f"{w}s") for w, n in counts.items()}
    within = {"tie": f" (within {TIE:.0%})".replace("%", " %")}
    parts = [", ".join(f"{n} {words[w]}{within.get(w, '')}" for w, n in counts.items())]
    for word in ("tie", "loss"):
        named = [f"{n} ({r:.3f}x)" for n, r in ratios.items() if outcome_of(r) == word]
        parts += [f"{words[word]}: {', '.join(named)}"] if named else []
    return "; ".join(parts)
