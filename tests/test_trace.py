"""Functions and modules of PyTorch become kernel graphs that compute the same."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutesuper as cs
from cutesuper.errors import (
    CompileError,
    GraphError,
    LoweringError,
    OptionError,
    RangeError,
    SearchError,
    ShapeError,
    TraceError,
)
from cutesuper.ir.evaluate import run_reference
from cutesuper.torch.compile import trace
from cutesuper.torch.compile.partition import partition
from cutesuper.torch.compile.watch import Observer
from tests.tracing import (
    CORPUS,
    Attention,
    Block,
    FusedMLP,
    GatedMLP,
    Reference,
    check,
    exported,
    randn,
    traced,
)

X = randn(3, 5, 32)


@pytest.mark.parametrize(("fn", "inputs"), [c[1:] for c in CORPUS], ids=[c[0] for c in CORPUS])
def test_traced_is_eager(monkeypatch: pytest.MonkeyPatch, fn: Any, inputs: Any) -> None:
    check(traced(monkeypatch, fn, inputs), fn, inputs)


def operators(program: cs.TracedProgram) -> list[list[str]]:
    """The operators of the regions, leaving out inputs, numbers and transpositions."""
    plain = ("input", "constant", "transpose")
    return [
        [n.operator for n in r.kernel.graph.nodes if n.operator not in plain]
        for r in program.regions
    ]


# ----------------------------------------------------------------------------------------- regions


def test_a_layer_is_three_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, Block(), (X,))
    before, attention, after = operators(program)
    assert before.count("matmul") == 3 and attention == ["scaled_dot_product_attention"]
    assert after.count("matmul") == 4 and after.count("rms_norm") == 1


def test_rows_are_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    [region] = traced(monkeypatch, GatedMLP(), (X,)).regions
    shapes = [region.kernel.graph.nodes[i].shape for i in region.kernel.graph.inputs]
    assert shapes == [(15, 32), (48, 32), (48, 32), (32, 48)]


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Products of an argument, which no region computes."""
    return F.linear(x.view(-1, 32), q), F.linear(x, k).relu(), torch.addmm(bias, x[0], v.t())


def test_products_of_one_operand_are_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [randn(n, 32) for n in (64, 16, 16)]
    program = traced(monkeypatch, projections, (X[:1], *weights, randn(16)))
    assert operators(program) == [["matmul", "matmul", "relu", "matmul", "add"]]
    check(program, projections, (X[:1], *weights, randn(16)))


