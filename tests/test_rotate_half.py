"""Halves of rows, and pairs, that change places, as rotary positions have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import cutesuper as cs
from cutesuper.errors import GraphError, LoweringError, OperatorError, ScheduleError, ShapeError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import dumps, loads
from cutesuper.report import plan_text
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule, RowSchedule
from cutesuper.targets import H200
from cutesuper.verify.numeric import acceptable, compare
from tests.backends import compiled
from tests.mutants import change
from tests.small_models import rotated


def positions(
    width: int = 64, heads: int = 4, dtype: str = "bfloat16", rest: Callable[..., Any] | None = None
) -> KernelGraph:
    """Rotary positions of heads [2, heads, 3, width]; ``rest`` makes them of the input."""
    g = cs.new_kernel_graph()
    x = g.new_input((2, heads, 3, width), dtype, name="x")
    cos, sin = (g.new_input((2, 1, 3, width), dtype, name=n) for n in ("cos", "sin"))
    y = rest(g, x) if rest else x
    g.mark_output(g.add(g.mul(y, cos), g.mul(g.rotate_half(y), sin)))
    return g


def paired(
    width: int = 64, heads: int = 4, dtype: str = "bfloat16", *, both: bool = False
) -> KernelGraph:
    """Rotary positions of heads whose halves lie interleaved; ``both``: of turned halves."""
    g = cs.new_kernel_graph()
    x = g.new_input((2, heads, 3, width), dtype, name="x")
    cos, sin = (g.new_input((2, 1, 3, width), dtype, name=n) for n in ("cos", "sin"))
    y = g.rotate_half(g.exp(x)) if both else x
    g.mark_output(g.add(g.mul(y, cos), g.mul(g.rotate_pairs(y), sin)))
    return g


def appended() -> KernelGraph:
    """Heads as a projection leaves them, normalized, with positions, in a cache."""
    g = cs.new_kernel_graph()
    cache, at = g.new_input((2, 4, 32, 64), "bfloat16"), g.new_input((3,), "int64")
    x = g.transpose(g.new_input((2, 3, 4, 64), "bfloat16", name="x"), (0, 2, 1, 3))
    cos, sin = (g.new_input((2, 1, 3, 64), "bfloat16") for _ in range(2))
    y = g.rms_norm(x)
    g.mark_output(g.put_rows(cache, at, y * cos + g.rotate_half(y) * sin, dim=2))
    return g


def squared_norm() -> KernelGraph:
    """Divided by what is 0 for no input, whatever the signs of the elements are."""
    g = cs.new_kernel_graph()
    y = g.rms_norm(g.rotate_half(g.new_input((4, 96), "float16")))
    g.mark_output(y * y)
    return g


def step() -> KernelGraph:
    """Queries and fewer keys get positions; keys and values go into caches."""
    g = cs.new_kernel_graph()
    caches = [g.new_input((2, 2, 20, 64), "bfloat16") for _ in range(2)]
    at = g.new_input((1,), "int64")
    q, k, v = (g.new_input((2, h, 1, 64), "bfloat16") for h in (6, 2, 2))
    cos, sin = (g.new_input((2, 1, 1, 64), "bfloat16") for _ in range(2))
    q, k = (g.rms_norm(x) for x in (q, k))
    q, k = (x * cos + g.rotate_half(x) * sin for x in (q, k))
    for cache, rows in zip(caches, (k, v), strict=True):
        g.mark_output(g.put_rows(cache, at, rows, dim=2))
    g.mark_output(q)
    return g


def best(g: KernelGraph) -> MuGraph:
    return search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph


# --------------------------------------------------------------------------- operator and verifier


def test_halves_are_of_an_even_number() -> None:
    g = cs.new_kernel_graph()
    for name in ("rotate_half", "rotate_pairs"):
        with pytest.raises(ShapeError, match=rf"{name}\(\[4, 5\]\): the last extent must be even"):
            g.apply(name, g.new_input((4, 5)))


@pytest.mark.parametrize(("build", "other"), [
    (positions, "rotate_pairs"), (paired, "rotate_half"),
])  # fmt: skip
def test_wrong_programs_are_not_verified(build: Callable[[], KernelGraph], other: str) -> None:
    g = build()
    mu = best(g)
    assert cs.verify(g, mu, full=True) and compare(g, mu) and loads(dumps(mu)) == mu
    ops = mu.steps[0].program.ops
    place = next(i for i, op in enumerate(ops) if op.facets.turns)
    label = ops[place].attributes["along"]
    assert not cs.verify(g, change(mu, 0, place, kind="neg", attributes={}))
    assert not cs.verify(g, change(mu, 0, place, kind=other))
    other = next(d for d in mu.steps[0].program.dims if d != label)
    for along, message in ((other, "divides; a block must have it whole"), ("Z", "label Z")):
        with pytest.raises(GraphError, match=message):
            check_mugraph(change(mu, 0, place, attributes={"along": along}))


def test_softmax_of_moved_halves_is_verified() -> None:
    """Sums that a maximum rescales are those of the scores of moved elements, too."""
    g = cs.new_kernel_graph()
    q, k, v = (g.new_input((2, 128, 64), "bfloat16") for _ in range(3))
    cos = g.new_input((128, 64), "bfloat16")
    q, k = (g.mul(g.rotate_half(x), cos) for x in (q, k))
    g.mark_output(g.matmul(g.softmax(g.causal_mask(g.matmul(q, g.transpose(k)))), v))
    mu = best(g)
    assert any(op.rescaled for step in mu.steps for op in step.program.ops)
    assert cs.verify(g, mu)
    at, ops = next(
        (n, s.program.ops)
        for n, s in enumerate(mu.steps)
        if any(op.facets.turns for op in s.program.ops)
    )
    place = next(i for i, op in enumerate(ops) if op.facets.turns)
    assert not cs.verify(g, change(mu, at, place, kind="neg", attributes={}))


def test_pieces_are_refused() -> None:
    g = cs.new_kernel_graph()
    x, y = (g.new_input((8, 32), name=n) for n in "xy")
    g.mark_output(g.slice(g.rotate_half(g.exp(g.concat([x, y], 1))), 1, 0, 32))
    with pytest.raises(OperatorError, match="turn the parts before they are put together"):
        g.expanded()


# ----------------------------------------------------------------------------------------- kernels

#: programs, and the number of their kernels
PROGRAMS: dict[str, tuple[Callable[[], KernelGraph], int]] = {
    "heads": (positions, 1),
    "lanes without elements": (lambda: positions(96), 1),
    "within a thread": (lambda: positions(256, 2, "float32"), 1),
    "one by one": (lambda: positions(10), 1),
    "normalized and appended": (appended, 1),
    "queries, keys and values": (step, 1),
    "a squared norm": (squared_norm, 1),
    "pairs": (paired, 1),
    "pairs of long rows": (lambda: paired(2048, 2, "float32"), 1),
    "pairs of turned halves": (lambda: paired(both=True), 1),
    "of a product": (lambda: positions(rest=lambda g, x: x @ g.new_input((64, 64), "bfloat16")), 2),
}
ON_THE_MACHINE = (
    "heads", "within a thread", "queries, keys and values", "pairs", "pairs of turned halves",
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_programs(name: str, golden: Callable[[str, str], None]) -> None:
    build, kernels = PROGRAMS[name]
    g = build()
    mu = best(g)
    assert len(mu.steps) == kernels and cs.verify(g, mu)
    plan = make_plan(mu.steps[-1], mu.tensors, H200)
    if name == "queries, keys and values":
        assert isinstance(plan, RowPlan) and plan.row_count == 2 * 6 + 2 * 2
        golden("plans/rotate_half.txt", plan_text("k0", plan))


def test_schedules_that_move_nothing_are_refused() -> None:
    mu = best(positions())
    for schedule in (RowSchedule(1, 8, 8, 32), RowSchedule(4, 8, 2, 8)):
        plan = make_plan(mu.steps[0], mu.tensors, H200, schedule)
        assert plan.schedule.chunks % 2 == 0
    for schedule in (RowSchedule(8, 8, 2, 4), RowSchedule(64, 2, 1, 4)):
        with pytest.raises(ScheduleError, match="change places within a thread or a warp"):
            make_plan(mu.steps[0], mu.tensors, H200, schedule)
    pairs = best(paired())
    with pytest.raises(ScheduleError, match="halves of rows of 64 change places"):
        make_plan(pairs.steps[0], pairs.tensors, H200, RowSchedule(32, 1, 2, 4))
    with pytest.raises(LoweringError, match="a row loop moves no elements along a row"):
        make_plan(mu.steps[0], mu.tensors, H200, RowLoopSchedule(8, 8, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.ptx] * (n in ON_THE_MACHINE)) for n in PROGRAMS]
)
def test_kernels_move_halves(name: str) -> None:
    g = PROGRAMS[name][0]()
    kernel = cs.superoptimize(g)
    shapes = [tuple(map(extent, g.nodes[i].shape)) for i in g.inputs]
    types = [g.nodes[i].dtype for i in g.inputs]
    inputs = [
        torch.randperm(20)[: s[0]] if t.integer else torch.randn(s).to(t.torch)
        for s, t in zip(shapes, types, strict=True)
    ]
    exact, eager = evaluate(g, inputs, torch.float64), evaluate(g, inputs)
    found = kernel([x.cuda() for x in inputs])
    for out, want, theirs, i in zip(found, exact, eager, g.outputs, strict=True):
        report = acceptable(out.cpu(), want, theirs, g.nodes[i].dtype)
        assert report, report.message


# ----------------------------------------------------------------------------------------- PyTorch


def split(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.split([32, 32], -1)
    return x * cos + torch.cat([-b, a], dim=3) * sin


def normalized(x: Any, cos: Any, sin: Any) -> Any:
    return rotated(functional.rms_norm(x, (64,)), cos, sin).relu()


def paired_up(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions whose halves lie interleaved."""
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def pairs_other_way(x: Any, cos: Any, sin: Any) -> Any:
    """The pairs with the other sign, which is another function."""
    return x * cos + torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2) * sin


