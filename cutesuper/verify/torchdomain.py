"""PyTorch as the algebra of block programs: `TorchDomain` for `cutesuper.verify.tiles.BlockRun`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cutesuper.ir.block import PUT
from cutesuper.ir.evaluate import hidden_difference
from cutesuper.ir.operators.base import CONSTANT, Attributes, Operator, lookup
from cutesuper.verify.integers import Places
from cutesuper.verify.tiles import Mapped, Window

#: stands for infinity: larger than any number of fp32
_INFINITE = 1e300
#: the last bits of a float64 that hold a place: rows have at most 2^20 elements
_PLACES = (1 << 24) - 1


@dataclass(frozen=True, eq=False)
class TorchValue:
    """A tensor with named dimensions."""

    dims: tuple[str, ...]
    data: torch.Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Extent of every dimension."""
        return dict(zip(self.dims, self.data.shape, strict=True))


class TorchDomain:
    """PyTorch as the algebra of `cutesuper.verify.tiles.BlockRun`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def elementwise(self, kind: str, args: list[TorchValue], attributes: Attributes) -> TorchValue:
        """The reference of the operator, operands aligned by name."""
        if kind == CONSTANT:
            return self.constant(attributes["value"])
        dims = tuple(dict.fromkeys(d for x in args for d in x.dims))
        data = [align(x, dims) for x in args]
        operator = lookup(kind)
        result = operator.reference(data, attributes)
        if operator.signs == (1, -1):  # -inf - -inf = -inf, see `cutesuper.ir.field`
            result = hidden_difference(result, data)
        return TorchValue(dims, result)

    def add(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Sum of two values of the same dimensions."""
        return TorchValue(x.dims, x.data + align(y, x.dims))

    def mul(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Product of two values of the same dimensions."""
        return TorchValue(x.dims, x.data * align(y, x.dims))

    def cut(self, x: TorchValue, dim: str, at: int | slice) -> TorchValue:
        """Elements of x along a dimension; it is gone where ``at`` is one position."""
        kept = x.dims if isinstance(at, slice) else tuple(d for d in x.dims if d != dim)
        return TorchValue(kept, x.data[tuple(at if d == dim else slice(None) for d in x.dims)])

    def larger(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Maximum of two values of the same dimensions."""
        return TorchValue(x.dims, torch.maximum(x.data, align(y, x.dims)))

    def div(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """Quotient by a constant."""
        return TorchValue(x.dims, x.data / y.data)

    def constant(self, value: float) -> TorchValue:
        """A scalar."""
        return TorchValue((), torch.tensor(value, dtype=self.dtype))

    def sum(self, x: TorchValue, dims: Iterable[str], extents: Mapping[str, int]) -> TorchValue:
        """Sum; a dimension that x lacks multiplies by its extent."""
        over = tuple(dims)
        factor = prod(extents[d] for d in over if d not in x.dims)
        axes = [x.dims.index(d) for d in over if d in x.dims]
        total = x.data.sum(axes) if axes else x.data
        kept = tuple(d for d in x.dims if d not in over)
        return TorchValue(kept, total if factor == 1 else total * factor)

    def max(self, x: TorchValue, dims: Iterable[str], valid: Any = None) -> TorchValue:
        """Maximum over the elements that exist."""
        if valid is not None:
            x = self._where(x, valid, -torch.inf)
        over = [d for d in dims if d in x.dims]
        kept = tuple(d for d in x.dims if d not in over)
        axes = [x.dims.index(d) for d in over]
        return TorchValue(kept, x.data.amax(axes) if axes else x.data)

    def placed(self, x: TorchValue, dims: tuple[str, ...], places: NDArray[np.int64]) -> TorchValue:
        """Numbers in float64 whose last bits are their places.
        Of equal ones the first is the largest. `place` reads them."""
        at = TorchValue(dims, torch.from_numpy(places).to(x.data.device))
        every = (*x.dims, *(d for d in dims if d not in x.dims))
        number = align(x, every).double() + 0.0
        # a NaN is the largest; as one it would lose its place
        number = number.clamp(-_INFINITE, _INFINITE).nan_to_num(torch.finfo(torch.float64).max)
        last = torch.where(number < 0, align(at, every), _PLACES - align(at, every))
        bits = (number.view(torch.int64) & ~_PLACES) | last
        return TorchValue(every, bits.view(torch.float64))

    def foremost(self, x: TorchValue, dims: Iterable[str], valid: Any = None) -> TorchValue:
        """The largest element, with its place."""
        return self.max(x, dims, valid)

    def place(self, x: TorchValue) -> TorchValue:
        """The places in the last bits of numbers."""
        last = x.data.view(torch.int64) & _PLACES
        found = torch.where(x.data < 0, last, _PLACES - last)
        return TorchValue(x.dims, found.to(self.dtype))

    def sooner(self, x: TorchValue, y: TorchValue) -> TorchValue:
        """`foremost` of two."""
        return self.larger(x, y)

    def matmul(self, x: TorchValue, y: TorchValue, over: Iterable[str]) -> TorchValue:
        """Contraction by name."""
        names = dict.fromkeys((*x.dims, *y.dims))
        letter = dict(zip(names, ascii_letters, strict=False))
        dims = tuple(d for d in names if d not in set(over))
        left, right, out = ("".join(letter[d] for d in v) for v in (x.dims, y.dims, dims))
        return TorchValue(dims, torch.einsum(f"{left},{right}->{out}", x.data, y.data))

    def masked(self, x: TorchValue, valid: Any, other: float = 0.0) -> TorchValue:
        """x, another number where an element does not exist."""
        return self._where(x, valid, other)

    def mask(
        self, x: TorchValue, names: tuple[str, ...], keep: NDArray[np.bool_], operator: Operator
    ) -> TorchValue:
        """A masking operator applied to x; ``keep`` has the dimensions ``names``."""
        return self._where(x, (names, keep), operator.fill)

    def literal(self, names: tuple[str, ...], numbers: NDArray[np.float64]) -> TorchValue:
        """Literal numbers."""
        return TorchValue(names, torch.from_numpy(numbers).to(self.dtype))

    def without_q(self, x: TorchValue) -> TorchValue:
        """x: there is only one kind of number here."""
        return x

    def turned(
        self, x: TorchValue, dim: str, places: NDArray[np.int64], signs: NDArray[np.float64]
    ) -> TorchValue:
        """x with the elements of these places along a dimension, times 1 or -1."""
        index = torch.from_numpy(places).to(x.data.device)
        moved = TorchValue(x.dims, x.data.index_select(x.dims.index(dim), index))
        return self.mul(moved, TorchValue((dim,), torch.from_numpy(signs).to(x.data)))

    def scanned(self, x: TorchValue, dim: str, length: int, reverse: bool) -> TorchValue:
        """Sums up to each of the first elements along a dimension, or from each on."""
        axis, found = x.dims.index(dim), torch.zeros_like(x.data)
        given = x.data.narrow(axis, 0, length)
        given = given.flip(axis).cumsum(axis).flip(axis) if reverse else given.cumsum(axis)
        found.narrow(axis, 0, length).copy_(given)
        return TorchValue(x.dims, found)

    def gather(
        self, x: TorchValue, integers: NDArray[np.int64], operator: Operator, shape: tuple[int, ...]
    ) -> TorchValue:
        """Parts of x that integers name, as a tensor of this shape."""
        index = torch.from_numpy(integers).to(x.data.device)
        found = operator.reference([x.data, index], {})
        return TorchValue(tuple(map(str, range(len(shape)))), found.reshape(shape))

    def put(
        self,
        x: TorchValue,
        places: Places,
        rows: TorchValue,
        shape: tuple[int, ...],
    ) -> TorchValue:
        """x with rows of this shape at some places."""
        indices = [torch.from_numpy(index).to(x.data.device) for index in places.indices]
        put = lookup(PUT).reference([x.data, *indices, rows.data], {"dim": places.dims})
        return TorchValue(tuple(map(str, range(put.dim()))), put)

    def load(self, x: TorchValue, mapped: Sequence[Mapped], window: Window) -> TorchValue:
        """Tiles of a tensor, zero past its end."""
        names = tuple(p for m in mapped for p in m.parts)
        data = x.data.reshape([m.extent for m in mapped])
        beyond = [prod(m.extents) - m.extent for m in mapped]
        if any(beyond):
            data = torch.nn.functional.pad(data, [n for b in reversed(beyond) for n in (0, b)])
        data = data.reshape([n for m in mapped for n in m.extents])
        return TorchValue(names, data[place(names, window)])

    def store(
        self, x: TorchValue, mapped: Sequence[Mapped], window: Window, into: TorchValue | None
    ) -> TorchValue:
        """Store tiles at their places."""
        names = tuple(p for m in mapped for p in m.parts)
        if not window:
            return TorchValue(names, align(x, names))
        if into is None:
            covered = [n for m in mapped for n in m.extents]
            into = TorchValue(names, torch.zeros(covered, dtype=self.dtype, device=x.data.device))
        into.data[place(names, window)] = align(x, names)
        return into

    def finish(self, x: TorchValue, mapped: Sequence[Mapped]) -> TorchValue:
        """The tensor behind stored tiles, without the padding."""
        data = x.data.reshape([prod(m.extents) for m in mapped])
        dims = tuple(str(i) for i in range(len(mapped)))
        return TorchValue(dims, data[tuple(slice(m.extent) for m in mapped)])

    def _where(
        self, x: TorchValue, valid: tuple[tuple[str, ...], NDArray[np.bool_]], other: float
    ) -> TorchValue:
        exists = torch.from_numpy(np.array(valid[1])).to(x.data.device)
        keep = align(TorchValue(valid[0], exists), x.dims)
        return TorchValue(x.dims, torch.where(keep, x.data, other))


def place(names: tuple[str, ...], window: Window) -> tuple[slice, ...]:
    """Slices of the tiles of a window."""
    return tuple(slice(*window[n]) if n in window else slice(None) for n in names)


def align(x: TorchValue, dims: tuple[str, ...]) -> torch.Tensor:
    """The data with these dimensions, extents of 1 where x has none."""
    if x.dims == dims:
        return x.data
    data = x.data.permute([x.dims.index(d) for d in dims if d in x.dims])
    return data[tuple(slice(None) if d in x.dims else None for d in dims)]
