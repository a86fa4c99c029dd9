"""The matmul loop as rules for the search.

The form has one mainloop over the contracted label, any number of products that share a row
operand, of one width or of several, statistics of the rows, products of the loop's results, an
element-wise epilogue, and reductions along the columns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region
from cutesuper.egraph.products import (
    after_products,
    check_one_type,
    is_product,
    labels_of,
    shown,
)
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import (
    CLUSTER_REDUCE,
    GRID_REDUCE,
    LOAD,
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.dims import Dim, Symbol, ceil_div
from cutesuper.ir.dims import extent as dim_extent
from cutesuper.ir.dtypes import DType
from cutesuper.skeletons.form import check_reductions
from cutesuper.skeletons.matmul.copies import HALF_BYTES, PIECE
from cutesuper.skeletons.matmul.plan import COLUMN_BLOCK, FEW_ROWS, MAX_HIDDEN
from cutesuper.targets import Target

#: elements of a contracted label for which blocks may meet in device memory, at least and for each
#: tile, and the same where threads copy operands; estimates, as are the 3 to 5 us that the meeting
#: is priced at
LONG, LONG_COPIED = (8192, 512), (1024, 32)
#: most columns that are reduced: blocks of a cluster times columns of each
MAX_REDUCED = 8 * 256


@dataclass(frozen=True)
class MatmulForm:
    """The form of products and the operations around them.
    ``[batch..., row, contracted] @ [batch..., contracted, column]``.

    Attributes:
        row: label of the rows; statistics and prologues belong to this side.
        column: label of the columns; the operand that has it is a plain load.
        contracted: the label of the loop.
        batch: all other labels.
        hidden: labels between two products, ``(X A) B``: the loop accumulates X A, which is the
            row operand of a product after the loop. A block holds the whole label.
        reduced: True if the columns are reduced after the products: one cluster has all of them.
        vectors: True if vectors along the contracted label are multiplied by a column operand, or a
            column operand is summed, beside the products of the rows: ``G[K] @ W[K, N]``. Never
            together with hidden labels. LayerNorm and Linear need them:
            ``LN(X) W = (X G W - mean(X) (G W)) / s + B W``.
        beside: labels of the columns of further products, of other widths: every block works for
            one of these labels or for ``column``. Never together with hidden or reduced labels.
        turned: True if the rows lie side by side in memory, X stored (K, M): nothing but products
            reads them then.
        few_tiles: True if the grid may divide the contracted label too, see `_has_few_tiles`.
        element_bytes: of the operands; of 16 bits until they are known.
    """

    row: str
    column: str
    contracted: str
    batch: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    reduced: bool = False
    vectors: bool = False
    beside: tuple[str, ...] = ()
    turned: bool = False
    few_tiles: bool = False
    element_bytes: int = HALF_BYTES

    @property
    def columns(self) -> frozenset[str]:
        """All labels of columns."""
        return frozenset((self.column, *self.beside))

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """The loop alone, and the loop with a cluster (split-K); all other labels are grid axes."""
        loop, cluster = (AxisKind.LOOP,), (AxisKind.CLUSTER,)
        kinds = {d: () if d in self.hidden else (AxisKind.GRID,) for d in program.dims}
        if self.reduced:
            choices = ((loop, ()), (loop, cluster))
        else:
            choices = ((loop, kinds[self.column]), (cluster + loop, kinds[self.column]))
        found = tuple(
            Split(tuple((kinds | {self.contracted: k, self.column: c}).items())) for k, c in choices
        )
        if not self.few_tiles:
            return found
        parts = kinds | {self.contracted: (AxisKind.GRID, AxisKind.LOOP)}
        return *found, Split(tuple(parts.items()), joined=(self.contracted,))

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True for prologues on staged rows and vectors, and epilogues on complete values.

        It is False for partial sums (except those between two products, which the loop has
        completed), for the column side, and for scalars of a row (``[M, 1]``) inside the loop:
        staged values have the contracted label.
        """
        everything = frozenset[str]().union(*operands)
        between = not everything.isdisjoint(self.hidden)
        if state.pending and not (between and self._shared(state)):
            return False
        if len(everything & self.columns) > 1:
            return False
        if any(self._column_side(x) for x in operands) or self._turned(everything):
            return False
        staged = [self.contracted in x for x in operands if x]
        return all(staged) or not any(staged)

    def _turned(self, labels: frozenset[str]) -> bool:
        """True if a value is a row operand that only products take."""
        return self.turned and {self.row, self.contracted} <= labels

    def _column_side(self, labels: frozenset[str]) -> bool:
        """True if a value is an operand that only products take, or depends on one."""
        free = self.columns.union(self.hidden) & labels
        return len(free) > 1 or (self.contracted in labels and bool(free))

    def _shared(self, state: State) -> bool:
        """True if nothing but a cluster has to end."""
        return all(name.endswith(AxisKind.CLUSTER) for name in state.pending)

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True for the reductions that the loop runs.
        Statistics of rows, complete products along the columns, and sums of a column operand over
        the contracted label, which are products with a vector of ones. A column operand has no
        other reduction: ``sum_N(X W)`` is not ``X sum_N(W)`` here, which has no product to
        accumulate."""
        if not labels.isdisjoint(self.hidden):
            return False
        if over == self.contracted:
            own = self.vectors or self.columns.isdisjoint(labels)
            return own and not self._turned(labels)
        complete = not state.pending and not self._column_side(labels)
        return self.reduced and over == self.column and complete

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """True if operands are as the loop takes them.
        Rows or vectors come first, the column operand is a plain load, and the row operand is not a
        partial sum."""
        if not b.loaded or self.row in b.labels or not self.columns.isdisjoint(a.labels):
            return False
        vector = self.vectors and a.labels == frozenset((self.contracted,))
        if self.row not in a.labels and not vector:
            return False
        free = self.columns.union(self.hidden) & b.labels
        if over == self.contracted:
            return len(free) == 1 and a.labels.isdisjoint(self.hidden) and not a.state.pending
        return (
            over in self.hidden and free == frozenset((self.column, over)) and self._shared(a.state)
        )

    def refuses(self, program: BlockProgram) -> str | None:
        """Reason why no size of a program is worth a price, though each obeys the rules.
        None if there is none. What the loop cannot run, `matmul.roles` refuses."""
        if any(op.kind == CLUSTER_REDUCE and set(self.hidden) & set(op.dims) for op in program.ops):
            return "a cluster's exchange between two products"
        cluster = program.of_kind(AxisKind.CLUSTER)
        if cluster and not any(op.kind == CLUSTER_REDUCE for op in program.ops):
            return "an unused cluster axis"
        parted = any(a.dim == self.contracted for a in program.of_kind(AxisKind.GRID))
        if parted and not any(op.kind == GRID_REDUCE for op in program.ops):
            return "an unused grid axis"
        return None


def matmul_form(
    region: Region, program: LabelledProgram, products: list[LabelledOp], target: Target
) -> MatmulForm:
    """The form of a region with products. Raises SearchError with the reason if it has none."""
    check_reductions(program)
    after = after_products(program)
    first = [op for op in products if after.isdisjoint(op.inputs)]
    # the loop takes the longest label that products contract: X W + T B with a T of 16 columns
    contracted = max((str(op.over) for op in first), key=lambda d: dim_extent(program.dims[d]))
    looped = [op for op in first if op.over == contracted]
    tails = [op for op in products if op not in looped]
    hidden = tuple(dict.fromkeys(op.over for op in tails if op.over is not None))
    row, (column, *beside) = _rows_and_columns(program, (tails or looped)[0], hidden)
    if not beside:
        row = _longest_rows(program, products, row, column)
    over = dict.fromkeys(
        op.over
        for i, op in enumerate(program.ops)
        if op.over is not None and (i not in after or op in looped)
    )
    if len(over) > 1:
        raise SearchError(
            f"one kernel reduces over one dimension, this needs {shown(map(str, over))}"
        )
    reduced = _check_after(program, after, hidden, column)
    inner = (row, column, contracted, *hidden, *beside)
    batch = tuple(d for d in program.dims if d not in inner)
    vectors = _has_vectors(program, contracted, {column, *hidden, *beside})
    turned = any(_is_turned(program, op, row, contracted) for op in program.ops)
    form = MatmulForm(
        row, column, contracted, batch, hidden, reduced, vectors, tuple(beside), turned
    )
    for op in products:
        _check_product(program, op, form)
    _check_beside(program, looped, form)
    _check_put(program, form)
    if vectors and hidden:
        raise SearchError(
            f"a vector of {column} beside a product over {shown(hidden)}, of what another product "
            "gives: another kernel"
        )
    _check_extents(program, form)
    _check_turned(program, form)
    staged = [op for op in program.of_kind(LOAD) if _staged(op, form)]
    check_one_type(region, staged)
    element = region.input_dtypes[staged[0].attributes["tensor"]]
    _check_element(region, form, element)
    few = _has_few_tiles(program, form, target)
    return replace(form, few_tiles=few, element_bytes=element.itemsize)


def _has_copies(program: LabelledProgram, form: MatmulForm) -> bool:
    """True if rows of an operand are no multiples of 16 bytes: see `matmul.copies`."""
    staged = [op for op in program.of_kind(LOAD) if form.contracted in op.labels]
    last = {op.attributes["map"][-1] for op in staged} - {None}
    return any(dim_extent(program.dims[d]) % PIECE for d in last)


def _has_few_tiles(program: LabelledProgram, form: MatmulForm, target: Target) -> bool:
    """True if products of many rows have few tiles, and such long ones that splitting K pays.
    With nothing else to compute; tiles of 128x128 leave half of the target idle, and blocks meet in
    device memory."""
    dims = program.dims
    outer = [dims[d] for d in (form.row, *form.batch)]
    statistics = any(op.over == form.contracted and not op.facets.contracts for op in program.ops)
    more = form.hidden or form.reduced or form.vectors or form.beside
    if more or any(isinstance(d, Symbol) for d in outer):
        return False
    rows, columns = dim_extent(dims[form.row]), dim_extent(dims[form.column])
    tiles = ceil_div(rows, 128) * ceil_div(columns, 128) * prod(dim_extent(d) for d in outer[1:])
    least, each = LONG_COPIED if _has_copies(program, form) else LONG
    long = dim_extent(dims[form.contracted]) >= max(least, each * tiles)
    return not statistics and rows > FEW_ROWS and long and 2 * tiles <= target.sms


def _is_turned(program: LabelledProgram, op: LabelledOp, row: str, contracted: str) -> bool:
    """True for a row operand whose rows, more than one, lie side by side in memory."""
    operand = op.kind == LOAD and contracted in op.labels and program.dims[row] != 1
    return operand and op.attributes["map"][-1] == row


def _check_turned(program: LabelledProgram, form: MatmulForm) -> None:
    """Check that only products read a row operand whose rows lie side by side in memory."""
    whole = {form.row, form.contracted}
    for op in program.ops if form.turned else ():
        of_rows = (whole <= program.ops[i].labels for i in op.inputs)
        if any(of_rows) and not is_product(program, op):
            raise SearchError(
                f"matmul: {op.kind} of a tensor that is read with its rows along memory "
                f"({form.contracted}, {form.row}); only products do that"
            )


def _has_vectors(program: LabelledProgram, contracted: str, free: set[str]) -> bool:
    """True if a value without rows is reduced to a row vector: see `MatmulForm.vectors`."""
    return any(
        op.over == contracted and not free.isdisjoint(op.labels) and not is_product(program, op)
        for op in program.ops
    )


def _rows_and_columns(
    program: LabelledProgram, product: LabelledOp, hidden: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The last two labels of the outputs, which may have different columns.
    Those of a product, if only rows are stored."""
    a, b = (program.ops[i].labels for i in product.inputs)
    ends = {tuple(labels_of(m)[-2:]) for _, m in program.outputs}
    whole = {e for e in ends if len(e) == 2 and not set(e) <= a and not set(e) <= b}
    if len(whole) == 1 or (whole == ends and len({row for row, _ in whole}) == 1):
        columns = {column for _, column in whole}
        return next(row for row, _ in whole), tuple(d for d in program.dims if d in columns)
    rows = {labels_of(m)[-1] for _, m in program.outputs if labels_of(m)}
    free = [d for d in program.dims if d in (a | b) and d not in (product.over, *rows, *hidden)]
    if whole or len(rows) != 1 or not free:
        raise SearchError("a matrix product kernel stores tensors with the same rows and columns")
    return rows.pop(), (free[-1],)


