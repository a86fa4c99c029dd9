"""Roles of the operations of a block program in the matmul loop; see `skeletons.matmul.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cutesuper.errors import LoweringError
from cutesuper.ir.block import (
    ENDING,
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
    KernelStep,
)
from cutesuper.ir.check import check_block_program
from cutesuper.ir.dims import extent
from cutesuper.ir.thread import ThreadExpression, fuse
from cutesuper.skeletons.base import Argument, Output, View, view_of
from cutesuper.skeletons.form import FOLDED
from cutesuper.skeletons.matmul.plan import (
    COLUMN_BLOCK,
    MAX_HIDDEN,
    MAX_VECTORS,
    ROW_BOX,
    ColumnReduction,
    MatmulPlan,
    Shift,
    Statistic,
    Tail,
    VectorProduct,
    VectorRows,
    takes_rows,
)
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.matmul.shift import find_shift
from cutesuper.skeletons.normalize import quotients_by_statistics, with_reciprocals
from cutesuper.skeletons.operands import (
    MULTIPLIED,
    check_element_type,
    check_same_type,
    check_symbols,
)


class Roles:
    """Assigns every operation of a block program its role in the matmul loop.

    Only extents of the tile matter, and they only for which side has the rows.

    Args:
        step: the kernel.
        arguments: its tensors.
        others: the labels of columns whose operations are left to another plan of `beside`.

    Attributes:
        sure: True if that side has them with every tile that planning takes.
    """

    def __init__(
        self, step: KernelStep, arguments: tuple[Argument, ...], others: tuple[str, ...] = ()
    ) -> None:
        self.program = with_reciprocals(step.program, quotients_by_statistics(step.program))
        self.arguments = arguments
        self.where = f"kernel {step.name}"
        ops = self.program.ops
        #: the operations that have a role
        self.mine = [i for i, op in enumerate(ops) if set(op.dims).isdisjoint(others)]
        products = [i for i in self.mine if ops[i].facets.contracts]
        after = self.program.dependence.after(products)
        first = [ops[i].attributes["over"] for i in products if after.isdisjoint(ops[i].inputs)]
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
        sums = [i for i in self.mine if self._is_column_sum(ops[i])]
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
        """The plan with this schedule, not yet held against any limit. Raises LoweringError."""
        plan = self._plan(schedule)
        check_operands(plan, self.where)
        return plan

    def _plan(self, schedule: MatmulSchedule) -> MatmulPlan:
        multiplied = self._multiplied()
        row_operand = self._row_operand(multiplied)
        finals = {i: self._complete(i) for i in self.products}
        columns = {self._column_operand(i): i for i in self.products}
        if len(columns) < len(self.products):
            raise LoweringError(f"{self.where}: two products are the same")
        tails = self._tails()
        finals, tails = self._shared_accumulators(finals, tails)
        statistics, reductions = self._statistics(), self._reductions()
        vector_rows, vector_products = self._vector_products(set(columns))
        shift = self._shift()
        sources = [s.source for s in statistics] + [row_operand]
        sources += [v for v in vector_rows if v is not None] + ([shift.source] if shift else [])
        matrices, vectors = self._staged(sources)
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
            factor=None if plain or len(matrices) > 1 else self._factor(multiplied),
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

    def _staged(self, sources: list[ThreadExpression]) -> tuple[list[int], list[int]]:
        """The loads that expressions of rows read: matrices, and vectors along the rows.
        Raises LoweringError for any other."""
        ops = self.program.ops
        loads = sorted({i for e in sources for i in e.leaves if self._is_load(i)})
        matrices = [i for i in loads if {self.row, self.contracted} <= set(ops[i].dims)]
        vectors = [i for i in loads if ops[i].dims == (self.contracted,)]
        odd = set(loads) - set(matrices) - set(vectors)
        if odd or not matrices:
            raise LoweringError(
                f"{self.where}: operation {min(odd, default=min(self.products + self.inner))} is "
                f"no operand that can be staged with labels {self.row}, {self.contracted}"
            )
        return matrices, vectors

    # ---------------------------------------------------------------------------- orientation

    def _orient(self) -> None:
        """Choose the operand that is the column side, and with it the labels' roles."""
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
            raise LoweringError(
                f"{self.where}: an operand has two labels that are tiled; only "
                "one row label and one column label can be"
            )
        sides = [(free_a, free_b, 1), (free_b, free_a, 0)]
        sides.sort(key=lambda s: (not self._reduced_after(s[1]), not self._last_in_store(s[1])))
        for rows, columns, side in sides:
            if self._fits(rows, columns, ops[reference].inputs[1 - side]):
                self.row, self.column = rows[0], columns[0]
                self.sure = columns == sides[0][1]
                inner = {self.row, self.column, self.contracted, *self.hidden}
                # also labels that no operand has: an epilogue that repeats a product
                outer = {d for i in self.mine for d in ops[i].dims} - inner
                self.batch = tuple(d for d in self.program.dims if d in outer)
                return
        raise LoweringError(
            f"{self.where}: no orientation fits: one operand of every product must be a tensor in "
            "memory whose free label is tiled by 64, the other must be contiguous along "
            f"{self.contracted} with a free label tiled by 8 to 256, or be a tensor in memory that "
            f"is contiguous along a free label tiled by {ROW_BOX}"
        )

    def _reduced_after(self, labels: list[str]) -> bool:
        """True if results are reduced along a label: the rows' statistics are of the operand."""
        ops = self.program.ops
        return any(op.facets.reduces in FOLDED and op.attributes["over"] in labels for op in ops)

    def _last_in_store(self, labels: list[str]) -> bool:
        last = [op.attributes["map"][-1] for op in self._stores()]
        return bool(labels) and all(d == labels[0] for d in last)

    def _fits(self, rows: list[str], columns: list[str], row_operand: int) -> bool:
        if len(rows) != 1 or len(columns) != 1:
            return False
        ops, tile = self.program.ops, self.program.tile
        if tile[columns[0]] % COLUMN_BLOCK or not takes_rows(tile[rows[0]]):
            return False
        for product in (*self.products, *self.inner, *self.tails):
            sides = ops[product].inputs
            free = self.hidden if product in self.inner else {columns[0]}
            if not any(self._is_load(i) and free & set(ops[i].dims) for i in sides):
                return False
        if self._is_load(row_operand) and self._view(row_operand).stride(rows[0]) == 1:
            return tile[rows[0]] % ROW_BOX == 0
        staged = {rows[0], self.contracted}
        needed = self.program.dependence.before(row_operand)
        loads = filter(self._is_load, needed)
        matrices = [i for i in loads if staged <= set(ops[i].dims)]
        return all(self._view(i).stride(self.contracted) == 1 for i in matrices)

    # ---------------------------------------------------------------------------------- roles

    def _view(self, i: int) -> View:
        return view_of(self.program.ops[i], self.arguments)

    def _stores(self) -> list[BlockOp]:
        return [op for i in self.mine if (op := self.program.ops[i]).kind == STORE]

    def _is_load(self, i: int) -> bool:
        return self.program.ops[i].kind == LOAD

    def _multiplied(self) -> int:
        """The operation whose value all products take as their rows. Raises LoweringError."""
        ops = self.program.ops
        pairs = [(i, self._column_operand(i)) for i in (*self.products, *self.inner)]
        operands = {j for i, column in pairs for j in ops[i].inputs if j != column}
        if len(operands) > 1:
            raise LoweringError(f"{self.where}: products take different row operands")
        return operands.pop()

    def _row_operand(self, i: int) -> ThreadExpression:
        shifted = self.shifted is not None and self.shifted.products
        return self._row_side(i, "row operand", shifted)

    def _factor(self, i: int) -> ThreadExpression | None:
        """The vector by which the row operand multiplies a load; None if it does anything else."""
        op = self.program.ops[i]
        if not op.facets.multiplies or op.facets.contracts:
            return None
        ops = self.program.ops
        loads = [i for i in op.inputs if self._is_load(i) and self.row in ops[i].dims]
        others = [i for i in op.inputs if ops[i].dims == (self.contracted,)]
        if len(loads) != 1 or len(others) != 1:
            return None
        return fuse(self.program, others[0], self._is_load, f"{self.where}, factor of the rows")

    def _row_side(self, i: int, what: str, shifted: bool = True) -> ThreadExpression:
        """An expression over row-side loads, and over the shifted value."""
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
        """True if an operation is a column operand's product with a vector of ones."""
        summed = op.facets.sums and op.attributes["over"] == self.contracted
        source = op.inputs[0] if summed else None
        free = {self.column, *self.hidden}
        return source is not None and self._is_load(source) and not free.isdisjoint(op.dims)

    def _column_operand(self, product: int) -> int:
        """The operand in memory that has a free label other than the rows'."""
        ops = self.program.ops
        free = self.hidden if product in self.inner else {self.column}
        return next(
            i
            for i in ops[product].inputs
            if self._is_load(i) and free & set(ops[i].dims) and self.row not in ops[i].dims
        )

    def _axes(self, label: str, *kinds: AxisKind) -> set[str]:
        return {a.name for a in self.program.axes_of(label) if a.kind in kinds}

    def _users(self, value: int) -> list[int]:
        return [i for i, op in enumerate(self.program.ops) if value in op.inputs]

    def _complete(self, value: int, axes: set[str] | None = None) -> int:
        """Follow a value through accumulate and cluster_reduce to the operation that ends it."""
        ops = self.program.ops
        if axes is None:
            axes = self._axes(self.contracted, AxisKind.LOOP, AxisKind.CLUSTER, AxisKind.GRID)
        while axes:
            users = self._users(value)
            if len(users) != 1 or ops[users[0]].kind not in ENDING:
                raise LoweringError(
                    f"{self.where}: the partial result of operation {value} is used before it is "
                    f"complete over {', '.join(sorted(axes))}"
                )
            value = users[0]
            axes = axes - {ops[value].attributes["axis"]}
        return value

    def _vector_products(self, columns: set[int]) -> tuple[VectorRows, tuple[VectorProduct, ...]]:
        """The vectors, each once, and their products; ``columns`` multiply rows."""
        rows: dict[int | None, int] = {}
        products: list[VectorProduct] = []
        for i in self.vectors:
            inputs = self.program.ops[i].inputs
            operand = next(j for j in inputs if self.column in self.program.ops[j].dims)
            vector = next((j for j in inputs if j != operand), None)
            index = rows.setdefault(vector, len(rows))
            products.append(VectorProduct(operand, index, self._complete(i)))
        if len(rows) > MAX_VECTORS:
            raise LoweringError(
                f"{self.where}: {len(rows)} vectors are multiplied by column operands; at most "
                f"{MAX_VECTORS} are"
            )
        alone = next((p.column for p in products if p.column not in columns), None)
        if alone is not None:
            raise LoweringError(
                f"{self.where}: operation {alone} is multiplied by a vector only; its tiles are "
                "staged for a product of rows"
            )
        return tuple(None if v is None else self._vector(v) for v in rows), tuple(products)

    def _vector(self, i: int) -> ThreadExpression:
        return fuse(self.program, i, self._is_load, f"{self.where}, vector {i}")

    # ----------------------------------------------------------------------------------- tails

    def _tails(self) -> tuple[Tail, ...]:
        """Products after the loop; their sources are completed by `_ends`."""
        ops, loop = self.program.ops, self._axes(self.contracted, AxisKind.LOOP)
        ended = {i: self._complete(i, loop) for i in self.inner}
        states = check_block_program(self.program) if self.tails else []
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
            found.append(
                Tail(
                    label,
                    whole,
                    products,
                    unfused,
                    load,
                    self._view(load),
                    self._complete(i, pending),
                    bool(cluster - pending),
                )
            )
        if len({t.hidden for t in found}) < len(found):
            raise LoweringError(f"{self.where}: two products after the loop contract one label")
        return tuple(found)

    def _shared_accumulators(
        self, finals: dict[int, int], tails: tuple[Tail, ...]
    ) -> tuple[dict[int, int], tuple[Tail, ...]]:
        """Merge the accumulators of products whose results are only added up.

        before: ``add(c(X W), c(H B))``; after: both complete the sum.
        """
        ops = self.program.ops
        # by operation: the products of the loop and those after it that complete it
        members = {v: ({i}, set[int]()) for i, v in finals.items()}
        for n, tail in enumerate(tails):
            members[tail.final] = (set(), {n})
        for total, op in enumerate(ops):
            known = op.facets.adds and len(set(op.inputs)) == 2 and set(op.inputs) <= set(members)
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
        for i in self.mine:
            op = ops[i]
            if op.facets.reduces not in FOLDED or i in self.vectors:
                continue
            if op.attributes["over"] == self.column:  # see `_reductions`
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
            if op.facets.reduces not in FOLDED or op.attributes["over"] != self.column:
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
        """The operation that combines partial results, and the factor of the complete one."""
        assert op.facets.reduces is not None
        return op.facets.reduces.name, self.program.factor(op)

    def _ends(
        self,
        accumulators: set[int],
        statistics: tuple[Statistic, ...],
        tails: tuple[Tail, ...],
        reductions: tuple[ColumnReduction, ...],
    ) -> Ends:
        """Fuse the operations between the loop and the stores."""
        products = accumulators | {f for t in tails for _, f in t.products}
        products |= {r.value for r in reductions}
        reduced = {s.value for s in statistics}
        row_values = self._row_values(reduced, {r.value for r in reductions})

        def is_leaf(i: int) -> bool:
            return i in products or i in row_values or self._is_load(i)

        def fused(e: ThreadExpression, what: str) -> ThreadExpression:
            return fuse(self.program, e.leaves[0], is_leaf, f"{self.where}, {what}")

        ends = Ends(
            tuple(self._stored(op, fused, products) for op in self._stores()),
            tuple(replace(t, source=fused(t.source, f"product over {t.hidden}")) for t in tails),
            tuple(
                replace(r, source=fused(r.source, f"reduction over {self.column}"))
                for r in reductions
            ),
            {}, {},
        )  # fmt: skip
        leaves = sorted({leaf for e in ends.expressions for leaf in e.leaves})
        where = f"{self.where}, row values"
        return replace(
            ends,
            row_values={
                i: fuse(self.program, i, lambda j: j in reduced, where)
                for i in leaves
                if i in row_values
            },
            loads={i: self._view(i) for i in leaves if self._is_load(i)},
        )

    def _row_values(self, reduced: set[int], along_columns: set[int]) -> set[int]:
        """Operations that compute one number of each row, from statistics and constants alone."""
        ops, per_row = self.program.ops, set(self.batch) | {self.row}
        uses_statistic, uses_other = [False] * len(ops), [False] * len(ops)
        for i, op in enumerate(ops):
            uses_statistic[i] = i in reduced or any(uses_statistic[j] for j in op.inputs)
            direct = op.kind == LOAD or i in along_columns
            direct = direct or any(uses_other[j] for j in op.inputs)
            uses_other[i] = i not in reduced and direct
        of_rows = (i for i, op in enumerate(ops) if set(op.dims) <= per_row)
        return {i for i in of_rows if uses_statistic[i] and not uses_other[i]}

    def _stored(
        self,
        op: BlockOp,
        fused: Callable[[ThreadExpression, str], ThreadExpression],
        products: set[int],
    ) -> Output:
        """An output of the kernel.
        Raises LoweringError if no product is in it, or only one that others follow."""
        what = f"store of {op.attributes['tensor']}"
        if between := self.hidden & set(op.dims):
            raise LoweringError(
                f"{self.where}, {what}: what lies between two products ({', '.join(between)}) "
                "stays in the block; store it by another kernel"
            )
        expression = fused(ThreadExpression(op.inputs, ()), what)
        if not products & set(expression.leaves):
            raise LoweringError(f"{self.where}, {what}: it does not depend on a product")
        return Output(view_of(op, self.arguments), expression)


