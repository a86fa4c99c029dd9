"""Plans of rows: the kernel for a program, its knobs, and the reasons for having neither.

`skeletons.rows.roles` finds the roles of the operations, `skeletons.rows.schedule` chooses knobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import ENDING, LOAD, STORE, Axis, AxisKind, BlockProgram, KernelStep
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.skeletons.base import Argument, Indexed, View, arguments_of, view_of
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.legality import refuse_index, refuse_many_rows
from cutesuper.skeletons.operands import check_symbols
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.roles import (
    check_views,
    find_roles,
    loop_column,
    row_label,
    walks,
    walks_one_way,
    with_row_reciprocals,
)
from cutesuper.skeletons.rows.schedule import (
    BULK,
    LARGE,
    MAX_HELD,
    MAX_LIVE,
    MAX_PER_THREAD,
    MAX_ROW,
    MAX_THREADS,
    WARP,
    RowLoopSchedule,
    RowSchedule,
    default_loop,
    default_rows,
)
from cutesuper.targets import Target


def plan_of(
    step: KernelStep, setting: Setting, schedule: RowSchedule | RowLoopSchedule | None = None
) -> RowPlan | RowLoopPlan:
    """Plan a row loop if the program or the schedule requires one, else a row kernel.

    Raises:
        LoweringError: the program has a structure that this skeleton cannot run.
        ScheduleError: the schedule does not fit the rows, the registers or the device.
    """
    if isinstance(schedule, RowLoopSchedule):
        return _scheduled(frame(step, setting), step, setting, schedule)
    if schedule is None and walks(step.program, setting.target):
        return _scheduled(frame(step, setting), step, setting, None)
    return plan_rows(step, setting, schedule)


def _views(
    program: BlockProgram, arguments: tuple[Argument, ...]
) -> tuple[dict[int, View], dict[int, View]]:
    """Views of the loads and of the stores, by operation."""
    loads = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == LOAD}
    stores = {i: view_of(o, arguments) for i, o in enumerate(program.ops) if o.kind == STORE}
    return loads, stores


# --------------------------------------------------------------------------------------- row loops


def frame(step: KernelStep, setting: Setting) -> RowLoopPlan:
    """The plan of a row loop before its knobs are chosen: the roles of the operations.
    They are the same at all extents of a structure. Raises LoweringError."""
    refuse_index(step)
    if any(op.facets.turns for op in step.program.ops):
        raise LoweringError(
            f"kernel {step.name}: a row loop moves no elements along a row, and sums up none"
        )
    program, where = step.program, f"kernel {step.name}"
    arguments = arguments_of(step, setting.tensors)
    column = loop_column(program, *_views(program, arguments), where)
    program = with_row_reciprocals(program, column, arguments)
    loads, stores = _views(program, arguments)
    roles = find_roles(program, column, where)
    refuse_many_rows(prod(extent(program.dims[d]) for d in (*roles.rows, *roles.outer)), where)
    check_views(program, arguments, roles, loads, stores, where)
    return RowLoopPlan(
        program, arguments, roles.column, roles.rows, roles.outer, loads, stores, roles.complete,
        roles.picked, roles.levels, roles.sums, RowLoopSchedule(1, 1, 1, 1),
    )  # fmt: skip


def resized(plan: RowLoopPlan, program: BlockProgram, setting: Setting) -> RowLoopPlan:
    """The plan for the extents of another program of the same structure.
    Raises LoweringError, ScheduleError."""
    program = replace(plan.program, axes=program.axes, tile=program.tile)
    return _scheduled(replace(plan, program=program), KernelStep("rows", program), setting, None)


def _scheduled(
    plan: RowLoopPlan, step: KernelStep, setting: Setting, schedule: RowLoopSchedule | None
) -> RowLoopPlan:
    """A frame with these knobs, or with those of its own choice."""
    target, where = setting.target, f"kernel {step.name}"
    plan = replace(plan, program=_with_part(plan))
    chosen = schedule or replace(
        default_loop(plan, target), dependent_launch=setting.dependent_launch
    )
    if schedule is None and chosen.kept and chosen.vector * chosen.chunks > MAX_HELD:
        raise LoweringError(
            f"{where}: rows of {plan.width} elements are longer than the "
            f"{chosen.lanes * MAX_HELD} that one block holds in registers; divide them over a "
            "cluster"
        )
    plan = replace(plan, schedule=chosen)
    if why := next(_loop_faults(plan, target), None):
        raise ScheduleError(f"{where}: {why}")
    return replace(plan, program=_retiled(plan), shared_percent=_shared_percent(plan, target))


def _with_part(plan: RowLoopPlan) -> BlockProgram:
    """The program with a block's part of the row: whole accesses of 8 elements if divided."""
    program, length, parts = plan.program, plan.length, plan.parts
    width = length if parts == 1 else 8 * ceil_div(ceil_div(length, parts), 8)
    return replace(program, tile=program.tile | {plan.column: width})


