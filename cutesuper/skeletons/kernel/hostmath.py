"""The namespace ``m`` of `Operator.scalar` over Python floats: expressions at plan time."""

from __future__ import annotations

import math
from typing import Any


class _Library(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(math, name)


class HostMath(metaclass=_Library):
    """The functions in plain Python, those of `math` under their names.
    Raise ArithmeticError or ValueError where the device gives inf or NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)

    round = staticmethod(round)
    maximum = staticmethod(max)
    minimum = staticmethod(min)

    @staticmethod
    def rsqrt(x: float) -> float:
        """1 / sqrt(x)."""
        return 1.0 / math.sqrt(x)

    @staticmethod
    def sigmoid(x: float) -> float:
        """1 / (1 + e^-x)."""
        return 1.0 / (1.0 + math.exp(-x))

    @staticmethod
    def step(x: float) -> float:
        """1 where x > 0, else 0."""
        return float(x > 0)

    @staticmethod
    def at_least(x: float, y: float) -> float:
        """1 where x >= y, else 0."""
        return float(x >= y)

    @staticmethod
    def kept(condition: float, x: float, other: float) -> float:
        """x if the condition is 1, else another number."""
        return x if condition > 0.5 else other

    @staticmethod
    def where(condition: bool, x: float, y: float) -> float:
        """x if the condition holds, else y."""
        return x if condition else y

    @staticmethod
    def position(n: int) -> int:
        """An integer as a position."""
        return n

    @staticmethod
    def div(x: float, y: float) -> float:
        """x / y."""
        return x / y
