"""Masks computed from positions; kernels take lengths instead.

before: attention with the mask ``(arange(S) <= positions[:, None])[:, None, None]``; after: the
same with a length for each sequence, ``positions + 1``. The mask is a function of the positions
alone, so no kernel reads it, and if nothing else does it is not computed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cutesuper.torch.compile.factored_dims import equal
from cutesuper.torch.compile.graph_builder import FLOATS, Unsupported, fake
from cutesuper.torch.compile.pointwise import Where
from cutesuper.torch.compile.table import Arguments, arguments_of, entry_of
from cutesuper.torch.compile.views import Expand, Filled, Same, Slice, View

#: types of positions and lengths; adding 1 to narrower ones would overflow
_COUNTS = (torch.int32, torch.int64)
_ARANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step",
            "prims.iota.default")  # fmt: skip
_NOT = ("aten.logical_not.default", "aten.bitwise_not.default")
#: comparisons of keys with lengths: whether true is visible, and the offset added to the length
_COMPARED = {"lt": (True, 0), "le": (True, 1), "gt": (False, 1), "ge": (False, 0)}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class Lengths:
    """The number of keys that each sequence sees: the first ``node + offset`` of them.

    Attributes:
        node: int32 or int64, with at most one extent other than 1.
        offset: number added to it.
        most: the number of keys.
    """

    node: fx.Node
    offset: int
    most: int


@dataclass(frozen=True)
class _Marks:
    """The relation of the elements of a tensor to their place.

    Attributes:
        kind: "keys", the number of the key plus ``offset``; "lengths", those of ``node``; "visible"
            and "hidden", true where a key is; "added", 0 where it is visible and -inf elsewhere.
            The first ``node + offset`` keys are visible.
        axes: for each dimension "key", "sequence", or "" for elements that are all the same.
        node: of the lengths.
        offset: see ``kind``.
    """

    kind: str
    axes: tuple[str, ...]
    node: fx.Node | None = None
    offset: int = 0


def mask_of(a: Arguments) -> Any:
    """The mask tensor of attention with these arguments, or None."""
    return a.get("attn_mask", a.get("attn_bias"))


def lengths_of(node: fx.Node) -> Lengths | None:
    """The lengths that the mask of a node is made of; None if it has no such mask."""
    if entry_of(node) is None or not isinstance(mask_of(arguments_of(node)), fx.Node):
        return None
    try:
        return read_lengths(node, arguments_of(node))
    except Unsupported:
        return None


def read_lengths(node: fx.Node, a: Arguments) -> Lengths:
    """The lengths that the mask of attention is made of.

    Args:
        node: the attention, with a mask.
        a: its arguments.

    Raises:
        Unsupported: it is made of something else, or there are several queries.
    """
    mask, query, keys = mask_of(a), fake(a["query"]), fake(a["key"]).shape[-2]
    marks = _marks(mask)
    if marks is None or marks.node is None or not _fits(marks, fake(mask), query, keys):
        raise Unsupported(
            node,
            "takes a mask tensor that is not made of positions here, one for "
            "each sequence (torch.arange(S) <= positions[:, None]); use is_causal, "
            "or cs.ops.attention with key_lengths",
        )
    if not equal(query.shape[-2], 1):
        raise Unsupported(
            node,
            "takes a mask tensor made of positions for several queries; "
            "kernels have lengths for one query of each sequence",
        )
    return Lengths(marks.node, marks.offset, int(keys))


def _fits(marks: _Marks, mask: torch.Tensor, query: torch.Tensor, keys: Any) -> bool:
    """True if each sequence has a length, and the mask hides the keys behind it."""
    if marks.kind not in ("visible", "added") or marks.axes[-1:] != ("key",):
        return False
    if not equal(mask.shape[-1], keys):
        return False
    places = [d - len(marks.axes) for d, name in enumerate(marks.axes) if name == "sequence"]
    return places == [-query.dim()] or (not places and equal(query.shape[0], 1))


def reads(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node needs in a kernel: lengths in the place of a mask."""
    lengths, a, entry = lengths_of(node), arguments_of(node), entry_of(node)
    if lengths is None:
        unread = [a.get(name) for name in (entry.unread if entry is not None else ())]
        return [n for n in node.all_input_nodes if n not in unread]
    return [*(a[n] for n in ("query", "key", "value")), lengths.node]


def makers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that compute the masks of some nodes, without those that compute the positions."""
    return {n for node in nodes for n in _makers(node)}


def unread(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that become unused if these have lengths in place of masks."""
    nodes = set(nodes)
    found = makers(nodes)
    while True:
        needed = {
            n for n in found
            if any(u not in found and (u not in nodes or n in reads(u)) for u in n.users)
        }  # fmt: skip
        if not needed:
            return found
        found -= needed


