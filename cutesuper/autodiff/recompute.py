"""The values that a forward pass keeps for its backward pass; see `autodiff.gradient.split`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cutesuper.errors import GraphError
from cutesuper.ir.arguments import shown
from cutesuper.ir.derivation import Derivation
from cutesuper.ir.dims import extent, show_shape
from cutesuper.ir.dtypes import float32
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import CONSTANT, lookup
from cutesuper.ir.rounding import comparisons

#: tensor core operations in the time of one byte of device memory: 750 TFLOP/s over 4.35 TB/s
#: (H200)
FLOPS_PER_BYTE = 172


@dataclass(frozen=True)
class Reuse:
    """A program and its derivative in one graph, and the values that could be kept between them.

    Attributes:
        both: the graph.
        inputs: names of the program's inputs and of the cotangents, by node.
        cotangents: nodes of the cotangents.
        outputs: nodes of the program's outputs.
        gradients: nodes of the gradients.
        values: node of ``both`` for each value of the program.
    """

    both: Derivation
    inputs: dict[int, str]
    cotangents: set[int]
    outputs: set[int]
    gradients: list[int]
    values: dict[tuple[KernelGraph, int], int]

    def values_used(self) -> dict[str, int]:
        """All values of the program that the backward pass needs if nothing is kept, by name.

        The second value called rstd is ``rstd2``. A maximum that the derivative compares with its
        elements is taken again, of the elements that the backward pass has: they may be rounded, or
        computed in another order.
        """
        given = self.both.given
        own = {i: tops for i, tops in comparisons(self.both).items() if i not in given}
        after = self.cotangents | own.keys()
        for i, n in enumerate(self.both.nodes):
            if after & set(n.inputs):
                after.add(i)
        nodes = self.both.needed(self.gradients, set(self.inputs)) - after
        nodes.difference_update(*own.values())
        names: dict[str, int] = {}
        count: Counter[str] = Counter()
        for i in sorted(nodes):
            n = self.both.nodes[i]
            if n.operator == CONSTANT:
                continue
            name = "out" if i in self.outputs else self.both.names.get(i, n.operator)
            names[self._free(name, count, {*names, *self.inputs.values()})] = i
        return names

    def _free(self, name: str, count: Counter[str], used: set[str]) -> str:
        while True:
            count[name] += 1
            numbered = name if count[name] == 1 else f"{name}{count[name]}"
            if numbered not in used:
                return numbered

    def met(self, kept: set[int]) -> set[int]:
        """The values of ``kept`` that the gradients use directly, not only through other ones."""
        nodes = self.both.needed(self.gradients, {*self.inputs, *kept})
        return kept & {j for i in nodes for j in self.both.nodes[i].inputs}


def choose(reuse: Reuse, save: str | Sequence[str | Tensor]) -> dict[int, str]:
    """Values that the forward pass keeps, with the names of the backward pass's inputs.

    Raises:
        GraphError: ``save`` is not valid, or names a value that is not used.
    """
    used = reuse.values_used()
    if isinstance(save, list | tuple):
        return _asked_for(reuse, save, used)
    if not isinstance(save, str) or save not in ("auto", "none"):
        raise GraphError(
            f'split(save={shown(save)}): must be "auto", "none", or a list of tensors and names'
        )
    worth = set[int]()
    if save == "auto":
        worth = _sparing(reuse, _worth_keeping(reuse, set(used.values())))
        worth = _rounded_alike(reuse, worth)
    met = reuse.met(worth)
    return {i: name for name, i in used.items() if i in met}


def _asked_for(reuse: Reuse, save: Sequence[str | Tensor], used: dict[str, int]) -> dict[int, str]:
    names = {i: name for name, i in used.items()}
    kept: dict[int, str] = {}
    for item in save:
        i = (
            reuse.values.get((item.graph, item.index))
            if isinstance(item, Tensor)
            else used.get(str(item))
        )
        if i is None or i not in names:
            raise GraphError(
                f"split(save=[{item!r}]): the backward pass does not use it; it uses "
                f"{_listed(reuse, used)}"
            )
        kept[i] = names[i]
    for i in set(kept) - reuse.met(set(kept)):
        raise GraphError(
            f"split(save=...): {kept[i]} is of no use once the others are kept; leave it out"
        )
    return kept


def _listed(reuse: Reuse, used: dict[str, int]) -> str:
    nodes = reuse.both.nodes
    return ", ".join(f"{n}{show_shape(nodes[i].shape)}" for n, i in used.items()) or "inputs only"


def _worth_keeping(reuse: Reuse, used: set[int]) -> set[int]:
    """The rule of ``save="auto"``."""
    both = reuse.both
    reduced, multiplied = set[int](), set[int]()
    for i, n in enumerate(both.nodes):
        product = n.facets.contracts
        if product or multiplied & set(n.inputs):
            multiplied.add(i)
        if product or lookup(n.operator).reduces or reduced & set(n.inputs):
            reduced.add(i)
    return {
        i
        for i in used
        if (i in reduced and both.nodes[i].shape[-1:] == (1,))
        or (i in reuse.outputs and i in multiplied)
        or _is_long_product(both, i)
    }


def _sparing(reuse: Reuse, worth: set[int]) -> set[int]:
    """The values without those that spare no product and would be computed again all the same.

    If the products before an output are computed again anyway, so is the output: it is rounded to
    its type and they are not, and their differences would be of the size of that rounding. The
    gradient of ``normalize(softmax(x @ w))`` in fp16 was 2.4e-4 where the exact one is 1e-7.

    The same for statistics of rows of such products, if their rows are reduced again: another
    kernel adds up products in another order. With logits of 3000 the share of the largest was 1 by
    2e-4, and that is what was left of gradients of softmax that cancel. Attention reduces no rows
    of scores, for which it keeps its output, and keeps their log-sum-exp. Of float32 products the
    rows need not be reduced again: scores of 100 by two kernels, each within 2^-21, made 1 + 5e-5
    of a share that is 1 and is exact in PyTorch.

    And for maxima of float32 rows that are computed again, see `_shifts_computed`.
    """
    kept = {i for i in worth if not _shifts_computed(reuse, worth, i)}
    for i in sorted(kept, reverse=True):
        statistic = reuse.both.nodes[i].shape[-1:] == (1,)
        if statistic and not _reduced_again(reuse, kept, i):
            continue
        if not statistic and (i not in reuse.outputs or _is_long_product(reuse.both, i)):
            continue
        if _products(reuse, kept - {i}) == _products(reuse, kept):
            kept.remove(i)
    return kept


def _shifts_computed(reuse: Reuse, kept: set[int], i: int) -> bool:
    """True if a kept value shifts arguments of exponentials that are computed again, in float32.

    Another kernel may compute x^6 as (x^3)^2. Of a row whose largest x^6, 150, was kept, the share
    of that one was 1 by 8e-6, where PyTorch's is exact; a rounding to 16 bits would hide that.
    Rows of products stay: those are too much to be computed twice.
    """
    nodes, known = reuse.both.nodes, {*reuse.inputs, *kept}
    if all(nodes[j].dtype != float32 for j in reuse.gradients):
        return False
    for n in (n for n in _shifted(reuse, kept) if n.shift == i and n.argument is not None):
        before = [nodes[k].facets for k in reuse.both.needed([n.elements], known)]
        if any(f.contracts for f in before):
            return False
        if any(not (f.converts or f.permutes or f.masks or f.subtracts) for f in before):
            return True
    return False


class _Shifted(NamedTuple):
    """A difference of elements and a shift.

    Attributes:
        elements: the minuend.
        shift: what is subtracted.
        argument: what an exponential takes of the difference, maybe less another shift; or None.
    """

    elements: int
    shift: int
    argument: int | None


def _shifted(reuse: Reuse, kept: set[int]) -> list[_Shifted]:
    """The differences that the gradients compute if some values are kept."""
    nodes, found = reuse.both.nodes, list[_Shifted]()
    needed = reuse.both.needed(reuse.gradients, {*reuse.inputs, *kept})
    whole = {j: j for e in needed if nodes[e].facets.exponential for j in nodes[e].inputs}
    for j in sorted(needed, reverse=True):
        if nodes[j].facets.subtracts:
            elements, shift = nodes[j].inputs
            if j in whole:
                whole[elements] = whole[j]  # x - max x - log sum exp(x - max x)
            found.append(_Shifted(elements, shift, whole.get(j)))
    return found


def _rounded_alike(reuse: Reuse, kept: set[int]) -> set[int]:
    """The values without statistics that the forward pass takes before it rounds elements.

    Logits over 344 elements are kept, in 16 bits. Their log-sum-exp is of those that were not
    rounded: with logits of 30 in bfloat16, a share that is 1 was off by 0.06, and gradients by 4.6
    times as much as PyTorch's. It is taken again, of rounded logits, or the whole argument of the
    exponential is kept, where that is an output (of log_softmax). The same for means.

    And for scores of operands that are computed: one kernel may round ``0.3 * q``, another ``q``.
    With scores of 300 in float16 a share that is 1 was off by 0.1.
    """
    nodes, found = reuse.both.nodes, set(kept)
    loaded = {j for j in kept if nodes[j].dtype.itemsize == 2 and nodes[j].shape[-1:] != (1,)}
    for n in _shifted(reuse, kept):
        statistics = _statistics(reuse, kept, n)
        if not statistics:
            continue
        again = reuse.both.needed([n.elements], {*reuse.inputs, *kept})
        of_loaded = n.elements in loaded or any(loaded.intersection(nodes[i].inputs) for i in again)
        if of_loaded or any(_rounds_operands(reuse, kept, i) for i in again):
            found -= statistics
            if n.argument in reuse.outputs:
                found.add(n.argument)
    return found


def _statistics(reuse: Reuse, kept: set[int], n: _Shifted) -> set[int]:
    """The kept statistics of elements that their shift is made of: it, or its parts."""
    both, inputs = reuse.both, set(reuse.inputs)
    of_rows = {j for j in kept if both.nodes[j].shape[-1:] == (1,)}
    parts = of_rows.intersection(both.needed([n.shift], inputs))
    return {j for j in parts if j == n.shift or n.elements in both.needed([j], inputs)}


def _rounds_operands(reuse: Reuse, kept: set[int], i: int) -> bool:
    """True for a product with an operand that is computed, and rounded to 16 bits."""
    nodes = reuse.both.nodes

    def is_given(j: int) -> bool:
        moved = nodes[j].facets.permutes and is_given(nodes[j].inputs[0])
        return moved or j in reuse.inputs or j in kept or nodes[j].dtype.itemsize > 2

    return nodes[i].facets.contracts and not all(map(is_given, nodes[i].inputs))


def _reduced_again(reuse: Reuse, kept: set[int], i: int) -> bool:
    """True if a product that a kept value is made of is computed again, and its rows reduced.
    Or if it is computed again in float32."""
    nodes = reuse.both.nodes
    after = {j for j in reuse.both.needed([i], set(reuse.inputs)) if nodes[j].facets.contracts}
    after &= _products(reuse, kept)
    if any(nodes[j].dtype == float32 for j in after):
        return True
    for j in sorted(reuse.both.needed(reuse.gradients, {*reuse.inputs, *kept})):
        if after & set(nodes[j].inputs):
            if lookup(nodes[j].operator).reduces:
                return True
            after.add(j)
    return False


def _products(reuse: Reuse, kept: set[int]) -> set[int]:
    """The products that the gradients compute if some values are kept."""
    nodes = reuse.both.needed(reuse.gradients, {*reuse.inputs, *kept})
    return {i for i in nodes if reuse.both.nodes[i].facets.contracts}


def _is_long_product(both: Derivation, i: int) -> bool:
    """True if computing an element takes longer than writing and reading it."""
    n = both.nodes[i]
    if not n.facets.contracts:
        return False
    inner = extent(both.nodes[n.inputs[0]].shape[-1])
    return 2 * inner > FLOPS_PER_BYTE * 2 * n.dtype.itemsize
