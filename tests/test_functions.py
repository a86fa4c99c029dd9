"""A function of one number is one line; every stage knows those of the table, and a new one."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cutesuper as cs
from cutesuper.errors import OperatorError
from cutesuper.ir.arraymath import ArrayMath
from cutesuper.ir.definitions import added, definition
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.field import FieldAlgebra, uniform
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.operators.composed import COMPOSED, Hardtanh, Power
from cutesuper.ir.operators.pairs import PAIRS, pair
from cutesuper.ir.operators.pointwise import FUNCTIONS, Clamp, Function, function
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.kernel.hostmath import HostMath
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.torch.aten.table import is_known
from cutesuper.verify.equivalence import verify
from cutesuper.verify.numeric import compare
from tests.tracing import check, traced

NAME = "special_ndtr"


@pytest.fixture
def normal() -> Iterator[Function]:
    """A function that only this line knows."""
    function(NAME, "Of the normal distribution.", lambda g, x, y, dy: g.mul(dy, g.mul(g.exp(g.mul(g.square(x), -0.5)), 0.3989422804014327)), lambda torch, x: torch.special.ndtr(x), lambda m, x: 0.5 * m.erfc(-0.7071067811865476 * x))  # fmt: skip # noqa: E501
    yield TABLE[NAME]  # type: ignore[misc]
    del TABLE[NAME]


def inside(f: Function) -> float:
    """A number in the domain of a function."""
    low, high = f.domain
    return 0.375 if high < inf or low == -inf else low + 0.375


def check_numbers(f: Function) -> None:
    """Python, NumPy and PyTorch agree."""
    x = inside(f)
    want = float(f.reference([torch.tensor(x, dtype=torch.float64)], {}))
    assert isfinite(want)
    assert f.scalar(HostMath, [x], {}) == pytest.approx(want, rel=1e-12)
    assert f.scalar(ArrayMath, [np.array([x])], {}) == pytest.approx(want, rel=1e-12)


def rows(f: Function) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((64, 256), dtype="float32", name="x")
    y = getattr(g, f.name)(x)
    g.mark_output(g.mul(y, g.sum(y, 1)))
    return g


def check_meaning(f: Function) -> None:
    """Equal arguments give equal values in a finite field, others do not."""
    rng = np.random.default_rng(0)
    x = uniform(rng, ("K",), [8])
    for algebra in (FieldAlgebra(1), FieldAlgebra(1)):
        values = f.symbolic(algebra, [x], {})
        assert np.array_equal(values.p, f.symbolic(FieldAlgebra(1), [x], {}).p)
        assert len(np.unique(values.p)) > 1


@pytest.mark.parametrize("f", [TABLE[c.name] for c in FUNCTIONS], ids=lambda f: f.name)
def test_every_stage_knows_a_function(f: Any) -> None:
    check_numbers(f)
    check_meaning(f)
    assert getattr(new_kernel_graph(), f.name).__doc__ == type(f).__doc__
    assert not added([f.name])
    for name in f.torch_names:
        exists = hasattr(torch.ops.aten, f.name)
        assert is_known(name) or not exists


ODD = (0.0, -0.0, inf, -inf, nan, 5e-324, -5e-324, 1e308, -1e308, 1.0, -1.0, 0.5, -0.5, 2, -2, 3,
       -3, 5, -5)  # fmt: skip
#: where PyTorch's own formula overflows, or takes the limit of a power
PYTORCH_ONLY = {"square": (1e308, -1e308), "hardswish": (1e308,),
                "power": (-inf, -0.0, 1e308, -1e308), "hardtanh": (1e308, -1e308),
                "logit": (-0.0, -5e-324, 5e-324)}  # fmt: skip
#: where the reference has another slope
OPERATOR = {"log1p_exp": F.softplus, "hardtanh": F.hardtanh}
WITH = {"clamp": (-1.0, 3.0), "hardtanh": (-1.0, 3.0)}
OPEN = ((-inf, 2.0), (-2.0, inf), (-inf, inf))
EXPONENTS = (0.0, 1.0, 2.0, -3.0, -2.0, -1.25, -0.75, 0.25, 0.75, 1.5, 2.5)
ATTRIBUTES = {name: (a, *OPEN) for name, a in WITH.items()} | {
    "power": tuple((e,) for e in EXPONENTS)
}
#: with a slope of 0, and one that is 0 at 0 by its own rule
WITHOUT_SLOPE = ("step", "finite", "floor", "round", "root")
OF_ONE = [(c.name, a) for c in (*FUNCTIONS, *COMPOSED, Clamp, Hardtanh, Power)
          for a in ATTRIBUTES.get(c.name, ((),))]  # fmt: skip


@pytest.mark.parametrize(("name", "attributes"), OF_ONE)
def test_values_and_slopes_at_odd_points(name: str, attributes: tuple[float, ...]) -> None:
    """Those of PyTorch's operator: zeros, infinities, NaN, where pieces meet, and for cotangents
    that are zero, infinite or NaN."""
    f, points = TABLE[name], [x for x in ODD if str(x) not in map(str, PYTORCH_ONLY.get(name, ()))]
    x = torch.tensor(points, dtype=torch.float64)[:, None].repeat(1, 6).requires_grad_()
    dy = torch.tensor([1, 0, -2, inf, -inf, nan], dtype=torch.float64).expand_as(x).contiguous()
    g = new_kernel_graph()
    t = g.new_input(tuple(x.shape), dtype="float32", name="x")
    g.mark_output(getattr(g, name)(t, *attributes))
    given = dict(zip(f.attributes, attributes, strict=bool(attributes))) or dict(f.attributes)
    y = OPERATOR[name](x, *attributes) if name in OPERATOR else f.reference([x], given)
    [found] = evaluate(g.expanded(), [x.detach()], torch.float64)
    torch.testing.assert_close(found, y.detach(), equal_nan=True, rtol=1e-9, atol=1e-15)
    if name not in WITHOUT_SLOPE:
        y.backward(dy)
        slope = cs.grad(g)  # of a constant it does not read the cotangent
        [found] = evaluate(slope, [x.detach(), dy][: len(slope.inputs)], torch.float64)
        torch.testing.assert_close(found, x.grad, equal_nan=True, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("p", [TABLE[c.name] for c in PAIRS], ids=lambda p: p.name)
def test_every_stage_knows_a_pair(p: Any) -> None:
    """The numbers of Python, NumPy and PyTorch, where quotients round up, for all signs."""
    for x, y in ((7.25, 2.0), (-7.25, 2.0), (7.25, -2.0), (-6.0, 2.0), (6.0, 0.1), (0.0, 3.0)):
        x = abs(x) if p.name == "pow" else x
        want = p.reference([torch.tensor(t, dtype=torch.float64) for t in (x, y)], {}).item()
        assert p.scalar(HostMath, [x, y], {}) == pytest.approx(want, rel=1e-12, abs=1e-12)
        found = p.scalar(ArrayMath, [np.array([x]), np.array([y])], {})
        assert found == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert getattr(new_kernel_graph(), p.name).__doc__ == type(p).__doc__
    names = (n for n in p.torch_names if hasattr(getattr(torch.ops.aten, p.name), n.split(".")[-1]))
    assert all(map(is_known, names))


#: operands with a slope; that of the other is 0, or the cotangent
OF_ONE_ALONE = {"copysign": "a", "fmod": "b", "remainder": "b"}
OF_TWO = ("maximum", "raised", "xlogy", "hypot", "mul",
          *(p.name for p in PAIRS if p.name != "floor_divide"))  # fmt: skip


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name", OF_TWO)
def test_slopes_of_two_numbers_at_odd_points(name: str, summed: bool) -> None:
    """Those of PyTorch's operator, for ties, infinities and NaN; ``summed``: over what was
    repeated."""
    # PyTorch's slope of hypot is infinite at 5e-324 beside infinite cotangents, ours is NaN
    left_out = (1e308, 5e-324) if (name, summed) == ("hypot", False) else (1e308,)
    points = torch.tensor([x for x in ODD if abs(x) not in left_out], dtype=torch.float64)
    dy = torch.tensor([1, inf, nan, 0], dtype=torch.float64)[:, None, None]
    dy = dy.expand(4, len(points), len(points)).contiguous()
    one, other = points[:, None].expand(dy.shape), points.expand(dy.shape)
    if summed:
        one, other = one[..., :1], other[:, :1]
    x, y = (t.contiguous().requires_grad_() for t in (one, other))
    g = new_kernel_graph()
    both = {"a": x, "b": y}
    g.mark_output(g.apply(name, *(g.new_input(tuple(t.shape), name=n) for n, t in both.items())))
    read = list(OF_ONE_ALONE.get(name, "ab"))
    TABLE[name].reference([x, y], {}).backward(dy)
    found = evaluate(cs.grad(g, wrt=read), [x.detach(), y.detach(), dy], torch.float64)
    for n, d in zip(read, found, strict=True):
        torch.testing.assert_close(d, both[n].grad, equal_nan=True, rtol=1e-9, atol=1e-15)


def test_devices_have_the_functions() -> None:
    pytest.importorskip("cutlass")
    from cutesuper.device.math import DeviceMath

    for f in FUNCTIONS:
        for fast in (False, True):
            assert f.of_element or callable(getattr(DeviceMath(fast), f.name)), f.name
    assert all(p.of_elements or callable(getattr(DeviceMath(False), p.name)) for p in PAIRS)


def test_one_line_runs_everywhere(normal: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    check_numbers(normal)
    check_meaning(normal)
    assert added([NAME]) == (NAME,) and definition(normal)
    g = rows(normal)
    mu = search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert verify(g, mu).equal
    assert compare(g, mu)
    inputs = (torch.rand(4, 8),)
    check(traced(monkeypatch, lambda x: torch.special.ndtr(x) * 2, inputs), torch_normal, inputs)


def torch_normal(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x) * 2


def test_one_line_is_differentiated(normal: Function) -> None:
    g = new_kernel_graph()
    t = g.new_input((4, 5), dtype="float32", name="x")
    g.mark_output(getattr(g, NAME)(t))
    x = (torch.rand(4, 5, dtype=torch.float64) + 0.1).requires_grad_()
    dy = torch.rand(4, 5, dtype=torch.float64)
    (found,) = evaluate(cs.grad(g, wrt=[t]), [x.detach(), dy], torch.float64)
    torch.special.ndtr(x).backward(dy)
    torch.testing.assert_close(found, x.grad)


def test_one_line_compiles(normal: Function) -> None:
    pytest.importorskip("cutlass")
    from tests.plans import compiled

    mu = search(rows(normal), H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    [step] = mu.steps
    assert not compiled(make_plan(step, mu.tensors, H200)).resources.spills


def test_unknown_facets_are_refused() -> None:
    with pytest.raises(OperatorError, match="no function has the facet at_infinity"):
        function("nothing", "0.", lambda g, x, y, dy: None, at_infinity=0.0)
    with pytest.raises(OperatorError, match="no operator has the facet at_infinity"):
        pair("nothing", "0.", lambda g, x, y, z, dz: (None, None), at_infinity=0.0)
    assert "nothing" not in TABLE


def test_parts_of_a_function_are_stored_unrounded() -> None:
    """1 + tanh(u) cancels: kernels that store tanh(u) for each other store it as float32."""
    g = new_kernel_graph()
    g.mark_output(g.square(g.apply("gelu_tanh", g.new_input((8, 64), "float16"))))
    *parts, last, square = g.expanded().nodes[1:]
    assert {n.dtype.name for n in parts if n.operator != "constant"} == {"float32"}
    assert (last.dtype.name, square.dtype.name) == ("float16", "float16")
