"""The plan of a matmul loop: places of all data, their sizes, and the limits of a block.

A block owns ``tile[row] x tile[column]`` results and walks over the contracted label: a producer
warp fills a ring of stages with tiles of both operands (TMA), consumer warpgroups multiply (WGMMA),
helper warps reduce the row operand to its statistics and rewrite it if the program has a prologue,
or reduce rows once for the whole grid while consumers multiply the columns by what scales the rows.
The operands are swapped: the column operand (the weight) is the 64-row side of the WGMMA
instruction, so that a batch of 1 to 8 rows wastes only its padding to 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd, isfinite, prod
from typing import Any, TypeVar

from cutesuper.ir.block import AxisKind, BlockProgram
from cutesuper.ir.dims import Symbol, ceil_div, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.precision import EXACT, precision_of
from cutesuper.ir.thread import ThreadExpression
from cutesuper.skeletons.base import (
    Argument,
    Indexed,
    Limit,
    Output,
    Plan,
    Scratch,
    View,
    exceeded_accumulators,
    same_places,
    view_of,
)
from cutesuper.skeletons.kernel.hostmath import HostMath
from cutesuper.skeletons.matmul.copies import (
    HALF_BYTES,
    PIECE,
    TURN_BYTES,
    CopiedTile,
    depth,
    step,
    turns,
    unaligned,
)
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.targets import Target

#: rows of the WGMMA instruction's first operand: the unit of the column label
COLUMN_BLOCK = 64
#: 16-bit elements of a 128-byte shared-memory row, the unit of the contracted label, and of an
#: instruction's step along it
CHUNK, STEP = 64, 16
#: rows of a box of a row operand whose rows lie side by side in memory
ROW_BOX = 64
#: rows of a tile: any multiple of the first, the second at most
ROW_UNIT, MAX_ROWS = 8, 256
#: the same of fp32 operands, whose sums and words take more registers
MAX_WIDE_ROWS = 128
#: unit of the rows of an instruction that multiplies for two blocks
JOINT_ROWS = 32
#: most accumulators of a thread if all threads of a block have equally many registers
EQUAL_SHARE = 96
#: registers of a consumer thread beside its accumulators
BESIDE_ACCUMULATORS = 40
#: most accumulators of a block: 192 x 256 over two warpgroups, whose threads have 232 registers
MAX_ACCUMULATORS = 2 * 128 * (232 - BESIDE_ACCUMULATORS)
#: rows of the smallest WGMMA instruction: all vectors of a kernel are one more tile of them
MAX_VECTORS = 8
#: most blocks along the second and along the third side of a grid
MAX_SIDE = 65535
#: rows up to which a kernel reads weights and does little else
FEW_ROWS = 64
#: most rows of a tile that is shifted: with 256 rows, of which a thread of the helper warps has 16,
#: numbers to subtract and sums take 16 bytes of stack
MAX_SHIFTED_ROWS = 128
#: most elements of a hidden label that a block holds: 256 for 64 rows are 32 KB of shared memory,
#: and 128 registers of each thread of a warpgroup while they are accumulated
MAX_HIDDEN = 256
#: columns of a box in shared memory, for the swizzles of 32, 64 and 128 bytes
_WIDTHS = (16, 32, 64)
#: rows and columns of one bulk store: 128-byte rows, as the swizzle requires
STORE_ROWS, STORE_COLUMNS = 32, 64
#: most tensors that are loaded in pieces: each takes 24 to 32 KB of two warpgroups
MAX_PIECED = 2


def hidden_width(extent: int, narrow: bool) -> int:
    """Number of columns of a hidden label, ``(X A) B``, that are staged.

    The WGMMA instruction takes 64. For a short label it may read the memory behind it, as those
    products are never used: padding 16 columns to 64 took 13.5 us where 16 take 11 (16x4096x4096,
    rank 16), and 16.9 where they are stored (16, 4096).

    Args:
        extent: extent of the label.
        narrow: True if enough readable memory lies behind the label.
    """
    if narrow and extent <= _WIDTHS[-1]:
        return next(w for w in _WIDTHS if w >= extent)
    return 64 * ceil_div(extent, 64)


@dataclass(frozen=True)
class Tail:
    """A product after the loop, whose operand the loop has accumulated.

    before: ``X W + (X A) B`` with A of 16 columns; after: one loop accumulates X W and H = X A,
    then ``H B`` is added from shared memory: one kernel, which reads X once.

    Attributes:
        hidden: the label that it contracts; a block holds the whole of it.
        extent: extent of that label.
        products: products of the loop, ``[row, hidden]``: column operand, and operation of the
            accumulator.
        source: the row operand, an expression over accumulators of ``products``, row values and
            loads.
        load: its column operand ``[hidden, column]``.
        view: the view of ``load``.
        final: the operation that its result completes; a product of the loop with the same one
            shares its accumulators.
        once: True if it is complete although a cluster shares the loop: one block adds it.
    """

    hidden: str
    extent: int
    products: tuple[tuple[int, int], ...]
    source: ThreadExpression
    load: int
    view: View
    final: int
    once: bool

    @property
    def blocks(self) -> int:
        """Number of 64-element blocks that the hidden label takes in the WGMMA instruction."""
        return ceil_div(self.extent, 64)

    @property
    def padded(self) -> int:
        """Elements of the hidden label in the row operand."""
        return 64 * self.blocks

    def width(self, narrow: bool) -> int:
        """Number of columns staged of every product of the loop; see `hidden_width`."""
        return hidden_width(self.extent, narrow)


@dataclass(frozen=True)
class ColumnReduction:
    """A reduction of accumulators along the columns, one value for each row.

    before: ``sum_N relu(X W) v``; after: every block sums over its columns, and the blocks of a
    cluster that have the other columns add their sums.

    Attributes:
        value: the operation that completes it.
        source: the reduced expression over accumulators, row values, loads and earlier reductions.
        op: name of the monoid.
        scale: factor applied to the complete reduction (1/N for a mean).
    """

    value: int
    source: ThreadExpression
    op: str
    scale: float


@dataclass(frozen=True)
class VectorProduct:
    """A row vector ``[column]``, of a product ``G[K] @ W[K, N]`` beside ``X[M, K] @ W[K, N]``.

    The vectors are the rows of one more tile, of 8 rows, in every stage of the ring; the helper
    warps write it, and the tensor cores multiply it by the column operands that are staged already.
    A thread's accumulators for it belong to the same columns as those for the rows.

    Attributes:
        column: the load of the column operand.
        vector: index of the vector in `MatmulPlan.vector_rows`.
        value: the operation that completes it.
    """

    column: int
    vector: int
    value: int


#: contents of a tile of vectors: expressions over staged vectors, or None for ones
VectorRows = tuple[ThreadExpression | None, ...]
T = TypeVar("T")


class structural(cached_property[T]):
    """A cached property of a plan that follows from its structure.
    The structure is operations, labels, extents of dimensions and tensors. `MatmulPlan.resized`
    keeps the property. A search plans a structure at hundreds of extents, and half of that time
    went into finding such properties again."""


@dataclass(frozen=True)
class Statistic:
    """A reduction of the row side over the contracted label.

    Attributes:
        value: the reduced operation's index once it is complete.
        source: the reduced value, an expression over row-side loads.
        op: name of the monoid.
        scale: factor applied to the complete reduction (1/K for a mean).
    """

    value: int
    source: ThreadExpression
    op: str
    scale: float


@dataclass(frozen=True)
class Shift:
    """A value ``[row, contracted]`` from which a number of its row is subtracted.
    See `skeletons.matmul.shift`.

    Attributes:
        value: the operation whose users see the difference.
        source: its expression over row-side loads.
        products: True if products see it too, and not only statistics.
    """

    value: int
    source: ThreadExpression
    products: bool


@dataclass(frozen=True)
class MatmulPlan(Plan[MatmulSchedule]):
    """The plan of a matmul-loop kernel.

    Attributes:
        program: the block program; leaves of the expressions are its operations.
        arguments: tensor arguments in order, inputs first.
        row, column, contracted, batch: labels by role.
        rows: row-side loads that are staged as [row, contracted] tiles, by operation.
        vectors: row-side loads with the contracted label only (staged too), by operation.
        columns: the column operand of every product, by operation of the load.
        products: for every product, the operation that completes its accumulator.
        prologue: the row operand of the products, None if it is the first row load.
        factor: the vector ``[contracted]``, over vector loads, if the prologue multiplies the only
            row load by it and does nothing else; else None.
        statistics: row statistics, reduced in the same loop, or once for the grid.
        row_values: expressions per row over statistics, by the operation they stand for.
        loads: loads of the epilogue, by operation.
        outputs: the stored tensors.
        tails: products after the loop.
        reductions: reductions of accumulators along the columns, in order.
        schedule: the kernel's knobs.
        vector_rows: vectors by which column operands are multiplied as well, at most 8.
        vector_products: the row vectors that these give.
        shift: the row-side value that is moved next to zero, None if nothing cancels.
        beside: the plans of the same program for other columns, which further tiles of the launch
            compute, of the same shape and from the same rows; `BlockProgram.alternatives`.
    """

    program: BlockProgram
    arguments: tuple[Argument, ...]
    row: str
    column: str
    contracted: str
    batch: tuple[str, ...]
    rows: dict[int, View]
    vectors: dict[int, View]
    columns: dict[int, View]
    products: tuple[tuple[int, int], ...]
    prologue: ThreadExpression | None
    statistics: tuple[Statistic, ...]
    row_values: dict[int, ThreadExpression]
    loads: dict[int, View]
    outputs: tuple[Output, ...]
    tails: tuple[Tail, ...]
    reductions: tuple[ColumnReduction, ...]
    schedule: MatmulSchedule
    vector_rows: VectorRows = ()
    vector_products: tuple[VectorProduct, ...] = ()
    shift: Shift | None = None
    factor: ThreadExpression | None = None
    beside: tuple[MatmulPlan, ...] = ()

    def scheduled(self, schedule: MatmulSchedule) -> MatmulPlan:
        """The plan with another schedule; cached properties depend on none, and stay."""
        beside = tuple(p.scheduled(schedule) for p in self.beside)
        return _made(vars(self), schedule=schedule, beside=beside)

    def resized(self, program: BlockProgram) -> MatmulPlan:
        """The plan of the same structure at other extents; structural properties stay."""
        stays = {name: value for name, value in vars(self).items() if name in _STAYS}
        beside = tuple(p.resized(program) for p in self.beside)
        return _made(stays, program=program, beside=beside)

    @structural
    def turned(self) -> bool:
        """True if the rows lie side by side in memory, X stored (K, M).
        Else they lie one behind the other."""
        return next(iter(self.rows.values())).stride(self.row) == 1

    @property
    def sections(self) -> tuple[MatmulPlan, ...]:
        """The plan itself, and those of other columns."""
        return (self, *self.beside)

    @property
    def section_tiles(self) -> list[int]:
        """Tiles along the columns of each section, in whole clusters that share a row tile."""
        share = self.schedule.share_rows
        return [share * ceil_div(p.column_tiles, share) for p in self.sections]

    @property
    def column_tiles(self) -> int:
        """Tiles along its own columns."""
        return ceil_div(extent(self.program.dims[self.column]), self.tile[1])

    @structural
    def dtype(self) -> str:
        """Element type of the operands."""
        return self.arguments[next(iter(self.rows.values())).argument].dtype

    @structural
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return as_dtype(self.dtype).itemsize

    @structural
    def halves(self) -> int:
        """The same in 16 bits."""
        return self.element_bytes // HALF_BYTES

    @structural
    def chunk(self) -> int:
        """Elements of an operand in a shared-memory row of 128 bytes."""
        return CHUNK // self.halves

    @structural
    def step(self) -> int:
        """Elements of an instruction's step along the contracted label."""
        return STEP // self.halves

    @structural
    def split(self) -> bool:
        """True if products take fp32 operands as two TF32 numbers each, to keep their precision."""
        exact = any(
            op.facets.contracts and precision_of(op.attributes) == EXACT for op in self.program.ops
        )
        return self.element_bytes == 4 and exact

    @structural
    def rounds(self) -> bool:
        """True if bulk loads round fp32 operands to TF32."""
        return self.element_bytes == 4 and not self.split

    @structural
    def column_major(self) -> bool:
        """True if the column operands are contiguous along the columns: weights stored (K, N)."""
        return any(v.stride(self.column) == 1 for v in self.columns.values())

    @structural
    def gathers(self) -> bool:
        """True if consumers bring the column operands to registers.
        TF32 products take nothing from shared memory that is not contiguous along the contracted
        label, and no fp32 numbers."""
        return self.element_bytes == 4 and (self.split or self.column_major)

    @property
    def doubles(self) -> bool:
        """True if an instruction may take two blocks of columns at once, where there is one.
        Bulk loads of weights (N, K) lay 16 columns of one and 16 of the other in turn."""
        more = self.tails or self.vector_products or self.copied or self.gathers
        views = [v for p in self.sections for v in p.columns.values()]
        extents = [p.program.dims[p.column] for p in self.sections]
        whole = all(isinstance(n, int) and n % COLUMN_BLOCK == 0 for n in extents)
        return (
            not more
            and not self.column_major
            and whole
            and self.tile[2] == self.chunk
            and self.instruction_rows % 16 == 0
            and self.blocks_n % (2 * self.schedule.warpgroups) == 0
            and all(len({*self.batch} & {*v.labels}) <= 1 for v in views)
        )

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """The accumulated sum that the epilogue adds, as in `Plan.in_place`.
        Only if no other output needs it that may be stored later. Not where the last piece of a
        tile begins within the one before, and would be read after that was written."""
        if self.beside or (self.tile[0] > STORE_ROWS and self.tile[0] % STORE_ROWS):
            return ()
        loads = [v for side in (self.rows, self.vectors, self.columns, self.loads)
                 for v in side.values()]  # fmt: skip
        views = [o.view for o in self.outputs]
        return tuple(
            (x.argument, y.argument)
            for x, y in same_places(self, self.column, loads, views)
            if not any(o.view != y and self._needs(o, x) for o in self.outputs)
        )

    def _needs(self, output: Output, view: View) -> bool:
        return any(self.loads.get(i) == view for i in output.expression.leaves)

    @cached_property
    def tile(self) -> tuple[int, int, int]:
        """Tile extents (row, column, contracted)."""
        t = self.program.tile
        return t[self.row], t[self.column], t[self.contracted]

    @cached_property
    def cluster(self) -> int:
        """Blocks that share one output tile, each with a part of the contracted label (split-K)."""
        return self.program.parts_along(self.contracted, AxisKind.CLUSTER)

    @cached_property
    def parts(self) -> int:
        """Blocks of the grid that share one output tile, each with a part of the contracted label.
        They meet in device memory."""
        return self.program.parts_along(self.contracted, AxisKind.GRID)

    @property
    def ranks(self) -> int:
        """Parts of the contracted label, in a cluster or over the grid."""
        return self.cluster * self.parts

    @cached_property
    def tiles(self) -> int:
        """Number of output tiles; symbolic extents count with their hint."""
        dims, (m, n, _) = self.program.dims, self.tile
        batch = prod(extent(dims[d]) for d in self.batch)
        return batch * ceil_div(extent(dims[self.row]), m) * ceil_div(extent(dims[self.column]), n)

    @property
    def launched(self) -> int:
        """Blocks of the grid; symbolic extents count with their hint."""
        return prod(grid_shape(self))

    @property
    def numbered(self) -> bool:
        """True if blocks lie in one row of the grid, since they are too many for its other sides.
        Symbolic extents are not counted."""
        rows, *batch = (self.program.dims[d] for d in (self.row, *self.batch))
        down = ceil_div(rows, self.tile[0]) if isinstance(rows, int) else 1
        return max(down, self.parts * prod(d for d in batch if isinstance(d, int))) > MAX_SIDE

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Device memory in which blocks meet.
        Partial sums of the grid's parts, and a counter for every tile; or the statistics of all
        rows, and one counter."""
        if self.schedule.reduces_once:
            sums = len(self.statistics) * extent(self.program.dims[self.row])
            return Scratch((sums,), "float32", False), Scratch((1,), "int32", True)
        if self.parts == 1:
            return ()
        m, n, _ = self.tile
        count = self.tiles * self.parts * len(self.finals) * m * n
        return Scratch((count,), "float32", False), Scratch((self.tiles,), "int32", True)

    @cached_property
    def column_cluster(self) -> int:
        """Blocks that share one tile's rows, each with a part of the columns."""
        return self.program.parts_along(self.column, AxisKind.CLUSTER)

    @cached_property
    def cluster_size(self) -> int:
        """Blocks of a cluster, whichever label they share."""
        return self.cluster * self.column_cluster

    @structural
    def finals(self) -> dict[int, int]:
        """Operations that complete accumulators of ``[row, column]``, with these accumulators."""
        ops = dict.fromkeys([f for _, f in self.products] + [t.final for t in self.tails])
        return {op: i for i, op in enumerate(ops)}

    @structural
    def hidden(self) -> dict[int, View]:
        """Column operands of the loop's products along hidden labels, by operation."""
        ops = self.program.ops
        loads = (load for t in self.tails for load, _ in t.products)
        return {load: view_of(ops[load], self.arguments) for load in loads}

    @cached_property
    def shared_blocks(self) -> list[int]:
        """For every product, the number of 64-column blocks that consumer warpgroups share."""
        return [self.blocks_n, *(t.blocks for t in self.tails if t.products)]

    def loaded(self, tail: Tail) -> View | None:
        """The row operand of a product after the loop, if it is a tensor in memory; else None."""
        (leaf, *others) = tail.source.leaves
        view = self.loads.get(leaf)
        if others or not tail.source.trivial or view is None:
            return None
        if self.arguments[view.argument].dtype != self.dtype:
            return None
        return view if view.stride(tail.hidden) == 1 and view.stride(self.row) % 8 == 0 else None

    @structural
    def copied(self) -> dict[int, View]:
        """The staged operands that threads copy, by operation: see `skeletons.matmul.copies`."""
        after = {t.load: t.view for t in self.tails}
        return unaligned(self.rows | self.columns | self.hidden | after, self.chunk // 8)

    @structural
    def narrow(self) -> bool:
        """True if boxes of hidden labels may be narrow: only what bulk loads write lies behind."""
        return bool(self.columns) and self.copied.keys() <= self.rows.keys()

    @property
    def copiers(self) -> int:
        """Warps that copy operands."""
        return self.copier_warps(self.schedule)

    def copier_warps(self, schedule: MatmulSchedule) -> int:
        """Warps that copy operands: with all others they are a block of 512 threads."""
        helpers = schedule.helpers * self.has_helpers
        return 15 - 4 * schedule.warpgroups - helpers if self.copied else 0

    def word_turns(self, warps: int) -> int:
        """Turns for whose words each of so many copier warps has room."""
        staged = self.copied_tiles.values()
        return max(1, depth(staged) * turns(staged, warps))

    @structural
    def hidden_blocks(self) -> int:
        """Number of 64-column blocks of all products along hidden labels."""
        return sum(t.blocks * len(t.products) for t in self.tails)

    @cached_property
    def accumulators(self) -> int:
        """fp32 values that the consumers of a block hold for the products of rows."""
        m, n, _ = self.tile
        return m * (n * len(self.finals) + COLUMN_BLOCK * self.hidden_blocks) + self.added

    @cached_property
    def vector_accumulators(self) -> int:
        """fp32 values that they hold for the products of vectors."""
        return MAX_VECTORS * self.tile[1] * len(self.vector_columns)

    @property
    def added(self) -> int:
        """Accumulators that ordinary instructions add up: those of split operands."""
        m, n, _ = self.tile
        return m * n * len(self.finals) * self.split

    @property
    def multiplied(self) -> int:
        """32-bit numbers of a block that products read and write, or threads gather of a chunk."""
        words = COLUMN_BLOCK * self.chunk * self.blocks_n * len(self.products) * (1 + self.split)
        sums = self.accumulators - self.added + self.vector_accumulators
        # columns of two groups of steps, two of them in a word
        scaled = COLUMN_BLOCK * STEP * self.scaled_steps * self.blocks_n * len(self.products)
        return sums + words * self.gathers + scaled * self.schedule.scales_columns

    @property
    def thread_accumulators(self) -> int:
        """Accumulators of each thread of the consumers, with the sums that it adds up."""
        return (self.multiplied + self.added) // (128 * self.schedule.warpgroups)

    @cached_property
    def iterations(self) -> int:
        """Loop iterations of one block; at its hint for a symbolic extent."""
        return self.program.parts_along(self.contracted, AxisKind.LOOP)

    @property
    def open_depth(self) -> bool:
        """True if the extent of the contracted label is known at the call."""
        return isinstance(self.program.dims[self.contracted], Symbol)

    @property
    def blocks_n(self) -> int:
        """Number of 64-column blocks of one product's tile."""
        return self.tile[1] // COLUMN_BLOCK

    @property
    def has_helpers(self) -> bool:
        """True if helper warps read the row operand."""
        return bool(self.statistics) or self.rewrites

    @property
    def reads_stages(self) -> bool:
        """True if they read it from the ring."""
        return self.has_helpers and not self.schedule.reduces_once

    @property
    def splits_statistics(self) -> bool:
        """True if blocks that share a row tile each read a part of its rows, for all of them.
        Not if each has to write the whole operand to its own shared memory anyway."""
        s = self.schedule
        whole = self.rewrites_rows or s.reduces_once
        return s.share_rows > 1 and (s.joint or not whole)

    @property
    def scaled_steps(self) -> int:
        """Steps along the contracted label whose columns a thread brings together, and scales.
        Those of a chunk, or of half of it if it has more than one block of columns."""
        one = self.blocks_n * len(self.products) <= self.schedule.warpgroups
        return CHUNK // STEP // (1 if one else 2)

    @property
    def rewrites(self) -> bool:
        """True if helper warps write the operand that the tensor cores read."""
        return self.rewrites_rows or bool(self.vector_rows)

    @property
    def rewrites_rows(self) -> bool:
        """True if that operand is the rows."""
        return self.split or (self.prologue is not None and not self.schedule.scales_columns)

    @structural
    def can_scale_columns(self) -> bool:
        """True if consumers may multiply the columns by the factor of the rows.
        Columns that nothing but the products of many rows needs; of bfloat16, since weights times
        a gain may be smaller than what float16 holds. Behind the last element factors and columns
        are computed from zeros, and must be numbers."""
        more = self.tails or self.vector_rows or self.shift or self.turned or self.copied
        if self.factor is None or self.dtype != "bfloat16" or not self.many_rows:
            return False
        return not (more or self.open_depth) and _is_finite_at_zero(self.factor)

    @property
    def can_reduce_once(self) -> bool:
        """True if one block may reduce a row's statistics for all.
        Of many rows, whose number is known, that lie one behind the other in memory."""
        more = self.rewrites or self.shift or self.turned or self.copied or self.batch
        more = more or unaligned(self.vectors, PIECE)
        known = not isinstance(self.program.dims[self.row], Symbol) and not self.open_depth
        whole = known and extent(self.program.dims[self.contracted]) % PIECE == 0
        alone = self.stands_alone and self.element_bytes == 2 and self.many_rows
        return bool(self.statistics) and alone and whole and not more

    def meet_at_once(self, target: Target) -> bool:
        """True if all blocks, or clusters of them, run at the same time."""
        size = self.cluster_size * self.schedule.share_rows
        return self.launched <= size * target.clusters.get(size, 0)

    @property
    def meets(self) -> bool:
        """True if all blocks of the grid wait for each other, and are launched together."""
        return self.parts > 1 or self.schedule.reduces_once

    def staged(self, operation: int) -> View:
        """A row-side load's view of its tensor."""
        return self.rows[operation] if operation in self.rows else self.vectors[operation]

    @structural
    def vector_columns(self) -> tuple[int, ...]:
        """The column operands by which vectors are multiplied."""
        return tuple(dict.fromkeys(p.column for p in self.vector_products))

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers per thread of (consumers, helpers, producer); None for an equal share.
        An equal share does if it holds the accumulators."""
        if self.thread_accumulators <= EQUAL_SHARE:
            return None
        # together at most 65536 registers: 2 x 128 x 192 + 128 x 96 + 128 x 32, or of the 384 x 168
        # with which 384 threads start 2 x 128 x 208 + 128 x 88 where helpers and producer are one
        # warpgroup, or 2 x 128 x 232 + 128 x 40; with copiers 2 x 128 x 176 + 2 x 128 x 80
        if self.copiers:
            return (176, 88, 72) if self.helpers == 4 else (176, 80, 80)
        if not self.has_helpers:
            return 232, 0, 40
        return (192, 96, 32) if self.schedule.helpers == 4 else (208, 88, 88)

    @property
    def instruction_rows(self) -> int:
        """Rows of one instruction.
        512 threads start with 128 registers each, and one of 256 rows needs 154; the compiler
        refuses it even if registers are handed over later."""
        m = self.tile[0]
        return m if m <= 128 or self.threads <= 384 else m // 2

    @property
    def helpers(self) -> int:
        """Helper warps."""
        return self.schedule.helpers if self.has_helpers else 0

    @property
    def threads(self) -> int:
        """Threads of consumer warpgroups, helpers, copiers and issuer if any, and the producer.
        The producer is padded to a warpgroup if registers are handed over, which only whole
        warpgroups can do."""
        others = 32 * (self.helpers + 1 + self.copiers + self.schedule.issuer)
        if self.registers is not None:
            others = 128 * ceil_div(others, 128)
        return 128 * self.schedule.warpgroups + others

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes that are loaded into one stage of the ring."""
        _, n, k = self.tile
        hidden = sum(t.width(self.narrow) * len(t.products) for t in self.tails)
        columns = len(self.columns) * n + hidden
        return self.element_bytes * k * (columns + len(self.vectors)) + self.row_bytes

    @cached_property
    def copied_tiles(self) -> dict[int, CopiedTile]:
        """The tiles of a stage that threads copy, by operation."""
        m, n, k = self.tile
        free = dict.fromkeys(self.rows, (self.row, m)) | dict.fromkeys(
            self.columns, (self.column, n)
        )
        for t in self.tails:
            free |= dict.fromkeys((x for x, _ in t.products), (t.hidden, t.width(self.narrow)))
        own = (self.contracted, k)
        return {
            op: CopiedTile.of(self.copied[op], self.halves, f, own)
            for op, f in free.items()
            if op in self.copied
        }

    @cached_property
    def copied_after(self) -> dict[int, CopiedTile]:
        """The tiles of the products after the loop that threads copy, by operation."""
        tails = [t for t in self.tails if t.load in self.copied]
        column = self.column, self.tile[1]
        return {
            t.load: CopiedTile.of(t.view, self.halves, column, (t.hidden, t.padded)) for t in tails
        }

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage that copier warps bring."""
        return sum(t.bytes for t in self.copied_tiles.values())

    @property
    def bulk_bytes(self) -> int:
        """Bytes of a stage that bulk loads bring to a block."""
        return self.held_bytes - self.copied_bytes

    @property
    def held_rows(self) -> int:
        """Rows of a tile that a block has in its shared memory."""
        s = self.schedule
        return self.tile[0] // (s.share_rows if s.joint else 1)

    @property
    def held_bytes(self) -> int:
        """Bytes of a stage's tiles that a block has in its shared memory."""
        m, _, _ = self.tile
        return self.stage_bytes - self.row_bytes * (m - self.held_rows) // m

    @property
    def row_bytes(self) -> int:
        """Bytes of the row tiles in a stage."""
        m, _, k = self.tile
        return self.element_bytes * k * len(self.rows) * m

    @property
    def tail_bytes(self) -> int:
        """Bytes of the operands of the products after the loop."""
        m, n, _ = self.tile
        return self.element_bytes * sum((m + n) * t.padded for t in self.tails)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that one stage of the ring takes, with the tiles that helper warps add.
        Those of vectors, and of the rows' low parts."""
        m, _, k = self.tile
        rows = MAX_VECTORS * bool(self.vector_rows) + m * self.split
        return self.stage_bytes + self.element_bytes * k * rows

    @property
    def vector_pairs(self) -> int:
        """Number of pairs of vectors: a thread has one pair of values for a column."""
        return ceil_div(len(self.vector_rows), 2)

    @cached_property
    def exchange_bytes(self) -> int:
        """Bytes that partial accumulators take in the block that finishes them."""
        if self.cluster == 1:
            return 0
        m, n, _ = self.tile
        return 4 * n * (m * len(self.finals) + 2 * self.vector_pairs * len(self.vector_columns))

    @structural
    def many_rows(self) -> bool:
        """True if the products take as long as the weights."""
        return extent(self.program.dims[self.row]) > FEW_ROWS

    @property
    def staggered(self) -> bool:
        """True if blocks begin their loops at different steps of the contracted label.
        Where each has one tile, and reads weights once, along that label, and not together with
        another block."""
        s = self.schedule
        alone = s.stream_columns and s.share_rows == 1 and not s.persistent
        return alone and not (self.column_major or self.copied or self.open_depth)

    @cached_property
    def exchange_in_ring(self) -> bool:
        """True if partial sums arrive in the ring, once all blocks of the cluster have read it.
        Few rows leave room for both: 64x128 fp32 are 32 KB."""
        alone = not (self.tails or self.vector_rows)
        return self.cluster > 1 and alone and self.many_rows

    def reduction_bytes(self, schedule: MatmulSchedule) -> int:
        """Bytes for joining the reductions along the columns.
        A slot for each consumer warp, and one for each block of the cluster."""
        slots = 4 * schedule.warpgroups + self.column_cluster
        return 4 * self.tile[0] * slots * len(self.reductions)

    @property
    def pieced(self) -> tuple[int, ...]:
        """Loads of the epilogue, such as residuals, that come as bulk loads.
        In the same pieces as the output leaves in, to the same buffers."""
        return self.pieces if self.can_bulk_store else ()

    @structural
    def pieces(self) -> tuple[int, ...]:
        """The same if tiles are large enough for bulk stores."""
        found = tuple(
            op for op, v in self.loads.items()
            if {self.row, self.column} <= set(v.labels) and v.stride(self.column) == 1
            and self.arguments[v.argument].dtype in ("float16", "bfloat16") and step(v) == PIECE
        )  # fmt: skip
        few = len(self.outputs) == 1 and len(found) <= MAX_PIECED
        alone = not self.program.alternatives
        return found if few and alone and self.many_rows else ()

    def store_bytes(self, schedule: MatmulSchedule) -> int:
        """Bytes of the pieces on their way to memory."""
        buffers = schedule.pieces * max(1, len(self.pieced)) * schedule.warpgroups
        piece = self.element_bytes * STORE_ROWS * STORE_COLUMNS
        return piece * buffers * schedule.bulk_store

    def fixed_bytes(self, schedule: MatmulSchedule) -> int:
        """Shared memory of a block beside the ring, in bytes.
        With room for barriers, statistics and alignment, and with a schedule whose stages need not
        be known."""
        m = self.tile[0]
        statistics = 4 * m * (self.cluster * len(self.statistics) + len(self.row_values))
        alignment = 3072 + 1024 * bool(self.vector_rows)
        after = self.tail_bytes + self.reduction_bytes(schedule) + self.store_bytes(schedule)
        warps = self.copier_warps(schedule)
        copied = warps * self.word_turns(warps) * TURN_BYTES if warps else 0
        exchange = 0 if self.exchange_in_ring else self.exchange_bytes
        return exchange + after + statistics + alignment + copied

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        slot = self.slot_bytes - self.stage_bytes + self.held_bytes
        return slot * self.schedule.stages + self.fixed_bytes(self.schedule)

    @property
    def group(self) -> int:
        """Row tiles of a group that blocks walk over together.
        Those that need the fewest rows and columns at a time, among the divisors of the number of
        clusters, with which a cluster stays in its row tile."""
        m, n, _ = self.tile
        share = self.schedule.share_rows
        clusters = max(1, self.schedule.persistent // share)
        divisors = (g for g in range(1, clusters + 1) if clusters % g == 0)
        return min(divisors, key=lambda g: g * m + clusters // g * share * n)

    @property
    def stands_alone(self) -> bool:
        """True if a block finishes its tile by itself, from the loop's accumulators."""
        beside = self.tails or self.reductions or self.vector_rows or self.shift is not None
        return self.cluster_size * self.parts == 1 and not beside

    @structural
    def store_piece(self) -> int:
        """Elements in which rows of all outputs with columns can be stored: 1, 2, 4 or 8.
        They have 16 bits; 0 if columns are no neighbours in memory or elements are wider."""
        views = [o.view for o in self.outputs if self.column in o.view.labels]
        contiguous = all(v.stride(self.column) == 1 for v in views)
        narrow = all(self.arguments[v.argument].dtype in ("float16", "bfloat16") for v in views)
        places = [n for v in views for n in v.places]
        length = extent(self.program.dims[self.column])
        return gcd(PIECE, length, *places) if contiguous and narrow else 0

    @cached_property
    def can_bulk_store(self) -> bool:
        """True if all outputs can be written with bulk stores."""
        # a static extent of 1 would vanish from the tensor map, and so would the second of the
        # pieces of columns if the tensor has one
        dims = self.program.dims
        rows = self.tile[0] >= STORE_ROWS and dims[self.row] != 1
        one = any(extent(dims[p.column]) <= STORE_COLUMNS < self.tile[1] for p in self.sections)
        return (
            self.stands_alone and rows and not one and all(p.stores_pieces for p in self.sections)
        )

    @structural
    def stores_pieces(self) -> bool:
        """True if rows of all outputs can be stored in pieces of the operands' type."""
        named = any(isinstance(o.view, Indexed) for o in self.outputs)
        return self.store_piece == PIECE and self.element_bytes == 2 and not named


#: the attributes of a plan that do not depend on its extents
_STAYS = frozenset(f.name for f in fields(MatmulPlan)) | {
    name for name, value in vars(MatmulPlan).items() if isinstance(value, structural)
}


def _made(kept: dict[str, Any], **changed: Any) -> MatmulPlan:
    """A plan with these attributes, whose fields and kept properties need no check."""
    plan = object.__new__(MatmulPlan)
    vars(plan).update(kept, **changed)
    return plan


def tile_grid(plan: MatmulPlan, rows: int, batch: int) -> tuple[int, int, int]:
    """The launch grid for ``rows`` row tiles of each slice of the batch."""
    s = plan.schedule
    if s.hand_out:
        return sum(plan.section_tiles) * rows * batch, 1, 1
    if s.persistent:
        return s.persistent, 1, 1
    along = sum(plan.section_tiles) * plan.cluster
    if plan.numbered:
        return along * rows * batch * plan.parts, 1, 1
    return along, rows, batch * plan.parts


def grid_shape(plan: MatmulPlan, row_extent: int | None = None) -> tuple[int, int, int]:
    """Blocks along (columns x cluster, rows, batch); ``row_extent`` serves symbolic rows."""
    dims, m = plan.program.dims, plan.tile[0]
    rows = extent(dims[plan.row]) if row_extent is None else row_extent
    batch = 1
    for d in plan.batch:
        batch *= extent(dims[d])
    return tile_grid(plan, ceil_div(rows, m), batch)


# ------------------------------------------------------------------------------------------ limits


def _is_finite_at_zero(factor: ThreadExpression) -> bool:
    """True if an expression has a value where all of its leaves are 0."""
    try:
        return isfinite(factor.evaluate([0.0] * len(factor.leaves), HostMath()))
    except (ArithmeticError, ValueError):
        return False


def takes_rows(m: int) -> bool:
    """True if an instruction, or two of them, multiply tiles of ``m`` rows."""
    return m % ROW_UNIT == 0 and 0 < m <= MAX_ROWS


def exceeded_by_tile(plan: MatmulPlan) -> Limit | None:
    """The limit that a plan's tile exceeds with every schedule; None if there is none."""
    m, n, k = plan.tile
    most = MAX_ROWS if plan.element_bytes == 2 else MAX_WIDE_ROWS
    if not takes_rows(m) or m > most or n % COLUMN_BLOCK or k % plan.chunk:
        return Limit(
            "tiles that the tensor cores do not take",
            f"tile {plan.row}={m} {plan.column}={n} {plan.contracted}={k}; rows must be a multiple "
            f"of {ROW_UNIT} up to {most}, columns of {COLUMN_BLOCK} and depth of {plan.chunk}",
        )
    if plan.turned and m % ROW_BOX:
        return Limit(
            "tiles that the tensor cores do not take",
            f"tile {plan.row}={m}: rows that lie side by side in memory come in boxes of {ROW_BOX}",
        )
    if plan.shift is not None and m > MAX_SHIFTED_ROWS:
        return Limit(
            "too many rows to be shifted",
            f"tile {plan.row}={m}: rows that are shifted next to zero come in tiles of at most "
            f"{MAX_SHIFTED_ROWS}",
        )
    if plan.accumulators > MAX_ACCUMULATORS:
        return Limit(
            "accumulators exceed the registers",
            f"{plan.accumulators} accumulators ({m}x{n} for each of {len(plan.finals)} result(s), "
            "and what the products after the loop take) do not fit into the registers of two "
            "warpgroups",
        )
    if plan.parts > 1 and (mistake := _bad_parts(plan)):
        return Limit("what the parts of a grid cannot share", mistake)
    if (n // plan.cluster) % 8:
        return Limit(
            "columns that a cluster cannot share out",
            f"{n} columns cannot be shared out over {plan.cluster} blocks",
        )
    return None


def _bad_parts(plan: MatmulPlan) -> str:
    """The reason why the grid cannot divide the contracted label; empty if it can."""
    more = plan.statistics or plan.tails or plan.reductions or plan.vector_rows or plan.shift
    outer = (plan.row, *plan.batch)
    if more or plan.cluster_size > 1:
        return (
            f"the grid divides {plan.contracted} into {plan.parts} parts, whose partial sums are "
            "all that blocks leave for each other: no statistics, products after the loop, "
            "reductions along the columns, or clusters"
        )
    if any(isinstance(plan.program.dims[d], Symbol) for d in outer):
        return (
            f"the grid divides {plan.contracted} into {plan.parts} parts that wait for each other: "
            "the number of tiles must be known"
        )
    return ""


def exceeded(plan: MatmulPlan, target: Target) -> Limit | None:
    """The limit that a plan exceeds with its schedule; None if there is none."""
    s = plan.schedule
    waits = plan.cluster_size * s.share_rows > 1 or plan.meets
    # blocks whose products are joint take all the room, and so the same places
    held = max(plan.multiplied, s.joint * (target.accumulators or 0))
    return (
        _exceeded_registers(plan)
        or exceeded_accumulators(plan, held, waits, target)
        or _exceeded_sharing(plan, target)
        or _exceeded_device(plan, target)
    )


def _exceeded_registers(plan: MatmulPlan) -> Limit | None:
    """The limit of registers that the accumulators of a thread exceed."""
    if plan.registers is not None and plan.schedule.warpgroups != 2:
        return Limit(
            "accumulators exceed the registers",
            f"{plan.tile[0]}x{plan.tile[1]} accumulators need two consumer warpgroups, which share "
            "out blocks of 64 columns; use a tile with an even number of them (it has "
            f"{' and '.join(map(str, plan.shared_blocks))})",
        )
    each = plan.thread_accumulators
    if plan.registers is not None and each > plan.registers[0] - BESIDE_ACCUMULATORS:
        return Limit(
            "accumulators exceed the registers",
            f"{each} accumulators of a thread, which has {plan.registers[0]} registers beside "
            f"{plan.helpers} helper warps; use a smaller tile",
        )
    return None


def _exceeded_sharing(plan: MatmulPlan, target: Target) -> Limit | None:
    """The limit that instructions, blocks or warpgroups exceed which share tiles."""
    s, unit = plan.schedule, ROW_BOX if plan.turned else ROW_UNIT
    if plan.instruction_rows % unit:
        return Limit(
            "tiles that the tensor cores do not take",
            f"{plan.threads} threads multiply tiles of {plan.tile[0]} rows by halves, which are no "
            f"multiples of {unit}; use 2 helper warps, or a multiple of {2 * unit} rows",
        )
    if mistake := next(_bad_knobs(plan), None):
        return Limit("tiles that blocks cannot share, walk over or store", mistake)
    if s.hand_out and not target.hands_out:
        return Limit(
            "tiles that blocks cannot share, walk over or store",
            f"hand_out={s.hand_out}: {target.name} ({target.arch}) does not hand out blocks that "
            "have not started; use hand_out=False",
        )
    if s.issuer and target.accumulators is None:
        return Limit(
            "tiles that blocks cannot share, walk over or store",
            f"issuer={s.issuer}: accumulators of {target.name} ({target.arch}) are registers of "
            "the warpgroups that multiply; use issuer=False",
        )
    if s.joint and not target.joint:
        return Limit(
            "tiles that blocks cannot share, walk over or store",
            f"joint={s.joint}: no instruction of {target.name} ({target.arch}) multiplies for two "
            "blocks; use joint=False",
        )
    if odd := [b for b in plan.shared_blocks if b % s.warpgroups]:
        return Limit(
            "columns that warpgroups cannot share out",
            f"{odd[0]} block(s) of 64 columns cannot be shared out over {s.warpgroups} consumer "
            "warpgroups",
        )
    return None


def _exceeded_device(plan: MatmulPlan, target: Target) -> Limit | None:
    """The limit of multiprocessors, or of the shared memory of one, that a plan exceeds."""
    s = plan.schedule
    if s.reduces_once and not plan.meet_at_once(target):
        return Limit(
            "blocks that wait for each other exceed the multiprocessors",
            f"{plan.launched} blocks in clusters of {plan.cluster_size * s.share_rows} wait for "
            f"the statistics of each other's rows, and do not run at once on the {target.sms} "
            f"multiprocessors of {target.name}; use blocks that walk, or reduces_once=False",
        )
    if s.scales_columns and target.accumulators is not None:
        return Limit(
            "tiles that blocks cannot share, walk over or store",
            f"scales_columns={s.scales_columns}: no instruction of {target.name} ({target.arch}) "
            "takes columns from registers; use scales_columns=False",
        )
    if plan.parts > 1 and plan.parts * plan.tiles > target.sms:
        return Limit(
            "blocks that wait for each other exceed the multiprocessors",
            f"{plan.parts} parts of {plan.contracted} in each of {plan.tiles} tiles wait for each "
            f"other, and {target.sms} blocks run at once; use fewer parts",
        )
    short = plan.exchange_in_ring and s.stages * plan.held_bytes < plan.exchange_bytes
    if plan.shared_bytes > target.shared_bytes or s.stages < 2 or short:
        return Limit(
            "stages exceed the shared memory",
            f"{s.stages} stages of {plan.slot_bytes} bytes and {plan.exchange_bytes} bytes of "
            f"exchange do not fit into {target.shared_bytes} bytes of shared memory; use smaller "
            "tiles",
        )
    return None


def _bad_knobs(plan: MatmulPlan) -> Iterator[str]:
    """Reasons why tiles cannot be shared, walked over or stored as the schedule demands."""
    s, m = plan.schedule, plan.tile[0]
    if (s.share_rows > 1 or s.persistent) and not plan.stands_alone:
        yield (
            f"share_rows={s.share_rows} and persistent={s.persistent} need tiles without clusters, "
            "products after the loop and reductions along the columns; use 1 and 0"
        )
    if s.share_rows not in (1, 2, 4, 8) or m % (8 * s.share_rows):
        yield (
            f"share_rows={s.share_rows}; use 1, 2, 4 or 8 blocks that load at least 8 of the {m} "
            "rows each"
        )
    if s.joint and (s.share_rows != 2 or plan.turned or not plan.doubles or m % JOINT_ROWS
                    or plan.instruction_rows != m):  # fmt: skip
        yield (
            f"joint={s.joint} needs share_rows=2 and instructions that take two blocks of columns, "
            f"of weights ({plan.column}, {plan.contracted}), and all rows, in multiples of "
            f"{JOINT_ROWS} that lie one behind the other in memory, not {m}; use joint=False"
        )
    if s.share_rows > 1 and (single := [p.column for p in plan.sections if p.column_tiles == 1]):
        # a dimension of one tile has no coordinates outside: both blocks would store that tile
        yield f"share_rows={s.share_rows} blocks along {single[0]}, which has one tile; use 1"
    if (s.share_rows > 1 or s.persistent) and plan.copied:
        yield (
            f"share_rows={s.share_rows} and persistent={s.persistent} need operands that bulk "
            f"loads can address; threads copy {plan.names(plan.copied.values())}; use 1 and 0"
        )
    if s.persistent % s.share_rows:
        yield f"persistent={s.persistent} blocks are no whole clusters of {s.share_rows}"
    if s.scales_columns and not plan.can_scale_columns:
        yield (
            f"scales_columns={s.scales_columns} needs bfloat16 rows, more than {FEW_ROWS}, that "
            "are multiplied by a vector and by columns alone; use scales_columns=False"
        )
    if s.reduces_once and not plan.can_reduce_once:
        yield (
            f"reduces_once={s.reduces_once} needs statistics of a known number of 16-bit rows, "
            f"more than {FEW_ROWS}, without batches, clusters and what rewrites the rows; use "
            "reduces_once=False"
        )
    if s.persistent and plan.reads_stages and plan.iterations <= s.stages:
        # only the ring keeps helpers and consumers one tile apart
        yield (
            f"persistent={s.persistent}: blocks with helper warps that walk need more iterations "
            f"than stages, not {plan.iterations} and {s.stages}"
        )
    if s.issuer and (s.joint or plan.tails or plan.gathers):
        yield (
            f"issuer={s.issuer} needs products of one block, of operands in shared memory, and "
            "none after the loop; use issuer=False"
        )
    if s.hand_out and s.reduces_once:
        yield (
            f"hand_out={s.hand_out} and reduces_once={s.reduces_once}: blocks whose tiles others "
            "take do not start, and would be waited for; use hand_out=False"
        )
    if s.hand_out and not s.persistent:
        yield f"hand_out={s.hand_out} needs blocks that walk; use persistent={plan.tiles}"
    if s.pieces < 2:
        yield f"pieces={s.pieces}; one leaves while the next one is computed, so use 2 at least"
    if s.helpers not in (2, 4):
        yield f"{s.helpers} helper warps; use 2 or 4"
    if s.bulk_store and not plan.can_bulk_store:
        yield (
            "bulk stores need outputs of 16-bit elements that are contiguous along "
            f"{plan.column} in multiples of 8, {STORE_ROWS} rows in a tile at least, no cluster, "
            "and nothing between the loop and the epilogue"
        )
