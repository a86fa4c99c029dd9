"""PyTorch tensors in the form that kernels read."""

from __future__ import annotations

import torch

from cutesuper.errors import LayoutError
from cutesuper.runtime.checks import ALIGNMENT


def usable(t: torch.Tensor) -> torch.Tensor:
    """The tensor in the form that kernels read: contiguous, its first element aligned.
    A copy if needed.

    Raises LayoutError: calls are remembered by shape, whatever the layout.
    """
    if t.layout is not torch.strided:
        raise LayoutError(
            f"a tensor of shape {list(t.shape)} has the layout {t.layout}; use .to_dense()"
        )
    if not t.is_contiguous():
        t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()
