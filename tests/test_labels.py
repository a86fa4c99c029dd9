"""Labels of classes: `pick` and `label_weight`, from the builder to verified programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import cutesuper as cs
from cutesuper.errors import CutesuperError, DTypeError, GraphError, OperatorError, ShapeError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.serial import dumps, loads
from cutesuper.search.search import SearchOptions, search
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.integers import draw_integers, typical_integers
from cutesuper.verify.numeric import compare
from tests.mutants import change, mutations

M = cs.symbol("M", 12)
NAN = float("nan")


def cross_entropy(n: int = 10, rows: Any = M, dtype: str = "bf16", **options: int) -> KernelGraph:
    """The loss of each row of logits x, with labels t."""
    g = new_kernel_graph()
    x, t = g.new_input((rows, n), dtype, "x"), g.new_input((rows, 1), "int64", "t")
    g.mark_output(g.cross_entropy(x, t, **options), "fp32")
    return g


# --------------------------------------------------------------------------------------- building

Build = Callable[[KernelGraph, Tensor, Tensor], Any]
ERRORS: dict[str, tuple[Build, type[CutesuperError], str]] = {
    "float labels": (
        lambda g, x, t: g.pick(x, g.new_input((4, 1), "fp32", "f")), DTypeError,
        "pick: operand 1, f[4, 1] float32, must be an int64 or int32 input; use new_input(dims=,",
    ),
    "labels as numbers": (
        lambda g, x, t: g.exp(t), DTypeError,
        "exp: operand 0, t[4, 1] int64, is int64, which only lengths (length_mask",
    ),
    "64-bit lengths": (
        lambda g, x, t: g.length_mask(
            g.new_input((4, 2, 3)), g.new_input((4,), "int64", "n")
        ),
        DTypeError,
        "length_mask: operand 1, n[4] int64, must be an int32 input",
    ),
    "one dimension": (
        lambda g, x, t: g.pick(g.new_input((6,)), t), ShapeError,
        "pick([6], [4, 1]): labels must be one for each row of [rows, columns]",
    ),
    "other rows": (
        lambda g, x, t: g.pick(g.new_input((3, 6)), t), ShapeError,
        "pick([3, 6], [4, 1]): labels must be one for each row, [3, 1]",
    ),
    "no classes": (
        lambda g, x, t: g.label_weight(t, 0), OperatorError,
        "label_weight(classes=0, ignore_index=-100): there is at least one class, and both fit",
    ),
    "half a class": (
        lambda g, x, t: g.label_weight(t, 2.5), OperatorError,  # type: ignore[arg-type]
        "label_weight(classes=2.5): must be an int",
    ),
    "huge": (
        lambda g, x, t: g.label_weight(t, 5, ignore_index=1 << 40), OperatorError,
        "both fit into 32 bits",
    ),
    "loss of a vector": (
        lambda g, x, t: g.cross_entropy(g.new_input((6,)), t), ShapeError,
        "cross_entropy([6], [4, 1]): takes [rows, classes], and one label for each row, [rows, 1]",
    ),
    "ignored": (
        lambda g, x, t: g.cross_entropy(x, t, ignore_index=1.5), OperatorError,  # type: ignore[arg-type]
        "label_weight(ignore_index=1.5): must be an int",
    ),
    "output": (
        lambda g, x, t: g.mark_output(g.pick(x, t), "int64"), DTypeError,
        "nothing is computed in integers",
    ),
    "gradient": (
        lambda g, x, t: cs.grad(cross_entropy(), wrt="t"), GraphError,
        "t[M, 1] int64 has no gradient; leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_messages(name: str) -> None:
    build, error, message = ERRORS[name]
    g = new_kernel_graph()
    x, t = g.new_input((4, 6), name="x"), g.new_input((4, 1), "int64", "t")
    with pytest.raises(error) as caught:
        build(g, x, t)
    assert message in str(caught.value)


def test_types_and_files() -> None:
    g = cross_entropy()
    assert g.nodes[g.outputs[0]].dtype == cs.float32
    weight = next(n for n in g.expanded().nodes if n.operator == "label_weight")
    assert weight.dtype == cs.float32 and weight.shape == (M, 1)
    assert loads(dumps(g)).nodes == g.nodes  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_references(dtype: torch.dtype) -> None:
    labels = torch.tensor([[2], [0], [-100], [3], [-1], [1]], dtype=dtype)
    x = torch.randn(6, 3)
    picked = TABLE["pick"].reference([x, labels], {})
    want = torch.zeros(6, 3)
    for i, j in ((0, 2), (1, 0), (5, 1)):
        want[i, j] = x[i, j]
    assert torch.equal(picked, want)
    for ignored, weights in ((-100, [1, 1, 0, NAN, NAN, 1]), (2, [0, 1, NAN, NAN, NAN, 1])):
        attributes = {"classes": 3, "ignore_index": ignored}
        found = TABLE["label_weight"].reference([labels], attributes)
        assert torch.equal(found.nan_to_num(7), torch.tensor(weights)[:, None].nan_to_num(7))


class NumPy:
    """The namespace of formulas over arrays."""

    where = staticmethod(np.where)
    position = staticmethod(np.asarray)


@pytest.mark.parametrize("first", [0, 4])
def test_formulas_at_positions_are_the_references(first: int) -> None:
    """For the columns from ``first`` on, as a block that has a part of them computes it."""
    x, labels = torch.randn(2, 3, 8), torch.tensor([[[2], [5], [-1]], [[7], [8], [4]]])
    whole = (np.arange(3)[:, None], np.arange(8)[first:])
    cases: list[tuple[str, list[torch.Tensor], dict[str, Any]]] = [
        ("pick", [x, labels], {}),
        ("causal_mask", [x], {"alignment": "top_left"}),
        ("causal_mask", [x], {"alignment": "bottom_right"}),
        ("length_mask", [x, torch.tensor([3, 9])], {"causal": False}),
        ("length_mask", [x, torch.tensor([3, 9])], {"causal": True}),
    ]
    for name, args, attributes in cases:
        want = TABLE[name].reference(args, attributes)[..., first:]
        given = [args[0].numpy()[..., first:], *(a.numpy() for a in args[1:])]
        given[1:] = [a.reshape(*a.shape, *(1 for _ in range(3 - a.ndim))) for a in given[1:]]
        found = TABLE[name].at(NumPy, given, *whole, (3, 8), {**attributes, "columns": "N"})
        assert np.array_equal(found, want.numpy()), name


def test_the_formula_of_weights_is_the_reference() -> None:
    op, labels = TABLE["label_weight"], np.arange(-3, 9)
    for ignored in (-2, -1, 0, 3, 5):
        attributes = {"classes": 5, "ignore_index": ignored}
        found = op.scalar(NumPy, [labels], attributes)
        assert np.array_equal(found, op.numbers(labels, attributes), equal_nan=True)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy_is_pytorchs(ignored: int) -> None:
    g = cross_entropy(7, 9, "fp32", ignore_index=ignored)
    torch.manual_seed(0)
    x, t = torch.randn(9, 7, dtype=torch.float64), torch.randint(7, (9,))
    t[2], t[5] = ignored, ignored
    functional = torch.nn.functional.cross_entropy
    leaf = x.clone().requires_grad_()
    want = functional(leaf, t, ignore_index=ignored, reduction="none")
    dy = torch.randn(9, dtype=torch.float64)
    want.backward(dy)
    for save in ("none", "auto"):
        s = cs.split(g, save=save)
        assert set(s.saved) == ({"max", "sum"} if save == "auto" else set())
        loss, *kept = evaluate(s.forward, [x, t[:, None]], torch.float64)
        torch.testing.assert_close(loss[:, 0], want.detach())
        [dx] = evaluate(s.backward, [x, t[:, None], *kept, dy[:, None]], torch.float64)
        torch.testing.assert_close(dx, leaf.grad)
        assert ("max" in {n.operator for n in s.backward.nodes}) == (save == "none")


def test_a_wrong_label_is_nan_and_no_other_row_is() -> None:
    g = cross_entropy(7, 4, "fp32")
    x, t = torch.randn(4, 7), torch.tensor([[1], [7], [-100], [-1]])
    s = cs.split(g)
    loss, *kept = evaluate(s.forward, [x, t], torch.float64)
    assert loss[:, 0].isnan().tolist() == [False, True, False, True]
    [dx] = evaluate(s.backward, [x, t, *kept, torch.ones(4, 1)], torch.float64)
    assert dx.isnan().all(1).tolist() == [False, True, False, True]
    assert not dx[2].any()


def test_derivative_of_pick() -> None:
    """Linear: what is picked, however the result is used."""
    builds: dict[str, Callable[[KernelGraph, Tensor, Tensor, Tensor], Tensor]] = {
        "whole": lambda g, x, t, y: g.pick(g.exp(x), t) * y,
        "sum": lambda g, x, t, y: g.sum(g.pick(x * y, t), -1),
        "one number": lambda g, x, t, y: g.sum(g.sum(g.pick(x, t), 0), 1) + g.sum(g.sum(y, 0), 1),
    }
    x, y = torch.randn(2, 5, 6, dtype=torch.float64)
    t = torch.tensor([[0], [5], [6], [-1], [3]])
    for name, build in builds.items():
        g = new_kernel_graph()
        inputs = (
            g.new_input((5, 6), name="x"),
            g.new_input((5, 1), "int32", "t"),
            g.new_input((5, 6), name="y"),
        )
        g.mark_output(build(g, *inputs))
        leaves = [v.clone().requires_grad_() for v in (x, y)]
        [out] = evaluate(g, [leaves[0], t, leaves[1]], torch.float64)
        dy = torch.randn(out.shape, dtype=torch.float64)
        want = torch.autograd.grad(out, leaves, dy)
        graph = cs.grad(g)
        feed = {"x": x, "t": t, "y": y}
        values = [feed.get(graph.nodes[i].name, dy) for i in graph.inputs]
        for got, expected in zip(evaluate(graph, values, torch.float64), want, strict=True):
            torch.testing.assert_close(got, expected, msg=name)


# ----------------------------------------------------------------------------------- verification


def test_drawn_labels() -> None:
    """Columns in half of the rows; what is none comes up in a few trials, the last class too."""
    g = cross_entropy(10, 2).expanded()
    label = g.inputs[1]
    seen: set[int] = set()
    for trial in range(6):
        numbers = draw_integers(g, label, (2, 1), [1, trial, 0]).data.ravel()
        assert sum(0 <= n < 10 for n in numbers) >= 1
        seen |= set(numbers.tolist())
    assert {-1, 9, 10, -100} <= seen
    typical = typical_integers(g, label, (500, 1), 0)
    assert set(typical.ravel().tolist()) == set(range(10))


def programs(g: KernelGraph, lowered: bool, keep: int = 4) -> list[MuGraph]:
    verifier = Verifier(g)
    result = search(
        g,
        cs.H200,
        options=SearchOptions(lowered=lowered, keep=keep),
        verify=lambda mu: bool(verifier.check(mu, bound=False)),
    )
    assert not result.statistics.rejected
    return [c.mugraph for c in result.candidates]


@pytest.mark.parametrize("lowered", [True, False])
def test_programs_of_the_search(lowered: bool) -> None:
    """Whatever axes split the columns, positions are those of the whole row."""
    s = cs.split(cross_entropy(64))
    picks = new_kernel_graph()
    x, t = picks.new_input((M, 512), "bf16"), picks.new_input((M, 1), "int32")
    picks.mark_output(picks.sum(picks.pick(x * x, t), 1))
    axes: set[str] = set()
    for g in (s.forward, s.backward, picks):
        for mu in programs(g, lowered, 64 if g is picks else 4):
            assert compare(g, mu)
            axes |= {a.name for step in mu.steps for a in step.program.axes}
    if not lowered:
        assert {a.split(".")[1] for a in axes} >= {"grid", "cluster", "loop"}


@pytest.mark.parametrize("classes", [8, 1000, 20000])
def test_programs_of_one_row(classes: int) -> None:
    """Both passes have one kernel each, also where a row is longer than a block holds."""
    s = cs.split(cross_entropy(classes, rows=1))
    for g in (s.forward, s.backward):
        [first, *_] = programs(g, True)
        assert len(first.steps) == 1 and compare(g, first)


@cache
def loss_programs() -> list[tuple[KernelGraph, MuGraph]]:
    """Both passes of the loss of 8 rows and 8 classes, with the best program."""
    s = cs.split(cross_entropy(8, 8))
    return [(g, programs(g, True)[0]) for g in (s.forward, s.backward)]


def of(mu: MuGraph, kind: str) -> tuple[int, Any]:
    return next((i, op) for i, op in enumerate(mu.steps[0].program.ops) if op.kind == kind)


def with_attributes(mu: MuGraph, kind: str, **attributes: Any) -> MuGraph:
    i, op = of(mu, kind)
    return change(mu, 0, i, attributes={**op.attributes, **attributes})


def dropped(mu: MuGraph, kind: str) -> MuGraph:
    """The program without the first operation of a kind; its users get its first operand."""
    i, op = of(mu, kind)
    for k, user in enumerate(mu.steps[0].program.ops):
        if i in user.inputs:
            inputs = tuple(op.inputs[0] if j == i else j for j in user.inputs)
            mu = change(mu, 0, k, inputs=inputs)
    return mu


def test_mutants_are_rejected() -> None:
    """All that can be wrong with an operation, but for what gives the same numbers."""
    for graph, mu in loss_programs():
        verifier, tried = Verifier(graph), 0
        for i, op in enumerate(mu.steps[0].program.ops):
            for what, wrong in mutations(mu, 0, i, op):
                tried += 1
                if verifier.check(wrong, bound=False):
                    assert compare(graph, wrong), f"operation {i}, {op.kind}: {what}"
        assert tried > 20


MISTAKES: dict[str, Callable[[MuGraph], MuGraph]] = {
    "not picked": lambda mu: dropped(mu, "pick"),
    "the column of the other side": lambda mu: with_attributes(mu, "pick", columns="M"),
    "one class more": lambda mu: with_attributes(mu, "label_weight", classes=9),
    "one class less": lambda mu: with_attributes(mu, "label_weight", classes=7),
    "another label is ignored": lambda mu: with_attributes(mu, "label_weight", ignore_index=-1),
    "a class is ignored": lambda mu: with_attributes(mu, "label_weight", ignore_index=7),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_mistakes_are_rejected(mistake: str, seed: int) -> None:
    for graph, mu in loss_programs():
        wrong = MISTAKES[mistake](mu)
        assert verify(graph, mu, seed=seed) and not verify(graph, wrong, seed=seed)


def two_labels(first: str, second: str) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((8, 8), name="x")
    labels = {n: g.new_input((8, 1), "int64", n) for n in ("t", "u")}
    g.mark_output(g.pick(x, labels[first]) * 2 + g.pick(g.exp(x), labels[second]))
    return g


@pytest.mark.parametrize("seed", range(3))
def test_the_labels_of_another_input_are_rejected(seed: int) -> None:
    right, swapped = two_labels("t", "u"), two_labels("u", "t")
    assert verify(right, programs(right, True)[0], seed=seed)
    assert not verify(right, programs(swapped, True)[0], seed=seed)
    once = new_kernel_graph()
    x, t, u = (
        once.new_input((8, e), d, n)
        for e, d, n in ((8, "fp16", "x"), (1, "int64", "t"), (1, "int64", "u"))
    )
    both = once.mark_output(once.pick(once.pick(x, t), u))
    mu = programs(once, True)[0]
    assert verify(once, mu) and both.shape == (8, 8)
    assert not verify(once, dropped(mu, "pick"))


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_label_that_is_off_by_one_is_rejected(
    by: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block program compares with the next column; the definition does not."""
    from cutesuper.verify import tiles

    g, mu = loss_programs()[0]
    pick = TABLE["pick"]

    class Off(type(pick)):
        def visible(
            self, rows: Any, columns: Any, extents: Any, attributes: Any, integers: Any = None
        ) -> Any:
            return super().visible(rows, columns + by, extents, attributes, integers)

    assert verify(g, mu, seed=seed)
    monkeypatch.setattr(tiles, "TABLE", {**TABLE, "pick": Off()})
    assert not verify(g, mu, seed=seed)


