"""Operators that compute nothing: views, casts, constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from cutesuper.ir.graph import Tensor
from cutesuper.torch.aten.factored_dims import Dims, dims_of, equal, leaves, regroup, unify
from cutesuper.torch.aten.graph_builder import (
    CONDITIONS,
    FLOATS,
    Builder,
    Built,
    Shapes,
    Slots,
    Unsupported,
    Value,
    correspondence,
    fake,
    memory_order,
    of_rank,
    translated,
)
from cutesuper.torch.aten.table import (
    Arguments,
    Entry,
    arguments_of,
    enter,
    entry_of,
    integers,
    number,
)

_UNSQUEEZE, _NEG = torch.ops.aten.unsqueeze.default, torch.ops.aten.neg.default


class _Free(Entry):
    def free(self, a: Arguments) -> bool:
        return True

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        return b.of(_operand(a))


def _operand(a: Arguments) -> Any:
    return a["self"] if "self" in a else next(iter(a.values()))


@enter(
    "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
    "aten.lift_fresh_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device",
    "aten._to_copy.default", "aten.type_as.default", "aten.positive.default",
    "prims.convert_element_type.default",
)  # fmt: skip
class Same(_Free):
    """A cast, which keeps the values.
    All is computed in float32, whatever the type between operators."""

    changes = True

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        before, after = fake(_operand(a)), fake(node)
        known = (*FLOATS, *CONDITIONS) if before.dtype in CONDITIONS else FLOATS
        if before.dtype not in (*FLOATS, *CONDITIONS) or after.dtype not in known:
            raise Unsupported(node, f"converts {before.dtype} to {after.dtype}")
        if before.device != after.device:
            raise Unsupported(node, f"copies from {before.device} to {after.device}")
        return s.of(_operand(a))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        return replace(b.of(_operand(a)), condition=fake(node).dtype in CONDITIONS)


@enter(
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default",
    "aten.view_copy.default", "aten.flatten.using_ints", "aten.unflatten.int",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default",
    "aten.view_as.default", "aten.reshape_as.default",
)  # fmt: skip
class View(_Free):
    """Another shape of the same elements in the same order."""

    changes = True

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x = s.of(_operand(a))
        return Value(regroup(x.dims, list(fake(node).shape)), x.absent)


@enter(
    "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.numpy_T.default",
    "aten.mT.default", "aten.movedim.intlist", "aten.movedim.int", "aten.swapaxes.default",
    "aten.swapdims.default",
)  # fmt: skip
class Permute(_Free):
    """Dimensions in another order, as given by strides."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x = s.of(_operand(a))
        order = self._order(node, a, len(x.dims))
        return Value(tuple(x.dims[d] for d in order), x.absent)

    def _order(self, node: fx.Node, a: Arguments, rank: int) -> list[int]:
        if rank == 0:  # a number, whose dimension may be called 0 or -1
            return []
        if "dims" in a:
            return [d % rank for d in integers(node, a["dims"])]
        if "source" in a:
            return _moved(rank, integers(node, a["source"]), integers(node, a["destination"]))
        order = list(range(rank))
        if rank > 1:
            i = a.get("dim0", a.get("axis0", -2))
            j = a.get("dim1", a.get("axis1", -1))
            order[i], order[j] = order[j], order[i]
        return order


def _moved(rank: int, source: list[int], destination: list[int]) -> list[int]:
    places = {d % rank: s % rank for s, d in zip(source, destination, strict=True)}
    rest = iter(d for d in range(rank) if d not in places.values())
    return [places[d] if d in places else next(rest) for d in range(rank)]


