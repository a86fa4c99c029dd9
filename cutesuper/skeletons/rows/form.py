"""Rows as rules for the search.

`RowForm`: whole rows are resident in a block or in a cluster, and tensors have any order. Of rows
that neither holds, blocks reduce a part each, and a second kernel combines what they leave.

`PersistentForm`: blocks visit rows in turn, because values are summed over them.
``dx[M, N] = f(x, dy, ..)`` and ``dw[N] = sum over M of g(x, dy, ..)``: the grid divides the rows, a
block visits tiles of its share and accumulates, and at the end the grid combines the sums of its
blocks, in the same launch. Rows that are reduced are whole in a block, or in a cluster; others are
divided by the grid as well.

before: RMSNorm's backward pass as two kernels, which read x and dy twice; after, for 4096 rows of
4096 elements: ``M.grid(128) M.persistent(16)``, tile M=2 N=4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import labels_of, shown
from cutesuper.egraph.reductions import operand_labels, reduced_before
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import CLUSTER_REDUCE, ENDING, GRID_REDUCE, STORE, AxisKind, BlockProgram
from cutesuper.ir.check import check_block_program
from cutesuper.ir.dims import Symbol, extent
from cutesuper.skeletons.form import ALIGN, FOLDED, check_index, check_symbols
from cutesuper.skeletons.rows.roles import row_label, walks_one_way
from cutesuper.skeletons.rows.schedule import LARGE, MAX_ROW
from cutesuper.skeletons.rows.settings import SETTINGS, stage_limit
from cutesuper.targets import Target

#: most elements of a column that a block sums by itself, in whatever order tensors are stored: 32
#: lanes of 32 elements; longer ones are left to blocks that visit rows in turn
MAX_COLUMN = 32 * 32
#: most elements of all tensors of a row that a block's registers hold, beside 32 of each thread
MAX_RESIDENT = 65536 - 32 * LARGE
#: longest row in a cluster
MAX_CLUSTER_ROW = 262144
#: longest row of which places are found: they are numbers of fp32
MAX_PLACE = 1 << 24
#: why every block would store an output
OF_NO_ROWS = "an output that does not depend on the rows"


@dataclass(frozen=True)
class RowForm:
    """Rows resident in one block, or in a cluster.

    Attributes:
        row: the label along the rows, whole (if reduced) or tiled (if nothing is reduced); see
            `skeletons.rows.roles.row_label`.
        reduced: True if anything is reduced over it, or moved along it.
        clustered: True if a row is longer than one block can hold: a cluster shares it.
        parted: True if it is longer than a cluster can hold: each block leaves a partial result.
    """

    row: str
    reduced: bool
    clustered: bool = False
    parted: bool = False
    vectors = False

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """One split: the reduced label whole, or divided by a cluster or the grid.
        All others are grid axes."""
        along = (AxisKind.CLUSTER,) if self.clustered else (AxisKind.GRID,) if self.parted else ()
        whole = self.row if self.reduced else None
        kinds = ((d, along if d == whole else (AxisKind.GRID,)) for d in program.dims)
        return (Split(tuple(kinds), parted=self.row if self.parted else None),)

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True for every element-wise operator on complete values.
        On those of parts too: sums of exponentials are shifted by the maximum of a part."""
        return self.parted or not state.pending

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True for reductions along the row."""
        return over == self.row

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Always False: there are no matrix products."""
        return False

    def refuses(self, program: BlockProgram) -> str | None:
        """Refuse parts of rows that blocks would have to meet for."""
        meets = self.parted and any(op.kind in ENDING for op in program.ops)
        return "parts of rows that meet in one launch" if meets else None


