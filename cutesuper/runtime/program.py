"""Whole programs as shared libraries: `export_program` writes one, `load` reads it back to call.

`cutesuper.runtime.export` holds the kernels; this module connects them to a program, one for each
architecture. Metadata ``program``, where a shape is a list of extents, symbols by name::

    {"graph": {...},                       # the kernel graph, see cutesuper.ir.serial
     "inputs": [{"name": "X", "shape": ["M", 4096], "dtype": "float16"}, ...],
     "outputs": [...], "intermediates": [...],
     "scratch": [{"name": "scratch0", "shape": ["M", 4], "dtype": "int32", "zeroed": true}, ...],
     "steps": [{"kernel": 0, "places": [0, 1, 2]}, ...],
     "report": "...",                      # how the program was found
     "operators": {"softplus": "<hash>"}}  # that were added, see cutesuper.ir.definitions

``places`` gives the tensor of each argument of a kernel: inputs, then outputs, then intermediates,
then scratch memory, which belongs to one step each and has one dimension for the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from cutesuper.errors import (
    CompileError,
    CutesuperError,
    FormatError,
    OperatorError,
    OptionError,
    ShapeError,
)
from cutesuper.ir import serial
from cutesuper.ir.arguments import as_path
from cutesuper.ir.definitions import added, definition, names_of
from cutesuper.ir.dims import Dim, Shape, Symbol, Tiles
from cutesuper.ir.dtypes import ALL
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime.arguments import RawTensor
from cutesuper.runtime.c_interface import Interface, Step, Wiring, c_interface, name_of
from cutesuper.runtime.calling import Launches, Program
from cutesuper.runtime.checks import ALIGNMENT
from cutesuper.runtime.export import Part, export_library
from cutesuper.runtime.library import CompactLaunch, ExportedLibrary, fits_compact, read_metadata
from cutesuper.runtime.private import replace_file
from cutesuper.runtime.scratch import Need, ScratchMemory, places_of

if TYPE_CHECKING:
    from cutesuper.runtime.compile import Artifact
    from cutesuper.runtime.kernel import Variant


# --- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linked:
    """A program for one architecture, ready to be written.

    Attributes:
        wiring: its steps count through ``artifacts``.
        artifacts: the kernels.
        program: the rest of the metadata.
    """

    wiring: Wiring
    artifacts: Sequence[Artifact]
    program: Mapping[str, Any]

    @property
    def part(self) -> Part:
        """The kernels, with all metadata for `load`."""
        w = self.wiring
        steps = [{"kernel": s.kernel, "places": list(s.places)} for s in w.steps]
        told = {"inputs": w.inputs, "outputs": w.outputs, "intermediates": w.between,
                "scratch": w.scratch, "steps": steps, **self.program}  # fmt: skip
        return Part(self.artifacts, told)

    def interface(self, name: str) -> Interface:
        """The functions of C that run it, called after a name."""
        kernels = [
            {"arguments": a.plain().meta["arguments"], "outputs": list(a.request.outputs)}
            for a in self.artifacts
        ]
        return c_interface(name, self.wiring, kernels)


def export_program(
    graph: KernelGraph,
    variants: Sequence[Variant],
    path: str | os.PathLike[str],
    header: str | os.PathLike[str] | None = None,
) -> None:
    """Write all kernels of programs of one graph, and the metadata for `load`, to ``path``.

    Args:
        graph: the definition.
        variants: one for each architecture.
        path: of the library.
        header: of a file to write, which declares functions of C (`runtime.c_interface`).

    Raises:
        FormatError: ``header`` has no name that functions can be called after.
        OptionError: a header, and several programs.
        CompileError: two programs for one architecture, no C compiler or no static CUDA runtime to
            link with, or ``path`` cannot be written.
    """
    write_programs([_linked(graph, variant) for variant in variants], path, header)


def _linked(graph: KernelGraph, variant: Variant) -> Linked:
    artifacts: dict[str, Artifact] = {}
    wiring = wired(graph, variant, artifacts)
    program = {
        "graph": serial.to_dict(graph),
        "report": variant.report,
        "operators": {name: definition(TABLE[name]) for name in added(names_of(graph))},
    }
    return Linked(wiring, list(artifacts.values()), program)


def write_programs(
    programs: Sequence[Linked],
    path: str | os.PathLike[str],
    header: str | os.PathLike[str] | None,
) -> None:
    """Write programs to a library, and the header to call the only one from C.

    Args:
        programs: one for each architecture.
        path: as for `export_program`.
        header: as for `export_program`.

    Raises:
        FormatError, OptionError, CompileError: as `export_program`.
    """
    parts = [program.part for program in programs]
    if header is None:
        return export_library(parts, path)
    if len(programs) > 1:
        raise OptionError(
            f"export(header={str(header)!r}): functions of C run a program for one architecture, "
            f"and there are {len(programs)}; write a library for each"
        )
    file = Path(as_path("export", header))
    interface = programs[0].interface(name_of(file))
    export_library(parts, path, interface)
    try:
        replace_file(file, interface.header.encode())
    except OSError as error:
        raise CompileError(f"export: cannot write {file}: {error.strerror or error}") from error


def wired(graph: KernelGraph, variant: Variant, artifacts: dict[str, Artifact]) -> Wiring:
    """The wiring of a program.
    Its kernels are added to ``artifacts``, by digest: one that is launched twice is stored once."""
    artifacts.update((s.artifact.digest, s.artifact) for s in variant.steps)
    kernels = list(artifacts)
    border = _border(graph)
    first = len(border["inputs"]) + len(border["outputs"])
    specs = [variant.mugraph.tensors[n] for n in variant.names[first:]]
    between = [_tensor(t.name, t.shape, t.dtype.name) for t in specs]
    scratch: list[dict[str, Any]] = [
        {"name": f"scratch{n}", "shape": _tiles(s.shape), "dtype": s.dtype, "zeroed": s.zeroed}
        for n, s in enumerate(variant.scratch)
    ]
    shapes: list[list[Any]] = [
        t["shape"] for t in (*border["inputs"], *border["outputs"], *between, *scratch)
    ]
    return Wiring(
        inputs=border["inputs"],
        outputs=border["outputs"],
        between=between,
        scratch=scratch,
        steps=[
            Step(kernels.index(step.artifact.digest), places, [shapes[p] for p in places])
            for step, places in zip(variant.steps, variant.wiring, strict=True)
        ],
        homes={first + n: first + home for n, home in variant.homes.items()},
        continued={len(border["inputs"]) + n: k for n, k in graph.continued.items()},
    )


def _border(graph: KernelGraph) -> dict[str, list[dict[str, Any]]]:
    """The inputs and outputs in the form of the metadata."""
    sides = {"inputs": graph.inputs, "outputs": graph.outputs}
    return {
        side: [_tensor(n.name, n.shape, n.dtype.name) for n in (graph.nodes[i] for i in indices)]
        for side, indices in sides.items()
    }


def _tensor(name: str, shape: Shape, dtype: str) -> dict[str, Any]:
    extents = [d.name if isinstance(d, Symbol) else d for d in shape]
    return {"name": name, "shape": extents, "dtype": dtype}


def _tiles(shape: Sequence[Dim | Tiles]) -> list[Any]:
    """Extents of scratch memory, tiles of a symbolic one as ``["L", 64]``."""
    named = [d.name if isinstance(d, Symbol) else d for d in shape]
    return [[d.symbol.name, d.tile] if isinstance(d, Tiles) else d for d in named]


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The checked metadata of a program.

    Attributes:
        graph: the definition.
        tensors: inputs, outputs, intermediates as ``{"name", "shape", "dtype"}``.
        scratch: memory of single steps, with ``"zeroed"`` besides.
        steps: for every launch the kernel and the places of its arguments.
        report: how the program was found.
        operators: definitions of those that the package does not have.
    """

    graph: KernelGraph
    tensors: list[dict[str, Any]]
    scratch: list[dict[str, Any]]
    steps: list[tuple[int, list[int]]]
    report: str
    operators: dict[str, Any]

    def intermediates(self) -> list[tuple[Shape, Any]]:
        """Shape and torch dtype of every tensor between kernels."""
        border = len(self.graph.inputs) + len(self.graph.outputs)
        return [(self._shape(t), ALL[t["dtype"]].torch) for t in self.tensors[border:]]

    def memory(self) -> ScratchMemory:
        """The allocator of the steps' scratch memory."""
        import torch

        needs = [
            Need(self._tiled(s), getattr(torch, s["dtype"]), s["zeroed"]) for s in self.scratch
        ]
        return ScratchMemory(needs, places_of([self._shape(t) for t in self.tensors]))

    def _shape(self, tensor: Mapping[str, Any]) -> Shape:
        symbols = _symbols(self.graph)
        return tuple(symbols[e] if isinstance(e, str) else e for e in tensor["shape"])

    def _tiled(self, scratch: Mapping[str, Any]) -> tuple[Dim | Tiles, ...]:
        symbols = _symbols(self.graph)
        entries = [e if isinstance(e, list) else [e, 1] for e in scratch["shape"]]
        return tuple(Tiles(symbols[e], t) if isinstance(e, str) else e for e, t in entries)


