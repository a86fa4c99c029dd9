"""Integers and conditions that depend on no input.

A model computes positions, and compares them, before a mask is made of them: of a batch without
padding transformers looks for the places where packed sequences begin. Where nothing but extents
goes in, the values are known when the graph is compiled. Counted places and single numbers are
what `positions` reads a mask from, so such values become ``iota`` and ``full``.

before: ``cumsum(diff(positions) != 1)`` of ``positions = arange(L)``; after: ``full(0)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from cutesuper.torch.aten.positions import Condition, Integers, marks_of
from cutesuper.torch.aten.table import arguments_of, entry_of
from cutesuper.torch.aten.views import Expand, Filled, View
from cutesuper.torch.internals import apart, fake_result

_aten, _prims = torch.ops.aten, torch.ops.prims
#: elements of values that are computed; larger ones are known where all elements are the same
_MOST = 1 << 20
_INTEGERS = (torch.bool, torch.int32, torch.int64)
_COUNTED = (_prims.iota.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step)


@dataclass(frozen=True)
class _Number:
    """A tensor of one number."""

    value: int | float | bool


@dataclass(frozen=True)
class _Places:
    """Integers that count along a dimension, from ``first`` on."""

    dim: int
    first: int


def settle_constants(graph: fx.Graph) -> None:
    """Put counted places and single numbers in the place of what computes them.
    Its operands stay, unused, and so do results of the graph.

    Args:
        graph: with fake tensors in ``meta["val"]``.
    """
    for node, found in apart(partial(_constants, graph)).items():
        with graph.inserting_before(node):
            new = _node_of(graph, node, found)
        node.replace_all_uses_with(new, lambda user: user.op != "output")


def _constants(graph: fx.Graph) -> dict[fx.Node, _Number | _Places]:
    """The constants in the place of nodes, which are run here, with real tensors."""
    known = dict[fx.Node, torch.Tensor]()
    found = dict[fx.Node, _Number | _Places]()
    for node in graph.nodes:
        if (value := _value(node, known)) is not None:
            known[node] = value
            constant = None if _is_read(node) else _places(value) or _number(value)
            if constant is not None:
                found[node] = constant
    return found


def _is_read(node: fx.Node) -> bool:
    """True for what masks are read from as it is."""
    found = marks_of(node)
    if isinstance(found, Condition):
        return not found.given
    simple = node.target in _COUNTED or isinstance(entry_of(node), View | Expand | Filled)
    return simple or (isinstance(found, Integers) and found.node is None)


# ------------------------------------------------------------------------------------------- values


def _value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a node, in this process; None if it is not known, or not looked for."""
    like = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(like, torch.Tensor):
        return None
    pure = not node.target._schema.is_mutable and node.target.namespace in ("aten", "prims")
    if not pure or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    if like.dtype not in _INTEGERS or not all(type(n) is int for n in like.shape):
        return None
    if not like.numel() or any(n not in known for n in node.all_input_nodes):
        return None
    try:
        return _run(node, known, like)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None  # what PyTorch says of it is said where the model runs


def _run(
    node: fx.Node, known: dict[fx.Node, torch.Tensor], like: torch.Tensor
) -> torch.Tensor | None:
    entry, tags = entry_of(node), cast("torch._ops.OpOverload", node.target).tags
    if isinstance(entry, Filled):
        filled = entry.filled(node, arguments_of(node))
        if not isinstance(filled, int | float):
            return None
        return torch.full([1] * like.dim(), filled, dtype=like.dtype).expand(like.shape)
    large = like.numel() > _MOST and not isinstance(entry, View | Expand)
    if large and torch.Tag.pointwise not in tags:
        return None
    operands = {n: _single(known[n]) if large else known[n] for n in node.all_input_nodes}
    if any(x is None for x in operands.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: cast("Any", operands[n]))
    here = {name: torch.device("cpu") if name == "device" else x for name, x in kwargs.items()}
    found = cast("Any", node.target)(*args, **here)
    return found.expand(like.shape) if large else found


def _single(x: torch.Tensor) -> torch.Tensor | None:
    """The number that all elements are, with one element in each dimension; None for others."""
    for dim, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        x = x.narrow(dim, 0, 1) if n > 1 and step == 0 else x
    if x.numel() > _MOST:
        return None
    first = x[(slice(0, 1),) * x.dim()]
    return first if bool((x == first).all()) else None


def _number(value: torch.Tensor) -> _Number | None:
    one = _single(value)
    return None if one is None else _Number(one.flatten()[0].item())


def _places(value: torch.Tensor) -> _Places | None:
    """Places along one dimension; None if the value is anything else."""
    if value.dtype is torch.bool or value.numel() > _MOST:
        return None
    first = int(value.flatten()[0])
    for dim, extent in enumerate(value.shape):
        shape = [extent if d == dim else 1 for d in range(value.dim())]
        counted = torch.arange(first, first + extent).view(shape)
        if extent > 1 and bool((value == counted).all()):
            return _Places(dim, first)
    return None


# -------------------------------------------------------------------------------------------- nodes


def _node_of(graph: fx.Graph, node: fx.Node, found: _Number | _Places) -> fx.Node:
    """The constant in the place of a node, with what that one is marked with."""
    like = node.meta["val"]
    made = {"dtype": like.dtype, "device": like.device}

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": fake_result(new)}
        return new

    shape = list(like.shape)
    if isinstance(found, _Number):
        return call(_aten.full.default, shape, found.value, **made)
    count, made["requires_grad"] = shape[found.dim], False
    row = call(_prims.iota.default, count, start=found.first, step=1, **made)
    alone = [count if d == found.dim else 1 for d in range(len(shape))]
    return call(_aten.expand.default, call(_aten.view.default, row, alone), shape)
