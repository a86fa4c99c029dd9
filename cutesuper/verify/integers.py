"""Integers in the verifier: lengths, tables of pages, indices of rows, labels.

They are no field elements: positions are compared with lengths and labels, and tables and indices
give the places of elements, in every algebra. So they are plain numbers here, drawn anew in every
trial, and an algebra only sees their effects: the elements that stay, and the pages and rows that
are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import Counts, lookup
from cutesuper.ir.operators.index import row_dims

#: the rows (odd or even ones) that have no label, in the trials in turn
_TURNS = (0, 1, 1, 0, 1, 0)
#: the role of an input that has several is the first of these
_BY_RANK = (Counts.PAGES, Counts.ROWS, Counts.LABELS, Counts.LIMITS)
#: roles of numbers that name a place
_PLACED = (Counts.PAGES, Counts.ROWS)
#: largest distance of a tried length past the last column
_BEYOND = 2
#: from this trial on, lengths, limits and labels lie at most `_NEAR` beside a column that moves on
#: each time: a label shows what a length hides only where it is at least as large
NEAR_TRIALS, _NEAR = 6, 1


@dataclass(frozen=True, eq=False)
class Integers:
    """Numbers of a whole tensor, or of its tiles.

    Attributes:
        dims: names of the parts of tiles (see `cutesuper.verify.tiles`), one for each dimension of
            ``data``; none for a whole tensor.
        data: int64, including dimensions of extent 1.
    """

    dims: tuple[str, ...]
    data: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Places:
    """The places where rows are put into a tensor.

    Attributes:
        indices: for each of ``dims`` the place of every row.
        dims: of the tensor, in rising order; the rows are counted along the first of them.
    """

    indices: tuple[NDArray[np.int64], ...]
    dims: tuple[int, ...]

    def whole(self, extents: Mapping[str, int], rows: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor, from its extents by name and the shape of the rows."""
        rank = len(rows) + len(self.dims) - 1
        found = dict(zip(row_dims(rank, self.dims), rows, strict=True))
        found |= {d: extents.get(str(rank - 1 - d), 1) for d in self.dims}
        return tuple(found[d] for d in range(rank))

    def inside(self, shape: Sequence[int]) -> tuple[NDArray[np.bool_], tuple[Any, ...]]:
        """The rows that have a place in a tensor of this shape, and their places."""
        pairs = [(i, shape[d]) for i, d in zip(self.indices, self.dims, strict=True)]
        known = np.logical_and.reduce([(i >= -n) & (i < n) for i, n in pairs])
        return known, tuple(index[known] for index in self.indices)


def integers_read(graph: KernelGraph) -> set[Counts]:
    """The meanings of all integers that operators read."""
    read = (lookup(n.operator) for n in graph.nodes)
    return {op.counts for op in read if op.counts is not None}


def without_q(a: Any, x: Any) -> Any:
    """A value without residues mod q, for uses that need only those mod p; integers unchanged."""
    return x if isinstance(x, Integers) else a.without_q(x)


def draw_integers(
    graph: KernelGraph, index: int, shape: tuple[int, ...], seed: Sequence[int]
) -> Integers:
    """An integer input for one trial.

    Lengths and limits: of three sequences in a row two end inside the scores, at different places
    if there are enough, and one is whole, empty, or longer than the scores. The roles change from
    trial to trial, so that every sequence ends inside in two trials of three. The others are in
    turn: the first sequence is whole in trial 2 and empty in trial 5. (Drawn at random, a causal
    mask was missed that shows in a whole sequence only: a sum over a row with anything hidden is
    -inf.)

    Tables and indices: no page or row occurs twice if there are enough, so that nothing is right by
    chance. Every other index counts from the end; rows that do not exist have no value in a field.
    A single one takes all its places in turn, and several of these all pairs: drawn at random, one
    of two places was in all of 7 trials that of another index, and this was accepted in its place.

    Labels: every other row has a column, different ones if there are enough; the others have an
    integer that is no label, is ignored, or is the last class. Rows take turns, out of step with
    sequences: the last row of a whole sequence has a column in trial 2 or 4.

    In trials from `NEAR_TRIALS` on all lengths, limits and labels are near one place.

    Args:
        graph: the kernel graph at small (or real) extents.
        index: the input.
        shape: its shape.
        seed: the trial comes second.
    """
    rng = np.random.default_rng([*seed, 3])
    count, (kind, top, outside) = prod(shape), _kind(graph, index)
    if count == 1 and kind in _PLACED:
        found = _walked(graph, index, top + 1, seed)
    elif kind == Counts.PAGES:
        found = _shuffled(rng, np.arange(top + 1), count)
    elif kind == Counts.ROWS:
        found = _shuffled(rng, np.arange(top + 1), count) - (top + 1) * (np.arange(count) % 2)
    elif seed[1] >= NEAR_TRIALS:
        columns = top + 1 if kind == Counts.LABELS else max(1, top)
        found = _near(rng, seed[1] % columns, top, count)
    elif kind == Counts.LABELS:
        found = _labels(rng, top, np.array(outside), count, seed[1])
    else:
        found = _lengths(rng, top, count, seed[1])
    return Integers((), found.reshape(shape))


