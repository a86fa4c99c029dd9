"""Logarithms of the sums of rows of attention, and sinks that join these sums: numbers on the CPU
and on a GPU, plans, refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.errors import CutesuperError, DTypeError, ShapeError
from cutesuper.ir.dtypes import bfloat16
from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.torch.ops.attention.gradient import _graphs
from cutesuper.torch.ops.attention.kind import Kind, keys_of, rows_of
from cutesuper.verify.numeric import acceptable


@dataclass(frozen=True)
class Call:
    """A call of attention with sinks, that returns logarithms.

    Attributes:
        sinks: whether there are any.
        lengths: of the sequences, if they have some.
        sums: whether the logarithms are returned.
        size: of the numbers.
    """

    sinks: bool = True
    sums: bool = True
    batch: int = 2
    heads: int = 2
    group: int = 2
    rows: int = 20
    keys: int = 75
    width: int = 64
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    tokens: bool = False
    size: float = 1.0

    def judge(self, dtype: torch.dtype, device: str) -> None:
        """Result, logarithms, and all gradients, by the rule against float64."""
        torch.manual_seed(0)
        many = self.heads * self.group
        shapes = (many, self.rows), (self.heads, self.keys), (self.heads, self.keys)
        sides = [self._drawn(*shape).to(dtype).to(device) for shape in shapes]
        own = [torch.randn(many, device=device) * self.size] if self.sinks else []
        given = [t.detach().requires_grad_() for t in (*sides, *own)]
        lengths = None
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        made = cs.ops.attention(
            *given[:3], is_causal=self.causal, enable_gqa=True, key_lengths=lengths,
            sinks=given[3] if own else None, return_lse=self.sums,
        )  # fmt: skip
        made = made if self.sums else (made,)
        rise = [torch.randn(made[0].shape, device=device).to(dtype)]
        rise += [torch.randn(t.shape, device=device) for t in made[1:]]
        found = [*made, *torch.autograd.grad(made, given, rise)]
        wants = (self._by_torch(given, rise, t) for t in (torch.float64, dtype))
        for mine, want, eager in zip(found, *wants, strict=True):
            report = acceptable(mine.detach(), want, eager, mine.dtype)
            assert report, report.message

    def _drawn(self, heads: int, rows: int) -> torch.Tensor:
        t = torch.randn(self.batch, rows, heads, self.width) * self.size
        return t.transpose(1, 2) if self.tokens else t.transpose(1, 2).contiguous()

    def _by_torch(self, given: Any, rise: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in given]
        q, k, v = own[0], *(t.repeat_interleave(self.group, 1) for t in own[1:3])
        scores = q @ k.mT * self.width**-0.5
        scores = scores.masked_fill(~self.sees(scores), -inf)
        if self.sinks:
            column = own[3][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        p, sums = scores.softmax(-1)[..., : self.keys], scores.float().logsumexp(-1)
        made = (p @ v, sums.to(dtype) if dtype == torch.float64 else sums)
        made = made if self.sums else made[:1]
        rise = [t.to(m.dtype) for t, m in zip(rise, made, strict=True)]
        return [*(t.detach() for t in made), *torch.autograd.grad(made, own, rise)]

    def sees(self, scores: torch.Tensor) -> torch.Tensor:
        """True where a row sees a key."""
        key = torch.arange(self.keys, device=scores.device)
        row = torch.arange(self.rows, device=scores.device)[:, None]
        if self.lengths is None:
            seen = key <= row if self.causal else key >= 0
            return seen.expand(scores.shape)
        ends = torch.tensor(self.lengths, device=scores.device)[:, None, None, None]
        ends = ends - (self.rows - 1 - row) if self.causal else ends
        return (key < ends).expand(scores.shape)


CALLS = {
    "logarithms": Call(sinks=False),
    "of causal rows": Call(sinks=False, causal=True, tokens=True),
    "sinks": Call(sums=False),
    "both": Call(causal=True, group=1),
    "both, by lengths": Call(lengths=(30, 75), causal=True, tokens=True),
    "one row": Call(rows=1, lengths=(5, 75), causal=True, sums=False),
    "rows that see nothing": Call(lengths=(0, 5), causal=True),
    "small": Call(size=1e-3),
    "large": Call(size=6.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers(name: str) -> None:
    CALLS[name].judge(torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", ["of causal rows", "both, by lengths", "rows that see nothing"])
def test_kernels(name: str) -> None:
    CALLS[name].judge(torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_large_kernels(name: str) -> None:
    replace(CALLS[name], rows=min(CALLS[name].rows * 20, 400), width=128).judge(
        torch.bfloat16, "cuda"
    )


def test_rows_without_keys() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8)
    none = torch.zeros(1, dtype=torch.int32)
    y, lse = cs.ops.attention(q, k, k, key_lengths=none, return_lse=True)
    assert (y == 0).all() and (lse == -inf).all()
    sinks = torch.tensor([1.0, -2.0])
    for keys in (k, k[:, :, :0]):
        y, lse = cs.ops.attention(q, keys, keys, key_lengths=none, sinks=sinks, return_lse=True)
        assert (y == 0).all() and torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))


def test_one_of_both_gradients() -> None:
    """The result alone, or the logarithms alone, may be differentiated."""
    q, k = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(2))
    y, lse = cs.ops.attention(q, k, k, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    scores = q @ k.mT * 8**-0.5
    torch.testing.assert_close(dq, torch.autograd.grad(scores.logsumexp(-1).sum(), q)[0])
    (dq,) = torch.autograd.grad(y.sum(), q)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k).sum()
    torch.testing.assert_close(dq, torch.autograd.grad(want, q)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_each_pass_is_whole(causal: bool) -> None:
    """Sinks meet the results where these are stored; their gradient reads what the backward pass
    has anyway, sums of rows."""
    kind = Kind(2, False, 2, 2, rows_of(100), keys_of(300), 64, 64, bfloat16, causal=causal)
    both = _graphs(replace(kind, sums=True, sinks=True))
    passes = (both.forward, ["AttentionPlan"]), (both.backward, ["RowPlan", "SumsPlan", "SumsPlan"])
    for graph, kernels in passes:
        made = search(graph, H200, options=SearchOptions(lowered=True), near=1.02)
        mu = made.candidates[0].mugraph
        assert [type(make_plan(s, mu.tensors, H200)).__name__ for s in mu.steps] == kernels


@pytest.mark.parametrize(
    ("sinks", "kind", "message"),
    [
        (torch.zeros(3), ShapeError, r"sinks has shape \[3\], must be \[2\], a logit for each"),
        (torch.zeros(2, dtype=torch.float64), DTypeError, "sinks is torch.float64; use"),
    ],
)
def test_refusals(sinks: torch.Tensor, kind: type[CutesuperError], message: str) -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(kind, match=message):
        cs.ops.attention(q, q, q, sinks=sinks)
