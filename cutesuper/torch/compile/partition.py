"""Partition of the nodes of a traced program into regions.

Regions grow along the program: a node joins the regions that it reads from, a product those of
products of its row operand, and what moves elements those that do so beside it, if the result still
has a kernel graph and no node outside lies between. Views that split dimensions (heads of a
projection, say) end a region by themselves, because the result has no kernel graph.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import fx

from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.attention import AttentionBackward
from cutesuper.torch.aten.gathers import PutRows
from cutesuper.torch.aten.graph_builder import INTEGERS, Unsupported
from cutesuper.torch.aten.length_masks import lengths_of, unread
from cutesuper.torch.aten.pointwise import Pointwise
from cutesuper.torch.aten.reducing import Reduction
from cutesuper.torch.aten.table import (
    entry_of,
    is_free,
    products,
    readers,
    rows_of,
    unchanged,
    unknown,
)
from cutesuper.torch.aten.views import turned
from cutesuper.torch.compile.likeness import Likeness
from cutesuper.torch.compile.region import Region, convert

#: most nodes and products of a region: a search over more takes longer than 10 s and finds no more
MOST_NODES, MOST_PRODUCTS = 48, 8


@dataclass(frozen=True)
class Partition:
    """A traced program in parts.

    Attributes:
        regions: in order.
        refused: why a node that computes is in no region.
    """

    regions: tuple[Region, ...]
    refused: dict[fx.Node, str]


def unwritten(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a functional graph that no copy at its end writes to."""
    written = {n for node in graph.nodes if _writes(node) for n in node.all_input_nodes}
    return {n for n in graph.nodes if n.op == "placeholder" and n not in written}


def partition(
    graph: fx.Graph, *, constants: Collection[fx.Node] = (), parts: bool = False
) -> Partition:
    """Cut a traced program into regions.

    Args:
        graph: of ``torch.ops``; fake tensors in ``node.meta["val"]``. Unused nodes are removed.
        constants: nodes that are not written while kernels run (parameters).
        parts: true if kernels may work on parts of tensors. Inductor fuses what cuts tensors and
            puts them together with what it makes itself; alone these are copies.
    """
    graph.eliminate_dead_code()
    with unchanged():
        return _Growing(graph, frozenset(constants), parts).run()


@dataclass(frozen=True)
class _Part:
    """Nodes that have a kernel graph, with its number of products of matrices."""

    nodes: tuple[fx.Node, ...]
    products: int


#: where equal regions were cut, by program and operators
_cuts: dict[tuple[str, ...], int] = {}


def halves(region: Region) -> tuple[Region, Region] | None:
    """A region in two, cut where the work is halved and, of such places, the least data crosses.
    None if there is no place."""
    kind = (region.key, *(str(n.target) for n in region.nodes))
    place = _cuts.get(kind)
    found = _best_cut(region) if place is None else _cut(region, place)
    if found is not None:
        _cuts[kind] = len(found[0].nodes)
    return found


def _cut(region: Region, place: int) -> tuple[Region, Region] | None:
    """The region cut after a number of nodes; None if a part has no kernel graph."""
    try:
        halves = region.nodes[:place], region.nodes[place:]
        first, second = (convert(nodes, region.constants, region.parts) for nodes in halves)
        return first, second
    except Unsupported:
        return None


def _best_cut(region: Region) -> tuple[Region, Region] | None:
    work = [0, *accumulate(100 * products(n) + 1 for n in region.nodes)]
    apart = [abs(2 * w - work[-1]) for w in work]
    found: list[tuple[int, int, int, tuple[Region, Region]]] = []
    for i in sorted(range(1, len(region.nodes)), key=apart.__getitem__):
        if found and apart[i] > found[0][0]:
            break  # 2 conversions of 10 ms at each place
        if (parts := _cut(region, i)) is not None:
            carried = len(parts[0].outputs) + len(parts[1].inputs)
            found.append((apart[i], carried, i, parts))
    return min(found, key=lambda f: f[:3])[3] if found else None


