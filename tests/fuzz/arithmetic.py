"""Two kinds of numbers that formulas are evaluated on: rounded ones, and ones with an error bound.

Both offer the same few operations on float64 tensors, which `tests.fuzz.formulas` is written in.
`Numbers` rounds as it is told: not at all, to the nearest, or at random. `Balls` carries along how
far a value may be off if every operation is rounded in whatever way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]

#: terms of a sum that one accumulator adds up one after the other
CHAIN = 256
#: units in the last place by which a function of the hardware may be off in float32
FUNCTION_ULP = 8.0


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """The largest error of what underflows; float32 and bfloat16 are flushed to zero."""
    return torch.finfo(dtype).smallest_normal * (1.0 if dtype != torch.float16 else 2.0**-11)


def reach(dtype: torch.dtype) -> float:
    """The largest number."""
    return torch.finfo(dtype).max


class Numbers:
    """Float64 tensors, rounded after each operation.

    Args:
        rounding: "none", "nearest" or "random".
        seed: of random roundings.
    """

    def __init__(self, rounding: str = "none", seed: int = 0) -> None:
        self.rounding = rounding
        self._generator = torch.Generator().manual_seed(seed)

    def given(self, x: Tensor) -> Tensor:
        """An input."""
        return x.double()

    def constant(self, value: float) -> Tensor:
        """A number of the program, of which kernels and PyTorch take the nearest in float32."""
        x = torch.tensor(value, dtype=torch.float64)
        return x if self.rounding == "none" else x.float().double()

    def function(self, f: Function, *args: Tensor, exact: bool = False) -> Tensor:
        """An element-wise function; ``exact`` ones choose or compare."""
        y = f(*args)
        return y if exact else self._noise(y, y.abs(), FUNCTION_ULP / 4)

    def sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum, with the dimension."""
        return self._noise(x.sum(dim, keepdim=True), x.abs().sum(dim, keepdim=True), 1.0)

    def scan(self, x: Tensor, reverse: bool) -> Tensor:
        """Sums along the last dimension up to each element, or from each on."""
        return self._noise(_scanned(x, reverse), _scanned(x.abs(), reverse), 1.0)

    def max(self, x: Tensor, dim: int) -> Tensor:
        """Maximum, with the dimension."""
        return x.amax(dim, keepdim=True)

    def place(self, x: Tensor, dim: int) -> Tensor:
        """Place of the maximum, with the dimension."""
        return x.argmax(dim, keepdim=True).double()

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Product of matrices."""
        found = x @ y
        return found if self.rounding == "none" else self._noise(found, x.abs() @ y.abs(), 1.0)

    def where(self, keep: Tensor, x: Tensor, other: float) -> Tensor:
        """x where something holds that has no error."""
        return torch.where(keep, x, other)

    def move(self, f: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Apply an operator that only moves elements."""
        return f(*args)

    def store(self, x: Tensor, dtype: torch.dtype, limited: bool = True) -> Tensor:
        """Rounded to an element type; not ``limited``: with the range of float32."""
        if self.rounding == "none":
            return x
        if self.rounding == "nearest" and limited:
            return x.to(dtype).double()
        if self.rounding == "nearest":
            return x.float().double()
        u, tiny = unit(dtype), smallest(dtype if limited else torch.float32)
        r = 2 * torch.rand(x.shape, generator=self._generator, dtype=torch.float64) - 1
        return torch.where(x.isfinite() & (x != 0), x + r * (u * x.abs() + tiny), x)

    def value(self, x: Tensor) -> Tensor:
        """The value as plain numbers."""
        return x

    def _noise(self, x: Tensor, size: Tensor, ulp: float) -> Tensor:
        if self.rounding == "none":
            return x
        r = 2 * torch.rand(x.shape, generator=self._generator, dtype=torch.float64) - 1
        noisy = x + r * (ulp * unit(torch.float32)) * size
        return torch.where(noisy.isfinite(), noisy, x)


@dataclass(frozen=True)
class Ball:
    """Numbers and how far each may be off; infinite: nothing is known."""

    v: Tensor
    e: Tensor


@dataclass(frozen=True)
class Places(Ball):
    """Places along a dimension, and all those that may be right: ``allowed`` of the elements."""

    allowed: Tensor
    dim: int


