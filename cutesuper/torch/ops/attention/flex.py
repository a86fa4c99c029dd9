"""Attention whose scores a function changes, like ``torch.nn.attention.flex_attention``.

``score_mod`` is traced once, on scores ``[B, H, L, S]`` and on indices that broadcast to them. What
depends on a score becomes part of the kernel graph. What depends on indices only is computed by
PyTorch, and read beside the scores: as small tensors where the kernel can put them together.

before: ``score + slopes[h] * (k - q)``; after: ``scores + a * b`` with ``a[1, H, 1, 1]`` and
``b[1, 1, L, S]``, a forward and two backward kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from cutesuper.autodiff.gradient import Split, split
from cutesuper.errors import CutesuperError, OperatorError, ShapeError
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.relations import reachable
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.torch.compile.factored_dims import Mismatch, dims_of, leaves
from cutesuper.torch.compile.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Given,
    Shapes,
    Slots,
    Unsupported,
    Value,
    correspondence,
    translated,
)
from cutesuper.torch.compile.table import arguments_of, entry_of
from cutesuper.torch.ops.attention.calls import KEPT_PLANS, Request, check, facts
from cutesuper.torch.ops.attention.kind import KEPT_KINDS, Runner

_SIDES = ("query", "key", "value")
ScoreMod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """What of a call determines its kernel graph, beside the function.

    Attributes:
        batch, heads, group, rows, keys: extents; query heads for each of the heads of keys.
        width, value_width: of a head.
        dtype: of query, key and value.
        scale: of the products.
        causal: whether all keys behind a row's own place are hidden.
        masked: whether a tensor says what is hidden, and along which dimensions it differs.
    """

    batch: int
    heads: int
    group: int
    rows: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    scale: float
    causal: bool
    masked: tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """A function of scores and indices.

    Attributes:
        graph: its operators; the first five inputs are the scores and the indices.
        made: the nodes that PyTorch computes, read by those that depend on scores.
        scores: the nodes that the kernel graph has, in order, without the scores themselves.
    """

    graph: fx.GraphModule
    made: tuple[fx.Node, ...]
    scores: tuple[fx.Node, ...]

    def values(self, indices: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What PyTorch computes, by name of the node."""
        inputs, found = iter((torch.empty(0), *indices)), dict[fx.Node, Any]()
        needed = reachable(self.made, lambda n: n.all_input_nodes)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                found[node] = next(inputs)
            elif node in needed and node.op == "get_attr":
                found[node] = getattr(self.graph, str(node.target))
            elif node in needed:
                args, options = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **options)  # type: ignore[operator]
        return {n.name: found[n] for n in self.made}


