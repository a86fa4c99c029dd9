"""Python's garbage collector, which looks for cycles less often while this package works.

Searches and compilations make many small objects that live, and hardly any cycles. Looking through
them as often as Python does took 14 to 25% of a trace and a first backward of two layer norms (7.1
and 19.1 s of a core, 5.0 and 14.9 s with these thresholds, 4.8 and 13.0 s without any collection),
with as much memory (660 MB).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: objects made before the youngest are looked through, and how often that is done before the older
#: ones are: Python has 700, 10 and 10
SELDOM = (50_000, 20, 100)

_lock = threading.Lock()
#: the caller's thresholds, once for each block that is entered and not left
_blocks: list[tuple[int, int, int]] = []


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage less often in the block, in whichever thread; also a decorator.

    A collector that is off stays off, and other thresholds of the caller come back when the last
    such block ends.
    """
    with _lock:
        _blocks.append(_blocks[0] if _blocks else gc.get_threshold())
        if _blocks[0][0] > 0:  # 0 turns it off
            gc.set_threshold(*map(max, _blocks[0], SELDOM))
    try:
        yield
    finally:
        with _lock:
            before = _blocks.pop()
            if not _blocks:
                gc.set_threshold(*before)
