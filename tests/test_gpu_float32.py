"""Products of float32 operands on a GPU: as exact as PyTorch's, or rounded to TF32."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.pairs import PAIRS
from cutesuper.ir.operators.pointwise import FUNCTIONS, Function
from tests import zoo
from tests.test_gpu import check

pytestmark = pytest.mark.gpu

PRECISIONS = ("highest", "high")


def operands(m: int, k: int, n: int, turned: str = "") -> tuple[KernelGraph, Tensor, Tensor]:
    """A graph, and X and W of a product; ``turned``: those that are stored the other way."""
    g = cs.new_kernel_graph()
    x = g.new_input((k, m) if "X" in turned else (m, k), "float32", "X")
    w = g.new_input((n, k) if "W" in turned else (k, n), "float32", "W")
    return g, g.transpose(x) if "X" in turned else x, g.transpose(w) if "W" in turned else w


def plain(m: int, k: int, n: int, turned: str, precision: str) -> KernelGraph:
    """One product."""
    g, x, w = operands(m, k, n, turned)
    g.mark_output(g.matmul(x, w, precision))
    return g


def check_scales(graph: KernelGraph, seed: int = 0, **options: Any) -> None:
    """Hold a program against the rule with inputs of several magnitudes."""
    kernel = cs.superoptimize(graph, **options)
    for scale in (1.0, 1e-4, 3e4):
        check(kernel, [scale * x for x in zoo.draw(graph, seed, "cuda")])


SHAPES = [
    (64, 128, 64, "W"), (100, 256, 192, ""), (1, 512, 128, "W"), (300, 1024, 512, "W"),
    (1000, 4096, 1536, ""), (128, 96, 128, "X"), (200, 264, 72, "XW"), (7, 8192, 64, "W"),
    (20, 64, 72, ""), (19, 131, 67, ""), (90, 33, 10, "W"), (65, 70, 130, "W"), (33, 4097, 250, ""),
]  # fmt: skip
#: those that the machine of tests/ptx runs too
FEW = {(20, 64, 72, "", "high"), (19, 131, 67, "", "highest")}


def cases() -> list[Any]:
    """All shapes in both precisions."""
    found = [(*s, p) for s in SHAPES for p in PRECISIONS]
    return [pytest.param(*c, marks=[pytest.mark.ptx] * (c in FEW)) for c in found]


@pytest.mark.parametrize(("m", "k", "n", "turned", "precision"), cases())
def test_products(m: int, k: int, n: int, turned: str, precision: str) -> None:
    check_scales(plain(m, k, n, turned, precision))


def normed(precision: str) -> KernelGraph:
    """RMSNorm with a gain before, bias and residual behind."""
    g, x, w = operands(48, 128, 96, "W")
    gain, bias = g.new_input((128,), "float32", "G"), g.new_input((96,), "float32", "B")
    product = g.matmul(g.rms_norm(x, gain), w, precision)
    g.mark_output(product + bias + g.new_input((48, 96), "float32", "R"))
    return g


def gated(precision: str) -> KernelGraph:
    """Two products of the same rows."""
    g, x, w = operands(24, 64, 128, "W")
    v = g.transpose(g.new_input((128, 64), "float32", "V"))
    g.mark_output(g.silu(g.matmul(x, w, precision)) * g.matmul(x, v, precision))
    return g


def batched(precision: str) -> KernelGraph:
    """Three products."""
    g = cs.new_kernel_graph()
    x, w = g.new_input((3, 24, 64), "float32", "X"), g.new_input((3, 64, 72), "float32", "W")
    g.mark_output(g.matmul(x, w, precision))
    return g


def summed(precision: str) -> KernelGraph:
    """Sums along the columns, of a function of a product."""
    g, x, w = operands(40, 64, 72, "W")
    g.mark_output(g.sum(g.silu(g.matmul(g.relu(x), w, precision)), 1))
    return g


def deep(precision: str) -> KernelGraph:
    """Positive numbers: what the tensor cores cut off adds up."""
    g, x, w = operands(64, 2048, 64, "W")
    g.mark_output(g.matmul(g.square(x), w, precision))
    return g


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [normed, gated, batched, summed, deep])
def test_programs(make: Any, precision: str) -> None:
    check_scales(make(precision))


def inside(domain: tuple[float, float], scale: float) -> torch.Tensor:
    """Numbers of a domain, some of this size, that TF32 has too."""
    x = scale * torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    low, high = domain
    x = x.clamp(min=low * 0.99, max=high * 0.99) if low < 0 else low + x.abs()
    return x.bfloat16().float().cuda()


def check_functions(functions: list[type[Function]], dtype: str) -> None:
    """One kernel of functions of the same domain behind a product in float32."""
    g = cs.new_kernel_graph()
    x, w = g.new_input((24, 16), dtype, "X"), g.new_input((16, 16), dtype, "W")
    product = g.convert(x, dtype="float32") @ g.convert(w, dtype="float32")
    for f in functions:
        g.mark_output(getattr(g, f.name)(product))
    kernel = cs.superoptimize(g)
    for scale in (1e-4, 0.3, 2.0, 20.0, 80.0):
        x = inside(functions[0].domain, scale)
        check(kernel, [t.to(getattr(torch, dtype)) for t in (x, torch.eye(16).cuda())])


#: functions that share a kernel: they have the same domain
TOGETHER = [
    same[n : n + 7]
    for domain in dict.fromkeys(f.domain for f in FUNCTIONS)
    for same in [[f for f in FUNCTIONS if f.domain == domain]]
    for n in range(0, len(same), 7)
]


@pytest.mark.ptx
@pytest.mark.parametrize("functions", TOGETHER, ids=lambda fs: fs[0].name)
def test_functions(functions: list[type[Function]]) -> None:
    """Behind a product that is exact, as exact as PyTorch's, near zero and at large arguments."""
    check_functions(functions, "float32")


