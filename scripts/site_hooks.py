"""Steps that the documentation's pages need besides Markdown; mkdocs.yml names this file.

* ``<!-- readme: Install -->`` becomes that section of README.md, up to its next heading
  (``<!-- readme -->``: what stands before the first one), so that nothing is written twice.
* Links that lead out of ``docs/`` work where the repository is read, and are text in the site;
  pictures from there are copied.
* Blocks of text of up to three lines, messages that are, wrap; longer ones are tables, and scroll.
* Comments are left out: they hold code that the tests of the pages run (``tests/test_docs.py``).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
README = re.compile(r"<!-- readme(?:: (.*?))? -->")
MESSAGE = re.compile(r"^```text\n((?:\S.*\n){1,3})```$", re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
PICTURES = (".png", ".svg")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page as mkdocs shall read it."""
    here = posixpath.dirname(page.file.src_uri)

    def link(base: str) -> Any:
        return lambda m: _link(m, base, here, config, files)

    own = LINK.sub(link(posixpath.join("docs", here)), markdown)
    text = README.sub(lambda m: LINK.sub(link(""), readme_section(m[1])), own)
    return COMMENT.sub("", MESSAGE.sub(r"```{.text .message}\n\1```", text))


def readme_section(title: str | None) -> str:
    """A section of README.md without its heading. Raises KeyError if there is none."""
    parts = re.split(r"^#+ (.*)\n", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return sections[title or parts[1]].strip()


def _link(m: re.Match[str], base: str, here: str, config: Any, files: Any) -> str:
    """A link of a file in the folder ``base`` of the repository, for a page in ``here``."""
    target = posixpath.normpath(posixpath.join(base, m[3]))
    if target.startswith("docs/"):
        path = posixpath.relpath(target.removeprefix("docs/"), here or ".")
        return f"{m[1]}[{m[2]}]({path}{m[4] or ''})"
    if not (ROOT / target).exists():
        return m[0]  # mkdocs says that it leads nowhere
    if not m[1] and not target.endswith(PICTURES):
        return m[2]
    name = f"pictures/{posixpath.basename(target)}"
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / target)))
    return f"{m[1]}[{m[2]}]({posixpath.relpath(name, here or '.')})"
