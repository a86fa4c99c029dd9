"""Functions and modules of PyTorch become kernel graphs that compute the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tracing import CORPUS, check, traced


@pytest.mark.parametrize(("fn", "inputs"), [c[1:] for c in CORPUS], ids=[c[0] for c in CORPUS])
def test_traced_is_eager(monkeypatch: pytest.MonkeyPatch, fn: Any, inputs: Any) -> None:
    check(traced(monkeypatch, fn, inputs), fn, inputs)
