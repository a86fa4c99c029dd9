"""Products after the loop and reductions along the columns: search, plans, compiled kernels.

Results on the GPU are in test_gpu.py; here is what needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("cutlass")

from cutesuper.errors import LoweringError, ScheduleError
from cutesuper.ir.dims import Symbol, ceil_div
from cutesuper.ir.graph import KernelGraph
from cutesuper.pipeline import Options, choose
from cutesuper.report import plan_text
from cutesuper.search.cuts import Flat
from cutesuper.search.region import Found, SearchOptions, search_region
from cutesuper.search.search import SearchResult, search
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.matmul.plan import MAX_HIDDEN, MatmulPlan, hidden_width
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.matmul.sizes import ROW_TILES, _row_choices
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier
from cutesuper.verify.numeric import compare
from tests import zoo
from tests.chains import (
    Chain,
    Shapes,
    batched_lora,
    batched_softmax,
    chains,
    gated_hidden,
    planned,
    product_and_maximum,
    reduced,
    reduced_twice,
    stored_between,
    three_in_a_row,
    two_updates,
)
from tests.mugraphs import Block, mugraph
from tests.plans import compiled, whole_plan
from tests.test_lowering import KEPT, check_resources, needs_sass

# ------------------------------------------------------------------------------------------ search

M = Symbol("M", 16)


#: programs of which one kernel is chosen, by the element type
CHAINS: dict[str, Callable[[str], KernelGraph]] = {
    "lora": lambda t: zoo.lora(16, 4096, 4096, dtype=t),
    "lora, (N, K)": lambda t: zoo.lora(16, 4096, 4096, dtype=t, transposed=True),
    "lora, scale": lambda t: zoo.lora(16, 4096, 4096, 8, t, scale=2.0),
    "lora, norm": lambda t: zoo.lora(16, 4096, 4096, 24, t, norm=True, transposed=True),
    "lora, symbolic": lambda t: zoo.lora(M, 1000, 1000, 40, t),
    "lora, rank 256": lambda t: zoo.lora(16, 1024, 1024, 256, t),
    "lora, batched": batched_lora,
    "two updates": two_updates,
    "two operands": lambda t: zoo.two_operands(64, 4096, 4096, dtype=t),
    "two operands, few rows": lambda t: zoo.two_operands(16, 4096, 4096, 40, t),
    "two operands, relu": lambda t: zoo.two_operands(M, 1024, 1024, 24, t, act="relu"),
    "mlp": lambda t: zoo.relu_mlp(64, 1024, 64, 128, t),
    "mlp, hidden 8": lambda t: zoo.relu_mlp(M, 1024, 8, 1000, t),
    "gated hidden": gated_hidden,
    "dlrm": lambda t: zoo.dlrm(2048, 512, 256, t),
    "dlrm, symbolic": lambda t: zoo.dlrm(M, 520, 200, t),
    "softmax": lambda t: zoo.softmax_linear(64, 512, 1000, t),
    "softmax, batched": batched_softmax,
    "norm": lambda t: zoo.rms_norm_of_product(M, 512, 256, t),
    "product and maximum": product_and_maximum,
}


def found(graph: KernelGraph) -> SearchResult:
    """The programs found that the lowering can run; nothing that was found is wrong."""
    verifier = Verifier(graph)
    result = search(
        graph, H200, options=SearchOptions(lowered=True),
        verify=lambda mu: bool(verifier.check(mu, bound=False)),
    )  # fmt: skip
    assert result.statistics.rejected == 0
    return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_one_kernel(name: str, dtype: str) -> None:
    result = found(CHAINS[name](dtype))
    assert len(result.candidates[0].mugraph.steps) == 1
    for c in result.candidates:  # the search offers what the schedule can plan
        for step in c.mugraph.steps:
            make_plan(step, c.mugraph.tensors, H200)


def best_plan(graph: KernelGraph, **options: Any) -> MatmulPlan:
    [plan] = choose(graph, Options(H200, **options))[1].plans
    assert isinstance(plan, MatmulPlan)
    return plan


def as_one_kernel(graph: KernelGraph) -> Found:
    """The whole graph as one region."""
    flat = Flat(graph.expanded())
    return search_region(flat.segment(flat.order).region, H200, SearchOptions(lowered=True))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (zoo.lora(16, 1024, 1024, 264), "264 elements between two products; a block holds 256"),
        (zoo.relu_mlp(16, 1024, 264, 64), "264 elements between two products"),
        (three_in_a_row(), "a product of a product of a product: another kernel"),
        (stored_between(), "what lies between two products is not stored"),
        (reduced_twice(), "of what a matrix product gives: another kernel"),
        (zoo.dlrm(64, 512, 2056), "2056 columns are reduced; a cluster holds 2048"),
        (zoo.softmax_linear(64, 512, 4096), "4096 columns are reduced"),
    ],
)
def test_what_one_kernel_cannot_do_is_cut(graph: KernelGraph, message: str) -> None:
    refused = as_one_kernel(graph)
    assert not refused.ways and message in str(refused.error)
    assert len(choose(graph, Options(H200))[1].plans) >= 2


@pytest.mark.parametrize("graph", [zoo.lora(16, 512, 256, 12), zoo.relu_mlp(16, 512, 12, 64)])
def test_operands_along_odd_hidden_extents_are_copied(graph: KernelGraph) -> None:
    """A [512, 12] has rows of 24 bytes, those of B [12, N] are multiples of 16. What lies behind a
    narrow box would be written by threads, while the tensor cores read it: boxes are 64 wide."""
    plan = whole_plan(graph)
    [copied] = plan.copied.values()
    assert plan.arguments[copied.argument].shape == (512, 12)
    assert not plan.narrow and plan.copiers > 0


def test_a_cluster_multiplies_parts_only_where_that_is_linear() -> None:
    """``relu(X A) B`` of partial X A would be wrong: no cluster along K; with a scale there is."""
    for way in as_one_kernel(zoo.relu_mlp(16, 4096, 64, 4096)).ways:
        assert way.programs[0].blocks() > 0 and not way.programs[0].axes_of("K")[1:]
    plan = best_plan(zoo.lora(16, 4096, 4096, scale=0.5))
    assert plan.cluster > 1 and not plan.tails[0].once


# ------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("chain", "graph"),
    [
        (Chain(m=17, n=200, rank=24, cluster=2), zoo.lora(17, 512, 200, 24)),
        (Chain(rank=72, transposed=True), zoo.lora(16, 512, 64, 72, transposed=True)),
        (Chain(kind="two", cluster=2, act="relu"), zoo.two_operands(16, 512, 64, act="relu")),
        (Chain(kind="mlp", act="relu"), zoo.relu_mlp(16, 512, 16, 64)),
    ],
)
def test_programs_by_hand_are_right(chain: Chain, graph: KernelGraph) -> None:
    report = compare(graph, mugraph(graph, chain.block().step()))
    assert report, report.message


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("kind", ["lora", "two"])
def test_what_is_added_up_shares_accumulators(kind: str, cluster: int) -> None:
    p = Chain(kind=kind, cluster=cluster).plan()
    [tail] = p.tails
    [(_, final)] = p.products
    assert tail.final == final and p.program.ops[final].kind == "add"
    assert list(p.finals) == [final]
    assert p.outputs[0].expression.trivial and p.outputs[0].expression.leaves == (final,)
    assert p.accumulators == 16 * (64 + (64 if kind == "lora" else 0))
    assert (tail.hidden, tail.extent, tail.blocks, tail.padded) == ("R", 16, 1, 64)


def test_two_updates_of_one_product_share_its_accumulators() -> None:
    """Both or none: an accumulator that nobody reads would be lost."""
    p = best_plan(two_updates("float16"))
    [output] = p.outputs
    assert set(output.expression.leaves) == set(p.finals)
    assert {t.final for t in p.tails} <= set(p.finals)


def test_other_uses_keep_accumulators_apart() -> None:
    b = Chain().block()
    total = b.ops.pop()  # the store
    added = b.ops.pop()
    xw, hb = added.inputs
    b.store("Z", b.op("mul", b.op("add", xw, hb), xw), "M", "N")
    assert total.kind == "store"
    p = planned((b, Chain().shapes()))
    assert len(p.finals) == 2 and p.tails[0].final != p.products[0][1]
    assert p.outputs[0].expression.text(["x", "h"]) == "mul(add(x, h), x)"


def test_once_is_what_the_cluster_does_not_share() -> None:
    """T B is complete in every block: one of them adds it. H B is a part in each."""
    assert Chain(kind="two", cluster=2).plan().tails[0].once
    assert not Chain(kind="two").plan().tails[0].once
    assert not Chain(kind="lora", cluster=2).plan().tails[0].once


def test_row_operands_in_memory() -> None:
    """A bulk load brings what lies as the tensor cores want it; threads write the rest."""

    def is_loaded(**changes: Any) -> bool:
        p = Chain(kind="two", **changes).plan()
        assert p.hidden_blocks == 0 and not p.tails[0].products
        return p.loaded(p.tails[0]) is not None

    assert is_loaded() and is_loaded(cluster=2) and is_loaded(rank=200, transposed=True)
    assert not is_loaded(act="relu")
    assert not is_loaded(rows_last=True)
    assert not is_loaded(rank=12)  # rows of 24 bytes
    p = Chain().plan()
    assert p.loaded(p.tails[0]) is None


@pytest.mark.parametrize(
    ("rank", "staged"), [(8, 16), (16, 16), (24, 32), (40, 64), (64, 64), (72, 128), (256, 256)]
)
def test_short_hidden_labels_are_staged_narrow(rank: int, staged: int) -> None:
    """Behind them lies the ring of W. Without W nothing does: whole blocks of 64."""
    assert hidden_width(rank, narrow=True) == staged
    assert Chain(rank=rank).plan().stage_bytes == 2 * 128 * (64 + staged + 16)
    padded = 64 * ceil_div(rank, 64)
    assert Chain(rank=rank, kind="mlp").plan().stage_bytes == 2 * 128 * (padded + 16)
    assert Chain(rank=rank).plan().tail_bytes == 2 * (16 + 64) * padded


def test_what_a_narrow_box_reads_on_is_shared_memory() -> None:
    """The last box ends 64 - width columns early; at least two stages of W follow it."""
    for rank in range(8, 65, 8):
        p = Chain(rank=rank).plan()
        missing = 2 * p.tile[2] * (64 - p.tails[0].width(narrow=True))
        assert missing <= 2 * p.tile[2] * 64 * p.blocks_n * p.schedule.stages


def test_gated_hidden_products_share_a_tail() -> None:
    p = best_plan(gated_hidden("float16"))
    [tail] = p.tails
    assert len(tail.products) == 2 and len(p.hidden) == 2 and p.hidden_blocks == 2
    assert tail.source.text(["g", "u"]) == "mul(silu(g), u)"


def test_warpgroups_share_the_blocks_of_every_product() -> None:
    narrow = Chain(m=64, tile_m=64, n=128, tile_n=128)
    assert narrow.plan().shared_blocks == [2, 1] and narrow.plan().schedule.warpgroups == 1
    with pytest.raises(ScheduleError, match=r"1 block\(s\) of 64 columns cannot be shared out ov"):
        narrow.plan(schedule=MatmulSchedule(3, warpgroups=2))
    wide = replace(narrow, m=128, tile_m=128)
    with pytest.raises(ScheduleError, match="accumulators need two consumer warpgroups"):
        wide.plan()
    assert replace(wide, kind="two").plan().schedule.warpgroups == 2  # H needs no accumulators
    assert replace(narrow, rank=128).plan().schedule.warpgroups == 2


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reductions_along_the_columns(op: str, wide: bool) -> None:
    p = planned(reduced(op, act="exp", wide=wide))
    [r] = p.reductions
    assert r.op == ("max" if op == "max" else "sum")
    assert r.scale == (1 / 64 if op == "mean" else 1.0)
    assert r.source.text(["a"]) == "exp(a)"
    assert p.column_cluster == 1 and p.cluster_size == 1 and not p.has_helpers
    assert (p.column in p.outputs[0].view.labels) == wide
    shared = planned(reduced(op, n=256, wide=wide, N_cluster=4))
    assert (shared.cluster, shared.column_cluster, shared.cluster_size) == (1, 4, 4)
    assert shared.program.ops[shared.reductions[0].value].kind == "cluster_reduce"
    assert shared.exchange_bytes == 0
    assert shared.reduction_bytes(shared.schedule) > p.reduction_bytes(p.schedule)


def test_a_reduction_may_need_an_earlier_one() -> None:
    p = best_plan(zoo.softmax_linear(64, 512, 256))
    top, total = p.reductions
    assert (top.op, total.op) == ("max", "sum")
    assert total.source.text(["a", "t"]) == "exp(sub(a, t))" and top.value in total.source.leaves


# --------------------------------------------------------------------------------------- refusals


def two_over_one_label() -> tuple[Block, Shapes]:
    b = Chain().block()
    h = next(i for i, op in enumerate(b.ops) if op.kind == "accumulate" and "R" in op.dims)
    b.store("Y", b.op("matmul", h, b.load("C", "R", "N"), over="R"), "M", "N")
    return b, {**Chain().shapes(), "C": (16, 64), "Y": (16, 64)}


def hidden_is_stored() -> tuple[Block, Shapes]:
    b = Chain().block()
    h = next(i for i, op in enumerate(b.ops) if op.kind == "accumulate" and "R" in op.dims)
    b.store("H", h, "M", "R")
    return b, {**Chain().shapes(), "H": (16, 16)}


def hidden_is_divided() -> tuple[Block, Shapes]:
    """The blocks of a grid take a part of R each and leave partial results."""
    axes: dict[str, int | None] = {"R.grid": 2, "K.loop": 4}
    b = Block({"M": 16, "K": 512, "N": 64, "R": 32}, axes, {"M": 16, "K": 128, "N": 64, "R": 16})
    h = b.acc(b.op("matmul", b.load("X", "M", "K"), b.load("A", "K", "R"), over="K"), "K.loop")
    b.store("Z", b.op("matmul", h, b.load("B", "R", "N"), over="R"), "R.grid", "M", "N")
    return b, {"X": (16, 512), "A": (512, 32), "B": (32, 64), "Z": (2, 16, 64)}


def mixed_orders() -> tuple[Block, Shapes]:
    """Two products along one hidden label, whose operands are stored in different orders."""
    b = Block({"M": 16, "K": 512, "N": 64, "R": 64}, {"K.loop": 4},
              {"M": 16, "K": 128, "N": 64, "R": 64})  # fmt: skip
    x = b.load("X", "M", "K")
    gate = b.close(b.op("matmul", x, b.load("A", "K", "R"), over="K"), "K")
    up = b.close(b.op("matmul", x, b.load("C", "R", "K"), over="K"), "K")
    y = b.op("matmul", b.op("mul", gate, up), b.load("B", "R", "N"), over="R")
    b.store("Z", y, "M", "N")
    return b, {"X": (16, 512), "A": (512, 64), "C": (64, 512), "B": (64, 64), "Z": (16, 64)}


def grid_of_columns() -> tuple[Block, Shapes]:
    b, shapes = reduced(n=128, N_grid=2)
    b.ops.pop()
    b.store("Z", len(b.ops) - 1, "N.grid", "M")
    return b, {**shapes, "Z": (2, 16)}


def cluster_along_both() -> tuple[Block, Shapes]:
    b, shapes = reduced(K_cluster=2)
    return b, {**shapes, "X": (16, 1024), "W": (1024, 64)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(rank=264), "contracts R of 264; a block has to hold all of it"),
        (hidden_is_divided, "contracts R of 32; a block has to hold all of it, and can hold 256"),
        (two_over_one_label, "two products after the loop contract one label"),
        (hidden_is_stored, "store of H: what lies between two products (R) stays in the block; st"),
        (mixed_orders, "the column operands must all be contiguous along R, or all along K"),
        (grid_of_columns, "sum over N (operation 4) needs all columns in one block, or in one cl"),
        (cluster_along_both, "sum over N (operation 5) of products that a cluster shares along K"),
    ],
)
def test_chains_that_are_refused(make: Any, message: str) -> None:
    made = make()
    with pytest.raises(LoweringError) as caught:
        made.plan() if isinstance(made, Chain) else planned(made)
    assert str(caught.value).startswith("kernel chain") and message in str(caught.value)


def test_tiles_that_hold_too_much() -> None:
    with pytest.raises(ScheduleError, match=r"98304 accumulators \(256x128 for each of 1 result"):
        Chain(m=256, tile_m=256, n=128, tile_n=128, rank=256).plan()
    with pytest.raises(ScheduleError, match="shared memory; use smaller tiles"):
        Chain(m=64, tile_m=64, n=256, tile_n=256, rank=MAX_HIDDEN, kind="two").plan()


# ----------------------------------------------------------------------------------------- reports


def test_reports_tell_what_happens_after_the_loop() -> None:
    text = plan_text("k0", Chain(cluster=2).plan())
    assert "W (64 columns a box), A for hidden0 (16 columns a box), X" in text
    assert (
        "after the loop: hidden0 [M, R 16], rounded to float16, times B, added to accumulator0 by "
        "every block with its part"
    ) in text
    assert "barriers: full, empty, received, after_full;" in text
    text = plan_text("k0", Chain(kind="two", cluster=2).plan())
    assert "T [M, R 16], by a bulk load, times B, added to accumulator0 by one block" in text
    text = plan_text("k0", Chain(kind="mlp", act="relu").plan())
    assert "bytes: A for hidden0 (64 columns a box), X" in text
    assert "relu(hidden0) [M, R 16], rounded to float16, times B, into accumulator0" in text
    text = plan_text("k0", planned(reduced("mean", n=128, act="relu", N_cluster=2)))
    assert "blocks in clusters of 2" in text
    assert "reduction0 along N: sum of relu(accumulator0) * 0.0078125" in text
    assert "each block has 64 columns and sends what it has reduced of 16 rows to all 2" in text
    assert "Z = reduction0, once per row" in text
    assert "barriers: full, empty, columns_reduced;" in text


# ---------------------------------------------------------------------------------------- compiled

COMPILED: dict[str, Chain | tuple[Block, Shapes]] = {
    "narrow, cluster": Chain(n=128, cluster=2),
    "narrow (N, K)": Chain(rank=24, transposed=True, dtype="bfloat16"),
    "several boxes": Chain(rank=136, act="silu"),
    "loaded, cluster": Chain(kind="two", rank=40, cluster=2),
    "written": Chain(kind="two", rank=12, act="relu", dtype="bfloat16"),
    "mlp, two warpgroups": Chain(m=64, tile_m=64, kind="mlp", act="relu", rank=128, tile_n=256,
                                 n=256),
    "one block reduces": reduced("mean"),
    "a cluster reduces": reduced("max", n=200, wide=True, N_cluster=4),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_chains_compile(name: str) -> None:
    made = COMPILED[name]
    plan = made.plan() if isinstance(made, Chain) else planned(made)
    r = check_resources(plan, compiled(plan))
    if r.source != "sass":
        return
    counts = r.instructions
    per_k = plan.tile[2] // 16
    looped = per_k * (sum(plan.shared_blocks[1:]) + len(plan.products) * plan.blocks_n)
    after = sum(t.padded // 16 * plan.blocks_n for t in plan.tails)
    whole = (looped + after) // plan.schedule.warpgroups
    if any(t.once for t in plan.tails):  # a branch of its own, which the compiler may repeat
        assert counts["HGMMA"] >= whole
    else:
        assert counts["HGMMA"] == whole
    assert counts["UTMALDG"] >= len(plan.rows) + len(plan.columns) + len(plan.hidden)
    assert bool(counts.get("STAS")) == (plan.cluster_size > 1)


GOLDEN = {
    "lora_16x4096x4096": zoo.lora(16, 4096, 4096),
    "dlrm_2048x512x256": zoo.dlrm(2048, 512, 256),
}


@needs_sass
@pytest.mark.parametrize("name", GOLDEN)
def test_plans_and_instructions_of_chains(name: str, golden: Any) -> None:
    plan = best_plan(GOLDEN[name])
    golden(f"plans/{name}.txt", plan_text("k0", plan))
    r = check_resources(plan, compiled(plan))
    lines = [f"{r.threads} threads, {r.shared_bytes} bytes of shared memory, no stack"]
    lines += [f"{k:<12}{r.instructions[k]:>4}" for k in KEPT if r.instructions.get(k)]
    golden(f"instructions/{name}.txt", "\n".join(lines))


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [(1, (8,)), (64, (8, 16, 32, 64)), (100, (8, 16, 32, 64, 128)), (999, ROW_TILES)],
)
def test_divided_rows_are_tried_up_to_the_tile_that_covers_them(
    rows: int, tiles: tuple[int, ...]
) -> None:
    form = MatmulForm("M", "N", "K", (), reduced=True)
    assert set(_row_choices(form, rows, 64, H200)) == set(tiles)


# ------------------------------------------------------------------------------- random programs


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_random_chains(graph: KernelGraph) -> None:
    """Verified, within the limits of a block, and in float64 what the definition says."""
    choice = choose(graph, Options(H200))[1]
    assert choice.verification
    for plan in choice.plans:
        if isinstance(plan, MatmulPlan):
            assert plan.shared_bytes <= H200.shared_bytes and plan.threads <= 1024
            assert plan.accumulators <= 256 * 128
            used = {i for o in plan.outputs for i in o.expression.leaves}
            used |= {i for r in plan.reductions for i in r.source.leaves}
            assert set(plan.finals) <= used  # no accumulator is computed in vain
    report = compare(graph, choice.candidate.mugraph)
    assert report, report.message
