"""Reductions, softmax and norms: operators that work along dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import inf, log, prod
from typing import Any

import torch
from torch import fx

from cutesuper.ir.dims import extent, size
from cutesuper.ir.dtypes import float32
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.operators.composed import except_where, is_zero
from cutesuper.skeletons.rows.form import MAX_CLUSTER_ROW
from cutesuper.skeletons.rows.schedule import MAX_ROW
from cutesuper.torch.aten.factored_dims import (
    Dims,
    dims_of,
    equal,
    extent_of,
    leaves,
    unify,
)
from cutesuper.torch.aten.graph_builder import (
    CONDITIONS,
    FLOATS,
    Builder,
    Built,
    Shapes,
    Slots,
    Unsupported,
    Value,
    fake,
    of_rank,
)
from cutesuper.torch.aten.pointwise import infinite
from cutesuper.torch.aten.table import (
    Arguments,
    Entry,
    enter,
    enter_all,
    entry_of,
    integers,
    number,
    reads_places,
    records,
)

#: least number of rows that occupy all multiprocessors
ROWS = 64
#: length of rows that one block reduces in less time than several take to meet
SHORT = 8192
#: least length of the parts of a row that no kernel holds
PART = 4096

#: the computation along one dimension
Along = Callable[[KernelGraph, Tensor, int], Tensor]
#: that along several, in this order, which stay with extents of 1
Over = Callable[[KernelGraph, Tensor, Sequence[int]], Tensor]
#: the result along a dimension of that many equal elements, from one of them
OfEqual = Callable[[KernelGraph, Tensor, int], Tensor]


def reduced_dims(node: fx.Node, a: Arguments, rank: int) -> list[int]:
    """The dimensions that an operator reduces; all if it names none."""
    given = a.get("dim")
    if given is None or given == [] or not rank:
        return list(range(rank))
    return sorted(d % rank for d in integers(node, given))


def reduced_together(x: Value, dims: Sequence[int], combined: bool) -> list[Dims]:
    """The dimensions that are reduced, last ones first.
    Adjacent ones are one, except the last of all where there are few rows: it is a row then, rows
    are reduced first, and where they meet next. Rows that are too long for a kernel are divided
    where there are several, and their parts meet together with the rows where they are few. One
    alone is divided if its parts are ``combined`` by a formula; else the search divides it."""
    runs: list[list[int]] = []
    last = len(x.dims) - 1
    many = _one_row(x, dims)
    for d in dims:
        if runs and runs[-1][-1] == d - 1 and (d != last or many):
            runs[-1].append(d)
        else:
            runs.append([d])
    found = [tuple(f for d in run for f in x.dims[d]) for run in reversed(runs)]
    if dims and dims[-1] == last and found[0] and (combined or len(runs) > 1):
        part, *parts = divided(found[0], alone=equal(_count(x, dims), 1))
        beside = len(runs) > 1 and runs[-2][-1] == last - 1
        if parts and beside and not x.absent and _short(whole := (*found[1], *parts[0])):
            found[1:2], parts = [], [whole]  # the parts of all rows meet at once
        found[:1] = [part, *parts]
    return found


def _short(row: Dims) -> bool:
    length = extent_of(row)
    return isinstance(length, int) and length <= SHORT


def _one_row(x: Value, dims: Sequence[int]) -> bool:
    """True if all dimensions that are reduced may be one row."""
    kept, length = _count(x, dims), extent_of(_joined(x, dims))
    known = isinstance(kept, int) and isinstance(length, int) and not x.absent
    return known and suits(kept, length)


def suits(rows: int, length: int) -> bool:
    """True if a kernel holds a row, and rows occupy all multiprocessors or are short."""
    return length <= (MAX_CLUSTER_ROW if rows >= ROWS else SHORT)


def _count(x: Value, dims: Sequence[int]) -> Any:
    """Number of rows along some dimensions."""
    return extent_of(_joined(x, [d for d in range(len(x.dims)) if d not in dims]))


def _joined(x: Value, dims: Sequence[int]) -> Dims:
    return tuple(p for d in dims for p in x.dims[d])


def divided(row: Dims, alone: bool) -> list[Dims]:
    """A row that no kernel holds as parts of rows, and the row of these parts.
    Any other row as it is.

    before: a row of 393216; after: 48 parts of 8192, which are reduced first. A row whose length
    has no factor that suits stays as it is.

    Args:
        row: the dimension that is reduced.
        alone: True if it is the only row.
    """
    whole = extent_of(row)
    if not isinstance(whole, int) or whole <= (MAX_ROW if alone else MAX_CLUSTER_ROW):
        return [row]
    part, rest = 1, list(leaves(row))
    while part < PART and rest:
        last = rest.pop()
        most = max(n for n in range(1, 2 * PART // part + 1) if last.factor.extent % n == 0)
        if most == 1:  # a prime number
            return [row]
        if most < last.factor.extent:
            unify((last,), (*dims_of(last.factor.extent // most), *dims_of(most)))
            rest += leaves((last,))[:1]
        part *= most
    kept = len(leaves(tuple(rest)))
    return [leaves(row)[kept:], leaves(row)[:kept]]


def reduced_shape(x: Value, dims: Sequence[int], keep: bool) -> Value:
    """The dimensions of a reduction's result."""
    left = [() if d in dims else v for d, v in enumerate(x.dims) if keep or d not in dims]
    gone = {p for d in dims for p in leaves(x.dims[d])}
    return Value(tuple(left), tuple(p for p in leaves(x.absent) if p not in gone))


