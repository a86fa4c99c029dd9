"""Plans of attention calls: from tensors to a runner, checked once per kind of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F

from cutesuper.errors import DeviceError, DTypeError, LayoutError, ShapeError
from cutesuper.ir.dims import MAX_ELEMENTS, Shape, extent, size
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.programs import Kept
from cutesuper.torch.ops.attention.kind import (
    Extents,
    Kind,
    LimitKind,
    MaskKind,
    Order,
    Runner,
    batch_of,
    keys_of,
    mask_shape,
    rows_of,
    runner_of,
    sink_shape,
)
from cutesuper.torch.ops.attention.layout import (
    Stored,
    View,
    compact,
    order_of,
    refusal,
    stored,
    within,
)

#: kinds of arguments whose plans are kept
KEPT_PLANS = 4096

Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Limits:
    """Limits of the keys that rows see, int32.

    Attributes:
        starts: ``[B]`` or of rows ``[B or 1, L]``: keys in front are hidden.
        ends: of rows, or of a window: keys from there on are hidden.
        window: whether limits ``[B]`` are those of the last rows, and one less for each row before.
    """

    starts: Maybe = None
    ends: Maybe = None
    window: bool = False

    @property
    def given(self) -> list[tuple[torch.Tensor, bool]]:
        """The tensors, each with whether it is a lower limit."""
        both = (self.starts, True), (self.ends, False)
        return [(t, lower) for t, lower in both if t is not None]

    def kinds(self) -> tuple[LimitKind, ...]:
        """The part of them that determines kernels."""
        return tuple(
            LimitKind(lower, t.dim() == 2, self.window and t.dim() == 1, t.shape[0] > 1)
            for t, lower in self.given
        )

    def values(self, scores: int) -> list[torch.Tensor]:
        """The tensors as kernel graphs have them, for scores of a rank."""
        ones = (1,) * (scores - 3)
        return [t if t.dim() == 1 else t.view(t.shape[0], *ones, -1, 1) for t, _ in self.given]


NO_LIMITS = Limits()
#: neither a page table nor weights of norms
NO_OTHERS: tuple[Maybe, Maybe, Maybe] = (None, None, None)


@dataclass(frozen=True)
class Request:
    """The tensors of a call, and its options.

    ``key_lengths`` and the rest are as in `cutesuper.torch.ops.attention.operator`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_lengths: Maybe
    page_table: Maybe
    query_norm: Maybe
    key_norm: Maybe
    causal: bool
    scale: float | None
    eps: float
    mask: Maybe = None
    limits: Limits = NO_LIMITS
    mask_gradient: bool = False
    sinks: Maybe = None
    sums: bool = False

    @property
    def call(self) -> str:
        """The call for messages: ``attention(query[1, 8, 16, 64], key[...], value[...])``."""
        sides = (("query", self.query), ("key", self.key), ("value", self.value))
        return f"attention({', '.join(f'{n}{list(t.shape)}' for n, t in sides)})"

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return key_heads(self.key, self.page_table)

    @property
    def positions(self) -> int:
        """Positions of keys and values."""
        if self.page_table is None:
            return self.key.shape[2]
        return self.page_table.shape[1] * self.key.shape[1]


def key_heads(key: torch.Tensor, page_table: Maybe) -> int:
    """Heads of keys and values."""
    return key.shape[1 if page_table is None else 2]


@dataclass(frozen=True)
class Plan:
    """The execution of one kind of call.

    Attributes:
        run: takes the graph's inputs.
        views: of query, key and value in their order in memory; None for a tensor that needs none.
        capacity: positions of the cache whose beginning keys and values are; 0 if they are whole.
        limit: number of visible keys of every sequence; 0: no limit.
        output: the output as ``[B, H, L, D]``; None if that is what the kernels return.
        kind: the kernels.
        extents: of the call.
    """

    run: Runner
    views: tuple[View | None, ...]
    capacity: int
    limit: int
    output: View | None
    kind: Kind
    extents: Extents

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Maybe,
        others: Sequence[Maybe],
        mask: Maybe,
        limits: Limits,
        sinks: Maybe,
    ) -> Any:
        """Run the plan on the tensors of a call; ``others`` are page table and weights of norms.
        The result, and the logarithms of the sums of rows if the kernels have them."""
        for name, t in (("key", key), ("value", value)) if self.capacity else ():
            if not within(t, self.capacity):
                raise refusal(t, name)
        if self.limit:
            lengths = _limited(lengths, self.limit, query)
        sides = zip((query, key, value), self.views, strict=True)
        inputs = [t if view is None else t.as_strided(*view) for t, view in sides]
        if lengths is not None:
            inputs.append(lengths)
        if others is not NO_OTHERS:
            inputs += [t for t in others if t is not None]
        if mask is not None:
            inputs.append(mask_values(mask, self.kind, self.extents))
        if limits is not NO_LIMITS:
            inputs += limits.values(4 + (self.kind.group > 1))
        if sinks is not None:
            inputs.append(sink_values(sinks, self.kind))
        y, *sums = self.run(inputs)
        y = y if self.output is None else y.as_strided(*self.output)
        return (y, sums[0].view(query.shape[:3])) if sums else y


