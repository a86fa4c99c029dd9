"""The targets under one name; each architecture has its file in ``graph/targets/``."""

from __future__ import annotations

from cutesuper.graph.targets import (
    B200,
    H100,
    H200,
    TARGETS,
    Rates,
    Target,
    find_target,
)

__all__ = ["B200", "H100", "H200", "TARGETS", "Rates", "Target", "find_target"]
