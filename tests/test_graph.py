"""The builder: shapes, element types, messages, expansion, and agreement with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutesuper.errors import (
    CutesuperError,
    DTypeError,
    GraphError,
    OperatorError,
    OptionError,
    ShapeError,
)
from cutesuper.ir.dims import Symbol, broadcast, ceil_div, extent, show_shape, size
from cutesuper.ir.dtypes import as_dtype, bfloat16, float16, float32
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.ir.operators.base import TABLE, Operator
from cutesuper.ir.operators.pointwise import FUNCTIONS
from cutesuper.ir.serial import dumps, loads
from cutesuper.skeletons.kernel.hostmath import HostMath

M = Symbol("M", 32)

UNARY = tuple(f.name for f in FUNCTIONS)
BINARY = ("add", "sub", "mul", "div")

# ---------------------------------------------------------------------------------------- shapes


def inputs(*shapes: tuple[Any, ...], dtype: Any = float16) -> tuple[KernelGraph, list[Tensor]]:
    g = new_kernel_graph()
    return g, [g.new_input(s, dtype) for s in shapes]


@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_keep_the_shape(name: str) -> None:
    g, [x] = inputs((M, 3, 1), dtype="bf16")
    y = getattr(g, name)(x)
    assert y.shape == (M, 3, 1)
    assert y.dtype == bfloat16
    assert y.node.operator == name


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators_broadcast(name: str) -> None:
    g, [x, w, c] = inputs((M, 1, 5), (4, 1), (1,))
    assert getattr(g, name)(x, w).shape == (M, 4, 5)
    assert getattr(g, name)(c, x).shape == (M, 1, 5)
    assert getattr(g, name)(x, 2).shape == (M, 1, 5)
    assert getattr(g, name)(0.5, x).shape == (M, 1, 5)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "reduction"])
@pytest.mark.parametrize(("dim", "shape"), [(0, (1, 3, 5)), (1, (M, 1, 5)), (-1, (M, 3, 1))])
def test_reductions_keep_the_dimension(name: str, dim: int, shape: tuple[Any, ...]) -> None:
    g, [x] = inputs((M, 3, 5))
    y = getattr(g, name)(x, dim)
    assert y.shape == shape
    assert y.node.attributes == {"dim": dim % 3}


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ((16, 8), (8, 4), (16, 4)),
        ((M, 8), (8, 4), (M, 4)),
        ((M, 2, 3), (3, 5), (M, 2, 5)),
        ((2, 3), (M, 3, 5), (M, 2, 5)),
        ((7, 1, 2, 3), (6, 3, 5), (7, 6, 2, 5)),
    ],
)
def test_matmul(a: tuple[Any, ...], b: tuple[Any, ...], result: tuple[Any, ...]) -> None:
    g, [x, w] = inputs(a, b)
    assert g.matmul(x, w).shape == result
    assert (x @ w).shape == result


def test_other_operators() -> None:
    g, [x, w] = inputs((M, 3, 5), (5,))
    assert g.transpose(x).shape == (M, 5, 3)
    assert g.transpose(x, (2, 0, 1)).shape == (5, M, 3)
    assert g.transpose(x, [-1, 0, 1]).node.attributes == {"dims": (2, 0, 1)}
    assert g.rms_norm(x).shape == (M, 3, 5)
    assert g.rms_norm(x, w, eps=0).node.attributes == {"eps": 0.0}
    assert g.rms_norm(x, normalized_shape=(5,)).shape == (M, 3, 5)
    assert g.rms_norm(x, (5,)).shape == (M, 3, 5)
    assert g.softmax(x).node.attributes == {"dim": 2}
    assert g.clamp(x, -1, 1).node.attributes == {"min": -1.0, "max": 1.0}


def test_python_operators_build_the_same_nodes() -> None:
    g, [x, w] = inputs((4, 5), (5,))
    for result, name in (
        (x + w, "add"), (x - w, "sub"), (x * w, "mul"), (x / w, "div"), (1 + x, "add"),
        (1 - x, "sub"), (2 * x, "mul"), (1 / x, "div"), (x + 1, "add"),
    ):  # fmt: skip
        assert result.node.operator == name
        assert result.shape == (4, 5)
    constant = g.tensor((1 - x).node.inputs[0])
    assert constant.node.operator == "constant"
    assert constant.shape == ()


def test_every_operator_has_what_the_system_needs() -> None:
    for name, op in TABLE.items():
        assert op.name == name
        assert type(op).shape is not Operator.shape or name == "input"
        assert type(op).reference is not Operator.reference or name == "input"
        assert (type(op).expand is not Operator.expand) == op.composite
        primitive = not op.composite
        if op.elementwise and primitive:
            assert type(op).scalar is not Operator.scalar
        assert (type(op).visible is not Operator.visible) == op.masks
        if (op.elementwise and primitive) or op.masks:
            assert type(op).symbolic is not Operator.symbolic


def test_statistics_of_rows_may_be_float32() -> None:
    g, [x] = inputs((4, 6), dtype="bf16")
    r = g.new_input((4, 1), "fp32")
    assert (r * r).dtype == float32
    assert (r * g.sum(x, 1)).dtype == bfloat16
    g.mark_output(x * r)
    total = g.mark_output(g.sum(g.exp(x), 1), "fp32")
    assert total.dtype == float32
    assert (total * x).dtype == bfloat16
    for other in (g.expanded(), g.apart([[0], [1]]), loads(dumps(g))):
        assert [other.nodes[i].dtype for i in other.outputs] == [bfloat16, float32]


def test_what_is_converted_has_its_own_type() -> None:
    g, [x] = inputs((4, 6), dtype="fp32")
    w = g.new_input((6, 8), "bf16", name="w")
    h = g.convert(x, torch.bfloat16)
    assert h.node.attributes == {"dtype": "bfloat16"} and h.dtype == bfloat16
    y = g.mark_output(g.matmul(h, w), "fp32")
    assert g.exp(y).dtype == bfloat16
    other = loads(dumps(g))
    assert isinstance(other, KernelGraph)
    for same in (g.expanded(), g.apart([[0]]), other):
        assert [n.dtype for n in same.nodes[2:4]] == [bfloat16, float32]
    values = [torch.full((4, 6), 1 + 2**-9), torch.ones(6, 8, dtype=torch.bfloat16)]
    assert evaluate(g, values)[0].tolist() == [[6.0] * 8] * 4  # rounded, as PyTorch would
    assert evaluate(g, values, torch.float32)[0][0, 0] > 6  # what a kernel computes
    with pytest.raises(DTypeError, match="nothing is computed in integers"):
        g.convert(x, "int32")


def test_inputs_of_different_types() -> None:
    """Results of several types are float32, as in PyTorch; outputs say what they are."""
    g, [x] = inputs((4, 6), dtype="bf16")
    w, r = g.new_input((6,), "fp32", name="w"), g.new_input((4, 6), "fp16", name="r")
    assert (x * w).dtype == (x + r).dtype == g.rms_norm(x, w).dtype == float32
    assert (x * 2).dtype == bfloat16
    h = g.mark_output(x + r, "bf16")
    y = g.mark_output(g.rms_norm(h, w), "fp16")
    z = g.mark_output(g.exp(h) * 2)
    assert [t.dtype for t in (h, y, z)] == [bfloat16, float16, float32]
    for other in (g.expanded(), g.apart([[0], [1, 2]]), loads(dumps(g))):
        assert [other.nodes[i].dtype for i in other.outputs] == [bfloat16, float16, float32]
    assert loads(dumps(g)).nodes == g.nodes
    a, b = torch.randn(4, 6).bfloat16(), torch.randn(4, 6).half()
    outputs = run_reference(g, [a, torch.ones(6), b])
    assert [t.dtype for t in outputs] == [torch.bfloat16, torch.float16, torch.float32]


def test_the_stored_type_of_an_output_is_not_that_of_what_is_made_of_it() -> None:
    g, [x, w] = inputs((4, 6), (6, 8))
    s = g.mark_output(x * 2, "fp32")
    assert (s @ w).dtype == float16
    assert (s + x).dtype == float16


@pytest.mark.parametrize("name", [n for n, o in TABLE.items() if o.composite and o.elementwise])
def test_an_output_that_a_product_reads_has_one_type_in_a_copy(name: str) -> None:
    """Inner values of element-wise operators are float32, and their results are not."""
    g, tensors = inputs((4, 6), (4, 6), (6, 8))
    required = {k: 1.5 for k, v in TABLE[name].attributes.items() if v is ...}
    limits = {"min": -1.0} if "min" in required else {}
    y = g.mark_output(g.apply(name, *tensors[: TABLE[name].arity], **required | limits))
    g.mark_output((y * 2) @ tensors[2])
    g.mark_output(y @ tensors[2])
    e = g.expanded()
    for graph in (e, e.apart([[0, 1, 2]])):
        assert [graph.own_dtype(graph.tensor(i)) for i in graph.outputs] == [float16] * 3


def test_an_output_that_is_stored_shorter_keeps_its_type_for_others() -> None:
    g, [x] = inputs((4, 6))
    w = g.new_input((6, 8), "float32")
    y = g.mark_output(g.elu(g.convert(x, "float32")), "bfloat16")
    g.mark_output(y @ w)
    e = g.expanded()
    for graph in (e, e.apart([[0, 1]])):
        assert [graph.own_dtype(graph.tensor(i)) for i in graph.outputs] == [float32] * 2
        assert [graph.nodes[i].dtype for i in graph.outputs] == [bfloat16, float32]


def test_eager_evaluation_of_different_types_rounds_to_the_graphs() -> None:
    """x times a float32 statistic is float32 in PyTorch, and of x's type in a graph."""
    g, [x, w] = inputs((4, 6), (6, 8))
    r = g.new_input((4, 1), "fp32")
    g.mark_output((x * r) @ w)
    half = torch.ones(4, 6).half()
    [y] = evaluate(g, [half, half.new_ones(6, 8), torch.ones(4, 1)])
    assert y.dtype == torch.float16


