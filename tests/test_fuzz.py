"""The fuzzer: what it draws, what its judge says, that it finds what is planted; and some of it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cutesuper.errors import CompileError, CutesuperError
from cutesuper.ir.operators.base import TABLE
from tests.fuzz import __main__ as fuzz_main
from tests.fuzz import attention, check, functions, judge, limits, minimise, needs
from tests.fuzz.__main__ import main
from tests.fuzz.arithmetic import Ball, Balls, Numbers
from tests.fuzz.check import Settings, check_case
from tests.fuzz.data import elements
from tests.fuzz.draw import RECIPES, by_signature, draw_case
from tests.fuzz.formulas import FORMULAS
from tests.fuzz.functions import Function, Line, draw_function
from tests.fuzz.outcome import FINDINGS, Outcome, Tally
from tests.fuzz.programs import Case, Source, Step
from tests.fuzz.runs import EVERY, Plan, Replay, drawn, run
from tests.ptx import device
from tests.ptx.run import PtxError, TooLarge

ROOT = Path(__file__).parent.parent
#: seconds that a run of random programs may take, and how many programs there are of a front
SECONDS, PROGRAMS = 30.0, 24
#: programs that are right or refused on a machine without a GPU, whatever it is: no time decides
CALM = Settings(budget_s=None, keep=2, limit_s=300.0, slow_s=300.0)

MATRIX = Source((16, 32))
NORM = Case((MATRIX,), (Step("square", (0,)), Step("rms_norm", (1,), {"eps": 1e-3})), ((2, None),))


def expected_of(case: Case) -> tuple[list[torch.Tensor], list[judge.Expected]]:
    inputs = [elements(s, case.rows[1], case.seed + n) for n, s in enumerate(case.sources)]
    return inputs, judge.expected(case.graph(), inputs)


# ---------------------------------------------------------------------------------------- drawing


def test_every_operator_of_the_table_has_a_formula() -> None:
    """A new operator needs a line in `tests.fuzz.formulas`: the judge takes nobody's word."""
    assert set(FORMULAS) == set(TABLE) - {"input", "constant"}


def test_every_operator_of_the_table_is_drawn() -> None:
    drawn_operators: Counter[str] = Counter()
    for index in range(600):
        drawn_operators.update(draw_case(5, index).operators)
    assert set(drawn_operators) >= set(TABLE) - {"input", "constant"}


def test_operators_without_a_recipe_are_drawn_by_their_signature() -> None:
    """So a new one is, too."""
    from tests.fuzz.draw import Draw

    assert len(set(TABLE) - set(RECIPES)) > 30
    found = set()
    for name in ("tanh", "at_least", "mean", "softmax", "cross_entropy", "transpose", "pick"):
        d = Draw(random.Random(name), 3)
        d.source((4, 8))
        by_signature(d, TABLE[name])
        found |= {k.operator for k in d.kinds if isinstance(k, Step)}
    assert {"tanh", "at_least", "mean", "softmax", "transpose", "pick"} <= found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("front", ["graph", "torch"])
def test_programs_are_those_of_their_seed_and_can_be_written(front: str) -> None:
    for index in range(20):
        program = drawn(3, index, front)
        assert program.dumps() == drawn(3, index, front).dumps()
        again = Replay.of(program.dumps()).program
        assert again == program
    assert drawn(4, 1, front).dumps() != drawn(3, 1, front).dumps()


def test_code_of_a_program_builds_it() -> None:
    for index in range(30):
        case = draw_case(9, index)
        code = case.code().rsplit("\n", 1)[0]  # all but the search
        space: dict[str, Any] = {}
        try:
            exec(code, space)
        except CutesuperError:
            assert check_case(case, CALM).kind in ("refused", "exception")
            continue
        assert len(space["g"].outputs) == len(case.outputs if case.wrt is None else case.wrt)


