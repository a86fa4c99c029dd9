"""Layout and limits of rows; search and schedule share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from cutesuper.ir.dims import Dim, Symbol, extent

MAX_THREADS = 1024
#: most elements of one row that one thread holds (fp32 registers for every live value) in blocks of
#: at most 512 threads; with more threads, which have 64 registers each, half as many
MAX_PER_THREAD = 64
#: longest row that a block can hold and reduce
MAX_ROW = MAX_THREADS * MAX_PER_THREAD // 2
#: most elements of a row that is one tile of a block, if several tensors have rows
LONG_ROW = 8192


def longest_tile(tensors: int) -> int:
    """Elements of the longest row that is one tile of a block, if ``tensors`` tensors have rows."""
    return 2 * LONG_ROW if tensors == 1 else LONG_ROW


def row_label(
    dims: Mapping[str, Dim],
    reduced: Sequence[str],
    stored: Sequence[Sequence[str]],
    loaded: Sequence[Sequence[str]],
) -> str | None:
    """The label that runs along the rows: the reduced label, else the one along which most elements
    are contiguous in memory (if equal, the first output's).

    before: ``relu(X[M, N]) + Y[N, M]``, stored ``[M, N]``; after: N, so that only Y is strided.

    Args:
        dims: extent of every label.
        reduced: labels that are reduced, at most one.
        stored: labels of every tensor written, outermost first.
        loaded: labels of every tensor read, outermost first.

    Returns:
        None if there are no labels. A label of symbolic extent is returned only if no other is
        left.
    """
    if reduced:
        return reduced[0]
    weight: Counter[str] = Counter()
    for labels in (*stored, *loaded):
        if labels:
            weight[labels[-1]] += prod(extent(dims[d]) for d in labels)
    others = [d for labels in (*stored, *loaded) for d in labels]
    fixed = [d for d in (*weight, *others) if not isinstance(dims[d], Symbol)]
    return max(fixed or weight, key=lambda d: weight[d], default=None)
