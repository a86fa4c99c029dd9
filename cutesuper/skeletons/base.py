"""The protocol that skeletons implement, and the common part of their plans.

A plan holds every decision that the kernel needs, in printable form. `skeletons.planner.make_plan`
asks each skeleton in turn if it runs a block program; the one that does gives every operation its
place, picks a schedule if none is given, and refuses, with a reason, structures it cannot run.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from math import gcd, prod
from typing import Any, ClassVar, Generic, Self, TypeVar

from cutesuper.egraph.extract import Price
from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.saturate import Table
from cutesuper.egraph.space import Space
from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import (
    LOAD,
    NAMES,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    TensorSpec,
)
from cutesuper.ir.border import PartOf
from cutesuper.ir.definitions import definitions
from cutesuper.ir.dims import Dim, Symbol, Tiles, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import each
from cutesuper.ir.operators.index import row_dims
from cutesuper.ir.serial import program_dict
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.cost import Setting, Sized, additive_price
from cutesuper.skeletons.form import Form
from cutesuper.skeletons.schedule import Schedule, schedule_dict
from cutesuper.targets import Target

Knobs = TypeVar("Knobs", bound=Schedule)


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a kernel: compact and row-major, or a part of such a tensor.
    The kernel is given the part then.

    Attributes:
        constant: True if it may be read before the dependency wait.
        written: True for an output.
        scattered: True if its rows lie anywhere in device memory; the kernel is given the address
            of each, int64.
        of: name of the tensor of which it is a part, if it is one.
        part: its place in that tensor.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    constant: bool
    written: bool
    scattered: bool = False
    of: str = ""
    part: PartOf | None = None

    @property
    def given(self) -> str:
        """Name of the tensor that the kernel is given."""
        return self.of or self.name

    @property
    def memory(self) -> tuple[Dim, ...]:
        """Shape of the tensor that the kernel is given."""
        return self.shape if self.part is None else self.part.whole

    @property
    def steps(self) -> tuple[int, ...]:
        """Distances between neighbours along each dimension, in elements.
        The factors of them that are known."""
        behind = (self.memory[i + 1 :] for i in range(len(self.memory)))
        return tuple(prod(d for d in own if isinstance(d, int)) for own in behind)

    @property
    def offset(self) -> int:
        """A divisor of the place of its first element in the tensor that the kernel is given.
        0 if that is the first one there."""
        starts = () if self.part is None else self.part.starts
        return gcd(*(n * s for n, s in zip(starts, self.steps, strict=False)))


@dataclass(frozen=True)
class View:
    """A tensor as the block program sees it: labels instead of positions.

    Attributes:
        argument: index of the kernel argument.
        labels: its labels, extents of 1 left out.
        strides: distance between neighbours along each label, in elements; where a later extent
            is symbolic, only the factor that is known.
        growing: for each label the symbolic factors of its stride; empty if no label has any.
        offset: a divisor of the place of its first element in memory that is aligned; 0 if it is
            the first one there.
    """

    argument: int
    labels: tuple[str, ...]
    strides: tuple[int, ...]
    growing: tuple[tuple[Symbol, ...], ...] = field(default=(), kw_only=True)
    offset: int = field(default=0, kw_only=True)

    def stride(self, label: str) -> int:
        """Stride of ``label``, or its known factor.
        0 where the tensor does not have the label (it is replicated)."""
        return dict(zip(self.labels, self.strides, strict=True)).get(label, 0)

    def growth(self, label: str) -> tuple[Symbol, ...]:
        """Symbolic factors of the stride of ``label``."""
        if not self.growing:
            return ()
        return dict(zip(self.labels, self.growing, strict=True)).get(label, ())

    def contiguous(self, label: str) -> bool:
        """True if neighbours along ``label`` are neighbours in memory."""
        return self.stride(label) == 1 and not self.growth(label)

    def strided(self, label: str) -> bool:
        """True if the tensor has ``label``, and its neighbours lie apart."""
        return label in self.labels and not self.contiguous(label)

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers of elements whose sums of multiples are the places of aligned runs.
        Runs are contiguous in memory that is aligned."""
        apart = zip(self.labels, self.strides, strict=True)
        return (*(s for d, s in apart if not self.contiguous(d)), self.offset)

    def run(self, label: str, most: int, *extents: int) -> int:
        """Elements in which ranges along ``label`` can be accessed, up to a power of two.

        Args:
            label: a label of the view.
            most: the power of two.
            extents: of the ranges.
        """
        return gcd(most, *extents, *self.places) if self.contiguous(label) else 1