def test_names() -> None:
    g, tensors = inputs(*[(2,)] * 28)
    assert [t.name for t in tensors[:4]] == ["X", "W", "A", "B"]
    assert len({t.name for t in tensors}) == 28
    assert repr(tensors[0] + 1) == "t29[2] float16"
    assert str(g) == repr(g)


# -------------------------------------------------------------------------------------- messages

Build = Callable[[KernelGraph, Tensor, Tensor], Any]

ERRORS: list[tuple[Build, type[CutesuperError], str]] = [
    (
        lambda g, x, w: g.matmul(x, x),
        ShapeError,
        (
            "matmul([4, 6], [4, 6]): inner dimensions 6 and 4 differ; transpose one operand if it "
            "is stored the other way"
        ),
    ),
    (
        lambda g, x, w: g.matmul(x, w),
        ShapeError,
        "matmul([4, 6], [6]): both operands need at least 2 dimensions; give a vector an extent",
    ),
    (
        lambda g, x, w: g.matmul(g.new_input((2, 4, 6)), g.new_input((3, 6, 5))),
        ShapeError,
        "matmul([2, 4, 6], [3, 6, 5]): leading dimensions do not broadcast",
    ),
    (
        lambda g, x, w: g.add(x, g.new_input((4,))),
        ShapeError,
        (
            "add([4, 6], [4]): shapes do not broadcast; extents must be equal or 1, counted from "
            "the last dimension"
        ),
    ),
    (
        lambda g, x, w: g.sum(x, 2),
        ShapeError,
        "sum([4, 6], dim=2): no such dimension; use -2..1",
    ),
    (
        lambda g, x, w: g.mean(g.exp(g.apply("constant", value=1)), 0),
        ShapeError,
        "mean([], dim=0): no such dimension; the operand has none",
    ),
    (lambda g, x, w: g.max(x, "last"), ShapeError, "max([4, 6], dim='last'): no such dimension"),
    (lambda g, x, w: g.sum(x, True), ShapeError, "sum([4, 6], dim=True): no such dimension"),
    (lambda g, x, w: g.softmax(w, 1), ShapeError, "softmax([6], dim=1): no such dimension; use -1"),
    (lambda g, x, w: g.transpose(w), ShapeError, "transpose([6]): needs at least 2 dimensions"),
    (
        lambda g, x, w: g.transpose(x, (0, 0)),
        ShapeError,
        "transpose([4, 6]): dims=[0, 0] is not a permutation of 0..1",
    ),
    (
        lambda g, x, w: g.transpose(x, 1),
        ShapeError,
        "transpose(dims=1): must be a permutation of dimensions",
    ),
    (
        lambda g, x, w: g.rms_norm(x, g.new_input((4,))),
        ShapeError,
        "rms_norm([4, 6], [4]): the weight must have shape [6], the normalized dimension",
    ),
    (
        lambda g, x, w: g.rms_norm(w, g.new_input((1, 6))),
        ShapeError,
        "rms_norm([6], [1, 6]): the weight must have shape [6], the normalized dimension",
    ),
    (
        lambda g, x, w: g.rms_norm(x, normalized_shape=(4,)),
        ShapeError,
        "rms_norm(X[4, 6] float16, normalized_shape=(4,)): must be the last dimension, (6,)",
    ),
    (
        lambda g, x, w: g.rms_norm(x, normalized_shape=6),
        ShapeError,
        "rms_norm(X[4, 6] float16, normalized_shape=6): must be the last dimension, (6,)",
    ),
    (
        lambda g, x, w: g.rms_norm(x, eps=-1),
        OperatorError,
        "rms_norm(eps=-1): must be a number in [0, 1)",
    ),
    (
        lambda g, x, w: g.clamp(x, 1, 0),
        OperatorError,
        "clamp(min=1, max=0): min must not exceed max",
    ),
    (
        lambda g, x, w: g.clamp(x, None, 0),
        OperatorError,
        "clamp(min=None, max=0): both must be numbers",
    ),
    (
        lambda g, x, w: g.add(x, math.inf),
        OperatorError,
        "constant(inf): must be a finite number in float32's range",
    ),
    (
        lambda g, x, w: g.add(x, 10**400),
        OperatorError,
        "must be a finite number in float32's range",
    ),
    (lambda g, x, w: g.add(x, math.nan), OperatorError, "constant(nan): must be a finite number"),
    (
        lambda g, x, w: g.apply("sofmax", x),
        OperatorError,
        "operator 'sofmax': does not exist; did you mean softmax or log_softmax or max?",
    ),
    (lambda g, x, w: g.apply("fizzle", x), OperatorError, "not exist; known: abs, acos, acosh"),
    (lambda g, x, w: g.apply("input"), OperatorError, "apply('input'): use new_input(dims=, dtype"),
    (lambda g, x, w: g.apply("exp", x, w), OperatorError, "exp: takes 1 operand(s), got 2"),
    (
        lambda g, x, w: g.apply("sum", x, axis=1),
        OperatorError,
        "sum(axis=...): unknown attribute; it has: dim",
    ),
    (lambda g, x, w: g.apply("sum", x), OperatorError, "sum: attribute dim is required"),
    (
        lambda g, x, w: g.sum(x, dim=1, keepdim=True),
        OperatorError,
        "sum(keepdim=...): the dimension stays, with extent 1; leave keepdim out",
    ),
    (
        lambda g, x, w: g.transpose(x, 0, 1),
        OperatorError,
        "transpose(x, 0, 1): give the new order of all dimensions",
    ),
    (
        lambda g, x, w: g.apply("exp", x, base=2),
        OperatorError,
        "exp(base=...): unknown attribute; it has: none",
    ),
    (
        lambda g, x, w: g.exp([1, 2]),
        OperatorError,
        (
            "exp: operand list is neither a tensor of this graph nor a number; graph methods take "
            "what new_input() and other methods return"
        ),
    ),
    (lambda g, x, w: g.add(x, True), OperatorError, "add: operand bool is neither a tensor"),
    (
        lambda g, x, w: g.add(x, new_kernel_graph().new_input((4, 6))),
        GraphError,
        "add: X[4, 6] float16 belongs to another graph",
    ),
    (
        lambda g, x, w: g.matmul(x, g.new_input((6, 1), "fp32", name="b")),
        DTypeError,
        "matmul(X[4, 6] float16, b[6, 1] float32): element types differ; products take operands",
    ),
    (
        lambda g, x, w: g.concat([x, g.new_input((4, 2), "bf16", name="b")], 1),
        DTypeError,
        "concat(X[4, 6] float16, b[4, 2] bfloat16): element types differ; products take operands",
    ),
    (
        lambda g, x, w: g.scaled_dot_product_attention(x, x, g.new_input((4, 2), "bf16")),
        DTypeError,
        "scaled_dot_product_attention(X[4, 6] float16, X[4, 6] float16, A[4, 2] bfloat16): element",
    ),
    (
        lambda g, x, w: g.mark_output(g.exp(x), "int32"),
        DTypeError,
        "mark_output(t2[4, 6] float16, int32): nothing is computed in integers; use one of float16",
    ),
    (
        lambda g, x, w: g.new_input((4,), dtype="int8"),
        DTypeError,
        "dtype 'int8': not supported; use one of float16, bfloat16, float32",
    ),
    (
        lambda g, x, w: g.new_input(4),
        ShapeError,
        "new_input(dims=4): dims must be a tuple of extents",
    ),
    (
        lambda g, x, w: g.new_input((4, -1)),
        ShapeError,
        "new_input(dims=[4, -1]): extent 1 is -1; extents are ints from 0 on, or symbols",
    ),
    (lambda g, x, w: g.new_input((M, -2)), ShapeError, "new_input(dims=[M, -2]): extent 1 is -2"),
    (lambda g, x, w: g.new_input((2.0,)), ShapeError, "extent 0 is 2.0; extents are ints from"),
    (
        lambda g, x, w: (g.new_input((M, 4)), g.new_input((symbol("M", 7), 4))),
        ShapeError,
        "symbol M has the hint 7 here and 32 in another input; use one Symbol object for both",
    ),
    (
        lambda g, x, w: g.new_input((4,), name="X"),
        GraphError,
        "new_input(name='X'): another input has this name",
    ),
    (
        lambda g, x, w: g.new_input((4,), name="t7"),
        GraphError,
        "new_input(name='t7'): t0, t1, ... are taken by results",
    ),
    (lambda g, x, w: g.new_input((4,), name=3), GraphError, "new_input(name=3): a name is a text"),
    (lambda g, x, w: g.new_input((4,), name="a\nb"), GraphError, "a text that can be printed"),
    (lambda g, x, w: g.new_input((4,), name="\ud800"), GraphError, "a text that can be printed"),
    (lambda g, x, w: g.new_input((4,), constant="no"), OptionError, "constant='no': must be True"),
    (
        lambda g, x, w: g.mark_output(x),
        GraphError,
        "mark_output(X[4, 6] float16): an input cannot be an output; compute something",
    ),
    (
        lambda g, x, w: [g.mark_output(y) for y in [g.exp(x)] * 2],
        GraphError,
        "mark_output(t2[4, 6] float16): it is already an output",
    ),
    (lambda g, x, w: symbol("2M"), ShapeError, "symbol('2M'): the name must be an identifier"),
    (
        lambda g, x, w: symbol("M", 0),
        ShapeError,
        "symbol('M', hint=0): the hint must be a positive int",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), ERRORS, ids=[m for _, _, m in ERRORS])
