"""The causal mask: graph, field, block programs, verifier; attention as a composite."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutesuper.egraph.labelled import Region, RegionOp, View, label
from cutesuper.errors import (
    CutesuperError,
    GraphError,
    LoweringError,
    OperatorError,
    SearchError,
    ShapeError,
)
from cutesuper.ir.block import ACCUMULATE, MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import Dim
from cutesuper.ir.dtypes import float16
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.field import HIDDEN, LARGEST, FieldAlgebra, FieldValue, Unbounded, uniform
from cutesuper.ir.graph import KernelGraph, new_kernel_graph, symbol
from cutesuper.ir.operators.base import Items
from cutesuper.ir.serial import dumps, loads
from cutesuper.search.cuts import Flat
from cutesuper.search.forms import find_form
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowLoopPlan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify
from cutesuper.verify.extents import SizeChooser
from cutesuper.verify.numeric import compare
from tests.mugraphs import Block, mugraph
from tests.mutants import change

ALIGNMENTS = ("top_left", "bottom_right")

# ----------------------------------------------------------------------------------------- graphs


ERRORS: list[tuple[tuple[Dim, ...], str, type[CutesuperError], str]] = [
    ((6,), "top_left", ShapeError, "causal_mask([6]): needs rows and columns"),
    (
        (7, 5),
        "bottom_right",
        ShapeError,
        "causal_mask([7, 5]): 'bottom_right' leaves the first 2 rows without any column; give it",
    ),
    ((4, 8), "top", OperatorError, "causal_mask(alignment='top'): must be 'top_left' (row i sees"),
]


@pytest.mark.parametrize(("shape", "alignment", "error", "message"), ERRORS)
def test_messages(
    shape: tuple[Dim, ...], alignment: str, error: type[CutesuperError], message: str
) -> None:
    g = new_kernel_graph()
    x = g.new_input(shape)
    with pytest.raises(error) as caught:
        g.causal_mask(x, alignment)
    assert message in str(caught.value)


@pytest.mark.parametrize(("m", "n"), [(4, 4), (3, 7), (1, 5)])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_the_reference_is_a_triangle(m: int, n: int, alignment: str) -> None:
    g = new_kernel_graph()
    g.mark_output(g.causal_mask(g.new_input((2, m, n)), alignment))
    x = torch.randn(2, m, n, dtype=torch.float64)
    [y] = evaluate(g, [x], torch.float64)
    keep = torch.ones(m, n).tril(n - m if alignment == "bottom_right" else 0).bool()
    assert torch.equal(y, torch.where(keep, x, -torch.inf))


@pytest.mark.parametrize("m", [3, 8, 11])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_a_symbolic_number_of_rows(m: int, alignment: str) -> None:
    """The offset is 0 if there are more rows than columns."""
    g = new_kernel_graph()
    y = g.causal_mask(g.new_input((symbol("M", 4), 8)), alignment)
    assert y.shape == (symbol("M", 4), 8)
    g.mark_output(y)
    x = torch.randn(m, 8, dtype=torch.float64)
    [y] = evaluate(g, [x], torch.float64)
    offset = max(0, 8 - m) if alignment == "bottom_right" else 0
    assert torch.equal(y, torch.where(torch.ones(m, 8).tril(offset).bool(), x, -torch.inf))


ATTENTION_ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (((5, 4), (7, 3), (7, 3)), {}, "query and key differ in their last extent, 4 and 3"),
    (((5, 4), (7, 4), (6, 3)), {}, "7 keys for 6 values; the last extents but one must be equal"),
    (((2, 5, 4), (3, 7, 4), (7, 3)), {}, "leading dimensions do not broadcast"),
    (((5, 4), (4,), (7, 3)), {}, "every operand needs at least 2 dimensions"),
    (((5, 4), (7, 4), (7, 3)), {"is_causal": 1}, "(is_causal=1): must be True or False"),
    (((5, 4), (7, 4), (7, 3)), {"scale": -1.0}, "(scale=-1.0): must be a positive number, or None"),
]


@pytest.mark.parametrize(("shapes", "attributes", "message"), ATTENTION_ERRORS)
def test_messages_of_attention(shapes: Any, attributes: dict[str, Any], message: str) -> None:
    g = new_kernel_graph()
    q, k, v = (g.new_input(s) for s in shapes)
    with pytest.raises((ShapeError, OperatorError)) as caught:
        g.scaled_dot_product_attention(q, k, v, **attributes)
    assert str(caught.value).startswith("scaled_dot_product_attention(")
    assert message in str(caught.value)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_pytorchs(lead: tuple[int, ...], causal: bool, scale: float | None) -> None:
    g = new_kernel_graph()
    q, k, v = (g.new_input((*lead, *s)) for s in ((5, 4), (7, 4), (7, 3)))
    y = g.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    g.mark_output(y)
    assert y.shape == (*lead, 5, 3)
    torch.manual_seed(0)
    x = [torch.randn(*lead, *s, dtype=torch.float64) for s in ((5, 4), (7, 4), (7, 3))]
    want = torch.nn.functional.scaled_dot_product_attention(
        x[0], x[1], x[2], is_causal=causal, scale=scale
    )
    for graph in (g, g.expanded()):
        [found] = evaluate(graph, x, torch.float64)
        torch.testing.assert_close(found, want)
    assert ("causal_mask" in [n.operator for n in g.expanded().nodes]) == causal


# ------------------------------------------------------------------------------------------ field

A = FieldAlgebra(seed=5)
N = 5
rows = settings(max_examples=40, deadline=None)


@st.composite
def values(draw: Any) -> FieldValue:
    return uniform(np.random.default_rng(draw(st.integers(0, 2**32))), ("N",), (N,))


masks = st.lists(st.booleans(), min_size=N, max_size=N).map(np.array)


def same(x: FieldValue, y: FieldValue) -> bool:
    return x.key() == y.key()


@rows
@given(values(), values(), masks)
def test_arithmetic_with_numbers_keeps_what_is_hidden(
    x: FieldValue, y: FieldValue, gone: np.ndarray
) -> None:
    hidden, above = x.hide(gone), replace(y, positive=True)
    assert same(hidden, x) == (not gone.any())
    for f, z in ((A.add, y), (A.sub, y), (A.mul, above), (A.div, above)):
        assert same(f(hidden, z), f(x, z).hide(gone))
    for f, z in ((A.add, y), (A.mul, above)):
        assert same(f(z, hidden), f(hidden, z))
    assert same(A.add(hidden, hidden), A.add(x, x).hide(gone))
    assert same(A.sub(hidden, hidden), A.sub(x, x).hide(gone))


@rows
@given(values(), values(), masks)
def test_what_would_be_infinite_is_refused(x: FieldValue, y: FieldValue, gone: np.ndarray) -> None:
    hidden = x.hide(gone)
    for f in (
        lambda: A.sub(y, hidden),
        lambda: A.div(y, hidden),
        lambda: A.mul(hidden, hidden),
        lambda: A.mul(hidden, y),
        lambda: A.mul(y, hidden),
        lambda: A.div(hidden, y),
        lambda: A.matmul(hidden, y, ("N",)),
        lambda: A.matmul(y, hidden, ("N",)),
    ):
        if gone.any():
            with pytest.raises(Unbounded, match=r"a masked element \(-inf\) is"):
                f()
        else:
            f()


@rows
@given(values(), values(), masks)
def test_reductions_of_hidden_elements(x: FieldValue, y: FieldValue, gone: np.ndarray) -> None:
    hidden, keep, y = x.hide(gone), ~gone, replace(y, positive=True)
    assert same(A.max(hidden, ("N",)), A.max(x, ("N",), (("N",), keep)))
    assert (A.max(hidden, ("N",)).p == HIDDEN) == gone.all()
    assert (A.sum(hidden, ("N",)).p == HIDDEN) == gone.any()
    assert same(A.matmul(hidden, y, ("N",)), A.sum(A.mul(hidden, y), ("N",)))
    assert same(A.matmul(y, hidden, ("N",)), A.sum(A.mul(hidden, y), ("N",)))
    seen = FieldValue(("N",), x.p[keep], None if x.q is None else x.q[keep])
    assert same(A.sum(A.exp(hidden), ("N",)), A.sum(A.exp(seen), ("N",)))


@rows
@given(values(), masks)
def test_functions_of_hidden_elements(x: FieldValue, gone: np.ndarray) -> None:
    hidden = x.hide(gone)
    assert (A.exp(hidden).p[gone] == 0).all() and not A.exp(hidden).masked
    assert (A.exp(hidden.without_q()).p[gone] == 0).all()
    f = A.opaque("silu", hidden)
    assert (f.p < LARGEST.p).all() and not f.masked
    assert same(f.hide(gone), A.opaque("silu", x).hide(gone))
    assert len(set(f.p[gone].tolist())) <= 1


POSITIVE = A.exp(uniform(np.random.default_rng(0), ("N",), (N,)))


@pytest.mark.parametrize(
    ("value", "positive"),
    [
        (A.constant(0.5), True), (A.constant(-0.5), False), (A.constant(0.0), False),
        (POSITIVE, True), (A.add(POSITIVE, POSITIVE), True), (A.mul(POSITIVE, POSITIVE), True),
        (A.div(A.constant(1.0), POSITIVE), True), (A.sub(POSITIVE, POSITIVE), False),
        (A.mul(POSITIVE, A.constant(-1.0)), False), (A.sum(POSITIVE, ("N",)), True),
        (A.opaque("silu", POSITIVE), False),
    ],
)  # fmt: skip
def test_what_is_known_to_be_positive(value: FieldValue, positive: bool) -> None:
    assert value.positive == positive


@rows
@given(values())
def test_squares_are_positive_and_exponentials_of_what_is_seen(x: FieldValue) -> None:
    assert A.mul(x, x).positive and not A.mul(x, A.add(x, x)).positive
    assert A.exp(x).positive and not A.exp(x.hide(np.arange(N) < 2)).positive


def test_fresh_values_for_maxima_are_finite_where_anything_is_seen() -> None:
    a = FieldAlgebra(0, shifts=np.random.default_rng(1))
    gone = np.array([[True] * 4, [True, False, True, True], [False] * 4])
    x = uniform(np.random.default_rng(0), ("M", "N"), (3, 4)).hide(gone)
    assert a.max(x, ("N",)).gone().tolist() == [True, False, False]
    assert not a.max(uniform(np.random.default_rng(0), ("N",), (4,)), ("N",)).masked


def test_a_fresh_maximum_does_not_see_padding() -> None:
    a = FieldAlgebra(0, shifts=np.random.default_rng(1))
    x = uniform(np.random.default_rng(0), ("N",), (N,)).hide(np.arange(N) < N - 1)
    valid = ("N",), np.arange(N) < N - 1
    assert a.max(x, ("N",), valid).p == HIDDEN != a.max(x, ("N",)).p


# --------------------------------------------------------------------------------- block programs


def attention(
    m: int = 8, s: int = 16, d: int = 4, e: int = 4, alignment: str = "top_left"
) -> KernelGraph:
    """softmax(mask(Q K / 2)) V, K stored (d, s)."""
    g = new_kernel_graph()
    q, k, v = (g.new_input(x, name=n) for n, x in (("Q", (m, d)), ("K", (d, s)), ("V", (s, e))))
    scores = g.causal_mask(g.mul(g.matmul(q, k), 0.5), alignment)
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


def _split(n: int, parts: int) -> int:
    return -(-n // parts)


#: what is masked: the scores, each use of them, or something that should not be
USES = frozenset(("max", "sum", "product"))


def attention_kernel(
    g: KernelGraph,
    alignment: str = "top_left",
    axes: dict[str, int | None] | None = None,
    masked: frozenset[str] = USES,
    late: bool = False,
    swapped: bool = False,
    online: bool = False,
) -> MuGraph:
    """Two passes over keys, or one with rescaled sums; the flags make it wrong.

    Args:
        masked: which of the three uses see masked scores.
        late: masks exponentials instead of scores.
        swapped: rows and columns of the mask change places.
        online: sums are rescaled from maxima of the tiles to those of the rows.
    """
    (m, d), s, e = g.nodes[0].shape, g.nodes[1].shape[1], g.nodes[2].shape[1]
    assert all(isinstance(n, int) for n in (m, d, s, e))
    extents: dict[str, Any] = {"M": m, "D": d, "S": s, "E": e}
    axes = {"M.grid": 2, "S.loop": 4} if axes is None else axes
    tile = {
        x: _split(n, prod(p or 1 for a, p in axes.items() if a.startswith(f"{x}.")))
        for x, n in extents.items()
    }
    b = Block(extents, axes, tile)

    def mask(x: int) -> int:
        pair = {"rows": "S", "columns": "M"} if swapped else {"rows": "M", "columns": "S"}
        return b.op("causal_mask", x, alignment=alignment, **pair)

    product = b.op("matmul", b.load("Q", "M", "D"), b.load("K", "D", "S"), over="D")
    plain = b.op("mul", product, b.const(0.5))
    hidden = plain if late else mask(plain)
    uses = {u: hidden if u in masked else plain for u in USES}
    part = b.op("max", uses["max"], over="S")
    top = b.close(part, "S", "max")
    shift = part if online else top

    def weights(use: str) -> int:
        x = b.op("exp", b.op("sub", uses[use], shift))
        return mask(x) if late else x

    def total(x: int) -> int:
        if not online:
            return b.close(x, "S")
        dims = set(b.ops[x].dims)
        return b._add(ACCUMULATE, (x, part, top), dims, axis="S.loop", op="sum")

    low = total(b.op("sum", weights("sum"), over="S"))
    high = total(b.op("matmul", weights("product"), b.load("V", "S", "E"), over="S"))
    b.store("Z", b.op("div", high, low), "M", "E")
    return mugraph(g, b.step())


SPLITS: dict[str, dict[str, int | None]] = {
    "one block": {},
    "grid and loop": {"M.grid": 2, "S.loop": 4},
    "persistent rows": {"M.grid": 2, "M.persistent": 2, "S.loop": 4},
    "cluster": {"M.grid": 4, "S.cluster": 2},
    "cluster and loop": {"S.cluster": 2, "S.loop": 4},
}


@pytest.mark.parametrize("axes", SPLITS)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_causal_attention_is_accepted(axes: str, alignment: str) -> None:
    g = attention(alignment=alignment)
    mu = attention_kernel(g, alignment, SPLITS[axes])
    result = verify(g, mu, full=True)
    assert result, result.summary()
    assert compare(g, mu)


@pytest.mark.parametrize(("m", "s"), [(7, 13), (8, 5), (5, 8)])
def test_tails(m: int, s: int) -> None:
    g = attention(m, s)
    mu = attention_kernel(g)
    assert verify(g, mu, full=True) and compare(g, mu)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_rescaled_sums_where_tiles_are_hidden_as_a_whole(alignment: str) -> None:
    """Tiles above the diagonal have no maximum; whatever is multiplied by 0 then is finite."""
    g = attention(8, 32, alignment=alignment)
    mu = attention_kernel(g, alignment, {"M.grid": 4, "S.loop": 8}, online=True)
    assert verify(g, mu, full=True) and compare(g, mu)


def test_a_cut_mask_is_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.verify import equivalence, numeric

    for module in (equivalence, numeric):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 16)
    g = attention(7, 13)
    mu = attention_kernel(g, axes={"M.grid": 2, "M.persistent": 2, "S.loop": 4})
    assert verify(g, mu, full=True) and compare(g, mu)


WRONG: dict[str, dict[str, Any]] = {
    "no mask": {"masked": frozenset()},
    "the maximum only": {"masked": frozenset(("max",))},
    "the sum only": {"masked": frozenset(("max", "sum"))},
    "the product only": {"masked": frozenset(("max", "product"))},
    "rows and columns swapped": {"swapped": True},
    "exponentials instead of scores": {"late": True},
}


@pytest.mark.parametrize("axes", SPLITS)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("mistake", [*WRONG, "other alignment"])
def test_mutants_are_rejected(axes: str, alignment: str, mistake: str) -> None:
    g = attention(alignment=alignment)
    other = ALIGNMENTS[alignment == "top_left"]
    used = other if mistake == "other alignment" else alignment
    mu = attention_kernel(g, used, SPLITS[axes], **WRONG.get(mistake, {}))
    result = verify(g, mu)
    assert not result and result.reason
    assert not compare(g, mu)


@pytest.mark.parametrize("kind", ["accumulate", "max"])
def test_a_shift_that_is_hidden_where_scores_are_seen_is_rejected(kind: str) -> None:
    """A sum in place of a maximum is -inf as soon as one tile, or one element, is hidden."""
    g = attention()
    mu = attention_kernel(g, axes={"M.grid": 2, "S.loop": 4})
    ops = mu.steps[0].program.ops
    i = next(i for i, op in enumerate(ops) if op.kind == kind)
    wrong = (
        change(mu, 0, i, kind="sum")
        if kind == "max"
        else change(mu, 0, i, attributes={**ops[i].attributes, "op": "sum"})
    )
    assert verify(g, mu)
    assert not verify(g, wrong) and not compare(g, wrong, stress=False)


def test_a_maximum_of_unmasked_scores_shifts_as_well() -> None:
    g = attention()
    mu = attention_kernel(g, masked=frozenset(("sum", "product")))
    assert verify(g, mu) and compare(g, mu, stress=False)


def test_more_columns_than_rows_are_tried_where_the_alignments_differ() -> None:
    """With rows split twice, rows would outnumber columns, and both alignments be one mask."""
    g = attention(48, 64, alignment="bottom_right")
    axes: dict[str, int | None] = {"M.grid": 4, "M.persistent": 3}
    mu = attention_kernel(g, "bottom_right", axes)
    sizes = SizeChooser(g.expanded()).small(mu, False)
    [[m, _], [_, s], _] = sizes.inputs
    assert (m, s) == (8, 9)
    assert not verify(g, attention_kernel(g, "top_left", axes))


def test_rows_that_outnumber_columns_at_small_extents_keep_a_column() -> None:
    """Equal extents of different labels: rows are split, columns are not."""
    g = attention(16, 16, alignment="bottom_right")
    mu = attention_kernel(g, "bottom_right", {"M.grid": 4, "M.persistent": 2})
    sizes = SizeChooser(g.expanded()).small(mu, False)
    assert sizes.inputs[0][0] > sizes.inputs[1][1]
    assert verify(g, mu, full=True) and compare(g, mu)


def masked_softmax(m: int = 8, n: int = 8) -> tuple[KernelGraph, MuGraph]:
    g = new_kernel_graph()
    g.mark_output(g.softmax(g.causal_mask(g.new_input((m, n), name="X"))))
    b = Block({"M": m, "N": n}, {"M.grid": m}, {"M": 1, "N": n})
    x = b.load("X", "M", "N")
    x = b.op("causal_mask", x, rows="M", columns="N", alignment="top_left")
    e = b.op("exp", b.op("sub", x, b.op("max", x, over="N")))
    b.store("Z", b.op("div", e, b.op("sum", e, over="N")), "M", "N")
    return g, mugraph(g, b.step())


def test_hidden_arguments_of_exponentials_leave_the_bound_alone() -> None:
    g, mu = masked_softmax()
    result = verify(g, mu)
    assert result and result.bound_log2 is not None and result.bound_log2 < -60


def test_a_stored_mask_is_compared() -> None:
    g = new_kernel_graph()
    g.mark_output(g.causal_mask(g.new_input((8, 8), name="X")))
    for masked in (True, False):
        b = Block({"M": 8, "N": 8}, {"M.grid": 2, "N.grid": 2}, {"M": 4, "N": 4})
        x = b.load("X", "M", "N")
        y = b.op("causal_mask", x, rows="M", columns="N", alignment="top_left")
        b.store("Z", y if masked else x, "M", "N")
        mu = mugraph(g, b.step())
        assert bool(verify(g, mu, full=True)) == bool(compare(g, mu)) == masked


def test_a_graph_without_a_meaning_is_refused_with_the_reason() -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 8), name="X")
    g.mark_output(g.sub(x, g.causal_mask(x)))
    b = Block({"M": 8, "N": 8}, {"M.grid": 2}, {"M": 4, "N": 8})
    v = b.load("X", "M", "N")
    y = b.op("causal_mask", v, rows="M", columns="N", alignment="top_left")
    b.store("Z", b.op("sub", v, y), "M", "N")
    assert "a masked element (-inf) is subtracted" in str(verify(g, mugraph(g, b.step())).reason)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"rows": "M", "columns": "K"}, "must be two labels of its operand, which has M, N"),
        ({"rows": "M", "columns": "M"}, "rows='M' and columns='M' must be two labels"),
        ({"rows": "M"}, "it needs the attribute columns"),
        ({"rows": "M", "columns": "N", "alignment": "left"}, "alignment='left'"),
        ({"rows": "M", "columns": "N", "diagonal": 1}, "unknown attribute"),
    ],
)
def test_illegal_masks(attributes: dict[str, Any], message: str) -> None:
    _, mu = masked_softmax()
    program = mu.steps[0].program
    [i] = [i for i, op in enumerate(program.ops) if op.kind == "causal_mask"]
    ops = list(program.ops)
    ops[i] = replace(ops[i], attributes=attributes)
    step = replace(mu.steps[0], program=replace(program, ops=tuple(ops)))
    with pytest.raises(GraphError) as caught:
        check_mugraph(replace(mu, steps=(step,)))
    assert "operation 1 (causal_mask)" in str(caught.value) and message in str(caught.value)


def test_masks_survive_json() -> None:
    g, mu = masked_softmax()
    assert loads(dumps(mu)) == mu
    again = loads(dumps(g))
    assert isinstance(again, KernelGraph) and again.nodes == g.nodes


def test_what_runs_a_mask_outside_of_attention() -> None:
    _, mu = masked_softmax(64, 64)
    assert isinstance(make_plan(mu.steps[0], mu.tensors, H200), RowLoopPlan)
    g = new_kernel_graph()
    x, w = g.new_input((64, 64), name="X"), g.new_input((64, 64), name="W")
    g.mark_output(g.causal_mask(g.matmul(x, w)))
    b = Block({"M": 64, "N": 64, "K": 64}, {"K.loop": 1}, {"M": 64, "N": 64, "K": 64})
    y = b.op("matmul", b.load("X", "M", "K"), b.load("W", "K", "N"), over="K")
    y = b.op("causal_mask", b.acc(y, "K.loop"), rows="M", columns="N", alignment="top_left")
    b.store("Z", y, "M", "N")
    mu = mugraph(g, b.step())
    with pytest.raises(LoweringError, match=r"add an input of 0 and -inf in its place"):
        make_plan(mu.steps[0], mu.tensors, H200)


@pytest.mark.parametrize("rows", [(0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_masks_that_no_loop_over_keys_can_limit_are_refused(rows: tuple[int, ...]) -> None:
    """Queries hidden by the position of a key, and positions counted along heads."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((4, 64, 64), "bf16") for _ in range(3))
    scores = g.transpose(g.matmul(q, g.transpose(k)), rows)
    back = tuple(sorted(range(3), key=lambda d: rows[d]))
    hidden = g.transpose(g.causal_mask(scores), back)
    g.mark_output(g.matmul(g.softmax(hidden), v))
    with pytest.raises(SearchError, match="no kernel can run causal_mask"):
        search(g, H200, options=SearchOptions(lowered=True))
    whole = Flat(g.expanded())
    region = whole.segment(whole.order).region
    with pytest.raises(SearchError, match=r"causal_mask hides .*, and the loop over N may hide N"):
        find_form(region, label(region), H200)


