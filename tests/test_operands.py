"""Operands of products: the order in which they are stored, and extents that a call says."""

from __future__ import annotations

import pytest

import cutesuper as cs
from cutesuper.errors import LoweringError, ScheduleError, SearchError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.report import plan_text
from cutesuper.search.region import SearchOptions
from cutesuper.search.search import search
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
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


def best(graph: KernelGraph) -> MuGraph:
    """The best program."""
    return search(graph, H200, options=SearchOptions(lowered=True, keep=1)).candidates[0].mugraph


def kernels(graph: KernelGraph) -> int:
    """Number of kernels of the best program."""
    return len(best(graph).steps)


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


@pytest.mark.parametrize(
    ("shape", "rows"), [((32, 4, 256), 32), ((4, 32, 256), 32), ((cs.symbol("B", 64), 8, 256), 64)]
)
def test_the_longest_label_that_a_weight_lacks_is_that_of_rows(
    shape: tuple[Dim, ...], rows: int
) -> None:
    """Each index of the others reads the weight again."""
    g = new_kernel_graph()
    x, w = g.new_input(shape, "float16", name="X"), g.new_input((256, 128), "float16", name="W")
    g.mark_output(g.matmul(x, w))
    mu = best(g)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, MatmulPlan) and plan.tile[0] == rows and len(plan.batch) == 1


# --------------------------------------------------------------------------- parts of the grid


def of_two(m: Dim, k: int, n: int) -> KernelGraph:
    """``X W`` with a bias."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), "bfloat16", name="X"), g.new_input((k, n), "bfloat16", name="W")
    g.mark_output(g.matmul(x, w) + g.new_input((n,), "bfloat16", name="b"))
    return g


def parts(graph: KernelGraph) -> int:
    """Parts into which the grid divides the contracted label in the best program."""
    mu = best(graph)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, MatmulPlan)
    assert plan.parts * plan.tiles <= H200.sms
    return plan.parts


def test_the_grid_divides_long_products_of_few_tiles() -> None:
    assert parts(of_two(256, 524288, 256)) > 16
    assert parts(of_two(cs.symbol("M", hint=256), 524288, 256)) == 1  # open numbers of tiles
    assert parts(of_two(4096, 4096, 256)) == 1
    # threads copy both operands, which is slow enough for shorter ones
    assert parts(of_columns(513, 1777, 1001, "bfloat16")) > 1 == parts(of_two(512, 1776, 1000))


def test_parts_of_the_grid_in_words() -> None:
    plan = Linear(m=150, k=1000, n=136, tile_m=80, tile_k=64, norm=False, parts=5).plan()
    sums, counters = plan.scratch
    assert sums.shape == (6 * 5 * 80 * 64,) and counters.shape == (6,) and counters.zeroed
    text = plan_text("k", plan)
    assert (
        "5 blocks share each tile, each with a part of K: they leave their sums in 153600" in text
    )
    assert "meet at 6 counter(s)" in text and not plan.schedule.bulk_store


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        (Linear(k=1024, parts=4), "no statistics, products after the loop, reductions along the c"),
        (Linear(k=1024, norm=False, parts=2, cluster=2), "or clusters"),
        (Linear(Symbol("M"), 1024, norm=False, parts=2), "the number of tiles must be known"),
        (
            Linear(k=1024, n=4352, norm=False, parts=2),
            "2 parts of K in each of 68 tiles .* fewer pa",
        ),
    ],
)
def test_parts_of_the_grid_are_refused(linear: Linear, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        linear.plan()
