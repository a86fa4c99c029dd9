"""Rows put into a tensor by an index: operator, field, search, plan and kernel, calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import (
    CutesuperError,
    DTypeError,
    GraphError,
    LayoutError,
    LoweringError,
    OperatorError,
    SearchError,
    ShapeError,
)
from cutesuper.ir.block import STORE, MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE, each
from cutesuper.ir.serial import dumps, loads
from cutesuper.report import plan_text
from cutesuper.runtime.kernel import bucket_of, bucketed
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.base import Indexed
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from cutesuper.targets import H200
from cutesuper.torch.compile.backend import compile_graph
from cutesuper.torch.compile.options import read_options
from cutesuper.torch.compile.region_operator import key_of, program_of
from cutesuper.verify.numeric import acceptable, compare
from examples.llama import decode
from tests.backends import compiled as run_compiled
from tests.mutants import change
from tests.plans import compiled

LOWERED = SearchOptions(lowered=True)
Build = Callable[[KernelGraph, Any], Any]


def put(rest: Build, base: tuple[int, ...], rows: Any, dim: int = 0, *given: int) -> KernelGraph:
    """``rest(x)`` put into a tensor; x has the shape of the rows, or the given one."""
    g = cs.new_kernel_graph()
    cache, at = g.new_input(base, name="cache"), g.new_input((rows,), "int64", name="at")
    x = g.new_input(given or (*base[:dim], rows, *base[dim + 1 :]), name="x")
    g.mark_output(g.put_rows(cache, at, rest(g, x), dim=dim))
    return g


def named_twice(
    rest: Build,
    base: tuple[int, ...],
    rows: Any,
    dim: tuple[int, int],
    *given: int,
    dtype: str = "float16",
) -> KernelGraph:
    """The same with an index for each of two dimensions, of 64 and of 32 bits."""
    g = cs.new_kernel_graph()
    cache = g.new_input(base, dtype, "cache")
    at = tuple(g.new_input((rows,), t, n) for t, n in (("int64", "at"), ("int32", "also")))
    shape = [rows if d == dim[0] else n for d, n in enumerate(base) if d != dim[1]]
    x = g.new_input(given or shape, dtype, "x")
    g.mark_output(g.put_rows(cache, at, rest(g, x), dim=dim))
    return g


def normed(rows: Any = 8) -> KernelGraph:
    return put(lambda g, x: g.rms_norm(x), (32, 64), rows)


def best(g: KernelGraph) -> MuGraph:
    return search(g, H200, options=LOWERED).candidates[0].mugraph


def place_of(mu: MuGraph) -> int:
    return next(n for n, op in enumerate(mu.steps[0].program.ops) if op.kind == STORE)


# --------------------------------------------------------------------------------------- operator

ERRORS: dict[str, tuple[Callable[..., Any], type[CutesuperError], str]] = {
    "no index": (
        lambda g, c, i, x: g.put_rows(c, x, x), DTypeError,
        "put_rows: operand 1, x[3, 4] float16, must be an int64 or int32 input",
    ),
    "a computed tensor": (
        lambda g, c, i, x: g.put_rows(g.exp(c), i, x), GraphError,
        "put_rows: operand 0, t3[8, 4] float16, is computed; it reads inputs",
    ),
    "rows of another shape": (
        lambda g, c, i, x: g.put_rows(c, i, c), ShapeError,
        "put_rows([8, 4], [3], [8, 4]): the rows must be [3, 4]",
    ),
    "rows of another type": (
        lambda g, c, i, x: g.put_rows(c, i, g.convert(x, "float32")), DTypeError,
        "element types differ",
    ),
    "an index of two dimensions": (
        lambda g, c, i, x: g.put_rows(c, g.new_input((3, 1), "int32"), x), ShapeError,
        "an index has one dimension, a place for each row",
    ),
    "more rows than places": (
        lambda g, c, i, x: g.put_rows(x, g.new_input((8,), "int32"), c), ShapeError,
        "8 rows, and 3 places",
    ),
    "any number of rows for one place": (
        lambda g, c, i, x: g.put_rows(
            g.new_input((1, 4)), g.new_input((cs.symbol("M"),), "int32"), x),
        ShapeError, "the one place along dim=0 takes one row; use 1 in place of M",
    ),
    "no such dimension": (
        lambda g, c, i, x: g.put_rows(c, i, x, dim=2), ShapeError,
        "dim=2, and the tensor has 2 dimensions",
    ),
    "from the end": (
        lambda g, c, i, x: g.put_rows(c, i, x, dim=-1), OperatorError,
        "put_rows(dim=-1): must be an int of at least 0",
    ),
    "fewer indices than dimensions": (
        lambda g, c, i, x: g.put_rows(c, i, x, dim=(0, 1)), ShapeError,
        "takes a tensor, an index for each dimension of dim=(0, 1), and rows",
    ),
    "dimensions in another order": (
        lambda g, c, i, x: g.put_rows(c, (i, i), x, dim=(1, 0)), OperatorError,
        "put_rows(dim=(1, 0)): several must be in rising order",
    ),
    "a dimension twice": (
        lambda g, c, i, x: g.put_rows(c, (i, i), x, dim=(1, 1)), OperatorError,
        "put_rows(dim=(1, 1)): several must be in rising order",
    ),
    "no dimension": (
        lambda g, c, i, x: g.put_rows(c, (), x, dim=()), OperatorError,
        "put_rows(dim=()): must be an int of at least 0, or several",
    ),
    "indices of two lengths": (
        lambda g, c, i, x: g.put_rows(c, (i, g.new_input((4,), "int32")), x, dim=(0, 1)),
        ShapeError, "the indices must have one shape",
    ),
    "a second index that is no integer": (
        lambda g, c, i, x: g.put_rows(c, (i, x), x, dim=(0, 1)), DTypeError,
        "put_rows: operand 2, x[3, 4] float16, must be an int64 or int32 input",
    ),
    "rows that keep the second dimension": (
        lambda g, c, i, x: g.put_rows(c, (i, i), x, dim=(0, 1)), ShapeError,
        "put_rows([8, 4], [3], [3], [3, 4]): the rows must be [3]",
    ),
    "more rows than places of two": (
        lambda g, c, i, x: g.put_rows(
            g.new_input((2, 1, 4)), (i, i), x, dim=(0, 1)),
        ShapeError, "3 rows, and 2 places along dim=(0, 1)",
    ),
    "symbolic places": (
        lambda g, c, i, x: g.put_rows(g.new_input((cs.symbol("V"), 4)), i, x), ShapeError,
        "the number of places, V, must be known before the call",
    ),
    "stored as another type": (
        lambda g, c, i, x: g.mark_output(g.put_rows(c, i, x), "float32"), DTypeError,
        "rows are put into a tensor of float16",
    ),
    "gradient": (
        lambda g, c, i, x: cs.grad(normed(), wrt="x"), GraphError,
        "the gradient of the rows would be taken from a gradient that is computed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_messages(name: str) -> None:
    build, error, message = ERRORS[name]
    g = cs.new_kernel_graph()
    c, i, x = (
        g.new_input((8, 4), name="c"),
        g.new_input((3,), "int64"),
        g.new_input((3, 4), name="x"),
    )
    with pytest.raises(error) as caught:
        build(g, c, i, x)
    assert message in str(caught.value)


def test_files() -> None:
    g = put(lambda g, x: x, (2, 8, 4), 3, 1)
    assert loads(dumps(g)).nodes == g.nodes  # type: ignore[union-attr]
    assert g.tensor(g.outputs[0]).shape == (2, 8, 4) and g.continued == {0: 0}
    g = appended(5)
    assert loads(dumps(g)).nodes == g.nodes  # type: ignore[union-attr]
    assert g.tensor(g.outputs[0]).shape == (5, 3, 16, 64) and g.continued == {0: 0}


def test_one_index_is_the_same_in_a_tuple() -> None:
    g = cs.new_kernel_graph()
    c, i, x = g.new_input((8, 4)), g.new_input((3,), "int64"), g.new_input((3, 4))
    one, other = g.put_rows(c, i, x), g.put_rows(c, (i,), x, dim=(0,))
    assert one.node.attributes == other.node.attributes == {"dim": 0}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reference(dtype: torch.dtype) -> None:
    """Places count from both ends, and rows of others are left out."""
    base, rows = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    index = torch.tensor([-5, 5, 3, -6], dtype=dtype)
    before = base.clone()
    found = TABLE["put_rows"].reference([base, index, rows], {"dim": 1})
    expected = base.index_copy(1, torch.tensor([0, 3]), rows[:, [0, 2]])
    assert torch.equal(found, expected) and torch.equal(base, before)


@pytest.mark.parametrize("dim", [(0, 1), (0, 2), (1, 2), (1, 3), (0, 1, 3)], ids=str)
def test_reference_of_several_indices(dim: tuple[int, ...]) -> None:
    """PyTorch's own, with the rows where the first index stands; wrong rows are left out."""
    base = torch.randn(4, 5, 6, 7)
    indices = [torch.tensor([0, -1, 2, 3 - n, 1]) for n in (base.shape[d] for d in dim)]
    at = [indices[dim.index(d)] if d in dim else slice(None) for d in range(4)]
    given = torch.randn_like(base[tuple(at)])
    expected = base.clone()
    expected[tuple(at)] = given
    rows = given if dim in ((0, 1), (1, 2)) else given.movedim(0, dim[0])
    operator = TABLE["put_rows"]
    assert torch.equal(operator.reference([base, *indices, rows], {"dim": dim}), expected)
    kept = indices[-1][0].item()
    for wrong in (base.shape[dim[-1]], -base.shape[dim[-1]] - 1):
        indices[-1][0] = wrong
        found = operator.reference([base, *indices, rows], {"dim": dim})
        at = [indices[dim.index(d)][:1] if d in dim else slice(None) for d in range(4)]
        at[dim[-1]] = torch.tensor([kept])
        assert torch.equal(found[tuple(at)], base[tuple(at)])
        assert (found != expected).sum() == (expected[tuple(at)] != base[tuple(at)]).sum()


