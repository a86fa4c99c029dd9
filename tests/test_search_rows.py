"""The search finds persistent row programs and rows in clusters, at sizes that measured best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.egraph.labelled import LabelledProgram
from cutesuper.errors import SearchError
from cutesuper.ir.block import (
    CLUSTER_REDUCE,
    GRID_REDUCE,
    AxisKind,
    BlockProgram,
    MuGraph,
)
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.ir.unseen import followed
from cutesuper.search.search import SearchOptions, SearchResult, search
from cutesuper.skeletons.cost import describe
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowLoopPlan
from cutesuper.skeletons.rows.skeleton import Rows
from cutesuper.targets import B200, H100, H200, Target
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.numeric import compare
from tests.test_search import without_unused

Graph = KernelGraph
M = Symbol("M", 4096)


def rows(*shapes: tuple[Dim, ...], build: Callable[..., Any], dtype: str = "bfloat16") -> Graph:
    """A graph whose outputs are what ``build(g, *inputs)`` returns; statistics are float32."""
    g = new_kernel_graph()
    given_ = [
        g.new_input(s, dtype="float32" if s[-1] == 1 else dtype, name=f"x{k}")
        for k, s in enumerate(shapes)
    ]
    made = build(g, *given_)
    for t in made if isinstance(made, tuple) else (made,):
        g.mark_output(t)
    return g


def rms_norm(m: Dim, n: int, weight: bool = True, dtype: str = "bfloat16") -> Graph:
    shapes = ((m, n), (n,)) if weight else ((m, n),)
    return rows(*shapes, build=lambda g, x, *w: g.rms_norm(x, *w), dtype=dtype)


def layer_norm(m: Dim, n: int, weight: bool = True) -> Graph:
    def build(g: Graph, x: Tensor, *affine: Tensor) -> Tensor:
        centred = x - g.mean(x, -1)
        y = centred / g.sqrt(g.mean(g.square(centred), -1) + 1e-5)
        return y * affine[0] + affine[1] if affine else y

    return rows((m, n), *([(n,), (n,)] if weight else []), build=build)


def softmax(m: Dim, n: int) -> Graph:
    return rows((m, n), build=lambda g, x: g.softmax(x))


def rms_backward(m: Dim, n: int, dtype: str = "bfloat16") -> Graph:
    return cs.split(rms_norm(m, n, dtype=dtype)).backward


def found(g: Graph, target: Target = H200) -> SearchResult:
    """The candidates that skeletons run, verified."""
    verifier = Verifier(g)

    def right(mu: MuGraph) -> bool:
        result = verifier.check(mu, bound=False)
        assert result, result.summary()
        return True

    return search(g, target, options=SearchOptions(lowered=True), verify=right)


def program(g: Graph, target: Target = H200) -> BlockProgram:
    """The block program of the only kernel."""
    (step,) = found(g, target).candidates[0].mugraph.steps
    return step.program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_differences_with_a_maximum_are_as_they_are_written_in_float32(dtype: str) -> None:
    """In ``x - (max x + log s)`` a large maximum is rounded once more; 16 bits do not see it."""

    def build(g: Graph, x: Any, dy: Any, s: Any) -> Any:
        e = g.expm1(x)
        t = e - g.max(e, 1) - g.log(s)
        z = dy * g.sigmoid(t + t)
        return (z - g.exp(t) * g.sum(z, 1)) * g.exp(x)

    result = found(rows((32, 16), (32, 16), (32, 1), dtype=dtype, build=build))
    programs = [c.mugraph.steps[0].program.ops for c in result.candidates]
    sums = [[ops[i].kind for i in op.inputs] for ops in programs for op in ops if op.kind == "add"]
    assert any("max" in kinds for kinds in sums) == (dtype == "bfloat16")


# ------------------------------------------------------------------------------ backward passes


BACKWARD: dict[str, Callable[[Dim, int], Graph]] = {
    "rms norm": rms_norm,
    "rms norm without weight": lambda m, n: rms_norm(m, n, weight=False),
    "layer norm": layer_norm,
    "layer norm without weight": lambda m, n: layer_norm(m, n, weight=False),
    "softmax": softmax,
}


@pytest.mark.parametrize("m", [4096, M], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_are_one_kernel(name: str, m: Dim) -> None:
    """With and without saved values; the graph is not searched in parts."""
    forward = BACKWARD[name](m, 1024)
    for g in (cs.split(forward).backward, cs.grad(forward)):
        result = found(g)
        assert result.statistics.regions == 1 and result.statistics.rejected == 0
        (step,) = result.candidates[0].mugraph.steps
        kinds = [op.kind for op in step.program.ops]
        assert kinds.count(GRID_REDUCE) == len(g.outputs) - 1
        assert bool(step.program.of_kind(AxisKind.PERSISTENT)) == (len(g.outputs) > 1)
        for t in step.reads:
            assert sum(op.attributes.get("tensor") == t for op in step.program.loads()) == 1


#: rows and elements of RMSNorm's backward pass in bf16, and the sizes chosen
SIZES: dict[tuple[Dim, int], str] = {
    (128, 4096): "M.grid(128), tile M=1 K=4096",
    (1024, 4096): "M.grid(128) M.persistent(4), tile M=2 K=4096",
    (4096, 1024): "M.grid(128) M.persistent(4), tile M=8 K=1024",
    (4096, 2048): "M.grid(128) M.persistent(8), tile M=4 K=2048",
    (4096, 4096): "M.grid(128) M.persistent(16), tile M=2 K=4096",
    (4096, 8192): "M.grid(128) M.persistent(32), tile M=1 K=8192",
    (4096, 16384): "M.grid(66) M.persistent(63) K.cluster(2), tile M=1 K=8192",
    (32768, 4096): "M.grid(132) M.persistent(125), tile M=2 K=4096",
    (4096, 32768): "M.grid(30) M.persistent(137) K.cluster(4), tile M=1 K=8192",
    (512, 262144): "M.grid(7) M.persistent(74) K.cluster(16), tile M=1 K=16384",
    (100, 8): "M.grid(2), tile M=64 K=8",
    (M, 4096): "M.grid(132) M.persistent(?), tile M=2 K=4096",
    (Symbol("M", 64), 4096): "M.grid(64) M.persistent(?), tile M=1 K=4096",
    (M, 16384): "M.grid(66) M.persistent(?) K.cluster(2), tile M=1 K=8192",
    (4096, 10001): "M.grid(66) M.persistent(63) K.cluster(2), tile M=1 K=5008",
}


@pytest.mark.parametrize("shape", SIZES)
def test_sizes(shape: tuple[Dim, int]) -> None:
    """Stages of about 32 KB, no more blocks than run at once, clusters where a row is longer."""
    assert describe(program(rms_backward(*shape))) == SIZES[shape]


def test_wider_elements_need_clusters_earlier() -> None:
    assert describe(program(rms_backward(4096, 8192, "float32"))) == (
        "M.grid(66) M.persistent(63) K.cluster(2), tile M=1 K=4096"
    )


#: microseconds of a prototype in one launch on one H200: rows and elements, bf16, cold L2
MEASURED = {
    (1024, 4096): 10.6, (4096, 1024): 9.95, (4096, 2048): 16.0, (4096, 4096): 28.6,
    (4096, 8192): 53.7, (4096, 16384): 101.6, (32768, 4096): 192.5,
}  # fmt: skip


@pytest.mark.parametrize("shape", MEASURED)
def test_predicted_time_is_near_what_was_measured(shape: tuple[int, int]) -> None:
    assert found(rms_backward(*shape)).candidates[0].cost_us == pytest.approx(
        MEASURED[shape], rel=0.05
    )


@pytest.mark.parametrize("target", [H100, B200], ids=["h100", "b200"])
def test_other_targets(target: Target) -> None:
    p = program(rms_backward(4096, 16384), target)
    blocks = p.blocks()
    assert blocks <= target.sms and p.parts_along("K", AxisKind.CLUSTER) == 2


# -------------------------------------------------------------------------- sums over the rows


def _scale_and_offset(g: Graph, x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return dy * w, g.sum(dy * x, 0), g.sum(dy, 0) * 0.5 + w


def _norm(g: Graph, x: Tensor, dy: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    hat, grad = x * rstd, dy * w
    return (grad - hat * g.mean(grad * hat, -1)) * rstd, dy * hat


def _per_head(g: Graph, *t: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = _norm(g, *t)
    return dx, g.sum(dw, 0)


def _shared(g: Graph, *t: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = _norm(g, *t)
    return dx, g.sum(g.sum(dw, 1), 0)


def _norm_shapes(*outer: Dim, n: int, heads: bool) -> tuple[tuple[Dim, ...], ...]:
    x, last = (*outer, n), outer[-1]
    return x, x, ((last, n) if heads else (n,)), (*outer, 1)


SUMS: dict[str, tuple[Graph, str, int]] = {
    "columns": (
        rows((4096, 4096), build=lambda g, x: g.sum(x, 0)),
        "K.grid(128) K.persistent(8), tile N=4096 K=4",
        1,
    ),
    "columns, symbolic": (
        rows((M, 4096), build=lambda g, x: g.sum(x, 0)),
        "K.grid(132) K.persistent(?), tile N=4096 K=4",
        1,
    ),
    "wide columns": (
        rows((M, 65536), build=lambda g, x: g.sum(x, 0)),
        "N.grid(64) K.grid(2) K.persistent(?), tile N=1024 K=16",
        1,
    ),
    "scale and offset": (
        rows((M, 4096), (M, 4096), (4096,), build=_scale_and_offset),
        "K.grid(132) K.persistent(?), tile K=2 N=4096",
        2,
    ),
    "a mean of everything": (
        rows((M, 4096), (M, 4096), build=lambda g, x, y: g.mean(g.mean(g.square(x - y), -1), 0)),
        "M.grid(132) M.persistent(?), tile M=2 K=4096",
        1,
    ),
    "matrix and vector": (
        rows((4096, 512), (4096, 1), dtype="float32", build=lambda g, x, v: g.transpose(x) @ v),
        "K.grid(128) K.persistent(2), tile M=512 K=16",
        1,
    ),
    "a weight for each head": (
        rows(*_norm_shapes(4096, 8, n=128, heads=True), build=_per_head),
        "B.grid(16) B.persistent(4) M.grid(8), tile B=64 M=1 K=128",
        1,
    ),
    "a weight for each head, symbolic": (
        rows(*_norm_shapes(M, 8, n=128, heads=True), build=_per_head),
        "B.grid(16) B.persistent(?) M.grid(8), tile B=64 M=1 K=128",
        1,
    ),
    "batches and rows": (
        rows(*_norm_shapes(8, 512, n=1024, heads=False), build=_shared),
        "B.grid(8) M.grid(16) M.persistent(4), tile B=1 M=8 K=1024",
        2,
    ),
    "symbolic batches and rows": (
        rows(*_norm_shapes(M, 16, n=1024, heads=False), build=_shared),
        "B.grid(8) B.persistent(?) M.grid(16), tile B=8 M=1 K=1024",
        2,
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_rows_are_one_kernel(name: str) -> None:
    g, size, combined = SUMS[name]
    p = program(g)
    assert describe(p) == size
    assert sum(op.kind == GRID_REDUCE for op in p.ops) == combined
    assert p.blocks() <= H200.sms


def test_sums_of_few_rows_stay_in_a_block() -> None:
    """Nothing has to be combined."""
    p = program(rows((1000, 4096), build=lambda g, x: g.sum(x, 0)))
    assert not p.of_kind(AxisKind.PERSISTENT) and describe(p) == "N.grid(4096), tile N=1 K=1000"


def test_sums_that_rows_need_again_are_a_kernel_of_their_own() -> None:
    """Blocks visit their rows once."""
    first, second = (
        found(rows((M, 64), build=lambda g, x: x - g.mean(x, 0))).candidates[0].mugraph.steps
    )
    assert first.program.of_kind(AxisKind.PERSISTENT)
    assert not second.program.of_kind(AxisKind.PERSISTENT)


def test_sums_of_different_rows_are_several_kernels() -> None:
    g = rows((M, 512), (M, 8, 512), build=lambda g, x, y: (g.sum(x, 0), g.sum(g.sum(y, 1), 0)))
    assert len(found(g).candidates[0].mugraph.steps) == 2


def test_more_heads_than_blocks_wait_for_nobody() -> None:
    """A block has all rows of a head; where clusters share rows, all of them meet."""
    g = rows(*_norm_shapes(1024, 256, n=128, heads=True), build=_per_head)
    mu = found(g).candidates[0].mugraph
    [step] = mu.steps
    plan = make_plan(step, followed(mu), H200)
    assert isinstance(plan, RowLoopPlan) and plan.alone
    assert plan.grid_blocks == 256 > H200.sms and len(plan.scratch) == 1


# ---------------------------------------------------------------------------------- long rows


LONG: dict[str, tuple[Graph, str]] = {
    "softmax": (softmax(4096, 131072), "M.grid(4096) K.cluster(8), tile M=1 K=16384"),
    "softmax, symbolic": (softmax(M, 65536), "M.grid(?) K.cluster(4), tile M=1 K=16384"),
    "rms norm": (rms_norm(4096, 40000), "M.grid(4096) K.cluster(4), tile M=1 K=10000"),
    "rms norm, the longest": (rms_norm(M, 262144), "M.grid(?) K.cluster(16), tile M=1 K=16384"),
    "odd": (rms_norm(64, 100001), "M.grid(64) K.cluster(16), tile M=1 K=6256"),
    "two tensors": (
        rows((M, 32768), (M, 32768), build=lambda g, x, r: (x + r, g.rms_norm(x + r))),
        "M.grid(?) K.cluster(4), tile M=1 K=8192",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_rows_lie_in_a_cluster(name: str) -> None:
    g, size = LONG[name]
    p = program(g)
    assert describe(p) == size
    assert any(op.kind == CLUSTER_REDUCE for op in p.ops)


@pytest.mark.parametrize("n", [1024, 8192, 16384])
def test_rows_that_a_block_holds_need_no_cluster(n: int) -> None:
    assert describe(program(softmax(4096, n))) == f"M.grid(4096), tile M=1 K={n}"


def test_rows_of_more_than_one_tile_are_better_in_a_cluster() -> None:
    """But for those that are only read, or need a cluster's vectors twice, and single rows."""
    both = {"x": (M, 16384), "y": (M, 16384)}
    assert describe(program(softmax(M, 32768))) == "M.grid(?) K.cluster(2), tile M=1 K=16384"
    added = rows(*both.values(), build=lambda g, x, y: g.softmax(x + y))
    assert describe(program(added)) == "M.grid(?) K.cluster(2), tile M=1 K=8192"
    scaled = rows(*both.values(), (16384,), build=lambda g, x, y, w: g.softmax(x + y) * w)
    read = rows((M, 32768), build=lambda g, x: g.max(x, -1))
    odd = rows((M, 32765), build=lambda g, x: g.softmax(x))
    single = rows((32768,), build=lambda g, x: g.softmax(x))
    for g in (scaled, read, odd, single):
        assert "cluster" not in describe(program(g))


