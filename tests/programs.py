"""Legal programs written by hand, which the tests of the IR draw, save and break."""

from __future__ import annotations

from typing import Any

from cutesuper.ir.block import (
    Axis,
    AxisKind,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    TensorSpec,
)
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.dtypes import bfloat16, float16
from cutesuper.ir.graph import KernelGraph, new_kernel_graph
from tests import row_programs

GRID, CLUSTER = AxisKind.GRID, AxisKind.CLUSTER
PERSISTENT, LOOP = AxisKind.PERSISTENT, AxisKind.LOOP


def op(kind: str, inputs: tuple[int, ...], dims: str, **attributes: Any) -> BlockOp:
    """An operation; every letter of ``dims`` is a label."""
    return BlockOp(kind, inputs, tuple(dims), attributes)


def norm_linear_graph(m: Dim = 16) -> KernelGraph:
    """``rms_norm(X) @ W``."""
    g = new_kernel_graph()
    x = g.new_input((m, 4096))
    w = g.new_input((4096, 6144), constant=True)
    g.mark_output(g.matmul(g.rms_norm(x), w))
    return g


def norm_linear_program() -> BlockProgram:
    """RMSNorm and Linear in one loop, split over a cluster of 2."""
    ops = (
        op("load", (), "MK", tensor="X", map=("M", "K")),
        op("load", (), "NK", tensor="W", map=("K", "N")),
        op("matmul", (0, 1), "MN", over="K"),
        op("accumulate", (2,), "MN", axis="K.loop", op="sum"),
        op("square", (0,), "MK"),
        op("mean", (4,), "M", over="K"),
        op("accumulate", (5,), "M", axis="K.loop", op="sum"),
        op("cluster_reduce", (3,), "MN", axis="K.cluster", op="sum"),
        op("cluster_reduce", (6,), "M", axis="K.cluster", op="sum"),
        op("constant", (), "", value=1e-6),
        op("add", (8, 9), "M"),
        op("sqrt", (10,), "M"),
        op("div", (7, 11), "MN"),
        op("store", (12,), "MN", tensor="Z", map=("M", "N")),
    )
    axes = (Axis("N", GRID, 48), Axis("K", CLUSTER, 2), Axis("K", LOOP, 16))
    dims: dict[str, Dim] = {"M": 16, "N": 6144, "K": 4096}
    return BlockProgram(dims, axes, {"M": 16, "N": 128, "K": 128}, ops)


def norm_linear() -> MuGraph:
    """`norm_linear_program` as a muGraph."""
    return _mugraph(
        {"X": (16, 4096), "W": (4096, 6144), "Z": (16, 6144)},
        ("X", "W"),
        ("Z",),
        KernelStep("rms_norm_matmul", norm_linear_program()),
        constants=("W",),
    )


def norm_backward_program() -> BlockProgram:
    """RMSNorm backward: dx leaves in every visit, partial dw after the last."""
    ops = (
        op("load", (), "N", tensor="w", map=("N",)),
        op("load", (), "MN", tensor="x", map=("M", "N")),
        op("load", (), "MN", tensor="dy", map=("M", "N")),
        op("square", (1,), "MN"),
        op("mean", (3,), "M", over="N"),
        op("constant", (), "", value=1e-6),
        op("add", (4, 5), "M"),
        op("rsqrt", (6,), "M"),
        op("mul", (1, 7), "MN"),
        op("mul", (2, 0), "MN"),
        op("mul", (8, 9), "MN"),
        op("mean", (10,), "M", over="N"),
        op("mul", (8, 11), "MN"),
        op("sub", (9, 12), "MN"),
        op("mul", (13, 7), "MN"),
        op("store", (14,), "MN", tensor="dx", map=("M", "N")),
        op("mul", (2, 8), "MN"),
        op("sum", (16,), "N", over="M"),
        op("accumulate", (17,), "N", axis="M.persistent", op="sum"),
        op("store", (18,), "N", tensor="part", map=("M.grid", "N")),
    )
    axes = (Axis("M", GRID, 64), Axis("M", PERSISTENT, 4))
    return BlockProgram({"M": 1024, "N": 4096}, axes, {"M": 4, "N": 4096}, ops)


def norm_backward() -> MuGraph:
    """Two kernels: `norm_backward_program`, and the sum of the partial dw."""
    finish = BlockProgram(
        {"P": 64, "N": 4096},
        (Axis("N", GRID, 32),),
        {"P": 64, "N": 128},
        (
            op("load", (), "PN", tensor="part", map=("P", "N")),
            op("sum", (0,), "N", over="P"),
            op("store", (1,), "N", tensor="dw", map=("N",)),
        ),
    )
    rows = (1024, 4096)
    return _mugraph(
        {"w": (4096,), "x": rows, "dy": rows, "dx": rows, "part": (64, 4096), "dw": (4096,)},
        ("x", "w", "dy"),
        ("dx", "dw"),
        KernelStep("rms_norm_backward", norm_backward_program()),
        KernelStep("sum_dw", finish),
        constants=("w",),
    )


