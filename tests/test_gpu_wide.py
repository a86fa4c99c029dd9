"""Products of more than 64 rows: row tiles by the eight, pairs, walks, and what leaves or comes in
pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.pipeline import current_target
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from tests import zoo
from tests.plans import Linear, compiled, specs, whole_mugraph

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]


def definition(linear: Linear) -> KernelGraph:
    """The definition of a `Linear`."""
    g = new_kernel_graph()
    shapes = linear.shapes()
    names = [n for n in "XGWBR" if n in shapes]
    given = {n: g.new_input(shapes[n], linear.dtype, n) for n in names}
    x = g.transpose(given["X"]) if linear.turned else given["X"]
    rows = x * given["G"] if linear.gain else x
    w = g.transpose(given["W"]) if linear.transposed else given["W"]
    y = g.matmul(rows, w, linear.precision)
    if linear.norm:
        y = y / g.sqrt(g.mean(g.square(x), -1) + 1e-6)
    for name in "BR":
        y = y + given[name] if name in given else y
    g.mark_output(y)
    return g


def wide_kernel(linear: Linear, **knobs: Any) -> Kernel:
    """A `Linear`, compiled with these knobs instead of the default ones."""
    graph, step = definition(linear), linear.block().step("linear")
    tensors = specs(linear.shapes(), linear.dtype)
    target = current_target()
    plan = make_plan(step, tensors, target)
    plan = make_plan(step, tensors, target, replace(plan.schedule, **knobs))  # type: ignore[type-var]
    names = tuple(graph.nodes[i].name for i in graph.inputs)
    mu = MuGraph(tensors, names, ("Z",), (step,))
    variant = Variant(mu, (CompiledStep(plan, compiled(plan, target.arch)),))
    return Kernel(graph, target, lambda hints: variant)


def check(linear: Linear, **knobs: Any) -> None:
    """Two launches with poisoned outputs: right, and the same bits; twice if an extent is open."""
    kernel = wide_kernel(linear, **knobs)
    for extent in (320, 65) if isinstance(linear.k, Symbol) else (0,):
        check_once(kernel, linear, zoo.draw(kernel.graph, 3, "cuda", {"K": extent}))


def check_once(kernel: Kernel, linear: Linear, inputs: list[torch.Tensor]) -> None:
    """The same with these inputs."""
    shape = (linear.m, linear.n)
    dtype = getattr(torch, linear.dtype)
    outputs = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in range(2)]  # type: ignore[arg-type]
    for out in outputs:
        kernel(inputs, out=[out])
    torch.cuda.synchronize()
    assert torch.equal(*outputs)
    (report,) = zoo.judge(kernel.graph, inputs, outputs[:1])
    assert report, report.message


CASES: dict[str, tuple[Linear, dict[str, Any]]] = {
    "rewritten rows": (Linear(50, 192, 128, 24, tile_k=64, gain=True, bias=True), {}),
    "odd eights over a cluster": (
        Linear(100, 256, 128, 56, tile_k=64, cluster=2, residual=True), {}
    ),
    "partial sums in the ring": (
        Linear(150, 384, 136, 80, 64, 64, cluster=2, residual=True, gain=True), {}
    ),
    "four parts of the ring": (
        Linear(72, 1024, 64, 72, 64, 64, 4, norm=False), {"stages": 3, "head": 3}
    ),
    "pieces that overlap": (Linear(90, 192, 136, 40, 128, 64, norm=False, residual=True), {}),
    "152 rows": (Linear(300, 128, 128, 152, 128, 64, dtype="bfloat16"), {}),
    "pairs of 48 rows that walk": (
        Linear(130, 320, 384, 48, 128, 64),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3, "reduces_once": False},
    ),
    "walks with a residual": (
        Linear(200, 256, 328, 72, 128, 64, norm=False, residual=True),
        {"persistent": 3, "stages": 3, "head": 3, "pieces": 2},
    ),
    "many pieces in flight": (
        Linear(300, 320, 264, 144, 128, 64, residual=True),
        {"persistent": 4, "pieces": 4, "stages": 3, "head": 3},
    ),
    "192 rows and 256 columns": (Linear(200, 256, 256, 192, 256, 64, norm=False), {}),
    "rows side by side, over a cluster": (
        Linear(136, 250, 72, 128, 64, 64, 2, norm=False, bias=True, turned=True), {}
    ),
    "four boxes in two instructions, copied": (
        Linear(257, 130, 67, 256, 128, 64, norm=False, turned=True), {}
    ),
    "pairs of boxes that walk": (
        Linear(320, 300, 384, 128, 128, 64, norm=False, residual=True, turned=True),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3},
    ),
    "two blocks of columns where the tensor has one": (
        Linear(240, 224, 64, 120, 128, 64, bias=True, residual=True, transposed=True), {}
    ),
    "columns times a gain": (
        Linear(100, 192, 136, 56, tile_k=64, gain=True, bias=True, transposed=True,
               dtype="bfloat16"),
        {"scales_columns": True},
    ),
    "columns times a gain, two blocks of each warpgroup, over a cluster": (
        Linear(90, 512, 256, 96, 256, 128, 2, gain=True, dtype="bfloat16"),
        {"scales_columns": True},
    ),
    "statistics of the grid": (
        Linear(100, 328, 136, 56, tile_k=64, residual=True), {"reduces_once": True}
    ),
    "statistics of the grid, launched dependently": (
        Linear(100, 328, 136, 56, tile_k=64, residual=True),
        {"reduces_once": True, "dependent_launch": True},
    ),
    "statistics of the grid, some of whose blocks have no tile": (
        Linear(100, 328, 136, 56, 128, 64, residual=True),
        {"reduces_once": True, "persistent": 7, "helpers": 2},
    ),
    "statistics of the grid, in pairs that walk, columns times a gain": (
        Linear(130, 2600, 384, 48, 128, 64, gain=True, transposed=True, dtype="bfloat16"),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3, "helpers": 2,
         "scales_columns": True, "reduces_once": True},
    ),
    "float32, pairs that walk": (
        Linear(130, 160, 384, 48, 128, 32, gain=True, residual=True, dtype="float32"),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3},
    ),
    "float32 as TF32, pairs that walk": (
        Linear(130, 160, 384, 48, 128, 32, bias=True, transposed=True, dtype="float32",
               precision="high"),
        {"share_rows": 2, "persistent": 4, "stages": 3, "head": 3},
    ),
    "float32, parts of the grid": (
        Linear(75, 500, 136, 40, 64, 32, norm=False, bias=True, parts=5, dtype="float32"), {}
    ),
    "walks with several tiles in the ring": (
        Linear(300, 64, 264, 72, 128, 64, norm=False, residual=True),
        {"persistent": 3, "stages": 4, "head": 4},
    ),
    "parts of the grid": (
        Linear(150, 1000, 136, 80, 64, 64, norm=False, bias=True, residual=True, parts=5), {}
    ),
    "parts of the grid, odd rows side by side": (
        Linear(77, 900, 131, 128, 64, 64, norm=False, turned=True, parts=3), {}
    ),
    "parts of the grid, rewritten rows": (
        Linear(70, 520, 128, 72, 128, 64, norm=False, gain=True, bias=True, parts=3), {}
    ),
    "parts of what the call says": (
        Linear(64, Symbol("K", 320), 64, 64, 64, 64, norm=False, turned=True, parts=4), {}
    ),
    "as many elements as the call says, in walks": (
        Linear(160, Symbol("K", 320), 128, 64, 128, 64, norm=False, turned=True),
        {"persistent": 2, "stages": 3, "head": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tiles_by_the_eight(name: str) -> None:
    linear, knobs = CASES[name]
    room = current_target().accumulators
    if room is not None and linear.tile_m * linear.tile_n > room:
        pytest.skip(f"a tile of more accumulators than the {room} of the GPU")
    if room is not None and knobs.get("scales_columns"):
        pytest.skip("no instruction takes columns from registers")
    check(linear, **knobs)


@pytest.mark.parametrize("columns_first", [False, True])
def test_factors_that_are_computed(columns_first: bool) -> None:
    """Norms whose gain is one more than a weight (Gemma), over a length that no tile divides."""
    g = new_kernel_graph()
    n = 136
    x, gain = g.new_input((100, 200), "bfloat16", "X"), g.new_input((200,), "bfloat16", "G")
    w = g.new_input((200, n) if columns_first else (n, 200), "bfloat16", "W")
    y = g.rms_norm(x) * (gain + 1.0)
    g.mark_output(g.matmul(y, w if columns_first else g.transpose(w)))
    mu, target = whole_mugraph(g, clusters=False), current_target()
    plan = make_plan(mu.steps[0], mu.tensors, target)
    assert isinstance(plan, MatmulPlan)
    assert plan.schedule.scales_columns == (target.accumulators is None)
    variant = Variant(mu, (CompiledStep(plan, compiled(plan, target.arch)),))
    kernel = Kernel(g, target, lambda hints: variant)
    inputs = zoo.draw(g, 5, "cuda")
    out = torch.full((100, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel(inputs, out=[out])
    (report,) = zoo.judge(g, inputs, [out])
    assert report, report.message
