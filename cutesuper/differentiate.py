"""Kernels of a derivative, for `Kernel.gradient`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Protocol

from cutesuper.autodiff.gradient import Split, split
from cutesuper.errors import CutesuperError, GraphError
from cutesuper.garbage import seldom_collected
from cutesuper.ir.dims import Symbol, show_shape
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.subgraph import only
from cutesuper.runtime.kernel import Kernel

if TYPE_CHECKING:
    from cutesuper.pipeline import Prospect
    from cutesuper.runtime.gradient import Gradient


@seldom_collected()
def gradient_of(prospect: Prospect, kernel: Kernel, wrt: tuple[str, ...]) -> Gradient:
    """Cut a kernel's program and its derivative in two, and make kernels of both parts.

    Two cuts are searched, and the one with the lower predicted time of both parts is compiled: one
    keeps the values that ``split(save="auto")`` selects, the other none. A row kernel reads kept
    row statistics in no time, but keeping them costs RMSNorm + Linear two more kernels in the
    forward pass, because the matmul loop cannot write them (64x256x128: 6.2 + 8.4 us predicted
    with them, 3.9 + 8.8 us without). If only inputs and outputs are kept, the forward pass is the
    kernel itself.

    Args:
        prospect: the source of the kernel.
        kernel: the kernel to differentiate.
        wrt: names of inputs.

    Raises:
        GraphError: there is no derivative, or no kernels for it; says why and what to do.
        CompileError: as for `cutesuper.superoptimize`.
    """
    from cutesuper.runtime.gradient import Gradient

    try:
        cut = _cheapest(prospect, wrt)
    except CutesuperError as error:
        raise GraphError(_refusal(prospect.graph, wrt, error)) from error
    forward = kernel if cut.forward is prospect else cut.forward.kernel()
    backward = cut.backward.kernel() if cut.backward else None
    return Gradient(prospect.graph, wrt, cut.split, forward, backward)


@dataclass(frozen=True)
class _Cut:
    """A way to divide a program and its derivative, with the programs found for both parts.

    Attributes:
        split: the graphs.
        forward, backward: None if every gradient is a cotangent.
    """

    split: Split
    forward: Prospect
    backward: Prospect | None

    @property
    def cost_us(self) -> float:
        return self.forward.cost_us + (self.backward.cost_us if self.backward else 0.0)


def _cheapest(prospect: Prospect, wrt: tuple[str, ...]) -> _Cut:
    """The cut with the lower predicted time.
    Raises the error of the last cut if none can be run."""
    graph = prospect.graph
    if prospect.options.dependent_launch:
        graph = _written(graph, wrt)
    find = prospect.another
    if graph is not prospect.graph:
        prospect = find(graph)

    def cut(save: str, most_us: float = inf) -> _Cut:
        halves = split(graph, list(wrt), save)
        backward, _ = only(halves.backward, range(len(halves.backward.outputs)))
        forward = prospect if halves.forward is graph else find(halves.forward, most_us)
        left = most_us - forward.cost_us
        return _Cut(halves, forward, find(backward, left) if backward.outputs else None)

    return _best(cut)


class _Cutting(Protocol):
    """Makes a cut that keeps some values. Raises CutesuperError, also if it is too dear."""

    def __call__(self, save: str, most_us: float = inf) -> _Cut: ...


def _best(cut: _Cutting) -> _Cut:
    try:
        keeping = cut("auto")
    except CutesuperError:
        return cut("none")
    if not keeping.split.saved:
        return keeping
    try:
        return min(keeping, cut("none", keeping.cost_us), key=lambda c: c.cost_us)
    except CutesuperError:
        return keeping


def _written(graph: KernelGraph, names: tuple[str, ...]) -> KernelGraph:
    """A copy of the graph in which some inputs are no longer declared constant.
    Optimizers write them, in a kernel that may still be running when a dependent launch of the next
    step reads them."""
    if not any(n.constant and n.name in names for n in graph.nodes):
        return graph
    nodes = [replace(n, constant=n.constant and n.name not in names) for n in graph.nodes]
    return KernelGraph(nodes, list(graph.outputs))


def _refusal(graph: KernelGraph, wrt: tuple[str, ...], error: CutesuperError) -> str:
    inputs = [graph.nodes[i] for i in graph.inputs]
    call = ", ".join(n.name + show_shape(n.shape) for n in inputs)
    symbols = {d.name: d for n in inputs for d in n.shape if isinstance(d, Symbol)}
    fixed = f"Make {', '.join(symbols)} a number, call" if symbols else "Call"
    return (
        f"kernel({call}): no kernels compute the gradient of {', '.join(wrt)}: {error}. {fixed} it "
        "under torch.no_grad(), detach inputs that need no gradient, or train with "
        'torch.compile(fn, backend="cutesuper") or the operators of cutesuper.ops'
    )
