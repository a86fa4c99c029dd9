"""When a call runs with cutesuper, and when the original does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cpu", "cuda")

#: what our attention is called in configurations of transformers
ATTENTION_NAME = "cutesuper"

#: positions at which a model decodes; what has more is a prompt, whose length changes with every
#: call, and a length that was not seen before is a search
MOST_POSITIONS = 8


def is_usual(x: Any, *others: Tensor) -> bool:
    """Whether operators can take a tensor and parameters, and return the type the original would.

    Mixed types, and 16-bit types under autocast, have results whose type depends on how the
    original is written.
    """
    if not are_alike(x, *others):
        return False
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    if torch.compiler.is_compiling():
        return True
    return not (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )


def are_alike(x: Any, *others: Any) -> bool:
    """Whether all are plain tensors of one type and device that operators can take."""
    if type(x) not in _PLAIN or x.dtype not in FLOATS or x.device.type not in _DEVICES:
        return False
    return all(type(t) in _PLAIN and t.dtype == x.dtype and t.device == x.device for t in others)


def version(t: Tensor) -> int:
    """Of a tensor, counted up by writes; inference tensors have none."""
    return 0 if t.is_inference() else t._version


__all__ = ["ATTENTION_NAME", "FLOATS", "MOST_POSITIONS", "are_alike", "is_usual", "version"]
