"""Assignment of the definition's operators to the kernels that compute them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from cutesuper.ir.block import ENDING, LOAD, STORE, BlockProgram, MuGraph
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT, lookup

#: nodes of a definition that no kernel computes: given values, and views of them
GIVEN = ("input", "constant", "transpose")
#: most operators that a title names
LONGEST = 5


def kernels_of(graph: KernelGraph, mu: MuGraph) -> dict[int, tuple[int, ...]]:
    """The positions of the kernels that compute each node of the definition.

    A kernel computes the nodes between the tensors that it reads and those that it writes; the
    names of these tensors identify values of the definition. Composite operators may be computed by
    several kernels, and so may values that are cheaper to compute twice.

    Returns:
        The positions; nothing if the muGraph stores something that is not a value of the
        definition, or the definition has values that are put together, which no kernel computes.
    """
    marked = _live(graph)
    if any(lookup(graph.nodes[i].operator).cuts for i in marked):
        return {}
    whole = KernelGraph(graph.nodes, marked).expanded()
    values = _values(graph, mu, whole, dict(zip(marked, whole.outputs, strict=True)))
    if values is None:
        return {}
    kernels: dict[int, dict[int, None]] = {}
    for k, step in enumerate(mu.steps):
        reads, writes = ({values[n] for n in names} for names in (step.reads, step.writes))
        reached = whole.needed(writes, given=reads)
        if any(whole.nodes[i].operator == INPUT for i in reached):
            return {}  # what it reads does not suffice
        for i in sorted(reached):  # an operator ends at its last primitive operator
            kernels.setdefault(marked[bisect_left(whole.outputs, i)], {})[k] = None
    return {i: tuple(ks) for i, ks in kernels.items() if graph.nodes[i].operator not in GIVEN}


def _live(graph: KernelGraph) -> list[int]:
    """Operators that an output depends on, in order."""
    needed = graph.needed(graph.outputs)
    return [i for i in sorted(needed) if graph.nodes[i].operator != INPUT]


def _values(
    graph: KernelGraph, mu: MuGraph, whole: KernelGraph, at: dict[int, int]
) -> dict[str, int] | None:
    """The node of the expanded graph that each tensor of the muGraph holds."""
    border = zip((*mu.inputs, *mu.outputs), (*graph.inputs, *graph.outputs), strict=True)
    inputs = dict(zip(graph.inputs, whole.inputs, strict=True))
    values = {name: inputs[i] if i in inputs else at[i] for name, i in border}
    by_name = {n.name: i for i, n in enumerate(whole.nodes)}
    for name, tensor in mu.tensors.items():
        if name in values:
            continue
        i = by_name.get(name)
        if i is None or list(map(str, whole.nodes[i].shape)) != list(map(str, tensor.shape)):
            return None
        values[name] = i
    return values


def kernel_title(
    program: BlockProgram, graph: KernelGraph | None, kernels: dict[int, tuple[int, ...]], k: int
) -> str:
    """A few words on a kernel's computation: ``rms_norm + matmul``.

    Operators of the definition if they are known, else those of the program.
    """
    if graph is not None and kernels:
        names = [graph.nodes[i].operator for i in sorted(kernels) if k in kernels[i]]
    else:
        own = (LOAD, STORE, *ENDING, "constant")
        names = [op.kind for op in program.ops if op.kind not in own]
    return operators_text(names)


def definition_title(graph: KernelGraph) -> str:
    """The operators of a definition: ``3 matmul + add``."""
    return operators_text([n.operator for n in graph.nodes if n.operator not in GIVEN])


def operators_text(names: list[str]) -> str:
    """``["matmul", "add", "matmul"]`` -> ``2 matmul + add``; "copy" without operators."""
    counts = Counter(names)
    shown = [f"{n} {name}" if n > 1 else name for name, n in list(counts.items())[:LONGEST]]
    more = [f"{len(counts) - LONGEST} more"] if len(counts) > LONGEST else []
    return " + ".join(shown + more) or "copy"
