"""Extents of tiles and axes for matmul-loop structures.

before: ``acc_K(X W) / sqrt(..)`` with K split over a cluster and a loop; after, for
``[16, 4096] @ [4096, 4096]`` on an H200: tile M=16 N=64 K=128, N.grid(64) K.cluster(2) K.loop(16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import prod

from cutesuper.errors import LoweringError
from cutesuper.ir.block import AxisKind, BlockProgram, KernelStep
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.skeletons.base import arguments_of
from cutesuper.skeletons.cost import MIN_STAGES, Setting, Sized, resize
from cutesuper.skeletons.matmul.copies import HALF_BYTES
from cutesuper.skeletons.matmul.cost import price
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.plan import (
    CHUNK,
    COLUMN_BLOCK,
    EQUAL_SHARE,
    ROW_BOX,
    ROW_UNIT,
    MatmulPlan,
    exceeded,
    exceeded_by_tile,
)
from cutesuper.skeletons.matmul.roles import plan_of
from cutesuper.skeletons.matmul.schedule import MatmulSchedule, default_schedule
from cutesuper.skeletons.matmul.settings import SETTINGS
from cutesuper.targets import Target

#: blocks of a cluster that every GPU of the architecture can place
CLUSTERS = (1, 2, 4, 8)
#: row tiles for few rows, and for more than the settings divide
ROW_TILES = (8, 16, 32, 64, 128, 256)
#: why a size is left out whose block lacks room for the stages
CROWDED = "stages exceed the shared memory"


def matmul_sizes(
    structure: BlockProgram, form: MatmulForm, setting: Setting, pruned: Counter[str]
) -> Iterator[Sized]:
    """All sizes worth pricing, with their costs; ``pruned`` counts rejected ones, by reason."""
    plans = _Plans(setting)
    for program in programs(structure, form, setting.target):
        plan = plans.of(program)
        if isinstance(plan, MatmulPlan):
            yield Sized(program, price(plan, setting.target))
        else:
            pruned[plan] += 1


class _Plans:
    """Plans of one structure at many extents; its roles are recognised once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.known: MatmulPlan | None = None
        #: why no tile will do; None until the first one has been tried, and if it had its roles
        self.refused: str | None = None
        self.tried = False

    def of(self, program: BlockProgram) -> MatmulPlan | str:
        """The plan at these extents with the default schedule, or the reason to leave it out."""
        if self.refused is not None:
            return self.refused
        try:
            plan = self._recognised(program)
        except LoweringError as error:
            # with other tiles only the sides can change, where the first had its roles
            self.refused = None if self.tried else str(error)
            return str(error)
        finally:
            self.tried = True
        target = self.setting.target
        if limit := exceeded_by_tile(plan):
            return limit.name
        if not _fits(plan, plan.schedule, target):  # this one takes least, and is known already
            return CROWDED
        schedule = default_schedule(plan, target, self.setting.dependent_launch)
        if not _fits(plan, schedule, target):
            return CROWDED
        plan = plan.scheduled(schedule)
        limit = exceeded(plan, target)
        return plan if limit is None else limit.name

    def _recognised(self, program: BlockProgram) -> MatmulPlan:
        if self.known is not None:
            return self.known.resized(self.known.program.at(program.axes, program.tile))
        step = KernelStep("of this structure", program)
        arguments = arguments_of(step, self.setting.tensors)
        plan, sure = plan_of(step, arguments, MatmulSchedule(stages=1))
        self.known = plan if sure else None
        return plan


def _fits(plan: MatmulPlan, schedule: MatmulSchedule, target: Target) -> bool:
    """True if a block has room for the fewest stages worth a price."""
    return plan.fixed_bytes(schedule) + MIN_STAGES * plan.slot_bytes <= target.shared_bytes


def programs(structure: BlockProgram, form: MatmulForm, target: Target) -> Iterator[BlockProgram]:
    """The structure at all tiles and extents of axes worth a plan."""
    k = structure.dims[form.contracted]
    parted = any(a.dim == form.contracted for a in structure.of_kind(AxisKind.GRID))
    for tile, cluster in _matmul_tiles(structure, form, target):
        depth = tile[form.contracted]
        own = 1 if form.reduced else cluster  # parts of the contracted label
        found = _grid_parts(structure, form, tile, target) if parted else (1,)
        for parts in found:
            loop = None if isinstance(k, Symbol) else ceil_div(k, parts * own * depth)
            inner = {
                f"{form.contracted}.loop": loop,
                f"{form.contracted}.cluster": cluster,
                f"{form.column}.cluster": cluster,
            }
            inner |= {f"{form.contracted}.grid": parts} if parted else {}
            yield resize(structure, tile, inner)


