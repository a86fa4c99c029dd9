"""Masks that are added to scores, and the lengths that stand for masks in a kernel graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from cutesuper.ir.graph import Tensor
from cutesuper.torch.compile.factored_dims import Dims, extent_of, leaves, unify
from cutesuper.torch.compile.graph_builder import (
    Builder,
    Built,
    Shapes,
    Unsupported,
    Value,
    of_rank,
)
from cutesuper.torch.compile.length_masks import Lengths, lengths_of, mask_read
from cutesuper.torch.compile.pointwise import Pointwise, added, infinite
from cutesuper.torch.compile.table import Arguments, enter_all


class Masked(Pointwise):
    """A sum; that of scores and a mask made of positions takes lengths in the mask's place."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        limits = lengths_of(node)
        if limits is None:
            return super().shape(s, node, a)
        scores = s.of(self._scores(node, a))
        for given in limits.nodes:
            join_lengths(s, given, scores.dims[0])
        for one in scores.dims[-2:]:
            s.whole(one)
        return scores

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        limits = lengths_of(node)
        if limits is None:
            return super().build(b, node, a)
        scores = self._scores(node, a)
        first, *rest = b.value(scores).dims
        own, rows, keys = (b.groups(leaves(d)) or (None,) for d in (first, *rest[-2:]))
        heads = b.groups(tuple(p for d in rest[:-2] for p in leaves(d)))
        slots = (*own, *heads, *rows, *keys)
        x = b.tensor(node, scores, slots, rank=len(slots))
        return Built(limited(b, node, x, limits, first), of_rank(slots, x))

    def _scores(self, node: fx.Node, a: Arguments) -> fx.Node:
        return a["other"] if a["self"] is mask_read(node) else a["self"]


enter_all({"aten.add.Tensor": Masked(("self", "other"), added, ("alpha",))})


def join_lengths(s: Shapes, lengths: fx.Node, sequences: Dims) -> None:
    """Let a tensor of lengths have the dimension of sequences; one length is that of all."""
    own = _parts(s.of(lengths))
    if leaves(own):
        unify(own, sequences)
    elif not isinstance(extent_of(sequences), int):
        raise Unsupported(lengths, "is one length for sequences whose number is known at the call")
    s.whole(sequences)


def seen(b: Builder, x: Tensor, limits: Lengths, beside: Sequence[Tensor]) -> Tensor:
    """Scores that meet the tensors beside them: conditions, and a mask that is added."""
    given, added_ = beside[: len(limits.given)], beside[len(limits.given) :]
    for condition, t in zip(limits.given, given, strict=True):
        x = b.g.hide(t if condition.visible else b.g.sub(1.0, t), x)
    for t in added_:
        x = b.g.hide(b.g.sub(1.0, infinite(b.g, t, -1.0)), b.g.add(x, t))
    return x


def limited(b: Builder, node: fx.Node, x: Tensor, limits: Lengths, sequences: Dims) -> Tensor:
    """Scores of which the limits hide some."""
    lengths, first = lengths_in(b, node, limits, sequences), limits.first
    if lengths is not None:
        x = b.g.length_mask(x, lengths, causal=limits.causal)
    elif limits.causal:
        x = b.g.causal_mask(x)
    if first is None:
        return x
    own = b.one(node, sequences)
    if first.node is None:
        starts = b.filled((own,), first.offset)
    else:
        starts = b.lengths(first.node, (own,), first.offset, first.most)
    return b.g.limit_mask(x, starts, causal=first.causal)


def lengths_in(b: Builder, node: fx.Node, limits: Lengths, sequences: Dims) -> Tensor | None:
    """The lengths of sequences as an input of the kernel graph, or None."""
    if limits.node is None:
        return None
    own = b.one(node, sequences)
    return b.lengths(limits.node, (own,), limits.offset, limits.most)


def _parts(lengths: Value) -> Dims:
    """The one dimension of lengths, beside any number of extents of 1."""
    return tuple(p for d in lengths.dims for p in d)
