"""Chained products: which programs the form runs, that they are right, and the sizes they get."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from cutesuper.errors import SearchError
from cutesuper.graph.block import AxisKind, BlockProgram, MuGraph
from cutesuper.graph.check import check_block_program, passes
from cutesuper.graph.kernel import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.graph.target import H200
from cutesuper.schedule.attention import AttentionPlan
from cutesuper.schedule.planner import make_plan
from cutesuper.schedule.rows import RowPlan
from cutesuper.search.chained_cost import ChainedModel, ChainedSize
from cutesuper.search.chained_form import ChainedForm
from cutesuper.search.chained_sizes import UNEVEN_KEYS, row_tiles
from cutesuper.search.forms import MatmulForm, find_form
from cutesuper.search.hoist import hoisted
from cutesuper.search.kernels import Cut, Flat
from cutesuper.search.labels import Region, label
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.search.search import assemble, search
from cutesuper.search.sizing import describe
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.numeric import compare

LOWERED = SearchOptions(lowered=True)
Made = Callable[[], KernelGraph]


def attention(
    batch: int = 2, rows: int = 256, keys: int = 4096, d: int = 64, *, norms: str = "",
    weights: bool = False, maximum: bool = True, key_rows: bool = False, tail: bool = False,
) -> KernelGraph:
    """``softmax(Q K / sqrt(d)) V``, or without the maximum.

    ``norms``: of "q", "k", "v" those that are normalized first, with weights if asked for;
    ``key_rows``: K is stored (keys, d); ``tail``: a function follows in the same kernel.
    """
    g = new_kernel_graph()
    q = g.new_input((batch, rows, d), name="Q")
    k = g.new_input((batch, keys, d) if key_rows else (batch, d, keys), name="K")
    v = g.new_input((batch, keys, d), name="V")

    def normed(x: Tensor, name: str) -> Tensor:
        if name not in norms:
            return x
        return g.rms_norm(x, g.new_input((d,), name=f"W{name}")) if weights else g.rms_norm(x)

    k = g.transpose(normed(k, "k")) if key_rows else k
    s = g.mul(g.matmul(normed(q, "q"), k), d**-0.5)
    v = normed(v, "v")
    if maximum:
        y = g.matmul(g.softmax(s), v)
    else:
        e = g.exp(s)
        y = g.div(g.matmul(e, v), g.sum(e, -1))
    if tail:
        y = g.silu(y)
    g.mark_output(y)
    return g


def decode(batch: int = 1, keys: int = 4096, group: int = 4, heads: int = 8) -> KernelGraph:
    """One token, ``group`` query heads for each head of K and V."""
    g = new_kernel_graph()
    q = g.new_input((batch, heads, group, 128), "bfloat16", name="Q")
    k, v = (g.new_input((batch, heads, keys, 128), "bfloat16", name=n) for n in "KV")
    g.mark_output(g.scaled_dot_product_attention(q, k, v))
    return g


def grouped(
    batch: int = 1, group: int = 4, positions: int = 64, keys: int = 4096, causal: bool = False,
    heads: int = 8, stored: str = "BHGLD",
) -> KernelGraph:
    """Query heads in groups, several positions; ``stored``: as the model has them in memory."""
    g = new_kernel_graph()
    extents = {"B": batch, "H": heads, "G": group, "L": positions, "D": 128}
    to = tuple(stored.index(c) for c in "BHGLD")

    def read(name: str, **other: int) -> Tensor:
        shape = tuple((extents | other)[c] for c in stored)
        return g.transpose(g.new_input(shape, name=name), to)

    q, k, v = read("Q"), read("K", G=1, L=keys), read("V", G=1, L=keys)
    s = g.mul(g.matmul(q, g.transpose(k)), 128**-0.5)
    s = g.causal_mask(s, "bottom_right") if causal else s
    y = g.matmul(g.softmax(s), v)
    g.mark_output(g.transpose(y, tuple("BHGLD".index(c) for c in stored)))
    return g


def long_mlp(hidden: int = 4096) -> KernelGraph:
    """``relu(X A) B`` with a short X and a long label between the products."""
    g = new_kernel_graph()
    x, a = g.new_input((512, 128), name="X"), g.new_input((128, hidden), name="A")
    g.mark_output(g.matmul(g.relu(g.matmul(x, a)), g.new_input((hidden, 128), name="B")))
    return g


ONE_KERNEL: dict[str, Made] = {
    "K stored (d, keys)": attention,
    "K stored (keys, d)": lambda: attention(key_rows=True),
    "no maximum": lambda: attention(maximum=False),
    "head dimension 72": lambda: attention(d=72),
    "head dimension 96": lambda: attention(d=96),
    "head dimension 256": lambda: attention(d=256),
    "keys that nothing divides": lambda: attention(keys=4104),
    "an epilogue": lambda: attention(tail=True),
    "norms of Q and K": lambda: attention(norms="qk", key_rows=True),
    "norms of Q and K, weights": lambda: attention(norms="qk", key_rows=True, weights=True),
    "norms of Q and V": lambda: attention(norms="qv"),
    "norms of all, no maximum": lambda: attention(norms="qkv", key_rows=True, maximum=False),
    "one token": decode,
    "one token, one head of queries": lambda: decode(group=1),
    "groups": grouped,
    "groups of 7": lambda: grouped(group=7, positions=512),
    "groups, one position": lambda: grouped(positions=1),
    "groups, positions before heads": lambda: grouped(stored="BLHGD"),
    "causal": lambda: grouped(positions=2048, keys=2048, causal=True),
    "causal, positions before heads": lambda: grouped(causal=True, stored="BLHGD"),
    "no softmax": long_mlp,
}


@cache
def found(name: str) -> tuple[MuGraph, ...]:
    """What is found for a program; the verifier rejects nothing."""
    graph = ONE_KERNEL[name]()
    verifier = Verifier(graph)
    result = search(
        graph, H200, options=LOWERED, verify=lambda mu: bool(verifier.check(mu, bound=False))
    )
    assert not result.statistics.rejected
    return tuple(c.mugraph for c in result.candidates)


def region_of(graph: KernelGraph) -> Region:
    flat = Flat(graph.expanded())
    return flat.segment(flat.order).region


def form_of(graph: KernelGraph) -> ChainedForm:
    region = region_of(graph)
    form = find_form(region, label(region))
    assert isinstance(form, ChainedForm)
    return form


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel_that_walks_the_keys_once(name: str) -> None:
    (step,) = found(name)[0].steps
    program, form = step.program, form_of(ONE_KERNEL[name]())
    kinds = [op.kind for op in program.ops]
    assert kinds.count("matmul") == 2
    assert passes(program, check_block_program(program)) == {f"{form.keys}.loop": 1}
    loads = [op.inputs[1] for op in program.ops if op.kind == "matmul"]
    assert all(program.ops[i].kind == "load" for i in loads)
    for kind, axis in (("cluster_reduce", AxisKind.CLUSTER), ("grid_reduce", AxisKind.GRID)):
        assert (kind in kinds) == any(a.dim == form.keys for a in program.of_kind(axis))


@pytest.mark.parametrize("keys", [48, 200])
@pytest.mark.parametrize("norms", ["", "qk", "qv"])
def test_numbers(norms: str, keys: int) -> None:
    """At their real extents, where the last part is shorter or empty, and in float64."""
    graph = attention(2, 24, keys, 8, norms=norms, key_rows=True, weights="v" not in norms)
    flat = Flat(graph.expanded())
    segment = flat.segment(flat.order)
    ways = search_region(segment.region, H200, LOWERED).ways
    assert ways
    for way in ways[:6]:
        mu = assemble(flat, Cut(way.total, ((segment, way),)))
        assert verify(graph, mu, full=True)
        report = compare(graph, mu)
        assert report, report.message


# -------------------------------------------------------------------------------------- structures


def test_factors_leave_queries_and_keys_alone() -> None:
    """Weights meet each other and Q; what scales a row or a key scales the scores."""
    ops = found("norms of Q and K, weights")[0].steps[0].program.ops
    scores = next(op for op in ops if op.kind == "matmul")
    row, key = (ops[i] for i in scores.inputs)
    assert (row.kind, key.kind) == ("mul", "load")
    assert {ops[i].kind for i in row.inputs} == {"mul", "load"}
    vector = next(ops[i] for i in row.inputs if ops[i].kind == "mul")
    assert len(vector.dims) == 1 and all(ops[i].kind == "load" for i in vector.inputs)


def test_a_denominator_divides_once() -> None:
    """before: softmax, then a product; after: sums in one walk, then a quotient."""
    program = label(region_of(attention()))
    moved = hoisted(program, form_of(attention()))
    divided = [op for op in moved.ops if op.kind == "div"]
    assert [moved.ops[i].kind for op in divided for i in op.inputs] == ["matmul", "sum"]


def test_rows_are_what_keys_have_not() -> None:
    form = form_of(grouped(stored="BLHGD"))
    dims = label(region_of(grouped(stored="BLHGD"))).dims
    assert {dims[d] for d in form.rows} == {4, 64} and {dims[d] for d in form.batch} == {8}
    assert (dims[form.keys], dims[form.inner], dims[form.columns]) == (4096, 128, 128)


@pytest.mark.parametrize("hidden", [128, 4096])
def test_a_short_label_between_products_stays_with_the_matmul_loop(hidden: int) -> None:
    region = region_of(long_mlp(hidden))
    kind = MatmulForm if hidden == 128 else ChainedForm
    assert isinstance(find_form(region, label(region)), kind)


#: what results are multiplied by that the loop does not load
BESIDE = {"gate": (2, 64, 64), "columns": (64,), "rows": (2, 64, 1), "batch": (2, 1, 1)}


def refused_scores(what: str) -> KernelGraph:
    g = new_kernel_graph()
    d, dtype = (260 if what == "length" else 264 if what == "held" else 64), "float16"
    dtype = "float32" if what == "type" else dtype
    extents = {"Q": 64, "K": 512, "V": 512}
    q, k, v = (g.new_input((2, n, d), dtype, name=c) for c, n in extents.items())
    s = g.matmul(q, g.transpose(k))
    if what == "bias":
        s = g.add(s, g.new_input((2, 64, 512), name="B"))
    y = g.matmul(g.softmax(s), v)
    if what in BESIDE:
        y = g.mul(y, g.new_input(BESIDE[what], name="B"))
    g.mark_output(g.rms_norm(y) if what == "norm after" else y)
    return g


@pytest.mark.parametrize("what", ["length", "held", "type", "bias", "norm after", *BESIDE])
def test_what_the_loop_does_not_run_is_refused(what: str) -> None:
    region = region_of(refused_scores(what))
    with pytest.raises(SearchError):
        find_form(region, label(region))


@pytest.mark.parametrize("what", BESIDE)
def test_what_meets_the_result_is_another_kernel(what: str) -> None:
    first = search(refused_scores(what), H200, options=LOWERED).candidates[0].mugraph
    kinds = [type(make_plan(step, first.tensors, H200)) for step in first.steps]
    assert kinds == [AttentionPlan, RowPlan]


def test_products_that_cannot_be_verified_as_one_kernel_are_several() -> None:
    """Rescaled sums of scores that come from an exponential are right, and beyond the verifier."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((1, n, 64), name=c) for c, n in (("Q", 64), ("K", 256), ("V", 256)))
    g.mark_output(g.matmul(g.softmax(g.matmul(g.softmax(q), g.transpose(k))), v))
    verifier = Verifier(g)
    result = search(g, H200, options=LOWERED, verify=lambda mu: bool(verifier.check(mu)))
    assert result.statistics.rejected and result.candidates
    for step in result.candidates[0].mugraph.steps:
        assert [op.kind for op in step.program.ops].count("matmul") <= 1


