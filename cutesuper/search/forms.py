"""The form of a region: the rules of the skeleton that runs it.

A region that no skeleton can run is refused with the reason, and the kernel-level search cuts the
graph elsewhere. `BlockForm` stands for everything that a block program can express, whether or not
a skeleton runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cutesuper.egraph.clock import OutOfTime
from cutesuper.egraph.labelled import LabelledProgram, Region, label, label_apart
from cutesuper.egraph.splits import AnyRules, Split, splits
from cutesuper.errors import SearchError, frameless
from cutesuper.ir.block import (
    CLUSTER_REDUCE,
    AxisKind,
    BlockProgram,
)
from cutesuper.ir.dims import Symbol
from cutesuper.ir.operators.base import TABLE
from cutesuper.skeletons.base import Skeleton
from cutesuper.skeletons.form import Form
from cutesuper.skeletons.registry import SKELETONS
from cutesuper.targets import Target


@dataclass(frozen=True)
class BlockForm(AnyRules):
    """Rules for everything that a block program can express.
    Chained products, running maxima, several passes over a loop, partial results of the grid. No
    skeleton of the lowering runs all of it."""

    def splits(self, program: LabelledProgram) -> Iterator[Split]:
        """All splits; symbolic extents are divided by the grid only."""
        symbolic = {d for d, n in program.dims.items() if isinstance(n, Symbol)}
        for split in splits(program):
            kinds = dict(split.kinds)
            if all(kinds[d] == (AxisKind.GRID,) and d != split.parted for d in symbolic):
                yield split

    def refuses(self, program: BlockProgram) -> str | None:
        """Refuse an unused cluster: one that exchanges nothing only occupies blocks."""
        reduced = any(op.kind == CLUSTER_REDUCE for op in program.ops)
        return (
            "an unused cluster axis"
            if program.of_kind(AxisKind.CLUSTER) and not reduced
            else (None)
        )


@dataclass(frozen=True)
class Recognized:
    """A skeleton that can run a region, and its rules for it."""

    skeleton: Skeleton
    form: Form


def recognized(region: Region, target: Target) -> tuple[LabelledProgram, Recognized]:
    """A region with labels, and its form.
    Kept, since it is asked for where a region is worth a search, for its bound, and in its search.
    Raises SearchError as `label` and `find_form` do."""
    found = _recognized(region, target, TABLE.changes)
    if isinstance(found, str):
        raise SearchError(found)
    return found


@lru_cache(8192)  # a region of 40 operators has 1,500 parts, each of which is asked for twice
def _recognized(
    region: Region, target: Target, changes: int
) -> tuple[LabelledProgram, Recognized] | str:
    """The same; the reason if nothing runs it, as an error would keep its callers alive."""
    del changes  # only distinguishes operators that had the same name
    try:
        program = label(region)
        try:
            return program, find_form(region, program, target)
        except SearchError:
            apart = label_apart(region, program)
            if apart is None:
                raise
            return apart, find_form(region, apart, target)
    except OutOfTime:
        raise
    except SearchError as error:
        return str(error)


def find_form(region: Region, program: LabelledProgram, target: Target) -> Recognized:
    """The first skeleton that can run a region, and its rules.

    Raises:
        SearchError: with the first skeleton's reason, if none can.
    """
    reasons: list[SearchError] = []
    for skeleton in SKELETONS:
        try:
            form = skeleton.recognize(region, program, target)
        except SearchError as error:
            reasons.append(frameless(error))
            continue
        if form is not None:
            return Recognized(skeleton, form)
    try:
        raise reasons[0]
    finally:
        reasons.clear()  # its frame is this one: a circle would keep all callers' tensors
