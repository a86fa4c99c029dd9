"""Calls of kernels that record gradients: numbers, what autograd does around them, refusals."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import GraphError, OperatorError, SearchError, ShapeError
from cutesuper.ir.dims import Dim
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from cutesuper.search.region_cache import KnownRegions
from cutesuper.skeletons.rows import form
from tests.complex_numbers import Rotated
from tests.gradients import (
    CASES,
    judge,
    kernel_of,
    shapes_of,
    uncompiled,
    unsearched,
)
from tests.tracing import Block, GatedMLP, randn

#: most elements that a cluster reduces
LONGEST = 262144
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither searched for nor compiled."""
    unsearched(monkeypatch)


def graph_of(build: Any, *shapes: tuple[Any, ...], dtype: Any = "float32") -> KernelGraph:
    g = cs.new_kernel_graph()
    made = build(g, *(g.new_input(s, dtype, name=n) for s, n in zip(shapes, "xyz", strict=False)))
    for t in made if isinstance(made, tuple) else (made,):
        g.mark_output(t)
    return g


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, **options).requires_grad_()


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_pytorch(
    name: str, dtype: torch.dtype, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsearched(monkeypatch, keep)
    kernel = kernel_of(name, dtype)
    judge(kernel, CASES[name].theirs, CASES[name].draw(dtype))
    [gradient] = kernel._gradients.values()
    assert not isinstance(gradient, GraphError)
    assert keep or gradient.forward is kernel


STEPS: dict[str, Any] = {
    "silu": lambda g, x, y: g.silu(x),
    "exp": lambda g, x, y: g.exp(x * 0.25),
    "square": lambda g, x, y: g.square(x),
    "add": lambda g, x, y: x + y,
    "mul": lambda g, x, y: x * y,
    "sub": lambda g, x, y: 1.0 - x - y,
    "relu": lambda g, x, y: g.relu(x),
    "softmax": lambda g, x, y: g.softmax(x),
    "rms_norm": lambda g, x, y: g.rms_norm(x, eps=1e-2),
    "layer_norm": lambda g, x, y: g.layer_norm(x, eps=1e-2),
    "centred": lambda g, x, y: x - g.mean(x, -1),
    "scaled": lambda g, x, y: x / (1.5 + g.mean(g.square(x), -1)),
}


@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    m=st.integers(1, 5), n=st.integers(2, 9), row=st.booleans(), seed=st.integers(0, 1000),
    symbolic=st.booleans(), needs=st.sampled_from(((0,), (1,), (0, 1))), keep=st.booleans(),
)  # fmt: skip
@settings(max_examples=80)
def test_random_row_programs(
    steps: list[str], m: int, n: int, row: bool, seed: int, symbolic: bool,
    needs: tuple[int, ...], keep: bool,
) -> None:  # fmt: skip
    def build(g: KernelGraph, x: Any, y: Any) -> Any:
        z = g.rms_norm(x * y, eps=1e-2)
        for s in steps:
            z = STEPS[s](g, z, y)
        return z, g.sum(z * x, -1)

    rows = cs.symbol("M", m) if symbolic else m
    graph = graph_of(build, (rows, n), (n,) if row else (rows, n), dtype="bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        unsearched(patch, keep)
        kernel = cs.superoptimize(graph, target="h200")
    r = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=r).bfloat16() for s in shapes_of(graph)]
    leaves = [values[i].clone().requires_grad_() for i in needs]

    def with_rest(call: Any) -> Any:
        def called(*some: Tensor) -> Any:
            given = dict(zip(needs, some, strict=True))
            return tuple(call([given.get(i, v.to(some[0].dtype)) for i, v in enumerate(values)]))

        return called

    with pytest.MonkeyPatch.context() as patch:
        unsearched(patch, keep)
        judge(with_rest(kernel), with_rest(lambda x: evaluate(graph, list(x))), leaves)


def test_other_inputs_get_none_and_only_asked_for_gradients_are_made(quick: None) -> None:
    kernel = kernel_of("norm and linear")
    x, w, v = CASES["norm and linear"].draw(torch.float32)
    x, v = x.detach(), v.detach()
    kernel(x, w, v).sum().backward()
    assert x.grad is None and v.grad is None and w.grad is not None
    assert [*kernel._gradients] == [("w",)]
    v.requires_grad_()
    kernel(x, w, v).sum().backward()
    kernel(x, w, v).sum().backward()
    assert [*kernel._gradients] == [("w",), ("w", "v")] and v.grad is not None


