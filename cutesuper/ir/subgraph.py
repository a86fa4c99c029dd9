"""The part of a kernel graph that some of its outputs need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cutesuper.ir.graph import KernelGraph


def only(graph: KernelGraph, outputs: Sequence[int]) -> tuple[KernelGraph, list[int]]:
    """The part of a graph that computes some outputs, and the inputs it needs.

    Args:
        graph: any.
        outputs: places of outputs, in the order that they are to have.
    """
    needed = graph.needed(graph.outputs[n] for n in outputs)
    new: dict[int, int] = {}
    result = KernelGraph()
    for i in sorted(needed):
        node = graph.nodes[i]
        new[i] = len(result.nodes)
        result.nodes.append(replace(node, inputs=tuple(new[j] for j in node.inputs)))
    result.outputs = [new[graph.outputs[n]] for n in outputs]
    return result, [n for n, i in enumerate(graph.inputs) if i in needed]
