"""cutesuper as an implementation of training operators: the programs of calls of `cs.ops`.

They are made here from the same definitions, for the same class of row numbers and with the same
values saved between the passes, so that they can be found ahead and launched in both modes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import torch

from benchmarks.peers import Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.training_operators import Operator
from benchmarks.training_torch import autograd_launcher, training_of
from benchmarks.workload import DTYPES, Outputs, Shape
from benchmarks.workloads_training import Step
from cutesuper.ir.dims import Symbol
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from cutesuper.torch.ops import rowwise
from cutesuper.torch.ops.classes import class_of
from cutesuper.torch.ops.rowwise.definition import Definition, kind_of
from cutesuper.torch.ops.rowwise.graphs import Backward, Programs, programs_of
from cutesuper.torch.ops.rowwise.operator import RowOperator

KernelOf = Callable[[Problem, bool], Kernel]


@cache
def definitions() -> dict[str, Definition]:
    """Definitions of all operators on rows in `cutesuper.ops`, by name."""
    names = (module.name for module in pkgutil.iter_modules(rowwise.__path__))
    modules = (import_module(f"{rowwise.__name__}.{name}") for name in names)
    values = (value for module in modules for value in vars(module).values())
    return {v.definition.name: v.definition for v in values if isinstance(v, RowOperator)}


def programs(operator: Operator, shape: Shape, dtype: torch.dtype) -> Programs:
    """The programs of calls with operands of these extents.

    Raises:
        ValueError: `cutesuper.ops` has no such operator, or it takes other options.
    """
    definition = definitions().get(operator.call)
    if definition is None:
        raise ValueError(f"cutesuper.ops has no operator {operator.call!r}")
    given = dict(operator.options)
    names = [name for name, _ in definition.options]
    if given.keys() != {*names}:
        raise ValueError(f"{operator.call} takes {names}, the benchmark gives {[*given]}")
    operands = {
        spec.name: torch.empty(spec.dims, dtype=spec.element(dtype), device="meta")
        for spec in operator.operands(shape)
    }
    tensors = [operands.get(o.name) for o in definition.operands]
    kind = kind_of(definition, tensors, tuple(given[name] for name in names))
    return programs_of(definition, kind, class_of("rows", shape[0]))


def graph_of(operator: Operator, step: Step, shape: Shape, dtype: str) -> KernelGraph:
    """The kernel graph of a pass; a forward pass saves the values that the backward pass needs."""
    made = programs(operator, shape, DTYPES[dtype])
    if step is Step.FORWARD:
        return made.saving if operator.gradients else made.plain
    backward = backward_of(made)
    if backward.graph is None:
        raise ValueError(f"{operator.name}: its gradients are cotangents, nothing is computed")
    return backward.graph


def backward_of(made: Programs) -> Backward:
    """The backward pass for all gradients."""
    return made.backward(made.differentiable, (True,) * len(made.definition.outputs))


def ours(kernel_of: KernelOf) -> tuple[Implementation, ...]:
    """cutesuper with plain and with dependent launch.
    ``kernel_of(problem, dependent)`` has the program."""
    return (
        Implementation("cutesuper", "ours", partial(_made, kernel_of, False)),
        Implementation("cutesuper-pdl", "ours", partial(_made, kernel_of, True), dependent=True),
    )


def _made(kernel_of: KernelOf, dependent: bool, problem: Problem) -> Launcher:
    workload = training_of(problem)
    operator = workload.operator
    if workload.host:
        return autograd_launcher(problem, operator.of_ops)
    made = programs(operator, problem.shape, problem.dtype)
    kernel = kernel_of(problem, dependent)
    if workload.step is Step.FORWARD:
        return _forward(problem, kernel)
    return _backward(problem, made, kernel)


def _named(problem: Problem, i: int, graph: KernelGraph) -> list[torch.Tensor]:
    """The operands that a graph takes, in its shapes."""
    workload = training_of(problem)
    operands = workload.operands(problem.inputs[i])
    specs = workload.operator.operands(problem.shape)
    given = {spec.name: t for spec, t in zip(specs, operands, strict=True)}
    nodes = [graph.nodes[n] for n in graph.inputs]
    return [_seen(given[node.name], node.shape) for node in nodes]


def _seen(t: torch.Tensor, shape: tuple[int | Symbol, ...]) -> torch.Tensor:
    return t.view([t.shape[0] if isinstance(d, Symbol) else d for d in shape])


def _forward(problem: Problem, kernel: Kernel) -> Launcher:
    sets = [_named(problem, i, kernel.graph) for i in range(problem.plan.count)]
    [result] = problem.workload.outputs(problem.shape)

    def launch(i: int) -> Outputs:
        return (kernel(sets[i])[0].view(result.dims),)

    return Launcher(launch)


def _backward(problem: Problem, made: Programs, kernel: Kernel) -> Launcher:
    backward = backward_of(made)
    sets = [_given(problem, i, made, backward, kernel.graph) for i in range(problem.plan.count)]
    names = [o.name for o in made.definition.operands]
    asked = problem.workload.outputs(problem.shape)
    places = [backward.gradients[names.index(spec.name[1:])] for spec in asked]

    def launch(i: int) -> Outputs:
        results = kernel(sets[i])
        return tuple(
            # an element-wise sum passes its cotangent on unchanged
            (results[p] if isinstance(p, int) else problem.inputs[i][-1]).view(spec.dims)
            for p, spec in zip(places, asked, strict=True)
        )

    return Launcher(launch)


def _given(
    problem: Problem, i: int, made: Programs, backward: Backward, graph: KernelGraph
) -> list[torch.Tensor]:
    """Inputs of the backward pass: operands, values saved by the forward pass, the cotangent."""
    forward = made.saving
    operands = _named(problem, i, forward)
    kept: list[torch.Tensor] = []
    if any(s.side == "output" for s in backward.inputs):
        kept = run_reference(forward, operands)
    names = [o.name for o in made.definition.operands]
    nodes = [graph.nodes[n] for n in graph.inputs]
    present = {forward.nodes[n].name: t for n, t in zip(forward.inputs, operands, strict=True)}
    values = []
    for source, node in zip(backward.inputs, nodes, strict=True):
        if source.side == "operand":
            t = present[names[source.place]]
        else:
            t = kept[source.place] if source.side == "output" else problem.inputs[i][-1]
        values.append(_seen(t.to(node.dtype.torch), node.shape))
    return values


__all__ = ["definitions", "graph_of", "ours", "programs"]
