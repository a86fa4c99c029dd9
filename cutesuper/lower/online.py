"""A maximum and the sum of exponentials below it, part by part: the formula by which parts are put
together (Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867).

Part i of a row has ``m_i = max t`` and ``s_i = sum exp(t - m_i)``; the row then has ``m = max m_i``
and ``s = sum s_i exp(m_i - m)``. All exponents are at most 0, so nothing overflows.

A part of which every t is -inf, or that has no t, is ``(-inf, 0)`` and adds nothing. Of a whole row
of -inf the sum is NaN, as that of ``exp(t - max t)`` is, and so are those with +inf or NaN.

Values are whatever the namespace ``m`` of scalar functions takes, as for `Operator.scalar`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOWEST = float("-inf")


def base(top: Any, m: Any) -> Any:
    """What a part subtracts in its exponentials: its maximum, but 0 where that is -inf."""
    return m.where(top == LOWEST, 0.0, top)


def merged(
    top: Any,
    total: Any,
    largest: Callable[[Any], Any],
    added: Callable[[Any], Any],
    m: Any,
) -> tuple[Any, Any]:
    """The maximum and the sum of a row from those of its parts.

    Args:
        top: the maximum of a part.
        total: its sum of exponentials below `base` of that.
        largest: takes a value of each part to the largest one; NaN wins.
        added: takes a value of each part to their sum.
        m: the namespace of scalar functions.
    """
    whole = largest(top)
    return whole, added(total * m.exp(top - whole))


__all__ = ["base", "merged"]
