"""Traced programs: superoptimized functions of PyTorch, traced again at a call if necessary."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from cutesuper.errors import CutesuperError, GraphError, TraceError
from cutesuper.ir.arguments import as_path
from cutesuper.runtime.calling import Picker
from cutesuper.runtime.kernel import Kernel
from cutesuper.torch.compile.call_form import Border, Form, border_of, form_of, stand_ins, state_of
from cutesuper.torch.compile.rest import Left
from cutesuper.torch.compile.trace_report import TracedRegion, trace_text
from cutesuper.torch.compile.watch import Watch, difference

#: traces of a program before further ones are refused: each is a search, and is kept
MOST_TRACES = 64

#: PyTorch's messages on arguments that a traced program cannot take, and what helps
_ADVICE = (
    (
        "view size is not compatible",
        "a tensor has other strides than it was traced with; call .contiguous() on it",
    ),
    (
        "is out of bounds for dimension",
        "PyTorch raises as well: an index or a label names no element; correct it",
    ),
    (
        "Cannot access data pointer",
        (
            "an argument is no tensor in memory, as under torch.func, torch.vmap and torch.export; "
            "transform the function first, and superoptimize what comes out"
        ),
    ),
)


@dataclass(frozen=True)
class Trace:
    """The result of tracing a function once.

    Attributes:
        module: takes the flat arguments, then other tensors that the function reads; returns the
            flat results.
        regions: its parts that kernels compute.
        outside: the operators that PyTorch computes, in order.
        once: those that it has computed once, since they depend on no input.
        undifferentiable: why it has no gradient, or nothing.
        read: takes those tensors out of all that a `Watch` has found.
        results: their structure.
        arguments: nodes that stand for the arguments.
        names: of those by name, in their order.
        ranges: of extents that may differ.
        forward_only: whether it differs where gradients are recorded: PyTorch computes a part of
            its regions there, or an operator that stays whole is another one.
    """

    module: fx.GraphModule
    regions: tuple[TracedRegion, ...]
    outside: tuple[Left, ...]
    once: tuple[Left, ...]
    undifferentiable: str
    read: Picker
    results: pytree.TreeSpec
    arguments: tuple[fx.Node, ...]
    names: tuple[str, ...]
    ranges: Mapping[Any, Any]
    forward_only: bool

    def __call__(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Run the traced program.

        Args:
            leaves: the flat arguments.
            tensors: all that the `Watch` has found.
        """
        made = self.module.forward(*leaves, *self.read(tensors))
        return made[0] if self.results.is_leaf() else pytree.tree_unflatten(made, self.results)

    def border(self, form: Form, args: Any, kwargs: Any) -> Border:
        """The arguments that it takes, given those that it was traced with."""
        found = [n.meta.get("val") for n in self.arguments]
        shapes = [v.shape for v in found if isinstance(v, torch.Tensor)]
        symbolic = any(isinstance(e, torch.SymInt) for shape in shapes for e in shape)
        nodes = self.arguments if symbolic else ()
        return border_of(form, args, {n: kwargs[n] for n in self.names}, nodes, self.ranges)


class Refused(torch.autograd.Function):
    """Identity on the results of a program that has no gradient."""

    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: torch.Tensor) -> Any:
        """Return the first ``count`` tensors; the others are those that they depend on."""
        ctx.why = why
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        del cotangents
        raise GraphError(ctx.why)


