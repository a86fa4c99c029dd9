"""Elements of the inputs of a program, from its seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.fuzz.programs import ROWS, Source

#: logarithm of how much larger peaks are than other numbers
PEAK = 6
#: what an input of numbers may hold
KINDS = ("normal", "positive", "binary", "peaks", "zeros", "coarse")


def elements(source: Source, rows: int, seed: int) -> Tensor:
    """A tensor for an input, of its element type.

    Args:
        source: what it holds: ``normal`` numbers, ``positive`` ones (at least 0.1), ``binary``
            ones (0 or 1), ``peaks`` (a few are 64 times as large), ``zeros`` (half of them, of
            either sign), ``coarse`` (multiples of 1/4: many are equal), ``lengths``, ``limits``
            (some of no column), ``rising`` (limits of rows, none below that of the row before),
            ``labels`` (a few are none), ``table`` (pages, each once where there are enough),
            ``rows`` (half of them counted from the end), ``places`` (the same, each once; a few
            are none, and those that there are too many of).
        rows: what the symbolic extent is.
        seed: of the elements.
    """
    shape = tuple(rows if d == ROWS else int(d) for d in source.shape)
    generator = torch.Generator().manual_seed(seed)
    if source.kind not in KINDS:
        return _integers(source, shape, generator).to(getattr(torch, source.dtype))
    # peaks, too, are of the order of 2^12 at most, as the rule of errors has it
    exponent = min(source.exponent, 12 - PEAK) if source.kind == "peaks" else source.exponent
    x = _numbers(source.kind, shape, generator) * 2.0**exponent
    return x.to(getattr(torch, source.dtype))


def _numbers(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "positive":
        return x.abs() + 0.1
    if kind == "coarse":
        return (x * 4).round() / 4
    chosen = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "binary":
        return (chosen < 0.7).double()
    if kind == "peaks":
        return torch.where(chosen < 0.02, 2.0**PEAK * x, x)
    return torch.where(chosen < 0.5, 0.0 * x, x) if kind == "zeros" else x


def _integers(source: Source, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if source.kind == "table":
        count = math.prod(shape)
        pages = torch.cat(
            [
                torch.randperm(source.limit, generator=generator)
                for _ in range(-(-count // source.limit))
            ]
        )
        return pages[:count].reshape(shape)
    if source.kind == "places":
        return _places(source.limit, shape, generator)
    if source.kind == "rows":
        return torch.randint(-source.limit, source.limit, shape, generator=generator)
    if source.kind in ("limits", "rising"):
        limits = torch.randint(-source.limit // 2, source.limit + 2, shape, generator=generator)
        return limits.sort(-2).values if source.kind == "rising" else limits
    low, high = (0, source.limit + 2) if source.kind == "lengths" else (-1, source.limit + 1)
    x = torch.randint(low, high, shape, generator=generator)
    if source.kind == "labels":  # wrong ones are rare, or no loss would be a number
        inside = torch.randint(0, source.limit, shape, generator=generator)
        rare = torch.rand(shape, generator=generator) < 0.05
        return torch.where(rare, torch.where(x < 0, -100, inside), inside)
    return x


def _places(limit: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Places of rows. None occurs twice: which of two rows would be stored there is not said."""
    count = math.prod(shape)
    beyond = limit + torch.arange(count)  # no places, on either side
    places = torch.cat([torch.randperm(limit, generator=generator), beyond])[:count]
    chance = torch.rand((2, count), generator=generator)
    places = torch.where(chance[0] < 0.05, beyond, places)
    from_end = torch.where(places < limit, places - limit, -1 - places)
    places = torch.where(chance[1] < 0.5, from_end, places)
    return places[torch.randperm(count, generator=generator)].reshape(shape)
