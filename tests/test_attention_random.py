"""A hundred random calls of attention and their gradients against float64, and how few kernels
they need."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.runtime.programs import Kept
from cutesuper.torch.ops.attention.kind import Kind

#: by name: keyword arguments, and who sees whom ``[.., L, S]`` or what is added to the scores
MASKS = ("none", "causal", "lengths", "two sides", "bias of all", "bias of keys", "conditions")
CALLS = 100


class Drawn:
    """A random call.

    Attributes:
        sides: query, key and value.
        options: keyword arguments of the call.
        added: to the scores of each query head.
    """

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=rng))

        rows, keys = number(1, 40), number(2, 60)
        heads, self.group = ((1, 1), (2, 2))[number(0, 1)]
        self.name = MASKS[seed % len(MASKS)]
        shapes = (heads * self.group, rows), (heads, keys), (heads, keys)
        self.sides = [torch.randn(1, *s, 8, generator=rng) for s in shapes]
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        sees = torch.ones(rows, keys, dtype=torch.bool)
        self.options: dict[str, Any] = {"enable_gqa": True}
        self.added = torch.zeros(rows, keys)
        if self.name == "causal":
            self.options["is_causal"], sees = True, j <= i
        elif self.name == "lengths":
            length = number(1, keys)
            self.options["key_lengths"] = torch.tensor([length], dtype=torch.int32)
            sees = (j < length).expand(rows, keys)
        elif self.name == "two sides":
            left, right = number(0, 20), number(0, 20)
            self.options["window"] = left, right
            sees = (j >= i - left) & (j <= i + right)
        elif self.name != "none":
            shape = (rows, keys) if self.name == "bias of all" else (keys,)
            mask = torch.randn(shape, generator=rng)
            if self.name == "conditions":
                mask = mask > -1
                sees = mask.expand(rows, keys)
            else:
                self.added = mask.expand(rows, keys)
            self.options["attn_mask"] = mask
        self.nothing = ~sees.any(-1, keepdim=True)
        self.added = self.added.masked_fill(~sees & ~self.nothing, -torch.inf)

    def exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The result in the type of the tensors."""
        k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        scores = q @ k.mT * 8**-0.5 + self.added
        return scores.softmax(-1).masked_fill(self.nothing, 0.0) @ v

    def judge(self) -> None:
        """Compare the result without and with gradients, and the gradients."""
        plain = cs.ops.attention(*self.sides, **self.options)
        own = [t.clone().requires_grad_() for t in self.sides]
        made = cs.ops.attention(*own, **self.options)
        rise = torch.cos(torch.arange(made.numel())).view(made.shape)
        found = [plain, made.detach(), *torch.autograd.grad(made, own, rise)]
        wide = [t.double().requires_grad_() for t in self.sides]
        want = self.exact(*wide)
        wants = [want.detach()] * 2 + [*torch.autograd.grad(want, wide, rise.double())]
        for mine, other in zip(found, wants, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=2e-6)


def test_random_calls_need_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gradient = (
        importlib.import_module(f"cutesuper.torch.ops.attention.{name}")
        for name in ("calls", "gradient")
    )
    kinds: dict[str, set[Kind]] = {"alone": set(), "with gradients": set()}
    once, both = calls.runner_of, gradient._runners

    def runner_of(kind: Kind, *rest: Any) -> Any:
        kinds["alone"].add(kind)
        return once(kind, *rest)

    def runners(kind: Kind, *rest: Any) -> Any:
        kinds["with gradients"].add(kind)
        return both(kind, *rest)

    monkeypatch.setattr(calls, "runner_of", runner_of)
    monkeypatch.setattr(calls, "_plans", Kept())
    monkeypatch.setattr(gradient, "_runners", runners)
    monkeypatch.setattr(gradient, "_passes", Kept())
    for seed in range(CALLS):
        Drawn(seed).judge()
    # 1, up to 16 and up to 256 queries, for both numbers of heads and each kind of mask
    assert all(len(own) <= 3 * 2 * len(MASKS) for own in kinds.values())
    assert all(
        str(k.keys) == "S" and str(k.rows) in ("1", "L") for own in kinds.values() for k in own
    )
