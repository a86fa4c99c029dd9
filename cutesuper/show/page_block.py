"""A kernel's block program as a drawing: device memory, the block, its loops, tiles on the edges.

Below every box are the tile of its value and the axes over which that is a partial result; next to
a tensor are the axes that divide it. Pages and pictures show the same drawing.
"""

from __future__ import annotations

from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    ENDING,
    GRID_REDUCE,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    KernelStep,
    MuGraph,
)
from cutesuper.ir.check import check_block_program
from cutesuper.ir.dims import show_shape, size
from cutesuper.ir.operators.base import facets
from cutesuper.ir.outline import phrase, show_bytes
from cutesuper.show.page_drawing import edge, line, node, pill, pill_width, svg
from cutesuper.show.page_parts import Html, count, el, shorten, tile_text
from cutesuper.show.panel import BOX, LABEL, TENSOR, Key, Panel
from cutesuper.show.svg_elements import LARGE, SMALL, text_width

#: around the drawing
MARGIN = 28
#: characters of an operation's title: ``10 cluster rescaled sum over K.cluster`` has 38
LONGEST_PHRASE = 40
#: kinds of work of an operation
FAMILIES = (
    "memory", "matrix product", "reduction", "element-wise", "accumulator", "cluster", "grid",
)  # fmt: skip


