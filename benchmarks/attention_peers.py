"""Implementations of attention: ours, PyTorch, its fused calls, FlashAttention-4.

A fused call gets its tensors in its own layout, copied before anything is timed: SDPA ``[B, H, L,
d]``, FlashAttention ``[B, L, H, d]``. Norms before it are PyTorch's and are timed. PyTorch has
several fused kernels behind one name and chooses by rules of its own; each is a competitor here,
and a table shows the best one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import PEERS, Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.workload import Outputs
from benchmarks.workloads_attention import AttentionWorkload, Heads


def attention_of(problem: Problem) -> AttentionWorkload:
    """The problem's workload. Raises ValueError if it is not attention."""
    if not isinstance(problem.workload, AttentionWorkload):
        raise ValueError(f"{problem.workload.name}: a call for attention cannot compute it")
    return problem.workload


def sdpa(backend: SDPBackend, packed: bool = False) -> Callable[[Problem], Launcher]:
    """``torch.nn.functional.scaled_dot_product_attention`` by one of its kernels.

    Args:
        backend: the kernel.
        packed: heads that share keys become positions of one head, for a kernel without shared
            keys; equivalent if each has one query.
    """

    def tensors(workload: AttentionWorkload, inputs: Outputs) -> Heads:
        q, k, v = workload.heads(*inputs)
        return (q.view(q.shape[0], k.shape[1], -1, q.shape[-1]) if packed else q), k, v

    def make(problem: Problem) -> Launcher:
        workload = attention_of(problem)
        if workload.pages:
            raise ValueError("scaled_dot_product_attention knows no pages")
        [result] = workload.outputs(problem.shape)
        scale = workload.scale(problem.shape)
        sets = [tensors(workload, inputs[:3]) for inputs in problem.inputs]
        grouped = sets[0][0].shape[1] != sets[0][1].shape[1]
        masks = [_mask(*inputs[2:4]) if workload.lengths else None for inputs in problem.inputs]

        def launch(i: int) -> Outputs:
            q, k, v = workload.before(*sets[i])
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(
                    q, k, v, masks[i],
                    is_causal=workload.causal, scale=scale, enable_gqa=grouped,
                )  # fmt: skip
            return (y.view(result.dims),)

        return Launcher(launch)

    return make


def _mask(v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mask added to the scores, ``[B, 1, 1, S]``, as SDPA has no argument for lengths."""
    beyond = torch.arange(v.shape[-2], device=v.device) >= lengths[:, None]
    zeros = torch.zeros(beyond.shape, dtype=v.dtype, device=v.device)
    return zeros.masked_fill(beyond, -torch.inf)[:, None, None, :]


def flash_attention_4(problem: Problem) -> Launcher:
    """``flash_attn.cute`` (package flash-attn-4); it packs heads that share keys itself.

    It has no split of the keys for Hopper: ``num_splits`` stays 1, its default.
    """
    library = import_module("flash_attn.cute")
    workload = attention_of(problem)
    call: Callable[..., Any] = (
        library.flash_attn_varlen_func if workload.lengths else library.flash_attn_func
    )
    names = ("seqused_k", "page_table")  # names of the inputs after query, key and value
    more = [dict(zip(names, inputs[3:], strict=False)) for inputs in problem.inputs]
    [result] = workload.outputs(problem.shape)
    options = {"softmax_scale": workload.scale(problem.shape), "causal": workload.causal}
    sets = [
        [t.transpose(1, 2).contiguous() for t in workload.heads(*inputs[:3])]
        for inputs in problem.inputs
    ]

    def launch(i: int) -> Outputs:
        y: torch.Tensor = call(*workload.before(*sets[i]), **options, **more[i])[0]
        return (y.transpose(1, 2).view(result.dims),)

    return Launcher(launch)


SDPA: tuple[Implementation, ...] = (
    Implementation("sdpa-flash", "peer", sdpa(SDPBackend.FLASH_ATTENTION)),
    Implementation("sdpa-cudnn", "peer", sdpa(SDPBackend.CUDNN_ATTENTION)),
    Implementation("sdpa-efficient", "peer", sdpa(SDPBackend.EFFICIENT_ATTENTION, packed=True)),
)
FUSED: tuple[Implementation, ...] = (*SDPA, Implementation("fa4", "peer", flash_attention_4))
DEFINITION: tuple[Implementation, ...] = tuple(
    peer for peer in PEERS if peer.name in ("eager", "compile", "compile-max")
)
