"""Mirage's muGraphs: what is read computes what the file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import cutesuper as cs
from cutesuper.errors import GraphError, LoweringError
from cutesuper.ir.block import KernelStep, MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.text import mugraph_text
from cutesuper.show.svg import mugraph_svg
from cutesuper.skeletons.planner import make_plan
from cutesuper.verify.numeric import compare, execute
from tests import mirage_json as mj
from tests.mirage_json import Graph, Json, one, read
from tests.mirage_random import graphs
from tests.mirage_replay import replay
from tests.mugraphs import Block, mugraph


def agree(graph: list[Json], mu: MuGraph, positive: bool = False) -> None:
    """The muGraph gives what running the JSON block by block gives."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(str(n)) for n in mu.tensors[i].shape]) for i in mu.inputs]
    if positive:
        inputs = [np.abs(x) + 0.5 for x in inputs]
    found = execute(mu, [torch.from_numpy(x) for x in inputs])
    for want, got in zip(replay(graph, inputs), found, strict=True):
        if np.isfinite(want).all():
            np.testing.assert_allclose(got.numpy(), want, 1e-9, 1e-9 * np.abs(want).max())


def definition(mu: MuGraph, build: Callable[..., Tensor]) -> KernelGraph:
    """A kernel graph with the inputs of a muGraph."""
    g = cs.new_kernel_graph()
    inputs = [g.new_input(mu.tensors[n].shape, mu.tensors[n].dtype) for n in mu.inputs]
    g.mark_output(build(g, *inputs))
    return g


# ----------------------------------------------------------------------- published structures


def rms(g: KernelGraph, x: Tensor) -> Tensor:
    return g.rms_norm(x, eps=0.0)


