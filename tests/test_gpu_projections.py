"""Products of one row operand and several widths in one launch: queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import current_target
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from tests import zoo
from tests.plans import compiled, whole_mugraph

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]


def one_kernel(graph: KernelGraph, dependent: bool, **knobs: Any) -> Kernel:
    """A whole graph as one kernel, with these knobs instead of the default ones."""
    target = current_target()
    mu = whole_mugraph(graph, target, clusters="persistent" not in knobs)
    plan = make_plan(mu.steps[0], mu.tensors, target, dependent_launch=dependent)
    assert isinstance(plan, MatmulPlan)
    schedule = replace(plan.schedule, **knobs)
    plan = make_plan(mu.steps[0], mu.tensors, target, schedule)
    assert isinstance(plan, MatmulPlan) and plan.beside
    variant = Variant(mu, (CompiledStep(plan, compiled(plan, target.arch)),))
    return Kernel(graph, target, lambda hints: variant)


WALK = {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3}
CASES: dict[str, tuple[KernelGraph, bool, dict[str, Any]]] = {
    "norm, a cluster": (zoo.projections(2, 512, (512, 128, 192)), True, {}),
    "ragged columns": (zoo.projections(3, 192, (200, 72, 136), norm=False), False, {}),
    "biases": (zoo.projections(16, 256, (128, 64), bias=True), True, {}),
    "centred rows": (zoo.projections(9, 256, (128, 64), layer_norm=True, bias=True), False, {}),
    "gates of two widths": (zoo.projections(5, 256, (128, 64), gated=True), False, {}),
    "stored tile by tile": (zoo.projections(40, 128, (192, 128)), False, {}),
    "pairs that walk": (zoo.projections(190, 1024, (328, 72, 136), bias=True), False, WALK),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_of_several_widths(name: str) -> None:
    """Two launches with poisoned outputs: right, and the same bits."""
    graph, dependent, knobs = CASES[name]
    kernel = one_kernel(graph, dependent, **knobs)
    inputs = zoo.draw(kernel.graph, 3, "cuda")
    runs = [[_poisoned(graph, o) for o in graph.outputs] for _ in range(2)]
    for out in runs:
        kernel(inputs, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for report in zoo.judge(kernel.graph, inputs, runs[0]):
        assert report, report.message


def _poisoned(graph: KernelGraph, output: int) -> torch.Tensor:
    node = graph.nodes[output]
    shape = [int(d) for d in node.shape]  # type: ignore[arg-type]
    return torch.full(shape, torch.nan, dtype=getattr(torch, node.dtype.name), device="cuda")
