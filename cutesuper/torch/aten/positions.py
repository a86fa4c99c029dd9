"""Conditions on positions, as masks are made of them.

`marks_of` reads the nodes that compute integers, conditions and masks, without running them:

* integers are ``node + offset``, plus the place along one dimension (``torch.arange``);
* differences of two such (``n[:, None] - n``), and their absolute values, are compared with others;
* a condition on keys j is a conjunction of limits ``j < bound`` and ``j >= bound``; the bound may
  count queries, ``node + offset + i``. Limits that hide no key are left out. Whatever else is true
  or false, as padding is, is a part of the conjunction as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.factored_dims import equal, equal_shapes
from cutesuper.torch.aten.graph_builder import FLOATS, fake
from cutesuper.torch.aten.pointwise import Where
from cutesuper.torch.aten.table import Arguments, arguments_of, entry_of, of_a_node, readers
from cutesuper.torch.aten.views import Expand, Filled, Same, Slice, View

#: what PyTorch makes of false in a mask of bool for attention of cuDNN
CUDNN = -65536.0
#: types of positions and lengths; adding 1 to narrower ones would overflow
_COUNTS = (torch.int32, torch.int64)
_ARANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step",
            "prims.iota.default")  # fmt: skip
_SUMS = {"aten.add.Tensor": 1, "aten.add.Scalar": 1, "aten.sub.Tensor": -1, "aten.sub.Scalar": -1}
_NEGATIVE, _ABSOLUTE = ("aten.neg.default",), ("aten.abs.default",)
#: operators that keep the elements up to a diagonal, and those from one on
_TRIANGLES = {"aten.tril.default": True, "aten.triu.default": False}
_PADS = ("aten.constant_pad_nd.default", "aten.pad.default")
_NOT = ("aten.logical_not.default", "aten.bitwise_not.default")
_NEGATED = {"visible": "hidden", "hidden": "visible"}
#: conjunctions, of conditions that hold where keys are visible or where they are hidden
_JOINED = {
    **dict.fromkeys(
        ("aten.bitwise_and.Tensor", "aten.__and__.Tensor", "aten.logical_and.default"), "visible"),
    **dict.fromkeys(
        ("aten.bitwise_or.Tensor", "aten.__or__.Tensor", "aten.logical_or.default"), "hidden"),
}  # fmt: skip
#: comparisons ``j ? bound``: whether the limit is an upper one, and the offset added to the bound
_COMPARED = {"lt": (True, 0), "le": (True, 1), "ge": (False, 0), "gt": (False, 1)}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class Integers:
    """Integers ``node + offset``, plus the place along the dimension named "count".

    Attributes:
        axes: for each dimension "count", "sequence" for that of the node, or "" for elements that
            are all the same.
        node: int32 or int64, with at most one extent other than 1; None for 0.
        offset: a number.
        begun: whether a place was added to the node, be it the only one: then the node is the
            number of positions before the first, and not below 0.
    """

    axes: tuple[str, ...]
    node: fx.Node | None
    offset: int
    begun: bool = False


@dataclass(frozen=True)
class Difference:
    """A difference of integers, or its absolute value."""

    left: Integers
    right: Integers
    absolute: bool = False


@dataclass(frozen=True)
class Limit:
    """A limit of the keys, ``j < bound`` or ``j >= bound``.

    Attributes:
        upper: which of these.
        node, offset: of the bound ``node + offset``.
        counts: whether the number of the query is added to the bound.
        begun: see `Integers`.
        known: the bound of the first query if it is a number.
    """

    upper: bool
    node: fx.Node | None
    offset: int
    counts: bool
    begun: bool
    known: int | None


@dataclass(frozen=True)
class Given:
    """A tensor of conditions that are made of no positions.

    Attributes:
        node: of bool.
        visible: whether it is true where a key is visible, or where it is hidden.
    """

    node: fx.Node
    visible: bool


@dataclass(frozen=True)
class Condition:
    """A condition on keys, or a mask made of it.

    Attributes:
        kind: "visible" and "hidden", true where a key is; "added", 0 where it is visible and -inf
            elsewhere; "lowest", the same with the lowest number of the type, or that of cuDNN, in
            place of -inf.
        axes: for each dimension "key", "query", "sequence", or "".
        limits, given: a key is visible where all of them hold.
    """

    kind: str
    axes: tuple[str, ...]
    limits: tuple[Limit, ...] = ()
    given: tuple[Given, ...] = ()


Marks = Integers | Difference | Condition


def marks_of(node: Any) -> Marks | None:
    """The relation of a tensor's elements to positions; None if nothing is known."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return _found(node)


@of_a_node
def _found(node: fx.Node) -> Marks | None:
    found = _computed(node) if node.op == "call_function" else None
    return found or _given(node)