def _reduced(s: Shapes, node: fx.Node, a: Arguments, combined: bool = False) -> Value:
    """The dimensions of the result of a reduction, whose dimensions must stay whole.
    Where places count, they are one row. ``combined``: see `reduced_together`."""
    x = s.of(a["self"])
    dims = reduced_dims(node, a, len(x.dims))
    if _counts_places(node):
        row = _joined(x, dims)
        s.reduced(node, [row] if row else [])
    else:
        s.reduced(node, reduced_together(x, dims, combined))
    return reduced_shape(x, dims, bool(a.get("keepdim", False)))


def _counts_places(node: fx.Node) -> bool:
    """True if places of elements are a result that is used."""
    entry = entry_of(node)
    return entry is not None and entry.finds_places and reads_places(node)


def along(
    b: Builder,
    node: fx.Node,
    t: Tensor,
    slots: Slots,
    dims: Sequence[Dims],
    f: Over,
    of_equal: OfEqual | None = None,
) -> Built:
    """A value reduced along some dimensions, one group after the other, the last one first."""
    places: list[int] = []
    repeated = 1
    for group in (group for d in dims for group in reversed(b.groups(d))):
        if group in slots:
            places.append(slots.index(group))
        elif of_equal is None or not isinstance(n := b.extent(group), int):
            raise Unsupported(node, "reduces elements that repeat; sum before the expand")
        else:
            repeated *= n
    t = f(b.g, t, places) if places else t
    t = t if of_equal is None or repeated == 1 else of_equal(b.g, t, repeated)
    return Built(t, tuple(None if i in places else slot for i, slot in enumerate(slots)))


def moments(
    b: Builder, node: fx.Node, t: Tensor, slots: Slots, dims: Sequence[Dims]
) -> tuple[Built, Built]:
    """Mean and variance along some dimensions, one after the other.

    The variance of all is the mean of those of the parts, and of the squared distances of their
    means from the mean (T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979), so that elements are read once.
    """
    g, first, rest = b.g, dims[:1], dims[1:]
    mean: Any = along(b, node, t, slots, first, _mean)
    variance: Any = along(b, node, g.square(g.sub(t, mean.tensor)), slots, first, _mean)
    for run in rest:
        whole: Any = along(b, node, mean.tensor, mean.slots, [run], _mean)
        away = g.square(g.sub(mean.tensor, whole.tensor))
        total = g.add(variance.tensor, away)
        mean, variance = whole, along(b, node, total, variance.slots, [run], _mean)
    return mean, variance


