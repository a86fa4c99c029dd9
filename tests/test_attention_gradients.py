"""Gradients of attention: what is kept, scores computed again, plans and code of the kernels. No
GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import cutesuper as cs
from cutesuper.errors import LoweringError, ScheduleError, SearchError
from cutesuper.ir.block import KernelStep, MuGraph
from cutesuper.ir.dims import Dim
from cutesuper.ir.evaluate import evaluate, run_reference
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.report import plan_text
from cutesuper.search.cuts import Flat
from cutesuper.search.recomputed import recomputed
from cutesuper.search.region import SearchOptions, search_region, tensors_of
from cutesuper.search.search import search
from cutesuper.skeletons.attention.sums.cost import loops
from cutesuper.skeletons.attention.sums.plan import SumsPlan, exceeded
from cutesuper.skeletons.attention.sums.roles import recognized_sums
from cutesuper.skeletons.attention.sums.sizes import resized, scheduled_sums
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify
from tests.mugraphs import Block
from tests.row_programs import one_kernel
from tests.test_lowering import KEPT
from tests.test_lowering_attention import needs_sass

LOWERED = SearchOptions(lowered=True)


@dataclass(frozen=True)
class Backward:
    """The gradient of Q, or those of K and V, from lse and delta as inputs.

    Attributes:
        wrt: "Q" or "KV".
        heads, group: of keys; query heads for each, 0 for no dimension.
        rows, keys: positions.
        width, value_width: of a head.
        mask: "", "causal" or "lengths".
    """

    wrt: str = "Q"
    heads: int = 2
    group: int = 2
    rows: Dim = 256
    keys: Dim = 256
    width: int = 64
    value_width: int = 64
    mask: str = "causal"
    dtype: str = "bfloat16"

    def graph(self) -> KernelGraph:
        g = new_kernel_graph()
        groups, one = ((self.group,), (1,)) if self.group else ((), ())
        many, single = (2, self.heads, *groups), (2, self.heads, *one)
        q = g.new_input((*many, self.rows, self.width), self.dtype, name="Q")
        k = g.new_input((*single, self.keys, self.width), self.dtype, name="K")
        v = g.new_input((*single, self.keys, self.value_width), self.dtype, name="V")
        do = g.new_input((*many, self.rows, self.value_width), self.dtype, name="dO")
        lse, delta = (g.new_input((*many, self.rows, 1), "float32", name=n) for n in ("L", "D"))
        weights = g.exp(g.sub(self._scores(g, q, k), lse))
        change = g.mul(weights, g.sub(g.matmul(do, g.transpose(v)), delta))
        if self.wrt == "Q":
            g.mark_output(g.mul(g.matmul(change, k), 0.125))
            return g
        for left, right, scale in ((change, q, 0.125), (weights, do, 1.0)):
            made = g.matmul(g.transpose(left), right)
            g.mark_output(g.mul(g.sum(made, 2) if self.group else made, scale))
        return g

    def _scores(self, g: KernelGraph, q: Tensor, k: Tensor) -> Tensor:
        scores = g.mul(g.matmul(q, g.transpose(k)), 0.125)
        if self.mask == "lengths":
            return g.length_mask(scores, g.new_input((2,), "int32", name="N"))
        return g.causal_mask(scores) if self.mask else scores

    def plan(self, rows: int = 128, tile: int = 64) -> SumsPlan:
        """The plan with tiles of so many rows and elements of the loop."""
        flat = Flat(self.graph().expanded())
        region = flat.segment(flat.order).region
        way = search_region(region, H200, LOWERED).ways[0]
        setting = Setting(H200, tensors_of(region))
        plan = recognized_sums(KernelStep("k0", way.programs[0]), setting)
        return scheduled_sums(resized(plan, rows, tile), H200)


# ---------------------------------------------------------------------------------- what is kept


def attention(
    tokens: bool = False, written: bool = False, rows: int = 256, dtype: str = "bfloat16"
) -> KernelGraph:
    """Causal attention of 4 heads; ``tokens``: the result is stored by positions; ``written``: its
    operators one by one."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((2, 4, rows, 64), dtype, name=n) for n in "QKV")
    if written:
        scores = g.causal_mask(g.mul(g.matmul(q, g.transpose(k)), 0.125))
        y = g.matmul(g.softmax(scores), v)
    else:
        y = g.scaled_dot_product_attention(q, k, v, is_causal=True)
    g.mark_output(g.transpose(y, (0, 2, 1, 3)) if tokens else y)
    return g


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_its_result_and_one_number_a_row_are_kept(tokens: bool, written: bool) -> None:
    parts = cs.split(attention(tokens, written))
    assert set(parts.saved) == {"out", "lse"} and len(parts.forward.outputs) == 2
    assert "div" not in {n.operator for n in parts.backward.nodes}