# ------------------------------------------------------------------------------------------ field


@pytest.mark.parametrize("sequences", [1, 5])
def test_places_by_two_indices_are_verified(sequences: int) -> None:
    """Indices in each other's place, other dimensions and one index alone are found out."""
    g = appended(sequences)
    mu = best(g)
    assert len(mu.steps) == 1 and cs.verify(g, mu, full=True) and compare(g, mu)
    assert loads(dumps(mu)) == mu
    place = place_of(mu)
    given = dict(mu.steps[0].program.ops[place].attributes)
    assert (given["index"], given["dim"]) == (("at", "also"), (0, 2))
    swapped = change(mu, 0, place, attributes=given | {"index": ("also", "at")})
    assert not cs.verify(g, swapped) and not cs.verify(g, swapped, full=True)
    twice = change(mu, 0, place, attributes=given | {"index": ("also", "also")})
    assert not any(cs.verify(g, twice, seed=n) for n in range(20))  # chance accepted 1 of 130
    for wrong, message in (
        ({"dim": (0, 1)}, r"extent \d+ of out0 is mapped"),
        ({"dim": (2, 0)}, "in rising order"),
        ({"dim": (0, 4)}, "must be one of its 4 dimensions"),
        ({"dim": 0, "index": "at"}, "has 4 dimensions, its map 3"),
        ({"index": ("at",)}, "as many dimensions"),
        ({"index": ("at", "x")}, "must have one dimension"),
        ({"index": ("at", 3)}, "must be names of tensors"),
    ):
        with pytest.raises(GraphError, match=message):
            check_mugraph(change(mu, 0, place, attributes=given | wrong))


