"""Row kernels as rules for the search: whole rows are resident, and tensors have any order.

Sums over rows, which blocks visit in turn, are `rows.loop_form`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import (
    labels_of,
    shown,
)
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import (
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dims import extent as dim_extent
from cutesuper.skeletons.form import ALIGN
from cutesuper.skeletons.rows.limits import MAX_ROW, longest_tile, row_label
from cutesuper.skeletons.rows.loop_form import (
    PersistentForm,
    along_rows,
    check_cluster_row,
    persistent_form,
)

#: most elements of a column that a block sums by itself, in whatever order tensors are stored: 32
#: lanes of 32 elements; longer ones are left to blocks that visit rows in turn
MAX_COLUMN = 32 * 32
#: most elements of all tensors of a row that a block's registers hold, beside 32 of each thread
MAX_RESIDENT = 65536 - 32 * 512


@dataclass(frozen=True)
class RowForm:
    """Rows resident in one block, or in a cluster.

    Attributes:
        row: the label along the rows, whole (if reduced) or tiled (if nothing is reduced); see
            `skeletons.rows.limits.row_label`.
        reduced: True if anything is reduced over it.
        clustered: True if a row is longer than one block can hold: a cluster shares it.
    """

    row: str
    reduced: bool
    clustered: bool = False
    vectors = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """One split: the reduced label whole, or divided by a cluster; all others are grid axes."""
        along = (AxisKind.CLUSTER,) if self.clustered else ()
        whole = self.row if self.reduced else None
        kinds = ((d, along if d == whole else (AxisKind.GRID,)) for d in program.dims)
        return (Split(tuple(kinds)),)

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True for every element-wise operator on complete values."""
        return not state.pending

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True for reductions along the row."""
        return over == self.row

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Always False: there are no matrix products."""
        return False

    def refuses(self, program: BlockProgram) -> str | None:
        """Always None: there is nothing more to refuse."""
        return None


def row_form(region: Region, program: LabelledProgram) -> RowForm | PersistentForm:
    """The form of a region without products. Sums over many rows, over a symbolic number of rows,
    or of values that take positions along the rows are left to blocks that visit them."""
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
    """True if a block cannot hold one row of all tensors that have rows."""
    whole, tensors = dim_extent(program.dims[row]), _with_rows(program, row)
    return whole > MAX_ROW or tensors * whole > MAX_RESIDENT


def _better_in_a_cluster(program: LabelledProgram, row: str) -> bool:
    """True if several blocks on an SM with parts of rows are better than one block with a whole
    row: softmax of 32768x32768 takes 1029 us, 1107 in one block; the gradient of 32768x16384 736,
    and 778. For 16384x65536 LayerNorm's threads hold weights if they have 32 columns (1104 us), not
    with 64 (1313). Rows that are only read do not need registers."""
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
    """Number of tensors that differ from row to row, and along the rows."""
    return sum(row in op.labels and len(op.labels) > 1 for op in program.of_kind("load"))
