"""Operands that threads copy into shared memory, because bulk loads cannot address them.

TMA takes strides that are multiples of 16 bytes. The rows of ``X[16, 4097]`` in fp16 begin at any
multiple of 2: copier warps read them in aligned words, shift these to pieces of 8 elements, and write
the pieces to the places where a bulk load would have put them. Nothing else of the loop knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.base import View

#: 16-bit elements of a piece
PIECE = 8
#: most pieces that a thread asks for at a time, each in 8 registers; it asks for the next ones before
#: it writes these
BATCH = 4
#: the same where registers are handed over to the consumers: of 72 and 80 pieces may have 32
SMALL_BATCH = 2


def unaligned(views: Mapping[int, View]) -> dict[int, View]:
    """Those of some operands, by operation, that bulk loads cannot address."""
    return {op: view for op, view in views.items() if step(view) < PIECE}


def step(view: View) -> int:
    """The largest of 1, 2, 4 and 8 of which all rows of a tensor begin at multiples, in elements.

    >>> step(View(0, ("M", "K"), (12, 1))), step(View(0, ("M", "K"), (64, 1)))
    (4, 8)
    """
    return gcd(PIECE, *(s for s in view.strides if s != 1))


@dataclass(frozen=True)
class CopiedTile:
    """The tile of an operand in one stage.

    Attributes:
        view: the operand.
        lines: label and extent of its rows in memory.
        along: label and extent of what is contiguous, in whole pieces.
    """

    view: View
    lines: tuple[str, int]
    along: tuple[str, int]

    @staticmethod
    def of(view: View, *labels: tuple[str, int]) -> CopiedTile:
        """The tile of two labels with these extents, in any order."""
        (along,) = (x for x in labels if view.stride(x[0]) == 1)
        (lines,) = (x for x in labels if x != along)
        return CopiedTile(view, lines, along)

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return self.lines[1] * self.along[1] // PIECE

    @property
    def bytes(self) -> int:
        """Bytes in shared memory."""
        return 2 * PIECE * self.pieces

    def each(self, threads: int) -> int:
        """Number of pieces of a thread, if so many threads share them."""
        return ceil_div(self.pieces, threads)


@dataclass(frozen=True)
class Team:
    """Warps that fill a stage together. Teams take stages in turn: with few bytes in a stage, warps
    that shared it would have too few pieces to ask for at a time.

    Attributes:
        count: of teams, at most one for each stage of the ring.
        warps: of each.
    """

    count: int
    warps: int

    @staticmethod
    def of(pieces: int, warps: int, stages: int) -> Team:
        """Teams of so many warps for stages with this number of pieces.

        >>> Team.of(640, 11, 12), Team.of(3072, 7, 4)
        (Team(count=5, warps=2), Team(count=1, warps=6))
        """
        own = min(warps, max(1, pieces // (32 * 2 * BATCH)))
        # of an even number a thread's pieces lie in one row of the swizzle
        own -= own % 2 * (own > 1)
        return Team(min(warps // own, stages), own)


def batches(tiles: list[CopiedTile], threads: int, most: int) -> list[list[tuple[int, int]]]:
    """The pieces of a thread, as (tile, index) in the order in which it copies them: an even number
    of batches of at most so many, as there are two sets of registers.

    >>> x = CopiedTile(View(0, ("M", "K"), (65, 1)), ("M", 16), ("K", 128))
    >>> batches([x, x], 128, 4)
    [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    """
    own = [(t, i) for t, tile in enumerate(tiles) for i in range(tile.each(threads))]
    count = 2 * max(1, ceil_div(len(own), 2 * most))
    ends = [len(own) * n // count for n in range(count + 1)]
    return [own[a:b] for a, b in zip(ends, ends[1:], strict=False)]
