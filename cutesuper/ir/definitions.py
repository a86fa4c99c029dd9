"""Operators that were added to the table from outside of the package, and whether they are still
what they were.

Graphs, plans and keys have operators by name. Where an operator is the package's own, the name says
all: its sources are hashed with those of the lowering. `definitions` says what the others are, and
whoever remembers something by the names of operators remembers that too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cutesuper.errors import OperatorError
from cutesuper.ir.fingerprint import Unknown, fingerprint, is_own_class
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE, Operator, lookup

_PROCESS = str(uuid.uuid4())


def names_of(graph: KernelGraph) -> set[str]:
    """The operators of a graph, and those that they are made of."""
    return {n.operator for n in (*graph.nodes, *graph.expanded().nodes)}


def is_added(operator: Operator) -> bool:
    """Whether some of an operator's code stands outside of the package."""
    return bool(vars(operator)) or not all(map(is_own_class, type(operator).__mro__[:-1]))


def added(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these operators that were added, in order of their names."""
    return tuple(sorted(n for n in set(names) if n in TABLE and is_added(TABLE[n])))


def definitions(names: Iterable[str]) -> dict[str, str]:
    """What the added ones of these operators are: a hash for each, by name.

    Where that cannot be known, the text is another one each time: it is never found again.
    """
    return {n: definition(TABLE[n]) or f"{_PROCESS}-{uuid.uuid4()}" for n in added(names)}


def are_still(texts: Sequence[str], names: Iterable[str]) -> bool:
    """Whether the added ones of these operators are what `definitions` said; of what cannot be
    known, whether it was said in this process."""
    now = [definition(TABLE[n]) for n in added(names)]
    return len(now) == len(texts) and all(
        text == known if known else text.startswith(_PROCESS)
        for text, known in zip(texts, now, strict=True)
    )


def definition(operator: Operator) -> str | None:
    """A hash of all that an added operator computes; None where that cannot be known."""
    try:
        return _hash(operator)
    except Unknown:
        return None


def _hash(operator: Operator) -> str:
    """Raises Unknown."""
    home = frozenset(c.__module__.partition(".")[0] for c in type(operator).__mro__)
    return fingerprint(operator, _whole_table, home)


def unknown(names: Iterable[str]) -> dict[str, str]:
    """Which added operators cannot be told apart from what they will be, and why."""
    found: dict[str, str] = {}
    for name in added(names):
        try:
            _hash(TABLE[name])
        except Unknown as reason:
            found[name] = str(reason)
    return found


def _whole_table(x: Any) -> Any:
    """An operator that asks for others by name may mean any that was added."""
    if x is not TABLE and x is not lookup:
        return None
    return [TABLE[name] for name in added(TABLE)]


@dataclass(frozen=True)
class _Made:
    operator: Operator
    definition: str | None  # of an operator of the package: ""

    def is_still(self, now: Operator | None) -> bool:
        if now is self.operator and not self.definition:
            return True  # of the package, or nobody can know
        return now is not None and self.definition == _made(now).definition is not None


class Defined:
    """The operators of a graph as they were when something was made of it.

    Args:
        graph: of which it was made.
        again: what to do once one is another: "superoptimize it again".
    """

    def __init__(self, graph: KernelGraph, again: str) -> None:
        self._again = again
        self._made = {name: _made(lookup(name)) for name in sorted(names_of(graph))}
        self._looked = TABLE.changes

    def check(self) -> None:
        """Look whether operators are what they were; says nothing where nobody can know.

        Raises:
            OperatorError: one is not; names it.
        """
        for name, made in self._made.items():
            if not made.is_still(TABLE.get(name)):
                raise OperatorError(
                    f"operator {name}: it was defined anew, and this was made with what it was "
                    f"before; {self._again}"
                )

    def check_table(self) -> None:
        """The same where operators were entered anew since the last look; else costs nothing."""
        if TABLE.changes != self._looked:
            self.check()
            self._looked = TABLE.changes


def _made(operator: Operator) -> _Made:
    return _Made(operator, definition(operator) if is_added(operator) else "")


__all__ = [
    "Defined",
    "added",
    "are_still",
    "definition",
    "definitions",
    "is_added",
    "names_of",
    "unknown",
]