@dataclass(frozen=True)
class Pages(View):
    """A cache of pages as the block program sees it through a table.

    before: a cache ``[pages, P, H, D]`` through ``table[B, n]``, mapped to ``(B, N, H, D)``; after:
    the labels N, H, D of one page, N with P positions, and the strides of that page. The label of
    the sequences has no stride: the table gives the places of their pages.

    Attributes:
        table: index of the argument ``[sequences, pages of a sequence]``.
        sequences: label of the sequences, None if there is only one.
        positions: the label whose runs of ``size`` elements are pages.
        size: number of positions in a page.
        page_stride: distance between neighbouring pages, in elements.
    """

    table: int
    sequences: str | None
    positions: str | None
    size: int
    page_stride: int


@dataclass(frozen=True)
class Named:
    """The places along a dimension of a tensor that an index names.

    Attributes:
        index: the view of the index.
        count: number of places.
        stride: distance between neighbouring places, in elements.
    """

    index: View
    count: int
    stride: int


@dataclass(frozen=True)
class Indexed(View):
    """Rows of a table as the block program sees them through an index.

    before: ``table[V, D]`` through ``index[M]``, mapped to ``(M, D)``; after: the labels M and D,
    of which D has the stride of a row, and M stride 0: the index gives the places of the rows. For
    rows that are put into ``table`` it is the same, and several dimensions may have an index.

    Attributes:
        named: the dimensions that have an index; all indices have the same labels.
    """

    named: tuple[Named, ...]

    @property
    def named_by(self) -> tuple[str, ...]:
        """The labels of each index."""
        return self.named[0].index.labels

    @property
    def step(self) -> int:
        """Number of elements of which the places that indices name are multiples."""
        return gcd(*(n.stride for n in self.named))


@dataclass(frozen=True)
class Output:
    """A stored tensor: an expression over accumulated values, values of rows, and loads.
    A loop accumulates the values."""

    view: View
    expression: ThreadExpression


@dataclass(frozen=True)
class Scratch:
    """Device memory that a kernel needs besides its tensors; it is passed after them.

    Attributes:
        shape: extents may be symbolic, or tiles of symbolic ones.
        dtype: element type.
        zeroed: True if every launch needs zeros at its start; it leaves zeros behind. No two
            launches that may run at the same time share it.
    """

    shape: tuple[Dim | Tiles, ...]
    dtype: str
    zeroed: bool


