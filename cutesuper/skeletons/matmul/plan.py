"""Skeleton 2, the matmul loop: roles of the operations, memory plan, default schedule.

A block owns ``tile[row] x tile[column]`` results and walks over the contracted label: a producer
warp fills a ring of stages with tiles of both operands (TMA), consumer warpgroups multiply (WGMMA),
helper warps reduce the row operand to its statistics and rewrite it if the program has a prologue.
The operands are swapped: the column operand (the weight) is the 64-row side of the WGMMA
instruction, so that a batch of 1 to 8 rows wastes only its padding to 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutesuper.ir.block import (
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.dims import ceil_div, extent
from cutesuper.ir.thread import (
    ThreadExpression,
)
from cutesuper.skeletons.base import (
    Argument,
    Output,
    Plan,
    View,
    view_of,
)
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.matmul.tails import ColumnReduction, Tail
from cutesuper.skeletons.matmul.tiles import store_bytes, tile_grid
from cutesuper.skeletons.matmul.vector_roles import (
    VectorProduct,
    VectorRows,
)
from cutesuper.skeletons.matmul.vectors import MAX_VECTORS

#: rows of the WGMMA instruction's first operand: the unit of the column label
COLUMN_BLOCK = 64
#: elements of a 128-byte shared-memory row: the unit of the contracted label
CHUNK = 64
ROW_TILES = (8, 16, 32, 64, 128, 256)
REDUCTIONS = ("sum", "mean", "max")


@dataclass(frozen=True)
class Statistic:
    """A reduction of the row side over the contracted label.

    Attributes:
        value: the reduced operation's index once it is complete.
        source: the reduced value, an expression over row-side loads.
        op: "sum" or "max".
        scale: factor applied to the complete reduction (1/K for a mean).
    """

    value: int
    source: ThreadExpression
    op: str
    scale: float


@dataclass(frozen=True)
class Shift:
    """A value ``[row, contracted]`` from which a number of its row is subtracted: see
    `skeletons.matmul.shift`.

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
        statistics: row statistics, reduced in the same loop.
        row_values: expressions per row over statistics, by the operation they stand for.
        loads: loads of the epilogue, by operation.
        outputs: the stored tensors.
        tails: products after the loop.
        reductions: reductions of accumulators along the columns, in order.
        schedule: the kernel's knobs.
        vector_rows: vectors by which column operands are multiplied as well, at most 8.
        vector_products: the row vectors that these give.
        shift: the row-side value that is moved next to zero, None if nothing cancels.
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

    @property
    def dtype(self) -> str:
        """Element type of the operands."""
        return self.arguments[next(iter(self.rows.values())).argument].dtype

    @property
    def tile(self) -> tuple[int, int, int]:
        """Tile extents (row, column, contracted)."""
        t = self.program.tile
        return t[self.row], t[self.column], t[self.contracted]

    @property
    def cluster(self) -> int:
        """Blocks that share one output tile, each with a part of the contracted label (split-K)."""
        return self.program.parts_along(self.contracted, AxisKind.CLUSTER)

    @property
    def column_cluster(self) -> int:
        """Blocks that share one tile's rows, each with a part of the columns."""
        return self.program.parts_along(self.column, AxisKind.CLUSTER)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster, whichever label they share."""
        return self.cluster * self.column_cluster

    @property
    def finals(self) -> dict[int, int]:
        """Operations that complete accumulators of ``[row, column]``, with these accumulators."""
        ops = dict.fromkeys([f for _, f in self.products] + [t.final for t in self.tails])
        return {op: i for i, op in enumerate(ops)}

    @property
    def hidden(self) -> dict[int, View]:
        """Column operands of the loop's products along hidden labels, by operation."""
        ops = self.program.ops
        loads = (load for t in self.tails for load, _ in t.products)
        return {load: view_of(ops[load], self.arguments) for load in loads}

    @property
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

    @property
    def hidden_blocks(self) -> int:
        """Number of 64-column blocks of all products along hidden labels."""
        return sum(t.blocks * len(t.products) for t in self.tails)

    @property
    def accumulators(self) -> int:
        """fp32 values that the consumers of a block hold for the products of rows."""
        m, n, _ = self.tile
        return m * (n * len(self.finals) + COLUMN_BLOCK * self.hidden_blocks)

    @property
    def vector_accumulators(self) -> int:
        """fp32 values that they hold for the products of vectors."""
        return MAX_VECTORS * self.tile[1] * len(self.vector_columns)

    @property
    def iterations(self) -> int:
        """Loop iterations of one block."""
        axes = self.program.of_kind(AxisKind.LOOP)
        return self.program.parts(axes[0]) if axes else 1

    @property
    def blocks_n(self) -> int:
        """Number of 64-column blocks of one product's tile."""
        return self.tile[1] // COLUMN_BLOCK

    @property
    def has_helpers(self) -> bool:
        """True if helper warps read the row operand."""
        return bool(self.statistics) or self.rewrites

    @property
    def rewrites(self) -> bool:
        """True if helper warps write the operand that the tensor cores read."""
        return self.prologue is not None or bool(self.vector_rows)

    def staged(self, operation: int) -> View:
        """A row-side load's view of its tensor."""
        return self.rows[operation] if operation in self.rows else self.vectors[operation]

    @property
    def vector_columns(self) -> tuple[int, ...]:
        """The column operands by which vectors are multiplied."""
        return tuple(dict.fromkeys(p.column for p in self.vector_products))

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers per thread of (consumers, helpers, producer) if an equal share for all threads
        would not hold the accumulators; None if it does."""
        accumulators = self.accumulators + self.vector_accumulators
        if accumulators // (128 * self.schedule.warpgroups) <= 96:
            return None
        # together at most 65536 registers: 2 x 128 x 192 + 128 x 96 + 128 x 32, or of the 384 x 168
        # with which 384 threads start 2 x 128 x 208 + 128 x 88 where helpers and producer are one
        # warpgroup, or 2 x 128 x 232 + 128 x 40
        if not self.has_helpers:
            return 232, 0, 40
        return (192, 96, 32) if self.schedule.helpers == 4 else (208, 88, 88)

    @property
    def helpers(self) -> int:
        """Helper warps."""
        return self.schedule.helpers if self.has_helpers else 0

    @property
    def threads(self) -> int:
        """Threads of consumer warpgroups, helper warps if there are any, and the producer warp
        (padded to a warpgroup if registers are handed over, which only whole warpgroups can do)."""
        others = 32 * (self.helpers + 1)
        if self.registers is not None:
            others = 128 * ceil_div(others, 128)
        return 128 * self.schedule.warpgroups + others

    @property
    def stage_bytes(self) -> int:
        """Bytes that the producer loads into one stage of the ring."""
        m, n, k = self.tile
        hidden = sum(t.width(bool(self.columns)) * len(t.products) for t in self.tails)
        columns = len(self.columns) * n + hidden
        return 2 * k * (columns + len(self.rows) * m + len(self.vectors))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the operands of the products after the loop."""
        m, n, _ = self.tile
        return sum(2 * (m + n) * t.padded for t in self.tails)

    @property
    def reduction_bytes(self) -> int:
        """Bytes for joining the reductions along the columns: a slot for each consumer warp, and
        one for each block of the cluster."""
        slots = 4 * self.schedule.warpgroups + self.column_cluster
        return 4 * self.tile[0] * slots * len(self.reductions)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one stage of the ring takes, with the tile of vectors."""
        return self.stage_bytes + 2 * MAX_VECTORS * self.tile[2] * bool(self.vector_rows)

    @property
    def vector_pairs(self) -> int:
        """Number of pairs of vectors: a thread has one pair of values for a column."""
        return ceil_div(len(self.vector_rows), 2)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that partial accumulators take in the block that finishes them."""
        m, n, _ = self.tile
        rows = m * len(self.finals) + 2 * self.vector_pairs * len(self.vector_columns)
        return 4 * n * rows if self.cluster > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes, with room for barriers, statistics and alignment."""
        m = self.tile[0]
        statistics = 4 * m * (self.cluster * len(self.statistics) + len(self.row_values))
        alignment = 3072 + 1024 * bool(self.vector_rows)
        after = self.tail_bytes + self.reduction_bytes + store_bytes(self)
        fixed = self.exchange_bytes + after + statistics + alignment
        return self.slot_bytes * self.schedule.stages + fixed


def grid_shape(plan: MatmulPlan, row_extent: int | None = None) -> tuple[int, int, int]:
    """Blocks along (columns x cluster, rows, batch); ``row_extent`` serves symbolic rows."""
    dims, (m, n, _) = plan.program.dims, plan.tile
    rows = extent(dims[plan.row]) if row_extent is None else row_extent
    batch = 1
    for d in plan.batch:
        batch *= extent(dims[d])
    columns = ceil_div(extent(dims[plan.column]), n)
    return tile_grid(plan, columns, ceil_div(rows, m), batch)
