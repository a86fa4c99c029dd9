"""The holder of programs: each made once, whichever threads ask, and the oldest dropped."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import cutesuper as cs
from cutesuper.errors import DeviceError
from cutesuper.runtime.gradient import Deferred, Gradient
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.programs import Kept, refuse_capture
from cutesuper.targets import H200

torch = pytest.importorskip("torch")


def test_the_oldest_is_dropped() -> None:
    kept = Kept[int, int](2)
    assert [kept.made(n, lambda n=n: 10 * n) for n in (1, 2, 1, 3)] == [10, 20, 10, 30]
    assert dict(kept) == {2: 20, 3: 30}


def test_none_is_kept() -> None:
    kept, made = Kept[str, None](), list[str]()
    for _ in range(2):
        kept.made("a", lambda: made.append("a"))
    assert made == ["a"] and kept == {"a": None}


def test_a_failure_is_tried_again() -> None:
    kept = Kept[str, int]()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.made("a", lambda: 1 // 0)
    assert kept.made("a", lambda: 7) == 7


def test_threads_make_each_once_and_different_ones_at_once() -> None:
    kept, made = Kept[int, int](), list[int]()
    both = threading.Barrier(2, timeout=60)

    def make(n: int) -> int:
        both.wait()  # passes only if the two are made at the same time
        made.append(n)
        return n

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: kept.made(n % 2, lambda: make(n % 2)), range(8)))
    assert sorted(made) == [0, 1] and found == [0, 1] * 4


def test_threads_take_turns_after_a_failure() -> None:
    kept, tries = Kept[str, int](), list[int]()

    def make() -> int:
        tries.append(len(tries))
        if len(tries) < 3:
            raise ValueError
        return len(tries)

    def work(_: int) -> int | None:
        with contextlib.suppress(ValueError):
            return kept.made("a", make)

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(work, range(6)))
    assert tries == [0, 1, 2] and found.count(3) == 4 and found.count(None) == 2


def test_a_program_may_need_another() -> None:
    kept = Kept[int, int]()

    def make(n: int) -> int:
        return 1 if n == 0 else n * kept.made(n - 1, lambda: make(n - 1))

    assert kept.made(5, lambda: make(5)) == 120 and len(kept) == 6


def test_a_program_that_needs_itself() -> None:
    kept = Kept[str, int]()

    def make() -> int:
        return 1 + kept.made("a", make)

    with pytest.raises(RecursionError, match="it calls itself"):
        kept.made("a", make)
    assert kept.made("a", lambda: 3) == 3


def test_devices_captures_and_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutesuper.runtime import programs

    state = {"capturing": True, "name": "GPU"}
    current: list[Any] = []

    @contextlib.contextmanager
    def device(d: Any) -> Any:
        current.append(d)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: state["name"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    kept, gpus = Kept[Any, int](), [torch.device("cuda", n) for n in range(2)]
    with pytest.raises(DeviceError, match=r"^f: its first call .* call it once before the capture"):
        kept.made_on(gpus[1], "k", "f", lambda: 1)
    assert not current and not kept
    state["capturing"] = False
    refuse_capture("f")
    assert kept.made_on(gpus[1], "k", "f", lambda: 1) == 1 and current == [gpus[1]]
    state["capturing"] = True
    assert kept.made_on(gpus[0], "k", "f", lambda: 2) == 1, "GPUs of one name share it"
    state.update(capturing=False, name="another GPU")
    assert kept.made_on(gpus[0], "k", "f", lambda: 3) == 3
    monkeypatch.setattr(programs.TABLE, "changes", programs.TABLE.changes + 1)
    assert kept.made_on(gpus[0], "k", "f", lambda: 4) == 4 and len(kept) == 3


@pytest.mark.parametrize("deferred", [False, True])
def test_no_bucket_and_no_gradient_is_made_in_a_capture(
    deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sizes than those of a bucket that is there, and the first call with a gradient, or its
    backward pass."""
    capturing, made = [False], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr("cutesuper.runtime.gradient.recorded", lambda found, inputs: found)

    def make(hints: dict[str, int]) -> Any:
        made.append(hints["M"])
        return SimpleNamespace(launches=hints["M"], steps=(), mugraph=None)

    def derive(kernel: Any, names: tuple[str, ...]) -> Any:
        made.append(names)
        return Gradient(kernel.graph, names, cs.split(kernel.graph, names), kernel, None)

    g = cs.new_kernel_graph()
    g.mark_output(g.new_input((cs.symbol("M", 8), 64), cs.float16, "x") * 2.0)
    kernel = Kernel(g, H200, make, derive, deferred=deferred)
    x: Any = SimpleNamespace(requires_grad=True, is_cuda=True, numel=lambda: 512)

    def differentiated() -> Any:
        called: Any = kernel._record([x], None)
        assert isinstance(called, Deferred) == (deferred and ("x",) not in made)
        return called.ready([x])[0].wrt

    assert kernel._launches({"M": 20}) == 32
    capturing[0] = True
    assert kernel._launches({"M": 5}) == 8 and kernel._launches({"M": 31}) == 32
    with pytest.raises(DeviceError, match=r"h200\) with M=33: its first .* before the capture"):
        kernel._launches({"M": 33})
    with pytest.raises(DeviceError, match=r"h200\) with gradients of x: its first call.* backward"):
        differentiated()
    capturing[0] = False
    assert kernel._launches({"M": 33}) == 64 and differentiated() == ("x",)
    capturing[0] = True
    assert kernel._launches({"M": 64}) == 64 and differentiated() == ("x",)
    assert made == [8, 32, 64, ("x",)]
