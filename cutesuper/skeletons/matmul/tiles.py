"""Distribution of a matmul kernel's tiles: pairs of blocks that load together, walks over tiles.

A pair covers two neighbouring tiles along the columns. Both blocks take part in its loads, even one
whose tile lies outside of the tensor: grids are rounded up to whole pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutesuper.errors import ScheduleError
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.matmul.sharing import LARGE_TILE, rows_shared_by
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.plan import MatmulPlan

#: rows and columns of one bulk store: 128-byte rows, as the swizzle requires
STORE_ROWS, STORE_COLUMNS = 32, 64
#: pieces of a warpgroup in flight
STORE_BUFFERS = 2


# ----------------------------------------------------------------------------------------- choices


def with_tiles(plan: MatmulPlan, schedule: MatmulSchedule, target: Target) -> MatmulSchedule:
    """A schedule with the knobs of this module chosen; ``stages`` are not known yet.

    Pairs and walks load nothing before the dependency wait, so with ``dependent_launch`` only
    kernels with more tiles than multiprocessors use them: there only the first tiles wait.
    """
    m, n, _ = plan.tile
    dims = plan.program.dims
    if not can_bulk_store(plan):
        return schedule
    if m < LARGE_TILE or schedule.warpgroups < 2:
        return replace(schedule, bulk_store=True)
    columns = ceil_div(extent(dims[plan.column]), n)
    share = rows_shared_by(m, n, len(plan.products), columns)
    slots = share * target.clusters[share]
    tiles = share * ceil_div(columns, share) * ceil_div(extent(dims[plan.row]), m)
    for label in plan.batch:
        tiles *= extent(dims[label])
    walks = tiles > slots
    if schedule.dependent_launch and not walks:
        return replace(schedule, bulk_store=True)
    # 2 warps keep up with 64 rows: 209.0 us at 4096x4096x4096, 212.6 with 4; not with 128 rows
    # (215.3 and 212.3), nor with a prologue (339 and 273)
    few = plan.prologue is None and m // share <= 64
    return replace(
        schedule,
        share_rows=share,
        persistent=slots if walks else 0,
        helpers=2 if few else 4,
        bulk_store=True,
    )


# ------------------------------------------------------------------------------------ what follows


def store_bytes(plan: MatmulPlan) -> int:
    """Shared memory of the pieces on their way to memory, in bytes."""
    if not plan.schedule.bulk_store:
        return 0
    return 2 * STORE_ROWS * STORE_COLUMNS * STORE_BUFFERS * plan.schedule.warpgroups


def can_bulk_store(plan: MatmulPlan) -> bool:
    """True if all outputs can be written with bulk stores."""
    # a static extent of 1 would vanish from the tensor map
    rows = plan.tile[0] >= STORE_ROWS and plan.program.dims[plan.row] != 1
    return stands_alone(plan) and rows and stored_in_pieces(plan)


def stored_in_pieces(plan: MatmulPlan) -> bool:
    """True if all outputs with columns are 16-bit rows of whole 16-byte pieces."""
    views = [o.view for o in plan.outputs if plan.column in o.view.labels]
    contiguous = all(v.stride(plan.column) == 1 for v in views)
    narrow = all(plan.arguments[v.argument].dtype in ("float16", "bfloat16") for v in views)
    whole = plan.program.dims[plan.column] % 8 == 0  # type: ignore[operator]
    return contiguous and narrow and whole


def stands_alone(plan: MatmulPlan) -> bool:
    """True if a block finishes its tile by itself, from the loop's accumulators."""
    beside = plan.tails or plan.reductions or plan.vector_rows or plan.shift is not None
    return plan.cluster_size == 1 and not beside


def tile_grid(plan: MatmulPlan, columns: int, rows: int, batch: int) -> tuple[int, int, int]:
    """The launch grid for ``columns`` x ``rows`` tiles of each slice of the batch."""
    s = plan.schedule
    if s.persistent:
        return s.persistent, 1, 1
    # `columns` may be a number of the traced launch, for which this division is right too
    pairs = (columns + s.share_rows - 1) // s.share_rows
    return s.share_rows * pairs * plan.cluster, rows, batch


def check_tiles(plan: MatmulPlan, name: str) -> None:
    """Raise ScheduleError if tiles cannot be shared, walked over or stored as demanded."""
    s, m = plan.schedule, plan.tile[0]
    where = f"kernel {name}"
    if not stands_alone(plan) and (s.share_rows > 1 or s.persistent):
        raise ScheduleError(
            f"{where}: share_rows={s.share_rows} and persistent={s.persistent} need tiles without "
            "clusters, products after the loop and reductions along the columns; use 1 and 0"
        )
    if s.share_rows not in (1, 2, 4, 8) or m % (8 * s.share_rows):
        raise ScheduleError(
            f"{where}: share_rows={s.share_rows}; use 1, 2, 4 or 8 blocks that load at least 8 of "
            f"the {m} rows each"
        )
    if s.persistent % s.share_rows:
        raise ScheduleError(
            f"{where}: persistent={s.persistent} blocks are no whole clusters of {s.share_rows}"
        )
    if s.persistent and plan.iterations <= s.stages:
        # only the ring keeps helpers and consumers one tile apart
        raise ScheduleError(
            f"{where}: persistent={s.persistent}: blocks that walk need more iterations than "
            f"stages, not {plan.iterations} and {s.stages}"
        )
    if s.helpers not in (2, 4):
        raise ScheduleError(f"{where}: {s.helpers} helper warps; use 2 or 4")
    if s.bulk_store and not can_bulk_store(plan):
        raise ScheduleError(
            f"{where}: bulk stores need outputs of 16-bit elements that are contiguous along "
            f"{plan.column} in multiples of 8, {STORE_ROWS} rows in a tile at least, no cluster, "
            "and nothing between the loop and the epilogue"
        )
