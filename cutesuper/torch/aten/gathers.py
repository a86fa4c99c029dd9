"""Rows by an index: those of a table, and those that are put into a tensor.
Tables are embeddings, and tensors indexed along their first dimension; a tensor that rows are put
into is a cache of keys, for one.

A program that changes a tensor in place becomes one that makes a new tensor and copies it at the
end. Where such a copy closes ``put_rows``, the kernel writes the rows into the tensor itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from cutesuper.ir.graph import Tensor
from cutesuper.torch.aten.factored_dims import Dims, leaves, unify
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Shapes,
    Slots,
    Unsupported,
    Value,
    Within,
    equal,
    fake,
    memory_order,
)
from cutesuper.torch.aten.table import Arguments, Entry, enter, records

#: types of indices that kernels read
INDICES = (torch.int32, torch.int64)


@enter("aten.index_select.default")
class TakeRows(Entry):
    """``table[index]``; the table and the index are read where they lie."""

    strided: ClassVar[bool] = True
    #: True if indices may count from the end
    backwards: ClassVar[bool] = False

    def operands(self, a: Arguments) -> tuple[Any, Any]:
        """The table and the index; None for an index along another dimension, or several."""
        return a["self"], a["index"] if a["dim"] == 0 else None

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for rows of a table of numbers without a gradient, by one index of integers.
        (The gradient of a table adds up rows, which no kernel does.)"""
        table, index = (getattr(x, "meta", {}).get("val") for x in self.operands(a))
        if not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor):
            return False
        rows = table.dim() > 1 and isinstance(table.shape[0], int) and table.shape[0] > 1
        numbers = table.dtype in FLOATS and not table.requires_grad
        return rows and numbers and index.dtype in INDICES

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
        taken, slots = b.index(node, index, _limits(fake(table), 0, self.backwards))
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

    backwards: ClassVar[bool] = True

    def operands(self, a: Arguments) -> tuple[Any, Any]:
        first, *others = a["indices"]
        return a["self"], first if all(i is None for i in others) else None


