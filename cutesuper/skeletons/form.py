"""The rules that a skeleton gives the search, and helpers that forms share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from cutesuper.egraph.labelled import LabelledProgram, Region
from cutesuper.egraph.products import (
    labels_of,
)
from cutesuper.egraph.splits import Operand, Split, State
from cutesuper.errors import SearchError
from cutesuper.ir.block import LOAD, Axis, AxisKind, BlockProgram
from cutesuper.ir.border import ALIGNMENT
from cutesuper.ir.dims import Symbol, extent, show_shape
from cutesuper.ir.dtypes import float32
from cutesuper.ir.operators.base import Counts, lookup
from cutesuper.ir.operators.monoid import MAX, SUM, Monoid

#: what threads fold vectors of elements by: `device.fragments.folded`
FOLDED = (SUM, MAX)
#: 16-bit elements in the 16 bytes that TMA (bulk tensor loads) moves: extents are multiples of it
ALIGN = 8


class Form(Protocol):
    """Rules for the programs that a skeleton can run, for saturation; see `egraph.splits.Rules`."""

    @property
    def vectors(self) -> bool:
        """True if a matrix may be contracted with a vector as well."""
        ...

    def splits(self, program: LabelledProgram) -> Iterable[Split]:
        """Splits of the labels over axes, simplest first."""
        ...

    def computes(self, operands: tuple[frozenset[str], ...], state: State) -> bool:
        """See `egraph.splits.Rules`."""
        ...

    def reduces(self, labels: frozenset[str], over: str, state: State) -> bool:
        """See `egraph.splits.Rules`."""
        ...

    def contracts(self, a: Operand, b: Operand, over: str) -> bool:
        """See `egraph.splits.Rules`."""
        ...

    def refuses(self, program: BlockProgram) -> str | None:
        """Reason why a program that obeys the rules still cannot run, or None."""
        ...


def single_reduction(program: BlockProgram) -> list[str] | None:
    """The labels that a given program reduces, at most one.
    None if its extents are part of its meaning: several labels are reduced, or tensors have slices
    of partial results."""
    stored = [op.attributes["map"] for op in program.stores()]
    plain = all(isinstance(d, str) and d in program.dims for m in stored for d in m if d)
    over = (op.attributes["over"] for op in program.ops if "over" in op.attributes)
    reduced = list(dict.fromkeys(over))
    return reduced if plain and len(reduced) <= 1 else None


def unsized(program: BlockProgram, kinds: dict[str, tuple[AxisKind, ...]]) -> BlockProgram:
    """A program with axes of these kinds, all of extent 1, and whole tiles."""
    axes = tuple(Axis(d, k, 1) for d, ks in kinds.items() for k in ks)
    tile = {d: extent(n) for d, n in program.dims.items()}
    return BlockProgram(program.dims, axes, tile, program.ops)


def needs_positions(region: Region) -> str | None:
    """Reason why neither products nor rows run a region: masks, or pages; None if they may."""
    for op in region.ops:
        operator = lookup(op.kind)
        needed = operator.masks and not op.hides_nothing
        if needed and operator.counts != Counts.LABELS:  # rows know the column of a label
            needs = (
                "and it stores no scores; mask scores [..., queries, keys] between the product "
                "that makes them and the one that contracts the keys"
            )
            if float32 in region.input_dtypes:
                needs = "and it multiplies float16 and bfloat16; convert its operands"
            return (
                f"{op.kind} depends on positions, which only the loop of attention knows, {needs}, "
                "or hide them by a condition (hide)"
            )
    for i, page in region.pages:
        return (
            f"input {i} lies in pages of {page}, and only the loop of attention reads through a "
            "table; gather the pages before"
        )
    return None


def check_index(region: Region) -> None:
    """Check that no input and no output is rows that an index names. Raises SearchError."""
    for put in region.put:
        raise SearchError(
            f"output {put.output} is rows that are put where an index names, which only kernels "
            "with rows resident in a block, and products, store; put them there in a kernel after"
        )
    check_taken(region)


def check_taken(region: Region) -> None:
    """Check that no input is rows that an index names, and that nothing turns or scans rows.
    Raises SearchError."""
    for op in region.ops:
        if op.facets.turns:
            raise SearchError(
                f"{op.kind} works along a row, which only kernels with rows resident in a block "
                "do; let one take what is computed here"
            )
    for taken in region.taken:
        raise SearchError(
            f"input {taken.input} is rows that an index names, which only rows resident in a block "
            "are loaded through; take the rows in a kernel before"
        )


def check_parts(region: Region) -> None:
    """Check that bulk copies may address the tensors that lie in larger ones.
    Raises SearchError."""
    sides = {
        "in": zip(region.inputs, region.input_dtypes, strict=True),
        "out": zip(region.output_shapes, region.output_dtypes, strict=True),
    }
    tensors = {f"{side}{n}": pair for side, own in sides.items() for n, pair in enumerate(own)}
    for name, place in region.parts:
        shape, dtype = tensors[name]
        if not place.aligned(shape, dtype.itemsize):
            raise SearchError(
                f"{name}{show_shape(shape)} lies in {place}, and its rows do not all begin and end "
                f"at multiples of {ALIGNMENT} bytes there, which bulk copies need; let a kernel of "
                "rows copy it"
            )


def check_reductions(program: LabelledProgram, known: Collection[Monoid] = FOLDED) -> None:
    """Check that a kernel can combine all that is reduced. Raises SearchError."""
    for op in program.ops:
        how = op.facets.reduces
        if how is not None and how not in known:
            raise SearchError(f"a {how.noun} over {op.over}: a kernel of rows")


def check_symbols(program: LabelledProgram) -> None:
    """Check that only the outermost dimension of tensors is symbolic: strides are numbers."""
    maps = [op.attributes["map"] for op in program.of_kind(LOAD) if "table" not in op.attributes]
    for m in (*(m for _, m in program.outputs), *maps):
        for name in labels_of(m)[1:]:
            if isinstance(n := program.dims[name], Symbol):
                raise SearchError(f"a tensor is stored with {n} not as its first dimension")
