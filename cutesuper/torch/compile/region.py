"""Regions: parts of a traced program that are kernel graphs.

`convert` makes the kernel graph of some compute nodes. Views and casts between them are seen
through, and those in front of them as well, so a region reads parameters as they are stored.
Tensors that cross its border are described by shapes: a kernel takes and returns contiguous
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx

from cutesuper.errors import CutesuperError
from cutesuper.ir import border
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import CONSTANT, INPUT, Counts
from cutesuper.ir.relations import reachable
from cutesuper.ir.subgraph import only
from cutesuper.pipeline import check_definition
from cutesuper.torch.aten.factored_dims import (
    Extent,
    Mismatch,
    equal,
    equal_shapes,
    extent_of,
    leaves,
)
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    INTEGERS,
    Builder,
    Built,
    Given,
    Shapes,
    Unsupported,
    Value,
    Within,
    copied_order,
    explain,
    fake,
    is_dense,
    memory_order,
    placed_ones,
)
from cutesuper.torch.aten.length_masks import reads
from cutesuper.torch.aten.table import (
    arguments_of,
    entry_of,
    is_extreme,
    is_free,
    products,
    unknown,
)
from cutesuper.torch.aten.views import is_negated, only_reader


@dataclass(frozen=True)
class Size:
    """An extent that is read from an operand of the region at the call.

    Attributes:
        node: the operand.
        dim: which of its extents.
    """

    node: fx.Node
    dim: int


#: an extent of a view: a number, -1 for the remainder, or read from a tensor
Length = int | Size


@dataclass(frozen=True)
class Operand:
    """An input of the kernel graph.

    Attributes:
        node: the tensor that it is made from.
        order: its dimensions, slowest in memory first.
        copied: whether it has gaps or repeats, so that it must be copied first.
        shape: of its view; -1 for its first extent that is known at the call.
        dtype: of the input; the tensor is converted if it has another one.
        part: the range along the first extent of the view that the kernel takes; None for all.
        lengths, fill: see `cutesuper.torch.aten.graph_builder.Given`.
        limits: see `cutesuper.torch.aten.graph_builder.Builder`; None for no indices.
    """

    node: fx.Node
    order: tuple[int, ...]
    copied: bool
    shape: tuple[Length, ...]
    dtype: torch.dtype
    part: tuple[int, int] | None
    lengths: tuple[int, int] | None = None
    limits: Within | None = None
    fill: int | None = None


@dataclass(frozen=True)
class Result:
    """An output of the kernel graph, for one node.

    Attributes:
        node: whose tensor it is.
        place: which output.
        shape: of a first view, with the dimensions that repeat as extents of 1.
        expanded: these dimensions at full extent; None if none repeats.
        order: for each dimension of the node, the one of that view.
    """

    node: fx.Node
    place: int
    shape: tuple[Length, ...]
    expanded: tuple[Length, ...] | None
    order: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Compute nodes of a traced program, and their kernel graph.

    Attributes:
        nodes: those that compute, in order.
        graph: the definition, of contiguous tensors.
        inputs: of the graph, in order.
        outputs: the nodes that are used outside.
        parts: true if its kernels may work on parts of its inputs and outputs.
        extents: of PyTorch for the symbolic extents of the graph, in the order of its inputs.
    """

    nodes: tuple[fx.Node, ...]
    graph: KernelGraph
    inputs: tuple[Operand, ...]
    outputs: tuple[Result, ...]
    parts: bool = False
    extents: tuple[Any, ...] = ()

    @cached_property
    def key(self) -> str:
        """The graph as text; equal for equal layers of a model."""
        from cutesuper.ir.serial import dumps

        return dumps(self.graph)

    @cached_property
    def follows(self) -> bool:
        """True if every call of the traced program launches a kernel before those of the region.
        A product of an argument that an operand depends on: no compiler leaves that out."""
        made = reachable((o.node for o in self.inputs), lambda n: n.all_input_nodes)
        return any(products(n) and _depends_on_arguments(n) for n in made)

    @property
    def constants(self) -> set[fx.Node]:
        """The nodes of inputs that are not written while kernels run."""
        given = zip(self.inputs, self.graph.inputs, strict=True)
        return {o.node for o, i in given if self.graph.nodes[i].constant}

    @property
    def border(self) -> tuple[fx.Node, ...]:
        """The nodes whose tensors enter or leave it."""
        return (*(o.node for o in self.inputs), *(r.node for r in self.outputs))

    @property
    def products(self) -> int:
        """The number of products of matrices."""
        kinds = [n.operator for n in self.graph.nodes]
        return kinds.count("matmul") + 2 * kinds.count("scaled_dot_product_attention")

    @property
    def reduces(self) -> bool:
        """True if it does more than element-wise work."""
        computed = (n.facets for n in self.graph.nodes if n.operator != INPUT)
        return any(not (f.elementwise or f.permutes or f.gathers) for f in computed)

    @property
    def forward_only(self) -> bool:
        """True if PyTorch computes a part of it where gradients are recorded.
        Rows of tables, to which no kernel adds, and the largest elements along one dimension."""
        rows = any(n.facets.counts == Counts.ROWS for n in self.graph.nodes)
        return rows or any(is_extreme(n) for n in self.nodes)

    @property
    def place(self) -> str:
        """The lines of the region in the user's program: ``model.py:12-18``."""
        return places(self.nodes)