def test_lengths_get_none(quick: None) -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((4, 8), "float32", name="x")
    n = g.new_input((4,), "int32", name="n")
    rows = g.softmax(g.length_mask(g.new_input((4, 3, 8), "float32", name="y"), n))
    g.mark_output(rows * g.sum(x, 0))
    kernel = cs.superoptimize(g, target="h200")
    x, y = leaf(4, 8), leaf(4, 3, 8)
    lengths = torch.tensor([1, 8, 0, 5], dtype=torch.int32)
    names = [g.nodes[i].name for i in g.inputs]
    given = {"x": x, "n": lengths, "y": y}
    kernel([given[n] for n in names])[0].square().sum().backward()
    hidden = torch.arange(8) >= lengths[:, None, None]
    want_x, want_y = (t.detach().double().requires_grad_() for t in (x, y))
    weights = want_y.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    (weights * want_x.sum(0)).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), want_x.grad, rtol=1e-5, atol=1e-6)
    visible = (lengths > 0)[:, None, None].expand_as(y)
    torch.testing.assert_close(y.grad.double()[visible], want_y.grad[visible], rtol=1e-5, atol=1e-6)
    assert not y.grad[2].any()


# ---------------------------------------------------------------------------------------- outputs


def test_outputs_without_a_cotangent_count_as_zero(quick: None) -> None:
    graph = graph_of(lambda g, x, y: (g.exp(x), x * y, g.exp(y)), (4, 8), (4, 8))
    kernel = cs.superoptimize(graph, target="h200")
    x, y = leaf(4, 8), leaf(4, 8)
    first, second, third = kernel(x, y)
    [grad] = torch.autograd.grad(first.sum(), [x], retain_graph=True)
    torch.testing.assert_close(grad, x.exp())
    dx, dy = torch.autograd.grad(second.sum() + third.sum(), [x, y])
    torch.testing.assert_close(dx, y.detach())
    torch.testing.assert_close(dy, (x + y.exp()).detach())


def test_outputs_that_depend_on_nothing_that_needs_gradients_have_none(quick: None) -> None:
    graph = graph_of(lambda g, x, y: (g.exp(x), g.exp(y)), (4, 8), (4, 8))
    kernel = cs.superoptimize(graph, target="h200")
    x, y = leaf(4, 8), torch.randn(4, 8)
    first, second = kernel(x, y)
    assert first.requires_grad and not second.requires_grad


def test_inputs_without_a_derivative(quick: None) -> None:
    graph = graph_of(lambda g, x, y: (g.step(x), g.step(x) * y), (4, 8), (4, 8))
    kernel = cs.superoptimize(graph, target="h200")
    x, y = leaf(4, 8), leaf(4, 8)
    second = kernel(x, y)[1]
    second.sum().backward()
    assert x.grad is None and torch.equal(y.grad, (x > 0).float())
    assert not any(t.requires_grad for t in kernel(x, y.detach()))
    with pytest.raises(GraphError, match=r"no output depends on x"):
        kernel.gradient("x")


def test_outputs_that_are_one_value(quick: None) -> None:
    graph = graph_of(lambda g, x, y: (g.rms_norm(x + y), g.rms_norm(x + y)), (4, 8), (4, 8))
    kernel = cs.superoptimize(graph, target="h200")
    judge(
        kernel,
        lambda x, y: (torch.rms_norm(x + y, (8,), eps=1e-6), torch.rms_norm(x + y, (8,), eps=1e-6)),
        [leaf(4, 8), leaf(4, 8)],
    )


