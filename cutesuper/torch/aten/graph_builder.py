"""Traced tensors on their way into a kernel graph: their dimensions first, then their values.

A region is read twice. `Shapes` gives every tensor its dimensions, as factors that views divide and
operators unify. Then `Builder` makes the kernel graph: factors that are always adjacent become one
dimension, and views and casts disappear.

The *slots* of a value are the dimensions of its tensor in the kernel graph: the parts of a group,
or None for an extent of 1 (what a reduction leaves).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from cutesuper.errors import CutesuperError
from cutesuper.ir.dims import Dim, Shape, Symbol, extent, show_shape
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT
from cutesuper.ir.relations import ordered
from cutesuper.torch.aten.factored_dims import (
    Dims,
    Extent,
    Factor,
    Group,
    Grouping,
    Mismatch,
    Part,
    dims_of,
    equal,
    extent_of,
    leaves,
    unify,
)

#: types that kernels read and write
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: types converted to the numbers 1 and 0 in front of them
CONDITIONS = (torch.bool,)
#: types converted to float32, as PyTorch does where they meet floating-point numbers
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Unsupported(Exception):
    """A node that cannot be part of a kernel graph.

    Attributes:
        node: the node.
        reason: why, in terms of the user's program.
    """

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Value:
    """The dimensions of a traced tensor.

    Attributes:
        dims: the parts of each.
        absent: parts along which all its elements are the same, so that its tensor in the kernel
            graph has an extent of 1.
    """

    dims: tuple[Dims, ...]
    absent: Dims = ()

    def present(self) -> Dims:
        """The parts that its tensor in the kernel graph has, in order."""
        absent = set(leaves(self.absent))
        return tuple(p for d in self.dims for p in leaves(d) if p not in absent)


#: a dimension of a tensor in the kernel graph
Slot = Dims | None
Slots = tuple[Slot, ...]


def correspondence(result: Value, operand: Value) -> dict[Part, Part]:
    """For each part of a result, the part of an operand, dimensions counted from the last."""
    found: dict[Part, Part] = {}
    for mine, other in zip(reversed(result.dims), reversed(operand.dims), strict=False):
        if leaves(other):
            found.update(zip(leaves(mine), leaves(other), strict=True))
    return found


def translated(slots: Slots, parts: dict[Part, Part]) -> Slots:
    """Slots of one tensor as those of another; None for slots that it does not have."""
    return tuple(
        tuple(parts[p] for p in s) if s and all(p in parts for p in s) else None for s in slots
    )


@dataclass(frozen=True)
class Built:
    """A value of the kernel graph.

    Attributes:
        tensor: its handle; a number if it is the same everywhere; None for an input, whose shape is
            decided where it is used.
        slots: of the tensor.
        source: the input, if it is one.
        condition: it is 1 where a condition holds and 0 elsewhere.
    """

    tensor: Tensor | float | None
    slots: Slots = ()
    source: fx.Node | None = None
    condition: bool = False


@dataclass(frozen=True)
class Given:
    """An input of the kernel graph.

    Attributes:
        node: the tensor that it is made from.
        slots: in the order of memory.
        dtype: of the input; differs from the tensor's for a condition.
        part: the range of the first slot that it covers; None for all.
        lengths: for a tensor of lengths: the offset that is added, and the largest length that
            makes a difference.
        fill: the number of which the input is full, on the device of the tensor, if it is.
        whole: shape of the input if it is all of a tensor without gaps, of which parts are read.
    """

    node: fx.Node
    slots: Slots
    dtype: torch.dtype
    part: tuple[int, int] | None = None
    lengths: tuple[int, int] | None = None
    fill: int | None = None
    whole: Shape | None = None


def fake(node: fx.Node) -> torch.Tensor:
    """The shape, element type and strides of a node's tensor. Raises Unsupported."""
    val = node.meta.get("val")
    if isinstance(val, torch.SymFloat | torch.SymInt | torch.SymBool):
        raise Unsupported(
            node,
            "takes a number that is known only at the call (made of .item() or of an "
            "extent); give it as a tensor of no dimensions",
        )
    if not isinstance(val, torch.Tensor):
        raise Unsupported(node, "is no tensor")
    return val


