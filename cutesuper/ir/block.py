"""Block programs: *how* one kernel computes, as a program of one thread block.

Every dimension of the kernel's tensors has a **label** (``M``, ``K``, ``N``). An `Axis` splits a
label over blocks (grid), over the blocks of a cluster, over the tiles that one block visits in turn
(persistent) or over the iterations of a loop; the rest is the tile that a block holds at a time. A
value of the program is therefore identified by the labels it still has. Mirage's imap, omap and
fmap are all read off this: an axis that splits a label splits every tensor that has the label, and
replicates every tensor that does not.

before: ``rms(X) @ W`` as two kernels; after, as one block program::

    N.grid(64) K.cluster(2) K.loop(16), tile M=16 N=64 K=128
    0  load X[M, K]              4  accumulate(3, K.loop)     8  sqrt(7)
    1  load W[K, N]              5  square(0), mean over K    9  div(accumulated 4, 8)
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

from cutesuper.ir.dependence import Dependence
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.ir.dtypes import DType, float32, int64
from cutesuper.ir.operators.base import CONSTANT, Attributes, Operator, each, facets
from cutesuper.ir.operators.monoid import monoid


class AxisKind(StrEnum):
    """Kind of an axis: how its parts are mapped to the GPU."""

    GRID = "grid"  # independent blocks
    CLUSTER = "cluster"  # blocks that exchange partial results through distributed shared memory
    PERSISTENT = "persistent"  # tiles one block visits in turn; accumulators may live across them
    LOOP = "loop"  # iterations over staged tiles


@dataclass(frozen=True)
class Axis:
    """``kind`` splits the label ``dim`` into ``extent`` parts.

    ``extent`` is None for an *open* axis of a symbolic dimension: the call decides how many blocks
    (grid axis), tiles (persistent axis) or iterations (loop axis) it needs. At most one axis of a
    label is open.
    """

    dim: str
    kind: AxisKind
    extent: int | None

    @property
    def name(self) -> str:
        """The axis's name, as ``K.loop``."""
        return f"{self.dim}.{self.kind}"

    def __str__(self) -> str:
        return f"{self.name}({'?' if self.extent is None else self.extent})"


#: from the outermost split of a dimension to the innermost
ORDER = (AxisKind.GRID, AxisKind.CLUSTER, AxisKind.PERSISTENT, AxisKind.LOOP)

#: operations of a block program that are not in the operator table
LOAD, STORE = "load", "store"
ACCUMULATE, CLUSTER_REDUCE, GRID_REDUCE = "accumulate", "cluster_reduce", "grid_reduce"
#: attributes of a load that name the integers through which it reads, and the operators that put
#: parts of a tensor together in this way
THROUGH = {"table": "gather_pages", "index": "take_rows"}
#: attributes of a load or store that name tensors which its kernel reads or writes
NAMES = ("tensor", *THROUGH)
#: attributes of a store that puts rows into a tensor at the places that an index names, and the
#: operator that it does the work of
PUTTING, PUT = ("index", "base", "dim"), "put_rows"
#: type of a partial result that is a pair of a number and its place: the bits of the number in
#: fp32, which count most, then those of the place
PAIR = int64
#: operations that end an axis: they combine the partial results of its parts
ENDING = (ACCUMULATE, CLUSTER_REDUCE, GRID_REDUCE)


