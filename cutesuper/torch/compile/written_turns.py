"""Rotary positions that are written half by half, as those of whole rows.

before: ``cat((a * c - b * s, b * c + a * s), -1)`` of the halves ``[a, b]`` of x; after:
``x * cat((c, c), -1) + cat((-b, a), -1) * cat((s, s), -1)``, which kernels know, with factors that
are put together once for all layers. Halves that are turned the other way, ``cat((b, -a), -1)``,
become negated ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.factored_dims import equal_shapes
from cutesuper.torch.aten.graph_builder import FLOATS, fake
from cutesuper.torch.aten.table import arguments_of, entry_of, readers
from cutesuper.torch.aten.views import Same, half_of
from cutesuper.torch.compile.turn_nodes import TurnMaker, form_of, unturned

_aten, _prims = torch.ops.aten, torch.ops.prims
#: the sign of the second operand
_SIGNS: dict[Any, int] = {_aten.add.Tensor: 1, _aten.sub.Tensor: -1}


def settle_turns(graph: fx.Graph) -> None:
    """Put the forms that kernels know in the place of others. Nodes that become unused stay.

    Args:
        graph: with fake tensors in ``meta["val"]``.
    """
    made = dict[Hashable, fx.Node]()
    for node in unturned(graph):
        a, t = arguments_of(node), fake(node)
        if len(a["tensors"]) == 2 and a["dim"] % t.dim() == t.dim() - 1 and t.dtype in FLOATS:
            with graph.inserting_before(node):
                new = _negated(graph, node) or _of_whole_rows(graph, node, made)
            if new is not None:
                node.replace_all_uses_with(new)


def _negated(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Halves that are turned the other way; None for another node."""
    first, negative = arguments_of(node)["tensors"]
    if negative.target is not _aten.neg.default or {*negative.users} != {node}:
        return None
    b, a = half_of(first), half_of(negative.args[0])
    if a is None or b is None or a[0] is not b[0] or (a[1], b[1]) != (0, 1):
        return None
    if not equal_shapes(fake(a[0]).shape, fake(node).shape):
        return None
    make = TurnMaker(graph, node)
    return make.call(_aten.neg.default, make.turned_halves(a[0]))


def _before_casts(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The node in front of casts that round no more than one to this type does."""
    while isinstance(entry_of(node), Same):
        own = fake(node).dtype
        if own not in FLOATS or (own is not dtype and own.itemsize <= dtype.itemsize):
            break
        [node] = node.all_input_nodes
    return node


@dataclass(frozen=True)
class _Term:
    """A factor of a half of rows, with its sign, and the node that multiplies."""

    rows: fx.Node
    half: int
    factor: fx.Node
    sign: int
    node: fx.Node


def _terms(part: fx.Node) -> dict[int, _Term]:
    """The terms of a sum of both halves with factors, by half; none of anything else."""
    if part.target not in _SIGNS or part.kwargs:
        return {}
    signs = 1, _SIGNS[part.target]
    found = [_term(n, sign) for n, sign in zip(part.args, signs, strict=True)]
    return {t.half: t for t in found if t is not None}


def _term(node: Any, sign: int) -> _Term | None:
    if getattr(node, "target", None) is not _aten.mul.Tensor:
        return None
    for half, factor in (node.args, node.args[::-1]):
        found = half_of(half)
        if found is not None and isinstance(factor, fx.Node):
            return _Term(*found, factor, sign, node)
    return None


def _sums(node: fx.Node) -> list[dict[int, _Term]]:
    """The terms of both parts of a concatenation, by half; none if it is of anything else.
    Nothing else reads what is between."""
    dtype = fake(node).dtype
    parts = [_before_casts(part, dtype) for part in arguments_of(node)["tensors"]]
    found = [_terms(part) for part in parts]
    terms = [t for own in found for t in own.values()]
    if len(terms) != 4 or len({t.rows for t in terms}) > 1:
        return []
    for part, own in zip(parts, found, strict=True):
        if readers(part) != {node} or any(readers(t.node) != {part} for t in own.values()):
            return []
    width = fake(parts[0]).shape[-1:]
    return found if all(fake(t.factor).shape[-1:] == width for t in terms) else []


def _of_whole_rows(graph: fx.Graph, node: fx.Node, made: dict[Hashable, fx.Node]) -> fx.Node | None:
    """Two halves that are made of both, as whole rows and turned ones; None for another node."""
    if not (found := _sums(node)):
        return None
    first, second = found
    make, x = TurnMaker(graph, node), first[0].rows
    straight = _joined(make, made, (first[0], 1), (second[1], 1))
    across = _joined(make, made, (first[1], -1), (second[0], 1))
    if straight is None or across is None:
        return None
    pairs = (x, straight), (make.turned_halves(x), across)
    both = make.call(_aten.add.Tensor, *(make.call(_aten.mul.Tensor, *pair) for pair in pairs))
    if not equal_shapes(fake(both).shape, fake(node).shape) or not fake(node).is_contiguous():
        return None
    cast = make.call(_prims.convert_element_type.default, both, fake(node).dtype)
    return make.stored(cast)


def _joined(
    make: TurnMaker, made: dict[Hashable, fx.Node], *halves: tuple[_Term, int]
) -> fx.Node | None:
    """The factors of two halves as one of whole rows, times a sign each.
    None for factors that vary along other dimensions than each other."""
    key = tuple((form_of(t.factor), sign * t.sign) for t, sign in halves)
    if not equal_shapes(*(fake(t.factor).shape for t, _ in halves)):
        return None
    if key not in made:
        parts = [
            make.call(_aten.neg.default, t.factor) if sign * t.sign < 0 else t.factor
            for t, sign in halves
        ]
        made[key] = make.call(_aten.cat.default, parts, fake(parts[0]).dim() - 1)
    return made[key]
