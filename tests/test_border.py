"""Parts of inputs, and outputs that are put together from parts: what kernels read and write of
larger tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import GraphError, LoweringError, OperatorError
from cutesuper.ir.block import MuGraph, Part
from cutesuper.ir.border import inside, inside_mugraph, whole_mugraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.text import mugraph_text
from cutesuper.show.page import mugraph_page
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.numeric import compare
from tests import zoo
from tests.test_gpu import check
from tests.tracing import check as check_traced
from tests.tracing import randn, traced

Build = Callable[[KernelGraph, list[Tensor]], Any]
ROWS = cs.symbol("M", 16)


def graph_of(shapes: list[tuple[Any, ...]], build: Build, dtype: str = "float16") -> KernelGraph:
    """A graph of inputs of these shapes; what ``build`` returns is its outputs."""
    g = cs.new_kernel_graph()
    made = build(g, [g.new_input(s, dtype) for s in shapes])
    for t in made if isinstance(made, tuple) else (made,):
        g.mark_output(t)
    return g


def found_for(g: KernelGraph) -> MuGraph:
    """The chosen muGraph of a graph."""
    options = pipeline.Options(H200, tuned=False)
    return pipeline.choose(g, options)[1].candidate.mugraph


def swiglu(g: KernelGraph, t: list[Tensor]) -> Tensor:
    """Both halves of rows."""
    return g.mul(g.silu(g.slice(t[0], 1, 0, 16)), g.slice(t[0], 1, 16, 32))


#: inputs, the program, and the parts that its kernels read and write, sorted
PROGRAMS: dict[str, tuple[list[tuple[Any, ...]], Build, list[str]]] = {
    "a piece of an input": (
        [(16, 32)], lambda g, t: g.exp(g.slice(t[0], 1, 5, 9)), ["X[:, 5:9]"]),
    "halves": ([(16, 32)], swiglu, ["X[:, 0:16]", "X[:, 16:32]"]),
    "symbolic rows": ([(ROWS, 32)], swiglu, ["X[:, 0:16]", "X[:, 16:32]"]),
    "pieces of two dimensions": (
        [(16, 32)], lambda g, t: g.exp(g.slice(g.slice(t[0], 1, 8, 32), 0, 4, 9)),
        ["X[4:9, 8:32]"]),
    "a slice of a slice": (
        [(16, 32)], lambda g, t: g.exp(g.slice(g.slice(t[0], 1, 8, 32), 1, 4, 9)), ["X[:, 12:17]"]),
    "columns put together": (
        [(16, 3), (16, 5)], lambda g, t: g.concat([g.exp(t[0]), t[1]], 1),
        ["out0[:, 0:3]", "out0[:, 3:8]"]),
    "one input twice": (
        [(3, 16), (5, 16)], lambda g, t: g.concat([t[0], t[1], t[0]], 0),
        ["out0[0:3, :]", "out0[3:8, :]", "out0[8:11, :]"]),
    "a value stored twice": (
        [(16, 8), (16, 8)],
        lambda g, t: (g.concat([s := g.add(*t), t[1]], 1), s),
        ["out0[:, 0:8]", "out0[:, 8:16]"]),
    "a reduction over parts": (
        [(16, 3), (16, 5)], lambda g, t: g.softmax(g.concat(t, 1)),
        ["out0[:, 0:3]", "out0[:, 3:8]"]),
    "pieces that meet": (
        [(16, 3), (16, 5), (16, 8)], lambda g, t: g.mul(g.concat(t[:2], 1), t[2]),
        ["A[:, 0:3]", "A[:, 3:8]", "out0[:, 0:3]", "out0[:, 3:8]"]),
    "both dimensions put together": (
        [(2, 3), (2, 5), (4, 8)], lambda g, t: g.concat([g.concat(t[:2], 1), t[2]], 0),
        ["A[:, 0:3]", "A[:, 3:8]", "out0[0:2, 0:3]", "out0[0:2, 3:8]", "out0[2:6, 0:3]",
         "out0[2:6, 3:8]"]),
    "a packed product": (
        [(16, 32), (32, 48), (32, 24)],
        lambda g, t: g.concat([g.matmul(t[0], g.slice(t[1], 1, 16, 48)), g.matmul(t[0], t[2])], 1),
        ["W[:, 16:48]", "out0[:, 0:32]", "out0[:, 32:56]"]),
    "a packed sum": (
        [(16, 32), (8, 16), (24, 16)], lambda g, t: g.matmul(t[0], g.concat(t[1:], 0)),
        ["X[:, 0:8]", "X[:, 8:32]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_read_and_write_parts(name: str) -> None:
    shapes, build, parts = PROGRAMS[name]
    g = graph_of(shapes, build)
    mu = found_for(g)
    assert sorted(t.name for t in mu.tensors.values() if t.part) == parts
    assert cs.verify(g, mu, full=True) and compare(g, mu)
    assert cs.loads(cs.dumps(mu)) == mu
    assert all(p in mugraph_text(mu) and p in mugraph_page(mu) for p in parts)


def test_a_graph_and_its_program_have_one_border() -> None:
    g = graph_of(*PROGRAMS["pieces that meet"][:2])
    inner, border = inside(g.expanded())
    mu = found_for(g)
    names = [inner.nodes[i].name for i in inner.inputs]
    apart, same = inside_mugraph(mu)
    assert same == border and list(apart.inputs) == names and len(apart.outputs) == 2
    assert whole_mugraph(apart, g, border) == mu
    plain = graph_of([(4, 8)], lambda g, t: g.exp(t[0])).expanded()
    assert inside(plain)[0] is plain and inside(plain)[1].whole


def test_another_part_is_another_program() -> None:
    """The verifier compares places, too: of equal shapes, another one is wrong."""
    g = graph_of(*PROGRAMS["halves"][:2])
    mu = found_for(g)
    first, second = mu.parts("X")
    t = mu.tensors
    swapped = t | {first: replace(t[first], part=t[second].part),
                   second: replace(t[second], part=t[first].part)}  # fmt: skip
    assert not cs.verify(g, replace(mu, tensors=swapped))
    assert not compare(g, replace(mu, tensors=swapped))
    moved = t | {first: replace(t[first], part=Part("X", (0, 8)))}
    assert "other parts" in cs.verify(g, replace(mu, tensors=moved)).summary()


ILLEGAL = {
    "does not lie in": ("out0[:, 0:3]", Part("out0", (0, 6))),
    "not all of it": ("out0[:, 0:3]", Part("out0", (0, 2))),
    "parts are of inputs or outputs": ("out0[:, 0:3]", Part("nothing", (0, 0))),
}


@pytest.mark.parametrize("message", ILLEGAL)
def test_parts_lie_in_tensors(message: str) -> None:
    mu = found_for(graph_of(*PROGRAMS["columns put together"][:2]))
    name, part = ILLEGAL[message]
    wrong = mu.tensors | {name: replace(mu.tensors[name], part=part)}
    with pytest.raises(GraphError, match=message):
        check_mugraph(replace(mu, tensors=wrong))


def test_gradients_of_parts_are_parts() -> None:
    g = graph_of([(16, 32), (16, 8)], lambda g, t: g.concat([swiglu(g, t), t[1]], 1))
    d = cs.grad(g, ["X", "W"])
    mu = found_for(d)
    assert [bool(mu.parts(n)) for n in mu.outputs] == [True, False]
    assert cs.verify(d, mu) and compare(d, mu)


def test_what_bulk_copies_cannot_read_is_copied() -> None:
    shapes: list[tuple[Any, ...]] = [(16, 32), (24, 8)]
    g = graph_of(shapes, lambda g, t: g.matmul(g.slice(t[0], 1, 5, 29), t[1]))
    mu = found_for(g)
    assert len(mu.steps) == 2 and mu.steps[0].reads == ("X[:, 5:29]",)
    assert cs.verify(g, mu)
    aligned = found_for(graph_of(shapes, lambda g, t: g.matmul(g.slice(t[0], 1, 8, 32), t[1])))
    name = "X[:, 8:32]"
    moved = replace(aligned.tensors[name], part=Part("X", (0, 5)))
    with pytest.raises(LoweringError, match="do not all begin and end at multiples of 16 bytes"):
        make_plan(aligned.steps[0], aligned.tensors | {name: moved}, H200)


@pytest.mark.gpu
@pytest.mark.ptx
def test_rows_of_parts() -> None:
    """Pieces that begin anywhere, and outputs of pieces that begin anywhere."""

    def build(g: KernelGraph, t: list[Tensor]) -> Any:
        a, b = g.slice(t[0], 1, 5, 8), g.slice(t[0], 1, 8, 32)
        return g.concat([g.rms_norm(b), g.exp(a)], 1), g.softmax(g.slice(t[0], 0, 3, 10))

    g = graph_of([(37, 32)], build)
    check(cs.superoptimize(g), zoo.draw(g, 1, "cuda"))


@pytest.mark.gpu
@pytest.mark.ptx
def test_products_of_parts() -> None:
    """Operands, a bias and a residual in larger tensors, and a result that is a part of one."""

    def build(g: KernelGraph, t: list[Tensor]) -> Any:
        x, w, b, r = t
        y = g.add(g.matmul(x, g.slice(w, 1, 32, 96)), g.slice(b, 0, 64, 128))
        return g.concat([g.add(y, g.slice(r, 1, 16, 80)), g.slice(r, 1, 0, 16)], 1)

    g = graph_of([(48, 64), (64, 96), (128,), (48, 128)], build)
    kernel = cs.superoptimize(g)
    check(kernel, zoo.draw(g, 2, "cuda"))
    assert len(kernel.kernels) == 2


@pytest.mark.gpu
@pytest.mark.ptx
def test_attention_of_packed_heads() -> None:
    def build(g: KernelGraph, t: list[Tensor]) -> Any:
        q, k, v = (g.slice(t[0], 2, 64 * i, 64 * i + 64) for i in range(3))
        return g.scaled_dot_product_attention(q, k, v, True)

    g = graph_of([(2, 32, 192)], build)
    kernel = cs.superoptimize(g)
    check(kernel, zoo.draw(g, 3, "cuda"))
    assert len(kernel.kernels) == 1


@pytest.mark.gpu
def test_exports_work_on_parts(tmp_path: Path) -> None:
    """A part of an output is written in one launch and read in the next, which writes another."""

    def build(g: KernelGraph, t: list[Tensor]) -> Any:
        y = g.matmul(t[0], g.slice(t[1], 1, 0, 64))
        return g.concat([y, g.matmul(g.softmax(y), t[2])], 1)

    g = graph_of([(64, 64), (64, 96), (64, 32)], build)
    kernel, inputs = cs.superoptimize(g), zoo.draw(g, 4, "cuda")
    [y] = check(kernel, inputs)
    kernel.export(tmp_path / "x.so", header=tmp_path / "x.h")
    assert torch.equal(cs.load(tmp_path / "x.so")(*inputs), y)


# ------------------------------------------------------------------------------ traced functions


def heads(x: torch.Tensor, width: int = 32) -> list[torch.Tensor]:
    """Queries, keys and values ``[B, H, L, D]`` of a packed projection ``[B, L, 3 H D]``."""
    return [t.unflatten(-1, (-1, width)).transpose(1, 2) for t in x.chunk(3, -1)]


def attention(x: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


#: shapes of the arguments, a function, the parts of inputs that its kernels read, and the number of
#: parts that they write
FUNCTIONS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any], list[str], int]] = {
    "halves": ([(16, 48)], lambda x: F.silu(x[..., :24]) * x[..., 24:],
               ["X[:, 0:24]", "X[:, 24:48]"], 0),
    "one column": ([(4, 5, 16)], lambda x: x[:, 3].relu(), ["X[:, 3:4, :]"], 0),
    "stacked": ([(4, 16), (4, 16)], lambda x, y: torch.stack([x * 2, y.relu()], 1), [], 2),
    "columns of a weight": ([(16, 32), (32, 48)], lambda x, w: x @ w[:, 16:], ["X[:, 16:48]"], 0),
    "packed heads": ([(2, 16, 192)], attention,
                     ["X[:, :, 0:2, :]", "X[:, :, 2:4, :]", "X[:, :, 4:6, :]"], 0),
    "a norm of what is put together": (
        [(16, 8), (16, 16)], lambda x, y: F.rms_norm(torch.cat([x, y], -1), (24,)), [], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_read_and_write_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, f, read, written = FUNCTIONS[name]
    inputs = [randn(*s, dtype=torch.float16) for s in shapes]
    program = traced(monkeypatch, f, inputs)
    found = [inside(r.kernel.graph.expanded()) for r in program.regions]
    names = [n.name for g, _ in found for n in g.nodes if n.operator == "input" and "[" in n.name]
    assert names == read
    assert sum(bool(p.starts) for _, border in found for p in border.outputs) == written
    check_traced(program, f, inputs)


def test_arguments_that_are_parts_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are counted from the argument, wherever it begins, and whatever its strides are."""
    big = randn(7, 16, 192)
    program = traced(monkeypatch, attention, [big[3:5]])
    for x in (big[3:5], big[1:3], randn(192, 2, 16).permute(1, 2, 0)):
        check_traced(program, attention, [x])


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 2, 5), (1, 2, 2)])
def test_pieces_behind_an_extent_of_one_are_put_together(shape: tuple[int, ...]) -> None:
    def pair(x: torch.Tensor) -> torch.Tensor:
        y = x.mean(1, keepdim=True)
        return torch.cat([y, y], -1)

    x = torch.randn(shape)
    program = cs.superoptimize(pair, (x,), target="h200")
    assert torch.allclose(program(x), pair(x), atol=1e-6)


