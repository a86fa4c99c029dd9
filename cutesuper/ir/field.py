"""A finite field that gives every operator a second, exact meaning.

A value is a tensor of residues mod p, and mod q until it has gone through an exponential, where p
and q are primes and ``p = 2 q + 1``. Because q divides p - 1, ``exp(x) = OMEGA^x mod p`` with x
read mod q is a homomorphism from addition mod q to multiplication mod p, as the real exponential is
from sums to products (the construction of Mirage, arXiv:2405.05751, section 5; the distribution of
inputs and the bound are our own, see ``docs/verification.md``). Constants of a program may be 0, or
equal, modulo one pair of primes; so there are many pairs, and `draw_primes` draws one.

An element may be -inf, where a mask hides it. It is marked by `HIDDEN`, which is not a residue, and
0 mod q. It stays -inf in sums, and in products and quotients with values known to be positive, as
the scale of attention is; a factor that may be negative raises `Unbounded`. Its exponential is 0
and a maximum ignores it. -inf minus -inf is -inf: a part of a row that is hidden as a whole has no
maximum to subtract, and its exponentials are 0. A value that would be +inf raises `Unbounded`.

Dimensions are *named*, so operands meet by name: ``{M, K} * {K} -> {M, K}``. The verifier names the
parts of split dimensions (``K.loop``, ``K.tile``), the search names labels.

Everything here is NumPy; residues are uint64, so that a product of two fits without a carry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import CutesuperError

#: generates the subgroup of order q (the squares) of the units mod p
OMEGA = 4
#: marks -inf among residues mod p: above all primes
HIDDEN = 2**31 - 1

Residues = NDArray[np.uint64]

_U = np.uint64
_HIDDEN = _U(HIDDEN)
_LOW = _U(0xFFFF)
_16 = _U(16)
#: below this many products the limbs cost more than multiplying element by element
_SMALL_MATMUL = 4096
#: float64 holds sums of this many products of 17-bit limbs (Karatsuba's middle term) exactly
_EXACT_TERMS = 1 << 19
#: limbs of an operand are made in pieces of about this many elements, which fit the cache
_LIMB_CHUNK = 1 << 18
#: with at most this many rows four limb products beat three and an addition
_SKINNY = 64


class DivisionByZero(CutesuperError, ArithmeticError):
    """A denominator, or a number that is not 0, is zero mod p or mod q: the caller draws again.

    Attributes:
        node: the node of a kernel graph that has no value; None for block programs.
    """

    node: int | None = None


class Unbounded(DivisionByZero):
    """A masked element is used where the result has no value, or would not be -inf.

    It is subtracted from a number, used as a divisor, multiplied by another masked element or by a
    factor that may be negative, or passed to a function that has no value there.
    """


class NoNumber(DivisionByZero):
    """-inf minus -inf in a kernel graph; another draw, which hides less, may avoid it."""


class Primes(NamedTuple):
    """A prime q for which ``p = 2 q + 1`` is one too; both are below 2^31."""

    q: int

    @property
    def p(self) -> int:
        return 2 * self.q + 1

    def tells_apart(self, numbers: Iterable[float]) -> bool:
        """True if different numbers have different residues, 0, 1 and all negatives included."""
        different = {0.0, 1.0, -1.0}
        for number in numbers:
            different |= {number, -number}
        return all(
            len({residue(n, m) for n in different}) == len(different) for m in (self.p, self.q)
        )


#: the largest pair below 2^31, for uses that decide nothing
LARGEST = Primes(1073741789)
#: the smallest pair that is drawn; there are 198,763 of them
SMALLEST = Primes(1006632983)
#: candidates that are examined together
_CANDIDATES = 512
#: few candidates are left for the test after division by these; 2 and 3 never divide one
_SMALL = np.array([5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71], np.int64)
#: the test of Miller and Rabin is a proof below 4,759,123,141 for these bases (G. Jaeschke, "On
#: strong pseudoprimes to several bases", Mathematics of Computation 61, 1993)
_BASES = (2, 7, 61)


def draw_primes(seed: Sequence[int], numbers: Iterable[float] = ()) -> Primes:
    """A uniformly drawn pair from `SMALLEST` to `LARGEST` that tells numbers apart.

    Args:
        seed: equal seeds (and numbers) give equal pairs.
        numbers: the constants of a program.
    """
    rng, known = np.random.default_rng([*seed, 11]), tuple(numbers)
    low, high = SMALLEST.q // 6, LARGEST.q // 6 + 1
    while True:
        q = 6 * rng.integers(low, high, _CANDIDATES) + 5  # else 2 or 3 divides q or p
        rough = (q[:, None] % _SMALL != 0) & ((2 * q[:, None] + 1) % _SMALL != 0)
        for pair in map(Primes, q[rough.all(1)].tolist()):
            if (
                SMALLEST <= pair <= LARGEST
                and is_prime(pair.q)
                and is_prime(pair.p)
                and pair.tells_apart(known)
            ):
                return pair


def is_prime(n: int) -> bool:
    """True if an odd number from 63 to 2^32 is prime."""
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    return all(_passes(n, base, twos) for base in _BASES)


def _passes(n: int, base: int, twos: int) -> bool:
    x = pow(base, n >> twos, n)
    return x == 1 or any(pow(x, 1 << k, n) == n - 1 for k in range(twos))


def residue(number: float, m: int) -> int:
    """A finite float mod m, exactly: it is a fraction whose denominator is a power of two."""
    n, d = float(number).as_integer_ratio()
    return n * pow(d, -1, m) % m


@dataclass(frozen=True, eq=False)
class FieldValue:
    """Residues of a tensor with named dimensions.

    Attributes:
        dims: name of every dimension, each once.
        p: residues mod p, one axis per name.
        q: residues mod q of the same element, or None after an exponential (or if the caller knows
            that no exponential will need them).
        masked: True if elements may be -inf (`HIDDEN` in ``p``, 0 in ``q``).
        positive: True if all elements that are not -inf are known to be above 0 in numbers.
        flat: True if elements may be 0 in numbers for many inputs: a relu, or a value computed from
            one.
    """

    dims: tuple[str, ...]
    p: Residues
    q: Residues | None = None
    masked: bool = False
    positive: bool = False
    flat: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Extent of every dimension."""
        return dict(zip(self.dims, self.p.shape, strict=True))

    def gone(self) -> NDArray[np.bool_]:
        """Mask of the elements that are -inf."""
        return self.p == _HIDDEN

    def like(self, dims: tuple[str, ...], p: Residues, q: Residues | None) -> FieldValue:
        """A value with other residues and the same flags."""
        return FieldValue(dims, p, q, self.masked, self.positive, self.flat)

    def hide(self, gone: NDArray[np.bool_]) -> FieldValue:
        """The same value with -inf where ``gone``, which broadcasts to ``p``."""
        q = None if self.q is None else np.where(gone, _U(0), self.q)
        p = np.where(gone, _HIDDEN, self.p)
        return FieldValue(self.dims, p, q, True, self.positive, self.flat)

    def replace(self, gone: NDArray[np.bool_], fill: float) -> FieldValue:
        """The same value with ``fill`` (-inf or 0) where ``gone``, which broadcasts to ``p``."""
        if fill:
            return self.hide(gone)
        q = None if self.q is None else np.where(gone, _U(0), self.q)
        return FieldValue(self.dims, np.where(gone, _U(0), self.p), q, self.masked, False, True)

    def without_q(self) -> FieldValue:
        """The same value without its residues mod q."""
        return self if self.q is None else self.like(self.dims, self.p, None)

    def key(self) -> int:
        """64 bits that are equal for equal values in any order of dimensions."""
        dims = tuple(sorted(self.dims))
        h = hashlib.blake2b(",".join(dims).encode(), digest_size=8)
        for x in (self.p, self.q):
            h.update(b"-" if x is None else np.ascontiguousarray(align(x, self.dims, dims)).data)
        return int.from_bytes(h.digest(), "little")


