"""Forms: what the skeletons of the lowering can run, as rules that the search asks.

* `MatmulForm`: one loop over the contracted label, any number of products that share a row operand,
  statistics of the rows, products of what the loop gave, an element-wise epilogue, reductions along
  the columns.
* `ChainedForm` (`chained_form`): two products in one loop over what lies between them.
* `RowForm`: no products; whole rows are resident, in whatever order tensors are stored.
* `PersistentForm` (`persistent_form`): no products; sums over rows, which blocks visit in turn.
* `BlockForm`: everything that a block program can express, whether or not a skeleton runs it.

`find_form` gives the skeleton of a region before it is searched; a region that none can run is
refused with the reason, and the kernel-level search cuts the graph elsewhere. A new skeleton is a
new form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region
from cutesuper.egraph.products import (
    after_products,
    check_one_type,
    is_product,
    labels_of,
    matrix_products,
    shown,
)
from cutesuper.egraph.splits import AnyRules, Operand, Split, State, splits
from cutesuper.errors import SearchError
from cutesuper.ir.block import CLUSTER_REDUCE, AxisKind, BlockProgram
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.dims import extent as dim_extent
from cutesuper.ir.operators.base import Counts, lookup
from cutesuper.skeletons.attention.form import ALIGN, ChainedForm, chained_form
from cutesuper.skeletons.matmul.hidden import MAX_HIDDEN
from cutesuper.skeletons.matmul.shift import find_shift
from cutesuper.skeletons.matmul.vectors import MAX_VECTORS, vector_products
from cutesuper.skeletons.rows.limits import MAX_ROW, longest_tile, row_label
from cutesuper.skeletons.rows.loop_form import (
    PersistentForm,
    along_rows,
    check_cluster_row,
    persistent_form,
)

#: columns that are reduced: so many blocks of a cluster hold so many each
MAX_REDUCED = 8 * 256
#: elements of a column that a block sums by itself, in whatever order tensors are stored: 32 lanes
#: of 32 elements; more are left to blocks that visit rows in turn
MAX_COLUMN = 32 * 32
#: elements of all tensors of a row that the registers of a block hold, beside 32 of each thread
MAX_RESIDENT = 65536 - 32 * 512


@dataclass(frozen=True)
class MatmulForm:
    """``[batch..., row, contracted] @ [batch..., contracted, column]`` and what may surround it.

    Attributes:
        row: label of the rows; statistics and prologues belong to this side.
        column: label of the columns; the operand that has it is a plain load.
        contracted: the label of the loop.
        batch: all other labels.
        hidden: labels between two products, ``(X A) B``: the loop accumulates X A, which is the
            row operand of a product after the loop. A block holds the whole label.
        reduced: whether the columns are reduced after the products: one cluster has all of them.
        vectors: whether vectors along the contracted label are multiplied by a column operand, or
            a column operand is summed, beside the products of the rows: ``G[K] @ W[K, N]``. Never
            together with hidden labels.
    """

    row: str
    column: str
    contracted: str
    batch: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    reduced: bool = False
    vectors: bool = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """The loop alone, and the loop with a cluster; everything else is grid."""
        loop, cluster = (AxisKind.LOOP,), (AxisKind.CLUSTER,)
        kinds = {d: () if d in self.hidden else (AxisKind.GRID,) for d in program.dims}
        if self.reduced:
            choices = ((loop, ()), (loop, cluster))
        else:
            choices = ((loop, kinds[self.column]), (cluster + loop, kinds[self.column]))
        return tuple(
            Split(tuple((kinds | {self.contracted: k, self.column: c}).items()))
            for k, c in choices
        )

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """Prologues on staged rows and vectors, epilogues on complete values.

        Nothing on partial sums (but on those between two products, which the loop has completed),
        nothing on the column side, and no scalar of a row (``[M, 1]``) inside the loop: what is
        staged has the contracted label.
        """
        everything = frozenset[str]().union(*operands)
        between = not everything.isdisjoint(self.hidden)
        if state.pending and not (between and self._shared(state)):
            return False
        if any(self._column_side(x) for x in operands):
            return False
        staged = [self.contracted in x for x in operands if x]
        return all(staged) or not any(staged)

    def _column_side(self, labels: frozenset[str]) -> bool:
        """Whether a value is, or is made of, an operand that only products take."""
        free = {self.column, *self.hidden} & labels
        return len(free) > 1 or (self.contracted in labels and bool(free))

    def _shared(self, state: State) -> bool:
        """Whether nothing but a cluster has to end."""
        return all(name.endswith(AxisKind.CLUSTER) for name in state.pending)

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """Statistics of rows, and complete products along the columns; sums of a column operand
        over what is contracted are products with a vector of ones. Nothing else is made of a column
        operand: ``sum_N(X W)`` is not ``X sum_N(W)`` here, which has no product to accumulate."""
        if not labels.isdisjoint(self.hidden):
            return False
        if over == self.contracted:
            return self.vectors or self.column not in labels
        complete = not state.pending and not self._column_side(labels)
        return self.reduced and over == self.column and complete

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Rows or vectors first; the column operand is a plain load, the row operand no partial
        sum."""
        if not b.loaded or self.row in b.labels or self.column in a.labels:
            return False
        vector = self.vectors and a.labels == frozenset((self.contracted,))
        if self.row not in a.labels and not vector:
            return False
        free = {self.column, *self.hidden} & b.labels
        if over == self.contracted:
            return len(free) == 1 and a.labels.isdisjoint(self.hidden) and not a.state.pending
        return over in self.hidden and free == {self.column, over} and self._shared(a.state)

    def refuses(self, program: BlockProgram) -> str | None:
        """Why a program that obeys the rules still cannot run, or None."""
        products = [op for op in program.ops if op.kind == "matmul" and self.row in op.dims]
        looped = [op for op in products if op.attributes["over"] == self.contracted]
        if len({op.inputs[0] for op in looped}) > 1:
            return "products with different row operands"
        if any(op.kind == CLUSTER_REDUCE and set(self.hidden) & set(op.dims) for op in program.ops):
            return "a cluster's exchange between two products"
        after = [op.attributes["over"] for op in products if op not in looped]
        if len(after) > len(set(after)):
            return "two products after the loop that contract the same label"
        if why := self._refuses_vectors(program, {op.inputs[1] for op in looped}):
            return why
        for label in (self.column, *self.hidden):
            stored = {
                op.attributes["map"][-1] == label
                for op in program.loads()
                if {self.contracted, label} <= set(op.dims)
            }
            if len(stored) > 1:
                return "column operands stored in different orders"
        shifted = find_shift(program, self.row, self.column, self.contracted)
        if shifted is not None and shifted.refused:
            return "a difference of large sums that cannot be kept from cancelling"
        cluster = program.of_kind(AxisKind.CLUSTER)
        if cluster and not any(op.kind == CLUSTER_REDUCE for op in program.ops):
            return "an unused cluster axis"
        return None

    def _refuses_vectors(self, program: BlockProgram, columns: set[int]) -> str | None:
        """The same for products of vectors; ``columns``: what the rows are multiplied by."""
        if not self.vectors:
            return None
        vectors = vector_products(program, self.row, self.column, self.contracted)
        if any(op.kind not in ("matmul", "sum") for op in vectors):
            return "a column operand is reduced by something else than a sum"
        if not {op.inputs[-1] for op in vectors} <= columns:
            return "vectors are multiplied by a column operand that the rows are not multiplied by"
        if len({op.inputs[:-1] for op in vectors}) > MAX_VECTORS:
            return f"more than {MAX_VECTORS} vectors are multiplied by column operands"
        return None


