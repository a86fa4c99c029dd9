"""Masks made of positions behind a cache, on a GPU: lengths of one and of several queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

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


@pytest.mark.parametrize("masked", [False, True])
def test_queries_keys_and_values_are_one_tensor(masked: bool) -> None:
    """A causal mask or any other, and a number of keys that is no multiple of anything."""
    x = torch.randn(2, 33, 64, device="cuda").half()
    seen = torch.rand(33, 33, device="cuda") + torch.eye(33, device="cuda") > 0.6

    def run(x: Any) -> Any:
        mask = seen if masked else None
        return F.scaled_dot_product_attention(x, x, x, mask, is_causal=not masked)

    found = cs.superoptimize(run, (x,))(x)
    report = acceptable(found, run(x.double()), run(x), found.dtype)
    assert report, report.message


#: functions of rows, a weight, and a label for each row
OF_LABELS: dict[str, Any] = {
    "mean": lambda x, w, t: F.cross_entropy(x, t),
    "each": lambda x, w, t: F.nll_loss(x.log_softmax(-1), t, reduction="none"),
    "gathered": lambda x, w, t: x.log_softmax(-1).gather(-1, t[:, None]),
    "of a product": lambda x, w, t: F.cross_entropy(F.linear(x, w / 8), t),
    "our own": lambda x, w, t: cs.ops.cross_entropy(F.linear(x, w / 8), t),
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
    same = OF_LABELS["of a product" if name == "our own" else name]  # takes float64
    wide = results(same, *(t.detach().double().requires_grad_() for t in (x, w)))
    for y, exact, eager in zip(found, wide, results(same, x, w), strict=True):
        report = acceptable(y, exact, eager, y.dtype)
        assert report, report.message


@pytest.mark.parametrize("kind", ["capped", "of documents"])
def test_flexible_attention_in_a_function(kind: str) -> None:
    """As one kernel."""
    torch.manual_seed(2)
    q, k = (torch.randn(1, h, 40, 64, device="cuda", dtype=torch.float16) for h in (4, 2))
    of = torch.arange(40, device="cuda") // 16
    block = create_block_mask(lambda b, h, i, j: of[i] == of[j], None, None, 40, 40, q.device.type)
    options: dict[str, Any] = {"block_mask": block}
    if kind == "capped":
        options = {"score_mod": lambda s, b, h, i, j: 2 * torch.tanh(s / 2)}

    def run(q: Any, k: Any) -> Any:
        return cs.ops.flex_attention(q, k, k, enable_gqa=True, **options)

    program = cs.superoptimize(run, (q, k))
    assert [len(r.kernel.kernels) for r in program.regions] == [1]
    k, v = (k.repeat_interleave(2, 1).double(),) * 2
    scores = q.double() @ k.mT / 8
    changed = 2 * torch.tanh(scores / 2)
    seen = torch.where(of[:, None] == of, scores, -torch.inf)
    exact = torch.softmax(changed if kind == "capped" else seen, -1) @ v
    torch.testing.assert_close(program(q, k[:, ::2].half()).double(), exact, rtol=5e-3, atol=5e-3)
