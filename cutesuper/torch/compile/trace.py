"""`cutesuper.superoptimize` of a function or a module of PyTorch."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from cutesuper.errors import (
    NO_KERNEL,
    CutesuperError,
    GraphError,
    OptionError,
    ShapeError,
    TraceError,
)
from cutesuper.garbage import seldom_collected
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.operators.base import TABLE
from cutesuper.pipeline import as_target
from cutesuper.pipeline import superoptimize as optimize_graph
from cutesuper.runtime.calling import picker
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.programs import Kept
from cutesuper.runtime.tensors import usable
from cutesuper.targets import Target
from cutesuper.torch.aten.graph_builder import CONDITIONS, INTEGERS
from cutesuper.torch.aten.table import entry_of, is_free, is_known, moves
from cutesuper.torch.compile.call_form import as_written, children_of, constant_fact
from cutesuper.torch.compile.changes import settle_changes, updates_buffer
from cutesuper.torch.compile.complex_pairs import is_complex, pair_complex
from cutesuper.torch.compile.convolutions import pointwise
from cutesuper.torch.compile.losses import LOSSES, of_two_types
from cutesuper.torch.compile.once import LITERALS, keep_unchanging, literals_of, unchanging
from cutesuper.torch.compile.partition import halves, partition
from cutesuper.torch.compile.pooling import POOLING
from cutesuper.torch.compile.refusals import REMEDY, refusal, without_kernel
from cutesuper.torch.compile.region import Region, names_read, source_lines
from cutesuper.torch.compile.rest import (
    computed,
    elements,
    is_own,
    left_to_pytorch,
    tensors_of,
)
from cutesuper.torch.compile.rewrite import Call, rewrite
from cutesuper.torch.compile.trace_report import TracedRegion
from cutesuper.torch.compile.traced_program import ChangesItself, Trace, TracedProgram
from cutesuper.torch.compile.watch import Observer, Watch
from cutesuper.torch.internals import (
    autograd_functions,
    decides_by_data,
    decompositions,
    guards_of,
    needs_data,
    without_prints,
    written,
)
from cutesuper.torch.ops.rowwise.library import FORMULAS

#: nodes of a traced program that only check the conditions of the trace
_CHECKS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range",
           "aten._assert_async", "aten.sym_size")  # fmt: skip


_convolution = torch.ops.aten.convolution.default

#: the operators that no kernel computes: the function is refused, or PyTorch computes them
Rest = Literal["refuse", "torch"]

#: types of masks, positions and labels, which PyTorch computes
_NO_NUMBERS = (*CONDITIONS, *INTEGERS)


#: operators that change gradients and not values
_DETACHING = (
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.higher_order.wrap_with_set_grad_enabled,
)


class _Call(nn.Module):
    """A region's kernel in place of its nodes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return self.kernel([usable(t) for t in tensors])
        except ShapeError:
            if all(t.numel() for t in tensors):
                raise
            return run_reference(self.kernel.graph, tensors)  # there is nothing to launch