LOOKUPS: dict[str, tuple[Any, int]] = {  # the program, and the last index from the end, or 0
    "embedding": (lambda w, i: F.embedding(i, w) * 2, 0),
    "rows of a table": (lambda w, i: w[i] * 2, -8),
    "index_select": (lambda w, i: w.index_select(0, i) * 2, 0),
    "index_copy": (lambda w, i: w.index_copy(0, i, w[:3] * 2), 0),
    "index_put": (lambda w, i: w.index_put((i,), w[:3] * 2), -8),
    "an index of two tables": (lambda w, i: F.embedding(i, w) + w[:4][i], 0),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_wrong_indices_are_an_error_where_pytorch_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, first = LOOKUPS[name]
    table, index = randn(8, 32), torch.tensor([1, 2, 3])
    program = traced(monkeypatch, fn, (table, index))
    check(program, fn, (table, torch.tensor([1, 2, first])))
    for wrong in (8, first - 1):
        with pytest.raises(IndexError):
            fn(table, torch.tensor([1, 2, wrong]))
        with pytest.raises(RangeError, match=f"index {wrong} is out of bounds"):
            program(table, torch.tensor([1, 2, wrong]))


class Dropping(nn.Module):
    """Attention that drops weights, and what reads it."""

    def forward(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.scaled_dot_product_attention(q, q, q, None, 0.5).transpose(1, 2).flatten(2)
        return torch.exp(y), F.silu(F.linear(y, w))


def test_dropout_keeps_the_attention_out_and_not_what_reads_it() -> None:
    inputs = (randn(2, 4, 3, 16), randn(24, 64))
    found = partition(torch.export.export(Dropping(), inputs).module().graph)
    assert [[str(n.target) for n in r.nodes] for r in found.regions] == [
        ["aten.exp.default"], ["aten.linear.default", "aten.silu.default"]
    ]  # fmt: skip
    assert [str(n.target) for n in found.refused] == ["aten.scaled_dot_product_attention.default"]


PLACES = torch.arange(5)
#: masks of 3 sequences of 5 queries that are the keys as well
OF_ONE_TENSOR: dict[str, Any] = {
    "seen": lambda x: PLACES[:, None] * 2 >= PLACES,
    "a window": lambda x: (PLACES[:, None] >= PLACES) & (PLACES[:, None] - PLACES < 3),
    "keys": lambda x: PLACES < 4,
    "distances": lambda x: (PLACES - PLACES[:, None]) * 0.5,
    "rows": lambda x: x[..., :1],
    "products": lambda x: x @ x.mT,
}


@pytest.mark.parametrize("name", OF_ONE_TENSOR)
def test_masks_of_queries_that_are_the_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=OF_ONE_TENSOR[name](x))

    x = X.clone().requires_grad_()
    program = traced(monkeypatch, fn, (x,))
    check(program, fn, (X,))
    assert not any("scaled_dot_product" in line for line in program.outside)
    mine, eager = (torch.autograd.grad(f(x).square().sum(), x) for f in (program, fn))
    torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


def test_rows_stay_rows_where_all_work_is_element_wise(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(monkeypatch, lambda x: x * 2, (X,)).kernel.graph
    assert graph.nodes[graph.inputs[0]].shape == (15, 32)


def test_keys_of_shared_heads_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, Attention(), (X,))
    place = operators(program).index(["scaled_dot_product_attention"])
    graph = program.regions[place].kernel.graph
    assert [graph.nodes[i].shape for i in graph.inputs] == [
        (3, 5, 2, 2, 16), (3, 5, 2, 1, 16), (3, 5, 2, 1, 16)
    ]  # fmt: skip


def test_parts_of_a_projection_read_parts_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    [region] = traced(monkeypatch, FusedMLP(), (X,)).regions
    graph = region.kernel.graph
    assert [graph.nodes[i].shape for i in graph.inputs] == [(15, 32), (48, 32), (48, 32), (32, 48)]
    assert "slice" not in [n.operator for n in graph.nodes]


def test_parameters_are_constants_and_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = GatedMLP()
    program = traced(monkeypatch, mlp, (X,))
    graph = program.kernel.graph
    assert [graph.nodes[i].constant for i in graph.inputs] == [False, True, True, True]
    with torch.no_grad():
        mlp.down.weight.mul_(2)
    check(program, mlp, (X,))


def test_an_equal_layer_is_optimized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, nn.Sequential(Block(), Block()), (X,))
    kernels = [r.kernel for r in program.regions]
    assert len(kernels) > len(set(map(id, kernels)))


def test_a_cast_at_the_end_is_stored_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, lambda x: (x.float() * 2).bfloat16(), (X.half(),))
    graph = program.kernel.graph
    assert [str(graph.nodes[i].dtype) for i in (*graph.inputs, *graph.outputs)] == [
        "float16", "bfloat16"
    ]  # fmt: skip


def test_products_multiply_in_the_type_they_are_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    w = randn(24, 32, dtype=torch.bfloat16)

    def mixed(x: Tensor) -> Tensor:
        return F.rms_norm(x, (32,)).bfloat16() @ w.t()

    program = traced(monkeypatch, mixed, (X,))
    check(program, lambda x: F.rms_norm(x, (32,)).to(_half(x)) @ w.t().to(_half(x)), (X,))
    assert operators(program) == [["rms_norm", "convert", "matmul"]]
    graph = program.kernel.graph
    assert [graph.nodes[i].dtype.name for i in graph.inputs] == ["float32", "bfloat16"]
    [product] = [n for n in graph.nodes if n.operator == "matmul"]
    assert {graph.nodes[i].dtype.name for i in product.inputs} == {"bfloat16"}