# ------------------------------------------------------------------------------------------ judge


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_judge_takes_what_is_rounded_in_another_order(dtype: str) -> None:
    source = Source((8, 256), dtype)
    steps = (Step("square", (0,)), Step("sum", (1,), {"dim": -1}), Step("rsqrt", (2,)),
             Step("mul", (0, 3)))  # fmt: skip
    [x], [want] = expected_of(Case((source,), steps, ((4, None),)))
    y = x.float()
    for squares in ((y * y).flip(-1).cumsum(-1)[:, -1:], (y * y).sum(-1, keepdim=True)):
        assert judge.judge((y * squares.rsqrt()).to(x.dtype), want).kind == "right"
    early = y * (y * y).to(x.dtype).float().sum(-1, keepdim=True).rsqrt().to(x.dtype).float()
    assert judge.judge(early.to(x.dtype), want).kind == "right"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_judge_refuses_what_is_wrong(dtype: str) -> None:
    _, [want] = expected_of(replace(NORM, sources=(replace(MATRIX, dtype=dtype),)))
    right = want.ball.v.to(want.dtype)
    assert judge.judge(right, want).kind == "right"
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1.25 * float(right[3, 5])):
        wrong = right.clone()
        wrong[3, 5] = value
        assert judge.judge(wrong, want).kind == "wrong", value
    swapped = right.clone()
    swapped[[2, 3]] = swapped[[3, 2]]
    assert judge.judge(swapped, want).kind == "wrong"
    assert judge.judge(right[:, :-1], want).kind == "wrong"
    assert judge.judge(right.double(), want).kind == "wrong"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_judge_refuses_an_error_four_times_what_is_allowed(dtype: str) -> None:
    """An error of one element, and one spread over all where each alone would do."""
    _, [want] = expected_of(replace(NORM, sources=(replace(MATRIX, dtype=dtype),)))
    v, e = want.ball.v, want.ball.e
    one = v.clone()
    one[1, 1] += 4 * judge.AT_WORST * e[1, 1] * v[1, 1].sign() + 4e-3 * v[1, 1]
    assert judge.judge(one.to(want.dtype), want).kind == "wrong"
    usual = max(float((s - v).norm() / v.norm()) for s in want.samples)
    spread = v * (1 + 4 * judge.USUALLY * usual)
    assert judge.judge(spread.to(want.dtype), want).kind == "wrong"


def test_judge_wants_the_infinities_and_zeros_of_masks() -> None:
    case = Case((Source((2, 4, 8)), Source((2,), "int32", "lengths", 0, 8)),
                (Step("length_mask", (0, 1), {"causal": False}),
                 Step("softmax", (2,), {"dim": -1})), ((3, None),))  # fmt: skip
    scores = torch.randn(2, 4, 8).half()
    want = judge.expected(case.graph(), [scores, torch.tensor([0, 5], dtype=torch.int32)])[0]
    assert (want.ball.v[0] == 0).all() and (want.ball.v[1, :, 5:] == 0).all()
    assert judge.judge(torch.full((2, 4, 8), torch.nan).half(), want).kind == "wrong"


def test_bounds_hold_for_rounded_evaluations() -> None:
    """The two kinds of numbers agree about random programs."""
    judged = 0
    for index in range(60):
        case = draw_case(2, index)
        try:
            graph = case.graph()
        except Exception:
            continue
        inputs = [elements(s, case.rows[0], case.seed + n) for n, s in enumerate(case.sources)]
        balls = judge.run(graph, inputs, Balls())
        for rounding in ("nearest", "random"):
            for y, ball in zip(judge.run(graph, inputs, Numbers(rounding)), balls, strict=True):
                known = ball.e.isfinite() & ball.v.isfinite()
                assert ((y - ball.v).abs() <= 1.01 * ball.e + 1e-30)[known].all(), case.dumps()
                judged += bool(known.any())
    assert judged > 80