@dataclass
class _Growing:
    """The regions while they grow."""

    graph: fx.Graph
    constants: frozenset[fx.Node]
    parts: bool = False
    regions: list[_Part] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)
    _region: dict[fx.Node, int] = field(default_factory=dict)
    _place: dict[fx.Node, int] = field(default_factory=dict)
    _epoch: dict[fx.Node, int] = field(default_factory=dict)
    _after: list[tuple[fx.Node, ...]] = field(default_factory=list)  # readers of each region
    _made: dict[Hashable, Region | None] = field(default_factory=dict)
    _unread: set[fx.Node] = field(default_factory=set)
    _last: int = 0  # place of the last node that is in a region

    def __post_init__(self) -> None:
        self._likeness = Likeness(self.constants)

    def run(self) -> Partition:
        epoch = 0
        for i, node in enumerate(self.graph.nodes):
            epoch += _writes(node)
            self._place[node], self._epoch[node] = i, epoch
        self._unread = unread(self.graph.nodes)
        for node in self.graph.nodes:
            if node.op == "call_function" and _computes(node) and node not in self._unread:
                self._add(node)
        # refused together with a node that no reader made part of a kernel graph; element-wise
        # operators stay where they are, among others that are PyTorch's
        for node in sorted(self.refused, key=self._place.__getitem__):
            if entry_of(node) is not None:
                self._placed([node], products=1)
        # a region that grew in pieces is listed under several numbers
        alive = {id(r): r for n, r in enumerate(self.regions) if self._region[r.nodes[0]] == n}
        return Partition(tuple(map(self._whole, alive.values())), self.refused)

    def _add(self, node: fx.Node) -> None:
        if entry_of(node) is None:
            self.refused[node] = unknown(node)
            return
        loose = self._loose(node)
        if self._with_scores(node) or self._with_operands(node, loose) or self._placed(loose):
            return
        # operands that form no kernel graph with it may be inputs instead
        if len(loose) > 1 and self._placed([node]):
            return
        # alone it is no kernel graph; a reader may make it part of one
        self.refused.setdefault(node, self._reason([node] if len(loose) > 1 else loose))

    def _placed(self, loose: Sequence[fx.Node], products: int = 0) -> bool:
        """Put nodes that are in no region into regions that they read, or into a new one.
        A new one has at least this many products."""
        sources = {p for n in loose for p in _producers(n)}
        near = sorted({self._region[p] for p in sources if p in self._region})
        near, moves = near or self._beside(loose), any(map(_moves, loose))
        if moves and not near:
            near = self._reading(sources)
        choices = [near] + ([[n] for n in reversed(near)] if len(near) > 1 else [])
        if moves:
            choices = self._with_siblings(near) + choices
            choices += [[n] for n in self._moved_beside(near)]
        if near:
            choices.append([])
        for chosen in choices:
            region = self._joined(loose, chosen)
            if region is not None and region.products >= products:
                self._keep(region)
                return True
        return False

    def _with_scores(self, node: fx.Node) -> bool:
        """Put a mask that is added to scores beside the product that makes these.
        The product is taken out of its region if that is in the way. False for another node, or if
        it cannot be done."""
        if node.target is not torch.ops.aten.add.Tensor or lengths_of(node) is None:
            return False
        near = {self._region[p] for p in _producers(node) if p in self._region}
        if len(near) != 1 or self._joined([node], [*near]) is not None:
            return False
        [number] = near
        inside = set(self.regions[number].nodes)
        scores = reachable(
            [p for p in _producers(node) if p in inside],
            lambda n: () if products(n) else inside.intersection(_producers(n)),
        )
        return self._cut_out(number, scores, [node])  # if all are scores, nothing is in the way

    def _with_operands(self, node: fx.Node, loose: Sequence[fx.Node]) -> bool:
        """Begin a region with a node and element-wise operands that nothing else reads.
        They are taken out of the region of what they read, as the squares of a norm of heads out
        of the product's, if that leaves its region anyway. False if the node can join, or not."""
        operands = [p for p in _producers(node) if p in self._region]
        near = {self._region[p] for p in operands}
        if len(near) != 1 or not all(map(_is_elementwise, operands)):
            return False
        [number] = near
        inside = self.regions[number].nodes
        alone = all(readers(p) == {node} for p in operands)
        read = {p for n in operands for p in _producers(n) if p in inside}
        if not alone or any(readers(p) <= {*inside} for p in read):
            return False
        if self._joined(loose, [number]) is not None:
            return False
        return self._cut_out(number, operands, loose)

    def _cut_out(self, number: int, nodes: Collection[fx.Node], others: Sequence[fx.Node]) -> bool:
        """Take nodes out of a region, and begin one with them and others.
        False if nothing would be left, or one of the two has no kernel graph."""
        inside = self.regions[number].nodes
        left = [n for n in inside if n not in nodes]
        if not left:
            return False
        for n in inside:
            del self._region[n]
        rest, begun = self._joined(left, []), self._joined([*nodes, *others], [])
        if rest is None or begun is None:
            self._region.update(dict.fromkeys(inside, number))
            return False
        self._keep(rest)
        self._keep(begun)
        return True

    def _beside(self, nodes: Sequence[fx.Node]) -> list[int]:
        """The regions of products that share their row operand with products among some nodes.
        One launch reads it then, as for queries, keys and values."""
        found: set[int] = set()
        for rows in {r for n in nodes if (r := rows_of(n)) is not None}:
            readers = reachable(rows.users, lambda n: n.users if is_free(n) else ())
            found |= {self._region[n] for n in readers
                      if n in self._region and rows_of(n) is rows}  # fmt: skip
        return sorted(found)

    def _reading(self, sources: Collection[fx.Node]) -> list[int]:
        """The regions without products that read numbers which are given, from among some nodes.
        As for queries, keys and values that another program has computed."""
        given = (n for n in sources if n.op == "placeholder" and not _counts(n))
        users = [u for n in given for u in n.users]
        readers = reachable(users, lambda n: n.users if is_free(n) else ())
        found = {self._region[n] for n in readers if n in self._region}
        return sorted(n for n in found if not self.regions[n].products)

    def _moved_beside(self, numbers: Sequence[int]) -> list[int]:
        """The regions without products that take results of the same regions.
        As for queries, keys and values that get positions, or are put into a cache."""
        users = [u for n in numbers for u in self._after[n]]
        readers = reachable(users, lambda n: n.users if is_free(n) else ())
        found = {self._region[n] for n in readers if n in self._region} - {*numbers}
        return sorted(n for n in found if not self.regions[n].products)

    def _with_siblings(self, numbers: Sequence[int]) -> list[list[int]]:
        """Regions without products, with those that take results of the same products as they do.
        As for queries and keys that are normed, each by itself, before they get positions."""
        if any(self.regions[n].products for n in numbers):
            return []
        read = {p for n in numbers for m in self.regions[n].nodes for p in _producers(m)}
        sources = {self._region[p] for p in read if p in self._region}
        made = [n for n in sources if self.regions[n].products]
        beside = {*self._moved_beside(made)} - {*numbers}
        return [sorted(beside | {*numbers})] if beside else []

    def _loose(self, node: fx.Node) -> list[fx.Node]:
        """A node and those of its operands that are in no region yet, and could be."""

        def could_be(p: fx.Node) -> bool:
            return p in self.refused and entry_of(p) is not None and not _counts(p)

        return list(reachable([node], lambda n: filter(could_be, _producers(n))))

    def _reason(self, nodes: Sequence[fx.Node]) -> str:
        try:
            convert(sorted(nodes, key=self._place.__getitem__), self.constants, self.parts)
        except Unsupported as error:
            return error.reason
        return "stands between parts of a region"

    def _joined(self, loose: Sequence[fx.Node], chosen: Sequence[int]) -> _Part | None:
        nodes = {*loose, *(n for c in chosen for n in self.regions[c].nodes)}
        together = sorted(nodes, key=self._place.__getitem__)
        if len(together) > MOST_NODES or len({self._epoch[n] for n in together}) > 1:
            return None
        if _mixes_passes(together):
            return None
        if self._leaves(set(together)):
            return None
        region = self._alike(together)
        if region is None or region.products > MOST_PRODUCTS:
            return None
        return _Part(tuple(together), region.products)

    def _alike(self, nodes: Sequence[fx.Node]) -> Region | None:
        """The region of these nodes, or of nodes that are like them; None if there is none."""
        form = self._likeness.of(nodes)
        if form not in self._made:
            try:
                self._made[form] = convert(nodes, self.constants, self.parts)
            except Unsupported:
                self._made[form] = None
        return self._made[form]

    def _whole(self, part: _Part) -> Region:
        found = self._alike(part.nodes)
        if found is not None and found.nodes == part.nodes:
            return found
        return convert(part.nodes, self.constants, self.parts)

    def _keep(self, region: _Part) -> None:
        self.regions.append(region)
        for n in region.nodes:
            self._region[n] = len(self.regions) - 1
            self._last = max(self._last, self._place[n])
            self.refused.pop(n, None)
        self._after.append(tuple({u: None for n in region.nodes for u in n.users}))

    def _leaves(self, inside: set[fx.Node]) -> bool:
        """True if a path leaves the nodes, passes something that computes, and comes back.

        A path that enters another region may leave it from any of its nodes: a region is one call.
        """
        last = max(self._last, *(self._place[n] for n in inside))
        todo = [(u, False) for n in inside for u in n.users if u not in inside]
        seen: set[tuple[fx.Node | int, bool]] = set(todo)
        while todo:
            node, outside = todo.pop()
            if self._place.get(node, last + 1) > last or node in self._unread:
                continue
            outside, number = outside or not is_free(node), self._region.get(node)
            if number is not None:
                if (number, outside) in seen:
                    continue
                seen.add((number, outside))
            for u in node.users if number is None else self._after[number]:
                if u in inside and outside:
                    return True
                if u not in inside and (u, outside) not in seen:
                    seen.add((u, outside))
                    todo.append((u, outside))
        return False