class Plan(ABC, Generic[Knobs]):
    """The common part of a kernel's plan.

    Attributes:
        program: the block program, tiled as the kernel runs it.
        arguments: tensor arguments in order, inputs first.
        schedule: the kernel's knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    schedule: Knobs

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a block."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""

    @property
    def stages(self) -> int:
        """Slots of the shared-memory ring; 1 if operands go straight to registers."""
        return max(1, getattr(self.schedule, "stages", 1))

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Device memory beside the tensors; none unless blocks meet in it."""
        return ()

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """Pairs of arguments that may share memory, one that is read and one that is written.
        Each element is written by threads that have read that element of the other, and nothing
        reads it afterwards."""
        return ()

    @property
    def key(self) -> str:
        """Canonical text of everything that determines the generated code."""
        return content_key(self.program, self.arguments, self.schedule)

    def scattered(self, names: Collection[str]) -> Self:
        """The same kernel for arguments with these names whose rows lie anywhere.

        Raises:
            LoweringError: this kind of kernel takes none, or not these.
        """
        raise LoweringError(
            f"{', '.join(names)}: only kernels of rows take tensors whose rows lie anywhere"
        )

    def itemsize(self, view: View) -> int:
        """Bytes of an element of the tensor behind a view."""
        return as_dtype(self.arguments[view.argument].dtype).itemsize

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that device memory must read and write: each tensor once.
        Tensors that are read or written through an index count with the rows that it names."""
        taken = {
            op.attributes["tensor"]: prod(extent(self.program.dims[d]) for d in op.dims)
            for op in (*self.program.loads(), *self.program.stores())
            if "index" in op.attributes
        }
        return sum(
            taken.get(a.name, prod(map(extent, a.shape))) * as_dtype(a.dtype).itemsize
            for a in self.arguments
        )

    def names(self, views: Iterable[View]) -> str:
        """The tensors behind some views, for a report."""
        return ", ".join(map(self._name, views))

    def _name(self, view: View) -> str:
        name = self.arguments[view.argument].name
        if self.arguments[view.argument].scattered:
            return f"rows of {name} at their addresses"
        if not isinstance(view, Indexed):
            return name
        indices = [self.arguments[n.index.argument].name for n in view.named]
        return f"{name} through {' and '.join(indices)}"


def same_places(
    plan: Plan[Any], column: str, loads: Iterable[View], stores: Iterable[View]
) -> list[tuple[View, View]]:
    """Pairs of a load and a store with the same elements at the same places.
    Their tensors have one type and are read and written once: by one block, which no label of the
    grid repeats, and by one thread, as they have the column label; an element for a whole row is
    read by many."""
    loads, given = list(loads), [a.given for a in plan.arguments]
    grid = {a.dim for a in plan.program.of_kind(AxisKind.GRID)}
    read = [given[v.argument] for v in loads]
    once = [v for v in loads if read.count(given[v.argument]) == 1]
    return [
        (load, store)
        for load, store in product(once, stores)
        if type(load) is View
        and grid | {column} <= set(store.labels)
        and replace(store, argument=load.argument) == load
        and not any(plan.arguments[v.argument].part for v in (load, store))
        and plan.arguments[store.argument].dtype == plan.arguments[load.argument].dtype
        and plan.arguments[store.argument].shape == plan.arguments[load.argument].shape
    ]


@dataclass(frozen=True)
class Limit:
    """A limit that a plan exceeds.

    Attributes:
        name: the same for all plans that exceed it; sizes that are left out are counted by it.
        message: what this plan has, and what to do.
        error: raised when the kernel is planned.
    """

    name: str
    message: str
    error: type[LoweringError | ScheduleError] = ScheduleError

    def refused(self, kernel: str) -> LoweringError | ScheduleError:
        """The error for a kernel of this name."""
        return self.error(f"kernel {kernel}: {self.message}")


def exceeded_accumulators(plan: Plan[Any], held: int, waits: bool, target: Target) -> Limit | None:
    """The limit of the room for accumulators (`Target.refuses_accumulators`).

    Blocks that need more than is left wait for each other, which blocks that wait for others of
    their cluster must not: two clusters would wait for each other on two multiprocessors.

    Args:
        plan: of the kernel.
        held: numbers of 32 bits that products of a block read and write there.
        waits: True if its blocks wait for each other.
        target: the GPU.
    """
    blocks = target.sm_shared_bytes // (plan.shared_bytes + target.reserved_bytes) if waits else 1
    refused = target.refuses_accumulators(held, max(1, blocks))
    return Limit(*refused) if refused else None


class Skeleton(ABC):
    """A loop that block programs are lowered to, with the methods that all stages call.

    Attributes:
        name: for messages, with its article: ``a matmul loop``.
        plans: the classes of its plans.
        schedules: the classes of the plans' schedules.
        between_waists: True if only segments are searched that begin and end where few values
            cross.
        widest_chain: most elements that the first of chained products contracts in kernels that
            store tensors of different rows and columns; 0 if none do.
    """

    name: ClassVar[str]
    plans: ClassVar[tuple[type[Plan[Any]], ...]]
    schedules: ClassVar[tuple[type[Schedule], ...]]
    between_waists: ClassVar[bool] = False
    widest_chain: ClassVar[int] = 0

    # ------------------------------------------------------------------------------ the search

    @abstractmethod
    def recognize(self, region: Region, program: LabelledProgram, target: Target) -> Form | None:
        """The rules for a region; None if the skeleton does not apply to it.

        Raises:
            SearchError: the skeleton would apply, but for the given reason.
        """

    def searches(self, form: Any) -> bool:
        """True if other ways to compute a region of this form are searched.
        Otherwise it is run as it is written."""
        return True

    def class_share(self, program: LabelledProgram) -> float:
        """The part of `search.region.SearchOptions.max_classes` that a split may have.
        What needs more is searched with more values sealed, and at last run as it is written."""
        return 1.0

    def prepared(self, program: LabelledProgram, form: Any) -> Space | None:
        """The space to search, if the skeleton knows which values to seal; else None."""
        return None

    def otherwise(self, program: LabelledProgram, form: Any) -> LabelledProgram | None:
        """An equivalent program, tried if nothing was found; None if there is none."""
        return None

    def divides(self, length: int, alone: bool) -> bool:
        """True if several kernels reduce a row of this length.

        Args:
            length: elements of the row.
            alone: True if it is the only row.
        """
        return False

    def price(self, table: Table, form: Any, target: Target, itemsize: int) -> Price:
        """Cost of a derivation while sizes are unknown."""
        return additive_price(table, None, target, itemsize)

    def bandwidth(self, target: Target) -> float:
        """Bytes of device memory that its kernels move in a second, at most."""
        return target.bandwidth

    def least_us(
        self, program: LabelledProgram, form: Any, target: Target, memory_us: float
    ) -> float:
        """Microseconds below which no program of this form is priced.

        Args:
            program: the region.
            form: the rules for it.
            target: the GPU.
            memory_us: time in which memory moves each tensor once, at least.
        """
        return target.launch_us + memory_us

    @abstractmethod
    def sizes(
        self, structure: BlockProgram, form: Any, setting: Setting, pruned: Counter[str]
    ) -> Iterable[Sized]:
        """Extents worth pricing, in any order; ``pruned`` counts rejected ones, by reason.

        Raises:
            LoweringError: the structure is one that the skeleton cannot run, at any extents.
        """

    def restructured(
        self, program: BlockProgram, setting: Setting
    ) -> tuple[BlockProgram, Form] | None:
        """A given program without extents, to be sized again.
        None if they are part of its meaning."""
        return None

    # ------------------------------------------------------------------------------- planning

    @abstractmethod
    def runs(self, step: KernelStep) -> bool:
        """True if this skeleton runs a kernel; it holds for exactly one skeleton."""

    @abstractmethod
    def plan(self, step: KernelStep, setting: Setting, schedule: Any) -> Plan[Any]:
        """Plan a kernel, with a schedule of `schedules` or, for None, one of its own choice.

        The setting's tensors are those of `cutesuper.ir.unseen.followed`, and its
        ``dependent_launch`` is that of a chosen schedule.

        Raises:
            LoweringError: the kernel has a structure that this skeleton cannot run.
            ScheduleError: the kernel does not fit the target.
        """

    @abstractmethod
    def explain(self, plan: Any) -> list[str]:
        """The plan in words, line by line: places of all data, and roles of all warps."""

    @abstractmethod
    def build(self, plan: Any) -> Any:
        """The kernel that CuTe DSL traces. Imports CuTe DSL."""


def arguments_of(step: KernelStep, tensors: dict[str, TensorSpec]) -> tuple[Argument, ...]:
    """The kernel's arguments: tensors read, then tensors written, in program order."""

    def argument(name: str, written: bool) -> Argument:
        t = tensors[name]
        found = Argument(name, t.shape, t.dtype.name, t.constant, written)
        if t.part is None:
            return found
        part = PartOf(tensors[t.part.of].shape, t.part.starts)
        return replace(found, of=t.part.of, part=part)

    return (
        *(argument(n, False) for n in step.reads),
        *(argument(n, True) for n in step.writes),
    )


