"""Reference execution of a kernel graph with PyTorch."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from cutesuper.errors import ShapeError
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT, Attributes, lookup
from cutesuper.ir.unseen import Fate, Fates, empties_quotient, fates_of, hides_difference

if TYPE_CHECKING:
    import torch


def reference(kind: str, args: list[Any], attributes: Attributes, fates: Fates) -> Any:
    """Reference result of an operator, where rows may be hidden as a whole.

    Args:
        kind: the operator.
        args: torch tensors that broadcast.
        attributes: the operator's attributes.
        fates: fates of the arguments; see `cutesuper.ir.unseen`.
    """
    operator = lookup(kind)
    if empties_quotient(kind, fates):
        args = [args[0], args[1].masked_fill(args[1] == 0, 1.0)]
    result = operator.reference(args, attributes)
    if hides_difference(kind, fates):
        return hidden_difference(result, args)
    if operator.of_hidden is not None and fates[0] == Fate(-inf):
        gone = (args[0] == -inf).all(attributes["dim"], keepdim=True)
        return result.masked_fill(gone, operator.of_hidden)
    return result


def hidden_difference(difference: Any, args: list[Any]) -> Any:
    """A difference where -inf minus -inf is -inf.
    A row or tile without visible elements has the maximum -inf, which is only ever subtracted from
    hidden elements."""
    return difference.masked_fill((args[0] == -inf) & (args[1] == -inf), -inf)


def evaluate(graph: KernelGraph, inputs: list[torch.Tensor], dtype: Any = None) -> list[Any]:
    """Compute the outputs operator by operator.

    Rows that the graph hides as a whole are 0 after a softmax, written as one operator or as
    several (`cutesuper.ir.unseen`).

    Args:
        graph: any kernel graph.
        inputs: one tensor for each input, on one device.
        dtype: compute in this torch dtype (``torch.float64`` is the reference that everything is
            compared with); None computes each operator in the dtype of its arguments, as PyTorch
            would; results of mixed argument types and of conversions are rounded to the graph's
            types.

    Returns:
        The outputs in ``dtype`` (None: in the types in which they were computed).

    Raises:
        ShapeError: not one tensor for each input.
    """
    if len(inputs) != len(graph.inputs):
        raise ShapeError(f"the graph has {len(graph.inputs)} input(s), got {len(inputs)} tensor(s)")
    fates = fates_of(graph)
    values: dict[int, Any] = {}
    feed = iter(inputs)
    for i, node in enumerate(graph.nodes):
        if node.operator == INPUT:
            value = next(feed)
            values[i] = value if dtype is None or node.dtype.integer else value.to(dtype)
        else:
            args = [values[j] for j in node.inputs]
            known = [fates[j] for j in node.inputs]
            value = reference(node.operator, args, dict(node.attributes), known)
            types = {x.dtype for x in args if x.dim() and x.is_floating_point()}
            own = len(types) > 1 or lookup(node.operator).dtype(node.attributes) is not None
            values[i] = value.to(node.dtype.torch) if own and dtype is None else value
    return [values[i] for i in graph.outputs]


def run_reference(graph: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs in the graph's element types, computed in float32 like the kernels do.
    Also under autocast."""
    import torch

    device = inputs[0].device.type if inputs else "cpu"
    if device != "meta" and torch.is_autocast_enabled(device):  # which raises for meta
        with torch.autocast(device, enabled=False):
            return run_reference(graph, inputs)
    outputs = evaluate(graph, inputs, torch.float32)
    return [
        o.to(graph.nodes[i].dtype.torch).contiguous()
        for o, i in zip(outputs, graph.outputs, strict=True)
    ]
