"""Operators for PyTorch with searched kernels, called like those of torch.

They build a kernel graph, superoptimize it at the first call for each kind of arguments, and keep
the kernels. Importing this package imports torch, but neither CuTe DSL nor a GPU is needed.
"""

from __future__ import annotations

from cutesuper.torch.ops.attention.operator import attention
from cutesuper.torch.ops.rowwise.activations import add_activation, geglu, normalized_update, swiglu
from cutesuper.torch.ops.rowwise.cross_entropy import cross_entropy
from cutesuper.torch.ops.rowwise.norms import layer_norm, rms_norm
from cutesuper.torch.ops.rowwise.softmax import log_softmax, softmax

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
