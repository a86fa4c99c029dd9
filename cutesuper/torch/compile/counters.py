"""Integers that count the steps of a traced program.

A decoding step of a model has one for each cache, and Inductor makes a kernel of each; these take
as long as kernels that compute something (1.4 us of Llama-3.2-1B's 1083 us a step each, H200).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.graph_builder import INTEGERS

_aten = torch.ops.aten
_RANGES = (
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, torch.ops.prims.iota.default
)  # fmt: skip


def settle_counters(graph: fx.Graph) -> None:
    """Leave out what adds nothing to integers, and count on all of them at once.

    before: ``k = arange(1) + n; m = arange(1) + j; n.copy_(n + 1); j.copy_(j + 1)``; after:
    ``k = n.view(1); m = j.view(1); a, b = _foreach_add([n, j], 1); n.copy_(a); j.copy_(b)``.

    Args:
        graph: functional, with fake tensors in ``meta["val"]``; its masks have been read.
    """
    for node in list(graph.nodes):
        counted = _without_range(node)
        if counted is not None:
            _as_view(graph, node, counted)
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if (kind := _counts_on(node)) is not None:
            groups.setdefault(kind, []).append(node)
    for (number, *_), copies in groups.items():
        if len(copies) > 1:
            _together(graph, copies, number)
    graph.eliminate_dead_code()


def _without_range(node: fx.Node) -> fx.Node | None:
    """The integers of a sum of one with a range of one element, which is 0.
    None for another node, and for one that leaves the graph: a view would change with its base."""
    if node.target is not _aten.add.Tensor or node.kwargs or not _is_one(node) or _leaves(node):
        return None
    for zero, other in (node.args, node.args[::-1]):
        if isinstance(zero, fx.Node) and isinstance(other, fx.Node) and _is_range(zero):
            alike = _is_one(other) and _value(other).dtype is _value(node).dtype
            return other if alike and _value(other).device == _value(node).device else None
    return None


def _leaves(node: fx.Node) -> bool:
    """True if the graph returns a node, or a view of it."""
    readers = reachable(node.users, lambda n: n.users if _is_view(n) else ())
    return any(n.op == "output" for n in readers)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _is_range(node: fx.Node) -> bool:
    """True for the range of the integer 0 alone."""
    if node.target not in _RANGES or not _is_one(node):
        return False
    if node.target is torch.ops.prims.iota.default:
        return _is_zero(node.kwargs.get("start"))
    return len(node.args) == 1 or _is_zero(node.args[0])


def _is_zero(bound: Any) -> bool:
    return isinstance(bound, int) and bound == 0


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_one(node: fx.Node) -> bool:
    """True for a tensor of one integer."""
    t = _value(node)
    if not isinstance(t, torch.Tensor) or t.dtype not in INTEGERS:
        return False
    return all(isinstance(d, int) and d == 1 for d in t.shape)


def _as_view(graph: fx.Graph, node: fx.Node, counted: fx.Node) -> None:
    with graph.inserting_before(node):
        view = graph.call_function(_aten.view.default, (counted, list(_value(node).shape)))
    view.meta = dict(node.meta)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


def _counts_on(node: fx.Node) -> tuple[Any, ...] | None:
    """The number that a copy adds to an input in place, and the kind of that tensor.
    None for another copy, or node."""
    if node.target is not _aten.copy_.default:
        return None
    base, made = node.args[:2]
    if not isinstance(base, fx.Node) or not isinstance(made, fx.Node) or base.op != "placeholder":
        return None
    if made.target is not _aten.add.Tensor or made.args[0] is not base or made.kwargs:
        return None
    number, t = made.args[1], _value(base)
    if type(number) is not int or not _is_one(base):
        return None
    return number, t.dtype, t.device


def _together(graph: fx.Graph, copies: list[fx.Node], number: int) -> None:
    """Add a number to the inputs of several copies at the end, in one call."""
    bases = [copy.args[0] for copy in copies]
    sums: list[Any] = [copy.args[1] for copy in copies]
    with graph.inserting_before(copies[0]):
        made = graph.call_function(_aten._foreach_add.Scalar, (bases, number))
        made.meta["val"] = [_value(s) for s in sums]
        for n, (copy, old) in enumerate(zip(copies, sums, strict=True)):
            new = graph.call_function(operator.getitem, (made, n))
            new.meta = dict(old.meta)
            copy.update_arg(1, new)
