"""The parts of PyTorch that the front end needs beyond its documented interface.

* ``torch._inductor.compile_fx``: the only way to let Inductor compile the rest of a graph, forward
  and backward, is its ``inner_compile`` (other backends use it too; its arguments are passed on
  unchanged).
* ``torch._guards.TracingContext``: where Inductor reports the strides of results, once a graph.
* ``torch._functorch.config``: the cache of AOTAutograd is keyed by the graph that Dynamo found, and
  by Inductor's options, not by the backend. It would give Inductor's code to this backend and,
  worse, this backend's to Inductor. So a pass of ours has a key, and what is compiled without one
  (trials, ``explain``) is not kept. Inductor's cache is keyed by the graph that it compiles, calls
  of regions included.
* ``CheckpointPolicy`` in ``node.meta["recompute"]``, as activation checkpointing leaves it: what
  the backward graph computes again.
* ``torch._inductor.decomposition``: decompositions of operators that ``torch.export`` leaves whole;
  ``torch._decomp``: that of one operator, and ``OpOverload._op_dk`` that of one made of others.
* ``torch.autograd.Function.apply`` is replaced while a function is traced: ``torch.export`` looks
  through it, and its graph does not show that the function had a formula of its own.
* ``torch.export._trace``: of a function that it cannot trace it prints the graph that there is.
* ``torch._subclasses.fake_tensor``: shapes and strides of nodes added to a traced program are found
  like those of the others, with tensors without memory.
* ``torch._export.utils``: the check that extents are those that a program was exported for.
* ``grapharg.source`` of Dynamo's placeholders and ``desc`` of AOTAutograd's: the user's names of
  arguments and parameters, for reports only.
* ``SymInt.node.hint``: the size of a symbolic extent in the call that is compiled for; the
  documented ways to read it would add guards.
* ``SymInt.node.shape_env.guards``: the conditions on symbolic extents that a trace depends on.
* ``source_name_to_debug_name`` of a ``shape_env``: the names of ``torch.export.Dim``.
* ``torch._dynamo``: the classes of what ``torch.compile`` raises while it compiles, the stance that
  ``torch.compiler.set_stance`` sets, and whether it is disabled.
* ``torch_fn`` and ``source_fn_stack`` in ``node.meta``: the function that the user called.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

T = TypeVar("T")

#: compiles a functional graph: (graph module, fake inputs, **further arguments of Inductor)
InnerCompile = Callable[..., Any]


def compile_errors() -> tuple[type[Exception], ...]:
    """The classes of what ``torch.compile`` raises for a function that it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def is_compiler_on() -> bool:
    """True if functions of ``torch.compile`` are compiled when they are called."""
    from torch._dynamo import config, eval_frame

    stance = eval_frame._stance
    return not config.disable and stance.stance == "default" and not stance.skip_guard_eval_unsafe


def compile_with(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    inner: InnerCompile,
    patches: Mapping[str, Any],
    kept: bool = False,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo by Inductor and AOTAutograd.

    Args:
        gm: the graph.
        inputs: its fake inputs.
        inner: compiles the graphs that AOTAutograd makes of it.
        patches: options of Inductor; of a graph that is kept, those of `recomputing`, with a key.
        kept: whether the result is kept on disk, or found there, if the user lets PyTorch do that.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    kept = kept and config.enable_autograd_cache
    with config.patch(enable_autograd_cache=kept, enable_remote_autograd_cache=False):
        compiled = compile_fx(gm, inputs, inner_compile=inner, config_patches=dict(patches))
    return cast("Callable[..., Any]", compiled)


def recomputing(
    patches: Mapping[str, Any],
    change: Callable[[fx.Graph], None],
    chosen: Callable[[fx.Graph], Iterable[fx.Node]],
    key: str | None,
) -> dict[str, Any]:
    """Options of Inductor with which the backward graph computes chosen nodes again.

    AOTAutograd might keep them.

    Args:
        patches: other options.
        change: changes the graph of both passes, or that of inference, first.
        chosen: finds these nodes in the graph of both passes.
        key: part of those of PyTorch's caches.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # 3 s with what it imports

    name = "joint_custom_post_pass"
    given = patches.get(name) or ()
    others = tuple(given) if isinstance(given, list | tuple) else (given,)

    class Recomputing(CustomGraphPass):
        """Changes the graph and marks the nodes, after the user's own passes."""

        def __call__(self, graph: fx.Graph) -> None:
            for other in others:
                other(graph)
            change(graph)
            for node in chosen(graph):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

        def uuid(self) -> Any:
            """A name for Inductor's cache; None if one of the user's passes has none."""
            own = [getattr(other, "uuid", lambda: None)() for other in others]
            return None if None in own else (change.__qualname__, chosen.__qualname__, key, *own)

    return {**patches, name: Recomputing()}


def follow_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have the fake tensors of a graph follow from its inputs, which may be stored otherwise.
    AOTAutograd traces both passes before Inductor pads what the forward graph keeps (2.11)."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def stay(old: torch.Tensor, new: torch.Tensor) -> bool:
        steps = zip(old.stride(), new.stride(), strict=True)
        return all(statically_known_true(a == b) for a, b in steps)

    given = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)
    tensors = [(n.meta["val"], x) for n, x in given if isinstance(x, FakeTensor)]
    moved = [new for old, new in tensors if not stay(old, new)]
    if moved:
        FakeTensorProp(gm, mode=moved[0].fake_mode).propagate_dont_convert_inputs(*inputs)