@dataclass(frozen=True)
class BlockOp:
    """One operation on tiles.

    Attributes:
        kind: an operator of the table (element-wise, ``matmul``, ``sum``, ``mean``, ``max``,
            ``constant``), or ``load``, ``store``, ``accumulate``, ``cluster_reduce``,
            ``grid_reduce``.
        inputs: indices of earlier operations.
        dims: labels of the value, in the order of the program's ``dims``.
        attributes: ``load``/``store``: ``tensor`` (name) and ``map`` (for each dimension of the
            tensor its label, None for an extent of 1, or a tuple of labels that share it, the
            outermost first; a store may name a cluster or grid *axis* instead of a label: one slice
            of partial results for each part). ``matmul``, ``sum``, ``mean``, ``max``: ``over`` (a
            label; only the tile is reduced, ``mean`` divides by the extent of the whole dimension).
            ``accumulate``, ``cluster_reduce``, ``grid_reduce``: ``axis`` (name) and ``op`` (name of
            a monoid: "sum", "max"); see `rescaled`. ``causal_mask``: ``rows`` and ``columns``
            (labels of the value) and its own ``alignment``. ``length_mask``, whose second operand
            is a ``load`` of the lengths: ``columns``, ``rows`` (None where it is not causal or
            there is one row) and ``causal``. ``pick``, whose second operand is a ``load`` of the
            labels: ``columns``, and None as its ``rows``. Positions are those of the whole label,
            regardless of the axes that split it. A ``load`` through a table of pages has its name
            as ``table``, one of rows that an index names has the name of the index as ``index``;
            ``tensor`` is the cache or the table of rows and ``map`` that of the gathered tensor.
            One of partial results that are pairs (`PAIR`) has ``pairs=True``. A ``store`` that puts
            rows into a tensor has the name of the ``index``, the dimension ``dim`` whose places
            it names (or tuples of both, for several), and as ``base`` the input that ``tensor`` is
            but for these rows; ``map`` is that of the rows. Element-wise operators: their own.
    """

    kind: str
    inputs: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: Attributes = field(default_factory=dict)

    @property
    def facets(self) -> Operator:
        """The operator's entry in the table; an empty one for a load, a store and ends of axes."""
        return facets(self.kind)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors of a load or store, its own first.
        The others, if any, have the integers through which it reads or writes."""
        return tuple(n for k in NAMES if k in self.attributes for n in each(self.attributes[k]))

    @property
    def gathering(self) -> Operator | None:
        """The operator that a load does the work of if it gathers as integers say, else None."""
        if self.kind != LOAD:
            return None
        return next((facets(THROUGH[k]) for k in THROUGH if k in self.attributes), None)

    @property
    def puts(self) -> bool:
        """True for a store that puts rows into a tensor at the places that an index names."""
        return self.kind == STORE and "index" in self.attributes

    @property
    def places(self) -> bool:
        """True if the result is places of elements, of a part or of all.
        The partial results that a load brings are those of a part."""
        if self.kind == LOAD:
            return bool(self.attributes.get("pairs"))
        ends = self.kind in ENDING
        how = monoid(self.attributes["op"]) if ends else self.facets.reduces
        return how is not None and how.places

    @property
    def rescaled(self) -> bool:
        """True if it is a sum over an axis of ``x * exp(t - T)``, operands ``(x, t, T)``.

        t is a maximum of each part, T the maximum of t over the same axis (an operation of the
        same kind). A kernel runs it in one pass, as the online softmax: a running maximum, and the
        old sum times ``exp(old maximum - new maximum)`` (arXiv:1805.02867)::

            7  max over N (6)                    9  sum over N (exp(6 - 7))
            8  accumulate max (7) over N.loop   10  accumulate sum (9, 7, 8) over N.loop
        """
        return self.kind in ENDING and len(self.inputs) == 3


def with_names(names: str | tuple[str, ...], new: Callable[[str], Any]) -> Any:
    """The names that an attribute has, one or several, replaced by others."""
    return tuple(map(new, names)) if isinstance(names, tuple) else new(names)


def mapped_labels(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Labels (or axes) named by an entry of a map: none, one, or several that share it."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


@dataclass(frozen=True)
class BlockProgram:
    """The program of one kernel; see the module's docstring.

    Attributes:
        dims: extent of every label.
        axes: how labels are split; at most one axis of a kind for one label.
        tile: for every label the extent that a block holds at a time.
        ops: in an order in which they can run.
    """

    dims: dict[str, Dim]
    axes: tuple[Axis, ...]
    tile: dict[str, int]
    ops: tuple[BlockOp, ...]

    @cached_property
    def dependence(self) -> Dependence:
        """Dependences between the operations."""
        return Dependence([op.inputs for op in self.ops])

    def axis(self, name: str) -> Axis:
        """The axis called ``K.loop``. Raises KeyError."""
        return {a.name: a for a in self.axes}[name]

    def axes_of(self, dim: str) -> tuple[Axis, ...]:
        """Axes that split ``dim``, outermost first."""
        return tuple(sorted((a for a in self.axes if a.dim == dim), key=lambda a: _rank(a.kind)))

    def of_kind(self, kind: AxisKind) -> tuple[Axis, ...]:
        """All axes of one kind."""
        return tuple(a for a in self.axes if a.kind == kind)

    def covered(self, dim: str) -> int | None:
        """Elements of ``dim`` that all parts cover together, with padding; None if symbolic."""
        parts = [a.extent for a in self.axes_of(dim)]
        known = [p for p in parts if p is not None]
        return None if len(known) < len(parts) else prod(known) * self.tile[dim]

    def ragged(self, dim: str) -> bool:
        """True if the last tile of ``dim`` reaches past its end (or may: symbolic extents)."""
        covered = self.covered(dim)
        return covered is None or covered != extent(self.dims[dim])

    def blocks(self) -> int:
        """Number of thread blocks; symbolic extents count with their hint."""
        count, apart = 1, 0
        for a in self.axes:
            if a.kind == AxisKind.GRID and a.dim in self.alternatives:
                apart += self.parts(a)
            elif a.kind in (AxisKind.GRID, AxisKind.CLUSTER):
                count *= self.parts(a)
        return count * max(1, apart)

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """Labels of the grid of which every stored tensor has one, and no operation two.
        A block works for one of them, so their blocks add up. What it computes for the others is
        what their own blocks store.

        before: ``X W[M, N]`` and ``X V[M, N2]``; after: ``(N, N2)``. Empty without two of them.
        """
        grid = [a.dim for a in self.axes if a.kind == AxisKind.GRID]
        stored = [set(op.dims) for op in self.stores()]
        found = tuple(d for d in grid if not all(d in labels for labels in stored))
        used = [{*op.dims, op.attributes.get("over")} for op in self.ops]
        one = all(len(labels.intersection(found)) == 1 for labels in stored)
        apart = all(len(labels.intersection(found)) < 2 for labels in used)
        return found if len(found) > 1 and one and apart else ()

    def parts(self, axis: Axis) -> int:
        """Extent of an axis; if it is open, the extent that follows from the dimension's hint."""
        if axis.extent is not None:
            return axis.extent
        inner = prod(self.parts(a) for a in self.axes_of(axis.dim) if a != axis)
        return ceil_div(extent(self.dims[axis.dim]), inner * self.tile[axis.dim])

    def parts_along(self, dim: str, kind: AxisKind) -> int:
        """Number of parts into which axes of one kind divide a label; 1 without such an axis."""
        return self._parts.get((dim, kind), 1)

    @cached_property
    def _parts(self) -> dict[tuple[str, AxisKind], int]:
        return {(a.dim, a.kind): self.parts(a) for a in self.axes}

    def factor(self, op: BlockOp) -> float:
        """The factor of a complete reduction: 1 / extent of its label for a mean, else 1."""
        return 1.0 / extent(self.dims[op.attributes["over"]]) if op.facets.averages else 1.0

    def loads(self) -> tuple[BlockOp, ...]:
        """All load operations."""
        return tuple(op for op in self.ops if op.kind == LOAD)

    def stores(self) -> tuple[BlockOp, ...]:
        """All store operations."""
        return tuple(op for op in self.ops if op.kind == STORE)

    def partials(self) -> dict[str, TensorSpec]:
        """The tensors in which blocks leave partial results, one slice for each part of an axis.
        Numbers in fp32; pairs of numbers and places as `PAIR` says."""
        parts: dict[str, Dim] = {a.name: self.parts(a) for a in self.axes}
        extents, found = self.dims | parts, dict[str, TensorSpec]()
        for op in self.stores():
            labels = [mapped_labels(entry) for entry in op.attributes["map"]]
            if parts.keys().isdisjoint(d for own in labels for d in own):
                continue
            shape = tuple(
                extents[own[0]] if len(own) == 1 else prod(extent(extents[d]) for d in own)
                for own in labels
            )
            dtype = PAIR if self.ops[op.inputs[0]].places else float32
            found[op.attributes["tensor"]] = TensorSpec(op.attributes["tensor"], shape, dtype)
        return found

    def resized(
        self, dims: dict[str, Dim], extents: Mapping[str, int | None], tile: dict[str, int]
    ) -> BlockProgram:
        """The same structure at other extents (axis extents by name)."""
        axes = tuple(replace(a, extent=extents[a.name]) for a in self.axes)
        return BlockProgram(dims, axes, tile, self.ops)

    def at(self, axes: tuple[Axis, ...], tile: dict[str, int]) -> BlockProgram:
        """The same structure with axes of other extents, and other tiles."""
        program = BlockProgram(self.dims, axes, tile, self.ops)
        vars(program)["alternatives"] = self.alternatives  # follows from labels alone
        return program


