"""Products whose extents are no multiples of 8, drawn at random, for `test_gpu_odd.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests import zoo

EXTENTS = (2, 3, 7, 9, 12, 17, 31, 33, 50, 65, 100, 127, 129, 130, 193, 257)


def batched(m: Dim, k: int, n: int, dtype: str) -> KernelGraph:
    """Three matrices of X, each with a W of its own, and one bias."""
    g = new_kernel_graph()
    x, w = g.new_input((3, m, k), dtype, name="X"), g.new_input((3, k, n), dtype, name="W")
    g.mark_output(g.add(g.matmul(x, w), g.new_input((n,), dtype, name="b")))
    return g


def of_columns(m: Dim, k: Dim, n: int, dtype: str) -> KernelGraph:
    """``X^T W``: both with their contracted label first, as the gradient of a weight."""
    g = new_kernel_graph()
    x, w = g.new_input((k, m), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    g.mark_output(g.matmul(g.transpose(x), w))
    return g


def several(m: Dim, k: int, n: int, dtype: str) -> KernelGraph:
    """Products of several widths, one of them a multiple of 8."""
    return zoo.projections(m, k, (n, n + 1, 64), dtype)


Build = Callable[[Dim, int, int, str], KernelGraph]
PROGRAMS: dict[str, Build] = {
    "bias": zoo.linear,
    "residual": lambda m, k, n, d: zoo.linear(m, k, n, d, "residual"),
    "silu": lambda m, k, n, d: zoo.linear(m, k, n, d, "silu"),
    "norm": zoo.rms_norm_linear,
    "norm, gain": lambda m, k, n, d: zoo.rms_norm_linear(m, k, n, d, True),
    "norm, gain, (N, K)": lambda m, k, n, d: zoo.rms_norm_linear(m, k, n, d, True, True),
    "layer norm": zoo.layer_norm_linear,
    "gated": zoo.gated_mlp,
    "several": several,
    "lora": lambda m, k, n, d: zoo.lora(m, k, n, 7, d),
    "lora, (N, K)": lambda m, k, n, d: zoo.lora(m, k, n, 33, d, transposed=True, norm=True),
    "two": lambda m, k, n, d: zoo.two_operands(m, k, n, 9, d),
    "mlp": lambda m, k, n, d: zoo.relu_mlp(m, k, 50, n, d),
    "last layer": zoo.dlrm,
    "softmax": zoo.softmax_linear,
    "norm behind": zoo.rms_norm_of_product,
    "batched": batched,
    "of columns": of_columns,
}


@dataclass(frozen=True)
class Case:
    """A program and its extents.

    Attributes:
        program: of `PROGRAMS`.
        m, k, n: rows, contracted label, columns.
        symbolic: true if the number of rows is known at the call.
    """

    program: str
    m: int
    k: int
    n: int
    dtype: str
    symbolic: bool
    dependent: bool

    def graph(self) -> KernelGraph:
        """Its program."""
        rows = Symbol("M", self.m) if self.symbolic else self.m
        return PROGRAMS[self.program](rows, self.k, self.n, self.dtype)

    def __str__(self) -> str:
        kind = f"{self.dtype}{'-symbolic' * self.symbolic}{'-dependent' * self.dependent}"
        return f"{self.program}-{self.m}x{self.k}x{self.n}-{kind}"


def cases(count: int, seed: int = 0) -> list[Case]:
    """Random cases; every program comes before one comes again."""
    rng, names = random.Random(seed), list(PROGRAMS)
    return [_case(rng, names[i % len(names)]) for i in range(count)]


def _case(rng: random.Random, name: str) -> Case:
    k, n = (rng.choice((*EXTENTS, 64, 128)) for _ in range(2))
    m = rng.choice((1, *EXTENTS))
    if k % 8 == 0 and n % 8 == 0:
        k += 1
    symbolic = rng.random() < 0.25 and name not in ("batched", "of columns")
    return Case(name, m, k, n, rng.choice(("float16", "bfloat16")), symbolic, rng.random() < 0.3)