def whole_tensor(b: Builder, node: fx.Node, operand: Any) -> tuple[Tensor, Slots]:
    """An operand with the slots that it has in PyTorch, or in which it was computed."""
    own = b.of(operand)
    slots = own.slots if isinstance(own.tensor, Tensor) else b.natural(b.value(operand))
    t = b.tensor(node, operand, slots)
    return t, of_rank(slots, t)


@dataclass(frozen=True)
class Reduction(Entry):
    """A reduction along some dimensions, or all.

    Attributes:
        formula: along dimensions.
        of_equal: along a dimension of equal elements; None if that is refused.
    """

    formula: Over
    of_equal: OfEqual | None = None

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        dtype, wanted = fake(a["self"]).dtype, a.get("dtype")
        if wanted not in (None, *FLOATS):
            raise Unsupported(node, f"computes {wanted}")
        # conditions are counted as numbers of the type that is asked for
        if dtype not in FLOATS and (dtype not in CONDITIONS or wanted is None):
            raise Unsupported(node, f"reduces {dtype}; convert it before, as x.to(torch.float32)")
        return _reduced(s, node, a)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        if _counts_places(node):
            for run in b.shapes.runs[node]:
                b.one(node, run)
        t, slots = whole_tensor(b, node, a["self"])
        if fake(a["self"]).dtype in CONDITIONS and a.get("dtype") is not None:
            t = b.converted(t, a["dtype"])
        made = along(b, node, t, slots, b.shapes.runs[node], self.formula, self.of_equal)
        return replace(made, tensor=self.alone(b.g, t)) if made.tensor is t else made

    def alone(self, g: KernelGraph, t: Tensor) -> Tensor:
        """The result along extents of 1: a value of its own, since an input is no output."""
        return g.mul(t, 1.0)


@dataclass(frozen=True)
class _Place(Reduction):
    """Places of the largest or smallest elements, along one dimension or in the whole tensor."""

    finds_places = True

    def alone(self, g: KernelGraph, t: Tensor) -> Tensor:
        """0, the place of the only element."""
        return g.only_place(t)


@dataclass(frozen=True)
class _Extreme(Reduction):
    """The largest or smallest elements, and their places where these are used.

    Attributes:
        place: along one dimension.
    """

    place: Over = field(kw_only=True)
    finds_places = True

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        return not records((node,))

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        value = super().shape(s, node, a)
        return value, value if reads_places(node) else None

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        places = _Place(self.place).build(b, node, a) if reads_places(node) else None
        return super().build(b, node, a), places


class _Truth(Reduction):
    """Any or all of a condition along some dimensions."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if fake(a["self"]).dtype is not torch.bool:
            raise Unsupported(node, "asks for numbers other than 0; compare them first")
        return _reduced(s, node, a)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        return replace(super().build(b, node, a), condition=True)


class _VectorNorm(Reduction):
    """The root of the sum of squares, or of powers of absolute values of another order.
    Their maximum for the order infinity."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if self._order(a) < 1.0:
            raise Unsupported(node, "is a norm of an order below 1")
        return super().shape(s, node, a)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        order, g, dims = self._order(a), b.g, b.shapes.runs[node]
        t, slots = whole_tensor(b, node, a["self"])
        if order == 2.0:
            squares = along(b, node, g.square(t), slots, dims, _sum)
            return Built(g.root(squares.tensor), squares.slots)  # type: ignore[arg-type]
        if order in (1.0, inf):
            return along(b, node, g.abs(t), slots, dims, _sum if order == 1.0 else _maximum)
        powers = along(b, node, g.pow(g.abs(t), order), slots, dims, _sum)
        return Built(self._root(g, powers.tensor, order), powers.slots)  # type: ignore[arg-type]

    def _root(self, g: KernelGraph, total: Tensor, order: float) -> Tensor:
        """The slope is infinite at 0, where PyTorch's gradients of norms are 0."""
        zero = is_zero(g, total)
        return except_where(g, zero, g.pow(g.add(total, zero), 1.0 / order))

    def _order(self, a: Arguments) -> float:
        given = a.get("ord", a.get("p", 2))
        return 2.0 if given is None else float(given)