def test_errors_of_two_operands_come_together() -> None:
    """A choice that may go the other way brings the error of what is chosen."""
    m = Balls()
    c, x = (Ball(torch.tensor([v]).double(), torch.tensor([e]).double())
            for v, e in ((0.0, 1.0), (0.001, 0.25)))  # fmt: skip
    kept = m.function(lambda c, x: torch.where(c > 0.5, x, 0.0), c, x, exact=True)
    assert float(kept.e) == pytest.approx(0.251)
    assert float(m.function(torch.mul, x, x).e) >= 0.25**2 + 2 * 0.25 * 0.001


def test_numbers_of_a_program_are_off_by_their_rounding_to_float32_only() -> None:
    """x + 0.1 at x = -0.0996 is: the same number to 5e-6."""
    exact, nearest = (Numbers(rounding).constant(0.1) for rounding in ("none", "nearest"))
    assert Balls().constant(0.1).e == (exact - nearest).abs() > 0
    assert float(exact) == 0.1 and Balls().constant(0.5).e == 0


def test_nothing_is_known_next_to_a_pole_or_beyond_the_range() -> None:
    m = Balls()
    near = Ball(torch.tensor([1e-4, 1.0]).double(), torch.tensor([1e-3, 1e-3]).double())
    one = m.given(torch.ones(2))
    assert m.function(torch.log, near).e.isinf().tolist() == [True, False]
    assert m.function(torch.div, one, near).e[0] > 1.0
    large = Ball(torch.tensor([65500.0, 6550.0]).double(), torch.tensor([30.0, 30.0]).double())
    assert m.store(large, torch.float16).e.isinf().tolist() == [True, False]
    assert not m.store(large, torch.float16, limited=False).e.isinf().any()


def ball(v: Any, e: float) -> Ball:
    x = torch.tensor(v, dtype=torch.float64)
    return Ball(x, torch.full_like(x, e))


def test_a_periodic_function_is_looked_at_where_it_turns() -> None:
    """The cosine at both ends of a whole turn is what it is in the middle."""
    m, turn = Balls(), 2 * torch.pi
    assert float(m.function(torch.cos, ball(1.0, turn)).e) == pytest.approx(1 + 0.5403, rel=1e-3)
    many = m.function(torch.cos, ball(4.485649195126981e19, 3.5e17))  # no turn is a float64 there
    assert float(many.e) == pytest.approx(1 + float(many.v.abs()), abs=1e-6)
    assert float(m.function(torch.sin, ball(0.5, 0.1)).e) < 0.1


def test_nothing_is_known_of_a_quotient_by_what_may_be_zero() -> None:
    e = Balls().function(torch.div, ball([1.0, 1.0], 0.0), ball([1.0, 3.0], 2.0)).e
    assert e.isinf().tolist() == [True, False]
    assert Balls().function(torch.div, ball(1.0, 0.0), ball(0.0, 0.0)).e < 1e-30


def test_powers_of_negative_numbers_next_to_whole_exponents_are_not_judged() -> None:
    m, base = Balls(), ball([-0.7, -0.7, 0.7, -0.7], 0.0)
    exponent = Ball(torch.tensor([-0.9999, -0.5, -0.9999, 2.0]).double(),
                    torch.tensor([1e-3, 1e-3, 1e-3, 0.0]).double())  # fmt: skip
    known = FORMULAS["pow"](m, [base, exponent], {}, torch.float16).e.isfinite()
    assert known.tolist() == [False, True, True, True]


def test_sums_that_cancel_are_as_far_off_as_their_terms_are_rounded() -> None:
    """(1 + x) + y and (1 + y) + x, with x = -1."""
    m, y = Balls(), torch.linspace(1e-3, 2e-3, 64).double()
    one = m.plus(torch.add, ball(1.0, 0.0), ball(-1.0, 0.0))
    found = m.plus(torch.add, one, Ball(y, torch.zeros_like(y)))
    other = ((1 + y.float()) - 1).double()
    assert ((other - y).abs() <= found.e).all() and found.e.max() < 1e-6
    assert m.plus(torch.add, ball(0.0, 0.0), ball(0.0, 0.0)).e == 0


