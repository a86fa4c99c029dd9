"""Extraction: the cheapest programs of a saturated table, read backwards from the goal.

A program is one derivation for each class that the goal needs. Always deciding the largest pending
class meets every program exactly once, without dead code and without an order of operators to
enumerate. Programs that have the same classes pending have the same best completions, so a dynamic
program over sets of pending classes finds the k cheapest; a class that two users share is pending
once and therefore paid once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import NamedTuple

from cutesuper.graph.block import LOAD, STORE, AxisKind, BlockOp, BlockProgram
from cutesuper.graph.dims import Symbol
from cutesuper.search.labels import LabelledProgram
from cutesuper.search.saturate import Derivation, Table

#: cost of computing class ``i`` by a derivation, in microseconds of the whole kernel
Price = Callable[[int, Derivation], float]


class Extracted(NamedTuple):
    """A program: for every class that it needs, the derivation chosen."""

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
        """Ways to compute a class; of those with the same operands only the cheapest.

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
        count: how many.
        slack: relative to the cheapest.
        limit: sets of pending classes to look at (5,342 for all 15 splits of LayerNorm
            backward).

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


def block_program(table: Table, extracted: Extracted) -> BlockProgram:
    """A program as a structure: every label is one tile, axes have extent 1.

    Tensors are called ``in0``, ``in1``, ... and ``out0``, ... by their index in the region. A grid
    axis over a symbolic label has no extent, and its tile is 1.
    """
    program = table.space.program
    chosen = dict(extracted.choices)
    ops: list[BlockOp] = []
    index: dict[int, int] = {}

    def place(i: int) -> int:
        if i not in index:
            args = tuple(place(j) for j in chosen[i].inputs)
            ops.append(_block_op(program, chosen[i], args, _ordered(program, table, i)))
            index[i] = len(ops) - 1
        return index[i]

    for n, (i, (_, mapping)) in enumerate(zip(extracted.outputs, program.outputs, strict=True)):
        value = place(i)
        attributes = {"tensor": f"out{n}", "map": mapping}
        ops.append(BlockOp(STORE, (value,), ops[value].dims, attributes))
    axes = tuple(
        replace(a, extent=None)
        if a.kind == AxisKind.GRID and isinstance(program.dims[a.dim], Symbol)
        else a
        for a in table.split.axes
    )
    tile = {n: 1 if isinstance(d, Symbol) else d for n, d in program.dims.items()}
    return BlockProgram(dict(program.dims), axes, tile, tuple(ops))


def _ordered(program: LabelledProgram, table: Table, i: int) -> tuple[str, ...]:
    return tuple(d for d in program.dims if d in table.classes[i].labels)


def _block_op(
    program: LabelledProgram, d: Derivation, args: tuple[int, ...], dims: tuple[str, ...]
) -> BlockOp:
    attributes = dict(d.attributes)
    if d.kind in (LOAD, "constant"):
        source = program.ops[attributes["op"]]
        attributes = dict(source.attributes)
        if d.kind == LOAD:
            attributes["tensor"] = f"in{attributes['tensor']}"
    elif d.kind in ("accumulate", "cluster_reduce"):
        attributes["axis"] = d.over
    elif d.over is not None:
        attributes["over"] = d.over
    return BlockOp(d.kind, args, dims, attributes)
