"""Plans of the matmul loop: roles, a schedule if none is given, and checks that it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import KernelStep, TensorSpec
from cutesuper.ir.dims import extent
from cutesuper.skeletons.base import View, arguments_of
from cutesuper.skeletons.matmul.plan import CHUNK, COLUMN_BLOCK, ROW_TILES, MatmulPlan
from cutesuper.skeletons.matmul.roles import Roles
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.matmul.shift import MAX_SHIFTED_ROWS
from cutesuper.skeletons.matmul.tiles import check_tiles, with_tiles
from cutesuper.skeletons.operands import check_element_type, check_same_type, unaligned
from cutesuper.targets import Target


def plan_matmul(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: MatmulSchedule | None = None,
    dependent_launch: bool = False,
) -> MatmulPlan:
    """Fit a block program with matrix products into the matmul loop.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
        ScheduleError: it does not fit into the target's shared memory or registers.
    """
    if why := target.refuses_products():
        raise LoweringError(f"kernel {step.name}: {why}")
    roles = Roles(step, arguments_of(step, tensors))
    plan = roles.plan(schedule or MatmulSchedule(stages=1))
    _check_limits(plan, step.name)
    if schedule is None:
        plan = replace(plan, schedule=_default_schedule(plan, target, dependent_launch))
    if plan.registers is not None and plan.schedule.warpgroups != 2:
        raise ScheduleError(
            f"kernel {step.name}: {plan.tile[0]}x{plan.tile[1]} accumulators need two consumer "
            "warpgroups, which share out blocks of 64 columns; use a tile with an even number of "
            f"them (it has {' and '.join(map(str, plan.shared_blocks))})"
        )
    check_tiles(plan, step.name)
    odd = [b for b in plan.shared_blocks if b % plan.schedule.warpgroups]
    if odd:
        raise ScheduleError(
            f"kernel {step.name}: {odd[0]} block(s) of 64 columns cannot be shared out over "
            f"{plan.schedule.warpgroups} consumer warpgroups"
        )
    if plan.shared_bytes > target.shared_bytes or plan.schedule.stages < 2:
        raise ScheduleError(
            f"kernel {step.name}: {plan.schedule.stages} stages of {plan.slot_bytes} bytes and "
            f"{plan.exchange_bytes} bytes of exchange do not fit into {target.shared_bytes} bytes "
            "of shared memory; use smaller tiles"
        )
    return plan


def _default_schedule(plan: MatmulPlan, target: Target, dependent_launch: bool) -> MatmulSchedule:
    # accumulators: m * n / 128 registers per thread and warpgroup for each product
    even = all(b % 2 == 0 for b in plan.shared_blocks)
    warpgroups = 2 if plan.accumulators // 128 > 64 and even else 1
    tiled = MatmulSchedule(0, warpgroups, dependent_launch=dependent_launch)
    tiled = with_tiles(plan, tiled, target)
    probe = replace(plan, schedule=tiled)
    room = target.shared_bytes - probe.shared_bytes
    stages = min(room // plan.slot_bytes, max(2, plan.iterations))
    if not dependent_launch and stages < plan.iterations:
        # more in flight only lengthens the queue in which the activations wait: on 16x4096x4096 6
        # stages of 20 KB take 10.35 us, 8 take 10.6, 9 take 10.75
        stages = min(stages, max(4, 120 * 1024 // plan.stage_bytes))
    persistent = tiled.persistent if plan.iterations > stages else 0
    return replace(tiled, stages=stages, head=min(4, stages), persistent=persistent)


def _check_limits(plan: MatmulPlan, name: str) -> None:
    m, n, k = plan.tile
    where = f"kernel {name}"
    check_element_type(where, plan.dtype)
    if m not in ROW_TILES or n % COLUMN_BLOCK or k % CHUNK:
        raise ScheduleError(
            f"{where}: tile {plan.row}={m} {plan.column}={n} {plan.contracted}={k}; rows must be "
            f"one of {ROW_TILES}, columns and depth multiples of {COLUMN_BLOCK}"
        )
    if plan.shift is not None and m > MAX_SHIFTED_ROWS:
        raise ScheduleError(
            f"{where}: tile {plan.row}={m}: rows that are shifted next to zero come in tiles of at "
            f"most {MAX_SHIFTED_ROWS}"
        )
    if plan.accumulators > 2 * 128 * 128:
        raise ScheduleError(
            f"{where}: {plan.accumulators} accumulators ({m}x{n} for each of "
            f"{len(plan.finals)} result(s), and what the products after the loop "
            "take) do not fit into the registers of two warpgroups"
        )
    if (n // plan.cluster) % 8:
        raise ScheduleError(f"{where}: {n} columns cannot be shared out over {plan.cluster} blocks")
    tails = [t.view for t in plan.tails]
    staged = (*plan.rows.values(), *plan.columns.values(), *plan.vectors.values())
    for view in (*staged, *plan.hidden.values(), *tails):
        arg = plan.arguments[view.argument]
        check_same_type(where, plan.dtype, arg)
        odd = [s for s in view.strides if s != 1 and s % 8]
        if odd or (arg.shape and extent(arg.shape[-1]) % 8 and len(view.labels) > 1):
            raise unaligned(where, arg)
    _check_layout(where, plan.columns.values(), plan.column, plan.contracted)
    for t in plan.tails:
        inner = [plan.hidden[load] for load, _ in t.products]
        _check_layout(where, inner, t.hidden, plan.contracted)
        _check_layout(where, [t.view], plan.column, t.hidden)
    for i, view in plan.rows.items():
        if view.stride(plan.contracted) != 1:
            arg = plan.arguments[view.argument]
            raise LoweringError(
                f"{where}: row operand {arg.name} (operation {i}) must be contiguous along "
                f"{plan.contracted}"
            )


def _check_layout(where: str, views: Iterable[View], column: str, contracted: str) -> None:
    """Check that column operands that share an instruction are stored in the same order."""
    strides = {(v.stride(column) == 1, v.stride(contracted) == 1) for v in views}
    if len(strides) > 1 or (False, False) in strides:
        raise LoweringError(
            f"{where}: the column operands must all be contiguous along {column}, or all along "
            f"{contracted}"
        )
