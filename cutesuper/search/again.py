"""Elements of long rows computed again after a reduction, in place of stored.

Where no kernel holds a row, a kernel that reduces it ends before others go on with its elements. A
function of them that is reduced, and needed again, would be stored and read; it costs less to read
what it is computed from.

before: ``e = exp(x - max(x))``, ``div(e, sum(e))``: the maximum, e and its sum, the quotient;
after: the maximum and ``sum(exp(x - max(x)))`` in one pass, then ``div(exp(x - max(x)), sum)``.
"""

from __future__ import annotations

from math import prod

from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.ir.operators.base import INPUT, lookup
from cutesuper.skeletons.registry import SKELETONS


def computed_again(graph: KernelGraph) -> KernelGraph | None:
    """The program in which reductions of long rows have operands of their own.

    Args:
        graph: primitive operators only.

    Returns:
        None if nothing along such rows is both reduced and needed again.
    """
    reductions = [i for i, n in enumerate(graph.nodes) if lookup(n.operator).reduces is not None]
    long = {i for i in reductions if _is_long(graph, i)}
    if not long:
        return None
    again = _Again(graph, long)
    for i in reductions:  # before what goes on with elements, so that passes follow each other
        again.value(i)
    found = again.program()
    return found if len(found.nodes) > len(graph.nodes) else None


def _is_long(graph: KernelGraph, i: int) -> bool:
    """True if no kernel holds the rows that a node reduces."""
    node = graph.nodes[i]
    shape = graph.nodes[node.inputs[0]].shape
    whole = extent(shape[node.attributes["dim"]])
    alone = prod(map(extent, shape)) == whole
    return any(skeleton.divides(whole, alone) for skeleton in SKELETONS)


class _Again:
    """A copy of a graph while it grows."""

    def __init__(self, graph: KernelGraph, long: set[int]) -> None:
        self.graph, self.long, self.new = graph, long, KernelGraph()
        self.values: dict[int, Tensor] = {}
        for i in graph.inputs:
            self.new.nodes.append(graph.nodes[i])
            self.values[i] = self.new.tensor(len(self.new.nodes) - 1)

    def program(self) -> KernelGraph:
        """The whole program."""
        for i in self.graph.outputs:
            self.new.mark_output(self.value(i), self.graph.nodes[i].dtype)
        return self.new

    def value(self, i: int) -> Tensor:
        """A node of the graph in the copy."""
        if i not in self.values:
            own = self._alone if i in self.long else self.value
            args = [own(j) for j in self.graph.nodes[i].inputs]
            self.values[i] = self.new.copy_node(self.graph, i, args)
        return self.values[i]

    def _alone(self, i: int) -> Tensor:
        """The same, of which element-wise work is done again."""
        node = self.graph.nodes[i]
        if node.operator == INPUT or not node.facets.elementwise or i in self.graph.outputs:
            return self.value(i)
        return self.new.copy_node(self.graph, i, [self._alone(j) for j in node.inputs])