def _limited(lengths: Maybe, limit: int, query: torch.Tensor) -> torch.Tensor:
    if lengths is not None:
        return lengths.clamp(max=limit)
    return torch.full((query.shape[0],), limit, dtype=torch.int32, device=query.device)


_plans: Kept[tuple[object, ...], Plan] = Kept(KEPT_PLANS)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: Maybe,
    page_table: Maybe,
    query_norm: Maybe,
    key_norm: Maybe,
    causal: bool,
    scale: float | None,
    eps: float,
    starts: Maybe = None,
    ends: Maybe = None,
    window: bool = False,
    mask: Maybe = None,
    sinks: Maybe = None,
    sums: bool = False,
) -> Any:
    """Attention on real tensors; see `cutesuper.torch.ops.attention.operator`.

    The result; with ``sums`` a pair, the second the logarithms of the sums of rows.
    """
    # what most calls have not is left out early: it took 3 of 15 us
    others, own = NO_OTHERS, NO_LIMITS
    more: tuple[object, ...] = ()
    if page_table is not None or query_norm is not None or key_norm is not None:
        others = (page_table, query_norm, key_norm)
        more = tuple(f for t in others if t is not None for f in facts(t))
    if starts is not None or ends is not None or window:
        own = Limits(starts, ends, window)
        more += tuple(f for t, _ in own.given for f in facts(t))
    key_facts = (
        *facts(query), *facts(key), *facts(value), *facts(key_lengths), *more,
        page_table is None, query_norm is None, causal, scale, eps, TABLE.changes,
        starts is None, window,
        *(() if mask is None else facts(mask)), None if sinks is None else facts(sinks), sums,
    )  # fmt: skip
    plan = _plans.get(key_facts)
    if plan is None:
        request = Request(
            query, key, value, key_lengths, *others, causal, scale, eps, mask, own, False, sinks,
            sums,
        )  # fmt: skip
        check(request)
        if 0 in (query.numel(), value.numel(), request.positions):
            nothing = torch.zeros_like(result_of(request))
            return (nothing, sums_of_nothing(request)) if sums else nothing
        plan = _plans.made(key_facts, lambda: _plan(request))
    return plan(query, key, value, key_lengths, others, mask, own, sinks)


def facts(t: Maybe) -> tuple[object, ...]:
    """The facts of a tensor that determine the plan of a call."""
    return (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device)


def result_of(r: Request) -> torch.Tensor:
    """An empty tensor like the output: ``[B, H, L, value's D]`` in the query's storage order."""
    b, h, n, _ = r.query.shape
    if order_of(r.query) is Order.TOKENS:
        return r.query.new_empty((b, n, h, r.value.shape[-1])).transpose(1, 2)
    return r.query.new_empty((b, h, n, r.value.shape[-1]))


def sums_of_nothing(r: Request) -> torch.Tensor:
    """The logarithms of the sums of rows that see no key, ``[B, H, L]``: those of the sinks."""
    sums = torch.full(r.query.shape[:3], -inf, dtype=torch.float32, device=r.query.device)
    return sums if r.sinks is None else r.sinks.float()[:, None].expand_as(sums).contiguous()


# ------------------------------------------------------------------------------------------ plans


def _plan(r: Request) -> Plan:
    query_order = order_of(r.query)
    if query_order is None:
        raise refusal(r.query, "query")
    key, value = _keys(r)
    limit = _limit(r, key)
    kind = kind_of(r, query_order, key, value, r.key_lengths is not None or limit > 0)
    h, g = kind.heads, kind.group
    extents = Extents(r.query.shape[0], r.query.shape[2], key.positions)
    kind = kind if fits_open(kind, extents) else kind.of(extents)
    b, n = extents.batch, extents.rows
    views = tuple(
        None if _is_plain(t, shape) else compact(shape)
        for t, shape in zip((r.query, r.key, r.value), memory_of(kind, extents), strict=True)
    )
    width, heads = kind.value_dim, h * g
    strides = (heads * n * width, n * width, width, 1)
    if query_order is Order.TOKENS:
        strides = (heads * n * width, width, heads * width, 1)
    # a graph without groups makes [B, H, L, D] in this order; others have more dimensions
    plain = g == 1 and query_order is Order.HEADS
    output = None if plain else ((b, heads, n, width), strides)
    capacity = key.positions if key.positions != r.positions else 0
    run = runner_of(kind, extents, r.query.device)
    return Plan(run, views, capacity, limit, output, kind, extents)