@dataclass(frozen=True)
class RowForm:
    """Rows resident in one block, or in a cluster.

    Attributes:
        row: the label along them, whole (if reduced) or tiled (if nothing is reduced); see
            `skeletons.rows.limits.row_label`.
        reduced: whether anything is reduced over it.
        clustered: whether a row is longer than what one block holds: a cluster shares it.
    """

    row: str
    reduced: bool
    clustered: bool = False
    vectors = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """One: the reduced label whole, or divided by a cluster; all others grid."""
        along = (AxisKind.CLUSTER,) if self.clustered else ()
        whole = self.row if self.reduced else None
        kinds = ((d, along if d == whole else (AxisKind.GRID,)) for d in program.dims)
        return (Split(tuple(kinds)),)

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """Everything element-wise on what is complete."""
        return not state.pending

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """Along the row."""
        return over == self.row

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """No matrix products."""
        return False

    def refuses(self, program: BlockProgram) -> str | None:
        """Nothing more to refuse."""
        return None


@dataclass(frozen=True)
class BlockForm(AnyRules):
    """Whatever a block program can express: chained products, running maxima, several passes over
    a loop, partial results of the grid. No skeleton of the lowering runs all of it."""

    def splits(self, program: LabelledProgram) -> Iterator[Split]:
        """All splits, but symbolic extents are divided by the grid and by nothing else."""
        symbolic = {d for d, n in program.dims.items() if isinstance(n, Symbol)}
        for split in splits(program):
            kinds = dict(split.kinds)
            if all(kinds[d] == (AxisKind.GRID,) and d != split.parted for d in symbolic):
                yield split

    def refuses(self, program: BlockProgram) -> str | None:
        """A cluster that exchanges nothing only occupies blocks."""
        reduced = any(op.kind == CLUSTER_REDUCE for op in program.ops)
        return "an unused cluster axis" if program.of_kind(AxisKind.CLUSTER) and not reduced else (
            None
        )


