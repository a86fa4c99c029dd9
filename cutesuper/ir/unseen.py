"""Rows that a program hides as a whole: their values, and the guards that keep NaN out of them.

`hide` and `length_mask` put -inf in the place of elements that a softmax must not see. Where they
hide a whole row, its maximum is -inf and its exponentials and their sums are 0; a softmax would be
``exp(-inf - -inf) / 0``. Two rules make it 0, in the reference and in every kernel:

* hidden minus hidden is hidden, so that its exponential is 0;
* a divisor that is 0 because all its summands are hidden counts as 1; not one that may be 0 in any
  row, as a difference of hidden values or the `relu` of one.

Values of such a row are followed from where they are hidden to where they are used, through all
kernels of a program, so that only differences and quotients which can meet them get a guard.
Everything else keeps PyTorch's rules for infinities and NaN, and programs that hide nothing keep
their kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan

from cutesuper.ir.block import (
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
    BlockProgram,
    Copy,
    MuGraph,
    TensorSpec,
)
from cutesuper.ir.graph import KernelGraph, Node, Tensor
from cutesuper.ir.operators.base import (
    CONSTANT,
    INPUT,
    LARGEST,
    TABLE,
    Attributes,
    Operator,
    facets,
)

#: samples for an unknown number; a result on which they agree does not depend on it
_SAMPLES = (0.5, 3.0)


@dataclass(frozen=True)
class Fate:
    """Value of a tensor in a row that is hidden as a whole.

    Attributes:
        value: the number.
        hidden: True if it has that value because the row is hidden; False for constants.
        common: True for a 0 that other rows may well have too: differences are 0, and `relu` is.
    """

    value: float
    hidden: bool = True
    common: bool = field(default=False, compare=False)


Fates = list[Fate | None]


def fates_of(graph: KernelGraph, given: Mapping[int, Fate] | None = None) -> Fates:
    """The fate of every node of a kernel graph; None where it depends on data.

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
    """Value that an operation of a kernel graph or block program gives in hidden rows."""
    operator = facets(kind)
    if kind == CONSTANT:
        return Fate(attributes["value"], hidden=False)
    if operator.empties:
        return Fate(-inf)
    if not any(a is not None and a.hidden for a in args):
        return None
    if operator.elementwise:
        return _computed(kind, args, attributes)
    first = next((a for a in args if a is not None and a.hidden), None)
    if operator.contracts:
        return Fate(0.0) if Fate(0.0) in args else None
    if operator.composite:
        known = operator.of_hidden
        return Fate(known) if known is not None and args[0] == Fate(-inf) else None
    first = first if operator.joins else args[0]
    if operator.reduces is not None and first is not None and not _repeats(operator, first.value):
        return None
    changed = operator.turns or (operator.masks and operator.fill == 0.0)
    repeats = (0.0,) if changed else (0.0, inf, -inf)  # and so are sums and maxima of them
    return first if first is not None and first.value in repeats else None


def _repeats(operator: Operator, value: float) -> bool:
    """True if a reduction of equal elements is one of them: products of -inf and places are not."""
    import torch

    assert operator.reduces is not None
    if operator.reduces.places:
        return False
    both = [torch.tensor(value, dtype=torch.float64)] * 2
    return float(TABLE[operator.reduces.operator].reference(both, {})) == value


def _computed(kind: str, args: Sequence[Fate | None], attributes: Attributes) -> Fate | None:
    """The number that an element-wise operator gives, if it does not depend on unknown values."""
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
    if results or isnan(one):
        return None
    flat = facets(kind).flat and Fate(0.0) not in args  # a 0 that it does not merely hand on
    common = flat or facets(kind).subtracts or any(a is not None and a.common for a in args)
    return Fate(one, common=common and one == 0.0)


def hides_difference(kind: str, args: Sequence[Fate | None]) -> bool:
    """True if an operation may subtract hidden elements from hidden ones."""
    return facets(kind).subtracts and all(a == Fate(-inf) for a in args)


def empties_quotient(kind: str, args: Sequence[Fate | None]) -> bool:
    """True if an operation may divide by a sum of hidden elements only."""
    divisor = args[1] if facets(kind).divides else None
    return divisor is not None and divisor == Fate(0.0) and not divisor.common


def guarded_graph(graph: KernelGraph, given: Mapping[int, Fate]) -> KernelGraph:
    """A kernel graph with guards for inputs that an earlier graph computed from hidden rows.

    Rows that the graph hides itself are left to its kernels (`guarded`), where guards are not in
    the way of a running maximum. If nothing needs a guard, the same graph is returned.

    Args:
        graph: for example, a backward pass.
        given: fates of the inputs, by node.
    """
    known, own = fates_of(graph, given), fates_of(graph)
    result, new = KernelGraph(), list[Tensor]()
    for i, n in enumerate(graph.nodes):
        args = [new[j] for j in n.inputs]
        if n.operator == INPUT:
            result.nodes.append(n)
            new.append(result.tensor(len(result.nodes) - 1))
            continue
        if _meets(n, known) and not _meets(n, own):
            args[1] = _guard(result, n.operator, args[1])
        new.append(result.copy_node(graph, i, args))
    if len(result.nodes) == len(graph.nodes):
        return graph
    for i in graph.outputs:
        result.mark_output(new[i], graph.nodes[i].dtype)
    return result


