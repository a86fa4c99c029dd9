"""The output of examples: a table, a verdict, a plot, JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .compare import Result

#: groups of bars that stand side by side, before panels are put below each other
ROW = 10
NO_PLOT = "no plot: matplotlib is not installed (pip install matplotlib)"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} ({torch.get_num_threads()} threads)"


def table(results: Sequence[Result]) -> str:
    """A line for each way of each task; speedups are over its first way."""
    width = max((len(r.task) for r in results), default=0)
    head = f"{'':{width}} {'way':10} {'first s':>8} {'ms':>10} {'speedup':>8} "
    lines = [f"{head}{'error':>8} {'allowed':>8}"]
    first: dict[str, Result] = {}
    for r in results:
        base = first.setdefault(r.task, r)
        lines.append(
            f"{r.task if base is r else '':{width}} {r.way:10} {r.first_s:8.2f} {r.ms:10.4f} "
            f"{base.ms / r.ms:7.2f}x {r.error:8.1e} {r.allowed:8.1e}"
        )
    return "\n".join(lines)


def verdict(results: Sequence[Result]) -> tuple[bool, str]:
    """True if all ways are right, and a sentence that says so.
    Times of wrong results mean nothing."""
    wrong = [r for r in results if not r.fine]
    if not wrong:
        return bool(results), f"{len(results)} results: all within the rule"
    told = "; ".join(
        f"{r.task}, {r.way}: {r.output} has error {r.error:.1e}, allowed {r.allowed:.1e}"
        for r in wrong
    )
    return False, f"NOT within the rule: {told}"


def finish(
    args: argparse.Namespace, title: str, device: torch.device, plan: Mapping[str, Any],
    results: Sequence[Result], parts: Collection[str] = (), **more: Any,
) -> int:  # fmt: skip
    """Say whether all is right, then times, JSON and plot; returns the exit status.

    Args:
        args: has `json` and `out`.
        title: of the plot.
        device: of everything.
        plan: sizes and the like, for the JSON.
        results: of all tasks.
        parts: tasks that have a panel of their own.
        more: for the JSON.
    """
    fine, sentence = verdict(results)
    print(sentence)
    if args.json:
        write_json(args.json, title, device, plan, results, **more)
    if not fine:
        return 1
    print(table(results))
    if args.out:
        times = by_task(results)
        panels = {
            "all": {k: v for k, v in times.items() if k not in parts},
            "parts": {k: v for k, v in times.items() if k in parts},
        }
        panels = {name: groups for name, groups in panels.items() if groups}
        plot(args.out, title, panels, dict.fromkeys(panels, "ms"))
    return 0


def write_json(
    path: str, title: str, device: torch.device, plan: Mapping[str, Any],
    results: Sequence[Result], **more: Any,
) -> None:  # fmt: skip
    """The plan, the machine, every error and time."""
    content = {
        "title": title, "plan": dict(plan), "device": device_name(device),
        "torch": torch.__version__, "same": verdict(results)[0],
        "results": [asdict(r) for r in results], **more,
    }  # fmt: skip
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def can_plot() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: str, title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]],
         units: Mapping[str, str]) -> None:  # fmt: skip
    """Bars for every panel; says so where there is no matplotlib.

    Args:
        path: of the PNG or SVG.
        title: above everything.
        panels: by title; of each, by what a bar stands for, its height in every way.
        units: of each panel, what its heights are.
    """
    if not can_plot():
        print(NO_PLOT)
        return
    from matplotlib.figure import Figure

    every = [heights for groups in panels.values() for heights in groups.values()]
    ways = list(dict.fromkeys(way for heights in every for way in heights))
    counts = [len(groups) for groups in panels.values()]
    if sum(counts) > ROW:
        figure = Figure(figsize=(1.5 + 1.3 * max(counts), 2.8 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    else:
        figure = Figure(figsize=(1.5 * len(panels) + 1.3 * sum(counts), 4), layout="constrained")
        axes = figure.subplots(1, len(panels), width_ratios=counts, squeeze=False)[0]
    for axis, (name, groups) in zip(axes, panels.items(), strict=True):
        _bars(axis, groups, ways)
        axis.set(title=name, ylabel=units[name])
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def _bars(axis: Any, groups: Mapping[str, Mapping[str, float]], ways: Sequence[str]) -> None:
    width = 0.8 / max(1, len(ways))
    for k, way in enumerate(ways):
        places = [i for i, heights in enumerate(groups.values()) if way in heights]
        heights = [h[way] for h in groups.values() if way in h]
        bars = axis.bar([i + k * width for i in places], heights, width, label=way, color=f"C{k}")
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(groups))], list(groups),
                    fontsize=8)  # fmt: skip


def by_task(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Milliseconds of every way of every task, as `plot` wants them."""
    found: dict[str, dict[str, float]] = {}
    for r in results:
        found.setdefault(r.task, {})[r.way] = r.ms
    return found
