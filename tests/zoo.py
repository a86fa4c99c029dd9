"""Small kernel graphs by name, inputs for them, and the rule for their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutesuper.ir.dims import Dim, extent
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.evaluate import evaluate
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.verify.numeric import Report, acceptable

EPS = 1e-6


def rms_norm_linear(
    m: Dim, k: int, n: int, dtype: Any = "float16", gain: bool = False, transposed: bool = False
) -> KernelGraph:
    """``rms_norm(X, G) @ W``, or ``@ W^T`` for a W stored (N, K)."""
    g = new_kernel_graph()
    x = g.new_input((m, k), dtype, name="X")
    w = g.new_input((n, k) if transposed else (k, n), dtype, name="W", constant=True)
    scale = g.new_input((k,), dtype, name="G", constant=True) if gain else None
    g.mark_output(g.matmul(g.rms_norm(x, scale, eps=EPS), g.transpose(w) if transposed else w))
    return g


def layer_norm_linear(
    m: Dim,
    k: int,
    n: int,
    dtype: Any = "float16",
    gain: bool = True,
    shift: bool = True,
    transposed: bool = False,
    linear_bias: bool = False,
    tail: str = "",
    residual: bool = False,
    gated: bool = False,
) -> KernelGraph:
    """``(layer_norm(X + R) * G + B0) @ W + b``, then an operator; parts that are not asked for are
    left out. ``gated``: ``silu(.. @ W) * (.. @ A)``."""
    g = new_kernel_graph()
    x = g.new_input((m, k), dtype, name="X")
    shape = (n, k) if transposed else (k, n)
    weights = [g.new_input(shape, dtype, name=i, constant=True) for i in "WA"[: 1 + gated]]
    if residual:
        x = g.add(x, g.new_input((m, k), dtype, name="R"))
    y = layer_norm(g, x)
    if gain:
        y = g.mul(y, g.new_input((k,), dtype, name="G", constant=True))
    if shift:
        y = g.add(y, g.new_input((k,), dtype, name="B0", constant=True))
    z, *other = (g.matmul(y, g.transpose(w) if transposed else w) for w in weights)
    if other:
        z = g.mul(g.silu(z), other[0])
    if linear_bias:
        z = g.add(z, g.new_input((n,), dtype, name="b", constant=True))
    g.mark_output(g.apply(tail, z) if tail else z)
    return g


def layer_norm_linear_then(after: str, k: int = 512, n: int = 256) -> KernelGraph:
    """``layer_norm(X) W`` of 16 rows and what may follow: a softmax, another norm, or
    ``+ T B`` with T an input or ``layer_norm(X) A``."""
    g = new_kernel_graph()
    x, w = g.new_input((16, k), name="X"), g.new_input((k, n), name="W", constant=True)
    normed = layer_norm(g, x)
    z = g.matmul(normed, w)
    if after == "softmax":
        z = g.softmax(z)
    elif after == "layer_norm":
        z = layer_norm(g, z)
    else:
        t = (
            g.new_input((16, 16), name="T")
            if after == "T B"
            else (g.matmul(normed, g.new_input((k, 16), name="A", constant=True)))
        )
        z = g.add(z, g.matmul(t, g.new_input((16, n), name="B", constant=True)))
    g.mark_output(z)
    return g


def less_column_sums(m: Dim, k: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``X W - sum_K(W)``: a vector of ones beside the rows, and no norm."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    g.mark_output(g.sub(g.matmul(x, w), g.sum(w, 0)))
    return g


def over_deviation(m: Dim, k: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``X W / sqrt(mean(X^2) - mean(X)^2 + eps)``: only the statistics may be shifted."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    variance = g.sub(g.mean(g.square(x), -1), g.square(g.mean(x, -1)))
    g.mark_output(g.div(g.matmul(x, w), g.sqrt(g.add(variance, EPS))))
    return g


def gated_mlp(m: Dim, k: int, n: int, dtype: Any = "float16", norm: bool = True) -> KernelGraph:
    """``silu(X A) * (X B)``, X normalized first if asked for."""
    g = new_kernel_graph()
    x = g.new_input((m, k), dtype, name="X")
    a = g.new_input((k, n), dtype, name="A", constant=True)
    b = g.new_input((k, n), dtype, name="B", constant=True)
    x = g.rms_norm(x, eps=EPS) if norm else x
    g.mark_output(g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b)))
    return g


def projections(
    m: Dim,
    k: int,
    widths: Sequence[int],
    dtype: Any = "bfloat16",
    norm: bool = True,
    bias: bool = False,
    layer_norm: bool = False,
    gated: bool = False,
) -> KernelGraph:
    """X by weights [N, K] of several widths, each product an output: queries, keys, values. With
    ``gated`` each is multiplied by silu of another one."""
    g = new_kernel_graph()
    x = g.new_input((m, k), dtype, name="X")

    def constant(name: str, *shape: int) -> Tensor:
        return g.new_input(shape, dtype, name, constant=True)

    weights = [constant(f"W{i}", n, k) for i, n in enumerate(widths)]
    if layer_norm:
        x = g.layer_norm(x, constant("G", k), constant("H", k), eps=EPS)
    elif norm:
        x = g.rms_norm(x, g.new_input((k,), dtype, "G"), eps=EPS)
    for i, w in enumerate(weights):
        y = g.matmul(x, g.transpose(w))
        y = y + constant(f"B{i}", widths[i]) if bias else y
        if gated:
            y = y * g.silu(g.matmul(x, g.transpose(constant(f"V{i}", widths[i], k))))
        g.mark_output(y)
    return g


def softmax_linear(m: Dim, k: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``softmax(X W)``: rows longer than a tile need a second kernel."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    g.mark_output(g.softmax(g.matmul(x, w)))
    return g


def lora(
    m: Dim,
    k: int,
    n: int,
    rank: int = 16,
    dtype: Any = "float16",
    *,
    transposed: bool = False,
    scale: float | None = None,
    norm: bool = False,
) -> KernelGraph:
    """``X W + scale (X A) B``, or ``X W^T + scale (X A^T) B^T`` for weights stored (N, K); X is
    normalized first if asked for."""
    g = new_kernel_graph()

    def weight(inner: int, columns: int, name: str) -> Any:
        shape = (columns, inner) if transposed else (inner, columns)
        w = g.new_input(shape, dtype, name=name, constant=True)
        return g.transpose(w) if transposed else w

    x = g.new_input((m, k), dtype, name="X")
    w, a, b = weight(k, n, "W"), weight(k, rank, "A"), weight(rank, n, "B")
    x = g.rms_norm(x, eps=EPS) if norm else x
    y, low = g.matmul(x, w), g.matmul(x, a)
    low = low if scale is None else g.mul(low, scale)
    g.mark_output(g.add(y, g.matmul(low, b)))
    return g


def two_operands(
    m: Dim, k: int, n: int, rank: int = 16, dtype: Any = "float16", act: str = ""
) -> KernelGraph:
    """``X W + T B``, with T in memory; ``act`` is applied to T first."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    t, b = g.new_input((m, rank), dtype, name="T"), g.new_input((rank, n), dtype, name="B")
    t = g.apply(act, t) if act else t
    g.mark_output(g.add(g.matmul(x, w), g.matmul(t, b)))
    return g


