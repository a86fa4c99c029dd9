"""The object a user holds: a kernel to call, inspect and export."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

from cutesuper.autodiff.gradient import reached
from cutesuper.errors import CutesuperError, FormatError, GraphError, frameless
from cutesuper.ir.arguments import as_path
from cutesuper.ir.block import MuGraph
from cutesuper.ir.definitions import Defined
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.serial import to_dict
from cutesuper.runtime.calling import Launches, Picker, Program, picker
from cutesuper.runtime.compile import Artifact
from cutesuper.runtime.memory import Pair, Use, homes, overwritten
from cutesuper.runtime.programs import Kept, refuse_capture
from cutesuper.runtime.resources import Resources, combine
from cutesuper.runtime.scratch import Need, ScratchMemory, places_of
from cutesuper.show.page import Facts, mugraph_page
from cutesuper.show.svg import mugraph_svg
from cutesuper.skeletons.base import Scratch
from cutesuper.skeletons.planner import KernelPlan
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.runtime.gradient import Gradient
    from cutesuper.skeletons.cost import Cost
    from cutesuper.verify.equivalence import Verification

#: upper ends of the buckets of batch sizes, one compiled variant each; larger sizes use the last
BUCKETS = (8, 16, 32, 64, 128, 512, 4096)


def bucket_of(extent: int) -> int:
    """The bucket of a symbolic extent: the least of `BUCKETS` that holds it, or the last."""
    return next((b for b in BUCKETS if extent <= b), BUCKETS[-1])


def bucketed(graph: KernelGraph) -> dict[str, int]:
    """The buckets of the hints of a graph's symbolic extents, by name."""
    dims = [d for i in graph.inputs for d in graph.nodes[i].shape]
    return {d.name: bucket_of(d.hint) for d in dims if isinstance(d, Symbol)}


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
    def resources(self) -> Resources:
        """Registers, spills, shared memory, stages, instruction mix."""
        return replace(self.artifact.resources, stages=self.plan.stages)


