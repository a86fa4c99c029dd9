"""Convolutions as products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutesuper.torch.aten.graph_builder import equal


def pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """``aten.convolution`` of one element, as a product.
    Of the pixels if channels are last in memory, of the weight otherwise. NotImplemented for any
    other convolution."""
    del dilation, output_padding
    plain = not transposed and groups == 1 and not any(padding) and all(s == 1 for s in stride)
    if not plain or not all(equal(n, 1) for n in weight.shape[2:]):
        return NotImplemented
    matrix, steps = weight.flatten(1), x.stride()
    if min(steps) == steps[1] < steps[-1]:
        return torch.nn.functional.linear(x.movedim(1, -1), matrix, bias).movedim(-1, 1)
    y = (matrix @ x.flatten(2)).unflatten(2, x.shape[2:])
    return y if bias is None else y + bias.view(-1, *[1] * (x.dim() - 2))
