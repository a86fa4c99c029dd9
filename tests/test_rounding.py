"""Rounding to float16 in kernels: the rule, muGraphs that break it, and programs that keep it.

`execute(..., rounded=True)` rounds where kernels do. The programs that the search finds are run so
on operands of 2^-12 to 2^12, and judged as kernels are, against PyTorch which rounds nothing but
operands of products and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import cutesuper as cs
from cutesuper.errors import VerificationError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.dtypes import as_dtype, float16
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators import lookup
from cutesuper.ir.rounding import Trials, levels, narrow, proportional
from cutesuper.pipeline import Options, choose
from cutesuper.search.cuts import Flat, Segments
from cutesuper.targets import H200
from cutesuper.verify.numeric import acceptable, execute
from cutesuper.verify.rounding import check_rounding
from tests.mugraphs import (
    Block,
    attention,
    attention_kernel,
    mugraph,
    rms_linear,
    rms_linear_fused,
    rms_linear_split_k,
)
from tests.softmax_mugraphs import online_attention, safe_attention

Build = Callable[..., Tensor]
M, K, N = 16, 256, 128


def graph_of(build: Build, dtype: str = "float16", **shapes: tuple[int, ...]) -> KernelGraph:
    g = cs.new_kernel_graph()
    g.mark_output(build(g, *(g.new_input(s, dtype, name=n) for n, s in shapes.items())))
    return g


# -------------------------------------------------------------------------------------- the rule


def test_any_three_tensors_meet_in_all_combinations() -> None:
    plus = levels()[:-1] > 1
    assert (levels()[-1] == 1).all()
    for columns in combinations(range(plus.shape[1]), 3):
        assert len(np.unique(plus[:, columns], axis=0)) == 8


UNARY: dict[str, tuple[bool, Build]] = {
    "x + r": (True, lambda g, x, r, a: g.add(x, r)),
    "x - 2 r": (True, lambda g, x, r, a: g.sub(x, g.mul(r, 2.0))),
    "x a": (True, lambda g, x, r, a: g.mul(x, a)),
    "silu(x)": (True, lambda g, x, r, a: g.silu(x)),
    "x sigmoid(r)": (True, lambda g, x, r, a: g.mul(x, g.sigmoid(r))),
    "tanh(x)": (True, lambda g, x, r, a: g.tanh(x)),
    "rms_norm(x r)": (True, lambda g, x, r, a: g.rms_norm(g.mul(x, r))),
    "x^2 / mean(x^2)": (True, lambda g, x, r, a: g.div(g.square(x), g.mean(g.square(x), -1))),
    "exp(x - max)": (True, lambda g, x, r, a: g.exp(g.sub(x, g.max(x, -1)))),
    "softmax(x)": (True, lambda g, x, r, a: g.softmax(x)),
    "x r": (False, lambda g, x, r, a: g.mul(x, r)),
    "x / r": (False, lambda g, x, r, a: g.div(x, r)),
    "x^2": (False, lambda g, x, r, a: g.square(x)),
    "relu(x)^2": (False, lambda g, x, r, a: g.square(g.relu(x))),
    "exp(x)": (False, lambda g, x, r, a: g.exp(x)),
    "x silu(r)": (False, lambda g, x, r, a: g.mul(x, g.silu(r))),
    "x / 1000": (False, lambda g, x, r, a: g.mul(x, 0.001)),
    "1000 x": (False, lambda g, x, r, a: g.mul(x, 1000.0)),
}


@pytest.mark.parametrize("name", UNARY)
def test_what_float16_holds(name: str) -> None:
    fits, build = UNARY[name]
    graph = graph_of(build, x=(M, K), r=(M, K), a=(K,)).expanded()
    assert (graph.outputs[0] in narrow(graph)) == fits


def test_operands_and_results_of_products_are_rounded_by_whoever_multiplies() -> None:
    g = graph_of(lambda g, x, z, w: g.square(g.matmul(g.mul(x, z), w)), x=(M, K), z=(M, K),
                 w=(K, N))  # fmt: skip
    kinds = {n.operator: i in narrow(g) for i, n in enumerate(g.nodes)}
    assert kinds == {"input": True, "mul": True, "matmul": True, "square": False}


def test_a_constant_factor_is_the_same_value_for_float16() -> None:
    y = np.random.default_rng(0).standard_normal((5, 3, 4))
    moved = y.transpose(0, 2, 1)
    assert proportional(y, y) and proportional(-0.5 * moved, y)
    assert not proportional(100 * y, y) and not proportional(np.square(y), y)
    assert not proportional(y * np.arange(1, 6)[:, None, None], y)  # a factor of each trial


# ---------------------------------------------------------------------------- muGraphs of others


def gated(dtype: str = "float16", multiplied: bool = False) -> KernelGraph:
    def build(g: KernelGraph, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        y = g.mul(x, z)
        if multiplied:
            return g.div(g.matmul(y, w), g.sqrt(g.add(g.mean(g.square(y), -1), 1e-6)))
        return g.matmul(g.rms_norm(y), w)

    return graph_of(build, dtype, X=(M, K), Z0=(M, K), W=(K, N))


def gated_fused(g: KernelGraph, dtype: str = "float16") -> MuGraph:
    """acc((X Z) W) / sqrt(acc(mean((X Z)^2)) + eps)."""
    b = Block({"M": M, "K": K, "N": N}, {"N.grid": 2, "K.loop": 2}, {"M": M, "K": 128, "N": 64})
    y = b.op("mul", b.load("X", "M", "K"), b.load("Z0", "M", "K"))
    yw = b.close(b.op("matmul", y, b.load("W", "K", "N"), over="K"), "K")
    mean = b.close(b.op("mean", b.op("square", y), over="K"), "K")
    b.store("Z", b.op("div", yw, b.op("sqrt", b.op("add", mean, b.const(1e-6)))), "M", "N")
    return typed(mugraph(g, b.step()), dtype)


def typed(mu: MuGraph, dtype: str, *names: str) -> MuGraph:
    """The program with tensors (default: all) of another element type."""
    kind = as_dtype(dtype)
    tensors = {
        n: replace(t, dtype=kind) if n in (names or mu.tensors) else t
        for n, t in mu.tensors.items()
    }
    return replace(mu, tensors=tensors)


def squares_first(g: KernelGraph) -> MuGraph:
    """Y = X^2, then Z = Y / mean(Y): two kernels of rows."""
    a = Block({"M": M, "K": K}, {"M.grid": M}, {"M": 1, "K": K})
    a.store("Y", a.op("square", a.load("X", "M", "K")), "M", "K")
    b = Block({"M": M, "K": K}, {"M.grid": M}, {"M": 1, "K": K})
    y = b.load("Y", "M", "K")
    b.store("Z", b.op("div", y, b.op("mean", y, over="K")), "M", "K")
    return mugraph(g, a.step("squares"), b.step("quotients"), Y=(M, K))


def test_a_product_of_what_float16_cannot_hold_is_refused() -> None:
    graph = gated()
    with pytest.raises(VerificationError, match=r"operation 2 \(mul\) is an operand .* bfloat16"):
        cs.compile_mugraph(graph, gated_fused(graph), target="h200")
    assert torch.isinf(execute(gated_fused(graph), [*large(graph)], rounded=True)[0]).any()
    check_rounding(gated("bfloat16"), gated_fused(gated("bfloat16"), "bfloat16"))


def large(graph: KernelGraph) -> list[torch.Tensor]:
    shapes = [tuple(map(extent, graph.nodes[i].shape)) for i in graph.inputs]
    return [300.0 * torch.ones(s, dtype=torch.float64) for s in shapes]


def test_what_the_graph_multiplies_itself_may_be_rounded() -> None:
    graph = gated(multiplied=True)
    check_rounding(graph, gated_fused(graph))


def test_what_is_loaded_and_what_is_weighed_may_be_multiplied_before_the_norm() -> None:
    for weight in (False, True):
        graph = rms_linear(weight=weight)
        check_rounding(graph, rms_linear_fused(graph, weight=weight))


def test_tensors_between_kernels_obey_the_rule() -> None:
    graph = graph_of(lambda g, x: g.div(g.square(x), g.mean(g.square(x), -1)), X=(M, K))
    mu = squares_first(graph)
    with pytest.raises(VerificationError, match="kernel squares: Y is stored for another kernel"):
        check_rounding(graph, mu)
    check_rounding(graph, typed(mu, "float32", "Y"))


def test_partial_products_that_are_not_normalized_are_stored_as_float32() -> None:
    graph = rms_linear()
    mu = rms_linear_split_k(graph)
    with pytest.raises(VerificationError, match="kernel partial: T is stored"):
        check_rounding(graph, typed(mu, "float32", "U"))
    check_rounding(graph, typed(mu, "float32", "T", "U"))


def test_weights_of_attention_are_exponentials_below_one_or_the_graphs_own() -> None:
    """Without a maximum exp(S) is rounded: by the graph too if it divides after the product."""
    check_rounding(attention(), attention_kernel(attention()))
    check_rounding(safe_attention(), online_attention(safe_attention(), loop=4))
    graph = cs.new_kernel_graph()
    shapes = {"Q": (2, 4, 8), "K": (2, 8, 64), "V": (2, 64, 8)}
    q, k, v = (graph.new_input(s, name=n) for n, s in shapes.items())
    e = graph.exp(graph.mul(graph.matmul(q, k), 0.125))
    graph.mark_output(graph.matmul(graph.div(e, graph.sum(e, -1)), v))
    with pytest.raises(VerificationError, match=r"operation 5 \(exp\)"):
        check_rounding(graph, attention_kernel(graph))


def test_rounded_execution_rounds_where_kernels_do() -> None:
    graph = gated()
    torch.manual_seed(0)
    x, z, w = (torch.randn(s).half() for s in ((M, K), (M, K), (K, N)))
    y = x.float() * z.float()
    rms = (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = ((y.half().float() @ w.float()) / rms).half().float()
    [found] = execute(gated_fused(graph), [x, z, w], torch.float32, rounded=True)
    torch.testing.assert_close(found, want, rtol=2e-3, atol=1e-3)  # an ulp of the last rounding
    [exact] = execute(gated_fused(graph), [x, z, w], torch.float32)
    assert (found - want).norm() < 0.2 * (exact - want).norm()
    squares = squares_first(graph_of(lambda g, x: g.div(g.square(x), g.mean(g.square(x), -1)),
                                     X=(M, K)))  # fmt: skip
    y = x.float().square().half().float()
    [found] = execute(squares, [x], torch.float32, rounded=True)
    torch.testing.assert_close(found, (y / y.mean(-1, keepdim=True)).half().float(), rtol=1e-3,
                               atol=0)  # fmt: skip


# ------------------------------------------------------------------------------ what is found

#: programs, with the number of their kernels in float16 and in bfloat16
FOUND: dict[str, tuple[int, int, Build, dict[str, tuple[int, ...]]]] = {
    "norm": (1, 1, lambda g, x, w: g.matmul(g.rms_norm(x), w), {}),
    "norm with gain": (1, 1, lambda g, x, w, a: g.matmul(g.rms_norm(x, a), w), {"a": (K,)}),
    "residual": (1, 1, lambda g, x, w, r: g.matmul(g.rms_norm(g.add(x, r)), w), {"r": (M, K)}),
    "product": (2, 1, lambda g, x, w, z: g.matmul(g.rms_norm(g.mul(x, z)), w), {"z": (M, K)}),
    "squares": (
        2, 1, lambda g, x, w: g.matmul(g.div(g.square(x), g.mean(g.square(x), -1)), w), {}
    ),
    "relu squared": (2, 1, lambda g, x, w: g.matmul(g.rms_norm(g.square(g.relu(x))), w), {}),
    "exponentials": (
        2, 1, lambda g, x, w: g.matmul(g.div(g.exp(x), g.sum(g.exp(x), -1)), w), {}
    ),
    "softmax": (2, 2, lambda g, x, w: g.matmul(g.softmax(x), w), {}),
}  # fmt: skip


@cache
def found(name: str, dtype: str) -> tuple[KernelGraph, MuGraph]:
    _, _, build, more = FOUND[name]
    graph = graph_of(build, dtype, x=(M, K), w=(K, N), **more)
    return graph, choose(graph, Options(H200, tuned=False))[1].candidate.mugraph


def careful(graph: KernelGraph, inputs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """PyTorch in float32, which rounds operands of products and the output only."""
    values: list[Any] = []
    feed = iter(inputs)
    expanded = graph.expanded()
    for n in expanded.nodes:
        args = [values[j] for j in n.inputs]
        if n.operator == "matmul":
            args = [x.to(dtype).float() for x in args]
        new = next(feed).float() if n.operator == "input" else None
        values.append(lookup(n.operator).reference(args, dict(n.attributes))
                      if new is None else new)  # fmt: skip
    return values[expanded.outputs[0]].to(dtype)


def operands(graph: KernelGraph, scale: float, together: bool) -> list[torch.Tensor]:
    """Rows of one magnitude, all of them or the first; weights of magnitude 1."""
    torch.manual_seed(0)
    drawn: list[torch.Tensor] = []
    for i in graph.inputs:
        node = graph.nodes[i]
        x = torch.randn(tuple(map(extent, node.shape)))
        rows = node.name == "x" or (together and node.name in "zr")
        drawn.append((scale * x if rows else x).to(node.dtype.torch))
    return drawn


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FOUND)
def test_programs_keep_the_numeric_rule_at_all_magnitudes(name: str, dtype: str) -> None:
    graph, mu = found(name, dtype)
    assert len(mu.steps) == FOUND[name][dtype == "bfloat16"]
    for power in range(-12, 13, 4):
        for together in (False, True):
            inputs = operands(graph, 2.0**power, together)
            eager = careful(graph, inputs, as_dtype(dtype).torch)
            if not eager.isfinite().all():  # exponentials that float32 cannot hold
                assert name == "exponentials" and power > 4
                continue
            [want] = evaluate(graph, [x.double() for x in inputs], torch.float64)
            [got] = execute(mu, inputs, torch.float32, rounded=True)
            report = acceptable(got.to(eager.dtype), want, eager, dtype)
            assert report, f"2^{power}, {together}: {report.message}"


def test_a_product_after_the_loop_takes_what_is_normalized() -> None:
    """``(rms_norm(X) A) B``: X A would be rounded before it is divided."""
    graph = graph_of(
        lambda g, x, w, a, b: g.add(g.matmul(g.rms_norm(x), w),
                                    g.matmul(g.matmul(g.rms_norm(x), a), b)),
        x=(M, K), w=(K, N), a=(K, 16), b=(16, N),
    )  # fmt: skip
    mu = choose(graph, Options(H200, tuned=False))[1].candidate.mugraph
    inputs = operands(graph, 2.0**12, True)
    [got] = execute(mu, inputs, torch.float32, rounded=True)
    [want] = evaluate(graph, [x.double() for x in inputs], torch.float64)
    assert acceptable(got.half(), want, careful(graph, inputs, torch.float16), "float16")


def test_parts_of_a_product_that_a_cluster_shares_are_judged_together() -> None:
    """``X W + 0.5 (X A) B``: every block multiplies its part of X A, which the graph rounds."""
    graph = graph_of(
        lambda g, x, w, a, b: g.add(g.matmul(x, w), g.matmul(g.mul(g.matmul(x, a), 0.5), b)),
        x=(16, 4096), w=(4096, N), a=(4096, 16), b=(16, N),
    )  # fmt: skip
    _, choice = choose(graph, Options(H200, tuned=False))
    [step] = choice.candidate.mugraph.steps
    assert not choice.refused and any(a.name == "K.cluster" for a in step.program.axes)


def test_values_between_kernels_are_float32_where_float16_cannot_hold_them() -> None:
    """The product of two rows waits for a sum over the rows beside which it is read again."""
    graph = graph_of(
        lambda g, x, z: g.div(g.mul(x, z), g.sqrt(g.mean(g.mean(g.square(g.mul(x, z)), -1), 0))),
        x=(4096, K), z=(4096, K),
    )  # fmt: skip
    for candidate in cs.mugraphs(graph, target="h200", keep=8).candidates:
        mu = candidate.mugraph
        check_rounding(graph, mu)
        kinds = [mu.tensors[n].dtype for s in mu.steps for n in s.writes if n not in mu.outputs]
        assert all(str(k) == "float32" for k in kinds)


def gradient_of_the_largest(dtype: str) -> KernelGraph:
    """1 / (the sum of x @ w less its maximum) has a gradient with respect to the largest."""
    return cs.grad(
        graph_of(
            lambda g, x, w: g.div(1.0, g.sum(g.sub(g.matmul(x, w), g.max(g.matmul(x, w), -1)), -1)),
            dtype, x=(64, 32), w=(32, 16),
        ),
        "x",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_maximum_that_is_compared_with_its_elements_is_rounded_like_them(dtype: str) -> None:
    """A kernel may store the product and its maximum for another one that compares them: of a
    maximum in float32, no element was the largest in half of the rows, and 0 / 0 came out."""
    flat = Flat(gradient_of_the_largest(dtype).expanded())
    [top] = [i for i, n in enumerate(flat.graph.nodes) if n.facets.selects]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    largest = x.amax(-1, keepdim=True).to(flat.dtype(top).torch).float()
    [elements] = flat.graph.nodes[top].inputs
    stored = x.to(flat.dtype(elements).torch).float()
    assert (stored >= largest).any(-1).all() and (stored <= largest).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maxima_of_maxima_that_are_compared_are_rounded_like_the_elements(dtype: str) -> None:
    """``x.amax()`` takes maxima of rows first: none of the rounded elements was the largest."""
    graph = graph_of(lambda g, x: g.apply("amax", g.silu(x), dims=(0, 1)), dtype, x=(16, 8))
    both = cs.split(graph)
    assert "out" not in both.saved  # which is rounded, and compared with elements that are not
    flat = Flat(both.backward.expanded())
    tops = [i for i, n in enumerate(flat.graph.nodes) if n.facets.selects]
    assert len(tops) == 2
    elements = flat.graph.nodes[tops[0]].inputs[0]
    assert {str(flat.dtype(i)) for i in (*tops, elements)} == {dtype}


def test_squares_of_shares_are_float32_between_kernels() -> None:
    """A norm along another dimension than a softmax is made of the squares of small shares."""

    def normalised(g: KernelGraph, x: Tensor) -> Tensor:
        share = g.softmax(x, 1)
        return share / g.sqrt(g.sum(g.square(share), 0))

    made = graph_of(normalised, x=(64, 32)).expanded()
    flat, nodes = Flat(made), made.nodes
    [square] = [i for i, n in enumerate(nodes) if n.facets.powers == (2,)]
    assert str(flat.dtype(square)) == "float32"
    assert str(flat.dtype(nodes[square].inputs[0])) == "float16"


def test_a_maximum_that_is_only_subtracted_is_float32_between_kernels() -> None:
    flat = Flat(graph_of(lambda g, x: g.softmax(g.square(x)), x=(8, 64)).expanded())
    [top] = [i for i, n in enumerate(flat.graph.nodes) if n.facets.selects]
    assert str(flat.dtype(top)) == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (lambda g, x, w: g.log_softmax(g.silu(g.matmul(x, w)), dim=-1), ["max", "log"]),
        (lambda g, x, w: g.layer_norm(g.silu(g.matmul(x, w))), ["mean"]),
    ],
)
def test_what_a_kept_statistic_is_subtracted_of_is_float32_between_kernels(
    build: Build, kept: list[str], dtype: str
) -> None:
    """The statistic is of numbers that were not rounded: exp(x - lse) was 0.94 where it is 1."""
    made = graph_of(build, dtype, x=(48, 8), w=(8, 16))
    flat = Flat(cs.split(made, save=kept).backward.expanded())
    nodes = flat.graph.nodes
    elements = [i for i in flat.shifted if nodes[i].facets.contracts]
    assert elements and {str(flat.dtype(i)) for i in flat.shifted} == {"float32"}
    assert {str(flat.dtype(i)) for i in range(len(nodes))} > {"float32"}


def test_rounded_logits_and_the_sum_of_unrounded_exponentials_are_not_read_together() -> None:
    flat = Flat(graph_of(lambda g, x, w: g.log_softmax(x @ w), x=(48, 8), w=(8, 64)).expanded())
    nodes = flat.graph.nodes
    [logits] = [i for i, n in enumerate(nodes) if n.facets.contracts]
    [total] = [i for i, n in enumerate(nodes) if n.facets.sums]
    assert {(logits, total), (logits, total + 1)} <= {*flat.rounded}  # and its logarithm
    differences = tuple(i for i, n in enumerate(nodes) if n.facets.subtracts)
    segments = Segments(flat)
    assert segments.mixed(differences, 0, 2)  # reads logits, maximum and logarithm
    assert not segments.mixed(flat.order, 1, len(flat.order))  # takes the sum again


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_norms_of_few_elements_are_of_the_magnitude_of_many(width: int) -> None:
    # 1 / rms of three normal elements of 2^-12 may be 65504; it is 4096 for the 64 of a head
    x = Trials().draw("v", (8, width), float16, 2)
    ratio = np.sqrt(np.square(x).mean(-1)) / levels()[:, :1]
    assert 0.49 < ratio.min() < ratio.max() < 1.51


def test_weights_of_wrong_labels_refuse_nothing() -> None:
    """They are NaN, which a trial took for a value that float16 cannot hold."""
    g = cs.new_kernel_graph()
    x, z = (g.new_input((4, 4, 4), "float16", name=n) for n in "XZ")
    labels = g.new_input((4, 4, 1), "int64", "labels")
    change = g.sub(g.mul(x, g.label_weight(labels, classes=3)), x)
    total = g.add(z, change)
    g.mark_output(g.max(change, 0))
    g.mark_output(g.silu(total), "float32")
    g.mark_output(g.sum(total, 2))
    check_rounding(g, choose(g, Options(H200, tuned=False))[1].candidate.mugraph)


def test_outputs_of_labels_alone_are_judged() -> None:
    """They are the same in all trials."""
    g = cs.new_kernel_graph()
    x = g.new_input((cs.symbol("M", 7), 2), "float16")
    label = g.new_input((1, 1), "int64")
    g.mark_output(g.softmax(x, 0))
    g.mark_output(g.label_weight(label, classes=3))
    check_rounding(g, choose(g, Options(H200, tuned=False))[1].candidate.mugraph)
