"""Attention whose rows have limits on both sides, written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cutesuper.ops import packed_limits


@dataclass(frozen=True)
class Case:
    """A call: extents, and who sees whom ``[B, L, S]``.

    Attributes:
        options: keyword arguments of the call.
        seen: True where a row sees a key.
        far: keys in tiles that nobody sees on the left, ``[B, S]``.
    """

    query: Any
    key: Any
    value: Any
    options: dict[str, Any]
    seen: Any


def sides(
    b: int, heads: int, group: int, rows: int, keys: int, width: int, dtype: Any, device: str,
    seed: int = 0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Query, key and value."""
    torch.manual_seed(seed)
    shapes = (b, heads * group, rows, width), (b, heads, keys, width), (b, heads, keys, width)
    q, k, v = (torch.randn(s).to(device, dtype) for s in shapes)
    return q, k, v


def case(name: str, q: Any, k: Any, v: Any, seed: int = 0) -> Case:
    """A call of a kind, with random limits."""
    (b, _, rows, _), keys, device = q.shape, k.shape[2], q.device
    rng = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> Any:
        return torch.randint(low, high + 1, shape, generator=rng, dtype=torch.int32).to(device)

    i = torch.arange(rows, device=device)[None, :, None]
    j = torch.arange(keys, device=device)[None, None, :]
    width = int(drawn(1, max(1, keys // 3), 1))
    lengths = drawn(0, keys, b)
    starts = drawn(0, keys // 2, b)
    ends = lengths[:, None, None]
    if name == "window":
        seen = (j <= i) & (j > i - width)
        options: dict[str, Any] = {"is_causal": True, "window": width}
    elif name == "two sides":
        seen = (j <= i + 2) & (j >= i - width)
        options = {"window": (width, 2)}
    elif name == "two sides behind a cache":
        last = ends - (rows - 1 - i)
        seen = (j < torch.minimum(ends, last + 5)) & (j >= last - 1 - width)
        seen = seen & (j >= starts[:, None, None])
        options = {"window": [width, 5], "key_lengths": lengths, "key_starts": starts}
    elif name == "one side":
        seen = (j <= i + width) & (j >= starts[:, None, None])
        options = {"window": (None, width), "key_starts": starts}
    elif name == "window behind a cache":
        last = ends - (rows - 1 - i)
        seen = (j < last) & (j >= last - width)
        options = {"is_causal": True, "window": width, "key_lengths": lengths}
    elif name == "left padding":
        seen = (j < ends) & (j >= starts[:, None, None])
        options = {"key_lengths": lengths, "key_starts": starts}
    elif name == "left padding, causal":
        seen = (j <= i) & (j >= starts[:, None, None])
        options = {"is_causal": True, "key_starts": starts}
    elif name == "left padding in a window":
        last = ends - (rows - 1 - i)
        seen = (j < last) & (j >= last - width) & (j >= starts[:, None, None])
        options = {
            "is_causal": True, "window": width, "key_lengths": lengths, "key_starts": starts,
        }  # fmt: skip
    elif name == "rows":
        first = drawn(0, keys, b, rows).sort(-1).values.int()
        behind = (first + drawn(0, keys // 4, b, rows)).sort(-1).values.int()
        seen = (j >= first[..., None]) & (j < behind[..., None])
        options = {"key_starts": first, "key_ends": behind}
    else:
        return _packed(name, q, k, v, rng)
    return Case(q, k, v, options, seen.expand(b, rows, keys))


def _packed(name: str, q: Any, k: Any, v: Any, rng: Any) -> Case:
    rows, keys, device = q.shape[2], k.shape[2], q.device

    def cuts(n: int) -> Any:
        inner = torch.randint(0, n + 1, (3,), generator=rng).sort().values
        return torch.cat([torch.tensor([0]), inner, torch.tensor([n])]).int()

    cu_q, cu_k = cuts(rows), cuts(keys)
    sides = (3, 7) if "sides" in name else None
    causal, window = "causal" in name or "window" in name, 40 if "window" in name else sides
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        for i in range(int(a), int(b)):
            end = int(d) - (int(b) - 1 - i) if causal or sides else int(d)
            first = 0 if not window else end - 4 if sides else end - 40
            end = min(end + 7, int(d)) if sides else end
            seen[i, max(int(c), first) : max(end, 0)] = True
            seen[i, : int(c)] = False
    options = packed_limits(
        cu_q.to(device), cu_k.to(device), rows=rows, is_causal=causal, window=window
    )
    return Case(q, k, v, options, seen.to(device)[None])


def exact(c: Case, query: Any, key: Any, value: Any) -> Any:
    """The result in the type of the tensors; rows that see nothing are 0."""
    group = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (key, value))
    hidden = ~c.seen[:, None]
    nothing = hidden.all(-1, keepdim=True)
    scores = (query @ k.mT / math.sqrt(query.shape[-1])).masked_fill(hidden & ~nothing, -math.inf)
    return scores.softmax(-1).masked_fill(nothing, 0.0) @ v


CASES = (
    "window", "window behind a cache", "left padding", "left padding, causal",
    "left padding in a window", "rows", "packed", "packed, causal", "packed in a window",
    "two sides", "two sides behind a cache", "one side", "packed, two sides",
)  # fmt: skip
