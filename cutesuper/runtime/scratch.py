"""Scratch memory of kernels: its allocation, and the rules for sharing it.

Some of it has to be zero when a kernel starts, and the kernel leaves zeros behind (counters of
blocks that have arrived). No two launches that may run at the same time share such memory:

* A call outside of captures takes the memory of its program and its stream. A stream runs its
  launches one after the other; kernels with dependent launch wait for their predecessor before
  they touch scratch.
* Every call that is captured into a CUDA graph takes memory that is never given to another call: a
  graph may be replayed beside any other work.

Both come from a pool of zeros, one for each device. It is filled outside of captures only, by calls
that see it run low; a capture that finds it empty has its memory zeroed in the graph, which costs
one more node. Memory that the pool has given away does not come back: neither the end of the last
launch nor that of the last graph can be detected here, and it is some KiB for each. Only who owns a
graph knows its end, and may give back what it took in a `Loan`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

from cutesuper.ir.dims import Dim, Shape, Symbol, Tiles
from cutesuper.runtime.programs import Kept, is_capturing

#: minimum number of bytes that a pool allocates at a time
CHUNK_BYTES = 1 << 20
#: captured calls that a pool holds memory for: layers of a model, launches of a recording
CAPTURED_CALLS = 128
#: upper limit of that reserve, in bytes
LARGEST_RESERVE = 16 << 20
#: alignment in bytes: a line of L2, so that neighbours do not share one
ALIGNMENT = 128


@dataclass(frozen=True)
class Need:
    """Scratch memory of one launch; the kernel sees it with one dimension.

    Attributes:
        shape: extents may be symbolic, or tiles of symbolic ones.
        dtype: of torch.
        zeroed: true if it is zero before a launch, and left zero.
    """

    shape: Sequence[Dim | Tiles]
    dtype: Any
    zeroed: bool


#: a tensor of a call and one of its dimensions, by index
Where = tuple[int, int]


def places_of(shapes: Sequence[Shape]) -> dict[str, Where]:
    """For every symbol the first place among ``shapes`` that has it."""
    found: dict[str, Where] = {}
    for place, shape in enumerate(shapes):
        for axis, d in enumerate(shape):
            if isinstance(d, Symbol):
                found.setdefault(d.name, (place, axis))
    return found


class ScratchMemory:
    """The scratch memory of the launches of one program.

    Args:
        needs: of all launches, in order.
        places: for each symbol in them a tensor of the call, and the dimension that it is the
            extent of.
    """

    def __init__(self, needs: Sequence[Need], places: Mapping[str, Where]) -> None:
        self._needs = [_Length.of(need, places) for need in needs]
        self._zeroed = [n for n in self._needs if n.zeroed]
        #: memory of calls outside of captures, and its bytes, by device, stream and lengths
        self._kept: dict[tuple[int, ...], tuple[list[Any], int]] = {}

    def allot(self, values: Sequence[Any]) -> list[Any]:
        """A tensor for each need, for one call on the current stream.

        Args:
            values: tensors of the call, on the current device.
        """
        import torch

        device, empty = values[0].device, torch.empty
        zeroed = iter(self._zeros(values, device) if self._zeroed else ())
        return [
            next(zeroed) if n.zeroed else empty(n.elements(values), dtype=n.dtype, device=device)
            for n in self._needs
        ]

    def _zeros(self, values: Sequence[Any], device: Any) -> list[Any]:
        import torch

        lengths = [n.rounded(values) for n in self._zeroed]
        if is_capturing():
            taken = _take_captured(pool_of(device), self._bytes(lengths))
            if taken is None:
                taken = torch.zeros(sum(self._bytes(lengths)), dtype=torch.uint8, device=device)
            return self._cut(taken, lengths)
        index, pool = device.index, pool_of(device)
        # the stream as a number: an object of torch.cuda.current_stream() takes ten times as long
        key = (index, torch._C._cuda_getCurrentRawStream(index), *lengths)
        known = self._kept.get(key)
        if known is not None:
            pool.keep(known[1])
            return known[0]
        sizes = self._bytes(lengths)
        pool.keep(sum(sizes))
        taken = pool.take(sizes)
        if taken is None:  # larger than the reserve of the pool
            taken = new_zeros(device, sum(sizes))
        return self._kept.setdefault(key, (self._cut(taken, lengths), sum(sizes)))[0]

    def _bytes(self, lengths: Sequence[int]) -> list[int]:
        """Bytes of each need, rounded up so that all begin at a line."""
        sizes = [m * n.dtype.itemsize for n, m in zip(self._zeroed, lengths, strict=True)]
        return [-(-s // ALIGNMENT) * ALIGNMENT for s in sizes]

    def _cut(self, memory: Any, lengths: Sequence[int]) -> list[Any]:
        parts = memory.split(self._bytes(lengths))
        return [
            part[: m * n.dtype.itemsize].view(n.dtype)
            for part, n, m in zip(parts, self._zeroed, lengths, strict=True)
        ]


@dataclass(frozen=True)
class _Length:
    """Number of elements of a need, given the tensors of a call.
    The product of a number and of tiles of symbolic extents, each with its place."""

    known: int
    open: tuple[tuple[Where, Tiles], ...]
    dtype: Any
    zeroed: bool

    @classmethod
    def of(cls, need: Need, places: Mapping[str, Where]) -> _Length:
        known = prod(d for d in need.shape if isinstance(d, int))
        tiles = [Tiles(d, 1) if isinstance(d, Symbol) else d for d in need.shape]
        open_ = tuple((places[t.symbol.name], t) for t in tiles if isinstance(t, Tiles))
        return cls(known, open_, need.dtype, need.zeroed)

    def elements(self, values: Sequence[Any]) -> int:
        return self.known * self._open(values)

    def rounded(self, values: Sequence[Any]) -> int:
        """The length.
        The symbolic part is rounded up to a power of two, so that there are few lengths."""
        return self.known << (self._open(values) - 1).bit_length()

    def _open(self, values: Sequence[Any]) -> int:
        count = 1
        for (place, axis), tiles in self.open:
            count *= tiles.of(values[place].shape[axis])
        return count


# ------------------------------------------------------------------------------------------- pools


class Pool:
    """Zeroed memory of one device, given away piece by piece."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._left: Any = None
        self._bytes = 0
        #: given back, by bytes
        self._back: dict[int, list[Any]] = defaultdict(list)
        #: all memory that it ever had: captured graphs use it without a reference of their own
        self._chunks: list[Any] = []

    def keep(self, size: int) -> None:
        """Reserve enough for captured calls of ``size`` bytes; not in a capture."""
        reserve = max(CHUNK_BYTES, min(CAPTURED_CALLS * size, LARGEST_RESERVE))
        if self._bytes >= reserve // 2:
            return
        with self._lock:
            if self._bytes < reserve // 2:
                self._left = new_zeros(self._device, reserve)
                self._bytes = reserve
                self._chunks.append(self._left)

    def take(self, sizes: Sequence[int]) -> Any:
        """Take zeroed bytes for all ``sizes``, multiples of `ALIGNMENT`, together.
        None if too few are left."""
        size = sum(sizes)
        with self._lock:
            if self._back[size]:
                return self._back[size].pop()
            if size > self._bytes:
                return None
            taken, self._left = self._left[:size], self._left[size:]
            self._bytes -= size
            return taken

    def give_back(self, taken: Any) -> None:
        """Return what `take` gave, which is zero again and which nothing uses any more."""
        with self._lock:
            self._back[taken.numel()].append(taken)