@enter(
    "aten.var.correction",
    "aten.var.dim",
    "aten.var.default",
    "aten.var_mean.correction",
    "aten.var_mean.dim",
    "aten.std.correction",
    "aten.std.dim",
    "aten.std.default",
    "aten.std_mean.correction",
    "aten.std_mean.dim",
)
class Variance(Entry):
    """Mean of the squared distances from the mean."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        value, shape = _reduced(s, node, a, combined=True), fake(a["self"]).shape
        if not all(isinstance(shape[d], int) for d in reduced_dims(node, a, len(shape))):
            raise Unsupported(node, "is a variance over an extent that is known only at the call")
        return (value, value) if "_mean" in str(node.target) else value

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        x, g = b.value(a["self"]), b.g
        t, slots = whole_tensor(b, node, a["self"])
        places, dims = reduced_dims(node, a, len(x.dims)), b.shapes.runs[node]
        mean, variance = moments(b, node, t, slots, dims)
        y = variance.tensor
        n = prod(int(fake(a["self"]).shape[d]) for d in places)
        correction = self._correction(node, a)
        if n <= correction:
            raise Unsupported(node, f"divides by {n} - {correction:g}")
        if correction:
            y = g.mul(y, n / (n - correction))  # type: ignore[arg-type]
        if "std" in str(node.target):
            y = g.root(y)  # type: ignore[arg-type]
        built = Built(y, mean.slots)
        return (built, mean) if "_mean" in str(node.target) else built

    def _correction(self, node: fx.Node, a: Arguments) -> float:
        if "unbiased" in a:
            return 1.0 if a["unbiased"] else 0.0
        return 1.0 if a.get("correction") is None else number(node, a["correction"])


@dataclass(frozen=True)
class _AlongOne(Entry):
    """An operator along one dimension whose result has it too.

    Attributes:
        formula: along that dimension.
        of_one: the result along an extent of 1; NaN for infinite elements.
    """

    formula: Along
    of_one: float

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if fake(node).dtype not in FLOATS:
            raise Unsupported(node, f"computes {fake(node).dtype}")
        x = s.of(a["self"])
        if not x.dims:
            raise Unsupported(node, "works along a tensor of no dimensions")
        s.reduced(node, [x.dims[integers(node, a["dim"])[0] % len(x.dims)]])
        return Value(x.dims, x.absent)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        t, slots = whole_tensor(b, node, a["self"])
        t = self.seen(b.g, t)
        group = b.one(node, b.shapes.runs[node][0])
        if group is None:
            return Built(self.alone(b.g, t), slots)
        if group not in slots:
            raise Unsupported(node, "works along a dimension of repeated elements")
        return Built(self.formula(b.g, t, slots.index(group)), slots)

    def seen(self, g: KernelGraph, t: Tensor) -> Tensor:
        """The operand as the formula takes it."""
        del g
        return t

    def alone(self, g: KernelGraph, t: Tensor) -> Tensor:
        """The result along an extent of 1."""
        return g.add(g.mul(t, 0.0), self.of_one)


class _SafeSoftmax(_AlongOne):
    """Softmax in which rows of -inf alone are 0, as of elements that are hidden."""

    def seen(self, g: KernelGraph, t: Tensor) -> Tensor:
        made = t.node.facets
        if made.hides or (made.masks and made.fill == -inf):
            return t
        return g.hide(g.sub(1.0, infinite(g, t, -1.0)), t)

    def alone(self, g: KernelGraph, t: Tensor) -> Tensor:
        return g.sub(1.0, infinite(g, t, -1.0))


@enter("aten.cumsum.default")
class CumulativeSum(Entry):
    """Sums along a dimension up to each element. Rows that no block holds are divided."""

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """True for sums of numbers, not of integers and conditions."""
        return {fake(a["self"]).dtype, fake(node).dtype} <= {*FLOATS}

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x = s.of(a["self"])
        if not x.dims:
            raise Unsupported(node, "works along a tensor of no dimensions")
        row = x.dims[integers(node, a["dim"])[0] % len(x.dims)]
        s.reduced(node, divided(row, alone=True))
        return Value(x.dims, x.absent)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        t, slots = whole_tensor(b, node, a["self"])
        groups = [b.one(node, run) for run in b.shapes.runs[node]]
        if groups == [None]:
            return Built(b.g.mul(t, 1.0), slots)
        if any(group not in slots for group in groups):
            raise Unsupported(node, "works along a dimension of repeated elements")
        return Built(self._along(b.g, t, [slots.index(group) for group in groups]), slots)

    def _along(self, g: KernelGraph, t: Tensor, dims: Sequence[int]) -> Tensor:
        """Sums within a part, and all parts before it, in float32."""
        if len(dims) == 1:
            return g.cumsum(t, dims[0])
        part, parts = dims
        wide = g.convert(t, float32)
        total = g.sum(wide, part)
        before = g.sub(g.cumsum(total, parts), total)
        return g.convert(g.add(g.cumsum(wide, part), before), t.dtype)


# ------------------------------------------------------------------------------------------- norms


class _Norm(Entry):
    """Rows normalized to one scale, multiplied by a weight, shifted by a bias."""

    rounds: bool = False

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        x, n = s.of(a["input"]), len(a["normalized_shape"])
        last = tuple(f for d in x.dims[len(x.dims) - n :] for f in d)
        rows = range(len(x.dims) - n, len(x.dims))
        for name in ("weight", "bias"):
            if isinstance(a.get(name), fx.Node):
                unify(tuple(f for d in s.of(a[name]).dims for f in d), last)
        s.reduced(node, divided(last, alone=equal(_count(x, rows), 1)))
        return x

    def one_element(self, a: Arguments) -> bool:
        """True if there is nothing to sum over."""
        shape = fake(a["input"]).shape  # extents that are nodes in what is written
        return all(equal(n, 1) for n in shape[len(shape) - len(a["normalized_shape"]) :])

    def operands(self, b: Builder, node: fx.Node, a: Arguments) -> tuple[list[Any], Slots]:
        """Input, weight and bias (each may be None), rows along the last dimension."""
        x, runs = b.value(a["input"]), b.shapes.runs[node]
        if len(runs) > 1:
            slots = b.natural(x)
            t = b.tensor(node, a["input"], slots)
            return [t, *(self._given(b, node, a, k) for k in ("weight", "bias"))], slots
        group = b.one(node, runs[0])
        own = b.of(a["input"])
        slots = own.slots if isinstance(own.tensor, Tensor) else b.natural(x)
        if group is not None and group not in slots:
            raise Unsupported(node, "normalizes elements that repeat")
        if group is not None:
            slots = (*(s for s in slots if s != group), group)
        t = b.tensor(node, a["input"], slots)
        others = [self._given(b, node, a, k) for k in ("weight", "bias")]
        return [t, *others], of_rank(slots, t)

    def _given(self, b: Builder, node: fx.Node, a: Arguments, name: str) -> Tensor | None:
        """A weight or bias, if there is one."""
        if not isinstance(a.get(name), fx.Node):
            return None
        return b.tensor(node, a[name], b.groups(b.value(a[name]).present()))

    def in_parts(
        self, b: Builder, node: fx.Node, x: list[Any], slots: Slots, centred: bool, eps: float
    ) -> tuple[Built, Any, Any]:
        """The norm of rows that are divided: the result, mean and 1 / sqrt(variance + eps).

        Args:
            b: of the graph.
            node: the norm.
            x: input, weight and bias.
            slots: of the input.
            centred: False if the mean is not subtracted.
            eps: added to the variance.
        """
        g, runs, (t, weight, bias) = b.g, b.shapes.runs[node], x
        if centred:
            mean, variance = (m.tensor for m in moments(b, node, t, slots, runs))
        else:
            mean, variance = None, along(b, node, g.square(t), slots, runs, _mean).tensor
        rstd = g.rsqrt(g.add(variance, eps))  # type: ignore[arg-type]
        y = g.mul(t if mean is None else g.sub(t, mean), rstd)  # type: ignore[arg-type]
        y = y if weight is None else g.mul(y, weight)
        return Built(y if bias is None else g.add(y, bias), slots), mean, rstd


@enter("aten.rms_norm.default")
class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        [x, weight, _], slots = self.operands(b, node, a)
        eps = a.get("eps")
        eps = torch.finfo(fake(a["input"]).dtype).eps if eps is None else number(node, eps)
        if len(b.shapes.runs[node]) > 1:
            return self.in_parts(b, node, [x, weight, None], slots, False, eps)[0]
        if not self.one_element(a):
            return Built(b.g.rms_norm(x, weight, eps=eps), slots)
        y = b.g.mul(x, b.g.rsqrt(b.g.add(b.g.square(x), eps)))
        return Built(y if weight is None else b.g.mul(y, weight), slots)


@enter("aten.layer_norm.default")
class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        [x, weight, bias], slots = self.operands(b, node, a)
        eps = number(node, a.get("eps", 1e-5))
        if len(b.shapes.runs[node]) > 1:
            return self.in_parts(b, node, [x, weight, bias], slots, True, eps)[0]
        if not self.one_element(a):
            return Built(b.g.layer_norm(x, weight, bias, eps=eps), slots)
        y = b.g.mul(x, 0.0)  # x - x, NaN where x is infinite
        y = y if weight is None else b.g.mul(y, weight)
        return Built(y if bias is None else b.g.add(y, bias), slots)


@enter("aten.group_norm.default")
class GroupNorm(Entry):
    """Layer norm of groups of channels, with a weight and a bias for each channel.

    Statistics read the groups as rows, which the result, with its channels, does not: two kernels.
    """

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x, groups = s.of(a["input"]), integers(node, a["num_groups"])[0]
        channels = fake(a["input"]).shape[1]
        if not isinstance(channels, int):
            raise Unsupported(node, "has a number of channels that is known only at the call")
        each = dims_of(channels // groups)
        unify(x.dims[1], (*dims_of(groups), *each))
        for name in ("weight", "bias"):
            if isinstance(a.get(name), fx.Node):
                unify(s.of(a[name]).dims[0], x.dims[1])
        inner = leaves(x.dims[1])[len(leaves(x.dims[1])) - len(leaves(each)) :]
        rows = divided(tuple(p for d in x.dims[2:] for p in d), alone=False) if x.dims[2:] else []
        s.reduced(node, [*(r for r in rows if r), *([inner] if inner else [])])
        return x

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        g, runs = b.g, b.shapes.runs[node]
        x = b.value(a["input"])
        slots = b.natural(x)
        t = b.tensor(node, a["input"], slots)
        behind = len(b.groups(tuple(p for d in x.dims[2:] for p in d)))
        group = tuple(p for r in reversed(runs) for p in r)
        length = prod(extent(b.extent(s)) for s in b.groups(group))
        row = b.joined(a["input"], group) if suits(size(t.shape) // length, length) else None
        if not runs:
            y = g.mul(t, 0.0)  # x - x, NaN where x is infinite
        else:
            mean, variance = self._moments(b, node, row, t, slots)
            eps = number(node, a.get("eps", 1e-5))
            y = g.mul(g.sub(t, mean), g.rsqrt(g.add(variance, eps)))
        for name, combine in (("weight", g.mul), ("bias", g.add)):
            if isinstance(a.get(name), fx.Node):
                own = (*b.groups(b.value(a[name]).present()), *(None,) * behind)
                y = combine(y, b.tensor(node, a[name], own))
        return Built(y, slots)

    def _moments(
        self, b: Builder, node: fx.Node, row: Tensor | None, t: Tensor, slots: Slots
    ) -> tuple[Any, Any]:
        """Mean and variance of each group: of its row, if the input is read as rows."""
        if row is None:
            mean, variance = moments(b, node, t, slots, b.shapes.runs[node])
            return mean.tensor, variance.tensor
        mean = b.g.mean(row, -1)
        return mean, b.g.mean(b.g.square(b.g.sub(row, mean)), -1)


@enter("aten.native_layer_norm.default")
class NativeLayerNorm(LayerNorm):
    """Layer norm with mean and 1 / sqrt(var + eps) of every row as results of their own."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        if self.one_element(a):
            raise Unsupported(node, "has mean and deviation of rows of one element")
        x, n = super().shape(s, node, a), len(a["normalized_shape"])
        rows = reduced_shape(x, range(len(x.dims) - n, len(x.dims)), True)
        return x, rows, rows

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        [x, *others], slots = self.operands(b, node, a)
        if len(runs := b.shapes.runs[node]) > 1:
            rows = tuple(None if any(s in b.groups(r) for r in runs) else s for s in slots)
            eps = number(node, a["eps"])
            y, mean, rstd = self.in_parts(b, node, [x, *others], slots, True, eps)
            return y, Built(mean, rows), Built(rstd, rows)
        y = super().build(b, node, a)
        g, rows = b.g, (*slots[:-1], None)
        mean = g.mean(x, -1)
        variance = g.mean(g.square(g.sub(x, mean)), -1)
        rstd = g.rsqrt(g.add(variance, number(node, a["eps"])))
        return y, Built(mean, rows), Built(rstd, rows)


