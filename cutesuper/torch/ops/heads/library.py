"""Chunks whose products are those of PyTorch's library, with kernels between them.

before::

    z = x @ weight.T + bias                      [M, V]
    losses, dz = ...                             of rows of z
    dx, dw = dz @ weight, so_far + dz.T @ x

after: ``addmm``, kernels for the rows ``z -> losses, dz``, where dz takes the place of z, ``mm``
and ``addmm``. Kernels for all of it store the logits of a chunk as well; what differs is the speed
of the products. Both passes of 4096 x 4096 x 128256 took kernels alone 21.8 ms where torch.compile
took 19.5, and the library with a kernel for the rows 20.3 where it took 20.0 (two runs, H200). The
cost model is asked which is faster, with what the library was measured to reach
(`cutesuper.targets.roofline`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from cutesuper.errors import CutesuperError
from cutesuper.ir.graph import KernelGraph, Node, Tensor
from cutesuper.ir.operators.base import CONSTANT, INPUT, TABLE
from cutesuper.pipeline import Options, current_target, find
from cutesuper.runtime.calling import Rows
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.targets import Target
from cutesuper.targets.roofline import alone
from cutesuper.torch.ops.programs import KEPT, Program, program_of
from cutesuper.torch.ops.rowwise.calls import all_usable

#: the element type whose products the library computes: float16 has no room for logits between
#: kernels, and float32 products have a precision of their own
TYPE = "bfloat16"


@dataclass(frozen=True)
class Product:
    """A product of the library.

    Attributes:
        left, right: its operands, and whether they are transposed: nodes of the chunk's graph.
        added: the node that is added to it, or None.
        factor: by which it is multiplied before.
    """

    left: tuple[int, bool]
    right: tuple[int, bool]
    added: int | None = None
    factor: float = 1.0

    @property
    def read(self) -> tuple[int, ...]:
        """The nodes that it reads."""
        added = () if self.added is None else (self.added,)
        return (self.left[0], self.right[0], *added)

    def new(self, tensors: dict[int, torch.Tensor]) -> torch.Tensor:
        """The product of the tensors of nodes."""
        a, b = self._operands(tensors)
        out = a.new_empty(a.shape[0], b.shape[1])
        self.into(out, tensors)
        return out

    def into(self, out: torch.Tensor, tensors: dict[int, torch.Tensor]) -> None:
        """Compute it from the tensors of nodes. Autocast changes no function with ``out``."""
        a, b = self._operands(tensors)
        if self.added is None:
            torch.addmm(out, a, b, beta=0, alpha=self.factor, out=out)
        else:
            torch.addmm(tensors[self.added], a, b, alpha=self.factor, out=out)

    def _operands(self, tensors: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[i].t() if turned else tensors[i] for i, turned in (self.left, self.right)]


@dataclass(frozen=True)
class Cut:
    """A chunk's graph, cut at its products.

    Attributes:
        graph: of the chunk.
        first: the products that rows are made of, by the node that is their result.
        rows: the graph of the kernels.
        given: for each input of ``rows`` the node that it is.
        made: for each output of ``rows`` the node that it is.
        last: the products of what the kernels make, by the place of the output.
    """

    graph: KernelGraph
    first: dict[int, Product]
    rows: KernelGraph
    given: tuple[int, ...]
    made: tuple[int, ...]
    last: dict[int, Product]

    @cached_property
    def names(self) -> dict[int, str]:
        """The names that inputs of ``rows`` have, by node."""
        inputs = (self.rows.nodes[k].name for k in self.rows.inputs)
        return dict(zip(self.given, inputs, strict=True))

    @property
    def products(self) -> list[int]:
        """The nodes that multiply."""
        return [i for i, n in enumerate(self.graph.nodes) if _multiplies(n)]

    def program(self, rows: Program) -> Program:
        """The program of the chunk with a program for the rows."""
        graph = self.graph

        def run(
            inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], extent: Rows
        ) -> None:
            tensors = dict(zip(graph.inputs, inputs, strict=True))
            for i, product in self.first.items():
                tensors[i] = product.new(tensors)
            given = [tensors[i] for i in self.given]
            places, free = dict(zip(graph.outputs, outputs, strict=True)), list(self.first)
            for n, i in enumerate(self.made):
                tensors[i] = places[i] if i in places else self._place(rows, n, tensors, free)
            rows.run(all_usable(given), [tensors[i] for i in self.made], extent)
            for place, product in self.last.items():
                product.into(outputs[place], tensors)

        return Program(graph, run, frozenset(self._in_place(rows)))

    def _place(
        self, rows: Program, n: int, tensors: dict[int, torch.Tensor], free: list[int]
    ) -> torch.Tensor:
        """Memory for output ``n`` of the rows: new, or that of ``free`` logits."""
        made, nodes = self.graph.nodes[self.made[n]], self.graph.nodes
        for i in free:
            same = (nodes[i].shape, nodes[i].dtype) == (made.shape, made.dtype)
            if same and rows.replaces(self.names[i], n):
                free.remove(i)
                return tensors[i]
        i = next(iter(self.first))
        count: dict[Any, int] = {nodes[i].shape[0]: len(tensors[i])}  # of a symbol, too
        shape: list[Any] = [count.get(d, d) for d in made.shape]
        return tensors[i].new_empty(shape, dtype=made.dtype.torch)

    def _in_place(self, rows: Program) -> list[tuple[int, int]]:
        """Inputs and outputs of the chunk that may share memory: sums so far."""
        graph, found = self.graph, list[tuple[int, int]]()
        for place, product in self.last.items():
            if product.added is not None:
                found.append((graph.inputs.index(product.added), place))
        again = {i for p in self.last.values() for i in p.read}
        for n, i in enumerate(graph.inputs):
            if i in self.given and i not in again:
                found += [(n, graph.outputs.index(o)) for k, o in enumerate(self.made)
                          if o in graph.outputs and rows.replaces(self.names[i], k)]  # fmt: skip
        return found


def _multiplies(node: Node) -> bool:
    """True for a product of two matrices."""
    return node.facets.contracts and len(node.inputs) == 2 and len(node.shape) == 2


class _Other(Exception):
    """The graph has another form."""


@dataclass
class _Cutting:
    """The search for products in front of rows, and behind them."""

    graph: KernelGraph
    depth: list[int] = field(default_factory=list)  # products on the longest path, by node
    users: Counter[int] = field(default_factory=Counter[int])

    def __post_init__(self) -> None:
        for n in self.graph.nodes:
            self.depth.append(max((self._after(i) for i in n.inputs), default=0))
            self.users.update(set(n.inputs))
        self.users.update(self.graph.outputs)

    def _after(self, i: int) -> int:
        return self.depth[i] + _multiplies(self.graph.nodes[i])

    def cut(self) -> Cut:
        """The parts of the graph. Raises _Other."""
        g = self.graph
        first, last = dict[int, Product](), dict[int, Product]()
        for i, n in enumerate(g.nodes):
            if _multiplies(n) and not self.depth[i]:
                result, product = self._with_vector(i)
                if any(g.nodes[j].operator != INPUT for j in product.read):
                    raise _Other
                first[result] = product
        for place, i in enumerate(g.outputs):
            if self._after(i) > 1:
                last[place] = self._output(i)
        made = [i for n, i in enumerate(g.outputs) if n not in last]
        made += [i for p in last.values() for i in p.read if g.nodes[i].operator != INPUT]
        count = sum(map(_multiplies, g.nodes))
        if not first or count != len(first) + len(last):
            raise _Other
        made = list(dict.fromkeys(made))
        rows, given = self._rows(first, made)
        return Cut(g, first, rows, tuple(given), tuple(made), last)

    def _with_vector(self, i: int) -> tuple[int, Product]:
        """The result of a product, with the vector that is added to it.
        Logits are rounded once, after their bias: before it, those of 64 would change by 10 %."""
        g, product = self.graph, self._product(i)
        readers = [k for k, n in enumerate(g.nodes) if i in n.inputs]
        if self.users[i] != 1 or not readers or not g.nodes[readers[0]].facets.adds:
            return i, product
        [k] = readers
        vectors = [j for j in g.nodes[k].inputs if j != i and self._is_vector(j)]
        if not vectors or not self._is_typed(k, vectors[0]):
            return i, product
        return k, replace(product, added=vectors[0])

    def _is_vector(self, i: int) -> bool:
        n = self.graph.nodes[i]
        return n.operator == INPUT and all(d == 1 for d in n.shape[:-1])

    def _output(self, i: int) -> Product:
        """The product that an output is, or the sum of one and an input. Raises _Other."""
        g = self.graph
        n = g.nodes[i]
        if n.facets.converts and n.dtype == g.nodes[n.inputs[0]].dtype:
            i, n = n.inputs[0], g.nodes[n.inputs[0]]
        if not n.facets.adds:
            return self._scaled(i)
        sums = [j for j in n.inputs if g.nodes[j].operator == INPUT and g.nodes[j].shape == n.shape]
        others = [j for j in n.inputs if j not in sums]
        if not (len(sums) == len(others) == 1 and self._is_typed(i, *sums)):
            raise _Other
        return replace(self._scaled(others[0]), added=sums[0])

    def _scaled(self, i: int) -> Product:
        """A product that only this output needs, with a number as its factor. Raises _Other."""
        n = self.graph.nodes[i]
        numbers = [j for j in n.inputs if self.graph.nodes[j].operator == CONSTANT]
        if self.users[i] > 1:
            raise _Other
        if _multiplies(n):
            return self._product(i)
        if not (n.facets.multiplies and len(numbers) == 1):
            raise _Other
        [j] = (j for j in n.inputs if j not in numbers)
        inner, value = self._scaled(j), self.graph.nodes[numbers[0]].attributes["value"]
        return replace(inner, factor=inner.factor * value)

    def _product(self, i: int) -> Product:
        n = self.graph.nodes[i]
        left, right = (self._operand(j) for j in n.inputs)
        read = (i, left[0], right[0])
        if not (self._is_typed(*read) and all(self._is_aligned(j) for j in read)):
            raise _Other
        return Product(left, right)

    def _operand(self, i: int) -> tuple[int, bool]:
        n = self.graph.nodes[i]
        if n.facets.permutes and n.attributes["dims"] == (1, 0):
            return n.inputs[0], True
        return i, False

    def _is_aligned(self, i: int) -> bool:
        """True if rows begin at multiples of 16 bytes, without which the library is slow."""
        last = self.graph.nodes[i].shape[-1]
        return isinstance(last, int) and last % 8 == 0

    def _is_typed(self, *nodes: int) -> bool:
        return all(self.graph.nodes[i].dtype.name == TYPE for i in nodes)

    def _rows(
        self, first: dict[int, Product], made: Sequence[int]
    ) -> tuple[KernelGraph, list[int]]:
        """The graph between the products, and the nodes that its inputs are. Raises _Other."""
        g, rows = self.graph, KernelGraph()
        new: dict[int, Tensor] = {}
        given: list[int] = []
        needed = g.needed(made, given=first.keys())
        needed |= {j for i in needed for j in g.nodes[i].inputs}
        for i in sorted(needed):
            n = g.nodes[i]
            if i in first or n.operator == INPUT:
                name = n.name if n.operator == INPUT else f"product{i}"
                new[i] = rows.new_input(n.shape, n.dtype.name, name, n.constant)
                given.append(i)
            elif _multiplies(n):
                raise _Other
            else:
                new[i] = rows.copy_node(g, i, [new[j] for j in n.inputs])
        if not made or any(i in given or i not in new for i in made):
            raise _Other
        for i in made:
            rows.mark_output(new[i], g.nodes[i].dtype.name)
        return rows, given


def cut(graph: KernelGraph) -> Cut | None:
    """A chunk's graph, cut at its products; None if they stand elsewhere, or have other types."""
    try:
        return _Cutting(graph).cut()
    except _Other:
        return None


