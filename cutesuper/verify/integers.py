"""int32 tensors in the verifier: lengths and tables of pages.

They are no field elements: positions are compared with lengths, and tables say where elements lie,
whatever the algebra is. So they are plain numbers here, drawn anew in every trial, and an algebra
only sees what they decide: which elements are hidden, and which pages are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.operators import lookup

#: lengths are tried up to this far past the last column
_BEYOND = 2


@dataclass(frozen=True, eq=False)
class Integers:
    """Numbers of a whole tensor, or of its tiles.

    Attributes:
        dims: names of the parts of tiles (see `cutesuper.verify.tiles`), one for each dimension of
            ``data``; none for a whole tensor.
        data: int64, also dimensions of extent 1.
    """

    dims: tuple[str, ...]
    data: NDArray[np.int64]


def without_q(a: Any, x: Any) -> Any:
    """A value where only residues mod p are of use; numbers as they are."""
    return x if isinstance(x, Integers) else a.without_q(x)


def draw_integers(
    graph: KernelGraph, index: int, shape: tuple[int, ...], seed: Sequence[int]
) -> Integers:
    """An int32 input for one trial.

    Lengths: of three sequences in a row two end inside of the scores, at different places where
    there are enough, and one is empty, whole, or longer than the scores. Which ones these are
    changes from trial to trial, so that every sequence ends inside in two trials of three.

    Tables: no page occurs twice where there are enough, so that nothing is right by chance.

    Args:
        graph: the kernel graph at small (or real) extents.
        index: the input.
        shape: its shape.
        seed: the trial comes second.
    """
    rng = np.random.default_rng([*seed, 3])
    count, (table, top) = prod(shape), _kind(graph, index)
    if table:
        found = _shuffled(rng, np.arange(top + 1), count)
    else:
        found = _lengths(rng, top, count, seed[1])
    return Integers((), found.reshape(shape))


def typical_integers(
    graph: KernelGraph, index: int, shape: tuple[int, ...], seed: int
) -> NDArray[np.int64]:
    """An int32 input to measure with: lengths from half of the columns up to all of them.

    Args:
        graph: the kernel graph.
        index: the input.
        shape: its shape.
        seed: equal seeds give equal numbers.
    """
    rng = np.random.default_rng([seed, index])
    count, (table, top) = prod(shape), _kind(graph, index)
    found = _shuffled(rng, np.arange(0 if table else (top + 1) // 2, top + 1), count)
    return found.reshape(shape)


def _kind(graph: KernelGraph, index: int) -> tuple[bool, int]:
    """Whether an int32 input is a table, and the largest number in it that makes a difference."""
    found = [
        (n.operator == "gather_pages", lookup(n.operator).largest(shapes))
        for n in graph.nodes
        for k in lookup(n.operator).integers
        if n.inputs[k : k + 1] == (index,)
        for shapes in [[graph.nodes[j].shape for j in n.inputs]]
    ]
    tables = [top for table, top in found if table]
    return bool(tables), min(tables or [top for _, top in found] or [0])


def _lengths(rng: np.random.Generator, top: int, count: int, trial: int) -> NDArray[np.int64]:
    inside = _shuffled(rng, np.arange(1, max(2, top)), count)
    edges = _shuffled(rng, np.array([0, *range(top, top + _BEYOND + 1)]), count)
    return np.where((np.arange(count) + trial) % 3 == 2, edges, inside)


def _shuffled(rng: np.random.Generator, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """``count`` of the values in random order, each once before one comes again."""
    rounds = [rng.permutation(values) for _ in range(-(-count // len(values)))]
    return np.concatenate(rounds)[:count]

