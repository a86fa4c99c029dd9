"""The part of a page about one kernel: its computation, figures, the drawing."""

from __future__ import annotations

from typing import Protocol

from cutesuper.ir.block import LOAD, AxisKind, BlockProgram, MuGraph
from cutesuper.ir.dims import Symbol, extent, show_shape, size
from cutesuper.ir.outline import show_bytes
from cutesuper.show.page_block import BlockDrawing, family, look_of
from cutesuper.show.page_formula import formulas
from cutesuper.show.page_parts import Html, count, el, meter, micros, scroll, table
from cutesuper.show.page_values import loaded, value_notes

#: names for the causes of a cost
CAUSES = {
    "memory": "device memory",
    "l2": "L2 cache",
    "ingest": "loads per SM",
    "tensor": "tensor cores",
    "lanes": "arithmetic",
    "launch": "launch",
    "ramp": "start-up, waves",
    "exchange": "cluster exchange",
}
#: parts below this many microseconds are not shown
LEAST_US = 0.005


class Priced(Protocol):
    """Expected cost of a kernel, microseconds; ``total`` need not be the sum of the parts."""

    @property
    def total(self) -> float: ...

    @property
    def parts(self) -> dict[str, float]: ...


def launches(mu: MuGraph) -> str:
    """``96 thread blocks``; for several kernels the number of each."""
    blocks = [f"{s.program.blocks():,}" for s in mu.steps]
    return f"{' + '.join(blocks)} thread block{'' if blocks == ['1'] else 's'}"


def bytes_of(mu: MuGraph, name: str) -> int:
    """Size of a tensor in device memory; symbols count with their hint."""
    t = mu.tensors[name]
    return size(t.shape) * t.dtype.itemsize


def kernel_card(mu: MuGraph, k: int, title: str, cost: Priced | None, notes: str) -> Html:
    """The card with everything about kernel ``k``.

    Args:
        mu: the muGraph.
        k: position of the kernel.
        title: its computation, in a few words.
        cost: its expected cost, if known.
        notes: text that is shown unchanged.
    """
    step = mu.steps[k]
    drawing = BlockDrawing(mu, step, k)
    panels = [_dimensions(step.program), _memory(mu, k)]
    if cost is not None:
        panels.append(_time(cost))
    heading = el("h2", el("span", step.name, class_=f"badge kc{k % 6}"), " ", title)
    return el(
        "section",
        el("header", heading, _chips(step.program)),
        el("pre", "\n".join(formulas(step.program)), class_="formula"),
        el("div", *panels, class_="panels"),
        _stage(drawing),
        _text(step.program, notes),
        class_="card kernel-card",
        id=f"kernel-{k}",
    )


def _chips(program: BlockProgram) -> Html:
    """The launch of a kernel, in a line."""
    chips = [count(program.blocks(), "thread block")]
    words = {AxisKind.CLUSTER: "clusters of {}", AxisKind.PERSISTENT: "{} tiles in turn",
             AxisKind.LOOP: "{} iterations"}  # fmt: skip
    chips += [
        f"{'about ' * (a.extent is None)}{words[a.kind].format(program.parts(a))} ({a.name})"
        for a in program.axes
        if a.kind in words and program.parts(a) > 1
    ]
    return el("ul", *(el("li", c) for c in chips), class_="chips")


def _dimensions(program: BlockProgram) -> Html:
    """The division of every label, from the grid down to the tile."""
    kinds = [kind for kind in AxisKind if program.of_kind(kind)]
    rows: list[list[str]] = []
    for dim, whole in program.dims.items():
        by_kind = {a.kind: a for a in program.axes_of(dim)}
        parts = [f"{program.parts(by_kind[k]):,}" if k in by_kind else "·" for k in kinds]
        shown = f"{whole} ≈ {extent(whole)}" if isinstance(whole, Symbol) else f"{whole:,}"
        note = " padded" if program.ragged(dim) and not isinstance(whole, Symbol) else ""
        tile = el("td", f"{program.tile[dim]:,}", el("small", note), class_="num tile")
        cells = [el("td", c, class_="num") for c in (shown, *parts)]
        rows.append([el("td", el("b", dim)), *cells, tile])
    head = ["Label", "Extent", *(str(k) for k in kinds), "tile"]
    return _panel("How dimensions are divided", table("how dimensions are divided", head, rows))


