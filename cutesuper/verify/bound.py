"""The chance that unequal programs pass a trial, from degrees (Schwartz-Zippel).

Every value of a program without exponentials is a quotient of two polynomials in the inputs and in
one fresh variable for each distinct application of an opaque function. This module propagates
upper bounds of their degrees, and of how many opaque applications one element depends on, by
running both programs over an algebra of degrees. The proof is in ``docs/verification.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import numpy as np

from cutesuper.ir.block import MuGraph
from cutesuper.ir.field import SMALLEST
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import Attributes, Operator, lookup
from cutesuper.ir.unseen import empty_quotients
from cutesuper.verify.extents import Sizes
from cutesuper.verify.integers import Integers, Places
from cutesuper.verify.source import evaluate_graph, names_of
from cutesuper.verify.tiles import BlockRun, Mapped


@dataclass(frozen=True)
class Bound:
    """log2 of the false-accept chance of one trial, and its conditions.

    ``log2`` is None where no bound can be stated; ``conditions`` then says why.
    """

    log2: float | None
    conditions: str


@dataclass(frozen=True)
class Move:
    """A shift (a fresh value in place of a maximum) that is a summand of a value.

    Attributes:
        sign: 1 where it is added, -1 where it is subtracted.
        dims: dimensions of the shift.
    """

    sign: int
    dims: frozenset[str]


#: the shifts that a value contains as summands; None if it depends on shifts in any other way
Moves = tuple[Move, ...] | None


@dataclass(frozen=True)
class Degree:
    """Bounds that hold for every element of a value.

    Attributes:
        sizes: extent of every dimension by name.
        num: degree of the numerator, at most.
        den: degree of the denominator, at most.
        varies: dimensions along which the denominator may change.
        terms: opaque applications one element depends on, at most.
        term_dims: dimensions along which those change.
        moves: how it depends on shifts: at most one is added and at most one subtracted, or None.
    """

    sizes: dict[str, int]
    num: int = 0
    den: int = 0
    varies: frozenset[str] = frozenset()
    terms: int = 0
    term_dims: frozenset[str] = frozenset()
    moves: Moves = ()

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.sizes)


class DegreeAlgebra:
    """The algebra of `Degree`; same methods as `cutesuper.verify.domain.FieldDomain`.

    Attributes:
        argument: highest degree (numerator plus denominator) under an opaque function.
        zeros: sum of the degrees of all elements of divisors.
        exponents: arguments of exponentials.
        ordered: `max` was used in its meaning of the largest element.
        kept_zero: a function that is 0 at 0 was applied.
        empty_rows: a divisor that is 0 counts as 1, see `cutesuper.ir.field.FieldAlgebra.seen`.
    """

    def __init__(self, shifted: bool, shift_degree: int = 1) -> None:
        self.shifted = shifted
        self.shift_degree = shift_degree
        self.argument = 0
        self.zeros = 0
        self.exponents: list[Degree] = []
        self.ordered = False
        self.kept_zero = False
        self.empty_rows = False

    def add(self, x: Degree, y: Degree) -> Degree:
        """Sum over the product of both denominators."""
        both = self.mul(x, y)
        return replace(both, num=max(x.num + y.den, y.num + x.den), moves=_summed(x, y))

    def sub(self, x: Degree, y: Degree) -> Degree:
        """Difference: the shifts that y adds are subtracted."""
        moves = y.moves and tuple(replace(m, sign=-m.sign) for m in y.moves)
        return self.add(x, replace(y, moves=moves))

    def mul(self, x: Degree, y: Degree) -> Degree:
        """Product: degrees add up."""
        return Degree(
            {**x.sizes, **y.sizes},
            x.num + y.num,
            x.den + y.den,
            x.varies | y.varies,
            x.terms + y.terms,
            x.term_dims | y.term_dims,
            _unmoved(x, y),
        )

    def div(self, x: Degree, y: Degree) -> Degree:
        """Quotient: numerator and denominator of y change places."""
        self.zeros += y.num * prod(y.sizes.values())
        varies = x.varies | y.varies | (frozenset(y.sizes) if y.num else frozenset())
        product = self.mul(x, y)
        return replace(product, num=x.num + y.den, den=x.den + y.num, varies=varies)

    def opaque(self, name: str, x: Degree) -> Degree:
        """A fresh variable for an opaque function of x."""
        self.argument = max(self.argument, x.num + x.den)
        dims = x.term_dims | frozenset(x.sizes)
        return Degree(x.sizes, 1, 0, frozenset(), x.terms + 1, dims, _unmoved(x))

    def root(self, x: Degree) -> Degree:
        """The square root, an opaque function."""
        return self.opaque("sqrt", x)

    def exp(self, x: Degree) -> Degree:
        """A fresh variable, multiplied and divided by those of shifts.
        `error_bound` checks that this holds."""
        self.exponents.append(x)
        up = sum(m.sign > 0 for m in x.moves or ())
        down = [m.dims for m in x.moves or () if m.sign < 0]
        return Degree(x.sizes, 1 + up, len(down), frozenset().union(*down), moves=None)

    def constant(self, value: float) -> Degree:
        """A constant, of degree zero."""
        return Degree({})

    def sum(
        self, x: Degree, dims: Iterable[str], extents: Mapping[str, int] | None = None
    ) -> Degree:
        """Sum, with as many different denominators as the reduced dimensions make."""
        over = set(dims)
        fractions = prod(n for d, n in x.sizes.items() if d in over & x.varies)
        return Degree(
            {d: n for d, n in x.sizes.items() if d not in over},
            x.num + (fractions - 1) * x.den,
            x.den * fractions,
            x.varies - over,
            x.terms * prod(n for d, n in x.sizes.items() if d in over & x.term_dims),
            x.term_dims - over,
            _unmoved(x),
        )

    def max(self, x: Degree, dims: Iterable[str], valid: Any = None) -> Degree:
        """A fresh variable if maxima are replaced by fresh values; otherwise no bound holds."""
        self.ordered |= not self.shifted
        over = set(dims)
        sizes = {d: n for d, n in x.sizes.items() if d not in over}
        return Degree(sizes, self.shift_degree, moves=(Move(1, frozenset(sizes)),))

    def placed(self, x: Degree, dims: tuple[str, ...], places: Any) -> Degree:
        """A function of x and of literal numbers."""
        return self.opaque("place", self.add(self.opaque("number", x), self.literal(dims, places)))

    def foremost(self, x: Degree, dims: Iterable[str], valid: Any = None) -> Degree:
        """Sum."""
        return self.sum(x, dims)

    def place(self, x: Degree) -> Degree:
        """x."""
        return x

    def sooner(self, x: Degree, y: Degree) -> Degree:
        """Sum of two."""
        return self.add(x, y)

    def matmul(self, x: Degree, y: Degree, over: Iterable[str]) -> Degree:
        """Matrix product: a sum of products."""
        return self.sum(self.mul(x, y), over)

    def cut(self, x: Degree, dim: str, at: int | slice) -> Degree:
        """Some elements of x along a dimension; it is gone where ``at`` is one position."""
        if isinstance(at, slice):
            return replace(x, sizes={**x.sizes, dim: len(range(*at.indices(x.sizes[dim])))})
        sizes = {d: n for d, n in x.sizes.items() if d != dim}
        return replace(x, sizes=sizes, varies=x.varies - {dim}, term_dims=x.term_dims - {dim})

    def masked(self, x: Degree, valid: Any, other: float = 0.0) -> Degree:
        """x: leaving elements out raises no degree."""
        return x

    def mask(self, x: Degree, names: Any, keep: Any, operator: Operator) -> Degree:
        """x: the elements set to -inf or 0 do not depend on the inputs."""
        return x

    def literal(self, names: tuple[str, ...], numbers: Any) -> Degree:
        """Literal numbers: degree zero, unchanged by any draw of the inputs."""
        return Degree(dict(zip(names, numbers.shape, strict=True)))

    def turned(self, x: Degree, dim: str, places: Any, signs: Any) -> Degree:
        """x: elements change places and signs."""
        return x

    def scanned(self, x: Degree, dim: str, length: int, reverse: bool) -> Degree:
        """Everywhere the degree of the sum of all."""
        total = self.sum(x, (dim,))
        return replace(total, sizes=x.sizes, varies=x.varies, term_dims=x.term_dims)

    def gather(
        self, x: Degree, integers: Any, operator: Operator, shape: tuple[int, ...]
    ) -> Degree:
        """Parts of an input: everywhere its degree."""
        return _spread(x, _sizes(shape))

    def put(self, x: Degree, places: Places, rows: Degree, shape: tuple[int, ...]) -> Degree:
        """Either of two values: everywhere the higher degree."""
        whole = _sizes(places.whole(x.sizes, shape))
        both = self.mul(x, rows)
        most = Degree(
            whole, max(x.num, rows.num), max(x.den, rows.den), both.varies,
            max(x.terms, rows.terms), both.term_dims, both.moves,
        )  # fmt: skip
        return _spread(most, whole)

    def seen(self, x: Degree) -> Degree:
        """x: 1 in place of 0 raises no degree."""
        self.empty_rows = True
        return x

    def without_q(self, x: Degree) -> Degree:
        """x: degrees are the same for both residues."""
        return x

    def elementwise(self, kind: str, args: list[Degree], attributes: Attributes) -> Degree:
        """An element-wise operator of the table."""
        self.kept_zero |= lookup(kind).keeps_zero
        return lookup(kind).symbolic(self, args, attributes)

    def rename(self, x: Degree, names: Mapping[str, str]) -> Degree:
        """x with its dimensions renamed."""

        def renamed(dims: frozenset[str]) -> frozenset[str]:
            return frozenset(names.get(d, d) for d in dims)

        return replace(
            x,
            sizes={names.get(d, d): n for d, n in x.sizes.items()},
            varies=renamed(x.varies),
            term_dims=renamed(x.term_dims),
            moves=x.moves and tuple(replace(m, dims=renamed(m.dims)) for m in x.moves),
        )

    def load(self, x: Degree, mapped: Sequence[Mapped], window: Any) -> Degree:
        """x over parts; variation along some dimension is taken as variation along all."""
        return _spread(x, {p: n for m in mapped for p, n in zip(m.parts, m.extents, strict=True)})

    def store(self, x: Degree, mapped: Sequence[Mapped], window: Any, into: Any) -> Degree:
        """x: tiles are put together in `finish`."""
        return x

    def finish(self, x: Degree, mapped: Sequence[Mapped]) -> Degree:
        """The inverse of `load`."""
        shape = tuple(m.extent for m in mapped)
        return _spread(x, _sizes(shape))


def _spread(x: Degree, sizes: dict[str, int]) -> Degree:
    every: frozenset[str] = frozenset(sizes)
    return replace(
        x,
        sizes=sizes,
        varies=every if x.varies else frozenset(),
        term_dims=every if x.term_dims else frozenset(),
        moves=x.moves and tuple(replace(m, dims=every if m.dims else m.dims) for m in x.moves),
    )


def _unmoved(*values: Degree) -> Moves:
    """Shifts of a value that is no sum: none if all operands are free of shifts."""
    return () if all(x.moves == () for x in values) else None


def _summed(x: Degree, y: Degree) -> Moves:
    if x.moves is None or y.moves is None:
        return None
    moves = x.moves + y.moves
    signs = [m.sign for m in moves]
    return None if len(set(signs)) < len(signs) else moves


@dataclass(frozen=True)
class Degrees:
    """Degrees of a kernel graph and a muGraph at the extents of a trial.

    Attributes:
        source, found: the algebras over which they were evaluated.
        outputs: degrees of each output in both.
    """

    source: DegreeAlgebra
    found: DegreeAlgebra
    outputs: tuple[tuple[Degree, Degree], ...]

    @property
    def highest(self) -> int:
        """The highest degree of a difference that has to be recognised as zero.
        Differences are of an output, or of two arguments of one function."""
        pairs = (_difference(want, found) for want, found in self.outputs)
        exponents = self.source.exponents + self.found.exponents
        arguments = (2 * (x.num + x.den) for x in exponents)
        opaque = 2 * max(self.source.argument, self.found.argument)
        return max(opaque, *pairs, *arguments)


@dataclass(frozen=True)
class Source:
    """Degrees of a kernel graph, for many muGraphs.

    Attributes:
        algebra: the algebra over which it was evaluated.
        inputs, outputs: their degrees.
    """

    algebra: DegreeAlgebra
    inputs: tuple[Degree | Integers, ...]
    outputs: tuple[Degree, ...]


def source_degrees(graph: KernelGraph, sizes: Sizes, shifted: bool) -> Source:
    """Evaluate a kernel graph over degrees.

    Args:
        graph: expanded, at the extents of ``sizes``.
        sizes: extents of the trial.
        shifted: maxima were replaced by fresh values.
    """
    algebra, inputs = DegreeAlgebra(shifted), _inputs(graph, sizes)
    return Source(algebra, tuple(inputs), tuple(evaluate_graph(graph, algebra, inputs)))


def degrees(source: Source, mu: MuGraph, sizes: Sizes) -> Degrees:
    """Evaluate a muGraph over degrees, at the extents of the kernel graph."""
    found = DegreeAlgebra(source.algebra.shifted)
    tensors: dict[str, Any] = dict(zip(mu.inputs, source.inputs, strict=True))
    for program, empty in zip(sizes.programs, empty_quotients(mu), strict=True):
        tensors |= BlockRun(found, program, tensors, set(), empty=empty).run()
    outputs = zip(source.outputs, (tensors[name] for name in mu.outputs), strict=True)
    return Degrees(source.algebra, found, tuple(outputs))


def error_bound(both: Degrees, exponents: str | None, drawn: Sequence[str] = ()) -> Bound:
    """The false-accept bound of one trial.

    Args:
        both: degrees of the two programs at the extents of the trial.
        exponents: which condition of `cutesuper.verify.exponents` fails, if any.
        drawn: kinds of values drawn besides elements of the field: lengths, for instance.
    """
    source, found = both.source, both.found
    arguments = source.exponents + found.exponents
    if source.ordered or found.ordered:
        return Bound(None, "no bound: a maximum shows an element only where it is the largest")
    if any(x.terms for x in arguments):
        exponents = exponents or "an exponential has an opaque function in its argument"
    if any(x.moves is None for x in arguments):
        exponents = exponents or "a maximum enters an exponential other than as a summand"
    if arguments and exponents is not None:
        return Bound(None, f"no bound: {exponents}")
    argument = 2 * max(source.argument, found.argument)
    zero = source.kept_zero or found.kept_zero
    weight = max(_element(want, found, argument, zero) for want, found in both.outputs)
    weight += _accidents(source.exponents, arguments)
    zeros = source.zeros + found.zeros
    if source.empty_rows or found.empty_rows:
        weight += zeros  # an accidental 0 is not drawn again
    if arguments:
        bound = _bound(weight, 2 * zeros, SMALLEST.q, "exponents jointly uniform, degree")
    else:
        bound = _bound(weight, zeros, SMALLEST.p, "degree")
    if drawn:
        bound = replace(bound, conditions=f"{bound.conditions} and at drawn {' and '.join(drawn)}")
    return bound


def affine_inputs(graph: KernelGraph, sizes: Sizes) -> list[int]:
    """Positions of the inputs in which all arguments of exponentials are affine."""
    result = []
    for k in range(len(sizes.inputs)):
        a = DegreeAlgebra(shifted=True, shift_degree=0)
        one = [
            replace(x, num=int(i == k)) if isinstance(x, Degree) else x
            for i, x in enumerate(_inputs(graph, sizes))
        ]
        if not isinstance(one[k], Degree):
            continue
        evaluate_graph(graph, a, one)
        affine = (x.num <= 1 and not x.den and not x.terms for x in a.exponents)
        if all(affine) and not any(x.moves is None for x in a.exponents):
            result.append(k)
    return result


def _accidents(source: list[Degree], both: list[Degree]) -> int:
    """Weight of accidents with exponents.
    A low rank, or an unknown argument that equals a known one."""
    count = sum(prod(x.sizes.values()) for x in source)
    highest = max((x.num + x.den for x in both), default=0)
    return (3 * count + 2) * highest


def _inputs(graph: KernelGraph, sizes: Sizes) -> list[Degree | Integers]:
    """Inputs of degree 1. The values of integers do not matter for degrees."""
    return [
        Integers((), np.zeros(shape, np.int64))
        if graph.nodes[i].dtype.integer
        else Degree(_sizes(shape), 1)
        for i, shape in zip(graph.inputs, sizes.inputs, strict=True)
    ]


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(names_of(shape), (n for n in shape if n != 1), strict=True))


def _element(want: Degree, found: Degree, argument: int, zero: bool) -> int:
    """Degree of the numerator of a difference, plus the weight of all collisions.
    Collisions are of opaque arguments, with each other and with 0 if ``zero``."""
    terms = want.terms + found.terms
    pairs = terms * (terms - 1) // 2 + (terms if zero else 0)
    return _difference(want, found) + pairs * argument


def _difference(want: Degree, found: Degree) -> int:
    return max(want.num + found.den, found.num + want.den)


def _bound(weight: int, zeros: int, order: int, what: str) -> Bound:
    if 2 * zeros >= order or weight >= order:
        return Bound(None, "no bound: degrees too high for the field at these extents")
    chance = weight / order / (1 - zeros / order)
    return Bound(
        min(0.0, log2(max(chance, 1 / order))),
        f"{what} {weight} over primes from {order} up; opaque functions taken as random; at these "
        "extents",
    )