class Loan:
    """Memory of captured calls that is given back when their graph is replayed no more."""

    def __init__(self) -> None:
        self._taken: list[tuple[Pool, Any]] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context: what is captured in it takes its memory on this loan."""
        before = _loan.set(self)
        try:
            yield
        finally:
            _loan.reset(before)

    def add(self, pool: Pool, memory: Any) -> None:
        """Note what was taken."""
        self._taken.append((pool, memory))

    def give_back(self) -> None:
        """Return all of it; the last replay has ended."""
        for pool, memory in self._taken:
            pool.give_back(memory)
        self._taken = []


_loan: ContextVar[Loan | None] = ContextVar("loan", default=None)


def _take_captured(pool: Pool, sizes: Sequence[int]) -> Any:
    """Memory for one captured call, or None."""
    taken, loan = pool.take(sizes), _loan.get()
    if taken is not None and loan is not None:
        loan.add(pool, taken)
    return taken


_pools: Kept[int, Pool] = Kept()


def pool_of(device: Any) -> Pool:
    """The pool of a CUDA device."""
    return _pools.get(device.index) or _pools.made(device.index, lambda: Pool(device))


def new_zeros(device: Any, size: int) -> Any:
    """Allocate ``size`` zeroed bytes that kernels on any stream may use at once.

    They are allocated by another thread, on the default stream: an allocation by this thread or
    stream may be diverted to memory that is reused, as in the calls before a capture of
    ``torch.compile(mode="reduce-overhead")``. Raises what torch raises when memory is short.
    """
    import torch

    def make() -> Any:
        zeros = torch.zeros(size, dtype=torch.uint8, device=device)
        torch.cuda.default_stream(device).synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