def traced(score_mod: ScoreMod, call: Call, device: torch.device) -> Traced:
    """Trace a function of scores and indices.

    Raises:
        OperatorError: it cannot be traced, or is no function of one score at a time.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shape = (call.batch, call.heads * call.group, call.rows, call.keys)
    scores = torch.zeros((1, 1, 1, 1), device=device).expand(shape)
    try:
        module = make_fx(score_mod)(scores, *indices_of(call, device))
    except Exception as error:
        raise OperatorError(
            f"flex_attention: score_mod cannot be traced ({type(error).__name__}: {error}); it is "
            "called with scores [B, H, L, S] and indices that broadcast to them"
        ) from error
    module.graph.eliminate_dead_code()
    first = next(iter(module.graph.nodes))
    depends = reachable([first], lambda n: n.users)
    nodes = [n for n in module.graph.nodes if n in depends and n.op == "call_function"]
    low = _lowered(nodes, depends)
    order = [n for n in module.graph.nodes if n in low or n in nodes]
    made = {i: None for n in order for i in n.all_input_nodes if i not in {*order, first}}
    return Traced(module, tuple(made), tuple(order))


def _lowered(nodes: Sequence[fx.Node], depends: set[fx.Node]) -> set[fx.Node]:
    """The nodes without a score that are larger than what they are made of, and that kernels can
    compute: they are put together where they are used."""
    found, todo = set[fx.Node](), [i for n in nodes for i in n.all_input_nodes if i not in depends]
    while todo:
        node = todo.pop()
        inputs = node.all_input_nodes
        sizes = [i.meta["val"].numel() for i in inputs if isinstance(i.meta.get("val"), _TENSOR)]
        known = node.op == "call_function" and entry_of(node) is not None and sizes
        if known and node.meta["val"].dtype in FLOATS and node.meta["val"].numel() > sum(sizes):
            found.add(node)
            todo += inputs
    return found


_TENSOR = torch.Tensor


def indices_of(call: Call, device: torch.device) -> list[torch.Tensor]:
    """The indices of sequences, query heads, rows and keys, which broadcast to the scores."""
    extents = (call.batch, call.heads * call.group, call.rows, call.keys)
    return [
        torch.arange(n, device=device).view([-1 if d == at else 1 for d in range(4)])
        for at, n in enumerate(extents)
    ]


# ------------------------------------------------------------------------------- the kernel graph


@dataclass(frozen=True)
class Program:
    """The kernel graph of a call.

    Attributes:
        split: both passes.
        beside: the inputs besides query, key, value: name of the input, of the tensor, its shape
            and element type.
    """

    split: Split
    beside: tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]


def program_of(call: Call, function: Traced | None) -> Program:
    """The kernel graph of attention with a function of its scores.

    Raises:
        OperatorError: the function has an operator that no kernel graph has.
    """
    return _Building(call, function).program()


class _Building:
    def __init__(self, call: Call, function: Traced | None) -> None:
        self.call, self.function = call, function
        self.s = Shapes()
        n = (call.batch, call.heads, call.group, call.rows, call.keys)
        b, h, g, rows, keys = map(dims_of, n)
        self.value = Value((b, (*h, *g), rows, keys))
        for one in (b, h, g, rows, keys):
            self.s.whole(one)
        self.parts = b, h, g, rows, keys

    @property
    def slots(self) -> Slots:
        """Those of the scores, when all dimensions are known."""
        return tuple(tuple(leaves(d)) or None for d in self.parts)

    def program(self) -> Program:
        nodes = self._shaped()
        b = Builder(self.s, frozenset())
        g = b.g
        query, key, value = self._sides(b)
        scores = g.mul(g.matmul(query, g.transpose(key)), self.call.scale)
        if self.function is not None:
            scores = self._modified(b, nodes, scores)
        if self.call.masked:
            mask = g.new_input(self.call.masked, self.call.dtype, "mask")
            scores = g.hide(mask, scores)
        if self.call.causal:
            scores = g.causal_mask(scores)
        weights = g.softmax(g.convert(scores, self.call.dtype))
        g.mark_output(g.matmul(weights, value))
        beside = []
        for given, i in zip(b.operands[3:], g.inputs[3:], strict=False):
            shape = tuple(int(d) for d in g.nodes[i].shape)
            beside.append((g.nodes[i].name, given.node.name, shape, given.dtype))
        return Program(split(g, _SIDES, save=["out", "lse"]), tuple(beside))

    def _sides(self, b: Builder) -> list[Tensor]:
        c = self.call
        shapes = {
            "query": (c.batch, c.heads, c.group, c.rows, c.width),
            "key": (c.batch, c.heads, 1, c.keys, c.width),
            "value": (c.batch, c.heads, 1, c.keys, c.value_width),
        }
        graph, found = fx.Graph(), []
        for name, shape in shapes.items():
            found.append(b.g.new_input(shape, c.dtype, name))
            b.operands.append(Given(graph.placeholder(name), (), c.dtype))
        return found

    def _shaped(self) -> list[fx.Node]:
        if self.function is None:
            return []
        first = next(iter(self.function.graph.graph.nodes))
        self.s.set(first, self.value)
        for node in self.function.made:
            self.s.input(node)
        for node in self.function.scores:
            self.s.set(node, self._entry(node).shape(self.s, node, arguments_of(node)))
        return list(self.function.scores)

    def _modified(self, b: Builder, nodes: Sequence[fx.Node], scores: Tensor) -> Tensor:
        assert self.function is not None
        graph = self.function.graph.graph
        first, end = next(iter(graph.nodes)), next(n for n in graph.nodes if n.op == "output")
        b.set(first, Built(scores, self.slots))
        for node in nodes:
            b.set(node, self._entry(node).build(b, node, arguments_of(node)))
        parts = correspondence(self.value, b.value(end.args[0]))
        return b.tensor(first, end.args[0], translated(self.slots, parts), len(self.slots))

    def _entry(self, node: fx.Node) -> Any:
        entry = entry_of(node)
        if entry is None:
            raise Unsupported(node, f"{node.target} is not an operator of kernel graphs")
        return entry


def _program(call: Call, function: Traced | None) -> Program:
    try:
        return program_of(call, function)
    except (Unsupported, Mismatch, CutesuperError) as error:
        if isinstance(error, CutesuperError):
            raise
        raise OperatorError(f"flex_attention: score_mod: {error}") from error


# ------------------------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class Hidden:
    """What a block mask hides.

    Attributes:
        causal: whether all keys behind a row's own place are hidden.
        mask: ``[1 or B, 1 or H, L, S]`` of bool, True where a key is seen; None if nothing else is
            hidden.
    """

    causal: bool
    mask: torch.Tensor | None


#: by block mask: it is what its function was when it was made
_hidden: WeakKeyDictionary[Any, dict[tuple[Any, ...], Hidden]] = WeakKeyDictionary()


def hidden_by(block_mask: Any, shape: tuple[int, int, int, int], device: torch.device) -> Hidden:
    """What a block mask hides of scores ``[B, H, L, S]``. It is computed once, and compared with a
    causal mask, of which kernels load no tile that nobody sees.

    Raises:
        ShapeError: it is one of other lengths.
    """
    if block_mask is None:
        return Hidden(False, None)
    if tuple(block_mask.seq_lengths) != shape[2:]:
        raise ShapeError(
            f"flex_attention: block_mask is one of {list(block_mask.seq_lengths)} queries and "
            f"keys, and the scores are {list(shape)}; make it for these"
        )
    known = _hidden.setdefault(block_mask, {})
    key = (shape, device)
    if key not in known:
        known[key] = _found_hidden(block_mask, shape, device)
    return known[key]


def _found_hidden(block_mask: Any, shape: tuple[int, ...], device: torch.device) -> Hidden:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    mask = create_mask(block_mask.mask_mod, batch, heads, *shape[2:], device=str(device))
    before = torch.ones(shape[2:], dtype=torch.bool, device=device).tril()
    causal = not bool((mask & ~before).any())
    whole = bool((mask | ~before).all()) if causal else bool(mask.all())
    return Hidden(causal, None if whole else mask)


# ------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Passes:
    """The execution of both passes of one kind of call: they take inputs of the graphs."""

    program: Program
    forward: Runner
    backward: Runner


_traced: WeakKeyDictionary[Any, dict[Any, Traced]] = WeakKeyDictionary()
_passes: Kept[tuple[object, ...], Passes] = Kept(KEPT_PLANS)
_kernels: Kept[str, tuple[Runner, Runner]] = Kept(KEPT_KINDS)


def _function(score_mod: ScoreMod, call: Call, device: torch.device) -> Traced:
    known = _traced.setdefault(score_mod, {})
    key = (call, device)
    if key not in known:
        known[key] = traced(score_mod, call, device)
    return known[key]


def _made(program: Program, device: torch.device) -> Passes:
    from cutesuper.ir.serial import dumps

    both = program.split
    if device.type in KERNEL_DEVICES:
        key = dumps(both.forward) + dumps(both.backward)
        runners = _kernels.made_on(device, key, "flex_attention", lambda: _compiled(both))
    else:
        runners = _reference(both.forward), _reference(both.backward)
    return Passes(program, *runners)


def _compiled(both: Split) -> tuple[Runner, Runner]:
    from cutesuper.pipeline import best_kernel

    return best_kernel(both.forward), best_kernel(both.backward)


def _reference(graph: KernelGraph) -> Runner:
    return lambda inputs: run_reference(graph, inputs)


class _Attention(torch.autograd.Function):
    """Both passes; the first arguments are query, key and value in the shapes of the graph."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, names: Sequence[str], *tensors: torch.Tensor) -> Any:
        values = dict(zip(names, tensors, strict=True))
        both = passes.program.split
        made = passes.forward(_inputs(both.forward, values))
        out, lse = made[0], made[both.saved["lse"]]
        ctx.passes, ctx.names = passes, names
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, _: Any) -> Any:
        both = ctx.passes.program.split
        *tensors, out, lse = ctx.saved_tensors
        values = dict(zip(ctx.names, tensors, strict=True)) | {"out": out, "lse": lse}
        [name] = both.cotangents
        values[name] = cotangent.to(out.dtype).contiguous()
        made = ctx.passes.backward(_inputs(both.backward, values))
        found = [made[int(both.gradients[n])] for n in _SIDES]
        return (None, None, *found, *(None,) * (len(tensors) - 3))


