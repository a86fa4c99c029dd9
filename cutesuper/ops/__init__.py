"""Operators for PyTorch with searched kernels, called like those of torch.

They build a kernel graph, superoptimize it at the first call for each kind of arguments, and keep
the kernels. Importing this package imports torch, but neither CuTe DSL nor a GPU is needed.
"""

from __future__ import annotations

from cutesuper.ops.activations import add_activation, geglu, normalized_update, swiglu
from cutesuper.ops.attention import attention
from cutesuper.ops.cross_entropy import cross_entropy
from cutesuper.ops.norms import layer_norm, rms_norm
from cutesuper.ops.softmax import log_softmax, softmax

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
