"""A Llama as it decodes: plain PyTorch, one token of every sequence a step.

A layer is made of parts, functions of tensors, so that each can be timed, compiled or replaced by
itself. Sequences lie in a cache that is allocated once; where they are is a tensor, so that one
CUDA graph serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
ROTARY_BASE = 500000.0


@dataclass(frozen=True)
class Shape:
    """Extents of a model: `heads` query heads share `groups` heads of keys and values."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    head: int
    hidden: int

    @property
    def projected(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.groups) * self.head


LLAMA_3_8B = Shape(128256, 4096, 32, 32, 8, 128, 14336)
LLAMA_3_2_1B = Shape(128256, 2048, 16, 32, 8, 64, 8192)


class Cache(NamedTuple):
    """The cache of one layer: keys and values, each [batch, groups, capacity, head]."""

    keys: Tensor
    values: Tensor


class Place(NamedTuple):
    """The place of the sequences in their cache, the same for all layers of a step.

    Attributes:
        rows: int64 [batch], 0, 1, ...
        positions: int64 [batch], of the token that comes in.
        lengths: int32 [batch], how many tokens there are with it.
        cos, sin: of these positions, [batch, 1, head / 2].
        mask: added to the scores, [batch, 1, 1, capacity]: -inf behind the lengths.
    """

    rows: Tensor
    positions: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor


# ------------------------------------------------------------------------------------------- parts


def project(x: Tensor, norm: Tensor, qkv: Tensor) -> Tensor:
    """RMSNorm, and queries, keys and values of the result."""
    return F.linear(F.rms_norm(x, norm.shape, norm, EPS), qkv)


def turn(qkv: Tensor, place: Place, cache: Cache) -> Tensor:
    """Rotary positions: returns queries [batch, heads, 1, head]; keys and values are stored."""
    keys, values = cache
    _, groups, _, head = keys.shape
    q, k, v = (
        t.unflatten(-1, (-1, head))
        for t in qkv.split((qkv.shape[-1] - 2 * groups * head, groups * head, groups * head), -1)
    )
    keys[place.rows, :, place.positions] = rotate(k, place)
    values[place.rows, :, place.positions] = v
    return rotate(q, place)[:, :, None]


def rotate(x: Tensor, place: Place) -> Tensor:
    """x [batch, heads, head], the halves of a head turned against each other."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = place.cos, place.sin
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attend(q: Tensor, place: Place, cache: Cache) -> Tensor:
    """Attention of one query to all keys of its sequence: [batch, heads * head]."""
    y = F.scaled_dot_product_attention(
        q, cache.keys, cache.values, attn_mask=place.mask, enable_gqa=True
    )
    return y.flatten(1)


def output(y: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """The result of the attention, and the residual."""
    return x + F.linear(y, out)


def gate(x: Tensor, norm: Tensor, gate_up: Tensor) -> Tensor:
    """RMSNorm, two products, SwiGLU."""
    a, b = F.linear(F.rms_norm(x, norm.shape, norm, EPS), gate_up).chunk(2, dim=-1)
    return F.silu(a) * b


def shrink(h: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """The last product of the MLP, and the residual."""
    return x + F.linear(h, down)


def score(x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    """The last norm, and logits."""
    return F.linear(F.rms_norm(x, norm.shape, norm, EPS), head)


@dataclass(frozen=True)
class Parts:
    """The parts of a layer and of the head; the ways of decoding differ in these."""

    project: Callable[[Tensor, Tensor, Tensor], Tensor] = project
    turn: Callable[[Tensor, Place, Cache], Tensor] = turn
    attend: Callable[[Tensor, Place, Cache], Tensor] = attend
    output: Callable[[Tensor, Tensor, Tensor], Tensor] = output
    gate: Callable[[Tensor, Tensor, Tensor], Tensor] = gate
    shrink: Callable[[Tensor, Tensor, Tensor], Tensor] = shrink
    score: Callable[[Tensor, Tensor, Tensor], Tensor] = score


TORCH = Parts()

# ------------------------------------------------------------------------------------------- model


class Layer(nn.Module):
    """A decoder layer: weights, and the parts in order."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm, self.mlp_norm = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv = nn.Parameter(torch.empty(shape.projected, width))
        self.out = nn.Parameter(torch.empty(width, shape.heads * shape.head))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.hidden, width))
        self.down = nn.Parameter(torch.empty(width, shape.hidden))

    def forward(self, x: Tensor, place: Place, cache: Cache, parts: Parts = TORCH) -> Tensor:
        """[batch, width] to the same; stores keys and values of the token."""
        q = parts.turn(parts.project(x, self.attention_norm, self.qkv), place, cache)
        x = parts.output(parts.attend(q, place, cache), self.out, x)
        return parts.shrink(parts.gate(x, self.mlp_norm, self.gate_up), self.down, x)


