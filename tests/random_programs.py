"""Random small programs as a kernel graph and a muGraph at once: arithmetic, functions without
algebra, reductions, products, masks, lengths, labels, and conditions that keep and hide."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from cutesuper.ir.block import MuGraph
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from tests.mugraphs import Block, mugraph

#: sequences, rows, columns, columns of a product
EXTENTS = {"B": 4, "M": 6, "N": 8, "E": 4}
SPLITS: tuple[dict[str, int | None], ...] = (
    {}, {"M.grid": 3}, {"B.grid": 2, "M.grid": 2}, {"M.grid": 2, "M.persistent": 3},
    {"B.grid": 4, "N.loop": 2}, {"N.cluster": 2}, {"M.grid": 2, "N.loop": 4},
)  # fmt: skip
#: everywhere defined, so that what differs in numbers differs as functions
UNARY = ("silu", "relu", "tanh", "sigmoid", "square", "step", "exp", "erf", "gelu", "floor")
ARITHMETIC = ("add", "sub", "mul", "add", "sub", "mul", "div")
CHOICES = ("maximum", "at_least", "keep", "hide", "maximum", "keep", "hide")
MASKS = ("causal_mask", "length_mask", "pick")
NUMBERS = (0.5, 2.0, -1.0, 0.0, 1.0, 3.0, 1e-6)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph and the operation of the block program that makes it."""

    tensor: Tensor
    op: int
    labels: str