def view_of(op: BlockOp, arguments: tuple[Argument, ...]) -> View:
    """A load's or store's view of its tensor.
    `Pages` for a load through a table, `Indexed` for a load or store through an index."""
    written = op.kind != LOAD
    index = next(
        i
        for i, a in enumerate(arguments)
        if a.name == op.attributes["tensor"] and a.written == written
    )
    shape, strides = arguments[index].memory, arguments[index].steps
    behind = [shape[i + 1 :] for i in range(len(shape))]
    mapping = op.attributes["map"]
    if "index" in op.attributes:
        return _indexed(index, op, arguments)
    paged = "table" in op.attributes
    first = 1 if paged else 0  # the table places sequences
    kept = [(d, s) for d, s in zip(mapping[first:], strides[first:], strict=True) if d is not None]
    labels, steps = tuple(d for d, _ in kept), tuple(s for _, s in kept)
    if not paged:
        symbols = [tuple(d for d in own if isinstance(d, Symbol)) for own in behind]
        open_ = tuple(s for d, s in zip(mapping, symbols, strict=True) if d is not None)
        growing = open_ if any(open_) else ()
        return View(index, labels, steps, growing=growing, offset=arguments[index].offset)
    table = next(i for i, a in enumerate(arguments) if a.name == op.attributes["table"])
    sequences, positions = mapping[:2]
    size = extent(shape[1])
    return Pages(index, labels, steps, table, sequences, positions, size, strides[0])