@pytest.mark.parametrize("tokens", [False, True])
def test_numbers_of_the_graphs(tokens: bool) -> None:
    graph = attention(tokens, rows=8, dtype="float32")
    parts = cs.split(graph)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 8, 64).requires_grad_() for _ in range(3)]
    q, k, v = inputs
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2) if tokens else y
    cotangent = torch.randn_like(y)
    wanted = torch.autograd.grad(y, inputs, cotangent)
    made = run_reference(parts.forward, [t.detach() for t in inputs])
    values = dict(zip("QKV", (t.detach() for t in inputs), strict=True))
    values |= {n: made[i] for n, i in parts.saved.items()} | dict.fromkeys(
        parts.cotangents, cotangent
    )
    backward = parts.backward
    found = run_reference(backward, [values[backward.nodes[i].name] for i in backward.inputs])
    for name, want in zip("QKV", wanted, strict=True):
        assert torch.allclose(found[int(parts.gradients[name])], want, atol=1e-5)


def test_weights_of_a_softmax_that_no_product_takes_stay() -> None:
    g = new_kernel_graph()
    x = g.new_input((8, 64), "float32", name="x")
    g.mark_output(g.softmax(x))
    assert "log" not in {n.operator for n in cs.grad(g).nodes}


# --------------------------------------------------------------------------- scores computed again


def test_scores_are_computed_for_each_kind_of_sum() -> None:
    """Once more for K and V; the sum of dO * O is shared."""
    backward = cs.split(attention()).backward.expanded()
    (together, groups), (alone, single) = recomputed(backward)
    assert groups == ((0,), (1, 2)) and single == ((0,), (1,), (2,))
    counts = [[n.operator for n in g.nodes].count("exp") for g in (backward, together, alone)]
    assert counts == [1, 2, 3]
    assert [n.operator for n in together.nodes].count("sum") == 1


