"""Saved graphs come back equal, and what is damaged is refused with a FormatError, always."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutesuper.errors import FormatError
from cutesuper.ir.block import BlockProgram, KernelStep, MuGraph, TensorSpec
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import ALL as DTYPES
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.ir.serial import dumps, from_dict, loads, to_dict
from tests import programs
from tests.programs import GRID, LOOP, PERSISTENT, Axis, op

# ----------------------------------------------------------------------------------- round trips


def assert_round_trip(graph: KernelGraph | MuGraph) -> None:
    text = dumps(graph)
    back = loads(text)
    assert dumps(back) == text
    if isinstance(graph, MuGraph):
        assert back == graph
    else:
        assert isinstance(back, KernelGraph)
        assert back.nodes == graph.nodes
        assert back.outputs == graph.outputs


def test_kernel_graphs() -> None:
    assert_round_trip(programs.norm_linear_graph())
    assert_round_trip(programs.norm_linear_graph(Symbol("M", 64)))
    assert_round_trip(programs.norm_linear_graph().expanded())


@pytest.mark.parametrize("name", programs.ALL)
def test_mugraphs(name: str) -> None:
    assert_round_trip(programs.ALL[name]())


UNARY = ("exp", "sqrt", "square", "silu", "relu", "softmax", "transpose", "rms_norm")


@st.composite
def kernel_graphs(draw: st.DrawFn) -> KernelGraph:
    """Any graph of a few operators; every input is used."""
    g = new_kernel_graph()
    n, dtype = draw(st.integers(1, 9)), draw(st.sampled_from(sorted(DTYPES)))
    lead = draw(st.sampled_from([n, Symbol("M", 5)]))
    values: list[Tensor] = [g.new_input((lead, n), dtype, constant=draw(st.booleans()))]
    values.append(g.new_input((n,), dtype))
    values = [g.add(*values)]
    for _ in range(draw(st.integers(0, 8))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("unary", "binary", "reduce", "constant", "clamp")))
        if kind == "unary":
            values.append(g.apply(draw(st.sampled_from(UNARY)), a))
        elif kind == "binary" and a.shape == b.shape:
            values.append(g.apply(draw(st.sampled_from(("add", "mul", "div"))), a, b))
        elif kind == "reduce":
            name = draw(st.sampled_from(("sum", "mean", "max")))
            values.append(g.apply(name, a, dim=draw(st.integers(-2, 1))))
        elif kind == "clamp":
            values.append(g.clamp(a, draw(st.floats(-4, 0)), draw(st.floats(0, 4))))
        else:
            values.append(a * draw(st.floats(-1e30, 1e30)))
    g.mark_output(values[0])
    for v in draw(st.lists(st.sampled_from(values), max_size=3, unique_by=lambda t: t.index)):
        if v.index not in g.outputs:
            g.mark_output(v)
    return g


@given(kernel_graphs())
def test_random_kernel_graphs(g: KernelGraph) -> None:
    assert_round_trip(g)


@st.composite
def mugraphs(draw: st.DrawFn) -> MuGraph:
    """A matrix product (or a row sum) with an element-wise tail, at random extents."""
    m, n, k = (draw(st.integers(1, 7)) for _ in range(3))
    visits, steps, blocks = (draw(st.integers(1, 5)) for _ in range(3))
    dims = {"M": m * visits, "N": n * blocks, "K": k * steps}
    axes = (Axis("N", GRID, blocks), Axis("M", PERSISTENT, visits), Axis("K", LOOP, steps))
    ops = [
        op("load", (), "MK", tensor="a", map=("M", "K")),
        op("load", (), "NK", tensor="b", map=("K", "N")),
        op("matmul", (0, 1), "MN", over="K"),
        op("accumulate", (2,), "MN", axis="K.loop", op=draw(st.sampled_from(("sum", "max")))),
    ]
    for kind in draw(st.lists(st.sampled_from(("exp", "relu", "square")), max_size=4)):
        ops.append(op(kind, (len(ops) - 1,), "MN"))
    ops.append(op("store", (len(ops) - 1,), "MN", tensor="c", map=("M", "N")))
    program = BlockProgram(dims, axes, {"M": m, "N": n, "K": k}, tuple(ops))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shapes = {"a": ("M", "K"), "b": ("K", "N"), "c": ("M", "N")}
    tensors = {
        t: TensorSpec(t, tuple(dims[d] for d in s), dtype, draw(st.booleans()))
        for t, s in shapes.items()
    }
    name = draw(st.text(min_size=1, max_size=8))
    return MuGraph(tensors, ("a", "b"), ("c",), (KernelStep(name, program),))


@given(mugraphs())
def test_random_mugraphs(mu: MuGraph) -> None:
    assert_round_trip(mu)


# ---------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON at all"),
        ("{", "not JSON at all"),
        ("[" * 100_000, "not JSON at all"),
        ("1" * 10_000, "not JSON at all"),
        ("null", "'format' must be 'kernel_graph' or 'mugraph'"),
        ("[]", "'format' must be"),
        ('{"format": "pickle"}', "'format' must be"),
        ('{"format": ["mugraph"]}', "'format' must be"),
        ('{"format": "mugraph", "version": 99}', "version 99 is not 1; write it again"),
        ('{"format": "mugraph"}', "version None is not 1"),
        ('{"format": "mugraph", "version": 1}', "malformed (KeyError: 'tensors')"),
        ('{"format": "kernel_graph", "version": 1}', "malformed (KeyError: 'nodes')"),
        ('{"format": "kernel_graph", "version": 1, "nodes": [], "outputs": []}', "no inputs"),
    ],
)
def test_not_a_graph(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        loads(text)
    assert message in str(caught.value)


Change = Callable[[Any], None]


def put(*path: Any) -> Change:
    """Sets what stands at ``path[:-1]`` to ``path[-1]``."""

    def change(data: Any) -> None:
        for step in path[:-2]:
            data = data[step]
        data[path[-2]] = path[-1]

    return change


KERNEL_GRAPHS: dict[str, tuple[Change, str]] = {
    "extent": (put("nodes", 0, "dims", 0, -3), "extent -3 is not an int from 0 on"),
    "bool extent": (put("nodes", 0, "dims", 0, True), "extent True is not an int from 0"),
    "symbol": (put("nodes", 0, "dims", 0, {"symbol": "M M", "hint": 1}), "must be an identifier"),
    "hint": (put("nodes", 0, "dims", 0, {"symbol": "M", "hint": -1}), "must be a positive int"),
    "inner symbol": (put("nodes", 0, "dims", 1, {"symbol": "M", "hint": 1}), "dimensions M and"),
    "dtype": (put("nodes", 0, "dtype", "int4"), "dtype 'int4': not supported"),
    "constant": (put("nodes", 0, "constant", "no"), "'no' is not of type bool"),
    "name": (put("nodes", 0, "name", 7), "7 is not of type str"),
    "same name": (put("nodes", 1, "name", "X"), "another input has this name"),
    "operator": (put("nodes", 2, "operator", "rmsnorm"), "did you mean rms_norm"),
    "operand": (put("nodes", 2, "inputs", [2]), "node 2 does not come before its use"),
    "operand type": (put("nodes", 2, "inputs", ["0"]), "node '0' does not come before its use"),
    "operands": (put("nodes", 2, "inputs", "0"), "'0' is not of type list"),
    "attribute": (put("nodes", 2, "attributes", {"epsilon": 1}), "unknown attribute"),
    "python": (put("nodes", 2, "attributes", {"self": 1}), "malformed (TypeError"),
    "shapes": (put("nodes", 3, "inputs", [1, 1]), "inner dimensions 6144 and 4096 differ"),
    "output": (put("outputs", [9]), "node 9 does not come before its use"),
    "output twice": (put("outputs", [3, 3]), "it is already an output"),
    "input as output": (put("outputs", [0]), "an input cannot be an output"),
    "no output": (put("outputs", []), "no output is marked"),
    "unused input": (put("outputs", [2]), "no output depends on input W"),
    "nodes": (put("nodes", 5), "malformed"),
}


@pytest.mark.parametrize("name", KERNEL_GRAPHS)
def test_damaged_kernel_graphs(name: str) -> None:
    change, message = KERNEL_GRAPHS[name]
    data = to_dict(programs.norm_linear_graph())
    change(data)
    with pytest.raises(FormatError) as caught:
        from_dict(data)
    assert message in str(caught.value)


MUGRAPHS: dict[str, tuple[Change, str]] = {
    "kind of axis": (put("steps", 0, "axes", 0, 1, "warp"), "malformed (ValueError"),
    "axis": (put("steps", 0, "axes", 0, ["N", "grid"]), "malformed (ValueError"),
    "fraction": (put("steps", 0, "tile", 0, 1, 16.5), "16.5 is not of type int"),
    "infinity": (put("steps", 0, "axes", 0, 2, float("inf")), "inf is not of type int"),
    "label twice": (put("steps", 0, "dims", 1, ["M", 16]), "a name occurs twice in M, M, K"),
    "tensor twice": (put("tensors", 1, "name", "X"), "a name occurs twice in X, X, Z"),
    "operands": (put("steps", 0, "ops", 2, 1, [0, 1.0]), "1.0 is not of type int"),
    "bool operand": (put("steps", 0, "ops", 2, 1, [0, True]), "True is not of type int"),
    "attributes": (put("steps", 0, "ops", 2, 3, []), "malformed (AttributeError"),
    "label in a list": (put("steps", 0, "ops", 0, 3, "map", [["M"], "K"]), "fewer than two labels"),
    "label in lists": (put("steps", 0, "ops", 0, 3, "map", [[["M"], "K"]]), "malformed (TypeError"),
    "inputs": (put("inputs", "XW"), "'XW' is not of type list"),
    "input": (put("inputs", ["X", "Q"]), "tensor Q is not described"),
    "three operands": (put("steps", 0, "ops", 6, 1, [5, 5, 6]), "inputs [5, 5, 6] must come bef"),
    "not rescaled": (put("steps", 0, "ops", 7, 1, [3, 3, 3]), "is not the cluster_reduce max of"),
    "illegal": (put("steps", 0, "ops", 13, 1, [3]), "it is a partial result over K.cluster"),
    "no kernels": (put("steps", []), "no kernel writes the output Z"),
}


@pytest.mark.parametrize("name", MUGRAPHS)
def test_damaged_mugraphs(name: str) -> None:
    change, message = MUGRAPHS[name]
    data = to_dict(programs.norm_linear())
    change(data)
    with pytest.raises(FormatError) as caught:
        from_dict(data)
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------- fuzzing


def paths(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON document, the document itself left out."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*here, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*here, key))


JUNK = (
    None,
    True,
    -1,
    0,
    2,
    10**30,
    1.5,
    float("nan"),
    "",
    "M",
    "K.loop",
    [],
    [[]],
    [0],
    {},
    {"M": 1},
)
DOCUMENTS = [
    to_dict(programs.norm_linear_graph(Symbol("M"))),
    to_dict(programs.norm_backward()),
    to_dict(programs.online_softmax()),
]
PATHS = [list(paths(d)) for d in DOCUMENTS]


def refused_or_legal(data: Any) -> None:
    """Nothing but a FormatError may escape, and what is accepted must be a graph like any other."""
    try:
        graph = loads(json.dumps(data))
    except FormatError:
        return
    assert_round_trip(graph)


@pytest.mark.parametrize("document", range(len(DOCUMENTS)))
def test_every_missing_value(document: int) -> None:
    for path in PATHS[document]:
        data = copy.deepcopy(DOCUMENTS[document])
        target = data
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]
        refused_or_legal(data)


@given(st.data())
def test_random_changes(data: st.DataObject) -> None:
    document = data.draw(st.integers(0, len(DOCUMENTS) - 1))
    changed = copy.deepcopy(DOCUMENTS[document])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(PATHS[document]))
        try:
            put(*path, data.draw(st.sampled_from(JUNK)))(changed)
        except (LookupError, TypeError):  # an earlier change has removed this place
            continue
    refused_or_legal(changed)


@pytest.mark.parametrize("document", range(len(DOCUMENTS)))
def test_every_value_replaced_by_junk(document: int) -> None:
    for path in PATHS[document]:
        for junk in JUNK[:: 1 if document == 0 else 4]:
            data = copy.deepcopy(DOCUMENTS[document])
            put(*path, junk)(data)
            refused_or_legal(data)
