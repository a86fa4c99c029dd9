"""Plans of the attention loop: roles, refusals, sizes, knobs, and what is told of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cutesuper.errors import CutesuperError, FormatError, LoweringError, ScheduleError
from cutesuper.ir.block import Axis, AxisKind
from cutesuper.ir.dims import Dim, Symbol, ceil_div, extent
from cutesuper.report import plan_text
from cutesuper.show.svg import mugraph_svg
from cutesuper.skeletons.attention.cost import price
from cutesuper.skeletons.attention.explain import attention_lines
from cutesuper.skeletons.attention.plan import AttentionPlan, Mask
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.registry import read_schedule
from cutesuper.skeletons.schedule import schedule_dict
from cutesuper.skeletons.variants import changed, planned, variants
from cutesuper.targets import B200, H200
from tests.attention import Attention
from tests.mugraphs import Block
from tests.plans import specs


@cache
def plan_of(attention: Attention, **options: Any) -> AttentionPlan:
    mu = attention.mugraph()
    plan = make_plan(mu.steps[0], mu.tensors, H200, **options)
    assert isinstance(plan, AttentionPlan)
    return plan


# --------------------------------------------------------------------------- programs made to order


class Program:
    """One program of 32 rows and 256 keys, of which tests change single operations."""

    def __init__(self, tile: dict[str, int] | None = None, **extents: Dim) -> None:
        self.shapes: dict[str, tuple[Dim, ...]] = {}
        self.dtypes: dict[str, str] = {}
        sizes: dict[str, Dim] = {"M": 32, "D": 64, "N": 256, "E": 64} | extents
        sizes = {d: n for d, n in sizes.items() if n}
        tiles = {d: extent(n) for d, n in sizes.items()} | {"N": 64} | (tile or {})
        axes: dict[str, int | None] = {
            f"{d}.grid": None if isinstance(n, Symbol) else ceil_div(extent(n), tiles[d])
            for d, n in sizes.items()
            if d not in "NDE"
        }
        axes["N.loop"] = ceil_div(extent(sizes["N"]), tiles["N"])
        self.b = Block(sizes, axes, tiles)

    def load(self, name: str, *labels: str, dtype: str = "float16") -> int:
        self.shapes[name] = tuple(self.b.dims[d] for d in labels)
        self.dtypes[name] = dtype
        return self.b.load(name, *labels)

    def store(self, name: str, x: int, *labels: str) -> None:
        self.shapes[name] = tuple(self.b.dims[d] for d in labels)
        self.b.store(name, x, *labels)

    def scores(self, q: int | None = None, k: tuple[str, ...] = ("N", "D")) -> int:
        q = self.load("Q", "M", "D") if q is None else q
        return self.b.op("matmul", q, self.load("K", *k), over="D")

    def softmax(self, s: int, v: int | None = None) -> tuple[int, int, int]:
        """Maximum, sum and result of a row, complete."""
        v = self.load("U", "N", "E") if v is None else v
        top = self.b.op("max", s, over="N")
        e = self.b.op("exp", self.b.op("sub", s, top))
        sums = self.b.op("sum", e, over="N"), self.b.op("matmul", e, v, over="N")
        m, total, y = self.b.online("N", top, *sums)
        return m, total, y

    def attend(self, s: int, v: int | None = None) -> None:
        _, total, y = self.softmax(s, v)
        self.store("Z", self.b.op("div", y, total), "M", "E")

    def plan(self, target: Any = H200, **options: Any) -> AttentionPlan:
        tensors = specs(self.shapes, "float16", (), **self.dtypes)
        plan = make_plan(self.b.step("att"), tensors, target, **options)
        assert isinstance(plan, AttentionPlan)
        return plan


# -------------------------------------------------------------------------------------------- roles


def test_places_of_a_plain_program() -> None:
    p = plan_of(Attention(rows=100, keys=1000))
    assert (p.rows, p.keys, p.inner, p.columns, p.batch) == (("L",), "N", "D", "E", ("H",))
    loads = (p.row_load, p.key_load, p.value_load)
    assert [p.arguments[p.view(i).argument].name for i in loads] == ["Q", "K", "U"]
    assert p.scores.trivial and p.factor == 0.125
    assert p.prologue is None and p.masks == () and p.key_values == {}
    assert p.result.source.trivial and p.result.rescaled
    [total] = p.row_sums
    assert total.inverse is not None
    assert p.outputs[0].expression.text(["y", "l"]) == "mul(y, l)"
    assert (p.row_tile, p.group_rows, p.key_tile) == ((64,), 64, 64)
    assert p.ragged and not p.varying and not p.few_rows


ROWS: dict[str, tuple[Attention, tuple[str, ...], tuple[int, ...]]] = {
    "heads": (Attention(group=5, rows=0), ("G",), (5,)),
    "positions": (Attention(rows=1), ("L",), (1,)),
    "heads and positions": (Attention(group=4, rows=48, row_tile=16), ("L", "G"), (16, 4)),
    "seven heads": (Attention(group=7, rows=20, row_tile=9), ("L", "G"), (9, 7)),
}


@pytest.mark.parametrize("name", ROWS)
def test_labels_of_rows(name: str) -> None:
    """Labels that are held whole vary fastest."""
    attention, labels, tile = ROWS[name]
    p = plan_of(attention)
    assert (p.rows, p.row_tile) == (labels, tile)
    assert p.few_rows == (p.group_rows <= 8)


def test_rows_stored_in_the_other_order() -> None:
    """Positions before heads in memory; the order of rows in a tile does not follow it."""
    program = Program({"L": 16}, M=0, L=48, G=4)
    _, total, y = program.softmax(program.scores(program.load("Q", "L", "G", "D")))
    program.store("Z", program.b.op("div", y, total), "L", "G", "E")
    p = program.plan()
    assert (p.rows, p.row_tile) == (("L", "G"), (16, 4))
    assert [p.view(p.row_load).stride(d) for d in p.rows] == [4 * 64, 64]


@pytest.mark.parametrize(
    ("alignment", "offset"), [("top_left", 1), ("bottom_right", 1 + 500 - 100)]
)
def test_causal_masks_are_limits(alignment: str, offset: int) -> None:
    p = plan_of(Attention(rows=100, keys=500, causal=alignment))
    assert p.masks == (Mask(None, "L", offset),)
    assert p.factor == 0.125 and p.scores.trivial  # the scale stands below the mask
    assert p.varying and p.ragged


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_are_limits(causal: bool) -> None:
    program = Program({"B": 1}, B=3)
    b = program.b
    q, k = program.load("Q", "B", "M", "D"), program.load("K", "B", "N", "D")
    n = program.load("lengths", "B", dtype="int32")
    s = b.op("matmul", q, k, over="D")
    s = b.op("length_mask", s, n, rows="M", columns="N", causal=causal)
    _, total, y = program.softmax(b.op("mul", b.const(0.5), s), program.load("U", "B", "N", "E"))
    program.store("Z", b.op("div", y, total), "B", "M", "E")
    p = program.plan()
    [mask] = p.masks
    assert mask.lengths is not None and p.arguments[mask.lengths.argument].name == "lengths"
    assert (mask.rows, mask.offset) == (("M", 1 - 32) if causal else (None, 0))
    assert p.factor == 0.5 and p.batch == ("B",)


def test_factors_and_masks_in_any_order() -> None:
    """Positive numbers leave -inf what it is."""
    program = Program()
    b = program.b
    s = b.op("div", b.op("mul", program.scores(), b.const(3.0)), b.const(4.0))
    s = b.op("causal_mask", s, rows="M", columns="N", alignment="top_left")
    program.attend(b.op("mul", b.const(2.0), s))
    p = program.plan()
    assert p.factor == 1.5 and p.scores.trivial and len(p.masks) == 1


def test_a_negative_factor_belongs_to_the_scores() -> None:
    program = Program()
    program.attend(program.b.op("mul", program.scores(), program.b.const(-2.0)))
    p = program.plan()
    assert p.factor == 1.0 and p.scores.text(["s"]) == "mul(s, -2)"


@pytest.mark.parametrize(("kind", "factor"), [("rsqrt", True), ("sqrt", False), ("exp", False)])
def test_a_factor_of_rows_multiplies_the_maximum_where_it_cannot_be_0(
    kind: str, factor: bool
) -> None:
    """Hidden scores are -inf by then, and -inf * 0 is NaN: of a query of zeros the root is 0."""
    program = Program()
    b = program.b
    q = program.load("Q", "M", "D")
    squares = b.op("sum", b.op("square", q), over="D")
    s = b.op("mul", program.scores(q), b.op(kind, squares))
    program.attend(b.op("causal_mask", s, rows="M", columns="N", alignment="top_left"))
    p = program.plan()
    assert (p.row_factor is not None) == factor
    assert p.scores.trivial == factor


def test_norms_of_rows_and_keys() -> None:
    p = plan_of(Attention(norm="QK", rows=20))
    assert p.prologue is not None and p.prologue.text(["q", "r"]) == "mul(q, r)"
    [row], [key] = p.row_reductions, p.key_reductions
    assert (row.operand, key.operand) == (p.row_load, p.key_load)
    assert row.scale == key.scale == 1 / 64
    assert p.scores.text(["s", "k"]) == "mul(s, k)" and p.factor == 0.125
    [once], [twice] = p.row_values.values(), p.key_values.values()  # reciprocals, not divisions
    assert once.text(["m"]) == twice.text(["m"]) == "rsqrt(m)"
    assert p.helpers == 3 and p.threads == 256 + 128


def test_norm_of_values() -> None:
    p = plan_of(Attention(norm="QV", rows=20, keys_last=True))
    [key] = p.key_reductions
    assert key.operand == p.value_load
    assert p.result.source.text(["w", "k"]) == "mul(w, k)"
    assert [s.source.trivial for s in p.row_sums] == [True]


def test_a_norm_with_weight() -> None:
    program = Program()
    b = program.b
    q = program.load("Q", "M", "D")
    root = b.op("sqrt", b.op("mean", b.op("square", q), over="D"))
    q = b.op("mul", b.op("div", q, root), program.load("G", "D"))
    program.attend(program.scores(q))
    p = program.plan()
    [vector] = p.vectors.values()
    assert p.arguments[vector.argument].name == "G"
    assert p.prologue is not None and p.prologue.text("xrg") == "mul(mul(x, r), g)"


def unshifted(kind: str, program: Program) -> AttentionPlan:
    b = program.b
    e = b.op(kind, b.op("mul", program.scores(), b.const(0.5)))
    y = b.close(b.op("matmul", e, program.load("U", "N", "E"), over="N"), "N")
    total = b.close(b.op("sum", e, over="N"), "N")
    program.store("Z", b.op("div", y, total), "M", "E")
    return program.plan()


@pytest.mark.parametrize("kind", ["exp", "relu", "silu"])
def test_without_a_maximum(kind: str) -> None:
    p = unshifted(kind, Program())
    assert p.maximum is None and p.weight is None and not p.result.rescaled
    assert p.result.source.text(["s"]) == f"{kind}(mul(s, 0.5))"
    assert p.row_sums[0].source == p.result.source


def test_products_without_a_function() -> None:
    """(Q K) U: linear attention."""
    program = Program()
    b = program.b
    y = b.op("matmul", program.scores(), program.load("U", "N", "E"), over="N")
    program.store("Z", b.close(y, "N"), "M", "E")
    p = program.plan()
    assert p.row_sums == ()
    assert p.result.source.trivial and p.outputs[0].expression.trivial


def test_epilogues() -> None:
    """A sum that does more than divide stays what it is."""
    program = Program()
    b = program.b
    m, total, y = program.softmax(program.scores())
    log = b.op("div", y, b.op("add", total, b.op("exp", m)))
    program.store("Z", b.op("silu", log), "M", "E")
    p = program.plan()
    assert p.row_sums[0].inverse is None
    assert p.outputs[0].expression.text(["y", "l", "m"]) == "silu(div(y, add(l, exp(m))))"


def test_statistics_of_rows_are_stored() -> None:
    """A quotient and a logarithm of a sum are the same for a maximum that lags behind."""
    program = Program()
    b = program.b
    m, total, y = program.softmax(program.scores())
    program.store("Z", b.op("div", y, total), "M", "E")
    program.store("Y", b.op("add", b.op("log", total), m), "M")
    program.store("X", m, "M")
    p = program.plan()
    assert p.row_sums[0].inverse is not None
    assert [p.tells_maximum(o) for o in p.outputs] == [False, False, True]


# ----------------------------------------------------------------------------------------- refusals


def one_product(program: Program) -> None:
    b = program.b
    y = b.op("matmul", program.scores(), program.load("U", "N", "E"), over="N")
    y = b.close(y, "N")
    z = b.op("matmul", y, program.load("W", "E", "D"), over="E")
    program.store("Z", z, "M", "D")


def both_have_keys(program: Program) -> None:
    b = program.b
    q = program.load("Q", "M", "N", "D")
    s = b.op("matmul", q, program.load("K", "N", "D"), over="D")
    program.attend(s)


def scores_squared(program: Program) -> None:
    b = program.b
    s = b.op("matmul", program.load("Q", "M", "D"), program.load("K", "N", "D"), over="D")
    y = b.op("matmul", s, b.op("exp", s), over="N")
    program.store("Z", b.close(y, "N"), "M")


def computed_keys(program: Program) -> None:
    k = program.b.op("exp", program.load("K", "N", "D"))
    program.attend(program.b.op("matmul", program.load("Q", "M", "D"), k, over="D"))


def computed_values(program: Program) -> None:
    program.attend(program.scores(), program.b.op("exp", program.load("U", "N", "E")))


def two_queries(program: Program) -> None:
    q = program.b.op("add", program.load("Q", "M", "D"), program.load("R", "M", "D"))
    program.attend(program.scores(q))


def no_columns(program: Program) -> None:
    _, total, y = program.softmax(program.scores(), program.load("U", "N"))
    program.store("Z", program.b.op("div", y, total), "M")


def two_sums(program: Program) -> None:
    b = program.b
    s = program.scores()
    e = b.op("exp", s)
    y = b.close(b.op("matmul", e, program.load("U", "N", "E"), over="N"), "N")
    sums = [b.close(b.op("sum", x, over="N"), "N") for x in (e, s)]
    program.store("Z", b.op("div", b.op("mul", y, sums[0]), sums[1]), "M", "E")


def two_maxima(program: Program) -> None:
    b = program.b
    s = program.scores()
    other = b.close(b.op("max", b.op("exp", s), over="N"), "N", "max")
    _, total, y = program.softmax(s)
    program.store("Z", b.op("mul", b.op("div", y, total), other), "M", "E")


def masked_without_maximum(program: Program) -> None:
    b = program.b
    s = b.op("causal_mask", program.scores(), rows="M", columns="N", alignment="top_left")
    y = b.op("matmul", b.op("exp", s), program.load("U", "N", "E"), over="N")
    program.store("Z", b.close(y, "N"), "M", "E")


def other_maximum(program: Program) -> None:
    """The weights are exp(2 s - max s)."""
    b = program.b
    s = program.scores()
    top = b.op("max", s, over="N")
    e = b.op("exp", b.op("sub", b.op("mul", s, b.const(2.0)), top))
    _, y = b.online("N", top, b.op("matmul", e, program.load("U", "N", "E"), over="N"))
    program.store("Z", y, "M", "E")


def mask_of_rows(program: Program) -> None:
    b = program.b
    s = b.op("causal_mask", program.scores(), rows="N", columns="M", alignment="top_left")
    program.attend(s)


def sum_not_rescaled(program: Program) -> None:
    b = program.b
    _, _, y = program.softmax(program.scores())
    e = next(i for i, op in enumerate(b.ops) if op.kind == "exp")
    program.store("Z", b.op("div", y, b.close(b.op("sum", e, over="N"), "N")), "M", "E")


def mean_over_keys(program: Program) -> None:
    b = program.b
    e = b.op("exp", program.scores())
    y = b.close(b.op("matmul", e, program.load("U", "N", "E"), over="N"), "N")
    mean = b.close(b.op("mean", e, over="N"), "N")
    program.store("Z", b.op("div", y, mean), "M", "E")


def bias_of_scores(program: Program) -> None:
    program.attend(program.b.op("add", program.scores(), program.load("B", "M", "N")))


def lengths_of_rows(program: Program) -> None:
    b = program.b
    s = b.op("matmul", program.load("Q", "M", "D"), program.load("K", "N", "D"), over="D")
    n = program.load("lengths", "M", dtype="int32")
    program.attend(b.op("length_mask", s, n, rows=None, columns="N", causal=False))


def no_label_of_rows(program: Program) -> None:
    """One query for every head of keys, and no dimension for it."""
    b = program.b
    s = b.op("matmul", program.load("Q", "M", "D"), program.load("K", "M", "N", "D"), over="D")
    _, total, y = program.softmax(s, program.load("U", "M", "N", "E"))
    program.store("Z", b.op("div", y, total), "M", "E")


def partial_results(program: Program) -> None:
    """A split over the grid that another kernel has to add up."""
    b = program.b
    b.axes = (Axis("N", AxisKind.GRID, 2), *b.axes[:-1], Axis("N", AxisKind.LOOP, 2))
    y = b.op("matmul", b.op("exp", program.scores()), program.load("U", "N", "E"), over="N")
    program.shapes["Z"] = (2, 32, 64)
    b.store("Z", b.acc(y, "N.loop"), "N.grid", "M", "E")


def short_value_label(program: Program) -> None:
    """Loads of device memory stand beside the result, not only values of rows."""
    b = program.b
    _, total, y = program.softmax(program.scores())
    y = b.op("add", b.op("div", y, total), program.load("R", "M", "E"))
    program.store("Z", y, "M", "E")


def stored_across(program: Program) -> None:
    _, total, y = program.softmax(program.scores())
    program.store("Z", program.b.op("div", y, total), "E", "M")


def query_across(program: Program) -> None:
    program.attend(program.scores(program.load("Q", "D", "M")))


def vector_of_heads(program: Program) -> None:
    q = program.b.op("mul", program.load("Q", "M", "D"), program.load("G", "D", dtype="float32"))
    program.attend(program.scores(q))


def mixed(program: Program) -> None:
    program.attend(program.scores(program.load("Q", "M", "D", dtype="bfloat16")))


REFUSED: dict[str, tuple[Any, str]] = {
    "three products": (one_product, "it has 3 matrix products; it runs two"),
    "keys in both operands": (both_have_keys, "no operand of operation 2 has the label N"),
    "scores times scores": (scores_squared, "multiplies two scores"),
    "computed keys": (computed_keys, r"operation 1 \(exp\) is multiplied where only a tensor"),
    "computed values": (computed_values, r"\(exp\) is multiplied where only a tensor"),
    "two queries": (two_queries, "the first product is made of several tensors"),
    "values without columns": (no_columns, "values have 0 labels of their own"),
    "two sums": (two_sums, "2 sums over N; a row has room for one"),
    "two maxima": (two_maxima, "2 maxima over N; one can run"),
    "mask, no maximum": (masked_without_maximum, "without a maximum: use softmax"),
    "maximum of something else": (other_maximum, "is not subtracted from what it is the maximum"),
    "mask of rows": (mask_of_rows, "causal_mask hides M, the loop runs over N"),
    "plain sum beside a maximum": (sum_not_rescaled, "is not rescaled, and the loop has a maximum"),
    "mean": (mean_over_keys, r"mean over N \(operation \d+\); sum, and divide"),
    "partial results": (partial_results, "is used before it is complete over N.grid"),
    "lengths of rows": (lengths_of_rows, "differ between the rows of a tile"),
    "no rows": (no_label_of_rows, "its rows have no label of their own"),
    "residual": (short_value_label, r"\(load \[M, E\]\) is needed beside the scores"),
    "stored across": (stored_across, r"Z\['64', '32'\] is stored, and not contiguous along E"),
    "query across": (query_across, r"Q\['64', '32'\] must be contiguous along D"),
    "vector of fp32": (vector_of_heads, r"of float16 and of float32 \(G\)"),
    "two types": (mixed, r"operands of float16 and of bfloat16 \(Q\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, message = REFUSED[name]
    program = Program()
    make(program)
    with pytest.raises(LoweringError, match=f"kernel att: .*{message}"):
        program.plan()


def test_a_bias_meets_the_scores() -> None:
    program = Program()
    bias_of_scores(program)
    [view] = program.plan().beside.values()
    assert view.labels == ("M", "N")


def too_wide() -> Program:
    program = Program(E=320)
    program.attend(program.scores())
    return program


def cut(label: str) -> Program:
    """A tile with only a part of a label that has to be whole."""
    program = Program({label: 32})
    program.b.axes = (Axis(label, AxisKind.GRID, 2), *program.b.axes)
    if label == "D":  # a product over a part of it, never added up, is refused before
        program.b.axes = (Axis("D", AxisKind.LOOP, 2), *program.b.axes[1:])
        s = program.b.acc(program.scores(), "D.loop")
        program.attend(s)
    else:
        program.attend(program.scores())
    return program


def odd_rows() -> Program:
    program = Program(D=60)
    program.attend(program.scores())
    return program


def of_type(dtype: str) -> Program:
    program = Program()
    q, k = program.load("Q", "M", "D", dtype=dtype), program.load("K", "N", "D", dtype=dtype)
    s = program.b.op("matmul", q, k, over="D")
    program.attend(s, program.load("U", "N", "E", dtype=dtype))
    return program


def six_labels() -> Program:
    names = ("A", "B", "C", "F", "M", "D")
    program = Program(dict.fromkeys("ABCF", 1), **dict.fromkeys("ABCF", 2))
    program_q = program.load("Q", *names)
    s = program.scores(program_q)
    _, total, y = program.softmax(s)
    program.store("Z", program.b.op("div", y, total), "A", "B", "C", "F", "M", "E")
    return program


UNFIT: dict[str, tuple[Any, type[CutesuperError], str]] = {
    "wide": (too_wide, ScheduleError, "tile E=320 of 320; a block holds it whole, at most 256"),
    "part of the columns": (lambda: cut("E"), ScheduleError, "tile E=32 of 64; a block holds it"),
    "odd rows": (odd_rows, LoweringError, r"rows of Q\['32', '60'\] are not multiples of 16 bytes"),
    "fp32": (lambda: of_type("float32"), LoweringError, "products of float32 have no tensor-core"),
    "six labels": (six_labels, LoweringError, "has 6 labels, and bulk tensor copies 5 dimensions"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit(name: str) -> None:
    make, error, message = UNFIT[name]
    with pytest.raises(error, match=f"kernel att: .*{message}"):
        make().plan()


def test_other_targets() -> None:
    program = Program()
    program.attend(program.scores())
    with pytest.raises(LoweringError, match=r"kernel att: .*sm_120a"):
        program.plan(replace(B200, arch="sm_120a"))


def test_a_mask_to_the_last_key_of_symbolic_rows() -> None:
    program = Program(M=Symbol("M", 32))
    s = program.b.op(
        "causal_mask", program.scores(), rows="M", columns="N", alignment="bottom_right"
    )
    program.attend(s)
    plan = program.plan()
    keys = plan.extent("N")
    assert plan.masks == (Mask(None, "M", 1 + keys, taken="M"),)
    assert plan.offset(plan.masks[0]) == 1 + keys - 32
    assert f"keys N < M - M + {1 + keys}" in plan_text("att", plan)


# ---------------------------------------------------------------------------------------- schedules

DECODE = Attention(group=4, rows=0, keys=4096, width=128, grid=8, cluster=2)
PREFILL = Attention(rows=256, keys=4096, width=128, key_tile=128)
WIDE = Attention(rows=512, keys=512, row_tile=128)
MANY = Attention(heads=140, group=4, rows=0, keys=512)


def test_chosen_schedules() -> None:
    few, many = plan_of(DECODE).schedule, plan_of(PREFILL).schedule
    assert (few.key_groups, few.overlapped, few.stream_keys) == (2, False, True)
    assert (many.key_groups, many.overlapped, many.stream_keys) == (2, True, False)
    assert (plan_of(WIDE).schedule.row_groups, plan_of(WIDE).schedule.key_groups) == (2, 1)
    two = plan_of(MANY)
    assert two.schedule.resident == 2 and 2 * (two.shared_bytes + 1024) <= 228 * 1024
    assert plan_of(DECODE, dependent_launch=True).schedule == replace(few, dependent_launch=True)


def test_two_warpgroups_of_rows_multiply_together() -> None:
    """Where instructions of 128 rows are faster: with half of the accumulators' room each."""
    mu = replace(WIDE, width=256).mugraph()
    plan = make_plan(mu.steps[0], mu.tensors, B200)
    assert isinstance(plan, AttentionPlan) and plan.schedule.together
    assert (plan.instructions, plan.row_tile, plan.group_rows) == (1, (128,), 64)
    assert "by two warpgroups together" in "\n".join(attention_lines(plan))
    apart = replace(plan.schedule, together=False)
    with pytest.raises(ScheduleError, match="numbers of products in a block"):
        make_plan(mu.steps[0], mu.tensors, B200, apart)
    mu = WIDE.mugraph()
    both = [make_plan(mu.steps[0], mu.tensors, B200, replace(plan_of(WIDE).schedule, together=x))
            for x in (False, True)]  # fmt: skip
    tensor = [price(p, B200).parts["tensor"] for p in both if isinstance(p, AttentionPlan)]
    assert tensor[0] == pytest.approx(2 * tensor[1])


