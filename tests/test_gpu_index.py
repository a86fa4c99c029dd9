"""Rows that an index names, and products of rows, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests.test_gpu import check

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]

DTYPES = ["float16", "bfloat16", "float32"]


def taken(index_type: str, dtype: str, after: Callable[[KernelGraph, Any], Any]) -> KernelGraph:
    g = new_kernel_graph()
    table = g.new_input((100, 264), dtype, name="table")
    index = g.new_input((5, 7), index_type, name="index")
    g.mark_output(after(g, g.take_rows(table, index)))
    return g


AFTER: dict[str, Callable[[KernelGraph, Any], Any]] = {
    "copied": lambda g, x: x,
    "normalised": lambda g, x: g.rms_norm(x),
    "scaled": lambda g, x: g.silu(x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("after", AFTER)
def test_rows_of_a_table(after: str, dtype: str) -> None:
    """Indices from both ends; those of no row give NaN, and read nothing outside of the table."""
    kernel = cs.superoptimize(taken("int64", dtype, AFTER[after]))
    table = torch.randn(100, 264, device="cuda").to(getattr(torch, dtype))
    index = torch.randint(-100, 100, (5, 7), device="cuda")
    check(kernel, [table, index])
    index[1, 2], index[3, 3], index[0, 0] = 100, -101, 2**40
    rows = kernel(table, index).isnan().all(-1).nonzero().tolist()
    assert rows == [[0, 0], [1, 2], [3, 3]]


def test_indices_of_32_bits() -> None:
    kernel = cs.superoptimize(taken("int32", "bfloat16", AFTER["normalised"]))
    table = torch.randn(100, 264, device="cuda").bfloat16()
    check(kernel, [table, torch.randint(-100, 100, (5, 7), device="cuda", dtype=torch.int32)])


@pytest.mark.parametrize("columns", [72, 1000, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_rows(dtype: str, columns: int) -> None:
    """Every product rounds once, in whatever order: errors are those of a random walk, and of 64
    rows the largest is about as large as the largest of PyTorch's."""
    g = new_kernel_graph()
    x = g.new_input((64, columns), dtype, name="x")
    g.mark_output(g.prod(x, dim=-1))
    near_one = 1 + torch.randn(64, columns, device="cuda") / columns**0.5
    check(cs.superoptimize(g), [near_one.to(getattr(torch, dtype))])
