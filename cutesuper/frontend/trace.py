"""`cutesuper.superoptimize` of a function or a module of PyTorch."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cutesuper.errors import CutesuperError, GraphError, TraceError
from cutesuper.frontend.blame import NO_KERNEL, refusal, without_kernel
from cutesuper.frontend.internals import autograd_functions, decompositions
from cutesuper.frontend.pairs import is_complex, pair_complex
from cutesuper.frontend.partition import partition
from cutesuper.frontend.positions import unread
from cutesuper.frontend.region import Region, places, source_lines
from cutesuper.frontend.rewrite import Call, rewrite
from cutesuper.frontend.table import is_free, is_known, moves
from cutesuper.frontend.values import CONDITIONS, INTEGERS
from cutesuper.graph.operators import TABLE
from cutesuper.optimize import superoptimize as optimize_graph
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.tensors import usable

#: nodes of a traced program that only check what it was traced with
_CHECKS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range",
           "aten._assert_async", "aten.sym_size")  # fmt: skip


#: masks, positions and labels, with which PyTorch goes on computing
_NO_NUMBERS = (*CONDITIONS, *INTEGERS)


#: what changes gradients and not values
_DETACHING = (
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.higher_order.wrap_with_set_grad_enabled,
)


class _Call(nn.Module):
    """A region's kernel in the place of its nodes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.kernel([usable(t) for t in tensors])


@dataclass(frozen=True)
class TracedRegion:
    """A part of a traced program, and what runs it.

    Attributes:
        place: the user's lines: ``model.py:12-18``.
        kernel: the superoptimized program; ``kernel.graph`` is the definition.
    """

    place: str
    kernel: Kernel