def test_a_wrong_dimension_of_equal_extents_is_found_out() -> None:
    """The rows fit there as well."""
    g = named_twice(lambda g, x: g.exp(x), (5, 16, 16, 64), 5, (0, 2))
    mu = best(g)
    place = place_of(mu)
    given = dict(mu.steps[0].program.ops[place].attributes)
    assert cs.verify(g, mu)
    wrong = change(mu, 0, place, attributes=given | {"dim": (0, 1)})
    check_mugraph(wrong)
    assert not cs.verify(g, wrong)


def test_programs_are_verified_and_wrong_ones_are_not() -> None:
    g = normed()
    other = g.new_input((32, 64), name="other")
    second = g.new_input((8,), "int64", name="second")
    g.mark_output(g.put_rows(other, second, g.exp(g.tensor(2))))
    mu = best(g)
    assert len(mu.steps) == 1 and cs.verify(g, mu, full=True) and compare(g, mu)
    assert loads(dumps(mu)) == mu
    place = place_of(mu)
    given = dict(mu.steps[0].program.ops[place].attributes)
    swapped = {"at": "second", "second": "at", "cache": "other", "other": "cache"}
    for name in ("index", "base"):
        wrong = given | {name: swapped[given[name]]}
        assert not cs.verify(g, change(mu, 0, place, attributes=wrong))
    for wrong, message in (
        ({"index": "x"}, r"one dimension"),
        ({"dim": 1}, r"extent \d+ of out\d is mapped"),
        ({"dim": 2}, "must be one of its 2 dimensions"),
        ({"base": 3}, "must be names of tensors"),
        ({"base": "out1"}, "out1 is no input"),
        ({"table": "at"}, "only a load goes through a table"),
    ):
        with pytest.raises(GraphError, match=message):
            check_mugraph(change(mu, 0, place, attributes=given | wrong))
    plain = {k: given[k] for k in ("tensor", "map")}
    with pytest.raises(GraphError, match=r"extent 32 of out\d is mapped to M of extent 8"):
        check_mugraph(change(mu, 0, place, attributes=plain))


# ----------------------------------------------------------------------------------------- search


@pytest.mark.parametrize(("places", "rows"), [(2, 1), (100, 100), (100, 300), (300, 100)])
def test_kernels_for_many_rows_are_looked_for_with_as_many_as_there_are_places(
    places: int, rows: int
) -> None:
    """Those of 100 rows are for up to 128, which 100 places are too few for."""
    g = put(lambda g, x: g.silu(x), (places, 64), cs.symbol("M", rows))
    hinted = g.with_hints(bucketed(g))
    hint = extent(hinted.nodes[hinted.inputs[1]].shape[0])
    assert hint == min(places, bucket_of(rows))
    assert pipeline.choose(hinted, pipeline.Options(H200, tuned=False))[1].verification


