"""The search against brute force: what it must not miss, and that what it finds is right."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.search.programs import PROGRAMS as MEASURED
from cutesuper.egraph.expression import AtomKind
from cutesuper.egraph.extract import Structure, extract, structure
from cutesuper.egraph.labelled import label
from cutesuper.egraph.saturate import Table, TooLarge, saturate
from cutesuper.egraph.space import Space
from cutesuper.egraph.splits import Split, splits
from cutesuper.ir.block import ACCUMULATE, CLUSTER_REDUCE
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.search.cuts import Cut, Flat
from cutesuper.search.region import SearchOptions, Way
from cutesuper.search.search import assemble, search, show
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier
from cutesuper.verify.extents import resized_graph
from cutesuper.verify.numeric import compare
from tests.brute_force import EXTENT, Forward
from tests.rewrites import AXIOMS, PROGRAMS, program, results
from tests.test_search import without_unused

# ------------------------------------------------------------------------------------ brute force

K, MK, ARITHMETIC = frozenset("K"), frozenset("MK"), ("add", "mul", "div")
SUM = (("sum", "K"),)

#: inputs, unary and binary operators, reductions, operations of a goal, more for a way to it,
#: and one goal of how many
ALPHABETS: dict[str, tuple[Any, ...]] = {
    "the shortest ways": ((K, K), ("exp",), ARITHMETIC, SUM, 3, 0, 1),
    "one more operation": ((K, K), ("exp",), ARITHMETIC, SUM, 3, 1, 4),
    "two more operations": ((K, K), ("exp",), ARITHMETIC, SUM, 2, 2, 1),
    "three inputs": ((K, K, K), (), ARITHMETIC, SUM, 3, 0, 3),
    "two labels": ((MK, K), (), ARITHMETIC, (*SUM, ("max", "K")), 3, 1, 8),
    "both labels are reduced": ((MK, MK), ("exp",), ("mul", "div"), (*SUM, ("sum", "M")), 3, 1, 8),
}


@pytest.fixture
def _larger_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of two elements and more: a sum of what does not vary would be x + x."""
    monkeypatch.setattr("cutesuper.egraph.saturate._PART", EXTENT)


def _name(kind: str, inputs: list[Any], over: str | None) -> tuple[Any, ...]:
    """An operation on values: operands of what commutes in one order."""
    return kind, tuple(sorted(inputs) if kind in ("add", "mul") else inputs), over


def _derivations(table: Table) -> set[tuple[Any, ...]]:
    """Derivations of a table; classes by labels and value."""
    values = [("".join(sorted(c.labels)), c.value) for c in table.classes]
    return {
        (values[i], _name(d.kind, [values[j] for j in d.inputs], d.over))
        for i, found in enumerate(table.derivations)
        for d in found
    }


def _table(forward: Forward, goal: int) -> Table:
    """The table of the first program of a goal, with nothing divided."""
    space = Space(forward.program(goal))
    return saturate(space, Split(tuple((d, ()) for d in space.program.dims)), limit=2000)


def _missing(forward: Forward, goal: int, more: int, table: Table) -> tuple[list[str], int]:
    """The ways to a goal that are not in its table, and how many ways there are."""
    space = table.space
    kinds = {k for k, _ in space.unary} | {*space.binary, *space.reductions}
    have, missing, total = _derivations(table), list[str](), 0

    def value(i: int) -> tuple[str, int]:
        return "".join(sorted(forward.labels[i])), forward.values[i].key()

    for v, steps in forward.paths(goal, forward.cost[goal] + more, kinds).items():
        for s in steps:
            total += 1
            if (value(v), _name(s.kind, [value(j) for j in s.inputs], s.over)) not in have:
                missing.append(f"{forward.show(goal)}: {forward.show(v, s)}")
    return missing, total


@pytest.mark.usefixtures("_larger_parts")
@pytest.mark.parametrize("name", list(ALPHABETS))
def test_every_way_to_a_goal_is_in_its_table(name: str) -> None:
    """Whatever brute force finds with the normal form of the goal, unless it distributes over a
    sum that is multiplied later: such a sum is one atom."""
    inputs, unary, binary, reductions, most, more, every = ALPHABETS[name]
    forward = Forward(inputs, unary, binary, reductions, most + more)
    goals = [i for i, n in enumerate(forward.cost) if 0 < n <= most][::every]
    missing, total, distributed, sealed_ways = list[str](), 0, 0, 0
    for goal in goals:
        table = _table(forward, goal)
        assert all(table.finished()), forward.show(goal)
        lost, ways = _missing(forward, goal, more, table)
        if any(a.kind == AtomKind.SEALED for a in table.space.table.atoms):
            distributed, sealed_ways = distributed + len(lost), sealed_ways + ways
        else:
            missing, total = missing + lost, total + ways
    assert len(goals) > 40 and total > 100
    assert not missing, missing[:5]
    if sealed_ways:
        assert distributed <= (0.05 if not more else 0.6) * sealed_ways