def test_a_symbolic_batch() -> None:
    g = new_kernel_graph()
    b = symbol("B", hint=16)
    q = g.new_input((b, 64, 64), name="Q")
    k, v = (g.new_input((b, 1024, 64), name=n) for n in "KV")
    g.mark_output(g.scaled_dot_product_attention(q, k, v))
    (step,) = search(g, H200, options=LOWERED).candidates[0].mugraph.steps
    assert [a.extent for a in step.program.axes if a.dim == "B"] == [None]


# ------------------------------------------------------------------------------------------- sizes

#: the fastest of hand-written kernels, and what was slower (microseconds): the order to reproduce
MEASURED: dict[str, tuple[Made, str]] = {
    "6.1": (attention, "B.grid(2) M.grid(4) N.cluster(8) N.loop(4), tile M=64 N=128"),
    "14.0": (
        lambda: attention(16), "B.grid(16) M.grid(4) N.cluster(2) N.loop(16), tile M=64 N=128"
    ),
    "7.85": (decode, "B.grid(8) N.grid(8) N.cluster(2) N.loop(4), tile M=4 N=64"),
    "61.7": (
        lambda: decode(1, 65536), "B.grid(8) N.grid(8) N.cluster(2) N.loop(64), tile M=4 N=64"
    ),
    "32.3": (lambda: decode(8), "B.grid(8) B2.grid(8) N.cluster(2) N.loop(32), tile M=4 N=64"),
    "118.8": (lambda: decode(32), "B.grid(32) B2.grid(8) N.loop(64), tile M=4 N=64"),
}


