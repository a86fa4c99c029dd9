"""LayerNorm and Linear as one walk over K: what is found, planned, and how well it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from cutesuper.egraph.distribute import distributed
from cutesuper.egraph.labelled import label
from cutesuper.errors import LoweringError, SearchError
from cutesuper.ir.check import check_block_program, passes
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.pipeline import Choice, Options, choose
from cutesuper.search.cuts import Flat
from cutesuper.search.forms import find_form
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.search.search import search
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.matmul.shift import find_shift
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier
from tests import zoo
from tests.mugraphs import Block
from tests.plan_numbers import PlanNumbers
from tests.plans import specs, whole_plan

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"gain": False, "shift": False},
    "gain": {"shift": False},
    "bias": {"gain": False},
    "gain and bias": {},
    "linear bias": {"linear_bias": True},
    "gelu": {"linear_bias": True, "tail": "gelu"},
    "transposed": {"transposed": True},
    "residual": {"residual": True},
    "gated": {"gated": True},
}


@cache
def chosen(form: str, m: Any = 16, k: int = 1024, n: int = 512, dtype: str = "float16") -> Choice:
    graph = zoo.layer_norm_linear(m, k, n, dtype, **FORMS[form])
    return choose(graph, Options(H200))[1]


def plan_of(choice: Choice) -> MatmulPlan:
    [plan] = choice.plans
    assert isinstance(plan, MatmulPlan)
    return plan


# ------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("form", FORMS)
def test_one_kernel_in_one_walk_is_the_best(form: str) -> None:
    choice = chosen(form)
    [step] = choice.candidate.mugraph.steps
    assert not choice.refused and choice.verification
    assert set(passes(step.program, check_block_program(step.program)).values()) == {1}
    assert plan_of(choice).shift is not None


@pytest.mark.parametrize("size", [(1, 4096, 4096), (8, 4096, 4096), (16, 4096, 4096)], ids=str)
def test_it_is_the_best_for_large_weights(size: tuple[int, int, int]) -> None:
    assert len(chosen("gain and bias", *size).plans) == 1


@pytest.mark.parametrize("form", ["plain", "gain and bias"])
def test_more_rows_have_a_kernel_too(form: str) -> None:
    """The price decides; with 64 rows centring them may cost more than a second kernel."""
    flat = Flat(zoo.layer_norm_linear(64, 4096, 4096, **FORMS[form]).expanded())
    region = flat.segment(flat.order).region
    found = search_region(region, H200, SearchOptions(lowered=True))
    assert found.ways and all(len(w.programs) == 1 for w in found.ways)


def test_symbolic_rows() -> None:
    assert len(chosen("gain and bias", Symbol("M", 16)).plans) == 1


def unbiased(k: int, product: bool) -> KernelGraph:
    """``(X - mean) / sqrt(sum((X - mean)^2) / (K - 1) + eps) @ W``."""
    g = new_kernel_graph()
    x, w = g.new_input((16, k), name="X"), g.new_input((k, 512), name="W")
    c = g.sub(x, g.mean(x, -1))
    squares = g.mul(c, c) if product else g.square(c)
    deviation = g.sqrt(g.add(g.div(g.sum(squares, -1), k - 1), 1e-5))
    g.mark_output(g.matmul(g.div(c, deviation), w))
    return g


@pytest.mark.parametrize("product", [False, True])
def test_a_variance_may_be_a_sum(product: bool) -> None:
    graph = unbiased(1024, product)
    verifier = Verifier(graph)
    result = search(
        graph,
        H200,
        options=SearchOptions(lowered=True),
        verify=lambda mu: bool(verifier.check(mu, bound=False)),
    )
    assert result.statistics.rejected == 0
    assert len(result.candidates[0].mugraph.steps) == 1


def labelled(graph: KernelGraph) -> Any:
    flat = Flat(graph.expanded())
    return label(flat.segment(flat.order).region)


def over_k(graph: KernelGraph) -> Any:
    return distributed(labelled(graph), "K")


def test_what_waits_for_nothing_is_left_as_it_is() -> None:
    """``(X + R) W`` is one product, not two."""
    assert over_k(zoo.rms_norm_linear(16, 1024, 512, gain=True)) is None
    g = new_kernel_graph()
    x, r = (g.new_input((16, 1024), name=n) for n in "XR")
    g.mark_output(g.matmul(g.add(x, r), g.new_input((1024, 512), name="W")))
    assert over_k(g) is None


def test_what_is_not_linear_is_left_as_it_is() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((16, 1024), name="X"), g.new_input((1024, 512), name="W")
    g.mark_output(g.matmul(g.exp(g.sub(x, g.max(x, -1))), w))
    assert over_k(g) is None


def test_the_distributed_definition() -> None:
    found = over_k(zoo.layer_norm_linear(16, 1024, 512))
    assert found is not None
    reductions = [(op.kind, sorted(op.labels)) for op in found.ops if op.over]
    assert sorted(reductions) == [
        ("matmul", ["M", "N"]), ("matmul", ["N"]), ("matmul", ["N"]),
        ("mean", ["M"]), ("mean", ["M"]),
    ]  # fmt: skip


def test_a_linear_layer_with_a_sum_of_its_columns_is_one_kernel() -> None:
    """``X W - sum_K(W)``: the vector of ones is of use without a norm."""
    g = zoo.less_column_sums(16, 1024, 512)
    plan = plan_of(choose(g, Options(H200))[1])
    assert plan.vector_rows == (None,) and plan.shift is None and plan.prologue is None
    assert plan.has_helpers and plan.rewrites


# --------------------------------------------------------------------------------------- the plan


def test_places_of_a_layer_norm() -> None:
    plan = plan_of(chosen("gain and bias"))
    names = [plan.arguments[v.argument].name for v in plan.vectors.values()]
    assert names == ["G", "B0"]
    assert [e.text(["v"]) for e in plan.vector_rows if e is not None] == ["v", "v"]
    assert plan.shift is not None and plan.shift.products and plan.shift.source.trivial
    [w] = plan.columns
    assert plan.vector_columns == (w,) and len(plan.vector_products) == 2
    assert plan.vector_pairs == 1
    m, n, k = plan.tile
    assert plan.slot_bytes - plan.stage_bytes == 2 * 8 * k
    if plan.cluster > 1:
        assert plan.exchange_bytes == 4 * n * (m + 2)


def test_vectors_of_two_weights() -> None:
    plan = plan_of(chosen("gated"))
    assert len(plan.vector_rows) == 2 and len(plan.vector_products) == 4
    assert len(plan.vector_columns) == 2


def variance(**changes: Any) -> tuple[Block, dict[str, tuple[int, ...]]]:
    """``X W / sqrt(mean(X^2) - mean(X)^2)`` by hand, and what else is stored of it."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x = b.load("X", "M", "K")
    w = b.load("W", "K", "N")
    product = b.close(b.op("matmul", x, w, over="K"), "K")
    mean = b.close(b.op("mean", x, over="K"), "K")
    squares = b.close(b.op("mean", b.op("mul", x, x), over="K"), "K")
    square = b.op("mul", mean, mean)
    eps = b.const(1e-5)
    if changes.get("negated"):
        v = b.op("add", b.op("add", squares, eps), b.op("mul", b.const(-1.0), square))
    else:
        v = b.op("add", b.op("sub", eps, square), squares)
    z = b.op("div", product, b.op("sqrt", v))
    if changes.get("divided"):
        z = b.op("mul", z, b.op("div", mean, mean))
    b.store("Z", b.op("add", z, mean) if changes.get("mean") else z, "M", "N")
    return b, {"X": (16, 512), "W": (512, 64), "Z": (16, 64)}


