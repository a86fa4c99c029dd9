"""Plans of the attention loop: roles once for a structure, then a schedule and limits by size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.attention.plan import MAX_WIDTH, ROW_BLOCK, AttentionPlan
from cutesuper.skeletons.attention.roles import AttentionRoles
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.base import Pages, View, arguments_of
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.operands import check_element_type, check_same_type, unaligned
from cutesuper.targets import Target

#: rows of a WGMMA instruction that one warp has
INSTRUCTION_WARP_ROWS = 16
#: elements of the inner label up to which two blocks share an SM
SHARED_DEPTH = 128
#: keys of a stage
KEY_TILES = (64, 128)
#: bytes of the pieces that TMA (bulk tensor loads) moves
PIECE_BYTES = 16
#: dimensions of a TMA copy
MAX_RANK = 5
#: positions of a page that TMA supports
PAGE_SIZES = (16, 32, 64, 128, 256)
#: registers of a thread, and those that addresses and counters take
THREAD_REGISTERS, OTHER_REGISTERS = 255, 40


def plan_attention(
    step: KernelStep, setting: Setting, schedule: AttentionSchedule | None = None
) -> AttentionPlan:
    """Fit a block program with two chained products into the attention loop.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
        ScheduleError: it does not fit into the target's shared memory or registers.
    """
    target = setting.target
    if why := target.refuses_products():
        raise LoweringError(f"kernel {step.name}: {why}")
    plan = recognized(step, setting)
    plan = scheduled(plan, target) if schedule is None else replace(plan, schedule=schedule)
    if limit := refusal(plan, target):
        raise limit.raised(step.name)
    return plan


def recognized(step: KernelStep, setting: Setting) -> AttentionPlan:
    """The roles of a kernel's operations, which do not depend on its extents, as a plan without a
    schedule. Raises LoweringError for a structure that this skeleton cannot run."""
    roles = AttentionRoles(step, arguments_of(step, setting.tensors))
    plan = roles.plan(AttentionSchedule(2, dependent_launch=setting.dependent_launch))
    _check_operands(plan, f"kernel {step.name}")
    return plan


# ------------------------------------------------------------------------------------ the schedule


def scheduled(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with its default schedule: two warpgroups, along the rows if these are over 64, else
    along the keys."""
    row_groups = ceil_div(plan.block_rows, ROW_BLOCK)
    key_groups = 2 if row_groups == 1 and plan.loop > 1 else 1
    few = plan.block_rows <= INSTRUCTION_WARP_ROWS
    schedule = replace(
        plan.schedule,
        row_groups=row_groups,
        key_groups=key_groups,
        # 6.6 -> 6.4 us even with two tiles for each warpgroup (256x4096 keys in clusters of 8);
        # with few rows it only costs registers, and with values of keys it gains nothing
        overlapped=not few and plan.loop > key_groups and not plan.key_values,
        # 8.8 -> 8.35 us at 1x4096 keys; if many rows share keys these come from L2 anyway
        stream_keys=few,
    )
    if few and plan.cluster == 1 and plan.program.blocks() > target.sms:
        # with one consumer warpgroup and 2 stages two blocks share an SM: 120.8 us at 32x4096
        # keys, 121.3 with one block of two warpgroups
        half = replace(plan, schedule=replace(schedule, key_groups=1, stages=2, resident=2))
        if half.shared_bytes <= _room(target, 2) and plan.depth <= SHARED_DEPTH:
            return half
    return _with_stages(replace(plan, schedule=schedule), target)


