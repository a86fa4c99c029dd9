"""Products of float32 operands without a GPU: their precision, plans and prices."""

from __future__ import annotations

import pytest
import torch

import cutesuper as cs
from cutesuper.errors import LoweringError, OperatorError
from cutesuper.ir import serial
from cutesuper.ir.graph import KernelGraph
from cutesuper.report import plan_text
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.matmul.cost import price
from cutesuper.targets import B200, H200
from cutesuper.verify.equivalence import verify
from tests.plans import Linear
from tests.tracing import traced


def product(precision: str, dtype: str = "float32", turned: bool = False) -> KernelGraph:
    """``X @ W``."""
    g = cs.new_kernel_graph()
    x = g.new_input((64, 32) if turned else (32, 64), dtype, "X")
    w = g.new_input((64, 96), dtype, "W")
    g.mark_output(g.matmul(g.transpose(x) if turned else x, w, precision))
    return g


def test_the_default_is_not_written_down() -> None:
    g = product("highest")
    assert g.nodes[-1].attributes == {}
    assert serial.dumps(g) != serial.dumps(product("high"))
    again = serial.loads(serial.dumps(product("high")))
    assert isinstance(again, KernelGraph)
    assert again.nodes[-1].attributes == {"precision": "high"}


def test_an_unknown_precision() -> None:
    with pytest.raises(OperatorError, match="use 'highest' or 'high'"):
        product("fast")


def test_gradients_have_the_precision_of_their_product() -> None:
    products = [n for n in cs.grad(product("high")).nodes if n.operator == "matmul"]
    assert products and all(n.attributes == {"precision": "high"} for n in products)


def test_the_reference_rounds_ties_to_even() -> None:
    x = torch.tensor([[1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-12), torch.inf]])
    g = cs.new_kernel_graph()
    a, b = g.new_input((1, 4), "float32"), g.new_input((4, 4), "float32")
    g.mark_output(g.matmul(a, b, "high"))
    found = cs.ir.evaluate.run_reference(g, [x[:, :3].repeat(1, 2)[:, :4], torch.eye(4)])[0]
    assert found.tolist() == [[1, 1 + 2.0**-9, -1, 1]]


@pytest.mark.parametrize(
    ("linear", "split", "gathers", "copied"),
    [
        (Linear(dtype="float32", transposed=True), True, True, 0),
        (Linear(dtype="float32", k=500, norm=False), True, True, 0),
        (Linear(dtype="float32", k=501, n=253), True, True, 2),
        (Linear(), False, False, 0),
    ],
)
def test_plans(linear: Linear, split: bool, gathers: bool, copied: int) -> None:
    p = linear.plan()
    assert (p.split, p.gathers, len(p.copied)) == (split, gathers, copied)
    m, n, k = p.tile
    assert p.stage_bytes == p.element_bytes * k * (m + n)
    assert p.slot_bytes == p.stage_bytes + 4 * k * m * split
    assert ("two TF32 numbers" in plan_text("k", p)) == split


def test_three_products_of_half_the_rate_are_priced() -> None:
    size = 4096, 4096, 4096, 64, 128, 64
    costs = [
        price(Linear(*size, norm=False, transposed=True, dtype=d).plan(), H200).parts["tensor"]
        for d in ("float32", "bfloat16")
    ]
    assert costs[0] == pytest.approx(6 * costs[1])


def test_a_gpu_with_room_for_accumulators_keeps_none_for_what_threads_add() -> None:
    """64x128 split numbers: their sums and two parts of a chunk of columns."""
    plan = Linear(64, 256, 128, 64, 128, 64, norm=False, dtype="float32").plan(B200)
    assert plan.multiplied == 64 * 128 + 2 * 128 * 32 and plan.added == 64 * 128


def test_what_is_refused() -> None:
    with pytest.raises(LoweringError, match="need rows that are contiguous along K; copy them"):
        Linear(64, 512, 256, 64, norm=False, turned=True, dtype="float32").plan()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_norm_in_front_and_a_residual_behind_are_one_kernel(precision: str) -> None:
    g = cs.new_kernel_graph()
    x, w = g.new_input((48, 128), "float32"), g.new_input((128, 96), "float32")
    gain, residual = g.new_input((128,), "float32"), g.new_input((48, 96), "float32")
    g.mark_output(g.matmul(g.rms_norm(x, gain), w, precision) + residual)
    assert (
        len(search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph.steps) == 1
    )


def test_rows_that_lie_side_by_side_are_copied_first() -> None:
    graph = product("high", turned=True)
    mu = search(graph, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert verify(graph, mu)
    attributes = [op.attributes for s in mu.steps for op in s.program.ops if op.facets.contracts]
    assert len(mu.steps) == 2 and [a["precision"] for a in attributes] == ["high"]


def test_functions_are_traced_in_the_precision_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each; a region that was traced for one is not run in another."""
    x, w = torch.randn(16, 64), torch.randn(64, 32)
    program = traced(monkeypatch, lambda x, w: x @ w, (x, w))
    assert program.kernel.graph.nodes[-1].attributes == {}
    torch.set_float32_matmul_precision("medium")
    try:
        program(x, w)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert program.kernel.graph.nodes[-1].attributes == {"precision": "high"}
