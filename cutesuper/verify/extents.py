"""Small extents at which a structure is verified.

A muGraph is checked with 3 iterations per loop, 3 blocks per cluster, 2 parts per grid axis and 2
elements per tile. The kernels of a muGraph and the kernel graph must agree on the extents that they
share, so dimensions are first gathered into classes: two dimensions are of one class when the
kernel graph or a block program needs them to be equal. A class then gets the least extent that
every block program with such a label can split as required.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from cutesuper.errors import GraphError
from cutesuper.ir.block import AxisKind, BlockOp, BlockProgram, MuGraph, mapped_labels
from cutesuper.ir.dims import Dim, ceil_div, extent
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import INPUT, TABLE, Counts, each, lookup
from cutesuper.ir.operators.index import row_dims
from cutesuper.ir.relations import Classes

#: parts of an axis; 3 where an order or "all but one" could go unnoticed with 2
PARTS = {AxisKind.GRID: 2, AxisKind.CLUSTER: 3, AxisKind.PERSISTENT: 2, AxisKind.LOOP: 3}
TILE = 2
#: extent of a reduced dimension that no axis splits: with two elements, the squares of their
#: differences from the mean are equal, and the largest is the mean (a wrong LayerNorm was accepted)
WHOLE = 3
#: limit on the rounds until all masks have enough columns
_ROUNDS = 6

_Shape = tuple[int, ...]
_Node = tuple[Any, ...]
_ONE: _Node = ("one",)


@dataclass(frozen=True)
class Sizes:
    """Concrete extents for a kernel graph and a muGraph.

    Attributes:
        inputs: shape of every input.
        tensors: shape of every tensor of the muGraph, by name.
        programs: the block program of every step, resized.
    """

    inputs: tuple[_Shape, ...]
    tensors: dict[str, _Shape]
    programs: tuple[BlockProgram, ...]


def real_sizes(mu: MuGraph) -> Sizes:
    """The original extents of the muGraph; symbols count with their hint."""
    tensors = {n: tuple(map(extent, t.shape)) for n, t in mu.tensors.items()}
    inputs = tuple(tensors[n] for n in mu.inputs)
    return Sizes(inputs, tensors, tuple(_concrete(s.program) for s in mu.steps))


def _concrete(program: BlockProgram) -> BlockProgram:
    dims: dict[str, Dim] = {d: extent(n) for d, n in program.dims.items()}
    return program.resized(dims, {a.name: program.parts(a) for a in program.axes}, program.tile)


def resized_graph(graph: KernelGraph, inputs: tuple[_Shape, ...]) -> KernelGraph:
    """A graph of the same operators on inputs of other shapes.
    Raises ShapeError if they do not fit.

    A mask may have more rows than columns here, and what is turned an odd extent, which a newly
    built graph may not.
    """
    g = KernelGraph()
    shapes = iter(inputs)
    for n in graph.nodes:
        if n.operator == INPUT:
            g.new_input(next(shapes), n.dtype, n.name)
        elif lookup(n.operator).masks or lookup(n.operator).turns:
            same = g.nodes[n.inputs[0]]
            g.nodes.append(replace(n, shape=same.shape, dtype=same.dtype))
        else:
            g.apply(n.operator, *(g.tensor(j) for j in n.inputs), **dict(n.attributes))
    g.outputs = list(graph.outputs)
    return g


class SizeChooser:
    """Chooses `Sizes` for muGraphs of one (expanded) kernel graph."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self._source = Classes[_Node]()
        for i in range(len(graph.nodes)):
            _join_node(self._source, graph, i)

    def small(self, mu: MuGraph, ragged: bool) -> Sizes:
        """Small extents; ``ragged``: the last tile of every label reaches past its end.

        Raises:
            GraphError: no extents suit all kernels.
        """
        classes = self._source.copy()
        _join_mugraph(classes, self.graph, mu)
        pages = _pages(classes, self.graph, mu)
        extents, axes = self._extents(classes, mu, pages)
        exact = {classes.find(n) for dim, nodes in _shared(mu) for n in (dim, *nodes)}
        tied = _tied(classes, axes, exact, pages)
        if ragged:
            shown = {
                c: n - 1 if n > TILE and c not in tied and c != classes.find(_ONE) else n
                for c, n in extents.items()
            }
        else:
            shown = extents

        def size(node: _Node) -> int:
            return shown.get(classes.find(node), TILE)

        g = self.graph
        inputs = tuple(
            tuple(size(("s", i, d)) for d in range(len(g.nodes[i].shape))) for i in g.inputs
        )
        tensors = {
            n: tuple(size(("t", n, d)) for d in range(len(t.shape))) for n, t in mu.tensors.items()
        }
        programs = tuple(
            _resize(s.program, k, classes, extents, shown, axes, exact if ragged else None)
            for k, s in enumerate(mu.steps)
        )
        return Sizes(inputs, tensors, programs)

    def _extents(
        self, classes: Classes[_Node], mu: MuGraph, pages: list[tuple[_Node, list[_Node]]]
    ) -> tuple[dict[_Node, int], dict[_Node, int]]:
        """Extents of classes and parts of axes.
        If a mask has too few columns, other extents grow with its columns, so all is recomputed.
        Raises GraphError."""
        exact = {classes.find(n) for dim, nodes in _shared(mu) for n in (dim, *nodes)}
        multiples: dict[_Node, int] = {}
        for _ in range(_ROUNDS):
            extents, axes = _solve(classes, mu, pages, multiples)
            tied = _tied(classes, axes, exact, pages)
            reduced = _reduced(classes, self.graph, mu) - tied
            extents |= {c: WHOLE for c in reduced if extents.get(c) == TILE}
            short = _lengthen_masked(classes, self.graph, extents, tied)
            if not short:
                _add_pages(classes, self.graph, extents)
                return extents, axes
            multiples |= short
        raise GraphError(
            "muGraph: no small extents have more columns than rows under a mask, so that its "
            "alignment would not show"
        )


