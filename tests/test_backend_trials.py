"""Trials of regions: the numbers of kernels beside PyTorch's, and what is tried at all."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cutesuper.targets import H200  # noqa: E402
from cutesuper.torch.compile import selection  # noqa: E402
from cutesuper.torch.compile.case import Case, Patience  # noqa: E402
from cutesuper.torch.compile.trial import Compared, Sample  # noqa: E402


class Judged(Sample):
    """A sample whose results have errors that are drawn."""

    #: of the kernels and of PyTorch, relative
    errors = (1e-3, 1e-3)
    elements = 1

    def _compared(self, seed: int) -> list[Compared] | str:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Any:
            return scale * torch.randn(self.elements, generator=generator, dtype=torch.float64)

        size = 10.0 ** float(torch.randint(-3, 4, (), generator=generator))
        exact = size * (1 + normal(0.1).abs())
        ours, theirs = ((exact * (1 + normal(e))).float() for e in self.errors)
        return [Compared(ours, exact, theirs)]


def judged(errors: tuple[float, float], elements: int, seed: int) -> str | None:
    sample = Judged(None, "")  # type: ignore[arg-type]
    object.__setattr__(sample, "errors", errors)
    object.__setattr__(sample, "elements", elements)
    return sample.difference(seed)


def test_one_number_is_judged_by_many_draws() -> None:
    """A loss whose errors are like PyTorch's is right, though one draw in four has twice as much;
    with twenty times the error it is wrong."""
    singles = [Judged(None, "")._compared(seed)[0] for seed in range(200)]  # type: ignore[arg-type]
    unlucky = [
        seed for seed, (out, exact, eager) in enumerate(singles)
        if abs(out - exact) > 2 * abs(eager - exact)
    ]  # fmt: skip
    assert len(unlucky) > 30
    wrong = [seed for seed in unlucky if judged((1e-3, 1e-3), 1, 100 * seed)]
    assert len(wrong) <= len(unlucky) // 20
    found = [judged((2e-2, 1e-3), 1, 100 * seed) for seed in range(100)]
    assert sum(f is None for f in found) < 15  # errors that happen to be small in the first draw


def test_many_numbers_are_judged_by_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judged, "_drawn_again", lambda *_: pytest.fail("drawn again"))
    assert judged((1e-3, 1e-3), 4096, 0) is None
    assert judged((4e-3, 1e-3), 4096, 0)


# ----------------------------------------------------------------------------- what is tried at all


class Timed(Case):
    """A case with a clock, and so many microseconds of Inductor's kernels."""

    inductor_us = 100.0  # type: ignore[assignment]

    @cached_property
    def clock(self) -> Any:
        return H200

    searches = True  # type: ignore[assignment]


def case(count: int, least_us: float, over: bool) -> Timed:
    until = time.monotonic() - 1 if over else time.monotonic() + 100
    return Timed(None, None, Patience(until, least_us), count)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "expected", "much"), [
    (1, None, True), (1, 60.0, True), (1, 61.0, False), (2, 80.0, True),
])  # fmt: skip
def test_what_is_worth_waiting_for(count: int, expected: float | None, much: bool) -> None:
    """As long as nothing is known of its kernels, what they can save counts."""

    class Bounded(Timed):
        least_us = 50.0  # type: ignore[assignment]

    patience = Patience(least_us=40.0, large_us=50.0)
    waits = Bounded(None, None, patience, count)  # type: ignore[arg-type]
    assert waits.is_awaited(expected) == much


@pytest.mark.parametrize(("count", "least", "over", "tried"), [
    (1, 150.0, True, False), (2, 150.0, True, True), (1, 150.0, False, True),
])  # fmt: skip
def test_small_regions_are_not_searched_when_time_is_over(
    count: int, least: float, over: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region cannot save more than what Inductor's kernels of it, and of those like it, take."""
    searched: list[Any] = []

    def found(case: Any) -> selection.Verdict:
        searched.append(case)
        return selection.Verdict(False, "searched", predicted_us=200.0, baseline_us=100.0)

    monkeypatch.setattr(selection, "_found", found)
    given = case(count, least, over)
    given.__dict__["options"] = replace(selection.BackendOptions(), take="faster")
    verdict = selection._judged(given)
    assert bool(searched) == tried
    assert tried or ("too little" in verdict.reason and verdict.final and not verdict.taken)


@pytest.mark.parametrize(("ours", "tried"), [(95.0, False), (60.0, True), (120.0, False)])
def test_what_saves_little_is_not_timed_when_time_is_over(ours: float, tried: bool) -> None:
    verdict = selection.Verdict(True, "", predicted_us=ours, baseline_us=100.0)
    late = selection._within_reach(verdict, case(4, 100.0, True), H200, pytest.fail)  # type: ignore[arg-type]
    assert late.taken == tried
    assert tried or f"{ours:.1f} us expected" in late.reason


def test_what_is_refused_has_nothing_at_stake() -> None:
    """Tensors on several devices have no target to ask."""
    given = case(3, 0.0, False)
    given.__dict__["refusal"] = "its tensors are not on one GPU, or on the CPU"
    assert selection._at_stake(given) == 0.0
    given.__dict__["refusal"] = None
    assert selection._at_stake(given) == 300.0
