"""Mask tensors and biases in attention: numbers on the CPU and on a GPU, plans, refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.errors import CutesuperError
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.report import plan_text
from cutesuper.runtime.programs import Kept
from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.torch.ops.attention import gradient
from cutesuper.verify.numeric import acceptable


@dataclass(frozen=True)
class Call:
    """A call of attention with a mask tensor.

    Attributes:
        mask: extents of the mask.
        kind: of its elements; conditions hide a whole row.
        causal: with a causal mask as well.
    """

    mask: tuple[int, ...] = (2, 1, 20, 75)
    kind: torch.dtype = torch.bool
    batch: int = 2
    heads: int = 1
    group: int = 2
    rows: int = 20
    keys: int = 75
    width: int = 64
    causal: bool = False
    tokens: bool = False

    def judge(self, dtype: torch.dtype, device: str) -> None:
        """The result and the gradients, that of a bias too, by the rule against float64."""
        torch.manual_seed(0)
        like, many = torch.empty(0, dtype=dtype, device=device), self.heads * self.group
        shapes = (many, self.rows), (self.heads, self.keys), (self.heads, self.keys)
        sides = [self._drawn(*shape, like) for shape in shapes]
        dy = torch.randn(sides[0].shape, device=device).to(dtype)
        mask = torch.randn(self.mask, device=device)
        mask = mask > 0 if self.kind == torch.bool else mask.to(self.kind)
        if self.kind == torch.bool:
            mask[..., 3 % mask.shape[-2], :] = False
        q, k, v = (t.detach().requires_grad_() for t in sides)
        bias = [mask.requires_grad_()] if self.kind != torch.bool else []
        y = cs.ops.attention(q, k, v, mask, is_causal=self.causal, enable_gqa=True)
        found = [y.detach(), *torch.autograd.grad(y, (q, k, v, *bias), dy)]
        others = (self._by_torch(sides, mask, dy, t) for t in (torch.float64, dtype))
        for mine, want, eager in zip(found, *others, strict=True):
            report = acceptable(mine, want, eager, mine.dtype)
            assert report, report.message

    def _drawn(self, heads: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        t = torch.randn(self.batch, rows, heads, self.width, device=like.device)
        t = t.to(like.dtype).transpose(1, 2)
        return t if self.tokens else t.contiguous()

    def _by_torch(self, sides: Any, mask: Any, dy: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in sides]
        q, k, v = own[0], *(t.repeat_interleave(self.group, 1) for t in own[1:])
        scores = q @ k.mT * self.width**-0.5
        sees = mask if mask.dtype == torch.bool else torch.ones_like(mask, dtype=torch.bool)
        sees = sees.expand(scores.shape)
        if self.causal:
            sees = sees & torch.ones_like(scores, dtype=torch.bool).tril()
        if mask.dtype != torch.bool:
            own.append(mask.detach().to(dtype).requires_grad_())
            scores = scores + own[-1]
        p = scores.masked_fill(~sees, -6e4).softmax(-1) * sees
        y = p @ v
        return [y.detach(), *torch.autograd.grad(y, own, dy.to(dtype))]


CALLS = {
    "conditions": Call(),
    "conditions of keys": Call((2, 1, 1, 75), causal=True),
    "bias of all heads": Call((20, 75), torch.float32),
    "bias of each head": Call((1, 2, 20, 75), torch.float32, causal=True, tokens=True),
    "one head each": Call((2, 3, 40, 40), torch.float32, 2, 3, 1, 40, 40),
    "a distance": Call((4, 1, 75), torch.float32, 1, 2, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers(name: str) -> None:
    CALLS[name].judge(torch.float32, "cpu")


SMALL = {
    "conditions": Call(),
    "bias of each head": Call((1, 2, 20, 75), torch.bfloat16, causal=True, tokens=True),
}
LARGE = {
    "conditions": Call((2, 1, 1000, 1000), torch.bool, 2, 4, 4, 1000, 1000, 128),
    "bias": Call((1, 8, 2048, 2048), torch.bfloat16, 1, 2, 4, 2048, 2048, 64, True),
    "in float32": Call((2, 1, 777, 555), torch.float32, 2, 3, 2, 777, 555, 64),
    "of keys": Call((5, 1, 1, 333), torch.bool, 5, 2, 2, 200, 333, 128),
}


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", SMALL)
def test_kernels(name: str) -> None:
    SMALL[name].judge(torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_large_kernels(name: str) -> None:
    LARGE[name].judge(torch.bfloat16, "cuda")


OPEN = {
    "conditions": (Call(causal=True), lambda rows, keys: (2, 1, rows, keys)),
    "bias": (Call(kind=torch.bfloat16), lambda rows, keys: (rows, keys)),
}


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", OPEN)
def test_kernels_of_any_extents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of all extents of a class meet the same kernels, forward and backward."""
    kept = Kept[Any, Any]()
    monkeypatch.setattr(gradient, "_kernels", kept)
    call, shape = OPEN[name]
    for rows, keys in ((20, 75), (65, 130), (70, 3)):
        own = replace(call, rows=rows, keys=keys, mask=shape(rows, keys))
        own.judge(torch.bfloat16, "cuda")
    kinds = [kind for (kind, *_), made in kept.items() if made is not None]
    extents = {(str(kind.rows), str(kind.keys)) for kind in kinds if not kind.lengths}
    assert extents == {("L", "S")}