@dataclass(frozen=True)
class PersistentForm:
    """Rows visited in turn, and sums over them.

    Attributes:
        row: the label along the rows.
        visited: the label of rows that a block visits in turn.
        summed: the labels of rows over which anything is summed, the visited one first; the grid
            combines over all of them.
        others: labels of rows over which nothing is summed.
        reduced: True if anything is reduced along the rows.
        clustered: True if a row is split over a cluster.
    """

    row: str
    visited: str
    summed: tuple[str, ...]
    others: tuple[str, ...]
    reduced: bool
    clustered: bool
    vectors = False

    @property
    def rows(self) -> frozenset[str]:
        """All labels but the one along the rows."""
        return frozenset((*self.summed, *self.others))

    def splits(self, program: LabelledProgram) -> tuple[Split, ...]:
        """The only split; see the module."""
        along = (AxisKind.CLUSTER,) if self.clustered else () if self.reduced else (AxisKind.GRID,)
        kinds: dict[str, tuple[AxisKind, ...]] = dict.fromkeys(program.dims, (AxisKind.GRID,))
        kinds[self.visited] = (AxisKind.GRID, AxisKind.PERSISTENT)
        kinds[self.row] = along
        return (Split(tuple(kinds.items()), joined=self.summed),)

    # ------------------------------------------------------------------------ rules of saturation

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """True for every element-wise operator on complete values."""
        return not state.pending

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """True for reductions first along the row, then over the labels of the rows in their order.
        Values summed over the rows are not reduced again."""
        if state.closed:
            return False
        if over == self.row:
            return labels >= self.rows
        if over not in self.summed or f"{self.row}.{AxisKind.CLUSTER}" in state.pending:
            return False
        before = self.summed[: self.summed.index(over)]
        gone = self.rows - labels
        return gone == frozenset(before) and all(f"{d}.grid" in state.pending for d in before)

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """Always False: there are no matrix products."""
        return False

    def refuses(self, program: BlockProgram) -> str | None:
        """Refuse axes and outputs that a row loop has no use for.
        Axes that divide nothing, outputs that every block would store, and values that only the
        block that finishes a sum could compute."""
        kinds = {op.kind for op in program.ops}
        if GRID_REDUCE not in kinds:
            return "rows visited in turn, and no sum over them"
        if self.clustered and CLUSTER_REDUCE not in kinds:
            return "an unused cluster axis"
        states = check_block_program(program)
        narrow: set[int] = set()  # sums over rows without columns, and values computed from them
        for i, op in enumerate(program.ops):
            if (op.kind == GRID_REDUCE and self.row not in op.dims) or narrow & set(op.inputs):
                narrow.add(i)
                if self.row in op.dims:
                    return "a sum over rows, which one block has, is needed in every column"
            combined = any(name.endswith(AxisKind.GRID) for name, _ in states[i].closed)
            if op.kind == STORE and not combined and self.visited not in op.dims:
                return OF_NO_ROWS
        return None


def row_form(region: Region, program: LabelledProgram, target: Target) -> RowForm | PersistentForm:
    """The form of a region without products.
    Sums over many rows, over a symbolic number of rows, or of values that take positions along the
    rows are left to blocks that visit them."""
    reduced = program.reduced
    counted = {op.attributes["columns"] for op in program.ops if "columns" in op.attributes}
    moved = {op.attributes["along"]: None for op in program.ops if op.facets.turns}
    summed = [program.dims[d] for d in reduced if d != along_rows(program)]
    symbolic = any(isinstance(n, Symbol) for n in summed)
    beside = bool(reduced) and not {*counted, *moved} <= set(reduced)
    must = len(reduced) > 1 or symbolic or beside
    if must or any(extent(n) > MAX_COLUMN for n in summed):
        check_index(region)
        try:
            return persistent_form(region, program, target)
        except SearchError:
            if must:
                raise
    row = _row(program, reduced or [*moved])
    if not {*counted, *moved} <= {row}:
        places = shown(sorted({*counted, *moved}))
        raise SearchError(f"positions along {places}, and rows run along {row}")
    walked = extent(program.dims[row]) > MAX_ROW and walks_one_way(program.ops, bool(reduced))
    if moved and not walked and _exceeds_a_block(program, row):
        kinds = shown(sorted({op.kind for op in program.ops if op.facets.turns}))
        raise SearchError(
            f"{kinds} along rows of {program.dims[row]} elements; a block holds one row of all "
            f"tensors, {MAX_ROW} elements at most, and walks along longer ones for sums up to each "
            "element, or from each on, alone"
        )
    clustered = bool(reduced) and _exceeds_a_block(program, row)
    if clustered or counted:
        check_index(region)
    if clustered and not _fits_a_cluster(program, row) and _counts_columns(program):
        _check_parts(program, row)
        return RowForm(row, True, parted=True)
    if clustered:
        check_cluster_row(program, row)
    through = bool(region.taken or region.put or moved)
    if through or clustered:
        check_symbols(program)
    better = bool(reduced) and not through and _better_in_a_cluster(program, row, target)
    return RowForm(row, bool(reduced or moved), clustered or better)


