"""Attention whose scores a function changes, like ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from cutesuper.autodiff.gradient import Split
from cutesuper.errors import OperatorError, ShapeError
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.serial import dumps
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.torch.ops.attention.calls import KEPT_PLANS, Request, check
from cutesuper.torch.ops.attention.gradient import compiled
from cutesuper.torch.ops.attention.kind import KEPT_KINDS, Runner
from cutesuper.torch.ops.attention.score_functions import (
    Call,
    Program,
    ScoreMod,
    Traced,
    broadcasting,
    indices_of,
    opened,
    passes_of,
    program_of,
    traced,
)

# ------------------------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class Hidden:
    """The scores that a block mask hides.

    Attributes:
        causal: whether all keys behind a row's own place are hidden.
        mask: ``[1 or B, 1 or H, L, S]``, 1 where a key is seen and 0 elsewhere, in the type of the
            scores; None if nothing else is hidden.
        limits: by name, int32 ``[1 or B, 1 or H, L, 1]``: the first key that each row sees, and the
            end of its keys, where these say the same as a mask would.
    """

    causal: bool
    mask: torch.Tensor | None
    limits: dict[str, torch.Tensor] = field(default_factory=dict)


#: by block mask: it is what its function was when it was made
_hidden: WeakKeyDictionary[Any, dict[tuple[Any, ...], Hidden]] = WeakKeyDictionary()


def hidden_by(block_mask: Any, shape: tuple[int, int, int, int], like: torch.Tensor) -> Hidden:
    """The part of scores ``[B, H, L, S]`` that a block mask hides, on the device of ``like``.
    It is computed once, and compared with a causal mask, of which kernels load no tile that nobody
    sees.

    Raises:
        ShapeError: it is one of other lengths.
    """
    if block_mask is None:
        return Hidden(False, None)
    _check_lengths(block_mask, shape)
    known = _hidden.setdefault(block_mask, {})
    key = (shape, like.dtype, like.device)
    if key not in known:
        known[key] = _found_hidden(block_mask, shape, like)
    return known[key]


def _check_lengths(block_mask: Any, shape: tuple[int, int, int, int]) -> None:
    """Raise ShapeError for a block mask of other lengths than scores have."""
    if tuple(block_mask.seq_lengths) != shape[2:]:
        raise ShapeError(
            f"flex_attention: block_mask is one of {list(block_mask.seq_lengths)} queries and "
            f"keys, and the scores are {list(shape)}; make it for these"
        )


def _found_hidden(block_mask: Any, shape: tuple[int, ...], like: torch.Tensor) -> Hidden:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    mask = create_mask(block_mask.mask_mod, batch, heads, *shape[2:], device=str(like.device))
    before = torch.ones(shape[2:], dtype=torch.bool, device=like.device).tril()
    causal = not bool((mask & ~before).any())
    whole = bool((mask | ~before).all()) if causal else bool(mask.all())
    if whole:
        return Hidden(causal, None)
    # heads are the rows of a single query's gradients, and limits rise along queries only
    if (heads > 1 and shape[2] == 1) or (limits := _ranges(mask)) is None:
        return Hidden(causal, mask.to(like.dtype))
    if causal and bool((limits["ends"] == before.sum(-1, keepdim=True)).all()):
        del limits["ends"]
        return Hidden(True, None, limits)
    return Hidden(False, None, limits)


def _ranges(mask: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The limits of a mask of which every row sees a range of keys.
    None begins or ends before that of the row in front. None for any other mask."""
    keys = mask.shape[-1]
    count = mask.sum(-1, keepdim=True)
    starts = mask.int().argmax(-1, keepdim=True)
    ends = keys - mask.int().flip(-1).argmax(-1, keepdim=True)
    # of a row that sees nothing both are where the ranges in front end
    ends = torch.where(count > 0, ends, 0).cummax(-2).values
    starts = torch.where(count > 0, starts, ends)
    falls = any(bool((t.diff(dim=-2) < 0).any()) for t in (starts, ends))
    if falls or not bool((ends - starts == count).all()):
        return None
    return {"starts": starts.int(), "ends": ends.int()}


# ------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Passes:
    """The execution of both passes of one kind of call: they take inputs of the graphs."""

    program: Program
    split: Split
    forward: Runner
    backward: Runner


