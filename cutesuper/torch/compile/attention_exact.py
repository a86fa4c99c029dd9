"""PyTorch's operators for attention by their formulas, in the operands' element type.
Most of them take 16 bits only, and what kernels compute is compared with float64."""

from __future__ import annotations

from typing import Any

import torch

from cutesuper.torch.aten.attention import cotangent_of
from cutesuper.torch.aten.length_masks import mask_of


def attention(target: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """The results of one of PyTorch's operators that regions use.
    The result and the logarithms of the sums of its rows, or the gradients of query, key and
    value."""
    names = (a.name for a in target._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "_backward" in str(target):
        return _backward(given)
    y, sums = _forward(given)
    return y, sums[..., None] if "cudnn" in str(target) else sums


def _forward(a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(a)
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp().nan_to_num() @ _each(a, "value"), sums


def _backward(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    query, value, dy = a["query"], _each(a, "value"), cotangent_of(a)
    sums = a["logsumexp"].reshape(*query.shape[:-1], 1)
    weights = (_scores(a) - sums).exp().nan_to_num()  # of a row that sees nothing
    change = weights * (dy @ value.mT - (dy * a["out"]).sum(-1, keepdim=True)) * _scale(a)
    found = change.mT @ query, weights.mT @ dy
    heads = a["key"].shape[-3]
    summed = (t.unflatten(-3, (heads, -1)).sum(-3) for t in found)
    return (change @ _each(a, "key"), *summed)


def _scores(a: dict[str, Any]) -> torch.Tensor:
    """Scaled scores, -inf where a key is hidden."""
    scores = a["query"] @ _each(a, "key").mT * _scale(a)
    if a.get("is_causal", False):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    mask = mask_of(a)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _scale(a: dict[str, Any]) -> float:
    scale = a.get("scale")
    return a["query"].shape[-1] ** -0.5 if scale is None else scale


def _each(a: dict[str, Any], name: str) -> torch.Tensor:
    """Keys or values of every query head."""
    t, heads = a[name], a["query"].shape[-3]
    return t.repeat_interleave(heads // t.shape[-3], -3)
