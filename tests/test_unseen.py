"""Rows that a mask hides as a whole: 0 after a softmax, in the reference and in every kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import cutesuper as cs
from cutesuper import pipeline
from cutesuper.errors import SearchError
from cutesuper.ir.dims import extent
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.ir.operators import lookup
from cutesuper.ir.unseen import followed, guarded
from cutesuper.runtime.toolchain import find_nvdisasm
from cutesuper.skeletons.attention.plan import AttentionPlan
from cutesuper.skeletons.normalize import with_reciprocals
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.targets import H200
from cutesuper.verify.numeric import execute
from tests.backends import compiled as compiled_model
from tests.plans import compiled

#: what is made of hidden scores
Function = Callable[[KernelGraph, Tensor], Tensor]
#: the row that sees nothing
BLIND = 3


def by_hand(g: KernelGraph, x: Tensor) -> Tensor:
    e = g.exp(x - g.max(x, -1))
    return e / g.sum(e, -1)


def by_reciprocal(g: KernelGraph, x: Tensor) -> Tensor:
    e = g.exp(x - g.max(x, -1))
    return e * (1.0 / g.sum(e, -1))


def by_logarithm(g: KernelGraph, x: Tensor) -> Tensor:
    return g.exp(x - g.logsumexp(x))


#: with what they make of a hidden row
FUNCTIONS: dict[str, tuple[Function, float]] = {
    "softmax": (lambda g, x: g.softmax(x), 0.0),
    "by_hand": (by_hand, 0.0),
    "by_reciprocal": (by_reciprocal, 0.0),
    "by_logarithm": (by_logarithm, 0.0),
    "log_softmax": (lambda g, x: g.log_softmax(x), -torch.inf),
    "logsumexp": (lambda g, x: g.logsumexp(x), -torch.inf),
    "added": (lambda g, x: g.softmax(x * 0.5 + 1.0), 0.0),
}


def of_rows(function: Function, rows: int = 8, columns: int = 96) -> KernelGraph:
    g = new_kernel_graph()
    x, seen = (g.new_input((rows, columns), "float16", name) for name in ("x", "seen"))
    g.mark_output(function(g, g.hide(seen, x)))
    return g


def of_product(function: Function) -> KernelGraph:
    g = new_kernel_graph()
    x, w = g.new_input((16, 128), "float16", "x"), g.new_input((128, 96), "float16", "w")
    g.mark_output(function(g, g.hide(g.new_input((16, 96), "float16", "seen"), g.matmul(x, w))))
    return g


def of_attention(rows: int, keys: int) -> KernelGraph:
    g = new_kernel_graph()
    q = g.new_input((2, rows, 64), "float16", "q")
    k, v = (g.new_input((2, keys, 64), "float16", name) for name in "kv")
    scores = g.matmul(q, g.transpose(k)) * 0.125
    seen = g.new_input((2, rows, keys), "float16", "seen")
    g.mark_output(g.matmul(g.softmax(g.hide(seen, scores)), v))
    return g


#: one kernel of rows, rows in a cluster, the end of a product, several kernels, hidden scores
#: between them
GRAPHS: dict[str, Callable[[], KernelGraph]] = {
    **{f"rows_{n}": lambda f=f: of_rows(f) for n, (f, _) in FUNCTIONS.items()},
    **{f"product_{n}": lambda f=f: of_product(f)
       for n, (f, _) in FUNCTIONS.items() if n in ("softmax", "log_softmax", "logsumexp")},
    "long_rows": lambda: of_rows(FUNCTIONS["softmax"][0], 256, 65536),
    "attention": lambda: of_attention(32, 96),
    "attention_of_few_rows": lambda: of_attention(16, 4096),
}  # fmt: skip


@cache
def chosen(name: str) -> pipeline.Choice:
    return pipeline.find(GRAPHS[name](), pipeline.Options(H200))[1]


def inputs_of(graph: KernelGraph, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Normal numbers; ``seen`` hides half of everything, and one row as a whole."""
    torch.manual_seed(0)
    found = []
    for i in graph.inputs:
        x = torch.randn([extent(d) for d in graph.nodes[i].shape], dtype=dtype)
        if graph.nodes[i].name == "seen":
            x = (x > 0).to(dtype)
            x[..., BLIND, :] = 0
        found.append(x)
    return found


