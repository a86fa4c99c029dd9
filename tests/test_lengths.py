"""Lengths of sequences and tables of pages: graphs, block programs, verifier, labels, search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.egraph.labelled import label
from cutesuper.errors import (
    CutesuperError,
    DTypeError,
    FormatError,
    GraphError,
    LoweringError,
    OperatorError,
    SearchError,
    ShapeError,
)
from cutesuper.ir.block import MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import extent
from cutesuper.ir.dtypes import float16, int32
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.field import DivisionByZero, FieldValue, uniform
from cutesuper.ir.graph import KernelGraph, new_kernel_graph, symbol
from cutesuper.ir.graph_text import kernel_graph_text
from cutesuper.ir.text import mugraph_text
from cutesuper.runtime.checks import Signature
from cutesuper.search.cuts import Flat, Segments
from cutesuper.search.search import SearchOptions, search
from cutesuper.show.page_formula import formulas
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.domain import FieldDomain
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.extents import SizeChooser
from cutesuper.verify.integers import draw_integers, typical_integers
from cutesuper.verify.numeric import compare
from tests.length_mugraphs import (
    SMALL,
    SPLITS,
    attention,
    kernel,
    paged_causal,
    paged_causal_kernel,
    stored_weights,
)
from tests.mugraphs import Block, mugraph
from tests.mutants import change, mutations

few = settings(max_examples=30, deadline=None)


def graph_of(*shapes: tuple[Any, Any]) -> tuple[KernelGraph, list[Any]]:
    g = new_kernel_graph()
    return g, [g.new_input(shape, dtype) for shape, dtype in shapes]


# ----------------------------------------------------------------------------------------- graphs

ERRORS: dict[str, tuple[Any, type[CutesuperError], str]] = {
    "no sequences": (
        lambda g, x, n: g.length_mask(g.sum(x, 0), n),
        ShapeError,
        "lengths must have the first dimensions of the scores, without rows and columns: [1]",
    ),
    "rank": (
        lambda g, x, n: g.length_mask(g.new_input((4, 8)), n),
        ShapeError,
        "length_mask([4, 8], [3]): scores need a dimension of sequences in front",
    ),
    "rows": (
        lambda g, x, n: g.length_mask(x, g.new_input((3, 4), "int32")),
        ShapeError,
        "length_mask([3, 4, 8], [3, 4]): lengths must have the first dimensions",
    ),
    "float lengths": (
        lambda g, x, n: g.length_mask(x, g.new_input((3,))),
        DTypeError,
        "length_mask: operand 1, W[3] float16, must be an int32 input; use new_input(",
    ),
    "flag": (
        lambda g, x, n: g.length_mask(x, n, causal=1),
        OperatorError,
        "length_mask(causal=1): must be True or False",
    ),
    "open pages": (
        lambda g, x, n: g.gather_pages(
            g.new_input((9, symbol("P"), 8)), g.new_input((3, 4), "int32")
        ),
        ShapeError,
        "gather_pages([9, P, 8], [3, 4]): positions of a page and pages of a sequence must be",
    ),
    "arithmetic": (
        lambda g, x, n: g.add(n, 1.0),
        DTypeError,
        "add: operand 0, A[3] int32, is int32, which only lengths (length_mask, scaled_dot_",
    ),
    "attention": (
        lambda g, x, n: g.scaled_dot_product_attention(x, x, x, lengths=x),
        DTypeError,
        "scaled_dot_product_attention: operand 3, X[3, 4, 8] float16, must be an int32 input",
    ),
    "lengths of attention": (
        lambda g, x, n: g.scaled_dot_product_attention(x, x, x, lengths=g.new_input((4,), "int32")),
        ShapeError,
        "length_mask([3, 4, 4], [4]): lengths must have the first dimensions",
    ),
    "computed cache": (
        lambda g, x, n: g.gather_pages(g.exp(x), g.new_input((2, 2), "int32")),
        GraphError,
        "gather_pages: operand 0, t2[3, 4, 8] float16, is computed; it reads inputs",
    ),
    "table": (
        lambda g, x, n: g.gather_pages(x, n),
        ShapeError,
        "gather_pages([3, 4, 8], [3]): a table is [sequences, pages of a sequence]",
    ),
    "cache": (
        lambda g, x, n: g.gather_pages(g.new_input((4,)), g.new_input((2, 2), "int32")),
        ShapeError,
        "a cache is [pages, positions of a page, ...]",
    ),
    "output": (
        lambda g, x, n: g.mark_output(n),
        GraphError,
        "an input cannot be an output",
    ),
    "output type": (
        lambda g, x, n: g.mark_output(g.sum(x, 2), "int32"),
        DTypeError,
        "nothing is computed in integers",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_messages(name: str) -> None:
    build, error, message = ERRORS[name]
    g = new_kernel_graph()
    x, n = g.new_input((3, 4, 8), name="X"), g.new_input((3,), cs.int32, name="A")
    with pytest.raises(error) as caught:
        build(g, x, n)
    assert message in str(caught.value)


def softmax_of_seen(scores: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    """Row by row, from the definition; rows that see nothing are 0."""
    result = torch.zeros_like(scores)
    rows, columns = scores.shape[-2:]
    for b, length in enumerate(lengths):
        for i in range(rows):
            end = min(length, columns) - (rows - 1 - i if causal else 0)
            if end > 0:
                result[b, ..., i, :end] = scores[b, ..., i, :end].softmax(-1)
    return result


@few
@given(
    st.lists(st.integers(-1, 9), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 1000),
)
def test_a_mask_and_softmax_are_the_definition(
    lengths: list[int], causal: bool, rows: int, columns: int, seed: int
) -> None:
    g, (x, n) = graph_of(((len(lengths), 2, rows, columns), float16), ((len(lengths),), int32))
    g.mark_output(g.softmax(g.length_mask(x, n, causal)))
    scores = torch.randn(x.shape, dtype=torch.float64, generator=torch.manual_seed(seed))
    ends = torch.tensor(lengths, dtype=torch.int32)
    want = softmax_of_seen(scores, lengths, causal)
    for graph in (g, g.expanded()):
        [found] = evaluate(graph, [scores, ends], torch.float64)
        torch.testing.assert_close(found, want)
    [found] = run_reference(g, [scores.half(), ends])
    assert found.dtype == torch.float16 and found.isfinite().all()


def test_softmax_of_nothing_is_zero_and_nothing_else_changes() -> None:
    """Nothing is what the lengths leave. Rows of -inf that an input has are NaN, as in PyTorch and
    in the kernels of programs without masks."""
    t = torch.tensor([[0.0, 1, -torch.inf, 2], [-torch.inf] * 4, [torch.nan, 0, 0, 0]])
    g, [x] = graph_of(((3, 4), float16))
    g.mark_output(g.softmax(x))
    [y] = evaluate(g, [t])
    assert torch.equal(y[0], t[0].softmax(0)) and y[1:].isnan().all()
    g, [x, n] = graph_of(((3, 1, 4), float16), ((3,), int32))
    g.mark_output(g.softmax(g.length_mask(x, n)))
    [y] = evaluate(g, [t[:, None], torch.tensor([4, 0, 4], dtype=torch.int32)])
    assert torch.equal(y[0, 0], t[0].softmax(0)) and not y[1].any() and y[2].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_with_lengths_and_query_groups(causal: bool, dtype: torch.dtype) -> None:
    g = new_kernel_graph()
    q = g.new_input((3, 2, 4, 5, 8), name="Q")
    k, v = g.new_input((3, 2, 1, 6, 8), name="K"), g.new_input((3, 2, 1, 6, 4), name="V")
    n = g.new_input((3,), "int32", name="lengths")
    y = g.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5, lengths=n)
    g.mark_output(y)
    assert y.shape == (3, 2, 4, 5, 4)
    torch.manual_seed(0)
    x = [torch.randn(tuple(map(extent, t.shape)), dtype=torch.float64).to(dtype) for t in (q, k, v)]
    lengths = [0, 3, 9]
    scores = 0.5 * x[0].double() @ x[1].double().mT
    want = softmax_of_seen(scores, lengths, causal) @ x[2].double()
    ends = torch.tensor(lengths, dtype=torch.int32)
    tolerance = 4 * torch.finfo(dtype).eps
    for graph in (g, g.expanded()):
        [found] = evaluate(graph, [*x, ends])
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), want, atol=tolerance, rtol=tolerance)


def test_without_lengths_causal_keeps_its_meaning() -> None:
    g, (q, k) = graph_of(((2, 3, 4), float16), ((2, 5, 4), float16))
    g.mark_output(g.scaled_dot_product_attention(q, k, k, is_causal=True))
    [mask] = [n for n in g.expanded().nodes if n.operator == "causal_mask"]
    assert mask.attributes == {"alignment": "top_left"}


@few
@given(st.data())
def test_pages_are_put_together(data: st.DataObject) -> None:
    pages, page, sequences, each = (data.draw(st.integers(1, 4)) for _ in range(4))
    rest = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    entries = st.lists(st.integers(0, pages - 1), min_size=each, max_size=each)
    table = data.draw(st.lists(entries, min_size=sequences, max_size=sequences))
    g, (x, t) = graph_of(((pages, page, *rest), float16), ((sequences, each), int32))
    y = g.gather_pages(x, t)
    g.mark_output(g.mul(y, 1.0))
    assert y.shape == (sequences, each * page, *rest)
    cache = torch.randn(pages, page, *rest, dtype=torch.float64)
    [found] = evaluate(g, [cache, torch.tensor(table, dtype=torch.int32)], torch.float64)
    for b in range(sequences):
        for s in range(each * page):
            assert torch.equal(found[b, s], cache[table[b][s // page], s % page])


def test_graphs_survive_json_and_can_be_read() -> None:
    g = attention(True, 4)
    again = cs.loads(cs.dumps(g))
    assert isinstance(again, KernelGraph) and again.nodes == g.nodes
    text = kernel_graph_text(g)
    assert "gather_pages(K, table)" in text and "int32" in text and "causal=True" in text
    damaged = cs.dumps(g).replace('"int32"', '"int16"')
    with pytest.raises(FormatError, match="dtype 'int16': not supported"):
        cs.loads(damaged)


DIFFERENTIATED: dict[str, Any] = {
    "attention": lambda g, q, k, v, n: g.scaled_dot_product_attention(
        q, k, v, is_causal=True, lengths=n
    ),
    "softmax": lambda g, q, k, v, n: g.softmax(g.length_mask(q @ g.transpose(k), n)) @ v,
    "no softmax": lambda g, q, k, v, n: g.exp(g.length_mask(q @ g.transpose(k), n, True)) @ v,
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name: str) -> None:
    """Lengths have none; what is hidden has no effect, and rows that see nothing none at all."""
    g, (q, k, v, n) = graph_of(*(((3, r, 4), float16) for r in (2, 5, 5)), ((3,), int32))
    y = g.mark_output(DIFFERENTIATED[name](g, q, k, v, n))
    backward = cs.grad(g)
    assert len(backward.outputs) == 3
    torch.manual_seed(0)
    x = [torch.randn(3, r, 4, dtype=torch.float64, requires_grad=True) for r in (2, 5, 5)]
    ends = torch.tensor([1, 4, 7], dtype=torch.int32)
    scale = 0.5 if name == "attention" else 1.0
    scores, end = scale * x[0] @ x[1].mT, ends.clamp(max=5)[:, None, None]
    if name != "softmax":
        end = end - (1 - torch.arange(2)[:, None])
    keep = torch.arange(5) < end
    weights = (scores.exp() * keep) @ x[2]
    if name != "no softmax":
        weights = weights / (scores.exp() * keep).sum(-1, keepdim=True).clamp(min=1e-300)
    dy = torch.randn(3, 2, 4, dtype=torch.float64)
    want = torch.autograd.grad(weights, x, dy)
    given = {g.nodes[i].name: t for i, t in zip(g.inputs, [*x, ends], strict=True)}
    given[f"d{y.name}"] = dy
    inputs = [given[backward.nodes[i].name].detach() for i in backward.inputs]
    for found, expected in zip(evaluate(backward, inputs, torch.float64), want, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_that_do_not_exist() -> None:
    g = attention(page=4)
    with pytest.raises(GraphError, match=r"grad\(wrt=lengths.*lengths\[4\] int32 has no gradient"):
        cs.grad(g, wrt=[g.tensor(g.inputs[-1])])
    with pytest.raises(GraphError, match=r"derivative of gather_pages\(.*leave it out of wrt"):
        cs.grad(g)
    assert cs.grad(g, wrt="Q").outputs


def test_masks_of_concatenated_heads_and_not_of_pieces() -> None:
    g, (a, b, n) = graph_of(((2, 3, 4, 6), float16), ((2, 1, 4, 6), float16), ((2,), int32))
    both = g.softmax(g.length_mask(g.concat([a, b], 1), n))
    g.mark_output(g.slice(both, 1, 0, 3))
    g.mark_output(g.slice(both, 1, 3, 4))
    x = [torch.randn(t.shape, dtype=torch.float64) for t in (a, b)]
    x.append(torch.tensor([2, 6], dtype=torch.int32))
    assert {n.operator for n in g.expanded().nodes}.isdisjoint({"concat", "slice"})
    for found, want in zip(
        evaluate(g.expanded(), x, torch.float64), evaluate(g, x, torch.float64), strict=True
    ):
        torch.testing.assert_close(found, want)
    g, (a, n) = graph_of(((4, 2, 3, 5), float16), ((4,), int32))
    g.mark_output(g.slice(g.length_mask(g.exp(a), n), 0, 0, 2))
    with pytest.raises(OperatorError, match=r"needs a piece of input W\[4\], W\[0:2\]"):
        g.expanded()
    g, (c, t) = graph_of(((9, 4, 3), float16), ((2, 4), int32))
    g.mark_output(g.exp(g.slice(g.gather_pages(c, t), 1, 0, 4)))
    with pytest.raises(OperatorError, match=r"gather_pages .* is needed in pieces"):
        g.expanded()


# ---------------------------------------------------------------------------------- what is drawn


@few
@given(st.integers(1, 9), st.integers(2, 12), st.integers(0, 50))
def test_every_length_ends_inside_in_two_trials_of_three(count: int, top: int, seed: int) -> None:
    g, (x, n) = graph_of(((count, 2, top), float16), ((count,), int32))
    g.mark_output(g.length_mask(x, n))
    drawn = [draw_integers(g, n.index, (count,), [seed, t, 0]).data for t in range(3)]
    inside = [(d > 0) & (d < top) for d in drawn]
    assert (np.sum(inside, 0) == 2).all()
    assert all(((d >= 0) & (d <= top + 2)).all() for d in drawn)
    for d, i in zip(drawn, inside, strict=True):
        assert len(set(d[i])) == min(i.sum(), top - 1) or count > top - 1


def test_no_page_is_drawn_twice_where_there_are_enough() -> None:
    g, (c, t) = graph_of(((9, 2, 3), float16), ((2, 4), int32))
    g.mark_output(g.exp(g.gather_pages(c, t)))
    for seed in range(20):
        table = draw_integers(g, t.index, (2, 4), [seed, 0, 0]).data
        assert len(set(table.ravel())) == 8 and table.min() >= 0 and table.max() <= 8


def test_what_is_measured_has_long_sequences() -> None:
    g = attention(page=4)
    places = {g.nodes[i].name: i for i in g.inputs}
    table = typical_integers(g, places["table"], (4, 6), 0)
    lengths = typical_integers(g, places["lengths"], (4,), 0)
    assert sorted(set(table.ravel())) == sorted(table.ravel()) and table.max() < 27
    assert lengths.min() >= 12 and lengths.max() <= 24 and len(set(lengths)) == 4


# ------------------------------------------------------------------------------------------ field


@few
@given(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 1000))
def test_a_divisor_whose_summands_are_all_hidden_counts_as_one(
    hidden: list[bool], seed: int
) -> None:
    a, rng = FieldDomain(0), np.random.default_rng(seed)
    x, gone = uniform(rng, ("M", "N"), (5, 3)), np.array(hidden)
    other = uniform(rng, ("M", "N"), (5, 3))
    e = a.exp(x.hide(gone[:, None]))
    total = a.sum(e, ("N",))
    if any(hidden):
        with pytest.raises(DivisionByZero):
            a.div(e, total)
    y, z = (a.div(v, a.seen(total)) for v in (e, other))
    assert not y.p[gone].any() and (z.p[gone] == other.p[gone]).all()
    for found, v in ((y, e), (z, other)):
        shown = FieldValue(("M", "N"), v.p[~gone]), FieldValue(("M",), total.p[~gone])
        assert (found.p[~gone] == FieldDomain(0).div(*shown).p).all()


# --------------------------------------------------------------------------------- block programs


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("online", [False, True])
def test_right_programs(split: str, page: int | None, causal: bool, online: bool) -> None:
    g = attention(causal, page)
    mu = kernel(g, SPLITS[split], causal=causal, online=online)
    result = verify(g, mu, full=True)
    assert result, result.summary()
    assert compare(g, mu)


def test_the_bound_holds_where_the_scores_are_uniform() -> None:
    g = attention(G=1, L=2, causal=True)
    result = verify(g, kernel(g, {"B.grid": 4, "S.loop": 3}, causal=True, online=True))
    assert result and result.bound_log2 is not None and -30 < result.bound_log2 < -18
    assert result.conditions.endswith("at these extents and at drawn lengths, tables and labels")


@pytest.mark.parametrize(("page", "pages"), [(1, 24), (24, 1), (4, 6), (3, 8)])
def test_extents_of_pages(page: int, pages: int) -> None:
    g = attention(page=page)
    mu = kernel(g, {"B.grid": 4, "S.loop": 3})
    for ragged in (False, True):
        sizes = SizeChooser(g.expanded()).small(mu, ragged)
        by_name = dict(zip(mu.inputs, sizes.inputs, strict=True))
        (count, size, *_), (sequences, each) = by_name["K"], by_name["table"]
        assert sizes.programs[0].dims["S"] == size * each and count > sequences * each
        assert (size > 1) == (page > 1) and (each > 1) == (pages > 1)
        assert sizes.programs[0].ragged("S") == ragged
    assert verify(g, mu)


def test_a_cut_mask_is_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.verify import equivalence, numeric

    for module in (equivalence, numeric):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    g = attention(True, 4)
    mu = kernel(g, {"B.persistent": 2, "L.grid": 2, "S.loop": 4}, causal=True, online=True)
    assert verify(g, mu, full=True) and compare(g, mu)


def square(causal: bool, page: int | None = None) -> KernelGraph:
    """A program of as many heads and groups as sequences: another label may have the lengths."""
    return attention(causal, page, H=4, G=4)


WRONG: dict[str, dict[str, Any]] = {
    "no mask": {"masked": frozenset()},
    "the maximum only": {"masked": frozenset(("max",))},
    "the sum only": {"masked": frozenset(("max", "sum"))},
    "the product only": {"masked": frozenset(("max", "product"))},
    "lengths of another label": {"batch": "H"},
    "lengths of the groups": {"batch": "G"},
    "PyTorch's alignment": {"extra": "top_left"},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mistake", [*WRONG, "other flag"])
def test_wrong_masks_are_rejected(split: str, causal: bool, mistake: str) -> None:
    g = square(causal)
    flag = causal != (mistake == "other flag")
    mu = kernel(g, SPLITS[split], causal=flag, **WRONG.get(mistake, {}))
    result = verify(g, mu)
    assert not result and result.reason
    assert not compare(g, mu)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("split", ["one block", "cluster and loop"])
def test_lengths_that_are_off_by_one_are_rejected(
    monkeypatch: pytest.MonkeyPatch, by: int, causal: bool, split: str
) -> None:
    """The mask of the block program, ``j <= n`` or ``j < n - 1``, is simulated by its lengths."""
    from cutesuper.verify import tiles

    g = attention(causal)
    mu = kernel(g, SPLITS[split], causal=causal)
    plain = tiles._integer_tiles

    def moved(*args: Any) -> Any:
        found = plain(*args)
        return replace(found, data=found.data + by)

    assert verify(g, mu)
    monkeypatch.setattr(tiles, "_integer_tiles", moved)
    for seed in range(10):
        assert not verify(g, mu, seed=seed)


def test_wrong_pages_are_rejected() -> None:
    g = two_tables()
    right = kernel(g, {"S.loop": 3}, tables=("table", "other"))
    assert verify(g, right, full=True) and compare(g, right)
    wrong: list[dict[str, Any]] = [
        {"tables": ("table", "table")},
        {"tables": ("other", "other")},
        {"tables": ("other", "table")},
        {"tables": ("table", "other"), "caches": ("V", "K")},
        {"tables": ("table", "other"), "caches": ("K", "K")},
    ]
    for arguments in wrong:
        mu = kernel(g, {"S.loop": 3}, **arguments)
        assert not verify(g, mu), arguments
        assert not compare(g, mu), arguments


def two_tables() -> KernelGraph:
    """K and V have a table each."""
    n = {**SMALL, "E": 8}
    g = new_kernel_graph()
    q = g.new_input(tuple(n[d] for d in "BHGLD"), name="Q")
    k, v = (g.new_input((40, 4, n["H"], 1, 8), name=x) for x in "KV")
    table, other = (g.new_input((n["B"], 6), "int32", name=x) for x in ("table", "other"))
    k, v = g.gather_pages(k, table), g.gather_pages(v, other)
    lengths = g.new_input((n["B"],), "int32", name="lengths")
    scores = g.mul(g.matmul(q, g.transpose(k, (0, 2, 3, 4, 1))), 0.5)
    scores = g.length_mask(scores, lengths)
    g.mark_output(g.matmul(g.softmax(scores), g.transpose(v, (0, 2, 3, 1, 4))))
    return g


def test_pages_that_are_not_read_through_the_table_are_rejected() -> None:
    """One page for each sequence, stored in the order of the sequences: the shapes agree."""
    g = attention(page=24)
    plain = replace(g.nodes[1], shape=(4, *g.nodes[1].shape[1:]))
    values = replace(g.nodes[2], shape=(4, *g.nodes[2].shape[1:]))
    g.nodes[1], g.nodes[2] = plain, values
    assert verify(g, kernel(g, {"S.loop": 3}))
    assert not verify(g, kernel(g, {"S.loop": 3}, tables=(None, "table")))
    assert not verify(g, kernel(g, {"S.loop": 3}, tables=("table", None)))


def edited(mu: MuGraph, kind: str, **attributes: Any) -> MuGraph:
    """The first operation of a kind with other attributes (None of ``inputs`` or ``dims``)."""
    program = mu.steps[0].program
    ops = list(program.ops)
    i = next(i for i, op in enumerate(ops) if op.kind == kind)
    inputs = attributes.pop("inputs", ops[i].inputs)
    ops[i] = replace(ops[i], inputs=inputs, attributes=ops[i].attributes | attributes)
    step = replace(mu.steps[0], program=replace(program, ops=tuple(ops)))
    return replace(mu, steps=(step,))


def with_type(mu: MuGraph, name: str, dtype: Any) -> MuGraph:
    return replace(mu, tensors=mu.tensors | {name: replace(mu.tensors[name], dtype=dtype)})


MASK_ERRORS: dict[str, tuple[Any, str]] = {
    "columns": (
        lambda mu: edited(mu, "length_mask", columns="K"),
        "rows='L' and columns='K' must be two labels of its operand, which has B, H, G, L, S",
    ),
    "same": (lambda mu: edited(mu, "length_mask", rows="S"), "must be two labels"),
    "no rows": (
        lambda mu: edited(mu, "length_mask", rows=None),
        "causal=True counts rows; name their label",
    ),
    "flag": (lambda mu: edited(mu, "length_mask", causal=2), "length_mask(causal=2): must be"),
    "other": (lambda mu: edited(mu, "length_mask", side=2), "unknown attribute"),
    "computed": (
        lambda mu: edited(mu, "length_mask", inputs=(5, 5)),
        "operand 1 (operation 5) must be a plain load of the lengths",
    ),
    "of rows": (
        lambda mu: edited(mu, "length_mask", inputs=(5, 0)),
        "the lengths have the label D, L; there is one for all rows and columns that are counted",
    ),
    "of a float": (
        lambda mu: with_type(mu, "lengths", float16),
        "length_mask takes int32, and lengths is float16",
    ),
    "numbers": (
        lambda mu: with_type(mu, "Q", int32),
        "Q is int32, and only lengths, tables and labels are",
    ),
    "stored": (
        lambda mu: with_type(mu, "Z", int32),
        "Z is int32, and only lengths, tables and labels are",
    ),
    "table": (
        lambda mu: with_type(mu, "table", float16),
        "the table table must be int32, the cache K must not",
    ),
    "no table": (
        lambda mu: edited(with_first(mu, "K"), "load", table="T"),
        "tensor T is not described",
    ),
    "a number": (
        lambda mu: edited(with_first(mu, "K"), "load", table=3),
        "table=3 must be the name",
    ),
    "shared": (
        lambda mu: edited(with_first(mu, "K"), "load", map=(("B", "S"), "H", None, "D")),
        "its map must begin with the label of the sequences and that of the positions",
    ),
    "of a table": (
        lambda mu: edited(with_first(mu, "K"), "load", table="lengths"),
        "load of K through lengths: gather_pages([27, 4, 2, 1, 8], [4]): a table is [sequences",
    ),
    "of an output": (
        lambda mu: edited(with_first(mu, "K"), "load", table="Z"),
        "Z is no input; pages and tables",
    ),
    "extents": (
        lambda mu: edited(with_first(mu, "K"), "load", map=("S", "B", "H", None, "D")),
        "extent 4 of K is mapped to S of extent 24",
    ),
    "a store": (
        lambda mu: edited(mu, "store", table="table"),
        "only a load goes through a table of pages",
    ),
}


def with_first(mu: MuGraph, tensor: str) -> MuGraph:
    """The loads of Q and of another tensor change places, so that `edited` finds that."""
    program = mu.steps[0].program
    ops = list(program.ops)
    i = next(i for i, op in enumerate(ops) if op.attributes.get("tensor") == tensor)
    ops[0], ops[i] = ops[i], ops[0]
    swap = {0: i, i: 0}
    moved = [replace(op, inputs=tuple(swap.get(j, j) for j in op.inputs)) for op in ops]
    step = replace(mu.steps[0], program=replace(program, ops=tuple(moved)))
    return replace(mu, steps=(step,))


@pytest.mark.parametrize("name", MASK_ERRORS)
def test_illegal_programs(name: str) -> None:
    change, message = MASK_ERRORS[name]
    g = attention(True, 4)
    mu = kernel(g, {"S.loop": 3}, causal=True)
    check_mugraph(mu)
    check_mugraph(with_first(mu, "K"))
    with pytest.raises(GraphError) as caught:
        check_mugraph(change(mu))
    assert message in str(caught.value)
    assert not verify(g, change(mu))


def test_programs_survive_json_and_can_be_read() -> None:
    mu = kernel(attention(True, 4), {"S.loop": 3}, causal=True, online=True)
    assert cs.loads(cs.dumps(mu)) == mu
    [step] = mu.steps
    assert step.reads == ("Q", "K", "table", "V", "lengths")
    text = mugraph_text(mu)
    assert "load K through table" in text and "rows=L, columns=S, causal=True" in text
    assert "K[table]" in "\n".join(formulas(step.program))
    with pytest.raises(FormatError, match="table=3 must be the name of a tensor"):
        cs.loads(cs.dumps(mu).replace('"table": "table"', '"table": 3'))


def test_rows_and_products_do_not_read_through_tables() -> None:
    g, (c, t) = graph_of(((9, 4, 8), float16), ((2, 4), int32))
    g.mark_output(g.exp(g.gather_pages(c, t)))
    b = Block({"B": 2, "S": 16, "D": 8}, {"B.grid": 2}, {"B": 1, "S": 16, "D": 8})
    x = b._add("load", (), {"B", "S", "D"}, tensor="X", map=("B", "S", "D"), table="W")
    b.store("Z", b.op("exp", x), "B", "S", "D")
    mu = mugraph(g, b.step())
    assert verify(g, mu)
    with pytest.raises(LoweringError, match="of X through the table W: only the keys and values"):
        make_plan(mu.steps[0], mu.tensors, H200)


def mask_mutations(mu: MuGraph) -> Iterator[tuple[str, MuGraph]]:
    """Mistakes with masks, lengths and tables, besides those of `mutations`."""
    program = mu.steps[0].program
    for i, op in enumerate(program.ops):
        if op.kind == "length_mask":
            labels = [d for d in program.ops[op.inputs[0]].dims if d != "S"]
            for rows in (None, *labels):
                for causal in (False, True):
                    for columns in ("S", "L"):
                        new = {"rows": rows, "columns": columns, "causal": causal}
                        if new != op.attributes:
                            yield f"mask {new}", change(mu, 0, i, attributes=new)
        elif op.attributes.get("tensor") == "lengths":
            for other in ("H", "G"):
                new = {**op.attributes, "map": (other,)}
                yield f"lengths of {other}", change(mu, 0, i, attributes=new)
        elif op.kind == "load" and "table" in op.attributes:
            for d in (0, 2):
                turned = list(op.attributes["map"])
                turned[d] = "H" if d == 0 else "B"
                yield (
                    "batch and heads",
                    change(mu, 0, i, attributes={**op.attributes, "map": tuple(turned)}),
                )
            for table in ("table", "other"):
                if table != op.attributes["table"]:
                    new = {**op.attributes, "table": table}
                    yield f"through {table}", change(mu, 0, i, attributes=new)


@pytest.mark.parametrize("case", ["two walks", "causal", "online", "paged"])
def test_mutants(case: str) -> None:
    """Accepted where float64 agrees, and nowhere else."""
    if case == "paged":
        g = two_tables()
        mu = kernel(g, {"S.loop": 3}, tables=("table", "other"))
    else:
        g = square(case == "causal")
        mu = kernel(g, {"S.loop": 3}, causal=case == "causal", online=case == "online")
    verifier, rejected = Verifier(g), 0
    every = [m for i, op in enumerate(mu.steps[0].program.ops) for m in mutations(mu, 0, i, op)]
    for what, mutant in [*every, *mask_mutations(mu)]:
        result = verifier.check(mutant, bound=False)
        try:
            equal = bool(compare(g, mutant, stress=False))
        except GraphError:
            equal = False
        assert equal or not result, what
        rejected += not equal
    assert rejected >= 40


# ----------------------------------------------------------------------------- labels, and search


def program_of(g: KernelGraph) -> Any:
    flat = Flat(g.expanded())
    return label(Segments(flat).segment(flat.order, 0, len(flat.order)).region)


@pytest.mark.parametrize("causal", [False, True])
def test_labels(causal: bool) -> None:
    program = program_of(attention(causal, 4))
    [mask] = program.of_kind("length_mask")
    scores, lengths = (program.ops[i] for i in mask.inputs)
    assert lengths.kind == "load" and len(lengths.labels) == 1
    assert lengths.labels < scores.labels == mask.labels and len(mask.labels) == 5
    assert program.dims[mask.attributes["columns"]] == 24
    rows = mask.attributes["rows"]
    assert (rows is not None) == mask.attributes["causal"] == causal
    assert rows is None or program.dims[rows] == 4
    assert "table" not in str(program.ops)


def test_one_row_is_not_causal_and_one_column_is_refused() -> None:
    [mask] = program_of(attention(True, L=1)).of_kind("length_mask")
    assert mask.attributes["causal"] is False and mask.attributes["rows"] is None
    g, (x, n) = graph_of(((3, 2, 1), float16), ((3,), int32))
    g.mark_output(g.length_mask(x, n))
    with pytest.raises(SearchError, match="length_mask of one column"):
        program_of(g)


@pytest.mark.parametrize(("causal", "page"), [(False, None), (True, 64)])
def test_the_search_finds_one_kernel_with_a_running_maximum(causal: bool, page: int | None) -> None:
    g = attention(causal, page, H=4, G=2, L=2 + 2 * causal, S=512, D=64, E=64)
    verifier = Verifier(g)
    found = search(g, H200, verify=lambda mu: verifier.check(mu, bound=False).equal)
    assert found.statistics.rejected == 0
    best = found.candidates[0].mugraph
    [step] = best.steps
    assert any(op.rescaled for op in step.program.ops)
    assert sum(op.kind == "length_mask" for op in step.program.ops) == 1
    reads = {"Q", "K", "V", "lengths"} | ({"table"} if page else set())
    assert set(step.reads) == reads
    through = {op.attributes["tensor"] for op in step.program.loads() if "table" in op.attributes}
    assert through == ({"K", "V"} if page else set())
    assert compare(g, best)


def test_open_batches_and_caches_of_one_query() -> None:
    batch, pages = symbol("B", 4), symbol("pages", 40)
    g = new_kernel_graph()
    q = g.new_input((batch, 4, 2, 1, 64), name="Q")
    k, v = (g.new_input((pages, 16, 4, 1, 64), name=x) for x in "KV")
    t, n = g.new_input((batch, 8), "int32", name="T"), g.new_input((batch,), "int32", name="N")
    k, v = (g.transpose(g.gather_pages(x, t), (0, 2, 3, 1, 4)) for x in (k, v))
    g.mark_output(g.scaled_dot_product_attention(q, k, v, is_causal=True, lengths=n))
    verifier = Verifier(g)
    found = search(g, H200, verify=lambda mu: verifier.check(mu, bound=False).equal)
    best = found.candidates[0].mugraph
    assert found.statistics.rejected == 0 and len(best.steps) == 1 and compare(g, best)
    assert cs.loads(cs.dumps(best)) == best


def test_other_skeletons_refuse() -> None:
    options = SearchOptions(lowered=True)
    g, (c, t) = graph_of(((9, 16, 64), float16), ((2, 4), int32))
    g.mark_output(g.exp(g.gather_pages(c, t)))
    with pytest.raises(SearchError, match="input 0 lies in pages of 16, and only the loop"):
        search(g, H200, options=options)
    g, (x, n) = graph_of(((4, 16, 64), float16), ((4,), int32))
    g.mark_output(g.softmax(g.length_mask(x, n)))
    with pytest.raises(SearchError, match="length_mask depends on positions"):
        search(g, H200, options=options)
    found = search(g, H200).candidates[0]
    assert not found.lowered and verify(g, found.mugraph)


def test_pages_are_no_output() -> None:
    g, (c, t) = graph_of(((9, 16, 64), float16), ((2, 4), int32))
    g.mark_output(g.gather_pages(c, t))
    with pytest.raises(SearchError, match=r"output gather_pages\(.*no kernel copies pages"):
        search(g, H200)


# ---------------------------------------------------------------------------------------- runtime


def test_arguments() -> None:
    signature = Signature(attention(page=4))
    good = [
        torch.zeros(4, 2, 2, 4, 8, dtype=torch.float16),
        torch.zeros(27, 4, 2, 1, 8, dtype=torch.float16),
        torch.zeros(27, 4, 2, 1, 4, dtype=torch.float16),
        torch.zeros(4, 6, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    ]
    assert signature.bind(good) == {}
    with pytest.raises(DTypeError, match=r"input lengths is torch.int64, must be torch.int32"):
        signature.bind([*good[:4], good[4].long()])
    with pytest.raises(ShapeError, match=r"input table has shape \[4, 5\], must be \[4, 6\]"):
        signature.bind([*good[:3], good[3][:, :5].contiguous(), good[4]])


# ------------------------------------------------------- alignments in pages, rows that are empty

ROW_SPLITS: dict[str, dict[str, int | None]] = {
    "one block": {},
    "grid": {"M.grid": 3},
    "persistent rows": {"M.grid": 3, "M.persistent": 2},
    "persistent rows, columns in a loop": {"M.grid": 3, "M.persistent": 2, "S.loop": 2},
    "sequences": {"B.grid": 2, "M.grid": 2, "M.persistent": 3, "S.loop": 2},
}


@pytest.mark.parametrize("axes", ROW_SPLITS)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_alignments_of_masks_over_pages_are_told_apart(alignment: str, axes: str) -> None:
    """Rows that are split twice outnumber the columns of two pages of two."""
    other = "top_left" if alignment == "bottom_right" else "bottom_right"
    g = paged_causal(alignment)
    verifier = Verifier(g)
    mu = paged_causal_kernel(g, alignment, ROW_SPLITS[axes])
    assert verifier.check(mu, full=True)
    assert not verifier.check(paged_causal_kernel(g, other, ROW_SPLITS[axes]))
    sizes = SizeChooser(g.expanded()).small(mu, False)
    q, k, _, table = sizes.inputs
    assert k[1] * table[1] > q[1]


@pytest.mark.parametrize("seed", range(3))
def test_quotients_of_stored_exponentials_of_empty_rows(seed: int) -> None:
    graph, mu = stored_weights()
    result = verify(graph, mu, seed=seed)
    assert result, result.summary()
    assert compare(graph, mu)
    [e, *_] = [i for i, op in enumerate(mu.steps[1].program.ops) if op.kind == "sum"]
    assert not verify(graph, change(mu, 1, e, kind="mean"), seed=seed)
