"""Rows by an index: those of a table, and those that are put into a tensor.
Tables are embeddings, and tensors indexed along their first dimension; a tensor that rows are put
into is a cache of keys, for one.

A program that changes a tensor in place becomes one that makes a new tensor and copies it at the
end. Where such a copy closes ``put_rows``, the kernel writes the rows into the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from cutesuper.ir.graph import Tensor
from cutesuper.ir.operators.index import row_dims
from cutesuper.torch.aten.factored_dims import Dims, leaves, unify
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Shapes,
    Slot,
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
    if node.facets.adds or node.facets.subtracts:
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


class Put(NamedTuple):
    """Rows that are put into a tensor.

    Attributes:
        base: the tensor.
        indices: one for each of ``dims``; none for places that no kernel takes.
        rows: what is put there.
        dims: of the tensor, whose places the indices name, in rising order.
    """

    base: Any
    indices: tuple[Any, ...]
    rows: Any
    dims: tuple[int, ...]

    def order(self, rank: int) -> list[int]:
        """The dimension of the tensor that each dimension of the rows is, as PyTorch has them.
        The first of ``dims`` stands for the rows' own, which comes first of all if others lie
        between dimensions that have an index."""
        first, last = self.dims[0], self.dims[-1]
        kept = row_dims(rank, self.dims)
        if last - first < len(self.dims):
            return kept
        return [first, *(d for d in kept if d != first)]


@enter("aten.index_copy.default")
class PutRows(Entry):
    """A tensor with rows at the places that an index names."""

    strided: ClassVar[bool] = True
    #: True if places may count from the end
    backwards: ClassVar[bool] = False

    def operands(self, a: Arguments) -> Put:
        """The tensor, the indices and the rows."""
        dim = a["dim"] % max(1, fake(a["self"]).dim())
        return Put(a["self"], (a["index"],), a["source"], (dim,))

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for rows of numbers without a gradient, put into an argument by indices.
        The rows are whole, the indices have integers, one for each row, and the argument is one of
        the program. Either into a new tensor, or in place."""
        put = self.operands(a)
        nodes = (put.base, put.rows, *put.indices)
        given: list[Any] = [getattr(n, "meta", {}).get("val") for n in nodes]
        if not put.indices or not all(isinstance(t, torch.Tensor) for t in given):
            return False
        into, x, *at = given
        if put.base.op not in ("placeholder", "get_attr") or not all(map(_counts_rows, at)):
            return False
        count, order = at[0].shape[0], put.order(into.dim())
        shape = [count if d == put.dims[0] else into.shape[d] for d in order]
        first = len(shape) - x.dim()  # dimensions in front of extent 1 may be left out
        whole = first >= 0 and all(map(equal, (*[1] * first, *x.shape), shape))
        whole = whole and all(equal(index.shape[0], count) for index in at)
        places = [into.shape[d] for d in put.dims] if into.dim() else []
        numbers = into.dtype in FLOATS and not records((put.base, put.rows))
        several = all(isinstance(n, int) for n in places) and prod(places) > 1
        known = whole and numbers and several
        if not any(u.target is torch.ops.aten.copy_.default for u in node.users):
            return known
        return known and closing_copy(node) is not None and memory_order(into) is not None

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        put = self.operands(a)
        into, x, *at = (s.of(n) for n in (put.base, put.rows, *put.indices))
        if any(v.absent for v in (into, x, *at)):
            raise Unsupported(node, "puts what repeats into a tensor, or by an index that repeats")
        order = put.order(len(into.dims))
        for own, d in zip(reversed(x.dims), reversed(order), strict=False):
            unify(own, at[0].dims[0] if d == put.dims[0] else into.dims[d])
        for index in at:
            unify(index.dims[0], at[0].dims[0])
            s.whole(index.dims[0])
        for d in put.dims:
            s.whole(into.dims[d])
        return Value(into.dims)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        put = self.operands(a)
        own = b.value(put.base).dims
        slots, dims = _slots(b, own, put.dims)
        into = b.read(node, put.base, slots)
        indices = tuple(
            b.index(node, index, _limits(fake(put.base), d, self.backwards))[0]
            for index, d in zip(put.indices, put.dims, strict=True)
        )
        given = zip(reversed(put.order(len(own))), reversed(b.value(put.rows).dims), strict=False)
        by_dim = dict(given)
        kept = [by_dim.get(d, ()) for d in row_dims(len(own), put.dims)]
        rows, _ = _slots(b, kept, put.dims[:1])
        x = b.tensor(node, put.rows, rows, rank=len(rows))
        x = x if x.dtype == into.dtype else b.g.convert(x, into.dtype)
        return Built(b.g.put_rows(into, indices, x, dim=dims), slots)


def _slots(
    b: Builder, dims: Sequence[Dims], named: tuple[int, ...]
) -> tuple[Slots, tuple[int, ...]]:
    """Slots of some dimensions, and the places among them of those that have an index.
    The latter stand alone."""
    slots, places, start = list[Slot](), list[int](), 0
    for d in named:
        slots += b.groups(tuple(p for own in dims[start:d] for p in leaves(own)))
        places.append(len(slots))
        slots += b.groups(leaves(dims[d])) or (None,)
        start = d + 1
    slots += b.groups(tuple(p for own in dims[start:] for p in leaves(own)))
    return tuple(slots), tuple(places)


@enter("aten.index_put.default")
class IndexPut(PutRows):
    """The same with indices in any places: ``cache[:, :, at] = x``, ``cache[rows, :, at] = x``."""

    backwards: ClassVar[bool] = True

    def operands(self, a: Arguments) -> Put:
        dims = tuple(d for d, i in enumerate(a["indices"]) if i is not None)
        indices = () if a["accumulate"] else tuple(a["indices"][d] for d in dims)
        return Put(a["self"], indices, a["values"], dims)


def _counts_rows(index: torch.Tensor) -> bool:
    """True for an index of one dimension, of integers."""
    return index.dtype in INDICES and index.dim() == 1
