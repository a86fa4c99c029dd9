"""The finite field with the operations that block programs need: loads, stores, masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import VerificationError
from cutesuper.ir.field import (
    LARGEST,
    FieldAlgebra,
    FieldValue,
    NoNumber,
    Primes,
    Residues,
    align,
    residue,
    uniform_residues,
)
from cutesuper.ir.operators.base import Attributes, Operator, lookup
from cutesuper.verify.integers import Places
from cutesuper.verify.source import names_of
from cutesuper.verify.tiles import Mapped, Window

Valid = tuple[tuple[str, ...], NDArray[np.bool_]]


def draw(
    shape: tuple[int, ...], seed: Sequence[int], with_q: bool, primes: Primes = LARGEST
) -> FieldValue:
    """A uniform tensor with dimensions named as in `names_of`; p does not depend on ``with_q``."""
    names = names_of(shape)
    squeezed = tuple(n for n in shape if n != 1)

    def residues(m: int) -> Residues:
        return uniform_residues(np.random.default_rng([*seed, m]), m, squeezed)

    return FieldValue(names, residues(primes.p), residues(primes.q) if with_q else None)


def _kept_zero(value: FieldValue, x: FieldValue) -> FieldValue:
    """A function of x, set to 0 where x is 0."""
    zero = np.uint64(0)
    q = None
    if value.q is not None and x.q is not None:
        q = np.where((x.q == zero) & ~x.gone(), zero, value.q)
    return value.like(value.dims, np.where(x.p == zero, zero, value.p), q)


@dataclass(frozen=True)
class Undefined:
    """Arguments at which numbers may have no value.

    Attributes:
        every: the arguments of functions that not all numbers have (sqrt, log), and denominators
            that may be 0 for many inputs: residues, each once.
        doubtful: those of them that are not known to be positive.
        fixed: those of them that are arguments of functions that have values in between numbers
            other than 0 and infinity.
    """

    every: Residues
    doubtful: Residues
    fixed: Residues

    def same(self, other: Undefined, scales: Iterable[float], p: int) -> bool:
        """True if the doubtful residues of each program occur in the other.
        Once multiplied or divided by one of some numbers, but for ``fixed`` ones: positive numbers
        change neither where a denominator is 0 nor where an argument is negative. ``p`` is the
        prime of the residues."""
        factors = [residue(s, p) for s in scales if s > 0]
        factors += [pow(f, -1, p) for f in factors]
        return self._within(other, factors, p) and other._within(self, factors, p)

    def _within(self, other: Undefined, factors: Sequence[int], p: int) -> bool:
        if not np.isin(self.fixed, other.every, assume_unique=True).all():
            return False
        left = self.doubtful
        for f in (1, *factors):
            if left.size:
                scaled = (left.astype(object) * f % p).astype(np.uint64)
                left = left[~np.isin(scaled, other.every)]
        return not left.size


NOWHERE = Undefined(*[np.zeros(0, np.uint64)] * 3)


def _elements(values: list[FieldValue]) -> Residues:
    """The different residues of some values, in order; `numpy.unique` imports `numpy.ma`: 10 ms."""
    seen = (x.p[~x.gone()] if x.masked else np.ravel(x.p) for x in values)
    ordered = np.sort(np.concatenate([NOWHERE.every, *seen]))
    return ordered[np.diff(ordered, prepend=~ordered[:1]) != 0]


FieldValues = tuple[FieldValue, ...]
Place = tuple[int, tuple[str, ...]]


def _place(x: FieldValue) -> Place:
    """Address of a value's residues, with the names of their dimensions."""
    return id(x.p), x.dims