def superoptimize_callable(
    fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    rest: Rest = "refuse",
    **options: Any,
) -> TracedProgram:
    """Trace a function or a module and superoptimize its computation.

    Args:
        fn: of tensors; traced by ``torch.export``.
        example_inputs: its arguments.
        example_kwargs: arguments by name.
        dynamic_shapes: as for ``torch.export.export``.
        rest: "torch" leaves to PyTorch what no kernel computes; "refuse" raises.
        options: of `cutesuper.superoptimize`.

    Raises:
        OptionError: another ``rest``.
        TraceError: it uses something that is not an operator of kernel graphs; names the user's
            line.
        SearchError, LoweringError, ScheduleError: no kernel can run a part of it; names the user's
            line.
        CompileError: as for a kernel graph.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if not isinstance(example_inputs, list | tuple):
        example_inputs = (example_inputs,)
    if rest not in get_args(Rest):
        choices = " or ".join(map(repr, get_args(Rest)))
        raise OptionError(f"superoptimize({name}, rest={rest!r}): it is {choices}")
    tracer = _Tracer(name, dynamic_shapes, rest, options)
    return TracedProgram(fn, name, tracer, tuple(example_inputs), dict(example_kwargs or {}))


@dataclass(frozen=True)
class _Tracer:
    """A tracer of one function, used as often as needed.

    Attributes:
        name: of it, for messages.
        dynamic_shapes: as for ``torch.export.export``.
        rest: see `superoptimize_callable`.
        options: of `cutesuper.superoptimize`.
        kernels: those made for it, by the keys of their regions.
    """

    name: str
    dynamic_shapes: Any
    rest: Rest
    options: dict[str, Any]
    kernels: dict[str, Kernel] = field(default_factory=dict[str, Kernel])

    @seldom_collected()
    def __call__(
        self, fn: Callable[..., Any], watch: Watch, args: Sequence[Any], kwargs: dict[str, Any],
        recorded: bool,
    ) -> Trace:  # fmt: skip
        """A trace, for calls that record gradients or not. Raises like `superoptimize_callable`."""
        observer = Observer(fn, watch.names)
        module, stops = self._program(fn, watch, args, kwargs, observer)
        named = as_written(fn)
        for n in module.graph.find_nodes(op="placeholder"):
            n.meta["written"] = named.get(n.name, n.name)
        with _for_all_extents(module.graph, self.name):
            regions, refused = regions_of(module, self.name, self.rest, recorded)
            if watch.seeds:
                _refuse_draws(module.graph, computed(regions), self.name)
            kept = unchanging(module)
            found = [
                pair for r in regions if not kept.issuperset(o.node for o in r.inputs)
                for pair in self._with_kernels(r, refused)
            ]  # fmt: skip
            regions = tuple(region for region, _ in found)
            left = list(left_to_pytorch(module.graph, regions, refused, self._target(), kept))
            inside = computed(regions)
            # operators of ours that stay whole are others where gradients are recorded
            whole = any(is_own(n) and n not in inside for n in module.graph.nodes)
            traced = [
                TracedRegion(r.place, kernel, tuple(names_read(r, _name))) for r, kernel in found
            ]
            for i, region in enumerate(traced):
                module.add_submodule(f"region_{i}", _Call(region.kernel))
            rewrite(module.graph, [Call(r, f"region_{i}") for i, r in enumerate(regions)])
            settle_changes(module.graph)
            keep_unchanging(module)
        arguments = tuple(n for n in module.graph.nodes if n.op == "placeholder")
        places = _lift(module, watch)
        for place in observer.replaced.keys() & set(places):
            raise ChangesItself(f"another tensor is put in the place of {observer.replaced[place]}")
        specs: Any = module
        names = tuple(children_of(specs._in_spec)[1].context)
        return Trace(
            _plain(module),
            tuple(traced),
            tuple(n for n in left if not n.once),
            tuple(n for n in left if n.once),
            stops,
            picker(places),
            specs._out_spec,
            arguments,
            names,
            dict(specs.range_constraints),  # a list where there are none
            whole or any(r.forward_only for r in regions),
        )

    def _program(
        self, fn: Callable[..., Any], watch: Watch, args: Sequence[Any], kwargs: dict[str, Any],
        observer: Observer,
    ) -> tuple[fx.GraphModule, str]:  # fmt: skip
        """The program, and in words the part of it that changes gradients and not values.
        Raises TraceError, ChangesItself for what cannot be traced."""
        if watch.passing:
            raise TraceError(
                f"superoptimize({self.name}): {watch.passing} is an iterator, which gives "
                "something else every time, and is read once where a function is traced; make what "
                "it gives an argument"
            )
        # gradients are recorded to detect where the function disables that
        recording = not watch.asks or torch.is_grad_enabled()
        with torch.set_grad_enabled(recording):
            module, stops = _exported(fn, self.name, args, kwargs, self.dynamic_shapes, observer)
        if observer.change:
            raise ChangesItself(observer.change)
        if watch.hooked:
            stops = stops or "a module has hooks that are called in the backward pass"
        return module, stops

    def _with_kernels(
        self, region: Region, refused: dict[fx.Node, str]
    ) -> list[tuple[Region, Kernel]]:
        """The region and its kernel.
        If it has none and the rest is PyTorch's, those of its halves that have one; none of a
        region of single numbers. Reasons are added to ``refused``."""
        if all(elements(n.meta["val"].shape) == 1 for n in region.border):
            refused.update(dict.fromkeys(region.nodes, "all tensors have one element"))
            return []
        try:
            return [(region, self._kernel_of(region))]
        except NO_KERNEL as error:
            if self.rest == "refuse":
                target = self.options.get("target")
                raise without_kernel(self.name, region, error, target) from error
            parts = halves(region)
            refused.update(dict.fromkeys(region.nodes, str(error)) if parts is None else {})
            return [pair for part in parts or () for pair in self._with_kernels(part, refused)]

    def _target(self) -> Target:
        return as_target(self.options.get("target"))

    def _kernel_of(self, region: Region) -> Kernel:
        if region.key not in self.kernels:
            self.kernels[region.key] = _kernel(self.name, region, self.options)
        return self.kernels[region.key]


def _name(node: fx.Node) -> str:
    """The user's name of an argument or a parameter."""
    return str(node.target if node.op == "get_attr" else node.meta.get("written", node.name))


