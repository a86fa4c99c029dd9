"""Functions of scores, as parts of the kernel graph of attention.

A function is traced once, on scores ``[B, H, L, S]`` and on indices that broadcast to them. What
depends on a score becomes part of the kernel graph. What depends on indices only is computed by
PyTorch, and read beside the scores: as small tensors where the kernel can put them together.

before: ``score + slopes[h] * (k - q)``; after: ``scores + a * b`` with ``a[1, H, 1, 1]`` and
``b[1, 1, L, S]``, a forward and two backward kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cutesuper.autodiff.gradient import Split, split
from cutesuper.errors import OperatorError
from cutesuper.ir.dims import Symbol, extent
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT
from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.factored_dims import Mismatch, dims_of, leaves
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Given,
    Shapes,
    Slots,
    Unsupported,
    Value,
    correspondence,
    translated,
)
from cutesuper.torch.aten.table import arguments_of, entry_of
from cutesuper.torch.ops.classes import class_of

#: inputs of the kernel graph that always have gradients
SIDES = ("query", "key", "value")
ScoreMod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """The properties of a call that, with the function, determine its kernel graph.

    Attributes:
        batch, heads, group, rows, keys: extents; query heads for each of the heads of keys.
        width, value_width: of a head.
        dtype: of query, key and value.
        scale: of the products.
        causal: whether all keys behind a row's own place are hidden.
        masked: the extents of a tensor that says what is hidden, if there is one.
        limits: the names of such tensors that are limits of rows, in place of a mask.
    """

    batch: int
    heads: int
    group: int
    rows: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    scale: float
    causal: bool
    masked: tuple[int, ...]
    limits: tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """A function of scores and indices.

    Attributes:
        graph: its operators; the first five inputs are the scores and the indices.
        made: the nodes that PyTorch computes, read by those that depend on scores.
        scores: the nodes that the kernel graph has, in order, without the scores themselves.
    """

    graph: fx.GraphModule
    made: tuple[fx.Node, ...]
    scores: tuple[fx.Node, ...]

    def values(self, indices: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values that PyTorch computes, by name of the node."""
        inputs, found = iter((torch.empty(0), *indices)), dict[fx.Node, Any]()
        needed = reachable(self.made, lambda n: n.all_input_nodes)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                found[node] = next(inputs)
            elif node in needed and node.op == "get_attr":
                found[node] = getattr(self.graph, str(node.target))
            elif node in needed:
                args, options = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **options)  # type: ignore[operator]
        return {n.name: found[n] for n in self.made}


