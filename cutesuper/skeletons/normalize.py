"""The normal form of block programs for planning: products with reciprocals in place of quotients.

before: ``div(x[M, N], s[M])``, ``div(y[M, N], sqrt(v)[M])``; after: ``mul(x, div(1, s))``,
``mul(y, rsqrt(v))``, one reciprocal for each row. The search, the verifier and stored muGraphs have
the program as it was found; `with_reciprocals` is made when a kernel is planned.
"""

from __future__ import annotations

from collections.abc import Collection

from cutesuper.ir.block import BlockOp, BlockProgram, Copy
from cutesuper.ir.operators.base import CONSTANT


def with_reciprocals(
    program: BlockProgram, quotients: Collection[int], products: Collection[int] = ()
) -> BlockProgram:
    """The program with some of its quotients as products.

    A root that only divided becomes a reciprocal root in its place, so that the operations of a
    norm keep their numbers, by which errors name them. Of ``products`` (their indices) that divide,
    the reciprocals are made factor by factor: ``div(1, s) * div(1, x)`` for ``div(1, mul(s, x))``.
    """
    ops = program.ops
    divisors = {ops[i].inputs[1] for i in quotients}
    for i in sorted(products, reverse=True):
        if i in divisors:
            divisors |= {j for j, power in _factors(ops[i]) if power > 0}
    split = divisors.intersection(products)
    kept = _kept(program, quotients, split)
    made, inverses = Copy(program), dict[int, int]()
    for i, op in enumerate(ops):
        only_divides = i not in kept and (i in split or (i in divisors and op.facets.reciprocal))
        if i in quotients and not only_divides:
            value, divisor = op.inputs
            made.place[i] = made.add("mul", [made.place[value], inverses[divisor]], op.dims)
        elif not only_divides:
            made.copy(i, made.inputs(i))
        if i in split:
            factors = [
                inverses[j] if power > 0 else made.place[j]
                for j, power in _factors(op)
                for _ in range(abs(power))
            ]
            inverses[i] = made.add("mul", factors, op.dims)
        elif i in divisors:
            inverses[i] = _inverse(made, i)
    return made.program() if quotients else program


def _factors(op: BlockOp) -> list[tuple[int, int]]:
    """The operands of a product or quotient, with their powers."""
    return list(zip(op.inputs, op.facets.powers or (), strict=True))


def _kept(program: BlockProgram, quotients: Collection[int], split: Collection[int]) -> set[int]:
    """Operations whose result is read by others than as a divisor."""
    kept: set[int] = set()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        if i in split:
            kept |= {j for j, power in _factors(op) if power < 0}
        if i in kept or i not in split:
            kept.update(op.inputs[: 1 if i in quotients else None])
    return kept


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
