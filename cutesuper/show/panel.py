"""Places in a drawing of a kernel: rows of boxes, boxes of loops, paths of edges.

From top to bottom: the tensors that a kernel reads, the kernel (a box with its operations, those
that run in the loop in an inner box), the tensors that it writes. Rows are computed here, positions
within them by `cutesuper.show.layered`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

from cutesuper.ir.block import LOAD, STORE, KernelStep, MuGraph
from cutesuper.ir.outline import Section, loop_titles, sections
from cutesuper.show.layered import Item, Layout, place
from cutesuper.show.svg_elements import SMALL, text_width

#: a line of text below a box
LABEL = 13
#: heights of boxes, the room between rows, around loops and above the first row
BOX, TENSOR, ROW_GAP, GAP, PAD, TITLE, HEADER, LANE = 28, 44, 64, 20, 16, 24, 34, 14
#: height of a box and the texts below it that edges avoid
SOLID = BOX + 2 * LABEL + 4


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


class Panel(ABC):
    """One kernel with the tensors it reads and writes, in its own coordinates (top is 0).

    Attributes:
        row: row of every operation and tensor; ``x``: their centres; ``y``: the tops of rows.
        box: left and right edge of the kernel; its upper and lower edge are ``ends``.
    """

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

    @abstractmethod
    def width(self, key: Key) -> float:
        """Width of a box with the texts above and below it."""

    @abstractmethod
    def heading(self) -> str:
        """The text on the upper edge of the block."""

    @abstractmethod
    def lines_below(self, key: Key) -> int:
        """Number of lines of text below a box."""

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
        tops, y = [0.0], TENSOR + ROW_GAP + HEADER
        before: list[str] = []
        last = len(self.section_of_row) - 1
        for row in range(1, last):
            loops = self._loops(row)
            closed = sum(a not in loops for a in before)
            y += closed * PAD + sum(a not in before for a in loops) * (TITLE + PAD / 2)
            tops.append(y)
            y += BOX + ROW_GAP
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
        missing = text_width(self.heading(), SMALL) + 2 * PAD - (right - left)
        self.box = (left - max(missing, 0) / 2, right + max(missing, 0) / 2)
        everything = [(self.x[k] - half[k], self.x[k] + half[k]) for k in self.row]
        self.left = min([self.box[0], *(a for a, _ in everything)])
        self.right = max([self.box[1], *(b for _, b in everything)])
        self.height = self.y[-1] + TENSOR
        lowest = [self.bottom(f) + PAD / 2 for f in self.frames]
        self.ends = (TENSOR + ROW_GAP - 6, max([self.y[-1] - ROW_GAP + PAD / 2, *lowest]))
        self.reads = {str(k.name): self.x[k] for k in self.row if k.what == "read"}
        self.writes = {str(k.name): self.x[k] for k in self.row if k.what == "write"}

    def _row_of(self, key: Key) -> int:
        return key.name[2] if key.what == "bend" and isinstance(key.name, tuple) else self.row[key]

    # --------------------------------------------------------------------------- where things are

    def top(self, frame: Frame) -> float:
        """The upper edge of a loop's box."""
        first = frame.rows[0]
        inner = sum(f.rows[0] == first for f in self.frames if len(f.rows) < len(frame.rows))
        return self.y[first] - TITLE - inner * (TITLE + PAD / 2)

    def bottom(self, frame: Frame) -> float:
        """The lower edge of a loop's box, below the texts of its last row."""
        outer = self._depth(frame) and self._ends_with(frame)
        lines = max(self.lines_below(k) for k, row in self.row.items() if row == frame.rows[-1])
        return self.y[frame.rows[-1]] + BOX + PAD + (PAD if outer else 0) + LABEL * lines

    def _depth(self, frame: Frame) -> int:
        return sum(f.rows[0] in frame.rows for f in self.frames if f is not frame)

    def _ends_with(self, frame: Frame) -> bool:
        return any(f.rows[-1] == frame.rows[-1] for f in self.frames if f is not frame)

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
            points += [(self.x[key], top), (self.x[key], self.y[row] + SOLID)]
        return [*points, (self.x[b], self.y[self.row[b]] - 5)]
