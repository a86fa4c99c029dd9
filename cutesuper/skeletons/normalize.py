"""The normal form of block programs for planning: products with reciprocals in place of quotients.

before: ``div(x[M, N], s[M])``, ``div(y[M, N], sqrt(v)[M])``; after: ``mul(x, div(1, s))``,
``mul(y, rsqrt(v))``, one reciprocal for each row. The search, the verifier and stored muGraphs have
the program as it was found; `with_reciprocals` is made when a kernel is planned.
"""

from __future__ import annotations

from collections.abc import Collection

from cutesuper.ir.block import BlockOp, BlockProgram, Copy
from cutesuper.ir.operators.base import CONSTANT


def with_reciprocals(program: BlockProgram, quotients: Collection[int]) -> BlockProgram:
    """The program with some of its quotients as products.

    A root that only divided becomes a reciprocal root in its place, so that the operations of a
    norm keep their numbers, by which errors name them.
    """
    ops = program.ops
    divisors = {ops[i].inputs[1] for i in quotients}
    kept = {j for i, op in enumerate(ops) for j in op.inputs[: 1 if i in quotients else None]}
    made, inverses = Copy(program), dict[int, int]()
    for i, op in enumerate(ops):
        if i in quotients:
            value, divisor = op.inputs
            made.place[i] = made.add("mul", [made.place[value], inverses[divisor]], op.dims)
        elif i in kept or i not in divisors or op.facets.reciprocal is None:
            made.copy(i, made.inputs(i))
        if i in divisors:
            inverses[i] = _inverse(made, i)
    return made.program() if quotients else program


def _inverse(made: Copy, i: int) -> int:
    """1 / a value of the old program; for a root in one step."""
    op = made.old.ops[i]
    if op.facets.reciprocal is not None:
        return made.add(op.facets.reciprocal, made.inputs(i), op.dims)
    return made.add("div", [made.constant(1.0), made.place[i]], op.dims)


def quotients_by_statistics(program: BlockProgram) -> set[int]:
    """Quotients of tiles by statistics of the operands' rows, and all quotients by roots."""
    ops, known = program.ops, _statistics(program)

    def found(op: BlockOp, divisor: int) -> bool:
        wider = len(op.dims) > len(ops[divisor].dims)
        return ops[divisor].facets.reciprocal is not None or (wider and divisor in known)

    return {i for i, op in enumerate(ops) if op.facets.divides and found(op, op.inputs[1])}


def is_reciprocal(program: BlockProgram, i: int) -> bool:
    """True if an operation is 1 divided by a value."""
    op = program.ops[i]
    one = BlockOp(CONSTANT, (), (), {"value": 1.0})
    return op.facets.divides and program.ops[op.inputs[0]] == one


def _statistics(program: BlockProgram) -> set[int]:
    """Operations that are computed from reductions and constants, and from no product.

    before: ``sqrt(mean(square(x)) + 1e-6)``; after: the mean, the sum and the root.
    """
    ops = program.ops
    after = program.dependence.after(i for i, op in enumerate(ops) if op.facets.contracts)
    constants = {i for i, op in enumerate(ops) if op.kind == CONSTANT}
    known = set(constants)
    for i, op in enumerate(ops):
        if i not in after and op.inputs and (op.facets.reduces or known.issuperset(op.inputs)):
            known.add(i)
    return known - constants
