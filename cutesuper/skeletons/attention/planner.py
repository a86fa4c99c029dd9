"""Plans of the attention loop: roles, a schedule if none is given, and checks that it fits."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.attention.plan import ROW_BLOCK, AttentionPlan
from cutesuper.skeletons.attention.roles import AttentionRoles
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.base import Pages, View, arguments_of
from cutesuper.skeletons.operands import check_element_type, check_same_type, unaligned
from cutesuper.targets import Target

#: rows of a WGMMA instruction that one warp has
INSTRUCTION_WARP_ROWS = 16
#: most columns of the result, and most elements of the inner label
MAX_WIDTH = 256
#: dimensions of a TMA copy
MAX_RANK = 5
#: positions of a page that TMA (bulk tensor loads) supports
PAGE_SIZES = (16, 32, 64, 128, 256)
#: registers of a thread, and those that addresses and counters take
THREAD_REGISTERS, OTHER_REGISTERS = 255, 40


def plan_attention(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: AttentionSchedule | None = None,
    dependent_launch: bool = False,
) -> AttentionPlan:
    """Fit a block program with two chained products into the attention loop.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
        ScheduleError: it does not fit into the target's shared memory or registers.
    """
    if why := target.refuses_products():
        raise LoweringError(f"kernel {step.name}: {why}")
    roles = AttentionRoles(step, arguments_of(step, tensors))
    plan = roles.plan(schedule or AttentionSchedule(2, dependent_launch=dependent_launch))
    _check_operands(plan, step.name)
    if schedule is None:
        plan = replace(plan, schedule=_default_schedule(plan, target))
    _check_schedule(plan, target, step.name)
    return plan


def _default_schedule(plan: AttentionPlan, target: Target) -> AttentionSchedule:
    """Default schedule: two warpgroups, along the rows if these are over 64, else along the
    keys."""
    tiles = _tiles_of_a_block(plan)
    row_groups = ceil_div(prod(plan.tile(d) for d in plan.rows), ROW_BLOCK)
    key_groups = 2 if row_groups == 1 and tiles > 1 else 1
    few = plan.group_rows <= INSTRUCTION_WARP_ROWS
    start = replace(
        plan.schedule,
        row_groups=row_groups,
        key_groups=key_groups,
        # 6.6 -> 6.4 us even with two tiles for each warpgroup (256x4096 keys in clusters of 8);
        # with few rows it only costs registers, and with values of keys it gains nothing
        overlapped=not few and tiles > key_groups and not plan.key_values,
        # 8.8 -> 8.35 us at 1x4096 keys; if many rows share keys these come from L2 anyway
        stream_keys=few,
    )
    if few and plan.cluster == 1 and plan.program.blocks() > target.sms:
        # with one consumer warpgroup and 2 stages two blocks share an SM: 120.8 us at 32x4096
        # keys, 121.3 with one block of two warpgroups
        half = replace(plan, schedule=replace(start, key_groups=1, stages=2, resident=2))
        if half.shared_bytes <= _room(target, 2) and plan.depth <= 128:
            return half.schedule
    return _with_stages(plan, start, target, tiles)


def _room(target: Target, resident: int) -> int:
    """Shared memory of a block of which ``resident`` share an SM."""
    return min(target.shared_bytes, target.sm_shared_bytes // resident - target.reserved_bytes)


def _with_stages(
    plan: AttentionPlan, schedule: AttentionSchedule, target: Target, tiles: int
) -> AttentionSchedule:
    groups = schedule.key_groups
    none, one = (replace(plan, schedule=replace(schedule, stages=n)).shared_bytes for n in (0, 1))
    room = (target.shared_bytes - none) // (one - none)
    # 4 stages keep 128 KB in flight at 128 columns: 33.1 us at 8x4096, 33.3 with 6
    stages = min(room, max(2, tiles), 4)
    if stages < 2 and groups > 1:
        return _with_stages(plan, replace(schedule, key_groups=1), target, tiles)
    found = replace(schedule, stages=max(1, stages // groups * groups))
    if found.stages < replace(plan, schedule=found).least_stages:
        return replace(found, overlapped=False)
    return found


def _tiles_of_a_block(plan: AttentionPlan) -> int:
    """Number of tiles of keys that a block walks over, if all keys are visible."""
    return ceil_div(plan.key_extent, plan.key_tile * plan.parts)


def _check_operands(plan: AttentionPlan, name: str) -> None:
    where = f"kernel {name}"
    check_element_type(where, plan.dtype)
    for label in (plan.inner, plan.columns):
        whole = extent(plan.program.dims[label])
        if plan.tile(label) < whole or whole > MAX_WIDTH:
            raise ScheduleError(
                f"{where}: tile {label}={plan.tile(label)} of {whole}; a block holds it whole, at "
                f"most {MAX_WIDTH}"
            )
    for i, op in enumerate(plan.program.ops):
        if "table" in op.attributes:
            _check_pages(plan, where, i)
    matrices = {
        plan.row_load: (plan.inner,),
        plan.key_load: (plan.inner, plan.keys),
        plan.value_load: (plan.columns, plan.keys),
    }
    for load, contiguous in matrices.items():
        _check_matrix(plan, where, plan.view(load), contiguous)
    for i, view in plan.vectors.items():
        if view.labels != (plan.inner,):
            raise LoweringError(
                f"{where}: operation {i} is multiplied with the rows and has the "
                f"labels {', '.join(view.labels)}; only {plan.inner} is possible"
            )
        check_same_type(where, plan.dtype, plan.arguments[view.argument])
    for output in plan.outputs:
        _check_output(plan, where, output.view)


def _check_output(plan: AttentionPlan, where: str, view: View) -> None:
    arg = plan.arguments[view.argument]
    if view.stride(plan.columns) != 1:
        raise LoweringError(
            f"{where}: {arg.name}{list(map(str, arg.shape))} is stored, and not contiguous along "
            f"{plan.columns}; only results with this label, in this order, can be"
        )


def _check_pages(plan: AttentionPlan, where: str, load: int) -> None:
    """Refuse pages of operands other than keys and values, and pages that no TMA load supports."""
    view = plan.view(load)
    assert isinstance(view, Pages)
    cache, table = plan.arguments[view.argument], plan.arguments[view.table]
    what = f"{where}: {cache.name}{list(map(str, cache.shape))} through the table {table.name}"
    if load not in (plan.key_load, plan.value_load) or view.positions != plan.keys:
        raise LoweringError(
            f"{what}: only keys and values are read through a table, along "
            f"{plan.keys}; gather the pages before"
        )
    if view.sequences not in (None, *plan.batch):
        raise LoweringError(
            f"{what}: {view.sequences} is no label of the batch; gather the pages before"
        )
    if view.size not in PAGE_SIZES:
        raise LoweringError(
            f"{what}: pages of {view.size} positions; use "
            f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]}"
        )
    if len(view.labels) >= MAX_RANK:
        raise LoweringError(
            f"{what}: a cache of pages has at most {MAX_RANK} dimensions longer "
            f"than 1, this one {len(view.labels) + 1}; merge those of the heads"
        )


def _check_matrix(plan: AttentionPlan, where: str, view: View, contiguous: tuple[str, ...]) -> None:
    arg = plan.arguments[view.argument]
    shape = f"{arg.name}{list(map(str, arg.shape))}"
    check_same_type(where, plan.dtype, arg)
    if len(view.labels) > MAX_RANK:
        raise LoweringError(
            f"{where}: {shape} has {len(view.labels)} labels, and bulk tensor "
            f"copies {MAX_RANK} dimensions; merge some"
        )
    if not any(view.stride(d) == 1 for d in contiguous):
        raise LoweringError(f"{where}: {shape} must be contiguous along {' or '.join(contiguous)}")
    if any(s != 1 and s % 8 for s in view.strides):
        raise unaligned(where, arg)


def _check_schedule(plan: AttentionPlan, target: Target, name: str) -> None:
    s, where = plan.schedule, f"kernel {name}"
    groups = s.row_groups, s.key_groups
    if groups not in ((1, 1), (1, 2), (2, 1)) or s.resident not in (1, 2):
        raise ScheduleError(
            f"{where}: {groups[0]} x {groups[1]} consumer warpgroups in "
            f"{s.resident} block(s) of an SM; one or two are possible"
        )
    if plan.tile(plan.rows[0]) % s.row_groups or plan.group_rows > ROW_BLOCK:
        raise ScheduleError(
            f"{where}: a tile of {' x '.join(str(plan.tile(d)) for d in plan.rows)} rows for "
            f"{s.row_groups} warpgroup(s) of at most {ROW_BLOCK} rows"
        )
    if plan.key_tile not in (64, 128):
        raise ScheduleError(f"{where}: tile {plan.keys}={plan.key_tile}; must be 64 or 128")
    if s.stages < plan.least_stages or s.stages % s.key_groups:
        raise ScheduleError(
            f"{where}: {s.stages} stages for {s.key_groups} warpgroups along the keys, which take "
            f"them in turn; use a multiple, at least {plan.least_stages}"
        )
    room = _room(target, s.resident)
    if plan.shared_bytes > room:
        raise ScheduleError(
            f"{where}: {s.stages} stages of {plan.stage_bytes} bytes, {plan.query_bytes} bytes of "
            f"rows and {plan.meeting_bytes + plan.exchange_bytes} bytes of exchange do not fit "
            f"into {room} bytes of shared memory; use smaller tiles"
        )
    limit = min(THREAD_REGISTERS, target.registers // (plan.threads * s.resident))
    if plan.registers is not None:
        limit = plan.registers[0]
    if plan.live_registers > limit - OTHER_REGISTERS:
        raise ScheduleError(
            f"{where}: {plan.live_registers} of {limit} registers for the products of a thread, "
            f"and {plan.threads} threads in {s.resident} block(s) of an SM; use a tile of 64 keys"
        )