def fits_open(kind: Kind, extents: Extents) -> bool:
    """True if kernels for any extents can address all tensors, which have 32 bits for offsets.
    Those of a mask are all scores if it has a gradient. The extents of pages are known."""
    query, *others = memory_of(kind, extents)
    shapes: list[Shape] = [query, (*query[:-1], kind.value_dim), *([] if kind.pages else others)]
    if own := kind.mask:
        scores = extents.batch, extents.rows, extents.keys
        shapes.append(
            scores_shape(kind, extents) if own.gradient else mask_shape(kind, own, scores)
        )
    return max(map(size, shapes)) <= MAX_ELEMENTS


def scores_shape(kind: Kind, extents: Extents) -> tuple[int, ...]:
    """Extents of the scores."""
    return (extents.batch, kind.heads, kind.group, extents.rows, extents.keys)


def memory_of(kind: Kind, extents: Extents) -> tuple[tuple[int, ...], ...]:
    """Extents of query, key and value in the order of memory."""
    heads = (kind.heads, kind.group)
    return (
        _memory(extents.batch, heads, extents.rows, kind.dim, kind.query_order),
        _key_memory(kind, extents, kind.dim, kind.key_order),
        _key_memory(kind, extents, kind.value_dim, kind.value_order),
    )


def _keys(r: Request) -> tuple[Stored, Stored]:
    """The storage of keys and values; both in caches of one length, or both whole."""
    if r.page_table is not None:
        return Stored(Order.TOKENS, r.positions), Stored(Order.TOKENS, r.positions)
    key, value = stored(r.key, "key"), stored(r.value, "value")
    if key.positions != value.positions:
        raise LayoutError(
            f"{r.call}: key is the beginning of {key.positions} positions, value of "
            f"{value.positions}; slice both from caches of one length, or call .contiguous()"
        )
    return key, value


def _limit(r: Request, key: Stored) -> int:
    """The number of keys of a cache that are visible; 0 if none needs to be hidden."""
    if key.positions == r.positions:
        return 0
    if not r.causal or r.key_lengths is not None:
        return r.positions
    if r.query.shape[2] <= r.positions:
        # row i sees keys 0..i, as the last L rows see of L keys; data behind these then has no
        # effect, not even NaN
        return r.query.shape[2]
    raise LayoutError(
        f"{r.call}, is_causal=True: more rows than keys, and key is the beginning of a cache of "
        f"{key.positions} positions; call .contiguous()"
    )


def kind_of(r: Request, order: Order, key: Stored, value: Stored, lengths: bool) -> Kind:
    """The kernels of a call."""
    batch, any_batch = batch_of(r.query.shape[0])
    paged = r.page_table is not None
    return Kind(
        batch=batch,
        any_batch=any_batch,
        heads=r.key_heads,
        group=r.query.shape[1] // r.key_heads,
        rows=rows_of(r.query.shape[2]),
        keys=key.positions if paged else keys_of(key.positions),
        dim=r.query.shape[3],
        value_dim=r.value.shape[3],
        dtype=as_dtype(r.query.dtype),
        query_order=order,
        key_order=key.order,
        value_order=value.order,
        causal=r.causal,
        scale=r.scale,
        lengths=lengths,
        pages=r.key.shape[0] if paged else 0,
        page_size=r.key.shape[1] if paged else 0,
        query_norm=r.query_norm is not None,
        key_norm=r.key_norm is not None,
        eps=r.eps if (r.query_norm is not None or r.key_norm is not None) else 0.0,
        mask=None if r.mask is None else _mask_kind(r, r.mask),
        limits=r.limits.kinds(),
        sums=r.sums,
        sinks=r.sinks is not None,
    )