def value_of(name: str) -> float:
    return FUNCTIONS.get(name.partition("_")[2], (None, 0.0))[1]


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "long_rows"])
def test_a_hidden_row_is_zero(name: str) -> None:
    """The reference in one and in many operators, and block programs with the guards of kernels."""
    graph = GRAPHS[name]()
    inputs = inputs_of(graph)
    [want] = evaluate(graph, inputs, torch.float64)
    assert (want[..., BLIND, :] == value_of(name)).all() and not want.isnan().any()
    [expanded] = evaluate(graph.expanded(), inputs, torch.float64)
    torch.testing.assert_close(expanded, want)
    [found] = execute(chosen(name).candidate.mugraph, inputs)
    torch.testing.assert_close(found, want)
    [stored] = run_reference(graph, [x.half() for x in inputs])
    assert stored.dtype == torch.float16
    assert (stored[..., BLIND, :] == value_of(name)).all()


#: divisors that are 0 in a hidden row, and may be in any other
COMMON: dict[str, Function] = {
    "e - e": lambda g, e: e - e,
    "sum - sum": lambda g, e: g.sum(e, -1) - g.sum(e, -1),
    "relu": lambda g, e: g.relu(g.log(e)),
}


@pytest.mark.parametrize("name", COMMON)
def test_zeros_of_other_rows_divide_as_in_pytorch(name: str) -> None:
    """Nor is a kernel found: where a divisor is always 0 nothing can be verified."""
    g = new_kernel_graph()
    c, x, y = (g.new_input((8, 16), "float32", name=n) for n in "cxy")
    g.mark_output(y / COMMON[name](g, g.exp(g.hide(c, x))))
    inputs = [torch.ones(8, 16), -torch.rand(8, 16), torch.randn(8, 16)]
    assert evaluate(g, inputs)[0].isinf().all()
    if name != "relu":
        with pytest.raises(SearchError, match="divides by what is 0"):
            cs.superoptimize(g, target="h200")


@pytest.mark.parametrize("name", ["softmax", "by_hand"])
def test_such_a_zero_may_be_hidden_again(name: str) -> None:
    g = new_kernel_graph()
    c, x = (g.new_input((2, 16), "float32", name=n) for n in "cx")
    g.mark_output(FUNCTIONS[name][0](g, g.log(g.relu(g.hide(c, x)))))
    hidden = torch.tensor([[1.0], [0.0]]).expand(2, 16)
    [found] = evaluate(g, [hidden, torch.arange(32.0).view(2, 16) - 3])
    torch.testing.assert_close(found.sum(1).sort().values, torch.tensor([0.0, 1.0]))


# ---------------------------------------------------------------------------------------- kernels


class Numbers:
    """Scalar functions as the device has them: infinities and NaN, no exceptions."""

    exp, log, sqrt, maximum = np.exp, np.log, np.sqrt, np.maximum

    def at_least(self, x: Any, y: Any) -> Any:
        return np.asarray(np.asarray(x) >= y, np.float32)

    def kept(self, condition: Any, x: Any, other: float) -> Any:
        return np.where(np.asarray(condition) > 0.5, x, np.float32(other))

    def div(self, x: Any, y: Any) -> Any:
        return np.float32(x) / y


def run_rows(plan: RowPlan, inputs: dict[str, Any]) -> Any:
    """The work of a row kernel, operation by operation, with its reciprocals of rows."""
    program, m, values = plan.program, Numbers(), dict[int, Any]()
    for i in (*plan.order, *plan.stores):
        op = program.ops[i]
        args = [values[j] for j in op.inputs]
        if op.kind == "load":
            values[i] = inputs[op.attributes["tensor"]]
        elif i in plan.stores:
            return args[0]
        elif i in plan.reductions:
            values[i] = getattr(np, op.kind)(args[0], -1, keepdims=True)
        else:
            values[i] = lookup(op.kind).scalar(m, args, op.attributes)
    raise AssertionError("no store")


def row_plan(name: str) -> RowPlan:
    [plan] = chosen(name).plans
    assert isinstance(plan, RowPlan)
    return plan


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_row_kernel_computes(name: str) -> None:
    plan, graph = row_plan(f"rows_{name}"), GRAPHS[f"rows_{name}"]()
    inputs = inputs_of(graph, torch.float32)
    with np.errstate(all="ignore"):
        given = {graph.nodes[i].name: x.numpy() for i, x in zip(graph.inputs, inputs, strict=True)}
        found = run_rows(plan, given)
    [want] = evaluate(graph, inputs, torch.float32)
    torch.testing.assert_close(torch.from_numpy(found), want)