def _meets(node: Node, fates: Fates) -> bool:
    args = [fates[j] for j in node.inputs]
    return hides_difference(node.operator, args) or empties_quotient(node.operator, args)


def _guard(g: KernelGraph, kind: str, y: Tensor) -> Tensor:
    """Return the guarded subtrahend or divisor, as in `guarded`."""
    if facets(kind).subtracts:
        return g.maximum(y, -LARGEST)
    return g.add(y, g.mul(g.at_least(y, 0.0), g.at_least(0.0, y)))


# -------------------------------------------------------------------------------- block programs


def guarded(program: BlockProgram, tensors: Mapping[str, TensorSpec]) -> BlockProgram:
    """A block program with the two rules written out where hidden rows can occur.

    before: ``sub(x, top)``, ``div(e, sum)``; after: ``sub(x, maximum(top, -3.4e38))``,
    ``div(e, sum + at_least(sum, 0) at_least(0, sum))``: a few instructions for a value of the row.
    A maximum of a part of a row, which the grid divides, is guarded in any case. If nothing can be
    hidden, the same program is returned.

    Args:
        program: a kernel's program.
        tensors: tensors of its muGraph; see `followed`.
    """
    made = _Guards(program, _fates(program, tensors))
    return made.program() if made.needed else program


def followed(mu: MuGraph) -> dict[str, TensorSpec]:
    """The tensors of a muGraph; those that hidden rows reach are marked with their values there."""
    return _followed(mu)[0]


def empty_quotients(mu: MuGraph) -> list[set[int]]:
    """For each kernel of a muGraph the operations of which `empties_quotient` is true."""
    if not any(op.facets.empties for step in mu.steps for op in step.program.ops):
        return [set() for _ in mu.steps]
    return [
        {i for i, op in enumerate(step.program.ops) if _empties(op.kind, op.inputs, fates)}
        for step, fates in zip(mu.steps, _followed(mu)[1], strict=True)
    ]


def empty_quotients_of_graph(graph: KernelGraph) -> set[int]:
    """The nodes of a kernel graph of which `empties_quotient` is true."""
    if not any(node.facets.empties for node in graph.nodes):
        return set()
    fates = fates_of(graph)
    return {i for i, n in enumerate(graph.nodes) if _empties(n.operator, n.inputs, fates)}


def _empties(kind: str, inputs: Sequence[int], fates: Fates) -> bool:
    return empties_quotient(kind, [fates[j] for j in inputs])


def _followed(mu: MuGraph) -> tuple[dict[str, TensorSpec], list[Fates]]:
    """The tensors as `followed` marks them, and the fates in each kernel."""
    tensors, found = dict(mu.tensors), list[Fates]()
    for step in mu.steps:
        found.append(_fates(step.program, tensors))
        for op in step.program.stores():
            fate, name = found[-1][op.inputs[0]], op.attributes["tensor"]
            if fate is not None and fate.hidden and not fate.common:
                tensors[name] = replace(tensors[name], hidden=fate.value)
    return tensors, found


def guarded_mugraph(mu: MuGraph) -> MuGraph:
    """The muGraph that is compiled: all its kernels `guarded`."""
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


class _Guards(Copy):
    """A copy of a block program, with guards in front of operations that need them."""

    def __init__(self, old: BlockProgram, fates: Fates) -> None:
        super().__init__(old)
        self.fates = fates
        self.made: dict[tuple[str, int], int] = {}

    @property
    def needed(self) -> bool:
        """True if any operation needs a guard."""
        return any(self._guard(op) for op in self.old.ops)

    def program(self) -> BlockProgram:
        """The whole program with guards."""
        for i, op in enumerate(self.old.ops):
            inputs, kind = self.inputs(i), self._guard(op)
            if kind is not None:
                inputs[1] = self._once(kind, inputs[1])
            self.copy(i, inputs)
        return super().program()

    def _guard(self, op: BlockOp) -> str | None:
        args = [self.fates[j] for j in op.inputs]
        if hides_difference(op.kind, args) or empties_quotient(op.kind, args):
            return op.kind
        return op.kind if self._shifts_a_part(op) else None

    def _shifts_a_part(self, op: BlockOp) -> bool:
        """True if the maximum of a part of a row is subtracted.
        It may be -inf where that of the row is not."""
        if not op.facets.subtracts:
            return False
        top = self.old.ops[op.inputs[1]]
        how, over = top.facets.reduces, top.attributes.get("over")
        grid = any(a.kind == AxisKind.GRID for a in self.old.axes_of(str(over)))
        return how is not None and how.selects and grid

    def _once(self, kind: str, i: int) -> int:
        if (kind, i) not in self.made:
            self.made[kind, i] = self._least(i) if facets(kind).subtracts else self._divisor(i)
        return self.made[kind, i]

    def _least(self, i: int) -> int:
        """The value with the least finite number in place of -inf."""
        return self.add("maximum", [i, self.constant(-LARGEST)], self.ops[i].dims)

    def _divisor(self, i: int) -> int:
        """The divisor with 1 in place of 0."""
        dims, zero = self.ops[i].dims, self.constant(0.0)
        above, below = (self.add("at_least", pair, dims) for pair in ([i, zero], [zero, i]))
        return self.add("add", [i, self.add("mul", [above, below], dims)], dims)
