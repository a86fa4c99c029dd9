"""Skeleton 2, the matmul loop: roles of the operations, memory plan, default schedule.

A block owns ``tile[row] x tile[column]`` results and walks the contracted label: a producer warp
fills a ring of stages with tiles of both operands, consumer warpgroups multiply, helper warps
reduce the row operand to its statistics and rewrite it where the program applies something to it
before the product. The operands are swapped: the column operand (the weight) is the 64-row side
of the tensor-core instruction, so that a batch of 1 to 8 rows wastes nothing but its padding to 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.graph.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    LOAD,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    TensorSpec,
)
from cutesuper.graph.check import check_block_program
from cutesuper.graph.dims import ceil_div, extent
from cutesuper.graph.hidden import MAX_HIDDEN
from cutesuper.graph.shift import MAX_SHIFTED_ROWS, find_shift
from cutesuper.graph.target import Target
from cutesuper.graph.thread import (
    ThreadExpression,
    fuse,
    multiply_by,
    only_divides,
    reciprocal,
)
from cutesuper.graph.vectors import MAX_VECTORS
from cutesuper.schedule.plan import (
    Argument,
    View,
    arguments_of,
    content_key,
    view_of,
)
from cutesuper.schedule.schedule import MatmulSchedule
from cutesuper.schedule.tails import ColumnReduction, Tail
from cutesuper.schedule.tiles import check_tiles, store_bytes, tile_grid, with_tiles
from cutesuper.schedule.vectors import (
    VectorProduct,
    VectorRows,
    products_of_vectors,
    refusal,
)

#: rows of the tensor-core instruction's first operand: the unit of the column label
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
        source: what is reduced, an expression over row-side loads.
        op: "sum" or "max".
        scale: factor applied to the complete reduction (1/K for a mean).
    """

    value: int
    source: ThreadExpression
    op: str
    scale: float


@dataclass(frozen=True)
class Output:
    """A stored tensor: an expression over accumulators, row values and loads."""

    view: View
    expression: ThreadExpression


@dataclass(frozen=True)
class Shift:
    """A value ``[row, contracted]`` from which a number of its row is subtracted: `graph.shift`.

    Attributes:
        value: the operation whose users see the difference.
        source: how it is computed, an expression over row-side loads.
        products: whether products see it too, and not only statistics.
    """

    value: int
    source: ThreadExpression
    products: bool


