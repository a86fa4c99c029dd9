"""Roles of the operations of a program without products.
The label along the rows, the labels that are walked over, reductions, and sums over rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cutesuper.egraph.labelled import LabelledOp
from cutesuper.errors import LoweringError
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    AxisKind,
    BlockOp,
    BlockProgram,
)
from cutesuper.ir.dims import Dim, Symbol, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.ir.operators.monoid import SUM
from cutesuper.skeletons.base import Argument, View
from cutesuper.skeletons.form import FOLDED
from cutesuper.skeletons.normalize import with_reciprocals
from cutesuper.skeletons.operands import check_symbols
from cutesuper.skeletons.rows.plan import Level, RowSum
from cutesuper.skeletons.rows.settings import walks_long
from cutesuper.targets import Target

#: operations that end a sum over rows
SUMMING = (ACCUMULATE, GRID_REDUCE)


@dataclass(frozen=True)
class Roles:
    """Roles of the operations of a program in a row loop."""

    column: str
    rows: tuple[str, ...]
    outer: tuple[str, ...]
    complete: dict[int, int]
    picked: dict[int, int]
    sums: tuple[RowSum, ...]
    levels: tuple[Level, ...]


def walks(program: BlockProgram, target: Target) -> bool:
    """True if a program without products is a row loop.
    Because of its axes, of the operations that end them, because it takes positions in rows that no
    grid divides, or because its rows are long."""
    if any(op.facets.turns for op in program.ops):
        return False
    kinds = {a.kind for a in program.axes} - {AxisKind.GRID}
    if kinds or any(op.kind in ENDING for op in program.ops):
        return True
    along = {op.attributes["over"] for op in program.ops if op.facets.reduces}
    parted = any(program.parts_along(d, AxisKind.GRID) > 1 for d in along)
    if any(op.facets.masks for op in program.ops):
        return not parted
    if any("index" in op.attributes for op in (*program.loads(), *program.stores())):
        return False
    if parted or len(along) != 1 or len(program.dims) == 1:
        return False
    (row,) = along
    tensors = sum(row in op.dims and len(op.dims) > 1 for op in program.loads())
    maps = [op.attributes["map"] for op in (*program.loads(), *program.stores())]
    contiguous = all(m[-1] == row for m in maps if row in m)
    return contiguous and walks_long(target, tensors, extent(program.dims[row]))


def walks_one_way(ops: Sequence[BlockOp | LabelledOp], reduced: bool) -> bool:
    """True if a block may walk along rows: it sums them up to each element, or from each on.
    Nothing else is done along the rows."""
    along = [op for op in ops if op.facets.turns]
    ways = {op.attributes.get("reverse") for op in along}
    return not reduced and all(op.facets.scans for op in along) and len(ways) == 1


def find_roles(program: BlockProgram, column: str, where: str) -> Roles:
    """The roles of all operations, by the label along the rows.
    Raises LoweringError if one has none."""
    summed = _summed(program)
    for a in program.axes:
        if a.kind == AxisKind.LOOP or (a.kind == AxisKind.CLUSTER and a.dim != column):
            raise LoweringError(
                f"{where}: {a.name}: in a row loop a block has its part of a row "
                f"whole, and a cluster shares the row, {column}"
            )
    walked = [a.dim for a in program.of_kind(AxisKind.PERSISTENT)]
    others = [d for d in program.dims if d != column]
    if summed and len(walked) != 1:
        raise LoweringError(
            f"{where}: sums over {', '.join(sorted(summed))} need one persistent axis to walk along"
        )
    rows = tuple(walked) if summed else tuple(others)
    outer = tuple(d for d in others if d not in rows)
    sums, chain = _sums(program, summed, where)
    _check_sums(program, column, outer, sums, where)
    complete = _complete(program, column, chain, where)
    picked = {end: i for i, end in complete.items() if _picks(program, i)}
    complete = {i: end for i, end in complete.items() if end not in picked}
    levels = _levels(program, complete, sums, chain, where)
    return Roles(column, rows, outer, complete, picked, sums, levels)


def _summed(program: BlockProgram) -> set[str]:
    """The labels of rows over which values are summed."""
    ends = (op for op in program.ops if op.kind in SUMMING)
    return {program.axis(op.attributes["axis"]).dim for op in ends}


def loop_column(
    program: BlockProgram, loads: dict[int, View], stores: dict[int, View], where: str
) -> str:
    """The label along the rows of a row loop. Raises LoweringError if there is none."""
    summed = _summed(program)
    over = {str(op.attributes["over"]) for op in program.ops if op.facets.reduces} - summed
    if len(over) > 1:
        raise LoweringError(f"{where}: rows are reduced along {', '.join(sorted(over))}, not one")
    dims = {d: n for d, n in program.dims.items() if d not in summed}

    def labels(views: dict[int, View]) -> list[list[str]]:
        return [[d for d in v.labels if d in dims] for v in views.values()]

    column = row_label(dims, sorted(over), labels(stores), labels(loads))
    if column is None or isinstance(program.dims[column], Symbol):
        raise LoweringError(f"{where}: no label of a fixed extent runs along the rows")
    return column


def _sums(
    program: BlockProgram, summed: set[str], where: str
) -> tuple[tuple[RowSum, ...], dict[int, int]]:
    """The values combined over rows, and for every operation of these chains its sum."""
    users: dict[int, list[int]] = {}
    for i, op in enumerate(program.ops):
        for j in op.inputs:
            users.setdefault(j, []).append(i)
    sums: list[RowSum] = []
    chain: dict[int, int] = {}
    for i, op in enumerate(program.ops):
        if i in chain or not (op.facets.reduces and op.attributes["over"] in summed):
            continue
        last = i
        means: list[str] = []
        while True:
            chain[last] = len(sums)
            here = program.ops[last]
            if here.facets.averages:
                means.append(here.attributes["over"])
            following = users.get(last, [])
            links = [j for j in following if _links(program, j, summed)]
            if not links:
                break
            if len(following) > 1 or len(program.ops[links[0]].inputs) > 1:
                raise LoweringError(f"{where}: a part of a sum (operation {last}) is used twice")
            last = links[0]
        if op.facets.reduces not in FOLDED:
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) over the rows; blocks meet in sums and maxima"
            )
        sums.append(RowSum(op.inputs[0], op.facets.reduces.name, tuple(means), last))
    return tuple(sums), chain


def _check_sums(
    program: BlockProgram, column: str, outer: tuple[str, ...], sums: tuple[RowSum, ...], where: str
) -> None:
    """Refuse sums that are not completed alike, and functions of them that no block can compute."""
    kept = {frozenset(outer) & set(program.ops[s.final].dims) for s in sums}
    if len(kept) > 1:
        names = " and over ".join(
            ", ".join(sorted(set(outer) - k)) or "none" for k in sorted(kept, key=sorted)
        )
        raise LoweringError(
            f"{where}: sums over rows are over {names} of {', '.join(outer)}; a "
            "kernel sums over the same labels"
        )
    for s in sums:
        same = [d for d in outer if program.dims[d] != 1 and d not in program.ops[s.source].dims]
        if same:
            raise LoweringError(
                f"{where}: a sum over rows (operation {s.final}) is the same for all of {same[0]}, "
                "and each of its blocks would add to it; compute it by another kernel"
            )
    reaches = program.dependence.reaches
    narrow = {s.final for s in sums if column not in program.ops[s.source].dims}
    for i, op in enumerate(program.ops):
        of = [s.final for s in sums if reaches(s.final, i)]
        if op.facets.reduces and op.attributes["over"] == column and of:
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) along the row of a sum over "
                "rows, of which a block has some columns"
            )
        if column in op.dims and not narrow.isdisjoint(of):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) needs a sum of values of rows "
                "in every column, and only one block has it"
            )


def _links(program: BlockProgram, i: int, summed: set[str]) -> bool:
    op = program.ops[i]
    if op.kind in SUMMING:
        return True
    return bool(op.facets.reduces) and op.attributes["over"] in summed


def _complete(
    program: BlockProgram, column: str, chain: dict[int, int], where: str
) -> dict[int, int]:
    """For every reduction along the row, the operation that completes it."""
    split = program.parts_along(column, AxisKind.CLUSTER) > 1
    found: dict[int, int] = {}
    for i, op in enumerate(program.ops):
        if not op.facets.reduces or i in chain or op.attributes["over"] != column:
            continue
        if program.parts_along(column, AxisKind.GRID) > 1:
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) along rows that the grid divides"
            )
        users = [j for j, o in enumerate(program.ops) if i in o.inputs]
        ends = [j for j in users if program.ops[j].kind == CLUSTER_REDUCE]
        if split and (len(users) != 1 or len(ends) != 1 or len(program.ops[ends[0]].inputs) > 1):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) of a part of the row must go to one "
                "cluster_reduce and nowhere else"
            )
        found[i] = ends[0] if ends else i
    return found


def _picks(program: BlockProgram, i: int) -> bool:
    """True if a reduction along the row is the sum of one element and zeros."""
    op, source = program.ops[i], program.ops[program.ops[i].inputs[0]]
    masks = source.facets.one_column
    return (
        op.facets.reduces is SUM and masks and source.attributes["columns"] == op.attributes["over"]
    )


def _levels(
    program: BlockProgram,
    complete: dict[int, int],
    sums: tuple[RowSum, ...],
    chain: dict[int, int],
    where: str,
) -> tuple[Level, ...]:
    """Divide a tile's work by the reductions that a value needs, along the longest path."""
    level: dict[int, int] = {}
    after: set[int] = {s.final for s in sums}
    for i, op in enumerate(program.ops):
        if not after.isdisjoint(op.inputs):
            after.add(i)
        own = max([level[j] for j in op.inputs], default=0)
        level[i] = own + (i in complete)
    last = max(level.values())
    found = []
    for n in range(last + 1):
        reductions = tuple(i for i in complete if level[i] - 1 == n)
        stores = tuple(
            i
            for i, o in enumerate(program.ops)
            if o.kind == STORE and i not in after and level[i] == n
        )
        parts = tuple(k for k, s in enumerate(sums) if level[s.source] == n)
        found.append(Level(reductions, parts, stores))
    computed = after | _beside_sums(program, {d for s in sums for d in program.ops[s.final].dims})
    for i in sorted(after - set(chain)):
        op = program.ops[i]
        if any(j not in computed and program.ops[j].kind != LOAD for j in op.inputs):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) mixes a sum over rows with "
                "what is computed in the loop"
            )
    return tuple(found)


