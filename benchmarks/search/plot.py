"""The ablation as a picture: states against the number of operators, one panel for each program.

    python -m benchmarks.search.plot benchmarks/results/ablation.json docs/search_ablation.svg

Plain SVG; equal results give an equal file. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log10
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.picture import COLOURS, FILLED, add, as_text, both_schemes, new_picture
from benchmarks.report import load_results, write_atomically
from benchmarks.search.report import VARIANTS, least

COLUMNS = 3
#: extents of a panel's axes, of the space around them, and of the head with title and legend
WIDTH, HEIGHT = 232, 150
LEFT, RIGHT, ABOVE, BELOW = 50, 22, 34, 40
HEAD = 70

#: variant -> class, and its marker as a path around (0, 0)
_LOOKS = {
    "forward enumeration": ("forwards", "M-3.2,0A3.2,3.2 0 1 0 3.2,0A3.2,3.2 0 1 0 -3.2,0Z"),
    "no order": ("order", "M-3,-3H3V3H-3Z"),
    "no expression test": ("test", "M0,-4L3.7,2.8H-3.7Z"),
}
#: class -> light, dark; text and series at least 4.5 to 1 against the paper
_COLOURS = {
    **COLOURS,
    "saturation": ("#0550ae", "#79c0ff"),
    "forwards": ("#116329", "#56d364"),
    "order": ("#953800", "#f0883e"),
    "test": ("#6639ba", "#d2a8ff"),
}


@dataclass(frozen=True)
class _Panel:
    """Coordinates for the data of one program: numbers of operators and of states."""

    x: Callable[[float], float]
    y: Callable[[float], float]


def render(results: dict[str, Any]) -> str:
    """The SVG of the results of an ablation."""
    cases = results["cases"]
    columns = min(COLUMNS, len(cases))
    width = columns * (LEFT + WIDTH + RIGHT)
    height = HEAD + ceil(len(cases) / columns) * (ABOVE + HEIGHT + BELOW)
    svg = new_picture("States of the search by operators of a program", _style(), width, height)
    _legend(svg, results)
    cells = [c for case in cases for c in case["cells"]]
    operators = (min(c["most"] for c in cells), max(c["most"] for c in cells))
    decades = ceil(log10(max(c["states"] for c in cells)))
    for n, case in enumerate(cases):
        left = n % columns * (LEFT + WIDTH + RIGHT) + LEFT
        top = HEAD + n // columns * (ABOVE + HEIGHT + BELOW) + ABOVE
        group = add(svg, "g", "ink", transform=f"translate({left},{top})")
        _panel(group, case, operators, decades)
    return as_text(svg)


def _style() -> str:
    """The style sheet: lines and markers take the colour of their class.
    A hollow marker has that of the paper."""
    return (
        "text { font: 12px system-ui, sans-serif; }\n"
        ".head { font-size: 15px; font-weight: 600; } .name { font-weight: 600; }\n"
        f"{FILLED}"
        ".line, .mark, .hollow { stroke: currentColor; }\n"
        ".line { fill: none; } .series { stroke-width: 1.6; } .saturation { stroke-width: 2.6; }\n"
        + both_schemes(_COLOURS, fills={"hollow": "paper"})
    )


def _legend(svg: ElementTree.Element, results: dict[str, Any]) -> None:
    add(svg, "text", "ink head", "States by operators of a program", x=LEFT, y=24)
    circle = _LOOKS["forward enumeration"][1]
    entries = [
        ("saturation: classes", "saturation", "", ""),
        *((variant, look, path, "mark") for variant, (look, path) in _LOOKS.items()),
        (f"not finished after {results['limit_s']:g} s", "", circle, "ink hollow"),
    ]
    x = float(LEFT)
    for text, look, path, marker in entries:
        if look:
            add(svg, "path", f"{look} series line", d=f"M{x:.1f},46h22")
        if path:
            _mark(svg, f"{look} {marker}", path, x + 11, 46)
        add(svg, "text", "ink", text, x=x + 28, y=50)
        x += 46 + 6.4 * len(text)


def _mark(parent: ElementTree.Element, name: str, path: str, x: float, y: float) -> None:
    add(parent, "path", name.strip(), d=path, transform=f"translate({x:.1f},{y:.1f})")


def _panel(
    group: ElementTree.Element, case: dict[str, Any], operators: tuple[int, int], decades: int
) -> None:
    first, last = operators
    panel = _Panel(
        lambda n: (n - first) / max(1, last - first) * WIDTH,
        lambda states: HEIGHT - log10(max(1.0, states)) / decades * HEIGHT,
    )
    title = f"{case['program']} (needs {least(case)})"
    add(group, "text", "ink name", title, x=0, y=-12)
    for decade in range(decades + 1):
        y = panel.y(10.0**decade)
        add(group, "path", f"{'grid' if decade else 'ink'} line", d=f"M0,{y:.1f}H{WIDTH}")
        if decade % 2 == 0:
            add(group, "text", "ink", _power(decade), x=-8, y=y + 4, text_anchor="end")
    for n in range(first + (first + 1) % 2, last + 1, 2):
        add(group, "text", "ink", str(n), x=panel.x(n), y=HEIGHT + 16, text_anchor="middle")
    below = {"x": WIDTH / 2, "y": HEIGHT + 32, "text_anchor": "middle"}
    add(group, "text", "ink", "operators at most", **below)
    y = panel.y(case["saturation"]["classes"])
    add(group, "path", "saturation series line", d=f"M0,{y:.1f}H{WIDTH}")
    for variant in VARIANTS:
        _series(group, [c for c in case["cells"] if c["variant"] == variant], panel)


def _power(decade: int) -> str:
    return "1" if decade == 0 else "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(d)] for d in str(decade))


def _series(group: ElementTree.Element, cells: Sequence[dict[str, Any]], panel: _Panel) -> None:
    """A line with a marker for each run; a run that was stopped is a lower bound, and hollow."""
    look, path = _LOOKS[cells[0]["variant"]]
    points = [(panel.x(c["most"]), panel.y(c["states"])) for c in cells]
    line = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    add(group, "path", f"{look} series line", d=f"M{line}")
    for (x, y), cell in zip(points, cells, strict=True):
        _mark(group, f"{look} {'mark' if cell['finished'] else 'hollow'}", path, x, y)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.search.plot``; 0 when there is a picture, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.plot")
    parser.add_argument("results", type=Path, help="JSON of `python -m benchmarks ablation`")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    arguments = parser.parse_args(argv)
    try:
        results = load_results(arguments.results)
        if results.get("kind") != "ablation":
            raise ValueError(f"{arguments.results}: not the results of an ablation")
        write_atomically(arguments.svg, render(results))
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
