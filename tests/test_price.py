"""Arithmetic that stands twice, in the cost model and in the plan, and must not drift apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import cutesuper as cs
from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep
from cutesuper.ir.graph import KernelGraph
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.matmul.cost import accumulators, stage_bytes, vector_accumulators
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests import zoo


def linear(m: int, k: int, n: int, norm: str | None) -> KernelGraph:
    g = cs.new_kernel_graph()
    x, w = g.new_input((m, k)), g.new_input((k, n))
    g.mark_output(g.matmul(getattr(g, norm)(x) if norm else x, w))
    return g


GRAPHS: dict[str, Callable[[], KernelGraph]] = {
    "norm": lambda: linear(16, 4096, 4096, "rms_norm"),
    "vectors": lambda: linear(16, 1024, 1024, "layer_norm"),
    "many rows": lambda: linear(4096, 1024, 4096, None),
    "product of a product": lambda: zoo.lora(16, 256, 4096, 16),
    "wide product of a product": lambda: zoo.relu_mlp(16, 512, 64, 64),
}


def planned(graph: KernelGraph) -> Iterator[tuple[KernelStep, MatmulPlan, dict[str, int]]]:
    """Kernels of the matmul loop among the candidates, with bytes of an element of each tensor."""
    for c in search(graph, H200, options=SearchOptions(lowered=True, keep=6)).candidates:
        tensors = c.mugraph.tensors
        for step in c.mugraph.steps:
            try:
                plan = make_plan(step, tensors, H200)
            except (LoweringError, ScheduleError):
                continue
            if isinstance(plan, MatmulPlan):
                yield step, plan, {n: t.dtype.itemsize for n, t in tensors.items()}


@pytest.mark.parametrize("name", GRAPHS)
def test_stages_and_accumulators_are_those_of_the_plan(name: str) -> None:
    found = list(planned(GRAPHS[name]()))
    assert found
    for step, p, itemsizes in found:
        hidden = tuple(t.hidden for t in p.tails)
        form = MatmulForm(
            p.row, p.column, p.contracted, p.batch, hidden, bool(p.reductions), bool(p.vector_rows)
        )
        assert stage_bytes(step.program, form, itemsizes) == p.slot_bytes
        assert accumulators(step.program, form) == p.accumulators
        assert vector_accumulators(step.program, form) == p.vector_accumulators