REFUSED: dict[str, tuple[Graph, str]] = {
    "product of rows": (
        rows((M, 64), build=lambda g, x: g.prod(x, 0)),
        r"a product over the rows K; there are only sums, means and maxima",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    g, message = REFUSED[name]
    with pytest.raises(SearchError, match=message):
        found(g)


# --------------------------------------------------------------------------------- properties


@st.composite
def row_graphs(draw: st.DrawFn) -> Graph:
    """Element-wise operators, statistics of rows and sums over rows of small tensors."""
    m: Dim = draw(st.sampled_from((5, 12, Symbol("M", 9))))
    n, heads = draw(st.sampled_from((16, 37))), draw(st.sampled_from((0, 3)))
    g = new_kernel_graph()
    whole = [g.new_input((m, heads, n) if heads else (m, n), name="x")]
    operands = [*whole, g.new_input((heads, n) if heads else (n,), name="w")]
    for _ in range(draw(st.integers(1, 4))):
        x, kind = draw(st.sampled_from(whole)), draw(st.sampled_from("emmr"))
        if kind == "e":
            made = g.square(x) + 0.5
        elif kind == "m":
            made = x * draw(st.sampled_from(operands))
        else:
            made = x - draw(st.sampled_from((g.sum, g.mean, g.max)))(x, -1) * 0.25
        whole.append(made)
        operands.append(made)
    g.mark_output(whole[-1])
    both = heads and draw(st.booleans())  # sums over different rows are different kernels
    for x in draw(st.lists(st.sampled_from(whole), min_size=1, max_size=2, unique_by=id)):
        total = draw(st.sampled_from((g.sum, g.mean)))(x, 0)
        g.mark_output(g.sum(total, 1) * 2.0 if both else total)
    return without_unused(g)


@settings(max_examples=40)
@given(row_graphs())
def test_random_sums_over_rows(g: Graph) -> None:
    """One kernel, right in the field and in numbers, whose blocks run at once."""
    result = found(g)
    for candidate in result.candidates[:2]:
        mu = candidate.mugraph
        assert verify(g, mu, full=True) and compare(g, mu, stress=False)
        (step,) = mu.steps
        if step.program.of_kind(AxisKind.PERSISTENT):  # few rows may be summed by each block
            combined = sum(op.kind == GRID_REDUCE for op in step.program.ops)
            # a sum of x w over the rows is w times that of x: one sum may serve two outputs
            assert combined >= 1 and step.program.blocks() <= H200.sms


def test_a_sum_behind_long_rows_is_a_kernel_of_its_own() -> None:
    """In one kernel for all of it, a multiprocessor has one block, which waits for each row."""
    g = new_kernel_graph()
    x, labels = g.new_input((8192, 128256), "bfloat16"), g.new_input((8192, 1), "int64")
    largest = g.max(x, -1)
    loss = g.sum(g.pick(x, labels), -1) - largest - g.log(g.sum(g.exp(x - largest), -1))
    g.mark_output(largest, "float32")
    g.mark_output(g.sum(loss, 0), "float32")
    best = search(g.expanded(), H200, options=SearchOptions(lowered=True)).candidates[0]
    first, second = (step.program for step in best.mugraph.steps)
    assert first.of_kind(AxisKind.CLUSTER) and not first.of_kind(AxisKind.PERSISTENT)
    assert second.blocks() == 1 and best.cost_us < 600


def test_long_programs_get_fewer_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost as much as with all of them: two gradients of norms, and what is done with them."""

    def gradient(g: Graph, x: Tensor, dy: Tensor, w: Tensor, r: Tensor) -> Tensor:
        v = dy * (1.0 + w)
        return v * r - g.sum(v * x, -1) * (r * r * r) * x

    def chain(g: Graph, *t: Tensor) -> Tensor:
        x, y, dy, r, q, w, v = t
        d = dy + gradient(g, x, dy, w, r)
        return g.sigmoid(g.sigmoid(d + gradient(g, y, d, v, q)) + dy) + dy

    share, shares = Rows.class_share, set[float]()

    def noted(self: Rows, program: LabelledProgram) -> float:
        shares.add(share(self, program))
        return share(self, program)

    wide, narrow = (4096, 2048), (4096, 1)
    g = rows(wide, wide, wide, narrow, narrow, (2048,), (2048,), build=chain)
    monkeypatch.setattr(Rows, "class_share", noted)
    few = found(g).candidates[0]
    assert max(shares) < 1.0
    shares.clear()
    found(rms_backward(4096, 2048))
    assert shares == {1.0}
    monkeypatch.setattr(Rows, "class_share", lambda *_: 1.0)
    assert few.cost_us == pytest.approx(found(g).candidates[0].cost_us, rel=1e-3)
    assert len(few.mugraph.steps) == 1
