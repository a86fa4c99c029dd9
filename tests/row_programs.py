"""Persistent row programs written by hand: blocks visit tiles of rows in turn, sums over the rows
are finished by ``grid_reduce`` in the same launch, long rows lie in a cluster.

Every function returns the kernel graph and a muGraph of one kernel that computes it. ``m`` may be a
symbol; ``grid`` blocks (or clusters) share the rows, ``rows`` of them are visited at a time, and
``cluster`` blocks share a row of ``n`` elements.
"""

from __future__ import annotations

from collections.abc import Callable

from cutesuper.ir.block import KernelStep, MuGraph, TensorSpec
from cutesuper.ir.dims import Dim, Symbol, ceil_div
from cutesuper.ir.dtypes import DType, bfloat16, float32, int64
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.runtime.compile import compile_kernel
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant
from cutesuper.skeletons.planner import make_plan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from cutesuper.targets import H200
from tests.mugraphs import Block
from tests.plans import request_of

Case = tuple[KernelGraph, MuGraph]


def rows_of(m: Dim, n: int, grid: int, rows: int, cluster: int = 1, **others: int) -> Block:
    """A block program over rows M and columns N; ``others``: further labels of the rows, of which
    a block has one element."""
    visits = None if isinstance(m, Symbol) else ceil_div(m, grid * rows)
    axes: dict[str, int | None] = {"M.grid": grid, "M.persistent": visits}
    axes = {f"{d}.grid": extent for d, extent in others.items()} | axes
    axes |= {"N.cluster": cluster} if cluster > 1 else {}
    tile = dict.fromkeys(others, 1) | {"M": rows, "N": ceil_div(n, cluster)}
    return Block({"M": m, **others, "N": n}, axes, {"M": rows, **tile})


def whole(b: Block, kind: str, x: int) -> int:
    """A reduction along the row."""
    op = "max" if kind == "max" else "sum"
    return b.close(b.op(kind, x, over="N"), "N", op)


def over_rows(b: Block, x: int, *labels: str) -> int:
    """The sum over M and other labels of the rows, finished in the same launch."""
    for label in ("M", *labels):
        x = b.op("sum", x, over=label)
    x = b.acc(x, "M.persistent")
    for label in ("M", *labels):
        x = b.acc(x, f"{label}.grid")
    return x


def one_kernel(g: KernelGraph, step: KernelStep, *outputs: str) -> MuGraph:
    """A muGraph with the graph's inputs and the given names of outputs."""
    nodes = [g.nodes[i] for i in (*g.inputs, *g.outputs)]
    names = [*(g.nodes[i].name for i in g.inputs), *outputs]
    tensors = {
        name: TensorSpec(name, n.shape, n.dtype) for name, n in zip(names, nodes, strict=True)
    }
    return MuGraph(tensors, tuple(names[: len(g.inputs)]), outputs, (step,))


def row_kernel(
    case: Case, dependent: bool = False, schedule: RowLoopSchedule | None = None
) -> Kernel:
    """A program, planned and compiled; symbols keep the hint that they have."""
    graph, mu = case
    plan = make_plan(mu.steps[0], mu.tensors, H200, schedule, dependent)
    variant = Variant(mu, (CompiledStep(plan, compile_kernel(request_of(plan))),))
    return Kernel(graph, H200, lambda hints: variant)


def _inputs(g: KernelGraph, shape: tuple[Dim, ...], names: str, dtype: DType) -> tuple[Tensor, ...]:
    return tuple(g.new_input(shape, dtype=dtype, name=name) for name in names.split())


# ------------------------------------------------------------------------------------- backward