def uniform(
    rng: np.random.Generator,
    dims: Sequence[str],
    shape: Sequence[int],
    with_q: bool = True,
    primes: Primes = LARGEST,
) -> FieldValue:
    """A value with independent uniform residues."""
    p = uniform_residues(rng, primes.p, tuple(shape))
    q = uniform_residues(rng, primes.q, tuple(shape)) if with_q else None
    return FieldValue(tuple(dims), p, q)


def uniform_residues(rng: np.random.Generator, m: int, shape: tuple[int, ...]) -> Residues:
    """Independent uniform residues mod m, for any m below 2^31."""
    count = prod(shape)
    if count < 1 << 16:
        return rng.integers(0, m, shape, dtype=np.uint64)
    # whole words of the generator take half the time; words not below m are drawn again
    words = np.asarray(rng.bit_generator.random_raw(count), dtype=np.uint64)
    words &= _U((1 << m.bit_length()) - 1)
    again = np.flatnonzero(words >= m)
    words[again] = rng.integers(0, m, len(again), dtype=np.uint64)
    return words.reshape(shape)


def align(x: NDArray[Any], dims: tuple[str, ...], to: tuple[str, ...]) -> NDArray[Any]:
    """A view of ``x`` with the dimensions ``to`` in this order; the ones it lacks have extent 1.

    Every name of ``dims`` must be in ``to``.
    """
    if dims == to:
        return x
    y = x.transpose([dims.index(d) for d in to if d in dims])
    return y[tuple(slice(None) if d in dims else None for d in to)]


