"""Conditions under which a call runs with cutesuper instead of the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cpu", "cuda")

#: name of our attention in configurations of transformers
ATTENTION_NAME = "cutesuper"

#: most positions of a decoding call; with more it is a prompt, whose length changes with every
#: call, and each new length is a search
MOST_POSITIONS = 8


def is_usual(x: Any, *others: Tensor) -> bool:
    """True if operators can take a tensor and parameters, and return the type the original would.

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
    """True if all are plain tensors of one type and device that operators can take."""
    if type(x) not in _PLAIN or x.dtype not in FLOATS or x.device.type not in _DEVICES:
        return False
    return all(type(t) in _PLAIN and t.dtype == x.dtype and t.device == x.device for t in others)


def version(t: Tensor) -> int:
    """Version counter of a tensor, incremented by writes.
    0 for inference tensors, which have none."""
    return 0 if t.is_inference() else t._version
