"""Attention as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from cutesuper.errors import (
    CutesuperError,
    DTypeError,
    GraphError,
    LayoutError,
    OperatorError,
    ShapeError,
)
from cutesuper.ir.arguments import shown
from cutesuper.runtime.checks import ORDINARY, oddity
from cutesuper.torch.ops.attention.calls import Limits, Maybe, Request, attend, check, result_of
from cutesuper.torch.ops.attention.gradient import attention_kept
from cutesuper.torch.ops.attention.kind import Order
from cutesuper.torch.ops.attention.layout import order_of
from cutesuper.torch.ops.rowwise.norms import rms_norm

#: its kernels depend on the order of memory, so a compiler must not change it
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)

#: arguments of the registered operator, in order
_TENSORS = (
    "query", "key", "value", "key_lengths", "page_table", "query_norm_weight", "key_norm_weight",
)  # fmt: skip
_NUMBERS = ("is_causal", "scale", "norm_eps")

_library = torch.library.Library("cutesuper", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? key_lengths, Tensor? page_table, "
    "Tensor? query_norm_weight, Tensor? key_norm_weight, bool is_causal, float? scale, "
    "float norm_eps, Tensor? key_starts=None, Tensor? key_ends=None, bool is_window=False, "
    "Tensor? attn_mask=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, _STRIDES),
)
_library.impl("attention", attend, "CPU")
_library.impl("attention", attend, "CUDA")


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: Maybe,
    page_table: Maybe,
    query_norm_weight: Maybe,
    key_norm_weight: Maybe,
    is_causal: bool,
    scale: float | None,
    norm_eps: float,
    key_starts: Maybe = None,
    key_ends: Maybe = None,
    is_window: bool = False,
    attn_mask: Maybe = None,
) -> torch.Tensor:
    request = Request(
        query, key, value, key_lengths, page_table, query_norm_weight, key_norm_weight, is_causal,
        scale, norm_eps, attn_mask, Limits(key_starts, key_ends, is_window),
    )  # fmt: skip
    check(request)
    return result_of(request)


torch.library.register_fake("cutesuper::attention", _fake, lib=_library)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    query_norm_weight: torch.Tensor | None = None,
    key_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    window: int | None = None,
    key_starts: torch.Tensor | None = None,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(query key^T * scale) value``, like PyTorch's ``scaled_dot_product_attention``.

    CUDA tensors run kernels that are searched for at the first call with a kind of arguments
    (seconds) and kept; CPU tensors run the reference executor. Fits into ``torch.compile`` and,
    once it has run with the same kind of arguments, into CUDA graphs.

    Query, key and value have gradients: the call keeps one number for each row, and the backward
    pass computes the scores again. Its results are the same bits in every run.

    Args:
        query: ``[B, Hq, L, D]``, of float16 or bfloat16; of float32 on the CPU only. Contiguous, or
            ``.transpose(1, 2)`` of something contiguous; nothing is copied. On a GPU D and Dv are
            multiples of 8, up to 256 (for more there are kernels without masks only).
        key: ``[B, Hkv, S, D]``, stored like that, or the first positions ``[:, :, :t]`` of such a
            cache. Data behind them is not read.
        value: ``[B, Hkv, S, Dv]``, likewise.
        attn_mask: broadcasts to ``[B, Hq, L, S]``. Of bool: True where a key is seen, and rows that
            see none are zero; of float32 or the query's type: added to the scores, with a
            gradient, which takes memory for all scores where the bias broadcasts. Where
            ``is_causal`` or ``key_lengths`` say the same, they are faster.
        dropout_p: 0.
        is_causal: row i sees keys 0..i. With ``key_lengths`` the last row sees the last key of its
            sequence, and row i those up to L - 1 - i before it, as in decoding with a cache.
        scale: of the products; None is ``1 / sqrt(D)``.
        enable_gqa: allow Hq to be a multiple of Hkv: neighbouring query heads share a head of keys.
        key_lengths: int32 ``[B]``, 0 to S: sequence b sees its first ``key_lengths[b]`` keys. Data
            behind them may be anything. Rows that see no key are zero.
        page_table: int32 ``[B, n]``: keys and values of sequence b are in these pages, in order;
            ``key`` and ``value`` are then ``[pages, P, Hkv, D]``, P a power of two from 16 to 256,
            and ``key_lengths`` is required. Entries behind a sequence's end may be anything.
        query_norm_weight: ``[D]``: every head of the query is first divided by ``sqrt(mean(x^2) +
            norm_eps)`` and multiplied by it (RMSNorm of each head, as in Qwen3). Where gradients
            are recorded, the norms are calls of `rms_norm`, and round their results.
        key_norm_weight: ``[D]``, the same for keys. Keys that were normalized before they were
            cached need none.
        norm_eps: for these.
        window: with ``is_causal``: a row sees the last ``window`` of the keys that it would see.
            Tiles of keys in front of all windows are not loaded.
        key_starts: int32 ``[B]``, as for padding on the left, or ``[B, L]`` or ``[1, L]``, a number
            for each row: keys in front of it are not seen, and not loaded where no row of a tile
            sees them. Those that are must be finite. Numbers of rows must not fall from one row to
            the next, which is not checked; `packed_limits` makes those of sequences in a row.
        key_ends: int32 ``[B, L]`` or ``[1, L]``: keys from there on are not seen, likewise.

    Returns:
        ``[B, Hq, L, Dv]``, stored in the order of the query.

    Raises:
        OperatorError: dropout; a window without ``is_causal``; an option that is not a number.
        GraphError: a tensor requires a gradient, and there are pages.
        ShapeError, DTypeError, DeviceError, LayoutError: an argument that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    _check_options(dropout_p, enable_gqa)
    tensors = (
        query, key, value, key_lengths, page_table, query_norm_weight, key_norm_weight,
    )  # fmt: skip
    numbers = (is_causal, scale, norm_eps)
    try:
        _check_call(tensors, enable_gqa)
        if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
            what = type(attn_mask).__name__
            raise DTypeError(f"attention: attn_mask is a {what}, must be a torch tensor")
        if is_causal and key_lengths is page_table is None:
            key_lengths = _lengths_of_one_row(query)
            tensors = (*tensors[:3], key_lengths, *tensors[4:])
        limits = Limits(key_starts, key_ends)
        if window is not None:
            limits = _in_window(window, query, key_lengths, is_causal, limits)
        records = _records(tensors, attn_mask)
        if records:
            tensors = _normalized(tensors, norm_eps)
        if (records or attn_mask is not None) and _is_one_key(key, page_table):
            tensors, attn_mask = _with_a_hidden_key(tensors, attn_mask)
            is_causal = is_causal and key_lengths is not None
            numbers = (is_causal, scale, norm_eps)
        if records:
            return attention_kept(tensors[:3], tensors[3], attn_mask, is_causal, scale, limits)
        own = limits.starts, limits.ends, limits.window, attn_mask
        return torch.ops.cutesuper.attention.default(*tensors, *numbers, *own)
    except (AttributeError, RuntimeError) as error:
        if not isinstance(error, CutesuperError):  # PyTorch's, about arguments of another kind
            _refuse_kinds(tensors, numbers)
        raise


def _check_options(dropout_p: Any, enable_gqa: Any) -> None:
    """Refuse options of PyTorch's operator that this one has not. Raises OperatorError."""
    if not isinstance(dropout_p, int | float) or dropout_p != 0.0:
        raise OperatorError(
            f"attention(dropout_p={shown(dropout_p)}): it drops nothing; pass 0.0, as in inference"
        )
    if not isinstance(enable_gqa, int):
        raise OperatorError(f"attention(enable_gqa={shown(enable_gqa)}): must be True or False")


