"""Prices of matmul kernels: of the plan that runs, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import pytest

import cutesuper as cs
from cutesuper.egraph.labelled import Region
from cutesuper.errors import ScheduleError
from cutesuper.ir.block import KernelStep
from cutesuper.ir.graph import KernelGraph
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, search_region, tensors_of
from cutesuper.search.search import search
from cutesuper.skeletons.cost import Cost
from cutesuper.skeletons.matmul import plan as plan_module
from cutesuper.skeletons.matmul import sizes
from cutesuper.skeletons.matmul.cost import price
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200, Target
from tests import zoo
from tests.plans import Linear


def linear(m: int, k: int, n: int, norm: str | None) -> KernelGraph:
    g = cs.new_kernel_graph()
    x, w = g.new_input((m, k)), g.new_input((k, n))
    g.mark_output(g.matmul(getattr(g, norm)(x) if norm else x, w))
    return g


GRAPHS: dict[str, Callable[[], KernelGraph]] = {
    "norm": lambda: linear(16, 4096, 4096, "rms_norm"),
    "vectors": lambda: linear(16, 1024, 1024, "layer_norm"),
    "many rows": lambda: linear(4096, 1024, 4096, None),
    "product of a product": lambda: zoo.lora(16, 256, 4096, 16),
    "wide product of a product": lambda: zoo.relu_mlp(16, 512, 64, 64),
    "reduced columns": lambda: zoo.dlrm(64, 512, 256),
}


@pytest.mark.parametrize("launch", [False, True], ids=["alone", "dependent"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_candidate_costs_what_its_plan_costs(name: str, launch: bool) -> None:
    """None is refused when it is planned, and its price is the plan's."""
    options = SearchOptions(lowered=True, keep=6, dependent_launch=launch)
    seen = 0
    for c in search(GRAPHS[name](), H200, options=options).candidates:
        for step, cost in zip(c.mugraph.steps, c.kernels, strict=True):
            plan = make_plan(step, c.mugraph.tensors, H200, dependent_launch=launch)
            if isinstance(plan, MatmulPlan):
                assert price(plan, H200) == cost
                seen += 1
    assert seen


@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_get_the_plans_that_planning_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles are recognised at one tile only, and hold for all others."""
    priced: list[MatmulPlan] = []

    def cost(plan: MatmulPlan, _: Target) -> Cost:
        priced.append(plan)
        return Cost(1.0, {})

    monkeypatch.setattr(sizes, "price", cost)
    region = whole(GRAPHS[name]())
    search_region(region, H200, SearchOptions(lowered=True))
    assert priced
    for plan in priced[:: max(1, len(priced) // 12)]:
        assert make_plan(KernelStep("k", plan.program), tensors_of(region), H200) == plan


def whole(graph: KernelGraph) -> Region:
    """A graph as one region."""
    flat = Flat(graph.expanded())
    return flat.segment(flat.order).region


#: many small tiles, of which a multiprocessor holds two: every number of the plan matters
SMALL = Linear(m=4096, k=256, n=4096, tile_m=64, tile_n=64, tile_k=64, gain=True)


@pytest.mark.parametrize(
    "name", ["shared_bytes", "threads", "accumulators", "stage_bytes", "iterations", "moved_bytes"]
)
def test_the_price_reads_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SMALL.plan()
    before, value = price(plan, H200).total, getattr(plan, name)
    monkeypatch.setattr(MatmulPlan, name, 8 * value)
    assert price(replace(plan), H200).total != before


def test_sizing_and_planning_share_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    region, counts = whole(GRAPHS["many rows"]()), "accumulators exceed the registers"
    options = SearchOptions(lowered=True)
    before = search_region(region, H200, options).counts.pruned[counts]
    monkeypatch.setattr(plan_module, "MAX_ACCUMULATORS", 64 * 64)
    found = search_region(region, H200, options)
    assert found.counts.pruned[counts] > before
    assert max(w.programs[0].tile["M"] * w.programs[0].tile["N"] for w in found.ways) == 64 * 64
    with pytest.raises(ScheduleError, match="8192 accumulators"):
        Linear(m=64, tile_m=64, tile_n=128).plan()


def test_what_a_plan_keeps_depends_on_no_schedule() -> None:
    plan = SMALL.plan()
    other = replace(plan.schedule, stages=2, warpgroups=2, bulk_store=False, share_rows=2)
    fresh = replace(plan, schedule=other)
    kept = [n for n, v in vars(MatmulPlan).items() if isinstance(v, cached_property)]
    before = [getattr(plan, n) for n in kept]
    assert plan.scheduled(other) == fresh
    assert before == [getattr(fresh, n) for n in kept]
