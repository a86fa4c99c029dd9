"""Rotary positions that are written half by half, in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from cutesuper.torch.aten.views import turned  # noqa: E402
from cutesuper.torch.compile.maker import Maker  # noqa: E402
from cutesuper.torch.compile.written_turns import settle_turns  # noqa: E402
from tests.backends import compiled  # noqa: E402

Function = Callable[..., Any]
LENGTH = 16


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Extents that differ from those of an earlier test would be open ones."""
    torch.compiler.reset()


def halves(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def other_order(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x[..., : LENGTH // 2], x[..., LENGTH // 2 :]
    return torch.cat((sin * b + cos * a, b * cos - sin * a), -1)


def negated_factor(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), -1).bfloat16()


def four_factors(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos.exp() + a * sin.exp()), -1)


def of_a_part(x: Any, cos: Any, sin: Any) -> Any:
    """The last half of each row stays as it is."""
    cos, sin = (y[..., : LENGTH // 4] for y in (cos, sin))
    return torch.cat((halves(x[..., : LENGTH // 2], cos, sin), x[..., LENGTH // 2 :]), -1)


def other_way(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * cos.repeat(1, 1, 1, 2) + torch.cat((b, -a), -1) * sin.repeat(1, 1, 1, 2)


def three_terms(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin + a * sin, b * cos + a * sin), -1)


def one_half_twice(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - a * sin, b * cos + a * sin), -1)


def used_again(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    y = a * cos - b * sin
    return torch.cat((y, b * cos + a * sin), -1), y.relu()


def one_factor_for_all(x: Any, cos: Any, sin: Any) -> Any:
    return halves(x, cos[..., :1], sin[..., :1])


def of_two(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x[..., : LENGTH // 2], x.exp()[..., LENGTH // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def with_another_number(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((torch.sub(a * cos, b * sin, alpha=2), b * cos + a * sin), -1)


def through_bool(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    return torch.cat([p.bool().float() for p in parts], -1)


def through_less(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat(((a * cos - b * sin).half().float(), b * cos + a * sin), -1)


def across(x: Any, cos: Any, sin: Any) -> Any:
    """Of rows of three elements, the first two."""
    x = x[..., :3]
    return torch.cat((x[..., 1:2], -x[..., :1]), -1).exp() * cos[..., :1]


def of_three(x: Any, cos: Any, sin: Any) -> Any:
    x, cos, sin = x[..., :3], cos[..., :1], sin[..., :1]
    a, b = x[..., :1], x[..., 1:2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


TAKEN = (halves, other_order, negated_factor, four_factors, of_a_part, other_way)
LEFT = (
    three_terms, one_half_twice, used_again, one_factor_for_all, of_two, with_another_number,
    through_bool, through_less, across, of_three,
)  # fmt: skip


def turns(fn: Function, given: tuple[Any, ...]) -> bool:
    """True if rows are turned whole in the settled graph of a function."""
    graph = make_fx(fn, tracing_mode="fake")(*given).graph
    settle_turns(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return any(turned(n) is not None for n in graph.nodes)


@pytest.mark.parametrize("fn", [*TAKEN, *LEFT])
def test_halves_that_are_written_by_themselves(fn: Function) -> None:
    torch.manual_seed(0)
    given = torch.randn(2, 5, 3, LENGTH), *torch.randn(2, 2, 1, 3, LENGTH // 2)
    call, _ = compiled(fn)
    with torch.no_grad():
        torch.testing.assert_close(call(*given), fn(*given))
    assert turns(fn, given) == (fn in TAKEN)


def test_factors_are_put_together_once() -> None:
    def layers(x: Any, cos: Any, sin: Any) -> Any:
        for _ in range(3):
            x = halves(x, cos[:, None], sin[:, None]) @ x.mT @ x / 64.0
        return x

    x, cos, sin = torch.randn(2, 5, 3, LENGTH), *torch.randn(2, 2, 3, LENGTH // 2)
    call, reports = compiled(layers)
    with torch.no_grad():
        torch.testing.assert_close(call(x, cos, sin), layers(x, cos, sin))
    [outside] = reports[0].outside
    assert outside.operators == 2


@pytest.mark.filterwarnings("error:.*please report")
def test_lengths_that_are_known_at_the_call() -> None:
    def layer(x: Any, weight: Any, cos: Any, sin: Any) -> Any:
        return halves(torch.nn.functional.rms_norm(x, x.shape[-1:]) @ weight, cos, sin)

    call, reports = compiled(layer, dynamic=True)
    for length in (5, 7):
        x, *factors = torch.randn(2, length, LENGTH), *torch.randn(2, 1, length, LENGTH // 2)
        given = x, torch.randn(LENGTH, LENGTH), *factors
        with torch.no_grad():
            torch.testing.assert_close(call(*given), layer(*given))
    assert reports[-1].taken


def test_a_node_that_cannot_be_made_leaves_the_graph_as_it_was() -> None:
    graph = make_fx(halves, tracing_mode="fake")(
        torch.randn(2, LENGTH), *torch.randn(2, 2, LENGTH // 2)
    ).graph
    x, *_, last = graph.nodes
    before = len(graph.nodes)
    with graph.inserting_before(last), pytest.raises(RuntimeError):
        Maker(graph, x).call(torch.ops.aten.view.default, x, [7])
    assert len(graph.nodes) == before
