"""RMSNorm and LayerNorm as operators of PyTorch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from cutesuper.errors import OperatorError
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.ops.rowwise.definition import Built, Definition, Operand, Output, Role, number
from cutesuper.torch.ops.rowwise.operator import RowOperator

Function = TypeVar("Function", bound=Callable[..., Any])


def _rms(
    g: KernelGraph, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | str]:
    """The norm of rows, and the reciprocals of their root mean squares.

    A weight of heads is not an operand of the graph's norm; with the factors written out its
    gradient needs no quotient beyond those of dx.
    """
    if weight is not None and weight_offset:
        weight = g.add(weight, weight_offset)
    if weight is None or len(weight.shape) == 1:
        return g.rms_norm(x, weight, eps=eps), "rstd"
    rstd = g.rsqrt(g.add(g.mean(g.square(x), -1), eps))
    return g.mul(g.mul(x, rstd), weight), rstd


def _rms_norm(
    g: KernelGraph, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> Built:
    y, rstd = _rms(g, x, weight, eps, weight_offset)
    return Built((y,), (rstd,))


def _add_rms_norm(
    g: KernelGraph,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
) -> Built:
    total = g.add(x, residual)
    y, rstd = _rms(g, total, weight, eps, weight_offset)
    return Built((y, total), (total, rstd))


def _layer_norm(
    g: KernelGraph, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Built:
    # the mean of one element is the element
    saved = ("mean", "rstd") if x.shape[-1] != 1 else ()
    if weight is None and bias is not None:
        return Built((g.add(g.layer_norm(x, eps=eps), bias),), saved)
    return Built((g.layer_norm(x, weight, bias, eps=eps),), saved)


def _check_rms(eps: Any, weight_offset: Any) -> tuple[float, float]:
    given = number("rms_norm", "eps", eps), number("rms_norm", "weight_offset", weight_offset)
    if not (0.0 <= given[0] < 1.0 and -math.inf < given[1] < math.inf):
        raise OperatorError(
            f"rms_norm(eps={eps}, weight_offset={weight_offset}): eps must be a "
            "number in [0, 1), weight_offset any finite number"
        )
    return given


def _check_layer(eps: Any) -> tuple[float]:
    eps = number("layer_norm", "eps", eps)
    if not 0.0 <= eps < math.inf:
        raise OperatorError(f"layer_norm(eps={eps}): eps must be a number of at least 0")
    return (eps,)


_X, _WEIGHT = Operand("x", Role.ROWS), Operand("weight", Role.ROW, optional=True)
_RMS_OPTIONS = (("eps", float), ("weight_offset", float))

_rms_norm_operator = RowOperator(
    Definition("rms_norm", (_X, _WEIGHT), _RMS_OPTIONS, (Output("y"),), _rms_norm, _check_rms)
)
_add_rms_norm_operator = RowOperator(
    Definition(
        "add_rms_norm",
        (_X, Operand("residual", Role.ROWS), _WEIGHT),
        _RMS_OPTIONS,
        # the sum that the last norm of a model returns is unused
        (Output("y"), Output("sum", like="residual", often_unused=True)),
        _add_rms_norm,
        _check_rms,
    )
)
_layer_norm_operator = RowOperator(
    Definition(
        "layer_norm",
        (_X, _WEIGHT, Operand("bias", Role.ROW, optional=True)),
        (("eps", float),),
        (Output("y"),),
        _layer_norm,
        _check_layer,
    )
)


def _of_last_dimension(function: Function) -> Function:
    """Refuse arguments as those of PyTorch's norms, which take the extents of rows behind x."""
    parameters = inspect.signature(function).parameters.values()
    name = getattr(function, "__name__", "norm")
    most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if (
            len(args) > most
            or "normalized_shape" in options
            or (len(args) > 1 and isinstance(args[1], tuple | list | int))
        ):
            raise OperatorError(
                f"{name}: it takes no normalized_shape: rows are the last dimension; "
                f"its arguments are {_arguments(function)}"
            )
        return function(*args, **options)

    return cast("Function", call)


def _arguments(function: Callable[..., Any]) -> str:
    """``(x, weight=None, *, eps=1e-06)``, without types."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


@_of_last_dimension
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> Any:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension.

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        weight: ``[N]``; or ``[H, N]`` for x of ``[..., H, N]``, a weight for each head. None: 1. Of
            any of these types.
        residual: of x's shape and any of these types; then ``x + residual`` is normalized.
        eps: added to the mean of squares, from 0 to below 1.
        weight_offset: added to the weight, 1.0 in Gemma.

    Returns:
        y like x, contiguous; with a residual ``(y, x + residual)``, where the sum has the type of
        the residual. y is computed from the sum before it is rounded.

    Raises:
        OperatorError: an eps or an offset out of range, a normalized_shape, a forward-mode
            derivative, vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    if residual is None:
        return _rms_norm_operator((x, weight), (eps, weight_offset))
    return _add_rms_norm_operator((x, residual, weight), (eps, weight_offset))


@_of_last_dimension
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        weight: ``[N]`` of any of these types, or None for 1.
        bias: likewise, or None for 0.
        eps: added to the variance, at least 0.

    Returns:
        Like x, contiguous.

    Raises:
        OperatorError, ShapeError, DTypeError, DeviceError: as for `rms_norm`.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    return _layer_norm_operator((x, weight, bias), (eps,))