def memory_order(t: torch.Tensor) -> list[int] | None:
    """The dimensions of a tensor, slowest in memory first; None if it has gaps or repeats."""
    order = _by_stride(t)
    expected: Extent = 1
    for d in reversed(order or []):
        if equal(t.shape[d], 1):
            continue
        if not equal(t.stride()[d], expected):
            return None
        expected = expected * t.shape[d]
    return order


def placed_ones(t: torch.Tensor, order: Sequence[int]) -> list[int]:
    """The order of a tensor's dimensions in memory, those of extent 1 where their strides say.
    Nothing else has such a stride, but cuDNN reads it."""
    ones = [d for d in order if equal(t.shape[d], 1)]
    found = [d for d in order if d not in ones]
    for d in ones:
        step: Extent = 1
        place = len(found)
        while place and not equal(t.stride()[d], step):
            place -= 1
            step = step * t.shape[found[place]]
        found.insert(place, d)
    return found


def is_dense(t: torch.Tensor) -> bool:
    """True for a tensor without gaps whose dimensions are in order."""
    order = memory_order(t)
    if order is None:
        return False
    order = [d for d in order if not equal(t.shape[d], 1)]
    return order == sorted(order)


def copied_order(t: torch.Tensor) -> list[int]:
    """The order of a tensor's dimensions in a kernel: that of memory, gaps or not.
    An element-wise result has its operand's order too, but has no gaps."""
    order = _by_stride(t)
    repeats = any(equal(n, 0) for n in t.stride())
    return list(range(t.dim())) if order is None or repeats else order


def _by_stride(t: torch.Tensor) -> list[int] | None:
    """The dimensions by decreasing stride, those of extent 1 first.
    None if strides are unknown before the call."""
    real = [d for d in range(t.dim()) if not equal(t.shape[d], 1)]
    try:
        order = sorted(real, key=lambda d: -_hint(t.stride()[d]))
    except Mismatch:
        return None
    return [d for d in range(t.dim()) if d not in real] + order


def _hint(extent: Extent) -> int:
    """An extent in the example. Raises Mismatch if it depends on data."""
    if isinstance(extent, int):
        return extent
    hint = extent.node.hint
    if hint is None:
        raise Mismatch("has an extent that depends on data, as torch.nonzero makes them")
    return int(hint)


# ------------------------------------------------------------------------------------------ shapes


