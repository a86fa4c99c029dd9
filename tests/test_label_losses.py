"""Losses by labels in traced functions: the kernels of the loss read the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import cutesuper as cs  # noqa: E402
from cutesuper.errors import RangeError  # noqa: E402
from cutesuper.ir.dtypes import as_dtype  # noqa: E402
from cutesuper.ir.evaluate import run_reference  # noqa: E402
from cutesuper.verify.numeric import acceptable  # noqa: E402
from tests.tracing import check, in_parts, randn, traced  # noqa: E402

ROWS, CLASSES = 12, 10
LABELS = torch.tensor([0, 9, -100, 3, 3, -100, 5, 1, 2, 8, 7, 6])

#: losses of logits and labels, of which all is one region and nothing is PyTorch's
LOSSES: dict[str, Callable[..., Any]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "each": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "a class is ignored": lambda x, t: F.cross_entropy(x, t.clamp_min(3), ignore_index=3),
    "log-probabilities": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
    "in float32": lambda x, t: F.cross_entropy(x.float(), t),
    "two dimensions": lambda x, t: F.cross_entropy(x.view(3, 4, -1).flatten(0, 1), t),
    "int32": lambda x, t: F.cross_entropy(x, t, ignore_index=-1) * 2,
    "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "smoothed sum": lambda x, t: F.cross_entropy(x, t, label_smoothing=1.0, reduction="sum"),
    "each is smoothed, a class is ignored": lambda x, t: F.cross_entropy(
        x, t.clamp_min(3), ignore_index=3, label_smoothing=0.3, reduction="none"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_labels_take_no_operator(monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any) -> None:
    loss = LOSSES[name]
    x, t = randn(ROWS, CLASSES).to(dtype), LABELS.clamp_min(-1 if name == "int32" else -100)
    program = traced(monkeypatch, loss, (x, t))
    assert len(program.regions) == 1
    assert not [n for n in program.outside if "clamp" not in n]
    check(program, loss, (x, t))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_ignored_rows_may_hold_anything(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, label_smoothing=smoothing)

    x = randn(ROWS, CLASSES)
    x[LABELS < 0] = torch.nan
    program = traced(monkeypatch, loss, (x, LABELS))
    torch.testing.assert_close(program(x, LABELS), loss(x, LABELS))
    none = torch.full_like(LABELS, -100)
    assert program(x, none).isnan() and loss(x, none).isnan()


def test_a_class_that_is_ignored_may_have_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.nll_loss(x, t, ignore_index=3)

    x, t = randn(ROWS, CLASSES), LABELS.clamp_min(3)
    x[:, 3] = -torch.inf
    program = traced(monkeypatch, loss, (x, t))
    torch.testing.assert_close(program(x, t), loss(x, t))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, LABELS, label_smoothing=smoothing)

    x = randn(ROWS, CLASSES).requires_grad_()
    program = traced(monkeypatch, loss, (x,))
    graph = program.regions[0].kernel.graph
    backward = cs.grad(graph, wrt=[graph.nodes[graph.inputs[0]].name])
    given = {"int64": LABELS[:, None], "float32": x.detach()}
    tensors = []
    for i in backward.inputs:
        node = backward.nodes[i]
        t = given[node.dtype.name]
        tensors.append(t if node.shape == tuple(t.shape) else torch.ones(node.shape))
    found = run_reference(backward, tensors)
    [want] = torch.autograd.grad(loss(x), x)
    assert any(f.shape == want.shape and torch.allclose(f, want, atol=1e-6) for f in found)


def test_wrong_labels_are_an_error_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(ROWS, CLASSES)
    program = traced(monkeypatch, F.cross_entropy, (x, LABELS))
    for wrong in (-1, CLASSES):
        with pytest.raises(RangeError, match="out of bounds"):
            program(x, torch.full_like(LABELS, wrong))


@pytest.mark.parametrize("name", ["classes weigh", "images", "smoothed, classes weigh"])
def test_other_losses_are_decomposed(name: str) -> None:
    x, t = randn(ROWS, CLASSES), LABELS
    weight = torch.arange(CLASSES) + 1
    images = randn(2, CLASSES, 2, 3), LABELS.view(2, 2, 3)
    loss, inputs = {
        "classes weigh": (lambda x, t: F.cross_entropy(x, t, weight.to(x.dtype)), (x, t)),
        "images": (F.cross_entropy, images),
        "smoothed, classes weigh": (
            lambda x, t: F.cross_entropy(x, t, weight.to(x.dtype), label_smoothing=0.1),
            (x, t),
        ),
    }[name]
    program, _ = in_parts(loss, inputs)
    check(program, loss, inputs)


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothed_losses_and_gradients_are_a_kernel_each(dtype: Any) -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, label_smoothing=0.1)

    labels = LABELS.cuda()
    x = randn(ROWS, CLASSES).to(dtype).cuda().requires_grad_()
    program = cs.superoptimize(loss, (x, labels), gradients=True)
    [region] = program.regions
    gradient = region.kernel.gradient()
    assert gradient.backward is not None
    assert len(gradient.forward.kernels) == len(gradient.backward.kernels) == 1
    exact = x.detach().double().requires_grad_()
    pairs = []
    for t, f in ((x, program), (exact, loss), (x, loss)):
        y = f(t, labels)
        pairs.append((y, *torch.autograd.grad(y, t)))
    for mine, want, theirs in zip(*pairs, strict=True):
        report = acceptable(mine, want, theirs, as_dtype(dtype))
        assert report, report.message


@pytest.mark.parametrize("reduction", ["sum", "none", "mean"])
def test_a_label_that_is_no_class_shows(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    """On a GPU nothing checks labels; the loss is NaN."""

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, reduction=reduction)

    x, wrong = randn(ROWS, CLASSES), LABELS.clone()
    wrong[3] = 40
    [region] = traced(monkeypatch, loss, (x, LABELS)).regions
    graph = region.kernel.graph
    integers = (graph.nodes[i].dtype.name == "int64" for i in graph.inputs)
    [found] = run_reference(graph, [wrong[:, None] if own else x for own in integers])
    assert found.flatten()[3 if reduction == "none" else 0].isnan()
