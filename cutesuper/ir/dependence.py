"""Dependences between the operations of a program, computed once for all stages.

Operations are numbered, and operands come before their users. Values that are used several times
are common (``y + y * y``), so walking from a result to its operands without memory takes
exponential time: 42 s for 14 such sums between two products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Dependence:
    """The set of operations that each operation depends on.

    Args:
        operands: for each operation the numbers of earlier ones.
    """

    def __init__(self, operands: Sequence[Iterable[int]]) -> None:
        self._before: list[int] = []  # sets of operations as bits, each with the operation itself
        for i, inputs in enumerate(operands):
            bits = 1 << i
            for j in inputs:
                bits |= self._before[j]
            self._before.append(bits)

    def reaches(self, source: int, i: int) -> bool:
        """True if operation ``i`` depends on operation ``source``, another one."""
        return source != i and bool(self._before[i] >> source & 1)

    def before(self, i: int) -> list[int]:
        """``i`` and all operations that it depends on, in order."""
        return [j for j in range(i + 1) if self._before[i] >> j & 1]

    def after(self, sources: Iterable[int]) -> set[int]:
        """The operations ``sources`` and all operations that depend on one of them."""
        bits = sum(1 << j for j in set(sources))
        return {i for i, before in enumerate(self._before) if before & bits}