# ------------------------------------------------------------------------- arithmetic on residues


# Results overwrite the first temporary: at real extents a value can be 128 MB.


def _add(x: Residues, y: Residues, m: np.uint64) -> Residues:
    s = np.asarray(np.add(x, y))
    return np.minimum(s, np.subtract(s, m), out=s)  # s - m wraps to a huge number when s < m


def _sub(x: Residues, y: Residues, m: np.uint64) -> Residues:
    s = np.asarray(np.subtract(x, y))
    return np.minimum(s, np.add(s, m), out=s)


def _mul(x: Residues, y: Residues | np.uint64, m: np.uint64) -> Residues:
    s = np.asarray(np.multiply(x, y))
    return np.remainder(s, m, out=s)


def inverse(x: Residues, m: int) -> Residues:
    """1 / x mod the prime m, element-wise: products in a tree, then few true inverses.

    Raises:
        DivisionByZero: an element is zero.
    """
    flat = x.reshape(-1)
    if not flat.all():
        raise DivisionByZero("a denominator is zero in the field")
    return _inverse_tree(flat, m).reshape(x.shape)


def _inverse_tree(x: Residues, m: int) -> Residues:
    n = len(x)
    if n <= 32:
        return np.array([pow(v, -1, m) for v in x.tolist()], dtype=np.uint64)
    half = n // 2
    low, high = x[:half], x[half : 2 * half]
    products = np.concatenate([_mul(low, high, _U(m)), x[2 * half :]])
    inverses = _inverse_tree(products, m)
    head = inverses[:half]
    return np.concatenate([_mul(head, high, _U(m)), _mul(head, low, _U(m)), inverses[half:]])


@lru_cache(maxsize=16)
def _power_tables(p: int) -> tuple[Residues, Residues]:
    """OMEGA^i mod p for i < 2^16, and OMEGA^(2^16 i) for i < 2^15: any exponent is two look-ups.

    A pair of tables takes 0.3 ms and 0.8 MB.
    """

    def powers(base: int, count: int) -> Residues:
        table = np.ones(1, dtype=np.uint64)
        while len(table) < count:
            table = np.concatenate([table, _mul(table, _U(pow(base, len(table), p)), _U(p))])
        return table

    return powers(OMEGA, 1 << 16), powers(pow(OMEGA, 1 << 16, p), 1 << 15)


def exponential(x: Residues, primes: Primes = LARGEST) -> Residues:
    """OMEGA^x mod p for x mod q."""
    low, high = _power_tables(primes.p)
    return _mul(low[np.bitwise_and(x, _LOW)], high[np.right_shift(x, _16)], _U(primes.p))


def _mix(x: Residues, key: int, m: np.uint64) -> Residues:
    """A keyed pseudo-random function into the residues mod m (the finalizer of splitmix64)."""
    z = np.bitwise_xor(np.multiply(np.add(x, _U(key)), _U(0x9E3779B97F4A7C15)), _U(key >> 7))
    z = np.multiply(np.bitwise_xor(z, np.right_shift(z, _U(30))), _U(0xBF58476D1CE4E5B9))
    z = np.multiply(np.bitwise_xor(z, np.right_shift(z, _U(27))), _U(0x94D049BB133111EB))
    return np.remainder(np.bitwise_xor(z, np.right_shift(z, _U(31))), m)


def _limbs(x: Residues) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return (x >> _16).astype(np.float64), (x & _LOW).astype(np.float64)