def _loop_faults(plan: RowLoopPlan, target: Target) -> Iterator[str]:
    """Reasons why no row loop can run with a plan's knobs, the first one first."""
    yield from _thread_faults(plan)
    yield from _reach_faults(plan)
    yield from _room_faults(plan, target)
    at_once = target.clusters.get(plan.cluster, 0)
    if plan.meets and not plan.alone and plan.grid_blocks > plan.cluster * at_once:
        yield (
            f"{plan.grid_blocks} blocks meet, in clusters of {plan.cluster}, but at most {at_once} "
            "of these run at once; give the grid fewer"
        )


def _thread_faults(plan: RowLoopPlan) -> Iterator[str]:
    """Numbers that are no powers of two, and lanes and groups that are no block."""
    s = plan.schedule
    if any(n < 1 or n & (n - 1) for n in (s.lanes, s.vector, s.groups, s.depth)) or s.chunks < 1:
        yield (
            f"{s.lanes} lanes, vectors of {s.vector}, {s.groups} groups, {s.depth} rows each, "
            f"{s.chunks} chunks: powers of two, but the last"
        )
    if plan.threads % WARP or plan.threads > MAX_THREADS:
        yield (
            f"{s.groups} groups of {s.lanes} lanes; a block has whole warps and at most "
            f"{MAX_THREADS} threads"
        )
    if s.lanes < min(WARP, plan.cluster):
        yield f"{s.lanes} lanes; each sends to one of {plan.cluster} blocks of the cluster"
    if plan.sums and s.lanes < 4:
        yield f"{s.lanes} lanes; sums over rows need 4"


def _reach_faults(plan: RowLoopPlan) -> Iterator[str]:
    """Accesses that do not divide a row, or do not cover it."""
    s = plan.schedule
    if plan.length % s.vector or plan.width % s.vector:
        yield (
            f"accesses of {s.vector} elements, and parts of {plan.width} of rows of {plan.length}"
        )
    if plan.covered < plan.width:
        yield (
            f"{s.lanes} lanes of {s.vector * s.chunks} elements do not cover the {plan.width} of a "
            "row"
        )


def _room_faults(plan: RowLoopPlan, target: Target) -> Iterator[str]:
    """Tiles that fit into no ring, no registers, or not beside other blocks."""
    s = plan.schedule
    if s.resident not in (1, 2, 3) or s.resident * plan.threads > MAX_THREADS:
        yield (
            f"{s.resident} blocks of {plan.threads} threads on an SM; one to three, of at most "
            f"{MAX_THREADS} threads together"
        )
    if not plan.fits(target):
        yield f"{plan.shared_bytes} bytes of shared memory; the device has {target.shared_bytes}"
    if s.stages and not plan.bulk:
        yield (
            f"parts of rows do not all begin and end at multiples of {BULK} bytes, so they cannot "
            "come through a ring; use stages=0"
        )
    if s.sliced and not s.blocks:
        yield "sliced=True, and no blocks to have the slices"
    if s.sliced and (why := plan.unsliced):
        yield f"sliced=True, but {why}"
    if s.kept and s.vector * s.chunks * s.depth > MAX_HELD:
        yield (
            f"{s.depth} rows with {s.vector * s.chunks} elements each do not fit into the "
            f"registers of a thread; at most {MAX_HELD}"
        )
    if not s.stages and not s.kept:
        yield "without a ring a tile is kept in registers"


