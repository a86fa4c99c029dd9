"""Gradients of attention: kernels compute the scores again (arXiv:2205.14135).
The forward pass keeps the logarithm of the sum of each row.

Both passes are operators of ``torch.library``, so that compilers see them::

    attention_kept(query, key, value, key_lengths, attn_mask, ..) -> (result, lse)
    attention_backward(cotangent, query, key, value, key_lengths, attn_mask, result, lse, ..)
        -> gradients

Kernels are those of one kind of call, for any extents where there are such; CPU tensors run the
reference executor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cutesuper.autodiff.gradient import Split, split
from cutesuper.errors import GraphError
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.torch.ops.attention.calls import (
    KEPT_PLANS,
    Limits,
    Maybe,
    Request,
    check,
    facts,
    fits_open,
    kind_of,
    mask_values,
    memory_of,
    result_of,
    sink_values,
    sums_of_nothing,
)
from cutesuper.torch.ops.attention.kind import (
    KEPT_KINDS,
    Extents,
    Kind,
    Order,
    Runner,
    cleared,
    graph_of,
    kernels_of,
)
from cutesuper.torch.ops.attention.layout import Stored, order_of, refusal

_TENSORS = ("query", "key", "value")


@dataclass(frozen=True)
class Passes:
    """The execution of both passes of one kind of call.

    Attributes:
        kind: the kernels.
        extents: of the call.
        memory: extents of query, key and value in the order of memory.
        split: the graphs.
        forward, backward: take their inputs.
    """

    kind: Kind
    extents: Extents
    memory: tuple[tuple[int, ...], ...]
    split: Split
    forward: Runner
    backward: Runner

    def keep(self, r: Request) -> list[torch.Tensor]:
        """The result as the graph has it, and the logarithms."""
        made = self.forward(self._values(self.split.forward, self._given(r)))
        return made[:2]

    def gradients(self, r: Request, kept: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of query, key and value ``[B, H, S, D]``, in their orders of memory.

        And those of the mask and of the sinks, which are empty if there are none.

        ``kept``: the result, the logarithms and their cotangents, by name.
        """
        result, sums = _kept_names(self.split)
        values = self._given(r) | {sums: kept["lse"]}
        of_result, *of_sums = sorted(self.split.cotangents, key=self.split.cotangents.__getitem__)
        for name, t in ((result, kept["out"]), (of_result, kept["cotangent"])):
            values[name] = self._in_order(t)
        for name in of_sums:
            values[name] = kept["lse_cotangent"].contiguous().view(kept["lse"].shape)
        made = self.backward(self._values(self.split.backward, values))
        found = {name: made[int(n)] for name, n in self.split.gradients.items()}
        orders = self.kind.query_order, self.kind.key_order, self.kind.value_order
        sides = zip(_TENSORS, (r.query, r.key, r.value), orders, strict=True)
        own = (_logical(found[name], side, order) for name, side, order in sides)
        of_sinks = _sink_gradient(r, kept, found.get("delta"))
        return [*own, _mask_gradient(r, found.get("mask")), of_sinks]

    def _given(self, r: Request) -> dict[str, torch.Tensor]:
        orders = self.kind.query_order, self.kind.key_order, self.kind.value_order
        sides = r.query, r.key, r.value
        found = {
            name: _stored(t, order).view(shape)
            for name, t, order, shape in zip(_TENSORS, sides, orders, self.memory, strict=True)
        }
        if r.key_lengths is not None:
            found["lengths"] = r.key_lengths
        if r.mask is not None:
            found["mask"] = mask_values(r.mask, self.kind, self.extents)
        if r.sinks is not None:
            found["sinks"] = sink_values(r.sinks, self.kind)
        names = ("starts" if lower else "ends" for _, lower in r.limits.given)
        return found | dict(zip(names, r.limits.values(len(self.memory[0])), strict=True))

    def _in_order(self, t: torch.Tensor) -> torch.Tensor:
        """The result or its cotangent as the graph has it."""
        shape = *self.memory[0][:-1], t.shape[-1]
        return _stored(t, self.kind.query_order).contiguous().view(shape)

    def _values(self, graph: KernelGraph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [values[graph.nodes[i].name] for i in graph.inputs]


def _mask_gradient(r: Request, found: Maybe) -> torch.Tensor:
    """The gradient of the mask from that of the graph, if there is one.
    An empty tensor for a mask that needs none."""
    if not r.mask_gradient or r.mask is None:
        return r.query.new_empty(0)
    return torch.zeros_like(r.mask) if found is None else found.view(r.mask.shape)


def _sink_gradient(r: Request, kept: dict[str, torch.Tensor], delta: Maybe) -> torch.Tensor:
    """The gradient of the sinks; an empty tensor if there are none.

    The sum of ``exp(sink - lse) (dlse - delta)`` over sequences and rows, always in one order.
    """
    if r.sinks is None:
        return r.query.new_empty(0)
    given = (kept.get("lse_cotangent"), delta)
    added, taken = (0.0 if t is None else t.view(r.query.shape[:3]) for t in given)
    share = (r.sinks.float()[:, None] - kept["lse"].view(r.query.shape[:3])).exp()
    return (share * (added - taken)).sum((0, 2)).to(r.sinks.dtype)


def _stored(t: torch.Tensor, order: Order) -> torch.Tensor:
    """A tensor ``[B, H, S, D]`` with its dimensions in the order of memory."""
    return t if order is Order.HEADS else t.transpose(1, 2)


def _logical(t: torch.Tensor, like: torch.Tensor, order: Order) -> torch.Tensor:
    """A tensor in the order of memory as ``[B, H, S, D]``."""
    b, h, s, d = like.shape
    return t.view(b, h, s, d) if order is Order.HEADS else t.view(b, s, h, d).transpose(1, 2)


# ------------------------------------------------------------------------------------------ passes

_passes: Kept[tuple[object, ...], Passes] = Kept(KEPT_PLANS)
_kernels: Kept[Kind, tuple[Split, Runner, Runner] | None] = Kept(KEPT_KINDS)
_references: Kept[tuple[Kind, int], tuple[Split, Runner, Runner]] = Kept(KEPT_KINDS)


def _passes_of(r: Request) -> Passes:
    key = (
        *facts(r.query), *facts(r.key), *facts(r.value), *facts(r.key_lengths), *facts(r.mask),
        *facts(r.limits.starts), *facts(r.limits.ends), r.limits.window, r.mask_gradient, r.causal,
        r.scale, r.sinks is None, r.sums, TABLE.changes,
    )  # fmt: skip
    return _passes.made(key, lambda: _made(r))


def _made(r: Request) -> Passes:
    orders = [order_of(t) for t in (r.query, r.key, r.value)]
    for name, t, order in zip(_TENSORS, (r.query, r.key, r.value), orders, strict=True):
        if order is None:
            raise refusal(t, name)
    order, *sides = (o for o in orders if o is not None)
    extents = Extents(r.query.shape[0], r.query.shape[2], r.positions)
    key, value = (Stored(o, r.positions) for o in sides)
    kind = kind_of(r, order, key, value, r.key_lengths is not None)
    if kind.mask is not None and kind.mask.gradient and not kind.mask.batch:
        kind = replace(kind, batch=extents.batch, any_batch=False)  # what sums are over is a number
    kind = kind if fits_open(kind, extents) else kind.of(extents)
    made = _runners(kind, r.query.device) or _runners(kind.of(extents), r.query.device)
    assert made is not None  # kernels for just these extents, or an error
    return Passes(kind, extents, memory_of(kind, extents), *made)


def _runners(kind: Kind, device: torch.device) -> tuple[Split, Runner, Runner] | None:
    """The graphs of both passes and their runners; None if no kernels take all extents."""
    if device.type not in KERNEL_DEVICES:
        return _references.made((kind, TABLE.changes), lambda: _by_reference(kind))
    return _kernels.made_on(device, kind, "attention", lambda: compiled(_graphs(kind)))


def _by_reference(kind: Kind) -> tuple[Split, Runner, Runner]:
    both = _graphs(kind)
    return both, _reference(kind, both.forward), _reference(kind, both.backward)


def _graphs(kind: Kind) -> Split:
    """The graphs of both passes.

    With sinks the backward pass is that without them, from the logarithms of the sums that they
    have joined; it also returns delta, of which their gradient is made.
    """
    learned = kind.mask is not None and kind.mask.gradient
    wrt = (*_TENSORS, "mask") if learned else _TENSORS
    graph = graph_of(replace(kind, sinks=False))
    outputs = [graph.tensor(i) for i in graph.outputs]
    both = split(graph, wrt, save=outputs if kind.sums else ["out", "lse"])
    if not kind.sinks:
        return both
    g = both.backward
    g.mark_output(_products_of_rows(both), "float32")
    places = both.gradients | {"delta": len(g.outputs) - 1}
    return both._replace(forward=graph_of(replace(kind, sums=True)), gradients=places)


def _products_of_rows(both: Split) -> Tensor:
    """The sums of ``dO * O`` along the rows, which the backward pass computes."""
    g, (result, _) = both.backward, _kept_names(both)
    wanted = {result, *(name for name, place in both.cotangents.items() if place == 0)}
    names: list[set[str]] = []
    for i, n in enumerate(g.nodes):
        names.append({n.name} if i in g.inputs else set().union(*(names[j] for j in n.inputs)))
        if names[i] == wanted and n.facets.sums:
            return g.tensor(i)
    raise AssertionError("the derivative of a softmax has these sums")


def _kept_names(both: Split) -> list[str]:
    """The names of the result and of the logarithms of the sums of rows in the backward pass.

    They are the first outputs of the forward pass.
    """
    return sorted(both.saved, key=both.saved.__getitem__)


def compiled(both: Split) -> tuple[Split, Runner, Runner] | None:
    """Both passes with their kernels; None if extents are open, and no kernels take all."""
    found = kernels_of(both.forward, both.backward)
    if found is None:
        return None
    forward, backward = found
    return both, forward, backward


def _reference(kind: Kind, graph: KernelGraph) -> Runner:
    """The reference executor; data behind a length has no effect."""
    names = [graph.nodes[i].name for i in graph.inputs]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        values = dict(zip(names, inputs, strict=True))
        if kind.lengths:
            sides = cleared(kind, values["key"], values["value"], values["lengths"])
            values |= dict(zip(("key", "value"), sides, strict=True))
        return run_reference(graph, [values[n] for n in names])

    return run


# --------------------------------------------------------------------------------------- operators

_library = torch.library.Library("cutesuper", "FRAGMENT")
_OPTIONS = (
    "bool is_causal, float? scale, Tensor? key_starts=None, Tensor? key_ends=None, "
    "bool is_window=False, bool mask_gradient=False, Tensor? sinks=None, bool sums=False"
)
_SIDES = "Tensor query, Tensor key, Tensor value, Tensor? key_lengths, Tensor? attn_mask"
_library.define(
    f"attention_kept({_SIDES}, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor cotangent, Tensor? lse_cotangent, "
    f"{_SIDES}, Tensor result, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _request(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Maybe, mask: Maybe,
    causal: bool, scale: float | None, starts: Maybe = None, ends: Maybe = None,
    window: bool = False, mask_gradient: bool = False, sinks: Maybe = None, sums: bool = False,
) -> Request:  # fmt: skip
    own = Limits(starts, ends, window)
    request = Request(
        query, key, value, lengths, None, None, None, causal, scale, 0.0, mask, own, mask_gradient,
        sinks, sums,
    )  # fmt: skip
    check(request)
    return request


def _is_empty(r: Request) -> bool:
    return 0 in (r.query.numel(), r.value.numel(), r.positions)


def _sums(r: Request) -> torch.Tensor:
    """An empty tensor like the logarithms of the sums of rows."""
    b, h, n, _ = r.query.shape
    group = (h // r.key_heads,) if h > r.key_heads else ()
    heads = (r.key_heads, *group)
    return r.query.new_empty((b, *heads, n, 1), dtype=torch.float32)


def _keep(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    request = _request(*args)
    if _is_empty(request):
        none = sums_of_nothing(request).view_as(_sums(request))
        return torch.zeros_like(result_of(request)), none
    passes = _passes_of(request)
    y, lse = passes.keep(request)
    return _logical(y, result_of(request), passes.kind.query_order), lse


def _pull_back(cotangent: torch.Tensor, of_sums: Maybe, *args: Any) -> tuple[torch.Tensor, ...]:
    given, (result, lse), options = args[:5], args[5:7], args[7:]
    request = _request(*given, *options)
    kept = {"out": result, "lse": lse, "cotangent": cotangent.to(result.dtype)}
    if of_sums is not None:
        kept["lse_cotangent"] = of_sums.float()
    if _is_empty(request):
        none = _mask_gradient(request, None), _sink_gradient(request, kept, None)
        return (*(torch.zeros_like(t) for t in given[:3]), *none)
    return tuple(_passes_of(request).gradients(request, kept))


def _fake_keep(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    request = _request(*args)
    return result_of(request), _sums(request)


def _fake_pull_back(
    cotangent: torch.Tensor, of_sums: Maybe, *args: Any
) -> tuple[torch.Tensor, ...]:
    request = _request(*args[:5], *args[7:])
    sinks = args[0].new_empty(0) if request.sinks is None else torch.empty_like(request.sinks)
    return (*(torch.empty_like(t) for t in args[:3]), _mask_gradient(request, None), sinks)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    causal, scale, starts, ends, *ctx.flags, sinks, ctx.sums = inputs[5:]
    ctx.options = causal, scale
    if not ctx.sums:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output, starts, ends, sinks)


def _differentiate(ctx: Any, cotangent: Maybe, of_sums: Maybe) -> tuple[Maybe, ...]:
    if cotangent is None and of_sums is None:
        return (None,) * 13
    *tensors, starts, ends, sinks = ctx.saved_tensors
    result, lse = tensors[5:7]
    cotangent = torch.zeros_like(result) if cotangent is None else cotangent
    if ctx.sums:
        of_sums = torch.zeros_like(lse) if of_sums is None else of_sums
    *made, bias, of_sinks = torch.ops.cutesuper.attention_backward.default(
        cotangent, of_sums, *tensors, *ctx.options, starts, ends, *ctx.flags, sinks, ctx.sums
    )
    bias = bias if ctx.needs_input_grad[4] else None
    of_sinks = of_sinks if sinks is not None and sinks.requires_grad else None
    return (*made, None, bias, *(None,) * 6, of_sinks, None)


def _differentiate_twice(ctx: Any, *cotangents: Maybe) -> Any:
    del ctx, cotangents
    raise GraphError(
        "attention: its gradient cannot be differentiated again; leave out create_graph=True, or "
        "use torch.nn.functional.scaled_dot_product_attention"
    )


for _name, _run, _fake in (
    ("attention_kept", _keep, _fake_keep),
    ("attention_backward", _pull_back, _fake_pull_back),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"cutesuper::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "cutesuper::attention_kept", _differentiate, setup_context=_remember, lib=_library
)
torch.library.register_autograd(
    "cutesuper::attention_backward",
    _differentiate_twice,
    setup_context=lambda ctx, inputs, output: None,
    lib=_library,
)


def attention_kept(
    sides: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Maybe,
    mask: Maybe,
    causal: bool,
    scale: float | None,
    limits: Limits,
    sinks: Maybe = None,
    sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of attention, recorded by autograd, and the logarithms of the sums ``[B, H, L]``.

    The logarithms are recorded with ``sums``.
    """
    needed = mask is not None and mask.requires_grad
    own = limits.starts, limits.ends, limits.window, needed, sinks, sums
    kept = torch.ops.cutesuper.attention_kept.default
    y, lse = kept(*sides, lengths, mask, causal, scale, *own)
    return y, lse.view(sides[0].shape[:3])