def _row(program: LabelledProgram, reduced: Sequence[str]) -> str:
    """The label that runs along the rows. Raises SearchError if there is none of known extent."""
    stored = [labels_of(m) for _, m in program.outputs]
    loaded = [labels_of(op.attributes["map"]) for op in program.of_kind("load")]
    row = row_label(program.dims, reduced, stored, loaded)
    if row is None:
        raise SearchError("all tensors have one element; no kernel is made for that")
    if isinstance(program.dims[row], Symbol):
        raise SearchError(
            f"rows run along {row}, which has the symbolic extent {program.dims[row]}; another "
            "dimension must be a number above 1"
        )
    return row


def _exceeds_a_block(program: LabelledProgram, row: str) -> bool:
    """True if a block cannot hold one row of all tensors that have rows."""
    whole, tensors = extent(program.dims[row]), _with_rows(program, row)
    return whole > MAX_ROW or tensors * whole > MAX_RESIDENT


def exceeds_a_cluster(length: int, alone: bool) -> bool:
    """True if neither a block nor a cluster holds a row; ``alone``: it is the only one."""
    return length > (MAX_ROW if alone else MAX_CLUSTER_ROW)


def _fits_a_cluster(program: LabelledProgram, row: str) -> bool:
    """True if a cluster can hold a row, one of several or one of which positions are taken."""
    try:
        check_cluster_row(program, row)
    except SearchError:
        return False
    return len(program.dims) > 1 or any("columns" in op.attributes for op in program.ops)


def _counts_columns(program: LabelledProgram) -> bool:
    """True if positions are those along rows, and none are those of rows."""
    return all(op.attributes.get("rows") is None for op in program.ops)


def _check_parts(program: LabelledProgram, row: str) -> None:
    """Refuse elements that are needed again when their row is reduced. Raises SearchError."""
    before, length = reduced_before(program), extent(program.dims[row])
    found = [how for op in program.ops if (how := op.facets.reduces) is not None and how.places]
    if found and length > MAX_PLACE:
        raise SearchError(f"{found[0].noun} in a row of {length} elements; at most {MAX_PLACE}")
    stored = [i for i, m in program.outputs if row in labels_of(m)]
    if any(row in before[i] for i in stored):
        raise SearchError(
            f"elements of rows of {length} are needed again after a reduction along "
            f"them; a cluster holds {MAX_CLUSTER_ROW}: another kernel reads them again"
        )


def _better_in_a_cluster(program: LabelledProgram, row: str, target: Target) -> bool:
    """True if several blocks on an SM with parts of rows beat one with a whole row, as measured."""
    whole = extent(program.dims[row])
    vectors = any(op.labels == frozenset({row}) for op in program.of_kind("load"))
    written = any(row in labels_of(m) for _, m in program.outputs)
    found = SETTINGS.choose(
        target, "cluster", tensors=_with_rows(program, row), length=whole, written=written,
        vectors=vectors,
    )  # fmt: skip
    if not found["share"] or whole % ALIGN or len(program.dims) == 1:
        return False
    try:
        check_cluster_row(program, row)
        check_symbols(program)
    except SearchError:
        return False
    return True


def _with_rows(program: LabelledProgram, row: str) -> int:
    """Number of tensors that differ from row to row, and along the rows."""
    return sum(row in op.labels and len(op.labels) > 1 for op in program.of_kind("load"))


# ------------------------------------------------------------------------- rows visited in turn


def persistent_form(region: Region, program: LabelledProgram, target: Target) -> PersistentForm:
    """The form of a region without products that sums over rows.

    Raises:
        SearchError: with the reason why this form cannot run it.
    """
    row = along_rows(program)
    summed = [d for d in program.reduced if d != row]
    if row is None or not summed:
        raise SearchError("nothing is summed over rows")
    if isinstance(symbol := program.dims[row], Symbol):
        raise SearchError(f"rows run along {row}, which has the symbolic extent {symbol}")
    visited, *rest = summed = _visited_first(program, summed)
    others = tuple(d for d in program.dims if d != row and d not in summed)
    symbolic = [d for d in (*rest, *others) if isinstance(program.dims[d], Symbol)]
    if symbolic:
        raise SearchError(
            f"a sum over {shown(summed)} with a symbolic {shown(symbolic)} beside it: how many "
            "partial results there are must be known"
        )
    _check_reductions(program, row, summed, {*summed, *others})
    _check_outputs(program, visited, set(summed))
    _check_orders(program, row)
    held = row_bytes(region, program, {row, visited})
    reduced = row in program.reduced
    clustered = reduced and held > stage_limit(target)
    if clustered:
        check_cluster_row(program, row)
    check_symbols(program)
    return PersistentForm(row, visited, tuple(summed), others, reduced, clustered)


