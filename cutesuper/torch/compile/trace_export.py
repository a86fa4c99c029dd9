"""Traced programs as libraries for C: kernels of all regions, and the tensors between them.

The traced program is run once with fake tensors. Each memory that comes up there is one tensor of
the library; views of it are the same tensor under another shape. What needs PyTorch at the call (a
copy, a sort, a mask) has no place in such a library. A part of a tensor that is contiguous, as the
weights of one gate among those of all, is read where it lies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cutesuper.errors import TraceError
from cutesuper.ir.dims import Symbol
from cutesuper.runtime.c_interface import Step, Wiring
from cutesuper.runtime.checks import ALIGNMENT
from cutesuper.runtime.compile import Artifact
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.memory import Use, homes
from cutesuper.runtime.program import Linked, wired, write_programs
from cutesuper.torch.compile.region import places
from cutesuper.torch.internals import bounds_of, extent_names, written

if TYPE_CHECKING:
    from cutesuper.torch.compile.traced_program import Trace


@dataclass(frozen=True)
class _Part:
    """One region.

    Attributes:
        wiring: of its kernels.
        values: its inputs and outputs among the tensors of the program.
        starts: the element at which each of its inputs begins in its tensor.
        symbols: its symbols in the program.
    """

    wiring: Wiring
    values: Sequence[int]
    starts: Sequence[int]
    symbols: Mapping[str, str]


@dataclass
class _Found:
    """The tensors of a program, by the order in which they come up, and its parts."""

    tensors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    inputs: list[int] = field(default_factory=list[int])
    parts: list[_Part] = field(default_factory=list[_Part])
    artifacts: dict[str, Artifact] = field(default_factory=dict[str, Artifact])


class _Reader(fx.Interpreter):
    """An interpreter of the traced program that notes memory and regions."""

    def __init__(self, trace: Trace, name: str, read: Mapping[str, Any]) -> None:
        module = trace.module
        super().__init__(module)
        self.extra_traceback = False  # errors of ours say where
        self.name = name
        self.read = read
        self.found = _Found()
        values = (n.meta.get("val") for n in module.graph.nodes)
        modes = (v.fake_mode for v in values if hasattr(v, "fake_mode"))
        self.mode = next(modes, None) or FakeTensorMode()
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []
        self._names = extent_names(trace.arguments)
        self.bounds = {self._names.get(str(s), str(s)): bounds_of(r)
                       for s, r in trace.ranges.items()}  # fmt: skip

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; every tensor must lie in memory that is known."""
        with self.mode, torch.no_grad():
            value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op != "placeholder":
            made = n.all_input_nodes[0] if n.target is getitem else n
            view = value.untyped_storage()._cdata in self._places
            why = "makes a part with gaps of a tensor" if view else "needs PyTorch at the call"
            why = "is a constant, and no argument" if n.op == "get_attr" else why
            self._part(value, f"{written(made)} ({places([made])}) {why}")
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An argument of the function, or a tensor that it reads."""
        node = next(n for n in self.module.graph.nodes if n.target == target)  # type: ignore[union-attr]
        if target in self.read:
            name, tensor = self.read[target]
            value = self.mode.from_tensor(tensor.detach())
        else:
            name, value = node.meta.get("written", target), node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._note(name, value)
            self.found.inputs.append(len(self.found.tensors) - 1)
            self._place(value, f"{name} is not contiguous")
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A region: new tensors, and its kernels."""
        kernel: Kernel = self.fetch_attr(target).kernel
        graph, [given] = kernel.graph, args
        shapes = [graph.nodes[i].shape for i in graph.inputs]
        sizes = {
            d.name: e
            for shape, t in zip(shapes, given, strict=True)
            for d, e in zip(shape, t.shape, strict=True)
            if isinstance(d, Symbol)
        }
        parts = [self._part(t, f"{target} reads a copy") for t in given]
        values = [place for place, _ in parts]
        made: list[torch.Tensor] = []
        for node in (graph.nodes[i] for i in graph.outputs):
            shape = [sizes[d.name] if isinstance(d, Symbol) else d for d in node.shape]
            made.append(torch.empty(shape, dtype=node.dtype.torch, device=given[0].device))
            self._note(f"t{len(self.found.tensors)}", made[-1])
            values.append(len(self.found.tensors) - 1)
        wiring = wired(graph, kernel.variant, self.found.artifacts)
        names = {symbol: self._symbol(e) for symbol, e in sizes.items()}
        starts = [start for _, start in parts]
        if any(starts[i] for i in wiring.continued.values()):
            raise self.refusal("rows are put into a part of a tensor")
        self.found.parts.append(_Part(wiring, values, starts, names))
        return made

    def _note(self, name: str, value: torch.Tensor) -> None:
        self._kept.append(value)  # so that no other memory takes its number
        self._places[value.untyped_storage()._cdata] = len(self.found.tensors)
        self.found.tensors.append(self._described(name, value))

    def result(self, name: str, value: Any) -> int:
        """The place of a result, known by this name and the result's shape from now on."""
        if not isinstance(value, torch.Tensor):
            raise self.refusal("a result is no tensor")
        place = self._place(value, "a result is a part of a tensor, or a copy")
        if place in self.found.inputs or self.found.tensors[place]["name"].startswith("result"):
            raise self.refusal("a result is an argument, or another result")
        self.found.tensors[place] = self._described(name, value)
        return place

    def _described(self, name: str, value: torch.Tensor) -> dict[str, Any]:
        shape = [e if isinstance(e, int) else self._symbol(e) for e in value.shape]
        return {"name": name, "shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}

    def _place(self, value: torch.Tensor, why: str) -> int:
        """The place of a tensor's memory, all of which it is."""
        place, _ = self._part(value, why)
        if value.numel() != self._kept[place].numel():
            raise self.refusal(why)
        return place

    def _part(self, value: torch.Tensor, why: str) -> tuple[int, int]:
        """The place of a tensor's memory, and the element of it that the tensor begins at.
        As much of it as it has elements, in their order, from a place on that kernels can load
        from."""
        place, start = self._places.get(value.untyped_storage()._cdata), value.storage_offset()
        size = value.dtype.itemsize
        if place is None or not value.is_contiguous() or size != self._kept[place].dtype.itemsize:
            raise self.refusal(why)
        if not isinstance(start, int) or start * size % ALIGNMENT:
            raise self.refusal(why)
        return place, start

    def _symbol(self, e: Any) -> str:
        text = str(e).replace(" ", "")
        factors = [self._names.get(f, f) for f in text.split("*")]
        if all(f.isidentifier() or f.isdecimal() for f in factors):
            return "*".join(factors)
        raise self.refusal(f"an extent is {text}, which is no product")

    def refusal(self, why: str) -> TraceError:
        """The error for a program that C cannot call."""
        return TraceError(
            f"export({self.name}): a library for C has kernels only, and {why}; do this before or "
            "after the function, or export one region: program.regions[i].kernel.export(...)"
        )


def export_trace(
    name: str,
    trace: Trace,
    read: Mapping[str, tuple[str, torch.Tensor]],
    report: str,
    paths: tuple[str | os.PathLike[str], str | os.PathLike[str]],
) -> None:
    """Write a traced program as a library with functions of C.

    Args:
        name: of the function, for messages.
        trace: the traced program.
        read: by placeholder, the name and the value of a tensor that the function reads.
        report: how it was found.
        paths: of the library and of its header.

    Raises:
        TraceError: it needs PyTorch at the call; says for what.
        FormatError, CompileError: as `cutesuper.runtime.program.export_program`.
    """
    reader = _Reader(trace, name, read)
    made = reader.run(*(None for n in trace.module.graph.nodes if n.op == "placeholder"))
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    outputs = [reader.result(f"result{n}", t) for n, t in enumerate(results)]
    found = reader.found
    artifacts = list(found.artifacts.values())
    writes = [a.request.outputs for a in artifacts]
    program = {"graph": None, "report": report, "operators": {}}
    wiring = replace(_joined(found, outputs, writes, reader.refusal), bounds=reader.bounds)
    write_programs([Linked(wiring, artifacts, program)], *paths)


def _joined(
    found: _Found,
    outputs: Sequence[int],
    written: Sequence[Sequence[int]],
    refusal: Callable[[str], TraceError],
) -> Wiring:
    """The wiring of all parts; ``written`` are the arguments that each kernel writes."""
    border = [*found.inputs, *outputs]
    between = [v for v in range(len(found.tensors)) if v not in border]
    place = {v: p for p, v in enumerate([*border, *between])}
    tensors = [found.tensors[v] for v in between]
    scratch: list[Mapping[str, Any]] = []
    steps: list[Step] = []
    continued: dict[int, int] = {}
    more = sum(len(p.wiring.between) for p in found.parts)
    for part in found.parts:
        own = [place[v] for v in part.values]
        own += [len(border) + len(tensors) + k for k in range(len(part.wiring.between))]
        first = len(border) + len(between) + more + len(scratch)
        own += [first + k for k in range(len(part.wiring.scratch))]
        tensors += [_renamed(t, part.symbols) for t in part.wiring.between]
        scratch += [_renamed(t, part.symbols) for t in part.wiring.scratch]
        for step in part.wiring.steps:
            shapes = [_named(shape, part.symbols) for shape in step.shapes]
            starts = {i: part.starts[p] for i, p in enumerate(step.places) if p < len(part.starts)}
            steps.append(Step(step.kernel, [own[p] for p in step.places], shapes, starts))
        continued |= {own[o]: own[i] for o, i in part.wiring.continued.items()}
    if any(source >= len(found.inputs) for source in continued.values()):
        raise refusal("rows are put into a tensor that it computes")
    wiring = Wiring(
        [found.tensors[v] for v in found.inputs], [found.tensors[v] for v in outputs],
        tensors, scratch, steps, {}, continued,
    )  # fmt: skip
    return replace(wiring, homes=_homes(wiring, written))


def _renamed(tensor: Mapping[str, Any], symbols: Mapping[str, str]) -> dict[str, Any]:
    """A tensor with the program's symbols in the place of a region's."""
    return {**tensor, "shape": _named(tensor["shape"], symbols)}


def _named(shape: Sequence[Any], symbols: Mapping[str, str]) -> list[Any]:
    return [[symbols[e[0]], e[1]] if isinstance(e, list) else symbols.get(e, e) for e in shape]


def _homes(wiring: Wiring, written: Sequence[Sequence[int]]) -> dict[int, int]:
    """See `Wiring.homes`."""
    uses: list[Use] = []
    for step in wiring.steps:
        writes = frozenset(step.places[i] for i in written[step.kernel])
        uses.append(Use(frozenset(step.places) - writes, writes, frozenset()))
    sizes: dict[int, object] = {}
    first = len(wiring.given)
    for p, tensor in enumerate(wiring.between, first):
        known = prod(e for e in tensor["shape"] if isinstance(e, int))
        symbols = sorted(e for e in tensor["shape"] if isinstance(e, str))
        sizes[p] = known, symbols, tensor["dtype"]
    return homes(uses, sizes)


def names_of(fn: Any, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of tensors that a function reads.
    Those of a module's parameters and buffers, ``read_1`` and so on for others."""
    named: dict[int, str] = {}
    if isinstance(fn, nn.Module):
        named = {id(t): n for n, t in (*fn.named_buffers(), *fn.named_parameters())}
    return [named.get(id(t), f"read_{i}") for i, t in enumerate(tensors, 1)]
