"""Rows that a program hides as a whole: which values they make, and what keeps NaN out of them.

`hide` and `length_mask` put -inf in the place of what a softmax does not see. Where they hide a
whole row, its maximum is -inf and its exponentials and their sums are 0; a softmax would be
``exp(-inf - -inf) / 0``. Two rules make it 0, in the reference and in every kernel:

* hidden minus hidden is hidden, so that its exponential is 0;
* a divisor that is 0 because all that it sums is hidden counts as 1.

Values of such a row are followed from where they are hidden to where they are used, through all
kernels of a program, so that only differences and quotients which can meet them get a guard.
Everything else keeps PyTorch's rules for infinities and NaN, and programs that hide nothing keep
their kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

from cutesuper.ir.block import LOAD, STORE, BlockOp, BlockProgram, MuGraph, TensorSpec
from cutesuper.ir.graph import KernelGraph, Node, Tensor
from cutesuper.ir.operators.base import LARGEST, TABLE, Attributes

#: what stands for a number that nobody knows; a result that they agree on does not depend on it
_SAMPLES = (0.5, 3.0)


@dataclass(frozen=True)
class Fate:
    """What a value is in a row that is hidden as a whole.

    Attributes:
        value: the number.
        hidden: it is that because the row is hidden; False for constants, which it is anyway.
    """

    value: float
    hidden: bool = True


Fates = list[Fate | None]


def fates_of(graph: KernelGraph, given: Mapping[int, Fate] | None = None) -> Fates:
    """The fate of every node of a kernel graph; None where numbers decide.

    Args:
        graph: any.
        given: fates of inputs, by node.
    """
    found: Fates = []
    for i, node in enumerate(graph.nodes):
        known = None if given is None else given.get(i)
        args = [found[j] for j in node.inputs]
        found.append(known or fate(node.operator, args, dict(node.attributes)))
    return found


def fate(kind: str, args: Sequence[Fate | None], attributes: Attributes) -> Fate | None:
    """What an operation of a kernel graph or of a block program makes of hidden rows."""
    operator = TABLE.get(kind)
    if kind == "constant":
        return Fate(attributes["value"], hidden=False)
    if operator is not None and operator.empties:
        return Fate(-inf)
    if not any(a is not None and a.hidden for a in args):
        return None
    if operator is not None and operator.elementwise:
        return _computed(kind, args, attributes)
    first = next((a for a in args if a is not None and a.hidden), None)
    if kind == "matmul":
        return Fate(0.0) if Fate(0.0) in args else None
    if operator is not None and operator.composite:
        known = operator.of_hidden
        return Fate(known) if known is not None and args[0] == Fate(-inf) else None
    first = first if kind == "concat" else args[0]
    changed = operator is not None and operator.masks and operator.fill == 0.0
    repeats = (0.0,) if changed else (0.0, inf, -inf)  # and so sums and maxima of them are these
    return first if first is not None and first.value in repeats else None


def _computed(kind: str, args: Sequence[Fate | None], attributes: Attributes) -> Fate | None:
    """The number that an element-wise operator gives, if it is the same whatever is not known."""
    import torch

    if hides_difference(kind, args):
        return Fate(-inf)
    if empties_quotient(kind, args):
        args = [args[0], Fate(1.0)]
    results = set[float]()
    for sample in _SAMPLES:
        numbers = [
            torch.tensor(sample if a is None else a.value, dtype=torch.float64) for a in args
        ]
        results.add(float(TABLE[kind].reference(numbers, attributes)))
    one = results.pop()
    return None if results or isnan(one) else Fate(one)


def hides_difference(kind: str, args: Sequence[Fate | None]) -> bool:
    """Whether an operation may subtract hidden elements from hidden ones."""
    return kind == "sub" and all(a == Fate(-inf) for a in args)


def empties_quotient(kind: str, args: Sequence[Fate | None]) -> bool:
    """Whether an operation may divide by a sum of hidden elements only."""
    return kind == "div" and args[1] is not None and args[1].hidden and args[1].value == 0.0


def guarded_graph(graph: KernelGraph, given: Mapping[int, Fate]) -> KernelGraph:
    """A kernel graph with guards where what an earlier graph made of hidden rows is an input.

    What the graph hides itself is left to its kernels (`guarded`), where guards are not in the way
    of a running maximum. The same graph where nothing needs one.

    Args:
        graph: a backward pass, say.
        given: what inputs are in hidden rows, by node.
    """
    known, own = fates_of(graph, given), fates_of(graph)
    result, new = KernelGraph(), list[Tensor]()
    for n in graph.nodes:
        args = [new[j] for j in n.inputs]
        if n.operator == "input":
            result.nodes.append(n)
            new.append(result.tensor(len(result.nodes) - 1))
            continue
        if _meets(n, known) and not _meets(n, own):
            args[1] = _guard(result, n.operator, args[1])
        new.append(result.apply(n.operator, *args, **dict(n.attributes)))
    if len(result.nodes) == len(graph.nodes):
        return graph
    for i in graph.outputs:
        result.mark_output(new[i], graph.nodes[i].dtype)
    return result


def _meets(node: Node, fates: Fates) -> bool:
    args = [fates[j] for j in node.inputs]
    return hides_difference(node.operator, args) or empties_quotient(node.operator, args)


def _guard(g: KernelGraph, kind: str, y: Tensor) -> Tensor:
    """What is subtracted or divides, as in `guarded`."""
    if kind == "sub":
        return g.maximum(y, -LARGEST)
    return g.add(y, g.mul(g.at_least(y, 0.0), g.at_least(0.0, y)))


# -------------------------------------------------------------------------------- block programs


def guarded(program: BlockProgram, tensors: Mapping[str, TensorSpec]) -> BlockProgram:
    """A block program with the two rules written out where hidden rows can come.

    before: ``sub(x, top)``, ``div(e, sum)``; after: ``sub(x, maximum(top, -3.4e38))``,
    ``div(e, sum + at_least(sum, 0) at_least(0, sum))``: a few instructions for a value of the row.
    The same program where nothing can be hidden.

    Args:
        program: of one kernel.
        tensors: of its muGraph; see `followed`.
    """
    made = _Guards(program, _fates(program, tensors))
    return made.program() if made.needed else program


def followed(mu: MuGraph) -> dict[str, TensorSpec]:
    """The tensors of a muGraph, those that hidden rows reach marked with what they are there."""
    tensors = dict(mu.tensors)
    for step in mu.steps:
        fates = _fates(step.program, tensors)
        for op in step.program.stores():
            found, name = fates[op.inputs[0]], op.attributes["tensor"]
            if found is not None and found.hidden:
                tensors[name] = replace(tensors[name], hidden=found.value)
    return tensors


def guarded_mugraph(mu: MuGraph) -> MuGraph:
    """All kernels `guarded`, as they are compiled."""
    tensors = followed(mu)
    steps = tuple(replace(s, program=guarded(s.program, tensors)) for s in mu.steps)
    return mu if steps == mu.steps else replace(mu, steps=steps)


def _fates(program: BlockProgram, tensors: Mapping[str, TensorSpec]) -> Fates:
    found: Fates = []
    for op in program.ops:
        if op.kind == LOAD:
            known = tensors[op.attributes["tensor"]].hidden
            found.append(None if known is None else Fate(known))
        elif op.kind == STORE:
            found.append(None)
        else:
            found.append(fate(op.kind, [found[j] for j in op.inputs], dict(op.attributes)))
    return found


class _Guards:
    """A block program that is written anew, with guards in front of what needs them."""

    def __init__(self, old: BlockProgram, fates: Fates) -> None:
        self.old, self.fates = old, fates
        self.ops: list[BlockOp] = []
        self.place: dict[int, int] = {}  # of the operations of the old program
        self.made: dict[tuple[str, int], int] = {}

    @property
    def needed(self) -> bool:
        """Whether anything needs one."""
        return any(self._guard(op) for op in self.old.ops)

    def program(self) -> BlockProgram:
        """The whole program."""
        for i, op in enumerate(self.old.ops):
            inputs = [self.place[j] for j in op.inputs]
            kind = self._guard(op)
            if kind is not None:
                inputs[1] = self._once(kind, inputs[1])
            self.place[i] = self._add(op.kind, inputs, op.dims, op.attributes)
        return replace(self.old, ops=tuple(self.ops))

    def _guard(self, op: BlockOp) -> str | None:
        args = [self.fates[j] for j in op.inputs]
        if hides_difference(op.kind, args) or empties_quotient(op.kind, args):
            return op.kind
        return None

    def _once(self, kind: str, i: int) -> int:
        if (kind, i) not in self.made:
            self.made[kind, i] = self._least(i) if kind == "sub" else self._divisor(i)
        return self.made[kind, i]

    def _least(self, i: int) -> int:
        """A finite number in the place of -inf."""
        return self._add("maximum", [i, self._constant(-LARGEST)], self.ops[i].dims)

    def _divisor(self, i: int) -> int:
        """1 in the place of 0."""
        dims, zero = self.ops[i].dims, self._constant(0.0)
        above, below = (self._add("at_least", pair, dims) for pair in ([i, zero], [zero, i]))
        return self._add("add", [i, self._add("mul", [above, below], dims)], dims)

    def _constant(self, value: float) -> int:
        return self._add("constant", [], (), {"value": value})

    def _add(
        self, kind: str, inputs: Sequence[int], dims: tuple[str, ...], attributes: Any = None
    ) -> int:
        self.ops.append(BlockOp(kind, tuple(inputs), dims, attributes or {}))
        return len(self.ops) - 1