ILLEGAL: dict[str, tuple[Callable[[MuGraph], MuGraph], str]] = {
    "labels of the columns": (
        lambda mu: change(mu, 0, of(mu, "load")[0], attributes={"tensor": "t", "map": ("M", "N")}),
        "extent",
    ),
    "no columns": (
        lambda mu: with_attributes(mu, "pick", columns="K"), "must be two labels of its operand",
    ),
    "float labels": (
        lambda mu: replace(
            mu, tensors=mu.tensors | {"t": replace(mu.tensors["t"], dtype=cs.float32)}
        ),
        "pick takes int64 or int32, and t is float32",
    ),
    "computed labels": (
        lambda mu: change(mu, 0, of(mu, "label_weight")[0], inputs=(of(mu, "pick")[0],)),
        "must be a plain load of the labels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_programs(name: str) -> None:
    g = new_kernel_graph()
    x, t = g.new_input((8, 6), name="x"), g.new_input((8, 1), "int64", "t")
    g.mark_output(g.label_weight(t, 6) * g.pick(x, t))
    mu = programs(g, True)[0]
    build, message = ILLEGAL[name]
    result = verify(g, build(mu))
    assert not result and message in str(result.reason)


def test_labels_beside_products_are_another_kernel() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((16, 64)), g.new_input((64, 128))
    t = g.new_input((16, 1), "int64")
    g.mark_output(g.pick(x @ w, t))
    assert [len(mu.steps) for mu in programs(g, True)[:1]] == [2]
    assert extent(g.nodes[-1].shape[0]) == 16
