"""Extraction: the cheapest programs of a saturated table, read backwards from the goal.

A program is one derivation for each class that the goal needs. Always deciding the largest pending
class produces every program exactly once, without dead code and without enumerating orders of
operators. Programs that have the same classes pending have the same best completions, so a dynamic
program over sets of pending classes finds the k cheapest; a class that two users share is pending
once and therefore paid once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

from cutesuper.egraph.clock import look
from cutesuper.egraph.labelled import LabelledProgram
from cutesuper.egraph.saturate import Derivation, Table
from cutesuper.ir.block import (
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
)
from cutesuper.ir.check import OPENED
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.operators.base import CONSTANT

#: cost of computing class ``i`` by a derivation, in microseconds of the whole kernel
Price = Callable[[int, Derivation], float]


class Extracted(NamedTuple):
    """A program: the chosen derivation for every class that it needs."""

    cost: float
    choices: tuple[tuple[int, Derivation], ...]
    outputs: tuple[int, ...]


class _Chain(NamedTuple):
    """A completion as a linked list, so that programs share their ends."""

    cost: float
    choice: tuple[int, Derivation] | None
    rest: _Chain | None


@dataclass
class _Extraction:
    table: Table
    price: Price
    count: int
    slack: float
    limit: int
    memo: dict[frozenset[int], list[_Chain]] = field(default_factory=dict)
    ways: dict[int, list[tuple[float, Derivation]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.table.space.table.size
        self.rank = [(size(c.form), i) for i, c in enumerate(self.table.classes)]

    def best(self, pending: frozenset[int]) -> list[_Chain]:
        """The cheapest ways to compute all pending classes, best first."""
        if not pending:
            return [_Chain(0.0, None, None)]
        if pending in self.memo:
            return self.memo[pending]
        if len(self.memo) >= self.limit:
            return []
        look()
        top = max(pending, key=self.rank.__getitem__)
        found: list[_Chain] = []
        for own, d in self._derivations(top):
            rest = self.best((pending - {top}) | set(d.inputs))
            found += [_Chain(own + chain.cost, (top, d), chain) for chain in rest]
        found.sort(key=lambda c: c.cost)  # stable: equal costs stay in the order of discovery
        limit = found[0].cost * self.slack if found else inf
        self.memo[pending] = [c for c in found[: self.count] if c.cost <= limit]
        return self.memo[pending]

    def _derivations(self, i: int) -> list[tuple[float, Derivation]]:
        """Ways to compute a class; among those with the same operands, only the cheapest.

        ``square(x)`` and ``mul(x, x)`` are one value of one operand: one program is enough.
        """
        if i not in self.ways:
            best: dict[frozenset[int], tuple[float, Derivation]] = {}
            for d in self.table.derivations[i]:
                operands, own = frozenset(d.inputs), self.price(i, d)
                if operands not in best or own < best[operands][0]:
                    best[operands] = (own, d)
            self.ways[i] = list(best.values())
        return self.ways[i]


def extract(
    table: Table, price: Price, count: int = 16, slack: float = 1.5, limit: int = 4000
) -> list[Extracted]:
    """The ``count`` cheapest programs that cost at most ``slack`` times the cheapest.

    Args:
        table: a saturated table.
        price: cost of one derivation.
        count: how many programs to return.
        slack: highest cost, relative to the cheapest.
        limit: greatest number of sets of pending classes to examine (5,342 for all 15 splits of
            LayerNorm backward).

    Returns:
        Programs, cheapest first; none where an output cannot be computed under this split.
    """
    search = _Extraction(table, price, count, slack, limit)
    found: list[Extracted] = []
    for goals in product(*table.finished()):
        chains = search.best(frozenset(goals))
        found += [Extracted(chain.cost, _choices(chain), goals) for chain in chains]
    found.sort(key=lambda e: e.cost)
    return [e for e in found[:count] if e.cost <= found[0].cost * slack]


def _choices(chain: _Chain) -> tuple[tuple[int, Derivation], ...]:
    choices: list[tuple[int, Derivation]] = []
    link: _Chain | None = chain
    while link is not None and link.choice is not None:
        choices.append(link.choice)
        link = link.rest
    return tuple(choices)


class Partial(NamedTuple):
    """A tensor of partial results between the two kernels of a structure.
    Its type is that of `BlockProgram.partials`.

    ``map``: for each dimension its label, or the grid axis that leaves one slice for each part.
    """

    name: str
    map: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """A program without sizes: every label is one tile, axes have extent 1.

    Tensors are called ``in0``, ``in1``, ... and ``out0``, ... by their index in the region, and
    ``part0``, ... between the kernels.

    Attributes:
        programs: one kernel; two where blocks of the grid leave partial results.
        partials: the tensors between the two.
        parts: the label of the second kernel that counts the partial results.
    """

    programs: tuple[BlockProgram, ...]
    partials: tuple[Partial, ...] = ()
    parts: str | None = None


def structure(table: Table, extracted: Extracted) -> Structure:
    """The block programs of an extracted program.

    before: ``num = grid_reduce(acc(P V), S.grid)``, stored divided by ``den``; after: a kernel that
    stores ``acc(P V)`` and ``acc(P 1)`` for each part of S, and one that sums and divides.
    """
    axis = table.split.parted_axis
    late = [i for i in extracted.outputs if _is_late(table, i)]
    first = _Builder(table, extracted, None)
    if axis is None or not late:
        first.store_outputs(extracted.outputs)
        return Structure((first.program(table.split.axes),))
    second = _Builder(table, extracted, first)
    for n, i in enumerate(extracted.outputs):
        (second if i in late else first).store_output(n, i)
    return Structure(
        (first.program(table.split.axes), second.program(second.axes())),
        tuple(first.partials.values()),
        second.parts,
    )


def _is_late(table: Table, i: int) -> bool:
    """True if a class belongs to the second kernel."""
    return (table.split.parted_axis, 1) in table.classes[i].state.closed


class _Builder:
    """Collects the operations of one kernel.

    Args:
        table: the classes.
        extracted: the derivation of each class.
        first: for the second kernel of a pair, the first one.
    """

    def __init__(self, table: Table, extracted: Extracted, first: _Builder | None) -> None:
        self.table, self.source, self.first = table, table.space.program, first
        self.chosen = dict(extracted.choices)
        self.ops: list[BlockOp] = []
        self.index: dict[Any, int] = {}
        self.partials: dict[int, Partial] = {}
        self.parts = f"{table.split.parted}_parts"
        self.dims = dict(self.source.dims)
        if first is not None:
            self.dims = {d: n for d, n in self.dims.items() if d != table.split.parted}
            self.dims[self.parts] = 1

    # ------------------------------------------------------------------------------- operations

    def store_outputs(self, outputs: tuple[int, ...]) -> None:
        for n, i in enumerate(outputs):
            self.store_output(n, i)

    def store_output(self, n: int, i: int) -> None:
        value = self.place(i)
        self._add(STORE, (value,), self.ops[value].dims, self.source.store(n))

    def place(self, i: int) -> int:
        """The operation that computes a class."""
        if i not in self.index:
            d = self.chosen[i]
            if d.kind == GRID_REDUCE and self.table.split.parted:
                self.index[i] = self._combine(d)
            else:
                args = tuple(self.place(j) for j in d.inputs)
                op = _block_op(self.source, d, args, self._ordered(self.table.classes[i].labels))
                self.ops.append(op)
                self.index[i] = len(self.ops) - 1
        return self.index[i]

    def partial(self, i: int) -> Partial:
        """The tensor in which the first kernel leaves a class for the second one."""
        if i not in self.partials:
            value, axis = self.place(i), self.table.split.parted_axis
            assert axis is not None
            labels = self._ordered(self.table.classes[i].labels)
            # a tensor may only grow along its first dimension
            open_ = tuple(d for d in labels if isinstance(self.source.dims[d], Symbol))
            mapping = (*open_, axis, *(d for d in labels if d not in open_))
            made = Partial(f"part{len(self.partials)}", mapping)
            self.partials[i] = made
            self._add(STORE, (value,), labels, {"tensor": made.name, "map": mapping})
        return self.partials[i]

    def _combine(self, d: Derivation) -> int:
        """Load partial results and reduce them, rescaled where a maximum shifted them."""
        x = self._load_partial(d.inputs[0])
        op = dict(d.attributes)["op"]
        if len(d.inputs) == 3:
            t, top = self._load_partial(d.inputs[1]), self.place(d.inputs[2])
            shift = self._add("sub", (t, top), self.ops[t].dims)
            weight = self._add("exp", (shift,), self.ops[t].dims)
            x = self._add("mul", (x, weight), self.ops[x].dims)
        kept = tuple(n for n in self.ops[x].dims if n != self.parts)
        return self._add(op, (x,), kept, {"over": self.parts})

    def _load_partial(self, i: int) -> int:
        assert self.first is not None
        key = ("partial", i)
        if key not in self.index:
            tensor = self.first.partial(i)
            axis = self.table.split.parted_axis
            mapping = tuple(self.parts if d == axis else d for d in tensor.map)
            dims = self._ordered(frozenset(mapping))
            pairs = {"pairs": True} if self.first.ops[self.first.place(i)].places else {}
            given = {"tensor": tensor.name, "map": mapping, **pairs}
            self.index[key] = self._add(LOAD, (), dims, given)
        return self.index[key]

    def _add(
        self,
        kind: str,
        inputs: tuple[int, ...],
        dims: tuple[str, ...],
        attributes: dict[str, Any] | None = None,
    ) -> int:
        self.ops.append(BlockOp(kind, inputs, dims, attributes or {}))
        return len(self.ops) - 1

    def _ordered(self, labels: frozenset[str]) -> tuple[str, ...]:
        return tuple(d for d in self.dims if d in labels)

    # ---------------------------------------------------------------------------------- program

    def axes(self) -> tuple[Axis, ...]:
        """Axes of the second kernel; its outputs are split over the grid."""
        reduced = {op.attributes.get("over") for op in self.ops}
        used = {d for op in self.ops for d in op.dims} - reduced
        return tuple(Axis(d, AxisKind.GRID, 1) for d in self.dims if d in used)

    def program(self, axes: tuple[Axis, ...]) -> BlockProgram:
        """The collected operations as a program without sizes."""
        return unsized(self.dims, axes, tuple(self.ops))


def unsized(
    dims: Mapping[str, Dim], axes: tuple[Axis, ...], ops: tuple[BlockOp, ...]
) -> BlockProgram:
    """A program without sizes.
    Exactly one axis of a symbolic label has no extent, the innermost that may be open, and its tile
    is 1."""
    used = {d for op in ops for d in op.dims}
    dims = {d: n for d, n in dims.items() if d in used}
    inner = {a.dim: a.kind for kind in OPENED for a in axes if a.kind == kind}
    opened = tuple(
        replace(a, extent=None)
        if isinstance(dims[a.dim], Symbol) and a.kind == inner.get(a.dim)
        else a
        for a in axes
        if a.dim in dims
    )
    tile = {n: 1 if isinstance(d, Symbol) else d for n, d in dims.items()}
    return BlockProgram(dims, opened, tile, ops)


def _block_op(
    program: LabelledProgram, d: Derivation, args: tuple[int, ...], dims: tuple[str, ...]
) -> BlockOp:
    attributes = dict(d.attributes)
    if d.kind in (LOAD, CONSTANT):
        source = program.ops[attributes["op"]]
        attributes = dict(source.attributes)
        if d.kind == LOAD:
            attributes["tensor"] = f"in{attributes['tensor']}"
    elif d.kind in ENDING:
        attributes["axis"] = d.over
    elif d.over is not None:
        attributes["over"] = d.over
    return BlockOp(d.kind, args, dims, attributes)