class BlockDrawing(Panel):
    """The drawing of kernel ``number`` of a muGraph.

    Raises:
        GraphError: the program is illegal.
    """

    def __init__(self, mu: MuGraph, step: KernelStep, number: int) -> None:
        self.number = number
        self.states = check_block_program(step.program)
        self.tensor_numbers = {name: i for i, name in enumerate(mu.tensors)}
        super().__init__(mu, step)

    # -------------------------------------------------------------------------------- texts

    def id(self, key: Key) -> str:
        """Id of a box in the page: ``k0-3``, an operation, ``k0-r1`` and ``k0-w0``, tensors."""
        if key.what == "op":
            return f"k{self.number}-{key.name}"
        names = self.step.reads if key.what == "read" else self.step.writes
        return f"k{self.number}-{key.what[0]}{names.index(str(key.name))}"

    def title(self, key: Key) -> str:
        """Title of a box: ``2 matmul over K``, ``X [16, 4096]``."""
        if key.what == "op":
            assert isinstance(key.name, int)
            return f"{key.name} {phrase(self.program, key.name)}"
        t = self.mu.tensors[str(key.name)]
        return f"{t.name} {show_shape(t.shape)}"

    def shown(self, key: Key) -> str:
        """The title, shortened to fit into the box."""
        if key.what == "op":
            return shorten(self.title(key), LONGEST_PHRASE)
        name = str(key.name)
        return f"{shorten(name)} {show_shape(self.mu.tensors[name].shape)}"

    def below(self, key: Key) -> list[tuple[str, str]]:
        """Lines below a box, with their classes."""
        if key.what != "op" or self.kind(key) == "store":
            return []
        op, state = self.program.ops[int(str(key.name))], self.states[int(str(key.name))]
        lines = [(tile_text(self.program.tile, op.dims), "tile")]
        if state.pending:
            lines.append((f"partial: {', '.join(sorted(state.pending))}", "pending"))
        return lines

    def shared_out(self, key: Key) -> str:
        """The axes between a tensor and the tile of it that a block moves: ``K.loop(16)``."""
        ops = self.program.loads() if key.what == "read" else self.program.stores()
        ways: dict[str, None] = {}
        for op in ops:
            if op.attributes["tensor"] == key.name:
                axes = [a for d in op.dims for a in self.program.axes_of(d)]
                named = [self.program.axis(d) for d in op.attributes["map"] if d and "." in d]
                ways[self.axes_text([*named, *axes]) or "all of it"] = None
        return " | ".join(ways)

    def kind(self, key: Key) -> str:
        """Kind of an operation."""
        return self.program.ops[int(str(key.name))].kind

    def width(self, key: Key) -> float:
        """Width of a box with the texts above and below it."""
        beside = [text_width(t, SMALL) for t, _ in self.below(key)]
        if key.what != "op":
            beside.append(pill_width(self.shared_out(key)))
        return max([self.box_width(key), *beside])

    def box_width(self, key: Key) -> float:
        """Width of a box itself."""
        texts = [text_width(self.shown(key), LARGE)]
        if key.what != "op":
            texts.append(text_width(self.storage(key), SMALL))
        return max(texts) + 22

    def storage(self, key: Key) -> str:
        """Element type and size of a tensor."""
        t = self.mu.tensors[str(key.name)]
        return f"{t.dtype}  {show_bytes(size(t.shape) * t.dtype.itemsize)}"

    def heading(self) -> str:
        """The text on the upper edge of the block: ``one of 48 blocks  N.grid(48)``."""
        p = self.program
        axes = self.axes_text([*p.of_kind(AxisKind.GRID), *p.of_kind(AxisKind.CLUSTER)])
        return f"one of {count(p.blocks(), 'block')}  {axes}".rstrip()

    def axes_text(self, axes: list[Axis]) -> str:
        """``N.grid(48) K.cluster(2)``; an axis of one part divides nothing and is left out."""
        parts = {a.name: self.program.parts(a) for a in axes}
        return " ".join(f"{name}({n})" for name, n in parts.items() if n > 1)

    def lines_below(self, key: Key) -> int:
        """Number of lines of text below a box."""
        return len(self.below(key))

    def role(self, key: Key) -> str:
        """The role of a tensor in the program: ``input``, ``between kernels``."""
        name = str(key.name)
        if (part := self.mu.tensors[name].part) is not None:
            return f"part of {part.of}"
        if name in self.mu.inputs:
            return "constant input" if self.mu.tensors[name].constant else "input"
        return "output" if name in self.mu.outputs else "between kernels"

    # ------------------------------------------------------------------------------ drawing

    def draw(self) -> Html:
        """The drawing as one element."""
        moved = f"translate({MARGIN - self.left:.1f} {MARGIN:.1f})"
        inner = el("g", *self.shapes(), transform=moved)
        width, height = self.right - self.left + 2 * MARGIN, self.height + 2 * MARGIN
        return svg(f"block program of kernel {self.step.name}", width, height, [inner])

    def shapes(self) -> list[Html]:
        """The elements of the drawing in its own coordinates, those on top last."""
        top, bottom = self.ends
        left, right = self.box
        places = [("block", left, top, right, bottom, self.heading())]
        places += [
            ("loop", f.left, self.top(f), f.right, self.bottom(f), f.title)
            for f in reversed(self.frames)
        ]
        frames = [_frame(look, a, b, c, d) for look, a, b, c, d, _ in places]
        titles = [  # over the edges
            pill(title, a + 12 + pill_width(title) / 2, b - 8, f"title {look}")
            for look, a, b, _, _, title in places
        ]
        edges = [self._edge(a, b) for a, b in self.edges]
        order = sorted(self.row, key=lambda k: (self.row[k], self.x[k]))
        return [*frames, *edges, *titles, *map(self._node, order)]

    def _edge(self, a: Key, b: Key) -> Html:
        (x, y), *rest = self.points(a, b)
        start = y + LABEL * len(self.below(a)) + (4 if a.what == "op" else 27)
        return edge(self.id(a), self.id(b), [(x, start), *rest])

    def _node(self, key: Key) -> Html:
        x, y, w = self.x[key], self.y[self.row[key]], self.box_width(key)
        parts = [el("title", self.title(key))]
        if key.what == "op":
            kind = self.kind(key)
            look = look_of(family(kind))
            radius = BOX / 2 if kind in ENDING else 6
            parts += [
                el("rect", class_="shape", x=x - w / 2, y=y, width=w, height=BOX, rx=radius),
                line(self.shown(key), x, y + 18.5, "large"),
            ]
            parts += [
                line(text, x, y + BOX + 13 + LABEL * k, f"small {way}")
                for k, (text, way) in enumerate(self.below(key))
            ]
            parts.insert(1, self._target(key, y, BOX + 4 + LABEL * len(self.below(key))))
            return node(self.id(key), parts, look, self._spoken(key))
        pill_y = y + (TENSOR + 12 if key.what == "read" else -33)
        parts += [
            el("rect", class_="shape", x=x - w / 2, y=y, width=w, height=TENSOR, rx=3),
            line(self.shown(key), x, y + 19, "large"),
            line(self.storage(key), x, y + 35, "small"),
            pill(self.shared_out(key), x, pill_y, "axes"),
        ]
        parts.insert(1, self._target(key, min(y, pill_y), TENSOR + 33))
        number = self.tensor_numbers[str(key.name)]
        look = f"tensor {look_of(self.role(key))}"
        return node(self.id(key), parts, look, self._spoken(key), tensor=number)

    def _target(self, key: Key, y: float, height: float) -> Html:
        """The area of a box and its texts, without gaps, that reacts to the pointer."""
        w = self.width(key)
        return el("rect", class_="hit", x=self.x[key] - w / 2, y=y, width=w, height=height)

    def _spoken(self, key: Key) -> str:
        if key.what != "op":
            role = "read from" if key.what == "read" else "written to"
            return f"tensor {self.title(key)}, {role} device memory, {self.shared_out(key)}"
        return ", ".join([self.title(key), *(text for text, _ in self.below(key))])


def _frame(look: str, left: float, top: float, right: float, bottom: float) -> Html:
    """The box of a block or a loop."""
    return el(
        "rect", class_=f"frame {look}", x=left, y=top, width=right - left, height=bottom - top,
        rx=10,
    )  # fmt: skip


def family(kind: str) -> str:
    """The kind of work of an operation, one of `FAMILIES`."""
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


def look_of(name: str) -> str:
    """The class of a kind of work or a role in the style sheet."""
    return name.replace(" ", "-")
