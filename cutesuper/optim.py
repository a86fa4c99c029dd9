"""Optimizers of ``torch.optim`` whose steps are searched kernels: one pass over each parameter."""

from __future__ import annotations

from cutesuper.torch.optim import *  # noqa: F403
from cutesuper.torch.optim import __all__ as __all__
