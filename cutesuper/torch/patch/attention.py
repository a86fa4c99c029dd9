"""Attention of transformers models by `cutesuper.ops.attention`.

It is registered with the ``AttentionInterface`` of transformers, as ``"cutesuper"``, and computes

* what records gradients: training;
* many queries without a mask tensor: prompts;
* few queries on a cache of fixed length in which the keys up to the query are visible: decoding.

The rest goes to ``"sdpa"``. While models decode the mask tells which keys are visible: it is made
as for ``"sdpa"``, and carries their numbers if it expresses nothing else. A mask that was made or
changed elsewhere carries none. While a CUDA graph is captured nothing is read from the device, and
only masks without padding and windows carry numbers.

This module imports transformers, and is imported only for models that come from it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from cutesuper.errors import CutesuperError, LayoutError
from cutesuper.runtime.programs import KERNEL_DEVICES, is_capturing
from cutesuper.torch.ops.attention.layout import order_of, stored
from cutesuper.torch.ops.attention.operator import attention
from cutesuper.torch.patch.probing import Failed, drawn, unnoticed, within_rule
from cutesuper.torch.patch.report import Entry, refused
from cutesuper.torch.patch.usual_calls import (
    ATTENTION_NAME,
    FLOATS,
    MOST_POSITIONS,
    are_alike,
    version,
)

#: query, key and value
_Sides = tuple[Tensor, Tensor, Tensor]

#: the implementation it falls back to
BASE = "sdpa"

#: attribute of a mask: int32 [B], the number of keys that the last query of each sequence sees, and
#: the mask's version
_KEYS = "_cutesuper_keys"


def register() -> None:
    """Make ``"cutesuper"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_of)


# ------------------------------------------------------------------------------------------- masks


_MASK = inspect.signature(sdpa_mask)
if not {"q_length", "q_offset", "allow_is_causal_skip"} <= set(_MASK.parameters):
    raise ImportError("masks are made from other arguments")


def mask_of(*args: Any, **options: Any) -> Tensor | None:
    """The mask of ``sdpa_mask`` of transformers.
    One of the keys up to the query carries their numbers."""
    given = _MASK.bind(*args, **options)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not traced and _is_captured(torch.device(given.arguments.get("device", "cpu"))):
        # whether it can be left out is read from the device
        given.arguments["allow_is_causal_skip"] = False
    mask = ALL_MASK_ATTENTION_FUNCTIONS[BASE](*given.args, **given.kwargs)
    if mask is None or traced:
        return mask  # traced tensors take no attributes
    keys = _keys_seen(mask, given.arguments)
    if keys is not None:
        # contiguous, as `generate` makes it, which then keeps this object
        mask = _with_version(mask.contiguous())
        setattr(mask, _KEYS, (keys, version(mask)))
    return mask


def _with_version(t: Tensor) -> Tensor:
    """A mask that counts writes; inference tensors do not, and are copied."""
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        return t.clone()


def _keys_seen(mask: Tensor, given: dict[str, Any]) -> Tensor | None:
    """int32 [B]: the keys that the last query sees, if the mask expresses nothing else.

    The i-th query before it must see i keys less.
    """
    rows, keys, offset = given["q_length"], given["kv_length"], given.get("q_offset", 0)
    seen = offset + rows
    if rows > MOST_POSITIONS or isinstance(begin := given.get("kv_offset", 0), Tensor) or begin:
        return None
    # a growing cache is as long as its visible keys at every call, and each length would have
    # kernels of its own; the offset is a tensor if the length is fixed, except for sliding windows
    if not isinstance(seen, Tensor) and seen >= keys:
        return None
    if not _is_causal(mask, given):
        return None
    return torch.zeros(mask.shape[0], dtype=torch.int32, device=mask.device).add_(seen)


