"""Skeleton 1, rows: element-wise programs and reductions along one label.

A row (all other labels fixed) is held in registers by a power of two of threads; reductions run
over shuffles and, across warps, shared memory. Every tensor is read and written once. Rows are
best contiguous in memory; strided ones work too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from cutesuper.errors import LoweringError
from cutesuper.graph.block import LOAD, STORE, Axis, AxisKind, BlockProgram, KernelStep, TensorSpec
from cutesuper.graph.dims import Symbol, ceil_div, extent
from cutesuper.graph.dtypes import as_dtype
from cutesuper.graph.operators import lookup
from cutesuper.graph.target import Target
from cutesuper.schedule.plan import Argument, View, arguments_of, content_key, view_of
from cutesuper.schedule.schedule import RowSchedule

#: elements of one row that one thread may hold: 64 fp32 registers for every live value
MAX_PER_THREAD = 64
MAX_THREADS = 1024
#: longest strided rows that are read coalesced: 32 threads along the row, 64 elements each
MAX_STRIDED = 32 * MAX_PER_THREAD


@dataclass(frozen=True)
class RowPlan:
    """A row kernel, decided.

    Attributes:
        program: the block program, tiled as the kernel runs it.
        arguments: tensor arguments in order, inputs first.
        column: the label along the rows.
        rows: the other labels, outermost first.
        loads: by operation.
        stores: by operation.
        reductions: operations that reduce over ``column``.
        schedule: the knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    column: str
    rows: tuple[str, ...]
    loads: dict[int, View]
    stores: dict[int, View]
    reductions: tuple[int, ...]
    schedule: RowSchedule

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.lanes * self.schedule.rows

    @property
    def width(self) -> int:
        """Elements of a row that a block covers."""
        return self.schedule.lanes * self.schedule.vector * self.schedule.chunks

    @property
    def warps_per_row(self) -> int:
        """Warps that share a row."""
        return ceil_div(self.schedule.lanes, 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: one slot for every warp and reduction."""
        if self.schedule.interleaved:
            return 4 * len(self.reductions) * self.threads
        slots = len(self.reductions) * self.schedule.rows * self.warps_per_row
        return 4 * slots if self.warps_per_row > 1 else 0

    @property
    def key(self) -> str:
        """Canonical text of everything that decides the generated code."""
        return content_key(self.program, self.arguments, self.schedule)


def plan_rows(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: RowSchedule | None = None,
    dependent_launch: bool = False,
) -> RowPlan:
    """Fit a block program without matrix products into a row kernel.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
    """
    program, where = step.program, f"kernel {step.name}"
    _check_structure(program, where)
    arguments = arguments_of(step, tensors)
    loads = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == LOAD}
    stores = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == STORE}
    column = _column(program, (*loads.values(), *stores.values()), where)
    reductions = tuple(i for i, o in enumerate(program.ops) if lookup_reduces(o.kind))
    if schedule is None:
        views = [*loads.values(), *stores.values()]
        schedule = _default_schedule(
            program, arguments, views, column, bool(reductions), target, dependent_launch, where
        )
    rows = tuple(d for d in program.dims if d != column)
    program = _retile(program, rows, column, schedule, bool(reductions))
    return RowPlan(program, arguments, column, rows, loads, stores, reductions, schedule)


def lookup_reduces(kind: str) -> bool:
    """Whether an operation of a block program reduces over a label."""
    return kind not in (LOAD, STORE) and lookup(kind).reduces is not None


def _check_structure(program: BlockProgram, where: str) -> None:
    for i, op in enumerate(program.ops):
        if op.kind in (LOAD, STORE):
            continue
        if op.kind in ("accumulate", "cluster_reduce", "matmul"):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) has no place in a row kernel, which holds "
                "whole rows"
            )
        lookup(op.kind)
    kinds = {a.kind for a in program.axes} - {AxisKind.GRID}
    if kinds:
        raise LoweringError(f"{where}: a row kernel has grid axes only, not {', '.join(kinds)}")


def _column(program: BlockProgram, views: tuple[View, ...], where: str) -> str:
    """The label that runs along rows: the one reduced, else the last one of the outputs."""
    over = {o.attributes["over"] for o in program.ops if lookup_reduces(o.kind)}
    stored = {o.attributes["map"][-1] for o in program.stores() if o.attributes["map"]} - {None}
    last = {v.labels[-1] for v in views if v.labels}
    candidates = over or stored or last
    if len(candidates) != 1:
        raise LoweringError(
            f"{where}: one label must be the one reduced, or the last one of all outputs; found "
            f"{', '.join(sorted(candidates)) or 'none'}"
        )
    column = candidates.pop()
    if isinstance(program.dims[column], Symbol):
        raise LoweringError(f"{where}: the rows' own dimension {column} must have a fixed extent")
    return column


def _default_schedule(
    program: BlockProgram,
    arguments: tuple[Argument, ...],
    views: list[View],
    column: str,
    reduces: bool,
    target: Target,
    dependent_launch: bool,
    where: str,
) -> RowSchedule:
    length = extent(program.dims[column])
    contiguous = [v for v in views if v.stride(column) == 1]
    total = prod(extent(d) for label, d in program.dims.items() if label != column)
    if reduces and not contiguous and length <= MAX_STRIDED:
        lanes = min(32, _power_of_two(ceil_div(length, 32)))
        chunks = ceil_div(length, lanes)
        # 1024 threads have 64 registers each: with more than 32 elements they spilled 88 bytes
        rows = 32 if chunks <= 32 else 16
        return RowSchedule(lanes, 1, chunks, rows, True, dependent_launch)
    vector = _vector(arguments, views, contiguous, length)
    # four 16-byte accesses in flight per thread and tensor; fewer threads hold longer rows
    per_thread = 4 if reduces else 2
    lanes = min(MAX_THREADS, _power_of_two(ceil_div(length, vector * per_thread)))
    lanes = lanes if reduces else min(lanes, 256)
    chunks = ceil_div(length, lanes * vector)
    chunks = chunks if reduces else min(per_thread, chunks)
    if chunks * vector > MAX_PER_THREAD:
        limit = MAX_PER_THREAD * MAX_THREADS
        raise LoweringError(
            f"{where}: rows of {length} elements are longer than the {limit} that one block holds "
            f"in registers with {vector}-element accesses"
        )
    # full warps, 128 threads or more, but not fewer blocks than SMs
    rows = max(1, 128 // lanes)
    while rows > max(1, 32 // lanes) and ceil_div(total, rows) < target.sms:
        rows //= 2
    return RowSchedule(lanes, vector, chunks, rows, False, dependent_launch)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _vector(
    arguments: tuple[Argument, ...], views: list[View], contiguous: list[View], length: int
) -> int:
    """Elements per access: 16 bytes of the widest type, as far as row lengths allow. Tensors that
    are strided along the row are read element by element, whatever this says."""
    widest = max(as_dtype(arguments[v.argument].dtype).itemsize for v in views)
    vector = gcd(16 // widest, length)
    for v in contiguous:
        for s in v.strides:
            vector = gcd(vector, s) if s != 1 else vector
    return vector if contiguous else 1


def _retile(
    program: BlockProgram, rows: tuple[str, ...], column: str, schedule: RowSchedule, reduces: bool
) -> BlockProgram:
    """The program with the tiles that the kernel really uses."""
    width = schedule.lanes * schedule.vector * schedule.chunks
    tile = dict.fromkeys(rows, 1) | {column: width}
    left = schedule.rows
    for d in reversed(rows):  # blocks take neighbouring rows
        dim = program.dims[d]
        tile[d] = left if isinstance(dim, Symbol) else min(left, extent(dim))
        left = max(1, left // tile[d])
    tile = {d: tile[d] for d in program.dims}
    axes: list[Axis] = []
    for d, t in tile.items():
        dim = program.dims[d]
        if d == column and reduces:
            continue
        parts = None if isinstance(dim, Symbol) else ceil_div(extent(dim), t)
        axes.append(Axis(d, AxisKind.GRID, parts))
    return BlockProgram(program.dims, tuple(axes), tile, program.ops)
