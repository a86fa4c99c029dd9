"""Constants of a product, multiplied together where the result is exact.

before: ``s * -0.5 * r / 256 * (x * 2)``; after: ``s * -1/256 * r * x``, as in the gradient of a
norm that PyTorch has taken apart. A constant doubles the parts of its product that the e-graph
keeps, since it may be multiplied with any of them, and one less is a multiplication less. Like
every result, the program is verified against the graph as the user wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, Node, Tensor
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.ir.relations import reachable

#: constants beyond it, or below its inverse, stay where they are: they may keep other factors of
#: their product from overflowing
_LARGE = 2.0**32


class _Factor(NamedTuple):
    """A constant by which a part of a product is multiplied or divided.

    Attributes:
        node: the part.
        power: of the part in the product, 1 or -1.
        scale: the constant's share in the product.
    """

    node: int
    power: int
    scale: Fraction


def joined_constants(graph: KernelGraph) -> KernelGraph:
    """The program with constants of the same product as one, where that is exact.

    Args:
        graph: primitive operators only.

    Returns:
        The graph itself if it has none to join.
    """
    changes: dict[int, float] = {}
    for factors in _products(graph):
        for group in _groups(factors):
            changes |= _joined(graph, group)
    return _changed(graph, changes) if changes else graph


def _products(graph: KernelGraph) -> Iterator[list[_Factor]]:
    """The constants of every product, in order; quotients are products."""
    nodes = graph.nodes
    users = Counter(j for n in nodes for j in n.inputs)
    users.update(graph.outputs)
    inner: set[int] = set()

    def parts(part: tuple[int, int]) -> list[tuple[int, int]]:
        """Products that are needed by this one only, with their powers in the whole."""
        node, power = nodes[part[0]], part[1]
        operands = zip(node.inputs, node.facets.powers or (), strict=True)
        found = [(j, p * power) for j, p in operands if users[j] == 1 and _is_product(nodes[j])]
        inner.update(j for j, _ in found)
        return found

    for i in reversed(range(len(nodes))):
        if _is_product(nodes[i]) and i not in inner:
            found = (_factor(graph, *part) for part in reachable([(i, 1)], parts))
            yield sorted(f for f in found if f is not None)


def _is_product(node: Node) -> bool:
    """True for products and quotients of two operands; a square has a constant twice."""
    return node.facets.multiplies or node.facets.divides


def _factor(graph: KernelGraph, i: int, power: int) -> _Factor | None:
    """The constant of a part of a product, which changes nothing but the value.
    None if it has none, or is the reciprocal of a value."""
    node = graph.nodes[i]
    constants = [graph.nodes[j].operator == CONSTANT for j in node.inputs]
    if sum(constants) != 1 or (node.facets.divides and constants[0]):
        return None
    side = constants.index(True)
    number, value = (graph.tensor(j) for j in (node.inputs[side], node.inputs[1 - side]))
    scale = number.node.attributes["value"]
    if not 1 / _LARGE <= abs(scale) <= _LARGE:
        return None
    if graph.own_dtype(value) != graph.own_dtype(graph.tensor(i)):
        return None
    own = (node.facets.powers or ())[side]
    return _Factor(i, power, Fraction(scale) ** (own * power))


def _groups(factors: Sequence[_Factor]) -> list[list[_Factor]]:
    """The factors of one product in groups whose products are exact."""
    groups: list[list[_Factor]] = []
    totals: list[Fraction] = []
    for factor in factors:
        fitting = (n for n, t in enumerate(totals) if _is_exact(t * factor.scale))
        n = next(fitting, None)
        if n is None:
            groups.append([factor])
            totals.append(factor.scale)
        else:
            groups[n].append(factor)
            totals[n] *= factor.scale
    return groups


def _is_exact(number: Fraction) -> bool:
    """True if a number is a float, and neither large nor small."""
    return 1 / _LARGE <= abs(number) <= _LARGE and Fraction(float(number)) == number


def _joined(graph: KernelGraph, group: Sequence[_Factor]) -> dict[int, float]:
    """Numbers by which nodes multiply instead: one of them by all, the others by 1.
    That of the fewest elements, but an output stays what it is: a computed value."""
    total = prod((f.scale for f in group), start=Fraction(1))
    able = [f for f in group if _is_exact(total**f.power)]
    if len(group) == 1 or not able:
        return {}

    def elements(f: _Factor) -> int:
        return prod(map(extent, graph.nodes[f.node].shape))

    kept = min(able, key=lambda f: (f.node not in graph.outputs, elements(f)))
    return {f.node: 1.0 for f in group} | {kept.node: float(total**kept.power)}


def _changed(graph: KernelGraph, changes: dict[int, float]) -> KernelGraph:
    """The program with nodes that multiply by other numbers, or by none where that is 1."""
    new, values = KernelGraph(), list[Tensor]()
    for i, n in enumerate(graph.nodes):
        args, number = [values[j] for j in n.inputs], changes.get(i)
        if number is None:
            values.append(new.copy_node(graph, i, args))
            continue
        [value] = (values[j] for j in n.inputs if graph.nodes[j].operator != CONSTANT)
        keeps = number != 1 or i in graph.outputs
        values.append(new.mul(value, number) if keeps else value)
    for i in graph.outputs:
        new.mark_output(values[i], graph.nodes[i].dtype)
    return new.apart([range(len(new.outputs))])
