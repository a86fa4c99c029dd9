"""The programs on which the search is measured, from their plain definitions.

Shapes of the first group are those of Mirage's benchmarks (arXiv:2405.05751; softmax there is
``exp(x) / sum exp(x)``, norms have no weight), batch size 1. The second group is from serving and
training; norms have a weight and an epsilon, softmax subtracts the maximum.

Builders take their extents: ``PROGRAMS["LoRA"].build(k=520)``. `Program.small` are extents at which
all parts of a program can still be divided and float64 on a CPU takes milliseconds; most are not a
multiple of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cutesuper.ir.dims import Shape
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph

EPS = 1e-6


@dataclass(frozen=True)
class Program:
    """A named kernel graph.

    Attributes:
        build: makes the graph; extents are keyword arguments.
        paper: whether it is one of the paper's six workloads.
        kernels: those of the most fused known program (None: unknown).
        seconds: limit of the search on two cores.
        small: arguments of ``build`` for a check in float64.
    """

    build: Callable[..., KernelGraph]
    paper: bool = False
    kernels: int | None = None
    seconds: float = 5.0
    small: dict[str, int] = field(default_factory=dict)


def _inputs(*shapes: Shape, names: str) -> tuple[KernelGraph, list[Tensor]]:
    g = new_kernel_graph()
    return g, [g.new_input(s, name=n) for s, n in zip(shapes, names.split(), strict=True)]


def _output(g: KernelGraph, *tensors: Tensor) -> KernelGraph:
    for t in tensors:
        g.mark_output(t)
    return g


def _plain_softmax(g: KernelGraph, scores: Tensor, v: Tensor) -> Tensor:
    """``exp(S) / sum exp(S) @ V``, as the paper's benchmarks define attention."""
    e = g.exp(scores)
    return g.matmul(g.div(e, g.sum(e, -1)), v)


# -------------------------------------------------------------------------- the paper's programs


def rms_linear(k: int = 4096, n: int = 6144) -> KernelGraph:
    """``rms(X) W``."""
    g, (x, w) = _inputs((16, k), (k, n), names="X W")
    return _output(g, g.matmul(g.rms_norm(x), w))


def gated_mlp(k: int = 4096, n: int = 4096) -> KernelGraph:
    """``silu(X A) * (X B)``."""
    g, (x, a, b) = _inputs((8, k), (k, n), (k, n), names="X A B")
    return _output(g, g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b)))


def lora(k: int = 256, n: int = 4096) -> KernelGraph:
    """``X W + (X A) B``."""
    g, (x, w, a, b) = _inputs((16, k), (k, n), (k, 16), (16, n), names="X W A B")
    return _output(g, g.add(g.matmul(x, w), g.matmul(g.matmul(x, a), b)))


def grouped_attention(groups: int, rows: int, length: int = 4096) -> KernelGraph:
    """``softmax(Q K) V``, K stored (groups, d, length)."""
    g, (q, k, v) = _inputs(
        (groups, rows, 64), (groups, 64, length), (groups, length, 64), names="Q K V"
    )
    return _output(g, _plain_softmax(g, g.matmul(q, k), v))


def qk_norm(normed: str = "QV", rows: int = 256, length: int = 4096) -> KernelGraph:
    """``softmax(rms(Q) K) rms(V)`` (the paper's code), or norms of Q and K."""
    g, (q, k, v) = _inputs((2, rows, 64), (2, 64, length), (2, length, 64), names="Q K V")
    q = g.rms_norm(q, eps=0.0)
    if "K" in normed:
        k = g.div(k, g.sqrt(g.mean(g.square(k), -2)))
    if "V" in normed:
        v = g.rms_norm(v, eps=0.0)
    return _output(g, _plain_softmax(g, g.matmul(q, k), v))


def n_trans(width: int = 4096) -> KernelGraph:
    """``rms(X + alpha (rms(H) + X))``, the update of nGPT."""
    g, (x, h, alpha) = _inputs((8, width), (8, width), (width,), names="X H alpha")
    inner = g.add(g.rms_norm(h, eps=0.0), x)
    return _output(g, g.rms_norm(g.add(x, g.mul(alpha, inner)), eps=0.0))


def exp_mlp(k: int = 8192, n: int = 8192) -> KernelGraph:
    """``exp(X A) B`` with a hidden dimension of 8."""
    g, (x, a, b) = _inputs((16, k), (k, 8), (8, n), names="X A B")
    return _output(g, g.matmul(g.exp(g.matmul(x, a)), b))


def experts(count: int = 8, k: int = 4096, hidden: int = 4096, n: int = 4096) -> KernelGraph:
    """``exp(X A) B`` for every expert."""
    g, (x, a, b) = _inputs((count, 8, k), (count, k, hidden), (count, hidden, n), names="X A B")
    return _output(g, g.matmul(g.exp(g.matmul(x, a)), b))


