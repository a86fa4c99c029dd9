"""Running maxima, rescaled sums and loops walked several times: the verifier tells right from wrong
programs, and float64 agrees with it, large inputs included."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cutesuper as cs
from cutesuper.errors import GraphError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.graph import KernelGraph
from cutesuper.verify import equivalence, numeric
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.numeric import compare
from tests.mugraphs import (
    attention_kernel,
    mugraph,
    rms_linear,
    softmax_kernel,
    softmax_rows,
)
from tests.mutants import change, mutations
from tests.softmax_mugraphs import (
    SCALE,
    Case,
    attention_block,
    column_maximum,
    layer_norm_linear,
    merge_block,
    online_attention,
    online_softmax,
    other_part,
    rescaled_in_the_second_walk,
    rms_rows,
    row_block,
    safe_attention,
    scores,
    split_attention,
    split_softmax,
    streamed,
    three_walk_layer_norm,
    three_walk_softmax,
    two_maxima,
    two_walk_attention,
    two_walk_rms_linear,
    two_walk_rms_rows,
    walked_block,
    weighted,
)


def attends(
    kernel: Callable[..., MuGraph], n: int = 48, scale: float | None = None, **split: int
) -> Case:
    def case() -> tuple[KernelGraph, MuGraph]:
        g = safe_attention(n=n, scale=scale)
        return g, kernel(g, scale=scale, **split)

    return case


def rows(kernel: Callable[..., MuGraph], n: int = 48, **split: int) -> Case:
    def case() -> tuple[KernelGraph, MuGraph]:
        g = softmax_rows(8, n)
        return g, kernel(g, **split)

    return case


def of(graph: KernelGraph, kernel: Callable[..., MuGraph], **split: int) -> Case:
    return lambda: (graph, kernel(graph, **split))


def repeated_maximum(g: KernelGraph) -> MuGraph:
    """The denominator has a maximum of its own, which is the same one."""
    b = attention_block(g, loop=3)
    s = scores(b)
    sums: list[int] = []
    for which in (0, 1):
        part = b.op("max", s, over="N")
        x = weighted(b, b.op("exp", b.op("sub", s, part)))[which]
        sums.append(b.online("N", part, x)[1])
    b.store("Z", b.op("div", *sums), "H", "M", "E")
    return mugraph(g, b.step())


RIGHT: dict[str, Case] = {
    "running maximum": attends(online_attention, loop=3),
    "running maximum, scale": attends(online_attention, scale=SCALE, loop=3),
    "running maximum, tails": attends(online_attention, 41, loop=3),
    "running maximum, a tile of padding": attends(online_attention, 11, loop=4),
    "running maximum over visits": attends(online_attention, persistent=3),
    "cluster": attends(online_attention, cluster=3),
    "running maximum, cluster": attends(online_attention, loop=3, cluster=2),
    "running maximum, cluster, scale, tails": attends(
        online_attention, 41, SCALE, loop=3, cluster=2
    ),
    "grid": attends(split_attention, grid=2),
    "grid, running maximum": attends(split_attention, grid=2, loop=3),
    "grid, cluster": attends(split_attention, grid=2, cluster=3),
    "grid, running maximum, cluster": attends(
        split_attention, scale=SCALE, grid=2, loop=3, cluster=2
    ),
    "grid, divided": attends(split_attention, grid=2, normalised=True),
    "grid, running maximum, divided": attends(split_attention, 41, grid=2, loop=3, normalised=True),
    "joined grid": attends(online_attention, grid=2),
    "joined grid, running maximum, tails": attends(online_attention, 41, grid=2, loop=3),
    "joined grid, an empty part": attends(online_attention, 9, grid=4, loop=1),
    "joined grid, running maximum, cluster": attends(
        online_attention, 48, SCALE, grid=2, loop=2, cluster=2
    ),
    "maximum first": attends(two_walk_attention, loop=3),
    "maximum first, cluster": attends(two_walk_attention, 41, loop=3, cluster=2),
    "the same maximum twice": of(safe_attention(), repeated_maximum),
    "rows": rows(softmax_kernel),
    "rows, running maximum": rows(online_softmax, loop=3),
    "rows, running maximum, cluster": rows(online_softmax, 43, loop=3, cluster=2),
    "rows, three walks": rows(three_walk_softmax, loop=3),
    "rows, three walks, cluster": rows(three_walk_softmax, 43, loop=3, cluster=2),
    "rows, grid, running maximum": rows(split_softmax, grid=2, loop=3),
    "layer norm": of(layer_norm_linear(), three_walk_layer_norm, loop=3),
    "layer norm, cluster": of(layer_norm_linear(k=43), three_walk_layer_norm, loop=3, cluster=2),
    "RMS norm": of(rms_linear(8, 48, 32), two_walk_rms_linear, loop=3),
    "RMS norm, cluster": of(rms_linear(8, 43, 32), two_walk_rms_linear, loop=3, cluster=2),
    "RMS norm, rows": of(rms_rows(), two_walk_rms_rows, loop=3),
}
#: equal only if the two maxima are: they are the largest in a random order, not fresh values
UNBOUNDED = ["the same maximum twice"]


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(name: str) -> None:
    graph, mu = RIGHT[name]()
    result = verify(graph, mu, full=True)
    assert result, result.summary()
    assert (result.bound_log2 is None) == (name in UNBOUNDED), result.conditions
    assert result.bound_log2 is None or result.bound_log2 < -50
    report = compare(graph, mu)
    assert report, report.message


@pytest.mark.parametrize("elements", [16, 200])
@pytest.mark.parametrize("name", RIGHT)
def test_cutting_values_into_chunks_changes_nothing(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (equivalence, numeric):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    graph, mu = RIGHT[name]()
    assert verify(graph, mu, full=True)
    assert compare(graph, mu)


# -------------------------------------------------------------------------------- wrong programs


def plain(case: Case, step: int, *which: int) -> Case:
    """Some of a kernel's rescaled sums without the rescaling."""

    def broken() -> tuple[KernelGraph, MuGraph]:
        graph, mu = case()
        found = [i for i, op in enumerate(mu.steps[step].program.ops) if op.rescaled]
        for k in which:
            op = mu.steps[step].program.ops[found[k]]
            mu = change(mu, step, found[k], inputs=op.inputs[:1])
        return graph, mu

    return broken


