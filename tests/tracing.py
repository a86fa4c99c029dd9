"""Programs of PyTorch to trace, and how a traced one is compared with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.checks import Signature
from cutesuper.torch.compile import trace
from cutesuper.torch.compile.partition import Partition, partition
from cutesuper.torch.compile.rewrite import Call, rewrite
from cutesuper.torch.compile.trace import TracedProgram, superoptimize_callable
from cutesuper.torch.compile.watch import Observer
from cutesuper.verify.numeric import acceptable


class Reference:
    """Stands in the place of a kernel: the same checks of its arguments, and the reference
    executor."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self._expanded = graph.expanded()
        self._signature = Signature(graph)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        self._signature.bind(tensors)
        return run_reference(self._expanded, tensors)


def traced(monkeypatch: Any, fn: Any, inputs: Any, **options: Any) -> TracedProgram:
    """A traced program that runs without compiling."""
    monkeypatch.setattr(trace, "optimize_graph", lambda graph, **_: Reference(graph))
    with torch.no_grad():
        return superoptimize_callable(fn, inputs, **options)


def check(program: Callable[..., Any], fn: Any, inputs: Any) -> None:
    """A traced program gives what the original gives, in the shapes, types and strides of it."""
    with torch.no_grad():
        eager = _tuple(fn(*inputs))
        exact = _tuple(_double(fn)(*(_to_double(x) for x in inputs)))
        mine = _tuple(program(*inputs))
    assert len(mine) == len(eager)
    for y, e, x in zip(mine, eager, exact, strict=True):
        assert y.shape == e.shape and y.dtype == e.dtype, (y.shape, e.shape, y.dtype, e.dtype)
        if y.is_complex():
            y, e, x = (torch.view_as_real(t) for t in (y, e, x))
        report = acceptable(y, x, e, y.dtype)
        assert report, report


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return tuple(y.values()) if isinstance(y, dict) else (y,) if isinstance(y, Tensor) else tuple(y)


def _double(fn: Any) -> Any:
    return copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn


def _to_double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_complex():
        return x.to(torch.complex128)
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random tensors, of one seed for each shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---------------------------------------------------------------------------------------- modules


class RMSNorm(nn.Module):
    """Written with primitive operators, as in models of the Llama family."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (rows * scale).to(x.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48, bias=bias), nn.Linear(32, 48, bias=bias)
        self.down = nn.Linear(48, 32, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class FusedMLP(nn.Module):
    """Gate and up in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Projections, heads that may share keys, causal attention, projection."""

    def __init__(self, heads: int = 4, shared: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(32, heads * 16, bias=False)
        self.kv = nn.ModuleList(nn.Linear(32, shared * 16, bias=False) for _ in range(2))
        self.o = nn.Linear(heads * 16, 32, bias=False)
        self.heads, self.shared, self.causal = heads, shared, causal

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, 16).transpose(1, 2)
        k, v = (p(x).view(b, s, self.shared, 16).transpose(1, 2) for p in self.kv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class RepeatedAttention(nn.Module):
    """Keys repeated for every query head by expand and reshape, softmax written out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = k.shape
        n = q.shape[1] // h
        k = k[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)
        v = v[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)
        weights = torch.softmax(q @ k.transpose(-1, -2) / d**0.5, dim=-1)
        return weights @ v


class SharedAttention(nn.Module):
    """The same with a causal mask that is added to the scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = k.shape
        n, rows = q.shape[1] // h, torch.arange(q.shape[2])
        k, v = (t[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d) for t in (k, v))
        mask = torch.where(rows[:, None] >= torch.arange(s), 0.0, -torch.inf)
        return torch.softmax(q @ k.mT * 0.25 + mask, dim=-1) @ v


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(32), nn.RMSNorm(32, eps=1e-5)])
        self.attention, self.mlp = Attention(), GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Encoder(nn.Module):
    """LayerNorm, GELU, biases; a layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention(2, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x + self.attention(x))
        return self.two(x + self.mlp(x))


class LoRA(nn.Module):
    """W x + B A x * scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(32, 48)
        self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(8, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x) + self.b(self.a(x)) * 2.0


class Normalized(nn.Module):
    """nGPT's update: h to norm(h + a (norm(h') - h))."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(32))

    def forward(self, h: Tensor, new: Tensor) -> Tensor:
        new = F.normalize(new, dim=-1)
        return F.normalize(h + self.alpha * (new - h), dim=-1)


# ----------------------------------------------------------------------------------------- corpus


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


PLACES = torch.arange(15).view(3, 5) * 2 + 1
X, Y, W, B = randn(3, 5, 32), randn(3, 5, 32) + 0.1, randn(24, 32), randn(24)
R, C = randn(32), randn(3, 5, 1)
HEADS = (randn(2, 4, 5, 16), randn(2, 2, 7, 16), randn(2, 2, 7, 16) - 0.2)
HALF = {"dtype": torch.bfloat16}

