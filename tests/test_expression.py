"""Normal forms: identities, marks, sealing, exact division, and the goal test by brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from cutesuper.egraph.expression import ONE, ZERO, Expressions
from cutesuper.egraph.goal import Goal
from cutesuper.ir.operators.base import lookup

Build = Callable[[Expressions, dict[str, int]], int]

EQUAL: list[tuple[str, Build, Build]] = [
    ("commutes", lambda e, v: e.mul(v["a"], v["b"]), lambda e, v: e.mul(v["b"], v["a"])),
    (
        "distributes",
        lambda e, v: e.mul(v["a"], e.add(v["b"], v["c"])),
        lambda e, v: e.add(e.mul(v["a"], v["b"]), e.mul(v["a"], v["c"])),
    ),
    (
        "division moves",
        lambda e, v: e.mul(e.div(v["a"], v["b"]), v["c"]),
        lambda e, v: e.div(e.mul(v["a"], v["c"]), v["b"]),
    ),
    (
        "dividing twice",
        lambda e, v: e.div(e.div(v["a"], v["b"]), v["c"]),
        lambda e, v: e.div(v["a"], e.mul(v["c"], v["b"])),
    ),
    (
        "product of exps",
        lambda e, v: e.mul(e.exp(v["a"]), e.exp(v["b"])),
        lambda e, v: e.exp(e.add(v["a"], v["b"])),
    ),
    (
        "rsqrt is one over sqrt",
        lambda e, v: e.mul(v["a"], lookup("rsqrt").symbolic(e, [v["b"]], {})),
        lambda e, v: e.div(v["a"], lookup("sqrt").symbolic(e, [v["b"]], {})),
    ),
    (
        "square",
        lambda e, v: lookup("square").symbolic(e, [v["a"]], {}),
        lambda e, v: e.mul(v["a"], v["a"]),
    ),
    ("subtraction", lambda e, v: e.sub(e.add(v["a"], v["b"]), v["b"]), lambda e, v: v["a"]),
    ("one", lambda e, v: e.mul(e.constant(1.0), v["a"]), lambda e, v: v["a"]),
    (
        "sum of a sum",
        lambda e, v: e.reduce(e.add(v["a"], v["b"]), ("K",)),
        lambda e, v: e.add(e.reduce(v["a"], ("K",)), e.reduce(v["b"], ("K",))),
    ),
    (
        "maximum in parts",
        lambda e, v: e.fold("max", e.fold("max", v["a"], "K", ("K.tile",)), "K", ("K.loop",)),
        lambda e, v: e.fold("max", v["a"], "K", ("K.loop", "K.tile")),
    ),
]

UNEQUAL: list[tuple[str, Build, Build]] = [
    ("nothing cancels", lambda e, v: e.div(v["a"], v["a"]), lambda e, v: ONE),
    ("exp is no number", lambda e, v: e.exp(v["a"]), lambda e, v: v["a"]),
    (
        "functions differ",
        lambda e, v: e.opaque("relu", v["a"]),
        lambda e, v: e.opaque("silu", v["a"]),
    ),
    (
        "attributes count",
        lambda e, v: lookup("clamp").symbolic(e, [v["a"]], {"min": 0.0, "max": 1.0}),
        lambda e, v: lookup("clamp").symbolic(e, [v["a"]], {"min": 0.0, "max": 2.0}),
    ),
    (
        "a sum under a product",
        lambda e, v: e.mul(v["x"], e.reduce(e.mark(v["x"], "K"), ("K",))),
        lambda e, v: e.reduce(e.mark(e.mul(v["x"], v["x"]), "K"), ("K",)),
    ),
    (
        "partial maximum",
        lambda e, v: e.fold("max", v["a"], "K", ("K.tile",)),
        lambda e, v: e.fold("max", v["a"], "K", ("K.loop", "K.tile")),
    ),
]


def _variables(e: Expressions) -> dict[str, int]:
    return {n: e.variable(n, "K" if n in "xy" else "") for n in "abcdxy"}


@pytest.mark.parametrize(("left", "right"), [c[1:] for c in EQUAL], ids=[c[0] for c in EQUAL])
def test_equal(left: Build, right: Build) -> None:
    e = Expressions()
    v = _variables(e)
    assert e.show(left(e, v)) == e.show(right(e, v))
    assert left(e, v) == right(e, v)


@pytest.mark.parametrize(("left", "right"), [c[1:] for c in UNEQUAL], ids=[c[0] for c in UNEQUAL])
def test_unequal(left: Build, right: Build) -> None:
    e = Expressions()
    v = _variables(e)
    assert left(e, v) != right(e, v)


def test_exact_division() -> None:
    e = Expressions()
    a, b, c, d, *_ = _variables(e).values()
    goal = Goal(e, [], {})
    both = e.mul(e.add(a, b), e.add(c, d))
    assert goal.quotient(both, e.add(a, b)) == e.add(c, d)
    assert goal.quotient(both, e.add(a, c)) is None
    assert goal.quotient(e.exp(e.add(a, b)), e.exp(a)) == e.exp(b)
    assert goal.quotient(e.div(a, e.mul(b, c)), e.div(a, b)) == e.div(ONE, c)


def test_sealed_sums_are_atoms() -> None:
    e = Expressions()
    a, b, c, *_ = _variables(e).values()
    s = e.seal(e.add(a, b))
    assert e.add(b, a) == s  # wherever the sum is met again
    square = e.mul(s, s)
    assert len(e.polynomials[square]) == 1
    goal = Goal(e, [e.mul(square, c)], {})
    assert goal.useful(s) and goal.useful(a) and goal.useful(e.mul(s, c))
    assert not goal.useful(e.mul(a, c))


def test_size_counts_every_part() -> None:
    e = Expressions()
    a, b, *_ = _variables(e).values()
    for larger, smaller in [
        (e.add(a, ONE), a),
        (e.add(a, a), a),
        (e.exp(e.add(a, b)), e.exp(a)),
        (e.fold("max", a, "K", ("K.loop", "K.tile")), e.fold("max", a, "K", ("K.tile",))),
    ]:
        assert e.size(larger) > e.size(smaller)
    assert e.sub(a, a) == ZERO


# ------------------------------------------------------------------------------------ brute force

#: a tree: a variable, ("exp" | "sum", tree), or (binary operator, tree, tree)
Tree = Any
BINARY = ("add", "mul", "div")


def _trees(nodes: int) -> dict[int, list[Tree]]:
    found: dict[int, list[Tree]] = {1: ["x", "y"]}
    for n in range(2, nodes + 1):
        found[n] = [(f, t) for t in found[n - 1] for f in ("exp", "sum")]
        for i in range(1, n - 1):
            pairs = product(BINARY, found[i], found[n - 1 - i])
            found[n] += [(f, s, t) for f, s, t in pairs]
    return found


def _labelled(tree: Tree) -> bool:
    """True if a tree still has the label K (a sum over a scalar is not generated)."""
    if isinstance(tree, str):
        return True
    return tree[0] != "sum" and any(_labelled(t) for t in tree[1:])


def _legal(tree: Tree) -> bool:
    if isinstance(tree, str):
        return True
    return all(_legal(t) for t in tree[1:]) and (tree[0] != "sum" or _labelled(tree[1]))


def _form(e: Expressions, tree: Tree, met: dict[Tree, int]) -> int:
    """Normal form of a tree; enters all parts into ``met``."""
    if isinstance(tree, str):
        x = e.variable(tree, "K")
    elif tree[0] == "sum":
        x = e.reduce(e.mark(_form(e, tree[1], met), "K"), ("K.tile",))
    else:
        x = getattr(e, tree[0])(*(_form(e, t, met) for t in tree[1:]))
    met[tree] = x
    return x


def test_no_part_of_a_goal_is_refused() -> None:
    """Every part of every expression of up to 6 nodes passes all filters for that expression."""
    refused: list[tuple[Tree, Tree]] = []
    e, goals = Expressions(), 0
    for trees in _trees(6).values():
        for tree in filter(_legal, trees):
            met: dict[Tree, int] = {}
            goal = Goal(e, [_form(e, tree, met)], {"K": ("K.tile",)})
            goals += 1
            refused += [(tree, part) for part in met if not _passes(goal, part, met)]
    assert goals > 2000
    assert not refused, refused[:5]


def _passes(goal: Goal, part: Tree, met: dict[Tree, int]) -> bool:
    if not goal.useful(met[part]):
        return False
    if isinstance(part, str) or part[0] not in BINARY:
        return True
    a, b = met[part[1]], met[part[2]]
    if part[0] == "add":
        return goal.together(a, b)
    return goal.fits(a, b) and (part[0] == "mul" or goal.divides(b))


def test_what_cannot_become_the_goal_is_refused() -> None:
    e = Expressions()
    x, w, s = e.variable("X", "MK"), e.variable("W", "KN"), e.variable("s", "M")
    marked = e.mark(e.mul(e.div(x, s), w), "K")
    goal = Goal(e, [e.reduce(marked, ("K.tile",))], {"K": ("K.tile",)})
    assert goal.useful(e.mul(x, w))
    assert goal.useful(e.div(x, s))
    for wrong in (e.add(x, w), e.mul(x, x), e.div(x, w), e.exp(x), e.div(w, e.mul(s, s))):
        assert not goal.useful(wrong)
    assert goal.divides(s) and not goal.divides(x)
    assert not goal.fits(x, x)
