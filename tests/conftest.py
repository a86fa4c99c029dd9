"""Shared fixtures: golden files, one compile cache, skipping of GPU tests without a GPU."""

from __future__ import annotations

import difflib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cutesuper.garbage import SELDOM
from cutesuper.runtime.cache import ROOT_VARIABLE

GOLDEN = Path(__file__).parent / "golden"

#: Workers of xdist share the cores. Threads of PyTorch wait for each other in loops that keep a
#: core busy: tests of small tensors took 10 to 20 times as long with two workers on two cores.
#: Set before torch is imported, here and in the processes that tests start.
WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:
    os.environ["OMP_NUM_THREADS"] = "1"
# Inductor compiles a file for every vector extension of the processor to see that it can: 7 s.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Tests start some 150 processes, and compiling the package from source takes each 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No limits on time: how long an example takes to be drawn says how busy the machine is.
settings.register_profile(
    "cutesuper", deadline=None, derandomize=True, max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("cutesuper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-update", action="store_true", help="write tests/golden again (make golden)"
    )
    parser.addoption(
        "--ptx", nargs="?", const="h200", metavar="GPU",
        help="run tests marked gpu on the machine of tests/ptx, without a GPU (make ptx-test); it "
        "is an h200 unless another one is named",
    )  # fmt: skip


def pytest_sessionstart(session: pytest.Session) -> None:
    """Replace the GPU before a test file asks for one."""
    if name := session.config.getoption("--ptx"):
        from tests.ptx.device import emulated_gpu

        gpu = emulated_gpu(name)
        gpu.__enter__()
        session.config.add_cleanup(lambda: gpu.__exit__(None, None, None))


@cache
def _no_gpu() -> str:
    """The reason that GPU tests cannot run, or an empty string."""
    import torch

    if torch.cuda.is_available():
        return ""
    return "needs a CUDA device" if torch.version.cuda else "needs a CUDA build of torch"


_MANY_MODULES = 50
_modules_at_last_freeze = [0]


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and let PyTorch look for its own operators once: it does for each of
    the namespaces at each export, 60 ms, which finds nothing new."""
    gc.set_threshold(*SELDOM)
    exports: Any = sys.modules.get("torch._export.utils")
    if hasattr(exports, "_materialize_cpp_cia_ops"):
        exports._materialize_cpp_cia_ops = cache(exports._materialize_cpp_cia_ops)


def pytest_runtest_setup() -> None:
    """Draw the same numbers in every run, whichever tests a worker ran before.

    Leave modules, and the 4000 tests themselves, out of all later looks for garbage. A search
    makes many small objects that live and benchmarks collect after each case: that took a tenth of
    the time of all tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if len(sys.modules) >= _modules_at_last_freeze[0] + _MANY_MODULES:
        _modules_at_last_freeze[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker has half of the files, in order, so that fixtures and caches of a module serve
    all of its tests; who is done first takes half of what the other has left."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a test for the machine where only those are asked for: collecting the
    others took each worker 10 s, a tenth of its work."""
    only = config.getoption("--ptx") and config.getoption("markexpr") == "ptx"
    if only and collection_path.suffix == ".py":
        return "mark.ptx" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [i for i in items if i.get_closest_marker("gpu")]
    if gpu and _no_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=_no_gpu()))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The compile cache of this run, one for all worker processes: every kernel is compiled once,
    by this version of the sources, whatever the user's own cache holds."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if WORKER else base) / "compile-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, str(root))
        yield root


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(session_cache: Path) -> Iterator[None]:
    """A cache of Inductor for this run: what an earlier one compiled has no say. One for all worker
    processes: headers of PyTorch that are compiled in advance take 2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(session_cache.parent / "inductor-cache"))
        yield


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are compiled by this process, and kept for this test: others, as the workers that
    compile several kernels of a program, do not know what it has changed."""
    from cutesuper.runtime import compile as compiling
    from tests.ptx.device import no_workers

    monkeypatch.setattr(compiling, "run_in_workers", no_workers)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, compiled_here: None) -> None:
    """Small tensors are treated as if their offsets needed 64 bits."""
    from cutesuper.skeletons.kernel import arguments

    monkeypatch.setattr(arguments, "MAX_ELEMENTS", 100)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without anything that earlier tests compiled, nor anything for later ones."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Symbolic extents for which kernels ran; a call that falls back to the reference fails."""
    from cutesuper.torch.compile.region_operator import Program

    found: list[tuple[int, ...]] = []
    runner = Program._runner

    def noted(self: Any, extents: tuple[int, ...], device: Any) -> Any:
        run = runner(self, extents, device)
        assert run is not self._reference, "kernels were expected"
        found.append(extents)
        return run

    monkeypatch.setattr(Program, "_runner", noted)
    monkeypatch.setattr(Program, "_quick", lambda *_: None)  # which asks for no runner
    return found


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text must be what tests/golden/<name> holds."""
    update = request.config.getoption("--golden-update")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} does not exist; run: make golden")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail("\n".join([*lines, "", "if this is meant: make golden"]), pytrace=False)

    return compare
