"""Concatenations and slices: shapes, the rules by which they vanish, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.errors import CutesuperError, GraphError, OperatorError, ShapeError
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.serial import dumps, loads
from cutesuper.pipeline import Options, choose
from cutesuper.verify.equivalence import verify
from cutesuper.verify.numeric import compare
from tests.mugraphs import Block, mugraph

M = symbol("M", 6)


def inputs(*shapes: tuple[Any, ...]) -> tuple[KernelGraph, list[Tensor]]:
    g = new_kernel_graph()
    return g, [g.new_input(s) for s in shapes]


def kinds(g: KernelGraph) -> list[str]:
    return [n.operator for n in g.expanded().nodes if n.operator != "input"]


def agree(g: KernelGraph) -> None:
    """The expanded graph has no pieces, the same interface, and computes the same."""
    torch.manual_seed(0)
    x = [torch.randn([extent(d) for d in g.nodes[i].shape], dtype=torch.float64) for i in g.inputs]
    e = g.expanded()
    assert not any(TABLE[n.operator].cuts or TABLE[n.operator].composite for n in e.nodes)
    assert [e.nodes[i] for i in e.inputs] == [g.nodes[i] for i in g.inputs]
    for want, found, i in zip(
        evaluate(g, x, torch.float64), evaluate(e, x, torch.float64), e.outputs, strict=True
    ):
        assert tuple(found.shape) == tuple(map(extent, e.nodes[i].shape))
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------------------- shapes


def test_shapes() -> None:
    g, [a, b, c] = inputs((M, 4, 3), (M, 4, 5), (M, 2, 3))
    assert g.concat([a, b], -1).shape == (M, 4, 8)
    assert g.concat((a, c, a), 1).shape == (M, 10, 3)
    assert g.concat([a], 1).node.attributes == {"dim": 1}
    assert g.slice(a, -1, -2, 3).node.attributes == {"dim": 2, "start": 1, "stop": 3}
    assert g.slice(a, 1, 0, -1).shape == (M, 3, 3)


ERRORS: list[tuple[Callable[[KernelGraph, Any, Any], Any], str]] = [
    (lambda g, a, b: g.concat([], 0), "concat([]): takes at least one tensor"),
    (lambda g, a, b: g.concat(a, 0), "concat(X[M, 4] float16): takes a list of tensors, and dim"),
    (
        lambda g, a, b: g.concat([b, g.transpose(b)], 1),
        "concat([4, 6], [6, 4], dim=1): all extents but those of dimension 1 must be equal",
    ),
    (
        lambda g, a, b: g.concat([b, g.new_input((4,))], 0),
        "concat([4, 6], [4], dim=0): all extents but",
    ),
    (
        lambda g, a, b: g.concat([a, a], 0),
        "concat([M, 4], [M, 4], dim=0): extent M is known only at the call; concatenate along",
    ),
    (lambda g, a, b: g.concat([b, b], 2), "concat([4, 6], dim=2): no such dimension; use -2..1"),
    (
        lambda g, a, b: g.slice(a, 0, 0, 2),
        "slice([M, 4], dim=0, start=0, stop=2): extent M is known only at the call; slice along",
    ),
    (
        lambda g, a, b: g.slice(b, 1, 3, 3),
        "slice([4, 6], dim=1, start=3, stop=3): must leave at least one of elements 0..5",
    ),
    (lambda g, a, b: g.slice(b, 1, 0, 7), "stop=7): must leave at least one of elements 0..5"),
    (
        lambda g, a, b: g.apply("slice", b, dim=1, start=0.0, stop=2),
        "start=0.0, stop=2): start and stop must be ints",
    ),
    (lambda g, a, b: g.slice(b, 2, 0, 1), "slice([4, 6], dim=2): no such dimension; use -2..1"),
]


@pytest.mark.parametrize(("build", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_messages(build: Callable[[KernelGraph, Any, Any], Any], message: str) -> None:
    g, [a, b] = inputs((M, 4), (4, 6))
    with pytest.raises((ShapeError, OperatorError)) as caught:
        build(g, a, b)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------ rules


def lora(m: Any = 8, k: int = 16, n: int = 8, r: int = 4) -> KernelGraph:
    """[X | X A] @ [W; B]."""
    g, [x, w, a, b] = inputs((m, k), (k, n), (k, r), (r, n))
    g.mark_output(g.matmul(g.concat([x, g.matmul(x, a)], 1), g.concat([w, b], 0)))
    return g


def test_an_inner_dimension_becomes_a_sum_of_products() -> None:
    assert sorted(kinds(lora())) == ["add", "matmul", "matmul", "matmul"]
    agree(lora())
    agree(lora(M))


def test_element_wise_operators_act_on_pieces() -> None:
    g, [a, b, c, d, row] = inputs((4, 3), (4, 5), (4, 3), (4, 5), (4, 1))
    x = g.mul(g.silu(g.concat([a, b], 1)), g.concat([c, d], 1))
    g.mark_output(g.sum(g.mul(x, row), 1))
    assert sorted(kinds(g)) == sorted(["silu", "mul", "mul", "sum"] * 2 + ["add"])
    agree(g)


def test_a_mean_weighs_its_pieces() -> None:
    g, [a, b] = inputs((4, 3), (4, 5))
    g.mark_output(g.rms_norm(g.mean(g.concat([a, b], 1), 1)))
    weights = [n.attributes["value"] for n in g.expanded().nodes if n.operator == "constant"]
    assert weights[:2] == [3 / 8, 5 / 8]
    agree(g)


def test_a_maximum_is_that_of_the_pieces() -> None:
    g, [a, b, c] = inputs((4, 3), (4, 5), (4, 2))
    x = g.concat([a, g.concat([b, g.exp(c)], 1)], 1)
    g.mark_output(g.max(x, 1))
    g.mark_output(g.logsumexp(g.slice(x, 1, 0, 8), 1))
    assert kinds(g).count("maximum") == 3
    agree(g)


def test_a_softmax_of_pieces_is_searched_and_verified() -> None:
    g, [a, b] = inputs((8, 64), (8, 32))
    g.mark_output(g.slice(g.softmax(g.concat([a, b], 1)), 1, 0, 64))
    _, choice = choose(g, Options(cs.H200))
    assert choice.verification


def test_a_product_of_pieces_is_made_of_products() -> None:
    g, [x, y, v, w] = inputs((4, 6), (3, 6), (6, 2), (6, 5))
    z = g.matmul(g.concat([x, y], 0), g.concat([v, w], 1))
    g.mark_output(g.sum(g.sum(g.exp(z), 0), 1))
    assert kinds(g).count("matmul") == 4
    agree(g)


def test_leading_dimensions_of_a_product() -> None:
    g, [x, y, w] = inputs((2, 4, 6), (3, 4, 6), (6, 5))
    z = g.matmul(g.concat([x, y], 0), w)
    g.mark_output(g.exp(g.slice(z, 0, 2, 5)))
    g.mark_output(g.sum(z, 0))
    assert kinds(g).count("matmul") == 2  # what both outputs need is computed once
    agree(g)


def test_slices_pick_pieces() -> None:
    g, [x, q, k, v] = inputs((4, 6), (6, 8), (6, 8), (6, 3))
    heads = g.matmul(x, g.concat([q, k, v], 1))
    g.mark_output(g.softmax(g.slice(heads, 1, 0, 8)))
    g.mark_output(g.exp(g.slice(heads, 1, 8, 16)))
    g.mark_output(g.exp(g.slice(g.slice(heads, -1, 8, 19), 1, -3, 11)))
    assert kinds(g).count("matmul") == 3 and "concat" not in kinds(g)
    agree(g)


def test_a_slice_of_rows_is_computed_from_its_rows() -> None:
    g, [x, y, w] = inputs((4, 6), (3, 6), (6, 5))
    both = g.transpose(g.matmul(g.concat([x, y], 0), w))
    g.mark_output(g.exp(g.slice(both, 1, 4, 7)))
    assert kinds(g) == ["matmul", "transpose", "exp"]
    agree(g)


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("columns", [16, 32])
def test_pieces_that_products_read_as_well_are_searched(rows: int, columns: int) -> None:
    """A stored piece is an output inside, whose type is that of the operator."""
    g, [x, y, w] = inputs((16, 32), (16, 64 - columns), (rows, 16))
    h = g.elu(x)
    both = g.mark_output(g.concat([h if columns == 32 else g.slice(h, 1, 0, columns), y], 1))
    g.mark_output((h if rows == 32 else both) @ w)
    _, choice = choose(g, Options(cs.H200))
    assert choice.verification


def test_pieces_of_pieces() -> None:
    g, [a, b, c, d] = inputs((4, 3), (4, 5), (2, 3), (2, 5))
    grid = g.concat([g.concat([a, b], 1), g.concat([c, d], 1)], 0)
    g.mark_output(g.max(g.exp(g.slice(g.slice(grid, 0, 4, 6), 1, 0, 3)), 1))
    g.mark_output(g.sum(g.mean(grid, 0), 1))
    agree(g)


def test_causal_scores_in_pieces_of_heads() -> None:
    g, [q, r, k] = inputs((1, 4, 6), (2, 4, 6), (6, 4))
    scores = g.causal_mask(g.matmul(g.concat([q, r], 0), k))
    g.mark_output(g.softmax(g.slice(scores, 0, 1, 3)))
    agree(g)


def test_a_graph_without_pieces_is_left_alone() -> None:
    g, [x, w] = inputs((4, 6), (6, 5))
    g.mark_output(g.matmul(x, w))
    g.mark_output(g.exp(x))
    assert kinds(g) == ["matmul", "exp"] and g.expanded().outputs == [2, 3]


REFUSED: list[tuple[Callable[[KernelGraph, list[Tensor]], Any], type[CutesuperError], str]] = [
    (
        lambda g, t: g.mark_output(g.sum(g.causal_mask(g.concat(t[:2], 1)), 1)),
        OperatorError,
        "causal_mask t4[4, 8]: it is needed in pieces, t4[:, 0:3], and positions count from the",
    ),
    (
        lambda g, t: g.mark_output(g.slice(g.concat(t[:2], 1), 1, 0, 3)),
        GraphError,
        "output t4[4, 3]: it is input X as it is; compute something",
    ),
    (
        lambda g, t: [
            g.mark_output(g.slice(x, 1, 0, 3)) for x in [g.concat([g.exp(t[0]), t[1]], 1)] * 2
        ],
        GraphError,
        "they are one value; return it once",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_what_cannot_vanish_is_refused(
    build: Callable[[KernelGraph, list[Tensor]], Any], error: type[CutesuperError], message: str
) -> None:
    g, tensors = inputs((4, 3), (4, 5), (4, 8))
    build(g, tensors)
    with pytest.raises(error) as caught:
        g.expanded()
    assert message in str(caught.value)


def test_pieces_survive_json() -> None:
    g = lora()
    again = loads(dumps(g))
    assert isinstance(again, KernelGraph) and again.nodes == g.nodes


def test_the_verifier_sees_the_products() -> None:
    g = lora()
    names = [g.nodes[i].name for i in g.inputs]
    for right in (True, False):
        dims: dict[str, Any] = {"M": 8, "K": 16, "R": 4, "N": 8}
        b = Block(dims, {"K.loop": 4}, {**dims, "K": 4})
        x = b.load(names[0], "M", "K")
        xw = b.acc(b.op("matmul", x, b.load(names[1], "K", "N"), over="K"), "K.loop")
        xa = b.acc(b.op("matmul", x, b.load(names[2], "K", "R"), over="K"), "K.loop")
        xab = b.op("matmul", xa, b.load(names[3], "R", "N"), over="R")
        b.store("Z", b.op("add" if right else "sub", xw, xab), "M", "N")
        mu = mugraph(g, b.step())
        assert bool(verify(g, mu, full=True)) == bool(compare(g, mu)) == right


# ------------------------------------------------------------------------------------- properties

#: a dimension as the extents of its parts
Parts = tuple[int, ...]
UNARY = ("tanh", "sigmoid", "relu", "silu")


class Builder:
    """Random expressions of two dimensions over values that are put together from parts."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.g = draw, new_kernel_graph()
        part = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
        self.dims: list[Parts] = [draw(part) for _ in range(3)]
        #: a value with its two dimensions; (1,) where it was reduced
        self.values: list[tuple[Tensor, Parts, Parts]] = []
        for _ in range(draw(st.integers(1, 3))):
            self._leaf(self._dim(), self._dim())

    def _dim(self) -> Parts:
        return self.dims[self.draw(st.integers(0, 2))]

    def _pick(self, ok: Callable[[Tensor, Parts, Parts], bool]) -> tuple[Tensor, Parts, Parts]:
        fitting = [v for v in self.values if ok(*v)]
        return fitting[self.draw(st.integers(0, len(fitting) - 1))]

    def _joined(self, parts: list[Tensor], dim: int) -> Tensor:
        return parts[0] if len(parts) == 1 else self.g.concat(parts, dim)

    def _leaf(self, rows: Parts, columns: Parts) -> tuple[Tensor, Parts, Parts]:
        g = self.g
        if self.draw(st.booleans()):
            x = self._joined(
                [self._joined([g.new_input((m, n)) for n in columns], 1) for m in rows], 0
            )
        else:
            x = self._joined(
                [self._joined([g.new_input((m, n)) for m in rows], 0) for n in columns], 1
            )
        self.values.append((x, rows, columns))
        return self.values[-1]

    def step(self) -> None:
        """One more value."""
        g, draw = self.g, self.draw
        x, rows, columns = self._pick(lambda *_: True)
        kind = draw(
            st.sampled_from(["unary", "binary", "product", "transpose", "reduce", "statistic"])
        )
        if kind == "unary":
            self.values.append((g.apply(draw(st.sampled_from(UNARY)), x), rows, columns))
        elif kind == "binary":
            y = self._pick(lambda _, r, c: (r, c) == (rows, columns))[0]
            self.values.append(
                (g.apply(draw(st.sampled_from(["add", "sub", "mul"])), x, y), rows, columns)
            )
        elif kind == "product":
            y, _, last = self._leaf(columns, self._dim())
            self.values.append((g.tanh(g.matmul(x, y)), rows, last))
        elif kind == "transpose":
            self.values.append((g.transpose(x), columns, rows))
        else:
            dim = draw(st.integers(0, 1))
            y = g.apply(draw(st.sampled_from(["sum", "mean", "max"])), x, dim=dim)
            if kind == "statistic":
                self.values.append((g.mul(x, y), rows, columns))
            else:
                one: Parts = (1,)
                self.values.append((y, one, columns) if dim == 0 else (y, rows, one))

    def finish(self) -> KernelGraph:
        """Outputs without cuts: every cut dimension is reduced, or one of its parts taken."""
        g, draw = self.g, self.draw
        for k in range(draw(st.integers(1, 2))):
            x, *dims = self._pick(lambda *_: True)
            for d, parts in enumerate(dims):
                if len(parts) == 1:
                    continue
                how = draw(st.sampled_from(["sum", "mean", "max", "slice"]))
                if how == "slice":
                    p = draw(st.integers(0, len(parts) - 1))
                    x = g.slice(x, d, sum(parts[:p]), sum(parts[: p + 1]))
                else:
                    x = g.apply(how, x, dim=d)
            g.mark_output(g.mul(g.tanh(x), k + 2.0))
        return g


@st.composite
def programs(draw: Any) -> KernelGraph:
    builder = Builder(draw)
    for _ in range(draw(st.integers(0, 8))):
        builder.step()
    return builder.finish()


@settings(max_examples=150, deadline=None)
@given(programs())
def test_expansion_changes_no_value(g: KernelGraph) -> None:
    agree(g)
