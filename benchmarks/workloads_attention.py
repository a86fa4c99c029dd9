"""Attention: few queries over many keys (with or without norms), decoding, causal prefill.

In the programs, queries of the heads that share keys and values are rows of one product: decoding
has a query ``[B, kv heads, heads of each, d]`` and keys ``[B, kv heads, S, d]``. Keys or queries
are drawn so that logits have a standard deviation of 1 (with a scale) or 2.4 (without), which
leaves neither one weight of 1 nor equal weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.workload import (
    HALVES,
    Computation,
    Outputs,
    Shape,
    TensorSpec,
    Workload,
    build,
)

#: query, key and value
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: standard deviation of keys whose products with normal queries of width 64 are not scaled
UNSCALED_KEY = 0.3


@dataclass(frozen=True)
class AttentionWorkload(Workload):
    """Attention, with the arguments of a library's attention call.

    Attributes:
        heads: the inputs in the form of such calls: query ``[B, H, L, d]``, key and value ``[B, G,
            S, d]``, G a divisor of H; copies if the inputs are stored otherwise.
        before: preparation of these inputs in every call.
        scale: of the call, by the shape.
        causal: whether row i sees keys 0..i only.
        lengths: whether the fourth input is the number of keys of each sequence.
        pages: whether a fifth one is the table of their pages; `heads` then returns all pages in
            place of sequences.
    """

    heads: Callable[..., Heads]
    before: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Heads]
    scale: Callable[[Shape], float]
    causal: bool
    lengths: bool = False
    pages: bool = False


def unchanged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
    """The inputs, as nothing needs to be done before the call."""
    return q, k, v


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False
) -> torch.Tensor:
    """``softmax(q k^T scale) v`` by its definition (arXiv:1706.03762)."""
    scores = (q @ k.mT) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, -1) @ v


# ---------------------------------------------------------------- queries over keys stored (d, S)


def grouped_attention() -> AttentionWorkload:
    """``softmax(Q K) V``: the rows of Q are those of all heads that share K and V."""

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        return (torch.softmax(q @ k, -1) @ v,)

    def program(g: Any, q: Any, k: Any, v: Any) -> Any:
        return g.matmul(g.softmax(g.matmul(q, k)), v)

    title = "GQA: softmax(Q K) V"
    return _few_queries("gqa", title, Computation(full, full), unchanged, program)


def normed_attention() -> AttentionWorkload:
    """``softmax(rms(Q) K) rms(V)``, norms without weight and epsilon."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=0.0)

    def norm64(x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        return (torch.softmax(norm(q) @ k, -1) @ norm(v),)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        return (torch.softmax(norm64(q) @ k, -1) @ norm64(v),)

    def before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        return norm(q), k, norm(v)

    def program(g: Any, q: Any, k: Any, v: Any) -> Any:
        weights = g.softmax(g.matmul(g.rms_norm(q, eps=0.0), k))
        return g.matmul(weights, g.rms_norm(v, eps=0.0))

    title = "QKNorm: softmax(rms(Q) K) rms(V)"
    return _few_queries("qk_norm", title, Computation(eager, reference), before, program)


def _few_queries(
    name: str,
    title: str,
    full: Computation,
    before: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Heads],
    program: Callable[..., Any],
) -> AttentionWorkload:
    """A workload of ``[groups, rows, d]``, ``[groups, d, keys]`` and ``[groups, keys, d]``."""

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        groups, rows, keys, width = shape
        return (
            TensorSpec("q", (groups, rows, width)),
            TensorSpec("k", (groups, width, keys), std=UNSCALED_KEY),
            TensorSpec("v", (groups, keys, width)),
        )

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        return q.unsqueeze(1), k.mT.contiguous().unsqueeze(1), v.unsqueeze(1)

    def outputs(shape: Shape) -> tuple[TensorSpec, ...]:
        groups, rows, _, width = shape
        return (TensorSpec("y", (groups, rows, width)),)

    return AttentionWorkload(
        name=name,
        title=title,
        axes=("groups", "rows", "keys", "width"),
        shapes=((2, 256, 4096, 64), (16, 256, 4096, 64)),
        dtypes=HALVES,
        inputs=inputs,
        outputs=outputs,
        computations={"full": full},
        flops=lambda s: 4 * s[0] * s[1] * s[2] * s[3],
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
        heads=heads,
        before=before,
        scale=lambda shape: 1.0,
        causal=False,
    )


# ------------------------------------------------------------------------------ heads of a model


def decode() -> AttentionWorkload:
    """One new token of every sequence over its keys."""

    def query(shape: Shape) -> tuple[int, ...]:
        batch, _, heads, kv_heads, width = shape
        return (batch, kv_heads, heads // kv_heads, width)

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, keys, _, kv_heads, width = shape
        cache = (batch, kv_heads, keys, width)
        return (TensorSpec("q", query(shape)), TensorSpec("k", cache), TensorSpec("v", cache))

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        return (attend(q, k, v, q.shape[-1] ** -0.5),)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        return q.view(q.shape[0], -1, 1, q.shape[-1]), k, v

    return AttentionWorkload(
        name="decode",
        title="decoding, one token",
        axes=("batch", "keys", "heads", "kv_heads", "width"),
        shapes=tuple(
            (batch, keys, 32, 8, 128)
            for batch, keys in ((1, 4096), (1, 16384), (1, 65536), (8, 4096), (32, 4096))
        ),
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("y", query(shape)),),
        computations={"full": Computation(full, full)},
        flops=lambda s: 4 * s[0] * s[1] * s[2] * s[4],
        graph=lambda cs, shape, dtype: build(
            cs, inputs(shape), dtype, lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v)
        ),
        heads=heads,
        before=unchanged,
        scale=lambda shape: shape[-1] ** -0.5,
        causal=False,
    )