def nested() -> MuGraph:
    """A loop inside a persistent axis, with values that go around one loop or both."""
    ops = (
        op("load", (), "N", tensor="b", map=("N",)),
        op("load", (), "M", tensor="s", map=("M",)),
        op("sqrt", (1,), "M"),
        op("load", (), "MK", tensor="x", map=("M", "K")),
        op("load", (), "NK", tensor="v", map=("K", "N")),
        op("mul", (3, 2), "MK"),
        op("matmul", (5, 4), "MN", over="K"),
        op("accumulate", (6,), "MN", axis="K.loop", op="sum"),
        op("add", (7, 0), "MN"),
        op("mul", (8, 1), "MN"),
        op("silu", (9,), "MN"),
        op("store", (10,), "MN", tensor="y", map=("M", "N")),
        op("sum", (10,), "N", over="M"),
        op("accumulate", (12,), "N", axis="M.persistent", op="sum"),
        op("mul", (13, 0), "N"),
        op("store", (14,), "N", tensor="z", map=("M.grid", "N")),
    )
    axes = (Axis("N", GRID, 4), Axis("M", GRID, 8), Axis("M", PERSISTENT, 8), Axis("K", LOOP, 8))
    program = BlockProgram({"M": 1024, "N": 512, "K": 512}, axes, {"M": 16, "N": 128, "K": 64}, ops)
    shapes = {"b": (512,), "s": (1024,), "x": (1024, 512), "v": (512, 512), "y": (1024, 512)}
    return _mugraph(
        {**shapes, "z": (8, 512)},
        ("b", "s", "x", "v"),
        ("y", "z"),
        KernelStep("nested", program),
    )


def symbolic_rows() -> MuGraph:
    """silu of rows, as many as the call has."""
    m = Symbol("M", 256)
    program = BlockProgram(
        {"M": m, "N": 1024},
        (Axis("M", GRID, None),),
        {"M": 8, "N": 1024},
        (
            op("load", (), "MN", tensor="X", map=("M", "N")),
            op("silu", (0,), "MN"),
            op("store", (1,), "MN", tensor="Y", map=("M", "N")),
        ),
    )
    spec = TensorSpec("X", (m, 1024), bfloat16)
    out = TensorSpec("Y", (m, 1024), bfloat16)
    return MuGraph({"X": spec, "Y": out}, ("X",), ("Y",), (KernelStep("silu", program),))


def online_softmax_program() -> BlockProgram:
    """Rows of softmax that do not fit: maximum and denominator first, then results."""
    ops = (
        op("load", (), "MN", tensor="X", map=("M", "N")),
        op("max", (0,), "M", over="N"),
        op("sub", (0, 1), "MN"),
        op("exp", (2,), "MN"),
        op("sum", (3,), "M", over="N"),
        op("accumulate", (1,), "M", axis="N.loop", op="max"),
        op("accumulate", (4, 1, 5), "M", axis="N.loop", op="sum"),
        op("cluster_reduce", (5,), "M", axis="N.cluster", op="max"),
        op("cluster_reduce", (6, 5, 7), "M", axis="N.cluster", op="sum"),
        op("load", (), "N", tensor="w", map=("N",)),
        op("sub", (0, 7), "MN"),
        op("exp", (10,), "MN"),
        op("div", (11, 8), "MN"),
        op("mul", (12, 9), "MN"),
        op("store", (13,), "MN", tensor="Y", map=("M", "N")),
    )
    axes = (Axis("M", GRID, 32), Axis("N", CLUSTER, 2), Axis("N", LOOP, 8))
    return BlockProgram({"M": 256, "N": 65536}, axes, {"M": 8, "N": 4096}, ops)


def online_softmax() -> MuGraph:
    """`online_softmax_program` as a muGraph: softmax of X, times w."""
    return _mugraph(
        {"X": (256, 65536), "w": (65536,), "Y": (256, 65536)},
        ("X", "w"),
        ("Y",),
        KernelStep("softmax", online_softmax_program()),
        constants=("w",),
    )


def joined_norms() -> MuGraph:
    """The length of every row of X; loop, cluster and grid share out a row."""
    ops = (
        op("load", (), "MK", tensor="X", map=("M", "K")),
        op("square", (0,), "MK"),
        op("sum", (1,), "M", over="K"),
        op("accumulate", (2,), "M", axis="K.loop", op="sum"),
        op("cluster_reduce", (3,), "M", axis="K.cluster", op="sum"),
        op("grid_reduce", (4,), "M", axis="K.grid", op="sum"),
        op("sqrt", (5,), "M"),
        op("store", (6,), "M", tensor="Y", map=("M", None)),
    )
    axes = (Axis("K", GRID, 4), Axis("K", CLUSTER, 2), Axis("K", LOOP, 8))
    program = BlockProgram({"M": 4, "K": 65536}, axes, {"M": 4, "K": 1024}, ops)
    step = KernelStep("norms", program)
    return _mugraph({"X": (4, 65536), "Y": (4, 1)}, ("X",), ("Y",), step)


def persistent_rows() -> MuGraph:
    """RMSNorm backward in one launch: rows in clusters, as many visits as the call has rows for."""
    return row_programs.CASES["rms backward, long rows, symbolic"]()[1]


ALL = {
    "norm_linear": norm_linear,
    "norm_backward": norm_backward,
    "nested": nested,
    "symbolic_rows": symbolic_rows,
    "online_softmax": online_softmax,
    "joined_norms": joined_norms,
    "persistent_rows": persistent_rows,
}


def _mugraph(
    shapes: dict[str, tuple[int, ...]],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *steps: KernelStep,
    constants: tuple[str, ...] = (),
) -> MuGraph:
    tensors = {n: TensorSpec(n, s, float16, n in constants) for n, s in shapes.items()}
    return MuGraph(tensors, inputs, outputs, steps)
