"""LayerNorm and Linear on a GPU: one kernel, any mean, any number of rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.dims import Dim
from cutesuper.runtime.kernel import Kernel
from tests import zoo
from tests.test_gpu import run

pytestmark = pytest.mark.gpu


@cache
def kernel_of(
    m: Dim,
    k: int,
    n: int,
    dtype: str = "float16",
    dependent: bool = False,
    form: tuple[tuple[str, Any], ...] = (),
) -> Kernel:
    graph = zoo.layer_norm_linear(m, k, n, dtype, **dict(form))
    return cs.superoptimize(graph, dependent_launch=dependent)


def check(kernel: Kernel, inputs: list[torch.Tensor], **form: Any) -> None:
    """Run and hold against the acceptance rule, with `torch.nn.functional.layer_norm` as eager."""
    outputs = run(kernel, inputs)
    named = zoo.named(kernel.graph, inputs)
    tail = torch.nn.functional.gelu if form.get("tail") else None
    eager = zoo.eager_layer_norm_linear(named, form.get("transposed", False), tail)
    [report] = zoo.judge(kernel.graph, inputs, outputs, [eager])
    assert report, f"{kernel!r}: {report.message}"


def inputs_of(kernel: Kernel, seed: int, mean: float = 0.0, m: int = 16) -> list[torch.Tensor]:
    inputs = zoo.draw(kernel.graph, seed, "cuda", {"M": m})
    inputs[0] = (inputs[0].float() + mean).to(inputs[0].dtype)
    return inputs


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["KN", "NK"])
def test_a_large_mean_does_not_cancel(mean: float, dtype: str, transposed: bool) -> None:
    form = (("transposed", transposed),)
    kernel = kernel_of(16, 4096, 4096, dtype, form=form)
    assert len(kernel.kernels) == 1
    for seed in range(3):
        check(kernel, inputs_of(kernel, seed, mean), **dict(form))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {"gain": False, "shift": False},
    "gain": {"shift": False},
    "bias": {"gain": False},
    "gelu": {"linear_bias": True, "tail": "gelu"},
    "residual": {"residual": True},
    "gated": {"gated": True},
}


@pytest.mark.parametrize("dependent", [False, True], ids=["plain launch", "dependent"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, dependent: bool) -> None:
    options = tuple(FORMS[form].items())
    kernel = kernel_of(16, 1024, 2048, dependent=dependent, form=options)
    assert len(kernel.kernels) == 1
    for seed, mean in enumerate((0.0, 100.0, 1000.0)):
        check(kernel, inputs_of(kernel, seed, mean), **FORMS[form])


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
@pytest.mark.parametrize("size", [(4096, 4096), (520, 1000)], ids=str)
def test_any_number_of_rows(size: tuple[int, int], dependent: bool) -> None:
    kernel = kernel_of(cs.symbol("M", 16), *size, dependent=dependent)
    for seed, m in enumerate((1, 2, 8, 16, 17, 64, 100, 1000)):
        check(kernel, inputs_of(kernel, seed, 10.0 * seed, m))


TINY = [(1, 8, 8), (3, 16, 64), (65, 72, 64), (2, 8, 2048), (17, 520, 136), (1, 1000, 1000)]


@pytest.mark.ptx
@pytest.mark.parametrize("size", TINY, ids=str)
def test_less_than_a_tile(size: tuple[int, int, int]) -> None:
    kernel = kernel_of(*size)
    for seed in range(3):
        check(kernel, inputs_of(kernel, seed, 50.0 * seed))


def test_every_run_gives_the_same_bits() -> None:
    kernel = kernel_of(16, 4096, 4096, form=(("transposed", False),))
    inputs = inputs_of(kernel, 3, 100.0)
    [first] = run(kernel, inputs)
    for _ in range(50):
        [again] = run(kernel, inputs)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


def test_rows_keep_to_themselves() -> None:
    """Constant rows, a row of NaN, and rows of very different means and deviations."""
    kernel = kernel_of(16, 4096, 4096, form=(("transposed", False),))
    inputs = inputs_of(kernel, 4)
    x = inputs[0].float()
    x = x * torch.logspace(-2, 1, 16, device="cuda")[:, None]
    x = x + torch.linspace(-500, 500, 16, device="cuda")[:, None]
    inputs[0] = x.half()
    check(kernel, inputs)
    inputs[0][3], inputs[0][5] = 0, 1000
    inputs[0][7, 17] = torch.nan
    [z] = run(kernel, inputs)
    bias = (zoo.named(kernel.graph, inputs)["B0"].double() @ inputs[1].double()).half()
    assert z[7].isnan().all() and z[[i for i in range(16) if i != 7]].isfinite().all()
    for row in (3, 5):
        assert torch.allclose(z[row].float(), bias.float(), rtol=2e-3, atol=2e-3)


def test_dependent_launch_waits_for_the_rows() -> None:
    """The sample of the rows is read past the ring: it must wait for the kernel before too."""
    kernel = kernel_of(16, 4096, 4096, dependent=True)
    inputs = inputs_of(kernel, 9, 100.0)
    [want] = run(kernel, inputs)
    late = torch.empty_like(inputs[0])
    for _ in range(5):
        late.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(5_000_000)
        torch.add(inputs[0], 0.0, out=late)
        assert torch.equal(kernel(late, *inputs[1:]), want)