def rms_backward(
    m: Dim, n: int, grid: int, rows: int, cluster: int = 1, dtype: DType = bfloat16
) -> Case:
    """RMSNorm: dx and dw from x, dy [M, N], w [N] and rstd [M, 1] (float32)."""
    g = new_kernel_graph()
    x, dy = _inputs(g, (m, n), "x dy", dtype)
    (w,) = _inputs(g, (n,), "w", dtype)
    (rstd,) = _inputs(g, (m, 1), "rstd", float32)
    hat = x * rstd
    grad = dy * w
    g.mark_output((grad - hat * g.mean(grad * hat, -1)) * rstd)
    g.mark_output(g.sum(dy * hat, 0))

    b = rows_of(m, n, grid, rows, cluster)
    bx, bdy, bw = b.load("x", "M", "N"), b.load("dy", "M", "N"), b.load("w", "N")
    brstd = b.load("rstd", "M", None)
    bhat = b.op("mul", bx, brstd)
    bgrad = b.op("mul", bdy, bw)
    c = whole(b, "mean", b.op("mul", bgrad, bhat))
    dx = b.op("mul", b.op("sub", bgrad, b.op("mul", bhat, c)), brstd)
    b.store("dx", dx, "M", "N")
    b.store("dw", over_rows(b, b.op("mul", bdy, bhat)), None, "N")
    return g, one_kernel(g, b.step("rms_norm_backward"), "dx", "dw")


def layer_norm_backward(
    m: Dim, n: int, grid: int, rows: int, cluster: int = 1, dtype: DType = bfloat16
) -> Case:
    """LayerNorm: dx, dw and db from x, dy [M, N], w [N], mean and rstd [M, 1] (float32)."""
    g = new_kernel_graph()
    x, dy = _inputs(g, (m, n), "x dy", dtype)
    (w,) = _inputs(g, (n,), "w", dtype)
    mean, rstd = _inputs(g, (m, 1), "mean rstd", float32)
    hat = (x - mean) * rstd
    grad = dy * w
    g.mark_output((grad - g.mean(grad, -1) - hat * g.mean(grad * hat, -1)) * rstd)
    g.mark_output(g.sum(dy * hat, 0))
    g.mark_output(g.sum(dy, 0))

    b = rows_of(m, n, grid, rows, cluster)
    bx, bdy, bw = b.load("x", "M", "N"), b.load("dy", "M", "N"), b.load("w", "N")
    bmean, brstd = b.load("mean", "M", None), b.load("rstd", "M", None)
    bhat = b.op("mul", b.op("sub", bx, bmean), brstd)
    bgrad = b.op("mul", bdy, bw)
    c1, c2 = whole(b, "mean", bgrad), whole(b, "mean", b.op("mul", bgrad, bhat))
    rest = b.op("sub", b.op("sub", bgrad, c1), b.op("mul", bhat, c2))
    b.store("dx", b.op("mul", rest, brstd), "M", "N")
    b.store("dw", over_rows(b, b.op("mul", bdy, bhat)), None, "N")
    b.store("db", over_rows(b, bdy), None, "N")
    return g, one_kernel(g, b.step("layer_norm_backward"), "dx", "dw", "db")


def per_head_backward(
    m: Dim, heads: int, n: int, grid: int, rows: int, dtype: DType = bfloat16
) -> Case:
    """RMSNorm of x [M, H, N] with a weight [H, N] for each head: dw is summed over M only."""
    g = new_kernel_graph()
    x, dy = _inputs(g, (m, heads, n), "x dy", dtype)
    (w,) = _inputs(g, (heads, n), "w", dtype)
    (rstd,) = _inputs(g, (m, heads, 1), "rstd", float32)
    hat = x * rstd
    grad = dy * w
    g.mark_output((grad - hat * g.mean(grad * hat, -1)) * rstd)
    g.mark_output(g.sum(dy * hat, 0))

    b = rows_of(m, n, grid, rows, H=heads)
    bx, bdy = b.load("x", "M", "H", "N"), b.load("dy", "M", "H", "N")
    bw, brstd = b.load("w", "H", "N"), b.load("rstd", "M", "H", None)
    bhat = b.op("mul", bx, brstd)
    bgrad = b.op("mul", bdy, bw)
    c = whole(b, "mean", b.op("mul", bgrad, bhat))
    dx = b.op("mul", b.op("sub", bgrad, b.op("mul", bhat, c)), brstd)
    b.store("dx", dx, "M", "H", "N")
    b.store("dw", over_rows(b, b.op("mul", bdy, bhat)), None, "H", "N")
    return g, one_kernel(g, b.step("rms_norm_backward"), "dx", "dw")