def _refuse_draws(graph: fx.Graph, inside: set[fx.Node], name: str) -> None:
    """Raise TraceError for random numbers in a function that seeds them.
    Seeds are set while it is traced, and at no later call. Dropout that drops nothing is marked as
    random too, but it is free or ``inside`` a region."""
    for n in graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        if random and n not in inside and not is_free(n):
            reason = (
                "draws random numbers, and the function seeds them, which a traced program would "
                "not; make its generator, or the numbers, outside of the function"
            )
            raise refusal(TraceError, name, n, reason, REMEDY)


def _lift(module: fx.GraphModule, watch: Watch) -> list[int]:
    """Turn the tensors that the function finds by itself into arguments.
    They are read anew at every call then.

    Returns:
        Their indices among the tensors that were found.
    """
    graph, places = module.graph, list[int]()
    found: dict[int, fx.Node] = {}
    last = max((n for n in graph.nodes if n.op == "placeholder"), key=list(graph.nodes).index,
               default=None)  # fmt: skip
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        place = _place(functools.reduce(getattr, node.target.split("."), module), watch)
        if place is None:
            continue
        if place not in found:
            places.append(place)
            where = graph.inserting_after(last) if last else graph.inserting_before()
            with where:
                last = found[place] = graph.placeholder(f"read_{len(places)}")
        node.replace_all_uses_with(found[place])
        graph.erase_node(node)
    return places


def _place(value: Any, watch: Watch) -> int | None:
    """The index of a tensor among those that a function reads, with or without its gradient.
    ``torch.export`` detaches those that are not parameters of the module."""
    if not isinstance(value, torch.Tensor):
        return None
    place = watch.place(value)
    if place is not None:
        return place
    return next((i for i, t in enumerate(watch.tensors) if _is_detached(value, t)), None)


