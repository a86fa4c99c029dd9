"""The code of a page of the documentation, and how it is run.

A page's Python blocks run from top to bottom in one namespace, as a reader would copy them: nothing
that they need is hidden. Besides

* a ``<!-- check`` comment holds code that the reader does not see, on what the results must be; the
  names that it makes are its own;
* a ``text`` block shows what the Python block before it prints, ``...`` standing for anything;
* a block whose first line is ``# needs a GPU`` runs where there is one.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
    *("examples/README.md", "schedules/README.md", "benchmarks/results/README.md"),
)
GPU = "# needs a GPU\n"

_BLOCK = re.compile(
    r"^```(?P<language>python|text)[^\n]*\n(?P<shown>.*?)^```$"
    r"|^<!-- check\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """Python of a page.

    Attributes:
        page: its path in the repository.
        line: of the page, where the code begins.
        code: as it stands there.
        hidden: in a comment.
        prints: what it prints, where the page shows that.
    """

    page: str
    line: int
    code: str
    hidden: bool
    prints: str | None = None

    @property
    def needs_gpu(self) -> bool:
        """True if it cannot run on a CPU."""
        return self.code.startswith(GPU)

    def run(self, names: dict[str, Any]) -> str:
        """Run it in a namespace. Returns what it prints; errors point at the page's line."""
        code = compile("\n" * (self.line - 1) + self.code, str(ROOT / self.page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, dict(names) if self.hidden else names)
        return printed.getvalue()

    def difference(self, printed: str) -> str | None:
        """The difference between the printed text and the page's; None where there is none."""
        checker = doctest.OutputChecker()
        if self.prints is None or checker.check_output(self.prints, printed, _OUTPUT):
            return None
        example = doctest.Example(self.code, self.prints)
        return f"{self.page}:{self.line}\n" + checker.output_difference(example, printed, _OUTPUT)


def blocks(page: str) -> list[Block]:
    """The Python of a page, in order.

    Raises:
        ValueError: a ``text`` block that shows the output of no Python.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Block] = []
    for m in _BLOCK.finditer(text):
        code = m["shown"] if m["hidden"] is None else m["hidden"]
        line = text.count("\n", 0, m.start()) + 2
        if m["language"] != "text":
            found.append(Block(page, line, code, m["hidden"] is not None))
            continue
        if not found or found[-1].hidden or found[-1].prints is not None:
            raise ValueError(f"{page}:{line}: no Python block prints this")
        last = found[-1]
        found[-1] = Block(page, last.line, last.code, False, code)
    return found


def headings(page: str) -> Iterator[str]:
    """The anchors of a page, as its readers' software makes them."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
