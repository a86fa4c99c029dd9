"""Drawings of a page: boxes with lines of text, edges between them, placed in rows.

Colours are left to the style sheet: a box has a class, nothing here has a colour. A script follows
values by attributes: ``id`` of a box, ``data-from`` and ``data-to`` of an edge.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cutesuper.show.layered import Item, place
from cutesuper.show.page_parts import Html, el
from cutesuper.show.svg_elements import LARGE, SMALL, curve, text_width

LINE, EDGE_GAP, BOX_GAP, MARGIN, PILL = 16, 34, 22, 14, 15


@dataclass(frozen=True)
class Box:
    """A node of a drawing.

    Attributes:
        id: unique in the page.
        lines: its text, short enough to fit; the first line is larger.
        look: classes for the style sheet.
        label: the text for screen readers, and the tooltip.
        tags: short texts on pills at its upper edge, with the class of each.
        foot: a short text on a pill at its lower edge.
        href: target of the link, if it is one.
        tensor: number of the muGraph's tensor that it represents.
    """

    id: str
    lines: tuple[str, ...]
    look: str
    label: str
    tags: tuple[tuple[str, str], ...] = ()
    foot: str = ""
    href: str | None = None
    tensor: int | None = None

    @property
    def width(self) -> float:
        """Width for the longest line, and for the pills."""
        sizes = [text_width(t, SMALL if k else LARGE) for k, t in enumerate(self.lines)]
        return max([*sizes, sum(pill_width(t) for t, _ in self.tags)]) + 22

    @property
    def height(self) -> float:
        """Height for the number of lines."""
        return 12 + LINE * len(self.lines)

    def draw(self, x: float, y: float) -> Html:
        """The box with its centre at ``x`` and its upper edge at ``y``."""
        w = self.width
        parts = [
            el("title", self.label),
            el("rect", class_="shape", x=x - w / 2, y=y, width=w, height=self.height, rx=6),
        ]
        parts += [
            line(t, x, y + 19 + LINE * k, "small" if k else "large")
            for k, t in enumerate(self.lines)
        ]
        right = x + w / 2 - 6
        for text, look in reversed(self.tags):
            parts.append(pill(text, right - pill_width(text) / 2, y - PILL / 2, f"tag {look}"))
            right -= pill_width(text) + 3
        if self.foot:
            parts.append(pill(self.foot, x, y + self.height - 4, "tag foot"))
        return node(self.id, parts, self.look, self.label, self.href, self.tensor)


def node(
    id_: str,
    parts: Sequence[Html],
    look: str,
    label: str,
    href: str | None = None,
    tensor: int | None = None,
) -> Html:
    """The group of a box, which can be pointed at, focused and pressed."""
    return el(
        "a" if href else "g",
        *parts,
        class_=f"node {look}",
        id=id_,
        href=href,
        role=None if href else "button",
        aria_label=label,
        tabindex=-1,
        data_tensor=tensor,
    )


def line(text: str, x: float, y: float, look: str, anchor: str = "middle") -> Html:
    """A line of text whose baseline is at ``y``."""
    return el("text", text, x=x, y=y, class_=look, text_anchor=anchor)


def pill_width(text: str) -> float:
    """Width of `pill`."""
    return text_width(text, SMALL) + 12


def pill(text: str, x: float, y: float, look: str) -> Html:
    """A short text on a rounded ground, centred at ``x``, its upper edge at ``y``."""
    w = pill_width(text)
    ground = el("rect", x=x - w / 2, y=y, width=w, height=PILL, rx=PILL / 2)
    return el("g", ground, line(text, x, y + 11, "small"), class_=f"pill {look}")


def edge(a: str, b: str, points: list[tuple[float, float]], stub: float = 4.0) -> Html:
    """An edge for a value from box ``a`` to box ``b``."""
    return el("g", Html(curve(points, stub)), class_="edge", data_from=a, data_to=b)


def svg(label: str, width: float, height: float, content: Sequence[Html]) -> Html:
    """A drawing whose boxes can be reached with the keyboard."""
    return el(
        "svg",
        *content,
        class_="graph",
        role="group",
        aria_label=label,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
    )


def dag(label: str, boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> Html:
    """Boxes in rows from top to bottom, along the edges.

    Args:
        label: name of the drawing.
        boxes: in an order in which no edge leads backwards.
        edges: pairs of ids, each pair once.
    """
    row = _rows(boxes, edges)
    items: list[list[Item]] = [[] for _ in range(max(row.values()) + 1)]
    for b in boxes:
        items[row[b.id]].append(Item(b.id, b.width))
    chains: dict[tuple[str, str], list[Hashable]] = {}
    for a, b in edges:
        bends = [(a, b, r) for r in range(row[a] + 1, row[b])]
        for bend in bends:
            items[bend[2]].append(Item(bend, 2.0, weight=4.0))
        chains[a, b] = [a, *bends, b]
    pairs = [pair for chain in chains.values() for pair in pairwise(chain)]
    layout = place(items, pairs, BOX_GAP)
    left = min(layout.x[i.key] - i.width / 2 for r in layout.rows for i in r) - MARGIN
    right = max(layout.x[i.key] + i.width / 2 for r in layout.rows for i in r) + MARGIN
    heights = [max([b.height for b in boxes if row[b.id] == r]) for r in range(len(items))]
    tops = [MARGIN + sum(heights[:r]) + EDGE_GAP * r for r in range(len(items))]
    at = {k: v - left for k, v in layout.x.items()}
    drawn = [_chain(chain, at, row, tops, heights, boxes) for chain in chains.values()]
    drawn += [b.draw(at[b.id], tops[row[b.id]]) for b in sorted(boxes, key=lambda b: row[b.id])]
    return svg(label, right - left, tops[-1] + heights[-1] + MARGIN, drawn)


def _rows(boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Row of each box: below everything that it needs.
    A box that needs nothing is directly above its first user."""
    row: dict[str, int] = {}
    for b in boxes:
        row[b.id] = max((row[a] + 1 for a, to in edges if to == b.id), default=0)
    for b in boxes:
        if not any(to == b.id for _, to in edges):
            row[b.id] = min((row[to] - 1 for a, to in edges if a == b.id), default=0)
    return row


def _chain(
    chain: list[Hashable],
    at: dict[Hashable, float],
    row: dict[str, int],
    tops: list[float],
    heights: list[float],
    boxes: Sequence[Box],
) -> Html:
    a, *bends, b = chain
    height = next(box.height for box in boxes if box.id == a)
    points = [(at[a], tops[row[str(a)]] + height)]
    for bend in bends:
        assert isinstance(bend, tuple)
        points += [(at[bend], tops[bend[2]]), (at[bend], tops[bend[2]] + heights[bend[2]])]
    points.append((at[b], tops[row[str(b)]] - 5))
    return edge(str(a), str(b), points)