def dlrm(m: Dim, k: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``sigmoid(relu(X W + b) V + c)`` with a V of one column."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    b, v = g.new_input((n,), dtype, name="b"), g.new_input((n, 1), dtype, name="V")
    hidden = g.relu(g.add(g.matmul(x, w), b))
    g.mark_output(g.sigmoid(g.add(g.matmul(hidden, v), g.new_input((1,), dtype, name="c"))))
    return g


def rms_norm_of_product(m: Dim, k: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``rms_norm(X W)``."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    g.mark_output(g.rms_norm(g.matmul(x, w), eps=EPS))
    return g


def relu_mlp(m: Dim, k: int, hidden: int, n: int, dtype: Any = "float16") -> KernelGraph:
    """``relu(X A) B``."""
    g = new_kernel_graph()
    x, a = g.new_input((m, k), dtype, name="X"), g.new_input((k, hidden), dtype, name="A")
    b = g.new_input((hidden, n), dtype, name="B")
    g.mark_output(g.matmul(g.relu(g.matmul(x, a)), b))
    return g


def grouped_attention(groups: int, m: int, n: int, d: int, dtype: Any = "float16") -> KernelGraph:
    """``exp(Q K / sqrt(d)) V / sum`` for each group; K is stored (d, n)."""
    g = new_kernel_graph()
    q = g.new_input((groups, m, d), dtype, name="Q")
    k = g.new_input((groups, d, n), dtype, name="K")
    v = g.new_input((groups, n, d), dtype, name="V")
    p = g.exp(g.mul(g.matmul(q, k), d**-0.5))
    g.mark_output(g.div(g.matmul(p, v), g.sum(p, -1)))
    return g


def linear(m: Dim, k: int, n: int, dtype: Any = "float16", tail: str = "") -> KernelGraph:
    """``X W + b``, with a tail of ``residual`` or an operator's name."""
    g = new_kernel_graph()
    x, w = g.new_input((m, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    y = g.add(g.matmul(x, w), g.new_input((n,), dtype, name="b"))
    if tail == "residual":
        y = g.add(y, g.new_input((m, n), dtype, name="R"))
    elif tail:
        y = g.apply(tail, y)
    g.mark_output(y)
    return g


# ------------------------------------------------------------------------------------ row programs

#: what happens to rows: takes the graph and X, returns the outputs
RowProgram = Callable[[KernelGraph, Any], Sequence[Any]]


def _inside(g: KernelGraph, x: Any) -> Any:
    """Numbers of (-1, 1), far enough from the ends for all of them to have a slope."""
    return g.clamp(g.mul(x, 0.25), -0.9, 0.9)


ROWS: dict[str, RowProgram] = {
    "exp": lambda g, x: [g.exp(x)],
    "silu": lambda g, x: [g.silu(x)],
    "gelu": lambda g, x: [g.gelu(x)],
    "log1p": lambda g, x: [g.log1p(g.square(x)), g.log1p(g.mul(x, 1e-3))],
    "expm1": lambda g, x: [g.expm1(x), g.expm1(g.mul(x, 1e-3))],
    "sin and cos": lambda g, x: [g.sin(x), g.cos(x)],
    "angles of any size": lambda g, x: [g.sin(g.mul(x, 2.0**20)), g.cos(g.mul(x, -4096.0))],
    "inverse angles": lambda g, x: [g.asin(_inside(g, x)), g.acos(_inside(g, x)), g.atan(x)],
    "hyperbolic": lambda g, x: [g.sinh(x), g.cosh(x), g.asinh(g.mul(x, 10.0))],
    "inverse hyperbolic": lambda g, x: [g.acosh(g.add(g.square(x), 1.5)), g.atanh(_inside(g, x))],
    "erfc": lambda g, x: [g.erfc(x), g.erfc(g.mul(x, 2.0))],
    "rounding": lambda g, x: [g.floor(x), g.round(g.mul(x, 2.0))],
    "polynomial": lambda g, x: [g.add(g.mul(g.square(x), 0.5), g.sub(1.0, x))],
    "clamp": lambda g, x: [g.clamp(g.tanh(x), -0.5, 0.25)],
    "sum": lambda g, x: [g.sum(x, -1)],
    "mean and max": lambda g, x: [g.mean(x, -1), g.max(x, -1)],
    "rms_norm": lambda g, x: [g.rms_norm(x, eps=EPS)],
    "weighted rms_norm": lambda g, x: [
        g.rms_norm(x, g.new_input((x.shape[-1],), x.dtype, name="G"), eps=EPS)
    ],
    "softmax": lambda g, x: [g.softmax(x)],
    "layer_norm": lambda g, x: [layer_norm(g, x)],
    "logsumexp parts": lambda g, x: [g.max(x, -1), g.sum(g.exp(g.sub(x, g.max(x, -1))), -1)],
    "gate": lambda g, x: [g.mul(g.silu(x), g.new_input(x.shape, x.dtype, name="U"))],
}


def layer_norm(g: KernelGraph, x: Any) -> Any:
    """``(x - mean) / sqrt(var + 1e-5)``."""
    centred = g.sub(x, g.mean(x, -1))
    return g.div(centred, g.sqrt(g.add(g.mean(g.square(centred), -1), 1e-5)))


def rows(name: str, shape: tuple[Dim, ...], dtype: Any = "float16") -> KernelGraph:
    """A program of `ROWS` on X of ``shape``."""
    g = new_kernel_graph()
    for y in ROWS[name](g, g.new_input(shape, dtype, name="X")):
        g.mark_output(y)
    return g


# ------------------------------------------------------------------------------------------ running

#: inputs that are weights: drawn smaller, so that products stay of order 1
WEIGHTS = ("W", "A", "B", "C", "D", "V")


def draw(
    graph: KernelGraph, seed: int, device: str = "cpu", extents: dict[str, int] | None = None
) -> list[torch.Tensor]:
    """Normal inputs; symbols take ``extents`` or their hint."""
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for i in graph.inputs:
        node = graph.nodes[i]
        shape = [(extents or {}).get(str(d), extent(d)) for d in node.shape]
        t = torch.randn(shape, generator=generator, device=device)
        if node.name in WEIGHTS:
            t = t * shape[0] ** -0.5
        made.append(t.to(node.dtype.torch))
    return made


def eager_norm_linear(inputs: Sequence[torch.Tensor], transposed: bool = False) -> torch.Tensor:
    """The function as a person would write it in PyTorch."""
    x, w, *gain = inputs
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], *gain, eps=EPS)
    return torch.nn.functional.linear(y, w) if transposed else y @ w


def eager_layer_norm_linear(
    inputs: dict[str, torch.Tensor], transposed: bool = False, tail: Any = None
) -> torch.Tensor:
    """The same of `layer_norm_linear`, inputs by name."""
    x = inputs["X"] + inputs["R"] if "R" in inputs else inputs["X"]
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], inputs.get("G"), inputs.get("B0"), 1e-5)

    def product(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, w if transposed else w.T, inputs.get("b"))

    z = product(inputs["W"])
    if "A" in inputs:
        z = torch.nn.functional.silu(z) * product(inputs["A"])
    return tail(z) if tail else z


def named(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs by name."""
    return {graph.nodes[i].name: t for i, t in zip(graph.inputs, inputs, strict=True)}


def judge(
    graph: KernelGraph,
    inputs: list[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor] | None = None,
) -> list[Report]:
    """The acceptance rule for every output; ``eager`` where a person would write it otherwise."""
    exact = evaluate(graph, inputs, torch.float64)
    plain = eager or evaluate(graph, inputs)
    return [
        acceptable(o, r, e, as_dtype(graph.nodes[i].dtype))
        for o, r, e, i in zip(outputs, exact, plain, graph.outputs, strict=True)
    ]
