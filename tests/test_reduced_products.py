"""Reductions of matrix products: every one has kernels, whatever stands before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.graph.kernel import KernelGraph, Tensor
from cutesuper.optimize import Options, choose

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
