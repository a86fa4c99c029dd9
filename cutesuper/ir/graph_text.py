"""Kernel graphs as aligned text; `ir.text` writes muGraphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cutesuper.ir.dims import show_shape

if TYPE_CHECKING:
    from cutesuper.ir.graph import KernelGraph, Node

INDENT = "  "


def kernel_graph_text(graph: KernelGraph) -> str:
    """One line for each node; outputs end in ``-> output 0``.

    ::

        kernel graph: 2 inputs, 1 output
          X   input          [16, 4096]    float16
          W   input          [4096, 6144]  float16
          t2  rms_norm(X)    [16, 4096]    float16  eps=1e-06
          t3  matmul(t2, W)  [16, 6144]    float16  -> output 0
    """
    rows = [_node_row(graph, i, n) for i, n in enumerate(graph.nodes)]
    head = f"kernel graph: {counted(graph.inputs, 'input')}, {counted(graph.outputs, 'output')}"
    return "\n".join([head, *aligned(rows)])


def _node_row(graph: KernelGraph, index: int, node: Node) -> tuple[str, ...]:
    operands = ", ".join(graph.nodes[j].name for j in node.inputs)
    what = node.operator if not node.inputs else f"{node.operator}({operands})"
    notes = [f"{k}={_value(v)}" for k, v in node.attributes.items()]
    if node.constant:
        notes.append("constant")
    if index in graph.outputs:
        notes.append(f"-> output {graph.outputs.index(index)}")
    return node.name, what, show_shape(node.shape), str(node.dtype), " ".join(notes)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def counted(things: Iterable[object], noun: str) -> str:
    """A count with its noun: ``1 kernel``, ``2 kernels``."""
    n = len(list(things))
    return f"{n} {noun}{'' if n == 1 else 's'}"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (INDENT + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True))).rstrip()
        for r in rows
    ]
