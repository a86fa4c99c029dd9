"""Extents for structures of the attention loop.

before: ``softmax(Q K) V`` with the keys N divided by grid, cluster and loop; after, for one token,
32 query heads on 8 heads of K and V, and 4096 keys on an H200: tile M=4 N=64, ``B.grid(8)
N.cluster(8) N.loop(8)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

from cutesuper.errors import LoweringError
from cutesuper.ir.block import AxisKind, BlockProgram, KernelStep
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.skeletons.attention.cost import price
from cutesuper.skeletons.attention.plan import (
    KEY_TILES,
    ROW_BLOCK,
    AttentionPlan,
    exceeded,
)
from cutesuper.skeletons.attention.roles import recognized
from cutesuper.skeletons.attention.schedule import scheduled
from cutesuper.skeletons.base import Limit, Plan
from cutesuper.skeletons.cost import Cost, Setting, Sized
from cutesuper.targets import Target

#: rows of a block: those of one warpgroup, and of two
ROWS = (ROW_BLOCK, 2 * ROW_BLOCK)
#: blocks of a cluster that every GPU of the architecture can place
CLUSTERS = (2, 4, 8)
#: blocks beyond which the grid does not divide keys any further, in waves of the device
MOST_WAVES = 2
#: fewest stages of a loop that is worth a price: with one, nothing is loaded during a product
MIN_STAGES = 2

P = TypeVar("P", bound=Plan[Any])


def attention_sizes(structure: BlockProgram, setting: Setting, pruned: Counter[str]) -> list[Sized]:
    """The sizes whose plans the target can run, with the price of each.

    Args:
        structure: a block program of the form, with any extents.
        setting: the target and the tensors.
        pruned: counts rejected sizes, by reason.

    Raises:
        LoweringError: the attention loop cannot run the structure, whatever its sizes.
    """
    target = setting.target
    known = recognized(KernelStep("k0", structure), setting)
    plans = (scheduled(size, target) for size in _candidates(known, target))
    return priced(
        structure, plans, partial(_limit, target=target), partial(price, target=target), pruned
    )


def priced(
    structure: BlockProgram,
    plans: Iterable[P],
    limit_of: Callable[[P], Limit | None],
    price_of: Callable[[P], Cost],
    pruned: Counter[str],
) -> list[Sized]:
    """The sizes of the plans that exceed no limit, with their prices; others are counted.
    Raises LoweringError if none is left, and one of the limits is the structure's."""
    sized, refused = list[Sized](), list[Limit]()
    for plan in plans:
        limit = limit_of(plan)
        if limit is None:
            program = replace(structure, axes=plan.program.axes, tile=plan.program.tile)
            sized.append(Sized(program, price_of(plan)))
        else:
            pruned[limit.name] += 1
            refused.append(limit)
    illegal = [r for r in refused if r.error is LoweringError]
    if illegal and not sized:
        raise illegal[0].refused("k0")
    return sized


def _limit(plan: AttentionPlan, target: Target) -> Limit | None:
    if (limit := exceeded(plan, target)) is not None or plan.stages >= MIN_STAGES:
        return limit
    return Limit("room for one stage only", "nothing would be loaded during a product")


def _candidates(known: AttentionPlan, target: Target) -> Iterator[AttentionPlan]:
    """The plan at all extents, with the schedule that it has."""
    kinds = {a.kind for a in known.program.axes_of(known.keys)}
    apart = {d for mask in known.masks for d in mask.apart(known.own_labels)}
    dims = [1 if d in apart else known.program.dims[d] for d in known.own_labels]
    for rows in row_tiles(dims):
        tile = dict(zip(known.own_labels, rows, strict=True))
        for keys in KEY_TILES:
            for cluster in CLUSTERS if AxisKind.CLUSTER in kinds else (1,):
                one = resized(known, tile | {known.keys: keys}, cluster, 1)
                if AxisKind.GRID in kinds:
                    parts = _parts(one, target)
                    yield from (resized(known, one.program.tile, cluster, n) for n in parts)
                elif one.loop > 1 or cluster == 1:
                    yield one


def row_tiles(extents: list[Dim]) -> Iterator[tuple[int, ...]]:
    """Tiles of the row labels.

    Short labels are held whole, and one is divided to fill the rows: for 7 heads and 512 positions,
    7 x 9 are 63 of 64 rows. A symbolic label counts with its hint.
    """
    whole = prod(extent(n) for n in extents)
    for held in ROWS:
        if held > ROWS[0] and whole <= held // 2:
            return
        left, tiles = held, dict[int, int]()
        for k in sorted(range(len(extents)), key=lambda k: extent(extents[k])):
            tiles[k] = min(extent(extents[k]), left)
            left //= tiles[k]
        yield tuple(tiles[k] for k in range(len(extents)))


def _parts(one: AttentionPlan, target: Target) -> Iterator[int]:
    """Numbers of parts into which the grid divides the keys of an undivided plan.
    For every length of the loop the fewest."""
    most = MOST_WAVES * target.sms // max(1, one.row_tiles * one.cluster)
    known = set[int]()
    for parts in range(2, min(most, one.loop) + 1):
        loop = ceil_div(one.loop, parts)
        if loop not in known:
            known.add(loop)
            yield parts


def resized(plan: AttentionPlan, tile: dict[str, int], cluster: int, grid: int) -> AttentionPlan:
    """The plan with tiles of rows and keys, and with the keys in parts."""
    program = plan.program
    held = {d: plan.extent(d) for d in (plan.inner, plan.columns)}
    tile = dict.fromkeys(program.dims, 1) | tile | held
    loop = ceil_div(plan.key_extent, tile[plan.keys] * cluster * grid)
    own = {AxisKind.GRID: grid, AxisKind.CLUSTER: cluster, AxisKind.LOOP: loop}

    def parts(d: str, kind: AxisKind) -> int | None:
        dim = program.dims[d]
        if d != plan.keys:
            return None if isinstance(dim, Symbol) else ceil_div(dim, tile[d])
        return None if isinstance(dim, Symbol) and kind == AxisKind.LOOP else own[kind]

    extents = {a.name: parts(a.dim, a.kind) for a in program.axes}
    return replace(plan, program=program.resized(program.dims, extents, tile))
