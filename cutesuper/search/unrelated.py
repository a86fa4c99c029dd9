"""Segments whose products have nothing in common, which no kernel computes together.

A kernel of products stores tensors with the same rows or the same columns. To find out from a
region takes 1 ms, since its labels are made for that, and three quarters of the regions of a
model's backward pass are refused for it: ``dX = dY W^T`` beside ``dW = X^T dY``. The dimensions of
the whole graph are gathered into classes once; dimensions that are in different classes there are
so in every part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from cutesuper.egraph.labelled import classes
from cutesuper.errors import SearchError
from cutesuper.ir.dims import Symbol
from cutesuper.search.cuts import Flat
from cutesuper.skeletons.registry import SKELETONS

#: most elements that the first of chained products sums, where results need not be alike
WIDEST = max(s.widest_chain for s in SKELETONS)

#: the classes of the last two dimensions of a stored tensor
_Sides = tuple[int, int]


class Unrelated:
    """Tells for segments of a graph if their products have nothing in common."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        nodes = flat.graph.nodes
        products = [i for i in flat.order if nodes[i].facets.contracts]
        #: the classes of the dimensions of every value; none of a graph without products, or if the
        #: time of the search is used up
        self._classes: dict[int, tuple[int, ...]] = {}
        if not products:
            return
        region, index = flat.whole()
        try:
            found = classes(region)
        except SearchError:
            return
        self._classes = {v: found[n] for v, n in index.items()}
        self._puts = frozenset(i for i in flat.order if nodes[i].facets.puts)
        #: for each product the classes of its operands' dimensions, and the products before it
        self._operands = {
            i: [frozenset(self._classes[v.value]) for v in flat.operands(i)] for i in products
        }
        #: those with a row, a column or a contracted dimension of extent 1
        self._narrow = frozenset(
            i for i in products if any(1 in nodes[j].shape[-2:] for j in (i, *nodes[i].inputs))
        )
        self._before: dict[int, frozenset[int]] = {}
        for i in flat.order:
            needed = (self._before.get(v.value, frozenset()) for v in flat.operands(i))
            own = frozenset((i,) if i in self._operands else ())
            self._before[i] = own.union(*needed)
        self._stored = {i: self._sides(i) for i in flat.order if i not in self._puts}
        self._outputs = frozenset(flat.views[o].value for o in flat.graph.outputs)

    def __call__(self, members: Sequence[int]) -> bool:
        """True for operators, a segment, that no kernel runs for this reason."""
        products = [i for i in members if i in self._operands] if self._classes else []
        if not products or not self._puts.isdisjoint(members):
            return False
        inside = frozenset(members)
        first = [i for i in products if len(self._before[i] & inside) == 1]
        if len(first) < len(products) and all(self._contracted(i) <= WIDEST for i in first):
            return False  # maybe a chain whose results may differ
        if not self._narrow.isdisjoint(products):
            return False  # maybe a kernel of rows
        operands = [side for i in products for side in self._operands[i]]
        rows = {
            sides[0]
            for i in members
            if self._is_stored(i, inside)
            for sides in self._stored[i]
            if not any(operand.issuperset(sides) for operand in operands)
        }
        return len(rows) > 1

    def _contracted(self, i: int) -> float:
        """Number of elements over which a product sums."""
        length = self._flat.graph.nodes[self._flat.graph.nodes[i].inputs[0]].shape[-1]
        return inf if isinstance(length, Symbol) else length

    def _is_stored(self, i: int, inside: frozenset[int]) -> bool:
        return i in self._outputs or any(u not in inside for u in self._flat.users.get(i, ()))

    def _sides(self, i: int) -> list[_Sides]:
        """The last two dimensions of the tensors in which a value is stored, at least.
        Those of extent 1 have no label, so they say nothing."""
        flat = self._flat
        views = [v for o in flat.graph.outputs if (v := flat.views[o]).value == i]
        orders = [v.order for v in views] or [tuple(range(len(flat.graph.nodes[i].shape)))]
        pairs = [(o[-2], o[-1]) for o in orders if len(o) > 1]
        shape, own = flat.graph.nodes[i].shape, self._classes[i]
        return [(own[a], own[b]) for a, b in pairs if shape[a] != 1 and shape[b] != 1]
