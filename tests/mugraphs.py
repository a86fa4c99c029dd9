"""Kernel graphs and muGraphs written by hand for the tests of the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    GRID_REDUCE,
    LOAD,
    STORE,
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    TensorSpec,
)
from cutesuper.ir.dims import Dim
from cutesuper.ir.dtypes import float16
from cutesuper.ir.graph import KernelGraph, new_kernel_graph


class Block:
    """Builds a `BlockProgram`; axes are written ``"K.loop": 16``."""

    def __init__(
        self, dims: dict[str, Dim], axes: dict[str, int | None], tile: dict[str, int]
    ) -> None:
        self.dims, self.tile = dims, tile
        self.axes = tuple(
            Axis(n.split(".")[0], AxisKind(n.split(".")[1]), e) for n, e in axes.items()
        )
        self.ops: list[BlockOp] = []

    def _add(self, kind: str, inputs: Sequence[int], dims: set[str], **attributes: Any) -> int:
        order = tuple(d for d in self.dims if d in dims)
        self.ops.append(BlockOp(kind, tuple(inputs), order, attributes))
        return len(self.ops) - 1

    def load(self, tensor: str, *labels: str | None) -> int:
        return self._add(LOAD, (), {x for x in labels if x}, tensor=tensor, map=labels)

    def store(self, tensor: str, x: int, *labels: str | None) -> int:
        return self._add(STORE, (x,), set(self.ops[x].dims), tensor=tensor, map=labels)

    def op(self, kind: str, *args: int, over: str | None = None, **attributes: Any) -> int:
        dims = {d for a in args for d in self.ops[a].dims} - {over}
        if over:
            attributes["over"] = over
        return self._add(kind, args, dims, **attributes)

    def acc(self, x: int, axis: str, op: str = "sum") -> int:
        kinds = {"cluster": CLUSTER_REDUCE, "grid": GRID_REDUCE}
        kind = kinds.get(axis.split(".")[1], ACCUMULATE)
        return self._add(kind, (x,), set(self.ops[x].dims), axis=axis, op=op)

    def rescaled(self, x: int, part: int, whole: int) -> int:
        """Sum of ``x * exp(part - whole)`` over the axis that ``whole`` is the maximum over."""
        dims = set(self.ops[x].dims)
        axis = self.ops[whole].attributes["axis"]
        return self._add(self.ops[whole].kind, (x, part, whole), dims, axis=axis, op="sum")

    def online(self, label: str, part: int, *values: int, grid: bool = False) -> tuple[int, ...]:
        """The maximum of ``part`` and the rescaled ``values`` over the inner axes of a label, and
        over the grid if asked for."""
        for axis in ("loop", "persistent", "cluster", *["grid"] * grid):
            if any(a.name == f"{label}.{axis}" for a in self.axes):
                whole = self.acc(part, f"{label}.{axis}", "max")
                values = tuple(self.rescaled(x, part, whole) for x in values)
                part = whole
        return part, *values

    def close(self, x: int, label: str, op: str = "sum") -> int:
        """Reduce over the loop and the cluster axis of a label, whichever it has."""
        for kind in ("loop", "persistent", "cluster"):
            if any(a.name == f"{label}.{kind}" for a in self.axes):
                x = self.acc(x, f"{label}.{kind}", op)
        return x

    def const(self, value: float) -> int:
        return self._add("constant", (), set(), value=value)

    def step(self, name: str = "kernel") -> KernelStep:
        return KernelStep(name, BlockProgram(self.dims, self.axes, self.tile, tuple(self.ops)))


def mugraph(graph: KernelGraph, *steps: KernelStep, **middle: tuple[Dim, ...]) -> MuGraph:
    """A muGraph with the graph's inputs, outputs ``Z``, ``Z1``, ... and intermediates."""
    nodes = graph.nodes
    outputs = [f"Z{k or ''}" for k in range(len(graph.outputs))]
    tensors = {
        nodes[i].name: TensorSpec(nodes[i].name, nodes[i].shape, nodes[i].dtype)
        for i in graph.inputs
    }
    for name, i in zip(outputs, graph.outputs, strict=True):
        tensors[name] = TensorSpec(name, nodes[i].shape, float16)
    tensors |= {n: TensorSpec(n, s, float16) for n, s in middle.items()}
    inputs = tuple(nodes[i].name for i in graph.inputs)
    return MuGraph(tensors, inputs, tuple(outputs), steps)


def rms_linear(m: Dim = 16, k: int = 64, n: int = 32, weight: bool = False) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((m, k), name="X")
    scale = g.new_input((k,), name="G") if weight else None
    w = g.new_input((k, n), name="W")
    g.mark_output(g.matmul(g.rms_norm(x, scale), w))
    return g


