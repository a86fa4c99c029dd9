"""The operators that compiled models call: ``cutesuper::region`` and ``cutesuper::region_``.
Their signature is ``(str key, Tensor[] inputs)``; the second one is for regions that put rows into
some of their inputs in place.

A key contains its kernel graph, so any process can use it: code that calls the operator may come
from a cache on disk, in a process where this package has never seen the model. Programs are made
once for each key: equal layers of a model share searches and kernels.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

import torch

from cutesuper import pipeline
from cutesuper.errors import CutesuperError, DeviceError, FormatError, GraphError, ShapeError
from cutesuper.ir import serial
from cutesuper.ir.definitions import Defined, added, are_still, definitions, names_of
from cutesuper.ir.dims import MAX_ELEMENTS, Shape, Symbol, extent, open_size
from cutesuper.ir.graph import KernelGraph
from cutesuper.progress import progress_bar
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.calling import Prepared, Runner, launcher, prepared, reference_of
from cutesuper.runtime.checks import Signature, check_size
from cutesuper.runtime.kernel import Variant, bucket_of
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept, refuse_capture
from cutesuper.runtime.tensors import usable
from cutesuper.search.search import SearchResult
from cutesuper.targets import Target, find_target
from cutesuper.torch.compile import records

#: part of every key: code that a cache holds must not call an operator that has changed since
VERSION = 3
#: the name of the first symbolic extent in keys; others have a number behind it
ROWS = "M"
#: in keys of programs whose kernels begin before those in front of them have ended
_DEPENDENT = "dependent"

#: the symbolic extents of a call, or those of a search, in the order of the inputs
Extents = tuple[int, ...]

#: kernels depend on the order of memory, so a compiler must not change it
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


class Program:
    """A kernel graph as the operator runs it.
    Kernels on a GPU, a variant for the buckets of the symbolic extents; the reference executor
    elsewhere.

    Attributes:
        graph: its symbolic extents are `ROWS`, ``M1``, and so on.
        target: the GPU to optimize for; None is the one of the tensors.
        dependent: whether its kernels begin before those in front of them have ended.
        budget_s: seconds that a search may take.
        searched_s: seconds that searches took, in whichever process.
    """

    def __init__(self, graph: KernelGraph, target: Target | None, dependent: bool = False) -> None:
        self.graph = graph
        self.target = target
        self.dependent = dependent
        self.budget_s: float | None = None
        self.searched_s = 0.0
        self._signature = Signature(graph)
        self._defined = Defined(graph, "compile the model again, after torch.compiler.reset()")
        self._found: Kept[tuple[Extents, str], tuple[SearchResult, pipeline.Choice]] = Kept()
        self._brought: dict[tuple[Extents, str, float], pipeline.Outcome] = {}
        self._variants: Kept[tuple[Extents, str], Variant] = Kept()
        self._runners: Kept[tuple[Extents, torch.device], Runner] = Kept()
        #: by the index of the GPU, and the outputs that are inputs
        self._prepared: dict[tuple[int, ...], Prepared | None] = {}
        self._reference = reference_of(graph)
        self._lock = threading.Lock()
        self._most = _most(graph.nodes[i].shape for i in (*graph.inputs, *graph.outputs))

    @property
    def most(self) -> dict[tuple[str, ...], int]:
        """The largest products of symbolic extents that the kernels compiled so far allow.
        Beyond them, offsets do not fit into 32 bits."""
        return dict(self._most)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the extents that are known only at the call."""
        return tuple(s.name for s in self._signature.symbols)

    def fits(self, extents: Sequence[Any]) -> bool:
        """True if the kernels compiled so far allow these symbolic extents.
        If they are symbols of torch, the comparisons become guards."""
        return self._exceeded(extents) is None

    def _exceeded(self, extents: Sequence[Any]) -> int | None:
        """The product of symbolic extents that the kernels allow, if these have a larger one."""
        known = dict(zip(self.symbols, extents, strict=True))
        every = self._most.items()
        return next((m for names, m in every if not prod(known[n] for n in names) <= m), None)

    # ---------------------------------------------------------------------------------- making

    def found(
        self, extents: Extents, target: Target, most_us: float = inf
    ) -> tuple[SearchResult, pipeline.Choice]:
        """The search's choice for these symbolic extents; verified, not compiled.

        Raises:
            TooDear: every program costs more than ``most_us``, if that is what ended the search.
            CutesuperError: from `cutesuper.superoptimize`.
        """
        bucket = self._bucket(extents)
        return self._found.made(
            (bucket, target.name), lambda: self._search(bucket, target, most_us)
        )

    def _search(
        self, bucket: Extents, target: Target, most_us: float
    ) -> tuple[SearchResult, pipeline.Choice]:
        self._defined.check()
        graph = self._hinted(bucket)
        options = self._options(target)
        outcome = self._brought.pop((bucket, target.name, most_us), None)
        if outcome is None:
            with progress_bar() as show:
                outcome = pipeline.outcome(graph, options, most_us, show)
        self.searched_s += outcome.seconds
        return outcome.result()

    def wanted(
        self, extents: Extents, target: Target
    ) -> tuple[KernelGraph, pipeline.Options] | None:
        """The search that `found` would begin, for another process.
        None if there is none, or if it must be done in this one: others do not know the operators
        that were added to the table."""
        bucket = self._bucket(extents)
        graph, options = self._hinted(bucket), self._options(target)
        here = (bucket, target.name) in self._found or added(names_of(graph))
        if here or pipeline.is_known(graph, options) or records.tuned(graph, options):
            return None
        return graph, options

    def bring(
        self, extents: Extents, target: Target, most_us: float, outcome: pipeline.Outcome
    ) -> None:
        """Take the end of the search that `wanted` named; `found` gives or raises it once."""
        self._brought[self._bucket(extents), target.name, most_us] = outcome

    def tuned(self, extents: Extents, target: Target) -> tuple[str, ...]:
        """The programs that the tuner has stored for these symbolic extents: file and time."""
        return records.tuned(self._hinted(self._bucket(extents)), self._options(target))

    def variant(self, extents: Extents, device: torch.device) -> Variant:
        """The compiled kernels for these symbolic extents. Raises CutesuperError."""
        bucket = self._bucket(extents)
        with torch.cuda.device(device):
            target = self.target_on(device)
            return self._variants.made(
                (bucket, target.name), lambda: self._compiled(bucket, target)
            )

    def _compiled(self, bucket: Extents, target: Target) -> Variant:
        self._defined.check()
        graph, found = self._hinted(bucket), self.found(bucket, target)
        made = pipeline.compiled(graph, self._options(target), KernelCache(), *found)
        between = [s for s, _ in made.intermediates]
        for shape in between:
            if open_size(shape):
                check_size("a tensor between kernels", [extent(d) for d in shape])
        with self._lock:
            for names, most in _most(between).items():
                self._most[names] = min(most, self._most.get(names, most))
        return made

    def target_on(self, device: torch.device) -> Target:
        """The GPU that kernels for a device are optimized for.

        Raises:
            DeviceError: the device cannot run kernels for the requested target.
        """
        if device.type != "cuda":
            return self.target or pipeline.current_target()
        with torch.cuda.device(device):
            target = self.target or pipeline.current_target()
            major, minor = torch.cuda.get_device_capability(device)
        have, need = f"sm_{major}{minor}", target.arch.rstrip("af")
        if have != need:
            raise DeviceError(
                f"target {target.name!r}: its kernels are for {need}, the tensors are on {device} "
                f"({have}); leave the option out, or name a target of that architecture"
            )
        return target

    def _options(self, target: Target) -> pipeline.Options:
        return pipeline.Options(target, self.dependent, budget_s=self.budget_s)

    def _hinted(self, bucket: Extents) -> KernelGraph:
        return self.graph.with_hints(dict(zip(self.symbols, bucket, strict=True)))

    @staticmethod
    def _bucket(extents: Extents) -> Extents:
        return tuple(map(bucket_of, extents))

    # --------------------------------------------------------------------------------- calling

    def __call__(
        self, inputs: Sequence[torch.Tensor], places: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Run the program.
        Raises ShapeError, DTypeError, DeviceError, GraphError, OperatorError as a `Kernel` does.

        Args:
            inputs: of the graph.
            places: the outputs, in order, for which the input that rows are put into is changed in
                place; they are not returned.
        """
        self._defined.check_table()
        made = self._quick(inputs, places)
        return self._checked(inputs, places) if made is None else made

    def _quick(
        self, inputs: Sequence[torch.Tensor], places: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """The results of a call like an earlier one; None for others."""
        call = self._prepared.get((inputs[0].get_device(), *places))
        return None if call is None else call(inputs)

    def _checked(self, inputs: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
        given = [usable(t) for t in inputs]
        if not all(t.numel() for t in given):
            extents, run = self._extents(given), self._reference  # there is nothing to launch
        else:
            bound = self._signature.bind(given)
            if bound is None:
                raise self._signature.refusal(
                    given, "this operator has no backward; call it under torch.no_grad()"
                )
            extents, run = bound, self._runner(tuple(bound.values()), given[0].device)
        if run is self._reference:
            self._defined.check()
        else:
            self._prepare(given[0], extents, places)
        outputs = self._outputs(given, extents, places)
        run(given, outputs, extents)
        for n in places:
            t = inputs[self._signature.continued[n]]
            if outputs[n] is not t:  # it could not be written as it lies
                t.copy_(outputs[n])
        return [t for n, t in enumerate(outputs) if n not in places]

    def _prepare(
        self, like: torch.Tensor, extents: Mapping[str, int], places: Sequence[int]
    ) -> None:
        """Let the next call like this one be quick."""
        key = (like.get_device(), *places)
        if key not in self._prepared:
            launches = self.variant(tuple(extents.values()), like.device).launches
            self._prepared[key] = prepared(self._signature, launches, like.device, places)

    def fake(
        self, inputs: Sequence[torch.Tensor], places: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """The results of a call for inputs without data; extents may be symbols of torch."""
        if len(inputs) != len(self._signature.names):
            raise GraphError(
                f"cutesuper::region: {len(self._signature.names)} inputs, got {len(inputs)}"
            )
        outputs = self._outputs(inputs, self._extents(inputs), places)
        return [t for n, t in enumerate(outputs) if n not in places]

    def with_bases(
        self, inputs: Sequence[torch.Tensor], places: Sequence[int], bases: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The inputs of the graph, from the others and those that rows are put into."""
        own = {self._signature.continued[n]: t for n, t in zip(places, bases, strict=True)}
        rest = iter(inputs)
        count = len(self._signature.names)
        return [own[k] if k in own else next(rest) for k in range(count)]

    def _extents(self, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        found: dict[str, int] = {}
        for t, shape in zip(inputs, self._signature.shapes, strict=True):
            for n, d in zip(t.shape, shape, strict=True):
                if isinstance(d, Symbol):
                    found.setdefault(d.name, n)
        return found

    def _outputs(
        self, inputs: Sequence[torch.Tensor], extents: Mapping[str, int], places: Sequence[int]
    ) -> list[torch.Tensor]:
        like, made = inputs[0], self._signature.continued
        return [
            inputs[made[n]]
            if n in places
            else inputs[made[n]].clone(memory_format=torch.contiguous_format)
            if n in made
            else like.new_empty(
                [extents[d.name] if isinstance(d, Symbol) else d for d in shape], dtype=dtype
            )
            for n, (shape, dtype) in enumerate(self._signature.outputs)
        ]

    def _runner(self, extents: Extents, device: torch.device) -> Runner:
        if device.type not in KERNEL_DEVICES:
            return self._reference
        most = self._exceeded(extents)
        if most is not None:
            raise ShapeError(
                f"cutesuper::region: a compiled model is called with {_rows(extents)}, and its "
                f"kernels compute offsets of at most {most} of them in 32 bits; split the batch, "
                "or call torch.compiler.reset() to have it compiled for this size"
            )
        key = (self._bucket(extents), device)
        return self._runners.get(key) or self._runners.made(
            key, lambda: self._made(extents, device)
        )

    def _made(self, extents: Extents, device: torch.device) -> Runner:
        refuse_capture(f"cutesuper::region of a compiled model, with about {_rows(extents)}")
        try:
            launches = self.variant(extents, device).launches
        except CutesuperError as error:
            warnings.warn(
                f"a compiled model is called with {_rows(extents)}, for which there are no kernels "
                f"({error}); operators of PyTorch compute this part, slowly",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            return self._reference
        return launcher(launches, device)


def _rows(extents: Extents) -> str:
    """Symbolic extents in words: ``4096 rows``, or ``8 x 512 rows``."""
    return f"{' x '.join(map(str, extents))} rows"


def _most(shapes: Iterable[Shape]) -> dict[tuple[str, ...], int]:
    """The largest products of symbolic extents for kernels, which compute offsets in 32 bits.
    By the names of the symbols, sorted, of the tensors that have them."""
    found: dict[tuple[str, ...], int] = {}
    for shape in filter(open_size, shapes):
        names = tuple(sorted(d.name for d in shape if isinstance(d, Symbol)))
        most = MAX_ELEMENTS // prod(d for d in shape if isinstance(d, int))
        found[names] = min(most, found.get(names, most))
    return found


# -------------------------------------------------------------------------------------------- keys


_programs: Kept[str, Program] = Kept()


def key_of(graph: KernelGraph, target: Target | None = None, dependent: bool = False) -> str:
    """The key of a graph: a hash of all that decides its program.
    The rest of the key, the target's name, how it is launched, the graph itself, and the
    definitions of operators that were added to the package's own.

    Equal programs have equal keys, regardless of the names of inputs and of symbolic extents.

    Raises:
        GraphError: no input.
    """
    data = serial.to_dict(_canonical(graph))
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    packed = base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()
    outside = ",".join(definitions(names_of(graph)).values())
    launch = _DEPENDENT * dependent
    content = f"{VERSION}:{target.name if target else ''}:{launch}:{outside}:{packed}"
    return f"{_digest(content)}:{content}"


def program_of(key: str) -> Program:
    """The program behind a key, the same object for equal keys. Raises FormatError."""
    return _programs.get(key) or _programs.made(key, lambda: _read(key))


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _read(key: str) -> Program:
    digest, _, content = key.partition(":")
    version, _, rest = content.partition(":")
    name, _, rest = rest.partition(":")
    launch, _, rest = rest.partition(":")
    outside, _, packed = rest.partition(":")
    if version != str(VERSION) or digest != _digest(content):
        raise FormatError(
            f"cutesuper::region({digest[:40]!r}): not a key of this version; compile the model "
            "again, without code from caches that another version has written"
        )
    text = zlib.decompress(base64.urlsafe_b64decode(packed)).decode()
    graph = serial.loads(text)
    if not isinstance(graph, KernelGraph):
        raise FormatError(f"cutesuper::region({digest}): the key holds no kernel graph")
    if not are_still(outside.split(",") if outside else [], names_of(graph)):
        raise FormatError(
            f"cutesuper::region({digest}): operators of it ({outside}) are not what they were "
            "when the model was compiled; compile it again, with caches of PyTorch's compiler off "
            "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)"
        )
    return Program(graph, find_target(name) if name else None, launch == _DEPENDENT)


def _canonical(graph: KernelGraph) -> KernelGraph:
    if not graph.inputs:
        raise GraphError("region: it has no input, so nobody knows on which device to run")
    names = {d.name: Symbol(f"{ROWS}{n or ''}") for n, d in enumerate(symbols_of(graph))}
    places = {i: n for n, i in enumerate(graph.inputs)}
    result = KernelGraph(outputs=list(graph.outputs))
    for i, node in enumerate(graph.nodes):
        shape = tuple(names[d.name] if isinstance(d, Symbol) else d for d in node.shape)
        name = f"x{places[i]}" if i in places else node.name
        result.nodes.append(replace(node, shape=shape, name=name))
    return result


def symbols_of(graph: KernelGraph) -> list[Symbol]:
    """The symbolic extents of a graph, in the order of its inputs."""
    shapes = (graph.nodes[i].shape for i in graph.inputs)
    return list({d.name: d for s in shapes for d in s if isinstance(d, Symbol)}.values())


# ---------------------------------------------------------------------------------------- operator


def _run(key: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return program_of(key)(inputs)


def _fake(key: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return program_of(key).fake(inputs)


def _run_in_place(
    key: str, inputs: list[torch.Tensor], places: list[int], bases: list[torch.Tensor]
) -> list[torch.Tensor]:
    program = program_of(key)
    return program(program.with_bases(inputs, places, bases), places)


def _fake_in_place(
    key: str, inputs: list[torch.Tensor], places: list[int], bases: list[torch.Tensor]
) -> list[torch.Tensor]:
    program = program_of(key)
    return program.fake(program.with_bases(inputs, places, bases), places)


def _refuse_functional(*args: Any) -> None:
    raise GraphError(
        "cutesuper::region_: it is part of compiled models only, and cannot be traced again; trace "
        "the model"
    )


_library = torch.library.Library("cutesuper", "FRAGMENT")
_library.define(
    "region(str key, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag, _STRIDES)
)
_library.impl("region", _run, "CPU")
_library.impl("region", _run, "CUDA")
torch.library.register_fake("cutesuper::region", _fake, lib=_library)

_library.define(
    "region_(str key, Tensor[] inputs, int[] places, Tensor(a!)[] bases) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, _STRIDES),
)
# Inductor lowers operators that change arguments and return a list only if they know how to become
# functional, and this one enters graphs that are so already
_library.impl("region_", _refuse_functional, "Functionalize")
_library.impl("region_", _run_in_place, "CPU")
_library.impl("region_", _run_in_place, "CUDA")
torch.library.register_fake("cutesuper::region_", _fake_in_place, lib=_library)

#: the operators that compiled models call, the second for regions that change inputs in place
region = torch.ops.cutesuper.region.default
region_in_place = torch.ops.cutesuper.region_.default
