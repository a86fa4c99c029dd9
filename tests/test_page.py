"""The HTML page of a muGraph; what a browser makes of it is in test_page_browser.py."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import cutesuper as cs
from cutesuper.errors import GraphError
from cutesuper.ir.block import (
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    TensorSpec,
)
from cutesuper.ir.check import check_block_program
from cutesuper.ir.dtypes import float16
from cutesuper.ir.graph import KernelGraph
from cutesuper.show.page import Facts, mugraph_page
from cutesuper.show.page_formula import formulas
from cutesuper.show.page_fusion import definition_title, kernel_title, kernels_of
from cutesuper.show.page_kernel import bytes_of
from cutesuper.show.page_parts import Html, el, micros, shorten
from cutesuper.show.page_values import lives, loaded, times
from cutesuper.skeletons.cost import Cost, bytes_moved
from cutesuper.verify.equivalence import Verifier
from tests import programs, zoo


def product(a: str, b: str, out: str, n: int, k: int, added: str = "") -> BlockProgram:
    """``out = a @ b``, plus ``added`` if there is such a tensor."""
    op = programs.op
    ops = [
        op("load", (), "MK", tensor=a, map=("M", "K")),
        op("load", (), "NK", tensor=b, map=("K", "N")),
        op("matmul", (0, 1), "MN", over="K"),
        op("accumulate", (2,), "MN", axis="K.loop", op="sum"),
    ]
    if added:
        ops += [
            op("load", (), "MN", tensor=added, map=("M", "N")),
            op("add", (3, 4), "MN"),
        ]
    ops.append(op("store", (len(ops) - 1,), "MN", tensor=out, map=("M", "N")))
    axes = (Axis("N", AxisKind.GRID, n // 16), Axis("K", AxisKind.LOOP, k // 16))
    return BlockProgram({"M": 16, "N": n, "K": k}, axes, {"M": 16, "N": 16, "K": 16}, tuple(ops))


@cache
def lora() -> tuple[KernelGraph, MuGraph, Facts]:
    """``X W + X A B`` in three kernels, with all that can be known of them."""
    graph = zoo.lora(16, 256, 128)
    shapes = {"X": (16, 256), "W": (256, 128), "A": (256, 16), "B": (16, 128), "t4": (16, 128),
              "t5": (16, 16), "out0": (16, 128)}  # fmt: skip
    steps = (
        KernelStep("k0", product("X", "W", "t4", 128, 256)),
        KernelStep("k1", product("X", "A", "t5", 16, 256)),
        KernelStep("k2", product("t5", "B", "out0", 128, 16, added="t4")),
    )
    tensors = {n: TensorSpec(n, s, float16) for n, s in shapes.items()}
    mu = MuGraph(tensors, ("X", "W", "A", "B"), ("out0",), steps)
    verdict = Verifier(graph).check(mu)
    assert verdict
    costs = [
        Cost(2.5, {"memory": 0.5, "launch": 1.8, "tensor": 0.001}),
        Cost(2.0, {"launch": 1.8, "exchange": 0.1}),
        Cost(1.9, {"launch": 1.8, "new cause": 0.2}),
    ]
    notes = tuple(f"plan of {s.name}" for s in steps)
    return graph, mu, Facts(graph, "h200", costs, verdict.summary(), verdict.bound_log2, notes)


def named(mu: MuGraph, names: dict[str, str]) -> MuGraph:
    """The muGraph with other names for its tensors."""

    def rename(op: BlockOp) -> BlockOp:
        if op.kind not in (LOAD, STORE):
            return op
        tensor = names.get(op.attributes["tensor"], op.attributes["tensor"])
        return replace(op, attributes=op.attributes | {"tensor": tensor})

    steps = tuple(
        replace(s, program=replace(s.program, ops=tuple(map(rename, s.program.ops))))
        for s in mu.steps
    )
    tensors = {names.get(n, n): replace(t, name=names.get(n, n)) for n, t in mu.tensors.items()}
    inputs, outputs = (tuple(names.get(n, n) for n in side) for side in (mu.inputs, mu.outputs))
    return MuGraph(tensors, inputs, outputs, steps)


def test_text_is_escaped_and_markup_is_not() -> None:
    got = el("p", "<b> & \"q\" 'a'", el("i", "x"), title='"><x>', class_="c", hidden=True, id=None)
    assert got == (
        '<p title="&quot;&gt;&lt;x&gt;" class="c" hidden>&lt;b&gt; &amp; &quot;q&quot; '
        "&#x27;a&#x27;<i>x</i></p>"
    )
    assert isinstance(got, Html)
    assert el("i", x=1.25, rx=3, data_x="a\0b") == '<i x="1.2" rx="3" data-x="a?b"></i>'
    assert el("p", "\u202e\ud800\nü") == "<p>??\nü</p>"


def test_numbers_and_names_are_short() -> None:
    assert [micros(v) for v in (0.005, 9.994, 16.14)] == ["0.01 µs", "9.99 µs", "16.1 µs"]
    assert shorten("a" * 24) == "a" * 24
    assert shorten("a" * 25) == "a" * 23 + "…"


def test_formulas() -> None:
    step = {name: f().steps[0].program for name, f in programs.ALL.items()}
    assert formulas(step["norm_linear"]) == ["Z = X @ W / sqrt(mean_K(X²) + 1e-06)"]
    assert formulas(step["nested"]) == [
        "v10 = silu(((x * sqrt(s)) @ v + b) * s)",
        "y = v10",
        "z = sum_M(v10) * b",
    ]
    assert formulas(step["norm_backward"]) == [
        "v7 = rsqrt(mean_N(x²) + 1e-06)",
        "v8 = x * v7",
        "v9 = dy * w",
        "dx = (v9 - v8 * mean_N(v8 * v9)) * v7",
        "part = sum_M(dy * v8)",
    ]


@pytest.mark.parametrize(
    ("outer", "inner", "left", "text"),
    [
        ("mul", "matmul", True, "a @ b * c"),
        ("mul", "matmul", False, "c * (a @ b)"),
        ("matmul", "mul", True, "(a * b) @ c"),
        ("matmul", "matmul", False, "c @ (a @ b)"),
        ("sub", "add", True, "a + b - c"),
        ("sub", "sub", False, "c - (a - b)"),
        ("div", "div", False, "c / (a / b)"),
        ("mul", "add", True, "(a + b) * c"),
    ],
)
def test_parentheses(outer: str, inner: str, left: bool, text: str) -> None:
    def product(kind: str, inputs: tuple[int, int]) -> BlockOp:
        return programs.op(kind, inputs, "K", **({"over": "K"} if kind == "matmul" else {}))

    loads = [programs.op("load", (), "K", tensor=n, map=("K",)) for n in "abc"]
    both = (3, 2) if left else (2, 3)
    ops = (*loads, product(inner, (0, 1)), product(outer, both))
    store = programs.op("store", (4,), "K", tensor="y", map=("K",))
    assert formulas(BlockProgram({"K": 8}, (), {"K": 8}, (*ops, store))) == [f"y = {text}"]


def test_which_kernel_computes_what() -> None:
    graph, mu, _ = lora()
    matmuls = [i for i, n in enumerate(graph.nodes) if n.operator == "matmul"]
    [add] = [i for i, n in enumerate(graph.nodes) if n.operator == "add"]
    kernels = kernels_of(graph, mu)
    assert sorted(kernels) == [*matmuls, add]
    assert {k for ks in kernels.values() for k in ks} == {0, 1, 2}
    assert kernels[add] == kernels[matmuls[2]]
    titles = [kernel_title(s.program, graph, kernels, k) for k, s in enumerate(mu.steps)]
    assert titles == ["matmul", "matmul", "matmul + add"]
    assert definition_title(graph) == "3 matmul + add"


def test_a_composite_operator_belongs_to_the_kernels_of_its_parts() -> None:
    graph = programs.norm_linear_graph()
    assert kernels_of(graph, programs.norm_linear()) == {2: (0,), 3: (0,)}


def test_pages_of_programs_with_concatenations_and_slices() -> None:
    g = cs.new_kernel_graph()
    a, b = g.new_input((16, 64), name="a"), g.new_input((16, 32), name="b")
    x = g.square(g.concat([a, b], 1))
    g.mark_output(g.slice(x, 1, 0, 64))
    g.mark_output(g.sum(x, 1))
    best = cs.mugraphs(g, target="h200", budget_s=1.0).candidates[0].mugraph
    assert kernels_of(g, best) == {}
    page = mugraph_page(best, Facts(g))
    assert "concat" in page and "computed in" not in page


def test_nothing_is_said_of_values_that_the_definition_does_not_have() -> None:
    graph, mu, _ = lora()
    unknown = named(mu, {"t4": "partial"})
    assert kernels_of(graph, unknown) == {}
    assert kernel_title(unknown.steps[2].program, graph, {}, 2) == "matmul + add"
    assert "computed in" not in mugraph_page(unknown, Facts(graph))


@pytest.mark.parametrize("name", ["norm_linear", "symbolic_rows", "online_softmax"])
def test_bytes_are_those_of_the_cost_model(name: str) -> None:
    mu = programs.ALL[name]()
    for step in mu.steps:
        names = {*step.reads, *step.writes}
        sizes = {n: mu.tensors[n].dtype.itemsize for n in names}
        assert sum(bytes_of(mu, n) for n in names) == bytes_moved(step.program, sizes)


def test_what_all_blocks_load() -> None:
    program = programs.norm_linear().steps[0].program
    assert loaded(program, 0, 2) == 48 * 16 * 4096 * 2  # X, by every block column
    assert loaded(program, 1, 2) == 4096 * 6144 * 2  # W, once
    twice = programs.online_softmax().steps[0].program
    assert times(twice, 0) == 2 * 8  # X, in two walks over the loop
    states = check_block_program(twice)
    assert lives(twice, states[10], 10) == (
        "inside N.loop (8 iterations), walk 2: another value in every iteration"
    )
    assert lives(twice, states[7], 7) == "in the block, once N.loop has ended"
    nested = programs.nested().steps[0].program
    assert [times(nested, i) for i in (0, 1, 3, 4)] == [1, 8, 64, 64]


def test_facts_have_to_belong_to_the_program() -> None:
    mu = programs.norm_backward()
    with pytest.raises(GraphError, match=r"1 costs for 2 kernels; give one for each kernel"):
        mugraph_page(mu, Facts(costs=[Cost(1.0, {})]))
    with pytest.raises(GraphError, match=r"3 notes for 2 kernels"):
        mugraph_page(mu, Facts(notes=["", "", ""]))
    with pytest.raises(GraphError, match=r"has 2 inputs and 1 outputs, the muGraph 3 and 2; give"):
        mugraph_page(mu, Facts(programs.norm_linear_graph()))
    broken = BlockProgram({"M": 1}, (), {"M": 1}, ())
    with pytest.raises(GraphError, match="stores nothing"):
        mugraph_page(MuGraph(mu.tensors, mu.inputs, mu.outputs, (KernelStep("k", broken),)))


def test_the_page_is_self_contained_and_stable() -> None:
    _, mu, facts = lora()
    page = mugraph_page(mu, facts)
    assert page == mugraph_page(mu, facts)
    assert not re.search(r"https?:|\ssrc=|url\(|@import|<iframe|<link (?!rel=\"icon\")", page)
    assert "default-src 'none'" in page


def colours() -> list[dict[str, str]]:
    """The variables of the style sheet in both themes."""
    style = Path(mugraph_page.__code__.co_filename).with_name("page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    found = [dict(re.findall(r"--([\w-]+): (#\w{6});", half)) for half in (light, dark)]
    return [found[0], found[0] | found[1]]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """Contrast ratio (WCAG 2.1)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(theme: int) -> None:
    c = colours()[theme]
    grounds = ["ground", "card", "soft", "block", "loop"]
    boxes = ["memory", "product", "reduction", "plain", "accumulator", "cluster", "input",
             "constant", "between"]  # fmt: skip
    pairs = [(text, g) for text in ("ink", "faint") for g in (*grounds, *boxes)]
    pairs += [("accent", "card"), ("accent", "ground"), ("loop-ink", "card")]
    pairs += [("down", "block"), ("down", "loop")]
    pairs += [("on-kernel", f"k{i}") for i in range(6)]
    low = {(a, b): contrast(c[a], c[b]) for a, b in pairs if contrast(c[a], c[b]) < 4.5}
    assert not low
    lines = {b: contrast(c[f"{b}-line"], c["block"]) for b in boxes}
    assert min(lines.values()) >= 3, lines  # what is not text: 3 is enough