def _computed(node: fx.Node) -> Marks | None:
    a, entry, name = arguments_of(node), entry_of(node), str(node.target)
    if name in _ARANGES:
        return _arange(node, a)
    if name in _SUMS and fake(node).dtype in _COUNTS:
        return _sum(a, _SUMS[name])
    if name in _NEGATIVE and (x := _difference(a["self"])) is not None:
        return _of_difference(x.right, x.left)
    if name in _ABSOLUTE and (x := _difference(a["self"])) is not None:
        return replace(x, absolute=True)
    if name in _NOT:
        x = marks_of(a["self"])
        if not isinstance(x, Condition) or x.kind not in _NEGATED:
            return None
        return replace(x, kind=_NEGATED[x.kind])
    if name in _JOINED:
        return _joined(_JOINED[name], marks_of(a["self"]), marks_of(a["other"]))
    if name[5:7] in _COMPARED and name[7:] in (".Tensor", ".Scalar"):
        return _compared(name[5:7], a["self"], a["other"])
    if name in _TRIANGLES:
        return _triangle(node, a, _TRIANGLES[name])
    if isinstance(entry, Where):
        return _chosen(node, *entry.operands(a))
    if isinstance(entry, Filled) and fake(node).dtype is torch.bool:
        return Condition("visible" if _number(node) else "hidden", ("",) * fake(node).dim())
    if isinstance(entry, Filled) and fake(node).dtype in _COUNTS:
        filled = _number(node)
        same = ("",) * fake(node).dim()
        return Integers(same, None, filled) if type(filled) is int else None
    if isinstance(entry, Slice) and (inner := _aligned(node, a)) is not None:
        return marks_of(inner)
    if isinstance(entry, View | Expand | Same | Slice):
        return _viewed(node, next(iter(a.values())), entry)
    return None


def _aligned(node: fx.Node, a: Arguments) -> fx.Node | None:
    """The mask of which a node is a copy whose rows begin at multiples of 16 bytes.
    Padded behind and cut again, as PyTorch's memory-efficient attention has them."""
    source = a["self"]
    if str(source.target) not in _PADS or a.get("start"):
        return None
    inner, pads = arguments_of(source)["self"], arguments_of(source)["pad"]
    before, after = fake(inner).shape, fake(node).shape
    return inner if equal_shapes(before, after) and not any(pads[::2]) else None


def _given(node: fx.Node) -> Marks | None:
    """Conditions that are as they are, and integers, in at most one dimension."""
    t = fake(node)
    if t.dtype is torch.bool:
        return Condition("visible", ("",) * t.dim(), (), (Given(node, True),))
    axes = tuple("" if equal(n, 1) else "sequence" for n in t.shape)
    if t.dtype not in _COUNTS or axes.count("sequence") > 1:
        return None
    return Integers(axes, _whole(node), 0)


