"""Large products on a GPU: operands in other orders, few tiles, and tiles of few stages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests import zoo
from tests.odd_products import of_columns
from tests.test_gpu import check, run

pytestmark = pytest.mark.gpu


def product(*shape: int) -> KernelGraph:
    """``X W + R`` of ``(batch..., M, K, N)``; a batch of X has one W."""
    *batch, m, k, n = shape
    g = new_kernel_graph()
    x, w = g.new_input((*batch, m, k), "bfloat16", "X"), g.new_input((k, n), "bfloat16", "W")
    g.mark_output(g.matmul(x, w) + g.new_input((*batch, m, n), "bfloat16", "R"))
    return g


TURNED = [
    (1000, 1777, 512), (513, 1777, 1001), (4096, 8192, 1024), (14336, 2048, 4096),
    (768, 65536, 768), (4096, cs.symbol("T", hint=4096), 1024),
    (1000, cs.symbol("T", hint=512), 1001),
]  # fmt: skip


@pytest.mark.parametrize("shape", TURNED, ids=str)
def test_rows_side_by_side(shape: tuple[int, Dim, int]) -> None:
    m, k, n = shape
    kernel = cs.superoptimize(of_columns(m, k, n, "bfloat16"))
    for tokens in (4096, 1777, 64) if isinstance(k, Symbol) else (k,):
        check(kernel, zoo.draw(kernel.graph, 1, "cuda", {"T": tokens}))


SHAPES = [
    (256, 524288, 256), (512, 65536, 128), (130, 20000, 257),  # parts of the grid
    (8192, 64, 8192), (8192, 32, 4096), (16, 32, 512, 256, 768),  # tiles of a few stages
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_and_short_loops(shape: tuple[int, ...]) -> None:
    """Right, and the same bits in every launch, with memory that others wrote in between."""
    kernel = cs.superoptimize(product(*shape))
    inputs = zoo.draw(kernel.graph, 1, "cuda")
    [first] = check(kernel, inputs)
    for _ in range(20):
        torch.empty(1 << 24, device="cuda").fill_(torch.nan)
        assert torch.equal(first, run(kernel, inputs)[0])