def each(f: Along) -> Over:
    """The computation along one dimension after the other."""
    return lambda g, t, dims: reduce(partial(f, g), dims, t)


_sum = each(lambda g, t, dim: g.sum(t, dim))
_mean = each(lambda g, t, dim: g.mean(t, dim))


def _maximum(g: KernelGraph, t: Tensor, dims: Sequence[int]) -> Tensor:
    return g.max(t, dims[0]) if len(dims) == 1 else g.apply("amax", t, dims=dims)


def _minimum(g: KernelGraph, t: Tensor, dims: Sequence[int]) -> Tensor:
    return g.mul(_maximum(g, g.mul(t, -1.0), dims), -1.0)


def _everywhere(g: KernelGraph, t: Tensor, dims: Sequence[int]) -> Tensor:
    return g.sub(1.0, _maximum(g, g.sub(1.0, t), dims))


_place_of_most = each(lambda g, t, dim: g.argmax(t, dim))
_place_of_least = each(lambda g, t, dim: g.argmax(g.mul(t, -1.0), dim))


def _softmax(g: KernelGraph, t: Tensor, dim: int) -> Tensor:
    return g.softmax(t, dim)


def _same(g: KernelGraph, t: Tensor, n: int) -> Tensor:
    return t


def _times(g: KernelGraph, t: Tensor, n: int) -> Tensor:
    return g.mul(t, float(n))


