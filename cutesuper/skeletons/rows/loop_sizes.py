"""Extents for structures of rows that are visited in turn, or split over a cluster.

before: RMSNorm's backward pass with the rows M divided by grid and visits; after, for 4096 rows of
4096 elements on an H200: ``M.grid(128) M.persistent(16)``, tile M=2 N=4096.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.skeletons.cost import Cost
from cutesuper.skeletons.rows.cost import (
    cluster_cost,
    persistent_cost,
    stage_bytes,
    writes_rows,
)
from cutesuper.skeletons.rows.loop_form import CLUSTERS, STAGE_BYTES, PersistentForm
from cutesuper.targets import Target

#: rows of a tile
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: elements of rows along which nothing is reduced: the grid divides them
STRIPS = (1024, 2048, 4096, 8192)
#: parts of a row begin at whole 16-byte pieces, of 16-bit elements
ALIGN = 8
#: stages in flight, and their size in bytes, up to twice `STAGE_BYTES` if a row does not fit
STAGES, MAX_STAGE_BYTES = 2, 2 * STAGE_BYTES
#: most bytes of a row, of all tensors with rows, that a block of a cluster has; the smallest
#: cluster within it is best, since the exchange takes longer in a larger one. Three such blocks
#: share an SM (softmax of 16384x65536: 1013 us in clusters of 4, 1023 of 8, 1105 of 2, where one
#: walks), or threads hold as much of weights too (LayerNorm 1104 of 4, 1127 of 8, 1313 of 2)
CLUSTER_BYTES = 32 * 1024
#: the same limit for rows that are only read
READ_BYTES = 64 * 1024
#: the same limit for rows that do not begin at 16 bytes: threads read them element by element, with
#: one instruction for each access
ODD_BYTES = 16 * 1024
#: barriers, exchanges
RESERVED_BYTES = 8192


def persistent_sizes(
    structure: BlockProgram,
    form: PersistentForm,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[tuple[BlockProgram, Cost]]:
    """All sizes worth pricing, with their costs; ``pruned`` counts rejected ones, by reason."""
    rows = extent(structure.dims[form.visited])
    for cluster, width in _widths(structure, form, itemsizes):
        slots = _slots(structure, form, target, cluster, width)
        if not slots:
            pruned["more blocks than run at once"] += 1
            continue
        for tile in ROWS:
            if tile >= 2 * rows:
                break
            program = _visiting(structure, form, (cluster, width, tile), slots)
            stage = stage_bytes(program, form, itemsizes)
            if tile > 1 and stage > STAGE_BYTES:
                break
            if stage > MAX_STAGE_BYTES or STAGES * stage + RESERVED_BYTES > target.shared_bytes:
                pruned["rows exceed the shared memory"] += 1
                break
            yield program, persistent_cost(program, form, target, itemsizes)


def _widths(
    structure: BlockProgram, form: PersistentForm, itemsizes: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """Blocks of a cluster, and elements of a row that one block has. Clusters are only as large as
    needed to hold a row in a stage: larger ones leave more multiprocessors idle."""
    whole = extent(structure.dims[form.row])
    if form.clustered:
        one = replace(structure, tile=dict.fromkeys(structure.dims, 1))
        element = stage_bytes(one, form, itemsizes)
        for cluster in CLUSTERS:
            part = _part(whole, cluster)
            yield cluster, part
            if part * element <= STAGE_BYTES:
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
    structure: BlockProgram, form: PersistentForm, target: Target, cluster: int, width: int
) -> int:
    """Number of blocks (or clusters) that may share the visited rows, so that all run at once."""
    others = prod(extent(structure.dims[d]) for d in form.rows - {form.visited})
    strips = 1 if form.clustered else ceil_div(extent(structure.dims[form.row]), width)
    return target.clusters.get(cluster, 0) // (others * strips)


def _visiting(
    structure: BlockProgram, form: PersistentForm, size: tuple[int, int, int], slots: int
) -> BlockProgram:
    """The structure at the size (cluster, elements of a row, rows of a tile): as few blocks as need
    no more visits; for a symbolic number of rows, as many as run at once."""
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


def cluster_sizes(
    structure: BlockProgram,
    row: str,
    target: Target,
    itemsizes: dict[str, int],
    pruned: Counter[str],
) -> Iterator[tuple[BlockProgram, Cost]]:
    """All sizes of rows split over clusters, one row in each, with their costs."""
    whole = extent(structure.dims[row])
    streamed = [op for op in structure.loads() if row in op.dims and len(op.dims) > 1]
    each = sum(itemsizes[op.attributes["tensor"]] for op in streamed)
    parts = {c: _part(whole, c) * max(1, each) for c in CLUSTERS if c in target.clusters}
    most = CLUSTER_BYTES if writes_rows(structure, row) else READ_BYTES
    most = most if whole % ALIGN == 0 else ODD_BYTES
    fitting = [c for c, size in parts.items() if size <= most]
    # one tile at a time, in the largest cluster, is better than another kernel
    fitting = fitting or [
        c for c, size in list(parts.items())[-1:] if size + RESERVED_BYTES <= target.shared_bytes
    ]
    if not fitting:
        pruned["rows exceed the shared memory"] += 1
    for cluster in fitting[:1]:
        part = _part(whole, cluster)
        tile = {d: part if d == row else 1 for d in structure.dims}
        extents: dict[str, int | None] = {}
        for a in structure.axes:
            dim = structure.dims[a.dim]
            opened = isinstance(dim, Symbol)
            grid = None if opened else ceil_div(extent(dim), tile[a.dim])
            extents[a.name] = cluster if a.kind == AxisKind.CLUSTER else grid
        program = structure.resized(structure.dims, extents, tile)
        yield program, cluster_cost(program, target, itemsizes)