# -------------------------------------------------------------------------------------- inference


def swiglu(k: int = 4096, hidden: int = 14336, n: int = 4096) -> KernelGraph:
    """``(silu(X A) * (X B)) D``."""
    g, (x, a, b, d) = _inputs((8, k), (k, hidden), (k, hidden), (hidden, n), names="X A B D")
    return _output(g, g.matmul(g.mul(g.silu(g.matmul(x, a)), g.matmul(x, b)), d))


def layer_norm(g: KernelGraph, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (arXiv:1607.06450)."""
    centred = g.sub(x, g.mean(x, -1))
    deviation = g.sqrt(g.add(g.mean(g.square(centred), -1), 1e-5))
    return g.add(g.mul(g.div(centred, deviation), weight), bias)


def layer_norm_linear(k: int = 4096, n: int = 4096) -> KernelGraph:
    """``LayerNorm(X) W``."""
    g, (x, w, c, b) = _inputs((16, k), (k, n), (k,), (k,), names="X W gain bias")
    return _output(g, g.matmul(layer_norm(g, x, c, b), w))


def softmax_linear(k: int = 4096, n: int = 4096) -> KernelGraph:
    """``softmax(X W)``."""
    g, (x, w) = _inputs((16, k), (k, n), names="X W")
    return _output(g, g.softmax(g.matmul(x, w)))


def attention(rows: int, length: int, causal: bool, heads: int = 8) -> KernelGraph:
    """Attention with scale and maximum, K stored (heads, length, d)."""
    g, (q, k, v) = _inputs(
        (heads, rows, 128), (heads, length, 128), (heads, length, 128), names="Q K V"
    )
    scores = g.mul(g.matmul(q, g.transpose(k)), 128**-0.5)
    if causal:
        scores = g.causal_mask(scores, alignment="bottom_right")
    return _output(g, g.matmul(g.softmax(scores), v))


def top_mlp(rows: int = 2048) -> KernelGraph:
    """DLRM's top MLP: 512-256-1, relu and sigmoid."""
    g, (x, a, b, c, d) = _inputs((rows, 512), (512, 256), (256,), (256, 1), (1,), names="X A a B b")
    hidden = g.relu(g.add(g.matmul(x, a), b))
    return _output(g, g.sigmoid(g.add(g.matmul(hidden, c), d)))


def residual_rms_linear(k: int = 4096, n: int = 6144) -> KernelGraph:
    """``rms(X + R) W``; the sum is an output too."""
    g, (x, r, c, w) = _inputs((16, k), (16, k), (k,), (k, n), names="X R gain W")
    y = g.add(x, r)
    return _output(g, g.matmul(g.rms_norm(y, c), w), y)


# --------------------------------------------------------------------------------------- training


def rms_backward(rows: int = 4096, width: int = 4096) -> KernelGraph:
    """dx and dw of RMSNorm from x, w, dy and the saved reciprocal root (arXiv:1910.07467)."""
    g, (x, w, dy, rstd) = _inputs(
        (rows, width), (width,), (rows, width), (rows, 1), names="x w dy rstd"
    )
    xhat = g.mul(x, rstd)
    wdy = g.mul(dy, w)
    c = g.mean(g.mul(xhat, wdy), -1)
    dx = g.mul(g.sub(wdy, g.mul(xhat, c)), rstd)
    return _output(g, dx, g.sum(g.mul(dy, xhat), 0))


def layer_norm_backward(rows: int = 4096, width: int = 4096) -> KernelGraph:
    """dx, dw and db of LayerNorm from x, w, dy and the saved mean and reciprocal root."""
    g, (x, w, dy, mean, rstd) = _inputs(
        (rows, width), (width,), (rows, width), (rows, 1), (rows, 1), names="x w dy mean rstd"
    )
    xhat = g.mul(g.sub(x, mean), rstd)
    wdy = g.mul(dy, w)
    inner = g.add(g.mean(wdy, -1), g.mul(xhat, g.mean(g.mul(xhat, wdy), -1)))
    dx = g.mul(g.sub(wdy, inner), rstd)
    return _output(g, dx, g.sum(g.mul(dy, xhat), 0), g.sum(dy, 0))


def attention_backward(heads: int = 8, length: int = 2048) -> KernelGraph:
    """dq, dk and dv from the saved log-sum-exp and delta = sum(do * o) (arXiv:2205.14135)."""
    shape, row = (heads, length, 128), (heads, length, 1)
    g, (q, k, v, do, lse, delta) = _inputs(
        shape, shape, shape, shape, row, row, names="q k v do lse delta"
    )
    p = g.exp(g.sub(g.mul(g.matmul(q, g.transpose(k)), 128**-0.5), lse))
    ds = g.mul(p, g.sub(g.matmul(do, g.transpose(v)), delta))
    dq = g.mul(g.matmul(ds, k), 128**-0.5)
    dk = g.mul(g.matmul(g.transpose(ds), q), 128**-0.5)
    return _output(g, dq, dk, g.matmul(g.transpose(p), do))


# ------------------------------------------------------------------------------------ whole layers


def llama_layer(
    tokens: int = 16, length: int = 4096, hidden: int = 4096, inner: int = 14336, groups: int = 8
) -> KernelGraph:
    """A decoder layer of Llama 3 8B over cached keys and values; one matrix for each head.

    Heads are dimensions of the weights: queries ``[8, 4, tokens, 128]``.
    The keys and values of the new tokens are outputs (the caller appends them to the cache).
    """
    g = new_kernel_graph()
    heads, d = 4, 128

    def given(name: str, *shape: int) -> Tensor:
        return g.new_input(shape, name=name)

    x = given("X", tokens, hidden)
    y = g.rms_norm(x, given("gain1", hidden))
    q = g.matmul(y, given("Wq", groups, heads, hidden, d))
    new_k = g.matmul(y, given("Wk", groups, 1, hidden, d))
    new_v = g.matmul(y, given("Wv", groups, 1, hidden, d))
    k, v = given("K", groups, 1, length, d), given("V", groups, 1, length, d)
    p = g.softmax(g.mul(g.matmul(q, g.transpose(k)), d**-0.5))
    heads_out = g.matmul(g.matmul(p, v), given("Wo", groups, heads, d, hidden))
    attended = g.sum(g.sum(heads_out, 0), 1)
    h = g.add(x, attended)
    z = g.rms_norm(h, given("gain2", hidden))
    up = g.mul(
        g.silu(g.matmul(z, given("Wg", hidden, inner))), g.matmul(z, given("Wu", hidden, inner))
    )
    return _output(g, g.add(h, g.matmul(up, given("Wd", inner, hidden))), new_k, new_v)


_LINEAR = {"k": 520, "n": 136}
_KEYS = {"length": 520}

PROGRAMS: dict[str, Program] = {
    "RMSNorm + Linear": Program(rms_linear, True, 1, 1.0, _LINEAR),
    "GatedMLP": Program(gated_mlp, True, 1, small=_LINEAR),
    "LoRA": Program(lora, True, 1, small={"k": 136, "n": 136}),
    "GQA": Program(partial(grouped_attention, 2, 256), True, 2, small=_KEYS),
    "QKNorm (Q, V)": Program(qk_norm, True, 2, small={"rows": 24, **_KEYS}),
    "nTrans": Program(n_trans, True, 1, small={"width": 520}),
    "QKNorm (Q, K)": Program(partial(qk_norm, "QK"), False, 2, small={"rows": 24, **_KEYS}),
    "MHA": Program(partial(grouped_attention, 32, 16), False, 1, small=_KEYS),
    "MQA": Program(partial(grouped_attention, 1, 1024), False, 2, small=_KEYS),
    "exp-MLP": Program(exp_mlp, False, 2, small=_LINEAR),
    "MoE": Program(experts, False, 2, small={"count": 2, "k": 520, "hidden": 136, "n": 72}),
    "SwiGLU + down": Program(swiglu, False, 2, small={"k": 520, "hidden": 136, "n": 72}),
    "LayerNorm + Linear": Program(layer_norm_linear, False, 1, small=_LINEAR),
    "softmax(X W)": Program(softmax_linear, False, 2, small={"k": 136, "n": 520}),
    "attention, scale": Program(
        partial(attention, rows=4, length=4096, causal=False), False, 2, small=_KEYS
    ),
    "attention, causal": Program(
        partial(attention, rows=2048, length=2048, causal=True),
        False,
        1,
        small={"heads": 2, "rows": 136, **_KEYS},
    ),
    "DLRM top MLP": Program(top_mlp, False, 1, small={"rows": 136}),
    "residual + RMSNorm + Linear": Program(residual_rms_linear, False, 1, small=_LINEAR),
    "RMSNorm backward": Program(rms_backward, False, 2, 10.0, {"rows": 520, "width": 520}),
    "RMSNorm backward, long rows": Program(
        partial(rms_backward, width=16384), False, 2, 10.0, {"rows": 264, "width": 1040}
    ),
    "LayerNorm backward": Program(layer_norm_backward, False, 2, 10.0, {"rows": 264, "width": 264}),
    "attention backward": Program(attention_backward, False, 2, 10.0, {"heads": 2, "length": 264}),
    "Llama decoder layer": Program(
        llama_layer,
        False,
        None,
        60.0,
        {"tokens": 8, "length": 2056, "hidden": 1032, "inner": 1040, "groups": 4},
    ),
}
