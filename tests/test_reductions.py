"""Reductions follow from their monoids; the product, one row of the table, in every stage."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.ir.block import AxisKind
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.ir.operators.base import TABLE
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.kernel.hostmath import HostMath
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify
from cutesuper.verify.numeric import compare
from tests.mutants import change
from tests.tracing import check, traced

REDUCTIONS = [o for o in TABLE.values() if o.reduces is not None]


def rows(*shape: int, dim: int = 1, dtype: str = "float32") -> KernelGraph:
    """Elements times the product of their row."""
    g = new_kernel_graph()
    x = g.new_input(shape, dtype=dtype, name="x")
    g.mark_output(g.mul(g.prod(x, dim), x))
    return g


@pytest.mark.parametrize("operator", REDUCTIONS, ids=lambda o: o.name)
def test_monoids_are_the_references(operator: Any) -> None:
    """Elements combined one by one, from the identity, give what PyTorch gives."""
    x = torch.linspace(-1.5, 2.0, 7, dtype=torch.float64)
    how = operator.reduces
    pairs = [(how.identity, 99.0), *((value, float(n)) for n, value in enumerate(x.tolist()))]
    first, *rest = pairs if how.places else [number for number, _ in pairs]
    total = reduce(partial(how.combine, HostMath), rest, first)
    total = total[1] if how.places else total / (len(x) if operator.averages else 1)
    want = operator.reference([x], {"dim": 0}).double()
    torch.testing.assert_close(torch.tensor([total], dtype=torch.float64), want)


@pytest.mark.parametrize("zeros", [(), (2,), (1, 3)], ids=len)
@pytest.mark.parametrize("dim", [0, 1])
def test_derivative_of_a_product_is_pytorchs(dim: int, zeros: tuple[int, ...]) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1 if dim else zeros, zeros if dim else 1] = 0.0
    x.requires_grad_()
    dy = torch.rand(x.prod(dim, keepdim=True).shape, dtype=torch.float64)
    g = new_kernel_graph()
    t = g.new_input((4, 5), dtype="float32", name="x")
    g.mark_output(g.prod(t, dim))
    (found,) = evaluate(cs.grad(g, wrt=[t]), [x.detach(), dy], torch.float64)
    x.prod(dim, keepdim=True).backward(dy)
    torch.testing.assert_close(found, x.grad)
    line = x.shape[dim]
    assert int((found != 0).sum()) == {0: 20, 1: 20 - line + 1, 2: 20 - line}[len(zeros)]


@pytest.mark.parametrize("shape", [(64, 24), (3, 100_000)], ids=str)
def test_products_are_searched_and_verified(shape: tuple[int, ...]) -> None:
    """Long rows are divided among blocks of a cluster, whose products meet."""
    g = rows(*shape)
    found = [c.mugraph for c in search(g, H200).candidates]
    ends = {a.kind for mu in found for s in mu.steps for a in s.program.axes}
    assert (AxisKind.CLUSTER in ends) == (shape[1] > 24)
    assert all(verify(g, mu).equal for mu in found)
    assert compare(g, found[0])


def test_other_reductions_are_no_products() -> None:
    g = rows(64, 24)
    mu = search(g, H200).candidates[0].mugraph
    place = next(i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == "prod")
    for kind in ("sum", "mean", "max"):
        assert not verify(g, change(mu, 0, place, kind=kind)).equal


def test_pieces_of_a_product_are_multiplied() -> None:
    g = new_kernel_graph()
    x, y = (g.new_input((4, n), dtype="float32") for n in (3, 5))
    g.mark_output(g.prod(g.concat([x, y], 1), 1))
    assert [n.operator for n in g.expanded().nodes].count("mul") == 1
    a, b = torch.rand(4, 3).double(), torch.rand(4, 5).double()
    (found,) = evaluate(g.expanded(), [a, b], torch.float64)
    torch.testing.assert_close(found, torch.cat([a, b], 1).prod(1, keepdim=True))


def test_products_over_rows_are_kernels_of_their_own() -> None:
    """Blocks meet in sums only, so a product over the rows is no part of a kernel that has them."""
    g = new_kernel_graph()
    x = g.new_input((4096, 256), dtype="float32")
    g.mark_output(g.prod(g.mul(x, g.sum(x, 1)), 0))
    mu = search(g, H200).candidates[0].mugraph
    assert len(mu.steps) > 1 and verify(g, mu).equal


def test_traced_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.prod(x, 1) + torch.prod(x, -1, keepdim=True).sum() + x.prod()

    inputs = (torch.rand(3, 4),)
    check(traced(monkeypatch, program, inputs), program, inputs)


def test_row_kernels_of_products_compile() -> None:
    pytest.importorskip("cutlass")
    from tests.plans import compiled

    for shape, dtype in (((64, 1000), "float16"), ((3, 20_000), "float32")):
        options = SearchOptions(lowered=True)
        mu = search(rows(*shape, dtype=dtype), H200, options=options).candidates[0].mugraph
        for step in mu.steps:
            plan = make_plan(step, mu.tensors, H200)
            r = compiled(plan).resources
            held = plan.schedule.vector * plan.schedule.chunks
            assert not r.spills and r.source in ("sass", "ptx")
            # every element is multiplied into the product, and then by it
            assert r.source == "ptx" or r.instructions["FMUL"] >= 2 * held