@pytest.mark.usefixtures("_larger_parts")
def test_what_subtraction_hides() -> None:
    """A goal may be out of reach only where terms cancel."""
    forward = Forward((K, frozenset()), ("exp",), ("sub", "mul"), (*SUM, ("max", "K")), 3)
    goals = [i for i, n in enumerate(forward.cost) if n > 0]
    lost = [forward.show(i) for i in goals if not all(_table(forward, i).finished())]
    itself = re.compile(r"sub\((.+), \1\)")
    assert all(text.count("sub") > 1 or itself.search(text) for text in lost), lost
    assert 0 < len(lost) <= 0.12 * len(goals), lost


def test_a_maximum_in_a_sum_that_is_divided_by() -> None:
    """``x / (max x + eps)``, as in quantization: one kernel."""
    g = new_kernel_graph()
    x = g.new_input((64, 512))
    g.mark_output(x / (g.max(x, -1) * (1 / 127) + 1e-6))
    space = _space(g)
    for split in splits(space.program):
        assert all(saturate(space, split).finished()) or any(k for _, k in split.kinds)
    found = search(g, H200).candidates[0]
    assert len(found.mugraph.steps) == 1


# --------------------------------------------------------------------------------------- axioms

#: what normal forms identify, besides distribution over sums that are multiplied
SAME_FORM = (
    "commute",
    "associate",
    "scale_after_product",
    "scale_before_product",
    "multiply_by_inverse",
    "divide_late",
    "square_is_a_product",
    "scale_after_reduction",
    "transposed_product",
    "transposed_reduction",
    "reciprocal_root",
    "plus_zero",
)
#: rewrites.PROGRAMS that are searched in less than a second
QUICK = [name for name in PROGRAMS if name not in ("backward", "causal")]
#: extents at which labels of the small programs can be divided
LARGER = {2: 16, 3: 64, 4: 64, 5: 1024, 6: 256, 8: 512}
#: structures of a split are ranked before they are sized, where programs that differ by an
#: operation on a row or two change places
ALIKE = 1e-3
#: how many rewritten programs may cost more (or less) than the original
GAPS = 0.02


def _larger(g: KernelGraph) -> KernelGraph:
    shapes = (g.nodes[i].shape for i in g.inputs)
    return resized_graph(g, tuple(tuple(LARGER.get(d, d) for d in s) for s in shapes)).expanded()


@cache
def _cost(name: str) -> float:
    return _search_cost(program(name))


def _search_cost(g: KernelGraph) -> float:
    return search(_larger(g), H200, options=SearchOptions(keep=1)).candidates[0].cost_us


def test_the_way_a_program_is_written_does_not_matter() -> None:
    apart, tried = list[str](), 0
    for name in QUICK:
        for axiom in SAME_FORM:
            found = list(results(program(name), AXIOMS[axiom]))
            if found:
                g = random.Random(f"{name}/{axiom}").choice(found)
                tried += 1
                if _search_cost(g) != pytest.approx(_cost(name), rel=ALIKE):
                    apart.append(f"{axiom} of {name}")
    assert tried >= 40
    assert len(apart) <= GAPS * tried, apart


# ------------------------------------------------------------------------------- random programs