def matmul_residues(x: Residues, y: Residues, m: int) -> Residues:
    """``x[B, M, K] @ y[B, K, N]`` mod m, exact for any K.

    Large products go through float64 BLAS on limbs of 16 and 15 bits, with Karatsuba's three
    products in place of four (8 G residue products/s on one core, 1 G/s in integers).
    """
    b, rows, k = x.shape
    cols = y.shape[2]
    if b * rows * k * cols <= _SMALL_MATMUL:
        return _mul(x[:, :, :, None], y[:, None, :, :], _U(m)).sum(2, dtype=np.uint64) % _U(m)
    out = np.zeros((b, rows, cols), dtype=np.uint64)
    step = max(16, _LIMB_CHUNK // max(1, b * k))
    for k0 in range(0, k, _EXACT_TERMS):
        part = slice(k0, k0 + _EXACT_TERMS)
        left = _limbs(x[:, :, part])
        for n0 in range(0, cols, step):
            right = _limbs(y[:, part, n0 : n0 + step])
            piece = out[:, :, n0 : n0 + step]
            piece[...] = _add(piece, _limb_product(left, right, _U(m)), _U(m))
    return out


def _limb_product(
    left: tuple[NDArray[np.float64], NDArray[np.float64]],
    right: tuple[NDArray[np.float64], NDArray[np.float64]],
    m: np.uint64,
) -> Residues:
    (x1, x0), (y1, y0) = left, right
    rows = x1.shape[1]
    if rows <= _SKINNY:  # adding the limbs of y would cost as much as the products
        both = np.concatenate([x1, x0], 1)
        upper, lower = both @ y1, both @ y0
        high, low, middle = upper[:, :rows], lower[:, rows:], upper[:, rows:] + lower[:, :rows]
    else:
        high, low = x1 @ y1, x0 @ y0
        middle = (x1 + x0) @ (y1 + y0) - high - low
    top = high.astype(np.uint64) % m
    top = ((top << _16) + middle.astype(np.uint64) % m) % m
    return ((top << _16) + low.astype(np.uint64)) % m


# ------------------------------------------------------------------------------------ the algebra


class FieldAlgebra:
    """The algebra over which `Operator.symbolic` evaluates programs.

    Args:
        seed: chooses the random functions that stand for opaque operators, and the random total
            order that `max` uses. Programs are compared under one seed.
        shifts: None, or a generator from which `max` takes *fresh uniform values* in place of the
            largest elements: a program whose outputs agree for any values of its maxima (safe
            softmax) is verified for all values of them at once. A maximum over hidden elements only
            is -inf all the same: as a shift of what is seen it would be infinite.
        primes: the field.

    Attributes:
        nested_exp: an exponential met a value that is itself the result of an exponential; it was
            evaluated as an opaque function, and no error bound holds.
        used_max: `max` was called.
        records: whether `partial` is recorded.
        partial: divisors that may be 0 for many inputs, and other arguments outside a function's
            domain.
    """

    def __init__(
        self,
        seed: int = 0,
        shifts: np.random.Generator | None = None,
        primes: Primes = LARGEST,
    ) -> None:
        self.seed = seed
        self.shifts = shifts
        self.primes = primes
        self._p, self._q = _U(primes.p), _U(primes.q)
        self.nested_exp = False
        self.used_max = False
        self.records = False
        self.partial: list[FieldValue] = []
        self._keys: dict[str, int] = {}
        self._constants: dict[float, FieldValue] = {}
        self._zero_root: int | None = None  # the square root of 0, once one was taken

    # element-wise --------------------------------------------------------------------------

    def add(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """The sum x + y, broadcast by name."""
        return self._binary(_add, x, y)

    def sub(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """Difference x - y, broadcast by name. Raises Unbounded."""
        difference = self._binary(_sub, x, y, False)
        if y.masked:
            number = ~align(x.gone(), x.dims, difference.dims)
            _refuse(number & align(y.gone(), y.dims, difference.dims), "is subtracted")
        return difference

    def mul(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """Product x * y, broadcast by name. Raises Unbounded."""
        square = x.p is y.p and x.dims == y.dims and not x.flat
        product = self._binary(_mul, x, y, square or (x.positive and y.positive))
        if x.masked and y.masked:
            both = align(x.gone(), x.dims, product.dims) & align(y.gone(), y.dims, product.dims)
            _refuse(both, "is multiplied by another")
        _refuse_signs(x, y)
        return product

    def div(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """Quotient x / y, broadcast by name. Raises DivisionByZero and Unbounded."""
        if y.masked:
            _refuse(y.gone(), "is a denominator")
        if y.flat and self.records:
            self.partial.append(y)
        if self._zero_root is not None and (y.p == self._zero_root).any():
            raise DivisionByZero("a denominator is the square root of zero in the field")
        q = None if x.q is None or y.q is None else inverse(y.q, self.primes.q)
        return self.mul(x, y.like(y.dims, inverse(y.p, self.primes.p), q))

    def seen(self, y: FieldValue) -> FieldValue:
        """The divisor y, with 1 in place of 0, as where all its summands are hidden.
        Those went through an exponential and have no residues mod q (see `cutesuper.ir.unseen`)."""
        if y.q is not None:
            return y
        empty = y.p == 0 if self._zero_root is None else (y.p == 0) | (y.p == self._zero_root)
        return y.like(y.dims, np.where(empty, _U(1), y.p), None)

    def exp(self, x: FieldValue) -> FieldValue:
        """OMEGA^x: consumes the residues mod q; see `nested_exp` for a value that has none."""
        if x.q is None:
            self.nested_exp = True
            p = self.opaque("exp", x).p
        else:
            p = exponential(x.q, self.primes)
        p = np.where(x.gone(), _U(0), p) if x.masked else p
        return FieldValue(x.dims, p, positive=not x.masked)

    def opaque(self, name: str, x: FieldValue) -> FieldValue:
        """A random function for each name, applied to both residues independently (and to -inf).
        Of the residue mod p both are made where there is no other: ``exp(a + log(exp(b) + c))``."""
        q = _mix(x.p if x.q is None else x.q, self._key(name + "/q"), self._q)
        p = _mix(x.p, self._key(name + "/p"), self._p)
        return FieldValue(x.dims, p, q, flat=x.flat)

    def root(self, x: FieldValue) -> FieldValue:
        """An opaque square root; nothing can be divided by that of 0: ``0 / sqrt(0)`` is NaN."""
        y = self.opaque("sqrt", x)
        if self._zero_root is None and not x.p.all():
            self._zero_root = int(y.p.flat[np.argmin(x.p)])
        return y

    def constant(self, value: float) -> FieldValue:
        """A finite float, exactly. Raises DivisionByZero if it is not 0 but its residue is."""
        if value not in self._constants:
            p, q = (residue(value, m) for m in (self.primes.p, self.primes.q))
            if value and not (p and q):
                raise DivisionByZero(f"the number {value!r} is zero in the field")
            here, there = (np.array(n, dtype=np.uint64) for n in (p, q))
            self._constants[value] = FieldValue((), here, there, positive=value > 0)
        return self._constants[value]

    # reductions ----------------------------------------------------------------------------

    def sum(
        self, x: FieldValue, dims: Iterable[str], extents: Mapping[str, int] | None = None
    ) -> FieldValue:
        """Sum over ``dims``; one that x lacks multiplies by its extent (KeyError without one)."""
        over = tuple(dims)
        axes = tuple(x.dims.index(d) for d in over if d in x.dims)
        factor = prod((extents or {})[d] for d in over if d not in x.dims)
        kept = tuple(d for d in x.dims if d not in over)

        def reduce(r: Residues, m: int) -> Residues:
            if axes:
                r = np.remainder(np.add.reduce(r, axes), _U(m))
            return r if factor == 1 else _mul(r, _U(factor % m), _U(m))

        q = None if x.q is None else reduce(x.q, self.primes.q)
        total = x.like(kept, reduce(x.p, self.primes.p), q)
        return total.hide(np.asarray(x.gone().any(axes))) if x.masked else total

    def max(
        self,
        x: FieldValue,
        dims: Iterable[str],
        valid: tuple[tuple[str, ...], NDArray[np.bool_]] | None = None,
    ) -> FieldValue:
        """The element of x along ``dims`` that is largest in a random total order.

        It is associative, commutative and idempotent; no other property of the maximum is used.
        Both residues come from the same element. ``valid`` (names, booleans) leaves elements out;
        where none is left the result is a bottom that any later ``max`` ignores.
        """
        self.used_max = True
        over = tuple(d for d in dims if d in x.dims)
        kept = tuple(d for d in x.dims if d not in over)
        axes = tuple(x.dims.index(d) for d in over)
        if self.shifts is not None:
            shape = [n for d, n in zip(x.dims, x.p.shape, strict=True) if d not in over]
            fresh = uniform(self.shifts, kept, shape, x.q is not None, self.primes)
            fresh = x.like(kept, fresh.p, fresh.q)
            if not x.masked:
                return fresh
            seen = ~x.gone() if valid is None else ~x.gone() & align(valid[1], valid[0], x.dims)
            return fresh.hide(np.asarray(~seen.any(axes)))
        rank = self._rank(x)
        if valid is not None:
            rank = rank * align(valid[1], valid[0], x.dims)
        best = rank.max(axes) if axes else rank
        found = self._ranked(kept, best, x.q is not None)
        return x.like(kept, found.p, found.q)

    def placed(self, x: FieldValue, dims: tuple[str, ...], places: NDArray[np.int64]) -> FieldValue:
        """Elements with their places, for `foremost`: a random function of both."""
        at = FieldValue(dims, places.astype(np.uint64))
        both = self.add(self.opaque("number of a place", x.without_q()), at)
        return self.opaque("place of a number", both)

    def foremost(
        self,
        x: FieldValue,
        dims: Iterable[str],
        valid: tuple[tuple[str, ...], NDArray[np.bool_]] | None = None,
    ) -> FieldValue:
        """A function of all elements with their places, independent of their order: their sum."""
        if valid is not None:
            x = x.like(x.dims, x.p * align(valid[1], valid[0], x.dims), None)
        return self.sum(x, dims)

    def place(self, x: FieldValue) -> FieldValue:
        """The result of `foremost`: a random function of the elements names a place."""
        return x

    def sooner(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """`foremost` of two."""
        return self.add(x, y)

    def scanned(self, x: FieldValue, dim: str, length: int, reverse: bool) -> FieldValue:
        """Sums of the first ``length`` elements along a dimension up to each, or from each on.
        What is behind is 0."""
        axis, step = x.dims.index(dim), -1 if reverse else 1
        inside = (slice(None),) * axis + (slice(length),)
        back = (slice(None),) * axis + (slice(None, None, step),)

        def scan(r: Any, f: Any) -> Any:
            found = np.zeros_like(r)
            found[inside] = f.accumulate(r[inside][back], axis)[back]
            return found

        p = np.remainder(scan(x.p, np.add), self._p)
        total = x.like(x.dims, p, None if x.q is None else np.remainder(scan(x.q, np.add), self._q))
        return total.hide(scan(x.gone(), np.logical_or)) if x.masked else total

    def cut(self, x: FieldValue, dim: str, at: int | slice) -> FieldValue:
        """Elements of x along a dimension; it is gone where ``at`` is one position."""
        kept = x.dims if isinstance(at, slice) else tuple(d for d in x.dims if d != dim)
        place = tuple(at if d == dim else slice(None) for d in x.dims)
        q = None if x.q is None else np.asarray(x.q[place])
        return x.like(kept, np.asarray(x.p[place]), q)

    def matmul(self, x: FieldValue, y: FieldValue, over: Iterable[str]) -> FieldValue:
        """Sum over ``over`` of x * y: batched where both have a name, outer where one has it."""
        names = tuple(over)
        for operand in (x, y):
            alone = [d for d in names if d not in operand.dims]
            if alone:  # not a contraction: the sum moves to the operand that has the dimension
                raise ValueError(f"matmul over {alone[0]}: an operand does not have it")
        batch = tuple(d for d in x.dims if d in y.dims and d not in names)
        rows = tuple(d for d in x.dims if d not in y.dims)
        cols = tuple(d for d in y.dims if d not in x.dims)
        sizes = dict(zip(x.dims + y.dims, x.p.shape + y.p.shape, strict=True))

        def size(dims: tuple[str, ...]) -> int:
            return prod(sizes[d] for d in dims)

        def product(r: Residues, s: Residues, m: int) -> Residues:
            left = align(r, x.dims, batch + rows + names)
            right = align(s, y.dims, batch + names + cols)
            flat = matmul_residues(
                left.reshape(size(batch), size(rows), size(names)),
                right.reshape(size(batch), size(names), size(cols)),
                m,
            )
            return flat.reshape([sizes[d] for d in batch + rows + cols])

        _refuse_signs(x, y)
        q = None if x.q is None or y.q is None else product(x.q, y.q, self.primes.q)
        p = product(x.p, y.p, self.primes.p)
        total = FieldValue(batch + rows + cols, p, q, positive=x.positive and y.positive)
        total = replace(total, flat=True) if x.flat or y.flat else total
        for v in (x, y):
            if v.masked:
                kept = tuple(d for d in v.dims if d not in names)
                gone = np.asarray(v.gone().any(tuple(v.dims.index(d) for d in names)))
                total = total.hide(align(gone, kept, total.dims))
        return total

    # helpers -------------------------------------------------------------------------------

    def _binary(
        self, f: Any, x: FieldValue, y: FieldValue, positive: bool | None = None
    ) -> FieldValue:
        """``f`` on both residues; ``positive`` None means: positive if both operands are."""
        if x.dims == y.dims:
            dims, xp, yp, xq, yq = x.dims, x.p, y.p, x.q, y.q
        else:
            dims = x.dims + tuple(d for d in y.dims if d not in x.dims)
            xp, yp = align(x.p, x.dims, dims), align(y.p, y.dims, dims)
            xq = None if x.q is None else align(x.q, x.dims, dims)
            yq = None if y.q is None else align(y.q, y.dims, dims)
        q = None if xq is None or yq is None else f(xq, yq, self._q)
        positive = x.positive and y.positive if positive is None else positive
        z = FieldValue(dims, f(xp, yp, self._p), q, False, positive, x.flat or y.flat)
        for v in (x, y):
            z = z.hide(align(v.gone(), v.dims, dims)) if v.masked else z
        return z

    def _key(self, name: str) -> int:
        if name not in self._keys:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
            self._keys[name] = int.from_bytes(digest, "little")
        return self._keys[name]

    def _rank(self, x: FieldValue) -> Residues:
        """A number above 0 that orders elements: a keyed permutation of p, ties broken by q."""
        z = np.bitwise_xor(x.p, _U(self._key("max") & 0x7FFFFFFF))
        for shift, factor in _ROUNDS:
            z = np.bitwise_xor(z, np.right_shift(z, _U(shift)))
            z = np.bitwise_and(np.multiply(z, _U(factor)), _WORD)
        z = np.left_shift(np.bitwise_xor(z, np.right_shift(z, _16)), _U(31))
        z = np.add(z, _U(1))
        rank = z if x.q is None else np.add(z, x.q)
        return np.where(x.p == _HIDDEN, _U(0), rank)  # the bottom

    def _ranked(self, dims: tuple[str, ...], rank: Residues, with_q: bool) -> FieldValue:
        """The elements that have the given ranks."""
        bottom = rank == 0
        z = np.right_shift(np.subtract(rank, _U(1)), _U(31))
        q = np.bitwise_and(np.subtract(rank, _U(1)), _U(0x7FFFFFFF)) if with_q else None
        z = np.bitwise_xor(z, np.right_shift(z, _16))
        for shift, factor in reversed(_ROUNDS):
            z = np.bitwise_and(np.multiply(z, _U(pow(factor, -1, 1 << 32))), _WORD)
            z = np.bitwise_xor(np.bitwise_xor(z, z >> _U(shift)), z >> _U(2 * shift))
        z = np.bitwise_xor(z, _U(self._key("max") & 0x7FFFFFFF))
        return FieldValue(
            dims, np.where(bottom, _HIDDEN, z), None if q is None else np.where(bottom, _U(0), q)
        )


_WORD = _U(0xFFFFFFFF)
#: (shift, odd factor) of an invertible 32-bit mixer; shifts of at least 11 invert in two steps
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def _refuse(gone: NDArray[np.bool_], what: str) -> None:
    if gone.any():
        raise Unbounded(f"a masked element (-inf) {what}")


def _refuse_signs(x: FieldValue, y: FieldValue) -> None:
    """Refuse a product of a hidden value with one that may be negative. Raises Unbounded."""
    for hidden, factor in ((x, y), (y, x)):
        if hidden.masked and not factor.positive:
            _refuse(hidden.gone(), "is multiplied or divided by what is not known to be positive")
