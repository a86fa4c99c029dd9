"""Cuts of a graph into kernels.

Every contiguous segment of a topological order is convex, so every sequence of segments that covers
the order is a sequence of kernels. Each segment becomes a `Region`, which is searched by itself
(equal regions once), and a dynamic program over the ends of segments finds the cheapest sequences.
The costs of kernels include storing and loading the tensors between them. Among sequences that cost
the same, as far as the model can tell, those are preferred that store few unfinished values
(`Flat.unfinished`): ``x W^T + b`` rather than ``x W^T``.

A transpose is a view of another value, which costs nothing, unless it is to be stored
(`Flat.copies`): then it is an operator like any other, fused or its own kernel. The result of
``gather_pages`` or ``take_rows`` is an input: kernels read it through the table or the index. The
rows of ``put_rows`` are stored at their places by the kernel that computes them, the last one that
has to do with them: what is computed with the whole tensor is in a kernel after it.

before: ``softmax(X @ W)``, 6 operators; after: ``[matmul] [max, sub, exp, sum, div]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import inf
from typing import Any, NamedTuple

from cutesuper.egraph.labelled import PutRows, Region, RegionOp, TakenRows, View
from cutesuper.errors import LoweringError, SearchError, frameless
from cutesuper.ir.border import Border, PartOf
from cutesuper.ir.dims import Shape, extent, show_shape, size
from cutesuper.ir.dtypes import DType, float16, float32
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT, Counts, Items, each, lookup
from cutesuper.ir.relations import ordered
from cutesuper.ir.rounding import comparisons, elements_of, narrow
from cutesuper.search.region import Way

#: most pieces of one kernel; it bounds the segments of a long graph. A piece is an operator, or in
#: a long graph the operators between two positions where it may be cut: a chain counts once
MAX_SEGMENT = 32
#: up to this number of operators in a graph, kernels may begin and end anywhere
MANY_OPERATORS = 24
#: sequences of kernels are equal up to this many times the cost of the cheapest: prices are right
#: within some percent (`skeletons.cost`), so that less is no gain
EQUAL = 1.005


@dataclass(frozen=True)
class Segment:
    """A region of a graph, and the names of the tensors that it reads and writes.

    ``through``: for each tensor that is read through integers, their name: a table of pages, or an
    index of rows. ``put``: for each output of `Region.put` the names of the tensor that the rows
    are put into, and of the indices. ``early``: true if it stores a value of `Flat.unfinished`.
    """

    region: Region
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    through: tuple[str | None, ...]
    put: tuple[tuple[str, tuple[str, ...]], ...] = ()
    early: bool = False


class Cut(NamedTuple):
    """A graph as a sequence of kernels."""

    cost: float
    steps: tuple[tuple[Segment, Way], ...]

    @property
    def early(self) -> int:
        """Number of kernels that store a value of `Flat.unfinished`."""
        return sum(segment.early for segment, _ in self.steps)


#: ways to run a region, cheapest first; raises SearchError with the reason if there are none
Find = Callable[[Region], Sequence[Way]]


#: positions of outputs, group by group
Groups = tuple[tuple[int, ...], ...]


class Flat:
    """A graph of primitive operators; operands are views of other values.

    Args:
        graph: primitive operators only.
        copy_all: True if every transpose may be stored. Otherwise only those that are outputs and
            change nothing but the order of an input.
        groups: groups of outputs that share nothing but inputs (`KernelGraph.apart`).
        last_resort: searched only where no other variant of the graph has kernels, as is one with
            ``copy_all``.
        border: which inputs and outputs of the graph are parts of tensors.

    Attributes:
        views: the value that every node is a view of; a computed node is a view of itself.
        copies: the transposes that are computed.
    """

    def __init__(
        self,
        graph: KernelGraph,
        copy_all: bool = False,
        groups: Groups | None = None,
        last_resort: bool = False,
        border: Border | None = None,
    ) -> None:
        self.graph, self.groups, self.border = graph, groups, border
        self.last_resort = copy_all or last_resort
        self.views: list[View] = []
        self.copies: set[int] = set()
        self._dtypes: dict[int, DType] = {}
        for i, n in enumerate(graph.nodes):
            view = View(i, tuple(range(len(n.shape))))
            if n.facets.permutes:
                inner = self._transposed(i)
                of_input = graph.nodes[inner.value].given
                if copy_all or (of_input and i in graph.outputs):
                    self.copies.add(i)
                else:
                    view = inner
            self.views.append(view)
        for o in graph.outputs:
            if graph.nodes[self.views[o].value].facets.gathers:
                raise SearchError(
                    f"output {self.describe(o)}: no kernel copies pages; mark what is computed "
                    "with them as an output"
                )
        for i, n in enumerate(graph.nodes):
            if n.facets.puts and self._output(i) is None:
                raise SearchError(
                    f"{self.describe(i)}: rows are put into a tensor of the caller, so the result "
                    "is an output; mark it as one"
                )

    def _transposed(self, i: int) -> View:
        """A transpose as a view of the value below it."""
        node = self.graph.nodes[i]
        inner = self.views[node.inputs[0]]
        return View(inner.value, tuple(inner.order[d] for d in node.attributes["dims"]))

    @cached_property
    def scalar(self) -> frozenset[int]:
        """Nodes that depend on numbers only; every kernel computes them for itself."""
        found: set[int] = set()
        for i, n in enumerate(self.graph.nodes):
            if not n.given and found.issuperset(n.inputs):
                found.add(i)
        return frozenset(found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The operators, in the order of the graph."""
        return tuple(
            i
            for i, n in enumerate(self.graph.nodes)
            if not n.given and self.views[i].value == i and i not in self.scalar
        )

    def depth_first(self, last_operand_first: bool) -> tuple[int, ...]:
        """The operators, each right after those that only it needs."""
        step = -1 if last_operand_first else 1
        ends = (self.views[o].value for o in self.graph.outputs)
        found = ordered(ends, lambda i: [v.value for v in self.operands(i)[::step]])
        return tuple(i for i in found if i in self._operators)

    @cached_property
    def group(self) -> dict[int, int]:
        """For every operator, the group of outputs that needs it; -1 if several do.

        Parts of several groups are not fused into one kernel: the original graph covers those.
        """
        group: dict[int, int] = {}
        for n, outputs in enumerate(self.groups or ()):
            queue = [self.views[self.graph.outputs[o]].value for o in outputs]
            while queue:
                i = queue.pop()
                if i in self._operators and group.get(i) not in (n, -1):
                    group[i] = -1 if i in group else n
                    queue += [v.value for v in self.operands(i)]
        return group

    @cached_property
    def _operators(self) -> frozenset[int]:
        return frozenset(self.order)

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """For every value, the operators that use it."""
        users: dict[int, list[int]] = {}
        for i in self.order:
            for v in self.operands(i):
                users.setdefault(v.value, []).append(i)
        return {v: tuple(u) for v, u in users.items()}

    def operands(self, i: int) -> tuple[View, ...]:
        """Operands of a node as views."""
        return self._operands[i]

    @cached_property
    def _operands(self) -> list[tuple[View, ...]]:
        return [self._operands_of(i) for i in range(len(self.graph.nodes))]

    @cached_property
    def attributes(self) -> list[Items]:
        """The attributes of all nodes; none of what only moves elements."""
        moves = (i in self.copies or n.facets.puts for i, n in enumerate(self.graph.nodes))
        nodes = zip(self.graph.nodes, moves, strict=True)
        return [Items({} if moved else n.attributes) for n, moved in nodes]

    def _operands_of(self, i: int) -> tuple[View, ...]:
        if i in self.copies:
            return (self._transposed(i),)
        if self.graph.nodes[i].facets.puts:  # what the rows go into is not read
            return (self.views[self.graph.nodes[i].inputs[-1]],)
        return tuple(self.views[j] for j in self.graph.nodes[i].inputs)

    def stored_as(self, value: int) -> str:
        """Name of the tensor in which a value is stored for another kernel."""
        node = self.graph.nodes[value]
        if node.operator == INPUT:
            return node.name
        if node.facets.gathers:
            return self.graph.nodes[node.inputs[0]].name
        output = self._loaded(value)
        return self.fresh(f"t{value}") if output is None else self.fresh(f"out{output}")

    def through(self, value: int) -> str | None:
        """Name of the integers through which a value is read; None if it lies in one piece."""
        node = self.graph.nodes[value]
        return self.graph.nodes[node.inputs[1]].name if node.facets.gathers else None

    def page_of(self, value: int) -> int | None:
        """Number of positions in a page of such a value."""
        node = self.graph.nodes[value]
        if node.facets.counts != Counts.PAGES or not node.given:
            return None
        return extent(self.graph.nodes[node.inputs[0]].shape[1])

    def taken(self, value: int) -> tuple[Shape, Shape, DType] | None:
        """Shape of the table and of the index, and type of the index, of rows of a table."""
        node = self.graph.nodes[value]
        if node.facets.counts != Counts.ROWS or not node.given:
            return None
        table, index = (self.graph.nodes[j] for j in node.inputs)
        return table.shape, index.shape, index.dtype

    def put(self, value: int) -> tuple[Shape, Shape, tuple[DType, ...], tuple[int, ...]] | None:
        """The tensor, indices and dimensions of rows that are put into a tensor.
        Shape of the tensor and of each index, types of the indices, and the dimensions whose
        places they name."""
        node = self.graph.nodes[value]
        if not node.facets.puts:
            return None
        base, *indices = (self.graph.nodes[j] for j in node.inputs[:-1])
        dtypes, dims = tuple(i.dtype for i in indices), each(node.attributes["dim"])
        return base.shape, indices[0].shape, dtypes, dims

    @cached_property
    def parts(self) -> dict[str, PartOf]:
        """The tensors that lie in larger ones, by name."""
        if self.border is None or self.border.whole:
            return {}
        inputs = [self.graph.nodes[i].name for i in self.graph.inputs]
        outputs = [self.fresh(f"out{n}") for n in range(len(self.graph.outputs))]
        return self.border.parts(inputs, outputs)

    def fresh(self, name: str) -> str:
        """The name, changed if an input has it already."""
        while name in self._input_names:
            name += "_"
        return name

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(self.graph.nodes[i].name for i in self.graph.inputs)

    def _output(self, value: int) -> int | None:
        """Index of the output that stores a value in the order of its own dimensions."""
        plain = View(value, tuple(range(len(self.graph.nodes[value].shape))))
        return next((n for n, o in enumerate(self.graph.outputs) if self.views[o] == plain), None)

    def _loaded(self, value: int) -> int | None:
        """Index of the output that other kernels load as a value.
        None if there is none, or if it is stored in another type, which rounds it for its caller
        only."""
        n = self._output(value)
        if n is None or self.graph.nodes[value].given:
            return n
        stored = self.graph.nodes[self.graph.outputs[n]].dtype
        return n if stored in (self._own(value), float32) else None

    def _own(self, value: int) -> DType:
        if value in self.compared_together:
            return float32
        return self.graph.own_dtype(self.graph.tensor(value))

    def dtype(self, value: int) -> DType:
        """Element type of a stored value: the graph's type.
        Between two kernels float32 for statistics, for `shifted` values and for such that float16
        cannot hold, and for a maximum that is compared with its elements their type."""
        if value not in self._dtypes:
            self._dtypes[value] = self._dtype(value)
        return self._dtypes[value]

    def _dtype(self, value: int) -> DType:
        node = self.graph.nodes[value]
        if value in self.copies and self._output(value) is None:
            return self.dtype(self.operands(value)[0].value)
        if node.given or self._loaded(value) is not None:
            return node.dtype
        if value in self.compared - self.compared_together:
            return self.dtype(self.operands(value)[0].value)
        own = self._own(value)
        wide = own == float16 and value not in self.narrow
        wide |= value in self.statistics or value in self.shifted
        return float32 if wide else own

    @cached_property
    def shifted(self) -> frozenset[int]:
        """Values of which a given number of their row is subtracted.

        That is a statistic which a forward pass kept, of values that were not rounded: log-sum-exp
        or a mean. Rounded to fp16, logits around 169 are multiples of 0.125: exp(x - lse) was 0.94
        where it is 1. Of a row of equal numbers x - mean was the rounding, and a norm divides that
        by the root of eps.
        """
        nodes, given, found = self.graph.nodes, set[int](), set[int]()
        for i, n in enumerate(nodes):
            made = lookup(n.operator).elementwise and given.issuperset(n.inputs)
            if i in self.scalar or (n.shape[-1:] == (1,) and (n.given or made)):
                given.add(i)
        for i in reversed(range(len(nodes))):
            n = nodes[i]
            if n.facets.subtracts and n.inputs[1] in given - self.scalar:
                found.add(n.inputs[0])
            if i in found and not n.facets.contracts and lookup(n.operator).reduces is None:
                found.update(n.inputs)
        return frozenset(i for i in found - given if not nodes[i].given)

    @cached_property
    def rounded(self) -> tuple[tuple[int, int], ...]:
        """Values that are rounded where they are stored, each with float32 work on its elements.

        A kernel that read both would not cancel: softshrink(x), x - clamp(x, -0.5, 0.5), was 0.0001
        at x = 0.15, of which it read 16 bits, and 32 of the second term.
        """
        below: dict[int, frozenset[int]] = {}
        for i in self.order:
            found = set[int]()
            if lookup(self.graph.nodes[i].operator).elementwise:
                for v in (v.value for v in self.operands(i)):
                    short = v in self._operators and self.dtype(v).itemsize == 2
                    found |= {v} if short else below.get(v, frozenset())
            below[i] = frozenset(found)
        apart = ((a, b) for b in self.order if self.dtype(b) == float32 for a in below[b])
        return (*apart, *self._normalised())

    def _normalised(self) -> list[tuple[int, int]]:
        """Values of 16 bits, each with a sum of exponentials of what a statistic leaves of it.

        A kernel that read the logits z and the sum of exp(z - max z) of another kernel would make
        0.94 of a share that is 1, as in `shifted`.
        """
        below, shifted, summed = (dict[int, frozenset[int]]() for _ in range(3))
        found = list[tuple[int, int]]()
        for i in self.order:
            facets, args = self.graph.nodes[i].facets, [v.value for v in self.operands(i)]
            before, after, sums = (
                frozenset[int]().union(*(values.get(j, frozenset()) for j in args))
                for values in (below, shifted, summed)
            )
            if lookup(self.graph.nodes[i].operator).elementwise:
                below[i] = before | {i}
                less = facets.subtracts and args[1] in self.statistics
                shifted[i] = after | (below.get(args[0], frozenset()) if less else frozenset())
                summed[i] = sums | (after if facets.exponential else frozenset())
            else:
                below[i] = frozenset((i,) if facets.contracts else ())
                summed[i] = frozenset() if facets.contracts else sums
            if i in self.statistics:
                found += [(a, i) for a in summed[i] if self.dtype(a).itemsize == 2]
        return found

    @cached_property
    def narrow(self) -> frozenset[int]:
        """The values that may be stored as float16 between two kernels."""
        return narrow(self.graph)

    @cached_property
    def unfinished(self) -> frozenset[int]:
        """Values of 16 bits with one use, by an element-wise operator with as short a result.
        Stored between two kernels they are rounded before that operator, and libraries, as for a
        product with a bias, round once after it."""
        return frozenset(
            v
            for v, users in self.users.items()
            if len(users) == 1 and self._is_finished_by(users[0], v)
        )

    def _is_finished_by(self, user: int, v: int) -> bool:
        node, after = self.graph.nodes[v], self.graph.nodes[user]
        alike = lookup(after.operator).elementwise and node.shape == after.shape
        inside = not node.given and self._output(v) is None
        return alike and inside and self.dtype(v).itemsize == 2

    @cached_property
    def compared(self) -> frozenset[int]:
        """The maxima that are compared with their elements.
        Rounding keeps the order of numbers, so in one type the maximum of rounded elements is the
        rounded maximum."""
        return frozenset[int]().union(*self._compared)

    @cached_property
    def _compared(self) -> tuple[frozenset[int], ...]:
        return tuple(comparisons(self.graph).values())

    @cached_property
    def compared_together(self) -> frozenset[int]:
        """The maxima of several values that are compared with all of these, and the values.
        They are not rounded between kernels: a piece that float16 cannot hold would be, beside one
        that it holds."""
        nodes, maxima = self.graph.nodes, set[int]()
        for tops in self._compared:
            if any(not nodes[i].facets.selects for i in tops):
                maxima |= tops
        found = maxima | elements_of(self.graph, maxima)
        for i in reversed(range(len(nodes))):  # a transpose is a view: its operand is stored
            if i in found and nodes[i].facets.permutes:
                found.update(nodes[i].inputs)
        return frozenset(found)

    @cached_property
    def statistics(self) -> frozenset[int]:
        """Results of reductions, and values computed from them without growing.

        A sum that another kernel finishes would be rounded on the way: the mean of 72 numbers,
        taken dimension by dimension in bfloat16, is off by 6e-4. Operands of products are excluded:
        they have the type of the other operand.
        """
        found: set[int] = set()
        for i in self.order:
            node = self.graph.nodes[i]
            extents = size(node.shape)
            if self._is_multiplied(i):
                continue
            made = node.shape[-1:] == (1,) or lookup(node.operator).reduces is not None
            if made or any(
                v.value in found and size(self.graph.nodes[v.value].shape) == extents
                for v in self.operands(i)
            ):
                found.add(i)
        return frozenset(found)

    def _is_multiplied(self, i: int) -> bool:
        """True if a value, or a copy of it in another order, is an operand of a product."""
        users = self.users.get(i, ())
        return any(
            lookup(self.graph.nodes[u].operator).one_type
            or (u in self.copies and self._is_multiplied(u))
            for u in users
        )

    def segment(self, members: tuple[int, ...]) -> Segment:
        """The region of some operators, in the graph's order: equal sets give equal regions."""
        return _SegmentBuilder(self, tuple(sorted(members))).build()

    def whole(self) -> tuple[Region, dict[int, int]]:
        """The region of all operators, and the number that each value has in it.
        Not of those that put rows somewhere: what uses the tensor is in a kernel after them."""
        puts = (i for i in self.order if self.graph.nodes[i].facets.puts)
        builder = _SegmentBuilder(self, tuple(sorted(set(self.order).difference(puts))))
        return builder.build().region, builder.index

    def describe(self, i: int) -> str:
        """An operator with its operands as text: ``sum(t4[16, 4096], dim=0)``."""
        node = self.graph.nodes[i]
        shown = [
            self.graph.nodes[j].name + show_shape(self.graph.nodes[j].shape) for j in node.inputs
        ]
        shown += [f"{k}={v}" for k, v in node.attributes.items()]
        return f"{node.operator}({', '.join(shown)})"


