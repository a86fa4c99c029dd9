"""Saturation: all useful values of one block program structure, each with all ways to compute it.

A `Split` gives the axis kinds that divide each label. An e-graph *class* is (normal form, labels,
state, value at one random point of a finite field); the state is that of `ir.check`: the axes
inside which a value lives, those that must have ended before it, and those over which it is a
partial result. New classes are combined with all earlier ones; results that can still become part
of the goal are kept, with every derivation. Programs are read off backwards by `extract`.

before: ``acc_K(X W) / sqrt(mean_K X^2)``, K split over a loop; after, among 20 classes:
``X[M, K]`` inside the loop, partial and whole ``XW[M, N]``, ``mean X^2 [M]``, ``XW / sqrt(..)``.

The field value separates values that the normal form merges (the two rows of nested sums in QKNorm:
555 of 984 programs were wrong without it); it costs some 40 microseconds for each useful
derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cutesuper.egraph.clock import look
from cutesuper.egraph.labelled import LabelledOp
from cutesuper.egraph.space import Pairing, Space
from cutesuper.egraph.splits import AnyRules, Operand, Rules, Split, State, all_parts
from cutesuper.errors import SearchError
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    GRID_REDUCE,
    LOAD,
    Axis,
    AxisKind,
)
from cutesuper.ir.field import DivisionByZero, FieldAlgebra, FieldValue, align, uniform
from cutesuper.ir.operators.base import CONSTANT, Operator, lookup
from cutesuper.ir.operators.monoid import MAX, SUM, Monoid

#: extent of every part of a label in class keys (1 would make a sum over it invisible)
_PART = 2
#: results formed for each class of the limit: high powers of quotients are few classes but slow
_TRIED = 20
_ITERATED = (AxisKind.LOOP, AxisKind.PERSISTENT)
#: operations that end an axis; over the grid a second kernel does, where `Split.parted` names the
#: axis
_CLOSED_BY = {
    AxisKind.LOOP: ACCUMULATE,
    AxisKind.PERSISTENT: ACCUMULATE,
    AxisKind.CLUSTER: CLUSTER_REDUCE,
    AxisKind.GRID: GRID_REDUCE,
}


class Class(NamedTuple):
    """A value of a block program; ``value`` is a hash of it at one random field point."""

    form: int
    labels: frozenset[str]
    state: State
    value: int


class Derivation(NamedTuple):
    """One way to compute a class from smaller ones.

    ``over``: a label (reductions, contractions) or an axis (``accumulate``, ``cluster_reduce``,
    ``grid_reduce``, with one operand, or three where it is rescaled: see `ir.block`).
    ``attributes``: items; for a ``load``, the operation of the labelled program.
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
        self._entered: list[tuple[int, Derivation]] = []
        self._index: dict[Class, int] = {}
        self._sizes: list[int] = []
        self._usable: list[bool] = []  # True if element-wise operators may take the class
        #: the monoid of a class that combines some parts of a label only; None for sums
        self._partial: list[Monoid | None] = []
        self._integers: dict[int, int] = {}  # classes of loads of integers; few results use them
        self._by_form: dict[int, list[int]] = {}
        #: for each form, how many other forms it has met, and those with which it can be combined
        self._met: dict[int, tuple[int, list[tuple[list[int], Pairing]]]] = {}
        self._joins: dict[tuple[State, State], State | None] = {}
        self._field = FieldAlgebra(seed, primes=space.primes(seed))
        #: operators on normal forms, by name: the functions that `Operator.symbolic` calls
        self._arithmetic = {k: getattr(space.table, k) for k in (*space.products, *space.sums)}
        self._divides = {k: lookup(k).divides for k in space.products}
        self._empties = any(op.facets.empties for op in space.program.ops)
        self._symmetric = {k: len(set(lookup(k).signs or ())) == 1 for k in space.sums}
        self._rng = np.random.default_rng(seed)
        self.goals = self._leaves()

    # ------------------------------------------------------------------------------------- leaves

    def _leaves(self) -> list[tuple[int, frozenset[str], int]]:
        """Enter loads and constants; return form, labels and value of each goal."""
        program, values = self.space.program, []
        for i, op in enumerate(program.ops):
            try:
                values.append(self._source_value(i, op, [values[j] for j in op.inputs]))
            except DivisionByZero as error:
                raise SearchError(
                    f"{op.kind}: it divides by what is 0 whatever the inputs are, so no program "
                    "can be compared with it"
                ) from error
            if op.kind in (LOAD, CONSTANT):
                inside = frozenset(
                    n for n, a in self.axes.items() if a.dim in op.labels and self._encloses(a)
                )
                key = Class(
                    self.space.form(op, i, []),
                    op.labels,
                    State(inside, frozenset(), frozenset()),
                    values[i].key(),
                )
                if key not in self._index:  # a number that occurs twice is one class
                    self._enter(key, values[i], Derivation(op.kind, (), None, (("op", i),)))
                if i in self.space.counted:
                    self._integers[i] = self._index[key]
                    self._by_form.pop(key.form)
        wanted = zip(program.outputs, self.space.goals, strict=True)
        return [(form, labels, values[i].key()) for (i, _), (form, labels) in wanted]

    def _encloses(self, axis: Axis) -> bool:
        """True if values live inside an axis until an operation closes it."""
        return axis.kind in _ITERATED or axis.name in self.split.divided_axes

    def _source_value(self, i: int, op: LabelledOp, args: list[FieldValue]) -> FieldValue:
        if op.kind == LOAD:
            parts = [p for label in sorted(op.labels) for p in self.split.parts(label)]
            if label := self.space.counted.get(i):  # some columns are visible, others are not
                last = _PART ** len(self.split.parts(label))
                ends = self._rng.integers(1, last, [_PART] * len(parts), dtype=np.uint64)
                return FieldValue(tuple(parts), ends)
            return uniform(self._rng, parts, [_PART] * len(parts), primes=self._field.primes)
        if op.over is None:
            return self._elementwise_value(op.kind, args, op.attributes)
        kind = op.kind
        if op.facets.contracts:
            kind, args = SUM.name, [self._field.mul(*args)]
        x = self._elements(kind, args[0], op.over)
        return self._reduced_value(kind, x, op.over, self.split.parts(op.over))

    def _elements(self, kind: str, x: FieldValue, label: str) -> FieldValue:
        """The elements that a reduction combines: x, with its places where they count."""
        how, parts = lookup(kind).reduces, self.split.parts(label)
        if how is None or not how.places:
            return x
        shape = [_PART] * len(parts)
        return self._field.placed(x, parts, np.arange(prod(shape)).reshape(shape))

    def _reduced_value(
        self, kind: str, x: FieldValue, label: str, parts: tuple[str, ...]
    ) -> FieldValue:
        operator = lookup(kind)
        assert operator.reduces is not None
        x = operator.reduces.reduced(self._field, x, parts, dict.fromkeys(parts, _PART))
        if not operator.averages:
            return x
        extent = prod(_PART for _ in self.split.parts(label))
        return self._field.div(x, self._field.constant(float(extent)))

    # --------------------------------------------------------------------------------- saturation

    def run(self) -> Table:
        """Combine until nothing new is useful. Raises TooLarge past the limit."""
        done = 0
        while done < len(self.classes):
            look()
            self._unary(done)
            if done not in self._integers.values():
                self._partners(done)
            done += 1
            if len(self.classes) > self.limit or self.tried > _TRIED * self.limit:
                raise TooLarge(
                    f"split {self.split}: more than {self.limit} classes; raise "
                    "SearchOptions.max_classes or compute the program in pieces"
                )
        return self

    def results(self, i: int, j: int | None = None) -> list[tuple[int, Derivation]]:
        """Enter all results of one step from class i, or from i and j <= i.
        Return classes and derivations.

        `run` enters all of them. This method serves callers that build programs forwards; rescaled
        sums take three operands and are left out.
        """
        start = len(self._entered)
        if j is None:
            self._unary(i)
        else:
            x, y = self.classes[i].form, self.classes[j].form
            self._pair(i, j, self.space.pairings.get((x, y)) or self.space.pairing(x, y))
        return [e for e in self._entered[start:] if len(e[1].inputs) < 3]

    def _enter(self, key: Class, value: FieldValue, derivation: Derivation) -> None:
        i = self._index.get(key)
        if i is None:
            i = self._index[key] = len(self.classes)
            self.classes.append(key)
            self.values.append(value)
            self.derivations.append([])
            self._sizes.append(self.space.table.size(key.form))
            self._usable.append(self.rules.computes((key.labels,), key.state))
            self._partial.append(self.space.partial(key.form))
            self._by_form.setdefault(key.form, []).append(i)
        self.derivations[i].append(derivation)
        self._entered.append((i, derivation))

    def _offer(
        self,
        form: int,
        labels: frozenset[str],
        state: State,
        derivation: Derivation,
        value: Callable[[], FieldValue],
    ) -> None:
        """Keep a result that is `_wanted` and not a quotient by zero."""
        if not self._wanted(form, derivation.inputs):
            return
        try:
            result = value()
        except DivisionByZero:
            return
        self._enter(Class(form, labels, state, result.key()), result, derivation)

    def _wanted(self, form: int, inputs: tuple[int, ...]) -> bool:
        """True if a result is larger than its operands, and useful.

        It must be larger because with subtraction a class can derive from itself, (a - b) + b.
        """
        self.tried += 1
        size = self.space.table.size(form)
        for i in inputs:
            if size <= self._sizes[i]:
                return False
        return self.space.goal.useful(form)

    # ------------------------------------------------------------------------------ one operand

    def _unary(self, i: int) -> None:
        c, space = self.classes[i], self.space
        if i in self._integers.values():
            for kind, attributes, load in space.of_integers:
                if self._integers[load] == i:
                    self._one(i, kind, attributes)
            return
        if self._usable[i] and not self._partial[i]:
            for kind, attributes in space.unary:
                self._one(i, kind, attributes)
            for kind, attributes, load in space.counting:
                self._one(i, kind, attributes, self._integers[load])
        for kind, label in space.reductions:
            if label in c.labels and self.rules.reduces(c.labels, label, c.state):
                self._tile_reduction(i, kind, label)
        for name in sorted(c.state.pending):
            self._axis_reduction(i, self.axes[name])

    def _one(
        self,
        i: int,
        kind: str,
        attributes: tuple[tuple[str, Any], ...],
        integers: int | None = None,
    ) -> None:
        """Apply an operator to class i; a mask may also take the class of its lengths or labels."""
        operator, given = lookup(kind), dict(attributes)
        inputs = (i,) if integers is None else (i, integers)
        classes = [self.classes[j] for j in inputs]
        state = self._joined(classes[0].state, classes[-1].state)
        needed = frozenset[str]().union(*(c.labels for c in classes[1:]))
        if operator.masks:
            needed |= {given[side] for side in ("rows", "columns")} - {None}
        if operator.turns:
            needed |= {given["along"]}
            if any(a.dim == given["along"] for a in self.axes.values()):
                return  # a block has a part of what changes places
        if state is None or not needed <= classes[0].labels:
            return
        form = operator.symbolic(self.space.table, [c.form for c in classes], given)
        self._offer(
            form,
            classes[0].labels,
            state,
            Derivation(kind, inputs, None, attributes),
            lambda: self._elementwise_value(kind, [self.values[j] for j in inputs], given),
        )

    def _tile_reduction(self, i: int, kind: str, label: str) -> None:
        c, parts = self.classes[i], self.split.tile_parts(label)
        if self._partial[i]:
            return
        form = self.space.reduced(kind, c.form, label, parts)
        pending = c.state.pending | {n for n, a in self.axes.items() if a.dim == label}
        self._offer(
            form,
            c.labels - {label},
            c.state._replace(pending=pending),
            Derivation(kind, (i,), label),
            lambda: self._reduced_value(
                kind, self._elements(kind, self.values[i], label), label, (f"{label}.tile",)
            ),
        )

    def _axis_reduction(self, i: int, axis: Axis) -> None:
        """Close a loop or persistent axis, combine over a cluster, or over the grid."""
        c, name = self.classes[i], axis.name
        if axis.dim in c.labels or not self._ends(c, axis):
            return
        shifts = self._shifts(c.form, axis.dim)
        how = self._partial[i]
        if how is not None:
            self._close(i, axis, how.name, (i,))
        elif not shifts:
            self._close(i, axis, SUM.name, (i,))
        elif len(shifts) == 1:
            for t in self._by_form.get(shifts[0], ()):
                top = self.classes[t]
                if name in top.state.pending and top.labels <= c.labels:
                    self._rescaled(i, t, axis)

    def _ends(self, c: Class, axis: Axis) -> bool:
        """True if an axis may be closed now: the loop is innermost, the grid outermost."""
        left = [self.axes[n] for n in c.state.inside if n != axis.name]
        if axis.kind != AxisKind.GRID:
            return all(a.kind != AxisKind.LOOP for a in left)
        waiting = [n for n in self.split.divided_axes if n in c.state.pending]
        if axis.name not in waiting[:1] or len(waiting) < len(c.state.pending):
            return False  # another axis of the grid is combined before, or something else ends
        if not self.split.joined:
            return all(a.dim in c.labels for a in left)
        return all(a.kind == axis.kind and (a.name in waiting or a.dim in c.labels) for a in left)

    def _shifts(self, form: int, label: str) -> list[int]:
        """Maxima over some parts of a label that occur inside a form."""
        table = self.space.table
        complete = len(all_parts(label))
        atoms = ((a, table.atoms[a]) for a in table.folds(form))
        partial = (a for a, m in atoms if m.name == label and len(m.labels) < complete)
        return [table.single(a) for a in partial]

    def _close(self, i: int, axis: Axis, op: str, inputs: tuple[int, ...]) -> None:
        c = self.classes[i]
        self._offer(
            self.space.reduced(op, c.form, axis.dim, (axis.name,)),
            c.labels,
            self._closed(c.state, axis),
            Derivation(_CLOSED_BY[axis.kind], inputs, axis.name, (("op", op),)),
            lambda: self._reduced_value(op, self.values[i], axis.dim, (axis.name,)),
        )

    def _rescaled(self, i: int, t: int, axis: Axis) -> None:
        """The sum of x * exp(t - T), where T is the maximum of t over the axis."""
        table, x = self.space.table, self.classes[i]
        top = self.space.reduced(MAX.name, self.classes[t].form, axis.dim, (axis.name,))
        for j in self._by_form.get(top, ()):
            if axis.name in self.classes[j].state.pending:
                continue
            weight = table.exp(table.sub(self.classes[t].form, top))
            form = self.space.reduced(SUM.name, table.mul(x.form, weight), axis.dim, (axis.name,))
            self._offer(
                form,
                x.labels,
                self._closed(x.state, axis),
                Derivation(_CLOSED_BY[axis.kind], (i, t, j), axis.name, (("op", SUM.name),)),
                lambda: self._rescaled_value(i, t, j, axis),  # noqa: B023
            )

    def _closed(self, state: State, axis: Axis) -> State:
        closed = state.closed
        if self._encloses(axis):
            before = sum(n == axis.name for n, _ in closed)
            closed = closed | {(axis.name, before + 1)}
        # values of the second kernel are inside no axis
        later = axis.name == self.split.parted_axis
        inside = frozenset[str]() if later else state.inside - {axis.name}
        return State(inside, closed, state.pending - {axis.name})

    # -------------------------------------------------------------------------------------- values

    def _elementwise_value(
        self, kind: str, args: list[FieldValue], attributes: dict[str, Any]
    ) -> FieldValue:
        operator = lookup(kind)
        if operator.masks:
            return self._masked_value(operator, args, attributes)
        if operator.divides and self._empties:
            args = [args[0], self._field.seen(args[1])]
        return operator.symbolic(self._field, args, attributes)

    def _masked_value(
        self, operator: Operator, args: list[FieldValue], attributes: dict[str, Any]
    ) -> FieldValue:
        """Result of a masking operator on a value, at the positions of class keys."""
        sides = [attributes[side] for side in ("rows", "columns")]
        names = [() if side is None else self.split.parts(side) for side in sides]
        extents = [_PART ** len(n) for n in names]
        own = {k: v for k, v in attributes.items() if k not in ("rows", "columns")}
        outer, integers = (), None
        if operator.integers:
            outer, integers = args[1].dims, args[1].p.astype(np.int64)[..., None, None]
        keep = operator.visible(
            np.arange(extents[0])[:, None],
            np.arange(extents[1])[None, :],
            (extents[0], extents[1]),
            own,
            integers,
        )
        keep = np.broadcast_to(keep, [*[_PART] * len(outer), *extents])
        parts = (*outer, *names[0], *names[1])
        gone = align(~keep.reshape([_PART] * len(parts)), parts, args[0].dims)
        return args[0].replace(gone, operator.fill)

    def _rescaled_value(self, x: int, t: int, top: int, axis: Axis) -> FieldValue:
        a = self._field
        weight = a.exp(a.sub(self.values[t], self.values[top]))
        return self._reduced_value(SUM.name, a.mul(self.values[x], weight), axis.dim, (axis.name,))

    # ------------------------------------------------------------------------------ two operands

    def _partners(self, i: int) -> None:
        """Combine a class with itself and all earlier ones, where their forms allow a result.

        Forms are far fewer than classes, and the results they allow are the same in all splits:
        testing pairs of forms first reduced QKNorm from 670,000 pairs of classes to 150,000.
        """
        x, known = self.classes[i].form, self.space.pairings
        forms = list(self._by_form.items())
        met, partners = self._met.get(x, (0, []))
        for classes, pairing in partners:
            self._pairs(i, classes, pairing)
        for y, classes in forms[met:]:
            pairing = known.get((x, y)) or self.space.pairing(x, y)
            if not pairing.nothing:
                partners.append((classes, pairing))
                self._pairs(i, classes, pairing)
        self._met[x] = len(forms), partners

    def _pairs(self, i: int, classes: list[int], pairing: Pairing) -> None:
        """Combine class i with those classes of a form that are not newer."""
        for j in classes:
            if j > i:
                break
            self._pair(i, j, pairing)

    def _pair(self, i: int, j: int, pairing: Pairing) -> None:
        a, b = self.classes[i], self.classes[j]
        state = self._joined(a.state, b.state)
        if state is None:
            return
        labels = a.labels | b.labels
        nested = labels in (a.labels, b.labels)
        usable = self._usable[i] and self._usable[j]
        usable = usable and self.rules.computes((a.labels, b.labels), state)
        if usable and (nested or frozenset((a.labels, b.labels)) in self.space.outer):
            for kind, left, right in self._binary(i, j, pairing):
                self._elementwise(kind, left, right, labels, state)
        if pairing.fits and (not nested or self.rules.vectors):
            self._contractions(i, j, labels, state)

    def _joined(self, a: State, b: State) -> State | None:
        """State of a value made of two; None if one is inside an axis the other needs ended."""
        key = (a, b)
        try:
            return self._joins[key]
        except KeyError:
            return self._joins.setdefault(key, self._join(a, b))

    def _join(self, a: State, b: State) -> State | None:
        inside, closed = a.inside | b.inside, a.closed | b.closed
        for name, n in closed:
            if name in inside and (self.axes[name].kind != AxisKind.LOOP or n >= self.split.passes):
                return None
        return State(inside, closed, a.pending | b.pending)

    def _binary(self, i: int, j: int, pairing: Pairing) -> Iterator[tuple[str, int, int]]:
        """Element-wise operators and the order of operands that pass the cheap filters.

        A maximum over some parts of a label is only used as a shift: x - max.
        """
        if self._partial[i] or self._partial[j]:
            if pairing.together:
                yield from self._shifted(i, j)
            return
        if pairing.fits:
            for kind in self.space.products:
                divides = self._divides[kind]
                if not divides or pairing.right_divides:
                    yield kind, i, j
                if divides and i != j and pairing.left_divides:
                    yield kind, j, i
        if pairing.together:
            for kind in self.space.sums:
                if self._symmetric[kind]:
                    yield kind, i, j
                elif i != j:
                    yield kind, i, j
                    yield kind, j, i
        for kind, swapped in pairing.chosen:
            if not swapped:
                yield kind, i, j
            elif i != j:
                yield kind, j, i

    def _shifted(self, i: int, j: int) -> Iterator[tuple[str, int, int]]:
        """Differences with a maximum over some parts of a label."""
        how = [self._partial[k] for k in (i, j)]
        if None in how and all(h is None or h.selects for h in how):
            for kind in (k for k in self.space.sums if not self._symmetric[k]):
                yield (kind, j, i) if how[0] else (kind, i, j)

    def _elementwise(self, kind: str, i: int, j: int, labels: frozenset[str], state: State) -> None:
        x, y = self.classes[i].form, self.classes[j].form
        compute = self._arithmetic.get(kind)
        if compute is not None:
            form = compute(x, y)
        else:
            form = lookup(kind).symbolic(self.space.table, [x, y], {})
        if not self._wanted(form, (i, j)):
            return
        if kind in self.space.sums and self.space.rewritten(form, x, y):
            return
        try:
            result = self._elementwise_value(kind, [self.values[i], self.values[j]], {})
        except DivisionByZero:
            return
        self._enter(Class(form, labels, state, result.key()), result, Derivation(kind, (i, j)))

    def _contractions(self, i: int, j: int, labels: frozenset[str], state: State) -> None:
        a, b = self.classes[i], self.classes[j]
        if self._partial[i] or self._partial[j]:
            return
        left, right = self._operand(i), self._operand(j)
        for label in self.space.summed:
            if label not in a.labels & b.labels:
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
        form = self.space.reduced(SUM.name, product, label, parts)
        pending = state.pending | {n for n, x in self.axes.items() if x.dim == label}
        self._offer(
            form,
            labels - {label},
            state._replace(pending=pending),
            Derivation("matmul", (i, j), label),
            lambda: self._reduced_value(
                SUM.name, self._field.mul(*values), label, (f"{label}.tile",)
            ),
        )

    def _operand(self, i: int) -> Operand:
        loaded = any(d.kind == LOAD for d in self.derivations[i])
        return Operand(self.classes[i].labels, self.classes[i].state, loaded)

    # -------------------------------------------------------------------------------------- goals

    def finished(self) -> list[list[int]]:
        """For every output, the classes that may be stored as that output."""
        found: list[list[int]] = [[] for _ in self.goals]
        for i in range(len(self.classes)):
            for n in self.stored_as(i):
                found[n].append(i)
        return found

    def stored_as(self, i: int) -> list[int]:
        """The outputs that class i may be stored as."""
        c = self.classes[i]
        if c.state.pending:
            return []
        return [
            n
            for n, goal in enumerate(self.goals)
            if (c.form, c.labels, c.value) == goal
            and all(self.axes[a].dim in c.labels for a in c.state.inside)
        ]


def saturate(
    space: Space, split: Split, rules: Rules | None = None, limit: int = 500, seed: int = 0
) -> Table:
    """Compute all useful classes of one split.

    Raises:
        TooLarge: more than ``limit`` classes (459 is the most any tried program needed).
    """
    return Table(space, split, rules or AnyRules(), limit, seed).run()
