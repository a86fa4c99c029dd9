"""MuGraphs that somebody brings: verified, given extents that can be lowered, compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cutesuper as cs
from cutesuper import given
from cutesuper.errors import LoweringError, VerificationError
from cutesuper.ir.block import Axis, AxisKind, BlockOp, BlockProgram, KernelStep, MuGraph
from cutesuper.ir.block import TensorSpec as Spec
from cutesuper.runtime.cache import KernelCache
from cutesuper.verify.equivalence import verify
from tests import zoo
from tests.zoo import draw, judge

LOOP, GRID = AxisKind.LOOP, AxisKind.GRID


def op(kind: str, inputs: tuple[int, ...], dims: str, **attributes: object) -> BlockOp:
    return BlockOp(kind, inputs, tuple(dims), attributes)


def norm_linear(columns: int, looped: bool = True) -> tuple[cs.KernelGraph, MuGraph]:
    """``rms(X) W`` in one kernel with tiles of two rows, as published muGraphs have it."""
    graph = zoo.rms_norm_linear(2, 1024, 384)
    loop = [op("accumulate", (2,), "MN", axis="K.loop", op="sum")] if looped else []
    n = len(loop)
    ops = (
        op("load", (), "MK", tensor="X", map=("M", "K")),
        op("load", (), "NK", tensor="W", map=("K", "N")),
        op("matmul", (0, 1), "MN", over="K"),
        *loop,
        op("square", (0,), "MK"),
        op("mean", (3 + n,), "M", over="K"),
        *([op("accumulate", (4 + n,), "M", axis="K.loop", op="sum")] if looped else []),
        op("constant", (), "", value=1e-6),
        op("add", (4 + 2 * n, 5 + 2 * n), "M"),
        op("sqrt", (6 + 2 * n,), "M"),
        op("div", (2 + n, 7 + 2 * n), "MN"),
        op("store", (8 + 2 * n,), "MN", tensor="Z", map=("M", "N")),
    )
    axes = (Axis("N", GRID, 384 // columns), *((Axis("K", LOOP, 32),) if looped else ()))
    tile = {"M": 2, "N": columns, "K": 32 if looped else 1024}
    program = BlockProgram({"M": 2, "N": 384, "K": 1024}, axes, tile, ops)
    half = cs.float16
    tensors = {
        "X": Spec("X", (2, 1024), half),
        "W": Spec("W", (1024, 384), half),
        "Z": Spec("Z", (2, 384), half),
    }
    return graph, MuGraph(tensors, ("X", "W"), ("Z",), (KernelStep("k0", program),))


def test_other_extents_where_its_own_cannot_be_lowered(tmp_path: Path) -> None:
    graph, mu = norm_linear(24)
    kernel = cs.compile_mugraph(graph, mu, target="h200", cache=KernelCache(tmp_path))
    assert "accumulate" in kernel.explain() and "false accept below" in kernel.explain()
    inputs = draw(graph, seed=0)
    assert all(judge(graph, inputs, [kernel(*inputs)]))
    assert isinstance(kernel(*inputs), torch.Tensor)


def test_the_verdict_on_other_extents_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extents that the target can run are verified again, and may be refused."""
    graph, mu = norm_linear(24)
    verdicts = iter((given.verified(graph, mu), verify(graph, replace(mu, inputs=("W", "X")))))
    monkeypatch.setattr(given, "verified", lambda *_: next(verdicts))
    with pytest.raises(VerificationError, match="with the extents that the target can run"):
        cs.compile_mugraph(graph, mu, target="h200")


def test_a_muGraph_of_something_else_is_refused() -> None:
    graph, mu = norm_linear(64)
    (step,) = mu.steps
    ops = tuple(
        replace(o, attributes={"value": 1.0}) if o.kind == "constant" else o
        for o in step.program.ops
    )
    wrong = replace(mu, steps=(replace(step, program=replace(step.program, ops=ops)),))
    with pytest.raises(VerificationError, match=r"does not compute the graph: .* differs at"):
        cs.compile_mugraph(graph, wrong, target="h200")


def test_what_no_skeleton_runs_is_refused_with_the_reason_of_its_own_extents() -> None:
    graph, mu = norm_linear(24, looped=False)
    with pytest.raises(LoweringError, match="kernel k0"):
        cs.compile_mugraph(graph, mu, target="h200")


def test_other_extents_are_those_of_its_element_type() -> None:
    """A stage of fp32 operands has half as many elements along the contracted label."""
    _, mu = norm_linear(24)
    wide = {name: replace(t, dtype=cs.float32) for name, t in mu.tensors.items()}
    for tensors, depth in ((mu.tensors, 64), (wide, 32)):
        found = given._other_extents(mu.steps[0], replace(mu, tensors=tensors), cs.H200)
        assert min(p.tile["K"] for p, _ in found) == depth
