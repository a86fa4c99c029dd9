"""Any small kernel graph as a muGraph of one block that holds whole tensors.

It does not depend on what the search finds: tests compare graphs with each other through it.
"""

from __future__ import annotations

from typing import Any

from cutesuper.egraph.labelled import LabelledOp, LabelMap, Region, RegionOp, View, label
from cutesuper.ir.block import LOAD, STORE, BlockOp, BlockProgram, KernelStep, MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import Items
from tests.mugraphs import mugraph


def region(graph: KernelGraph) -> Region:
    """All of an expanded graph; transposes become views."""
    nodes = graph.nodes
    ops = [i for i, n in enumerate(nodes) if n.operator not in ("input", "transpose")]
    number = {i: k for k, i in enumerate((*graph.inputs, *ops))}
    views: list[View] = []
    for i, n in enumerate(nodes):
        if n.operator == "transpose":
            inner = views[n.inputs[0]]
            order = tuple(inner.order[d] for d in n.attributes["dims"])
            views.append(View(inner.value, order))
        else:
            views.append(View(number[i], tuple(range(len(n.shape)))))
    return Region(
        tuple(nodes[i].shape for i in graph.inputs),
        tuple(nodes[i].dtype for i in graph.inputs),
        tuple(
            RegionOp(
                nodes[i].operator,
                tuple(views[j] for j in nodes[i].inputs),
                Items(nodes[i].attributes),
                nodes[i].shape,
            )
            for i in ops
        ),
        tuple(views[i] for i in graph.outputs),
        tuple(nodes[i].dtype for i in graph.outputs),
    )


def one_block(graph: KernelGraph) -> MuGraph:
    """One tile, no axes, one operation for each node.

    Raises:
        SearchError: a value would have one label twice, as in ``S @ S^T`` with S computed.
    """
    graph = graph.expanded()
    program = label(region(graph))
    names = [graph.nodes[i].name for i in graph.inputs]

    def dims(labels: Any) -> tuple[str, ...]:
        return tuple(d for d in program.dims if d in labels)

    def block_op(op: LabelledOp) -> BlockOp:
        attributes = dict(op.attributes)
        if op.kind == LOAD:
            attributes["tensor"] = names[attributes["tensor"]]
        if op.over is not None:
            attributes["over"] = op.over
        return BlockOp(op.kind, op.inputs, dims(op.labels), attributes)

    def store(k: int, value: int, labels: LabelMap) -> BlockOp:
        tensor = f"Z{k or ''}"
        at = dims(program.ops[value].labels)
        return BlockOp(STORE, (value,), at, {"tensor": tensor, "map": labels})

    ops = [block_op(op) for op in program.ops]
    ops += [store(k, *out) for k, out in enumerate(program.outputs)]
    tile = {d: extent(n) for d, n in program.dims.items()}
    return mugraph(graph, KernelStep("all", BlockProgram(program.dims, (), tile, tuple(ops))))
