"""The roundings of the attention loop on a CPU: how much of the allowed error they take.

A tile of keys at a time: scores in fp32, a maximum that lags behind by up to `LAZY` where products
overlap, weights rounded to 16 bits for the product with the values but not for their sum, one
rounding of the result. Sums are PyTorch's, so errors of the order of summation are those of a
kernel only in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

import pytest
import torch

from cutesuper.verify.numeric import acceptable

#: as in `cutesuper.skeletons.attention.kernel.scores`, which needs CuTe DSL
LAZY, LOWEST = 6.0, -3.0e38


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Loop:
    """Attention of 2 sequences with 3 heads.

    Attributes:
        rows, keys, width: extents.
        causal: row i sees keys 0..i.
        tile: keys of a tile.
        lazy: the maximum lags behind.
    """

    rows: int
    keys: int
    width: int
    causal: bool
    tile: int
    lazy: bool

    def seen(self) -> torch.Tensor:
        """``[rows, keys]``."""
        every = torch.ones(self.rows, self.keys, dtype=torch.bool)
        return every.tril() if self.causal else every

    def draw(self, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Query, key and value."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(2, 3, n, self.width, generator=generator).to(dtype)
            for n in (self.rows, self.keys, self.keys)
        ]

    def exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The exact result, in float64."""
        scores = q.double() @ k.double().mT * self.width**-0.5
        return scores.masked_fill(~self.seen(), -torch.inf).softmax(-1) @ v.double()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The result of the kernel."""
        seen = self.seen()
        top = torch.full((*q.shape[:-1], 1), LOWEST)
        total, result = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
        for i in range(0, self.keys, self.tile):
            part = slice(i, i + self.tile)
            scores = q.float() @ k[..., part, :].float().mT
            scores = scores.masked_fill(~seen[:, part], -torch.inf)
            scores *= self.width**-0.5 * log2(2.718281828459045)
            best = torch.maximum(top, scores.amax(-1, keepdim=True))
            if self.lazy and not (best - top > LAZY).any():
                best = top
            weights, scale = torch.exp2(scores - best), torch.exp2(top - best)
            total = total * scale + weights.sum(-1, keepdim=True)
            result = result * scale + weights.to(q.dtype).float() @ v[..., part, :].float()
            top = best
        return (result * (1.0 / total)).to(q.dtype)


LOOPS = {
    # the first rows see 1, 2, 3 keys: nothing averages the rounding of their weights
    "fewer keys than rows": Loop(300, 100, 80, True, 128, False),
    "small tiles": Loop(300, 100, 80, True, 16, False),
    "lazy": Loop(64, 1000, 64, False, 64, True),
    "lazy, causal": Loop(200, 200, 64, True, 32, True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_roundings_take_a_fraction_of_what_is_allowed(name: str, dtype: torch.dtype) -> None:
    """The whole tensor, and each sequence and head by itself."""
    loop = LOOPS[name]
    for seed in range(2):
        given = loop.draw(seed, dtype)
        found, exact = loop.run(*given), loop.exact(*given)
        eager = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=loop.seen())
        whole = acceptable(found, exact, eager, dtype)
        assert whole.max_abs < 0.3 * whole.allowed_max_abs, whole.message
        heads = [y.flatten(0, 1) for y in (found, exact, eager)]
        for y, want, peer in zip(*heads, strict=True):
            one = acceptable(y, want, peer, dtype)
            assert one.max_abs < 0.4 * one.allowed_max_abs, one.message
            assert one.relative < 0.3 * one.allowed_relative, one.message