def batched_sum(m: Dim, batch: int, n: int, grid: int, rows: int, dtype: DType = bfloat16) -> Case:
    """The gradients of a scale [N] and an offset [N] of x [M, B, N], summed over M and B; the
    offset's is scaled after the sum."""
    g = new_kernel_graph()
    x, dy = _inputs(g, (m, batch, n), "x dy", dtype)
    g.mark_output(g.sum(g.sum(x * dy, 1), 0))
    g.mark_output(g.sum(g.sum(dy, 1), 0) * 0.5)

    b = rows_of(m, n, grid, rows, B=batch)
    bx, bdy = b.load("x", "M", "B", "N"), b.load("dy", "M", "B", "N")
    b.store("dw", over_rows(b, b.op("mul", bx, bdy), "B"), None, None, "N")
    db = b.op("mul", over_rows(b, bdy, "B"), b.const(0.5))
    b.store("db", db, None, None, "N")
    return g, one_kernel(g, b.step("sums"), "dw", "db")


def column_sum(
    m: Dim, n: int, grid: int, rows: int, columns: int = 0, dtype: DType = bfloat16
) -> Case:
    """The gradient of a bias, the sum of dy [M, N] over M. Nothing is reduced along the rows, so
    wide ones are divided by a grid axis in pieces of ``columns``."""
    g = new_kernel_graph()
    (dy,) = _inputs(g, (m, n), "dy", dtype)
    g.mark_output(g.sum(dy, 0))

    visits = None if isinstance(m, Symbol) else ceil_div(m, grid * rows)
    width = columns or n
    axes = {"M.grid": grid, "M.persistent": visits, "N.grid": ceil_div(n, width)}
    b = Block({"M": m, "N": n}, axes, {"M": rows, "N": width})
    b.store("db", over_rows(b, b.load("dy", "M", "N")), None, "N")
    return g, one_kernel(g, b.step("column_sum"), "db")


def squared_error(
    m: Dim, n: int, grid: int, rows: int, cluster: int = 1, dtype: DType = bfloat16
) -> Case:
    """A loss: the mean over the rows of their sums of squares; and the gradient of x for it."""
    g = new_kernel_graph()
    x, y = _inputs(g, (m, n), "x y", dtype)
    diff = x - y
    g.mark_output(g.mean(g.sum(g.square(diff), -1), 0))
    g.mark_output(diff * 2)

    b = rows_of(m, n, grid, rows, cluster)
    bdiff = b.op("sub", b.load("x", "M", "N"), b.load("y", "M", "N"))
    b.store("dx", b.op("mul", bdiff, b.const(2.0)), "M", "N")
    row = whole(b, "sum", b.op("square", bdiff))
    mean = b.acc(b.acc(b.op("mean", row, over="M"), "M.persistent"), "M.grid")
    b.store("loss", mean, None, None)
    return g, one_kernel(g, b.step("squared_error"), "loss", "dx")


def scaled_heads(m: Dim, heads: int, n: int, grid: int, rows: int, dtype: DType = bfloat16) -> Case:
    """Sums of x [M, H, N] over M, times a weight [H, N] and a number [H] before it is summed: what
    is read of the columns and of the heads, but not of the rows. And x times that number."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, heads, n), "x", dtype)
    (w,) = _inputs(g, (heads, n), "w", dtype)
    (s,) = _inputs(g, (heads, 1), "s", float32)
    g.mark_output(x * s)
    g.mark_output(g.sum(x * w * s, 0))

    b = rows_of(m, n, grid, rows, H=heads)
    bx, bw, bs = b.load("x", "M", "H", "N"), b.load("w", "H", "N"), b.load("s", "H", None)
    scaled = b.op("mul", bx, bs)
    b.store("y", scaled, "M", "H", "N")
    b.store("dw", over_rows(b, b.op("mul", b.op("mul", bx, bw), bs)), None, "H", "N")
    return g, one_kernel(g, b.step("scaled_heads"), "y", "dw")


def sum_beside_heads(
    m: Dim, heads: int, n: int, grid: int, rows: int, dtype: DType = bfloat16
) -> Case:
    """x [M, H, N] times y [M, 1, N], and the sum of y over M, which blocks of all heads have: a
    right program that no row loop runs, as each block would add y."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, heads, n), "x", dtype)
    (y,) = _inputs(g, (m, 1, n), "y", dtype)
    g.mark_output(x * y)
    g.mark_output(g.sum(y, 0))

    b = rows_of(m, n, grid, rows, H=heads)
    bx, by = b.load("x", "M", "H", "N"), b.load("y", "M", None, "N")
    b.store("z", b.op("mul", bx, by), "M", "H", "N")
    b.store("total", over_rows(b, by), None, None, "N")
    return g, one_kernel(g, b.step("sum_beside_heads"), "z", "total")


