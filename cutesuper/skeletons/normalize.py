"""The normal form of block programs for planning: products with reciprocals in place of quotients.

before: ``div(x[M, N], s[M])``, ``div(y[M, N], sqrt(v)[M])``; after: ``mul(x, div(1, s))``,
``mul(y, rsqrt(v))``, one reciprocal for each row. The search, the verifier and stored muGraphs have
the program as it was found; `with_reciprocals` is made when a kernel is planned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cutesuper.ir.block import LOAD, STORE, BlockOp, BlockProgram
from cutesuper.ir.operators.base import CONSTANT


def with_reciprocals(program: BlockProgram, quotients: Collection[int]) -> BlockProgram:
    """The program with some of its quotients as products, and without roots that only divided."""
    if not quotients:
        return program
    made = _Made(program)
    for i, op in enumerate(program.ops):
        made.copy(op, i in quotients)
    return _without_unused(replace(program, ops=tuple(made.ops)))


class _Made:
    """A copy of a block program while it grows, with each reciprocal before its first use."""

    def __init__(self, old: BlockProgram) -> None:
        self.old = old
        self.ops: list[BlockOp] = []
        self.place: list[int] = []  # of each operation of the old program
        self.inverses: dict[int, int] = {}

    def copy(self, op: BlockOp, inverted: bool) -> None:
        inputs = tuple(self.place[j] for j in op.inputs)
        if inverted:
            inverse = self._inverse(op.inputs[1])
            op = BlockOp("mul", (inputs[0], inverse), op.dims)
        else:
            op = replace(op, inputs=inputs)
        self.place.append(self._add(op))

    def _inverse(self, divisor: int) -> int:
        """1 / a value, made once; for a root in one step."""
        if divisor not in self.inverses:
            op = self.old.ops[divisor]
            if op.facets.reciprocal is not None:
                kind, inputs = op.facets.reciprocal, (self.place[op.inputs[0]],)
            else:
                one = self._add(BlockOp(CONSTANT, (), (), {"value": 1.0}))
                kind, inputs = "div", (one, self.place[divisor])
            self.inverses[divisor] = self._add(BlockOp(kind, inputs, op.dims))
        return self.inverses[divisor]

    def _add(self, op: BlockOp) -> int:
        self.ops.append(op)
        return len(self.ops) - 1


def _without_unused(program: BlockProgram) -> BlockProgram:
    """The program without operations on which no store depends."""
    stores = [i for i, op in enumerate(program.ops) if op.kind == STORE]
    kept = sorted({j for i in stores for j in program.dependence.before(i)})
    place = {i: n for n, i in enumerate(kept)}
    ops = (program.ops[i] for i in kept)
    return replace(
        program, ops=tuple(replace(op, inputs=tuple(place[j] for j in op.inputs)) for op in ops)
    )


def quotients_by_statistics(program: BlockProgram) -> set[int]:
    """Quotients of tiles by statistics of the operands' rows, and all quotients by roots."""
    known = _statistics(program)

    def found(op: BlockOp) -> bool:
        if not op.facets.divides:
            return False
        divisor = program.ops[op.inputs[1]]
        wider = len(op.dims) > len(divisor.dims)
        return divisor.facets.reciprocal is not None or (wider and op.inputs[1] in known)

    return {i for i, op in enumerate(program.ops) if found(op)}


def is_reciprocal(program: BlockProgram, i: int) -> bool:
    """True if an operation is 1 divided by a value."""
    op = program.ops[i]
    one = program.ops[op.inputs[0]] if op.facets.divides else None
    return one is not None and one.kind == CONSTANT and one.attributes["value"] == 1


def _statistics(program: BlockProgram) -> set[int]:
    """Operations that are computed from reductions and constants, and from no product.

    before: ``sqrt(mean(square(x)) + 1e-6)``; after: the mean, the sum and the root.
    """
    after = program.dependence.after(i for i, op in enumerate(program.ops) if op.facets.contracts)
    found, constants = set[int](), set[int]()
    for i, op in enumerate(program.ops):
        if op.kind == CONSTANT:
            constants.add(i)
        elif i in after or op.kind == LOAD:
            continue
        elif op.facets.reduces is not None or found.union(constants).issuperset(op.inputs):
            found.add(i)
    return found
