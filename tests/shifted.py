"""A check that every exponential of a muGraph is of a value minus a maximum of that very value.

A field cannot see this: the shift cancels, so a muGraph without it is equal, and overflows.

before: ``exp(sub(S, max over N of S))``; accepted. ``exp(S) / sum exp(S)``: ``exp(S)`` is reported.
"""

from __future__ import annotations

from typing import Any

from cutesuper.ir.block import ENDING, LOAD, BlockOp, MuGraph
from cutesuper.ir.operators.base import TABLE

_COMMUTE = ("add", "mul", "matmul")


class _Values:
    """Values of all kernels by what they compute: tiles, loops and tensors in between are looked
    through, so that what one kernel stores and another loads (or computes again) is one value."""

    def __init__(self, mu: MuGraph) -> None:
        self.mu = mu
        self.writer = {name: k for k, step in enumerate(mu.steps) for name in step.writes}
        self.numbers: dict[Any, int] = {}
        self.known: dict[tuple[int, int], int] = {}

    def value(self, step: int, i: int) -> int:
        """A number for what operation ``i`` of a kernel computes."""
        if (step, i) not in self.known:
            self.known[step, i] = self._number(step, self.mu.steps[step].program.ops[i])
        return self.known[step, i]

    def _number(self, step: int, op: BlockOp) -> int:
        if op.kind == LOAD:
            name = op.attributes["tensor"]
            if name in self.writer:
                return self.value(*self.stored(name))
            return self._new(("input", name))
        args = [self.value(step, j) for j in op.inputs]
        if op.kind in ENDING and op.attributes["op"] == "sum":
            return args[0]
        if op.kind in _COMMUTE:
            args.sort()
        own = sorted((k, repr(v)) for k, v in op.attributes.items() if k not in ("over", "axis"))
        return self._new((op.kind, tuple(args), tuple(own)))

    def _new(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def stored(self, name: str) -> tuple[int, int]:
        """The operation whose value a tensor between kernels holds."""
        step = self.writer[name]
        stores = self.mu.steps[step].program.stores()
        return step, next(s.inputs[0] for s in stores if s.attributes["tensor"] == name)

    def source(self, step: int, i: int) -> tuple[int, BlockOp]:
        """An operation; of a load between kernels the one that made it."""
        op = self.mu.steps[step].program.ops[i]
        while op.kind == LOAD and op.attributes["tensor"] in self.writer:
            step, i = self.stored(op.attributes["tensor"])
            op = self.mu.steps[step].program.ops[i]
        return step, op

    def covered(self, step: int, i: int) -> set[int]:
        """The values that a maximum is at least as large as, in the part where it is used."""
        found: set[int] = set()
        step, op = self.source(step, i)
        while op.kind == "max" or op.attributes.get("op") == "max":
            found.add(self.value(step, op.inputs[0]))
            step, op = self.source(step, op.inputs[0])
        return found


def unshifted(mu: MuGraph) -> list[str]:
    """The exponentials that may overflow: ``k0: operation 5 (exp)``.

    That a maximum is complete, or of the same part as what it is subtracted from, is what
    `ir.check` sees to; here it only has to be a maximum of the value itself, of its masked
    value where what is masked is exponentiated.
    """
    values, found = _Values(mu), list[str]()
    for k, step in enumerate(mu.steps):
        ops = step.program.ops
        for i, op in enumerate(ops):
            if op.kind == "exp" and not _is_shifted(values, k, op.inputs[0]):
                found.append(f"{step.name}: operation {i} (exp)")
    return found


def _is_shifted(values: _Values, k: int, i: int) -> bool:
    k, op = values.source(k, i)
    if op.kind in TABLE and TABLE[op.kind].masks:  # -inf is as harmless as the difference was
        k, op = values.source(k, op.inputs[0])
    if op.kind != "sub":
        return False
    x, top = op.inputs
    return values.value(k, x) in values.covered(k, top)
