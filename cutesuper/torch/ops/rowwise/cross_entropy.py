"""Cross entropy of logits and labels as an operator of PyTorch."""

from __future__ import annotations

import torch

from cutesuper.errors import OperatorError
from cutesuper.ir.arguments import shown
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.ops.rowwise.definition import Built, Definition, Operand, Output, Role
from cutesuper.torch.ops.rowwise.operator import RowOperator


def _cross_entropy(g: KernelGraph, logits: Tensor, target: Tensor, ignore_index: int) -> Built:
    """The loss of each row; the maximum and the sum of its exponentials are saved."""
    # with one class the exponential is 1 whatever the maximum is
    saved = ("max", "sum") if logits.shape[-1] != 1 else ("sum",)
    return Built((g.cross_entropy(logits, target, ignore_index),), saved)


_operator = RowOperator(
    Definition(
        "cross_entropy",
        (Operand("logits", Role.ROWS), Operand("target", Role.VALUE, labels=True)),
        (("ignore_index", int),),
        (Output("loss", Role.VALUE, "float32"),),
        _cross_entropy,
    )
)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``logsumexp(logits) - logits[target]`` of rows, as `torch.nn.functional.cross_entropy`.

    Args:
        logits: ``[..., C]``, fp16, bf16 or fp32. Classes are the last dimension, even if there are
            more than two dimensions (PyTorch has them second).
        target: ``[...]``, int64 or int32, a class of each row.
        ignore_index: rows with this target have a loss and a gradient of 0, and do not count in the
            mean.
        reduction: ``"mean"`` of the rows that count (NaN if there is none, with gradients of
            0), ``"sum"``, or ``"none"``.

    Returns:
        float32, whatever the logits are: ``[...]`` for ``"none"``, else ``[]``. A target that is
        neither a class nor ``ignore_index`` makes the loss of its row, and any reduction over it,
        NaN.

    Raises:
        OperatorError: another reduction, an ignore_index that is not a 32-bit int; a forward-mode
            derivative, vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    check_reduction("cross_entropy", reduction)
    check_ignore_index("cross_entropy", ignore_index)
    losses = _operator((logits, target), (int(ignore_index),))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else mean_of(total, target, ignore_index)


def mean_of(total: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The mean over the rows that count, from the sum of their losses.

    Without any it is NaN (fmod(0, 0)), and gradients are zeros, as in PyTorch.
    """
    rows = (target != ignore_index).sum(dtype=torch.float32)
    return torch.addcdiv(rows.fmod(rows), total, rows.clamp(min=1))


def check_reduction(call: str, reduction: str) -> None:
    """Raise OperatorError for an unknown reduction."""
    if str(reduction) not in ("mean", "sum", "none"):
        raise OperatorError(
            f'{call}(reduction={shown(reduction)}): must be "mean", "sum" or "none"'
        )


def check_ignore_index(call: str, ignore_index: int) -> None:
    """Raise OperatorError for an ignore_index that is no label."""
    if not isinstance(ignore_index, int) or not -(1 << 31) <= ignore_index < 1 << 31:
        raise OperatorError(
            f"{call}(ignore_index={shown(ignore_index)}): must be an int of at most 32 bits"
        )
