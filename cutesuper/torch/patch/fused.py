"""Programs of several operators for parts of a model, found by `cutesuper.superoptimize`.

They run without gradients, for few positions on a GPU, where reading the weights takes all the
time. The first call of a kind searches, checks the program against the original on its own tensors,
and times both by two clocks: in calls the host counts too, in CUDA graphs the GPU alone. A program
runs where it is faster; one that is wrong, or nowhere faster, is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutesuper.errors import CacheError, CutesuperError
from cutesuper.ir.operators.base import TABLE
from cutesuper.measure import CudaDevice, called_us, device_us
from cutesuper.runtime.cache import warn_once
from cutesuper.runtime.kernel import bucket_of
from cutesuper.runtime.programs import KERNEL_DEVICES, Kept, is_capturing, refuse_capture
from cutesuper.torch.compile.trace import superoptimize_callable
from cutesuper.torch.patch.probing import Failed, within_rule
from cutesuper.torch.patch.report import refused
from cutesuper.torch.patch.usual_calls import MOST_POSITIONS, is_usual

#: rows up to which kernels are faster than those for large matrices; more share their weights
MOST_ROWS = 64

#: takes a tensor ``[rows, ..]`` and parameters; hashable; always returns the same number of tensors
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Found:
    """A program that computes the same as a function.

    Attributes:
        program: takes and returns what the function does.
        called: true if its calls take less time.
        recorded: true if its replays in CUDA graphs do.
    """

    program: Function
    called: bool = True
    recorded: bool = True


#: by kind of call; None if the original is as fast, or nothing else works
_programs: Kept[Any, Found | None] = Kept()


def run(function: Function, parameters: Sequence[Tensor], x: Any) -> tuple[Tensor, ...] | None:
    """``function(x, *parameters)``, by a program; None if the original should run.

    Args:
        function: what to compute; equal ones share programs.
        parameters: matrices and vectors.
        x: ``[B, L, N]``.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_usual(x, *parameters):
        return None
    if torch.is_autocast_enabled(x.device.type):  # products then have another type
        return None
    rows = x.shape[:-1].numel()
    few = x.dim() == 3 and x.shape[1] <= MOST_POSITIONS and 0 < rows <= MOST_ROWS
    if (
        not few
        or x.device.type not in KERNEL_DEVICES
        or not all(p.is_contiguous() for p in parameters)
    ):
        return None
    inputs = [x.reshape(rows, x.shape[-1]), *parameters]
    shapes = tuple(tuple(t.shape) for t in parameters)
    few_rows = rows if rows == 1 else bucket_of(rows)
    kind = (function, few_rows, shapes, x.dtype, x.device, TABLE.changes)
    if kind not in _programs:
        refuse_capture(f"{function} of a patched model, with {rows} rows")
    found = _programs.made(kind, lambda: _made(kind, function, inputs))
    if found is None or not (found.recorded if is_capturing() else found.called):
        return None
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found.program(*inputs))


def parameters_of(layers: Sequence[Any]) -> tuple[list[Tensor], tuple[bool, ...]]:
    """Matrices of linear layers, each followed by its bias, and which layers have one."""
    parameters = [p for m in layers for p in (m.weight, m.bias) if p is not None]
    return parameters, tuple(m.bias is not None for m in layers)


def _made(kind: Any, function: Function, inputs: list[Tensor]) -> Found | None:
    """The program of a kind of calls; None, and an entry in `refused`, if the original runs."""
    try:
        return _found(function, inputs)
    except (CutesuperError, Failed, torch.OutOfMemoryError) as error:
        shapes = " ".join(str(list(t.shape)) for t in inputs)
        if isinstance(error, CacheError):  # not this program's fault, and easily fixed
            warn_once(f"patched models run their own code: {error}")
        refused[kind] = f"{function} of {shapes}: {str(error).splitlines()[0]}"
        return None


def _found(function: Function, inputs: list[Tensor]) -> Found:
    """A program that computes the same in less time. Raises CutesuperError or Failed."""
    rows = torch.export.Dim("rows", max=MOST_ROWS)
    # torch.export treats an extent of one row as a constant
    dynamic = None if len(inputs[0]) == 1 else ({0: rows}, (None,) * (len(inputs) - 1))
    program = superoptimize_callable(function.__call__, inputs, dynamic_shapes=dynamic)
    theirs = function(*inputs)
    exact = function(*[t.double() for t in inputs])
    for a, b, c in zip(program(*inputs), exact, theirs, strict=True):
        within_rule(a, b, c)
    return _timed(program, function, inputs) if inputs[0].device.type == "cuda" else Found(program)


def _timed(program: Function, function: Function, inputs: list[Tensor]) -> Found:
    """A program with where it is faster than the function. Raises Failed if that is nowhere."""
    called = [called_us(partial(f, *inputs), inputs[0].device) for f in (program, function)]
    recorded = _recorded_us((program, function), inputs) or called
    if called[0] >= called[1] and recorded[0] >= recorded[1]:
        raise Failed("; ".join(
            f"{where} {ours:.0f} us, the original {theirs:.0f} us"
            for where, (ours, theirs) in (("calls:", called), ("in CUDA graphs:", recorded))
        ))  # fmt: skip
    return Found(program, called[0] < called[1], recorded[0] < recorded[1])


def _recorded_us(functions: Sequence[Function], inputs: list[Tensor]) -> list[float] | None:
    """Microseconds of each on the GPU alone, with inputs from memory.
    None if there is no memory for copies of them, where the time of calls decides for both."""
    calls = [lambda given, f=f: f(*given) for f in functions]
    try:
        with torch.cuda.device(inputs[0].device):
            clock = CudaDevice()
            return device_us(calls, lambda n: [t.clone() for t in inputs] if n else inputs, clock)
    except (MemoryError, torch.OutOfMemoryError):
        return None