def gain_of_columns(m: Dim, n: int, grid: int, rows: int, dtype: DType = bfloat16) -> Case:
    """x [M, N] times exp(w) [N], and the gradient of w for it: a function of the columns that is
    needed in every row, and again when the sums are finished."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    (w,) = _inputs(g, (n,), "w", dtype)
    gain = g.exp(w)
    g.mark_output(x * gain)
    g.mark_output(g.sum(x, 0) * gain)

    b = rows_of(m, n, grid, rows)
    bx, bgain = b.load("x", "M", "N"), b.op("exp", b.load("w", "N"))
    b.store("y", b.op("mul", bx, bgain), "M", "N")
    b.store("dw", b.op("mul", over_rows(b, bx), bgain), None, "N")
    return g, one_kernel(g, b.step("gain_of_columns"), "y", "dw")


def maximum_and_sum(m: Dim, n: int, grid: int, rows: int, dtype: DType = bfloat16) -> Case:
    """The maximum and the sum of x [M, N] over M: two ways to combine in one kernel."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    g.mark_output(g.max(x, 0))
    g.mark_output(g.sum(x, 0))

    b = rows_of(m, n, grid, rows)
    bx = b.load("x", "M", "N")
    top = b.acc(b.acc(b.op("max", bx, over="M"), "M.persistent", "max"), "M.grid", "max")
    b.store("top", top, None, "N")
    b.store("total", over_rows(b, bx), None, "N")
    return g, one_kernel(g, b.step("maximum_and_sum"), "top", "total")


# -------------------------------------------------------------------------------------- forward


def softmax_forward(m: Dim, n: int, cluster: int, dtype: DType = bfloat16) -> Case:
    """Rows of x [M, N] in a cluster: the maximum, then the sum. Nothing is reduced over the rows,
    so a cluster has one and the grid is as many as there are."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    g.mark_output(g.softmax(x))

    b = _forward_block(m, n, cluster)
    bx = b.load("x", "M", "N")
    e = b.op("exp", b.op("sub", bx, whole(b, "max", bx)))
    b.store("y", b.op("div", e, whole(b, "sum", e)), "M", "N")
    return g, one_kernel(g, b.step("softmax"), "y")


def causal_softmax(m: int, n: int, dtype: DType = bfloat16) -> Case:
    """Softmax of rows of x [M, N] of which each sees what is on the left of the diagonal."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    g.mark_output(g.softmax(g.causal_mask(x, alignment="bottom_right")))

    b = _forward_block(m, n, 1)
    bx = b.op("causal_mask", b.load("x", "M", "N"), rows="M", columns="N", alignment="bottom_right")
    e = b.op("exp", b.op("sub", bx, whole(b, "max", bx)))
    b.store("y", b.op("div", e, whole(b, "sum", e)), "M", "N")
    return g, one_kernel(g, b.step("softmax"), "y")