def _computes(node: fx.Node) -> bool:
    val = node.meta.get("val")
    several = isinstance(val, tuple | list) and any(isinstance(v, torch.Tensor) for v in val)
    return (isinstance(val, torch.Tensor) or several) and not is_free(node)


def _moves(node: fx.Node) -> bool:
    """True for a node that puts rows into a tensor, or turns halves of rows."""
    return isinstance(entry_of(node), PutRows) or turned(node) is not None


def _mixes_passes(nodes: Sequence[fx.Node]) -> bool:
    """True for a backward pass of attention with more than sums of what it gives.
    Its kernels take nothing in, and a search for more of them takes seconds: 6 with rotary
    positions behind it (2 x 128 tokens of Llama), for the program that it alone has, too."""
    entries = [entry_of(n) for n in nodes]
    attends = any(isinstance(e, AttentionBackward) for e in entries)
    return attends and not all(isinstance(e, AttentionBackward | Reduction) for e in entries)


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(entry_of(node), Pointwise)


def _counts(node: fx.Node) -> bool:
    """True for a node whose result is integers, with which no kernel computes."""
    return getattr(node.meta.get("val"), "dtype", None) in INTEGERS


def _producers(node: fx.Node) -> set[fx.Node]:
    """The nodes that a node reads, through views."""
    found = reachable(node.all_input_nodes, lambda n: n.all_input_nodes if is_free(n) else ())
    return {n for n in found if not is_free(n)}


def _writes(node: fx.Node) -> bool:
    """True for a node that changes a tensor, or has another effect that must keep its place."""
    if node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        # attention is marked as random, but draws random numbers only if it drops weights
        return bool(schema and schema.is_mutable) or (node.is_impure() and entry_of(node) is None)
    return node.op in ("call_module", "call_method")
