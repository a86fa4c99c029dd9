"""Memory layout of the tensors of attention: storage orders that kernels read, caches in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cutesuper.errors import LayoutError
from cutesuper.torch.ops.attention.kind import Order


@dataclass(frozen=True)
class Stored:
    """The storage of a tensor ``[B, H, S, D]``.

    Attributes:
        order: of its dimensions in memory.
        positions: S, or more if the tensor is the beginning of a longer cache.
    """

    order: Order
    positions: int


def order_of(t: torch.Tensor) -> Order | None:
    """The storage order of a tensor ``[B, H, S, D]`` without gaps; None for anything else."""
    if t.is_contiguous():
        return Order.HEADS
    return Order.TOKENS if t.transpose(1, 2).is_contiguous() else None


def stored(t: torch.Tensor, name: str) -> Stored:
    """The storage of keys or values, which may fill the beginning of a cache.

    before: ``cache[:, :, :100]`` of a cache ``[2, 8, 4096, 64]``; after: the whole cache, 4096
    positions, of which 100 are used.

    Raises:
        LayoutError: there are gaps of another kind.
    """
    order = order_of(t)
    if order is not None:
        return Stored(order, t.shape[2])
    for order in Order:
        positions = _capacity(t, order)
        if positions and within(t, positions):
            return Stored(order, positions)
    raise refusal(t, name, ", or begin with the first position of such a cache, [:, :, :t]")


def _capacity(t: torch.Tensor, order: Order) -> int:
    """Positions of the cache whose beginning ``t`` is; 0 if it is none."""
    b, h, s, d = t.shape
    heads, inner = (h, d) if order is Order.HEADS else (1, h * d)
    # the stride of the outermost extent other than 1 gives the number of positions
    block = t.stride(1) if heads > 1 else t.stride(0)
    positions = block // inner
    strides = (heads * block, block, d) if order is Order.HEADS else (block, d, inner)
    expected = (*strides, 1)
    fits = all(n == 1 or have == want
               for n, have, want in zip(t.shape, t.stride(), expected, strict=True))  # fmt: skip
    outer = b * heads > 1
    return positions if fits and outer and positions * inner == block and positions > s else 0


def within(t: torch.Tensor, positions: int) -> bool:
    """True if ``t`` may be read with this many positions, as its storage holds all of them."""
    b, h, _, d = t.shape
    end = t.storage_offset() + b * h * positions * d
    return end * t.element_size() <= t.untyped_storage().nbytes()


def refusal(t: torch.Tensor, name: str, more: str = "") -> LayoutError:
    """The error for strides that no kernel reads."""
    return LayoutError(
        f"attention: {name} of shape {list(t.shape)} has the strides {list(t.stride())}; it must "
        f"be contiguous, or .transpose(1, 2) of something contiguous{more}; call .contiguous()"
    )


#: extents and strides
View = tuple[tuple[int, ...], tuple[int, ...]]


def compact(shape: tuple[int, ...]) -> View:
    """Extents with the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return shape, tuple(reversed(strides))
