"""Replacement of regions in a traced program by one call each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import prod
from typing import Any

import torch
from torch import fx

from cutesuper.ir.relations import reachable
from cutesuper.runtime.programs import KERNEL_DEVICES
from cutesuper.torch.aten.gathers import closing_copy
from cutesuper.torch.aten.graph_builder import fake
from cutesuper.torch.aten.table import is_free
from cutesuper.torch.compile.indices import within
from cutesuper.torch.compile.region import Length, Operand, Region, Result, Size

_aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """The call that replaces a region.

    Attributes:
        region: its nodes are in the graph.
        target: a function of the prefix and a list of tensors that returns a list, or the name of a
            submodule.
        prefix: further arguments.
        in_place: a function for regions that change inputs in place; of the prefix, the other
            inputs, the outputs that are such inputs, and these. It returns the other outputs. None:
            copies are changed, and stay copied at the end.
    """

    region: Region
    target: Any
    prefix: tuple[Any, ...] = ()
    in_place: Any = None


def rewrite(graph: fx.Graph, calls: Sequence[Call]) -> list[fx.Node]:
    """Replace the nodes of regions by one call each.

    before: ``h = rms_norm(x, w); y = linear(h, v)``; after: ``[y'] = target(*prefix, [x', w, v])``,
    where x' and y' are views. Nodes that only the regions used are removed.

    Args:
        graph: the graph of the regions.
        calls: in any order.

    Returns:
        The nodes of the calls, each after those that it needs.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    before = set(graph.nodes)
    made = [_rewrite(graph, call, replaced) for call in _in_order(calls)]
    _join_integers([n for n in graph.nodes if n not in before])
    return made


def _join_integers(made: Sequence[fx.Node]) -> None:
    """Compute lengths, positions and masks that several regions read only once.
    Numbers are left alone: a region may change them in place between two readers."""
    known: dict[str, fx.Node] = {}
    joined: set[fx.Node] = set()
    for node in made:
        operands = node.all_input_nodes
        if not operands or not all(n in joined or _is_integer(n) for n in operands):
            continue
        twin = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        joined.add(twin)
        if twin is not node:
            node.replace_all_uses_with(twin)
            node.graph.erase_node(node)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _in_order(calls: Sequence[Call]) -> list[Call]:
    """Regions after those that they need, regardless of the nodes between."""
    maker = {n: i for i, c in enumerate(calls) for n in c.region.nodes}
    needs: dict[int, set[int]] = {}
    for i, call in enumerate(calls):
        inputs = (o.node for o in call.region.inputs)
        seen = reachable(inputs, lambda n: () if n in maker else n.all_input_nodes)
        needs[i] = {maker[n] for n in seen if n in maker} - {i}
    return [calls[i] for i in TopologicalSorter(needs).static_order()]


