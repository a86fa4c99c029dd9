"""A small Llama-style model that can be built of PyTorch's operators or of cutesuper's.

Parameters are fp32; hidden states and products have the element type that the model is built with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutesuper as cs

EPS = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Operators:
    """The three operators in which the ways of training differ.

    `add_rms_norm(x, residual, weight)` returns the normalized sum and the sum; `swiglu(gate, up)`;
    `cross_entropy(logits, target)` the mean of the loss.
    """

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    # in the type of x: PyTorch's one-kernel norm takes no other type of weights
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), EPS)


def _torch_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_norm(total, weight), total


TORCH = Operators(
    rms_norm=_torch_norm,
    add_rms_norm=_torch_add_norm,
    swiglu=lambda gate, up: F.silu(gate) * up,
    cross_entropy=lambda logits, target: F.cross_entropy(logits.float(), target),
)

OURS = Operators(
    rms_norm=lambda x, weight: cs.ops.rms_norm(x, weight, eps=EPS),
    add_rms_norm=lambda x, residual, weight: cs.ops.rms_norm(x, weight, residual=residual, eps=EPS),
    swiglu=cs.ops.swiglu,
    cross_entropy=cs.ops.cross_entropy,
)


@dataclass(frozen=True)
class Shape:
    """Extents of a model: `width` is a multiple of the width of a head, `head`, which is even."""

    vocabulary: int
    width: int
    layers: int
    head: int
    context: int

    @property
    def hidden(self) -> int:
        """Width inside the MLP: 8/3 of the model's, as Llama has it, in whole multiples of 64."""
        return -(-self.width * 8 // 3 // 64) * 64


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, context, width = x.shape
        q, k, v = (
            layer(x).view(batch, context, -1, self.head).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class MLP(nn.Module):
    """SwiGLU between two products."""

    def __init__(self, shape: Shape, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operators.swiglu(self.gate(x), self.up(x)))


class Layer(nn.Module):
    """Takes and returns what the part before gave and the residual that it is yet to be added to.

    Each addition is thus next to the norm that reads its sum.
    """

    def __init__(self, shape: Shape, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.attention, self.mlp = Attention(shape), MLP(shape, operators)
        self.attention_norm, self.mlp_norm = (
            nn.Parameter(torch.ones(shape.width)) for _ in range(2)
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            y, residual = self.operators.rms_norm(x, self.attention_norm), x
        else:
            y, residual = self.operators.add_rms_norm(x, residual, self.attention_norm)
        y = self.attention(y, rotation)
        y, residual = self.operators.add_rms_norm(y, residual, self.mlp_norm)
        return self.mlp(y), residual


class Llama(nn.Module):
    """Decoder layers between an embedding and a head that shares its weight.

    Called with int64 tokens and targets, both [batch, context], it returns the mean loss, a scalar.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, operators: Operators, dtype: torch.dtype) -> None:
        super().__init__()
        self.operators, self.dtype = operators, dtype
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, operators) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        angles = torch.outer(
            torch.arange(shape.context), ROTARY_BASE ** -torch.arange(0, 1, 2 / shape.head)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(
            tokens.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        ):
            rotation = self.cos.to(self.dtype), self.sin.to(self.dtype)
            x, residual = self.embedding(tokens).to(self.dtype), None
            for layer in self.layers:
                x, residual = layer(x, residual, rotation)
            assert residual is not None
            y, _ = self.operators.add_rms_norm(x, residual, self.norm)
            logits = F.linear(y, self.embedding.weight)
            return self.operators.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: x[batch, heads, context, head], its halves turned against each other."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