def _longest_rows(
    program: LabelledProgram, products: list[LabelledOp], row: str, column: str
) -> str:
    """The longest label of rows.
    Of several that all column operands lack, as in ``X[32, 4, K] @ W[K, N]``, each of the others
    reads W again."""

    def lacking(op: LabelledOp) -> set[str]:
        a, b = (program.ops[i].labels for i in op.inputs)
        return set(a - b if row in a else b - a) - {str(op.over)}

    found = set[str].intersection(*(lacking(op) for op in products)) - {column}
    last = {op.attributes["map"][-1] for op in program.of_kind(LOAD)}
    if row in last or row not in found:
        return row
    return max((row, *sorted(found - {row})), key=lambda d: dim_extent(program.dims[d]))


def _check_after(
    program: LabelledProgram, after: set[int], hidden: tuple[str, ...], column: str
) -> bool:
    """Check the work behind the products: one more product, or reductions (then True).
    The reductions are along the columns.

    Raises:
        SearchError: another value is reduced, or a stored value depends on no product.
    """
    reduced = False
    tails = program.dependence.after(
        i
        for i, op in enumerate(program.ops)
        if is_product(program, op) and not after.isdisjoint(op.inputs)
    )
    for op in program.ops:
        if op.over is None or after.isdisjoint(op.inputs):
            continue
        if is_product(program, op):
            if op.over not in hidden or not tails.isdisjoint(op.inputs):
                raise SearchError("a product of a product of a product: another kernel")
            continue
        if op.over != column or hidden:
            raise SearchError(f"{op.kind} of what a matrix product gives: another kernel")
        reduced = True
    if any(i not in after for i, _ in program.outputs):
        raise SearchError("a matrix product kernel stores only what depends on a product")
    if any(set(hidden) & set(labels_of(m)) for _, m in program.outputs):
        raise SearchError("what lies between two products is not stored")
    return reduced


