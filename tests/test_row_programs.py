"""Persistent row programs: what is legal, what the verifier accepts, what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutesuper.errors import GraphError
from cutesuper.ir.block import ACCUMULATE, GRID_REDUCE
from cutesuper.ir.check import check_block_program, check_mugraph
from cutesuper.ir.dims import Symbol, extent
from cutesuper.ir.serial import dumps, loads
from cutesuper.ir.text import program_text
from cutesuper.verify import equivalence, numeric
from cutesuper.verify.equivalence import Verifier, verify
from cutesuper.verify.extents import SizeChooser
from cutesuper.verify.numeric import compare
from tests.mugraphs import Block
from tests.mutants import mutations
from tests.row_programs import (
    CASES,
    Case,
    batched_sum,
    column_sum,
    layer_norm_backward,
    losses,
    one_kernel,
    over_rows,
    per_head_backward,
    rms_backward,
    rms_forward,
    rows_of,
    shares,
    softmax_and_columns,
    softmax_forward,
    squared_error,
    whole,
)

M = Symbol("M", 24)

#: the same programs at extents that numbers are quickly computed at
SMALL: dict[str, Callable[[], Case]] = {
    "rms": lambda: rms_backward(24, 40, 4, 2),
    "rms, tails": lambda: rms_backward(23, 37, 4, 2, cluster=4),
    "rms, more blocks than rows": lambda: rms_backward(3, 16, 4, 2),
    "rms, symbolic": lambda: rms_backward(M, 40, 4, 2),
    "rms, symbolic, cluster": lambda: rms_backward(M, 40, 4, 1, cluster=2),
    "layer norm": lambda: layer_norm_backward(24, 40, 3, 2, cluster=2),
    "heads": lambda: per_head_backward(M, 3, 16, 4, 2),
    "batched": lambda: batched_sum(24, 3, 16, 4, 2),
    "batched, symbolic": lambda: batched_sum(M, 3, 16, 4, 2),
    "column sum": lambda: column_sum(M, 40, 4, 2, columns=16),
    "squared error": lambda: squared_error(23, 37, 4, 2, cluster=2),
    "softmax": lambda: softmax_forward(M, 61, 4),
    "losses": lambda: losses(M, 61, 4),
    "shares": lambda: shares(M, 61, 4),
    "softmax and columns": lambda: softmax_and_columns(23, 37, 4, 2, cluster=2),
    "rms forward": lambda: rms_forward(5, 61, 4),
}


# ------------------------------------------------------------------------------ what is legal


@pytest.mark.parametrize("name", CASES)
def test_written_programs_are_legal_and_right(name: str) -> None:
    graph, mu = CASES[name]()
    check_mugraph(mu)
    assert loads(dumps(mu)) == mu
    result = verify(graph, mu)
    assert result, result.summary()
    if name.startswith(("losses", "shares")):  # what a label picks of a row minus its maximum
        assert "a maximum shows an element only where it is the largest" in result.summary()
    else:
        assert result.bound_log2 is not None and result.bound_log2 < -60, result.summary()


@pytest.mark.parametrize("name", SMALL)
def test_numbers_agree_at_real_extents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mu = SMALL[name]()
    assert verify(graph, mu, full=True)
    assert compare(graph, mu)
    for module in (equivalence, numeric):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    assert verify(graph, mu, full=True)
    assert compare(graph, mu)


@pytest.mark.parametrize("ragged", [False, True])
def test_every_axis_is_exercised(ragged: bool) -> None:
    """Several blocks, visits, blocks of a cluster and rows of a tile; tails of both labels."""
    graph, mu = rms_backward(M, 40, 4, 1, cluster=2)
    (program,) = SizeChooser(graph.expanded()).small(mu, ragged).programs
    assert {a.name: a.extent for a in program.axes} == {
        "M.grid": 2, "M.persistent": 2, "N.cluster": 3
    }  # fmt: skip
    assert program.tile == {"M": 2, "N": 2}
    assert program.dims == ({"M": 7, "N": 5} if ragged else {"M": 8, "N": 6})


def test_open_axes_count_by_the_hint() -> None:
    program = rms_backward(Symbol("M", 1000), 4096, 132, 2)[1].steps[0].program
    assert program.covered("M") is None and program.ragged("M")
    assert program.blocks() == 132
    assert program.parts(program.axis("M.persistent")) == 4
    assert "M.grid 132  M.persistent ?" in program_text(program)
    assert "for M.persistent in about 4:" in program_text(program)


def _sums(axes: dict[str, int | None], *ended: str, m: int | Symbol = 64) -> Block:
    b = Block({"M": m, "B": 4, "N": 8}, axes, {"M": 2, "B": 1, "N": 8})
    x = b.load("X", "M", "B", "N")
    for label in ("M", "B"):
        x = b.op("sum", x, over=label)
    for axis in ended:
        x = b.acc(x, axis)
    return b


_AXES: dict[str, int | None] = {"B.grid": 4, "M.grid": 8, "M.persistent": 4}
_ENDED = ("M.persistent", "M.grid", "B.grid")


def test_several_grid_axes_are_combined_one_after_the_other() -> None:
    b = _sums(_AXES, *_ENDED)
    b.store("Z", len(b.ops) - 1, None, None, "N")
    states = check_block_program(b.step().program)
    pending = [sorted(states[i].pending) for i in (2, 3, 4, 5)]
    assert pending == [["B.grid", "M.grid", "M.persistent"], ["B.grid", "M.grid"], ["B.grid"], []]
    assert states[-1].closed == {("M.persistent", 1), ("M.grid", 1), ("B.grid", 1)}


def test_nothing_happens_between_grid_axes() -> None:
    b = _sums(_AXES, "M.persistent", "M.grid")
    b.op("sqrt", len(b.ops) - 1)
    with pytest.raises(
        GraphError,
        match=r"operation 5 \(sqrt\): what was combined over M.grid is "
        r"still a partial result over B.grid; combine it over that next",
    ):
        check_block_program(b.step().program)


def test_visits_end_before_the_grid() -> None:
    b = _sums(_AXES, "M.grid")
    with pytest.raises(GraphError, match=r"M.persistent must have ended before blocks leave"):
        check_block_program(b.step().program)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"B.grid": 4, "M.grid": 8, "M.persistent": 4},
         "M is symbolic and needs an open axis: grid, persistent or loop"),
        ({"B.grid": 4, "M.grid": None, "M.persistent": None},
         "M.grid and M.persistent are both open; give one of them an extent"),
        ({"B.grid": None, "M.grid": 8, "M.persistent": None},
         r"axis B.grid\(\?\) needs a positive extent"),
        ({"B.grid": 4, "M.grid": None, "M.persistent": 4},
         "M.grid is open; the number of partial results must be known: give it an extent"),
    ],
)  # fmt: skip
def test_one_axis_of_a_symbolic_label_is_open(axes: dict[str, int | None], message: str) -> None:
    b = _sums(axes, *(_ENDED if "M.persistent" in axes else ("M.loop", *_ENDED[1:])), m=M)
    b.store("Z", len(b.ops) - 1, None, None, "N")
    with pytest.raises(GraphError, match=message):
        check_block_program(b.step().program)


def test_a_closed_label_has_no_open_axis() -> None:
    b = _sums({**_AXES, "M.persistent": None}, *_ENDED)
    with pytest.raises(GraphError, match=r"axis M.persistent\(\?\) needs a positive extent"):
        check_block_program(b.step().program)


def test_what_was_accumulated_is_not_used_in_the_visits() -> None:
    b = rows_of(64, 8, 8, 2)
    x = b.load("x", "M", "N")
    total = b.acc(b.op("sum", x, over="M"), "M.persistent")
    b.op("mul", x, total)
    with pytest.raises(GraphError, match=r"uses the result of M.persistent inside that loop"):
        check_block_program(b.step().program)


# -------------------------------------------------------------------------------- what is right


def test_a_sum_that_is_not_combined_is_refused() -> None:
    """Without its grid_reduce, or without its accumulate."""
    graph, mu = rms_backward(24, 40, 4, 2)
    ops = mu.steps[0].program.ops
    for kind, why in ((GRID_REDUCE, "M.grid"), (ACCUMULATE, "M.persistent")):
        (i,) = [i for i, op in enumerate(ops) if op.kind == kind]
        dropped = dict(mutations(mu, 0, i, ops[i]))[f"{kind} dropped"]
        result = Verifier(graph).check(dropped)
        assert not result and why in str(result.reason)


def test_a_sum_over_the_wrong_label_is_refused() -> None:
    """dw summed along the row, and the mean of the row taken over the rows."""
    graph, _ = rms_backward(40, 40, 4, 2)
    for wrong in ("dw", "mean"):
        b = rows_of(40, 40, 4, 2)
        x, dy, w = b.load("x", "M", "N"), b.load("dy", "M", "N"), b.load("w", "N")
        rstd = b.load("rstd", "M", None)
        hat, grad = b.op("mul", x, rstd), b.op("mul", dy, w)
        product = b.op("mul", grad, hat)
        mean = whole(b, "mean", product)
        if wrong == "mean":
            mean = b.op("mean", product, over="M")
            mean = b.acc(b.acc(mean, "M.persistent"), "M.grid")
            b.store("dx", mean, None, "N")
        else:
            dx = b.op("mul", b.op("sub", grad, b.op("mul", hat, mean)), rstd)
            b.store("dx", dx, "M", "N")
        b.store("dw", over_rows(b, b.op("mul", dy, grad if wrong == "dw" else hat)), None, "N")
        mu = one_kernel(graph, b.step(), "dx", "dw")
        assert not Verifier(graph).check(mu)


def test_a_mean_counts_the_rows_that_exist() -> None:
    """The mean over 23 rows in 24 places: neither the places nor the rows of a block count."""
    graph, mu = squared_error(23, 16, 4, 2)
    assert verify(graph, mu, full=True)
    for count in (24.0, 6.0):
        b = rows_of(23, 16, 4, 2)
        diff = b.op("sub", b.load("x", "M", "N"), b.load("y", "M", "N"))
        b.store("dx", b.op("mul", diff, b.const(2.0)), "M", "N")
        total = over_rows(b, whole(b, "sum", b.op("square", diff)))
        b.store("loss", b.op("div", total, b.const(count)), None, None)
        assert not verify(graph, one_kernel(graph, b.step(), "loss", "dx"))


@pytest.mark.parametrize("name", ["rms", "layer norm", "squared error"])
def test_mutants(name: str) -> None:
    """Accepted exactly where float64 agrees."""
    graph, mu = {
        "rms": lambda: rms_backward(12, 12, 2, 2, cluster=2),
        "layer norm": lambda: layer_norm_backward(12, 12, 2, 2),
        "squared error": lambda: squared_error(12, 12, 2, 2, cluster=2),
    }[name]()
    verifier, rejected = Verifier(graph), 0
    assert verifier.check(mu)
    for i, op in enumerate(mu.steps[0].program.ops):
        for what, mutant in mutations(mu, 0, i, op):
            result = verifier.check(mutant, bound=False)
            try:
                equal = bool(compare(graph, mutant, stress=False))
            except (GraphError, RuntimeError):
                equal = False
            assert bool(result) == equal, f"{i} {op.kind}: {what}: {result}"
            rejected += not result
    assert rejected >= 12


@given(
    m=st.integers(1, 40), n=st.integers(2, 40), grid=st.integers(1, 6), rows=st.integers(1, 4),
    cluster=st.sampled_from((1, 2, 3, 4)), symbolic=st.booleans(),
)  # fmt: skip
def test_any_extents_are_legal_and_right(
    m: int, n: int, grid: int, rows: int, cluster: int, symbolic: bool
) -> None:
    """Rows that do not fill the visits, blocks without rows, parts of a cluster without columns."""
    if m == 1 and not symbolic:  # an extent of 1 has no label
        return
    graph, mu = rms_backward(Symbol("M", m) if symbolic else m, n, grid, rows, cluster)
    check_mugraph(mu)
    assert verify(graph, mu, full=True) and compare(graph, mu)
    (program,) = (s.program for s in mu.steps)
    visits = program.parts(program.axis("M.persistent"))
    assert (visits - 1) * grid * rows < extent(program.dims["M"]) <= visits * grid * rows
