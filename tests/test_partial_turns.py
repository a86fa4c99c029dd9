"""Rotary positions of a part of each row, in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.backends import compiled  # noqa: E402
from tests.small_models import rotated  # noqa: E402

Function = Callable[..., Any]
#: elements of a row, and of the part
LENGTH, PART = 16, 8


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Extents that differ from those of an earlier test would be open ones."""
    torch.compiler.reset()


def pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def first(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((rotated(x[..., :PART], cos, sin), x[..., PART:]), -1)


def last(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((x[..., :-PART], rotated(x[..., -PART:], cos, sin)), -1)


def split(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.split([PART, LENGTH - PART], -1)
    return torch.cat((rotated(a, cos, sin), b), -1)


def first_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((pairs(x[..., :PART], cos, sin), x[..., PART:]), -1)


def in_float32(x: Any, cos: Any, sin: Any) -> Any:
    x = x.bfloat16()
    y = rotated(x[..., :PART].float(), cos, sin).to(x.dtype)
    return torch.cat((y, x[..., PART:]), -1).float()


def factors_of_rows(x: Any, cos: Any, sin: Any) -> Any:
    return first(x, cos[..., :1] * 2.0, sin[..., :1] * 2.0)


def used_again(x: Any, cos: Any, sin: Any) -> Any:
    y = rotated(x[..., :PART], cos, sin)
    return torch.cat((y, x[..., PART:]), -1), y.relu()


def uneven(x: Any, cos: Any, sin: Any) -> Any:
    """Pieces of 6 elements, of which rows are not made."""
    return torch.cat((rotated(x[..., :6], cos[..., :6], sin[..., :6]), x[..., 6:]), -1)


def of_two(x: Any, cos: Any, sin: Any) -> Any:
    """A part of rows beside those of others."""
    return torch.cat((rotated(x[..., :PART], cos, sin), x.exp()[..., PART:]), -1)


def other_rest(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((rotated(x[..., :PART], cos, sin), x[..., : LENGTH - PART]), -1)


def not_turned(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((x[..., :PART] * cos, x[..., PART:]), -1)


WIDENED = (first, last, split, first_pairs, in_float32, factors_of_rows)
LEFT = (used_again, uneven, of_two, other_rest, not_turned)


def joins_rows(reports: list[Any]) -> bool:
    """True if rows are put together outside of regions."""
    return any("takes a part" in o.reason for o in reports[0].outside)


@pytest.mark.parametrize("fn", [*WIDENED, *LEFT])
def test_parts_of_rows(fn: Function) -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 5, 3, LENGTH), *torch.randn(2, 2, 1, 3, PART)
    call, reports = compiled(fn)
    with torch.no_grad():
        torch.testing.assert_close(call(x, cos, sin), fn(x, cos, sin))
    assert joins_rows(reports) == (fn in LEFT)
    assert fn in LEFT or reports[0].taken == 1


def test_the_rest_of_a_row_stays_as_it_is() -> None:
    """Whatever is beside it: an infinite element times a padded factor would be NaN."""
    x, cos, sin = torch.randn(2, 5, 3, LENGTH), *torch.randn(2, 2, 1, 3, PART)
    x[..., PART:] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0] * 2)
    call, reports = compiled(first)
    with torch.no_grad():
        torch.testing.assert_close(call(x, cos, sin), first(x, cos, sin), equal_nan=True)
    assert reports[0].taken == 1


def test_factors_are_padded_once() -> None:
    def layers(x: Any, cos: Any, sin: Any) -> Any:
        for _ in range(3):
            x = first(x, cos[:, None], sin[:, None]).exp() @ x.mT @ x
        return x

    x, cos, sin = torch.randn(2, 5, 3, LENGTH), *torch.randn(2, 2, 3, PART)
    call, reports = compiled(layers)
    with torch.no_grad():
        call(x, cos, sin)
    [padded] = [o for o in reports[0].outside if "constant_pad_nd" in o.reason]
    assert padded.operators == 2


def test_queries_keys_and_values_are_one_region() -> None:
    def step(x: Any, w: Any, cos: Any, sin: Any, caches: Any, at: Any) -> Any:
        q, k, v = (x @ part for part in w.split([96, 32, 32], 1))
        q, k, v = (y.unflatten(-1, (-1, LENGTH)).transpose(1, 2) for y in (q, k, v))
        q, k = first(q, cos, sin), first(k, cos, sin)
        keys, values = (c.index_copy(2, at, x) for c, x in zip(caches, (k, v), strict=True))
        return q, keys, values

    x, w, caches = torch.randn(2, 1, 24), torch.randn(24, 160), torch.randn(2, 2, 2, 20, LENGTH)
    cos, sin = torch.randn(2, 2, 1, 1, PART)
    given = x, w, cos, sin, tuple(caches), torch.tensor([7])
    call, reports = compiled(step)
    with torch.no_grad():
        torch.testing.assert_close(call(*given), step(*given))
    assert len(reports[0].regions) == 2 and not joins_rows(reports)


def test_open_extents() -> None:
    call, _ = compiled(first, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3):
            x, cos, sin = torch.randn(batch, 5, 3, LENGTH), *torch.randn(2, 1, 1, 3, PART)
            torch.testing.assert_close(call(x, cos, sin), first(x, cos, sin))
