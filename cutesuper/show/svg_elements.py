"""SVG elements as text: boxes, labels, edges. Coordinates are pixels, y points down."""

from __future__ import annotations

from xml.sax.saxutils import escape

STUB = 14  # an edge runs straight this far before it bends: past the label of the box above
CHARACTER = 0.6  # width of a character of a monospaced font, in font sizes
INK, FAINT, EDGE = "#1d2733", "#66717f", "#8d99a8"


def text_width(text: str, size: float) -> float:
    """Width of a line of text."""
    return len(text) * size * CHARACTER


def rect(
    kind: str, x: float, y: float, w: float, h: float, colours: tuple[str, str], radius: float,
    line: float = 1.2, dash: str = "",
) -> str:  # fmt: skip
    """A box with rounded corners; ``kind`` is its class, ``colours`` are fill and stroke."""
    fill, stroke = colours
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'rx="{radius}" fill="{fill}" stroke="{stroke}" stroke-width="{line}"{dashes}/>'
    )


def bar(x: float, y: float, w: float, h: float, r: float) -> str:
    """The title bar of a kernel: opaque, so that edges pass under it."""
    path = (
        f"M{x:.1f} {y + h:.1f} v{r - h:.1f} q0 {-r} {r} {-r} h{w - 2 * r:.1f} "
        f"q{r} 0 {r} {r} v{h - r:.1f} Z"
    )
    return f'<path d="{path}" fill="#e8edf4" stroke="#5a6a80" stroke-width="1.6"/>'


def text(
    text: str, x: float, y: float, size: float, anchor: str = "middle", colour: str = INK,
    weight: str = "normal",
) -> str:  # fmt: skip
    """One line of text whose baseline is at ``y``; characters that XML cannot hold are shown as
    ``?``."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
    )


def curve(points: list[tuple[float, float]], stub: float = STUB) -> str:
    """An edge through ``points``, vertical in each of them, with an arrow head.

    ``stub`` is the length that it runs straight down before its first bend.
    """
    x, y = points[0]
    path = f"M{x:.1f} {y:.1f}"
    for u, v in points[1:]:
        if abs(u - x) < 0.05:
            path += f" L{u:.1f} {v:.1f}"
        else:  # straight past the label of the box above, then over
            y += stub
            bend = (v - y) * 0.6
            path += f" L{x:.1f} {y:.1f} C{x:.1f} {y + bend:.1f} {u:.1f} {v - bend:.1f}"
            path += f" {u:.1f} {v:.1f}"
        x, y, stub = u, v, STUB
    head = f"M{x - 3.5:.1f} {y - 1:.1f} L{x:.1f} {y + 5:.1f} L{x + 3.5:.1f} {y - 1:.1f} Z"
    return (
        f'<path d="{path}" fill="none" stroke="{EDGE}" stroke-width="1.3"/>'
        f'<path d="{head}" fill="{EDGE}"/>'
    )


def dotted(x: float, y: float, u: float, v: float) -> str:
    """A dotted line from (x, y) down to (u, v), for two boxes of one tensor."""
    return (
        f'<path d="M{x:.1f} {y:.1f} C{x:.1f} {(y + v) / 2:.1f} {u:.1f} {(y + v) / 2:.1f} '
        f'{u:.1f} {v:.1f}" fill="none" stroke="#94804a" stroke-width="1.6" '
        f'stroke-dasharray="2 4"/>'
    )
