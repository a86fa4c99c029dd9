"""Programs around a concatenation: those that were wrong once, and a sample of drawn ones."""

from __future__ import annotations

from typing import Any

import pytest

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.ir.block import MuGraph
from cutesuper.ir.border import inside, with_copies
from cutesuper.ir.rounding import comparisons, elements_of
from cutesuper.search.cuts import Flat
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.targets import H200
from tests import zoo
from tests.fuzz.check import Settings, check_case
from tests.fuzz.pieces import draw_pieces
from tests.fuzz.programs import Case, Source, Step
from tests.test_gpu import check

Pairs = tuple[tuple[int, str | None], ...]


def case_of(
    shapes: list[tuple[int, ...]], steps: list[tuple[Any, ...]], outputs: Pairs,
    dtype: str = "float16",
) -> Case:  # fmt: skip
    """A program; a step is an operator, its operands, its attributes."""
    made = tuple(Step(name, tuple(operands), more) for name, operands, more in steps)
    sources = tuple(Source(s, dtype) for s in shapes)
    return Case(sources, made, outputs, seed=7)


def product_of_pieces(dtype: str, stored: str | None) -> Case:
    """``t = [x | y] @ w``, an output, and ``t @ v``."""
    steps = [("concat", (0, 1), {"dim": 1}), ("matmul", (4, 2), {}), ("matmul", (5, 3), {})]
    shapes: list[tuple[int, ...]] = [(4, 8), (4, 16), (24, 8), (8, 2)]
    return case_of(shapes, steps, ((5, stored), (6, None)), dtype)


CASES: dict[str, Case] = {
    "a sum of pieces in a shorter type that is used": product_of_pieces("float32", "float16"),
    "a sum of pieces in a longer type that is used": product_of_pieces("float16", "float32"),
    "a sum of pieces that is used": product_of_pieces("bfloat16", None),
    "attention over pieces in a longer type": case_of(
        [(2, 8), (2, 4), (2, 12)],
        [("concat", (0, 1), {"dim": 1}), ("scaled_dot_product_attention", (2, 3, 3), {})],
        ((4, "float32"),)),
    "places along another dimension than pieces": case_of(
        [(3, 2), (3, 1)], [("concat", (0, 1), {"dim": 1}), ("argmax", (2,), {"dim": 0})],
        ((3, None),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_programs_of_pieces_are_right(name: str) -> None:
    outcome = check_case(CASES[name], Settings(budget_s=None, keep=2))
    assert outcome.kind == "right", outcome


def test_what_is_read_of_a_sum_of_pieces_has_its_own_type() -> None:
    """The output is stored as float16, and the next product takes float32."""
    e = product_of_pieces("float32", "float16").graph().expanded()
    last = e.nodes[e.outputs[1]]
    assert [e.nodes[j].dtype.name for j in last.inputs] == ["float32", "float32"]
    assert e.nodes[e.outputs[0]].dtype.name == "float16" and e.outputs[0] not in last.inputs


@pytest.mark.parametrize("operator", ["atan", "square"])
def test_a_maximum_over_pieces_is_compared_as_they_are_stored(operator: str) -> None:
    """Its derivative divides by the number of elements that equal it. float16 may not hold
    squares."""
    g = cs.new_kernel_graph()
    x, y = (g.new_input((3, 2), name=n) for n in "xy")
    turned = g.transpose(g.apply(operator, g.transpose(x)))
    g.mark_output(g.max(g.concat([turned, y, g.tanh(y)], 1), 1))
    flat = Flat(cs.grad(g, ["x", "y"]).expanded())
    maxima = frozenset[int]().union(*comparisons(flat.graph).values())
    views = {flat.views[i].value for i in elements_of(flat.graph, maxima)}
    values = {i for i in views if not flat.graph.nodes[i].given}
    assert len(maxima) == 5 and len(values) == 2  # three, and two larger ones of two
    assert {flat.dtype(i).name for i in maxima | values} == {"float32"}


@pytest.mark.parametrize("index", range(0, 60, 3))
def test_drawn_programs_are_expanded_rightly(index: int) -> None:
    case = draw_pieces(1, index)
    assert isinstance(case, Case)
    outcome = check_case(case, Settings(keep=0))
    assert not outcome.finding, (outcome, case.code())


# ---------------------------------------------------------------------------- rows of many widths

#: extents of pieces that meet one value of each row
WIDTHS = ((2, 2, 2), (8, 3), (4, 1, 5, 4))


def beside_rows(widths: tuple[int, ...], lead: tuple[int, ...] = (2,)) -> cs.KernelGraph:
    """Pieces put together along the last dimension, times one number for each row."""
    g = cs.new_kernel_graph()
    x = [g.new_input((*lead, n), "float32") for n in widths]
    g.mark_output(g.mul(g.concat(x, len(lead)), g.new_input((*lead, 1), "float32", name="r")))
    return g


def chosen(g: cs.KernelGraph) -> MuGraph:
    return pipeline.choose(g, pipeline.Options(H200, tuned=False))[1].candidate.mugraph


@pytest.mark.parametrize("widths", WIDTHS)
def test_blocks_of_rows_store_every_piece_once(widths: tuple[int, ...]) -> None:
    mu = chosen(beside_rows(widths))
    plans = [make_plan(step, mu.tensors, H200) for step in mu.steps]
    stores = [[i for s in p.sections for i in s.stores] for p in plans if isinstance(p, RowPlan)]
    assert [sorted(own) for own in stores] == [
        sorted(p.stores) for p in plans if isinstance(p, RowPlan)
    ]
    assert sum(map(len, stores)) == len(widths)


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("lead", [(2,), ()])
def test_kernels_store_every_piece(lead: tuple[int, ...]) -> None:
    g = beside_rows(WIDTHS[0], lead)
    check(cs.superoptimize(g), zoo.draw(g, 1, "cuda"))


def test_copies_of_outputs_keep_the_type_that_is_used() -> None:
    g = cs.new_kernel_graph()
    x, y, w = (g.new_input((4, 4), "bfloat16", name=n) for n in "xyw")
    t = g.tanh(x)
    g.mark_output(g.concat([t, y], 1), "float16")
    g.mark_output(g.matmul(t, w))
    graph, border = inside(g.expanded())
    flat = Flat(with_copies(graph, border), border=border)
    assert {flat.dtype(i).name for i in flat.order} == {"bfloat16", "float16"}
