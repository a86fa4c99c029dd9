"""Operators that compare and choose, in the eyes of the verifier."""

from __future__ import annotations

from typing import Any

import pytest

from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.search.search import SearchOptions, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier

NAMES = ("at_least", "maximum", "keep", "hide")


def chosen(name: str, factor: float) -> KernelGraph:
    """``name(x + factor z, y - z) + z``."""
    g = new_kernel_graph()
    x, y, z = (g.new_input((8, 64), "float16", n) for n in "xyz")
    made: Any = getattr(g, name)(x + z * factor, y - z) if factor else getattr(g, name)(x, y)
    g.mark_output(made + z)
    return g


@pytest.mark.parametrize("factor", [0.5, 0.7390851332151607, 1.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_what_one_operand_lacks_the_other_does_not_make_up_for(name: str, factor: float) -> None:
    """Two operands become one argument of an unknown function, which must tell all pairs apart."""
    plain, moved = chosen(name, 0.0), chosen(name, factor)
    mu = search(moved, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert Verifier(moved).check(mu)
    assert not Verifier(plain).check(mu)


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_not_exchanged(name: str) -> None:
    g, h = chosen(name, 0.0), new_kernel_graph()
    x, y, z = (h.new_input((8, 64), "float16", n) for n in "xyz")
    h.mark_output(getattr(h, name)(y, x) + z)
    mu = search(h, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert not Verifier(g).check(mu)