@cache
def best(graph: Made) -> tuple[BlockProgram, float]:
    way = search_region(region_of(graph()), H200, LOWERED).ways[0]
    return way.programs[0], way.total


@pytest.mark.parametrize("us", MEASURED)
def test_the_fastest_of_what_was_measured_is_chosen(us: str) -> None:
    graph, expected = MEASURED[us]
    program, cost = best(graph)
    axes = " ".join(str(a) for a in program.axes if a.extent != 1)
    assert f"{axes}, tile M={program.tile['M']} N={program.tile['N']}" == expected
    assert cost == pytest.approx(float(us), rel=0.12)


def model(graph: KernelGraph) -> ChainedModel:
    program, form = best(lambda: graph)[0], form_of(graph)
    itemsizes = {op.attributes["tensor"]: 2 for op in (*program.loads(), *program.stores())}
    return ChainedModel(program, form, H200, itemsizes)


def test_slower_variants_cost_more() -> None:
    """In the order in which they were measured; two waves of clusters and 16 parts of the grid
    come last."""
    few = model(attention())
    times = [
        few.cost(ChainedSize((64,), 64, keys, cluster, grid)).total
        for keys, cluster, grid in ((128, 8, 1), (64, 8, 1), (128, 2, 8), (128, 8, 2), (128, 1, 16))
    ]
    assert times[:3] == sorted(times[:3]) and min(times[3:]) > times[2]
    token = model(decode())
    times = [
        token.cost(ChainedSize((4,), 64, keys, cluster, grid)).total
        for keys, cluster, grid in ((64, 2, 8), (128, 2, 8), (64, 1, 16), (64, 4, 4), (64, 8, 2))
    ]
    assert times == sorted(times[:3]) + times[3:] and min(times[3:]) > max(times[:3])
    many = model(attention(16))
    times = [
        many.cost(ChainedSize((rows,), rows, keys, cluster, grid)).total
        for rows, keys, cluster, grid in
        ((64, 128, 2, 1), (64, 64, 2, 1), (128, 128, 2, 2), (128, 128, 4, 1))
    ]  # fmt: skip
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ([4], [((4,), 64)]),
        ([64], [((64,), 64)]),
        ([65], [((64,), 64), ((65,), 128)]),
        ([256], [((64,), 64), ((128,), 128)]),
        ([7, 512], [((7, 9), 64), ((7, 18), 128)]),
        ([2048, 4], [((16, 4), 64), ((32, 4), 128)]),
        ([96, 128], [((64, 1), 64), ((96, 1), 128)]),
        ([2, 3, 100], [((2, 3, 10), 64), ((2, 3, 21), 128)]),
    ],
)
def test_rows_are_packed(extents: list[int], expected: list[object]) -> None:
    assert list(row_tiles(list(extents))) == expected


