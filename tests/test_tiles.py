"""Tiles that blocks share, walk and store in pieces: choices, refusals, what the compiler makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cutesuper.errors import ScheduleError
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import new_kernel_graph
from cutesuper.report import plan_text
from cutesuper.skeletons.matmul.plan import MatmulPlan, grid_shape
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200, H200
from tests.plans import Linear, compiled, specs, whole_mugraph

LARGE = Linear(m=4096, k=4096, n=4096, tile_m=128, tile_n=256, tile_k=64)
NK = replace(LARGE, transposed=True)
#: helper warps read the stages, since nobody knows how many rows there are
OPEN = replace(LARGE, m=Symbol("M", 4096))


def run_twice(linear: Linear, rows: int, **knobs: Any) -> None:
    """Numbers against float64, and the same bits in 200 launches."""
    plan = with_knobs(linear, **knobs)
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, linear.dtype)
    torch.manual_seed(rows)
    shapes = {n: [rows if isinstance(d, Symbol) else d for d in s]
              for n, s in linear.shapes().items()}  # fmt: skip
    data = {n: torch.randn(*s, device="cuda").to(dtype) for n, s in shapes.items()}
    kernel = compiled(plan).load()
    scratch = [
        torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in plan.scratch
    ]
    first = data["Z"]
    for launch in range(200):
        data["Z"] = torch.full(shapes["Z"], torch.nan, dtype=dtype, device="cuda")
        kernel(*(data[a.name] for a in plan.arguments), *scratch)
        first = data["Z"] if launch == 0 else first
        assert torch.equal(first.view(torch.int16), data["Z"].view(torch.int16))

    def expected(kind: Any) -> Any:
        x, w = data["X"].to(kind), data["W"].to(kind)
        scale = torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6).to(kind)
        row = x * data["G"].to(kind) if linear.gain else x
        z = (row * scale if linear.norm else row) @ (w.T if linear.transposed else w)
        z = z + data["B"].to(kind) if linear.bias else z
        return z + data["R"].to(kind) if linear.residual else z

    exact, eager = expected(torch.float64), expected(dtype).double()
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    assert (first.double() - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2 * ulp


def with_knobs(linear: Linear, **knobs: Any) -> MatmulPlan:
    """A plan with some knobs other than the default ones."""
    return linear.plan(schedule=replace(linear.plan().schedule, **knobs))


# ----------------------------------------------------------------------------------------- choices


def test_many_tiles_are_walked() -> None:
    plan = LARGE.plan()
    s = plan.schedule
    assert (s.share_rows, s.persistent, s.helpers, s.bulk_store) == (1, 132, 2, True)
    assert s.reduces_once and plan.launched == 132 and plan.meets
    assert plan.registers == (208, 88, 88) and plan.threads == 384
    assert [s.shape for s in plan.scratch] == [(4096,), (1,)]  # a sum for each row, a counter
    text = plan_text("k", plan)
    assert "statistic0 per row, by one block, from device memory: sum of square(X)" in text
    assert "reduced" not in text


def test_small_tiles_that_are_walked_come_in_pairs() -> None:
    """Not large ones, whose products hide the loads, nor those that blocks have one of."""
    square = replace(LARGE, tile_n=128)
    assert square.plan().schedule.share_rows == 2
    assert replace(square, norm=False).plan().schedule.share_rows == 2
    assert replace(LARGE, norm=False).plan().schedule.share_rows == 1
    assert replace(square, m=512).plan().schedule.share_rows == 1
    assert replace(square, tile_m=64).plan().schedule.share_rows == 1


def test_a_gain_multiplies_columns_of_bfloat16() -> None:
    plan = replace(LARGE, gain=True, dtype="bfloat16").plan()
    assert plan.schedule.scales_columns and plan.schedule.reduces_once and not plan.rewrites
    assert plan.factor is not None and plan.factor.text(["g"]) == "g"
    assert "columns, multiplied in registers: by G" in plan_text("k", plan)
    # two blocks of 64 columns each thread: words of a chunk beside 128 sums
    assert plan.thread_accumulators == 128 + 32
    for other in (
        replace(LARGE, gain=True),  # float16 has no room for weights times a gain
        replace(LARGE, gain=True, dtype="bfloat16", m=64, tile_m=64),  # few rows are rewritten
        replace(NK, gain=True, dtype="bfloat16", k=4100),  # threads copy them
    ):
        assert not other.plan().schedule.scales_columns


@pytest.mark.parametrize(
    ("factor", "scales"),
    [
        (lambda g, x, gain: x * (gain + 1.0), True),
        # behind the last element, where the gain is 0 as well, they are infinite
        (lambda g, x, gain: x * g.rsqrt(gain), False),
        (lambda g, x, gain: x / gain, False),
        # helpers read two tensors of rows, of which products take what the first one becomes
        (lambda g, x, gain: (x + g.new_input((256, 1000), "bfloat16")) * gain, False),
    ],
)
def test_factors_that_columns_are_multiplied_by(factor: Any, scales: bool) -> None:
    g = new_kernel_graph()
    x, gain, w = (g.new_input(s, "bfloat16") for s in ((256, 1000), (1000,), (1000, 512)))
    g.mark_output(g.matmul(factor(g, x, gain), w))
    mu = whole_mugraph(g, clusters=False)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, MatmulPlan) and plan.tile[2] * plan.iterations > 1000
    assert plan.schedule.scales_columns == scales == (not plan.rewrites)


@pytest.mark.parametrize("share", [4, 8])
def test_clusters_that_do_not_all_run_at_once_do_not_meet(share: int) -> None:
    """30 clusters of 4 blocks run on 132 multiprocessors, and 15 of 8."""
    knobs = {"share_rows": share, "persistent": 132 // share * share, "stages": 3, "head": 3}
    with pytest.raises(ScheduleError, match=f"blocks in clusters of {share} wait for the statis"):
        with_knobs(LARGE, **knobs)
    assert with_knobs(LARGE, **(knobs | {"persistent": 120})).schedule.reduces_once


def test_tiles_that_helpers_read_are_walked_in_pairs() -> None:
    plan = OPEN.plan()
    s = plan.schedule
    assert (s.share_rows, s.persistent, s.helpers, s.bulk_store) == (2, 132, 2, True)
    assert grid_shape(plan) == (132, 1, 1)
    assert plan.threads == 384  # helpers and producer in one warpgroup
    consumers, helpers, producer = plan.registers or (0, 0, 0)
    # 384 threads start with 168 each; asking for more than there are waits for ever
    assert helpers == producer and 256 * consumers + 128 * helpers <= 384 * 168
    text = plan_text("k", plan)
    assert "blocks in clusters of 2" in text and "2 helper warps" in text
    assert "2 blocks along N load the row tile together" in text
    assert "clusters walk over groups of 22 tiles along M, step by step along N" in text
    assert "32x64 a bulk store" in text and "reduced" in text


def test_few_tiles_that_helpers_read_are_shared_only() -> None:
    plan = replace(OPEN, m=Symbol("M", 1024)).plan()  # 128 tiles on 132 multiprocessors
    assert (plan.schedule.share_rows, plan.schedule.persistent) == (2, 0)
    assert grid_shape(plan) == (16, 8, 1)


def test_a_prologue_needs_all_helpers() -> None:
    plan = replace(LARGE, gain=True).plan()
    assert (plan.schedule.share_rows, plan.schedule.helpers) == (2, 4)


def test_dependent_launches_load_early_where_all_tiles_run_at_once() -> None:
    few = replace(OPEN, m=Symbol("M", 1024)).plan(dependent_launch=True).schedule
    assert (few.share_rows, few.persistent, few.bulk_store) == (1, 0, True)
    many = OPEN.plan(dependent_launch=True).schedule
    assert (many.share_rows, many.persistent) == (2, 132)


def test_small_tiles_and_split_sums_stay_alone() -> None:
    small = Linear(m=64, tile_m=64).plan()
    assert small.schedule.share_rows == 1 and small.schedule.bulk_store
    split = Linear(m=128, k=1024, tile_m=128, tile_n=128, tile_k=64, cluster=2).plan()
    assert split.schedule.share_rows == 1 and not split.schedule.bulk_store


@pytest.mark.parametrize(
    ("tiles", "blocks"), [(1, 1), (2, 2), (3, 1), (7, 1), (8, 2), (9, 2), (15, 2)]
)
def test_pairs_leave_at_most_an_eighth_empty(tiles: int, blocks: int) -> None:
    plan = replace(OPEN, n=256 * tiles).plan()
    assert plan.schedule.share_rows == blocks


def test_walks_with_helpers_need_more_iterations_than_stages() -> None:
    short = replace(OPEN, k=256).plan()
    assert short.iterations == 4 and short.schedule.persistent == 0
    plain = replace(LARGE, k=64, norm=False).plan()
    assert plain.iterations == 1 and plain.schedule.persistent == 132
    assert (plain.schedule.stages, plain.schedule.pieces) == (2, 4)  # two tiles ahead


def test_pieces_take_shared_memory() -> None:
    plan = LARGE.plan()
    assert plan.store_bytes(plan.schedule) == 2 * 2 * 32 * 64 * 2


@pytest.mark.parametrize(
    ("linear", "knobs", "message"),
    [
        (Linear(m=128, k=1024, tile_m=128, tile_n=128, tile_k=64, cluster=2),
         {"share_rows": 2}, "need tiles without clusters"),
        (Linear(cluster=2), {"persistent": 132}, "need tiles without clusters"),
        (LARGE, {"share_rows": 3}, "share_rows=3; use 1, 2, 4 or 8"),
        (Linear(m=8, tile_m=8), {"share_rows": 2}, "at least 8 of the 8 rows"),
        (OPEN, {"persistent": 131}, "persistent=131 blocks are no whole clusters of 2"),
        (replace(OPEN, k=256), {"persistent": 132}, "more iterations than stages, not 4 and 4"),
        (LARGE, {"persistent": 0}, "512 blocks in clusters of 1 wait for the statistics"),
        (OPEN, {"reduces_once": True}, "needs statistics of a known number of 16-bit rows"),
        (replace(LARGE, gain=True, tile_n=128), {"scales_columns": True}, "needs bfloat16 rows"),
        (LARGE, {"helpers": 3}, "3 helper warps; use 2 or 4"),
        (Linear(), {"bulk_store": True}, "32 rows in a tile at least"),
        (OPEN, {"hand_out": True}, "h200 (sm_90a) does not hand out blocks"),
        (replace(OPEN, transposed=True), {"joint": True}, "no instruction of h200 (sm_90a) mul"),
        (LARGE, {"hand_out": True}, "hand_out=True and reduces_once=True"),
        (LARGE, {"issuer": True}, "accumulators of h200 (sm_90a) are registers of the warpgroups"),
    ],
)  # fmt: skip
def test_refusals(linear: Linear, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        with_knobs(linear, **knobs)
    assert str(caught.value).startswith("kernel linear: ") and message in str(caught.value)


def test_handed_out_tiles_are_a_block_each() -> None:
    schedule = LARGE.plan(B200).schedule
    assert not schedule.hand_out  # not measured
    plan = LARGE.plan(B200, schedule=replace(schedule, hand_out=True))
    assert schedule.persistent == 148 and grid_shape(plan) == (plan.tiles, 1, 1)
    with pytest.raises(ScheduleError, match="hand_out=True needs blocks that walk"):
        LARGE.plan(B200, schedule=replace(schedule, hand_out=True, persistent=0))


def test_joint_blocks_keep_a_half_of_the_rows() -> None:
    pair = NK.plan(B200).schedule
    assert pair.share_rows == 2 and not pair.joint  # not measured
    plan = NK.plan(B200, schedule=replace(pair, joint=True))
    plain = NK.plan(B200, schedule=pair)
    assert plan.held_rows == plan.tile[0] // 2 == plain.held_rows // 2
    stage = plan.element_bytes * plan.tile[2] * plan.held_rows
    assert plain.shared_bytes - plan.shared_bytes == 4 * 8192 == pair.stages * stage


@pytest.mark.parametrize(
    ("linear", "knobs"),
    [
        (NK, {"share_rows": 1}),
        (LARGE, {}),  # weights (K, N)
        (replace(NK, tile_m=80, m=1600), {"stages": 4}),  # halves that are no multiples of 16
        (replace(NK, tile_n=64), {"warpgroups": 1, "stages": 8}),  # one block of columns
        (replace(NK, turned=True, norm=False), {}),
        (replace(NK, tile_m=256, tile_n=128), {"helpers": 4}),  # two instructions
    ],
)
def test_what_two_blocks_cannot_multiply_at_once(linear: Linear, knobs: dict[str, Any]) -> None:
    plan = linear.plan(B200)
    known = {"share_rows": 2, "persistent": 0, "stages": 3, "head": 2, "joint": True}
    with pytest.raises(ScheduleError, match="joint=True needs share_rows=2 and instructions"):
        linear.plan(B200, schedule=replace(plan.schedule, **(known | knobs)))


def test_an_issuer_is_a_warp_beside_the_producer() -> None:
    schedule = LARGE.plan(B200).schedule
    assert not schedule.issuer  # not measured
    small = Linear(m=8, tile_m=8, norm=False)
    few = small.plan(B200).schedule
    assert small.plan(B200, schedule=replace(few, issuer=True)).threads == 128 + 2 * 32
    # where registers are handed over the producer has a warpgroup that is not full
    large = LARGE.plan(B200, schedule=replace(schedule, issuer=True))
    assert large.threads == LARGE.plan(B200).threads == 384


@pytest.mark.parametrize(
    ("linear", "knobs"),
    [
        (NK, {"share_rows": 2, "persistent": 0, "stages": 3, "head": 2, "joint": True}),
        (Linear(dtype="float32", norm=False, k=64, tile_k=32), {}),  # threads gather the columns
    ],
)
def test_what_an_issuer_does_not_multiply(linear: Linear, knobs: dict[str, Any]) -> None:
    schedule = replace(linear.plan(B200).schedule, issuer=True, **knobs)
    with pytest.raises(ScheduleError, match="issuer=True needs products of one block"):
        linear.plan(B200, schedule=schedule)


def test_joint_blocks_have_their_tensor_memory_alone() -> None:
    small = Linear(m=32, tile_m=32, n=512, tile_n=128, tile_k=64, transposed=True, norm=False)
    pair = MatmulSchedule(stages=2, head=2, share_rows=2)
    assert small.plan(B200, schedule=pair)
    with pytest.raises(ScheduleError, match="32768 numbers of products in a block, and 5 block"):
        small.plan(B200, schedule=replace(pair, joint=True))


def test_fp32_outputs_leave_directly() -> None:
    tensors = specs(LARGE.shapes(), "float16", Z="float32")
    plan = make_plan(LARGE.block().step("linear"), tensors, H200)
    assert isinstance(plan, MatmulPlan) and not plan.schedule.bulk_store


# --------------------------------------------------------------------------------------- compiling

CHOSEN = {
    "norm": LARGE,
    "plain": replace(LARGE, norm=False),
    "gain": replace(LARGE, gain=True),
    "columns times a gain": replace(LARGE, gain=True, dtype="bfloat16"),
    "columns of two blocks times a gain": replace(NK, gain=True, tile_m=136, dtype="bfloat16"),
    "256 rows": replace(NK, gain=True, tile_m=256, tile_n=128, dtype="bfloat16"),
    "symbolic": replace(LARGE, m=Symbol("M", 4096)),
    "transposed": replace(LARGE, transposed=True, dtype="bfloat16"),
    "residual": replace(LARGE, bias=True, residual=True),
    "pairs": replace(OPEN, m=Symbol("M", 1024)),
    "pairs that walk": replace(LARGE, tile_m=192, tile_n=128),
    "square tile": Linear(m=512, k=4096, n=4096, tile_m=128, tile_n=128, tile_k=128),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_schedules_do_not_spill(name: str) -> None:
    pytest.importorskip("cutlass")
    plan = CHOSEN[name].plan()
    artifact = compiled(plan)
    r = artifact.resources
    assert r.stack_bytes == 0 and not r.spills
    assert r.threads == plan.threads and r.shared_bytes <= plan.shared_bytes <= H200.shared_bytes
    assert artifact.launches[0].cluster == (plan.schedule.share_rows, 1, 1)
    assert ("multicast::cluster" in artifact.ptx) == (plan.schedule.share_rows > 1)
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in artifact.ptx
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in artifact.ptx


@pytest.mark.parametrize("name", ["norm", "plain", "gain", "square tile"])
def test_an_issuer_does_not_spill(name: str) -> None:
    pytest.importorskip("cutlass")
    plan = CHOSEN[name].plan(B200)
    plan = replace(plan, schedule=replace(plan.schedule, issuer=True))
    r = compiled(plan, B200.arch).resources
    assert r.stack_bytes == 0 and not r.spills and r.threads == plan.threads


# ---------------------------------------------------------------------------------------- on a GPU

RAGGED = Linear(m=300, k=1024, n=1000, tile_m=128, tile_n=128, tile_k=64)
#: helper warps read the stages
READ = {"reduces_once": False}
WALK = {"share_rows": 2, "persistent": 4, **READ}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("linear", "knobs"),
    [
        (RAGGED, {"share_rows": 2, **READ}),
        (RAGGED, {}),
        (RAGGED, {**WALK, "reduces_once": True}),
        (replace(RAGGED, gain=True, dtype="bfloat16"), {**WALK, "reduces_once": True}),
        (replace(RAGGED, gain=True, transposed=True, dtype="bfloat16"), {"persistent": 6}),
        (replace(RAGGED, n=904), {"share_rows": 2, **READ}),  # the last pair has one tile
        (RAGGED, {"share_rows": 4, **READ}),
        (RAGGED, WALK),
        (RAGGED, {**WALK, "helpers": 4}),
        (replace(RAGGED, gain=True), {**WALK, "helpers": 4}),
        (replace(RAGGED, norm=False), WALK),
        (replace(RAGGED, bias=True, residual=True, dtype="bfloat16"), WALK),
        (replace(RAGGED, transposed=True, dtype="bfloat16"), {"persistent": 6, **READ}),
        (replace(RAGGED, m=Symbol("M", 300)), WALK),
        (replace(RAGGED, tile_m=256, tile_n=128), WALK),
        (replace(RAGGED, tile_m=64), {"bulk_store": False, **WALK}),
        (replace(RAGGED, tile_m=32, tile_n=64), {}),
    ],
    ids=str,
)
def test_shared_and_walked_tiles_on_a_gpu(linear: Linear, knobs: dict[str, Any]) -> None:
    run_twice(linear, 300, **knobs)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4095, 4096])
def test_the_large_product_on_a_gpu(rows: int) -> None:
    run_twice(replace(LARGE, m=rows), rows)
