"""The form of rows that blocks visit in turn, because values are summed over the rows.

``dx[M, N] = f(x, dy, ..)`` and ``dw[N] = sum over M of g(x, dy, ..)``: the grid divides the rows, a
block visits tiles of its share and accumulates, and at the end the grid combines the sums of its
blocks, in the same launch. Rows that are reduced are whole in a block, or in a cluster; others are
divided by the grid as well.

before: RMSNorm's backward pass as two kernels, which read x and dy twice; after, for 4096 rows of
4096 elements: ``M.grid(128) M.persistent(16)``, tile M=2 N=4096.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import labels_of, shown
from cutesuper.egraph.reductions import operand_labels, reduced_before
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import CLUSTER_REDUCE, GRID_REDUCE, STORE, AxisKind, BlockProgram
from cutesuper.ir.check import check_block_program
from cutesuper.ir.dims import Symbol, extent
from cutesuper.ir.operators.monoid import SUM
from cutesuper.skeletons.rows.limits import row_label

#: bytes of a tile of rows, of all tensors that have rows: with two in flight RMSNorm's backward
#: pass of 4096x4096 takes 28.6 us, with three and four 31; 16384 elements 101.6 in a cluster, where
#: a block has 32 KB of a row, and 108 to 121 without
STAGE_BYTES = 32 * 1024
#: cluster sizes in blocks; more than 8 are not portable
CLUSTERS = (2, 4, 8, 16)
#: longest row in a cluster
MAX_CLUSTER_ROW = 262144


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
        """True for reductions first along the row, then over the labels of the rows in their order;
        values summed over the rows are not reduced again."""
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
        """Refuse axes that divide nothing, outputs that every block would store, and values that
        only the block that finishes a sum could compute."""
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
                return "an output that does not depend on the rows"
        return None


def persistent_form(region: Region, program: LabelledProgram) -> PersistentForm:
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
    _check_orders(program, row)
    held = row_bytes(region, program, {row, visited})
    reduced = row in program.reduced
    clustered = reduced and held > STAGE_BYTES
    if clustered:
        check_cluster_row(program, row)
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
            f"a reduction over {program.dims[row]} elements; a cluster holds {MAX_CLUSTER_ROW}"
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
    """The labels that are summed, the visited one first: of those that every sum over rows takes,
    the symbolic or longest one. Raises SearchError."""
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


def _check_reductions(
    program: LabelledProgram, row: str, summed: list[str], rows: set[str]
) -> None:
    """Check that reduced values have all labels of the rows, except those they were summed over
    before, and that nothing is reduced along the row after that. Raises SearchError."""
    reduced = reduced_before(program)
    for op in program.ops:
        if op.over is None:
            continue
        how = op.facets.reduces
        if op.over in summed and how not in (None, SUM):
            raise SearchError(
                f"a {how.noun} over the rows {op.over}; there are only sums and means"
            )
        before = frozenset[str]().union(*(reduced[i] for i in op.inputs))
        absent = rows - operand_labels(program, op) - (set() if op.over == row else before)
        if absent:
            raise SearchError(
                f"{op.kind} over {op.over} of what does not have {shown(sorted(absent))}: every "
                "block would compute it again"
            )