def _tied(
    classes: Classes[_Node],
    axes: dict[_Node, int],
    exact: set[_Node],
    pages: list[tuple[_Node, list[_Node]]],
) -> set[_Node]:
    """Classes whose extents follow from others: parts of axes, shared dimensions, pages."""
    tied = {classes.find(a) for a in axes} | exact
    return tied | {classes.find(n) for dim, nodes in pages for n in (dim, *nodes)}


def _join_node(classes: Classes[_Node], graph: KernelGraph, i: int) -> None:
    """Join the dimensions of node ``i`` that must be equal."""
    node = graph.nodes[i]
    for d, n in enumerate(node.shape):
        if n == 1:
            classes.join(("s", i, d), _ONE)
    shapes = [graph.nodes[j].shape for j in node.inputs]
    for d, operand, e in _same(node, shapes):
        if shapes[operand][e] != 1 and node.shape[d] != 1:
            classes.join(("s", i, d), ("s", node.inputs[operand], e))
    if node.facets.puts and shapes[1][0] != 1:
        first = each(node.attributes["dim"])[0]
        for index in node.inputs[1:-1]:
            classes.join(("s", index, 0), ("s", node.inputs[-1], first))
    if node.facets.contracts:
        a, b = node.inputs
        classes.join(("s", a, len(shapes[0]) - 1), ("s", b, len(shapes[1]) - 2))


def _same(node: Node, shapes: Sequence[tuple[Dim, ...]]) -> Iterator[tuple[int, int, int]]:
    """Each dimension of a node with the operand, and its dimension, that it is."""
    rank = len(node.shape)
    if node.facets.gathers:
        for d in range(rank):
            if (origin := node.facets.origin(d, len(shapes[1]))) is not None:
                yield d, *origin
    elif node.facets.puts:
        dims, last = each(node.attributes["dim"]), len(node.inputs) - 1
        yield from ((d, 0, d) for d in range(rank))
        yield from ((d, last, e) for e, d in enumerate(row_dims(rank, dims)) if d != dims[0])
    elif lookup(node.operator).integers:  # lengths have the first dimensions of the scores
        yield from ((d, k, d) for k, s in enumerate(shapes) for d in range(len(s)))
    elif node.facets.permutes:
        yield from ((d, 0, e) for d, e in enumerate(node.attributes["dims"]))
    else:
        skip = 2 if node.facets.contracts else 0
        for k, s in enumerate(shapes):
            yield from ((e + rank - len(s), k, e) for e in range(len(s) - skip))
        if node.facets.contracts:
            yield rank - 2, 0, len(shapes[0]) - 2
            yield rank - 1, 1, len(shapes[1]) - 1