def plan_of(
    step: KernelStep, arguments: tuple[Argument, ...], schedule: MatmulSchedule
) -> tuple[MatmulPlan, bool]:
    """The plan of a kernel with those of further columns, and True for roles of all tiles.
    It is True if other tiles would not change the roles. Raises LoweringError."""
    columns = step.program.alternatives
    parts = [
        Roles(step, arguments, tuple(d for d in columns if d != own)) for own in columns or ("",)
    ]
    plans = [roles.plan(schedule) for roles in parts]
    sure = all(roles.sure for roles in parts)
    if not columns:
        return plans[0], sure
    values = {i: e for p in plans for i, e in p.row_values.items()}
    plans = [replace(p, row_values=values) for p in plans]
    check_beside(plans, parts[0].where)
    return replace(plans[0], beside=tuple(plans[1:])), sure


def check_beside(plans: list[MatmulPlan], where: str) -> None:
    """Check that tiles of several columns have one shape and read the same rows.
    Raises LoweringError."""
    first = plans[0]
    for p in plans[1:]:
        if p.tile != first.tile or p.batch != first.batch or _loop(p) != _loop(first):
            raise LoweringError(
                f"{where}: columns {first.column} and {p.column} need other tiles, rows or "
                "products of a loop; compute them by two kernels"
            )
    if copied := [v for p in plans for v in p.copied.values()]:
        raise LoweringError(
            f"{where}: {first.names(copied)}: rows begin at no multiples of 16 bytes, which a "
            "kernel of several columns does not copy; compute them by a kernel each"
        )
    columns = [v.stride(p.column) == 1 for p in plans for v in p.columns.values()]
    if len(set(columns)) > 1:
        raise LoweringError(
            f"{where}: the column operands must all be contiguous along the columns, or all along "
            f"{first.contracted}"
        )


