"""Products and attention of tensors of more than 2^31 elements, whose offsets have 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

import torch.nn.functional as F

import cutesuper as cs
from cutesuper.errors import CutesuperError, ScheduleError
from cutesuper.ir.dims import MAX_ELEMENTS, Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.unseen import followed
from cutesuper.pipeline import check_definition
from cutesuper.skeletons.kernel.arguments import Extents
from cutesuper.skeletons.matmul import plan as products
from cutesuper.skeletons.matmul.plan import MatmulPlan, grid_shape
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.torch.ops.attention import calls
from cutesuper.torch.ops.attention.calls import fits_open
from cutesuper.torch.ops.attention.kind import Extents as CallExtents
from cutesuper.torch.ops.attention.kind import Kind, Order
from cutesuper.verify.numeric import acceptable
from tests import zoo
from tests.attention import Attention
from tests.plans import Linear
from tests.test_gpu import check as check_kernel
from tests.test_gpu_attention_gradients import Call, judge
from tests.test_gpu_wide import check as check_linear
from tests.test_search_rows import found

Shapes = Sequence[tuple[int, ...]]


def graph_of(build: Callable[..., Any], *shapes: tuple[int, ...]) -> KernelGraph:
    """A graph of bfloat16 inputs."""
    g = cs.new_kernel_graph()
    g.mark_output(build(g, *(g.new_input(s, "bfloat16") for s in shapes)))
    return g


def attend(g: KernelGraph, q: Any, k: Any, v: Any) -> Any:
    """Causal attention of any number of heads."""
    return g.scaled_dot_product_attention(q, k, v, True)


# -------------------------------------------------------------------------------------- definitions

#: graphs with an input or output of more than 2^31 elements
DEFINED: dict[str, KernelGraph] = {
    "result": graph_of(lambda g, x, w: g.matmul(x, w), (70000, 64), (64, 32768)),
    "rows": graph_of(lambda g, x, w: g.matmul(g.rms_norm(x), w), (70000, 32768), (32768, 64)),
    "weights": graph_of(lambda g, x, w: g.matmul(x, w), (16, 65536), (65536, 65536)),
    "batch": graph_of(lambda g, x, w: g.matmul(x, w), (70000, 64, 64), (70000, 64, 1024)),
    "attention": graph_of(attend, *[(64, 32, 16384, 128)] * 3),
    "decoding": graph_of(attend, (64, 8, 4, 128), *[(64, 8, 65536, 128)] * 2),
}


@pytest.mark.parametrize("name", DEFINED)
def test_definitions_have_programs(name: str) -> None:
    graph = DEFINED[name]
    check_definition("superoptimize", graph)
    mu = found(graph).candidates[0].mugraph
    tensors = followed(mu)
    for step in mu.steps:
        made = make_plan(step, tensors, H200)
        views = [a for a in made.arguments if a.name in (*mu.inputs, *mu.outputs)]
        assert views and max(grid_shape(made)[1:] if isinstance(made, MatmulPlan) else [1]) < 65536


def test_slices_and_row_tiles_that_fill_no_side_of_a_grid() -> None:
    many = Linear(m=16 * 65536, n=64, norm=False).plan()
    assert not many.schedule.persistent and grid_shape(many) == (65536, 1, 1)
    few = Linear(m=16 * 65535, n=64, norm=False).plan()
    assert grid_shape(few) == (1, 65535, 1)


def test_blocks_are_counted_in_32_bits() -> None:
    graph = graph_of(lambda g, x, w: g.matmul(x, w), *[(2**16, 2**15, 8, 8)] * 2)
    with pytest.raises(CutesuperError, match="2147483648 blocks, more than 2147483647; split the"):
        cs.superoptimize(graph, target="h200")


def test_partial_results_have_32_bits() -> None:
    mu = Attention(heads=400000, grid=2, keys=256).mugraph()
    with pytest.raises(ScheduleError, match=r"partial results, more than 2147483647; use fewer"):
        make_plan(mu.steps[0], mu.tensors, H200)


def test_offsets_of_halves_of_elements_need_64_bits_earlier() -> None:
    """Threads copy float32 as two halves each."""
    known = Linear(m=2**15, k=2**15 + 2, dtype="float32", norm=False, tile_k=32).plan()
    extents, view = Extents(known.program, known.arguments), next(iter(known.rows.values()))
    assert not extents.wide(view) and extents.wide(view, 2)
    open_ = Linear(m=Symbol("M", 16), k=130, dtype="float32", norm=False, tile_k=32).plan()
    extents, view = Extents(open_.program, open_.arguments), next(iter(open_.rows.values()))
    assert not extents.wide(view) and extents.wide(view, 2)


def test_calls_of_large_tensors_have_kernels_of_their_extents() -> None:
    """Kernels for any extents have 32 bits for offsets in tensors of symbolic extents."""
    tokens = Order.TOKENS
    assert MAX_ELEMENTS < 2**19 * 4096
    kind = Kind(
        1, False, 8, 4, Symbol("L", 4096), Symbol("S", 4096), 128, 128, cs.bfloat16, tokens, tokens
    )
    assert fits_open(kind, CallExtents(1, 2**19 - 1, 4096))
    assert not fits_open(kind, CallExtents(1, 2**19, 4096))
    assert not fits_open(kind, CallExtents(1, 16, 2**21))


# ---------------------------------------------------------------------------------- on the machine

#: products by hand, their knobs, and whether the tests without a GPU run them
NARROW: dict[str, tuple[Linear, dict[str, Any], bool]] = {
    "residual, bias": (Linear(40, 128, 128, 16, bias=True, residual=True, gain=True), {}, True),
    "pieces with a residual": (
        Linear(90, 192, 136, 40, 128, 64, norm=False, residual=True), {"bulk_store": True}, True
    ),
    "pairs that walk": (
        Linear(130, 320, 384, 48, 128, 64),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3}, False,
    ),
    "parts of a cluster": (
        Linear(100, 256, 128, 56, tile_k=64, cluster=2, residual=True), {}, False
    ),
    "parts of the grid": (
        Linear(75, 400, 136, 40, 64, 64, norm=False, bias=True, residual=True, parts=3), {}, True
    ),
    "rows side by side": (
        Linear(136, 250, 72, 128, 64, 64, 2, norm=False, bias=True, turned=True), {}, False
    ),
    "copied": (Linear(70, 130, 67, 64, 64, 64, norm=False, turned=True), {}, True),
    "copied float32": (
        Linear(33, 61, 67, 32, 64, 32, norm=False, residual=True, dtype="float32"), {}, True
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ptx) if c[2] else n for n, c in NARROW.items()]
)
def test_offsets_of_64_bits(narrow: None, name: str) -> None:
    linear, knobs, _ = NARROW[name]
    check_linear(linear, **knobs)


def _gated(g: KernelGraph, x: Any, a: Any, b: Any) -> Any:
    return g.silu(g.matmul(x, a)) * g.matmul(x, b)


#: programs that the search cuts
SEARCHED: dict[str, KernelGraph] = {
    "gated": graph_of(_gated, (40, 128), (128, 72), (128, 72)),
    "batched, with a residual": graph_of(
        lambda g, x, w, r: g.matmul(x, w) + r, (3, 40, 64), (3, 64, 72), (3, 40, 72)
    ),
    "more dimensions than a descriptor": graph_of(
        lambda g, x, w: g.matmul(x, w), (2, 2, 2, 5, 128), (2, 2, 1, 128, 64)
    ),
    "gated, odd": graph_of(_gated, (3, 17, 67), (67, 33), (67, 33)),
    "layer norm": zoo.layer_norm_linear(40, 512, 72),
    "lora": zoo.lora(40, 200, 200, 64),
    "softmax along columns": zoo.softmax_linear(20, 72, 200, "bfloat16"),
    "prompt": graph_of(attend, *[(2, 2, 100, 64)] * 3),
    "decoding": graph_of(attend, (2, 2, 1, 64), *[(2, 2, 1000, 64)] * 2),
    "bias": graph_of(
        lambda g, q, k, v, b: g.matmul(g.softmax(g.matmul(q, g.transpose(k)) * 0.125 + b), v),
        *[(3, 70, 64)] * 3, (3, 70, 70),
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", SEARCHED)
def test_searched_programs_with_offsets_of_64_bits(narrow: None, name: str) -> None:
    kernel = cs.superoptimize(SEARCHED[name])
    check_kernel(kernel, zoo.draw(kernel.graph, 1, "cuda"))


@pytest.mark.gpu
@pytest.mark.ptx
def test_parts_of_keys_with_offsets_of_64_bits(narrow: None) -> None:
    kernel = Attention(group=4, rows=0, keys=700, dtype="bfloat16", grid=3).kernel()
    check_kernel(kernel, zoo.draw(kernel.graph, 1, "cuda"))


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("tokens", [False, True])
def test_gradients_with_offsets_of_64_bits(
    narrow: None, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    monkeypatch.setattr(calls, "MAX_ELEMENTS", 100)
    judge(Call(2, 1, 2, 41, 91, 40, 72, lengths=(91, 30), tokens=tokens))


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("rows", [16, 40])
def test_blocks_in_one_row_of_a_grid(
    monkeypatch: pytest.MonkeyPatch, compiled_here: None, rows: int
) -> None:
    """As many as if a side had room for one: of row tiles, and of slices with parts of the grid."""
    monkeypatch.setattr(products, "MAX_SIDE", 1)
    check_linear(Linear(rows, 400, 136, 16, 64, 64, norm=False, bias=True, parts=3))
    check_linear(Linear(rows, 512, 128, 16, cluster=2, residual=True))


# ------------------------------------------------------------------------------------- far elements


def _far(shape: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
    """A tensor with numbers in a part of it; the rest is not written, and takes no memory of a
    machine without a GPU."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    own = x[box]
    own.copy_(torch.randn(own.shape))
    return x