def test_a_cotangent_that_is_the_gradient(quick: None) -> None:
    kernel = cs.superoptimize(graph_of(lambda g, x, y: x + y, (4, 8), (8,)), target="h200")
    x, y = leaf(4, 8), leaf(8)
    d = torch.randn(4, 8)
    kernel(x, y).backward(d)
    torch.testing.assert_close(x.grad, d)
    torch.testing.assert_close(y.grad, d.sum(0))
    x.grad += 1  # not the cotangent itself
    kernel = cs.superoptimize(graph_of(lambda g, x, y: x + y, (4, 8), (4, 8)), target="h200")
    gradient = kernel.gradient()
    assert gradient.backward is None and "none is needed" in kernel.explain()
    x, y = leaf(4, 8), leaf(4, 8)
    d = torch.randn(4, 8)
    kernel(x, y).backward(d)
    x.grad += 1
    assert torch.equal(y.grad, d)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "other type", "odd address"])
def test_cotangents_in_any_layout(kind: str, quick: None) -> None:
    kernel = kernel_of("residual", torch.bfloat16)
    leaves = CASES["residual"].draw(torch.bfloat16)
    d = torch.randn(64, 128).bfloat16()
    if kind == "expanded":
        d = d[:1].expand(64, 128)
    given = {
        "expanded": d, "transposed": d.T.contiguous().T, "other type": d,
        "odd address": torch.cat([d.new_zeros(1), d.flatten()])[1:].view(64, 128),
    }[kind]  # fmt: skip
    want = torch.autograd.grad(kernel(*leaves), leaves, d.contiguous())
    y = kernel(*leaves)
    got = torch.autograd.grad(y.float(), leaves, given.float()) if kind == "other type" else (
        torch.autograd.grad(y, leaves, given))  # fmt: skip
    assert all(map(torch.equal, got, want))


# ---------------------------------------------------------------------------- what autograd can do


def test_nothing_changes_where_no_gradient_is_recorded(quick: None) -> None:
    kernel = kernel_of("linear")
    x, w = CASES["linear"].draw(torch.float32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not kernel(x, w).requires_grad
    assert not kernel(x.detach(), w.detach()).requires_grad
    assert not kernel._gradients


def test_lists_in_lists_out(quick: None) -> None:
    kernel = kernel_of("linear")
    x, w = CASES["linear"].draw(torch.float32)
    for results in (kernel([x, w]), kernel(inputs=[x, w])):
        assert isinstance(results, list) and results[0].grad_fn is not None


def test_backward_twice(quick: None) -> None:
    kernel = kernel_of("norm and linear")
    leaves = CASES["norm and linear"].draw(torch.float32)
    y = kernel(*leaves)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y.sum(), leaves)
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_saved_tensors_go_after_backward(quick: None) -> None:
    kernel = kernel_of("norm and linear")
    leaves = CASES["norm and linear"].draw(torch.float32)
    inner = leaves[0] * 1.0
    gone = weakref.ref(inner)
    y = kernel(inner, *leaves[1:])
    del inner
    assert gone() is not None
    y.sum().backward()
    assert gone() is None


@pytest.fixture
def uncollected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only what nobody refers to goes: reference cycles stay, and errors of searches are new."""
    uncompiled(monkeypatch)
    monkeypatch.setattr(pipeline, "_REGIONS", KnownRegions())
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def gone_after(call: Callable[[Tensor], Any]) -> bool:
    """True if neither the result of a call nor its input is kept alive."""
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    y = call(x)
    if y.requires_grad:
        torch.autograd.grad(y.sum(), x)
    references = weakref.ref(y), weakref.ref(x)
    del y, x
    return all(r() is None for r in references)


def test_first_calls_keep_nothing(uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their searches meet errors, and frames of an error have the tensors of their callers. In a
    CUDA graph, an earlier result that lives on makes the recording of a backward pass fail."""
    w = torch.randn(96, 128).bfloat16()
    g = graph_of(
        lambda g, x, y: g.matmul(g.rms_norm(x), g.transpose(y)), (64, 128), (96, 128),
        dtype="bfloat16",
    )  # fmt: skip
    kernel = cs.superoptimize(g, target="h200")
    assert gone_after(lambda t: kernel(t, w))
    program = cs.superoptimize(
        lambda t: F.linear(F.rms_norm(F.silu(t), (128,)), w), (torch.ones_like(w[:64]),),
        target="h200",
    )  # fmt: skip
    assert gone_after(program)
    assert gone_after(cs.ops.rms_norm)
    refused = long_rows(monkeypatch, 2)
    row = torch.randn(2, LONGEST + 1).bfloat16()

    def recovered(t: Tensor) -> Tensor:
        with suppress(GraphError):
            refused(row, t[:2, :1].contiguous()).sum().backward()
        return t.detach() * 2

    assert gone_after(recovered)
    assert isinstance(refused._gradients["y",], GraphError)