def merged(numerator: str, denominator: str, normalised: bool = False) -> Case:
    """Parts over the grid, merged with what the letters say: A, L and T are what was stored, t the
    largest T, W is ``exp(T - t)``, V is ``exp(t - T)``."""

    def broken() -> tuple[KernelGraph, MuGraph]:
        g = safe_attention()
        mu = split_attention(g, grid=2, loop=3, normalised=normalised)
        c, shapes = merge_block(g, 2)
        known = {"A": c.load("A", "S", "H", "M", "E"), "L": c.load("L", "S", "H", "M")}
        part = c.load("T", "S", "H", "M")
        top = c.op("max", part, over="S")
        known["W"] = c.op("exp", c.op("sub", part, top))
        known["V"] = c.op("exp", c.op("sub", top, part))
        sums: list[int] = []
        for letters in (numerator, denominator):
            x = known[letters[0]]
            for letter in letters[1:]:
                x = c.op("mul", x, known[letter])
            sums.append(c.op("sum", x, over="S"))
        c.store("Z", c.op("div", *sums), "H", "M", "E")
        return g, mugraph(g, mu.steps[0], c.step("merge"), **shapes)

    return broken


def rows_by(statistic: str) -> Case:
    """Softmax of rows in two walks; the second one uses a statistic that is not complete."""

    def broken() -> tuple[KernelGraph, MuGraph]:
        g = softmax_rows(8, 48)
        b = row_block(g, loop=3, cluster=2)
        x = b.load("X", "M", "N")
        part = b.op("max", x, over="N")
        total = b.op("sum", b.op("exp", b.op("sub", x, part)), over="N")
        block_top = b.acc(part, "N.loop", "max")
        block_total = b.rescaled(total, part, block_top)
        top = b.acc(block_top, "N.cluster", "max")
        whole = b.rescaled(block_total, block_top, top)
        shift = {"tile": part, "block": block_top}.get(statistic, top)
        by = block_total if statistic == "total" else whole
        b.store("Z", b.op("div", b.op("exp", b.op("sub", x, shift)), by), "M", "N")
        return g, mugraph(g, b.step())

    return broken


def not_joined(which: str) -> Case:
    """Keys over the grid, of which one sum is never combined."""

    def broken() -> tuple[KernelGraph, MuGraph]:
        g = safe_attention()
        b = attention_block(g, grid=2, loop=3)
        s = scores(b)
        part = b.op("max", s, over="N")
        num, den = weighted(b, b.op("exp", b.op("sub", s, part)))
        part, num, den = b.online("N", part, num, den)
        top = b.acc(part, "N.grid", "max")
        sums = [
            x if k == which else b.rescaled(x, part, top)
            for k, x in (("numerator", num), ("denominator", den))
        ]
        b.store("Z", b.op("div", *sums), "H", "M", "E")
        return g, mugraph(g, b.step())

    return broken


LOOP = attends(online_attention, loop=3)
CLUSTER = attends(online_attention, cluster=3)
BOTH = attends(online_attention, loop=3, cluster=2)
GRID = attends(split_attention, grid=2, loop=3)
JOINED = attends(online_attention, grid=2, loop=3, cluster=2)
ONLINE_ROWS = rows(online_softmax, loop=3)

