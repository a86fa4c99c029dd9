"""Clicks that the example makes itself, in the form of the Criteo data.

A click has 13 numbers and 26 categories. How often a category's values occur follows Zipf's law, as
it does in the Criteo data: a few rows of a table are read all the time, most of them hardly ever.
Whether somebody clicks depends on the numbers and on every value, by weights that are drawn once,
so that there is something to learn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS, CATEGORIES = 13, 26
#: the numbers with columns of zeros behind, since kernels load multiples of 16 bytes
PADDED = 16
#: value v of a category is drawn in proportion to 1 / (v + 1) ** EXPONENT
EXPONENT = 1.1


class Clicks(NamedTuple):
    """A batch.

    Attributes:
        numbers: float32 [batch, PADDED].
        ids: int64 [batch, CATEGORIES, bag]: rows of one table that has those of all categories,
            one behind the other.
        clicked: float32 [batch], 0 or 1.
    """

    numbers: Tensor
    ids: Tensor
    clicked: Tensor


def make_clicks(rows: int, batch: int, bag: int, seed: int = 0) -> Clicks:
    """The same arguments give the same clicks, on every machine.

    Args:
        rows: values of each category.
        batch: how many clicks.
        bag: values of a category in one click.
        seed: of the clicks; what decides about them is always the same.
    """
    taste, draw = (torch.Generator().manual_seed(s) for s in (0, seed + 1))
    effect = torch.randn(CATEGORIES * rows, generator=taste) * 0.3
    weights = torch.randn(NUMBERS, generator=taste) * 0.3
    numbers = torch.randn(batch, NUMBERS, generator=draw).exp().log1p()
    frequency = 1.0 / torch.arange(1, rows + 1, dtype=torch.float64) ** EXPONENT
    values = torch.multinomial(frequency, batch * CATEGORIES * bag, True, generator=draw)
    first = torch.arange(CATEGORIES) * rows
    ids = values.view(batch, CATEGORIES, bag) + first[:, None]
    score = (numbers - 1.0) @ weights + effect[ids].mean(-1).sum(-1)
    clicked = torch.rand(batch, generator=draw) < score.sigmoid()
    padded = torch.nn.functional.pad(numbers, (0, PADDED - NUMBERS))
    return Clicks(padded, ids, clicked.float())