# ----------------------------------------------------------------------------------------- labels


def region(shape: tuple[Dim, ...], alignment: str) -> Region:
    ops = (
        RegionOp("exp", (View(0, tuple(range(len(shape)))),), Items({}), shape),
        RegionOp(
            "causal_mask",
            (View(1, tuple(range(len(shape)))),),
            Items({"alignment": alignment}),
            shape,
        ),
    )
    return Region((shape,), (float16,), ops, (View(2, tuple(range(len(shape)))),), (float16,))


def test_labels_of_a_mask() -> None:
    program = label(region((2, 8, 16), "bottom_right"))
    [mask] = program.of_kind("causal_mask")
    (out, (_, m, n)), *_ = program.outputs
    assert mask.attributes == {"alignment": "bottom_right", "rows": m, "columns": n}
    assert mask.over is None and mask.labels == frozenset(program.dims) and len(program.dims) == 3
    assert program.ops[out] is mask


def test_one_row_at_the_bottom_sees_everything() -> None:
    assert not label(region((1, 16), "bottom_right")).of_kind("causal_mask")
    assert not label(region((16, 1), "top_left")).of_kind("causal_mask")


def test_a_masked_softmax_without_a_maximum_has_a_kernel() -> None:
    """float16 cannot hold its exponentials, so a maximum is subtracted; the verifier agrees."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((64, 64), "float16", name) for name in "qkv")
    e = g.exp(g.causal_mask(g.matmul(q, g.transpose(k)) * 0.1))
    g.mark_output(g.matmul(e / g.sum(e, -1), v))
    mu = search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert "max" in {op.kind for s in mu.steps for op in s.program.ops}
    assert verify(g, mu)
