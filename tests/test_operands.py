"""Operands of products: the order in which they are stored, and extents that a call says."""

from __future__ import annotations

import pytest

import cutesuper as cs
from cutesuper.errors import LoweringError, SearchError
from cutesuper.ir.dims import Dim
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.report import plan_text
from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.targets import H200
from tests.odd_products import of_columns
from tests.plans import Linear


def of_norms(m: int, k: int, n: int) -> KernelGraph:
    """``rms_norm(X^T) W``: something is computed of rows that lie side by side."""
    g = new_kernel_graph()
    x, w = g.new_input((k, m), "float16", name="X"), g.new_input((k, n), "float16", name="W")
    rows = g.transpose(x)
    g.mark_output(g.matmul(rows / g.sqrt(g.mean(g.square(rows), -1) + 1e-6), w))
    return g


def kernels(graph: KernelGraph) -> int:
    """Number of kernels of the best program."""
    found = search(graph, H200, options=SearchOptions(lowered=True, keep=1))
    return len(found.candidates[0].mugraph.steps)


def test_rows_that_lie_side_by_side_are_multiplied_where_they_are() -> None:
    assert kernels(of_columns(256, 1777, 512, "float16")) == 1
    assert kernels(of_norms(256, 512, 512)) == 2  # only products read them so


def test_their_tiles_are_whole_boxes() -> None:
    linear = Linear(m=100, k=100, tile_m=128, norm=False, turned=True)
    plan: MatmulPlan = linear.plan()
    assert plan.turned and "X (64 rows a box)" in plan_text("k", plan)
    with pytest.raises(LoweringError, match="contiguous along a free label tiled by 64"):
        Linear(m=100, k=100, tile_m=104, norm=False, turned=True).plan()
    with pytest.raises(LoweringError, match=r"X \(operation 0\) must be contiguous along K, or us"):
        Linear(m=100, k=100, tile_m=128, turned=True).plan()


@pytest.mark.parametrize("k", [512, cs.symbol("T", hint=512)], ids=["known", "open"])
def test_what_is_summed_may_be_open_where_both_are_stored_along_it(k: Dim) -> None:
    assert kernels(of_columns(64, k, 64, "float16")) == 1
    plan = Linear(m=64, k=k, tile_m=64, norm=False, turned=True).plan()
    assert ("where K is as hinted" in plan_text("k", plan)) == plan.open_depth == (k != 512)


def test_an_open_extent_of_strides_is_refused() -> None:
    g, rows = new_kernel_graph(), cs.symbol("T", hint=64)
    x, w = (g.new_input((2, rows, n), "float16") for n in (64, 128))
    g.mark_output(g.matmul(g.transpose(x), w))
    with pytest.raises(SearchError, match="T not as its first dimension"):
        kernels(g)