def _memory(mu: MuGraph, k: int) -> Html:
    """The tensors that are read and written, and the bytes moved for each."""
    step = mu.steps[k]
    names = list(dict.fromkeys((*step.reads, *step.writes)))
    number = {name: i for i, name in enumerate(mu.tensors)}
    moved = {n: bytes_of(mu, n) if n in step.writes else 0 for n in names}
    for i, op in enumerate(step.program.ops):
        if op.kind == LOAD:
            name = str(op.attributes["tensor"])
            moved[name] += loaded(step.program, i, mu.tensors[name].dtype.itemsize)
    rows = [
        [
            el("td", "writes" if n in step.writes else "reads", class_="faint"),
            el("td", el("b", n), " ", el("small", show_shape(mu.tensors[n].shape)),
               data_tensor=number[n]),
            el("td", show_bytes(bytes_of(mu, n)), class_="num"),
            el("td", show_bytes(moved[n]), class_="num"),
        ]
        for n in names
    ]  # fmt: skip
    rows.append(
        [
            el("td"),
            el("td", el("b", "in total")),
            el("td", el("b", show_bytes(sum(bytes_of(mu, n) for n in names))), class_="num"),
            el("td", show_bytes(sum(moved.values())), class_="num"),
        ]
    )
    head = ["", "Tensor", "Device memory", "All blocks"]
    note = "Device memory: every tensor once. All blocks: what they ask for, repeats come from L2."
    shown = table("what it moves", head, rows)
    return _panel("What it moves", shown, el("p", note, class_="faint small"))


def _time(cost: Priced) -> Html:
    """A bar for every cause, longest first."""
    parts = {k: v for k, v in cost.parts.items() if v >= LEAST_US}
    most = max([cost.total, *parts.values()])
    bars = [
        meter(CAUSES.get(k, k), v, most, micros(v), f"cause-{k if k in CAUSES else 'other'}")
        for k, v in sorted(parts.items(), key=lambda item: -item[1])
    ]
    note = el("p", "Causes overlap: the total is not their sum.", class_="faint small")
    total = meter("predicted", cost.total, most, micros(cost.total), "total")
    return _panel("Where time is predicted to go", total, *bars, note)


def _panel(title: str, *content: Html) -> Html:
    return el("div", el("h3", title), *content, class_="panel")


def _stage(drawing: BlockDrawing) -> Html:
    """The drawing, and beside it the notes on the selected value."""
    hint = (
        "Point at a value to see where it comes from and where it goes; click or press Enter to "
        "keep it. Arrow keys walk along values, Escape lets go."
    )
    notes = el(
        "aside", el("p", hint, class_="hint"), *value_notes(drawing),
        class_="notes", aria_live="polite", aria_label="the selected value",
    )  # fmt: skip
    families = dict.fromkeys(family(drawing.kind(k)) for k in drawing.row if k.what == "op")
    legend = [
        el("li", el("i", class_=f"key {look_of(f)}", aria_hidden="true"), f) for f in families
    ]
    return el(
        "div",
        el("div", scroll(f"drawing of kernel {drawing.step.name}", drawing.draw()),
           el("ul", *legend, class_="legend"), class_="canvas"),
        notes,
        class_="stage",
    )  # fmt: skip


def _text(program: BlockProgram, notes: str) -> Html:
    """The program and the notes as text, folded."""
    from cutesuper.ir.text import program_text

    texts = {"Block program as text": program_text(program), "Plan and compiled kernel": notes}
    return el(
        "div",
        *(
            el("details", el("summary", name), scroll(name, el("pre", text)))
            for name, text in texts.items()
            if text
        ),
        class_="texts",
    )