class FieldDomain(FieldAlgebra):
    """`FieldAlgebra` plus conditions, and loads and stores of tensors that are cut into parts.

    Args:
        seed, shifts, primes: as for `FieldAlgebra`.
        failing: share of conditions that do not hold.
        whole: rows that a condition hides as a whole have values (``docs/verification.md``,
            "Masks"); False: they are `NoNumber` where ``strict``.

    Attributes:
        hid: for each operation that hides by a condition, true if it hid anything.
        strict: -inf minus -inf is `NoNumber`, as PyTorch's is NaN, unless `empty_rows`.
        empty_rows: rows may be hidden as a whole.
    """

    def __init__(
        self,
        seed: int = 0,
        shifts: np.random.Generator | None = None,
        primes: Primes = LARGEST,
        failing: float = 0.25,
        whole: bool = True,
    ) -> None:
        super().__init__(seed, shifts, primes)
        self._whole = whole
        self.strict = self.empty_rows = False
        self.hid: list[bool] = []
        self._fixed: list[FieldValue] = []
        self._also: list[FieldValue] = []
        #: by the `_place` of a value, with the value, which keeps its residues there
        self._divisors: dict[Place, tuple[FieldValue, FieldValues]] = {}
        self._factors: dict[Place, tuple[FieldValue, FieldValues]] = {}
        self._failing = np.uint64(failing * primes.p)
        self._padding = np.random.default_rng(seed + 1)
        self._padded: dict[tuple[int, tuple[int, ...]], tuple[Residues, Residues]] = {}

    def elementwise(self, kind: str, args: list[FieldValue], attributes: Attributes) -> FieldValue:
        """An element-wise operator of the table. Raises DivisionByZero and Unbounded."""
        operator = lookup(kind)
        value = operator.symbolic(self, args, attributes)
        if operator.keeps_zero:
            value = _kept_zero(value, args[0])
        masked = any(x.masked for x in args)
        flat = operator.flat or value.flat
        if operator.above_zero and not masked and not flat:
            value = replace(value, positive=True)
        if operator.flat:
            value = replace(value, flat=True)
        if self.records:
            self._record(operator, value, args)
        if masked or operator.hides:
            gone = operator.hidden(self, args, attributes)
            if gone is not None:
                value = value.hide(align(gone.p != 0, gone.dims, value.dims))
            if operator.hides:
                self.empty_rows |= self._whole and operator.empties
                self.hid.append(bool(value.gone().any()))
        return value

    def _record(self, operator: Operator, value: FieldValue, args: list[FieldValue]) -> None:
        """Note arguments at which an operator may have no value.
        With `_also`, for a quotient of a quotient x / a / b the product a b, and for x / (a b) the
        factors a and b: they are 0 at the same inputs."""
        if operator.partial:
            self.partial += args
            self._fixed += [] if operator.partial_by_sign else args
        if not operator.multiplies and not operator.divides:
            return
        over, factors = (
            [noted[_place(x)][1] if _place(x) in noted else () for x in args]
            for noted in (self._divisors, self._factors)
        )
        divisors = [*over[0], *(args[1:] if operator.divides else over[1])]
        if divisors:
            whole = reduce(self.mul, divisors)
            self._divisors[_place(value)] = value, (whole,)
            self._also.append(whole)
        if operator.divides:
            self._also += factors[1]
        elif value.flat:
            self._factors[_place(value)] = value, (*args, *factors[0], *factors[1])

    def undefined(self) -> Undefined:
        """The arguments so far at which numbers may have no value."""
        doubtful, fixed = (
            _elements([x for x in known if x.flat or not x.positive])
            for known in (self.partial, self._fixed)
        )
        return Undefined(_elements([*self.partial, *self._also]), doubtful, fixed)

    def gone(self, x: FieldValue) -> FieldValue:
        """1 where x is -inf, 0 elsewhere."""
        return FieldValue(x.dims, x.gone().astype(np.uint64))

    def fails(self, x: FieldValue) -> FieldValue:
        """1 where x as a condition does not hold, else 0.
        A constant holds above 0.5; others hold where x is 1, and not where x is 0 or -inf; for
        other residues a random function decides, the same one everywhere."""
        known = [number for number, v in self._constants.items() if v.p is x.p]
        if known:
            return FieldValue((), np.array(known[0] <= 0.5, dtype=np.uint64))
        drawn = self.opaque("condition", x).p >= self._failing
        holds = (drawn | (x.p == 1)) & (x.p != 0) & ~x.gone()
        return FieldValue(x.dims, (~holds).astype(np.uint64))

    def sub(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """Difference x - y. Raises Unbounded and NoNumber."""
        difference = super().sub(x, y)
        if self.strict and not self.empty_rows and y.masked and y.gone().any():
            raise NoNumber("a masked element (-inf) is subtracted from another")
        return difference

    def rename(self, x: FieldValue, names: Mapping[str, str]) -> FieldValue:
        """x with its dimensions renamed."""
        return x.like(tuple(names.get(d, d) for d in x.dims), x.p, x.q)

    def without_q(self, x: FieldValue) -> FieldValue:
        """x without residues mod q, for uses that need only those mod p."""
        return x.without_q()

    def masked(self, x: FieldValue, valid: Valid, other: float = 0.0) -> FieldValue:
        """x, another number where an element does not exist. Raises VerificationError."""
        missing = [d for d in valid[0] if d not in x.dims]
        if missing:
            raise VerificationError(f"a label is reduced after its axis {missing[0]} was")
        keep = align(valid[1], valid[0], x.dims)
        p, q = (np.uint64(residue(other, m)) for m in (self.primes.p, self.primes.q))
        second = None if x.q is None else np.where(keep, x.q, q)
        return x.like(x.dims, np.where(keep, x.p, p), second)

    def mask(
        self, x: FieldValue, names: tuple[str, ...], keep: NDArray[np.bool_], operator: Operator
    ) -> FieldValue:
        """A masking operator applied to x: elements are kept where ``keep`` holds.
        ``keep`` has the dimensions ``names``."""
        self.empty_rows |= operator.empties
        return x.replace(align(~keep, names, x.dims), operator.fill)

    def literal(self, names: tuple[str, ...], numbers: NDArray[np.float64]) -> FieldValue:
        """Literal numbers; NaN is a residue like any other, the same one everywhere."""
        above = bool((numbers > 0).all())
        p, q = (np.zeros(numbers.shape, np.uint64) for _ in range(2))
        for number in np.unique(numbers):
            nan = np.isnan(number)
            one = self.opaque("nan", self.constant(0.0)) if nan else self.constant(float(number))
            where = np.isnan(numbers) if nan else numbers == number
            assert one.q is not None  # numbers have both
            p[where], q[where] = one.p, one.q
        return FieldValue(names, p, q, positive=above, flat=not above)

    def larger(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """`max` of two values of the same dimensions."""

        def stack(r: Residues, s: Residues) -> Residues:
            return np.stack([r, align(s, y.dims, x.dims)])

        q = None if x.q is None or y.q is None else stack(x.q, y.q)
        known = x.masked or y.masked, x.positive and y.positive, x.flat or y.flat
        return self.max(FieldValue(("pair", *x.dims), stack(x.p, y.p), q, *known), ("pair",))

    def turned(
        self, x: FieldValue, dim: str, places: NDArray[np.int64], signs: NDArray[np.float64]
    ) -> FieldValue:
        """x with the elements of these places along a dimension, times 1 or -1, never 0."""
        axis = x.dims.index(dim)
        q = None if x.q is None else x.q.take(places, axis)
        moved = x.like(x.dims, x.p.take(places, axis), q)
        return replace(self.mul(moved, self.literal((dim,), signs)), flat=x.flat)

    def gather(
        self, x: FieldValue, integers: NDArray[np.int64], operator: Operator, shape: tuple[int, ...]
    ) -> FieldValue:
        """Parts of x that integers name, as a tensor of this shape."""

        def gathered(r: Residues) -> Residues:
            whole = r.reshape(-1, *operator.element(integers.shape, shape))
            return whole[integers].reshape([n for n in shape if n != 1])

        q = None if x.q is None else gathered(x.q)
        return x.like(names_of(shape), gathered(x.p), q)

    def put(
        self,
        x: FieldValue,
        places: Places,
        rows: FieldValue,
        shape: tuple[int, ...],
    ) -> FieldValue:
        """x with rows of this shape at some places."""
        whole = places.whole(x.sizes, shape)
        inside, at = places.inside(whole)
        own = {*names_of(whole), *names_of(shape)}
        beside = tuple(d for d in dict.fromkeys((*x.dims, *rows.dims)) if d not in own)
        more = tuple((x.sizes | rows.sizes)[d] for d in beside)

        def spread(r: Residues, dims: tuple[str, ...], to: tuple[int, ...]) -> Residues:
            squeezed = align(r, dims, (*beside, *names_of(to)))
            full = np.broadcast_to(squeezed, (*more, *(n for n in to if n != 1)))
            return full.reshape((*more, *to))

        def put(r: Residues, s: Residues) -> Residues:
            made, first = spread(r, x.dims, whole).copy(), len(beside)
            axes = [first + d for d in places.dims]
            given = np.moveaxis(spread(s, rows.dims, shape), axes[0], 0)
            np.moveaxis(made, axes, list(range(len(axes))))[at] = given[inside]
            return made.reshape((*more, *(n for n in whole if n != 1)))

        q = None if x.q is None or rows.q is None else put(x.q, rows.q)
        known = x.masked or rows.masked, x.positive and rows.positive, x.flat or rows.flat
        return FieldValue((*beside, *names_of(whole)), put(x.p, rows.p), q, *known)

    def load(self, x: FieldValue, mapped: Sequence[Mapped], window: Window) -> FieldValue:
        """Tiles of a tensor; padding holds random residues."""
        names = tuple(p for m in mapped for p in m.parts)

        def tiles(r: Residues, modulus: int) -> Residues:
            whole = self._pad(r, mapped, modulus).reshape([n for m in mapped for n in m.extents])
            return whole[tuple(slice(*window[n]) if n in window else slice(None) for n in names)]

        q = None if x.q is None else tiles(x.q, self.primes.q)
        return x.like(names, tiles(x.p, self.primes.p), q)

    def store(
        self, x: FieldValue, mapped: Sequence[Mapped], window: Window, into: FieldValue | None
    ) -> FieldValue:
        """Store tiles at their places; ``into`` holds the tiles that earlier windows stored."""
        names = tuple(p for m in mapped for p in m.parts)
        q = None if x.q is None else align(x.q, x.dims, names)
        x = x.like(names, align(x.p, x.dims, names), q)
        if not window:
            return x
        if into is None:
            covered = [n for m in mapped for n in m.extents]
            q = None if x.q is None else np.zeros(covered, np.uint64)
            into = x.like(names, np.zeros(covered, np.uint64), q)
        place = tuple(slice(*window[n]) if n in window else slice(None) for n in names)
        into.p[place] = x.p
        if into.q is not None and x.q is not None:
            into.q[place] = x.q
        return into

    def finish(self, x: FieldValue, mapped: Sequence[Mapped]) -> FieldValue:
        """The tensor behind stored tiles, without the padding."""
        covered = [prod(m.extents) for m in mapped]
        crop = tuple(slice(m.extent) if m.extent != 1 else 0 for m in mapped)

        def join(r: Residues) -> Residues:
            return r.reshape(covered)[crop]

        names = names_of(tuple(m.extent for m in mapped))
        return x.like(names, join(x.p), None if x.q is None else join(x.q))

    def _pad(self, r: Residues, mapped: Sequence[Mapped], modulus: int) -> Residues:
        covered = tuple(prod(m.extents) for m in mapped)
        shape = tuple(m.extent for m in mapped)
        if covered == shape:
            return r
        key = (id(r), covered)
        if key not in self._padded:
            out = np.empty(covered, dtype=np.uint64)
            out[tuple(slice(n) for n in shape)] = r.reshape(shape)
            for axis, n in enumerate(shape):
                beyond = out[(slice(None),) * axis + (slice(n, None),)]
                beyond[...] = self._padding.integers(1, modulus, beyond.shape, dtype=np.uint64)
            self._padded[key] = (out, r)  # r is kept so that its id stays its own
        return self._padded[key][0]
