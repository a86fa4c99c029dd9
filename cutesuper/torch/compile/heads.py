"""Losses of linear layers in the graphs of Dynamo, whose logits need not be stored.

before::

    logits = linear(x, weight, bias)                    [2, 2048, 128256]
    loss = cross_entropy(logits.float().view(-1, 128256), target)

after::

    loss = linear_cross_entropy(x.reshape(-1, 4096), weight, target, bias)

They are replaced before AOTAutograd differentiates, since the operator has its gradients from the
forward pass. Left alone is whatever else may be seen of the logits: a graph that returns them, too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cutesuper.runtime.programs import KERNEL_DEVICES
from cutesuper.torch.internals import hint_of
from cutesuper.torch.ops.heads.cross_entropy import LEAST_BYTES, linear_cross_entropy

F = torch.nn.functional

_TYPES = (torch.float16, torch.bfloat16)
_CALLS = ("call_function", "call_method")
_VIEWS = ("view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
_WIDER = ("float", "to")
_DIVISIONS, _PRODUCTS = (operator.truediv, torch.div, "div"), (operator.mul, torch.mul, "mul")
_SIGNATURE = inspect.signature(F.cross_entropy)


class _Other(Exception):
    """The graph computes something else."""


@dataclass
class _Chain:
    """The operators from a linear layer to its loss, from the loss on.

    Attributes:
        nodes: those that vanish.
        places: indices of rows of the logits that were taken before they became rows of a matrix.
        softcap: of the logits.
    """

    nodes: list[fx.Node]
    places: list[Any] = field(default_factory=list)
    softcap: float | None = None

    @property
    def linear(self) -> fx.Node:
        """The linear layer."""
        return self.nodes[-1]

    def follow(self, node: Any) -> None:
        """Walk from an operand of the last node to the linear layer. Raises _Other."""
        while True:
            _require(isinstance(node, fx.Node) and len(node.users) == 1 and node.op in _CALLS)
            self.nodes.append(node)
            if node.target is F.linear:
                return
            node = self._before(node)

    def _before(self, node: fx.Node) -> Any:
        """The node that a node changes nothing of but shape, type, rows, or cap."""
        source: Any = node.args[0] if node.args else None
        if node.target in _VIEWS:
            _require(not self.places and _rank(source) and _extent(source) == _extent(node))
        elif node.target in _WIDER:
            _require(_value(node).dtype == torch.float32)
        elif node.target is operator.getitem:
            place: Any = node.args[1]
            own = place if isinstance(place, tuple) else (place,)
            _require(Ellipsis not in own and None not in own)
            _require(len(own) < _rank(source) or own[-1] == slice(None))
            self.places.append(own[: _rank(source) - 1])
        else:
            return self._capped(node)
        return source

    def _capped(self, node: fx.Node) -> Any:
        """The logits of ``softcap * tanh(logits / softcap)``."""
        _require(self.softcap is None and node.target in _PRODUCTS and len(node.args) == 2)
        args: Any = node.args if isinstance(node.args[0], fx.Node) else node.args[::-1]
        tanh, cap = args
        _require(isinstance(cap, float | int) and cap > 0 and _is_only(tanh, ("tanh", torch.tanh)))
        inner = tanh.args[0]
        _require(_is_only(inner, _DIVISIONS) and inner.args[1:] == (cap,))
        self.softcap = float(cap)
        self.nodes += [tanh, inner]
        return inner.args[0]


def take_heads(gm: fx.GraphModule) -> int:
    """Replace losses of linear layers in a graph of Dynamo; returns how many."""
    done = 0
    for node in list(gm.graph.nodes):
        if node.target is F.cross_entropy:
            try:
                _take(gm.graph, node)
                done += 1
            except _Other:
                continue
    if done:
        gm.graph.lint()
        gm.recompile()
    return done


def _take(graph: fx.Graph, loss: fx.Node) -> None:
    """Replace a loss. Raises _Other, before anything is changed."""
    given = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    given.apply_defaults()
    options = given.arguments
    for name in ("weight", "size_average", "reduce"):
        _require(options[name] is None)
    target = options["target"]
    _require(isinstance(target, fx.Node) and not _value(target).is_floating_point())
    _require(_rank(options["input"]) == 2 and _rank(target) == 1)
    chain = _Chain([loss])
    chain.follow(options["input"])
    logits = _value(chain.linear)
    _require(logits.dtype in _TYPES and logits.device.type in KERNEL_DEVICES)
    _require(_bytes(logits) >= LEAST_BYTES and _is_pure_between(graph, chain))
    with graph.inserting_before(loss):
        made = _replacement(graph, chain, options, logits.dtype)
        if _value(loss).dtype != torch.float32:
            made = graph.call_method("to", (made, _value(loss).dtype))
    loss.replace_all_uses_with(made)
    for node in chain.nodes:
        graph.erase_node(node)


def _replacement(
    graph: fx.Graph, chain: _Chain, options: dict[str, Any], dtype: torch.dtype
) -> fx.Node:
    args = chain.linear.args
    x, weight, bias = (*args, *(chain.linear.kwargs.get(n) for n in ("bias",)[: 3 - len(args)]))
    width = _extent(x)
    for place in reversed(chain.places):
        x = graph.call_function(operator.getitem, (x, place))
    x = graph.call_method("reshape", (x, (-1, width)))
    parts = [t if t is None else graph.call_method("to", (t, dtype)) for t in (x, weight, bias)]
    kept = {n: options[n] for n in ("ignore_index", "label_smoothing", "reduction")}
    return graph.call_function(
        linear_cross_entropy,
        (parts[0], parts[1], options["target"], parts[2]),
        {**kept, "softcap": chain.softcap},
    )


def _is_pure_between(graph: fx.Graph, chain: _Chain) -> bool:
    """True if nothing between layer and loss writes to a tensor, or turns gradients on or off."""
    nodes = list(graph.nodes)
    between = nodes[nodes.index(chain.linear) : nodes.index(chain.nodes[0])]
    targets = (n.target for n in between if n.op in _CALLS)
    names = [t if isinstance(t, str) else getattr(t, "__name__", "") for t in targets]
    return not any(
        (name.endswith("_") and not name.endswith("__"))
        or name in ("setitem", "iadd", "isub", "imul", "itruediv")
        or "grad_enabled" in name
        for name in names
    ) and not any("out" in n.kwargs for n in between)


def _require(holds: Any) -> None:
    if not holds:
        raise _Other


def _is_only(node: Any, targets: tuple[str | Callable[..., Any], ...]) -> bool:
    """True if a node has one of these targets, and one user."""
    return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1


def _value(node: Any) -> torch.Tensor:
    """The fake tensor of a node. Raises _Other."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(found, torch.Tensor):
        raise _Other
    return found


def _rank(node: Any) -> int:
    return _value(node).dim()


def _extent(node: Any) -> Any:
    """The last extent of a tensor."""
    return _value(node).shape[-1]


def _bytes(t: torch.Tensor) -> int:
    count = hint_of(t.numel())
    return 0 if count is None else count * t.element_size()