@pytest.mark.parametrize("negated", [False, True])
def test_a_difference_that_cancels_is_found_in_any_form(negated: bool) -> None:
    """The products take the rows as they are: they depend on the mean."""
    b, shapes = variance(negated=negated)
    found = find_shift(b.step().program, "M", "N", "K")
    assert found is not None and not found.products and found.refused is None
    plan: Any = planned(b, shapes)
    assert plan.prologue is None and plan.shift.source.trivial


def test_what_needs_the_mean_and_cancels_is_refused() -> None:
    b, shapes = variance(mean=True)
    with pytest.raises(LoweringError, match=r"loses all digits where the mean of operation 0 is"):
        planned(b, shapes)


def test_two_values_that_would_be_shifted_are_refused() -> None:
    """Products of X over the deviations of X and of R."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x, r = b.load("X", "M", "K"), b.load("R", "M", "K")
    z = b.close(b.op("matmul", x, b.load("W", "K", "N"), over="K"), "K")
    for v in (x, r):
        mean = b.close(b.op("mean", v, over="K"), "K")
        squares = b.close(b.op("mean", b.op("square", v), over="K"), "K")
        z = b.op("div", z, b.op("sqrt", b.op("sub", squares, b.op("square", mean))))
    b.store("Z", z, "M", "N")
    shapes = {"X": (16, 512), "R": (16, 512), "W": (512, 64), "Z": (16, 64)}
    with pytest.raises(LoweringError, match="operations 0, 1 all have sums over K that cancel"):
        planned(b, shapes)


def test_sums_that_do_not_cancel_are_left_alone() -> None:
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x, w = b.load("X", "M", "K"), b.load("W", "K", "N")
    product = b.close(b.op("matmul", x, w, over="K"), "K")
    mean = b.close(b.op("mean", x, over="K"), "K")
    squares = b.close(b.op("mean", b.op("square", x), over="K"), "K")
    b.store("Z", b.op("sub", b.op("div", product, b.op("sqrt", squares)), mean), "M", "N")
    assert find_shift(b.step().program, "M", "N", "K") is None


def test_a_quotient_that_loses_a_factor_of_the_row_is_no_difference() -> None:
    """``y / mean_N(y)`` with y = X W / mean_K(X^2): X^2 next to zero would divide by zero."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x, w = b.load("X", "M", "K"), b.load("W", "K", "N")
    squares = b.close(b.op("mean", b.op("square", x), over="K"), "K")
    y = b.op("div", b.close(b.op("matmul", x, w, over="K"), "K"), squares)
    b.store("Z", b.op("div", y, b.op("mean", y, over="N")), "M", "N")
    assert find_shift(b.step().program, "M", "N", "K") is None


