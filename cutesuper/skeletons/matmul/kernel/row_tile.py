"""The tile of a row operand in a stage, as ordinary loads and stores see it.

Eight threads share a row and read 16-byte pieces of the 128-byte rows of a chunk. The 128-byte
swizzle permutes the pieces inside a row by the row's number modulo 8, so a linear read meets every
element once; the piece's place gives its position along the contracted label.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.fragments import fetched, fragment
from cutesuper.device.memory import neighbours
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.kernel.hostmath import HostMath
from cutesuper.skeletons.matmul.kernel.context import Known
from cutesuper.skeletons.matmul.kernel.multicast import Sharing

LANES = 8  # threads that share a row


class RowTile:
    """The rows that the helper warps of a block read, and the elements that exist."""

    def __init__(self, known: Known, sharing: Sharing) -> None:
        self.k = known
        plan = known.plan
        #: elements of 16 bytes
        self.width = plan.chunk // LANES
        #: rows in one pass of the helper warps
        self.height = max(1, plan.helpers * 32 // LANES)
        self.split = plan.splits_statistics
        self.rows = sharing.rows if self.split else known.m
        self.passes = -(-self.rows // self.height)
        #: number of blocks that receive one row's statistics, and of parts that a block receives
        self.receivers = sharing.blocks if self.split else known.cluster
        self.extent = plan.program.dims[plan.contracted]
        self.ragged = plan.program.covered(plan.contracted) != self.extent

    def place(self, row: Any, p: int) -> tuple[Any, Any]:
        """A thread's row in pass ``p``, counted from its first one, ``row``, and a predicate.
        The row is a number of passes; the predicate is true if there is one, None if all threads
        that come here have one. Where there is none, the row before is read again."""
        if p == 0 or (p + 1) * self.height <= self.rows:
            return p, None
        inside = row + p * self.height < self.rows
        return p - 1 + Int32(inside), inside

    def needs_mask(self, e: ThreadExpression, neutral: float) -> bool:
        """True if the zeros that pad the last tile would change the result."""
        if not self.ragged:
            return False
        try:
            return float(e.evaluate([0.0] * len(e.leaves), HostMath())) != neutral
        except (ArithmeticError, ValueError):
            return True

    def inside(self, at: Any) -> Any:
        """Predicates of 16 bytes of elements: true before the end of the contracted label."""
        index = fragment(self.width, Int32)
        for e in range(self.width):
            index[e] = at + e
        return index.load() < self.extent

    def pieces(self, rings: list[Any], ops: list[int], offset: Any) -> dict[int, Any]:
        """16 bytes of every ring at this thread's place, by the operation staged in the ring."""
        return {op: self.piece(ring, offset) for op, ring in zip(ops, rings, strict=True)}

    def piece(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        """Read 16 bytes of a ring."""
        return fetched(self.linear(ring, offset))

    def linear(self, ring: cute.Tensor, offset: Any) -> cute.Tensor:
        """View of 16 bytes of a ring by byte order, under any swizzle."""
        pointer = cute.recast_ptr(ring.iterator, dtype=self.k.dtype)
        # `assume`, because `align` rounds the address: two instructions for each piece
        return neighbours(pointer + cute.assume(offset, divby=self.width), self.width)