#: what PyTorch says of arguments that a traced program cannot take, and what helps
_ADVICE = (
    (
        "view size is not compatible",
        "a tensor has other strides than it was traced with; call .contiguous() on it",
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
class _Form:
    """How a function was called when it was traced.

    Attributes:
        signature: of the function; None where nobody knows it.
        places: how many arguments were given by place.
        names: of those that were given by name.
    """

    signature: inspect.Signature | None
    places: int
    names: frozenset[str]

    def fit(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The same arguments, by place and by name as they were given then.

        Raises:
            TypeError: one that is missing, or was left to its default then.
        """
        if len(args) == self.places and kwargs.keys() == self.names:
            return args, kwargs
        if self.signature is None:
            raise TypeError(f"it was traced with {self.places} argument(s) by place and "
                            f"{sorted(self.names)} by name, and got {len(args)} and "
                            f"{sorted(kwargs)}")
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        by_place = list(given.arguments)[: self.places]
        for name, value in given.arguments.items():
            traced = name in by_place or name in self.names
            if not traced and value is not self.signature.parameters[name].default:
                raise TypeError(f"the argument {name!r} was left to its default when it was traced")
        values = given.arguments
        return tuple(values[n] for n in by_place), {n: values[n] for n in sorted(self.names)}


def _form(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> _Form:
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):  # functions of C have none
        signature = None
    kinds = (p.kind for p in signature.parameters.values()) if signature else ()
    if any(k in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for k in kinds):
        signature = None
    return _Form(signature, len(args), frozenset(kwargs or {}))


class TracedProgram:
    """A function or a module of PyTorch whose operators run as superoptimized kernels.

    It is called like the original, with tensors of the shapes that it was traced with (extents that
    were declared dynamic may differ), by place or by name. Parameters are read at every call, where
    they are (a module that is given other ones has to be traced again), and get gradients like
    inputs: the first call that records some makes kernels for them (`Kernel.gradient`). Where the
    function leaves a way out of its gradient (``detach``, ``torch.no_grad``) or has formulas of its
    own (``torch.autograd.Function``), calls that record gradients are refused.

    Attributes:
        regions: its parts, each a kernel graph of its own; views stand between them.
        outside: operators that compute no numbers and stay PyTorch's (copies, sorting, masks,
            positions), with the user's lines.
        graph_module: the program as it runs.
    """

    def __init__(
        self, module: fx.GraphModule, regions: Sequence[TracedRegion], name: str,
        outside: Sequence[str] = (), undifferentiable: str = "", form: _Form | None = None,
    ) -> None:
        self.graph_module = module
        self.regions = tuple(regions)
        self.outside = tuple(outside)
        self._name = name
        self._undifferentiable = undifferentiable
        self._form = form

    @property
    def kernel(self) -> Kernel:
        """The kernel, where there is one region.

        Raises:
            TraceError: there are several, see `regions`.
        """
        if len(self.regions) != 1:
            raise TraceError(
                f"{self._name}: it has {len(self.regions)} regions, so no one kernel; use "
                ".regions[i].kernel"
            )
        return self.regions[0].kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            ShapeError, DTypeError, LayoutError, DeviceError: an argument that does not fit.
            GraphError: a gradient that cannot be recorded; says why.
            TraceError: arguments of another structure than it was traced with.
        """
        if self._undifferentiable and torch.is_grad_enabled():
            self._refuse_gradients((args, kwargs))
        if self._form is not None:
            args, kwargs = self._fit(self._form, args, kwargs)
        try:
            return self.graph_module(*args, **kwargs)
        except CutesuperError:
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            advice = next((a for text, a in _ADVICE if text in str(error)),
                          "trace it again, or declare the extent in dynamic_shapes=")
            raise TraceError(
                f"{self._name}: these arguments do not fit the ones it was traced with: {error}; "
                f"{advice}"
            ) from error

    def _fit(self, form: _Form, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            return form.fit(args, kwargs)
        except TypeError as error:
            raise TraceError(
                f"{self._name}: these arguments do not fit the ones it was traced with: {error}; "
                "trace it again with arguments like these"
            ) from error

    def _refuse_gradients(self, arguments: Any) -> None:
        given = (t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))
        if any(t.requires_grad for t in (*given, *self.graph_module.parameters())):
            raise GraphError(
                f"{self._name}: an argument or a parameter requires a gradient, and "
                f"{self._undifferentiable}, which a traced program does not know of; call it under "
                "torch.no_grad(), take that part out of the function, or train with "
                'torch.compile(fn, backend="cutesuper")'
            )

    def explain(self) -> str:
        """Where each region stands, and how its program was found, verified and priced."""
        parts = [f"{self._name}: {len(self.regions)} region(s)"]
        for i, r in enumerate(self.regions):
            parts.append(f"region {i} ({r.place or 'no source'})\n{r.kernel.explain()}")
        if self.outside:
            parts.append("PyTorch computes\n" + "\n".join(f"  {line}" for line in self.outside))
        return "\n\n".join(parts)

    def __copy__(self) -> TracedProgram:
        """Itself: nothing about it changes."""
        return self

    def __deepcopy__(self, memo: Any) -> TracedProgram:
        """With parameters of its own, and the same kernels."""
        return TracedProgram(
            copy.deepcopy(self.graph_module, memo), self.regions, self._name, self.outside,
            self._undifferentiable, self._form,
        )

    def __reduce__(self) -> Any:
        raise GraphError(
            f"{self!r}: traced programs cannot be pickled, since they hold loaded code; save the "
            "state_dict() of the module, and superoptimize it again where it is loaded (what was "
            "compiled is in the cache)"
        )

    def __repr__(self) -> str:
        return f"TracedProgram({self._name}: {len(self.regions)} region(s))"


def superoptimize_callable(
    fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> TracedProgram:
    """Trace a function or a module and superoptimize what it computes.

    Args:
        fn: of tensors; traced by ``torch.export``.
        example_inputs: its arguments.
        example_kwargs: arguments by name.
        dynamic_shapes: as for ``torch.export.export``.
        options: of `cutesuper.superoptimize`.

    Raises:
        TraceError: something in it is no operator of kernel graphs; names the user's line.
        SearchError, LoweringError, ScheduleError: no kernel can run some of it; names the user's
            line.
        CompileError: as for a kernel graph.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)
    module, undifferentiable = _exported(
        fn, name, example_inputs, example_kwargs, dynamic_shapes
    )
    regions = regions_of(module, name)
    outside = _outside(module.graph, regions)
    traced: list[TracedRegion] = []
    kernels: dict[str, Kernel] = {}
    for i, region in enumerate(regions):
        kernel = kernels.get(region.key)
        if kernel is None:
            kernel = kernels[region.key] = _kernel(name, region, options)
        module.add_submodule(f"region_{i}", _Call(kernel))
        traced.append(TracedRegion(region.place, kernel))
    rewrite(module.graph, [Call(r, f"region_{i}") for i, r in enumerate(regions)])
    module.graph.lint()
    module.recompile()
    form = _form(fn, example_inputs, example_kwargs)
    return TracedProgram(module, traced, name, outside, undifferentiable, form)


def _kernel(name: str, region: Region, options: dict[str, Any]) -> Kernel:
    try:
        return optimize_graph(region.graph, **options)
    except NO_KERNEL as error:
        raise without_kernel(name, region, error, options.get("target")) from error
    except CutesuperError as error:
        error.add_note(f"in {name}, {region.place or 'no source'}:\n{region.graph!r}")
        raise


def _exported(
    fn: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Any, dynamic_shapes: Any
) -> tuple[fx.GraphModule, str]:
    """The traced program, and what there is in it that changes gradients and not values."""
    module = fn if isinstance(fn, nn.Module) else _Function(fn)
    if not isinstance(args, list | tuple):
        args = (args,)
    try:
        # gradients are recorded, so that it can be seen where the function does not want that
        with torch.enable_grad(), autograd_functions() as own:
            program = torch.export.export(
                module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
        undifferentiable = _undifferentiable(program, own)
        nodes = list(program.graph.nodes)
        if any(_is_unknown(n) or is_complex(n) for n in nodes):
            program = program.run_decompositions(decompositions(is_known))
        elif any(map(_is_nested, nodes)):
            # mutation becomes new values, and what stands under autocast, no_grad or vmap comes
            # inline
            program = program.run_decompositions({})
    except Exception as error:
        raise TraceError(
            f"superoptimize({name}): torch.export cannot trace it: {error}"
        ) from error
    options = {"check_guards": False} if _has_guards() else {}
    return program.module(**options), undifferentiable


def _undifferentiable(program: torch.export.ExportedProgram, own: Sequence[str]) -> str:
    """What there is in a program that changes gradients and not values, or nothing."""
    if own:
        return f"it calls {own[0]}, a torch.autograd.Function, whose formula is its own"
    names = program.graph_signature
    given = {*names.user_inputs, *names.inputs_to_parameters}
    reaching: set[fx.Node] = set()
    for n in program.graph.nodes:
        source = n.op == "placeholder" and n.name in given
        if reaching.intersection(n.all_input_nodes) or source:
            if _dtype(n.meta.get("val")) not in _NO_NUMBERS:
                reaching.add(n)
            if n.target in _DETACHING:
                lines = source_lines(n)
                where = f", at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
                return f"it stops gradients ({n.target}{where})"
    return ""


def _is_unknown(node: fx.Node) -> bool:
    """Whether an operator is one that the table does not have."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_known(node.target)


def _is_nested(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    transform = isinstance(node.target, types.FunctionType | types.BuiltinFunctionType) and (
        "functorch" in (node.target.__module__ or "")
    )
    return bool(schema and schema.is_mutable) or transform or (
        isinstance(node.target, torch._ops.HigherOrderOperator)
    )


@functools.cache
def _has_guards() -> bool:
    return "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters


class _Function(nn.Module):
    """A function as a module, which is what export takes."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._fn = fn
        if isinstance(fn, types.FunctionType):
            self.forward = _called_forward(fn)
        elif isinstance(fn, types.MethodType):
            self.forward = fn
        elif isinstance(call := getattr(fn, "__call__", None), types.MethodType):  # noqa: B004
            self.forward = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def _called_forward(fn: types.FunctionType) -> Callable[..., Any]:
    """The same function under this name: export notes the lines of no other."""
    code = fn.__code__.replace(co_name="forward")
    same = types.FunctionType(code, fn.__globals__, "forward", fn.__defaults__, fn.__closure__)
    same.__kwdefaults__ = fn.__kwdefaults__
    return functools.wraps(fn)(same)


def regions_of(module: fx.GraphModule, name: str) -> tuple[Region, ...]:
    """The regions of a traced program, of which nothing may be left over that computes numbers.

    Args:
        module: exported.
        name: of the function, for messages.

    Raises:
        TraceError: naming the first operator that is in no region.
    """
    _fill_values(module)
    pair_complex(module)
    graph = module.graph
    _drop_checks(graph)
    found = partition(graph, constants=[n for n in graph.nodes if n.op == "get_attr"])
    inside = _computed(found.regions)
    given = _depending(graph)
    left = [n for n in graph.nodes if _is_left(n) and n not in inside and n in given]
    for node in left:
        # of what belongs together the last says why; a condition alone is never a kernel graph
        if not any(u in left for u in _readers(node)):
            reason = _complex(node) or found.refused.get(node) or _reason(node)
            raise refusal(TraceError, name, node, reason)
    if not found.regions:
        raise TraceError(f"superoptimize({name}): it computes nothing that kernels could, "
            "no numbers in float16, bfloat16 or float32")
    return found.regions


def _outside(graph: fx.Graph, regions: Sequence[Region]) -> list[str]:
    """What is in no region and does more than look at a tensor in another way."""
    inside = _computed(regions)
    left = [
        n for n in graph.nodes
        if n.op == "call_function" and n not in inside and not is_free(n)
        and any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(n.meta.get("val")))
    ]  # fmt: skip
    return list(dict.fromkeys(f"{n.target} ({places([n]) or 'no source'})" for n in left))


def _computed(regions: Sequence[Region]) -> set[fx.Node]:
    """The nodes of regions, and masks that nobody makes any more."""
    nodes = {n for r in regions for n in r.nodes}
    return nodes | unread(nodes)


def _depending(graph: fx.Graph) -> set[fx.Node]:
    """What is not the same in every call."""
    found: set[fx.Node] = set()
    for n in graph.nodes:
        if n.op in ("placeholder", "get_attr") or found.intersection(n.all_input_nodes):
            found.add(n)
    return found


def _reason(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema and schema.is_mutable:
        changed = getattr(node.args[0], "target", None) if node.args else None
        return (
            f"changes an argument, a parameter or a buffer ({changed}); return its new value "
            "instead"
        )
    return "computes no tensor of numbers"


def _complex(node: fx.Node) -> str | None:
    if any(map(is_complex, (node, *node.all_input_nodes))):
        return (
            "computes complex numbers, of which there are products, sums and views in complex64; "
            "write it with their real and imaginary parts"
        )
    return None


def _is_left(node: fx.Node) -> bool:
    """Whether it is a mistake that a node is in no region: it computes numbers."""
    val = node.meta.get("val")
    if node.op != "call_function" or is_free(node) or moves(node):
        return False
    return not isinstance(val, torch.SymInt | int) and _dtype(val) not in _NO_NUMBERS


def _dtype(val: Any) -> Any:
    return getattr(val, "dtype", None)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if user.op == "call_function" and is_free(user):
            yield from _readers(user)


def _fill_values(module: fx.GraphModule) -> None:
    """Parameters have no fake tensor after export; themselves will do."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = functools.reduce(getattr, node.target.split("."), module)


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        check = str(node.target).startswith(_CHECKS) or node.target == "_guards_fn"
        if check and not node.users and node.op in ("call_function", "call_module"):
            graph.erase_node(node)


# ---------------------------------------------------------------------------------------- decorator


class Lazy:
    """A function that is traced at its first call with tensors of a kind.

    After an operator of graphs was defined anew it is traced again. A kind is the structure of the
    arguments with shapes, element types and devices of the tensors
    and the values of everything else; of a module also whether its parts are in training, and
    which parameters and buffers it has (their values are read at every call). Other attributes
    are read when it is traced.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._options = options
        self._lock = threading.Lock()
        self._programs: dict[Any, TracedProgram] = {}

    def program(self, *args: Any, **kwargs: Any) -> TracedProgram:
        """The traced program for these arguments; see `superoptimize_callable`."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kind = (TABLE.changes, structure, *map(_facts, leaves), _state(self._fn))
        with self._lock:
            if kind not in self._programs:
                self._programs[kind] = superoptimize_callable(
                    self._fn, args, example_kwargs=kwargs, **self._options
                )
        return self._programs[kind]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, traced before or now."""
        return self.program(*args, **kwargs)(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Lazy:
        """Itself, like a function; of a module what traces a copy of it."""
        if not isinstance(self._fn, nn.Module):
            return self
        return Lazy(copy.deepcopy(self._fn, memo), self._options)

    def __reduce__(self) -> Any:
        """By its name, like a function."""
        if isinstance(self._fn, types.FunctionType):
            return self._fn.__qualname__
        raise GraphError(
            f"superoptimize({type(self._fn).__name__}): what it returns cannot be pickled; pickle "
            "what it was made of, and superoptimize that again"
        )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        raise TraceError(
            f"superoptimize({self._fn.__qualname__}): it decorates a method; decorate a function, "
            "or call cutesuper.superoptimize(module, example_inputs)"
        )


def _state(fn: Callable[..., Any]) -> Any:
    """What a module is traced with besides its arguments. A program keeps the tensors that it
    reads, so no other ones have their identities."""
    if not isinstance(fn, nn.Module):
        return ()
    tensors = (*fn.parameters(), *fn.buffers())
    return tuple(m.training for m in fn.modules()), tuple(map(id, tensors))


def _facts(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        raise TraceError(
            f"superoptimize: an argument is a {type(leaf).__name__}, which is no tensor and cannot "
            "tell calls apart; give torch tensors, numbers and texts"
        ) from None
    # 0.0 == -0.0, and nan is not nan
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


__all__ = ["Lazy", "TracedProgram", "TracedRegion", "regions_of", "superoptimize_callable"]
