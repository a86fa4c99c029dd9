"""A layer of Llama whose projections have LoRA adapters (arXiv:2106.09685): inference, training.

    python examples/lora_llama.py --out lora.png
    python examples/lora_llama.py --tokens 4 --rank 32 --ways eager,ours

Every projection is W x + scale B A x: W is frozen, A and B have few rows and columns. For a few
tokens each part of the layer is one kernel in our way, with the norm before the products, the
adapter beside them, and the gate or the residual behind: `cs.superoptimize` traces the PyTorch
function of the part. In training, where there are many tokens, products are PyTorch's, and ours
are the operators between them; gradients are those of the adapters and of the layer's input.

All ways are compared with float64 before they are timed. The exit status is 1 if a way is wrong.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from common import compare, options, report
from common.compare import Task
from common.options import Size
from common.passes import forward, in_float64, training
from common.timing import Call
from common.ways import DEFAULT_WAYS, WAYS, compiled
from torch import Tensor, nn

import cutesuper as cs

SIZES = {
    "tokens": Size("of inference", 3, 16),
    "batch": Size("sequences of a training step", 2, 4),
    "context": Size("tokens in each of them", 8, 1024),
    "width": Size("width of the hidden states, a multiple of --head", 64, 4096),
    "hidden": Size("width inside the MLP", 64, 14336),
    "head": Size("width of a head of the attention", 16, 128),
    "rank": Size("of the adapters", 8, 16),
}
EPS = 1e-5
#: of what the adapters add, alpha / r in the paper
SCALE = 2.0

# ------------------------------------------------------------------------------------------- layer


class Adapted(nn.Module):
    """A frozen projection and its adapter, which begins at random so that all of it matters."""

    def __init__(self, inner: int, columns: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, inner) / inner**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, inner) / inner**0.5)
        self.b = nn.Parameter(torch.randn(columns, rank) / (2 * rank) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + SCALE * F.linear(F.linear(x, self.a), self.b)


@dataclass(frozen=True)
class Operators:
    """The operators in which ways of training differ: `norm(x, weight)` and `swiglu(gate, up)`."""

    norm: Callable[[Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]


TORCH = Operators(
    norm=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    swiglu=lambda gate, up: F.silu(gate) * up,
)
OURS = Operators(norm=lambda x, weight: cs.ops.rms_norm(x, weight, eps=EPS), swiglu=cs.ops.swiglu)


class Layer(nn.Module):
    """Attention and MLP; the four methods that multiply are what inference is made of."""

    def __init__(self, width: int, hidden: int, head: int, rank: int) -> None:
        super().__init__()
        self.head = head
        self.attention_norm, self.mlp_norm = (
            nn.Parameter(1 + 0.2 * torch.randn(width), requires_grad=False) for _ in range(2)
        )
        self.qkv, self.out = Adapted(width, 3 * width, rank), Adapted(width, width, rank)
        self.gate, self.up = (Adapted(width, hidden, rank) for _ in range(2))
        self.down = Adapted(hidden, width, rank)

    def project(self, x: Tensor, operators: Operators = TORCH) -> Tensor:
        """RMSNorm; queries, keys and values."""
        return self.qkv(operators.norm(x, self.attention_norm))

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """The result of the attention, and the residual."""
        return x + self.out(y)

    def gated(self, x: Tensor, operators: Operators = TORCH) -> Tensor:
        """RMSNorm, two projections, SwiGLU."""
        y = operators.norm(x, self.mlp_norm)
        return operators.swiglu(self.gate(y), self.up(y))

    def shrink(self, h: Tensor, x: Tensor) -> Tensor:
        """The last projection, and the residual."""
        return x + self.down(h)

    def forward(self, x: Tensor, operators: Operators = TORCH) -> Tensor:
        """[batch, context, width] to the same; without positions, which change nothing here."""
        q, k, v = (
            t.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for t in self.project(x, operators).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.output(y.transpose(1, 2).flatten(2), x)
        return self.shrink(self.gated(x, operators), x)


# ------------------------------------------------------------------------------------------- tasks


class Part(nn.Module):
    """One method of a layer as a module, whose parameters are those of the layer."""

    def __init__(self, layer: Layer, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.layer, self.name)(*inputs)


def inference(layer: Layer, tokens: int) -> list[Task]:
    """Each part for some tokens."""
    weight = layer.attention_norm
    x, y = (torch.randn(tokens, len(weight), device=weight.device).to(weight) for _ in range(2))
    h = layer.gated(x).detach()
    inputs = {"project": (x,), "output": (y, x), "gated": (x,), "shrink": (h, x)}
    return [part_task(layer, name, given) for name, given in inputs.items()]


def part_task(layer: Layer, name: str, inputs: tuple[Tensor, ...]) -> Task:
    """A part of the layer in all ways."""
    part = Part(layer, name)

    def prepare(way: str) -> Call:
        if way == "ours":
            return partial(forward, cs.superoptimize(part, inputs, dependent_launch=True), *inputs)
        return partial(forward, compiled(way, part, inputs[0].device), *inputs)

    exact = partial(forward, copy.deepcopy(part).double(), *in_float64(inputs))
    ways = {w: partial(prepare, w) for w in WAYS}
    return Task(f"{name}, {len(inputs[0])} tokens", ways, exact, inputs[0].dtype, calls=10)


def training_step(layer: Layer, batch: int, context: int) -> Task:
    """Forward and backward pass of the layer."""
    weight = layer.attention_norm
    x, dy = torch.randn(2, batch, context, len(weight), device=weight.device).to(weight).unbind()
    x.requires_grad_()

    def leaves(of: Layer, inputs: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in of.named_parameters() if p.requires_grad}
        return {"x": inputs, **trained}

    def prepare(way: str) -> Call:
        made = partial(layer, operators=OURS) if way == "ours" else layer
        return partial(training, compiled(way, made, x.device), leaves(layer, x), dy, x)

    exact, x64 = copy.deepcopy(layer).double(), in_float64(x)
    return Task(
        "training step",
        {w: partial(prepare, w) for w in WAYS},
        partial(training, exact, leaves(exact, x64), dy.double(), x64),
        x.dtype,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, then time."""
    args, n = arguments(argv)
    device, dtype = torch.device(args.device), torch.bfloat16
    torch.manual_seed(args.seed)
    with device:
        layer = Layer(n["width"], n["hidden"], n["head"], n["rank"]).to(dtype)
    title = (
        f"Llama layer {n['width']} x {n['hidden']}, LoRA of rank {n['rank']}, bfloat16 on "
        f"{report.device_name(device)}"
    )
    print(title)
    parts = inference(layer, n["tokens"])
    tasks = [*parts, training_step(layer, n["batch"], n["context"])]
    results = [r for task in tasks for r in compare.run(task, options.ways_of(args), device)]
    return report.finish(args, title, device, n, results, {t.name for t in parts})


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, int]]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "", SIZES)
    options.add_ways(parser, WAYS, DEFAULT_WAYS)
    options.add_plot(parser)
    args = parser.parse_args(argv)
    n = options.sizes_of(parser, args, SIZES)
    if n["width"] % n["head"]:
        parser.error(f"--width {n['width']} --head {n['head']}: the width must be a multiple of "
                     "that of a head")  # fmt: skip
    return args, n


if __name__ == "__main__":
    sys.exit(main())
