"""All programs over a few inputs, smallest first, without any idea of what is wanted.

Every value is known by its residues at one random point of a finite field, and by the normal form
of the program that gave it: ``x`` and ``(x * y) / y`` are two values, ``x * (y / z)`` and
``(x * y) / z`` are one. Nothing is pruned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cutesuper.egraph.expression import Expressions
from cutesuper.egraph.labelled import LabelledOp, LabelledProgram
from cutesuper.ir.field import DivisionByZero, FieldAlgebra, FieldValue, draw_primes, uniform
from cutesuper.ir.operators.base import lookup

#: extent of every label; with 2, a sum of what does not vary would be x + x
EXTENT = 5


class Step(NamedTuple):
    """One way to compute a value: a kind, operands by number, and a label that is reduced."""

    kind: str
    inputs: tuple[int, ...]
    over: str | None = None


@dataclass
class Forward:
    """The values of all programs of at most ``most`` operations.

    Args:
        inputs: labels of each input.
        unary, binary: element-wise operators.
        reductions: ``(kind, label)``.
        most: operations of a program, shared parts counted each time.

    Attributes:
        values: of every program, those of the inputs first.
        cost: the least number of operations that gives each.
        ways: for each value every last operation.
    """

    inputs: tuple[frozenset[str], ...]
    unary: tuple[str, ...]
    binary: tuple[str, ...]
    reductions: tuple[tuple[str, str], ...]
    most: int
    values: list[FieldValue] = field(default_factory=list)
    labels: list[frozenset[str]] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    ways: list[list[Step]] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)
    number: dict[tuple[frozenset[str], int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        primes, rng = draw_primes([0]), np.random.default_rng(0)  # as the search draws them
        self.a, self.table = FieldAlgebra(0, primes=primes), Expressions()
        for n, labels in enumerate(self.inputs):
            dims = [f"{label}.tile" for label in sorted(labels)]
            x = uniform(rng, dims, [EXTENT] * len(dims), primes=primes)
            self._enter(self.table.variable(str(n), labels), x, labels, 0, None)
        for cost in range(1, self.most + 1):
            for step in list(self._steps(cost)):
                self._apply(step, cost)

    def _steps(self, cost: int) -> Iterator[Step]:
        """Every operation on known values that takes so many in all."""
        known = range(len(self.values))
        for i in known:
            if self.cost[i] == cost - 1:
                yield from (Step(kind, (i,)) for kind in self.unary)
                yield from (
                    Step(kind, (i,), over)
                    for kind, over in self.reductions
                    if over in self.labels[i]
                )
        for i in known:
            for j in known:
                if self.cost[i] + self.cost[j] == cost - 1:
                    kinds = (k for k in self.binary if i <= j or k in ("sub", "div"))
                    yield from (Step(kind, (i, j)) for kind in kinds)

    def _apply(self, step: Step, cost: int) -> None:
        x = [self.values[i] for i in step.inputs]
        labels = frozenset[str]().union(*(self.labels[i] for i in step.inputs))
        forms, e = [self.forms[i] for i in step.inputs], self.table
        try:
            if step.over is None:
                y = lookup(step.kind).symbolic(self.a, x, {})
                form = lookup(step.kind).symbolic(e, forms, {})
            else:
                parts = (f"{step.over}.tile",)
                marked, largest = e.mark(forms[0], step.over), step.kind == "max"
                y = self.a.max(x[0], parts) if largest else self.a.sum(x[0], parts)
                folded = e.fold("max", marked, step.over, parts)
                form = folded if largest else e.reduce(marked, parts)
        except DivisionByZero:
            return
        self._enter(form, y, labels - {step.over}, cost, step)

    def _enter(
        self, form: int, value: FieldValue, labels: frozenset[str], cost: int, step: Step | None
    ) -> None:
        key = (labels, form, value.key())
        if key not in self.number:
            self.number[key] = len(self.values)
            self.values.append(value)
            self.labels.append(labels)
            self.forms.append(form)
            self.cost.append(cost)
            self.ways.append([])
        if step is not None and self.number[key] >= len(self.inputs):
            self.ways[self.number[key]].append(step)

    # ------------------------------------------------------------------------------- what leads on

    def paths(self, goal: int, most: int, allowed: set[Any]) -> dict[int, set[Step]]:
        """The operations of all programs for a value that take at most ``most``, by their value."""
        found: dict[int, set[Step]] = {}
        queue, spare = [(goal, most)], {goal: most}
        while queue:
            i, left = queue.pop()
            if left < spare[i]:
                continue
            for step in self.ways[i]:
                least = sum(self.cost[j] for j in step.inputs) + 1
                name = step.kind if step.over is None else (step.kind, step.over)
                if least > left or name not in allowed:
                    continue
                found.setdefault(i, set()).add(step)
                for j in step.inputs:
                    room = left - least + self.cost[j]
                    if room > spare.get(j, -1):
                        spare[j] = room
                        queue.append((j, room))
        return found

    def program(self, goal: int) -> LabelledProgram:
        """The first program that was found for a value; all inputs are loaded."""
        ops = [
            LabelledOp("load", (), x, {"tensor": n, "map": tuple(sorted(x))})
            for n, x in enumerate(self.inputs)
        ]
        index = {i: i for i in range(len(ops))}

        def place(i: int) -> int:
            if i not in index:
                step = self.ways[i][0]
                args = tuple(place(j) for j in step.inputs)
                ops.append(LabelledOp(step.kind, args, self.labels[i], {}, step.over))
                index[i] = len(ops) - 1
            return index[i]

        last = place(goal)
        dims = dict.fromkeys(sorted(frozenset[str]().union(*self.inputs)), 8)
        out = tuple(d for d in dims if d in self.labels[goal])
        return LabelledProgram(dims, tuple(ops), ((last, out),))

    def show(self, i: int, step: Step | None = None) -> str:
        """``sum(mul(0, 1), K)``."""
        if i < len(self.inputs):
            return "xyzw"[i]
        step = step or self.ways[i][0]
        args = ", ".join(self.show(j) for j in step.inputs)
        return f"{step.kind}({args}{', ' + step.over if step.over else ''})"