def _is_causal(mask: Tensor, given: dict[str, Any]) -> bool:
    """True if a mask shows the keys up to each query, and no others.

    It is causal if it is made of nothing else. Padding and windows may hide nothing: that is read,
    once for all layers of a model, but not while a CUDA graph is captured, which would be replayed
    where they hide something.
    """
    rule = given.get("mask_function", causal_mask_function)
    if rule is causal_mask_function and given.get("attention_mask") is None:
        return True
    if _is_captured(mask.device):
        return False
    rows, keys, offset = given["q_length"], given["kv_length"], given.get("q_offset", 0)
    last = torch.arange(rows, device=mask.device)[:, None] + offset
    return torch.equal(mask, (torch.arange(keys, device=mask.device) <= last).expand_as(mask))


def _is_captured(device: torch.device) -> bool:
    """True while work on a device is captured into a CUDA graph."""
    return device.type in KERNEL_DEVICES and is_capturing()


def _keys_of(mask: Any) -> Tensor | None:
    """Numbers of keys that a mask carries, if it has not been written to since."""
    keys, made = getattr(mask, _KEYS, None) or (None, 0)
    if keys is None or torch.compiler.is_compiling():  # versions are unknown to a compiler
        return keys
    return keys if made == version(mask) else None


# ---------------------------------------------------------------------------------------- the call


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls: attention, ``[B, L, H, D]``, and no weights."""
    usual = dropout == 0.0 and not any(options.get(n) is not None for n in _OTHERS)
    sides = query, key, value
    if _records(*sides):
        sides = _autocast(sides)
    if usual and _fits(*sides):
        causal = _is_causal_call(module, query, attention_mask, options.get("is_causal"))
        found = None
        call: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
        if _records(*sides):
            found = _attend(sides, call | {"is_causal": causal, "attn_mask": attention_mask})
        elif query.shape[2] > MOST_POSITIONS:
            if attention_mask is None:
                found = _attend(sides, call | {"is_causal": causal})
        elif (keys := _keys_of(attention_mask)) is not None:
            found = _attend(sides, call | {"is_causal": True, "key_lengths": keys})
        elif attention_mask is None and _in_longer_cache(query, key):
            found = _attend(sides, call)
        if found is not None:
            return found.transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS[BASE](
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


#: arguments of ``"sdpa"`` that change its result, besides those that are supported here
_OTHERS = ("softcap", *(
    p.name for p in inspect.signature(sdpa_attention_forward).parameters.values()
    if p.kind is not p.VAR_KEYWORD
    and p.name not in {*inspect.signature(attention_forward).parameters, "is_causal"}
))  # fmt: skip


def _records(*sides: Tensor) -> bool:
    """True if a gradient has to be recorded."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in sides)


def _autocast(sides: _Sides) -> _Sides:
    """Tensors as ``"sdpa"`` gets them, in the type of autocast where that is enabled."""
    device = sides[0].device.type
    if not torch.is_autocast_enabled(device):
        return sides
    query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in sides)
    return query, key, value


def _is_causal_call(
    module: nn.Module, query: Tensor, mask: Tensor | None, given: bool | None
) -> bool:
    """True if a call means that a query sees the keys up to its own place, as for ``"sdpa"``."""
    causal = getattr(module, "is_causal", True) if given is None else given
    return query.shape[2] > 1 and mask is None and bool(causal)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dim() != 4 or not are_alike(query, key, value):
        return False
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.get_autocast_dtype(device):
        return False
    if query.device.type == "cuda":
        widths = (query.shape[3], value.shape[3])
        return query.dtype != torch.float32 and all(w % 8 == 0 and w <= 256 for w in widths)
    return True


def _in_longer_cache(query: Tensor, key: Tensor) -> bool:
    """True if one query sees all keys, and these are the beginning of a longer cache.
    Kernels do not depend on their number then."""
    if torch.compiler.is_compiling() or query.shape[2] != 1:
        return False
    try:
        return stored(key, "key").positions > key.shape[2]
    except LayoutError:
        return False


