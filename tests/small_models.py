"""Small models in the ways in which repositories write them, for tracing whole."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing import Case, randn

WIDTH, HEADS, INNER = 32, 4, 8
X = randn(2, 8, WIDTH)
ANGLES = torch.outer(torch.arange(8.0), 1e4 ** (-torch.arange(0, INNER, 2) / INNER)).repeat(1, 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions by halves."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def heads(x: Tensor) -> Tensor:
    """``[B, S, H D]`` as ``[B, H, S, D]``."""
    return x.unflatten(-1, (-1, INNER)).transpose(1, 2)


class OffsetNorm(nn.Module):
    """RMSNorm whose weight is a difference from 1, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (rows * (1.0 + self.weight.float())).type_as(x)


class SoftcapLayer(nn.Module):
    """Norms before and after, norms of heads, capped scores, a window, a scaled embedding."""

    def __init__(self, window: int = 3) -> None:
        super().__init__()
        sizes = (WIDTH, 2 * INNER, 2 * INNER)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in sizes)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(OffsetNorm(WIDTH) for _ in range(4))
        self.of_heads = nn.ModuleList(OffsetNorm(INNER) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, WIDTH, bias=False)
        self.window = window

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (heads(p(x)) for p in (self.q, self.k, self.v))
        q, k = (rotated(n(t), cos, sin) for n, t in zip(self.of_heads, (q, k), strict=True))
        scores = q @ k.repeat_interleave(2, 1).mT * 0.25
        scores = torch.tanh(scores / 50.0) * 50.0
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        seen = seen & torch.ones_like(seen).triu(1 - self.window)
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return self.o((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * torch.tensor(WIDTH**0.5, dtype=x.dtype)
        x = x + self.norms[1](self.attend(self.norms[0](x), cos, sin))
        h = self.norms[2](x)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return torch.tanh((x + self.norms[3](h)) / 30.0) * 30.0


class ParallelLayer(nn.Module):
    """Attention beside the MLP; half of each head is rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU("tanh"), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).view(2, 8, 3, HEADS, INNER).permute(2, 0, 3, 1, 4)
        q, k = (
            torch.cat([rotated(t[..., :4], cos[:, :4], sin[:, :4]), t[..., 4:]], -1) for t in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)) + self.mlp(h) + x


class LatentAttention(nn.Module):
    """Low-rank keys and values; positions in columns of their own, written into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.down_q, self.up_q = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, 48, bias=False)
        self.down_kv, self.up_kv = nn.Linear(WIDTH, 20, bias=False), nn.Linear(16, 64, bias=False)
        self.norm_q, self.norm_kv = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, :4], sin[:, :4]
        q = self.up_q(self.norm_q(self.down_q(x))).view(2, 8, HEADS, 12).transpose(1, 2)
        plain, turned = q.split([8, 4], -1)
        latent, shared = self.down_kv(x).split([16, 4], -1)
        kv = self.up_kv(self.norm_kv(latent)).view(2, 8, HEADS, 16).transpose(1, 2)
        k, v = kv.split([8, 8], -1)
        queries, keys = q.new_empty(2, HEADS, 8, 12), q.new_empty(2, HEADS, 8, 12)
        queries[..., :8], queries[..., 8:] = plain, rotated(turned, cos, sin)
        keys[..., :8], keys[..., 8:] = k, rotated(shared.unsqueeze(1), cos, sin)
        y = F.scaled_dot_product_attention(queries, keys, v, is_causal=True, scale=12**-0.5)
        return self.o(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two experts of four for each token, by their weights or by one-hot sums."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.w1 = nn.Parameter(randn(4, 48, WIDTH) * 0.2)
        self.w2 = nn.Parameter(randn(4, WIDTH, 48) * 0.2)
        self.dense = dense

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, logits = x.flatten(0, 1), self.gate(x.flatten(0, 1))
        weights, chosen = F.softmax(logits, 1, dtype=torch.float32).topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.dense:
            share = (F.one_hot(chosen, 4).to(x.dtype) * weights[..., None]).sum(1)
            h = torch.einsum("td,ehd->teh", x, self.w1).relu().square()
            y = torch.einsum("teh,edh->ted", h, self.w2)
            return torch.einsum("ted,te->td", y, share), logits
        h = F.silu(torch.einsum("td,tahd->tah", x, self.w1[chosen]))
        y = torch.einsum("tah,tadh->tad", h, self.w2[chosen])
        return (y * weights[..., None]).sum(1), logits


class Retention(nn.Module):
    """Linear attention that decays by powers of a number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(HEADS, WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = (p(x) for p in self.parts[:4])
        steps = torch.arange(x.shape[1])
        gap, base = (steps[:, None] - steps).float(), 1 - 2 ** (-5 - torch.arange(4.0))
        decay = torch.where(gap >= 0, base[:, None, None] ** gap, 0.0)
        y = (heads(q) @ heads(k).mT * INNER**-0.5 * decay) @ heads(v)
        y = self.norm(y.transpose(1, 2).reshape(-1, WIDTH)).view_as(x)
        return self.parts[4](F.silu(gate) * y)


class RelativeBias(nn.Module):
    """Scores plus a learned number for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        far = (steps[:, None] - steps).abs()
        buckets = torch.where(far < 4, far, (2 + torch.log2(far.float())).long().clamp(max=7))
        bias = self.bias(buckets).permute(2, 0, 1)[None]
        scores = heads(self.q(x)) @ heads(self.k(x)).mT + bias
        weights = F.softmax(scores.float(), -1).type_as(scores)
        return self.o((weights @ heads(self.v(x))).transpose(1, 2).flatten(2))


class Modulated(nn.Module):
    """A layer of a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU("tanh"), nn.Linear(64, WIDTH))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.ada(c)[:, None].chunk(6, -1)
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, INNER)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.o(y)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


def multi_query(x: Tensor, w: Tensor) -> Tensor:
    """All query heads share one of the keys; cut from one projection."""
    parts = F.linear(x, w).view(2, 8, HEADS + 2, INNER).transpose(1, 2)
    q, k, v = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
    return ((q @ k.mT * INNER**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def absorbed(x: Tensor, latent: Tensor, up: Tensor) -> Tensor:
    """Queries multiplied with the keys' up-projection: attention over the latents."""
    q = torch.einsum("bshd,hdc->bshc", x.unflatten(-1, (HEADS, INNER)), up[:, :INNER])
    weights = torch.einsum("bshc,btc->bsht", q, latent).mul(0.3).softmax(-1)
    y = torch.einsum("bsht,btc->bshc", weights, latent)
    return torch.einsum("bshc,hdc->bshd", y, up[:, INNER:]).flatten(2)


def cached(q: Tensor, new: Tensor, cache: Tensor, place: Tensor) -> Tensor:
    """One token more in a copy of a cache."""
    k, v = cache.index_copy(2, place, new).chunk(2, -1)
    return (q @ k.mT / math.sqrt(INNER)).softmax(-1) @ v


def guarded(scores: Tensor, hidden: Tensor) -> Tensor:
    """Rows that see nothing are 0."""
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, weights)


