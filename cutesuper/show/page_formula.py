"""Formulas of a block program, in the notation that people use.

before: 14 operations on tiles; after: ``Z = X @ W / sqrt(mean_K(X²) + 1e-06)``.

Accumulators and reductions over a cluster or the grid are left out: together with them the tile's
reduction is that of the whole dimension.
"""

from __future__ import annotations

from collections import Counter

from cutesuper.ir.block import ENDING, LOAD, STORE, BlockProgram
from cutesuper.ir.operators.base import CONSTANT

#: operators between two operands: symbol, precedence, and the least that the right operand needs.
#: Python gives @ and * one precedence; here a product of matrices is never left to that rule
INFIX = {
    "add": ("+", 1, 1), "sub": ("-", 1, 2), "mul": ("*", 2, 4), "div": ("/", 2, 4),
    "matmul": ("@", 3, 4),
}  # fmt: skip
POWER, ATOM = 4, 5
#: characters of the longest formula that is not divided
LONG = 1000


def formulas(program: BlockProgram) -> list[str]:
    """One line for every tensor that is stored, after lines for values that are used twice.

    A value that is used twice, or needs a long line, is called ``v`` and its number in the program.
    """
    return _Formulas(program).lines()


class _Formulas:
    def __init__(self, program: BlockProgram) -> None:
        self.program = program
        used = Counter(
            self._whole(j) for op in program.ops if op.kind not in ENDING for j in op.inputs
        )
        plain = (LOAD, "constant")
        #: text and precedence of every operation so far
        self.texts: dict[int, tuple[str, int]] = {}
        self.named = {i for i, n in used.items() if n > 1 and program.ops[i].kind not in plain}

    def lines(self) -> list[str]:
        """All lines, in the order in which the program computes them."""
        lines: list[str] = []
        for i, op in enumerate(self.program.ops):
            if op.kind == STORE:
                lines.append(f"{op.attributes['tensor']} = {self._operand(op.inputs[0])[0]}")
                continue
            if op.kind in ENDING:
                continue
            self.texts[i] = self._text(i)
            if i in self.named or len(self.texts[i][0]) > LONG:
                lines.append(f"v{i} = {self.texts[i][0]}")
                self.texts[i] = f"v{i}", ATOM
        return lines

    def _whole(self, i: int) -> int:
        """The value whose parts an accumulator combines."""
        while self.program.ops[i].kind in ENDING:
            i = self.program.ops[i].inputs[0]
        return i

    def _operand(self, i: int) -> tuple[str, int]:
        return self.texts[self._whole(i)]

    def _text(self, i: int) -> tuple[str, int]:
        """An expression and its precedence."""
        op = self.program.ops[i]
        if op.kind == LOAD:
            name, *through = op.tensors
            return f"{name}{f'[{through[0]}]' if through else ''}", ATOM
        if op.kind == CONSTANT:
            return f"{op.attributes['value']:g}", ATOM
        args = [self._operand(j) for j in op.inputs]
        if op.kind in INFIX:
            return self._between(op.kind, args)
        if op.facets.powers == (2,):
            return f"{_within(args[0], ATOM)}²", POWER
        numbers = [f"{k}={v:g}" for k, v in op.attributes.items() if isinstance(v, int | float)]
        inner = ", ".join([text for text, _ in args] + numbers)
        over = f"_{op.attributes['over']}" if "over" in op.attributes else ""
        return f"{op.kind}{over}({inner})", ATOM

    def _between(self, kind: str, args: list[tuple[str, int]]) -> tuple[str, int]:
        symbol, level, right = INFIX[kind]
        return f"{_within(args[0], level)} {symbol} {_within(args[1], right)}", level


def _within(argument: tuple[str, int], level: int) -> str:
    text, own = argument
    return text if own >= level else f"({text})"
