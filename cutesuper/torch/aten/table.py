"""The table of PyTorch's operators: one entry for each that a kernel graph can express.

An entry gives the dimensions of its result (`Entry.shape`, see `graph_builder`) and its kernel
graph (`Entry.build`). Both see the program after tracing, where an operator is one overload
of ``torch.ops``: composite ones (``aten.linear``, ``aten.rms_norm``) as ``torch.export`` leaves
them, and the primitive ones into which Inductor decomposes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from operator import getitem
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import fx

from cutesuper.ir.operators.base import TABLE, Operator
from cutesuper.ir.relations import reachable
from cutesuper.torch.aten.graph_builder import CONDITIONS, FLOATS, Builder, Shapes, Unsupported
from cutesuper.torch.internals import written

Arguments = dict[str, Any]


class Entry:
    """An operator.

    Attributes:
        changes: for an operator that computes nothing: it changes shapes or element types. A region
            that cannot see through it reads its result.
        products: the number of products of matrices that it stands for.
        unread: names of arguments whose elements make no difference.
        finds_places: it has places of elements as a result, or among its results.
        strided: its kernels need strides that are numbers: of what they read only the outermost
            extent may be known at the call.
        open_rows: its kernels take rows of any extent, too.
    """

    changes: ClassVar[bool] = False
    products: ClassVar[int] = 0
    unread: ClassVar[tuple[str, ...]] = ()
    finds_places: ClassVar[bool] = False
    strided: ClassVar[bool] = False
    open_rows: ClassVar[bool] = False

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        """False for arguments with which no kernel graph has the operator.
        It is then as one without an entry."""
        del node, a
        return True

    def free(self, a: Arguments) -> bool:
        """True if the operator computes nothing (a view, a cast).
        Its readers see through it."""
        del a
        return False

    def reads(self, node: fx.Node, a: Arguments) -> list[fx.Node]:
        """The nodes whose values a kernel needs in place of this one's operands."""
        unread = [a.get(name) for name in self.unread]
        return [n for n in node.all_input_nodes if n not in unread]

    def rows(self, a: Arguments) -> Any:
        """The row operand of a product; None for other operators."""
        del a

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        """The `Value` of its result, or a tuple of them. Raises Unsupported, Mismatch."""
        raise NotImplementedError

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        """The operator in the kernel graph (`Built`, or a tuple).
        Raises Unsupported, Mismatch and errors of the graph."""
        raise NotImplementedError


_TABLE: dict[str, Entry] = {}

#: the modules that define entries
_MODULES = (
    "attention", "gathers", "losses", "masked", "pointwise", "products", "reducing", "views"
)  # fmt: skip


_Class = TypeVar("_Class", bound=Entry)
_Found = TypeVar("_Found")


def enter(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """Class decorator: an instance is the entry of these operators (``aten.add.Tensor``)."""

    def add(cls: type[_Class]) -> type[_Class]:
        _TABLE.update(dict.fromkeys(names, cls()))
        return cls

    return add


def enter_all(entries: dict[str, Entry]) -> None:
    """Enter operators whose entries differ only in the arguments that they were made with."""
    _TABLE.update(entries)


@cache
def _load() -> None:
    for name in _MODULES:
        import_module(f"cutesuper.torch.aten.{name}")


def is_known(operator: object) -> bool:
    """True for an operator of PyTorch that has an entry, or that `moves` knows."""
    return _find(str(operator)) is not None or str(operator) in _MOVES


def _find(name: str) -> Entry | None:
    """The entry of an operator: its own, or that of the kernel graph's operator that names it."""
    _load()
    operators = (o for o in TABLE.values() if name in o.torch_names)
    return _TABLE.get(name) or next(map(_made, operators), None)


def _made(operator: Operator) -> Entry:
    from cutesuper.torch.aten.pointwise import of_function
    from cutesuper.torch.aten.reducing import of_reduction

    return of_function(operator.name) if operator.elementwise else of_reduction(operator.name)


#: operators that only move or select elements, and compute no number
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "cat.default",
        "index.Tensor",
        "index_select.default",
        "gather.default",
        "embedding.default",
        "roll.default",
        "flip.default",
        "constant_pad_nd.default",
        "pad.default",
        "select_scatter.default",
        "slice_scatter.default",
        "diagonal_scatter.default",
        "index_put.default",
        "index_fill.int_Scalar",
        "scatter.src",
        "scatter.value",
        "masked_scatter.default",
        "sort.default",
        "sort.stable",
        "topk.default",
        "kthvalue.default",
        "median.dim",
        "cummax.default",
        "cummin.default",
        "slice.Tensor",
        "diagonal.default",
        "unfold.default",
        "copy.default",
        "tril.default",
        "triu.default",
        "as_strided.default",
        "view_as_real.default",
        "view_as_complex.default",
    )
)


#: operators that are lowered where no gradient is recorded: PyTorch gives it to the first of
#: several equal elements, a kernel would to all of them
_EXTREMES = ("aten.max.dim", "aten.min.dim")


def moves(node: fx.Node) -> bool:
    """True for a node that only moves elements."""
    if node.op != "call_function":
        return False
    if is_extreme(node):
        return records((node,))
    return str(node.target) in _MOVES and not arguments_of(node).get("accumulate")


def is_extreme(node: fx.Node) -> bool:
    """True for the largest or smallest elements along one dimension, and their indices."""
    return str(node.target) in _EXTREMES