def _depends_on_arguments(node: fx.Node) -> bool:
    made = reachable([node], lambda n: n.all_input_nodes)
    return any(n.op == "placeholder" for n in made)


def convert(
    nodes: Sequence[fx.Node], constants: Collection[fx.Node] = (), parts: bool = False
) -> Region:
    """The region of some compute nodes.

    Args:
        nodes: in the order of the graph; nothing between them is computed outside.
        constants: nodes that are not written while kernels run.
        parts: see `Region`. Without, views that cut tensors, and copies that put them together,
            stay outside.

    Raises:
        Unsupported: naming the node and the reason.
    """
    inside = _Inside(frozenset(nodes))
    try:
        return _converted(nodes, constants, parts, inside)
    except Unsupported as error:
        if not inside.front:  # it would be refused again
            raise
        # with the shapes and types of its inputs after the views and casts in front of the region
        try:
            return _converted(nodes, constants, parts, _Inside(frozenset(nodes), through=False))
        except Unsupported:
            raise error from None


def _converted(
    nodes: Sequence[fx.Node], constants: Collection[fx.Node], parts: bool, inside: _Inside
) -> Region:
    shapes = Shapes()
    order: list[fx.Node] = []
    for n in nodes:
        _visit(n, inside, shapes, order)
    ends = _ends(nodes, inside, shapes, order)
    wholes = {n: r for n in shapes.inputs if (r := _root(n)) is not None} if parts else {}
    entries = [_entry(n) for n in nodes]
    strided, open_rows = any(e.strided for e in entries), any(e.open_rows for e in entries)
    b = Builder(shapes, frozenset(constants), wholes, strided, open_rows)
    for n in order:
        try:
            b.set(n, _entry(n).build(b, n, arguments_of(n)))
        except (Mismatch, CutesuperError, Unsupported) as error:
            raise explain(n, error) from None
    try:
        outputs = _outputs(b, ends)
        # parts of weights are inputs of their own, so the whole may no longer be needed
        graph, kept = only(b.g, range(len(b.g.outputs)))
        if not border.inside(graph.expanded())[1].whole and not parts:
            raise Unsupported(nodes[-1], "takes a part of a tensor that a kernel reads whole")
        if graph.joins_sums:
            raise Unsupported(nodes[-1], "joins what depends on sums over the pieces that it joins")
        check_definition("trace", graph)
    except (Mismatch, CutesuperError, Unsupported) as error:
        raise explain(nodes[-1], error) from None
    try:
        inputs = tuple(_input_view(b, b.operands[n]) for n in kept)
    except Mismatch as error:
        raise explain(nodes[-1], error) from None
    return Region(tuple(nodes), graph, inputs, outputs, parts, b.extents(graph))


@dataclass(frozen=True)
class _Inside:
    """Membership of nodes in the region.

    Attributes:
        nodes: that compute.
        through: views and casts in front of these belong to it too.
        front: those that were met and do.
    """

    nodes: frozenset[fx.Node]
    through: bool = True
    front: set[fx.Node] = field(default_factory=set)

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def sees_through(self, node: fx.Node) -> bool:
        """True for a node that computes nothing and is part of the region.

        A cast to a narrower type in front of the region is not part of it: the region that computes
        its operand may then store only the cast."""
        if not is_free(node):
            return False
        if self.depends(node):
            return True
        if any(_narrows(node, n) for n in node.all_input_nodes):
            return False
        if not _entry(node).changes:
            return True
        if self.through:
            self.front.add(node)
        return self.through

    def depends(self, node: fx.Node) -> bool:
        """True for a view of something in the region."""
        return any(
            n in self.nodes or (is_free(n) and self.depends(n)) for n in node.all_input_nodes
        )


def _entry(node: fx.Node) -> Any:
    entry = entry_of(node)
    if entry is None:
        raise Unsupported(node, unknown(node))
    return entry