Form = MatmulForm | ChainedForm | RowForm | PersistentForm | BlockForm


def find_form(region: Region, program: LabelledProgram) -> Form:
    """The form of a region.

    Raises:
        SearchError: with the reason why no form can run it.
    """
    _check_symbols(program)
    products = matrix_products(program)
    labels = [op.kind for op in region.ops if lookup(op.kind).counts == Counts.LABELS]
    if labels and products:
        raise SearchError(f"{labels[0]} reads labels, which kernels with products do not")
    reason = needs_positions(region)
    chained = len(products) > 1 and not after_products(program).isdisjoint(products[-1].inputs)
    if reason is not None and not chained:
        raise SearchError(reason)
    if not products:
        return _row_form(region, program)
    if reason is not None:
        return chained_form(region, program, products)
    try:
        return _matmul_form(region, program, products)
    except SearchError as error:
        try:
            return chained_form(region, program, products)
        except SearchError:
            raise error from None


def needs_positions(region: Region) -> str | None:
    """Why neither products nor rows run a region: masks, and pages; None where they may."""
    for op in region.ops:
        operator = lookup(op.kind)
        if operator.masks and operator.counts != Counts.LABELS:  # rows know the column of a label
            return (
                f"{op.kind} depends on positions, which only the loop of attention knows; mask "
                "scores [..., queries, keys] between the product that makes them and the one that "
                "contracts the keys"
            )
    for i, page in region.pages:
        return (
            f"input {i} lies in pages of {page}, and only the loop of attention reads through a "
            "table; gather the pages before"
        )
    return None


def _check_symbols(program: LabelledProgram) -> None:
    """Strides are numbers: only the outermost dimension of a stored tensor may be symbolic."""
    for _, m in program.outputs:
        for name in labels_of(m)[1:]:
            if isinstance(extent := program.dims[name], Symbol):
                raise SearchError(f"a tensor is stored with {extent} not as its first dimension")


# --------------------------------------------------------------------------------------- products