def reads_places(node: fx.Node) -> bool:
    """True if the second result of an operator, the indices of its elements, is used."""
    return any(u.target is not getitem or u.args[1] == 1 for u in node.users)


def records(nodes: Iterable[fx.Node]) -> bool:
    """True if one of these is computed from a tensor with a gradient."""
    nodes = tuple(nodes)
    if not any(_has_gradients(n.graph) for n in nodes):
        return False  # what a step of 26 layers computes a cache from took half of cutting it
    return any(map(_has_gradient, reachable(nodes, lambda n: n.all_input_nodes)))


def _has_gradient(node: fx.Node) -> bool:
    t = node.meta.get("val")
    return isinstance(t, torch.Tensor) and t.requires_grad


#: for graphs of so many nodes, whether one has a gradient
_gradients = WeakKeyDictionary[fx.Graph, tuple[int, bool]]()


def _has_gradients(graph: fx.Graph) -> bool:
    count, found = _gradients.get(graph, (-1, False))
    if count != len(graph.nodes):
        found = any(map(_has_gradient, graph.nodes))
        _gradients[graph] = len(graph.nodes), found
    return found


#: what to write in place of operators without an entry, if that is short
_INSTEAD = {
    "aten._trilinear.default": 'torch.einsum("bi,oij,bj->bo", x, weight, y)',
}


def unknown(node: fx.Node) -> str:
    """The reason why a node without an entry is in no region, and another way to write it."""
    instead = _INSTEAD.get(str(node.target))
    hint = f"; write it as {instead}" if instead else ""
    return f"{written(node)} is not an operator of kernel graphs{hint}"


#: what functions of nodes gave, while graphs stay as they are
_kept: ContextVar[dict[Callable[..., Any], dict[fx.Node, Any]] | None] = ContextVar(
    "kept", default=None
)


@contextmanager
def unchanged() -> Iterator[None]:
    """Have functions `of_a_node` look at each node once, since no graph is changed meanwhile.
    Regions grow node by node, and all of their nodes are converted each time."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def of_a_node(find: Callable[[fx.Node], _Found]) -> Callable[[fx.Node], _Found]:
    """Decorator: what a function gives for a node is kept while graphs are `unchanged`."""

    @wraps(find)
    def found(node: fx.Node) -> _Found:
        kept = _kept.get()
        if kept is None:
            return find(node)
        known = kept.setdefault(find, {})
        if node not in known:
            known[node] = find(node)
        return known[node]

    return found


@of_a_node
def entry_of(node: fx.Node) -> Entry | None:
    """The entry of a node's operator, or None."""
    if node.op != "call_function":
        return None
    entry = _find(_name(node.target))
    return entry if entry is not None and entry.knows(node, arguments_of(node)) else None


@cache
def _name(target: Any) -> str:
    whole = isinstance(target, torch._ops.OpOverload)
    return str(target) if whole else getattr(target, "__name__", "")


def products(node: fx.Node) -> int:
    """The number of products of matrices in a node."""
    entry = entry_of(node)
    return 0 if entry is None else entry.products


def readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read a node, through views."""
    found = reachable(node.users, lambda n: n.users if is_free(n) else ())
    return {n for n in found if not is_free(n)}


def rows_of(node: fx.Node) -> fx.Node | None:
    """The row operand of a product, through views; None for other operators."""
    entry = entry_of(node)
    found = None if entry is None else entry.rows(arguments_of(node))
    return viewed(found) if isinstance(found, fx.Node) else found


def viewed(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, through casts too; itself for any other node."""
    while is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@of_a_node
def is_free(node: fx.Node) -> bool:
    """True for a view, or a cast between types that kernels read."""
    entry = entry_of(node)
    if entry is None or not entry.free(arguments_of(node)):
        return False
    val = node.meta.get("val")
    return not isinstance(val, torch.Tensor) or val.dtype in (*FLOATS, *CONDITIONS)


@of_a_node
def arguments_of(node: fx.Node) -> Arguments:
    """The arguments of a node by name, defaults filled in.
    Those of a function of Python (``operator.getitem``) are ``a0``, ``a1``, ..."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {f"a{i}": a for i, a in enumerate(node.args)}
    given = _parameters(node.target)
    found = {p.name: a for p, a in zip(given, node.args, strict=False)}
    for p in given[len(node.args) :]:
        if p.name in node.kwargs:
            found[p.name] = node.kwargs[p.name]
        elif p.has_default:
            found[p.name] = p.default
    return found


class _Parameter(NamedTuple):
    name: str
    has_default: bool
    default: Any


@cache
def _parameters(operator: torch._ops.OpOverload) -> tuple[_Parameter, ...]:
    """The parameters of an operator, positional ones first; PyTorch makes them anew each time."""
    return tuple(
        _Parameter(a.name, a.has_default_value(), a.default_value)
        for a in operator._schema.arguments
    )


def number(node: fx.Node, value: Any) -> float:
    """A number of the program. Raises Unsupported for one that is known only at the call."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(
            node, f"takes {value!r}, which is no number that is known when it is traced"
        )
    return float(value)


def integers(node: fx.Node, values: Any) -> list[int]:
    """A list of integers, also from a single integer. Raises Unsupported."""
    values = [values] if isinstance(values, int) else values
    if not isinstance(values, list | tuple) or not all(type(v) is int for v in values):
        raise Unsupported(node, f"takes {values!r}, which is not known when it is traced")
    return list(values)