_traced: WeakKeyDictionary[Any, dict[Any, Traced]] = WeakKeyDictionary()
_passes: Kept[tuple[object, ...], Passes] = Kept(KEPT_PLANS)
_kernels: Kept[str, tuple[Split, Runner, Runner] | None] = Kept(KEPT_KINDS)


def _function(score_mod: ScoreMod, call: Call, device: torch.device) -> Traced:
    known = _traced.setdefault(score_mod, {})
    key = (call, device)
    if key not in known:
        known[key] = traced(score_mod, call, device)
    return known[key]


def _made(program: Program, call: Call, device: torch.device) -> Passes:
    """The passes of a program, by kernels for any numbers of rows and keys if there are any."""
    graph = opened(program, call)
    found = _runners(passes_of(program, graph), device) or _runners(
        passes_of(program, program.graph), device
    )
    assert found is not None  # kernels for just these extents, or an error
    return Passes(program, *found)


def _runners(both: Split, device: torch.device) -> tuple[Split, Runner, Runner] | None:
    """The programs of both passes; None if no kernels take all extents."""
    if device.type not in KERNEL_DEVICES:
        return both, _reference(both.forward), _reference(both.backward)
    key = dumps(both.forward) + dumps(both.backward)
    return _kernels.made_on(device, key, "flex_attention", lambda: compiled(both))


def _reference(graph: KernelGraph) -> Runner:
    return lambda inputs: run_reference(graph, inputs)


