"""Attention written out, for the tests of `cutesuper.ops.attention`."""

from __future__ import annotations

import math
from typing import Any

import torch


def visible(rows: int, keys: int, batch: int, causal: bool, lengths: Any, device: Any) -> Any:
    """``[B, rows, keys]``: who sees whom."""
    i = torch.arange(rows, device=device)[None, :, None]
    j = torch.arange(keys, device=device)[None, None, :]
    if lengths is None:
        return (j <= i if causal else j >= 0).expand(batch, rows, keys)
    ends = lengths.long()[:, None, None]
    return (j < (ends - (rows - 1 - i) if causal else ends)).expand(batch, rows, keys)


def norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm of each head."""
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


def gathered(cache: Any, table: Any) -> Any:
    """``[B, H, n * P, D]`` of a cache ``[pages, P, H, D]``."""
    found = cache[table.long()]
    return found.flatten(1, 2).transpose(1, 2)


def exact(
    query: Any,
    key: Any,
    value: Any,
    causal: bool = False,
    lengths: Any = None,
    table: Any = None,
    weights: tuple[Any, Any] = (None, None),
    eps: float = 1e-6,
    scale: float | None = None,
    dtype: Any = torch.float64,
) -> Any:
    """Computed operator by operator in ``dtype``; rows that see nothing are 0.

    One sequence and head at a time, so that long sequences fit into memory.
    """
    if table is not None:
        key, value = gathered(key, table), gathered(value, table)
    b, heads, rows, d = query.shape
    group, keys = heads // key.shape[1], key.shape[2]
    scale = 1 / math.sqrt(d) if scale is None else scale
    sees = visible(rows, keys, b, causal, lengths, query.device)
    out = torch.empty(b, heads, rows, value.shape[3], dtype=dtype, device=query.device)
    for n in range(b):
        hidden = ~sees[n]
        for h in range(heads):
            q = norm(query[n, h].to(dtype), weights[0], eps)
            k = norm(key[n, h // group].to(dtype), weights[1], eps)
            scores = (q @ k.T * scale).masked_fill(hidden, -math.inf)
            p = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
            out[n, h] = p @ value[n, h // group].to(dtype)
    return out
