"""Text that lines up (golden files), and pictures that are valid and do not overlap."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutesuper.errors import GraphError
from cutesuper.ir.block import BlockProgram, KernelStep, MuGraph, TensorSpec
from cutesuper.ir.dtypes import float32
from cutesuper.ir.graph import new_kernel_graph
from cutesuper.ir.graph_text import kernel_graph_text
from cutesuper.ir.outline import sections, show_bytes
from cutesuper.ir.text import mugraph_text, program_text
from cutesuper.show.svg import mugraph_svg
from tests import programs
from tests.programs import GRID, Axis, op

Golden = Callable[[str, str], None]
SVG = "{http://www.w3.org/2000/svg}"


def test_kernel_graph_text(golden: Golden) -> None:
    golden("norm_linear_graph.txt", kernel_graph_text(programs.norm_linear_graph()))
    golden("norm_linear_expanded.txt", kernel_graph_text(programs.norm_linear_graph().expanded()))
    g = new_kernel_graph()
    assert kernel_graph_text(g) == "kernel graph: 0 inputs, 0 outputs"
    assert repr(programs.norm_linear_graph()) == kernel_graph_text(programs.norm_linear_graph())


@pytest.mark.parametrize("name", programs.ALL)
def test_mugraph_text(name: str, golden: Golden) -> None:
    text = mugraph_text(programs.ALL[name]())
    assert all(len(line) <= 100 and line == line.rstrip() for line in text.splitlines())
    golden(f"{name}.txt", text)


def test_a_program_without_axes() -> None:
    program = BlockProgram(
        {"N": 8},
        (),
        {"N": 8},
        (
            op("constant", (), "", value=2.0),
            op("store", (0,), "", tensor="Y", map=(None,)),
        ),
    )
    text = program_text(program)
    assert text.startswith("one block   tile N 8\n1 block for N 8\n")
    assert "store 2 -> Y   scalar" in text


def test_illegal_programs_are_not_drawn() -> None:
    mu = programs.norm_linear()
    broken = BlockProgram({"M": 1}, (), {"M": 1}, ())
    with pytest.raises(GraphError, match="stores nothing"):
        mugraph_svg(MuGraph(mu.tensors, mu.inputs, mu.outputs, (KernelStep("k", broken),)))
    with pytest.raises(GraphError, match="stores nothing"):
        program_text(broken)


def test_sections_of_nested_loops() -> None:
    got = sections(programs.nested().steps[0].program)
    assert [([a.name for a in s.loops], s.ended and s.ended.name, s.ops) for s in got] == [
        ([], None, (0,)),
        (["M.persistent"], None, (1, 2)),
        (["M.persistent", "K.loop"], None, (3, 4, 5, 6, 7)),
        (["M.persistent"], "K.loop", (8, 9, 10, 11, 12, 13)),
        ([], "M.persistent", (14, 15)),
    ]


def test_show_bytes() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 19: "1.5 MiB", 5 << 40: "5120.0 GiB"}
    assert {n: show_bytes(n) for n in sizes} == sizes


# -------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Box:
    kind: str
    x: float
    y: float
    w: float
    h: float

    def overlaps(self, o: Box) -> bool:
        return (
            self.x < o.x + o.w and o.x < self.x + self.w
            and self.y < o.y + o.h and o.y < self.y + self.h
        )  # fmt: skip

    def contains(self, o: Box) -> bool:
        inside = self.x <= o.x and o.x + o.w <= self.x + self.w
        return inside and self.y <= o.y and o.y + o.h <= self.y + self.h


def kind_of(box: ElementTree.Element, node: ElementTree.Element) -> str:
    """The kind of a box: the block or a loop, an operation or a tensor, part of the legend."""
    look, around = box.get("class", "").split(), node.get("class", "").split()
    if "shape" in look:
        return "tensor" if "tensor" in around else "op"
    return {"block": "kernel", "loop": "loop"}.get(look[-1], look[0]) if look else ""


def panels(svg: str) -> tuple[ElementTree.Element, list[list[Box]]]:
    """The parsed document, and the boxes of each of its drawings in absolute coordinates."""
    root = ElementTree.fromstring(svg)
    groups: list[list[Box]] = []
    for group in root.findall(f"{SVG}g"):
        found = re.fullmatch(r"translate\((\S+) (\S+)\)", group.get("transform", ""))
        assert found
        dx, dy = map(float, found.groups())
        groups.append(
            [
                Box(
                    kind_of(r, node),
                    float(r.get("x", 0)) + dx,
                    float(r.get("y", 0)) + dy,
                    float(r.get("width", 0)),
                    float(r.get("height", 0)),
                )
                for node in group.iter()
                for r in node.findall(f"{SVG}rect")
            ]
        )
    return root, groups


def wide() -> MuGraph:
    """25 operations: eight loads that a tree adds up, with a tail."""
    ops = [op("load", (), "MN", tensor=f"i{k}", map=("M", "N")) for k in range(8)]
    level = list(range(8))
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        ops += [op("add", p, "MN") for p in pairs]
        level = list(range(len(ops) - len(pairs), len(ops)))
    for k in range(8):
        ops.append(op("mul", (len(ops) - 1, k), "MN"))
    ops += [
        op("mean", (len(ops) - 1,), "M", over="N"),
        op("store", (len(ops),), "M", tensor="out", map=("M", None)),
    ]
    program = BlockProgram(
        {"M": 64, "N": 32}, (Axis("M", GRID, 16),), {"M": 4, "N": 32}, tuple(ops)
    )
    tensors = {f"i{k}": TensorSpec(f"i{k}", (64, 32), float32) for k in range(8)}
    tensors["out"] = TensorSpec("out", (64, 1), float32)
    inputs = tuple(f"i{k}" for k in range(8))
    return MuGraph(tensors, inputs, ("out",), (KernelStep('wide <&> "tree"', program),))


PICTURES = {**programs.ALL, "wide": wide}


@pytest.mark.parametrize("name", PICTURES)
def test_boxes_do_not_overlap(name: str) -> None:
    root, groups = panels(mugraph_svg(PICTURES[name]()))
    boxes = [b for g in groups for b in g]
    page = Box("page", 0, 0, float(root.get("width", 0)), float(root.get("height", 0)))
    assert all(page.contains(b) for b in boxes)
    solid = [b for b in boxes if b.kind in ("op", "tensor", "legend")]
    assert not [(a, b) for a, b in combinations(solid, 2) if a.overlaps(b)]
    for group in groups:
        kernels = [b for b in group if b.kind == "kernel"]
        inner = [b for b in group if b.kind in ("op", "loop")]
        assert all(k.contains(b) for k in kernels for b in inner)
        for loop in (b for b in group if b.kind == "loop"):
            ops = [b for b in group if b.kind == "op"]
            assert all(loop.contains(b) or not loop.overlaps(b) for b in ops)


@pytest.mark.parametrize("name", PICTURES)
def test_everything_is_in_the_picture(name: str) -> None:
    mu = PICTURES[name]()
    root, _ = panels(mugraph_svg(mu))
    texts = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert all(any(t.startswith(f"{n} [") for t in texts) for n in mu.tensors)
    for step in mu.steps:
        assert f"kernel {step.name}" in texts
        for i, o in enumerate(step.program.ops):
            verb = o.kind.split("_")[0]
            shown = any(t.startswith(f"{i} {verb}") for t in texts)
            assert shown == (o.kind != "constant")


@st.composite
def random_programs(draw: st.DrawFn) -> MuGraph:
    """Element-wise operators on anything before them, and a store of every value nobody uses."""
    ops = [op("load", (), "N", tensor=f"i{k}", map=("N",)) for k in range(draw(st.integers(1, 5)))]
    loads, used = len(ops), set[int]()
    for _ in range(draw(st.integers(1, 14))):
        operands = (draw(st.integers(0, len(ops) - 1)), draw(st.integers(0, len(ops) - 1)))
        used.update(operands)
        ops.append(op("add", operands, "N"))
    ends = [i for i in range(loads, len(ops)) if i not in used]
    ops += [op("store", (i,), "N", tensor=f"o{i}", map=("N",)) for i in ends]
    names = [f"i{k}" for k in range(loads)] + [f"o{i}" for i in ends]
    tensors = {n: TensorSpec(n, (64,), float32) for n in names}
    program = BlockProgram({"N": 64}, (Axis("N", GRID, 2),), {"N": 32}, tuple(ops))
    step = KernelStep(draw(st.text(min_size=1, max_size=5)), program)
    return MuGraph(tensors, tuple(names[:loads]), tuple(names[loads:]), (step,))


@given(random_programs())
def test_random_pictures_do_not_overlap(mu: MuGraph) -> None:
    _, groups = panels(mugraph_svg(mu))
    solid = [b for g in groups for b in g if b.kind in ("op", "tensor", "legend")]
    assert not [(a, b) for a, b in combinations(solid, 2) if a.overlaps(b)]


def test_the_picture_is_self_contained_and_stable(golden: Golden) -> None:
    svg = mugraph_svg(programs.norm_linear())
    assert not re.search(r"<script|<style|<image|href|url\(|@import", svg)
    assert "NaN" not in svg
    assert svg == mugraph_svg(programs.norm_linear())
    golden("norm_linear.svg", svg)


def test_the_loop_holds_what_runs_in_it() -> None:
    _, [group, _] = panels(mugraph_svg(programs.norm_linear()))
    [loop] = [b for b in group if b.kind == "loop"]
    ops = [b for b in group if b.kind == "op"]
    assert sum(loop.contains(b) for b in ops) == 7
    assert len(ops) == 13
