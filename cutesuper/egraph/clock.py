"""The time limit of a search: loops that may run long check the clock.

A region is searched through tables that know nothing of each other, in this process or in another
one. All of them check one limit, which belongs to the thread and is infinite unless one was set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

from cutesuper.errors import SearchError

#: the reason that `Counts.pruned` gives for work skipped for lack of time
OUT_OF_TIME = "out of time"

_END: ContextVar[float] = ContextVar("end of the search", default=inf)


class OutOfTime(SearchError):
    """The time of a search is used up; its results so far count."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)

    def __reduce__(self) -> tuple[type[OutOfTime], tuple[()]]:
        return OutOfTime, ()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit the time of the enclosed code, in seconds; an outer limit still holds."""
    if seconds == inf:
        yield
        return
    token = _END.set(min(_END.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def late() -> bool:
    """True if the time is used up."""
    end = _END.get()
    return end != inf and time.monotonic() > end


def look() -> None:
    """Raise OutOfTime if the time is used up."""
    if late():
        raise OutOfTime
