"""Common parts of the pictures of results: elements of SVG, and colours of both schemes.
Light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

#: class -> light, dark
Colours = Mapping[str, tuple[str, str]]

#: text at least 4.5 to 1 against the paper
COLOURS: Colours = {
    "ink": ("#1f2328", "#e6edf3"),
    "grid": ("#d0d7de", "#30363d"),
    "paper": ("#ffffff", "#0d1117"),
}
FILLED = "text, .mark, .paper { fill: currentColor; }\n"


def new_picture(title: str, style: str, width: int, height: int) -> ElementTree.Element:
    """An ``svg`` element of so many pixels, with a title for screen readers and a background."""
    svg = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
        width=str(width), height=str(height), role="img",
    )  # fmt: skip
    ElementTree.SubElement(svg, "title").text = title
    ElementTree.SubElement(svg, "style").text = style
    add(svg, "rect", "paper", width=width, height=height)
    return svg


def both_schemes(colours: Colours, fills: Mapping[str, str] | None = None) -> str:
    """CSS that gives each class its colour in the reader's scheme.
    ``fills`` names classes that are filled with the colour of another one."""

    def rules(scheme: int) -> str:
        own = [f".{name} {{ color: {pair[scheme]}; }}" for name, pair in colours.items()]
        others = (fills or {}).items()
        return "\n".join([*own, *(f".{n} {{ fill: {colours[c][scheme]}; }}" for n, c in others)])

    return f"{rules(0)}\n@media (prefers-color-scheme: dark) {{\n{rules(1)}\n}}"


def add(
    parent: ElementTree.Element, tag: str, name: str, text: str = "", **attributes: object
) -> ElementTree.Element:
    """A child of a class; numbers are rounded to a tenth, ``_`` in names stands for ``-``."""
    shown = {
        k.replace("_", "-"): f"{v:.1f}" if isinstance(v, float) else str(v)
        for k, v in attributes.items()
    }
    child = ElementTree.SubElement(parent, tag, {"class": name, **shown})
    child.text = text or None
    return child


def as_text(svg: ElementTree.Element) -> str:
    """The file; equal pictures are equal text."""
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"
