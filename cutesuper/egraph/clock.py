"""The time that a search may take: loops that may run long look at the clock.

A region is searched by tables that know nothing of each other, in this process or in another one.
All of them look at one limit, which belongs to the thread and is infinite where nobody set one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

from cutesuper.errors import SearchError

#: why something was not looked at (in `Counts.pruned`)
OUT_OF_TIME = "out of time"

_END: ContextVar[float] = ContextVar("end of the search", default=inf)


class OutOfTime(SearchError):
    """The time of a search is used up; what was found until then counts."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)

    def __reduce__(self) -> tuple[type[OutOfTime], tuple[()]]:
        return OutOfTime, ()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let what runs meanwhile take so many seconds; a limit around it holds as well."""
    if seconds == inf:
        yield
        return
    token = _END.set(min(_END.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def late() -> bool:
    """Whether the time is used up."""
    end = _END.get()
    return end != inf and time.monotonic() > end


def look() -> None:
    """Raise OutOfTime where the time is used up."""
    if late():
        raise OutOfTime


__all__ = ["OUT_OF_TIME", "OutOfTime", "late", "limited", "look"]
