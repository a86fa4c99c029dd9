"""New nodes of a graph, with fake results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cutesuper.torch.internals import fake_result


@dataclass(frozen=True)
class Maker:
    """Makes nodes where nodes are inserted now, for the same place in the user's program.

    Attributes:
        graph: with fake tensors in ``meta["val"]``.
        like: a node of that place; new tensors are on its device.
    """

    graph: fx.Graph
    like: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an operator."""
        new = self.graph.call_function(target, args, kwargs)
        try:
            new.meta = {**self.like.meta, "val": fake_result(new)}
        except Exception:
            self.graph.erase_node(new)  # the graph stays one that can be compiled
            raise
        return new

    def full(self, shape: Sequence[int], dtype: torch.dtype, value: float = 0) -> fx.Node:
        """A tensor of equal elements."""
        options: dict[str, Any] = {"layout": torch.strided, "pin_memory": False}
        device, shape = self.like.meta["val"].device, list(shape)
        full = torch.ops.aten.full.default
        return self.call(full, shape, value, dtype=dtype, device=device, **options)

    def stored(self, x: fx.Node) -> fx.Node:
        """A contiguous copy of a tensor."""
        return self.call(torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)
