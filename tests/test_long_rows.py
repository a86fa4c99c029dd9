"""Rows without limits: offsets of 64 bits, rows that no kernel holds, reductions over dimensions in
the middle, and norms over several dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.errors import GraphError, LoweringError, SearchError
from cutesuper.ir.block import LOAD, KernelStep
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dims import MAX_ELEMENTS
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import dumps, loads
from cutesuper.ir.unseen import followed
from cutesuper.pipeline import check_definition
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.legality import refuse_many_rows
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows import form, plan, planner, sizes
from cutesuper.skeletons.rows.plan import RowLoopPlan
from cutesuper.targets import H200
from cutesuper.torch.aten import reducing
from cutesuper.verify.numeric import acceptable
from tests.mutants import change
from tests.test_search_rows import found, rows

Function = Callable[..., Tensor]


def randn(*shape: int) -> Tensor:
    """Numbers of a mean that is not 0, of which sums of squares lose digits."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(7)) + 2).bfloat16()


def check(f: Function, inputs: tuple[Tensor, ...], most: int) -> None:
    """The results of a function by the error rule, and at most so many kernels."""
    inputs = tuple(x.cuda() for x in inputs)
    with torch.no_grad():
        program = cs.superoptimize(f, inputs)
        [region] = program.regions
        assert len(region.kernel.kernels) <= most
        exact = f(*(x.double() if x.is_floating_point() else x for x in inputs))
        report = acceptable(program(*inputs), exact, f(*inputs), cs.bfloat16)
    assert report, report.message


def small(cases: Iterable[str], *names: str) -> list[Any]:
    """The cases, of which those with these names run on the machine as well."""
    return [pytest.param(n, marks=pytest.mark.ptx) if n in names else n for n in cases]


# -------------------------------------------------------------------------------- 64 bits of offset


def test_tensors_of_rows_may_have_any_size() -> None:
    g = rows((70000, 32768), build=lambda g, x: g.softmax(x, 1))
    check_definition("superoptimize", g)
    [step] = found(g).candidates[0].mugraph.steps
    assert isinstance(step, KernelStep)
    with pytest.raises(LoweringError, match="split the batch"):
        refuse_many_rows(MAX_ELEMENTS + 1, "kernel k0")


WIDE: dict[str, tuple[Function, tuple[int, ...]]] = {
    "row kernel": (lambda x: F.silu(F.rms_norm(x, x.shape[-1:])), (6, 520)),
    "strided": (lambda x: x.t().contiguous() * 2, (24, 44)),
    "row loop": (lambda x: (x * x).sum(0), (700, 136)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(WIDE, "row kernel", "row loop"))
def test_offsets_of_64_bits(narrow: None, name: str) -> None:
    f, shape = WIDE[name]
    check(f, (randn(*shape),), 1)


@pytest.mark.gpu
def test_tensors_of_more_than_2_31_elements() -> None:
    """The last rows, which 32 bits do not reach, and a few of the others."""
    x = torch.randn(70001, 32768, device="cuda", dtype=torch.bfloat16)
    y = cs.superoptimize(lambda x: F.softmax(x, -1), (x,))(x)
    some = torch.tensor([0, 1, 65535, 65536, 69999, 70000], device="cuda")
    exact = F.softmax(x[some].double(), -1)
    report = acceptable(y[some], exact, F.softmax(x[some], -1), cs.bfloat16)
    assert report, report.message


# ------------------------------------------------------------------------------------ in the middle


@pytest.mark.parametrize("outer", [8, 300])
def test_maxima_over_a_middle_dimension_walk(outer: int) -> None:
    """Blocks meet where several share rows; one that has all of its rows waits for nobody."""
    g = rows((outer, 2048, 96), build=lambda g, x: g.max(x, 1))
    mu = found(g).candidates[0].mugraph
    made = make_plan(mu.steps[0], followed(mu), H200)
    assert isinstance(made, RowLoopPlan) and made.alone == (outer == 300)
    assert made.outer_count == outer and len(made.scratch) == 2 - made.alone


@pytest.mark.gpu
@pytest.mark.ptx
def test_maxima_over_a_middle_dimension() -> None:
    check(lambda x: x.amax(1), (randn(140, 1100, 9),), 1)


# ---------------------------------------------------------------------------------------- long rows


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], w.view(x.shape[1:]))


