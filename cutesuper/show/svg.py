"""A muGraph as a picture: the drawings of its kernels one below the other, in one SVG document.

The drawings are those of pages (`cutesuper.show.page_block`). A picture has no style sheet and
no pointer: the colours that the style sheet of pages gives to classes are attributes here.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from cutesuper.ir.block import MuGraph
from cutesuper.show.page_block import FAMILIES, MARGIN, BlockDrawing, look_of
from cutesuper.show.page_drawing import line
from cutesuper.show.page_parts import Html, el
from cutesuper.show.svg_elements import LARGE, SMALL, dotted, text_width

#: between the drawings of two kernels
GAP = 42
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def mugraph_svg(mu: MuGraph) -> str:
    """The picture as one self-contained SVG document.

    Raises:
        GraphError: a program is illegal.
    """
    drawings = [BlockDrawing(mu, step, k) for k, step in enumerate(mu.steps)]
    key, key_width = _legend()
    width = max([d.right - d.left for d in drawings] + [key_width]) + 2 * MARGIN
    y, shapes = float(MARGIN), list[Html]()
    tensors: dict[str, tuple[float, float]] = {}
    for drawing in drawings:
        y += GAP / 2
        dx = (width - (drawing.right - drawing.left)) / 2 - drawing.left
        for name, x in drawing.reads.items():
            if name in tensors:  # the same memory, drawn again where it is read
                shapes.append(Html(dotted(*tensors[name], x + dx, y)))
        title = line(f"kernel {drawing.step.name}", drawing.left, -GAP / 4, "large", "start")
        shapes.append(_moved(dx, y, [*drawing.shapes(), title]))
        y += drawing.height
        tensors |= {n: (x + dx, y) for n, x in drawing.writes.items()}
        y += GAP / 2
    shapes.append(_moved((width - key_width) / 2, y, key))
    return _document(width, y + 36 + MARGIN, shapes)


def _moved(x: float, y: float, content: list[Html]) -> Html:
    return el("g", *content, transform=f"translate({x:.1f} {y:.1f})")


def _legend() -> tuple[list[Html], float]:
    """A box for every kind of work, a note on tiles, and the width of both."""
    x, shapes = 0.0, list[Html]()
    for name in FAMILIES:
        shapes.append(el("rect", class_=f"legend {look_of(name)}", x=x, y=0, width=14, height=14))
        shapes.append(line(name, x + 20, 11, "small", "start"))
        x += 34 + text_width(name, SMALL)
    note = "below a box: the tile of its result that one block holds, and what that is a part of"
    return [*shapes, line(note, 0, 32, "small", "start")], x


def _document(width: float, height: float, shapes: list[Html]) -> str:
    ground = el("rect", width="100%", height="100%", fill="#ffffff")
    document = el(
        "svg", ground, *shapes, xmlns="http://www.w3.org/2000/svg", font_family=_FONT,
        viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}",
    )  # fmt: skip
    return f"{_painted(document)}\n"


def _painted(document: Html) -> str:
    """A document whose classes became colours, without a page's attributes for readers."""

    def attributes(found: re.Match[str]) -> str:
        given = {k: v for name in found[1].split() for k, v in _styles().get(name, {}).items()}
        return found[0] + "".join(f' {k}="{v}"' for k, v in given.items())

    still = re.sub(r' (?:role|tabindex|aria-label|data-[a-z]+)="[^"]*"', "", document)
    return re.sub(r' class="([^"]*)"', attributes, still).replace("<g ", "\n<g ")


@cache
def _styles() -> dict[str, dict[str, str]]:
    """Attributes by class, with the colours that the style sheet has in its light theme."""
    sheet = (files("cutesuper.show") / "page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", sheet.split("@media")[0]))
    looks = r"(?m)^((?:\.[\w-]+,?\s)+)\{ --fill: var\(--([\w-]+)\); --stroke: var\(--([\w-]+)\); \}"
    pairs = {
        name: (fill, stroke)
        for names, fill, stroke in re.findall(looks, sheet)
        for name in re.findall(r"[\w-]+", names)
    }
    pairs |= {"pill": ("card", "line"), "block": ("block", "plain-line"),
              "loop": ("loop", "loop-line")}  # fmt: skip
    styles = {k: {"fill": colours[a], "stroke": colours[b]} for k, (a, b) in pairs.items()}
    plain = {"stroke": "none", "fill": colours["faint"], "font-size": f"{SMALL:g}"}
    large = {"fill": colours["ink"], "font-size": f"{LARGE:g}", "font-weight": "600"}
    styles |= {"small": plain, "large": plain | large, "pending": {"fill": colours["down"]}}
    return styles | {"hit": {"fill": "none", "stroke": "none"}}
