"""Reductions of a labelled program: labels reduced before a value, and values where rows meet."""

from __future__ import annotations

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, Region, label
from cutesuper.egraph.products import matrix_products
from cutesuper.errors import SearchError


def reduced_before(program: LabelledProgram) -> list[frozenset[str]]:
    """For every operation, the labels over which anything has been reduced up to it."""
    found: list[frozenset[str]] = []
    for op in program.ops:
        own = frozenset[str]() if op.over is None else frozenset((op.over,))
        found.append(own.union(*(found[j] for j in op.inputs)))
    return found


def operand_labels(program: LabelledProgram, op: LabelledOp) -> frozenset[str]:
    """All labels of the operands."""
    return frozenset[str]().union(*(program.ops[i].labels for i in op.inputs))


def rows_meet(region: Region) -> bool:
    """True if one kernel without products computes everything without repeating work.
    Some value has all labels, and so has every reduced value, except for labels that were reduced
    before.

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
