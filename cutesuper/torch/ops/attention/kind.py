"""The kernels that calls of attention need: a `Kind`, its kernel graph, kernels that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch

from cutesuper.errors import NO_KERNEL
from cutesuper.ir.dims import Dim, Symbol, extent, open_size
from cutesuper.ir.dtypes import DType
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.runtime.kernel import BUCKETS, bucket_of
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.torch.ops.classes import class_of

if TYPE_CHECKING:
    from cutesuper.runtime.kernel import Kernel

#: takes the graph's inputs, returns its outputs
Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]

#: kinds whose kernels are kept
KEPT_KINDS = 256


class Order(Enum):
    """The order of the dimensions batch, heads, positions and width in memory."""

    HEADS = "(B, H, S, D)"
    TOKENS = "(B, S, H, D)"


@dataclass(frozen=True)
class MaskKind:
    """The properties of a mask tensor that determine the kernels of a call.

    Attributes:
        dtype: of its elements, as kernels read them.
        hides: whether it is 0 where a key is hidden; else it is added to the scores.
        batch, heads, rows: whether it differs along these; along the keys it always does.
        gradient: whether it has one.
    """

    dtype: DType
    hides: bool
    batch: bool
    heads: bool
    rows: bool
    gradient: bool = False


@dataclass(frozen=True)
class LimitKind:
    """The properties of a tensor of limits that determine the kernels of a call.

    Attributes:
        lower: whether keys in front of a limit are hidden, or those from it on.
        rows: whether each row has one, or each sequence.
        window: whether those of sequences are those of their last rows.
        batch: whether they differ between sequences.
    """

    lower: bool
    rows: bool
    window: bool
    batch: bool


@dataclass(frozen=True)
class Kind:
    """Everything that determines the kernels of a call, except the GPU.

    Attributes:
        batch: sequences; with ``any_batch`` the hint, for kernels that take any number.
        heads: of keys and values.
        group: query heads per head of keys.
        rows: positions of the query: a number, or the symbol L for any.
        keys: positions of keys and values, the capacity if there are lengths: a number, or the
            symbol S for any.
        dim, value_dim: width of a head of query and key, and of value.
        query_order, key_order, value_order: with pages the last two are not used.
        causal: with ``lengths`` the last row sees the last key, else row 0 sees key 0.
        scale: of the scores; None is 1 / sqrt(dim).
        lengths: whether keys are limited for each sequence.
        pages, page_size: of the caches; 0 if keys are not in pages.
        query_norm, key_norm: whether heads are normalized, with ``eps``.
        mask: a tensor that meets the scores.
        limits: tensors of limits.
        sums: whether the logarithms of the sums of rows are a second output.
        sinks: whether each query head has a logit that joins these sums.
    """

    batch: int
    any_batch: bool
    heads: int
    group: int
    rows: Dim
    keys: Dim
    dim: int
    value_dim: int
    dtype: DType
    query_order: Order = Order.HEADS
    key_order: Order = Order.HEADS
    value_order: Order = Order.HEADS
    causal: bool = False
    scale: float | None = None
    lengths: bool = False
    pages: int = 0
    page_size: int = 0
    query_norm: bool = False
    key_norm: bool = False
    eps: float = 1e-6
    mask: MaskKind | None = None
    limits: tuple[LimitKind, ...] = ()
    sums: bool = False
    sinks: bool = False

    @property
    def open(self) -> bool:
        """True if one kernel takes calls of several extents."""
        return self.any_batch or isinstance(self.rows, Symbol) or isinstance(self.keys, Symbol)

    def of(self, extents: Extents) -> Kind:
        """The kind for calls with just these extents."""
        return replace(
            self, batch=extents.batch, any_batch=False, rows=extents.rows, keys=extents.keys
        )


@dataclass(frozen=True)
class Extents:
    """Sequences of a call, positions of its query, and positions of its keys."""

    batch: int
    rows: int
    keys: int


def graph_of(kind: Kind) -> KernelGraph:
    """The kernel graph of attention.

    Inputs, those that exist: query, key, value, lengths, table, query_norm, key_norm, mask,
    starts, ends, sinks, in their order in memory. G query heads for each of H heads are ``[B, H, G,
    L, D]``, keys then ``[B, H, 1, S, D]``. The output is stored in the query's order; the
    logarithms of the sums of rows are ``[B, H, G, L, 1]``, float32.
    """
    g = new_kernel_graph()
    b: Dim = Symbol("B", kind.batch) if kind.any_batch else kind.batch
    many = _heads(kind)
    single = (kind.heads, 1) if kind.group > 1 else (kind.heads,)
    sides = (
        ("query", many, kind.rows, kind.dim, kind.query_order),
        ("key", single, kind.keys, kind.dim, kind.key_order),
        ("value", single, kind.keys, kind.value_dim, kind.value_order),
    )
    query, key, value = (
        g.new_input(_stored(kind, b, *side), dtype=kind.dtype, name=side[0]) for side in sides
    )
    lengths = g.new_input((b,), dtype="int32", name="lengths") if kind.lengths else None
    if kind.pages:
        table = g.new_input((b, extent(kind.keys) // kind.page_size), dtype="int32", name="table")
        key, value = g.gather_pages(key, table), g.gather_pages(value, table)
    query = _by_heads(g, query, kind.query_order)
    key = _by_heads(g, key, Order.TOKENS if kind.pages else kind.key_order)
    value = _by_heads(g, value, Order.TOKENS if kind.pages else kind.value_order)
    if kind.query_norm:
        weight = g.new_input((kind.dim,), dtype=kind.dtype, name="query_norm")
        query = g.rms_norm(query, weight, eps=kind.eps)
    if kind.key_norm:
        weight = g.new_input((kind.dim,), dtype=kind.dtype, name="key_norm")
        key = g.rms_norm(key, weight, eps=kind.eps)
    sums: Tensor | None = None
    if kind.mask is not None or kind.limits or kind.sums or kind.sinks:
        scores = _scores(g, kind, query, key, lengths)
        y = g.matmul(g.softmax(scores), value)
        sums = g.logsumexp(scores) if kind.sums or kind.sinks else None
        if kind.sinks and sums is not None:
            y, sums = _with_sinks(g, kind, y, sums)
    else:
        y = g.scaled_dot_product_attention(query, key, value, kind.causal, kind.scale, lengths)
    if kind.query_order is Order.TOKENS:
        n = len(y.shape)
        y = g.transpose(y, (0, n - 2, *range(1, n - 2), n - 1))
    g.mark_output(y)
    if sums is not None and kind.sums:
        g.mark_output(sums, "float32")
    return g


def _with_sinks(g: KernelGraph, kind: Kind, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Results and logarithms of sums with a logit more for each row.

    Where a row sees no key, the logarithm is the logit, and the result is still 0.
    """
    sinks = g.new_input(sink_shape(kind), "float32", "sinks")
    top = g.maximum(sums, sinks)
    total = g.add(g.exp(g.sub(sums, top)), g.exp(g.sub(sinks, top)))
    return g.mul(y, g.sigmoid(g.sub(sums, sinks))), g.add(top, g.log(total))