def _visit(node: fx.Node, inside: _Inside, s: Shapes, order: list[fx.Node]) -> None:
    """Give a node its dimensions, after its operands."""
    if node in s.values:
        return
    if node not in inside and not inside.sees_through(node):
        s.input(node)
        return
    known = len(order), len(s.values)
    try:
        for operand in reads(node):
            if not _is_number(operand):
                _visit(operand, inside, s, order)
        s.set(node, _entry(node).shape(s, node, arguments_of(node)))
        order.append(node)
    except (Mismatch, CutesuperError, Unsupported) as error:
        if node in inside or inside.depends(node):
            raise explain(node, error) from None
        _forget(s, order, known)  # a view of something outside is an input as it is
        s.input(node)


def _is_number(node: fx.Node) -> bool:
    """True for symbolic integers, which are arguments of views.
    The shape of the result gives them."""
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def _forget(s: Shapes, order: list[fx.Node], known: tuple[int, int]) -> None:
    del order[known[0] :]
    for n in list(s.values)[known[1] :]:
        del s.values[n]


# ----------------------------------------------------------------------------------------- borders


def _ends(
    nodes: Sequence[fx.Node], inside: _Inside, s: Shapes, order: list[fx.Node]
) -> list[fx.Node]:
    """The nodes whose tensors leave the region: computed ones, or casts of them."""
    found: dict[fx.Node, None] = {}
    for n in (r for node in nodes for r in _roots(node)):
        crossing = [last for last, _ in _uses(n, n, inside)]
        types = {c.meta["val"].dtype for c in crossing}
        if len(types) == 1 and types != {n.meta["val"].dtype}:
            for cast in dict.fromkeys(crossing):
                _visit(cast, inside, s, order)
                found[cast] = None
        elif crossing:
            if n not in inside:
                _visit(n, inside, s, order)
            found[n] = None
    if not found:
        raise Unsupported(nodes[-1], "computes nothing that is used")
    return list(found)


def _roots(node: fx.Node) -> list[fx.Node]:
    """A node, or the used results of a node that has several."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [u for u in node.users if isinstance(u.meta.get("val"), torch.Tensor)]


def _dtype(node: fx.Node) -> Any:
    """The element type of a node's tensor; None if it has several."""
    return getattr(node.meta.get("val"), "dtype", None)


def _is_place(node: fx.Node) -> bool:
    """True for places of elements, with which kernels do not go on."""
    source = node.all_input_nodes[0] if node.target is getitem else node
    entry = entry_of(source)
    return _dtype(node) in INTEGERS and entry is not None and entry.finds_places


def _narrows(cast: fx.Node, node: fx.Node) -> bool:
    """True if a node has smaller elements than another one."""
    new, old = _dtype(cast), _dtype(node)
    return new is not None and old is not None and new.itemsize < old.itemsize


def _uses(node: fx.Node, last: fx.Node, inside: _Inside) -> Iterator[tuple[fx.Node, fx.Node]]:
    for user in node.users:
        if user in inside or (is_negated(user) and only_reader(user) in inside):
            continue
        if is_free(user) and user.op == "call_function" and not _is_place(node):
            yield from _uses(user, user if _narrows(user, last) else last, inside)
        else:
            yield last, user


def _outputs(b: Builder, ends: Sequence[fx.Node]) -> tuple[Result, ...]:
    places: dict[int, int] = {}
    results: list[Result] = []
    for node in ends:
        t, view = _output(b, node, len(places))
        if t.index not in places:
            b.g.mark_output(t, fake(node).dtype)
            places[t.index] = len(places)
        elif b.g.nodes[t.index].dtype.torch != fake(node).dtype:
            raise Unsupported(node, "leaves in two element types")
        results.append(replace(view, place=places[t.index]))
    return tuple(results)


def _output(b: Builder, node: fx.Node, place: int) -> tuple[Tensor, Result]:
    built, value, t = b.of(node), b.value(node), fake(node)
    if isinstance(built, Built) and built.condition:
        raise Unsupported(
            node,
            "is a condition that leaves the region, and kernels write numbers; "
            "make it one with torch.where or .to()",
        )
    tensor = built.tensor if isinstance(built, Built) else None
    if t.dtype not in FLOATS and not (isinstance(tensor, Tensor) and tensor.dtype.integer):
        raise Unsupported(node, f"is {t.dtype}")
    if not isinstance(built, Built) or not isinstance(tensor, Tensor):
        raise Unsupported(node, "leaves the region, and no kernel computes it as a tensor")
    order = memory_order(t)
    if order is None:
        raise Unsupported(node, "has a result with gaps in memory")
    absent = set(leaves(value.absent))
    wanted = b.groups(tuple(p for d in order for p in leaves(value.dims[d]) if p not in absent))
    have = tuple(s for s in built.slots if s is not None)
    if have != wanted:
        tensor = b.tensor(
            node,
            node,
            (*(None,) * (len(built.slots) - len(wanted)), *wanted),
            rank=len(built.slots),
        )
    if tensor.node.operator in (INPUT, CONSTANT):
        raise Unsupported(node, "is an input in another shape")
    order = placed_ones(t, order)
    stored = [_extents(value, d, absent) for d in order]
    shape, full = ([pair[i] for pair in stored] for i in range(2))
    expanded = None if equal_shapes(shape, full) else tuple(_length(b, n) for n in full)
    inverse = tuple(order.index(d) for d in range(len(order)))
    return tensor, Result(node, place, _left(b, shape), expanded, inverse)