def _half(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype is torch.float32 else x.dtype


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = GatedMLP()

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(x)

    program = traced(monkeypatch, cast, (X,))
    with torch.no_grad():
        eager, mine = cast(X), program(X)
    assert mine.dtype is eager.dtype is torch.bfloat16
    torch.testing.assert_close(mine, eager, rtol=2e-2, atol=2e-2)


def test_where_a_region_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    [region] = traced(monkeypatch, GatedMLP(), (X,)).regions
    lines, start = inspect.getsourcelines(GatedMLP.forward)
    assert region.place == f"tracing.py:{start + len(lines) - 1}"


class _Scale:
    """An object that can be called, and has a method."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def more(self, x: Tensor, by: float = 3.0) -> Tensor:
        """Another one."""
        return x * by


@pytest.mark.parametrize("fn", [
    _Scale(), _Scale().more, functools.partial(_Scale().more, by=5.0), torch.neg,
], ids=["object", "method", "partial", "builtin"])  # fmt: skip
def test_whatever_can_be_called(monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    check(traced(monkeypatch, fn, (X,)), fn, (X,))


@pytest.mark.parametrize("fn", [_Scale(), _Scale().more], ids=["object", "method"])
def test_extents_of_named_arguments(monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    rows = torch.export.Dim("rows")
    program = traced(monkeypatch, fn, (X[0],), dynamic_shapes={"x": {0: rows}})
    check(program, fn, (X[0, :3],))


# ----------------------------------------------------------------------------------- dynamic shapes


def test_batch_and_length_stay_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = {"x": {0: batch, 1: length}}
    fn = GatedMLP()
    program = traced(monkeypatch, fn, (X,), dynamic_shapes=shapes)
    for shape in ((3, 5, 32), (1, 7, 32), (4, 1, 32), (1, 1, 32)):
        check(program, fn, (randn(*shape),))
    graph = program.kernel.graph
    assert str(graph.nodes[graph.inputs[0]].shape[0]) == "M"


def test_attention_of_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Attention()
    shapes = {"x": {0: torch.export.Dim("batch")}}
    program = traced(monkeypatch, fn, (X,), dynamic_shapes=shapes)
    for batch in (3, 1, 8):
        check(program, fn, (randn(batch, 5, 32),))


@pytest.mark.parametrize("fn", [
    lambda x, y: x + y, lambda x, y: torch.softmax(x @ x + y, -1) @ x,
    lambda x, y: x + torch.full_like(y, -torch.inf).triu(1),
], ids=["sum", "scores", "mask"])  # fmt: skip
def test_an_extent_whose_example_equals_others(monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    """Equal numbers in an example are no equal extents."""
    y = randn(16, 16)
    shapes = ({0: torch.export.Dim("M")}, None)
    program = traced(monkeypatch, fn, (randn(16, 16, 16), y), dynamic_shapes=shapes)
    for rows in (16, 2, 33):
        check(program, fn, (randn(rows, 16, 16), y))


def test_decisions_by_the_example_of_an_extent_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that runs for one number only is an error where it is traced."""
    found = trace.regions_of

    def deciding(module: Any, *args: Any) -> Any:
        [x] = (n for n in module.graph.nodes if n.op == "placeholder")
        assert x.meta["val"].shape[0] == 16
        return found(module, *args)

    monkeypatch.setattr(trace, "regions_of", deciding)
    shapes = ({0: torch.export.Dim("M")},)
    with pytest.raises(TraceError, match=r"hold for Eq\(x.shape\[0\], 16\) only, and dynamic_sh"):
        traced(monkeypatch, lambda x: x.exp(), (randn(16, 8),), dynamic_shapes=shapes)


# ------------------------------------------------------------------------------------------- errors


def test_what_is_not_supported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def running_sums(x: Tensor) -> Tensor:
        y = x * 2
        return y.cumprod(-1)

    line = inspect.getsourcelines(running_sums)[1] + 2
    with pytest.raises(
        TraceError,
        match=rf"cumprod, at .*test_trace.py:{line}: .*not "
        r'an operator of kernel graphs.*backend="cutesuper"',
    ):
        traced(monkeypatch, running_sums, (X,))


@pytest.mark.parametrize(("fn", "text"), [
    (lambda x: F.dropout(x, 0.5), "drops elements at random; call .eval"),
    (lambda x: torch.where(x > 0, float("nan"), x), "fills with nan"),
    (lambda x: F.bilinear(x, x, randn(4, 32, 32)), r"write it as torch\.einsum"),
    (lambda x: F.ctc_loss(x[:, None], torch.ones(1, 2), torch.tensor([3]), torch.tensor([2])),
     r"the result of aten\._ctc_loss.* depends on data; leave it outside"),
    (lambda x: F.max_pool1d(x, 2, 1) * 2, r"max_pool1d, at .*test_trace\.py"),
    (lambda x: x * x.max().item(), r"a number that is known only at the call \(made of \.item"),
    (lambda x: x.to_sparse() * 2, r"reads a tensor of torch.sparse_coo; make it dense"),
    (lambda x: x.double() * 2, "float64"),
    (lambda x: x.to(torch.int32) + 1, "computes nothing"),
    (lambda x: x.sum(-1, True).expand(3, 5, 32).softmax(-1), "softmax, at .*repeated elements"),
    (lambda x: torch.linalg.vector_norm(x, ord=0.5, dim=-1), "an order below 1"),
    (lambda x: (x * 2).cumprod(-1), "cumprod is not an operator"),
    (lambda x: x, "computes nothing"),
    (lambda x: x.mul_(2) + 1, r"changes an argument, .*\(x\); return its new value instead"),
    (lambda x: torch.cond(x.sum() > 0, torch.exp, torch.neg, (x,)), r"cond, at .*test_trace.py"),
    (torch.func.grad(lambda y: y.square().sum()), "torch.export cannot trace it"),
    (lambda x: torch.view_as_complex(x.view(3, 5, 16, 2)).abs(),
     "abs, at .*computes complex numbers, of which .* in complex64; write it with"),
    (lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 5, 16, 2)) ** 2.5),
     "computes complex numbers, of which"),
    (lambda x: x.sum().softmax(0), "a tensor of no dimensions"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, fn: Any, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        traced(monkeypatch, fn, (X,))


def test_dimensions_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls the dimension of a tensor that has none 0 or -1."""

    def fn(x: Tensor) -> Tensor:
        y = x.amax()
        return y.movedim(0, -1) * y.permute(()) * y.transpose(0, -1)

    check(traced(monkeypatch, fn, (X,)), fn, (X,))


SMALL: dict[str, tuple[Any, Any]] = {
    "no rows": (lambda x, w: F.rms_norm(x, (32,)) @ w, (randn(0, 32), randn(32, 8))),
    "no columns": (lambda x, w: x @ w + 1, (randn(4, 0), randn(0, 8))),
    "a sum of nothing": (lambda x: x.sum(0), (randn(0, 32),)),
    "a number": (lambda x: torch.exp(x) * 2, (torch.tensor(0.5),)),
    "one element": (lambda x, y: (x @ y).relu() + 1, (randn(1, 1), randn(1, 1))),
}


@pytest.mark.parametrize("name", SMALL)
def test_pytorch_computes_what_is_too_small_for_kernels(name: str) -> None:
    fn, inputs = SMALL[name]
    program = cs.superoptimize(fn, inputs, target="h200")
    check(program, fn, inputs)
    assert program.outside


def test_a_batch_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"x": {0: torch.export.Dim("rows")}}
    program = traced(monkeypatch, lambda x: F.rms_norm(x, (32,)), (X[0],), dynamic_shapes=rows)
    assert program(X[0, :0].clone()).shape == (0, 32)


def _biased(x: Tensor, w: Tensor) -> Tensor:
    y = F.silu(x) + 1
    return y @ w


def _doubled(x: Tensor, w: Tensor) -> Tensor:
    y = x.float() * 2
    return torch.relu(y @ w.float())


def test_what_no_kernel_runs_is_named_with_the_line_and_what_helps() -> None:
    inputs = randn(16, 96).bfloat16(), randn(96, 64).bfloat16()
    where = rf"matmul, at .*test_trace\.py:{inspect.getsourcelines(_doubled)[1] + 2}"
    text = rf"superoptimize\(_doubled\): {where}: .* lowered for sm_90a, .*\. Give it rest="
    with pytest.raises(LoweringError, match=text):
        cs.superoptimize(_doubled, inputs, target=replace(cs.B200, arch="sm_120a"))
    check(cs.superoptimize(_doubled, inputs, target="h200"), _doubled, inputs)


def test_what_no_kernel_runs_together_is_named_with_its_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each operator has a kernel: the error of all stands, with the lines of the region."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise SearchError("nothing was found")

    monkeypatch.setattr(trace, "optimize_graph", refuse)
    first = inspect.getsourcelines(_biased)[1] + 1
    place = rf"at test_trace\.py:{first}-{first + 1}: nothing was found\. Give it rest="
    with pytest.raises(SearchError, match=rf"superoptimize\(_biased\), {place}"):
        cs.superoptimize(
            _biased, (randn(16, 64).bfloat16(), randn(64, 64).bfloat16()), target="h200"
        )


def test_what_cannot_be_exported(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = r"the value of a tensor decides at test_trace\.py:\d+, .*; write it with torch\.where"
    with pytest.raises(TraceError, match=text):
        traced(monkeypatch, lambda x: x * 2 if x.sum() > 0 else x, (X,))
    with pytest.raises(TraceError, match=r"if the function itself raises with these arguments"):
        traced(monkeypatch, lambda x: x @ x[:2, :2, :2], (X,))
    assert not [r for r in caplog.records if r.name == "torch._subclasses.fake_tensor"]
    assert not any(capfd.readouterr())


@pytest.mark.parametrize("fn", [
    lambda x: x.nonzero() * 2.0, lambda x: x[x > 0] * 2, lambda x: torch.unique(x) + x.sum(),
    lambda x: x[: x.sum().int().item()] * 2.0,
], ids=["nonzero", "mask", "unique", "item"])  # fmt: skip
def test_extents_that_depend_on_data(monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    with pytest.raises(TraceError, match=r"depends on data|the value of a tensor decides"):
        traced(monkeypatch, fn, (X,))


def test_a_dynamic_extent_that_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"x": {1: torch.export.Dim("columns")}}
    with pytest.raises(TraceError, match=r"tensor \[8, M\].*extent 1 is dynamic.*dynamic_shapes"):
        traced(monkeypatch, lambda x: x.exp(), (randn(8, 16),), dynamic_shapes=shapes)


def test_other_shapes_than_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, GatedMLP(), (X,))
    with torch.no_grad(), pytest.raises((TraceError, ShapeError), match=r"dynamic_|must be"):
        program(randn(4, 5, 32))


@pytest.mark.parametrize(("args", "kwargs"), [
    ((X,), {}), ((), {"x": X}), ((X, None), {}), ((X,), {"mask": None}), ((X,), {"scale": 2.0}),
])  # fmt: skip
def test_arguments_by_place_and_by_name(
    monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any
) -> None:
    program = traced(monkeypatch, _scaled, (X,))
    torch.testing.assert_close(program(*args, **kwargs), _scaled(X))
    other = traced(monkeypatch, _scaled, (), example_kwargs={"scale": 2.0, "x": X})
    torch.testing.assert_close(other(*args, **kwargs), _scaled(X))


def _scaled(x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
    return x * scale if mask is None else x * mask


@pytest.mark.parametrize(("args", "kwargs", "text"), [
    ((X, X), {}, "'mask' was left to its default"), ((X,), {"scale": 3.0}, "'scale' was left"),
    ((), {}, "missing a required argument: 'x'"), ((X, None, 2.0, 4), {}, "too many positional"),
    ((X,), {"size": 3}, "unexpected keyword argument 'size'"),
])  # fmt: skip
def test_arguments_that_it_was_not_traced_with(
    monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any, text: str
) -> None:
    program = traced(monkeypatch, _scaled, (X,))
    with pytest.raises(TraceError, match=rf"_scaled: these arguments .*{text}.*trace it again"):
        program(*args, **kwargs)


def test_other_strides_than_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were one dimension are copied where they are none."""
    program = traced(monkeypatch, lambda x: x * 2 + 1, (X,))
    for x in (randn(32, 5, 3).permute(2, 1, 0), randn(3, 5, 64)[..., ::2], X[:1].expand(3, 5, 32)):
        assert torch.equal(program(x), x * 2 + 1)


def test_transforms_of_a_traced_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, lambda x: x * 2 + 1, (X,))
    program.graph_module.region_0.forward = lambda tensors: [t.data_ptr() for t in tensors]  # type: ignore[union-attr]
    with pytest.raises(TraceError, match=r"torch\.vmap.*; transform the function first"):
        torch.vmap(program)(X[None].clone())


