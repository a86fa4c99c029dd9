"""Checkpointing, autocast, added gradients and dynamic extents, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.backends import Attention, compiled, gradients, judge_gradients  # noqa: E402
from tests.training_settings import (  # noqa: E402
    SETTINGS,
    judge_into,
    judge_setting,
    supported,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 32


@pytest.mark.parametrize(
    ("name", "setting"),
    [("block", "checkpointing"), ("block", "autocast"), ("block", "accumulation in float32"),
     ("block", "all of it"), ("ours", "accumulation"), ("ours", "all of it")],
)  # fmt: skip
def test_models(name: str, setting: str) -> None:
    if not supported(SETTINGS[setting]):
        pytest.skip("PyTorch has no grad_dtype")
    reports: list[Any] = []

    def call_of(model: Any) -> Any:
        call, found = compiled(model, dynamic=SETTINGS[setting].dynamic, fullgraph=True)
        reports.append(found)
        return call

    judge_setting(name, WIDTH, SETTINGS[setting], call_of)
    assert [r.phase for r in reports[0]] == ["forward", "backward"]
    assert all(r.taken for r in reports[0])


@pytest.mark.parametrize("setting", ["autocast, checkpointing", "accumulation in float32"])
def test_operators_without_a_compiler(setting: str) -> None:
    if not supported(SETTINGS[setting]):
        pytest.skip("PyTorch has no grad_dtype")
    judge_setting("ours", WIDTH, SETTINGS[setting], lambda model: model)


def test_autocast_leaves_no_seam_behind_a_norm() -> None:
    """A norm in float32 and the products of what it gives in bfloat16 are one region; products of
    one norm share a launch in it."""
    norm = torch.nn.RMSNorm(WIDTH)
    gate, up = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def both(x: Any) -> Any:
        h = norm(x)
        return torch.nn.functional.silu(gate(h)) * up(h)

    call, reports = compiled(both, fullgraph=True)
    x = torch.randn(6, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(x), both(x), rtol=3e-2, atol=3e-2)
    [report] = reports
    assert len(report.regions) == report.taken == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_is_added_to(dtype: Any) -> None:
    """The product and the sum are one region; into float32 it is not rounded in between."""

    def add(x: Any, dy: Any, into: Any) -> None:
        into += dy.T @ x

    x, dy = torch.randn(24, WIDTH).bfloat16(), torch.randn(24, 16).bfloat16()
    call, reports = compiled(add, fullgraph=True)
    judge_into(add, (x, dy, torch.randn(16, WIDTH).to(dtype)), call)
    assert [len(r.regions) for r in reports] == [1]


def test_attention_of_any_batch_and_length() -> None:
    model = Attention(WIDTH, 4, 2)
    call, reports = compiled(model, dynamic=True, fullgraph=True)
    for batch, length in ((2, 6), (3, 17), (5, 40)):
        x = torch.randn(batch, length, WIDTH)
        judge_gradients(model, gradients(model, call, x), x)
    assert [r.phase for r in reports] == ["forward", "backward"]
    attention = [r for r in reports[0].regions if r.operators == 1]
    assert attention and not any(o.reason for o in reports[0].outside)


def test_rows_of_any_batch_and_length() -> None:
    """What differs along the positions alone keeps batch and length apart."""

    def turned(x: Any, cos: Any) -> Any:
        y = x.unflatten(-1, (4, 8)) * cos[:, None]
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)

    call, reports = compiled(turned, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for batch, length in ((2, 6), (3, 17)):
            x, cos = torch.randn(batch, length, 32), torch.randn(length, 8)
            torch.testing.assert_close(call(x, cos), turned(x, cos))
    assert [r.taken for r in reports] == [1]
