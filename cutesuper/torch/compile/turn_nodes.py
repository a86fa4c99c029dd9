"""New nodes of a graph that turn halves and pairs of rows, as `views.turned` knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.graph_builder import fake
from cutesuper.torch.aten.table import is_free
from cutesuper.torch.internals import fake_result

_aten = torch.ops.aten


def form_of(node: fx.Node) -> str:
    """The views and casts that a node is of a tensor; equal for those that each layer makes."""
    if not is_free(node):
        return node.name
    return f"{node.target} {fx.map_arg((node.args, node.kwargs), form_of)}"


@dataclass(frozen=True)
class Maker:
    """Makes nodes where nodes are inserted now, for the same place in the user's program."""

    graph: fx.Graph
    like: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**self.like.meta, "val": fake_result(new)}
        return new

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

    def stored(self, x: fx.Node) -> fx.Node:
        """A tensor as a concatenation stores it."""
        return self.call(_aten.clone.default, x, memory_format=torch.contiguous_format)