def _is_number(value: Any) -> bool:
    """True for a tensor that can have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class ChangesItself(Exception):
    """The traced function changes a value that it reads; the message names it."""


#: traces a function, which reads what a `Watch` has found, with arguments by place and by name, for
#: calls that record gradients or not
Tracer = Callable[[Any, Watch, Sequence[Any], dict[str, Any], bool], Trace]


class TracedProgram:
    """A function or a module of PyTorch whose operators run as superoptimized kernels.

    It is called like the original, with tensors of the shapes that it was traced with (extents that
    were declared dynamic may differ), by place or by name. Other tensors that the function reads
    (parameters, buffers, those in closures, globals and attributes) are read anew at every call,
    and get gradients like inputs: the first ``backward()`` makes kernels for them
    (`Kernel.gradient`; with ``gradients=True`` the first call that records gradients does). If
    anything else that the function reads has changed, or if other arguments are one tensor or are
    on another device, it is traced again, and earlier traces are kept. If the function cuts a path
    out of its gradient (``detach``, ``torch.no_grad``) or has formulas of its own
    (``torch.autograd.Function``), calls have no gradient: ``backward()`` is refused.

    Args:
        fn: the function or module.
        name: of it, for messages.
        tracer: traces it.
        args: by place, to trace it with.
        kwargs: by name.

    Raises:
        TraceError: it cannot be traced, or changes what it reads.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, tracer: Tracer, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._fn = fn
        self._name = name
        self._tracer = tracer
        self._lock = threading.RLock()
        self._traces: dict[Any, dict[Any, Trace]] = {}
        watch, self._latest = self._traced(Watch(fn), args, kwargs, ())
        self._border = self._latest.border(form_of(fn, args, kwargs), args, kwargs)
        leaves = self._border.leaves(args, kwargs)
        self._keep(watch, state_of(self._border.tensors(leaves), watch), self._latest)

    # ----------------------------------------------------------------------------- what was traced

    @property
    def regions(self) -> tuple[TracedRegion, ...]:
        """Regions of the program that ran last, each with its own kernel graph.
        Views connect them."""
        return self._latest.regions

    @property
    def outside(self) -> tuple[str, ...]:
        """Operators that stay with PyTorch, with the user's lines.
        Those that compute no numbers (copies, sorting, masks, positions), calls of `cutesuper.ops`,
        which run kernels of their own, and with ``rest="torch"`` all that no kernel computes."""
        return tuple(dict.fromkeys(map(str, self._latest.outside)))

    @property
    def graph_module(self) -> fx.GraphModule:
        """The program that ran last.
        A function of the flat arguments and the other tensors that it reads."""
        return self._latest.module

    @property
    def kernel(self) -> Kernel:
        """The kernel, if there is only one region.

        Raises:
            TraceError: there are several, see `regions`.
        """
        if len(self.regions) != 1:
            raise TraceError(
                f"{self._name}: it has {len(self.regions)} regions, so no one kernel; use "
                ".regions[i].kernel"
            )
        return self.regions[0].kernel

    def explain(self) -> str:
        """Totals, PyTorch's part, and the regions.
        Of each its place, its tensors, and how its program was found, verified and priced."""
        return trace_text(self._name, self.regions, self._latest.outside, self._latest.once)

    def draw(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """`Kernel.draw` of the kernel of each region.

        Args:
            path: of the file; of several regions each has its own, ``program.0.html``,
                ``program.1.html`` and so on for ``program.html``, with the numbers of `explain`.

        Returns:
            The files.

        Raises:
            FormatError: as for `Kernel.draw`.
            TraceError: there is no region.
        """
        if not self.regions:
            raise TraceError(f"{self._name}: no kernel computes any of it, so nothing can be drawn")
        file = Path(as_path("draw", path))
        files = [file.with_name(f"{file.stem}.{i}{file.suffix}") for i in range(len(self.regions))]
        files = [file] if len(files) == 1 else files
        for region, name in zip(self.regions, files, strict=True):
            region.kernel.draw(name)
        return tuple(files)

    def export(
        self, path: str | os.PathLike[str], *, header: str | os.PathLike[str] | None = None
    ) -> None:
        """Write the program that ran last as a shared library for C and C++.
        All kernels and the tensors between them are inside; without ``header`` it is what
        `Kernel.export` of its only kernel writes, for `cutesuper.load`.

        Its tensors are the arguments, then those that the function reads (parameters), then the
        results.

        Args:
            path: of the library.
            header: of a file to write; for ``x.h`` the functions are ``x_run`` and others.

        Raises:
            TraceError: PyTorch computes a part of it, says which; several regions and no header.
            FormatError: ``path`` is not the name of a file, or ``header`` no name in C.
            CompileError: no C compiler or no static CUDA runtime to link with, or a file cannot be
                written.
        """
        from cutesuper.torch.compile.trace_export import export_trace, names_of

        if header is None:
            if len(self.regions) != 1:
                raise TraceError(
                    f"export({self._name}): it has {len(self.regions)} regions, which one library "
                    "holds with functions for C only: give it header=, as header='x.h'"
                )
            return self.kernel.export(path)
        trace, tensors = self._latest, self._latest.read(self._now[0].tensors)
        names = names_of(self._fn, tensors)
        read = {f"read_{i}": pair for i, pair in enumerate(zip(names, tensors, strict=True), 1)}
        export_trace(self._name, trace, read, self.explain(), (path, header))

    # ------------------------------------------------------------------------------------- calling

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        """True if it can be called with these arguments without being traced for their shapes."""
        try:
            self._border.leaves(args, kwargs)
        except (CutesuperError, RuntimeError, ValueError, TypeError, AssertionError):
            return False
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; trace it first if necessary.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: an argument that does not fit.
            GraphError: a gradient that cannot be recorded; says why.
            TraceError: arguments of another structure than it was traced with, or a program that
                cannot be traced in its present state.
        """
        try:
            leaves = self._border.leaves(args, kwargs)
            given = self._border.tensors(leaves)
            watch, known = self._present()
            state = state_of(given, watch)
            trace = known.get(state)
            if trace is None:
                watch, trace = self._again(watch, state, leaves)
            if trace.forward_only and torch.is_grad_enabled():
                watch, trace = self._recording(watch, trace, state, leaves)
            self._latest = trace
            if trace.undifferentiable and torch.is_grad_enabled():
                tensors = (*given, *trace.read(watch.tensors))
                if any(t.requires_grad for t in tensors):
                    with torch.no_grad():
                        made = trace(leaves, watch.tensors)
                    return self._without_gradients(trace, tensors, made)
            return trace(leaves, watch.tensors)
        except CutesuperError:
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            advice = next(
                (a for text, a in _ADVICE if text in str(error)),
                "trace it again with arguments like these, or declare the extent in "
                "dynamic_shapes=",
            )
            raise TraceError(
                f"{self._name}: these arguments do not fit the ones it was traced with: {error}; "
                f"{advice}"
            ) from error

    def _present(self) -> tuple[Watch, dict[Any, Trace]]:
        """The values that the function reads now, and the traces made with the same ones."""
        watch, known = self._now
        if watch.holds():
            return watch, known
        with self._lock:
            watch = Watch(self._fn, watch.names)
            self._now = watch, self._traces.setdefault(watch.facts, {})
            return self._now

    def _keep(self, watch: Watch, state: Any, trace: Trace) -> None:
        known = self._traces.setdefault(watch.facts, {})
        known[state] = trace
        self._now = watch, known

    def _without_gradients(self, trace: Trace, tensors: Sequence[torch.Tensor], made: Any) -> Any:
        """The results of a trace whose ``backward()`` is refused.

        Args:
            trace: has no gradient.
            tensors: that it reads; at least one requires a gradient.
            made: the results.
        """
        why = (
            f"{self._name}: an argument or a parameter requires a gradient, and "
            f"{trace.undifferentiable}, which a traced program does not know of; take that part "
            'out of the function, or train with torch.compile(fn, backend="cutesuper")'
        )
        leaves, structure = pytree.tree_flatten(made)
        places = [i for i, t in enumerate(leaves) if _is_number(t)]
        asking = [t for t in tensors if t.requires_grad]
        marked = Refused.apply(why, len(places), *(leaves[i] for i in places), *asking)
        for i, t in zip(places, marked, strict=True):
            leaves[i] = t
        return pytree.tree_unflatten(leaves, structure)

    # ------------------------------------------------------------------------------------- tracing

    def _recording(
        self, watch: Watch, trace: Trace, state: Any, leaves: Sequence[Any]
    ) -> tuple[Watch, Trace]:
        """The trace for a call that records gradients of these tensors (`Trace.forward_only`)."""
        tensors = (*self._border.tensors(leaves), *watch.tensors)
        recorded = tuple(t.requires_grad for t in tensors)
        if not any(recorded):
            return watch, trace
        found = self._traces.get(watch.facts, {}).get((state, recorded))
        return (watch, found) if found else self._again(watch, state, leaves, recorded)

    def _again(
        self, watch: Watch, state: Any, leaves: Sequence[Any], recorded: tuple[bool, ...] = ()
    ) -> tuple[Watch, Trace]:
        """A trace for a call that has none yet; ``recorded``: see `_recording`."""
        state = (state, recorded) if recorded else state
        with self._lock:
            found = self._traces.get(watch.facts, {}).get(state)
            if found is not None:
                return watch, found
            self._check_count(watch)
            args, kwargs = pytree.tree_unflatten(list(leaves), self._border.structure)
            other = self._border.symbolic and not watch.measures
            shapes = [shape for _, shape in self._border.kinds] if other else []
            watch, trace = self._traced(watch, args, kwargs, shapes, bool(recorded))
            state = state_of(self._border.tensors(leaves), watch)
            self._keep(watch, (state, recorded) if recorded else state, trace)
            return watch, trace

    def _check_count(self, watch: Watch) -> None:
        if sum(map(len, self._traces.values())) < MOST_TRACES:
            return
        changes = (difference(facts, watch.facts) for facts in reversed(self._traces))
        what = next(filter(None, changes), "its arguments are shared or laid out in another way")
        raise TraceError(
            f"{self._name}: it was traced {MOST_TRACES} times, each time for something else that "
            f"it reads ({what}); make what changes at every call an argument or a tensor"
        )

    def _traced(
        self, watch: Watch, args: Sequence[Any], kwargs: dict[str, Any],
        shapes: Sequence[torch.Size], recorded: bool = False,
    ) -> tuple[Watch, Trace]:  # fmt: skip
        """A trace, and the values that the function read.
        Values that a first call makes for later ones, such as a table in an attribute, are made in
        a call without tracing."""
        leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
        given, named = pytree.tree_unflatten(stand_ins(leaves, watch.tensors, shapes), structure)
        try:
            return watch, self._tracer(self._fn, watch, given, named, recorded)
        except ChangesItself:
            with torch.no_grad():
                self._fn(*args, **kwargs)
        watch = Watch(self._fn, watch.names)
        try:
            return watch, self._tracer(self._fn, watch, given, named, recorded)
        except ChangesItself as change:
            raise TraceError(
                f"superoptimize({self._name}): it changes what it reads: {change}. A traced "
                "program would not do that; return the new value, or leave this outside of the "
                "function"
            ) from None

    # -------------------------------------------------------------------------------------- copies

    def __copy__(self) -> TracedProgram:
        """The program itself."""
        return self

    def __deepcopy__(self, memo: Any) -> TracedProgram:
        """The program of a copy of the module, with the same kernels; functions have no copies."""
        made = object.__new__(TracedProgram)
        memo[id(self)] = made
        for name, value in vars(self).items():
            setattr(made, name, value)
        made._fn = copy.deepcopy(self._fn, memo)
        made._lock = threading.RLock()
        with self._lock:
            made._traces = {facts: dict(known) for facts, known in self._traces.items()}
        watch = Watch(made._fn, self._now[0].names)
        made._now = watch, made._traces.setdefault(watch.facts, {})
        return made

    def __reduce__(self) -> Any:
        raise GraphError(
            f"{self!r}: traced programs cannot be pickled, since they hold loaded code; save the "
            "state_dict() of the module, and superoptimize it again where it is loaded (what was "
            "compiled is in the cache)"
        )

    def __repr__(self) -> str:
        return f"TracedProgram({self._name}: {len(self.regions)} region(s))"
