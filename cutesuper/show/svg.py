"""A muGraph as a picture: kernels, the loop inside them, tiles on the edges; plain SVG.

From top to bottom: the tensors that a kernel reads, the kernel (a box with its operations, those
that run in the loop in an inner box), the tensors that it writes. Rows are computed here, positions
within them by `cutesuper.show.layered`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    KernelStep,
    MuGraph,
)
from cutesuper.ir.dims import show_shape, size
from cutesuper.ir.operators.base import facets
from cutesuper.ir.outline import (
    Section,
    loop_titles,
    phrase,
    sections,
    show_bytes,
    tile_of,
)
from cutesuper.show.layered import Item, Layout, place
from cutesuper.show.svg_elements import FAINT, INK, bar, curve, dotted, rect, text, text_width

BOX, TENSOR, ROW_GAP, GAP, PAD, TITLE, HEADER, LANE, MARGIN = 28, 44, 44, 20, 16, 24, 74, 14, 28
#: kind -> (fill, stroke)
COLOURS = {
    "memory": ("#e0edff", "#3b74c9"),
    "matrix product": ("#ffe6cf", "#d9730d"),
    "reduction": ("#fff4c7", "#b38600"),
    "element-wise": ("#f3f5f8", "#7a8699"),
    "accumulator": ("#ece6ff", "#7b57d6"),
    "cluster": ("#ffe1ef", "#c73277"),
    "grid": ("#d9f3f7", "#16808f"),
}
TENSORS = {
    "input": ("#e3f6ec", "#2c8f5e"),
    "constant input": ("#d3efe9", "#1f7d74"),
    "between kernels": ("#f4f0e6", "#94804a"),
    "output": ("#e3f6ec", "#2c8f5e"),
}


def mugraph_svg(mu: MuGraph) -> str:
    """The picture as one self-contained SVG document.

    Raises:
        GraphError: a program is illegal.
    """
    panels = [Panel(mu, step) for step in mu.steps]
    legend = _legend()
    width = max([p.right - p.left for p in panels] + [legend.width]) + 2 * MARGIN
    y, shapes = float(MARGIN), _Shapes()
    tensors: dict[str, tuple[float, float]] = {}
    for panel in panels:
        dx = (width - (panel.right - panel.left)) / 2 - panel.left
        drawn = panel.draw()
        for name, x in panel.reads.items():
            if name in tensors:  # the same memory, drawn again where it is read
                shapes.under.append(dotted(*tensors[name], x + dx, y))
        tensors |= {n: (x + dx, y + panel.height) for n, x in panel.writes.items()}
        shapes.under.append(f'<g transform="translate({dx:.1f} {y:.1f})">{drawn}</g>')
        y += panel.height + 1.5 * MARGIN
    shapes.under.append(
        f'<g transform="translate({(width - legend.width) / 2:.1f} {y:.1f})">{legend.drawn}</g>'
    )
    y += legend.height + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y:.0f}" '
        f'width="{width:.0f}" height="{y:.0f}" font-family="ui-monospace, SFMono-Regular, Menlo, '
        f'Consolas, \'DejaVu Sans Mono\', monospace" fill="{INK}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{shapes}\n</svg>\n'
    )


@dataclass
class _Shapes:
    """SVG elements in three layers: edges lie under boxes, boxes under labels."""

    under: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self.under, *self.boxes, *self.labels])


@dataclass(frozen=True)
class Key:
    """A node: an operation, a tensor that is read or written, or a bend of an edge."""

    what: str
    name: Hashable


@dataclass
class Frame:
    """The box of one walk over a loop: its title, rows it covers, and its horizontal extent."""

    title: str
    rows: list[int]
    left: float = 0.0
    right: float = 0.0


class Panel:
    """One kernel with the tensors it reads and writes, in its own coordinates (top is 0).

    Subclasses may draw the same positions with other distances, texts and colours.

    Attributes:
        row_gap: between two rows of boxes.
        solid: height of a box and the texts below it that edges avoid.
        header: height between the kernel's upper edge and its first row.
        row: row of every operation and tensor; ``x``: their centres; ``y``: the tops of rows.
        box: left and right edge of the kernel; its upper and lower edge are ``ends``.
    """

    row_gap: float = ROW_GAP
    solid: float = BOX
    header: float = HEADER

    def __init__(self, mu: MuGraph, step: KernelStep) -> None:
        self.mu, self.step, self.program = mu, step, step.program
        self.parts = sections(self.program)
        self.row: dict[Key, int] = {}
        self.section_of_row: list[Section | None] = [None]
        self._assign_rows()
        self.edges = self._edges()
        self.bends = {e: self._bends(*e) for e in self.edges}
        self.layout = self._place()
        self.y = self._row_tops()
        self.frames = self._frames()
        self.x = {k: v for k, v in self.layout.x.items() if isinstance(k, Key)}
        self._frame_columns()
        self._measure()

    # ---------------------------------------------------------------------------------- rows

    def _assign_rows(self) -> None:
        self.row |= {Key("read", n): 0 for n in self.step.reads}
        for section in self.parts:
            first = len(self.section_of_row)
            rank: dict[int, int] = {}
            for i in section.ops:
                inner = [rank[j] + 1 for j in self.program.ops[i].inputs if j in rank]
                rank[i] = max(inner, default=0)
                self.row[Key("op", i)] = first + rank[i]
            self.section_of_row += [section] * (max(rank.values()) + 1)
        self.row |= {Key("write", n): len(self.section_of_row) for n in self.step.writes}
        self.section_of_row.append(None)

    def _edges(self) -> list[tuple[Key, Key]]:
        edges: dict[tuple[Key, Key], None] = {}
        for i, op in enumerate(self.program.ops):
            me = Key("op", i)
            if me not in self.row:
                continue
            if op.kind == LOAD:
                edges[Key("read", op.attributes["tensor"]), me] = None
            for j in op.inputs:
                if Key("op", j) in self.row:
                    edges[Key("op", j), me] = None
            if op.kind == STORE:
                edges[me, Key("write", op.attributes["tensor"])] = None
        return list(edges)

    def _bends(self, a: Key, b: Key) -> list[tuple[Key, int]]:
        rows = range(self.row[a] + 1, self.row[b])
        return [(Key("bend", (a, b, r)), r) for r in rows]

    def _lane(self, a: Key, b: Key, row: int) -> str | None:
        """The loop that the edge has to go around in this row."""
        mine = {*self._loops(self.row[a]), *self._loops(self.row[b])}
        return next((loop for loop in self._loops(row) if loop not in mine), None)

    def _loops(self, row: int) -> list[str]:
        """Titles of the walks over loops that a row is in, outermost first."""
        section = self.section_of_row[row]
        return loop_titles(self.program, section) if section else []

    # --------------------------------------------------------------------------------- columns

    def _place(self) -> Layout:
        rows: list[list[Item]] = [[] for _ in self.section_of_row]
        for key, row in self.row.items():
            rows[row].append(Item(key, self.width(key)))
        pairs: list[tuple[Hashable, Hashable]] = []
        for (a, b), bends in self.bends.items():
            chain: list[Key | None] = [a]
            for key, row in bends:
                aside = self._lane(a, b, row) is not None
                chain.append(None if aside else key)
                if not aside:
                    rows[row].append(Item(key, 2.0, weight=6.0))
            chain.append(b)
            pairs += [(p, q) for p, q in pairwise(chain) if p and q]
        return place(rows, pairs, GAP)

    def width(self, key: Key) -> float:
        """Width of a node with its texts."""
        (line, large), (second, small) = self._lines(key)
        if key.what == "op":  # the tile is to the right of the edge that leaves the middle
            return max(text_width(line, large) + 20, 2 * (text_width(second, small) + 6))
        return max(text_width(line, large), text_width(second, small)) + 20

    def _lines(self, key: Key) -> list[tuple[str, float]]:
        """Text of a node with font sizes; the last line of an operation is under its box."""
        if key.what == "op":
            assert isinstance(key.name, int)
            op = self.program.ops[key.name]
            return [
                (f"{key.name} {phrase(self.program, key.name)}", 12.0),
                (tile_of(self.program, op), 10.0),
            ]
        t = self.mu.tensors[str(key.name)]
        count = show_bytes(size(t.shape) * t.dtype.itemsize)
        return [(f"{t.name} {show_shape(t.shape)}", 12.0), (f"{t.dtype}  {count}", 10.0)]

    def _frames(self) -> list[Frame]:
        """Loop boxes, innermost first."""
        found: dict[str, Frame] = {}
        for row in range(len(self.section_of_row)):
            for loop in self._loops(row):
                found.setdefault(loop, Frame(loop, [])).rows.append(row)
        return sorted(found.values(), key=lambda f: len(f.rows))

    def _frame_columns(self) -> None:
        half = {i.key: i.width / 2 for row in self.layout.rows for i in row}
        done: list[Frame] = []
        for frame in self.frames:
            keys = [i.key for r in frame.rows for i in self.layout.rows[r]]
            inner = [f for f in done if f.rows[0] in frame.rows]
            lanes = [self.x[k] for k in self.x if k.what == "lane" and self._in_lane(k, frame)]
            lefts = [self.layout.x[k] - half[k] for k in keys] + [f.left for f in inner]
            rights = [self.layout.x[k] + half[k] for k in keys] + [f.right for f in inner] + lanes
            frame.left = min(lefts) - PAD
            title = text_width(frame.title, 11) + 20
            frame.right = max(max(rights) + PAD, frame.left + title)
            self._assign_lanes(frame)
            done.append(frame)

    def _in_lane(self, key: Key, frame: Frame) -> bool:
        return isinstance(key.name, tuple) and any(r in frame.rows for r in key.name[2])

    def _assign_lanes(self, frame: Frame) -> None:
        count = 0
        for (a, b), bends in self.bends.items():
            rows = [r for _, r in bends if self._lane(a, b, r) == frame.title]
            if rows:
                count += 1
                x = frame.right + LANE * count
                self.x[Key("lane", (a, b, tuple(rows)))] = x
                self.x |= {k: x for k, r in bends if r in rows}

    # -------------------------------------------------------------------------- measurements

    def _row_tops(self) -> list[float]:
        """The y of every row's box; tensors are the first and the last row."""
        tops, y = [0.0], TENSOR + self.row_gap + self.header
        before: list[str] = []
        last = len(self.section_of_row) - 1
        for row in range(1, last):
            loops = self._loops(row)
            closed = sum(a not in loops for a in before)
            y += closed * PAD + sum(a not in before for a in loops) * (TITLE + PAD / 2)
            tops.append(y)
            y += BOX + self.row_gap
            before = loops
        return [*tops, y + len(before) * PAD + PAD / 2]

    def _measure(self) -> None:
        half = {i.key: i.width / 2 for row in self.layout.rows for i in row}
        inner = [k for k in half if isinstance(k, Key) and 0 < self._row_of(k) < len(self.y) - 1]
        lanes = [x for k, x in self.x.items() if k.what == "lane"]
        left = min([self.x[k] - half[k] for k in inner] + [f.left for f in self.frames]) - PAD
        right = (
            max([self.x[k] + half[k] for k in inner] + [f.right for f in self.frames] + lanes) + PAD
        )
        missing = max(text_width(t, s) for t, s in self.heading()) + 2 * PAD - (right - left)
        self.box = (left - max(missing, 0) / 2, right + max(missing, 0) / 2)
        everything = [(self.x[k] - half[k], self.x[k] + half[k]) for k in self.row]
        self.left = min([self.box[0], *(a for a, _ in everything)])
        self.right = max([self.box[1], *(b for _, b in everything)])
        self.height = self.y[-1] + TENSOR
        self.ends = (TENSOR + self.row_gap - 6, self.y[-1] - self.row_gap + PAD / 2)
        self.reads = {str(k.name): self.x[k] for k in self.row if k.what == "read"}
        self.writes = {str(k.name): self.x[k] for k in self.row if k.what == "write"}

    def _row_of(self, key: Key) -> int:
        return key.name[2] if key.what == "bend" and isinstance(key.name, tuple) else self.row[key]

    def heading(self) -> list[tuple[str, float]]:
        """Lines above the first row, with font sizes."""
        p = self.program
        axes = "  ".join(f"{a.name} {p.parts(a)}" for a in p.axes)
        tile = "  ".join(f"{d} {e}" for d, e in p.tile.items())
        return [
            (f"kernel {self.step.name}", 14.0),
            (f"{p.blocks()} blocks   {axes}", 11.0),
            (f"tile {tile}", 11.0),
        ]

    # ------------------------------------------------------------------------------- drawing

    def draw(self) -> str:
        """The SVG elements of this panel."""
        out = _Shapes()
        top, bottom = self.ends
        left, right = self.box
        out.under.append(
            rect("kernel", left, top, right - left, bottom - top, ("#fbfcfe", "#5a6a80"), 10, 1.6)
        )
        out.boxes.append(bar(left, top, right - left, HEADER - 12, 10))
        for k, (line, points) in enumerate(self.heading()):
            weight = "bold" if k == 0 else "normal"
            out.labels.append(
                text(
                    line,
                    left + PAD,
                    top + 18 + 15 * k,
                    points,
                    "start",
                    INK if k == 0 else FAINT,
                    weight,
                )
            )
        for frame in reversed(self.frames):
            self._draw_frame(out, frame)
        for a, b in self.edges:
            out.under.append(curve(self.points(a, b)))
        for key in self.row:
            self._draw_node(out, key)
        return str(out)

    def _draw_frame(self, out: _Shapes, frame: Frame) -> None:
        top, last = self.top(frame), self.bottom(frame)
        out.under.append(
            rect(
                "loop",
                frame.left,
                top,
                frame.right - frame.left,
                last - top,
                ("#eef6f4" if self._depth(frame) else "#f2f0fb", "#9d8fd0"),
                8,
                1.2,
                "5 3",
            )
        )
        title = frame.title
        out.boxes.append(
            rect(
                "title",
                frame.left + 8,
                top - 8,
                text_width(title, 11) + 12,
                17,
                ("#ffffff", "#9d8fd0"),
                8,
                1,
            )
        )
        out.labels.append(text(title, frame.left + 14, top + 4, 11, "start", "#6249b3", "bold"))

    def top(self, frame: Frame) -> float:
        """The upper edge of a loop's box."""
        first = frame.rows[0]
        inner = sum(f.rows[0] == first for f in self.frames if len(f.rows) < len(frame.rows))
        return self.y[first] - TITLE - inner * (TITLE + PAD / 2)

    def bottom(self, frame: Frame) -> float:
        """The lower edge of a loop's box."""
        outer = self._depth(frame) and self._ends_with(frame)
        return self.y[frame.rows[-1]] + BOX + PAD + (PAD if outer else 0)

    def _depth(self, frame: Frame) -> int:
        return sum(f.rows[0] in frame.rows for f in self.frames if f is not frame)

    def _ends_with(self, frame: Frame) -> bool:
        return any(f.rows[-1] == frame.rows[-1] for f in self.frames if f is not frame)

    def _draw_node(self, out: _Shapes, key: Key) -> None:
        x, y, w = self.x[key], self.y[self.row[key]], self.width(key)
        (line, large), (second, small) = self._lines(key)
        if key.what == "op":
            assert isinstance(key.name, int)
            w = text_width(line, large) + 20
            kind = self.program.ops[key.name].kind
            radius = BOX / 2 if kind in ENDING else 4
            out.boxes.append(rect("op", x - w / 2, y, w, BOX, COLOURS[family(kind)], radius))
            out.labels.append(text(line, x, y + 18, large))
            if kind != STORE:
                out.labels.append(text(second, x + 6, y + BOX + 12, small, "start", FAINT))
            return
        out.boxes.append(rect("tensor", x - w / 2, y, w, TENSOR, TENSORS[self.role(key)], 3, 1.6))
        out.labels.append(text(line, x, y + 18, large, weight="bold"))
        out.labels.append(text(second, x, y + 34, small, colour=FAINT))

    def role(self, key: Key) -> str:
        """The role of a tensor in the program: a key of `TENSORS`."""
        name = str(key.name)
        if name in self.mu.inputs:
            return "constant input" if self.mu.tensors[name].constant else "input"
        return "output" if name in self.mu.outputs else "between kernels"

    def points(self, a: Key, b: Key) -> list[tuple[float, float]]:
        """The path of an edge: from box to box, around unrelated loops."""
        points = [(self.x[a], self.y[self.row[a]] + (BOX if a.what == "op" else TENSOR))]
        for key, row in self.bends[a, b]:
            loop = self._lane(a, b, row)
            # an edge is in its lane before the loop begins, so that it does not cross the title
            top = min(
                [
                    self.y[row],
                    *(self.top(f) - 4 for f in self.frames if f.title == loop and f.rows[0] == row),
                ]
            )
            points += [(self.x[key], top), (self.x[key], self.y[row] + self.solid)]
        return [*points, (self.x[b], self.y[self.row[b]] - 5)]


def family(kind: str) -> str:
    """The kind of work of an operation: a key of `COLOURS`."""
    named = {
        LOAD: "memory",
        STORE: "memory",
        ACCUMULATE: "accumulator",
        CLUSTER_REDUCE: "cluster",
        GRID_REDUCE: "grid",
    }
    operator = facets(kind)
    computed = "matrix product" if operator.contracts else "element-wise"
    return named.get(kind, "reduction" if operator.reduces else computed)


@dataclass(frozen=True)
class _Legend:
    drawn: str
    width: float
    height: float


def _legend() -> _Legend:
    x, shapes = 0.0, []
    for name, colours in COLOURS.items():
        shapes.append(rect("legend", x, 0, 14, 14, colours, 3))
        shapes.append(text(name, x + 20, 11, 10, "start", FAINT))
        x += 34 + text_width(name, 10)
    note = "under a box: the tile of its result that one block holds"
    shapes.append(text(note, 0, 32, 10, "start", FAINT))
    return _Legend("".join(shapes), x, 36)
