"""The search: fused kernels for known programs, cuts, refusals, and random programs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from math import nan

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cutesuper.egraph.extract import extract, structure
from cutesuper.egraph.labelled import label
from cutesuper.egraph.saturate import TooLarge, saturate
from cutesuper.egraph.space import Space
from cutesuper.egraph.splits import splits
from cutesuper.errors import LoweringError, SearchError
from cutesuper.ir.block import AxisKind, BlockProgram, MuGraph
from cutesuper.ir.check import check_block_program, check_mugraph
from cutesuper.ir.dims import Dim
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.ir.operators.base import Items
from cutesuper.search.cuts import EQUAL, Flat
from cutesuper.search.region_cache import KnownRegions
from cutesuper.search.search import Progress, SearchOptions, SearchResult, search
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.targets import B200, H200
from cutesuper.verify.equivalence import Verifier, verify
from tests import zoo
from tests.host_time import within
from tests.plans import compiled

Graph = KernelGraph


#: what skeletons of the lowering run
LOWERED = SearchOptions(lowered=True)


def run(g: Graph, options: SearchOptions = LOWERED) -> SearchResult:
    """Search with the verifier: nothing may be rejected, everything must be legal."""
    verifier = Verifier(g)
    result = search(
        g,
        H200,
        options=options,
        verify=lambda mu: bool(verifier.check(mu, bound=False)),
    )
    assert result.statistics.rejected == 0
    for c in result.candidates:
        check_mugraph(c.mugraph)
    costs = [c.cost_us for c in result.candidates]
    assert costs == sorted(costs)
    assert len({c.structure for c in result.candidates}) == len(costs)
    return result


def best(g: Graph) -> MuGraph:
    return run(g).candidates[0].mugraph


def only(mu: MuGraph) -> BlockProgram:
    assert len(mu.steps) == 1
    return mu.steps[0].program


def kinds(program: BlockProgram) -> list[str]:
    return [op.kind for op in program.ops]


def extents(program: BlockProgram) -> dict[str, int | None]:
    return {a.name: a.extent for a in program.axes}


# ---------------------------------------------------------------------------------------- graphs


def rms_linear(
    m: object, k: int, n: int, weight: bool = False, eps: float = 1e-6, transposed: bool = False
) -> Graph:
    g = new_kernel_graph()
    x = g.new_input((m, k))  # type: ignore[arg-type]
    w = g.new_input((n, k) if transposed else (k, n))
    y = g.rms_norm(x, g.new_input((k,), name="G") if weight else None, eps=eps)
    g.mark_output(g.matmul(y, g.transpose(w) if transposed else w))
    return g


def linear(m: int, k: int, n: int, rest: Callable[[Graph, Tensor], Tensor]) -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((m, k)), g.new_input((k, n))
    g.mark_output(rest(g, g.matmul(x, w)))
    return g


def rows(m: Dim, k: int, rest: Callable[[Graph, Tensor], Tensor]) -> Graph:
    g = new_kernel_graph()
    g.mark_output(rest(g, g.new_input((m, k))))
    return g


def gated(m: int, k: int, n: int) -> Graph:
    g = new_kernel_graph()
    x, a, b = g.new_input((m, k)), g.new_input((k, n)), g.new_input((k, n))
    g.mark_output(g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b)))
    return g


def lora(m: int, k: int, n: int, r: int) -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((m, k)), g.new_input((k, n))
    a, b = g.new_input((k, r)), g.new_input((r, n))
    g.mark_output(x @ w + (x @ a) @ b)
    return g


def attention(safe: bool, norm: bool = False) -> Graph:
    g = new_kernel_graph()
    q, k, v = g.new_input((2, 256, 64)), g.new_input((2, 4096, 64)), g.new_input((2, 4096, 64))
    s = (g.rms_norm(q) if norm else q) @ g.transpose(g.rms_norm(k) if norm else k)
    e = g.exp(s)
    g.mark_output((g.softmax(s) if safe else g.div(e, g.sum(e, -1))) @ v)
    return g


def layer_norm(g: Graph, x: Tensor) -> Tensor:
    n = x.shape[-1]
    w, b = g.new_input((n,), name="weight"), g.new_input((n,), name="bias")
    d = x - g.mean(x, -1)
    return d * g.rsqrt(g.mean(g.square(d), -1) + 1e-5) * w + b


# ------------------------------------------------------------------------- RMSNorm and Linear


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("weight", [False, True])
def test_rms_norm_linear_is_one_kernel(weight: bool, eps: float) -> None:
    g = rms_linear(16, 4096, 6144, weight, eps)
    start = time.process_time()
    result = search(g, H200)
    assert within(time.process_time() - start, 5.0)
    program = only(result.candidates[0].mugraph)
    ops = program.ops
    loads = [op.attributes["tensor"] for op in program.loads()]
    assert sorted(loads) == (["G", "W", "X"] if weight else ["W", "X"])
    stored = ops[program.stores()[0].inputs[0]]
    assert stored.kind == "div" and stored.dims == ("M", "N")  # after the product
    assert kinds(program).count("matmul") == 1
    row = ops[next(op for op in ops if op.kind == "matmul").inputs[0]]
    assert row.kind == ("mul" if weight else "load")
    run(g)


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((16, 4096, 4096), {"N": 64, "cluster": 2, "K": 128}),
        ((2, 4096, 4096), {"N": 64, "cluster": 2, "K": 128}),
        # 13.8 us; in pairs with 128 columns 14.3, in pairs with 64 columns 16.2
        ((16, 4096, 6144), {"N": 64, "cluster": 1, "K": 128}),
    ],
)
def test_sizes_of_small_batches(shape: tuple[int, int, int], want: dict[str, int]) -> None:
    program = only(best(rms_linear(*shape)))
    assert program.tile["N"] == want["N"] and program.tile["K"] == want["K"]
    assert extents(program).get("K.cluster", 1) == want["cluster"]


def test_sizes_of_a_large_batch() -> None:
    program = only(best(rms_linear(4096, 4096, 4096)))
    assert program.tile["M"] * program.tile["N"] in (256 * 128, 128 * 128)
    assert not program.of_kind(AxisKind.CLUSTER)


def test_weight_stored_the_other_way() -> None:
    program = only(best(rms_linear(16, 4096, 6144, transposed=True)))
    maps = {op.attributes["tensor"]: op.attributes["map"] for op in program.loads()}
    assert maps == {"X": ("M", "K"), "W": ("N", "K")}


def test_symbolic_rows() -> None:
    program = only(best(rms_linear(symbol("M"), 4096, 4096, weight=True)))
    assert extents(program)["M.grid"] is None


def test_single_row() -> None:
    program = only(best(rms_linear(1, 4096, 4096)))
    assert program.dims["M"] == 1 and program.tile["M"] == 8


# ------------------------------------------------------------------------------- one kernel each


def _bias_relu(g: Graph, t: Tensor) -> Tensor:
    return g.relu(t + g.new_input((t.shape[-1],), name="b"))


def _residual(g: Graph, t: Tensor) -> Tensor:
    return t + g.new_input(t.shape, name="R")


ONE_KERNEL: dict[str, Callable[[], Graph]] = {
    "gated": lambda: gated(8, 4096, 4096),
    "bias relu": lambda: linear(16, 4096, 4096, _bias_relu),
    "residual": lambda: linear(16, 4096, 4096, _residual),
    "scaled": lambda: linear(16, 4096, 4096, lambda g, t: g.gelu(t * 0.125)),
    "softmax": lambda: rows(4096, 4096, lambda g, x: g.softmax(x)),
    "rms norm": lambda: rows(64, 4096, lambda g, x: g.rms_norm(x, g.new_input((4096,)))),
    "layer norm": lambda: rows(64, 1024, layer_norm),
    "log sum exp": lambda: rows(64, 1024, lambda g, x: g.sum(g.exp(x - g.max(x, -1)), -1)),
    "sum of rows": lambda: rows(64, 1024, lambda g, x: g.sum(x, 1)),
    "element-wise": lambda: rows(8192, 4096, lambda g, x: g.relu(0.5 * x + 1.0)),
    "double": lambda: rows(8, 64, lambda g, x: x + x),
    "vector": lambda: linear(64, 4096, 1, lambda g, t: t),
    "gram": lambda: rows(64, 4096, lambda g, x: x @ g.transpose(x)),
}


@pytest.mark.parametrize("name", list(ONE_KERNEL))
def test_one_kernel(name: str) -> None:
    program = only(best(ONE_KERNEL[name]()))
    products = kinds(program).count("matmul")
    assert products == {"gated": 2, "bias relu": 1, "residual": 1, "scaled": 1, "gram": 1}.get(
        name, 0
    )


def test_gram_loads_its_input_in_two_roles() -> None:
    program = only(best(ONE_KERNEL["gram"]()))
    assert [op.attributes["map"] for op in program.loads()] == [("M", "K"), ("N", "K")]


def _projection(g: Graph, x: Tensor) -> Tensor:
    """(x y^T) x: the single row is the inner dimension of the second product."""
    return g.matmul(g.matmul(x, g.transpose(g.new_input(x.shape))), x)


def _gradient_of_gram(g: Graph, x: Tensor) -> Tensor:
    """The gradient of X X^T is dO X + dO^T X."""
    dy = g.new_input((1, 1))
    return g.add(g.matmul(dy, x), g.matmul(g.transpose(dy), x))


@pytest.mark.parametrize("build", [_projection, _gradient_of_gram])
def test_a_single_row_that_is_contracted_elsewhere(
    build: Callable[[Graph, Tensor], Tensor],
) -> None:
    for columns in (2, 8):
        assert run(rows(1, columns, build), SearchOptions()).candidates


def test_a_computed_value_in_two_roles() -> None:
    """Self-attention from one X: what is normalized is computed for rows and for columns."""
    g = new_kernel_graph()
    x = g.new_input((64, 128))
    s = g.relu(x)
    g.mark_output(g.matmul(s, g.transpose(s)))
    program = only(run(g, SearchOptions()).candidates[0].mugraph)
    maps = [op.attributes["map"] for op in program.loads()]
    assert len(maps) == 2 and maps[0][1] == maps[1][1] and maps[0][0] != maps[1][0]
    assert kinds(program).count("relu") == 2


def test_maximum_of_the_row_in_the_loop() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((16, 512)), g.new_input((512, 512))
    g.mark_output((x @ w) / g.max(x, -1))
    program = only(best(g))
    assert {op.attributes["op"] for op in program.ops if op.kind == "accumulate"} == {"sum", "max"}


def test_gated_mlp_with_norm_is_one_kernel() -> None:
    g = new_kernel_graph()
    x, s = g.new_input((8, 4096)), g.new_input((4096,))
    a, b = g.new_input((4096, 4096)), g.new_input((4096, 4096))
    y = g.rms_norm(x, s)
    g.mark_output(g.silu(y @ a) * (y @ b))
    assert kinds(only(best(g))).count("matmul") == 2


@pytest.mark.parametrize("widths", [(512, 512), (1024, 512, 512), (1024, 1024, 1024)])
def test_products_of_one_operand_share_a_kernel(widths: tuple[int, ...]) -> None:
    """Whatever their widths are, the row operand is read, and normalized, once."""
    (step,) = best(zoo.projections(8, 1024, widths)).steps
    assert kinds(step.program).count("matmul") == len(widths)
    assert len(step.program.alternatives) == (0 if len(set(widths)) == 1 else len(widths))


def test_columns_that_are_reduced_keep_a_label_of_their_own() -> None:
    """In `relu(X A) B` beside `X C`, with as many columns, those of A are contracted."""
    g = new_kernel_graph()
    x, a, c = g.new_input((8, 256)), g.new_input((256, 512)), g.new_input((256, 512))
    g.mark_output(g.relu(x @ a) @ g.new_input((512, 512)))
    g.mark_output(x @ c)
    flat = Flat(g)
    program = label(flat.segment(flat.order).region)
    (_, first), (_, second) = program.outputs
    assert set(program.reduced).isdisjoint({*first, *second})


# ------------------------------------------------------------------------- rows of any order


def _two_orders(g: Graph, x: Tensor) -> Tensor:
    y = g.mark_output(g.relu(x))
    return g.transpose(y)


def _transposed_and_reduced(g: Graph, x: Tensor) -> Tensor:
    g.mark_output(g.transpose(x))
    return g.sum(x, 0)


#: what is computed, the shape of X, and the label along the rows
ANY_ORDER: dict[str, tuple[Callable[[Graph, Tensor], Tensor], tuple[Dim, ...], str]] = {
    "sum of columns": (lambda g, x: g.sum(x, 0), (50, 64), "K"),
    "softmax of columns": (lambda g, x: g.softmax(x, 0), (50, 64), "K"),
    "long columns": (lambda g, x: g.softmax(x, 0), (32768, 8), "K"),
    "middle": (lambda g, x: g.div(x, g.sum(x, 1)), (4, 50, 64), "K"),
    "symbolic batch": (lambda g, x: g.softmax(x, 1), (symbol("B"), 50, 64), "K"),
    "mixed": (lambda g, x: x + g.transpose(g.new_input((32, 64), name="Y")), (64, 32), "N"),
    "mostly transposed": (
        lambda g, x: g.transpose(x + g.new_input((64, 32), name="Y")),
        (64, 32),
        "M",
    ),
    "own transpose": (lambda g, x: x + g.transpose(x), (64, 64), "N"),
    "two orders": (_two_orders, (64, 32), "N"),
    "copy": (lambda g, x: g.transpose(x), (64, 32), "N"),
    "copy of three": (lambda g, x: g.transpose(x, (2, 0, 1)), (4, 50, 64), "N"),
    "copy and sum": (_transposed_and_reduced, (64, 32), "K"),
}


@pytest.mark.parametrize("name", list(ANY_ORDER))
def test_rows_of_any_order_are_one_kernel(name: str) -> None:
    build, shape, column = ANY_ORDER[name]
    g = new_kernel_graph()
    g.mark_output(build(g, g.new_input(shape)))
    mu = best(g)
    only(mu)
    plan = make_plan(mu.steps[0], mu.tensors, H200)
    assert isinstance(plan, RowPlan) and plan.column == column


@pytest.mark.parametrize("name", ["softmax of columns", "middle", "mixed", "two orders", "copy"])
def test_rows_of_any_order_compile(name: str) -> None:
    build, shape, _ = ANY_ORDER[name]
    g = new_kernel_graph()
    g.mark_output(build(g, g.new_input(shape)))
    mu = search(g, H200).candidates[0].mugraph
    found = compiled(make_plan(mu.steps[0], mu.tensors, H200)).resources
    assert found.stack_bytes == 0 and not found.spills


# ----------------------------------------------------------------------------------------- copies


def _transposed_product(relu: bool) -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((64, 32)), g.new_input((64, 128))
    y = g.transpose(x)
    g.mark_output((g.relu(y) if relu else y) @ w)
    return g


def _product_in_two_orders() -> Graph:
    g = new_kernel_graph()
    y = g.mark_output(g.new_input((16, 64)) @ g.new_input((64, 128)))
    g.mark_output(g.transpose(y))
    return g


def _permuted_weight() -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((4, 16, 64)), g.new_input((64, 4, 128))
    g.mark_output(x @ g.transpose(w, (1, 0, 2)))
    return g


def _batch_last() -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((4, 16, 64)), g.new_input((64, 128, 4))
    g.mark_output(x @ g.transpose(w, (2, 0, 1)))
    return g


def _transposed_statistic() -> Graph:
    g = new_kernel_graph()
    x, w = g.new_input((64, 64)), g.new_input((64, 64))
    g.mark_output((x @ w) * g.transpose(g.sum(g.exp(x), -1)))
    return g


COPIES: dict[str, tuple[Callable[[], Graph], list[str]]] = {
    "row operand": (lambda: _transposed_product(relu=False), ["matmul"]),
    "fused": (lambda: _transposed_product(relu=True), ["rows", "matmul"]),
    "product": (lambda: linear(16, 64, 128, lambda g, t: g.transpose(t)), ["matmul"]),
    "product in two orders": (_product_in_two_orders, ["matmul", "rows"]),
    "permuted weight": (_permuted_weight, ["matmul"]),
    "batch behind the matrix": (_batch_last, ["rows", "matmul"]),
}


@pytest.mark.parametrize("name", list(COPIES))
def test_only_what_no_product_can_read_or_write_is_copied(name: str) -> None:
    build, want = COPIES[name]
    mu = best(build())
    found = ["matmul" if "matmul" in kinds(s.program) else "rows" for s in mu.steps]
    assert found == want
    assert "transpose" not in [k for s in mu.steps for k in kinds(s.program)]
    for step in mu.steps:
        make_plan(step, mu.tensors, H200)


def test_a_copied_statistic_stays_float32() -> None:
    mu = best(_transposed_statistic())
    between = [t for n, t in mu.tensors.items() if n not in (*mu.inputs, *mu.outputs)]
    assert between and all(t.dtype.name == "float32" for t in between)


def test_a_copy_costs_its_bytes() -> None:
    def cost(n: int) -> float:
        return search(rows(n, 4096, lambda g, x: g.transpose(x)), H200).candidates[0].cost_us

    moved = 2 * 2 * 4096 * (16384 - 8192)
    assert cost(16384) - cost(8192) == pytest.approx(moved / H200.bandwidth * 1e6, rel=0.1)


# --------------------------------------------------------------------------------------- kernels


SEVERAL: dict[str, tuple[Callable[[], Graph], int]] = {
    "softmax of a product": (lambda: linear(16, 4096, 4096, lambda g, t: g.softmax(t)), 2),
    "lora": (lambda: lora(16, 256, 4096, 16), 3),
    # float16 does not hold exponentials of anything: they wait for their sums in float32
    "attention": (lambda: attention(safe=False), 3),
    "safe attention": (lambda: attention(safe=True), 3),
    "QKNorm": (lambda: attention(safe=True, norm=True), 5),
}


@pytest.mark.parametrize("name", list(SEVERAL))
def test_several_kernels(name: str) -> None:
    build, most = SEVERAL[name]
    assert len(best(build()).steps) <= most


@pytest.mark.parametrize("shape", [(64, 64, 4096), (300, 256, 8192)])
def test_a_bias_is_added_before_a_product_is_stored(shape: tuple[int, int, int]) -> None:
    """The row kernel would add it in 3 ns less; logits would be rounded before their bias."""
    g = linear(*shape, lambda g, t: g.softmax(t + g.new_input((t.shape[-1],), name="b")))
    found = search(g, H200, options=LOWERED).candidates
    product, _ = found[0].mugraph.steps
    assert kinds(product.program)[-2:] == ["add", "store"]
    assert min(c.cost_us for c in found) < found[0].cost_us < EQUAL * found[1].cost_us


def test_statistics_between_kernels_are_float32() -> None:
    found = {
        t.dtype.name
        for c in run(attention(safe=True)).candidates
        for t in c.mugraph.tensors.values()
        if t.shape[-1] == 1
    }
    assert found <= {"float32"}


def test_two_outputs_and_a_shared_value() -> None:
    g = new_kernel_graph()
    x, w, v = g.new_input((16, 64)), g.new_input((64, 64)), g.new_input((64, 64))
    h = g.mark_output(g.relu(x @ w))
    g.mark_output(h @ v)
    mu = best(g)
    assert mu.outputs == ("out0", "out1") and "out0" in mu.steps[1].reads


def test_names_of_inputs_are_kept() -> None:
    g = new_kernel_graph()
    x, w = g.new_input((16, 64), name="out0"), g.new_input((64, 64), name="W")
    g.mark_output(g.softmax(x @ w))
    mu = best(g)
    assert mu.inputs == ("out0", "W") and mu.outputs == ("out0_",)


# --------------------------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[Callable[[], Graph], str]] = {
    "long": (lambda: rows(4, 1 << 25, lambda g, x: g.argmax(x, 1)), "at most 16777216"),
    "symbolic columns": (lambda: rows(symbol("M"), 64, lambda g, x: g.prod(x, 0)), "the rows K"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(SearchError, match=message):
        search(build(), H200, options=LOWERED)


@pytest.mark.parametrize("computed", [False, True])
def test_a_single_row_of_a_product_beside_one_that_is_repeated(computed: bool) -> None:
    """Both would have the label of the row, and what is stored a label that no tensor has."""
    g = new_kernel_graph()
    x, y, z = (g.new_input((3, n, 16), "bfloat16") for n in (16, 1, 1))
    y = g.exp(y) if computed else y
    t = g.mul(x, y)
    for out in (g.silu(t), g.maximum(y, z), g.matmul(z, g.transpose(t))):
        g.mark_output(out)
    assert verify(g, search(g, H200, options=LOWERED).candidates[0].mugraph)


def test_products_are_refused_before_anything_is_searched() -> None:
    seen: list[Progress] = []
    consumer = replace(B200, name="rtx5090", arch="sm_120a")
    with pytest.raises(LoweringError, match=r"matmul\(t\d+\[16, 64\], W\[64, 64\]\): .* rtx5090 "):
        search(rms_linear(16, 64, 64), consumer, options=LOWERED, on_progress=seen.append)
    assert not seen
    with_a_vector = linear(16, 64, 1, lambda g, t: t)  # needs no tensor cores
    search(with_a_vector, consumer, options=LOWERED)


def test_verifier_decides() -> None:
    g = rms_linear(16, 64, 64)
    seen: list[MuGraph] = []

    def refuse_first(mu: MuGraph) -> bool:
        seen.append(mu)
        return len(seen) > 1

    result = search(g, H200, options=LOWERED, verify=refuse_first)
    assert result.statistics.rejected == 1
    assert seen[0] not in [c.mugraph for c in result.candidates]
    with pytest.raises(SearchError, match="rejected"):
        search(g, H200, verify=lambda mu: False)


def test_options_progress_and_determinism() -> None:
    g = rms_linear(16, 4096, 4096, weight=True)
    seen: list[Progress] = []
    first = search(g, H200, options=replace(LOWERED, keep=3), on_progress=seen.append)
    assert len(first.candidates) == 3
    assert seen[-1].stage == "done" and seen[-1].best_cost_us == first.candidates[0].cost_us
    again = search(g, H200, options=replace(LOWERED, keep=3))
    assert again.candidates == first.candidates
    assert first.statistics.classes > 0 and first.statistics.feasible > 0
    with pytest.raises(SearchError, match="budget"):
        search(g, H200, budget_s=0.0)
    written = search(g, H200, options=replace(LOWERED, max_classes=1)).candidates[0]
    assert len(written.kernels) == 2  # as the program is written: the norm, then the product
    with pytest.raises(TooLarge):
        saturate(_program(g), next(splits(_program(g).program)), limit=1)


# ----------------------------------------------------------------- completeness, without forms


def _program(g: Graph) -> Space:
    flat = Flat(g.expanded())
    return Space(label(flat.segment(flat.order).region))


def _check_all_splits(g: Graph, most: int = 60) -> int:
    """Programs of all splits are legal; the number of splits that have one."""
    space, feasible = _program(g), 0
    for n, split in enumerate(splits(space.program)):
        if n == most:
            break
        table = saturate(space, split)
        found = extract(table, lambda i, d: 1.0, count=4)
        feasible += bool(found)
        for e in found:
            for program in structure(table, e).programs:
                check_block_program(program)
    return feasible


def test_every_split_of_rms_norm_linear() -> None:
    """The whole table of axis kinds, persistent axes and loops over rows included."""
    assert _check_all_splits(rms_linear(16, 1024, 64)) == 6


def test_attention_in_one_program() -> None:
    """Classes find one pass over keys and values, which no skeleton runs yet."""
    space = _program(attention(safe=False))
    keys = next(n for n, d in space.program.dims.items() if d == 4096)
    looped = [s for s in splits(space.program) if f"{keys}.loop" in s.parts(keys)]
    assert any(all(saturate(space, s).finished()) for s in looped)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A random program of 2 to 6 operators over a few tensors of matching shapes."""
    g = new_kernel_graph()
    m, k, n = 16, 64, 128
    pool: list[Tensor] = [g.new_input((m, k)), g.new_input((k,)), g.new_input((m, k))]
    weights = {k: g.new_input((k, n)), n: g.new_input((n, k))}
    pool.append(g.new_input((n,)))
    used: set[int] = set()
    for _ in range(draw(st.integers(2, 6))):
        kind = draw(
            st.sampled_from(
                [
                    "add",
                    "mul",
                    "div",
                    "sub",
                    "exp",
                    "silu",
                    "square",
                    "sqrt",
                    "sum",
                    "mean",
                    "max",
                    "matmul",
                    "rms_norm",
                    "scale",
                ]
            )
        )
        recent = [t for t in pool if len(t.shape) == 2][-2:]
        a = draw(st.sampled_from(recent))
        if kind in ("add", "mul", "div", "sub"):
            fitting = [t for t in pool if t.shape[-1] in (a.shape[-1], 1) and t.index != a.index]
            if not fitting:
                continue
            b = draw(st.sampled_from(fitting))
            t = g.apply(kind, a, b)
            used.add(b.index)
        elif kind in ("sum", "mean", "max"):
            if a.shape[-1] == 1:
                continue
            t = g.apply(kind, a, dim=-1)
        elif kind == "matmul":
            if a.shape[-1] not in weights:
                continue
            w = weights[a.shape[-1]]  # type: ignore[index]
            t = g.matmul(a, w)
            used.add(w.index)
        elif kind == "scale":
            t = a * 0.5
        else:
            t = g.apply(kind, a)
        used.add(a.index)
        pool.append(t)
    last = next((t for t in reversed(pool) if t.node.operator != "input"), None)
    g.mark_output(last if last is not None else g.relu(pool[0]))
    return without_unused(g)


