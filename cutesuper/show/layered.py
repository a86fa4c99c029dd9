"""Layout of a layered drawing: rows from top to bottom, no overlaps, few crossings.

The rows are given; here nodes are ordered within their rows (barycentres, a few sweeps), and
moved as near to the middle of their neighbours as the order allows (least squares with minimal
distances, solved by pooling adjacent violators).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 24


@dataclass(frozen=True)
class Item:
    """A box in a row.

    ``key`` is unique. A bend of a long edge is an item too: narrow, and with a greater ``weight``,
    so that the edge stays straight and boxes move instead.
    """

    key: Hashable
    width: float
    weight: float = 1.0


@dataclass(frozen=True)
class Layout:
    """Centres of all items, and the chosen order in each row."""

    x: dict[Hashable, float]
    rows: list[list[Item]]


def place(rows: list[list[Item]], edges: list[tuple[Hashable, Hashable]], gap: float) -> Layout:
    """Choose an order within each row and a centre for every item.

    Args:
        rows: items of each row, from the top; the given order breaks ties.
        edges: pairs of keys in adjacent rows, upper one first.
        gap: least distance between two boxes of a row.
    """
    above: dict[Hashable, list[Hashable]] = {i.key: [] for r in rows for i in r}
    below: dict[Hashable, list[Hashable]] = {i.key: [] for r in rows for i in r}
    for a, b in edges:
        below[a].append(b)
        above[b].append(a)
    rows = [list(r) for r in rows]
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        _reorder(rows, above if downwards else below, downwards)
    weight = {i.key: i.weight for r in rows for i in r}
    x: dict[Hashable, float] = {}
    for row in rows:
        x.update(zip([i.key for i in row], _spread([0.0] * len(row), row, gap), strict=True))
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted: list[float] = []
            for i in row:
                near = above[i.key] + below[i.key]
                total = sum(weight[n] for n in near)
                pull = sum(x[n] * weight[n] for n in near)
                wanted.append(pull / total if near else x[i.key])
            x.update(zip([i.key for i in row], _spread(wanted, row, gap), strict=True))
    return Layout(x, rows)


def _reorder(
    rows: list[list[Item]], neighbours: dict[Hashable, list[Hashable]], downwards: bool
) -> None:
    index: dict[Hashable, float] = {}
    for row in rows if downwards else reversed(rows):
        # positions count from the middle, so that rows of different lengths can be compared
        middle = (len(row) - 1) / 2
        rank = {
            i.key: _mean([index[n] for n in neighbours[i.key]], k - middle)
            for k, i in enumerate(row)
        }
        row.sort(key=lambda i: rank[i.key])
        index.update({i.key: k - middle for k, i in enumerate(row)})


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _spread(wanted: list[float], row: list[Item], gap: float) -> list[float]:
    """The centres nearest to ``wanted`` (least squares) that keep the order and the gaps."""
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (a.width + b.width) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of items
    for want, offset, item in zip(wanted, offsets, row, strict=False):
        block = (want - offset, item.weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, weight, count = blocks.pop()
            total = weight + block[1]
            block = ((mean * weight + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [m + o for m, o in zip(means, offsets, strict=False)]