def _attend(sides: _Sides, call: dict[str, Any]) -> Tensor | None:
    """`cutesuper.ops.attention` with some options.
    None if it has no kernels for these arguments."""
    query, key, value = sides
    if order_of(query) is None:
        query = query.contiguous()
    if _records(query, key, value):
        key, value = (t if order_of(t) is not None else t.contiguous() for t in (key, value))
    if torch.compiler.is_compiling():
        return attention(query, key, value, **call)
    given = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in call.values())
    kind = (query.shape, key.shape, key.stride(), value.stride(), query.dtype, query.device, given,
            *call, _records(query, key, value))  # fmt: skip
    if kind in refused:
        return None
    try:
        return attention(query, key, value, **call)
    except CutesuperError as error:
        if _is_captured(query.device):  # kernels cannot be made then; the next call may
            raise
        refused[kind] = f"attention: {str(error).splitlines()[0]}"
        return None


# ------------------------------------------------------------------------------------ installation


def install(model: nn.Module) -> tuple[list[Entry], list[tuple[Any, str]]]:
    """Let a model of transformers, or those inside a model, attend with cutesuper.

    Returns:
        A record of the changes, and configurations with the implementation that they named before.
    """
    entries: list[Entry] = []
    changed: list[tuple[Any, str]] = []
    done: set[int] = set()
    for path, part in model.named_modules():
        config: Any = getattr(part, "config", None)
        if not isinstance(part, PreTrainedModel) or id(config) in done:
            continue
        if getattr(config, "num_attention_heads", None) is None:
            continue  # a part without attention
        done.add(id(config))
        before = config._attn_implementation_internal
        where, was = f"{path}.config".lstrip("."), f"{before} attention"
        try:
            _check(part, config)
        except Failed as reason:
            entries.append(Entry(where, was, why=str(reason)))
            continue
        register()
        config._attn_implementation_internal = ATTENTION_NAME
        changed.append((config, before))
        entries.append(Entry(where, was, "cs.ops.attention: training, prompts, decoding"))
    return entries, changed


def _check(part: PreTrainedModel, config: Any) -> None:
    """Raise Failed unless the attention of a model can be replaced."""
    if config._attn_implementation_internal != BASE:
        raise Failed(f"only {BASE} attention is replaced, which is what it falls back to")
    if not part._can_set_attn_implementation():
        raise Failed("it does not call attention through the interface of transformers")
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    dim = getattr(config, "head_dim", None)
    if not isinstance(heads, int) or not (isinstance(width, int) or isinstance(dim, int)):
        raise Failed("its configuration does not say what heads it has")
    if not isinstance(dim, int):
        dim = width // heads if isinstance(width, int) else 0
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    _check_heads(heads, key_heads, dim, next(part.parameters()))


def _check_heads(heads: int, key_heads: int, dim: int, like: Tensor) -> None:
    """Raise Failed unless decoding with such heads computes what PyTorch computes."""
    if like.device.type not in ("cpu", "cuda") or like.dtype not in FLOATS:
        raise Failed(f"its parameters are {like.dtype} on {like.device}")
    q = drawn(2, heads, 1, dim, seed=0, like=like)
    k, v = (drawn(2, key_heads, 64, dim, seed=s, like=like) for s in (1, 2))
    with unnoticed(like.device):
        lengths = torch.tensor([40, 40], dtype=torch.int32, device=like.device)
        if not _fits(q, k, v):
            raise Failed(f"there are no kernels for {q.dtype} and heads of {dim} on {q.device}")
        try:
            ours = attention(q, k, v, is_causal=True, enable_gqa=True, key_lengths=lengths)
        except CutesuperError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        seen = (q, k[:, :, :40], v[:, :, :40])
        exact, theirs = (
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for q, k, v in ([t.double() for t in seen], seen)
        )
    within_rule(ours, exact, theirs)
