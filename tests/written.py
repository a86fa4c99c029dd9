"""Functions and modules as people write them, for inference and training."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.tracing import Case, randn

X = randn(3, 5, 32)

Y = randn(3, 5, 32) + 0.1

R = randn(32).abs() + 0.1

W = randn(24, 32)

B = randn(24)

W1, W2 = (randn(48, 32) * 0.3, randn(32, 48) * 0.3)

XH = X.half()

XB = X.bfloat16()

Q, K, V = (randn(2, 4, 6, 16), randn(2, 4, 6, 16) * 0.5, randn(2, 4, 6, 16) - 0.2)

K2, V2 = (randn(2, 2, 6, 16) * 0.5, randn(2, 2, 6, 16) - 0.2)


def rot_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


COS, SIN = (randn(6, 16).cos(), randn(6, 16).sin())


def rot_slice(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rope_unbind(x, c, s):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def gqa_ri(q, k, v):
    k = k.repeat_interleave(2, 1)
    v = v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v)


def gqa_exp(q, k, v):
    b, h, s, d = k.shape
    k = k[:, :, None, :, :].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)
    v = v[:, :, None, :, :].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def m_tril(q, k, v):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    T = q.size(-2)
    m = torch.tril(torch.ones(T, T))
    s = s.masked_fill(m == 0, float("-inf"))
    return s.softmax(-1) @ v


def m_trilbool(q, k, v):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    T = q.size(-2)
    m = torch.tril(torch.ones(T, T, dtype=torch.bool))
    s = s.masked_fill(~m, float("-inf"))
    return s.softmax(-1) @ v


def m_where(q, k, v):
    s = q @ k.transpose(-2, -1) * 0.25
    T = q.size(-2)
    m = torch.ones(T, T, dtype=torch.bool).tril()
    s = torch.where(m, s, torch.finfo(s.dtype).min)
    return s.softmax(-1) @ v


def m_triu(q, k, v):
    s = q @ k.transpose(-2, -1) * 0.25
    T = q.size(-2)
    s = s + torch.full((T, T), float("-inf")).triu(1)
    return s.softmax(-1) @ v


def m_arange(q, k, v):
    s = q @ k.transpose(-2, -1) * 0.25
    T = q.size(-2)
    p = torch.arange(T)
    s = s.masked_fill(p[:, None] < p[None, :], -1000000000.0)
    return s.softmax(-1) @ v


class GPT(nn.Module):
    def __init__(s):
        super().__init__()
        s.c_attn = nn.Linear(32, 96)
        s.c_proj = nn.Linear(32, 32)
        s.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def heads(s, x):
        B, T, _ = x.size()
        q, k, v = s.c_attn(x).split(32, dim=2)
        k = k.view(B, T, 2, 16).transpose(1, 2)
        q = q.view(B, T, 2, 16).transpose(1, 2)
        v = v.view(B, T, 2, 16).transpose(1, 2)
        return q, k, v

    def forward(s, x):
        B, T, C = x.size()
        q, k, v = s.heads(x)
        a = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        a = a.masked_fill(s.bias[:, :, :T, :T] == 0, float("-inf"))
        a = F.softmax(a, dim=-1)
        y = a @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return s.c_proj(y)


class GPTF(GPT):
    def forward(s, x):
        B, T, C = x.size()
        q, k, v = s.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return s.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


def sliding(q, k, v):
    p = torch.arange(6)
    d = p[:, None] - p[None, :]
    return (q @ k.mT * 0.25).masked_fill((d < 0) | (d >= 3), float("-inf")).softmax(-1) @ v


class Packed(nn.Module):
    def __init__(s, sel):
        super().__init__()
        s.qkv = nn.Linear(32, 96, bias=False)
        s.sel = sel

    def forward(s, x):
        q, k, v = s.sel(s.qkv(x))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class SE(nn.Module):
    def __init__(s):
        super().__init__()
        s.fc1 = nn.Conv2d(16, 4, 1)
        s.fc2 = nn.Conv2d(4, 16, 1)

    def forward(s, x):
        y = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(s.fc2(F.relu(s.fc1(y))))


class SE2(nn.Module):
    def __init__(s):
        super().__init__()
        s.fc = nn.Sequential(
            nn.Linear(16, 4, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4, 16, bias=False),
            nn.Sigmoid(),
        )
        s.pool = nn.AdaptiveAvgPool2d(1)

    def forward(s, x):
        b, c, _, _ = x.size()
        y = s.pool(x).view(b, c)
        y = s.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


LAB = torch.randint(32, (15,), generator=torch.Generator().manual_seed(0))


class M(nn.Module):
    def __init__(s, m):
        super().__init__()
        s.m = m

    def forward(s, x):
        return s.m(x)


class Nested(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("scale", torch.tensor(0.5))
        s.register_buffer("mean", randn(32))
        s.inner = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.ModuleList([nn.LayerNorm(32)])})

    def forward(s, x, mask=None, *, alpha=1.0):
        y = s.inner["b"][0](s.inner["a"]((x - s.mean) * s.scale)) * alpha
        return y if mask is None else y * mask


class AdaLN(nn.Module):
    def __init__(s):
        super().__init__()
        s.lin = nn.Linear(32, 192)
        s.norm = nn.LayerNorm(32, elementwise_affine=False)
        s.fc = nn.Linear(32, 32)

    def forward(s, x, c):
        a, b, g, _, _, _ = s.lin(F.silu(c)).chunk(6, dim=1)
        return x + g.unsqueeze(1) * s.fc(s.norm(x) * (1 + b.unsqueeze(1)) + a.unsqueeze(1))


class MHA(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(s, x):
        return s.a(x, x, x, need_weights=False)[0]


class MHAW(MHA):
    def forward(s, x):
        return s.a(x, x, x)


#: name, function, inputs
WRITTEN: list[Case] = [
    (
        "rms1",
        lambda x, w: (
            (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-06)).type_as(x)
            * w
        ),
        (XB, R.bfloat16()),
    ),
    (
        "rms2 gemma",
        lambda x, w: (
            x.float()
            * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-06)
            * (1.0 + w.float())
        ).type_as(x),
        (XB, R.bfloat16()),
    ),
    ("rms3 normalize", lambda x, w: F.normalize(x, dim=-1) * w * 32**0.5, (X, R)),
    (
        "rms4 norm",
        lambda x, w: x / (x.norm(2, dim=-1, keepdim=True) * 32 ** (-0.5) + 1e-08) * w,
        (X, R),
    ),
    (
        "rms5 div sqrt",
        lambda x, w: w * (x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-06)),
        (X, R),
    ),
    (
        "rms6 sum over shape",
        lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-06) * w,
        (X, R),
    ),
    (
        "ln by hand",
        lambda x, w: (
            (x - x.mean(-1, keepdim=True))
            / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-05)
            * w
        ),
        (X, R),
    ),
    (
        "ln 2d channel first",
        lambda x, w: (
            (x - (u := x.mean(1, keepdim=True)))
            / torch.sqrt((x - u).pow(2).mean(1, keepdim=True) + 1e-06)
            * w[:, None, None]
        ),
        (randn(2, 8, 4, 4), randn(8)),
    ),
    ("rope halves", lambda q, c, s: q * c + rot_half(q) * s, (Q, COS, SIN)),
    (
        "rope halves qk",
        lambda q, k, c, s: (
            q * c[None, None] + rot_half(q) * s[None, None],
            k * c + rot_half(k) * s,
        ),
        (Q, K, COS, SIN),
    ),
    ("rope slices", lambda q, c, s: q * c + rot_slice(q) * s, (Q, COS, SIN)),
    (
        "rope interleaved",
        lambda x, c, s: torch.stack(
            (x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c), -1
        ).flatten(-2),
        (Q, COS[:, :8].contiguous(), SIN[:, :8].contiguous()),
    ),
    ("rope unbind", rope_unbind, (Q, COS[:, :8].contiguous(), SIN[:, :8].contiguous())),
    ("gqa repeat_interleave", gqa_ri, (Q, K2, V2)),
    ("gqa expand sdpa", gqa_exp, (Q, K2, V2)),
    (
        "gqa grouped einsum",
        lambda q, k, v: torch.einsum(
            "bhgqk,bhkd->bhgqd",
            torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (2, 2)), k).softmax(-1),
            v,
        ).flatten(1, 2),
        (Q, K2, V2),
    ),
    ("mask tril masked_fill", m_tril, (Q, K, V)),
    ("mask tril bool", m_trilbool, (Q, K, V)),
    ("mask where", m_where, (Q, K, V)),
    ("mask full -inf triu", m_triu, (Q, K, V)),
    ("mask arange", m_arange, (Q, K, V)),
    ("nanogpt attention", GPT(), (X,)),
    ("nanogpt flash", GPTF(), (X,)),
    (
        "additive mask input",
        lambda q, k, v, m: (q @ k.mT * 0.25 + m).softmax(-1) @ v,
        (Q, K, V, randn(2, 1, 6, 6)),
    ),
    ("sliding window", sliding, (Q, K, V)),
    (
        "softcap",
        lambda q, k, v: (30.0 * torch.tanh(q @ k.mT * 0.25 / 30.0)).softmax(-1) @ v,
        (Q, K, V),
    ),
    (
        "softmax fp32 back",
        lambda q, k, v: (
            F.softmax(q @ k.transpose(2, 3) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        ),
        (Q.bfloat16(), K.bfloat16(), V.bfloat16()),
    ),
    (
        "attention sink",
        lambda q, k, v, s: (lambda e: e / (e.sum(-1, keepdim=True) + s.exp()[:, None, None]) @ v)(
            (q @ k.mT * 0.25).exp()
        ),
        (Q, K, V, randn(4)),
    ),
    (
        "timm qkv",
        Packed(lambda y: y.reshape(3, 5, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)),
        (X,),
    ),
    (
        "qkv index",
        Packed(
            lambda y: (lambda z: (z[0], z[1], z[2]))(
                y.reshape(3, 5, 3, 2, 16).permute(2, 0, 3, 1, 4)
            )
        ),
        (X,),
    ),
    (
        "qkv unbind 2",
        Packed(lambda y: [t.transpose(1, 2) for t in y.view(3, 5, 3, 2, 16).unbind(2)]),
        (X,),
    ),
    (
        "qkv split per head",
        Packed(lambda y: [t.transpose(1, 2) for t in y.view(3, 5, 2, 48).split(16, -1)]),
        (X,),
    ),
    (
        "qkv split 3 unequal",
        lambda x, w: (
            lambda q, k, v: (
                q.view(3, 5, 4, 8).transpose(1, 2),
                k.view(3, 5, 2, 8).transpose(1, 2),
                v,
            )
        )(*F.linear(x, w).split([32, 16, 16], -1)),
        (X, randn(64, 32)),
    ),
    ("einsum bld,dm", lambda x, w: torch.einsum("bld,dm->blm", x, w), (X, randn(32, 24))),
    ("einsum heads", lambda x, w: torch.einsum("bld,dhk->bhlk", x, w), (X, randn(32, 4, 8))),
    (
        "einsum out",
        lambda y, w: torch.einsum("bhlk,hkd->bld", y, w),
        (randn(2, 4, 6, 8), randn(4, 8, 24)),
    ),
    ("einsum inner", lambda x, y: torch.einsum("bld,bld->bl", x, y), (X, Y)),
    ("einsum ellipsis", lambda x, w: torch.einsum("...d,od->...o", x, w), (X, W)),
    (
        "einsum three",
        lambda x, a, b: torch.einsum("bld,dr,ro->blo", x, a, b),
        (X, randn(32, 8), randn(8, 24)),
    ),
    (
        "einsum bilinear",
        lambda x, w, y: torch.einsum("bi,oij,bj->bo", x, w, y),
        (randn(4, 8), randn(5, 8, 6), randn(4, 6)),
    ),
    (
        "router softmax",
        lambda x, w: F.linear(x, w).softmax(-1, dtype=torch.float32),
        (XB, W.bfloat16()),
    ),
    ("router z loss", lambda x, w: torch.logsumexp(F.linear(x, w), -1).pow(2).mean(), (X, W)),
    (
        "dense moe",
        lambda x, g, w: torch.einsum(
            "ble,beld->bld" if 0 else "ble,bled->bld",
            F.linear(x, g).softmax(-1),
            torch.einsum("bld,edf->blef", x, w),
        ),
        (X, randn(4, 32), randn(4, 32, 8)),
    ),
    ("SE linear", SE2(), (randn(2, 16, 4, 4),)),
    (
        "geglu",
        lambda x, w: (lambda a, g: a * F.gelu(g))(*F.linear(x, w).chunk(2, -1)),
        (X, randn(48, 32)),
    ),
    ("glu of linear", lambda x, w: F.glu(F.linear(x, w), -1), (X, randn(48, 32))),
    ("relu squared", lambda x, a, b: F.linear(F.relu(F.linear(x, a)).square(), b), (X, W1, W2)),
    ("elu selu celu", lambda x: F.elu(x) + F.selu(x) + F.celu(x, 1.5), (X,)),
    ("prelu", lambda x, w: F.prelu(x.transpose(1, 2), w), (X, randn(32))),
    (
        "softsign tanhshrink",
        lambda x: F.softsign(x) + F.tanhshrink(x) + F.softshrink(x) + F.hardshrink(x),
        (X,),
    ),
    ("cosine sim", lambda x, y: F.cosine_similarity(x, y, dim=-1), (X, Y)),
    (
        "cosine matrix",
        lambda x, y: F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T,
        (X[0].contiguous(), Y[0].contiguous()),
    ),
    (
        "infonce",
        lambda x, y: F.cross_entropy(
            F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / 0.07, torch.arange(5)
        ),
        (X[0].contiguous(), Y[0].contiguous()),
    ),
    (
        "infonce diag",
        lambda x, y: (
            -(lambda y: y.log_softmax(-1).diagonal().mean())(
                F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / 0.07
            )
        ),
        (X[0].contiguous(), Y[0].contiguous()),
    ),
    (
        "kl div",
        lambda p, q: F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean"),
        (X, Y),
    ),
    (
        "label smoothing dense",
        lambda x, y: -((0.9 * y.softmax(-1) + 0.1 / 32) * x.log_softmax(-1)).sum(-1).mean(),
        (X, Y),
    ),
    (
        "cross entropy smoothing",
        lambda x, t: F.cross_entropy(x.view(-1, 32), t, label_smoothing=0.1),
        (X, LAB),
    ),
    ("ce probs", lambda x, y: F.cross_entropy(x.view(-1, 32), y.view(-1, 32).softmax(-1)), (X, Y)),
    (
        "nll gather",
        lambda x, t: -x.view(-1, 32).log_softmax(-1).gather(1, t[:, None]).squeeze(1).mean(),
        (X, LAB),
    ),
    ("huber", F.huber_loss, (X, Y)),
    ("smooth l1", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), (X, Y)),
    ("mse", F.mse_loss, (X, Y)),
    ("bce logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (X, Y)),
    ("ppo clip", lambda r, a: -torch.min(r.exp() * a, r.exp().clamp(0.8, 1.2) * a).mean(), (X, Y)),
    ("groupnorm", M(nn.GroupNorm(4, 16)), (randn(2, 16, 4, 4),)),
    ("instancenorm affine", M(nn.InstanceNorm1d(16, affine=True)), (randn(2, 16, 8),)),
    (
        "batchnorm eval",
        nn.Sequential(nn.Linear(32, 24), nn.BatchNorm1d(24)).eval(),
        (X[0].contiguous(),),
    ),
    (
        "batchnorm1d train by hand",
        lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-05).sqrt(),
        (X[0].contiguous(),),
    ),
    ("weight norm", M(torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 24))), (X,)),
    ("local response", lambda x: x / (x.pow(2).mean(1, keepdim=True) + 0.0001).pow(0.75), (X,)),
    (
        "lora scaling",
        lambda x, w, a, b: F.linear(x, w) + 16 / 8 * (x @ a.T @ b.T),
        (X, W, randn(8, 32), randn(24, 8)),
    ),
    (
        "dora",
        lambda x, w, a, b, m: F.linear(
            x, (wd := (w + b @ a)) / wd.norm(dim=1, keepdim=True) * m[:, None]
        ),
        (X, W, randn(8, 32), randn(24, 8), randn(24)),
    ),
    ("attention pooling", lambda x, w: ((x @ w).softmax(1).unsqueeze(-1) * x).sum(1), (X, R)),
    (
        "masked mean bool",
        lambda x, m: (x * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True),
        (X, randn(3, 5) > -2),
    ),
    ("max pool seq", lambda x: x.max(dim=1).values, (X,)),
    # the product's rows are another dimension than those of the element-wise work
    ("scaled by the largest", lambda x, w: (x.amax() * x) @ w.t(), (randn(2, 1, 8), W[:, :8])),
    (
        "fp8 scale",
        lambda x: (x / x.abs().amax(-1, keepdim=True).clamp(min=0.0001) * 448.0).to(torch.bfloat16),
        (X,),
    ),
    ("nested buffers", Nested(), (X,)),
    ("half module", nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 24), nn.GELU()).half(), (XH,)),
    ("scalars", lambda x, a, n: x * a + n, (X, 0.5, 3)),
    ("0-d tensor", lambda x, s: x * s, (X, torch.tensor(0.5))),
    ("0-d param", lambda x, s: x @ x.mT * s.exp(), (X, torch.tensor(0.5))),
    ("returns same twice", lambda x: (lambda y: (y, y))(x * 2), (X,)),
    ("step in", lambda x: x * 2, (randn(3, 5, 32)[:, ::2],)),
    ("last token keep", lambda x, w: F.linear(x[:, -1:, :], w), (X, W)),
    ("cls token head", lambda x, w: F.linear(F.layer_norm(x, (32,))[:, 0], w), (X, W)),
    ("shift tokens", lambda x, w: F.linear(x, w)[:, :-1].log_softmax(-1), (X, W)),
    ("scalar out dot", torch.dot, (R, R + 1)),
    ("mv", torch.mv, (W, R)),
    ("matmul vec", lambda x, w: x @ w, (X, R)),
    ("linear of vector", F.linear, (R, W)),
    ("pow 1.5 etc", lambda x: x.abs().pow(1.5) + x.abs().pow(0.25) + x**6, (X,)),
    ("adaLN", AdaLN(), (X, randn(3, 32))),
    (
        "vit cls cat",
        lambda x, c, p: torch.cat([c.expand(3, -1, -1), x], 1) + p,
        (X, randn(1, 1, 32), randn(1, 6, 32)),
    ),
    (
        "kv cache cat",
        lambda q, k, v, pk, pv: F.scaled_dot_product_attention(
            q, torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        ),
        (Q[:, :, :1].clone(), K[:, :, :1].clone(), V[:, :, :1].clone(), K, V),
    ),
    ("nn.MHA", MHA().eval(), (X,)),
    (
        "nn.TransformerEncoderLayer eval",
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1).eval(),
        (X,),
    ),
    (
        "linear attention",
        lambda q, k, v: (
            lambda q, k: (
                q @ (k.mT @ v) / ((q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-06)
            )
        )(F.elu(q) + 1, F.elu(k) + 1),
        (Q, K, V),
    ),
    (
        "qk norm attention",
        lambda q, k, v, w: F.scaled_dot_product_attention(
            F.rms_norm(q, (16,), w), F.rms_norm(k, (16,), w), v, scale=0.2
        ),
        (Q, K, V, randn(16)),
    ),
    ("sign", lambda x: torch.sign(x) * x.abs().sqrt(), (X,)),
    ("clip grad norm", lambda x: x * (1.0 / (x.norm() + 1e-06)).clamp(max=1.0), (X,)),
    (
        "adam step",
        lambda p, g, m, v: (
            p
            - 0.001
            * (m2 := (0.9 * m + 0.1 * g))
            / 0.1
            / (((v2 := (0.999 * v + 0.001 * g * g)) / 0.001).sqrt() + 1e-08),
            m2,
            v2,
        ),
        (X, Y, X * 0.1, X * X),
    ),
    ("tri-valued where", lambda x: torch.where(x > 0, x, 0.1 * x), (X,)),
    ("where tensors", lambda x, y: torch.where(x > y, x, y), (X, Y)),
    ("where bool in", lambda x, y, m: torch.where(m, x, y), (X, Y, randn(3, 5, 32) > 0)),
    ("maximum tensors", torch.maximum, (X, Y)),
    ("mask multiply", lambda x, m: x * m, (X, randn(3, 5, 32) > 0)),
    ("mask cast", lambda x: x * (x > 0).float(), (X,)),
    ("masked_fill cond", lambda x: x.masked_fill(x < 0, 0.0), (X,)),
    (
        "masked softmax",
        lambda x, m: x.masked_fill(~m, -1000000000.0).softmax(-1),
        (X, randn(3, 5, 32) > -1),
    ),
    (
        "masked softmax inf",
        lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1),
        (X, randn(3, 5, 32) > 1),
    ),
    ("and conditions", lambda x: torch.where((x > 0) & (x < 1), x, 0.0), (X,)),
    ("isnan", lambda x: torch.where(torch.isnan(x), 0.0, x), (X,)),
    (
        "pixel shuffle patch",
        lambda x, w: F.linear(
            x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), w
        ),
        (randn(2, 3, 4, 4), randn(24, 12)),
    ),
    (
        "patchify rearrange",
        lambda x, w: F.linear(
            x.reshape(2, 3, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(2, 4, 12), w
        ),
        (randn(2, 3, 4, 4), randn(24, 12)),
    ),
    ("token mix", lambda x, w: (x.transpose(1, 2) @ w).transpose(1, 2) + x, (X, randn(5, 5))),
    ("repeat", lambda x, c: x * c.repeat(1, 1, 32), (X, randn(3, 5, 1))),
    ("tile hidden", lambda x: torch.tile(x, (1, 1, 2)) * 2, (X,)),
    ("roll", lambda x: torch.roll(x, 1, 1) + x, (X,)),
    ("flip", lambda x: x.flip(-1) * 2, (X,)),
    (
        "unsqueeze cdist",
        lambda x, y: (x[:, None, :] - y[None, :, :]).pow(2).sum(-1),
        (randn(5, 8), randn(4, 8)),
    ),
    (
        "rbf kernel",
        lambda x, y: torch.exp(-((x**2).sum(-1)[:, None] + (y**2).sum(-1)[None] - 2 * x @ y.T)),
        (randn(5, 8) * 0.3, randn(4, 8) * 0.3),
    ),
    ("reshape -1 sym", lambda x: x.reshape(x.shape[0], -1).softmax(-1).view_as(x), (X,)),
    ("F.scaled with 2 outputs", lambda x: torch.std_mean(x, -1), (X,)),
    (
        "median-free aminmax",
        lambda x: (
            (x - x.amin(-1, keepdim=True))
            / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-06)
        ),
        (X,),
    ),
    ("F.normalize l1", lambda x: F.normalize(x, p=1.0, dim=-1), (X,)),
    (
        "gated residual",
        lambda x, y, w: (lambda g: g * x + (1 - g) * y)(torch.sigmoid(F.linear(x, w))),
        (X, Y, randn(32, 32)),
    ),
    (
        "assign slice",
        lambda x: (lambda y: (y.__setitem__((slice(None), 0), 0.0), y * 2)[1])(x.clone()),
        (X,),
    ),
    (
        "channel shuffle free: gap then linear",
        lambda x, w: F.linear(x.mean([-2, -1]), w),
        (randn(2, 16, 4, 4), randn(8, 16)),
    ),
]
