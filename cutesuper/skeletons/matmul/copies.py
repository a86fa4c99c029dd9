"""Operands that threads copy into shared memory, because bulk loads cannot address them.

TMA takes strides that are multiples of 16 bytes. The rows of ``X[16, 4097]`` in fp16 begin at any
multiple of 2: copier warps bring the aligned words that hold them, shift these to pieces of 8
elements, and write the pieces to the places where a bulk load would have put them. Nothing else of
the loop knows.

A tile consists of segments, 64 neighbouring elements of a row: 8 lanes of a warp copy one, in 9
words. A warp copies 4 segments at a time, its *turn*, and shifts what it has brought itself. An
fp32 number is copied as two elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.base import View

#: what is copied is counted in 16-bit elements; those of fp32 are two of them
HALF_BYTES = 2
#: 16-bit elements of a piece, and of a segment
PIECE, SEGMENT = 8, 64
#: segments of a turn, and the bytes that it brings
TURN, TURN_BYTES = 4, 4 * 9 * 16
#: bytes that a block has on their way at least, if it has stages enough: what the memory's latency
#: asks for
IN_FLIGHT = 32 * 1024


def unaligned(views: Mapping[int, View], piece: int) -> dict[int, View]:
    """The operands, by operation, that bulk loads cannot address.
    ``piece``: elements of 16 bytes."""
    return {op: view for op, view in views.items() if step(view) < piece}


def step(view: View) -> int:
    """The largest of 1, 2, 4 and 8 of which all rows of a tensor begin at multiples, in elements.

    >>> step(View(0, ("M", "K"), (12, 1))), step(View(0, ("M", "K"), (64, 1)))
    (4, 8)
    """
    return gcd(PIECE, *view.places)


@dataclass(frozen=True)
class CopiedTile:
    """The tile of an operand.

    Attributes:
        view: the operand.
        lines: label and extent of its rows in memory.
        along: label and extent of what is contiguous, in whole segments.
        halves: 16-bit elements of a number.
    """

    view: View
    lines: tuple[str, int]
    along: tuple[str, int]
    halves: int = 1

    @staticmethod
    def of(view: View, halves: int, *labels: tuple[str, int]) -> CopiedTile:
        """The tile of two labels with these extents, in any order."""
        (along,) = (x for x in labels if view.stride(x[0]) == 1)
        (lines,) = (x for x in labels if x != along)
        return CopiedTile(view, lines, (along[0], halves * along[1]), halves)

    @property
    def step(self) -> int:
        """The largest of 1, 2, 4 and 8 of which all of its rows begin at multiples, in elements."""
        return self.halves * step(self.view)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return self.lines[1] * self.along[1] // SEGMENT

    @property
    def bytes(self) -> int:
        """Bytes in shared memory."""
        return HALF_BYTES * SEGMENT * self.segments

    @property
    def turns(self) -> int:
        """Turns of all warps together; tiles have an extent of 8 or more, and one of 64 or more."""
        return self.segments // TURN


def turns(tiles: Iterable[CopiedTile], warps: int) -> int:
    """Most turns of one of so many warps, which share out the turns of some tiles evenly."""
    return ceil_div(sum(t.turns for t in tiles), warps)


def depth(tiles: Iterable[CopiedTile]) -> int:
    """Number of stages whose words are on their way: 2, or 4 if they are small."""
    return 2 if sum(t.bytes for t in tiles) >= IN_FLIGHT // 2 else 4
