"""Splits: which axis kinds divide which label, and the rules that a kernel skeleton adds.

One choice for all tensors: an axis that splits a label splits every tensor that has the label. A
program of three labels has some ten to a hundred splits, where maps for each tensor would be
thousands.

before: labels M, N (stored) and K (contracted); after, among 49 splits:
``M:grid N:grid K:loop`` and ``M:grid N:grid K:cluster+loop``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Protocol

from cutesuper.graph.block import ORDER, Axis, AxisKind
from cutesuper.search.labels import LabelledProgram


@dataclass(frozen=True)
class Split:
    """Which axis kinds divide each label, outermost first."""

    kinds: tuple[tuple[str, tuple[AxisKind, ...]], ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """One axis for each, of extent 1."""
        return tuple(Axis(label, kind, 1) for label, kinds in self.kinds for kind in kinds)

    def parts(self, label: str) -> tuple[str, ...]:
        """Names of the parts of a label: its axes, and its tile."""
        kinds = dict(self.kinds)[label]
        return (*(f"{label}.{k}" for k in kinds), f"{label}.tile")

    def tile_parts(self, label: str) -> tuple[str, ...]:
        """The parts that a reduction of a tile covers: those no axis stands for."""
        absent = set(all_parts(label)) - set(self.parts(label))
        return tuple(sorted((*absent, f"{label}.tile")))

    def __str__(self) -> str:
        shown = ((label, "+".join(kinds)) for label, kinds in self.kinds)
        return " ".join(f"{label}:{kinds or 'whole'}" for label, kinds in shown)


def all_parts(label: str) -> tuple[str, ...]:
    """Every part that a label may have."""
    return (*(f"{label}.{k}" for k in ORDER), f"{label}.tile")


class State(NamedTuple):
    """What a value depends on besides its labels; see `graph.check.ValueState`."""

    inside: frozenset[str]
    closed: frozenset[str]
    pending: frozenset[str]


class Operand(NamedTuple):
    """An operand of a contraction; ``loaded``: it is a plain load."""

    labels: frozenset[str]
    state: State
    loaded: bool


class Rules(Protocol):
    """What a kernel skeleton can do; asked before a class is formed."""

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """Whether an element-wise operator may take values with these labels.

        ``state``: of the result. It is asked with one operand for unary operators.
        """
        ...

    def reduces(self, labels: frozenset[str], over: str) -> bool:
        """Whether a tile with these labels may be reduced over one of them."""
        ...

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Whether the product of two tiles may be contracted, in this order."""
        ...


class AnyRules:
    """Everything that `graph.check` allows (grid-split reductions apart: nothing sums them)."""

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        return True

    def reduces(self, labels: frozenset[str], over: str) -> bool:
        return True

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        return True


def splits(program: LabelledProgram) -> Iterator[Split]:
    """Every assignment of axis kinds to labels, fewest axes first.

    At most one cluster, one loop and one persistent axis; a label of the outputs is a grid axis,
    perhaps with a loop or persistent one inside; a label that is only reduced has none of the grid.
    """
    outer, inner = (AxisKind.GRID,), (AxisKind.CLUSTER, AxisKind.PERSISTENT, AxisKind.LOOP)
    options: list[list[tuple[AxisKind, ...]]] = []
    for label in program.dims:
        if label in program.reduced:
            options.append([c for n in range(3) for c in combinations(inner, n)])
        else:
            options.append([outer, (*outer, AxisKind.LOOP), (*outer, AxisKind.PERSISTENT)])
    chosen: list[tuple[tuple[AxisKind, ...], ...]] = [()]
    for option in options:
        chosen = [(*c, o) for c in chosen for o in option if _once((*c, o))]
    for c in sorted(chosen, key=lambda c: sum(map(len, c))):
        yield Split(tuple(zip(program.dims, c, strict=True)))


def _once(kinds: tuple[tuple[AxisKind, ...], ...]) -> bool:
    flat = [k for ks in kinds for k in ks if k != AxisKind.GRID]
    return len(set(flat)) == len(flat)
