"""The thread level: fused expressions mean what the operations they came from mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutesuper.errors import LoweringError
from cutesuper.ir.block import LOAD, BlockOp, BlockProgram
from cutesuper.ir.operators.base import lookup
from cutesuper.ir.thread import ThreadExpression, fuse
from cutesuper.skeletons.kernel.hostmath import HostMath

M = HostMath()


def program(*ops: tuple[str, tuple[int, ...]] | BlockOp) -> BlockProgram:
    """Operations on one element; a constant is 1e-6, a load needs no tensor here."""
    made = []
    for o in ops:
        if isinstance(o, BlockOp):
            made.append(o)
        else:
            attributes = {"value": 1e-6} if o[0] == "constant" else {}
            made.append(BlockOp(o[0], o[1], ("M",), attributes))
    return BlockProgram({"M": 1}, (), {"M": 1}, tuple(made))


def loads(p: BlockProgram):
    return lambda i: p.ops[i].kind == LOAD


def kinds(e: ThreadExpression) -> list[str]:
    return [op.kind for op in e.ops]


NORM = program(
    (LOAD, ()), (LOAD, ()), ("constant", ()), ("add", (1, 2)), ("sqrt", (3,)), ("div", (0, 4))
)


# ---------------------------------------------------------------------------------------- fuse


def test_fuse_stops_at_leaves() -> None:
    e = fuse(NORM, 5, loads(NORM), "here")
    assert e.leaves == (0, 1)
    assert kinds(e) == ["constant", "add", "sqrt", "div"]
    assert e.text(["acc", "mean"]) == "div(acc, sqrt(add(mean, 1e-06)))"
    assert e.evaluate([3.0, 4.0], M) == pytest.approx(1.5)


def test_a_leaf_may_stand_for_a_whole_expression() -> None:
    e = fuse(NORM, 5, lambda i: i in (0, 4), "here")
    assert e.leaves == (0, 4)
    assert e.text(["acc", "root"]) == "div(acc, root)"


def test_a_result_that_is_a_leaf_is_handed_on() -> None:
    e = fuse(NORM, 1, loads(NORM), "here")
    assert e.trivial and e.leaves == (1,)
    assert e.evaluate([7.0], M) == 7.0


def test_every_operation_comes_once() -> None:
    p = program((LOAD, ()), ("exp", (0,)), ("mul", (1, 1)), ("add", (2, 1)))
    e = fuse(p, 3, loads(p), "here")
    assert kinds(e) == ["exp", "mul", "add"]
    assert e.evaluate([1.0], M) == pytest.approx(math.e**2 + math.e)


@pytest.mark.parametrize("kind", ["matmul", "mean", "accumulate", "load"])
def test_what_is_not_elementwise_is_refused_by_place(kind: str) -> None:
    p = program((LOAD, ()), BlockOp(kind, (0,), ("M",)), ("exp", (1,)))
    with pytest.raises(LoweringError, match=rf"here: {kind} \(operation 1\) stands where only"):
        fuse(p, 2, lambda i: i == 0, "here")


# -------------------------------------------------------------------------------- any program

UNARY = ("sqrt", "rsqrt", "square", "sigmoid", "tanh", "silu", "relu", "gelu")
BINARY = ("add", "mul", "div")


@dataclass(frozen=True)
class Case:
    """A program on positive numbers, the values of all operations, and where it is cut."""

    program: BlockProgram
    values: tuple[float, ...]
    cut: frozenset[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 3))
    number = st.floats(0.5, 2.0)
    ops: list[BlockOp] = [BlockOp(LOAD, (), ("M",)) for _ in range(count)]
    values = [draw(number) for _ in range(count)]
    for n in range(count, count + draw(st.integers(1, 7))):
        kind = draw(st.sampled_from((*UNARY, *BINARY, "div", "sqrt", "constant")))
        arity = 0 if kind == "constant" else 2 if kind in BINARY else 1
        inputs = tuple(draw(st.integers(0, n - 1)) for _ in range(arity))
        attributes = {"value": draw(number)} if kind == "constant" else {}
        ops.append(BlockOp(kind, inputs, ("M",), attributes))
        values.append(lookup(kind).scalar(M, [values[i] for i in inputs], attributes))
    cut = draw(st.sets(st.integers(count, len(ops) - 1), max_size=2))
    return Case(program(*ops), tuple(values), frozenset(cut))


def evaluated(case: Case, e: ThreadExpression) -> float:
    return float(e.evaluate([case.values[i] for i in e.leaves], M))


@given(cases())
def test_fused_expressions_mean_the_same(case: Case) -> None:
    p, last = case.program, len(case.program.ops) - 1
    e = fuse(p, last, lambda i: p.ops[i].kind == LOAD or i in case.cut - {last}, "here")
    assert evaluated(case, e) == pytest.approx(case.values[last], rel=1e-9)
    assert len(e.ops) <= len(p.ops)
    assert all(max(op.args, default=-1) < len(e.leaves) + n for n, op in enumerate(e.ops))
