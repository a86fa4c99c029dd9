"""Shared fixtures: golden files, one compile cache, skipping of GPU tests without a GPU."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from cutesuper.runtime.cache import ROOT_VARIABLE

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("cutesuper", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("cutesuper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-update", action="store_true", help="write tests/golden again (make golden)"
    )


@cache
def _no_gpu() -> str:
    """Why GPU tests cannot run, or an empty string."""
    import torch

    if torch.cuda.is_available():
        return ""
    return "needs a CUDA device" if torch.version.cuda else "needs a CUDA build of torch"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [i for i in items if i.get_closest_marker("gpu")]
    if gpu and _no_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=_no_gpu()))


@pytest.fixture(scope="session", autouse=True)
def session_cache(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Iterator[Path]:
    """The compile cache of this run, one for all worker processes: every kernel is compiled once,
    by this version of the sources, whatever the user's own cache holds."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "compile-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, str(root))
        yield root


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
