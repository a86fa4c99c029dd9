"""Attention as PyTorch calls it, and its backward pass.

Where gradients are needed, PyTorch's operators give the logarithm of the sum of each row besides
the result, and their backward passes compute the scores again from it. Ours are those of `split`,
with the same values between them: each pass may get kernels whether or not the other does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import fx

from cutesuper.autodiff.gradient import Split, split
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT
from cutesuper.torch.aten.factored_dims import (
    Dims,
    Part,
    divides,
    equal_shapes,
    extent_of,
    leaves,
    regroup,
    unify,
)
from cutesuper.torch.aten.graph_builder import (
    Builder,
    Built,
    Shapes,
    Slot,
    Slots,
    Unsupported,
    Value,
    correspondence,
    fake,
    translated,
)
from cutesuper.torch.aten.length_masks import lengths_of
from cutesuper.torch.aten.masked import Hiding, hiding, join_lengths
from cutesuper.torch.aten.products import multiplied
from cutesuper.torch.aten.table import Arguments, Entry, arguments_of, enter, entry_of, number
from cutesuper.torch.internals import apart

#: the operators that PyTorch chooses where it keeps attention whole
_CHOSEN = tuple(
    f"aten._scaled_dot_product_{kind}"
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
    )
)  # fmt: skip
#: results of these operators; kernels compute the first two
_RESULTS = 9
_SIDES = ("query", "key", "value")


@dataclass(frozen=True)
class _Places:
    """The slots of the operands of attention.

    Attributes:
        front: batch and heads of the query.
        rows, keys: positions of query and keys.
        query, key, value: of the operands, with those along which their elements repeat.
        width: of a head of values.
    """

    front: Slots
    rows: Slot
    keys: Slot
    query: Slots
    key: Slots
    value: Slots
    width: Slot


def _ranked(*values: Value) -> list[Value]:
    """Tensors of one rank, with a dimension for heads.
    Those that are missing in front have an extent of 1, as in products of PyTorch."""
    rank = max(3, *(len(t.dims) for t in values))
    return [Value((*((),) * (rank - len(t.dims)), *t.dims), t.absent) for t in values]


def _places(b: Builder, node: fx.Node, a: Arguments) -> _Places:
    q, k, v = _ranked(*(b.value(a[n]) for n in _SIDES))
    # integers are those of sequences, and one sequence has no slot; not the query's dimension,
    # which may be computed without it
    alone = (None,) if _counted(node) and not leaves(q.dims[0]) else ()
    front = (*alone, *b.groups(tuple(p for d in q.dims[:-2] for p in d)))
    rows, keys, width = b.one(node, q.dims[-2]), b.one(node, k.dims[-2]), b.one(node, v.dims[-1])
    lead = [correspondence(Value(q.dims[:-3]), Value(t.dims[:-3])) for t in (k, v)]
    for parts, t in zip(lead, (k, v), strict=True):
        # neighbouring heads of the query share one of the keys
        parts.update(zip(leaves(q.dims[-3]), leaves(t.dims[-3]), strict=False))
    return _Places(
        front, rows, keys,
        (*front, rows, b.one(node, q.dims[-1])),
        (*translated(front, lead[0]), keys, b.one(node, k.dims[-1])),
        (*translated(front, lead[1]), b.one(node, v.dims[-2]), width),
        width,
    )  # fmt: skip


class _Attention(Entry):
    """The operands of attention; query heads may share keys."""

    open_rows: ClassVar[bool] = True

    def sides(self, s: Shapes, node: fx.Node, a: Arguments) -> tuple[Value, Value, Value]:
        """Query, key and value, whose dimensions are unified. Raises Unsupported."""
        if a.get("dropout_p", 0.0) != 0.0:
            raise Unsupported(node, "drops weights")
        q, k, v = _ranked(*(s.of(a[n]) for n in _SIDES))
        heads = self._share(node, q.dims[-3], k.dims[-3])
        unify(k.dims[-3], v.dims[-3])
        for d, t in product(range(-len(q.dims), -3), (k, v)):
            if leaves(t.dims[d]):
                unify(q.dims[d], t.dims[d])
        unify(q.dims[-1], k.dims[-1])
        unify(k.dims[-2], v.dims[-2])
        for one in (*heads, q.dims[-1], q.dims[-2], k.dims[-2], v.dims[-1]):
            s.whole(one)
        if q.absent or any(p in leaves(v.absent) for p in leaves(v.dims[-1])):
            raise Unsupported(node, "takes queries, or columns of values, that repeat")
        self._meet(s, node, a, q, k)
        return q, k, v

    def _meet(self, s: Shapes, node: fx.Node, a: Arguments, q: Value, k: Value) -> None:
        """Unify what hides keys with the scores. Raises Unsupported."""
        limits = lengths_of(node)
        if limits is None:
            return
        if _causal(a):
            raise Unsupported(node, "is causal and has a mask; make the mask causal")
        for given in limits.nodes:
            join_lengths(s, given, q.dims[0])
        for beside in limits.beside:
            s.broadcast(node, [_scores_of(q, k), s.of(beside)])

    def _share(self, node: fx.Node, query: Dims, key: Dims) -> tuple[Dims, Dims]:
        """Heads of keys, and heads of the query for each of them."""
        own, shared = extent_of(query), extent_of(key)
        if not divides(shared, own):
            raise Unsupported(node, f"has {own} query heads for {shared} heads of keys")
        lead, group = regroup([query], [shared, own // shared])
        unify(lead, key)
        return lead, group

    def attended(
        self, node: fx.Node, a: Arguments, sides: Sequence[Tensor], hides: Hiding | None
    ) -> Tensor:
        """Attention in the graph of its operands."""
        query, key, value = sides
        g, scale = query.graph, _scale(node, a)
        turned = scale is not None and scale <= 0  # attention of the graph takes others
        if turned or (hides is not None and not hides.are_lengths):
            scale = extent(query.shape[-1]) ** -0.5 if scale is None else scale
            scores = g.mul(g.matmul(query, g.transpose(key)), scale)
            scores = scores if hides is None else hides(scores)
            scores = g.causal_mask(scores) if _causal(a) else scores
            return g.matmul(g.softmax(scores), value)
        causal, lengths = _causal(a), None
        if hides is not None:
            causal, lengths = hides.limits.causal, hides.ends
        return g.scaled_dot_product_attention(query, key, value, causal, scale, lengths)

    def passes(
        self, b: Builder, node: fx.Node, a: Arguments, at: _Places
    ) -> tuple[Split, dict[str, Tensor]]:
        """Both passes, and the values of their inputs by name but for those between them.

        Every query head has keys of its own if they are given for each. Keys that repeat have
        gradients that do not, which the program sums behind them.
        """
        g, values = KernelGraph(), self.operands(b, node, a, at)
        hides = self.hiding(b, node, a, at)
        sides = [
            g.new_input(tuple(map(b.extent, slots)), fake(a[name]).dtype, name)
            for name, slots in zip(_SIDES, (at.query, at.key, at.value), strict=True)
        ]
        inside, integers = (None, {}) if hides is None else hides.as_inputs(g)
        g.mark_output(self.attended(node, a, sides, inside))
        # with real tensors, as values of hidden rows are computed
        both = apart(partial(split, g, _SIDES, save=["out", "lse"]))
        return both, values | integers

    def hiding(self, b: Builder, node: fx.Node, a: Arguments, at: _Places) -> Hiding | None:
        """The tensors that hide keys, in the kernel graph; None if nothing does."""
        limits = lengths_of(node)
        if limits is None:
            return None
        q, k = _ranked(b.value(a["query"]), b.value(a["key"]))
        scores = _scores_of(q, k)
        whole = (*at.front, at.rows, b.one(node, scores.dims[-1]))
        slots = [translated(whole, correspondence(scores, b.value(n))) for n in limits.beside]
        pairs = zip(limits.beside, slots, strict=True)
        beside = [b.tensor(node, n, own, rank=len(own)) for n, own in pairs]
        return hiding(b, node, limits, q.dims[0], beside)

    def operands(self, b: Builder, node: fx.Node, a: Arguments, at: _Places) -> dict[str, Tensor]:
        """Query, key and value in the kernel graph."""
        return {
            name: multiplied(b, node, a[name], slots, len(slots))
            for name, slots in zip(_SIDES, (at.query, at.key, at.value), strict=True)
        }


@enter("aten.scaled_dot_product_attention.default", *(f"{name}.default" for name in _CHOSEN))
class Attention(_Attention):
    """``softmax(q k^T * scale) v``, and the logarithm of the sum of each row."""

    products: ClassVar[int] = 2

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        q, _, v = self.sides(s, node, a)
        y = Value((*q.dims[-len(s.of(a["query"]).dims) : -1], v.dims[-1]))
        if not isinstance(node.meta["val"], tuple | list):
            return y
        return (y, _sums_of(node, node.meta["val"][1], q), *(None,) * (_RESULTS - 2))

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        at = _places(b, node, a)
        if _keeps_sums(node) and isinstance(b.shapes.values[node][1], Value):
            both, values = self.passes(b, node, a, at)
            y, lse = _inlined(b, both.forward, values)
            sums = Built(lse, _last((None, *at.front, at.rows, None), lse))
        else:
            y, sums = self._alone(b, node, a, at), None
        built = Built(y, _last((None, *at.front, at.rows, at.width), y))
        several = isinstance(b.shapes.values[node], tuple)
        return (built, sums, *(None,) * (_RESULTS - 2)) if several else built

    def _alone(self, b: Builder, node: fx.Node, a: Arguments, at: _Places) -> Tensor:
        """The result without its logarithms."""
        query = multiplied(b, node, a["query"], at.query)
        rank = len(at.key) if at.front[:1] == (None,) else 2
        key = multiplied(b, node, a["key"], at.key, rank)
        value = multiplied(b, node, a["value"], at.value)
        return self.attended(node, a, (query, key, value), self.hiding(b, node, a, at))


def _counted(node: fx.Node) -> bool:
    """True if integers limit the keys of sequences."""
    limits = lengths_of(node)
    return limits is not None and limits.counted


def _keeps_sums(node: fx.Node) -> bool:
    """True if the logarithms of the sums of rows are used."""
    return any(u.target is getitem and u.args[1] == 1 and u.users for u in node.users)


def _scores_of(q: Value, k: Value) -> Value:
    """The dimensions of scores.
    Their keys are a dimension of their own: queries may be the keys as well."""
    keys = tuple(Part(object(), p.factor) for p in leaves(k.dims[-2]))
    return Value((*q.dims[:-1], keys))


def _sums_of(node: fx.Node, sums: Any, q: Value) -> Value | None:
    """The dimensions of the logarithms: those of the rows, maybe with an extent of 1 behind.
    None for others: one of PyTorch's operators pads them to a multiple of 32."""
    rows = fake(arguments_of(node)["query"]).shape[:-1]
    for dims, shape in ((q.dims[:-1], rows), ((*q.dims[:-1], ()), (*rows, 1))):
        if equal_shapes(sums.shape, shape):
            return Value(dims)
    return None


@enter(*(f"{name}_backward.default" for name in _CHOSEN))
class AttentionBackward(_Attention):
    """The gradients of query, key and value.
    From the result, the logarithms of the sums of rows and the cotangent of the result."""

    products: ClassVar[int] = 5
    unread: ClassVar[tuple[str, ...]] = (
        "philox_seed", "philox_offset", "cum_seq_q", "cum_seq_k",
    )  # fmt: skip

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        if any(u.target is getitem and u.args[1] == 3 and u.users for u in node.users):
            raise Unsupported(node, "has a mask with a gradient")
        q, k, v = self.sides(s, node, a)
        rows, sums = Value(q.dims[:-1]), s.of(a["logsumexp"])
        if _sums_of(node, fake(a["logsumexp"]), q) is None:
            raise Unsupported(node, "takes logarithms of sums that are padded")
        for t in (s.of(a["out"]), s.of(cotangent_of(a))):
            unify(t.dims[-1], v.dims[-1])
            s.broadcast(node, [rows, Value(t.dims[:-1])])
        s.broadcast(node, [rows, Value(sums.dims[: len(rows.dims)])])
        return (*(Value(t.dims) for t in (q, k, v)), None)

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        at = _places(b, node, a)
        both, values = self.passes(b, node, a, at)
        [cotangent] = both.cotangents
        for name, operand in (("out", a["out"]), (cotangent, cotangent_of(a))):
            width = b.one(node, b.value(operand).dims[-1])
            slots = (*self._rows(b, a, operand, at), width)
            values[name] = multiplied(b, node, operand, slots, len(slots))
        slots = (*self._rows(b, a, a["logsumexp"], at), None)
        values["lse"] = b.tensor(node, a["logsumexp"], slots, len(slots))
        made = _inlined(b, both.backward, values)
        places = zip(_SIDES, (at.query, at.key, at.value), strict=True)
        return (*(Built(made[int(both.gradients[n])], slots) for n, slots in places), None)

    def _rows(self, b: Builder, a: Arguments, operand: Any, at: _Places) -> Slots:
        """The slots of the rows of an operand that has those of the query."""
        rank = len(b.value(a["query"]).dims) - 1
        rows, own = (Value(b.value(n).dims[:rank]) for n in (a["query"], operand))
        return translated((*at.front, at.rows), correspondence(rows, own))