def test_a_shared_number_may_be_an_output() -> None:
    """The gradient of a target that the mean of attention is compared with."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((8, 64), "fp16", name=n) for n in "qkv")
    mean = g.mean(g.mean(g.softmax(q @ g.transpose(k)) @ v, 1), 0)
    g.mark_output(mean)
    g.mark_output(g.square(g.new_input((1, 1), "fp32", name="t") - mean))
    backward = cs.grad(g).expanded()
    found = recomputed(backward)
    r = torch.Generator().manual_seed(0)
    given = [backward.nodes[i].shape for i in backward.inputs]
    values = [torch.randn(s, generator=r, dtype=torch.float64) for s in given]
    wanted = evaluate(backward, values, torch.float64)
    for other, _ in found:
        for got, want in zip(evaluate(other, values, torch.float64), wanted, strict=True):
            torch.testing.assert_close(got, want)
    assert found


@pytest.mark.parametrize("make", [
    lambda g, x: g.relu(x @ g.transpose(x)),
    lambda g, x: g.softmax(x @ g.transpose(x)) @ x,
])  # fmt: skip
def test_one_kind_of_sum_stays_as_it_is(make: Callable[[KernelGraph, Tensor], Tensor]) -> None:
    g = new_kernel_graph()
    g.mark_output(make(g, g.new_input((64, 64), name="x")))
    assert recomputed(g.expanded()) == []


def of_groups() -> KernelGraph:
    """Gradients of repeated heads as AOTAutograd makes them: scaled, then added up over a group."""
    g = new_kernel_graph()
    q, out, d = (g.new_input((1, 2, 2, 256, 64), cs.bfloat16, name=n) for n in ("q", "out", "d"))
    k, v = (g.new_input((1, 2, 1, 256, 64), cs.bfloat16, name=n) for n in ("k", "v"))
    lse = g.new_input((1, 2, 2, 256, 1), cs.float32, name="lse")
    scores = g.mul(g.matmul(q, g.transpose(k)), 0.125)
    p = g.exp(g.sub(g.causal_mask(scores, alignment="top_left"), lse))
    ds = g.mul(p, g.sub(g.matmul(d, g.transpose(v)), g.sum(g.mul(d, out), -1)))
    g.mark_output(g.mul(g.matmul(ds, k), 0.125))
    g.mark_output(g.sum(g.mul(g.matmul(g.transpose(ds), q), 0.125), 2))
    g.mark_output(g.sum(g.matmul(g.transpose(p), d), 2))
    return g


def test_sums_over_heads_are_scaled_last() -> None:
    """One kernel adds up the gradients of K and of V over the group."""
    g = of_groups()
    found = search(g, H200, options=LOWERED, near=1.02).candidates[0].mugraph
    plans = [make_plan(s, found.tensors, H200) for s in found.steps]
    sums = [plan for plan in plans if isinstance(plan, SumsPlan)]
    assert [plan.visits is not None for plan in sums] == [False, True]
    assert len(sums[1].outputs) == 2 and len(plans) == 3
    assert verify(g, found)


def test_the_search_finds_one_kernel_for_each() -> None:
    parts = cs.split(attention())
    forward = search(parts.forward, H200, options=LOWERED, near=1.02).candidates[0]
    assert len(forward.mugraph.steps) == 1
    found = search(parts.backward, H200, options=LOWERED, near=1.02).candidates[0]
    plans = [make_plan(s, found.mugraph.tensors, H200) for s in found.mugraph.steps]
    assert [type(p).__name__ for p in plans] == ["RowPlan", "SumsPlan", "SumsPlan"]


def gated(rows: int = 8192) -> KernelGraph:
    """A gated MLP with weights stored along short labels."""
    g = new_kernel_graph()
    x, c = g.new_input((rows, 64), name="x"), g.new_input((320, 128), name="c")
    a, b = (g.new_input((320, 64), name=n) for n in "ab")
    hidden = g.mul(g.silu(g.matmul(x, g.transpose(a))), g.matmul(x, g.transpose(b)))
    g.mark_output(g.matmul(hidden, c))
    return g


def test_other_programs_of_the_same_form() -> None:
    """Nothing here knows of attention: a gated MLP is two scores and a sum."""
    found = search(gated(), H200, options=LOWERED, near=1.02).candidates[0]
    [plan] = (make_plan(s, found.mugraph.tensors, H200) for s in found.mugraph.steps)
    assert isinstance(plan, SumsPlan) and (len(plan.scores), len(plan.sums)) == (2, 1)


# ------------------------------------------------------------------------------------------- plans


def of_copies(heads: int = 2, group: int = 2, rows: int = 128, last: bool = False) -> KernelGraph:
    """The gradients of attention over copies of K and V for the query heads of a group, summed over
    the group, as autograd makes them. The copies are inputs, and may differ. ``last``: the sums are
    behind all products."""
    g = new_kernel_graph()
    shape = (1, heads, group, rows, 64)
    q, k, v, do = (g.new_input(shape, "bfloat16", name=n) for n in ("Q", "K", "V", "dO"))
    lse, delta = (g.new_input((*shape[:3], rows, 1), "float32", name=n) for n in ("L", "D"))
    scores = g.causal_mask(g.mul(g.matmul(q, g.transpose(k)), 0.125))
    weights = g.exp(g.sub(scores, lse))
    change = g.mul(weights, g.sub(g.matmul(do, g.transpose(v)), delta))
    g.mark_output(g.mul(g.matmul(change, k), 0.125))
    of_k = g.mul(g.matmul(g.transpose(change), q), 0.125)
    of_v = g.matmul(g.transpose(weights), do)
    if last:
        g.mark_output(g.sum(of_k, 2))
        g.mark_output(g.sum(of_v, 2))
        return g
    of_v = g.sum(of_v, 2)
    g.mark_output(g.sum(of_k, 2))
    g.mark_output(of_v)
    return g


def one_in_all_visits() -> KernelGraph:
    """A sum over the heads of Q, and one without them, of scores that both take."""
    g = new_kernel_graph()
    q, k, r = (
        g.new_input((n, 256, 64), "bfloat16", name=x) for x, n in (("Q", 2), ("K", 1), ("R", 1))
    )
    scores = g.relu(g.matmul(k, g.transpose(r)))
    g.mark_output(g.sum(g.matmul(g.mul(g.relu(g.matmul(k, g.transpose(q))), scores), q), 0))
    g.mark_output(g.matmul(scores, r))
    return g


@pytest.mark.parametrize("last", [False, True])
def test_sums_of_copies_begin_kernels(last: bool) -> None:
    """Too many scores to be stored: products and their sums over the group are apart."""
    g = of_copies(rows=1024, last=last)
    found = search(g, H200, options=LOWERED, near=1.02).candidates[0].mugraph
    kinds = [type(make_plan(s, found.tensors, H200)).__name__ for s in found.steps]
    assert kinds == ["SumsPlan", "SumsPlan", "RowPlan", "RowPlan"]


def stale(plan: SumsPlan) -> list[int]:
    """Operations that a plan takes to be the same in all visits, or sums over them, and are not."""
    ops, visits = plan.program.ops, plan.visits
    found = [i for i in plan.residents if visits in ops[i].dims]
    sums = [s.final for s in plan.sums if visits in ops[s.final].dims]
    added = ((s.final, {*ops[s.stream].dims, *ops[s.operand].dims}) for s in plan.sums)
    return [*found, *sums, *(i for i, dims in added if visits and visits not in dims)]


@pytest.mark.parametrize(("make", "loops"), [(of_copies, 2), (one_in_all_visits, 0)])
def test_what_stays_is_the_same_in_all_visits(make: Callable[[], KernelGraph], loops: int) -> None:
    """The search finds other kernels where it is not: copies of K that may differ, and a sum that
    every visit would add to."""
    found = search(make(), H200, options=LOWERED, near=1.02).candidates[0]
    plans = [make_plan(s, found.mugraph.tensors, H200) for s in found.mugraph.steps]
    sums = [p for p in plans if isinstance(p, SumsPlan)]
    assert len(sums) == loops and [stale(p) for p in sums] == [[]] * loops


def visiting(kind: str) -> tuple[KernelGraph, MuGraph]:
    """Products of K with a matrix for each head, over which blocks walk in turn: right, and no
    program of this loop.

    Args:
        kind: what is wrong. "resident": K differs from head to head. "once": one of two sums has no
            heads. "apart": heads are not summed. "cluster", "grid": blocks of a cluster have a head
            each, those of the grid have some.
    """
    heads = 4 if kind == "grid" else 2
    g = new_kernel_graph()
    q, w = (g.new_input((heads, 128, 64), "bfloat16", name=n) for n in ("Q", "W"))
    k = g.new_input((heads if kind == "resident" else 1, 64, 64), "bfloat16", name="K")
    both = g.mul(g.relu(g.matmul(k, g.transpose(q))), g.matmul(k, g.transpose(w)))
    made = g.matmul(both, q)
    g.mark_output(made if kind in ("apart", "cluster") else g.sum(made, 0))

    visits = "H.cluster" if kind == "cluster" else "H.persistent"
    axes: dict[str, int | None] = {visits: 2, "N.grid": 1, "M.loop": 2}
    axes |= {"H.grid": 2} if kind == "grid" else {}
    dims: dict[str, Dim] = {"H": heads, "N": 64, "M": 128, "K": 64}
    b = Block(dims, axes, {"H": 1, "N": 64, "M": 64, "K": 64})
    bq, bw = (b.load(n, "H", "M", "K") for n in "QW")
    bk = b.load("K", "H" if kind == "resident" else None, "N", "K")
    one = b.op("relu", b.op("matmul", bk, bq, over="K"))
    x = b.op("matmul", b.op("mul", one, b.op("matmul", bk, bw, over="K")), bq, over="M")
    x = b.acc(x, "M.loop")
    if kind in ("apart", "cluster"):
        b.store("Z", x, "H", "N", "K")
    else:
        x = b.acc(b.op("sum", x, over="H"), "H.persistent")
        b.store("Z", b.acc(x, "H.grid") if kind == "grid" else x, None, "N", "K")
    if kind == "once":
        r = g.new_input((1, 128, 64), "bfloat16", name="R")
        g.mark_output(g.matmul(g.relu(g.matmul(k, g.transpose(r))), r))
        br = b.load("R", None, "M", "K")
        y = b.op("matmul", b.op("relu", b.op("matmul", bk, br, over="K")), br, over="M")
        b.store("Z1", b.acc(y, "M.loop"), None, "N", "K")
    return g, one_kernel(g, b.step(), "Z", *["Z1"] * (kind == "once"))


@pytest.mark.parametrize(("kind", "message"), [
    ("resident", "stays, and differs along H"),
    ("once", "is no sum over H, and every visit adds"),
    ("apart", "is no sum over H, and every visit adds"),
    ("cluster", "a cluster divides H"),
    ("grid", "the grid divides H, along which a block visits all"),
])  # fmt: skip
def test_visits_that_no_kernel_makes(kind: str, message: str) -> None:
    graph, mu = visiting(kind)
    assert verify(graph, mu)
    with pytest.raises(LoweringError, match=message):
        recognized_sums(mu.steps[0], Setting(H200, mu.tensors))
    with pytest.raises(LoweringError):
        make_plan(mu.steps[0], mu.tensors, H200)


def names(plan: SumsPlan, loads: Any) -> str:
    return "".join(plan.arguments[plan.view(i).argument].name for i in loads)


def test_roles_of_the_gradient_of_queries() -> None:
    p = Backward().plan()
    assert (p.rows, p.loop, p.visits) == ("M", "N", None)
    assert names(p, p.residents) == "in0in3" and names(p, p.streams) == "in1in4"
    assert len(p.row_vectors) == 2 and p.loop_vectors == ()
    assert [len(x.slots) for x in p.phases] == [1, 1] and p.schedule.overlapped
    [sight] = p.sights
    assert not sight.across and loops(p) == [4, 2]


def test_roles_of_the_gradients_of_keys_and_values() -> None:
    """Rows are keys, the loop walks over the queries of every head of the group."""
    p = Backward("KV").plan()
    assert (p.rows, p.loop, p.visits, p.turns) == ("N", "M", "B3", 2)
    assert len(p.sums) == len(p.operands) == 2 and len(p.loop_vectors) == 2
    [sight] = p.sights
    assert sight.across and loops(p) == [4, 2]
    assert p.registers == (232, 40) and p.threads == 384


def test_rows_are_those_that_masks_count() -> None:
    """Fewer positions than query heads of a group, and positions that are open."""
    for rows in (3, cs.symbol("L", 128)):
        p = Backward(group=7, rows=rows).plan(rows=64)
        assert p.rows == "M" and [s.mask.rows for s in p.sights] == ["M"]
        assert p.program.tile[p.rows] == 64 and p.batch == ("B", "B2", "B3")


def test_registers_decide_what_is_ahead() -> None:
    """Accumulators of 128 columns twice leave no room for the next tile's scores."""
    assert Backward("KV").plan().schedule.overlapped
    wide = Backward("KV", width=128, value_width=128).plan()
    assert not wide.schedule.overlapped and exceeded(wide, H200) is None
    limit = exceeded(replace(wide, schedule=replace(wide.schedule, overlapped=True)), H200)
    assert limit is not None and limit.name == "accumulators exceed the registers"