@dataclass(frozen=True)
class Variant:
    """A program chosen for one bucket of the symbolic extents, compiled.

    Attributes:
        mugraph: the program.
        steps: its kernels in order.
        describe: how it was found, verified, priced and compiled. Made when it is asked for: to
            disassemble a kernel takes a third of the time that compiling it takes.
        costs: predicted, one for each kernel; empty if no cost model was used.
        verification: that the program computes the graph; None if that was not checked.
        notes: the plan and the figures of every kernel in words.
        cut: why the search ended before it was complete; empty if it was.
    """

    mugraph: MuGraph
    steps: tuple[CompiledStep, ...]
    describe: Callable[[], str] = str
    costs: tuple[Cost, ...] = ()
    verification: Verification | None = None
    notes: Callable[[], Sequence[str]] = tuple[str, ...]
    cut: str = ""

    @cached_property
    def report(self) -> str:
        """The text of `describe`."""
        return self.describe()

    @cached_property
    def wiring(self) -> tuple[tuple[int, ...], ...]:
        """Places of every step's arguments among inputs, outputs, intermediates and scratch."""
        place = {name: i for i, name in enumerate(self.names)}
        scratch = itertools.count(len(self.names))
        return tuple(
            (*(place[a.given] for a in s.plan.arguments), *(next(scratch) for _ in s.plan.scratch))
            for s in self.steps
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of inputs, outputs, intermediates; parts of tensors are none of these."""
        mu = self.mugraph
        border = (*mu.inputs, *mu.outputs)
        between = (n for n, t in mu.tensors.items() if n not in border and t.part is None)
        return (*border, *between)

    @cached_property
    def intermediates(self) -> tuple[tuple[tuple[Dim, ...], Any], ...]:
        """Shape and torch dtype of every tensor between kernels."""
        mu = self.mugraph
        count = len(mu.inputs) + len(mu.outputs)
        specs = [mu.tensors[n] for n in self.names[count:]]
        return tuple((t.shape, t.dtype.torch) for t in specs)

    @cached_property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch memory of the kernels, step by step."""
        return tuple(s for step in self.steps for s in step.plan.scratch)

    @cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The loaded kernels."""
        return tuple(s.artifact.load() for s in self.steps)

    @cached_property
    def launches(self) -> Launches:
        """The loaded kernels as one callable."""
        calls = [(f, picker(places)) for f, places in zip(self.functions, self.wiring, strict=True)]
        if len(calls) != 1 or self.scratch:
            launch = partial(self._launch, calls)
            return Launches(self.intermediates, launch, self.homes, self._in_place)
        # most programs: the steps left out here take 0.6 us, half as long as the call of the kernel
        [(function, take)] = calls

        def launch(values: list[Any]) -> None:
            function(*take(values))

        return Launches(self.intermediates, launch, {}, self._in_place)

    @cached_property
    def _uses(self) -> list[Use]:
        """The tensors of every launch, scratch memory left out."""
        found: list[Use] = []
        for step, places in zip(self.steps, self.wiring, strict=True):
            sides: dict[bool, list[int]] = {False: [], True: []}
            for argument, place in zip(step.plan.arguments, places, strict=False):
                sides[argument.written].append(place)
            pairs = frozenset((places[i], places[o]) for i, o in step.plan.in_place)
            found.append(Use(frozenset(sides[False]), frozenset(sides[True]), pairs))
        return found

    @property
    def homes(self) -> dict[int, int]:
        """See `Launches.homes`."""
        first = len(self.names) - len(self.intermediates)
        sizes: dict[int, object] = {}
        for n, (shape, dtype) in enumerate(self.intermediates):
            known = prod(d for d in shape if isinstance(d, int)) * dtype.itemsize
            sizes[first + n] = known, sorted(d.name for d in shape if isinstance(d, Symbol))
        return {p - first: home - first for p, home in homes(self._uses, sizes).items()}

    @property
    def _in_place(self) -> frozenset[tuple[int, int]]:
        """See `Launches.in_place`."""
        inputs, outputs = len(self.mugraph.inputs), len(self.mugraph.outputs)
        pairs = frozenset[Pair]().union(*(use.in_place for use in self._uses))
        return frozenset(
            (i, o - inputs)
            for i, o in pairs
            if i < inputs <= o < inputs + outputs and overwritten(self._uses, i, o)
        )

    @cached_property
    def _memory(self) -> ScratchMemory:
        import torch

        tensors = [self.mugraph.tensors[n].shape for n in self.names]
        needs = [Need(s.shape, getattr(torch, s.dtype), s.zeroed) for s in self.scratch]
        return ScratchMemory(needs, places_of(tensors))

    def _launch(
        self, calls: Sequence[tuple[Callable[..., Any], Picker]], values: list[Any]
    ) -> None:
        if self.scratch:
            values = [*values, *self._memory.allot(values)]
        for function, take in calls:
            function(*take(values))


#: makes the gradient of a kernel with respect to inputs, by name
Differentiate = Callable[["Kernel", tuple[str, ...]], "Gradient"]


class Kernel(Program):
    """A superoptimized program; calling it is described in `Program`.

    Inputs that require gradients get them: the first ``backward()`` with some set of them makes two
    further programs (`gradient`), which later calls run. A derivative of a derivative is refused.
    What needs new programs, of another bucket of sizes or of gradients, is refused while a CUDA
    graph is captured.

    Attributes:
        graph: the definition.
        target: the GPU it was optimized for.

    Args:
        graph, target: as above.
        make_variant: makes the program for some hints of the symbols.
        differentiate: see `Differentiate`; None: there are no gradients.
        single: True if the program for the graph's hints serves all extents, whatever their bucket.
        deferred: False if the first call that records gradients makes their programs.
    """

    def __init__(
        self,
        graph: KernelGraph,
        target: Target,
        make_variant: Callable[[dict[str, int]], Variant],
        differentiate: Differentiate | None = None,
        *,
        single: bool = False,
        deferred: bool = True,
    ) -> None:
        super().__init__(graph, target.arch)
        self._single = single
        self._deferred = deferred
        self.target = target
        self._defined = Defined(graph, "superoptimize the graph again")
        self._make_variant = make_variant
        self._differentiate = differentiate
        self._gradients: Kept[tuple[str, ...], Gradient | GraphError] = Kept()
        self._reached: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._variants: Kept[tuple[int, ...], Variant] = Kept()
        self._main = self._variant(tuple(bucketed(graph).values()))

    def _launches(self, extents: dict[str, int]) -> Launches:
        if not extents or self._single:
            return self._main.launches
        key = tuple(bucket_of(e) for e in extents.values())
        found = self._variants.get(key)
        if found is None:
            refuse_capture(f"{self!r} with {', '.join(f'{n}={e}' for n, e in extents.items())}")
            found = self._variant(key)
        return found.launches

    def _variant(self, key: tuple[int, ...]) -> Variant:
        return self._variants.get(key) or self._variants.made(key, lambda: self._made(key))

    def _made(self, key: tuple[int, ...]) -> Variant:
        self._check_operators()
        names = [s.name for s in self._signature.symbols]
        return self._make_variant(dict(zip(names, key, strict=True)))

    def _check_operators(self) -> None:
        self._defined.check()

    def _notice_changes(self) -> None:
        self._defined.check()
        super()._notice_changes()

    # -------------------------------------------------------------------------------- gradients

    def gradient(self, *wrt: str) -> Gradient:
        """The compiled derivative: kernels to inspect, draw, export and call.

        Args:
            wrt: names of inputs; none stands for all that have a gradient.

        Returns:
            The programs run by calls in which just these inputs require gradients; compiled now if
            that has not been done.

        Raises:
            GraphError: an input without a gradient, or no kernels compute it; says why.
        """
        names = wrt or reached(self.graph)
        if not names:
            raise GraphError(
                "kernel.gradient(): no input has a gradient; its outputs are places, or depend on "
                "numbers only through operators whose derivative is zero everywhere"
            )
        order = [self.graph.nodes[i].name for i in self.graph.inputs]
        names = tuple(sorted(set(names), key=lambda n: order.index(n) if n in order else -1))
        found = self._gradients.made(names, lambda: self._derived(names))
        if isinstance(found, GraphError):
            raise GraphError(str(found)) from found.__cause__
        return found

    def _derived(self, names: tuple[str, ...]) -> Gradient | GraphError:
        self._check_operators()
        if self.graph.vacant:
            return GraphError(
                "kernel.gradient(...): a tensor of the graph has an extent of 0, so there are no "
                "kernels; call it and backward(), and PyTorch computes its gradients"
            )
        if self._differentiate is None:
            return GraphError(
                "kernel.gradient(...): a program that was given has no backward; differentiate "
                "cutesuper.superoptimize(kernel.graph)"
            )
        try:
            return self._differentiate(self, names)
        except GraphError as refusal:  # after a search of seconds, so it is kept
            return frameless(refusal)

    def _record(self, inputs: Sequence[Any], out: Any) -> list[Any]:
        names = tuple(
            n for n, t in zip(self._signature.names, inputs, strict=True) if t.requires_grad
        )
        if out is not None:
            raise self._signature.refusal(
                inputs,
                "what is written to out= has none; leave out= out, or call it under "
                "torch.no_grad()",
            )
        if not all(t.numel() for t in inputs):  # no kernels: PyTorch differentiates what there is
            return run_reference(self.graph, list(inputs))
        there = self._reached.get(names)
        if there is None:
            there = self._reached[names] = self._having_gradients(names)
        if not there:
            import torch

            with torch.no_grad():
                return self._run(inputs, None)
        from cutesuper.runtime.gradient import Deferred, recorded

        gradient = self._gradients.get(there)
        if gradient is None and not (self._deferred and self._differentiate):
            if inputs[0].is_cuda:
                self.refuse_new_gradient(there)
            gradient = self.gradient(*there)
        if gradient is None or isinstance(gradient, GraphError):
            gradient = Deferred(self, there)
        return recorded(gradient, inputs)

    def refuse_new_gradient(self, names: tuple[str, ...]) -> None:
        """Raise DeviceError for programs that would have to be made in a capture."""
        if names not in self._gradients:
            call = f"{self!r} with gradients of {', '.join(names)}"
            refuse_capture(call, "call it and backward()")

    def _having_gradients(self, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return reached(self.graph, names)
        except CutesuperError:  # `gradient` will say so
            return names

    # ---------------------------------------------------------------------------------- looking

    @property
    def variant(self) -> Variant:
        """The program for the symbols' hints, with its kernels."""
        return self._main

    @property
    def mugraph(self) -> MuGraph:
        """The program that was chosen (for the symbols' hints)."""
        return self._main.mugraph

    @property
    def predicted_us(self) -> float:
        """Microseconds of `kernels` by the cost model; 0 for a program that was given."""
        return sum(cost.total for cost in self._main.costs)

    @property
    def kernels(self) -> tuple[CompiledStep, ...]:
        """The compiled kernels of `mugraph`, in order."""
        return self._main.steps

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared memory, stages and instruction mix.
        For several kernels the largest of each, with instructions added up (`kernels` has them one
        by one)."""
        return combine([s.resources for s in self.kernels])

    @property
    def ptx(self) -> str:
        """PTX of all kernels."""
        return "\n".join(s.artifact.ptx for s in self.kernels)

    @property
    def sass(self) -> str:
        """Disassembly of all kernels.
        Raises CompileError, naming the package to install, without nvdisasm."""
        return "\n".join(s.artifact.sass for s in self.kernels)

    def explain(self) -> str:
        """Report on the chosen muGraph: the reasons, its cost, its verification, the alternatives.
        And the gradients compiled so far."""
        lines = [gradient_text(g) for g in self._gradients.values() if not isinstance(g, Exception)]
        if not lines:
            return self._main.report
        return "\n\n".join([self._main.report, "== gradients ==\n" + "\n".join(lines)])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the muGraph as a picture.

        Args:
            path: ends in ``.html`` or ``.htm``: an interactive page with the definition, the block
                program of every kernel, its traffic and predicted time; it needs no other file and
                no network. In ``.svg``: the block programs as a picture.

        Raises:
            FormatError: ``path`` is not the name of a file, ends otherwise, or cannot be written.
        """
        from pathlib import Path

        file = Path(as_path("draw", path))
        if file.suffix.lower() in (".html", ".htm"):
            variant, target = self._main, f"{self.target.name} ({self.target.arch})"
            verified = variant.verification
            said = (verified.summary(), verified.bound_log2) if verified else ("", None)
            facts = Facts(self.graph, target, variant.costs, *said, variant.notes())
            text = mugraph_page(variant.mugraph, facts)
        elif file.suffix.lower() == ".svg":
            text = mugraph_svg(self.mugraph)
        else:
            raise FormatError(
                f"draw: {file}: pictures are drawn as SVG, pages as HTML; let the name end in .svg "
                "or .html (a browser or rsvg-convert makes a PNG of an SVG picture)"
            )
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FormatError(f"draw: cannot write {file}: {error.strerror or error}") from error

    def export(
        self,
        path: str | os.PathLike[str],
        *others: Kernel,
        header: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a self-contained shared library that `cutesuper.load` reads back.

        It needs neither CuTe DSL nor a compiler to run, and the GPU that it is for is not needed to
        write it. With symbolic extents it holds the variant for the symbols' hints, which computes
        every batch size.

        Args:
            path: the file.
            others: the same graph, optimized for other architectures; the program for the current
                GPU is chosen when the library is loaded.
            header: of a file to write for programs in C and C++: the library then has functions
                called after it, ``x_run`` and others for ``x.h``, that run everything.

        Raises:
            FormatError: ``path`` is not the name of a file, or ``header`` no name in C.
            OptionError: functions of C for programs of several architectures.
            GraphError: another one is of another graph, or there are no kernels.
            CompileError: two for one architecture, no C compiler or no static CUDA runtime to link
                with, or the file cannot be written.
        """
        from cutesuper.runtime.program import export_program

        if self.graph.vacant:
            raise GraphError(
                f"export {self!r}: a tensor of its graph has an extent of 0, so there are no "
                "kernels to write; leave it out of what is exported"
            )
        if any(to_dict(other.graph) != to_dict(self.graph) for other in others):
            raise GraphError(f"export {self!r}, {', '.join(map(repr, others))}: they compute "
                             "different graphs; give programs of one graph")  # fmt: skip
        export_program(self.graph, [k._main for k in (self, *others)], path, header)

    def __repr__(self) -> str:
        names = ", ".join(s.name for s in self.kernels)
        count = f"{len(self.kernels)} kernel(s): {names}" if names else "no kernels"
        return f"Kernel({count}; {self.target.name})"


def gradient_text(gradient: Gradient) -> str:
    """One line on a gradient: kept values, number of kernels, and the call that explains them."""
    kept = ", ".join(gradient.split.saved) or "nothing"
    call = f"kernel.gradient({', '.join(map(repr, gradient.wrt))})"
    made = gradient.backward
    rest = f"{len(made.kernels)} kernel(s), see {call}.backward.explain()" if made else (
        "none is needed")  # fmt: skip
    return (
        f"{', '.join(gradient.wrt)}: forward keeps {kept}, see {call}.forward.explain(); "
        f"backward: {rest}"
    )
