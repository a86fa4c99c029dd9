"""Shifts that move row operands next to zero, so that differences of large sums do not cancel.

One walk over K gives LayerNorm and Linear from ``mean(x^2) - mean(x)^2`` and from
``X W - mean(x) sum(W)``. In floating point both lose all digits if the mean is large: at a mean of
1000 and a deviation of 1 the squares agree in 6 of the 7 digits of fp32. Both have the same value
for ``x - c`` in place of x, for any number c of the row. With c near the mean nothing cancels
(shifted data: Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The American
Statistician 37, 1983).

c is the mean of a sample of the row. The mean of n of K numbers is at most ``sqrt(K / n)``
deviations away from the mean of all, whatever the numbers are: with 64 of 4096 the squares are at
most 65 times the variance and lose 6 of 24 bits, where they would lose all; usually c is an eighth
of a deviation away. The product is taken of ``x - c`` as well, which is rounded to 16 bits like the
normalized row would be.

To find out if a program allows this it is evaluated in the finite field, once as it is and once
shifted: a value that does not change although its operands do is a difference that cancels; then
the stored values must not change either, with products that take the shifted rows as well, or with
products that do not (``X W / sqrt(mean(x^2) - mean(x)^2)``). There is no pattern to match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cutesuper.ir.block import ENDING, LOAD, STORE, BlockProgram
from cutesuper.ir.field import DivisionByZero, FieldAlgebra, FieldValue, draw_primes, uniform
from cutesuper.ir.operators.base import CONSTANT, Operator
from cutesuper.ir.operators.monoid import SUM

#: extent of every label in the field
_EXTENT = 3
#: most draws of the inputs, if one divides by zero
_DRAWS = 8


@dataclass(frozen=True)
class Shifted:
    """A value that has to be shifted.

    Attributes:
        value: the operation whose users see the difference.
        products: True if products see it too, and not only statistics.
        refused: reason why that does not help, None if it does.
    """

    value: int
    products: bool
    refused: str | None = None


def find_shift(program: BlockProgram, row: str, column: str, contracted: str) -> Shifted | None:
    """The value to shift so that no difference cancels; None if none does.

    before: ``mean(x * x) - mean(x) * mean(x)``, in any association; after: the operation x.
    """
    statistics = {
        op.inputs[0]: i
        for i, op in enumerate(program.ops)
        if op.facets.reduces is SUM
        and op.attributes["over"] == contracted
        and {row, contracted} <= set(program.ops[op.inputs[0]].dims)
        and column not in program.ops[op.inputs[0]].dims
    }
    found: list[Shifted] = []
    for value, statistic in statistics.items():
        cancelling, changed = _effect(program, value, contracted, True)
        if cancelling is None:
            continue
        products = changed is None
        why = None
        if not products and _effect(program, value, contracted, False)[1] is not None:
            why = (
                f"{program.ops[cancelling].kind} (operation {cancelling}) is a difference of sums "
                f"over {contracted} that loses all digits where the mean of operation {value} is "
                f"large (operation {statistic}), and {changed} depends on that mean"
            )
        found.append(Shifted(value, products, why))
    if len(found) > 1:
        values = ", ".join(str(s.value) for s in found)
        why = f"operations {values} all have sums over {contracted} that cancel"
        return Shifted(found[0].value, False, why)
    return found[0] if found else None


def _effect(
    program: BlockProgram, value: int, contracted: str, products: bool
) -> tuple[int | None, str | None]:
    """The first difference in which a shift of ``value`` cancels.
    And a stored tensor in which it does not, or a divisor, which might become 0: the sum of a row
    less its mean is. What is subtracted from itself loses no digits.

    A quotient may lose a factor of the row as well (``y / mean_N(y)`` with y = X W / mean_K(X^2)),
    but that costs no digits.
    """
    for seed in range(_DRAWS):
        try:
            plain = _values(program, seed)
            moved = _values(program, seed, value, contracted, None if products else plain)
            break
        except DivisionByZero:
            continue
    else:
        return None, None
    same = [_equal(a, b) for a, b in zip(plain, moved, strict=True)]
    stores = {
        i: str(op.attributes["tensor"]) for i, op in enumerate(program.ops) if op.kind == STORE
    }
    cancelling = next(
        (
            i
            for i, op in enumerate(program.ops)
            if op.facets.signs
            and same[i]
            and not all(same[j] for j in op.inputs)
            and len({*op.inputs}) > 1
        ),
        None,
    )
    changed = [
        f"the divisor of operation {i}"
        for i, op in enumerate(program.ops)
        if op.facets.divides and not same[op.inputs[1]]
    ]
    changed += [name for i, name in stores.items() if not same[i]]
    return cancelling, next(iter(changed), None)


def _equal(a: FieldValue, b: FieldValue) -> bool:
    return a.dims == b.dims and bool(np.array_equal(a.p, b.p))


def _values(
    program: BlockProgram,
    seed: int,
    shifted: int | None = None,
    contracted: str = "",
    multiplied: list[FieldValue] | None = None,
) -> list[FieldValue]:
    """Every operation's value, for all tiles of a label at once.
    ``shifted`` is reduced by a value per row.

    Products take their operands from ``multiplied``, if it is given.
    """
    constants = (op.attributes["value"] for op in program.ops if op.kind == CONSTANT)
    primes = draw_primes([seed], constants)
    a, rng = FieldAlgebra(seed, primes=primes), np.random.default_rng(seed)
    loaded: dict[Any, FieldValue] = {}
    values: list[FieldValue] = []
    for i, op in enumerate(program.ops):
        args = [values[j] for j in op.inputs]
        if op.kind == LOAD:
            key = op.attributes["tensor"], op.attributes["map"]
            if key not in loaded:
                loaded[key] = uniform(rng, op.dims, [_EXTENT] * len(op.dims), False, primes)
            value = loaded[key]
        elif op.kind in (STORE, *ENDING):
            value = args[0]
        elif "over" in op.attributes:
            if op.facets.contracts and multiplied is not None:
                args = [multiplied[j] for j in op.inputs]
            value = _reduced(a, op.facets, args, op.attributes["over"])
        elif op.facets.masks:
            value = args[0]  # no skeleton with sums runs it
        else:
            value = op.facets.symbolic(a, args, op.attributes)
        if i == shifted:
            rows = tuple(d for d in op.dims if d != contracted)
            own = np.random.default_rng([seed, 1])
            value = a.sub(value, uniform(own, rows, [_EXTENT] * len(rows), False, primes))
        values.append(value)
    return values


def _reduced(a: FieldAlgebra, how: Operator, args: list[FieldValue], over: str) -> FieldValue:
    if how.reduces is None:
        return a.matmul(args[0], args[1], (over,))
    total = how.reduces.reduced(a, args[0], (over,), {over: _EXTENT})
    return a.div(total, a.constant(float(_EXTENT))) if how.averages else total