def _mask_kind(r: Request, mask: torch.Tensor) -> MaskKind:
    hides = mask.dtype == torch.bool
    # a gradient has all that the mask has: what repeated its elements adds up theirs
    own = zip(mask.shape, mask.stride(), strict=True)
    differs = [n > 1 and (step != 0 or r.mask_gradient) for n, step in own]
    batch, heads, rows = ([False] * (4 - mask.dim()) + differs)[:3]
    dtype = as_dtype(r.query.dtype if hides else mask.dtype)
    return MaskKind(dtype, hides, batch, heads, rows, r.mask_gradient)


def sink_values(sinks: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The logits of query heads ``[H]`` as kernels read them."""
    return sinks.float().contiguous().view(sink_shape(kind))


def mask_values(mask: torch.Tensor, kind: Kind, extents: Extents) -> torch.Tensor:
    """The mask of a call as kernels read it: contiguous, 1 and 0 for conditions.
    With zeros for the positions of a cache that are not in use."""
    own = kind.mask
    assert own is not None
    given = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    for d, differs in enumerate((own.batch, own.heads, own.rows)):
        given = given if differs else given.narrow(d, 0, 1)
    given = given.to(own.dtype.torch)
    if behind := extents.keys - given.shape[-1]:
        given = F.pad(given, (0, behind))
    shape = mask_shape(kind, own, (extents.batch, extents.rows, extents.keys))
    return given.contiguous().view([extent(d) for d in shape])


def _memory(b: int, heads: tuple[int, int], rows: int, width: int, order: Order) -> tuple[int, ...]:
    """Extents of the query in the order of memory; no dimension for a group of one."""
    lead = heads if heads[1] > 1 else heads[:1]
    return (b, *lead, rows, width) if order is Order.HEADS else (b, rows, *lead, width)


def _key_memory(kind: Kind, extents: Extents, width: int, order: Order) -> tuple[int, ...]:
    """Extents of keys or values in the order of memory; an extent of 1 for each group of heads."""
    lead = (kind.heads, 1) if kind.group > 1 else (kind.heads,)
    if kind.pages:
        return (kind.pages, kind.page_size, *lead, width)
    b, keys = extents.batch, extents.keys
    return (b, *lead, keys, width) if order is Order.HEADS else (b, keys, *lead, width)


def _is_plain(t: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(t.shape) == shape and t.is_contiguous()


# ------------------------------------------------------------------------------------------ checks


def check(r: Request) -> None:
    """Refuse arguments that make no sense, regardless of their memory layout.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: says what is wrong, and what to do.
    """
    _check_types(r)
    _check_shapes(r)
    _check_integers(r)
    for name, t in (("query_norm_weight", r.query_norm), ("key_norm_weight", r.key_norm)):
        if t is not None and (tuple(t.shape) != (r.query.shape[3],) or not t.is_contiguous()):
            raise ShapeError(
                f"{r.call}: {name} has shape {list(t.shape)}, must be [{r.query.shape[3]}] and "
                "contiguous, one factor for each element of a head"
            )
    if r.mask is not None:
        _check_mask(r, r.mask)
    if r.sinks is not None:
        _check_sinks(r, r.sinks)


def _check_sinks(r: Request, sinks: torch.Tensor) -> None:
    """Refuse sinks that are no number for each query head."""
    if tuple(sinks.shape) != (r.query.shape[1],):
        raise ShapeError(
            f"{r.call}: sinks has shape {list(sinks.shape)}, must be [{r.query.shape[1]}], a logit "
            "for each query head"
        )
    if sinks.dtype not in (torch.float32, r.query.dtype):
        raise DTypeError(f"{r.call}: sinks is {sinks.dtype}; use {r.query.dtype} or torch.float32")


def _check_mask(r: Request, mask: torch.Tensor) -> None:
    """Refuse a mask that does not broadcast to the scores, or that kernels do not read."""
    whole = (r.query.shape[0], r.query.shape[1], r.query.shape[2], r.positions)
    own = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = all(n in (1, m) for n, m in zip(own, whole, strict=False))
    if mask.dim() not in (1, 2, 3, 4) or not fits or own[-1] != whole[-1]:
        raise ShapeError(
            f"{r.call}: attn_mask has shape {list(mask.shape)}; it must broadcast to "
            f"{list(whole)}, with a last extent of {whole[-1]}"
        )
    if mask.dtype not in (torch.bool, torch.float32, r.query.dtype):
        raise DTypeError(
            f"{r.call}: attn_mask is {mask.dtype}; use torch.bool, {r.query.dtype} or torch.float32"
        )


def _check_types(r: Request) -> None:
    floats = {
        "query": r.query, "key": r.key, "value": r.value,
        "query_norm_weight": r.query_norm, "key_norm_weight": r.key_norm,
    }  # fmt: skip
    for name, t in floats.items():
        if t is not None and t.dtype != r.query.dtype:
            raise DTypeError(
                f"{r.call}: {name} is {t.dtype}, query is {r.query.dtype}; convert one of them"
            )
    if as_dtype(r.query.dtype).integer:
        raise DTypeError(f"{r.call}: query is {r.query.dtype}; use float16, bfloat16 or float32")
    integers = ("key_lengths", r.key_lengths), ("page_table", r.page_table)
    limits = ("key_starts", r.limits.starts), ("key_ends", r.limits.ends)
    beside = ("attn_mask", r.mask), ("sinks", r.sinks)
    for name, t in (*floats.items(), *integers, *limits, *beside):
        if t is not None and t.device != r.query.device:
            raise DeviceError(
                f"{r.call}: {name} is on {t.device}, query on {r.query.device}; move "
                "all to one device"
            )


def _check_shapes(r: Request) -> None:
    sides = (("query", r.query), ("key", r.key), ("value", r.value))
    for name, t in sides:
        if t.dim() != 4:
            layout = (
                "[B, H, S, D]"
                if r.page_table is None or name == "query"
                else ("[pages, P, H, D] with page_table")
            )
            raise ShapeError(
                f"{r.call}: {name} has rank {t.dim()}, must be {layout}; use "
                ".unflatten() or .unsqueeze()"
            )
    if r.key.shape[:3] != r.value.shape[:3]:
        raise ShapeError(f"{r.call}: key and value differ in more than their last extent")
    if r.key.shape[3] != r.query.shape[3]:
        raise ShapeError(f"{r.call}: query and key differ in their last extent")
    if r.page_table is None and r.key.shape[0] != r.query.shape[0]:
        raise ShapeError(
            f"{r.call}: {r.query.shape[0]} sequences of queries, {r.key.shape[0]} of "
            "keys; use .expand() and .contiguous() on one of them"
        )
    if r.key_heads == 0 or r.query.shape[1] % r.key_heads:
        raise ShapeError(
            f"{r.call}: {r.query.shape[1]} query heads are no multiple of the "
            f"{r.key_heads} heads of key and value"
        )


def _check_integers(r: Request) -> None:
    batch, table, lengths = r.query.shape[0], r.page_table, r.key_lengths
    for t, lower in r.limits.given:
        name = "key_starts" if lower else "key_ends"
        meaning = "[B, L] or [1, L], a key of each row" + lower * ", or [B], one of each sequence"
        _check_int32(r, name, t, meaning)
        rows = ((batch, r.query.shape[2]), (1, r.query.shape[2]))
        if tuple(t.shape) not in (*rows, *([(batch,)] if lower or r.limits.window else [])):
            raise ShapeError(f"{r.call}: {name} has shape {list(t.shape)}, must be {meaning}")
    if lengths is not None:
        _check_int32(r, "key_lengths", lengths, "[B], the number of keys of each sequence")
        if tuple(lengths.shape) != (batch,):
            raise ShapeError(
                f"{r.call}: key_lengths has shape {list(lengths.shape)}, must be "
                f"[{batch}], the number of keys of each sequence"
            )
    if table is None:
        return
    if lengths is None:
        raise ShapeError(
            f"{r.call}: page_table needs key_lengths, the number of keys of each sequence"
        )
    _check_int32(r, "page_table", table, "[B, n], the pages of each sequence in order")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ShapeError(
            f"{r.call}: page_table has shape {list(table.shape)}, must be "
            f"[{batch}, n], the pages of each sequence in order"
        )
    size = r.key.shape[1]
    if size < 16 or size > 256 or size & (size - 1):
        raise ShapeError(
            f"{r.call}: pages of {size} positions; key and value are [pages, P, H, D] "
            "with a power of two from 16 to 256 for P"
        )
    for name, t in (("key", r.key), ("value", r.value)):
        if not t.is_contiguous():
            raise LayoutError(
                f"{r.call}: the pages of {name} have gaps (strides "
                f"{list(t.stride())}); allocate key and value caches apart"
            )


def _check_int32(r: Request, name: str, t: torch.Tensor, meaning: str) -> None:
    if t.dtype != torch.int32:
        raise DTypeError(
            f"{r.call}: {name} is {t.dtype}, must be torch.int32 {meaning}; convert it with .to()"
        )
    if not t.is_contiguous():
        raise LayoutError(
            f"{r.call}: {name} is not contiguous (strides {list(t.stride())}); call .contiguous()"
        )