class _SegmentBuilder:
    """Renumbers a part of a graph: inputs first, then operators."""

    def __init__(self, flat: Flat, members: tuple[int, ...]) -> None:
        self.flat, self.members = flat, members
        self.inside = set(members)
        self.ops = self._with_scalars()
        outside = (v.value for i in self.ops for v in flat.operands(i))
        produced = set(self.ops)
        self.inputs = tuple(dict.fromkeys(v for v in outside if v not in produced))
        self.index = {v: n for n, v in enumerate((*self.inputs, *self.ops))}

    def _with_scalars(self) -> tuple[int, ...]:
        """The members, each after the scalar nodes that it needs."""
        flat = self.flat

        def scalars(i: int) -> list[int]:
            return [v.value for v in flat.operands(i) if v.value in flat.scalar]

        return tuple(ordered(self.members, scalars))

    def build(self) -> Segment:
        flat, nodes = self.flat, self.flat.graph.nodes
        stored = list(self._stored())
        reads = tuple(flat.stored_as(v) for v in self.inputs)
        sides = ("in", reads), ("out", [name for _, name, _ in stored])
        region = Region(
            tuple(nodes[v].shape for v in self.inputs),
            tuple(flat.dtype(v) for v in self.inputs),
            tuple(self._op(i) for i in self.ops),
            tuple(View(self.index[v.value], v.order) for v, _, _ in stored),
            tuple(dtype for _, _, dtype in stored),
            tuple((n, p) for n, v in enumerate(self.inputs) if (p := flat.page_of(v)) is not None),
            tuple(TakenRows(n, *t) for n, v in enumerate(self.inputs) if (t := flat.taken(v))),
            tuple(PutRows(n, *p) for n, (v, _, _) in enumerate(stored) if (p := flat.put(v.value))),
            tuple(
                (f"{side}{n}", flat.parts[name])
                for side, names in sides
                for n, name in enumerate(names)
                if name in flat.parts
            ),
        )
        through = tuple(map(flat.through, self.inputs))
        puts = (nodes[v.value] for v, _, _ in stored if nodes[v.value].facets.puts)
        named = ([nodes[j].name for j in n.inputs[:-1]] for n in puts)
        put = tuple((base, tuple(indices)) for base, *indices in named)
        early = any(v.value in flat.unfinished for v, _, _ in stored)
        return Segment(region, reads, tuple(name for _, name, _ in stored), through, put, early)

    def _op(self, i: int) -> RegionOp:
        node = self.flat.graph.nodes[i]
        operands = tuple(View(self.index[v.value], v.order) for v in self.flat.operands(i))
        shape = self.flat.graph.nodes[self._kept(i)].shape
        return RegionOp(node.operator, operands, self.flat.attributes[i], shape)

    def _kept(self, i: int) -> int:
        """The node whose elements a kernel stores for a value: rows that are put somewhere."""
        node = self.flat.graph.nodes[i]
        return node.inputs[-1] if node.facets.puts else i

    def _plain(self, i: int) -> View:
        """A value in the order of its own dimensions, as a kernel stores it."""
        return View(i, tuple(range(len(self.flat.graph.nodes[self._kept(i)].shape))))

    def _stored(self) -> Iterable[tuple[View, str, DType]]:
        """Values that must outlive the kernel: outputs, and values with users elsewhere."""
        flat, names = self.flat, set[str]()
        for n, o in enumerate(flat.graph.outputs):
            if flat.views[o].value in self.inside:
                names.add(flat.fresh(f"out{n}"))
                view = self._plain(o) if flat.graph.nodes[o].facets.puts else flat.views[o]
                yield view, flat.fresh(f"out{n}"), flat.graph.nodes[o].dtype
        for i in self.members:
            elsewhere = any(u not in self.inside for u in flat.users.get(i, ()))
            if elsewhere and flat.stored_as(i) not in names:
                yield self._plain(i), flat.stored_as(i), flat.dtype(i)


