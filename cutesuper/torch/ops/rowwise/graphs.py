"""Programs of a kind of calls, and the kernels that are kept for them.

The forward pass has two forms, with and without the values that the backward pass needs. The
backward pass has one for each set of gradients that is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from cutesuper.autodiff.gradient import Split, split
from cutesuper.ir.dims import Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.subgraph import only
from cutesuper.runtime.calling import Launches, Runner, launcher, reference_of
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept
from cutesuper.torch.ops.rowwise.definition import Definition, Kind, Role

#: the number of rows for which the kernels of a class of calls are optimized, which share them
#: programs whose graphs, and whose kernels, are kept
KEPT_PROGRAMS = 1024


@dataclass(frozen=True)
class Source:
    """The source of an input of the backward pass.

    Attributes:
        side: an operand, an output of the forward pass (a result, or another saved value), or the
            cotangent of a result.
        place: its index there.
    """

    side: Literal["operand", "output", "cotangent"]
    place: int

    def role(self, definition: Definition) -> Role | None:
        """Its role; None for values that are saved besides operands and results."""
        if self.side == "operand":
            return definition.operands[self.place].role
        there = self.place < len(definition.outputs)
        return definition.outputs[self.place].role if there else None


@dataclass(frozen=True)
class Backward:
    """A backward pass.

    Attributes:
        graph: None if every gradient is a cotangent.
        inputs: sources of the graph's inputs.
        gradients: for each operand the output of ``graph``, or the cotangent that is its gradient;
            None if it has none, or none was requested.
    """

    graph: KernelGraph | None
    inputs: tuple[Source, ...]
    gradients: tuple[int | Source | None, ...]


class Programs:
    """The graphs of a kind.

    Attributes:
        definition: the operator.
        kind: of its calls.
        plain: the forward pass.
        differentiable: whether each operand can have a gradient.
    """

    def __init__(self, definition: Definition, kind: Kind, hint: int) -> None:
        self.definition = definition
        self.kind = kind
        self.plain, self._built = kind.graph(definition, Symbol("M", hint))
        self.differentiable = tuple(
            i is not None and not o.labels
            for o, i in zip(definition.operands, kind.inputs, strict=True)
        )

    @cached_property
    def _split(self) -> Split:
        return self._split_for(self.plain.outputs)

    def _split_for(self, outputs: Sequence[int]) -> Split:
        wrt = [o.name for o, d in zip(self.definition.operands, self.differentiable, strict=True)
               if d]  # fmt: skip
        ends = [self.plain.tensor(i) for i in outputs]
        return split(self.plain, wrt, save=list(self._built.saved), outputs=ends)

    @property
    def saving(self) -> KernelGraph:
        """The forward pass with the saved values as further outputs."""
        return self._split.forward

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Everything besides cotangents that any backward pass needs."""
        return tuple(s for s in self._sources(self._split) if s.side != "cotangent")

    def _sources(self, halves: Split) -> list[Source]:
        operands = {o.name: n for n, o in enumerate(self.definition.operands)}
        found: list[Source] = []
        for i in halves.backward.inputs:
            name = halves.backward.nodes[i].name
            if name in operands:
                found.append(Source("operand", operands[name]))
            elif name in halves.saved:
                found.append(Source("output", halves.saved[name]))
            else:
                found.append(Source("cotangent", halves.cotangents[name]))
        return found

    def backward(self, needs: tuple[bool, ...], given: tuple[bool, ...]) -> Backward:
        """The backward pass for some gradients, from the cotangents that exist.

        Args:
            needs: for each operand, whether its gradient is requested.
            given: for each result, whether it has a cotangent, if kernels without one are made
                (`Output.often_unused`).
        """
        ends = [i for i, g in zip(self.plain.outputs, given, strict=True) if g]
        halves = self._split if all(given) else self._split_for(ends)
        sources = self._sources(halves)
        places = [halves.gradients[o.name] if n else None
                  for o, n in zip(self.definition.operands, needs, strict=True)]  # fmt: skip
        outputs = list(dict.fromkeys(p for p in places if isinstance(p, int)))
        gradients: list[int | Source | None] = []
        for p in places:
            p = Source("cotangent", halves.cotangents[p]) if isinstance(p, str) else p
            gradients.append(outputs.index(p) if isinstance(p, int) else p)
        if not outputs:
            return Backward(None, (), tuple(gradients))
        graph, kept = only(halves.backward, outputs)
        return Backward(graph, tuple(sources[n] for n in kept), tuple(gradients))


_graphs: Kept[tuple[Definition, Kind, int, int], Programs] = Kept(KEPT_PROGRAMS)


def programs_of(definition: Definition, kind: Kind, hint: int) -> Programs:
    """The graphs of a kind, optimized for this number of rows, with the operators now defined."""
    key = (definition, kind, hint, TABLE.changes)
    return _graphs.made(key, lambda: Programs(definition, kind, hint))


# ----------------------------------------------------------------------------------------- kernels

#: by the names of graphs
_kernels: Kept[tuple[object, ...], Launches] = Kept(KEPT_PROGRAMS)


def runner_of(key: tuple[object, ...], graph: KernelGraph, device: torch.device) -> Runner:
    """The runner of a graph: kernels on a GPU, the reference executor elsewhere.

    Args:
        key: names the graph.
        graph: with one symbol at most, the number of rows.
        device: of the call.

    Raises:
        DeviceError: kernels would have to be made while a CUDA graph is captured.
        CutesuperError: from `cutesuper.superoptimize`.
    """
    if device.type not in KERNEL_DEVICES:
        return reference_of(graph)
    made = _kernels.made_on(device, key, str(key[0]), lambda: _launches(graph))
    return launcher(made, device)


def _launches(graph: KernelGraph) -> Launches:
    from cutesuper.pipeline import best_variant

    return best_variant(graph).launches