@dataclass(frozen=True)
class MatmulPlan:
    """A matmul-loop kernel, decided.

    Attributes:
        program: the block program; leaves of the expressions are its operations.
        arguments: tensor arguments in order, inputs first.
        row, column, contracted, batch: labels by role.
        rows: row-side loads that are staged as [row, contracted] tiles, by operation.
        vectors: row-side loads with the contracted label only (staged too), by operation.
        columns: the column operand of every product, by operation of the load.
        products: for every product the operation that completes its accumulator.
        prologue: what the products take as row operand, None where it is the first row load.
        statistics: row statistics, reduced in the same loop.
        row_values: expressions per row over statistics, by the operation they stand for.
        loads: loads of the epilogue, by operation.
        outputs: what is stored.
        tails: products after the loop.
        reductions: of accumulators along the columns, in order.
        schedule: the knobs.
        vector_rows: vectors that column operands are multiplied by as well, at most 8.
        vector_products: the row vectors that this gives.
        shift: the row-side value that is moved next to zero, None where nothing cancels.
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
        """Blocks that share one output tile, each with a part of the contracted label."""
        return self._cluster_along(self.contracted)

    @property
    def column_cluster(self) -> int:
        """Blocks that share one tile's rows, each with a part of the columns."""
        return self._cluster_along(self.column)

    def _cluster_along(self, label: str) -> int:
        axes = [a for a in self.program.of_kind(AxisKind.CLUSTER) if a.dim == label]
        return self.program.parts(axes[0]) if axes else 1

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster, whatever they share."""
        return self.cluster * self.column_cluster

    @property
    def finals(self) -> dict[int, int]:
        """Operations that complete accumulators of ``[row, column]``, and which ones."""
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
        """Blocks of 64 columns that consumer warpgroups share out, of every product."""
        return [self.blocks_n, *(t.blocks for t in self.tails if t.products)]

    def loaded(self, tail: Tail) -> View | None:
        """The row operand of a product after the loop, where it is a tensor in memory."""
        (leaf, *others) = tail.source.leaves
        view = self.loads.get(leaf)
        if others or not tail.source.trivial or view is None:
            return None
        if self.arguments[view.argument].dtype != self.dtype:
            return None
        return view if view.stride(tail.hidden) == 1 and view.stride(self.row) % 8 == 0 else None

    @property
    def hidden_blocks(self) -> int:
        """64-column blocks of all products along hidden labels."""
        return sum(t.blocks * len(t.products) for t in self.tails)

    @property
    def accumulators(self) -> int:
        """fp32 values that the consumers of a block hold of the products of rows."""
        m, n, _ = self.tile
        return m * (n * len(self.finals) + COLUMN_BLOCK * self.hidden_blocks)

    @property
    def vector_accumulators(self) -> int:
        """fp32 values that they hold of the products of vectors."""
        return MAX_VECTORS * self.tile[1] * len(self.vector_columns)

    @property
    def iterations(self) -> int:
        """Loop iterations of one block."""
        axes = self.program.of_kind(AxisKind.LOOP)
        return self.program.parts(axes[0]) if axes else 1

    @property
    def blocks_n(self) -> int:
        """64-column blocks of one product's tile."""
        return self.tile[1] // COLUMN_BLOCK

    @property
    def has_helpers(self) -> bool:
        """Whether helper warps read the row operand."""
        return bool(self.statistics) or self.rewrites

    @property
    def rewrites(self) -> bool:
        """Whether helper warps write what the tensor cores read."""
        return self.prologue is not None or bool(self.vector_rows)

    def staged(self, operation: int) -> View:
        """How a row-side load sees its tensor."""
        return self.rows[operation] if operation in self.rows else self.vectors[operation]

    @property
    def vector_columns(self) -> tuple[int, ...]:
        """The column operands that vectors are multiplied by."""
        return tuple(dict.fromkeys(p.column for p in self.vector_products))

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers per thread of (consumers, helpers, producer) where the equal share of all
        threads would not hold the accumulators; None where it does."""
        accumulators = self.accumulators + self.vector_accumulators
        if accumulators // (128 * self.schedule.warpgroups) <= 96:
            return None
        # together at most 65536 registers: 2 x 128 x 192 + 128 x 96 + 128 x 32, or
        # of the 384 x 168 with which 384 threads start 2 x 128 x 208 + 128 x 88 where helpers and
        # producer are one warpgroup, or
        # 2 x 128 x 232 + 128 x 40
        if not self.has_helpers:
            return 232, 0, 40
        return (192, 96, 32) if self.schedule.helpers == 4 else (208, 88, 88)

    @property
    def helpers(self) -> int:
        """Helper warps."""
        return self.schedule.helpers if self.has_helpers else 0

    @property
    def threads(self) -> int:
        """Consumer warpgroups, helper warps if there are any, and the producer warp (padded to a
        warpgroup where registers are handed over, which only whole warpgroups can do)."""
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
        """Bytes in which the reductions along the columns meet: a slot for each consumer warp,
        and one for each block of the cluster."""
        slots = 4 * self.schedule.warpgroups + self.column_cluster
        return 4 * self.tile[0] * slots * len(self.reductions)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one stage of the ring takes, with the tile of vectors."""
        return self.stage_bytes + 2 * MAX_VECTORS * self.tile[2] * bool(self.vector_rows)

    @property
    def vector_pairs(self) -> int:
        """Pairs of vectors: what one thread has of a column."""
        return ceil_div(len(self.vector_rows), 2)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that partial accumulators take in the block that finishes them."""
        m, n, _ = self.tile
        rows = m * len(self.finals) + 2 * self.vector_pairs * len(self.vector_columns)
        return 4 * n * rows if self.cluster > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with room for barriers, statistics and alignment."""
        m = self.tile[0]
        statistics = 4 * m * (self.cluster * len(self.statistics) + len(self.row_values))
        alignment = 3072 + 1024 * bool(self.vector_rows)
        after = self.tail_bytes + self.reduction_bytes + store_bytes(self)
        fixed = self.exchange_bytes + after + statistics + alignment
        return self.slot_bytes * self.schedule.stages + fixed

    @property
    def key(self) -> str:
        """Canonical text of everything that decides the generated code."""
        return content_key(self.program, self.arguments, self.schedule)