def _lengths_of_one_row(query: torch.Tensor) -> Maybe:
    """The lengths that say what a causal mask says of a single row, which sees the first key alone.
    None for several rows. There are kernels for one row with lengths, none with a causal mask."""
    if query.dim() != 4 or query.shape[2] != 1:
        return None
    return torch.ones(query.shape[0], dtype=torch.int32, device=query.device)


def _is_one_key(key: torch.Tensor, page_table: Maybe) -> bool:
    return page_table is None and key.dim() == 4 and key.shape[2] == 1


def _with_a_hidden_key(tensors: tuple[Any, ...], mask: Maybe) -> tuple[tuple[Any, ...], Maybe]:
    """The tensors with a second key behind the lengths.
    Kernels for just these extents count along a label, which one key has not."""
    query, key, value, lengths, *others = tensors
    if lengths is None:
        lengths = torch.ones(query.shape[0], dtype=torch.int32, device=query.device)
    lengths = lengths.clamp(max=1)
    key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
    mask = F.pad(mask, (0, 1)) if mask is not None and mask.shape[-1] == 1 else mask
    return (query, key, value, lengths, *others), mask


def _in_window(
    window: Any, query: torch.Tensor, lengths: Maybe, causal: bool, limits: Limits
) -> Limits:
    """The limits of a window, together with others. Raises OperatorError."""
    if not isinstance(window, int) or isinstance(window, bool) or window < 1 or not causal:
        raise OperatorError(
            f"attention(window={shown(window)}, is_causal={shown(causal)}): a window is the number "
            "of the last keys that a causal row sees, at least 1"
        )
    batch, rows = query.shape[0], query.shape[2]
    options: dict[str, Any] = {"dtype": torch.int32, "device": query.device}
    ends = torch.full((batch,), rows, **options) if lengths is None else lengths
    last = ends - window
    if limits.starts is None:
        return replace(limits, starts=last, window=True)
    each = last[:, None] + torch.arange(1 - rows, 1, **options)
    starts = limits.starts if limits.starts.dim() == 2 else limits.starts[:, None]
    return replace(limits, starts=torch.maximum(each, starts))


