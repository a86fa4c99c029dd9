"""Programs as data: a list of inputs, a list of operators, and which values are outputs.

Values are numbered, inputs first. An operand is the number of a value (an int) or a constant (a
float), so that a program is plain JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import cutesuper as cs
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph, Tensor

#: the symbolic extent in shapes
ROWS = "M"

Extents = tuple[int | str, ...]


@dataclass(frozen=True)
class Source:
    """An input.

    Attributes:
        shape: extents; the first may be `ROWS`.
        dtype: name of the element type.
        kind: what it holds, see `tests.fuzz.data`.
        exponent: numbers are multiplied by two to the power of it.
        limit: of integers: lengths and limits up to it, labels and pages below it.
        layout: "dense", "strided" (a part of a wider tensor) or "transposed"; on a GPU only.
    """

    shape: Extents
    dtype: str = "float16"
    kind: str = "normal"
    exponent: int = 0
    limit: int = 0
    layout: str = "dense"


@dataclass(frozen=True)
class Step:
    """An operator of the table, applied."""

    operator: str
    operands: tuple[int | float, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A program and its inputs.

    Attributes:
        sources: the inputs.
        steps: operators in order.
        outputs: numbers of values, each with the name of an element type or None.
        seed: of the inputs' elements.
        rows: hint of the symbolic extent, and the extent at which the program runs.
        wrt: gradients with respect to these sources are the program; None: the program itself.
    """

    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, str | None], ...]
    seed: int = 0
    rows: tuple[int, int] = (16, 16)
    wrt: tuple[int, ...] | None = None

    # ------------------------------------------------------------------------------- building

    def graph(self) -> KernelGraph:
        """The kernel graph of the program itself. Raises whatever building it raises."""
        g = cs.new_kernel_graph()
        tensors = [new_input(g, s, self.rows[0], f"x{i}") for i, s in enumerate(self.sources)]
        for step in self.steps:
            tensors.append(apply(g, step, tensors))
        for i, dtype in self.outputs:
            g.mark_output(tensors[i], dtype)
        return g

    def pruned(self) -> Case:
        """Without what no output needs."""
        needed = {i for i, _ in self.outputs} | set(self.wrt or ())
        n = len(self.sources)
        for k in reversed(range(len(self.steps))):
            if n + k in needed:
                needed |= {o for o in self.steps[k].operands if isinstance(o, int)}
        order = sorted(needed)
        new = {old: i for i, old in enumerate(order)}
        return replace(
            self,
            sources=tuple(self.sources[i] for i in order if i < n),
            steps=tuple(renamed(self.steps[i - n], new) for i in order if i >= n),
            outputs=tuple((new[i], d) for i, d in self.outputs),
            wrt=None if self.wrt is None else tuple(new[i] for i in self.wrt),
        )

    # -------------------------------------------------------------------------------- writing

    def dumps(self) -> str:
        """One line of JSON; `loads` reads it."""
        return json.dumps({"front": "graph", **asdict(self)})

    @staticmethod
    def loads(data: dict[str, Any]) -> Case:
        """Parse the text that `dumps` wrote."""
        return Case(
            tuple(Source(**{**s, "shape": tuple(s["shape"])}) for s in data["sources"]),
            tuple(Step(s["operator"], tuple(s["operands"]), _tupled(s["attributes"]))
                  for s in data["steps"]),
            tuple((i, d) for i, d in data["outputs"]),
            data.get("seed", 0),
            tuple(data.get("rows", (16, 16))),
            None if data.get("wrt") is None else tuple(data["wrt"]),
        )  # fmt: skip

    @property
    def symbolic(self) -> bool:
        """An extent is known only at the call."""
        return any(ROWS in s.shape for s in self.sources)

    @property
    def operators(self) -> set[str]:
        """Names of the operators that it applies."""
        return {s.operator for s in self.steps}

    @property
    def parts(self) -> list[str]:
        """The operators that it is made of, in order."""
        return sorted(self.operators | ({"grad"} if self.wrt is not None else set()))

    def code(self) -> str:
        """Python that builds the graph."""
        lines = ["import cutesuper as cs", "", "g = cs.new_kernel_graph()"]
        if self.symbolic:
            lines.append(f'M = cs.symbol("M", {self.rows[0]})')
        for i, s in enumerate(self.sources):
            shape = "".join(f"{d}, " for d in s.shape)
            lines.append(
                f'v{i} = g.new_input(({shape.strip()}), "{s.dtype}", name="x{i}")'
                f"  # {s.kind}, times 2**{s.exponent}"
            )
        for i, step in enumerate(self.steps, len(self.sources)):
            lines.append(f"v{i} = {_call(step)}")
        for i, dtype in self.outputs:
            lines.append(f"g.mark_output(v{i}{f', {dtype!r}' if dtype else ''})")
        if self.wrt is not None:
            lines.append(f"g = cs.grad(g, {[f'x{i}' for i in self.wrt]})")
        lines.append('result = cs.mugraphs(g, target="h200", budget_s=2.0)')
        return "\n".join(lines)


def new_input(g: KernelGraph, s: Source, hint: int, name: str) -> Tensor:
    """The input of a graph that a source is."""
    shape = tuple(Symbol(ROWS, hint) if d == ROWS else d for d in s.shape)
    return g.new_input(shape, s.dtype, name=name)  # type: ignore[arg-type]


def apply(g: KernelGraph, step: Step, tensors: list[Tensor]) -> Tensor:
    """The value of a step, from those before."""
    operands = [o if isinstance(o, float) else tensors[o] for o in step.operands]
    return g.apply(step.operator, *operands, **step.attributes)


def renamed(step: Step, new: dict[int, int | float]) -> Step:
    """A step with other numbers for its operands."""
    operands = tuple(new[o] if isinstance(o, int) else o for o in step.operands)
    return replace(step, operands=operands)


def _tupled(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}


def _call(step: Step) -> str:
    operands = [repr(o) if isinstance(o, float) else f"v{o}" for o in step.operands]
    more = [f"{k}={v!r}" for k, v in step.attributes.items()]
    return f"g.apply({', '.join([repr(step.operator), *operands, *more])})"