@pytest.mark.ptx
def test_pairs() -> None:
    """Functions of two numbers, for all signs, zeros and infinities, and sizes far apart."""
    g = cs.new_kernel_graph()
    x, y = g.new_input((16, 64), "float32", "X"), g.new_input((64,), "float32", "Y")
    for p in PAIRS:
        g.mark_output(getattr(g, p.name)(x, y))
    drawn = torch.randn(2, 64) * 10 ** (2 * torch.randn(2, 64))
    odd = torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 2.0, -2.0, 6.0, 0.1, 0.5, 1e30])
    rows, columns = (torch.cat([odd, t[: -len(odd)]]).cuda() for t in drawn)
    check(cs.superoptimize(g), [rows[:16, None].expand(16, 64).contiguous(), columns])


@pytest.mark.ptx
def test_functions_of_products_of_converted_operands() -> None:
    """Operands of 16 bits that are multiplied in float32 have results as exact."""
    check_functions(TOGETHER[0], "bfloat16")


@pytest.mark.ptx
def test_what_is_cut_off_does_not_add_up() -> None:
    """512 steps of numbers of one sign: cut off at each, the sum would lose 86 ulp."""
    graph = plain(8, 4096, 64, "W", "highest")
    x, w = (torch.rand_like(t) for t in zoo.draw(graph, 1, "cuda"))
    check(cs.superoptimize(graph), [-x, w])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients(precision: str) -> None:
    """Gradients of both operands; those of W contract the rows, for which X is copied once."""
    torch.set_float32_matmul_precision(precision)
    try:
        model = torch.nn.Linear(96, 72, device="cuda")
        x = torch.randn(40, 96, device="cuda", requires_grad=True)
        fast = cs.superoptimize(model, (x,))
        fast(x).square().sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    found = [p.grad for p in (x, *model.parameters())]
    exact = torch.nn.Linear(96, 72).double().cuda()
    exact.load_state_dict(model.state_dict())
    y = x.detach().double().requires_grad_()
    exact(y).square().sum().backward()
    for got, p in zip(found, (y, *exact.parameters()), strict=True):
        assert got is not None and p.grad is not None
        relative = 1e-5 if precision == "highest" else 4e-3
        assert (got - p.grad).abs().max() <= relative * p.grad.abs().max()
