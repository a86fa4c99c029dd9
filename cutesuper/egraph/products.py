"""Matrix products of a labelled program: operations that need tensor cores, and their users."""

from __future__ import annotations

from collections.abc import Iterable

from cutesuper.egraph.labelled import LabelledOp, LabelledProgram, LabelMap, Region
from cutesuper.errors import SearchError


def is_product(program: LabelledProgram, op: LabelledOp) -> bool:
    """True for a product of two matrices; one with a vector is a multiplication and a sum."""
    if not op.facets.contracts:
        return False
    a, b = (program.ops[i].labels for i in op.inputs)
    return not a <= b and not b <= a


def matrix_products(program: LabelledProgram) -> list[LabelledOp]:
    """The products that need the tensor cores."""
    return [op for op in program.ops if is_product(program, op)]


def after_products(program: LabelledProgram) -> set[int]:
    """Operations that are, or depend on, a matrix product."""
    products = (i for i, op in enumerate(program.ops) if is_product(program, op))
    return program.dependence.after(products)


def check_one_type(region: Region, loads: Iterable[LabelledOp]) -> None:
    """Check that the operands staged for products have one element type. Raises SearchError."""
    found = {region.input_dtypes[op.attributes["tensor"]].name for op in loads}
    if len(found) > 1:
        raise SearchError(f"products of {' and of '.join(sorted(found))} in one kernel")


def labels_of(mapping: LabelMap) -> list[str]:
    """The labels of a map, without extents of 1."""
    return [x for x in mapping if x is not None]


def shown(labels: Iterable[str]) -> str:
    """Labels as text: ``M, N``."""
    return ", ".join(labels)


def are_chained(program: LabelledProgram) -> bool:
    """True if the last product depends on another one."""
    products = matrix_products(program)
    return len(products) > 1 and not after_products(program).isdisjoint(products[-1].inputs)
