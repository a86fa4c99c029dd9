"""Softmaxes written without a maximum, given one: ``exp(x) / sum(exp(x))`` of the scores x.

The exponentials of scores are multiplied by values in 16 bits, and float16 cannot hold them where
scores are large. Shifted by the maximum of their row they are at most 1, and the quotient is the
same (arXiv:1805.02867, section 2). Positions are known to the loop of attention only, so that
without this a masked softmax in float16 has no kernel.

before: ``e = exp(mask(Q K))``, ``div(e, sum(e)) @ V``; after: ``e = exp(s - max(s))`` with
``s = mask(Q K)``. Like every result, the program is verified against the graph as the user wrote
it.
"""

from __future__ import annotations

from cutesuper.ir.graph import KernelGraph, Tensor


def shifted(graph: KernelGraph) -> KernelGraph | None:
    """The program with the maximum of a row subtracted in softmaxes that have none.

    Args:
        graph: primitive operators only.

    Returns:
        None if there is no such softmax.
    """
    dims = _softmaxes(graph)
    if not dims:
        return None
    new, values = KernelGraph(), list[Tensor]()
    for i, n in enumerate(graph.nodes):
        args = [values[j] for j in n.inputs]
        if i in dims:
            args = [new.sub(args[0], new.max(args[0], dims[i]))]
        values.append(new.copy_node(graph, i, args))
    for i in graph.outputs:
        new.mark_output(values[i], graph.nodes[i].dtype)
    return new


def _softmaxes(graph: KernelGraph) -> dict[int, int]:
    """The exponentials of a softmax that are not shifted yet, with the dimension of its sum."""
    users: dict[int, list[int]] = {}
    for i, n in enumerate(graph.nodes):
        for j in n.inputs:
            users.setdefault(j, []).append(i)
    found: dict[int, int] = {}
    for i, n in enumerate(graph.nodes):
        if n.facets.exponential and not graph.nodes[n.inputs[0]].facets.subtracts:
            total = _sum_of(graph, users, i)
            if total is not None and not {i, total} & set(graph.outputs):
                found[i] = graph.nodes[total].attributes["dim"]
    return found


def _sum_of(graph: KernelGraph, users: dict[int, list[int]], e: int) -> int | None:
    """The sum of ``div(e, sum(e))``, if that is all that e is used for; None otherwise."""
    for total in users.get(e, ()):
        if not graph.nodes[total].facets.sums or len(users.get(total, ())) != 1:
            continue
        [quotient] = users[total]
        node = graph.nodes[quotient]
        if node.facets.divides and node.inputs == (e, total):
            return total if set(users[e]) == {total, quotient} else None
    return None