def _shared_percent(plan: RowLoopPlan, target: Target) -> int:
    """Percentage of shared memory for the blocks that share an SM.
    0 if a block has an SM to itself.

    Without the hint the driver gives shared memory for one block. It is no more than they need:
    loads that bypass shared memory, and vectors that are read for every row, go through the rest.
    """
    s = plan.schedule
    if s.resident == 1:
        return 0
    blocks = s.resident if s.blocks else min(target.sm_blocks, target.sm_threads // plan.threads)
    wanted = 100 * blocks * (plan.shared_bytes + target.reserved_bytes)
    return min(100, ceil_div(wanted, target.sm_shared_bytes))


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


# ------------------------------------------------------------------------------------- row kernels


def plan_rows(step: KernelStep, setting: Setting, schedule: RowSchedule | None = None) -> RowPlan:
    """Plan a row kernel, with these knobs or with those of its own choice.
    Raises LoweringError, ScheduleError."""
    program, where = step.program, f"kernel {step.name}"
    _check_structure(program, where)
    arguments = arguments_of(step, setting.tensors)
    column = _column(program, *_views(program, arguments), where)
    program = with_row_reciprocals(program, column, arguments)
    loads, stores = _views(program, arguments)
    if any(isinstance(v, Indexed) for v in (*loads.values(), *stores.values())):
        check_symbols(arguments, where)
    reductions = tuple(i for i, o in enumerate(program.ops) if o.facets.reduces)
    rows = _row_order(program, [*loads.values(), *stores.values()], column)
    refuse_many_rows(prod(extent(program.dims[d]) for d in rows), where)
    plan = RowPlan(
        program, arguments, column, rows, loads, stores, reductions, (),
        RowSchedule(1, 1, 1, 1),
    )  # fmt: skip
    _check_positions(plan, where)
    one_way = walks_one_way(program.ops, bool(reductions))
    held = plan.length if plan.scans and not one_way else plan.part
    if (reductions or plan.scans) and schedule is None and held > MAX_ROW:
        raise LoweringError(
            f"{where}: rows of {held} elements are longer than the {MAX_ROW} that one block "
            "holds in registers"
        )
    chosen = schedule or replace(
        default_rows(plan, setting.target), dependent_launch=setting.dependent_launch
    )
    plan = replace(plan, schedule=chosen)
    if (schedule is not None or plan.turns or plan.scans) and (why := _row_fault(plan)):
        raise (LoweringError if schedule is None else ScheduleError)(f"{where}: {why}")
    program = _strips(plan)
    return replace(plan, program=program, order=_order(program, reductions, chosen))


def _row_fault(plan: RowPlan) -> str | None:
    """Reason why a given schedule is too narrow for the rows or too large for the registers."""
    s = plan.schedule
    held = s.vector * s.chunks
    large = plan.threads > MAX_THREADS // 2
    if plan.threads > MAX_THREADS or held * (1 + large) > MAX_PER_THREAD:
        return (
            f"{plan.threads} threads with {held} elements each do not fit into the registers; at "
            f"most {MAX_PER_THREAD} with {MAX_THREADS // 2} threads, half of that with more"
        )
    if plan.whole and plan.width < plan.part:
        return f"{s.lanes} lanes of {held} elements do not cover rows of {plan.part}"
    if plan.parted and plan.width > plan.part:
        return f"{s.lanes} lanes of {held} elements are more than parts of {plan.part}"
    if plan.scans and s.interleaved:
        return "interleaved=True, and the lanes of a row that is summed up are neighbours"
    return next((why for apart in plan.turns if (why := _turn_fault(plan, apart))), None)


def _turn_fault(plan: RowPlan, apart: int) -> str | None:
    """Reason why a given schedule does not move elements so far along a row."""
    s = plan.schedule
    if apart < s.vector:
        return None if s.vector % (2 * apart) == 0 and not s.interleaved else (
            f"elements that are {apart} apart change places within an access, and none has "
            f"{s.vector} elements"
        )  # fmt: skip
    aligned = plan.length % (2 * s.vector) == 0 and not s.interleaved and 2 * apart == plan.length
    moved = s.chunks % 2 == 0 and plan.width == plan.length
    if not (aligned and (moved or (s.chunks == 1 and s.lanes <= WARP))):
        return (
            f"halves of rows of {plan.length} change places within a thread or a warp: with one "
            f"chunk in at most {WARP} lanes, or an even number of chunks that cover the row"
        )
    return None


def _check_structure(program: BlockProgram, where: str) -> None:
    for i, op in enumerate(program.ops):
        if op.kind in (LOAD, STORE):
            continue
        if op.facets.contracts or op.kind in ENDING:
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) has no place in a row kernel, which holds "
                "whole rows"
            )
    kinds = {a.kind for a in program.axes} - {AxisKind.GRID}
    if kinds:
        raise LoweringError(f"{where}: a row kernel has grid axes only, not {', '.join(kinds)}")


