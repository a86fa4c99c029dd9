"""Programs prepared for tensors of given shapes: the execution of calls of a known kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from cutesuper.ir.dims import Shape, Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.calling import Picker, Runner, picker, reference_of
from cutesuper.runtime.checks import ALIGNMENT, check_size
from cutesuper.runtime.programs import Kept
from cutesuper.runtime.tensors import usable
from cutesuper.torch.ops.classes import class_of
from cutesuper.torch.ops.rowwise.definition import (
    Definition,
    Kind,
    Maybe,
    Option,
    Role,
    first_of,
    kind_of,
)
from cutesuper.torch.ops.rowwise.graphs import (
    Programs,
    Source,
    programs_of,
    runner_of,
)

#: plans that are kept for each operator
KEPT_PLANS = 4096

Extents = tuple[int, ...]
#: extents as separate arguments, if there are any: PyTorch takes 0.35 us longer to read a tuple of
#: two
Arguments = tuple[Any, ...]


def all_usable(tensors: Sequence[Maybe]) -> list[torch.Tensor]:
    """The tensors that are not None, as kernels read them."""
    return [
        t if t.is_contiguous() and not t.data_ptr() % ALIGNMENT else usable(t)
        for t in tensors
        if t is not None
    ]


@dataclass(frozen=True)
class Step:
    """One program for tensors of given shapes.

    Attributes:
        run: the program.
        rows: their number.
        device: of all tensors.
        inputs: places of inputs that the program sees with another shape, and the extents of that.
        made: for each output to allocate, the place of an input with the same shape and element
            type, or None; extents and element type. Allocating a tensor like another one takes half
            of the time (0.6 us) of allocating it from a shape.
        outputs: like ``inputs``.
    """

    run: Runner
    rows: int
    device: torch.device
    inputs: tuple[tuple[int, Arguments], ...]
    made: tuple[tuple[int | None, Arguments, torch.dtype], ...]
    outputs: tuple[tuple[int, Arguments], ...]

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program on usable tensors; returns the outputs."""
        empty, like, device = torch.empty, torch.empty_like, self.device
        made = [
            like(tensors[n]) if n is not None else empty(*extents, dtype=dtype, device=device)
            for n, extents, dtype in self.made
        ]
        seen = made
        if self.inputs:
            tensors = _viewed(tensors, self.inputs)
        if self.outputs:
            seen = _viewed(made, self.outputs)
        self.run(tensors, seen, self.rows)
        return made


def _viewed(
    tensors: list[torch.Tensor], views: tuple[tuple[int, Arguments], ...]
) -> list[torch.Tensor]:
    tensors = tensors.copy()
    for n, extents in views:
        tensors[n] = tensors[n].view(*extents)
    return tensors


def step_of(
    key: tuple[object, ...],
    graph: KernelGraph,
    rows: int,
    inputs: Sequence[Extents],
    outputs: Sequence[Extents],
    device: torch.device,
) -> Step:
    """A graph for tensors of these shapes.

    Without rows there is nothing to launch: the reference executor returns empty tensors, and zeros
    for sums over them.
    """
    run = runner_of(key, graph, device) if rows else reference_of(graph)
    given = [(shape, graph.nodes[i].dtype.torch)
             for shape, i in zip(inputs, graph.inputs, strict=True)]  # fmt: skip
    made = [graph.nodes[i] for i in graph.outputs]
    wanted = [(shape, n.dtype.torch) for shape, n in zip(outputs, made, strict=True)]
    seen = [known(n.shape, rows) for n in made]
    for shape in seen if device.type == "cuda" else ():
        check_size(f"{key[0]}: a result", shape)
    return Step(
        run,
        rows,
        device,
        _views(inputs, [known(graph.nodes[i].shape, rows) for i in graph.inputs]),
        tuple(
            (given.index((s, d)) if (s, d) in given else None, _arguments(s), d) for s, d in wanted
        ),
        _views(outputs, seen),
    )


def _views(given: Sequence[Extents], seen: Sequence[Extents]) -> tuple[tuple[int, Arguments], ...]:
    pairs = enumerate(zip(given, seen, strict=True))
    return tuple((n, _arguments(view)) for n, (shape, view) in pairs if view != shape)


def _arguments(shape: Extents) -> Arguments:
    return shape or ((),)


def known(shape: Shape, rows: int) -> Extents:
    """A shape with this number of rows."""
    return tuple(rows if isinstance(d, Symbol) else d for d in shape)