def packed_limits(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    rows: int,
    is_causal: bool = False,
    window: int | None = None,
) -> dict[str, torch.Tensor]:
    """The limits of sequences that lie in a row, without padding between them.
    They are arguments of `attention`: ``attention(q, k, v, **packed_limits(cu_seqlens,
    rows=q.shape[2]))``.

    Queries are then ``[1, Hq, T, D]`` and keys ``[1, Hkv, S, D]`` of all sequences. Tiles of keys
    of other sequences are not loaded. The limits are computed on the device, once for all layers.

    Args:
        cu_seqlens_q: integers ``[n + 1]``: sequence i has the queries from ``cu_seqlens_q[i]`` to
            ``cu_seqlens_q[i + 1]``. The first is 0; queries behind the last count as some of the
            last sequence.
        cu_seqlens_k: the same for keys; None if they are those of the queries.
        rows: T.
        is_causal: the last query of a sequence sees its last key, and each one before it one less.
        window: with ``is_causal``: a query sees the last ``window`` of these.

    Returns:
        ``key_starts`` and ``key_ends``, int32 ``[1, T]``.

    Raises:
        OperatorError: a window without ``is_causal``.
    """
    if window is not None and not (is_causal and window >= 1):
        raise OperatorError(
            f"packed_limits(window={shown(window)}, is_causal={shown(is_causal)}): a window is the "
            "number of the last keys that a causal row sees, at least 1"
        )
    ends_q = cu_seqlens_q[1:].contiguous()
    row = torch.arange(rows, dtype=ends_q.dtype, device=ends_q.device)
    own = torch.searchsorted(ends_q, row, right=True).clamp(max=len(ends_q) - 1)
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    starts, ends = keys[:-1][own], keys[1:][own]
    if is_causal:
        ends = torch.minimum(ends, torch.maximum(ends - (ends_q[own] - 1 - row), starts))
    if window is not None:
        starts = torch.maximum(starts, ends - window)
    return {"key_starts": starts.int()[None], "key_ends": ends.int()[None]}


def _records(tensors: Sequence[Any], mask: Maybe) -> bool:
    """True if a gradient has to be recorded. Raises GraphError where none can be."""
    query, key, value, _, page_table, *weights = tensors
    floats = (t for t in (query, key, value, *weights, mask) if t is not None)
    if not torch.is_grad_enabled() or True not in [t.requires_grad for t in floats]:
        return False
    if page_table is not None:
        raise GraphError(
            "attention: a tensor requires a gradient, and there is no backward for pages of keys; "
            "call it under torch.no_grad(), detach the tensors, or gather the pages before"
        )
    return True


def _normalized(tensors: Sequence[Any], eps: float) -> tuple[Any, ...]:
    """The tensors of a call with norms of query and key as operators of their own.
    Keys behind a length, which may be anything, have the gradient 0."""
    query, key, value, lengths, table, *weights = tensors
    if lengths is not None and weights[1] is not None:
        behind = torch.arange(key.shape[2], device=key.device) >= lengths[:, None]
        key = key.masked_fill(behind[:, None, :, None], 0.0)
    sides = (
        t if weight is None else _norm(t, weight, eps)
        for t, weight in zip((query, key), weights, strict=True)
    )
    return (*sides, value, lengths, table, None, None)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of each head of ``[B, H, S, D]``, in its order of memory."""
    if order_of(x) is Order.TOKENS:
        return rms_norm(x.transpose(1, 2), weight, eps=eps).transpose(1, 2)
    return rms_norm(x, weight, eps=eps)


def _check_call(tensors: Sequence[Any], enable_gqa: bool) -> None:
    """Refuse shared heads without ``enable_gqa``."""
    query, key, _, _, page_table, *_ = tensors
    if not enable_gqa and query.dim() == key.dim() == 4:
        heads = key.shape[1 if page_table is None else 2]
        if query.shape[1] != heads:
            raise ShapeError(
                f"attention(query{list(query.shape)}, key{list(key.shape)}): {query.shape[1]} "
                f"query heads for {heads} heads of keys; pass enable_gqa=True if groups share them"
            )


def _refuse_kinds(tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raise for the first argument that is not an ordinary tensor, or not a number."""
    for name, t in zip(_TENSORS, tensors, strict=True):
        optional = name not in ("query", "key", "value")
        if not (isinstance(t, torch.Tensor) or (t is None and optional)):
            raise DTypeError(f"attention: {name} is a {type(t).__name__}, must be a torch tensor")
        if t is not None and (kind := oddity(t)):
            raise LayoutError(f"attention: {name} is not an ordinary tensor ({kind}); {ORDINARY}")
    for name, n in zip(_NUMBERS, numbers, strict=True):
        if not (isinstance(n, int | float) or (n is None and name == "scale")):
            raise OperatorError(f"attention({name}={shown(n)}): must be a number")