def _rank(kind: AxisKind) -> int:
    return ORDER.index(kind)


class Copy:
    """A copy of a block program while it grows.

    Attributes:
        old: the program that is copied.
        ops: the operations of the copy so far.
        place: the index in the copy of each operation of the old program.
    """

    def __init__(self, old: BlockProgram) -> None:
        self.old = old
        self.ops: list[BlockOp] = []
        self.place: dict[int, int] = {}

    def inputs(self, i: int) -> list[int]:
        """The operands, in the copy, of an operation of the old program."""
        return [self.place[j] for j in self.old.ops[i].inputs]

    def copy(self, i: int, inputs: Sequence[int]) -> None:
        """Append an operation of the old program, with these operands."""
        op = self.old.ops[i]
        self.place[i] = self.add(op.kind, inputs, op.dims, op.attributes)

    def add(
        self,
        kind: str,
        inputs: Sequence[int],
        dims: tuple[str, ...],
        attributes: Attributes | None = None,
    ) -> int:
        """Append another operation, and return its index."""
        self.ops.append(BlockOp(kind, tuple(inputs), dims, attributes or {}))
        return len(self.ops) - 1

    def constant(self, value: float) -> int:
        """Append a constant, and return its index."""
        return self.add(CONSTANT, (), (), {"value": value})

    def program(self) -> BlockProgram:
        """The program with the operations so far."""
        return replace(self.old, ops=tuple(self.ops))