#: by name: what is done with a part of a large tensor, its shape, the part, and other shapes
FAR: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[slice, ...], Shapes]] = {
    "residual": (
        lambda r, x, w: x @ w + r, (3, 2**14, 2**16),
        (slice(0, 3), slice(2**14 - 16, 2**14), slice(2**16 - 64, 2**16)),
        ((3, 16, 128), (128, 64)),
    ),
    "rows": (
        lambda x, w: x @ w, (2**16, 2**16),
        (slice(2**16 - 16, 2**16), slice(2**16 - 128, 2**16)), ((128, 64),),
    ),
    "columns": (
        lambda w, x: x @ w, (3, 2**14, 2**16),
        (slice(0, 3), slice(2**14 - 128, 2**14), slice(2**16 - 64, 2**16)), ((3, 16, 128),),
    ),
    "shifted rows": (
        lambda x, w: F.layer_norm(x, x.shape[-1:]) @ w, (3, 2**14, 2**16),
        (slice(0, 3), slice(2**14 - 16, 2**14), slice(2**16 - 512, 2**16)), ((512, 64),),
    ),
    "keys": (
        lambda k, q, v: F.scaled_dot_product_attention(q, k, v), (3, 2**14, 2**16),
        (slice(0, 3), slice(2**14 - 100, 2**14), slice(2**16 - 64, 2**16)),
        ((3, 16, 64), (3, 100, 64)),
    ),
    "mask": (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (3, 2**14, 2**16),
        (slice(0, 3), slice(2**14 - 16, 2**14), slice(2**16 - 104, 2**16)),
        ((3, 16, 64), (3, 104, 64), (3, 104, 64)),
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", FAR)
def test_parts_that_32_bits_do_not_reach(name: str) -> None:
    f, shape, box, shapes = FAR[name]
    large = _far(shape, box)
    rest = [(torch.randn(s, device="cuda") * s[-2] ** -0.5).bfloat16() for s in shapes]
    with torch.no_grad():
        program = cs.superoptimize(lambda x, *t: f(x[box], *t), (large, *rest))
        y = program(large, *rest)
    assert len(program.regions) == 1
    part = large[box].contiguous()
    exact = f(part.double(), *(t.double() for t in rest))
    report = acceptable(y, exact, f(part, *rest), cs.bfloat16)
    assert report, report.message


# ---------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tail", ["", "residual", "gated"])
def test_products_of_more_than_2_31_elements(tail: str) -> None:
    """The last rows, which 32 bits do not reach, and a few of the others."""
    m, k, n = 70001, 64, 32768
    x, w, v = (torch.randn(s, device="cuda").bfloat16() for s in ((m, k), (k, n), (k, n)))
    r = torch.randn(m, n, device="cuda", dtype=torch.bfloat16) if tail == "residual" else None

    def f(x: Tensor, w: Tensor, v: Tensor, *r: Tensor) -> Tensor:
        y = x @ w
        return y + r[0] if r else F.silu(y) * (x @ v) if tail == "gated" else y

    given = () if r is None else (r,)
    with torch.no_grad():
        y = cs.superoptimize(f, (x, w, v, *given))(x, w, v, *given)
    some = torch.tensor([0, 1, 65535, 65536, m - 2, m - 1], device="cuda")
    few = [x[some], w, v, *(t[some] for t in given)]
    report = acceptable(y[some], f(*(t.double() for t in few)), f(*few), cs.bfloat16)
    assert report, report.message


@pytest.mark.gpu
def test_sums_over_rows_of_more_than_2_31_elements() -> None:
    """The product of a normalized tensor, of which every row is read."""
    x = torch.randn(70001, 32768, device="cuda", dtype=torch.bfloat16)
    w = (torch.randn(32768, 64, device="cuda") / 128).bfloat16()

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) @ w

    with torch.no_grad():
        y = cs.superoptimize(f, (x, w))(x, w)
    some = torch.tensor([0, 65535, 65536, 70000], device="cuda")
    report = acceptable(y[some], f(x[some].double(), w.double()), f(x[some], w), cs.bfloat16)
    assert report, report.message


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [False, True], ids=["heads", "tokens"])
def test_attention_of_more_than_2_31_elements(tokens: bool) -> None:
    """Prompts; the last sequence and the first."""
    b, h, n, d = 65, 32, 8192, 128

    def drawn(heads: int) -> Tensor:
        shape = (b, n, heads, d) if tokens else (b, heads, n, d)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2) if tokens else x

    q, k, v = drawn(h), drawn(4), drawn(4)
    y = cs.ops.attention(q, k, v, is_causal=True, enable_gqa=True)
    for at in (0, b - 1):
        one = [(t.bfloat16(), t.double()) for t in (q[at, -1:], k[at, -1:], v[at, -1:])]
        eager, exact = (
            F.scaled_dot_product_attention(q1, k1, v1, is_causal=True)
            for q1, k1, v1 in zip(*one, strict=True)
        )
        report = acceptable(y[at, -1:], exact, eager, cs.bfloat16)
        assert report, report.message
