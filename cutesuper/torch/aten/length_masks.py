"""Masks computed from positions; kernels take lengths instead.

before: attention with the mask ``(arange(S) <= positions[:, None])[:, None, None]``; after: the
same with a length for each sequence, ``positions + 1``. The mask is a function of the positions
alone, so no kernel reads it, and if nothing else does it is not computed at all. The same is done
with a mask that is added to scores, before a softmax that a model has written itself.

before: attention with the mask ``(arange(S) <= positions[:, None]) & padding``; after: with the
lengths, and with ``padding``, which kernels read where it lies. Any other mask of attention is read
as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.factored_dims import equal, equal_shapes
from cutesuper.torch.aten.graph_builder import FLOATS, fake
from cutesuper.torch.aten.positions import Condition, Given, Integers, Limit, as_kind, marks_of
from cutesuper.torch.aten.table import (
    Arguments,
    arguments_of,
    entry_of,
    is_free,
    of_a_node,
    products,
)
from cutesuper.torch.aten.views import Expand, Filled, Same, turned, unneeded

#: masks that are added to scores
_FILLED = ("added", "lowest")
#: operators of which a large negative number and -inf have one result, or that look for the largest
_EXPONENTIALS = {
    torch.ops.aten.exp.default, torch.ops.aten.softmax.int, torch.ops.aten._softmax.default,
    torch.ops.aten._safe_softmax.default, torch.ops.aten.amax.default,
}  # fmt: skip


@dataclass(frozen=True)
class First:
    """The first key that each sequence sees, ``node + offset``.
    With ``causal`` that of the last query, and one less for each one before it. More than ``most``
    makes no difference. Without a node it is a number, the same for all."""

    node: fx.Node | None
    offset: int
    most: int
    causal: bool


@dataclass(frozen=True)
class Lengths:
    """The keys that each sequence sees: the first ``node + offset`` of them.

    Attributes:
        node: int32 or int64, with at most one extent other than 1: a length for each sequence, or
            one for all. None: as many as there are.
        offset: number added to it.
        most: lengths beyond this make no difference.
        causal: whether the last query sees these keys, and each one before it one less; without a
            node, whether the first query sees one key, and each one behind it one more.
        number: of keys in the place of ``node + offset``, the same for all sequences.
        beyond: whether the number is larger than that of keys, which a length is not.
        first: the first key that is seen, where others are in front of it.
        given: conditions that a key has to meet besides.
        added: a mask that is added to the scores; where it is -inf a key is not seen.
    """

    node: fx.Node | None
    offset: int
    most: int
    causal: bool = False
    number: int | None = None
    beyond: bool = False
    first: First | None = None
    given: tuple[Given, ...] = ()
    added: fx.Node | None = None

    @property
    def counted(self) -> bool:
        """True if integers limit the keys of sequences."""
        return self.node is not None or self.number is not None or self.first is not None

    @property
    def nodes(self) -> list[fx.Node]:
        """The integers that the limits are made of."""
        both = (self.node, self.first.node if self.first else None)
        return [n for n in both if n is not None]

    @property
    def beside(self) -> list[fx.Node]:
        """The tensors that meet the scores."""
        found = [n.node for n in self.given]
        return found if self.added is None else [*found, self.added]


def mask_of(a: Arguments) -> Any:
    """The mask tensor of attention with these arguments, or None."""
    return a.get("attn_mask", a.get("attn_bias"))


@of_a_node
def mask_read(node: fx.Node) -> fx.Node | None:
    """The mask that a node reads; None if there is none.
    That of attention, or one made of positions that is added to scores."""
    if node.target is torch.ops.aten.add.Tensor:
        return added_mask(node, arguments_of(node))
    if not _attends(node.target) or entry_of(node) is None:
        return None
    mask = mask_of(arguments_of(node))
    return mask if isinstance(mask, fx.Node) else None


@cache
def _attends(target: Any) -> bool:
    return "attention" in str(target)


def added_mask(node: fx.Node, a: Arguments) -> fx.Node | None:
    """The operand of a sum that is a mask of the other operand.
    It has the other's shape and stands between two products, as scores do: only the loop of
    attention knows positions."""
    x, y, result = a["self"], a["other"], node.meta.get("val")
    if a["alpha"] != 1 or not all(isinstance(t, fx.Node) for t in (x, y)):
        return None
    if not isinstance(result, torch.Tensor) or result.dtype not in FLOATS or result.dim() < 3:
        return None
    for scores, mask in ((x, y), (y, x)):
        t = scores.meta.get("val")
        whole = isinstance(t, torch.Tensor) and equal_shapes(t.shape, result.shape)
        found = marks_of(mask) if whole else None
        if isinstance(found, Condition) and found.kind in _FILLED and not found.given:
            return mask if _between_products(scores, node) else None
    return None


def lowered(node: fx.Node) -> set[fx.Node]:
    """The nodes whose hidden elements are the lowest number, or near it, and -inf in a kernel.
    They are a sum of scores and a mask with that number, and what follows up to exponentials and
    products, which do not tell them apart. Empty for another node."""
    mask = mask_read(node) if node.target is torch.ops.aten.add.Tensor else None
    found = None if mask is None else marks_of(mask)
    if not isinstance(found, Condition) or found.kind != "lowest":
        return set()

    def behind(n: fx.Node) -> list[fx.Node]:
        return [u for u in n.users if u.target not in _EXPONENTIALS and not products(u)]

    return set(reachable([node], behind))


def _between_products(scores: fx.Node, masked: fx.Node) -> bool:
    """True for scores that a product makes, of which nothing but products comes after the mask."""

    def before(n: fx.Node) -> list[fx.Node]:
        return [] if products(n) or entry_of(n) is None else n.all_input_nodes

    def behind(n: fx.Node) -> list[fx.Node]:
        return [] if products(n) or entry_of(n) is None else list(n.users)

    made = any(products(n) for n in reachable([scores], before))
    after = reachable([masked], behind)
    # beside other scores (attention sinks) they are stored, as they are
    stored = any(n.target is torch.ops.aten.cat.default for n in after)
    return made and not stored and all(entry_of(n) is not None for n in after)


@of_a_node
def lengths_of(node: fx.Node) -> Lengths | None:
    """The lengths, limits or tensors that the mask of a node is made of.
    None if it has no mask, or one that is added to scores and made of anything but positions."""
    mask = mask_read(node)
    if mask is None:
        return None
    found = marks_of(mask)
    found = as_kind(found, "visible") or found
    lengths = _read(found, fake(mask), _scores(node)) if isinstance(found, Condition) else None
    if lengths is not None or not _attends(node.target):
        return lengths
    if fake(mask).dtype is torch.bool:
        return Lengths(None, 0, 0, given=(Given(mask, True),))
    return Lengths(None, 0, 0, added=mask)


def _read(found: Condition, mask: torch.Tensor, scores: Sequence[Any]) -> Lengths | None:
    """The lengths and conditions that stand for a mask; None if they leave no range of keys."""
    if not _fits(found, mask, scores):
        return None
    queries, keys = scores[-2:]
    limits = [n for n in found.limits if not _hides_nothing(n, queries, keys)]
    ends, starts = [n for n in limits if n.upper], [n for n in limits if not n.upper]
    shown = not found.given and _shows_one(ends, starts)
    if max(len(ends), len(starts)) > 1 or (found.kind == "lowest" and not shown):
        return None
    lengths = _lengths(ends, queries, keys)
    if lengths is not None and starts:
        lengths = replace(lengths, first=_first(starts[0], queries, keys))
    if lengths is None or (starts and lengths.first is None):
        return None
    return replace(lengths, given=found.given)


def _scores(node: fx.Node) -> Sequence[Any]:
    """The shape of the scores: queries and keys last."""
    a = arguments_of(node)
    if "query" not in a:
        return fake(node).shape
    return (*fake(a["query"]).shape[:-1], fake(a["key"]).shape[-2])


def _fits(found: Condition, mask: torch.Tensor, scores: Sequence[Any]) -> bool:
    """True for a mask of the keys, the queries and the sequences where the scores have them."""
    if found.kind == "hidden":
        return False
    rank = len(scores)
    places = {
        name: [d - len(found.axes) for d, n in enumerate(found.axes) if n == name]
        for name in ("key", "query", "sequence")
    }
    if places["key"] not in ([-1], []) or places["query"] not in ([-2], []):
        return False
    if places["key"] and not equal(mask.shape[-1], scores[-1]):
        return False
    if places["query"] and not equal(mask.shape[-2], scores[-2]):
        return False
    return places["sequence"] in ([-rank], [])


def _hides_nothing(n: Limit, queries: Any, keys: Any) -> bool:
    """True for a limit that is a number, and beyond the first or the last key for all queries."""
    if n.known is None or not isinstance(queries, int) or not isinstance(keys, int):
        return False
    return n.known >= keys if n.upper else n.known + (queries - 1) * n.counts <= 0


def _shows_one(ends: Sequence[Limit], starts: Sequence[Limit]) -> bool:
    """True for an upper limit behind the first key, for every query, and behind a moving lower one.
    Of a row that sees no key the lowest number makes a mean of all of them."""
    for n in ends:
        if not (n.known >= 1 if n.known is not None else n.begun and n.offset >= 1):
            return False
    pairs = [(n, m) for n in ends for m in starts]
    alike = all((n.node, n.counts) == (m.node, m.counts) for n, m in pairs)
    return not starts or (bool(ends) and alike and all(n.offset > m.offset for n, m in pairs))


def _first(n: Limit, queries: Any, keys: Any) -> First | None:
    """The first key that a lower limit leaves; None if queries cannot be counted."""
    if not isinstance(queries, int):
        return None
    last = queries - 1 if n.counts else 0
    return First(n.node, n.offset + last, int(keys) + last, n.counts)


def _lengths(limits: Sequence[Limit], queries: Any, keys: Any) -> Lengths | None:
    """The lengths that are the same as at most one upper limit; None if there are none."""
    if not limits:
        return Lengths(None, 0, 0)
    [n] = limits
    if not isinstance(queries, int) or (queries > 1 and not n.counts):
        return None
    last = queries - 1 if n.counts else 0
    if n.node is None:
        # of the first query one key: that is what causal means by itself
        number = None if n.known == 1 else n.offset + last
        beyond = number is not None and number > int(keys)
        return Lengths(None, 0, 0, n.counts or n.known == 1, number, beyond)
    return Lengths(n.node, n.offset + last, int(keys) + last, n.counts)


def reads(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node needs in a kernel: lengths in the place of a mask."""
    lengths, mask, entry = lengths_of(node), mask_read(node), entry_of(node)
    own = node.all_input_nodes if entry is None else entry.reads(node, arguments_of(node))
    if lengths is None:
        return own
    return [*(n for n in own if n is not mask), *lengths.nodes, *lengths.beside]


