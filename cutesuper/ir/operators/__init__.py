"""The table of operators, with one module for each kind; see `ir.operators.base`."""

from __future__ import annotations

# importing these modules enters their operators into `TABLE`
from cutesuper.ir.operators import (
    composed,
    composite,
    index,
    layout,
    pairs,
    pointwise,
    reduce,
    select,
)
from cutesuper.ir.operators.base import TABLE, Operator, lookup

__all__ = [
    "TABLE",
    "Operator",
    "composed",
    "composite",
    "index",
    "layout",
    "lookup",
    "pairs",
    "pointwise",
    "reduce",
    "select",
]
