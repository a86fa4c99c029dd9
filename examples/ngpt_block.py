"""A block of nGPT, the normalized transformer (arXiv:2410.01131): forward and training step.

    python examples/ngpt_block.py --out ngpt.png
    python examples/ngpt_block.py --ways eager,ours --width 4096

Hidden states have length 1. Attention and MLP say where to go, and the state moves a part of the
way, each element by its own learned rate: h <- norm(h + alpha (norm(step) - h)). Queries and keys
have length 1 too, times learned scales. What cutesuper has no operator for, the update and the
scaled gate, is defined here in a few lines, and gets its forward and backward kernels by search.

All ways are compared with float64 before they are timed, gradients of all parameters included. The
exit status is 1 if a way is wrong.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import compare, options, report
from common.compare import Task
from common.options import Size
from common.passes import forward, in_float64, training
from common.timing import Call, Outputs
from common.ways import DEFAULT_WAYS, WAYS, compiled
from torch import Tensor, nn

import cutesuper as cs
from cutesuper.torch.ops.rowwise import Built, Definition, Operand, Output, Role, RowOperator

SIZES = {
    "batch": Size("sequences", 2, 4),
    "context": Size("tokens in a sequence", 8, 1024),
    "width": Size("width of the hidden states, a multiple of --head", 64, 2048),
    "head": Size("width of a head of the attention, even", 16, 128),
}
#: what the paper begins with
FIRST_ALPHA = 0.05
ROTARY_BASE = 10000.0

# --------------------------------------------------------------------------------------- operators


@dataclass(frozen=True)
class Operators:
    """The operators in which the ways differ.

    `scaled(x, scale)` gives every head [..., heads, head] the length 1, times a scale [heads,
    head] and the root of the width of a head; `gate(a, b, by, other)` is silu(a by) (b other);
    `update(h, step, alpha)` moves h.
    """

    scaled: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    update: Callable[[Tensor, Tensor, Tensor], Tensor]


def unit(x: Tensor) -> Tensor:
    """Rows of length 1."""
    return F.normalize(x, dim=-1)


TORCH = Operators(
    scaled=lambda x, scale: unit(x) * (scale * x.shape[-1] ** 0.5),
    gate=lambda a, b, by, other: F.silu(a * by) * (b * other),
    update=lambda h, step, alpha: unit(h + alpha * (unit(step) - h)),
)


def _unit(g: Any, x: Any) -> tuple[Any, Any]:
    """Rows of length 1, and what they were multiplied by."""
    factor = g.rsqrt(g.sum(g.square(x), -1))
    return g.mul(x, factor), factor


def _update(g: Any, h: Any, step: Any, alpha: Any) -> Built:
    """The factors are kept for the gradient: one number a row each."""
    direction, one = _unit(g, step)
    y, other = _unit(g, g.add(h, g.mul(alpha, g.sub(direction, h))))
    return Built((y,), (one, other))


def _gate(g: Any, a: Any, b: Any, by: Any, other: Any) -> Built:
    return Built((g.mul(g.silu(g.mul(a, by)), g.mul(b, other)),))


_ROWS = (Operand("a", Role.ROWS), Operand("b", Role.ROWS))
_STATES = (Operand("h", Role.ROWS), Operand("step", Role.ROWS))
_SCALES = (Operand("by", Role.ROW), Operand("other", Role.ROW))
gate = RowOperator(Definition("ngpt_gate", (*_ROWS, *_SCALES), (), (Output("y", like="a"),), _gate))
update = RowOperator(
    Definition(
        "ngpt_update", (*_STATES, Operand("alpha", Role.ROW)), (), (Output("y", like="h"),), _update
    )
)
OURS = Operators(
    scaled=lambda x, scale: cs.ops.rms_norm(x, scale, eps=0.0),  # of length sqrt(head)
    gate=lambda *tensors: gate(tensors, ()),
    update=lambda *tensors: update(tensors, ()),
)

# ------------------------------------------------------------------------------------------- block


class Block(nn.Module):
    """Attention and MLP of nGPT; rows of its matrices have length 1 where they meet states."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, head: int, context: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (matrix(width, width) for _ in range(4))
        self.gate, self.up = (matrix(4 * width, width) for _ in range(2))
        self.down = matrix(width, 4 * width)
        self.attention_alpha, self.mlp_alpha = (scales(FIRST_ALPHA, width) for _ in range(2))
        self.qk_scale = scales(1.0, width // head, head)
        self.up_scale, self.gate_scale = scales(1.0, 4 * width), scales(width**0.5, 4 * width)
        slower = torch.arange(0, 1, 2 / head, dtype=torch.float64)
        angles = torch.outer(torch.arange(context).double(), ROTARY_BASE**-slower)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, h: Tensor, operators: Operators = TORCH) -> Tensor:
        """[batch, context, width] to the same, rows of length 1."""
        h = operators.update(h, self.attention(h, operators), self.attention_alpha)
        a, b = F.linear(h, self.gate), F.linear(h, self.up)
        step = F.linear(operators.gate(a, b, self.gate_scale, self.up_scale), self.down)
        return operators.update(h, step, self.mlp_alpha)

    def attention(self, h: Tensor, operators: Operators) -> Tensor:
        """Causal attention, whose scores are divided by sqrt(head).
        They are products of two vectors of length sqrt(head); the paper multiplies those of two
        lengths 1 by it."""
        q, k, v = (F.linear(h, w).unflatten(-1, (-1, self.head)) for w in (self.q, self.k, self.v))
        q, k = (operators.scaled(self.rotate(t), self.qk_scale) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.out)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions of [batch, context, heads, head]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)


