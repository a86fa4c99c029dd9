"""The output of the training examples: a table, whether losses agree, a plot, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common.report import device_name

from llama.training import Plan, Result

#: Largest difference between two loss curves, as part of the loss. Both start from the same weights
#: and see the same text, but round differently, and training amplifies that.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def describe(plan: Plan) -> str:
    """One line: the model, the batch, the device."""
    shape, kind = plan.shape, str(plan.dtype).removeprefix("torch.")
    return (
        f"{shape.layers} layers, width {shape.width}, {shape.vocabulary} words, {plan.steps} steps "
        f"of {plan.batch} x {shape.context} tokens, {kind} on {device_name(plan.device)}"
    )


def table(plan: Plan, results: list[Result]) -> str:
    """Times, memory and losses of each way; the first one is what the others are compared with."""
    tokens = plan.batch * plan.shape.context
    head = (
        f"{'way':14} {'first step s':>12} {'step ms':>9} {'tokens/s':>10} {'peak GiB':>9} "
        f"{'first loss':>10} {'last loss':>10} {'difference':>10} {'speedup':>8}"
    )
    lines = [head]
    for r in results:
        peak = "-" if r.peak_gib is None else f"{r.peak_gib:.2f}"
        lines.append(
            f"{r.way:14} {r.first_step_s:12.2f} {r.step_ms:9.2f} {tokens / r.step_ms * 1e3:10.0f} "
            f"{peak:>9} {r.losses[0]:10.4f} {r.losses[-1]:10.4f} "
            f"{difference(results[0], r):10.1e} {results[0].step_ms / r.step_ms:7.2f}x"
        )
    return "\n".join(lines)


def difference(a: Result, b: Result) -> float:
    """Largest difference between the losses of a step, as part of the loss of a.

    It is not a number if one of the losses is not.
    """
    x, y = torch.tensor([a.losses, b.losses], dtype=torch.float64)
    return ((x - y).abs() / x).max().item()


def agreement(plan: Plan, results: list[Result]) -> tuple[bool, str]:
    """True if all loss curves are the same within the tolerance, and a sentence that says so.

    A loss that is not a number agrees with nothing.
    """
    tolerance = TOLERANCE[plan.dtype]
    worst = torch.tensor([difference(results[0], r) for r in results]).max().item()
    same = worst <= tolerance
    verdict = "the same" if same else "NOT the same"
    return same, f"loss curves: {verdict}; largest difference {worst:.1e}, allowed {tolerance:.0e}"


def write_json(path: str, plan: Plan, results: list[Result], agree: bool) -> None:
    """The plan, the machine, every loss and time."""
    content: dict[str, Any] = {
        "plan": {
            **asdict(plan.shape), "batch": plan.batch, "steps": plan.steps, "seed": plan.seed,
            "dtype": str(plan.dtype), "device": device_name(plan.device),
            "torch": torch.__version__,
        },
        "tolerance": TOLERANCE[plan.dtype],
        "same_losses": agree,
        "results": [asdict(r) for r in results],
    }  # fmt: skip
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plot(path: str, plan: Plan, results: list[Result]) -> None:
    """Loss curves and step times, side by side; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, times = figure.subplots(1, 2, width_ratios=(2, 1))
    styles = ("-", "--", ":", "-.")
    for style, r in zip(styles, results, strict=False):
        losses.plot(range(1, plan.steps + 1), r.losses, style, label=r.way)
    losses.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    losses.legend()
    bars = times.bar([r.way for r in results], [r.step_ms for r in results])
    times.bar_label(bars, fmt="%.1f")
    times.set(ylabel="median step (ms)")
    figure.suptitle(describe(plan), fontsize=9)
    figure.savefig(path, dpi=150)