def test_messages(build: Build, error: type[CutesuperError], message: str) -> None:
    g, [x, w] = inputs((4, 6), (6,))
    with pytest.raises(error) as caught:
        build(g, x, w)
    assert message in str(caught.value)


def test_a_refused_call_leaves_no_node() -> None:
    g, [x, w] = inputs((4, 6), (6,))
    with pytest.raises(ShapeError):
        g.matmul(x, w)
    assert len(g.nodes) == 2


# ------------------------------------------------------------------------------- extents, dtypes


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.integers(1, 3), max_size=4))
def test_broadcast_is_numpys(a: list[int], b: list[int]) -> None:
    try:
        expected = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        expected = None
    assert broadcast(tuple(a), tuple(b)) == expected


def test_extents() -> None:
    assert broadcast((M, 1), (1, 4)) == (M, 4)
    assert broadcast((M, 1), (7, 4)) is None
    assert extent(M) == 32
    assert size((M, 3)) == 96
    assert show_shape((M, 3)) == "[M, 3]"
    assert ceil_div(7, 3) == 3


def test_element_types() -> None:
    for value in (float16, "fp16", "half", "float16", torch.float16):
        assert as_dtype(value) is float16
    assert as_dtype("bf16").torch is torch.bfloat16
    for d in (float16, bfloat16, float32):
        assert d.eps == torch.finfo(d.torch).eps
        assert d.itemsize == d.torch.itemsize


