"""Programs that nobody wrote: whatever is cut into regions computes what it did before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tracing import check, in_parts, randn

Step = Callable[[Tensor, Tensor], Tensor]

#: of one value and another, each total: what does not fit leaves the value as it is
STEPS: dict[str, Step] = {
    "add": lambda x, y: x + y if _broadcast(x, y) else x + 1,
    "mul": lambda x, y: x * y if _broadcast(x, y) else x * 0.5,
    "silu": lambda x, y: F.silu(x),
    "relu": lambda x, y: torch.relu(x),
    # what is exact is not rounded in between
    "half": lambda x, y: x.bfloat16().float() if x.dtype is torch.float32 else x,
    "sort": lambda x, y: x.sort(-1).values,
    "sum": lambda x, y: x.sum(-1, keepdim=True) * 0.1,
    "sum away": lambda x, y: x.mean(0) if x.dim() > 1 else x,
    "softmax": lambda x, y: x.softmax(-1),
    "norm": lambda x, y: F.rms_norm(x, x.shape[-1:], eps=1e-3),
    "transpose": lambda x, y: x.mT if x.dim() > 1 else x,
    "permute": lambda x, y: x.movedim(0, -1),
    "flatten": lambda x, y: x.flatten(0, 1) if x.dim() > 1 else x,
    "unflatten": lambda x, y: x.unflatten(-1, (2, -1)) if x.shape[-1] % 2 == 0 else x,
    "unflatten first": lambda x, y: x.unflatten(0, (2, -1)) if x.shape[0] % 2 == 0 else x,
    "product": lambda x, y: x @ y.mT * 0.3 if _products(x, y) else x,
    "own product": lambda x, y: x @ x.mT * 0.3 if x.dim() > 1 else x,
    "column": lambda x, y: x.unsqueeze(-1) if x.dim() < 4 else x,
    "repeat": lambda x, y: x.unsqueeze(-1).expand(*x.shape, 4) if x.dim() < 4 else x,
    "part": lambda x, y: x.chunk(2, -1)[0] if x.shape[-1] > 1 else x,
    "both": lambda x, y: torch.cat([x, x * 2], -1),
}


def _broadcast(x: Tensor, y: Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def _products(x: Tensor, y: Tensor) -> bool:
    same = x.dim() > 1 and y.dim() > 1 and x.shape[-1] == y.shape[-1]
    return same and _broadcast(x.flatten(-2).sum(-1), y.flatten(-2).sum(-1))


@st.composite
def programs(draw: st.DrawFn) -> Any:
    """A function of three tensors."""
    rows = [
        (draw(st.sampled_from(sorted(STEPS))), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        for _ in range(draw(st.integers(1, 9)))
    ]

    def run(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [x, y, w]
        for name, i, j in rows:
            new = STEPS[name](values[-1 - i % len(values)], values[-1 - j % len(values)])
            if new.numel() <= 4096:
                values.append(new)
        return tuple(v * 1.5 for v in values[3:][-3:]) or (x + y,)

    run.__qualname__ = " ".join(f"{name}:{i}:{j}" for name, i, j in rows)
    return run


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fn=programs(), first=st.sampled_from([(4, 6, 8), (1, 6, 8), (6, 8), (8, 8), (2, 1, 8)]))
def test_regions_and_the_rest_are_eager(fn: Any, first: tuple[int, ...]) -> None:
    inputs = (randn(*first), randn(*first) + 0.5, randn(8, 8))
    program, _ = in_parts(fn, inputs)
    check(program, fn, inputs)
