"""Changes in place in traced programs.

``torch.export`` makes a program without any: a change is a new tensor, which is copied over the old
one at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx, nn

_aten = torch.ops.aten


def updates_buffer(node: fx.Node) -> bool:
    """True for the copy at the end that gives a buffer its new value.
    The running mean of a batch norm, for one. A parameter is no buffer."""
    if node.target is not _aten.copy_.default:
        return False
    base = node.args[0]
    if not isinstance(base, fx.Node) or base.op != "get_attr":
        return False
    path: Any = base.target
    owner: Any = node.graph.owning_module
    return not isinstance(functools.reduce(getattr, path.split("."), owner), nn.Parameter)


def settle_changes(graph: fx.Graph) -> None:
    """Make the copies of a program ones that gradients can be recorded through.

    before: ``z = copy(y, x); copy_(b, f(b))``; after: ``z = x.expand(y.shape).clone();
    copy_(b, f(own(b)).detach())``. The copy without a change has no derivative in PyTorch. What a
    gradient keeps must not change afterwards, and buffers are no part of the graph of gradients.
    """
    for node in list(graph.nodes):
        if node.target is _aten.copy.default:
            _expand(graph, node)
        elif node.target is _aten.copy_.default:
            _separate(graph, node)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy where gradients are recorded, which may keep it."""
    return tensor.clone() if torch.is_grad_enabled() else tensor


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    """Take the elements of the source, which are all that is left of a tensor that is copied to."""
    into: Any = node.args[0]
    source: Any = node.args[1]
    val = node.meta["val"]
    with graph.inserting_before(node):
        if source.meta["val"].dtype != val.dtype:
            source = graph.call_function(_aten._to_copy.default, (source,), {"dtype": val.dtype})
        source = graph.call_function(_aten.expand_as.default, (source, into))
        contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
        made = graph.call_function(_aten.clone.default, (source,), contiguous)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _separate(graph: fx.Graph, node: fx.Node) -> None:
    """Let other operators than the copy at the end read what a gradient may keep."""
    base: Any = node.args[0]
    source: Any = node.args[1]
    if updates_buffer(node):
        with graph.inserting_before(node):
            node.update_arg(1, graph.call_function(_aten.detach.default, (source,)))
    readers = [n for n in graph.nodes if n in base.users and n is not node]
    if readers:
        with graph.inserting_before(readers[0]):
            kept = graph.call_function(own, (base,))
        for reader in readers:
            reader.replace_input_with(base, kept)
