"""Conditions of the error bound for programs with exponentials, and their checks.

``exp(e)`` is ``OMEGA^e`` with e read mod q. If the arguments ``e_1 .. e_n`` of the kernel graph's
exponentials are *jointly uniform*, the powers behave like n further inputs, drawn from a set of
size q, and degrees bound the chance of an accident as they do without exponentials. The checks:

1. There is one input in which all arguments are affine, with a coefficient matrix of full rank
   (then they are jointly uniform, whatever the other inputs are). Affinity is read off degrees; the
   rank is computed at one point, which proves that it is full at almost all points.
2. With all maxima set to zero, every argument in the muGraph is zero or one of the kernel graph's,
   in every trial.
3. Fresh values in place of maxima (shifts) enter arguments as summands only: at most one is added
   and at most one subtracted. `cutesuper.verify.bound` reads this off the programs.

The proof is in ``docs/verification.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cutesuper.ir.field import FieldValue, Primes, Residues, align, inverse
from cutesuper.ir.graph import KernelGraph
from cutesuper.verify.domain import FieldDomain
from cutesuper.verify.integers import Integers
from cutesuper.verify.source import evaluate_graph

_U = np.uint64
_PROBE = "probe"
#: limit on the number of arguments to check: elimination is cubic
_MAX_ARGUMENTS = 1024


class RecordingDomain(FieldDomain):
    """A field in which maxima are zero and the arguments of exponentials are recorded."""

    def __init__(
        self, seed: int, primes: Primes, failing: float = 0.25, whole: bool = True
    ) -> None:
        super().__init__(seed, None, primes, failing, whole)
        self.arguments: list[FieldValue] = []

    def exp(self, x: FieldValue) -> FieldValue:
        """The exponential; the same argument is recorded once."""
        if x.q is not None and not any(x.q is y.q for y in self.arguments):
            self.arguments.append(x)
        return super().exp(x)

    def max(self, x: FieldValue, dims: Iterable[str], valid: Any = None) -> FieldValue:
        """Zero in place of a maximum."""
        over = set(dims)
        kept = tuple(d for d in x.dims if d not in over)
        shape = [n for d, n in zip(x.dims, x.p.shape, strict=True) if d not in over]
        zero = np.zeros(shape, np.uint64)
        return FieldValue(kept, zero, None if x.q is None else zero)

    def residues(self) -> Residues:
        """All arguments mod q that are not masked, in the order of the program."""
        flat = [
            x.q[~x.gone()] if x.masked else np.ravel(x.q) for x in self.arguments if x.q is not None
        ]
        return np.concatenate(flat) if flat else np.zeros(0, np.uint64)


def arguments_match(
    source: Callable[[RecordingDomain], object],
    found: Callable[[RecordingDomain], object],
    domain: Callable[[], RecordingDomain],
) -> bool:
    """Condition 2 in one trial.

    Args:
        source: evaluates the kernel graph.
        found: evaluates the muGraph.
        domain: makes the field of that trial.
    """
    wanted, given = domain(), domain()
    source(wanted)
    found(given)
    if wanted.nested_exp or given.nested_exp:
        return False
    # zero is allowed: parts of a sum are merged with exp(t - T), a difference of two maxima
    allowed = np.concatenate([wanted.residues(), np.zeros(1, np.uint64)])
    return bool(np.isin(given.residues(), allowed).all())


def jointly_uniform(
    graph: KernelGraph,
    inputs: Sequence[FieldValue | Integers],
    affine: Sequence[int],
    domain: Callable[[], RecordingDomain],
) -> bool:
    """Condition 1: an input among ``affine`` whose coefficient matrix has full row rank.

    Args:
        graph: the expanded kernel graph at the extents of ``inputs``.
        inputs: one draw.
        affine: inputs (by position) in which all arguments of exponentials are affine.
        domain: makes the field of the inputs.
    """
    once = domain()
    evaluate_graph(graph, once, list(inputs))
    most = min(len(once.residues()), _MAX_ARGUMENTS + 1)
    # a smaller input has no such matrix: its probe, an evaluation for each element, is left out
    wide = [
        k
        for k in affine
        if isinstance(x := inputs[k], FieldValue) and x.q is not None and x.q.size >= most
    ]
    return most <= _MAX_ARGUMENTS and any(_full_rank(graph, inputs, k, domain()) for k in wide)


def _full_rank(
    graph: KernelGraph, inputs: Sequence[FieldValue | Integers], k: int, a: RecordingDomain
) -> bool:
    x = inputs[k]
    assert isinstance(x, FieldValue) and x.q is not None
    n, order = x.q.size, _U(a.primes.q)
    # row k of the probe adds 1 to element k of the input; the last row adds nothing
    steps = np.vstack([np.eye(n, dtype=np.uint64), np.zeros((1, n), np.uint64)])
    q = np.remainder(np.add(steps.reshape(n + 1, *x.q.shape), x.q), order)
    p = np.broadcast_to(x.p, q.shape)
    probed = [*inputs]
    probed[k] = FieldValue((_PROBE, *x.dims), p, q)
    evaluate_graph(graph, a, probed)
    columns: list[Residues] = []
    for v in a.arguments:
        if v.q is None or _PROBE not in v.dims:
            return False
        to = (_PROBE, *(d for d in v.dims if d != _PROBE))
        column = align(v.q, v.dims, to).reshape(n + 1, -1)
        if v.masked:  # the same elements in all rows: positions decide
            column = column[:, ~align(v.gone(), v.dims, to).reshape(n + 1, -1)[0]]
        columns.append(column)
    if not columns:
        return True
    values = np.concatenate(columns, 1)
    matrix = np.remainder(np.subtract(np.add(values[:-1], order), values[-1]), order)
    return rank(np.ascontiguousarray(matrix.T), a.primes.q) == values.shape[1]


def rank(matrix: Residues, prime: int) -> int:
    """Rank modulo a prime, by elimination; the matrix is overwritten."""
    q = _U(prime)
    found = 0
    for column in range(matrix.shape[1]):
        candidates = np.flatnonzero(matrix[found:, column])
        if not len(candidates):
            continue
        pivot = found + int(candidates[0])
        matrix[[found, pivot]] = matrix[[pivot, found]]
        row = np.remainder(matrix[found] * inverse(matrix[found, column : column + 1], prime), q)
        below = matrix[found + 1 :]
        factors = np.subtract(q, below[:, column])
        below[...] = np.remainder(np.add(below, np.multiply(factors[:, None], row)), q)
        found += 1
        if found == matrix.shape[0]:
            break
    return found