def _is_detached(value: torch.Tensor, t: torch.Tensor) -> bool:
    same = t.requires_grad and value.shape == t.shape and value.dtype == t.dtype
    return same and value.is_set_to(t)


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the module without hooks, and without parameters that it does not read."""
    module.graph.set_codegen(CodeGen())
    module.graph.lint()
    return fx.GraphModule(module, module.graph)


def _kernel(name: str, region: Region, options: dict[str, Any]) -> Kernel:
    try:
        return optimize_graph(region.graph, **options)
    except NO_KERNEL:
        raise
    except CutesuperError as error:
        error.add_note(f"in {name}, {region.place or 'no source'}:\n{region.graph!r}")
        raise


def _exported(
    fn: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Any, dynamic_shapes: Any,
    observer: Observer,
) -> tuple[fx.GraphModule, str]:  # fmt: skip
    """The traced program, and the part of it that changes gradients and not values.
    The part is in words, or nothing."""
    module = fn if isinstance(fn, nn.Module) else _Function(fn)
    try:
        with _quiet(), autograd_functions() as own, without_prints(), observer.observing(module):
            program = torch.export.export(
                module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
        _check_types(name, program)
        literals = literals_of(program)
        undifferentiable = _undifferentiable(program, own)
        nodes = list(program.graph.nodes)
        with _quiet(), _for_all_extents(program.graph, name):
            if any(_is_unknown(n) or is_complex(n) for n in nodes):
                program = program.run_decompositions(_decompositions())
            elif any(map(_is_nested, nodes)):
                # mutation becomes new values, and code under autocast, no_grad or vmap is inlined
                program = program.run_decompositions({})
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"superoptimize({name}): torch.export cannot trace it: {_why(error)}"
        ) from error
    options = {"check_guards": False} if _has_guards() else {}
    with _quiet():
        made = program.module(**options)
    made.meta[LITERALS] = literals
    return made, undifferentiable


def _check_types(name: str, program: torch.export.ExportedProgram) -> None:
    """Raise TraceError for a value whose element type a trace does not tell."""
    node = of_two_types(program.graph_module)
    if node is not None:
        remedy = "Convert the second operand to the type of the first"
        reason = "two element types; PyTorch traces it with another one than it computes"
        raise refusal(TraceError, name, node, reason, remedy)


@contextmanager
def _for_all_extents(graph: fx.Graph, name: str) -> Iterator[None]:
    """Refuse decisions that hold for some numbers in place of a symbolic extent only.
    ``torch.export`` refuses those of the function; later ones would fix an extent at its example,
    and a call with another one would fail.

    Args:
        graph: traced.
        name: of the function, for messages.
    """
    known = len(guards_of(graph))
    symbols = {
        str(e): f"{n.name}.shape[{d}]"
        for n in graph.nodes if n.op == "placeholder"
        for d, e in enumerate(getattr(n.meta.get("val"), "shape", ()))
        if isinstance(e, torch.SymInt)
    }  # fmt: skip
    yield
    if added := guards_of(graph)[known:]:
        text = re.sub(r"\w+", lambda m: symbols.get(m[0], m[0]), " and ".join(added))
        raise TraceError(
            f"superoptimize({name}): its kernels would hold for {text} only, and dynamic_shapes= "
            "lets extents differ; trace it with other examples of them, or leave them out"
        )


#: errors of torch.export whose advice is about torch.export, and what to say of them here
_REWORDED = {
    r"Constant \w+ is mutated": (
        "it changes a tensor that it closes over, as batch norm changes its statistics while "
        "training; give superoptimize the module itself, whose buffers get new values"
    ),
    r"Unsupported input type <class '([\w.]+)'>": (
        r"an argument is of \1; give it tensors, numbers, or lists and dictionaries of these"
    ),
}

#: the beginnings of what Python says of arguments that a function does not have, or lacks
_UNFIT = re.compile("missing a required|too many positional|got an unexpected|multiple values")


def _why(error: Exception) -> str:
    """The reason of an error of PyTorch, and a remedy."""
    if needs_data(error):
        return f"the result of {error} depends on data; leave it outside of the function"
    if not decides_by_data(error):
        # without PyTorch's advice to call other functions of its own
        ends = r"\s+(?:The error above occurred|For more information about)"
        text = re.split(ends, str(error))[0].strip().rstrip(".")
        if "dynamic_shapes" in text:
            return text
        if isinstance(error, TypeError) and _UNFIT.match(text):
            return f"its arguments do not fit: {text}"
        for known, words in _REWORDED.items():
            if found := re.match(known, text):
                return found.expand(words)
        return (
            f"{text}; if the function itself raises with these arguments, mend that first. {REMEDY}"
        )
    place = re.search(r'File "([^"]*)", line (\d+)(?!.*File ")', str(error), re.DOTALL)
    where = f" at {Path(place[1]).name}:{place[2]}" if place else ""
    return (
        f"the value of a tensor decides{where}, which one trace does not know; write it with "
        "torch.where, or leave the decision outside of the function"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back PyTorch's warnings that a user cannot mend, and its logs of errors."""
    with contextlib.ExitStack() as stack:
        for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
            logger = logging.getLogger(name)
            logger.addFilter(_nothing)
            stack.callback(logger.removeFilter, _nothing)
        stack.enter_context(warnings.catch_warnings())
        # tensors that are not parameters lose their gradient: see `_lift`
        warnings.filterwarnings("ignore", ".*requires gradient.*")
        # PyTorch copies specifications of pytrees in a way that it deprecates itself
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        # `Observer` sees attributes that are assigned, and says so in an error
        warnings.filterwarnings("ignore", ".*assigned during export.*")
        yield


def _nothing(record: logging.LogRecord) -> bool:
    """A filter that no record passes."""
    del record
    return False


def _decompositions() -> Any:
    """Decompositions of unknown operators.
    Convolutions become products, pooling reductions, and the operators of `cutesuper.ops` on rows
    their parts, which are fused with others."""
    table = decompositions(is_known)
    for operator, formula in {_convolution: pointwise, **POOLING, **LOSSES, **FORMULAS}.items():
        table[operator] = formula
    return table


def _undifferentiable(program: torch.export.ExportedProgram, own: Sequence[str]) -> str:
    """The part of a program that changes gradients and not values, in words, or nothing."""
    if own:
        return f"it calls {own[0]}, a torch.autograd.Function, whose formula is its own"
    names = program.graph_signature
    constants = names.inputs_to_lifted_tensor_constants.items()
    given = {*names.user_inputs, *names.inputs_to_parameters}
    given |= {n for n, c in constants if getattr(program.constants[c], "requires_grad", False)}
    reaching: set[fx.Node] = set()
    for n in program.graph.nodes:
        source = n.op == "placeholder" and n.name in given
        if reaching.intersection(n.all_input_nodes) or source:
            if _dtype(n.meta.get("val")) not in _NO_NUMBERS:
                reaching.add(n)
            if n.target in _DETACHING:
                lines = source_lines(n)
                where = f", at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
                return f"it stops gradients ({written(n)}{where})"
    return ""


