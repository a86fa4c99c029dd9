"""Constants of products that the search multiplies together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.pipeline import Options, choose
from cutesuper.search.constants import joined_constants

M, K = 8, 128


def tensors(g: KernelGraph) -> tuple[Tensor, Tensor]:
    """``x[M, K]`` and a value of each row ``r[M, 1]``."""
    return g.new_input((M, K), "bf16", name="x"), g.new_input((M, 1), "fp32", name="r")


def norm_gradient(g: KernelGraph, x: Tensor, r: Tensor) -> Tensor:
    """As PyTorch takes it apart."""
    s = g.sum(x, 1)
    return s * -0.5 * r / 256.0 * (x * 2.0)


def number(g: KernelGraph, value: float) -> Tensor:
    return g.apply("constant", value=value)


#: what is written, and the constants that are left
JOINED: dict[str, tuple[Callable[[KernelGraph, Tensor, Tensor], Tensor], list[float]]] = {
    "gradient of a norm": (norm_gradient, [-1 / 256]),
    "numbers that cancel": (lambda g, x, r: g.exp(x * 30.0 * r * 0.1 / 30.0), [0.1]),
    "nothing is left": (lambda g, x, r: g.exp(x * 4.0 * r * 0.25), []),
    "an output stays computed": (lambda g, x, r: x * 4.0 * 0.25, [1.0]),
    "a divisor": (lambda g, x, r: g.exp(x * 2.0 / (r * 8.0)), [4.0]),
    "only divisors": (lambda g, x, r: g.exp(x / (r * 2.0) / (r * 8.0)), [16.0]),
    "the value of a row": (lambda g, x, r: g.exp((x * 2.0) * (r * 0.3)), [0.6]),
    "two products": (lambda g, x, r: g.exp(x * 2.0 * 3.0 + r * 2.0 * 4.0), [6.0, 8.0]),
}  # fmt: skip
KEPT: dict[str, Callable[[KernelGraph, Tensor, Tensor], Tensor]] = {
    "one constant": lambda g, x, r: x * 2.0 * r,
    "products that are not exact": lambda g, x, r: x * 0.3 * r * 0.7,
    "divisors whose inverse is not exact": lambda g, x, r: g.exp(r / ((x * 2.0) * (x * 3.0))),
    "reciprocals": lambda g, x, r: 2.0 / x * (3.0 / r),
    "what keeps others from overflowing": lambda g, x, r: x * 2.0**-60 * r * 2.0**60,
    "zero": lambda g, x, r: x * 0.0 * r * 2.0,
    "sums in between": lambda g, x, r: (x * 2.0 + r) * 4.0,
    "squares in between": lambda g, x, r: g.square(x * 2.0) * 3.0 + r,
    "divided by squares": lambda g, x, r: g.exp(r / g.square(x * 4.0) * 2.0),
    "the square of a number": lambda g, x, r: g.square(number(g, 3.0)) * x * 0.5,
}


def both(build: Callable[[KernelGraph, Tensor, Tensor], Tensor]) -> tuple[KernelGraph, KernelGraph]:
    """A program in primitive operators, and with joined constants; they compute the same."""
    g = cs.new_kernel_graph()
    g.mark_output(build(g, *tensors(g)), "fp32")
    old = g.expanded()
    new = joined_constants(old)
    r = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=r, dtype=torch.float64) for n in ((M, K), (M, 1))]
    for got, want in zip(*(evaluate(p, values, torch.float64) for p in (new, old)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=0, equal_nan=True)
    assert new.nodes[new.outputs[0]].dtype == cs.float32
    return old, new


def constants(g: KernelGraph) -> list[float]:
    return [n.attributes["value"] for n in g.nodes if n.operator == "constant"]


@pytest.mark.parametrize("name", JOINED)
def test_constants_are_joined(name: str) -> None:
    build, left = JOINED[name]
    assert constants(both(build)[1]) == left


@pytest.mark.parametrize("name", KEPT)
def test_others_are_left_alone(name: str) -> None:
    old, new = both(KEPT[name])
    assert new is old


def test_a_value_that_others_need_keeps_its_constant() -> None:
    def build(g: KernelGraph, x: Tensor, r: Tensor) -> Tensor:
        y = x * 4.0
        return y * r * 0.5 + g.exp(y)

    old, new = both(build)
    assert new is old


def test_the_constant_is_where_least_is_multiplied() -> None:
    _, new = both(norm_gradient)
    [node] = [n for n in new.nodes if any(new.nodes[j].operator == "constant" for j in n.inputs)]
    assert node.operator == "mul" and node.shape == (M, 1)


Leaf = Any
EXPRESSIONS: st.SearchStrategy[Leaf] = st.recursive(
    st.sampled_from(["x", "r", 2.0, -0.5, 3.0, 0.1, 256.0, 1e-9]),
    lambda inner: (
        st.tuples(st.sampled_from(["mul", "div", "add"]), inner, inner)
        | st.tuples(st.just("square"), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_drawn_programs_compute_the_same(expression: Leaf) -> None:
    def build(g: KernelGraph, x: Tensor, r: Tensor) -> Tensor:
        def value(e: Leaf) -> Any:
            if isinstance(e, tuple):
                return g.apply(e[0], *map(value, e[1:]))
            return {"x": x, "r": r}.get(e) or number(g, e)

        return g.add(g.mul(x, r), value(expression))

    old, new = both(build)
    assert len(constants(new)) <= len(constants(old))
    assert (new is old) == (constants(new) == constants(old))


def test_what_is_found_is_verified_against_what_was_written() -> None:
    g = cs.new_kernel_graph()
    g.mark_output(norm_gradient(g, *tensors(g)))
    _, choice = choose(g, Options(cs.H200), near=1.2)
    [step] = choice.candidate.mugraph.steps
    assert choice.verification
    numbers = [op.attributes["value"] for op in step.program.ops if op.kind == "constant"]
    assert numbers == [-1 / 256]


#: equal to what is written, as the verifier cannot see once their constants are joined
NOT_COMPARED: dict[str, Callable[[KernelGraph, Tensor, Tensor], Tensor]] = {
    "a sign leaves a divisor that may be 0": lambda g, x, r: r * 3.0 / (g.relu(x) * -2.0),
    "both do": lambda g, x, r: r * -3.0 / (g.at_least(x, 0.5) * -2.0),
}


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_what_cannot_be_compared_is_searched_as_it_is_written(name: str) -> None:
    g = cs.new_kernel_graph()
    g.mark_output(NOT_COMPARED[name](g, *tensors(g)))
    assert joined_constants(old := g.expanded()) is not old
    assert choose(g, Options(cs.H200), near=1.2)[1].verification