def matrix(rows: int, columns: int) -> nn.Parameter:
    """Random rows of length 1."""
    return nn.Parameter(unit(torch.randn(rows, columns)))


def scales(value: float, *shape: int) -> nn.Parameter:
    """Factors around a value, so that none is like another."""
    return nn.Parameter(value * (1 + 0.2 * torch.rand(shape)))


# ------------------------------------------------------------------------------------------- tasks


def in_way(way: str, block: Block) -> Callable[[Tensor], Tensor]:
    """The block as a way computes it."""
    if way == "ours":
        return partial(block, operators=OURS)
    return compiled(way, block, block.cos.device)


def block_tasks(block: Block, h: Tensor, dy: Tensor) -> list[Task]:
    """The whole block, without and with gradients."""
    exact, h64 = copy.deepcopy(block).double(), in_float64(h)

    def leaves(of: Block, x: Tensor) -> dict[str, Tensor]:
        return {"h": x, **dict(of.named_parameters())}

    def train(way: str) -> Call:
        return partial(training, in_way(way, block), leaves(block, h), dy, h)

    return [
        Task("forward", {w: lambda w=w: partial(forward, in_way(w, block), h) for w in WAYS},
             partial(forward, exact, h64), h.dtype),
        Task("training step", {w: partial(train, w) for w in WAYS},
             partial(training, exact, leaves(exact, h64), dy.double(), h64), h.dtype),
    ]  # fmt: skip


def part_tasks(block: Block, h: Tensor) -> list[Task]:
    """The operators one by one, forward and backward."""

    def rows(*shape: int) -> Tensor:
        drawn = torch.randn(*h.shape[:-1], *shape, device=h.device, dtype=h.dtype)
        return drawn.requires_grad_()

    hidden, heads = len(block.gate_scale), tuple(block.qk_scale.shape)
    operands = {
        "scaled": (rows(*heads), block.qk_scale),
        "gate": (rows(hidden), rows(hidden), block.gate_scale, block.up_scale),
        "update": (h, rows(h.shape[-1]), block.mlp_alpha),
    }
    return [part_task(name, tensors) for name, tensors in operands.items()]


def part_task(name: str, tensors: tuple[Tensor, ...]) -> Task:
    """One operator and the gradients of all its operands."""
    dy = torch.randn_like(tensors[0])

    def train(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Outputs:
        leaves = {str(i): t for i, t in enumerate(given)}
        return training(function, leaves, dy.to(given[0].dtype), *given)

    def prepare(way: str) -> Call:
        operator = getattr(OURS if way == "ours" else TORCH, name)
        return partial(train, compiled(way, operator, dy.device), tensors)

    exact = partial(train, getattr(TORCH, name), in_float64(tensors))
    return Task(name, {w: partial(prepare, w) for w in WAYS}, exact, dy.dtype, calls=10)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, then time."""
    args, n = arguments(argv)
    device, dtype = torch.device(args.device), torch.bfloat16
    torch.manual_seed(args.seed)
    block = Block(n["width"], n["head"], n["context"]).to(device, dtype)
    shape = (n["batch"], n["context"], n["width"])
    h = unit(torch.randn(shape, device=device)).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    title = f"nGPT, {' x '.join(map(str, shape))}, bfloat16 on {report.device_name(device)}"
    print(title)
    tasks = [*block_tasks(block, h, dy), *part_tasks(block, h)]
    results = [r for task in tasks for r in compare.run(task, options.ways_of(args), device)]
    return report.finish(args, title, device, n, results, tuple(t.name for t in tasks[2:]))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, int]]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "", SIZES)
    options.add_ways(parser, WAYS, DEFAULT_WAYS)
    options.add_plot(parser)
    args = parser.parse_args(argv)
    n = options.sizes_of(parser, args, SIZES)
    if n["head"] % 2 or n["width"] % n["head"]:
        parser.error(f"--width {n['width']} --head {n['head']}: the width must be a multiple of "
                     "that of a head, which must be even")  # fmt: skip
    return args, n


if __name__ == "__main__":
    sys.exit(main())