def _matmul_form(
    region: Region, program: LabelledProgram, products: list[LabelledOp]
) -> MatmulForm:
    after = after_products(program)
    first = [op for op in products if after.isdisjoint(op.inputs)]
    # of products over different labels the longest is the loop's: X W + T B with a T of 16 columns
    contracted = max((str(op.over) for op in first), key=lambda d: dim_extent(program.dims[d]))
    looped = [op for op in first if op.over == contracted]
    tails = [op for op in products if op not in looped]
    hidden = tuple(dict.fromkeys(op.over for op in tails if op.over is not None))
    row, column = _rows_and_columns(program, (tails or looped)[0], hidden)
    over = dict.fromkeys(
        op.over for i, op in enumerate(program.ops)
        if op.over is not None and (i not in after or op in looped)
    )
    if len(over) > 1:
        raise SearchError(
            f"one kernel reduces over one dimension, this needs {shown(map(str, over))}"
        )
    reduced = _check_after(program, after, hidden, column)
    for op in products:
        _check_product(program, op, row, column, contracted, hidden)
    inner = (row, column, contracted, *hidden)
    batch = tuple(d for d in program.dims if d not in inner)
    vectors = _has_vectors(program, contracted, {column, *hidden})
    if vectors and hidden:
        raise SearchError(
            f"a vector of {column} beside a product over {shown(hidden)}, of what another product "
            "gives: another kernel"
        )
    form = MatmulForm(row, column, contracted, batch, hidden, reduced, vectors)
    _check_extents(program, form)
    check_one_type(region, [op for op in program.of_kind("load") if _staged(region, op, form)])
    return form


def _has_vectors(program: LabelledProgram, contracted: str, free: set[str]) -> bool:
    """Whether something without rows is reduced to a row vector: see `MatmulForm.vectors`."""
    return any(
        op.over == contracted and not free.isdisjoint(op.labels) and not is_product(program, op)
        for op in program.ops
    )


def _rows_and_columns(
    program: LabelledProgram, product: LabelledOp, hidden: tuple[str, ...]
) -> tuple[str, str]:
    """The last two labels of what is stored; of a product, where only rows are stored."""
    a, b = (program.ops[i].labels for i in product.inputs)
    ends = {tuple(labels_of(m)[-2:]) for _, m in program.outputs}
    whole = {e for e in ends if len(e) == 2 and not set(e) <= a and not set(e) <= b}
    if len(whole) == 1:
        (end,) = whole
        return end
    rows = {labels_of(m)[-1] for _, m in program.outputs if labels_of(m)}
    free = [d for d in program.dims if d in (a | b) and d not in (product.over, *rows, *hidden)]
    if whole or len(rows) != 1 or not free:
        raise SearchError("a matrix product kernel stores tensors with the same rows and columns")
    return rows.pop(), free[-1]


