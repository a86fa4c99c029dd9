"""The description of the package: README.md without what leads into the repository.

An index shows the page alone, so links to other files of the repository become text there, and
pictures from it, and paragraphs of nothing but links, are left out. `pyproject.toml` names this
file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n", re.MULTILINE)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:)[^)]*\)")
LINKS = re.compile(rf"^(?:{LINK.pattern}(?: ·)?\n)+\n", re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)


def described(readme: str) -> str:
    """The text of README.md for a page that stands alone."""
    return LINK.sub(r"\1", LINKS.sub("", PICTURE.sub("", COMMENT.sub("", readme))))


class CustomMetadataHook(MetadataHookInterface):
    """Adds the description to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of the package."""
        text = described((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
