"""Saturation: all useful values of one block program structure, each with all ways to compute it.

A `Split` says which axis kinds divide each label. A *class* is (normal form, labels, state, value
at one random point of a finite field); the state is what `graph.check` tracks: the axes inside
which a value lives, those that it needs ended, and those over which it is a partial result. New
classes are combined with all earlier ones; what can still become part of the goal is kept, with
every derivation. Programs are read off backwards by `extract`.

before: ``acc_K(X W) / sqrt(mean_K X^2)``, K split over a loop; after, among 20 classes:
``X[M, K]`` inside the loop, partial and whole ``XW[M, N]``, ``mean X^2 [M]``, ``XW / sqrt(..)``.

The value keeps apart what the normal form merges (the two rows of nested sums in QKNorm: 555 of
984 programs were wrong without it); it costs some 40 microseconds for each useful derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cutesuper.errors import SearchError
from cutesuper.graph.block import ACCUMULATE, CLUSTER_REDUCE, LOAD, Axis, AxisKind
from cutesuper.graph.field import DivisionByZero, FieldAlgebra, FieldValue, uniform
from cutesuper.graph.operators import lookup
from cutesuper.search.labels import LabelledOp
from cutesuper.search.space import Space
from cutesuper.search.splits import AnyRules, Operand, Rules, Split, State

#: extent of every part of a label in class keys (1 would make a sum over it invisible)
_PART = 2
#: results formed for each class of the limit: high powers of quotients are few classes but slow
_TRIED = 20
_ITERATED = (AxisKind.LOOP, AxisKind.PERSISTENT)


class Class(NamedTuple):
    """A value of a block program; ``value`` is a hash of it at one random field point."""

    form: int
    labels: frozenset[str]
    state: State
    value: int


class Derivation(NamedTuple):
    """One way to compute a class from smaller ones.

    ``over``: a label (reductions, contractions) or an axis (``accumulate``, ``cluster_reduce``).
    ``attributes``: items; of a ``load`` the operation of the labelled program.
    """

    kind: str
    inputs: tuple[int, ...]
    over: str | None = None
    attributes: tuple[tuple[str, Any], ...] = ()


class TooLarge(SearchError):
    """More classes than the limit."""


class Table:
    """The classes of one split; `saturate` makes one."""

    def __init__(self, space: Space, split: Split, rules: Rules, limit: int, seed: int) -> None:
        self.space, self.split, self.rules, self.limit = space, split, rules, limit
        self.axes = {a.name: a for a in split.axes}
        self.classes: list[Class] = []
        self.values: list[FieldValue] = []
        self.derivations: list[list[Derivation]] = []
        self.tried = 0
        self._index: dict[Class, int] = {}
        self._usable: list[bool] = []  # whether element-wise operators may take a class
        self._field = FieldAlgebra(seed)
        self._rng = np.random.default_rng(seed)
        self.goals = self._leaves()

    # ------------------------------------------------------------------------------------- leaves

    def _leaves(self) -> list[tuple[int, frozenset[str], int]]:
        """Enter loads and constants; return form, labels and value of each goal."""
        program, values = self.space.program, []
        for i, op in enumerate(program.ops):
            values.append(self._source_value(op, [values[j] for j in op.inputs]))
            if op.kind in ("load", "constant"):
                inside = frozenset(
                    n for n, a in self.axes.items() if a.dim in op.labels and a.kind in _ITERATED
                )
                key = Class(
                    self.space.form(op, i, []), op.labels, State(inside, frozenset(), frozenset()),
                    values[i].key(),
                )
                if key not in self._index:  # a number that occurs twice is one class
                    self._enter(key, values[i], Derivation(op.kind, (), None, (("op", i),)))
        wanted = zip(program.outputs, self.space.goals, strict=True)
        return [(form, labels, values[i].key()) for (i, _), (form, labels) in wanted]

    def _source_value(self, op: LabelledOp, args: list[FieldValue]) -> FieldValue:
        if op.kind == "load":
            parts = [p for label in sorted(op.labels) for p in self.split.parts(label)]
            return uniform(self._rng, parts, [_PART] * len(parts))
        if op.over is None:
            return lookup(op.kind).symbolic(self._field, args, op.attributes)
        kind = op.kind
        if kind == "matmul":
            kind, args = "sum", [self._field.mul(*args)]
        return self._reduced_value(kind, args[0], op.over, self.split.parts(op.over))

    def _reduced_value(
        self, kind: str, x: FieldValue, label: str, parts: tuple[str, ...]
    ) -> FieldValue:
        if kind == "max":
            return self._field.max(x, parts)
        x = self._field.sum(x, parts, dict.fromkeys(parts, _PART))
        if kind == "sum":
            return x
        extent = prod(_PART for _ in self.split.parts(label))
        return self._field.div(x, self._field.constant(float(extent)))

    # --------------------------------------------------------------------------------- saturation

    def run(self) -> Table:
        """Combine until nothing new is useful. Raises TooLarge past the limit."""
        done = 0
        while done < len(self.classes):
            self._unary(done)
            for j in range(done + 1):
                self._pair(done, j)
            done += 1
            if len(self.classes) > self.limit or self.tried > _TRIED * self.limit:
                raise TooLarge(
                    f"split {self.split}: more than {self.limit} classes; raise "
                    "SearchOptions.max_classes or compute the program in pieces"
                )
        return self

    def _enter(self, key: Class, value: FieldValue, derivation: Derivation) -> None:
        i = self._index.get(key)
        if i is None:
            i = self._index[key] = len(self.classes)
            self.classes.append(key)
            self.values.append(value)
            self.derivations.append([])
            usable = self.rules.computes((key.labels,), key.state)
            self._usable.append(usable and self.space.partial_maximum(key.form) is None)
        self.derivations[i].append(derivation)

    def _offer(
        self, form: int, labels: frozenset[str], state: State, derivation: Derivation,
        value: Callable[[], FieldValue],
    ) -> None:
        """Keep a result that is larger than what it is made of, and useful.

        Larger: with subtraction a class can derive from itself, (a - b) + b.
        """
        self.tried += 1
        size = self.space.table.size
        if any(size(form) <= size(self.classes[i].form) for i in derivation.inputs):
            return
        if not self.space.goal.useful(form):
            return
        try:
            result = value()
        except DivisionByZero:
            return
        self._enter(Class(form, labels, state, result.key()), result, derivation)

    # ------------------------------------------------------------------------------ one operand

    def _unary(self, i: int) -> None:
        c, space = self.classes[i], self.space
        if self._usable[i]:
            for kind, attributes in space.unary:
                operator, given = lookup(kind), dict(attributes)
                form = operator.symbolic(space.table, [c.form], given)
                self._offer(
                    form, c.labels, c.state, Derivation(kind, (i,), None, attributes),
                    lambda: operator.symbolic(self._field, [self.values[i]], given),  # noqa: B023
                )
        for kind, label in space.reductions:
            if label in c.labels and self.rules.reduces(c.labels, label):
                self._tile_reduction(i, kind, label)
        for name in sorted(c.state.pending):
            self._axis_reduction(i, self.axes[name])

    def _tile_reduction(self, i: int, kind: str, label: str) -> None:
        c, parts = self.classes[i], self.split.tile_parts(label)
        if self.space.partial_maximum(c.form) is not None:
            return
        form = self.space.reduced(kind, c.form, label, parts)
        pending = c.state.pending | {n for n, a in self.axes.items() if a.dim == label}
        self._offer(
            form, c.labels - {label}, c.state._replace(pending=pending),
            Derivation(kind, (i,), label),
            lambda: self._reduced_value(kind, self.values[i], label, (f"{label}.tile",)),
        )

    def _axis_reduction(self, i: int, axis: Axis) -> None:
        """Close a loop or persistent axis, or combine over a cluster."""
        c, name = self.classes[i], axis.name
        left = {self.axes[n].kind for n in c.state.inside if n != name}
        if axis.kind == AxisKind.GRID or AxisKind.LOOP in left:
            return  # the loop is the innermost axis: it ends first
        op = "max" if self.space.partial_maximum(c.form) == axis.dim else "sum"
        form = self.space.reduced(op, c.form, axis.dim, (name,))
        iterated = axis.kind in _ITERATED
        state = State(
            c.state.inside - {name},
            c.state.closed | {name} if iterated else c.state.closed,
            c.state.pending - {name},
        )
        if not state.inside & state.closed:
            self._offer(
                form, c.labels, state,
                Derivation(
                    ACCUMULATE if iterated else CLUSTER_REDUCE, (i,), name, (("op", op),)
                ),
                lambda: self._reduced_value(op, self.values[i], axis.dim, (name,)),
            )

    # ------------------------------------------------------------------------------ two operands

    def _pair(self, i: int, j: int) -> None:
        a, b = self.classes[i], self.classes[j]
        inside, closed = a.state.inside | b.state.inside, a.state.closed | b.state.closed
        if inside & closed:
            return
        state = State(inside, closed, a.state.pending | b.state.pending)
        labels = a.labels | b.labels
        nested = labels in (a.labels, b.labels)
        usable = self._usable[i] and self._usable[j]
        usable = usable and self.rules.computes((a.labels, b.labels), state)
        if usable and (nested or frozenset((a.labels, b.labels)) in self.space.outer):
            for kind, left, right in self._binary(i, j):
                self._elementwise(kind, left, right, labels, state)
        if not nested:
            self._contractions(i, j, labels, state)

    def _binary(self, i: int, j: int) -> Iterator[tuple[str, int, int]]:
        """Element-wise operators and the order of operands that pass the cheap filters."""
        goal, x, y = self.space.goal, self.classes[i].form, self.classes[j].form
        kinds = self.space.binary
        if goal.fits(x, y):
            yield "mul", i, j
            if "div" in kinds and goal.divides(y):
                yield "div", i, j
            if "div" in kinds and i != j and goal.divides(x):
                yield "div", j, i
        if goal.together(x, y):
            if "add" in kinds:
                yield "add", i, j
            if "sub" in kinds and i != j:
                yield "sub", i, j
                yield "sub", j, i
        yield from ((k, *o) for k in kinds if k not in _ARITHMETIC for o in {(i, j), (j, i)})

    def _elementwise(
        self, kind: str, i: int, j: int, labels: frozenset[str], state: State
    ) -> None:
        operator = lookup(kind)
        form = operator.symbolic(self.space.table, [self.classes[i].form, self.classes[j].form], {})
        self._offer(
            form, labels, state, Derivation(kind, (i, j)),
            lambda: operator.symbolic(self._field, [self.values[i], self.values[j]], {}),
        )

    def _contractions(self, i: int, j: int, labels: frozenset[str], state: State) -> None:
        a, b = self.classes[i], self.classes[j]
        left, right = self._operand(i), self._operand(j)
        for kind, label in self.space.reductions:
            if kind != "sum" or label not in a.labels & b.labels:
                continue
            if not self.space.goal.fits(a.form, b.form):
                continue
            if self.rules.contracts(right, left, label):
                self._contraction(j, i, label, labels, state)
            elif self.rules.contracts(left, right, label):
                self._contraction(i, j, label, labels, state)

    def _contraction(
        self, i: int, j: int, label: str, labels: frozenset[str], state: State
    ) -> None:
        parts, values = self.split.tile_parts(label), (self.values[i], self.values[j])
        product = self.space.table.mul(self.classes[i].form, self.classes[j].form)
        form = self.space.reduced("sum", product, label, parts)
        pending = state.pending | {n for n, x in self.axes.items() if x.dim == label}
        self._offer(
            form, labels - {label}, state._replace(pending=pending),
            Derivation("matmul", (i, j), label),
            lambda: self._reduced_value("sum", self._field.mul(*values), label, (f"{label}.tile",)),
        )

    def _operand(self, i: int) -> Operand:
        loaded = any(d.kind == LOAD for d in self.derivations[i])
        return Operand(self.classes[i].labels, self.classes[i].state, loaded)

    # -------------------------------------------------------------------------------------- goals

    def finished(self) -> list[list[int]]:
        """For every output the classes that may be stored as it."""
        found: list[list[int]] = []
        for form, labels, value in self.goals:
            found.append([
                i
                for i, c in enumerate(self.classes)
                if (c.form, c.labels, c.value) == (form, labels, value)
                and not c.state.pending
                and all(self.axes[n].dim in labels for n in c.state.inside)
            ])
        return found


_ARITHMETIC = ("mul", "div", "add", "sub")


def saturate(
    space: Space, split: Split, rules: Rules | None = None, limit: int = 500, seed: int = 0
) -> Table:
    """All useful classes of one split.

    Raises:
        TooLarge: more than ``limit`` classes (459 is the most any tried program needed).
    """
    return Table(space, split, rules or AnyRules(), limit, seed).run()
