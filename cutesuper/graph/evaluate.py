"""Reference execution of a kernel graph with PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutesuper.errors import ShapeError
from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.operators import lookup

if TYPE_CHECKING:
    import torch


def evaluate(graph: KernelGraph, inputs: list[torch.Tensor], dtype: Any = None) -> list[Any]:
    """Compute the outputs operator by operator.

    Args:
        graph: any kernel graph.
        inputs: one tensor for each input, on one device.
        dtype: compute in this torch dtype (``torch.float64`` is the reference that everything is
            compared with); None computes each operator in the dtype of its arguments, as PyTorch
            would.

    Returns:
        The outputs in ``dtype`` (None: in the graph's own element types).

    Raises:
        ShapeError: not one tensor for each input.
    """
    if len(inputs) != len(graph.inputs):
        raise ShapeError(f"the graph has {len(graph.inputs)} input(s), got {len(inputs)} tensor(s)")
    values: dict[int, Any] = {}
    feed = iter(inputs)
    for i, node in enumerate(graph.nodes):
        if node.operator == "input":
            value = next(feed)
            values[i] = value if dtype is None else value.to(dtype)
        else:
            args = [values[j] for j in node.inputs]
            values[i] = lookup(node.operator).reference(args, dict(node.attributes))
    return [values[i] for i in graph.outputs]


def run_reference(graph: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs in the graph's element types, computed in float32 like the kernels do."""
    import torch

    outputs = evaluate(graph, inputs, torch.float32)
    return [
        o.to(graph.nodes[i].dtype.torch).contiguous()
        for o, i in zip(outputs, graph.outputs, strict=True)
    ]
