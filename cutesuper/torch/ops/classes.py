"""Classes of calls that share kernels: the extent that those are optimized for.
Data in ``schedules/*/ops.json``, as measured on one architecture, since graphs are made before a
device is known."""

from __future__ import annotations

from functools import lru_cache

from cutesuper.targets import H200
from cutesuper.targets.settings import Decision, Settings

_SETTINGS = Settings(
    "ops",
    {
        "rows": Decision(("extent",), {"hint": 16384}),
        "queries": Decision(("extent",), {"hint": 2048}),
        "keys": Decision(("extent",), {"hint": 16384}),
    },
)
#: extents whose class is remembered
_KNOWN_EXTENTS = 1 << 14


@lru_cache(maxsize=_KNOWN_EXTENTS)
def class_of(decision: str, extent: int) -> int:
    """The extent for which the kernels of a call are optimized: its rows, queries, or keys."""
    return _SETTINGS.choose(H200, decision, extent=extent)["hint"]
