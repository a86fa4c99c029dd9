"""Softmax, cross entropy and the element-wise operators: what is particular to them; no GPU.

Numbers, strides, compilers and what else is the same for all are in `test_ops_training`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import CutesuperError, DTypeError, OperatorError, ShapeError
from cutesuper.search.search import SearchOptions, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify

torch = pytest.importorskip("torch")

from cutesuper.torch.ops.rowwise.activations import (  # noqa: E402 (they import torch)
    _add_activation_operator,
    _geglu_operator,
    _normalized_update_operator,
    _swiglu_operator,
)
from cutesuper.torch.ops.rowwise.cross_entropy import _operator as _cross_entropy_operator  # noqa: E402
from cutesuper.torch.ops.rowwise.definition import kind_of  # noqa: E402
from cutesuper.torch.ops.rowwise.graphs import Programs  # noqa: E402
from cutesuper.torch.ops.rowwise.softmax import _log_softmax_operator, _softmax_operator  # noqa: E402

F = torch.nn.functional
NAN, INF = float("nan"), float("inf")


def logits_and_target(rows: int = 12, n: int = 9) -> tuple[Any, Any]:
    torch.manual_seed(0)
    target = torch.randint(n, (rows,))
    target[3] = target[7] = -100
    return torch.randn(rows, n, requires_grad=True), target


# --- cross entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [-100, 2, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction: str, ignored: int) -> None:
    x, t = logits_and_target()
    t = torch.where(t == -100, ignored, t)
    found = cs.ops.cross_entropy(x, t, ignore_index=ignored, reduction=reduction)
    want = F.cross_entropy(x, t, ignore_index=ignored, reduction=reduction)
    torch.testing.assert_close(found, want)
    dy = torch.randn_like(want)
    [dx], [expected] = (torch.autograd.grad(y, x, dy) for y in (found, want))
    torch.testing.assert_close(dx, expected)
    assert torch.equal(cs.ops.cross_entropy(x, t.int(), ignore_index=ignored, reduction=reduction),
                       found)  # fmt: skip


def test_losses_are_float32() -> None:
    x, t = logits_and_target()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = x.detach().to(dtype).requires_grad_()
        loss = cs.ops.cross_entropy(narrow, t)
        assert loss.dtype == torch.float32 and loss.shape == ()
        [dx] = torch.autograd.grad(loss, narrow)
        assert dx.dtype == dtype
        torch.testing.assert_close(loss, F.cross_entropy(narrow.float(), t))


def test_leading_dimensions() -> None:
    x, t = logits_and_target()
    whole = cs.ops.cross_entropy(x, t, reduction="none")
    parts = cs.ops.cross_entropy(x.view(3, 4, 9), t.view(3, 4), reduction="none")
    assert torch.equal(parts, whole.view(3, 4))
    assert torch.equal(cs.ops.cross_entropy(x[0], t[0]), whole[0])


def test_no_row_that_counts() -> None:
    x = torch.randn(4, 9, requires_grad=True)
    t = torch.full((4,), -100)
    assert cs.ops.cross_entropy(x, t).isnan() and cs.ops.cross_entropy(x, t, reduction="sum") == 0
    for reduction in ("mean", "sum"):  # a batch of padding changes no weights
        [dx] = torch.autograd.grad(cs.ops.cross_entropy(x, t, reduction=reduction), x)
        assert not dx.any()


@pytest.mark.parametrize("wrong", [9, -1, -99, 1 << 33, -(1 << 40)])
def test_a_target_that_is_no_class_shows(wrong: int) -> None:
    x, t = logits_and_target()
    t[5] = wrong
    losses = cs.ops.cross_entropy(x, t, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [5]
    assert cs.ops.cross_entropy(x, t).isnan()
    [dx] = torch.autograd.grad(losses.nan_to_num().sum(), x)
    assert not dx.isnan()[:5].any() and not dx.isnan()[6:].any()
    [dx] = torch.autograd.grad(cs.ops.cross_entropy(x, t, reduction="sum"), x)
    assert dx.isnan().all(1).nonzero().flatten().tolist() == [5]


def test_one_class() -> None:
    x = torch.randn(3, 1, requires_grad=True)
    losses = cs.ops.cross_entropy(x, torch.tensor([0, 1, -100]), reduction="none")
    assert torch.equal(losses.isnan(), torch.tensor([False, True, False])) and losses[0] == 0


def test_large_logits() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -INF]], requires_grad=True)
    t = torch.tensor([1, 0])
    found = cs.ops.cross_entropy(x, t, reduction="none")
    torch.testing.assert_close(found, F.cross_entropy(x, t, reduction="none"))
    [dx] = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(dx, torch.tensor([[1.0, -1, 0], [-0.5, 0.5, 0]]))


# --- softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_rows_with_infinities(name: str) -> None:
    x = torch.tensor([[0.0, 1, -INF], [-INF, -INF, -INF], [1e4, 0, -1e4], [INF, 0, 0]])
    ours, theirs = getattr(cs.ops, name), getattr(torch, name)
    want = theirs(x, -1)
    for leaf in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(ours(leaf).detach(), want, equal_nan=True)
    assert torch.equal(ours(x, dim=1).nan_to_num(), ours(x).nan_to_num())


# --- what is kept --------------------------------------------------------------------------------

ROWS, VALUE, ROW = (6, 16), (6, 1), (16,)
KEPT: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "softmax": (cs.ops.softmax, [ROWS], [ROWS]),
    "log_softmax": (cs.ops.log_softmax, [ROWS], [ROWS]),
    "swiglu": (cs.ops.swiglu, [ROWS] * 2, [ROWS] * 2),
    "geglu": (cs.ops.geglu, [ROWS] * 2, [ROWS] * 2),
    "relu": (cs.ops.add_activation, [ROWS, ROWS, ROW], [ROWS]),
    "sigmoid": (
        lambda x, p, b: cs.ops.add_activation(x, p, b, activation="sigmoid"),
        [ROWS, ROWS, ROW], [ROWS],
    ),
    "normalized_update": (
        cs.ops.normalized_update, [ROWS, ROWS, ROW], [ROWS, ROWS, ROW, VALUE, VALUE]
    ),
    "cross_entropy": (
        lambda x: cs.ops.cross_entropy(x, torch.arange(6), reduction="none"), [ROWS],
        [ROWS, (6,), VALUE, VALUE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_for_the_backward_pass(name: str) -> None:
    call, shapes, kept = KEPT[name]
    found: list[tuple[int, ...]] = []

    def pack(t: Any) -> Any:
        found.append(tuple(t.shape))
        return t

    leaves = [torch.randn(s, requires_grad=True) for s in shapes]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*leaves)
    assert sorted(found) == sorted(kept)


# --- programs ------------------------------------------------------------------------------------


def passes(operator: Any, tensors: list[Any], options: tuple[Any, ...]) -> list[Any]:
    """Graphs of the forward pass with what is kept, and of all gradients."""
    definition = operator.definition
    programs = Programs(definition, kind_of(definition, tensors, options), 4096)
    backward = programs.backward(programs.differentiable, (True,) * len(definition.outputs))
    return [programs.plain, programs.saving, backward.graph]


def examples(n: int) -> dict[str, tuple[Any, list[Any], tuple[Any, ...]]]:
    x, w = torch.empty(2, n, dtype=torch.bfloat16), torch.empty(n)
    return {
        "softmax": (_softmax_operator, [x], ()),
        "log_softmax": (_log_softmax_operator, [x], ()),
        "cross_entropy": (_cross_entropy_operator, [x, torch.zeros(2, dtype=torch.int64)], (-100,)),
        "swiglu": (_swiglu_operator, [x, x], ()),
        "geglu": (_geglu_operator, [x, x], ("none",)),
        "geglu, tanh": (_geglu_operator, [x, x], ("tanh",)),
        "add_activation": (_add_activation_operator, [x, x, w], (0.5, "relu")),
        "normalized_update": (_normalized_update_operator, [x, x, w], ()),
    }


@pytest.mark.parametrize("n", [4096, 50257])
@pytest.mark.parametrize("name", examples(8))
def test_every_pass_is_one_kernel(name: str, n: int) -> None:
    """And right, wherever the columns are split; parts of what is element-wise are not searched, of
    which the derivative of a gated GELU has 742."""
    for graph in passes(*examples(n)[name]):
        found = search(graph, H200, options=SearchOptions(lowered=True, keep=1))
        mu = found.candidates[0].mugraph
        assert len(mu.steps) == 1 and verify(graph, mu)
        sums = any(node.facets.reduces for node in graph.expanded().nodes)
        assert sums or found.statistics.regions == 1


def test_backward_passes_have_no_maximum() -> None:
    """Log-sum-exp and results are kept; a maximum of rounded elements would not be theirs."""
    for name in ("softmax", "log_softmax", "cross_entropy"):
        backward = passes(*examples(64)[name])[-1].expanded()
        assert not {"max", "log"} & {n.operator for n in backward.nodes}


# --- registered operators, modules ---------------------------------------------------------------


def registered() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    made: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    ops = torch.ops.cutesuper
    for grad in (False, True):
        x, y = (torch.randn(4, 3, 16, requires_grad=grad) for _ in range(2))
        w, t = torch.randn(16, requires_grad=grad), torch.randint(16, (4, 3))
        made |= {
            f"softmax {grad}": (ops.softmax, (x,)),
            f"log_softmax {grad}": (ops.log_softmax, (x,)),
            f"cross_entropy {grad}": (ops.cross_entropy, (x, t, -100)),
            f"swiglu {grad}": (ops.swiglu, (x, y)),
            f"geglu {grad}": (ops.geglu, (x, y, "tanh")),
            f"add_activation {grad}": (ops.add_activation, (x, y, w, 0.5, "sigmoid")),
            f"normalized_update {grad}": (ops.normalized_update, (x, y, w)),
        }
    return made


@pytest.mark.parametrize("name", registered())
def test_opcheck(name: str) -> None:
    op, args = registered()[name]
    torch.library.opcheck(op.default, args)


def test_modules() -> None:
    x, t = logits_and_target()
    torch.testing.assert_close(cs.nn.Softmax(-1)(x), x.softmax(-1))
    torch.testing.assert_close(cs.nn.LogSoftmax(dim=1)(x), x.log_softmax(1))
    choices: list[dict[str, Any]] = [
        {}, {"ignore_index": 3}, {"reduction": "sum"}, {"reduction": "none"}
    ]  # fmt: skip
    for options in choices:
        labels = torch.where(t == -100, options.get("ignore_index", -100), t)
        ours, theirs = cs.nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
        torch.testing.assert_close(ours(x, labels), theirs(x, labels))
        deep, wide = x.view(2, 2, 3, 9).movedim(-1, 1), labels.view(2, 2, 3)
        torch.testing.assert_close(ours(deep, wide), theirs(deep, wide))
        torch.testing.assert_close(ours(x[0], labels[0]), theirs(x[0], labels[0]))
    assert isinstance(cs.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss)


X, T = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
ERRORS: dict[str, tuple[Callable[[], Any], type[CutesuperError], str]] = {
    "dim": (
        lambda: cs.ops.softmax(X, dim=0), OperatorError,
        "softmax(x[4, 8], dim=0): kernels take rows, the last dimension; use dim=-1",
    ),
    "no dim": (lambda: cs.nn.LogSoftmax()(X), OperatorError, "log_softmax(x[4, 8], dim=None)"),
    "no tensor": (
        lambda: cs.ops.softmax([1.0]), DTypeError,  # type: ignore[arg-type]
        "softmax(x=[1.0]): x is a list, must be a torch tensor",
    ),
    "reduction": (
        lambda: cs.ops.cross_entropy(X, T, reduction="batchmean"), OperatorError,
        'cross_entropy(reduction=\'batchmean\'): must be "mean", "sum" or "none"',
    ),
    "ignored": (
        lambda: cs.ops.cross_entropy(X, T, ignore_index=1 << 40), OperatorError,
        "cross_entropy(ignore_index=1099511627776): must be an int of at most 32 bits",
    ),
    "probabilities": (
        lambda: cs.ops.cross_entropy(X, X), DTypeError,
        "cross_entropy(logits[4, 8], target[4, 8]): target is torch.float32; convert it to one of",
    ),
    "other rows": (
        lambda: cs.ops.cross_entropy(X, T[:3]), ShapeError,
        "target has shape [3], must be [4], as logits[4, 8] has",
    ),
    "weights of classes": (
        lambda: cs.nn.CrossEntropyLoss(weight=torch.ones(8)), OperatorError,
        "CrossEntropyLoss(weight=[8]): classes have no weights here; use torch.nn.CrossEntropyLoss",
    ),
    "smoothing": (
        lambda: cs.nn.CrossEntropyLoss(label_smoothing=0.1), OperatorError,
        "CrossEntropyLoss(label_smoothing=0.1): labels are not smoothed here",
    ),
    "approximation": (
        lambda: cs.ops.geglu(X, X, approximate="fast"), OperatorError,  # type: ignore[arg-type]
        'geglu(approximate=\'fast\'): must be "none" or "tanh"',
    ),
    "shapes of gates": (
        lambda: cs.ops.swiglu(X, X[:2]), ShapeError,
        "swiglu(gate[4, 8], up[2, 8]): up has shape [2, 8], must be [4, 8]",
    ),
    "activation": (
        lambda: cs.ops.add_activation(X, X, X[0], activation="tanh"),  # type: ignore[arg-type]
        OperatorError, 'add_activation(activation=\'tanh\'): must be "relu" or "sigmoid"',
    ),
    "scale": (
        lambda: cs.ops.add_activation(X, X, X[0], scale=NAN), OperatorError,
        "add_activation(scale=nan): must be a finite number",
    ),
    "alpha": (
        lambda: cs.ops.normalized_update(X, X, X[0, :3]), ShapeError,
        "alpha has shape [3], must be [8], one element for each of a row of x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_messages(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
