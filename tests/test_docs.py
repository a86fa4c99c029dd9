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


def test_training_of_the_readme() -> None:
    torch = pytest.importorskip("torch")
    import cutesuper as cs

    x, r = torch.randn(2, 3, 5, 4096, dtype=torch.bfloat16).unbind()
    names: dict[str, Any] = {
        "torch": torch, "cs": cs, "device": "cpu", "x": x, "r": r,
        "logits": torch.randn(3, 5, 7, requires_grad=True), "target": torch.randint(7, (3, 5)),
    }  # fmt: skip
    exec(section("README.md", "residual=r"), names)
    assert torch.equal(names["total"], x + r) and names["logits"].grad.shape == (3, 5, 7)


@pytest.mark.parametrize("what", ["weight_offset", "log_softmax", "swiglu(gate, up) "])
def test_operators_with_gradients_of_the_page_on_operators(what: str) -> None:
    torch = pytest.importorskip("torch")
    import cutesuper as cs

    names: dict[str, Any] = dict.fromkeys(
        ("x", "r", "h", "p", "gate", "up", "logits", "y", "p"), torch.randn(6, 8)
    )
    names |= dict.fromkeys(("weight", "bias", "alpha"), torch.randn(8))
    names |= {"q": torch.randn(6, 2, 8), "weights": torch.randn(2, 8), "cs": cs}
    names |= {"target": torch.randint(8, (6,)), "losses": torch.ones(6)}
    exec(section("docs/ops.md", what), names)
    assert names["y"].shape == (6, 8) and names["p"].shape == (6, 8)
    assert names["losses"].shape == (6,)


def test_a_new_operator_of_the_page_on_operators() -> None:
    torch = pytest.importorskip("torch")
    import cutesuper as cs
    from cutesuper.ops import definition
    from cutesuper.ops.rowwise import RowOperator

    names: dict[str, Any] = {**vars(definition), "RowOperator": RowOperator}
    exec(section("docs/ops.md", "operator = RowOperator").replace('"swiglu"', '"another"'), names)
    gate, up = torch.randn(2, 3, 8).unbind()
    assert torch.equal(names["operator"]((gate, up), ()), cs.ops.swiglu(gate, up))