def sink_shape(kind: Kind) -> tuple[int, ...]:
    """Extents of the sinks, as kernel graphs have them."""
    return (1, *_heads(kind), 1, 1)


def _heads(kind: Kind) -> tuple[int, ...]:
    """The extents of query heads in the graph."""
    return (kind.heads, kind.group) if kind.group > 1 else (kind.heads,)


def _scores(
    g: KernelGraph, kind: Kind, query: Tensor, key: Tensor, lengths: Tensor | None
) -> Tensor:
    """Scores with tensors that meet or limit them."""
    scale = kind.dim**-0.5 if kind.scale is None else kind.scale
    scores = g.mul(g.matmul(query, g.transpose(key)), scale)
    if (mask := kind.mask) is not None:
        beside = g.new_input(mask_shape(kind, mask, scores.shape), mask.dtype, "mask")
        scores = g.hide(beside, scores) if mask.hides else g.add(scores, beside)
        scores = g.convert(scores, kind.dtype)  # a bias may be float32
    if lengths is not None:
        scores = g.length_mask(scores, lengths, kind.causal)
    elif kind.causal:
        scores = g.causal_mask(scores)
    for limit in kind.limits:
        name = "starts" if limit.lower else "ends"
        bound = g.new_input(limit_shape(limit, scores.shape), "int32", name)
        scores = g.limit_mask(scores, bound, limit.lower, limit.window)
    return scores


def limit_shape(limit: LimitKind, scores: Sequence[Dim]) -> tuple[Dim, ...]:
    """Extents of a tensor of limits, as the kernel graph has it."""
    if not limit.rows:
        return (scores[0],)
    return (scores[0] if limit.batch else 1, *(1 for _ in scores[1:-2]), scores[-2], 1)


def mask_shape(kind: Kind, mask: MaskKind, scores: Sequence[Dim]) -> tuple[Dim, ...]:
    """Extents of a mask tensor, as the kernel graph has it.

    ``scores``: those of the scores, of which the first (sequences) and the last two are read.
    """
    own = _heads(kind)
    heads = own if mask.heads else (1,) * len(own)
    return (scores[0] if mask.batch else 1, *heads, scores[-2] if mask.rows else 1, scores[-1])


def _stored(
    kind: Kind, b: Dim, name: str, heads: tuple[int, ...], rows: Dim, width: int, order: Order
) -> tuple[Dim, ...]:
    """Extents of an input in the order of its memory."""
    if kind.pages and name != "query":
        return (kind.pages, kind.page_size, *heads, width)
    return (b, *heads, rows, width) if order is Order.HEADS else (b, rows, *heads, width)