def plan_matmul(
    step: KernelStep,
    tensors: dict[str, TensorSpec],
    target: Target,
    schedule: MatmulSchedule | None = None,
    dependent_launch: bool = False,
) -> MatmulPlan:
    """Fit a block program with matrix products into the matmul loop.

    Raises:
        LoweringError: it has a structure that this skeleton cannot run.
        ScheduleError: it does not fit into the target's shared memory or registers.
    """
    if why := target.refuses_products():
        raise LoweringError(f"kernel {step.name}: {why}")
    roles = _Roles(step, arguments_of(step, tensors))
    plan = roles.plan(schedule or MatmulSchedule(stages=1))
    _check_limits(plan, step.name)
    if schedule is None:
        plan = replace(plan, schedule=_default_schedule(plan, target, dependent_launch))
    if plan.registers is not None and plan.schedule.warpgroups != 2:
        raise ScheduleError(
            f"kernel {step.name}: {plan.tile[0]}x{plan.tile[1]} accumulators need two consumer "
            "warpgroups, which share out blocks of 64 columns; use a tile with an even number of "
            f"them (it has {' and '.join(map(str, plan.shared_blocks))})"
        )
    check_tiles(plan, step.name)
    odd = [b for b in plan.shared_blocks if b % plan.schedule.warpgroups]
    if odd:
        raise ScheduleError(
            f"kernel {step.name}: {odd[0]} block(s) of 64 columns cannot be shared out over "
            f"{plan.schedule.warpgroups} consumer warpgroups"
        )
    if plan.shared_bytes > target.shared_bytes or plan.schedule.stages < 2:
        raise ScheduleError(
            f"kernel {step.name}: {plan.schedule.stages} stages of {plan.slot_bytes} bytes and "
            f"{plan.exchange_bytes} bytes of exchange do not fit into {target.shared_bytes} bytes "
            "of shared memory; use smaller tiles"
        )
    return plan


