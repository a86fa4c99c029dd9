"""`cs.ops.flex_attention` beside PyTorch's: its published examples, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cutesuper as cs
from cutesuper.errors import CutesuperError, OperatorError, ShapeError
from cutesuper.runtime.programs import Kept
from cutesuper.verify.numeric import acceptable

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.arange(96) // 40
BIAS = torch.linspace(-1, 1, 4 * 96).view(4, 96)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def alibi(device: Any) -> Any:
    return alibi_of(SLOPES.to(device))


def alibi_of(slopes: torch.Tensor) -> Any:
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def documents(device: Any) -> Any:
    own = DOCUMENTS.to(device)
    return lambda b, h, q, k: (q >= k) & (own[q] == own[k])


def relative(device: Any) -> Any:
    bias = BIAS.to(device)
    return lambda score, b, h, q, k: score + bias[h, (q - k).abs()]


#: for a device: the function of the scores, and that of the mask
EXAMPLES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "full": lambda d: (None, None),
    "causal": lambda d: (None, causal),
    "window": lambda d: (None, lambda b, h, q, k: (q >= k) & (q - k <= 16)),
    "two sides": lambda d: (None, lambda b, h, q, k: (q - k).abs() <= 16),
    "prefix": lambda d: (None, lambda b, h, q, k: (q >= k) | (k < 20)),
    "documents": lambda d: (None, documents(d)),
    "ALiBi": lambda d: (alibi(d), causal),
    "soft cap": lambda d: (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), causal),
    "relative": lambda d: (lambda s, b, h, q, k: s + (q - k) * 0.125, None),
    "table": lambda d: (relative(d), None),
    "heads": lambda d: (None, lambda b, h, q, k: (k <= q) | (h > 1)),
    "causal as scores": lambda d: (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), None),
}


#: its overloads are too many for a list of arguments
_flex: Any = flex_attention


def judge(name: str, dtype: torch.dtype, device: str, kv_heads: int = 2) -> None:
    """The result, the logarithms and the gradients, by the rule against float64."""
    torch.manual_seed(0)
    score_mod, mask_mod = EXAMPLES[name](device)
    shapes = (2, 4, 96, 32), (2, kv_heads, 96, 32), (2, kv_heads, 96, 32)
    sides = [torch.randn(s, device=device).to(dtype) for s in shapes]
    dy = torch.randn(shapes[0], device=device).to(dtype)
    block = None
    if mask_mod is not None:
        block = create_block_mask(mask_mod, None, 4, 96, 96, device=device)

    def by_hand(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        at = [torch.arange(n, device=device) for n in (2, 4, 96, 96)]
        at = [t.view([-1 if d == n else 1 for d in range(4)]) for n, t in enumerate(at)]
        k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
        scores = q @ k.mT * 0.2
        scores = scores if score_mod is None else score_mod(scores, *at).to(scores.dtype)
        if mask_mod is not None:
            scores = torch.where(mask_mod(*at), scores, -torch.inf)
        return scores.softmax(-1).to(v.dtype) @ v, scores.float().logsumexp(-1)

    def run(attend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in sides]
        y, lse = attend(*own)
        return [y.detach(), lse.detach(), *torch.autograd.grad(y, own, dy.to(dtype))]

    given: Any = (score_mod, block, 0.2, kv_heads < 4, True)
    found = run(lambda *own: cs.ops.flex_attention(*own, *given), dtype)
    exact, eager = run(by_hand, torch.float64), run(by_hand, dtype)
    for mine, want, other in zip(found, exact, eager, strict=True):
        report = acceptable(mine, want, other, mine.dtype)
        assert report, report.message
    if device == "cpu":
        for mine, theirs in zip(found, _flex(*sides, *given), strict=False):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    judge(name, torch.float32, "cpu", kv_heads=4 if name in ("ALiBi", "table") else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels(name: str) -> None:
    judge(name, torch.bfloat16, "cuda")


def test_tensors_that_a_function_reads_are_read_at_every_call() -> None:
    q = torch.randn(1, 2, 8, 16)
    bias = torch.zeros(2)

    def biased(score: Any, b: Any, h: Any, q_index: Any, k_index: Any) -> Any:
        return score * bias[h]

    first = cs.ops.flex_attention(q, q, q, biased)
    torch.testing.assert_close(first, q.mean(2, keepdim=True).expand_as(q))
    bias += 1.0
    torch.testing.assert_close(cs.ops.flex_attention(q, q, q, biased), cs.ops.attention(q, q, q))


def learned(device: str, width: int, dtype: torch.dtype) -> None:
    """The result and all gradients of attention with slopes of heads (ALiBi) and a table of
    distances, which have gradients too, by the rule against float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 24, width, device=device).to(dtype) for n in (4, 2, 2))
    dy, table = torch.randn(q.shape, device=device).to(dtype), BIAS[:, :24].clone()

    def run(dtype: torch.dtype, attend: Any) -> list[torch.Tensor]:
        slopes, bias = (t.to(device, dtype, copy=True).requires_grad_() for t in (SLOPES, table))

        def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + slopes[h] * (j - i) + bias[h, (i - j).abs()]

        sides = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        y = attend(changed, *sides)
        return [y.detach(), *torch.autograd.grad(y, (*sides, slopes, bias), dy.to(dtype))]

    def by_hand(changed: Any, q: Any, k: Any, v: Any) -> Any:
        at = [torch.arange(n, device=device) for n in (2, 4, 24, 24)]
        at = [t.view([-1 if d == n else 1 for d in range(4)]) for n, t in enumerate(at)]
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = changed(q @ k.mT * width**-0.5, *at)
        return scores.masked_fill(at[3] > at[2], -torch.inf).softmax(-1) @ v

    def ours(changed: Any, *sides: Any) -> Any:
        block = create_block_mask(causal, None, None, 24, 24, device=device)
        given: Any = (*sides, changed, block)
        return cs.ops.flex_attention(*given, enable_gqa=True)

    every = run(dtype, ours), run(torch.float64, by_hand), run(dtype, by_hand)
    for mine, want, other in zip(*every, strict=True):
        report = acceptable(mine, want, other, mine.dtype)
        assert report, report.message


