"""PyTorch's own passes, eager and compiled, in a form that a CUDA graph can hold.

Autograd runs a backward pass on the stream of its forward pass, and that cannot be captured
afterwards. So forward passes run again on the stream that a recording will use, see `Again`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch

from benchmarks.peers import Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.training_operators import Operator
from benchmarks.workload import Outputs
from benchmarks.workloads_training import Step, TrainingWorkload, trainable

Function = Callable[..., torch.Tensor]


def training_of(problem: Problem) -> TrainingWorkload:
    """The problem's workload. Raises ValueError if it is not a pass of an operator."""
    if not isinstance(problem.workload, TrainingWorkload):
        raise ValueError(f"{problem.workload.name}: no pass of an operator")
    return problem.workload


class Again:
    """The gradients of a function by autograd, on the current stream.

    The forward passes of all sets of operands run at the first call on a stream; a recording calls
    once before it captures.
    """

    def __init__(self, function: Function, sets: list[tuple[Outputs, Outputs]]) -> None:
        self._function, self._sets = function, sets
        self._stream: Any = None
        self._results: list[torch.Tensor] = []

    def __call__(self, i: int, cotangent: torch.Tensor) -> Outputs:
        """The gradients for one set; the graph is kept, so that a set can be computed again."""
        stream = torch.cuda.current_stream() if cotangent.is_cuda else None
        if not self._results or stream != self._stream:
            self._stream = stream
            self._results = []  # operands would stay with the stream of a graph that still exists
            with torch.enable_grad():
                self._results = [self._function(*leaves) for leaves, _ in self._sets]
        y, wanted = self._results[i], self._sets[i][1]
        return torch.autograd.grad(y, wanted, cotangent.to(y.dtype), retain_graph=True)

    def close(self) -> None:
        """Free the values saved by the forward passes.
        Compiled ones hold their own results, so that these would stay: 25 cases filled a GPU of 140
        GB."""
        for y, (_, wanted) in zip(self._results, self._sets, strict=False):
            torch.autograd.grad(y, wanted, torch.zeros_like(y))
        self._results = []


def _passes(problem: Problem, function: Function) -> Launcher:
    workload = training_of(problem)
    operator = workload.operator
    sets = [trainable(operator, workload.operands(inputs)) for inputs in problem.inputs]
    if workload.host:
        return autograd_launcher(problem, function)
    if workload.step is Step.FORWARD:

        def forward(i: int) -> Outputs:
            with torch.enable_grad():
                return (function(*sets[i][0]).detach(),)

        return Launcher(forward)
    again = Again(function, sets)
    return Launcher(lambda i: again(i, problem.inputs[i][-1]), close=again.close)


def autograd_launcher(problem: Problem, function: Function) -> Launcher:
    """A pass as in a training loop.
    A call that saves the values its gradients need, or the engine of autograd. The graph is kept,
    so that a pass can run again."""
    workload = training_of(problem)
    operator: Operator = workload.operator
    sets = [trainable(operator, workload.operands(inputs)) for inputs in problem.inputs]
    if workload.step is Step.FORWARD:

        def forward(i: int) -> Outputs:
            with torch.enable_grad():
                return (function(*sets[i][0]),)

        return Launcher(forward)
    with torch.enable_grad():
        results = [function(*leaves) for leaves, _ in sets]
    cotangents = [inputs[-1].to(y.dtype) for y, inputs in zip(results, problem.inputs, strict=True)]

    def backward(i: int) -> Outputs:
        return torch.autograd.grad(results[i], sets[i][1], cotangents[i], retain_graph=True)

    return Launcher(backward)


def _eager(problem: Problem) -> Launcher:
    return _passes(problem, training_of(problem).operator.torch)


def _compiled(problem: Problem) -> Launcher:
    """The pass compiled with default options.
    A backward pass may not reuse the memory of saved values, since it runs more than once."""
    workload = training_of(problem)
    function = torch.compile(workload.operator.torch, dynamic=False, fullgraph=True)
    with functorch.patch(donated_buffer=False):
        launcher = _passes(problem, function)
        launcher.launch(0)
    return launcher


def _element_wise(problem: Problem) -> Launcher:
    """The kernel of PyTorch that moves the same data as the pass."""
    elements = problem.inputs[0][0].numel()
    large = [[t for t in inputs if t.numel() == elements] for inputs in problem.inputs]
    if training_of(problem).traffic == "add":
        return Launcher(lambda i: (torch.add(large[i][0], large[i][1]),))
    return Launcher(lambda i: (torch.neg(large[i][0]),))


#: reads and writes of the pass in a kernel of PyTorch, if there is one
COPY = Implementation("floor-copy", "floor", _element_wise)

TORCH: tuple[Implementation, ...] = (
    Implementation("eager", "peer", _eager),
    Implementation("compile", "peer", _compiled),
)
