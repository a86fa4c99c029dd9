"""New nodes of a graph, with fake results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg


@dataclass(frozen=True)
class Maker:
    """Makes nodes where a graph inserts them.

    Attributes:
        graph: with fake tensors in ``meta["val"]``.
        like: one of these; new tensors are on its device.
    """

    graph: fx.Graph
    like: Any

    def __call__(self, target: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        """A call of an operator."""
        node = self.graph.call_function(target, args, options)
        given, named = map_arg((args, options), lambda n: n.meta["val"])
        with self.like.fake_mode:
            node.meta["val"] = target(*given, **named)
        return node

    def full(self, shape: list[int], dtype: torch.dtype, value: float = 0) -> fx.Node:
        """A tensor of equal elements."""
        options = {"layout": torch.strided, "device": self.like.device, "pin_memory": False}
        return self(torch.ops.aten.full.default, shape, value, dtype=dtype, **options)
