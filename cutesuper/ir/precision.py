"""The precision of products of float32 operands, an attribute of ``matmul``.

``highest``: as exact as float32. ``high``: operands are rounded to TF32, which has 10 bits of
fraction (`torch.set_float32_matmul_precision`, whose "medium" is run as "high").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: the precisions; the first one is the default, which is not written down
PRECISIONS = EXACT, ROUNDED = "highest", "high"


def precision_of(attributes: Mapping[str, Any]) -> str:
    """The precision of a product with these attributes."""
    return str(attributes.get("precision", EXACT))


def rounded(x: Any, attributes: Mapping[str, Any]) -> Any:
    """An operand of a product with these attributes, a tensor of PyTorch.
    Float32 is rounded to TF32, ties to even, where the precision allows it."""
    import torch

    if precision_of(attributes) == EXACT or x.dtype != torch.float32:
        return x
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)
