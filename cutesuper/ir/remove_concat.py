"""Removal of concatenations and slices: operations on their pieces take their place.

No kernel copies a tensor into another one only to read it back, so `KernelGraph.expanded` removes
``concat`` and ``slice``. A concatenated value is *cut* along some dimensions; each value computed
from it is computed for every cell between cuts that is needed.

before (the concatenated form of LoRA)::

    t = concat([X, matmul(X, A)], 1);  y = matmul(t, concat([W, B], 0))

after::

    y = add(matmul(X, W), matmul(matmul(X, A), B))

A *box* is the part of a value that is needed, one range for each dimension; it never has a cut
inside. Boxes are found from the outputs backwards (`_terms` has the rule of each operator), values
are made from the inputs forwards. What is left is at the border: slices of inputs, and outputs that
are concatenations, which kernels read and write as parts of larger tensors (`cutesuper.ir.border`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate, product

from cutesuper.errors import GraphError, OperatorError
from cutesuper.ir.dims import Dim, extent, show_shape
from cutesuper.ir.dtypes import DType, float32
from cutesuper.ir.graph import KernelGraph, Node, Tensor
from cutesuper.ir.operators.base import INPUT, lookup
from cutesuper.ir.operators.layout import Concat
from cutesuper.ir.operators.monoid import SUM

#: from (inclusive) to (exclusive); the end of a whole symbolic dimension is its symbol
Range = tuple[int, Dim]
Box = tuple[Range, ...]
#: a node and the part of it that is needed
Use = tuple[int, Box]
#: for each dimension the positions, from 1 to extent - 1, at which a value is put together
Cuts = tuple[frozenset[int], ...]

_NONE: frozenset[int] = frozenset()


def without_pieces(graph: KernelGraph) -> KernelGraph:
    """The same program without ``concat`` and ``slice``, but for those at its border.
    Slices of inputs, and concatenations that are outputs, remain.

    Args:
        graph: primitive operators besides these two.

    Raises:
        OperatorError: an operator has no rule for pieces, or reads integers in pieces.
        GraphError: an output equals an input or another output.
    """
    cuts = _all_cuts(graph)
    needed: list[dict[Box, list[list[Use]]]] = [{} for _ in graph.nodes]
    for i in graph.outputs:
        needed[i] |= {box: [] for box in _boxes(graph.nodes[i], cuts[i])}
    for i in reversed(range(len(graph.nodes))):
        for box, terms in needed[i].items():
            terms += _terms(graph, cuts, i, box)
            for operand, part in (use for term in terms for use in term):
                needed[operand].setdefault(part, [])
    return _build(graph, cuts, needed)


def joins_sums(graph: KernelGraph) -> bool:
    """True if an output is put together from pieces, and depends on a sum over pieces.

    Args:
        graph: as for `without_pieces`.
    """
    cuts = _all_cuts(graph)
    whole = {i for i, n in enumerate(graph.nodes) if _sums_pieces(n, cuts)}
    cut = (i for i in graph.outputs if any(cuts[i]))
    return any(not whole.isdisjoint(graph.needed([i])) for i in cut)


def _sums_pieces(node: Node, cuts: list[Cuts]) -> bool:
    if node.facets.contracts:
        a, b = node.inputs
        return bool(cuts[a][-1] | cuts[b][-2])
    reduced = lookup(node.operator).reduces and cuts[node.inputs[0]][node.attributes["dim"]]
    return bool(reduced)


def _all_cuts(graph: KernelGraph) -> list[Cuts]:
    cuts: list[Cuts] = []
    for i in range(len(graph.nodes)):
        cuts.append(_cuts(graph, i, cuts))
    return cuts


def _boxes(node: Node, cuts: Cuts) -> list[Box]:
    """The pieces of a value, the last dimension varying fastest."""
    return list(product(*map(_cells, node.shape, cuts)))


def _build(
    graph: KernelGraph, cuts: list[Cuts], needed: list[dict[Box, list[list[Use]]]]
) -> KernelGraph:
    g = KernelGraph()
    made: dict[Use, Tensor] = {}
    sums: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.operator == INPUT:
            g.nodes.append(node)
            made[i, _whole(node.shape)] = whole = g.tensor(len(g.nodes) - 1)
            made |= {(i, box): _part(g, whole, box) for box in needed[i]}
            continue
        for box, terms in needed[i].items():
            first = len(g.nodes)
            values = [_apply(g, graph, i, [made[u] for u in t], t) for t in terms]
            how = node.facets.reduces or SUM
            made[i, box] = reduce(partial(g.apply, how.operator), values)
            if len(values) > 1 and how is SUM:
                _widen(g, first, graph.own_dtype(graph.tensor(i)))
                sums.add(made[i, box].index)
    g.outputs = [t.index for t in _stored(g, graph, cuts, made, sums)]
    _check_outputs(g, [graph.nodes[i] for i in graph.outputs])
    return g


def _widen(g: KernelGraph, first: int, dtype: DType) -> None:
    """Store sums of pieces, from node ``first`` on, as float32 between kernels.
    The program rounds the last one only, and the others may be much larger."""
    for i in range(first, len(g.nodes)):
        g.nodes[i] = replace(g.nodes[i], dtype=float32)
    g.nodes[-1] = replace(g.nodes[-1], dtype=dtype)


def _part(g: KernelGraph, whole: Tensor, box: Box) -> Tensor:
    """A box of an input."""
    t = whole
    for d, (start, stop) in enumerate(box):
        if (start, stop) != (0, whole.shape[d]):
            t = g.slice(t, d, start, extent(stop))
    return t


def _stored(
    g: KernelGraph, graph: KernelGraph, cuts: list[Cuts], made: dict[Use, Tensor], sums: set[int]
) -> list[Tensor]:
    """The outputs, each piece of which a kernel stores; ``sums`` are the sums of pieces."""
    boxes = {i: _boxes(graph.nodes[i], cuts[i]) for i in graph.outputs}
    kept = sums & {j for n in g.nodes for j in n.inputs}
    taken = kept | {made[i, own[0]].index for i, own in boxes.items() if len(own) == 1}
    found: list[Tensor] = []
    for i, own in boxes.items():
        pieces = [made[i, box] for box in own]
        if len(pieces) > 1 or pieces[0].node.facets.cuts or pieces[0].index in kept:
            pieces = [_own(g, t, taken) for t in pieces]
        found.append(_joined(g, pieces, list(map(_cells, graph.nodes[i].shape, cuts[i]))))
    return found


def _own(g: KernelGraph, t: Tensor, stored: set[int]) -> Tensor:
    """A value that a kernel stores in one place, in its own type.
    A copy of a part of an input, and of a value that is stored elsewhere, or of a sum of pieces
    that is used."""
    if t.node.operator == INPUT or t.node.facets.cuts or t.index in stored:
        t = g.convert(t, t.dtype)
    stored.add(t.index)
    return t


def _joined(g: KernelGraph, pieces: list[Tensor], cells: list[list[Range]]) -> Tensor:
    """The pieces put together, the last dimension first."""
    for d in reversed(range(len(cells))):
        n = len(cells[d])
        if n > 1:
            rows = (pieces[k : k + n] for k in range(0, len(pieces), n))
            pieces = [_join(g, row, d) for row in rows]
    return pieces[0]


def _join(g: KernelGraph, row: list[Tensor], d: int) -> Tensor:
    """Tensors of any type put together, also the places of an ``argmax``."""
    attributes = {"dim": d}
    shape = lookup(Concat.name).shape([t.shape for t in row], attributes)
    inputs, dtype = tuple(t.index for t in row), row[0].dtype
    g.nodes.append(Node(Concat.name, inputs, attributes, shape, dtype, f"t{len(g.nodes)}"))
    return g.tensor(len(g.nodes) - 1)


def _apply(
    g: KernelGraph, graph: KernelGraph, i: int, args: list[Tensor], uses: list[Use]
) -> Tensor:
    """One term of node i."""
    node = graph.nodes[i]
    if lookup(node.operator).cuts:
        return args[0]
    value = g.copy_node(graph, i, args)
    if not node.facets.averages:
        return value
    d, [(operand, box)] = node.attributes["dim"], uses
    whole = graph.nodes[operand].shape[d]
    return value if box[d] == (0, whole) else g.mul(value, _length(box[d]) / extent(whole))


# ------------------------------------------------------------------------------------------- cuts


def _cuts(graph: KernelGraph, i: int, cuts: list[Cuts]) -> Cuts:
    """Positions at which a value is put together, from those of its operands."""
    node = graph.nodes[i]
    args = [cuts[j] for j in node.inputs]
    rank = len(node.shape)
    if node.facets.joins:
        return _concat_cuts(graph, node, args)
    if node.facets.cuts:
        d, start, stop = (node.attributes[k] for k in ("dim", "start", "stop"))
        inside = frozenset(c - start for c in args[0][d] if start < c < stop)
        return (*args[0][:d], inside, *args[0][d + 1 :])
    if node.facets.permutes:
        return tuple(args[0][d] for d in node.attributes["dims"])
    if node.facets.contracts:
        a, b = args
        return (*_aligned([a[:-2], b[:-2]], rank - 2), a[-2], b[-1])
    if lookup(node.operator).reduces:
        d = node.attributes["dim"]
        return (*args[0][:d], _NONE, *args[0][d + 1 :])
    if lookup(node.operator).masks:
        return args[0]
    if lookup(node.operator).turns:
        return (*args[0][:-1], _NONE)
    return _aligned(args, rank)


def _concat_cuts(graph: KernelGraph, node: Node, args: list[Cuts]) -> Cuts:
    d = node.attributes["dim"]
    starts = _starts(graph, node)
    own = {s + c for s, cut in zip(starts, args, strict=True) for c in (0, *cut[d])} - {0}
    others = _aligned(args, len(node.shape))
    return (*others[:d], frozenset(own), *others[d + 1 :])


def _starts(graph: KernelGraph, node: Node) -> list[int]:
    """Start of each operand of a concatenation."""
    d = node.attributes["dim"]
    return [0, *accumulate(extent(graph.nodes[j].shape[d]) for j in node.inputs[:-1])]


def _aligned(args: list[Cuts], rank: int) -> Cuts:
    """Union of the cuts of operands that broadcast (a dimension of extent 1 has none)."""
    result = [_NONE] * rank
    for cut in args:
        for d, c in enumerate(cut):
            result[d + rank - len(cut)] |= c
    return tuple(result)


# ------------------------------------------------------------------------------------------ rules


def _terms(graph: KernelGraph, cuts: list[Cuts], i: int, box: Box) -> list[list[Use]]:
    """Terms that make up a box of a node: the parts of the operands for each summand.
    For a maximum there is one list for each candidate."""
    node = graph.nodes[i]
    operator = lookup(node.operator)
    if node.operator == INPUT:
        return []
    if node.facets.joins:
        return _of_concat(graph, node, box)
    if node.facets.cuts:
        return _of_slice(graph, node, box)
    if node.facets.contracts:
        return _of_matmul(graph, cuts, node, box)
    if node.facets.permutes:
        dims = node.attributes["dims"]
        parts = dict(zip(dims, box, strict=True))
        return [[_use(graph, node, 0, tuple(parts[d] for d in range(len(dims))))]]
    if operator.reduces:
        return _of_reduction(graph, cuts, node, box)
    if why := _needs_whole(graph, cuts, node, box):
        raise OperatorError(
            f"{node.operator} {_show(node)}: it is needed in pieces, {_show_box(node, box)}, and "
            f"{why}"
        )
    if operator.integers and not operator.elementwise:
        return [[_first(graph, node, k, box) for k in range(len(node.inputs))]]
    return [[_use(graph, node, k, box) for k in range(len(node.inputs))]]


def _needs_whole(graph: KernelGraph, cuts: list[Cuts], node: Node, box: Box) -> str:
    """The reason why a node has no value for this box alone, and a remedy; else empty."""
    operator, whole = lookup(node.operator), _whole(node.shape)
    if operator.masks and box[-2:] != whole[-2:]:
        return "positions count from the whole; mask the parts before they are put together"
    if operator.turns and (cuts[node.inputs[0]][-1] or box[-1] != whole[-1]):
        return "elements of one come from others; turn the parts before they are put together"
    if (operator.gathers or operator.puts) and box != whole:
        return "a kernel reads inputs whole; pass the parts as separate inputs"
    return ""


def _first(graph: KernelGraph, node: Node, k: int, box: Box) -> Use:
    """The part of operand k whose dimensions are the first ones.
    The whole operand if the node is not a mask."""
    shape = graph.nodes[node.inputs[k]].shape
    if not lookup(node.operator).masks:
        return node.inputs[k], _whole(shape)
    return _use(graph, node, k, box[: len(shape)])


def _of_concat(graph: KernelGraph, node: Node, box: Box) -> list[list[Use]]:
    """before: columns 6..8 of ``concat([a[M, 6], b[M, 4]], 1)``; after: columns 0..2 of b."""
    d = node.attributes["dim"]
    starts = _starts(graph, node)
    k = bisect_right(starts, box[d][0]) - 1
    return [[_use(graph, node, k, _moved(box, d, -starts[k]))]]


def _of_slice(graph: KernelGraph, node: Node, box: Box) -> list[list[Use]]:
    """before: columns 0..2 of ``slice(a, 1, 6, 10)``; after: columns 6..8 of a."""
    return [[_use(graph, node, 0, _moved(box, node.attributes["dim"], node.attributes["start"]))]]


def _of_reduction(graph: KernelGraph, cuts: list[Cuts], node: Node, box: Box) -> list[list[Use]]:
    """before: ``sum(concat([a, b], 1), 1)``; after: ``add(sum(a, 1), sum(b, 1))``.

    A mean is the sum of the means of the pieces, each times its share of the extent; a maximum is
    the larger one of those of the pieces.
    """
    d, [operand] = node.attributes["dim"], node.inputs
    cells = _cells(graph.nodes[operand].shape[d], cuts[operand][d])
    if node.facets.reduces is not None and node.facets.reduces.places and len(cells) > 1:
        raise OperatorError(
            f"{node.operator} {_show(node)}: its operand is put together along dim={d}, and places "
            "count from the beginning of the whole; let a kernel before put it together"
        )
    return [[_use(graph, node, 0, (*box[:d], c, *box[d + 1 :]))] for c in cells]


def _of_matmul(graph: KernelGraph, cuts: list[Cuts], node: Node, box: Box) -> list[list[Use]]:
    """before: ``concat([x, y], 1) @ concat([v, w], 0)``; after: ``x @ v + y @ w``.

    before: ``concat([x, y], 0) @ w``; after: pieces ``x @ w`` and ``y @ w``, likewise for columns.
    """
    a, b = node.inputs
    inner = cuts[a][-1] | cuts[b][-2]
    lead = box[:-2]
    return [
        [
            _use(graph, node, 0, (*lead, box[-2], c)),
            _use(graph, node, 1, (*lead, c, box[-1])),
        ]
        for c in _cells(graph.nodes[a].shape[-1], inner)
    ]


def _use(graph: KernelGraph, node: Node, k: int, box: Box) -> Use:
    """The part of operand k that broadcasts to ``box``. Raises OperatorError for integers."""
    index = node.inputs[k]
    operand = graph.nodes[index]
    rank = len(operand.shape)
    part = box[len(box) - rank :]
    part = tuple((0, n) if n == 1 else r for n, r in zip(operand.shape, part, strict=True))
    if operand.dtype.integer and part != _whole(operand.shape):
        raise OperatorError(
            f"{node.operator} {_show(node)}: it needs a piece of input {_show(operand)}, "
            f"{_show_box(operand, part)}, and a kernel reads integers whole; pass the parts as "
            "separate inputs"
        )
    return index, part


def _cells(n: Dim, cuts: frozenset[int]) -> list[Range]:
    """The ranges between cuts."""
    ends: list[Dim] = [*sorted(cuts), n]
    return list(zip([0, *sorted(cuts)], ends, strict=True))


def _whole(shape: tuple[Dim, ...]) -> Box:
    return tuple((0, n) for n in shape)


def _length(r: Range) -> int:
    return extent(r[1]) - r[0]


def _moved(box: Box, d: int, by: int) -> Box:
    start, stop = box[d]
    return (*box[:d], (start + by, extent(stop) + by), *box[d + 1 :])


# --------------------------------------------------------------------------------------- messages


def _check_outputs(g: KernelGraph, nodes: list[Node]) -> None:
    for k, (i, node) in enumerate(zip(g.outputs, nodes, strict=True)):
        if g.nodes[i].operator == INPUT:
            raise GraphError(
                f"output {_show(node)}: it is input {g.nodes[i].name} as it is; compute something"
            )
        if i in g.outputs[:k]:
            other = nodes[g.outputs.index(i)]
            raise GraphError(
                f"outputs {_show(other)} and {_show(node)}: they are one value; return it once"
            )


def _show(node: Node) -> str:
    return f"{node.name}{show_shape(node.shape)}"


def _show_box(node: Node, box: Box) -> str:
    """A part of a node as text: ``X[:, 0:6]``."""
    parts = (":" if r == (0, n) else f"{r[0]}:{r[1]}" for n, r in zip(node.shape, box, strict=True))
    return f"{node.name}[{', '.join(parts)}]"
