"""Linear layer and cross entropy as one operator of PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch

from cutesuper.errors import DTypeError, OperatorError, ShapeError
from cutesuper.ir.arguments import shown
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.ops.heads.definition import Head, Part
from cutesuper.torch.ops.heads.operator import HeadOperator
from cutesuper.torch.ops.rowwise.cross_entropy import check_ignore_index, check_reduction, mean_of
from cutesuper.torch.ops.rowwise.definition import number

_NAME = "linear_cross_entropy"
#: bytes of the least logits that models do without: smaller ones stay in L2 between their kernels
LEAST_BYTES = 64 << 20


def _build(
    g: KernelGraph,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The losses ``[M, 1]``; a softcap of 0 is none."""
    z = g.matmul(x, g.transpose(weight))
    z = z if bias is None else g.add(z, bias)
    if softcap:
        z = g.mul(g.tanh(g.div(z, softcap)), softcap)
    loss = g.cross_entropy(z, target, ignore_index)
    if not (label_smoothing or z_loss):
        return loss
    counts = g.label_weight(target, extent(z.shape[-1]), ignore_index)
    lse = g.logsumexp(z)
    if label_smoothing:
        even = g.mul(counts, g.sub(lse, g.mean(z, -1)))
        loss = g.add(g.mul(loss, 1.0 - label_smoothing), g.mul(even, label_smoothing))
    if z_loss:
        loss = g.add(loss, g.mul(g.mul(counts, g.square(lse)), z_loss))
    return loss


_operator = HeadOperator(
    Head(
        _NAME,
        (
            Part("x", 1, rows=True),
            Part("weight", 2),
            Part("target", 0, rows=True, labels=True),
            Part("bias", 1, optional=True),
        ),
        (("ignore_index", int), ("label_smoothing", float), ("z_loss", float), ("softcap", float)),
        _build,
    )
)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of ``x @ weight.T + bias``, whose logits are never stored whole.

    Of a mean or a sum the gradients are computed in the same pass, chunk by chunk of rows; those of
    single losses, and of fp16, which needs to know how losses are scaled, compute the logits again.

    Args:
        x: ``[..., K]``, fp16 or bf16; fp32 on the CPU or under autocast.
        weight: ``[V, K]``, of the same type.
        target: ``[...]``, int64 or int32, a class of each row.
        bias: ``[V]`` of the same type, or None.
        ignore_index: rows with this target have a loss and a gradient of 0, and do not count in the
            mean.
        label_smoothing: share of the loss that is the mean over all classes, from 0 to 1
            (arXiv:1512.00567).
        z_loss: ``z_loss * logsumexp(logits)^2`` is added to the loss of each row that counts, at
            least 0 (arXiv:2204.02311).
        softcap: logits are ``softcap * tanh(logits / softcap)`` (arXiv:2408.00118); None: as they
            are.
        reduction: ``"mean"`` of the rows that count (NaN if there is none, with gradients of 0),
            ``"sum"``, or ``"none"``.

    Returns:
        float32, ``[...]`` for ``"none"``, else ``[]``. A target that is neither a class nor
        ``ignore_index`` makes the loss of its row, and any reduction over it, NaN.

    Raises:
        OperatorError: an option out of range; a forward-mode derivative, vmap.
        ShapeError, DTypeError, DeviceError, LayoutError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    check_reduction(_NAME, reduction)
    check_ignore_index(_NAME, ignore_index)
    options = (int(ignore_index), *_checked(label_smoothing, z_loss, softcap))
    x, weight, bias = (_cast(t) for t in (x, weight, bias))
    _check_shapes(x, weight, target, bias)
    tensors = (x, weight, target, bias)
    if reduction == "none" or x.dtype == torch.float16:
        losses = _operator.losses(tensors, options)
        if reduction == "none":
            return losses.view(target.shape)
        return losses.sum() if reduction == "sum" else mean_of(losses.sum(), target, ignore_index)
    factors = torch.ones(target.numel(), dtype=torch.float32, device=x.device)
    if reduction == "sum":
        return _operator.total(tensors, options, factors)
    rows = (target != ignore_index).sum(dtype=torch.float32)
    total = _operator.total(tensors, options, factors / rows.clamp(min=1))
    # without rows that count the loss is NaN (fmod(0, 0)), and gradients are zeros, as in PyTorch
    return total + rows.fmod(rows)


def _checked(smoothing: Any, z_loss: Any, softcap: Any) -> tuple[float, float, float]:
    smoothing, z_loss = number(_NAME, "label_smoothing", smoothing), number(_NAME, "z_loss", z_loss)
    cap = 0.0 if softcap is None else number(_NAME, "softcap", softcap)
    if not (0.0 <= smoothing <= 1.0 and 0.0 <= z_loss < math.inf):
        raise OperatorError(
            f"{_NAME}(label_smoothing={smoothing}, z_loss={z_loss}): label_smoothing must be from "
            "0 to 1, z_loss a finite number of at least 0"
        )
    if softcap is not None and not 0.0 < cap < math.inf:
        raise OperatorError(f"{_NAME}(softcap={softcap}): must be positive and finite, or None")
    return smoothing, z_loss, cap


def _cast(t: Any) -> Any:
    """A tensor as products under autocast take it."""
    if isinstance(t, torch.Tensor) and torch.is_autocast_enabled(t.device.type):
        return t.to(torch.get_autocast_dtype(t.device.type)) if t.is_floating_point() else t
    return t


def _check_shapes(x: Any, weight: Any, target: Any, bias: Any) -> None:
    for name, t in (("x", x), ("weight", weight), ("target", target)):
        if not isinstance(t, torch.Tensor):
            raise DTypeError(f"{_NAME}({name}={shown(t)}): must be a torch tensor")
    fits = x.dim() > 0 and weight.dim() == 2 and weight.shape[1:] == x.shape[-1:]
    fits = fits and target.shape == x.shape[:-1]
    if fits and (bias is None or bias.shape == weight.shape[:1]):
        return
    raise ShapeError(
        f"{_NAME}(x{list(x.shape)}, weight{list(weight.shape)}, target{list(target.shape)}"
        f"{'' if bias is None else f', bias{list(bias.shape)}'}): must be x[..., K], weight[V, K], "
        "target[...], bias[V]"
    )