def _loop(plan: MatmulPlan) -> tuple[object, ...]:
    """All that the loop over the contracted label does besides loading column operands."""
    column = list(plan.columns)
    products = tuple(plan.finals[final] for _, final in plan.products)
    vectors = tuple((column.index(p.column), p.vector) for p in plan.vector_products)
    rows = plan.rows, plan.vectors, plan.prologue, plan.statistics, plan.vector_rows
    return products, vectors, *rows, plan.tails, plan.reductions


@dataclass(frozen=True)
class Ends:
    """The uses of the accumulators: fused expressions and their leaves."""

    outputs: tuple[Output, ...]
    tails: tuple[Tail, ...]
    reductions: tuple[ColumnReduction, ...]
    row_values: dict[int, ThreadExpression]
    loads: dict[int, View]

    @property
    def expressions(self) -> list[ThreadExpression]:
        """All expressions."""
        sources = [x.source for x in (*self.tails, *self.reductions)]
        return [o.expression for o in self.outputs] + sources


def check_operands(plan: MatmulPlan, where: str) -> None:
    """Check that the tensor cores take the operands. Raises LoweringError."""
    check_element_type(where, plan.dtype, (*MULTIPLIED, "float32"))
    check_symbols(plan.arguments, where)
    if plan.element_bytes == 4 and (mistake := _wide_mistake(plan)):
        raise LoweringError(f"{where}: products of float32 operands {mistake}")
    tails = [t.view for t in plan.tails]
    staged = (*plan.rows.values(), *plan.columns.values(), *plan.vectors.values())
    for view in (*staged, *plan.hidden.values(), *tails):
        check_same_type(where, plan.dtype, plan.arguments[view.argument])
    _check_layout(where, plan.columns.values(), plan.column, plan.contracted)
    for t in plan.tails:
        inner = [plan.hidden[load] for load, _ in t.products]
        _check_layout(where, inner, t.hidden, plan.contracted)
        _check_layout(where, [t.view], plan.column, t.hidden)
    if plan.turned and not plan.has_helpers and len(plan.rows) == 1:
        return
    for i, view in plan.rows.items():
        if view.stride(plan.contracted) != 1:
            arg = plan.arguments[view.argument]
            raise LoweringError(
                f"{where}: row operand {arg.name} (operation {i}) must be contiguous along "
                f"{plan.contracted}, or used by products alone"
            )


def _wide_mistake(plan: MatmulPlan) -> str:
    """The reason why a plan's products cannot take fp32 operands; empty if they can."""
    if plan.turned:
        return f"need rows that are contiguous along {plan.contracted}; copy them first"
    if plan.tails or plan.vector_rows:
        return "have no further products after the loop or of vectors; use another kernel for these"
    return ""


def _check_layout(where: str, views: Iterable[View], column: str, contracted: str) -> None:
    """Check that column operands that share an instruction are stored in the same order."""
    strides = {(v.stride(column) == 1, v.stride(contracted) == 1) for v in views}
    if len(strides) > 1 or (False, False) in strides:
        raise LoweringError(
            f"{where}: the column operands must all be contiguous along {column}, or all along "
            f"{contracted}"
        )