def test_the_attention_loop_needs_no_guards() -> None:
    [plan] = chosen("attention_of_few_rows").plans
    assert isinstance(plan, AttentionPlan)
    assert not {"maximum", "at_least"} & {op.kind for op in plan.program.ops}


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "attention_of_few_rows"])
def test_guards_stand_in_every_plan(name: str) -> None:
    """Once where scores are hidden, and in kernels that read another one's results of them."""
    choice = chosen(name)
    mu = choice.candidate.mugraph
    tensors = followed(mu)
    for step, plan in zip(mu.steps, choice.plans, strict=True):
        safe = guarded(step.program, tensors)
        quotients = {i for i, op in enumerate(safe.ops) if op.facets.divides}
        assert plan.program.ops in (safe.ops, with_reciprocals(safe, quotients).ops)
        assert guarded(plan.program, tensors) is plan.program
    count = Counter(op.kind for plan in choice.plans for op in plan.program.ops)
    before = Counter(op.kind for step in mu.steps for op in step.program.ops)
    assert count["maximum"] > before["maximum"]
    assert count["at_least"] - before["at_least"] == 2 * count["div"]


def test_programs_that_hide_nothing_keep_their_kernels() -> None:
    g = new_kernel_graph()
    x, seen = (g.new_input((8, 96), "float16", name) for name in ("x", "seen"))
    g.mark_output(g.softmax(g.keep(seen, x)))
    mu = pipeline.find(g, pipeline.Options(H200))[1].candidate.mugraph
    assert all(guarded(s.program, followed(mu)) is s.program for s in mu.steps)


def cost(plan: KernelPlan) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, n in compiled(plan).resources.instructions.items():
        found[name.partition(".")[0]] = found.get(name.partition(".")[0], 0) + n
    return found


@pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")
def test_a_guard_costs_a_few_instructions_for_a_row() -> None:
    pytest.importorskip("cutlass")
    g = new_kernel_graph()
    x, seen = (g.new_input((8, 96), "float16", name) for name in ("x", "seen"))
    g.mark_output(g.softmax(g.keep(seen, x)))
    [plain] = pipeline.find(g, pipeline.Options(H200))[1].plans
    own, other = cost(row_plan("rows_softmax")), cost(plain)
    assert own["FMNMX"] == other["FMNMX"] + 1  # the maximum is finite
    assert own.get("FSET", 0) == other.get("FSET", 0) + 1  # the sum is not 0
    # (x - top) log2(e) stays what it is: with -3.4e38 for top, x log2(e) - top log2(e) is NaN
    assert own["MUFU"] == other["MUFU"] and own.get("FFMA", 0) == other.get("FFMA", 0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_whose_only_element_is_hidden_are_verified(seed: int) -> None:
    """Every row that hides anything is hidden as a whole: such rows have values, too."""
    g = of_rows(FUNCTIONS["softmax"][0], 8, 1)
    choice = pipeline.find(g, pipeline.Options(H200))[1]
    assert cs.verify(g, choice.candidate.mugraph, seed=seed)
    x, seen = inputs_of(g)
    [found] = execute(choice.candidate.mugraph, [x, seen])
    torch.testing.assert_close(found, seen)


def of_lengths(build: Function) -> KernelGraph:
    g = new_kernel_graph()
    x, lengths = g.new_input((4, 8, 16), "float32", "x"), g.new_input((4,), "int32", "lengths")
    g.mark_output(build(g, g.length_mask(x, lengths)))
    return g


def of_whole_rows(build: Function, columns: int = 16) -> KernelGraph:
    g = new_kernel_graph()
    x, seen = g.new_input((8, columns), "float32", "x"), g.new_input((8, 1), "float32", "seen")
    g.mark_output(build(g, g.hide(seen, x)))
    return g


def weights(g: KernelGraph, x: Tensor) -> Tensor:
    """Exponentials times the reciprocal of their sum: 1 is divided by nothing."""
    e = g.exp(x)
    return e * (1.0 / g.sum(e, -1))


@pytest.mark.parametrize("build", [lambda g, x: g.logsumexp(x), weights], ids=["lse", "weights"])
@pytest.mark.parametrize("of", [of_lengths, of_whole_rows, lambda f: of_whole_rows(f, 1)])
def test_rows_that_are_only_ever_hidden_whole_are_verified(
    of: Callable[[Function], KernelGraph], build: Function
) -> None:
    graph = of(build)
    mu = cs.mugraphs(graph, target="h200").candidates[0].mugraph
    [name] = [graph.nodes[i].name for i in graph.inputs[1:]]
    rest = torch.tensor([0, 3, 16, 1]) if name == "lengths" else torch.arange(8.0)[:, None] % 2
    x = torch.randn([extent(d) for d in graph.nodes[graph.inputs[0]].shape], dtype=torch.float64)
    [want] = evaluate(graph, [x, rest], torch.float64)
    [found] = execute(mu, [x, rest])
    assert not want.isnan().any()
    torch.testing.assert_close(found, want)


def gradient_of_weights() -> KernelGraph:
    """Exponentials divided by their sum: a number divided by a sum of nothing."""
    g = new_kernel_graph()
    x, lengths = g.new_input((4, 8, 16), "float32", "x"), g.new_input((4,), "int32", "lengths")
    e = g.exp(g.length_mask(x, lengths, causal=True))
    g.mark_output(e / g.sum(e, -1))
    return cs.grad(g, ["x"])


def test_the_gradient_of_exponentials_divided_by_their_sum_is_verified() -> None:
    graph = gradient_of_weights()
    mu = cs.mugraphs(graph, target="h200").candidates[0].mugraph
    x, dy = (torch.randn(4, 8, 16, dtype=torch.float64) for _ in range(2))
    inputs = [x, torch.tensor([0, 3, 16, 9]), dy]
    [want] = evaluate(graph, inputs, torch.float64)
    [found] = execute(mu, inputs)
    assert not want.isnan().any() and not want[0].any()
    torch.testing.assert_close(found, want)


def test_a_refusal_of_the_verifier_says_why() -> None:
    """The square of a hidden element would be +inf."""
    with pytest.raises(SearchError, match=r"rejected all .* is multiplied by another"):
        pipeline.find(of_rows(lambda g, x: g.square(x)), pipeline.Options(H200))


def of_hidden(build: Callable[[KernelGraph, Tensor], Tensor]) -> KernelGraph:
    g = cs.new_kernel_graph()
    c, x = (g.new_input((8, 16), "float32", name=n) for n in "CX")
    g.mark_output(build(g, g.hide(c, x)))
    return g


def test_a_function_that_is_nan_in_hidden_rows_only_has_kernels() -> None:
    """PyTorch's is NaN in these rows too."""
    graph = of_hidden(lambda g, x: g.silu(g.max(x, -1)))
    assert cs.mugraphs(graph, target="h200").candidates


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda g, x: g.silu(x), "has no value in any draw"),
        (lambda g, x: g.softmax(g.silu(x)), "has no value in any draw"),
        (lambda g, x: g.apply("cosh", g.max(x, -1)), r"is the argument of cosh: .* = cosh\("),
    ],
)
def test_a_function_without_a_value_at_hidden_elements_is_the_graphs_fault(
    build: Callable[[KernelGraph, Tensor], Tensor], why: str
) -> None:
    with pytest.raises(SearchError, match=f"{why}.*change the graph"):
        cs.mugraphs(of_hidden(build), target="h200")


# --------------------------------------------------------------------------- what stays PyTorch's


def test_other_infinities_are_left_alone() -> None:
    """0 / 0 of numbers, a maximum of inputs that are -inf, and hidden minus hidden elements that
    are none of a row's maximum's, in a program that hides other rows."""
    g = new_kernel_graph()
    x, seen = (g.new_input((8, 96), "float16", name) for name in ("x", "seen"))
    weights = g.softmax(g.hide(seen, x))
    kept = g.sum(g.keep(seen, x), -1) / g.sum(seen, -1)
    own = g.softmax(x)
    for value in (weights, kept, own):
        g.mark_output(value)
    inputs = inputs_of(g)
    inputs[0][1] = -torch.inf
    [hidden, mean, free] = evaluate(g, inputs, torch.float64)
    assert not hidden[BLIND].any() and mean[BLIND].isnan().all()
    assert free[1].isnan().all() and free[BLIND].isfinite().all()
    for want, found in zip(
        (hidden, mean, free), evaluate(g.expanded(), inputs, torch.float64), strict=True
    ):
        torch.testing.assert_close(found, want, equal_nan=True)