def computed_again(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that cost less to compute again than to keep, in the graph of both passes.

    Those of masks made of positions that attention reads in the backward pass, for kernels take
    limits in place of them; and of all positions: equal ones become one. Those that repeat keys and
    values for the query heads of a group, for kernels read them where they are.
    """
    readers = (n for n in graph.nodes if n.op == "call_function" and _attends(n.target))
    backward = [n for n in readers if "backward" in str(n.target)]
    found = {m for n in backward for m in _makers(n)}
    if found:
        found.update(n for n in graph.nodes if _are_places(n))
    found.update(m for n in backward for side in ("key", "value") for m in _repeated(n, side))
    return {n for n in found if n.op == "call_function"}


def _repeated(node: fx.Node, side: str) -> list[fx.Node]:
    """The nodes that repeat an operand of attention along a dimension, and the views below them."""
    chain = list[fx.Node]()
    n, length = arguments_of(node).get(side), 0
    while isinstance(n, fx.Node) and n.all_input_nodes and is_free(n):
        below = n.all_input_nodes[0]
        chain.append(n)
        expanded = isinstance(entry_of(n), Expand) and not equal(
            fake(n).numel(), fake(below).numel()
        )
        if expanded or (length and not isinstance(entry_of(n), Same)):
            length = len(chain)
        n = below
    return chain[:length]


def _are_places(node: fx.Node) -> bool:
    """True for integers that depend on no tensor."""
    found = marks_of(node)
    return isinstance(found, Integers) and found.node is None


def makers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that compute the masks of some nodes, and those that negate what is turned.
    Without those that compute the positions, and views of halves or pairs."""
    return {n for node in nodes for n in _makers(node)}


def unread(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that become unused if these have lengths in place of masks.
    And if what is turned is read whole."""
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
    if turned(node) is not None:
        yield from unneeded(node)
    if lengths is None:
        return
    todo = [mask_read(node)]
    while todo:
        n = todo.pop()
        if n is None or n in lengths.nodes or n in lengths.beside:
            continue
        if isinstance(n.meta.get("val"), torch.Tensor):
            yield n
            # a filled tensor uses the shape of another tensor, and none of its values
            todo += [] if isinstance(entry_of(n), Filled) else n.all_input_nodes
