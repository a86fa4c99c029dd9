"""Modules as people write them: functions of tensors in plain PyTorch, with extents of their own.

Norms over any dimensions, MLPs with and without gates, attention of several kinds, poolings,
losses, recurrent cells, convolutions beside norms, element-wise chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: tokens, columns and hidden columns of most of them
T, W, H = 2048, 1024, 4096
#: sequences, heads, positions, columns of a head
HEADS = (4, 16, 512, 64)


@dataclass(frozen=True)
class Module:
    """A function of tensors.

    Attributes:
        function: of activations and parameters.
        inputs: shapes of activations.
        parameters: shapes; matrices are [columns of the result, columns of the operand].
        labels: rows of int64 labels behind the parameters, and how many values they have.
    """

    function: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[int, ...], ...] = ()
    labels: tuple[int, int] | None = None


MODULES: dict[str, Module] = {}


def _module(
    *inputs: tuple[int, ...], to: tuple[tuple[int, ...], ...] = (),
    labels: tuple[int, int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        MODULES[function.__name__] = Module(function, inputs, to, labels)
        return function

    return add


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


# ------------------------------------------------------------------------------------------- norms


@_module((T, W), to=((W,),))
def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (W,), w)


@_module((T, W), (T, W), to=((W,),))
def rms_norm_of_a_sum(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x = x + r
    return F.rms_norm(x, (W,), w), x


@_module((T, W), to=((W,), (W,)))
def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (W,), w, b)


@_module((T, W), (T, 1), (T, 1))
def layer_norm_that_adapts(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, (W,)) * (1 + scale) + shift


@_module((8, 64, 56, 56), to=((64,), (64,)))
def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, w, b))


@_module((8, 64, 56, 56), to=((64,), (64,)))
def instance_norm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.instance_norm(x, None, None, w, b))


@_module((16, 128, W), to=((128, W), (128, W)))
def layer_norm_of_two_dimensions(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (128, W), w, b)


@_module((T, W))
def standardised_columns(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


@_module((T, W))
def unit_rows(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


# -------------------------------------------------------------------------------------------- MLPs


@_module((16, W), to=((W,), (H, W), (H, W), (W, H)))
def gated_mlp_of_few_rows(x: Tensor, n: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    y = F.rms_norm(x, (W,), n)
    return x + F.linear(F.silu(F.linear(y, g)) * F.linear(y, u), d)


@_module((T, W), to=((W,), (H, W), (H, W), (W, H)))
def gated_mlp(x: Tensor, n: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    y = F.rms_norm(x, (W,), n)
    return x + F.linear(F.silu(F.linear(y, g)) * F.linear(y, u), d)


@_module((T, W), to=((W,), (W,), (H, W), (H,), (W, H), (W,)))
def gelu_mlp(x: Tensor, w: Tensor, b: Tensor, i: Tensor, c: Tensor, o: Tensor, d: Tensor) -> Tensor:
    y = F.layer_norm(x, (W,), w, b)
    return x + F.linear(F.gelu(F.linear(y, i, c)), o, d)


@_module((16, W), to=((W,), (W,), (H, W), (H,), (W, H), (W,)))
def gelu_mlp_of_few_rows(
    x: Tensor, w: Tensor, b: Tensor, i: Tensor, c: Tensor, o: Tensor, d: Tensor
) -> Tensor:
    y = F.layer_norm(x, (W,), w, b)
    return x + F.linear(F.gelu(F.linear(y, i, c)), o, d)


@_module((T, W), to=((H, W), (W, H)))
def squared_relu_mlp(x: Tensor, i: Tensor, o: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, i)).square(), o)


@_module((16, W), to=((16, W), (W, 16), (W, W)))
def lora(x: Tensor, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) + 2 * F.linear(F.linear(x, a), b)


@_module((T, 256), to=((128, 256), (128,), (64, 128), (64,), (1, 64), (1,)))
def tower(x: Tensor, a: Tensor, p: Tensor, b: Tensor, q: Tensor, c: Tensor, r: Tensor) -> Tensor:
    x = F.relu(F.linear(F.relu(F.linear(x, a, p)), b, q))
    return F.linear(x, c, r).sigmoid()


# --------------------------------------------------------------------------------------- attention


@_module(HEADS, HEADS, HEADS)
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@_module(HEADS, HEADS, HEADS)
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@_module(HEADS, (4, 4, 512, 64), (4, 4, 512, 64))
def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@_module((8, 32, 1, 128), (8, 8, 4096, 128), (8, 8, 4096, 128))
def attention_of_one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@_module(HEADS, HEADS, HEADS)
def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8).softmax(-1) @ v


@_module(HEADS, HEADS, HEADS)
def attention_with_capped_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 8 / 30) * 30).softmax(-1) @ v


@_module(HEADS, HEADS, HEADS)
def attention_in_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(512, device=q.device)
    d = n[:, None] - n
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d >= 0) & (d < 128))


@_module(HEADS, HEADS, HEADS, (16, 512, 512))
def attention_with_a_bias(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b)


@_module(HEADS, HEADS, HEADS)
def attention_of_unit_vectors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, scale=10.0)


@_module(HEADS, HEADS, HEADS)
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(2)[..., None])


@_module((1, 1, W), (1, 1, 256), (1, 64), (1, 64), to=((64,), (64,)))
def heads_of_one_token(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    q = F.rms_norm(q.view(1, 1, -1, 64), (64,), a).transpose(1, 2)
    k = F.rms_norm(k.view(1, 1, -1, 64), (64,), b).transpose(1, 2)
    return _turned(q, cos, sin), _turned(k, cos, sin)


@_module(HEADS, (512, 64), (512, 64))
def rotary_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin)


@_module((4, 512, 16, 64), (512, 1, 64), (512, 1, 64), to=((64,),))
def normed_heads_with_positions(x: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Tensor:
    return _turned(F.rms_norm(x, (64,), w), cos, sin)


@_module((1, W), to=((W,), (3 * W, W)))
def projections_of_one_token(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (W,), n), w)


@_module((T, W), to=((64, W),))
def router(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float().softmax(-1).to(x.dtype)


# ------------------------------------------------------------------------------------------- rows


@_module((T, 32000))
def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@_module((T, 32000))
def softmax_with_temperature(x: Tensor) -> Tensor:
    return (x / 0.7).softmax(-1)


@_module((T, 32000))
def entropy(x: Tensor) -> Tensor:
    p = x.log_softmax(-1)
    return -(p.exp() * p).sum(-1)


@_module((T, 32000), (T, 32000))
def distillation(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


@_module((T, 32000), labels=(T, 32000))
def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), labels, reduction="none")


@_module((T, W), to=((32000, W),), labels=(T, 32000))
def cross_entropy_of_a_head(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), labels, reduction="none")


@_module((512, W), (512, W), labels=(512, 512))
def contrastive_loss(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    scores = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).t() * 14
    return F.cross_entropy(scores.float(), labels, reduction="none")


@_module((T, W), (T, W))
def huber_rows(x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(x, y, reduction="none").mean(-1)


@_module((T, W), (T, W))
def binary_cross_entropy_rows(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none").mean(-1)


@_module((T, W), (T, W))
def cosine_rows(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y)


@_module((256, 65536), (256, 65536))
def dice_rows(x: Tensor, y: Tensor) -> Tensor:
    p = x.sigmoid()
    return 1 - (2 * (p * y).sum(-1) + 1) / (p.sum(-1) + y.sum(-1) + 1)


@_module((T, W))
def cumulative_rows(x: Tensor) -> Tensor:
    return x.float().cumsum(-1)


@_module((16, 512, W))
def statistics_of_positions(x: Tensor) -> Tensor:
    return torch.cat((x.mean(1), x.std(1), x.amax(1)), -1)


@_module((16, 512, W), to=((1, W),))
def attention_pooling(x: Tensor, w: Tensor) -> Tensor:
    return (F.linear(x, w).softmax(1) * x).sum(1)


@_module((16, 512, W))
def maxima_of_positions(x: Tensor) -> Tensor:
    return x.amax(1)


# ----------------------------------------------------------------------- cells, images, elements


@_module((64, W), (64, W), to=((3 * W, W), (3 * W, W), (3 * W,), (3 * W,)))
def gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    r, z, n = F.linear(x, w, b).chunk(3, -1)
    s, y, m = F.linear(h, u, c).chunk(3, -1)
    z = (z + y).sigmoid()
    return (1 - z) * torch.tanh(n + (r + s).sigmoid() * m) + z * h


@_module((64, W), (64, W), (64, W), to=((4 * W, W), (4 * W, W), (4 * W,)))
def lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    i, f, g, o = (F.linear(x, w, b) + F.linear(h, u)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * torch.tanh(g)
    return o.sigmoid() * torch.tanh(c), c


@_module((8, 64, 56, 56), to=((64,), (64,), (256, 64), (256,), (64, 256), (64,)))
def convnext_block(
    x: Tensor, n: Tensor, b: Tensor, i: Tensor, c: Tensor, o: Tensor, d: Tensor
) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), (64,), n, b)
    return x + F.linear(F.gelu(F.linear(y, i, c)), o, d).permute(0, 3, 1, 2)


@_module((8, 64, 56, 56), to=((16, 64), (16,), (64, 16), (64,)))
def squeeze_and_excite(x: Tensor, i: Tensor, c: Tensor, o: Tensor, d: Tensor) -> Tensor:
    scale = F.linear(F.relu(F.linear(x.mean((2, 3)), i, c)), o, d).sigmoid()
    return x * scale[..., None, None]


@_module((8, 64, 28, 28), to=((128, 64, 1, 1), (128,)))
def pointwise_convolution(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, w, b))


@_module((8, 32, 56, 56), to=((64, 32, 3, 3), (64,), (64,)))
def convolution_and_norm(x: Tensor, w: Tensor, n: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.group_norm(F.conv2d(x, w, padding=1), 8, n, b))


@_module((32, 256, 28, 28), to=((256,), (256,), (256,), (256,)))
def batch_norm_of_inference(x: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, m, v.abs(), w, b).relu()


@_module((T, H), (T, H))
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


@_module((T, W), (T, W), (W,))
def mixed(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return w.sigmoid() * x + (1 - w.sigmoid()) * y


@_module((T, W))
def long_chain(x: Tensor) -> Tensor:
    return (torch.tanh(x * 2).exp() + 1).reciprocal() * F.softplus(x) - F.mish(x)


@_module((T, W))
def quantised(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-127, 127) * scale


@_module((32, 256, 256))
def products_of_themselves(x: Tensor) -> Tensor:
    return x @ x.mT - x.mT @ x


@_module((T, W), (T, W), to=((W, W), (W, W)))
def two_products(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) + F.linear(y, b)


@_module((64, 26, 64))
def pairwise_interactions(x: Tensor) -> Tensor:
    return (x @ x.mT).tril(-1).flatten(1)