Case = tuple[str, Any, tuple[Any, ...]]

CORPUS: list[Case] = [
    ("add", lambda x, y: x + y, (X, Y)),
    ("add with alpha", lambda x, y: torch.add(x, y, alpha=3), (X, Y)),
    ("a row is added", lambda x, r: x + r, (X, R)),
    ("a column is multiplied", lambda x, c: x * c, (X, C)),
    ("numbers", lambda x: 1.0 - (x * 2 + 3) / 4, (X,)),
    ("a number over a tensor", lambda x: 2.0 / (x * x + 1), (X,)),
    ("negative", lambda x: -x, (X,)),
    ("powers", lambda x: x**2 + x**3 + (x * x) ** 0.5 + (x * x + 1) ** -0.5, (X,)),
    ("power of a number", lambda x: 2**x, (X,)),
    ("exp and log", lambda x: torch.log(torch.exp(x) + 1), (X,)),
    ("base two", lambda x: torch.exp2(x) + torch.log2(x * x + 1), (X,)),
    ("log1p and expm1", lambda x: torch.log1p(x.abs() * 1e-3) * torch.expm1(x * 1e-3), (X,)),
    ("base ten", lambda x: torch.log10(x.abs() + 0.1), (X,)),
    ("angles", lambda x: torch.sin(x) * torch.cos(2 * x) + torch.tan(x * 0.1), (X,)),
    ("angles of any size", lambda x: torch.sin(x) + torch.cos(x), (X * 1e6,)),
    ("sinc", torch.sinc, (X,)),
    ("powers of 0 and 1", lambda x: (x**0, x**1, torch.xlogy(x, 2.0)), (X,)),
    ("binary cross entropy", F.binary_cross_entropy, (X.sigmoid(), Y.sigmoid())),
    ("inverse angles", lambda x: (torch.asin(x.tanh()), torch.acos(x.tanh()), x.atan()), (X,)),
    ("hyperbolic functions", lambda x: (x.sinh(), x.cosh(), x.asinh()), (X,)),
    ("inverse hyperbolic functions",
     lambda x: (torch.acosh(x * x + 1.5), torch.atanh(x.tanh() * 0.9)), (X,)),
    ("what is left of the error function", lambda x: torch.erfc(x * 3), (X,)),
    ("snake", lambda x, r: x + torch.sin(r * x).square() / r, (X, R)),
    ("rounding", lambda x: (torch.round(x * 8) + torch.floor(x), torch.ceil(x), torch.trunc(x * 9)),
     (X,)),
    ("remainders", lambda x, y: (x % 0.1, 3 % x, torch.fmod(x, y), x // 0.1, -x // y), (X, Y)),
    ("quotients without a fraction", lambda x: torch.div(x, 0.3, rounding_mode="trunc"), (X,)),
    ("any powers",
     lambda x, y: (x.abs() ** (1 / 3), x**17, x.abs() ** y, 0.3**x, (-2) ** x.round()), (X, Y)),
    ("angles of points", lambda x, y: torch.atan2(x, y) + torch.copysign(x, y), (X, Y)),
    ("norms of odd orders", lambda x: (x.norm(3, -1), torch.linalg.vector_norm(x * 0, 2.5, -1)),
     (X,)),
    ("an element of each row", lambda x, i: x.softmax(-1).gather(-1, i[..., None])[..., 0] * 2,
     (X, PLACES)),
    ("the loss of labels",
     lambda x, i: F.cross_entropy(x.flatten(0, 1), i.flatten(), ignore_index=3), (X, PLACES)),
    ("the loss of each label",
     lambda x, i: F.nll_loss(x[0].log_softmax(-1), i[0], reduction="none"), (X, PLACES)),
    ("halves are rounded to even", torch.round, (torch.arange(-8.0, 8).view(2, 8) / 2,)),
    ("fractions", lambda x: torch.frac(x * 5), (X,)),
    ("logaddexp", torch.logaddexp, (X, Y)),
    ("softplus of what is small", lambda x: F.softplus(x - 20), (X,)),
    ("roots", lambda x: torch.sqrt(x * x) + torch.rsqrt(x * x + 1), (X,)),
    ("reciprocal", lambda x: torch.reciprocal(x * x + 1), (X,)),
    ("absolute", torch.abs, (X,)),
    ("relu", F.relu, (X,)),
    ("relu6", F.relu6, (X,)),
    ("silu", F.silu, (X,)),
    ("silu by hand", lambda x: x / (1 + torch.exp(-x)), (X,)),
    ("sigmoid by hand", lambda x: 1 / (1 + torch.exp(-x)), (X,)),
    ("gelu", F.gelu, (X,)),
    ("gelu by tanh", lambda x: F.gelu(x, approximate="tanh"), (X,)),
    ("tanh and erf", lambda x: torch.tanh(x) * torch.erf(x), (X,)),
    ("sigmoid", torch.sigmoid, (X,)),
    ("softplus", lambda x: F.softplus(x * 10), (X,)),
    ("softplus with beta", lambda x: F.softplus(x, beta=2.0), (X,)),
    ("logsigmoid", F.logsigmoid, (X,)),
    ("mish", F.mish, (X,)),
    ("leaky relu", lambda x: F.leaky_relu(x, 0.2), (X,)),
    ("hard functions", lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.hardtanh(x), (X,)),
    ("clamp", lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + x.clamp_max(0.3), (X,)),
    ("a limit that is a number", lambda x: torch.where(x > 0.5, x, 0.0), (X,)),
    ("chosen by another tensor", lambda x, y: torch.where(x <= y, 0.0, x), (X, Y)),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3), (X, Y)),
    ("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5), (X, Y)),
    ("addcdiv", lambda x, y: torch.addcdiv(x, y, x * x + 1, value=0.5), (X, Y)),
    ("casts", lambda x: (x.half().float() * 2).to(torch.bfloat16), (X,)),
    ("two types", lambda x, y: x + y, (X, Y.bfloat16())),
    ("sum", lambda x: x.sum(-1), (X,)),
    ("sum that keeps", lambda x: x / x.square().sum(-1, keepdim=True), (X,)),
    ("sum over rows", lambda x: x.sum((0, 1)), (X,)),
    ("mean of all", lambda x: x.mean(), (X,)),
    ("maximum", lambda x: x - x.amax(-1, keepdim=True), (X,)),
    ("minimum", lambda x: x - x.amin(-1, keepdim=True), (X,)),
    ("variance", lambda x: x.var(-1), (X,)),
    ("standard deviation", lambda x: x.std(-1, correction=0, keepdim=True), (X,)),
    ("variance and mean", lambda x: torch.var_mean(x, -1), (X,)),
    ("logsumexp", lambda x: x.logsumexp(-1), (X,)),
    ("softmax", lambda x: x.softmax(-1), (X,)),
    ("softmax of hidden rows",
     lambda x: torch.ops.aten._safe_softmax(torch.where(x[..., :1] > 0, x, -torch.inf), -1), (X,)),
    ("softmax of rows that may be -inf",
     lambda x: torch.ops.aten._safe_softmax((x[..., :4] - 0.8).relu().log(), -1), (X,)),
    ("conditions that are counted", lambda x: (x > 0).sum(-1, dtype=torch.float32) * x[..., 0],
     (X,)),
    ("softmax along rows", lambda x: x.softmax(1), (X,)),
    ("log softmax", lambda x: x.log_softmax(-1), (X,)),
    ("softmax by hand", lambda x: (e := (x - x.amax(-1, True)).exp()) / e.sum(-1, True), (X,)),
    ("vector norm", lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), (X,)),
    ("normalize", lambda x: F.normalize(x, dim=-1), (X,)),
    ("rms norm", lambda x, r: F.rms_norm(x, (32,), r, 1e-5), (X, R)),
    ("rms norm without weight", lambda x: F.rms_norm(x, (32,)), (X,)),
    ("layer norm", lambda x, r: F.layer_norm(x, (32,), r, r), (X, R)),
    ("layer norm without weight", lambda x: F.layer_norm(x, (32,)), (X,)),
    ("rms norm of one element", lambda x, r: F.rms_norm(x, (1,), r), (C, R[:1].clone())),
    ("layer norm of one element", lambda x, r: F.layer_norm(x * 2, (1,), r, r), (C, R[:1].clone())),
    ("layer norm of one element without weight", lambda x: F.layer_norm(x, (1, 1)) + 1,
     (randn(4, 1, 1),)),
    ("softmax of one element", lambda x: (x.softmax(-1), x.log_softmax(-1), x.softmax(1)), (C,)),
    ("softmax along an extent of 1", lambda x: x.unsqueeze(1).softmax(1), (X,)),
    ("matmul", lambda x, w: x @ w.t(), (X, W)),
    ("linear", _linear, (X, W, B)),
    ("linear of two dimensions", _linear, (X[0].contiguous(), W, B)),
    ("symmetric", lambda x: x @ x.mT @ x, (X,)),
    ("addmm", lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), (B, X[0].clone(), W.t())),
    ("bmm", torch.bmm, (X, Y.transpose(1, 2).contiguous())),
    ("baddbmm", lambda x, y, z: torch.baddbmm(z, x, y), (X, Y.mT.contiguous(), randn(3, 5, 5))),
    ("a matrix and its transpose", lambda x: x @ x.mT, (X,)),
    ("a square weight and a residual", lambda x, w: x + x @ w.t(), (X, randn(32, 32))),
    ("a square weight, as it is stored", lambda x, w: x + x @ w, (X, randn(32, 32))),
    ("a matrix plus its transpose", lambda x: x.mT + x, (randn(3, 32, 32),)),
    ("a square weight twice", lambda x, w: x + F.silu(x @ w.t()) @ w, (X, randn(32, 32))),
    ("one sequence of one token", Block(), (randn(1, 1, 32),)),
    ("one token of each sequence", Block(), (randn(4, 1, 32),)),
    ("one row", _linear, (randn(1, 32), W, B)),
    ("views", lambda x, r: (x.reshape(15, 32) * r).view(3, 5, 4, 8).flatten(2), (X, R)),
    ("heads", lambda x: F.rms_norm(x.view(3, 5, 4, 8), (8,)).view(3, 5, 32), (X,)),
    ("transposed", lambda x, y: x.transpose(0, 1) + y.transpose(0, 1), (X, Y)),
    ("transposed on one side", lambda x, y: x.mT + y, (X, randn(3, 32, 5))),
    ("permuted softmax", lambda x: x.permute(2, 0, 1).softmax(0), (X,)),
    ("expanded", lambda c, r: c.expand(3, 5, 32) * r, (C, R)),
    ("reduced along expanded dimensions", lambda c, r: (
        c.expand(3, 5, 32).amax((0, 1)), c.expand(3, 5, 32).sum((0, 2)) + r.sum(),
        r.expand(3, 5, 32).amin(0), c.expand(3, 5, 32).mean(1), r.expand(3, 5, 32).logsumexp(0),
        torch.where((c > 0).expand(3, 5, 32).any(0), r, 0.0)), (C, R)),
    ("squeezed", lambda x: (x.sum(-1, keepdim=True).squeeze(-1) * 2).unsqueeze(-1), (X,)),
    ("per row twice", lambda x: (x.sum(-1) * 2).unsqueeze(-1) * x, (X,)),
    ("several results", lambda x, y: (x + y, x * y, (x + y).sum(-1)), (X, Y)),
    ("named results", lambda x: {"a": x * 2, "b": x + 1}, (X,)),
    ("in place on a new value", lambda x: F.relu(x * 2, inplace=True).add_(1), (X,)),
    ("filled", lambda x: x + torch.full_like(x, 2.0) * torch.ones(32), (X,)),
    ("concatenated factors", lambda x, y, w: torch.cat([x, y], -1) @ w, (X, Y, randn(64, 24))),
    ("split and put together", lambda x, w: sum((x @ w.t()).split([8, 16, 8], -1)[::2]),
     (X, randn(32, 32))),
    ("attention", F.scaled_dot_product_attention, (HEADS[0], *(2 * (HEADS[0] * 0.5,)))),
    ("shared heads", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
     HEADS),
    ("repeated heads", RepeatedAttention(), HEADS),
    ("causal", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3),
     (HEADS[0],)),
    ("rms norm module", RMSNorm(32), (X,)),
    ("gated mlp", GatedMLP(), (X,)),
    ("gated mlp with gelu", GatedMLP(F.gelu, bias=True), (X,)),
    ("fused mlp", FusedMLP(), (X,)),
    ("attention module", Attention(), (X,)),
    ("decoder layer", Block(), (X,)),
    ("encoder layer", Encoder(), (X,)),
    ("lora", LoRA(), (X,)),
    ("normalized update", Normalized(), (X, Y)),
    ("mlp", nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()), (X,)),
    ("dropout at rest", nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5)).eval(), (X,)),
    ("norm and projection of half", nn.Sequential(RMSNorm(32), nn.Linear(32, 24)).bfloat16(),
     (X.bfloat16(),)),
    ("decoder layer of half", Block().bfloat16(), (X.bfloat16(),)),
]  # fmt: skip


class _Part(nn.Module):
    def __init__(self, run: Reference) -> None:
        super().__init__()
        self.run = run

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.run([t.contiguous() for t in tensors])


def exported(fn: Any, inputs: Any) -> Any:
    """The graph that ``torch.export`` makes of a function, as it is traced."""
    with torch.enable_grad():
        return trace._exported(fn, "fn", inputs, None, None, Observer(fn, frozenset()))[0]


def in_parts(fn: Any, inputs: Any) -> tuple[Callable[..., Any], Partition]:
    """A program whose regions run as kernel graphs and the rest as it is, and the regions."""
    module = exported(fn, inputs)
    trace._fill_values(module)
    found = partition(module.graph, constants=[n for n in module.graph.nodes if n.op == "get_attr"])
    for i, r in enumerate(found.regions):
        module.add_submodule(f"part_{i}", _Part(Reference(r.graph)))
    rewrite(module.graph, [Call(r, f"part_{i}") for i, r in enumerate(found.regions)])
    module.graph.lint()
    module.recompile()
    return module, found
