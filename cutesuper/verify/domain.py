"""The finite field with what walking block programs needs: loads, stores, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import VerificationError
from cutesuper.ir.field import (
    FieldAlgebra,
    FieldValue,
    P,
    Q,
    Residues,
    align,
    uniform_residues,
)
from cutesuper.ir.operators.base import Attributes, Operator, lookup
from cutesuper.verify.source import names_of
from cutesuper.verify.tiles import Mapped, Window

Valid = tuple[tuple[str, ...], NDArray[np.bool_]]


def draw(shape: tuple[int, ...], seed: Sequence[int], with_q: bool) -> FieldValue:
    """A uniform tensor, dimensions named as in `names_of`; p does not depend on ``with_q``."""
    names = names_of(shape)
    squeezed = tuple(n for n in shape if n != 1)

    def residues(m: int) -> Residues:
        return uniform_residues(np.random.default_rng([*seed, m]), m, squeezed)

    return FieldValue(names, residues(P), residues(Q) if with_q else None)


class FieldDomain(FieldAlgebra):
    """`FieldAlgebra` plus loads and stores of tensors that are cut into parts."""

    def __init__(self, seed: int = 0, shifts: np.random.Generator | None = None) -> None:
        super().__init__(seed, shifts)
        self._padding = np.random.default_rng(seed + 1)
        self._padded: dict[tuple[int, tuple[int, ...]], tuple[Residues, Residues]] = {}

    def elementwise(self, kind: str, args: list[FieldValue], attributes: Attributes) -> FieldValue:
        """An element-wise operator of the table."""
        return lookup(kind).symbolic(self, args, attributes)

    def rename(self, x: FieldValue, names: Mapping[str, str]) -> FieldValue:
        """The same residues, dimensions renamed."""
        return FieldValue(tuple(names.get(d, d) for d in x.dims), x.p, x.q, x.masked)

    def without_q(self, x: FieldValue) -> FieldValue:
        """The value where only residues mod p are of use."""
        return x.without_q()

    def masked(self, x: FieldValue, valid: Valid) -> FieldValue:
        """Zero where an element does not exist. Raises VerificationError."""
        missing = [d for d in valid[0] if d not in x.dims]
        if missing:
            raise VerificationError(f"a label is reduced after its axis {missing[0]} was")
        keep = align(valid[1], valid[0], x.dims)
        q = None if x.q is None else x.q * keep
        return FieldValue(x.dims, x.p * keep, q, x.masked)

    def mask(
        self, x: FieldValue, names: tuple[str, ...], keep: NDArray[np.bool_], operator: Operator
    ) -> FieldValue:
        """What a masking operator makes of x: it keeps elements where ``keep``, whose dimensions
        are ``names``, holds. If it may hide rows as a whole, 0 / 0 is 0 from now on."""
        self.empty_rows |= operator.empties
        return x.replace(align(~keep, names, x.dims), operator.fill)

    def literal(self, names: tuple[str, ...], numbers: NDArray[np.float64]) -> FieldValue:
        """Plain numbers; NaN is a residue like any other, the same one everywhere."""
        value = FieldValue(names, np.zeros(numbers.shape, np.uint64))
        for number in np.unique(numbers):
            nan = np.isnan(number)
            one = self.opaque("nan", self.constant(0.0)) if nan else self.constant(float(number))
            value.p[np.isnan(numbers) if nan else numbers == number] = one.p
        return value

    def larger(self, x: FieldValue, y: FieldValue) -> FieldValue:
        """`max` of two values of the same dimensions."""

        def stack(r: Residues, s: Residues) -> Residues:
            return np.stack([r, align(s, y.dims, x.dims)])

        q = None if x.q is None or y.q is None else stack(x.q, y.q)
        masked = x.masked or y.masked
        return self.max(FieldValue(("pair", *x.dims), stack(x.p, y.p), q, masked), ("pair",))

    def gather(
        self, x: FieldValue, table: NDArray[np.int64], shape: tuple[int, ...]
    ) -> FieldValue:
        """Pages of x in the order of a table, as a tensor of this shape."""

        def pages(r: Residues) -> Residues:
            whole = r.reshape(-1, shape[1] // table.shape[1], *shape[2:])
            return whole[table].reshape([n for n in shape if n != 1])

        q = None if x.q is None else pages(x.q)
        return FieldValue(names_of(shape), pages(x.p), q, x.masked)

    def load(self, x: FieldValue, mapped: Sequence[Mapped], window: Window) -> FieldValue:
        """Tiles of a tensor; padding holds random residues."""
        names = tuple(p for m in mapped for p in m.parts)

        def tiles(r: Residues, modulus: int) -> Residues:
            whole = self._pad(r, mapped, modulus).reshape([n for m in mapped for n in m.extents])
            return whole[tuple(slice(*window[n]) if n in window else slice(None) for n in names)]

        q = None if x.q is None else tiles(x.q, Q)
        return FieldValue(names, tiles(x.p, P), q, x.masked)

    def store(
        self, x: FieldValue, mapped: Sequence[Mapped], window: Window, into: FieldValue | None
    ) -> FieldValue:
        """Put tiles where they belong; ``into`` holds what earlier windows stored."""
        names = tuple(p for m in mapped for p in m.parts)
        q = None if x.q is None else align(x.q, x.dims, names)
        x = FieldValue(names, align(x.p, x.dims, names), q, x.masked)
        if not window:
            return x
        if into is None:
            covered = [n for m in mapped for n in m.extents]
            q = None if x.q is None else np.zeros(covered, np.uint64)
            into = FieldValue(names, np.zeros(covered, np.uint64), q, x.masked)
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
        return FieldValue(names, join(x.p), None if x.q is None else join(x.q), x.masked)

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
