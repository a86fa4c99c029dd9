"""Reductions of matrix products: every one has kernels, whatever stands before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.pipeline import Options, choose
from cutesuper.search.summed import summed_first

OPTIONS = Options(cs.H200)
M, K, N = 64, 128, 96

Product = Callable[[KernelGraph], Tensor]


def product(g: KernelGraph, lead: tuple[int, ...] = (), columns: int = N) -> Tensor:
    """``X[..., M, K] @ W[..., K, columns]``."""
    x = g.new_input((*lead, M, K), "bf16", name="X")
    return g.matmul(x, g.new_input((*lead, K, columns), "bf16", name="W"))


def plus(g: KernelGraph, *dims: int) -> Tensor:
    return product(g) + g.new_input(dims, "bf16", name="b")


def of_norm(g: KernelGraph) -> Tensor:
    x, w = g.new_input((M, K), "bf16"), g.new_input((K, N), "bf16")
    return g.matmul(g.rms_norm(x), w)


def centred(g: KernelGraph) -> Tensor:
    y = product(g)
    return y - g.mean(y, 1)


def symbolic(g: KernelGraph) -> Tensor:
    x, w = g.new_input((cs.symbol("M", 16), K), "bf16"), g.new_input((K, N), "bf16")
    return g.matmul(x, w)


PRODUCTS: dict[str, Product] = {
    "plain": product,
    "bias": lambda g: plus(g, N),
    "residual": lambda g: plus(g, M, N),
    "value of a row": lambda g: plus(g, M, 1),
    "number": lambda g: plus(g, 1),
    "scale": lambda g: product(g) * 0.5,
    "vector": lambda g: product(g) * g.new_input((N,), "bf16"),
    "norm": of_norm,
    "relu": lambda g: g.relu(product(g)),
    "centred": centred,
    "one column": lambda g: product(g, columns=1),
    "many columns": lambda g: product(g, columns=4096),
    "batched": lambda g: product(g, (4,)),
    "symbolic": symbolic,
}


def kernels(build: Callable[[KernelGraph], Any]) -> list[str]:
    """The kinds of operations of what is found, kernel by kernel; verified."""
    g = cs.new_kernel_graph()
    build(g)
    _, choice = choose(g, OPTIONS)
    assert choice.verification
    return [" ".join(op.kind for op in s.program.ops) for s in choice.candidate.mugraph.steps]


REDUCED = [
    *(("mean", -1, name) for name in PRODUCTS),
    *(("sum", -1, name) for name in ("bias", "norm", "many columns", "batched")),
    *((kind, dim, "one column") for kind in ("sum", "max") for dim in (-2, -1)),
    *((kind, -2, "residual") for kind in ("sum", "mean", "max")),
    *(("sum", -2, name) for name in ("batched", "symbolic")),
    ("max", -1, "residual"),
]


@pytest.mark.parametrize(("kind", "dim", "name"), REDUCED)
def test_every_reduction_has_kernels(kind: str, dim: int, name: str) -> None:
    def build(g: KernelGraph) -> None:
        g.mark_output(g.apply(kind, PRODUCTS[name](g), dim=dim))

    assert 1 <= len(kernels(build)) <= 3


def test_columns_are_reduced_where_they_are_accumulated() -> None:
    """One kernel, whose loop has a product: a column operand is not summed in it."""
    for name in ("plain", "bias", "residual", "norm"):
        [found] = kernels(lambda g, n=name: g.mark_output(g.sum(PRODUCTS[n](g), 1)))
        assert found.count("matmul") == 1


def test_what_is_made_of_a_reduced_product() -> None:
    [found] = kernels(lambda g: g.mark_output(g.relu(g.sum(product(g), 1)) * 2.0))
    assert found.count("matmul") == 1


def test_large_products_are_summed_before_they_are_multiplied() -> None:
    """220 us of a product become two kernels that read each tensor once, 24 us."""

    def build(g: KernelGraph, kind: str, dim: int) -> None:
        x, w, r = (g.new_input((4096, 4096), "bf16", name=n) for n in "XWR")
        y = (g.rms_norm(x) @ w - r) * g.new_input((1,), "bf16") * 0.5
        g.mark_output(g.apply(kind, y, dim=dim))

    for kind, dim in (("sum", -1), ("mean", -2)):
        found = kernels(lambda g, kind=kind, dim=dim: build(g, kind, dim))
        assert len(found) == 3 and not any("matmul" in ops for ops in found)


def moved(build: Callable[[KernelGraph], Tensor]) -> list[str] | None:
    """The operators of the program with sums moved; it computes the same."""
    g = cs.new_kernel_graph()
    g.mark_output(build(g), "fp32")
    other = summed_first(g.expanded())
    if other is None:
        return None
    r = torch.Generator().manual_seed(0)
    shapes = [[extent(d) for d in g.nodes[i].shape] for i in g.inputs]
    values = [torch.randn(s, generator=r, dtype=torch.float64) for s in shapes]
    for got, want in zip(*(evaluate(p, values, torch.float64) for p in (other, g)), strict=True):
        torch.testing.assert_close(got, want)
    assert other.nodes[other.outputs[0]].dtype == cs.float32
    return [n.operator for n in other.nodes]


LINEAR: dict[str, Product] = {
    "columns": lambda g: g.sum(product(g), 1),
    "rows of a batch": lambda g: g.mean(product(g, (3,)), 1),
    "bias": lambda g: g.sum(plus(g, N), 1),
    "mean of a bias": lambda g: g.mean(plus(g, N), 0),
    "scales": lambda g: g.sum(product(g) / g.new_input((M, 1), "bf16") * -2.0, 1),
    "differences": lambda g: g.sum(g.new_input((2, M, N), "bf16", name="R") - product(g), -2),
    "weights": lambda g: g.exp(g.sum(product(g) * g.new_input((1, N), "bf16"), 0)),
    "symbolic rows": lambda g: g.mean(symbolic(g), 0),
}
OTHERS: dict[str, Product] = {
    "what is no sum": lambda g: g.max(product(g), 1),
    "what is not linear": lambda g: g.sum(g.relu(product(g)), 1),
    "a divisor": lambda g: g.sum(2.0 / product(g), 1),
    "two factors": lambda g: g.sum(product(g) * g.new_input((M, N), "bf16"), 1),
    "a value with another use": centred,
    "as many equal terms as rows": lambda g: g.sum(plus(g, N), 0),
    "batches": lambda g: g.sum(product(g, (3,)), 0),
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_move_through_what_is_linear(name: str) -> None:
    found = moved(LINEAR[name])
    assert found is not None and "matmul" not in found


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    assert moved(OTHERS[name]) is None


@pytest.mark.parametrize("k", [1, 64])
@pytest.mark.parametrize("kind", ["sum", "softmax"])
def test_a_single_row_that_is_reduced_is_itself(kind: str, k: int) -> None:
    """The only row of a product has a label, over which nothing is reduced."""

    def build(g: KernelGraph) -> None:
        x, w = g.new_input((1, 1, k), "bf16"), g.new_input((1, k, 64), "bf16")
        g.mark_output(g.sum(g.apply(kind, g.matmul(x, w) * 0.5, dim=1), 2))

    assert len(kernels(build)) <= 2


def test_a_copied_operand_of_a_product_has_its_type() -> None:
    """``[K, 1]`` looks like statistics, which are float32 between kernels."""

    def build(g: KernelGraph) -> None:
        x = g.relu(g.new_input((64, 1), "bf16"))
        g.mark_output(g.matmul(g.transpose(x), g.new_input((64, 96), "bf16")))
        g.mark_output(g.exp(x))

    assert sum("matmul" in ops for ops in kernels(build)) == 1


@pytest.mark.parametrize("kind", ["plain", "one column"])
def test_reductions_that_cancel(kind: str) -> None:
    """Normal forms see that ``s - s`` is nothing, and no label that s is reduced over is left."""

    def build(g: KernelGraph) -> None:
        s = g.sum(PRODUCTS[kind](g), 1)
        g.mark_output(g.layer_norm(s) * g.new_input((M, 1), "bf16") + g.new_input((M, 1), "bf16"))

    assert kernels(build)
