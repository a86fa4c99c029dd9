"""The namespace ``m`` of `Operator.scalar` over Python floats: expressions at plan time."""

from __future__ import annotations

import math


class HostMath:
    """The functions in plain Python; raise ArithmeticError or ValueError where the device gives inf
    or NaN."""

    exp = staticmethod(math.exp)
    log = staticmethod(math.log)
    sqrt = staticmethod(math.sqrt)
    tanh = staticmethod(math.tanh)
    erf = staticmethod(math.erf)
    log1p = staticmethod(math.log1p)
    expm1 = staticmethod(math.expm1)
    sin = staticmethod(math.sin)
    cos = staticmethod(math.cos)
    asin = staticmethod(math.asin)
    acos = staticmethod(math.acos)
    atan = staticmethod(math.atan)
    sinh = staticmethod(math.sinh)
    cosh = staticmethod(math.cosh)
    asinh = staticmethod(math.asinh)
    acosh = staticmethod(math.acosh)
    atanh = staticmethod(math.atanh)
    erfc = staticmethod(math.erfc)
    floor = staticmethod(math.floor)
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
