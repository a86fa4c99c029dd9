"""Block programs from steps and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutesuper.contrib.mirage.document import Tensor
from cutesuper.contrib.mirage.indices import Cuts, Indices
from cutesuper.contrib.mirage.labels import Entry, Label, Labels
from cutesuper.contrib.mirage.steps import Kernel, Step
from cutesuper.ir.block import ACCUMULATE, LOAD, STORE, BlockOp, BlockProgram
from cutesuper.ir.dims import Dim


@dataclass(frozen=True)
class Access:
    """A load or a store: its tensor, and the mapping of each dimension."""

    op: int
    tensor: Tensor
    entries: list[list[Entry]]

    @property
    def divided(self) -> tuple[tuple[int, ...], ...]:
        """The extents into which each dimension is divided."""
        return tuple(tuple(n for _, n in dim) for dim in self.entries)


@dataclass(frozen=True)
class Translated:
    """A kernel as a block program whose loads and stores have no attributes yet."""

    program: BlockProgram
    accesses: tuple[Access, ...]

    @property
    def stored(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """The divisions of the tensors that it writes, by guid."""
        ops = self.program.ops
        return {a.tensor.guid: a.divided for a in self.accesses if ops[a.op].kind == STORE}


def translate(kernel: Kernel, cuts: Cuts) -> Translated:
    """The block program of a kernel.

    Args:
        kernel: its steps.
        cuts: divisions of tensors from earlier kernels.

    Raises:
        FormatError: no labels describe the kernel.
    """
    return _Emission(kernel, Indices(kernel, cuts)).run()


class _Emission:
    def __init__(self, kernel: Kernel, indices: Indices) -> None:
        self.kernel, self.indices = kernel, indices
        self.labels = Labels(indices)
        self.dims: dict[str, Dim] = {x.name: self.labels.extent(x) for x in self.labels.labels}
        self.ops: list[BlockOp] = []
        self.accesses: list[Access] = []
        #: the operation that makes the value of each step
        self.made: list[int] = []

    def run(self) -> Translated:
        for i, step in enumerate(self.kernel.steps):
            self.made.append(self._emit(i, step, [self.made[j] for j in step.inputs]))
        tile = {x.name: self.labels.tile(x) for x in self.labels.labels}
        program = BlockProgram(self.dims, self.labels.axes(), tile, tuple(self.ops))
        return Translated(program, tuple(self.accesses))

    def _emit(self, i: int, step: Step, args: list[int]) -> int:
        if step.kind in (LOAD, STORE):
            return self._access(i, step, args)
        if step.kind == "matmul":
            return self._matmul(i, *args)
        if step.kind == "reduce":
            return self._over(args[0], i, step.attributes["how"])
        if step.kind == "close":
            return self._close(i, step.attributes["how"], args[0])
        if step.kind == "scale":
            return self._scale(args[0], step.attributes["value"])
        return self._op(step.kind, args, **step.attributes)

    def _op(self, kind: str, args: list[int], **attributes: Any) -> int:
        """Append an operation; its labels are those of its operands except ``over``."""
        have = {d for j in args for d in self.ops[j].dims} - {attributes.get("over")}
        dims = tuple(d for d in self.dims if d in have)
        self.ops.append(BlockOp(kind, tuple(args), dims, attributes))
        return len(self.ops) - 1

    def _access(self, i: int, step: Step, args: list[int]) -> int:
        entries = [list(self.labels.entries(dim)) for dim in self.indices.values[i].whole]
        self.accesses.append(Access(len(self.ops), step.attributes["tensor"], entries))
        named = {name for dim in entries for name, _ in dim}
        have = set(self.ops[args[0]].dims) if args else named
        dims = tuple(d for d in self.dims if d in have)
        self.ops.append(BlockOp(step.kind, tuple(args), dims, {}))
        return len(self.ops) - 1

    def _gone(self, i: int) -> list[Label]:
        """Labels whose tile a step reduces."""
        return [self.labels.of[f] for f in self.indices.values[i].gone]

    def _over(self, x: int, i: int, how: str) -> int:
        for label in self._gone(i):
            x = self._op(how, [x], over=label.name)
        return x

    def _matmul(self, i: int, a: int, b: int) -> int:
        """A contraction over one label, then sums over the others; without one, a product."""
        labels = [x.name for x in self._gone(i)]
        if not labels:
            return self._op("mul", [a, b])
        x = self._op("matmul", [a, b], over=labels[-1])
        for label in reversed(labels[:-1]):
            x = self._op("sum", [x], over=label)
        return x

    def _close(self, i: int, how: str, x: int) -> int:
        """Accumulate over the loop; a value that is the same in every iteration is multiplied."""
        if not self.indices.loop:
            return x
        (loop,) = self.indices.loop
        operand = self.kernel.steps[i].inputs[0]
        if loop not in self.indices.values[operand].varies:
            return self._scale(x, float(self.kernel.loop)) if how == "sum" else x
        label = self.labels.of[loop].name
        if label in self.ops[x].dims:
            x = self._op(how, [x], over=label)
        return self._op(ACCUMULATE, [x], axis=f"{label}.loop", op="max" if how == "max" else "sum")

    def _scale(self, x: int, value: float) -> int:
        return self._op("mul", [x, self._op("constant", [], value=value)])
