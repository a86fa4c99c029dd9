"""Operators that compare and choose, in the eyes of the verifier."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import pytest
import torch

from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.operators.pointwise import _Unary
from cutesuper.search.search import SearchOptions, search
from cutesuper.targets import H200
from cutesuper.verify.domain import FieldDomain, Undefined, draw
from cutesuper.verify.equivalence import Verification, Verifier
from cutesuper.verify.numeric import compare
from tests.mugraphs import Block, mugraph

NAMES = ("at_least", "maximum", "keep", "hide", "lift", "pow")


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


def quotient(denominator: Callable[[Any, Any], Any], halved: bool = False) -> KernelGraph:
    """``x / denominator``, or ``(x / 2) / denominator``, of which y is the other operand."""
    g = new_kernel_graph()
    x, y = (g.new_input((8, 64), "float32", n) for n in "xy")
    g.mark_output((x / 2.0 if halved else x) / denominator(g, y))
    return g


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        ("twice the denominator", lambda g, y: g.relu(y) * 2.0, True),
        ("another function", lambda g, y: g.relu(y + y), False),
        ("a negative factor", lambda g, y: g.relu(y) * -2.0, False),
    ],
)
def test_a_denominator_may_have_a_positive_factor(name: str, other: Any, same: bool) -> None:
    """``(x / 2) / relu(y)`` and ``x / (2 relu(y))`` have no value at the same places."""
    mu = search(quotient(other), H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    plain = quotient(lambda g, y: g.relu(y), halved=True)
    assert bool(Verifier(plain).check(mu)) == same


@pytest.mark.parametrize(("name", "same"), [("log", True), ("log1p", False), ("acosh", False)])
def test_arguments_may_have_a_factor_if_their_sign_decides(name: str, same: bool) -> None:
    """``log(2 y)`` is NaN where ``log(y)`` is; ``acosh(2 y)`` is a number from 0.5 on."""

    def undefined(*factors: float) -> Undefined:
        domain = FieldDomain(seed=1)
        domain.records = True
        y = draw((4, 4), [3], True, domain.primes)
        for factor in factors:
            y = domain.mul(y, domain.constant(factor))
        domain.elementwise(name, [y], {})
        return domain.undefined()

    p = FieldDomain(seed=1).primes.p
    assert undefined().same(undefined(2.0), {2.0}, p) == same
    assert not undefined().same(undefined(2.0), {3.0}, p)
    assert not undefined().same(undefined(-2.0), {-2.0}, p)


def test_a_quotient_of_a_quotient_divides_by_the_product() -> None:
    """Of x / a / b and x / (a b), a and b have the same zeros: those of x / a and of x / b not."""

    def undefined(formula: Callable[[FieldDomain, Any, Any, Any], Any]) -> Undefined:
        domain = FieldDomain(seed=1)
        domain.records = True
        x, y, z = (draw((4, 4), [n], True, domain.primes) for n in (3, 4, 5))
        a, b = (domain.elementwise("relu", [v], {}) for v in (y, z))
        formula(domain, x, a, b)
        return domain.undefined()

    def mul(d: FieldDomain, x: Any, y: Any) -> Any:
        return d.elementwise("mul", [x, y], {})

    def div(d: FieldDomain, x: Any, y: Any) -> Any:
        return d.elementwise("div", [x, y], {})

    p = FieldDomain(seed=1).primes.p
    whole = undefined(lambda d, x, a, b: div(d, x, mul(d, a, b)))
    for same in (
        lambda d, x, a, b: div(d, div(d, x, a), b),
        lambda d, x, a, b: div(d, mul(d, div(d, x, a), x), b),
        lambda d, x, a, b: mul(d, div(d, x, a), div(d, x, b)),
    ):
        assert whole.same(undefined(same), (), p)
    for other in (
        lambda d, x, a, b: div(d, x, a),
        lambda d, x, a, b: mul(d, div(d, x, a), b),
        lambda d, x, a, b: [div(d, x, a), div(d, x, b)],
    ):
        assert not whole.same(undefined(other), (), p)


# ------------------------------------------------------------------------------ hidden operands

ROWS = {"M": 8, "N": 8}
Build = Callable[[Any, Any, Any], Any]


class OfGraph:
    """Builds nodes of a kernel graph; `OfBlock` has the same calls."""

    def __init__(self) -> None:
        self.g = new_kernel_graph()
        self.inputs = [self.g.new_input((8, 8), "float16", n) for n in "xyz"]

    def op(self, kind: str, *args: Any) -> Any:
        return self.g.apply(kind, *args)

    def mask(self, x: Any) -> Any:
        return self.g.causal_mask(x)

    def rows(self, kind: str, x: Any) -> Any:
        return self.g.apply(kind, x, dim=1)


class OfBlock:
    """Builds operations of a block program."""

    def __init__(self) -> None:
        self.block = Block(dict(ROWS), {"M.grid": 2}, {"M": 4, "N": 8})
        self.inputs = [self.block.load(n, "M", "N") for n in "xyz"]

    def op(self, kind: str, *args: Any) -> Any:
        return self.block.op(kind, *args)

    def mask(self, x: Any) -> Any:
        return self.block.op("causal_mask", x, rows="M", columns="N", alignment="top_left")

    def rows(self, kind: str, x: Any) -> Any:
        return self.block.op(kind, x, over="N")


Program = Callable[[Any, Any, Any, Any], Any]


def judged(graph: Program, kernel: Program) -> tuple[Verification, bool]:
    """The verdicts of the verifier and of float64 on a kernel for a graph."""
    a, b = OfGraph(), OfBlock()
    a.g.mark_output(graph(a, *a.inputs))
    b.block.store("Z", kernel(b, *b.inputs), "M", "N")
    mu = mugraph(a.g, b.block.step())
    return Verifier(a.g).check(mu), bool(compare(a.g, mu, stress=False))


def softmax(b: Any, x: Any, how: str = "max") -> Any:
    e = b.op("exp", b.op("sub", x, b.rows(how, x)))
    return b.op("div", e, b.rows("sum", e))


#: a program, and one that differs where something is hidden
HIDDEN: dict[str, tuple[Program, Program]] = {
    "maximum with another first": (
        lambda b, x, y, z: b.op("maximum", x, b.mask(z)),
        lambda b, x, y, z: b.op("maximum", y, b.mask(z)),
    ),
    "maximum with another second": (
        lambda b, x, y, z: b.op("maximum", b.mask(z), x),
        lambda b, x, y, z: b.op("maximum", b.mask(z), y),
    ),
    "keep by another condition": (
        lambda b, x, y, z: b.op("exp", b.op("keep", x, b.mask(z))),
        lambda b, x, y, z: b.op("exp", b.op("keep", y, b.mask(z))),
    ),
    "comparison of another": (
        lambda b, x, y, z: b.op("at_least", x, b.mask(z)),
        lambda b, x, y, z: b.op("at_least", y, b.mask(z)),
    ),
    "comparison with another": (
        lambda b, x, y, z: b.op("at_least", b.mask(x), z),
        lambda b, x, y, z: b.op("at_least", b.mask(x), y),
    ),
    "hide by another condition": (
        lambda b, x, y, z: b.op("exp", b.op("hide", x, b.mask(z))),
        lambda b, x, y, z: b.op("exp", b.op("hide", y, b.mask(z))),
    ),
    "a kept hidden element minus itself": (
        lambda b, x, y, z: b.op("sub", x, x),
        lambda b, x, y, z: b.op("sub", *[b.op("keep", b.op("at_least", x, x), b.mask(z))] * 2),
    ),
    "hidden in one of two sums": (
        lambda b, x, y, z: b.op("exp", b.op("add", b.op("hide", x, y), z)),
        lambda b, x, y, z: b.op("exp", b.op("add", y, z)),
    ),
    "a sum as the shift": (
        lambda b, x, y, z: softmax(b, b.op("hide", b.op("at_least", x, y), z)),
        lambda b, x, y, z: softmax(b, b.op("hide", b.op("at_least", x, y), z), "sum"),
    ),
    "a hidden shift of what is seen": (
        lambda b, x, y, z: softmax(b, z),
        lambda b, x, y, z: b.op("div", *_shifted(b, z, b.op("hide", _of_rows(b, x, y), z))),
    ),
    "a factor that may be negative behind the mask": (
        lambda b, x, y, z: b.mask(b.op("mul", x, y)),
        lambda b, x, y, z: b.op("mul", b.mask(x), y),
    ),
    "a denominator that may be negative behind the mask": (
        lambda b, x, y, z: b.mask(b.op("div", x, y)),
        lambda b, x, y, z: b.op("div", b.mask(x), y),
    ),
    "the power of what is hidden": (
        lambda b, x, y, z: b.op("sub", x, x),
        lambda b, x, y, z: b.op("sub", *[b.op("pow", b.mask(x), y)] * 2),
    ),
    "0 times what is hidden": (
        lambda b, x, y, z: b.mask(b.op("mul", x, b.op("relu", y))),
        lambda b, x, y, z: b.op("mul", b.mask(x), b.op("relu", y)),
    ),
    "silu of what is hidden": (
        lambda b, x, y, z: b.op("sub", x, x),
        lambda b, x, y, z: b.op("sub", *[b.op("silu", b.mask(x))] * 2),
    ),
    "divided by what may be 0": (
        lambda b, x, y, z: b.op("mul", x, z),
        lambda b, x, y, z: b.op(
            "div", b.op("mul", b.op("mul", x, z), b.op("relu", y)), b.op("relu", y)
        ),
    ),
    "a root of what may be negative": (
        lambda b, x, y, z: b.op("mul", b.op("sub", x, x), b.op("sigmoid", y)),
        lambda b, x, y, z: b.op("mul", b.op("sub", x, x), b.op("sqrt", y)),
    ),
}


def _of_rows(b: Any, x: Any, y: Any) -> Any:
    return b.op("at_least", b.rows("mean", x), b.rows("mean", y))


def _shifted(b: Any, x: Any, of: Any) -> tuple[Any, Any]:
    e = b.op("exp", b.op("sub", x, b.rows("max", of)))
    return e, b.rows("sum", e)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_differs_where_something_is_hidden_is_refused(name: str) -> None:
    graph, kernel = HIDDEN[name]
    found, same = judged(graph, kernel)
    assert not found and not same and found.reason


RIGHT: dict[str, Program] = {
    "maximum": lambda b, x, y, z: b.op("maximum", x, b.mask(z)),
    "hidden both": lambda b, x, y, z: b.op("exp", b.op("maximum", b.mask(y), b.mask(z))),
    "keep": lambda b, x, y, z: b.op("exp", b.op("keep", b.op("at_least", x, y), b.mask(z))),
    "softmax": lambda b, x, y, z: softmax(b, b.op("hide", b.op("at_least", x, y), z)),
    "both masks": lambda b, x, y, z: b.op("exp", b.op("hide", b.op("at_least", x, y), b.mask(z))),
    "positive factor": lambda b, x, y, z: b.op("exp", b.op("mul", b.mask(x), b.op("exp", y))),
    "positive denominator": lambda b, x, y, z: b.op(
        "exp", b.op("div", b.mask(x), b.op("sqrt", b.rows("mean", b.op("square", y))))
    ),
    "floor": lambda b, x, y, z: b.op("exp", b.op("floor", b.mask(x))),
    "divided by what may be 0": lambda b, x, y, z: b.op("div", x, b.op("relu", y)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_with_hidden_operands_are_accepted(name: str) -> None:
    found, _ = judged(RIGHT[name], RIGHT[name])
    assert found, found.summary()


def test_conditions_are_drawn_so_the_bound_is_that_of_one_trial() -> None:
    def program(b: Any, x: Any, y: Any, z: Any) -> Any:
        return b.op("hide", b.op("at_least", x, y), b.mask(z))

    found, _ = judged(program, program)
    assert found.bound_log2 is not None and -30 < found.bound_log2 < -20
    assert "at drawn conditions" in found.conditions


@pytest.mark.parametrize(
    "name", [n for n, o in TABLE.items() if isinstance(o, _Unary) and not o.composite]
)
def test_functions_say_what_they_are_at_minus_infinity(name: str) -> None:
    operator, attributes = TABLE[name], {"min": -2.0, "max": 3.0} if name == "clamp" else {}
    assert isinstance(operator, _Unary)
    x = torch.tensor([-torch.inf], dtype=torch.float64)
    want, said = operator.reference([x], attributes).item(), operator.limit(attributes)
    assert said == pytest.approx(want) or (isnan(said) and not want < torch.inf)


@pytest.mark.parametrize(
    "name", [n for n, o in TABLE.items() if isinstance(o, _Unary) and not o.composite]
)
def test_functions_say_where_they_are_zero_positive_or_nothing(name: str) -> None:
    operator, attributes = TABLE[name], {"min": -2.0, "max": 0.0} if name == "clamp" else {}
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    y = operator.reference([x], attributes)
    assert not operator.above_zero or bool((y[~y.isnan()] >= 0).all())
    at_zero = operator.reference([torch.zeros(1, dtype=torch.float64)], attributes).item()
    assert operator.keeps_zero == (at_zero == 0 and name not in ("sqrt", "square", "clamp"))
    assert operator.flat == (int((y == 0).sum()) > 9)
    assert operator.partial == (int(y.isnan().sum()) > 9)
