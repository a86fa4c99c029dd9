"""Code that the compiler makes of LayerNorm and Linear in one kernel. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options, choose
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests import zoo
from tests.plans import compiled, whole_plan
from tests.test_lowering import check_resources

LARGE = (16, 4096, 4096)
CASES: dict[str, tuple[KernelGraph, bool]] = {
    "fp16": (zoo.layer_norm_linear(*LARGE), False),
    "bf16, (N, K)": (zoo.layer_norm_linear(*LARGE, "bfloat16", transposed=True), False),
    "plain": (zoo.layer_norm_linear(*LARGE, gain=False, shift=False), False),
    "gain, (N, K)": (zoo.layer_norm_linear(*LARGE, shift=False, transposed=True), False),
    "dependent": (zoo.layer_norm_linear(*LARGE), True),
    "symbolic, dependent": (zoo.layer_norm_linear(Symbol("M", 16), 4096, 4096), True),
    "ragged": (zoo.layer_norm_linear(16, 520, 1000), False),
    "ragged bf16": (zoo.layer_norm_linear(3, 520, 1000, "bfloat16", transposed=True), False),
    "one row": (zoo.layer_norm_linear(1, 4096, 4096), False),
    "8 rows": (zoo.layer_norm_linear(8, 4096, 4096), False),
    "residual": (zoo.layer_norm_linear(16, 1024, 1024, residual=True), False),
    "gated": (zoo.layer_norm_linear(16, 1024, 1024, gated=True), False),
    "gelu": (zoo.layer_norm_linear(16, 1024, 1024, linear_bias=True, tail="gelu"), False),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_norm_and_linear_compile(name: str) -> None:
    graph, dependent = CASES[name]
    [plan] = choose(graph, Options(H200, dependent_launch=dependent))[1].plans
    assert isinstance(plan, MatmulPlan)
    r = check_resources(plan, compiled(plan))
    if r.source == "sass":
        # rows, and vectors of each column operand
        per_group = plan.blocks_n // plan.schedule.warpgroups
        products = len(plan.products) + len(plan.vector_columns)
        assert r.instructions["HGMMA"] == products * per_group * plan.tile[2] // 16
        # the sample of the rows: 16 bytes of each operand
        assert r.instructions["LDG.E.128"] >= len(plan.rows)


def plans_of_every_tile(m: int) -> list[MatmulPlan]:
    """The first plan for each pair of row and column tiles that are worth trying."""
    flat = Flat(zoo.layer_norm_linear(m, 1024, 1024).expanded())
    region = flat.segment(flat.order).region
    options = SearchOptions(lowered=True, sizes_per_structure=100, programs_per_split=1, keep=1000)
    pairs = enumerate(zip(region.inputs, region.input_dtypes, strict=True))
    tensors = {f"in{i}": TensorSpec(f"in{i}", s, d) for i, (s, d) in pairs}
    tensors["out0"] = TensorSpec("out0", (m, 1024), region.output_dtypes[0])
    found: dict[tuple[int, int], Any] = {}
    for way in search_region(region, H200, options).ways:
        step = KernelStep("k0", way.programs[0])
        tile = step.program.tile["M"], step.program.tile["N"]
        if tile not in found:
            found[tile] = make_plan(step, tensors, H200)
    return list(found.values())


@pytest.mark.parametrize("after", ["softmax", "layer_norm"])
def test_vectors_and_reductions_along_the_columns_compile(after: str) -> None:
    plan = whole_plan(zoo.layer_norm_linear_then(after))
    assert plan.vector_rows and plan.reductions
    check_resources(plan, compiled(plan))


@pytest.mark.parametrize("m", [64, 1024])
def test_the_largest_tiles_compile(m: int) -> None:
    """Accumulators of the vectors come on top of those that fill the registers."""
    plans = plans_of_every_tile(m)
    tiles = {p.tile[:2] for p in plans}
    assert {(64, 64), (64, 256)} <= tiles
    assert m == 64 or ((128, 256) in tiles and not any(rows > 128 for rows, _ in tiles))
    plans.sort(key=lambda p: p.accumulators + p.vector_accumulators)
    largest = {(p.tile[1], p.schedule.warpgroups): p for p in plans}
    for plan in largest.values():
        check_resources(plan, compiled(plan))