def _rewrite(graph: fx.Graph, call: Call, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    region = call.region
    place = {n: i for i, n in enumerate(graph.nodes)}
    last = max(region.nodes, key=place.__getitem__)
    closed = changed(call)  # before views of the operands read them, too
    with graph.inserting_before(last.next):
        traced = isinstance(call.target, str)
        inputs = [_operand(graph, o, replaced, any_strides=traced) for o in region.inputs]
        kind, target = "call_module" if traced else "call_function", call.target
        arguments: list[Any] = [inputs]
        if closed:
            own = [region.graph.continued[n] for n in closed]
            target = call.in_place
            rest = [x for k, x in enumerate(inputs) if k not in own]
            arguments = [rest, list(closed), [inputs[k] for k in own]]
        made = graph.create_node(kind, target, (*call.prefix, *arguments))
        others = [n for n in range(len(region.graph.outputs)) if n not in closed]
        parts = {n: graph.call_function(operator.getitem, (made, i)) for i, n in enumerate(others)}
        own_results = [r for r in region.outputs if r.place not in closed]
        results = [_result(graph, parts[r.place], r, replaced) for r in own_results]
    bases = {n: closing.all_input_nodes[0] for n, closing in closed.items()}
    for closing in closed.values():
        graph.erase_node(closing)
    _move_users(graph, region, results[-1] if results else made, place)
    for r, new in zip(own_results, results, strict=True):
        new.meta = dict(r.node.meta)
        r.node.replace_all_uses_with(new)
        replaced[r.node] = new
    for r in region.outputs:
        if r.place in closed:
            r.node.replace_all_uses_with(bases[r.place])
            replaced[r.node] = bases[r.place]
    _remove_unused(graph, region)
    return made


def changed(call: Call) -> dict[int, fx.Node]:
    """The outputs for which an input is changed in place, in order, and the copies that say so."""
    if call.in_place is None:
        return {}
    results = call.region.outputs
    puts = [r for r in results if r.place in call.region.graph.continued]
    alone = [r for r in puts if sum(o.place == r.place for o in results) == 1]
    found = {r.place: closing_copy(r.node) for r in alone}
    return {n: copy for n, copy in sorted(found.items()) if copy is not None}


def _operand(
    graph: fx.Graph, o: Operand, replaced: dict[fx.Node, fx.Node], any_strides: bool
) -> fx.Node:
    node = replaced.get(o.node, o.node)
    val = node.meta["val"]
    shape, wanted = list(val.shape), _lengths(graph, o.shape, replaced)
    if o.fill is not None:
        options = {"dtype": o.dtype, "device": val.device, "pin_memory": False}
        return graph.call_function(_aten.full.default, (wanted, o.fill), options)
    if o.lengths is not None:
        node = _lengths_of(graph, node, val.dtype, *o.lengths)
    if o.limits is not None and val.device.type not in KERNEL_DEVICES:
        node = graph.call_function(within, (node, *o.limits))
    if val.dtype != o.dtype:
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (node, o.dtype))
    if list(o.order) != list(range(len(shape))):
        node = graph.call_function(_aten.permute.default, (node, list(o.order)))
        shape = [shape[d] for d in o.order]
    if o.copied:
        node = graph.call_function(
            _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    if o.lengths is not None and prod(shape) == 1 and o.shape != (1,):
        return _of_all(graph, node, wanted)
    if not all(type(n) is int for n in shape) or wanted != shape:
        # a traced program may get other strides than it was traced with; a graph of Inductor is
        # compiled for its strides
        reshaped = _aten.reshape.default if any_strides else _aten.view.default
        node = graph.call_function(reshaped, (node, wanted))
    if o.part is not None:
        node = graph.call_function(_aten.slice.Tensor, (node, 0, *o.part))
    return node


def _of_all(graph: fx.Graph, node: fx.Node, shape: list[int]) -> fx.Node:
    """One length as that of each sequence."""
    node = graph.call_function(_aten.view.default, (node, [1]))
    node = graph.call_function(_aten.expand.default, (node, shape))
    return graph.call_function(
        _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
    )


def _lengths_of(
    graph: fx.Graph, node: fx.Node, dtype: torch.dtype, offset: int, most: int
) -> fx.Node:
    """Lengths, clamped before anything is added or narrowed, so that nothing overflows.
    A single clamp is not used: Inductor decomposes those earlier, and has no code for one that
    comes later."""
    if dtype is torch.int32 and not offset:
        return node
    node = graph.call_function(_aten.clamp_min.default, (node, -offset))
    node = graph.call_function(_aten.clamp_max.default, (node, most - offset))
    return graph.call_function(_aten.add.Tensor, (node, offset)) if offset else node


def _result(graph: fx.Graph, part: fx.Node, r: Result, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    shape = _lengths(graph, r.shape, replaced)
    node = graph.call_function(_aten.view.default, (part, shape))
    if r.expanded is not None:
        full = _lengths(graph, r.expanded, replaced)
        node = graph.call_function(_aten.expand.default, (node, full))
        node = graph.call_function(
            _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    if list(r.order) != list(range(len(r.order))):
        node = graph.call_function(_aten.permute.default, (node, list(r.order)))
    return node


def _lengths(
    graph: fx.Graph, shape: Sequence[Length], replaced: dict[fx.Node, fx.Node]
) -> list[Any]:
    return [_extent(graph, n, replaced) if isinstance(n, Size) else n for n in shape]


def _extent(graph: fx.Graph, size: Size, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    """An extent that is known at the call; Inductor asks for its example."""
    node = graph.call_function(_aten.sym_size.int, (replaced.get(size.node, size.node), size.dim))
    node.meta["val"] = fake(size.node).shape[size.dim]
    return node


def _move_users(graph: fx.Graph, region: Region, after: fx.Node, place: dict[fx.Node, int]) -> None:
    """Move readers of the region's results that stand before its call behind it."""
    end = place[max(region.nodes, key=place.__getitem__)]
    late = set(region.nodes)
    inside = set(region.nodes)
    for node in list(graph.nodes):
        if place.get(node, end + 1) > end:
            continue
        if node not in inside and late.intersection(node.all_input_nodes):
            late.add(node)
            # a view of a result that only the region reads is removed with it
            after.append(node)
            after = node


def _remove_unused(graph: fx.Graph, region: Region) -> None:
    todo = [*(r.node for r in region.outputs), *reversed(region.nodes)]
    seen: set[fx.Node] = set()
    inside = set(region.nodes)
    while todo:
        node = todo.pop(0)
        if node in seen or node.users or node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            continue
        # dropout that drops nothing is marked as random too
        if node.is_impure() and node not in inside and not is_free(node):
            continue
        seen.add(node)
        todo += node.all_input_nodes
        graph.erase_node(node)
