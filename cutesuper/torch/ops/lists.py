"""Programs over lists of tensors: one launch for all rows of all of them.

A program of rows is given, in place of ``X [M, N]``, the rows of several tensors that lie anywhere:
on a GPU the kernel reads the address of each row in device memory, so that the number of launches
does not grow with the number of tensors. On the CPU the program runs for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from cutesuper.errors import LayoutError
from cutesuper.runtime.programs import KERNEL_DEVICES, is_capturing
from cutesuper.torch.ops.programs import Program

#: elements of a row, at most and at least: tensors are rows of a power of two of elements, so that
#: one kernel serves all of them that have as many. Others are one row each
ROW, LEAST = 1024, 8
#: rows that kernels are optimized for
ROWS = 1 << 14
#: rows of tables of addresses and numbers begin at multiples of 16 bytes
_EVEN = 4


def row_length(count: int) -> int:
    """Elements of a row of a tensor that has this many.
    2 for a single one, since no kernel has rows of one."""
    row = math.gcd(count, ROW)
    return row if row >= LEAST else max(count, 2)


class Lists:
    """The rows of lists of tensors, which all have the same numbers of rows.

    Args:
        rows: rows of each tensor of a list.
        length: elements of a row.
        device: of the tensors.
    """

    def __init__(self, rows: Sequence[int], length: int, device: torch.device) -> None:
        self.rows, self.length, self.device = tuple(rows), length, device
        self.count = sum(rows)
        if device.type in KERNEL_DEVICES:
            many = torch.tensor(rows)
            padded = torch.zeros(-(-self.count // _EVEN) * _EVEN, dtype=torch.int64)
            padded[: self.count] = torch.arange(len(rows)).repeat_interleave(many)
            place = torch.arange(len(padded)) - (many.cumsum(0) - many)[padded]
            #: for each row its tensor, and its place there
            self._tensor, self._place = padded.to(device), place.to(device)
        self._known: tuple[tuple[int, ...], torch.Tensor] | None = None
        #: pinned memory: what captured graphs copy from whenever they are replayed, and the next
        self._captured: list[torch.Tensor] = []
        self._next: torch.Tensor | None = None

    @property
    def captured(self) -> bool:
        """True if a captured graph reads what this object holds."""
        return bool(self._captured)

    def run(
        self,
        program: Program,
        lists: Mapping[str, Sequence[torch.Tensor]],
        numbers: Mapping[str, torch.Tensor],
        results: Sequence[str],
    ) -> None:
        """Run a program once for all rows, in place.

        Args:
            program: its inputs are those of the next two arguments, by name.
            lists: contiguous tensors of any shape, those of one list of one type; aligned.
            numbers: float32 ``[n]``, one for each tensor of a list, or ``[1, 1]``, one for all,
                aligned.
            results: the lists that the outputs replace, which the kernel may do
                (`Program.replaces`).

        Raises:
            LayoutError: a tensor that has no memory of its own, as a `DTensor`.
        """
        if not all(program.replaces(name, k) for k, name in enumerate(results)):
            raise AssertionError(f"the kernel does not write {', '.join(results)} in place")
        if self.device.type not in KERNEL_DEVICES:
            return self._run_each(program, lists, numbers, results)
        names = list(lists)
        addresses = self._addresses([t for n in names for t in lists[n]], len(names))
        given = {n: addresses[k, : self.count] for k, n in enumerate(names)}
        own = {n: t if t.dim() > 1 else self._spread(t) for n, t in numbers.items()}
        inputs = [{**given, **own}[n] for n in program.names]
        return program.run(inputs, [given[n] for n in results], self.count)

    def _run_each(
        self,
        program: Program,
        lists: Mapping[str, Sequence[torch.Tensor]],
        numbers: Mapping[str, torch.Tensor],
        results: Sequence[str],
    ) -> None:
        for k, rows in enumerate(self.rows):
            given = {name: some[k].view(-1, self.length) for name, some in lists.items()}
            for name, t in numbers.items():
                given[name] = t if t.dim() > 1 else t[k].expand(rows, 1)
            program.run([given[n] for n in program.names], [given[n] for n in results], rows)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """The number of each row, ``[M, 1]``."""
        return numbers[self._tensor][: self.count].view(-1, 1)

    def _addresses(self, tensors: list[torch.Tensor], lists: int) -> torch.Tensor:
        """The address of each row, int64 ``[lists, M]`` (and some more)."""
        pointers = tuple(t.data_ptr() for t in tensors)
        if not is_capturing() and self._known is not None and self._known[0] == pointers:
            return self._known[1]
        if 0 in pointers:
            kinds = {type(t).__name__ for t in tensors if not t.data_ptr()}
            raise LayoutError(
                f"a tensor of type {', '.join(kinds)} has no memory of its own; give its local part"
            )
        steps = [self.length * t.element_size() for t in tensors[:: len(self.rows)]]
        given = self._moved((*pointers, *steps))
        found = given[:-lists].view(lists, -1)[:, self._tensor]
        found.addcmul_(given[-lists:, None], self._place)
        if not is_capturing():  # what is captured is computed whenever the graph is replayed
            self._known = pointers, found
        return found

    def _moved(self, numbers: Sequence[int]) -> torch.Tensor:
        """Numbers on the device, int64."""
        host = torch.tensor(numbers, dtype=torch.int64)
        if self._next is None and self.device.type == "cuda":
            self._next = torch.empty_like(host, pin_memory=True)
        if self._next is not None and is_capturing():
            host, self._next = self._next.copy_(host), None
            self._captured.append(host)
        return host.to(self.device, non_blocking=True)
