"""Programs as they are written: one kernel without a search.

Saturation finds other ways to compute a region, and gives up if there are too many values
(`SearchOptions.max_classes`) or no time is left. The fallback is the operators in their own order,
each reduction ended by the axes that divide its label. A long element-wise program has no better
form, and cutting it only stores more.

The operators after the last reduction (an epilogue of any length) may be left as they are written
while those before are searched: `rms_norm(X) @ W` and then 100 operators.

before: ``[load, mul, sum over K, div]`` and the split ``M:grid K:cluster``; after:
``[load, mul, sum, cluster_reduce over K.cluster, div, store]``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutesuper.egraph.extract import unsized
from cutesuper.egraph.labelled import LabelledOp, LabelledProgram
from cutesuper.egraph.products import is_product
from cutesuper.egraph.splits import Operand, Rules, Split, State
from cutesuper.errors import GraphError
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
)
from cutesuper.ir.check import ValueState, check_block_program, passes
from cutesuper.ir.operators.base import CONSTANT, TABLE
from cutesuper.ir.operators.monoid import SUM, Monoid

_ENDED_BY = {
    AxisKind.LOOP: ACCUMULATE,
    AxisKind.PERSISTENT: ACCUMULATE,
    AxisKind.CLUSTER: CLUSTER_REDUCE,
    AxisKind.GRID: GRID_REDUCE,
}
#: axes end in this order; a sum of a sum may leave the last two to both
_LOOPS = (AxisKind.LOOP, AxisKind.CLUSTER)
_VISITS = (AxisKind.PERSISTENT, AxisKind.GRID)


def tail(program: LabelledProgram) -> frozenset[int]:
    """Element-wise operations whose values are not reduced, and the loads and numbers for them."""
    before, found = set[int](), set[int]()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        plain = op.kind in (LOAD, CONSTANT) or TABLE[op.kind].elementwise
        if i in before or not plain:
            before |= {i, *op.inputs}
        else:
            found.add(i)
    return frozenset(found)


def core(
    program: LabelledProgram, rest: frozenset[int]
) -> tuple[LabelledProgram, list[int]] | None:
    """The program without ``rest``, and the operations that become its outputs.
    Those are the operations that ``rest`` takes, and the outputs that do not depend on it. None if
    nothing or everything is left."""
    taken = {j for i in rest for j in program.ops[i].inputs} | {i for i, _ in program.outputs}
    wanted = sorted(i for i in taken - rest if program.ops[i].kind not in (LOAD, CONSTANT))
    if not wanted or not rest:
        return None
    order = tuple(program.dims)
    maps = [tuple(d for d in order if d in program.ops[i].labels) for i in wanted]
    begun = replace(program, outputs=tuple(zip(wanted, maps, strict=True)), put=())
    return begun.needed(), wanted


class Written:
    """Writes the operations of a labelled program as those of one block program.

    Args:
        program: the labelled program.
        split: the axes.
        begun: the block program of `core`, whose outputs are the operations ``wanted``.
        wanted: see `core`.
    """

    def __init__(
        self,
        program: LabelledProgram,
        split: Split,
        begun: BlockProgram | None = None,
        wanted: list[int] | None = None,
    ) -> None:
        self.source, self.split = program, split
        self.order = tuple(program.dims)
        self.ops: list[BlockOp] = []
        self.index: dict[int, int] = {}  # operations of the source -> those of the block program
        self.ended: dict[int, int] = {}
        self.pending: list[frozenset[str]] = []
        self._loads: dict[tuple[int, Any], int] = {}
        if begun is not None:
            self._begin(begun, wanted or [])

    def program(self, rules: Rules) -> BlockProgram | None:
        """The whole program, stores included; None if it breaks a rule."""
        for i, op in enumerate(self._needed()):
            if op is not None and i not in self.index:
                self.index[i] = self._write(op, rules)
        for n, (i, _) in enumerate(self.source.outputs):
            value = self._complete(self.index[i])
            self._add(STORE, (value,), self.ops[value].dims, self.source.store(n))
        found = unsized(self.source.dims, self.split.axes, tuple(self.ops))
        return found if self._legal(found, rules) else None

    def _begin(self, begun: BlockProgram, wanted: list[int]) -> None:
        """Copy the operations of a program, except its stores."""
        new: dict[int, int] = {}
        for i, op in enumerate(begun.ops):
            if op.kind == STORE:
                n = int(op.attributes["tensor"].removeprefix("out"))
                self.index[wanted[n]] = new[op.inputs[0]]
                continue
            inputs = tuple(new[j] for j in op.inputs)
            dims = tuple(d for d in self.order if d in op.dims)
            new[i] = self._add(op.kind, inputs, dims, op.attributes)
            self.pending[-1] = frozenset()  # stored values are complete
            if op.kind == LOAD:
                self._loads[self._load_key(op.attributes["tensor"], op.attributes["map"])] = new[i]

    def _load_key(self, tensor: str, mapping: Any) -> tuple[int, Any]:
        return int(tensor.removeprefix("in")), mapping

    def _needed(self) -> list[LabelledOp | None]:
        """The operations that are still to be written; None in place of the others."""
        ops = self.source.ops
        needed = {i for i, _ in self.source.outputs if i not in self.index}
        for i in reversed(range(len(ops))):
            if i in needed:
                needed.update(j for j in ops[i].inputs if j not in self.index)
        return [op if i in needed else None for i, op in enumerate(ops)]

    # ------------------------------------------------------------------------------- operations

    def _write(self, op: LabelledOp, rules: Rules) -> int:
        dims = tuple(d for d in self.order if d in op.labels)
        if op.kind == LOAD:
            return self._load(op, dims)
        if op.over is None:
            inputs = tuple(self._complete(self.index[j]) for j in op.inputs)
            return self._add(op.kind, inputs, dims, op.attributes)
        if is_product(self.source, op) or (op.facets.contracts and rules.vectors):
            return self._product(op, dims, rules)
        inputs = tuple(self._part(self.index[j]) for j in op.inputs)
        kind = op.kind
        if op.facets.contracts:
            labels = {d for j in inputs for d in self.ops[j].dims}
            every = tuple(d for d in self.order if d in labels)
            inputs, kind = (self._add("mul", inputs, every, {}),), SUM.name
        return self._add(kind, inputs, dims, {"over": op.over})

    def _load(self, op: LabelledOp, dims: tuple[str, ...]) -> int:
        key = (op.attributes["tensor"], op.attributes["map"])
        if key not in self._loads:
            attributes = dict(op.attributes) | {"tensor": f"in{op.attributes['tensor']}"}
            self._loads[key] = self._add(LOAD, (), dims, attributes)
        return self._loads[key]

    def _product(self, op: LabelledOp, dims: tuple[str, ...], rules: Rules) -> int:
        """Add a product, with its operands in the order that the rules accept."""
        a, b = (self._complete(self.index[j]) for j in op.inputs)
        over = str(op.over)
        if not rules.contracts(self._operand(a), self._operand(b), over):
            a, b = b, a
        return self._add("matmul", (a, b), dims, {"over": over})

    def _operand(self, i: int) -> Operand:
        state = State(frozenset(), frozenset(), self.pending[i])
        return Operand(frozenset(self.ops[i].dims), state, self.ops[i].kind == LOAD)

    def _add(
        self,
        kind: str,
        inputs: tuple[int, ...],
        dims: tuple[str, ...],
        attributes: Any,
    ) -> int:
        pending = frozenset[str]().union(*(self.pending[j] for j in inputs))
        if kind in ENDING:
            pending -= {attributes["axis"]}
        elif kind != LOAD and "over" in attributes:
            over = attributes["over"]
            pending |= {a.name for a in self.split.axes if a.dim == over}
        self.ops.append(BlockOp(kind, inputs, dims, attributes))
        self.pending.append(pending)
        return len(self.ops) - 1

    # ------------------------------------------------------------------------------------- ends

    def _complete(self, i: int) -> int:
        """A value after ending all axes over which it is a partial result."""
        return self._after(i, (*_LOOPS, *_VISITS))

    def _part(self, i: int) -> int:
        """A value that will be summed over more rows before their axes end."""
        return self._after(i, _LOOPS)

    def _after(self, i: int, kinds: tuple[AxisKind, ...]) -> int:
        while (axis := self._next(i, kinds)) is not None:
            if i not in self.ended:
                attributes = {"op": self._monoid(i).name, "axis": axis.name}
                kind = _ENDED_BY[axis.kind]
                self.ended[i] = self._add(kind, (i,), self.ops[i].dims, attributes)
            i = self.ended[i]
        return i

    def _next(self, i: int, kinds: tuple[AxisKind, ...]) -> Axis | None:
        """The axis that ends next: loops and visits, the cluster, the grid in the split's order."""
        pending = [a for a in self.split.axes if a.name in self.pending[i] and a.kind in kinds]
        rank = {name: n for n, name in enumerate(self.split.divided_axes)}
        last = len(rank)
        return min(
            pending,
            key=lambda a: (
                list(_ENDED_BY.values()).index(_ENDED_BY[a.kind]),
                rank.get(a.name, last),
            ),
            default=None,
        )

    def _monoid(self, i: int) -> Monoid:
        """The monoid that combines the parts of a value."""
        while self.ops[i].kind in ENDING:
            i = self.ops[i].inputs[0]
        return self.ops[i].facets.reduces or SUM

    # ------------------------------------------------------------------------------------ rules

    def _legal(self, program: BlockProgram, rules: Rules) -> bool:
        """True if the checker and the rules of the skeleton accept a program."""
        try:
            states = check_block_program(program)
        except GraphError:
            return False
        if any(n > self.split.passes for n in passes(program, states).values()):
            return False
        return all(_obeys(program, op, states, rules) for op in program.ops)


def _obeys(program: BlockProgram, op: BlockOp, states: list[ValueState], rules: Rules) -> bool:
    """True if a skeleton has a place for an operation."""
    if op.kind in (LOAD, STORE, CONSTANT, *ENDING):
        return True
    labels = tuple(frozenset(program.ops[j].dims) for j in op.inputs)
    own = [State(s.inside, s.closed, s.pending) for s in (states[j] for j in op.inputs)]
    if op.facets.contracts:
        loaded = [program.ops[j].kind == LOAD for j in op.inputs]
        a, b = (Operand(*x) for x in zip(labels, own, loaded, strict=True))
        return rules.contracts(a, b, op.attributes["over"])
    if "over" in op.attributes:
        return rules.reduces(labels[0], op.attributes["over"], own[0])
    joined = State(*(frozenset[Any]().union(*sets) for sets in zip(*own, strict=True)))
    return rules.computes(labels, joined)