def compile_inner(gm: fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> Any:
    """Inductor's own ``inner_compile``."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, inputs, **rest)


def compile_for_trial(gm: fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> Any:
    """The same without CUDA graphs of its own, for a recording.
    The strides of its results are not those that AOTAutograd is told of."""
    from torch._guards import TracingContext
    from torch._inductor.utils import BoxedBool

    context = TracingContext.try_get()
    told = None if context is None else context.output_strides
    try:
        if context is not None:
            context.output_strides = None
        return compile_inner(gm, inputs, **{**rest, "cudagraphs": BoxedBool(False)})
    finally:
        if context is not None:
            context.output_strides = told


def run_eagerly(gm: fx.GraphModule, inputs: Sequence[Any], **rest: Any) -> Any:
    """An ``inner_compile`` that compiles nothing."""
    from functorch.compile import make_boxed_func

    del inputs, rest
    return make_boxed_func(gm.forward)


def argument_names(gm: fx.GraphModule) -> list[str]:
    """The user's names of the arguments of a graph of Dynamo: ``x``, ``layers.0.weight``."""
    return [_users(n) for n in gm.graph.nodes if n.op == "placeholder"]


def _users(node: fx.Node) -> str:
    """``L['self']._modules['norm']._parameters['weight']`` is ``norm.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(
        node, "_dynamo_source", None
    )
    name: Any = getattr(source, "name", node.name)
    text = str(name() if callable(name) else name)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"^[LG]\['([^']+)'\]", r"\1", text)
    return re.sub(r"^(?:self|fn)\.", "", text)  # Dynamo calls a module of PyTorch's own ``fn``


def argument_name(names: Sequence[str], node: fx.Node) -> str:
    """The user's name of an argument of a graph of AOTAutograd, given those of Dynamo's graph."""
    index = getattr(node.meta.get("desc"), "idx", None)
    return names[index] if isinstance(index, int) and index < len(names) else node.name


_tracing = threading.RLock()


@contextmanager
def autograd_functions() -> Iterator[list[str]]:
    """Collect the names of the ``torch.autograd.Function`` classes that are called meanwhile.
    Not those that PyTorch makes of operators with a registered gradient: a trace has the operator,
    and so its gradient. One thread at a time."""
    found: list[str] = []
    with _tracing:
        own = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **options: Any) -> Any:
            if cls.__module__ != "torch._library.autograd":
                found.append(cls.__qualname__)
            return own.__get__(None, cls)(*args, **options)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign]
        try:
            yield found
        finally:
            torch.autograd.Function.apply = own


#: operators that Inductor replaces by operators of its own, which must have been loaded by then
_POOLING = ("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")


def decompositions(known: Callable[[object], bool]) -> Any:
    """Decompositions of all operators but the known ones.
    Those of ``torch.export``, and Inductor's for operators that it leaves whole. Random operators
    stay whole, to draw what they draw in PyTorch."""
    from torch._inductor.decomposition import select_decomp_table

    table = torch.export.default_decompositions()
    for op, how in select_decomp_table().items():
        own = str(op).startswith(_POOLING)
        if isinstance(op, torch._ops.OpOverload) and op not in table and not own:
            table[op] = how
    for op in [op for op in table if known(op) or _draws(op)]:
        table.pop(op)
    return table


def decomposition(op: Any) -> Callable[..., Any]:
    """PyTorch's own decomposition of an operator: what it is made of, or its entry of the table."""
    from torch._decomp import get_decompositions

    made = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.has_kernel_for_dispatch_key(made):  # `op.decompose` would come to our own formula again
        return partial(op._op_dk, made)
    return get_decompositions([op])[op]


def _draws(op: Any) -> bool:
    """True for an operator that draws random numbers itself, not one made of others (an LSTM)."""
    made = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return torch.Tag.nondeterministic_seeded in op.tags and not made


def needs_data(error: Exception) -> bool:
    """True for the error of an operator that gives no numbers or shapes without data.
    Its text is the name of the operator."""
    from torch._subclasses import fake_tensor

    kinds = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    return isinstance(error, kinds)


def decides_by_data(error: Exception) -> bool:
    """True for the error of a Python condition on the value of a tensor."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


@contextmanager
def without_prints() -> Iterator[None]:
    """A context in which ``torch.export`` prints nothing; what it traces still does."""
    from torch.export import _trace

    own: Any = _trace
    own.print = lambda *_, **__: None
    try:
        yield
    finally:
        del own.print


def random_as_in_eager() -> AbstractContextManager[Any]:
    """Keep random operators as they are in graphs.
    `run_eagerly` cannot run Inductor's own ones in all versions."""
    from torch._inductor import config

    return config.patch(fallback_random=True)


def inductor_options() -> Mapping[str, Any]:
    """Inductor's options and their present values."""
    from torch._inductor import config

    return config.get_config_copy()


def fuses_products(patches: Mapping[str, Any]) -> bool:
    """True if Inductor makes kernels for products with these options, with more inside of them.
    It writes those of one row as sums while it tunes pointwise code."""
    from torch._inductor import config

    names = ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning")
    return any(patches.get(n, getattr(config, n)) for n in names)


def mode_options(mode: str) -> dict[str, Any]:
    """The options that a mode of ``torch.compile`` sets. Raises KeyError or RuntimeError."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def forget_cuda_graphs() -> None:
    """Forget recorded CUDA graphs, as ``torch.compiler.reset`` asks of a backend."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def fake_result(node: fx.Node) -> Any:
    """The fake result of a new node of a traced program, from the fake values of its operands."""
    from torch._subclasses.fake_tensor import FakeTensor

    values = (n.meta.get("val") for n in node.graph.nodes)
    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))

    def operand(n: fx.Node) -> Any:
        val = n.meta["val"]
        real = isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor)
        return mode.from_tensor(val, static_shapes=True) if real else val

    args, kwargs = map_arg((node.args, node.kwargs), operand)
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def check_extents(
    nodes: Sequence[fx.Node], paths: Sequence[Any], leaves: Sequence[Any], ranges: Any
) -> None:
    """Raise RuntimeError for arguments whose extents are not those that a program was exported for.

    Args:
        nodes: that stand for the arguments.
        paths: to the arguments.
        leaves: the arguments.
        ranges: that ``torch.export`` found.
    """
    from torch._export.utils import _check_input_constraints_for_graph

    given = list(zip(paths, leaves, strict=True))
    _check_input_constraints_for_graph(list(nodes), given, ranges)


