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
        element ``start`` of a tensor; nothing behind its end is read."""
        first = start - start % PIECE
        if count > 0:
            self.word(registers, 0, tensor, first)
        if cutlass.const_expr(self.step < PIECE):
            if start > first and count > PIECE - (start - first):
                self.word(registers, 1, tensor, first + PIECE)

    @cute.jit
    def word(self, registers, n: cutlass.Constexpr, tensor, at):
        """Read word ``n``, which begins at element ``at``; of the tensor's last one what there
        is."""
        length = cute.size(tensor)
        pointer = tensor.iterator + cute.assume(at, divby=PIECE)
        target = neighbours(registers.iterator + n * PIECE, PIECE)
        if cutlass.const_expr(isinstance(length, int) and length % PIECE == 0):
            if at < length:
                cute.autovec_copy(neighbours(pointer, PIECE), target)
        elif at + PIECE <= length:
            cute.autovec_copy(neighbours(pointer, PIECE), target)
        else:
            for e in cutlass.range_constexpr(PIECE - 1):
                if at + e < length:
                    target[e] = one(pointer + e)[0]

    def piece(self, registers: cute.Tensor, start: Any, count: Any) -> cute.Tensor:
        """The piece whose words were fetched; zeros behind its ``count`` elements."""
        words = words_of(registers)
        # a bit of the distance to the word's start at a time
        for distance in (4, 2):
            if self.step <= distance:
                far, by = start % (2 * distance) >= distance, distance // 2
                pairs = zip(words, words[by:], strict=False)
                words = [Int32(select_(far, b, a)) for a, b in pairs]
        if self.step == 1:
            bits = start % 2 * 16
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