def rms_forward(m: Dim, n: int, cluster: int, dtype: DType = bfloat16) -> Case:
    """RMSNorm with a weight of long rows, which stores rstd [M, 1] (float32) for the backward."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    (w,) = _inputs(g, (n,), "w", dtype)
    rstd = g.rsqrt(g.mean(g.square(x), -1) + 1e-6)
    g.mark_output(x * rstd * w)
    g.mark_output(rstd, dtype=float32)

    b = _forward_block(m, n, cluster)
    bx = b.load("x", "M", "N")
    mean = whole(b, "mean", b.op("square", bx))
    brstd = b.op("rsqrt", b.op("add", mean, b.const(1e-6)))
    b.store("y", b.op("mul", b.op("mul", bx, brstd), b.load("w", "N")), "M", "N")
    b.store("rstd", brstd, "M", None)
    return g, one_kernel(g, b.step("rms_norm"), "y", "rstd")


def losses(
    m: Dim, n: int, cluster: int = 1, dtype: DType = bfloat16, labels: DType = int64
) -> Case:
    """Losses of rows x [M, N] with a label each: the cross entropy, and the mean over N of what a
    second label picks of ``x w``. Of both sums one element of a row is not 0."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    (w,) = _inputs(g, (n,), "w", dtype)
    t, u = _inputs(g, (m, 1), "t u", labels)
    g.mark_output(g.cross_entropy(x, t), dtype=float32)
    g.mark_output(g.mean(g.pick(x * w, u), -1), dtype=float32)

    b = _forward_block(m, n, cluster)
    bx, bt, bu = b.load("x", "M", "N"), b.load("t", "M", None), b.load("u", "M", None)
    shifted = b.op("sub", bx, whole(b, "max", bx))
    total = whole(b, "sum", b.op("exp", shifted))
    own = whole(b, "sum", b.op("pick", shifted, bt, columns="N", rows=None))
    weight = b.op("label_weight", bt, classes=n, ignore_index=-100)
    b.store("loss", b.op("mul", weight, b.op("sub", b.op("log", total), own)), "M", None)
    scaled = b.op("pick", b.op("mul", bx, b.load("w", "N")), bu, columns="N", rows=None)
    b.store("picked", whole(b, "mean", scaled), "M", None)
    return g, one_kernel(g, b.step("losses"), "loss", "picked")