@pytest.mark.parametrize(("changes", "message"), [
    ({"stages": 1}, "1 stage"),
    ({"row_groups": 1}, "a tile of 128 rows for 1 warpgroup"),
    ({"stages": 30}, "do not fit into"),
])  # fmt: skip
def test_schedules_that_no_kernel_has(changes: dict[str, int], message: str) -> None:
    p = Backward().plan()
    limit = exceeded(replace(p, schedule=replace(p.schedule, **changes)), H200)
    assert limit is not None and message in limit.message and limit.error is ScheduleError


def biased() -> KernelGraph:
    g = new_kernel_graph()
    q, k = (g.new_input((2, n, 64), name=x) for x, n in (("Q", 64), ("K", 128)))
    bias = g.new_input((64, 128), name="bias")
    s = g.matmul(q, g.transpose(k))
    g.mark_output(g.matmul(g.mul(s, g.add(s, bias)), k))
    return g


def test_a_matrix_beside_the_scores_is_refused() -> None:
    flat = Flat(biased().expanded())
    found = search_region(flat.segment(flat.order).region, H200, LOWERED)
    assert isinstance(found.error, SearchError | LoweringError)


# -------------------------------------------------------------------------------------------- code

CASES: dict[str, tuple[Backward, int, int]] = {
    "queries_wide": (Backward(width=128, value_width=128, group=0), 128, 64),
    "queries_lengths": (Backward(mask="lengths", rows=100), 64, 128),
    "keys_wide": (Backward("KV", width=128, value_width=128), 128, 64),
    "keys_odd": (Backward("KV", 1, 3, 70, 90, 40, 72, "", "float16"), 64, 64),
}


