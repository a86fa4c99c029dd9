"""Nodes of a graph that turn halves and pairs of rows, as `views.turned` knows them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from cutesuper.torch.aten.graph_builder import fake
from cutesuper.torch.aten.table import is_free
from cutesuper.torch.aten.views import turned
from cutesuper.torch.compile.maker import Maker

_aten = torch.ops.aten


def form_of(node: fx.Node) -> str:
    """The views and casts that a node is of a tensor; equal for those that each layer makes."""
    if not is_free(node):
        return node.name
    return f"{node.target} {fx.map_arg((node.args, node.kwargs), form_of)}"


def unturned(graph: fx.Graph) -> Iterator[fx.Node]:
    """The concatenations that `views.turned` does not know; the graph may change meanwhile."""
    for node in list(graph.nodes):
        if node.target is _aten.cat.default and turned(node) is None:
            yield node


class TurnMaker(Maker):
    """Makes nodes that turn rows."""

    def turned_halves(self, x: fx.Node) -> fx.Node:
        """``[-b, a]`` of the halves ``[a, b]`` of rows."""
        last, length = fake(x).dim() - 1, fake(x).shape[-1]
        a = self.call(_aten.slice.Tensor, x, last, 0, length // 2)
        b = self.call(_aten.slice.Tensor, x, last, length // 2, length)
        return self.call(_aten.cat.default, [self.call(_aten.neg.default, b), a], last)

    def turned_pairs(self, x: fx.Node) -> fx.Node:
        """``[-b, a]`` of each pair ``[a, b]`` of rows, with a dimension of its own."""
        last, length = fake(x).dim() - 1, fake(x).shape[-1]
        a, b = (self.call(_aten.slice.Tensor, x, last, n, length, 2) for n in range(2))
        return self.stacked(self.call(_aten.neg.default, b), a)

    def stacked(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Two tensors side by side in a new last dimension."""
        last = fake(a).dim()
        pair = [self.call(_aten.unsqueeze.default, x, last) for x in (a, b)]
        return self.call(_aten.cat.default, pair, last)