def lengths_of(batch: int, longest: int) -> tuple[int, ...]:
    """Keys of each sequence: ``longest``, then equally likely from 1 to that; always the same."""
    rng = random.Random(batch)
    return (longest, *(rng.randint(1, longest) for _ in range(batch - 1)))


def serving(page: int = 0) -> AttentionWorkload:
    """One new token of sequences of different lengths.
    Their keys lie side by side in tensors as long as the longest, or in pages of ``page`` keys
    anywhere in a cache ``[pages, page, heads, d]``."""

    def query(shape: Shape) -> tuple[int, ...]:
        batch, _, heads, kv_heads, width = shape
        return (batch, kv_heads, heads // kv_heads, width)

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, longest, _, kv_heads, width = shape
        lengths = lengths_of(batch, longest)
        count = batch * longest // page if page else 0
        cache = (count, page, kv_heads, width) if page else (batch, kv_heads, longest, width)
        moved = sum(lengths) / (batch * longest)
        specs = (
            TensorSpec("q", query(shape)),
            TensorSpec("k", cache, moved=moved),
            TensorSpec("v", cache, moved=moved),
            TensorSpec("lengths", (batch,), values=lengths),
        )
        places = tuple(random.Random(page).sample(range(count), count))
        table = TensorSpec("table", (batch, longest // page if page else 0), values=places)
        return (*specs, table) if page else specs

    def together(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return cache[table].flatten(1, 2).transpose(1, 2)

    def full(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, *table: Any
    ) -> Outputs:
        k, v = (together(k, *table), together(v, *table)) if table else (k, v)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        beyond = torch.arange(k.shape[-2], device=k.device) >= lengths[:, None]
        scores = scores.masked_fill(beyond[:, None, None, :], -torch.inf)
        return (torch.softmax(scores, -1) @ v,)

    def program(g: Any, q: Any, k: Any, v: Any, lengths: Any, *table: Any) -> Any:
        if table:
            k, v = (g.transpose(g.gather_pages(c, *table), (0, 2, 1, 3)) for c in (k, v))
        return g.scaled_dot_product_attention(q, k, v, lengths=lengths)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if page else (k, v)
        return q.view(q.shape[0], -1, 1, q.shape[-1]), k, v

    return AttentionWorkload(
        name=f"serving_pages_{page}" if page else "serving",
        title=f"decoding, mixed lengths{f', pages of {page}' if page else ''}",
        axes=("batch", "longest", "heads", "kv_heads", "width"),
        shapes=tuple((batch, 8192, 32, 8, 128) for batch in (1, 4, 16, 32)),
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("y", query(shape)),),
        computations={"full": Computation(full, full)},
        flops=lambda s: 4 * sum(lengths_of(*s[:2])) * s[2] * s[4],
        graph=lambda cs, shape, dtype: build(cs, inputs(shape), dtype, program),
        heads=heads,
        before=unchanged,
        scale=lambda shape: shape[-1] ** -0.5,
        causal=False,
        lengths=True,
        pages=page > 0,
    )


def prefill() -> AttentionWorkload:
    """All tokens of a sequence, each over those before it.

    References are computed one head at a time: 16384 tokens have 2 GB of float64 scores a head.
    """

    def inputs(shape: Shape) -> tuple[TensorSpec, ...]:
        batch, length, heads, kv_heads, width = shape
        query = (batch, kv_heads, heads // kv_heads, length, width)
        cache = (batch, kv_heads, 1, length, width)
        return (TensorSpec("q", query), TensorSpec("k", cache), TensorSpec("v", cache))

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        out = torch.empty_like(q)
        for b, h, i in product(*map(range, q.shape[:3])):
            out[b, h, i] = attend(q[b, h, i], k[b, h, 0], v[b, h, 0], q.shape[-1] ** -0.5, True)
        return (out,)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        return q.flatten(1, 2), k.squeeze(2), v.squeeze(2)

    return AttentionWorkload(
        name="prefill",
        title="causal prefill",
        axes=("batch", "length", "heads", "kv_heads", "width"),
        shapes=tuple((1, length, 32, 8, 128) for length in (2048, 4096, 8192, 16384)),
        dtypes=HALVES,
        inputs=inputs,
        outputs=lambda shape: (TensorSpec("y", inputs(shape)[0].dims),),
        computations={"full": Computation(full, full)},
        # half of the scores, those that the mask leaves, as in FlashAttention's benchmarks
        flops=lambda s: 2 * s[0] * s[1] * s[1] * s[2] * s[4],
        graph=lambda cs, shape, dtype: build(
            cs,
            inputs(shape),
            dtype,
            lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        heads=heads,
        before=unchanged,
        scale=lambda shape: shape[-1] ** -0.5,
        causal=True,
    )
