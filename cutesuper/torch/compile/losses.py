"""Formulas of losses, in place of PyTorch's decompositions.

Some grow like squares next to 0 and like absolute values far away. PyTorch chooses between two
formulas, and decompositions of it give an infinite difference the slope 0 inf of the one that is
not chosen. One formula has PyTorch's values and slopes everywhere. A loss by labels stays whole
where kernels have it: decomposed, its labels would take six operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from cutesuper.torch.aten.losses import is_of_rows
from cutesuper.torch.internals import decomposition

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


def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Any:
    """PyTorch's own formula where kernels do not have the operator itself."""
    if is_of_rows(x, target, weight):
        return NotImplemented
    return decomposition(_aten.nll_loss_forward.default)(x, target, weight, reduction, ignore_index)


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The loss by labels of smoothed log-probabilities, ``(1 - s) p + s mean p`` of each row.
    PyTorch adds up two losses, and asks twice which labels are ignored."""
    if label_smoothing == 0 or not is_of_rows(x, target, weight):
        own = decomposition(_aten.cross_entropy_loss.default)
        return own(x, target, weight, reduction, ignore_index, label_smoothing)
    p = torch.log_softmax(x, 1)
    rest = p.sum(1, keepdim=True) * (label_smoothing / x.shape[1])
    smoothed = p * (1 - label_smoothing) + rest
    return _aten.nll_loss_forward.default(smoothed, target, None, reduction, ignore_index)[0]


#: formulas of operators, by which a program is decomposed
LOSSES: dict[Any, Callable[..., Any]] = {
    _aten.huber_loss.default: _huber,
    _aten.smooth_l1_loss.default: _smooth_l1,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.cross_entropy_loss.default: _cross_entropy,
}

#: PyTorch gives these the element type of their first operand, other losses the common one
_OF_FIRST = {_aten.huber_loss.default, _aten.soft_margin_loss.default}


def of_two_types(program: fx.GraphModule) -> fx.Node | None:
    """The first loss whose element type is one where PyTorch runs it, and another in a trace.

    PyTorch traces all losses with the common type of their operands, and what comes after one may
    depend on that: a function may ask for the type.
    """
    graphs = (m.graph for m in program.modules() if isinstance(m, fx.GraphModule))
    return next((n for g in graphs for n in g.nodes if n.target in _OF_FIRST and _mixed(n)), None)


def _mixed(loss: fx.Node) -> bool:
    first, target = (n.meta["val"].dtype for n in loss.args[:2] if isinstance(n, fx.Node))
    return torch.promote_types(first, target) != first