@enter("aten.gather.default")
class Gather(Entry):
    """One element of each row, at the place that an integer names."""

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for one element of each row of numbers, along the last dimension."""
        x, index = (getattr(a[n], "meta", {}).get("val") for n in ("self", "index"))
        if not isinstance(x, torch.Tensor) or not isinstance(index, torch.Tensor):
            return False
        rows = x.dim() == index.dim() > 1 and a["dim"] % x.dim() == x.dim() - 1
        if not rows or x.dtype not in FLOATS or index.dtype not in INDICES:
            return False
        one = index.shape[-1] == 1 and isinstance(x.shape[-1], int) and x.shape[-1] > 1
        return one and all(map(equal, x.shape[:-1], index.shape[:-1]))

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x, index = s.of(a["self"]), s.of(a["index"])
        _unify_rows(s, node, x, index.dims[:-1], index.absent)
        return Value((*x.dims[:-1], ()))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        limits = _limits(fake(a["self"]), -1, backwards=False)
        x, labels, rows = labelled(b, node, (a["self"], a["index"]), limits)
        return Built(named(x, labels), (*rows, None))


@enter("cutesuper.cross_entropy.default")
class CrossEntropy(Entry):
    """The library's own loss of each row. A label that is no class makes it NaN."""

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for losses of rows alone, without what a backward pass reads."""
        x, single = fake(a["logits"]), all(u.args[1] == 0 for u in node.users)
        return single and x.dim() > 1 and isinstance(x.shape[-1], int) and x.shape[-1] > 1

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        x, index = s.of(a["logits"]), s.of(a["target"])
        _unify_rows(s, node, x, index.dims, index.absent)
        return Value(x.dims[:-1]), *_saved(node)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        x, labels, rows = labelled(b, node, (a["logits"], a["target"]), None)
        loss = b.g.cross_entropy(x, labels, a["ignore_index"])
        return Built(b.converted(loss, torch.float32), (*rows, None)), *_saved(node)


def _saved(node: fx.Node) -> tuple[None, ...]:
    """The results that only a backward pass reads."""
    return (None,) * (len(node.meta["val"]) - 1)


def _unify_rows(s: Shapes, node: fx.Node, x: Value, labels: tuple[Dims, ...], absent: Dims) -> None:
    """Unify the dimensions in front of a row with those of its labels. Raises Unsupported."""
    if x.absent or absent:
        raise Unsupported(node, "takes elements of what repeats, or by an index that repeats")
    for own, other in zip(x.dims[:-1], labels, strict=True):
        unify(own, other)
    s.whole(x.dims[-1])


def labelled(
    b: Builder, node: fx.Node, operands: tuple[Any, Any], limits: Within | None
) -> tuple[Tensor, Tensor, Slots]:
    """Rows and their labels in the graph, with the slots of the rows. Raises Unsupported.
    ``limits`` are those of `Builder.index`."""
    x, index = operands
    labels, slots = b.index(node, index, limits, of_rows=True)
    dims = b.value(x).dims
    rows = b.groups(tuple(p for d in dims[:-1] for p in leaves(d))) or (None,)
    if len(rows) + 1 != len(slots):
        raise Unsupported(node, "takes elements by an index whose rows are put together")
    return b.tensor(node, x, (*rows, b.one(node, dims[-1]))), labels, rows


def named(x: Tensor, labels: Tensor) -> Tensor:
    """The element of each row that its label names.

    Of a row less a number of its own, that number is taken from the element: then the row is read
    once, while its maximum and its sum are made.
    """
    g, node = x.graph, x.node
    if node.operator in ("add", "sub"):
        left, right = (Tensor(g, i) for i in node.inputs)
        if _is_of_rows(right, x):
            return g.apply(node.operator, named(left, labels), right)
        if _is_of_rows(left, x):
            return g.apply(node.operator, left, named(right, labels))
    return g.sum(g.pick(x, labels), -1)


def _is_of_rows(number: Tensor, x: Tensor) -> bool:
    """True for numbers of the rows of x, one of each."""
    return number.shape == (*x.shape[:-1], 1) and x.shape[-1] != 1


def _limits(table: torch.Tensor, dim: int, backwards: bool) -> Within:
    """The indices of a dimension that PyTorch takes."""
    count = int(table.shape[dim])
    return Within(-count if backwards else 0, count)


def closing_copy(node: fx.Node) -> fx.Node | None:
    """The copy at the end that makes a change in place of rows that are put into a tensor.
    Nothing else reads the tensor. None if the result is a new tensor."""
    base = node.args[0]
    copies = [u for u in node.users if u.target is torch.ops.aten.copy_.default]
    if len(copies) != 1 or not isinstance(base, fx.Node) or copies[0].args[:2] != (base, node):
        return None
    return copies[0] if set(base.users) == {node, copies[0]} else None


@enter("aten.index_copy.default")
class PutRows(Entry):
    """A tensor with rows at the places that an index names."""

    strided: ClassVar[bool] = True
    #: True if places may count from the end
    backwards: ClassVar[bool] = False

    def operands(self, a: Arguments) -> tuple[Any, Any, Any, int]:
        """The tensor, the index, the rows, and the dimension; no index for several."""
        return a["self"], a["index"], a["source"], a["dim"] % max(1, fake(a["self"]).dim())

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for rows of numbers without a gradient, put into an argument by one index.
        The rows are whole, the index has integers, and the argument is one of the program. Either
        into a new tensor, or in place."""
        base, index, rows, dim = self.operands(a)
        into, at, x = (getattr(n, "meta", {}).get("val") for n in (base, index, rows))
        if not (isinstance(into, torch.Tensor) and isinstance(x, torch.Tensor)):
            return False
        if not isinstance(at, torch.Tensor):
            return False
        if base.op not in ("placeholder", "get_attr") or at.dtype not in INDICES or at.dim() != 1:
            return False
        shape = (*into.shape[:dim], at.shape[0], *into.shape[dim + 1 :])
        first = into.dim() - x.dim()  # dimensions in front of extent 1 may be left out
        whole = 0 <= first <= dim and all(map(equal, (*[1] * first, *x.shape), shape))
        places = into.shape[dim] if into.dim() else 1
        numbers = into.dtype in FLOATS and not records((base, rows))
        known = whole and numbers and isinstance(places, int) and places > 1
        if not any(u.target is torch.ops.aten.copy_.default for u in node.users):
            return known
        return known and closing_copy(node) is not None and memory_order(into) is not None

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        base, index, rows, dim = self.operands(a)
        into, at, x = s.of(base), s.of(index), s.of(rows)
        if into.absent or at.absent or x.absent:
            raise Unsupported(node, "puts what repeats into a tensor, or by an index that repeats")
        for d, own in enumerate(x.dims, len(into.dims) - len(x.dims)):
            unify(own, at.dims[0] if d == dim else into.dims[d])
        s.whole(into.dims[dim])
        s.whole(at.dims[0])
        return Value(into.dims)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        base, index, rows, dim = self.operands(a)
        before, place, after = self._slots(b, base, dim)
        slots = (*before, *place, *after)
        limits = _limits(fake(base), dim, self.backwards)
        into, (at, _) = b.read(node, base, slots), b.index(node, index, limits)
        missing = len(b.value(base).dims) - len(b.value(rows).dims)
        first, row, last = self._slots(b, rows, dim - missing)
        x = b.tensor(node, rows, (*first, *row, *last), rank=len(slots))
        x = x if x.dtype == into.dtype else b.g.convert(x, into.dtype)
        return Built(b.g.put_rows(into, at, x, dim=len(before)), slots)

    def _slots(self, b: Builder, node: Any, dim: int) -> tuple[Slots, Slots, Slots]:
        """Slots of the dimensions before one, of that one, and of those after it."""
        dims = b.value(node).dims
        first, place, last = (
            b.groups(tuple(p for d in part for p in leaves(d)))
            for part in (dims[:dim], dims[dim : dim + 1], dims[dim + 1 :])
        )
        return first, place or (None,), last


@enter("aten.index_put.default")
class IndexPut(PutRows):
    """The same with an index in one place: ``cache[:, :, at] = rows``."""

    backwards: ClassVar[bool] = True

    def operands(self, a: Arguments) -> tuple[Any, Any, Any, int]:
        given = [d for d, i in enumerate(a["indices"]) if i is not None]
        index = a["indices"][given[0]] if len(given) == 1 and not a["accumulate"] else None
        return a["self"], index, a["values"], given[0]
