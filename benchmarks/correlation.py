"""Rank correlations with ties: agreement of two orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of every value, 1 for the least; equal values share the mean of their ranks.

    before: ``[10, 30, 10]``; after: ``[1.5, 3.0, 1.5]``.
    """
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rho, -1..1: Pearson's correlation of the ranks.

    None if there is no order to compare: fewer than two values, or all of one side equal.
    """
    a, b = _centred(ranks(x)), _centred(ranks(y))
    norm = sqrt(sum(u * u for u in a) * sum(v * v for v in b))
    return sum(u * v for u, v in zip(a, b, strict=True)) / norm if norm else None


def kendall(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b, -1..1: pairs in the same order minus pairs in opposite order.

    A pair that is tied on one side counts for neither, and the total is
    ``sqrt(pairs not tied in x * pairs not tied in y)`` (Kendall, Biometrika 33, 1945). None as in
    `spearman`.
    """
    pairs = list(combinations(zip(x, y, strict=True), 2))
    signs = [(_sign(p[0] - q[0]), _sign(p[1] - q[1])) for p, q in pairs]
    untied = sqrt(sum(s != 0 for s, _ in signs) * sum(t != 0 for _, t in signs))
    return sum(s * t for s, t in signs) / untied if untied else None


def _centred(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values) if values else 0.0
    return [v - mean for v in values]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
