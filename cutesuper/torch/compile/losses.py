"""Losses that grow like squares next to 0 and like absolute values far away.

PyTorch chooses between two formulas, and decompositions of it give an infinite difference the slope
0 inf of the one that is not chosen. One formula has PyTorch's values and slopes everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
#: of the reduction that PyTorch's operators are given
_REDUCED: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.mean, torch.sum)


def _huber(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """z^2 / 2 for a difference z up to delta, ``delta (|z| - delta / 2)`` beyond."""
    z = x - target
    near = z.clamp(-delta, delta)
    return _REDUCED[reduction](near * (z - near * 0.5))


def _smooth_l1(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """The same, divided by its bound; for a bound of 0 the absolute value."""
    z = x - target
    if beta == 0:
        return _REDUCED[reduction](z.abs())
    near = z.clamp(-beta, beta)
    return _REDUCED[reduction](near / beta * (z - near * 0.5))


#: formulas of operators, by which a program is decomposed
LOSSES: dict[Any, Callable[..., Any]] = {
    _aten.huber_loss.default: _huber,
    _aten.smooth_l1_loss.default: _smooth_l1,
}
