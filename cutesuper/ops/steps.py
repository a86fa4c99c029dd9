"""Programs made ready for tensors of given shapes: what a call does once its kind is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from cutesuper.errors import LayoutError
from cutesuper.graph.dims import Shape, Symbol
from cutesuper.graph.kernel import KernelGraph
from cutesuper.ops.definition import Definition, Kind, Maybe, Option, Role, first_of, kind_of
from cutesuper.ops.programs import (
    Programs,
    Runner,
    Source,
    programs_of,
    reference_of,
    rows_class,
    runner_of,
)
from cutesuper.runtime.checks import ALIGNMENT, check_size

#: calls that are remembered for each operator; the oldest goes first
KEPT_PLANS = 4096

Extents = tuple[int, ...]


def usable(t: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it: contiguous, its first element aligned; a copy where needed.

    Raises LayoutError: calls are remembered by shape, whatever the layout.
    """
    if t.layout is not torch.strided:
        raise LayoutError(f"a tensor of shape {list(t.shape)} has the layout {t.layout}; use "
                          ".to_dense()")
    if not t.is_contiguous():
        t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


@dataclass(frozen=True)
class Step:
    """One program for tensors of given shapes.

    Attributes:
        run: the program.
        rows: their number.
        device: of all tensors.
        inputs: places of inputs that the program sees with another shape, and the shape.
        made: shapes and element types of the tensors that are made for outputs.
        outputs: like ``inputs``.
    """

    run: Runner
    rows: int
    device: torch.device
    inputs: tuple[tuple[int, Extents], ...]
    made: tuple[tuple[Extents, torch.dtype], ...]
    outputs: tuple[tuple[int, Extents], ...]

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run it on usable tensors, a list that it may change; returns the outputs."""
        empty, device = torch.empty, self.device
        made = [empty(shape, dtype=dtype, device=device) for shape, dtype in self.made]
        for n, shape in self.inputs:
            tensors[n] = tensors[n].view(shape)
        seen = made
        if self.outputs:
            seen = made.copy()
            for n, shape in self.outputs:
                seen[n] = seen[n].view(shape)
        self.run(tensors, seen, self.rows)
        return made


def step_of(
    key: tuple[object, ...],
    graph: KernelGraph,
    rows: int,
    inputs: Sequence[Extents],
    outputs: Sequence[Extents],
    device: torch.device,
) -> Step:
    """A graph for tensors of these shapes.

    Without rows there is nothing to launch: the reference executor gives empty tensors, and zeros
    for sums over them.
    """
    run = runner_of(key, graph, device) if rows else reference_of(graph)
    made = [graph.nodes[i] for i in graph.outputs]
    seen = [_known(n.shape, rows) for n in made]
    for shape in seen if device.type == "cuda" else ():
        check_size(f"{key[0]}: a result", shape)
    return Step(
        run,
        rows,
        device,
        _views(inputs, [_known(graph.nodes[i].shape, rows) for i in graph.inputs]),
        tuple((shape, n.dtype.torch) for shape, n in zip(outputs, made, strict=True)),
        _views(outputs, seen),
    )


def _views(given: Sequence[Extents], seen: Sequence[Extents]) -> tuple[tuple[int, Extents], ...]:
    pairs = enumerate(zip(given, seen, strict=True))
    return tuple((n, view) for n, (shape, view) in pairs if view != shape)


def _known(shape: Shape, rows: int) -> Extents:
    return tuple(rows if isinstance(d, Symbol) else d for d in shape)


# ------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Gradients:
    """A backward pass for tensors of given shapes.

    Attributes:
        step: None where every gradient is a cotangent.
        inputs: places of the step's inputs among saved tensors and cotangents.
        results: for each operand its place among outputs of the step and then cotangents; None
            where it has none.
        missing: cotangents that are taken as zeros: place, shape, element type.
        device: of all tensors.
    """

    step: Step | None
    inputs: tuple[int, ...]
    results: tuple[int | None, ...]
    missing: tuple[tuple[int, Extents, torch.dtype], ...]
    device: torch.device

    def __call__(
        self, saved: Sequence[torch.Tensor], cotangents: Sequence[Maybe]
    ) -> list[Maybe]:
        """One gradient for each operand, None where there is none."""
        values: list[Any] = [*saved, *cotangents]
        for n, shape, dtype in self.missing:
            values[len(saved) + n] = torch.zeros(shape, dtype=dtype, device=self.device)
        made: list[Any] = []
        if self.step is not None:
            made = self.step([usable(values[n]) for n in self.inputs])
        made += values[len(saved) :]
        return [None if n is None else made[n] for n in self.results]


@dataclass(frozen=True)
class Plan:
    """What calls with operands of given shapes do.

    Attributes:
        kind: of the calls.
        lead: extents of the operands in front of a row.
        device: of all tensors.
        step: the forward pass; with what is saved, if there are gradients.
        results: how many of its outputs are results.
        saved: places of what the backward pass needs, among operands that are there and outputs of
            the step.
        backwards: backward passes that were needed, by what is asked for and which cotangents
            there are.
    """

    kind: Kind
    lead: Extents
    device: torch.device
    step: Step
    results: int
    saved: tuple[int, ...]
    backwards: dict[Any, Gradients] = field(default_factory=dict)


def plan_of(
    definition: Definition, tensors: Sequence[Maybe], options: tuple[Option, ...], saving: bool
) -> Plan:
    """Check the arguments of a call, and make its program ready.

    Args:
        definition: the operator.
        tensors: operands.
        options: the other arguments.
        saving: whether there will be a backward pass.

    Raises:
        ShapeError, DTypeError, DeviceError: naming an argument.
        OperatorError: an option, from the definition.
        CutesuperError: from `cutesuper.superoptimize`.
    """
    kind = kind_of(definition, tensors, options)
    x = first_of(tensors)
    if x.device.type == "cuda":
        check_size(f"{definition.name}: {definition.operands[0].name}", x.shape)
    lead = tuple(x.shape[: x.dim() - len(kind.inner)])
    rows = prod(lead)
    programs = programs_of(definition, kind, rows_class(rows))
    graph = programs.saving if saving else programs.plain
    key = (definition.name, kind, rows_class(rows), "saving" if saving else "plain")
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    made = output_shapes(definition, kind, lead, graph)
    step = step_of(key, graph, rows, shapes, made, x.device)
    saved = _saved(programs) if saving else ()
    return Plan(kind, lead, x.device, step, len(definition.outputs), saved)


def _saved(programs: Programs) -> tuple[int, ...]:
    there = [n for n, i in enumerate(programs.kind.inputs) if i is not None]
    return tuple(
        there.index(s.place) if s.side == "operand" else len(there) + s.place
        for s in programs.sources
    )


def output_shapes(
    definition: Definition, kind: Kind, lead: Extents, graph: KernelGraph
) -> list[Extents]:
    """Shapes of results, and of what is saved besides as the graph has it."""
    results = [result_shape(o.role, kind, lead) for o in definition.outputs]
    rows = prod(lead)
    rest = graph.outputs[len(results) :]
    return [*results, *(_known(graph.nodes[i].shape, rows) for i in rest)]


def result_shape(role: Role, kind: Kind, lead: Extents) -> Extents:
    """Shape of a result or of a cotangent."""
    if role is Role.WHOLE:
        return ()
    return lead + (kind.inner if role is Role.ROWS else kind.inner[:-1])


def gradients_of(
    definition: Definition,
    kind: Kind,
    lead: Extents,
    device: torch.device,
    needs: Sequence[bool],
    given: Sequence[bool],
) -> Gradients:
    """The backward pass of a kind for operands of given shapes.

    Args:
        definition: the operator.
        kind: of the call.
        lead: extents of the operands in front of a row.
        device: of the tensors.
        needs: for each operand, whether its gradient is asked for.
        given: for each result, whether it has a cotangent.
    """
    rows = prod(lead)
    programs = programs_of(definition, kind, rows_class(rows))
    used = tuple(g or not o.often_unused for g, o in zip(given, definition.outputs, strict=True))
    backward = programs.backward(tuple(needs), used)
    shapes = [result_shape(o.role, kind, lead) for o in definition.outputs]
    types = [programs.plain.nodes[i].dtype.torch for i in programs.plain.outputs]
    missing = tuple(
        (n, shapes[n], types[n])
        for n, (needed, has) in enumerate(zip(used, given, strict=True))
        if needed and not has
    )
    sources = [*programs.sources, *(Source("cotangent", n) for n in range(len(shapes)))]
    inputs = tuple(sources.index(s) for s in backward.inputs)
    step = None
    if backward.graph is not None:
        key = (definition.name, kind, rows_class(rows), tuple(needs), used)
        seen = [_source_shape(programs, s, lead) for s in backward.inputs]
        made = [operand_shape(programs, backward.gradients.index(n), lead)
                for n in range(len(backward.graph.outputs))]  # fmt: skip
        step = step_of(key, backward.graph, rows, seen, made, device)
    count = len(step.made) if step else 0
    results = tuple(
        count + p.place if isinstance(p, Source) else p for p in backward.gradients
    )
    return Gradients(step, inputs, results, missing, device)


def _source_shape(programs: Programs, source: Source, lead: Extents) -> Extents:
    if source.side == "operand":
        return operand_shape(programs, source.place, lead)
    role = source.role(programs.definition)
    if role is not None:
        return result_shape(role, programs.kind, lead)
    node = programs.saving.nodes[programs.saving.outputs[source.place]]
    return _known(node.shape, prod(lead))


def operand_shape(programs: Programs, place: int, lead: Extents) -> Extents:
    """Shape of an operand that there is, or of its gradient."""
    given = programs.kind.inputs[place]
    if given is None:
        raise AssertionError(f"{programs.kind}: operand {place} is None")
    if not given.rows:
        return given.inner
    return result_shape(programs.definition.operands[place].role, programs.kind, lead)


__all__ = [
    "KEPT_PLANS",
    "Gradients",
    "Plan",
    "Step",
    "gradients_of",
    "operand_shape",
    "output_shapes",
    "plan_of",
    "result_shape",
    "usable",
]
