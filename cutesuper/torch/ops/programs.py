"""Programs on a device with the inputs that their outputs may replace.
For callers that write sums and parameters in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.calling import Launches, Runner, launcher, reference_of
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept

#: programs that are kept, and kernels, which GPUs of one name share
KEPT = 1024


@dataclass(frozen=True)
class Program:
    """A program on one device.

    Attributes:
        graph: its definition.
        run: computes the outputs from the inputs.
        in_place: index of an input and of an output that may be one tensor; None: any.
    """

    graph: KernelGraph
    run: Runner
    in_place: frozenset[tuple[int, int]] | None

    @cached_property
    def names(self) -> list[str]:
        """Names of the inputs."""
        return [self.graph.nodes[i].name for i in self.graph.inputs]

    def replaces(self, name: str, output: int) -> bool:
        """True if an output may be written to the tensor with this name, which need be no input."""
        if self.in_place is None or name not in self.names:
            return True
        return (self.names.index(name), output) in self.in_place


_programs: Kept[tuple[object, ...], Program] = Kept(KEPT)
_kernels: Kept[tuple[object, ...], Launches] = Kept(KEPT)


def program_of(
    call: str,
    kind: object,
    make: Callable[[], KernelGraph],
    device: torch.device,
    scattered: tuple[str, ...] = (),
) -> Program:
    """The program of a kind of calls on a device.
    Kernels on a GPU, the reference executor elsewhere.

    Args:
        call: the operator, for messages.
        kind: names the graph, together with ``call``.
        make: makes the graph, with one symbol at most, the number of rows.
        device: of the call.
        scattered: see `cutesuper.pipeline.best_variant`.

    Raises:
        DeviceError: kernels would have to be made while a CUDA graph is captured.
        CutesuperError: from `cutesuper.superoptimize`.
    """
    key = (call, kind, TABLE.changes, device)

    def program() -> Program:
        graph = make()
        if device.type not in KERNEL_DEVICES:
            return Program(graph, reference_of(graph), None)
        made = _kernels.made_on(device, (call, kind), call, lambda: _launches(graph, scattered))
        return Program(graph, launcher(made, device), made.in_place)

    return _programs.get(key) or _programs.made(key, program)


def _launches(graph: KernelGraph, scattered: tuple[str, ...]) -> Launches:
    from cutesuper.pipeline import best_variant

    return best_variant(graph, scattered=scattered).launches
