"""Pieces of 16 bytes from anywhere in a tensor of 16-bit elements.

Memory is read in aligned words of 16 bytes. A piece that begins between two words is shifted together
from both; neighbouring threads read neighbouring pieces, so that the second word of one is the first
of the next and comes from L1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cutesuper.device.fragments import PIECE, fragment, words_of
from cutesuper.device.memory import neighbours, one


def anew(value: Any, lane: Any) -> Any:
    """The same number, from which the compiler derives nothing ahead of this place: it computes the
    addresses of all pieces before a loop, and keeps them in more registers than a thread has."""
    return cute.arch.shuffle_sync(value, lane)


@dataclass(frozen=True)
class Unaligned:
    """How the pieces of a tensor lie.

    Attributes:
        dtype: of 16 bits.
        step: 1, 2, 4 or 8: every piece begins at a multiple of it, in elements.
        whole: true if no row ends inside a piece.
    """

    dtype: Any
    step: int
    whole: bool

    def registers(self) -> cute.Tensor:
        """Room for the words of a piece, in the first half those of the first one."""
        return fragment(2 * PIECE, self.dtype)

    @cute.jit
    def fetch(self, registers, tensor, start, count):
        """Ask for the words of ``count`` elements (at most a piece; none if it is negative) from
        element ``start`` of a tensor, but for the tensor's last word if it has less than that."""
        for n in cutlass.range_constexpr(self.words):
            at = self.word(n, start)
            if self.needs(n, start, count) and at + PIECE <= cute.size(tensor):
                pointer = tensor.iterator + cute.assume(at, divby=PIECE)
                cute.autovec_copy(neighbours(pointer, PIECE), self.half(registers, n))

    @cute.jit
    def fetch_end(self, registers, tensor, start, count):
        """Read what there is of the tensor's last word, if it is one of these."""
        for n in cutlass.range_constexpr(self.words):
            at, length, target = self.word(n, start), cute.size(tensor), self.half(registers, n)
            if self.needs(n, start, count) and at + PIECE > length:
                for e in cutlass.range_constexpr(PIECE - 1):
                    if at + e < length:
                        target[e] = one(tensor.iterator + (at + e))[0]

    def meets_end(self, tensor: cute.Tensor, start: Any, count: Any) -> Any:
        """True if `fetch_end` has something to read; None if that is never so."""
        length = cute.size(tensor)
        if isinstance(length, int) and length % PIECE == 0:
            return None
        return (count > 0) & (self.word(self.words, start) > length)

    @property
    def words(self) -> int:
        """Number of words that a piece may lie in."""
        return 1 if self.step == PIECE else 2

    def word(self, n: int, start: Any) -> Any:
        """First element of word ``n`` of a piece."""
        return (start & -PIECE) + n * PIECE

    def needs(self, n: int, start: Any, count: Any) -> Any:
        """True if elements of a piece lie in its word ``n``."""
        return count > (0 if n == 0 else PIECE - (start & (PIECE - 1)))

    def half(self, registers: cute.Tensor, n: int) -> cute.Tensor:
        """The registers of word ``n``."""
        return neighbours(registers.iterator + n * PIECE, PIECE)

    def piece(self, registers: cute.Tensor, start: Any, count: Any) -> cute.Tensor:
        """The piece whose words were fetched; zeros behind its ``count`` elements."""
        words = words_of(registers)
        # a bit of the distance to the word's start at a time
        for distance in (4, 2):
            if self.step <= distance:
                far, by = (start & distance) > 0, distance // 2
                pairs = zip(words, words[by:], strict=False)
                words = [Int32(select_(far, b, a)) for a, b in pairs]
        if self.step == 1:
            bits = (start & 1) * 16
            pairs = zip(words, words[1:], strict=False)
            words = [cute.arch.shf(a, b, bits, "r") for a, b in pairs]
        found = fragment(PIECE, self.dtype)
        target = cute.recast_tensor(found, Int32)
        for n in range(PIECE // 2):
            word = words[n]
            if not self.whole:
                word = Int32(select_(count > 2 * n + 1, word, word & 0xFFFF))
            target[n] = Int32(select_(count > (0 if self.whole else 2 * n), word, Int32(0)))
        return found
