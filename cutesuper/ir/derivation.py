"""The builder of derivatives: a kernel graph that simplifies every value as it is built.

Values are built once, and `cutesuper.ir.simplify` removes the leftovers of derivative formulas:
factors of 1 and -1, constants inside products, transposes of transposes, zeros.

before: ``mul(mul(dy, -1), -1)``, ``add(a, mul(b, -1))``; after: ``dy``, ``sub(a, b)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from cutesuper.errors import GraphError
from cutesuper.ir.dims import Shape, Symbol
from cutesuper.ir.dtypes import DType
from cutesuper.ir.graph import KernelGraph, Node, Operand, Tensor
from cutesuper.ir.operators.base import INPUT, Items, lookup
from cutesuper.ir.operators.monoid import MAX
from cutesuper.ir.simplify import RULES


@dataclass(eq=False)
class Derivation(KernelGraph):
    """A program and its derivative in one graph; see the module.

    Attributes:
        given: nodes of the program itself, which stay as they are.
        names: names of values that are worth keeping, by node.
        types: element types of values that are not stored as their operands' type, by node.
        stored: outputs that are a value of the program in another order, by that value.
    """

    given: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    types: dict[int, DType] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    _made: dict[Any, int] = field(default_factory=dict)
    _again: dict[int, int] = field(default_factory=dict)
    _zeros: set[int] = field(default_factory=set)
    _verbatim: bool = False

    # ------------------------------------------------------------------------------- building

    def apply(self, operator: str, *operands: Operand, **attributes: Any) -> Tensor:
        """The value of an operator, simplified; one that exists already is returned."""
        args = [self._operand(operator, a) for a in operands]
        rule = None if self._verbatim else RULES.get(operator)
        simpler = rule(self, args, attributes) if rule else None
        return self.once(operator, args, attributes) if simpler is None else simpler

    def once(self, operator: str, args: list[Tensor], attributes: dict[str, Any]) -> Tensor:
        """An operator applied without simplification; an earlier equal application is reused."""
        new = super().apply(operator, *args, **attributes)
        known = self._made.setdefault(_key(new.node), new.index)
        if known != new.index:
            self.nodes.pop()
        elif self._verbatim:
            self.given.add(known)
        return self.tensor(known)

    def known(self, operator: str, args: list[Tensor]) -> Tensor | None:
        """An existing value (of an operator without attributes), or None."""
        operands = [self._again.get(a.index, a.index) for a in args]
        operands = sorted(operands) if lookup(operator).commutes else operands
        i = self._made.get((operator, tuple(operands), Items({})))
        return None if i is None else self.tensor(i)

    def again(self, t: Tensor) -> Tensor:
        """A value of the program as derivatives compute it.

        before: the weights ``exp(x - max x) / sum`` of a softmax, which a product takes; after:
        ``exp(x - lse)`` with ``lse = max x + log(sum)``: one number of a row to keep, and kernels
        compute weights from scores without another look at the row (arXiv:2205.14135, B.2). Of a
        value that is an output in another order, which the caller has anyway: that output, put in
        order again.
        """
        found = self._softmax(t)
        if t.index in self.stored:
            output = self.tensor(self.stored[t.index])
            dims = output.node.attributes["dims"]
            back = tuple(sorted(range(len(dims)), key=lambda d: dims[d]))
            made = self.once("transpose", [output], {"dims": back})
        elif found is not None:
            x, top, total = found
            lse = self._logsumexp(top, total) or self.add(self.log(total), top)
            made = self.exp(self.sub(x, self.named(lse, "lse")))
        else:
            return t
        self._again[made.index] = t.index
        return made

    def _softmax(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Operand, maximum and sum of a softmax along rows that a product of the program takes."""
        nodes = self.nodes
        used = any(t.index in nodes[i].inputs and nodes[i].facets.contracts for i in self.given)
        if t.index not in self.given or not used or not t.node.facets.divides:
            return None
        e, total = (nodes[i] for i in t.node.inputs)
        if not total.facets.sums or total.inputs[0] != t.node.inputs[0] or total.shape[-1] != 1:
            return None
        if not e.facets.exponential or not nodes[e.inputs[0]].facets.subtracts:
            return None
        x, top = nodes[e.inputs[0]].inputs
        if nodes[top].facets.reduces is not MAX or nodes[top].inputs != (x,):
            return None
        return self.tensor(x), self.tensor(top), self.tensor(t.node.inputs[1])

    def _logsumexp(self, top: Tensor, total: Tensor) -> Tensor | None:
        """The `logsumexp` of a row, if the program has it, from its maximum and its sum."""
        log, is_finite = self.known("log", [total]), self.known("finite", [top])
        if log is None or is_finite is None:
            return None
        rest = self.known("keep", [is_finite, log])
        return None if rest is None else self.known("add", [rest, top])

    @contextmanager
    def verbatim(self) -> Iterator[None]:
        """Context in which new nodes count as the program itself and are not simplified."""
        self._verbatim = True
        try:
            yield
        finally:
            self._verbatim = False

    def converted(self, t: Tensor, dtype: DType) -> Tensor:
        """The same value with element type ``dtype``, for operators whose operands share one."""
        return t if t.dtype == dtype else self.convert(t, dtype)

    def named(self, t: Tensor, name: str) -> Tensor:
        """The same value, with a name under which a forward pass may keep it."""
        self.names[t.index] = name
        return t

    # ------------------------------------------------------------------- values of a given shape

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros in the shape of ``like``, for any values of it (0 times infinity is not 0)."""
        zero = self.once("mul", [self.step(like), self._operand("zeros", 0.0)], {})
        self._zeros.add(zero.index)
        return zero

    def is_zeros(self, t: Tensor) -> bool:
        """True if ``t`` came from `zeros`."""
        return t.index in self._zeros

    def full(self, t: Tensor, like: Tensor) -> Tensor:
        """``t`` with the shape of ``like``: an extent of 1 repeats its value.

        No operator of the table repeats anything by itself, so zeros are added.
        """
        shape = (1,) * (len(t.shape) - len(like.shape)) + like.shape
        return t if t.shape == shape else self.add(t, self.zeros(like))

    def unbroadcast(self, t: Tensor, result: Tensor, operand: Tensor, repeats: bool) -> Tensor:
        """The cotangent of an operand, from its contributions to every element of a result.

        before: ``[B, M, N]`` for an operand ``[M, 1]``; after: sums over N and B, ``[1, M, 1]``.
        Rows are summed first, and where they meet next: one kernel does both in that order.

        Args:
            t: broadcasts to the result's shape.
            result: the operator's result.
            operand: the operand that was broadcast.
            repeats: the operator is element-wise, so where the operand and ``t`` have extent 1
                and the result has n, there are n equal contributions.
        """
        rank = len(t.shape)
        full = _padded(result.shape, rank) if repeats else t.shape
        summed = [d for d, n in enumerate(_padded(operand.shape, rank)) if n == 1]
        # a sum for an unknown count restores the result's shape, so it comes before all others
        counted = [d for d in summed if t.shape[d] == 1 and isinstance(full[d], Symbol)]
        for d in (*counted, *(d for d in reversed(summed) if d not in counted)):
            if t.shape[d] != 1:
                t = self.sum(t, d)
            elif full[d] != 1:
                t = self._repeated(t, d, full[d], result)
        return t

    def _repeated(self, t: Tensor, d: int, n: int | Symbol, result: Tensor) -> Tensor:
        """n times t; an extent that is known only at the call is counted by a sum."""
        if not isinstance(n, Symbol):
            return self.mul(t, float(n))
        return self.sum(self.add(t, self.zeros(result)), d)

    def over_extent(self, t: Tensor, dim: int, operand: Tensor) -> Tensor:
        """``t`` divided by the extent of a dimension: the derivative of a mean.

        before: ``div(sum(z, 1), s) / n``; after: ``div(mean(z, 1), s)``, at any n.

        Args:
            t: extent 1 in ``dim``.
            dim: counted from the end.
            operand: the operand of the mean.

        Raises:
            GraphError: the extent is symbolic, and ``t`` is not a sum over it.
        """
        n = operand.shape[dim]
        found = self._mean_for_sum(t, dim, n)
        if found is not None:
            return found
        if isinstance(n, Symbol):
            raise GraphError(
                f"derivative of mean({operand!r}, dim={dim}): needs 1 / {n}, which is known only "
                "at the call; use sum, and pass the factor as an input"
            )
        return self.mul(t, 1.0 / n) if n else t  # which has no elements in the end

    def _mean_for_sum(self, t: Tensor, dim: int, n: int | Symbol) -> Tensor | None:
        """``t / n`` by turning a factor that is a sum over ``dim`` into a mean."""
        path: list[tuple[str, list[Tensor], int]] = []
        seen, todo = set[int](), [(t, path)]
        while todo:
            t, path = todo.pop()
            kind, args = t.node.operator, [self.tensor(i) for i in t.node.inputs]
            if t.node.facets.sums and t.node.attributes["dim"] - len(t.shape) == dim:
                if args[0].shape[dim] == n:
                    return self._with_mean(self.mean(args[0], dim), path)
            elif len(powers := t.node.facets.powers or ()) == 2 and t.index not in seen:
                factors = [a for a, n in zip(args, powers, strict=True) if n > 0]
                todo += reversed([(a, [*path, (kind, args, k)]) for k, a in enumerate(factors)])
            seen.add(t.index)
        return None

    def _with_mean(self, mean: Tensor, path: list[tuple[str, list[Tensor], int]]) -> Tensor:
        """Rebuild products and quotients around a new mean, the innermost first."""
        for kind, args, k in reversed(path):
            mean = self.apply(kind, *args[:k], mean, *args[k + 1 :])
        return mean

    # --------------------------------------------------------------------------- hidden elements

    def vanishes(self, t: Tensor, masked: Tensor) -> bool:
        """True if ``t`` is 0 wherever ``masked`` is -inf, as cotangents from a softmax are.
        That from 1 / e^masked is infinite there, and that from 1 / masked^2 is 0 times infinity."""
        hidden, found = self._hidden(t, masked), dict[int, bool]()
        infinite, large = dict[int, bool](), dict[int, bool]()
        for i in self._needed(t):
            facets, args = self.nodes[i].facets, self.nodes[i].inputs
            powers = list(zip(args, facets.powers or (), strict=False))
            up = any(large[j] for j, n in powers if n > 0)
            down = any(found[j] if n > 0 else large[j] for j, n in powers)
            zero = [found[j] for j in args]
            large[i] = hidden[i] or up
            infinite[i] = (
                any(infinite[j] for j in args)
                or (up and down)
                or (facets.divides and zero[1])
                or (facets.partial and any(zero))
            )
            found[i] = not infinite[i] and (
                (facets.exponential and hidden[args[0]])
                or down
                or (facets.signs is not None and all(zero))
            )
        return found[t.index]

    def _hidden(self, t: Tensor, masked: Tensor) -> dict[int, bool]:
        """For each node that ``t`` is computed from: True if it is -inf wherever ``masked`` is.
        Factors of a masked value are positive."""
        found: dict[int, bool] = {}
        for i in self._needed(t):
            facets, args = self.nodes[i].facets, self.nodes[i].inputs
            masks = facets.masks and facets.fill == -inf
            kept = facets.subtracts or facets.divides or masks or facets.converts
            first = args if facets.commutes else args[:kept]
            found[i] = i == masked.index or any(found[j] for j in first)
        return found

    def _needed(self, t: Tensor) -> list[int]:
        """The nodes that a value is computed from, and its own, in order."""
        return sorted(self.needed([t.index]))

    # ------------------------------------------------------------------------------- one program

    def extract(self, inputs: list[tuple[int, str]], outputs: list[int]) -> KernelGraph:
        """A plain graph that computes the outputs from some given values.

        Args:
            inputs: nodes whose values are given, with their names, in this order.
            outputs: nodes.
        """
        g = KernelGraph()
        new: dict[int, Tensor] = {}
        for i, name in inputs:
            n = self.nodes[i]
            if n.operator == INPUT:
                g.nodes.append(replace(n, name=name))
                new[i] = g.tensor(len(g.nodes) - 1)
            else:
                new[i] = g.new_input(n.shape, self.types.get(i, n.dtype), name)
        for i in sorted(self.needed(outputs, set(new))):
            n = self.nodes[i]
            args = [self._given_to(n, j, new[j]) for j in n.inputs]
            new[i] = g.apply(n.operator, *args, **dict(n.attributes))
        for i in outputs:
            g.mark_output(new[i], self.types.get(i))
        return g

    def _given_to(self, n: Node, i: int, t: Tensor) -> Tensor:
        """An operand in a plain graph.
        A given one may be stored as another type than the program computes it in, which products do
        not take, so it is converted."""
        own = self.nodes[i].dtype
        other = lookup(n.operator).one_type and not own.integer and t.dtype != own
        return t.graph.convert(t, own) if other else t


def _key(n: Node) -> tuple[Any, ...]:
    """A key that is equal for equal values."""
    inputs = sorted(n.inputs) if n.facets.commutes else n.inputs
    return n.operator, tuple(inputs), Items(n.attributes)


def _padded(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape
