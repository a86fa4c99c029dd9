"""Operators added to the table from outside the package, and detection of later changes to them.

Graphs, plans and keys refer to operators by name. For an operator of the package the name is
enough: its sources are hashed with those of the lowering. For the others `definitions` gives a hash
of each, and every cache whose keys name operators stores these hashes too.
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
    """Names of the operators of a graph and of the primitive operators they expand to."""
    return {n.operator for n in (*graph.nodes, *graph.expanded().nodes)}


def is_added(operator: Operator) -> bool:
    """True if part of an operator's code lies outside of the package."""
    return bool(vars(operator)) or not all(map(is_own_class, type(operator).__mro__[:-1]))


def added(names: Iterable[str]) -> tuple[str, ...]:
    """The added operators among these, sorted by name."""
    return tuple(sorted(n for n in set(names) if n in TABLE and is_added(TABLE[n])))


def definitions(names: Iterable[str]) -> dict[str, str]:
    """Hashes of the added operators among these, by name.

    For an operator that cannot be hashed the text is a new one each time, so a cache never finds
    it.
    """
    return {n: definition(TABLE[n]) or f"{_PROCESS}-{uuid.uuid4()}" for n in added(names)}


def are_still(texts: Sequence[str], names: Iterable[str]) -> bool:
    """True if the added operators still are what `definitions` said.
    For one that cannot be hashed, True if its text was made in this process."""
    now = [definition(TABLE[n]) for n in added(names)]
    return len(now) == len(texts) and all(
        text == known if known else text.startswith(_PROCESS)
        for text, known in zip(texts, now, strict=True)
    )


def definition(operator: Operator) -> str | None:
    """Hash of all that an added operator computes; None if it cannot be hashed."""
    try:
        return _hash(operator)
    except Unknown:
        return None


def _hash(operator: Operator) -> str:
    """Hash of an operator. Raises Unknown."""
    home = frozenset(c.__module__.partition(".")[0] for c in type(operator).__mro__)
    return fingerprint(operator, _whole_table, home)


def unknown(names: Iterable[str]) -> dict[str, str]:
    """The added operators that cannot be hashed, each with the reason."""
    found: dict[str, str] = {}
    for name in added(names):
        try:
            _hash(TABLE[name])
        except Unknown as reason:
            found[name] = str(reason)
    return found


def _whole_table(x: Any) -> Any:
    """Replace the table, or a look-up in it, by all added operators: any of them may be meant."""
    if x is not TABLE and x is not lookup:
        return None
    return [TABLE[name] for name in added(TABLE)]


@dataclass(frozen=True)
class _Made:
    operator: Operator
    definition: str | None  # "" for an operator of the package

    def is_still(self, now: Operator | None) -> bool:
        if now is self.operator and not self.definition:
            return True  # of the package, or not known
        return now is not None and self.definition == _made(now).definition is not None


class Defined:
    """Definitions of a graph's operators at the time something was made from it.

    Args:
        graph: the graph it was made from.
        again: advice for the message if one has changed: "superoptimize it again".
    """

    def __init__(self, graph: KernelGraph, again: str) -> None:
        self._again = again
        self._made = {name: _made(lookup(name)) for name in sorted(names_of(graph))}
        self._looked = TABLE.changes

    def check(self) -> None:
        """Check that the operators have not changed; one that cannot be hashed passes.

        Raises:
            OperatorError: one has changed; names it.
        """
        for name, made in self._made.items():
            if not made.is_still(TABLE.get(name)):
                raise OperatorError(
                    f"operator {name}: it was defined anew, and this was made with what it was "
                    f"before; {self._again}"
                )

    def check_table(self) -> None:
        """`check`, if operators were entered into the table since the last look; else free."""
        if TABLE.changes != self._looked:
            self.check()
            self._looked = TABLE.changes


def _made(operator: Operator) -> _Made:
    return _Made(operator, definition(operator) if is_added(operator) else "")
