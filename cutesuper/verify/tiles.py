"""Block programs over an algebra with named dimensions, all tiles at once or part by part.

A dimension ``K`` that a program splits becomes one named dimension for each part, outermost first:
``K.grid``, ``K.cluster``, ``K.persistent``, ``K.loop``, ``K.tile``. Every tile of every block is
then held in one value, and each operation of a block program is one operation on named dimensions:
``sum over K`` reduces ``K.tile``, ``accumulate(K.loop)`` reduces ``K.loop``.

If that would not fit in memory (real extents), grid, persistent and loop axes are cut into chunks
that are visited in turn: a value with a cut dimension is made for one chunk at a time, and
`accumulate` (over the grid `grid_reduce`) walks the chunks of its axis, as often as the program
walks the loop. Accumulators that end an axis in the same walk share it; rescaled sums take a walk
of their own after the maxima.

Elements past the end of a dimension never count: sums, products and maxima over a label leave them
out, stores drop them. They hold random residues, so a leak would show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutesuper.errors import VerificationError
from cutesuper.ir.block import (
    ACCUMULATE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
    BlockProgram,
    mapped_labels,
)
from cutesuper.ir.check import check_block_program, pass_of
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.ir.operators.base import TABLE, Operator, each
from cutesuper.ir.operators.monoid import monoid
from cutesuper.verify.integers import Integers, Places, without_q
from cutesuper.verify.source import needs_exponents, turned

#: limit on the elements of one value held at a time; about ten values live at once
CHUNK_ELEMENTS = 1 << 22

#: axis -> the range of its parts that is held
Window = dict[str, tuple[int, int]]

#: operations that end an axis which may be cut into chunks
_WALKED = (ACCUMULATE, GRID_REDUCE)


@dataclass(frozen=True)
class Mapped:
    """Layout of one dimension of a tensor over parts.

    Attributes:
        parts: names of the parts, outermost first (none for an extent of 1).
        extents: their extents.
        extent: of the tensor's dimension; at most the product of ``extents``.
    """

    parts: tuple[str, ...]
    extents: tuple[int, ...]
    extent: int


class Layout:
    """The parts of every label of a program with concrete extents."""

    def __init__(self, program: BlockProgram) -> None:
        self.program = program
        self.extents: dict[str, int] = {}
        self.labels: dict[str, Mapped] = {}
        #: for labels with padding: names of the parts, and a mask of the elements that exist
        self.valid: dict[str, tuple[tuple[str, ...], NDArray[np.bool_]]] = {}
        self._mapped: dict[Any, list[Mapped]] = {}
        for d, n in program.dims.items():
            axes = program.axes_of(d)
            names = (*(a.name for a in axes), f"{d}.tile")
            counts = (*(program.parts(a) for a in axes), program.tile[d])
            self.extents.update(zip(names, counts, strict=True))
            self.labels[d] = Mapped(names, counts, extent(n))
            if prod(counts) != extent(n):
                exists = np.arange(prod(counts)) < extent(n)
                self.valid[d] = (names, exists.reshape(counts))

    def mapped(self, op: BlockOp) -> list[Mapped]:
        """The layout of the tensor of a load or store. Raises VerificationError."""
        entries = op.attributes["map"]
        if entries not in self._mapped:
            self._mapped[entries] = self._new(op)
        return self._mapped[entries]

    def _new(self, op: BlockOp) -> list[Mapped]:
        result = []
        for entry in op.attributes["map"]:
            found = [self._part(label) for label in mapped_labels(entry)]
            names = tuple(p for m in found for p in m.parts)
            extents = tuple(n for m in found for n in m.extents)
            result.append(Mapped(names, extents, prod(m.extent for m in found)))
        names = [p for m in result for p in m.parts]
        if len(set(names)) < len(names):
            raise VerificationError(
                f"{op.kind} {op.attributes['tensor']}: its map names a dimension and an axis of it"
            )
        return result

    def _part(self, label: str) -> Mapped:
        """The layout of a label, or of an axis as one part of a label."""
        if label in self.labels:
            return self.labels[label]
        n = self.extents[label]
        return Mapped((label,), (n,), n)


def exponents_loaded(program: BlockProgram, wanted: set[str]) -> set[str]:
    """Names of the loaded tensors whose residues mod q are used.
    Directly, or for a stored tensor of which those are ``wanted``."""
    used = _with_exponents(program, wanted)
    return {_tensor(op) for i, op in enumerate(program.ops) if op.kind == LOAD and i in used}


def _with_exponents(program: BlockProgram, wanted: set[str]) -> set[int]:
    ops = program.ops
    also = {i for i, op in enumerate(ops) if op.kind == STORE and _tensor(op) in wanted}
    also |= {j for op in ops if op.rescaled for j in op.inputs[1:]}
    return needs_exponents([op.kind for op in ops], [op.inputs for op in ops], also)


class BlockRun:
    """One run of a block program.

    Args:
        a: the algebra, with the additions of `cutesuper.verify.domain.FieldDomain` to a field.
        program: concrete extents.
        tensors: the tensors to load, by name; `Integers` for integers.
        wanted: names of stored tensors whose residues mod q a later kernel uses.
        chunk_elements: None holds all tiles at once; else the size to which values are cut.
        empty: quotients whose divisor may be a sum of hidden elements only, by operation; see
            `cutesuper.ir.unseen`.
    """

    def __init__(
        self,
        a: Any,
        program: BlockProgram,
        tensors: Mapping[str, Any],
        wanted: set[str],
        chunk_elements: int | None = None,
        empty: Collection[int] = (),
    ) -> None:
        self.a, self.program, self.tensors, self.empty = a, program, tensors, empty
        self.layout = Layout(program)
        self.q_wanted = _with_exponents(program, wanted)
        self._names = self._dims_of_values()
        self._step = self._chunks(chunk_elements) if chunk_elements else {}
        self._cut = [frozenset(n) & set(self._step) for n in self._names]
        self._walks = self._group_accumulators() if self._step else {}
        self._memo: dict[int, tuple[Window, Any]] = {}
        self._gathered: dict[tuple[str, ...], Any] = {}

    def run(self) -> dict[str, Any]:
        """The stored tensors by name.

        Raises:
            DivisionByZero: draw other inputs.
            VerificationError: a store whose value does not have the dimensions of its map.
        """
        stores = [i for i, op in enumerate(self.program.ops) if op.kind == STORE]
        for i in stores:
            self._check_store(i)
        out: dict[str, Any] = {}
        for cut in dict.fromkeys(self._cut[i] for i in stores):
            for window in self._windows(cut, {}):
                for i in stores:
                    if self._cut[i] == cut:
                        self._store(i, window, out)
        ops = self.program.ops
        return {_tensor(ops[i]): self._finished(ops[i], out[_tensor(ops[i])]) for i in stores}

    def _finished(self, op: BlockOp, x: Any) -> Any:
        """The tensor behind stored tiles; rows are put into the tensor that they belong to."""
        mapped = self.layout.mapped(op)
        found = self.a.finish(x, mapped)
        if not op.puts:
            return found
        indices = tuple(self.tensors[name].data for name in op.tensors[1:])
        places = Places(indices, each(op.attributes["dim"]))
        shape = tuple(m.extent for m in mapped)
        return self.a.put(self.tensors[op.attributes["base"]], places, found, shape)

    # the walk ------------------------------------------------------------------------------

    def _value(self, i: int, window: Window) -> Any:
        """The value of an operation, after those of its operands; without recursion."""
        stack = [i]
        while stack:
            j = stack[-1]
            here = self._here(j, window)
            waiting = [] if self._is_known(j, here) else self._waiting(j, window)
            if waiting:
                stack += reversed(waiting)
                continue
            if not self._is_known(j, here):
                self._evaluate(j, window, here)
            stack.pop()
        return self._memo[i][1]

    def _here(self, i: int, window: Window) -> Window:
        return {n: window[n] for n in self._cut[i]} if window else window

    def _is_known(self, i: int, here: Window) -> bool:
        return i in self._memo and self._memo[i][0] == here

    def _walked(self, i: int) -> bool:
        """True if an operation walks the chunks of an axis and computes its operands in each."""
        op = self.program.ops[i]
        return op.kind in _WALKED and op.attributes.get("axis") in self._step

    def _waiting(self, i: int, window: Window) -> list[int]:
        """The operands that have to be computed first."""
        inputs = () if self._walked(i) else self.program.ops[i].inputs
        return [j for j in inputs if not self._is_known(j, self._here(j, window))]

    def _evaluate(self, i: int, window: Window, here: Window) -> None:
        op = self.program.ops[i]
        if self._walked(i):
            self._accumulate(i, op.attributes["axis"], here)
            return
        args = [self._memo[j][1] for j in op.inputs]
        if i not in self.q_wanted and not op.facets.exponential and not op.rescaled:
            args = [without_q(self.a, v) for v in args]
        if i in self.empty:
            args[1] = self.a.seen(args[1])
        value = self._apply(op, args, here)
        self._memo[i] = (here, value if i in self.q_wanted else without_q(self.a, value))

    def _accumulate(self, i: int, axis: str, here: Window) -> None:
        """Walk the chunks of an axis once for all accumulators that end it in this walk."""
        ops, group = self.program.ops, self._walks[i]
        total: dict[int, Any] = {}
        for window in self._windows(frozenset((axis,)), here):
            for j in group:
                part = self._reduce(ops[j], [self._value(k, window) for k in ops[j].inputs])
                together = monoid(ops[j].attributes["op"]).together
                total[j] = together(self.a, total[j], part) if j in total else part
        for j in group:
            self._memo[j] = (here, total[j] if j in self.q_wanted else self.a.without_q(total[j]))

    def _apply(self, op: BlockOp, args: list[Any], window: Window) -> Any:
        if op.kind == LOAD:
            return self._load(op, window)
        if op.kind in ENDING:
            return self._reduce(op, args)
        if "over" in op.attributes:
            return self._over(op, args, window)
        operator = TABLE[op.kind]
        if operator.masks:
            return self._mask(op, operator, args, window)
        if operator.turns:
            label = self.layout.labels[op.attributes["along"]]
            [dim], [padded] = label.parts, label.extents
            return turned(self.a, operator, args[0], dim, label.extent, op.attributes, padded)
        if operator.integers:
            [x] = args
            return self.a.literal(x.dims, operator.numbers(x.data, op.attributes))
        return self.a.elementwise(op.kind, args, dict(op.attributes))

    def _load(self, op: BlockOp, window: Window) -> Any:
        for needed in op.tensors:
            if needed not in self.tensors:
                raise VerificationError(f"load: tensor {needed} does not exist")
        mapped, x = self.layout.mapped(op), self.tensors[_tensor(op)]
        if isinstance(x, Integers):
            return _integer_tiles(x, mapped, window)
        operator = op.gathering
        if operator is not None:
            if op.tensors not in self._gathered:
                shape, integers = tuple(m.extent for m in mapped), self.tensors[op.tensors[1]].data
                self._gathered[op.tensors] = self.a.gather(x, integers, operator, shape)
            x = self._gathered[op.tensors]
        return self.a.load(x, mapped, window)

    def _mask(self, op: BlockOp, operator: Operator, args: list[Any], window: Window) -> Any:
        """Apply a mask; positions follow from the parts, of which the outermost counts most."""
        none = Mapped((), (), 1)
        first, second = (
            none if op.attributes[side] is None else self.layout.labels[op.attributes[side]]
            for side in ("rows", "columns")
        )
        rows, columns = (
            _cut_window(m.parts, np.arange(prod(m.extents)).reshape(m.extents), window)
            for m in (first, second)
        )
        given = args[1] if operator.integers else Integers((), np.zeros((), np.int64))
        inner = rows.ndim + columns.ndim
        integers = given.data.reshape(*given.data.shape, *(1 for _ in range(inner)))
        rows = rows.reshape(*rows.shape, *(1 for _ in columns.shape))
        extents = (first.extent, second.extent)
        keep = operator.visible(rows, columns, extents, op.attributes, integers)
        # a tile that is all padding has no maximum, and nothing to subtract one from
        shape = np.broadcast_shapes(integers.shape, rows.shape, columns.shape)
        keep = np.broadcast_to(keep & (columns < second.extent), shape)
        return self.a.mask(args[0], given.dims + first.parts + second.parts, keep, operator)

    def _reduce(self, op: BlockOp, args: list[Any]) -> Any:
        axis, x = op.attributes["axis"], args[0]
        if op.rescaled:
            move = self.a.elementwise("sub", args[1:], {})
            x = self.a.elementwise("mul", [x, self.a.elementwise("exp", [move], {})], {})
        return monoid(op.attributes["op"]).reduced(self.a, x, (axis,), self.layout.extents)

    def _over(self, op: BlockOp, args: list[Any], window: Window) -> Any:
        """Reduce the tile of a label, without the elements that do not exist."""
        a, label = self.a, op.attributes["over"]
        over = (f"{label}.tile",)
        valid = self.layout.valid.get(label)
        valid = None if valid is None else (valid[0], _cut_window(valid[0], valid[1], window))
        if op.facets.contracts:
            if valid is not None:  # both operands: zero times an infinity or NaN is NaN
                args = [a.masked(x, valid) for x in args]
            return a.matmul(args[0], args[1], over)
        assert op.facets.reduces is not None
        if op.facets.reduces.places and not self.program.ops[op.inputs[0]].places:
            mapped = self.layout.labels[label]
            places = np.arange(prod(mapped.extents)).reshape(mapped.extents)
            args = [a.placed(args[0], mapped.parts, _cut_window(mapped.parts, places, window))]
        total = op.facets.reduces.reduced(a, args[0], over, self.layout.extents, valid)
        if op.facets.averages:
            return a.div(total, a.constant(float(extent(self.program.dims[label]))))
        return total

    def _store(self, i: int, window: Window, out: dict[str, Any]) -> None:
        op = self.program.ops[i]
        value = self._value(op.inputs[0], window)
        name = _tensor(op)
        if i not in self.q_wanted:
            value = self.a.without_q(value)
        if self.program.ops[op.inputs[0]].places and name not in self.program.partials():
            value = self.a.place(value)
        out[name] = self.a.store(value, self.layout.mapped(op), window, out.get(name))

    def _check_store(self, i: int) -> None:
        op = self.program.ops[i]
        have = set(self._names[op.inputs[0]])
        want = {p for m in self.layout.mapped(op) for p in m.parts}
        if have != want:
            odd = ", ".join(sorted(have ^ want))
            raise VerificationError(
                f"store {_tensor(op)}: its value and its map differ in {odd}; a dimension was "
                "reduced in part only"
            )

    # planning ------------------------------------------------------------------------------

    def _dims_of_values(self) -> list[tuple[str, ...]]:
        """Names of the dimensions of every value, without computing it."""
        names: list[tuple[str, ...]] = []
        for op in self.program.ops:
            if op.kind == LOAD:
                have = [p for m in self.layout.mapped(op) for p in m.parts]
            else:
                have = list(dict.fromkeys(d for j in op.inputs for d in names[j]))
            gone = {op.attributes.get("axis"), f"{op.attributes.get('over')}.tile"}
            names.append(tuple(d for d in have if d not in gone))
        return names

    def _chunks(self, limit: int) -> dict[str, int]:
        """Parts of each cut axis that are held at a time.
        Axes are halved until every value fits."""
        step = dict(self.layout.extents)
        kinds = (AxisKind.GRID, AxisKind.PERSISTENT, AxisKind.LOOP)
        axes = [a.name for kind in kinds for a in self.program.of_kind(kind)]
        while True:
            sizes = [prod(step[d] for d in names) for names in self._names]
            worst = self._names[int(np.argmax(sizes))]
            free = [a for a in axes if a in worst and step[a] > 1]
            if max(sizes) <= limit or not free:
                return {a: step[a] for a in axes if step[a] < self.layout.extents[a]}
            step[free[0]] = ceil_div(step[free[0]], 2)

    def _group_accumulators(self) -> dict[int, tuple[int, ...]]:
        """For every accumulator, those computed in the same walk over the chunks of its axis."""
        ops, states = self.program.ops, check_block_program(self.program)
        groups: dict[Any, list[int]] = {}
        for i, op in enumerate(ops):
            if op.kind in _WALKED:
                axis = op.attributes["axis"]
                number = pass_of(states[i], axis)
                groups.setdefault((axis, number, op.rescaled, self._cut[i]), []).append(i)
        return {i: tuple(group) for group in groups.values() for i in group}

    def _windows(self, cut: frozenset[str], outer: Window) -> Iterator[Window]:
        axes = [n for n in self._step if n in cut]
        ranges = []
        for n in axes:
            end, step = self.layout.extents[n], self._step[n]
            ranges.append([(k, min(k + step, end)) for k in range(0, end, step)])
        for chosen in product(*ranges):
            yield {**outer, **dict(zip(axes, chosen, strict=True))}


def _integer_tiles(x: Integers, mapped: list[Mapped], window: Window) -> Integers:
    """Tiles of integers, 0 past their end."""
    names = tuple(p for m in mapped for p in m.parts)
    data = x.data.reshape([m.extent for m in mapped])
    beyond = [(0, prod(m.extents) - m.extent) for m in mapped]
    data = np.pad(data, beyond).reshape([n for m in mapped for n in m.extents])
    return Integers(names, _cut_window(names, data, window))


def _tensor(op: BlockOp) -> str:
    return op.attributes["tensor"]


def _cut_window(names: tuple[str, ...], x: NDArray[Any], window: Window) -> NDArray[Any]:
    """The part of ``x`` that a window shows."""
    if not window:
        return x
    return x[tuple(slice(*window[n]) if n in window else slice(None) for n in names)]