HIDDEN = torch.tensor([[0, 1, 0, 0, 1], [1] * 5, [0] * 5]) > 0
H = WIDTH

MODELS: list[Case] = [
    ("capped scores and windows", SoftcapLayer(), (X, COS, SIN)),
    ("the same of half", SoftcapLayer().bfloat16(), tuple(t.bfloat16() for t in (X, COS, SIN))),
    ("attention beside the MLP", ParallelLayer(), (X, COS, SIN)),
    ("latent attention", LatentAttention(), (X, COS, SIN)),
    ("latents absorbed", absorbed, (X, randn(2, 8, 16), randn(HEADS, 2 * INNER, 16) * 0.3)),
    ("multi-query", multi_query, (X, randn((HEADS + 2) * INNER, H))),
    ("experts by gathering", Experts(False), (X,)),
    ("experts by one-hot", Experts(True), (X,)),
    ("retention", Retention(), (X,)),
    ("relative bias", RelativeBias(), (X,)),
    ("modulated", Modulated(), (X, randn(2, H))),
    ("a copy of a cache", cached, (randn(2, 4, 1, 8), randn(2, 4, 1, 16), randn(2, 4, 6, 16),
     torch.tensor([3]))),
    ("rows that see nothing", guarded, (randn(3, 5), HIDDEN)),
    ("spectral norm", nn.utils.parametrizations.spectral_norm(nn.Linear(H, 24)).eval(), (X,)),
    ("one feature", nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1)), (randn(5, 1),)),
    ("vmap", lambda x, w: torch.vmap(lambda row: F.softmax(w @ row, -1))(x), (X[0], randn(24, H))),
    ("sorted", lambda x: x.sort(-1, descending=True).values[..., :3].softmax(-1), (X,)),
    ("the largest", lambda x, w: (x @ w).topk(2, -1).values.softmax(-1), (X, randn(H, 8))),
    ("any and all", lambda x: torch.where((x > 1).any(-1, keepdim=True), x, x * (x > -2).all(0)),
     (X,)),
    ("low-rank crosses", lambda x, u, v, b: x * ((x @ v) @ u + b) + x,
     (X, randn(4, H), randn(H, 4), randn(H))),
    ("focal loss", lambda x, t: ((1 - torch.exp(-(ce := F.binary_cross_entropy_with_logits(
        x, t, reduction="none")))) ** 2 * ce).mean(), (X, (randn(2, 8, H) > 0).float())),
    ("preferences", lambda a, b, c: (-F.logsigmoid(0.1 * (a - b)).mean(), (a > c).float().mean()),
     (randn(6), randn(6) + 0.1, randn(6) - 0.1)),
    ("contrastive", lambda z: F.cross_entropy((z @ z.T / 0.5).masked_fill(
        torch.eye(8, dtype=torch.bool), -1e9), (torch.arange(8) + 4) % 8), (randn(8, 16) * 0.3,)),
    ("Lion", lambda p, g, m: (p * 0.99 - 1e-3 * torch.sign(m.lerp(g, 0.1)), m.lerp(g, 0.99)),
     (X, X.flip(0), X * 0.1)),
    ("factored second moments", lambda g, r, c: g * (r / r.mean(-1, keepdim=True)).rsqrt()[:, None]
     * c.rsqrt(), (randn(16, 24), randn(16).square() + 0.1, randn(24).square() + 0.1)),
    ("integers and scales", lambda x, w, s: F.linear(x, ((w - 8).to(x.dtype) * s).view(24, H)),
     (X, torch.arange(24 * H).view(24, 4, 8).remainder(16).to(torch.int8), randn(24, 4, 1))),
    ("interaction of all pairs", lambda a, b, w: torch.einsum("bhd,bmd,ohm->bod", a, b, w),
     (randn(3, 4, 8), randn(3, 5, 8), randn(6, 4, 5))),
]  # fmt: skip