def test_inputs_changed_in_place_are_seen(quick: None) -> None:
    kernel = kernel_of("linear")
    x, w = CASES["linear"].draw(torch.float32)
    y = kernel(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_derivative_of_a_derivative_is_refused(quick: None) -> None:
    kernel = kernel_of("norm and linear")
    leaves = CASES["norm and linear"].draw(torch.float32)
    grads = torch.autograd.grad(kernel(*leaves).sum(), leaves, create_graph=True)
    plain = torch.autograd.grad(kernel(*leaves).sum(), leaves)
    assert all(map(torch.equal, grads, plain))
    # a penalty on the gradient: the cotangent is constant, what was kept is not
    with pytest.raises(GraphError, match=r"cannot be differentiated again; leave out create_graph"):
        grads[0].square().sum().backward()


def test_checkpointing(quick: None) -> None:
    kernel = kernel_of("norm and linear")
    leaves = CASES["norm and linear"].draw(torch.float32)
    d = torch.randn(64, 96)
    want = torch.autograd.grad(kernel(*leaves), leaves, d)
    for reentrant in (False, True):
        for t in leaves:
            t.grad = None
        y = checkpoint(lambda *t: kernel(*t) * 1.0, *leaves, use_reentrant=reentrant)
        y.backward(d)
        assert all(torch.equal(t.grad, w) for t, w in zip(leaves, want, strict=True))


def test_autocast(quick: None) -> None:
    kernel = kernel_of("linear", torch.bfloat16)
    x, w = CASES["linear"].draw(torch.bfloat16)
    want = torch.autograd.grad(kernel(x, w).float().square().sum(), [x, w])
    with torch.autocast("cpu", dtype=torch.float16):
        y = kernel(x, w)
        loss = y.float().square().sum()
        got = torch.autograd.grad(loss, [x, w])
    assert y.dtype is torch.bfloat16 and all(map(torch.equal, got, want))


def test_a_gradient_is_a_kernel_with_gradients(quick: None) -> None:
    """The derivative by hand can be differentiated: it is a kernel like any other."""
    graph = graph_of(lambda g, x: g.exp(x * 2.0), (4, 8))
    kernel = cs.superoptimize(graph, target="h200")
    made = kernel.gradient("x").backward
    assert isinstance(made, Kernel)
    x, d = leaf(4, 8), torch.ones(4, 8)
    names = [made.graph.nodes[i].name for i in made.graph.inputs]
    y = made([{"x": x}.get(n, d) for n in names])[0]
    [second] = torch.autograd.grad(y.sum(), [x])
    torch.testing.assert_close(second, 4 * torch.exp(2 * x.detach()))


def test_threads_make_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    unsearched(monkeypatch)
    kernel = kernel_of("norm and linear")
    made: list[Any] = []
    real = kernel._differentiate
    kernel._differentiate = lambda *args: (made.append(args), real(*args))[1]  # type: ignore[misc]
    leaves = CASES["norm and linear"].draw(torch.float32)
    calls = [kernel(*leaves).sum() for _ in range(4)]
    assert not made
    threads = [threading.Thread(target=y.backward) for y in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_gradients_are_made_when_they_are_needed_or_asked_for(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsearched(monkeypatch)
    case = CASES["norm and linear"]
    graph = kernel_of("norm and linear").graph
    kernel = cs.superoptimize(graph, target="h200", gradients=gradients)
    leaves = case.draw(torch.float32)
    y = kernel(*leaves)
    assert y.requires_grad and len(kernel._gradients) == gradients
    y.sum().backward()
    first = [t.grad for t in leaves]
    second = torch.autograd.grad(kernel(*leaves).sum(), leaves)  # with values that are kept
    for mine, later, exact in zip(
        first, second, torch.autograd.grad(case.theirs(*leaves).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, later, rtol=1e-4, atol=1e-4)
    assert len(kernel._gradients) == 1


def test_a_training_loop(quick: None) -> None:
    """Weights are changed in place between steps; the loss goes down as it does with PyTorch."""

    def losses(call: Any) -> list[float]:
        torch.manual_seed(0)
        leaves = CASES["gated MLP"].draw(torch.float32)
        x, parameters = leaves[0].detach(), leaves[1:]
        target = torch.randn(64, 128)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        found = []
        for _ in range(6):
            loss = (call(x, *parameters) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    mine, theirs = losses(kernel_of("gated MLP")), losses(CASES["gated MLP"].theirs)
    assert mine[-1] < mine[0]
    assert mine == pytest.approx(theirs, rel=1e-4)


# ---------------------------------------------------------------------------------------- refusals


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda kernel, x: torch.vmap(kernel)(leaf(3, 4, 8)),
    "vmap, no gradient": lambda kernel, x: torch.vmap(kernel)(torch.randn(3, 4, 8)),
    "grad": lambda kernel, x: torch.func.grad(lambda t: kernel(t).sum())(x),
    "batched": lambda kernel, x: torch.autograd.grad(
        kernel(x), [x], torch.randn(3, 4, 8), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str, quick: None) -> None:
    kernel = cs.superoptimize(graph_of(lambda g, x: g.exp(x), (4, 8)), target="h200")
    with pytest.raises(OperatorError, match=r"under vmap .*one more leading dimension"):
        TRANSFORMS[name](kernel, leaf(4, 8))


def test_out_and_gradients(quick: None) -> None:
    kernel = kernel_of("linear")
    x, w = CASES["linear"].draw(torch.float32)
    with pytest.raises(GraphError, match=r"input x requires a gradient, and what is written to"):
        kernel(x, w, out=torch.empty(64, 96))


def test_wrong_inputs_are_named_before_anything_is_made(quick: None) -> None:
    kernel = kernel_of("linear")
    x, w = CASES["linear"].draw(torch.float32)
    with pytest.raises(ShapeError, match="input w has shape"):
        kernel(x, w[:-8].contiguous())
    assert not kernel._gradients


def test_unknown_inputs(quick: None) -> None:
    kernel = kernel_of("linear")
    with pytest.raises(GraphError, match=r"'k'.*is not an input of the graph; it has: x, w"):
        kernel.gradient("k")


def test_a_program_without_any_gradient(quick: None) -> None:
    g = cs.new_kernel_graph()
    g.mark_output(g.argmax(g.new_input((4, 64), "float32", "x"), 1))
    with pytest.raises(GraphError, match=r"kernel.gradient\(\): no input has a gradient"):
        cs.superoptimize(g, target="h200").gradient()


def test_a_weight_with_symbolic_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient adds up rows whose number is not known: the loop ends where the call says."""
    uncompiled(monkeypatch)
    name, rows = "norm and linear", cs.symbol("M", 64)
    kernel = kernel_of(name, torch.bfloat16, rows=rows)
    judge(kernel, CASES[name].theirs, CASES[name].draw(torch.bfloat16, rows=40))


def long_rows(monkeypatch: pytest.MonkeyPatch, rows: Dim) -> Kernel:
    """``X s`` with a factor for each row, whose gradient adds up more elements than a cluster
    holds, where rows are not divided among blocks."""

    def refuse(*_: object) -> None:
        raise SearchError(f"a cluster holds {LONGEST}")

    monkeypatch.setattr(form, "_check_parts", refuse)
    shapes = (rows, LONGEST + 1), (rows, 1)
    graph = graph_of(lambda g, x, s: x * s, *shapes, dtype="bfloat16")
    return cs.superoptimize(graph, target="h200")


def test_a_gradient_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the rows is found; that of the factors is refused when it is asked for, and
    not searched for again."""
    uncompiled(monkeypatch)
    kernel = long_rows(monkeypatch, cs.symbol("M", 4))
    x = torch.randn(2, LONGEST + 1).bfloat16().requires_grad_()
    s = torch.randn(2, 1).bfloat16().requires_grad_()
    kernel(x, s.detach()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[:, :1], s.detach())
    message = (
        r"kernel\(x\[M, 262145\], .*\): no kernels compute the gradient of y: .*cluster holds 26214"
        r".*Make M a number, call it under torch\.no_grad\(\), detach .*torch\.compile.*cutesuper\."
    )
    y = kernel(x.detach(), s)
    assert torch.equal(y, x * s)
    with pytest.raises(GraphError, match=message):
        y.sum().backward()
    monkeypatch.setattr("cutesuper.differentiate._cheapest", None)
    with pytest.raises(GraphError, match=message):
        kernel(x.detach(), s).sum().backward()
    with torch.no_grad():
        assert kernel(x, s).shape == x.shape


def test_loaded_and_given_programs(tmp_path: Path) -> None:
    graph = graph_of(lambda g, x, y: x * y, (4, 64), (4, 64))
    kernel = cs.superoptimize(graph, target="h200")
    x, y = leaf(4, 64), leaf(4, 64)
    given = cs.compile_mugraph(graph, kernel.mugraph, target="h200")
    with pytest.raises(GraphError, match=r"has no backward; differentiate cutesuper\.super"):
        given(x, y)
    try:
        kernel.export(tmp_path / "mul.so")
    except cs.errors.CompileError as error:
        pytest.skip(f"cannot link here: {error}")
    program = cs.load(tmp_path / "mul.so")
    with pytest.raises(GraphError, match=r"input x requires a gradient, and a loaded program has"):
        program(x, y)
    with torch.no_grad():
        assert torch.equal(program(x, y), kernel(x, y))


# ------------------------------------------------------------------------------------- compiled


def test_both_passes_are_kernels_to_look_into(tmp_path: Path) -> None:
    kernel = kernel_of("layer norm", torch.bfloat16)
    judge(kernel, CASES["layer norm"].theirs, CASES["layer norm"].draw(torch.bfloat16))
    gradient = kernel.gradient("x", "w", "v")
    assert gradient is kernel.gradient() is kernel.gradient("v", "x", "w")
    assert gradient.backward is not None
    saved = ", ".join(gradient.split.saved)
    assert "see kernel.gradient('x', 'w', 'v')" in kernel.explain()
    assert not saved or f"x, w, v: forward keeps {saved}, see" in kernel.explain()
    for made in (gradient.forward, gradient.backward):
        assert "== muGraph ==" in made.explain()
        made.draw(tmp_path / "pass.html")
        assert "<svg" in (tmp_path / "pass.html").read_text()
    try:
        gradient.backward.export(tmp_path / "backward.so")
    except cs.errors.CompileError as error:
        pytest.skip(f"cannot link here: {error}")
    graph = gradient.backward.graph
    values = [
        torch.randn(shape).to(graph.nodes[i].dtype.torch)
        for shape, i in zip(shapes_of(graph), graph.inputs, strict=True)
    ]
    loaded = cs.load(tmp_path / "backward.so")
    assert all(map(torch.equal, loaded(values), gradient.backward(values)))


def test_the_cheaper_cut_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that multiplies has nowhere to write statistics of its rows: kept ones cost two more
    kernels, computed again they cost next to nothing."""
    uncompiled(monkeypatch)
    kernel = kernel_of("norm and linear", torch.bfloat16)
    gradient = kernel.gradient()
    assert gradient.forward is kernel and "keeps nothing" in kernel.explain()
    softmax = kernel_of("softmax", torch.bfloat16)
    assert softmax.gradient().split.saved


def test_weights_that_are_trained_are_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer writes them, in a kernel that may still run where the next step begins."""
    unsearched(monkeypatch, keep=False)
    g = cs.new_kernel_graph()
    x = g.new_input((16, 64), "bfloat16", name="x")
    w, v = (g.new_input((64, 64), "bfloat16", name=n, constant=True) for n in "wv")
    g.mark_output((x @ w) * (x @ v))

    def constant(kernel: Kernel) -> set[str]:
        return {n.name for n in kernel.graph.nodes if n.constant}

    kernel = cs.superoptimize(g, target="h200", dependent_launch=True)
    gradient = kernel.gradient("x", "w")
    assert gradient.backward is not None and constant(kernel) == {"w", "v"}
    assert constant(gradient.forward) == constant(gradient.backward) == {"v"}
    gradient = kernel.gradient("x")
    assert gradient.forward is kernel


# ------------------------------------------------------------------------- programs of PyTorch


class Mixed(nn.Module):
    """PyTorch's operators before, between and behind regions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.gain = nn.Parameter(torch.rand(32) + 0.5)
        self.first, self.second = nn.Linear(32, 48), nn.Linear(96, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.rms_norm(self.table(ids), (32,), self.gain, 1e-6)
        h = F.gelu(self.first(x))
        return self.second(torch.cat([h, h.flip(-1)], -1)) + x, x


MODELS: dict[str, Any] = {
    "norm and linear": lambda: (nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 48)), randn(3, 5, 32)),
    "gated MLP": lambda: (GatedMLP(), randn(3, 5, 32)),
    "decoder layer": lambda: (Block(), randn(3, 5, 32)),
    "mixed": lambda: (Mixed(), torch.randint(16, (3, 5))),
    "angles as complex numbers": lambda: (Rotated(), randn(3, 5, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_train(name: str, quick: None) -> None:
    """Parameters of the module itself get the gradients, and are read anew after each step."""
    torch.manual_seed(0)
    module, x = MODELS[name]()
    theirs = copy.deepcopy(module)
    program = cs.superoptimize(module, (x,), target="h200")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, theirs)]
    for _ in range(3):
        given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (x, x)]
        for call, t, optimizer in zip((program, theirs), given, optimizers, strict=True):
            optimizer.zero_grad()
            made = call(t)
            loss = sum(y.float().square().mean() for y in (made if name == "mixed" else [made]))
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
        for (what, mine), want in zip(
            [*module.named_parameters(), ("x", given[0])], [*theirs.parameters(), given[1]],
            strict=True,
        ):  # fmt: skip
            if want.grad is None:
                assert mine.grad is None, what
                continue
            torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-6)


def test_the_decorator_with_and_without_gradients(quick: None) -> None:
    @cs.superoptimize(target="h200")
    def gate(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x) * y

    x, y = leaf(4, 64), torch.randn(4, 64)
    gate(x * 1.0, y).sum().backward()
    other = x.detach().clone().requires_grad_()
    (F.gelu(other) * y).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    with torch.no_grad():
        assert not gate(x, y).requires_grad
    assert len(gate._programs) == 1


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return x / scale


STOPPED: dict[str, tuple[Any, str]] = {
    "detach": (lambda x: x * x.detach(), r"stops gradients \(detach.*test_gradients\.py:\d+"),
    "no_grad": (_scaled, r"stops gradients \(wrap_with_set_grad_enabled"),
    "its own formula": (lambda x: Straight.apply(x) + 1, r"calls Straight, a torch\.autograd"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", STOPPED)
def test_what_changes_gradients_and_not_values_is_refused(
    name: str, recorded: bool, quick: None
) -> None:
    """The same whether gradients are recorded during the trace or not."""
    fn, message = STOPPED[name]
    x = leaf(4, 64)
    with torch.set_grad_enabled(recorded):
        program = cs.superoptimize(fn, (x,), target="h200")
    y = program(x)
    torch.testing.assert_close(y, fn(x))
    with pytest.raises(GraphError, match=rf"requires a gradient, and it .*{message}.*take that"):
        y.sum().backward()
    torch.testing.assert_close(program(x.detach()), fn(x.detach()))
    assert torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function"


def test_positions_may_be_computed_without_gradients(quick: None) -> None:
    """As rotary embeddings do: nothing that may require a gradient goes in."""

    def rotated(x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = torch.arange(5).float().cos()[:, None]
        return x * angles

    x = leaf(5, 64)
    cs.superoptimize(rotated, (x,), target="h200")(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(5).float().cos()[:, None].expand(5, 64))


def test_a_float32_output_of_a_16_bit_product(quick: None) -> None:
    graph = cs.new_kernel_graph()
    x, w = (graph.new_input((64, 64), "float16", name=n) for n in "xw")
    graph.mark_output(x @ w, "float32")
    kernel = cs.superoptimize(graph, target="h200")
    given = [leaf(64, 64, dtype=torch.float16) for _ in "xw"]
    dy = torch.randn(64, 64)
    found = torch.autograd.grad(kernel(*given), given, dy)
    wanted = dy @ given[1].float().T, given[0].float().T @ dy
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.float(), want, rtol=5e-3, atol=5e-2)
