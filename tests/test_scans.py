"""Sums up to each element of a row: in graphs, in the field, in traced functions and in kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.errors import CutesuperError, GraphError, ScheduleError
from cutesuper.ir.block import Axis, AxisKind, MuGraph
from cutesuper.ir.check import check_block_program
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import dumps, loads
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.skeletons.rows.schedule import RowSchedule
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify
from cutesuper.verify.numeric import acceptable, compare
from tests.mutants import change
from tests.tracing import check, traced


def scanned(
    shape: tuple[int, ...], dim: int = -1, reverse: bool = False, dtype: str = "float32"
) -> KernelGraph:
    g = cs.new_kernel_graph()
    g.mark_output(g.cumsum(g.new_input(shape, dtype, name="x"), dim, reverse))
    return g


def sums(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def best(g: KernelGraph) -> MuGraph:
    return search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph


def softmax_up_to(g: KernelGraph, reverse: bool = False) -> KernelGraph:
    x = g.new_input((24, 40), "float16", name="x")
    g.mark_output(g.mul(g.cumsum(g.softmax(x), -1, reverse), 2.0))
    return g


@pytest.mark.parametrize(
    ("shape", "dim", "reverse"),
    [((64, 24), 1, False), ((64, 24), 0, True), ((4, 6, 40), 1, True), ((50,), 0, False),
     ((5, 1), 1, True)],
    ids=str,
)  # fmt: skip
def test_sums_are_searched_and_verified(shape: tuple[int, ...], dim: int, reverse: bool) -> None:
    g = cs.new_kernel_graph()
    x = g.new_input(shape, "float32", name="x")
    g.mark_output(g.exp(g.cumsum(g.mul(x, x), dim, reverse)))
    mu = best(g)
    assert len(mu.steps) == 1 and verify(g, mu).equal
    assert compare(g, mu)
    assert loads(dumps(mu)) == mu
    given = torch.randn(shape, dtype=torch.float64)
    (found,) = evaluate(g, [given], torch.float64)
    torch.testing.assert_close(found, sums(given * given, dim, reverse).exp())


def test_sums_are_exact_in_the_field() -> None:
    """The bound is that of additions; sums of sums are the verifier's, too."""
    g = scanned((24, 40))
    found = verify(g, best(g))
    assert found.equal and found.bound_log2 is not None and found.bound_log2 < -80


def test_other_sums_are_not_equal() -> None:
    g = softmax_up_to(cs.new_kernel_graph())
    mu = best(g)
    ops = mu.steps[0].program.ops
    place = next(i for i, op in enumerate(ops) if op.kind == "cumsum")
    assert verify(g, mu).equal
    turned = change(mu, 0, place, attributes=ops[place].attributes | {"reverse": True})
    assert not verify(g, turned).equal
    assert verify(softmax_up_to(cs.new_kernel_graph(), True), turned).equal
    absent = change(mu, 0, place, kind="exp", attributes={})
    assert not verify(g, absent).equal


def test_a_block_has_whole_rows() -> None:
    program = best(scanned((24, 40))).steps[0].program
    row = program.ops[1].attributes["along"]
    axes = (*program.axes, Axis(row, AxisKind.GRID, 2))
    divided = replace(program, axes=axes, tile=program.tile | {row: 20})
    with pytest.raises(GraphError, match="a block must have it whole"):
        check_block_program(divided)


@pytest.mark.parametrize("dim", [0, 1])
def test_derivative_sums_in_the_other_direction(dim: int) -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((4, 6), "float32", name="x")
    y = g.cumsum(g.mul(x, x), dim)
    g.mark_output(g.mul(y, y))
    given = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(4, 6, dtype=torch.float64)
    (found,) = evaluate(cs.grad(g), [given.detach(), dy], torch.float64)
    (given * given).cumsum(dim).square().backward(dy)
    torch.testing.assert_close(found, given.grad)


def test_refusals() -> None:
    g = cs.new_kernel_graph()
    x = g.new_input((4, 8), "float32", name="x")
    with pytest.raises(CutesuperError, match="no such dimension"):
        g.cumsum(x, 2)
    with pytest.raises(CutesuperError, match="must be True or False"):
        g.cumsum(x, 1, 1)
    mu = best(scanned((24, 1024)))
    with pytest.raises(ScheduleError, match="the lanes of a row that is summed up are neighbours"):
        make_plan(mu.steps[0], mu.tensors, H200, RowSchedule(32, 1, 32, 1, interleaved=True))


def test_blocks_walk_along_long_rows() -> None:
    mu = best(scanned((3, 100_000)))
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, RowPlan) and plan.walked and plan.width < plan.length


def test_sums_of_fp32_are_pairs() -> None:
    """Rounding hides the rest in 16-bit results."""
    for dtype, words in (("float32", 2), ("bfloat16", 1)):
        mu = best(scanned((24, 4096), dtype=dtype))
        plan = make_plan(mu.steps[0], mu.tensors, H200)
        assert isinstance(plan, RowPlan) and plan.scan_words == words
        s = plan.schedule
        assert plan.shared_bytes == 4 * words * s.rows * s.chunks * plan.warps_per_row


def test_traced_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> Any:
        wide = x.half().cumsum(1, dtype=torch.float32)
        return x.softmax(-1).cumsum(-1), x.cumsum(0), wide, x.view(3, 2, 40).cumsum(1).sum(-1)

    x = (torch.randn(6, 40),)
    check(traced(monkeypatch, program, x), program, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_no_block_holds_are_divided(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)

    x = (torch.randn(2, 65536, generator=torch.Generator().manual_seed(0)).to(dtype),)
    check(traced(monkeypatch, program, x), program, x)


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "reverse"),
    [
        ((8, 24), 1, "float32", True),
        ((3, 6000), 1, "bfloat16", False),
        ((2, 4001), 1, "float32", True),
        ((3, 100, 12), 1, "float16", False),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_kernels_sum_up(
    shape: tuple[int, ...], dim: int, dtype: str, reverse: bool, scale: float
) -> None:
    """In a thread, over lanes, warps and accesses; also of rows that are strided."""
    kernel = cs.superoptimize(scanned(shape, dim, reverse, dtype))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    x = x.to(getattr(torch, dtype)).cuda()
    out = torch.full_like(x, torch.nan)
    kernel([x], out=[out])
    report = acceptable(out, sums(x.double(), dim, reverse), sums(x, dim, reverse), dtype)
    assert report, report.message


@pytest.mark.gpu
@pytest.mark.ptx
def test_infinite_elements_are_in_later_sums_only() -> None:
    kernel = cs.superoptimize(scanned((4, 600)))
    x = torch.ones(4, 600)
    x[0, 100], x[1, 7], x[2, 3], x[2, 5] = torch.inf, torch.nan, torch.inf, -torch.inf
    found = kernel(x.cuda()).cpu()
    torch.testing.assert_close(found, x.cumsum(1), rtol=0, atol=0, equal_nan=True)