#: function, shapes, most kernels
LONG: dict[str, tuple[Function, tuple[tuple[int, ...], ...], int]] = {
    "softmax": (lambda x: F.softmax(x, -1), ((6, 1536),), 3),
    "one row": (lambda x: x.logsumexp(-1), ((1, 1536),), 2),
    "layer norm": (_norm, ((3, 6, 16, 16), (1536,)), 3),
    "rms norm": (lambda x, w: F.rms_norm(x, w.shape, w), ((3, 1536), (1536,)), 2),
    "deviation": (lambda x: x.std(), ((3, 1536),), 2),
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, compiled_here: None) -> None:
    """Kernels that hold short rows only."""
    limits = {"MAX_CLUSTER_ROW": 512, "MAX_ROW": 256, "SHORT": 128, "PART": 64, "WALKED": 128}
    limits |= {"SHORTEST_PART": 64, "LONGEST_PART": 128, "MAX_STRIDED": 64}
    for module in (reducing, form, sizes, plan, planner):
        for name in limits.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, limits[name])
    monkeypatch.setattr(reducing, "ROWS", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(LONG, "softmax", "layer norm", "deviation"))
def test_rows_that_no_kernel_holds(short: None, name: str) -> None:
    f, shapes, kernels = LONG[name]
    check(f, tuple(randn(*s) for s in shapes), kernels)


def _loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(0, 1000, 300).cuda())


#: the same along lengths without a small factor
PRIME: dict[str, tuple[Function, tuple[int, ...], int]] = {
    "softmax": (lambda x: F.softmax(x, -1), (6, 1543), 3),
    "log softmax, one row": (lambda x: F.log_softmax(x, -1), (1, 1031), 3),
    "sum": (lambda x: x.sum(), (1031,), 2),
    "mean and maximum": (lambda x: x.mean(-1) + x.amax(-1), (3, 1031), 2),
    "norm": (lambda x: x.norm(dim=-1), (3, 1031), 2),
    "rms norm": (lambda x: F.rms_norm(x, x.shape[-1:]), (3, 1031), 3),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (3, 1031), 5),
    "deviation": (lambda x: x.std(-1), (3, 1031), 4),
    "strided": (lambda x: x.prod(0), (1031, 3), 2),
    "sums up to each": (lambda x: x.softmax(-1).cumsum(-1), (3, 1031), 4),
    "nucleus": (lambda x: x.cumsum(-1), (1, 1031), 1),
    "loss": (_loss, (4, 1031), 5),
    "loss, one row": (lambda x: F.cross_entropy(x, torch.tensor([1030]).cuda()), (1, 1031), 4),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    small(
        PRIME, "softmax", "sum", "mean and maximum", "rms norm", "sums up to each", "loss, one row"
    ),
)
def test_rows_of_a_prime_length(short: None, name: str) -> None:
    """A part of a row that ends before it is filled up with what changes nothing."""
    f, shape, kernels = PRIME[name]
    check(f, (randn(*shape) / 2,), kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.ptx), 3])
def test_gradients_of_losses_of_long_rows(short: None, rows: int) -> None:
    """Labels in the first part and in the last one, and one that is ignored."""
    labels = torch.tensor([1030, 2, -100][:rows]).cuda()
    x = randn(rows, 1031).float().cuda().requires_grad_()
    loss = cs.superoptimize(F.cross_entropy, (x, labels))(x, labels)
    exact = x.detach().double().requires_grad_()
    want = F.cross_entropy(exact, labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    [found], [want] = (torch.autograd.grad(y, t) for y, t in ((loss, x), (want, exact)))
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-8)


#: those that take the whole length
PLACES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "one row": (lambda x: x.argmax(-1), (1, 1031)),
    "least": (lambda x: x.argmin(-1), (3, 1030)),
    "whole tensor": (lambda x: x.argmax(), (5, 7, 264)),
    "middle": (lambda x: x.argmax(1), (2, 1031, 3)),
    "largest": (lambda x: x.max(-1).indices, (4, 1032)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(PLACES, "one row", "whole tensor", "largest"))