# ------------------------------------------------------------------------------------------- plans


def program(shape: tuple[int, ...], hides: bool) -> KernelGraph:
    g = new_kernel_graph()
    q = g.new_input((2, 2, 2, 256, 64), "bfloat16", name="q")
    k, v = (g.new_input((2, 2, 1, 512, 64), "bfloat16", name=n) for n in "kv")
    mask = g.new_input(shape, "bfloat16", name="mask")
    scores = g.mul(g.matmul(q, g.transpose(k)), 0.125)
    scores = g.hide(mask, scores) if hides else g.add(scores, mask)
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


@pytest.mark.parametrize(
    ("shape", "hides"), [((2, 1, 1, 256, 512), True), ((2, 2, 256, 512), False)]
)
def test_each_pass_is_whole(shape: tuple[int, ...], hides: bool) -> None:
    """The gradient of a bias comes with that of the queries, tile by tile, and another kernel adds
    up what the bias repeats."""
    bias = [] if hides else ["mask"]
    parts = cs.split(program(shape, hides), ["q", "k", "v", *bias], save=["out", "lse"])
    backward = ["RowPlan", "SumsPlan", "SumsPlan", *(["RowPlan"] * len(bias))]
    for graph, kernels in ((parts.forward, ["AttentionPlan"]), (parts.backward, backward)):
        options = SearchOptions(lowered=True)
        made = search(graph, H200, options=options, near=1.02).candidates[0].mugraph
        plans = [make_plan(s, made.tensors, H200) for s in made.steps]
        assert [type(p).__name__ for p in plans] == kernels
        texts = [plan_text("k", p) for p in plans if type(p).__name__ != "RowPlan"]
        assert all("mask: read in registers while scores are multiplied" in t for t in texts)
    assert any("tile by tile" in t for t in texts) == (not hides)


def test_a_repeated_bias_has_a_gradient() -> None:
    q = torch.randn(2, 2, 4, 16)
    bias = torch.randn(1, 1, 1, 4, requires_grad=True)
    y = cs.ops.attention(q, q, q, bias.expand(2, 1, 4, 4))
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, bias)
    found, wanted = (torch.autograd.grad(t.square().sum(), bias)[0] for t in (y, want))
    torch.testing.assert_close(found, wanted)


def test_one_key() -> None:
    """Kernels count along the keys: there is a second one, which is hidden."""
    q, k = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 1, 16, requires_grad=True)
    y = cs.ops.attention(q, k, k, torch.randn(4, 1), is_causal=True)
    torch.testing.assert_close(y, k.expand(2, 2, 4, 16))
    [found] = torch.autograd.grad(y.sum(), k)
    torch.testing.assert_close(found, torch.full_like(found, 4.0))


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("mask", "why"), [
    (torch.zeros(3, 8), "must broadcast to"),
    (torch.zeros(4, 1), "last extent of 8"),
    (torch.zeros(4, 8, dtype=torch.int32), "use torch.bool"),
    (torch.zeros(4, 8, device="meta"), "move all to one device"),
    (3, "must be a torch tensor"),
])  # fmt: skip
def test_refusals(mask: Any, why: str) -> None:
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(CutesuperError, match=why):
        cs.ops.attention(q, k, k, mask)