def _check_positions(plan: RowPlan, where: str) -> None:
    """Refuse positions but those along rows that the grid divides."""
    for i, op in enumerate(plan.program.ops):
        if not op.facets.masks:
            continue
        along = op.attributes["columns"], op.attributes["rows"]
        if not plan.parted or along != (plan.column, None):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) depends on positions, which a row kernel "
                "knows along parts of rows only; add an input of 0 and -inf in its place"
            )


def _column(
    program: BlockProgram, loads: dict[int, View], stores: dict[int, View], where: str
) -> str:
    over = {o.attributes["over"] for o in program.ops if o.facets.reduces}
    over |= {o.attributes["along"] for o in program.ops if o.facets.turns}

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
    """All labels but the column.
    If tensors are strided along it, the label along which they are contiguous comes last, so that
    neighbouring rows are neighbours in memory."""
    rows = [d for d in program.dims if d != column]
    strided = [v for v in views if v.strided(column) and v.labels[-1] in rows]
    if strided:
        heaviest = max(strided, key=lambda v: prod(extent(program.dims[d]) for d in v.labels))
        rows.remove(heaviest.labels[-1])
        rows.append(heaviest.labels[-1])
    return tuple(rows)


def _order(
    program: BlockProgram, reductions: tuple[int, ...], schedule: RowSchedule
) -> tuple[int, ...]:
    """Order of loads and computations.
    All loads come first, so that they overlap, if those of an element-wise program fit. If they are
    more elements than a thread may hold of one, or registers are for two large blocks, reductions
    and their operands come first, then the rest, so that more blocks share an SM: LayerNorm of 4096
    elements needs 78 registers, with its vectors loaded first 118, and 6 blocks are 48 KB in flight
    where 4 are 32. (RMSNorm of 32768 elements spilled.)"""
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


def _strips(plan: RowPlan) -> BlockProgram:
    """The program with the tiles that the kernel really uses."""
    program = plan.program
    width = max(plan.width, plan.length) if plan.walked else plan.width
    tile = dict.fromkeys(plan.rows, 1) | {plan.column: width}
    left = plan.schedule.rows
    for d in reversed(plan.rows):  # blocks take neighbouring rows
        dim = program.dims[d]
        tile[d] = left if isinstance(dim, Symbol) else min(left, extent(dim))
        left = max(1, left // tile[d])
    tile = {d: tile[d] for d in program.dims}
    axes: list[Axis] = []
    for d, t in tile.items():
        dim = program.dims[d]
        if d == plan.column and plan.whole and not plan.parted:
            continue
        parts = None if isinstance(dim, Symbol) else ceil_div(extent(dim), t)
        axes.append(Axis(d, AxisKind.GRID, parts))
    return BlockProgram(program.dims, tuple(axes), tile, program.ops)
