"""The kernel graph over an algebra with named dimensions.

Shapes are positional and broadcast from the last dimension, so dimension ``i`` of a tensor of rank
r is called ``r - 1 - i`` (``"0"`` is the last one), and dimensions of extent 1 have no name: then
broadcasting by name is NumPy's rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import VerificationError
from cutesuper.ir.dims import extent
from cutesuper.ir.field import DivisionByZero
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT, Attributes, Operator, each, facets, lookup
from cutesuper.ir.unseen import empty_quotients_of_graph
from cutesuper.verify.integers import Places, without_q

#: name of the contracted dimension while a matrix product runs
_INNER = "inner"


def names_of(shape: tuple[Any, ...]) -> tuple[str, ...]:
    """Names of the dimensions of a shape whose extent is not 1."""
    return tuple(str(len(shape) - 1 - i) for i, n in enumerate(shape) if n != 1)


def needs_exponents(kinds: list[str], inputs: list[tuple[int, ...]], also: set[int]) -> set[int]:
    """Operations whose residues mod q are used by an exponential, directly or later.

    Args:
        kinds: operator of each operation.
        inputs: operands of each operation.
        also: operations whose residues are needed for another reason.
    """
    needed = set(also)
    for i in reversed(range(len(kinds))):
        if i in needed or facets(kinds[i]).exponential:
            needed.update(inputs[i])
    return needed


def evaluate_graph(graph: KernelGraph, a: Any, inputs: list[Any]) -> list[Any]:
    """The outputs of an expanded kernel graph.

    Args:
        graph: primitive operators on concrete extents.
        a: the algebra, with the additions of `cutesuper.verify.domain.FieldDomain` to a field.
        inputs: values whose dimensions are named as in `names_of`; `Integers` for integers.

    Raises:
        VerificationError: an operator that has no meaning here.
        DivisionByZero: names the node.
    """
    feed = iter(inputs)
    wanted = needs_exponents(
        [n.operator for n in graph.nodes], [n.inputs for n in graph.nodes], set()
    )
    live = graph.needed(graph.outputs)
    last = {j: i for i, n in enumerate(graph.nodes) if i in live for j in n.inputs}
    empty = empty_quotients_of_graph(graph)
    values: dict[int, Any] = {}
    for i, node in enumerate(graph.nodes):
        if i not in live and node.operator != INPUT:
            continue
        if node.operator == INPUT:
            value = next(feed)
        else:
            args = [values[j] for j in node.inputs]
            if i not in wanted and not node.facets.exponential:
                args = [without_q(a, v) for v in args]
            if i in empty:
                args[1] = a.seen(args[1])
            try:
                value = _apply(graph, i, a, args)
            except DivisionByZero as error:
                error.node = i
                raise
            for j in node.inputs:  # a value of a real-size graph can be 128 MB
                if last[j] == i and j not in graph.outputs:
                    values.pop(j, None)
        values[i] = value if i in wanted else without_q(a, value)
    return [values[i] for i in graph.outputs]


def _apply(graph: KernelGraph, i: int, a: Any, args: list[Any]) -> Any:
    node = graph.nodes[i]
    operator = lookup(node.operator)
    shapes = [graph.nodes[j].shape for j in node.inputs]
    if operator.elementwise and operator.integers:
        numbers = operator.numbers(args[0].data, node.attributes)
        return a.literal(names_of(numbers.shape), _squeezed(numbers))
    if operator.elementwise:
        return a.elementwise(node.operator, args, dict(node.attributes))
    if operator.masks:
        return _mask(a, operator, args, shapes[0], node.attributes)
    if operator.turns:
        length = extent(shapes[0][-1])
        if length == 1:
            return args[0]
        return turned(a, operator, args[0], "0", length, node.attributes)
    if operator.gathers:
        return a.gather(args[0], args[1].data, operator, node.shape)
    if operator.puts:
        places = Places(tuple(x.data for x in args[1:-1]), each(node.attributes["dim"]))
        return a.put(args[0], places, args[-1], shapes[-1])
    if operator.reduces:
        return _reduce(a, operator, args[0], shapes[0], node.attributes["dim"])
    if operator.contracts:
        return _matmul(a, args)
    if operator.permutes:
        rank = len(shapes[0])
        moved = {
            str(rank - 1 - e): str(rank - 1 - d) for d, e in enumerate(node.attributes["dims"])
        }
        return a.rename(args[0], moved)
    raise VerificationError(
        f"verify: operator {node.operator} has no finite-field meaning; give it one in "
        "verify/source.py, or expand it to operators that have"
    )


def _reduce(a: Any, operator: Operator, x: Any, shape: tuple[Any, ...], dim: int) -> Any:
    if shape[dim] == 1:
        return x
    assert operator.reduces is not None
    over = (str(len(shape) - 1 - dim),)
    if operator.reduces.places:
        x = a.placed(x, over, np.arange(shape[dim]))
    total = operator.reduces.reduced(a, x, over, {over[0]: shape[dim]})
    return a.div(total, a.constant(float(shape[dim]))) if operator.averages else total


def _mask(
    a: Any, operator: Operator, args: list[Any], shape: tuple[Any, ...], attributes: Attributes
) -> Any:
    integers = None
    if operator.integers:  # their dimensions are the first ones
        integers = args[1].data
        integers = integers.reshape(*integers.shape, *(1 for _ in shape[integers.ndim :]))
    rows, columns = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    keep = operator.visible(rows, columns, (shape[-2], shape[-1]), attributes, integers)
    return a.mask(args[0], names_of(keep.shape), _squeezed(keep), operator)


def turned(
    a: Any,
    operator: Operator,
    x: Any,
    dim: str,
    length: int,
    attributes: Attributes,
    padded: int = 0,
) -> Any:
    """An operator that works along a dimension as a whole, with padding behind it."""
    if operator.scans:
        return a.scanned(x, dim, length, attributes["reverse"])
    places, signs = operator.places(length)
    rest = np.arange(length, max(length, padded))
    places, signs = np.concatenate([places, rest]), np.concatenate([signs, np.ones(rest.shape)])
    return a.turned(x, dim, places, signs)


def _squeezed(x: NDArray[Any]) -> NDArray[Any]:
    """x without dimensions of extent 1, which have no name."""
    return x.reshape([n for n in x.shape if n != 1])


def _matmul(a: Any, args: list[Any]) -> Any:
    x, y = args
    if "0" not in x.dims:  # a contraction over one element
        return a.mul(x, a.rename(y, {"1": _INNER}))
    return a.matmul(a.rename(x, {"0": _INNER}), a.rename(y, {"1": _INNER}), (_INNER,))