def _join_mugraph(classes: Classes[_Node], graph: KernelGraph, mu: MuGraph) -> None:
    pairs = [*zip(graph.inputs, mu.inputs, strict=True)]
    pairs += zip(graph.outputs, mu.outputs, strict=True)
    for i, name in pairs:
        for d in range(len(graph.nodes[i].shape)):
            classes.join(("s", i, d), ("t", name, d))
    # an intermediate may have an extent of 1 because an axis has one: it is still tried with more
    for k, step in enumerate(mu.steps):
        for op in (*step.program.loads(), *step.program.stores()):
            for d, entry in enumerate(op.attributes["map"]):
                nodes = _nodes(step.program, k, entry)
                # the extents of several are multiplied in `_multiply`, those of pages in `_pages`
                if len(nodes) < 2:
                    for owner in _owners(mu, op, d):
                        classes.join(("t", *owner), nodes[0] if nodes else _ONE)


def _owners(mu: MuGraph, op: BlockOp, d: int) -> list[tuple[str, int]]:
    """The tensors, each with its dimension, that dimension d of a load or store is.
    None of them if its extent follows from those of two tensors."""
    name, *integers = op.tensors
    if op.puts:
        dims = each(op.attributes["dim"])
        whole = row_dims(len(mu.tensors[name].shape), dims)[d]
        return [(index, 0) for index in integers] if d == dims[0] else [(name, whole)]
    if op.gathering is None:
        return [(name, d)]
    origin = op.gathering.origin(d, len(mu.tensors[integers[0]].shape))
    return [] if origin is None else [(op.tensors[origin[0]], origin[1])]


def _nodes(program: BlockProgram, k: int, entry: Any) -> list[_Node]:
    """The labels and axes that a map of kernel k names for a dimension."""
    return [("l" if x in program.dims else "a", k, x) for x in mapped_labels(entry)]


def _shared(mu: MuGraph) -> list[tuple[_Node, list[_Node]]]:
    """Dimensions of tensors that several labels share, with these labels."""
    return [
        (("t", op.attributes["tensor"], d), nodes)
        for k, step in enumerate(mu.steps)
        for op in (*step.program.loads(), *step.program.stores())
        for d, entry in enumerate(op.attributes["map"])
        if len(nodes := _nodes(step.program, k, entry)) > 1
    ]


def _pages(
    classes: Classes[_Node], graph: KernelGraph, mu: MuGraph
) -> list[tuple[_Node, list[_Node]]]:
    """Positions of paged sequences: the positions of a page times the number of pages."""
    found: list[tuple[_Node, list[_Node]]] = []
    for i, n in enumerate(graph.nodes):
        if n.facets.counts == Counts.PAGES:
            cache, table = n.inputs
            found.append((("s", i, 1), [("s", cache, 1), ("s", table, 1)]))
    for k, step in enumerate(mu.steps):
        for op in step.program.loads():
            if "table" in op.attributes:
                whole = _nodes(step.program, k, op.attributes["map"][1]) or [_ONE]
                names = op.attributes["tensor"], op.attributes["table"]
                found.append((whole[0], [("t", name, 1) for name in names]))
    one = classes.find(_ONE)
    products: list[tuple[_Node, list[_Node]]] = []
    for whole, parts in found:
        left = [n for n in parts if classes.find(n) != one]
        if len(left) == 2:
            products.append((whole, left))
        else:  # a page for each sequence, or a position in each page
            classes.join(whole, left[0] if left else _ONE)
    return products


def _add_pages(classes: Classes[_Node], graph: KernelGraph, extents: dict[_Node, int]) -> None:
    """Set the number of pages, or of a table's rows, to that of all that are named plus one.
    None is named twice then."""
    for n in graph.nodes:
        if not (n.facets.gathers or n.facets.puts):
            continue
        cache, table = n.inputs[:2]
        rank = len(graph.nodes[table].shape)
        used = prod(extents.get(classes.find(("s", table, d)), TILE) for d in range(rank))
        for dim in each(n.attributes.get("dim", 0)):
            pages = classes.find(("s", cache, dim))
            if pages != classes.find(_ONE):
                step = extents.get(pages, 1)  # the rows may have a label, whose axes divide them
                extents[pages] = step * ceil_div(used + 1, step)