def _by_heads(g: KernelGraph, t: Tensor, order: Order) -> Tensor:
    """A tensor in some order of memory as ``[B, heads, positions, width]``."""
    n = len(t.shape)
    return t if order is Order.HEADS else g.transpose(t, (0, *range(2, n - 1), 1, n - 1))


# ----------------------------------------------------------------------------------------- kernels

#: by kind; None if no kernels take all extents
_kernels: Kept[Kind, Kernel | None] = Kept(KEPT_KINDS)


def runner_of(kind: Kind, extents: Extents, device: torch.device) -> Runner:
    """The runner of a kind: kernels on a GPU, the reference executor elsewhere.

    Args:
        kind: the kernels.
        extents: of the call; for kernels of just these if those for any cannot be made.
        device: of the call.

    Raises:
        DeviceError: kernels would have to be made while a CUDA graph is captured.
        CutesuperError: from `cutesuper.superoptimize`.
    """
    if device.type not in KERNEL_DEVICES:
        return _reference_of(kind)
    kernel = _kept(kind, device) or _kept(kind.of(extents), device)
    if kernel is None:
        raise AssertionError(f"{kind}: neither kernels nor an error")
    return kernel


def _reference_of(kind: Kind) -> Runner:
    """The reference executor; as in the kernels, data behind a length has no effect.

    before: ``value[b, :, lengths[b]:]`` is NaN, ``table[b, 9]`` is -1; after: 0, page 0.
    """
    whole = kind
    if kind.pages:
        tokens = Order.TOKENS
        whole = replace(kind, pages=0, page_size=0, key_order=tokens, value_order=tokens)
    graph = graph_of(whole)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not kind.lengths:
            return run_reference(graph, inputs)
        query, key, value, lengths, *others = inputs
        if kind.pages:
            keys = extent(kind.keys)
            seen = torch.arange(keys, device=lengths.device) < lengths[:, None]
            table, *others = others
            pages = table.masked_fill(~seen[:, :: kind.page_size], 0).long()
            key, value = key[pages].flatten(1, 2), value[pages].flatten(1, 2)
        key, value = cleared(whole, key, value, lengths)
        return run_reference(graph, [query, key, value, lengths, *others])

    return run


def cleared(
    kind: Kind, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the order of memory, with 0 behind the lengths."""
    keys = key.shape[_axis(kind.key_order)]
    seen = torch.arange(keys, device=lengths.device) < lengths[:, None]
    return _cleared(key, seen, kind.key_order), _cleared(value, seen, kind.value_order)


def _axis(order: Order) -> int:
    """The dimension of the positions."""
    return -2 if order is Order.HEADS else 1


def _cleared(t: torch.Tensor, seen: torch.Tensor, order: Order) -> torch.Tensor:
    """Keys or values, with 0 where ``seen[B, S]`` is false."""
    one = (1,) * (t.dim() - 3)
    shape = (*one, seen.shape[1], 1) if order is Order.HEADS else (seen.shape[1], *one, 1)
    return t.masked_fill(~seen.view(len(seen), *shape), 0.0)


def _kept(kind: Kind, device: torch.device) -> Kernel | None:
    """The kernels of a kind, made at the first call."""
    return _kernels.made_on(device, kind, "attention", lambda: _made(kind))


def _made(kind: Kind) -> Kernel | None:
    found = kernels_of(graph_of(kind))
    return None if found is None else found[0]


def kernels_of(*graphs: KernelGraph) -> tuple[Kernel, ...] | None:
    """The kernels of graphs; None if extents are open, and there are none that take all.
    Raises SearchError, LoweringError, ScheduleError, CompileError if they are known."""
    from cutesuper.pipeline import best_kernel

    try:
        return tuple(map(best_kernel, graphs))
    except NO_KERNEL:
        if any(open_size(g.nodes[i].shape) for g in graphs for i in g.inputs):
            return None
        raise


def rows_of(rows: int) -> Dim:
    """``Kind.rows`` for this number of queries: the symbol of its class.
    One query, as in decoding, is a class of its own, whose kernels have no positions of queries."""
    return 1 if rows == 1 else Symbol("L", class_of("queries", rows))


def keys_of(keys: int) -> Dim:
    """``Kind.keys`` for this number of keys: the symbol of its class."""
    return Symbol("S", class_of("keys", keys))


def batch_of(batch: int) -> tuple[int, bool]:
    """``Kind.batch`` and ``Kind.any_batch`` for this number of sequences.

    All numbers in one bucket share kernels. Below the first bucket each number has its own kernels:
    there the split of keys among blocks depends most on it.
    """
    return (batch, False) if batch < BUCKETS[0] else (bucket_of(batch), True)
