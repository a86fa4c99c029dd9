"""Monoids: the ways in which reductions combine elements.

A monoid is an associative and commutative operator on two numbers, with an identity. Elements may
be combined in any order and in any parts: by threads, warps, blocks and kernels. What a stage needs
follows from the entry of the operator that combines two elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cutesuper.errors import OperatorError
from cutesuper.ir.arguments import shown
from cutesuper.ir.operators.base import TABLE, facets

#: a reduction over an algebra: arguments as for `Monoid.reduced`
Meaning = Callable[[Any, Any, Iterable[str], Mapping[str, int], Any], Any]


@dataclass(frozen=True)
class Monoid:
    """A way of combining elements.

    Attributes:
        name: that of the reduction which only combines; also the ``op`` of the operations of a
            block program that end an axis, and NumPy's name.
        noun: for messages.
        operator: the element-wise operator of the table that combines two elements.
        algebra: the method of an algebra that combines two values (`cutesuper.verify.domain`).
        identity: the number that changes nothing. It stands in for elements that do not exist.
        linear: the reduction of a multiple is that multiple of the reduction, and the reduction of
            a sum is the sum of reductions.
        selects: the result is one of the elements, so no rounding occurs in any element type, and
            sums of exponentials may be shifted by it (the online softmax).
        packed: the PTX instruction that combines two registers of two 16-bit elements, without any
            rounding; None if there is none.
        meaning: the reduction over an algebra that has a method for it; None combines two by two.
        places: elements are pairs, a number and its place along the dimension. The larger number
            wins, NaN over all others, and of equal ones the first. The result is the place.
    """

    name: str
    noun: str
    operator: str
    algebra: str
    identity: float
    linear: bool = False
    selects: bool = False
    packed: str | None = None
    meaning: Meaning | None = None
    places: bool = False

    @property
    def words(self) -> int:
        """Numbers of an element."""
        return 2 if self.places else 1

    def combine(self, m: Any, x: Any, y: Any) -> Any:
        """Two elements combined, over a namespace ``m`` of scalar functions."""
        if not self.places:
            return TABLE[self.operator].scalar(m, [x, y], {})
        (v, _), (w, _) = x, y
        equal = (v == w) | ((v != v) & (w != w))
        return self._chosen(m, x, y, equal & (y[1] < x[1]))

    def append(self, m: Any, x: Any, y: Any) -> Any:
        """`combine`, where y is known to lie behind x: half the comparisons."""
        return self._chosen(m, x, y) if self.places else self.combine(m, x, y)

    def _chosen(self, m: Any, x: Any, y: Any, sooner: Any = None) -> Any:
        """The pair y where its number is larger, or it is the ``sooner`` one of equal numbers."""
        (v, _), (w, _) = x, y
        taken = (w > v) | ((w != w) & (v == v))
        taken = taken if sooner is None else taken | sooner
        return tuple(m.where(taken, b, a) for a, b in zip(x, y, strict=True))

    def together(self, a: Any, x: Any, y: Any) -> Any:
        """Two values of the same dimensions combined, over an algebra."""
        return getattr(a, self.algebra)(x, y)

    def reduced(
        self, a: Any, x: Any, over: Iterable[str], extents: Mapping[str, int], valid: Any = None
    ) -> Any:
        """A value reduced over an algebra.

        Args:
            a: the algebra, with ``cut``, ``masked`` and the method `algebra`.
            x: a value with ``sizes``, the extents of its dimensions.
            over: names of dimensions.
            extents: of those that x lacks; there all elements are the same.
            valid: names and booleans of the elements that exist; None if all do.
        """
        if self.meaning is not None:
            return self.meaning(a, x, over, extents, valid)
        x = x if valid is None else a.masked(x, valid, self.identity)
        for d in over:
            x = self._along(a, x, d) if d in x.sizes else self._repeated(a, x, extents[d])
        return x

    def _along(self, a: Any, x: Any, d: str) -> Any:
        """Combine the halves of a dimension until one element is left."""
        n, rest = x.sizes[d], None
        while n > 1:
            if n % 2:
                last = a.cut(x, d, n - 1)
                rest = last if rest is None else self.together(a, rest, last)
            n //= 2
            x = self.together(a, a.cut(x, d, slice(n)), a.cut(x, d, slice(n, 2 * n)))
        x = a.cut(x, d, 0)
        return x if rest is None else self.together(a, x, rest)

    def _repeated(self, a: Any, x: Any, n: int) -> Any:
        """A value combined with itself, n times in all."""
        result = None
        while n:
            if n % 2:
                result = x if result is None else self.together(a, result, x)
            x, n = self.together(a, x, x), n // 2
        return result


def _sum(a: Any, x: Any, over: Iterable[str], extents: Mapping[str, int], valid: Any) -> Any:
    return a.sum(x if valid is None else a.masked(x, valid), over, extents)


def _max(a: Any, x: Any, over: Iterable[str], extents: Mapping[str, int], valid: Any) -> Any:
    return a.max(x, over, valid)


def _place(a: Any, x: Any, over: Iterable[str], extents: Mapping[str, int], valid: Any) -> Any:
    return a.foremost(x, over, valid)


SUM = Monoid("sum", "sum", "add", "add", 0.0, linear=True, meaning=_sum)
MAX = Monoid(
    "max",
    "maximum",
    "maximum",
    "larger",
    float("-inf"),
    selects=True,
    packed="max.NaN",
    meaning=_max,
)
#: its elements are what the method ``placed`` of an algebra makes of numbers and their places
PLACE = Monoid(
    "argmax",
    "place of a maximum",
    "maximum",
    "sooner",
    float("-inf"),
    meaning=_place,
    places=True,
)


def monoid(name: object) -> Monoid:
    """The monoid called ``name`` of a reduction of the table. Raises OperatorError."""
    found = facets(str(name)).reduces
    if found is None or found.name != name:
        known = sorted({repr(o.reduces.name) for o in TABLE.values() if o.reduces is not None})
        raise OperatorError(f"op must be {' or '.join(known)}, not {shown(name)}")
    return found