def _solve(
    classes: Classes[_Node],
    mu: MuGraph,
    pages: list[tuple[_Node, list[_Node]]],
    multiples: dict[_Node, int],
) -> tuple[dict[_Node, int], dict[_Node, int]]:
    """The extent of every class that has labels, and the visible parts of axes in tensors.

    Extents of classes in ``multiples`` are multiples of the numbers there.
    """
    shared = [*_shared(mu), *pages]
    nodes = {*classes.members, *(n for _, parts in shared for n in parts)}
    axes = {n: PARTS[AxisKind(n[2].split(".")[-1])] for n in nodes if n[0] == "a"}
    one = classes.find(_ONE)
    for _ in range(8):
        extents: dict[_Node, int] = {}
        wanted = list(axes.items())
        wanted += [
            (("l", k, d), _wanted(s.program, k, d, axes))
            for k, s in enumerate(mu.steps)
            for d in s.program.dims
        ]
        for node, n in wanted:
            c = classes.find(node)
            extents[c] = 1 if c == one else lcm(extents.get(c, 1), n)
        for c, n in multiples.items():
            extents[c] = lcm(extents.get(c, 1), n)
        extents[one] = 1
        _multiply(classes, extents, shared)
        settled = {a: extents[classes.find(a)] for a in axes}
        if settled == axes:
            return extents, axes
        axes = settled
    raise GraphError("muGraph: a tensor shows an axis of its own dimension; no extents fit that")


def _multiply(
    classes: Classes[_Node], extents: dict[_Node, int], shared: list[tuple[_Node, list[_Node]]]
) -> None:
    """Make the extent of a shared dimension the product of its labels' extents.
    The last label is enlarged as needed. Raises GraphError."""
    for _ in range(8):
        before = dict(extents)
        for dim, nodes in shared:
            whole, parts = classes.find(dim), [classes.find(n) for n in nodes]
            for c in parts:
                extents.setdefault(c, TILE)
            product = prod(extents[c] for c in parts)
            extents[whole] = lcm(product, extents.get(whole, 1))
            extents[parts[-1]] *= extents[whole] // product
        if extents == before:
            return
    raise GraphError("muGraph: labels share dimensions in a way that no small extents fit")


def _reduced(classes: Classes[_Node], graph: KernelGraph, mu: MuGraph) -> set[_Node]:
    """Classes over which there is a sum, mean or maximum, or along which elements change places."""
    found: set[_Node] = set()
    for n in graph.nodes:
        if lookup(n.operator).reduces:
            found.add(classes.find(("s", n.inputs[0], n.attributes["dim"])))
        elif lookup(n.operator).turns:
            found.add(classes.find(("s", n.inputs[0], len(n.shape) - 1)))
    for k, step in enumerate(mu.steps):
        for op in step.program.ops:
            if op.kind in TABLE and TABLE[op.kind].reduces:
                found.add(classes.find(("l", k, op.attributes["over"])))
    return found


def _lengthen_masked(
    classes: Classes[_Node], graph: KernelGraph, extents: dict[_Node, int], tied: set[_Node]
) -> dict[_Node, int]:
    """Give a mask more columns than rows if the graph has more: its alignment must show.

    before: 12 rows, 2 columns, one mask for both alignments; after: 12 rows, 14 columns. The tile
    of the columns takes up the difference. For columns that follow from other extents, as those of
    paged sequences, the result maps them to the number that their extents have to be a multiple of.
    """
    tied_columns: dict[_Node, int] = {}
    for i, node in enumerate(graph.nodes):
        if not lookup(node.operator).masks or extent(node.shape[-1]) <= extent(node.shape[-2]):
            continue
        last = len(node.shape) - 1
        rows, columns = (classes.find(("s", i, d)) for d in (last - 1, last))
        short, least = extents.get(columns, TILE), extents.get(rows, TILE)
        if short > least:
            continue
        more = short * (least // short + 1)
        if columns in tied:
            tied_columns[columns] = more
        else:
            extents[columns] = more
    return tied_columns


def _wanted(program: BlockProgram, k: int, dim: str, axes: dict[_Node, int]) -> int:
    return TILE * prod(axes.get(("a", k, a.name), PARTS[a.kind]) for a in program.axes_of(dim))


def _resize(
    program: BlockProgram,
    k: int,
    classes: Classes[_Node],
    extents: dict[_Node, int],
    shown: dict[_Node, int],
    axes: dict[_Node, int],
    exact: set[_Node] | None,
) -> BlockProgram:
    """The program at small extents, with tails (except for ``exact`` classes).
    Without tails if that is None."""
    dims: dict[str, Dim] = {}
    parts: dict[str, int] = {}
    tile: dict[str, int] = {}
    for d in program.dims:
        c = classes.find(("l", k, d))
        dims[d], covered = shown[c], extents[c]
        for a in program.axes_of(d):
            parts[a.name] = 1 if covered == 1 else axes.get(("a", k, a.name), PARTS[a.kind])
        tile[d] = max(1, covered // prod(parts[a.name] for a in program.axes_of(d)))
        # a dimension too short to lose an element gets a longer tile instead
        tile[d] += exact is not None and c not in exact and shown[c] == covered and covered > 1
    return program.resized(dims, parts, tile)
