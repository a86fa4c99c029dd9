"""Operators for PyTorch whose kernels are searched for: call them like those of torch.

They build a kernel graph, superoptimize it at the first call for each kind of arguments, and keep
the kernels. Importing this package imports torch, but neither CuTe DSL nor a GPU is needed.
"""

from __future__ import annotations

from cutesuper.ops.attention import attention

__all__ = ["attention"]
