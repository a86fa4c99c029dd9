"""Attention with norms of the heads of queries and keys, as in Chameleon and Qwen3.

    python examples/qk_norm_attention.py --out qk_norm.png
    python examples/qk_norm_attention.py --batch 16 --keys 8192 --ways eager,ours

Chameleon (arXiv:2405.09818) normalizes each head of queries and keys, so that scores stay in
range; so do Qwen3 and others, whose RMSNorm is taken here. `cs.ops.attention` takes the weights of
these norms and needs one kernel, where PyTorch has a kernel for each norm before its attention.

Decoding: one query a sequence, keys in a cache. They were normalized before they went in
("decode"), or the cache has them as they were, as Mirage's benchmark has it ("decode, raw keys").
Prefill: all queries of a prompt, causal.

All ways are compared with float64 before they are timed. The exit status is 1 if a way is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from common import compare, options, report
from common.compare import Task
from common.options import Size
from common.passes import forward, in_float64
from common.timing import Call
from common.ways import DEFAULT_WAYS, WAYS, compiled
from llama.decode_ways import fastest_attention
from torch import Tensor

import cutesuper as cs

SIZES = {
    "batch": Size("sequences", 2, 8),
    "heads": Size("of queries, a multiple of --groups", 4, 32),
    "groups": Size("heads of keys and values", 2, 8),
    "head": Size("width of a head, a multiple of 8", 16, 128),
    "keys": Size("in the cache, when decoding", 64, 4096),
    "prompt": Size("tokens of the prefill", 24, 2048),
}
EPS = 1e-6

Weight = Tensor | None


def plain(
    q: Tensor, k: Tensor, v: Tensor, wq: Weight, wk: Weight, is_causal: bool = False
) -> Tensor:
    """The definition in PyTorch; q [B, H, L, D], k and v [B, groups, S, D], weights [D] or None."""
    q, k = (t if w is None else F.rms_norm(t, w.shape, w, EPS) for t, w in ((q, wq), (k, wk)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def ours(
    q: Tensor, k: Tensor, v: Tensor, wq: Weight, wk: Weight, is_causal: bool = False
) -> Tensor:
    """The same in one kernel."""
    return cs.ops.attention(
        q, k, v, is_causal=is_causal, enable_gqa=True, query_norm_weight=wq, key_norm_weight=wk,
        norm_eps=EPS,
    )  # fmt: skip


def tasks(n: dict[str, int], device: torch.device, dtype: torch.dtype) -> list[Task]:
    """Decoding with both kinds of caches, and prefill."""

    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(n["batch"], heads, length, n["head"], device=device).to(dtype)

    wq, wk = (1 + 0.2 * torch.randn(2, n["head"], device=device)).to(dtype).unbind()
    one = drawn(n["heads"], 1)
    k, v = (drawn(n["groups"], n["keys"]) for _ in range(2))
    normalized = F.rms_norm(k, wk.shape, wk, EPS)
    prompt = [drawn(h, n["prompt"]) for h in (n["heads"], n["groups"], n["groups"])]
    return [
        task("decode", (one, normalized, v, wq), False),
        task("decode, raw keys", (one, k, v, wq, wk), False),
        task("prefill", (*prompt, wq, wk), True),
    ]


def task(name: str, tensors: tuple[Tensor, ...], is_causal: bool) -> Task:
    """All ways of one call."""

    def prepare(way: str) -> Call:
        call = with_weights(ours if way == "ours" else plain, is_causal)
        return partial(forward, compiled(way, call, tensors[0].device), *tensors)

    exact = partial(forward, with_weights(plain, is_causal), *in_float64(tensors))
    ways = {w: partial(prepare, w) for w in WAYS}
    return Task(name, ways, exact, tensors[0].dtype, calls=10)


def with_weights(function: Callable[..., Tensor], is_causal: bool) -> Callable[..., Tensor]:
    """A function of q, k, v and the weights that there are."""

    def call(q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Weight = None) -> Tensor:
        return function(q, k, v, wq, wk, is_causal)

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, then time."""
    args, n = arguments(argv)
    device, dtype = torch.device(args.device), torch.bfloat16
    torch.manual_seed(args.seed)
    title = (
        f"norms of heads: {n['batch']} sequences, {n['heads']} heads, {n['groups']} of keys, "
        f"{n['keys']} keys, prompt {n['prompt']}, bfloat16 on {report.device_name(device)}"
    )
    print(title)
    found = tasks(n, device, dtype)
    with fastest_attention():
        results = [r for t in found for r in compare.run(t, options.ways_of(args), device)]
    return report.finish(args, title, device, n, results, {"prefill"})


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, int]]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "", SIZES)
    options.add_ways(parser, WAYS, DEFAULT_WAYS)
    options.add_plot(parser)
    args = parser.parse_args(argv)
    n = options.sizes_of(parser, args, SIZES)
    if n["heads"] % n["groups"]:
        parser.error(f"--heads {n['heads']} --groups {n['groups']}: groups must divide heads")
    if n["head"] % 8:
        parser.error(f"--head {n['head']}: must be a multiple of 8")
    return args, n


if __name__ == "__main__":
    sys.exit(main())
