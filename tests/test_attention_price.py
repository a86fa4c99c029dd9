"""The plan of an attention loop is what sizes are checked by and priced from, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep
from cutesuper.ir.graph import KernelGraph
from cutesuper.search.region import SearchOptions, search_region, tensors_of
from cutesuper.search.search import search
from cutesuper.skeletons.attention.cost import price
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.attention.sizes import attention_sizes
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests import test_attention_search as graphs
from tests.attention import Attention

Made = Callable[[], KernelGraph]
GRAPHS: dict[str, Made] = {
    "one token": graphs.decode,
    "lengths": partial(graphs.decode, 2, 2048, lengths=True),
    "causal": partial(graphs.grouped, positions=512, keys=512, causal=True),
    "norms": partial(graphs.attention, norms="qv"),
    "odd": partial(graphs.attention, 2, 100, 300, 72, key_rows=True),
}


@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_costs_of_sizes_are_those_of_their_plans(name: str, dependent_launch: bool) -> None:
    region = graphs.region_of(GRAPHS[name]())
    options = SearchOptions(lowered=True, dependent_launch=dependent_launch)
    ways = search_region(region, H200, options).ways
    assert len(ways) >= 4
    for way in ways:
        step = KernelStep("k0", way.programs[0])
        plan = make_plan(step, tensors_of(region), H200, dependent_launch=dependent_launch)
        assert isinstance(plan, AttentionPlan)
        assert price(plan, H200) == way.costs[0]


# --------------------------------------------------------------- where the plan says another thing

DECODE = Attention(group=4, rows=0, keys=4096, width=128, grid=4, cluster=2)


@cache
def plan_of(attention: Attention) -> AttentionPlan:
    mu = attention.mugraph()
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, AttentionPlan)
    return plan


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("owned_items", 16), ("active_threads", 128), ("few_rows", False), ("loop", 64),
        ("row_tiles", 64), ("block_rows", 64), ("width", 256),
    ],
)  # fmt: skip
def test_the_price_follows_the_plan(monkeypatch: Any, name: str, value: int) -> None:
    plan = plan_of(DECODE)
    before = price(plan, H200)
    assert getattr(plan, name) != value
    monkeypatch.setattr(AttentionPlan, name, value)
    assert price(replace(plan), H200).total > before.total


@pytest.mark.parametrize("knob", ["key_groups", "resident"])
def test_the_price_follows_the_schedule(knob: str) -> None:
    plan = plan_of(replace(DECODE, grid=8, heads=64))
    now = getattr(plan.schedule, knob)
    other = replace(plan, schedule=replace(plan.schedule, **{knob: 3 - now}))
    assert price(other, H200).total != price(plan, H200).total


#: reasons by the property of a plan that is made too large
LIMITS = {
    "live_registers": ("accumulators exceed the registers", "use a tile of 64 keys"),
    "query_bytes": ("stages exceed the shared memory", "use smaller tiles"),
    "exchange_bytes": ("stages exceed the shared memory", "use smaller tiles"),
    "group_rows": ("rows that warpgroups cannot share", "of at most 64 rows"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_are_refused_where_planning_refuses(monkeypatch: Any, name: str) -> None:
    graph = graphs.decode
    structure = graphs.best(graph)[0]
    setting = Setting(H200, tensors_of(graphs.region_of(graph())))
    pruned = Counter[str]()
    assert attention_sizes(structure, setting, pruned)
    monkeypatch.setattr(AttentionPlan, name, 10**6)
    reason, message = LIMITS[name]
    assert not attention_sizes(structure, setting, pruned) and pruned[reason]
    mu = DECODE.mugraph()
    with pytest.raises(ScheduleError, match=message):
        make_plan(mu.steps[0], mu.tensors, H200)


# ------------------------------------------------------------------------------------- structures


def two_sums(masked: bool) -> KernelGraph:
    g = graphs.new_kernel_graph()
    q, k, v = (g.new_input((2, n, 64), name=c) for c, n in (("Q", 64), ("K", 512), ("V", 512)))
    s = g.matmul(q, g.transpose(k))
    s = g.causal_mask(s) if masked else s
    e = g.exp(s)
    y = g.matmul(e, v)
    g.mark_output(g.div(y if masked else g.mul(y, g.sum(s, -1)), g.sum(e, -1)))
    return g


def test_a_structure_that_the_loop_refuses_is_cut() -> None:
    (first, *_) = search(two_sums(False), H200, options=graphs.LOWERED).candidates
    assert len(first.mugraph.steps) > 1
    for step in first.mugraph.steps:
        make_plan(step, first.mugraph.tensors, H200)


def test_its_reason_is_told_where_nothing_else_runs() -> None:
    with pytest.raises(LoweringError, match="without a maximum: use softmax"):
        search(two_sums(True), H200, options=graphs.LOWERED)
