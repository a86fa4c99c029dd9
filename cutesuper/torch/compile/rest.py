"""The part of a traced program that PyTorch computes, and its cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from cutesuper.ir.relations import Classes
from cutesuper.targets import Target
from cutesuper.torch.aten.graph_builder import CONDITIONS, FLOATS
from cutesuper.torch.aten.length_masks import unread
from cutesuper.torch.aten.table import is_free, readers
from cutesuper.torch.compile.region import Region, places
from cutesuper.torch.internals import hint_of, written


@dataclass(frozen=True)
class Left:
    """An operator that PyTorch computes.

    Attributes:
        operator: the function that the user called, or its name in ``torch.ops``.
        place: the user's lines.
        us: microseconds at least, by a roofline: its tensors are read and written once.
        reason: why no kernel computes it; empty for an operator that computes no numbers.
        once: whether it was computed when the program was traced, as it depends on no input.
    """

    operator: str
    place: str
    us: float
    reason: str = ""
    once: bool = False

    def __str__(self) -> str:
        return f"{self.operator} ({self.place or 'no source'})"


def left_text(left: Sequence[Left]) -> list[str]:
    """The operators that PyTorch computes and why, equal ones counted, the most expensive first."""
    groups: dict[str, list[Left]] = {}
    for n in left:
        named = not n.reason or n.reason.startswith(n.operator)
        what = n.reason or n.operator if named else f"{n.operator}: {n.reason}"
        groups.setdefault(what, []).append(n)
    us = {what: sum(n.us for n in nodes) for what, nodes in groups.items()}
    lines = [f"PyTorch computes {len(left)} operator(s), {sum(us.values()):.1f} us at least"]
    for what in sorted(groups, key=lambda what: -us[what]):
        nodes = groups[what]
        found = ", ".join(dict.fromkeys(n.place for n in nodes if n.place))
        lines.append(f"  {us[what]:7.1f} us  {len(nodes)} x {what} ({found or 'no source'})")
    return lines


def is_own(node: fx.Node) -> bool:
    """True for an operator of `cutesuper.ops`, which runs kernels by itself."""
    return getattr(node.target, "namespace", "") == "cutesuper"


def is_library(node: fx.Node) -> bool:
    """True for products and attention: calls of libraries, which Inductor fuses with nothing.
    Not for convolutions, whose neighbours it stores in the order that suits them."""
    operator = getattr(node.target, "overloadpacket", None)
    return operator in flop_registry and "convolution" not in str(operator)


def left_to_pytorch(
    graph: fx.Graph, regions: Sequence[Region], refused: Mapping[fx.Node, str], target: Target,
    kept: Collection[fx.Node] = (),
) -> Iterator[Left]:  # fmt: skip
    """The operators in no region, other than views, in order.

    Args:
        graph: of the regions.
        regions: those that have kernels.
        refused: why nodes are in none.
        target: the GPU that costs are for.
        kept: nodes that are computed once.
    """
    for n in _left(graph, regions):
        reason = "" if is_own(n) else refused.get(n, "")
        yield Left(written(n), places([n]), _us(n, target), reason, n in kept)


def _left(graph: fx.Graph, regions: Sequence[Region]) -> Iterator[fx.Node]:
    inside = computed(regions)
    read = {operand.node for r in regions for operand in r.inputs}
    for n in graph.nodes:
        if n.op != "call_function" or n in inside:
            continue
        if _computes(n) or (n in read and _is_converted(n)):
            yield n


def fused_us(graph: fx.Graph, regions: Sequence[Region], target: Target, fuses: bool) -> float:
    """Microseconds of Inductor's kernels for what is in no region, by a roofline.

    Operators that read each other are one kernel, unless a call of a library or a region lies
    between; it reads and writes once what others make and read. Calls of libraries are left out. If
    Inductor ``fuses`` these too, each operator counts.
    """
    if fuses:
        return sum(n.us for n in left_to_pytorch(graph, regions, {}, target))
    left = {n for n in _left(graph, regions) if not is_library(n)}
    levels = _levels(graph, computed(regions))
    kernels = Classes[fx.Node]()
    for n in left:
        for reader in readers(n) & left:
            if levels[reader] == levels[n]:
                kernels.join(n, reader)
    members = dict[fx.Node, set[fx.Node]]()
    for n in left:
        members.setdefault(kernels.find(n), set()).add(n)
    moved = sum(_crossing_bytes(nodes) for nodes in members.values())
    return moved / target.bandwidth * 1e6 + len(members) * target.launch_us


def _levels(graph: fx.Graph, inside: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The most calls of libraries, and nodes of regions, on a path to each node."""
    found = dict[fx.Node, int]()
    for n in graph.nodes:
        before = (found[m] + (m in inside or is_library(m)) for m in n.all_input_nodes)
        found[n] = max(before, default=0)
    return found


