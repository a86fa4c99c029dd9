"""Segments that are left out for what their products store: no skeleton runs any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from cutesuper.autodiff.gradient import grad
from cutesuper.egraph.labelled import Region
from cutesuper.errors import CutesuperError, SearchError
from cutesuper.ir.border import inside
from cutesuper.ir.dims import Dim
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.search.cuts import Flat, Segments
from cutesuper.search.forms import recognized
from cutesuper.search.unrelated import Unrelated
from cutesuper.targets import H200
from tests.fuzz.draw import draw_case


def linear(g: KernelGraph, x: Tensor, n: int) -> Tensor:
    weight: tuple[Dim, int] = (x.shape[-1], n)
    return g.matmul(x, g.new_input(weight, "bfloat16"))


def mlp(g: KernelGraph, x: Tensor) -> Tensor:
    return linear(g, g.gelu(linear(g, g.layer_norm(x), 512)), 384)


def gated(g: KernelGraph, x: Tensor) -> Tensor:
    return linear(g, g.mul(g.silu(linear(g, x, 512)), linear(g, x, 512)), 384)


def heads(g: KernelGraph, x: Tensor) -> Tensor:
    """Attention between projections of different widths."""
    q, k, v = (linear(g, x, n) for n in (384, 384, 64))
    scores = g.softmax(g.matmul(q, g.transpose(k)))
    return linear(g, g.matmul(scores, v), 384)


def narrow(g: KernelGraph, x: Tensor) -> Tensor:
    """A product of 64 columns inside another one."""
    return linear(g, g.tanh(linear(g, x, 64)), 384)


def gradients(build: Callable[[KernelGraph, Tensor], Tensor]) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(build(g, g.new_input((256, 384), "bfloat16", name="x")))
    return grad(g)


def parts(graph: KernelGraph) -> Iterator[tuple[Segments, Unrelated, tuple[int, ...], int, int]]:
    """Segments of several pieces."""
    within, border = inside(graph.expanded())
    segments = Segments(Flat(within, border=border))
    unrelated = Unrelated(segments.flat)
    for order in segments.orders:
        marks = segments.marks(order)
        for pieces in (2, 3, 5, 8, 13, 21):
            for start, end in zip(marks, marks[pieces:], strict=False):
                if not segments.mixed(order, start, end):
                    yield segments, unrelated, order, start, end


def refusal(region: Region) -> SearchError | None:
    """Why no skeleton runs a region; None if one does."""
    try:
        recognized(region, H200)
    except SearchError as error:
        return error
    return None


def left_out(graph: KernelGraph) -> tuple[int, int]:
    """How many segments are left out, and how many are not. Those are refused as regions too."""
    left = kept = 0
    for segments, unrelated, order, start, end in parts(graph):
        if not unrelated(order[start:end]):
            kept += 1
            continue
        left += 1
        assert isinstance(refusal(segments.segment(order, start, end).region), SearchError)
    return left, kept


@pytest.mark.parametrize("build", [mlp, gated, heads, narrow])
def test_no_skeleton_runs_what_is_left_out(
    build: Callable[[KernelGraph, Tensor], Tensor],
) -> None:
    left, kept = left_out(gradients(build))
    assert kept > 0 and left > 0


def test_what_one_kernel_computes_is_not_left_out() -> None:
    """Two products of one operand, of different widths."""
    g = new_kernel_graph()
    x = g.new_input((256, 384), "bfloat16")
    for n in (384, 128):
        g.mark_output(linear(g, x, n))
    segments = Segments(Flat(g.expanded()))
    whole = segments.flat.order
    assert not Unrelated(segments.flat)(whole)
    recognized(segments.flat.segment(whole).region, H200)


def test_what_is_left_out_of_random_programs() -> None:
    left = 0
    for index in range(300):
        case = draw_case(39, index)
        with suppress(CutesuperError):  # refused by name
            graph = case.graph()
            wrt = [f"x{i}" for i in case.wrt or ()]
            left += left_out(grad(graph, wrt) if wrt else graph)[0]
    assert left > 20
