"""The checker accepts legal block programs and refuses every kind of illegal one, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cutesuper.errors import GraphError
from cutesuper.ir.block import Axis, AxisKind, BlockOp, BlockProgram, MuGraph
from cutesuper.ir.check import (
    MAX_PASSES,
    check_block_program,
    check_kernel_graph,
    check_mugraph,
    pass_of,
    passes,
)
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import new_kernel_graph
from tests import programs
from tests.mugraphs import Block
from tests.programs import CLUSTER, GRID, LOOP, PERSISTENT, norm_linear_program, op


@pytest.mark.parametrize("name", programs.ALL)
def test_legal_programs_are_accepted(name: str) -> None:
    check_mugraph(programs.ALL[name]())


def test_states_say_what_a_value_depends_on() -> None:
    states = check_block_program(norm_linear_program())
    assert states[0].inside == {"K.loop"}
    assert states[0].pending == frozenset()
    assert states[2].pending == {"K.cluster", "K.loop"}
    assert states[3].pending == {"K.cluster"}
    assert states[3].closed == {("K.loop", 1)}
    assert states[3].inside == frozenset()
    assert states[12].pending == frozenset()


# ------------------------------------------------------------------------ illegal block programs


def with_op(index: int, new: BlockOp) -> Callable[[BlockProgram], BlockProgram]:
    return lambda p: replace(p, ops=(*p.ops[:index], new, *p.ops[index + 1 :]))


def with_axes(*axes: Axis) -> Callable[[BlockProgram], BlockProgram]:
    return lambda p: replace(p, axes=axes)


def with_attributes(index: int, **changed: object) -> Callable[[BlockProgram], BlockProgram]:
    def change(p: BlockProgram) -> BlockProgram:
        old = p.ops[index]
        new = {k: v for k, v in {**old.attributes, **changed}.items() if v is not ...}
        return with_op(index, replace(old, attributes=new))(p)

    return change


N48, K2, K16 = Axis("N", GRID, 48), Axis("K", CLUSTER, 2), Axis("K", LOOP, 16)

MUTATIONS: dict[str, tuple[Callable[[BlockProgram], BlockProgram], str]] = {
    "axis twice": (with_axes(N48, N48, K2, K16), "an axis occurs twice in N.grid, N.grid"),
    "two loops": (with_axes(N48, K2, K16, Axis("M", LOOP, 1)), "more than one loop axis"),
    "two clusters": (with_axes(N48, K2, Axis("N", CLUSTER, 1), K16), "more than one cluster axis"),
    "two persistent": (
        with_axes(Axis("N", PERSISTENT, 48), Axis("M", PERSISTENT, 1), K2, K16),
        "more than one persistent axis",
    ),
    "axis of no label": (
        with_axes(N48, K2, K16, Axis("Q", GRID, 2)),
        "axis Q.grid(2) splits the unknown label Q",
    ),
    "no extent": (with_axes(Axis("N", GRID, None), K2, K16), "axis N.grid(?) needs a positive"),
    "extent 0": (with_axes(N48, K2, Axis("K", LOOP, 0)), "axis K.loop(0) needs a positive extent"),
    "uncovered": (
        with_axes(Axis("N", GRID, 47), K2, K16),
        "axes and tile cover 6016 of the 6144 elements of N",
    ),
    "tile of no label": (lambda p: replace(p, tile={**p.tile, "Q": 1}), "every label needs a tile"),
    "label without tile": (lambda p: replace(p, tile={"M": 16}), "every label needs a tile"),
    "tile 0": (lambda p: replace(p, tile={**p.tile, "M": 0}), "cover 0 of the 16 elements of M"),
    "symbolic but closed": (
        lambda p: replace(p, dims={**p.dims, "M": Symbol("M", 16)}),
        "M is symbolic and needs an open axis: grid, persistent or loop",
    ),
    "later operand": (
        with_op(2, op("matmul", (0, 3), "MN", over="K")),
        "operation 2 (matmul): inputs [0, 3] must come before it",
    ),
    "negative operand": (
        with_op(4, op("square", (-1,), "MK")),
        "operation 4 (square): inputs [-1] must come before it",
    ),
    "too many operands": (
        with_op(4, op("square", (0, 0), "MK")),
        "operation 4 (square): takes 1 operand(s), got 2",
    ),
    "load of a value": (
        with_op(1, op("load", (0,), "NK", tensor="W", map=("K", "N"))),
        "operation 1 (load): takes 0 operand(s), got 1",
    ),
    "label twice": (
        with_op(0, op("load", (), "K", tensor="X", map=("K", "K"))),
        "operation 0 (load): X has one label twice",
    ),
    "unknown label": (
        with_op(0, op("load", (), "MQ", tensor="X", map=("M", "Q"))),
        "operation 0 (load): unknown label Q",
    ),
    "wrong labels": (
        with_op(2, op("matmul", (0, 1), "MNK", over="K")),
        "operation 2 (matmul): its labels are ['M', 'N', 'K'], expected ['M', 'N']",
    ),
    "labels out of order": (
        with_op(2, op("matmul", (0, 1), "NM", over="K")),
        "its labels are ['N', 'M']",
    ),
    "over a label that an operand lacks": (
        with_op(2, op("matmul", (0, 1), "MK", over="N")),
        "operation 2 (matmul): an operand does not have the label N",
    ),
    "no such operator": (
        with_op(4, op("sqare", (0,), "MK")),
        "operation 4 (sqare): operator 'sqare': does not exist; did you mean square",
    ),
    "composite operator": (
        with_op(4, op("softmax", (0,), "MK")),
        "operation 4 (softmax): not an operation of a block program",
    ),
    "input inside a block": (
        with_op(9, op("input", (), "")),
        "operation 9 (input): not an operation of a block program",
    ),
    "attribute missing": (
        with_attributes(3, axis=...),
        "operation 3 (accumulate): it needs the attribute axis",
    ),
    "over missing": (with_attributes(5, over=...), "operation 5 (mean): it needs the attribute ov"),
    "attribute of an operator missing": (
        with_op(11, op("clamp", (10,), "M", min=0.0)),
        "operation 11 (clamp): clamp: attribute max is required",
    ),
    "unknown attribute": (
        with_op(11, op("sqrt", (10,), "M", fast=True)),
        "operation 11 (sqrt): sqrt(fast=...): unknown attribute",
    ),
    "map is no tuple": (
        with_attributes(0, map="MK"),
        "operation 0 (load): its map must be a tuple of labels",
    ),
    "no such axis": (with_attributes(3, axis="M.loop"), "there is no axis 'M.loop'"),
    "accumulate over the cluster": (
        with_attributes(3, axis="K.cluster"),
        "operation 3 (accumulate): cannot reduce over the cluster axis K.cluster",
    ),
    "cluster over the loop": (
        with_attributes(7, axis="K.loop"),
        "operation 7 (cluster_reduce): cannot reduce over the loop axis K.loop",
    ),
    "accumulate the least": (
        with_attributes(3, op="min"),
        "op must be 'argmax' or 'max' or 'prod' or 'sum', not 'min'",
    ),
    "accumulate what is no partial": (
        with_op(3, op("accumulate", (0,), "MK", axis="K.loop", op="sum")),
        "operation 3 (accumulate): its operand is no partial result over K.loop",
    ),
    "reduce twice": (
        with_op(8, op("cluster_reduce", (7,), "MN", axis="K.cluster", op="sum")),
        "operation 8 (cluster_reduce): its operand is no partial result over K.cluster",
    ),
    "store in every iteration": (
        with_op(12, op("store", (2,), "MN", tensor="Z", map=("M", "N"))),
        "operation 12 (store): it is a partial result over K.cluster, K.loop; reduce it",
    ),
    "store a slice in every iteration": (
        with_op(12, op("store", (2,), "MN", tensor="Z", map=("K.loop", "K.cluster", "M", "N"))),
        "operation 12 (store): it is stored in every iteration of K.loop",
    ),
    "store what is not reduced": (
        with_op(12, op("store", (3,), "MN", tensor="Z", map=("M", "N"))),
        "operation 12 (store): it is a partial result over K.cluster; reduce it",
    ),
    "store under other labels": (
        with_attributes(13, map=("M", "K")),
        "it has the labels ['M', 'N'] and is mapped to ['M', 'K']",
    ),
    "use what was stored": (
        lambda p: replace(p, ops=(*p.ops, op("square", (13,), "MN"))),
        "operation 14 (square): a stored tensor cannot be an operand",
    ),
    "nothing stored": (lambda p: replace(p, ops=p.ops[:-1]), "it stores nothing"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_illegal_programs_are_refused(name: str) -> None:
    change, message = MUTATIONS[name]
    with pytest.raises(GraphError) as caught:
        check_block_program(change(norm_linear_program()))
    assert str(caught.value).startswith("block program")
    assert message in str(caught.value)


# ------------------------------------------------------------------- walks, and rescaled sums


def walks(kind: str, count: int) -> BlockProgram:
    """``count`` sums over one axis, each of the value minus the sum before it."""
    b = Block({"M": 8, "K": 64}, {f"K.{kind}": 4}, {"M": 8, "K": 16})
    x = b.load("X", "M", "K")
    total = x
    for _ in range(count):
        value = b.op("sub", x, total) if total != x else x
        total = b.acc(b.op("sum", value, over="K"), f"K.{kind}")
    b.store("Z", total, "M", None)
    return b.step().program


def test_a_loop_may_be_walked_three_times() -> None:
    for count in range(1, MAX_PASSES + 1):
        program = walks("loop", count)
        states = check_block_program(program)
        assert passes(program, states) == {"K.loop": count}
        assert states[-1].closed == {("K.loop", n) for n in range(1, count + 1)}
        inside = [pass_of(s, "K.loop") for s in states if s.inside]
        assert inside == sorted(inside) and inside[0] == 1 and inside[-1] == count
    with pytest.raises(GraphError) as caught:
        check_block_program(walks("loop", MAX_PASSES + 1))
    assert str(caught.value) == (
        "block program, operation 9 (sub): needs K.loop to be walked 4 times; a loop is walked at "
        "most 3 times"
    )


def test_visits_are_walked_once() -> None:
    program = walks("persistent", 1)
    assert passes(program, check_block_program(program)) == {"K.persistent": 1}
    with pytest.raises(GraphError, match=r"uses the result of K.persistent inside that loop"):
        check_block_program(walks("persistent", 2))


def test_results_of_different_walks_meet_after_the_later_one() -> None:
    b = Block({"M": 8, "K": 64}, {"K.loop": 4}, {"M": 8, "K": 16})
    x = b.load("X", "M", "K")
    first = b.acc(b.op("sum", x, over="K"), "K.loop")
    late = b.op("mul", x, first)
    second = b.acc(b.op("sum", late, over="K"), "K.loop")
    both = b.op("add", first, second)
    b.store("Z", b.op("div", late, both), "M", "K")
    states = check_block_program(b.step().program)
    assert [pass_of(states[i], "K.loop") for i in (x, first, late, second, both)] == [1, 2, 2, 3, 3]
    assert passes(b.step().program, states) == {"K.loop": 3}  # the store


def test_rescaled_sums_are_partial_results_like_plain_ones() -> None:
    states = check_block_program(programs.online_softmax_program())
    maximum, total = states[5], states[6]
    assert total == maximum
    assert total.pending == {"N.cluster"} and total.closed == {("N.loop", 1)}
    assert states[8].pending == frozenset() and states[8].closed == {("N.loop", 1)}
    assert passes(programs.online_softmax_program(), states) == {"N.loop": 2}


# ------------------------------------------------------------------ joining the parts of the grid


def joined_grid(*before: str) -> Block:
    """The sum of 64 elements, divided by the grid, a cluster and a loop, which end in the order of
    ``before``; the last value is ``len(b.ops) - 1``."""
    b = Block({"M": 8, "K": 64}, {"K.grid": 2, "K.cluster": 2, "K.loop": 4}, {"M": 8, "K": 4})
    total = b.op("sum", b.load("X", "M", "K"), over="K")
    for axis in before:
        total = b.acc(total, f"K.{axis}")
    return b


def test_the_grid_is_joined_after_loop_and_cluster() -> None:
    b = joined_grid("loop", "cluster", "grid")
    b.store("Z", b.op("sqrt", 4), "M", None)
    states = check_block_program(b.step().program)
    assert states[3].pending == {"K.grid"} and states[4].pending == frozenset()
    assert states[-1].closed == {("K.loop", 1), ("K.grid", 1)}
    assert passes(b.step().program, states) == {"K.loop": 1}


@pytest.mark.parametrize(
    ("before", "left"),
    [(("grid",), "K.cluster, K.loop"), (("loop", "grid"), "K.cluster"),
     (("cluster", "grid"), "K.loop")],
)  # fmt: skip
def test_the_grid_is_joined_last(before: tuple[str, ...], left: str) -> None:
    b = joined_grid(*before)
    b.store("Z", len(b.ops) - 1, "M", None)
    with pytest.raises(GraphError) as caught:
        check_block_program(b.step().program)
    assert str(caught.value) == (
        f"block program, operation {len(before) + 1} (grid_reduce): {left} must have ended before "
        "blocks leave what they have for K.grid"
    )


def test_one_block_has_what_the_grid_joined() -> None:
    """Neither an element that a block has loaded nor its own sum may meet it."""
    for other in (0, 3):
        b = joined_grid("loop", "cluster", "grid")
        b.store("Z", b.op("div", other, 4), "M", None if other else "K")
        with pytest.raises(GraphError, match=r"uses what was combined over K.grid together with"):
            check_block_program(b.step().program)


@pytest.mark.parametrize(
    ("axis", "message"),
    [("K.loop", "cannot reduce over the loop axis K.loop"),
     ("K.cluster", "cannot reduce over the cluster axis K.cluster"),
     ("M.grid", "there is no axis 'M.grid'")],
)  # fmt: skip
def test_only_the_grid_is_joined_by_grid_reduce(axis: str, message: str) -> None:
    b = joined_grid("loop", "cluster", "grid")
    b.ops[-1] = replace(b.ops[-1], attributes={"axis": axis, "op": "sum"})
    b.store("Z", 4, "M", None)
    with pytest.raises(GraphError, match=message):
        check_block_program(b.step().program)


def test_what_the_grid_does_not_join_is_not_stored() -> None:
    b = joined_grid("loop", "cluster")
    b.store("Z", 3, "M", None)
    with pytest.raises(GraphError, match=r"it is a partial result over K.grid; reduce it"):
        check_block_program(b.step().program)


# ------------------------------------------------------------------------------ rescaled sums


RESCALED: dict[str, tuple[Callable[[BlockProgram], BlockProgram], str]] = {
    "two operands": (
        with_op(6, op("accumulate", (4, 1), "M", axis="N.loop", op="sum")),
        "operation 6 (accumulate): takes 1 operand(s), got 2",
    ),
    "four operands": (
        with_op(8, op("cluster_reduce", (6, 5, 7, 7), "M", axis="N.cluster", op="sum")),
        "operation 8 (cluster_reduce): takes 1 operand(s), got 4",
    ),
    "element-wise": (
        with_op(12, op("div", (11, 8, 8), "MN")),
        "operation 12 (div): takes 2 operand(s), got 3",
    ),
    "maximum": (with_attributes(6, op="max"), "only a sum is rescaled by maxima; a maximum takes"),
    "a sum of the parts": (
        with_attributes(5, op="sum"),
        "operand 2 (operation 5) is not the accumulate max of operand 1 (operation 1) over N.loop",
    ),
    "of other parts": (
        with_op(6, op("accumulate", (4, 4, 5), "M", axis="N.loop", op="sum")),
        "operand 2 (operation 5) is not the accumulate max of operand 1 (operation 4) over N.loop",
    ),
    "over another axis": (
        with_op(8, op("cluster_reduce", (6, 1, 5), "M", axis="N.cluster", op="sum")),
        "operand 2 (operation 5) is not the cluster_reduce max of operand 1 (operation 1) over N.c",
    ),
    "the part itself": (
        with_op(6, op("accumulate", (4, 1, 1), "M", axis="N.loop", op="sum")),
        "operand 2 (operation 1) is not the accumulate max of operand 1 (operation 1) over N.loop",
    ),
    "no partial result": (
        with_op(6, op("accumulate", (5, 1, 5), "M", axis="N.loop", op="sum")),
        "operation 6 (accumulate): operand 0 (operation 5) is no partial result over N.loop",
    ),
    "not reduced": (
        with_op(6, op("accumulate", (3, 1, 5), "MN", axis="N.loop", op="sum")),
        "operation 6 (accumulate): its operand still has the label N",
    ),
}


@pytest.mark.parametrize("name", RESCALED)
def test_illegal_rescaled_sums_are_refused(name: str) -> None:
    mutate, message = RESCALED[name]
    with pytest.raises(GraphError) as caught:
        check_block_program(mutate(programs.online_softmax_program()))
    assert str(caught.value).startswith("block program, operation")
    assert message in str(caught.value)


def test_a_maximum_may_not_have_labels_that_the_sum_lacks() -> None:
    b = Block({"M": 8, "N": 64}, {"N.loop": 4}, {"M": 8, "N": 16})
    x, y = b.load("X", "M", "N"), b.load("Y", "N")
    part = b.op("max", x, over="N")
    b.rescaled(b.op("sum", y, over="N"), part, b.acc(part, "N.loop", "max"))
    with pytest.raises(GraphError, match=r"\(operation 2\) has the label M, which what is summed"):
        check_block_program(b.step().program)


# ----------------------------------------------------------------------------- illegal muGraphs


def with_tensors(**changed: object) -> Callable[[MuGraph], MuGraph]:
    def change(mu: MuGraph) -> MuGraph:
        tensors = {n: t for n, t in mu.tensors.items() if changed.get(n) is not ...}
        tensors |= {
            n: replace(mu.tensors[n], shape=s) for n, s in changed.items() if isinstance(s, tuple)
        }
        return replace(mu, tensors=tensors)

    return change


MUGRAPHS: dict[str, tuple[Callable[[MuGraph], MuGraph], str]] = {
    "input not described": (with_tensors(x=...), "muGraph: tensor x is not described"),
    "intermediate not described": (
        with_tensors(part=...),
        "muGraph, kernel rms_norm_backward: tensor part is not described",
    ),
    "rank": (with_tensors(x=(1024, 1, 4096)), "x has 3 dimensions, its map 2"),
    "extent": (with_tensors(x=(1000, 4096)), "extent 1000 of x is mapped to M of extent 1024"),
    "slices": (with_tensors(part=(63, 4096)), "extent 63 of part is mapped to M.grid of extent 64"),
    "order": (
        lambda mu: replace(mu, steps=mu.steps[::-1]),
        "muGraph, kernel sum_dw: reads part before it is made",
    ),
    "written twice": (
        lambda mu: replace(mu, steps=(mu.steps[0], *mu.steps)),
        "muGraph, kernel rms_norm_backward: dx is written twice",
    ),
    "overwritten input": (
        lambda mu: replace(mu, inputs=(*mu.inputs, "dx")),
        "muGraph, kernel rms_norm_backward: dx is written twice",
    ),
    "unwritten output": (
        lambda mu: replace(mu, steps=mu.steps[:1]),
        "muGraph: no kernel writes the output dw",
    ),
}


@pytest.mark.parametrize("name", MUGRAPHS)
def test_illegal_mugraphs_are_refused(name: str) -> None:
    change, message = MUGRAPHS[name]
    with pytest.raises(GraphError) as caught:
        check_mugraph(change(programs.norm_backward()))
    assert message in str(caught.value)


# --------------------------------------------------------------------------------- kernel graphs


def test_kernel_graphs_need_inputs_outputs_and_no_idle_input() -> None:
    g = new_kernel_graph()
    with pytest.raises(GraphError, match="it has no inputs; add one with new_input"):
        check_kernel_graph(g)
    x, _, _ = g.new_input((2, 2)), g.new_input((2, 2)), g.new_input((3,))
    with pytest.raises(GraphError, match=r"no output is marked; call mark_output"):
        check_kernel_graph(g)
    g.mark_output(g.exp(x))
    with pytest.raises(GraphError, match="no output depends on input W, A; remove it or use it"):
        check_kernel_graph(g)


def test_axis_arithmetic() -> None:
    p = norm_linear_program()
    assert p.blocks() == 96
    assert [p.covered(d) for d in "MNK"] == [16, 6144, 4096]
    assert not any(p.ragged(d) for d in "MNK")
    assert replace(p, axes=(Axis("N", GRID, 49), K2, K16)).ragged("N")
    assert [a.name for a in p.axes_of("K")] == ["K.cluster", "K.loop"]
    assert p.axis("K.loop").kind is AxisKind.LOOP
    rows = programs.symbolic_rows().steps[0].program
    assert rows.covered("M") is None
    assert rows.ragged("M")
    assert rows.blocks() == 32
