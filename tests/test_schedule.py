"""Plans of hand-made block programs: places, orientation, schedules, refusals, keys."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from cutesuper.errors import CutesuperError, FormatError, LoweringError, ScheduleError
from cutesuper.ir.dims import Symbol
from cutesuper.pipeline import Options, find
from cutesuper.skeletons.cost import Setting
from cutesuper.skeletons.matmul.plan import MatmulPlan, grid_shape
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.registry import read_schedule
from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan
from cutesuper.skeletons.rows.planner import plan_rows
from cutesuper.skeletons.rows.schedule import MAX_PER_THREAD, MAX_ROW, RowSchedule
from cutesuper.skeletons.schedule import schedule_dict
from cutesuper.targets import B200, H200
from tests import zoo
from tests.mugraphs import Block
from tests.plans import Linear, rows_block, rows_plan, specs


def name_of(plan: Any, view: Any) -> str:
    return plan.arguments[view.argument].name


def places(plan: MatmulPlan) -> dict[str, list[str]]:
    """The place of each tensor."""
    groups = {"rows": plan.rows, "vectors": plan.vectors, "columns": plan.columns}
    groups["loads"] = plan.loads
    return {k: [name_of(plan, v) for v in g.values()] for k, g in groups.items()}


# ------------------------------------------------------------------------------ places of a matmul


def test_norm_and_linear_have_their_places() -> None:
    p = Linear(cluster=2).plan()
    assert places(p) == {"rows": ["X"], "vectors": [], "columns": ["W"], "loads": []}
    assert (p.row, p.column, p.contracted, p.batch) == ("M", "N", "K", ())
    assert (p.tile, p.cluster, p.iterations) == ((16, 64, 128), 2, 2)
    assert p.prologue is None
    [statistic] = p.statistics
    assert statistic.op == "sum" and statistic.scale == 1 / 512
    assert statistic.source.text(["x"]) == "square(x)"
    assert p.program.ops[statistic.value].kind == "cluster_reduce"
    [value] = p.row_values.values()
    assert value.text(["s"]) == "rsqrt(add(s, 1e-06))"
    [output] = p.outputs
    assert output.expression.text(["a", "r"]) == "mul(a, r)"
    assert name_of(p, output.view) == "Z"


def test_without_a_norm_there_are_no_helpers() -> None:
    p = Linear(norm=False).plan()
    assert not p.has_helpers and not p.statistics and not p.row_values
    assert p.threads == 128 + 32
    assert Linear().plan().threads == 128 + 128 + 32


def test_a_gain_is_a_prologue_over_a_staged_vector() -> None:
    p = Linear(gain=True).plan()
    assert places(p)["rows"] == ["X"] and places(p)["vectors"] == ["G"]
    assert p.prologue is not None and p.prologue.text(["x", "g"]) == "mul(x, g)"
    assert [s.source.text(["x"]) for s in p.statistics] == ["square(x)"]  # of X before the gain
    assert p.stage_bytes == 2 * (64 * 128 + 16 * 128 + 128)


def test_bias_and_residual_are_loads_of_the_epilogue() -> None:
    p = Linear(bias=True, residual=True).plan()
    assert places(p)["loads"] == ["B", "R"]
    bias, residual = p.loads.values()
    assert (bias.stride("M"), bias.stride("N")) == (0, 1)
    assert (residual.stride("M"), residual.stride("N")) == (256, 1)
    [output] = p.outputs
    assert output.expression.text(["a", "r", "b", "x"]) == "add(add(mul(a, r), b), x)"


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gain", [False, True])
def test_the_weight_is_the_column_side(swapped: bool, transposed: bool, gain: bool) -> None:
    p = Linear(swapped=swapped, transposed=transposed, gain=gain).plan()
    assert (p.row, p.column) == ("M", "N")
    assert places(p)["columns"] == ["W"]
    [w] = p.columns.values()
    assert (w.stride("N"), w.stride("K")) == ((512, 1) if transposed else (1, 256))


def test_a_transposed_store_swaps_the_sides() -> None:
    """``Z[N, M]``: the contiguous label of the output becomes the column."""
    b = Block({"M": 64, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 64, "K": 128, "N": 64})
    product = b.op("matmul", b.load("X", "M", "K"), b.load("V", "N", "K"), over="K")
    b.store("Z", b.close(product, "K"), "N", "M")
    shapes = {"X": (64, 512), "V": (64, 512), "Z": (64, 64)}
    p = make_plan(b.step(), specs(shapes), H200)
    assert isinstance(p, MatmulPlan)
    assert (p.row, p.column, places(p)["columns"]) == ("N", "M", ["X"])


def test_a_short_side_cannot_be_the_column() -> None:
    """16 rows of X cannot be the 64-row side, whatever the output looks like."""
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    product = b.op("matmul", b.load("X", "M", "K"), b.load("V", "N", "K"), over="K")
    b.store("Z", b.close(product, "K"), "N", "M")
    p = make_plan(b.step(), specs({"X": (16, 512), "V": (64, 512), "Z": (64, 16)}), H200)
    assert isinstance(p, MatmulPlan)
    assert (p.row, p.column, places(p)["columns"]) == ("M", "N", ["V"])


def gated(**changes: Any) -> tuple[Block, dict[str, tuple[int, ...]]]:
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x = b.load("X", "M", "K")
    up = b.load("X", "M", "K") if changes.get("other_row") else x
    if changes.get("scaled_row"):
        up = b.op("square", x)
    a_map = ("N", "K") if changes.get("mixed") else ("K", "N")
    gate = b.close(b.op("matmul", x, b.load("A", *a_map), over="K"), "K")
    w = 1 if changes.get("same") else b.load("B", "K", "N")
    other = b.close(b.op("matmul", up, w, over="K"), "K")
    b.store("Z", b.op("mul", b.op("silu", gate), other), "M", "N")
    a = (64, 512) if changes.get("mixed") else (512, 64)
    return b, {"X": (16, 512), "A": a, "B": (512, 64), "Z": (16, 64)}


def test_products_share_the_row_operand() -> None:
    b, shapes = gated()
    p = make_plan(b.step(), specs(shapes), H200)
    assert isinstance(p, MatmulPlan)
    assert places(p)["columns"] == ["A", "B"] and len(p.products) == 2
    assert p.stage_bytes == 2 * (2 * 64 * 128 + 16 * 128)
    assert p.outputs[0].expression.text(["a", "b"]) == "mul(silu(a), b)"


def test_labels_with_a_tile_of_one_are_the_batch() -> None:
    axes: dict[str, int | None] = {"H.grid": 4, "K.loop": 4}
    b = Block({"H": 4, "M": 16, "K": 512, "N": 64}, axes, {"H": 1, "M": 16, "K": 128, "N": 64})
    product = b.op("matmul", b.load("X", "H", "M", "K"), b.load("W", "K", "N"), over="K")
    b.store("Z", b.close(product, "K"), "H", "M", "N")
    p = make_plan(b.step(), specs({"X": (4, 16, 512), "W": (512, 64), "Z": (4, 16, 64)}), H200)
    assert isinstance(p, MatmulPlan)
    assert p.batch == ("H",)
    assert grid_shape(p) == (1, 1, 4)
    [x], [w] = p.rows.values(), p.columns.values()
    assert (x.stride("H"), w.stride("H")) == (16 * 512, 0)


def test_symbolic_rows_are_counted_at_the_call() -> None:
    p = Linear(m=Symbol("M", 16), cluster=2).plan()
    assert [grid_shape(p, rows)[1] for rows in (1, 16, 17, 100)] == [1, 1, 2, 7]
    assert grid_shape(p, 1)[0] == 4 * 2


def test_a_maximum_is_a_statistic_too() -> None:
    b = Block({"M": 16, "K": 512, "N": 64}, {"K.loop": 4}, {"M": 16, "K": 128, "N": 64})
    x = b.load("X", "M", "K")
    product = b.close(b.op("matmul", x, b.load("W", "K", "N"), over="K"), "K")
    top = b.close(b.op("max", x, over="K"), "K", "max")
    total = b.close(b.op("sum", b.op("exp", x), over="K"), "K")
    b.store("Z", b.op("sub", b.op("mul", product, total), top), "M", "N")
    p = make_plan(b.step(), specs({"X": (16, 512), "W": (512, 64), "Z": (16, 64)}), H200)
    assert isinstance(p, MatmulPlan)
    assert [(s.op, s.scale) for s in p.statistics] == [("max", 1.0), ("sum", 1.0)]
    assert [e.trivial for e in p.row_values.values()] == [True, True]
    assert p.outputs[0].expression.text(["a", "t", "m"]) == "sub(mul(a, t), m)"


def test_the_longest_label_is_the_loops() -> None:
    """A product over another one comes after the loop; see test_chains.py."""
    tile = {"M": 16, "K": 128, "N": 64, "L": 8}
    b = Block({"M": 16, "K": 512, "N": 64, "L": 8}, {"K.loop": 4}, tile)
    short = b.op("matmul", b.load("Y", "M", "L"), b.load("U", "L", "N"), over="L")
    long = b.close(b.op("matmul", b.load("X", "M", "K"), b.load("W", "K", "N"), over="K"), "K")
    b.store("Z", b.op("add", short, long), "M", "N")
    p = make_plan(b.step(), specs(SHAPES), H200)
    assert isinstance(p, MatmulPlan)
    assert (p.contracted, [t.hidden for t in p.tails]) == ("K", ["L"])
    assert places(p)["columns"] == ["W"] and places(p)["rows"] == ["X"]


# ------------------------------------------------------------------------- schedules of a matmul


def test_the_ring_is_as_deep_as_useful() -> None:
    assert Linear(k=512).plan().schedule.stages == 4  # not more than iterations
    deep = Linear(k=8192)
    plain, dependent = deep.plan().schedule, deep.plan(dependent_launch=True).schedule
    assert plain.stages * deep.plan().stage_bytes <= 120 * 1024
    assert dependent.stages > plain.stages and dependent.dependent_launch
    assert deep.plan(dependent_launch=True).shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("m", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [128, 256])
def test_plans_stay_inside_the_block_limits(m: int, n: int) -> None:
    n = min(n, 32768 // m)
    p = Linear(m=m, tile_m=m, tile_n=n, tile_k=64).plan()
    assert p.shared_bytes <= H200.shared_bytes and p.threads <= 1024
    if p.registers:
        consumers, helpers, producer = p.registers
        together = p.threads == 3 * 128  # helpers and producer are one warpgroup
        others = max(helpers, producer) if together else helpers + producer
        assert 128 * (2 * consumers + others) <= H200.registers
        assert p.threads == (3 if p.schedule.helpers == 2 else 4) * 128
        assert p.schedule.warpgroups == 2


def test_a_given_schedule_is_used() -> None:
    s = MatmulSchedule(stages=3, head=1, stream_columns=False)
    assert Linear().plan(schedule=s).schedule is s


# ----------------------------------------------------------------------------- refusals of a matmul


def no_store_of_a_product(p: Block) -> None:
    p.store("Z", p.load("X", "M", "K"), "M", "K")


def used_before_complete(p: Block) -> None:
    p.store("Z", p.close(p.op("exp", 2), "K"), "M", "N")


def norm_inside(p: Block) -> None:
    x = p.load("X", "M", "K")
    y = p.op("div", x, p.op("sum", x, over="K"))
    p.store("Z", p.close(p.op("matmul", y, p.load("W", "K", "N"), over="K"), "K"), "M", "N")


def row_scale_inside(p: Block) -> None:
    y = p.op("mul", p.load("X", "M", "K"), p.load("S", "M"))
    p.store("Z", p.close(p.op("matmul", y, p.load("W", "K", "N"), over="K"), "K"), "M", "N")


def column_sums(p: Block) -> None:
    p.store("C", p.op("sum", 3, over="M"), "N")


def reduced_scalar(p: Block) -> None:
    """A reduction along the columns is reduced again."""
    p.store("V", p.op("sum", p.op("sum", 3, over="N"), over="M"), None)


def computed_weight(p: Block) -> None:
    w = p.op("exp", p.load("W", "K", "N"))
    p.store("Z", p.close(p.op("matmul", p.load("X", "M", "K"), w, over="K"), "K"), "M", "N")


def strided_row(p: Block) -> None:
    product = p.op("matmul", p.load("XT", "K", "M"), p.load("W", "K", "N"), over="K")
    p.store("Z", p.close(product, "K"), "M", "N")


def strided_statistic(p: Block) -> None:
    s = p.close(p.op("sum", p.load("XT", "K", "M"), over="K"), "K")
    p.store("Z", p.op("mul", 3, s), "M", "N")


def second_walk(p: Block) -> None:
    x = p.load("X", "M", "K")
    y = p.op("div", x, p.close(p.op("sum", x, over="K"), "K"))
    p.store("Z", p.close(p.op("matmul", y, p.load("W", "K", "N"), over="K"), "K"), "M", "N")


def running_maximum(p: Block) -> None:
    s = p.op("sum", 0, over="K")
    part = p.op("max", 0, over="K")
    p.store("Z", p.op("mul", 3, p.rescaled(s, part, p.acc(part, "K.loop", "max"))), "M", "N")


def two_tiled_labels(p: Block) -> None:
    product = p.op("matmul", p.load("H", "L", "M", "K"), p.load("W", "K", "N"), over="K")
    p.store("Z", p.close(product, "K"), "L", "M", "N")


SHAPES = {"X": (16, 512), "XT": (512, 16), "W": (512, 64), "S": (16,), "Z": (16, 64)}
SHAPES |= {"H": (8, 16, 512), "Y": (16, 8), "U": (8, 64), "C": (64,), "V": (1,)}

#: a change to a program, whether it begins with the product of X and W, and what is said
STRUCTURES: list[tuple[Any, bool, str]] = [
    (no_store_of_a_product, True, "store of Z: it does not depend on a product"),
    (used_before_complete, True, "the partial result of operation 2 is used before it is comp"),
    (norm_inside, False, "row operand: sum (operation 1) stands where only element-wise"),
    (row_scale_inside, False, "operation 1 is no operand that can be staged with labels M, K"),
    (column_sums, True, "sum over M (operation 4) is no row statistic over K"),
    (reduced_scalar, True, "sum over M (operation 5) is no row statistic over K"),
    (computed_weight, False, "no orientation fits: one operand of every product must be a tensor"),
    (strided_row, False, "no orientation fits"),
    (strided_statistic, True, "row operand XT (operation 4) must be contiguous along K"),
    (second_walk, False, "it walks K.loop 2 times, and kernels walk a loop once; split"),
    (running_maximum, True, "operation 7 is a sum rescaled by a running maximum over K.loop"),
    (two_tiled_labels, False, "an operand has two labels that are tiled"),
]


@pytest.mark.parametrize("case", STRUCTURES, ids=lambda c: c[0].__name__)
def test_structures_that_are_refused(case: tuple[Any, bool, str]) -> None:
    change, begun, message = case
    tile = {"M": 16, "K": 128, "N": 64, "L": 8}
    b = Block({"M": 16, "K": 512, "N": 64, "L": 8}, {"K.loop": 4}, tile)
    if begun:
        x, w = b.load("X", "M", "K"), b.load("W", "K", "N")
        b.close(b.op("matmul", x, w, over="K"), "K")
    change(b)
    with pytest.raises(LoweringError) as caught:
        make_plan(b.step("broken"), specs(SHAPES), H200)
    assert str(caught.value).startswith("kernel broken")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scaled_row", "products take different row operands"),
        ("same", "two products are the same"),
        ("mixed", "the column operands must all be contiguous along N, or all along K"),
    ],
)
def test_products_that_do_not_share_a_loop(change: str, message: str) -> None:
    b, shapes = gated(**{change: True})
    with pytest.raises(LoweringError, match=message):
        make_plan(b.step(), specs(shapes), H200)


@pytest.mark.parametrize(
    ("linear", "error", "message"),
    [
        (Linear(dtype="int32"), LoweringError, "matrix products of int32 have no tensor-core"),
        (Linear(tile_k=32), ScheduleError, "tile M=16 N=64 K=32; rows must be a multiple"),
        (Linear(m=512, tile_m=256, tile_n=256), ScheduleError, "65536 accumulators (256x256 for"),
        (Linear(n=192, tile_n=192, cluster=5), ScheduleError, "192 columns cannot be shared out"),
        (Linear(m=256, tile_m=256, tile_n=128, tile_k=256), ScheduleError, "fit into 232448 bytes"),
        (Linear(m=256, tile_m=256, tile_k=64), ScheduleError, "need two consumer warpgroups"),
        (Linear(tile_m=20), LoweringError, "no orientation fits"),
        (Linear(tile_n=32), LoweringError, "no orientation fits"),
        (Linear(n=576, m=128, tile_n=192, tile_m=128), ScheduleError, "need two consumer warpg"),
    ],
)
def test_sizes_that_are_refused(linear: Linear, error: type[CutesuperError], message: str) -> None:
    with pytest.raises(error) as caught:
        linear.plan()
    assert message in str(caught.value)


def test_schedules_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="1 stages of 20480 bytes"):
        Linear().plan(schedule=MatmulSchedule(stages=1))
    with pytest.raises(ScheduleError, match=r"20 stages of 20480 bytes.*use smaller tiles"):
        Linear().plan(schedule=MatmulSchedule(stages=20))
    with pytest.raises(ScheduleError, match="kernel linear: a matmul loop takes MatmulSchedule"):
        Linear().plan(schedule=RowSchedule(32, 8, 1, 4))
    with pytest.raises(ScheduleError, match="kernel rows: a row kernel takes RowSchedule"):
        rows_plan(16, 512, "exp", schedule=MatmulSchedule(2))


def test_matrix_products_need_building_blocks() -> None:
    with pytest.raises(LoweringError, match=r"lowered for sm_90a, sm_100a.*, not for b200"):
        Linear().plan(replace(B200, arch="sm_120a"))


def test_accumulators_of_tensor_memory() -> None:
    wide = Linear(m=192, n=512, tile_m=192, tile_n=256, tile_k=64, norm=False)
    assert wide.plan().accumulators == 192 * 256
    with pytest.raises(ScheduleError, match=r"49152 numbers of products in a block, .* of b200"):
        wide.plan(B200)
    # blocks of a pair wait for each other: no two on a multiprocessor may need more than there is
    pairs = Linear(m=96, n=512, k=512, tile_m=96, tile_n=256, tile_k=64, norm=False)
    schedule = replace(pairs.plan(B200).schedule, share_rows=2, persistent=0)
    few = replace(schedule, stages=2, head=2, pieces=2)
    assert pairs.plan(schedule=few).shared_bytes < pairs.plan(B200, schedule=schedule).shared_bytes
    with pytest.raises(ScheduleError, match=r"24576 numbers .* 2 block\(s\) that share the room"):
        pairs.plan(B200, schedule=few)


# ------------------------------------------------------------------------------------------ rows


def test_rows_have_their_places() -> None:
    p = rows_plan(64, 4096, norm=True)
    assert isinstance(p, RowPlan)
    assert (p.column, p.rows, len(p.reductions)) == ("N", ("M",), 1)
    s = p.schedule
    assert (s.lanes, s.vector, s.chunks, s.rows) == (128, 8, 4, 1)
    assert p.width == 4096 and p.warps_per_row == 4 and p.shared_bytes == 16


ROW_SIZES = [1, 2, 7, 8, 24, 31, 33, 100, 333, 1000, 1024, 1025, 4096, 5000, 16384, 32767, MAX_ROW]


@pytest.mark.parametrize("n", ROW_SIZES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("norm", [False, True])
def test_row_schedules_cover_rows_of_any_length(n: int, dtype: str, norm: bool) -> None:
    step = rows_block(100, n, "exp", norm=norm).step("rows")  # a row loop runs the longest as well
    p = plan_rows(step, Setting(H200, specs({"X": (100, n), "Z": (100, n)}, dtype)))
    s, itemsize = p.schedule, 4 if dtype == "float32" else 2
    assert s.lanes & (s.lanes - 1) == 0 and 1 <= s.lanes * s.rows <= 1024
    assert s.lanes * s.rows % 32 == 0
    assert n % s.vector == 0 and s.vector * itemsize <= 16
    assert s.vector == min(16 // itemsize, n & -n)
    assert s.vector * s.chunks <= MAX_PER_THREAD // (2 if s.lanes * s.rows > 512 else 1)
    blocks = p.program.axis("N.grid").extent if not norm else 1
    assert blocks * p.width >= n > (blocks - 1) * p.width
    if norm:
        assert p.width >= n  # a block holds whole rows
    else:
        assert s.lanes <= 256 and s.chunks <= 2  # more blocks instead
    assert p.shared_bytes == (4 * s.rows * p.warps_per_row if norm and s.lanes > 32 else 0)


def test_the_longest_rows() -> None:
    """Rows that are reduced; a row loop reads them as well, and longer ones."""
    step, shape = rows_block(2, MAX_ROW + 1, norm=True).step("rows"), (2, MAX_ROW + 1)
    tensors = specs({"X": shape, "Z": shape})
    with pytest.raises(LoweringError, match=r"rows: rows of 32769 elements are longer than the"):
        plan_rows(step, Setting(H200, tensors))
    with pytest.raises(LoweringError, match=r"32769 elements .* divide them over a cluster"):
        make_plan(step, tensors, H200)
    step, shape = rows_block(2, 2 * MAX_ROW, norm=True).step("rows"), (2, 2 * MAX_ROW)
    plan = make_plan(step, specs({"X": shape, "Z": shape}), H200)
    assert isinstance(plan, RowLoopPlan) and not plan.schedule.kept


@pytest.mark.parametrize("n", [1, 100, 1000, 1025, 2048])
def test_strided_rows_are_read_by_neighbouring_rows(n: int) -> None:
    b = Block({"M": n, "N": 256}, {"N.grid": 256}, {"M": n, "N": 1})
    b.store("Z", b.op("sum", b.load("X", "M", "N"), over="M"), "N")
    p = make_plan(b.step("columns"), specs({"X": (n, 256), "Z": (256,)}), H200)
    assert isinstance(p, RowPlan)
    assert p.column == "M" and p.schedule.interleaved
    assert p.threads <= 1024 and p.width >= n
    assert p.schedule.vector * p.schedule.chunks <= MAX_PER_THREAD


def test_few_rows_are_spread_over_the_device() -> None:
    few, many = rows_plan(64, 256, norm=True), rows_plan(9999, 256, norm=True)
    assert few.schedule.rows < many.schedule.rows


def test_rows_of_three_labels_are_neighbours() -> None:
    b = Block({"A": 6, "B": 5, "N": 64}, {"A.grid": 6, "B.grid": 5}, {"A": 1, "B": 1, "N": 64})
    b.store("Z", b.op("exp", b.load("X", "A", "B", "N")), "A", "B", "N")
    p = make_plan(b.step(), specs({"X": (6, 5, 64), "Z": (6, 5, 64)}), H200)
    assert isinstance(p, RowPlan) and p.rows == ("A", "B")
    assert [p.loads[0].stride(d) for d in "ABN"] == [320, 64, 1]


@pytest.mark.parametrize(("m", "n"), [(64, 32), (4096, 4096), (3, 1000), (1000, 7)])
def test_transpositions_read_pieces_of_neighbouring_rows(m: int, n: int) -> None:
    b = Block({"M": m, "N": n}, {"M.grid": m, "N.grid": n}, {"M": 1, "N": 1})
    b.store("Z", b.load("X", "N", "M"), "M", "N")
    p = make_plan(b.step("copy"), specs({"X": (n, m), "Z": (m, n)}), H200)
    assert isinstance(p, RowPlan) and p.column == "N"  # stores are contiguous
    assert p.schedule.interleaved and p.schedule.rows == 32
    assert (p.program.axis("N.grid").extent or 0) * p.width >= n


def test_neighbouring_rows_are_neighbours_in_memory() -> None:
    b = Block({"B": 64, "M": 4, "N": 50}, {}, {"B": 64, "M": 4, "N": 50})
    b.store("Z", b.load("X", "M", "N", "B"), "B", "M", "N")
    p = make_plan(b.step("copy"), specs({"X": (4, 50, 64), "Z": (64, 4, 50)}), H200)
    assert isinstance(p, RowPlan) and p.rows == ("M", "B")


def test_what_divides_whole_rows_is_inverted_once() -> None:
    def after_the_mean(dtype: str) -> list[str]:
        kinds = [op.kind for op in rows_plan(64, 4096, norm=True, dtype=dtype).program.ops]
        return kinds[kinds.index("mean") + 1 :]

    once = ["constant", "add", "rsqrt", "mul", "store"]
    assert after_the_mean("float16") == once and after_the_mean("bfloat16") == once
    # the product of a reciprocal is rounded twice
    assert after_the_mean("float32") == ["constant", "add", "sqrt", "div", "store"]
    b = Block({"M": 8, "N": 64}, {"M.grid": 8}, {"M": 1, "N": 64})
    x = b.load("X", "M", "N")
    y = b.op("sum", x, over="N")
    b.store("Z", b.op("div", b.op("div", y, x), b.op("div", y, b.op("exp", y))), "M", "N")
    p = make_plan(b.step(), specs({"X": (8, 64), "Z": (8, 64)}), H200)
    kinds = [op.kind for op in p.program.ops]
    assert kinds == ["load", "sum", "div", "exp", "div", "constant", "div", "mul", "store"]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (RowSchedule(1024, 8, 8, 1), "1024 threads with 64 elements each do not fit into the reg"),
        (RowSchedule(512, 8, 16, 1), "512 threads with 128 elements each"),
        (RowSchedule(1024, 8, 1, 2), "2048 threads with 8 elements each"),
        (RowSchedule(32, 8, 4, 4), "32 lanes of 32 elements do not cover rows of 4096"),
    ],
)
def test_row_schedules_that_do_not_fit(schedule: RowSchedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        rows_plan(64, 4096, norm=True, schedule=schedule)


def loop_in_rows() -> Block:
    b = Block({"M": 8, "N": 64}, {"M.grid": 8, "N.loop": 2}, {"M": 1, "N": 32})
    b.store("Z", b.close(b.op("sum", b.load("X", "M", "N"), over="N"), "N"), "M")
    return b


def two_reductions() -> Block:
    b = Block({"M": 8, "N": 64}, {}, {"M": 8, "N": 64})
    x = b.load("X", "M", "N")
    b.store("Z", b.op("sum", b.op("sum", x, over="N"), over="M"), None, None)
    return b


def symbolic_column() -> Block:
    m = Symbol("M", 8)
    b = Block({"M": m, "N": 64}, {"M.grid": None}, {"M": 8, "N": 64})
    b.store("Z", b.op("exp", b.load("S", "M")), "M")
    return b


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (loop_in_rows, "N.loop: in a row loop a block has its part of a row whole"),
        (two_reductions, "one label must be the one reduced"),
        (symbolic_column, "the rows' own dimension M must have a fixed extent"),
    ],
)
def test_row_programs_that_are_refused(make: Any, message: str) -> None:
    b, m = make(), Symbol("M", 8)
    stored = next(o for o in b.ops if o.kind == "store").attributes["map"]
    z = tuple(1 if d is None else b.dims[d] for d in stored)
    x = (b.dims["M"], b.dims["N"])
    with pytest.raises(LoweringError) as caught:
        make_plan(b.step("broken"), specs({"X": x, "S": (m,), "Z": z}), H200)
    assert str(caught.value).startswith("kernel broken") and message in str(caught.value)


# --------------------------------------------------------------------------------- schedules, keys


@pytest.mark.parametrize(
    "schedule",
    [
        MatmulSchedule(4),
        MatmulSchedule(7, 2, 3, stream_columns=False, dependent_launch=True),
        MatmulSchedule(4, 2, share_rows=2, persistent=132, helpers=2, bulk_store=True),
        RowSchedule(32, 8, 4, 2),
        RowSchedule(8, 1, 4, 32, interleaved=True, dependent_launch=True),
    ],
)
def test_schedules_survive_json(schedule: MatmulSchedule | RowSchedule) -> None:
    assert read_schedule(json.loads(json.dumps(schedule_dict(schedule)))) == schedule


GOOD = schedule_dict(MatmulSchedule(4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "'kind' must be one of matmul, attention, attention sums, rows"),
        ([], "'kind' must be one of"),
        ({}, "'kind' must be one of"),
        ({"kind": "columns"}, "'kind' must be one of"),
        ({"kind": ["matmul"]}, "'kind' must be one of"),
        (
            {"kind": "matmul"},
            "missing or unknown fields: bulk_store, dependent_launch, hand_out, head",
        ),
        ({**GOOD, "depth": 1}, "missing or unknown fields: depth"),
        ({**GOOD, "kind": "rows"}, "RowSchedule: missing or unknown fields"),
        ({**GOOD, "stages": "4"}, "stages='4' is not a int"),
        ({**GOOD, "stages": -1}, "stages=-1 is not a int"),
        ({**GOOD, "stages": True}, "stages=True is not a int"),
        ({**GOOD, "dependent_launch": 1}, "dependent_launch=1 is not a bool"),
    ],
)
def test_malformed_schedules(data: Any, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_schedule(data)
    assert message in str(caught.value)


def key_of(linear: Linear, names: dict[str, str] | None = None, **options: Any) -> str:
    shapes = {(names or {}).get(t, t): s for t, s in linear.shapes().items()}
    constants = tuple((names or {}).get(t, t) for t in options.pop("constants", "WGB"))
    tensors = specs(shapes, linear.dtype, constants)
    return make_plan(linear.block(names).step("any"), tensors, H200, **options).key


def test_keys_do_not_see_names_and_hints() -> None:
    base = Linear(m=Symbol("M", 16), gain=True)
    assert key_of(base) == key_of(base, {"X": "hidden", "W": "weight", "G": "g", "Z": "out"})
    assert key_of(base) == key_of(replace(base, m=Symbol("M", 9)))
    assert json.loads(key_of(base))


def test_keys_see_everything_else() -> None:
    base = Linear(m=Symbol("M", 16), k=1024, gain=True)
    fields = {"dtype": "bfloat16", "m": 16, "k": 2048, "n": 512, "tile_k": 64, "tile_n": 128}
    fields |= {"tile_m": 32, "cluster": 2, "transposed": True, "swapped": True, "norm": False}
    fields |= {"bias": True, "residual": True, "gain": False}
    keys = [key_of(base), *(key_of(replace(base, **{f: v})) for f, v in fields.items())]
    keys += [key_of(base, constants="W"), key_of(base, dependent_launch=True)]
    given, tall = MatmulSchedule(4, 1, 4), replace(base, tile_m=32)
    others = {"share_rows": 2, "persistent": 132, "helpers": 2, "stages": 3, "head": 3}
    others |= {"pieces": 3}
    for knob, old in asdict(given).items():
        other = replace(given, **{knob: others.get(knob, not old)})
        if other.bulk_store:  # its pieces have 32 rows; 4 stages are what `tall` has anyway
            keys.append(key_of(tall, schedule=replace(other, stages=3)))
        elif other.hand_out:  # of blocks that walk, on a GPU that does it
            keys.append(base.plan(B200, schedule=replace(other, persistent=132)).key)
        elif other.issuer:  # likewise
            keys += [base.plan(B200, schedule=n).key for n in (given, other)]
        elif other.joint:  # of pairs, likewise
            square = Linear(m=4096, n=4096, tile_m=128, tile_n=256, tile_k=64, transposed=True)
            pairs = square.plan(B200)
            joint = replace(pairs.schedule, joint=True)
            keys += [pairs.key, square.plan(B200, schedule=joint).key]
        elif other.scales_columns or other.reduces_once:  # of many rows
            wide = Linear(m=128, gain=True, tile_k=64, dtype="bfloat16")
            own = {"scales_columns": True} if other.reduces_once else {}
            keys.append(key_of(wide, schedule=replace(other, **own)))
        elif other.warpgroups:
            keys.append(key_of(base, schedule=other))
    assert len(set(keys)) == len(keys)


def test_row_keys_see_attributes() -> None:
    def key(low: float) -> str:
        b = Block({"M": 16, "N": 512}, {"M.grid": 16}, {"M": 1, "N": 512})
        b.store("Z", b.op("clamp", b.load("X", "M", "N"), min=low, max=1.0), "M", "N")
        return make_plan(b.step(), specs({"X": (16, 512), "Z": (16, 512)}), H200).key

    assert key(0.0) != key(-1.0)


@pytest.mark.parametrize(
    ("n", "lanes", "strips"),
    [(14336, 128, 7), (5120, 64, 5), (4096, 128, 2), (8192, 128, 4), (11008, 64, 11)],
)
def test_strips_end_where_the_row_does(n: int, lanes: int, strips: int) -> None:
    p = rows_plan(4096, n, "exp")
    s = p.schedule
    assert (s.lanes, -(-n // p.width)) == (lanes, strips)
    assert s.lanes * s.rows >= 128


def centered(n: int, dtype: str = "float16") -> RowPlan:
    """Rows less their mean, with two vectors."""
    b = Block({"M": 64, "N": n}, {"M.grid": 64}, {"M": 1, "N": n})
    x, w, c = b.load("x", "M", "N"), b.load("w", "N"), b.load("c", "N")
    y = b.op("sub", x, b.op("mean", x, over="N"))
    b.store("y", b.op("add", b.op("mul", y, w), c), "M", "N")
    shapes = {"x": (64, n), "w": (n,), "c": (n,), "y": (64, n)}
    p = make_plan(b.step("rows"), specs(shapes, dtype), H200)
    assert isinstance(p, RowPlan)
    return p


def test_few_rows_ask_for_all_operands_at_once() -> None:
    """More threads have fewer elements of each; with many rows other blocks compute meanwhile."""

    def gated(m: int) -> RowPlan:
        b = Block({"M": m, "N": 4096}, {"M.grid": m}, {"M": 1, "N": 4096})
        h, x, a = b.load("h", "M", "N"), b.load("x", "M", "N"), b.load("a", "N")
        y = b.op("mul", b.op("add", b.op("mul", h, b.op("mean", h, over="N")), x), a)
        b.store("y", b.op("sub", y, b.op("mean", y, over="N")), "M", "N")
        shapes = {"h": (m, 4096), "x": (m, 4096), "a": (4096,), "y": (m, 4096)}
        p = make_plan(b.step("rows"), specs(shapes), H200)
        assert isinstance(p, RowPlan)
        return p

    few, many = gated(64), gated(4096)
    assert [few.program.ops[i].kind for i in few.order[:4]] == ["load"] * 3 + ["mean"]
    assert (few.schedule.lanes, few.schedule.chunks) == (256, 2)
    assert (many.schedule.lanes, many.schedule.chunks) == (128, 4)


def test_two_large_blocks_share_an_sm() -> None:
    """With 64 registers each; not where what is loaded needs more."""
    p = rows_plan(4096, 16384, norm=True)
    assert (p.threads, p.schedule.chunks, p.resident) == (512, 4, 2)
    assert p.resident * p.threads * 64 == H200.registers
    assert centered(16384).resident == 2
    assert centered(16384, "float32").resident == 0
    assert rows_plan(4096, 4096, norm=True).resident == 0


def test_vectors_are_loaded_late_where_they_take_registers() -> None:
    """LayerNorm, with two vectors: after the row's reductions, so that more blocks share an SM."""
    p = centered(8192)
    vectors = [i for i, v in p.loads.items() if "M" not in v.labels]
    assert len(vectors) == 2
    assert p.order.index(p.reductions[0]) < min(map(p.order.index, vectors))
    assert centered(4096).schedule.chunks == 2  # fewer of each element, all asked for at once
    narrow = rows_plan(64, 4096, norm=True)
    loads = [i for i in narrow.order if i in narrow.loads]
    assert list(narrow.order[: len(loads)]) == loads


def test_blocks_are_staggered_where_each_reads_weights_of_its_own() -> None:
    """Not those that walk, whose helpers stay at their first tile, nor those that load together."""
    graph = zoo.rms_norm_linear(5, 328, 320, transposed=True)
    [plan] = find(graph, Options(H200))[1].plans
    assert isinstance(plan, MatmulPlan) and plan.staggered
    changes: list[dict[str, Any]] = [
        {"persistent": 66},
        {"share_rows": 2},
        {"stream_columns": False},
    ]
    for change in changes:
        assert not plan.scheduled(replace(plan.schedule, **change)).staggered
    [plan] = find(zoo.rms_norm_linear(5, 328, 320), Options(H200))[1].plans
    assert isinstance(plan, MatmulPlan) and not plan.staggered