def test_a_norm_stores_the_rows_itself(golden: Any) -> None:
    mu = best(normed(cs.symbol("T")))
    (step,) = mu.steps
    assert step.reads == ("x", "at") and step.bases == {"out0": "cache"}
    plan = make_plan(step, mu.tensors, H200)
    assert isinstance(plan, RowPlan)
    (view,) = plan.stores.values()
    assert isinstance(view, Indexed)
    (named,) = view.named
    assert (named.count, named.stride, named.index.labels) == (32, 64, ("M",))
    # rows of 16 tokens, their places, and the same rows where they belong
    assert plan.moved_bytes == 2 * 16 * 64 + 8 * 16 + 2 * 16 * 64
    golden("plans/put_rows.txt", plan_text("k0", plan))
    with pytest.raises(LoweringError, match="only a row kernel stores rows through an index"):
        make_plan(step, mu.tensors, H200, RowLoopSchedule(8, 8, 1, 1))


def attention() -> KernelGraph:
    """A step of decoding: keys and values go into a cache, which attention reads."""
    g = cs.new_kernel_graph()
    cache = [g.new_input((1, 2, 64, 64), "bfloat16") for _ in range(2)]
    at, q = g.new_input((1,), "int64"), g.new_input((1, 2, 16, 64), "bfloat16")
    k, v = (g.new_input((1, 2, 1, 64), "bfloat16") for _ in range(2))
    keys = g.mark_output(g.put_rows(cache[0], at, g.rms_norm(k), dim=2))
    values = g.mark_output(g.put_rows(cache[1], at, v, dim=2))
    g.mark_output(g.scaled_dot_product_attention(q, keys, values))
    return g


def kept_and_put() -> KernelGraph:
    g = normed()
    g.mark_output(g.exp(g.tensor(3)))
    g.mark_output(g.tensor(3))
    return g


def taken_and_put() -> KernelGraph:
    return put(lambda g, x: g.take_rows(x, g.new_input((8,), "int32")), (32, 64), 8, 0, 99, 64)


def of_heads(g: KernelGraph, x: Any) -> Any:
    """A product whose columns are divided into heads."""
    return g.matmul(x, g.new_input((4, 64, 64)))


def keys_and_values() -> KernelGraph:
    """Keys go into a cache by an index; queries of another width are stored as they are."""
    g = put(lambda g, x: g.matmul(g.rms_norm(x), g.new_input((128, 64))), (32, 64), 3, 0, 3, 128)
    g.mark_output(g.matmul(g.tensor(3), g.new_input((128, 192))))
    return g


def appended(sequences: int, dtype: str = "bfloat16") -> KernelGraph:
    """A key for each sequence, at its own position of a cache."""
    base = (sequences, 3, 16, 64)
    return named_twice(lambda g, x: g.rms_norm(x), base, sequences, (0, 2), dtype=dtype)


def turned(sequences: int) -> KernelGraph:
    """Queries and fewer keys get positions; keys and values go into caches."""
    g = cs.new_kernel_graph()
    caches = [g.new_input((sequences, 2, 16, 64), "bfloat16") for _ in range(2)]
    at = tuple(g.new_input((sequences,), "int64") for _ in range(2))
    q, k, v = (g.new_input((sequences, n, 64), "bfloat16") for n in (4, 2, 2))
    cos, sin = (g.new_input((sequences, 1, 64), "bfloat16") for _ in range(2))
    q, k = (x * cos + g.rotate_half(x) * sin for x in (q, k))
    for cache, rows in zip(caches, (k, v), strict=True):
        g.mark_output(g.put_rows(cache, at, rows, dim=(0, 2)))
    g.mark_output(q)
    return g


def decoded() -> KernelGraph:
    """A step of decoding sequences of different lengths."""
    g = cs.new_kernel_graph()
    cache = [g.new_input((4, 2, 64, 64), "bfloat16") for _ in range(2)]
    at, q = (
        tuple(g.new_input((4,), "int64") for _ in range(2)),
        g.new_input((4, 2, 16, 64), "bfloat16"),
    )
    k, v = (g.new_input((4, 2, 64), "bfloat16") for _ in range(2))
    keys = g.mark_output(g.put_rows(cache[0], at, g.rms_norm(k), dim=(0, 2)))
    values = g.mark_output(g.put_rows(cache[1], at, v, dim=(0, 2)))
    g.mark_output(g.scaled_dot_product_attention(q, keys, values))
    return g


