"""The form of products that are computed again for plain sums over a loop.
The backward pass of attention is one.

``f(A1 B1, A2 B2, ...) C``: every A is ``[rows, inner]`` and stays in the block, every B and C is
``[loop, inner or columns]`` and streams by. Functions of the scores ``A B`` are element-wise, with
vectors along the rows or along the loop; each is an operand of a sum over the loop. Nothing has to
be known of a whole row before it is multiplied: there is no running maximum.

before: ``dQ = dS K`` with ``dS = exp(Q K - lse) * (dO V - delta)``, scores of rows x keys in
memory; after: one kernel that holds Q and dO and walks over K and V. The gradients of K and V are
the same form with the roles of rows and keys exchanged, summed over the query heads of a group as
well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region
from cutesuper.egraph.products import check_one_type, labels_of, shown
from cutesuper.egraph.splits import AnyRules, Split
from cutesuper.errors import SearchError
from cutesuper.ir.block import LOAD, AxisKind, BlockOp, BlockProgram
from cutesuper.ir.dims import Dim, Symbol, extent
from cutesuper.skeletons.attention.plan import MAX_WIDTH
from cutesuper.skeletons.form import ALIGN
from cutesuper.skeletons.operands import MULTIPLIED


def masked_or_longest(
    labels: Sequence[str], ops: Iterable[LabelledOp | BlockOp], dims: Mapping[str, Dim]
) -> str:
    """The label by whose position masks hide, or along which their limits do not fall.
    The longest of several, or of all without a mask."""
    masks = [op.attributes for op in ops if op.facets.masks]
    given = {m.get(side) for m in masks for side in ("rows", "columns", "rises")}
    named = [d for d in labels if d in given]
    return max(named or labels, key=lambda d: extent(dims[d]))


@dataclass(frozen=True)
class SumsForm(AnyRules):
    """Rules for programs as they are written: what `sums_form` checks of the region.

    Attributes:
        rows: the label of a block's tile that all results have.
        loop: the label over which the products with scores are summed.
        visits: the label over which these sums are added up, None if there is none.
        whole: labels of operands that a block holds whole.
    """

    rows: str
    loop: str
    visits: str | None
    whole: tuple[str, ...]

    def splits(self, program: LabelledProgram) -> Iterator[Split]:
        """One split: blocks along the rows, a loop, and visits around it."""
        kinds: dict[str | None, tuple[AxisKind, ...]] = {
            self.loop: (AxisKind.LOOP,),
            self.visits: (AxisKind.PERSISTENT,),
        } | dict.fromkeys(self.whole, ())
        yield Split(tuple((d, kinds.get(d, (AxisKind.GRID,))) for d in program.dims))

    def refuses(self, program: BlockProgram) -> str | None:
        """Refuse nothing: the roles of a program say what is wrong with it."""
        return None


def sums_form(region: Region, program: LabelledProgram, products: list[LabelledOp]) -> SumsForm:
    """The form of a region whose products multiply functions of other products.

    Raises:
        SearchError: with the reason why this form cannot run it.
    """
    return _Finder(region, program, products).form()


class _Finder:
    def __init__(
        self, region: Region, program: LabelledProgram, products: list[LabelledOp]
    ) -> None:
        self.region, self.program, self.ops = region, program, program.ops
        places = [i for i, op in enumerate(self.ops) if op in products]
        later = {i for i in places if any(self._reaches(j, i) for j in places)}
        self.scores = [i for i in places if i not in later]
        self.sums = sorted(later)

    def form(self) -> SumsForm:
        loops = {str(self.ops[i].over) for i in self.sums}
        if not self.sums or len(loops) != 1:
            raise _refusal(f"sums of products over {shown(sorted(loops)) or 'nothing'}")
        (loop,) = loops
        streams = self._streams(loop)
        labels = frozenset[str]().union(*(self.ops[i].labels for i in self.scores))
        found = SumsForm(
            self._rows(labels - {loop}, streams),
            loop,
            self._visits(),
            tuple(d for d in self.program.dims if d not in labels),
        )
        self._check_operands(found, streams)
        self._check_residents(found, streams)
        self._check_visits(found)
        self._check_widths(found)
        self._check_rest(found, labels)
        return found

    def _reaches(self, source: int, i: int) -> bool:
        return self.program.dependence.reaches(source, i)

    # -------------------------------------------------------------------------------------- roles

    def _streams(self, loop: str) -> set[int]:
        """The operands that the loop walks over."""
        found = set[int]()
        for i in self.scores:
            sides = [j for j in self.ops[i].inputs if loop in self.ops[j].labels]
            if len(sides) != 1:
                raise _refusal(f"{len(sides)} operands of a product with the label {loop}")
            found.update(sides)
        for i in self.sums:
            loads = [j for j in self.ops[i].inputs if self.ops[j].kind == LOAD]
            if len(loads) != 1:
                raise _refusal("a sum over the loop whose operands are both computed")
            found.update(loads)
        return found

    def _rows(self, labels: frozenset[str], streams: set[int]) -> str:
        """The label of scores by whose position masks hide; else the longest of them.
        Only labels count that nothing has that streams by."""
        taken = frozenset[str]().union(*(self.ops[i].labels for i in streams))
        own = [d for d in self.program.dims if d in labels - taken]
        if not own:
            raise _refusal("scores without a label of their own rows")
        return masked_or_longest(own, self.ops, self.program.dims)

    def _visits(self) -> str | None:
        """The label over which results are summed once more."""
        added = {
            str(op.over)
            for i, op in enumerate(self.ops)
            if op.over is not None and i not in (*self.scores, *self.sums)
        }
        if len(added) > 1:
            raise _refusal(f"sums over {shown(sorted(added))} of what the loop gives")
        return next(iter(added), None)

    # ------------------------------------------------------------------------------------- checks

    def _check_operands(self, form: SumsForm, streams: set[int]) -> None:
        """Check that all that is multiplied is in memory as the tensor cores take it."""
        multiplied = {j for i in self.scores for j in self.ops[i].inputs} | streams
        for i in sorted(multiplied):
            op = self.ops[i]
            if op.kind != LOAD or "index" in op.attributes or self._paged(op):
                raise _refusal(f"{op.kind} is multiplied where only a plain tensor can be")
            last = labels_of(op.attributes["map"])[-1:]
            if last not in [[d] for d in form.whole]:
                raise _refusal(f"a tensor is stored along {shown(last)}, not along its rows")
            dtype = self.region.input_dtypes[op.attributes["tensor"]]
            if dtype.name not in MULTIPLIED:
                raise _refusal(f"the tensor cores take float16 and bfloat16, not {dtype}")
        check_one_type(self.region, [self.ops[i] for i in sorted(multiplied)])

    def _check_residents(self, form: SumsForm, streams: set[int]) -> None:
        """Check that what stays in the block is the same in all visits."""
        multiplied = {j for i in self.scores for j in self.ops[i].inputs}
        for j in multiplied - streams:
            if form.visits in self.ops[j].labels:
                raise _refusal(f"rows that stay in a block, and differ along {form.visits}")

    def _check_visits(self, form: SumsForm) -> None:
        """Check that every visit adds to every sum, and that no output is of one visit."""
        if form.visits is None:
            return
        if any(form.visits not in self.ops[i].labels for i in self.sums):
            raise _refusal(f"a sum that is the same in all visits along {form.visits}")
        if any(form.visits in self.ops[i].labels for i, _ in self.program.outputs):
            raise _refusal(f"an output that differs along {form.visits}, and another is a sum")

    def _paged(self, op: LabelledOp) -> bool:
        return any(i == op.attributes["tensor"] for i, _ in self.region.pages)

    def _check_widths(self, form: SumsForm) -> None:
        for d in form.whole:
            n = self.program.dims[d]
            if isinstance(n, Symbol) or n % ALIGN or n > MAX_WIDTH:
                raise _refusal(
                    f"{n} elements of {d} in a row; a block holds multiples of {ALIGN} up to "
                    f"{MAX_WIDTH}"
                )

    def _check_rest(self, form: SumsForm, labels: frozenset[str]) -> None:
        """Check everything between the products and after them."""
        after = self.program.dependence.after(self.sums)
        for i, op in enumerate(self.ops):
            if op.over is not None:
                self._check_reduction(form, i, after)
            elif op.kind != LOAD and i not in after and not op.labels <= labels:
                raise _refusal(f"{op.kind} on {shown(sorted(op.labels))}")
            if op.facets.masks:
                _check_mask(form, op)
        for i, mapping in self.program.outputs:
            last = next(reversed(labels_of(mapping)), None)
            if last not in form.whole if i in after else not self._is_tiled(form, i, last):
                raise _refusal(
                    "an output that is neither a sum over the loop, stored along its rows, nor a "
                    "function of scores, stored along the loop"
                )

    def _is_tiled(self, form: SumsForm, i: int, last: str | None) -> bool:
        """True for an output with a number for each score, which is stored tile by tile."""
        made = any(self._reaches(j, i) or i == j for j in self.scores)
        return made and form.visits is None and last == form.loop

    def _check_reduction(self, form: SumsForm, i: int, after: set[int]) -> None:
        op = self.ops[i]
        if i in self.scores or i in self.sums:
            return
        plain = op.facets.reduces is not None and op.facets.reduces.linear
        if op.over != form.visits or i not in after or not plain or op.facets.averages:
            raise _refusal(f"{op.kind} over {op.over}")


def _check_mask(form: SumsForm, op: LabelledOp) -> None:
    given: list[Any] = [op.attributes["rows"], op.attributes["columns"]]
    if set(given) - {None} - {form.rows, form.loop}:
        raise _refusal(f"{op.kind} hides {given[1]} by the position of {given[0]}")


def _refusal(why: str) -> SearchError:
    return SearchError(f"the attention loop with plain sums: {why}")
