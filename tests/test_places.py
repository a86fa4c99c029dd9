"""Places of maxima: argmax in graphs, in the field, in traced functions and in kernels."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

import cutesuper as cs
from cutesuper.errors import CutesuperError, GraphError
from cutesuper.ir.block import STORE, AxisKind, MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import dumps, loads
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify
from cutesuper.verify.numeric import compare
from cutesuper.verify.torchdomain import TorchDomain, TorchValue
from tests.mutants import change
from tests.tracing import check, traced


def places(
    shape: tuple[int, ...],
    dim: int = 1,
    dtype: str = "float32",
    of: Callable[..., Any] = lambda g, x: x,
    values: bool = True,
) -> KernelGraph:
    """The places of the largest elements, and these."""
    g = cs.new_kernel_graph()
    x = of(g, g.new_input(shape, dtype, name="x"))
    g.mark_output(g.argmax(x, dim))
    if values:
        g.mark_output(g.max(x, dim))
    return g


def best(g: KernelGraph) -> MuGraph:
    return search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph


def odd_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with equal elements, NaN, infinities, zeros of both signs, and nothing but -inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = -inf
    x[1, 2], x[1, 3], x[1, 7] = inf, nan, nan
    x[2] = 1.5
    x[3], x[3, 0], x[3, 5] = 0.0, -0.0, -0.0
    return x


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((64, 24), 1), ((64, 24), 0), ((3, 7, 40), 1), ((3, 100_000), 1), ((5000,), 0)],
    ids=str,
)  # fmt: skip
def test_places_are_searched_and_verified(shape: tuple[int, ...], dim: int) -> None:
    g = places(shape, dim, values=False)
    found = [c.mugraph for c in search(g, H200).candidates]
    assert all(verify(g, mu).equal for mu in found)
    assert compare(g, found[0])
    assert all(loads(dumps(mu)) == mu for mu in found)
    mu = best(g)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    clustered = max(shape) > 10_000
    assert isinstance(plan, RowLoopPlan if clustered else RowPlan)
    assert (AxisKind.CLUSTER in {a.kind for a in plan.program.axes}) == clustered


def test_bound_is_that_of_an_opaque_function() -> None:
    g = cs.new_kernel_graph()
    g.mark_output(g.argmax(g.new_input((64, 24)), 1))
    found = verify(g, best(g))
    assert found.equal and found.bound_log2 is not None and found.bound_log2 < -60


def test_places_are_those_of_the_reference() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = odd_rows(5, 9, dtype=dtype)
        found, _ = run_reference(places((5, 9), dtype=str(dtype)), [x])
        assert found.dtype == torch.int64 and found.flatten()[:4].tolist() == [0, 3, 0, 0]
        assert torch.equal(found, x.argmax(1, keepdim=True))


def test_emulated_places_of_infinities_and_nan_are_pytorchs() -> None:
    x = torch.tensor(
        [[1.0, inf, nan, nan], [-inf, -3.0, -3.0, -9.0], [2.0, inf, inf, 0.0]]
    ).double()
    domain = TorchDomain(torch.float64)
    pairs = domain.placed(TorchValue(("M", "N"), x), ("N",), np.arange(4))
    assert domain.place(domain.foremost(pairs, ["N"])).data.tolist() == x.argmax(1).tolist()


def test_other_places_are_refused() -> None:
    """Places of other elements, of the least one, along another dimension, of shifted ones."""
    g = places((24, 24))
    mu = best(g)
    for other in (
        places((24, 24), of=lambda g, x: g.mul(x, -1.0)),
        places((24, 24), of=lambda g, x: g.mul(x, x)),
        places((24, 24), of=lambda g, x: g.transpose(x)),
        places((24, 24), of=lambda g, x: g.rotate_half(x)),
    ):
        assert not verify(other, mu).equal


def test_programs_compute_nothing_with_places() -> None:
    """Places are stored as integers and numbers are not; they are not computed with."""
    mu = best(places((64, 24)))
    ops = mu.steps[0].program.ops
    place, largest = (
        next(i for i, op in enumerate(ops) if op.kind == k) for k in ("argmax", "max")
    )
    store = next(i for i, op in enumerate(ops) if op.kind == STORE and op.inputs == (place,))
    for where, kind, message in (
        (place, "max", "out0 is int64, and only lengths, tables and labels are"),
        (largest, "argmax", r"out1 is float32, and takes places \(argmax\)"),
        (store, "square", "combined by argmax and stored"),
    ):
        attributes = {} if kind == "square" else ops[where].attributes
        with pytest.raises(GraphError, match=message):
            check_mugraph(change(mu, 0, where, kind=kind, attributes=attributes))


def test_values_have_gradients_and_places_have_none() -> None:
    g = places((4, 8), of=lambda g, x: g.mul(x, 2.0))
    backward = cs.grad(g)
    assert [backward.nodes[i].name for i in backward.inputs] == ["x", "dt4"]
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(4, 1, dtype=torch.float64)
    (found,) = evaluate(backward, [x.detach(), dy], torch.float64)
    (2.0 * x).amax(1, keepdim=True).backward(dy)
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: g.mul(g.argmax(x, 1), 2.0), r"is int64, which only .* and places \(argmax\)"),
        (lambda g, x: g.pick(x, g.argmax(x, 1)), "must be an int64 or int32 input"),
        (lambda g, x: g.mark_output(g.argmax(x, 1), "float32"), "it is int64; leave the type out"),
        (lambda g, x: g.mark_output(g.max(x, 1), "int64"), "nothing is computed in integers"),
        (lambda g, x: g.apply("argmax", g.sum(x, 1), dim=1), r"one element; use graph.argmax"),
        (lambda g, x: g.argmax(g.sum(x, 1), 1, keepdim=True), "leave keepdim out"),
        (lambda g, x: g.mul(g.argmax(g.sum(x, 1), 1), 2.0), r"is int64, which only"),
        (lambda g, x: cs.grad(g, outputs=[g.mark_output(g.argmax(x, 1))]), "no gradient"),
        (lambda g, x: g.mark_output(g.argmax(g.concat([x, x], 1), 1)).graph.expanded(),
         "places count from the beginning of the whole"),
    ],
)  # fmt: skip
def test_refusals_of_graphs(build: Callable[..., Any], message: str) -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((4, 8), "float32", name="x")
    with pytest.raises(CutesuperError, match=message):
        build(g, x)


def test_traced_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> Any:
        value, place = torch.max(x, 1)
        least, other = x.min(0, keepdim=True)
        halves = x.view(3, 2, 40).argmax(1)
        return value, place, least, other, x.argmin(-1), (x * 2 + 1).argmax(), halves

    x = torch.randn(6, 40)
    program_of = traced(monkeypatch, program, (x,))
    for mine, theirs in zip(program_of(x), program(x), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_functions_go_on_with_places_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> Any:
        return x.softmax(-1).argmax(-1).float() + 1, x.argmax(-1)[:, None] + 1

    x = torch.randn(6, 40)
    check(traced(monkeypatch, program, (x,), rest="torch"), program, (x,))


ALONE = {
    "column": (lambda x: x.argmax(1), (4, 1)),
    "row": (lambda x: x.argmin(0, keepdim=True), (1, 4)),
    "all": (lambda x: x.argmax(), (1, 1)),
    "values": (lambda x: x.min(-1), (3, 5, 1)),
    "computed": (lambda x: x.sum(1, keepdim=True).argmax(1), (4, 8)),
}


@pytest.mark.parametrize("case", ALONE)
def test_traced_places_of_single_elements(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    program, shape = ALONE[case]
    x = torch.randn(shape)
    check(traced(monkeypatch, program, (x,)), program, (x,))


def test_programs_store_places_of_single_elements_as_integers() -> None:
    mu = best(places((4, 1)))
    assert loads(dumps(mu)) == mu
    place = next(i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == "only_place")
    with pytest.raises(GraphError, match="out0 is int64, and only lengths, tables and labels are"):
        check_mugraph(change(mu, 0, place, kind="square"))


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize(("shape", "dim"), [((5, 1), 1), ((1, 7), 0), ((1, 1), 0)], ids=str)
def test_kernels_store_places_of_single_elements(shape: tuple[int, ...], dim: int) -> None:
    """0, whatever the element is."""
    x = torch.tensor([nan, inf, -inf, 2.0, -0.0, 1.0, -3.0])[: max(shape)].view(shape).cuda()
    place, value = cs.superoptimize(places(shape, dim))(x)
    assert torch.equal(place, x.argmax(dim, keepdim=True))
    torch.testing.assert_close(value, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize(
    ("shape", "dim", "dtype"),
    [
        ((5, 24), 1, "float32"),
        ((4, 2001), 1, "float16"),
        ((4, 70_000), 1, "bfloat16"),
        ((9, 40, 3), 1, "float16"),
    ],
    ids=str,
)
def test_kernels_find_places(shape: tuple[int, ...], dim: int, dtype: str) -> None:
    """In a thread, a warp, a block and a cluster; along rows that are strided."""
    g = places(shape, dim, dtype)
    kernel = cs.superoptimize(g)
    x = odd_rows(*shape, dtype=getattr(torch, dtype)).cuda()
    out = [torch.full_like(x.amax(dim, keepdim=True), 7, dtype=t) for t in (torch.int64, x.dtype)]
    kernel([x], out=out)
    assert torch.equal(out[0], x.argmax(dim, keepdim=True))
    torch.testing.assert_close(out[1], x.amax(dim, keepdim=True), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.ptx
def test_greedy_tokens() -> None:
    """A head and the places of its logits: two kernels."""
    g = cs.new_kernel_graph()
    x = g.new_input((3, 64), "bfloat16", name="x")
    w = g.new_input((64, 264), "bfloat16", name="w", constant=True)
    g.mark_output(g.argmax(g.matmul(x, w), 1))
    kernel = cs.superoptimize(g)
    a, b = (
        torch.randn(s, generator=torch.Generator().manual_seed(3)) for s in ((3, 64), (64, 264))
    )
    a, b = a.bfloat16().cuda(), b.bfloat16().cuda()
    (logits,) = [a.double() @ b.double()]
    found = logits.gather(1, kernel(a, b))
    assert (found >= logits.amax(1, keepdim=True) - 2**-7 * logits.abs().amax()).all()
