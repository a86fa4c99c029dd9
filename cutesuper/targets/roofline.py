"""Predicted time of PyTorch's kernels for a graph, by a roofline."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import CONSTANT, INPUT
from cutesuper.ir.relations import Classes
from cutesuper.targets.base import LibraryRates, Target


@dataclass(frozen=True)
class Baseline:
    """A predicted time of PyTorch's kernels.

    Attributes:
        us: microseconds of all kernels.
        kernels: their number.
    """

    us: float
    kernels: int


def baseline(graph: KernelGraph, target: Target) -> Baseline:
    """Time of the kernels into which Inductor would cut a graph.

    Each product of matrices, and each attention, is a kernel of its own (a library's, or a template
    with nothing else in it). Connected element-wise operators and reductions between products are
    one kernel; that is the most that Inductor can fuse, so the estimate tends to be too low. A
    kernel reads and writes each of its tensors once; its time is that of the memory or the tensor
    cores, plus a launch, and what kernels of libraries were measured to need at least
    (`cutesuper.targets.base.LibraryRates`).

    before: one query of 32 heads by 4096 keys, 5.4 us on an H200; after: 8.7, where cuDNN takes
    11.5 and FlashAttention 2 18.7.

    Args:
        graph: symbols count with their hints.
        target: the GPU.
    """
    return _priced(graph, target, _groups(graph))


def eager(graph: KernelGraph, target: Target) -> Baseline:
    """The baseline of PyTorch without a compiler: a kernel for each operator."""
    return _priced(graph, target, [{i} for group in _groups(graph) for i in group])


def alone(graph: KernelGraph, node: int, target: Target) -> Baseline:
    """The baseline of the kernel of one operator, by its index."""
    return _priced(graph, target, [{node}])


def traffic(graph: KernelGraph) -> float:
    """Bytes that any program must read and write: inputs and outputs, once."""
    return _bytes(graph, set(_computed(graph)))


def work(graph: KernelGraph) -> float:
    """Operations of the tensor cores."""
    return _products(graph, set(_computed(graph)))


def least_us(graph: KernelGraph, target: Target) -> float:
    """Microseconds of any program, at least: a launch, and its traffic or its work."""
    seconds = max(traffic(graph) / target.bandwidth, work(graph) / target.tensor_flops)
    return seconds * 1e6 + target.launch_us


def _priced(graph: KernelGraph, target: Target, groups: list[set[int]]) -> Baseline:
    us = 0.0
    for group in groups:
        beside_us, efficiency = _library(graph, group, target.libraries)
        rate = target.tensor_flops * efficiency
        again = target.libraries.softmax_memory if _sums_behind_maximum(graph, group, target) else 1
        memory = again * _bytes(graph, group) / target.bandwidth
        seconds = max(memory, _products(graph, group) / rate)
        us += seconds * 1e6 + beside_us + target.launch_us
    return Baseline(us, len(groups))


def _sums_behind_maximum(graph: KernelGraph, group: set[int], target: Target) -> bool:
    """True for a kernel that sums long rows with their maximum, as softmax does."""
    behind = set[int]()
    for i in sorted(group):
        n = graph.nodes[i]
        if n.facets.reduces is None:
            if behind.intersection(n.inputs):
                behind.add(i)
            continue
        rows = graph.nodes[n.inputs[0]].shape
        if extent(rows[n.attributes["dim"]]) < target.libraries.softmax_columns:
            continue
        if behind.intersection(n.inputs):
            return True
        if n.facets.selects:
            behind.add(i)
    return False


def _library(graph: KernelGraph, group: set[int], rates: LibraryRates) -> tuple[float, float]:
    """Time of a kernel beside its roofline, and the fraction of the tensor cores it reaches."""
    products = [graph.nodes[i] for i in group if _multiplies(graph.nodes[i])]
    attention = [n for n in products if n.facets.composite]
    if attention:
        keys = max(_keys(graph, n) * _seen(graph, n) for n in attention)
        return rates.attention_us, rates.attention_efficiency * keys / (keys + rates.attention_keys)
    return (rates.product_us if products else 0.0), 1.0


def _groups(graph: KernelGraph) -> list[set[int]]:
    """The nodes of each kernel."""
    computed = _computed(graph)
    multiplies = {i: _multiplies(graph.nodes[i]) for i in computed}
    #: products on the longest path to a node: nodes after one cannot be fused with nodes before it
    depth: dict[int, int] = {}
    kernels = Classes[int]()
    for i in computed:
        before = [j for j in graph.nodes[i].inputs if j in multiplies]
        depth[i] = max((depth[j] + multiplies[j] for j in before), default=0)
        for j in before:
            if not multiplies[i] and not multiplies[j] and depth[i] == depth[j]:
                kernels.join(i, j)
    found: dict[int, set[int]] = {}
    for i in computed:
        found.setdefault(kernels.find(i), set()).add(i)
    return [g for g in found.values() if not all(_moves_nothing(graph, i) for i in g)]


def _computed(graph: KernelGraph) -> list[int]:
    needed = graph.needed(graph.outputs)
    return [i for i in sorted(needed) if graph.nodes[i].operator not in (INPUT, CONSTANT)]


def _multiplies(node: Node) -> bool:
    """True for a product of matrices and for attention: tensor cores take operands of one type."""
    return node.facets.one_type and not (node.facets.joins or node.facets.puts)


def _moves_nothing(graph: KernelGraph, i: int) -> bool:
    """True for a node that moves no data; transposed operands are read as they are stored."""
    facets = graph.nodes[i].facets
    taken_apart = facets.cuts and not facets.joins
    return (facets.permutes or taken_apart) and i not in graph.outputs


def _bytes(graph: KernelGraph, group: set[int]) -> float:
    """Bytes that the kernel reads and writes in memory."""
    nodes = graph.nodes
    used = (j for i in group for j in nodes[i].inputs[nodes[i].facets.puts :])
    read = {j for j in used if j not in group}
    users = {j for i, n in enumerate(nodes) if i not in group for j in n.inputs}
    written = {i for i in group if i in users or i in graph.outputs}
    # of what rows are put into, in place, the rows are all that moves
    stored = {i: nodes[i].inputs[-1] if nodes[i].facets.puts else i for i in written}
    moved = [nodes[i] for i in (*read, *stored.values()) if nodes[i].operator != CONSTANT]
    return sum(prod(map(extent, n.shape)) * n.dtype.itemsize for n in moved)


def _products(graph: KernelGraph, group: set[int]) -> float:
    """Number of operations of the tensor cores."""
    nodes = graph.nodes
    return sum(
        nodes[i].facets.flops([nodes[j].shape for j in nodes[i].inputs], nodes[i].shape)
        * _seen(graph, nodes[i])
        for i in group
        if _multiplies(nodes[i])
    )


def _seen(graph: KernelGraph, node: Node) -> float:
    """Share of the scores that a causal attention computes; lengths may leave all of them."""
    if not node.attributes.get("is_causal") or len(node.inputs) > 3:
        return 1.0
    rows, keys = extent(node.shape[-2]), _keys(graph, node)
    first = min(rows, keys)  # rows that do not see all keys
    return (first * (first + 1) / 2 + (rows - first) * keys) / max(1, rows * keys)


def _keys(graph: KernelGraph, node: Node) -> int:
    """Number of keys of an attention."""
    return extent(graph.nodes[node.inputs[1]].shape[-2])
