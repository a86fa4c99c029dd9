"""Distributed form of a program: reductions over a label rewritten so that one walk is enough.

A value that depends on a reduction over K and has the label K needs a second walk over K, and a
value that depends on its reduction needs a third one. If it is a sum, or a product with a value of
the row, its own reduction can be written with reductions that do not wait for each other (a mean by
linearity, a variance as ``mean(x^2) - mean(x)^2``).

before: ``((X - mean(X)) / s * G + B) @ W``, ``s = sqrt(mean((X - mean(X))^2) + eps)``; after:
``((X * G) @ W - mean(X) * (G @ W)) / s + B @ W``, ``s = sqrt(mean(X^2) - mean(X)^2 + eps)``, where
``G @ W`` and ``B @ W`` are row vectors ``[N]``. Without G, ``G @ W`` is ``sum_K(W)``.

Normal forms keep a sum that is multiplied as one atom (`expression`), so saturation would not find
this form by itself. It starts from the distributed definition instead; like every result, it is
verified against the graph as the user wrote it. The difference of two means cancels where the mean
is large; `skeletons.matmul.shift` handles this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from cutesuper.egraph.clock import look
from cutesuper.egraph.labelled import LabelledOp, LabelledProgram

#: most sums that are taken apart; LayerNorm and a product have five, each may double the terms
MAX_SUMS = 16

#: reduces the product of factors: some may still have to be taken apart, some are needed as they
#: are; None is 1
_Rest = Callable[[list[int], list[int]], int | None]


def distributed(program: LabelledProgram, label: str) -> LabelledProgram | None:
    """The program with every reduction over a label distributed if it waits for another one.

    Reductions over other labels stay as they are: a matmul kernel holds its columns as a whole, so
    a reduction along them may wait, and nothing has to cancel.

    Returns:
        None if no sum has to be taken apart, or if another operation is in the way
        (``sum(exp(x - max(x)))``).
    """
    distribution = _Distribution(program, label)
    try:
        found = distribution.run()
    except _NotLinear:
        return None
    return found if distribution.sums else None


class _NotLinear(Exception):
    """A reduction waits for another one and is not linear in it."""


class _Distribution:
    def __init__(self, program: LabelledProgram, label: str) -> None:
        self.program, self.label = program, label
        self.ops: list[LabelledOp] = []
        self.late: list[frozenset[str]] = []  # labels over which something was reduced before
        self.sums = 0  # number of sums that were taken apart

    def run(self) -> LabelledProgram:
        new: list[int] = []
        for op in self.program.ops:
            new.append(self._again(op, [new[i] for i in op.inputs]))
        outputs = tuple((new[i], m) for i, m in self.program.outputs)
        return replace(self.program, ops=tuple(self.ops), outputs=outputs).needed()

    def _again(self, op: LabelledOp, args: list[int]) -> int:
        over = op.over
        if over is None or over != self.label or not any(self._waits(i, over) for i in args):
            return self._add(replace(op, inputs=tuple(args)))
        if op.facets.contracts:
            waiting = [i for i in args if self._waits(i, over)]
            others = [i for i in args if i not in waiting]
            if len(waiting) == 1 and len(others) == 1:
                return self._product(waiting, [], others[0], over)
        elif op.facets.averages:
            return self._some(self._mean(args, [], over))
        elif op.facets.sums:
            return self._sum(args, [], over)
        raise _NotLinear

    # ------------------------------------------------------------------------------------- terms

    def _product(self, factors: list[int], kept: list[int], column: int, over: str) -> int:
        """``sum over K of the factors times the column operand``."""
        if not factors:
            if not kept:
                return self._reduction("sum", (column,), over)
            return self._reduction("matmul", (self._times(kept), column), over)
        return self._split(factors, kept, over, lambda f, k: self._product(f, k, column, over))

    def _mean(self, factors: list[int], kept: list[int], over: str) -> int | None:
        """``mean over K of the factors``; None is 1."""
        if not factors:
            return self._reduction("mean", (self._times(kept),), over) if kept else None
        return self._split(factors, kept, over, lambda f, k: self._mean(f, k, over))

    def _sum(self, factors: list[int], kept: list[int], over: str) -> int:
        """``sum over K of the factors``.
        A summed mean becomes the sum of its operand: a factor for the number of elements would be
        right at one extent only."""
        if not factors:
            return self._reduction("sum", (self._times(kept),), over)
        op = self.ops[factors[0]]
        if not kept and len(factors) == 1 and over not in op.labels:
            if op.facets.averages and op.over == over:
                return self._reduction("sum", op.inputs, over)
            raise _NotLinear
        return self._split(factors, kept, over, lambda f, k: self._sum(f, k, over))

    def _split(self, factors: list[int], kept: list[int], over: str, rest: _Rest) -> int:
        """Take the first factor apart; ``rest`` reduces the remaining ones."""
        first, *others = factors
        op = self.ops[first]
        if over not in op.labels:
            return self._scaled(rest(others, kept), first)
        if not self._waits(first, over):
            return self._some(rest(others, [*kept, first]))
        powers = op.facets.powers
        if op.facets.signs and self.sums < MAX_SUMS:
            self.sums += 1
            left, right = (self._some(rest([i, *others], kept)) for i in op.inputs)
            return self._binary(op.kind, left, right)
        if powers and min(powers) > 0:
            factors = [i for i, n in zip(op.inputs, powers, strict=True) for _ in range(n)]
            return self._some(rest([*factors, *others], kept))
        if op.facets.divides and over not in self.ops[op.inputs[1]].labels:
            quotient = self._some(rest([op.inputs[0], *others], kept))
            return self._binary(op.kind, quotient, op.inputs[1])
        raise _NotLinear

    @staticmethod
    def _some(value: int | None) -> int:
        assert value is not None  # there is a factor
        return value

    # ---------------------------------------------------------------------------------- operations

    def _waits(self, i: int, over: str) -> bool:
        """True if a value with the label ``over`` needs an earlier reduction over it."""
        return over in self.late[i] and over in self.ops[i].labels

    def _add(self, op: LabelledOp) -> int:
        look()
        if op in self.ops:
            return self.ops.index(op)
        before = frozenset[str]().union(*(self.late[i] for i in op.inputs))
        self.ops.append(op)
        self.late.append(before | ({op.over} if op.over is not None else frozenset()))
        return len(self.ops) - 1

    def _binary(self, kind: str, a: int, b: int) -> int:
        return self._add(LabelledOp(kind, (a, b), self.ops[a].labels | self.ops[b].labels, {}))

    def _scaled(self, value: int | None, factor: int) -> int:
        return factor if value is None else self._binary("mul", factor, value)

    def _times(self, factors: list[int]) -> int:
        if len(factors) == 2 and factors[0] == factors[1]:
            return self._add(LabelledOp("square", (factors[0],), self.ops[factors[0]].labels, {}))
        return reduce(lambda a, b: self._binary("mul", a, b), factors)

    def _reduction(self, kind: str, args: tuple[int, ...], over: str) -> int:
        labels = frozenset[str]().union(*(self.ops[i].labels for i in args))
        return self._add(LabelledOp(kind, args, labels - {over}, {}, over))
