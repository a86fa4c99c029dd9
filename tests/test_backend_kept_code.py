"""Compiled models that PyTorch keeps on disk: found again, and only where nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402

import cutesuper as cs  # noqa: E402
from cutesuper import store  # noqa: E402
from cutesuper.ir.definitions import definition  # noqa: E402
from cutesuper.ir.operators.base import TABLE, Operator  # noqa: E402
from cutesuper.runtime.cache import ROOT_VARIABLE, KernelCache  # noqa: E402
from cutesuper.torch.compile import backend, kept_code, region_operator  # noqa: E402
from cutesuper.torch.compile.options import BackendOptions  # noqa: E402
from cutesuper.torch.compile.report import GraphReport  # noqa: E402
from tests.backends import GatedMLP, gradients  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:.*please report")


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.manual_seed(0)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phases of the graphs that were cut into regions."""
    phases: list[str] = []
    take = backend.take_regions

    def noted(gm: Any, options: BackendOptions, phase: Any, *rest: Any) -> Any:
        phases.append(phase)
        return take(gm, options, phase, *rest)

    monkeypatch.setattr(backend, "take_regions", noted)
    return phases


def again(model: Any, x: Any, backend: str = "cutesuper", **options: Any) -> Any:
    """The result of a model compiled as in a process that has just begun."""
    torch.compiler.reset()
    counters.clear()
    chosen = {"options": {"take": "all", **options}} if backend == "cutesuper" else {}
    call = torch.compile(model, backend=backend, **chosen)
    with torch.no_grad():
        return call(x)


def is_found() -> bool:
    """Whether the last model was found on disk."""
    return counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_what_was_compiled_is_found(cut: list[str]) -> None:
    """Neither the graph nor its regions are looked at, and the results are the same."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    first = again(model, x)
    assert cut == ["inference"] and not is_found()
    assert torch.equal(again(model, x), first)
    assert cut == ["inference"] and is_found()


def test_both_passes_are_found(cut: list[str]) -> None:
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        call = torch.compile(model, backend="cutesuper", options={"take": "all"})
        found.append(gradients(model, call, x))
    assert is_found() and cut == ["forward", "backward"]
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)


def test_each_backend_finds_its_own() -> None:
    """Neither Inductor's code without kernels, nor kernels where none were asked for."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    for name in ("inductor", "cutesuper"):
        again(model, x, name)
        assert not is_found()
    for name in ("inductor", "cutesuper"):
        again(model, x, name)
        assert is_found()


def test_other_options_find_nothing(cut: list[str]) -> None:
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    again(model, x)
    again(model, x, take="modelled", target="h200")
    assert not is_found()
    again(model, x, inductor={"max_fusion_size": 8})
    assert not is_found()
    assert len(cut) == 3


def test_nothing_is_kept_under_a_budget(cut: list[str]) -> None:
    """Which regions get kernels depends on how fast the processor was."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    for _ in range(2):
        again(model, x, budget_s=60.0)
        assert not is_found()
    assert len(cut) == 2


@pytest.mark.parametrize("change", ["tuned", "emptied"])
def test_what_decisions_depend_on_is_in_the_key(change: str, cut: list[str]) -> None:
    """Tuned programs may be faster than what was measured; an empty folder has no kernels."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    again(model, x)
    if change == "tuned":
        path = store.user_folder() / "sm90" / "some.json"
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_text("{}")
    else:
        KernelCache().clear()
    again(model, x)
    assert not is_found() and len(cut) == 2
    again(model, x)
    assert is_found()


def test_nothing_is_kept_with_operators_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code may be another one in the next process."""

    class Own(type(TABLE["silu"])):  # type: ignore[misc]
        """An operator from outside of the package."""

    own: Operator = Own()
    assert definition(own) is not None
    monkeypatch.setitem(TABLE, "own", own)
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    for _ in range(2):
        again(model, x)
        assert not is_found()


def test_what_may_end_otherwise_is_decided_again(
    monkeypatch: pytest.MonkeyPatch, cut: list[str]
) -> None:
    """For want of memory or time, say; and what was decided for good since is found."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    with monkeypatch.context() as patch:
        leave_something(patch)
        again(model, x)
    again(model, x)
    assert not is_found()
    again(model, x)
    assert is_found() and len(cut) == 2


def test_what_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch, cut: list[str]) -> None:
    """The code of each process would stay on disk."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)

    def saved(processes: int) -> list[int]:
        found = list[int]()
        for _ in range(processes):
            again(model, x)
            found.append(counters["aot_autograd"]["autograd_cache_saved"])
            assert not is_found()
        return found

    with monkeypatch.context() as patch:
        leave_something(patch)
        assert saved(kept_code.MOST_TRIES - 1) == [1] * (kept_code.MOST_TRIES - 1)
    assert saved(1) == [1], "nothing is left"
    path = store.user_folder() / "sm90" / "some.json"  # decided once more
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("{}")
    leave_something(monkeypatch)
    assert saved(kept_code.MOST_TRIES + 2) == [1] * kept_code.MOST_TRIES + [0, 0]


def test_one_of_two_passes_is_enough_to_leave_something() -> None:
    """The backward pass, which is decided last, does not say that nothing is left."""
    left, done = (cast("GraphReport", SimpleNamespace(passing=p)) for p in (True, False))
    gm, options = torch.fx.symbolic_trace(GatedMLP(8, 8)), BackendOptions()
    for tries in range(3):
        code = kept_code.kept_code(gm, options)
        assert code.tries == tries and code.key is not None
        code.follow(left)
        code.follow(done)
    code = kept_code.kept_code(gm, options)
    code.follow(done)
    code.follow(done)
    again = kept_code.kept_code(gm, options)
    assert again.tries == 0 and again.key == code.key


@pytest.mark.parametrize("record", [{"name": 5}, {"name": None}, {"tries": "many"}, {}])
def test_what_is_no_name_names_nothing(record: Any) -> None:
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_code.records, "read", lambda question: record)
        for _ in range(2):
            again(model, x)
            assert not is_found()


def leave_something(patch: pytest.MonkeyPatch) -> None:
    """Let all decisions be such that a later process may decide otherwise."""
    take = backend.take_regions
    patch.setattr(backend, "take_regions", lambda *a: replace(take(*a), passing=True))


def test_the_users_own_setting_counts() -> None:
    from torch._functorch import config

    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    with config.patch(enable_autograd_cache=False):
        for _ in range(2):
            again(model, x)
            assert not is_found()


def test_reports_are_about_what_is_decided(cut: list[str]) -> None:
    """`cs.explain` neither finds nor keeps code: it has to look at the graph."""
    model, x = GatedMLP(32, 48), torch.randn(8, 32)
    again(model, x)
    torch.compiler.reset()
    assert cs.explain(model, (x,), options={"take": "all"}).taken
    assert len(cut) > 1


def test_limits_of_rows_are_found_too(monkeypatch: pytest.MonkeyPatch, cut: list[str]) -> None:
    """With more rows than kernels can address the model is compiled anew, as the first time."""
    monkeypatch.setattr(region_operator, "MAX_ELEMENTS", 96 * 32)
    monkeypatch.setattr(region_operator, "_programs", type(region_operator._programs)())
    model, x = GatedMLP(32, 48), torch.randn(16, 32)
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        cut.clear()
        call = torch.compile(model, backend="cutesuper", dynamic=True, options={"take": "all"})
        with torch.no_grad():
            for rows in (16, 24, 120):
                x = torch.randn(rows, 32)
                torch.testing.assert_close(call(x), model(x))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2 and not cut
