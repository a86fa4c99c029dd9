"""CUDA graphs without a GPU: operators of PyTorch are recorded, and run again on the same memory.

What a recording has computed in Python is a constant of it, as in a CUDA graph. Operators that
would wait for the device fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: operators whose result, or the shape of it, is known once the device has computed
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique"}


class Recorder(TorchDispatchMode):
    """Records operators while they run; fails on those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device"
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class Recording:
    """A CUDA graph of a call. The call has run once when it was recorded, so the first replay does
    nothing.

    Args:
        call: computes by operators of PyTorch.
    """

    def __init__(self, call: Any) -> None:
        recorder = Recorder()
        with recorder:
            call()
        self._calls = recorder.calls
        self.replays = 0

    def replay(self) -> None:
        """Run the operators again, with results where they were."""
        self.replays += 1
        if self.replays == 1:
            return
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