def _beside_sums(program: BlockProgram, labels: set[str]) -> set[int]:
    """Constants and element-wise functions of numbers that are loaded without the rows.
    Whoever finishes sums, with these labels, computes them once more."""
    found: set[int] = set()
    for i, op in enumerate(program.ops):
        of_loads = all(j in found or program.ops[j].kind == LOAD for j in op.inputs)
        computed = op.facets.elementwise and of_loads and not op.facets.integers
        if op.kind == CONSTANT or (computed and labels.issuperset(op.dims)):
            found.add(i)
    return found


def check_views(
    program: BlockProgram,
    arguments: tuple[Argument, ...],
    roles: Roles,
    loads: dict[int, View],
    stores: dict[int, View],
    where: str,
) -> None:
    """Refuse tensors that have no place in the loop."""
    check_symbols(arguments, where)
    for i, op in enumerate(program.ops):
        if not op.facets.masks:
            continue
        along = op.attributes["columns"]
        if along != roles.column or op.attributes["rows"] in (
            set(roles.rows) if len(roles.rows) > 1 else set()
        ):
            raise LoweringError(
                f"{where}: {op.kind} (operation {i}) takes positions along {along} and "
                f"{op.attributes['rows']}; a row loop knows those along {roles.column}, and rows "
                "only where they are one label"
            )
    for d in roles.outer:
        if program.tile[d] != 1 or program.parts_along(d, AxisKind.GRID) != program.dims[d]:
            raise LoweringError(
                f"{where}: a block must have one element of {d}, which is not walked along"
            )
    finals = {s.final for s in roles.sums}
    reaches = program.dependence.reaches
    late = {i for i in range(len(program.ops)) if any(reaches(f, i) for f in finals)}
    for i, view in stores.items():
        name = arguments[view.argument].name
        varies = any(d in view.labels for d in roles.rows)
        if varies == (i in late):
            raise LoweringError(f"{where}: {name} is neither stored row by row nor a sum over rows")
    for i, view in loads.items():
        meets = any(i in program.ops[j].inputs for j in late)
        if meets and any(d in view.labels for d in roles.rows):
            raise LoweringError(
                f"{where}: {arguments[view.argument].name} has rows and meets a sum over rows"
            )


