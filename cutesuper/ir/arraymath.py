"""The namespace ``m`` of `Operator.scalar` over NumPy arrays of float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _each(f: Callable[[float], float]) -> Callable[[Array], Array]:
    return np.vectorize(f, otypes=[np.float64])


class ArrayMath:
    """IEEE arithmetic: undefined results are NaN, results that are too large are infinite."""

    exp, log, sqrt, tanh = np.exp, np.log, np.sqrt, np.tanh
    log1p, expm1, sin, cos = np.log1p, np.expm1, np.sin, np.cos
    asin, acos, atan = np.arcsin, np.arccos, np.arctan
    sinh, cosh, asinh, acosh, atanh = np.sinh, np.cosh, np.arcsinh, np.arccosh, np.arctanh
    floor, round = np.floor, np.round
    maximum, minimum, where = np.maximum, np.minimum, np.where
    div = np.true_divide
    erf = staticmethod(_each(math.erf))
    erfc = staticmethod(_each(math.erfc))

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