def cotangent_of(a: Arguments) -> Any:
    """The cotangent among the arguments of a backward pass."""
    return a.get("grad_out", a.get("grad_out_"))


def _inlined(b: Builder, graph: KernelGraph, values: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs of a graph as part of the one under construction, from its inputs by name."""
    made: list[Tensor] = []
    for n in graph.nodes:
        args = (made[i] for i in n.inputs)
        given = n.operator == INPUT
        made.append(values[n.name] if given else b.g.apply(n.operator, *args, **dict(n.attributes)))
    return [made[i] for i in graph.outputs]


def _causal(a: Arguments) -> bool:
    return bool(a.get("is_causal", False))


def _scale(node: fx.Node, a: Arguments) -> float | None:
    scale = a.get("scale")
    return None if scale is None else number(node, scale)


def _last(slots: Slots, t: Tensor) -> Slots:
    """As many slots as a tensor has dimensions."""
    return slots[-len(t.shape) :]


def without_seeds(graph: fx.Graph) -> None:
    """Let the passes of attention that drops nothing share no state of a generator.

    before: the forward pass returns the state that its operator has made, for the backward pass;
    after: it returns zeros, which are not read, and the operator may be replaced by a kernel.
    """
    for node in list(graph.nodes):
        parent: Any = node.args[0] if node.target is getitem else None
        if (
            parent is not None
            and isinstance(entry_of(parent), Attention)
            and node.args[1] > 1
            and arguments_of(parent)["dropout_p"] == 0.0
        ):
            _fill(graph, node)


def _fill(graph: fx.Graph, node: fx.Node) -> None:
    """Put zeros in the place of a node."""
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return
    with graph.inserting_after(node):
        options: dict[str, Any] = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
        zeros = graph.call_function(torch.ops.aten.full.default, (list(val.shape), 0), options)
    zeros.meta = dict(node.meta)
    node.replace_all_uses_with(zeros)
    graph.erase_node(node)
