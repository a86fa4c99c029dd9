"""README and docs: what can be run is run; links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from cutesuper.ir.operators.base import TABLE
from cutesuper.torch.aten import table as frontend
from tests.pages import GPU, PAGES, ROOT, Block, blocks, headings

RUN = [p for p in PAGES if any(not b.hidden for b in blocks(p))]
#: a file of Python in backticks, or at the beginning of an indented line
NAMED = re.compile(r"(?:`|^ {4,})([\w*/.]+\.py)\b", re.MULTILINE)
SOURCES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("cutesuper", "benchmarks", "examples", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
RUN_ON_GPU = [p for p in PAGES if any(b.needs_gpu for b in blocks(p))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where a page may write files; operators that it adds to tables do not stay."""
    pytest.importorskip("cutlass")
    monkeypatch.chdir(tmp_path)
    frontend._load()
    tables = [(t, dict(t)) for t in (TABLE, frontend._TABLE)]
    torch.manual_seed(0)
    yield tmp_path
    for table, known in tables:
        table.clear()
        table.update(known)
    torch._dynamo.reset()


@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    for block in blocks(page):
        if not block.needs_gpu:
            assert not (difference := block.difference(block.run(names))), difference


@pytest.mark.gpu
@pytest.mark.parametrize("page", RUN_ON_GPU)
def test_blocks_run_on_a_gpu(page: str, folder: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page):
        block.run(names)


@pytest.mark.parametrize("page", PAGES)
def test_python_parses(page: str) -> None:
    """Also what runs on a GPU only. A fence that is not understood would not be run."""
    text = (ROOT / page).read_text()
    found = blocks(page)
    for block in found:
        ast.parse(block.code)
    assert len(re.findall(r"^ *```python", text, re.MULTILINE)) == sum(not b.hidden for b in found)
    assert len(re.findall(r"<!-- check", text)) == sum(b.hidden for b in found)
    assert "<!-- setup" not in text, "what is copied does not run"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#[^)\s]*)?\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor[1:] in headings(str(path.resolve().relative_to(ROOT))), target + anchor


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """Paths may begin at any folder, and be patterns."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for name in NAMED.findall(text):
        assert any(fnmatchcase(path, f"*/{name}") for path in SOURCES), name


def test_every_page_is_found() -> None:
    assert {"README.md", "docs/ops.md", "docs/tutorials/rmsnorm_linear.md"} <= set(RUN)
    assert {"docs/tuning.md", "docs/howto/operator.md"} <= set(RUN_ON_GPU)


def test_the_runner_notices_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(text: str) -> list[Block]:
        (tmp_path / "page.md").write_text(text)
        return blocks(str(tmp_path / "page.md"))

    first, second, third = page(
        "<!-- check\nx = 3\n-->\n\n```python\nprint('a', x, 'c')\n```\n\n```text\na ... c\n```\n"
        f"\n```python\n{GPU}raise ValueError('on a CPU')\n```\n"
    )
    names: dict[str, Any] = {"x": 2}
    assert first.hidden and not first.run(names)
    assert second.run(names) == "a 2 c\n" and not second.needs_gpu and second.line == 6
    assert second.difference("a 2 c\n") is None
    assert "Got:\n    a 2 d" in (second.difference("a 2 d\n") or "")
    assert third.needs_gpu
    with pytest.raises(ValueError, match="on a CPU") as raised:
        third.run(names)
    assert raised.traceback[-1].lineno + 1 == third.line + 1
    with pytest.raises(ValueError, match="no Python block prints this"):
        page("```text\na\n```\n")


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_marks_of_a_merge(page: str) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", (ROOT / page).read_text(), re.MULTILINE)


#: words that begin a clause or a sentence, where a docstring has a noun phrase or an imperative
CLAUSES = re.compile(r"(Of|Whether|What|How|Where|If|When|That|Who|This|It|Is|Does|There)\b")


@pytest.mark.parametrize("folder", ["cutesuper", "benchmarks", "examples", "scripts"])
def test_docstrings_begin_with_a_line_that_says_it(folder: str) -> None:
    """The first sentence is the first line: a noun phrase or an imperative."""
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if (text := ast.get_docstring(node)) is not None:
                first, line = text.split("\n")[0], node.body[0].lineno
                if not first.endswith(".") or CLAUSES.match(first) or len(lines[line - 1]) > 100:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {first}")
    assert not wrong, "\n".join(wrong)