# ------------------------------------------------------------------------------------- expansion


def test_expanded_norm() -> None:
    g, [x, w] = inputs((4, 6), (6,))
    dead = g.exp(x)
    g.mark_output(g.rms_norm(x, w))
    e = g.expanded()
    names = [n.operator for n in e.nodes]
    assert names == ["input", "input", "square", "mean", "constant", "add", "sqrt", "div", "mul"]
    assert e.outputs == [len(e.nodes) - 1]
    assert dead.name == "t2"  # dropped: no output needs it
    assert [n.name for n in e.nodes[:2]] == ["X", "W"]
    assert all(n.shape == (4, 6) for n in e.nodes[-2:])


def test_expanded_without_eps_has_no_constant() -> None:
    g, [x] = inputs((4, 6))
    g.mark_output(g.rms_norm(x, eps=0))
    assert [n.operator for n in g.expanded().nodes] == ["input", "square", "mean", "sqrt", "div"]


def test_expanded_keeps_unused_inputs_and_their_flags() -> None:
    g = new_kernel_graph()
    x = g.new_input((M, 6), name="x")
    g.new_input((3,), name="idle", constant=True)
    g.mark_output(g.softmax(x, 1))
    e = g.expanded()
    assert [n.name for n in e.nodes if n.operator == "input"] == ["x", "idle"]
    assert e.nodes[1].constant
    assert e.nodes[e.outputs[0]].shape == (M, 6)
    assert not any(TABLE[n.operator].composite for n in e.nodes)