class _Path(NamedTuple):
    """The cheapest kernels up to some position, as a linked list."""

    cost: float
    before: _Path | None
    step: tuple[Segment, Way] | None


class Segments:
    """All segments of a few topological orders of a graph.

    Orders are depth first from either operand: the operators that prepare one operand of
    ``norm(Q) @ norm(K)^T`` should be next to the product in one of the orders.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        orders = (flat.order, flat.depth_first(False), flat.depth_first(True))
        self.orders = tuple(dict.fromkeys(orders))
        self._known: dict[frozenset[int], Segment] = {}
        self._marks: dict[tuple[int, ...], list[int]] = {}
        nodes = flat.graph.nodes
        ends = sum(size(nodes[i].shape) for i in (*flat.graph.inputs, *flat.graph.outputs))
        #: most elements that may be needed across a cut: storing the scores of attention backward
        #: (2.3 times what it reads and writes) was never cheaper, and finding that out took most of
        #: the time
        self._most = 2.0 * ends

    def segment(self, order: tuple[int, ...], start: int, end: int) -> Segment:
        """The segment of one order; equal sets of operators are one segment."""
        members = order[start:end]
        key = frozenset(members)
        if key not in self._known:
            self._known[key] = self.flat.segment(members)
        return self._known[key]

    def known(self, order: tuple[int, ...], start: int, end: int) -> Segment | None:
        """A segment that was requested before, or None."""
        return self._known.get(frozenset(order[start:end]))

    def marks(self, order: tuple[int, ...]) -> list[int]:
        """The positions where an order may be cut, including its ends.
        All positions of a short graph; with more than `MANY_OPERATORS`, those neither inside a
        chain nor on a slope, and those between operators that have nothing in common."""
        if order not in self._marks:
            inner = set[int]()
            if len(order) > MANY_OPERATORS:
                inner = self.inside_chains(order) | self.slopes(order) | self.inside_runs(order)
            marks = [n for n in range(len(order) + 1) if n not in inner]
            apart = [n for piece in pairwise(marks) for n in self._apart(order, *piece)]
            self._marks[order] = sorted(marks + apart)
        return self._marks[order]

    def _apart(self, order: tuple[int, ...], start: int, end: int) -> Iterator[int]:
        """The positions inside a piece whose operators before and after share no value.
        One kernel of both has a block for each pair of their rows: a gradient and a row sum of
        another one were 33 million blocks, 7.9 ms instead of two launches."""
        touched = [{i, *(v.value for v in self.flat.operands(i))} - self.flat.scalar
                   for i in order[start:end]]  # fmt: skip
        last = {v: n for n, values in enumerate(touched, start) for v in values}
        reach = start
        for n, values in enumerate(touched, start):
            if start < n and reach < n:
                yield n
            reach = max(reach, *(last[v] for v in values))

    def ends(self, order: tuple[int, ...], n: int) -> Iterable[int]:
        """The marks at which a kernel that begins at the n-th mark of an order may end."""
        marks = self.marks(order)
        whole = () if marks[n] else marks[-1:]
        return dict.fromkeys((*marks[n + 1 : n + 1 + MAX_SEGMENT], *whole))

    def all(
        self,
        longest: int = MAX_SEGMENT,
        leave: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> Iterator[tuple[Segment, int, bool]]:
        """Segments of up to this many pieces, short ones first.
        Each with its number of pieces, and True if between waists.

        Args:
            longest: most pieces.
            leave: True for operators of several pieces that are left out; None: none are.
        """
        waists_of = {order: self.waists(order) for order in self.orders}
        for length in range(1, longest + 1):
            for order, waists in waists_of.items():
                marks = self.marks(order)
                for start, end in zip(marks, marks[length:], strict=False):
                    if self.mixed(order, start, end):
                        continue
                    if leave is None or length == 1 or not leave(order[start:end]):
                        yield self.segment(order, start, end), length, {start, end} <= waists

    def divide(self, runs: Callable[[Region], bool]) -> bool:
        """Cut pieces that no kernel runs in two; return True if there are any."""
        divided = False
        for order in self.orders:
            marks = self.marks(order)
            halves = {
                (start + end) // 2
                for start, end in pairwise(marks)
                if end - start > 1 and not runs(self.segment(order, start, end).region)
            }
            self._marks[order] = sorted({*marks, *halves})
            divided |= bool(halves)
        return divided

    def whole(self) -> Segment | None:
        """The segment of all operators; None if it is empty or `mixed`."""
        (order, *_) = self.orders
        if not order or self.mixed(order, 0, len(order)):
            return None
        return self.segment(order, 0, len(order))

    def mixed(self, order: tuple[int, ...], start: int, end: int) -> bool:
        """True if a segment would put values together that kernels keep apart.
        Parts of outputs that are computed apart, rows that are put into a tensor and a user of that
        tensor, or values and work on them where only the values are `rounded`."""
        flat, inside = self.flat, frozenset(order[start:end])
        if flat.rounded:
            read = {v.value for i in inside for v in flat.operands(i)} - inside
            if any(a in read and b in read for a, b in flat.rounded):
                return True
        put = (i for i in inside if flat.graph.nodes[i].facets.puts)
        if any(not inside.isdisjoint(flat.users.get(i, ())) for i in put):
            return True
        if flat.groups is None:
            return False
        return len({self.flat.group[i] for i in order[start:end]}) > 1

    def inside_chains(self, order: tuple[int, ...]) -> set[int]:
        """Positions between a value and an element-wise operator that is its only user.
        Storing the operator's result instead takes as many bytes, and the kernel of the value can
        compute it."""
        flat, found = self.flat, set[int]()
        for n in range(1, len(order)):
            before, after = (flat.graph.nodes[i] for i in order[n - 1 : n + 1])
            alone = flat.users.get(order[n - 1]) == (order[n],)
            chain = lookup(before.operator).elementwise and lookup(after.operator).elementwise
            same = before.shape == after.shape and order[n - 1] not in flat.graph.outputs
            if alone and chain and same:
                found.add(n)
        return found

    def inside_runs(self, order: tuple[int, ...]) -> set[int]:
        """Positions from which a cut could move on, to where no more is stored.
        It moves over element-wise operators, as in repeated sums of ``y + y * y``, each of which is
        used twice."""
        flat, crossing = self.flat, self._crossing(order)
        movable = [lookup(flat.graph.nodes[i].operator).elementwise for i in order]
        found, least = set[int](), inf  # least: of the positions that a cut can move on to
        for n in range(len(order) - 1, 0, -1):
            least = min(least, crossing[n + 1]) if movable[n] else inf
            kept = order[n - 1] in flat.graph.outputs
            if movable[n - 1] and least <= crossing[n] and not kept:
                found.add(n)
        return found

    def waists(self, order: tuple[int, ...]) -> set[int]:
        """Positions of an order across which fewer bytes are needed than at their neighbours.

        ``softmax(X W)``: after the product, the exponentials and the end, but not between the
        maximum and the difference, where the product and its maximum would have to be stored. Among
        several such positions in a row the last counts: operators after a product are its epilogue,
        which costs less than a prologue of the next. A product may always begin a kernel, unless
        more bytes are needed there than before; so may sums of the elements of products, as those
        of gradients over the query heads of a group.
        """
        crossing, found = self._crossing(order), {0, len(order)}
        for _, run in groupby(range(len(crossing)), key=crossing.__getitem__):
            level = list(run)
            before, after = level[0] - 1, level[-1] + 1
            if (
                before >= 0
                and after < len(crossing)
                and (crossing[before] > crossing[level[0]] < crossing[after])
            ):
                found.add(level[-1])
        for n in range(1, len(order)):
            product = self.flat.graph.nodes[order[n]].facets.contracts
            if product and crossing[n] <= crossing[n - 1]:
                found.add(n)
            if self._adds_product(order[n]) and not self._adds_product(order[n - 1]):
                found.add(n)
        return {n for n in found if crossing[n] == inf or crossing[n] <= self._most}

    def _adds_product(self, i: int) -> bool:
        """True for a sum of a product over a dimension other than the last."""
        nodes = self.flat.graph.nodes
        if not nodes[i].facets.sums:
            return False
        [operand] = self.flat.operands(i)
        last = nodes[i].attributes["dim"] == len(nodes[i].shape) - 1
        return not last and nodes[operand.value].facets.contracts

    def slopes(self, order: tuple[int, ...]) -> set[int]:
        """Positions between element-wise operators from which fewer elements are stored later.
        And nowhere more on the way: a kernel that computes one of these operators can compute all
        of them. Most of the backward pass of an nGPT block, 51 operators, has 1304 segments, and
        495 that give as cheap a program."""
        nodes, crossing = self.flat.graph.nodes, self._crossing(order)
        movable = [lookup(nodes[i].operator).elementwise for i in order]
        between = [a and b for a, b in pairwise(movable)]  # position n is between[n - 1]
        found = set[int]()
        for positions in (range(1, len(order)), range(len(order) - 1, 0, -1)):
            falls = False
            for n in positions:
                before = n - positions.step
                falls = between[n - 1] and (
                    crossing[before] < crossing[n] or (crossing[before] == crossing[n] and falls)
                )
                if falls:
                    found.add(n)
        return found

    def _crossing(self, order: tuple[int, ...]) -> list[float]:
        """Number of elements that are needed on both sides of each position of an order."""
        flat, place = self.flat, {v: n for n, v in enumerate(order)}
        crossing = [inf, *[0.0] * (len(order) - 1), inf]
        for v, users in flat.users.items():
            if v not in flat.scalar:
                used = [place[u] for u in users if u in place]
                # an input that both sides need is read again, like a value that is stored
                first = place.get(v, min(used, default=0))
                for n in range(first + 1, max(used, default=0) + 1):
                    crossing[n] += size(flat.graph.nodes[v].shape)
        return crossing


def cuts(segments: Segments, find: Find, keep: int) -> list[Cut]:
    """The cheapest sequences of kernels, best first.

    Raises:
        SearchError: names an operator that no kernel can run even by itself, in any order, and the
            reason.
        LoweringError: the structure for which a skeleton refuses to run such an operator.
    """
    found: dict[Any, Cut] = {}
    errors: list[SearchError | LoweringError] = []
    for order in segments.orders:
        try:
            ways = _cheapest(segments, order, find, keep)
        except (SearchError, LoweringError) as e:
            errors.append(frameless(e))
            continue
        for way in ways:
            cut = Cut(way.cost, _steps(way))
            found.setdefault(tuple((s.writes, id(k)) for s, k in cut.steps), cut)
    try:
        if errors and not found:
            raise errors[0]
    finally:
        errors.clear()  # its frame is this one: a circle would keep all callers' tensors
    return sorted(found.values(), key=lambda c: c.cost)[:keep]


def preferred(found: Iterable[tuple[Flat, Cut]], keep: int) -> list[tuple[Flat, Cut]]:
    """The cheapest cuts.
    First, of those that cost the same as the cheapest one, those that store the fewest unfinished
    values."""
    found = sorted(found, key=lambda f: f[1].cost)[:keep]
    equal = [f for f in found if f[1].cost <= EQUAL * found[0][1].cost]
    return sorted(equal, key=lambda f: f[1].early) + found[len(equal) :]


def _cheapest(segments: Segments, order: tuple[int, ...], find: Find, keep: int) -> list[_Path]:
    ways: list[list[_Path]] = [[_Path(0.0, None, None)]] + [[] for _ in order]
    marks = segments.marks(order)
    refused: list[tuple[int, LoweringError]] = []  # with the ends of their segments
    for n, start in enumerate(marks[:-1]):
        if not ways[start]:
            continue
        reasons: list[SearchError] = []
        for end in segments.ends(order, n):
            if segments.mixed(order, start, end):
                break
            segment = segments.known(order, start, end)
            if segment is None:
                continue  # no kernel was searched for it
            try:
                found = find(segment.region)
            except SearchError as e:
                reasons.append(frameless(e))
                continue
            except LoweringError as e:
                refused.append((end, frameless(e)))
                continue
            # both are sorted, so among the continuations of the i-th way all but these are behind
            # ``keep`` others: making them took a tenth of the search of a GPT's layer
            longer = [
                _Path(w.cost + k.total, w, (segment, k))
                for i, w in enumerate(ways[start])
                for k in found[: keep // (i + 1)]
            ]
            ways[end] = sorted(ways[end] + longer, key=lambda w: w.cost)[:keep]
        if not any(ways[start + 1 :]):
            if covering := [e for end, e in refused if end > start]:
                raise covering[0]
            flat = segments.flat
            reason = reasons[0] if reasons else SearchError("not looked at")
            raise SearchError(
                f"no kernel can run {flat.describe(order[start])}: {reason}"
            ) from reason
    return ways[-1]


def _steps(way: _Path) -> tuple[tuple[Segment, Way], ...]:
    steps: list[tuple[Segment, Way]] = []
    link: _Path | None = way
    while link is not None and link.step is not None:
        steps.append(link.step)
        link = link.before
    return tuple(reversed(steps))