def typical_integers(
    graph: KernelGraph, index: int, shape: tuple[int, ...], seed: int
) -> NDArray[np.int64]:
    """An integer input for measurements.
    Lengths from half of the columns up to all of them, limits that rise from row to row, labels
    that are classes.

    Args:
        graph: the kernel graph.
        index: the input.
        shape: its shape.
        seed: equal seeds give equal numbers.
    """
    rng = np.random.default_rng([seed, index])
    count, (kind, top, _) = prod(shape), _kind(graph, index)
    least = (top + 1) // 2 if kind == Counts.LENGTHS else 0
    found = _shuffled(rng, np.arange(least, top + 1), count).reshape(shape)
    return np.sort(found, axis=max(0, len(shape) - 2)) if kind == Counts.LIMITS else found


def _kind(graph: KernelGraph, index: int) -> tuple[Counts, int, tuple[int, ...]]:
    """The role of an integer input, and its largest number that makes a difference.
    For labels also the numbers that are none. An input in several roles is a table or an index if
    it is one, so that pages and rows exist."""
    uses = [
        (n, lookup(n.operator), [graph.nodes[j].shape for j in n.inputs], k)
        for n in graph.nodes
        for k in lookup(n.operator).integers_among(len(n.inputs))
        if n.inputs[k : k + 1] == (index,)
    ]
    kinds = {op.counts for _, op, _, _ in uses}
    kind = next((c for c in _BY_RANK if c in kinds), Counts.LENGTHS)
    uses = [u for u in uses if u[1].counts == kind]
    top = min((op.largest(s, n.attributes, k) for n, op, s, k in uses), default=0)
    if kind != Counts.LABELS:
        return kind, top, ()
    return kind, top, tuple({i: 0 for n, op, s, _ in uses for i in op.outside(s, n.attributes)})


def _walked(graph: KernelGraph, index: int, count: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """A single place of ``count``: another one in each trial, slower than inputs before it."""
    before = graph.inputs[: graph.inputs.index(index)]
    single = [_kind(graph, i) for i in before if prod(map(extent, graph.nodes[i].shape)) == 1]
    slower = prod(top + 1 for kind, top, _ in single if kind in _PLACED)
    start = int(np.random.default_rng([seed[0], *seed[2:], 4]).integers(count))
    return np.array([(start + seed[1] // slower) % count])


def _lengths(rng: np.random.Generator, top: int, count: int, trial: int) -> NDArray[np.int64]:
    inside, place = _shuffled(rng, np.arange(1, max(2, top)), count), np.arange(count)
    edges = np.array([top, 0, *range(top + 1, top + _BEYOND + 1)])
    return np.where((place + trial) % 3 == 2, edges[(place + trial // 3) % len(edges)], inside)


def _labels(
    rng: np.random.Generator, top: int, outside: NDArray[np.int64], count: int, trial: int
) -> NDArray[np.int64]:
    inside, place = _shuffled(rng, np.arange(top + 1), count), np.arange(count)
    edges = outside[(trial * -(-count // 2) + place // 2) % len(outside)]
    return np.where((place + _TURNS[trial % len(_TURNS)]) % 2 == 1, edges, inside)


def _near(rng: np.random.Generator, place: int, top: int, count: int) -> NDArray[np.int64]:
    return rng.integers(max(0, place - _NEAR), min(top, place + _NEAR) + 1, count)


def _shuffled(rng: np.random.Generator, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """``count`` of the values in random order, each once before one comes again."""
    rounds = [rng.permutation(values) for _ in range(-(-count // len(values)))]
    return np.concatenate(rounds)[:count]
