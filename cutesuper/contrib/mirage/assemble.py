"""muGraphs from translated kernels: names, and the shapes of tensors between kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cutesuper.contrib.mirage.document import Document, Tensor
from cutesuper.contrib.mirage.program import Access, Translated
from cutesuper.ir.block import KernelStep, MuGraph, TensorSpec

#: names of inputs, in the order of the builder of kernel graphs
_LETTERS = "XWABCDEFGHIJKLMNOPQRSTUVYZ"


def assemble(document: Document, kernels: Sequence[Translated]) -> MuGraph:
    """The muGraph of a document.

    A tensor between kernels gets a dimension for each part into which all kernels divide one of its
    dimensions; its elements do not move.

    before: T[2, 256, 512], stored as ``(N.grid 8, J 64)`` and loaded as ``(S 8, J 64)`` along its
    last dimension; after: T[2, 256, 8, 64].

    Args:
        document: with inputs and outputs, whose shapes stay.
        kernels: of its operators, in order.
    """
    made = [t for op in document.operators for t in op.outputs]
    names = {t.guid: _input_name(i) for i, t in enumerate(document.inputs)}
    names |= {t.guid: f"t{i}" for i, t in enumerate(made)}
    outside = {t.guid for t in (*document.inputs, *document.outputs)}
    accesses = [a for k in kernels for a in k.accesses]
    divided = {
        t.guid: _divided([a for a in accesses if a.tensor.guid == t.guid])
        for t in made
        if t.guid not in outside
    }
    specs = [
        TensorSpec(names[t.guid], _shape(t, divided.get(t.guid, {})), t.dtype)
        for t in (*document.inputs, *made)
    ]
    steps = tuple(
        KernelStep(f"k{i}", _with_maps(kernel, names, divided)) for i, kernel in enumerate(kernels)
    )
    inputs = tuple(names[t.guid] for t in document.inputs)
    outputs = tuple(names[t.guid] for t in document.outputs)
    return MuGraph({s.name: s for s in specs}, inputs, outputs, steps)


def _input_name(i: int) -> str:
    return _LETTERS[i] if i < len(_LETTERS) else f"I{i}"


def _divided(accesses: Sequence[Access]) -> dict[int, tuple[int, ...]]:
    """Dimensions that every access divides in the same way, and the division."""
    ways = zip(*(a.divided for a in accesses), strict=True)
    return {d: way[0] for d, way in enumerate(ways) if len(way[0]) > 1 and len(set(way)) == 1}


def _shape(t: Tensor, divided: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(n for d, whole in enumerate(t.shape) for n in divided.get(d, (whole,)))


def _with_maps(
    kernel: Translated, names: dict[int, str], divided: dict[int, dict[int, tuple[int, ...]]]
) -> Any:
    ops = list(kernel.program.ops)
    for a in kernel.accesses:
        tensor = a.tensor.guid
        mapping = _map(a, divided.get(tensor, {}))
        ops[a.op] = replace(ops[a.op], attributes={"tensor": names[tensor], "map": mapping})
    return replace(kernel.program, ops=tuple(ops))


def _map(a: Access, divided: dict[int, tuple[int, ...]]) -> tuple[Any, ...]:
    result: list[Any] = []
    for d, entries in enumerate(a.entries):
        labels = tuple(name for name, _ in entries)
        if len(labels) < 2:
            result.append(labels[0] if labels else None)
        elif d in divided:
            result += labels
        else:
            result.append(labels)
    return tuple(result)
