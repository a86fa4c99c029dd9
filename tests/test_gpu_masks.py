"""Masks made of positions behind a cache, on a GPU: lengths of one and of several queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.verify.numeric import acceptable

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]

#: places in the cache
PLACES = 128


def attend(queries: int, capped: bool) -> Any:
    """Attention behind a cache: by PyTorch's operator, or written out with capped scores."""

    def run(q: Any, k: Any, v: Any, start: Any) -> Any:
        rows = (torch.arange(queries, device=q.device) + start)[:, None]
        seen = torch.arange(PLACES, device=q.device) <= rows
        if not capped:
            return F.scaled_dot_product_attention(q, k, v, seen[None, None], enable_gqa=True)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        mask = torch.where(seen, 0.0, -torch.inf).to(q.dtype)[None, None]
        scores = torch.tanh(q @ k.mT * 0.125 / 2) * 2 + mask
        return F.softmax(scores, -1).to(q.dtype) @ v

    return run


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("queries", [1, 24])
def test_attention_behind_a_cache(queries: int, capped: bool) -> None:
    torch.manual_seed(queries)
    q = torch.randn(2, 4, queries, 64, device="cuda").bfloat16()
    k, v = (torch.randn(2, 2, PLACES, 64, device="cuda").bfloat16() for _ in range(2))
    fn = attend(queries, capped)
    program = cs.superoptimize(fn, (q, k, v, torch.tensor(3, device="cuda")))
    for start in (0, 40, PLACES - queries):
        place = torch.tensor(start, device="cuda")
        found, eager = program(q, k, v, place), fn(q, k, v, place)
        report = acceptable(found, fn(q.double(), k.double(), v.double(), place), eager, q.dtype)
        assert report, report.message


@pytest.mark.parametrize("form", ["bool", "added", "bias"])
def test_padding_in_front(form: str) -> None:
    """Sequences with padding on the left, of which the first rows see nothing."""
    torch.manual_seed(3)
    q = torch.randn(2, 4, 5, 64, device="cuda").bfloat16()
    k, v = (torch.randn(2, 2, PLACES, 64, device="cuda").bfloat16() for _ in range(2))
    padding = torch.arange(PLACES, device="cuda") >= torch.tensor([[0], [43]], device="cuda")
    bias = torch.randn(4, 1, PLACES, device="cuda").bfloat16()

    def attend(q: Any, k: Any, v: Any, start: Any, padding: Any, bias: Any) -> Any:
        rows = (torch.arange(5, device=q.device) + start)[:, None]
        mask = (torch.arange(PLACES, device=q.device) <= rows) & padding[:, None, None]
        if form == "added":
            mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        elif form == "bias":
            mask = torch.where(padding[:, None, None], bias, -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    others = torch.tensor(41, device="cuda"), padding, bias
    program = cs.superoptimize(attend, (q, k, v, *others))
    found, eager = program(q, k, v, *others), attend(q, k, v, *others)
    exact = attend(q.double(), k.double(), v.double(), *others)
    report = acceptable(found, exact, eager, q.dtype)
    assert report, report.message


def test_queries_keys_and_values_are_one_tensor() -> None:
    """A causal mask, and a number of keys that is no multiple of anything."""
    x = torch.randn(2, 33, 64, device="cuda").half()

    def run(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    found = cs.superoptimize(run, (x,))(x)
    report = acceptable(found, run(x.double()), run(x), found.dtype)
    assert report, report.message


#: functions of rows, a weight, and a label for each row
OF_LABELS: dict[str, Any] = {
    "mean": lambda x, w, t: F.cross_entropy(x, t),
    "each": lambda x, w, t: F.nll_loss(x.log_softmax(-1), t, reduction="none"),
    "gathered": lambda x, w, t: x.log_softmax(-1).gather(-1, t[:, None]),
    "of a product": lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
}


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", OF_LABELS)
def test_losses_of_labels(name: str, rows: int) -> None:
    """The element of a row that its label names, and labels that count for nothing."""
    torch.manual_seed(rows)
    half = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    x, w = (torch.randn(n, 64, **half) for n in (rows, 8))
    labels = torch.randint(0, 8, (rows,), device="cuda")
    if rows > 1 and name != "gathered":
        labels[3] = -100

    def results(f: Any, x: Any, w: Any) -> list[Any]:
        y = f(x, w, labels)
        made = torch.autograd.grad(y.sum(), (x, w), allow_unused=True)
        return [y.detach(), *(g for g in made if g is not None)]

    f = OF_LABELS[name]
    found = results(cs.superoptimize(f, (x, w, labels)), x, w)
    wide = results(f, *(t.detach().double().requires_grad_() for t in (x, w)))
    for y, exact, eager in zip(found, wide, results(f, x, w), strict=True):
        report = acceptable(y, exact, eager, y.dtype)
        assert report, report.message
