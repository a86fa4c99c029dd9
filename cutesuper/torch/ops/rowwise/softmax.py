"""Softmax and its logarithm as operators of PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from cutesuper.errors import OperatorError
from cutesuper.ir.arguments import shown
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.ops.rowwise.definition import Built, Definition, Operand, Output, Role
from cutesuper.torch.ops.rowwise.operator import RowOperator


def _softmax(g: KernelGraph, x: Tensor) -> Built:
    y = g.softmax(x)
    return Built((y,), (y,))


def _log_softmax(g: KernelGraph, x: Tensor) -> Built:
    y = g.log_softmax(x)
    return Built((y,), (y,))


_X = (Operand("x", Role.ROWS),)
_softmax_operator = RowOperator(Definition("softmax", _X, (), (Output("y"),), _softmax))
_log_softmax_operator = RowOperator(Definition("log_softmax", _X, (), (Output("y"),), _log_softmax))


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``exp(x - max x) / sum exp(x - max x)`` along the last dimension.

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        dim: -1, or the number of the last dimension.

    Returns:
        Like x, contiguous. A row of -inf is NaN, as in PyTorch.

    Raises:
        OperatorError: another dimension; a forward-mode derivative, vmap.
        ShapeError, DTypeError, DeviceError: x does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    _check_last("softmax", x, dim)
    return _softmax_operator((x,), ())


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``x - max x - log(sum exp(x - max x))`` along the last dimension.

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        dim: -1, or the number of the last dimension.

    Returns:
        Like x, contiguous. A row of -inf is NaN, as in PyTorch.

    Raises:
        OperatorError, ShapeError, DTypeError, DeviceError: as for `softmax`.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    _check_last("log_softmax", x, dim)
    return _log_softmax_operator((x,), ())


def _check_last(name: str, x: torch.Tensor, dim: int) -> None:
    if not isinstance(x, torch.Tensor):  # refused like other wrong arguments
        return
    if not (isinstance(dim, int | np.integer) and dim in (-1, x.dim() - 1)):
        raise OperatorError(
            f"{name}(x{list(x.shape)}, dim={shown(dim)}): kernels take rows, the last dimension; "
            "use dim=-1, on x.transpose(dim, -1) where it is another one"
        )