class _Reader:
    """Checker of one of a library's ``programs`` against its graph and its kernels."""

    def __init__(self, part: Mapping[str, Any], what: str) -> None:
        self.kernels: list[dict[str, Any]] = part["kernels"]
        self.program: dict[str, Any] = part["program"]
        self.what = what

    def read(self) -> _Layout:
        """Return the layout. Raises FormatError, naming the first thing that is wrong."""
        graph = self._graph()
        symbols = _symbols(graph)
        tensors: list[dict[str, Any]] = []
        for side, expected in _border(graph).items():
            if self.program.get(side) != expected:
                self._refuse(f"its {side} are not those of its graph")
            tensors += expected
        for record in self._list("intermediates"):
            tensors.append(self._intermediate(record, symbols))
        scratch = [self._scratch(record, symbols) for record in self._list("scratch")]
        steps = [self._step(record, tensors, scratch) for record in self._list("steps")]
        self._check_scratch(steps, len(tensors), len(scratch))
        self._check_order(steps, len(graph.inputs), len(tensors))
        report, operators = self.program.get("report"), self.program.get("operators")
        return _Layout(
            graph, tensors, scratch, steps, report if isinstance(report, str) else "",
            operators if isinstance(operators, dict) else {},
        )  # fmt: skip

    def _refuse(self, problem: str) -> NoReturn:
        raise FormatError(f"{self.what}: {problem}; export it again")

    def _list(self, key: str) -> list[Any]:
        value = self.program.get(key)
        return value if isinstance(value, list) else self._refuse(f"it has no list of {key}")

    def _graph(self) -> KernelGraph:
        if self.program.get("graph", "") is None:
            raise FormatError(
                f"{self.what}: it is a traced program, exported for C: call it as its header says"
            )
        try:
            graph = serial.from_dict(self.program.get("graph"))
        except (CutesuperError, RecursionError) as error:
            raise FormatError(f"{self.what}: its graph is damaged: {error}") from error
        return graph if isinstance(graph, KernelGraph) else self._refuse("it has no kernel graph")

    def _intermediate(self, record: Any, symbols: Mapping[str, Symbol]) -> dict[str, Any]:
        fields = record if isinstance(record, dict) else {}
        name, shape, dtype = (fields.get(key) for key in ("name", "shape", "dtype"))
        ok = isinstance(name, str) and isinstance(dtype, str) and dtype in ALL
        if not ok or not isinstance(shape, list) or not all(_extent(e, symbols) for e in shape):
            self._refuse(f"intermediate tensor {record!r} makes no sense")
        return fields

    def _scratch(self, record: Any, symbols: Mapping[str, Symbol]) -> dict[str, Any]:
        fields = record if isinstance(record, dict) else {}
        name, shape, zeroed = (fields.get(key) for key in ("name", "shape", "zeroed"))
        ok = isinstance(name, str) and type(zeroed) is bool
        # the element type is that of the kernel's argument, see `_fits_scratch`
        if not ok or not isinstance(shape, list) or not _scratch_shape(shape, symbols):
            self._refuse(f"scratch memory {record!r} makes no sense")
        return fields

    def _step(
        self, record: Any, tensors: list[dict[str, Any]], scratch: list[dict[str, Any]]
    ) -> tuple[int, list[int]]:
        fields = record if isinstance(record, dict) else {}
        kernel, places = fields.get("kernel"), fields.get("places")
        if not _index(kernel, len(self.kernels)) or not isinstance(places, list):
            self._refuse(f"step {record!r} is not one of {len(self.kernels)} kernels")
        description = self.kernels[kernel]["arguments"]
        arguments = description["arguments"]
        given = [*tensors, *scratch]
        if len(places) != len(arguments) or not all(_index(p, len(given)) for p in places):
            self._refuse(f"step {record!r} does not have {len(arguments)} tensors")
        bound: dict[str, Any] = {}
        for place, argument in zip(places, arguments, strict=True):
            fits = _fits if place < len(tensors) else _fits_scratch
            compact = fits_compact(argument, description["symbols"], ALIGNMENT)
            if not compact or not fits(argument, given[place], bound):
                self._refuse(f"{given[place]} is no argument {argument} of kernel {kernel}")
        return kernel, places

    def _check_scratch(self, steps: list[tuple[int, list[int]]], first: int, count: int) -> None:
        """Check that scratch memory belongs to one argument of one step, and to no output."""
        used = [p for _, places in steps for p in places if p >= first]
        if sorted(used) != list(range(first, first + count)):
            self._refuse("scratch memory is used by several steps, or by none")
        for kernel, places in steps:
            if any(places[i] >= first for i in self.kernels[kernel]["outputs"]):
                self._refuse(f"kernel {kernel} has scratch memory as its output")

    def _check_order(self, steps: list[tuple[int, list[int]]], inputs: int, count: int) -> None:
        """Check that no input is written, and that every other tensor is written before it is read.
        One part of an output may be read where another one is written."""
        written = set(range(inputs))
        for kernel, places in steps:
            outputs = {places[i] for i in self.kernels[kernel]["outputs"]}
            others = (p for i, p in enumerate(places) if i not in self.kernels[kernel]["outputs"])
            reads = {p for p in others if p < count}
            if not reads <= written or outputs & set(range(inputs)):
                self._refuse(f"kernel {kernel} on tensors {places} reads or writes a wrong one")
            written |= outputs
        if written != set(range(count)):
            self._refuse(f"tensors {sorted(set(range(count)) - written)} are never written")


