"""The description of the package: README.md without what leads into the repository.

An index shows the page alone, so links to other files of the repository become text there, and
pictures from it, and paragraphs of nothing but links, are left out. So is what stands between
``<!-- repository -->`` and ``<!-- /repository -->``; what stands in an ``<!-- index`` comment is
shown. `pyproject.toml` names this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n", re.MULTILINE)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:)[^)]*\)")
LINKS = re.compile(rf"^(?:{LINK.pattern}(?: ·)?\n)+\n", re.MULTILINE)
REPOSITORY = re.compile(
    r"^<!-- repository -->\n.*?^<!-- /repository -->\n", re.DOTALL | re.MULTILINE
)
SHOWN = re.compile(r"^<!-- index\n(.*?)^-->\n", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)


def described(readme: str) -> str:
    """The text of README.md for a page that stands alone."""
    here = COMMENT.sub("", SHOWN.sub(r"\1", REPOSITORY.sub("", readme)))
    return LINK.sub(r"\1", LINKS.sub("", PICTURE.sub("", here)))


class CustomMetadataHook(MetadataHookInterface):
    """Adds the description to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of the package."""
        text = described((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