def test_copies_of_a_traced_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module = GatedMLP()
    program = traced(monkeypatch, module, (X,))
    other = copy.deepcopy(program)
    assert copy.copy(program) is program
    with torch.no_grad():
        expected = module(X)
        module.down.weight.zero_()
        assert not program(X).any()
        torch.testing.assert_close(other(X), expected)
    with pytest.raises(GraphError, match=r"cannot be pickled.*state_dict\(\) of the module"):
        pickle.dumps(program)


def test_largest_elements_and_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are computed with the elements; sorting stays PyTorch's."""

    def largest(x: Tensor) -> Any:
        y = x.exp()
        return y.max(-1), y.min(1).values, y.sort(-1).indices

    program = traced(monkeypatch, largest, (X,))
    assert any("sort (" in line for line in program.outside)
    assert not any("max" in line for line in program.outside)
    torch.testing.assert_close(program(X), largest(X))


def test_rows_are_reduced_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over everything of what was computed in rows: one kernel, where the first dimension
    first was two, and 426 segments to search."""
    program = traced(
        monkeypatch,
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        (X, X + 1),
    )
    graph = program.kernel.graph
    assert [n.shape for n in graph.nodes if n.operator == "sum"] == [(15, 1), (1, 1)]


def test_a_division_by_zero_is_named() -> None:
    with pytest.raises(
        SearchError,
        match=r"superoptimize\(.*<lambda>\), at test_trace\.py:"
        ".*divides by what is 0 whatever the inputs are",
    ):
        cs.superoptimize(lambda x: x / 0, (X,), target="h200")


def test_a_class_is_no_module() -> None:
    with pytest.raises(GraphError, match=r"superoptimize\(Linear\): it is a class; .*Linear\(\.\."):
        cs.superoptimize(nn.Linear, (X,))


def test_neither_a_graph_nor_a_function() -> None:
    with pytest.raises(GraphError, match=r"a kernel graph, .* or a function or module"):
        cs.superoptimize("graph")  # type: ignore[call-overload]
    g = cs.new_kernel_graph()
    with pytest.raises(GraphError, match="leave out the examples"):
        cs.superoptimize(g, (X,))  # type: ignore[call-overload]


def test_the_kernel_of_several_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, Block(), (X,))
    with pytest.raises(TraceError, match="3 regions, so no one kernel"):
        _ = program.kernel


# ---------------------------------------------------------------------------------------- real ones


@pytest.fixture(scope="module")
def norm_and_projection() -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 128, bias=False)).bfloat16()
    inputs = (randn(2, 8, 64, dtype=torch.bfloat16),)
    with torch.no_grad():
        return cs.superoptimize(module, inputs, target="h200"), module, inputs


def test_compiled_to_one_kernel(norm_and_projection: Any) -> None:
    program, module, inputs = norm_and_projection
    assert len(program.kernel.kernels) == 1 and "wgmma" in program.kernel.ptx
    check(program, module, inputs)


def test_explain_says_where_and_how(norm_and_projection: Any) -> None:
    text = norm_and_projection[0].explain()
    assert "Sequential: 1 region(s)" in text and "verified" in text


def test_decorator_traces_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = trace.superoptimize_callable

    def counting(*args: Any, **options: Any) -> Any:
        made.append(args)
        return real(*args, **options)

    monkeypatch.setattr(trace, "superoptimize_callable", counting)

    @cs.superoptimize(target="h200")
    def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
        """Twice."""
        return x * factor + 1

    assert scaled.__doc__ == "Twice." and scaled.__name__ == "scaled"
    x = randn(4, 64)
    threads = [threading.Thread(target=scaled, args=(x,)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(scaled(x), x * 2 + 1) and len(made) == 1
    assert torch.equal(scaled(x, factor=3.0), x * 3 + 1) and len(made) == 2
    assert torch.equal(scaled(x[:2].clone()), x[:2] * 2 + 1) and len(made) == 3


def test_decorated_functions_share_a_program_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(trace, "optimize_graph", lambda g, **_: (made.append(g), Reference(g))[1])

    @cs.superoptimize(target="h200")
    def projected(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (32,)) @ w

    @cs.superoptimize
    def counted(x: Tensor) -> Tensor:
        return x * x.shape[0]

    weights = randn(32, 8), randn(32, 16)
    for w in weights:
        for rows in (8, 3, 70, 1):
            check(projected, lambda x, w: F.rms_norm(x, (32,)) @ w, (randn(rows, 32), w))
    assert len(made) == 4  # one for the first rows, one for all others, of each weight
    for rows in (8, 3):
        check(counted, lambda x: x * x.shape[0], (randn(rows, 32),))
    assert len(made) == 6


def test_a_decorated_function_can_be_looked_at(tmp_path: Path) -> None:
    @cs.superoptimize(target="h200")
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    assert repr(scaled).endswith("scaled: not called yet)")
    with pytest.raises(TraceError, match=r"scaled.*explain\(\): it is traced at its first call"):
        scaled.explain()
    scaled(randn(4, 64))
    assert repr(scaled).endswith("scaled: 1 program(s))")
    assert scaled.explain() == scaled.program(randn(4, 64)).explain()
    scaled.draw(tmp_path / "scaled.svg")
    assert (tmp_path / "scaled.svg").read_text().startswith("<svg")
    with pytest.raises(CompileError, match=r"cannot write .*: No such file"):
        scaled.export(tmp_path / "none" / "scaled.so", header=tmp_path / "scaled.h")


def test_arguments_have_the_names_that_the_user_wrote(tmp_path: Path) -> None:
    """Capital letters too, in the report and in the header."""

    def f(D: Tensor, scale: Tensor, x: Tensor, X: Tensor) -> Tensor:
        return torch.relu(D * scale) + x * X

    given = (randn(4, 64), randn(64), randn(4, 64), randn(4, 64))
    program = cs.superoptimize(f, given, target="h200")
    names = program.regions[0].reads
    assert {"D", "scale", "x"} <= set(names) and "d" not in names
    program.export(tmp_path / "f.so", header=tmp_path / "f.h")
    assert "tensors[0]  input   D  float32" in (tmp_path / "f.h").read_text()


def test_each_region_is_drawn_into_a_file(tmp_path: Path) -> None:
    """Reports name what other operators made by the line that made it."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax((x * w).sort().values * w, -1)

    program = cs.superoptimize(f, (randn(4, 64), randn(64)), rest="torch", target="h200")
    files = program.draw(tmp_path / "f.svg")
    assert files == (tmp_path / "f.0.svg", tmp_path / "f.1.svg")
    assert all(file.read_text().startswith("<svg") for file in files)
    heads = [line for line in program.explain().splitlines() if re.match(r"region \d \(", line)]
    assert heads[0].endswith(": X is x, W is w")
    assert re.search(r": X is a value of test_trace.py:\d+, W is w$", heads[1])
    with pytest.raises(TraceError, match=r"it has 2 regions, .* give it header="):
        program.export(tmp_path / "f.so")
    with pytest.raises(TraceError, match=r"sort \(test_trace.py:\d+\) needs PyTorch"):
        program.export(tmp_path / "f.so", header=tmp_path / "f.h")
    halves = cs.superoptimize(lambda x: (x * 2).chunk(2, -1), (randn(4, 64),), target="h200")
    with pytest.raises(TraceError, match=r"chunk .* makes a part with gaps of a tensor"):
        halves.export(tmp_path / "f.so", header=tmp_path / "f.h")


def test_what_pytorch_says_of_a_trace_is_short() -> None:
    rows = {"x": {0: torch.export.Dim("rows")}}
    with pytest.raises(TraceError, match=r"top-level keys must be the arg names") as raised:
        cs.superoptimize(lambda x, y: x * y, (X, X), dynamic_shapes=rows)
    assert "export()" not in str(raised.value) and "http" not in str(raised.value)
    with pytest.raises(TraceError, match=r"do not fit: missing a required argument: 'y'$"):
        cs.superoptimize(lambda x, y: x * y, (X,))


def test_a_module_that_changes_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "optimize_graph", lambda graph, **_: Reference(graph))
    module = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)).eval()
    program = cs.superoptimize(module)
    torch.testing.assert_close(program(X), module(X))
    with torch.no_grad():
        module[0].weight.zero_()
    torch.testing.assert_close(program(X), module(X))
    module[0].weight = nn.Parameter(randn(8, 32))
    torch.testing.assert_close(program(X), module(X))
    module.train()
    with pytest.raises(TraceError, match="drops elements at random"):
        program(X)


def test_numbers_that_are_equal_and_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "optimize_graph", lambda graph, **_: Reference(graph))
    program = cs.superoptimize(lambda x, s: x.abs() * s)
    assert not program(X, 0.0).signbit().any() and program(X, -0.0).signbit().all()


@cs.superoptimize
def _decorated(x: Tensor) -> Tensor:
    return x * 2


def test_a_decorated_function_is_copied_and_pickled_like_a_function() -> None:
    assert copy.deepcopy(_decorated) is _decorated
    assert pickle.loads(pickle.dumps(_decorated)) is _decorated
    module = nn.Linear(4, 4)
    assert isinstance(copy.deepcopy(cs.superoptimize(module)), type(_decorated))
    with pytest.raises(GraphError, match=r"superoptimize\(Linear\): .* cannot be pickled"):
        pickle.dumps(cs.superoptimize(module))


def test_arguments_of_another_kind_are_refused() -> None:
    x = torch.randn(4, 64)

    def double(x: Any) -> Any:
        return x + x

    with pytest.raises(OptionError, match=r"superoptimize\(program, Tensor\): give it the"):
        cs.superoptimize(double, x)
    with pytest.raises(TraceError, match="an argument is a ndarray, which is no tensor"):
        cs.superoptimize(double)(x.numpy())
    with pytest.raises(TraceError, match=r"an argument is of numpy\.ndarray; give it tensors"):
        cs.superoptimize(double, (x.numpy(),))
    norm = torch.nn.BatchNorm1d(64)
    with pytest.raises(TraceError, match=r"closes over, as batch norm .*the module itself"):
        cs.superoptimize(lambda x: norm(x) * 2, (x,))
    with pytest.raises(OptionError, match=r"explain\(str, ...\): give it a module or a function"):
        cs.explain("double", (x,))  # type: ignore[arg-type]


