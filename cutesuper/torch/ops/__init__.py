"""Operators for PyTorch with searched kernels; users import them from `cutesuper.ops`."""

from __future__ import annotations

from cutesuper.torch.ops.attention.flex import flex_attention
from cutesuper.torch.ops.attention.operator import attention, packed_limits
from cutesuper.torch.ops.heads.cross_entropy import linear_cross_entropy
from cutesuper.torch.ops.rowwise.activations import add_activation, geglu, normalized_update, swiglu
from cutesuper.torch.ops.rowwise.cross_entropy import cross_entropy
from cutesuper.torch.ops.rowwise.norms import layer_norm, rms_norm
from cutesuper.torch.ops.rowwise.softmax import log_softmax, softmax

__all__ = [
    "add_activation",
    "attention",
    "cross_entropy",
    "flex_attention",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "normalized_update",
    "packed_limits",
    "rms_norm",
    "softmax",
    "swiglu",
]
