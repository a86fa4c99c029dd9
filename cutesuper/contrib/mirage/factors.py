"""Dimensions as products of indices.

Mirage names dimensions by position. Here an element's position along a dimension is written with
*factors*, separate indices, outermost first: ``[y, loop, j]`` is the position ``(y * 4 + loop) *
128 + j`` along 4096 elements that 8 blocks, 4 iterations and tiles of 128 share. Operators unify
factors of two tiles; if their extents differ, the longer one is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cutesuper.errors import FormatError

#: factors of one dimension, outermost first; none for an extent of 1
Sequel = tuple[int, ...]


class Factors:
    """The factors of one kernel, as numbers, with the factors that each was split into."""

    def __init__(self) -> None:
        self._extents: list[int] = []
        #: the factors that each factor has become: itself, or others
        self._became: dict[int, Sequel] = {}

    def new(self, extent: int) -> Sequel:
        """A new factor of that extent; none for 1."""
        if extent == 1:
            return ()
        self._extents.append(extent)
        return (len(self._extents) - 1,)

    def extent(self, factor: int) -> int:
        """The extent of a factor."""
        return self._extents[factor]

    def size(self, sequel: Sequel) -> int:
        """The extent of a dimension."""
        return prod(self._extents[f] for f in sequel)

    def settled(self, sequel: Sequence[int]) -> Sequel:
        """A dimension in terms of factors that are not split."""
        result: list[int] = []
        left = list(reversed(sequel))
        while left:
            f = left.pop()
            if f in self._became:
                left += reversed(self._became[f])
            else:
                result.append(f)
        return tuple(result)

    def split(self, factor: int, inner: int) -> None:
        """Split a factor into two, the second of extent ``inner``."""
        self._became[factor] = self.new(self._extents[factor] // inner) + self.new(inner)

    def unify(self, a: Sequel, b: Sequel, where: str) -> None:
        """Unify two dimensions of equal extents, from the innermost factors on.

        before: ``[4, 6]`` and ``[24]``; after: both ``[4, 6]``.

        Raises:
            FormatError: their factors overlap, as in ``[4, 6]`` and ``[6, 4]``.
        """
        while True:
            a, b = self.settled(a), self.settled(b)
            pair = next(
                (p for p in zip(reversed(a), reversed(b), strict=False) if p[0] != p[1]), None
            )
            if pair is None:
                return
            short, long = sorted(pair, key=self.extent)
            if self.extent(long) % self.extent(short):
                raise FormatError(
                    f"{where}: its operands divide a dimension into parts of {self.extent(short)} "
                    f"and of {self.extent(long)}, neither a multiple of the other; no labels "
                    "describe that"
                )
            if self.extent(short) == self.extent(long):
                self._became[long] = (short,)
            else:
                self.split(long, self.extent(short))

    def cut(self, sequel: Sequel, inner: int) -> tuple[Sequel, Sequel] | None:
        """A dimension in two, the second of extent ``inner``; None if a factor would not split.

        before: ``[16, 128]`` at 64; after: ``[16, 2]`` and ``[64]``.
        """
        sequel = self.settled(sequel)
        covered, at = 1, len(sequel)
        while covered < inner:
            at -= 1
            n = self.extent(sequel[at])
            if covered * n <= inner:
                if inner % (covered * n):
                    return None
                covered *= n
                continue
            if inner % covered or n % (inner // covered):
                return None
            self.split(sequel[at], inner // covered)
            return self.cut(sequel, inner)
        return sequel[:at], sequel[at:]