def _extents(value: Value, d: int, absent: set[Any]) -> tuple[Extent, Extent]:
    """The extent of a dimension of a view, without and with repeated elements."""
    own = leaves(value.dims[d])
    there = [p for p in own if p not in absent]
    if there and len(there) != len(own):
        raise Mismatch("a dimension of which a part repeats")
    full = extent_of(own)
    return (full if there or not own else 1), full


def _length(b: Builder, extent: Extent) -> Length:
    if isinstance(extent, int):
        return extent
    for given in b.operands:
        for d, n in enumerate(fake(given.node).shape):
            if equal(n, extent):
                return Size(given.node, d)
    raise Mismatch(f"an extent of {extent}, which no input of the region has")


def _left(b: Builder, shape: Sequence[Extent]) -> tuple[Length, ...]:
    """The extents of a view, with -1 for the first that is known at the call, the remainder.
    Raises Mismatch for another one that no tensor has."""
    first = next((i for i, n in enumerate(shape) if not isinstance(n, int)), None)
    return tuple(-1 if i == first else _length(b, n) for i, n in enumerate(shape))


def _input_view(b: Builder, given: Given) -> Operand:
    t = fake(given.node)
    extents = [1 if s is None else extent_of(s) for s in given.slots]
    if given.whole is not None:
        shape = tuple(-1 if isinstance(n, Symbol) else n for n in given.whole)
    elif given.fill is None and given.lengths is None:
        shape = _left(b, extents)
    else:
        shape = tuple(_length(b, n) for n in extents)
    copied = memory_order(t) is None
    limits = b.limits.get(given.node) if given.dtype == t.dtype and not given.lengths else None
    return Operand(
        given.node, tuple(copied_order(t)), copied, shape, given.dtype, given.part, given.lengths,
        limits,
        given.fill,
    )  # fmt: skip


def _root(node: fx.Node) -> fx.Node | None:
    """The tensor without gaps of which a node with gaps is a view; None for any other node."""
    if memory_order(fake(node)) is not None:
        return None
    root, dtype = node, fake(node).dtype
    while is_free(root) and len(root.all_input_nodes) == 1:
        [root] = root.all_input_nodes
    val = root.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype != dtype or not is_dense(val):
        return None
    return root if _shares_memory(val, fake(node)) else None


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def places(nodes: Iterable[fx.Node]) -> str:
    """``model.py:12-18``: the user's lines that some nodes were traced from."""
    found: dict[str, list[int]] = {}
    for n in nodes:
        for file, line in source_lines(n)[-1:]:
            found.setdefault(file, []).append(line)
    parts = []
    for file, lines in found.items():
        first, last = min(lines), max(lines)
        name = file.rsplit("/", 1)[-1]
        parts.append(f"{name}:{first}" + (f"-{last}" if last > first else ""))
    return ", ".join(parts)


def names_read(region: Region, name: Callable[[fx.Node], str]) -> Iterator[str]:
    """The user's names of the tensors that a region reads, in the order of its graph.
    ``name`` is that of an argument or a parameter; other tensors have the lines that make them."""
    for operand in region.inputs:
        node = operand.node
        made = node.op == "call_function" and places([node])
        range_ = f"[{operand.part[0]}:{operand.part[1]}]" if operand.part else ""
        yield f"{f'a value of {made}' if made else name(node)}{range_}"


#: parts of the names of files that are not the user's
_NOT_THE_USERS = ("/torch/", "/cutesuper/torch/", "<eval_with_key>")


def source_lines(node: fx.Node) -> list[tuple[str, int]]:
    """File and line of every frame that a node was traced from, outermost first.
    Those inside of PyTorch and of this package's tracing, and generated code, are left out."""
    trace = node.meta.get("stack_trace") or ""
    found: list[tuple[str, int]] = []
    for row in trace.splitlines():
        parts = row.strip().split('"')
        if len(parts) == 3 and row.strip().startswith("File"):
            number = parts[2].split("line ")[-1].split(",")[0]
            if number.isdigit() and not any(p in parts[1] for p in _NOT_THE_USERS):
                found.append((parts[1], int(number)))
    return found
