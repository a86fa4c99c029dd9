"""The search for attention loops: programs the form runs, that they are right, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from cutesuper.egraph.labelled import Region, label
from cutesuper.errors import SearchError
from cutesuper.ir.block import AxisKind, BlockProgram, KernelStep, MuGraph
from cutesuper.ir.check import check_block_program, passes
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.search.cuts import Cut, Flat
from cutesuper.search.forms import find_form
from cutesuper.search.region import SearchOptions, search_region, tensors_of
from cutesuper.search.search import assemble, search
from cutesuper.skeletons.attention.cost import price
from cutesuper.skeletons.attention.form import AttentionForm, hoisted
from cutesuper.skeletons.attention.plan import AttentionPlan, exceeded
from cutesuper.skeletons.attention.roles import recognized
from cutesuper.skeletons.attention.schedule import scheduled
from cutesuper.skeletons.attention.sizes import resized, row_tiles
from cutesuper.skeletons.cost import Setting, describe
from cutesuper.skeletons.matmul.form import MatmulForm
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.plan import RowPlan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.numeric import compare

LOWERED = SearchOptions(lowered=True)
Made = Callable[[], KernelGraph]


def attention(
    batch: int = 2,
    rows: int = 256,
    keys: int = 4096,
    d: int = 64,
    *,
    norms: str = "",
    weights: bool = False,
    maximum: bool = True,
    key_rows: bool = False,
    tail: bool = False,
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


def decode(
    batch: int = 1, keys: int = 4096, group: int = 4, heads: int = 8, lengths: bool = False
) -> KernelGraph:
    """One token, ``group`` query heads for each head of K and V."""
    g = new_kernel_graph()
    q = g.new_input((batch, heads, group, 128), "bfloat16", name="Q")
    k, v = (g.new_input((batch, heads, keys, 128), "bfloat16", name=n) for n in "KV")
    seen = g.new_input((batch,), "int32", name="N") if lengths else None
    g.mark_output(g.scaled_dot_product_attention(q, k, v, lengths=seen))
    return g


def grouped(
    batch: int = 1,
    group: int = 4,
    positions: int = 64,
    keys: int = 4096,
    causal: bool = False,
    heads: int = 8,
    stored: str = "BHGLD",
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
    "head dimension 256": lambda: attention(batch=16, d=256),
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
    """The result of the search for a program; the verifier rejects nothing."""
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


def form_of(graph: KernelGraph) -> AttentionForm:
    region = region_of(graph)
    form = find_form(region, label(region), H200).form
    assert isinstance(form, AttentionForm)
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


def vectors(what: str) -> KernelGraph:
    """Two products in a chain, and a vector of keys beside V or an outer product in place of K."""
    g = new_kernel_graph()
    q, v = g.new_input((64, 64), name="Q"), g.new_input((512, 64), name="V")
    if what == "an outer product":
        k = g.new_input((64, 1), name="a") * g.new_input((1, 512), name="b")
        g.mark_output(g.matmul(g.softmax(q @ k), v))
    else:
        s = q @ g.new_input((64, 512), name="K")
        column = g.square(s @ g.new_input((512, 1), name="c"))
        g.mark_output(s @ v if what == "a later vector" else (s @ v) / (column + 1.0))
        g.mark_output(column)
    return g


@pytest.mark.parametrize("what", ["a vector", "a later vector", "an outer product"])
def test_products_with_vectors_are_sums(what: str) -> None:
    graph = vectors(what)
    moved = hoisted(label(region_of(graph)), form_of(graph))
    assert any(moved.ops[i].kind == "mul" for op in moved.of_kind("sum") for i in op.inputs)
    assert verify(graph, search(graph, H200, options=LOWERED).candidates[0].mugraph)


def test_rows_are_what_keys_have_not() -> None:
    form = form_of(grouped(stored="BLHGD"))
    dims = label(region_of(grouped(stored="BLHGD"))).dims
    assert {dims[d] for d in form.rows} == {4, 64} and {dims[d] for d in form.batch} == {8}
    assert (dims[form.keys], dims[form.inner], dims[form.columns]) == (4096, 128, 128)


@pytest.mark.parametrize("hidden", [128, 4096])
def test_a_short_label_between_products_stays_with_the_matmul_loop(hidden: int) -> None:
    region = region_of(long_mlp(hidden))
    kind = MatmulForm if hidden == 128 else AttentionForm
    assert isinstance(find_form(region, label(region), H200).form, kind)


#: what results are multiplied by that the loop does not load
BESIDE = {"gate": (2, 64, 64), "columns": (64,)}


def refused_scores(what: str, keys: int = 512) -> KernelGraph:
    g = new_kernel_graph()
    d, dtype = (260 if what == "length" else 264 if what == "held" else 64), "float16"
    dtype = "float32" if what == "type" else dtype
    extents = {"Q": 64, "K": keys, "V": keys}
    q, k, v = (g.new_input((2, n, d), dtype, name=c) for c, n in extents.items())
    s = g.matmul(q, g.transpose(k))
    y = g.matmul(g.softmax(s), v)
    if what in BESIDE:
        y = g.mul(y, g.new_input(BESIDE[what], name="B"))
    g.mark_output(g.rms_norm(y) if what == "norm after" else y)
    return g


@pytest.mark.parametrize("what", ["length", "held", "type", "norm after", *BESIDE])
def test_what_the_loop_does_not_run_is_refused(what: str) -> None:
    region = region_of(refused_scores(what))
    with pytest.raises(SearchError):
        find_form(region, label(region), H200)


@pytest.mark.parametrize("what", BESIDE)
def test_what_meets_the_result_is_another_kernel(what: str) -> None:
    first = search(refused_scores(what, 4096), H200, options=LOWERED).candidates[0].mugraph
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


def test_queries_behind_a_log_softmax() -> None:
    """The sums are rescaled, as those of any queries: a mask of positions needs the loop of
    attention."""
    g = new_kernel_graph()
    x, k, v = (g.new_input((64, 8), name=n) for n in "XKV")
    q = g.sub(x, g.max(x, 1))
    q = g.sub(q, g.log(g.sum(g.exp(q), 1)))
    g.mark_output(g.scaled_dot_product_attention(q, k, v, is_causal=True))
    mu = search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert isinstance(make_plan(mu.steps[-1], mu.tensors, H200), AttentionPlan)
    assert verify(g, mu).equal and compare(g, mu)


@pytest.mark.parametrize("queries", ["own", "keys"])
def test_keys_that_are_values_are_read_in_two_roles(queries: str) -> None:
    """As keys their columns are contracted, as values they are those of the result."""
    g = new_kernel_graph()
    x = g.new_input((2, 33, 64), name="X")
    q = g.new_input((2, 40, 64), name="Q") if queries == "own" else x
    g.mark_output(g.scaled_dot_product_attention(q, x, x, is_causal=True))
    mu = search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    [step] = mu.steps
    assert isinstance(make_plan(step, mu.tensors, H200), AttentionPlan)
    assert verify(g, mu).equal and compare(g, mu)


def test_masks_that_hide_nothing_need_no_positions() -> None:
    g = new_kernel_graph()
    g.mark_output(g.exp(g.causal_mask(g.new_input((16, 1), name="X"))))
    mu = search(g, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert verify(g, mu).equal and compare(g, mu)


def test_a_symbolic_batch() -> None:
    g = new_kernel_graph()
    b = symbol("B", hint=16)
    q = g.new_input((b, 64, 64), name="Q")
    k, v = (g.new_input((b, 1024, 64), name=n) for n in "KV")
    g.mark_output(g.scaled_dot_product_attention(q, k, v))
    (step,) = search(g, H200, options=LOWERED).candidates[0].mugraph.steps
    assert [a.extent for a in step.program.axes if a.dim == "B"] == [None]


# ------------------------------------------------------------------------------------------- sizes

#: of each the fastest way that was measured, in microseconds
MEASURED: dict[str, tuple[Made, str]] = {
    "6.4": (attention, "B.grid(2) M.grid(4) N.cluster(8) N.loop(4), tile M=64 N=128"),
    "13.9": (
        lambda: attention(16),
        "B.grid(16) M.grid(4) N.cluster(2) N.loop(16), tile M=64 N=128",
    ),
    "7.31": (decode, "B.grid(8) N.cluster(8) N.loop(8), tile M=4 N=64"),
    "18.8": (lambda: decode(1, 16384), "B.grid(8) N.cluster(8) N.loop(32), tile M=4 N=64"),
    "62.9": (lambda: decode(1, 65536), "B.grid(8) N.cluster(8) N.loop(128), tile M=4 N=64"),
    "123.3": (lambda: decode(1, 131072), "B.grid(8) N.cluster(8) N.loop(256), tile M=4 N=64"),
    "11.3": (lambda: decode(2), "B.grid(2) B2.grid(8) N.cluster(4) N.loop(16), tile M=4 N=64"),
    "19.2": (lambda: decode(4), "B.grid(4) B2.grid(8) N.cluster(2) N.loop(32), tile M=4 N=64"),
    "64.2": (
        lambda: decode(4, 16384),
        "B.grid(4) B2.grid(8) N.cluster(2) N.loop(128), tile M=4 N=64",
    ),
    "33.1": (lambda: decode(8), "B.grid(8) B2.grid(8) N.cluster(2) N.loop(32), tile M=4 N=64"),
    "60.9": (lambda: decode(16), "B.grid(16) B2.grid(8) N.loop(64), tile M=4 N=64"),
    "121.5": (lambda: decode(32), "B.grid(32) B2.grid(8) N.loop(64), tile M=4 N=64"),
    "239.5": (lambda: decode(64), "B.grid(64) B2.grid(8) N.loop(64), tile M=4 N=64"),
    "63.0": (
        lambda: grouped(positions=2048, keys=2048, causal=True),
        "B.grid(8) M.grid(64) N.loop(16), tile M=32 N=128",
    ),
    "852.7": (
        lambda: grouped(positions=8192, keys=8192, causal=True),
        "B.grid(8) M.grid(256) N.loop(64), tile M=32 N=128",
    ),
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
    assert cost == pytest.approx(float(us), rel=0.07)


@cache
def cost(graph: Made, tile: tuple[int, ...], keys: int, cluster: int = 1, grid: int = 1) -> float:
    """Predicted time of a program with these tiles of its rows and keys, and parts of the keys."""
    region = region_of(graph())
    kinds = {AxisKind.CLUSTER: cluster, AxisKind.GRID: grid, AxisKind.LOOP: 2}
    wanted = {kind for kind, n in kinds.items() if n > 1}
    ways = search_region(region, H200, replace(LOWERED, keep=1000)).ways
    programs = (w.programs[0] for w in ways)
    found = next(p for p in programs if {a.kind for a in p.axes_of("N")} == wanted)
    known = recognized(KernelStep("k0", found), Setting(H200, tensors_of(region)))
    rows = dict(zip(known.own_labels, tile, strict=True))
    plan = scheduled(resized(known, rows | {known.keys: keys}, cluster, grid), H200)
    assert exceeded(plan, H200) is None
    return price(plan, H200).total


#: microseconds of decoding in clusters of C and G parts of the grid, tiles of 64 keys
SLOWER: dict[tuple[int, int], dict[str, float]] = {
    (1, 4096): {
        "C8 G1": 7.31, "C4 G2": 8.55, "C2 G8": 8.53, "C4 G3": 8.63, "C2 G4": 9.17, "C4 G1": 9.67,
        "C1 G16": 9.85, "C4 G4": 12.1, "C8 G2": 12.3,
    },
    (1, 16384): {"C8 G1": 18.8, "C2 G8": 20.35, "C1 G16": 21.9, "C4 G4": 25.0, "C8 G2": 26.3},
    (1, 65536): {"C8 G1": 62.9, "C2 G8": 64.8, "C1 G16": 66.0, "C1 G33": 71.0},
    (2, 4096): {"C4 G1": 11.3, "C2 G4": 12.5, "C8 G1": 15.0, "C4 G2": 16.1},
    (4, 4096): {"C2 G1": 19.2, "C2 G2": 19.7, "C1 G4": 20.25, "C4 G1": 22.8},
    (4, 16384): {"C2 G1": 64.2, "C4 G1": 79.2},
    (8, 4096): {"C2 G1": 33.1, "C1 G1": 35.4, "C1 G4": 35.1, "C4 G1": 38.6},
    (16, 4096): {"C1 G1": 60.9, "C1 G2": 63.3, "C2 G1": 63.9},
}  # fmt: skip


@pytest.mark.parametrize("case", SLOWER)
def test_slower_variants_cost_more(case: tuple[int, int]) -> None:
    """The first is the best; none is far off."""
    first, *others = SLOWER[case].items()
    graph = partial(decode, *case)

    def predicted(name: str) -> float:
        cluster, grid = (int(part[1:]) for part in name.split())
        return cost(graph, (4,), 64, cluster, grid)

    for name, us in (first, *others):
        assert predicted(name) == pytest.approx(us, rel=0.08)
        assert name == first[0] or predicted(name) > predicted(first[0])


def test_slower_tiles_cost_more() -> None:
    """Tiles of 128 keys for 64 rows, of 64 keys for few; 128 rows where there are many."""
    causal = partial(grouped, positions=2048, keys=2048, causal=True)
    few = [cost(attention, (64,), n, 8) for n in (128, 64)]
    token = [cost(decode, (4,), n, 8) for n in (64, 128)]
    many = [cost(causal, rows, n) for rows, n in (((4, 32), 128), ((4, 16), 64), ((4, 32), 64))]
    assert few == pytest.approx([6.4, 7.06], rel=0.06)
    assert token == pytest.approx([7.31, 7.75], rel=0.06)
    assert many[:2] == pytest.approx([63.0, 93], rel=0.07)
    assert all(us[0] < min(us[1:]) for us in (few, token, many))


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ([4], [(4,)]),
        ([64], [(64,)]),
        ([65], [(64,), (65,)]),
        ([256], [(64,), (128,)]),
        ([7, 512], [(7, 9), (7, 18)]),
        ([2048, 4], [(16, 4), (32, 4)]),
        ([96, 128], [(64, 1), (96, 1)]),
        ([2, 3, 100], [(2, 3, 10), (2, 3, 21)]),
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


@pytest.mark.parametrize(
    "case", [(1, 65536), (2, 4096), (2, 65536), (8, 65536), (16, 8192), (32, 1024), (32, 8192)]
)
def test_lengths_cost_little_where_they_are_equal(case: tuple[int, int]) -> None:
    """Keys are divided further so that a long sequence does not end alone, but not at any price."""
    program, _ = best(lambda: decode(*case, lengths=True))
    (cluster,) = [a.extent for a in program.axes_of("N") if a.kind == AxisKind.CLUSTER] or [1]
    (grid,) = [a.extent for a in program.axes_of("N") if a.kind == AxisKind.GRID] or [1]
    assert cluster is not None and grid is not None
    plain = cost(partial(decode, *case), (4,), program.tile["N"], cluster, grid)
    assert plain < 1.05 * best(lambda: decode(*case))[1]


def test_keys_are_divided_further_where_lengths_differ() -> None:
    """One long sequence does not run alone at the end; for a single one nothing changes."""

    def parts(batch: int, keys: int, lengths: bool) -> int:
        program, _ = best(lambda: decode(batch, keys, lengths=lengths))
        return program.blocks() // (8 * batch)

    assert parts(32, 8192, True) == 2 * parts(32, 8192, False)
    assert parts(8, 65536, True) == 2 * parts(8, 65536, False)
    assert parts(1, 65536, True) == parts(1, 65536, False)