class Llama(nn.Module):
    """An embedding, layers, and a head, without gradients."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, capacity: int) -> None:
        super().__init__()
        self.shape, self.capacity = shape, capacity
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=shape.width**-0.5)
        turned = angles(torch.arange(capacity), shape.head)
        self.register_buffer("cos", turned.cos().to(self.norm.dtype), persistent=False)
        self.register_buffer("sin", turned.sin().to(self.norm.dtype), persistent=False)

    def place(self, positions: Tensor) -> Place:
        """The place where a step finds the sequences."""
        behind = torch.arange(self.capacity, device=positions.device) > positions[:, None]
        mask = torch.zeros(behind.shape, dtype=self.cos.dtype, device=positions.device)
        return Place(
            rows=torch.arange(len(positions), device=positions.device),
            positions=positions,
            lengths=(positions + 1).to(torch.int32),
            cos=self.cos[positions][:, None],
            sin=self.sin[positions][:, None],
            mask=mask.masked_fill(behind, -torch.inf)[:, None, None],
        )

    def new_cache(self, batch: int, generator: torch.Generator) -> list[Cache]:
        """A cache as if something had been read: random keys and values."""
        shape = (batch, self.shape.groups, self.capacity, self.shape.head)
        options = {"dtype": self.cos.dtype, "device": self.cos.device}
        return [
            Cache(*(torch.empty(shape, **options).normal_(generator=generator) for _ in range(2)))
            for _ in self.layers
        ]

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Place]:
        """The input of the first layer."""
        return self.embedding[tokens], self.place(positions)

    def forward(self, tokens: Tensor, positions: Tensor, caches: list[Cache]) -> Tensor:
        """Logits [batch, vocabulary] of the next tokens; tokens (int64) and positions [batch]."""
        return decode(self, tokens, positions, caches)


def decode(
    model: Llama,
    tokens: Tensor,
    positions: Tensor,
    caches: list[Cache],
    *,
    begin: Callable[[Llama, Tensor, Tensor], tuple[Tensor, Place]] = Llama.begin,
    layer: Callable[[Layer, Tensor, Place, Cache], Tensor] = Layer.__call__,
    score: Callable[[Tensor, Tensor, Tensor], Tensor] = score,
) -> Tensor:
    """A step; replacements of its three pieces compute the same."""
    x, place = begin(model, tokens, positions)
    for each, cache in zip(model.layers, caches, strict=True):
        x = layer(each, x, place, cache)
    return score(x, model.norm, model.head)


def angles(positions: Tensor, head: int) -> Tensor:
    """The angles by which the pairs of a head are turned, float64 [positions, head / 2]."""
    slower = torch.arange(0, 1, 2 / head, dtype=torch.float64, device=positions.device)
    return torch.outer(positions.double(), ROTARY_BASE**-slower)


def new_model(
    shape: Shape, capacity: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Llama:
    """A model with random weights, which are drawn on the device."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Llama(shape, capacity)
    finally:
        torch.set_default_dtype(before)


# ------------------------------------------------------------------------------------------- exact


def exact_logits(model: Llama, caches: list[Cache], tokens: Tensor, start: int) -> Tensor:
    """Logits by their definition, in float64 [batch, length, vocabulary].

    It reads the first `start` positions of the caches, and writes none. Weights are converted one
    layer at a time.

    Args:
        model: its weights are used, in any type.
        caches: what the layers had stored before.
        tokens: int64 [batch, length], at the positions from `start` on.
        start: how many positions are known.
    """
    length = tokens.shape[1]
    turned = angles(torch.arange(start, start + length, device=tokens.device), model.shape.head)
    x = model.embedding[tokens].double()
    for layer, cache in zip(model.layers, caches, strict=True):
        weights = {name: p.double() for name, p in layer.named_parameters()}
        qkv = _norm(x, weights["attention_norm"]) @ weights["qkv"].T
        past = [t[:, :, :start].double() for t in cache]
        x = x + _attention(qkv, past, turned) @ weights["out"].T
        a, b = (_norm(x, weights["mlp_norm"]) @ weights["gate_up"].T).chunk(2, -1)
        x = x + (F.silu(a) * b) @ weights["down"].T
    return _norm(x, model.norm.double()) @ model.head.double().T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _attention(qkv: Tensor, past: list[Tensor], turned: Tensor) -> Tensor:
    """Attention of new positions to those before them: [batch, length, heads * head]."""
    batch, groups, start, head = past[0].shape
    length = qkv.shape[1]
    q, k, v = (
        qkv.unflatten(-1, (-1, head))
        .transpose(1, 2)
        .split((qkv.shape[-1] // head - 2 * groups, groups, groups), 1)
    )
    i = 1j * turned
    q, k = (torch.view_as_real(torch.complex(*t.chunk(2, -1)) * i.exp()) for t in (q, k))
    q, k = (torch.cat(t.unbind(-1), -1) for t in (q, k))
    keys, values = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    scores = torch.einsum(
        "bghld,bgsd->bghls", q.view(batch, groups, -1, length, head), keys
    ) / head**0.5  # fmt: skip
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores[..., start:].masked_fill_(later, -torch.inf)
    y = torch.einsum("bghls,bgsd->blghd", scores.softmax(-1), values)
    return y.flatten(2)
