"""Plans of row loops: the knobs for a block program without products. `skeletons.rows.loop_roles`
finds the roles of its operations."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import (
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockProgram,
    KernelStep,
    TensorSpec,
)
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.skeletons.base import arguments_of, view_of
from cutesuper.skeletons.rows.limits import LONG_ROW
from cutesuper.skeletons.rows.loop_plan import BULK, RowLoopPlan
from cutesuper.skeletons.rows.loop_roles import check_views, find_roles
from cutesuper.skeletons.rows.plan import inverted_divisors, power_of_two
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from cutesuper.targets import Target

#: bytes of a tile, of all operands: two such stages were best for every shape from 25 MB on
#: (4096x4096 backward 29.3 us; 31.1 with three, 31.4 with four)
STAGE_BYTES = 32 * 1024
#: registers of an SM for tiles that threads keep and for sums over rows, 5 of 8: longer tiles are
#: read again from shared memory. LayerNorm backward with 32 columns per thread has 112 of 128 and
#: spilled 248 bytes
KEPT_REGISTERS = 40 * 1024
#: most elements of a row that a thread has in slices of all rows, or if tiles are loaded straight
#: from memory to threads that have several rows
MAX_KEPT = 32
#: most elements of a row that a thread has in any schedule
MAX_HELD = 64
MAX_THREADS = 512
#: rows per block from which on there are many
MANY_VISITS = 64
#: most rows that a thread has at a time, each with its own values: LayerNorm backward of 1001
#: elements spilled 168 bytes with 16
MAX_ROWS = 8
#: most 16-byte accesses of a thread, of all operands, if tiles are loaded straight from memory
MAX_ACCESSES = 8
#: bytes of shared memory for exchanges and barriers
RESERVED = 16 * 1024
WARP = 32
#: most rows for which blocks sum slices by themselves: 512x4096 backward 7.2 us, 8.8 if they meet;
#: at 1024 they meet (18.1 against 10.6)
MAX_SLICED = 512


def plan_row_loop(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: RowLoopSchedule | None = None,
    dependent_launch: bool = False,
) -> RowLoopPlan:
    """Fit a block program without products into a row loop.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
        ScheduleError: the schedule does not fit the rows or the device.
    """
    program, where = step.program, f"kernel {step.name}"
    arguments = arguments_of(step, tensors)
    loads = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == LOAD}
    stores = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == STORE}
    roles = find_roles(program, loads, stores, where)
    check_views(program, arguments, roles, loads, stores, where)
    inverted = inverted_divisors(program, roles.column, arguments)
    plan = RowLoopPlan(
        program, arguments, roles.column, roles.rows, roles.outer, loads, stores, roles.complete,
        roles.picked, roles.levels, roles.sums, inverted, RowLoopSchedule(1, 1, 1, 1),
    )  # fmt: skip
    plan = replace(plan, program=_with_part(plan))
    if schedule is None:
        schedule = _whole_warps(plan, _default_schedule(plan, target, dependent_launch))
        if schedule.kept and schedule.vector * schedule.chunks > MAX_HELD:
            raise LoweringError(
                f"{where}: rows of {plan.width} elements are longer than the "
                f"{schedule.lanes * MAX_HELD} that one block holds in registers; divide them over "
                "a cluster"
            )
    plan = replace(plan, schedule=schedule)
    _check_schedule(plan, target, where)
    return replace(plan, program=_retiled(plan), shared_percent=_shared_percent(plan, target))


# ---------------------------------------------------------------------------------------- schedule


def _with_part(plan: RowLoopPlan) -> BlockProgram:
    """The program with a block's part of the row: whole accesses of 8 elements if divided."""
    program, length, parts = plan.program, plan.length, plan.parts
    width = length if parts == 1 else 8 * ceil_div(ceil_div(length, parts), 8)
    return replace(program, tile=program.tile | {plan.column: width})


