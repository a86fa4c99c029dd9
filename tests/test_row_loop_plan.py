"""Plans of the row loop: roles, refusals, sizes, knobs, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutesuper import grad
from cutesuper.errors import FormatError, LoweringError, ScheduleError
from cutesuper.ir.block import STORE
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.ir.dtypes import DType, bfloat16, float32, int64
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.pipeline import Options, choose
from cutesuper.report import plan_text
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.registry import read_schedule
from cutesuper.skeletons.rows.plan import LINE, RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule, RowSchedule
from cutesuper.skeletons.schedule import schedule_dict
from cutesuper.skeletons.variants import changed, planned, variants
from cutesuper.targets import H200
from tests.mugraphs import Block
from tests.plans import rows_plan, specs
from tests.row_programs import (
    CASES,
    Case,
    batched_sum,
    column_sum,
    layer_norm_backward,
    losses,
    over_rows,
    per_head_backward,
    rms_backward,
    rms_forward,
    rows_of,
    softmax_forward,
    squared_error,
    sum_beside_heads,
    whole,
)

M = Symbol("M", 4096)


def plan_case(case: Case, **options: Any) -> RowLoopPlan:
    _, mu = case
    plan = make_plan(mu.steps[0], mu.tensors, H200, **options)
    assert isinstance(plan, RowLoopPlan)
    return plan


@cache
def plan_of(name: str) -> RowLoopPlan:
    return plan_case(CASES[name]())


def planned_block(b: Block, shapes: dict[str, tuple[Dim, ...]], **dtypes: str) -> RowLoopPlan:
    """The plan of a block program; tensors are bfloat16 unless ``dtypes`` says otherwise."""
    plan = make_plan(b.step("rows"), specs(shapes, "bfloat16", (), **dtypes), H200)
    assert isinstance(plan, RowLoopPlan)
    return plan


# -------------------------------------------------------------------------------------------- roles


def check(p: RowLoopPlan) -> None:
    """Check what holds for every plan: each operation has one place, and nobody reads or writes
    where nothing is."""
    ops, s = p.program.ops, p.schedule
    assert sorted((p.column, *p.rows, *p.outer)) == sorted(p.program.dims)
    in_loop = [i for level in p.levels for i in level.stores]
    stores = [i for i, op in enumerate(ops) if op.kind == STORE]
    assert len(set(in_loop)) == len(in_loop) and set(in_loop) <= set(stores)
    assert (len(in_loop) < len(stores)) == bool(p.sums)
    assert sorted(i for level in p.levels for i in level.reductions) == sorted(p.complete)
    assert sorted(k for level in p.levels for k in level.sums) == list(range(len(p.sums)))
    # threads
    assert p.threads % 32 == 0 and s.resident * p.threads <= 1024
    assert p.length % s.vector == p.width % s.vector == 0
    assert s.lanes >= min(32, p.cluster) and s.chunks % p.piece == 0
    assert p.covered >= p.width > 0 and p.parts * p.width >= p.length
    assert not p.sums or p.covered % 4 == 0
    # shared memory
    assert s.resident * (p.shared_bytes + 1024) <= H200.shared_bytes
    assert p.stage_bytes % LINE == 0
    at = (s.stages - 1) * p.stage_bytes
    for i, row in p.row_bytes.items() if s.stages else ():
        assert row % 16 == 0
        last = at + (p.tile_rows - 1) * row
        assert last + p.covered * p.itemsize(p.loads[i]) <= p.ring_bytes
        at += p.tile_rows * row
    if s.stages:  # every block has some of a row, in whole bulk loads
        assert (
            (p.length - (p.parts - 1) * p.width) * 2 % 16
            == 0
            < p.length - ((p.parts - 1) * p.width)
        )
    # what meets
    assert bool(p.scratch) == p.meets == (bool(p.sums) and not s.sliced)
    if p.sums:
        assert p.slice_columns % 8 == 0
    if p.meets:
        assert p.alone or p.grid_blocks <= p.cluster * H200.clusters[p.cluster]
        partials, *counters = p.scratch
        assert partials.shape == (p.units * p.partials * len(p.sums) * p.pitch,)
        assert (partials.dtype, partials.zeroed) == ("float32", False)
        counter = [((1,), "int32", True)] if not p.alone else []
        assert [(c.shape, c.dtype, c.zeroed) for c in counters] == counter
        assert p.units * p.partials * p.parts == p.grid_blocks
    if s.sliced:
        assert not s.stages and p.units * ceil_div(p.length, p.slice_columns) <= p.grid_blocks
        assert p.slice_columns <= p.threads * s.vector


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_plan(name: str) -> None:
    check(plan_of(name))


#: column, rows, outer; for every level the names of reductions and of stores, and how many sums
ROLES: dict[str, tuple[str, str, str, list[tuple[str, str, int]]]] = {
    "rms backward": ("N", "M", "", [("mean", "", 1), ("", "dx", 0)]),
    "rms backward, long rows, symbolic": ("N", "M", "", [("mean", "", 1), ("", "dx", 0)]),
    "layer norm backward": ("N", "M", "", [("mean mean", "", 2), ("", "dx", 0)]),
    "heads": ("N", "M", "H", [("mean", "", 1), ("", "dx", 0)]),
    "batched": ("N", "M", "B", [("", "", 2)]),
    "column sum, wide": ("N", "M", "", [("", "", 1)]),
    "squared error": ("N", "M", "", [("sum", "dx", 0), ("", "", 1)]),
    "softmax, long rows": ("N", "M", "", [("max", "", 0), ("sum", "", 0), ("", "y", 0)]),
    "rms forward, long rows": ("N", "M", "", [("mean", "", 0), ("", "y rstd", 0)]),
}


@pytest.mark.parametrize("name", ROLES)
def test_roles(name: str) -> None:
    p, (column, rows, outer, levels) = plan_of(name), ROLES[name]
    assert (p.column, " ".join(p.rows), " ".join(p.outer)) == (column, rows, outer)
    names = {i: p.arguments[v.argument].name for i, v in p.stores.items()}
    found = [
        (
            " ".join(p.program.ops[i].kind for i in level.reductions),
            " ".join(names[i] for i in level.stores), len(level.sums),
        )
        for level in p.levels
    ]  # fmt: skip
    assert found == levels


def test_sums_and_whose_parts_they_have() -> None:
    heads, batched, loss = plan_of("heads"), plan_of("batched"), plan_of("squared error")
    assert heads.kept_outer == ("H",) and (heads.units, heads.partials) == (8, 16)
    assert batched.kept_outer == () and (batched.units, batched.partials) == (1, 16 * 8)
    [mean] = loss.sums
    assert mean.means == ("M",) and mean.op == "sum" and not loss.has_columns(mean)
    assert loss.program.ops[mean.final].kind == "grid_reduce"
    long = plan_of("rms backward, long rows")
    [completed] = long.complete.items()
    assert [long.program.ops[i].kind for i in completed] == ["mean", "cluster_reduce"]
    wide = plan_of("column sum, wide")
    assert (wide.column_parts, wide.cluster, wide.walkers) == (8, 1, 16)
    assert wide.grid_blocks == 16 * 8


def test_kinds_of_loads() -> None:
    p = plan_of("layer norm backward")

    def names(loads: tuple[int, ...]) -> list[str]:
        return [p.arguments[p.loads[i].argument].name for i in loads]

    assert names(p.streamed) == ["x", "dy"] and names(p.vectors) == ["w"]
    assert names(p.scalars) == ["mean", "rstd"]
    assert {p.arguments[p.loads[i].argument].name for i in p.summed_loads} == {
        "x", "dy", "mean", "rstd"
    }  # fmt: skip


def test_rows_of_several_labels() -> None:
    """Without sums all labels but the column are walked, as one index."""
    b = Block(
        {"B": 6, "M": 50, "N": 65536},
        {"B.grid": 6, "M.grid": 50, "N.cluster": 4},
        {"B": 1, "M": 1, "N": 16384},
    )
    x = b.load("x", "B", "M", "N")
    b.store("y", b.op("mul", x, whole(b, "sum", x)), "B", "M", "N")
    shape: tuple[Dim, ...] = (6, 50, 65536)
    p = planned_block(b, {"x": shape, "y": shape})
    check(p)
    assert p.rows == ("B", "M") and p.outer == () and p.walkers is None
    assert p.row_stride(p.loads[0]) == 65536
    transposed = Block(b.dims, {a.name: a.extent for a in b.axes}, b.tile)
    x = transposed.load("x", "M", "B", "N")
    transposed.store("y", transposed.op("mul", x, whole(transposed, "sum", x)), "B", "M", "N")
    p = planned_block(transposed, {"x": (50, 6, 65536), "y": shape})
    assert p.row_stride(p.loads[0]) is None and p.row_stride(p.stores[4]) == 65536


def test_positions_make_a_row_loop() -> None:
    """The kernel that holds rows does not know these."""
    b = Block({"M": 64, "N": 512}, {"M.grid": 64}, {"M": 1, "N": 512})
    x = b.op("causal_mask", b.load("x", "M", "N"), rows="M", columns="N", alignment="top_left")
    b.store("y", b.op("exp", x), "M", "N")
    p = planned_block(b, {"x": (64, 512), "y": (64, 512)})
    check(p)
    assert p.rows == ("M",) and not p.sums
    assert isinstance(rows_plan(64, 512, "exp"), RowPlan)


#: programs of all kinds at extents that fit no schedule by chance
ANY: dict[str, Callable[[Dim, int, int, int, int], Case]] = {
    "rms": rms_backward,
    "layer norm": layer_norm_backward,
    "squared error": squared_error,
    "heads": lambda m, n, grid, rows, c: per_head_backward(m, c + 1, n, grid, rows),
    "batched": lambda m, n, grid, rows, c: batched_sum(m, c + 1, n, grid, rows),
    "column sum": lambda m, n, grid, rows, c: column_sum(m, n, grid, rows, ceil_div(n, c)),
    "softmax": lambda m, n, grid, rows, c: softmax_forward(m, n, c),
    "rms forward": lambda m, n, grid, rows, c: rms_forward(m, n, c),
}


@given(
    kind=st.sampled_from(sorted(ANY)), m=st.integers(2, 5000),
    n=st.one_of(st.integers(2, 300), st.integers(2, 20000), st.sampled_from((20480, 28672))),
    grid=st.integers(1, 132), rows=st.integers(1, 8), cluster=st.sampled_from((1, 2, 4, 8, 16)),
    symbolic=st.booleans(),
)  # fmt: skip
def test_plans_of_any_extents(
    kind: str, m: int, n: int, grid: int, rows: int, cluster: int, symbolic: bool
) -> None:
    """A plan that holds, or a reason: too many blocks, or rows that no block holds."""
    case = ANY[kind](Symbol("M", m) if symbolic else m, n, grid, rows, cluster)
    step = case[1].steps[0]
    expected = "blocks meet|bytes of shared memory|rows of .* elements are longer than the"
    try:
        plan = make_plan(step, case[1].tensors, H200)
    except (ScheduleError, LoweringError):
        with pytest.raises((ScheduleError, LoweringError), match=expected):
            make_plan(step, case[1].tensors, H200)
        return
    if isinstance(plan, RowLoopPlan):
        check(plan)
    else:
        assert cluster == 1 and kind in ("softmax", "rms forward")


@pytest.mark.parametrize("cluster", [1, 4])
def test_sums_of_one_element(cluster: int) -> None:
    """A pick by a label is no reduction: the maximum and the sum of exponentials travel alone."""
    p = plan_case(losses(M, 65536, 4) if cluster > 1 else losses(M, 4096))
    kinds = [[p.program.ops[i].kind for i in level.reductions] for level in p.levels]
    assert kinds == [["max"], ["sum"], []]
    assert [p.program.ops[i].kind for i in p.picked.values()] == ["sum", "mean"]
    for end, i in p.picked.items():
        assert end == i if cluster == 1 else p.program.ops[end].inputs == (i,)
        assert p.program.ops[p.program.ops[i].inputs[0]].kind == "pick"
    first = [i for i, v in p.stores.items() if p.arguments[v.argument].name == "picked"]
    assert p.levels[0].stores == tuple(first)  # what it is made of is known before anything
    assert "read by itself: 2 element(s) of a row" in plan_text("k0", p)


def test_what_is_no_sum_of_one_element() -> None:
    """A maximum takes the zeros too; elements are there as well where somebody uses them."""
    b = Block({"M": 64, "N": 4096}, {"M.grid": 64}, {"M": 1, "N": 4096})
    label = b.load("t", "M", None)
    own = b.op("pick", b.load("x", "M", "N"), label, columns="N", rows=None)
    b.store("top", whole(b, "max", own), "M", None)
    b.store("sum", whole(b, "sum", own), "M", None)
    b.store("y", own, "M", "N")
    shapes: dict[str, tuple[Dim, ...]]
    shapes = {"x": (64, 4096), "t": (64, 1), "top": (64, 1), "sum": (64, 1), "y": (64, 4096)}
    p = planned_block(b, shapes, t="int64")
    assert [p.program.ops[i].kind for i in p.levels[0].reductions] == ["max"]
    assert [p.program.ops[i].kind for i in p.picked] == ["sum"]


def test_parts_of_a_row_without_columns() -> None:
    """8 blocks for 72 elements: the last three have none, so there are no bulk loads."""
    p = plan_case(rms_backward(4096, 72, 8, 4, cluster=8))
    check(p)
    assert (p.parts - 1) * p.width >= p.length and p.schedule.stages == 0


# ----------------------------------------------------------------------------------------- refusals


def _rows(**axes: int | None) -> Block:
    b = rows_of(4096, 64, 8, 4)
    return Block(b.dims, {a.name: a.extent for a in b.axes} | axes, b.tile) if axes else b


def two_labels() -> RowLoopPlan:
    b = Block(
        {"M": 512, "H": 8, "N": 64}, {"M.grid": 8, "M.persistent": 64}, {"M": 1, "H": 8, "N": 64}
    )
    x = b.load("x", "M", "H", "N")
    y = b.op("mul", b.op("sum", x, over="N"), b.op("sum", x, over="H"))
    b.store("y", y, "M", "H", "N")
    return planned_block(b, {"x": (512, 8, 64), "y": (512, 8, 64)})


def used_twice() -> RowLoopPlan:
    b = _rows()
    part = b.op("sum", b.load("x", "M", "N"), over="M")
    for name in ("y", "z"):
        b.store(name, b.acc(b.acc(part, "M.persistent"), "M.grid"), None, "N")
    return planned_block(b, {"x": (4096, 64), "y": (1, 64), "z": (1, 64)})


def no_visits() -> RowLoopPlan:
    b = Block({"M": 4096, "N": 64}, {"M.grid": 8}, {"M": 512, "N": 64})
    b.store("y", b.acc(b.op("sum", b.load("x", "M", "N"), over="M"), "M.grid"), None, "N")
    return planned_block(b, {"x": (4096, 64), "y": (1, 64)})


def loop_of_columns() -> RowLoopPlan:
    b = Block({"M": 64, "N": 512}, {"M.grid": 64, "N.loop": 8}, {"M": 1, "N": 64})
    b.store("y", b.op("exp", b.load("x", "M", "N")), "M", "N")
    return planned_block(b, {"x": (64, 512), "y": (64, 512)})


def cluster_of_rows() -> RowLoopPlan:
    b = Block({"M": 64, "N": 512}, {"M.cluster": 8}, {"M": 8, "N": 512})
    b.store("y", b.op("exp", b.load("x", "M", "N")), "M", "N")
    return planned_block(b, {"x": (64, 512), "y": (64, 512)})


def symbolic_row() -> RowLoopPlan:
    n = Symbol("N", 64)
    b = Block(
        {"M": 64, "N": n}, {"M.grid": 8, "M.persistent": 8, "N.grid": None}, {"M": 1, "N": 64}
    )
    b.store("y", b.op("exp", b.load("x", "N")), "N")
    return planned_block(b, {"x": (n,), "y": (n,)})


def outer_together() -> RowLoopPlan:
    b = Block(
        {"M": 512, "H": 8, "N": 64},
        {"H.grid": 4, "M.grid": 8, "M.persistent": 64},
        {"M": 1, "H": 2, "N": 64},
    )
    b.store("y", over_rows(b, b.load("x", "M", "H", "N")), None, "H", "N")
    return planned_block(b, {"x": (512, 8, 64), "y": (1, 8, 64)})


def two_kinds_of_sums() -> RowLoopPlan:
    b = rows_of(4096, 64, 4, 8, H=8)
    x = b.load("x", "M", "H", "N")
    b.store("y", over_rows(b, x), None, "H", "N")
    b.store("z", over_rows(b, x, "H"), None, None, "N")
    return planned_block(b, {"x": (4096, 8, 64), "y": (1, 8, 64), "z": (1, 1, 64)})


def divided_reduction() -> RowLoopPlan:
    b = Block(
        {"M": 64, "N": 512}, {"M.grid": 8, "M.persistent": 8, "N.grid": 2}, {"M": 1, "N": 256}
    )
    x = b.load("x", "M", "N")
    b.store("y", b.op("sum", x, over="N"), "M", "N.grid")
    return planned_block(b, {"x": (64, 512), "y": (64, 2)})


def norm_of_a_sum() -> RowLoopPlan:
    b = _rows()
    y = over_rows(b, b.load("x", "M", "N"))
    b.store("y", b.op("sum", b.op("square", y), over="N"), None, None)
    return planned_block(b, {"x": (4096, 64), "y": (1, 1)})


def number_in_every_column() -> RowLoopPlan:
    b = _rows()
    x, r = b.load("x", "M", "N"), b.load("r", "M", None)
    b.store("y", b.op("div", over_rows(b, x), over_rows(b, r)), None, "N")
    return planned_block(b, {"x": (4096, 64), "r": (4096, 1), "y": (1, 64)}, r="float32")


def mixed_with_the_loop() -> RowLoopPlan:
    b = _rows()
    y = over_rows(b, b.load("x", "M", "N"))
    b.store("y", b.op("mul", y, b.op("sum", b.load("w", "N"), over="N")), None, "N")
    return planned_block(b, {"x": (4096, 64), "w": (64,), "y": (1, 64)})


def stored_by_everybody() -> RowLoopPlan:
    b = _rows()
    b.store("y", over_rows(b, b.load("x", "M", "N")), None, "N")
    b.store("z", b.op("exp", b.load("w", "N")), "N")
    return planned_block(b, {"x": (4096, 64), "w": (64,), "y": (1, 64), "z": (64,)})


def same_for_all_heads() -> RowLoopPlan:
    _, mu = sum_beside_heads(64, 3, 64, 8, 2)
    plan = make_plan(replace(mu.steps[0], name="rows"), mu.tensors, H200)
    assert isinstance(plan, RowLoopPlan)
    return plan


def symbol_inside() -> RowLoopPlan:
    m = Symbol("M", 64)
    b = Block(
        {"B": 4, "M": m, "N": 64},
        {"B.grid": 4, "M.grid": 8, "M.persistent": None},
        {"B": 1, "M": 1, "N": 64},
    )
    b.store("y", over_rows(b, b.load("x", "B", "M", "N")), "B", None, "N")
    return planned_block(b, {"x": (4, m, 64), "y": (4, 1, 64)})


def positions_of_the_rows() -> RowLoopPlan:
    b = Block({"M": 64, "N": 512}, {"M.grid": 64}, {"M": 1, "N": 512})
    x = b.op("causal_mask", b.load("x", "M", "N"), rows="N", columns="M", alignment="top_left")
    b.store("y", b.op("exp", x), "M", "N")
    return planned_block(b, {"x": (64, 512), "y": (64, 512)})


def part_used_beside_the_cluster() -> RowLoopPlan:
    b = rows_of(512, 16384, 8, 1, cluster=2)
    x = b.load("x", "M", "N")
    part = b.op("sum", x, over="N")
    b.store("z", b.acc(part, "N.cluster"), "M", None)
    b.store("y", b.acc(part, "N.cluster"), "M", None)
    return planned_block(b, {"x": (512, 16384), "y": (512, 1), "z": (512, 1)})


REFUSED: dict[str, tuple[Callable[[], RowLoopPlan], str]] = {
    "two labels": (two_labels, "rows are reduced along H, N, not one"),
    "used twice": (used_twice, r"a part of a sum \(operation 1\) is used twice"),
    "no visits": (no_visits, "sums over M need one persistent axis to walk along"),
    "loop": (loop_of_columns, "N.loop: in a row loop a block has its part of a row whole"),
    "cluster of rows": (cluster_of_rows, "M.cluster: .* a cluster shares the row, N"),
    "symbolic row": (symbolic_row, "no label of a fixed extent runs along the rows"),
    "heads together": (outer_together, "a block must have one element of H, which is not walked"),
    "two kinds of sums": (two_kinds_of_sums, "sums over rows are over H and over none of H"),
    "the same for all heads": (same_for_all_heads, "is the same for all of H, and each of its blo"),
    "divided": (divided_reduction, r"sum \(operation 1\) along rows that the grid divides"),
    "norm of a sum": (norm_of_a_sum, r"sum \(operation 5\) along the row of a sum over rows"),
    "in every column": (number_in_every_column, r"div \(operation 8\) needs a sum of values of "),
    "mixed": (mixed_with_the_loop, r"mul \(operation 6\) mixes a sum over rows with what is comp"),
    "by everybody": (stored_by_everybody, "z is neither stored row by row nor a sum over rows"),
    "symbol inside": (symbol_inside, "x has a symbolic extent that is not its first dimension"),
    "positions": (positions_of_the_rows, r"causal_mask \(operation 1\) takes positions along M"),
    "beside the cluster": (
        part_used_beside_the_cluster, r"sum \(operation 1\) of a part of the row must go to one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(LoweringError, match=f"kernel rows: .*{message}"):
        make()


def test_a_mean_over_an_open_extent_divides_by_it() -> None:
    """At the end, when it is known: partial results are sums."""
    p = plan_of("squared error, symbolic")
    assert p.sums[0].means == ("M",) and isinstance(p.program.dims["M"], Symbol)


# ---------------------------------------------------------------------------------------- schedules

BACKWARD = "rms backward"
SLICED = "rms backward, few rows"

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "too narrow": (BACKWARD, {"chunks": 1}, "256 lanes of 8 elements do not cover the 4096"),
    "odd lanes": (BACKWARD, {"lanes": 192, "chunks": 3}, "192 lanes, vectors of 8, .* powers of"),
    "odd groups": (BACKWARD, {"groups": 3}, "3 groups, 2 rows each, .* powers of two"),
    "no rows": (BACKWARD, {"depth": 0}, "0 rows each"),
    "threads": (BACKWARD, {"groups": 8}, "8 groups of 256 lanes; .* at most 1024 threads"),
    "half a warp": ("heads", {"groups": 2}, "2 groups of 8 lanes; a block has whole warps"),
    "half an access": (
        "softmax, odd rows", {"vector": 8}, "accesses of 8 elements, and parts of .* of 100001",
    ),
    "few lanes": (
        "softmax, long rows", {"lanes": 4, "chunks": 512, "groups": 32},
        "4 lanes; each sends to one of 8 blocks of the cluster",
    ),
    "lanes of sums": (
        "rms backward, one block", {"lanes": 2, "chunks": 16, "groups": 128}, "sums over rows need",
    ),
    "memory": (BACKWARD, {"stages": 8}, "bytes of shared memory; the device has 232448"),
    "two blocks": (BACKWARD, {"resident": 2, "groups": 4}, "2 blocks of 1024 threads on an SM"),
    "ring of odd rows": (
        "softmax, odd rows", {"stages": 2}, "parts of rows do not all begin and end at multiples",
    ),
    "not kept": (SLICED, {"kept": False}, "without a ring a tile is kept in registers"),
    "slices through a ring": (SLICED, {"stages": 2}, "slices are read straight to registers"),
    "no slices": (SLICED, {"blocks": 0}, "sliced=True, and no blocks to have the slices"),
    "many slices": (SLICED, {"blocks": 1, "lanes": 256, "groups": 1, "chunks": 2},
                    "256 threads do not hold slices of 4096 columns"),
    "nothing to slice": (
        "softmax, long rows", {"sliced": True, "blocks": 132}, "nothing is summed over rows",
    ),
    "slices of a cluster": (
        "rms backward, long rows", {"sliced": True}, "rows are divided among blocks",
    ),
    "slices of a batch": (
        "batched", {"sliced": True}, "a sum is over labels of which a block has one element",
    ),
    "slices of a loss": ("squared error", {"sliced": True}, "a value of each row is summed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_schedules_that_do_not_fit(name: str) -> None:
    case, knobs, message = BAD[name]
    _, mu = CASES[case]()
    schedule = replace(plan_of(case).schedule, **knobs)
    with pytest.raises(ScheduleError, match=f"kernel {mu.steps[0].name}: .*{message}"):
        make_plan(mu.steps[0], mu.tensors, H200, schedule)


def test_slices_of_what_a_reduction_is_needed_for() -> None:
    b = _rows()
    x = b.load("x", "M", "N")
    b.store("y", over_rows(b, b.op("mul", x, b.op("sum", x, over="N"))), None, "N")
    p = planned_block(b, {"x": (4096, 64), "y": (1, 64)})
    schedule = replace(p.schedule, sliced=True, stages=0, blocks=132)
    tensors = specs({"x": (4096, 64), "y": (1, 64)}, "bfloat16")
    with pytest.raises(ScheduleError, match="what is summed needs a reduction along the row"):
        make_plan(b.step("rows"), tensors, H200, schedule)


@pytest.mark.parametrize(("cluster", "grid", "most"), [(1, 133, 132), (2, 67, 66), (4, 31, 30)])
def test_more_blocks_than_can_meet(cluster: int, grid: int, most: int) -> None:
    with pytest.raises(ScheduleError, match=f"{cluster * grid} blocks meet, .* at most {most} of"):
        plan_case(rms_backward(4096, 4096, grid, 1, cluster))
    check(plan_case(rms_backward(4096, 4096, most, 1, cluster)))


def test_rows_longer_than_shared_memory() -> None:
    with pytest.raises(ScheduleError, match=r"bytes of shared memory; the device has 232448"):
        plan_case(rms_backward(4096, 65536, 132, 1))


def test_rows_of_a_cluster_are_walked_by_a_given_schedule() -> None:
    """A row loop may run what the other skeleton runs, if it is asked to."""
    b = Block({"M": 4096, "N": 4096}, {"M.grid": 4096}, {"M": 1, "N": 4096})
    b.store("y", b.op("exp", b.load("x", "M", "N")), "M", "N")
    tensors = specs({"x": (4096, 4096), "y": (4096, 4096)})
    p = make_plan(b.step(), tensors, H200, RowLoopSchedule(256, 8, 2, 2))
    assert isinstance(p, RowLoopPlan) and p.program.axis("M.grid").extent == 2048
    check(p)


def test_a_schedule_of_another_skeleton() -> None:
    _, mu = CASES[BACKWARD]()
    with pytest.raises(LoweringError, match=r"accumulate .* has no place in a row kernel"):
        make_plan(mu.steps[0], mu.tensors, H200, RowSchedule(32, 8, 4, 2))
    with pytest.raises(ScheduleError, match="a row kernel takes RowSchedule"):
        make_plan(mu.steps[0], mu.tensors, H200, MatmulSchedule(4))


def test_schedules_as_json() -> None:
    schedule = plan_of(SLICED).schedule
    data = schedule_dict(schedule)
    assert data["kind"] == "row loop" and read_schedule(data) == schedule
    for changes, message in (
        ({"depth": 1.0}, "RowLoopSchedule: depth=1.0 is not a int"),
        ({"sliced": 1}, "sliced=1 is not a bool"),
        ({"rows": 1}, "missing or unknown fields: rows"),
    ):
        with pytest.raises(FormatError, match=message):
            read_schedule(data | changes)


def neighbours(name: str, schedule: RowLoopSchedule | None = None) -> list[str]:
    _, mu = CASES[name]()
    default = plan_case(CASES[name](), schedule=schedule)
    found = variants(mu.steps[0], mu.tensors, H200, default)
    assert found[0] == default and len({p.key for p in found}) == len(found)
    for p in found:
        assert isinstance(p, RowLoopPlan) and isinstance(p.schedule, RowLoopSchedule)
        check(p)
        assert planned(mu.steps[0], mu.tensors, H200, p.schedule).key == p.key
    return [changed(p.schedule, default.schedule) for p in found[1:]]


def test_variants() -> None:
    """Tiles keep their rows where threads change, and blocks are those of the program where they
    meet."""
    assert neighbours(BACKWARD, RowLoopSchedule(256, 8, 2, 2, blocks=128)) == [
        "lanes=512 chunks=1 groups=1 depth=2", "groups=4", "depth=2", "stages=3", "kept=no",
        "resident=2", "stages=0 sliced=yes", "lanes=128 chunks=4 groups=4", "groups=1 depth=2",
        "stages=1",
    ]  # fmt: skip
    few = neighbours(SLICED, RowLoopSchedule(256, 8, 2, 1, stages=0, blocks=132, sliced=True))
    assert "resident=2" in few and "stages=2 sliced=no" in few and "blocks=264" in few
    assert not any("stages" in s and "sliced" not in s for s in few)
    assert any(s.startswith("blocks=") for s in neighbours("rms forward, long rows"))
    # a block for each tile: how many of them share an SM
    straight = neighbours("softmax, long rows")
    assert "resident=1" in straight and "resident=2" in straight


def test_blocks_that_the_program_fixes_are_no_knob() -> None:
    _, mu = CASES[BACKWARD]()
    schedule = replace(plan_of(BACKWARD).schedule, blocks=64)
    with pytest.raises(ScheduleError, match="the program says that 128 blocks walk over the rows"):
        planned(mu.steps[0], mu.tensors, H200, schedule)


# -------------------------------------------------------------------------------------------- sizes


def test_sizes_by_hand() -> None:
    """2 rows of 4096 elements of x and dy, and two values of rstd, in a stage."""
    p = plan_case(
        rms_backward(4096, 4096, 128, 2), schedule=RowLoopSchedule(256, 8, 2, 2, blocks=128)
    )
    assert (p.tile_rows, p.threads, p.covered, p.ragged) == (2, 512, 4096, False)
    assert p.row_bytes == {0: 8192, 1: 8192} and p.scalar_bytes == {3: 16}
    assert p.stage_bytes == LINE * ceil_div(2 * 2 * 8192 + 16, LINE) and p.overhang == 0
    assert p.slots == 2 * 2 * 8  # twice, for 2 rows, of 8 warps
    assert p.slice_columns == 4096 // 128
    assert p.scratch[0].shape == (128 * 4096,)
    assert p.finish_bytes == 4 * max(2 * 4096, 32 + 4 * 512)
    assert p.ring_bytes == 2 * p.stage_bytes


def test_what_threads_read_past_the_last_row_is_there() -> None:
    """2056 elements are 257 accesses; 256 lanes make 512."""
    p = plan_case(rms_backward(4096, 2056, 132, 4), schedule=RowLoopSchedule(256, 8, 2, 2))
    check(p)
    assert p.ragged and p.overhang == 2 * (4096 - 2056)
    assert p.ring_bytes == 2 * p.stage_bytes + p.overhang


def test_what_is_not_kept_is_computed_in_pieces() -> None:
    """16 elements at a time, 8 beside sums, or what divides the accesses of a thread."""
    for length, chunks, piece in ((20480, 5, 1), (24576, 6, 2), (28672, 7, 1)):
        schedule = RowLoopSchedule(512, 8, chunks, 1, 1, 1, kept=False)
        summed = plan_case(rms_backward(4096, length, 132, 1), schedule=schedule)
        p = plan_case(softmax_forward(4096, length, 1), schedule=schedule)
        for each, most in ((p, piece), (summed, 1)):
            check(each)
            assert each.piece == most
    assert plan_of(BACKWARD).piece == plan_of(BACKWARD).schedule.chunks


def test_sums_leave_before_results_that_follow() -> None:
    """If results follow, and nobody reads the ring through which groups meet."""
    assert plan_of(BACKWARD).leaves_early
    assert not plan_of("column sum").leaves_early  # nothing follows
    assert not plan_of("rms backward, few rows").leaves_early  # blocks do not meet
    again = RowLoopSchedule(32, 8, 4, 4, kept=False, blocks=125)
    assert not plan_case(rms_backward(1001, 1024, 125, 2), schedule=again).leaves_early
    alone = RowLoopSchedule(128, 8, 1, 1, kept=False, blocks=125)
    assert plan_case(rms_backward(1001, 1024, 125, 2), schedule=alone).leaves_early


@pytest.mark.parametrize(
    ("cluster", "first", "senders"), [(1, False, 16), (2, False, 32), (4, True, 4), (8, True, 8)]
)
def test_large_clusters_meet_in_their_blocks_first(cluster: int, first: bool, senders: int) -> None:
    """Everybody adds up 32 values at most."""
    p = plan_case(layer_norm_backward(600, 8192 * cluster, 15, 1, cluster=cluster))
    check(p)
    assert p.warps_per_row == 16
    assert (p.meets_in_block, p.senders) == (first, senders)
    count = sum(len(level.reductions) for level in p.levels)
    assert p.slots == 2 * count * (senders + 16 * first)


def test_slots_of_a_block_are_whole_accesses() -> None:
    """They are read 16 bytes at a time: of 2 blocks with 32 warps there are 2 senders."""
    p = plan_case(rms_forward(M, 65536, 2), schedule=RowLoopSchedule(1024, 8, 4, 1, blocks=66))
    check(p)
    assert p.meets_in_block and p.senders == 2
    assert (p.sent_slots, p.block_slots, p.slots) == (4, 32, 72)


def test_what_a_thread_keeps() -> None:
    """Tiles and sums in 80 registers of 128; vectors of 32 elements."""
    softmax = plan_case(softmax_forward(M, 65536, 2))
    assert softmax.schedule.kept and softmax.schedule.vector * softmax.schedule.chunks == 64
    weighted = plan_case(rms_forward(M, 65536, 2))
    assert weighted.schedule.kept and not weighted.keeps_vectors
    assert plan_of(BACKWARD).keeps_vectors
    summed = plan_case(layer_norm_backward(M, 65536, 30, 1, cluster=4))
    assert not summed.schedule.kept and summed.schedule.stages == 2
    assert replace(summed, schedule=replace(summed.schedule, kept=True)).held == 112


def test_short_rows_that_are_summed_have_few_groups() -> None:
    for n, lanes, groups, depth in ((1024, 64, 4, 2), (2048, 128, 2, 2), (4096, 256, 1, 2)):
        s = plan_case(rms_backward(M, n, 132, 2)).schedule
        assert (s.lanes, s.groups, s.depth) == (lanes, groups, depth)
    many = Symbol("M", 16384)
    for case in (layer_norm_backward(M, 4096, 132, 2), rms_backward(many, 4096, 132, 2)):
        s = plan_case(case).schedule
        assert (s.lanes, s.groups, s.depth) == (256, 2, 1)


@pytest.mark.parametrize(("weight", "groups"), [(bfloat16, 1), (float32, 2)])
def test_sums_in_float32_add_fewer_rows(weight: DType, groups: int) -> None:
    g = new_kernel_graph()
    x, w = g.new_input((M, 4096), bfloat16, "x"), g.new_input((4096,), weight, "w")
    g.mark_output(g.rms_norm(x, w), bfloat16)
    [plan] = choose(grad(g), Options(target=H200))[1].plans
    assert isinstance(plan, RowLoopPlan) and plan.schedule.groups == groups


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "carries"),
    [(M, 512, float32, True), (131072, 512, float32, True), (131072, 512, bfloat16, False),
     (4096, 512, float32, False), (131072, 4096, float32, True), (131072, 16384, float32, False)],
)  # fmt: skip
def test_long_sums_in_float32_are_added_in_groups(
    rows: Dim, n: int, dtype: DType, carries: bool
) -> None:
    """If a thread has registers for both, and results show the difference."""
    plan = plan_case(column_sum(rows, n, 132, 2, dtype=dtype))
    check(plan)
    assert plan.carries_sums == carries


def test_blocks_with_one_tile_have_256_threads() -> None:
    """But for few rows, of which every SM should have some."""
    for rows, n, lanes, groups in ((32768, 256, 8, 32), (32768, 4096, 128, 2), (256, 4096, 128, 1)):
        s = plan_case(losses(rows, n)).schedule
        assert (s.lanes, s.groups, s.stages, s.blocks) == (lanes, groups, 0, 0)


def test_rows_that_are_only_read_share_an_sm() -> None:
    """Two blocks of long ones, where no results of every column take registers."""
    softmax: Any = KernelGraph.softmax
    found = []
    for build in (lambda g, x: g.cross_entropy(x, g.new_input((M, 1), int64)), softmax):
        g = new_kernel_graph()
        g.mark_output(build(g, g.new_input((M, 65536), bfloat16)))
        [plan] = choose(g, Options(target=H200))[1].plans
        found.append((plan.cluster, plan.schedule.resident, plan.schedule.stages))
    assert found == [(2, 2, 1), (4, 3, 0)]


def test_keys_and_code_do_not_see_hints() -> None:
    found = set()
    for hint in (3, 128, 512):
        schedule = plan_case(rms_backward(Symbol("M", 128), 4096, 132, 2)).schedule
        p = plan_case(rms_backward(Symbol("M", hint), 4096, 132, 2), schedule=schedule)
        found.add((p.key, p.slice_rows, p.slice_columns))
    assert len(found) == 1
    assert plan_case(rms_backward(3, 4096, 132, 2), schedule=schedule).slice_rows == 1


def test_retiled_programs_cover_the_rows() -> None:
    for name in CASES:
        p = plan_of(name)
        for a in p.program.axes:
            if (
                a.dim == p.rows[0]
                and a.extent is not None
                and not isinstance(p.program.dims[a.dim], Symbol)
            ):
                parts = prod(b.extent or 1 for b in p.program.axes_of(a.dim))
                assert parts * p.program.tile[a.dim] >= extent(p.program.dims[a.dim])


# ------------------------------------------------------------------------------------------ reports


def told(p: RowLoopPlan, *lines: str) -> None:
    text = plan_text("k0", p)
    assert [line for line in lines if line not in text] == [], text


def test_a_plan_in_words() -> None:
    schedule = RowLoopSchedule(256, 8, 2, 2, blocks=128)
    told(
        plan_case(rms_backward(4096, 4096, 128, 2), schedule=schedule),
        "row loop: 128 blocks walk over M, 2 row(s) of 4096 elements at a time, 512 threads each",
        "256 threads share a row, 2 access(es) of 8 elements each; rows stay in registers",
        "2 stage(s) of 32896 bytes; 65984 bytes of shared memory",
        "reductions along N: 1, in 1 exchange(s)",
        "summed over rows: dw; all blocks meet, then each adds up 32 columns of 128 partial resu",
        "reads x, dy, w, rstd; writes dx, dw",
    )


def test_other_plans_in_words() -> None:
    told(
        plan_of(SLICED), "tiles go straight to registers",
        "summed over rows: dw; every block has 32 columns of all rows, and reads them again",
    )  # fmt: skip
    told(plan_of("heads"), "a block has one element of H", "summed over rows: dw; all blocks meet")
    told(
        plan_of("rms backward, long rows"),
        "66 clusters walk over M, 1 row(s) of 8192 of 16384 elements at a time",
        "cluster of 2: each block has a part of a row",
    )
    loss = plan_text("k0", plan_of("squared error"))
    assert "summed over rows: loss;" in loss and "cluster" not in loss
    softmax = plan_text("k0", plan_of("softmax, long rows"))
    assert "reductions along N: 2, in 2 exchange(s)" in softmax and "summed" not in softmax
    schedule = RowLoopSchedule(512, 8, 7, 1, 1, 1, kept=False)
    told(
        plan_case(rms_backward(4096, 28672, 132, 1), schedule=schedule),
        "7 access(es) of 8 elements each; rows are read again after a reduction",
    )
