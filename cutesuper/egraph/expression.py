"""Normal forms: the function that a value computes, as a hash-consed polynomial.

The form decides if a value can still become part of a wanted output. It forgets indices (a sum is a
product with the summed extent), therefore everything under a sum is *marked*: ``sum_K X[M, K]``
holds ``X[M]``, not ``X[M, K]``: ``X * mean(X)`` and ``mean(X * X)`` differ. (Without marks 2388 of
the 2412 programs extracted for the backward pass of RMSNorm were wrong.)

* polynomial: monomials with integer coefficients, known by an int;
* monomial: numerator (atoms with exponents), denominator (ONE expanded polynomial, nothing is
  cancelled: otherwise ``softmax(S) @ V`` would become ``V``), extents (``K.loop``, ``K.tile``);
* atom: a variable with its free labels, a constant, a function of a polynomial, a *fold* (a
  maximum, or any reduction that is no sum), or a *sealed* sum, i.e. one that is multiplied later
  and that products therefore see as one atom (else the goal would accept every sub-sum of every
  partial product: a program with a squared sum of three terms was not finished after 150 s; sealed
  it takes 0.04 s).

`Expressions` is the algebra that `Operator.symbolic` takes:

    >>> e = Expressions()
    >>> x, w, s = (e.variable(n, labels) for n, labels in (("X", "MK"), ("W", "KN"), ("s", "M")))
    >>> e.mul(e.div(x, s), w) == e.div(e.mul(x, w), s)
    True
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import wraps
from typing import Any, NamedTuple

from cutesuper.egraph.clock import look

ZERO, ONE = 0, 1  # the polynomials 0 and 1
_UNIT = 0  # the monomial 1
EXP = "exp"  # name of the atoms that `Expressions.exp` makes


class AtomKind(IntEnum):
    """Kind of an atom."""

    VARIABLE = 0
    CONSTANT = 1
    FUNCTION = 2
    SEALED = 3
    FOLD = 4


# Tuples, not dataclasses: hundreds of thousands are made and looked up in a search, and a frozen
# dataclass takes three times as long.


class Atom(NamedTuple):
    """A factor.
    ``labels``: the free labels of a variable, or the reduced parts of a fold, which combines their
    elements by the monoid ``how``."""

    kind: AtomKind
    name: str
    labels: tuple[str, ...] = ()
    argument: int = ONE
    how: str = ""


Powers = tuple[tuple[Any, int], ...]  # (atom id or extent symbol, exponent), sorted
Terms = tuple[tuple[int, int], ...]  # (monomial id, coefficient), sorted


class Monomial(NamedTuple):
    """``extents * numerator / denominator``."""

    numerator: Powers
    denominator: int
    extents: Powers


def _memoised(method: Callable[..., Any]) -> Callable[..., Any]:
    """Remember a method's results for the lifetime of the table.
    Arguments are ints, strings and tuples; a result is never None."""
    name = method.__name__

    @wraps(method)
    def remembered(self: Expressions, *args: Any) -> Any:
        known = self.memo[name]
        found = known.get(args)
        if found is None:
            found = known[args] = method(self, *args)
        return found

    return remembered


class Expressions:
    """The table of atoms, monomials and polynomials of one program; each is known by an int."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self.monomials: list[Monomial] = [Monomial((), ONE, ())]
        self.polynomials: list[Terms] = [(), ((_UNIT, 1),)]
        self.memo: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self._atom_ids: dict[Atom, int] = {}
        self._monomial_ids: dict[tuple[Powers, int, Powers], int] = {self.monomials[0]: _UNIT}
        self._polynomial_ids: dict[Terms, int] = {p: i for i, p in enumerate(self.polynomials)}
        self._sealed: dict[int, int] = {}

    # ------------------------------------------------------------------------------------- leaves

    def variable(self, name: str, labels: Iterable[str]) -> int:
        """A tensor with its free labels."""
        return self._single(Atom(AtomKind.VARIABLE, name, tuple(sorted(labels))))

    def constant(self, value: float) -> int:
        """A number: 1 is the polynomial ONE, all others are uninterpreted atoms."""
        return ONE if value == 1.0 else self.symbol(f"{value:.17g}")

    def symbol(self, name: str) -> int:
        """An uninterpreted scalar, e.g. 1 / extent of K."""
        return self._single(Atom(AtomKind.CONSTANT, name))

    # --------------------------------------------------------------------------------- arithmetic

    def add(self, x: int, y: int) -> int:
        """x + y."""
        return self._combine(min(x, y), max(x, y), 1)

    def sub(self, x: int, y: int) -> int:
        """x - y."""
        return self._combine(x, y, -1)

    @_memoised
    def _combine(self, x: int, y: int, sign: int) -> int:
        return self.sealed(_sum_terms(self, (self.polynomials[x], 1), (self.polynomials[y], sign)))

    def mul(self, x: int, y: int) -> int:
        """x * y."""
        if ONE in (x, y):
            return x * y  # ONE is 1: the other one
        return self._multiply(min(x, y), max(x, y))

    @_memoised
    def _multiply(self, x: int, y: int) -> int:
        terms: dict[int, int] = {}
        for m, c in self.polynomials[x]:
            look()
            for n, d in self.polynomials[y]:
                product = self.times(min(m, n), max(m, n))
                terms[product] = terms.get(product, 0) + c * d
        return self.sealed(self.polynomial(terms.items()))

    @_memoised
    def div(self, x: int, y: int) -> int:
        """x / y; nothing is cancelled."""
        if y == ONE:
            return x
        return self.sealed(
            self.polynomial(
                (self.monomial(m.numerator, self.mul(m.denominator, y), m.extents), c)
                for m, c in self.terms(x)
            )
        )

    def exp(self, x: int) -> int:
        """exp(x); products of exps merge: exp(x) * exp(y) = exp(x + y)."""
        return self.opaque(EXP, x)

    def opaque(self, name: str, x: int) -> int:
        """A function of which nothing is known but that equal arguments give equal values."""
        return self._single(Atom(AtomKind.FUNCTION, name, (), x))

    def root(self, x: int) -> int:
        """The square root, an opaque function."""
        return self.opaque("sqrt", x)

    @_memoised
    def reduce(self, x: int, parts: tuple[str, ...]) -> int:
        """The sum over parts of a label, whose index is already marked."""
        return self.sealed(
            self.polynomial(
                (self.monomial(m.numerator, m.denominator, _powers(m.extents, parts)), c)
                for m, c in self.terms(x)
            )
        )

    def fold(self, how: str, x: int, label: str, parts: tuple[str, ...]) -> int:
        """A maximum, or another reduction that is no sum, over parts of a label.
        One over other parts of it is combined with these."""
        inner = self.is_fold(x, how, label)
        if inner is not None:
            x, parts = inner.argument, (*inner.labels, *parts)
        return self._single(Atom(AtomKind.FOLD, label, tuple(sorted(parts)), x, how))

    def is_fold(self, x: int, how: str, label: str) -> Atom | None:
        """The atom of such a reduction over ``label``, if x is one."""
        powers = self.monomials[self.polynomials[x][0][0]].numerator if self._is_atom(x) else ()
        atom = self.atoms[powers[0][0]] if powers else None
        known = atom and (atom.kind, atom.name, atom.how) == (AtomKind.FOLD, label, how)
        return atom if known else None

    @_memoised
    def terms_folded(self, x: int) -> frozenset[str]:
        """Names of the monoids of the terms that are folds, or multiples of one."""
        atoms = (self.atoms[a] for m, _ in self.terms(x) for a, _ in m.numerator)
        return frozenset(a.how for a in atoms if a.kind == AtomKind.FOLD)

    @_memoised
    def folds(self, x: int) -> frozenset[int]:
        """All atoms inside x that `fold` made."""
        found: set[int] = set()
        for m, _ in self.terms(x):
            found |= self.folds(m.denominator) if m.denominator != ONE else frozenset()
            for a, _ in m.numerator:
                atom = self.atoms[a]
                found |= {a} if atom.kind == AtomKind.FOLD else set()
                if atom.argument != ONE:
                    found |= self.folds(atom.argument)
        return frozenset(found)

    @_memoised
    def completed(self, x: int, labels: tuple[tuple[str, tuple[str, ...]], ...]) -> int:
        """x with every fold of some parts of a label taken over all of them.

        before: ``exp(S - max[K.tile](S))``; after: ``exp(S - max[K.loop, K.tile](S))``.

        Args:
            x: a polynomial.
            labels: all parts of every label.
        """
        if not self.folds(x):
            return x
        return self.sealed(
            self._mapped(
                x,
                lambda atom: self._completed_atom(atom, labels),
                lambda denominator: self.completed(denominator, labels),
            )
        )

    def _completed_atom(self, a: int, labels: tuple[tuple[str, tuple[str, ...]], ...]) -> int:
        atom = self.atoms[a]
        if atom.argument == ONE:
            return a
        argument = self.completed(atom.argument, labels)
        if atom.kind == AtomKind.SEALED and self._is_atom(argument):
            return self.monomials[self.polynomials[argument][0][0]].numerator[0][0]
        parts = dict(labels)[atom.name] if atom.kind == AtomKind.FOLD else atom.labels
        return self.atom(atom._replace(labels=tuple(sorted(parts)), argument=argument))

    def _is_atom(self, x: int) -> bool:
        """True if x is one atom, or 1."""
        if len(self.polynomials[x]) != 1:
            return False
        (m, c), *_ = self.polynomials[x]
        monomial = self.monomials[m]
        powers = monomial.numerator
        plain = c == 1 and monomial.denominator == ONE and not monomial.extents
        return plain and (not powers or (len(powers) == 1 and powers[0][1] == 1))

    def mark(self, x: int, label: str) -> int:
        """Bind a label: every variable in which it is free loses it, as under a sum over it."""
        return self._mark(x, label) if label in self._free(x) else x

    @_memoised
    def _mark(self, x: int, label: str) -> int:
        terms: dict[int, int] = {}
        for m, c in self.polynomials[x]:  # most monomials occur in many polynomials
            n = self._mark_monomial(m, label)
            terms[n] = terms.get(n, 0) + c
        return self.polynomial(terms.items())

    @_memoised
    def _mark_monomial(self, x: int, label: str) -> int:
        m, powers = self.monomials[x], dict[int, int]()
        for a, e in m.numerator:
            b = self._mark_atom(a, label)
            powers[b] = powers.get(b, 0) + e
        below = ONE if m.denominator == ONE else self.mark(m.denominator, label)
        return self.monomial(_sorted(powers), below, m.extents)

    @_memoised
    def _free(self, x: int) -> frozenset[str]:
        """Labels that are free anywhere inside x."""
        return frozenset[str]().union(*[self._free_in_monomial(m) for m, _ in self.polynomials[x]])

    @_memoised
    def _free_in_monomial(self, x: int) -> frozenset[str]:
        m = self.monomials[x]
        found = frozenset[str]().union(*[self._free_in_atom(a) for a, _ in m.numerator])
        return found if m.denominator == ONE else found | self._free(m.denominator)

    @_memoised
    def _free_in_atom(self, atom: int) -> frozenset[str]:
        a = self.atoms[atom]
        return frozenset(a.labels) if a.kind == AtomKind.VARIABLE else self._free(a.argument)

    def _mapped(self, x: int, atom: Callable[[int], int], denominator: Callable[[int], int]) -> int:
        """x with its atoms and denominators replaced."""
        terms: dict[int, int] = {}
        for m, c in self.terms(x):
            powers: dict[int, int] = {}
            for a, e in m.numerator:
                b = atom(a)
                powers[b] = powers.get(b, 0) + e
            below = ONE if m.denominator == ONE else denominator(m.denominator)
            n = self.monomial(_sorted(powers), below, m.extents)
            terms[n] = terms.get(n, 0) + c
        return self.polynomial(terms.items())

    @_memoised
    def _mark_atom(self, atom: int, label: str) -> int:
        a = self.atoms[atom]
        if a.kind == AtomKind.VARIABLE:
            return self.atom(a._replace(labels=tuple(x for x in a.labels if x != label)))
        return self.atom(a._replace(argument=self.mark(a.argument, label)))

    # ------------------------------------------------------------------------------------ sealing

    def seal(self, x: int, products: bool = False) -> int:
        """Make a sum an atom from now on, wherever a polynomial is equal to it.

        ``products``: seal a product, a quotient or a reduction as well.
        """
        terms = len(self.polynomials[x])
        if x in self._sealed or terms == 0 or (terms == 1 and not products) or self._is_atom(x):
            return self.sealed(x)
        self._sealed[x] = self._single(Atom(AtomKind.SEALED, "", (), x))
        self.memo.clear()  # some results equal the sum, or contain it
        return self._sealed[x]

    def sealed(self, x: int) -> int:
        """The atom of a sealed sum, anything else unchanged."""
        return self._sealed.get(x, x)

    def seals(self) -> tuple[tuple[int, int], ...]:
        """The sealed values with their atoms, in order."""
        return tuple(self._sealed.items())

    # -------------------------------------------------------------------------------------- sizes

    @_memoised
    def size(self, x: int) -> int:
        """A size that grows with every operation that keeps a value's parts.
        It orders the extraction.

        It counts coefficients, and treats exp additively (``exp(x) * exp(y) = exp(x + y)`` must not
        shrink): a measure without both lost 12 of 300 random goals.
        """
        return sum(abs(c) * self._monomial_size(m) for m, c in self.polynomials[x])

    @_memoised
    def _monomial_size(self, monomial: int) -> int:
        m = self.monomials[monomial]
        inner = sum(e * self._atom_size(a) for a, e in m.numerator)
        denominator = self.size(m.denominator) + 1 if m.denominator != ONE else 0
        return 1 + inner + sum(e for _, e in m.extents) + denominator

    @_memoised
    def _atom_size(self, atom: int) -> int:
        a = self.atoms[atom]
        if a.kind in (AtomKind.VARIABLE, AtomKind.CONSTANT):
            return 1
        own = 0 if self.is_exp(atom) else 1 + len(a.labels) * (a.kind == AtomKind.FOLD)
        return own + self.size(a.argument)

    def is_exp(self, atom: int) -> bool:
        """True if an atom is an exponential."""
        a = self.atoms[atom]
        return a.kind == AtomKind.FUNCTION and a.name == EXP

    # ------------------------------------------------------------------------------------- tables

    def terms(self, x: int) -> list[tuple[Monomial, int]]:
        """Monomials and coefficients of a polynomial."""
        return [(self.monomials[m], c) for m, c in self.polynomials[x]]

    def atom(self, key: Atom) -> int:
        """The number of an atom."""
        found = self._atom_ids.get(key)
        if found is None:
            found = self._atom_ids[key] = len(self.atoms)
            self.atoms.append(key)
        return found

    def monomial(self, numerator: Powers, denominator: int, extents: Powers) -> int:
        """The number of a monomial."""
        key = numerator, denominator, extents
        found = self._monomial_ids.get(key)
        if found is None:
            found = self._monomial_ids[key] = len(self.monomials)
            self.monomials.append(Monomial(*key))
        return found

    def polynomial(self, terms: Iterable[tuple[int, int]]) -> int:
        """The number of a polynomial; equal monomials must have been added up."""
        key = tuple(sorted([t for t in terms if t[1]]))
        found = self._polynomial_ids.get(key)
        if found is None:
            found = self._polynomial_ids[key] = len(self.polynomials)
            self.polynomials.append(key)
        return found

    def single(self, atom: int) -> int:
        """The polynomial that is one atom."""
        return self.polynomial(((self.monomial(((atom, 1),), ONE, ()), 1),))

    def _single(self, atom: Atom) -> int:
        return self.single(self.atom(atom))

    @_memoised
    def times(self, x: int, y: int) -> int:
        """Product of monomials."""
        a, b = self.monomials[x], self.monomials[y]
        powers = dict(a.numerator)
        for atom, e in b.numerator:
            powers[atom] = powers.get(atom, 0) + e
        self._merge_exps(powers)
        extents = dict(a.extents)
        for symbol, e in b.extents:
            extents[symbol] = extents.get(symbol, 0) + e
        denominator = self.mul(a.denominator, b.denominator)
        return self.monomial(_sorted(powers), denominator, _sorted(extents))

    def _merge_exps(self, powers: dict[int, int]) -> None:
        exps = [(a, e) for a, e in powers.items() if self.is_exp(a)]
        if sum(e for _, e in exps) < 2:
            return
        total = ZERO
        for a, e in exps:
            del powers[a]
            for _ in range(e):
                total = self.add(total, self.atoms[a].argument)
        powers[self.atom(Atom(AtomKind.FUNCTION, EXP, (), total))] = 1

    def show(self, x: int) -> str:
        """Readable text: ``K.tile*X[M]*W[N] + 2*b[N]``."""
        return " + ".join(_show_term(self, m, c) for m, c in self.terms(x)) or "0"