def _makers(node: fx.Node) -> Iterator[fx.Node]:
    lengths = lengths_of(node)
    if lengths is None:
        return
    todo = [mask_of(arguments_of(node))]
    while todo:
        n = todo.pop()
        if n is not lengths.node and isinstance(n.meta.get("val"), torch.Tensor):
            yield n
            # a filled tensor uses the shape of another tensor, and none of its values
            todo += [] if isinstance(entry_of(n), Filled) else n.all_input_nodes


# ------------------------------------------------------------------------------------------- marks


def _marks(node: Any) -> _Marks | None:
    """The marks of a tensor; None if nothing is known of it."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    found = _computed(node) if node.op == "call_function" else None
    return found or _lengths(node)


def _computed(node: fx.Node) -> _Marks | None:
    a, entry, name = arguments_of(node), entry_of(node), str(node.target)
    if name in _ARANGES:
        return _arange(node, a)
    if name in _NOT:
        x = _marks(a["self"])
        flipped = {"visible": "hidden", "hidden": "visible"}.get(x.kind if x else "")
        return replace(x, kind=flipped) if x and flipped else None
    if name.startswith("aten.") and name[5:].removesuffix(".Tensor") in _COMPARED:
        return _compared(name[5:7], _marks(a["self"]), _marks(a["other"]))
    if isinstance(entry, Where):
        return _chosen(node, *entry.operands(a))
    if isinstance(entry, View | Expand | Same | Slice):
        return _viewed(node, next(iter(a.values())), entry)
    return None


def _lengths(node: fx.Node) -> _Marks | None:
    t = fake(node)
    axes = tuple("" if equal(n, 1) else "sequence" for n in t.shape)
    if t.dtype not in _COUNTS or axes.count("sequence") > 1:
        return None
    while (under := _whole(node)) is not None:
        node = under
    return _Marks("lengths", axes, node)


def _whole(node: fx.Node) -> fx.Node | None:
    """The node that a node is a view of, with all elements in the same order."""
    if not isinstance(entry_of(node), View | Slice):
        return None
    under = node.all_input_nodes[0]
    return under if equal(fake(under).numel(), fake(node).numel()) else None


def _arange(node: fx.Node, a: Arguments) -> _Marks | None:
    start, t = a.get("start", 0), fake(node)
    if type(start) is not int or a.get("step", 1) != 1 or t.dtype not in _COUNTS:
        return None
    return _Marks("keys", ("key",), None, start) if type(t.shape[0]) is int else None


def _compared(how: str, x: _Marks | None, y: _Marks | None) -> _Marks | None:
    """The marks of a comparison; ``j + c <= n`` is ``j < n - c + 1``."""
    if x is None or y is None or {x.kind, y.kind} != {"keys", "lengths"}:
        return None
    if x.kind == "lengths":
        x, y, how = y, x, _TURNED[how]
    rank = max(len(x.axes), len(y.axes))
    axes = [{a, b} - {""} for a, b in zip(_padded(x, rank), _padded(y, rank), strict=True)]
    if any(len(names) > 1 for names in axes):
        return None
    seen, offset = _COMPARED[how]
    named = tuple("".join(names) for names in axes)
    return _Marks("visible" if seen else "hidden", named, y.node, offset - x.offset)


def _chosen(node: fx.Node, condition: Any, yes: Any, no: Any) -> _Marks | None:
    x = _marks(condition)
    fills = {"visible": (0.0, -torch.inf), "hidden": (-torch.inf, 0.0)}.get(x.kind if x else "")
    if x is None or fills != (_number(yes), _number(no)):
        return None
    return replace(x, kind="added", axes=_padded(x, fake(node).dim()))


def _viewed(node: fx.Node, operand: Any, entry: Any) -> _Marks | None:
    x = _marks(operand)
    before, after = fake(operand), fake(node)
    if x is None or x.kind == "lengths":
        return None
    if isinstance(entry, Expand):
        return replace(x, axes=_padded(x, after.dim()))
    if isinstance(entry, Same):
        kept = {"keys": _COUNTS, "added": FLOATS}.get(x.kind, (torch.bool,))
        return x if after.dtype in kept else None
    # a slice of everything, as in `x[:, None]` with symbolic extents, is a view
    rest = [(name, n) for name, n in zip(x.axes, before.shape, strict=True) if not equal(n, 1)]
    axes: list[str] = []
    for n in after.shape:
        name, extent = ("", 1) if equal(n, 1) or not rest else rest.pop(0)
        if not equal(n, extent):
            return None
        axes.append(name)
    return None if rest else replace(x, axes=tuple(axes))


def _padded(x: _Marks, rank: int) -> tuple[str, ...]:
    return ("",) * (rank - len(x.axes)) + x.axes


def _number(value: Any) -> float | None:
    """A number, or the one that a tensor is filled with."""
    if not isinstance(value, fx.Node):
        return float(value) if isinstance(value, int | float) else None
    entry, a = entry_of(value), arguments_of(value) if value.op == "call_function" else {}
    if isinstance(entry, Filled):
        given = entry.filled(value, a)
        return float(given) if isinstance(given, int | float) else None
    return _number(a["self"]) if isinstance(entry, View | Expand) else None
