"""Products whose extents are no multiples of 8, on a GPU: right numbers in every program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.skeletons.matmul.plan import MatmulPlan
from tests import zoo
from tests.odd_products import PROGRAMS, Case, cases, of_columns
from tests.test_gpu import check, run

pytestmark = pytest.mark.gpu

#: those that the machine of tests/ptx runs too: one of each program, and a few more
FEW = len(PROGRAMS) + 2


def few_on_the_machine(all_: list[Case]) -> list[Any]:
    """All cases, the first ones marked for the machine of tests/ptx."""
    return [
        pytest.param(i, c, marks=[pytest.mark.ptx] * (i < FEW), id=str(c))
        for i, c in enumerate(all_)
    ]


@pytest.mark.parametrize(("i", "case"), few_on_the_machine(cases(60)))
def test_products_of_any_extents(i: int, case: Case) -> None:
    kernel = cs.superoptimize(case.graph(), dependent_launch=case.dependent)
    for m in {case.m, case.m + 3 if case.symbolic else case.m}:
        check(kernel, zoo.draw(kernel.graph, i, "cuda", {"M": m}))


@pytest.mark.ptx
@pytest.mark.parametrize(("m", "n"), [(64, 72), (17, 33)], ids=["loaded", "copied"])
def test_open_numbers_of_what_is_summed(m: int, n: int) -> None:
    """``X^T W`` of as many rows as the call says: whole tiles, parts of one, and one."""
    kernel = cs.superoptimize(of_columns(m, cs.symbol("T", hint=130), n, "float16"))
    for i, rows in enumerate((130, 64, 65, 1)):
        check(kernel, zoo.draw(kernel.graph, i, "cuda", {"T": rows}))


ORDERS = {
    "heads between": ((64, 3, 72), (1, 2, 0), (64, 3, 128), (1, 0, 2)),
    "heads between, all turned": ((64, 3, 72), (1, 2, 0), (128, 3, 64), (1, 2, 0)),
    "heads between, copied": ((64, 3, 71), (1, 2, 0), (64, 3, 65), (1, 0, 2)),
}


@pytest.mark.ptx
@pytest.mark.parametrize("name", ORDERS)
def test_operands_in_any_order(name: str) -> None:
    """One kernel reads both as they are stored, with the batch between the matrix's labels."""
    x_shape, x_order, w_shape, w_order = ORDERS[name]
    g = cs.new_kernel_graph()
    x, w = g.new_input(x_shape, "bfloat16"), g.new_input(w_shape, "bfloat16")
    g.mark_output(g.matmul(g.transpose(x, x_order), g.transpose(w, w_order)))
    kernel = cs.superoptimize(g)
    assert len(kernel.mugraph.steps) == 1
    check(kernel, zoo.draw(g, 2, "cuda"))


@pytest.mark.ptx
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_row_that_becomes_a_column(dtype: str) -> None:
    """Its bulk load has as many dimensions as the descriptor, whose extent of 1 does not vanish."""
    g = cs.new_kernel_graph()
    x, w = g.new_input((1, 48), dtype), g.new_input((264, 48), dtype)
    g.mark_output(g.transpose(g.matmul(x, g.transpose(w))))
    kernel = cs.superoptimize(g)
    assert kernel.resources.ptx["wgmma.mma_async"]
    check(kernel, zoo.draw(g, 2, "cuda"))


@pytest.mark.ptx
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_few_rows_of_many_batches(norm: bool) -> None:
    """The batches are the rows: four products of as many rows as there are batches."""
    g = cs.new_kernel_graph()
    x = g.new_input((cs.symbol("M", hint=32), 4, 200), "float16", name="X")
    w = g.new_input((200, 72), "float16", name="W")
    g.mark_output(g.matmul(g.rms_norm(x) if norm else x, w))
    kernel = cs.superoptimize(g)
    for m in (32, 5):
        check(kernel, zoo.draw(g, 3, "cuda", {"M": m}))


@pytest.mark.ptx
@pytest.mark.parametrize("transposed", [False, True], ids=["KN", "NK"])
def test_what_lies_behind_a_row_is_not_multiplied(transposed: bool) -> None:
    """The words that hold the end of a row hold the beginning of the next one: NaN times zero would
    be NaN."""
    kernel = cs.superoptimize(zoo.rms_norm_linear(16, 65, 63, transposed=transposed))
    x, w = zoo.draw(kernel.graph, 1, "cuda")
    x[5, 0], x[9] = torch.nan, torch.inf
    [z] = run(kernel, [x, w])
    others = [i for i in range(16) if i not in (5, 9)]
    assert z[others].isfinite().all() and not z[[5, 9]].isfinite().any()


@pytest.mark.ptx
@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_blocks_that_begin_at_other_steps(norm: str, dependent: bool) -> None:
    """Five blocks, each from another step on; the last step is not whole, and what the bulk loads
    put behind its end would count in the statistics of a layer norm."""
    make = zoo.rms_norm_linear if norm == "rms_norm" else zoo.layer_norm_linear
    graph = make(5, 328, 320, gain=True, transposed=True)
    kernel = cs.superoptimize(graph, dependent_launch=dependent)
    plan = kernel.kernels[0].plan
    assert isinstance(plan, MatmulPlan) and plan.staggered
    assert plan.column_tiles > 1 and plan.iterations > 1 and 328 % plan.tile[2]
    check(kernel, zoo.draw(graph, 5, "cuda"))
