"""Limits on time that do not depend on the machine, nor on how busy it is.

Host time of a call is told in units of what no such call can do without, measured at the same time;
limits in seconds are for a machine of a given speed (`within`). Microseconds say more about the
machine than about the code, and how busy it is. The ratio of two pieces of Python of one kind does
not: with twice as many processes as cores it varied by 2 %, while the times themselves doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import process_time
from timeit import Timer
from typing import Any

import torch

#: calls in a row: half a millisecond, which a busy machine often leaves a process undisturbed
_CALLS = 40
_REPEATS = 300
#: what `slowness` measures, on two cores of an AMD EPYC of 2024
_SECONDS_THERE = 0.075


def host_time(call: Callable[[], Any], least: Callable[[], Any]) -> float:
    """The time of ``call`` divided by that of ``least``, of each the best of many turns."""
    timers, best = (Timer(call), Timer(least)), [inf, inf]
    call(), least()
    for _ in range(_REPEATS):
        for n, timer in enumerate(timers):
            best[n] = min(best[n], timer.timeit(_CALLS))
    return best[0] / best[1]


# --------------------------------------------------------------------- what calls cannot do without


def facts(t: torch.Tensor) -> tuple[object, ...]:
    """The facts that a call is remembered by."""
    return (t.shape, t.stride(), t.dtype, t.device)


_known: dict[Any, Any] = {}
_library = torch.library.Library("cutesuper_tests", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor result, bool causal, "
    "float? scale, float eps) -> Tensor"
)


def _attention(*args: Any) -> torch.Tensor:
    query, key, value, lengths, result, *options = args
    known = (*facts(query), *facts(key), *facts(value), *facts(lengths), *options)
    view = _known.setdefault(known, (result.shape, result.stride()))
    query.as_strided(query.shape, query.stride())
    return result.as_strided(*view)


_library.impl("attention", _attention, "CPU")


def least_attention(*tensors: torch.Tensor) -> torch.Tensor:
    """Attention whose result is there already, by hand: an operator of PyTorch, written in Python,
    that looks up what to do by facts of its tensors, and views query and result in another
    shape.

    Args:
        tensors: query, key, value, lengths, result.
    """
    return torch.ops.cutesuper_tests.attention.default(*tensors, False, None, 1e-6)


def least_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An operator on rows, by hand: the facts of its operands looked up, their layout and alignment
    asked for, a result allocated."""
    key = (x.shape, x.dtype, x.device, x.requires_grad, w.shape, w.dtype, w.device,
           w.requires_grad)  # fmt: skip
    shape = _known.setdefault(key, tuple(x.shape))
    for t in (x, w):
        if not t.is_contiguous() or t.data_ptr() % 16:
            raise AssertionError("tensors of these tests are aligned")
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class LeastGradient(torch.autograd.Function):
    """The same, with one more result and what autograd needs for a derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        least_rows(x, w)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ------------------------------------------------------------------------------- limits in seconds


def slowness() -> float:
    """How many times as long as on the machine that limits in seconds were set on Python takes here
    and now, for work of the kind that a search does."""
    return min(_seconds(_tuples_and_dictionaries) for _ in range(5)) / _SECONDS_THERE


def within(seconds: float, most: float, fixed: float = 0.0) -> bool:
    """True if work of the search took at most so many seconds, on a machine of that speed.
    The speed is measured where it took more than half of them.

    Args:
        seconds: what it took.
        most: of it on the machine that limits were set on.
        fixed: further seconds that do not depend on the machine.
    """
    return 2 * seconds <= most or seconds <= most * slowness() + fixed


def _tuples_and_dictionaries() -> None:
    found: dict[Any, int] = {}
    for n in range(50_000):
        key = (n % 977, (n & 15, n % 7))
        found[key] = found.get(key, 0) + n
    sorted(found.items())


def _seconds(work: Callable[[], None]) -> float:
    begin = process_time()
    work()
    return process_time() - begin