def of_reduction(name: str) -> Reduction:
    """The entry of a reduction of the table of operators."""
    op = TABLE[name]
    of_equal = _same if op.averages or op.selects else _times if op.sums else None
    return Reduction(each(lambda g, t, dim: g.apply(name, t, dim=dim)), of_equal)


enter_all({
    **dict.fromkeys(("aten.amax.default", "aten.max.default"), Reduction(_maximum, _same)),
    **dict.fromkeys(("aten.amin.default", "aten.min.default"), Reduction(_minimum, _same)),
    **dict.fromkeys(("aten.any.dim", "aten.any.dims", "aten.any.default"), _Truth(_maximum, _same)),
    **dict.fromkeys(
        ("aten.all.dim", "aten.all.dims", "aten.all.default"), _Truth(_everywhere, _same)),
    **dict.fromkeys(
        ("aten.softmax.int", "aten._softmax.default", "aten.special_softmax.int"),
        _AlongOne(_softmax, of_one=1.0)),
    "aten._safe_softmax.default": _SafeSoftmax(_softmax, of_one=1.0),
    **dict.fromkeys(
        ("aten.log_softmax.int", "aten._log_softmax.default", "aten.special_log_softmax.int"),
        _AlongOne(lambda g, t, d: g.log_softmax(t, d), of_one=0.0)),
    "aten.max.dim": _Extreme(_maximum, place=_place_of_most),
    "aten.min.dim": _Extreme(_minimum, place=_place_of_least),
    "aten.argmax.default": _Place(_place_of_most),
    "aten.argmin.default": _Place(_place_of_least),
    "aten.logsumexp.default": Reduction(
        each(lambda g, t, d: g.logsumexp(t, d)), lambda g, t, n: g.add(t, log(n))),
    "aten.linalg_vector_norm.default": _VectorNorm(_sum),
    "aten.norm.ScalarOpt_dim": _VectorNorm(_sum),
})  # fmt: skip
