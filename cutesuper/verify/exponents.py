"""When an error bound holds for programs with exponentials, and the checks of its conditions.

``exp(e)`` is ``OMEGA^e`` with e read mod q. If the arguments ``e_1 .. e_n`` of the kernel graph's
exponentials are *jointly uniform*, the powers behave like n further inputs, drawn from a set of
size q, and degrees bound the chance of an accident as they do without exponentials. The checks:

1. There is one input in which all arguments are affine, with a coefficient matrix of full rank
   (then they are jointly uniform, whatever the other inputs are). Affine is read off degrees; the
   rank is computed at one point, which proves that it is full at almost all points.
2. Every argument in the muGraph is one of the kernel graph's, in every trial.
3. Where maxima are replaced by fresh values (shifts), they only move arguments by one shift.

The proof is in ``docs/verification.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cutesuper.graph.field import FieldValue, Q, Residues, align, inverse
from cutesuper.graph.kernel import KernelGraph
from cutesuper.verify.domain import FieldDomain
from cutesuper.verify.source import evaluate_graph

_U = np.uint64
_PROBE = "probe"
#: more arguments than this are not checked: elimination is cubic
_MAX_ARGUMENTS = 1024


class RecordingDomain(FieldDomain):
    """A field that remembers the arguments of exponentials and the shifts it handed out.

    Args:
        seed: as for `FieldDomain`.
        shifts: as for `FieldDomain`.
        zero: hand out zeros for shifts.
    """

    def __init__(
        self, seed: int, shifts: np.random.Generator | None = None, zero: bool = False
    ) -> None:
        super().__init__(seed, shifts)
        self.zero = zero
        self.arguments: list[FieldValue] = []
        self.shifted: list[Residues] = []

    def exp(self, x: FieldValue) -> FieldValue:
        """The exponential; the same argument is remembered once."""
        if x.q is not None and not any(x.q is y.q for y in self.arguments):
            self.arguments.append(x)
        return super().exp(x)

    def max(self, x: FieldValue, dims: Iterable[str], valid: Any = None) -> FieldValue:
        """A shift."""
        m = super().max(x, dims, valid)
        if self.zero:
            q = None if m.q is None else np.zeros_like(m.q)
            m = FieldValue(m.dims, np.zeros_like(m.p), q)
        if m.q is not None:
            self.shifted.append(m.q)
        return m

    def residues(self) -> Residues:
        """All arguments mod q, in the order of the program."""
        flat = [np.ravel(x.q) for x in self.arguments if x.q is not None]
        return np.concatenate(flat) if flat else np.zeros(0, np.uint64)


def arguments_match(
    source: Callable[[RecordingDomain], object],
    found: Callable[[RecordingDomain], object],
    domain: Callable[[bool, bool], RecordingDomain],
) -> bool:
    """Conditions 2 and 3 in one trial.

    Args:
        source: evaluates the kernel graph.
        found: evaluates the muGraph.
        domain: makes the domain for (muGraph?, zero shifts?).
    """
    plain: list[Residues] = []
    for k, run in enumerate((source, found)):
        at_zero, moved = domain(bool(k), True), domain(bool(k), False)
        run(at_zero)
        run(moved)
        x, y = at_zero.residues(), moved.residues()
        if at_zero.nested_exp or x.shape != y.shape or not _moved_by_one(x, y, moved.shifted):
            return False
        plain.append(x)
    return bool(np.isin(plain[1], plain[0]).all())


def _moved_by_one(x: Residues, y: Residues, shifts: list[Residues]) -> bool:
    q = _U(Q)
    steps = np.unique(np.concatenate([np.ravel(s) for s in shifts])) if shifts else None
    moved = np.remainder(np.subtract(np.add(y, q), x), q)
    allowed = np.zeros(1, np.uint64)
    if steps is not None:
        allowed = np.concatenate([allowed, steps, np.remainder(np.subtract(q, steps), q)])
    return bool(np.isin(moved, allowed).all())


def jointly_uniform(
    graph: KernelGraph, inputs: Sequence[FieldValue], affine: Sequence[int], seed: int
) -> bool:
    """Condition 1: an input among ``affine`` whose coefficient matrix has full row rank.

    Args:
        graph: the expanded kernel graph at the extents of ``inputs``.
        inputs: one draw.
        affine: inputs (by position) in which all arguments of exponentials are affine.
        seed: of the domain.
    """
    return any(_full_rank(graph, inputs, k, seed) for k in affine)


def _full_rank(graph: KernelGraph, inputs: Sequence[FieldValue], k: int, seed: int) -> bool:
    x = inputs[k]
    if x.q is None:
        return False
    n = x.q.size
    # every row of the probe adds 1 to another element; the last one adds nothing
    steps = np.vstack([np.eye(n, dtype=np.uint64), np.zeros((1, n), np.uint64)])
    q = np.remainder(np.add(steps.reshape(n + 1, *x.q.shape), x.q), _U(Q))
    p = np.broadcast_to(x.p, q.shape)
    probed = [*inputs]
    probed[k] = FieldValue((_PROBE, *x.dims), p, q)
    a = RecordingDomain(seed, np.random.default_rng(seed), zero=True)
    evaluate_graph(graph, a, probed)
    columns: list[Residues] = []
    for v in a.arguments:
        if v.q is None or _PROBE not in v.dims:
            return False
        to = (_PROBE, *(d for d in v.dims if d != _PROBE))
        columns.append(align(v.q, v.dims, to).reshape(n + 1, -1))
    if not columns:
        return True
    values = np.concatenate(columns, 1)
    if values.shape[1] > min(n, _MAX_ARGUMENTS):
        return False
    matrix = np.remainder(np.subtract(np.add(values[:-1], _U(Q)), values[-1]), _U(Q))
    return rank(np.ascontiguousarray(matrix.T)) == values.shape[1]


def rank(matrix: Residues) -> int:
    """Rank mod q, by elimination; the matrix is overwritten."""
    q = _U(Q)
    found = 0
    for column in range(matrix.shape[1]):
        candidates = np.flatnonzero(matrix[found:, column])
        if not len(candidates):
            continue
        pivot = found + int(candidates[0])
        matrix[[found, pivot]] = matrix[[pivot, found]]
        row = np.remainder(matrix[found] * inverse(matrix[found, column : column + 1], Q), q)
        below = matrix[found + 1 :]
        factors = np.subtract(q, below[:, column])
        below[...] = np.remainder(np.add(below, np.multiply(factors[:, None], row)), q)
        found += 1
        if found == matrix.shape[0]:
            break
    return found
