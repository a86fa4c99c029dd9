"""Sums moved inside products: a sum of a product becomes a product with a summed operand.

before: ``sum_N(X W + b)``, M x N x K multiplications; after: ``sum_K(X * sum_N(W)) + sum_N(b)``,
which reads X and W once. The sums of W are statistics, float32 between kernels.

Which one is faster depends on the extents: for 64x128x96 the accumulators are reduced along the
columns in one kernel; 4096x4096x4096 becomes two kernels without a matrix product. So a graph is
searched both ways; like every result, the program is verified against the graph as the user wrote
it.
"""

from __future__ import annotations

from collections import Counter

from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import lookup


def summed_first(graph: KernelGraph) -> KernelGraph | None:
    """The program with sums and means of products moved to one operand of the product.

    Args:
        graph: primitive operators only.

    Returns:
        None if there is no such sum of a product that has no other use.
    """
    moving = _Moving(graph)
    moved = any(moving.moves(i) for i in range(len(graph.nodes)))
    return moving.run() if moved else None


class _Moving:
    def __init__(self, graph: KernelGraph) -> None:
        self.graph, self.new = graph, KernelGraph()
        self.values: list[Tensor] = []
        self._users = Counter(i for n in graph.nodes for i in n.inputs)
        self._users.update(graph.outputs)

    def run(self) -> KernelGraph:
        """The rewritten program, without nodes that are no longer needed."""
        g = self.new
        for i in range(len(self.graph.nodes)):
            self.values.append(self._linear(i) or self._again(i))
        for i in self.graph.outputs:
            g.mark_output(self.values[i], self.graph.nodes[i].dtype)
        return g.apart([range(len(g.outputs))])

    def _again(self, i: int) -> Tensor:
        inputs = [self.values[j] for j in self.graph.nodes[i].inputs]
        return self.new.copy_node(self.graph, i, inputs)

    def moves(self, i: int) -> bool:
        """True for a sum or a mean of a value that is linear in a product."""
        n = self.graph.nodes[i]
        if n.facets.reduces is None or not n.facets.reduces.linear:
            return False
        return self._has_product(n.operator, n.inputs[0], n.attributes["dim"] - len(n.shape))

    def _linear(self, i: int) -> Tensor | None:
        """Such a sum, moved; None for any other node."""
        if not self.moves(i):
            return None
        n = self.graph.nodes[i]
        return self._reduced(n.operator, n.inputs[0], n.attributes["dim"] - len(n.shape))

    # ------------------------------------------------------------------------------------- terms

    def _has_product(self, kind: str, i: int, dim: int) -> bool:
        """True if a sum over a dimension, counted from the end, reaches a product."""
        if self._is_product(i, dim):
            return True
        return any(self._has_product(kind, j, dim) for j in self._terms(kind, i, dim))

    def _is_product(self, i: int, dim: int) -> bool:
        """True if a node is a product that is only used by the sum."""
        alone = self._users[i] == 1 and dim >= -2
        return alone and self.graph.nodes[i].facets.contracts and self._has(i, dim)

    def _terms(self, kind: str, i: int, dim: int) -> list[int]:
        """The operands that may be summed over a dimension in place of the value.

        A value that is constant along the dimension is its own mean; its sum would be a multiple of
        itself, and a number of elements is right at one extent only.
        """
        n = self.graph.nodes[i]
        along = [j for j in n.inputs if self._has(j, dim)]
        if self._users[i] > 1 or not along:
            return []
        if n.facets.signs:
            return along if lookup(kind).averages or len(along) == 2 else []
        if n.facets.multiplies or (n.facets.divides and along[0] == n.inputs[0]):
            return along if len(along) == 1 else []
        return []

    def _has(self, i: int, dim: int) -> bool:
        """True if values differ along a dimension."""
        shape = self.graph.nodes[i].shape
        return len(shape) >= -dim and shape[dim] != 1

    def _reduced(self, kind: str, i: int, dim: int) -> Tensor:
        """The sum or mean of a value over one of its dimensions."""
        if self._is_product(i, dim):
            return self._summed_first(kind, i, dim)
        terms = self._terms(kind, i, dim)
        if not any(self._has_product(kind, j, dim) for j in terms):
            return self.new.apply(kind, self.values[i], dim=dim)
        n = self.graph.nodes[i]
        args = (self._reduced(kind, j, dim) if j in terms else self.values[j] for j in n.inputs)
        return self.new.apply(n.operator, *args)

    def _summed_first(self, kind: str, i: int, dim: int) -> Tensor:
        """The sum of a product over its columns or its rows, without tensor cores.
        One operand is summed first, then multiplied and summed in float32."""
        g, (a, b) = self.new, (self.values[j] for j in self.graph.nodes[i].inputs)
        if dim == -1:
            return g.sum(g.mul(a, g.transpose(g.apply(kind, b, dim=-1))), -1)
        return g.sum(g.mul(g.transpose(g.apply(kind, a, dim=-2)), b), -2)