def test_prefill_takes_two_warpgroups_of_rows_and_divides_no_keys() -> None:
    for length in (2048, 8192):
        program, _ = best(lambda n=length: grouped(positions=n, keys=n, causal=True))
        rows = form_of(grouped(positions=length, keys=length, causal=True)).rows
        assert {program.tile[d] for d in rows} == {4, 32}
        assert {a.kind for a in program.axes_of("N")} == {AxisKind.LOOP}


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("group", [4, 5, 8])
def test_decoding_fills_the_device(batch: int, group: int) -> None:
    """Llama and Qwen: near the time of the bytes, whatever the batch."""
    for keys in (2048, 16384):
        program, cost = best(lambda b=batch, k=keys, g=group: decode(b, k, g))
        floor = 4 * batch * 8 * keys * 128 / H200.bandwidth * 1e6 + H200.launch_us
        assert cost < floor + 4 + 0.08 * floor, describe(program)
        assert program.blocks() >= 64


def test_keys_are_divided_further_where_lengths_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence does not run alone at the end, nor a short one on a few SMs."""
    monkeypatch.setattr(ChainedForm, "uneven", lambda self, program: True)
    for batch, keys in ((32, 4096), (8, 65536), (1, 65536)):
        program = search_region(region_of(decode(batch, keys)), H200, LOWERED).ways[0].programs[0]
        loop = program.axis("N.loop").extent
        assert loop is not None and loop * program.tile["N"] <= UNEVEN_KEYS
