"""HTML from parts that escape their content; numbers and bars in readable form.

`el` makes elements. A plain string is text and is escaped, `Html` is markup and is not, so that a
tensor called ``<script>`` stays text wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: most characters of a name in a drawing; the whole name is in its title
LONGEST = 24


class Html(str):
    """Markup; made by `el` and `join` only."""

    __slots__ = ()


def visible(text: str) -> str:
    """The text with ``?`` for characters that no document can hold or show.
    Control characters, surrogates, marks that change the reading direction."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def safe(content: str) -> Html:
    """Markup unchanged, text escaped."""
    return content if isinstance(content, Html) else Html(escape(visible(content)))


def join(parts: Iterable[str], separator: str = "") -> Html:
    """Parts joined by the separator."""
    return Html(safe(separator).join(map(safe, parts)))


def el(tag: str, *children: str, **attributes: str | float | None) -> Html:
    """An element. ``el("a", "k<0>", class_="x")`` -> ``<a class="x">k&lt;0&gt;</a>``.

    In names of attributes ``_`` stands for ``-``, a last one is dropped. An attribute that is None
    or False is left out, True stands alone, numbers keep one decimal.
    """
    shown: list[str] = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            shown.append(f" {key}")
        elif value is not None and value is not False:
            text = f"{value:.1f}" if isinstance(value, float) else visible(str(value))
            shown.append(f' {key}="{escape(text)}"')
    return Html(f"<{tag}{''.join(shown)}>{join(children)}</{tag}>")


def shorten(text: str, longest: int = LONGEST) -> str:
    """A name, or a line, that fits into a drawing."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def count(n: int, noun: str) -> str:
    """``1 kernel``, ``12,288 blocks``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def micros(us: float) -> str:
    """``16.1 µs``, ``0.58 µs``."""
    return f"{us:.1f} µs" if us >= 10 else f"{us:.2f} µs"


def meter(label: str, value: float, most: float, shown: str, class_: str = "") -> Html:
    """A row of a bar chart: label, a bar of ``value / most``, the number."""
    share = 100 * value / most if most else 0.0
    return el(
        "div",
        el("span", label, class_="what"),
        el("span", el("i", style=f"width:{share:.2f}%"), class_="bar", aria_hidden="true"),
        el("span", shown, class_="number"),
        class_=f"meter {class_}",
    )


def table(label: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """A table in a scrolling box of its own; a cell is text, or a whole ``td`` as markup."""
    body = [
        el("tr", *(c if isinstance(c, Html) and c.startswith("<td") else el("td", c) for c in row))
        for row in rows
    ]
    titles = el("thead", el("tr", *(el("th", h, scope="col") for h in head)))
    return scroll(label, el("table", titles, el("tbody", *body)))


def scroll(label: str, *content: str, class_: str = "") -> Html:
    """A box that scrolls content too wide for it, also with the keyboard."""
    return el(
        "div", *content, class_=f"scroll {class_}", tabindex=0, role="region", aria_label=label
    )


def tile_text(tile: dict[str, int], dims: Iterable[str]) -> str:
    """``[M=16, K=128]``; ``scalar`` without labels."""
    inner = ", ".join(f"{d}={tile[d]}" for d in dims)
    return f"[{inner}]" if inner else "scalar"