def _strides(argument: Argument) -> list[int]:
    """Distances between neighbours along each dimension of a compact tensor, in elements."""
    return [prod(map(extent, argument.shape[i + 1 :])) for i in range(len(argument.shape))]


def _indexed(table: int, op: BlockOp, arguments: tuple[Argument, ...]) -> Indexed:
    """The view of a load or store of rows that indices name."""
    mapping, dims = op.attributes["map"], each(op.attributes.get("dim", 0))
    numbers = {a.name: i for i, a in enumerate(arguments)}
    places, steps = [numbers[name] for name in op.tensors[1:]], _strides(arguments[table])
    rows = mapping[dims[0] :][: len(arguments[places[0]].shape)]

    def view(argument: int, given: list[tuple[str | None, int]]) -> View:
        kept = [(d, s) for d, s in given if d is not None]
        return View(argument, tuple(d for d, _ in kept), tuple(s for _, s in kept))

    named = tuple(
        Named(
            view(place, list(zip(rows, _strides(arguments[place]), strict=True))),
            extent(arguments[table].shape[d]),
            steps[d],
        )
        for place, d in zip(places, dims, strict=True)
    )
    own = ([0 for _ in rows] if d == dims[0] else [steps[d]] for d in row_dims(len(steps), dims))
    row = view(table, list(zip(mapping, chain(*own), strict=True)))
    return Indexed(table, row.labels, row.strides, named)


def content_key(program: BlockProgram, arguments: tuple[Argument, ...], schedule: Schedule) -> str:
    """Canonical text of everything that determines the generated code.

    Symbolic extents enter by name only: the hint does not change the code. So do the package's own
    operators; for added ones the text includes a hash of what they compute.
    """
    shapes = [[a.dtype, a.constant, a.written, _named(a.shape)] for a in arguments]
    names = {a.name: i for i, a in enumerate(arguments)}
    parts = [a.part and [_named(a.part.whole), a.part.starts] for a in arguments]
    data = program_dict(program)
    data["dims"] = [[k, v["symbol"] if isinstance(v, dict) else v] for k, v in data["dims"]]
    for op in data["ops"]:
        op[3].pop("base", None)  # no argument of the kernel
        for tensor in op[3].keys() & NAMES:
            given = op[3][tensor]
            several = isinstance(given, list)
            op[3][tensor] = [names[n] for n in given] if several else names[given]
    key: list[Any] = [data, shapes, schedule_dict(schedule)]
    if any(a.scattered for a in arguments):
        key.append([a.scattered for a in arguments])
    if any(parts):
        key.append(parts)
    if outside := definitions(op.kind for op in program.ops):
        key.append(outside)
    return json.dumps(key, sort_keys=True, separators=(",", ":"))


def _named(shape: Sequence[Dim]) -> list[int | str]:
    """Extents, symbols by name."""
    return [d.name if isinstance(d, Symbol) else d for d in shape]