def _is_unknown(node: fx.Node) -> bool:
    """True for an operator that the table does not have."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_known(node.target)


def _is_nested(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    transform = isinstance(node.target, types.FunctionType | types.BuiltinFunctionType) and (
        "functorch" in (node.target.__module__ or "")
    )
    return (
        bool(schema and schema.is_mutable)
        or transform
        or (isinstance(node.target, torch._ops.HigherOrderOperator))
    )


@functools.cache
def _has_guards() -> bool:
    return "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters


class _Function(nn.Module):
    """A function as a module, as ``torch.export`` requires."""

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
    """A copy of the function named ``forward``: export records the lines of no other."""
    code = fn.__code__.replace(co_name="forward")
    same = types.FunctionType(code, fn.__globals__, "forward", fn.__defaults__, fn.__closure__)
    same.__kwdefaults__ = fn.__kwdefaults__
    return functools.wraps(fn)(same)


def regions_of(
    module: fx.GraphModule, name: str, rest: Rest = "refuse", recorded: bool = False
) -> tuple[tuple[Region, ...], dict[fx.Node, str]]:
    """The regions of a traced program, and why other nodes that compute numbers are in none.

    Args:
        module: exported.
        name: of the function, for messages.
        rest: "torch" if there may be such nodes.
        recorded: True if it is for calls that record gradients, of which PyTorch may compute all.

    Raises:
        TraceError: naming the first operator that must be in a region.
    """
    _fill_values(module)
    if not recorded:
        _forget_gradients(module.graph)
    pair_complex(module)
    graph = module.graph
    _drop_checks(graph)
    constants = [n for n in graph.nodes if n.op == "get_attr"]
    found = partition(graph, constants=constants, parts=True)
    if rest == "torch":
        return found.regions, found.refused
    inside = computed(found.regions)
    given = _depending(graph)
    left = [n for n in graph.nodes if _is_left(n) and n not in inside and n in given]
    for node in left:
        # among nodes that belong together the last has the reason; a condition alone is never a
        # kernel graph
        if not any(u in left for u in _readers(node)):
            reason = _complex(node) or found.refused.get(node) or _reason(node)
            raise refusal(TraceError, name, node, reason)
    if not (found.regions or recorded) and not any(map(_needs_no_region, graph.nodes)):
        for node in found.refused:
            if (entry := entry_of(node)) is not None and entry.finds_places:
                raise refusal(TraceError, name, node, found.refused[node])
        raise TraceError(
            f"superoptimize({name}): it computes nothing that kernels could: nothing but moves, "
            "sorts, masks, or numbers in other types than float16, bfloat16 and float32. Leave it "
            'as it is, or give it rest="torch"'
        )
    return found.regions, {}


def _depending(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values may differ between calls."""
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
    """True for a node that must not be left outside of regions, as it computes numbers."""
    val = node.meta.get("val")
    if node.op != "call_function" or is_free(node) or moves(node) or is_own(node):
        return False
    if _is_empty(node) or updates_buffer(node):
        return False
    return not isinstance(val, torch.SymInt | int) and _dtype(val) not in _NO_NUMBERS


def _needs_no_region(node: fx.Node) -> bool:
    """True for an operator with kernels of its own, and for one of tensors without elements."""
    return node.op == "call_function" and (is_own(node) or _is_empty(node))


def _is_empty(node: fx.Node) -> bool:
    """True for an operator that reads or makes a tensor without elements."""
    around = (node, *node.all_input_nodes)
    return any(elements(t.shape) == 0 for n in around for t in tensors_of(n))


def _dtype(val: Any) -> Any:
    return getattr(val, "dtype", None)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if user.op == "call_function" and is_free(user):
            yield from _readers(user)


def _fill_values(module: fx.GraphModule) -> None:
    """Give parameters, which have no fake tensor after export, themselves as values."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = functools.reduce(getattr, node.target.split("."), module)


def _forget_gradients(graph: fx.Graph) -> None:
    """Let no value say that a gradient is recorded: kernels compute what PyTorch would then."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.requires_grad:
            node.meta["val"] = val.detach()


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        check = str(node.target).startswith(_CHECKS) or node.target == "_guards_fn"
        if check and not node.users and node.op in ("call_function", "call_module"):
            graph.erase_node(node)


