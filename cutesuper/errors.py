"""All errors that cutesuper raises for users.

A message states the request, the fault, its place and the remedy, in that order, e.g.
``matmul(X[16, 4096], W[4095, 6144]): inner dimensions 4096 and 4095 differ; transpose or reshape
one of them``. Nothing in the package raises a bare ``assert`` at a user, and nothing aborts the
process.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def frameless(error: E) -> E:
    """Remove the tracebacks of an error and its causes, so that it can be kept.
    Frames know their callers, and would keep alive every tensor of theirs."""
    error.__traceback__ = None
    link = error.__cause__ or error.__context__
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


class CutesuperError(Exception):
    """Base of all errors raised by cutesuper."""


class OperatorError(CutesuperError, ValueError):
    """An operator that does not exist, or that was called with attributes it does not have."""


class OptionError(CutesuperError, ValueError):
    """An option that does not exist, or a value that it cannot have."""


class ShapeError(CutesuperError, ValueError):
    """Ranks or extents that do not fit together."""


class RangeError(CutesuperError, IndexError):
    """An index of no row of a tensor."""


class DTypeError(CutesuperError, TypeError):
    """An element type that is unknown or not allowed here."""


class DeviceError(CutesuperError, RuntimeError):
    """Tensors on the wrong device, or a device that cannot run the request."""


class LayoutError(CutesuperError, ValueError):
    """A tensor whose strides or alignment a kernel cannot read."""


class GraphError(CutesuperError, ValueError):
    """A graph that violates a rule of ``ir/check.py``."""


class FormatError(CutesuperError, ValueError):
    """A malformed file from outside (graph, schedule, exported kernel), or one of another kind."""


class SearchError(CutesuperError, RuntimeError):
    """The search found no program, or was given a budget it cannot work with."""


class VerificationError(CutesuperError, RuntimeError):
    """A program that does not compute the function of its graph."""


class ScheduleError(CutesuperError, RuntimeError):
    """No schedule for a program fits the device."""


class TuningError(CutesuperError, RuntimeError):
    """No candidate could be timed, or the tuner was given a budget it cannot work with."""


class LoweringError(CutesuperError, NotImplementedError):
    """A program that the lowering cannot express yet."""


#: errors that mean "no kernel for this graph"; others concern the options or the machine
NO_KERNEL = (SearchError, LoweringError, ScheduleError)


class TraceError(CutesuperError, RuntimeError):
    """A PyTorch function with a part that cannot become a kernel graph."""


class CompileError(CutesuperError, RuntimeError):
    """The compiler refused a kernel, or a tool it needs is missing."""


class CacheError(CutesuperError, RuntimeError):
    """A cache or temporary folder that cannot be used at all, or that others can write.
    A damaged entry is a miss, not an error."""


class PatchError(CutesuperError, RuntimeError):
    """A model that cannot be patched, or a patch that cannot be undone."""


class GenerationError(CutesuperError, RuntimeError):
    """A model whose decoding steps `cutesuper.generate` cannot run or record."""


__all__ = [
    "CacheError",
    "CompileError",
    "CutesuperError",
    "DTypeError",
    "DeviceError",
    "FormatError",
    "GenerationError",
    "GraphError",
    "LayoutError",
    "LoweringError",
    "OperatorError",
    "OptionError",
    "PatchError",
    "RangeError",
    "ScheduleError",
    "SearchError",
    "ShapeError",
    "TraceError",
    "TuningError",
    "VerificationError",
    "frameless",
]
