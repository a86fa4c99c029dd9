"""The short table, the sentence and the picture of the README: one case of each kind of program.

    python -m benchmarks.summary benchmarks/results README.md docs/summary.svg

Cases are chosen here by hand, one for each kind, also where cutesuper loses; every figure is read
from the results. The sentence stands between ``<!-- bench:headline -->`` and its end, the table
between ``<!-- bench:summary -->`` and its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.picture import COLOURS, FILLED, add, as_text, both_schemes, new_picture
from benchmarks.report import load_results, replace_table, write_atomically
from benchmarks.tables import (
    LABELS,
    best_peer,
    describe_environment,
    markdown_table,
    number,
    outcome_of,
    ratio_to_best_peer,
    several_runs,
)

#: of the picture, in pixels: a line, the names on the left, the bars, the head, the foot
LINE, NAMES, BARS, HEAD, FOOT = 28, 380, 330, 44, 14


@dataclass(frozen=True)
class Choice:
    """A line of the table.

    Attributes:
        file: of the results, without ``.json``.
        key: of the case in it.
        program: what a reader is told that it is.
        ours: the implementation that stands for cutesuper.
    """

    file: str
    key: str
    program: str
    ours: str = "cutesuper"


CHOICES = (
    Choice("inference", "rmsnorm_linear/16x4096x4096", "RMSNorm + Linear, 16 rows, 4096 to 4096"),
    Choice("inference", "gated_mlp/8x4096x4096", "gated MLP, 8 rows, 4096 to 4096"),
    Choice("inference", "lora/16x4096x4096x16", "LoRA of rank 16, 16 rows, 4096 to 4096"),
    Choice("attention", "few/gqa/16x256x4096x64", "attention, 16 x 256 queries, 4096 keys, d = 64"),
    Choice("attention", "decode/8x4096", "attention, one token, 8 sequences, 4096 keys"),
    Choice("prefill", "prefill/4096", "attention, causal prefill, 4096 tokens"),
    Choice("training", "rmsnorm/rms_norm/backward/4096x4096", "RMSNorm backward, 4096 x 4096"),
    Choice(
        "models", "llama-3.2-1b/1/1024", "Llama-3.2-1B of transformers, a step, 1024 keys",
        "cutesuper-backend",
    ),
)  # fmt: skip
#: peers with a version of their own in the environment of a run
PACKAGES = {"fa4": "flash_attn_4", "liger": "liger", "quack": "quack"}


@dataclass(frozen=True)
class Line:
    """The figures of a choice.

    Attributes:
        choice: what was chosen.
        dtype: element type of the tensors.
        peer: name of the fastest correct implementation that is not ours.
        peer_us, ours_us, floor_us: medians in microseconds.
        ratio: ``peer_us / ours_us``.
        environment: what it was measured with.
    """

    choice: Choice
    dtype: str
    peer: str
    peer_us: float
    ours_us: float
    floor_us: float
    ratio: float
    environment: dict[str, Any]


def read_lines(folder: Path) -> list[Line]:
    """Figures of all choices.

    Raises:
        OSError: a file of results is missing.
        ValueError: a file has no such case, or the case has no times.
    """
    files = {c.file: load_results(folder / f"{c.file}.json") for c in CHOICES}
    return [_line(choice, files[choice.file]) for choice in CHOICES]


def _line(choice: Choice, results: dict[str, Any]) -> Line:
    case = next((c for c in results["cases"] if c["key"] == choice.key), None)
    if case is None:
        raise ValueError(f"{choice.file}.json: no case {choice.key}")
    ours = next((e for e in case["implementations"] if e["name"] == choice.ours), None)
    peer, floor = best_peer(case), case["floor_us"]["plain"]
    ratio = ratio_to_best_peer(ours, case) if ours else None
    if ours is None or peer is None or floor is None or ratio is None:
        raise ValueError(f"{choice.file}.json: {choice.key} lacks {choice.ours}, a peer or a floor")
    return Line(
        choice, case.get("dtype", results["dtype"]), peer["name"], peer["time_us"]["median"],
        ours["time_us"]["median"], floor, ratio, results["environment"],
    )  # fmt: skip


def headline(lines: Sequence[Line]) -> str:
    """The first line as a sentence."""
    first = lines[0]
    return (
        f"**{first.choice.program}, {first.dtype}, on {first.environment['gpu']}: "
        f"{number(first.ours_us)} us.** The fastest that PyTorch has, {LABELS[first.peer]}, takes "
        f"{number(first.peer_us)} us ({first.ratio:.2f}x); a kernel that only reads as many bytes "
        f"takes {number(first.floor_us)} us."
    )


def table(lines: Sequence[Line]) -> str:
    """A row for each line, then the versions of everything measured."""
    header = ["program", "type", "fastest other", "us", "**cutesuper**, us", "floor, us", "speedup"]
    rows = [
        [e.choice.program, e.dtype, LABELS[e.peer], number(e.peer_us), number(e.ours_us),
         number(e.floor_us), f"{e.ratio:.2f}x"]
        for e in lines
    ]  # fmt: skip
    return f"{markdown_table(header, rows)}\n\n{_measured_with(lines)}"


def _measured_with(lines: Sequence[Line]) -> str:
    """Machines and versions; runs that differ in date and commit only are named together."""
    runs: dict[str, list[str]] = {}
    for line in lines:
        e = line.environment
        machine = describe_environment(
            {"environment": e | {"date": None, "commit": None, "best_of": {}}}
        )
        modified = " (modified)" if e.get("dirty") else ""
        runs.setdefault(machine, []).append(f"{e['commit'][:10]} of {e['date']}{modified}")
    texts = [f"{m}; commits {', '.join(dict.fromkeys(commits))}" for m, commits in runs.items()]
    peers = {e.peer: e.environment[PACKAGES[e.peer]] for e in lines if e.peer in PACKAGES}
    versions = [f"{LABELS[name]} {version}" for name, version in peers.items()]
    several = dict.fromkeys(text for line in lines for text in several_runs(line.environment))
    return "; ".join([*texts, *versions, *several]) + "."


def picture(lines: Sequence[Line]) -> str:
    """The SVG of the speedups: a bar for each line, and a rule at 1."""
    unit = BARS / ceil(max(e.ratio for e in lines))
    height = HEAD + LINE * len(lines) + FOOT
    svg = new_picture("Speedup over the fastest other", _style(), NAMES + BARS + 60, height)
    gpus = ", ".join(dict.fromkeys(e.environment["gpu"] for e in lines))
    head = f"Speedup over the fastest other implementation, {gpus} (1 is as fast)"
    add(svg, "text", "ink head", head, x=16, y=26)
    for n, line in enumerate(lines):
        y = HEAD + n * LINE
        end = NAMES + line.ratio * unit
        look = outcome_of(line.ratio)
        add(svg, "text", "ink", line.choice.program, x=16, y=y + 17)
        add(svg, "rect", f"mark {look}", x=NAMES, y=y + 4, width=end - NAMES, height=LINE - 10)
        beside = max(end, NAMES + unit) + 6  # not upon the rule
        add(svg, "text", "ink", f"{line.ratio:.2f}x", x=beside, y=y + 17)
    add(svg, "path", "ink rule", d=f"M{NAMES + unit:.1f},{HEAD}v{LINE * len(lines)}")
    return as_text(svg)


def _style() -> str:
    colours = {
        **COLOURS, "win": ("#54aeff", "#1f6feb"), "tie": ("#8c959f", "#6e7681"),
        "loss": ("#d4a72c", "#9e6a03"),
    }  # fmt: skip
    return (
        "text { font: 13px system-ui, sans-serif; } .head { font-weight: 600; }\n"
        f"{FILLED}.rule {{ stroke: currentColor; stroke-dasharray: 3 3; }}\n{both_schemes(colours)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.summary``; 0 when both files were written, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary")
    parser.add_argument("results", type=Path, help="folder with the JSON of benchmark runs")
    parser.add_argument("page", type=Path, help="page whose sentence and table are rewritten")
    parser.add_argument("picture", type=Path, help="SVG that is written")
    arguments = parser.parse_args(argv)
    try:
        lines = read_lines(arguments.results)
        text = replace_table(arguments.page.read_text(), "headline", headline(lines))
        text = replace_table(text, "summary", table(lines))
        write_atomically(arguments.page, text)
        write_atomically(arguments.picture, picture(lines))
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
