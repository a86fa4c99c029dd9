"""Gradients of attention on a GPU, against float64, by the rule of `acceptable`: every mask, order
of memory and width, extents that divide nothing, and the same bits in every run.

All memory that torch.empty returns is full of NaN, so that what is not written shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from cutesuper.skeletons.attention.sums.plan import SumsPlan
from cutesuper.torch.ops.attention import gradient
from cutesuper.verify.numeric import acceptable
from tests import zoo
from tests.attention_reference import visible
from tests.test_attention_gradients import (
    attention,
    gated,
    of_copies,
    of_groups,
    one_in_all_visits,
)
from tests.test_gpu import check
from tests.test_gpu_ops_attention import poisoned

pytestmark = pytest.mark.gpu
__all__ = ["poisoned"]  # a fixture of every test here


@dataclass(frozen=True)
class Call:
    """A call of attention; ``scale``: of the random numbers."""

    batch: int = 1
    heads: int = 1
    group: int = 2
    rows: int = 60
    keys: int = 130
    width: int = 64
    value_width: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    lengths: tuple[int, ...] = ()
    tokens: bool = False
    scale: float = 1.0

    def sides(self) -> list[torch.Tensor]:
        """Query, key and value; what is behind a length is NaN."""
        torch.manual_seed(self.rows + self.keys)
        many, single = self.heads * self.group, self.heads
        shapes = (many, self.rows, self.width), (single, self.keys, self.width)
        found = [self._tensor(s) for s in (*shapes, (single, self.keys, self.value_width))]
        for b, n in enumerate(self.lengths):
            for t in found[1:]:
                t[b, :, n:] = torch.nan
        return found

    def _tensor(self, shape: tuple[int, int, int]) -> torch.Tensor:
        h, n, d = shape
        made = torch.randn(self.batch, n, h, d, device="cuda") * self.scale
        made = made.to(self.dtype).transpose(1, 2)
        return made if self.tokens else made.contiguous()

    def cotangent(self) -> torch.Tensor:
        """The cotangent of the result."""
        shape = (self.batch, self.heads * self.group, self.rows, self.value_width)
        return torch.randn(shape, device="cuda").to(self.dtype)

    @property
    def ends(self) -> torch.Tensor | None:
        """The lengths as a tensor."""
        if not self.lengths:
            return None
        return torch.tensor(self.lengths, dtype=torch.int32, device="cuda")

    def run(self, sides: Sequence[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
        """The result and the gradients by our kernels."""
        q, k, v = (t.detach().requires_grad_() for t in sides)
        y = cs.ops.attention(q, k, v, is_causal=self.causal, enable_gqa=True, key_lengths=self.ends)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), cotangent)]

    def by_torch(
        self, sides: Sequence[torch.Tensor], cotangent: torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The same by PyTorch in an element type, operator by operator."""
        own = [t.detach().nan_to_num(0.0).to(dtype).requires_grad_() for t in sides]
        q, k, v = own[0], *(t.repeat_interleave(self.group, 1) for t in own[1:])
        sees = visible(self.rows, self.keys, self.batch, self.causal, self.ends, "cuda")[:, None]
        scores = (q @ k.mT * self.width**-0.5).masked_fill(~sees, -6e4)
        y = (scores.softmax(-1) * sees) @ v
        return [y.detach(), *torch.autograd.grad(y, own, cotangent.to(dtype))]


SMALL: dict[str, Call] = {
    "whole": Call(2, 1, 3, 33, 70, causal=False, dtype=torch.float16, tokens=True),
    "lengths, causal": Call(2, 1, 1, 50, 90, 40, 72, lengths=(90, 30)),
}
CALLS: dict[str, Call] = {
    "causal": Call(),
    "heads of 128": Call(group=1, rows=64, keys=64, width=128, value_width=128),
    "lengths": Call(2, 1, 2, 40, 100, causal=False, lengths=(77, 0)),
    "two warpgroups": Call(2, 4, 4, 1000, 1000, 128, 128),
    "heads of 64": Call(1, 8, 4, 2048, 2048, dtype=torch.float16),
    "heads of 256": Call(1, 2, 2, 300, 500, 256, 256),
    "many sequences": Call(5, 2, 1, 200, 333, causal=False, lengths=(1, 333, 64, 65, 200)),
    "no groups": Call(2, 3, 1, 777, 555, 128, 64, causal=False, tokens=True),
    "large scores": Call(1, 2, 4, 500, 500, scale=4.0),
    "small numbers": Call(1, 2, 2, 500, 500, scale=0.01),
}


@pytest.mark.ptx
@pytest.mark.parametrize("name", SMALL)
def test_small_calls(name: str) -> None:
    judge(SMALL[name])


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    judge(CALLS[name])


def judge(call: Call) -> None:
    sides, cotangent = call.sides(), call.cotangent()
    found = call.run(sides, cotangent)
    wanted = call.by_torch(sides, cotangent, torch.float64)
    eager = call.by_torch(sides, cotangent, call.dtype)
    for n, (mine, want, other) in enumerate(zip(found, wanted, eager, strict=True)):
        report = acceptable(mine, want, other, call.dtype)
        assert report, f"{['result', 'query', 'key', 'value'][n]}: {report.message}"


@pytest.mark.parametrize("name", ["two warpgroups", "many sequences"])
def test_the_same_bits_in_every_run(name: str) -> None:
    call = CALLS[name]
    sides = call.sides()
    cotangent = call.cotangent()
    first = call.run(sides, cotangent)
    for _ in range(20):
        for a, b in zip(first, call.run(sides, cotangent), strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_a_kernel_of_the_graph() -> None:
    """`cs.superoptimize` of attention: autograd through two passes, scores computed again."""
    kernel = cs.superoptimize(attention())
    sides = [torch.randn(2, 4, 256, 64, device="cuda").bfloat16() for _ in range(3)]
    own = [t.requires_grad_() for t in sides]
    y = kernel(*own)
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, own, cotangent)
    call = Call(2, 4, 1, 256, 256)
    wanted = call.by_torch(sides, cotangent, torch.float64)[1:]
    eager = call.by_torch(sides, cotangent, torch.bfloat16)[1:]
    for mine, want, other in zip(found, wanted, eager, strict=True):
        assert acceptable(mine, want, other, torch.bfloat16)


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("make", "loops"), [(of_copies, 2), (of_groups, 2), (one_in_all_visits, 0)]
)
def test_what_differs_in_visits(make: Callable[[], KernelGraph], loops: int) -> None:
    """Copies of K and V that differ within a group, and a sum without the heads of another one."""
    kernel = cs.superoptimize(make())
    assert [type(s.plan) for s in kernel.kernels].count(SumsPlan) == loops
    check(kernel, zoo.draw(kernel.graph, 5, "cuda"))


def test_a_gated_mlp() -> None:
    """The same loop without masks and vectors, and a last tile that reaches past the end."""
    kernel = cs.superoptimize(gated())
    assert isinstance(kernel.kernels[0].plan, SumsPlan)
    check(kernel, zoo.draw(kernel.graph, 3, "cuda"))


def test_two_kernels_and_a_sum() -> None:
    call = CALLS["two warpgroups"]
    sides = call.sides()
    call.run(sides, call.cotangent())
    backward = [p.backward for p in gradient._passes.values()]
    plans = [[type(s.plan) for s in k.kernels] for k in backward if isinstance(k, Kernel)]
    assert any(len(p) == 3 and p.count(SumsPlan) == 2 for p in plans)