@cache
def compiled_case(name: str) -> Any:
    from tests.plans import compiled

    backward, rows, tile = CASES[name]
    plan = backward.plan(rows, tile)
    return plan, compiled(plan)


def in_flight(ptx: str) -> list[str]:
    """Instructions that touch accumulators of a product that has not been waited for."""
    groups: list[set[str]] = [set()]
    found: list[str] = []
    for line in map(str.strip, ptx.splitlines()):
        registers = re.findall(r"%r\d+", line)
        if line.startswith("wgmma.mma_async"):
            groups[-1].update(re.findall(r"%r\d+", line[: line.index("}")]))
        elif line.startswith("wgmma.commit_group"):
            groups.append(set())
        elif line.startswith("wgmma.wait_group"):
            groups = groups[-1 - int(line.rstrip(";").split()[-1]) :]
        elif any(r in g for g in groups for r in registers):
            found.append(line)
    return found


@needs_sass
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, golden: Any) -> None:
    pytest.importorskip("cutlass")
    plan, artifact = compiled_case(name)
    r = artifact.resources
    assert r.stack_bytes == 0 and r.shared_bytes <= plan.shared_bytes
    # one wait for the sums, one after each phase, and one at the end; where the compiler serialises
    # products, there is one for each instruction
    assert artifact.sass.count("WARPGROUP.DEPBAR") <= len(plan.phases) + 2
    assert in_flight(artifact.ptx) == []
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    lines += [f"{k:<12}{r.instructions[k]:>4}" for k in KEPT if r.instructions.get(k)]
    golden(f"instructions/attention_gradient_{name}.txt", "\n".join(lines))
    golden(f"plans/attention_gradient_{name}.txt", plan_text("k0", plan))
