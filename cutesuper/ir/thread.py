"""The thread level: chains of element-wise operations, fused into one expression on registers.

before: operations ``2 add(0, 1)``, ``3 sqrt(2)``, ``4 div(5, 3)`` of a block program; after: one
`ThreadExpression` with leaves 0, 1 and 5 that a thread evaluates on its fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutesuper.errors import LoweringError
from cutesuper.ir.block import BlockProgram
from cutesuper.ir.operators.base import CONSTANT, TABLE, Attributes, Operator, facets, lookup
from cutesuper.ir.relations import ordered

#: greatest length of an expression that is written in one piece, in characters
LONG = 1000


@dataclass(frozen=True)
class ThreadOp:
    """An element-wise operator; ``args`` index the leaves, then the operations before it."""

    kind: str
    args: tuple[int, ...]
    attributes: Attributes

    @property
    def facets(self) -> Operator:
        """The operator's entry in the table."""
        return facets(self.kind)


@dataclass(frozen=True)
class ThreadExpression:
    """Operations on fragments.

    Attributes:
        leaves: operations of the block program whose values are the operands.
        ops: in order; the last one is the result (if there are none, the only leaf is).
    """

    leaves: tuple[int, ...]
    ops: tuple[ThreadOp, ...]

    @property
    def trivial(self) -> bool:
        """True if the expression only returns its leaf."""
        return not self.ops

    def evaluate(self, leaves: Sequence[Any], m: Any) -> Any:
        """The result for these leaf values; ``m`` supplies exp, rsqrt, div, maximum, ..."""
        values = list(leaves)
        for op in self.ops:
            args = [values[i] for i in op.args]
            values.append(lookup(op.kind).scalar(m, args, op.attributes))
        return values[-1]

    def text(self, names: Sequence[str]) -> str:
        """The expression in ordinary notation, with these names for its leaves.
        A part of more than `LONG` characters stands before it, under its own name."""
        shown, before = list(names), list[str]()
        for n, op in enumerate(self.ops):
            args = ", ".join(shown[i] for i in op.args)
            text = f"{op.attributes['value']:g}" if op.kind == CONSTANT else f"{op.kind}({args})"
            if len(text) > LONG and n < len(self.ops) - 1:
                before.append(f"v{n} = {text}")
                text = f"v{n}"
            shown.append(text)
        return "; ".join((*before, shown[-1]))


def fuse(
    program: BlockProgram, result: int, is_leaf: Callable[[int], bool], where: str
) -> ThreadExpression:
    """Collect the element-wise operations between ``result`` and the nearest leaves.
    Raises LoweringError for an operation on the way that is not element-wise."""

    def needs(i: int) -> tuple[int, ...]:
        if is_leaf(i):
            return ()
        _check_fused(program, i, where)
        return program.ops[i].inputs

    found = ordered([result], needs)
    leaves = [i for i in found if is_leaf(i)]
    order = [i for i in found if not is_leaf(i)]
    index = {v: n for n, v in enumerate((*leaves, *order))}
    ops = [
        ThreadOp(
            program.ops[i].kind,
            tuple(index[j] for j in program.ops[i].inputs),
            program.ops[i].attributes,
        )
        for i in order
    ]
    return ThreadExpression(tuple(leaves), tuple(ops))


def _check_fused(program: BlockProgram, i: int, where: str) -> None:
    """Refuse an operation that is not element-wise. Raises LoweringError."""
    op = program.ops[i]
    if op.kind in TABLE and TABLE[op.kind].masks:
        raise LoweringError(
            f"{where}: {op.kind} (operation {i}) depends on positions, which this kernel does "
            "not know; add an input of 0 and -inf in its place"
        )
    if op.kind in TABLE and TABLE[op.kind].integers:
        raise LoweringError(
            f"{where}: {op.kind} (operation {i}) takes integers, which this kernel does not "
            "read; add an input of float32 in its place"
        )
    if op.kind not in TABLE or not TABLE[op.kind].elementwise:
        raise LoweringError(
            f"{where}: {op.kind} (operation {i}) stands where only element-wise operators can "
            "be fused; split the program there"
        )
