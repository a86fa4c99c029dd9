"""Element-wise operators with gradients: gates, the addition of LoRA, updates of nGPT."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from cutesuper.errors import OperatorError
from cutesuper.ir.arguments import shown
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.ops.rowwise.definition import Built, Definition, Operand, Output, Role, number
from cutesuper.torch.ops.rowwise.operator import RowOperator


def _check_approximation(approximate: str) -> None:
    if str(approximate) not in ("none", "tanh"):
        raise OperatorError(f'geglu(approximate={shown(approximate)}): must be "none" or "tanh"')


def _check_activation(activation: str) -> None:
    if str(activation) not in ("relu", "sigmoid"):
        raise OperatorError(
            f'add_activation(activation={shown(activation)}): must be "relu" or "sigmoid"'
        )


def _check_geglu(approximate: str) -> tuple[str]:
    _check_approximation(approximate)
    return (approximate,)


def _check_add_activation(scale: Any, activation: str) -> tuple[float, str]:
    _check_activation(activation)
    scale = number("add_activation", "scale", scale)
    if not -math.inf < scale < math.inf:
        raise OperatorError(f"add_activation(scale={scale}): must be a finite number")
    return scale, activation


def _swiglu(g: KernelGraph, gate: Tensor, up: Tensor) -> Built:
    return Built((g.mul(g.silu(gate), up),))


def _geglu(g: KernelGraph, gate: Tensor, up: Tensor, approximate: str) -> Built:
    _check_approximation(approximate)
    activated = g.gelu(gate) if approximate == "none" else _gelu_by_tanh(g, gate)
    return Built((g.mul(activated, up),))


def _gelu_by_tanh(g: KernelGraph, x: Tensor) -> Tensor:
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (arXiv:1606.08415)."""
    inner = g.mul(x, g.add(g.mul(g.square(x), 0.044715), 1.0))
    tanh = g.tanh(g.mul(inner, math.sqrt(2 / math.pi)))
    return g.mul(g.mul(x, 0.5), g.add(tanh, 1.0))


def _add_activation(
    g: KernelGraph, x: Tensor, p: Tensor, bias: Tensor, scale: float, activation: str
) -> Built:
    """The activation of the sum.
    Its result is saved, as the derivatives of both activations are functions of it.

    A sigmoid whose type has fewer bits than an operand is computed again: its slope at 0.99, from a
    bfloat16, is off by 17 %.
    """
    _check_activation(activation)
    total = g.add(g.add(x, g.mul(p, scale)), bias)
    if activation == "relu":
        y = g.relu(total)
        return Built((y,), (y,))
    y = g.sigmoid(total)
    return Built((y,), (y,) if y.dtype == x.dtype else ())


def _normalized_update(g: KernelGraph, x: Tensor, h: Tensor, alpha: Tensor) -> Built:
    step, rstd = _without_length(g, h)
    y, last = _without_length(g, g.add(x, g.mul(alpha, g.add(step, x))))
    return Built((y,), (rstd, last))


def _without_length(g: KernelGraph, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows normalized to root mean square 1, and their factors."""
    rstd = g.rsqrt(g.mean(g.square(x), -1))
    return g.mul(x, rstd), rstd


_GATED = (Operand("gate", Role.ROWS), Operand("up", Role.ROWS))

_swiglu_operator = RowOperator(
    Definition("swiglu", _GATED, (), (Output("y", like="gate"),), _swiglu)
)
_geglu_operator = RowOperator(
    Definition(
        "geglu",
        _GATED,
        (("approximate", str),),
        (Output("y", like="gate"),),
        _geglu,
        _check_geglu,
    )
)
_add_activation_operator = RowOperator(
    Definition(
        "add_activation",
        (Operand("x", Role.ROWS), Operand("p", Role.ROWS), Operand("bias", Role.ROW)),
        (("scale", float), ("activation", str)),
        (Output("y"),),
        _add_activation,
        _check_add_activation,
    )
)
_normalized_update_operator = RowOperator(
    Definition(
        "normalized_update",
        (Operand("x", Role.ROWS), Operand("h", Role.ROWS), Operand("alpha", Role.ROW)),
        (),
        (Output("y"),),
        _normalized_update,
    )
)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202).

    Args:
        gate: ``[..., N]``, fp16, bf16 or fp32.
        up: of the same shape and any of these types.

    Returns:
        Like gate, contiguous.

    Raises:
        OperatorError: a forward-mode derivative, vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    return _swiglu_operator((gate, up), ())


def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: Literal["none", "tanh"] = "none"
) -> torch.Tensor:
    """``gelu(gate) * up`` (arXiv:2002.05202).

    Args:
        gate: ``[..., N]``, fp16, bf16 or fp32.
        up: of the same shape and any of these types.
        approximate: ``"none"`` for the error function, ``"tanh"`` for the formula with it, as in
            `torch.nn.functional.gelu`.

    Returns:
        Like gate, contiguous.

    Raises:
        OperatorError: another approximation; a forward-mode derivative, vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    return _geglu_operator((gate, up), (approximate,))


def add_activation(
    x: torch.Tensor,
    p: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale: float = 0.5,
    activation: Literal["relu", "sigmoid"] = "relu",
) -> torch.Tensor:
    """``activation(x + scale * p + bias)``: the end of an MLP layer with LoRA, p its addition.

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        p: of the same shape and any of these types.
        bias: ``[N]``, of any of these types.
        scale: a finite number.
        activation: ``"relu"`` or ``"sigmoid"``.

    Returns:
        Like x, contiguous.

    Raises:
        OperatorError: another activation, a scale that is not finite; a forward-mode derivative,
            vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    return _add_activation_operator((x, p, bias), (scale, activation))


def normalized_update(x: torch.Tensor, h: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """``rms(x + alpha * (rms(h) + x))`` with ``rms(v) = v / sqrt(mean(v^2))``.

    The update of the hidden state of a normalized transformer, in the form of Mirage's benchmark
    nTrans (arXiv:2410.01131, arXiv:2405.05751).

    Args:
        x: ``[..., N]``, fp16, bf16 or fp32.
        h: of the same shape and any of these types.
        alpha: ``[N]``, of any of these types.

    Returns:
        Like x, contiguous. There is no epsilon: rows of zeros are NaN.

    Raises:
        OperatorError: a forward-mode derivative, vmap.
        ShapeError, DTypeError, DeviceError: a tensor that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    return _normalized_update_operator((x, h, alpha), ())
