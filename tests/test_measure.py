"""The clock: sets of tensors, rounds in turns, medians. `test_backend_regions` has `device_us` in
use, `test_gpu_backend` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cutesuper import measure  # noqa: E402
from cutesuper.measure import Rounds, Sets, alternate, called_us, device_us  # noqa: E402


@dataclass
class Scripted:
    """A device on which the first recording takes 3 us a call, the second 5, and every tenth replay
    ten times as long."""

    free: int = 10**9
    l2_bytes: int = 0
    device: Any = field(default_factory=lambda: torch.device("cpu"))
    recorded: int = 0
    replays: int = 0

    def free_bytes(self) -> int:
        return self.free

    def synchronize(self) -> None:
        pass

    def record(self, launch: Any, count: int) -> Any:
        for n in range(count):
            launch(n)
        self.recorded += 1
        return (1 + 2 * self.recorded) * count

    def time(self, recording: Any) -> float:
        self.replays += 1
        return recording * (10 if self.replays % 10 == 0 else 1)


SETS = Sets(cold_bytes=1000, least=2, most=50, enough=1, memory_share=0.5)


@pytest.mark.parametrize(
    ("size", "device", "count"),
    [
        (100, Scripted(), 10),  # as many as outgrow the cache
        (300, Scripted(), 4),
        (5000, Scripted(), 2),  # large ones are enough by themselves
        (1, Scripted(), 50),
        (0, Scripted(), 50),
        (100, Scripted(l2_bytes=1000), 30),  # three times L2
        (100, Scripted(free=1400), 7),  # as the memory allows
        (100, Scripted(free=200), 1),
    ],
)
def test_the_number_of_sets(size: int, device: Any, count: int) -> None:
    assert SETS.count(size, device) == count


def test_sets_that_do_not_fit() -> None:
    with pytest.raises(MemoryError, match=r"^a set of inputs .* 300 MB does not fit into the 200"):
        SETS.count(300 * 10**6, Scripted(free=4 * 10**8))
    with pytest.raises(MemoryError, match=r"^2 sets of inputs"):
        device_us([lambda given: None], lambda n: [torch.zeros(100)], Scripted(free=1000))


def test_one_set_that_exceeds_the_cache() -> None:
    sets = Sets(cold_bytes=1000, least=2, most=50, enough=2, memory_share=0.25)
    assert sets.count(1000, Scripted(free=2000)) == 1, "in the memory of two"
    with pytest.raises(MemoryError, match=r"^2 sets"):
        sets.count(999, Scripted(free=2000))


def test_replays_take_turns() -> None:
    calls: list[str] = []
    replays = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    samples = alternate(replays, Rounds(4, warm=1))
    assert calls[:3] == ["a", "b", "c"]  # do not count
    rounds = [calls[n : n + 3] for n in range(3, 15, 3)]
    assert len(calls) == 15 and all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert all(calls[n - 1] == name for name in samples for n in samples[name])
    calls.clear()
    assert [len(s) for s in alternate(replays, Rounds(9, seconds=0.0)).values()] == [3, 3, 3]
    assert alternate({}, Rounds(9, warm=1, warm_s=100.0)) == {}


def test_outliers_are_no_times() -> None:
    device, seen = Scripted(), [0, 0]

    def call(n: int) -> Any:
        def run(given: Any) -> None:
            seen[n] += len(given)

        return run

    assert device_us([call(0), call(1)], lambda n: [torch.zeros(1000)], device) == [3.0, 5.0]
    assert seen == [measure.TRIAL_SETS.most] * 2


def test_calls_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5e-6, 1.0, 1.0 + 2e-6, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0])
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    us = called_us(lambda: calls.append(1), torch.device("cuda"))
    assert us == pytest.approx(2 / measure.CALLS, rel=1e-3)
    assert len(calls) == measure.CALLS * measure.TURNS and len(waited) == 2 * measure.TURNS
