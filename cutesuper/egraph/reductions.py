"""Reductions of a labelled program: what was reduced on the way to a value, and where rows meet."""

from __future__ import annotations

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region, label
from cutesuper.egraph.products import matrix_products
from cutesuper.errors import SearchError


def reduced_before(program: LabelledProgram) -> list[frozenset[str]]:
    """For every operation the labels over which anything is reduced until then."""
    found: list[frozenset[str]] = []
    for op in program.ops:
        own = frozenset[str]() if op.over is None else frozenset((op.over,))
        found.append(own.union(*(found[j] for j in op.inputs)))
    return found


def operand_labels(program: LabelledProgram, op: LabelledOp) -> frozenset[str]:
    """All labels of the operands."""
    return frozenset[str]().union(*(program.ops[i].labels for i in op.inputs))


def rows_meet(region: Region) -> bool:
    """Whether one kernel that computes everything computes nothing twice, without matrix products:
    some value has all labels, and so has whatever is reduced, but for what was reduced before.

    before: RMSNorm and the sum of its rows, true; two softmaxes of different extents, false: one
    kernel would compute each as often as the other has rows.
    """
    try:
        program = label(region)
    except SearchError:
        return False
    everything, before = frozenset(program.dims), reduced_before(program)
    if matrix_products(program) or all(op.labels != everything for op in program.ops):
        return False
    return all(
        operand_labels(program, op).union(*(before[i] for i in op.inputs)) == everything
        for op in program.ops
        if op.over is not None
    )
