"""Chained products and reductions of products, for the tests: graphs, programs by hand, random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from cutesuper.ir.dims import Dim, Symbol, ceil_div
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests.mugraphs import Block
from tests.plans import specs

Shapes = dict[str, tuple[int, ...]]

# ------------------------------------------------------------------------------------------ graphs


def batched_lora(dtype: str) -> KernelGraph:
    """Three dimensions: every matrix of X takes the same B, and a W and an A of its own."""
    g = new_kernel_graph()
    x, w = g.new_input((4, 16, 512), dtype), g.new_input((4, 512, 256), dtype)
    a, b = g.new_input((4, 512, 16), dtype), g.new_input((16, 256), dtype)
    g.mark_output(g.add(g.matmul(x, w), g.matmul(g.matmul(x, a), b)))
    return g


def batched_softmax(dtype: str) -> KernelGraph:
    g = new_kernel_graph()
    x, w = g.new_input((4, 16, 512), dtype), g.new_input((512, 256), dtype)
    g.mark_output(g.softmax(g.matmul(x, w)))
    return g


def gated_hidden(dtype: str) -> KernelGraph:
    """``(silu(X A) * (X C)) B``: two products of the loop along one hidden label."""
    g = new_kernel_graph()
    x, b = g.new_input((16, 512), dtype, name="X"), g.new_input((64, 256), dtype, name="B")
    gate = g.silu(g.matmul(x, g.new_input((512, 64), dtype, name="A")))
    up = g.matmul(x, g.new_input((512, 64), dtype, name="C"))
    g.mark_output(g.matmul(g.mul(gate, up), b))
    return g


def product_and_maximum(dtype: str) -> KernelGraph:
    """X W and its row maxima: an output with columns and one without."""
    g = new_kernel_graph()
    x, w = g.new_input((64, 512), dtype, name="X"), g.new_input((512, 256), dtype, name="W")
    y = g.matmul(x, w)
    g.mark_output(y)
    g.mark_output(g.max(y, -1))
    return g


def two_updates(dtype: str) -> KernelGraph:
    """``X W + (X A) B + (X C) D``."""
    g = new_kernel_graph()
    x = g.new_input((16, 512), dtype, name="X")
    y = g.matmul(x, g.new_input((512, 256), dtype, name="W"))
    for a, b, rank in (("A", "B", 16), ("C", "D", 32)):
        low = g.matmul(x, g.new_input((512, rank), dtype, name=a))
        y = g.add(y, g.matmul(low, g.new_input((rank, 256), dtype, name=b)))
    g.mark_output(y)
    return g


def three_in_a_row() -> KernelGraph:
    g = new_kernel_graph()
    y = g.new_input((64, 512))
    for shape in ((512, 64), (64, 64), (64, 256)):
        y = g.matmul(y, g.new_input(shape))
    g.mark_output(y)
    return g


def stored_between() -> KernelGraph:
    g = new_kernel_graph()
    h = g.matmul(g.new_input((64, 512)), g.new_input((512, 64)))
    g.mark_output(h)
    g.mark_output(g.matmul(h, g.new_input((64, 256))))
    return g


def reduced_twice() -> KernelGraph:
    """The columns of a product after the loop are not reduced."""
    g = new_kernel_graph()
    h = g.relu(g.matmul(g.new_input((64, 512)), g.new_input((512, 64))))
    g.mark_output(g.softmax(g.matmul(h, g.new_input((64, 256)))))
    return g


# ----------------------------------------------------------------------------------------- by hand


@dataclass(frozen=True)
class Chain:
    """``X W + f(X A) B``, ``X W + f(T) B`` or ``f(X A) B`` by hand.

    Attributes:
        m, k, n, rank: extents, ``tile_m`` x ``tile_n`` x 128 per tile.
        cluster: blocks that share K.
        kind: "lora", "two" (T in memory) or "mlp" (without X W).
        act: f.
        transposed: A is stored (R, K), B (N, R), W (N, K).
        rows_last: T is stored (R, M).
    """

    m: int = 16
    k: int = 512
    n: int = 64
    rank: int = 16
    tile_m: int = 16
    tile_n: int = 64
    cluster: int = 1
    kind: str = "lora"
    act: str = ""
    transposed: bool = False
    rows_last: bool = False
    dtype: str = "float16"

    def block(self) -> Block:
        axes: dict[str, int | None] = {"M.grid": ceil_div(self.m, self.tile_m)}
        axes |= {"N.grid": ceil_div(self.n, self.tile_n)}
        axes |= {"K.cluster": self.cluster} if self.cluster > 1 else {}
        axes |= {"K.loop": ceil_div(self.k, 128 * self.cluster)}
        tile = {"M": self.tile_m, "K": 128, "N": self.tile_n, "R": self.rank}
        b = Block({"M": self.m, "K": self.k, "N": self.n, "R": self.rank}, axes, tile)
        x = b.load("X", "M", "K")
        parts: list[int] = []
        if self.kind != "mlp":
            w = b.load("W", *self._order("K", "N"))
            parts.append(b.close(b.op("matmul", x, w, over="K"), "K"))
        if self.kind == "two":
            h = b.load("T", *(("R", "M") if self.rows_last else ("M", "R")))
        else:
            a = b.load("A", *self._order("K", "R"))
            h = b.acc(b.op("matmul", x, a, over="K"), "K.loop")
        h = b.op(self.act, h) if self.act else h
        y = b.op("matmul", h, b.load("B", *self._order("R", "N")), over="R")
        partial = self.cluster > 1 and self.kind != "two"
        parts.append(b.acc(y, "K.cluster") if partial else y)
        b.store("Z", b.op("add", *parts) if len(parts) > 1 else parts[0], "M", "N")
        return b

    def _order(self, inner: str, columns: str) -> tuple[str, str]:
        return (columns, inner) if self.transposed else (inner, columns)

    def shapes(self) -> Shapes:
        extents = {"M": self.m, "K": self.k, "N": self.n, "R": self.rank}
        maps = {o.attributes["tensor"]: o.attributes["map"] for o in self.block().ops
                if "tensor" in o.attributes}  # fmt: skip
        return {t: tuple(extents[d] for d in m) for t, m in maps.items()}

    def plan(self, **options: Any) -> MatmulPlan:
        tensors = specs(self.shapes(), self.dtype, ("W", "A", "B"))
        plan = make_plan(self.block().step("chain"), tensors, H200, **options)
        assert isinstance(plan, MatmulPlan)
        return plan


def reduced(
    op: str = "sum",
    n: int = 64,
    tile: int = 64,
    act: str = "",
    wide: bool = False,
    **axes: int | None,
) -> tuple[Block, Shapes]:
    """``op`` over the columns of ``act(X W)``, stored by itself or (``wide``) divided by."""
    names = {a.replace("_", "."): e for a, e in axes.items()}
    b = Block({"M": 16, "K": 512, "N": n}, {**names, "K.loop": 4}, {"M": 16, "K": 128, "N": tile})
    xw = b.close(b.op("matmul", b.load("X", "M", "K"), b.load("W", "K", "N"), over="K"), "K")
    y = b.op(act, xw) if act else xw
    total = b.close(b.op(op, y, over="N"), "N", "max" if op == "max" else "sum")
    if wide:
        b.store("Z", b.op("div", xw, total), "M", "N")
    else:
        b.store("Z", total, "M")
    return b, {"X": (16, 512), "W": (512, n), "Z": (16, n) if wide else (16,)}


def planned(made: tuple[Block, Shapes], **options: Any) -> MatmulPlan:
    b, shapes = made
    plan = make_plan(b.step("chain"), specs(shapes), H200, **options)
    assert isinstance(plan, MatmulPlan)
    return plan


# ------------------------------------------------------------------------------------------ random

EXTENTS = st.integers(1, 24).map(lambda i: 8 * i)


@st.composite
def chains(draw: Any) -> KernelGraph:
    """``act([norm](X) W + bias + scale f([norm](X) A) B)`` with some of it left out, perhaps
    reduced along the columns."""
    m: Dim = draw(st.one_of(st.integers(1, 40), st.integers(1, 40).map(lambda i: Symbol("M", i))))
    k, n, rank = draw(EXTENTS), draw(EXTENTS), 8 * draw(st.integers(1, 32))
    transposed, dtype = draw(st.booleans()), draw(st.sampled_from(["float16", "bfloat16"]))
    g = new_kernel_graph()

    def weight(inner: int, columns: int) -> Any:
        w = g.new_input((columns, inner) if transposed else (inner, columns), dtype)
        return g.transpose(w) if transposed else w

    x = g.new_input((m, k), dtype)
    shape = draw(st.sampled_from(["update", "operand", "mlp", "none"]))
    rows = g.rms_norm(x, eps=1e-6) if draw(st.booleans()) else x
    parts = [] if shape == "mlp" else [g.matmul(rows, weight(k, n))]
    if shape != "none":
        h = g.new_input((m, rank), dtype) if shape == "operand" else g.matmul(rows, weight(k, rank))
        h = g.apply(draw(st.sampled_from(["relu", "silu"])), h) if draw(st.booleans()) else h
        h = g.mul(h, 0.5) if draw(st.booleans()) else h
        parts.append(g.matmul(h, weight(rank, n)))
    y = parts[0] if len(parts) == 1 else g.add(*parts)
    y = g.add(y, g.new_input((n,), dtype)) if draw(st.booleans()) else y
    y = g.gelu(y) if draw(st.booleans()) else y
    end = draw(st.sampled_from(["", "", "softmax", "sum", "max"]))
    g.mark_output(g.apply(end, y, dim=-1) if end else y)
    return g
