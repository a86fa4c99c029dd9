"""Programs of a kind of calls, and the kernels that are kept for them.

The forward pass has two forms, with and without the values that the backward pass needs. The
backward pass has one for each set of gradients that is requested.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch

from cutesuper.autodiff.gradient import Split, split
from cutesuper.errors import DeviceError
from cutesuper.ir.dims import Symbol
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.ir.subgraph import only
from cutesuper.ops.definition import Definition, Kind, Role
from cutesuper.runtime.calling import Launches
from cutesuper.targets import H200
from cutesuper.targets.settings import Decision, Settings

#: the number of rows for which the kernels of a class of calls are optimized, which share them
_SETTINGS = Settings("ops", {"rows": Decision(("rows",), {"hint": 16384})})
#: numbers of rows whose class is remembered
_KNOWN_ROWS = 4096

#: forms whose kernels are kept; the oldest is dropped first
KEPT_PROGRAMS = 1024

#: takes inputs and outputs of a graph and the number of rows, and computes the outputs
Runner = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]


@lru_cache(maxsize=_KNOWN_ROWS)
def rows_class(rows: int) -> int:
    """The number of rows for which the kernels of a call are optimized; as measured on one
    architecture, since graphs are made before a device is known."""
    return _SETTINGS.choose(H200, "rows", rows=rows)["hint"]


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


def programs_of(definition: Definition, kind: Kind, hint: int) -> Programs:
    """The graphs of a kind, optimized for this number of rows, with the operators now defined."""
    return _programs_of(definition, kind, hint, TABLE.changes)


@lru_cache(maxsize=KEPT_PROGRAMS)
def _programs_of(definition: Definition, kind: Kind, hint: int, changes: int) -> Programs:
    del changes
    return Programs(definition, kind, hint)


# ----------------------------------------------------------------------------------------- kernels

#: by definition of the program, its hint and the name of the GPU
_kernels: dict[tuple[object, ...], Launches] = {}
_lock = threading.Lock()


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
    if device.type != "cuda":
        return reference_of(graph)
    full = (*key, TABLE.changes, torch.cuda.get_device_name(device))
    with _lock:
        if full not in _kernels:
            _kernels[full] = _made(str(key[0]), graph, device)
            if len(_kernels) > KEPT_PROGRAMS:
                del _kernels[next(iter(_kernels))]
        return launcher(_kernels[full], device)


def reference_of(graph: KernelGraph) -> Runner:
    """The reference executor for a graph, in the operators that kernels compute."""
    graph = graph.expanded()

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rows: int) -> None:
        del rows
        for out, result in zip(outputs, run_reference(graph, inputs), strict=True):
            out.copy_(result)

    return run


def launcher(launches: Launches, device: torch.device) -> Runner:
    """Kernels with memory for the tensors between them, on a device."""
    launch, between, index = launches.launch, launches.intermediates, device.index
    # torch.cuda.current_device() without the check that CUDA is initialized: there are tensors
    current = torch._C._cuda_getDevice

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rows: int) -> None:
        if index != current():
            with torch.cuda.device(device):
                return run(inputs, outputs, rows)
        values = inputs + outputs
        for shape, dtype in between:
            known = [rows if isinstance(d, Symbol) else d for d in shape]
            values.append(torch.empty(known, dtype=dtype, device=device))
        return launch(values)

    return run


def _made(name: str, graph: KernelGraph, device: torch.device) -> Launches:
    from cutesuper.pipeline import best_variant

    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"{name}: its first call with arguments of this kind falls into the capture of a CUDA "
            "graph, where kernels cannot be loaded; call it once before"
        )
    with torch.cuda.device(device):
        return best_variant(graph).launches


__all__ = [
    "Backward",
    "Programs",
    "Runner",
    "Source",
    "launcher",
    "programs_of",
    "reference_of",
    "rows_class",
    "runner_of",
]