WRONG: dict[str, Case] = {
    "plain sums in the loop": plain(LOOP, 0, 0, 1),
    "plain numerator in the loop": plain(LOOP, 0, 0),
    "plain denominator in the loop": plain(LOOP, 0, 1),
    "plain sums in the cluster": plain(CLUSTER, 0, 0, 1),
    "plain numerator in the cluster": plain(CLUSTER, 0, 0),
    "plain denominator in the cluster": plain(CLUSTER, 0, 1),
    "plain sums in the loop, then rescaled": plain(BOTH, 0, 0, 1),
    "rescaled in the loop, then plain sums": plain(BOTH, 0, 2, 3),
    "plain numerator, then rescaled": plain(BOTH, 0, 0),
    "rescaled denominator, then plain": plain(BOTH, 0, 3),
    "plain sums, then the grid": plain(GRID, 0, 0, 1),
    "plain sums in the loop, joined by the grid": plain(JOINED, 0, 0, 1),
    "plain sums in the cluster, joined by the grid": plain(JOINED, 0, 2, 3),
    "plain sums over the grid": plain(JOINED, 0, 4, 5),
    "plain numerator over the grid": plain(JOINED, 0, 4),
    "plain denominator over the grid": plain(JOINED, 0, 5),
    "plain denominator of rows": plain(ONLINE_ROWS, 0, 0),
    "no weights": merged("A", "L"),
    "only the numerator weighted": merged("AW", "L"),
    "only the denominator weighted": merged("A", "LW"),
    "weights of the wrong sign": merged("AV", "LV"),
    "one weight of the wrong sign": merged("AW", "LV"),
    "weights twice": merged("AWW", "LWW"),
    "weights without the denominators": merged("AW", "W"),
    "divided parts without denominators": merged("AW", "W", normalised=True),
    "divided parts, plain": merged("AL", "L", normalised=True),
    "divided parts, weights below only": merged("AL", "LW", normalised=True),
    "nothing subtracted": streamed("s", "s"),
    "subtracted in the numerator only": streamed("e", "s"),
    "subtracted in the denominator only": streamed("s", "e"),
    "another maximum subtracted": streamed("o", "o"),
    "another maximum subtracted above": streamed("o", "e"),
    "a maximum for each column, rescaled": streamed("c", "c"),
    "scores subtracted": streamed("-", "-"),
    "not scaled": streamed("u", "u", scale=SCALE),
    "not scaled below": streamed("e", "u", scale=SCALE),
    "a running maximum of the values": other_part,
    "two maxima": two_maxima,
    "a maximum for each column": column_maximum,
    "rescaled in the second walk": rescaled_in_the_second_walk,
}


def disagrees(graph: KernelGraph, mu: MuGraph) -> None:
    """The verifier and float64 both say that the programs differ."""
    result = verify(graph, mu)
    assert not result
    assert result.counterexample is not None, result.reason
    assert not compare(graph, mu, stress=False)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_rejected(name: str) -> None:
    disagrees(*WRONG[name]())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (rows_by("tile"), "it is a partial result over N.cluster, N.loop"),
        (rows_by("block"), "it is a partial result over N.cluster"),
        (rows_by("total"), "it is a partial result over N.cluster"),
        (not_joined("numerator"), "uses what was combined over N.grid together with the part"),
        (not_joined("denominator"), "uses what was combined over N.grid together with the part"),
    ],
)
def test_statistics_that_are_not_complete_are_illegal(case: Case, message: str) -> None:
    result = verify(*case())
    assert not result and message in str(result.reason)


def test_statistics_that_are_complete_are_right() -> None:
    assert verify(*rows_by("whole")())


@pytest.mark.parametrize(
    "name",
    [
        "running maximum, cluster",
        "grid",
        "joined grid, running maximum, cluster",
        "rows, running maximum",
        "layer norm",
    ],
)
def test_mutants(name: str) -> None:
    """Accepted where float64 agrees (another shift than the maximum cancels), and nowhere else."""
    graph, mu = RIGHT[name]()
    verifier = Verifier(graph)
    rejected, refused = 0, []
    for s, step in enumerate(mu.steps):
        for i, op in enumerate(step.program.ops):
            for what, mutant in mutations(mu, s, i, op):
                result = verifier.check(mutant, bound=False)
                try:
                    equal = bool(compare(graph, mutant, stress=False))
                except GraphError:
                    equal = False
                assert equal or not result, f"step {s}, {i} {op.kind}: {what}"
                rejected += not equal
                if equal and not result:
                    refused.append(f"{op.kind}: {what}")
    assert rejected >= 30
    # a largest sum of exponentials as the shift: an exponential of what came from exponentials
    assert refused == (["max: operand 0 is 1"] if name == "grid" else [])


