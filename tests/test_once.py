"""Values that depend on no input of a traced program are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.tracing import check, randn, traced  # noqa: E402

#: operators by which PyTorch passes tensors on, and those of the reference in place of a kernel
_PASSED = ("view", "detach", "expand", "permute", "reshape", "clone")


class _Made(TorchDispatchMode):
    """A recorder of operators that make tensors of what is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(f))
        return f(*args, **(kwargs or {}))


def _window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(q.shape[2])
    d = n[:, None] - n
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d >= 0) & (d < 5))


def _every_third(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(n[:, None] - n) % 3 == 0)


def _table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angles = torch.arange(q.shape[2]).float()[:, None] * torch.tensor([1.0, 0.1] * 8)
    return q * angles.cos().view(-1, 4, 4).flatten(1) + k * v


def _labels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * k).gather(-1, (torch.arange(9) % 4).expand(2, 3, 9)[..., None]) + v


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a window": _window, "every third key": _every_third, "a table": _table, "labels": _labels,
}  # fmt: skip
INPUTS = randn(2, 3, 9, 16), randn(2, 3, 9, 16), randn(2, 3, 9, 16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorch_computes_nothing_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn = FUNCTIONS[name]
    program = traced(monkeypatch, fn, INPUTS)
    check(program, fn, INPUTS)
    monkeypatch.setattr(
        "cutesuper.torch.compile.trace._Call.forward",
        lambda self, tensors: [torch.empty(INPUTS[0].shape)],
    )
    with _Made() as made:
        program.graph_module(*INPUTS)
    made_again = {n for n in made.names if not any(passed in n for passed in _PASSED)}
    assert made_again <= {"aten.empty.memory_format"} and program.outside == ()


def test_results_and_what_is_changed_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Any:
        n = torch.arange(4) % 3
        return x * (n > 0), n > 0, n[:2], torch.tensor([1, 2])

    program = traced(monkeypatch, fn, (randn(3, 4),))
    for _ in range(2):
        x = randn(3, 4)
        made, want = program(x), fn(x)
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
        for t in made:
            t.zero_()


def test_what_may_change_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.arange(4))
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.steps % 3 > 0) * self.weight.cos()

    module, x = Scaled(), randn(3, 4)
    program = traced(monkeypatch, module, (x,))
    for _ in range(2):
        torch.testing.assert_close(program(x), module(x))
        module.steps += 1
        module.weight.data += 1


def test_random_numbers_are_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, lambda x: (x.cos(), torch.rand(4) + 1), (randn(3, 4),))
    first, second = program(randn(3, 4)), program(randn(3, 4))
    assert not torch.equal(first[1], second[1])


def test_kept_values_serve_gradients_after_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        program = traced(monkeypatch, _table, INPUTS)
    kept = [t for n, t in program.graph_module.named_buffers() if n.startswith("kept")]
    assert kept and not any(t.is_inference() or t.requires_grad for t in kept)


def test_the_report_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch, _every_third, INPUTS)
    [text] = [n for n in program._latest.once if "remainder" in str(n)]
    assert "test_once.py" in text.place and text.once