def test_what_is_subtracted_from_itself_loses_no_digits() -> None:
    """``y - y`` with y = X W / sum_K(X): the sum of a row less its mean is 0, and y NaN."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x, w = b.load("X", "M", "K"), b.load("W", "K", "N")
    total = b.close(b.op("sum", x, over="K"), "K")
    y = b.op("div", b.close(b.op("matmul", x, w, over="K"), "K"), total)
    b.store("Z", b.op("sub", y, y), "M", "N")
    assert find_shift(b.step().program, "M", "N", "K") is None


def test_a_shift_of_a_divisor_is_refused() -> None:
    b, _ = variance(divided=True)
    found = find_shift(b.step().program, "M", "N", "K")
    assert found is not None and "the divisor of operation" in str(found.refused)


def planned(b: Block, shapes: dict[str, tuple[int, ...]]) -> Any:
    from cutesuper.skeletons.planner import make_plan

    return make_plan(b.step(), specs(shapes), H200)


def vectors(**changes: Any) -> tuple[Block, dict[str, tuple[int, ...]]]:
    """``X W + g0 W + g1 W + ...``."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    w = b.load("W", "K", "N")
    shapes: dict[str, tuple[int, ...]] = {"X": (16, 512), "W": (512, 64), "Z": (16, 64)}
    total = b.close(b.op("matmul", b.load("X", "M", "K"), w, over="K"), "K")
    if changes.get("alone"):
        w, shapes["V"] = b.load("V", "K", "N"), (512, 64)
    for i in range(changes.get("count", 1)):
        vector = b.close(b.op("matmul", b.load(f"g{i}", "K"), w, over="K"), "K")
        total, shapes[f"g{i}"] = b.op("add", total, vector), (512,)
    b.store("Z", total, "M", "N")
    return b, shapes


def test_eight_vectors_fit() -> None:
    plan: Any = planned(*vectors(count=8))
    assert len(plan.vector_rows) == 8 and plan.vector_pairs == 4
    with pytest.raises(LoweringError, match="9 vectors are multiplied by column operands"):
        planned(*vectors(count=9))


def test_a_weight_that_only_a_vector_multiplies_is_refused() -> None:
    with pytest.raises(LoweringError, match="operation 4 is multiplied by a vector only"):
        planned(*vectors(alone=True))


# ------------------------------------------------------------------------------------- the numbers

NUMBERS = [
    *((form, 16, 1024, 512, "float16") for form in FORMS),
    ("gain and bias", 16, 4096, 512, "float16"),
    ("gain and bias", 16, 1024, 512, "bfloat16"),
    ("gain and bias", 3, 520, 200, "float16"),  # the last tiles of M, K and N are not full
    ("plain", 1, 520, 200, "float16"),
    ("plain", 16, 8, 64, "float16"),
    ("residual", 16, 72, 64, "bfloat16"),
]


def inputs_of(graph: KernelGraph, mean: float, seed: int) -> list[torch.Tensor]:
    """Normal inputs; X has a mean."""
    inputs = zoo.draw(graph, seed)
    inputs[0] = (inputs[0].float() + mean).to(inputs[0].dtype)
    return inputs


def judged(case: tuple[Any, ...], inputs: list[torch.Tensor], graph: KernelGraph) -> Any:
    plan = plan_of(chosen(*case))
    by_name = zoo.named(graph, inputs)
    [out] = PlanNumbers(plan, by_name).run().values()
    tail = torch.nn.functional.gelu if case[0] == "gelu" else None
    transposed = case[0] == "transposed"
    eager = zoo.eager_layer_norm_linear(by_name, transposed, tail)
    [report] = zoo.judge(graph, inputs, [out], [eager])
    return report


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("case", NUMBERS, ids=lambda c: "-".join(map(str, c)))
def test_a_large_mean_does_not_cancel(case: tuple[Any, ...], mean: float) -> None:
    """As good as PyTorch, which centres in a walk of its own."""
    graph = zoo.layer_norm_linear(*case[1:], **FORMS[case[0]])
    report = judged(case, inputs_of(graph, mean, 3), graph)
    assert report, report.message


