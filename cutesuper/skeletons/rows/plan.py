"""The plans of rows: element-wise programs, reductions along one label, and sums over all others.

A **row kernel** (`RowPlan`) holds a row (all other labels fixed) in the registers of a power of two
of threads; reductions run over shuffles and, across warps, shared memory. Every tensor is read and
written once. Rows should be contiguous in memory; strided ones work too, and tensors may be stored
in different orders.

A **row loop** (`RowLoopPlan`) walks over tiles: some whole rows, or the part of them that one block
of a cluster has. Tiles are loaded through a ring of bulk loads, every thread has the same columns
of all its rows, and reductions along a row go through shuffles, shared memory and the cluster. Sums
*over* rows (the gradient of a weight) stay in registers, in fp32, until the last tile. Then every
block leaves its sums in device memory, all blocks meet, and each one adds up some columns, in the
order of the blocks.

    before: x, dy [M, N], w [N], rstd [M, 1];  after one launch: dx [M, N], dw [N]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from cutesuper.errors import LoweringError
from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, ceil_div, extent, show_shape
from cutesuper.skeletons.base import Argument, Plan, Scratch, View, same_places
from cutesuper.skeletons.rows.schedule import (
    BULK,
    LARGE,
    LARGE_HELD,
    MAX_LOADED,
    MAX_ROW,
    RowLoopSchedule,
    RowSchedule,
    power_of_two,
)
from cutesuper.targets import Target

#: alignment of the ring's stages in bytes: a line of all banks of shared memory
LINE = 128
#: fewest columns that a block adds up at a time: a sector of L2 in fp32
SLICE = 8
#: elements of a row that a block sums up at a time where it walks along the row
WALKED = 8192
#: most rows that a thread reads at a time if each block has a slice of all rows
MAX_SLICE_ROWS = 4
#: most warps of a cluster that send their part of a row to all blocks; with more, those of a block
#: join first
MAX_SENDERS = 32
#: most columns of a vector that a thread keeps in registers
MAX_VECTORS = 32
#: rows whose sum a thread adds to that of all its rows: if it adds 248 rows one after the other, dw
#: of 32768x4096 is off by 2.3e-7, this way by 1.4e-7
SUM_ROWS = 16
#: most fp32 sums of a thread that may be kept twice
MAX_CARRIED = 16


@dataclass(frozen=True)
class RowPlan(Plan[RowSchedule]):
    """The plan of a row kernel.

    Attributes:
        program: the block program, tiled as the kernel runs it.
        arguments: tensor arguments in order, inputs first.
        column: the label along the rows.
        rows: the other labels; neighbouring rows differ in the last one.
        loads: views of the loads, by operation.
        stores: views of the stores, by operation.
        reductions: operations that reduce over ``column``.
        order: loads and computations, in the order in which they are issued.
        schedule: the kernel's knobs.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    column: str
    rows: tuple[str, ...]
    loads: dict[int, View]
    stores: dict[int, View]
    reductions: tuple[int, ...]
    order: tuple[int, ...]
    schedule: RowSchedule

    @property
    def turns(self) -> tuple[int, ...]:
        """The distances that elements move along a row, one for each way of changing places.
        Half of the row, or 1 for neighbours."""
        ways = {op.facets for op in self.program.ops if op.facets.turns and not op.facets.scans}
        return tuple(sorted({int(way.places(self.length)[0][0]) for way in ways}))

    @property
    def scans(self) -> tuple[int, ...]:
        """Operations that sum a row up to each element."""
        return tuple(i for i, op in enumerate(self.program.ops) if op.facets.scans)

    @property
    def scan_words(self) -> int:
        """Numbers of a sum up to an element, between threads.
        With what rounding left, if results are fp32."""
        return 1 + any(a.written and a.dtype == "float32" for a in self.arguments)

    @property
    def whole(self) -> bool:
        """True if the threads of a row must have all of it, or all of its part."""
        return bool(self.reductions or self.scans or self.turns)

    @property
    def parted(self) -> bool:
        """True if the grid divides rows that are reduced.
        Each block leaves the result of a part."""
        return bool(self.reductions) and any(a.dim == self.column for a in self.program.axes)

    @property
    def walked(self) -> bool:
        """True if a block walks along a row that it sums up, and has a part of it at a time."""
        return bool(self.scans) and not self.reductions and self.length > MAX_ROW

    @property
    def part(self) -> int:
        """Elements of a row that a block has at a time."""
        if self.parted:
            return self.program.tile[self.column]
        return WALKED if self.walked else self.length

    @property
    def parts(self) -> int:
        """Number of blocks that divide a row which is reduced."""
        return ceil_div(self.length, self.part) if self.parted else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.lanes * self.schedule.rows

    @property
    def resident(self) -> int:
        """Blocks per SM for which the compiler must leave registers; 0: no requirement.

        A large block alone on an SM waits for its loads, then for its stores: 4096x16384 forward
        took 93.8 us with 512 threads, which had more than 64 registers.
        """
        held = self.schedule.vector * self.schedule.chunks
        few = held <= LARGE_HELD and self.loaded_bytes(held) <= MAX_LOADED
        return 2 if self.threads == LARGE and few else 0

    def loaded_bytes(self, held: int) -> int:
        """Bytes of ``held`` elements of every tensor that is loaded and has the column."""
        return held * sum(self.itemsize(v) for v in self.loads.values() if self.column in v.labels)

    @property
    def views(self) -> list[View]:
        """Views of all tensors, those that are loaded first."""
        return [*self.loads.values(), *self.stores.values()]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return extent(self.program.dims[self.column])

    @cached_property
    def sections(self) -> tuple[RowPlan, ...]:
        """The plan of each alternative of the grid, for its own rows.
        A block has rows of one of them (`BlockProgram.alternatives`); those of the column have it
        along them, others a value each. The plan itself if it stores values of one alternative, or
        if there are none."""
        stored = {d for i in self.stores for d in self.program.ops[i].dims}
        apart = [d for d in self.program.alternatives if d in stored]
        return tuple(self._section(d, {*apart} - {d}) for d in apart[len(apart) == 1 :]) or (self,)

    def _section(self, own: str, others: set[str]) -> RowPlan:
        ops, needed = self.program.ops, self.program.dependence.before
        stores = {i: v for i, v in self.stores.items() if own in ops[i].dims}
        used = {j for i in stores for j in needed(i)}
        return replace(
            self,
            rows=tuple(d for d in self.rows if d not in others),
            loads={i: v for i, v in self.loads.items() if i in used},
            stores=stores,
            reductions=tuple(i for i in self.reductions if i in used),
            order=tuple(i for i in self.order if i in used),
        )

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return sum(prod(extent(self.program.dims[d]) for d in s.rows) for s in self.sections)

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """Pairs for `Plan.in_place`: each thread reads and writes the same elements of all tensors.
        It reads all of them before it writes any."""
        pairs = same_places(self, self.column, self.loads.values(), self.stores.values())
        return tuple((x.argument, y.argument) for x, y in pairs)

    def scattered(self, names: Collection[str]) -> RowPlan:
        """See `Plan.scattered`; rows are those of tensors ``[rows, column]``."""
        found: list[Argument] = []
        for n, a in enumerate(self.arguments):
            views = [v for v in self.views if v.argument == n]
            rows = all(v.labels == (*self.rows, self.column) and type(v) is View for v in views)
            rows = rows and a.part is None
            if a.given in names and not (rows and len(self.rows) == 1):
                raise LoweringError(
                    f"{a.name}{show_shape(a.shape)}: rows that lie anywhere are those of a tensor "
                    "of two dimensions, read and written along its rows"
                )
            found.append(replace(a, scattered=a.name in names))
        return replace(self, arguments=tuple(found))

    @property
    def width(self) -> int:
        """Elements of a row that a block covers."""
        return self.schedule.lanes * self.schedule.vector * self.schedule.chunks

    @property
    def warps_per_row(self) -> int:
        """Warps that share a row."""
        return ceil_div(self.schedule.lanes, 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: slots for the numbers that warps exchange."""
        words = words_of(self.program, self.reductions)
        if self.schedule.interleaved:
            return 4 * words * self.threads
        words += len(self.scans) * self.schedule.chunks * self.scan_words
        slots = words * self.schedule.rows * self.warps_per_row
        return 4 * slots if self.warps_per_row > 1 else 0


def words_of(program: BlockProgram, reductions: Iterable[int]) -> int:
    """Numbers that a thread hands over for some reductions of a row."""
    found = (program.ops[i].facets.reduces for i in reductions)
    return sum(how.words for how in found if how is not None)


@dataclass(frozen=True)
class Level:
    """The operations that can run once the reductions of the levels before are known.

    Attributes:
        reductions: operations that reduce along the row.
        sums: indices of `RowLoopPlan.sums` whose source is known here.
        stores: store operations.
    """

    reductions: tuple[int, ...]
    sums: tuple[int, ...]
    stores: tuple[int, ...]


@dataclass(frozen=True)
class RowSum:
    """A value summed (or maximised) over rows.

    Attributes:
        source: the operation whose value, ``[rows, column]`` or ``[rows]``, is combined.
        op: ``sum`` or ``max``.
        means: labels by whose extents the result is divided in the end.
        final: the operation that has the result.
    """

    source: int
    op: str
    means: tuple[str, ...]
    final: int


@dataclass(frozen=True)
class RowLoopPlan(Plan[RowLoopSchedule]):
    """The plan of a row loop.

    Attributes:
        program: the block program, tiled as the kernel runs it.
        arguments: tensor arguments in order, inputs first.
        column: the label along the rows.
        rows: the labels that a block walks over, as one index, the last varying fastest.
        outer: labels of which a block has one element.
        loads: views of the loads, by operation.
        stores: views of the stores, by operation.
        complete: for a reduction along the row, the operation that completes it (itself without a
            cluster).
        picked: sums along the row of one element and zeros, by the operation that completes each
            (the same one without a cluster): the element is read by itself, and not reduced.
        levels: the work on a tile, from one exchange to the next.
        sums: values that are combined over rows.
        schedule: the kernel's knobs.
        shared_percent: percentage of an SM's L1 and shared memory that the launch requests as
            shared memory; 0 leaves it to the driver.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    column: str
    rows: tuple[str, ...]
    outer: tuple[str, ...]
    loads: dict[int, View]
    stores: dict[int, View]
    complete: dict[int, int]
    picked: dict[int, int]
    levels: tuple[Level, ...]
    sums: tuple[RowSum, ...]
    schedule: RowLoopSchedule
    shared_percent: int = 0

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """Pairs for `Plan.in_place`: results of the last level.
        By then a thread has read its elements of the rows for the last time. The one that a label
        names is read by all threads of the row, before their first exchange. Slices of sums may be
        of other rows."""
        if self.schedule.sliced or (self.picked and len(self.levels) == 1):
            return ()
        stores = [self.stores[i] for i in self.levels[-1].stores]
        pairs = same_places(self, self.column, self.loads.values(), stores)
        return tuple((x.argument, y.argument) for x, y in pairs)

    # ------------------------------------------------------------------------------ kinds of loads

    @property
    def views(self) -> list[View]:
        """Views of all tensors, those that are loaded first."""
        return [*self.loads.values(), *self.stores.values()]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Loads with the column and a label of the rows: they are loaded tile by tile."""
        return tuple(i for i, v in self.loads.items() if self.column in v.labels and self.varies(v))

    @property
    def vectors(self) -> tuple[int, ...]:
        """Loads with the column that are the same for all rows of a block."""
        return tuple(
            i for i, v in self.loads.items() if self.column in v.labels and not self.varies(v)
        )

    @property
    def scalars(self) -> tuple[int, ...]:
        """Loads with one element for each row."""
        return tuple(
            i for i, v in self.loads.items() if self.column not in v.labels and self.varies(v)
        )

    def varies(self, view: View) -> bool:
        """True if a tensor differs from row to row."""
        return any(d in view.labels for d in self.rows)

    def row_stride(self, view: View) -> int | None:
        """Elements between neighbouring rows; None if that differs from row to row."""
        stride = view.stride(self.rows[-1])
        expected = stride
        for label in reversed(self.rows):
            if view.stride(label) != expected:
                return None
            # the extent of the outermost label, which may be symbolic, is never needed
            expected *= extent(self.program.dims[label])
        return stride

    @property
    def writes_rows(self) -> bool:
        """True if results run along the rows; otherwise rows are only read."""
        return any(self.column in v.labels for v in self.stores.values())

    @property
    def bulk(self) -> bool:
        """True if bulk loads can bring the tiles.
        All addresses and sizes are multiples of 16 bytes, and every block has some of a row."""
        if (self.parts - 1) * self.width >= self.length:
            return False
        for view in (self.loads[i] for i in self.streamed):
            size = self.itemsize(view)
            if view.stride(self.column) != 1 or any(
                n * size % BULK for n in (self.length, *view.places)
            ):
                return False
        return all(self.itemsize(self.loads[i]) in (4, 8) for i in self.scalars)

    # -------------------------------------------------------------------------------------- extents

    @property
    def row_count(self) -> int:
        """Rows that the blocks of one element of the outer labels share."""
        return prod(extent(self.program.dims[d]) for d in self.rows)

    @property
    def outer_count(self) -> int:
        """Elements of the outer labels."""
        return prod(extent(self.program.dims[d]) for d in self.outer)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return extent(self.program.dims[self.column])

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; each has a part of the row."""
        return self.program.parts_along(self.column, AxisKind.CLUSTER)

    @property
    def column_parts(self) -> int:
        """Parts of the row over the grid, which are never joined."""
        return self.program.parts_along(self.column, AxisKind.GRID)

    @property
    def parts(self) -> int:
        """Total number of parts of a row."""
        return self.cluster * self.column_parts

    @property
    def width(self) -> int:
        """Elements of a row that a block has."""
        return self.program.tile[self.column]

    @property
    def covered(self) -> int:
        """Elements of a row that the threads of a block cover, including padding."""
        return self.schedule.lanes * self.schedule.vector * self.schedule.chunks

    @property
    def ragged(self) -> bool:
        """True if threads reach past the end of a part."""
        return self.covered * self.parts != self.length

    @property
    def piece(self) -> int:
        """Accesses of a row that a thread computes at a time.
        All that it keeps, or about 16 elements, 8 beside sums over rows (LayerNorm backward with 32
        columns of two sums spilled 32 bytes with 16)."""
        s = self.schedule
        if s.kept:
            return s.chunks
        most = max(1, (8 if self.sums else 16) // s.vector)
        return next(n for n in range(most, 0, -1) if s.chunks % n == 0)

    @property
    def held(self) -> float:
        """Registers of a thread for sums over rows, and for a tile of all operands if kept."""
        s = self.schedule
        vectors = self.vectors if s.vector * s.chunks <= MAX_VECTORS else ()
        sizes = [s.depth * self.itemsize(self.loads[i]) for i in self.streamed]
        sizes += [self.itemsize(self.loads[i]) for i in vectors]
        return s.vector * s.chunks * (len(self.sums) + sum(sizes) / 4)

    @property
    def keeps_vectors(self) -> bool:
        """True if a thread keeps its columns of vectors that are the same for all rows.
        Longer pieces are read for every row, from L1: with 64 columns LayerNorm spilled 128 bytes.
        So are the vectors of few rows: kept, they would be converted before the loop, and the rows
        requested only after that."""
        s = self.schedule
        return s.kept and s.vector * s.chunks <= MAX_VECTORS and not s.sliced

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.lanes * self.schedule.groups

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.schedule.groups * self.schedule.depth

    @property
    def walkers(self) -> int | None:
        """Blocks (or clusters) that share the rows of one element of the outer labels.
        None if that is not fixed. Partial sums have a place for each."""
        if not self.sums:
            return None
        if self.schedule.sliced:
            return self.schedule.blocks
        return prod(self.program.parts_along(d, AxisKind.GRID) for d in self.rows)

    @property
    def visits(self) -> int:
        """Tiles that each of these has, at most."""
        return ceil_div(self.row_count, (self.walkers or 1) * self.tile_rows)

    @property
    def warps_per_row(self) -> int:
        """Warps of a block that share a row."""
        return ceil_div(self.schedule.lanes, 32)

    @property
    def meets_in_block(self) -> bool:
        """True if the warps of a block combine their parts of a row before the blocks do.
        The blocks are those of the cluster."""
        return self.cluster > 1 and self.warps_per_row * self.cluster > MAX_SENDERS

    @property
    def senders(self) -> int:
        """Number of values that every receiver adds up for each reduction and row."""
        return self.cluster * (1 if self.meets_in_block else self.warps_per_row)

    # ------------------------------------------------------------------------------------- sums

    @property
    def meets(self) -> bool:
        """True if blocks of the grid meet."""
        return bool(self.sums) and not self.schedule.sliced

    @property
    def alone(self) -> bool:
        """True if a block has all rows of the columns that it adds up.
        It waits for no other, and there may be any number of blocks."""
        slices, parts = ceil_div(self.length, self.slice_columns), self.column_parts
        own = slices == parts and (parts == 1 or self.slice_columns == self.width)
        return self.meets and self.partials == 1 and self.cluster == 1 and own

    @property
    def carries_sums(self) -> bool:
        """True if groups of `SUM_ROWS` rows are summed first, then these sums.
        Results in fp32 show the rounding of long sums."""
        s = self.schedule
        own = sum(s.vector * s.chunks if self.has_columns(x) else 1 for x in self.sums)
        wide = any(self.itemsize(v) == 4 for v in self.stores.values() if not self.varies(v))
        dims = [self.program.dims[d] for d in self.rows]
        opened = any(isinstance(d, Symbol) for d in dims)  # code does not depend on a hint
        tiles = self.row_count // (self.tile_rows * (self.walkers or 1))
        long = opened or tiles * s.depth >= 2 * SUM_ROWS
        return self.meets and wide and long and own <= MAX_CARRIED

    @property
    def sum_tiles(self) -> int:
        """Tiles of such a group."""
        return max(1, SUM_ROWS // self.schedule.depth)

    @property
    def one_tile(self) -> bool:
        """True if a block has one tile."""
        return self.walkers is None and self.schedule.blocks == 0

    @property
    def waits_late(self) -> bool:
        """True if the blocks of a cluster ask for their only tile before waiting for each other.
        They wait for each other's start."""
        return self.cluster > 1 and self.one_tile and not self.schedule.stages

    @property
    def last_sum(self) -> int:
        """The level at which the last source of a sum is known."""
        return max((n for n, level in enumerate(self.levels) if level.sums), default=0)

    @property
    def leaves_early(self) -> bool:
        """True if sums leave a block before the results of its last tile are stored.
        Work follows them, and the ring, through which groups add up their sums, is no longer
        read."""
        s = self.schedule
        return self.meets and self.last_sum + 1 < len(self.levels) and (s.kept or s.groups == 1)

    def has_columns(self, s: RowSum) -> bool:
        """True if a sum is of whole rows, not of one value of each."""
        return self.column in self.program.ops[s.source].dims

    @property
    def kept_outer(self) -> tuple[str, ...]:
        """Outer labels that the sums still have."""
        return tuple(d for d in self.outer if any(d in self._final_dims(s) for s in self.sums))

    def _final_dims(self, s: RowSum) -> tuple[str, ...]:
        return self.program.ops[s.final].dims

    @property
    def units(self) -> int:
        """Results of each sum: one for every element of the outer labels that it keeps."""
        return prod(extent(self.program.dims[d]) for d in self.kept_outer)

    @property
    def partials(self) -> int:
        """Partial results of each of them: one for every block that has some of its rows."""
        others = (d for d in self.outer if d not in self.kept_outer)
        return (self.walkers or 1) * prod(extent(self.program.dims[d]) for d in others)

    @property
    def pitch(self) -> int:
        """Elements of a partial result: whole rows, with padding."""
        return self.parts * self.covered

    @property
    def grid_blocks(self) -> int:
        """Number of blocks of the grid, if sums fix it."""
        return (self.walkers or 1) * self.outer_count * self.parts

    @property
    def slice_columns(self) -> int:
        """Columns that a block adds up at a time."""
        each = ceil_div(self.length * self.units, self.grid_blocks)
        return min(SLICE * ceil_div(each, SLICE), SLICE * ceil_div(self.length, SLICE))

    @property
    def slice_rows(self) -> int:
        """Rows that a thread reads at a time if each block has a slice of all rows."""
        across = power_of_two(ceil_div(self.slice_columns, self.schedule.vector))
        dims = [self.program.dims[d] for d in self.rows]
        if any(isinstance(d, Symbol) for d in dims):
            return MAX_SLICE_ROWS  # code does not depend on a hint
        down = max(1, self.threads // across)
        return min(MAX_SLICE_ROWS, ceil_div(self.row_count, down))

    @property
    def unsliced(self) -> str | None:
        """Reason why blocks must meet to complete sums over rows, or None."""
        if not self.sums:
            return "nothing is summed over rows"
        if self.parts > 1:
            return "rows are divided among blocks"
        if set(self.kept_outer) != set(self.outer):
            return "a sum is over labels of which a block has one element"
        if not all(self.has_columns(s) for s in self.sums):
            return "a value of each row is summed, for which a block needs whole rows"
        if any(level.sums for level in self.levels[1:]):
            return "what is summed needs a reduction along the row"
        if self.units * ceil_div(self.length, self.slice_columns) > self.grid_blocks:
            return "there are more slices than blocks"
        if self.slice_columns > self.threads * self.schedule.vector:
            return f"{self.threads} threads do not hold slices of {self.slice_columns} columns"
        if self.schedule.stages:
            return "slices are read straight to registers; use stages=0"
        return None

    @property
    def summed_loads(self) -> frozenset[int]:
        """Loads that sums over rows need."""
        found: set[int] = set()
        work = [s.source for s in self.sums]
        while work:
            i = work.pop()
            if i not in found:
                found.add(i)
                work += self.program.ops[i].inputs
        return frozenset(i for i in found if i in self.loads)

    @property
    def stages(self) -> int:
        """Slots of the shared-memory ring; 1 if tiles are read straight into registers."""
        return max(1, self.schedule.stages)

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Partial sums, and the counter at which blocks meet, if they do."""
        if not self.meets:
            return ()
        count = self.units * self.partials * len(self.sums) * self.pitch
        partials = Scratch((count,), "float32", False)
        return (partials,) if self.alone else (partials, Scratch((1,), "int32", True))

    # ------------------------------------------------------------------------------ shared memory

    @property
    def row_bytes(self) -> dict[int, int]:
        """Bytes of a row of each streamed load in a stage."""
        return {i: self.width * self.itemsize(self.loads[i]) for i in self.streamed}

    @property
    def scalar_bytes(self) -> dict[int, int]:
        """Bytes of a tile of each load of values of rows in a stage."""
        sizes = {i: self.tile_rows * self.itemsize(self.loads[i]) for i in self.scalars}
        return {i: BULK * ceil_div(n, BULK) for i, n in sizes.items()}

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        rows = self.tile_rows * sum(self.row_bytes.values())
        return LINE * ceil_div(rows + sum(self.scalar_bytes.values()), LINE)

    @property
    def overhang(self) -> int:
        """Bytes read past the ring's last row, where rows are shorter than a thread's reach."""
        sizes = [self.itemsize(self.loads[i]) for i in self.streamed]
        return BULK * ceil_div((self.covered - self.width) * max(sizes, default=0), BULK)

    @property
    def words(self) -> int:
        """Numbers that a thread hands over for a row, at all levels."""
        return sum(words_of(self.program, level.reductions) for level in self.levels)

    @property
    def slots(self) -> int:
        """Number of fp32 slots for a tile's reductions, twice: tiles take turns."""
        return 2 * (self.sent_slots + self.block_slots)

    @property
    def sent_slots(self) -> int:
        """Slots of a tile that all senders write.
        Rounded to 16-byte accesses if others follow: 2 senders with 32 warps each left 8 bytes for
        one reduction."""
        count = self.words * self.tile_rows * self.senders
        return 4 * ceil_div(count, 4) if self.block_slots else count

    @property
    def block_slots(self) -> int:
        """Slots of a tile that only the warps of the block write."""
        if not self.meets_in_block:
            return 0
        return 4 * ceil_div(self.words * self.tile_rows * self.warps_per_row, 4)

    @property
    def finish_bytes(self) -> int:
        """Shared memory of the end, in place of the ring: sums of all groups, then of a slice."""
        if not self.sums:
            return 0
        groups = self.schedule.groups * self.covered if self.schedule.groups > 1 else 0
        totals = len(self.sums) * self.slice_columns
        if self.schedule.sliced:
            return 4 * totals * (1 + ceil_div(self.threads, 32))
        return 4 * max(groups, totals + 4 * self.threads)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring, or of the data in its place at the end."""
        ring = self.schedule.stages * self.stage_bytes
        return max(BULK, ring + self.overhang if ring else 0, self.finish_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes: the ring, slots, barriers, and alignment."""
        barriers = max(1, self.schedule.stages) + 2 * len(self.levels)
        return self.ring_bytes + 4 * max(4, self.slots) + 8 * barriers + BULK

    def fits(self, target: Target) -> bool:
        """True if the blocks that share an SM find room in its shared memory."""
        each = self.shared_bytes + target.reserved_bytes
        return self.schedule.resident * each <= target.sm_shared_bytes
