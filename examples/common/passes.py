"""Forward and backward passes as calls that can be compared, timed and captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .timing import Outputs


def forward(function: Callable[..., Tensor], *inputs: Any) -> Outputs:
    """Without gradients."""
    with torch.no_grad():
        return {"result": function(*inputs)}


def training(
    function: Callable[..., Tensor], leaves: Mapping[str, Tensor], dy: Tensor, *inputs: Any
) -> Outputs:
    """A forward and a backward pass: the result, and the gradients of leaves for the cotangent."""
    y = function(*inputs)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    named = zip(leaves, gradients, strict=True)
    return {"result": y.detach()} | {f"gradient of {name}": g for name, g in named}


def in_float64(inputs: Any) -> Any:
    """Copies of tensors, in tuples too; integers stay what they are, and so do leaves leaves."""
    if isinstance(inputs, tuple):
        made = [in_float64(t) for t in inputs]
        return type(inputs)(*made) if hasattr(inputs, "_fields") else tuple(made)
    if not inputs.is_floating_point():
        return inputs
    return inputs.detach().double().requires_grad_(inputs.requires_grad)