@enter("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
class Expand(_Free):
    """Elements that repeat: new factors, which the kernel graph does not have."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x, extents = s.of(_operand(a)), list(fake(node).shape)
        dims = [()] * (len(extents) - len(x.dims)) + list(x.dims)
        new = [
            dims_of(n) if not leaves(d) and not equal(n, 1) else ()
            for d, n in zip(dims, extents, strict=True)
        ]
        full = tuple(d or n for d, n in zip(dims, new, strict=True))
        return Value(full, (*x.absent, *(f for d in new for f in d)))


@enter("aten.repeat.default", "aten.repeat_interleave.self_int", "aten.tile.default")
class Repeat(_Free):
    """Elements that repeat, next to each other or row after row."""

    changes = True

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        x = s.of(_operand(a))
        rank = len(fake(node).shape)
        if "dims" in a or isinstance(a["repeats"], list | tuple):
            counts = integers(node, a.get("dims", a.get("repeats")))
            counts = [1] * (rank - len(counts)) + counts
        elif a["dim"] is not None:
            counts = [1] * rank
            counts[a["dim"]] = integers(node, a["repeats"])[0]
        else:
            raise Unsupported(node, "repeats all elements as one row")
        if not all(counts):
            raise Unsupported(node, "is empty")
        dims = [()] * (rank - len(x.dims)) + list(x.dims)
        new = [dims_of(n) for n in counts]
        inside = "interleave" in str(node.target)
        full = tuple((*d, *n) if inside else (*n, *d) for d, n in zip(dims, new, strict=True))
        return Value(full, (*x.absent, *(p for n in new for p in n)))


@enter(
    "aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default",
    "aten.zeros.default", "aten.ones.default", "aten.zeros_like.default", "aten.ones_like.default",
    "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default",
)  # fmt: skip
class Filled(_Free):
    """A tensor of one number."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        t = fake(node)
        # a number of float64 takes the type of what it meets
        if t.dtype not in FLOATS and (t.dim() or t.dtype != torch.float64):
            raise Unsupported(node, f"makes a tensor of {t.dtype}")
        dims = tuple(dims_of(n) for n in t.shape)
        return Value(dims, tuple(f for d in dims for f in d))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        return Built(number(node, self.filled(node, a)))

    def filled(self, node: fx.Node, a: Arguments) -> Any:
        """The number, which may be known only at the call."""
        given = a.get("fill_value", a.get("s"))
        if given is None:
            given = 1.0 if "ones" in str(node.target) else 0.0
        return given


@enter("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
class Dropout(_Free):
    """Dropout, which does nothing outside of training."""

    def free(self, a: Arguments) -> bool:
        return not (a["train"] and a["p"])

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if not self.free(a):
            raise Unsupported(node, "drops elements at random; call .eval() of the module")
        return s.of(a["input"])

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        return b.of(a["input"])


@enter("getitem")
class Item(_Free):
    """One of several results."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        values = s.values[a["a0"]]
        if not isinstance(values, tuple) or not isinstance(values[a["a1"]], Value):
            raise Unsupported(node, "takes a result that kernels do not compute")
        return values[a["a1"]]

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        built = b.built[a["a0"]][a["a1"]]
        if built is None:
            raise Unsupported(node, "takes a result that kernels do not compute")
        return built


class _Pieces(_Free):
    """Parts of a dimension, each a range of it."""

    changes = True

    def ranges(self, node: fx.Node, a: Arguments, extent: int) -> list[tuple[int, int]]:
        raise NotImplementedError

    def dimension(self, node: fx.Node, a: Arguments) -> tuple[int, int]:
        """The dimension of which parts are taken, and its extent. Raises Unsupported."""
        t = fake(_operand(a))
        d = a.get("dim", 0) % t.dim()
        if not isinstance(t.shape[d], int):
            raise Unsupported(node, "takes a part of an extent that is known only at the call")
        return d, t.shape[d]

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        d, extent = self.dimension(node, a)
        x = s.of(_operand(a))
        s.whole(x.dims[d])
        parts = []
        for start, stop in self.ranges(node, a, extent):
            own = dims_of(stop - start)
            s.whole(own)
            dims = (*x.dims[:d], *self.kept(own), *x.dims[d + 1 :])
            parts.append(Value(dims, x.absent))
        return self._result(parts)

    def kept(self, own: Dims) -> tuple[Dims, ...]:
        """The dimension of a part, if it stays."""
        return (own,)

    def _result(self, parts: list[Any]) -> Any:
        return tuple(parts)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        d, extent = self.dimension(node, a)
        x = b.value(_operand(a))
        group = b.one(node, x.dims[d])
        values = b.shapes.values[node]
        values = values if isinstance(values, tuple) else (values,)
        own = b.of(_operand(a))
        if own.source is not None:
            own = self._whole(b, node, own)
        if not isinstance(own.tensor, Tensor) or group not in own.slots:
            return self._result([own for _ in values])
        place = own.slots.index(group)
        parts = []
        for (start, stop), v in zip(self.ranges(node, a, extent), values, strict=True):
            t = b.part(own.tensor, place, start, stop)
            slot = b.one(node, v.dims[d]) if self.kept(()) else None
            slots = (*own.slots[:place], slot, *own.slots[place + 1 :])
            parts.append(Built(t, slots, None, own.condition))
        return self._result(parts)

    def _whole(self, b: Builder, node: fx.Node, own: Built) -> Built:
        """The input of which parts are taken. Raises Unsupported if it would be copied first."""
        source = own.source
        if source is None or memory_order(fake(source)) is None:
            raise Unsupported(node, "takes a part of a tensor that has gaps")
        slots = b.natural(b.value(source))
        return Built(b.tensor(node, source, slots), slots, None, own.condition)


@enter(
    "aten.split.Tensor",
    "aten.split.default",
    "aten.split_with_sizes.default",
    "aten.split.sizes",
    "aten.chunk.default",
)
class Split(_Pieces):
    """Consecutive parts."""

    def ranges(self, node: fx.Node, a: Arguments, extent: int) -> list[tuple[int, int]]:
        sizes = a.get("split_sizes", a.get("split_size"))
        if "chunks" in a:
            sizes = -(-extent // number(node, a["chunks"]).__trunc__())
        if isinstance(sizes, int):
            sizes = [min(sizes, extent - i) for i in range(0, extent, sizes)]
        sizes = integers(node, sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [(start, start + n) for start, n in zip(starts, sizes, strict=True)]


@enter("aten.slice.Tensor", "aten.narrow.default")
class Slice(_Pieces):
    """One range of a dimension."""

    def ranges(self, node: fx.Node, a: Arguments, extent: int) -> list[tuple[int, int]]:
        if a.get("step", 1) != 1:
            raise Unsupported(node, "takes every n-th element")
        start = a.get("start") or 0
        stop = start + a["length"] if "length" in a else a.get("end")
        stop = extent if stop is None else stop
        start, stop = (integers(node, n)[0] for n in (start, stop))
        start, stop = (n + extent if n < 0 else n for n in (start, stop))
        return [(max(0, start), min(stop, extent))]

    def _result(self, parts: list[Any]) -> Any:
        return parts[0]


@enter("aten.select.int")
class Select(Slice):
    """One range of one element, without its dimension."""

    def kept(self, own: Dims) -> tuple[Dims, ...]:
        return ()

    def ranges(self, node: fx.Node, a: Arguments, extent: int) -> list[tuple[int, int]]:
        [i] = integers(node, a["index"])
        i = i + extent if i < 0 else i
        return [(i, i + 1)]


@enter("aten.unbind.int")
class Unbind(Select):
    """All ranges of one element."""

    def ranges(self, node: fx.Node, a: Arguments, extent: int) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(extent)]

    def _result(self, parts: list[Any]) -> Any:
        return tuple(parts)


def turned(node: fx.Node) -> fx.Node | None:
    """The operand x of a concatenation that turns, as rotary positions have it.
    ``[-b, a]`` of the halves ``[a, b]`` of its last dimension, or of the elements of each pair that
    lies there, with a dimension of its own. None for any other node."""
    if node.target is not torch.ops.aten.cat.default or len(node.args[0]) != 2:  # type: ignore[arg-type]
        return None
    negative = negated(node)
    if negative is None or only_reader(negative) is not node:  # it is computed in any case
        return None
    halves = _turned_halves(node, negative)
    return halves if halves is not None else _turned_pairs(node, negative)


def negated(node: fx.Node) -> fx.Node | None:
    """The node that negates the first part of a concatenation; None if it is not negated."""
    first: Any = node.args[0][0]  # type: ignore[index]
    first = first.args[0] if first.target is _UNSQUEEZE else first
    return first if first.target is _NEG else None


def unneeded(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a concatenation which turns does not need: the negated part, and its view."""
    first: Any = node.args[0][0]  # type: ignore[index]
    yield first
    if first.target is _UNSQUEEZE:
        yield first.args[0]


def only_reader(node: fx.Node) -> fx.Node | None:
    """The only reader of a node, or of a view with one more dimension that alone reads it."""
    [user, *others] = node.users or [None]
    if user is not None and user.target is _UNSQUEEZE and not others:
        [user, *others] = user.users or [None]
    return None if others else user


def _turned_halves(node: fx.Node, negative: fx.Node) -> fx.Node | None:
    a, rank = arguments_of(node), fake(node).dim()
    second, first = half_of(negative.args[0]), half_of(a["tensors"][1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    return first[0] if a["dim"] % rank == rank - 1 and (first[1], second[1]) == (0, 1) else None


def half_of(node: Any) -> tuple[fx.Node, int] | None:
    """Rows of even length, and which half of them a node is; None for any other node."""
    found = range_of(node)
    if found is None:
        return None
    x, dim, *kept = found
    *others, length = fake(x).shape
    if dim != len(others) or not isinstance(length, int) or length % 2:
        return None
    halves = [0, length // 2], [length // 2, length]
    return (x, halves.index(kept)) if kept in halves else None


def _turned_pairs(node: fx.Node, negative: fx.Node) -> fx.Node | None:
    """before: ``stack((-x[..., 1::2], x[..., ::2]), -1)``; after: x."""
    a, rank = arguments_of(node), fake(node).dim()
    places = [a["dim"], *(p.args[1] for p in a["tensors"] if p.target is _UNSQUEEZE)]
    if len(places) != 3 or any(p % rank != rank - 1 for p in places):
        return None
    odd, even = _every_second(negative.args[0]), _every_second(a["tensors"][1].args[0])
    if odd is None or even is None or odd[0] is not even[0] or (odd[1], even[1]) != (1, 0):
        return None
    return odd[0]


def _every_second(node: Any) -> tuple[fx.Node, int] | None:
    """A tensor, and the place of the first element of its last dimension of every second one.
    None for another node than a view of these."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return None
    a = arguments_of(node)
    shape, start, end = fake(a["self"]).shape, a["start"] or 0, a["end"]
    if a["step"] != 2 or a["dim"] % len(shape) != len(shape) - 1:
        return None
    n = shape[-1]
    if not isinstance(n, int) or n % 2 or (end is not None and not n <= end) or start not in (0, 1):
        return None
    return a["self"], start


def is_negated(node: fx.Node) -> bool:
    """True for a node that only a concatenation reads which turns, and does not need it."""
    user = only_reader(node)
    return user is not None and turned(user) is not None and negated(user) is node


def range_of(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """A tensor, a dimension, and the range of it that a node takes; None for another node."""
    place, source = 0, node
    if getattr(node, "target", None) is getitem:
        source, place = node.args
    entry = entry_of(source) if isinstance(source, fx.Node) else None
    if not isinstance(entry, Slice | Split) or isinstance(entry, Select):
        return None
    a = arguments_of(source)
    try:
        dim, extent = entry.dimension(source, a)
        return (_operand(a), dim, *entry.ranges(source, a, extent)[place])
    except Unsupported:
        return None


@enter("aten.cat.default")
class Cat(Entry):
    """Tensors that are concatenated; a computation on the result is one on each part.
    Halves that change places are one operator on the whole, and so are pairs."""

    def reads(self, node: fx.Node, a: Arguments) -> list[fx.Node]:
        whole = turned(node)
        return super().reads(node, a) if whole is None else [whole]

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        if (whole := turned(node)) is not None:
            x = s.of(whole)
            s.whole(x.dims[-1])
            if fake(node).dim() == len(x.dims):
                return x
            pairs = regroup([x.dims[-1]], list(fake(node).shape[-2:]))
            return Value((*x.dims[:-1], *pairs), x.absent)
        values = [s.of(t) for t in a["tensors"]]
        d = a.get("dim", 0) % len(values[0].dims)
        if any(len(v.dims) != len(values[0].dims) or v.absent for v in values):
            raise Unsupported(node, "puts together tensors that repeat, or of different ranks")
        dims = list(values[0].dims)
        for v in values[1:]:
            for i in range(len(dims)):
                if i != d:
                    unify(dims[i], v.dims[i])
        for v in values:
            s.whole(v.dims[d])
        dims[d] = dims_of(fake(node).shape[d])
        s.whole(dims[d])
        return Value(tuple(dims))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        if (whole := turned(node)) is not None:
            return self._turned(b, node, whole)
        tensors, value = a["tensors"], b.value(node)
        d = a.get("dim", 0) % len(value.dims)
        slots = b.natural(value)
        place = slots.index(b.one(node, value.dims[d]))
        rest = Value((*value.dims[:d], (), *value.dims[d + 1 :]))
        own: list[tuple[fx.Node, Slots]] = []
        for t in tensors:
            dims = b.value(t).dims
            others = Value((*dims[:d], (), *dims[d + 1 :]))
            mine = translated(slots, correspondence(rest, others))
            own.append((t, (*mine[:place], b.one(node, dims[d]), *mine[place + 1 :])))
        # a computed tensor may have extents of 1 in front, which its slots do not count
        rank = max(len(b.tensor(node, t, mine).shape) for t, mine in own)
        front: Slots = (None,) * (rank - len(slots))
        parts = [b.tensor(node, t, (*front, *mine), rank) for t, mine in own]
        return Built(b.g.concat(parts, place - len(slots)), (*front, *slots))

    def _turned(self, b: Builder, node: fx.Node, whole: fx.Node) -> Built:
        slots = b.natural(b.value(whole))
        if slots[-1] is None or slots[-1] != b.one(node, b.value(whole).dims[-1]):
            raise Unsupported(node, "turns parts of a dimension along which elements repeat")
        t = b.tensor(node, whole, slots)
        halves = fake(node).dim() == fake(whole).dim()
        y = b.g.rotate_half(t) if halves else b.g.rotate_pairs(t)
        return Built(y, of_rank(slots, t))