def test_products_and_sums_may_be_taken_in_any_order() -> None:
    """In float32 1e30 1e30 0 is NaN or 0, and 1e-30 1e-30 1e30 1e30 may be anything."""

    def known(*factors: float) -> bool:
        m, x = Balls(), ball(list(factors), 0.0)
        return bool(FORMULAS["prod"](m, [x], {"dim": 0}, torch.float32).e.isfinite())

    assert not known(1e30, 1e30, 0.0) and not known(1e-30, 1e-30, 1e30, 1e30)
    assert known(1e30, 1e5, 0.0) and known(1e-30, 1e-30) and known(2.0, -3.0, 5.0)
    sums = Balls().sum(ball([[3e38, 3e38, -3e38], [1e38, 1e38, -1e38]], 0.0), -1)
    assert sums.e.isinf().flatten().tolist() == [True, False]


def test_functions_made_of_exponentials_may_overflow_where_these_do() -> None:
    """PyTorch's sinh(89) is 2.2e38, or infinite in a vector of a CPU."""
    for name in ("sinh", "cosh"):
        found = FORMULAS[name](Balls(), [ball([88.0, -89.0], 0.0)], {}, torch.float32)
        assert found.e.isinf().tolist() == [False, True]


def test_vectors_of_gelu_overflow_a_factor_of_two_before_the_result() -> None:
    found = FORMULAS["gelu"](Balls(), [ball([1.5e38, 1.8e38], 0.0)], {}, torch.float32)
    assert found.e.isfinite().tolist() == [True, False]


def test_an_element_is_sure_to_be_the_largest_if_no_other_may_be() -> None:
    """And the number of those that are is at least 1."""
    m = Balls()
    found = m.largest(ball([[1.0, 2.0, 3.0], [2.9, 3.0, 1.0]], 0.1), [-1])
    assert found.v.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert found.e.tolist() == [[0, 0, 0], [1, 1, 0]] and m.jumped
    ties = Balls()
    assert ties.largest(ball([2.0, 2.0, 1.0], 0.0), [-1]).v.tolist() == [1, 1, 0]
    assert not ties.jumped


def test_a_row_of_minus_infinity_that_no_mask_hides_has_no_softmax() -> None:
    lifted = (Step("lift", (0, 1.0)), Step("rotate_half", (1,)), Step("softmax", (2,), {"dim": 1}))
    graph = Case((Source((1, 1, 2), "float32"),), lifted, ((3, None),)).graph()
    [want] = judge.expected(graph, [torch.zeros(1, 1, 2)])
    assert want.ball.v.isnan().all()


ELEMENTWISE = sorted(n for n, op in TABLE.items() if op.elementwise and op.arity in (1, 2)
                     and not op.integers)  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "clamp": {"min": -1.0, "max": 3.0}, "hardtanh": {"min": -1.0, "max": 3.0},
    "power": {"exponent": 2.0}, "convert": {"dtype": "float16"},
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_judge_has_the_slopes_where_pieces_meet(name: str) -> None:
    """And of two operands where they are equal: multiples of 1/2 often are."""
    sources = tuple(Source((16, 32), "float32", "coarse", 1) for _ in range(TABLE[name].arity))
    step = Step(name, tuple(range(len(sources))), WITH.get(name, {}))
    case = Case(sources, (step,), ((len(sources), None),), wrt=tuple(range(len(sources))))
    outcome = check_case(case, replace(CALM, keep=0))
    assert not outcome.finding, outcome.detail


def put(index: list[int]) -> tuple[list[torch.Tensor], judge.Expected]:
    """Rows of sevens put into a table of 4 rows: the inputs, and what is expected."""
    rows, at = Source(("M", 3), "float32"), Source(("M",), "int64", "places", limit=4)
    steps = (Step("put_rows", (2, 1, 0), {"dim": 0}),)
    case = Case((rows, at, Source((4, 3), "float32")), steps, ((3, None),), rows=(1, len(index)))
    inputs = [torch.full((len(index), 3), 7.0), torch.tensor(index), torch.randn(4, 3)]
    return inputs, judge.expected(case.graph(), inputs)[0]


