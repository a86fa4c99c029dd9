"""Modules of ``torch.nn`` that run the operators of `cutesuper.ops`.

They are subclasses: constructor arguments, parameters, ``state_dict`` and ``isinstance`` are those
of PyTorch. Cases that the operators do not support are refused when a module is made, or called.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from cutesuper.errors import DTypeError, OperatorError, ShapeError
from cutesuper.torch.ops.heads.cross_entropy import linear_cross_entropy
from cutesuper.torch.ops.rowwise.activations import swiglu
from cutesuper.torch.ops.rowwise.cross_entropy import cross_entropy
from cutesuper.torch.ops.rowwise.norms import layer_norm, rms_norm
from cutesuper.torch.ops.rowwise.softmax import log_softmax, softmax


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`; also replaces the norms of Llama, Qwen and Gemma in transformers.

    Their weights have the name ``weight`` too, and ``RMSNorm(hidden_size, eps)`` makes them.

    Args:
        normalized_shape: last extents of x.
        eps: None is that of x's element type.
        elementwise_affine: true for a module with a weight.
        device: of the weight.
        dtype: of the weight; x may have another one.
        weight_offset: added to the weight, which begins at ``1 - weight_offset``; 1.0 for Gemma.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    @property
    def variance_epsilon(self) -> float | None:
        """eps under its name in transformers."""
        return self.eps

    def reset_parameters(self) -> None:
        """Initialise the weights so that they multiply by 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm of x; with a residual ``(norm of x + residual, x + residual)``."""
        eps, offset = _eps_of(x) if self.eps is None else self.eps, self.weight_offset
        if self.elementwise_affine and len(self.normalized_shape) == 1:
            return rms_norm(x, self.weight, residual=residual, eps=eps, weight_offset=offset)
        weight = self.weight.flatten() if self.elementwise_affine else None
        rows = None if residual is None else _rows(self, residual)
        y = rms_norm(_rows(self, x), weight, residual=rows, eps=eps, weight_offset=offset)
        return y.view(x.shape) if residual is None else tuple(t.view(x.shape) for t in y)

    def extra_repr(self) -> str:
        """PyTorch's text with the offset."""
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` as one kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (PyTorch's name)
        """The norm of rows, in their element type."""
        weight, bias = (self.weight, self.bias) if self.elementwise_affine else (None, None)
        if weight is not None and len(self.normalized_shape) == 1:
            return layer_norm(input, weight, bias, eps=self.eps)
        weight, bias = (t if t is None else t.flatten() for t in (weight, bias))
        return layer_norm(_rows(self, input), weight, bias, eps=self.eps).view(input.shape)


def _eps_of(x: Any) -> float:
    """Machine epsilon of x's element type; 0 for inputs that the operator refuses."""
    floats = isinstance(x, torch.Tensor) and x.is_floating_point()
    return torch.finfo(x.dtype).eps if floats else 0.0


def _rows(module: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """x with its last dimensions merged into one.
    Raises ShapeError if they are not those of the module, DTypeError if x is no tensor."""
    last = tuple(module.normalized_shape)
    if not isinstance(x, torch.Tensor):
        raise DTypeError(
            f"{type(module).__name__}({last}): called with a {type(x).__name__}, must "
            "be a torch tensor"
        )
    lead = x.shape[: max(0, x.dim() - len(last))]
    if (*lead, *last) != tuple(x.shape):
        raise ShapeError(
            f"{type(module).__name__}({last}): called with shape {list(x.shape)}, whose "
            f"last extents must be {list(last)}; reshape it"
        )
    return x.reshape(*lead, prod(last))


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` over the last dimension."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (PyTorch's name)
        """The softmax of rows, in their element type."""
        return softmax(input, self.dim)  # type: ignore[arg-type] (None is refused)


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` over the last dimension."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (PyTorch's name)
        """The logarithm of the softmax of rows, in their element type."""
        return log_softmax(input, self.dim)  # type: ignore[arg-type] (None is refused)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class labels, without weights and smoothing.
    The loss is float32.

    Classes are the second dimension, as in PyTorch; with more than two dimensions, the logits are
    copied to have the classes last. `cutesuper.torch.ops.rowwise.cross_entropy` takes them last.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if weight is not None:
            shown = list(weight.shape) if isinstance(weight, torch.Tensor) else repr(weight)
            raise OperatorError(
                f"CrossEntropyLoss(weight={shown}): classes have no weights here; use "
                "torch.nn.CrossEntropyLoss"
            )
        if label_smoothing:
            raise OperatorError(
                f"CrossEntropyLoss(label_smoothing={label_smoothing}): labels are not smoothed "
                "here; use torch.nn.CrossEntropyLoss"
            )
        super().__init__(None, size_average, ignore_index, reduce, reduction)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 (PyTorch's name)
        target: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of logits and classes."""
        several = isinstance(input, torch.Tensor) and input.dim() > 2
        logits = input.movedim(1, -1) if several else input
        return cross_entropy(
            logits, target, ignore_index=self.ignore_index, reduction=self.reduction
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """The cross entropy of a linear layer, whose logits are never stored whole.

    ``LinearCrossEntropyLoss()(x, layer.weight, target, layer.bias)`` is
    ``CrossEntropyLoss()(layer(x), target)``; see `cutesuper.ops.linear_cross_entropy`.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, reduction: of that function.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.z_loss, self.softcap, self.reduction = z_loss, softcap, reduction

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of rows ``x[..., K]`` with the weight ``[V, K]`` and classes ``[...]``."""
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
        )


class SwiGLU(torch.nn.Module):
    """The product ``silu(gate) * up``."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The product for two tensors of one shape, in the element type of the gate."""
        return swiglu(gate, up)


__all__ = [
    "CrossEntropyLoss",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "RMSNorm",
    "Softmax",
    "SwiGLU",
]