@dataclass
class Shapes:
    """The dimensions of the tensors of a region.

    Attributes:
        values: by node; a tuple for several results.
        inputs: nodes from outside.
        grouping: which factors stand side by side.
        runs: by reduction or norm the dimensions along which it works, one after the other; a row
            that is too long for a kernel is several.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    grouping: Grouping = field(default_factory=Grouping)
    runs: dict[fx.Node, list[Dims]] = field(default_factory=dict)

    def of(self, node: Any) -> Value:
        """The value of an operand. Raises Unsupported."""
        value = self.values.get(node)
        if value is None:
            raise Unsupported(
                node,
                "takes a number that is known only at the call; give it as a tensor of no "
                "dimensions",
            )
        if not isinstance(value, Value):
            raise Unsupported(node, "has several results")
        return value

    def input(self, node: fx.Node) -> None:
        """Add a tensor from outside. Raises Unsupported for one that kernels do not read."""
        t = fake(node)
        if t.dtype not in (*FLOATS, *CONDITIONS, *INTEGERS):
            raise Unsupported(node, f"is {t.dtype}; kernels read float16, bfloat16 and float32")
        if t.layout is not torch.strided:
            raise Unsupported(node, f"reads a tensor of {t.layout}; make it dense")
        if any(equal(n, 0) for n in t.shape):
            raise Unsupported(
                node, f"reads an empty tensor, {list(t.shape)}; there is nothing to compute"
            )
        self.values[node] = value = Value(tuple(dims_of(n) for n in t.shape))
        self.inputs.append(node)
        self.grouping.add(f for d in copied_order(t) for f in value.dims[d])

    def set(self, node: fx.Node, value: Any) -> None:
        """Set the value of a node."""
        self.values[node] = value

    def whole(self, dims: Dims) -> None:
        """Keep a dimension whole, as an operator works along it.
        Its factors are not joined with others."""
        self.grouping.add(dims)

    def reduced(self, node: fx.Node, runs: list[Dims]) -> None:
        """Keep the dimensions whole along which a node works, one after the other."""
        self.runs[node] = runs
        for run in runs:
            self.whole(run)

    def broadcast(self, node: fx.Node, values: Sequence[Value]) -> Value:
        """The dimensions of an element-wise result. Raises Mismatch."""
        rank = max(len(v.dims) for v in values)
        result: list[Dims] = []
        for d in range(-rank, 0):
            given = [v.dims[d] for v in values if len(v.dims) >= -d and leaves(v.dims[d])]
            for other in given[1:]:
                unify(given[0], other)
            result.append(given[0] if given else ())
        whole = Value(tuple(result))
        there: set[Part] = set()
        for v in values:
            present = set(v.present())
            there |= {mine for mine, p in correspondence(whole, v).items() if p in present}
        return Value(whole.dims, tuple(p for p in whole.present() if p not in there))


# ----------------------------------------------------------------------------------------- builder


class Within(NamedTuple):
    """The indices that PyTorch takes: from ``first`` to before ``end``, and maybe another one."""

    first: int
    end: int
    other: int | None = None

    def both(self, rest: Within) -> Within:
        """The indices that both take."""
        other = self.other if self.other == rest.other else None
        return Within(max(self.first, rest.first), min(self.end, rest.end), other)


@dataclass
class Builder:
    """The kernel graph of a region under construction.

    Attributes:
        shapes: of all values.
        constants: nodes that are not written while kernels run (parameters).
        g: the kernel graph.
        built: its values by node.
        operands: the sources of the graph's inputs, in their order.
        limits: of indices, what PyTorch takes.
        wholes: the tensors of which inputs with gaps are views, if kernels may read parts of these.
        strided, open_rows: whether kernels need strides that are numbers, or take rows of any
            extent; see `cutesuper.torch.aten.table.Entry`.
    """

    shapes: Shapes
    constants: frozenset[fx.Node]
    wholes: Mapping[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    strided: bool = True
    open_rows: bool = False
    g: KernelGraph = field(default_factory=KernelGraph)
    built: dict[fx.Node, Any] = field(default_factory=dict)
    operands: list[Given] = field(default_factory=list)
    limits: dict[fx.Node, Within] = field(default_factory=dict)
    _groups: dict[Factor, Group] = field(default_factory=dict)
    _symbols: dict[Group, Symbol] = field(default_factory=dict)
    _inputs: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found: list[tuple[Value, Dims]] = []
        for node, value in self.shapes.values.items():
            for v in value if isinstance(value, tuple) else (value,):
                if isinstance(v, Value):
                    present = v.present()
                    self._check(node, present)
                    found.append((v, present))
        self._groups = self.shapes.grouping.groups()
        own = [{self._groups[p.factor] for p in present} for _, present in found]
        beside = {g for groups in own if len(groups) > 1 for g in groups}
        flat = [
            v
            for (v, present), g in zip(found, own, strict=True)
            if not g & beside and self._is_one_row(v, present)
        ]
        for v in flat:
            self.shapes.whole(v.dims[-1])
        if flat:
            self._groups = self.shapes.grouping.groups()

    def _is_one_row(self, value: Value, present: Dims) -> bool:
        """True if rows and the elements in them have become one dimension.
        As in purely element-wise work: kernels walk over rows, of which there may be any number. (A
        row that others have rows of is one, and one that is reduced as a whole.)"""
        if any(leaves(run) == present for runs in self.shapes.runs.values() for run in runs):
            return False
        last = leaves(value.dims[-1]) if value.dims else ()
        return 0 < len(last) < len(present) and len(self.groups(present)) == 1

    def _check(self, node: fx.Node, present: Dims) -> None:
        if len(set(present)) != len(present):
            raise Unsupported(node, "has two dimensions that were one; nothing tells them apart")
        self.shapes.grouping.add(present)

    # ------------------------------------------------------------------------------------- groups

    def groups(self, dims: Dims) -> tuple[Dims, ...]:
        """Slots of some parts, in order. Raises Mismatch where a group is cut."""
        found: list[Dims] = []
        rest = list(leaves(dims))
        while rest:
            group = self._groups.get(rest[0].factor)
            if group is None:
                raise Mismatch("a dimension along which everything repeats")
            slot = tuple(rest[: len(group.factors)])
            if tuple(p.factor for p in slot) != group.factors:
                raise Mismatch("a dimension that belongs to a larger one is taken alone")
            found.append(slot)
            del rest[: len(slot)]
        return tuple(found)

    def one(self, node: fx.Node, dims: Dims) -> Slot:
        """The slot of a dimension that must be a single one; None for an extent of 1."""
        found = self.groups(dims)
        if len(found) > 1:
            raise Unsupported(node, "works along a dimension that the rest of the region divides")
        return found[0] if found else None

    def extent(self, slot: Slot) -> Dim:
        """The extent of a slot in the kernel graph.
        Of a slot of `joined`, the product of its groups."""
        if slot is None:
            return 1
        if len(own := self.groups(slot)) > 1:
            return prod(extent(self.extent(s)) for s in own)
        group = self._groups[slot[0].factor]
        if isinstance(group.extent, int):
            return group.extent
        if group not in self._symbols:
            symbol = Symbol(f"M{len(self._symbols) or ''}", max(1, _hint(group.extent)))
            self._symbols[group] = symbol
        return self._symbols[group]

    def natural(self, value: Value) -> Slots:
        """The slots of a value in the order of its dimensions in PyTorch.
        Of several extents of 1 the last is kept, which tells a column from a row, and one in front
        of a row."""
        present = value.present()
        slots = self.groups(present)
        last = value.dims[-1:] and leaves(value.dims[-1])
        if slots and not set(last or ()) & set(present):
            slots = (*slots, None)
        return (None, *slots) if len(slots) < 2 <= len(value.dims) else slots

    # ------------------------------------------------------------------------------------- values

    def value(self, node: Any) -> Value:
        """The dimensions of an operand."""
        return self.shapes.of(node)

    def of(self, node: Any) -> Built:
        """The value of an operand in the kernel graph."""
        if node not in self.built:
            self.built[node] = Built(None, source=node, condition=fake(node).dtype in CONDITIONS)
        built = self.built[node]
        if not isinstance(built, Built):
            raise Unsupported(node, "has several results")
        return built

    def tensor(self, node: fx.Node, operand: Any, slots: Slots, rank: int = 0) -> Tensor:
        """An operand with these slots; extents of 1 in front are left out.

        Args:
            node: the reader, for messages.
            operand: a node.
            slots: those that it does not have are extents of 1.
            rank: the least number of dimensions.

        Raises:
            Unsupported: its dimensions are arranged otherwise, and only a copy would help.
        """
        built = self.of(operand)
        if isinstance(built.tensor, float):
            raise Unsupported(node, "takes a number where a tensor has to be")
        mine = set(self.groups(self.value(operand).present()))
        full = tuple(s if s in mine else None for s in slots)
        if mine - set(full):
            raise Unsupported(node, "has operands whose dimensions do not correspond")
        if built.source is not None:
            # one row is still a matrix
            least = max(rank, min(2, len(self.value(operand).dims)))
            return self._input(built.source, _stripped(full, least))
        t, wanted = built.tensor, _stripped(full, rank)
        if not isinstance(t, Tensor):
            raise AssertionError("a value that is neither computed nor an input")
        if _stripped(built.slots, rank) == wanted:
            return t
        have = built.slots
        while len(have) < len(wanted):
            t, have = self._in_front(node, t), (None, *have)
        if have == wanted:
            return t
        order = _permutation(have, wanted)
        if order is None:
            raise Unsupported(node, "has operands whose dimensions do not correspond")
        return self.g.transpose(t, order)

    def _in_front(self, node: fx.Node, t: Tensor) -> Tensor:
        """A value of element-wise work, products and reductions with an extent of 1 in front.

        before: ``x * 2`` of x[8, 16]; after: of x[1, 8, 16], the same memory.
        """
        made: dict[int, Tensor] = {}
        for i in ordered([t.index], lambda i: self._longest(node, self.g.tensor(i))):
            made[i] = self._extended(self.g.tensor(i), made)
        return made[t.index]

    def _longest(self, node: fx.Node, t: Tensor) -> list[int]:
        """The operands that get an extent of 1 in front if a value does. Raises Unsupported."""
        args = [self.g.tensor(i) for i in t.node.inputs]
        if t.node.operator == INPUT:
            given = self.operands[self.g.inputs.index(t.index)]
            if given == replace(given, part=None, lengths=None, fill=None, whole=None):
                return []
        elif t.node.facets.permutes:
            return [a.index for a in args]
        elif t.node.facets.elementwise or t.node.facets.contracts or _along_a_dimension(t):
            return [a.index for a in args if len(a.shape) == len(t.shape)]
        raise Unsupported(node, "has operands whose dimensions do not correspond")

    def _extended(self, t: Tensor, made: dict[int, Tensor]) -> Tensor:
        """A value with an extent of 1 in front, of operands that have one."""
        if t.node.operator == INPUT:
            given = self.operands[self.g.inputs.index(t.index)]
            return self._input_of(given.node, (None, *given.slots))
        args = [made.get(i, self.g.tensor(i)) for i in t.node.inputs]
        attributes = t.node.facets.in_front(dict(t.node.attributes))
        if t.node.facets.permutes:
            return self.g.transpose(args[0], attributes["dims"])
        return self.g.apply(t.node.operator, *args, **attributes)

    def fits(self, operand: Any, slots: Slots) -> bool:
        """True if an operand can have these slots without being rearranged."""
        built = self.of(operand)
        if not isinstance(built.tensor, Tensor):
            return True
        mine = set(self.groups(self.value(operand).present()))
        wanted = tuple(s if s in mine else None for s in slots)
        return _stripped(wanted) == _stripped(built.slots)

    def _input(self, node: fx.Node, slots: Slots) -> Tensor:
        if (node, slots) not in self._inputs:
            self._inputs[node, slots] = self._new_input(node, slots)
        return self._inputs[node, slots]

    def joined(self, operand: Any, run: Dims) -> Tensor | None:
        """A second view of an input, in which dimensions that others divide are one, the last one.
        Those before it have an extent of 1. None if it is no input, or stored otherwise.

        before: ``[N, G, 8, 4096]``, of which the last two are ``run``; after: ``[N, G, 1, 32768]``.
        """
        source = self.of(operand).source
        if source is None or memory_order(fake(source)) != list(range(fake(source).dim())):
            return None
        own, inner = self.natural(self.value(operand)), self.groups(run)
        if own[len(own) - len(inner) :] != inner or any(
            isinstance(self.extent(s), Symbol) for s in inner
        ):
            return None
        lead = own[: len(own) - len(inner)]
        slots = (*lead, *(None,) * (len(inner) - 1), tuple(p for s in inner for p in s))
        return self._input_of(source, slots)

    def _new_input(self, node: fx.Node, slots: Slots) -> Tensor:
        t, value = fake(node), self.value(node)
        slots = slots or (None,)
        stored = self.groups(tuple(p for d in copied_order(t) for p in leaves(value.dims[d])))
        memory = _in_memory(slots, stored)
        x = self._strided(node, memory) or self._input_of(node, memory)
        order = None if memory == slots else _permutation(memory, slots)
        return x if order is None else self.g.transpose(x, order)

    def _strided(self, node: fx.Node, memory: Slots) -> Tensor | None:
        """A part of an input without gaps that a view with gaps is; None for another view.

        before: queries ``[16, 2, 32]`` with strides 192, 32 and 1; after: ``[16, 6, 32]``, which is
        the packed projection that they lie in, and heads 0 and 1 of it.
        """
        root, real = self.wholes.get(node), tuple(s for s in memory if s is not None)
        strides = None if root is None else self._strides(node, real)
        shape = None if root is None or not strides else self._whole(fake(root), real, strides)
        if root is None or not strides or shape is None:
            return None
        first = int(fake(node).storage_offset() - fake(root).storage_offset())
        ranges = [
            (start, start + extent(n))
            for start, n in zip(_digits(first, strides), self._shape_of(real), strict=True)
        ]
        if not all(a >= 0 and b <= extent(d) for (a, b), d in zip(ranges, shape, strict=True)):
            return None
        return self._part_of_whole(root, memory, shape, ranges)

    def _whole(self, root: torch.Tensor, slots: Slots, strides: Sequence[int]) -> Shape | None:
        """The shape of a tensor without gaps whose dimensions have these strides.
        None if it has none. The extent of the first slot may be known at the call, and is all of it
        then."""
        first = self.extent(slots[0])
        rows = extent_of(slots[0] or ()) if isinstance(first, Symbol) else None
        rows = int(root.numel()) // strides[0] if rows is None else rows
        if not equal(root.numel(), rows * strides[0]):
            return None
        inner = (outer // inner for outer, inner in pairwise(strides))
        return (first if isinstance(first, Symbol) else int(rows), *inner)

    def _part_of_whole(
        self, root: fx.Node, memory: Slots, shape: Shape, ranges: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Ranges of the dimensions of a tensor of this shape.
        With an extent of 1 for each slot that is None."""
        extents, given = iter(shape), iter(ranges)
        whole = tuple(1 if s is None else next(extents) for s in memory)
        key = (root, "whole", whole)
        if key not in self._inputs:
            dtype = self._type_of(fake(root))
            self._inputs[key] = self.g.new_input(whole, dtype, constant=root in self.constants)
            self.operands.append(Given(root, (), dtype, whole=whole))
        t = self._inputs[key]
        for d, s in enumerate(memory):
            start, stop = (0, 1) if s is None else next(given)
            if (start, stop) != (0, extent(whole[d])):
                t = self.g.slice(t, d, start, stop)
        return t

    def _strides(self, node: fx.Node, slots: Slots) -> list[int] | None:
        """The stride of each slot of a view.
        None where elements of one are not equally far apart, strides are no multiples of each
        other, or neighbours are no neighbours in memory."""
        t, value = fake(node), self.value(node)
        places: dict[Part, Any] = {}
        for d, dims in enumerate(value.dims):
            stride: Any = t.stride()[d]
            for p in reversed(leaves(dims)):
                places[p], stride = stride, stride * extent_of((p,))
        found = [1]
        for slot in reversed(slots):
            own = [places[p] for p in slot or ()]
            pairs = pairwise(slot or ())
            within = (equal(places[p], places[q] * extent_of((q,))) for p, q in pairs)
            stride = own[-1]
            if not all(within) or not isinstance(stride, int) or stride < 1 or stride % found[-1]:
                return None
            found.append(stride)
        return found[:0:-1] if found[1:2] == [1] else None

    def _input_of(self, node: fx.Node, memory: Slots) -> Tensor:
        """An input with slots in the order of memory."""
        key = (node, "in memory", memory)
        if key not in self._inputs:
            dtype, shape = self._type_of(fake(node)), self._shape_of(memory)
            x = self.g.new_input(shape, dtype, constant=node in self.constants)
            self.operands.append(Given(node, memory, dtype))
            self._inputs[key] = x
        return self._inputs[key]

    def _shape_of(self, slots: Slots) -> tuple[Dim, ...]:
        """The shape of an input.
        Raises Mismatch for a row of dynamic extent, or another stride that must be a number."""
        shape = tuple(self.extent(s) for s in slots)
        inner = [n for n, d in enumerate(shape) if n and isinstance(d, Symbol)]
        row = not self.open_rows and inner[-1:] == [len(shape) - 1]
        if inner and (self.strided or row):
            raise Mismatch(
                f"reads a tensor {show_shape(shape)} whose extent {inner[0]} is dynamic; of what "
                "a kernel reads only the outermost extent may be, and without products any but the "
                "last: leave others out of dynamic_shapes, or let batches be rows of one dimension"
            )
        return shape

    def extents(self, graph: KernelGraph) -> tuple[Extent, ...]:
        """The extents of PyTorch behind the symbols of a graph, in the order of its inputs."""
        made = {s.name: group.extent for group, s in self._symbols.items()}
        shapes = (graph.nodes[i].shape for i in graph.inputs)
        names = dict.fromkeys(d.name for s in shapes for d in s if isinstance(d, Symbol))
        return tuple(made[n] for n in names)

    def lengths(self, node: fx.Node, slots: Slots, offset: int, most: int) -> Tensor:
        """An int32 input with these slots, ``node + offset`` at the call.
        More than ``most`` is equivalent to ``most``."""
        key = (node, slots, offset, most)
        if key not in self._inputs:
            self._inputs[key] = self.g.new_input(self._shape_of(slots), torch.int32)
            self.operands.append(Given(node, slots, torch.int32, None, (offset, most)))
        return self._inputs[key]

    def filled(self, slots: Slots, number: int) -> Tensor:
        """An int32 input with these slots, full of a number."""
        key = ("full", slots, number)
        if key not in self._inputs:
            self._inputs[key] = self.g.new_input(self._shape_of(slots), torch.int32)
            beside = self.operands[0].node
            self.operands.append(Given(beside, slots, torch.int32, fill=number))
        return self._inputs[key]

    def index(
        self, node: fx.Node, operand: Any, limits: Within | None, of_rows: bool = False
    ) -> tuple[Tensor, Slots]:
        """An input of integers within these `limits`, or of any, as they are, with its slots.
        Raises Unsupported if they are made from others in the region.

        ``of_rows``: with a last dimension of extent 1, as labels of rows have it.
        """
        source = self.of(operand).source
        if source is None:
            raise Unsupported(node, "takes an index that is computed beside it")
        t = fake(source)
        slots, read = (self.groups(self.value(n).present()) for n in (source, operand))
        order = [d for d in copied_order(t) if not equal(t.shape[d], 1)]
        if order != sorted(order) or set(slots) != set(read):
            raise Unsupported(node, "takes an index that is stored in another order")
        slots = (*(slots or (None,)), None) if of_rows else slots or (None,)
        if limits is not None:
            self.limits[source] = limits.both(self.limits.get(source, limits))
        key = (source, "index", slots)
        if key not in self._inputs:
            self._inputs[key] = self.g.new_input(self._shape_of(slots), t.dtype)
            self.operands.append(Given(source, slots, t.dtype))
        return self._inputs[key], slots

    def read(self, node: fx.Node, operand: Any, slots: Slots) -> Tensor:
        """An input with these slots, as it lies in memory. Raises Unsupported for anything else."""
        x = self.tensor(node, operand, slots, rank=len(slots))
        if x.node.operator != INPUT:
            raise Unsupported(node, "takes rows of what is computed, or stored in another order")
        return x

    def converted(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """A value in an element type; converted once, so that all its readers share it."""
        if t.dtype.torch == dtype:
            return t
        key = (t.index, "converted", dtype)
        if key not in self._inputs:
            self._inputs[key] = self.g.convert(t, dtype)
        return self._inputs[key]

    def _type_of(self, t: torch.Tensor) -> torch.dtype:
        """The element type in which a kernel reads a tensor.
        That of a condition does not change the type of the numbers that it meets."""
        if t.dtype in INTEGERS:
            return torch.float32
        if t.dtype not in CONDITIONS:
            return t.dtype
        others = {n.meta["val"].dtype for n in self.shapes.inputs}
        return torch.bfloat16 if torch.bfloat16 in others else torch.float16

    def part(self, t: Tensor, place: int, start: int, stop: int) -> Tensor:
        """A range of a value along one dimension.

        before: columns of ``x W^T``; after: the product with these rows of W, read as they are
        stored.
        """
        made: dict[tuple[int, int], Tensor] = {}
        for i, at in ordered([(t.index, place)], self._parts_of):
            cut = {j: made[j, d] for j, d in self._parts_of((i, at))}
            made[i, at] = self._part(self.g.tensor(i), at, start, stop, cut)
        return made[t.index, place]

    def _parts_of(self, cut: tuple[int, int]) -> list[tuple[int, int]]:
        """The operands that must be cut to a range where a value is cut along one dimension.
        With the dimension of each; values by their index."""
        t, place = self.g.tensor(cut[0]), cut[1]
        node, args = t.node, [self.g.tensor(i) for i in t.node.inputs]
        if node.facets.permutes:
            return [(args[0].index, node.attributes["dims"][place])]
        if node.facets.contracts and place == len(t.shape) - 1:
            return [(args[1].index, len(args[1].shape) - 1)]
        if node.facets.elementwise:
            back = place - len(t.shape)
            long = [a for a in args if len(a.shape) >= -back and a.shape[back] != 1]
            return [(a.index, len(a.shape) + back) for a in long]
        return []

    def _part(self, t: Tensor, place: int, start: int, stop: int, cut: dict[int, Tensor]) -> Tensor:
        """A range of a value, from ranges of its operands by their index."""
        node = t.node
        if node.operator == INPUT:
            return self._part_of_input(t, place, start, stop)
        args = [self.g.tensor(i) for i in node.inputs]
        if node.facets.contracts and place == len(t.shape) - 1:
            return self.g.matmul(args[0], cut[args[1].index])
        if node.facets.permutes or node.facets.elementwise:
            args = [cut.get(a.index, a) for a in args]
            return self.g.apply(node.operator, *args, **dict(node.attributes))
        return self.g.slice(t, place, start, stop)

    def _part_of_input(self, t: Tensor, place: int, start: int, stop: int) -> Tensor:
        given = self.operands[self.g.inputs.index(t.index)]
        if place != 0 or given.part is not None or isinstance(t.shape[0], Symbol):
            return self.g.slice(t, place, start, stop)
        key = (t.index, start, stop)
        if key not in self._inputs:
            shape = (stop - start, *t.shape[1:])
            x = self.g.new_input(shape, t.dtype, constant=t.node.constant)
            self.operands.append(replace(given, part=(start, stop)))
            self._inputs[key] = x
        return self._inputs[key]

    def set(self, node: fx.Node, built: Any) -> None:
        """Set the built value of a node."""
        self.built[node] = built


def _digits(number: int, weights: Sequence[int]) -> list[int]:
    """A number as a sum of multiples of weights, largest first.

    >>> _digits(200, (192, 32, 1))
    [1, 0, 8]
    """
    found: list[int] = []
    for weight in weights:
        digit, number = divmod(number, weight)
        found.append(digit)
    return found


def _along_a_dimension(t: Tensor) -> bool:
    """True for operators in front of whose last dimensions any others may stand.
    A reduction along a dimension, a norm, a part, or elements that change places along the last."""
    facets = t.node.facets
    composed = facets.composite and not (facets.integers or facets.one_type)
    return bool(facets.reduces) or facets.turns or facets.cuts or composed


def _in_memory(slots: Slots, stored: Sequence[Dims]) -> Slots:
    """Slots in the order of memory; an extent of 1 stays behind the group that it follows."""
    behind: dict[Slot, int] = {}
    last: Slot = None
    for s in slots:
        if s is None:
            behind[last] = behind.get(last, 0) + 1
        else:
            last = s
    lead = next((i for i, s in enumerate(slots) if s is not None), len(slots))
    found: list[Slot] = [None] * lead
    for g in stored:
        found += [g, *(None,) * behind.get(g, 0)]
    return tuple(found)


def of_rank(slots: Slots, t: Tensor) -> Slots:
    """Slots of all dimensions of a tensor that `Builder.tensor` gave.
    Extents of 1 are in front of it or missing there."""
    missing = len(t.shape) - len(slots)
    return (None,) * missing + slots if missing >= 0 else slots[-missing:]


def _stripped(slots: Slots, rank: int = 0) -> Slots:
    first = next((i for i, s in enumerate(slots) if s is not None), len(slots))
    return slots[max(0, min(first, len(slots) - rank)) :]


def _permutation(have: Slots, want: Slots) -> list[int] | None:
    """For each slot of ``want`` its place in ``have``; None if they are not the same ones.
    Leading extents of 1 may be missing in ``want``."""
    missing = len(have) - len(want)
    if missing < 0:
        return None
    want = ((None,) * missing) + want
    rest = list(range(len(have)))
    order: list[int] = []
    for s in want:
        found = next((i for i in rest if have[i] == s), None)
        if found is None:
            return None
        rest.remove(found)
        order.append(found)
    return order


def explain(node: fx.Node, error: Exception) -> Unsupported:
    """The reason for an exception that was raised while a node was read."""
    if isinstance(error, Unsupported):
        return error
    if isinstance(error, Mismatch | CutesuperError):
        return Unsupported(node, str(error))
    raise error