def _whole(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, with all elements in the same order."""
    while isinstance(entry_of(node), View | Slice):
        under = node.all_input_nodes[0]
        if not equal(fake(under).numel(), fake(node).numel()):
            break
        node = under
    return node


def _arange(node: fx.Node, a: Arguments) -> Integers | None:
    start, t = a.get("start", 0), fake(node)
    if type(start) is not int or a.get("step", 1) != 1 or t.dtype not in _COUNTS:
        return None
    if type(t.shape[0]) is not int:
        return None
    return Integers(("" if t.shape[0] == 1 else "count",), None, start, True)


def _sum(a: Arguments, sign: int) -> Integers | Difference | None:
    """A sum or a difference of integers, each of a node, a place and numbers, each at most once."""
    x, y = _difference(a["self"]), _difference(a["other"])
    if x is None or y is None or a.get("alpha", 1) != 1:
        return None
    y = y if sign > 0 else Difference(y.right, y.left)
    left, right = _added(x.left, y.left), _added(x.right, y.right)
    return None if left is None or right is None else _of_difference(left, right)


def _of_difference(left: Integers, right: Integers) -> Integers | Difference | None:
    """A difference; integers themselves if a number is subtracted.
    None if no places are counted: the result is integers as they are."""
    if right.node is None and "count" not in right.axes:
        axes = _padded(left.axes, max(len(left.axes), len(right.axes)))
        return replace(left, axes=axes, offset=left.offset - right.offset)
    return Difference(left, right) if "count" in (*left.axes, *right.axes) else None


def _added(x: Integers, y: Integers) -> Integers | None:
    axes = _merged(x.axes, y.axes)
    if axes is None or axes.count("count") > 1 or (x.node is not None and y.node is not None):
        return None
    node = y.node if x.node is None else x.node
    return Integers(axes, node, x.offset + y.offset, x.begun or y.begun)


def _difference(value: Any) -> Difference | None:
    """Integers as a difference; None for absolute values, and for what is no integers."""
    found = Integers((), None, value) if type(value) is int else marks_of(value)
    if not isinstance(found, Integers | Difference):
        return None
    x = _as_difference(found)
    return None if x.absolute else x


def _as_difference(x: Integers | Difference) -> Difference:
    return x if isinstance(x, Difference) else Difference(x, Integers((), None, 0))


def _merged(x: tuple[str, ...], y: tuple[str, ...]) -> tuple[str, ...] | None:
    """The axes of an element-wise result; None if two things vary along one dimension."""
    rank = max(len(x), len(y))
    pairs = zip(_padded(x, rank), _padded(y, rank), strict=True)
    names = [{a, b} - {""} for a, b in pairs]
    if any(len(n) > 1 for n in names):
        return None
    return tuple("".join(n) for n in names)


def _padded(axes: tuple[str, ...], rank: int) -> tuple[str, ...]:
    return ("",) * (rank - len(axes)) + axes


def as_kind(x: Marks | None, kind: str) -> Condition | None:
    """A condition that is true where keys are visible, or where they are hidden.
    None if it is neither. A conjunction of several is only one of these."""
    if not isinstance(x, Condition) or x.kind not in _NEGATED:
        return None
    if x.kind == kind:
        return x
    if len(x.limits) + len(x.given) != 1:
        return None
    limits = tuple(replace(n, upper=not n.upper) for n in x.limits)
    given = tuple(replace(n, visible=not n.visible) for n in x.given)
    return replace(x, kind=kind, limits=limits, given=given)


def _joined(kind: str, x: Marks | None, y: Marks | None) -> Condition | None:
    x, y = as_kind(x, kind), as_kind(y, kind)
    axes = None if x is None or y is None else _merged(x.axes, y.axes)
    if x is None or y is None or axes is None:
        return None
    return Condition(kind, axes, (*x.limits, *y.limits), (*x.given, *y.given))


def _compared(how: str, left: Any, right: Any) -> Condition | None:
    """The marks of a comparison."""
    pairs = product(_readings(left), _readings(right))
    made = (_bounded(how, x, y, right, left) for x, y in pairs)
    return next((found for found in made if found is not None), None)


def _readings(value: Any) -> list[Integers | Difference]:
    """A number, or what is known of a tensor of integers: a difference, or integers as they are."""
    if type(value) is int:
        return [Integers((), None, value)]
    found = [marks_of(value)]
    if isinstance(found[0], Difference):
        found.append(_given(value))
    return [n for n in found if isinstance(n, Integers | Difference)]


def _bounded(
    how: str, x: Integers | Difference, y: Integers | Difference, right: Any, left: Any
) -> Condition | None:
    """The marks of a comparison of these, of which nodes are the ``right`` and the ``left`` one."""
    if isinstance(y, Difference) and y.absolute:
        x, y, right, left, how = y, x, left, right, _TURNED[how]
    if isinstance(x, Difference) and x.absolute:
        return _near(how, replace(x, absolute=False), y)
    if isinstance(x, Integers) and isinstance(y, Integers):
        return _limited(how, x, y, right, left)
    x, y = _as_difference(x), _as_difference(y)
    before, behind = _added(x.left, y.right), _added(y.left, x.right)
    return None if before is None or behind is None else _limited(how, before, behind)


def _near(how: str, x: Difference, y: Integers | Difference) -> Condition | None:
    """The marks of a comparison of the absolute value of a difference with a number."""
    if how in ("gt", "ge"):
        found = _near("le" if how == "gt" else "lt", x, y)
        return None if found is None else replace(found, kind="hidden")
    if not isinstance(y, Integers) or y.node is not None or "count" in y.axes:
        return None
    above = _bounded(_TURNED[how], x, replace(y, offset=-y.offset), None, None)
    return _joined("visible", _bounded(how, x, y, None, None), above)


def _limited(
    how: str, x: Integers, y: Integers, right: Any = None, left: Any = None
) -> Condition | None:
    """The marks of a comparison of integers; keys are counted along the later dimension."""
    if _last_count(x) < _last_count(y):
        x, y, right, how = y, x, left, _TURNED[how]
    if x.node is not None or "count" not in x.axes:
        return None
    keys = tuple("key" if name == "count" else name for name in x.axes)
    axes = _merged(keys, tuple("query" if name == "count" else name for name in y.axes))
    if axes is None:
        return None
    limit = _limit(how, x, y, right)
    if not limit.upper and not limit.counts and limit.known is not None and limit.known <= 0:
        return Condition("visible", ("",) * len(axes))
    return Condition("visible", axes, (limit,))


def _last_count(x: Integers) -> int:
    """The dimension that counts, from the last one, which is -1."""
    return next((d for d in range(-1, -1 - len(x.axes), -1) if x.axes[d] == "count"), -99)


def _limit(how: str, keys: Integers, bound: Integers, right: Any) -> Limit:
    """The limit that a comparison of keys with a bound holds for.
    ``j + c <= n`` is ``j < n - c + 1``. A bound that is a number has the node that computes it."""
    upper, more = _COMPARED[how]
    more -= keys.offset
    counts = "count" in bound.axes
    known = bound.offset + more if bound.node is None else None
    node, offset = bound.node, bound.offset + more
    if node is None and not counts and isinstance(right, fx.Node):
        node, offset = _whole(right), more
    return Limit(upper, node, offset, counts, bound.begun, known)


def _chosen(node: fx.Node, condition: Any, yes: Any, no: Any) -> Condition | None:
    dtype = fake(node).dtype
    if dtype not in FLOATS:
        return None
    numbers = _number(yes), _number(no)
    kind = "visible" if numbers[0] == 0.0 else "hidden"
    number = numbers[1] if kind == "visible" else numbers[0]
    filled = "lowest" if number == CUDNN and _for_cudnn(node) else _filled(dtype, number)
    x = as_kind(marks_of(condition), kind)
    if x is None or filled is None or 0.0 not in numbers:
        return None
    return replace(x, kind=filled, axes=_padded(x.axes, fake(node).dim()))


def _for_cudnn(node: fx.Node) -> bool:
    """True for a mask that nothing but attention of cuDNN reads."""
    found = readers(node)
    return bool(found) and all("cudnn_attention" in str(n.target) for n in found)


def _triangle(node: fx.Node, a: Arguments, upper: bool) -> Condition | None:
    """The marks of a part of a filled matrix, and 0 elsewhere; ``upper`` if keys end the part."""
    t, filled = fake(node), _number(a["self"])
    bound = a.get("diagonal", 0) + upper
    names = ("query", "key")
    own = tuple("" if equal(n, 1) else name for n, name in zip(t.shape[-2:], names, strict=True))
    axes = _padded(own, t.dim())
    if t.dtype is torch.bool and filled:
        return Condition("visible", axes, (Limit(upper, None, bound, True, True, bound),))
    kind = _filled(t.dtype, filled)
    if kind is None:
        return None
    return Condition(kind, axes, (Limit(not upper, None, bound, True, True, bound),))


def _filled(dtype: torch.dtype, number: Any) -> str | None:
    """The kind of a mask that hides with a number, or None."""
    if dtype not in FLOATS:
        return None
    return {-torch.inf: "added", torch.finfo(dtype).min: "lowest"}.get(number)


def _viewed(node: fx.Node, operand: Any, entry: Any) -> Marks | None:
    x, before, after = marks_of(operand), fake(operand), fake(node)
    if isinstance(x, Difference):
        parts = (
            _seen(replace(n, axes=_padded(n.axes, before.dim())), before, after, entry)
            for n in (x.left, x.right)
        )
        left, right = parts
        known = isinstance(left, Integers) and isinstance(right, Integers)
        return replace(x, left=left, right=right) if known else None
    if x is None or (isinstance(x, Integers) and x.node is not None and not x.begun):
        return None  # integers as they are: the view is the node itself
    return _seen(x, before, after, entry)


def _seen(
    x: Integers | Condition, before: torch.Tensor, after: torch.Tensor, entry: Any
) -> Integers | Condition | None:
    """The marks of a view of a tensor with these marks, one for each dimension."""
    if isinstance(entry, Expand):
        return replace(x, axes=_padded(x.axes, after.dim()))
    if isinstance(x, Condition) and x.given and not equal_shapes(before.shape, after.shape):
        return None  # they have dimensions of their own, which other views would change
    if isinstance(entry, Same):
        kept = _COUNTS if isinstance(x, Integers) else FLOATS if x.kind == "added" else ()
        same = after.dtype == before.dtype
        return x if same or after.dtype in kept else None
    # a slice of everything, as in `x[:, None]` with symbolic extents, is a view
    rest = [(name, n) for name, n in zip(x.axes, before.shape, strict=True) if not equal(n, 1)]
    axes: list[str] = []
    for n in after.shape:
        name, extent = ("", 1) if equal(n, 1) or not rest else rest.pop(0)
        if not equal(n, extent):
            return None
        axes.append(name)
    return None if rest else replace(x, axes=tuple(axes))


def _number(value: Any) -> Any:
    """A number, or the one that a tensor is filled with."""
    if not isinstance(value, fx.Node):
        return value if isinstance(value, int | float) else None
    entry, a = entry_of(value), arguments_of(value) if value.op == "call_function" else {}
    if isinstance(entry, Filled):
        given = entry.filled(value, a)
        return given if isinstance(given, int | float) else None
    return _number(a["self"]) if isinstance(entry, View | Expand) else None
