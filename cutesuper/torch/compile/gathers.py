"""Rows of a table by an index: embeddings, and tensors indexed along their first dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cutesuper.torch.compile.factored_dims import leaves
from cutesuper.torch.compile.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Shapes,
    Unsupported,
    Value,
)
from cutesuper.torch.compile.table import Arguments, Entry, enter

#: types of indices that kernels read
_INDICES = (torch.int32, torch.int64)


@enter("aten.index_select.default")
class TakeRows(Entry):
    """``table[index]``; the table and the index are read where they lie."""

    def operands(self, a: Arguments) -> tuple[Any, Any]:
        """The table and the index; None for an index along another dimension, or several."""
        return a["self"], a["index"] if a["dim"] == 0 else None

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for rows of a table of numbers without a gradient, by one index of integers. (The
        gradient of a table adds up rows, which no kernel does.)"""
        table, index = (getattr(x, "meta", {}).get("val") for x in self.operands(a))
        if not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor):
            return False
        rows = table.dim() > 1 and isinstance(table.shape[0], int) and table.shape[0] > 1
        numbers = table.dtype in FLOATS and not table.requires_grad
        return rows and numbers and index.dtype in _INDICES

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        table, index = map(s.of, self.operands(a))
        if table.absent or index.absent:
            raise Unsupported(node, "takes rows of what repeats, or by an index that repeats")
        s.whole(table.dims[0])
        return Value((*index.dims, *table.dims[1:]))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        table, index = self.operands(a)
        own = b.value(table)
        rest = b.groups(tuple(p for d in own.dims[1:] for p in leaves(d))) or (None,)
        taken, slots = b.index(node, index)
        rows = b.read(node, table, (*b.groups(leaves(own.dims[0])), *rest))
        return Built(b.g.take_rows(rows, taken), (*slots, *rest))


@enter("aten.embedding.default")
class Embedding(TakeRows):
    """Rows of a weight."""

    def operands(self, a: Arguments) -> tuple[Any, Any]:
        return a["weight"], a["indices"]


@enter("aten.index.Tensor")
class Index(TakeRows):
    """A tensor with an index in its first place."""

    def operands(self, a: Arguments) -> tuple[Any, Any]:
        first, *others = a["indices"]
        return a["self"], first if all(i is None for i in others) else None