# -------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("save", ["auto", "none"])
@pytest.mark.parametrize("name", [*FUNCTIONS, "attention"])
def test_gradients_of_hidden_rows_are_zero(name: str, save: str) -> None:
    """Rows of scores; what is kept of such a row (a maximum of -inf, a sum of 0) does no
    harm. Values of attention get nothing from the row."""
    graph = GRAPHS[name if name == "attention" else f"rows_{name}"]()
    names = [graph.nodes[i].name for i in graph.inputs]
    halves = cs.split(graph, wrt=[n for n in names if n != "seen"], save=save)
    feed = dict(zip(names, inputs_of(graph), strict=True))
    outputs = evaluate(halves.forward, list(feed.values()), torch.float64)
    feed |= {n: outputs[place] for n, place in halves.saved.items()}
    feed |= {n: torch.ones_like(outputs[place]) for n, place in halves.cotangents.items()}
    given = [feed[halves.backward.nodes[i].name] for i in halves.backward.inputs]
    for backward in (halves.backward, halves.backward.expanded()):
        found = evaluate(backward, given, torch.float64)
        assert all(x.isfinite().all() for x in found)
        rows = [x for n, x in zip(halves.gradients, found, strict=True) if n in "xq"]
        assert rows and not any(x[..., BLIND, :].any() for x in rows)


def test_gradients_of_attention_are_those_of_pytorch() -> None:
    """Its attention gives 0 for such rows too, where its softmax gives NaN."""
    graph = of_attention(32, 96)
    q, k, v, seen = inputs_of(graph)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen > 0.5, scale=0.125)
    [found] = evaluate(graph, [q, k, v, seen], torch.float64)
    torch.testing.assert_close(found, y)
    halves = cs.split(graph, wrt=["q", "k", "v"])
    want = torch.autograd.grad(y.sum(), leaves)
    saved = evaluate(halves.forward, [q, k, v, seen], torch.float64)
    feed = {"q": q, "k": k, "v": v, "seen": seen} | {n: saved[i] for n, i in halves.saved.items()}
    feed |= dict.fromkeys(halves.cotangents, torch.ones_like(y))
    given = [feed[halves.backward.nodes[i].name] for i in halves.backward.inputs]
    gradients = evaluate(halves.backward, given, torch.float64)
    for name, one in zip("qkv", want, strict=True):
        torch.testing.assert_close(gradients[int(halves.gradients[name])], one)


# -------------------------------------------------------------------------------------- PyTorch


Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def additive(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return (x + torch.zeros_like(x).masked_fill(~seen, -torch.inf)).softmax(-1)


def written(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    e = (h := torch.where(seen, x, -torch.inf)).sub(h.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


MODELS: dict[str, tuple[Model, float]] = {
    "filled": (lambda x, seen: x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0),
    "chosen": (lambda x, seen: torch.where(seen, x, -torch.inf).softmax(-1), 0.0),
    "additive": (additive, 0.0),
    "written": (written, 0.0),
    "logarithm": (lambda x, seen: x.masked_fill(~seen, -torch.inf).log_softmax(-1), -torch.inf),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """All of these are NaN in PyTorch."""
    model, value = MODELS[name]
    torch.manual_seed(0)
    x, seen = torch.randn(6, 32, requires_grad=True), torch.rand(6, 32) > 0.5
    seen[BLIND] = False
    run, reports = compiled_model(model)
    y = run(x, seen)
    assert all(r.verdict.taken for report in reports for r in report.regions)
    assert (y[BLIND] == value).all()
    [dx] = torch.autograd.grad(y.square().sum() if value == 0.0 else y[:BLIND].sum(), x)
    eager = model(x, seen)
    assert eager[BLIND].isnan().all() and dx.isfinite().all() and not dx[BLIND].any()
    torch.testing.assert_close(y[:BLIND], eager[:BLIND])


def test_conditions_on_maxima_are_compared_with_true_maxima() -> None:
    """Fresh values in the place of maxima hide other elements, and may agree in a few draws."""
    g = new_kernel_graph()
    x, y = g.new_input((8, 16)), g.new_input((8, 1))
    g.mark_output(g.softmax(g.hide(g.max(x, -1), y)))
    mu = cs.mugraphs(g, target="h200", keep=1).candidates[0].mugraph
    assert all(cs.verify(g, mu, seed=seed) for seed in range(6))
