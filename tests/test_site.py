"""The documentation as a site: it builds without a warning, is complete, and needs no network."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

import cutesuper as cs
from tests.browser import PATIENCE, browser, find_browser
from tests.pages import PAGES, ROOT

#: what a browser loads by itself
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Anchors of a page, what it loads, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        if tag in LOADED and (target := given.get(LOADED[tag])):
            self.loads.append(target)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site is built."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, Page]:
    """The pages of the site, by their path in it."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {str(p.relative_to(folder)): Page(p) for p in folder.rglob("*.html")}


def test_every_page_is_in_the_site_and_in_its_navigation(site: dict[str, Page]) -> None:
    pages = {p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")}
    assert {p.replace(".md", ".html") for p in pages} | {"404.html"} == set(site)
    named = re.findall(r"[\w/]+\.md", yaml.dump(configuration()["nav"]))
    assert sorted(named) == sorted(pages)


def configuration() -> dict[str, Any]:
    """The contents of mkdocs.yml."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_nothing_comes_from_elsewhere(site: dict[str, Page]) -> None:
    loads = {name: target for name, page in site.items() for target in page.loads}
    assert loads
    assert not {n: t for n, t in loads.items() if re.match(r"([a-z]+:)?//", t)}


def test_search_without_a_server(site: dict[str, Page], folder: Path) -> None:
    """The pages are searched as files, where a browser starts no workers."""
    if find_browser() is None:
        pytest.skip("needs a browser")
    del site  # is built
    typed = """(q => {
        q.focus(); q.value = 'sliding window';
        for (const kind of ['input', 'keyup']) q.dispatchEvent(new Event(kind, {bubbles: true}));
    })(document.querySelector('[data-md-component=search-query]'))"""
    with browser() as page:
        page.open(folder / "howto/norm.html")
        page.run(typed)
        until, found = time.monotonic() + PATIENCE, []
        while not found and time.monotonic() < until:
            time.sleep(0.05)
            found = page.all(".md-search-result__link", "e.href")
        assert any(link.endswith("#how-do-i-get-a-sliding-window") for link in found)
        assert not [r for r in page.requests if not r.startswith(("file:", "data:"))]


def test_what_is_hidden_in_pages_is_not_in_the_site(site: dict[str, Page]) -> None:
    assert "<!-- check" in (ROOT / "docs/ops.md").read_text()
    assert not [n for n, page in site.items() if "<!--" in page.text]
    assert "assert y.shape == (6, 8)" not in site["ops.html"].text


def test_messages_wrap() -> None:
    """They are sentences; longer outputs are tables, which scroll."""
    hooks = importlib.import_module("scripts.site_hooks")
    text = "```text\na message\n```\n\n```text\na\n  table\n```\n"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    made = hooks.on_page_markdown(text, page, {}, [])
    assert made == "```{.text .message}\na message\n```\n\n```text\na\n  table\n```\n"
    assert ".message code" in (ROOT / "docs/site.css").read_text()


def test_the_first_page_is_the_readme(site: dict[str, Page]) -> None:
    readme = (ROOT / "README.md").read_text()
    for sentence in ("make demo", 'kernel.export("rmsnorm_linear.so")', 'backend="cutesuper"'):
        assert sentence in readme
        assert sentence in site["index.html"].text


def test_tables_stand_in_the_page_of_benchmarks(site: dict[str, Page]) -> None:
    readme, page = (ROOT / "README.md").read_text(), site["benchmarks.html"].text
    assert len(readme) < 10_000
    for heading in ("Inference workloads", "32 layers in a row", "Training operators"):
        assert heading in page and heading not in readme


@pytest.mark.parametrize("module", [cs, cs.ops, cs.nn, cs.errors], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType, site: dict[str, Page]) -> None:
    anchors = {a for n, p in site.items() if n.startswith("reference/") for a in p.anchors}
    classes = [n for n, v in vars(module).items() if inspect.isclass(v)]
    names = getattr(module, "__all__", classes)
    assert names
    for name in names:
        value = getattr(module, name)
        known = {f"{module.__name__}.{name}"}
        if inspect.isfunction(value):
            known.add(f"{value.__module__}.{name}")
        assert known & anchors, f"{module.__name__}.{name} is not in docs/reference"