def without_unused(g: Graph) -> Graph:
    """The graph without the inputs that no output depends on."""
    needed = set(g.outputs)
    for i in reversed(range(len(g.nodes))):
        if i in needed:
            needed.update(g.nodes[i].inputs)
    kept = [i for i in range(len(g.nodes)) if i in needed]
    index = {i: n for n, i in enumerate(kept)}
    new = new_kernel_graph()
    new.nodes = [
        replace(g.nodes[i], inputs=tuple(index[j] for j in g.nodes[i].inputs)) for i in kept
    ]
    new.outputs = [index[i] for i in g.outputs]
    return new


#: no shrinking: one search may take seconds
ONCE = settings(max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@ONCE
@given(graphs())
def test_random_programs(g: Graph) -> None:
    """Everything that is returned is legal and verified; nothing is rejected."""
    run(g, replace(LOWERED, keep=6, max_classes=200))


@ONCE
@given(graphs())
def test_random_programs_without_rules(g: Graph) -> None:
    """Without a skeleton's rules the unsplit program is found, whatever the program.

    Except where terms cancel, which only subtraction can do.
    """
    space = _program(g)
    whole = min(splits(space.program), key=lambda s: len(s.axes))
    try:
        found = saturate(space, whole, limit=200).finished()
    except TooLarge:
        found = saturate(Space(space.program, 2), whole, limit=1000).finished()
    assert all(found) or "sub" in space.binary


def test_norm_of_a_norm_is_one_kernel() -> None:
    """Too many classes with all variants; one kernel with shared values sealed."""
    g = rows(16, 64, lambda g, x: g.rms_norm(g.rms_norm(x * g.new_input((64,), name="G"))))
    result = run(g)
    assert len(result.candidates[0].mugraph.steps) == 1
    assert result.statistics.pruned["too many classes: more values sealed"] > 0


def test_a_choice_is_made_of_what_the_program_chooses_of() -> None:
    """The derivative of relu in a larger one: `keep` has no algebra, and was tried of every two
    values (10,591 results)."""
    g = new_kernel_graph()
    p, t, w, y, b = (
        g.new_input(shape, name=name)
        for name, shape in {
            "p": (64, 1), "t": (64, 1), "w": (1, 256), "y": (64, 256), "b": (256, 16)
        }.items()
    )  # fmt: skip
    slope = p * (1.0 - p)
    delta = (p - t) / (slope + 1e-4) * slope
    dy = g.keep(delta * w, y)
    g.mark_output(dy)
    g.mark_output(g.matmul(dy, b))
    assert run(g).statistics.tried < 5000


def _limited(low: float, *others: float) -> Graph:
    g = new_kernel_graph()
    x = g.new_input((64, 128), name="X")
    y = g.clamp(x, low, 1.0)
    for other in others:
        y = g.sub(y, g.exp(g.clamp(g.maximum(g.square(x), other), other, 1.0)))
    g.mark_output(y)
    return g


def _numbers(mu: MuGraph) -> list[str]:
    attributes = [op.attributes for step in mu.steps for op in step.program.ops]
    return sorted(repr(a[k]) for a in attributes for k in ("min", "value") if k in a)


def test_zeros_of_both_signs_are_two_numbers() -> None:
    """Python calls them equal, in keys of what is known as well; 1 / -0.0 is another infinity."""
    regions = KnownRegions()
    for low in (0.0, -0.0, 0.0):
        g = _limited(low)
        verifier = Verifier(g)
        found = search(
            g,
            H200,
            options=LOWERED,
            known=regions,
            verify=lambda mu, v=verifier: bool(v.check(mu, bound=False)),
        )
        assert _numbers(found.candidates[0].mugraph) == [repr(low)]
    [step] = best(_limited(0.0, -0.0)).steps
    assert _numbers(best(_limited(0.0, -0.0))) == ["-0.0", "-0.0", "0.0"]
    assert len(step.program.loads()) == 1


def test_attributes_are_equal_where_they_are_written_alike() -> None:
    a, b, c = Items({"x": 0.0, "y": 1}), Items({"y": 1, "x": 0.0}), Items({"x": -0.0, "y": 1})
    assert a == b and hash(a) == hash(b) and a != c and dict(c) == {"x": 0.0, "y": 1}
    assert Items({"x": True}) != Items({"x": 1}) and Items({"x": nan}) == Items({"x": float("nan")})
    assert pickle.loads(pickle.dumps(c)) == c
