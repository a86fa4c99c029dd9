"""Wheel and sdist: the page that an index shows, types for others, what is in it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_description_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No link and no picture of it leads into the repository, and no comment is left."""
    interface = SimpleNamespace(MetadataHookInterface=object)  # builders have hatchling, tests not
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    described = importlib.import_module("hatch_build").described
    text = described((ROOT / "README.md").read_text())
    assert len(text) > 3000 and "<!--" not in text
    assert re.findall(r"\]\((?!https?:)", text) == []
    for wanted in ("pip install cutesuper ", "cutesuper demo", "kernel = g.superoptimize()"):
        assert wanted in text
    for left in ("make demo", "pip install -e", "constraints.txt", "make bench"):
        assert left not in text
    assert described("a\n\n[b](c) ·\n[d](e)\n\nf\n") == "a\n\nf\n"
    assert described("a [b](docs/c.md) [`d`](https://e)\n") == "a b [`d`](https://e)\n"


def test_what_tests_read_is_in_the_source_distribution() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name).exists() for name in included)
    read = {"benchmarks", "constraints.txt", "docs", "examples", "mkdocs.yml", "schedules",
            "scripts", "tests", "CHANGELOG.md", "hatch_build.py"}  # fmt: skip
    assert read <= set(included)


def test_the_changes_begin_with_the_latest_version() -> None:
    from cutesuper.version import __version__

    found = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in found[:2]


#: a program of somebody else; pyright must know the types of all that it calls
OUTSIDE = """
import torch
import cutesuper as cs

g = cs.new_kernel_graph()
g.mark_output(g.exp(g.new_input((4, 64), cs.float16, name="X")))
kernel = cs.superoptimize(g, target="h200")
reveal_type(kernel)
reveal_type(kernel.explain())
reveal_type(cs.ops.softmax(torch.ones(4, 64)))
kernel.draw("x.svg")
kernel.draw(picture="x.svg")
"""


def test_types_are_seen_from_outside(tmp_path: Path) -> None:
    """`py.typed` is there: another project, with the package on its path, is checked against it."""
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("needs pyright")
    (tmp_path / "program.py").write_text(OUTSIDE)
    command = [str(pyright), "--pythonpath", sys.executable, str(tmp_path / "program.py")]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    types = re.findall(r'Type of ".*" is "(.*)"', out)
    assert types == ["Kernel", "str", "Tensor"], out
    errors = [e for e in re.findall(r" - error: (.*)", out) if "No parameter" in e]
    assert len(errors) == 1 and '"picture"' in errors[0], out