# ------------------------------------------------------------------------- agreement with PyTorch


def reference_cases() -> dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]]:
    f = torch.nn.functional
    cases: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
        "matmul": (lambda g, a, b: g.matmul(a, g.transpose(b)), lambda a, b: a @ b.T),
        "sum": (lambda g, a, b: g.sum(a, 1), lambda a, b: a.sum(1, keepdim=True)),
        "mean": (lambda g, a, b: g.mean(a, 0), lambda a, b: a.mean(0, keepdim=True)),
        "max": (lambda g, a, b: g.max(a, 1), lambda a, b: a.max(1, keepdim=True).values),
        "softmax": (lambda g, a, b: g.softmax(a), lambda a, b: a.softmax(-1)),
        "log_softmax": (lambda g, a, b: g.log_softmax(a, 0), lambda a, b: a.log_softmax(0)),
        "logsumexp": (lambda g, a, b: g.logsumexp(a), lambda a, b: a.logsumexp(1, keepdim=True)),
        "layer_norm": (lambda g, a, b: g.layer_norm(a), lambda a, b: f.layer_norm(a, (6,))),
        "clamp": (lambda g, a, b: g.clamp(a, 0.5, 1), lambda a, b: a.clamp(0.5, 1)),
        "rms_norm": (lambda g, a, b: g.rms_norm(a), lambda a, b: f.rms_norm(a, (6,), eps=1e-6)),
        "scalar": (lambda g, a, b: 1 / (2 * a + 3) - 0.5, lambda a, b: 1 / (2 * a + 3) - 0.5),
        "silu": (lambda g, a, b: g.silu(a), lambda a, b: f.silu(a)),
        "gelu": (lambda g, a, b: g.gelu(a), lambda a, b: f.gelu(a)),
        "square": (lambda g, a, b: g.square(a), lambda a, b: a * a),
        "step": (lambda g, a, b: g.step(a - b), lambda a, b: (a > b).double()),
        "at_least": (lambda g, a, b: g.at_least(a, b), lambda a, b: (a >= b).double()),
        "maximum": (lambda g, a, b: g.maximum(a, b), torch.maximum),
        "hide": (
            lambda g, a, b: g.hide(g.step(a - b), a),
            lambda a, b: a.masked_fill(a <= b, -math.inf),
        ),
        "lift": (
            lambda g, a, b: g.lift(g.step(a - b), a),
            lambda a, b: a.masked_fill(a <= b, math.inf),
        ),
        "keep": (lambda g, a, b: g.keep(g.step(a - b), a), lambda a, b: torch.where(a > b, a, 0.0)),
    }
    for name in (
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "relu",
        "sigmoid",
        "tanh",
        "erf",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "floor",
        "round",
        "atan",
        "sinh",
        "cosh",
        "asinh",
        "erfc",
    ):
        cases[name] = (
            lambda g, a, b, n=name: g.apply(n, a), lambda a, b, n=name: getattr(torch, n)(a)
        )  # fmt: skip
    for name, shift in {"asin": 0, "acos": 0, "atanh": 0, "acosh": 1}.items():
        cases[name] = (
            lambda g, a, b, n=name, s=shift: g.apply(n, a * 0.5 + s),
            lambda a, b, n=name, s=shift: getattr(torch, n)(a * 0.5 + s),
        )
    for name in BINARY:
        cases[name] = (
            lambda g, a, b, n=name: g.apply(n, a, b), lambda a, b, n=name: getattr(torch, n)(a, b)
        )  # fmt: skip
    return cases


