"""Values that a kernel rounds to float16: a test that float16 can hold them.

Everything is computed in float32, but operands of matrix products and tensors between kernels have
an element type of 16 bits. bfloat16 has the range of float32. float16 ends at 65504 and loses
digits below 6e-5, so that a value of a kernel may be infinite or 0 in it where neither the inputs
nor the outputs are: in ``(x z) @ W / rms(x z)``, from ``rms_norm(x z) @ W``, ``x z`` is infinite
for elements of 300, and half of its digits are gone for elements of 0.0005.

A value *fits* if float16 holds it wherever float16 holds its operands. This is found by computing
it: with random tensors of each of the magnitudes 2^-12 and 2^12, any three of them in all
combinations (an orthogonal array), and with all of magnitude 1. Elements are 1/2 to 3/2 of the
magnitude, so that a norm over the few elements of a trial is not near 0 by chance. A value fits if
no element is too large and the rounding error is at most `MOST` of its norm. So ``x + r``,
``x sigmoid(z)``, ``x / rms(x)`` and ``exp(s - max(s))`` fit, ``x z``, ``x^2`` and ``exp(s)`` do
not. Vectors are weights and biases, of magnitude 1.

A value that does not fit may still be rounded where the user's program rounds it as well: see
`proportional`, and `narrow` for whole graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from cutesuper.ir.arraymath import Array, ArrayMath
from cutesuper.ir.dims import Dim, extent
from cutesuper.ir.dtypes import DType, float16
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import Attributes, Operator, lookup
from cutesuper.ir.operators.monoid import SUM

#: tensors are tried with elements of magnitude 2^-12 and 2^12
MAGNITUDE = 2.0**12
#: rounding error of a value, relative to its norm: one unit in the last place of 1
MOST = float16.eps
#: greatest constant factor between a value and one that the program rounds, and 1 / the least
FACTOR = 4.0
#: elements of a dimension in the trials
EXTENT = 4
#: binary digits of a trial's number
_DIGITS = 5


@cache
def levels() -> Array:
    """The magnitudes, one row for each trial and one column for each of 16 tensors.

    Each column is the parity of an odd number of digits of the row's number: any three such columns
    are independent, so that all eight combinations occur (Rao, "Factorial experiments derivable
    from combinatorial arrangements of arrays", 1947).
    """
    rows = np.arange(2**_DIGITS)
    masks = [m for m in range(2**_DIGITS) if m.bit_count() % 2]
    parity = np.array([[(int(r) & m).bit_count() % 2 for m in masks] for r in rows])
    signs = np.concatenate([2.0 * parity - 1.0, np.zeros((1, len(masks)))])
    return MAGNITUDE**signs


@dataclass
class Trials:
    """Draws tensors for all trials at once; the first dimension of every array is the trial.

    Attributes:
        columns: the column of `levels` for each tensor drawn so far, by name.
    """

    columns: dict[Any, int] = field(default_factory=dict)

    def draw(self, name: Any, shape: Sequence[int], dtype: DType, rank: int) -> Array:
        """A tensor with random numbers of its type; ``rank`` is that of the tensor as stored."""
        column = self.columns.setdefault(name, len(self.columns))
        rng = np.random.default_rng([column, *shape])
        plain = (rng.choice((-1.0, 1.0), shape) * rng.uniform(0.5, 1.5, shape))[None]
        magnitudes = levels()[:, column % levels().shape[1]]
        if rank < 2:  # a weight or a bias
            magnitudes = np.ones_like(magnitudes)
        x = magnitudes.reshape(-1, *(1 for _ in shape)) * plain
        return x if dtype.itemsize > 2 else x.astype(np.float16).astype(np.float64)


def small(n: Dim) -> int:
    """The extent of a dimension in a trial."""
    return min(extent(n), EXTENT)


def computed(kind: str, args: Sequence[Array], attributes: Attributes) -> Array:
    """An element-wise operator, or a mask, on float64.
    Nothing is hidden here: what a mask hides is -inf, which every type holds."""
    operator = lookup(kind)
    if operator.hides:
        return np.broadcast_arrays(*args)[-1]
    if operator.scans:
        return np.cumsum(args[0], -1)
    if operator.masks or operator.turns:  # magnitudes matter here
        return args[0]
    if operator.integers:
        return np.ones_like(args[0])
    with np.errstate(all="ignore"):
        return np.atleast_1d(operator.scalar(ArrayMath, list(args), attributes))


def product(multiply: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """A product in which infinities may meet zeros without a warning."""
    with np.errstate(all="ignore"):
        return multiply(x, y)


def reduced(operator: Operator, x: Array, axis: int) -> Array:
    """A reduction (the sum for a product) along an axis, which stays with extent 1."""
    how = SUM if operator.reduces is None else operator.reduces
    with np.errstate(all="ignore"):
        total = np.asarray(getattr(np, how.name)(x, axis=axis, keepdims=True))
        return total / x.shape[axis] if operator.averages else total


# -------------------------------------------------------------------------------------- the rule


def fits(x: Array) -> bool:
    """True if float16 holds a value in every trial."""
    with np.errstate(all="ignore"):
        error = _norms(x.astype(np.float16).astype(np.float64) - x)
        return bool((error <= MOST * _norms(x)).all())  # false where anything is not finite


def proportional(x: Array, y: Array) -> bool:
    """True if x is y times one number between 1 / `FACTOR` and `FACTOR`, in every trial.
    Trials in which y is not finite do not count. Elements are sorted first: they may be in another
    order, as after a transpose."""
    if x.size != y.size:
        return False
    x, y = (v.reshape(v.shape[0], -1) for v in (x, y))
    finite = np.isfinite(y).all(1)
    if not finite.any() or not np.isfinite(x[finite]).all():
        return False
    x, y = x[finite], y[finite]
    ratio = float(_norms(x[-1:])[0] / max(_norms(y[-1:])[0], 1e-300))
    if not 1 / FACTOR <= ratio <= FACTOR:
        return False
    return any(_near(np.sort(x, 1), np.sort(sign * ratio * y, 1)) for sign in (1, -1))


def _near(x: Array, y: Array) -> bool:
    return bool((_norms(x - y) <= 1e-6 * _norms(y)).all())


def _norms(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.sqrt(np.square(x).reshape(x.shape[0], -1).sum(1))


# ---------------------------------------------------------------------------------- whole graphs


def narrow(graph: KernelGraph) -> frozenset[int]:
    """The nodes that may be stored as float16 between two kernels.

    These are the nodes that fit and those that the program itself rounds: operands and results of
    products, which have 16 bits in any implementation. Values computed from a product are judged as
    if the product was loaded.

    Args:
        graph: primitive operators.
    """
    trials, found, drawn = Trials(), set[int](), dict[int, Array]()
    for i, node in enumerate(graph.nodes):
        if node.given or node.facets.contracts:
            shape = [small(n) for n in node.shape]
            drawn[i] = trials.draw(i, shape, node.dtype, len(shape))
            found |= {i, *node.inputs}
    for i, x in enumerate(node_values(graph, drawn)):
        if i not in found and not _is_square(graph.nodes[i]) and fits(x):
            found.add(i)
    for i in reversed(range(len(graph.nodes))):  # a transpose is a view: its operand is stored
        if i in found and graph.nodes[i].facets.permutes:
            found.update(graph.nodes[i].inputs)
    for i in sorted(frozenset[int]().union(*comparisons(graph).values())):
        if graph.nodes[i].inputs[0] in found:
            found.add(i)
    return frozenset(found)


def _is_square(node: Node) -> bool:
    """True for squares, which do not fit even where their roots do.
    Shares of 10^-4 of a softmax have 11 digits, their squares one, and a norm along another
    dimension is made of those alone."""
    powers = node.facets.powers
    return powers == (2,) or (powers == (1, 1) and len(set(node.inputs)) == 1)


def comparisons(graph: KernelGraph) -> dict[int, frozenset[int]]:
    """The thresholds that compare the maximum of computed values with these, and such maxima.

    The derivative of a maximum divides by the number of elements that equal it, which is 0 if the
    maximum and the elements are rounded apart. A maximum of values that are put together is the
    larger one of their maxima, and one along two dimensions that of maxima along one: these are
    maxima of the threshold, too.

    Args:
        graph: any.

    Returns:
        The maxima of each such node: of ``at_least(x, max(x))``, of ``step(max(x) - x)``, of
        ``at_least(x, maximum(max(x), max(y)))``, of ``at_least(x, max(max(x)))``.
    """
    nodes, tops, found = graph.nodes, _tops(graph), dict[int, frozenset[int]]()
    for i, node in enumerate(nodes):
        met = {j for j in node.inputs if nodes[j].facets.subtracts}
        pairs = [node.inputs, *(nodes[j].inputs for j in met)] if node.facets.flat else []
        tried = ((elements_of(graph, tops[j]), p, tops[j]) for p in pairs for j in p)
        maxima = frozenset[int]().union(
            *(top for of, p, top in tried if of & set(p) and any(not nodes[e].given for e in of))
        )
        if maxima:
            found[i] = maxima
    return found


def elements_of(graph: KernelGraph, maxima: Collection[int]) -> set[int]:
    """The values that maxima are taken of, without the maxima of maxima."""
    return {graph.nodes[i].inputs[0] for i in maxima if graph.nodes[i].facets.selects}


def _tops(graph: KernelGraph) -> list[frozenset[int]]:
    """All maxima that each maximum, or the larger one of several values, is made of."""
    found: list[frozenset[int]] = []
    for i, node in enumerate(graph.nodes):
        below = [found[j] for j in node.inputs]
        all_of = frozenset[int]().union(*below)
        larger = all(below) and all(_combines(node, graph.nodes[j]) for j in all_of)
        top = node.facets.selects or (all_of and larger)
        found.append(frozenset((i,)) | (all_of if larger else frozenset()) if top else frozenset())
    return found


def _combines(node: Node, maximum: Node) -> bool:
    """True if a node has the larger one of some numbers, as a maximum or a node like it has."""
    pair, other = (
        n.operator if n.facets.reduces is None else n.facets.reduces.operator
        for n in (node, maximum)
    )
    return pair == other


def node_values(graph: KernelGraph, given: dict[int, Array]) -> list[Array]:
    """Every node's value in all trials, computed from the given ones.

    Args:
        graph: primitive operators.
        given: values of at least the inputs and of tensors gathered from pages.
    """
    values: list[Array] = []
    for i, node in enumerate(graph.nodes):
        operator, args = lookup(node.operator), [values[j] for j in node.inputs]
        if i in given:
            values.append(given[i])
        elif operator.puts:  # as a later kernel loads it
            values.append(args[0])
        elif operator.permutes:
            values.append(args[0].transpose(0, *(1 + d for d in node.attributes["dims"])))
        elif operator.contracts:
            values.append(product(np.matmul, *_aligned(args)))
        elif operator.reduces:
            values.append(reduced(operator, args[0], 1 + node.attributes["dim"]))
        else:
            values.append(computed(node.operator, _aligned(args), node.attributes))
    return values


def _aligned(args: Sequence[Array]) -> list[Array]:
    """Operands with the same number of dimensions; extents of 1 are put in after the trial."""
    rank = max((x.ndim for x in args), default=0)
    return [x.reshape(*x.shape[:1], *(1,) * (rank - x.ndim), *x.shape[1:]) for x in args]
