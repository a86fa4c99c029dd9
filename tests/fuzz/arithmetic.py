"""Two kinds of numbers that formulas are evaluated on: rounded ones, and ones with an error bound.

Both offer the same few operations on float64 tensors, which `tests.fuzz.formulas` is written in.
`Numbers` rounds as it is told: not at all, to the nearest, or at random. `Balls` carries along how
far a value may be off if every operation is rounded in whatever way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]

#: terms of a sum that one accumulator adds up one after the other
CHAIN = 256
#: times that a part of a sum may be as large as the sum
PARTS = 4.0
#: units in the last place by which a function of the hardware may be off in float32
FUNCTION_ULP = 8.0
#: a periodic function is largest or smallest here, and at every multiple of pi further on
TURNS: dict[Function, float] = {torch.sin: math.pi / 2, torch.cos: 0.0}


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

    def jump(self, f: Function, *args: Tensor, choice: bool = False) -> Tensor:
        """A function that jumps; ``choice``: where its first operand is one half."""
        return f(*args)

    def plus(self, f: Function, x: Tensor, y: Tensor) -> Tensor:
        """A sum or difference, which may be part of a longer one that is taken in any order."""
        return self._noise(self.function(f, x, y), _terms(x, y), 1.0)

    def any_order(self, found: Tensor, x: Tensor, dim: int) -> Tensor:
        """A product of elements, which may be multiplied in any order."""
        return found

    def sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum, with the dimension. PyTorch's reference may add up one term after the other, and
        roundings of equal terms have one sign: its softmax of 511 numbers, half of them 0, was off
        by 35 * 2^-24 of itself."""
        chain = float(min(x.shape[dim], CHAIN)) ** 0.5
        return self._noise(x.sum(dim, keepdim=True), x.abs().sum(dim, keepdim=True), chain)

    def scan(self, x: Tensor, reverse: bool) -> Tensor:
        """Sums along the last dimension up to each element, or from each on."""
        return self._noise(_scanned(x, reverse), _scanned(x.abs(), reverse), 1.0)

    def max(self, x: Tensor, dim: int) -> Tensor:
        """Maximum, with the dimension."""
        return x.amax(dim, keepdim=True)

    def largest(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """1 for elements that are the maximum along some dimensions, 0 for the others."""
        return (x >= x.amax(dims, keepdim=True)).double()

    def place(self, x: Tensor, dim: int) -> Tensor:
        """Place of the maximum, with the dimension."""
        return x.argmax(dim, keepdim=True).double()

    def first(self, x: Tensor) -> Tensor:
        """0 for each element, the place of the only one."""
        return torch.zeros_like(x)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Product of matrices."""
        found = x @ y
        return found if self.rounding == "none" else self._noise(found, x.abs() @ y.abs(), 1.0)

    def where(self, keep: Tensor, x: Tensor, other: float) -> Tensor:
        """x where something holds that has no error."""
        return torch.where(keep, x, other)

    def unknown(self, x: Tensor, where: Tensor) -> Tensor:
        """x, of which nothing is said there."""
        return x

    def unsure(self, x: Tensor) -> Tensor:
        """Where a number may be another one: nowhere."""
        return torch.zeros_like(x, dtype=torch.bool)

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

    def in_parts(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A value that may be rounded in parts, which are added up later."""
        return x

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
    looked at where its argument is, at both ends of what that may be, and where it turns in
    between. Where it jumps, the jump is the error; nothing is known of a quotient whose divisor
    may be on either side of zero.

    Attributes:
        jumped: a number may be on either side of a jump.
    """

    def __init__(self) -> None:
        self.jumped = False

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
        for turn in _turns(f, args[0]):
            e = torch.maximum(e, _distance(f(turn), v))
        if getattr(f, "func", f) is torch.div:  # or a partial: the whole part of a quotient
            pole = (args[1].e > 0) & (args[1].v.abs() <= args[1].e)
            e = torch.where(pole, torch.inf, e)
        e = self._blurred(e, args)
        if exact:
            return self._ball(v, e)
        own = FUNCTION_ULP * unit(torch.float32) * _size(v) + smallest(torch.float32)
        return self._ball(v, torch.where((v == 0) & (e == 0), 0.0, e + own))

    def jump(self, f: Function, *args: Ball, choice: bool = False) -> Ball:
        """A function that jumps; ``choice``: where its first operand is one half."""
        found = self.function(f, *args, exact=True)
        low, high = (_end(args[0], s) > 0.5 for s in (-1.0, 1.0))
        self.jumped |= bool((low != high if choice else found.e > 0).any())
        return found

    def plus(self, f: Function, x: Ball, y: Ball) -> Ball:
        """A sum or difference, which may be part of a longer one that is taken in any order: it is
        as far off as its terms are rounded, also where they cancel."""
        found = self.function(f, x, y)
        return self._ball(found.v, found.e + unit(torch.float32) * _terms(x.v, y.v))

    def any_order(self, found: Ball, x: Ball, dim: int) -> Ball:
        """A product of elements, which may be multiplied in any order.

        Of those that are larger than 1 alone it must not overflow, and of those that are smaller
        it must not vanish, or other factors make NaN, or nothing, of it.
        """
        size = _size(x.v) + torch.where(x.v.isfinite(), x.e, 0.0)
        large = size.clamp(min=1.0).log().sum(dim, keepdim=True)
        least = torch.where(size > 0, size, 1.0).clamp(max=1.0).log().sum(dim, keepdim=True)
        lost = least < math.log(smallest(torch.float32))
        lost &= found.v.abs() > smallest(torch.float32)
        lost |= large > math.log(reach(torch.float32))
        return self._ball(found.v, torch.where(lost, torch.inf, found.e))

    def sum(self, x: Ball, dim: int) -> Ball:
        """Sum, with the dimension."""
        e = x.e.sum(dim, keepdim=True)
        terms = _size(x.v).sum(dim, keepdim=True)
        return self._total(x.v.sum(dim, keepdim=True), e, terms, x.v.shape[dim])

    def scan(self, x: Ball, reverse: bool) -> Ball:
        """Sums along the last dimension up to each element, or from each on."""
        e, terms = _scanned(x.e, reverse), _scanned(_size(x.v), reverse)
        return self._total(_scanned(x.v, reverse), e, terms, x.v.shape[-1])

    def max(self, x: Ball, dim: int) -> Ball:
        """Maximum, with the dimension."""
        v = x.v.amax(dim, keepdim=True)
        low, high = ((x.v + s * x.e).amax(dim, keepdim=True) for s in (-1.0, 1.0))
        return self._ball(v, torch.maximum(_distance(low, v), _distance(high, v)))

    def largest(self, x: Ball, dims: Sequence[int]) -> Ball:
        """1 for elements that are the maximum, 0 for the others: the maximum is one of them."""
        low, high = x.v - x.e, x.v + x.e
        rows = high.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        two = rows.topk(min(2, rows.shape[-1])).values
        most, others = (two.select(-1, i).reshape(low.amax(dims, True).shape) for i in (0, -1))
        others = others if rows.shape[-1] > 1 else torch.full_like(others, -torch.inf)
        known = low >= torch.where(high == most, others, most)  # no other element is larger
        known |= high < low.amax(dims, keepdim=True)
        self.jumped |= not bool(known.all())
        v = (x.v >= x.v.amax(dims, keepdim=True)).double()
        return Ball(v, torch.where(known, 0.0, 1.0).double())

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

    def first(self, x: Ball) -> Places:
        """0 for each element, the place of the only one."""
        zero = torch.zeros_like(x.v)
        allowed = torch.zeros(x.v.shape, dtype=torch.bool)
        allowed[..., 0] = True
        return Places(zero, zero, allowed, -1)

    def matmul(self, x: Ball, y: Ball) -> Ball:
        """Product of matrices."""
        a, b = _size(x.v), _size(y.v)
        return self._total(x.v @ y.v, a @ y.e + x.e @ (b + y.e), a @ b, x.v.shape[-1])

    def where(self, keep: Tensor, x: Ball, other: float) -> Ball:
        """x where something holds that has no error."""
        return Ball(torch.where(keep, x.v, other), torch.where(keep, x.e, 0.0))

    def unknown(self, x: Ball, where: Tensor) -> Ball:
        """x, of which nothing is said there."""
        return Ball(x.v, torch.where(where, torch.inf, x.e))

    def unsure(self, x: Ball) -> Tensor:
        """Where a number may be another one."""
        return x.e > 0

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

    def in_parts(self, x: Ball, dtype: torch.dtype) -> Ball:
        """A value that may be rounded in parts, which are added up later: nothing is known of one
        whose parts may be too large."""
        beyond = x.v.isfinite() & (PARTS * x.v.abs() > reach(dtype))
        return self._ball(x.v, torch.where(beyond, torch.inf, x.e))

    def value(self, x: Ball) -> Tensor:
        """The value as plain numbers."""
        return x.v

    def _total(self, v: Tensor, e: Tensor, terms: Tensor, count: int) -> Ball:
        """A sum in any order, of so many terms: the sum of their sizes says how large it may be on
        the way."""
        e = e + min(count, CHAIN) * unit(torch.float32) * terms
        return self._ball(v, torch.where(terms > reach(torch.float32), torch.inf, e))

    def _blurred(self, e: Tensor, args: tuple[Ball, ...]) -> Tensor:
        """Nothing is known of what nothing is known of."""
        for a in args:
            e = torch.where(a.e.isinf().broadcast_to(e.shape), torch.inf, e)
        return e

    def _ball(self, v: Tensor, e: Tensor) -> Ball:
        return Ball(v, torch.where(e.isnan(), torch.inf, e).broadcast_to(v.shape))


def _scanned(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)


def _terms(x: Tensor, y: Tensor) -> Tensor:
    """The size of the larger of two terms."""
    return torch.maximum(_size(x), _size(y))


def _turns(f: Function, x: Ball) -> Iterator[Tensor]:
    """The first two turns of a function in what its argument may be: further ones are like them.
    The argument itself where there are none. All of a period has those next to 0, which are exact:
    none of 1e19 is."""
    if f not in TURNS:
        return
    whole = x.e >= math.pi
    first = ((x.v - x.e - TURNS[f]) / math.pi).ceil() * math.pi + TURNS[f]
    first = torch.where(whole, TURNS[f], first)
    for turn in (first, first + math.pi):
        yield torch.where(whole | (turn <= x.v + x.e), turn, x.v)


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