SLOPES = {
    "relu": F.relu, "relu6": F.relu6, "leaky relu": F.leaky_relu, "elu": F.elu, "selu": F.selu,
    "celu": F.celu, "softplus": F.softplus, "mish": F.mish, "log sigmoid": F.logsigmoid,
    "softsign": F.softsign, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "hardtanh": F.hardtanh, "softshrink": F.softshrink, "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 1.0, 2.0), "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1, 3), "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "maximum of a number": lambda x: torch.maximum(x, torch.ones_like(x)),
    "minimum of a number": lambda x: torch.minimum(x, torch.full_like(x, 2)), "sinc": torch.sinc,
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, x * 0, reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, 0.5 * x, reduction="none"),
    "huber": lambda x: F.huber_loss(x, 0.5 * x, reduction="none"),
    "absolute": lambda x: F.smooth_l1_loss(x, 0.5 * x, reduction="none", beta=0.0),
    "open": lambda x: F.hardtanh(x, -float("inf"), 1.0),
    "entropy": torch.special.entr, "logit": torch.logit, "of half": lambda x: torch.logit(x, 0.5),
    "xlogy of 2": lambda x: torch.xlogy(2.0, x),
    "hypot": lambda x: torch.hypot(x, 1.5 - x),
}  # fmt: skip