def along_rows(program: LabelledProgram) -> str | None:
    """The label along which most elements are contiguous, whether or not it is reduced."""
    stored = [labels_of(m) for _, m in program.outputs]
    loaded = [labels_of(op.attributes["map"]) for op in program.of_kind("load")]
    return row_label(program.dims, (), stored, loaded)


def row_bytes(region: Region, program: LabelledProgram, labels: set[str]) -> int:
    """Bytes of one row of all tensors that are loaded with these labels, the row's included."""
    row = along_rows(program)
    assert row is not None
    return extent(program.dims[row]) * sum(
        region.input_dtypes[op.attributes["tensor"]].itemsize
        for op in program.of_kind("load")
        if labels <= op.labels
    )


def check_cluster_row(program: LabelledProgram, row: str) -> None:
    """Refuse rows that no cluster holds, or that are not contiguous. Raises SearchError."""
    if extent(program.dims[row]) > MAX_CLUSTER_ROW:
        raise SearchError(
            f"a reduction over {program.dims[row]} elements; a cluster holds {MAX_CLUSTER_ROW}; "
            "give the graph two dimensions in place of this one, and reduce the last one first"
        )
    _check_orders(program, row)


def _check_orders(program: LabelledProgram, row: str) -> None:
    """Check that rows are contiguous in every tensor. Raises SearchError."""
    maps = [m for _, m in program.outputs]
    maps += [op.attributes["map"] for op in program.of_kind("load")]
    for labels in map(labels_of, maps):
        if row in labels and labels[-1] != row:
            raise SearchError(
                f"a tensor is stored with its rows along memory ({shown(labels)}); rows that are "
                f"visited in turn, or lie in a cluster, are contiguous along {row}"
            )


def _visited_first(program: LabelledProgram, summed: list[str]) -> list[str]:
    """The labels that are summed, the visited one first.
    Of those that every sum over rows takes, the symbolic or longest one. Raises SearchError."""
    before = reduced_before(program)
    again = {d for i, m in program.outputs for d in labels_of(m) if d in before[i] & set(summed)}
    if again:
        raise SearchError(f"an output along {shown(again)} needs sums over it: a second visit")
    sums = [s for i, _ in program.outputs if (s := before[i] & set(summed))]
    common = frozenset[str](summed).intersection(*sums)
    if len(set(sums)) > 1:
        raise SearchError(f"sums over {shown(summed)}, each of other rows: several kernels")
    first = max(
        (d for d in summed if d in common),
        key=lambda d: (isinstance(program.dims[d], Symbol), extent(program.dims[d])),
    )
    return [first, *(d for d in summed if d != first)]


def _check_outputs(program: LabelledProgram, visited: str, summed: set[str]) -> None:
    """Check that each output has the rows that are visited, or sums over rows. Raises SearchError.
    Whatever its structure is: found at once, while every structure of 31 operators took 2 s."""
    reduced = reduced_before(program)
    for i, _ in program.outputs:
        if visited not in program.ops[i].labels and summed.isdisjoint(reduced[i]):
            raise SearchError(OF_NO_ROWS)


def _check_reductions(
    program: LabelledProgram, row: str, summed: list[str], rows: set[str]
) -> None:
    """Check that reduced values have all labels of the rows that are not summed before.
    Nothing is reduced along the row after that. Raises SearchError."""
    reduced = reduced_before(program)
    for op in program.ops:
        if op.over is None:
            continue
        how = op.facets.reduces
        if op.over in summed and how is not None and how not in FOLDED:
            raise SearchError(
                f"a {how.noun} over the rows {op.over}; there are only sums, means and maxima"
            )
        before = frozenset[str]().union(*(reduced[i] for i in op.inputs))
        absent = rows - operand_labels(program, op) - (set() if op.over == row else before)
        if absent:
            raise SearchError(
                f"{op.kind} over {op.over} of what does not have {shown(sorted(absent))}: every "
                "block would compute it again"
            )