def _check_product(program: LabelledProgram, op: LabelledOp, form: MatmulForm) -> None:
    """Check that one operand has the rows, the other one the columns or a hidden label."""
    a, b = (program.ops[i].labels - {op.over} for i in op.inputs)
    row, free = form.row, form.columns
    free = free if op.over != form.contracted else free.union(form.hidden)
    sides = ((a, b), (b, a))
    if not any(row in x and row not in y and free & y and not free & x for x, y in sides):
        columns = shown((form.column, *form.beside))
        raise SearchError(f"{row} and {columns} are not the rows and columns of every product")


def _check_beside(program: LabelledProgram, looped: list[LabelledOp], form: MatmulForm) -> None:
    """Check that columns of several widths need the same of a block, and nothing after the loop."""
    if not form.beside:
        return
    for d in sorted(form.columns):
        if dim_extent(program.dims[d]) < COLUMN_BLOCK:
            raise SearchError(
                f"{program.dims[d]} columns of {d} do not fill a tile of {COLUMN_BLOCK} beside "
                "others: another kernel"
            )
    if form.hidden or form.reduced:
        raise SearchError(
            f"columns {shown(sorted(form.columns))} beside what is computed along "
            f"{shown(form.hidden or (form.column,))} after the loop: another kernel"
        )
    counts = Counter(d for op in looped for d in op.labels & form.columns)
    if len(set(counts.values())) > 1:
        raise SearchError(
            f"{shown(counts)} are the columns of {shown(map(str, counts.values()))} products; the "
            "tiles of one kernel have equally many"
        )


