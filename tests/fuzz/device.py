"""Kernels compiled, and launched where there is a GPU.

Outputs are poisoned before every launch, with NaN and with a large number, so that what is not
written shows; two launches have to give the same bits; inputs are strided as their sources say. The
machine of `tests.ptx` runs the launches of a program in the same orders whenever it is run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutesuper as cs
from cutesuper.ir.graph import KernelGraph
from tests.fuzz import functions
from tests.fuzz.check import CALLING, MAKING, NEEDING, Refused, Settings, Stage, Wrong, held
from tests.fuzz.functions import Function, laid_out
from tests.fuzz.judge import Expected
from tests.fuzz.outcome import Outcome
from tests.fuzz.programs import Case
from tests.ptx.device import Emulated

#: what outputs hold before a launch
POISON = (float("nan"), 3e4)
#: bit patterns are compared as these
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_kernel(
    graph: KernelGraph,
    inputs: Sequence[Tensor],
    wanted: list[Expected],
    case: Case,
    settings: Settings,
    stage: Stage,
) -> None:
    """Compile a graph and look at what came out; launch it, too, if the settings say so.

    Raises:
        Wrong, Refused: as everywhere.
    """
    stage("compile")
    Emulated.numbers = count()
    target = None if settings.gpu else "h200"
    try:
        kernel = cs.superoptimize(graph, target=target, budget_s=settings.budget_s, tuned=False)
    except MAKING as error:
        raise Refused(error, "compile") from error
    stage("story")
    if not (kernel.explain() and kernel.ptx):
        raise Wrong("odd", "story", "a kernel without a story or without code")
    with tempfile.TemporaryDirectory() as folder:
        kernel.draw(Path(folder) / "page.html")
        kernel.draw(Path(folder) / "page.svg")
    if settings.gpu:
        _check_launches(kernel, inputs, wanted, case, stage)


def _check_launches(
    kernel: Any, inputs: Sequence[Tensor], wanted: list[Expected], case: Case, stage: Stage
) -> None:
    given = [x.cuda() for x in inputs]
    first = launched(kernel, given, wanted, POISON[0], stage)
    again = launched(kernel, given, wanted, POISON[1], stage)
    for x, y in zip(first, again, strict=True):
        if not torch.equal(bits(x), bits(y)):
            raise Wrong("wrong", "launch", "two launches give different bits")
    layouts = {f"x{i}": s.layout for i, s in enumerate(case.sources)}
    graph = kernel.graph
    names = [graph.nodes[i].name for i in graph.inputs]
    odd = [laid_out(x, layouts.get(n, "dense")) for n, x in zip(names, given, strict=True)]
    stage("launch with strides")
    try:
        found = kernel(odd)
    except CALLING:
        return
    held(found, wanted, stage.name)


def launched(
    kernel: Any, inputs: list[Tensor], wanted: list[Expected], poison: float, stage: Stage
) -> list[Tensor]:
    """The outputs of one launch into poisoned memory, judged."""
    stage("launch")
    outputs = [
        torch.full(
            w.ball.v.shape,
            poison if w.dtype.is_floating_point else -77,
            dtype=w.dtype,
            device="cuda",
        )
        for w in wanted
    ]
    try:
        kernel(inputs, out=outputs)
    except NEEDING as error:
        raise Refused(error, "launch") from error
    torch.cuda.synchronize()
    stage.launched = True
    held(outputs, wanted, "launch")
    return outputs


def bits(x: Tensor) -> Tensor:
    """The bits as integers: NaN is not equal to itself."""
    return x.contiguous().view(BITS[x.element_size()])


def check_traced(f: Function, settings: Settings, stage: Stage) -> Outcome:
    """A function of PyTorch on the GPU, and its gradients."""
    inputs = f.arguments(f.rows[0])
    wanted = functions.wanted_of(f, inputs)
    stage("trace")
    Emulated.numbers = count()
    given = [x.cuda() for x in inputs]
    try:
        program = cs.superoptimize(
            f.callable(), given, dynamic_shapes=functions.dynamic_shapes(f),
            budget_s=settings.budget_s, tuned=False,
        )  # fmt: skip
    except MAKING as error:
        raise Refused(error, "trace") from error
    kind = _check_calls(program, given, wanted, stage)
    functions.check_backward(f, program, inputs, stage, "cuda")
    if f.dynamic:
        others = f.arguments(f.rows[1])
        _check_calls(program, [x.cuda() for x in others], functions.wanted_of(f, others), stage)
    return Outcome(kind)


def _check_calls(program: Any, inputs: list[Tensor], wanted: list[Expected], stage: Stage) -> str:
    stage("call")
    try:
        with torch.no_grad():
            first, again = program(*inputs), program(*inputs)
    except NEEDING as error:
        raise Refused(error, "call") from error
    stage.launched |= bool(program.regions)
    for x, y in zip(first, again, strict=True):
        if not torch.equal(bits(x), bits(y)):
            raise Wrong("wrong", "function", "two calls give different bits")
    return held(first, wanted, "function")
