"""Attention with limits on both sides, on a GPU: windows, padding in front, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.verify.numeric import acceptable
from tests.limits import CASES, Case, case, exact, sides

pytestmark = pytest.mark.gpu

#: extents of a call: sequences, heads of keys, query heads for each, queries, keys, width
Extents = tuple[int, int, int, int, int, int]

#: few queries, prompts, and lengths that fill no tile
LARGE: dict[str, Extents] = {
    "a step": (4, 2, 4, 1, 4000, 128),
    "few queries": (3, 2, 2, 20, 3000, 64),
    "a prompt": (2, 2, 4, 1500, 1500, 128),
    "odd": (3, 1, 3, 333, 777, 96),
}


def forward(c: Case) -> None:
    """Judge the result of a call."""
    found = cs.ops.attention(c.query, c.key, c.value, enable_gqa=True, **c.options)
    given = c.query, c.key, c.value
    want, eager = exact(c, *(t.double() for t in given)), exact(c, *given)
    report = acceptable(found, want, eager, c.query.dtype)
    assert report, report.message


def gradients(c: Case) -> None:
    """Judge the result of a call and its gradients."""

    def run(fn: Any, dtype: Any) -> list[Any]:
        own = [t.to(dtype, copy=True).requires_grad_() for t in (c.query, c.key, c.value)]
        y = fn(*own)
        torch.manual_seed(1)
        cotangent = torch.randn(y.shape).to(c.query.device, c.query.dtype)
        return [y.detach(), *torch.autograd.grad(y, own, cotangent.to(dtype))]

    ours = run(lambda *t: cs.ops.attention(*t, enable_gqa=True, **c.options), c.query.dtype)
    wants = run(lambda *t: exact(c, *t), torch.float64)
    others = run(lambda *t: exact(c, *t), c.query.dtype)
    for n, (mine, want, other) in enumerate(zip(ours, wants, others, strict=True)):
        report = acceptable(mine, want, other, c.query.dtype)
        assert report, f"{['result', 'query', 'key', 'value'][n]}: {report.message}"


def drawn(name: str, extents: Extents, seed: int, dtype: Any = torch.bfloat16) -> Case:
    packed = name.startswith("packed")
    own = (1, *extents[1:]) if packed else extents
    return case(name, *sides(*own, dtype, "cuda", seed), seed)


@pytest.mark.ptx
@pytest.mark.parametrize("name", ["window", "window behind a cache"])
def test_a_small_step(name: str) -> None:
    forward(drawn(name, (2, 1, 2, 1, 200, 64), 3))


@pytest.mark.ptx
@pytest.mark.parametrize(
    "name", ["left padding, causal", "packed in a window", "two sides behind a cache"]
)
def test_small_gradients(name: str) -> None:
    gradients(drawn(name, (2, 1, 2, 90, 150, 64), 3))


@pytest.mark.ptx
@pytest.mark.parametrize("rows", [1, 3])
def test_limits_that_fall_from_head_to_head(rows: int) -> None:
    """Limits rise along rows only: heads that share keys, whose limits fall, share no tile. They
    did, and keys that the first heads see were left out."""
    g = cs.new_kernel_graph()
    q = g.new_input((1, 2, 4, rows, 64), "bfloat16", name="q")
    k = g.new_input((1, 2, 1, 300, 64), "bfloat16", name="k")
    v = g.new_input((1, 2, 1, 300, 64), "bfloat16", name="v")
    ends = g.new_input((1, 2, 4, rows, 1), "int32", name="ends")
    hidden = g.limit_mask(g.matmul(q, g.transpose(k, (0, 1, 2, 4, 3))), ends, lower=False)
    g.mark_output(g.matmul(g.softmax(hidden, -1), v))
    kernel = cs.superoptimize(g)
    shapes = (4, rows), (1, 300), (1, 300)
    given = [torch.randn(1, 2, *s, 64, device="cuda").bfloat16() for s in shapes]
    last = torch.tensor([290, 200, 70, 5, 33, 300, 1, 128], device="cuda").view(1, 2, 4, 1, 1)
    limits = (last + 5 * torch.arange(rows, device="cuda").view(-1, 1)).int()

    def by_hand(q: Any, k: Any, v: Any) -> Any:
        seen = torch.arange(300, device="cuda") < limits
        return torch.where(seen, q @ k.mT, -torch.inf).softmax(-1) @ v

    found = kernel(*given, limits)
    report = acceptable(found, by_hand(*(t.double() for t in given)), by_hand(*given), found.dtype)
    assert report, report.message


@pytest.mark.parametrize("extents", LARGE)
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, extents: str) -> None:
    for seed in range(3):
        forward(drawn(name, LARGE[extents], seed))


@pytest.mark.parametrize("extents", ["few queries", "a prompt", "odd"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, extents: str) -> None:
    gradients(drawn(name, LARGE[extents], 5, torch.float16))


def test_keys_far_in_front_are_not_read() -> None:
    """NaN in the tiles in front of all windows would show: 0 times NaN is NaN."""
    q, k, v = sides(2, 2, 4, 64, 4096, 64, torch.bfloat16, "cuda")
    lengths = torch.tensor([4096, 3000], dtype=torch.int32, device="cuda")
    for b, first in enumerate((4096 - 64 - 500, 3000 - 64 - 500)):
        for t in (k, v):
            t[b, :, : first // 128 * 128] = torch.nan
    y = cs.ops.attention(q, k, v, is_causal=True, window=500, key_lengths=lengths, enable_gqa=True)
    assert y.isfinite().all()


def test_windows_over_pages() -> None:
    """The pages of a window, through a table."""
    q, k, v = sides(2, 2, 2, 1, 1024, 64, torch.bfloat16, "cuda")
    lengths = torch.tensor([1000, 300], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {
        "is_causal": True, "window": 200, "key_lengths": lengths, "enable_gqa": True,
    }  # fmt: skip
    table = torch.randperm(32, device="cuda").int().view(2, 16)
    keys, values = (torch.empty(32, 64, 2, 64, dtype=t.dtype, device="cuda") for t in (k, v))
    for cache, t in zip((keys, values), (k, v), strict=True):
        cache[table.flatten().long()] = t.transpose(1, 2).reshape(32, 64, 2, 64)
    found = cs.ops.attention(q, keys, values, page_table=table, **options)
    assert (found - cs.ops.attention(q, k, v, **options)).abs().max() < 1e-2


#: masks of query - key, as a function writes them, for 96 queries
APART: dict[str, Any] = {
    "causal": lambda d: d >= 0,
    "a window": lambda d: (d >= 0) & (d < 20),
    "both sides": lambda d: d.abs() < 20,
    "all but the last": lambda d: d > -30,
}


@pytest.mark.ptx
@pytest.mark.parametrize("name", APART)
def test_masks_written_with_differences(name: str) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        n = torch.arange(q.shape[2], device=q.device)
        mask = APART[name](n[:, None] - n)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    given = [torch.randn(1, 2, 96, 32, device="cuda").bfloat16() for _ in range(3)]
    program = cs.superoptimize(fn, given)
    assert program.outside == ()
    report = acceptable(
        program(*given), fn(*(t.double() for t in given)), fn(*given), torch.bfloat16
    )
    assert report, report.message