ONCE = settings(
    max_examples=20, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
ROWS, INNER, COLUMNS = 24, 136, 264
#: nothing that overflows at values of 1, so that float64 can be compared
KINDS = (
    "add",
    "sub",
    "mul",
    "over",
    "exp",
    "tanh",
    "square",
    "sum",
    "mean",
    "max",
    "matmul",
    "mask",
    "softmax",
    "rms_norm",
    "scale",
)


@st.composite
def graphs(draw: st.DrawFn) -> KernelGraph:
    """A random program of 2 to 5 operators, reductions over both dimensions, masks and maxima."""
    g = new_kernel_graph()
    pool = [g.new_input((ROWS, INNER)), g.new_input((ROWS, INNER)), g.new_input((INNER,))]
    weights = {INNER: g.new_input((INNER, COLUMNS)), COLUMNS: g.new_input((COLUMNS, INNER))}
    pool += [g.new_input((COLUMNS,)), g.new_input((ROWS, 1))]
    last = pool[0]
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=5)):
        a = last if draw(st.booleans()) else draw(st.sampled_from([*pool[:2], *pool[5:], last]))
        made = _operator(draw, g, kind, a, pool, weights)
        if made is not None:
            pool.append(last := made)
    g.mark_output(last if last is not pool[0] else g.tanh(last))
    return without_unused(g)


def _operator(
    draw: st.DrawFn,
    g: KernelGraph,
    kind: str,
    a: Tensor,
    pool: list[Tensor],
    weights: dict[int, Tensor],
) -> Tensor | None:
    wide = len(a.shape) == 2 and 1 not in a.shape
    if kind in ("add", "sub", "mul", "over"):
        fitting = [t for t in pool if t.shape in (a.shape, a.shape[-1:]) or t.shape == (ROWS, 1)]
        if not wide or not fitting:
            return None
        b = draw(st.sampled_from(fitting))
        return a / (g.square(b) + 1.0) if kind == "over" else g.apply(kind, a, b)
    if kind in ("sum", "mean", "max"):
        return g.apply(kind, a, dim=draw(st.sampled_from((0, 1)))) if wide else None
    if kind == "matmul":
        return g.matmul(a, weights[a.shape[-1]]) if wide else None  # type: ignore[index]
    if kind == "mask":
        return g.softmax(g.causal_mask(a, alignment="bottom_right")) if wide else None
    if kind == "softmax":
        return g.softmax(a, draw(st.sampled_from((0, 1)))) if wide else None
    if kind == "rms_norm":
        return g.rms_norm(a) if wide else None
    return a * 0.5 if kind == "scale" else g.exp(a * 0.01) if kind == "exp" else g.apply(kind, a)


@ONCE
@given(graphs())
def test_random_programs(g: KernelGraph) -> None:
    """Nothing is rejected; everything is legal, and equal in float64."""
    verifier = Verifier(g)
    options = SearchOptions(keep=5, max_classes=150)
    result = search(
        g, H200, options=options, verify=lambda mu: bool(verifier.check(mu, bound=False))
    )
    assert result.statistics.rejected == 0
    for c in result.candidates:
        check_mugraph(c.mugraph)
        report = compare(g, c.mugraph, stress=False)
        assert report, f"{c.structure}: {report.message}"


# ------------------------------------------------------------------------------------- all splits


def _space(g: KernelGraph) -> Space:
    flat = Flat(g.expanded())
    return Space(label(flat.segment(flat.order).region))


def _structures(space: Space, seed: int) -> Iterator[Structure]:
    """Structures of every split; of many splits a sample."""
    every = list(splits(space.program))
    chosen = random.Random(seed).sample(every, min(25, len(every)))
    for split in (every[0], *chosen):
        try:
            table = saturate(space, split)
        except TooLarge:
            continue
        for e in extract(table, lambda i, d: 1.0, count=4):
            found = structure(table, e)
            late = {op.kind for p in found.programs[1:] for op in p.ops}
            if late.isdisjoint({ACCUMULATE, CLUSTER_REDUCE}):  # the search refuses those, too
                yield found


@pytest.mark.parametrize(
    "name",
    [
        "RMSNorm + Linear",
        "LoRA",
        "GQA",
        "attention, causal",
        "DLRM top MLP",
        "softmax(X W)",
        "RMSNorm backward",
        "QKNorm (Q, K)",
    ],
)
def test_every_split_gives_right_programs(name: str) -> None:
    """Whatever axes divide what: legal, and equal to the graph."""
    g = MEASURED[name].build().expanded()
    flat, verifier, count = Flat(g), Verifier(g), 0
    segment = flat.segment(flat.order)
    for found in _structures(Space(label(segment.region)), 0):
        way = Way(found.programs, found.partials, (), 0, False)
        mu = assemble(flat, Cut(0.0, ((segment, way),)))
        check_mugraph(mu)
        verdict = verifier.check(mu, bound=False)
        assert verdict, f"{[show(p) for p in found.programs]}: {verdict.summary()}"
        count += 1
    assert count >= 8
