"""Programs as kernels are planned for are equal to the programs that were found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutesuper.ir.block import BlockProgram, MuGraph
from cutesuper.ir.check import check_block_program
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.unseen import followed, guarded
from cutesuper.search.search import search
from cutesuper.skeletons.normalize import (
    is_reciprocal,
    quotients_by_statistics,
    with_reciprocals,
)
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier
from tests import test_lowering, test_lowering_attention, test_lowering_row_loop
from tests.mugraphs import Block
from tests.random_programs import random_program

Case = tuple[KernelGraph, MuGraph]


def all_quotients(program: BlockProgram) -> set[int]:
    return {i for i, op in enumerate(program.ops) if op.facets.divides}


def all_products(program: BlockProgram) -> set[int]:
    return {i for i, op in enumerate(program.ops) if op.facets.powers}


def kinds(program: BlockProgram) -> list[str]:
    return [op.kind for op in program.ops]


def rows() -> Block:
    return Block({"M": 8, "N": 64}, {"M.grid": 8}, {"M": 1, "N": 64})


# ------------------------------------------------------------------------------------------- form


def test_one_reciprocal_for_all_quotients_by_a_value() -> None:
    b = rows()
    x, y = b.load("X", "M", "N"), b.load("Y", "M", "N")
    s = b.op("sum", x, over="N")
    b.store("Z", b.op("add", b.op("div", x, s), b.op("div", y, s)), "M", "N")
    p = with_reciprocals(b.step().program, all_quotients(b.step().program))
    assert kinds(p) == [
        "load", "load", "sum", "constant", "div", "mul", "mul", "add", "store"
    ]  # fmt: skip
    assert [i for i in range(len(p.ops)) if is_reciprocal(p, i)] == [4]
    assert p.ops[4].dims == ("M",) and p.ops[5].inputs == (0, 4) and p.ops[6].inputs == (1, 4)
    assert with_reciprocals(p, ()) is p


def test_a_root_becomes_a_reciprocal_root_and_stays_for_other_uses() -> None:
    b = rows()
    x = b.load("X", "M", "N")
    root = b.op("sqrt", b.op("mean", x, over="N"))
    b.store("Z", b.op("div", x, root), "M", "N")
    p = with_reciprocals(b.step().program, all_quotients(b.step().program))
    assert kinds(p) == ["load", "mean", "rsqrt", "mul", "store"]
    b.store("S", root, "M")
    p = with_reciprocals(b.step().program, all_quotients(b.step().program))
    assert kinds(p) == ["load", "mean", "sqrt", "rsqrt", "mul", "store", "store"]


def test_factors_of_a_divisor_have_reciprocals_of_their_own() -> None:
    b = rows()
    x, g = b.load("X", "M", "N"), b.load("G", "M")
    s = b.op("sum", x, over="N")
    divisor = b.op("div", b.op("mul", s, b.op("square", g)), s)
    b.store("Z", b.op("div", x, divisor), "M", "N")
    old = b.step().program
    p = with_reciprocals(old, {6}, all_products(old))
    assert kinds(p) == [
        "load", "load", "constant", "div", "sum", "constant", "div", "mul", "mul", "mul", "mul",
        "store",
    ]  # fmt: skip
    assert [p.ops[i].inputs for i in (7, 8, 9, 10)] == [(3, 3), (6, 7), (8, 4), (0, 9)]
    b.store("D", divisor, "M")
    kept = with_reciprocals(b.step().program, {6}, all_products(old))
    assert kinds(kept).count("square") == 1 and kinds(kept).count("store") == 2


def test_statistics_divide_tiles() -> None:
    """Not values of their own shape, loads, or what a product is computed into."""
    tile = {"M": 64, "N": 64, "K": 64}
    b = Block({**tile}, {}, tile)
    x, w, g = b.load("X", "M", "K"), b.load("W", "K", "N"), b.load("G", "M")
    mean = b.op("mean", x, over="K")
    scale = b.op("add", mean, b.const(1.0))
    y = b.op("matmul", x, w, over="K")
    tile = b.op("div", y, scale)
    row = b.op("div", mean, scale)
    b.op("div", b.op("div", tile, g), b.op("mul", scale, g))
    total = b.op("sum", y, over="N")
    b.op("div", tile, total)
    root = b.op("div", row, b.op("sqrt", total))
    b.store("Z", b.op("mul", tile, root), "M", "N")
    assert quotients_by_statistics(b.step().program) == {tile, root}


# ------------------------------------------------------------------------------------------ equal


def check(graph: KernelGraph, mu: MuGraph, programs: list[BlockProgram]) -> None:
    """These programs, in place of those of the kernels, are legal and compute the graph."""
    for program in programs:
        check_block_program(program)
    steps = tuple(replace(s, program=p) for s, p in zip(mu.steps, programs, strict=True))
    found = Verifier(graph, seed=0).check(replace(mu, steps=steps))
    assert found, found.summary()


def check_planned(graph: KernelGraph, mu: MuGraph) -> bool:
    """Return True if planning changed an operation."""
    [step] = mu.steps
    planned = make_plan(step, mu.tensors, H200).program.ops
    check(graph, mu, [replace(step.program, ops=planned)])
    return planned != step.program.ops


@pytest.mark.parametrize("name", test_lowering.WORKLOADS)
def test_planned_workloads(name: str) -> None:
    graph, _ = test_lowering.WORKLOADS[name]
    changed = check_planned(graph, search(graph, H200).candidates[0].mugraph)
    divided = ("norm", "softmax", "mlp", "projections_1x")  # several quotients by one statistic
    assert changed == any(n in name for n in divided)


@pytest.mark.parametrize("name", test_lowering_row_loop.CASES)
def test_planned_row_loops(name: str) -> None:
    check_planned(*test_lowering_row_loop.case(name))


@pytest.mark.parametrize("name", test_lowering_attention.CASES)
def test_planned_attention(name: str) -> None:
    attention, _ = test_lowering_attention.CASES[name]
    assert check_planned(attention.graph(), attention.mugraph())


def test_factors_of_divisors() -> None:
    g = KernelGraph()
    x, y = g.new_input((8, 64), "bfloat16"), g.new_input((8, 1), "bfloat16")
    total = g.add(g.sum(x, dim=-1), 9.0)
    g.mark_output(g.div(x, g.mul(g.square(y), g.div(total, g.exp(y)))))
    mu = search(g, H200).candidates[0].mugraph
    [program] = (s.program for s in mu.steps)
    quotients, products = all_quotients(program), all_products(program)
    made = with_reciprocals(program, quotients, products)
    assert made != with_reciprocals(program, quotients)
    check(g, mu, [made])


def test_random_programs() -> None:
    changed = 0
    for seed in range(80):
        graph, mu = random_program(seed)
        old = [s.program for s in mu.steps]
        if [guarded(p, followed(mu)) for p in old] != old or not Verifier(graph, seed=0).check(mu):
            continue  # guards replace numbers, not values of a field; or it has no value at all
        made = [with_reciprocals(p, all_quotients(p)) for p in old]
        if made != old:
            check(graph, mu, made)
            changed += 1
    assert changed > 20
