"""Relations between things: reachability, orders of dependence, classes of equal ones.

Nothing here recurses: a program may have thousands of operators, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], after: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """All that is reached from some, these included, in the order in which it is found.
    The last start first, and what comes after it before the other starts."""
    found: dict[T, None] = {}
    waiting = list(starts)
    while waiting:
        x = waiting.pop()
        if x not in found:
            found[x] = None
            waiting += after(x)
    return found


def ordered(ends: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """All that some need, these included, each after what it needs itself: the first end first."""
    found: dict[T, None] = {}
    waiting = list(ends)[::-1]
    while waiting:
        x = waiting[-1]
        missing = [] if x in found else [y for y in needs(x) if y not in found]
        if missing:
            waiting += reversed(missing)
        else:
            found[waiting.pop()] = None
    return list(found)


class Classes(Generic[T]):
    """Classes of equal things (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    @property
    def members(self) -> set[T]:
        """All things that were joined or looked for."""
        return set(self._parent)

    def find(self, x: T) -> T:
        """The representative of everything that was joined with x."""
        parent, root = self._parent, x
        while (above := parent.setdefault(root, root)) != root:
            root = above
        while parent[x] != root:  # so that long chains are short the next time
            parent[x], x = root, parent[x]
        return root

    def join(self, x: T, y: T) -> None:
        """Make two the same; the representative is that of y."""
        x, y = self.find(x), self.find(y)
        if x != y:
            self._parent[x] = y

    def copy(self) -> Classes[T]:
        """The same classes, to be joined further."""
        other = Classes[T]()
        other._parent = dict(self._parent)
        return other
