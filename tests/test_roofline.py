"""The roofline of PyTorch's kernels, where it is more than bytes and products."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.targets import H200
from cutesuper.targets.roofline import baseline, least_us, traffic

ROWS: dict[str, Callable[[KernelGraph, Tensor], Tensor]] = {
    "softmax": lambda g, x: g.softmax(x),
    "logsumexp": lambda g, x: g.log(g.sum(g.exp(g.sub(x, g.max(x, 1))), 1)),
    "scaled": lambda g, x: g.sum(g.exp(g.sub(g.mul(x, 0.5), g.max(g.mul(x, 0.5), 1))), 1),
    "maximum": lambda g, x: g.max(x, 1),
    "maximum apart": lambda g, x: g.sub(g.max(x, 1), g.sum(x, 1)),
    "norm": lambda g, x: g.rms_norm(x),
    "columns": lambda g, x: g.sum(g.exp(g.sub(x, g.max(x, 0))), 0),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("columns", [1024, 8192])
def test_sums_behind_the_maximum_of_a_long_row(name: str, columns: int) -> None:
    """Inductor's softmax of 4096 columns and more takes twice its memory; nothing else does."""
    g = cs.new_kernel_graph()
    g.mark_output(ROWS[name](g, g.new_input((2048, columns), cs.bfloat16)))
    g = g.expanded()
    memory = traffic(g) / H200.bandwidth * 1e6
    long = columns == 8192 and name in ("softmax", "logsumexp", "scaled")
    expected = memory * (H200.libraries.softmax_memory if long else 1) + H200.launch_us
    assert baseline(g, H200).us == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("rows", "work"), [(16, False), (8192, True)])
def test_the_least_of_two_products(rows: int, work: bool) -> None:
    """Memory for few rows, tensor cores for many; what lies between the products is not stored."""
    g = cs.new_kernel_graph()
    x, *weights = (g.new_input(s, cs.bfloat16) for s in ((rows, 2048), (2048, 2048), (2048, 2048)))
    for w in weights:
        x = g.matmul(x, w)
    g.mark_output(x)
    memory = (2 * rows * 2048 + 2 * 2048 * 2048) * 2 / H200.bandwidth
    flops = 2 * 2 * rows * 2048 * 2048 / H200.tensor_flops
    assert (flops > memory) == work
    assert least_us(g, H200) == pytest.approx(max(memory, flops) * 1e6 + H200.launch_us)
    assert least_us(g, H200) < baseline(g, H200).us
