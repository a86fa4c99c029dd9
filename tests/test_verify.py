"""The verifier: right muGraphs pass, wrong ones do not, and numbers agree with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cutesuper as cs
from cutesuper.errors import GraphError, SearchError
from cutesuper.ir.block import Axis, AxisKind, MuGraph
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import float16
from cutesuper.ir.field import LARGEST, matmul_residues, uniform
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.verify import equivalence, numeric
from cutesuper.verify.equivalence import FIELDS, Verifier, verify
from cutesuper.verify.exponents import rank
from cutesuper.verify.extents import SizeChooser
from cutesuper.verify.numeric import acceptable, compare, execute
from tests.mugraphs import (
    Block,
    attention,
    attention_kernel,
    gated_mlp,
    gated_mlp_fused,
    mugraph,
    rms_backward,
    rms_backward_kernel,
    rms_linear,
    rms_linear_fused,
    rms_linear_split_k,
    rms_linear_two_kernels,
    softmax_kernel,
    softmax_rows,
)
from tests.mutants import change, mutations

Case = tuple[KernelGraph, MuGraph]


def made(
    graph: Callable[[], KernelGraph], kernel: Callable[[KernelGraph], MuGraph]
) -> Callable[[], Case]:
    def case() -> Case:
        g = graph()
        return g, kernel(g)

    return case


RIGHT: dict[str, Callable[[], Case]] = {
    "fused": made(rms_linear, rms_linear_fused),
    "fused, no cluster": made(rms_linear, lambda g: rms_linear_fused(g, cluster=1)),
    "fused, G": made(lambda: rms_linear(weight=True), lambda g: rms_linear_fused(g, weight=True)),
    "fused, tails": made(lambda: rms_linear(16, 63, 30), rms_linear_fused),
    "fused, an empty tile": made(lambda: rms_linear(16, 20, 9), rms_linear_fused),
    "two kernels": made(rms_linear, rms_linear_two_kernels),
    "split K over the grid": made(rms_linear, rms_linear_split_k),
    "gated": made(gated_mlp, gated_mlp_fused),
    "softmax": made(softmax_rows, softmax_kernel),
    "softmax, tails": made(lambda: softmax_rows(8, 61), lambda g: softmax_kernel(g, 4)),
    "attention": made(attention, attention_kernel),
    "backward": made(rms_backward, rms_backward_kernel),
}
BOUNDED = {
    "fused": -80,
    "fused, G": -80,
    "two kernels": -60,
    "split K over the grid": -80,
    "gated": -80,
    "backward": -60,
    "softmax": -60,
    "attention": -50,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(name: str) -> None:
    graph, mu = RIGHT[name]()
    result = verify(graph, mu, full=True)
    assert result, result.summary()
    assert result.real_extents and result.trials >= 4 and result.reason is None
    assert compare(graph, mu)


@pytest.mark.parametrize("name", RIGHT)
def test_cutting_values_into_chunks_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (equivalence, numeric):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    graph, mu = RIGHT[name]()
    assert verify(graph, mu, full=True)
    assert compare(graph, mu)


@pytest.mark.parametrize("name", BOUNDED)
def test_error_bound(name: str) -> None:
    result = verify(*RIGHT[name]())
    assert result.bound_log2 is not None and result.bound_log2 <= BOUNDED[name]
    assert "false accept below 2^-" in result.summary()


def test_no_bound_without_jointly_uniform_exponents() -> None:
    """Four rows of scores of rank two depend on each other."""
    graph = attention()
    mu = attention_kernel(graph)
    program = mu.steps[0].program
    axes = (*program.axes, Axis("M", AxisKind.GRID, 1))
    step = replace(mu.steps[0], program=replace(program, axes=axes))
    result = verify(graph, replace(mu, steps=(step,)))
    assert result and result.bound_log2 is None and "jointly uniform" in result.conditions


def test_no_bound_for_exponents_that_the_graph_does_not_have() -> None:
    """exp(x) squared, computed as exp(2 x): equal, but outside of what the proof covers."""
    g = new_kernel_graph()
    g.mark_output(g.square(g.exp(g.new_input((8, 16), name="X"))))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    x = b.load("X", "M", "N")
    b.store("Z", b.op("exp", b.op("add", x, x)), "M", "N")
    result = verify(g, mugraph(g, b.step()))
    assert result and result.bound_log2 is None and "argument" in result.conditions


def test_rank() -> None:
    a = uniform(np.random.default_rng(0), ("A", "B"), (6, 4)).q
    c = uniform(np.random.default_rng(1), ("B", "C"), (4, 7)).q
    assert a is not None and c is not None
    q = LARGEST.q
    product = matmul_residues(a[None], c[None], q)[0]
    assert rank(product, q) == 4 and rank(np.eye(5, dtype=np.uint64), q) == 5
    assert rank(np.zeros((3, 3), np.uint64), q) == 0


def test_equal_seeds_give_equal_results() -> None:
    graph, mu = RIGHT["fused"]()
    wrong = rms_linear_fused(graph)
    wrong = change(wrong, 0, 5, attributes={"over": "K"}, kind="sum")
    first = verify(graph, wrong, seed=3)
    assert first == verify(graph, wrong, seed=3)
    assert verify(graph, mu, seed=3) == verify(graph, mu, seed=3)


def test_an_axis_of_extent_one_is_tried_with_more() -> None:
    graph = rms_linear()
    mu = rms_linear_split_k(graph, grid=1)
    assert verify(graph, mu, full=True)
    assert SizeChooser(graph.expanded()).small(mu, False).tensors["T"][0] == 2
    [s] = [i for i, op in enumerate(mu.steps[1].program.ops) if op.kind == "sum"][:1]
    assert not verify(graph, change(mu, 1, s, kind="max"))
    assert compare(graph, change(mu, 1, s, kind="max"))  # with one part it makes no difference


def test_symbolic_rows() -> None:
    graph = rms_linear(Symbol("M", 16))
    b = Block(
        {"M": Symbol("M", 16), "K": 64, "N": 32},
        {"M.grid": None, "K.loop": 4},
        {"M": 16, "K": 16, "N": 32},
    )
    x = b.load("X", "M", "K")
    y = b.acc(b.op("matmul", x, b.load("W", "K", "N"), over="K"), "K.loop")
    mean = b.acc(b.op("mean", b.op("square", x), over="K"), "K.loop")
    norm = b.op("sqrt", b.op("add", mean, b.const(1e-6)))
    b.store("Z", b.op("div", y, norm), "M", "N")
    mu = mugraph(graph, b.step())
    assert verify(graph, mu, full=True) and compare(graph, mu)


# ------------------------------------------------------------------------------------- mutants


def square_cases() -> dict[str, Case]:
    """Square tensors, so that wrong maps and operands fit."""
    a, b, c = rms_linear(16, 16, 16), gated_mlp(16, 16, 16), softmax_rows(16, 16)
    d = rms_backward(16, 16)
    e = rms_linear(16, 16, 16, weight=True)
    f = attention(8, 8, 64, 8)
    return {
        "fused": (a, rms_linear_fused(a)),
        "two kernels": (a, rms_linear_two_kernels(a)),
        "split K": (a, rms_linear_split_k(a)),
        "G": (e, rms_linear_fused(e, weight=True)),
        "gated": (b, gated_mlp_fused(b)),
        "softmax": (c, softmax_kernel(c)),
        "backward": (d, rms_backward_kernel(d)),
        "attention": (f, attention_kernel(f)),
    }


@pytest.mark.parametrize("name", square_cases())
def test_mutants(name: str) -> None:
    """Accepted exactly where float64 agrees, which hardly ever happens."""
    graph, mu = square_cases()[name]
    verifier = Verifier(graph)
    assert verifier.check(mu)
    rejected, same = 0, []
    for s, step in enumerate(mu.steps):
        for i, op in enumerate(step.program.ops):
            for what, mutant in mutations(mu, s, i, op):
                result = verifier.check(mutant, bound=False)
                try:
                    equal = bool(compare(graph, mutant, stress=False))
                except (GraphError, RuntimeError):
                    equal = False
                assert bool(result) == equal, f"{name}: step {s}, {i} {op.kind}: {what}: {result}"
                if result:
                    same.append(f"{op.kind}: {what}")
                else:
                    rejected += 1
                    assert result.reason
    assert rejected >= 12
    assert len(same) <= 6, same


def test_a_softmax_that_can_overflow_fails_in_numbers() -> None:
    """Any shift cancels, so the field accepts it; float64 on large inputs does not."""
    graph, mu = RIGHT["softmax"]()
    [sub] = [i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == "sub"]
    mutant = change(mu, 0, sub, kind="add")
    assert verify(graph, mutant) and compare(graph, mutant, stress=False)
    report = compare(graph, mutant)
    assert not report and "NaN" in report.message


def test_tiny_change_of_a_constant_is_seen() -> None:
    graph, mu = RIGHT["fused"]()
    [c] = [i for i, op in enumerate(mu.steps[0].program.ops) if op.kind == "constant"]
    assert not verify(graph, change(mu, 0, c, attributes={"value": 1e-6 * (1 + 2**-40)}))


def test_outputs_must_not_be_swapped() -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 16), name="X")
    g.mark_output(g.sum(x, -1))
    g.mark_output(g.max(x, -1))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    v = b.load("X", "M", "N")
    total, top = b.op("sum", v, over="N"), b.op("max", v, over="N")
    b.store("Z", total, "M", None)
    b.store("Z1", top, "M", None)
    mu = mugraph(g, b.step())
    right, wrong = verify(g, mu), verify(g, replace(mu, outputs=mu.outputs[::-1]))
    assert right and not wrong
    assert right.bound_log2 is None and "maximum" in right.conditions
    assert wrong.counterexample is not None and wrong.counterexample.output == "Z1"


def test_division_by_what_is_always_zero_is_refused() -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 16), name="X")
    g.mark_output(g.square(x))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    v = b.load("X", "M", "N")
    b.store("Z", b.op("div", v, b.op("sub", v, v)), "M", "N")
    result = verify(g, mugraph(g, b.step()))
    assert not result and "divides by zero" in str(result.reason)


@pytest.mark.parametrize(
    "zero",
    [
        lambda g, x: g.sub(x, x),
        lambda g, x: g.mul(x, 0.0),
        lambda g, x: g.step(g.sub(x, x)),
        lambda g, x: g.sqrt(g.sub(x, x)),  # a norm of one element without eps
    ],
)
def test_a_graph_that_always_divides_by_zero_is_named_and_not_to_be_reported(zero: Any) -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 16), name="X")
    g.mark_output(g.div(x, zero(g, x)))
    with pytest.raises(SearchError, match=r"0 whatever the inputs are.*= div\(.*change the graph"):
        cs.mugraphs(g, target="h200")


def test_another_interface_is_refused() -> None:
    graph, mu = RIGHT["fused"]()
    result = verify(graph, replace(mu, inputs=mu.inputs[::-1]))
    assert not result and "the graph's X is" in str(result.reason)
    assert not verify(rms_linear(16, 64, 16), mu)


def test_exp_of_exp_has_no_bound() -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 16), name="X")
    g.mark_output(g.exp(g.exp(x)))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    b.store("Z", b.op("exp", b.op("exp", b.load("X", "M", "N"))), "M", "N")
    result = verify(g, mugraph(g, b.step()))
    assert result and result.bound_log2 is None


def test_exp_of_a_logarithm_has_no_bound() -> None:
    """Its argument is not affine in any input."""
    g = new_kernel_graph()
    x, y = g.new_input((8, 16), name="X"), g.new_input((8, 16), name="Y")
    g.mark_output(g.exp(g.add(g.log(g.exp(x)), y)))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    log = b.op("log", b.op("exp", b.load("X", "M", "N")))
    b.store("Z", b.op("mul", b.op("exp", b.load("Y", "M", "N")), b.op("exp", log)), "M", "N")
    result = verify(g, mugraph(g, b.step()))
    assert result and result.bound_log2 is None
    wrong = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    e = wrong.op("exp", wrong.load("X", "M", "N"))
    wrong.store("Z", wrong.op("mul", wrong.op("exp", wrong.load("Y", "M", "N")), e), "M", "N")
    # right in numbers; the field knows no logarithms
    assert not verify(g, mugraph(g, wrong.step()))


def test_kernels_agree_on_the_extents_of_what_they_share() -> None:
    graph, mu = RIGHT["split K over the grid"]()
    for ragged in (False, True):
        sizes = SizeChooser(graph.expanded()).small(mu, ragged)
        first, second = (p.dims for p in sizes.programs)
        assert first["M"] == second["M"] and first["N"] == second["N"]
        assert sizes.programs[0].axis("K.grid").extent == second["S"] == sizes.tensors["T"][0]
        assert any(p.ragged(d) for p in sizes.programs for d in p.dims) == ragged


# ------------------------------------------------------------------ primes, numbers, degrees


def numbered(value: float | None, kind: str, exponential: bool = False) -> Case:
    """``X kind value``, or its exponential, against X; None: X alone."""
    g = new_kernel_graph()
    x = g.new_input((8, 16), name="X")
    g.mark_output(g.exp(x) if exponential else g.mul(x, x))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    v = b.load("X", "M", "N")
    y = v if value is None else b.op(kind, v, b.const(value))
    b.store("Z", b.op("exp", y) if exponential else b.op("mul", v, y), "M", "N")
    return g, mugraph(g, b.step())


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("exponential", [False, True])
def test_numbers_that_are_nothing_modulo_a_prime_are_seen(exponential: bool, k: int) -> None:
    """x + p, exp(x + q), exp((q + 1) x), for the primes of the first draws of a known seed."""
    verifier = Verifier(numbered(None, "add")[0], seed=5)
    primes = LARGEST if k == 3 else verifier._field(k, 0)
    for m in (primes.p, primes.q):
        for value, kind in ((m, "add"), (m, "sub"), (m + 1, "mul"), (m + 1, "div"), (-m, "add")):
            graph, mu = numbered(float(value), kind, exponential)
            assert not verify(graph, mu, seed=5), (value, kind)
    assert verify(*numbered(None, "add", exponential), seed=5)


def test_a_graph_may_have_numbers_that_are_nothing_modulo_a_prime() -> None:
    first = Verifier(numbered(None, "add")[0], seed=5)._field(0, 0)
    for number in (float(first.p), float(first.q), float(LARGEST.p)):
        g = new_kernel_graph()
        g.mark_output(g.div(g.new_input((8, 16), name="X"), number))
        b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
        b.store("Z", b.op("div", b.load("X", "M", "N"), b.const(number)), "M", "N")
        result = verify(g, mugraph(g, b.step()), seed=5)
        assert result and result.bound_log2 is not None and result.bound_log2 < -80


def test_trials_take_other_primes_and_a_seed_chooses_them() -> None:
    graph = rms_linear()
    one, again, other = (Verifier(graph, seed=s) for s in (1, 1, 2))
    pairs = [one._field(t, 0) for t in range(FIELDS)]
    assert len(set(pairs)) == FIELDS and pairs == [again._field(t, 0) for t in range(FIELDS)]
    assert one._field(FIELDS, 0) == pairs[0] != one._field(0, 1)
    assert not {other._field(t, 0) for t in range(FIELDS)} & set(pairs)


def test_a_seed_that_nobody_chose_is_stated() -> None:
    graph, mu = RIGHT["fused"]()
    first, second = Verifier(graph).check(mu), Verifier(graph).check(mu)
    assert first.seed != second.seed and f"seed {first.seed}" in first.summary()
    assert verify(graph, mu, seed=first.seed) == first


def powers(times: int, plus: int) -> Case:
    """x^(2^times), and a kernel that computes x^(2^times) x^plus."""
    g = new_kernel_graph()
    y = x = g.new_input((8, 16), name="X")
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    v = w = b.load("X", "M", "N")
    for _ in range(times):
        y, w = g.mul(y, y), b.op("mul", w, w)
    for _ in range(plus):
        w = b.op("mul", w, v)
    assert y is not x
    g.mark_output(y)
    b.store("Z", w, "M", "N")
    return g, mugraph(g, b.step())


def test_degrees_that_exceed_the_field_are_refused() -> None:
    """x^p is x there."""
    assert verify(*powers(20, 0)) and not verify(*powers(20, 1))
    result = verify(*powers(31, 0))
    assert not result and "its degree" in str(result.reason)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    result = verify(*numbered(value, "add"))
    assert not result and "must be a finite number" in str(result.reason)


def test_negative_zero_is_zero() -> None:
    g = new_kernel_graph()
    g.mark_output(g.add(g.new_input((8, 16), name="X"), 0.0))
    b = Block({"M": 8, "N": 16}, {"M.grid": 4}, {"M": 2, "N": 16})
    b.store("Z", b.op("add", b.load("X", "M", "N"), b.const(-0.0)), "M", "N")
    assert verify(g, mugraph(g, b.step()))


# ------------------------------------------------------------------------------------ the rule


def test_acceptance_rule() -> None:
    torch.manual_seed(0)
    reference = torch.randn(64, 64, dtype=torch.float64)
    eager = reference.half()
    report = acceptable(eager, reference, eager, float16)
    assert report and report.max_abs > 0 and "within" in report.message
    worse = (reference + 0.02).half()
    report = acceptable(worse, reference, eager, "float16")
    assert not report and "exceeds" in report.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_pass_only_where_the_reference_has_them(value: float) -> None:
    reference = torch.randn(8, 8, dtype=torch.float64)
    bad = reference.half()
    bad[2, 3] = value
    assert not acceptable(bad, reference, bad, float16)
    assert "[2, 3]" in acceptable(bad, reference, bad, float16).message
    reference[2, 3] = value
    assert acceptable(bad, reference, bad, float16)
    assert not acceptable(torch.zeros(8, 8).half(), reference, bad, float16)
    reference[2, 3] = 1e6  # beyond what float16 holds
    assert bool(acceptable(bad, reference, bad, float16)) == (value == float("inf"))


def test_shape_and_element_type_must_fit() -> None:
    reference = torch.randn(8, 8, dtype=torch.float64)
    assert "shape" in acceptable(reference.half()[:4], reference, reference.half(), float16).message
    assert "type" in acceptable(reference.float(), reference, reference.half(), float16).message


def test_execute_in_the_element_type_of_the_caller() -> None:
    _, mu = RIGHT["fused"]()
    inputs = [torch.randn(16, 64), torch.randn(64, 32)]
    [z] = execute(mu, inputs, torch.float32)
    assert z.dtype == torch.float32 and z.shape == (16, 32)
