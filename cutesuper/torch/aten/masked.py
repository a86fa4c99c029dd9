"""Masks that are added to scores, and the lengths that stand for masks in a kernel graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.torch.aten.factored_dims import Dims, extent_of, leaves, unify
from cutesuper.torch.aten.graph_builder import (
    Builder,
    Built,
    Shapes,
    Unsupported,
    Value,
    of_rank,
)
from cutesuper.torch.aten.length_masks import Lengths, lengths_of, mask_read
from cutesuper.torch.aten.pointwise import Pointwise, added, infinite
from cutesuper.torch.aten.table import Arguments, enter_all


class Masked(Pointwise):
    """A sum; that of scores and a mask made of positions takes lengths in the mask's place."""

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Value:
        limits = lengths_of(node)
        if limits is None:
            return super().shape(s, node, a)
        scores = s.of(self._scores(node, a))
        for given in limits.nodes:
            join_lengths(s, given, scores.dims[0])
        own = scores.dims[:1] if _of_sequences(limits) else ()
        for one in (*own, *scores.dims[-2:]):
            s.whole(one)
        return scores

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Built:
        limits = lengths_of(node)
        if limits is None:
            return super().build(b, node, a)
        scores = self._scores(node, a)
        first, *rest = b.value(scores).dims
        rows, keys = (b.groups(leaves(d)) or (None,) for d in rest[-2:])
        if _of_sequences(limits):
            own, heads = b.groups(leaves(first)) or (None,), rest[:-2]
        else:
            own, heads = (), [first, *rest[:-2]]
        heads = b.groups(tuple(p for d in heads for p in leaves(d)))
        slots = (*own, *heads, *rows, *keys)
        x = b.tensor(node, scores, slots, rank=len(slots))
        return Built(hiding(b, node, limits, first)(x), of_rank(slots, x))

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


@dataclass(frozen=True)
class Hiding:
    """Limits and masks that hide keys from scores, as tensors of a kernel graph.

    Attributes:
        limits: what they stand for.
        ends: the number of keys that each sequence sees; None for all.
        starts: the first key that each sequence sees; None for the first one that there is.
        beside: conditions, and a mask that is added.
    """

    limits: Lengths
    ends: Tensor | None
    starts: Tensor | None
    beside: tuple[Tensor, ...] = ()

    @property
    def are_lengths(self) -> bool:
        """True if nothing but a length hides keys, and the rows behind one."""
        return self.starts is None and not self.beside and not self.limits.beyond

    def __call__(self, x: Tensor) -> Tensor:
        """Scores of which some are hidden."""
        g, count = x.graph, len(self.limits.given)
        for condition, t in zip(self.limits.given, self.beside[:count], strict=True):
            x = g.hide(t if condition.visible else g.sub(1.0, t), x)
        for t in self.beside[count:]:
            x = g.hide(g.sub(1.0, infinite(g, t, -1.0)), g.add(x, t))
        if self.ends is not None and self.limits.beyond:
            x = g.limit_mask(x, self.ends, lower=False, causal=self.limits.causal)
        elif self.ends is not None:
            x = g.length_mask(x, self.ends, causal=self.limits.causal)
        elif self.limits.causal:
            x = g.causal_mask(x)
        if self.starts is None or self.limits.first is None:
            return x
        return g.limit_mask(x, self.starts, causal=self.limits.first.causal)

    def as_inputs(self, g: KernelGraph) -> tuple[Hiding, dict[str, Tensor]]:
        """Make inputs of another graph of the tensors; return them, and by name what they are."""
        given = {"ends": self.ends, "starts": self.starts}
        given |= {f"beside{n}": t for n, t in enumerate(self.beside)}
        there = {name: t for name, t in given.items() if t is not None}
        made = {n: g.new_input(t.shape, t.dtype, n) for n, t in there.items()}
        beside = tuple(made[f"beside{n}"] for n in range(len(self.beside)))
        return Hiding(self.limits, made.get("ends"), made.get("starts"), beside), there


def hiding(
    b: Builder, node: fx.Node, limits: Lengths, sequences: Dims, beside: Sequence[Tensor] = ()
) -> Hiding:
    """Limits and masks that hide keys from the scores of a node; integers become inputs."""
    ends, starts, first = None, None, limits.first
    if limits.node is not None:
        own = b.one(node, sequences)
        ends = b.lengths(limits.node, (own,), limits.offset, limits.most)
    elif limits.number is not None:
        ends = b.filled((b.one(node, sequences),), limits.number)
    if first is not None:
        own = b.one(node, sequences)
        starts = (
            b.filled((own,), first.offset)
            if first.node is None
            else b.lengths(first.node, (own,), first.offset, first.most)
        )
    return Hiding(limits, ends, starts, tuple(beside))


def _of_sequences(limits: Lengths) -> bool:
    """True if sequences may differ in the keys that they see."""
    return limits.node is not None or limits.first is not None


def _parts(lengths: Value) -> Dims:
    """The one dimension of lengths, beside any number of extents of 1."""
    return tuple(p for d in lengths.dims for p in d)