def traced(score_mod: ScoreMod, call: Call, device: torch.device) -> Traced:
    """Trace a function of scores and indices.

    Raises:
        OperatorError: it cannot be traced, or is no function of one score at a time.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shape = (call.batch, call.heads * call.group, call.rows, call.keys)
    scores = torch.zeros((1, 1, 1, 1), device=device).expand(shape)
    try:
        trace = make_fx(score_mod, tracing_mode="fake", _allow_non_fake_inputs=True)
        module = trace(scores, *indices_of(call, device))
    except Exception as error:
        raise OperatorError(
            f"flex_attention: score_mod cannot be traced ({type(error).__name__}: {error}); it is "
            "called with scores [B, H, L, S] and indices that broadcast to them"
        ) from error
    module.graph.eliminate_dead_code()
    first = next(iter(module.graph.nodes))
    depends = set(reachable([first], lambda n: n.users))
    nodes = [n for n in module.graph.nodes if n in depends and n.op == "call_function"]
    for n in nodes:
        if tuple(n.meta["val"].shape) != shape:
            raise OperatorError(
                f"flex_attention: score_mod: {n.target} makes {list(n.meta['val'].shape)} of "
                f"scores {list(shape)}; it must be a function of one score at a time"
            )
    low = _lowered(nodes, depends)
    order = [n for n in module.graph.nodes if n in low or n in nodes]
    made = {i: None for n in order for i in n.all_input_nodes if i not in {*order, first}}
    return Traced(module, tuple(made), tuple(order))


def _lowered(nodes: Sequence[fx.Node], depends: set[fx.Node]) -> set[fx.Node]:
    """The nodes without a score that are larger than their operands.
    Kernels can compute them: they are put together where they are used."""
    found, todo = set[fx.Node](), [i for n in nodes for i in n.all_input_nodes if i not in depends]
    while todo:
        node = todo.pop()
        inputs = node.all_input_nodes
        sizes = [i.meta["val"].numel() for i in inputs if isinstance(i.meta.get("val"), _TENSOR)]
        known = node.op == "call_function" and entry_of(node) is not None and sizes
        if known and node.meta["val"].dtype in FLOATS and node.meta["val"].numel() > sum(sizes):
            found.add(node)
            todo += inputs
    return found


_TENSOR = torch.Tensor


def indices_of(call: Call, device: torch.device) -> list[torch.Tensor]:
    """The indices of sequences, query heads, rows and keys, which broadcast to the scores."""
    return broadcasting((call.batch, call.heads * call.group, call.rows, call.keys), device)


def broadcasting(extents: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """The indices along each dimension, which broadcast to a tensor of these extents."""
    return [
        torch.arange(n, device=device).view([-1 if d == at else 1 for d in range(len(extents))])
        for at, n in enumerate(extents)
    ]


# ------------------------------------------------------------------------------- the kernel graph


@dataclass(frozen=True)
class Program:
    """The kernel graph of a call.

    Attributes:
        graph: the definition, for just the extents of the call.
        wrt: the inputs that have gradients.
        beside: the inputs besides query, key, value: name of the input, of the tensor, its shape
            and element type.
    """

    graph: KernelGraph
    wrt: tuple[str, ...]
    beside: tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]


def passes_of(program: Program, graph: KernelGraph) -> Split:
    """Both passes of a program, for its graph or that for any numbers of rows and keys.

    Gradients take the sum of the products of weights and their cotangents from the result. That of
    a single key is one product.
    """
    key = next(n for n in graph.nodes if n.name == "key")
    return split(graph, program.wrt, save=["lse"] if key.shape[-2] == 1 else ["out", "lse"])


def opened(program: Program, call: Call) -> KernelGraph:
    """The graph of a program for any numbers of rows and keys.

    An extent of one stays a number, since it may stand for a tensor that is repeated. Tensors of a
    single row have no dimension for it, so the one before that of the keys is another one's.
    """
    given, g, values = program.graph, KernelGraph(), list[Tensor]()
    if call.keys == 1:
        return given
    rows, keys = (
        None if n == 1 else Symbol(name, class_of(kind, n))
        for name, kind, n in (("L", "queries", call.rows), ("S", "keys", call.keys))
    )
    for i, n in enumerate(given.nodes):
        if n.operator != INPUT:
            values.append(g.copy_node(given, i, [values[j] for j in n.inputs]))
            continue
        # the last dimensions are those of the scores, but for rows that products take
        places = (rows if n.name == "query" else keys, None) if n.name in SIDES else (rows, keys)
        behind = [d if m is None or d == 1 else m
                  for d, m in zip(n.shape[-2:], places[-len(n.shape) :], strict=True)]  # fmt: skip
        g.nodes.append(replace(n, shape=(*n.shape[:-2], *behind)))
        values.append(g.tensor(len(g.nodes) - 1))
    for i in given.outputs:
        g.mark_output(values[i], given.nodes[i].dtype)
    return g


def program_of(call: Call, function: Traced | None, learned: frozenset[str]) -> Program:
    """The kernel graph of attention with a function of its scores.

    Args:
        call: extents and options.
        function: of the scores.
        learned: names of the values that PyTorch computes and that have a gradient.

    Raises:
        OperatorError: the function has an operator that no kernel graph has.
    """
    try:
        return _Building(call, function).program(learned)
    except (Unsupported, Mismatch) as error:
        raise OperatorError(f"flex_attention: score_mod: {error}") from error


class _Building:
    def __init__(self, call: Call, function: Traced | None) -> None:
        self.call, self.function = call, function
        self.s = Shapes()
        n = (call.batch, call.heads, call.group, call.rows, call.keys)
        b, h, g, rows, keys = map(dims_of, n)
        self.value = Value((b, (*h, *g), rows, keys))
        for one in (b, h, g, rows, keys):
            self.s.whole(one)
        self.parts = b, h, g, rows, keys

    @property
    def slots(self) -> Slots:
        """The labels of the scores, when all dimensions are known."""
        return tuple(tuple(leaves(d)) or None for d in self.parts)

    def program(self, learned: frozenset[str]) -> Program:
        nodes = self._shaped()
        b = Builder(self.s, frozenset())
        g = b.g
        query, key, value = self._sides(b)
        scores = g.mul(g.matmul(query, g.transpose(key)), self.call.scale)
        if self.function is not None:
            scores = self._modified(b, nodes, scores)
        for name in self.call.limits:
            limit = g.new_input(self.call.masked, "int32", name)
            scores = g.limit_mask(scores, limit, lower=name == "starts")
        if self.call.masked and not self.call.limits:
            mask = g.new_input(self.call.masked, self.call.dtype, "mask")
            scores = g.hide(mask, scores)
        if self.call.causal:
            scores = g.causal_mask(scores)
        weights = g.softmax(g.convert(scores, self.call.dtype))
        g.mark_output(g.matmul(weights, value))
        beside = []
        for given, i in zip(b.operands[3:], g.inputs[3:], strict=False):
            shape = tuple(map(extent, g.nodes[i].shape))
            beside.append((g.nodes[i].name, given.node.name, shape, given.dtype))
        own = (name for name, source, _, _ in beside if source in learned)
        return Program(g, (*SIDES, *own), tuple(beside))

    def _sides(self, b: Builder) -> list[Tensor]:
        c = self.call
        shapes = {
            "query": (c.batch, c.heads, c.group, c.rows, c.width),
            "key": (c.batch, c.heads, 1, c.keys, c.width),
            "value": (c.batch, c.heads, 1, c.keys, c.value_width),
        }
        graph, found = fx.Graph(), []
        for name, shape in shapes.items():
            found.append(b.g.new_input(shape, c.dtype, name))
            b.operands.append(Given(graph.placeholder(name), (), c.dtype))
        return found

    def _shaped(self) -> list[fx.Node]:
        if self.function is None:
            return []
        first = next(iter(self.function.graph.graph.nodes))
        self.s.set(first, self.value)
        for node in self.function.made:
            self.s.input(node)
        for node in self.function.scores:
            self.s.set(node, self._entry(node).shape(self.s, node, arguments_of(node)))
        return list(self.function.scores)

    def _modified(self, b: Builder, nodes: Sequence[fx.Node], scores: Tensor) -> Tensor:
        assert self.function is not None
        graph = self.function.graph.graph
        first, end = next(iter(graph.nodes)), next(n for n in graph.nodes if n.op == "output")
        b.set(first, Built(scores, self.slots))
        for node in nodes:
            b.set(node, self._entry(node).build(b, node, arguments_of(node)))
        parts = correspondence(self.value, b.value(end.args[0]))
        return b.tensor(first, end.args[0], translated(self.slots, parts), len(self.slots))

    def _entry(self, node: fx.Node) -> Any:
        entry = entry_of(node)
        if entry is None:
            raise Unsupported(node, f"{node.target} is not an operator of kernel graphs")
        return entry
