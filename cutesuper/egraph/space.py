"""Data shared by all splits of one program: its normal forms, the goal, the operators it uses."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from cutesuper.egraph.clock import look
from cutesuper.egraph.expression import Expressions
from cutesuper.egraph.goal import Goal
from cutesuper.egraph.labelled import LabelledOp, LabelledProgram
from cutesuper.egraph.splits import all_parts
from cutesuper.ir.block import LOAD
from cutesuper.ir.field import Primes, draw_primes
from cutesuper.ir.operators.base import CONSTANT, TABLE, Items, lookup
from cutesuper.ir.operators.monoid import SUM, Monoid

#: values that are sealed besides sums that are multiplied. 0: no others. 1: values with several
#: users; a norm of a norm needs more than 4000 classes without, and 23 with. 2: all values; the
#: program as it is written, with other reductions.
Sealing = Literal[0, 1, 2]


#: the reduction that a matrix product ends with
_SUM = SUM.name


class Pairing(NamedTuple):
    """Possible combinations of two values, judged by their normal forms only.

    Attributes:
        fits: their product may be part of the goal.
        left_divides, right_divides: the first (second) is a factor of a denominator of the goal.
        together: they may be terms of one sum.
        chosen: operators without algebra whose result may be part of the goal, and True if they
            take the second value first.
        nothing: none of these.
    """

    fits: bool
    left_divides: bool
    right_divides: bool
    together: bool
    chosen: tuple[tuple[str, bool], ...]
    nothing: bool


_NOTHING = Pairing(False, False, False, False, (), True)


class Space:
    """The goal of one labelled program, and the operators that may be used to reach it.

    Args:
        program: the program to compute.
        sealing: which values are atoms besides sums that are multiplied; see `Sealing`.
        sealed: further operations whose values are atoms.
        exact: sums that a maximum is a term of are computed as they are written; see `rewritten`.
    """

    def __init__(
        self,
        program: LabelledProgram,
        sealing: Sealing = 0,
        sealed: frozenset[int] = frozenset(),
        exact: bool = False,
    ) -> None:
        self.program, self.table, self.sealing = program, Expressions(), sealing
        values = self._seal(sealed)
        #: equal for spaces of the same program that differ in nothing
        self.forms = tuple(values), self.table.seals()
        self.goals = [(values[i], program.ops[i].labels) for i, _ in program.outputs]
        parts = {label: all_parts(label) for label in program.reduced}
        exponents = [values[op.inputs[0]] for op in program.ops if op.facets.exponential]
        self.goal = Goal(self.table, (form for form, _ in self.goals), parts, exponents)
        #: the program's values, if sums with a maximum are as they are written
        self._written = {z for x in values for z in self.goal.later(x)} if exact else None
        #: operators with an integer operand: operator, attributes, and the load of the integers
        integers = [
            (op.kind, Items(op.attributes), op.inputs[k])
            for op in program.ops
            for k in _integers(op)
        ]
        #: those that take another operand as well
        self.counting = [c for c in dict.fromkeys(integers) if TABLE[c[0]].masks]
        self.of_integers = [c for c in dict.fromkeys(integers) if not TABLE[c[0]].masks]
        #: for each load of lengths or labels, the label along which they count, if any
        self.counted = dict.fromkeys([i for _, _, i in integers], "")
        self.counted |= {i: str(dict(items)["columns"]) for _, items, i in self.counting}
        operators = dict.fromkeys(  # not a set: numbers that differ in sign only have no order
            (op.kind, Items(op.attributes), len(op.inputs))
            for op in program.ops
            if op.kind not in (LOAD, CONSTANT) and op.over is None and not _integers(op)
        )
        self.unary = sorted((k, a) for k, a, n in operators if n == 1)
        self.binary = sorted({k for k, _, n in operators if n == 2} | {"mul"})
        self.reductions = sorted(
            {(_SUM if op.facets.contracts else op.kind, op.over) for op in program.ops if op.over}
        )
        #: labels of plain sums, and of folds with their monoids
        self.summed = [d for kind, d in self.reductions if lookup(kind).sums]
        how = [(lookup(kind).reduces, d) for kind, d in self.reductions]
        self._folds = [(m, d) for m, d in how if m is not None and not m.linear]
        self._shifts = {m.name for m, _ in self._folds if m.selects}
        #: those that multiply and divide, and those that add and subtract
        self.products = [k for k in reversed(self.binary) if lookup(k).powers]
        self.sums = [k for k in self.binary if lookup(k).signs]
        #: those without algebra
        self.uninterpreted = [k for k in self.binary if k not in (*self.products, *self.sums)]
        #: for each operand of these, the normal forms that it may have
        self._taken: dict[tuple[str, int], set[int]] = {}
        for op in program.ops:
            if op.kind in self.uninterpreted:
                for side, i in enumerate(op.inputs):
                    forms = self._taken.setdefault((op.kind, side), set())
                    forms.update(self.goal.later(values[i]))
        self._sides: dict[int, frozenset[tuple[str, int]]] = {}
        self._primes: dict[int, Primes] = {}
        #: for pairs of normal forms that met in any split
        self.pairings: dict[tuple[int, int], Pairing] = {}
        self.outer = {
            frozenset(program.ops[i].labels for i in op.inputs)
            for op in program.ops
            if len(op.inputs) == 2 and op.over is None and not _integers(op)
        }

    def primes(self, seed: int) -> Primes:
        """A field, the same for all splits, in which different numbers of the program differ."""
        if seed not in self._primes:
            numbers = [op.attributes["value"] for op in self.program.ops if op.kind == CONSTANT]
            self._primes[seed] = draw_primes([seed], numbers)
        return self._primes[seed]

    def rewritten(self, total: int, x: int, y: int) -> bool:
        """True for a sum or difference that rounds a maximum otherwise than the program does.

        In ``x - max x - log s`` the first difference is exact where x is large and exponentials
        count; ``x - (max x + log s)`` is off by half a unit in the last place of the maximum. The
        float32 gradient of ``log_softmax`` of elements up to 17 was off by 1.6e-5 with it, where
        PyTorch's is by 2e-6.

        Args:
            total: normal form of the sum.
            x: that of its first operand.
            y: that of its second one.
        """
        if self._written is None or self._shifts.isdisjoint(self.table.terms_folded(total)):
            return False
        return any(self._written.isdisjoint(self.goal.later(z)) for z in (total, x, y))

    def pairing(self, x: int, y: int) -> Pairing:
        """Possible combinations of two normal forms; the answer is kept in `pairings`."""
        look()
        goal = self.goal
        fits, together = goal.fits(x, y), goal.together(x, y)
        chosen = self._chosen(x, y) if self._taken else ()
        if not (fits or together or chosen):
            self.pairings[x, y] = self.pairings[y, x] = _NOTHING
            return _NOTHING
        left, right = fits and goal.divides(x), fits and goal.divides(y)
        found = Pairing(fits, left, right, together, chosen, False)
        turned = tuple((kind, not swapped) for kind, swapped in chosen)
        self.pairings[y, x] = Pairing(fits, right, left, together, turned, False)
        self.pairings[x, y] = found
        return found

    def _chosen(self, x: int, y: int) -> tuple[tuple[str, bool], ...]:
        """Operators without algebra that give a useful result for two normal forms.
        Only those whose operands in the program have these forms, now or after later sums.

        Without this test every value met every other one in programs with such an operator, as the
        derivative of relu is: 26 operators of a LoRA's backward pass took 26 s.
        """
        first, second = self._operand_of(x), self._operand_of(y)
        if not first or not second:
            return ()
        found = [(kind, False) for kind, side in first if not side and (kind, 1) in second]
        found += [(kind, True) for kind, side in second if not side and (kind, 1) in first]
        return tuple(
            (kind, swapped)
            for kind, swapped in sorted(found)
            if self.goal.useful(
                lookup(kind).symbolic(self.table, [y, x] if swapped else [x, y], {})
            )
        )

    def _operand_of(self, x: int) -> frozenset[tuple[str, int]]:
        """Operators without algebra that may take a normal form, with the operand's position."""
        known = self._sides.get(x)
        if known is None:
            forms = self.goal.later(x)
            known = frozenset(s for s, taken in self._taken.items() if not taken.isdisjoint(forms))
            self._sides[x] = known
        return known

    def _seal(self, sealed: frozenset[int]) -> list[int]:
        """Normal forms of the program, with every sum that is multiplied later sealed."""
        users = Counter(i for op in self.program.ops for i in set(op.inputs))
        least = (len(users) + 1, 2, 1)[self.sealing]
        named = sealed | {i for i, n in users.items() if n >= least}
        multiplied = {
            i
            for op in self.program.ops
            if op.facets.contracts or op.facets.powers
            for i in op.inputs
        }
        values: list[int] = []
        for _ in range(2):  # again, so that equal sums met before the first seal are sealed too
            values.clear()
            for i, op in enumerate(self.program.ops):
                x = self.form(op, i, [values[j] for j in op.inputs])
                if i in multiplied or i in named:
                    x = self.table.seal(x, products=i in named)
                values.append(x)
        return values

    def form(self, op: LabelledOp, index: int, args: list[int]) -> int:
        """Normal form of an operation of the program."""
        if op.kind == LOAD:
            return self.table.variable(f"{op.attributes['tensor']}.{index}", op.labels)
        if op.over is None:
            return lookup(op.kind).symbolic(self.table, args, op.attributes)
        kind = op.kind
        if op.facets.contracts:
            kind, args = _SUM, [self.table.mul(*args)]
        return self.reduced(kind, args[0], op.over, all_parts(op.over))

    def reduced(self, kind: str, x: int, label: str, parts: tuple[str, ...]) -> int:
        """Normal form of a reduction over parts of a label."""
        x, operator = self.table.mark(x, label), lookup(kind)
        assert operator.reduces is not None
        if not operator.reduces.linear:
            return self.table.fold(operator.reduces.name, x, label, parts)
        x = self.table.reduce(x, parts)
        return self.table.mul(x, self.table.symbol(f"1/{label}")) if operator.averages else x

    def partial(self, x: int) -> Monoid | None:
        """The monoid by which x combines some parts of a label only; None if it adds them."""
        for how, label in self._folds:
            inner = self.table.is_fold(x, how.name, label)
            if inner is not None and len(inner.labels) < len(all_parts(label)):
                return how
        return None


def _integers(op: LabelledOp) -> tuple[int, ...]:
    """Positions of the operands that are integers."""
    return TABLE[op.kind].integers if op.kind in TABLE else ()
