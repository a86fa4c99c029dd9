"""Tensors without elements: graphs with an extent of 0, and symbols that are 0 at a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cutesuper as cs
from cutesuper.errors import GraphError, SearchError, ShapeError
from cutesuper.ir.graph import KernelGraph

#: a program in kernel graphs, the same in PyTorch, and the shapes of its inputs
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "no rows": (lambda g, x: g.relu(x), lambda x: x.relu(), ((0, 128),)),
    "sum": (lambda g, x: g.sum(x, 1), lambda x: x.sum(1, True), ((8, 0),)),
    "mean": (lambda g, x: g.mean(x, 1), lambda x: x.mean(1, True), ((8, 0),)),
    "product": (lambda g, x: g.prod(x, 1), lambda x: x.prod(1, True), ((8, 0),)),
    "maxima of no rows": (lambda g, x: g.max(x, 1), lambda x: x.amax(1, True), ((0, 8),)),
    "logsumexp": (lambda g, x: g.logsumexp(x, 1), lambda x: x.logsumexp(1, True), ((8, 0),)),
    "softmax": (lambda g, x: g.softmax(x, 1), lambda x: x.softmax(1), ((8, 0),)),
    "layer norm": (lambda g, x: g.layer_norm(x), lambda x: F.layer_norm(x, (8,)), ((0, 8),)),
    "cumsum": (lambda g, x: g.cumsum(x, 1), lambda x: x.cumsum(1), ((8, 0),)),
    "repeated": (lambda g, x, y: g.add(x, y), torch.add, ((8, 1), (8, 0))),
    "beside others": (
        lambda g, x, y: g.add(g.sum(x, 1), y), lambda x, y: x.sum(1, True) + y, ((8, 0), (8, 16))),
    "inner": (lambda g, x, y: g.matmul(x, y), torch.matmul, ((16, 0), (0, 8))),
    "put together": (
        lambda g, x, y: g.relu(g.concat([x, y], 1)), lambda x, y: torch.cat([x, y], 1).relu(),
        ((4, 0), (4, 8))),
    "no queries": (
        lambda g, *qkv: g.scaled_dot_product_attention(*qkv), F.scaled_dot_product_attention,
        ((1, 2, 0, 64), (1, 2, 8, 64), (1, 2, 8, 64))),
}  # fmt: skip


def graph_of(build: Callable[..., Any], *shapes: tuple[Any, ...]) -> KernelGraph:
    g = cs.new_kernel_graph()
    g.mark_output(build(g, *(g.new_input(s, "float32") for s in shapes)))
    return g


def checked(kernel: Any, theirs: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Check results and gradients against PyTorch's."""
    mine, other = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    y, want = kernel(*mine), theirs(*other)
    torch.testing.assert_close(y, want, equal_nan=True)
    y.sum().backward()
    want.sum().backward()
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_run_without_kernels(name: str) -> None:
    build, theirs, shapes = PROGRAMS[name]
    g = cs.loads(cs.dumps(graph_of(build, *shapes)))
    assert isinstance(g, KernelGraph)
    kernel = cs.superoptimize(g, target="h200")
    assert kernel.kernels == () and "no kernels" in repr(kernel)
    checked(kernel, theirs, [torch.randn(s) for s in shapes])


def test_what_a_kernel_tells_without_any(tmp_path: Path) -> None:
    kernel = cs.superoptimize(graph_of(lambda g, x: g.softmax(x), (8, 0)), target="h200")
    assert kernel.explain().startswith("no kernels: X[8, 0] has no elements, and PyTorch computes")
    assert (kernel.ptx, kernel.sass, kernel.predicted_us) == ("", "", 0)
    assert kernel.resources.registers == 0 and not kernel.resources.instructions
    for name in ("program.svg", "program.html"):
        kernel.draw(tmp_path / name)
    with pytest.raises(GraphError, match="extent of 0, so there are no kernels to write"):
        kernel.export(tmp_path / "program.so")
    with pytest.raises(GraphError, match="extent of 0, so there are no kernels; call it and back"):
        kernel.gradient("X")
    out = torch.empty(8, 0, dtype=torch.float32)
    assert kernel(torch.randn(8, 0), out=out) is out
    with pytest.raises(ShapeError, match=r"input X has shape \[8, 1\], must be \[8, 0\]"):
        kernel(torch.randn(8, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.max(x, 1),
        lambda g, x: g.argmax(x, 1),
        lambda g, x: g.apply("amax", x, dims=[0, 1]),
    ],
)
def test_choosing_one_of_no_elements_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ShapeError, match=r"\(\[8, 0\]\): there is no element along dim=1 to choos"):
        graph_of(build, (8, 0))


def test_there_is_nothing_to_search() -> None:
    with pytest.raises(SearchError, match=r"extent of 0.*superoptimize\(graph\) runs it"):
        cs.mugraphs(graph_of(lambda g, x: g.relu(x), (0, 8)), target="h200")


def test_derivatives_of_means_of_nothing() -> None:
    backward = cs.grad(graph_of(lambda g, x: g.mean(x, 1), (8, 0)))
    assert [backward.nodes[i].shape for i in backward.outputs] == [(8, 0)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_run_without_regions(name: str) -> None:
    _, f, shapes = PROGRAMS[name]
    inputs = tuple(torch.randn(s) for s in shapes)
    checked(cs.superoptimize(f, inputs, target="h200"), f, list(inputs))


def rows() -> KernelGraph:
    return graph_of(lambda g, x, w: g.silu(g.mul(x, w)), (cs.symbol("M", 16), 64), (64,))


def test_symbols_that_are_0(tmp_path: Path) -> None:
    kernel = cs.superoptimize(rows(), target="h200")
    given = [torch.randn(0, 64), torch.randn(64)]
    checked(kernel, lambda x, w: F.silu(x * w), given)
    kernel.export(tmp_path / "rows.so")
    assert cs.load(tmp_path / "rows.so")(*given).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.ptx
def test_tensors_without_elements_on_a_device() -> None:
    kernel, w = cs.superoptimize(rows()), torch.randn(64).cuda()
    checked(kernel, lambda x, w: F.silu(x * w), [torch.randn(0, 64).cuda(), w])
    assert kernel(torch.randn(3, 64).cuda(), w).shape == (3, 64)
    total = cs.superoptimize(graph_of(lambda g, x: g.sum(x, 1), (8, 0)))
    assert torch.equal(total(torch.randn(8, 0).cuda()), torch.zeros(8, 1).cuda())