def rms_linear_fused(
    g: KernelGraph, cluster: int = 2, loop: int = 4, grid: int = 4, weight: bool = False
) -> MuGraph:
    """acc(X W) / sqrt(acc(mean X^2) + eps) with K split over a cluster and a loop."""
    (m, k), n = g.nodes[0].shape, g.nodes[g.outputs[0]].shape[1]
    assert isinstance(k, int) and isinstance(n, int) and isinstance(m, int)
    axes: dict[str, int | None] = {"N.grid": grid, "K.loop": loop}
    axes |= {"K.cluster": cluster} if cluster > 1 else {}
    tile = {"M": m, "K": -(-k // (cluster * loop)), "N": -(-n // grid)}
    b = Block({"M": m, "K": k, "N": n}, axes, tile)
    x = b.load("X", "M", "K")
    scaled = b.op("mul", x, b.load("G", "K")) if weight else x
    xw = b.close(b.op("matmul", scaled, b.load("W", "K", "N"), over="K"), "K")
    mean = b.close(b.op("mean", b.op("square", x), over="K"), "K")
    norm = b.op("sqrt", b.op("add", mean, b.const(1e-6)))
    b.store("Z", b.op("div", xw, norm), "M", "N")
    return mugraph(g, b.step())


def rms_linear_two_kernels(g: KernelGraph) -> MuGraph:
    """The norm in one kernel, the product in the next."""
    (m, k), n = g.nodes[0].shape, g.nodes[g.outputs[0]].shape[1]
    assert isinstance(k, int) and isinstance(n, int) and isinstance(m, int)
    a = Block({"M": m, "K": k}, {"M.grid": m}, {"M": 1, "K": k})
    x = a.load("X", "M", "K")
    mean = a.op("mean", a.op("square", x), over="K")
    a.store("Y", a.op("div", x, a.op("sqrt", a.op("add", mean, a.const(1e-6)))), "M", "K")
    b = Block(
        {"R": m, "C": k, "N": n}, {"N.grid": 4, "C.loop": 4}, {"R": m, "C": k // 4, "N": n // 4}
    )
    y = b.op("matmul", b.load("Y", "R", "C"), b.load("W", "C", "N"), over="C")
    b.store("Z", b.acc(y, "C.loop"), "R", "N")
    return mugraph(g, a.step("norm"), b.step("linear"), Y=(m, k))


def rms_linear_split_k(g: KernelGraph, grid: int = 2) -> MuGraph:
    """Partial products over a grid axis of K, summed by a second kernel."""
    (m, k), n = g.nodes[0].shape, g.nodes[g.outputs[0]].shape[1]
    assert isinstance(k, int) and isinstance(n, int) and isinstance(m, int)
    a = Block(
        {"M": m, "K": k, "N": n},
        {"K.grid": grid, "K.loop": 4, "N.grid": 2},
        {"M": m, "K": k // (4 * grid), "N": n // 2},
    )
    x = a.load("X", "M", "K")
    xw = a.acc(a.op("matmul", x, a.load("W", "K", "N"), over="K"), "K.loop")
    mean = a.acc(a.op("mean", a.op("square", x), over="K"), "K.loop")
    a.store("T", xw, "K.grid", "M", "N")
    a.store("U", mean, "K.grid", "M")
    b = Block({"S": grid, "M": m, "N": n}, {"M.grid": m}, {"S": grid, "M": 1, "N": n})
    t = b.op("sum", b.load("T", "S", "M", "N"), over="S")
    u = b.op("sum", b.load("U", "S", "M"), over="S")
    norm = b.op("sqrt", b.op("add", u, b.const(1e-6)))
    b.store("Z", b.op("div", t, norm), "M", "N")
    return mugraph(g, a.step("partial"), b.step("combine"), T=(grid, m, n), U=(grid, m))


def gated_mlp(m: int = 8, k: int = 64, n: int = 64) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((m, k), name="X")
    a, b = g.new_input((k, n), name="A"), g.new_input((k, n), name="B")
    g.mark_output(g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b)))
    return g


def gated_mlp_fused(g: KernelGraph) -> MuGraph:
    (m, k), n = g.nodes[0].shape, g.nodes[1].shape[1]
    assert isinstance(k, int) and isinstance(n, int) and isinstance(m, int)
    b = Block(
        {"M": m, "K": k, "N": n},
        {"N.grid": 4, "K.cluster": 2, "K.loop": 2},
        {"M": m, "K": k // 4, "N": n // 4},
    )
    x = b.load("X", "M", "K")
    gate = b.close(b.op("matmul", x, b.load("A", "K", "N"), over="K"), "K")
    up = b.close(b.op("matmul", x, b.load("B", "K", "N"), over="K"), "K")
    b.store("Z", b.op("mul", b.op("silu", gate), up), "M", "N")
    return mugraph(g, b.step())


def softmax_rows(m: int = 8, n: int = 64) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((m, n), name="X")))
    return g


def softmax_kernel(g: KernelGraph, cluster: int = 2) -> MuGraph:
    """Rows over persistent blocks, long rows over a cluster."""
    m, n = g.nodes[0].shape
    assert isinstance(n, int) and isinstance(m, int)
    b = Block(
        {"M": m, "N": n},
        {"M.grid": 2, "M.persistent": m // 2, "N.cluster": cluster},
        {"M": 1, "N": -(-n // cluster)},
    )
    x = b.load("X", "M", "N")
    top = b.acc(b.op("max", x, over="N"), "N.cluster", "max")
    e = b.op("exp", b.op("sub", x, top))
    total = b.acc(b.op("sum", e, over="N"), "N.cluster")
    b.store("Z", b.op("div", e, total), "M", "N")
    return mugraph(g, b.step())


def attention(
    heads: int = 2, m: int = 4, n: int = 64, d: int = 8, scale: float = 0.125
) -> KernelGraph:
    """exp(Q K / scale) V over its row sums, without a maximum."""
    g = new_kernel_graph()
    q, k, v = (
        g.new_input(s, name=c)
        for s, c in (((heads, m, d), "Q"), ((heads, d, n), "K"), ((heads, n, d), "V"))
    )
    e = g.exp(g.mul(g.matmul(q, k), scale))
    g.mark_output(g.div(g.matmul(e, v), g.sum(e, -1)))
    return g


def attention_kernel(g: KernelGraph, scale: float = 0.125) -> MuGraph:
    """One pass over keys and values, split over a cluster and a loop."""
    (h, m, d), n = g.nodes[0].shape, g.nodes[1].shape[2]
    assert isinstance(h, int) and isinstance(m, int) and isinstance(d, int) and isinstance(n, int)
    b = Block(
        {"H": h, "M": m, "D": d, "N": n, "E": d},
        {"H.grid": 2, "N.cluster": 2, "N.loop": 4},
        {"H": h // 2, "M": m, "D": d, "N": n // 8, "E": d},
    )
    s = b.op("matmul", b.load("Q", "H", "M", "D"), b.load("K", "H", "D", "N"), over="D")
    e = b.op("exp", b.op("mul", s, b.const(scale)))
    top = b.close(b.op("matmul", e, b.load("V", "H", "N", "E"), over="N"), "N")
    low = b.close(b.op("sum", e, over="N"), "N")
    b.store("Z", b.op("div", top, low), "H", "M", "E")
    return mugraph(g, b.step())


def rms_backward(m: int = 16, n: int = 32) -> KernelGraph:
    """dx and dw of ``x / rms * w``, no eps."""
    g = new_kernel_graph()
    x, w = g.new_input((m, n), name="X"), g.new_input((n,), name="W")
    dy = g.new_input((m, n), name="D")
    r = g.sqrt(g.mean(g.square(x), -1))
    hat = g.div(x, r)
    c = g.mul(dy, w)
    g.mark_output(g.div(g.sub(c, g.mul(hat, g.mean(g.mul(c, hat), -1))), r))
    g.mark_output(g.sum(g.mul(dy, hat), 0))
    return g


def rms_backward_kernel(g: KernelGraph) -> MuGraph:
    """dx leaves inside the persistent loop, dw partials after it; a second kernel adds them."""
    m, n = g.nodes[0].shape
    assert isinstance(n, int) and isinstance(m, int)
    b = Block({"M": m, "N": n}, {"M.grid": 2, "M.persistent": 4}, {"M": m // 8, "N": n})
    x, w, dy = b.load("X", "M", "N"), b.load("W", "N"), b.load("D", "M", "N")
    r = b.op("sqrt", b.op("mean", b.op("square", x), over="N"))
    hat = b.op("div", x, r)
    c = b.op("mul", dy, w)
    mean = b.op("mean", b.op("mul", c, hat), over="N")
    b.store("Z", b.op("div", b.op("sub", c, b.op("mul", hat, mean)), r), "M", "N")
    dw = b.acc(b.op("sum", b.op("mul", dy, hat), over="M"), "M.persistent")
    b.store("P", dw, "M.grid", "N")
    s = Block({"S": 2, "N": n}, {"N.grid": 2}, {"S": 2, "N": n // 2})
    s.store("Z1", s.op("sum", s.load("P", "S", "N"), over="S"), None, "N")
    return mugraph(g, b.step("backward"), s.step("combine"), P=(2, n))