def softmax_v(g: KernelGraph, scores: Tensor, v: Tensor) -> Tensor:
    e = g.exp(scores)
    return g.div(g.matmul(e, v), g.sum(e, 2))


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "rms_linear": lambda g, x, w: g.matmul(rms(g, x), w),
    "attention": lambda g, q, k, v: softmax_v(g, g.matmul(q, k), v),
    "outer_product_attention": lambda g, q, k, v: softmax_v(g, g.matmul(rms(g, q), k), rms(g, v)),
    "norm_transformer": lambda g, h, x, a: rms(g, x + a * (rms(g, h) + x)),
    "gated_mlp": lambda g, x, w, v: g.silu(x @ w) * (x @ v),
    "lora": lambda g, x, w, a, b: x @ w + (x @ a) @ b,
    "split_k_mlp": lambda g, x, a, b: g.exp(x @ a) @ b,
}
RIGHT: dict[str, list[Json]] = {
    "rms_linear": mj.rms_linear(),
    "rms_linear no loop": mj.rms_linear(loop=0),
    "rms_linear 2x4096x6144": mj.rms_linear(2, 4096, 6144, 256, 32),
    **{
        f"attention {scores} {loop}": mj.attention(scores, loop)
        for scores in ("nored", "red_ld_sum", "redtox_ld_sum")
        for loop in (1, 2)
    },
    "norm_transformer": mj.norm_transformer(),
    "norm_transformer split": mj.norm_transformer(split=True),
    "gated_mlp": mj.gated_mlp(),
    "gated_mlp split": mj.gated_mlp(split=True),
    "lora products": mj.lora(),
    "lora concat": mj.lora("concat"),
    "lora concat_then_matmul": mj.lora("concat_then_matmul"),
    "split_k_mlp": mj.split_k_mlp(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_muGraphs_are_accepted(name: str) -> None:
    mu = one(RIGHT[name])
    g = definition(mu, PROGRAMS[name.split()[0]])
    assert cs.verify(g, mu, full=True)
    assert compare(g, mu)
    if "4096" not in name:
        agree(RIGHT[name], mu)


def test_an_outer_product_is_read_and_rejected() -> None:
    data = mj.outer_product_attention()
    mu = one(data)
    agree(data, mu)
    g = definition(mu, PROGRAMS["outer_product_attention"])
    result = cs.verify(g, mu)
    assert not result and result.counterexample is not None
    assert not compare(g, mu)


def test_published_extents_are_read_in_the_simplest_labels() -> None:
    (step,) = one(mj.rms_linear(2, 4096, 6144, 256, 32)).steps
    assert [str(a) for a in step.program.axes] == ["K.loop(32)", "N.grid(256)"]
    assert step.program.tile == {"M": 2, "K": 128, "N": 24}
    first, second = one(mj.attention("red_ld_sum", 2)).steps
    assert all(
        isinstance(label, str)
        for s in (first, second)
        for op in (*s.program.loads(), *s.program.stores())
        for label in op.attributes["map"]
    )
    assert second.program.dims["E"] == 2  # partial sums of two blocks, the loop over them


def test_tensors_between_kernels_are_divided_as_kernels_divide_them() -> None:
    mu = one(mj.attention("redtox_ld_sum", 2))
    assert mu.tensors["t0"].shape == (2, 8, 2, 4)  # [2, 8, 8] in the file
    assert mu.tensors["t1"].shape == (2, 8, 2, 4)
    assert mu.tensors[mu.outputs[0]].shape == (2, 8, 4)


def test_a_muGraph_that_fits_a_skeleton_can_be_planned() -> None:
    mu = one(mj.rms_linear(16, 1024, 512, 8, 16))
    assert [make_plan(s, mu.tensors, cs.H100).tile for s in mu.steps] == [(16, 64, 64)]  # pyright: ignore


# ------------------------------------------------------------------------ one operator at a time

SCALARS: dict[str, Json] = {"mul_scalar": {"scalar": 0.5}, "clamp": {"min_val": 0.1, "max_val": 1}}
BOTH = ("exp", "square", "sqrt", "silu", "sigmoid", "gelu", "relu", "mul_scalar", "clamp")


@pytest.mark.parametrize("name", [*BOTH, "rms_norm", "reduction_0", "reduction_1", "reduction_2"])
@pytest.mark.parametrize("level", ["kn", "tb"])
def test_unary_operators(name: str, level: str) -> None:
    g = Graph()
    x, more = g.input(2, 4, 6), SCALARS.get(name, {})
    if level == "kn":
        data = g.output(g.op(name, x, **more))
    else:
        b = g.block(2, loop=1)
        b.store(b.acc(b.op(name, b.load(x, 0), **more)), 0)
        data = g.output(b.done()[0])
    agree(data, one(data), positive=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dims", [(4, 6), (4, 1), (1, 6)])
def test_binary_operators_broadcast(name: str, dims: tuple[int, int]) -> None:
    g = Graph()
    x, y = g.input(4, 6), g.input(*dims)
    t = g.op(name, x, y)
    b = g.block(2, loop=3)
    ys = b.load(y, 0 if dims[0] > 1 else -1, loop=1 if dims[1] > 1 else -1)
    b.store(b.acc(b.op(name, ys, b.load(t, 0, loop=1)), "red_ld_sum"), 0)
    data = g.output(b.done()[0])
    agree(data, one(data), positive=True)


@pytest.mark.parametrize("dims", [((4, 6), (6, 8)), ((2, 64, 128), (2, 128, 192))])
def test_products_of_a_library(dims: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    g = Graph()
    data = g.output(g.op("matmul", *(g.input(*d) for d in dims)))
    mu = one(data)
    agree(data, mu)
    assert cs.verify(definition(mu, lambda g, a, b: g.matmul(a, b)), mu, full=True)


@pytest.mark.parametrize(
    "kind", ["nored", "red_ld_sum", "red_ld_mean", "red_ld_rms", "redtox_ld_sum", "max"]
)
@pytest.mark.parametrize("loop", [-1, 0, 1])
def test_accumulators(kind: str, loop: int) -> None:
    """Over the loop, whichever dimension it divides; over none, it adds the same tile each time."""
    g = Graph()
    x = g.input(12, 24)
    b = g.block(2, loop=3, dimx=4)
    b.store(b.acc(b.load(x, 0, loop=loop), kind), 0)
    data = g.output(b.done()[0])
    agree(data, one(data))


def test_a_maximum_and_sums_of_groups() -> None:
    g = Graph()
    x = g.input(4, 12)
    b = g.block(2, dimx=3)
    xs = b.load(x, 0)
    b.store(b.acc(b.op("div", b.op("reduction_1_to_dimx", xs), b.op("reduction_1_max", xs))), 0)
    data = g.output(b.done()[0])
    agree(data, one(data))


def test_a_grid_axis_that_divides_tiles_of_different_extents() -> None:
    """Labels share a dimension where one block has 4 rows of X and 2 of Y."""
    g = Graph()
    x, y = g.input(8, 6), g.input(4, 6)
    b = g.block(2)
    b.store(b.acc(b.op("mul", b.load(x, 0), b.op("reduction_0", b.load(y, 0)))), 0)
    data = g.output(b.done()[0])
    mu = one(data)
    agree(data, mu)
    assert any(
        isinstance(e, tuple) for op in mu.steps[0].program.loads() for e in op.attributes["map"]
    )


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_random_muGraphs(data: list[Json]) -> None:
    """Whatever is read computes what the file says; the rest is refused."""
    (mu,) = read(data, on_error="keep")
    if isinstance(mu, MuGraph):
        agree(data, mu, positive=True)
        assert cs.loads(cs.dumps(mu)) == mu
    else:
        assert "the same index" in str(mu)  # the only thing that these graphs can do wrong


# ------------------------------------------------------------- labels that share a dimension


def shared(load: Any = ("N", "J"), store: Any = ("N", "J"), n: int = 8) -> MuGraph:
    """``Z = exp(X)`` of 24 elements, which the labels N (in 4 blocks) and J share."""
    b = Block({"N": n, "J": 3}, {"N.grid": 4}, {"N": -(-n // 4), "J": 3})
    b.store("Z", b.op("exp", b.load("X", *flat(load))), *flat(store))
    program = b.step().program
    ops = list(program.ops)
    for i, mapping in ((0, load), (2, store)):
        ops[i] = replace(ops[i], attributes={**ops[i].attributes, "map": (mapping,)})
    return mugraph(exponentials(), KernelStep("k0", replace(program, ops=tuple(ops))))


def flat(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def exponentials() -> KernelGraph:
    g = cs.new_kernel_graph()
    g.mark_output(g.exp(g.new_input((24,), name="X")))
    return g


def test_labels_that_share_a_dimension() -> None:
    mu = shared()
    assert cs.verify(exponentials(), mu, full=True)
    assert compare(exponentials(), mu)
    assert cs.loads(cs.dumps(mu)) == mu
    assert "load X" in mugraph_text(mu) and "<svg" in mugraph_svg(mu)
    turned = cs.verify(exponentials(), shared(store=("J", "N")))
    assert not turned and turned.counterexample is not None
    with pytest.raises(LoweringError, match="load of X: the labels N, J share a dimension"):
        make_plan(mu.steps[0], mu.tensors, cs.H100)


def test_labels_that_cannot_share_a_dimension() -> None:
    with pytest.raises(GraphError, match="X has one label twice"):
        check_mugraph(shared(load=("N", "N")))
    with pytest.raises(GraphError, match=r"extent 24 of X is mapped to .* of extent 12"):
        check_mugraph(shared(n=4))
    mu = shared(n=7)  # 4 tiles of 2: the last one reaches past the end
    tensors = {k: replace(t, shape=(21,)) for k, t in mu.tensors.items()}
    with pytest.raises(GraphError, match="axes and tile of N must cover it exactly"):
        check_mugraph(replace(mu, tensors=tensors))