def _grid_parts(
    structure: BlockProgram, form: MatmulForm, tile: dict[str, int], target: Target
) -> tuple[int, ...]:
    """Numbers of parts into which the grid may divide the contracted label.
    As many as there are multiprocessors for, of equal length."""
    dims = structure.dims
    outer = (form.row, form.column, *form.batch)
    tiles = prod(ceil_div(extent(dims[d]), tile[d]) for d in outer)
    steps = ceil_div(extent(dims[form.contracted]), tile[form.contracted])
    most = min(target.sms // tiles, steps)
    return (ceil_div(steps, ceil_div(steps, most)),) if most > 1 else ()


def _matmul_tiles(
    structure: BlockProgram, form: MatmulForm, target: Target
) -> Iterator[tuple[dict[str, int], int]]:
    """Tiles and cluster sizes; a cluster splits K tiles into at least two parts."""
    split = bool(structure.of_kind(AxisKind.CLUSTER))
    k, n = structure.dims[form.contracted], extent(structure.dims[form.column])
    hidden = {d: extent(structure.dims[d]) for d in form.hidden}
    rows = extent(structure.dims[form.row])
    between = sum(COLUMN_BLOCK * ceil_div(n, COLUMN_BLOCK) for n in hidden.values())
    widths, depths = (SETTINGS.choose(target, d)["tiles"] for d in ("columns", "depth"))
    depths = [d * HALF_BYTES // form.element_bytes for d in depths]
    for row in _row_tiles(form, rows, between + min(widths), target):
        for columns in widths:
            for inner in depths:
                tile: dict[str, int] = {**dict.fromkeys(form.batch, 1), **hidden}
                tile |= {form.row: row, form.contracted: inner}
                tile |= zip(form.columns, repeat(columns))
                for cluster in CLUSTERS[1:] if split else CLUSTERS[:1]:
                    if form.reduced:
                        whole = ceil_div(n, columns) == cluster
                    else:
                        whole = _shared_out(k, inner, cluster)
                    if whole:
                        yield {d: tile[d] for d in structure.dims}, cluster


def _shared_out(dim: Dim, inner: int, cluster: int) -> bool:
    """True if a cluster shares out a label in tiles of ``inner`` evenly, or nearly so.
    Nearly, where no tile divides the label or it is symbolic: 65 tiles of K=4097 have no divisor
    that a cluster could have."""
    tiles, uneven = ceil_div(extent(dim), inner), isinstance(dim, Symbol) or dim % CHUNK > 0
    return tiles % cluster == 0 or (uneven and tiles >= 8 * cluster)


def _row_tiles(form: MatmulForm, rows: int, held: int, target: Target) -> tuple[int, ...]:
    """Row tiles worth a price: whole boxes where rows lie side by side; see `_row_choices`."""
    tiles = _row_choices(form, rows, held, target)
    if not form.turned:
        return tiles
    return tuple(dict.fromkeys(ROW_BOX * ceil_div(t, ROW_BOX) for t in tiles))


def _row_choices(form: MatmulForm, rows: int, held: int, target: Target) -> tuple[int, ...]:
    """Row tiles for a form whose blocks hold at least ``held`` results of a row.

    Without columns to divide, the rows are divided, and so are many rows if more products follow.
    Few rows that a warpgroup holds are not divided: weights would be read again (16 rows of LoRA
    16x256x4096 in one tile take 3.2 us, 8 and 8 3.75).
    """
    many = _even_tiles(rows, **SETTINGS.choose(target, "rows", rows=rows))
    covering = next((t for t in ROW_TILES if t >= rows), ROW_TILES[-1])
    few = not many and not form.reduced and covering * held <= 128 * EQUAL_SHARE
    if few or not (form.reduced or form.hidden):
        return many or (covering,)
    return _up_to_covering(SETTINGS.choose(target, "divided")["tiles"], rows)


def _up_to_covering(tiles: Sequence[int], rows: int) -> tuple[int, ...]:
    """The tiles that are not larger than the smallest one that covers the rows.

    >>> _up_to_covering((8, 64, 256, 128), 100)
    (8, 64, 128)
    """
    covering = min((t for t in tiles if t >= rows), default=max(tiles))
    return tuple(t for t in tiles if t <= covering)


def _even_tiles(rows: int, least: int, most: int) -> tuple[int, ...]:
    """Row tiles between ``least`` and ``most``: for each number of them the smallest.
    They cover the rows; none without limits.

    >>> _even_tiles(300, 64, 256)
    (64, 80, 104, 152)
    """
    if not least:
        return ()
    parts = range(ceil_div(rows, most), ceil_div(rows, least) + 1)
    tiles = {ROW_UNIT * ceil_div(rows, ROW_UNIT * n) for n in parts}
    return tuple(sorted(t for t in tiles if least <= t))