def test_tensors_that_a_function_reads_have_gradients() -> None:
    learned("cpu", 16, torch.float32)


@pytest.mark.gpu
@pytest.mark.ptx
def test_kernels_of_such_gradients() -> None:
    learned("cuda", 16, torch.bfloat16)


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j >= i - 9) & (j <= i + 30)


def judge_extents(
    rows: int, keys: int, device: str, dtype: torch.dtype, seen: Any = near, heads: Any = None
) -> None:
    """Attention with slopes of heads and a mask of so many heads, by the rule against float64."""
    torch.manual_seed(rows)
    sides = [torch.randn(2, h, n, 32, device=device).to(dtype)
             for h, n in ((4, rows), (2, keys), (2, keys))]  # fmt: skip
    changed = alibi(device)

    def by_hand(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = own = [t.detach().to(dtype).requires_grad_() for t in sides]
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        at = [torch.arange(n, device=device) for n in (2, 4, rows, keys)]
        at = [t.view([-1 if d == n else 1 for d in range(4)]) for n, t in enumerate(at)]
        scores = changed(q @ k.mT * 32**-0.5, *at).masked_fill(~seen(*at), -torch.inf)
        y = scores.softmax(-1).to(dtype) @ v
        return [y.detach(), *torch.autograd.grad(y.sum(), own)]

    block = create_block_mask(seen, None, heads, rows, keys, device=device)
    own = [t.detach().requires_grad_() for t in sides]
    y = cs.ops.flex_attention(*own, changed, block, None, True)
    found = [y.detach(), *torch.autograd.grad(y.sum(), own)]
    for mine, want, other in zip(found, by_hand(torch.float64), by_hand(dtype), strict=True):
        report = acceptable(mine, want, other, mine.dtype)
        assert report, report.message


@pytest.mark.parametrize(("rows", "keys"), [(1, 7), (20, 33), (29, 20), (4, 1)])
def test_gradients_of_what_a_function_reads(rows: int, keys: int) -> None:
    sides = [torch.randn(2, h, n, 32, dtype=torch.float64)
             for h, n in ((4, rows), (2, keys), (2, keys))]  # fmt: skip
    slopes = SLOPES.clone().requires_grad_()
    y = cs.ops.flex_attention(*(t.float() for t in sides), alibi_of(slopes), None, None, True)
    q, k, v = sides[0], *(t.repeat_interleave(2, 1) for t in sides[1:])
    far = torch.arange(keys) - torch.arange(rows)[:, None]
    want = (q @ k.mT * 32**-0.5 + slopes.view(4, 1, 1) * far).softmax(-1) @ v
    found, exact = (torch.autograd.grad(t.sum(), slopes)[0] for t in (y, want))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_rectangles() -> None:
    for rows, keys in ((1, 7), (20, 33), (29, 20), (5, 1), (1, 1)):
        judge_extents(rows, keys, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.ptx
def test_kernels_of_any_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of programs, forward and backward, for all extents of a class."""
    module = importlib.import_module("cutesuper.torch.ops.attention.flex")
    monkeypatch.setattr(module, "_kernels", Kept())
    for rows, keys in ((20, 33), (70, 90)):
        judge_extents(rows, keys, "cuda", torch.bfloat16)
    (made,) = module._kernels.values()
    assert made is not None


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("rows", [1, 2])
def test_heads_that_see_less_and_less(rows: int) -> None:
    """Heads that share keys have limits of their own; results of single rows were wrong."""

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < 70 - 20 * h + i

    judge_extents(rows, 90, "cuda", torch.bfloat16, seen, 4)


def test_compiled_functions_may_call_it() -> None:
    q = torch.randn(1, 4, 8, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return 2 * cs.ops.flex_attention(x + 1, x, x, alibi("cpu"))

    compiled = torch.compile(function, backend="aot_eager")
    torch.testing.assert_close(compiled(q), function(q))


@pytest.mark.parametrize(("score_mod", "why"), [
    (lambda s, b, h, q, k: s if s.amax() > 0 else -s, "cannot be traced"),
    (lambda s, b, h, q, k: s - s.amax(-1, keepdim=True), "one score at a time"),
    (lambda s, b, h, q, k: torch.special.bessel_j0(s), "is not an operator of kernel graphs"),
])  # fmt: skip
def test_functions_that_are_refused(score_mod: Any, why: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(OperatorError, match=why):
        cs.ops.flex_attention(q, q, q, score_mod)


def test_other_refusals() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 1, 8, 16)
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        cs.ops.flex_attention(q, k, k)
    block = create_block_mask(causal, None, None, 16, 16, device="cpu")
    with pytest.raises(CutesuperError, match="one of \\[16, 16\\] queries"):
        cs.ops.flex_attention(q, q, q, block_mask=block)
