"""Parts of a traced program that are alike: all of them have a kernel graph, or none.

The layers of a model are equal, and so are their parts. Describing a part takes a tenth of the time
that it takes to make its kernel graph.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from cutesuper.torch.aten.graph_builder import FLOATS
from cutesuper.torch.aten.length_masks import mask_read
from cutesuper.torch.aten.table import is_free
from cutesuper.torch.aten.views import turned


class _Facts(NamedTuple):
    """A node by itself.

    Attributes:
        value: its result: shapes, strides, types.
        call: the operator, and its arguments other than nodes.
        inputs: the nodes among its arguments.
        free: whether it is a view or a cast that readers see through.
        mask: one that attention reads, or None.
    """

    value: str
    call: str
    inputs: tuple[fx.Node, ...]
    free: bool
    mask: fx.Node | None


@dataclass
class Likeness:
    """Descriptions of parts of one graph, which must not change meanwhile.

    Attributes:
        constants: nodes that are not written while kernels run.
    """

    constants: Collection[fx.Node]
    _facts: dict[fx.Node, _Facts] = field(default_factory=dict)

    def of(self, nodes: Sequence[fx.Node]) -> Hashable:
        """Everything that the kernel graph of some nodes depends on.
        Their operations, the views in front of them, the sources of masks and integers, and their
        readers."""
        return tuple(_Description(self, frozenset(nodes)).rows(nodes))

    def facts(self, node: fx.Node) -> _Facts:
        """The facts about a node."""
        found = self._facts.get(node)
        if found is None:
            found = self._facts[node] = _facts(node)
        return found


@dataclass
class _Description:
    """A description of some nodes; others get numbers in the order in which they are met."""

    all: Likeness
    inside: frozenset[fx.Node]
    numbers: dict[fx.Node, int] = field(default_factory=dict)

    def rows(self, nodes: Sequence[fx.Node]) -> Iterator[Hashable]:
        """One row for each node that matters."""
        for node in nodes:
            yield from self._node(node)
        for node in nodes:
            yield from self._readers(node)

    def _node(self, node: fx.Node, whole: bool = False) -> Iterator[Hashable]:
        """A node after its operands; ``whole``: after all of them, of any kind."""
        if node in self.numbers:
            return
        facts = self.all.facts(node)
        whole = whole or _counts(node)
        made = whole or node in self.inside or facts.free
        for n in facts.inputs if made else ():
            yield from self._node(n, whole or n is facts.mask)
        self.numbers[node] = len(self.numbers)
        readers = tuple(self.all.facts(u).call for u in node.users)
        yield facts.value, node in self.inside, node in self.all.constants, readers
        if made:
            yield facts.call, tuple(self.numbers[n] for n in facts.inputs)

    def _readers(self, node: fx.Node) -> Iterator[Hashable]:
        for user in node.users:
            if user in self.inside:
                yield self.numbers[user]
            elif self.all.facts(user).free:
                yield from self._node(user)
                yield from self._readers(user)
            else:
                yield self.all.facts(user).call


def _facts(node: fx.Node) -> _Facts:
    inputs: list[fx.Node] = []

    def noted(n: fx.Node) -> str:
        inputs.append(n)
        return "@"

    called = node.op == "call_function"
    arguments = fx.map_arg((node.args, node.kwargs), noted)
    call = f"{node.op} {node.target} {arguments}" if called else node.op
    call += " turned" * (called and turned(node) is not None)
    mask = mask_read(node) if called else None
    return _Facts(_value(node.meta.get("val")), call, tuple(inputs), is_free(node), mask)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, tuple | list):
        return " ".join(map(_value, value))
    return str(value)


def _counts(node: fx.Node) -> bool:
    """True for integers and conditions, whose places kernels may have to know."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype not in FLOATS