# ---------------------------------------------------------------------------------------- decorator


class Lazy:
    """A function that is traced at its first call with arguments of a kind.

    A kind is the structure of the arguments with shapes, element types and devices of the tensors
    and the values of everything else. Kinds that differ in first extents of tensors only, batch
    sizes say, share one program from the second on, if the function allows any number of rows.
    Whatever else the function reads is treated as by every `TracedProgram`. After an operator of
    graphs was redefined it is traced again.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._options = options
        self._programs: Kept[Any, TracedProgram] = Kept()
        self._first: dict[Any, tuple[int, ...]] = {}  # first extents, by kind without them
        self._open: Kept[Any, TracedProgram | None] = Kept()  # for any first extents

    def program(self, *args: Any, **kwargs: Any) -> TracedProgram:
        """The traced program for these arguments; see `superoptimize_callable`."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kind = (TABLE.changes, structure, *map(_facts, leaves))
        return self._programs.get(kind) or self._programs.made(
            kind, lambda: self._traced(args, kwargs)
        )

    def _traced(self, args: Any, kwargs: Any) -> TracedProgram:
        """The program of a new kind."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        family = (TABLE.changes, structure, *map(_without_rows, leaves))
        rows = tuple(t.shape[0] for t in leaves if _has_rows(t))
        first = self._first.setdefault(family, rows)
        if first != rows:
            shared = self._open.made(family, lambda: self._opened(first, args, kwargs))
            if shared is not None and shared.takes(*args, **kwargs):
                return shared
        return superoptimize_callable(self._fn, args, example_kwargs=kwargs, **self._options)

    def _opened(self, first: tuple[int, ...], args: Any, kwargs: Any) -> TracedProgram | None:
        """A program for any rows where these arguments have others than their family's first ones.
        None if there is none."""
        names: dict[tuple[int, int], Any] = {}
        before = iter(first)

        def opened(leaf: Any) -> Any:
            pair = (next(before), leaf.shape[0]) if _has_rows(leaf) else (0, 0)
            changes = pair[0] != pair[1]
            dim = names.setdefault(pair, torch.export.Dim(f"rows{len(names)}")) if changes else None
            return {0: dim} if changes else None

        dims = tuple(pytree.tree_map(opened, (*args, *kwargs.values())))
        options: dict[str, Any] = {**self._options}
        options["dynamic_shapes"] = self._options["dynamic_shapes"] or dims
        try:
            return superoptimize_callable(self._fn, args, example_kwargs=kwargs, **options)
        except (TraceError, *NO_KERNEL):
            return None  # the function asks for the number of rows, or only some have a kernel

    # ---------------------------------------------------------------------------------- looking

    def _latest(self, what: str) -> TracedProgram:
        """The program that was traced last."""
        if not self._programs:
            raise TraceError(
                f"{self!r}.{what}: it is traced at its first call; call it, or give the example "
                f"arguments, .program(x, ...).{what}"
            )
        return list(self._programs.values())[-1]

    def explain(self) -> str:
        """`TracedProgram.explain` of the program that was traced last; `program` has the others.

        Raises:
            TraceError: it has not been called yet.
        """
        return self._latest("explain()").explain()

    def draw(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """`TracedProgram.draw` of the program that was traced last.
        Raises TraceError if it has not been called yet."""
        return self._latest("draw(path)").draw(path)

    def export(
        self, path: str | os.PathLike[str], *, header: str | os.PathLike[str] | None = None
    ) -> None:
        """`TracedProgram.export` of the program that was traced last.
        Raises TraceError if it has not been called yet."""
        self._latest("export(path)").export(path, header=header)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        count = len(set(self._programs.values()))
        return f"Lazy({name}: {f'{count} program(s)' if count else 'not called yet'})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, traced before or now."""
        return self.program(*args, **kwargs)(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Lazy:
        """The object itself, like a function; for a module, a new one that traces a copy of it."""
        if not isinstance(self._fn, nn.Module):
            return self
        return Lazy(copy.deepcopy(self._fn, memo), self._options)

    def __reduce__(self) -> Any:
        """Pickle by name, like a function."""
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


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _without_rows(leaf: Any) -> Any:
    """The facts of an argument without its first extent."""
    facts = _facts(leaf)
    return (facts[0][1:], leaf.dim(), *facts[1:]) if _has_rows(leaf) else facts


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
    return constant_fact(leaf)
