"""Extents and shapes. An extent is an int, or a `Symbol` that is known only when a kernel runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Symbol:
    """An extent (batch, tokens, keys) that may differ from call to call.

    Attributes:
        name: two symbols of one name are the same extent.
        hint: a typical value, used wherever a number is needed before the call (cost, drawing).
    """

    name: str
    hint: int = 16

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Tiles:
    """The number of tiles of a symbolic extent, the last one perhaps in part.

    Attributes:
        symbol: the extent.
        tile: elements of a tile.
    """

    symbol: Symbol
    tile: int

    def of(self, extent: int) -> int:
        """The number of tiles of an extent that is known."""
        return ceil_div(extent, self.tile)


#: most elements of a tensor whose offsets fit into 32 bits, and the largest extent of any
MAX_ELEMENTS = 2**31 - 1

Dim = int | Symbol
Shape = tuple[Dim, ...]


def extent(dim: Dim) -> int:
    """The number behind an extent; a symbol counts with its hint."""
    return dim.hint if isinstance(dim, Symbol) else dim


def size(shape: Shape) -> int:
    """Number of elements; symbols count with their hint."""
    return prod(extent(d) for d in shape)


def open_size(shape: Shape) -> bool:
    """True if a number of elements is known only at the call.
    Kernels have 32 bits for offsets in such a tensor."""
    return any(isinstance(d, Symbol) for d in shape)


def show_shape(shape: Shape) -> str:
    """A shape as text: ``[M, 4096]``."""
    return f"[{', '.join(str(d) for d in shape)}]"


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The common shape of two operands by NumPy's rule, or None."""
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    result: list[Dim] = []
    for x, y in zip(a, b, strict=True):
        if x != y and 1 not in (x, y):
            return None
        result.append(y if x == 1 else x)
    return tuple(result)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
