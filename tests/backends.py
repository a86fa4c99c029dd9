"""Models for the backend of torch.compile, and how their results are judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cutesuper.torch.compile.backend import compile_graph
from cutesuper.torch.compile.options import read_options
from cutesuper.torch.compile.report import GraphReport
from cutesuper.torch.internals import run_eagerly
from cutesuper.verify.numeric import acceptable


class Between(nn.Module):
    """A step that no region has, with a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(0).values


class GatedMLP(nn.Module):
    """The gated MLP of Llama, with its norm and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Attention(nn.Module):
    """Causal, query heads sharing keys."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.inner = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.inner, bias=False)
        self.value = nn.Linear(width, kv_heads * self.inner, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def heads(t: torch.Tensor, count: int) -> torch.Tensor:
            return t.view(batch, length, count, self.inner).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            heads(self.query(x), self.heads), heads(self.key(x), self.kv_heads),
            heads(self.value(x), self.kv_heads), is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A layer of a transformer with LayerNorm and GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ConvNet(nn.Module):
    """Nothing of it is a region but its end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.norm(self.conv(x))).mean((2, 3)))


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(width: int) -> nn.Module:
    """Two layers and a ReLU."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 16))


#: name -> makes a model of a width, and the shape of its input for a batch
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, int], tuple[int, ...]]]] = {
    "MLP": (mlp, lambda b, n: (b, n)),
    "gated MLP": (lambda n: GatedMLP(n, 2 * n), lambda b, n: (b, 3, n)),
    "attention": (lambda n: Attention(n, 4, 2), lambda b, n: (b, 6, n)),
    "block": (lambda n: Block(n, 4), lambda b, n: (b, 6, n)),
    "conv net": (lambda n: ConvNet(), lambda b, n: (b, 3, 8, 8)),
}


def compiled(
    model: Callable[..., Any], take: str = "all", **how: Any
) -> tuple[Callable[..., Any], list[GraphReport]]:
    """A model as the backend compiles it, but what is in no region runs eagerly (Inductor's code
    for a CPU takes seconds to compile); and what was decided."""
    reports: list[GraphReport] = []
    backend = partial(
        compile_graph, options=read_options({"take": take}), observe=reports.append,
        finish=run_eagerly,
    )  # fmt: skip
    return torch.compile(model, backend=backend, **how), reports


def judge(model: nn.Module, found: torch.Tensor, x: torch.Tensor) -> None:
    """Results of a compiled model, by the rule for kernels."""
    with torch.no_grad():
        eager = copy.deepcopy(model)(x)
        exact = copy.deepcopy(model).double()(x.double())
    report = acceptable(found, exact, eager, eager.dtype)
    assert report, report.message
    assert found.stride() == eager.stride()


def gradients(model: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the input and all parameters, for a loss that weighs all results differently."""
    x = x.detach().clone().requires_grad_()
    y = call(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [x, *model.parameters()]))


def judge_gradients(model: nn.Module, found: list[torch.Tensor], x: torch.Tensor) -> None:
    """Gradients of a compiled model, by the same rule."""
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    pairs = zip(gradients(plain, plain, x), gradients(exact, exact, x.double()), strict=True)
    for ours, (eager, want) in zip(found, pairs, strict=True):
        report = acceptable(ours, want, eager, eager.dtype)
        assert report or bool((want.abs() < 1e-6).all()), report.message


def losses(model: nn.Module, call: Callable[..., Any], x: torch.Tensor, steps: int) -> list[float]:
    """The losses of as many steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (call(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
