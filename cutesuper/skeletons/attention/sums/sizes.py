"""Extents for attention loops with plain sums, and the schedules that they begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from cutesuper.ir.block import Axis, BlockProgram, KernelStep
from cutesuper.ir.dims import Symbol, ceil_div
from cutesuper.skeletons.attention.plan import ROW_BLOCK
from cutesuper.skeletons.attention.sizes import priced
from cutesuper.skeletons.attention.sums.cost import price
from cutesuper.skeletons.attention.sums.plan import LOOP_TILES, SumsPlan, exceeded
from cutesuper.skeletons.attention.sums.roles import recognized_sums
from cutesuper.skeletons.cost import Setting, Sized
from cutesuper.targets import Target

#: most stages of the ring: more are never full
MOST_STAGES = 4


def sums_sizes(structure: BlockProgram, setting: Setting, pruned: Counter[str]) -> list[Sized]:
    """The sizes whose plans the target can run, with the price of each.

    Args:
        structure: a block program of the form, with any extents.
        setting: the target and the tensors.
        pruned: counts rejected sizes, by reason.

    Raises:
        LoweringError: the loop cannot run the structure, whatever its sizes.
    """
    target = setting.target
    known = recognized_sums(KernelStep("k0", structure), setting)
    plans = (scheduled_sums(size, target) for size in _candidates(known))
    return priced(
        structure, plans, partial(exceeded, target=target), partial(price, target=target), pruned
    )


def _candidates(known: SumsPlan) -> Iterator[SumsPlan]:
    for groups in (1, 2):
        for tile in LOOP_TILES:
            yield resized(known, ROW_BLOCK * groups, tile)


def resized(plan: SumsPlan, rows: int, tile: int) -> SumsPlan:
    """The plan with tiles of rows and of the loop."""
    program = plan.program
    held = {d: n for d, n in program.dims.items() if not program.axes_of(d)}
    tiles = dict.fromkeys(program.dims, 1) | {plan.rows: rows, plan.loop: tile}
    tiles |= {d: n for d, n in held.items() if isinstance(n, int)}

    def sized(a: Axis) -> Axis:
        dim = program.dims[a.dim]
        return replace(a, extent=None if isinstance(dim, Symbol) else ceil_div(dim, tiles[a.dim]))

    axes = tuple(map(sized, program.axes))
    return replace(plan, program=replace(program, axes=axes, tile=tiles))


def scheduled_sums(plan: SumsPlan, target: Target) -> SumsPlan:
    """The plan with its default schedule of warpgroups, stages and scores ahead.
    Warpgroups for its rows, the stages that there is room for, and the next tile's scores ahead if
    their registers allow it."""
    groups = ceil_div(plan.program.tile[plan.rows], ROW_BLOCK)
    one = replace(plan, schedule=replace(plan.schedule, row_groups=groups, stages=1))
    room = (target.shared_bytes - one.shared_bytes) // one.stage_bytes + 1
    stages = max(1, min(room, MOST_STAGES))
    for ahead in (True, False):
        found = replace(one, schedule=replace(one.schedule, stages=stages, overlapped=ahead))
        if exceeded(found, target) is None:
            return found
    return found
