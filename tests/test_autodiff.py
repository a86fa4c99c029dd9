"""Derivatives of kernel graphs: against PyTorch's autograd in float64, and through the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from benchmarks.search.programs import attention, layer_norm, layer_norm_linear, rms_backward
from cutesuper.errors import GraphError
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.ir.operators.base import TABLE, Operator
from cutesuper.ir.operators.composed import COMPOSED
from cutesuper.ir.operators.pairs import PAIRS
from cutesuper.ir.operators.pointwise import FUNCTIONS
from cutesuper.ir.serial import dumps, loads
from cutesuper.search.search import SearchOptions, search
from cutesuper.torch.aten.reducing import _maximum, _minimum
from cutesuper.verify.equivalence import Verifier

M = cs.symbol("M", 7)

Build = Callable[..., Any]


def graph(build: Build, *shapes: tuple[Any, ...], names: str = "x y z u") -> KernelGraph:
    """A graph whose outputs are what ``build(g, *inputs)`` returns."""
    g = new_kernel_graph()
    made = [g.new_input(s, name=n) for s, n in zip(shapes, names.split(), strict=False)]
    out = build(g, *made)
    for t in out if isinstance(out, tuple) else (out,):
        g.mark_output(t)
    return g


def given_values(g: KernelGraph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values in [0.3, 1.7] for the inputs by name: roots and quotients are smooth there."""
    r = torch.Generator().manual_seed(seed)
    nodes = [g.nodes[i] for i in g.inputs]
    return {
        n.name: torch.rand([extent(d) for d in n.shape], generator=r, dtype=torch.float64) * 1.4
        + 0.3
        for n in nodes
    }


