"""Losses by labels: a kernel reads rows and labels, and counts those that are not ignored."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cutesuper.ir.graph import Tensor
from cutesuper.torch.aten.factored_dims import unify
from cutesuper.torch.aten.gathers import INDICES, labelled, named
from cutesuper.torch.aten.graph_builder import (
    FLOATS,
    Builder,
    Built,
    Shapes,
    Slots,
    Unsupported,
    Value,
    Within,
    fake,
)
from cutesuper.torch.aten.reducing import along, each, reduced_together
from cutesuper.torch.aten.table import Arguments, Entry, enter, reads_places

#: PyTorch's numbers for what is made of the losses of rows
_OF_ROWS, _MEAN = 0, 1

_sum = each(lambda g, t, dim: g.sum(t, dim))


def is_of_rows(x: Any, target: Any, weight: Any) -> bool:
    """True for a loss of rows of several classes that count alike, by labels that kernels read."""
    if not isinstance(x, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    rows = x.dim() == 2 and target.dim() == 1 and weight is None
    if not rows or x.dtype not in FLOATS or target.dtype not in INDICES:
        return False
    return isinstance(x.shape[1], int) and x.shape[1] > 1


@enter("aten.nll_loss_forward.default")
class NegativeLogLikelihood(Entry):
    """The element of each row that its label names, negated, and 0 where the label is ignored.
    For itself, as a sum, or as the mean of the rows that count."""

    def knows(self, node: fx.Node, a: Arguments) -> bool:
        x, target = (getattr(a[n], "meta", {}).get("val") for n in ("self", "target"))
        return is_of_rows(x, target, a["weight"]) and not reads_places(node)

    def shape(self, s: Shapes, node: fx.Node, a: Arguments) -> Any:
        x, target = s.of(a["self"]), s.of(a["target"])
        if x.absent or target.absent:
            raise Unsupported(node, "takes elements of what repeats, or by labels that repeat")
        rows, classes = x.dims
        unify(rows, target.dims[0])
        rows = Value((rows,))
        s.whole(classes)
        if a["reduction"] == _OF_ROWS:
            return rows, None
        s.reduced(node, reduced_together(rows, [0], combined=False))
        return Value(()), None

    def build(self, b: Builder, node: fx.Node, a: Arguments) -> Any:
        x, ignored = a["self"], a["ignore_index"]
        count = int(fake(x).shape[-1])
        within = Within(0, count, ignored)
        values, labels, rows = labelled(b, node, (x, a["target"]), within)
        slots = (*rows, None)
        weight = b.g.label_weight(labels, count, ignored)
        # rows that are ignored may hold anything; the weight of a label that is no class is NaN
        kept = b.g.apply("keep", weight, b.g.mul(named(values, labels), -1.0))
        losses = b.g.mul(weight, kept)
        if a["reduction"] == _OF_ROWS:
            return Built(losses, slots), None
        total = self._total(b, node, losses, slots)
        if a["reduction"] == _MEAN:
            counted = self._total(b, node, weight, slots)
            return Built(b.g.div(_tensor(total), _tensor(counted)), total.slots), None
        return total, None

    def _total(self, b: Builder, node: fx.Node, t: Tensor, slots: Slots) -> Built:
        return along(b, node, t, slots, b.shapes.runs[node], _sum)


def _tensor(built: Built) -> Tensor:
    assert isinstance(built.tensor, Tensor)
    return built.tensor