def test_rows_are_put_at_places_that_exist() -> None:
    inputs, want = put([-1, 4, 1, -5])
    right = inputs[2].clone()
    right[[3, 1]] = 7.0
    assert judge.judge(right, want).kind == "right"
    for place in range(4):
        wrong = right.clone()
        wrong[place] += 1.0
        assert judge.judge(wrong, want).kind == "wrong"


def test_of_equal_places_any_row_may_be_stored() -> None:
    """PyTorch stores elements of several rows in one: threads write there at the same time."""
    inputs, want = put([2, 0, -2])
    assert want.ball.e.isinf().all(1).tolist() == [False, False, True, False]
    assert judge.judge(torch.cat([torch.full((1, 3), 7.0), inputs[2][1:]]), want).kind == "right"
    assert judge.judge(inputs[2], want).kind == "wrong"


@pytest.mark.parametrize(("limit", "count"), [(30, 20), (1, 13), (40, 40)])
def test_no_place_is_drawn_twice(limit: int, count: int) -> None:
    """So it is known which row is stored; some places do not exist, and some count from the end."""
    at = elements(Source((count,), "int32", "places", limit=limit), count, 5)
    known = at[(at >= -limit) & (at < limit)] % limit
    assert len(known.unique()) == len(known) < count
    assert (known >= 0).any() and (at < 0).any() and (at >= 0).any()


def test_what_overflows_says_nothing_about_other_elements() -> None:
    v = torch.tensor([1.0, 7e4]).double()
    bound = judge.spread(v, [torch.tensor([1.001, torch.inf]).double()], torch.float16)
    assert 1e-3 < bound[0] < 1e-2 and bound[1] == torch.inf


def test_functions_in_float64_with_the_range_of_16_bits() -> None:
    """Values and gradients that PyTorch stores: what kernels make of infinite ones is not judged,
    whether PyTorch's own run meets one or not."""
    source = Source((2,), "float16")
    f = Function((source,), (Line("{0} * 300", (0,)), Line("{0} / 300", (1,))), (2,))
    x = torch.tensor([200.0, 300.0], dtype=torch.float64, requires_grad=True)
    [y] = functions.stored(f, [torch.ones(2).half()])(x)
    assert y.tolist() == [200.0, torch.inf]
    y.backward(torch.tensor([1e8, 1e3]))
    assert x.grad is not None and x.grad.tolist() == [torch.inf, 1e3]


def test_outputs_whose_bounds_say_nothing_are_not_counted_as_right() -> None:
    large = Case((Source((8, 32), "bfloat16", exponent=12),), (Step("square", (0,)),
                 Step("cos", (1,))), ((2, None),))  # fmt: skip
    _, [want] = expected_of(large)
    assert judge.judge(want.ball.v.to(want.dtype), want).kind == "unjudged"
    tally = Tally()
    for kind in ("unjudged", "right", "right", "refused", "right"):
        tally.add(Outcome(kind), set())
    assert "unjudged: 25.0%" in tally.text()


# ------------------------------------------------------------------------------- what is planted

TYPES = ("float16", "bfloat16", "float32")
#: programs that are steep, that turn, that cancel, that are at the end of a range
STEEP = {
    "cos of a product": (
        ((16, 64), (64, 24)), (Step("matmul", (0, 1)), Step("mul", (2, 0.125)), Step("cos", (3,)))
    ),
    "attention": (
        ((2, 12, 64), (2, 40, 64), (2, 40, 32)),
        (Step("scaled_dot_product_attention", (0, 1, 2), {"is_causal": False, "scale": 0.25}),),
    ),
    "exp": (
        ((16, 48),), (Step("mul", (0, 3.0)), Step("exp", (1,)), Step("mean", (2,), {"dim": -1})),
    ),
    "sums": (((16, 40), (40,)), (Step("add", (0, 1)), Step("sub", (2, 1.0)))),
    "a gradient of max": (
        ((24, 16),), (Step("silu", (0,)), Step("max", (1,), {"dim": 0}), Step("at_least", (1, 2)),
                      Step("sum", (3,), {"dim": 0}), Step("div", (0, 4)), Step("mul", (3, 5))),
    ),
    "prod": (
        ((12, 8),), (Step("sin", (0,)), Step("add", (1, 1.5)), Step("prod", (2,), {"dim": -1})),
    ),
    "sinh": (((16, 16),), (Step("mul", (0, 2.0)), Step("sinh", (1,)))),
    "layer norm": (((16, 64),), (Step("square", (0,)), Step("layer_norm", (1,), {"eps": 1e-5}))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", STEEP)
def test_the_judge_sees_what_is_planted(name: str, dtype: str) -> None:
    """A wrong sign, a wrong scale, a lost term, one wrong element, elements in a wrong place."""
    shapes, steps = STEEP[name]
    case = Case(tuple(Source(s, dtype) for s in shapes), steps,
                ((len(shapes) + len(steps) - 1, None),), seed=7)  # fmt: skip
    inputs, [want] = expected_of(case)
    v = want.ball.v
    right = v.to(want.dtype)
    assert judge.judge(right, want).kind == "right"
    for sample in want.samples:
        assert judge.judge(sample.to(want.dtype), want).kind == "right"
    lost = [x.clone() for x in inputs]
    lost[-1].select(max(0, lost[-1].dim() - 2), 0).zero_()  # a term of the sum, or a row
    single = right.clone()
    single.view(-1)[int(v.abs().argmin())] += 0.6 * v.abs().max()
    faults = {
        "sign": -right, "scale": (v * 1.25).to(want.dtype), "one element": single,
        "place": right.roll(1, 0),
        "term": judge.run(case.graph(), lost, Numbers())[0].to(want.dtype),
    }  # fmt: skip
    missed = [what for what, y in faults.items() if not judge.judge(y, want).wrong]
    assert not missed


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block programs compute erf where they should compute tanh."""
    from cutesuper.verify.torchdomain import TorchDomain

    real = TorchDomain.elementwise

    def wrong(domain: TorchDomain, kind: str, *rest: Any) -> Any:
        return real(domain, "erf" if kind == "tanh" else kind, *rest)

    monkeypatch.setattr(TorchDomain, "elementwise", wrong)


LONG = Case(
    (Source((24, 64)), Source((64, 16)), Source((16,))),
    (
        Step("matmul", (0, 1)), Step("add", (3, 2)), Step("tanh", (4,)), Step("square", (5,)),
        Step("mean", (6,), {"dim": -1}), Step("sub", (6, 7)),
    ),
    ((8, None), (5, "float32")),
)  # fmt: skip


def test_a_planted_fault_is_found_and_made_small(planted: None) -> None:
    outcome = check_case(LONG, CALM)
    assert outcome.kind == "wrong" and "muGraph" in outcome.where
    small = minimise.minimised(LONG, lambda c: check_case(c, CALM).key == outcome.key, 60.0)
    assert [s.operator for s in small.steps] == ["tanh"]
    assert len(small.sources) == 1 and small.sources[0].shape[0] * small.sources[0].shape[-1] <= 16
    again = Replay.of(small.dumps()).program
    assert check_case(again, CALM).key == outcome.key
    assert "g.apply('tanh', v0)" in small.code()


def test_the_same_program_is_right_without_the_fault() -> None:
    assert check_case(LONG, CALM).kind == "right"


def test_a_fault_in_a_function_is_found_and_made_small(planted: None) -> None:
    f = Function((Source((16, 32)), Source((32,))), (
        Line("{0} * {1}", (0, 1)), Line("torch.tanh({0})", (2,)), Line("{0} + 1", (3,)),
    ), (4,))  # fmt: skip
    outcome = functions.check_function(f, CALM)
    assert outcome.kind == "wrong"
    small = functions.minimised(
        f, lambda x: functions.check_function(x, CALM).key == outcome.key, 60.0
    )
    assert [x.text for x in small.lines] == ["torch.tanh({0})"]


def test_undocumented_exceptions_hangs_and_refusals_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(error: BaseException) -> Any:
        def choose(*_: Any, **__: Any) -> Any:
            raise error

        return choose

    from cutesuper.errors import SearchError

    for error, kind in ((KeyError("x"), "exception"), (limits.TimedOut(), "hang"),
                        (SearchError("no kernel"), "refused")):  # fmt: skip
        monkeypatch.setattr(check.pipeline, "choose", fails(error))
        assert check_case(NORM, CALM).kind == kind


def test_what_takes_too_long_is_stopped() -> None:
    def forever(stage: Any) -> Outcome:
        stage("waiting")
        while True:
            pass

    outcome = check.examined(forever, replace(CALM, limit_s=0.2))
    assert outcome.kind == "hang" and outcome.where.startswith("waiting")


def test_findings_are_printed_with_what_replays_them(
    planted: None, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    case = Case((MATRIX,), (Step("tanh", (0,)),), ((1, None),))
    assert main(["--replay", case.dumps()]) == 1
    text = capsys.readouterr().out
    assert "g.apply('tanh', v0)" in text and "--replay" in text
    file = tmp_path / "case.json"
    file.write_text(case.dumps())
    assert main(["--replay", str(file)]) == 1
    assert main(["--replay", NORM.dumps()]) == 0


def test_tallies_add_up_and_are_written(tmp_path: Any) -> None:
    a, b = Tally(), Tally()
    wrong = Outcome("wrong", "launch", "7 for 8")
    assert a.add(wrong, {"exp"}) and a.add(wrong, {"exp"}) and b.add(wrong, {"log"})
    assert not a.add(Outcome("refused", "search", "no kernel"), set())
    for t in (a, b):
        assert t.note({"key": wrong.key}) and not t.note({"key": wrong.key})
    a.merge(Tally.of(json.loads(json.dumps(b.data()))))
    assert a.counts["wrong"] == 3 and len(a.findings) == 1 and "3 wrong" in a.text()


def test_what_kernels_need_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that launches nothing is no run: it fails, before or after."""

    def said(*given: str, run: Any = main) -> str:
        assert run([*given, "--seconds", "0"]) == 2
        return capsys.readouterr().err

    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_available", lambda: False)
        m.setattr(needs, "dsl_versions", dict)
        m.setattr(needs.shutil, "which", lambda _: None)
        assert "needs gcc" in said("--ptx") and "needs a GPU" in said("--gpu")
        assert "needs a GPU" in said("--gpu", run=attention.main)

    def none() -> None:
        raise CompileError("needs CuTe DSL")

    with monkeypatch.context() as m:
        m.setattr(needs, "dsl_versions", none)
        assert all("CuTe DSL" in said(*way) for way in (["--gpu"], ["--ptx"], ["--compile", "1"]))
    for module, command in ((fuzz_main, main), (attention, attention.main)):
        monkeypatch.setattr(module, "missing", lambda *_: "")
        assert "NOTHING WAS LAUNCHED" in said("--gpu", run=command)


def test_processes_share_the_programs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "found.json"
    main(["--jobs", "2", "--cases", "2", "--seconds", "300", "--front", "graph", "--json",
          str(file), "--no-minimise"])  # fmt: skip
    found = json.loads(file.read_text())
    assert sum(found["counts"].values()) == 2


def test_a_verifier_that_accepts_anything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(LONG, seed=3 * LONG.seed)
    assert check_case(asked, CALM).kind == "right"
    monkeypatch.setattr(check.cs, "verify", lambda *_: True)
    assert "accepts another" in check_case(asked, CALM).where


def test_kernels_are_compiled_where_asked() -> None:
    pytest.importorskip("cutlass")
    assert check_case(NORM, replace(CALM, compile=True)).kind == "right"


def test_what_the_machine_of_ptx_says_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forbidden access is a finding, whatever its registers are; too much work is none."""

    def found(error: Exception) -> Outcome:
        def launch(*_: Any) -> None:
            raise error

        monkeypatch.setattr(check, "check_texts", launch)
        return check_case(NORM, CALM)

    at = "instruction {0} `ld.shared.b32 %r{0}, [%r2]`, block {0} 0 0, warp {0}: byte {0} of shared"
    one, other = (found(PtxError(at.format(n))) for n in (7, 12))
    assert one.finding and one.key == other.key == "illegal: texts, byte .. of shared"
    assert "%r7" in one.detail
    large = found(TooLarge("too many instructions: block 0 warp 0 at 7 (stands)"))
    assert large.kind == "too large" and not large.finding


def test_what_lies_between_strided_rows_shows_if_it_is_read() -> None:
    x = functions.laid_out(torch.ones(3, 4), "strided")
    assert x.stride() == (12, 1) and (x == 1).all()
    assert x.as_strided((3, 8), (12, 1), 4)[:2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("front", ["graph", "torch"])
def test_kernels_of_random_programs_on_a_gpu(front: str) -> None:
    tally = run(Plan(seed=2027, seconds=120.0, cases=20, front=front, gpu=True))
    assert not tally.findings, "\n".join(f["replay"] for f in tally.findings)


# --------------------------------------------------------------------------------------- the run


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of what is drawn
@pytest.mark.parametrize(("front", "first", "step"), [("graph", 2, EVERY), ("torch", 0, EVERY)])
def test_random_programs_are_right_or_refused(front: str, first: int, step: int) -> None:
    """A fixed seed; a failure prints the program made small, and how to run it again. The last test
    draws both fronts in turn, others than these, and runs them on the machine of tests/ptx."""
    plan = Plan(seed=2026, first=first, step=step, seconds=SECONDS, cases=PROGRAMS // step,
                front=front, limit_s=200.0)  # fmt: skip
    tally = run(plan)
    assert not tally.findings, "\n".join(f["replay"] for f in tally.findings)
    assert tally.counts["right"] > 0
    assert not set(tally.counts) & set(FINDINGS)
    draw_function(0, 0)


#: what takes the place of an instruction of `NORM`'s kernel, and what comes of it
FAULTS = {("", ""): "right", ("rsqrt.approx", "sqrt.approx"): "wrong",
          ("st.global", "ld.global"): "illegal"}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.ptx
def test_faults_of_kernels_are_found(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not request.config.getoption("--ptx"):
        pytest.skip("the PTX that a GPU runs is not changed here")
    real, found = device.executable, dict[tuple[str, str], str]()
    for old, new in FAULTS:
        monkeypatch.setattr(
            device, "executable", lambda ptx, old=old, new=new: real(ptx.replace(old, new))
        )
        found[old, new] = check_case(NORM, Settings(None, gpu=True)).kind
    assert found == FAULTS


@pytest.mark.gpu
@pytest.mark.ptx
def test_programs_that_were_wrong_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those whose mend no other test is about: found by other seeds, made small."""
    monkeypatch.chdir(ROOT)
    status = main(["--gpu", "--no-minimise", "--replay", "tests/fuzz/found.jsonl"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_kernels_of_random_programs_on_the_machine_of_ptx(tmp_path: Path) -> None:
    """In a process of its own: the machine has to be there before CuTe DSL is."""
    pytest.importorskip("cutlass")
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.fuzz", "--ptx", "--seed", "2026", "--cases",
               str(PROGRAMS), "--seconds", str(SECONDS), "--json", str(file)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["counts"]["right"] > 0 and found["launched"] > 0