# ------------------------------------------------------------------- equal, but not safe in numbers


@pytest.mark.parametrize("name", ["no maximum", "one maximum for all rows", "sum of the maxima"])
def test_maxima_cancel_and_numbers_show_that_they_are_needed(name: str) -> None:
    graph = safe_attention(scale=SCALE)
    if name == "no maximum":
        mu = attention_kernel(graph)
    elif name == "one maximum for all rows":
        mu = online_attention(graph, scale=SCALE, loop=3, common=True)
    else:
        mu = split_attention(graph, scale=SCALE, grid=2)
        merge = mu.steps[1].program.ops
        [top] = [i for i, op in enumerate(merge) if op.kind == "max"]
        mu = change(mu, 1, top, kind="sum")
    result = verify(graph, mu)
    assert result
    if name == "sum of the maxima":
        assert "other than as a summand" in result.conditions
    assert compare(graph, mu, stress=False)
    report = compare(graph, mu)
    assert not report and "NaN" in report.message


# --------------------------------------------------------------------- statistics of several walks


def broken_layer_norm(what: str) -> tuple[KernelGraph, MuGraph]:
    g = layer_norm_linear()
    b = walked_block(g, loop=3)
    x, w = b.load("X", "M", "K"), b.load("W", "K", "N")
    tile_mean = b.op("mean", x, over="K")
    mean = b.acc(tile_mean, "K.loop")
    centred = b.op("sub", x, tile_mean if what == "mean of the tile" else mean)
    if what == "nothing subtracted in the variance":
        variance = b.acc(b.op("mean", b.op("square", x), over="K"), "K.loop")
    elif what == "variance of the tile":
        variance = b.op("mean", b.op("square", centred), over="K")
    elif what == "mean for the variance":
        variance = mean
    else:
        op = "max" if what == "largest part of the variance" else "sum"
        variance = b.acc(b.op("mean", b.op("square", centred), over="K"), "K.loop", op)
    deviation = b.op("sqrt", b.op("add", variance, b.const(1e-6)))
    shown = x if what == "nothing subtracted in the product" else centred
    product = b.op("matmul", b.op("div", shown, deviation), w, over="K")
    b.store("Z", b.acc(product, "K.loop"), "M", "N")
    return g, mugraph(g, b.step())


@pytest.mark.parametrize(
    "what",
    [
        "mean of the tile",
        "variance of the tile",
        "mean for the variance",
        "nothing subtracted in the variance",
        "nothing subtracted in the product",
        "largest part of the variance",
    ],
)
def test_layer_norm_with_the_wrong_statistic_is_rejected(what: str) -> None:
    disagrees(*broken_layer_norm(what))


def test_layer_norm_of_that_builder_is_right() -> None:
    assert verify(*broken_layer_norm("nothing"))


@pytest.mark.parametrize("split", [{"loop": 3}, {"loop": 3, "cluster": 2}])
def test_rms_norm_with_the_statistic_of_a_tile_is_rejected(split: dict[str, int]) -> None:
    graph = rms_linear(8, 48, 32)
    mu = two_walk_rms_linear(graph, **split)
    ops = mu.steps[0].program.ops
    [tile] = [i for i, op in enumerate(ops) if op.kind == "mean"]
    [add] = [i for i, op in enumerate(ops) if op.kind == "add"]
    disagrees(graph, change(mu, 0, add, inputs=(tile, ops[add].inputs[1])))


def test_a_product_that_is_not_accumulated_is_illegal() -> None:
    graph = layer_norm_linear()
    mu = three_walk_layer_norm(graph, loop=3)
    ops = mu.steps[0].program.ops
    [product] = [i for i, op in enumerate(ops) if op.kind == "matmul"]
    [store] = [i for i, op in enumerate(ops) if op.kind == "store"]
    with pytest.raises(GraphError, match=r"it is a partial result over K.loop"):
        compare(graph, change(mu, 0, store, inputs=(product,)))


def test_exponents_less_a_maximum_stay_whole() -> None:
    """exp(x + b - m) is exp(x) exp(b - m), in which both overflow; exponentials that the program
    has itself may still be factors."""
    g = cs.new_kernel_graph()
    x, w, b = (g.new_input(s, "float16") for s in ((64, 64), (64, 64), (64,)))
    y = g.add(g.matmul(x, w), b)
    g.mark_output(g.logsumexp(y, 0))
    found = cs.mugraphs(g, target="h200").candidates
    assert found
    for c in found:
        report = compare(g, c.mugraph)
        assert report, report.message
