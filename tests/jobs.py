"""Jobs of workers in tests: functions of a module that they can import."""

from __future__ import annotations

import threading
import time

from cutesuper.errors import SearchError
from cutesuper.search.bounds import TooDear


class Secretive(Exception):
    """An error that cannot be put together again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail(name: str) -> None:
    """Raise one of the errors."""
    if name == "search":
        raise SearchError("nothing fits")
    if name == "dear":
        raise TooDear(7.5, 3.25)
    if name == "secretive":
        raise Secretive(1, 2)


def compute(seconds: float) -> str:
    """Be busy for some time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return "computed"


def lock() -> object:
    """A result that cannot be sent."""
    return threading.Lock()
