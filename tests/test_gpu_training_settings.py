"""Checkpointing, autocast, added gradients and dynamic extents on a GPU: in models that are
compiled, in operators, and in traced programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.backends import Attention, gradients, judge_gradients  # noqa: E402
from tests.training_settings import SETTINGS, judge_into, judge_setting, supported  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

WIDTH = 256


def compile_all(model: Any, **how: Any) -> Any:
    return torch.compile(model, backend="cutesuper", options={"take": "all"}, **how)


def settings(names: list[str]) -> list[str]:
    return [n for n in names if supported(SETTINGS[n])]


@pytest.mark.parametrize("setting", settings(list(SETTINGS)))
def test_compiled_models(setting: str, launched: list[tuple[int, ...]]) -> None:
    def call_of(model: Any) -> Any:
        return compile_all(model, dynamic=SETTINGS[setting].dynamic)

    judge_setting("block", WIDTH, SETTINGS[setting], call_of, "cuda")
    assert launched


@pytest.mark.parametrize("setting", settings(list(SETTINGS)))
def test_operators(setting: str) -> None:
    judge_setting("ours", WIDTH, SETTINGS[setting], lambda model: model, "cuda")


@pytest.mark.parametrize("setting", settings(["autocast, checkpointing", "dynamic"]))
def test_operators_in_compiled_models(setting: str) -> None:
    def call_of(model: Any) -> Any:
        return torch.compile(model, dynamic=SETTINGS[setting].dynamic)

    judge_setting("ours", WIDTH, SETTINGS[setting], call_of, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_is_added_to(dtype: Any, launched: list[tuple[int, ...]]) -> None:
    def add(x: Any, dy: Any, into: Any) -> None:
        into += dy.T @ x

    x, dy = (torch.randn(512, n, device="cuda").bfloat16() for n in (WIDTH, 128))
    judge_into(add, (x, dy, torch.randn(128, WIDTH, device="cuda").to(dtype)), compile_all(add))
    assert launched


def test_attention_of_any_batch_and_length(launched: list[tuple[int, ...]]) -> None:
    model = Attention(WIDTH, 4, 2).cuda().bfloat16()
    call = compile_all(model, dynamic=True)
    for batch, length in ((2, 64), (3, 100), (9, 300)):
        x = torch.randn(batch, length, WIDTH, device="cuda").bfloat16()
        judge_gradients(model, gradients(model, call, x), x)
    assert any(len(extents) > 1 for extents in launched)


def test_a_norm_and_products_under_autocast(launched: list[tuple[int, ...]]) -> None:
    norm = torch.nn.RMSNorm(WIDTH, device="cuda")
    gate, up = (torch.nn.Linear(WIDTH, 512, bias=False, device="cuda") for _ in range(2))

    def both(x: Any) -> Any:
        h = norm(x)
        return torch.nn.functional.silu(gate(h)) * up(h)

    x = torch.randn(300, WIDTH, device="cuda")
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16):
            found, eager = compile_all(both)(x), both(x)
        for module in (norm, gate, up):
            module.double()
        report = acceptable(found, both(x.double()), eager, eager.dtype)
    assert report, report.message
    assert launched


@pytest.mark.ptx
def test_kernels_of_a_norm_and_products_in_a_narrower_type() -> None:
    """What autocast makes of a norm in float32 and two layers in bfloat16."""
    g = cs.new_kernel_graph()
    x, w = g.new_input((cs.symbol("M", 64), 128), cs.float32), g.new_input((128,), cs.float32)
    y = g.convert(g.rms_norm(x, w), cs.bfloat16)
    for n in (64, 32):
        g.mark_output(g.matmul(y, g.transpose(g.new_input((n, 128), cs.bfloat16), (1, 0))))
    given = [torch.randn(40, 128), torch.randn(128),
             *(torch.randn(n, 128).bfloat16() / 11 for n in (64, 32))]  # fmt: skip
    found = cs.superoptimize(g)([t.cuda() for t in given])
    normed = torch.nn.functional.rms_norm(given[0].double(), (128,), given[1].double(), 1e-5)
    for y, weight in zip(found, given[2:], strict=True):
        want = normed @ weight.double().T
        eager = normed.bfloat16() @ weight.T
        report = acceptable(y.cpu(), want, eager, torch.bfloat16)
        assert report, report.message


@pytest.mark.ptx
def test_kernels_of_rows_of_any_batch_and_length() -> None:
    """Positions that all sequences of a batch share keep its extents apart."""
    g = cs.new_kernel_graph()
    batch, length = cs.symbol("B", 4), cs.symbol("S", 16)
    x = g.new_input((batch, length, 2, 64), cs.bfloat16)
    g.mark_output(g.mul(x, g.new_input((length, 1, 64), cs.bfloat16)))
    kernel = cs.superoptimize(g)
    for sizes in ((3, 5), (4, 17)):
        x, w = torch.randn(*sizes, 2, 64).bfloat16(), torch.randn(sizes[1], 1, 64).bfloat16()
        torch.testing.assert_close(kernel(x.cuda(), w.cuda()).cpu(), x * w)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_traced_program(accumulated: int) -> None:
    """Its gradients add up, with and without checkpointing."""
    layer = torch.nn.Sequential(torch.nn.RMSNorm(WIDTH, eps=1e-5), torch.nn.Linear(WIDTH, 512))
    layer = layer.cuda().bfloat16()
    inputs = [torch.randn(64, WIDTH, device="cuda").bfloat16() for _ in range(accumulated)]
    program = cs.superoptimize(layer, (inputs[0],))
    again = partial(checkpoint, program, use_reentrant=False)
    theirs = _added(layer, layer, inputs)
    for call in (program, again):
        for found, want in zip(_added(layer, call, inputs), theirs, strict=True):
            torch.testing.assert_close(found, want, rtol=3e-2, atol=3e-2)


def _added(layer: Any, call: Any, inputs: list[Any]) -> list[Any]:
    layer.zero_grad()
    for x in inputs:
        call(x).float().square().mean().backward()
    return [p.grad.clone() for p in layer.parameters()]
