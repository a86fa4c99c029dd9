"""Skeleton 1, rows: element-wise programs and reductions along one label.

A row (all other labels fixed) is held in the registers of a power of two of threads; reductions run
over shuffles and, across warps, shared memory. Every tensor is read and written once. Rows should
be contiguous in memory; strided ones work too, and tensors may be stored in different orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import LOAD, STORE, Axis, AxisKind, BlockProgram, KernelStep, TensorSpec
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import lookup
from cutesuper.skeletons.base import Argument, Plan, View, arguments_of, view_of
from cutesuper.skeletons.rows.limits import MAX_PER_THREAD, MAX_ROW, MAX_THREADS, row_label
from cutesuper.skeletons.rows.schedule import RowSchedule
from cutesuper.targets import Target

#: threads of a large block; two such blocks share an SM, with 64 registers per thread
LARGE = 512
#: most elements of a row that a thread of such a block has
LARGE_HELD = 32
#: rows per SM from which on there are many
MANY_ROWS = 32
#: most threads of a block that has a strip of an element-wise program: SwiGLU of 16384x4096 takes
#: 96.4 us with 128, 98.5 with 256
MAX_STRIP = 128
#: most bytes of loaded rows per thread for which 64 registers are enough: LayerNorm with 32
#: elements, two vectors beside the row, needs all of them
MAX_LOADED = 192
#: most elements of all values that a thread has at the same time, of 255 registers; the rest are
#: for addresses and for intermediate values
MAX_LIVE = 192
#: longest strided rows that are read coalesced: 32 threads along the row, 64 elements each
MAX_STRIDED = 32 * MAX_PER_THREAD


@dataclass(frozen=True)
class RowPlan(Plan[RowSchedule]):
    """The plan of a row kernel.

    Attributes:
        program: the block program, tiled as the kernel runs it.
        arguments: tensor arguments in order, inputs first.
        column: the label along the rows.
        rows: the other labels; neighbouring rows differ in the last one.
        loads: views of the loads, by operation.
        stores: views of the stores, by operation.
        reductions: operations that reduce over ``column``.
        order: loads and computations, in the order in which they are issued.
        inverted: row scalars whose reciprocal is computed once, because they divide whole rows.
        schedule: the kernel's knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    column: str
    rows: tuple[str, ...]
    loads: dict[int, View]
    stores: dict[int, View]
    reductions: tuple[int, ...]
    order: tuple[int, ...]
    inverted: tuple[int, ...]
    schedule: RowSchedule

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.lanes * self.schedule.rows

    @property
    def resident(self) -> int:
        """Blocks per SM for which the compiler must leave registers; 0: no requirement.

        A large block alone on an SM waits for its loads, then for its stores: 4096x16384 forward
        took 93.8 us with 512 threads, which had more than 64 registers.
        """
        held = self.schedule.vector * self.schedule.chunks
        few = loaded_bytes(held, self.column, self.arguments, self.loads.values()) <= MAX_LOADED
        return 2 if self.threads == LARGE and held <= LARGE_HELD and few else 0

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
        ScheduleError: the schedule does not fit the rows or the registers.
    """
    program, where = step.program, f"kernel {step.name}"
    _check_structure(program, where)
    arguments = arguments_of(step, tensors)
    _check_symbols(arguments, where)
    loads = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == LOAD}
    stores = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == STORE}
    column = _column(program, loads, stores, where)
    reductions = tuple(i for i, o in enumerate(program.ops) if lookup_reduces(o.kind))
    if schedule is None:
        views = [*loads.values(), *stores.values()]
        schedule = _default_schedule(
            program, arguments, views, column, bool(reductions), target, dependent_launch, where
        )
    else:
        _check_schedule(schedule, program, column, bool(reductions), where)
    rows = _row_order(program, [*loads.values(), *stores.values()], column)
    program = _retile(program, rows, column, schedule, bool(reductions))
    order = _order(program, reductions, schedule)
    inverted = inverted_divisors(program, column, arguments)
    return RowPlan(
        program, arguments, column, rows, loads, stores, reductions, order, inverted, schedule
    )


def loaded_bytes(
    held: int, column: str, arguments: tuple[Argument, ...], views: Iterable[View]
) -> int:
    """Bytes of ``held`` elements of every tensor that has the column."""
    sizes = (as_dtype(arguments[v.argument].dtype).itemsize for v in views if column in v.labels)
    return held * sum(sizes)


def lookup_reduces(kind: str) -> bool:
    """True if an operation of a block program reduces over a label."""
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
        if lookup(op.kind).masks:
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) depends on positions, which a row kernel does "
                "not know; add an input of 0 and -inf in its place"
            )
    kinds = {a.kind for a in program.axes} - {AxisKind.GRID}
    if kinds:
        raise LoweringError(f"{where}: a row kernel has grid axes only, not {', '.join(kinds)}")


def _check_symbols(arguments: tuple[Argument, ...], where: str) -> None:
    """Check that strides are numbers: only the outermost dimension may have an open extent."""
    for a in arguments:
        if any(isinstance(d, Symbol) for d in [d for d in a.shape if d != 1][1:]):
            raise LoweringError(
                f"{where}: {a.name} has a symbolic extent that is not its first dimension"
            )


def _column(
    program: BlockProgram, loads: dict[int, View], stores: dict[int, View], where: str
) -> str:
    over = {o.attributes["over"] for o in program.ops if lookup_reduces(o.kind)}

    def labels(views: dict[int, View]) -> list[list[str]]:
        return [[d for d in v.labels if d in program.dims] for v in views.values()]

    column = row_label(program.dims, sorted(over), labels(stores), labels(loads))
    if column is None or len(over) > 1:
        raise LoweringError(
            f"{where}: one label must be the one reduced, or the last one of a tensor; found "
            f"{', '.join(sorted(over)) or 'none'}"
        )
    if isinstance(program.dims[column], Symbol):
        raise LoweringError(f"{where}: the rows' own dimension {column} must have a fixed extent")
    return column


def _row_order(program: BlockProgram, views: list[View], column: str) -> tuple[str, ...]:
    """All labels but the column; if tensors are strided along it, the label along which they are
    contiguous comes last, so that neighbouring rows are neighbours in memory."""
    rows = [d for d in program.dims if d != column]
    strided = [v for v in _strided(views, column) if v.labels[-1] in rows]
    if strided:
        heaviest = max(strided, key=lambda v: prod(extent(program.dims[d]) for d in v.labels))
        rows.remove(heaviest.labels[-1])
        rows.append(heaviest.labels[-1])
    return tuple(rows)


def _strided(views: list[View], column: str) -> list[View]:
    return [v for v in views if v.stride(column) > 1]


def _order(
    program: BlockProgram, reductions: tuple[int, ...], schedule: RowSchedule
) -> tuple[int, ...]:
    """Order of loads and computations. All loads come first, so that they overlap, if those of an
    element-wise program fit. If they are more elements than a thread may hold of one, or registers
    are for two large blocks, reductions and their operands come first, then the rest, so that more
    blocks share an SM: LayerNorm of 4096 elements needs 78 registers, with its vectors loaded first
    118, and 6 blocks are 48 KB in flight where 4 are 32. (RMSNorm of 32768 elements spilled.)"""
    count = range(len(program.ops))
    work = [i for i in count if program.ops[i].kind != STORE]
    held = schedule.vector * schedule.chunks
    loads = sum(op.kind == LOAD for op in program.ops)
    small = schedule.lanes * schedule.rows < LARGE and held * loads <= MAX_PER_THREAD
    if not reductions and held * loads > MAX_LIVE:
        return tuple(work)
    if not reductions or small:
        return tuple(sorted(work, key=lambda i: program.ops[i].kind != LOAD))
    needed = program.dependence.before
    return tuple(dict.fromkeys(j for i in (*reductions, *work) for j in needed(i)))


def inverted_divisors(
    program: BlockProgram, column: str, arguments: tuple[Argument, ...]
) -> tuple[int, ...]:
    """Row scalars that divide whole rows: one reciprocal in place of a division for each element.

    before: ``div(x[M, N], s[M])``; after: ``mul(x, 1 / s)``, s as a reciprocal root if it is a
    root. The softmax of rows of 4096 has 37 special-function instructions instead of 66, the RMS
    norm 1 instead of 35. This is not done for rows of fp32 results: the product is rounded twice.
    """
    wide = {a.name for a in arguments if a.written and as_dtype(a.dtype).itemsize > 2}
    if any(column in op.dims and op.attributes["tensor"] in wide for op in program.stores()):
        return ()
    found: dict[int, None] = {}
    for op in program.ops:
        if op.kind == "div" and column in op.dims:
            divisor = program.ops[op.inputs[1]]
            if divisor.dims and column not in divisor.dims:
                found[op.inputs[1]] = None
    return tuple(found)


def _check_schedule(
    schedule: RowSchedule, program: BlockProgram, column: str, reduces: bool, where: str
) -> None:
    """Refuse a given schedule that is too narrow for the rows or too large for the registers."""
    threads, held = schedule.lanes * schedule.rows, schedule.vector * schedule.chunks
    length = extent(program.dims[column])
    if threads > MAX_THREADS or held * (1 + (threads > MAX_THREADS // 2)) > MAX_PER_THREAD:
        raise ScheduleError(
            f"{where}: {threads} threads with {held} elements each do not fit into the registers; "
            f"at most {MAX_PER_THREAD} with {MAX_THREADS // 2} threads, half of that with more"
        )
    if reduces and schedule.lanes * held < length:
        raise ScheduleError(
            f"{where}: {schedule.lanes} lanes of {held} elements do not cover rows of {length}"
        )


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
    if reduces and length > MAX_ROW:
        raise LoweringError(
            f"{where}: rows of {length} elements are longer than the {MAX_ROW} that one block "
            "holds in registers"
        )
    contiguous = [v for v in views if v.stride(column) == 1]
    loads = views[: -len(list(program.stores()))]
    total = prod(extent(d) for label, d in program.dims.items() if label != column)
    if reduces and not contiguous and length <= MAX_STRIDED:
        lanes = min(32, power_of_two(ceil_div(length, 32)))
        chunks = ceil_div(length, lanes)
        # 1024 threads have 64 registers each: with more than 32 elements they spilled 88 bytes
        rows = 32 if chunks <= 32 else 16
        return RowSchedule(
            lanes, 1, chunks, rows, interleaved=True, dependent_launch=dependent_launch
        )
    vector = _vector(arguments, views, contiguous, length)
    if not reduces and _strided(views, column):
        # a transposition: a warp reads a piece of 32 neighbouring rows, and each thread writes its
        # own 16 bytes
        lanes = min(8, power_of_two(ceil_div(length, vector)))
        chunks = min(2, ceil_div(length, lanes * vector))
        return RowSchedule(
            lanes, vector, chunks, 32, interleaved=True, dependent_launch=dependent_launch
        )
    # four 16-byte accesses in flight per thread and tensor; fewer threads hold longer rows. If two
    # vectors are held as well, two accesses for rows of 1024 elements (LayerNorm of 32768x1024
    # takes 34.8 us, 37.2 with four), but four for longer ones (32768x4096: 140.5 with two, 136.1
    # with four)
    many = total >= MANY_ROWS * target.sms
    vectors = sum(v.labels == (column,) for v in views)
    least = MAX_ROW // 8 if many else MAX_ROW // 8 + 1
    per_thread = 4 if reduces and (vectors < 2 or length >= least) else 2
    if reduces and length > MAX_ROW // 4:
        # twice as many for long rows, unless two blocks of 512 threads share an SM: 4096x16384 took
        # 71.7 us with 256 threads and 8 accesses, 93.8 with one block of 512 and 4
        few = loaded_bytes(LARGE_HELD, column, arguments, loads) <= MAX_LOADED
        per_thread = LARGE_HELD // vector if few else 8
    if reduces and total <= 4 * target.sms:
        # so few blocks hide no latency of each other: if all loads fit into the registers of 256
        # threads they are requested at once. An update of nGPT, 8x4096, requested two of three
        # operands after its first sum: 3.3 us
        inputs = sum(column in v.labels for v in loads)
        while (
            vector * per_thread * inputs > MAX_PER_THREAD
            and 2 * ceil_div(length, vector * per_thread) < LARGE
        ):
            per_thread //= 2
    # the gradient of 20 operators around a softmax spilled 2304 bytes with 32 elements of each; for
    # element-wise programs the compiler computes one element after the other
    live = live_values(program, column) if reduces else 1
    while (
        vector * per_thread * live > MAX_LIVE
        and vector * per_thread > 1
        and 2 * ceil_div(length, vector * per_thread) <= LARGE
    ):
        vector, per_thread = (vector, per_thread // 2) if per_thread > 1 else (vector // 2, 1)
    # the longest rows take 512 threads of 128 registers, which leaves more of them for addresses:
    # LayerNorm of 32768 elements spilled 62 registers with 1024 threads of 64; with 512 it spills 6
    most = MAX_THREADS if length <= MAX_ROW // 2 else MAX_THREADS // 2
    lanes = min(most, power_of_two(ceil_div(length, vector * per_thread)))
    lanes = lanes if reduces else _strip(length, vector, min(lanes, MAX_STRIP))
    chunks = ceil_div(length, lanes * vector)
    chunks = chunks if reduces else min(per_thread, chunks)
    # full warps, 128 threads or more, but not fewer blocks than SMs; 256 for many rows if threads
    # have four accesses (RMSNorm of 32768x2048: 69.7 us, 71.3 with 128)
    rows = max(1, (256 if many and per_thread == 4 else 128) // lanes)
    while rows > max(1, 32 // lanes) and ceil_div(total, rows) < target.sms:
        rows //= 2
    return RowSchedule(lanes, vector, chunks, rows, dependent_launch=dependent_launch)


def live_values(program: BlockProgram, column: str) -> int:
    """The most values along the rows that are live at the same time, in the program's order."""
    last = {j: i for i, op in enumerate(program.ops) for j in op.inputs}
    alive, most = set[int](), 1
    for i, op in enumerate(program.ops):
        if column in op.dims and op.kind != STORE:
            alive.add(i)
        most = max(most, len(alive))
        alive -= {j for j in op.inputs if last[j] == i}
    return most


def _strip(length: int, vector: int, lanes: int) -> int:
    """Lanes of blocks that divide rows of an element-wise program into strips, so that the last one
    reaches past the end as little as possible: 4096x14336 in strips of 4096 elements, the last one
    half empty, took 90.6 us while the memory takes 81.4."""

    def covered(n: int) -> int:
        strip = n * vector * min(2, ceil_div(length, n * vector))
        return ceil_div(length, strip) * strip

    return min((lanes, max(32, lanes // 2), max(32, lanes // 4)), key=lambda n: (covered(n), -n))


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _vector(
    arguments: tuple[Argument, ...], views: list[View], contiguous: list[View], length: int
) -> int:
    """Elements per access: 16 bytes of the widest type, as far as row lengths allow. Tensors that
    are strided along the row are read element by element in any case."""
    widest = max(as_dtype(arguments[v.argument].dtype).itemsize for v in contiguous or views)
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