def test_tiles_of_heads_need_no_even_number_of_positions() -> None:
    """If all rows are one instruction's: 17 positions of 7 heads."""
    odd = Attention(group=7, rows=170, row_tile=17, keys=512)
    mu = odd.mugraph()
    with pytest.raises(ScheduleError, match="a tile of 17 x 7 rows for 2 warpgroup"):
        make_plan(mu.steps[0], mu.tensors, H200)
    plan = make_plan(mu.steps[0], mu.tensors, B200)
    assert isinstance(plan, AttentionPlan) and (plan.row_tile, plan.group_rows) == ((17, 7), 60)


def test_registers_handed_over() -> None:
    """Only where an equal share of all threads would not hold what lives in the loop."""
    assert plan_of(WIDE).registers is None and plan_of(WIDE).threads == 288
    large = plan_of(PREFILL)
    assert large.live_registers > 128
    assert large.registers == (240, 24) and large.threads == 384


BAD: dict[str, tuple[Attention, dict[str, Any], str]] = {
    "rows": (Attention(rows=300, row_tile=192), {}, "a tile of 192 rows for 3|3 x 1 consumer"),
    "rows of one": (WIDE, {"row_groups": 1}, "a tile of 128 rows for 1 warpgroup"),
    "rows of two": (Attention(rows=63), {"row_groups": 2, "key_groups": 1}, "a tile of 63 rows"),
    "keys": (Attention(key_tile=32), {}, "tile N=32; must be 64 or 128"),
    "stages": (DECODE, {"stages": 3}, "3 stages for 2 warpgroups along the keys"),
    "no stages": (DECODE, {"stages": 0}, "0 stages for 2 warpgroups"),
    "standing still": (
        Attention(norm="QV", rows=64), {"overlapped": True, "stages": 2}, "multiple, at least 4",
    ),
    "four groups": (WIDE, {"key_groups": 2}, "2 x 2 consumer warpgroups"),
    "no groups": (DECODE, {"key_groups": 0}, "1 x 0 consumer warpgroups"),
    "one group together": (DECODE, {"together": True}, "together=True needs two warpgroups"),
    "two together": (WIDE, {"together": True}, r"h200 \(sm_90a\) multiplies 128 rows"),
    "no blocks": (DECODE, {"resident": 0}, "in 0 block"),
    "memory": (PREFILL, {"stages": 4}, "4 stages of 65536 bytes, 16384 bytes of rows"),
    "half of the memory": (DECODE, {"resident": 2}, "do not fit into 115712 bytes"),
    "registers": (
        Attention(width=256, key_tile=128), {},
        "224 of 255 registers for the products of a thread",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_schedules_that_do_not_fit(name: str) -> None:
    attention, knobs, message = BAD[name]
    schedule = replace(plan_of(attention).schedule, **knobs) if knobs else None
    mu = attention.mugraph()
    with pytest.raises(ScheduleError, match=f"kernel attention: .*({message})"):
        make_plan(mu.steps[0], mu.tensors, H200, schedule)


def test_a_schedule_of_another_skeleton() -> None:
    mu = DECODE.mugraph()
    with pytest.raises(ScheduleError, match="an attention loop takes AttentionSchedule"):
        make_plan(mu.steps[0], mu.tensors, H200, MatmulSchedule(4))


def test_schedules_as_json() -> None:
    schedule = plan_of(DECODE).schedule
    data = schedule_dict(schedule)
    assert data["kind"] == "attention" and read_schedule(data) == schedule
    for changes, message in (
        ({"stages": 2.0}, "AttentionSchedule: stages=2.0 is not a int"),
        ({"key_groups": -1}, "key_groups=-1 is not a int"),
        ({"overlapped": 1}, "overlapped=1 is not a bool"),
        ({"warps": 1}, "missing or unknown fields: warps"),
    ):
        with pytest.raises(FormatError, match=message):
            read_schedule(data | changes)
    said = "'kind' must be one of matmul, attention, attention sums, rows, row loop"
    with pytest.raises(FormatError, match=said):
        read_schedule({**data, "kind": "attentive"})


def neighbours(attention: Attention) -> list[str]:
    mu = attention.mugraph()
    default = plan_of(attention)
    found = variants(mu.steps[0], mu.tensors, H200, default)
    assert found[0] == default and len({p.key for p in found}) == len(found)
    for p in found:
        assert isinstance(p.schedule, AttentionSchedule)
        assert planned(mu.steps[0], mu.tensors, H200, p.schedule).key == p.key
    return [changed(p.schedule, default.schedule) for p in found[1:]]


def test_variants() -> None:
    assert neighbours(DECODE) == [
        "stages=2", "key_groups=1", "overlapped=yes", "stages=2 key_groups=1 resident=2",
        "stream_keys=no", "stages=6",
    ]  # fmt: skip
    assert neighbours(WIDE) == ["stages=3", "overlapped=no", "stream_keys=yes", "stages=5"]
    assert "resident=1" in neighbours(MANY)


# -------------------------------------------------------------------------------------------- sizes


def test_sizes_by_hand() -> None:
    """4 rows of 128 columns in a block of two warpgroups, in clusters of 2, 8 over the grid."""
    p = plan_of(DECODE)
    assert (p.active_threads, p.items, p.group_items, p.owned_items) == (32, 8, 4, 2)
    assert p.part_words == 4 * 32 * 2 + 32
    assert p.stage_bytes == 2 * 64 * 256 and p.query_bytes == 2 * 64 * 128
    assert p.meeting_bytes == 16 * 32 * 9 * 2
    assert p.exchange_bytes == 4 * p.part_words * 2 * 2
    partials, counters = p.scratch
    assert partials.shape == (2 * p.part_words * 8 * 4,) and not partials.zeroed
    assert counters.shape == (2 * 4,) and counters.zeroed


def test_padded_sizes() -> None:
    p = plan_of(Attention(rows=20, width=40, cluster=4))
    assert (p.depth, p.width) == (48, 48)
    assert (p.active_threads, p.items, p.group_items, p.owned_items) == (64, 6, 3, 1)


@pytest.mark.parametrize("tile", [1, 2])
def test_scratch_of_a_symbolic_batch(tile: int) -> None:
    """Counted at the call: one piece for every sequence, whatever the program's tile of them."""
    program = Program({"B": tile, "N": 64}, B=Symbol("B", 5), N=512)
    b = program.b
    b.axes = (*b.axes[:-1], Axis("N", AxisKind.GRID, 2), Axis("N", AxisKind.LOOP, 4))
    q, k = program.load("Q", "B", "M", "D"), program.load("K", "B", "N", "D")
    e = b.op("exp", b.op("matmul", q, k, over="D"))
    y = b.acc(b.op("matmul", e, program.load("U", "B", "N", "E"), over="N"), "N.loop")
    b.ops.append(
        replace(
            b.ops[y], kind="grid_reduce", inputs=(y,), attributes={"axis": "N.grid", "op": "sum"}
        )
    )
    program.store("Z", len(b.ops) - 1, "B", "M", "E")
    p = program.plan()
    assert p.grid_parts == 2 and p.batch == ("B",)
    words = p.part_words * 2 * p.warpgroups
    assert [s.shape for s in p.scratch] == [(b.dims["B"], words), (b.dims["B"], p.warpgroups)]


# ------------------------------------------------------------------------------------------ reports

TOLD = [
    "attention loop: rows G 4, N 64 per stage, D 128 and E 128 whole",
    (
        "grid 16 x 1 x 2 blocks in clusters of 2, 288 threads: 2 consumer warpgroup(s), 1 along "
        "the rows and 2 along the keys, 1 producer warp"
    ),
    "score: Q times K over D, then score * 0.125; weight: exp(score - running maximum)",
    "cluster: 2 blocks with a part of N each; 4608 bytes arrive through distributed shared memory",
    (
        "grid: 8 clusters with a part of N each; the last one to arrive adds 18432 fp32 values in "
        "device memory, counted by 8 counters"
    ),
    "Z = mul(result, (1 / sum0))",
]


def test_a_plan_in_words() -> None:
    text = plan_text("k0", plan_of(DECODE))
    assert [line for line in TOLD if line not in text] == []
    masked = plan_text("k0", plan_of(Attention(rows=100, keys=500, causal="bottom_right")))
    assert "keys N < L + 401" in masked and "grid:" not in masked
    normed = plan_text("k0", plan_of(Attention(norm="QK", rows=20)))
    assert "rows, rewritten in shared memory: mul(Q, row0)" in normed
    assert "key statistic0: sum of square(K) * 0.015625" in normed


def test_a_picture() -> None:
    svg = mugraph_svg(DECODE.mugraph())
    assert svg.startswith("<svg") and "18 grid rescaled sum over N.grid" in svg


@pytest.mark.parametrize("abreast", [0, 1, 2, 3, 9])
def test_blocks_of_masked_rows_begin_with_the_longest(abreast: int) -> None:
    from cutesuper.skeletons.attention.kernel.rows import longest_first

    for tiles, members in itertools.product((1, 2, 5), (1, 3, 4, 7)):
        count = range(tiles * members)
        found = [(*map(int, longest_first(n, tiles, members, abreast)),) for n in count]
        assert sorted(found) == [*itertools.product(range(tiles), range(members))]
        together = max(1, abreast)
        assert found == sorted(found, key=lambda place: place[1] // together)
        for first in range(0, members, together):
            own = [tile for tile, member in found if member // together == first // together]
            assert own == sorted(own)
