"""Rows without limits: offsets of 64 bits, rows that no kernel holds, reductions over dimensions in
the middle, and norms over several dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.errors import LoweringError, SearchError, ShapeError
from cutesuper.ir.block import KernelStep
from cutesuper.ir.dims import MAX_ELEMENTS
from cutesuper.ir.unseen import followed
from cutesuper.pipeline import check_definition
from cutesuper.skeletons.kernel import arguments
from cutesuper.skeletons.legality import refuse_many_rows
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowLoopPlan
from cutesuper.targets import H200
from cutesuper.torch.aten import reducing
from cutesuper.verify.numeric import acceptable
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
    """Rows of products may not: their offsets have 32 bits."""
    g = rows((70000, 32768), build=lambda g, x: g.softmax(x, 1))
    check_definition("superoptimize", g)
    [step] = found(g).candidates[0].mugraph.steps
    assert isinstance(step, KernelStep)
    g = cs.new_kernel_graph()
    x, w = g.new_input((70000, 32768)), g.new_input((32768, 64))
    g.mark_output(g.matmul(x, w))
    with pytest.raises(ShapeError, match="2293760000 elements, more than 2147483647"):
        check_definition("superoptimize", g)
    with pytest.raises(LoweringError, match="split the batch"):
        refuse_many_rows(MAX_ELEMENTS + 1, "kernel k0")


WIDE: dict[str, tuple[Function, tuple[int, ...]]] = {
    "row kernel": (lambda x: F.silu(F.rms_norm(x, x.shape[-1:])), (6, 520)),
    "strided": (lambda x: x.t().contiguous() * 2, (24, 44)),
    "row loop": (lambda x: (x * x).sum(0), (700, 136)),
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small tensors that are treated as if their offsets needed 64 bits, by code that is not kept
    with that of others."""
    monkeypatch.setattr(arguments, "MAX_ELEMENTS", 100)
    monkeypatch.setenv("CUTESUPER_CACHE", str(tmp_path))


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
    plan = make_plan(mu.steps[0], followed(mu), H200)
    assert isinstance(plan, RowLoopPlan) and plan.alone == (outer == 300)
    assert plan.outer_count == outer and len(plan.scratch) == 2 - plan.alone


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
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that hold short rows only."""
    limits = {"MAX_CLUSTER_ROW": 512, "MAX_ROW": 256, "SHORT": 128, "PART": 64, "ROWS": 8}
    for name, limit in limits.items():
        monkeypatch.setattr(reducing, name, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", small(LONG, "softmax", "layer norm", "deviation"))
def test_rows_that_no_kernel_holds(short: None, name: str) -> None:
    f, shapes, kernels = LONG[name]
    check(f, tuple(randn(*s) for s in shapes), kernels)


def test_rows_of_a_prime_length_are_refused(short: None) -> None:
    x = torch.empty(2, 262147, dtype=torch.bfloat16)
    with pytest.raises(SearchError, match="a reduction over 262147 elements; a cluster holds"):
        cs.superoptimize(lambda x: F.softmax(x, -1), (x,), target="h200")


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
