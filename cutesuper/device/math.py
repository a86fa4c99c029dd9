"""Scalar functions on fp32 registers: the namespace ``m`` that `Operator.scalar` is written over.

Values are fragments (``TensorSSA``), scalars (``Float32``) or Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

#: the largest Int32
MAX_POSITION = (1 << 31) - 1


class DeviceMath:
    """fp32 functions; ``fast`` uses the approximate special-function unit.

    The approximations are good to about 2 ulp of fp32 (e^x to more, the larger x is), not above the
    rounding of a 16-bit result. Kernels that store fp32 or multiply it use the accurate forms.
    tanh is accurate in all of them: 1 + tanh(u) of GELU and 1 - tanh(u)^2 of its slope cancel, and
    the unit's tanh, good to 2^-11 of itself, was 14% off in GELU at x = -2.9.
    """

    def __init__(self, fast: bool) -> None:
        self.fast = fast

    def __getattr__(self, name: str) -> Any:
        """An accurate function of the DSL.
        The approximate sine, for one, errs more the larger its argument is."""
        if name.startswith("_"):  # what the DSL asks of any object
            raise AttributeError(name)
        found = getattr(cute.math, name)
        return lambda x, *more: found(x) if not more else _of_each(found, x, *more)

    def exp(self, x: Any) -> Any:
        """e^x."""
        return cute.math.exp(x, fastmath=self.fast)

    def log(self, x: Any) -> Any:
        """Natural logarithm."""
        return cute.math.log(x, fastmath=self.fast)

    def sqrt(self, x: Any) -> Any:
        """Square root."""
        return cute.math.sqrt(x, fastmath=self.fast)

    def rsqrt(self, x: Any) -> Any:
        """Reciprocal square root."""
        return cute.math.rsqrt(x, fastmath=self.fast)

    def round(self, x: Any) -> Any:
        """The nearest integer; ties go to the even one."""
        return cute.math.roundeven(x)

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e^-x)."""
        return 1.0 / (1.0 + self.exp(-x))

    def step(self, x: Any) -> Any:
        """1 where x > 0, else 0 (for NaN too)."""
        if isinstance(x, cute.TensorSSA):
            return cute.where(x > 0.0, cute.full_like(x, 1.0), cute.full_like(x, 0.0))
        return Float32(Float32(x) > 0.0)

    def at_least(self, x: Any, y: Any) -> Any:
        """1 where x >= y, else 0 (for NaN too)."""
        return _each(_at_least, x, y)

    def kept(self, condition: Any, x: Any, other: float) -> Any:
        """x where the condition is 1, else ``other``, even if x is NaN."""
        return _each(_kept, condition, x, other)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y: fragments or scalars."""
        if not isinstance(condition, cute.TensorSSA):
            return choose(condition, x, y)
        values = [
            v if isinstance(v, cute.TensorSSA) else cute.full(condition.shape, v, Float32)
            for v in (x, y)
        ]
        return cute.where(condition, *values)

    def position(self, n: Any) -> Any:
        """A label as an Int32 position; -1, which is no position, if it does not fit into Int32."""
        if n.dtype is Int32:
            return n
        fits = (n >= 0) & (n <= MAX_POSITION)
        return Int32(select_(fits, Int32(n), Int32(-1)))

    def div(self, x: Any, y: Any) -> Any:
        """x / y."""
        if isinstance(y, int | float):
            return x * (1.0 / y)
        return x / y

    def fmod(self, x: Any, y: Any) -> Any:
        """The rest of x beside whole multiples of y, exactly; it has the sign of x."""
        return _of_each(cute.math.rem, x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger one; NaN wins, as in PyTorch."""
        return _each(nan_max, x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller one; NaN wins, as in PyTorch."""
        return _each(nan_min, x, y)


class ScoreMath(DeviceMath):
    """Functions of scores of 16-bit operands.

    Their tanh is the unit's own, good to 2^-11 of itself: it takes a third of the unit's time that
    the accurate one takes, and what scores are made of was rounded as coarsely.
    """

    def __init__(self) -> None:
        super().__init__(fast=True)

    def tanh(self, x: Any) -> Any:
        """Hyperbolic tangent."""
        return cute.math.tanh(x, fastmath=True)


def choose(condition: Any, x: Any, y: Any) -> Float32:
    """x where the condition holds, else y; both are computed, nothing branches."""
    return Float32(select_(condition, Float32(x), Float32(y)))


def nan_max(x: Any, y: Any) -> Float32:
    """max(x, y) of scalars, NaN if either is."""
    return Float32(cute.arch.fmax(Float32(x), Float32(y), nan=True))


def nan_min(x: Any, y: Any) -> Float32:
    """min(x, y) of scalars, NaN if either is."""
    return Float32(cute.arch.fmin(Float32(x), Float32(y), nan=True))


def _each(pick: Any, *args: Any) -> Any:
    """Apply a scalar function to scalars, or element by element to fragments and scalars."""
    fragment = next((v for v in args if isinstance(v, cute.TensorSSA)), None)
    if fragment is None:
        return pick(*args)
    out = cute.make_rmem_tensor(fragment.shape, Float32)
    for i in range(cute.size(fragment.shape)):
        out[i] = pick(*(_element(v, i) for v in args))
    return out.load()


def _of_each(function: Callable[..., Any], *args: Any) -> Any:
    """A function of the DSL, which takes scalars of one type."""
    return _each(lambda *values: Float32(function(*map(Float32, values))), *args)


def _at_least(x: Any, y: Any) -> Float32:
    return Float32(Float32(x) >= Float32(y))


def _kept(condition: Any, x: Any, other: Any) -> Float32:
    return choose(Float32(condition) > 0.5, x, other)


def _element(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, cute.TensorSSA) else x
