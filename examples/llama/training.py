"""The training loop of the examples: what is trained, in which way, and what came of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from common.timing import WARM_UP, Clock
from torch import Tensor, nn

from llama.model import OURS, TORCH, Llama, Operators, Shape
from llama.text import make_text


@dataclass(frozen=True)
class Way:
    """A way to run a model: its operators, and whether torch.compile gets it."""

    operators: Operators
    compiled: bool = False


WAYS = {
    "eager": Way(TORCH),
    "compile": Way(TORCH, compiled=True),
    "ours": Way(OURS),
    "ours+compile": Way(OURS, compiled=True),
}


@dataclass(frozen=True)
class Plan:
    """The training: its model, text and steps.
    The seed makes the first weights and the text; `batch` counts sequences."""

    shape: Shape
    batch: int
    steps: int
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the steps behind its warm-up."""
        return 0.02 / self.shape.width**0.5

    def text(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all steps: [steps, batch, context] each, on the CPU."""
        shape = self.shape
        both = make_text(shape.vocabulary, self.steps * self.batch, shape.context, self.seed)
        tokens, targets = (t.view(self.steps, self.batch, shape.context) for t in both)
        return tokens, targets

    def model(self, way: str) -> Llama:
        """The same first weights for every way."""
        torch.manual_seed(self.seed)
        return Llama(self.shape, WAYS[way].operators, self.dtype).to(self.device)


@dataclass(frozen=True)
class Result:
    """The result of one way: a loss per step, and the median time of a step behind the warm-up."""

    way: str
    losses: list[float]
    first_step_s: float
    step_ms: float
    peak_gib: float | None


def train(
    plan: Plan,
    way: str,
    wrap: Callable[[Llama], nn.Module] = lambda model: model,
    rank: int = 0,
    world: int = 1,
) -> Result:
    """Train one model from the first weights on.

    `wrap` makes a model that runs on `world` devices of it; this process then trains on its part
    of every batch, and `batch` is a multiple of `world`. Losses are those of this process.
    """
    _forget(plan.device)
    model = wrap(plan.model(way))
    step = _step(plan, torch.compile(model) if WAYS[way].compiled else model)
    part = plan.batch // world
    tokens, targets = (
        t[:, rank * part : (rank + 1) * part].contiguous().to(plan.device) for t in plan.text()
    )
    start, first = time.perf_counter(), 0.0
    losses, clock = [], Clock(plan.device)
    for k in range(plan.steps):
        clock.tick()
        losses.append(step(k, tokens[k], targets[k]))
        if k == 0:
            losses[0].item()
            first = time.perf_counter() - start
    clock.tick()
    cuda = plan.device.type == "cuda"
    return Result(
        way=way,
        losses=torch.stack(losses).tolist(),
        first_step_s=first,
        step_ms=median(clock.intervals_ms()[WARM_UP:]),
        peak_gib=torch.cuda.max_memory_allocated(plan.device) / 2**30 if cuda else None,
    )


def _step(plan: Plan, model: nn.Module) -> Callable[[int, Tensor, Tensor], Tensor]:
    """A function that makes one step and returns the loss before it, without waiting for it."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), fused=plan.device.type == "cuda"
    )

    def step(k: int, tokens: Tensor, targets: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, (k + 1) / 10)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _forget(device: torch.device) -> None:
    """Leave nothing of the run before: neither its memory nor what was compiled for it."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
