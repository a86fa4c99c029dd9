"""Extents for structures of rows: resident in a block, split over a cluster, or visited in turn.

The plan decides what a kernel really does, and `rows.cost` prices it; here are the extents that
lead to different plans.

before: RMSNorm's backward pass with the rows M divided by grid and visits; after, for 4096 rows of
4096 elements on an H200: ``M.grid(128) M.persistent(16)``, tile M=2 N=4096.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.block import AxisKind, BlockProgram, KernelStep
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.skeletons.cost import Setting, Sized, resize
from cutesuper.skeletons.form import ALIGN
from cutesuper.skeletons.rows.cost import price
from cutesuper.skeletons.rows.form import PersistentForm, RowForm
from cutesuper.skeletons.rows.planner import frame, plan_of, resized
from cutesuper.skeletons.rows.schedule import MAX_ROW, MAX_STRIDED
from cutesuper.skeletons.rows.settings import SETTINGS, stage_limit

#: rows of a tile of visited rows
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: elements of visited rows along which nothing is reduced: the grid divides them
STRIPS = (1024, 2048, 4096, 8192)
#: elements of parts of rows that are combined in a second kernel, and most such parts
SHORTEST_PART, LONGEST_PART, MOST_PARTS = 1024, 8192, 4096
#: cluster sizes in blocks; more than 8 are not portable
CLUSTERS = (2, 4, 8, 16)


def row_sizes(
    structure: BlockProgram, form: RowForm, setting: Setting, pruned: Counter[str]
) -> Iterator[Sized]:
    """The only size of rows that one block holds: how many it has at a time is a knob."""
    strip = min(STRIPS[0], extent(structure.dims[form.row]))
    tile = dict.fromkeys(structure.dims, 1)
    tile[form.row] = extent(structure.dims[form.row]) if form.reduced else strip
    yield from _priced(resize(structure, tile, {}), setting, pruned)


def cluster_sizes(
    structure: BlockProgram, form: RowForm, setting: Setting, pruned: Counter[str]
) -> Iterator[Sized]:
    """One row in each cluster, in the smallest one that fits.
    The exchange takes longer in larger ones. If none does, in the largest: one tile at a time is
    better than another kernel."""
    row, target = form.row, setting.target
    whole = extent(structure.dims[row])
    streamed = [op for op in structure.loads() if row in op.dims and len(op.dims) > 1]
    each = max(1, sum(setting.itemsizes[op.attributes["tensor"]] for op in streamed))
    written = any(row in op.dims for op in structure.stores())
    most = SETTINGS.choose(target, "part", written=written, aligned=whole % ALIGN == 0)["bytes"]
    possible = [c for c in CLUSTERS if c in target.clusters]
    fitting = [c for c in possible if _part(whole, c) * each <= most]
    for cluster in (fitting or possible[-1:])[:1]:
        tile = {d: _part(whole, cluster) if d == row else 1 for d in structure.dims}
        inner = {a.name: cluster for a in structure.of_kind(AxisKind.CLUSTER)}
        yield from _priced(resize(structure, tile, inner), setting, pruned)


def part_sizes(
    structure: BlockProgram, form: RowForm, setting: Setting, pruned: Counter[str]
) -> Iterator[Sized]:
    """The only size of parts of rows that no cluster holds.
    As long as a block reduces them well, but no fewer parts than multiprocessors, and no more than
    a second kernel combines."""
    row, whole = form.row, extent(structure.dims[form.row])
    loads = [op for op in structure.loads() if row in op.dims]
    strided = all(op.attributes["map"][-1] != row for op in loads)
    rows = prod(extent(n) for d, n in structure.dims.items() if d != row)
    part = MAX_STRIDED if strided else LONGEST_PART
    while part > SHORTEST_PART and rows * ceil_div(whole, part) < setting.target.sms:
        part //= 2
    while not strided and part < MAX_ROW and ceil_div(whole, part) > MOST_PARTS:
        part *= 2
    tile = {d: part if d == row else 1 for d in structure.dims}
    program = resize(structure, tile, {})
    yield from _priced(program, setting.beside(program.partials()), pruned)


def _priced(program: BlockProgram, setting: Setting, pruned: Counter[str]) -> Iterator[Sized]:
    """A program with the cost of its plan, if it has one."""
    try:
        plan = plan_of(KernelStep("rows", program), setting)
    except (LoweringError, ScheduleError) as error:
        pruned[str(error)] += 1
        return
    yield Sized(program, price(plan, setting.target))


def persistent_sizes(
    structure: BlockProgram, form: PersistentForm, setting: Setting, pruned: Counter[str]
) -> Iterator[Sized]:
    """The sizes of visited rows that lead to different plans.
    Of equal costs those are better, and come first, whose tile the plan takes as it is, so that no
    block is without rows; then those with fewer blocks."""
    found: list[tuple[tuple[bool, int], Sized]] = []
    base = None
    for program in _visiting_sizes(structure, form, setting, pruned):
        try:
            base = base or frame(KernelStep("rows", program), setting)
            plan = resized(base, program, setting)
        except (LoweringError, ScheduleError) as error:
            pruned[str(error)] += 1
            continue
        order = (program.tile[form.visited] != plan.tile_rows, program.blocks())
        found.append((order, Sized(program, price(plan, setting.target))))
    yield from (sized for _, sized in sorted(found, key=lambda f: f[0]))


def _visiting_sizes(
    structure: BlockProgram, form: PersistentForm, setting: Setting, pruned: Counter[str]
) -> Iterator[BlockProgram]:
    """Every grid, with the largest tile of rows that leads to it; the plan has its own."""
    stage = stage_limit(setting.target)
    for cluster, width in _widths(structure, form, setting):
        slots = _slots(structure, form, setting, cluster, width)
        row_bytes = width * sum(setting.itemsizes[t] for t in _streamed(structure, form))
        if not slots:
            pruned["more blocks than run at once"] += 1
        elif row_bytes > 2 * stage:
            pruned["rows exceed the shared memory"] += 1
        else:
            found: dict[int, BlockProgram] = {}
            most = min(
                max(1, stage // max(1, row_bytes)), 2 * extent(structure.dims[form.visited]) - 1
            )
            for tile in (n for n in ROWS if n <= most):
                program = _visiting(structure, form, (cluster, width, tile), slots)
                found[program.parts_along(form.visited, AxisKind.GRID)] = program
            yield from found.values()


def _streamed(structure: BlockProgram, form: PersistentForm) -> list[str]:
    """The tensors whose rows a block loads for a visit."""
    loads = [op for op in structure.loads() if {form.visited, form.row} <= set(op.dims)]
    return [op.attributes["tensor"] for op in loads]


def _widths(
    structure: BlockProgram, form: PersistentForm, setting: Setting
) -> Iterator[tuple[int, int]]:
    """Blocks of a cluster, and elements of a row that one block has.
    Clusters are only as large as needed to hold a row in a stage: larger ones leave more
    multiprocessors idle."""
    whole = extent(structure.dims[form.row])
    if form.clustered:
        element = sum(setting.itemsizes[t] for t in _streamed(structure, form))
        for cluster in CLUSTERS:
            part = _part(whole, cluster)
            yield cluster, part
            if part * element <= stage_limit(setting.target):
                return
    elif form.reduced or whole <= STRIPS[-1]:
        yield 1, whole
    if not form.reduced:
        yield from ((1, strip) for strip in STRIPS if strip < whole)


def _part(whole: int, cluster: int) -> int:
    """Elements that each block of a cluster has of a row."""
    part = ceil_div(whole, cluster)
    return ALIGN * ceil_div(part, ALIGN) if part >= ALIGN else part


def _slots(
    structure: BlockProgram, form: PersistentForm, setting: Setting, cluster: int, width: int
) -> int:
    """Number of blocks (or clusters) that may share the visited rows, so that all run at once.
    One that has all rows of its columns waits for no other, so there is always one."""
    others = prod(extent(structure.dims[d]) for d in form.rows - {form.visited})
    strips = 1 if form.clustered else ceil_div(extent(structure.dims[form.row]), width)
    slots = setting.target.clusters.get(cluster, 0) // (others * strips)
    return max(slots, int(cluster == 1))


def _visiting(
    structure: BlockProgram, form: PersistentForm, size: tuple[int, int, int], slots: int
) -> BlockProgram:
    """The structure at the size (cluster, elements of a row, rows of a tile).
    As few blocks as need no more visits; for a symbolic number of rows, as many as run at once."""
    cluster, width, rows = size
    dim = structure.dims[form.visited]
    tiles = ceil_div(extent(dim), rows)
    visits = ceil_div(tiles, slots)
    opened = isinstance(dim, Symbol)
    grid = min(slots, tiles) if opened else ceil_div(tiles, visits)
    tile = {d: {form.row: width, form.visited: rows}.get(d, 1) for d in structure.dims}
    extents: dict[str, int | None] = {}
    for a in structure.axes:
        if a.kind == AxisKind.PERSISTENT:
            extents[a.name] = None if opened else visits
        elif a.kind == AxisKind.CLUSTER:
            extents[a.name] = cluster
        elif a.dim == form.visited:
            extents[a.name] = grid
        else:
            extents[a.name] = ceil_div(extent(structure.dims[a.dim]), tile[a.dim])
    return structure.resized(structure.dims, extents, tile)
