"""``python -m benchmarks heads``: a linear layer and its cross entropy, forward and backward.

What a language model ends with, in training: the mean loss of tokens, and the gradients of the
hidden rows and of the weight. Every tenth token is ignored. Times are those of plain calls behind
others, so that the device never waits for the host, as in a training step; memory is the peak
beyond the inputs, gradients included.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.check import Expected, check_outputs, measure_error
from benchmarks.cli import ours_failed, require_device
from benchmarks.device import CudaBackend, environment
from benchmarks.heads_report import heads_markdown
from benchmarks.report import SCHEMA, save_results
from benchmarks.spread import summarize
from benchmarks.sweep import names_of
from benchmarks.workload import DTYPES

DTYPE = "bfloat16"
IGNORED = -100
ROUNDS = 20
#: rows of float64 logits at a time: 1 GB of 128256 words
EXACT_ROWS = 1024
#: relative difference of the loss from float64; that of logits which are rounded to bfloat16 is
#: smaller by an order of magnitude
CLOSE = 1e-3

F = torch.nn.functional
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Head:
    """Extents: tokens, hidden width, words."""

    tokens: int
    hidden: int
    words: int

    @property
    def name(self) -> str:
        """As the command line names it."""
        return f"{self.tokens}x{self.hidden}x{self.words}"

    @property
    def flops(self) -> int:
        """Operations of the three products."""
        return 6 * self.tokens * self.hidden * self.words


HEADS = {
    h.name: h
    for h in (
        Head(4096, 4096, 128256), Head(8192, 4096, 128256), Head(16384, 4096, 128256),
        Head(8192, 2048, 128256),
    )
}  # fmt: skip


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORED)


def _compiled() -> Loss:
    return torch.compile(_eager, dynamic=False)


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]

    return loss


def _ours() -> Loss:
    import cutesuper as cs

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cs.ops.linear_cross_entropy(x, weight, target, ignore_index=IGNORED)

    return loss


IMPLEMENTATIONS: dict[str, Callable[[], Loss]] = {
    "cutesuper": _ours,
    "eager": lambda: _eager,
    "compile": _compiled,
    "liger": _liger,
}


class Problem:
    """Inputs of a head on a device, and what is expected.

    Args:
        head: its extents.
        device: of the inputs.
    """

    def __init__(self, head: Head, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, device=device)
            return made.to(DTYPES[DTYPE])

        self.x = normal(head.tokens, head.hidden).requires_grad_()
        weight = normal(head.words, head.hidden) * head.hidden**-0.5
        self.weight = weight.requires_grad_()
        shape = (head.tokens,)
        self.target = torch.randint(head.words, shape, generator=generator, device=device)
        self.target[::10] = IGNORED
        self.cuda = device.type == "cuda"

    def call(self, loss: Loss) -> torch.Tensor:
        """The loss, whose gradients are left in the inputs."""
        self.x.grad = self.weight.grad = None
        found = loss(self.x, self.weight, self.target)
        found.backward()
        return found.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Those that the last call left."""
        made = self.x.grad, self.weight.grad
        return [g for g in made if g is not None]

    @cached_property
    def exact(self) -> tuple[float, list[Expected]]:
        """The loss and its gradients in float64, beside the errors of PyTorch's own."""
        x, weight = self.x.detach().double(), self.weight.detach().double()
        counted = int((self.target != IGNORED).sum())
        total, gradients = 0.0, [torch.empty_like(x), torch.zeros_like(weight)]
        for first in range(0, len(x), EXACT_ROWS):
            some = slice(first, first + EXACT_ROWS)
            logits = (x[some] @ weight.t()).requires_grad_()
            loss = (
                F.cross_entropy(logits, self.target[some], ignore_index=IGNORED, reduction="sum")
                / counted
            )
            [slope] = torch.autograd.grad(loss, logits)
            total += loss.item()
            torch.mm(slope, weight, out=gradients[0][some])
            gradients[1].addmm_(slope.t(), x[some])
        self.call(_eager)
        found = zip(self.gradients(), gradients, strict=True)
        return total, [Expected(e, measure_error(g, e), tuple(g.shape), g.dtype) for g, e in found]

    def wrong(self, loss: Loss) -> str:
        """The reason why a loss or its gradients are wrong; empty if they are right."""
        wanted, expected = self.exact
        found = self.call(loss).item()
        if not abs(found - wanted) <= CLOSE * abs(wanted):
            return f"the loss is {found:.6g}, expected {wanted:.6g}"
        return check_outputs(self.gradients(), expected).reason

    def peak_gb(self, loss: Loss) -> float:
        """Gigabytes of a call beyond the inputs; 0 without a GPU."""
        self.x.grad = self.weight.grad = None
        if not self.cuda:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.call(loss)
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    def microseconds(self, loss: Loss) -> float:
        """The time of a call, behind another one on a GPU."""
        if not self.cuda:
            begin = time.perf_counter()
            self.call(loss)
            return (time.perf_counter() - begin) * 1e6
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.call(loss)
        begun.record()
        self.call(loss)
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) * 1e3


