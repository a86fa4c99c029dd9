"""Operators for PyTorch with searched kernels, called like those of torch.

They build a kernel graph, superoptimize it at the first call for each kind of arguments, and keep
the kernels. Importing this package imports torch, but neither CuTe DSL nor a GPU is needed.
"""

from __future__ import annotations

from cutesuper.torch.ops import (
    add_activation,
    attention,
    cross_entropy,
    geglu,
    layer_norm,
    log_softmax,
    normalized_update,
    rms_norm,
    softmax,
    swiglu,
)

__all__ = [
    "add_activation",
    "attention",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "log_softmax",
    "normalized_update",
    "rms_norm",
    "softmax",
    "swiglu",
]