def _sum_terms(table: Expressions, *summands: tuple[Terms, int]) -> int:
    terms: dict[int, int] = {}
    for polynomial, sign in summands:
        for m, c in polynomial:
            terms[m] = terms.get(m, 0) + sign * c
    return table.polynomial(terms.items())


def _sorted(powers: dict[Any, int]) -> Powers:
    return tuple(sorted([p for p in powers.items() if p[1]]))


def _powers(extents: Powers, symbols: Iterable[str]) -> Powers:
    powers = dict(extents)
    for s in symbols:
        powers[s] = powers.get(s, 0) + 1
    return _sorted(powers)


def _show_term(table: Expressions, m: Monomial, coefficient: int) -> str:
    factors = [] if coefficient == 1 else [str(coefficient)]
    factors += [s if e == 1 else f"{s}^{e}" for s, e in m.extents]
    for atom, e in m.numerator:
        text = _show_atom(table, table.atoms[atom])
        factors.append(text if e == 1 else f"{text}^{e}")
    text = "*".join(factors) or "1"
    return text if m.denominator == ONE else f"{text}/({table.show(m.denominator)})"


def _show_atom(table: Expressions, a: Atom) -> str:
    if a.kind in (AtomKind.VARIABLE, AtomKind.CONSTANT):
        return f"{a.name}[{','.join(a.labels)}]" if a.labels else a.name
    inner = table.show(a.argument)
    return (
        f"{a.how}[{','.join(a.labels)}]({inner})"
        if a.kind == AtomKind.FOLD
        else (f"({inner})" if a.kind == AtomKind.SEALED else f"{a.name}({inner})")
    )
