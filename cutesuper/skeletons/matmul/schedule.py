"""The schedule (knobs) of a matmul-loop kernel, and its default values.

A pair covers two neighbouring tiles along the columns. Both blocks take part in its loads, even one
whose tile lies outside of the tensor: grids are rounded up to whole pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.ir.dims import ceil_div, extent
from cutesuper.skeletons.matmul.settings import SETTINGS
from cutesuper.skeletons.schedule import Schedule, Values
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.skeletons.matmul.plan import MatmulPlan

#: pieces of a warpgroup if they cost no stage of the ring; not measured
DEEP_PIECES = 4
#: most accumulators of a thread for which one consumer warpgroup is enough
ONE_WARPGROUP = 64


@dataclass(frozen=True)
class MatmulSchedule(Schedule):
    """Knobs of a matmul-loop kernel.

    Attributes:
        stages: slots of the shared-memory ring.
        warpgroups: consumer warpgroups; each owns every n-th block of 64 columns.
        head: stages the producer fills before the block's first barrier.
        stream_columns: read the column operands with the evict-first hint, and rows with
            evict-last: weights are read once and should not push activations out of L2 (0.3 us on
            16x4096x4096). Where several tiles of rows read them, neither has a hint.
        share_rows: neighbouring blocks along the columns that form a cluster and load the row
            tile, which they all need, together: each a part, multicast to all. With statistics of
            the stages 209.0 us at 4096x4096x4096 in pairs of blocks that walk, 215.3 alone. Sharing
            column tiles along the rows took 215.4, and leaves the statistics with every block.
        joint: two blocks that share rows keep a half of them each, and one instruction multiplies
            the columns of both by all rows: a block reads half of the row tile from its shared
            memory, and has room for more stages. Where the GPU does so (`Target.joint`); not
            measured, so nothing chooses it but `tune`.
        persistent: blocks that are launched and walk over the tiles; 0 launches a block for each
            tile. At 2048x4096x4096 109.0 us, 118.6 with a block for each tile: loads of the next
            tile hide the epilogue.
        hand_out: blocks that walk take the next tile that no other has, and not every n-th: those
            that wait for memory, or share a multiprocessor with another kernel, take fewer. Where
            the GPU hands tiles out (`Target.hands_out`); not measured, so nothing chooses it
            but `tune`.
        issuer: another warp issues all products, and consumers wait for the last of a tile only,
            not for every stage. Where accumulators are not their registers (`Target.accumulators`);
            not measured, so nothing chooses it but `tune`.
        helpers: warps that reduce row statistics or compute the row operand. With 2, the producer
            is in their warpgroup, and 384 threads instead of 512 keep 168 registers each.
        scales_columns: a vector by which the rows would be multiplied, ``(X * G) W``, multiplies
            the columns in its place, ``X (G W)``: consumers bring these to registers and multiply
            them there, while the products before are under way. Rows of many tiles need not be
            rewritten in shared memory, whose speed the products need.
        reduces_once: the statistics of a row are reduced by one block, from device memory, and not
            by every block that multiplies it, from its stages. All blocks meet once, so that
            they must all be resident.
        pieces: of each warpgroup in shared memory, on their way to it or to memory: one that comes
            waits for the one whose place it takes.
        bulk_store: tiles leave through bulk stores of pieces of 32 rows and 64 columns. At
            300x4096x4096 31.1 us, 32.9 through the ring; elsewhere equal. Blocks that walk need
            it, since their ring holds the next tile by then.
    """

    kind: ClassVar[str] = "matmul"
    knobs: ClassVar[dict[str, Values]] = {
        "stages": lambda s: (s.stages - 1, s.stages + 1, s.stages - 2, s.stages + 2),
        "warpgroups": lambda s: (3 - s.warpgroups,),
        "head": lambda s: (s.head - 2, s.head + 2),
        "share_rows": lambda s: (3 - s.share_rows,),
        "persistent": lambda s: (0,) if s.persistent else (),
        "helpers": lambda s: (6 - s.helpers,),
        "pieces": lambda s: (6 - s.pieces,),
    }

    stages: int
    warpgroups: int = 1
    head: int = 4
    stream_columns: bool = True
    share_rows: int = 1
    joint: bool = False
    persistent: int = 0
    hand_out: bool = False
    issuer: bool = False
    helpers: int = 4
    bulk_store: bool = False
    pieces: int = 2
    scales_columns: bool = False
    reduces_once: bool = False

    def settled(self, old: MatmulSchedule, knob: str) -> MatmulSchedule:
        """The schedule, adjusted: the producer fills no more stages ahead than there are."""
        return replace(self, head=min(self.head, self.stages)) if knob == "stages" else self

    def mistake(self, default: Any) -> str:
        """Check warpgroups and stages ahead; planning checks the rest."""
        if self.warpgroups not in (1, 2):
            return "there are one or two consumer warpgroups"
        if self.head > self.stages:
            return f"{self.head} of {self.stages} stages cannot be filled ahead"
        return ""


def default_schedule(plan: MatmulPlan, target: Target, dependent_launch: bool) -> MatmulSchedule:
    """The schedule that measurements favour, for a plan with any other schedule."""
    own = target.accumulators is None  # consumers' registers, and columns may come from them
    way = replace(plan.schedule, scales_columns=own and plan.can_scale_columns, reduces_once=False)
    plan = plan.scheduled(way)
    if not (own and plan.can_reduce_once):
        return _schedule(plan, target, dependent_launch)
    once = plan.scheduled(replace(way, reduces_once=True))
    schedule = _schedule(once, target, dependent_launch)
    if once.scheduled(schedule).meet_at_once(target):
        return schedule
    return _schedule(plan, target, dependent_launch)


def _schedule(plan: MatmulPlan, target: Target, dependent_launch: bool) -> MatmulSchedule:
    """The same for a plan whose schedule says how rows are scaled and reduced."""
    rows = extent(plan.program.dims[plan.row])
    even = all(b % 2 == 0 for b in plan.shared_blocks)
    warpgroups = 2 if plan.accumulators > 128 * ONE_WARPGROUP and even else 1
    schedule = MatmulSchedule(
        0,
        warpgroups,
        stream_columns=not plan.many_rows or rows <= plan.tile[0],
        helpers=_helpers(plan, 4),
        pieces=3 if plan.pieced else 2,
        bulk_store=plan.can_bulk_store,
        scales_columns=plan.schedule.scales_columns,
        reduces_once=plan.schedule.reduces_once,
        dependent_launch=dependent_launch,
    )
    tiled = _with_tiles(plan, schedule, target)
    most = (target.shared_bytes - plan.fixed_bytes(schedule)) // plan.slot_bytes
    # unless helper warps read it, the ring of blocks that walk may hold more than a tile
    free = tiled.persistent > 0 and not plan.reads_stages
    stages = min(most, max(2, plan.iterations * (1 + free)))
    ring = SETTINGS.choose(target, "ring", dependent_launch=dependent_launch, rows=rows)
    if ring["bytes"] and stages < plan.iterations:
        stages = min(stages, max(ring["stages"], ring["bytes"] // plan.stage_bytes))
    persistent = tiled.persistent if free or plan.iterations > stages else 0
    head = min(SETTINGS.choose(target, "ahead")["stages"], stages)
    left = target.shared_bytes - stages * plan.slot_bytes
    deep = plan.many_rows and plan.fixed_bytes(replace(schedule, pieces=DEEP_PIECES)) <= left
    return replace(
        tiled,
        stages=stages,
        head=head,
        persistent=persistent,
        pieces=DEEP_PIECES if deep else schedule.pieces,
    )


def _with_tiles(plan: MatmulPlan, schedule: MatmulSchedule, target: Target) -> MatmulSchedule:
    """A schedule with shared and walked tiles chosen.

    Pairs and walks load nothing before the dependency wait, so with ``dependent_launch`` only
    kernels with more tiles than multiprocessors use them: there only the first tiles wait.
    """
    m = plan.tile[0]
    dims = plan.program.dims
    stored = schedule.bulk_store or (plan.stands_alone and plan.element_bytes == 4)
    if not stored or not plan.many_rows or schedule.warpgroups < 2 or plan.copied:
        return schedule
    rest = ceil_div(extent(dims[plan.row]), m) * prod(extent(dims[d]) for d in plan.batch)
    alone = sum(p.column_tiles for p in plan.sections) * rest
    share = min(_shared(p, alone > target.sms, target) for p in plan.sections)
    slots = share * target.clusters[share]
    tiles = sum(share * ceil_div(p.column_tiles, share) for p in plan.sections) * rest
    walks = tiles > slots
    if schedule.dependent_launch and not walks:
        return schedule
    own = m // share  # rows that a block loads
    warps = SETTINGS.choose(target, "helpers", prologue=plan.rewrites_rows, rows=own)["warps"]
    return replace(
        schedule,
        share_rows=share,
        persistent=slots if walks else 0,
        helpers=_helpers(plan, warps),
    )


def _helpers(plan: MatmulPlan, warps: int) -> int:
    """Helper warps, ``warps`` where the instruction allows: see `MatmulPlan.instruction_rows`.
    Those that read device memory have a warpgroup together with the producer."""
    if plan.schedule.reduces_once:
        return 2
    rows = plan.tile[0]
    whole = rows <= 128 or rows % 16 == 0 or plan.rewrites_rows
    return warps if whole else 2


def _shared(plan: MatmulPlan, walks: bool, target: Target) -> int:
    """Number of neighbouring blocks that load a row tile together."""
    m, columns = plan.tile[0], plan.column_tiles
    reads = plan.element_bytes == 4 or plan.reads_stages
    found = SETTINGS.choose(
        target, "share", rows=m, reads=reads, walks=walks, accumulators=plan.accumulators
    )
    share = found["blocks"]
    empty = share * ceil_div(columns, share) - columns
    whole = m % (8 * share) == 0  # each loads whole blocks of 8 rows
    return share if whole and empty * found["full"] <= columns else 1
