"""Forms that PyTorch's compiler makes, as kernels compute them.

Inductor turns ``s - s.amax()`` with ``s = x * c`` into ``(x - x.amax()) * c``, and keeps the former
for rows that are not finite (PyTorch 2.13). No kernel computes such a condition, so it would cut
attention in two. Nor does one know NaN as a number, as `xlogy` has it, or halves that are put into
zeros and added, as in the backward pass of rotary positions. Halves of one tensor are those of one
node, also where each has a view of its own, and parts of one element are ranges.
"""

from __future__ import annotations

from math import isnan
from typing import Any, NamedTuple

import torch
from torch import fx

from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.gathers import INDICES
from cutesuper.torch.compile.maker import Maker

_aten = torch.ops.aten
_JUDGES = {
    _aten.abs, _aten.eq, _aten.ne, _aten.mul, _aten.logical_not, _aten.logical_and,
    _aten.bitwise_not, _aten.bitwise_and, _aten.any, _aten.all, _aten.isfinite,
}  # fmt: skip


def settle_forms(graph: fx.Graph) -> None:
    """Put others in the place of forms that no kernel computes. Their operands stay, unused.

    Args:
        graph: with fake tensors in ``meta["val"]``.
    """
    _join_views(graph)
    _settle_softmax(graph)
    for node in list(graph.nodes):
        if node.target is _aten.where.self and (x := _kept_nan(node)) is not None:
            node.update_arg(1, x)
        if node.target is _aten.add.Tensor:
            _turn_back(graph, node)
        if node.target is _aten.index.Tensor:
            _take_one(graph, node)


def _join_views(graph: fx.Graph) -> None:
    """Make one of equal views, as a change in place leaves them behind, one for each reader.

    before: ``cat((-view(x)[h:], view(x)[:h]))``; after: ``y = view(x); cat((-y[h:], y[:h]))``.
    """
    known: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if not getattr(node.target, "is_view", False):
            continue
        twin = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def _take_one(graph: fx.Graph, node: fx.Node) -> None:
    """Take a part of one element by a range, and not by an index.

    before: ``x[:, [2]]``, as some models take keys out of packed heads; after: ``x[:, 2:3]``.
    """
    x, indices = node.args
    given = [(dim, i) for dim, i in enumerate(indices) if i is not None]  # type: ignore[arg-type,union-attr]
    if len(given) != 1 or not isinstance(x, fx.Node):
        return
    [(dim, index)] = given
    extent = x.meta["val"].shape[dim]
    if index.target is not _aten.full.default or index.args[0] != [1] or type(extent) is not int:
        return
    place = index.args[1]
    if index.meta["val"].dtype not in INDICES or type(place) is not int:
        return
    if not -extent <= place < extent:
        return
    place %= extent
    with graph.inserting_before(node):
        make = Maker(graph, node)
        part = make.call(_aten.slice.Tensor, x, dim, place, place + 1)
        node.replace_all_uses_with(make.stored(part))


def _turn_back(graph: fx.Graph, node: fx.Node) -> None:
    """Turn halves against each other that are put into zeros.

    before: ``slice_scatter(0, -x[:h], h, 2 h) + slice_scatter(0, x[h:], 0, h)``; after:
    ``-cat((-x[h:], x[:h]))``.
    """
    parts = [p for n in node.args if (p := _in_zeros(n)) is not None]
    if len(parts) != 2 or node.kwargs:
        return
    first, second = sorted(parts, key=lambda p: p.begin)
    length = node.meta["val"].shape[first.dim]
    ends = (first.begin, first.end, second.begin, second.end)
    if first.dim != second.dim or ends != (0, second.begin, first.end, length):
        return
    if second.node.target is not _aten.neg.default:
        return
    with graph.inserting_before(node):
        make = Maker(graph, node)
        left = make.call(_aten.neg.default, first.node)
        turned = make.call(_aten.cat.default, [left, second.node.args[0]], first.dim)
        back = make.call(_aten.neg.default, turned)
    node.replace_all_uses_with(back)
    graph.erase_node(node)


class _Part(NamedTuple):
    """A tensor that is put into zeros along a dimension, and its place there."""

    node: fx.Node
    dim: int
    begin: int
    end: int


def _in_zeros(node: Any) -> _Part | None:
    """The tensor that a node puts into zeros; None for another node."""
    if not isinstance(node, fx.Node) or node.target is not _aten.slice_scatter.default:
        return None
    zeros, part, *places = node.args
    if not isinstance(zeros, fx.Node) or not isinstance(part, fx.Node) or node.kwargs:
        return None
    if zeros.target is not _aten.full.default or zeros.args[1] != 0 or len(places) != 3:
        return None
    shape = zeros.meta["val"].shape
    if not all(type(n) is int for n in (*places, *shape)) or shape != node.meta["val"].shape:
        return None
    dim, begin, end = (int(n) for n in places if isinstance(n, int))
    return _Part(part, dim % len(shape), begin, min(end, shape[dim]))


def _kept_nan(node: fx.Node) -> fx.Node | None:
    """The tensor whose NaN a choice replaces by NaN; None for another choice.

    before: ``where(isnan(x), nan, y)``; after: ``where(isnan(x), x, y)``.
    """
    condition, number, _ = node.args
    if not isinstance(condition, fx.Node) or not isinstance(number, fx.Node):
        return None
    if condition.target is not _aten.isnan.default or number.target is not _aten.full.default:
        return None
    x, value = condition.args[0], number.args[1]
    if not isinstance(x, fx.Node) or not isinstance(value, float) or not isnan(value):
        return None
    return x if x.meta["val"].dtype is node.meta["val"].dtype else None


def _settle_softmax(graph: fx.Graph) -> None:
    """Take the difference from the largest element where a choice by its own finiteness has it.

    before: ``where(isfinite(s).all(d), (x - x.amax(d)) * c, s - s.amax(d))``; after:
    ``s - s.amax(d)``.
    """
    for node in reversed(list(graph.nodes)):
        if node.target is not _aten.where.self:
            continue
        condition, _, original = node.args
        if _chooses(condition, original):
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _chooses(condition: Any, original: Any) -> bool:
    """True for a condition that depends on nothing but scores less their largest one."""
    if not isinstance(condition, fx.Node) or not isinstance(original, fx.Node):
        return False
    if original.target is not _aten.sub.Tensor or len(original.args) != 2:
        return False
    scores, largest = original.args
    if not isinstance(scores, fx.Node) or not isinstance(largest, fx.Node):
        return False
    if largest.target is not _aten.amax.default or largest.args[0] is not scores:
        return False
    made = reachable([condition], lambda n: () if n is scores else n.all_input_nodes)
    return scores in made and all(n is scores or _judges(n) for n in made)


def _judges(node: fx.Node) -> bool:
    """True for an operator of which "finite, all of them" is made."""
    return getattr(node.target, "overloadpacket", None) in _JUDGES
