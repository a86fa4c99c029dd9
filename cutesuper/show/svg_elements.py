"""SVG elements as text: boxes, labels, edges. Coordinates are pixels, y points down."""

from __future__ import annotations

STUB = 14  # an edge runs straight this far before it bends: past the label of the box above
CHARACTER = 0.6  # width of a character of a monospaced font, in font sizes
EDGE = "#8d99a8"
LARGE, SMALL = 12.0, 10.5  # sizes of fonts


def text_width(text: str, size: float) -> float:
    """Width of a line of text."""
    return len(text) * size * CHARACTER


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