# ------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Gradients:
    """A backward pass for tensors of given shapes.

    Attributes:
        step: None if every gradient is a cotangent.
        inputs: takes the step's inputs from saved tensors and cotangents.
        results: takes a gradient for each operand from outputs of the step, cotangents and None.
        missing: cotangents that are replaced by zeros: place, shape, element type.
        device: of all tensors.
    """

    step: Step | None
    inputs: Picker
    results: Picker
    missing: tuple[tuple[int, Extents, torch.dtype], ...]
    device: torch.device

    def __call__(
        self, saved: Sequence[torch.Tensor], cotangents: Sequence[Maybe]
    ) -> tuple[Maybe, ...]:
        """One gradient for each operand, None if it has none."""
        if self.missing:
            cotangents = list(cotangents)
            for n, shape, dtype in self.missing:
                cotangents[n] = torch.zeros(shape, dtype=dtype, device=self.device)
        if self.step is None:
            return self.results([*cotangents, None])
        made = self.step(all_usable(self.inputs([*saved, *cotangents])))
        return self.results([*made, *cotangents, None])


@dataclass(frozen=True)
class Plan:
    """The execution of calls with operands of given shapes.

    Attributes:
        kind: of the calls.
        lead: extents of the operands in front of a row.
        device: of all tensors.
        step: the forward pass; with saved values, if there are gradients.
        results: the number of its outputs that are results.
        needs: for each operand, whether its gradient may be requested; None if no operand's may.
        saved: takes the values that the backward pass needs from operands that are not None and
            outputs of the step.
        backwards: backward passes that were needed, by the types of cotangents.
    """

    kind: Kind
    lead: Extents
    device: torch.device
    step: Step
    results: int
    needs: tuple[bool, ...] | None
    saved: Picker
    backwards: Kept[Any, Gradients] = field(default_factory=Kept[Any, Gradients])


def plan_of(
    definition: Definition,
    tensors: Sequence[Maybe],
    options: tuple[Option, ...],
    saving: bool,
    needs: tuple[bool, ...] | None = None,
) -> Plan:
    """Check the arguments of a call, and prepare its program.

    Args:
        definition: the operator.
        tensors: operands.
        options: the other arguments.
        saving: whether there may be a backward pass.
        needs: for each operand, whether its gradient may be requested; for the plan.

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
    programs = programs_of(definition, kind, class_of("rows", rows))
    graph = programs.saving if saving else programs.plain
    key = (definition.name, kind, class_of("rows", rows), "saving" if saving else "plain")
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    made = output_shapes(definition, kind, lead, graph)
    step = step_of(key, graph, rows, shapes, made, x.device)
    saved = picker(_saved(programs) if saving else ())
    return Plan(kind, lead, x.device, step, len(definition.outputs), needs, saved)


def _saved(programs: Programs) -> tuple[int, ...]:
    there = [n for n, i in enumerate(programs.kind.inputs) if i is not None]
    return tuple(
        there.index(s.place) if s.side == "operand" else len(there) + s.place
        for s in programs.sources
    )


def output_shapes(
    definition: Definition, kind: Kind, lead: Extents, graph: KernelGraph
) -> list[Extents]:
    """Shapes of the results, and of other saved values as in the graph."""
    results = [result_shape(o.role, kind, lead) for o in definition.outputs]
    rows = prod(lead)
    rest = graph.outputs[len(results) :]
    return [*results, *(known(graph.nodes[i].shape, rows) for i in rest)]


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
        needs: for each operand, whether its gradient is requested.
        given: for each result, whether it has a cotangent.
    """
    rows = prod(lead)
    programs = programs_of(definition, kind, class_of("rows", rows))
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
        key = (definition.name, kind, class_of("rows", rows), tuple(needs), used)
        seen = [_source_shape(programs, s, lead) for s in backward.inputs]
        made = [operand_shape(programs, backward.gradients.index(n), lead)
                for n in range(len(backward.graph.outputs))]  # fmt: skip
        step = step_of(key, backward.graph, rows, seen, made, device)
    count = len(step.made) if step else 0
    # the last of the values to take from is None
    results = [-1 if p is None else count + p.place if isinstance(p, Source) else p
               for p in backward.gradients]  # fmt: skip
    return Gradients(step, picker(inputs), picker(results), missing, device)


def _source_shape(programs: Programs, source: Source, lead: Extents) -> Extents:
    if source.side == "operand":
        return operand_shape(programs, source.place, lead)
    role = source.role(programs.definition)
    if role is not None:
        return result_shape(role, programs.kind, lead)
    node = programs.saving.nodes[programs.saving.outputs[source.place]]
    return known(node.shape, prod(lead))


def operand_shape(programs: Programs, place: int, lead: Extents) -> Extents:
    """Shape of an operand that is not None, or of its gradient."""
    given = programs.kind.inputs[place]
    if given is None:
        raise AssertionError(f"{programs.kind}: operand {place} is None")
    if not given.rows:
        return given.inner
    return result_shape(programs.definition.operands[place].role, programs.kind, lead)