def run(g: KernelGraph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return evaluate(g, [values[g.nodes[i].name] for i in g.inputs], torch.float64)


def by_autograd(
    g: KernelGraph, values: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random cotangents by name, and the gradients of all inputs by name."""
    leaves = {n: v.clone().requires_grad_() for n, v in values.items()}
    outs = run(g, leaves)
    r = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=r, dtype=torch.float64) for o in outs]
    names = [f"d{g.nodes[i].name}" for i in g.outputs]
    found = torch.autograd.grad(outs, list(leaves.values()), weights, allow_unused=True)
    return dict(zip(names, weights, strict=True)), dict(zip(leaves, found, strict=True))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for extents of 1 in front."""
    assert prod(got.shape) == prod(want.shape)
    assert got.shape[got.dim() - want.dim() :] == want.shape
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-9, atol=1e-9)


def check(g: KernelGraph, values: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
    """Gradients from `split` under several choices are PyTorch's, before and after expansion."""
    values = given_values(g) if values is None else values
    cotangents, want = by_autograd(g, values)
    for save in ("none", "auto"):
        s = cs.split(g, save=save, **options)
        kept = run(s.forward, values)
        for got, expected in zip(kept, run(g, values), strict=False):
            torch.testing.assert_close(got, expected)
        feed = {**values, **cotangents, **{n: kept[k] for n, k in s.saved.items()}}
        for backward in (s.backward, s.backward.expanded()):
            got = run(backward, feed) if backward.outputs else []
            for name, place in s.gradients.items():
                same(feed[place] if isinstance(place, str) else got[place], want[name])


# ------------------------------------------------------------------------------ every operator

CASES: dict[str, tuple[Build, tuple[tuple[Any, ...], ...]]] = {
    "add": (lambda g, x, y: g.exp(x + y), ((3, 4), (3, 4))),
    "add, rows": (lambda g, x, y: g.exp(x + y), ((3, 4), (4,))),
    "add, both": (lambda g, x, y: x + y, ((3, 1), (2, 1, 4))),
    "add, scalar": (lambda g, x, y: g.sum(x, 0) * 3 + y, ((3, 4), (1,))),
    "sub": (lambda g, x, y: x - y, ((3, 4), (3, 4))),
    "sub, both": (lambda g, x, y: g.square(1 - x - y), ((3, 1), (5, 1, 4))),
    "mul": (lambda g, x, y: x * y, ((3, 4), (4,))),
    "mul, both": (lambda g, x, y: x * y * -0.5, ((3, 1), (1, 4))),
    "mul, itself": (lambda g, x: x * x * 2, ((3, 4),)),
    "div": (lambda g, x, y: x / y, ((3, 4), (3, 1))),
    "div, both": (lambda g, x, y: g.div(1.5, x) / y, ((2, 1, 4), (3, 1))),
    "clamp": (lambda g, x: g.clamp(x, 0.6, 1.2), ((5, 6),)),
    "sum": (lambda g, x: g.sum(x, 0), ((3, 4),)),
    "sum, two": (lambda g, x: g.sum(g.sum(g.square(x), 0), -1), ((3, 4, 2),)),
    "sum, then broadcast": (lambda g, x, y: g.sum(x, 1) * y, ((3, 4), (3, 4))),
    "sum, repeated": (lambda g, x, y: g.sum(x + y, 1), ((3, 1), (3, 4))),
    "mean": (lambda g, x: g.mean(x, 1), ((3, 4),)),
    "mean, centred": (lambda g, x: g.square(x - g.mean(x, 0)), ((3, 4),)),
    "max": (lambda g, x: g.max(x, 1), ((3, 4),)),
    "amax": (lambda g, x: g.apply("amax", x, dims=(2, 0)), ((3, 4, 5),)),
    "prod": (lambda g, x: g.prod(x, 1), ((3, 4),)),
    "max, subtracted": (lambda g, x: g.square(x - g.max(x, 0)), ((3, 4),)),
    "matmul": (lambda g, x, y: x @ y, ((3, 4), (4, 5))),
    "matmul, batch": (lambda g, x, y: x @ y, ((2, 3, 4), (2, 4, 5))),
    "matmul, left batch": (lambda g, x, y: x @ y, ((2, 3, 4), (4, 5))),
    "matmul, right batch": (lambda g, x, y: x @ y, ((3, 4), (2, 4, 5))),
    "matmul, both batch": (lambda g, x, y: x @ y, ((6, 1, 3, 4), (2, 4, 5))),
    "matmul, itself": (lambda g, x: x @ g.transpose(x), ((3, 4),)),
    "matmul, one": (lambda g, x, y: x @ y, ((3, 1), (1, 5))),
    "matmul, scaled": (lambda g, x, y: (x * 0.5) @ (y * -2) * 3, ((3, 4), (4, 5))),
    "matmul, summed": (lambda g, x, y: g.sum(x @ y, 1), ((3, 4), (4, 5))),
    "transpose": (lambda g, x: g.square(g.transpose(x)), ((3, 4),)),
    "transpose, cycle": (lambda g, x, y: g.transpose(x, (2, 0, 1)) * y, ((2, 3, 4), (4, 2, 3))),
    "transpose, more": (lambda g, x, y: g.transpose(g.exp(x)) * y, ((3, 4), (2, 4, 3))),
    "softmax": (lambda g, x: g.softmax(x), ((3, 4),)),
    "softmax, rows": (lambda g, x, y: g.softmax(x, 0) * y, ((3, 4), (2, 3, 4))),
    "rms_norm": (lambda g, x: g.rms_norm(x), ((3, 4),)),
    "layer_norm": (lambda g, x: g.layer_norm(x), ((3, 4),)),
    "layer_norm, weight": (lambda g, x, y: g.layer_norm(x, y, eps=0.1), ((2, 3, 4), (4,))),
    "layer_norm, bias": (lambda g, x, y: g.layer_norm(x, bias=y), ((3, 4), (4,))),
    "layer_norm, both": (lambda g, x, y, z: g.layer_norm(x, y, z), ((2, 3, 4), (4,), (4,))),
    "layer_norm, summed": (
        lambda g, x, y, z: g.sum(g.sum(g.layer_norm(x, y, z, eps=0), 0), 1), ((3, 4), (4,), (4,))
    ),
    "log_softmax": (lambda g, x: g.log_softmax(x), ((3, 4),)),
    "log_softmax, rows": (lambda g, x, y: g.log_softmax(x, 0) * y, ((3, 4), (2, 3, 4))),
    "log_softmax, summed": (lambda g, x: g.sum(g.log_softmax(x), 1), ((3, 4),)),
    "logsumexp": (lambda g, x: g.logsumexp(x), ((3, 4),)),
    "root": (lambda g, x: g.root(g.sum(g.square(x), 1)) * x, ((3, 4),)),
    "log1p_exp": (lambda g, x: g.log1p_exp(x) * x, ((3, 4),)),
    "leaky_relu": (lambda g, x: g.leaky_relu(x, 0.25) * x, ((3, 4),)),
    "power": (lambda g, x: g.power(g.square(x) + 0.5, -1.5) * x, ((3, 4),)),
    "hardtanh": (lambda g, x: g.hardtanh(x, 0.6, 1.2) * x, ((5, 6),)),
    "logsumexp, rows": (lambda g, x, y: g.logsumexp(x, 1) * y, ((2, 3, 4), (2, 3, 4))),
    "rms_norm, weight": (lambda g, x, y: g.rms_norm(x, y, eps=0.1), ((2, 3, 4), (4,))),
    "rms_norm, no eps": (lambda g, x, y: g.rms_norm(x, y, eps=0), ((3, 4), (4,))),
    "rotate_half": (lambda g, x, y: g.rotate_half(x * y) * y, ((2, 3, 6), (6,))),
    "rotate_pairs": (lambda g, x, y: g.rotate_pairs(x * y) * y, ((2, 3, 6), (6,))),
    "cumsum": (lambda g, x: g.square(g.cumsum(x, 1)), ((2, 3, 4),)),
    "causal_mask": (lambda g, x: g.exp(g.causal_mask(x)), ((3, 4),)),
    "causal_mask, softmax": (
        lambda g, x: g.softmax(g.causal_mask(x, alignment="bottom_right")), ((3, 5),)
    ),
    "causal_mask, factor": (lambda g, x, y: g.exp(g.causal_mask(x)) @ y, ((3, 4), (4, 2))),
    "attention": (
        lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v),
        ((2, 3, 4), (2, 5, 4), (2, 5, 6)),
    ),
    "attention, causal": (
        lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        ((2, 5, 4), (1, 5, 4), (5, 4)),
    ),
    "attention, groups": (
        lambda g, q, k, v: g.scaled_dot_product_attention(q, k, v),
        ((2, 3, 2, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    ),
    "concat": (
        lambda g, x, y, z: g.concat([g.exp(x), y], 1) @ g.concat([z, g.square(z)], 0),
        ((3, 4), (3, 4), (4, 5)),
    ),
    "concat, rows": (
        lambda g, x, y, z: g.sum(g.square(g.concat([x * z, y], 0)), 0), ((2, 3), (4, 3), (1, 3))
    ),
    "slice": (
        lambda g, x, y, z: g.slice(x @ g.concat([y, z], 1), 1, 0, 4), ((3, 4), (4, 4), (4, 3))
    ),
    "slice, gate": (
        lambda g, x, y, z: _gate(g, x @ g.concat([y, z], 1)), ((3, 4), (4, 5), (4, 5))
    ),
    "slice, overlapping": (
        lambda g, x, y, z: g.sum(_overlap(g, g.exp(g.concat([x, y, z], 1))), 1),
        ((3, 2), (3, 2), (3, 2)),
    ),
}  # fmt: skip


def _within(g: KernelGraph, x: Tensor, domain: tuple[float, float]) -> Tensor:
    """Values in the domain of a function."""
    low, high = domain
    if high < inf:
        return g.tanh(x - 0.7)  # the domain is (-1, 1)
    return x * 2 - 1.7 if low == -inf else g.square(x) + low + 0.5


for _c in COMPOSED:
    CASES.setdefault(_c.name, (lambda g, x, name=_c.name: g.apply(name, x) * x, ((3, 4),)))
for _f in FUNCTIONS:
    CASES[_f.name] = (
        lambda g, x, f=_f: g.apply(f.name, _within(g, x, f.domain)) * x, ((3, 4),)
    )  # fmt: skip
CASES["convert"] = (lambda g, x, y: g.convert(x, "bf16") @ g.convert(y, "bf16"), ((3, 4), (4, 5)))
CASES["at_least"] = (lambda g, x, y: g.at_least(x, y) * x * y, ((5, 6), (6,)))
CASES["maximum"] = (lambda g, x, y: g.maximum(x, y), ((5, 6), (6,)))
for _p in PAIRS:  # away from steps, with a positive base
    CASES[_p.name] = (
        lambda g, x, y, p=_p: g.apply(p.name, g.square(x) + 0.3, y * 0.1 + 2.0) * x * y,
        ((5, 6), (6,)),
    )
CASES["raised"] = (lambda g, x, y: g.raised(x, y), ((5, 6), (6,)))
CASES["xlogy"] = (lambda g, x, y: g.xlogy(x, g.square(y) + 0.5), ((5, 6), (6,)))
CASES["hypot"] = (lambda g, x, y: g.hypot(x, y), ((5, 6), (6,)))
CASES["logit"] = (lambda g, x: g.logit(g.sigmoid(x)) * x, ((3, 4),))
CASES["special_entr"] = (lambda g, x: g.special_entr(g.square(x) + 0.1) * x, ((3, 4),))
CASES["maximum, ties"] = (lambda g, x: g.maximum(x, x), ((5, 6),))
CASES["hide"] = (lambda g, x, y: g.exp(g.hide(g.step(x - 1), x * y)), ((5, 6), (6,)))
CASES["lift"] = (lambda g, x, y: g.exp(g.lift(g.step(x - 1), x * y) * -1.0), ((5, 6), (6,)))
CASES["keep"] = (lambda g, x, y: g.keep(g.step(x - 1), x * y), ((5, 6), (6,)))


def _gate(g: KernelGraph, both: Tensor) -> Tensor:
    return g.silu(g.slice(both, 1, 0, 5)) * g.slice(both, 1, 5, 10)


def _overlap(g: KernelGraph, t: Tensor) -> Tensor:
    return g.slice(t, 1, 0, 4) * g.slice(t, 1, 2, 6)


def test_rows_are_summed_before_they_meet() -> None:
    """The gradient of a number that multiplies rows: one kernel, where the sum over the rows came
    first it was two, and 480 segments to search."""
    g = cs.new_kernel_graph()
    x, a = g.new_input((24, 64)), g.new_input((1,))
    g.mark_output(g.mul(g.rms_norm(x), a))
    sums = [n for n in cs.grad(g, wrt=[a]).nodes if n.operator == "sum"]
    assert [n.shape for n in sums] == [(24, 1), (1, 1)]


@pytest.mark.parametrize("name", CASES)
def test_derivative_is_pytorchs(name: str) -> None:
    build, shapes = CASES[name]
    check(graph(build, *shapes))


def test_norms_of_zeros_have_the_gradient_that_pytorch_gives_them() -> None:
    """0 for the row of zeros, where the root is as steep as it can be."""
    g = graph(lambda g, x: g.root(g.sum(g.square(x), 1)), (3, 4))
    x = torch.randn(3, 4)
    x[1] = 0
    leaf = x.clone().requires_grad_()
    torch.linalg.vector_norm(leaf, dim=1).sum().backward()
    [found] = run_reference(cs.grad(g), [x, torch.ones(3, 1)])
    torch.testing.assert_close(found.float(), leaf.grad, rtol=2e-3, atol=0)


def test_every_operator_has_a_derivative() -> None:
    tested = {n.split(",")[0] for n in CASES} | {"scaled_dot_product_attention"}
    tested |= {"length_mask", "gather_pages"}  # in tests/test_lengths.py
    tested |= {"limit_mask"}  # in tests/test_limits.py
    tested |= {"take_rows"}  # in tests/test_take_rows.py
    tested |= {"put_rows"}  # in tests/test_put_rows.py
    tested |= {"pick", "label_weight", "cross_entropy"}  # in tests/test_labels.py
    tested |= {"argmax", "only_place"}  # in tests/test_places.py
    for name, op in TABLE.items():
        if name not in ("input", "constant"):
            assert type(op).derivative is not Operator.derivative, name
            assert name in tested, name


def test_second_derivatives() -> None:
    for name in (
        "gelu",
        "erf",
        "silu",
        "tanh",
        "rsqrt",
        "sigmoid",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "atan",
        "sinh",
        "cosh",
        "asinh",
        "erfc",
    ):
        g = graph(lambda g, x, n=name: g.apply(n, x), (3, 4))
        check(cs.grad(g))
    check(cs.grad(graph(lambda g, x, y: g.rms_norm(x, y), (3, 4), (4,))))
    check(cs.grad(graph(lambda g, x: g.softmax(x), (3, 4))))
    check(cs.grad(graph(lambda g, x: g.log_softmax(x), (3, 4))))


# ------------------------------------------------------------------------- where it is not smooth


def gradient_at(build: Build, values: list[float]) -> list[float]:
    """The gradient of a function of one row, with cotangents of 1."""
    g = cs.grad(graph(build, (1, len(values))))
    feed = {"x": torch.tensor([values], dtype=torch.float64)}
    ones = {n: torch.ones_like(v) for n, v in given_values(g).items()}
    return run(g, {**ones, **feed})[0][0].tolist()


def test_ties_share_a_maximum_evenly() -> None:
    assert gradient_at(lambda g, x: g.max(x, 1), [1, 3, 3, 2, 3, 3]) == [
        0,
        1 / 4,
        1 / 4,
        0,
        1 / 4,
        1 / 4,
    ]


def test_infinite_cotangents_of_hidden_elements_are_zero() -> None:
    """As in PyTorch, which selects: a product of 0 and inf would be NaN."""
    for infinite in (
        lambda g, x: 1.0 / g.exp(x),
        lambda g, x: g.rsqrt(g.exp(x)),
        lambda g, x: g.square(g.log(g.exp(x))),
        lambda g, x: 1.0 / g.square(x),
        lambda g, x: g.rsqrt(g.square(x)),
    ):
        check(graph(lambda g, x, f=infinite: f(g, g.causal_mask(x)), (3, 4)))
    check(cs.grad(graph(lambda g, x: 1.0 / (g.exp(g.causal_mask(x)) + 1), (3, 4))))


def test_kinks_are_pytorchs() -> None:
    assert gradient_at(lambda g, x: g.relu(x), [-1, 0, 1]) == [0, 0, 1]
    assert gradient_at(lambda g, x: g.clamp(x, -1, 2), [-2, -1, 0, 2, 3]) == [0, 1, 1, 1, 0]
    inf = float("inf")
    assert gradient_at(lambda g, x: g.clamp(x, -inf, 2), [-9, 2, 3]) == [1, 1, 0]
    assert gradient_at(lambda g, x: g.hardtanh(x, -1, 2), [-2, -1, 0, 2, 3]) == [0, 0, 1, 0, 0]
    assert gradient_at(lambda g, x: g.leaky_relu(x, 0.25), [-1, 0, 1]) == [0.25, 0.25, 1]
    assert gradient_at(lambda g, x: g.log1p_exp(x), [-inf, 0, inf]) == [0, 0.5, 1]


@pytest.mark.parametrize("name", ["relu", "clamp", "hardtanh"])
def test_what_is_cut_off_has_no_gradient_even_of_infinity(name: str) -> None:
    """PyTorch chooses where we would multiply: the slope of a root is inf at what a relu cuts."""
    ends = () if name == "relu" else (0.0, 6.0)
    found = gradient_at(lambda g, x: g.sqrt(getattr(g, name)(x, *ends)), [-1, 4, 9])
    assert found == [0, 0.25, 1 / 6 if name == "relu" else 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_all_that_is_largest_shares_evenly_along_several_dimensions(sign: int) -> None:
    """Five elements in two rows have a fifth each, and not a quarter and a sixth."""
    x = sign * torch.tensor([[3.0, 3, 1], [3, 3, 3], [0, 1, 2]], dtype=torch.float64)
    along = _maximum if sign > 0 else _minimum
    made = cs.grad(graph(lambda g, t: along(g, t, (1, 0)), (3, 3)))
    [found] = evaluate(made, [x, torch.ones(1, 1, dtype=torch.float64)], torch.float64)
    x.requires_grad_()
    (x.amax((0, 1)) if sign > 0 else x.amin((0, 1))).backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_maximum_of_maxima_shares_with_the_rows_that_have_it(sign: int) -> None:
    """Two rows have a half each, which two and three elements share."""
    x = sign * torch.tensor([[3.0, 3, 1], [3, 3, 3], [0, 1, 2]], dtype=torch.float64)
    along = _maximum if sign > 0 else _minimum
    made = cs.grad(graph(lambda g, t: along(g, along(g, t, (1,)), (0,)), (3, 3)))
    [found] = evaluate(made, [x, torch.ones(1, 1, dtype=torch.float64)], torch.float64)
    x.requires_grad_()
    (x.amax(1).amax(0) if sign > 0 else x.amin(1).amin(0)).backward()
    torch.testing.assert_close(found, x.grad)


def test_a_clamp_of_nan_has_no_gradient() -> None:
    assert gradient_at(lambda g, x: g.clamp(x, 0.0, 6.0), [float("nan"), inf, -inf, 6]) == [
        0,
        0,
        0,
        1,
    ]


def test_gelu_of_infinity_is_infinity_in_vectors_too() -> None:
    """PyTorch's on a CPU gives NaN for eight float32 numbers at once, and inf for one."""
    g = graph(lambda g, x: g.gelu(x), (1, 8))
    [y] = run_reference(g, [torch.full((1, 8), inf)])
    assert y.tolist() == [[inf] * 8]


def test_repeated_values_do_not_look_at_the_operand() -> None:
    inf = float("inf")
    assert gradient_at(lambda g, x: g.sum(x, 1), [inf, float("nan"), 0, -inf]) == [1, 1, 1, 1]


# -------------------------------------------------------------------------------------- programs


def rms(g: KernelGraph, x: Tensor, w: Tensor) -> Tensor:
    return g.rms_norm(x, w)


def cross_entropy(g: KernelGraph, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """-sum target log softmax has no logarithm here: minus the mean probability of the target."""
    p = g.softmax(x @ w)
    return g.mean(g.sum(p * target, 1), 0) * -1


def layer(g: KernelGraph, x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """norm, gated product, residual."""
    y = g.rms_norm(x, w)
    return x + g.silu(y @ a) * g.gelu(y @ b)


PROGRAMS: dict[str, Callable[[], KernelGraph]] = {
    "layer norm": lambda: graph(layer_norm, (3, 8), (8,), (8,)),
    "layer norm + linear": lambda: layer_norm_linear(k=8, n=5),
    "layer": lambda: graph(layer, (3, 8), (8,), (8, 8), (8, 8)),
    "cross entropy": lambda: graph(cross_entropy, (3, 8), (8, 5), (3, 5)),
    "attention": lambda: attention(rows=4, length=6, causal=True, heads=2),
    "symbolic rows": lambda: graph(layer, (M, 8), (8,), (8, 8), (8, 8)),
    "symbolic mean": lambda: graph(lambda g, x: g.square(x - g.mean(x, 0)), (M, 4)),
    "symbolic count": lambda: graph(lambda g, x, y: g.sum(x + y, 0), (1, 4), (M, 4)),
    "two outputs": lambda: graph(lambda g, x, y: (g.exp(x * y), g.sum(x, 1)), (3, 4), (4,)),
    "an output inside": lambda: graph(lambda g, x: (g.exp(x), g.square(g.exp(x))), (3, 4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    check(PROGRAMS[name]())


@pytest.mark.parametrize("name", PROGRAMS)
def test_saved_and_read_back(name: str) -> None:
    s = cs.split(PROGRAMS[name]())
    for g in (s.forward, s.backward):
        back = loads(dumps(g))
        assert isinstance(back, KernelGraph)
        assert back.nodes == g.nodes
        assert back.outputs == g.outputs


@st.composite
def programs(draw: st.DrawFn) -> KernelGraph:
    """Smooth functions of a few values that broadcast against each other."""
    g = new_kernel_graph()
    shapes = [(3, 4), (4,), (3, 1), (2, 3, 4), (1, 4)]
    values = [
        g.new_input(draw(st.sampled_from(shapes)), name=f"i{k}")
        for k in range(draw(st.integers(1, 3)))
    ]
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(("unary", "binary", "reduce", "matmul", "transpose", "norm")))
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "unary":
            name = draw(st.sampled_from(("tanh", "sigmoid", "silu", "gelu", "erf")))
            values.append(g.apply(name, a))
        elif kind == "binary":
            name = draw(st.sampled_from(("add", "sub", "mul")))
            try:
                values.append(g.apply(name, a, draw(st.sampled_from((b, -1.0, 0.5, 0.0, 1.0)))))
            except cs.errors.ShapeError:
                continue
        elif kind == "reduce":
            name = draw(st.sampled_from(("sum", "mean")))
            values.append(g.apply(name, a, dim=draw(st.integers(-len(a.shape), -1))))
        elif kind == "norm":
            values.append(draw(st.sampled_from((g.softmax, g.rms_norm)))(a))
        elif len(a.shape) > 1:
            t = g.transpose(a)
            values.append(a @ t if kind == "matmul" else g.tanh(t))
    computed = [v for v in values if v.node.operator != "input"]
    for v in computed[-draw(st.integers(1, 2)) :]:
        g.mark_output(v)
    return g


@given(programs())
@settings(deadline=None, max_examples=60)
def test_random_programs(g: KernelGraph) -> None:
    if not g.outputs:
        return
    needed = g.needed(g.outputs)
    check(g, wrt=[g.nodes[i].name for i in g.inputs if i in needed])


# ------------------------------------------------------------------------------ shape of the graph


def kinds(g: KernelGraph) -> list[str]:
    return [n.operator for n in g.nodes]


def test_rms_norm_with_saved_rstd_is_the_program_written_by_hand() -> None:
    g = graph(rms, (520, 520), (520,), names="x w")
    s = cs.split(g, save=["rstd"])
    hand = rms_backward(520, 520)
    assert [n.name for n in s.backward.nodes if n.operator == "input"] == ["x", "w", "rstd", "dt2"]
    operators = sorted(k for k in kinds(hand) if k != "input")
    assert sorted(k for k in kinds(s.backward) if k != "input") == operators
    assert s.saved == {"rstd": 1}
    assert s.gradients == {"x": 0, "w": 1}
    assert cs.split(g).backward.nodes == s.backward.nodes


def test_nothing_is_computed_that_only_other_gradients_need() -> None:
    g = graph(lambda g, x, w: x @ w, (3, 4), (4, 5), names="x w")
    only = cs.grad(g, wrt="x")
    assert kinds(only) == ["input", "input", "transpose", "matmul"]
    assert [n.name for n in only.nodes[:2]] == ["w", "dt2"]


def test_constants_meet_and_cancel() -> None:
    g = graph(lambda g, x: g.square(g.sqrt(x * 1.0 + 0.0)), (3, 4))
    assert kinds(cs.grad(g)) == [
        "input",
        "input",
        "constant",
        "mul",
        "constant",
        "add",
        "sqrt",
        "mul",
        "div",
    ]
    # x^2 / 2: the halves cancel, dy * x is all that is left
    half = graph(lambda g, x: g.square(x) * 0.5, (3, 4))
    assert kinds(cs.grad(half)) == ["input", "input", "mul"]
    # -(-x) - (-x): factors of -1 meet
    signs = graph(lambda g, x: g.exp(0 - x), (3, 4))
    assert kinds(cs.grad(signs)) == [
        "input",
        "input",
        "constant",
        "sub",
        "exp",
        "mul",
        "constant",
        "mul",
    ]


def test_zeros_of_both_signs_are_two_numbers() -> None:
    g = graph(lambda g, x: g.exp(g.clamp(x, 0.0, 1) * g.maximum(g.clamp(x, -0.0, 1), -0.0)), (3, 4))
    lows = [n.attributes["min"] for n in cs.grad(g).nodes if n.operator == "clamp"]
    assert sorted(map(repr, lows)) == ["-0.0", "0.0"]


def test_means_stay_means() -> None:
    """No 1 / n is left of LayerNorm: the graph is right at the verifier's extents too."""
    g = cs.grad(graph(layer_norm, (3, 8), (8,), (8,)), wrt=["x", "y"])
    assert kinds(g).count("mean") == 4
    assert {n.attributes["value"] for n in g.nodes if n.operator == "constant"} <= {1e-5}


@pytest.mark.parametrize(
    ("dtype", "build", "kept"),
    [
        ("float32", lambda g, x: g.log_softmax(x), {"max", "log"}),
        ("float32", lambda g, x: g.log_softmax(g.mul(x, x)), {"sum"}),
        ("bfloat16", lambda g, x: g.log_softmax(g.mul(x, x)), {"max", "log"}),
    ],
)
def test_maxima_of_rows_that_are_computed_again(
    dtype: str, build: Callable[[KernelGraph, Tensor], Tensor], kept: set[str]
) -> None:
    """The backward kernel may compute float32 rows in another order: x^6 as (x^3)^2."""
    g = new_kernel_graph()
    g.mark_output(build(g, g.new_input((4, 32), dtype, name="x")))
    assert set(cs.split(g, wrt=["x"]).saved) == kept


def test_attention_reuses_its_output_and_one_number_a_row() -> None:
    """ds = p (dp - sum(do * o)): neither scores nor probabilities are kept."""
    s = cs.split(attention(rows=512, length=512, causal=True, heads=2))
    shapes = {n: s.forward.nodes[s.forward.outputs[k]].shape for n, k in s.saved.items()}
    assert shapes == {"lse": (2, 512, 1), "out": (2, 512, 128)}
    assert len(s.forward.outputs) == 2
    assert kinds(s.backward).count("matmul") == 5
    assert kinds(s.backward).count("causal_mask") == 1


def test_products_are_kept_where_they_cost_more_than_memory() -> None:
    def mlp(k: int) -> cs.Split:
        return cs.split(graph(lambda g, x, a: g.gelu(x @ a), (64, k), (k, 64)))

    assert list(mlp(512).saved) == ["matmul"]
    assert list(mlp(128).saved) == []


def test_nothing_made_of_products_is_read_where_they_are_computed_again() -> None:
    """A rounded output beside its unrounded parts would leave the rounding where they cancel, and
    statistics would be those of products added up in another order."""

    def normalised(g: KernelGraph, x: Tensor, w: Tensor) -> Tensor:
        p = g.softmax(x @ w, 1)
        return p / g.sqrt(g.sum(g.square(p), 1))

    split = cs.split(graph(normalised, (4, 24), (24, 33)))
    assert kinds(split.backward).count("matmul") == 3
    assert split.saved == {}
    softmax = cs.split(graph(lambda g, x, w: g.softmax(x @ w, 1), (4, 24), (24, 33)))
    assert softmax.saved == {"out": 0}


def test_values_are_kept_as_they_are_computed() -> None:
    """Not as an output rounds them: gradients of float32 had the 8 bits of a bfloat16 output."""
    g = new_kernel_graph()
    x, w, a = (g.new_input(s, "float32", n) for s, n in (((8, 2), "x"), ((2, 8), "w"), ((8,), "a")))
    y = x @ w
    g.mark_output(y, "bfloat16")
    g.mark_output(y * a)
    for save in ("auto", [y]):
        s = cs.split(g, save=save)
        nodes = [s.backward.nodes[i] for i in s.backward.inputs]
        assert {str(n.dtype) for n in nodes if n.name in s.saved} <= {"float32"}
        assert [str(s.forward.nodes[i].dtype) for i in s.forward.outputs[:2]] == [
            "bfloat16", "float32",
        ]  # fmt: skip
        assert len(s.saved) == (save != "auto")
    added = [n for n in s.backward.nodes if n.operator == "add"]
    assert [str(n.dtype) for n in added] == ["float32"]


def test_statistics_are_kept_of_elements_that_are_kept() -> None:
    """Logits over 512 elements are kept in 16 bits, and their log-sum-exp is of unrounded ones."""
    shapes = (64, 512), (512, 128)
    log_softmax = cs.split(graph(lambda g, x, w: g.log_softmax(x @ w, dim=1), *shapes))
    assert log_softmax.saved == {"out": 0}

    def confident(g: KernelGraph, x: Tensor, w: Tensor) -> Tensor:
        return g.sum(g.square(g.softmax(x @ w, 1)), 1)

    assert set(cs.split(graph(confident, *shapes)).saved) == {"matmul", "sum"}


def test_statistics_of_scores_are_kept_where_no_kernel_rounds_their_operands() -> None:
    """One kernel may round 0.3 * tanh(q), another tanh(q): with scores of 300 in float16 shares
    were wrong by 0.1."""

    def weights(g: KernelGraph, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return g.softmax(q @ g.transpose(k) * 0.3, 1) @ v

    def computed(g: KernelGraph, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weights(g, g.tanh(q), k, v)

    shapes = (16, 32), (24, 32), (24, 8)
    assert set(cs.split(graph(weights, *shapes)).saved) == {"lse", "out"}
    assert set(cs.split(graph(computed, *shapes)).saved) == {"out"}


@pytest.mark.parametrize(("dtype", "kept"), [("float32", set()), ("float16", {"max", "log"})])
def test_statistics_of_float32_products_are_taken_again(dtype: str, kept: set[str]) -> None:
    """Tensor cores add up what they multiply by 2^-21, in the order of each kernel: of scores of
    100, a share that is 1 in PyTorch was 1 + 5e-5."""
    g = new_kernel_graph()
    x, w = (g.new_input(s, dtype, n) for s, n in (((64, 32), "x"), ((32, 48), "w")))
    g.mark_output(g.log_softmax(g.silu(x @ w), dim=1))
    assert set(cs.split(g).saved) == kept


def test_gates_in_one_product_come_apart() -> None:
    """Cotangents of slices that cover a value are put together, and vanish when expanded."""
    g = cs.grad(graph(lambda g, x, a, b: _gate(g, x @ g.concat([a, b], 1)), (3, 4), (4, 5), (4, 5)))
    assert not set(kinds(g.expanded())) & {"concat", "slice", "step"}


# ----------------------------------------------------------------------------- the whole road


OPTIONS = SearchOptions(lowered=True)


def found(g: KernelGraph) -> list[Any]:
    """All muGraphs that the search finds, each verified; none is rejected."""
    verifier = Verifier(g)
    result = search(
        g, cs.H200, options=OPTIONS, verify=lambda mu: bool(verifier.check(mu, bound=False))
    )
    assert result.statistics.rejected == 0
    return [c.mugraph for c in result.candidates]


def test_rms_norm_backward_is_found_and_verified_against_the_one_by_hand() -> None:
    """muGraphs of the derived graph compute the program written by hand."""
    g = graph(rms, (512, 512), (512,), names="x w")
    hand = rms_backward(512, 512)
    hand.nodes[3] = replace(hand.nodes[3], dtype=cs.float32)  # rstd
    derived = cs.split(g, save=["rstd"]).backward
    mus = [replace(mu, inputs=("x", "w", "dt2", "rstd")) for mu in found(derived)]
    assert mus
    verifier = Verifier(hand)
    assert all(verifier.check(mu) for mu in mus)
    swapped = replace(mus[0], inputs=("dt2", "w", "x", "rstd"))
    assert not verifier.check(swapped)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: cs.grad(graph(rms, (256, 512), (512,))), id="recomputed"),
        pytest.param(lambda: cs.grad(graph(lambda g, x: g.gelu(x), (256, 512))), id="gelu"),
        pytest.param(lambda: cs.grad(graph(lambda g, x: g.softmax(x), (256, 512))), id="softmax"),
        pytest.param(
            lambda: cs.grad(graph(lambda g, x, y: g.relu(x) * y, (M, 512), (512,)), wrt="x"),
            id="relu, symbolic rows",
        ),
        pytest.param(
            lambda: cs.grad(graph(lambda g, x, w: g.relu(x @ w), (64, 128), (128, 256)), wrt="x"),
            id="linear",
        ),
        pytest.param(lambda: cs.grad(graph(lambda g, x: g.max(x, 1), (256, 512))), id="maximum"),
    ],
)
def test_gradients_are_searched_and_verified(build: Callable[[], KernelGraph]) -> None:
    assert found(build())


# -------------------------------------------------------------------------------------- messages


def residual(g: KernelGraph, x: Tensor, r: Tensor) -> Tensor:
    return g.exp(x + r)


ERRORS: list[tuple[Callable[[KernelGraph], Any], str]] = [
    (
        lambda g: cs.grad(g, wrt="q"),
        "grad(wrt='q'): is not an input of the graph; it has: x, y",
    ),
    (lambda g: cs.grad(g, wrt=["x", "x"]), "grad(wrt=...): x is there twice"),
    (lambda g: cs.grad(g, wrt=[]), "grad(wrt=[]): name at least one, or None for all"),
    (
        lambda g: cs.grad(g, outputs="x"),
        "grad(outputs='x'): is not an output of the graph; it has: t3",
    ),
    (
        cs.grad,
        (
            "grad: the gradient of y is that of x, and an output has to be something new; use "
            "wrt=['x'], or split, which says so in gradients"
        ),
    ),
    (
        lambda g: cs.split(g, save="all"),
        "split(save='all'): must be \"auto\", \"none\", or a list of tensors and names",
    ),
    (
        lambda g: cs.split(g, save=["rstd"]),
        "split(save=['rstd']): the backward pass does not use it; it uses add[3, 4], out[3, 4]",
    ),
    (
        lambda g: cs.split(g, save=["add", "out"]),
        "split(save=...): add is of no use once the others are kept; leave it out",
    ),
    (lambda g: cs.grad(cs.new_kernel_graph()), "grad: the graph has no output; call mark_output"),
    (
        lambda g: cs.grad(graph(lambda g, x, y: g.exp(x), (3, 4), (3, 4))),
        (
            "grad: no output depends on y[3, 4] float16 (or only through step, whose derivative is "
            "zero); leave it out of wrt"
        ),
    ),
    (
        lambda g: cs.grad(graph(lambda g, x, y: g.step(x) * y, (3, 4), (3, 4)), wrt="x"),
        "grad: no output depends on x[3, 4] float16 (or only through step",
    ),
    (
        lambda g: cs.grad(
            graph(lambda g, x, y: (g.exp(x), g.exp(y)), (3, 4), (3, 4)), wrt="x", outputs="t3"
        ),
        "grad: output t3[3, 4] float16 does not depend on x; leave it out of outputs",
    ),
    (
        lambda g: cs.grad(graph(lambda g, x: g.mean(x, 0), (M, 4))),
        "derivative of mean(x[M, 4] float16, dim=-2): needs 1 / M, which is known only at the call",
    ),
]  # fmt: skip


def test_a_cotangent_may_end_in_a_symbol() -> None:
    g = cs.grad(graph(lambda g, x: g.exp(g.transpose(x)), (M, 4)))
    x, dy = torch.randn(5, 4).half(), torch.randn(4, 5).half()
    assert g.nodes[g.inputs[1]].shape == (4, M)
    torch.testing.assert_close(run_reference(g, [x, dy])[0], x.float().exp().half() * dy.mT,
                               rtol=2e-3, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_messages(call: Callable[[KernelGraph], Any], message: str) -> None:
    with pytest.raises(GraphError) as error:
        call(graph(residual, (3, 4), (3, 4)))
    assert str(error.value).startswith(message)


def test_gradients_that_are_equal_are_said_to_be_by_split() -> None:
    s = cs.split(graph(lambda g, x, r: g.rms_norm(x + r), (3, 4), (3, 4), names="x r"))
    assert s.gradients == {"x": 0, "r": 0}
    s = cs.split(graph(lambda g, x, r: x + r, (3, 4), (3, 4), names="x r"))
    assert s.gradients == {"x": "dt2", "r": "dt2"}
    assert not s.backward.outputs


def test_names_of_cotangents_avoid_inputs() -> None:
    g = graph(lambda g, x, y: g.exp(x * y), (3, 4), (3, 4), names="x dt3")
    assert [n.name for n in cs.grad(g).nodes if n.operator == "input"] == ["x", "dt3", "dt3_"]


def test_a_slice_of_lower_rank_is_refused() -> None:
    def build(g: KernelGraph, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return g.slice(g.concat([g.exp(x), g.exp(y)], 0), 0, 0, 4) * z

    with pytest.raises(GraphError, match="the slice was broadcast to more dimensions"):
        cs.grad(graph(build, (4,), (4,), (3, 4)))


# ---------------------------------------------------------------------------------- element types


def test_gradients_have_the_type_of_their_inputs_and_statistics_are_float32() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((64, 512), "bf16", name="x"), g.new_input((512,), "bf16", name="w")
    g.mark_output(g.rms_norm(x, w))
    s = cs.split(g)
    assert [str(s.forward.nodes[i].dtype) for i in s.forward.outputs] == ["bfloat16", "float32"]
    types = {n.name: str(n.dtype) for n in s.backward.nodes if n.operator == "input"}
    assert types == {"x": "bfloat16", "w": "bfloat16", "rstd": "float32", "dt2": "bfloat16"}
    assert {str(s.backward.nodes[i].dtype) for i in s.backward.outputs} == {"bfloat16"}
    assert found(s.forward)


def mixed(build: Build, *types: str) -> KernelGraph:
    """x, y [8, 64] and w [64] of these types; outputs as `build` marks them."""
    g = new_kernel_graph()
    shapes = ((8, 64), (8, 64), (64,))
    build(g, *(g.new_input(s, d, n) for s, d, n in zip(shapes, types, "xyw", strict=True)))
    return g


def of_inputs(g: KernelGraph) -> dict[str, str]:
    return {n.name: n.dtype.name for n in g.nodes if n.operator == "input"}


def of_outputs(g: KernelGraph) -> list[str]:
    return [g.nodes[i].dtype.name for i in g.outputs]


def test_inputs_of_different_types_have_gradients_of_their_own() -> None:
    """RMSNorm of a sum: x bf16, the residual stream and the weight fp32."""

    def build(g: KernelGraph, x: Tensor, y: Tensor, w: Tensor) -> None:
        g.mark_output(g.rms_norm(x + y, w), "bf16")

    g = mixed(build, "bf16", "fp32", "fp32")
    s = cs.split(g)
    assert of_outputs(s.forward) == ["bfloat16", "float32"]
    assert of_inputs(s.backward) == {
        "x": "bfloat16",
        "y": "float32",
        "w": "float32",
        "rstd": "float32",
        "dt4": "bfloat16",
    }
    order = sorted(s.gradients, key=lambda n: s.gradients[n])
    assert dict(zip(order, of_outputs(s.backward), strict=True)) == {
        "x": "bfloat16",
        "y": "float32",
        "w": "float32",
    }
    assert len(set(s.gradients.values())) == 3  # the gradients of x and y are one value, twice
    check(g)
    for graph in (s.forward, s.backward):
        kernel = cs.superoptimize(graph, target="h200")
        types = [kernel.mugraph.tensors[n].dtype.name for n in kernel.mugraph.outputs]
        assert types == of_outputs(graph)


def test_a_cotangent_that_is_a_gradient_of_another_type_is_converted() -> None:
    g = mixed(lambda g, x, y, w: g.mark_output(x + y + w), "bf16", "fp32", "fp16")
    s = cs.split(g)
    assert s.gradients["y"] == "dt4"
    assert {of_outputs(s.backward)[int(s.gradients[n])] for n in "xw"} == {"bfloat16", "float16"}
    backward = cs.grad(g, wrt=["x", "w"])
    assert of_outputs(backward) == ["bfloat16", "float16"]


def typed(build: Build, *outputs: str) -> KernelGraph:
    """The graph that is built of x [64, 128], y [128, 64] and z [64, 64], all bf16, stored as these
    types."""
    g = new_kernel_graph()
    shapes = ((64, 128), (128, 64), (64, 64))
    made = build(g, *(g.new_input(s, "bf16", n) for s, n in zip(shapes, "xyz", strict=True)))
    for t, dtype in zip(made, outputs, strict=True):
        g.mark_output(t, dtype)
    return g


TYPED: dict[str, tuple[Build, tuple[str, ...]]] = {
    "product": (lambda g, x, y, z: [x @ y + z], ("fp32",)),
    "other 16 bits": (lambda g, x, y, z: [g.relu(x @ y) * z], ("fp16",)),
    "sums": (lambda g, x, y, z: [g.sum(x @ y, 0), g.mean(x @ (y @ z), 1)], ("fp32", "fp32")),
    "read again": (lambda g, x, y, z: [h := x @ y, g.relu(h) @ z], ("fp32", "bf16")),
    "pieces": (
        lambda g, x, y, z: [g.sum(g.slice(g.exp(x @ g.concat([y, g.transpose(x)], 1)), 1, 0, 64) *
                                  z, 1)],
        ("fp32",),
    ),
    "attention": (
        lambda g, x, y, z: [g.scaled_dot_product_attention(x, g.transpose(y), z)], ("fp32",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_cotangents_have_the_types_of_their_outputs(name: str) -> None:
    """Products take them as what the program computes with."""
    g = typed(TYPED[name][0], *TYPED[name][1])
    check(g)
    given = of_inputs(cs.grad(g))
    assert [given[f"d{g.nodes[i].name}"] for i in g.outputs] == of_outputs(g)
    assert set(of_outputs(cs.grad(g))) == {"bfloat16"}


def test_float32_cotangents_of_products_have_kernels() -> None:
    g = typed(TYPED["product"][0], "fp32")
    for graph in (cs.grad(g, wrt=["x", "y"]), cs.split(g).backward):
        assert found(graph)


def test_a_bias_of_another_type_than_its_product() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((64, 128), "bf16", "x"), g.new_input((128, 64), "bf16", "w")
    g.mark_output(x @ w + g.new_input((64,), "fp32", "b"))
    assert of_outputs(cs.grad(g)) == ["bfloat16", "bfloat16", "float32"]
    check(g)


def test_a_statistic_that_a_product_reads_keeps_the_type_of_the_product() -> None:
    g = graph(lambda g, x, w: g.exp(g.sum(x, 1)) @ w, (4, 6), (1, 5), names="x w")
    s = cs.split(g)
    assert set(s.saved) == {"exp"}
    assert {str(n.dtype) for n in s.backward.nodes} == {"float16"}


def test_powers_of_a_statistic_are_kept_as_float32() -> None:
    """Behind a product, too: the cube of 1 / sqrt(y^2 + 1e-5) is larger than 16 bits hold."""
    g = graph(
        lambda g, x, a, b: (y := x @ a) * g.rsqrt(g.square(y) + 1e-5) * b,
        (4, 6), (6, 1), (1, 5), names="x a b",
    )  # fmt: skip
    s = cs.split(g)
    kept = {name: s.forward.nodes[s.forward.outputs[n]].dtype for name, n in s.saved.items()}
    assert set(kept) == {"matmul", "rsqrt", "mul", "mul2"} and set(kept.values()) == {cs.float32}


def test_an_output_that_is_read_again_keeps_its_type() -> None:
    g = graph(lambda g, x: g.exp(g.sum(x, 1)), (4, 6))
    s = cs.split(g)
    assert s.saved == {"out": 0}
    assert s.forward is g
    assert {str(n.dtype) for n in s.backward.nodes} == {"float16"}


# -------------------------------------------------------------------------------------- compiled


COMPILED: dict[str, Build] = {
    "fragments": lambda g, x: g.relu(g.clamp(x, -1, 1) * g.mean(x, 1)),
    "row scalars": lambda g, x: x * g.relu(g.erf(g.mean(x, 1))),
    "gelu": lambda g, x: g.gelu(x),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_of_gradients_compile(name: str) -> None:
    """Without a GPU: the compiler takes them; a call on CPU tensors is the reference."""
    kernel = cs.superoptimize(cs.grad(graph(COMPILED[name], (8, 64))), target="h200")
    x, dy = torch.randn(2, 8, 64, dtype=torch.float16)
    torch.testing.assert_close(kernel(x, dy), run_reference(kernel.graph, [x, dy])[0])


def test_a_maximum_is_taken_again_of_the_elements_that_the_backward_pass_has() -> None:
    """Computed apart, no element would be equal to it, and its gradient 0 / 0."""
    s = cs.split(graph(lambda g, x, w: g.max(x @ w, 1), (8, 4), (4, 8)))
    assert not s.saved and "max" in {n.operator for n in s.backward.nodes}
    assert set(cs.split(graph(lambda g, x: g.max(x, 1), (8, 4))).saved) == {"out", "sum"}