def _symbols(graph: KernelGraph) -> dict[str, Symbol]:
    return {d.name: d for n in graph.nodes for d in n.shape if isinstance(d, Symbol)}


def _index(value: Any, count: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < count


def _extent(value: Any, symbols: Mapping[str, Symbol]) -> bool:
    return value in symbols if isinstance(value, str) else type(value) is int and value > 0


def _scratch_shape(shape: list[Any], symbols: Mapping[str, Symbol]) -> bool:
    def fits(entry: Any) -> bool:
        if isinstance(entry, list):
            return len(entry) == 2 and entry[0] in symbols and _extent(entry[1], {})
        return _extent(entry, symbols)

    return bool(shape) and all(map(fits, shape))


def _fits(argument: Mapping[str, Any], tensor: Mapping[str, Any], bound: dict[str, Any]) -> bool:
    """True if a kernel compiled for ``argument`` takes ``tensor``, as far as known before a call.

    Args:
        argument: as described, its symbols called ``d0``, ...
        tensor: of the program, its symbols called as in the graph.
        bound: the program's symbol behind each of the kernel's; extended here.
    """
    shape = tensor["shape"] or [1]  # a kernel sees a single number as a vector of one
    same = argument["dtype"] == tensor["dtype"] and len(shape) == len(argument["shape"])
    return same and all(
        have == want if isinstance(want, int) else bound.setdefault(want, have) == have
        for want, have in zip(argument["shape"], shape, strict=True)
    )


def _fits_scratch(
    argument: Mapping[str, Any], scratch: Mapping[str, Any], bound: dict[str, Any]
) -> bool:
    """`_fits` for scratch memory: one dimension.
    If symbolic, its length is shared with no other argument."""
    if argument["dtype"] != scratch.get("dtype") or len(argument["shape"]) != 1:
        return False
    [length], shape = argument["shape"], scratch["shape"]
    if isinstance(length, int):
        return all(isinstance(e, int) for e in shape) and length == prod(shape)
    opened = any(not isinstance(e, int) for e in shape)
    return opened and bound.setdefault(length, scratch) is scratch


# --- calling -------------------------------------------------------------------------------------


class ExportedProgram(Program):
    """A program from a shared library; calling it is described in `Program`.

    Needs neither CuTe DSL nor a compiler. With symbolic extents it has the kernels for the symbols'
    hints, which compute every batch size. Of several programs it is the one for the GPU that is the
    current one when it is loaded, or the first one.

    Attributes:
        graph: the definition.
        arch: the architecture of the kernels, e.g. ``sm_90a``.
        version: the version of cutesuper that exported it.
    """

    _remedy = f"{Program._remedy}, and export it again"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.path.abspath(as_path("load", path))  # one file, whatever the folder is later
        metadata = read_metadata(path)
        parts = metadata["programs"]
        layouts = [_Reader(part, os.fsdecode(path)).read() for part in parts]
        # Code of the file runs only now, after everything has been checked.
        library = ExportedLibrary(path, metadata)
        chosen = library.program()
        self._layout = layouts[chosen]
        super().__init__(self._layout.graph, str(parts[chosen]["arch"]))
        self.version = str(metadata["version"])
        first = sum(len(part["kernels"]) for part in parts[:chosen])
        self._steps = [(library.kernels[first + n], places) for n, places in self._layout.steps]
        self._compact = [(CompactLaunch(library, kernel), places) for kernel, places in self._steps]

    def _check_operators(self) -> None:
        for name in added(names_of(self.graph)):
            there = self._layout.operators.get(name)
            if there is None or there != definition(TABLE[name]):
                raise OperatorError(
                    f"operator {name}: what it computes here need not be what it computed where "
                    f"{self!r} was exported, so the reference executor cannot run it; call it with "
                    "tensors on a GPU, or export it again with this definition and version of "
                    "Python"
                )

    @cached_property
    def _linked(self) -> Launches:
        return Launches(self._layout.intermediates(), self._launch_torch)

    @cached_property
    def _memory(self) -> ScratchMemory:
        return self._layout.memory()

    def _launches(self, extents: dict[str, int]) -> Launches:
        del extents  # one variant for all
        return self._linked

    def _launch_torch(self, values: list[Any]) -> None:
        import torch

        device = values[0].device
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if self._layout.scratch:
            values = [*values, *self._memory.allot(values)]
        for kernel, places in self._compact:
            kernel.launch([values[place] for place in places], stream, device.index)

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The tensors that `launch` takes, in order.
        Inputs, outputs, intermediates and scratch memory, each with ``name``, ``shape`` (symbols by
        name) and ``dtype``.

        Scratch memory also has a field ``zeroed``. It is passed with one dimension and the number
        of elements of its shape, and if ``zeroed``, it has to be zero before its first launch;
        kernels leave zeros, and two launches that may run at the same time need memory each.
        """
        return [*self._layout.tensors, *self._layout.scratch]

    def launch(self, values: Sequence[RawTensor], *, stream: int, device: int) -> None:
        """Launch all kernels, for callers without PyTorch.

        Args:
            values: one for each of `tensors`, compact and row-major; scratch with one dimension. An
                output that rows are put into holds what it is elsewhere, or is that input.
            stream: a ``cudaStream_t`` as an integer; 0 is the default stream.
            device: index of the device, which must be the current one.

        Raises:
            ShapeError, DTypeError, LayoutError: when a tensor does not fit.
            DeviceError: when the device refuses the kernels.
        """
        tensors = self.tensors
        if len(values) != len(tensors):
            names = ", ".join(t["name"] for t in tensors)
            raise ShapeError(f"launch: takes {len(tensors)} tensors ({names}), got {len(values)}")
        for kernel, places in self._steps:
            kernel.launch([values[place] for place in places], stream=stream, device=device)

    def explain(self) -> str:
        """Report on how the program was found, as in `Kernel.explain`."""
        return self._layout.report

    def __repr__(self) -> str:
        names = [kernel.name for kernel, _ in self._steps]
        return f"ExportedProgram({len(names)} kernel(s): {', '.join(names)}; {self.arch})"


def load(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program written by `Kernel.export`. Its code runs: load only trusted files.

    Raises:
        FormatError: when the file is no exported program of this version, or others than its owner
            could have written it; none of its code has run then.
        CompileError: when the system cannot load it.
    """
    return ExportedProgram(path)