def test_places_in_rows_that_no_kernel_holds(short: None, name: str) -> None:
    """Of equal elements the first, and NaN before all others, in whichever part they are."""
    f, shape = PLACES[name]
    x = randn(*shape)
    for value in (None, 1.5, float("-inf"), float("nan")):
        if value is not None:
            x[..., shape[-1] // 2 :] = value
        given = x.cuda()
        program = cs.superoptimize(f, (given,))
        assert len(program.regions[0].kernel.kernels) == 2
        assert torch.equal(program(given), f(given))


@pytest.mark.gpu
@pytest.mark.ptx
def test_a_token_of_gpt2() -> None:
    x = randn(1, 50257).cuda()
    assert torch.equal(cs.superoptimize(lambda x: x.argmax(-1), (x,))(x), x.argmax(-1))


#: graphs made by hand, and the most kernels
BY_HAND: dict[str, tuple[Callable[..., Any], Function, tuple[int, ...], int]] = {
    "softmax": (lambda g, x: g.softmax(x, 1), lambda x: x.softmax(1), (8, 1536), 3),
    "logsumexp": (lambda g, x: g.logsumexp(x, 1), lambda x: x.logsumexp(1, True), (7, 1031), 2),
    "sum": (lambda g, x: g.sum(x, 1), lambda x: x.sum(1, True), (1, 1024), 2),
    "norm": (
        lambda g, x: g.rms_norm(x, None, eps=1e-6),
        lambda x: F.rms_norm(x, x.shape[1:], eps=1e-6),
        (3, 1031),
        3,
    ),
    "cumsum": (lambda g, x: g.cumsum(x, 1), lambda x: x.cumsum(1), (70, 1031), 1),
    "from each on": (
        lambda g, x: g.cumsum(x, 1, reverse=True),
        lambda x: x.flip(1).cumsum(1).flip(1),
        (3, 1024),
        1,
    ),
    "there and back": (
        lambda g, x: g.cumsum(g.cumsum(x, 1), 1, reverse=True),
        lambda x: x.cumsum(1).flip(1).cumsum(1).flip(1),
        (3, 1031),
        2,
    ),
    "places": (lambda g, x: g.argmax(x, 1), lambda x: x.argmax(1, True), (7, 1031), 2),
    "places of columns": (lambda g, x: g.argmax(x, 0), lambda x: x.argmax(0, True), (1031, 3), 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(BY_HAND, "softmax", "logsumexp", "cumsum", "places"))
def test_graphs_made_by_hand(short: None, name: str) -> None:
    """Some rows have parts of nothing but -inf, which a maximum of a part must not turn to NaN."""
    build, f, shape, most = BY_HAND[name]
    g = rows(shape, build=build, dtype="float32")
    kernel = cs.superoptimize(g)
    assert len(kernel.kernels) <= most
    x = randn(*shape).float()
    if name in ("softmax", "logsumexp", "places"):
        x[0, :300], x[1], x[2, 5] = float("-inf"), float("-inf"), float("inf")
        x[3, 700], x[4] = float("nan"), 1.5
    exact = f(x.double()).double()
    torch.testing.assert_close(
        kernel(x.cuda()).cpu().double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def _by_labels(g: KernelGraph, x: Any) -> Any:
    return g.cross_entropy(x, g.new_input((x.shape[0], 1), "int64"))


#: at the sizes that need it
DIVIDED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "softmax": (lambda g, x: g.softmax(x, 1), (8, 393216)),
    "softmax, one row": (lambda g, x: g.softmax(x, 1), (1, 50257)),
    "log softmax": (lambda g, x: g.log_softmax(x, 1), (8, 393217)),
    "places": (lambda g, x: g.argmax(x, 1), (4, 400000)),
    "places, one row": (lambda g, x: g.argmax(x, 1), (1, 151936)),
    "cumsum": (lambda g, x: g.cumsum(x, 1), (2, 1000003)),
    "norm": (lambda g, x: g.rms_norm(x, None), (8, 393217)),
    "sum": (lambda g, x: g.sum(x, 1), (1, 1 << 22)),
    "loss": (_by_labels, (4, 300007)),
    "loss, one row": (_by_labels, (1, 262145)),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_long_rows_are_searched_and_verified(name: str) -> None:
    build, shape = DIVIDED[name]
    mu = found(rows(shape, build=build)).candidates[0].mugraph
    assert loads(dumps(mu)) == mu
    tensors = followed(mu)
    assert all(make_plan(step, tensors, H200) for step in mu.steps)


def test_blocks_look_for_labels_in_their_parts() -> None:
    """No row is stored for it, and one that a cluster holds is not divided."""
    mu = found(rows((4, 300007), build=_by_labels)).candidates[0].mugraph
    (picks,) = [s for s in mu.steps if any(op.kind == "pick" for op in s.program.ops)]
    assert len(mu.steps) == 4 and picks.program.partials()
    assert isinstance(make_plan(picks, followed(mu), H200), plan.RowPlan)
    whole = found(rows((1, 262144), build=_by_labels)).candidates[0].mugraph
    assert len(whole.steps) == 1


def test_positions_are_taken_in_parts_of_rows_only() -> None:
    mu = found(rows((4, 64), build=_by_labels)).candidates[0].mugraph
    setting = Setting(H200, followed(mu))
    with pytest.raises(LoweringError, match="a row kernel knows along parts of rows only"):
        planner.plan_rows(mu.steps[0], setting)


def test_pairs_are_loaded_as_pairs() -> None:
    """Numbers and places that blocks leave are combined; their words are no numbers."""
    mu = found(rows((4, 400000), build=lambda g, x: g.argmax(x, 1))).candidates[0].mugraph
    [load] = [i for i, op in enumerate(mu.steps[1].program.ops) if op.kind == LOAD]
    attributes = dict(mu.steps[1].program.ops[load].attributes)
    del attributes["pairs"]
    with pytest.raises(GraphError, match="is not loaded as pairs of numbers and places"):
        check_mugraph(change(mu, 1, load, attributes=attributes))


def test_places_are_numbers_of_fp32(short: None) -> None:
    x = torch.empty(1 << 25, dtype=torch.bfloat16)
    with pytest.raises(SearchError, match="in a row of 33554432 elements; at most 16777216"):
        cs.superoptimize(lambda x: x.argmax(), (x,), target="h200")


# -------------------------------------------------------------------------------- single elements

ONE: dict[str, tuple[Callable[..., Any], Function, tuple[tuple[int, ...], ...]]] = {
    "relu": (lambda g, x: g.relu(x), lambda x: x.relu(), ((1, 1),)),
    "of one dimension": (lambda g, x: g.exp(x), lambda x: x.exp(), ((1,),)),
    "product": (lambda g, x, y: g.matmul(x, y), lambda x, y: x @ y, ((1, 1), (1, 1))),
    "mean": (lambda g, x: g.mean(x, 1) + g.square(x), lambda x: x + x * x, ((1, 1),)),
    "broadcast": (lambda g, x, y: g.sub(x, y), lambda x, y: x - y, ((1, 1, 1), (1, 1))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(ONE, "relu", "product"))
def test_tensors_of_one_element(name: str) -> None:
    build, f, shapes = ONE[name]
    g = cs.new_kernel_graph()
    g.mark_output(build(g, *(g.new_input(s, "bfloat16") for s in shapes)))
    inputs = [randn(*s).cuda() for s in shapes]
    exact = f(*(x.double() for x in inputs))
    report = acceptable(cs.superoptimize(g)(*inputs), exact, f(*inputs), cs.bfloat16)
    assert report, report.message


def test_rows_are_divided_where_they_have_factors() -> None:
    long = reducing.dims_of(393216)
    parts, others = reducing.divided(long, alone=False), reducing.divided(long, alone=False)
    assert [reducing.extent_of(p) for p in parts] == [8192, 48] and parts == others


#: the same at the sizes that need it
LONGEST: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), ((64, 393216),)),
    "log softmax, one row": (lambda x: F.log_softmax(x, -1), ((1, 131072),)),
    "logsumexp, one row": (lambda x: x.logsumexp(-1), ((1, 1 << 22),)),
    "layer norm": (_norm, ((32, 256, 56, 56), (256 * 56 * 56,))),
    "sum": (lambda x: x.sum(), ((1 << 24,),)),
    "maximum in the middle": (lambda x: x.amax(1), ((128, 4096, 4095),)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), ((32, 256, 56, 56),)),
    "group norm": (lambda x, w: F.group_norm(x, 32, w), ((16, 256, 64, 64), (256,))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONGEST)
def test_long_rows_on_a_gpu(name: str) -> None:
    f, shapes = LONGEST[name]
    inputs = tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    with torch.no_grad():
        program = cs.superoptimize(f, inputs)
        y = program(*inputs)
        exact = f(*(x.double() for x in inputs))
        report = acceptable(y, exact, f(*inputs), cs.bfloat16)
        assert report, report.message
        assert torch.equal(y, program(*inputs))


# -------------------------------------------------------------------------------- norms of channels


def _group(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, w, b))


def _batch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


CHANNELS: dict[str, tuple[Function, tuple[int, ...], int]] = {
    "group norm": (_group, (4, 16, 8, 8), 2),
    "group norm, long groups": (_group, (2, 16, 64, 80), 3),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (8, 16, 8, 8), 1),
    "batch norm": (_batch, (8, 16, 8, 8), 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(CHANNELS, "group norm", "batch norm"))
def test_norms_of_channels(name: str) -> None:
    f, shape, kernels = CHANNELS[name]
    check(f, (randn(*shape), randn(16), randn(16)), kernels)
