"""Skeleton 2, the matmul loop: roles of the operations, memory plan, default schedule.

A block owns ``tile[row] x tile[column]`` results and walks the contracted label: a producer warp
fills a ring of stages with tiles of both operands, consumer warpgroups multiply, helper warps
reduce the row operand to its statistics and rewrite it where the program applies something to it
before the product. The operands are swapped: the column operand (the weight) is the 64-row side
of the tensor-core instruction, so that a batch of 1 to 8 rows wastes nothing but its padding to 8.
"""

from __future__ import annotations

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
from cutesuper.graph.dims import ceil_div, extent
from cutesuper.graph.shift import find_shift
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
HELPER_WARPS = 4


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
        axes = self.program.of_kind(AxisKind.CLUSTER)
        return self.program.parts(axes[0]) if axes else 1

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

    def loaded(self, operation: int) -> View:
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
        m, n, _ = self.tile
        accumulators = n * (m * len(self.products) + MAX_VECTORS * len(self.vector_columns))
        if accumulators // (128 * self.schedule.warpgroups) <= 96:
            return None
        # together at most 65536 registers: 2 x 128 x 192 + 128 x 96 + 128 x 32, or
        # 2 x 128 x 232 + 128 x 40
        return (192, 96, 32) if self.has_helpers else (232, 0, 40)

    @property
    def threads(self) -> int:
        """Consumer warpgroups, helper warps if there are any, and the producer warp (padded to a
        warpgroup where registers are handed over, which only whole warpgroups can do)."""
        helpers = HELPER_WARPS * 32 if self.has_helpers else 0
        producer = 32 if self.registers is None else 128
        return 128 * self.schedule.warpgroups + helpers + producer

    @property
    def stage_bytes(self) -> int:
        """Bytes that the producer loads into one stage of the ring."""
        m, n, k = self.tile
        elements = len(self.columns) * n * k + len(self.rows) * m * k + len(self.vectors) * k
        return 2 * elements

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
        rows = m * len(self.products) + 2 * self.vector_pairs * len(self.vector_columns)
        return 4 * n * rows if self.cluster > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with room for barriers, statistics and alignment."""
        m = self.tile[0]
        statistics = 4 * m * (self.cluster * len(self.statistics) + len(self.row_values))
        alignment = 3072 + 1024 * bool(self.vector_rows)
        return self.slot_bytes * self.schedule.stages + self.exchange_bytes + statistics + alignment

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
            "warpgroups; use a tile with an even number of 64-column blocks"
        )
    if plan.shared_bytes > target.shared_bytes or plan.schedule.stages < 2:
        raise ScheduleError(
            f"kernel {step.name}: {plan.schedule.stages} stages of {plan.slot_bytes} bytes and "
            f"{plan.exchange_bytes} bytes of exchange do not fit into {target.shared_bytes} bytes "
            "of shared memory; use smaller tiles"
        )
    return plan


def _default_schedule(plan: MatmulPlan, target: Target, dependent_launch: bool) -> MatmulSchedule:
    m, n, _ = plan.tile
    # accumulators of one product: m * n / 128 registers per thread and warpgroup
    accumulators = m * n * len(plan.products) // 128
    warpgroups = 2 if accumulators > 64 and plan.blocks_n % 2 == 0 else 1
    probe = replace(plan, schedule=MatmulSchedule(stages=0, warpgroups=warpgroups))
    room = target.shared_bytes - probe.shared_bytes
    stages = min(room // plan.slot_bytes, max(2, plan.iterations))
    if not dependent_launch:
        # more in flight only lengthens the queue that the activations wait in: on 16x4096x4096
        # 6 stages of 20 KB take 10.35 us, 8 take 10.6, 9 take 10.75
        stages = min(stages, max(4, 120 * 1024 // plan.stage_bytes))
    return MatmulSchedule(stages, warpgroups, min(4, stages), dependent_launch)


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
    if m * n * len(plan.products) > 2 * 128 * 128:
        raise ScheduleError(f"{where}: {m}x{n} accumulators of {len(plan.products)} product(s) do "
                            "not fit into the registers of two warpgroups")
    if (n // plan.cluster) % 8:
        raise ScheduleError(f"{where}: {n} columns cannot be shared out over {plan.cluster} blocks")
    for view in (*plan.rows.values(), *plan.columns.values(), *plan.vectors.values()):
        arg = plan.arguments[view.argument]
        odd = [s for s in view.strides if s != 1 and s % 8]
        if odd or (arg.shape and extent(arg.shape[-1]) % 8 and len(view.labels) > 1):
            raise LoweringError(
                f"{where}: rows of {arg.name}{list(map(str, arg.shape))} are not multiples of 16 "
                "bytes, which bulk tensor copies need; pad the last dimension to a multiple of 8"
            )
    layouts = {view.stride(plan.column) == 1 for view in plan.columns.values()}
    stored = [v for v in plan.columns.values() if 1 not in (v.stride(plan.column),
                                                            v.stride(plan.contracted))]
    if len(layouts) > 1 or stored:
        raise LoweringError(
            f"{where}: the column operands must all be contiguous along {plan.column}, or all "
            f"along {plan.contracted}"
        )
    for i, view in plan.rows.items():
        if view.stride(plan.contracted) != 1:
            arg = plan.arguments[view.argument]
            raise LoweringError(
                f"{where}: row operand {arg.name} (operation {i}) must be contiguous along "
                f"{plan.contracted}"
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
        over = {ops[i].attributes["over"] for i in products}
        if len(over) != 1:
            raise LoweringError(
                f"{self.where}: products contract different labels {sorted(over)}; one matmul loop "
                "walks one label"
            )
        self.contracted = over.pop()
        vector = (self.contracted,)
        self.products = [i for i in products if all(ops[j].dims != vector for j in ops[i].inputs)]
        if not self.products:
            raise LoweringError(
                f"{self.where}: operation {products[0]} multiplies a vector and a matrix, which "
                "the tensor cores do only beside a product of rows; multiply and sum instead"
            )
        self.depends = self._dependencies()
        self._orient()
        sums = [i for i, op in enumerate(ops) if self._is_column_sum(op)]
        self.vectors = sorted({*products, *sums} - {*self.products})
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
        statistics = self._statistics()
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
                f"{self.where}: operation {min(odd, default=self.products[0])} is no operand that "
                f"can be staged with labels {self.row}, {self.contracted}"
            )
        accumulators = {*finals.values(), *(p.value for p in vector_products)}
        outputs, row_values, loads = self._epilogue(accumulators, statistics)
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
            row_values=row_values,
            loads=loads,
            outputs=outputs,
            schedule=schedule,
            vector_rows=vector_rows,
            vector_products=vector_products,
            shift=shift,
        )

    # ---------------------------------------------------------------------------- orientation

    def _orient(self) -> None:
        """Choose which operand is the column side, and with it the labels' roles."""
        ops = self.program.ops
        a, b = (ops[i] for i in ops[self.products[0]].inputs)
        shared = set(a.dims) & set(b.dims) - {self.contracted}
        free_a = [d for d in a.dims if d not in shared and d != self.contracted]
        free_b = [d for d in b.dims if d not in shared and d != self.contracted]
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
            if self._fits(rows, columns, side):
                self.row, self.column, self.side = rows[0], columns[0], side
                return
        raise LoweringError(
            f"{self.where}: no orientation fits: one operand of every product must be a tensor in "
            "memory whose free label is tiled by 64, the other must be contiguous along "
            f"{self.contracted} with a free label tiled by 8 to 256"
        )

    def _last_in_store(self, labels: list[str]) -> bool:
        last = [op.attributes["map"][-1] for op in self.program.stores()]
        return bool(labels) and all(d == labels[0] for d in last)

    def _fits(self, rows: list[str], columns: list[str], side: int) -> bool:
        if len(rows) != 1 or len(columns) != 1:
            return False
        ops, tile = self.program.ops, self.program.tile
        if tile[columns[0]] % COLUMN_BLOCK or tile[rows[0]] not in ROW_TILES:
            return False
        if any(ops[ops[i].inputs[side]].kind != LOAD for i in self.products):
            return False
        if any(columns[0] not in ops[ops[i].inputs[side]].dims for i in self.products):
            return False
        row_operand = ops[self.products[0]].inputs[1 - side]
        staged = {rows[0], self.contracted}
        matrices = [i for i in self.depends[row_operand] if staged <= set(ops[i].dims)]
        return all(self._view(i).stride(self.contracted) == 1 for i in matrices)

    # ---------------------------------------------------------------------------------- roles

    def _dependencies(self) -> list[set[int]]:
        """For every operation the loads it depends on."""
        result: list[set[int]] = []
        for i, op in enumerate(self.program.ops):
            mine = {i} if op.kind == LOAD else set[int]()
            result.append(mine.union(*(result[j] for j in op.inputs)))
        return result

    def _view(self, i: int) -> View:
        return view_of(self.program.ops[i], self.arguments)

    def _is_load(self, i: int) -> bool:
        return self.program.ops[i].kind == LOAD

    def _row_operand(self) -> ThreadExpression:
        operands = {self.program.ops[i].inputs[1 - self.side] for i in self.products}
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
        return source is not None and self._is_load(source) and self.column in op.dims

    def _column_operand(self, product: int) -> int:
        return self.program.ops[product].inputs[self.side]

    def _complete(self, value: int) -> int:
        """Follow a value through its accumulate and cluster_reduce; the operation that ends it."""
        ops = self.program.ops
        axes = {
            a.name
            for a in self.program.axes_of(self.contracted)
            if a.kind in (AxisKind.LOOP, AxisKind.CLUSTER)
        }
        while axes:
            users = [i for i, op in enumerate(ops) if value in op.inputs]
            kinds = (ACCUMULATE, CLUSTER_REDUCE)
            if len(users) != 1 or ops[users[0]].kind not in kinds:
                raise LoweringError(
                    f"{self.where}: the partial result of operation {value} is used before it is "
                    f"complete over {', '.join(sorted(axes))}"
                )
            value = users[0]
            axes -= {ops[value].attributes["axis"]}
        return value

    def _statistics(self) -> tuple[Statistic, ...]:
        ops = self.program.ops
        found: list[Statistic] = []
        for i, op in enumerate(ops):
            if op.kind not in ("sum", "mean", "max") or i in self.vectors:
                continue
            if op.attributes["over"] != self.contracted or self.column in op.dims:
                raise LoweringError(
                    f"{self.where}: {op.kind} over {op.attributes['over']} (operation {i}) is no "
                    f"row statistic over {self.contracted}"
                )
            source = self._row_side(op.inputs[0], f"statistic {i}")
            scale = 1.0 / extent(self.program.dims[self.contracted]) if op.kind == "mean" else 1.0
            reduce = "max" if op.kind == "max" else "sum"
            found.append(Statistic(self._complete(i), source, reduce, scale))
        return tuple(found)

    def _epilogue(
        self, accumulators: set[int], statistics: tuple[Statistic, ...]
    ) -> tuple[tuple[Output, ...], dict[int, ThreadExpression], dict[int, View]]:
        ops = self.program.ops
        reduced = {s.value for s in statistics}
        per_row = set(self.batch) | {self.row}
        uses_statistic, uses_load = [False] * len(ops), [False] * len(ops)
        for i, op in enumerate(ops):
            uses_statistic[i] = i in reduced or any(uses_statistic[j] for j in op.inputs)
            direct = op.kind == LOAD or any(uses_load[j] for j in op.inputs)
            uses_load[i] = i not in reduced and direct

        def is_row_value(i: int) -> bool:
            return uses_statistic[i] and not uses_load[i] and set(ops[i].dims) <= per_row

        def is_leaf(i: int) -> bool:
            return i in accumulators or is_row_value(i) or self._is_load(i)

        outputs: list[Output] = []
        for op in self.program.stores():
            where = f"{self.where}, store of {op.attributes['tensor']}"
            expression = fuse(self.program, op.inputs[0], is_leaf, where)
            if not accumulators & set(expression.leaves):
                raise LoweringError(f"{where}: it does not depend on a product")
            outputs.append(Output(view_of(op, self.arguments), expression))
        leaves = {leaf for o in outputs for leaf in o.expression.leaves}

        def is_statistic(i: int) -> bool:
            return i in reduced

        where = f"{self.where}, row values"
        row_values = {
            i: fuse(self.program, i, is_statistic, where) for i in sorted(leaves) if is_row_value(i)
        }
        loads = {i: self._view(i) for i in sorted(leaves) if self._is_load(i)}
        for i, value in row_values.items():
            # one reciprocal for each row in place of a division for every element
            if only_divides([o.expression for o in outputs], i):
                row_values[i] = reciprocal(value)
                outputs = [replace(o, expression=multiply_by(o.expression, i)) for o in outputs]
        return tuple(outputs), row_values, loads


def grid_shape(plan: MatmulPlan, row_extent: int | None = None) -> tuple[int, int, int]:
    """Blocks along (columns x cluster, rows, batch); ``row_extent`` where it is symbolic."""
    dims, (m, n, _) = plan.program.dims, plan.tile
    rows = extent(dims[plan.row]) if row_extent is None else row_extent
    batch = 1
    for d in plan.batch:
        batch *= extent(dims[d])
    columns = ceil_div(extent(dims[plan.column]), n)
    return columns * plan.cluster, ceil_div(rows, m), batch