@dataclass
class Program:
    """A program while it grows; ``values`` holds what has been made."""

    rng: Random
    g: KernelGraph = field(default_factory=new_kernel_graph)
    values: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.axes = self.rng.choice(SPLITS)
        tile = dict(EXTENTS)
        for axis, parts in self.axes.items():
            label = axis[0]
            tile[label] = -(-tile[label] // (parts or 1))
        self.block = Block(dict(EXTENTS), dict(self.axes), tile)
        for name, labels in (("X", "BMN"), ("Y", "BMN"), ("R", "BM"), ("C", "N")):
            self._input(name, labels)
        self.lengths = self._integers("lengths", "B", (EXTENTS["B"],))
        self.labels = self._integers("labels", "BM", (EXTENTS["B"], EXTENTS["M"], 1))

    def _input(self, name: str, labels: str, shape: str = "BMN") -> Value:
        extents = tuple(EXTENTS[d] if d in labels else 1 for d in shape)
        tensor = self.g.new_input(extents, name=name)
        op = self.block.load(name, *(d if d in labels else None for d in shape))
        self.values.append(Value(tensor, op, labels))
        return self.values[-1]

    def _integers(self, name: str, labels: str, shape: tuple[int, ...]) -> Value:
        tensor = self.g.new_input(shape, "int32", name=name)
        entries = (*labels, *(None for _ in shape[len(labels) :]))
        return Value(tensor, self.block.load(name, *entries), labels)

    # ------------------------------------------------------------------------------- operations

    def apply(self, kind: str, *args: Value) -> Value:
        """An element-wise operator."""
        labels = "".join(d for d in "BMNE" if any(d in x.labels for x in args))
        tensor = self.g.apply(kind, *(x.tensor for x in args))
        return self._made(tensor, self.block.op(kind, *(x.op for x in args)), labels)

    def number(self, value: float) -> Value:
        """A constant."""
        tensor = self.g.apply("constant", value=value)
        return Value(tensor, self.block.const(value), "")

    def reduce(self, kind: str, x: Value) -> Value:
        """Over N, whole."""
        op = self.block.op(kind, x.op, over="N")
        op = self.block.close(op, "N", "max" if kind == "max" else "sum")
        tensor = self.g.apply(kind, x.tensor, dim=2)
        return self._made(tensor, op, x.labels.replace("N", ""))

    def mask(self, kind: str, x: Value) -> Value:
        """A mask by position, of a value that has rows and columns."""
        own: dict[str, Any] = {}
        given: tuple[Value, ...] = ()
        if kind == "causal_mask":
            own = {"alignment": self.rng.choice(("top_left", "bottom_right"))}
        elif kind == "length_mask":
            own, given = {"causal": self.rng.random() < 0.5}, (self.lengths,)
        else:
            given = (self.labels,)
        rows = None if own.get("causal") is False or kind == "pick" else "M"
        sides = {"rows": rows, "columns": "N"}
        op = self.block.op(kind, x.op, *(i.op for i in given), **own, **sides)
        tensor = self.g.apply(kind, x.tensor, *(i.tensor for i in given), **own)
        return self._made(tensor, op, x.labels)

    def softmax(self, x: Value) -> Value:
        """A softmax of rows, with their maximum as the shift."""
        e = self.apply("exp", self.apply("sub", x, self.reduce("max", x)))
        return self.apply("div", e, self.reduce("sum", e))

    def product(self, x: Value) -> Value:
        """The product with an input of N rows."""
        v = next((v for v in self.values if v.labels == "BNE"), None)
        v = v or self._input("V", "BNE", "BNE")
        op = self.block.close(self.block.op("matmul", x.op, v.op, over="N"), "N")
        return self._made(self.g.apply("matmul", x.tensor, v.tensor), op, "BME")

    def _made(self, tensor: Tensor, op: int, labels: str) -> Value:
        self.values.append(Value(tensor, op, labels))
        return self.values[-1]

    # ----------------------------------------------------------------------------------- growth

    def grow(self, steps: int) -> None:
        """Random operations on what is there, the latest values most often."""
        for _ in range(steps):
            self._step(self.rng.random())

    def _step(self, what: float) -> None:
        rng, full = self.rng, self._pick("BMN")
        if what < 0.15:
            self.apply(rng.choice(UNARY), self._pick())
        elif what < 0.35:
            self.apply(rng.choice(ARITHMETIC), *self._two())
        elif what < 0.42:
            pair = [self._pick("BMN"), self.number(rng.choice(NUMBERS))]
            rng.shuffle(pair)
            self.apply(rng.choice(ARITHMETIC + CHOICES), *pair)
        elif what < 0.6:
            x, y = self._two()
            kind = rng.choice(CHOICES)
            known = kind in ("keep", "hide") and rng.random() < 0.7
            self.apply(kind, self.apply("at_least", x, self._pick("BMN")) if known else x, y)
        elif what < 0.8:
            self.mask(rng.choice(MASKS), full)
        elif what < 0.9:
            self.reduce(rng.choice(("sum", "mean", "max")), full)
        elif what < 0.97:
            self.softmax(full)
        else:
            self.product(full)

    def _pick(self, labels: str | None = None) -> Value:
        fitting = [
            v for v in self.values
            if (set(v.labels) <= set("BMN") if labels is None else v.labels == labels)
        ]  # fmt: skip
        return self.rng.choice(fitting[-3:] if self.rng.random() < 0.7 else fitting)

    def _two(self) -> tuple[Value, Value]:
        return self._pick("BMN"), self._pick()

    def finished(self) -> tuple[KernelGraph, MuGraph]:
        """The graph and a muGraph of one kernel that stores the last value, and one from before."""
        made = [v for v in self.values if v.tensor.node.operator not in ("input", "constant")]
        kept = {v.op: v for v in (made[-1], self.rng.choice(made))}
        for k, v in enumerate(kept.values()):
            self.g.mark_output(v.tensor)
            shape = "BME" if "E" in v.labels else "BMN"
            entries = (d if d in v.labels else None for d in shape)
            self.block.store(f"Z{k or ''}", v.op, *entries)
        return self.g, mugraph(self.g, self.block.step())


def random_program(seed: int) -> tuple[KernelGraph, MuGraph]:
    """A kernel graph and a muGraph that computes it; equal seeds give equal programs.

    Either may be refused: a mask may meet what has no value, a loop may be walked too often.
    """
    program = Program(Random(seed))
    program.grow(program.rng.randint(3, 9))
    return program.finished()


__all__ = ["random_program"]
