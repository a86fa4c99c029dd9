"""The readable report of a patch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cutesuper.report import narrow

#: kinds of calls that run the original, and why
refused: dict[Any, str] = {}


@dataclass(frozen=True)
class Entry:
    """A candidate for replacement.

    Attributes:
        path: as in ``model.named_modules()``.
        was: its class, or its former computation.
        now: its replacement; None if it was left as it is.
        why: the reason why it was left.
    """

    path: str
    was: str
    now: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The modules that were replaced and left.
    ``str`` of it is a table, with one line for equal layers.

    Attributes:
        entries: in the order of the model.
        refused: kinds of calls, of any model, that run the original, and why.
    """

    entries: tuple[Entry, ...]
    refused: tuple[str, ...] = ()

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """Modules that compute with cutesuper."""
        return tuple(e for e in self.entries if e.now is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """Modules that were left as they are."""
        return tuple(e for e in self.entries if e.now is None)

    def __str__(self) -> str:
        """The report as readable text."""
        lines: list[str] = []
        for title, entries in (("replaced", self.replaced), ("left as they are", self.left)):
            if entries:
                lines += [title, *_rows(entries)]
        if self.refused:
            lines += ["calls that run the original", *(f"  {r}" for r in self.refused)]
        return narrow("\n".join(lines)) or "nothing looks like what can be replaced"


def _rows(entries: tuple[Entry, ...]) -> list[str]:
    groups: dict[tuple[str, str, str], int] = {}
    for e in entries:
        key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", e.path), e.was, e.now or e.why)
        groups[key] = groups.get(key, 0) + 1
    width = max(len(path) for path, _, _ in groups)
    arrow = "->" if entries[0].now is not None else "--"
    return [
        f"  {count:4} x {path:{width}}  {was} {arrow} {what}"
        for (path, was, what), count in groups.items()
    ]
