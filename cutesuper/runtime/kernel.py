"""The object a user holds: call it, look into it, export it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutesuper.errors import CutesuperError, DeviceError, GraphError
from cutesuper.graph.block import MuGraph
from cutesuper.graph.dims import Dim, Symbol
from cutesuper.graph.evaluate import run_reference
from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.target import Target
from cutesuper.runtime.checks import Signature
from cutesuper.runtime.compile import Artifact
from cutesuper.runtime.resources import Resources
from cutesuper.schedule.matmul import MatmulPlan
from cutesuper.schedule.planner import KernelPlan

if TYPE_CHECKING:
    import torch

#: upper ends of the batch sizes that share one compiled variant; beyond the last, the last
BUCKETS = (8, 16, 32, 64, 128, 512, 4096)


def bucket_of(extent: int) -> int:
    """The bucket of a symbolic extent: the least of `BUCKETS` that holds it, or the last."""
    return next((b for b in BUCKETS if extent <= b), BUCKETS[-1])


@dataclass(frozen=True)
class CompiledStep:
    """One compiled kernel of a program."""

    plan: KernelPlan
    artifact: Artifact

    @property
    def name(self) -> str:
        """Short name of the kernel."""
        return self.artifact.name

    @property
    def stages(self) -> int:
        """Slots of the shared-memory ring; 1 where operands go straight to registers."""
        return self.plan.schedule.stages if isinstance(self.plan, MatmulPlan) else 1

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared memory, instruction mix."""
        return self.artifact.resources


@dataclass(frozen=True)
class Variant:
    """A program chosen for one bucket of the symbolic extents, compiled.

    Attributes:
        mugraph: the program.
        steps: its kernels in order.
        report: how it was found, verified and priced; what `Kernel.explain` prints.
    """

    mugraph: MuGraph
    steps: tuple[CompiledStep, ...]
    report: str

    @cached_property
    def wiring(self) -> tuple[tuple[int, ...], ...]:
        """For every step the places of its arguments among inputs, outputs, intermediates."""
        place = {name: i for i, name in enumerate(self.names)}
        return tuple(tuple(place[a.name] for a in s.plan.arguments) for s in self.steps)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Inputs, outputs, intermediates."""
        mu = self.mugraph
        border = (*mu.inputs, *mu.outputs)
        return (*border, *(n for n in mu.tensors if n not in border))

    @cached_property
    def intermediates(self) -> tuple[tuple[tuple[Dim, ...], Any], ...]:
        """Shape and torch dtype of every tensor between kernels."""
        mu = self.mugraph
        count = len(mu.inputs) + len(mu.outputs)
        specs = [mu.tensors[n] for n in self.names[count:]]
        return tuple((t.shape, t.dtype.torch) for t in specs)

    @cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The loaded kernels."""
        return tuple(s.artifact.load() for s in self.steps)