def _default_schedule(plan: MatmulPlan, target: Target, dependent_launch: bool) -> MatmulSchedule:
    # accumulators: m * n / 128 registers per thread and warpgroup for each product
    even = all(b % 2 == 0 for b in plan.shared_blocks)
    warpgroups = 2 if plan.accumulators // 128 > 64 and even else 1
    tiled = MatmulSchedule(0, warpgroups, dependent_launch=dependent_launch)
    tiled = with_tiles(plan, tiled, target)
    probe = replace(plan, schedule=tiled)
    room = target.shared_bytes - probe.shared_bytes
    stages = min(room // plan.slot_bytes, max(2, plan.iterations))
    if not dependent_launch and stages < plan.iterations:
        # more in flight only lengthens the queue that the activations wait in: on 16x4096x4096
        # 6 stages of 20 KB take 10.35 us, 8 take 10.6, 9 take 10.75
        stages = min(stages, max(4, 120 * 1024 // plan.stage_bytes))
    persistent = tiled.persistent if plan.iterations > stages else 0
    return replace(tiled, stages=stages, head=min(4, stages), persistent=persistent)


def _check_limits(plan: MatmulPlan, name: str) -> None:
    m, n, k = plan.tile
    where = f"kernel {name}"
    if plan.dtype not in ("float16", "bfloat16"):
        raise LoweringError(
            f"{where}: matrix products of {plan.dtype} have no tensor-core path that keeps their "
            "precision; use float16 or bfloat16 operands"
        )
    if m not in ROW_TILES or n % COLUMN_BLOCK or k % CHUNK:
        raise ScheduleError(
            f"{where}: tile {plan.row}={m} {plan.column}={n} {plan.contracted}={k}; rows must be "
            f"one of {ROW_TILES}, columns and depth multiples of {COLUMN_BLOCK}"
        )
    if plan.shift is not None and m > MAX_SHIFTED_ROWS:
        raise ScheduleError(
            f"{where}: tile {plan.row}={m}: rows that are shifted next to zero come in tiles of at "
            f"most {MAX_SHIFTED_ROWS}"
        )
    if plan.accumulators > 2 * 128 * 128:
        raise ScheduleError(f"{where}: {plan.accumulators} accumulators ({m}x{n} for each of "
                            f"{len(plan.finals)} result(s), and what the products after the loop "
                            "take) do not fit into the registers of two warpgroups")
    if (n // plan.cluster) % 8:
        raise ScheduleError(f"{where}: {n} columns cannot be shared out over {plan.cluster} blocks")
    tails = [t.view for t in plan.tails]
    staged = (*plan.rows.values(), *plan.columns.values(), *plan.vectors.values())
    for view in (*staged, *plan.hidden.values(), *tails):
        arg = plan.arguments[view.argument]
        if arg.dtype != plan.dtype:
            raise LoweringError(
                f"{where}: operands of {plan.dtype} and of {arg.dtype} ({arg.name}) in one kernel; "
                "give all operands of its products one element type"
            )
        odd = [s for s in view.strides if s != 1 and s % 8]
        if odd or (arg.shape and extent(arg.shape[-1]) % 8 and len(view.labels) > 1):
            raise LoweringError(
                f"{where}: rows of {arg.name}{list(map(str, arg.shape))} are not multiples of 16 "
                "bytes, which bulk tensor copies need; pad the last dimension to a multiple of 8"
            )
    _check_layout(where, plan.columns.values(), plan.column, plan.contracted)
    for t in plan.tails:
        inner = [plan.hidden[load] for load, _ in t.products]
        _check_layout(where, inner, t.hidden, plan.contracted)
        _check_layout(where, [t.view], plan.column, t.hidden)
    for i, view in plan.rows.items():
        if view.stride(plan.contracted) != 1:
            arg = plan.arguments[view.argument]
            raise LoweringError(
                f"{where}: row operand {arg.name} (operation {i}) must be contiguous along "
                f"{plan.contracted}"
            )


def _check_layout(where: str, views: Iterable[View], column: str, contracted: str) -> None:
    """Column operands that share an instruction must be stored in the same order."""
    strides = {(v.stride(column) == 1, v.stride(contracted) == 1) for v in views}
    if len(strides) > 1 or (False, False) in strides:
        raise LoweringError(
            f"{where}: the column operands must all be contiguous along {column}, or all along "
            f"{contracted}"
        )


class _Roles:
    """Gives every operation of a block program its place in the matmul loop."""

    def __init__(self, step: KernelStep, arguments: tuple[Argument, ...]) -> None:
        self.step = step
        self.program = step.program
        self.arguments = arguments
        self.where = f"kernel {step.name}"
        ops = self.program.ops
        products = [i for i, op in enumerate(ops) if op.kind == "matmul"]
        self.depends = self._dependencies(LOAD)
        after = self._dependencies("matmul")
        first = [ops[i].attributes["over"] for i in products if after[i] == {i}]
        if not first:
            raise LoweringError(f"{self.where}: it has no matrix product")
        # the longest label is the loop's: X W + T B, where T has 16 columns, contracts 16 after it
        self.contracted = max(first, key=lambda d: extent(self.program.dims[d]))
        looped = [i for i in products if ops[i].attributes["over"] == self.contracted]
        vector = (self.contracted,)
        of_rows = [i for i in looped if all(ops[j].dims != vector for j in ops[i].inputs)]
        if not of_rows:
            raise LoweringError(
                f"{self.where}: operation {looped[0]} multiplies a vector and a matrix, which "
                "the tensor cores do only beside a product of rows; multiply and sum instead"
            )
        #: products after the loop, and the labels that they contract
        self.tails = [i for i in products if i not in looped]
        self.hidden = {ops[i].attributes["over"] for i in self.tails}
        #: products of the loop: of the columns, and along hidden labels
        self.products = [i for i in of_rows if self.hidden.isdisjoint(ops[i].dims)]
        self.inner = [i for i in of_rows if i not in self.products]
        self._orient()
        sums = [i for i, op in enumerate(ops) if self._is_column_sum(op)]
        #: operations that multiply a column operand by a vector, or by ones
        self.vectors = sorted({*looped, *sums} - {*of_rows})
        if self.vectors and self.hidden:
            raise LoweringError(
                f"{self.where}: operation {self.vectors[0]} reduces a column operand by itself or "
                f"with a vector, beside a product after the loop (over {min(self.hidden)}); "
                "compute one of them in another kernel"
            )
        self.shifted = find_shift(self.program, self.row, self.column, self.contracted)
        if self.shifted is not None and self.shifted.refused:
            raise LoweringError(
                f"{self.where}: {self.shifted.refused}; compute it in a kernel before, from "
                "deviations: mean(square(x - mean(x)))"
            )

    def plan(self, schedule: MatmulSchedule) -> MatmulPlan:
        ops = self.program.ops
        row_operand = self._row_operand()
        finals = {i: self._complete(i) for i in self.products}
        columns = {self._column_operand(i): i for i in self.products}
        if len(columns) < len(self.products):
            raise LoweringError(f"{self.where}: two products are the same")
        tails = self._tails()
        finals, tails = self._shared_accumulators(finals, tails)
        statistics, reductions = self._statistics(), self._reductions()
        vector_rows, vector_products = products_of_vectors(
            self.program, self.vectors, self.column, self._complete,
            lambda i: fuse(self.program, i, self._is_load, f"{self.where}, vector {i}"),
        )
        if why := refusal(vector_rows, vector_products, set(columns)):
            raise LoweringError(f"{self.where}: {why}")
        shift = self._shift()
        sources = [s.source for s in statistics] + [row_operand]
        sources += [v for v in vector_rows if v is not None] + ([shift.source] if shift else [])
        row_loads = sorted({i for e in sources for i in e.leaves if self._is_load(i)})
        matrices = [i for i in row_loads if {self.row, self.contracted} <= set(ops[i].dims)]
        vectors = [i for i in row_loads if ops[i].dims == (self.contracted,)]
        odd = set(row_loads) - set(matrices) - set(vectors)
        if odd or not matrices:
            raise LoweringError(
                f"{self.where}: operation {min(odd, default=min(self.products + self.inner))} is "
                f"no operand that can be staged with labels {self.row}, {self.contracted}"
            )
        accumulators = {*finals.values(), *(t.final for t in tails)}
        accumulators |= {p.value for p in vector_products}
        ends = self._ends(accumulators, statistics, tails, reductions)
        moved = shift is not None and shift.products
        plain = row_operand.trivial and len(matrices) == 1 and not moved
        return MatmulPlan(
            program=self.program,
            arguments=self.arguments,
            row=self.row,
            column=self.column,
            contracted=self.contracted,
            batch=self.batch,
            rows={i: self._view(i) for i in matrices},
            vectors={i: self._view(i) for i in vectors},
            columns={i: self._view(i) for i in columns},
            products=tuple((load, finals[i]) for load, i in columns.items()),
            prologue=None if plain else row_operand,
            statistics=statistics,
            row_values=ends.row_values,
            loads=ends.loads,
            outputs=ends.outputs,
            tails=ends.tails,
            reductions=ends.reductions,
            schedule=schedule,
            vector_rows=vector_rows,
            vector_products=vector_products,
            shift=shift,
        )

    # ---------------------------------------------------------------------------- orientation

    def _orient(self) -> None:
        """Choose which operand is the column side, and with it the labels' roles."""
        ops = self.program.ops
        reference = (self.products or self.tails)[0]
        over = ops[reference].attributes["over"]
        a, b = (ops[i] for i in ops[reference].inputs)
        shared = set(a.dims) & set(b.dims) - {over}
        free_a = [d for d in a.dims if d not in shared and d != over]
        free_b = [d for d in b.dims if d not in shared and d != over]
        batch = shared | {d for d in (*free_a, *free_b) if self.program.tile[d] == 1}
        free_a = [d for d in free_a if d not in batch]
        free_b = [d for d in free_b if d not in batch]
        if len(free_a) > 1 or len(free_b) > 1:
            raise LoweringError(f"{self.where}: an operand has two labels that are tiled; only "
                                "one row label and one column label can be")
        self.batch = tuple(d for d in self.program.dims if d in batch)
        sides = [(free_a, free_b, 1), (free_b, free_a, 0)]
        sides.sort(key=lambda s: not self._last_in_store(s[1]))
        for rows, columns, side in sides:
            if self._fits(rows, columns, ops[reference].inputs[1 - side]):
                self.row, self.column = rows[0], columns[0]
                return
        raise LoweringError(
            f"{self.where}: no orientation fits: one operand of every product must be a tensor in "
            "memory whose free label is tiled by 64, the other must be contiguous along "
            f"{self.contracted} with a free label tiled by 8 to 256"
        )

    def _last_in_store(self, labels: list[str]) -> bool:
        last = [op.attributes["map"][-1] for op in self.program.stores()]
        return bool(labels) and all(d == labels[0] for d in last)

    def _fits(self, rows: list[str], columns: list[str], row_operand: int) -> bool:
        if len(rows) != 1 or len(columns) != 1:
            return False
        ops, tile = self.program.ops, self.program.tile
        if tile[columns[0]] % COLUMN_BLOCK or tile[rows[0]] not in ROW_TILES:
            return False
        for product in (*self.products, *self.inner, *self.tails):
            sides = ops[product].inputs
            free = self.hidden if product in self.inner else {columns[0]}
            if not any(self._is_load(i) and free & set(ops[i].dims) for i in sides):
                return False
        staged = {rows[0], self.contracted}
        matrices = [i for i in self.depends[row_operand] if staged <= set(ops[i].dims)]
        return all(self._view(i).stride(self.contracted) == 1 for i in matrices)

    # ---------------------------------------------------------------------------------- roles

    def _dependencies(self, kind: str) -> list[set[int]]:
        """For every operation those of a kind that it depends on, itself included."""
        result: list[set[int]] = []
        for i, op in enumerate(self.program.ops):
            mine = {i} if op.kind == kind else set[int]()
            result.append(mine.union(*(result[j] for j in op.inputs)))
        return result

    def _view(self, i: int) -> View:
        return view_of(self.program.ops[i], self.arguments)

    def _is_load(self, i: int) -> bool:
        return self.program.ops[i].kind == LOAD

    def _row_operand(self) -> ThreadExpression:
        ops = self.program.ops
        pairs = [(i, self._column_operand(i)) for i in (*self.products, *self.inner)]
        operands = {j for i, column in pairs for j in ops[i].inputs if j != column}
        if len(operands) > 1:
            raise LoweringError(f"{self.where}: products take different row operands")
        shifted = self.shifted is not None and self.shifted.products
        return self._row_side(operands.pop(), "row operand", shifted)

    def _row_side(self, i: int, what: str, shifted: bool = True) -> ThreadExpression:
        """An expression over row-side loads, and over what is shifted."""
        leaf = self.shifted.value if self.shifted is not None and shifted else None

        def is_leaf(j: int) -> bool:
            return j == leaf or self._is_load(j)

        return fuse(self.program, i, is_leaf, f"{self.where}, {what}")

    def _shift(self) -> Shift | None:
        if self.shifted is None:
            return None
        value, where = self.shifted.value, f"{self.where}, shifted rows"
        source = fuse(self.program, value, self._is_load, where)
        return Shift(value, source, self.shifted.products)

    def _is_column_sum(self, op: BlockOp) -> bool:
        """Whether an operation is a column operand's product with a vector of ones."""
        summed = op.kind == "sum" and op.attributes["over"] == self.contracted
        source = op.inputs[0] if summed else None
        free = {self.column, *self.hidden}
        return source is not None and self._is_load(source) and not free.isdisjoint(op.dims)

    def _column_operand(self, product: int) -> int:
        """The operand in memory, with a free label that is not the rows'."""
        ops = self.program.ops
        free = self.hidden if product in self.inner else {self.column}
        return next(
            i for i in ops[product].inputs
            if self._is_load(i) and free & set(ops[i].dims) and self.row not in ops[i].dims
        )

    def _axes(self, label: str, *kinds: AxisKind) -> set[str]:
        return {a.name for a in self.program.axes_of(label) if a.kind in kinds}

    def _users(self, value: int) -> list[int]:
        return [i for i, op in enumerate(self.program.ops) if value in op.inputs]

    def _complete(self, value: int, axes: set[str] | None = None) -> int:
        """Follow a value through its accumulate and cluster_reduce; the operation that ends it."""
        ops = self.program.ops
        if axes is None:
            axes = self._axes(self.contracted, AxisKind.LOOP, AxisKind.CLUSTER)
        while axes:
            users = self._users(value)
            kinds = (ACCUMULATE, CLUSTER_REDUCE)
            if len(users) != 1 or ops[users[0]].kind not in kinds:
                raise LoweringError(
                    f"{self.where}: the partial result of operation {value} is used before it is "
                    f"complete over {', '.join(sorted(axes))}"
                )
            value = users[0]
            axes = axes - {ops[value].attributes["axis"]}
        return value

    # ----------------------------------------------------------------------------------- tails

    def _tails(self) -> tuple[Tail, ...]:
        """Products after the loop; their sources are completed by `_ends`."""
        ops, loop = self.program.ops, self._axes(self.contracted, AxisKind.LOOP)
        ended = {i: self._complete(i, loop) for i in self.inner}
        states = check_block_program(self.program)
        found: list[Tail] = []
        for i in self.tails:
            label = ops[i].attributes["over"]
            whole = extent(self.program.dims[label])
            held = self.program.tile[label] == whole and not self.program.axes_of(label)
            if not held or whole > MAX_HIDDEN:
                raise LoweringError(
                    f"{self.where}: a product after the loop contracts {label} of {whole}; a "
                    f"block has to hold all of it, and can hold {MAX_HIDDEN}"
                )
            load = self._column_operand(i)
            (operand,) = (j for j in ops[i].inputs if j != load)
            products = tuple(
                (self._column_operand(p), ended[p]) for p in self.inner if label in ops[p].dims
            )
            cluster = self._axes(self.contracted, AxisKind.CLUSTER)
            pending = cluster & states[i].pending
            unfused = ThreadExpression((operand,), ())
            found.append(Tail(label, whole, products, unfused, load, self._view(load),
                              self._complete(i, pending), bool(cluster - pending)))
        if len({t.hidden for t in found}) < len(found):
            raise LoweringError(f"{self.where}: two products after the loop contract one label")
        return tuple(found)

    def _shared_accumulators(
        self, finals: dict[int, int], tails: tuple[Tail, ...]
    ) -> tuple[dict[int, int], tuple[Tail, ...]]:
        """Products whose results are only added up share their accumulators.

        before: ``add(c(X W), c(H B))``; after: both complete the sum.
        """
        ops = self.program.ops
        # by operation: the products and the products after the loop that complete it
        members = {v: ({i}, set[int]()) for i, v in finals.items()}
        for n, tail in enumerate(tails):
            members[tail.final] = (set(), {n})
        for total, op in enumerate(ops):
            known = op.kind == "add" and len(set(op.inputs)) == 2 and set(op.inputs) <= set(members)
            if not known or any(self._users(i) != [total] for i in op.inputs):
                continue
            (p, t), (q, u) = (members[i] for i in op.inputs)
            if t | u:
                members = {k: v for k, v in members.items() if k not in op.inputs}
                members[total] = (p | q, t | u)
        finals = {i: final for final, (products, _) in members.items() for i in products}
        of_tail = {n: final for final, (_, after) in members.items() for n in after}
        return finals, tuple(replace(t, final=of_tail[n]) for n, t in enumerate(tails))

    def _statistics(self) -> tuple[Statistic, ...]:
        ops = self.program.ops
        found: list[Statistic] = []
        for i, op in enumerate(ops):
            along_columns = op.kind in REDUCTIONS and op.attributes["over"] == self.column
            if op.kind not in REDUCTIONS or along_columns or i in self.vectors:
                continue
            if op.attributes["over"] != self.contracted or self.column in op.dims:
                raise LoweringError(
                    f"{self.where}: {op.kind} over {op.attributes['over']} (operation {i}) is no "
                    f"row statistic over {self.contracted}"
                )
            source = self._row_side(op.inputs[0], f"statistic {i}")
            found.append(Statistic(self._complete(i), source, *self._reduced(op)))
        return tuple(found)

    def _reductions(self) -> tuple[ColumnReduction, ...]:
        """Reductions along the columns; their sources are completed by `_ends`."""
        found: list[ColumnReduction] = []
        for i, op in enumerate(self.program.ops):
            if op.kind not in REDUCTIONS or op.attributes["over"] != self.column:
                continue
            if self._axes(self.column, *(k for k in AxisKind if k != AxisKind.CLUSTER)):
                raise LoweringError(
                    f"{self.where}: {op.kind} over {self.column} (operation {i}) needs all columns "
                    "in one block, or in one cluster"
                )
            if self._axes(self.contracted, AxisKind.CLUSTER):
                raise LoweringError(
                    f"{self.where}: {op.kind} over {self.column} (operation {i}) of products that "
                    f"a cluster shares along {self.contracted}"
                )
            final = self._complete(i, self._axes(self.column, AxisKind.CLUSTER))
            source = ThreadExpression(op.inputs, ())
            found.append(ColumnReduction(final, source, *self._reduced(op)))
        return tuple(found)

    def _reduced(self, op: BlockOp) -> tuple[str, float]:
        """How partial results are combined, and what the complete one is multiplied by."""
        mean = op.kind == "mean"
        scale = 1.0 / extent(self.program.dims[op.attributes["over"]]) if mean else 1.0
        return "max" if op.kind == "max" else "sum", scale

    def _ends(
        self,
        accumulators: set[int],
        statistics: tuple[Statistic, ...],
        tails: tuple[Tail, ...],
        reductions: tuple[ColumnReduction, ...],
    ) -> _Ends:
        """Fuse what stands between the loop and the stores."""
        ops = self.program.ops
        accumulators = accumulators | {f for t in tails for _, f in t.products}
        reduced = {s.value for s in statistics}
        along_columns = {r.value for r in reductions}
        per_row = set(self.batch) | {self.row}
        uses_statistic, uses_other = [False] * len(ops), [False] * len(ops)
        for i, op in enumerate(ops):
            uses_statistic[i] = i in reduced or any(uses_statistic[j] for j in op.inputs)
            direct = op.kind == LOAD or i in along_columns
            direct = direct or any(uses_other[j] for j in op.inputs)
            uses_other[i] = i not in reduced and direct

        def is_row_value(i: int) -> bool:
            return uses_statistic[i] and not uses_other[i] and set(ops[i].dims) <= per_row

        def is_leaf(i: int) -> bool:
            known = i in accumulators or i in along_columns
            return known or is_row_value(i) or self._is_load(i)

        def fused(e: ThreadExpression, what: str) -> ThreadExpression:
            return fuse(self.program, e.leaves[0], is_leaf, f"{self.where}, {what}")

        stores: list[Output] = []
        for op in self.program.stores():
            what = f"store of {op.attributes['tensor']}"
            if between := self.hidden & set(op.dims):
                raise LoweringError(
                    f"{self.where}, {what}: what lies between two products ({', '.join(between)}) "
                    "stays in the block; store it by another kernel"
                )
            expression = fused(ThreadExpression(op.inputs, ()), what)
            if not (accumulators | along_columns) & set(expression.leaves):
                raise LoweringError(f"{self.where}, {what}: it does not depend on a product")
            stores.append(Output(view_of(op, self.arguments), expression))
        ends = _Ends(
            tuple(stores),
            tuple(replace(t, source=fused(t.source, f"product over {t.hidden}")) for t in tails),
            tuple(
                replace(r, source=fused(r.source, f"reduction over {self.column}"))
                for r in reductions
            ),
            {}, {},
        )  # fmt: skip
        leaves = sorted({leaf for e in ends.expressions for leaf in e.leaves})

        def is_statistic(i: int) -> bool:
            return i in reduced

        where = f"{self.where}, row values"
        ends = replace(
            ends,
            row_values={
                i: fuse(self.program, i, is_statistic, where) for i in leaves if is_row_value(i)
            },
            loads={i: self._view(i) for i in leaves if self._is_load(i)},
        )
        for i in ends.row_values:
            # one reciprocal for each row in place of a division for every element
            if only_divides(ends.expressions, i):
                ends = ends.inverted(i)
        return ends


@dataclass(frozen=True)
class _Ends:
    """What happens to the accumulators: fused expressions and their leaves."""

    outputs: tuple[Output, ...]
    tails: tuple[Tail, ...]
    reductions: tuple[ColumnReduction, ...]
    row_values: dict[int, ThreadExpression]
    loads: dict[int, View]

    @property
    def expressions(self) -> list[ThreadExpression]:
        """All of them."""
        sources = [x.source for x in (*self.tails, *self.reductions)]
        return [o.expression for o in self.outputs] + sources

    def inverted(self, i: int) -> _Ends:
        """With the reciprocal of a row value, which multiplies where the value divided."""
        return _Ends(
            tuple(replace(o, expression=multiply_by(o.expression, i)) for o in self.outputs),
            tuple(replace(t, source=multiply_by(t.source, i)) for t in self.tails),
            tuple(replace(r, source=multiply_by(r.source, i)) for r in self.reductions),
            {**self.row_values, i: reciprocal(self.row_values[i])},
            self.loads,
        )


def grid_shape(plan: MatmulPlan, row_extent: int | None = None) -> tuple[int, int, int]:
    """Blocks along (columns x cluster, rows, batch); ``row_extent`` where it is symbolic."""
    dims, (m, n, _) = plan.program.dims, plan.tile
    rows = extent(dims[plan.row]) if row_extent is None else row_extent
    batch = 1
    for d in plan.batch:
        batch *= extent(dims[d])
    columns = ceil_div(extent(dims[plan.column]), n)
    return tile_grid(plan, columns, ceil_div(rows, m), batch)
