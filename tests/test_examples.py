"""Every example runs, on a machine without a GPU too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "rmsnorm_linear": "largest difference from PyTorch: 0.0",
    "decode_chain": " 40 tokens, 4 layers: relative error 3",
    "verify_by_hand": "no eps:  not equal",
    "mirage_graph": "muGraph 1: not equal",
}


def test_every_example_is_listed() -> None:
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    pytest.importorskip("cutlass")
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"], cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
