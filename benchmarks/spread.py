"""Medians and spreads of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor


@dataclass(frozen=True)
class Spread:
    """Summary of ``samples`` measurements in microseconds."""

    median: float
    p10: float
    p90: float
    min: float
    samples: int


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest of ``ordered`` (ascending, not empty)."""
    position = q * (len(ordered) - 1)
    low = floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile and minimum.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("summarize: no samples")
    ordered = sorted(samples)
    low, middle, high = (quantile(ordered, q) for q in (0.1, 0.5, 0.9))
    return Spread(middle, low, high, ordered[0], len(ordered))
