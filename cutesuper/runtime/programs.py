"""Programs that are kept: the one holder of what is made at the first call of a kind.

A kind is what the program depends on: shapes or their bucket, element types, device, options, which
inputs require gradients. Kernels, plans of calls, traced functions and backward passes are all kept
in a `Kept`, and all that runs on a GPU is refused by `refuse_capture` while a CUDA graph is
captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from cutesuper.errors import DeviceError
from cutesuper.ir.operators.base import TABLE

if TYPE_CHECKING:
    import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ABSENT: Any = object()


class Kept(dict[K, V]):
    """Programs by kind, each made once.

    Reading is that of a dictionary, and costs as much. Threads that want the same program wait for
    the one that makes it; different programs are made at the same time. A failure is not kept: the
    next call tries again. To keep one, return it.

    Args:
        most: programs that are kept; the oldest is dropped first. None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most = most
        #: the threads that make programs now
        self._making: dict[K, int] = {}
        self._changed = threading.Condition()

    def made(self, kind: K, make: Callable[[], V]) -> V:
        """The program of a kind; the result of ``make()`` if there is none yet.

        Raises:
            RecursionError: ``make`` needs the program itself: a traced function calls itself.
        """
        found: Any = self.get(kind, _ABSENT)
        return found if found is not _ABSENT else self._claimed(kind, make)

    def made_on(self, device: torch.device, kind: Hashable, call: str, make: Callable[[], V]) -> V:
        """The program of a kind for a GPU and the operators now defined.

        Args:
            device: made with this as the current one; GPUs of one name share programs.
            kind: everything else that the program depends on.
            call: for the message.
            make: makes it.

        Raises:
            DeviceError: there is none, and a CUDA graph is being captured.
        """
        import torch

        def make_there() -> V:
            refuse_capture(call)
            with torch.cuda.device(device):
                return make()

        full: Any = (kind, TABLE.changes, torch.cuda.get_device_name(device))
        return self.made(full, make_there)

    def _claimed(self, kind: K, make: Callable[[], V]) -> V:
        """Make a program, unless another thread does so."""
        own = threading.get_ident()
        with self._changed:
            if self._making.get(kind) == own:
                raise RecursionError("a program is needed to make itself; it calls itself")
            self._changed.wait_for(lambda: kind not in self._making)
            found: Any = self.get(kind, _ABSENT)
            if found is not _ABSENT:
                return found
            self._making[kind] = own
        try:
            return self._keep(kind, make())
        finally:
            with self._changed:
                del self._making[kind]
                self._changed.notify_all()

    def _keep(self, kind: K, made: V) -> V:
        with self._changed:
            self[kind] = made
            while self.most is not None and len(self) > self.most:
                del self[next(iter(self))]
        return made


#: types of devices whose tensors compiled kernels take; others get the reference executor
KERNEL_DEVICES = {"cuda"}


def is_capturing() -> bool:
    """True while a CUDA graph is captured on torch's current stream.
    Kernels can be launched then, but not be loaded."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def refuse_capture(call: str, remedy: str = "call it") -> None:
    """Raise DeviceError while a CUDA graph is captured.
    ``call`` is what needs new kernels, and ``remedy`` makes them."""
    if is_capturing():
        raise DeviceError(
            f"{call}: its first call with arguments of this kind falls into the capture of a CUDA "
            f"graph, where kernels cannot be compiled or loaded; {remedy} once before the capture"
        )