def pairs_of_halves(x: Any, cos: Any, sin: Any) -> Any:
    """Pairs of elements that are no neighbours."""
    return x * cos + torch.stack((-x[..., 32:], x[..., :32]), -1).flatten(-2) * sin


def other_way(x: Any, cos: Any, sin: Any) -> Any:
    """The halves with the other sign, which is another function."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((b, -a), -1) * sin


def negation_used(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x[..., :32], x[..., 32:]
    negative = -b
    return x * cos + torch.cat((negative, a), -1) * sin, negative.exp()


def of_two(x: Any, cos: Any, sin: Any) -> Any:
    """Halves of two tensors."""
    return x * cos + torch.cat((-x.exp()[..., 32:], x[..., :32]), -1)


@pytest.mark.parametrize("fn", [
    rotated, split, normalized, paired_up, other_way, negation_used, of_two, pairs_other_way,
    pairs_of_halves,
])  # fmt: skip
def test_compiled_functions(fn: Any) -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 5, 3, 64), *torch.randn(2, 2, 1, 3, 64)
    with torch.no_grad():
        call, reports = compiled(fn)
        torch.testing.assert_close(call(x, cos, sin), fn(x, cos, sin))
    if fn in (rotated, split, normalized, paired_up):
        assert reports[0].taken == 1 and not reports[0].outside


def test_regions_that_only_move_elements_are_tried() -> None:
    call, reports = compiled(rotated, take="modelled")
    with torch.no_grad():
        call(torch.randn(2, 5, 3, 64), *torch.randn(2, 2, 1, 3, 64))
    [region] = reports[0].regions
    assert "element-wise" not in region.verdict.reason


def test_traced_functions() -> None:
    x, cos, sin = torch.randn(2, 5, 3, 64), *torch.randn(2, 2, 1, 3, 64)
    program = cs.superoptimize(split, [x, cos, sin], target="h200")
    assert "rotate_half" in program.explain()
    torch.testing.assert_close(program(x, cos, sin), split(x, cos, sin))