def _prepared(problem: Problem, name: str) -> tuple[dict[str, Any], Loss | None]:
    """The entry of an implementation, and what to time; None if it failed or is wrong."""
    entry: dict[str, Any] = {
        "name": name, "status": "ok", "error": None, "time_us": None,
        "kind": "ours" if name == "cutesuper" else "peer",
    }  # fmt: skip
    begin = time.perf_counter()
    try:
        loss = IMPLEMENTATIONS[name]()
        problem.call(loss)
        entry["first_s"] = time.perf_counter() - begin
        entry["peak_gb"] = problem.peak_gb(loss)
        reason = problem.wrong(loss)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return entry | {"status": "failed", "error": f"{type(error).__name__}: {lines[0]}"}, None
    return (entry | {"status": "wrong", "error": reason}, None) if reason else (entry, loss)


def measured(head: Head, names: Sequence[str], rounds: int, device: torch.device) -> dict[str, Any]:
    """A case as plain data: implementations in turns, in another order each time."""
    problem, order = Problem(head, device), random.Random(0)
    prepared = [_prepared(problem, name) for name in names]
    running = [(entry, loss, list[float]()) for entry, loss in prepared if loss is not None]
    for _ in range(rounds):
        for _, loss, times in order.sample(running, len(running)):
            times.append(problem.microseconds(loss))
    for entry, loss, times in running:
        entry["time_us"] = asdict(summarize(times))
        if reason := problem.wrong(loss):
            entry.update(status="wrong", error=reason, time_us=None)
    return {
        "key": head.name, "title": head.name, "label": head.name, "error": None,
        "shape": [head.tokens, head.hidden, head.words], "flops": head.flops,
        "implementations": [entry for entry, _ in prepared],
    }  # fmt: skip


def main(argv: Sequence[str], prog: str) -> int:
    """Measure; returns 0 when ours ran and was right, else 1. Raises as `cli.supervise`."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Measure a linear layer and its cross entropy."
    )
    parser.add_argument("--only", help=f"comma-separated subset of: {', '.join(HEADS)}")
    parser.add_argument("--peers", help=f"comma-separated subset of: {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    try:
        heads = names_of(arguments.only, tuple(HEADS), "--only")
        peers = names_of(arguments.peers, tuple(IMPLEMENTATIONS), "--peers")
        if arguments.rounds < 1:
            raise ValueError("--rounds: at least 1")
    except ValueError as error:
        parser.error(str(error))
    require_device()
    results: dict[str, Any] = {
        "schema": SCHEMA, "kind": "heads", "name": "heads", "dtype": DTYPE, "cases": [],
        "title": "Linear layer and cross entropy", "environment": environment(CudaBackend()),
    }  # fmt: skip
    for name in heads:
        print(name, file=sys.stderr, flush=True)
        results["cases"].append(
            measured(HEADS[name], peers, arguments.rounds, torch.device("cuda"))
        )
        if arguments.json:
            save_results(results, arguments.json)
    print(heads_markdown(results))
    return int(ours_failed(results))
