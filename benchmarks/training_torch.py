"""PyTorch's own passes, eager and compiled, in a form that a CUDA graph can hold.

Autograd runs a backward pass on the stream of its forward pass, and that cannot be captured
afterwards. `Tape` calls the same functions in the same order on the current stream. The functions
of compiled programs cannot be called one by one (PyTorch 2.11 frees what they kept), so their
forward passes run again on the stream that a recording will use, see `Again`.
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
    """The problem's workload. Raises ValueError where it is no pass of an operator."""
    if not isinstance(problem.workload, TrainingWorkload):
        raise ValueError(f"{problem.workload.name}: no pass of an operator")
    return problem.workload


class Tape:
    """What autograd would call for the gradients of ``y`` with respect to leaves."""

    def __init__(self, y: torch.Tensor, leaves: Outputs) -> None:
        if y.grad_fn is None:
            raise ValueError("no operand has a gradient")
        self._root, self._entry, self._leaves = y.grad_fn, y.output_nr, leaves
        self._order: list[Any] = []
        self._visit(self._root, set())
        self._counts = self._inputs()

    def _inputs(self) -> dict[Any, int]:
        """How many cotangents each function takes."""
        found = dict.fromkeys(self._order, 1)
        found[self._root] = self._entry + 1
        for node in self._order:
            for following, place in node.next_functions:
                if following is not None:
                    found[following] = max(found[following], place + 1)
        return {node: len(_metadata(node) or ()) or least for node, least in found.items()}

    def _visit(self, node: Any, seen: set[Any]) -> None:
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                self._visit(following, seen)
        self._order.insert(0, node)

    def __call__(self, cotangent: torch.Tensor) -> Outputs:
        """The gradients of the leaves."""
        given = {node: [None] * count for node, count in self._counts.items()}
        given[self._root][self._entry] = cotangent
        found: dict[int, torch.Tensor] = {}
        for node in self._order:
            arguments = given.pop(node)
            if hasattr(node, "variable"):
                found[id(node.variable)] = arguments[0]
                continue
            results = node.apply(*arguments) if hasattr(node, "apply") else node(*arguments)
            several = results if isinstance(results, tuple) else (results,)
            for (following, place), value in zip(node.next_functions, several, strict=True):
                if following is not None and value is not None:
                    wanted = _metadata(following)
                    if wanted is not None:
                        # as the engine does after every function: of what was broadcast, the sum
                        value = value.sum_to_size(wanted[place].shape).to(wanted[place].dtype)
                    waiting = given[following]
                    known = waiting[place]
                    waiting[place] = value if known is None else known + value
        return tuple(found[id(leaf)] for leaf in self._leaves)


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
        """The gradients for one set; the graph stays, so that it can be asked again."""
        stream = torch.cuda.current_stream() if cotangent.is_cuda else None
        if not self._results or stream != self._stream:
            self._stream = stream
            with torch.enable_grad():
                self._results = [self._function(*leaves) for leaves, _ in self._sets]
        y, wanted = self._results[i], self._sets[i][1]
        return torch.autograd.grad(y, wanted, cotangent.to(y.dtype), retain_graph=True)

    def close(self) -> None:
        """Free what the forward passes have kept. Compiled ones keep their own results, so that it
        would stay: 25 cases filled a GPU of 140 GB."""
        for y, (_, wanted) in zip(self._results, self._sets, strict=False):
            torch.autograd.grad(y, wanted, torch.zeros_like(y))
        self._results = []


def _metadata(node: Any) -> Any:
    """What a function says of its results; None for one written in Python, before PyTorch 2.12."""
    try:
        return node._input_metadata
    except RuntimeError:
        return None


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
    with torch.enable_grad():
        results = [function(*leaves) for leaves, _ in sets]
    tapes = [Tape(y, wrt) for y, (_, wrt) in zip(results, sets, strict=True)]
    cotangents = [inputs[-1].to(y.dtype) for y, inputs in zip(results, problem.inputs, strict=True)]
    del results

    def backward(i: int) -> Outputs:
        with torch.no_grad():
            return tapes[i](cotangents[i])

    return Launcher(backward)


def autograd_launcher(problem: Problem, function: Function) -> Launcher:
    """A pass as a training loop runs it: a call that keeps what its gradients need, or the engine
    of autograd. The graph stays, so that a pass can run again."""
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
    """With the default options; a backward pass may not reuse the memory of what was kept, since
    it runs more than once."""
    workload = training_of(problem)
    function = torch.compile(workload.operator.torch, dynamic=False, fullgraph=True)
    with functorch.patch(donated_buffer=False):
        if workload.step is Step.FORWARD or workload.host:
            launcher = _passes(problem, function)
        else:
            sets = [trainable(workload.operator, workload.operands(i)) for i in problem.inputs]
            again = Again(function, sets)
            launcher = Launcher(lambda i: again(i, problem.inputs[i][-1]), close=again.close)
        launcher.launch(0)
    return launcher


def _element_wise(problem: Problem) -> Launcher:
    """The kernel of PyTorch that moves what the pass has to move."""
    elements = problem.inputs[0][0].numel()
    large = [[t for t in inputs if t.numel() == elements] for inputs in problem.inputs]
    if training_of(problem).traffic == "add":
        return Launcher(lambda i: (torch.add(large[i][0], large[i][1]),))
    return Launcher(lambda i: (torch.neg(large[i][0]),))


#: reads and writes, in a kernel of PyTorch; where there is one
COPY = Implementation("floor-copy", "floor", _element_wise)

TORCH: tuple[Implementation, ...] = (
    Implementation("eager", "peer", _eager),
    Implementation("compile", "peer", _compiled),
)