_programs: Kept[tuple[object, ...], Program] = Kept(KEPT)
#: the cut graphs whose products are the library's; None for others
_cuts: Kept[tuple[object, ...], Cut | None] = Kept(KEPT)


def chunk_program(
    call: str, kind: object, make: Callable[[], KernelGraph], device: torch.device
) -> Program:
    """The program of a chunk, with products of kernels or of the library.
    Arguments and errors are those of `program_of`."""
    if device.type not in KERNEL_DEVICES:
        return program_of(call, kind, make, device)

    def choose() -> Cut | None:
        found = cut(graph := make())
        return found if found is not None and is_faster(graph, found, current_target()) else None

    def program() -> Program:
        chosen = _cuts.made_on(device, (call, kind), call, choose)
        if chosen is None:
            return program_of(call, kind, make, device)
        return chosen.program(program_of(call, (kind, "rows"), lambda: chosen.rows, device))

    key = (call, kind, TABLE.changes, device)
    return _programs.get(key) or _programs.made(key, program)


def is_faster(graph: KernelGraph, found: Cut, target: Target) -> bool:
    """True if the library's products and kernels for the rows are expected to be faster.
    Than kernels for all of the graph, or if there are none for all of it."""
    options = Options(target)
    try:
        rows = find(found.rows, options)[1].candidate.cost_us
    except CutesuperError:
        return False  # the search for all of the graph says what is wrong
    library = rows + sum(alone(graph, i, target).us for i in found.products)
    try:
        return find(graph, options, most_us=library)[1].candidate.cost_us > library
    except CutesuperError:  # too dear, for one
        return True
