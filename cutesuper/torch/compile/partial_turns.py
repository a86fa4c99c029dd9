"""Rotary positions of a part of each row, as those of whole rows.

before: ``cat((y * c + turned(y) * s, x[..., r:]), -1)`` with ``y = x[..., :r]``; after:
``where(place < r, x * c' + turned'(x) * s', x)``, with padded factors, and with every piece of r
elements turned. Kernels then read rows and write them whole, into a cache too. Otherwise PyTorch's
compiler takes them apart in front of a kernel, and puts them together behind it. Padded factors,
and the condition, are computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cutesuper.torch.aten.factored_dims import equal_shapes
from cutesuper.torch.aten.graph_builder import FLOATS, fake
from cutesuper.torch.aten.table import entry_of, readers
from cutesuper.torch.aten.views import Same, View, range_of, turned, unneeded
from cutesuper.torch.compile.turn_nodes import TurnMaker, form_of, unturned

_aten, _prims = torch.ops.aten, torch.ops.prims
_ELEMENTWISE = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.neg.default}


class _Other(Exception):
    """A part of rows becomes something that whole rows cannot."""


def widen_turns(graph: fx.Graph) -> None:
    """Put rotary positions of whole rows in the place of those of a part of each.
    Nodes that become unused stay.

    Args:
        graph: with fake tensors in ``meta["val"]``.
    """
    made = dict[Hashable, fx.Node]()
    for node in unturned(graph):
        for number in range(2):
            part = _part_of(node, number)
            if part is not None:
                _widen(graph, part, made)


@dataclass(frozen=True)
class _Part:
    """A part of each row that becomes something else, beside the rest of the row.

    Attributes:
        node: the concatenation.
        rows: of which the rest is a part.
        changed: what becomes of the part.
        begin, end: the range of the part, which begins or ends the row.
    """

    node: fx.Node
    rows: fx.Node
    changed: fx.Node
    begin: int
    end: int

    @property
    def length(self) -> int:
        """The number of elements of a row."""
        return int(fake(self.rows).shape[-1])


def _part_of(node: fx.Node, number: int) -> _Part | None:
    """The part of rows that an operand of a concatenation is made of; None if it is of no such."""
    operands: Any = node.args[0]
    t = fake(node)
    if len(operands) != 2 or t.dtype not in FLOATS or not t.is_contiguous():
        return None
    changed, found = operands[number], range_of(operands[1 - number])
    if found is None or fake(found[0]).dtype != t.dtype:
        return None
    if not equal_shapes(fake(found[0]).shape, t.shape):
        return None
    rows, dim, start, stop = found
    length = t.shape[-1]
    begin, end = (0, start) if number == 0 else (stop, length)
    if dim != t.dim() - 1 or (start, stop) != ((end, length) if number == 0 else (0, begin)):
        return None
    return _Part(node, rows, changed, begin, end)


def _widen(graph: fx.Graph, part: _Part, made: dict[Hashable, fx.Node]) -> None:
    node, rows = part.node, part.rows
    with graph.inserting_before(node):
        make = TurnMaker(graph, node)
        wide = _Wide(make, part, made)
        try:
            whole = wide.of(part.changed)
        except _Other:
            return
        if whole is None or not wide.turns or fake(whole).dtype != fake(rows).dtype:
            return
        if any(not readers(n) <= {*wide.known, node} for n in wide.inside):
            return
        chosen = make.call(_aten.where.self, wide.condition(), whole, rows)
        node.replace_all_uses_with(make.stored(chosen))


@dataclass
class _Wide:
    """Nodes of whole rows in the place of those of a part.

    Attributes:
        make: of new nodes.
        part: of the rows.
        made: those that all parts of a graph share.
        known: for each node that was looked at, the one of whole rows; None if it is made of
            something else.
        inside: the nodes that compute what becomes of the part.
        turns: whether something is turned there.
    """

    make: TurnMaker
    part: _Part
    made: dict[Hashable, fx.Node]
    known: dict[fx.Node, fx.Node | None] = field(default_factory=dict[fx.Node, fx.Node | None])
    inside: list[fx.Node] = field(default_factory=list[fx.Node])
    turns: bool = False

    def of(self, node: Any) -> fx.Node | None:
        """The node of whole rows; None for what is not made of the part. Raises _Other."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self.known:
            self.known[node] = self._found(node)
            if self.known[node] not in (None, self.part.rows):
                self.inside.append(node)
        return self.known[node]

    def _found(self, node: fx.Node) -> fx.Node | None:
        part, whole, entry = self.part, turned(node), entry_of(node)
        if range_of(node) == (part.rows, fake(part.rows).dim() - 1, part.begin, part.end):
            return part.rows
        if whole is not None:
            return self._turned(node, whole)
        if isinstance(entry, View) and self._joins_pairs(node):
            pairs = self.of(node.args[0])
            return pairs and self.make.call(_aten.view.default, pairs, _shape(part.rows))
        if node.target in _ELEMENTWISE or isinstance(entry, Same):
            wide = [self.of(a) for a in node.args]
            if any(w is not None for w in wide):
                pairs = zip(node.args, wide, strict=True)
                operands = [self._padded(a) if w is None else w for a, w in pairs]
                return self.make.call(node.target, *operands, **node.kwargs)
        return None

    def _joins_pairs(self, node: fx.Node) -> bool:
        whole = turned(node.args[0])  # type: ignore[arg-type]
        return whole is not None and fake(node).shape == fake(whole).shape

    def _turned(self, node: fx.Node, whole: fx.Node) -> fx.Node | None:
        """Whole rows, with every piece of the part's length turned, or with pairs."""
        x = self.of(whole)
        if x is None:
            return None
        self.turns = True
        self.known |= dict.fromkeys(unneeded(node), x)  # they read the part for this node alone
        width, length = self.part.end - self.part.begin, self.part.length
        pairs = fake(node).dim() > fake(whole).dim()
        if any(n % (2 if pairs else width) for n in (self.part.begin, length)):
            raise _Other
        if pairs:
            return self.make.turned_pairs(x)
        pieces = self.make.call(_aten.view.default, x, [*_shape(x)[:-1], length // width, width])
        return self.make.call(_aten.view.default, self.make.turned_halves(pieces), _shape(x))

    def _padded(self, operand: Any) -> Any:
        """A factor of the part as one of whole rows; what is added there is not used."""
        if not isinstance(operand, fx.Node):
            return operand
        part, shape = self.part, fake(operand).shape
        if not shape or shape[-1] == 1:
            return operand
        if shape[-1] != part.end - part.begin or fake(operand).dtype not in FLOATS:
            raise _Other
        key = form_of(operand), part.begin, part.length
        if key not in self.made:
            ends = [part.begin, part.length - part.end]
            self.made[key] = self.make.call(_aten.constant_pad_nd.default, operand, ends, 0.0)
        return self.made[key]

    def condition(self) -> fx.Node:
        """True where a row has the part."""
        part, device = self.part, fake(self.part.rows).device
        key = part.begin, part.end, part.length, device
        if key not in self.made:
            kind = {"dtype": torch.int64, "device": device, "requires_grad": False}
            places = self.make.call(_prims.iota.default, part.length, start=0, step=1, **kind)
            compare, bound = (_aten.ge, part.begin) if part.begin else (_aten.lt, part.end)
            self.made[key] = self.make.call(compare.Scalar, places, bound)
        return self.made[key]


def _shape(node: fx.Node) -> list[int]:
    """The shape of a node; -1 for an extent that is known at the call. Raises _Other for two."""
    found = [n if isinstance(n, int) else -1 for n in fake(node).shape]
    if found.count(-1) > 1:
        raise _Other
    return found
