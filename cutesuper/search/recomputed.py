"""Scores computed again for each kind of sum over them, in place of stored.

A product multiplies a function of another product, as the gradients of attention do: that of Q
sums scores over the keys, those of K and V over the queries. A kernel walks over one of them and
holds the other, so that one kernel cannot do both; where each has scores of its own, none are
stored. Numbers of rows, such as maxima and sums of products with the output, are computed once.

before: ``P = exp(Q K^T - lse)``, ``P K`` and ``P^T Q``; after: P for each.

Where such a sum is scaled and added up over the heads of a group, it is scaled last: then one
kernel adds up what it sums.
"""

from __future__ import annotations

from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import CONSTANT, lookup
from cutesuper.search.cuts import Groups


def recomputed(graph: KernelGraph) -> list[tuple[KernelGraph, Groups]]:
    """The program with scores for every group of outputs, and these groups.

    Outputs that sum over one dimension of scores together, then, if these are several, each output
    alone. Functions of scores that no product sums, as the gradient of a bias, are made with the
    first sum over the last dimension of scores, along which they are stored. Outputs that no
    product is in, as the sums of ``dO * O``, are a group.

    Args:
        graph: primitive operators only.

    Returns:
        Nothing if all outputs sum over one dimension.
    """
    graph = _scaled_last(graph)
    sums = _Sums(graph)
    found: dict[frozenset[int], list[int]] = {}
    for n, output in enumerate(graph.outputs):
        found.setdefault(sums.dimensions(output), []).append(n)
    others = found.pop(frozenset(), [])
    tiles = tuple(filter(sums.of_scores, others))
    apart = tuple(n for n in others if n not in tiles)
    along = found.get(frozenset((-1,)), [])
    if len(found) < 2 or (tiles and not along):
        return []
    along[:] = sorted((*along, *tiles))
    beside = (apart,) if apart else ()
    together = (*map(tuple, found.values()), *beside)
    first = next((n for n in along if n not in tiles), -1)
    alone = tuple(
        tuple(sorted((n, *tiles))) if n == first else (n,)
        for n in range(len(graph.outputs)) if n not in others
    ) + beside  # fmt: skip
    return [(_apart(graph, g, sums), g) for g in dict.fromkeys((together, alone))]


def _scaled_last(graph: KernelGraph) -> KernelGraph:
    """The program with multiples of sums in the place of sums of multiples of products.

    before: ``sum(mul(P^T Q, 0.125))``; after: ``mul(sum(P^T Q), 0.125)``.
    """
    places = range(len(graph.nodes))
    moved = {i: j for i in places if (j := _scaled(graph, i)) is not None}
    if not moved:
        return graph
    new, values = KernelGraph(), dict[int, Tensor]()
    for i, node in enumerate(graph.nodes):
        if i not in moved:
            values[i] = _copied(graph, new, i, values)
            continue
        scaled = moved[i]
        x, factor = graph.nodes[scaled].inputs
        added = new.apply(node.operator, values[x], **dict(node.attributes))
        values[i] = new.copy_node(graph, scaled, [added, values[factor]])
    for i in graph.outputs:
        new.mark_output(values[i], graph.nodes[i].dtype)
    return new


def _scaled(graph: KernelGraph, i: int) -> int | None:
    """The multiple of a product that a sum adds up, if it reads one that is scaled by a number."""
    node = graph.nodes[i]
    if not node.facets.sums:
        return None
    [j] = node.inputs
    scaled = graph.nodes[j]
    if not scaled.facets.multiplies or j in graph.outputs:
        return None
    x, factor = (graph.nodes[k] for k in scaled.inputs)
    return j if x.facets.contracts and factor.operator == CONSTANT else None


class _Sums:
    """The products of a graph whose operands are computed from other products."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.after: list[bool] = []  # it is computed from a product, not from its statistics
        self.reduced: list[bool] = []  # it is computed from a product or a reduction
        for n in graph.nodes:
            sums = n.facets.contracts or lookup(n.operator).reduces is not None
            self.reduced.append(sums or any(self.reduced[i] for i in n.inputs))
            before = any(self.after[i] for i in n.inputs) and n.shape[-1:] != (1,)
            self.after.append(before or n.facets.contracts)

    def of_scores(self, n: int) -> bool:
        """True if an output depends on a product."""
        graph = self.graph
        return any(graph.nodes[i].facets.contracts for i in graph.needed([graph.outputs[n]]))

    def dimensions(self, output: int) -> frozenset[int]:
        """The dimensions of scores, counted from the end, that an output sums over."""
        found, todo, seen = set[int](), [output], set[int]()
        while todo:
            i = todo.pop()
            node = self.graph.nodes[i]
            if i in seen or not self.after[i]:
                continue
            seen.add(i)
            if node.facets.contracts:
                found |= {self._base(j, d) for j, d in zip(node.inputs, (-1, -2), strict=True)
                          if self.after[j]}  # fmt: skip
            else:
                todo += node.inputs
        return frozenset(found)

    def _base(self, i: int, dim: int) -> int:
        """A dimension of a view as one of the viewed value."""
        node = self.graph.nodes[i]
        if not node.facets.permutes:
            return dim
        dims = node.attributes["dims"]
        return self._base(node.inputs[0], dims[dim % len(dims)] - len(dims))

    def is_shared(self, i: int) -> bool:
        """True for numbers of rows that take a reduction, and for values without products."""
        if self.graph.nodes[i].shape[-1:] == (1,):
            return self.reduced[i]
        return not self.after[i] and self.reduced[i]


def _apart(graph: KernelGraph, groups: Groups, sums: _Sums) -> KernelGraph:
    """The program where groups of outputs share inputs and numbers of rows only."""
    new, made = KernelGraph(), dict[int, Tensor]()
    values = {i: _copied(graph, new, i, {}) for i in graph.inputs}
    every = [graph.needed(graph.outputs[n] for n in group) for group in groups]
    shared = {i for own in every for i in own if sum(i in other for other in every) > 1}
    once = set(filter(sums.is_shared, shared))
    given = once | set(graph.inputs)
    needed = [graph.needed((graph.outputs[n] for n in group), given) for group in groups]
    read = {j for own in needed for i in own for j in graph.nodes[i].inputs}
    met = (read | set(graph.outputs)) & once
    begun = dict(values)  # what these numbers are computed from is computed for them alone
    for i in sorted(graph.needed(met) - set(graph.inputs)):
        begun[i] = _copied(graph, new, i, begun)
    for group, own in zip(groups, needed, strict=True):
        known = values | {i: begun[i] for i in met}
        for i in sorted(own):
            known[i] = _copied(graph, new, i, known)
        made |= {n: known[graph.outputs[n]] for n in group}
    for n, i in enumerate(graph.outputs):
        new.mark_output(made[n], graph.nodes[i].dtype)
    return new


def _copied(graph: KernelGraph, new: KernelGraph, i: int, values: dict[int, Tensor]) -> Tensor:
    return new.copy_node(graph, i, [values[j] for j in graph.nodes[i].inputs])