def test_pooling_to_one_element_gives_its_gradient_to_the_first() -> None:
    """It is a maximum along one dimension, which kernels compute where nothing is recorded."""
    graph = exported(lambda x: F.adaptive_max_pool2d(x, 1) * 2, (torch.ones(2, 3, 4, 5),)).graph
    assert any(str(n.target) == "aten.max.dim" for n in graph.nodes)


def test_a_low_threshold_of_softplus(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[-1.0, 2, 5, 7, 20]])
    program = traced(monkeypatch, lambda x: F.softplus(x, 0.5, 3.0), (x,))
    torch.testing.assert_close(program(x), F.softplus(x, 0.5, 3.0))


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_where_pieces_meet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """PyTorch's, also at the very points where a function is put together."""
    x = torch.tensor([[0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 4, 6, 100]], requires_grad=True)
    program = traced(monkeypatch, SLOPES[name], (x.detach(),))
    [graph] = [r.kernel.graph for r in program.regions]
    [found] = run_reference(cs.grad(graph), [x.detach(), torch.ones(x.shape)])
    SLOPES[name](x).sum().backward()
    torch.testing.assert_close(found, x.grad, equal_nan=True)


def test_no_warning_that_the_user_cannot_mend(recwarn: pytest.WarningsRecorder) -> None:
    """PyTorch warns of copies that it makes itself where code under no_grad is inlined."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y + 1

    trace._exported(fn, "fn", (torch.ones(4, 8),), {}, None, Observer(fn, frozenset()))
    assert [w for w in recwarn if issubclass(w.category, FutureWarning)] == []


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_that_begin(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a state, which is zeros: a product of those is the sums of the weight, times zero."""
    module, x = cell(32, 24).half(), torch.randn(5, 32).half()
    check(traced(monkeypatch, module, (x,)), module, (x,))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, y: y.sin() + y.new_full((5, 32), 2.0) @ w,
        lambda w, y: torch.addmm(y, y.new_full((5, 32), -1.5), w, alpha=3.0, beta=0.5),
        lambda w, y: (
            y[:2, None] + y.new_full((2, 5, 32), 0.5) @ w.reshape(2, 16, 24).repeat(1, 2, 1)
        ),
        lambda w, y: y + y.new_full((32,), 0.25) @ w,
    ],
)
def test_products_of_equal_numbers(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(32, 24).half(), torch.randn(5, 24).half()
    check(traced(monkeypatch, fn, given), fn, given)