def _check_put(program: LabelledProgram, form: MatmulForm) -> None:
    """Check that rows of results are put where an index names, whole."""
    for output, dims in program.put:
        labels = program.outputs[output][1]
        if labels[dims[0]] in form.columns or form.columns.isdisjoint(labels):
            raise SearchError(
                f"output {output}: products are put by their rows; an index along the columns, or "
                "of values of rows, is one of another kernel"
            )


def _check_extents(program: LabelledProgram, form: MatmulForm) -> None:
    open_ = (form.contracted,) if form.turned else ()
    for name in (form.contracted, form.column, *form.beside, *form.hidden):
        extent: Dim = program.dims[name]
        if isinstance(extent, Symbol):
            if name in open_:
                continue
            raise SearchError(
                f"matmul: the extent {extent} may only be one of rows or batches, or of the first "
                "dimension of both operands, as in X^T W"
            )
        if name in form.hidden and extent > MAX_HIDDEN:
            raise SearchError(
                f"matmul: {extent} elements between two products; a block holds {MAX_HIDDEN}"
            )
    if form.reduced and program.dims[form.column] > MAX_REDUCED:  # type: ignore[operator]
        raise SearchError(
            f"matmul: {program.dims[form.column]} columns are reduced; a cluster holds "
            f"{MAX_REDUCED}"
        )


def _check_element(region: Region, form: MatmulForm, element: DType) -> None:
    """Check that the tensor cores take operands of this type, in this form. Raises SearchError."""
    if element.itemsize == 2:
        return
    if len(region.precisions) > 1:
        raise SearchError(f"products of {' and '.join(region.precisions)} precision in one kernel")
    if form.turned or form.hidden or form.vectors:
        what = ("rows that lie side by side in memory" if form.turned else
                f"a product over {shown(form.hidden)} after the loop" if form.hidden else
                "vectors beside the rows")  # fmt: skip
        raise SearchError(f"matmul in float32 with {what}: another kernel")


def _staged(op: LabelledOp, form: MatmulForm) -> bool:
    """True if a load goes through shared memory, for products. Raises SearchError."""
    mapping = labels_of(op.attributes["map"])
    operands = {form.contracted, *form.hidden} & set(mapping)
    columns = form.columns.intersection(mapping)
    matrix = len(operands | {form.row, *form.columns} & set(mapping)) > 1
    staged = form.contracted in mapping or (matrix and operands and columns)
    inner = {form.contracted, *form.columns}
    labels = (form.contracted, *form.columns, *form.hidden)
    matrices = [set(p) for p in combinations(labels, 2) if set(p) <= set(mapping)]
    if matrices:
        if not any(mapping[-1] in m for m in matrices):
            raise SearchError(
                "matmul: a column operand must be stored with a label of its matrix last, not as "
                f"({', '.join(mapping)})"
            )
    elif (found := inner & set(mapping)) and mapping[-1] not in found and not form.turned:
        raise SearchError(
            f"matmul: a tensor is read with its rows along memory ({', '.join(mapping)}); only a "
            "plain operand of products may be stored either way"
        )
    return bool(staged)
