"""`cutesuper.superoptimize` for kernel graphs and for PyTorch programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from cutesuper import pipeline
from cutesuper.errors import GraphError, OptionError
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel

if TYPE_CHECKING:
    from cutesuper.torch.compile.trace import Lazy
    from cutesuper.torch.compile.traced_program import TracedProgram

#: default in place of None, which a caller may pass by mistake
_LEFT_OUT: Any = object()


@overload
def superoptimize(program: KernelGraph, /, **options: Any) -> Kernel: ...


@overload
def superoptimize(
    program: Callable[..., Any], example_inputs: Sequence[Any], /, *,
    example_kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None,
    rest: Literal["refuse", "torch"] = "refuse", **options: Any,
) -> TracedProgram: ...  # fmt: skip


@overload
def superoptimize(program: Callable[..., Any], /, **options: Any) -> Lazy: ...


@overload
def superoptimize(**options: Any) -> Callable[[Callable[..., Any]], Lazy]: ...


def superoptimize(
    program: Any = _LEFT_OUT,
    example_inputs: Sequence[Any] | None = None,
    /,
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """Find, verify and compile the best program for a kernel graph, a function or a module.

    Args:
        program: a kernel graph, or a PyTorch module or function of tensors.
        example_inputs: arguments for tracing a function or module. Without them it is traced at
            its first call with arguments of a kind, so this is also a decorator.
        example_kwargs: example arguments by name.
        dynamic_shapes: extents that may differ from call to call, as for ``torch.export.export``:
            ``{"x": {0: torch.export.Dim("batch")}}``. The first extents of a tensor only.
        options: ``target``, ``dependent_launch``, ``seed``, ``budget_s``, ``executor``, ``tuned``,
            ``gradients``, ``on_progress``, ``cache``, see `cutesuper.pipeline.superoptimize`. For a
            function or module also ``rest``: "refuse" raises if no kernel computes a part of it,
            "torch" leaves such parts to PyTorch (``explain()`` says which, why, and their cost).

    Returns:
        A `Kernel` for a kernel graph; for PyTorch a `TracedProgram`, which is called like the
        original (see `cutesuper.torch.compile.trace`), or an object that makes one at the first
        call.

    Raises:
        GraphError: ``program`` is neither.
        OptionError: example inputs that are no list or tuple, or an option of another kind.
        TraceError: an operator that is no part of a kernel graph; names the user's file and line.
        ShapeError, SearchError, LoweringError, ScheduleError, CompileError: as for kernel graphs.
    """
    if isinstance(program, KernelGraph):
        if example_inputs is not None or example_kwargs or dynamic_shapes is not None:
            raise GraphError(
                "superoptimize(graph, example_inputs): a kernel graph has its shapes; leave out "
                "the examples"
            )
        return pipeline.superoptimize(program, **options)
    if program is _LEFT_OUT:
        return lambda fn: superoptimize(fn, dynamic_shapes=dynamic_shapes, **options)
    if not callable(program):
        raise GraphError(
            f"superoptimize({type(program).__name__}): give it a kernel graph, made with "
            "cutesuper.new_kernel_graph(), or a function or module of PyTorch"
        )
    if isinstance(program, type):
        raise GraphError(
            f"superoptimize({program.__qualname__}): it is a class; give it a module made of it, "
            f"as superoptimize({program.__name__}(...), example_inputs)"
        )
    from cutesuper.torch.compile.trace import Lazy, superoptimize_callable

    if not isinstance(example_inputs, list | tuple | None):
        raise OptionError(
            f"superoptimize(program, {type(example_inputs).__name__}): give it the arguments of "
            "the function or module as a tuple"
        )
    if example_inputs is None and not example_kwargs:
        return Lazy(program, {"dynamic_shapes": dynamic_shapes, **options})
    return superoptimize_callable(
        program, example_inputs or (), example_kwargs=example_kwargs,
        dynamic_shapes=dynamic_shapes, **options,
    )  # fmt: skip


KernelGraph.superoptimize = pipeline.superoptimize