class Kernel:
    """A superoptimized program.

    ``kernel(x, w)`` takes torch tensors and returns a tensor (a tuple for several outputs);
    ``kernel([x, w])`` and ``kernel(inputs=[x, w])`` return a list. On CUDA tensors the compiled
    kernels run on the current stream; calls can be captured into CUDA graphs. On CPU tensors the
    reference executor runs. ``out=`` receives the results in place of new tensors.

    Attributes:
        graph: the definition.
        target: the GPU it was optimized for.
    """

    def __init__(
        self,
        graph: KernelGraph,
        target: Target,
        make_variant: Callable[[dict[str, int]], Variant],
    ) -> None:
        self.graph = graph
        self.target = target
        self._make_variant = make_variant
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._signature = Signature(graph)
        self._devices: set[int] = set()
        hints = {s.name: s.hint for s in self._signature.symbols}
        self._main = self._variant(tuple(bucket_of(h) for h in hints.values()))

    # ---------------------------------------------------------------------------------- calling

    def __call__(
        self,
        *args: Any,
        inputs: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Run the program.

        Args:
            args: one tensor per input, or a single list of them.
            inputs: the same as a keyword.
            out: tensors that receive the outputs; contiguous, not overlapping an input.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: an argument that does not fit; the
                message names it. Nothing has run then.
        """
        as_list = inputs is not None
        if inputs is None:
            as_list = len(args) == 1 and isinstance(args[0], list | tuple)
            inputs = args[0] if as_list else args
        elif args:
            raise GraphError("kernel(...): give the inputs either by position or as inputs=, once")
        results = self._run(inputs, out)
        if as_list:
            return results
        return results[0] if len(results) == 1 else tuple(results)

    def _run(self, inputs: Sequence[Any], out: Any) -> list[Any]:
        signature = self._signature
        extents = signature.bind(inputs)
        device = inputs[0].device
        if device.type != "cuda":
            return self._run_on_cpu(inputs, out, extents)
        variant = self._main
        if extents:
            variant = self._variant(tuple(bucket_of(e) for e in extents.values()))
        if device.index not in self._devices:
            self._admit(device)
        import torch

        if out is None:
            outputs = [
                torch.empty(shape, dtype=dtype, device=device)
                for shape, dtype in signature.output_shapes(extents)
            ]
        else:
            outputs = signature.check_out(out, inputs, extents)
        values = [*inputs, *outputs]
        for shape, dtype in variant.intermediates:
            known = [extents[d.name] if isinstance(d, Symbol) else d for d in shape]
            values.append(torch.empty(known, dtype=dtype, device=device))
        if device.index == torch.cuda.current_device():
            self._launch(variant, values)
        else:
            with torch.cuda.device(device):
                self._launch(variant, values)
        return outputs

    @staticmethod
    def _launch(variant: Variant, values: list[Any]) -> None:
        for function, places in zip(variant.functions, variant.wiring, strict=True):
            function(*[values[i] for i in places])

    def _run_on_cpu(self, inputs: Sequence[Any], out: Any, extents: dict[str, int]) -> list[Any]:
        results = run_reference(self.graph, list(inputs))
        if out is None:
            return results
        outputs = self._signature.check_out(out, inputs, extents)
        for o, r in zip(outputs, results, strict=True):
            o.copy_(r)
        return outputs

    def _admit(self, device: Any) -> None:
        """Check once for each device that the compiled code can run there."""
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        have, need = f"sm_{major}{minor}", self.target.arch.rstrip("af")
        if have != need:
            raise DeviceError(
                f"kernel for {self.target.name} ({need}) called with tensors on {device} ({have}); "
                "superoptimize on that GPU, or pass its name as target="
            )
        self._devices.add(device.index)

    def _variant(self, key: tuple[int, ...]) -> Variant:
        if key not in self._variants:
            names = [s.name for s in self._signature.symbols]
            self._variants[key] = self._make_variant(dict(zip(names, key, strict=True)))
        return self._variants[key]

    # ---------------------------------------------------------------------------------- looking

    @property
    def mugraph(self) -> MuGraph:
        """The program that was chosen (for the symbols' hints)."""
        return self._main.mugraph

    @property
    def kernels(self) -> tuple[CompiledStep, ...]:
        """The compiled kernels of `mugraph`, in order."""
        return self._main.steps

    @property
    def resources(self) -> dict[str, Resources]:
        """Registers, spills, shared memory and instruction mix by kernel name."""
        return {s.name: s.resources for s in self.kernels}

    @property
    def ptx(self) -> str:
        """PTX of all kernels."""
        return "\n".join(s.artifact.ptx for s in self.kernels)

    @property
    def sass(self) -> str:
        """Disassembly of all kernels. Raises CompileError, saying what to install, without
        nvdisasm."""
        return "\n".join(s.artifact.sass for s in self.kernels)

    def explain(self) -> str:
        """Which muGraph, why, what it costs, how it was verified, and what the alternatives were."""
        return self._main.report

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the muGraph as an SVG picture."""
        from pathlib import Path

        from cutesuper.graph.draw import mugraph_svg

        Path(path).write_text(mugraph_svg(self.mugraph), encoding="utf-8")

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained shared library that `cutesuper.load` reads back.

        It needs neither CuTe DSL nor a compiler to run. With symbolic extents it holds the variant
        for the symbols' hints, which computes every batch size.

        Raises:
            CompileError: no C compiler or no static CUDA runtime to link with.
        """
        from cutesuper.runtime.program import export_program

        export_program(self.graph, self._main, path)

    def __repr__(self) -> str:
        names = ", ".join(s.name for s in self.kernels)
        return f"Kernel({len(self.kernels)} kernel(s): {names}; {self.target.name})"


__all__ = ["BUCKETS", "CompiledStep", "CutesuperError", "Kernel", "Variant", "bucket_of"]
