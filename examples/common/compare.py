"""Comparison of several ways to compute the same: errors, and times.

A way is right if its errors against float64 are at most twice those of eager PyTorch in the same
element type, plus two units in the last place. An error is the norm of the difference over the
norm of the exact result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .timing import Call, Outputs, record

#: the way that the others are measured by
FIRST = "eager"


@dataclass(frozen=True)
class Task:
    """Something to compute.

    Attributes:
        name: of it.
        ways: by the name of the way, what prepares it; the call that this returns is timed.
        exact: the results in float64.
        dtype: in which the ways compute.
        calls: on a GPU so many of them are timed together, where one takes microseconds.
    """

    name: str
    ways: Mapping[str, Callable[[], Call]]
    exact: Call
    dtype: torch.dtype
    calls: int = 1


@dataclass(frozen=True)
class Result:
    """The result of one way.

    Attributes:
        task, way: names.
        first_s: seconds of the preparation and the first call.
        ms: milliseconds of a call, median.
        output: which of the results is the worst.
        error, allowed: of that.
    """

    task: str
    way: str
    first_s: float
    ms: float
    output: str
    error: float
    allowed: float

    @property
    def fine(self) -> bool:
        """True if it is right; an error that is not a number is too large."""
        return self.error <= self.allowed


def run(task: Task, ways: Sequence[str], device: torch.device, replays: int = 20) -> list[Result]:
    """All of the ways that the task has, in order.

    What is checked on a GPU is what the CUDA graph wrote that is timed then.
    """
    exact = task.exact()
    allowed = limits(task.ways[FIRST]()(), exact, task.dtype)
    found = (attempt(task, way, exact, allowed, device, replays) for way in ways)
    return [r for r in found if r is not None]


def attempt(
    task: Task, way: str, exact: Outputs, allowed: dict[str, float], device: torch.device,
    replays: int,
) -> Result | None:  # fmt: skip
    """Prepare, check, time; nothing where torch.compile lacks a compiler, and a line says so."""
    if way not in task.ways:
        return None
    torch.compiler.reset()
    begin = time.perf_counter()
    try:
        recording = record(task.ways[way](), device, task.calls)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        cause = error.inner_exception
        if type(cause).__name__ != "InvalidCxxCompiler":
            raise
        print(f"{task.name}, {way}: left out, torch.compile cannot run here: {cause}")
        return None
    first_s = time.perf_counter() - begin
    output, error = worst(recording.replay(), exact, allowed)
    ms = recording.ms(device, replays)
    return Result(task.name, way, first_s, ms, output, error, allowed[output])


def limits(values: Outputs, exact: Outputs, dtype: torch.dtype) -> dict[str, float]:
    """The errors that the rule allows, given the results of eager PyTorch."""
    ulp = torch.finfo(dtype).eps
    return {name: 2 * relative(values[name], exact[name]) + 2 * ulp for name in exact}


def worst(values: Outputs, exact: Outputs, allowed: dict[str, float]) -> tuple[str, float]:
    """The output that is nearest to its limit, or furthest beyond, and its error."""
    errors = {name: relative(values[name], exact[name]) for name in exact}
    name = max(errors, key=lambda k: excess(errors[k], allowed[k]))
    return name, errors[name]


def excess(error: float, allowed: float) -> float:
    """A sorting key in which an error that is not a number comes last."""
    return error / allowed if error == error else float("inf")


def relative(x: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm."""
    return ((x.double() - exact).norm() / exact.norm()).item()