class _Attention(torch.autograd.Function):
    """Both passes; the first arguments are query, key and value in the shapes of the graph."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, names: Sequence[str], *tensors: torch.Tensor) -> Any:
        values = dict(zip(names, tensors, strict=True))
        both = passes.split
        made = passes.forward(_inputs(both.forward, values))
        out, lse = made[0], made[both.saved["lse"]]
        ctx.passes, ctx.names = passes, names
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor, _: Any) -> Any:  # pyright: ignore
        both = ctx.passes.split
        *tensors, out, lse = ctx.saved_tensors
        values = dict(zip(ctx.names, tensors, strict=True)) | {"out": out, "lse": lse}
        [name] = both.cotangents
        values[name] = cotangent.to(out.dtype).contiguous()
        made = ctx.passes.backward(_inputs(both.backward, values))
        places = (both.gradients.get(name) for name in ctx.names)
        return (None, None, *(None if n is None else made[int(n)] for n in places))


def _inputs(graph: KernelGraph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [values[graph.nodes[i].name] for i in graph.inputs]


@torch.compiler.disable
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """``softmax(score_mod(query key^T * scale, b, h, q, k)) value``, as `flex_attention`.
    Like ``torch.nn.attention.flex_attention.flex_attention``, with gradients of query, key, value
    and of tensors that the function reads.

    Args:
        query: ``[B, Hq, L, D]``, of float16 or bfloat16; of float32 on the CPU only.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, the changed score. It is called with
            all scores ``[B, Hq, L, S]`` and indices that broadcast to them, and traced at the first
            call with these extents: numbers that it reads are those of that call. Kernels are for
            any L and S of a class, unless tensors of which some repeat over rows or keys have
            gradients. Tensors that it reads are read at every call; for the gradients of those that
            require one, the gradients of all scores are stored and added up.
        block_mask: of ``create_block_mask``; keys that its ``mask_mod`` hides do not count, and
            rows that see none are zero. It is read once. Where every row sees a range of keys that
            does not begin or end before that of the row in front, as of causal masks, windows,
            prefixes and documents, tiles of keys outside are not loaded.
        scale: of the products; None is ``1 / sqrt(D)``.
        enable_gqa: allow Hq to be a multiple of Hkv.
        return_lse: also return the logarithm of the sum of each row, float32 ``[B, Hq, L]``,
            without a gradient.

    Returns:
        ``[B, Hq, L, Dv]``, and with ``return_lse`` a pair.

    Raises:
        OperatorError: a function that cannot be traced, or that no kernel computes.
        ShapeError, DTypeError, DeviceError: an argument that does not fit.
        SearchError, LoweringError, ScheduleError, CompileError: no kernels for these arguments.
    """
    request = Request(query, key, value, None, None, None, None, False, scale, 0.0)
    check(request)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(f"{request.call}: pass enable_gqa=True if groups of heads share keys")
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if torch.compiler.is_compiling():
        return _written(request, score_mod, block_mask, return_lse)
    hidden = hidden_by(block_mask, shape, query)
    call = _call(request, hidden)
    function = None if score_mod is None else _function(score_mod, call, query.device)
    given = {} if function is None else function.values(indices_of(call, query.device))
    learned = frozenset(name for name, t in given.items() if t.requires_grad)
    kind = (call, score_mod, learned, query.device, TABLE.changes)
    passes = _passes.made(
        kind, lambda: _made(program_of(call, function, learned), call, query.device)
    )
    out, lse = _Attention.apply(passes, *_tensors(request, call, passes, given, hidden))
    out = out.view(*query.shape[:3], value.shape[3])
    return (out, lse.view(query.shape[:3])) if return_lse else out


def _written(r: Request, score_mod: ScoreMod | None, block_mask: Any, return_lse: bool) -> Any:
    """The same in operators of PyTorch, which a tracer sees; it makes kernels of all that it finds.
    Masks are functions of positions here, and tensors that they read are read at every call."""
    (batch, many, rows, width), device = r.query.shape, r.query.device
    shape = (batch, many, rows, r.positions)
    seen = None
    if block_mask is not None:
        _check_lengths(block_mask, shape)
        own = (*block_mask.shape[:2], *shape[2:])
        seen = block_mask.mask_mod(*broadcasting(own, device))
    scale = width**-0.5 if r.scale is None else float(r.scale)
    if score_mod is None and not return_lse:
        return F.scaled_dot_product_attention(
            r.query, r.key, r.value, seen, scale=scale, enable_gqa=many != r.key_heads
        )
    key, value = (_repeated(t, many // r.key_heads) for t in (r.key, r.value))
    scores = (r.query @ key.mT).float() * scale
    if score_mod is not None:
        scores = score_mod(scores, *broadcasting(shape, device))
    if tuple(scores.shape) != shape:
        raise OperatorError(
            f"flex_attention: score_mod makes {list(scores.shape)} of scores {list(shape)}; it "
            "must be a function of one score at a time"
        )
    softmax = torch.softmax
    if seen is not None:
        # only of masks that are added, and of scores that nothing else reads, positions are known
        if return_lse:
            scores = torch.where(seen, scores, -torch.inf)
        else:
            scores = scores + torch.where(seen, 0.0, -torch.inf)
        softmax = torch.ops.aten._safe_softmax  # of a row that sees nothing all weights are 0
    out = softmax(scores, -1).to(value.dtype) @ value
    return (out, scores.logsumexp(-1).float().detach()) if return_lse else out


def _repeated(t: torch.Tensor, group: int) -> torch.Tensor:
    """Keys or values for each query head."""
    b, heads, keys, width = t.shape
    return t[:, :, None].expand(b, heads, group, keys, width).reshape(b, -1, keys, width)


def _call(r: Request, hidden: Hidden) -> Call:
    b, many, rows, width = r.query.shape
    heads, group = r.key_heads, many // r.key_heads
    masked: tuple[int, ...] = ()
    tensors = [*hidden.limits.values(), hidden.mask]
    if (one := next((t for t in tensors if t is not None), None)) is not None:
        own = (1, 1) if one.shape[1] == 1 else (heads, group)
        masked = (one.shape[0], *own, *one.shape[2:])
    scale = width**-0.5 if r.scale is None else float(r.scale)
    return Call(b, heads, group, rows, r.positions, width, r.value.shape[3], r.query.dtype, scale,
                hidden.causal, masked, tuple(hidden.limits))  # fmt: skip


def _tensors(
    r: Request, call: Call, passes: Passes, given: dict[str, torch.Tensor], hidden: Hidden
) -> tuple[Any, ...]:
    """The names of the inputs, then the inputs, in the shapes of the graph.
    ``given`` are those that PyTorch computed, by their own names."""
    c = call
    found = {
        "query": r.query.reshape(c.batch, c.heads, c.group, c.rows, c.width),
        "key": r.key.reshape(c.batch, c.heads, 1, c.keys, c.width),
        "value": r.value.reshape(c.batch, c.heads, 1, c.keys, c.value_width),
    }
    for name, source, shape, dtype in passes.program.beside:
        found[name] = given[source].to(dtype).reshape(shape)
    if hidden.mask is not None:
        found["mask"] = hidden.mask.view(c.masked)
    found |= {name: t.view(c.masked) for name, t in hidden.limits.items()}
    return tuple(found), *(t.contiguous() for t in found.values())