def _crossing_bytes(nodes: set[fx.Node]) -> int:
    """The bytes of the tensors that nodes read from others, and of those that others read."""
    given = dict[fx.Node, dict[fx.Node, int]]()
    for a in {a for n in nodes for a in n.all_input_nodes}:
        base, size = _source(a)
        given.setdefault(base, {})[a] = size
    read = {n: min(bytes_of([n]), sum(parts.values())) for n, parts in given.items()}
    made = [n for n in nodes if readers(n) - nodes]
    return sum(size for n, size in read.items() if n not in nodes) + sum(map(_stored_bytes, made))


def _source(node: fx.Node) -> tuple[fx.Node, int]:
    """The node behind views and casts, and the least bytes on the way, of parts and repetitions."""
    size = bytes_of([node])
    while _is_seen_through(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        size = min(size, bytes_of([node]))
    return node, size


def _stored_bytes(node: fx.Node) -> int:
    """The bytes of what an operator makes; in a narrower type, if all readers cast it to that."""
    own = node.meta.get("val")
    if not isinstance(own, torch.Tensor):
        return bytes_of([node])
    return elements(own.shape) * _width(node, own.dtype.itemsize)


def _width(node: fx.Node, most: int) -> int:
    """The bytes of an element, at most, as readers take it through views and casts."""
    widths: list[int] = []
    for u in node.users:
        val = u.meta.get("val")
        if _is_seen_through(u) and isinstance(val, torch.Tensor):
            widths.append(_width(u, min(most, val.dtype.itemsize)))
        else:
            widths.append(most)
    return max(widths, default=most)


def computed(regions: Iterable[Region]) -> set[fx.Node]:
    """The nodes of regions, and masks that are no longer needed."""
    nodes = {n for r in regions for n in r.nodes}
    return nodes | unread(nodes)


def _computes(node: fx.Node) -> bool:
    """True for an operator that makes new tensors."""
    return not _is_seen_through(node) and bool(list(tensors_of(node)))


def _is_seen_through(node: fx.Node) -> bool:
    """True for views and casts that kernels read through.
    For views of integers too, and for one of several results."""
    return is_free(node) or getattr(node.target, "is_view", node.target is getitem)


def _is_converted(node: fx.Node) -> bool:
    """True for a cast of numbers that kernels do not read, such as quantized weights."""
    values = (n.meta.get("val") for n in node.all_input_nodes)
    known = (*FLOATS, *CONDITIONS)
    return is_free(node) and any(
        isinstance(v, torch.Tensor) and v.dtype not in known for v in values
    )


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node makes."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return (v for v in values if isinstance(v, torch.Tensor))


def _us(node: fx.Node, target: Target) -> float:
    """Microseconds of an operator of PyTorch: a launch, and its memory accesses or products."""
    moved = bytes_of((node, *node.all_input_nodes))
    seconds = max(moved / target.bandwidth, _flops(node) / target.tensor_flops)
    return seconds * 1e6 + target.launch_us


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """The bytes of the tensors that nodes make, in the example where extents may differ."""
    return sum(elements(t.shape) * t.dtype.itemsize for n in nodes for t in tensors_of(n))


def elements(shape: Iterable[Any]) -> int:
    """The number of elements of a tensor, in the example where extents may differ."""
    return prod(1 if (known := hint_of(n)) is None else known for n in shape)


def _flops(node: fx.Node) -> float:
    """Operations of a product or a convolution, as PyTorch counts them; 0 for other operators."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    given = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = given
    return float(hint_of(count(*args, **kwargs, out_val=node.meta.get("val"))) or 0)
