"""Dimensions of traced tensors as products of factors, found by unification.

A tensor of PyTorch is viewed in many shapes; a kernel graph has no reshapes. So a dimension here is
a list of *factors*, slowest first: ``view([B, S, K] -> [B * S, K])`` makes a dimension of two
factors, ``view([M, H * D] -> [M, H, D])`` divides a factor in two, wherever it occurs. Views
compute nothing. Factors that are adjacent wherever they occur become one dimension of the kernel
graph (`merged`).

An extent of 1 has no factors. Extents may be symbolic (`torch.SymInt`).

Dimensions of one tensor may have the same factor (the rows and the columns of W in ``x + x W``), so
a dimension is made of *parts*: a factor, and which dimension it came from. Views, permutations and
element-wise operators pass parts on; what operators unify is factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from cutesuper.ir.dims import MAX_ELEMENTS
from cutesuper.torch.internals import hint_of

Extent = Any  # int or torch.SymInt

#: most elements of the rows into which a dimension that is too large is divided, and of a vector
_MOST_OF_ROW, _VECTOR = 8192, 8


class Mismatch(Exception):
    """Dimensions that cannot be the same, or a view that does not follow factors."""


@dataclass(eq=False)
class Factor:
    """A part of a dimension.

    Attributes:
        extent: of it.
        same: another factor that this one was unified with, or None.
        parts: factors that it was divided into; empty if it was not.
    """

    extent: Extent
    same: Factor | None = None
    parts: tuple[Factor, ...] = ()


class Part(NamedTuple):
    """A factor of one dimension.

    Attributes:
        origin: the dimension that it came from, unequal to any other.
        factor: its extent, shared with dimensions of other tensors.
    """

    origin: object
    factor: Factor


#: the parts of a dimension, slowest first
Dims = tuple[Part, ...]


def equal(a: Extent, b: Extent) -> bool:
    """True if two extents are known to be equal, without a guard on them."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    # what differs in the example is not equal; PyTorch takes 0.3 ms to find that out
    hints = hint_of(a), hint_of(b)
    if None not in hints and hints[0] != hints[1]:
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def equal_shapes(a: Sequence[Extent], b: Sequence[Extent]) -> bool:
    """True if two shapes are known to be equal, without a guard on them."""
    return len(a) == len(b) and all(map(equal, a, b))


def divides(a: Extent, b: Extent) -> bool:
    """True if ``b`` is known to be a multiple of ``a``, without a guard on them."""
    if isinstance(a, int) and isinstance(b, int):
        return a > 0 and b % a == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(b % a == 0))