class Balls:
    """Numbers with bounds, to first order where that is all there is.

    Sums take the worst case of errors, so a bound grows with the number of terms; a function is
    looked at where its argument is and at both ends of what that may be. Where it jumps, the jump
    is the error.
    """

    def given(self, x: Tensor) -> Ball:
        """An input."""
        v = x.double()
        return Ball(v, torch.zeros_like(v))

    def constant(self, value: float) -> Ball:
        """A number of the program; it is off by as much as the nearest one in float32 is."""
        v = torch.tensor(value, dtype=torch.float64)
        return self._ball(v, (v.float().double() - v).abs())

    def function(self, f: Function, *args: Ball, exact: bool = False) -> Ball:
        """An element-wise function, at all ends that its arguments have together."""
        v = f(*(a.v for a in args))
        e = torch.zeros_like(v)
        for signs in product((-1.0, 0.0, 1.0), repeat=len(args)):
            if any(signs):
                end = f(*(_end(a, s) for a, s in zip(args, signs, strict=True)))
                e = torch.maximum(e, _distance(end, v))
        e = self._blurred(e, args)
        if exact:
            return self._ball(v, e)
        own = FUNCTION_ULP * unit(torch.float32) * _size(v) + smallest(torch.float32)
        return self._ball(v, torch.where((v == 0) & (e == 0), 0.0, e + own))

    def sum(self, x: Ball, dim: int) -> Ball:
        """Sum, with the dimension."""
        own = min(x.v.shape[dim], CHAIN) * unit(torch.float32)
        e = x.e.sum(dim, keepdim=True) + own * _size(x.v).sum(dim, keepdim=True)
        return self._ball(x.v.sum(dim, keepdim=True), e)

    def scan(self, x: Ball, reverse: bool) -> Ball:
        """Sums along the last dimension up to each element, or from each on."""
        own = min(x.v.shape[-1], CHAIN) * unit(torch.float32)
        e = _scanned(x.e, reverse) + own * _scanned(_size(x.v), reverse)
        return self._ball(_scanned(x.v, reverse), e)

    def max(self, x: Ball, dim: int) -> Ball:
        """Maximum, with the dimension."""
        v = x.v.amax(dim, keepdim=True)
        low, high = ((x.v + s * x.e).amax(dim, keepdim=True) for s in (-1.0, 1.0))
        return self._ball(v, torch.maximum(_distance(low, v), _distance(high, v)))

    def place(self, x: Ball, dim: int) -> Places:
        """Place of the maximum: the first of exact elements, else any that may be the largest."""
        number = torch.where(x.v.isnan(), torch.inf, x.v.clamp(-1e308, 1e308))
        low, high = ((number + s * x.e).nan_to_num(s * torch.inf, torch.inf, -torch.inf)
                     for s in (-1.0, 1.0))  # fmt: skip
        allowed = high >= low.amax(dim, keepdim=True)
        v = x.v.argmax(dim, keepdim=True)
        first = torch.zeros_like(allowed).scatter(dim, v, True)
        exact = (x.e == 0).all(dim, keepdim=True)
        return Places(v.double(), torch.zeros_like(v).double(),
                      torch.where(exact, first, allowed), dim)  # fmt: skip

    def matmul(self, x: Ball, y: Ball) -> Ball:
        """Product of matrices."""
        own = min(x.v.shape[-1], CHAIN) * unit(torch.float32)
        a, b = _size(x.v), _size(y.v)
        e = a @ y.e + x.e @ (b + y.e) + own * (a @ b)
        return self._ball(x.v @ y.v, e)

    def where(self, keep: Tensor, x: Ball, other: float) -> Ball:
        """x where something holds that has no error."""
        return Ball(torch.where(keep, x.v, other), torch.where(keep, x.e, 0.0))

    def move(self, f: Callable[..., Tensor], *args: Ball) -> Ball:
        """Apply an operator that only moves elements."""
        return Ball(f(*(a.v for a in args)), f(*(a.e for a in args)))

    def store(self, x: Ball, dtype: torch.dtype, limited: bool = True) -> Ball:
        """Rounded to an element type; not ``limited``: with the range of float32."""
        kind = dtype if limited else torch.float32
        e = x.e + unit(dtype) * (_size(x.v) + x.e) + smallest(kind)
        e = torch.where((x.v == 0) & (x.e == 0), 0.0, e)  # zeros are zeros
        beyond = x.v.isfinite() & (x.v.abs() + x.e > reach(kind))
        return self._ball(x.v, torch.where(beyond, torch.inf, e))

    def value(self, x: Ball) -> Tensor:
        """The value as plain numbers."""
        return x.v

    def _blurred(self, e: Tensor, args: tuple[Ball, ...]) -> Tensor:
        """Nothing is known of what nothing is known of."""
        for a in args:
            e = torch.where(a.e.isinf().broadcast_to(e.shape), torch.inf, e)
        return e

    def _ball(self, v: Tensor, e: Tensor) -> Ball:
        return Ball(v, torch.where(e.isnan(), torch.inf, e).broadcast_to(v.shape))


def _scanned(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)


def _end(x: Ball, sign: float) -> Tensor:
    return x.v + sign * x.e if sign else x.v


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """0 where both are the same infinity or NaN."""
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (x - y).abs())


def _size(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0.0)


#: either of the two
Arithmetic = Any
