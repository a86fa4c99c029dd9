"""Forward enumeration of programs, as in superoptimizers, to compare saturation with.

A state is a partial program: the classes that it has computed. One step adds an operator that makes
a new class from them. The steps are those of `cutesuper.egraph.saturate.Table`, formed when they
are first needed and then remembered, so that a state costs the enumeration itself and little else.

before: ``{X, W}`` and 8 operators; after, among 600 states: ``matmul, accumulate, square, mean,
accumulate, add, sqrt, div``, the fused RMSNorm + Linear.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, cast

from cutesuper.egraph.extract import extract
from cutesuper.egraph.goal import Goal
from cutesuper.egraph.labelled import LabelledProgram
from cutesuper.egraph.saturate import Derivation, Table, saturate
from cutesuper.egraph.space import Pairing, Space
from cutesuper.egraph.splits import AnyRules, Split

#: states between two checks of the clock (one takes some 3 us)
_PATIENCE = 256
#: operators whose operands have no order (labels distinguish those of a contraction)
_UNORDERED = ("mul", "add", "matmul")

#: a program: for every output its expression
Canonical = tuple[str, ...]


class Step(NamedTuple):
    """An operator that can be added: the class that it makes, and its operands."""

    result: int
    inputs: tuple[int, ...]


@dataclass
class Count:
    """The findings of an enumeration.

    Attributes:
        states: programs, complete or not; without an order each counts once for each of its orders.
        complete: programs that compute every output and nothing else, repetitions included.
        programs: the different ones.
        finished: whether all states were visited.
        cpu_s: CPU seconds.
    """

    states: int = 0
    complete: int = 0
    programs: set[Canonical] = field(default_factory=set)
    finished: bool = True
    cpu_s: float = 0.0


class _Useful:
    """A replacement for `Goal` to which every form is useful."""

    def useful(self, form: int) -> bool:
        return True


class AnySpace(Space):
    """A space without the expression test: only labels and states restrict what is formed."""

    def __init__(self, program: LabelledProgram) -> None:
        super().__init__(program)
        self.goal = cast(Goal, _Useful())
        chosen = tuple(product(self.uninterpreted, (False, True)))
        self._anything = Pairing(True, True, True, True, chosen, False)

    def pairing(self, x: int, y: int) -> Pairing:
        """The pairing under which every operator may take every two values."""
        return self._anything


class _OutOfTime(Exception):
    pass


class Enumeration:
    """All programs of at most ``most`` operators under one split.

    A program ends where it has computed every output. Two operators of a program never make the
    same class.

    Args:
        space: of the program; an `AnySpace` for no expression test.
        split: which axes divide which label.
        most: operators of a program; loads and constants are given, stores are not counted.
        ordered: visit each set of operators once. Otherwise every order of them is a state.
        limit_s: CPU seconds.

    Raises:
        ValueError: a program with a maximum; sums that it rescales take three operands.
    """

    def __init__(
        self,
        space: Space,
        split: Split,
        most: int,
        *,
        ordered: bool = True,
        limit_s: float = float("inf"),
    ) -> None:
        if any(kind == "max" for kind, _ in space.reductions):
            raise ValueError(
                "forward enumeration: the program has a maximum, and a sum that is rescaled takes "
                "three operands; choose a program without"
            )
        self.count = Count()
        self._start = time.process_time()
        self._end = self._start + limit_s
        self._table = Table(space, split, AnyRules(), 0, 0)
        self._most, self._ordered = most, ordered
        self._classes = list(range(len(self._table.classes)))  # of the program so far
        self._have = set(self._classes)
        self._chosen: list[Step] = []
        self._steps: dict[tuple[int, int], list[Step]] = {}
        self._stored: dict[int, list[int]] = {}

    def run(self) -> Count:
        """Visit all states, or as many as time allows."""
        try:
            first = [s for n in range(len(self._classes)) for s in self._enabled(n)]
            self._extend(first)
        except _OutOfTime:
            self.count.finished = False
        self.count.cpu_s = time.process_time() - self._start
        return self.count

    def _extend(self, steps: list[Step]) -> None:
        """Add each of the steps; a child may use those after it, and those that it makes possible.

        Ordered, a set of operators is visited once: its first operator of the list must come next,
        since skipped ones are excluded for good (set enumeration, R. Rymon, KR 1992; here the list
        grows with the steps that an operator makes possible).
        """
        for n, step in enumerate(steps):
            if step.result in self._have:
                continue
            self.count.states += 1
            if self.count.states % _PATIENCE == 0:
                self._look_at_clock()
            self._have.add(step.result)
            self._classes.append(step.result)
            self._chosen.append(step)
            complete = bool(self._outputs(step.result)) and self._complete()
            if not complete and len(self._chosen) < self._most:
                rest = steps[n + 1 :] if self._ordered else steps[:n] + steps[n + 1 :]
                self._extend(rest + self._enabled(len(self._classes) - 1))
            self._chosen.pop()
            self._classes.pop()
            self._have.remove(step.result)

    def _look_at_clock(self) -> None:
        if time.process_time() > self._end:
            raise _OutOfTime

    def _enabled(self, n: int) -> list[Step]:
        """Steps that take class number n of the program, alone or with itself or earlier ones."""
        new, found = self._classes[n], list[Step]()
        for other in self._classes[: n + 1]:
            pair = (new, other) if new > other else (other, new)
            found += self._steps[pair] if pair in self._steps else self._formed(*pair)
        return found

    def _formed(self, i: int, j: int) -> list[Step]:
        """Steps that take two classes, or those that take one if both are the same.

        ``square(x)`` and ``mul(x, x)`` make one class of one operand: one step, as in `extract`.
        """
        self._look_at_clock()
        made = self._table.results(i, j)
        if i == j:
            made = self._table.results(i) + made
        steps = {(result, frozenset(d.inputs)): Step(result, d.inputs) for result, d in made}
        self._steps[i, j] = list(steps.values())
        return self._steps[i, j]

    def _outputs(self, i: int) -> list[int]:
        if i not in self._stored:
            self._stored[i] = self._table.stored_as(i)
        return self._stored[i]

    def _complete(self) -> bool:
        """True if every output is computed; counts programs in which nothing is superfluous."""
        found = [
            [s.result for s in self._chosen if n in self._outputs(s.result)]
            for n in range(len(self._table.goals))
        ]
        inputs = {s.result: s.inputs for s in self._chosen}
        for goals in product(*found):
            if len(_needed(goals, inputs)) == len(inputs):
                self.count.complete += 1
                self.count.programs.add(canonical(self._table, inputs, goals))
        return all(found)


def _needed(goals: Sequence[int], inputs: Mapping[int, Sequence[int]]) -> set[int]:
    """Classes, besides the given ones, from which the goals are computed."""
    needed: set[int] = set()
    queue = list(goals)
    while queue:
        i = queue.pop()
        if i in inputs and i not in needed:
            needed.add(i)
            queue += inputs[i]
    return needed


def canonical(table: Table, inputs: Mapping[int, Sequence[int]], goals: Sequence[int]) -> Canonical:
    """A program in a form independent of its table's numbering of classes.

    Args:
        table: complete: it contains everything that can be formed from the program's classes.
        inputs: the operands of each class.
        goals: the class of each output.
    """
    known: dict[int, str] = {}

    def text(i: int) -> str:
        if i not in known:
            d = _derivation(table, i, inputs.get(i, ()))
            args = [text(j) for j in d.inputs]
            args = sorted(args) if d.kind in _UNORDERED else args
            details = [str(x) for x in (d.over, d.attributes) if x]
            known[i] = f"{d.kind}({', '.join(args + details)})"
        return known[i]

    return tuple(text(i) for i in goals)


def _derivation(table: Table, i: int, operands: Sequence[int]) -> Derivation:
    """The first by name of the derivations of a class from these operands."""
    alike = (d for d in table.derivations[i] if set(d.inputs) == set(operands))
    return min(alike, key=lambda d: (d.kind, str(d.over)))


@dataclass(frozen=True)
class Saturated:
    """The results of saturation and extraction under one split.

    Attributes:
        classes, tried: classes kept, and results formed to find them.
        programs: all programs, of any length, with their operators.
        cpu_s: CPU seconds of both.
    """

    classes: int
    tried: int
    programs: dict[Canonical, int]
    cpu_s: float


def saturated(space: Space, split: Split) -> Saturated:
    """All programs of one split found by the search, at one unit for every operator."""
    start = time.process_time()
    table = saturate(space, split)
    extracted = extract(table, _one_each, count=MANY, slack=MANY, limit=MANY)
    cpu_s = time.process_time() - start
    programs = {
        canonical(table, {i: d.inputs for i, d in e.choices}, e.outputs): int(e.cost)
        for e in extracted
    }
    return Saturated(len(table.classes), table.tried, programs, cpu_s)


#: no limit to extraction (the splits of the ablation have at most 285 programs)
MANY = 100_000


def _one_each(i: int, d: Derivation) -> float:
    return float(bool(d.inputs))
