"""GPUs, one file per architecture; `base` defines the data of each.

A new architecture needs a file here and building blocks under ``device/``.
"""

from __future__ import annotations

from cutesuper.errors import DeviceError
from cutesuper.ir.arguments import shown
from cutesuper.targets.base import (
    AttentionRates,
    LibraryRates,
    Rates,
    RowRates,
    Target,
    WideRates,
)
from cutesuper.targets.blackwell import B200, B300
from cutesuper.targets.hopper import H100, H200

TARGETS: dict[str, Target] = {t.name: t for t in (H200, H100, B200, B300)}


def find_target(name: str) -> Target:
    """The target called ``name``, ``h200``, or with so many multiprocessors, ``h200-78``.
    Raises DeviceError."""
    if isinstance(name, str):
        base, _, sms = name.partition("-")
        if base in TARGETS and sms.isdecimal() and int(sms) > 0:
            return TARGETS[base].with_sms(int(sms))
        if name in TARGETS:
            return TARGETS[name]
    raise DeviceError(f"target {shown(name)}: unknown; use one of {', '.join(TARGETS)}")


__all__ = [
    "B200",
    "B300",
    "H100",
    "H200",
    "TARGETS",
    "AttentionRates",
    "LibraryRates",
    "Rates",
    "RowRates",
    "Target",
    "WideRates",
    "find_target",
]