@dataclass(frozen=True)
class Part:
    """The place of a tensor that lies in a larger one.

    before: columns 6 to 9 of ``X[M, 16]``; after: ``Part("X", (0, 6))`` of a tensor ``[M, 4]``.

    Attributes:
        of: name of the larger tensor, an input or an output of the muGraph.
        starts: its first element along each dimension.
    """

    of: str
    starts: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor between kernels, at the border of a muGraph, or a part of one at the border.

    Attributes:
        name: unique in its muGraph.
        shape: its extents.
        dtype: its element type.
        constant: never written while the program runs.
        part: its place, if it lies in another tensor.
        hidden: its value in rows that are hidden as a whole, if known; derived by
            `cutesuper.ir.unseen.followed`, never stored.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    constant: bool = False
    part: Part | None = None
    hidden: float | None = None


@dataclass(frozen=True)
class KernelStep:
    """One kernel launch: a block program that reads and writes tensors by name."""

    name: str
    program: BlockProgram

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors it loads, and of the integers of its loads and stores, each once."""
        found = [n for op in self.program.loads() for n in op.tensors]
        found += [n for op in self.program.stores() for n in op.tensors[1:]]
        return tuple(dict.fromkeys(found))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the tensors it stores."""
        return tuple(op.attributes["tensor"] for op in self.program.stores())

    @property
    def bases(self) -> dict[str, str]:
        """By the name of each tensor that it puts rows into, the input that it is elsewhere."""
        puts = (op.attributes for op in self.program.stores() if op.puts)
        return {a["tensor"]: a["base"] for a in puts}


@dataclass(frozen=True)
class MuGraph:
    """A program at the kernel level: launches in order, and the tensors between them.

    Attributes:
        tensors: every tensor by name: inputs, intermediates, outputs, and parts of inputs and
            outputs. An output with parts is written in these.
        inputs: names of the inputs, in the order of the kernel graph's inputs.
        outputs: names of the outputs, in the order of the kernel graph's outputs.
        steps: kernel launches in order.
    """

    tensors: dict[str, TensorSpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[KernelStep, ...]

    def symbols(self) -> dict[str, Symbol]:
        """All symbolic extents by name."""
        dims = [d for t in self.tensors.values() for d in t.shape]
        return {d.name: d for d in dims if isinstance(d, Symbol)}

    def parts(self, of: str) -> tuple[str, ...]:
        """Names of the parts of a tensor, in the order of their places."""
        found = [t for t in self.tensors.values() if t.part is not None and t.part.of == of]
        return tuple(t.name for t in sorted(found, key=_place))

    def renamed(
        self, names: Mapping[str, str], symbols: Mapping[str, str] | None = None
    ) -> MuGraph:
        """The same program with other names of tensors and symbolic extents.
        Those that are left out stay."""

        def dim(d: Dim) -> Dim:
            new = symbols or {}
            return Symbol(new.get(d.name, d.name), d.hint) if isinstance(d, Symbol) else d

        def name(n: str) -> str:
            return names.get(n, n)

        def program(p: BlockProgram) -> BlockProgram:
            ops = tuple(replace(op, attributes=renamed(op)) for op in p.ops)
            return replace(p, dims={k: dim(d) for k, d in p.dims.items()}, ops=ops)

        def renamed(op: BlockOp) -> dict[str, Any]:
            """Attributes with new names.
            Those of a load or store name a tensor, and the integers through which it is read."""
            given = {k: op.attributes[k] for k in NAMES if k in op.attributes}
            return {**op.attributes, **{k: with_names(v, name) for k, v in given.items()}}

        def spec(t: TensorSpec) -> TensorSpec:
            part = t.part and replace(t.part, of=name(t.part.of))
            return replace(t, name=name(t.name), shape=tuple(map(dim, t.shape)), part=part)

        tensors = {name(n): spec(t) for n, t in self.tensors.items()}
        steps = tuple(KernelStep(s.name, program(s.program)) for s in self.steps)
        inputs, outputs = (tuple(map(name, group)) for group in (self.inputs, self.outputs))
        return MuGraph(tensors, inputs, outputs, steps)


def _place(t: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert t.part is not None
    return t.part.starts, tuple(map(extent, t.shape))