def dims_of(extent: Extent) -> Dims:
    """A new dimension with this extent, of which nothing else is known.
    One that is too large for a dimension of a kernel is divided if it has a factor that suits."""
    if equal(extent, 1):
        return ()
    factor = Factor(extent)
    if isinstance(extent, int) and extent > MAX_ELEMENTS:
        rows = chain(range(_MOST_OF_ROW, 1, -_VECTOR), range(_MOST_OF_ROW, 1, -1))
        row = next((n for n in rows if extent % n == 0), 1)
        if extent // row <= MAX_ELEMENTS:
            _divide(factor, extent // row)
    return (Part(object(), factor),)


def leaves(dims: Dims) -> Dims:
    """The parts of a dimension, divided as far as their factors are now."""
    for _, factor in dims:  # a fifth of the time of cutting a model into regions
        if factor.same is not None or factor.parts:
            return tuple([Part(p.origin, f) for p in dims for f in _leaves(p.factor)])
    return dims


def factors(dims: Dims) -> tuple[Factor, ...]:
    """The factors of a dimension, as far as they are divided now."""
    return tuple(p.factor for p in leaves(dims))


def _leaves(factor: Factor) -> list[Factor]:
    while factor.same is not None:
        factor = factor.same
    return [leaf for f in factor.parts for leaf in _leaves(f)] if factor.parts else [factor]


def extent_of(dims: Dims) -> Extent:
    """The product of the factors."""
    return prod((f.extent for f in factors(dims)), start=1)


def unify(a: Dims, b: Dims) -> None:
    """Make two dimensions the same.

    before: ``(B, S)`` and ``(M)``; after: M is divided into B and S.

    Raises:
        Mismatch: their factors do not fit into each other.
    """
    while True:
        one, other = factors(a), factors(b)
        if one == other:
            return
        pairs = [(x, y) for x, y in zip(one, other, strict=False) if x is not y]
        if not pairs:
            raise Mismatch(f"extents {_show(one)} and {_show(other)} differ")
        x, y = pairs[0]
        if equal(x.extent, y.extent):
            x.same = y
        elif divides(x.extent, y.extent):
            _divide(y, x.extent)
        elif divides(y.extent, x.extent):
            _divide(x, y.extent)
        else:
            raise Mismatch(f"extents {_show(one)} and {_show(other)} do not divide each other")


def _divide(f: Factor, first: Extent) -> None:
    f.parts = (Factor(first), Factor(f.extent // first))


def regroup(dims: Sequence[Dims], extents: Sequence[Extent]) -> tuple[Dims, ...]:
    """The dimensions of a view with these extents.

    Raises:
        Mismatch: it cuts through a factor that does not divide.
    """
    rest = list(leaves(tuple(p for d in dims for p in d)))
    result: list[Dims] = []
    for wanted in extents:
        taken: list[Part] = []
        while not equal(wanted, 1):
            if not rest:
                raise Mismatch(f"a view as {list(extents)} has more elements")
            origin, f = rest.pop(0)
            if divides(f.extent, wanted):
                wanted = wanted // f.extent
                taken.append(Part(origin, f))
            elif divides(wanted, f.extent):
                _divide(f, wanted)
                taken.append(Part(origin, f.parts[0]))
                # another of these parts may now be divided too
                rest = list(leaves((Part(origin, f.parts[1]), *rest)))
                wanted = 1
            else:
                raise Mismatch(f"a view as {list(extents)} cuts through an extent of {f.extent}")
        result.append(tuple(taken))
    if rest:
        raise Mismatch(f"a view as {list(extents)} has fewer elements")
    return tuple(result)


# ------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True, eq=False)
class Group:
    """Factors that are adjacent wherever they occur: a dimension of the kernel graph.

    Attributes:
        factors: slowest first.
        extent: the product.
    """

    factors: tuple[Factor, ...]
    extent: Extent


@dataclass
class Grouping:
    """The partition of factors into dimensions.

    Attributes:
        sequences: of factors, in their order in every tensor and in its memory; a dimension that an
            operator needs whole is a sequence of its own.
    """

    sequences: list[Dims] = field(default_factory=list)

    def add(self, dims: Iterable[Part]) -> None:
        """Record parts that follow each other somewhere."""
        self.sequences.append(tuple(dims))

    def groups(self) -> dict[Factor, Group]:
        """The group of every factor."""
        after: dict[Factor, Factor | None] = {}
        before: dict[Factor, Factor | None] = {}
        for sequence in self.sequences:
            now = factors(sequence)
            for i, f in enumerate(now):
                _agree(after, f, now[i + 1] if i + 1 < len(now) else None)
                _agree(before, f, now[i - 1] if i else None)
        result: dict[Factor, Group] = {}
        for f in after:
            if before[f] is None or after[_known(before[f])] is not f:
                line = [f]
                while (g := after[line[-1]]) is not None and before[g] is line[-1]:
                    line.append(g)
                for part in _fitting(line):
                    group = Group(part, prod((c.extent for c in part), start=1))
                    result |= dict.fromkeys(part, group)
        return result


def _fitting(line: Sequence[Factor]) -> list[tuple[Factor, ...]]:
    """Adjacent factors, as many together as a dimension of a kernel may have elements."""
    found: list[list[Factor]] = [[]]
    for f in line:
        together = prod((n.extent for n in (*found[-1], f) if isinstance(n.extent, int)), start=1)
        if found[-1] and together > MAX_ELEMENTS:
            found.append([])
        found[-1].append(f)
    return [tuple(part) for part in found]


def _agree(known: dict[Factor, Factor | None], f: Factor, other: Factor | None) -> None:
    known[f] = other if known.setdefault(f, other) is other else None


def _known(f: Factor | None) -> Factor:
    if f is None:
        raise AssertionError("a factor that follows nothing")
    return f


def _show(dims: Sequence[Factor]) -> str:
    return " x ".join(str(f.extent) for f in dims) or "1"
