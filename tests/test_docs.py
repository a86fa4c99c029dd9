"""What README and docs say can be run, is run, where it needs no GPU; links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def section(page: str, what: str) -> str:
    """The one block of a page in which something occurs."""
    [found] = [b for b in blocks(page) if what in b]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_python_parses(page: str) -> None:
    for block in blocks(page):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", (ROOT / page).read_text())
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#[^)\s]*)?\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor[1:] in slugs, target + anchor


def test_attention_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    exec(section("README.md", "k_cache"), names)
    assert names["y"].shape == (2, 32, 1, 128) and names["y"].isfinite().all()


def test_attention_of_the_page_on_operators() -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {
        "q": torch.randn(2, 2, 3, 16), "lengths": torch.tensor([5, 64], dtype=torch.int32),
        "table": torch.tensor([[1, -1, -1, -1], [2, 3, 4, 5]], dtype=torch.int32),
    }  # fmt: skip
    names |= dict.fromkeys(("k", "v", "k_cache", "v_cache"), torch.randn(2, 2, 64, 16))
    names |= dict.fromkeys(("k_pages", "v_pages"), torch.randn(9, 16, 2, 16))
    names |= dict.fromkeys(("wq", "wk"), torch.ones(16))
    exec(section("docs/ops.md", "k_pages"), names)
    assert names["y"].shape == (2, 2, 3, 16)
