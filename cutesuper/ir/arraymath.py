"""The namespace ``m`` of `Operator.scalar` over NumPy arrays of float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class _Library(type):
    def __getattr__(cls, name: str) -> Any:
        """NumPy's function (``arcsin`` before NumPy 2), or Python's for each element."""
        found = getattr(np, name, None) or getattr(np, f"arc{name[1:]}", None)
        return found or np.vectorize(getattr(math, name), otypes=[np.float64])


class ArrayMath(metaclass=_Library):
    """IEEE arithmetic: undefined results are NaN, results that are too large are infinite."""

    maximum, minimum, where = np.maximum, np.minimum, np.where
    div, pow = np.true_divide, np.power

    @staticmethod
    def rsqrt(x: Array) -> Array:
        """1 / sqrt(x)."""
        return 1.0 / np.sqrt(x)

    @staticmethod
    def sigmoid(x: Array) -> Array:
        """1 / (1 + e^-x)."""
        return 1.0 / (1.0 + np.exp(-x))

    @staticmethod
    def step(x: Array) -> Array:
        """1 where x > 0, else 0."""
        return np.where(x > 0, 1.0, 0.0)

    @staticmethod
    def at_least(x: Array, y: Array) -> Array:
        """1 where x >= y, else 0."""
        return np.where(x >= y, 1.0, 0.0)

    @staticmethod
    def kept(condition: Array, x: Array, other: float) -> Array:
        """x where the condition is 1, ``other`` elsewhere."""
        return np.where(condition > 0.5, x, other)

    @staticmethod
    def position(n: Any) -> Any:
        """Integers as positions."""
        return np.asarray(n)
