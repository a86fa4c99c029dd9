"""Products of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import fx

from cutesuper.ir.dims import extent
from cutesuper.ir.graph import Tensor
from cutesuper.ir.precision import EXACT, ROUNDED
from cutesuper.torch.aten.factored_dims import (
    Part,
    leaves,
    unify,
)
from cutesuper.torch.aten.graph_builder import (
    Builder,
    Built,
    Shapes,
    Slot,
    Slots,
    Unsupported,
    Value,
    correspondence,
    fake,
    translated,
)
from cutesuper.torch.aten.table import Arguments, Entry, enter_all, number

_PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Product(Entry):
    """``a[..., M, K] @ b[..., K, N]``, times a number, plus a number times a tensor.

    Attributes:
        left, right, added: names of the two operands, and of the addend if there is one.
        transposed: the second operand is given as ``[N, K]``.
    """

    products: ClassVar[int] = 1
    strided: ClassVar[bool] = True
    left: str = "self"
    right: str = "mat2"
    added: str = ""
    transposed: bool = False

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if fake(node).dtype not in _PRODUCTS:
            raise Unsupported(node, f"computes {fake(node).dtype}")
        x, w = self._operands(s.of(a[self.left]), s.of(a[self.right]))
        unify(x.dims[-1], w.dims[-2])
        s.whole(x.dims[-1])
        lead = s.broadcast(node, [_lead(x), _lead(w)])
        # columns are a dimension of their own: in x x^T they come from the dimension of the rows
        columns = tuple(Part(object(), p.factor) for p in leaves(w.dims[-1]))
        gone = {*leaves(x.absent), *leaves(w.absent)}
        pairs = [*zip(columns, leaves(w.dims[-1]), strict=True)]
        pairs += [(p, p) for p in leaves(x.dims[-2])]
        repeated = tuple(mine for mine, p in pairs if p in gone)
        sides = (x.dims[-2],) * (len(s.of(a[self.left]).dims) > 1)
        sides += (columns,) * (len(s.of(a[self.right]).dims) > 1)
        result = Value((*lead.dims, *sides), (*lead.absent, *repeated))
        s.whole(columns)
        if self.added and isinstance(a.get(self.added), fx.Node):
            return s.broadcast(node, [result, s.of(a[self.added])])
        return result

    def rows(self, a: Arguments) -> Any:
        return a[self.left]

    def matrix(self, w: Value) -> Value:
        """The second operand as ``[..., K, N]``."""
        return Value((*w.dims[:-2], w.dims[-1], w.dims[-2]), w.absent) if self.transposed else w

    def _operands(self, x: Value, w: Value) -> tuple[Value, Value]:
        """Both operands as matrices: a vector is a row on the left and a column on the right."""
        x = x if len(x.dims) > 1 else Value(((), *x.dims), x.absent)
        return x, self.matrix(w) if len(w.dims) > 1 else Value((*w.dims, ()), w.absent)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        x, w = self._operands(b.value(a[self.left]), b.value(a[self.right]))
        y = b.value(node)
        if len(b.value(a[self.right]).dims) == 1:
            y = Value((*y.dims, ()), y.absent)
        if len(b.value(a[self.left]).dims) == 1:
            y = Value((*y.dims[:-1], (), y.dims[-1]), y.absent)
        other = correspondence(Value(y.dims[:-2]), Value(w.dims[:-2]))
        if isinstance(value := b.of(a[self.left]).tensor, float):
            return self._of_equal_rows(b, node, a, value, w, y, other)
        mine = correspondence(Value(y.dims[:-1]), Value(x.dims[:-1]))
        front = _front(b, Value((*y.dims[:-2], x.dims[-2]), y.absent))
        m = front[-1] if leaves(x.dims[-2]) else None
        lead = front[:-1] if m else front
        k, n = b.one(node, w.dims[-2]), b.one(node, w.dims[-1])
        inner = b.one(node, x.dims[-1])
        _check_summed(node, inner, x)
        _check_summed(node, k, w)
        left = self._operand(b, node, a[self.left], (*translated((*lead, m), mine), inner))
        right = self._operand(b, node, a[self.right], (*translated(lead, other), k, n))
        product = _product(b, left, right)
        slots = (*lead, m, b.one(node, y.dims[-1]))[-len(product.shape) :]
        return self._plus(b, node, a, product, slots)

    def _of_equal_rows(
        self, b: Builder, node: fx.Node, a: Arguments, value: float, w: Value, y: Value,
        parts: Any,
    ) -> Built:  # fmt: skip
        """A number times the sums of the second operand's columns.
        The state of a recurrent cell that begins is zeros."""
        lead = _front(b, Value(y.dims[:-2], y.absent))
        k, n = b.one(node, w.dims[-2]), b.one(node, w.dims[-1])
        _check_summed(node, k, w)
        right = self._operand(b, node, a[self.right], (*translated(lead, parts), k, n))
        sums = b.g.mul(b.g.sum(right, len(right.shape) - 2), value)
        rows = leaves(y.dims[-2])
        m = b.one(node, rows) if {*rows} & {*y.present()} else None  # those of what is added
        slots = (*lead, m, b.one(node, y.dims[-1]))[-len(sums.shape) :]
        return self._plus(b, node, a, sums, slots)

    def _operand(self, b: Builder, node: fx.Node, operand: Any, slots: Slots) -> Tensor:
        if isinstance(b.of(operand).tensor, float):
            raise Unsupported(node, "multiplies a matrix of equal numbers")
        return multiplied(b, node, operand, slots)

    def _plus(
        self, b: Builder, node: fx.Node, a: Arguments, product: Tensor, slots: Slots
    ) -> Built:
        """The product times its number, plus what is added."""
        alpha = number(node, a.get("alpha", 1))
        product = product if alpha == 1.0 else b.g.mul(product, alpha)
        added = a.get(self.added) if self.added else None
        beta = number(node, a.get("beta", 1))
        if added is None or beta == 0.0:
            return Built(product, slots)
        t = b.of(added).tensor
        if not isinstance(t, float):
            parts = correspondence(b.value(node), b.value(added))
            t = b.tensor(node, added, translated(slots, parts))
        return Built(b.g.add(product, t if beta == 1.0 else b.g.mul(t, beta)), slots)  # type: ignore[arg-type]


enter_all({
    # of two matrices, of batches of them, with broadcasting; vectors are rows or columns
    **dict.fromkeys(("aten.mm.default", "aten.bmm.default"), Product()),
    **dict.fromkeys(("aten.matmul.default", "aten.vdot.default"), Product(right="other")),
    "aten.mv.default": Product(right="vec"),
    "aten.dot.default": Product(right="tensor"),
    "aten.addmm.default": Product("mat1", "mat2", "self"),
    "aten.baddbmm.default": Product("batch1", "batch2", "self"),
    "aten.linear.default": Product("input", "weight", "bias", transposed=True),
})  # fmt: skip


def _lead(x: Value) -> Value:
    return Value(x.dims[:-2], x.absent)


def _check_summed(node: fx.Node, slot: Slot, operand: Value) -> None:
    """Check that the elements of an operand which are summed do not repeat. Raises Unsupported."""
    if not {*(slot or ())} <= {*operand.present()}:
        raise Unsupported(node, "is a product over elements that repeat; sum before the expand")


def multiplied(b: Builder, node: fx.Node, operand: Any, slots: Slots, rank: int = 2) -> Tensor:
    """An operand of a product, in its element type in PyTorch.
    Tensor cores round what they multiply, as PyTorch does where autocast puts a cast in front."""
    t, wanted = b.tensor(node, operand, slots, rank=rank), fake(operand).dtype
    if t.dtype.torch.itemsize < wanted.itemsize:
        raise Unsupported(node, f"multiplies {wanted} made of {t.dtype} in the same kernel")
    return b.converted(t, wanted)


def _product(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    """A product of two matrices; with a concatenated one, a sum of products.
    before: ``[x | y] W``; after: ``x W' + y W''``, with the rows of W for each."""
    last, place = len(left.shape) - 1, len(right.shape) - 2
    if left.shape[last] == 1:
        return b.g.mul(left, right)  # columns by rows
    if not left.node.facets.joins or left.node.attributes["dim"] != last:
        return _matmul(b, left, right)
    terms: list[Tensor] = []
    start = 0
    for part in (b.g.tensor(i) for i in left.node.inputs):
        stop = start + extent(part.shape[last])
        terms.append(_matmul(b, part, b.part(right, place, start, stop)))
        start = stop
    return reduce(b.g.add, terms)


def _matmul(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    """The product, in the precision that PyTorch is set to for float32 operands."""
    allowed = left.dtype.name == "float32" and torch.get_float32_matmul_precision() != EXACT
    return b.g.matmul(left, right, ROUNDED if allowed else EXACT)


def _front(b: Builder, y: Value) -> Slots:
    """The slots in front of the last; None where elements repeat."""
    present = set(y.present())
    slots = b.groups(tuple(p for d in y.dims for p in leaves(d)))
    return tuple(s if present.issuperset(s) else None for s in slots)
