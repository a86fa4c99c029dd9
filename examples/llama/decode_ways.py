"""Ways of decoding: eager, torch.compile, and with kernels of cutesuper.

A way is a step, `(model, tokens, positions, caches) -> logits`, and parts that can be timed one by
one. All of them are captured in the same kind of CUDA graph, which for torch.compile is what its
mode "reduce-overhead" does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import _inductor as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .decode import EPS, TORCH, Cache, Layer, Llama, Parts, Place, decode, score, turn
from .fused import Fused, times

Step = Callable[[Llama, Tensor, Tensor, list[Cache]], Tensor]

#: PyTorch's own order has cuDNN last; for one query it is the fastest
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@contextmanager
def fastest_attention() -> Iterator[None]:
    """A context in which scaled_dot_product_attention takes the kernel that suits decoding."""
    with sdpa_kernel(KERNELS, set_priority=True):
        yield


@dataclass(frozen=True)
class Way:
    """A way to compute a step.

    Attributes:
        step: all of it.
        parts: one by one.
    """

    step: Step
    parts: Parts


def eager() -> Way:
    """PyTorch as it is."""
    return Way(Llama.__call__, TORCH)


def compiled(**options: Any) -> Way:
    """torch.compile of the beginning, of a layer, which all layers share, and of the head."""
    wrap = partial(torch.compile, dynamic=False, fullgraph=True, **options)
    step = partial(decode, begin=wrap(Llama.begin), layer=wrap(Layer.forward), score=wrap(score))
    return Way(step, Parts(**{f.name: wrap(getattr(TORCH, f.name)) for f in fields(Parts)}))


def ours(device: torch.device) -> Way:
    """Every product with what stands around it as one kernel, and the attention as one.

    What is left, rotary positions and the beginning, goes through torch.compile on a GPU.
    """
    rest = _same
    if device.type == "cuda":
        rest = partial(torch.compile, dynamic=False, fullgraph=True, options=_small_kernels())
    parts = Parts(
        project=_project, turn=rest(turn), attend=_attend, output=_output, gate=_gate,
        shrink=_shrink, score=_project,
    )  # fmt: skip
    layer = partial(Layer.forward, parts=parts)
    return Way(partial(decode, begin=rest(Llama.begin), layer=layer, score=_project), parts)


def _same(function: Any) -> Any:
    return function


def _small_kernels() -> dict[str, Any]:
    """Options of Inductor that make small kernels cheaper, where it has them.
    Queries and keys are turned in one kernel, and it is launched like ours. A layer for 8 sequences
    takes 176.4 us without, 174.2 with the first, and with both 0.9 less."""
    wanted = {"combo_kernels": True, "triton.enable_pdl": True}
    return {name: wanted[name] for name in inductor.list_options() if name in wanted}


# ---------------------------------------------------------------------------------------- kernels


_project = Fused(lambda g, x, norm, w: times(g, g.rms_norm(x, norm, eps=EPS), w), (1, 2))


def _added(g: Any, y: Any, w: Any, x: Any) -> Any:
    return g.add(times(g, y, w), x)


_output, _shrink = Fused(_added, (1,)), Fused(_added, (1,))


def _gated(g: Any, x: Any, norm: Any, gate: Any, up: Any) -> Any:
    y = g.rms_norm(x, norm, eps=EPS)
    return g.mul(g.silu(times(g, y, gate)), times(g, y, up))


_gated_mlp = Fused(_gated, (1, 2, 3))


def _gate(x: Tensor, norm: Tensor, gate_up: Tensor) -> Tensor:
    return _gated_mlp(x, norm, *gate_up.chunk(2))


def _scored(g: Any, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return g.scaled_dot_product_attention(q, k, v, is_causal=True, lengths=lengths)


_attention = Fused(_scored)


def _attend(q: Tensor, place: Place, cache: Cache) -> Tensor:
    # `cs.ops.attention` computes the same in a plain launch, which lets the next kernel in when it
    # has ended: 173.3 us a layer for 8 sequences, in place of 171.7
    q = q.unflatten(1, (cache.keys.shape[1], -1))  # those that share a head of keys
    return _attention(q, cache.keys[:, :, None], cache.values[:, :, None], place.lengths).flatten(1)
