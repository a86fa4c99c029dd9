"""Rows of a table by an index: operator, field, search, plan and kernel, PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import cutesuper as cs
from cutesuper.errors import CutesuperError, DTypeError, GraphError, LoweringError, ShapeError
from cutesuper.ir.block import LOAD, MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.serial import dumps, loads
from cutesuper.report import plan_text
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.base import Indexed
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from cutesuper.targets import H200
from cutesuper.verify.integers import draw_integers
from tests.backends import compiled
from tests.mutants import change
from tests.plans import compiled as compiled_plan

LOWERED = SearchOptions(lowered=True)


def embedded(rows: Any = 24, width: int = 64, table: int = 100, norm: bool = True) -> KernelGraph:
    """Rows of an embedding, and their norm."""
    g = cs.new_kernel_graph()
    w = g.new_input((table, width), "bfloat16", name="W", constant=True)
    ids = g.new_input((rows,), "int64", name="ids")
    x = g.take_rows(w, ids)
    g.mark_output(g.rms_norm(x, g.new_input((width,), "bfloat16", name="g")) if norm else x)
    return g


def best(g: KernelGraph) -> MuGraph:
    return search(g, H200, options=LOWERED).candidates[0].mugraph


# --------------------------------------------------------------------------------------- operator

ERRORS: dict[str, tuple[Callable[[KernelGraph, Any, Any], Any], type[CutesuperError], str]] = {
    "no index": (
        lambda g, w, i: g.take_rows(w, w), DTypeError,
        "take_rows: operand 1, w[8, 4] float16, must be an int64 or int32 input",
    ),
    "a table of integers": (
        lambda g, w, i: g.take_rows(i, i), DTypeError,
        "operand 0, i[3] int64, is int64, which only lengths",
    ),
    "a vector": (
        lambda g, w, i: g.take_rows(g.new_input((8,)), i), ShapeError,
        "take_rows([8], [3]): a table is [rows, elements of a row]",
    ),
    "a symbolic table": (
        lambda g, w, i: g.take_rows(g.new_input((cs.symbol("V"), 4)), i), ShapeError,
        "the number of rows of a table, V, must be known before the call",
    ),
    "computed": (
        lambda g, w, i: g.take_rows(g.exp(w), i), GraphError,
        "take_rows: operand 0, t2[8, 4] float16, is computed; it reads inputs",
    ),
    "gradient": (
        lambda g, w, i: cs.grad(embedded(), wrt="W"), GraphError,
        "the gradient of a table would add up the rows of equal indices",
    ),
    "gradient of the index": (
        lambda g, w, i: cs.grad(embedded(), wrt="ids"), GraphError, "has no gradient; leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_messages(name: str) -> None:
    build, error, message = ERRORS[name]
    g = cs.new_kernel_graph()
    w, i = g.new_input((8, 4), name="w"), g.new_input((3,), "int64", "i")
    with pytest.raises(error) as caught:
        build(g, w, i)
    assert message in str(caught.value)


def test_shapes_types_and_files() -> None:
    g = cs.new_kernel_graph()
    w = g.new_input((8, 3, 4), "float32")
    y = g.take_rows(w, g.new_input((cs.symbol("B"), 5), "int32"))
    assert y.shape[1:] == (5, 3, 4) and str(y.shape[0]) == "B" and y.dtype == cs.float32
    g.mark_output(y)
    assert loads(dumps(g)).nodes == g.nodes  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reference(dtype: torch.dtype) -> None:
    w = torch.randn(5, 3, 2)
    index = torch.tensor([[0, 4], [-1, -5], [5, -6]], dtype=dtype)
    found = TABLE["take_rows"].reference([w, index], {})
    assert torch.equal(found[:2], w[index[:2].long()])
    assert found.shape == (3, 2, 3, 2) and found[2].isnan().all()


def test_the_gradient_of_what_follows_is_pytorchs() -> None:
    g = embedded(6, 4, 9)
    table, weight = torch.randn(9, 4).double(), torch.randn(4).double().requires_grad_()
    dy = torch.randn(6, 4, dtype=torch.float64)
    gradient = cs.grad(g, wrt="g")
    given = {"W": table, "ids": torch.arange(6), "g": weight.detach()}
    inputs = [given.get(gradient.nodes[i].name, dy) for i in gradient.inputs]
    (dg,) = evaluate(gradient, inputs, torch.float64)
    functional.rms_norm(table[:6], (4,), weight, 1e-6).backward(dy)
    torch.testing.assert_close(dg.reshape(4), weight.grad)


# ------------------------------------------------------------------------------------------ field


def test_indices_of_trials_name_rows_from_both_ends_and_none_twice() -> None:
    g = embedded(6, 4, 9)
    for trial in range(3):
        drawn = draw_integers(g, 1, (6,), [0, trial]).data
        assert len(set(drawn % 9)) == 6 and (drawn < 0).sum() == 3 and (abs(drawn) <= 9).all()


def test_programs_are_verified_and_wrong_ones_are_not() -> None:
    g = cs.new_kernel_graph()
    a, b = (g.new_input((16, 64), name=n) for n in "ab")
    i, j = (g.new_input((8,), "int32", name=n) for n in "ij")
    g.mark_output(g.add(g.mul(g.take_rows(a, i), 2.0), g.take_rows(b, j)))
    mu = best(g)
    assert len(mu.steps) == 1 and cs.verify(g, mu)
    assert loads(dumps(mu)) == mu
    ops = mu.steps[0].program.ops
    place = next(n for n, op in enumerate(ops) if op.kind == LOAD)
    given = dict(ops[place].attributes)
    other = {"i": "j", "j": "i"}[given["index"]]
    assert not cs.verify(g, change(mu, 0, place, attributes=given | {"index": other}))
    plain = {k: v for k, v in given.items() if k != "index"}
    with pytest.raises(GraphError, match=r"extent 16 of \w is mapped to M of extent 8"):
        check_mugraph(change(mu, 0, place, attributes=plain))
    with pytest.raises(GraphError, match=r"take_rows\(\[16, 64\], \[16, 64\]\)|mapped|dimensions"):
        check_mugraph(change(mu, 0, place, attributes=given | {"index": "a"}))


def test_one_index_of_an_element_is_read_through_another() -> None:
    """The table of an embedding that is also the weight of the last product."""
    g = cs.new_kernel_graph()
    w, i = g.new_input((64, 32), name="w"), g.new_input((16,), "int64")
    g.mark_output(g.matmul(g.rms_norm(g.take_rows(w, i)), g.transpose(w)))
    mu = best(g)
    assert cs.verify(g, mu) and len(mu.steps) == 2


# ----------------------------------------------------------------------------------------- search


def test_a_norm_reads_the_rows_itself() -> None:
    mu = best(embedded(cs.symbol("T")))
    (step,) = mu.steps
    assert sorted(step.reads) == ["W", "g", "ids"]
    plan = make_plan(step, mu.tensors, H200)
    assert isinstance(plan, RowPlan)
    (view,) = (v for v in plan.loads.values() if isinstance(v, Indexed))
    (named,) = view.named
    assert (named.count, named.stride, named.index.labels) == (100, 64, ("M",))
    # of a table of 12.8 KB the rows of 16 tokens, their places, weights and results
    assert plan.moved_bytes == 2 * 16 * 64 + 8 * 16 + 2 * 64 + 2 * 16 * 64
    with pytest.raises(LoweringError, match="only a row kernel reads rows through an index"):
        make_plan(step, mu.tensors, H200, RowLoopSchedule(8, 8, 1, 1))


def taken_and(
    rest: Callable[[KernelGraph, Any], Any], *dims: int, index: tuple[int, ...] = (512,)
) -> KernelGraph:
    g = cs.new_kernel_graph()
    rows = g.take_rows(g.new_input(dims, "float16"), g.new_input(index, "int32"))
    g.mark_output(rest(g, rows))
    return g


PROGRAMS: dict[str, tuple[KernelGraph, int]] = {
    "alone": (embedded(norm=False), 1),
    "several dimensions": (taken_and(lambda g, x: g.exp(x), 9, 3, 16, index=(4, 5)), 1),
    "one row": (taken_and(lambda g, x: g.softmax(x, -1), 9, 64, index=(1,)), 1),
    "beside a tensor": (taken_and(lambda g, x: g.mul(x, g.new_input((512, 64))), 9, 64), 1),
    "a sum over rows": (taken_and(lambda g, x: g.sum(g.exp(x), 0), 2000, 64, index=(4096,)), 2),
    "a product": (taken_and(lambda g, x: g.matmul(x, g.new_input((64, 128))), 99, 64), 2),
    "a table of one column": (taken_and(lambda g, x: g.exp(x), 99, 1), 1),
    "sums of a few rows": (taken_and(lambda g, x: g.sum(x, 0), 99, 64, index=(8,)), 1),
    "long rows": (taken_and(lambda g, x: g.softmax(x, -1), 9, 1 << 17), 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_programs(name: str) -> None:
    g, kernels = PROGRAMS[name]
    mu = best(g)
    assert len(mu.steps) == kernels and cs.verify(g, mu)
    for step in mu.steps:
        make_plan(step, mu.tensors, H200)


def test_plan_of_an_embedding_and_its_norm(golden: Any) -> None:
    mu = best(embedded(cs.symbol("T"), 4096, 128256))
    golden("plans/embedding_norm.txt", plan_text("k0", make_plan(mu.steps[0], mu.tensors, H200)))


@pytest.mark.parametrize("index", ["int64", "int32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile_and_cpu_tensors_run(dtype: str, index: str) -> None:
    g = cs.new_kernel_graph()
    w, i = g.new_input((32, 48), dtype), g.new_input((cs.symbol("T"),), index)
    g.mark_output(g.softmax(g.take_rows(w, i), -1))
    kernel = cs.superoptimize(g, target="h200")
    assert "through" in kernel.explain()
    table = torch.randn(32, 48).to(getattr(torch, dtype))
    ids = torch.tensor([3, -1, 31, 32, -33], dtype=getattr(torch, index))
    found = kernel(table, ids)
    torch.testing.assert_close(found[:3], table[ids[:3].long()].softmax(-1), atol=1e-2, rtol=1e-2)
    assert found[3:].isnan().all()


@pytest.mark.parametrize("name", ["a table of one column", "sums of a few rows"])
def test_kernels_read_an_index_for_each_element(name: str) -> None:
    mu = best(PROGRAMS[name][0])
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, RowPlan)
    (view,) = plan.loads.values()
    assert isinstance(view, Indexed) and plan.column in view.named_by
    assert compiled_plan(plan).cubin


# ---------------------------------------------------------------------------------------- PyTorch


def norm(w: Any, ids: Any, g: Any) -> Any:
    return functional.rms_norm(functional.embedding(ids, w), (64,), g, 1e-6)


def rotary(x: Any, cos: Any, sin: Any, at: Any) -> Any:
    return x * cos[at][:, None] + x.flip(-1) * torch.index_select(sin, 0, at)[:, None]


def inputs_of(fn: Any) -> list[Any]:
    if fn is norm:
        return [torch.randn(100, 64), torch.randint(0, 100, (2, 7)), torch.randn(64)]
    return [torch.randn(7, 2, 64), torch.randn(50, 64), torch.randn(50, 64), torch.arange(7) * 3]


@pytest.mark.parametrize("fn", [norm, rotary])
def test_traced_functions(fn: Any) -> None:
    inputs = inputs_of(fn)
    program = cs.superoptimize(fn, inputs)
    assert "take_rows" in program.explain()
    torch.testing.assert_close(program(*inputs), fn(*inputs))


def test_compiled_models() -> None:
    inputs = inputs_of(norm)
    call, reports = compiled(norm)
    torch.testing.assert_close(call(*inputs), norm(*inputs))
    assert reports[0].taken == 1 and not reports[0].outside


def test_tables_that_need_gradients_stay_pytorchs() -> None:
    table, ids, weight = inputs_of(norm)
    program = cs.superoptimize(norm, [table, ids, weight])
    for wanted in ((0,), (1,), (0, 1), ()):
        given = [t.clone().requires_grad_(n in wanted) for n, t in enumerate((table, weight))]
        same = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        expected, found = norm(same[0], ids, same[1]), program(given[0], ids, given[1])
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == bool(wanted)
        if wanted:
            found.square().sum().backward()
            expected.square().sum().backward()
        for a, b in zip(given, same, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_models_are_trained_and_take_any_number_of_rows() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = torch.nn.Embedding(50, 64), torch.nn.RMSNorm(64)

        def forward(self, ids: Any) -> Any:
            return functional.silu(self.norm(self.embedding(ids)))

    model = Model()
    call, reports = compiled(model, dynamic=True)
    for shape in ((2, 8), (3, 5)):
        ids = torch.randint(0, 50, shape)
        gradients: list[Any] = []
        for fn in (call, model):
            model.zero_grad()
            fn(ids).square().sum().backward()
            gradients.append(model.embedding.weight.grad)
        torch.testing.assert_close(*gradients)
    assert reports[0].taken == 1 and not reports[0].outside
