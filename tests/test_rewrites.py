"""Right rewrites of small programs are accepted, wrong ones are not.

Axioms of arithmetic are applied to graphs at random; the results are equal by construction. The
wrong rewrites are mistakes that people and searches make. Both are turned into muGraphs of one
block, so that nothing but the verifier is tested.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.numeric import compare
from tests.one_block import one_block
from tests.rewrites import AXIOMS, PROGRAMS, Rule, Site, narrow, program, results, rewritten

#: the square of a hidden element would be +inf
NOT_UNDER_MASKS = {"product_is_half_of_squares"}


def pairs() -> list[tuple[str, str]]:
    """All programs with all axioms that apply somewhere."""
    return [
        (a, p)
        for p in PROGRAMS
        for a, rule in AXIOMS.items()
        if next(results(program(p), rule), None) is not None
    ]


def equal_program(name: str, first: str) -> KernelGraph:
    """A program after one to three axioms, the first of them given."""
    chance = random.Random(f"{name}/{first}")
    graph = program(name)
    others = set(AXIOMS) - (NOT_UNDER_MASKS if name == "causal" else set())
    rules = [first, *chance.choices(sorted(others), k=chance.randint(0, 2))]
    for rule in rules:
        graph = chance.choice(list(results(graph, AXIOMS[rule])) or [graph])
    return graph


RIGHT = pairs()


def test_there_are_enough_right_rewrites() -> None:
    assert len(RIGHT) >= 60
    assert {a for a, _ in RIGHT} == set(AXIOMS), "an axiom applies nowhere"


@pytest.mark.parametrize(("rule", "name"), RIGHT)
def test_right_rewrites_are_accepted(rule: str, name: str) -> None:
    mu = one_block(equal_program(name, rule))
    result = verify(program(name), mu, full=True)
    assert result, result.summary()
    assert compare(program(name), mu, stress=False)


# --------------------------------------------------------------------------------------- mistakes

SLIPS: dict[str, Rule] = {}


def slip(rule: Rule) -> Rule:
    SLIPS[rule.__name__] = rule
    return rule


def shifts(s: Site) -> bool:
    """True if the node is a maximum under an exponential, its difference, or that exponential.

    Any shift is right: what goes wrong there shows in numbers only.
    """
    return s.kind == "max" or s.is_("sub", None, "max") or s.is_("exp", "sub")


@slip
def wrong_axis(s: Site) -> Tensor | None:
    """A statistic of columns for one of rows."""
    if s.kind not in ("sum", "mean"):
        return None
    return s.g.apply(s.kind, s.args[0], dim=1 - s.dim)


@slip
def other_reduction(s: Site) -> Tensor | None:
    other = {"sum": "mean", "mean": "sum"}.get(s.kind)
    return s.g.apply(other, s.args[0], dim=s.dim) if other else None


@slip
def maximum_for_a_sum(s: Site) -> Tensor | None:
    return s.g.max(s.args[0], s.dim) if s.kind in ("sum", "mean") else None


@slip
def missing_factor(s: Site) -> Tensor | None:
    return s.args[0] if s.kind in ("mul", "div") else None


@slip
def product_for_a_quotient(s: Site) -> Tensor | None:
    return s.g.mul(*s.args) if s.kind == "div" else None


@slip
def inverted_quotient(s: Site) -> Tensor | None:
    return s.g.div(*s.args[::-1]) if s.kind == "div" else None


@slip
def sum_for_a_product(s: Site) -> Tensor | None:
    return s.g.add(*s.args) if s.kind == "mul" else None


@slip
def sum_for_a_difference(s: Site) -> Tensor | None:
    return s.g.add(*s.args) if s.kind == "sub" and not shifts(s) else None


@slip
def swapped_difference(s: Site) -> Tensor | None:
    return s.g.sub(*s.args[::-1]) if s.kind == "sub" else None


@slip
def dropped_summand(s: Site) -> Tensor | None:
    """Eps, a bias, a residual, the second product of LoRA."""
    return s.args[0] if s.kind == "add" else None


@slip
def dropped_function(s: Site) -> Tensor | None:
    return s.args[0] if s.kind in ("exp", "square", "sqrt", "silu", "causal_mask") else None


@slip
def other_function(s: Site) -> Tensor | None:
    other = {"exp": "square", "sqrt": "rsqrt", "silu": "sigmoid", "square": "relu"}.get(s.kind)
    return s.g.apply(other, s.args[0]) if other else None


@slip
def rank_one_product(s: Site) -> Tensor | None:
    """sum_k a_ik * sum_k b_kj for sum_k a_ik b_kj: seen in a surrogate of Q K^T"""
    if s.kind != "matmul":
        return None
    a, b = s.args
    return s.g.mul(s.g.sum(a, -1), s.g.sum(b, -2))


@slip
def square_of_the_mean(s: Site) -> Tensor | None:
    """mean(x)^2 for mean(x^2), mean(x) mean(y) for mean(x y)"""
    if s.kind not in ("sum", "mean") or s.arg(0).kind not in ("square", "mul"):
        return None
    if any(narrow(x, s.arg(0).shape, s.dim) for x in s.arg(0).args):
        return None
    parts = [s.g.apply(s.kind, x, dim=s.dim) for x in s.arg(0).args]
    return s.g.mul(parts[0], parts[-1])


@slip
def root_of_a_sum(s: Site) -> Tensor | None:
    """sqrt(a) + sqrt(b) for sqrt(a + b)"""
    return s.g.add(*map(s.g.sqrt, s.arg(0).args)) if s.is_("sqrt", "add") else None


@slip
def exponentials_subtracted(s: Site) -> Tensor | None:
    """exp(a) - exp(b) for exp(a - b)"""
    return s.g.sub(*map(s.g.exp, s.arg(0).args)) if s.is_("exp", "sub") else None


@slip
def distributed_once(s: Site) -> Tensor | None:
    """a c + b for (a + b) c"""
    if s.kind not in ("mul", "matmul") or s.arg(0).kind not in ("add", "sub"):
        return None
    (a, b), c = s.arg(0).args, s.args[1]
    return s.g.apply(s.arg(0).kind, s.g.apply(s.kind, a, c), b)


@slip
def other_alignment(s: Site) -> Tensor | None:
    return s.g.causal_mask(s.args[0], "bottom_right") if s.kind == "causal_mask" else None


@slip
def mask_of_an_exponential(s: Site) -> Tensor | None:
    """mask(exp(x)) for exp(mask(x))"""
    if not s.is_("exp", "sub") or s.arg(0).arg(0).kind != "causal_mask":
        return None
    scores, top = s.arg(0).arg(0).args[0], s.arg(0).args[1]
    return s.g.causal_mask(s.g.exp(s.g.sub(scores, top)))


def other_operands(old: KernelGraph) -> Iterator[tuple[str, KernelGraph]]:
    """Every operand replaced by each earlier value of its shape."""
    for i, node in enumerate(old.nodes):
        for k, j in enumerate(node.inputs):
            for other in range(i):
                if other == j or old.nodes[other].shape != old.nodes[j].shape:
                    continue

                def rule(s: Site, k: int = k, other: int = other) -> Tensor | None:
                    if shifts(s):
                        return None
                    args = [*s.args[:k], s.new[other], *s.args[k + 1 :]]
                    return s.g.apply(s.kind, *args, **dict(s.old.nodes[s.index].attributes))

                g = rewritten(old, i, rule)
                if g is not None:
                    yield f"operand {k} of {node.name} ({node.operator}) is node {other}", g


def mistakes(name: str) -> Iterator[tuple[str, KernelGraph]]:
    """Wrong programs with what is wrong with them."""
    old = program(name)
    for what, rule in SLIPS.items():
        for n, g in enumerate(results(old, rule)):
            yield f"{what}, {n}", g
    yield from other_operands(old)
    first, *rest = old.outputs
    if rest and old.nodes[first].shape == old.nodes[rest[0]].shape:
        g = old.expanded()
        g.outputs = g.outputs[::-1]
        yield "outputs swapped", g


WRONG = {name: list(mistakes(name)) for name in PROGRAMS}


def test_there_are_enough_wrong_rewrites() -> None:
    assert sum(map(len, WRONG.values())) >= 60
    made = {what.split(",")[0] for found in WRONG.values() for what, _ in found}
    assert made >= set(SLIPS) | {"outputs swapped"}, "a slip is made nowhere"


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_rewrites_are_rejected(name: str) -> None:
    graph = program(name)
    verifier = Verifier(graph)
    for what, wrong in WRONG[name]:
        mu = one_block(wrong)
        result = verifier.check(mu, bound=False)
        assert not result and result.reason, f"{name}: {what}"
        assert not compare(graph, mu, stress=False), f"{name}: {what}"
