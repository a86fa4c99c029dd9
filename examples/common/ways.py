"""The ways in which examples compute the same.

"eager" is PyTorch as it is, "compile" torch.compile, "backend" torch.compile(backend="cutesuper"),
which takes the regions that it measures to be faster and leaves the rest to Inductor, "ours" what
the example makes of cutesuper's operators and kernels by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WAYS = ("eager", "compile", "backend", "ours")
#: for a CPU torch.compile needs a C++ compiler, and half a minute
DEFAULT_WAYS = {"cpu": ["eager", "ours"], "cuda": list(WAYS)}
COMPILED = ("compile", "backend")


def compiled(way: str, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function through torch.compile, for the shapes of its first call; other ways leave it."""
    if way not in COMPILED:
        return function
    return torch.compile(function, dynamic=False, fullgraph=True, **backend_of(way, device))


def backend_of(way: str, device: torch.device) -> dict[str, Any]:
    """Arguments of torch.compile.
    On a CPU nothing is faster: there all regions are taken, so that the reference executor shows
    that they are right."""
    if way != "backend":
        return {}
    found: dict[str, Any] = {"backend": "cutesuper"}
    return found | {"options": {"take": "all"}} if device.type == "cpu" else found