def _room(target: Target, resident: int) -> int:
    """Shared memory of a block of which ``resident`` share an SM."""
    return min(target.shared_bytes, target.sm_shared_bytes // resident - target.reserved_bytes)


def _with_stages(plan: AttentionPlan, target: Target) -> AttentionPlan:
    """The plan with the stages that there is room for."""
    groups = plan.schedule.key_groups
    room = (target.shared_bytes - plan.fixed_bytes) // plan.slot_bytes
    # 4 stages keep 128 KB in flight at 128 columns: 33.1 us at 8x4096, 33.3 with 6
    stages = min(room, max(2, plan.loop), 4)
    if groups > 1 and stages < groups:
        return _with_stages(replace(plan, schedule=replace(plan.schedule, key_groups=1)), target)
    stages = max(1, stages // groups * groups)
    return replace(plan, schedule=replace(plan.schedule, stages=stages))


# ------------------------------------------------------------------------------- the operands


def _check_operands(plan: AttentionPlan, where: str) -> None:
    check_element_type(where, plan.dtype)
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
    if any(s != 1 and s * plan.element_bytes % PIECE_BYTES for s in view.strides):
        raise unaligned(where, arg)


# --------------------------------------------------------------------------------------- limits


@dataclass(frozen=True)
class Refusal:
    """A limit that a plan breaks.

    Attributes:
        reason: for counting sizes that were left out.
        message: what is wrong with this plan, and what to do.
        error: raised when the kernel is planned.
    """

    reason: str
    message: str
    error: type[LoweringError | ScheduleError] = ScheduleError

    def raised(self, name: str) -> LoweringError | ScheduleError:
        """The error for a kernel of this name."""
        return self.error(f"kernel {name}: {self.message}")


def refusal(plan: AttentionPlan, target: Target) -> Refusal | None:
    """The first limit that a plan breaks; None if there is a kernel for it."""
    return next((found for limit in LIMITS if (found := limit(plan, target))), None)


def _held_whole(plan: AttentionPlan, _: Target) -> Refusal | None:
    for label in (plan.inner, plan.columns):
        whole = plan.extent(label)
        if plan.tile(label) < whole or whole > MAX_WIDTH:
            return Refusal(
                "an inner label or columns that a block cannot hold whole",
                f"tile {label}={plan.tile(label)} of {whole}; a block holds it whole, at most "
                f"{MAX_WIDTH}",
            )
    return None


def _same_lengths(plan: AttentionPlan, _: Target) -> Refusal | None:
    for mask in plan.masks:
        if mask.lengths is not None and not set(mask.lengths.labels).isdisjoint(plan.rows):
            return Refusal(
                "lengths that differ between the rows of a tile",
                "the attention loop cannot run this program: lengths differ between the rows of a "
                f"tile; let {plan.rows[0]} have a tile of 1",
                LoweringError,
            )
    return None


def _warpgroups(plan: AttentionPlan, _: Target) -> Refusal | None:
    s = plan.schedule
    groups = s.row_groups, s.key_groups
    if groups in ((1, 1), (1, 2), (2, 1)) and s.resident in (1, 2):
        return None
    return Refusal(
        "more than two warpgroups",
        f"{groups[0]} x {groups[1]} consumer warpgroups in {s.resident} block(s) of an SM; one or "
        "two are possible",
    )


def _row_tile(plan: AttentionPlan, _: Target) -> Refusal | None:
    groups = plan.schedule.row_groups
    if plan.tile(plan.rows[0]) % groups == 0 and plan.group_rows <= ROW_BLOCK:
        return None
    return Refusal(
        "rows that warpgroups cannot share",
        f"a tile of {' x '.join(str(plan.tile(d)) for d in plan.rows)} rows for {groups} "
        f"warpgroup(s) of at most {ROW_BLOCK} rows",
    )


def _key_tile(plan: AttentionPlan, _: Target) -> Refusal | None:
    if plan.key_tile in KEY_TILES:
        return None
    return Refusal(
        "tiles of keys without an instruction",
        f"tile {plan.keys}={plan.key_tile}; must be {' or '.join(map(str, KEY_TILES))}",
    )


def _ring(plan: AttentionPlan, _: Target) -> Refusal | None:
    s = plan.schedule
    if s.stages >= plan.least_stages and s.stages % s.key_groups == 0:
        return None
    return Refusal(
        "rings that stand still",
        f"{s.stages} stages for {s.key_groups} warpgroups along the keys, which take them in turn; "
        f"use a multiple, at least {plan.least_stages}",
    )


def _memory(plan: AttentionPlan, target: Target) -> Refusal | None:
    room = _room(target, plan.schedule.resident)
    if plan.shared_bytes <= room:
        return None
    return Refusal(
        "stages exceed the shared memory",
        f"{plan.schedule.stages} stages of {plan.stage_bytes} bytes, {plan.query_bytes} bytes of "
        f"rows and {plan.meeting_bytes + plan.exchange_bytes} bytes of exchange do not fit into "
        f"{room} bytes of shared memory; use smaller tiles",
    )


def _registers(plan: AttentionPlan, target: Target) -> Refusal | None:
    resident = plan.schedule.resident
    limit = min(THREAD_REGISTERS, target.registers // (plan.threads * resident))
    if plan.registers is not None:
        limit = plan.registers[0]
    if plan.live_registers <= limit - OTHER_REGISTERS:
        return None
    return Refusal(
        "accumulators exceed the registers",
        f"{plan.live_registers} of {limit} registers for the products of a thread, and "
        f"{plan.threads} threads in {resident} block(s) of an SM; use a tile of 64 keys",
    )


LIMITS: tuple[Callable[[AttentionPlan, Target], Refusal | None], ...] = (
    _held_whole, _same_lengths, _warpgroups, _row_tile, _key_tile, _ring, _memory, _registers,
)  # fmt: skip