def test_a_scan_over_pieces_is_refused() -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((2, 4), name="x")
    g.mark_output(g.cumsum(g.concat([x, x], 1)))
    with pytest.raises(OperatorError, match="turn the parts before"):
        g.expanded()


def test_sums_of_pieces_are_float32_between_kernels() -> None:
    g = cs.new_kernel_graph()
    x, y, w = (g.new_input(s, name=n) for n, s in (("x", (4, 8)), ("y", (4, 8)), ("w", (16, 8))))
    g.mark_output(g.matmul(g.concat([x, y], 1), w))
    made = [n for n in g.expanded().nodes if n.operator in ("matmul", "add")]
    assert [n.dtype.name for n in made] == ["float32", "float32", "float16"]


@pytest.mark.parametrize("joined", [False, True])
def test_outputs_in_a_shorter_type_are_not_read_again(joined: bool) -> None:
    g = cs.new_kernel_graph()
    x, y = (g.new_input((2, 12, 2), "float32", name=n) for n in "xy")
    z = g.silu(y)
    g.mark_output(g.concat([x, z], 2) if joined else z, "bfloat16")
    g.mark_output(g.mul(1.0, z))
    if not joined:
        g.mark_output(g.exp(x))
    for candidate in cs.mugraphs(g, target="h200").candidates:
        reads = {n for step in candidate.mugraph.steps for n in step.reads}
        assert not any(candidate.mugraph.tensors[n].dtype.name == "bfloat16" for n in reads)