def guards_of(graph: fx.Graph) -> list[str]:
    """The conditions on symbolic extents that decisions about a traced graph were based on."""
    values = (n.meta.get("val") for n in graph.nodes if n.op == "placeholder")
    extents = (e for v in values if isinstance(v, torch.Tensor) for e in v.shape)
    symbolic = next((e for e in extents if isinstance(e, torch.SymInt)), None)
    return [] if symbolic is None else [str(g.expr) for g in symbolic.node.shape_env.guards]


def extent_names(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """The user's names of symbolic extents (of ``torch.export.Dim``), by PyTorch's."""
    extents = (e for n in nodes for e in getattr(n.meta.get("val"), "shape", ()))
    symbolic = next((e for e in extents if isinstance(e, torch.SymInt)), None)
    if symbolic is None:
        return {}
    env = symbolic.node.shape_env
    names = getattr(env, "source_name_to_debug_name", {})
    found: dict[str, str] = {}
    for symbol, sources in getattr(env, "var_to_sources", {}).items():
        places = (s.name() if callable(s.name) else s.name for s in sources)
        found.update((str(symbol), names[place]) for place in places if place in names)
    return found


def bounds_of(values: Any) -> tuple[int, int | None]:
    """The least and the most of a symbolic extent as declared; 0 and None for none.
    ``torch.export`` may count from 2 where less is fine."""
    least, most = int(values.lower), values.upper
    return least if least > 2 else 0, int(most) if most < 2**31 else None


#: how operators without a name are written
_SIGNS = {"getitem": "x[...]", "setitem": "x[...] = y"}


def written(node: fx.Node) -> str:
    """The function that the user called for a node; its operator's name where that is not known.
    An operator of another name, as a part of a loss, is named too."""
    operator = str(node.target)
    space, _, rest = operator.partition(".")
    calls = node.meta.get("source_fn_stack") or [node.meta.get("torch_fn") or ("", "")]
    function = getattr(calls[-1][1], "__name__", calls[-1][1])
    name = str(function).rpartition(".")[2].strip("_")
    if not name or space not in ("aten", "prims") or not node.meta.get("stack_trace"):
        return operator
    own = rest.partition(".")[0].strip("_")
    told = _SIGNS.get(name, name)
    alike = space == "prims" or own == name or own.endswith(f"_{name}") or name == f"i{own}"
    return told if alike else f"{told} ({operator})"


def hint_of(value: Any) -> int | None:
    """The number behind an extent; None if it is unknown before the call."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return None if hint is None else int(hint)
    return int(value)


def apart(work: Callable[[], T]) -> T:
    """Run with real tensors although a compilation is in progress.

    Whatever PyTorch has switched on for the compilation (fake tensors, dispatch modes, tracing,
    autocast, inference mode) belongs to its thread, so this runs in another one.
    """

    def run() -> T:
        with torch.no_grad():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
