"""Bounds of what programs cost: fewer regions are searched, the cheapest program is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.search.programs import PROGRAMS
from cutesuper.egraph.labelled import Region
from cutesuper.errors import LoweringError, SearchError
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.search.bounds import Bounds, TooDear, least_of_form_us, least_us
from cutesuper.search.cuts import Flat, Segments
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.search.search import Progress, _Search, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verification

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


def gelu_mlp() -> KernelGraph:
    """``tanh(layer_norm(X) U) * (X V)``, and sums over its rows."""
    g = new_kernel_graph()
    x, w = g.new_input((264, 256), "bfloat16"), g.new_input((256,), "bfloat16")
    u, v = (g.new_input((256, 192), "bfloat16") for _ in range(2))
    y = g.mul(g.tanh(g.matmul(g.layer_norm(x, w), u)), g.matmul(x, v))
    g.mark_output(y)
    g.mark_output(g.softmax(y))
    g.mark_output(g.sum(y, 0))
    return g


def test_sequences_are_priced_again_only_after_a_price_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[None] = []
    priced = Bounds._cheapest  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Bounds, "_cheapest", lambda b: (times.append(None), priced(b))[1])
    segments = Segments(Flat(chains(1).expanded()))
    regions = [s.region for s, _, _ in segments.all()]
    bounds = Bounds(segments, {r: least_us(r, H200) for r in regions})
    least = bounds.least
    assert bounds.below(1.0) and bounds.least == least and len(times) == 1
    bounds.tighten(regions[0], 0.0)  # lower than what is known
    assert bounds.least == least and len(times) == 1
    for region in regions:
        bounds.learn(region, 100.0)
    assert bounds.least == 100.0 and len(times) == 2


@pytest.mark.parametrize("build", [partial(chains, 1), gelu_mlp])
def test_bounds_are_below_what_kernels_cost(build: Callable[[], KernelGraph]) -> None:
    segments, tighter = Segments(Flat(build().expanded())), 0
    options = SearchOptions(lowered=True)
    for segment, _, _ in segments.all(longest=3):
        found = search_region(segment.region, H200, options)
        if found.error is None:
            rough = least_us(segment.region, H200)
            least = least_of_form_us(segment.region, H200)
            assert rough <= least <= found.ways[0].total
            tighter += least > 1.05 * rough
    assert tighter > 5


@pytest.mark.parametrize(("m", "k", "n"), [(8192, 4104, 64), (100, 4104, 64), (4096, 4104, 1024)])
@pytest.mark.parametrize("norm", [False, True])
def test_gains_of_many_rows_are_not_bound_by_helpers(m: int, k: int, n: int, norm: bool) -> None:
    """They multiply the columns, in registers."""
    g = new_kernel_graph()
    x, gain, w = (g.new_input(s, "bfloat16") for s in ((m, k), (k,), (k, n)))
    g.mark_output(g.matmul(g.rms_norm(x, gain) if norm else x * gain, w))
    flat = Flat(g.expanded())
    region = flat.segment(flat.order).region
    best = search_region(region, H200, SearchOptions(lowered=True)).ways[0].total
    assert 0.3 * best < least_of_form_us(region, H200) <= best


def test_what_no_skeleton_runs_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask outside of attention is named after 13 searches, of operators by themselves, though
    the graph has 145 regions."""
    g = new_kernel_graph()
    x = g.softmax(g.length_mask(g.new_input((3, 64, 16)), g.new_input((3,), "int32")))
    for _ in range(6):
        x = g.add(g.square(x), x)
    g.mark_output(x)
    looked: list[Region] = []

    def counted(region: Region, *rest: Any) -> Any:
        looked.append(region)
        return search_region(region, *rest)

    monkeypatch.setattr("cutesuper.search.search.search_region", counted)
    with pytest.raises(SearchError, match="no kernel can run length_mask"):
        search(g, H200, options=SearchOptions(lowered=True), near=float("inf"))
    assert len(looked) <= len(g.expanded().nodes)


def test_a_graph_without_a_value_ends_the_search() -> None:
    """Other reasons of the verifier make the search look at dearer programs, too."""
    regions = list[int]()
    for of_graph in (True, False):
        verdict = Verification(False, 0, None, "", "it divides by 0", of_graph=of_graph)
        seen = list[Progress]()
        with pytest.raises(SearchError, match="rejected all"):
            search(chains(1), H200, options=SearchOptions(keep=1, lowered=True), near=1.02,
                   verify=lambda _, v=verdict: v, on_progress=seen.append)  # fmt: skip
        regions.append(sum(p.stage == "kernels" for p in seen))
    assert 2 * regions[0] < regions[1]


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


def test_reasons_are_looked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """No regions are searched only to say why a variant has no kernels, if another one has some."""
    g = new_kernel_graph()
    x = g.rms_norm(g.new_input((3, 64, 16)), normalized_shape=(16,))
    g.mark_output(g.length_mask(x, g.new_input((3,), "int32")))
    variants, options = _Search._variants, SearchOptions(keep=4, lowered=True)
    for_reasons: list[set[int]] = []
    asked = Bounds._next

    def counted(bounds: Bounds) -> set[int]:
        for_reasons.append(asked(bounds))
        return for_reasons[-1]

    def with_another(search: _Search, plain: Flat) -> Iterator[Flat]:
        yield Flat(g.expanded())
        yield from variants(search, plain)

    monkeypatch.setattr(Bounds, "_next", counted)
    alone = search(chains(1), H200, options=options, near=1.0)
    with pytest.raises(SearchError, match="no kernel can run length_mask"):
        search(g, H200, options=options, near=1.0)
    assert for_reasons
    for_reasons.clear()
    monkeypatch.setattr(_Search, "_variants", with_another)
    both = search(chains(1), H200, options=options, near=1.0)
    assert both.candidates[0].structure == alone.candidates[0].structure
    assert not for_reasons
