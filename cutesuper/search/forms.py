"""Forms: what the skeletons of the lowering can run, as rules that the search asks.

* `MatmulForm`: one loop over the contracted label, any number of products that share a row operand,
  statistics of the rows, an element-wise epilogue.
* `RowForm`: no products; whole rows are resident, in whatever order tensors are stored.
* `BlockForm`: everything that a block program can express, whether or not a skeleton runs it.

`find_form` gives the skeleton of a region before it is searched; a region that none can run is
refused with the reason, and the kernel-level search cuts the graph elsewhere. A new skeleton is a
new form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cutesuper.errors import SearchError
from cutesuper.graph.block import CLUSTER_REDUCE, AxisKind, BlockProgram
from cutesuper.graph.dims import Dim, Symbol
from cutesuper.graph.rows import MAX_ROW, row_label
from cutesuper.graph.shift import find_shift
from cutesuper.graph.vectors import MAX_VECTORS, vector_products
from cutesuper.search.labels import LabelledOp, LabelledProgram, LabelMap, Region
from cutesuper.search.splits import AnyRules, Operand, Split, State, splits

#: 16-byte copies of 16-bit elements
ALIGN = 8


_MATMUL_SPLITS = ((AxisKind.LOOP,), (AxisKind.CLUSTER, AxisKind.LOOP))


@dataclass(frozen=True)
class MatmulForm:
    """``[batch..., row, contracted] @ [batch..., contracted, column]`` and what may surround it.

    Attributes:
        row: label of the rows; statistics and prologues belong to this side.
        column: label of the columns; the operand that has it is a plain load.
        contracted: the label of the loop.
        batch: all other labels.
        vectors: whether vectors along the contracted label are multiplied by a column operand, or
            a column operand is summed, beside the products of the rows: ``G[K] @ W[K, N]``.
    """

    row: str
    column: str
    contracted: str
    batch: tuple[str, ...]
    vectors: bool = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """The loop alone, and the loop with a cluster; everything else is grid."""
        return tuple(
            Split(
                tuple((d, k if d == self.contracted else (AxisKind.GRID,)) for d in program.dims)
            )
            for k in _MATMUL_SPLITS
        )

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """Prologues on staged rows and vectors, epilogues on complete values.

        Nothing on partial sums, nothing on the column side, and no scalar of a row (``[M, 1]``)
        inside the loop: what is staged has the contracted label.
        """
        if state.pending or any({self.contracted, self.column} <= x for x in operands):
            return False
        staged = [self.contracted in x for x in operands if x]
        return all(staged) or not any(staged)

    def reduces(self, labels: frozenset[str], over: str) -> bool:
        """Statistics of rows; sums of a column operand are products with a vector of ones."""
        return over == self.contracted and (self.vectors or self.column not in labels)

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Rows first; the column operand is a plain load, the row operand no partial sum."""
        vector = self.vectors and a.labels == frozenset((self.contracted,))
        return (
            over == self.contracted
            and (vector or {self.row, self.column} & a.labels == {self.row})
            and {self.row, self.column} & b.labels == {self.column}
            and b.loaded
            and not a.state.pending
        )

    def refuses(self, program: BlockProgram) -> str | None:
        """Why a program that obeys the rules still cannot run, or None."""
        vectors = vector_products(program, self.row, self.column, self.contracted)
        products = {op.inputs for op in program.ops if op.kind == "matmul"}
        products -= {op.inputs for op in vectors}
        if len({a for a, _ in products}) > 1:
            return "products with different row operands"
        if any(op.kind not in ("matmul", "sum") for op in vectors):
            return "a column operand is reduced by something else than a sum"
        if not {op.inputs[-1] for op in vectors} <= {b for _, b in products}:
            return "vectors are multiplied by a column operand that the rows are not multiplied by"
        if len({op.inputs[:-1] for op in vectors}) > MAX_VECTORS:
            return f"more than {MAX_VECTORS} vectors are multiplied by column operands"
        stored = {
            op.attributes["map"][-1] == self.column
            for op in program.loads()
            if {self.contracted, self.column} <= set(op.dims)
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


@dataclass(frozen=True)
class RowForm:
    """Rows resident in one block.

    Attributes:
        row: the label along them, whole (if reduced) or tiled (if nothing is reduced); see
            `graph.rows.row_label`.
        reduced: whether anything is reduced over it.
    """

    row: str
    reduced: bool
    vectors = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """One: the reduced label whole, all others grid."""
        whole = self.row if self.reduced else None
        kinds = ((d, () if d == whole else (AxisKind.GRID,)) for d in program.dims)
        return (Split(tuple(kinds)),)

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """Everything element-wise."""
        return True

    def reduces(self, labels: frozenset[str], over: str) -> bool:
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


Form = MatmulForm | RowForm | BlockForm


def find_form(region: Region, program: LabelledProgram) -> Form:
    """The form of a region.

    Raises:
        SearchError: with the reason why no form can run it.
    """
    _check_symbols(program)
    products = matrix_products(program)
    return _matmul_form(region, program, products) if products else _row_form(program)


def matrix_products(program: LabelledProgram) -> list[LabelledOp]:
    """The products that need the tensor cores."""
    return [op for op in program.ops if _is_product(program, op)]


def _labels(mapping: LabelMap) -> list[str]:
    return [x for x in mapping if x is not None]


def _check_symbols(program: LabelledProgram) -> None:
    """Strides are numbers: only the outermost dimension of a stored tensor may be symbolic."""
    for _, m in program.outputs:
        for name in _labels(m)[1:]:
            if isinstance(extent := program.dims[name], Symbol):
                raise SearchError(f"a tensor is stored with {extent} not as its first dimension")


def _is_product(program: LabelledProgram, op: LabelledOp) -> bool:
    """A product of a matrix with a vector is a multiplication and a sum instead."""
    if op.kind != "matmul":
        return False
    a, b = (program.ops[i].labels for i in op.inputs)
    return not a <= b and not b <= a


# --------------------------------------------------------------------------------------- products


def _matmul_form(
    region: Region, program: LabelledProgram, products: list[LabelledOp]
) -> MatmulForm:
    over = dict.fromkeys(op.over for op in program.ops if op.over is not None)
    contracted = products[0].over
    if contracted is None or len(over) > 1:
        raise SearchError(f"one kernel reduces over one dimension, this needs {_shown(over)}")
    _check_order_of_products(program)
    ends = {tuple(_labels(m)[-2:]) for _, m in program.outputs}
    if len(ends) > 1 or len(end := ends.pop()) < 2:
        raise SearchError("a matrix product kernel stores tensors with the same rows and columns")
    row, column = end
    for op in products:
        a, b = (program.ops[i].labels for i in op.inputs)
        if (column in a) == (column in b) or row in (a if column in a else b):
            raise SearchError(f"{row} and {column} are not the rows and columns of every product")
    batch = tuple(d for d in program.dims if d not in (row, column, contracted))
    form = MatmulForm(row, column, contracted, batch, _has_vectors(program, column, contracted))
    _check_extents(program, form)
    for op in program.of_kind("load"):
        _check_load(region, op, form)
    return form


def _has_vectors(program: LabelledProgram, column: str, contracted: str) -> bool:
    """Whether something without rows is reduced to a row vector: see `MatmulForm.vectors`."""
    return any(
        op.over == contracted and column in op.labels and not _is_product(program, op)
        for op in program.ops
    )


def _check_order_of_products(program: LabelledProgram) -> None:
    """Products first: nothing may be reduced of what they give, and nothing else is stored."""
    after: set[int] = set()
    for i, op in enumerate(program.ops):
        if not after.isdisjoint(op.inputs):
            if op.over is not None:
                raise SearchError(f"{op.kind} of what a matrix product gives: another kernel")
            after.add(i)
        if _is_product(program, op):
            after.add(i)
    if any(i not in after for i, _ in program.outputs):
        raise SearchError("a matrix product kernel stores only what depends on a product")


def _check_extents(program: LabelledProgram, form: MatmulForm) -> None:
    for name in (form.contracted, form.column):
        extent: Dim = program.dims[name]
        if isinstance(extent, Symbol):
            raise SearchError(f"matmul: the extent {extent} may only be one of rows or batches")
        if extent % ALIGN:
            raise SearchError(
                f"matmul: the extent {extent} of an inner or column dimension is no multiple of "
                f"{ALIGN} (16-byte copies); pad the tensor"
            )


def _check_load(region: Region, op: LabelledOp, form: MatmulForm) -> None:
    mapping = _labels(op.attributes["map"])
    tensor = op.attributes["tensor"]
    if form.contracted in mapping and region.input_dtypes[tensor].itemsize != 2:
        raise SearchError(
            f"matmul in {region.input_dtypes[tensor]}: the tensor cores take float16 and bfloat16"
        )
    inner = {form.contracted, form.column}
    if inner <= set(mapping):
        if set(mapping[-2:]) != inner:
            raise SearchError("matmul: a column operand must have its matrix in the last two dims")
    elif (found := inner & set(mapping)) and mapping[-1] not in found:
        raise SearchError(
            f"matmul: a tensor is read with its rows along memory ({', '.join(mapping)}); only a "
            "plain second operand may be stored either way"
        )


# ------------------------------------------------------------------------------------------- rows


def _row_form(program: LabelledProgram) -> RowForm:
    reduced = program.reduced
    if len(reduced) > 1:
        raise SearchError(f"one kernel reduces over one dimension, this needs {_shown(reduced)}")
    stored = [_labels(m) for _, m in program.outputs]
    loaded = [_labels(op.attributes["map"]) for op in program.of_kind("load")]
    row = row_label(program.dims, reduced, stored, loaded)
    if row is None:
        raise SearchError("all tensors have one element; no kernel is made for that")
    extent = program.dims[row]
    if isinstance(extent, Symbol):
        raise SearchError(f"rows run along {row}, which has the symbolic extent {extent}")
    if reduced and extent > MAX_ROW:
        raise SearchError(f"a reduction over {extent} elements; at most {MAX_ROW} are resident")
    return RowForm(row, bool(reduced))


def _shown(labels: Iterable[str]) -> str:
    return ", ".join(labels)
