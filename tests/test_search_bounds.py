"""Bounds of what programs cost: fewer regions are searched, the cheapest program is the same."""

from __future__ import annotations

import pytest

from benchmarks.search.programs import PROGRAMS
from cutesuper.errors import LoweringError, SearchError
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.search.bounds import TooDear, least_us
from cutesuper.search.cuts import Flat, Segments
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.search.search import search
from cutesuper.targets import H200

SOFTMAX = PROGRAMS["softmax(X W)"]


def chains(layers: int) -> KernelGraph:
    """Products between norms, which are no one kernel."""
    g = new_kernel_graph()
    x = g.new_input((512, 256), "bfloat16")
    for _ in range(layers):
        y = g.matmul(g.rms_norm(x, normalized_shape=(256,)), g.new_input((256, 256), "bfloat16"))
        x = g.add(x, g.silu(y))
    g.mark_output(x)
    return g


def test_bounds_leave_the_cheapest_program() -> None:
    options = SearchOptions(keep=4, lowered=True)
    for graph in (SOFTMAX.build(**SOFTMAX.small), chains(2)):
        whole = search(graph, H200, options=options)
        narrow = search(graph, H200, options=options, near=1.0)
        assert narrow.candidates[0].structure == whole.candidates[0].structure
        assert narrow.candidates[0].cost_us == whole.candidates[0].cost_us
        assert narrow.statistics.regions < whole.statistics.regions


def test_bounds_are_below_what_kernels_cost() -> None:
    segments = Segments(Flat(chains(2).expanded()))
    options = SearchOptions(lowered=True)
    for segment, _, _ in segments.all(longest=3):
        for way in search_region(segment.region, H200, options).ways:
            assert least_us(segment.region, H200) <= way.total


def test_a_search_that_cannot_be_cheap_enough_ends() -> None:
    graph, options = chains(2), SearchOptions(keep=4, lowered=True)
    best = search(graph, H200, options=options, near=1.0)
    cost = best.candidates[0].cost_us
    with pytest.raises(TooDear, match=r"at least .* us, and .* are allowed") as caught:
        search(graph, H200, options=options, near=1.0, most_us=cost / 2)
    assert cost / 2 < caught.value.least_us <= cost
    again = search(graph, H200, options=options, near=1.0, most_us=cost)
    assert again.candidates[0].cost_us == cost


def test_what_has_no_kernel_is_named_as_without_bounds() -> None:
    g = new_kernel_graph()
    x = g.new_input((96, 48), "bfloat16")
    g.mark_output(g.exp(g.matmul(g.sum(x, 0), g.new_input((48, 7), "bfloat16"))))
    options, reasons = SearchOptions(keep=4, lowered=True), list[str]()
    for near in (float("inf"), 1.0):
        try:
            search(g, H200, options=options, near=near)
            reasons.append("found")
        except (SearchError, LoweringError) as error:
            reasons.append(str(error))
    assert reasons[0] == reasons[1]
