"""Time limits for one program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: a process that waits for something is given so many times its limit of processor time
PATIENCE = 8


class TimedOut(BaseException):
    """No `Exception`, so that nothing on the way takes it for an error of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimedOut` in the block after so many seconds of processor time.

    Processor time says the same on a busy machine; a block that only waits is stopped after
    `PATIENCE` times as many seconds on the clock. In the main thread of a process only.
    """

    def stop(*_: Any) -> None:
        raise TimedOut

    before = [signal.signal(s, stop) for s in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for s, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(s, handler)