def _default_schedule(plan: RowLoopPlan, target: Target, dependent_launch: bool) -> RowLoopSchedule:
    views = [plan.loads[i] for i in plan.streamed]
    smallest = min([plan.itemsize(v) for v in views], default=2)
    ring = _bulk(plan)
    vector = BULK // smallest if ring else _common_vector(plan, BULK // smallest)
    rows = prod(extent(plan.program.dims[d]) for d in plan.rows)
    pieces = ceil_div(plan.width, vector)
    if plan.sums and rows <= MAX_SLICED:
        sliced = _sliced_schedule(plan, target, vector, rows, dependent_launch)
        held = vector * sliced.chunks * sliced.depth
        if held <= MAX_KEPT and _unsliced(replace(plan, schedule=sliced)) is None:
            return sliced
    row_bytes = max(1, sum(plan.width * plan.itemsize(v) for v in views))
    if not plan.sums and ring and (straight := _straight_schedule(plan, target, vector, rows)):
        return replace(straight, dependent_launch=dependent_launch)
    # 64 registers do not hold vectors as well. Rows that are only read may be twice as long: the
    # loss of 16384x65536 took 629 us with one block and two stages, 553 with two blocks and one
    # stage each; softmax, which spills then, 1095 and 1921
    only_read = not any(plan.column in v.labels for v in plan.stores.values())
    small = row_bytes <= STAGE_BYTES * (1 + only_read) and not plan.vectors
    resident = 2 if plan.cluster > 1 and small and not plan.sums else 1
    walkers = plan.walkers or resident * _at_once(plan, target)
    fair = power_of_two(max(1, ceil_div(rows, walkers)))
    # without a ring only the tile is requested: as much of it as two stages have
    most = STAGE_BYTES if ring else 2 * STAGE_BYTES
    tile_rows = max(1, min(_floor_power(most // row_bytes), fair, 128))
    threads = MAX_THREADS if row_bytes * tile_rows > STAGE_BYTES // 2 else MAX_THREADS // 2
    lanes = min(threads, power_of_two(ceil_div(pieces, 2)))
    half = MAX_THREADS // 2
    if plan.sums and (lanes < half or (lanes == half and _adds_two_rows(plan, rows, walkers))):
        # fewer groups whose sums are joined: the prototype of 4096x2048 took 16.2 us with 256
        # threads
        threads = half
    chunks = ceil_div(pieces, lanes)
    groups = max(1, min(tile_rows, threads // lanes))
    depth = max(1, tile_rows // groups)
    if not ring:  # a thread requests all of its rows at once
        depth = max(1, min(depth, MAX_ROWS, MAX_KEPT // (resident * vector * chunks)))
    schedule = RowLoopSchedule(
        lanes, vector, chunks, groups, depth, 0, True, walkers, resident,
        dependent_launch=dependent_launch,
    )  # fmt: skip
    if not ring:
        return schedule
    held = replace(plan, schedule=schedule).held * resident * lanes * groups
    kept = held <= KEPT_REGISTERS and vector * chunks * depth <= MAX_HELD
    stage = groups * depth * row_bytes
    room = (target.shared_bytes - RESERVED) // (resident * stage)
    # rows that are read again release their stage late; long rows need no third stage (LayerNorm
    # backward, 16384x65536: 1641 us with two, 1715 with three)
    least = 2 if kept or stage > STAGE_BYTES else 3
    stages = max(1, min(room, max(least, 2 * STAGE_BYTES // stage), 3))
    return replace(schedule, stages=stages, kept=kept)


def _adds_two_rows(plan: RowLoopPlan, rows: int, walkers: int) -> bool:
    """True if threads add two rows of up to 4096 columns, in place of one row by twice as many
    threads.

    RMSNorm's backward pass takes 28.8 us for 4096 rows, 29.9 with 512 threads; but 199 and 193 for
    32768. Two sums (LayerNorm, 32768x4096) are too many for such a thread: 234 us, and 223. For
    results in float32 the error matters, which grows with the rows that one number adds up: 1.4e-7
    and 1.3e-7 for 4096 rows.
    """
    summed = [v for v in plan.stores.values() if not plan.varies(v)]
    narrow = all(plan.itemsize(v) == 2 for v in summed)
    return len(plan.sums) == 1 and narrow and rows <= MANY_VISITS * walkers


def _straight_schedule(
    plan: RowLoopPlan, target: Target, vector: int, rows: int
) -> RowLoopSchedule | None:
    """A schedule with a block (or cluster) for each tile, whose rows are loaded straight to
    registers; None if threads would not hold them.

    Rows in one block: at least two blocks on an SM, so that threads have 128 registers; with more,
    and one block, 4096x16384 forward took 92.6 us. Weights do not fit into the registers. If
    nothing is reduced, 128 threads with two accesses of each operand: the gradient of cross
    entropy, 32768x4096, takes 136 us, through a ring 144.

    Rows in a cluster: three blocks of 256 threads on an SM, and 8 accesses. While one loads, the
    others reduce and store: softmax of 16384x65536 takes 1013 us in clusters of 4, one block that
    walks 1112; its gradient in clusters of 8 1462, 1550. Rows that are only read keep the ring,
    which reaches 95% of the memory (the loss of 16384x65536: 481 us).
    """
    operands = max(1, len(plan.streamed))
    pieces = ceil_div(plan.width, vector)
    written = any(plan.column in v.labels for v in plan.stores.values())
    if plan.cluster > 1 and (plan.vectors or not written):
        return None
    if plan.cluster > 1 or plan.width > LONG_ROW:
        accesses = MAX_ACCESSES // operands
    else:
        accesses = MAX_ACCESSES // 2 // operands if plan.complete else 2
    lanes = power_of_two(ceil_div(pieces, max(1, accesses)))
    if lanes > MAX_THREADS // 2 or (plan.vectors and plan.width > LONG_ROW):
        return None
    threads = MAX_THREADS // 2 if plan.complete else MAX_THREADS // 4
    groups = _straight_groups(lanes, threads, rows, target)
    resident = 3 if plan.cluster > 1 else 2
    return RowLoopSchedule(lanes, vector, ceil_div(pieces, lanes), groups, 1, 0, True, 0, resident)


def _straight_groups(lanes: int, threads: int, rows: int, target: Target) -> int:
    """Rows of a block that has one tile: enough for ``threads`` threads, but not fewer blocks than
    SMs. An SM starts one block in about 0.3 us: the loss of 32768x4096 took 96 us with 128 threads,
    72 with 256."""
    groups = max(1, threads // lanes)
    while groups * lanes > max(lanes, WARP) and ceil_div(rows, groups) < target.sms:
        groups //= 2
    return groups


def _whole_warps(plan: RowLoopPlan, s: RowLoopSchedule) -> RowLoopSchedule:
    """The schedule adjusted to short and few rows: at least a warp, a lane for every block of the
    cluster to send to, and whole pieces of 4 columns of summed values."""
    lanes = max(s.lanes, min(WARP, power_of_two(plan.cluster)), 4 if plan.sums else 1)
    chunks = min(s.chunks, ceil_div(plan.width, lanes * s.vector))
    groups = max(WARP, s.lanes * s.groups) // lanes
    return replace(s, lanes=lanes, chunks=chunks, groups=max(1, groups))


def _at_once(plan: RowLoopPlan, target: Target) -> int:
    """Number of clusters (or blocks) that run at the same time with one block on every SM."""
    clusters = target.clusters.get(plan.cluster, target.sms // plan.cluster)
    return max(1, clusters // plan.column_parts)


def _sliced_schedule(
    plan: RowLoopPlan, target: Target, vector: int, rows: int, dependent_launch: bool
) -> RowLoopSchedule:
    """A schedule for few rows, with a slice of columns for every block: 256 threads if a block has
    one row (3.66 us at 128x4096, 3.87 with 512), 512 and two rows at a time if it has more (7.6 us
    at 512x4096; 9.5 with one, and four spill)."""
    outer = prod(extent(plan.program.dims[d]) for d in plan.outer)
    walkers = max(1, target.sms // max(1, outer))
    several = rows > walkers
    pieces = ceil_div(plan.width, vector)
    lanes = min(MAX_THREADS if several else MAX_THREADS // 2, power_of_two(pieces))
    chunks = ceil_div(pieces, lanes)
    groups = max(1, 256 // lanes)
    depth = 2 if rows > walkers * groups else 1
    return RowLoopSchedule(
        lanes, vector, chunks, groups, depth, 0, True, walkers, 1, True,
        dependent_launch=dependent_launch,
    )  # fmt: skip


def _floor_power(n: int) -> int:
    """The largest power of two that is at most n; 1 if n is below 1."""
    return 1 << max(0, n.bit_length() - 1) if n > 0 else 1


def _bulk(plan: RowLoopPlan) -> bool:
    """True if bulk loads can bring the tiles: all addresses and sizes are multiples of 16 bytes,
    and every block has some of a row."""
    if (plan.parts - 1) * plan.width >= plan.length:
        return False
    for i in plan.streamed:
        view = plan.loads[i]
        size = plan.itemsize(view)
        strides = [
            s * size for d, s in zip(view.labels, view.strides, strict=True) if d != plan.column
        ]
        whole = plan.length * size % BULK == 0
        if view.stride(plan.column) != 1 or not whole or any(s % BULK for s in strides):
            return False
    return all(plan.itemsize(plan.loads[i]) in (4, 8) for i in plan.scalars)


def _shared_percent(plan: RowLoopPlan, target: Target) -> int:
    """Percentage of shared memory for the blocks that share an SM; 0 if a block has an SM to
    itself.

    Without the hint the driver gives shared memory for one block. It is no more than they need:
    loads that bypass shared memory, and vectors that are read for every row, go through the rest.
    """
    s = plan.schedule
    if s.resident == 1:
        return 0
    blocks = s.resident if s.blocks else min(target.sm_blocks, target.sm_threads // plan.threads)
    wanted = 100 * blocks * (plan.shared_bytes + target.reserved_bytes)
    return min(100, ceil_div(wanted, target.sm_shared_bytes))


def _common_vector(plan: RowLoopPlan, vector: int) -> int:
    """Elements that every access along a row may take at a time."""
    views = [*plan.loads.values(), *plan.stores.values()]
    for v in views:
        if plan.column not in v.labels:
            continue
        if v.stride(plan.column) != 1:
            return 1
        for s in (*(s for s in v.strides if s != 1), plan.length, plan.width):
            while s % vector:
                vector //= 2
    return vector


def _check_schedule(plan: RowLoopPlan, target: Target, where: str) -> None:
    s = plan.schedule
    if any(n < 1 or n & (n - 1) for n in (s.lanes, s.vector, s.groups, s.depth)) or s.chunks < 1:
        raise ScheduleError(
            f"{where}: {s.lanes} lanes, vectors of {s.vector}, {s.groups} groups, "
            f"{s.depth} rows each, {s.chunks} chunks: powers of two, but the last"
        )
    if plan.threads % WARP or plan.threads > 1024:
        raise ScheduleError(
            f"{where}: {s.groups} groups of {s.lanes} lanes; a block has whole "
            "warps and at most 1024 threads"
        )
    if s.lanes < min(WARP, plan.cluster):
        raise ScheduleError(
            f"{where}: {s.lanes} lanes; each sends to one of {plan.cluster} blocks of the cluster"
        )
    if plan.sums and s.lanes < 4:
        raise ScheduleError(f"{where}: {s.lanes} lanes; sums over rows need 4")
    if plan.length % s.vector or plan.width % s.vector:
        raise ScheduleError(
            f"{where}: accesses of {s.vector} elements, and parts of "
            f"{plan.width} of rows of {plan.length}"
        )
    if plan.covered < plan.width:
        raise ScheduleError(
            f"{where}: {s.lanes} lanes of {s.vector * s.chunks} elements do not "
            f"cover the {plan.width} of a row"
        )
    if s.resident not in (1, 2, 3) or s.resident * s.lanes * s.groups > 1024:
        raise ScheduleError(
            f"{where}: {s.resident} blocks of {s.lanes * s.groups} threads on an "
            "SM; one to three, of at most 1024 threads together"
        )
    if s.resident * (plan.shared_bytes + target.reserved_bytes) > target.sm_shared_bytes:
        raise ScheduleError(
            f"{where}: {plan.shared_bytes} bytes of shared memory; the device has "
            f"{target.shared_bytes}"
        )
    if s.stages and not _bulk(plan):
        raise ScheduleError(
            f"{where}: parts of rows do not all begin and end at multiples of "
            f"{BULK} bytes, so they cannot come through a ring; use stages=0"
        )
    if s.sliced and not s.blocks:
        raise ScheduleError(f"{where}: sliced=True, and no blocks to have the slices")
    if s.sliced and (why := _unsliced(plan)):
        raise ScheduleError(f"{where}: sliced=True, but {why}")
    if s.kept and s.vector * s.chunks * s.depth > MAX_HELD:
        raise ScheduleError(
            f"{where}: {s.depth} rows with {s.vector * s.chunks} elements each do "
            f"not fit into the registers of a thread; at most {MAX_HELD}"
        )
    if not s.stages and not s.kept:
        raise ScheduleError(f"{where}: without a ring a tile is kept in registers")
    if plan.meets and plan.grid_blocks > plan.cluster * target.clusters.get(plan.cluster, 0):
        raise ScheduleError(
            f"{where}: {plan.grid_blocks} blocks meet, in clusters of {plan.cluster}, but at most "
            f"{target.clusters.get(plan.cluster, 0)} of these run at once; give the grid fewer"
        )


def _unsliced(plan: RowLoopPlan) -> str | None:
    """Reason why blocks must meet to complete sums over rows, or None."""
    if not plan.sums:
        return "nothing is summed over rows"
    if plan.parts > 1:
        return "rows are divided among blocks"
    if set(plan.kept_outer) != set(plan.outer):
        return "a sum is over labels of which a block has one element"
    if not all(plan.has_columns(s) for s in plan.sums):
        return "a value of each row is summed, for which a block needs whole rows"
    if any(level.sums for level in plan.levels[1:]):
        return "what is summed needs a reduction along the row"
    if plan.units * ceil_div(plan.length, plan.slice_columns) > plan.grid_blocks:
        return "there are more slices than blocks"
    if plan.slice_columns > plan.threads * plan.schedule.vector:
        return f"{plan.threads} threads do not hold slices of {plan.slice_columns} columns"
    if plan.schedule.stages:
        return "slices are read straight to registers; use stages=0"
    return None


def _retiled(plan: RowLoopPlan) -> BlockProgram:
    """The program with the tiles that the kernel really uses."""
    program = plan.program
    tile = dict(program.tile)
    left = plan.tile_rows
    for d in reversed(plan.rows):
        dim = program.dims[d]
        tile[d] = left if isinstance(dim, Symbol) or d == plan.rows[0] else min(left, extent(dim))
        left = max(1, left // tile[d])
    axes: list[Axis] = []
    for a in program.axes:
        if a.dim in plan.rows and a.extent is not None:
            others = prod(b.extent or 1 for b in program.axes_of(a.dim) if b is not a)
            open_grid = a.kind == AxisKind.GRID and not plan.sums
            if a.kind == AxisKind.PERSISTENT or open_grid:
                a = replace(a, extent=ceil_div(extent(program.dims[a.dim]), others * tile[a.dim]))
        axes.append(a)
    return replace(program, axes=tuple(axes), tile=tile)
