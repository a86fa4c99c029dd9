"""Operators for PyTorch with searched kernels, called like those of torch.

They build a kernel graph, superoptimize it at the first call for each kind of arguments, and keep
the kernels. Importing this package imports torch, but neither CuTe DSL nor a GPU is needed.
"""

from __future__ import annotations

from cutesuper.torch.ops import *  # noqa: F403
from cutesuper.torch.ops import __all__ as __all__