def test_without_the_shift_a_large_mean_cancels() -> None:
    """The tests above can fail."""
    case = NUMBERS[3]
    graph = zoo.layer_norm_linear(*case[1:], **FORMS[case[0]])
    inputs = inputs_of(graph, 100.0, 3)
    numbers = PlanNumbers(plan_of(chosen(*case)), zoo.named(graph, inputs))
    numbers.values = numbers.plain
    [out] = numbers.run().values()
    eager = zoo.eager_layer_norm_linear(zoo.named(graph, inputs))
    assert not zoo.judge(graph, inputs, [out], [eager])[0]


def test_outliers_where_the_sample_is_taken() -> None:
    """One huge element in each sampled piece, so that the sample is far from the mean."""
    case = NUMBERS[3]
    graph = zoo.layer_norm_linear(*case[1:], **FORMS[case[0]])
    inputs = inputs_of(graph, 0.0, 4)
    inputs[0][:, ::128] = 300.0
    report = judged(case, inputs, graph)
    assert report, report.message


def test_constant_rows_have_no_deviation() -> None:
    case = NUMBERS[0]
    graph = zoo.layer_norm_linear(*case[1:], **FORMS[case[0]])
    inputs = inputs_of(graph, 0.0, 5)
    inputs[0][3], inputs[0][5] = 1000.0, 0.0
    [out] = PlanNumbers(plan_of(chosen(*case)), zoo.named(graph, inputs)).run().values()
    assert (out[3] == 0).all() and (out[5] == 0).all() and out.isfinite().all()


# ------------------------------------------------------------------- with what follows the products


def of_normed(after: Callable[..., Any], by_name: dict[str, Any], dtype: Any) -> Any:
    """``after(layer_norm(X) W)`` in a precision."""
    x, w = by_name["X"].to(dtype), by_name["W"].to(dtype)
    return after(torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5) @ w)


AFTER: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda z: torch.softmax(z, -1),
    "layer_norm": lambda z: torch.nn.functional.layer_norm(z, z.shape[-1:], eps=1e-5),
}


@pytest.mark.parametrize("after", AFTER)
def test_reductions_along_the_columns_follow_in_the_same_kernel(after: str) -> None:
    """Only sums over K are distributed: those over N take deviations, as they are written. The
    price decides whether it is better than a kernel for each norm."""
    graph = zoo.layer_norm_linear_then(after)
    plan = whole_plan(graph)
    assert plan.vector_products and len(plan.reductions) == 2
    inputs = inputs_of(graph, 100.0, 6)
    by_name = zoo.named(graph, inputs)
    numbers = PlanNumbers(plan, {f"in{i}": x for i, x in enumerate(inputs)})
    [out] = numbers.run().values()
    eager = of_normed(AFTER[after], by_name, inputs[0].dtype)
    [report] = zoo.judge(graph, inputs, [out], [eager])
    assert report, report.message


@pytest.mark.parametrize("after", ["T B", "layer_norm(X) A B"])
def test_products_after_the_loop_are_another_kernel(after: str) -> None:
    other = over_k(zoo.layer_norm_linear_then(after))
    flat = Flat(zoo.layer_norm_linear_then(after).expanded())
    with pytest.raises(SearchError, match=r"a vector of N.* beside a product over"):
        find_form(flat.segment(flat.order).region, other, H200)
    assert len(choose(zoo.layer_norm_linear_then(after), Options(H200))[1].plans) == 2


def test_vectors_beside_a_product_after_the_loop_are_refused() -> None:
    """``X W - sum_K(W) + T B``."""
    b = Block(
        {"M": 16, "K": 512, "N": 64, "J": 16}, {"K.loop": 4},
        {"M": 16, "K": 128, "N": 64, "J": 16},
    )  # fmt: skip
    w = b.load("W", "K", "N")
    z = b.close(b.op("matmul", b.load("X", "M", "K"), w, over="K"), "K")
    z = b.op("sub", z, b.close(b.op("sum", w, over="K"), "K"))
    after = b.op("matmul", b.load("T", "M", "J"), b.load("B", "J", "N"), over="J")
    b.store("Z", b.op("add", z, after), "M", "N")
    shapes = {"X": (16, 512), "W": (512, 64), "T": (16, 16), "B": (16, 64), "Z": (16, 64)}
    with pytest.raises(LoweringError, match=r"beside a product after the loop \(over J\)"):
        planned(b, shapes)