CASES = reference_cases()


@pytest.mark.parametrize("name", CASES)
def test_evaluate_is_pytorch(name: str) -> None:
    build, expected = CASES[name]
    g, [a, b] = inputs((5, 6), (5, 6))
    g.mark_output(build(g, a, b))
    torch.manual_seed(0)
    x, y = (torch.rand(5, 6, dtype=torch.float64) + 0.1 for _ in range(2))
    want = expected(x, y)
    for graph in (g, g.expanded()):
        [got] = evaluate(graph, [x, y], torch.float64)
        torch.testing.assert_close(got, want)
        assert got.shape == graph.nodes[graph.outputs[0]].shape


def test_scalar_formulas_are_the_references() -> None:
    given = {"clamp": {"min": 0.25, "max": 0.5}, "convert": {"dtype": "float16"}}
    for name in (*UNARY, *BINARY, *given, "at_least", "maximum", "keep", "hide", "lift"):
        op, attributes = TABLE[name], given.get(name, {})
        for value in (0.125, 0.375, 2.0, 2.5):
            least, most = getattr(op, "domain", (-math.inf, math.inf))
            if not least <= value <= most:
                continue  # PyTorch has NaN there, and Python no number
            args = [value, 0.75][: op.arity]
            tensors = [torch.tensor(v, dtype=torch.float64) for v in args]
            want = float(op.reference(tensors, attributes))
            assert op.scalar(HostMath, args, attributes) == pytest.approx(want, rel=1e-12), name


def test_run_reference_rounds_once() -> None:
    g, [x] = inputs((64, 64))
    g.mark_output(g.mean(g.square(x), 1))
    value = torch.randn(64, 64, dtype=torch.float16)
    [got] = run_reference(g, [value])
    assert got.dtype == torch.float16
    torch.testing.assert_close(
        got, value.float().square().mean(1, keepdim=True).half(), rtol=0, atol=0
    )


def test_evaluate_in_the_dtype_of_the_arguments() -> None:
    g, [x] = inputs((4, 4), dtype="bf16")
    g.mark_output(x * 2 + 1)
    [y] = evaluate(g, [torch.ones(4, 4, dtype=torch.bfloat16)])
    assert y.dtype == torch.bfloat16


def test_evaluate_wants_every_input() -> None:
    g, [x, _] = inputs((4,), (4,))
    g.mark_output(g.exp(x))
    with pytest.raises(ShapeError, match=r"the graph has 2 input\(s\), got 1 tensor\(s\)"):
        evaluate(g, [torch.ones(4)])


def test_an_input_needs_a_dimension() -> None:
    with pytest.raises(ShapeError, match=r"use dims=\(1,\) for a scalar"):
        KernelGraph().new_input(dims=())
