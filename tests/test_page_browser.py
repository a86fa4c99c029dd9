"""The page of a muGraph in a real browser: what it draws, what a click does, what it keeps out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutesuper.ir.block import BlockProgram, MuGraph
from cutesuper.ir.dtypes import float16
from cutesuper.ir.graph import KernelGraph
from cutesuper.show.page import Facts, mugraph_page
from cutesuper.show.page_parts import micros
from cutesuper.skeletons.cost import Cost
from tests import programs
from tests.browser import Browser, browser, find_browser
from tests.test_draw import wide
from tests.test_page import lora, named

PROGRAMS = {**programs.ALL, "wide": wide}
NASTY = (
    "<script>hacked=1</script>",
    '"><img src=x onerror=hacked=2>',
    "</style></script><svg/onload=hacked=3>",
    "' onfocus='hacked=4' \u202e\x00\ud800 &lt;b&gt;",
)


def page_of(name: str) -> tuple[MuGraph, Facts]:
    """A program by name, and what is known of it."""
    return lora()[1:] if name == "lora" else (PROGRAMS[name](), Facts())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if find_browser() is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium on this machine; .ci/run has to install one")
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    with browser() as b:
        yield b


def shown(b: Browser, folder: Path, mu: MuGraph, facts: Facts | None = None, **window: Any) -> None:
    """Open the page of a muGraph."""
    path = folder / "page.html"
    path.write_text(mugraph_page(mu, facts or Facts()), encoding="utf-8")
    b.open(path, **window)
    assert b.requests == [path.as_uri()]
    assert b.messages == []


def expected_edges(program: BlockProgram) -> int:
    """Loads and stores have an edge to their tensor, values one to each of their users."""
    drawn = {i for i, op in enumerate(program.ops) if op.kind != "constant"}
    between = {(j, i) for i, op in enumerate(program.ops) for j in op.inputs if j in drawn}
    return len(between) + len(program.loads()) + len(program.stores())


#: boxes of a drawing that touch, texts that are wider than their boxes, what sticks out of the page
CLASHES = """(() => {
  const found = [];
  for (const graph of document.querySelectorAll(".graph")) {
    const whole = graph.getBoundingClientRect();
    const nodes = [...graph.querySelectorAll(".node")];
    const at = nodes.map(n => n.getBoundingClientRect());
    nodes.forEach((n, i) => {
      const box = n.querySelector(".shape").getBoundingClientRect();
      for (const t of n.querySelectorAll(":scope > .large")) {
        const r = t.getBoundingClientRect();
        if (r.left < box.left || r.right > box.right) found.push("text " + t.textContent);
      }
      const r = at[i];
      if (r.left < whole.left || r.right > whole.right || r.bottom > whole.bottom)
        found.push("out " + n.id);
      at.forEach((s, j) => {
        if (i < j && r.left < s.right && s.left < r.right && r.top < s.bottom && s.top < r.bottom)
          found.push(`overlap ${n.id} ${nodes[j].id}`);
      });
    });
  }
  return found;
})()"""


@pytest.mark.parametrize("name", [*PROGRAMS, "lora"])
def test_everything_is_drawn(name: str, chromium: Browser, tmp_path: Path) -> None:
    mu, facts = page_of(name)
    shown(chromium, tmp_path, mu, facts)
    assert chromium.count(".kernel-card") == len(mu.steps)
    for k, step in enumerate(mu.steps):
        ops = sum(op.kind != "constant" for op in step.program.ops)
        boxes = ops + len(step.reads) + len(step.writes)
        assert chromium.count(f"#kernel-{k} .node") == boxes
        assert chromium.count(f"#kernel-{k} .note") == boxes
        assert chromium.count(f"#kernel-{k} .edge") == expected_edges(step.program)
    assert chromium.count(".sides .node.kernel") == len(mu.steps)
    ids = chromium.all("[id]", "e.id")
    assert len(set(ids)) == len(ids)
    for end in ("from", "to"):
        assert set(chromium.all(".edge", f"e.dataset.{end}")) <= set(ids)
    assert chromium.run(CLASHES) == []


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", ["lora", "wide", "nested"])
def test_only_boxes_scroll_sideways(
    name: str, width: int, chromium: Browser, tmp_path: Path
) -> None:
    mu, facts = page_of(name)
    shown(chromium, tmp_path, mu, facts, width=width)
    chromium.all("details", "e.open = true")
    page = "document.documentElement"
    assert chromium.run(f"{page}.clientWidth") == width
    assert chromium.run(f"{page}.scrollWidth") <= width
    assert all(chromium.all("table", "!!e.closest('.scroll')"))
    inside = chromium.all(".canvas .scroll", "e.scrollWidth > e.clientWidth")
    assert any(inside) == (name == "wide" or width == 420)


def classes(b: Browser, selector: str) -> set[str]:
    """Ids of the boxes that match."""
    return set(b.all(f".node{selector}", "e.id"))


def notes(b: Browser) -> list[str]:
    """Texts of the notes that are shown."""
    return b.all(".note:not([hidden])", "e.innerText")


def test_a_click_highlights_producers_and_consumers(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_linear())
    chromium.click("#k0-2")  # the product
    assert classes(chromium, ".chosen") == {"k0-2"}
    assert classes(chromium, ".from") == {"k0-0", "k0-1"}
    assert classes(chromium, ".to") == {"k0-3"}
    assert classes(chromium, ".before") == {"k0-0", "k0-1", "k0-r0", "k0-r1"}
    assert {"k0-7", "k0-12", "k0-13", "k0-w0"} < classes(chromium, ".after")
    chromium.run("document.getAnimations().forEach(a => a.finish())")
    assert chromium.all("#k0-4, #k0-3", "getComputedStyle(e).opacity") == ["0.25", "1"]
    [note] = notes(chromium)
    for text in (
        "matmul(0, 1) over K", "M, N", "[M=16, N=128], 2,048 elements",
        "inside K.loop (16 iterations)", "partial result over K.cluster (2) and K.loop (16)",
        "0 load X", "3 accumulate sum over K.loop",
    ):  # fmt: skip
        assert " ".join(text.split()) in " ".join(note.split())
    assert chromium.all("[aria-pressed=true]", "e.id") == ["k0-2"]
    chromium.hover("#k0-5")  # what was pressed stays
    assert classes(chromium, ".chosen") == {"k0-2"}
    chromium.click("#k0-2")
    chromium.hover("h1")
    assert not classes(chromium, ".chosen")
    assert notes(chromium) == []


def test_pointing_shows_and_leaving_hides(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_linear())
    chromium.hover("#k0-8")
    assert classes(chromium, ".chosen") == {"k0-8"}
    assert "once K.loop has ended" in notes(chromium)[0]
    assert "yes: no axis is left" in notes(chromium)[0]
    chromium.hover("h1")
    assert not classes(chromium, ".chosen")


def test_keys_walk_along_values(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_linear())
    chromium.run("document.querySelector('.canvas .scroll').focus()")
    for name in ("Tab", "Enter", "ArrowDown"):
        chromium.key(name)
    assert chromium.run("document.activeElement.id") == "k0-0"
    assert classes(chromium, ".from") == {"k0-r0"}
    for name in ("ArrowDown", "ArrowUp"):
        chromium.key(name)
    assert chromium.run("document.activeElement.id") == "k0-0"
    chromium.key("Escape")
    chromium.run("document.activeElement.blur()")
    assert not classes(chromium, ".chosen")


def test_notes_lead_on(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_linear())
    chromium.click("#k0-2")
    chromium.click("#k0-2-note [data-go='k0-3']")
    assert classes(chromium, ".chosen") == {"k0-3"}
    assert chromium.run("document.activeElement.id") == "k0-3"


def test_a_tensor_is_marked_wherever_it_is(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_backward())
    chromium.click("#k0-w1")  # partial sums, which the second kernel reads
    assert classes(chromium, ".same") == {"p-t4", "k0-w1", "k1-r0"}
    assert chromium.count("td.same") == 2


def test_names_of_users_are_inert(chromium: Browser, tmp_path: Path) -> None:
    mu = programs.norm_linear()
    names = dict(zip(("X", "W", "Z", "k"), NASTY, strict=True))
    graph = KernelGraph()
    x = graph.new_input((16, 4096), float16, name=NASTY[0])
    w = graph.new_input((4096, 6144), float16, name=NASTY[1])
    graph.mark_output(graph.matmul(graph.rms_norm(x), w))
    step = replace(named(mu, names).steps[0], name=NASTY[3])
    nasty = replace(named(mu, names), steps=(step,))
    facts = Facts(graph, NASTY[2], [Cost(2.0, {NASTY[0]: 1.0})], NASTY[1], -9.0, [NASTY[2]])
    shown(chromium, tmp_path, nasty, facts)
    assert chromium.run("typeof hacked") == "undefined"
    assert chromium.run("document.scripts.length") == 1
    assert chromium.count("img, [onerror], [onload], [onfocus]") == 0
    border = f"{NASTY[0]}, {NASTY[1]} → {NASTY[2]}"
    assert chromium.all(".border", "e.textContent") == [border]
    assert chromium.count(".node") == 4 + 4 + 13 + 3
    assert chromium.run("document.documentElement.scrollWidth") <= 1400
    assert chromium.run(CLASHES) == []


def test_injected_scripts_would_not_run(chromium: Browser, tmp_path: Path) -> None:
    page = mugraph_page(programs.symbolic_rows())
    path = tmp_path / "injected.html"
    path.write_text(page.replace("</main>", "<script>hacked = 1</script></main>"))
    chromium.open(path)
    assert chromium.run("typeof hacked") == "undefined"
    assert any("Content Security Policy" in m for m in chromium.messages)


def test_light_and_dark(chromium: Browser, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    shown(chromium, tmp_path, programs.norm_linear())
    assert chromium.run(ground) == "rgb(245, 246, 248)"
    shown(chromium, tmp_path, programs.norm_linear(), dark=True)
    assert chromium.run(ground) == "rgb(14, 18, 23)"


def test_text_can_be_selected(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, programs.norm_linear())
    selected = """(() => {
      const picked = [];
      for (const e of document.querySelectorAll("#k0-2 .large, .formula")) {
        getSelection().selectAllChildren(e);
        picked.push(getSelection().toString());
      }
      return picked;
    })()"""
    assert chromium.run(selected) == [
        "Z = X @ W / sqrt(mean_K(X²) + 1e-06)", "2 matmul over K",
    ]  # fmt: skip


def test_facts_are_shown(chromium: Browser, tmp_path: Path) -> None:
    _, mu, facts = lora()
    shown(chromium, tmp_path, mu, facts)
    head = chromium.run("document.querySelector('header.top').innerText")
    total = sum(c.total for c in facts.costs)
    for text in ("3 matmul + add", "3 kernels", "predicted on h200", micros(total), "2-8"):
        assert text in head
    shares = chromium.all("td .meter", "e.innerText.trim()")
    assert shares == [micros(c.total) for c in facts.costs]
    bars = [chromium.all(f"#kernel-{k} .meter", "e.innerText.split('\\n')") for k in range(3)]
    assert bars[0] == [
        ["predicted", "2.50 µs"], ["launch", "1.80 µs"], ["device memory", "0.50 µs"],
    ]  # fmt: skip
    assert ["new cause", "0.20 µs"] in bars[2]
    widths = chromium.all("#kernel-0 .bar i", "parseFloat(e.style.width)")
    assert widths == [100, 72, 20]
    chromium.all("details", "e.open = true")
    text = chromium.run("document.body.innerText")
    assert facts.verification in text
    assert "plan of k2" in text
    tags = chromium.all("figure:first-child .pill.tag", "e.textContent")
    assert sorted(tags) == ["k0", "k1", "k2", "k2", "output"]


def test_labels_for_screen_readers(chromium: Browser, tmp_path: Path) -> None:
    _, mu, facts = lora()
    shown(chromium, tmp_path, mu, facts)
    assert all(chromium.all(".graph, .node, .scroll", "e.ariaLabel"))
    stops = chromium.all(".graph", "e.querySelectorAll('[tabindex=\"0\"]').length")
    assert set(stops) == {1}
    assert chromium.run("document.documentElement.lang") == "en"