def shares(
    m: Dim, n: int, cluster: int = 1, dtype: DType = bfloat16, labels: DType = int64
) -> Case:
    """Shares of rows t = x / rms(x), x [M, N], with a label each: their softmax, its mean of x, its
    element at the label, and log-sum-exp. Exponentials are summed after two reductions, and so are
    their products; one of them is read by itself."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    (label,) = _inputs(g, (m, 1), "label", labels)
    t = x * g.rsqrt(g.mean(g.square(x), -1) + 1e-6)
    top = g.max(t, -1)
    e = g.exp(t - top)
    total = g.sum(e, -1)
    g.mark_output(e / total)
    g.mark_output(g.sum(e * x, -1) / total, dtype=float32)
    g.mark_output(g.sum(g.pick(e, label), -1) / total, dtype=float32)
    g.mark_output(g.log(total) + top, dtype=float32)

    b = _forward_block(m, n, cluster)
    bx, blabel = b.load("x", "M", "N"), b.load("label", "M", None)
    mean = whole(b, "mean", b.op("square", bx))
    bt = b.op("mul", bx, b.op("rsqrt", b.op("add", mean, b.const(1e-6))))
    btop = whole(b, "max", bt)
    be = b.op("exp", b.op("sub", bt, btop))
    btotal = whole(b, "sum", be)
    own = whole(b, "sum", b.op("pick", be, blabel, columns="N", rows=None))
    b.store("y", b.op("div", be, btotal), "M", "N")
    b.store("mean", b.op("div", whole(b, "sum", b.op("mul", be, bx)), btotal), "M", None)
    b.store("own", b.op("div", own, btotal), "M", None)
    b.store("lse", b.op("add", b.op("log", btotal), btop), "M", None)
    return g, one_kernel(g, b.step("shares"), "y", "mean", "own", "lse")


def softmax_and_columns(
    m: Dim, n: int, grid: int, rows: int, cluster: int = 1, dtype: DType = bfloat16
) -> Case:
    """The softmax of rows x [M, N], times 2, and its sum over the rows."""
    g = new_kernel_graph()
    (x,) = _inputs(g, (m, n), "x", dtype)
    y = g.softmax(x)
    g.mark_output(y * 2)
    g.mark_output(g.sum(y, 0))

    b = rows_of(m, n, grid, rows, cluster)
    bx = b.load("x", "M", "N")
    e = b.op("exp", b.op("sub", bx, whole(b, "max", bx)))
    by = b.op("div", e, whole(b, "sum", e))
    b.store("y", b.op("mul", by, b.const(2.0)), "M", "N")
    b.store("columns", over_rows(b, by), None, "N")
    return g, one_kernel(g, b.step("softmax_and_columns"), "y", "columns")


def _forward_block(m: Dim, n: int, cluster: int) -> Block:
    axes: dict[str, int | None] = {"M.grid": None if isinstance(m, Symbol) else m}
    axes |= {"N.cluster": cluster} if cluster > 1 else {}
    return Block({"M": m, "N": n}, axes, {"M": 1, "N": ceil_div(n, cluster)})


M = Symbol("M", 4096)

CASES: dict[str, Callable[[], Case]] = {
    "rms backward": lambda: rms_backward(4096, 4096, 128, 2),
    "rms backward, few rows": lambda: rms_backward(128, 4096, 64, 2),
    "rms backward, one block": lambda: rms_backward(3, 256, 1, 4),
    "rms backward, symbolic": lambda: rms_backward(M, 4096, 132, 2),
    "rms backward, long rows": lambda: rms_backward(4096, 16384, 66, 1, cluster=2),
    "rms backward, long rows, symbolic": lambda: rms_backward(M, 32768, 30, 1, cluster=4),
    "rms backward, float32": lambda: rms_backward(1000, 1024, 125, 4, dtype=float32),
    "rms backward, odd": lambda: rms_backward(1001, 1000, 132, 4),
    "layer norm backward": lambda: layer_norm_backward(4096, 4096, 128, 2),
    "layer norm backward, symbolic": lambda: layer_norm_backward(M, 1024, 132, 8),
    "layer norm backward, long rows": lambda: layer_norm_backward(512, 16384, 66, 1, cluster=2),
    "heads": lambda: per_head_backward(4096, 8, 128, 16, 32),
    "heads, symbolic": lambda: per_head_backward(M, 8, 128, 16, 32),
    "batched": lambda: batched_sum(512, 8, 1024, 16, 8),
    "batched, symbolic": lambda: batched_sum(M, 8, 1024, 16, 8),
    "scaled heads": lambda: scaled_heads(128, 8, 72, 8, 8),
    "scaled heads, many rows": lambda: scaled_heads(4096, 8, 72, 16, 8),
    "column sum": lambda: column_sum(4096, 4096, 132, 4),
    "column sum, wide": lambda: column_sum(256, 65536, 16, 2, columns=8192),
    "column sum, symbolic": lambda: column_sum(M, 4096, 132, 4),
    "squared error": lambda: squared_error(4096, 4096, 128, 2),
    "squared error, symbolic": lambda: squared_error(M, 16384, 66, 1, cluster=2),
    "softmax, long rows": lambda: softmax_forward(4096, 131072, 8),
    "softmax, pairs": lambda: softmax_forward(4096, 262144, 8),
    "softmax, long rows, symbolic": lambda: softmax_forward(M, 65536, 4),
    "softmax, odd rows": lambda: softmax_forward(64, 100001, 8),
    "causal softmax": lambda: causal_softmax(300, 1000),
    "losses": lambda: losses(300, 1000),
    "losses, long rows": lambda: losses(64, 131072, 8),
    "losses, symbolic": lambda: losses(M, 65536, 4),
    "shares": lambda: shares(300, 1000),
    "shares, long rows": lambda: shares(64, 65536, 4),
    "softmax and columns": lambda: softmax_and_columns(1000, 4096, 125, 2),
    "softmax and columns, long rows": lambda: softmax_and_columns(300, 32768, 60, 1, cluster=2),
    "rms forward, long rows": lambda: rms_forward(4096, 262144, 16),
    "rms forward, long rows, symbolic": lambda: rms_forward(M, 65536, 4),
}