def _inputs(graph: KernelGraph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [values[graph.nodes[i].name] for i in graph.inputs]


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
    """``softmax(score_mod(query key^T * scale, b, h, q, k)) value``, like
    ``torch.nn.attention.flex_attention.flex_attention``, with gradients of query, key and value.

    Args:
        query: ``[B, Hq, L, D]``, of float16 or bfloat16; of float32 on the CPU only.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, the changed score. It is called with
            all scores ``[B, Hq, L, S]`` and indices that broadcast to them, and traced at the first
            call with these extents: numbers that it reads are those of that call. Tensors that it
            reads are read at every call, and get no gradient.
        block_mask: of ``create_block_mask``; keys that its ``mask_mod`` hides do not count, and
            rows that see none are zero. It is read once. Tiles of keys are skipped where all keys
            behind a row's place are hidden.
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
    hidden = hidden_by(block_mask, shape, query.device)
    call = _call(request, hidden)
    function = None if score_mod is None else _function(score_mod, call, query.device)
    kind = (call, score_mod, *facts(query)[2:])
    passes = _passes.made(kind, lambda: _made(_program(call, function), query.device))
    out, lse = _Attention.apply(passes, *_tensors(request, call, passes, function, hidden))
    out = out.view(*query.shape[:3], value.shape[3])
    return (out, lse.view(query.shape[:3])) if return_lse else out


def _call(r: Request, hidden: Hidden) -> Call:
    b, many, rows, width = r.query.shape
    heads, group = r.key_heads, many // r.key_heads
    masked: tuple[int, ...] = ()
    if hidden.mask is not None:
        own = (1, 1) if hidden.mask.shape[1] == 1 else (heads, group)
        masked = (hidden.mask.shape[0], *own, rows, r.positions)
    scale = width**-0.5 if r.scale is None else float(r.scale)
    return Call(b, heads, group, rows, r.positions, width, r.value.shape[3], r.query.dtype, scale,
                hidden.causal, masked)  # fmt: skip


def _tensors(
    r: Request, call: Call, passes: Passes, function: Traced | None, hidden: Hidden
) -> tuple[Any, ...]:
    """The names of the inputs, then the inputs, in the shapes of the graph."""
    c = call
    found = {
        "query": r.query.reshape(c.batch, c.heads, c.group, c.rows, c.width),
        "key": r.key.reshape(c.batch, c.heads, 1, c.keys, c.width),
        "value": r.value.reshape(c.batch, c.heads, 1, c.keys, c.value_width),
    }
    if function is not None:
        made = function.values(indices_of(call, r.query.device))
        for name, source, shape, dtype in passes.program.beside:
            found[name] = made[source].to(dtype).reshape(shape)
    if hidden.mask is not None:
        found["mask"] = hidden.mask.to(c.dtype).view(c.masked)
    return tuple(found), *(t.contiguous() for t in found.values())