PROGRAMS: dict[str, tuple[Callable[[], KernelGraph], int]] = {
    "alone": (lambda: put(lambda g, x: x, (32, 64), 8), 1),
    "any number of rows": (lambda: normed(cs.symbol("T")), 1),
    "in the middle": (lambda: put(lambda g, x: g.softmax(x, -1), (3, 9, 64), 5, 1), 1),
    "columns": (lambda: put(lambda g, x: g.exp(x), (6, 20), 5, 1), 1),
    "a row": (lambda: put(lambda g, x: g.exp(x), (9, 64), 1), 1),
    "an element": (lambda: put(lambda g, x: g.mean(x, -1), (1,), 1, 0, 2), 1),
    "elements": (lambda: put(lambda g, x: g.exp(x), (20,), 5), 1),
    "values of rows": (lambda: put(lambda g, x: g.sum(x, 1), (20, 1), 5, 0, 5, 64), 1),
    "reordered": (lambda: put(lambda g, x: g.transpose(x, (0, 2, 1, 3)), (2, 4, 9, 64), 8, 2,
                              2, 8, 4, 64), 1),
    "taken": (taken_and_put, 1),
    "kept as well": (kept_and_put, 1),
    "a product": (lambda: put(lambda g, x: g.matmul(x, g.new_input((64, 64))), (32, 64), 8), 1),
    "heads of a product": (lambda: put(of_heads, (4, 32, 64), 8, 1, 8, 64), 1),
    "products of a batch": (lambda: put(of_heads, (9, 24, 64), 4, 0, 4, 24, 64), 1),
    "products in the middle": (
        lambda: put(lambda g, x: g.matmul(x, g.new_input((2, 3, 64, 64))), (2, 5, 8, 64), 3, 1), 1),
    "products of many rows": (lambda: put(lambda g, x: g.relu(g.matmul(x, g.new_input((64, 96)))),
                                          (200, 96), 72, 0, 72, 64), 1),
    "keys and values": (keys_and_values, 1),
    "a sum over rows": (lambda: put(lambda g, x: g.sum(x, 0), (9, 64), 1, 0, 4096, 64), 2),
    "long rows": (lambda: put(lambda g, x: g.softmax(x, -1), (9, 1 << 17), 8), 2),
    "read afterwards": (attention, 3),
    "keys of sequences": (lambda: appended(5), 1),
    "keys of one sequence": (lambda: appended(1), 1),
    "keys, float32": (lambda: appended(5, "float32"), 1),
    "any number of sequences": (lambda: named_twice(lambda g, x: g.rms_norm(x), (9, 3, 16, 64),
                                                    cs.symbol("B", 5), (0, 2)), 1),
    "places side by side": (lambda: named_twice(lambda g, x: g.softmax(x, -1), (3, 7, 11, 64),
                                                5, (1, 2)), 1),
    "columns by two indices": (
        lambda: named_twice(lambda g, x: g.exp(x), (6, 9, 20), 5, (0, 2)), 1),
    "elements by two indices": (lambda: named_twice(lambda g, x: g.exp(x), (6, 9), 5, (0, 1)), 1),
    "values of rows by two": (lambda: named_twice(lambda g, x: g.sum(x, 1), (6, 9, 1), 5, (0, 1),
                                                  5, 64), 1),
    "a product by two indices": (lambda: named_twice(
        lambda g, x: g.matmul(x, g.new_input((64, 64))), (4, 32, 64), 8, (0, 1), 8, 64), 1),
    "heads of a product by two": (
        lambda: named_twice(of_heads, (4, 3, 16, 64), 8, (1, 2), 8, 64), 1),
    "read afterwards by two": (decoded, 3),
    "positions of sequences": (lambda: turned(5), 1),
    "positions of one sequence": (lambda: turned(1), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_programs(name: str) -> None:
    build, kernels = PROGRAMS[name]
    g = build()
    mu = best(g)
    assert len(mu.steps) == kernels and cs.verify(g, mu)
    for step in mu.steps:
        make_plan(step, mu.tensors, H200)


def test_the_result_is_an_output() -> None:
    g = cs.new_kernel_graph()
    c, i, x = g.new_input((8, 64)), g.new_input((3,), "int64"), g.new_input((3, 64))
    g.mark_output(g.exp(g.put_rows(c, i, x)))
    with pytest.raises(SearchError, match="the result is an output; mark it as one"):
        best(g)


@pytest.mark.parametrize("name", [
    "columns", "elements", "values of rows", "in the middle", "keys of sequences",
    "columns by two indices", "a product by two indices",
])  # fmt: skip
def test_kernels_compile(name: str) -> None:
    mu = best(PROGRAMS[name][0]())
    assert compiled(make_plan(mu.steps[0], mu.tensors, H200)).cubin


def test_names_of_tensors_are_no_part_of_the_code() -> None:
    keys: set[str] = set()
    for name in ("cache", "other"):
        g = cs.new_kernel_graph()
        c, i, x = g.new_input((8, 64), name=name), g.new_input((3,), "int64"), g.new_input((3, 64))
        g.mark_output(g.put_rows(c, i, x))
        mu = best(g)
        keys.add(make_plan(mu.steps[0], mu.tensors, H200).key)
    assert len(keys) == 1


# ------------------------------------------------------------------------------------------ calls


def test_calls_copy_or_change_in_place() -> None:
    kernel = cs.superoptimize(normed(), target="h200")
    assert "through" in kernel.explain()
    cache, x = torch.randn(32, 64).half(), torch.randn(8, 64).half()
    at = torch.tensor([3, -1, 31 - 32, 7, 0, 32, -33, 9])[[0, 1, 3, 4, 5, 6, 7, 7]]
    at[-1] = 12
    (expected,) = evaluate(kernel.graph, [cache, at, x])
    before = cache.clone()
    found = kernel(cache, at, x)
    assert torch.equal(cache, before) and found.data_ptr() != cache.data_ptr()
    torch.testing.assert_close(found, expected)
    given = torch.empty_like(cache)
    torch.testing.assert_close(kernel(cache, at, x, out=given), expected)
    assert kernel(cache, at, x, out=cache) is cache
    torch.testing.assert_close(cache, expected)
    memory = torch.zeros(64 * 64).half()
    cache, part = memory[: 32 * 64].view(32, 64), memory[64 : 33 * 64].view(32, 64)
    with pytest.raises(LayoutError, match="overlaps an input"):
        kernel(cache, at, x, out=part)


def test_what_is_read_elsewhere_is_not_changed_in_place() -> None:
    g = normed()
    g.mark_output(g.exp(g.tensor(0)))
    kernel = cs.superoptimize(g, target="h200")
    cache, at, x = torch.randn(32, 64).half(), torch.arange(8), torch.randn(8, 64).half()
    with pytest.raises(LayoutError, match="overlaps an input"):
        kernel(cache, at, x, out=(cache, torch.empty_like(cache)))


NUMBERS = ["alone", "in the middle", "columns", "a row", "elements", "values of rows", "reordered",
           "taken", "kept as well", "a sum over rows", "any number of sequences",
           "values of rows by two"]  # fmt: skip
#: of those that the machine of tests/ptx runs
SMALL = [
    "keys of sequences",
    "keys of one sequence",
    "keys, float32",
    "positions of sequences",
    "positions of one sequence",
    "places side by side",
    "columns by two indices",
    "elements by two indices",
    "a product by two indices",
    "heads of a product by two",
    "a product",
    "heads of a product",
    "products of a batch",
    "products in the middle",
    "products of many rows",
    "keys and values",
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [*NUMBERS, *(pytest.param(n, marks=pytest.mark.ptx) for n in SMALL)]
)
def test_kernels_store_rows_at_their_places_and_nowhere_else(name: str) -> None:
    g = PROGRAMS[name][0]()
    kernel = cs.superoptimize(g)
    shapes = [tuple(map(extent, g.nodes[i].shape)) for i in g.inputs]
    inputs = [
        torch.randn(s).to(g.nodes[i].dtype.torch) for i, s in zip(g.inputs, shapes, strict=True)
    ]
    for first in range(2 if shapes[1] == (1,) else 1):  # one row has one kind of place at a time
        places = drawn_places(g, first)
        check_stored(g, kernel, [places.get(i, x) for i, x in zip(g.inputs, inputs, strict=True)])


def drawn_places(g: KernelGraph, first: int) -> dict[int, torch.Tensor]:
    """Different places for the rows: from the end, such that do not exist, and others.
    The first row has the kind of this number."""
    node = g.nodes[g.outputs[0]]
    dims = each(node.attributes["dim"])
    extents = [extent(node.shape[d]) for d in dims]
    indices = [i for i in node.inputs if g.nodes[i].dtype.integer]
    rows = extent(g.nodes[indices[0]].shape[0])
    drawn = torch.randperm(math.prod(extents))[:rows].numpy()
    found = [torch.from_numpy(n).clone() for n in np.unravel_index(drawn, extents)]
    ways = [(place[0] - n, n, -n - 1, 1 << 30) for place, n in zip(found, extents, strict=True)]
    for n, kind in enumerate(range(first, 4)):
        for k, place in enumerate(found):
            if n < rows and (kind == 0 or k == kind % len(found)):  # one wrong place is enough
                place[n] = ways[k][kind]
    return {i: p.to(g.nodes[i].dtype.torch) for i, p in zip(indices, found, strict=True)}


def check_stored(g: KernelGraph, kernel: Any, inputs: list[torch.Tensor]) -> None:
    """Call a kernel on the GPU, into new tensors and in place."""
    exact, eager = evaluate(g, inputs, torch.float64), evaluate(g, inputs)
    given = [x.cuda() for x in inputs]
    found = kernel(given)
    for out, want, theirs, i in zip(found, exact, eager, g.outputs, strict=True):
        report = acceptable(out.cpu(), want, theirs, g.nodes[i].dtype)
        assert report, report.message
    assert torch.equal(given[0].cpu(), inputs[0])
    again = kernel(given, out=[given[0], *(torch.empty_like(t) for t in found[1:])])
    assert again[0] is given[0] and all(map(torch.equal, again, found))


# ---------------------------------------------------------------------------------------- PyTorch


def append(x: Any, keys: Any, values: Any, at: Any, weight: Any, q: Any) -> Any:
    """A step of decoding, as a model with a static cache has it."""
    keys.index_copy_(2, at, functional.rms_norm(x, (64,), weight, 1e-6))
    values[:, :, at] = x * 2
    return functional.scaled_dot_product_attention(q, keys, values)


def nothing_returned(x: Any, cache: Any, at: Any) -> None:
    cache[at] = functional.silu(x).softmax(-1)


def projected(x: Any, keys: Any, at: Any, weight: Any, query: Any) -> Any:
    keys[at] = functional.linear(x, weight)
    return functional.linear(x, query)


def functional_put(x: Any, cache: Any, at: Any) -> Any:
    return torch.index_put(cache, (at,), x.softmax(-1))


def read_before(x: Any, cache: Any, at: Any) -> Any:
    y = cache.sum(-1)
    cache[at] = x.softmax(-1)
    return y


def arguments(fn: Any) -> list[Any]:
    if fn is append:
        cache = [torch.randn(1, 3, 32, 64) for _ in range(2)]
        x, q = (torch.randn(1, 3, 1, 64) for _ in range(2))
        return [x, *cache, torch.tensor([7]), torch.randn(64), q]
    given = [torch.randn(4, 64), torch.randn(32, 64), torch.tensor([3, 31, 0, -2])]
    if fn is projected:
        weights = [torch.randn(n, 64) / 8 for n in (64, 192)]
        return [t if t.dtype == torch.int64 else t.bfloat16() for t in (*given, *weights)]
    return given


def same_results(fn: Any, call: Any) -> None:
    given = arguments(fn)
    for _ in range(2):
        mine = [t.clone() for t in given]
        expected = fn(*given)
        torch.testing.assert_close(call(*mine), expected)
        for a, b in zip(mine, given, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fn", [append, nothing_returned, functional_put, projected])
def test_compiled_models_put_rows_in_place(fn: Any) -> None:
    with torch.no_grad():
        call, reports = run_compiled(fn)
        same_results(fn, call)
    assert reports[0].taken == 1 and not reports[0].outside


def places_apart(x: Any, cache: Any, rows: Any, at: Any) -> None:
    cache[rows, :, at] = functional.silu(x).softmax(-1)


def places_behind(x: Any, cache: Any, rows: Any, at: Any) -> None:
    cache[:, :, rows, at] = x.softmax(-1)


def places_in_front(x: Any, cache: Any, rows: Any, at: Any) -> None:
    cache[rows, at] = x.softmax(-1)


def places_between(x: Any, cache: Any, rows: Any, at: Any) -> None:
    cache[:, rows, at] = x.softmax(-1)


def places_far_apart(x: Any, cache: Any, rows: Any, at: Any) -> None:
    cache[:, rows, :, at] = x.softmax(-1)


#: a function, and the shapes of the rows and of the tensor
APART: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    (places_apart, (4, 3, 64), (5, 3, 16, 64)),
    (places_apart, (1, 3, 64), (1, 3, 16, 64)),
    (places_in_front, (4, 3, 64), (5, 16, 3, 64)),
    (places_in_front, (1, 3, 64), (1, 16, 3, 64)),
    (places_between, (3, 4, 64), (3, 5, 16, 64)),
    (places_behind, (3, 64, 4), (3, 64, 5, 16)),
    (places_far_apart, (4, 3, 64), (3, 5, 64, 16)),
]


@pytest.mark.parametrize(("fn", "rows", "base"), APART)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_models_put_rows_at_places_of_two_indices(
    fn: Callable[..., Any], rows: tuple[int, ...], base: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.compiler.reset()  # extents that differ from those of an earlier call would be open
    x, cache = torch.randn(rows).to(dtype), torch.randn(base).to(dtype)
    count = rows[{places_between: 1, places_behind: 2}.get(fn, 0)]
    at = torch.tensor([-1, 3, 0, -2])[:count], torch.tensor([15, -16, 3, 7])[:count]
    mine = cache.clone()
    with torch.no_grad():
        call, reports = run_compiled(fn)
        call(x, mine, *at)
        fn(x, cache, *at)
    torch.testing.assert_close(mine, cache)
    assert reports[0].taken == 1 and not reports[0].outside
    assert any(len(r.reads) == 4 for r in reports[0].regions)


def an_index_of_two_dimensions(x: Any, cache: Any, at: Any) -> None:
    cache[at[:, None], at[None]] = x.softmax(-1)


def a_mask_and_an_index(x: Any, cache: Any, at: Any) -> None:
    cache[cache[:, 0, 0] > 1e9, at[:1]] = x.softmax(-1)


@pytest.mark.parametrize("fn", [an_index_of_two_dimensions, a_mask_and_an_index])
def test_other_indices_stay_pytorchs(fn: Callable[..., Any]) -> None:
    torch.compiler.reset()
    given = torch.randn(64), torch.randn(32, 16, 64), torch.tensor([3, 1, 0, -2])
    mine = [t.clone() for t in given]
    with torch.no_grad():
        call, reports = run_compiled(fn)
        call(*mine)
        fn(*given)
    torch.testing.assert_close(mine[1], given[1])
    assert any("index_put" in o.reason for o in reports[0].outside)


def step_of(batch: int) -> tuple[torch.Tensor, decode.Place, decode.Cache]:
    """Projections, the places and the cache of one layer of a small Llama."""
    groups, head, capacity = 2, 64, 16
    positions = torch.randperm(capacity)[:batch]
    angles = decode.angles(positions, head)
    cos, sin = (t.to(torch.bfloat16)[:, None] for t in (angles.cos(), angles.sin()))
    mask = torch.zeros(batch, 1, 1, capacity)
    place = decode.Place(torch.arange(batch), positions, positions.int() + 1, cos, sin, mask)
    cache = decode.Cache(*(torch.randn(batch, groups, capacity, head).bfloat16() for _ in range(2)))
    return torch.randn(batch, (4 + 2 * groups) * head).bfloat16(), place, cache


@pytest.mark.parametrize("batch", [1, 5])
def test_positions_and_the_append_of_a_step_are_one_kernel(batch: int) -> None:
    qkv, place, cache = step_of(batch)
    given, mine = (decode.Cache(*(t.clone() for t in cache)) for _ in range(2))
    reports: list[Any] = []
    options = read_options({"take": "modelled", "target": "h200"})

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_graph(gm, inputs, options, reports.append)

    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(decode.turn, backend=backend, fullgraph=True)(qkv, place, mine)
        theirs = decode.turn(qkv, place, given)
        exact = [t.double() for t in cache]
        turned = place._replace(cos=place.cos.double(), sin=place.sin.double())
        want = decode.turn(qkv.double(), turned, decode.Cache(*exact))
    for out, eager, precise in ((found, theirs, want), *zip(mine, given, exact, strict=True)):
        report = acceptable(out, precise, eager, torch.bfloat16)
        assert report, report.message
    [region] = reports[0].regions
    assert region.verdict.taken and len(region.verdict.kernels) == 1
    # only the factors of half a row are made whole elsewhere
    assert [o.operators for o in reports[0].outside] == [2]
    assert not any("index_put" in o.reason for o in reports[0].outside)


def test_what_is_read_before_it_is_changed_stays_pytorchs() -> None:
    with torch.no_grad():
        call, reports = run_compiled(read_before)
        same_results(read_before, call)
    assert any("index_put" in o.reason for o in reports[0].outside)


def test_inductor_compiles_the_rest() -> None:
    reports: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_graph(gm, inputs, read_options({"take": "all"}), reports.append)

    with torch.no_grad():
        same_results(append, torch.compile(append, backend=backend, fullgraph=True))
    assert reports[0].taken == 1


def test_traced_functions() -> None:
    given = arguments(functional_put)
    program = cs.superoptimize(functional_put, given, target="h200")
    assert "put_rows" in program.explain()
    same_results(functional_put, program)
    needs = [given[0].requires_grad_(), *given[1:]]
    program(*needs).sum().backward()
    assert needs[0].grad is not None


@pytest.mark.gpu
def test_regions_of_compiled_models_change_memory_of_the_caller() -> None:
    """Also memory that kernels cannot write as it lies: a tensor that is not aligned."""
    g = kept_and_put()
    program = program_of(key_of(g))
    for start in (0, 1):
        memory = torch.randn(33 * 64).half().cuda()
        cache = memory[start:][: 32 * 64].view(32, 64)
        inputs = [torch.arange(8).cuda() * 3, torch.randn(8, 64).half().cuda()]
        expected = evaluate(g, [cache.clone(), *inputs])
        found = program(program.with_bases(inputs, (0,), [cache]), (0,))
        assert len(found) == 2
        for out, want in zip((cache, *found), expected, strict=True):
            assert torch.allclose(out, want, atol=1e-2, rtol=1e-2)