def _check_after(
    program: LabelledProgram, after: set[int], hidden: tuple[str, ...], column: str
) -> bool:
    """What happens to products: one more product, or reductions along the columns; whether so.

    Raises:
        SearchError: something else is reduced, or stored that depends on no product.
    """
    reduced = False
    tails = program.dependence.after(
        i for i, op in enumerate(program.ops)
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


def _check_product(
    program: LabelledProgram, op: LabelledOp, row: str, column: str, contracted: str,
    hidden: tuple[str, ...],
) -> None:
    """One operand has the rows, the other one the columns or a hidden label."""
    a, b = (program.ops[i].labels - {op.over} for i in op.inputs)
    free = {column} if op.over != contracted else {column, *hidden}
    sides = ((a, b), (b, a))
    if not any(row in x and row not in y and free & y and not free & x for x, y in sides):
        raise SearchError(f"{row} and {column} are not the rows and columns of every product")


def _check_extents(program: LabelledProgram, form: MatmulForm) -> None:
    for name in (form.contracted, form.column, *form.hidden):
        extent: Dim = program.dims[name]
        if isinstance(extent, Symbol):
            raise SearchError(f"matmul: the extent {extent} may only be one of rows or batches")
        if extent % ALIGN:
            raise SearchError(
                f"matmul: the extent {extent} of an inner or column dimension is no multiple of "
                f"{ALIGN} (16-byte copies); pad the tensor with zeros to "
                f"{extent + -extent % ALIGN}"
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


def _staged(region: Region, op: LabelledOp, form: MatmulForm) -> bool:
    """Whether a load goes through shared memory, for products. Raises SearchError."""
    mapping = labels_of(op.attributes["map"])
    tensor = op.attributes["tensor"]
    operands = {form.contracted, *form.hidden} & set(mapping)
    matrix = len(operands | {form.row, form.column} & set(mapping)) > 1
    staged = form.contracted in mapping or (matrix and operands and form.column in mapping)
    if staged and region.input_dtypes[tensor].itemsize != 2:
        raise SearchError(
            f"matmul in {region.input_dtypes[tensor]}: the tensor cores take float16 and bfloat16; "
            "convert the operands to one of them"
        )
    inner = {form.contracted, form.column}
    labels = (form.contracted, form.column, *form.hidden)
    matrices = [set(p) for p in combinations(labels, 2) if set(p) <= set(mapping)]
    if matrices:
        if set(mapping[-2:]) not in matrices:
            raise SearchError("matmul: a column operand must have its matrix in the last two dims")
    elif (found := inner & set(mapping)) and mapping[-1] not in found:
        raise SearchError(
            f"matmul: a tensor is read with its rows along memory ({', '.join(mapping)}); only a "
            "plain second operand may be stored either way"
        )
    return bool(staged)


# ------------------------------------------------------------------------------------------- rows


def _row_form(region: Region, program: LabelledProgram) -> RowForm | PersistentForm:
    """Sums over many rows, a symbolic number of them, or of what takes positions along the rows are
    left to blocks that visit them."""
    reduced = program.reduced
    counted = {op.attributes["columns"] for op in program.ops if "columns" in op.attributes}
    summed = [program.dims[d] for d in reduced if d != along_rows(program)]
    symbolic = any(isinstance(n, Symbol) for n in summed)
    beside = bool(reduced) and not counted <= set(reduced)
    must = len(reduced) > 1 or symbolic or beside
    if must or any(dim_extent(n) > MAX_COLUMN for n in summed):
        try:
            return persistent_form(region, program)
        except SearchError:
            if must:
                raise
    stored = [labels_of(m) for _, m in program.outputs]
    loaded = [labels_of(op.attributes["map"]) for op in program.of_kind("load")]
    row = row_label(program.dims, reduced, stored, loaded)
    if row is None:
        raise SearchError("all tensors have one element; no kernel is made for that")
    if isinstance(program.dims[row], Symbol):
        raise SearchError(
            f"rows run along {row}, which has the symbolic extent {program.dims[row]}; of a tensor "
            "that is read only its first dimension may be symbolic, and another one must be longer "
            "than 1"
        )
    if not counted <= {row}:
        raise SearchError(f"positions along {shown(sorted(counted))}, and rows run along {row}")
    clustered = bool(reduced) and _exceeds_a_block(program, row)
    if (clustered or counted) and len(program.dims) == 1:
        why = "long" if clustered else "with positions"
        raise SearchError(
            f"one row of {program.dims[row]} elements, {why}: "
            "the row loop walks along a label of the rows; make their number a cutesuper.symbol()"
        )
    if clustered:
        check_cluster_row(program, row)
    better = bool(reduced) and _better_in_a_cluster(program, row)
    return RowForm(row, bool(reduced), clustered or better)


def _exceeds_a_block(program: LabelledProgram, row: str) -> bool:
    """Whether a block cannot hold one row of everything that has rows."""
    whole, tensors = dim_extent(program.dims[row]), _with_rows(program, row)
    return whole > MAX_ROW or tensors * whole > MAX_RESIDENT


def _better_in_a_cluster(program: LabelledProgram, row: str) -> bool:
    """Whether several blocks on an SM that have parts of rows are better than one that has a whole
    row: softmax of 32768x32768 takes 1029 us, 1107 in one block; the gradient of 32768x16384 736,
    and 778. Of 16384x65536 LayerNorm's threads hold weights if they have 32 columns (1104 us), not
    of 64 (1313). Rows that are only read are no matter of registers."""
    whole, tensors = dim_extent(program.dims[row]), _with_rows(program, row)
    written = any(row in labels_of(m) for _, m in program.outputs)
    vectors = any(op.labels == frozenset({row}) for op in program.of_kind("load"))
    long = whole > longest_tile(tensors) and (tensors == 1 or not vectors)
    if not (long and written and whole % ALIGN == 0 and len(program.dims) > 1):
        return False
    try:
        check_cluster_row(program, row)
    except SearchError:
        return False
    return True


def _with_rows(program: LabelledProgram, row: str) -> int:
    """Tensors that differ from row to row, and along them."""
    return sum(row in op.labels and len(op.labels) > 1 for op in program.of_kind("load"))
