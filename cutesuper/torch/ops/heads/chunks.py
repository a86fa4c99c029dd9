"""Calls of heads, chunk by chunk: losses, and gradients of their weighted sum.

Beside its results a call needs the memory of one chunk: `definition.CHUNK_BYTES` for each wide
value that lives at a time, which is one where the kernel of the derivative works in place. More
chunks than `FEW` need the gradients of weights once more, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.programs import Kept
from cutesuper.torch.ops.heads.definition import (
    FACTORS,
    Form,
    Head,
    Part,
    chunk_rows,
    kind_of,
    lead_of,
    so_far,
)
from cutesuper.torch.ops.heads.library import chunk_program
from cutesuper.torch.ops.programs import KEPT, Program
from cutesuper.torch.ops.rowwise.calls import all_usable
from cutesuper.torch.ops.rowwise.definition import Kind, Maybe, Option

#: up to this many chunks a sum over all of them is kept in the type of its weight. Each addition
#: rounds once, by half a unit in the last place, so that it stays within the two units that the
#: rule for errors allows; more chunks are added up in float32
FEW = 4


_rows: Kept[tuple[object, ...], int] = Kept(KEPT)


def _program(head: Head, form: Form, device: torch.device) -> Program:
    return chunk_program(head.name, (head, form), lambda: form.graph(head), device)


class Call:
    """A call of a head.

    Args:
        head: what is computed.
        tensors: its parts.
        options: the other arguments.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: naming the argument.
    """

    def __init__(self, head: Head, tensors: Sequence[Maybe], options: tuple[Option, ...]) -> None:
        self.head, self.tensors = head, tensors
        self.kind: Kind = kind_of(head, tensors, options)
        self.lead = lead_of(head, tensors)
        self.count = 1
        for n in self.lead:
            self.count *= n
        self.device = next(t.device for t in tensors if t is not None)

    def losses(self) -> torch.Tensor:
        """The losses of all rows, float32 ``[M]``."""
        found = torch.empty(self.count, 1, dtype=torch.float32, device=self.device)
        if not self.count:
            return found.view(0)
        rows = self._chunk_rows()
        program = _program(self.head, Form(self.kind, rows), self.device)
        own = self._own()
        for first in range(0, self.count, rows):
            some = slice(first, min(first + rows, self.count))
            given = {p.name: t[some] if p.rows else t for p, t in own}
            inputs = [given[n] for n in program.names]
            program.run(all_usable(inputs), [found[some]], some.stop - some.start)
        return found.view(-1)

    def gradients(
        self, factors: torch.Tensor, needs: Sequence[bool]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The losses of all rows ``[M]``, and the gradients of the sum of losses times factors.

        Args:
            factors: float32 ``[M]``.
            needs: for each part, whether its gradient is asked for.
        """
        asked = [p for p, n in zip(self.head.parts, needs, strict=True) if n]
        if not self.count:
            return factors.new_empty(0), [self._empty(p).zero_() for p in asked]
        rows = self._chunk_rows()
        chunks = -(-self.count // rows)
        losses = torch.empty(chunks * rows, 1, dtype=torch.float32, device=self.device)
        sums = Sums(self, asked, rows, chunks)
        own = [*self._own(), (Part(FACTORS, 0, rows=True), factors.view(-1, 1))]
        for n in range(chunks):
            form = Form(self.kind, rows, tuple(needs), chunks > FEW, n > 0)
            program = _program(self.head, form, self.device)
            given = {p.name: self._rows(t, n, rows) if p.rows else t for p, t in own}
            sums.run(program, given, losses[n * rows : (n + 1) * rows], n)
        return losses[: self.count].view(-1), sums.finished()

    def _own(self) -> list[tuple[Part, torch.Tensor]]:
        """The parts that are given, those with rows as the graph sees them."""
        found: list[tuple[Part, torch.Tensor]] = []
        for p, i, t in zip(self.head.parts, self.kind.inputs, self.tensors, strict=True):
            if i is not None and t is not None:
                found.append((p, t.detach().reshape(-1, *i.inner) if p.rows else t.detach()))
        return found

    def _rows(self, t: torch.Tensor, n: int, rows: int) -> torch.Tensor:
        """Chunk ``n``, with zeros behind the last row."""
        some = t[n * rows : (n + 1) * rows]
        if len(some) == rows:
            return some
        padded = t.new_zeros(rows, *t.shape[1:])
        padded[: len(some)] = some
        return padded

    def _chunk_rows(self) -> int:
        key = (self.head, self.kind, self.count, TABLE.changes)
        return _rows.made(key, lambda: chunk_rows(self.head, self.kind, self.count))

    def _given(self, part: Part) -> torch.Tensor:
        """The tensor of a part that has a gradient."""
        t = self.tensors[self.head.parts.index(part)]
        if t is None:
            raise AssertionError(f"{self.head.name}: the gradient of {part.name}, which is None")
        return t

    def _empty(self, part: Part) -> torch.Tensor:
        t = self._given(part)
        return torch.empty(t.shape, dtype=t.dtype, device=self.device)

    def shaped(self, part: Part, made: torch.Tensor) -> torch.Tensor:
        """A gradient in the shape and the type of its part."""
        t = self._given(part)
        made = made[: self.count] if part.rows else made
        return made.reshape(t.shape).to(t.dtype)


class Sums:
    """The gradients of a call: rows of some, chunk by chunk, and sums over the chunks of others."""

    def __init__(self, call: Call, asked: list[Part], rows: int, chunks: int) -> None:
        self.call, self.asked, self.rows, self.chunks = call, asked, rows, chunks
        self.made: dict[str, torch.Tensor] = {}
        #: where the next sum goes, if its kernel does not work in place
        self._other: dict[str, torch.Tensor] = {}

    def run(
        self, program: Program, given: dict[str, torch.Tensor], losses: torch.Tensor, n: int
    ) -> None:
        """Compute chunk ``n`` from these tensors, by name, and the sums so far."""
        before = {so_far(p): self.made[p.name] for p in self.asked if not p.rows and n}
        inputs = [{**given, **before}[name] for name in program.names]
        outputs = [losses, *(self._output(program, p, k, n) for k, p in enumerate(self.asked, 1))]
        program.run(all_usable(inputs), outputs, self.rows)

    def _output(self, program: Program, part: Part, k: int, n: int) -> torch.Tensor:
        """The tensor for output ``k`` of chunk ``n``."""
        node = program.graph.nodes[program.graph.outputs[k]]
        shape = [int(d) for d in node.shape if isinstance(d, int)]
        if part.rows:
            if n == 0:
                self.made[part.name] = self._new(node.dtype.torch, shape, self.chunks)
            return self.made[part.name][n * self.rows : (n + 1) * self.rows]
        if n == 0:
            self.made[part.name] = self._new(node.dtype.torch, shape, 1)
        elif not program.replaces(so_far(part), k):
            old = self.made[part.name]
            other = self._other.get(part.name)
            self.made[part.name] = torch.empty_like(old) if other is None else other
            self._other[part.name] = old
        return self.made[part.name]

    def _new(self, dtype: torch.dtype, shape: list[int], times: int) -> torch.Tensor:
        return torch.empty(times * shape[0], *shape[1:], dtype=dtype, device=self.call.device)

    def finished(self) -> list[torch.Tensor]:
        """The gradients, in the shapes and types of their parts."""
        self._other.clear()
        return [self.call.shaped(p, self.made.pop(p.name)) for p in self.asked]