def row_label(
    dims: Mapping[str, Dim],
    reduced: Sequence[str],
    stored: Sequence[Sequence[str]],
    loaded: Sequence[Sequence[str]],
) -> str | None:
    """The label that runs along the rows.
    The reduced label, else the one along which most elements are contiguous in memory (if equal,
    the first output's).

    before: ``relu(X[M, N]) + Y[N, M]``, stored ``[M, N]``; after: N, so that only Y is strided.

    Args:
        dims: extent of every label.
        reduced: labels that are reduced, at most one.
        stored: labels of every tensor written, outermost first.
        loaded: labels of every tensor read, outermost first.

    Returns:
        None if there are no labels. A label of symbolic extent is returned only if no other is
        left.
    """
    if reduced:
        return reduced[0]
    weight: Counter[str] = Counter()
    for labels in (*stored, *loaded):
        if labels:
            weight[labels[-1]] += prod(extent(dims[d]) for d in labels)
    others = [d for labels in (*stored, *loaded) for d in labels]
    fixed = [d for d in (*weight, *others) if not isinstance(dims[d], Symbol)]
    return max(fixed or weight, key=lambda d: weight[d], default=None)


def with_row_reciprocals(
    program: BlockProgram, column: str, arguments: tuple[Argument, ...]
) -> BlockProgram:
    """The program with reciprocals of the values of rows that divide whole rows.

    The softmax of rows of 4096 has 37 special-function instructions instead of 66, the RMS norm 1
    instead of 35. This is not done for rows of fp32 results: the product is rounded twice.
    """
    wide = {a.name for a in arguments if a.written and as_dtype(a.dtype).itemsize > 2}
    if any(column in op.dims and op.attributes["tensor"] in wide for op in program.stores()):
        return program
    sums = (i for i, op in enumerate(program.ops) if op.kind in SUMMING)
    late = program.dependence.after(sums)  # a few columns, computed once
    whole = (i for i, op in enumerate(program.ops) if op.facets.divides and column in op.dims)
    by = {i: program.ops[program.ops[i].inputs[1]].dims for i in whole if i not in late}
    return with_reciprocals(program, {i for i, dims in by.items() if dims and column not in dims})
