"""``torch.compile(model, backend="cutesuper")``.

How a model is compiled: Dynamo captures graphs, in which losses of linear layers are replaced if
everything is to be taken (`heads`), and AOTAutograd turns each into a functional forward and
backward graph. In these, regions are replaced by calls of their kernels, and Inductor compiles the
rest. A model without a region that is taken is compiled by Inductor alone; regions that make the
whole graph slower are not taken.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from cutesuper.garbage import seldom_collected
from cutesuper.torch import internals
from cutesuper.torch.aten.attention import without_seeds
from cutesuper.torch.aten.length_masks import computed_again
from cutesuper.torch.compile.constants import settle_constants
from cutesuper.torch.compile.counters import settle_counters
from cutesuper.torch.compile.forms import settle_forms
from cutesuper.torch.compile.heads import take_heads
from cutesuper.torch.compile.kept_code import kept_code
from cutesuper.torch.compile.options import BackendOptions, read_options
from cutesuper.torch.compile.partial_turns import widen_turns
from cutesuper.torch.compile.partition import partition, unwritten
from cutesuper.torch.compile.region_operator import region as region_operator
from cutesuper.torch.compile.region_operator import region_in_place
from cutesuper.torch.compile.report import GraphReport, Phase, graph_report, nothing_taken
from cutesuper.torch.compile.rewrite import Call, changed, rewrite
from cutesuper.torch.compile.selection import decide
from cutesuper.torch.compile.tables import settle_tables
from cutesuper.torch.compile.whole import Comparison, Compile
from cutesuper.torch.compile.written_turns import settle_turns


def cutesuper(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it.

    Args:
        gm: the graph that Dynamo captured.
        inputs: its fake inputs.
        mode: that of ``torch.compile``, for the rest, which Inductor compiles.
        options: see `BackendOptions`.

    Raises:
        OptionError, DeviceError: options that do not exist.
    """
    return compile_graph(gm, inputs, read_options(options, mode))


@seldom_collected()
def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: BackendOptions,
    observe: Callable[[GraphReport], None] | None = None,
    finish: internals.InnerCompile = internals.compile_inner,
) -> Callable[..., Any]:
    """Compile a graph captured by Dynamo.

    Args:
        gm: the graph.
        inputs: its fake inputs.
        options: of the backend.
        observe: receives the report of every graph, of which nothing is kept on disk then; that of
            the backward graph when it is compiled, which is later.
        finish: compiles the rest.
    """
    try:
        # 24.1 ms where Inductor's takes 19.8 (4096 x 4096 x 128256, H200), with as much memory
        if options.take == "all":
            take_heads(gm)
    except Exception as error:  # whatever the error, Inductor can compile the graph
        _complain(f"no losses were looked for ({type(error).__name__}: {error})")
    names, key, told = internals.argument_names(gm), None, observe
    if told is None:
        code = kept_code(gm, options)
        key, told = code.key, code.follow
    inner = partial(_inner, options=options, names=names, observe=told, finish=finish)
    patches = internals.recomputing(options.inductor, settle_constants, computed_again, key)
    return internals.compile_with(gm, inputs, inner, patches, kept=key is not None)


def _inner(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: BackendOptions,
    names: Sequence[str],
    observe: Callable[[GraphReport], None],
    finish: internals.InnerCompile,
    **rest: Any,
) -> Any:
    phase: Phase = "forward"
    if rest.get("is_backward"):
        phase = "backward"
    elif rest.get("is_inference"):
        phase = "inference"
    if rest.get("cpp_wrapper"):
        # called from C++, an operator of Python that returns a list of one tensor crashes (2.13)
        report = nothing_taken(phase, gm.graph, "cpp_wrapper calls no operators of Python")
    else:
        internals.follow_inputs(gm, inputs)
        report = take_regions(gm, options, phase, partial(_for_trial, inputs, rest), names)
    observe(report)
    return finish(gm, inputs, **rest)


def _for_trial(inputs: Sequence[Any], rest: Mapping[str, Any], gm: fx.GraphModule) -> Any:
    """The code that Inductor makes of a graph, to be timed."""
    return internals.compile_for_trial(gm, inputs, **rest)


def take_regions(
    gm: fx.GraphModule,
    options: BackendOptions,
    phase: Phase,
    compiled: Compile,
    names: Sequence[str] = (),
) -> GraphReport:
    """Replace those regions of a functional graph that are worth it by calls of their kernels.

    Args:
        gm: with fake tensors in ``meta["val"]``; changed in place.
        options: of the backend.
        phase: inference, forward or backward, for the report.
        compiled: Inductor, to time the whole graph.
        names: the user's, of the arguments of the graph that Dynamo captured, for the report.
    """
    start = time.perf_counter()
    try:
        without_seeds(gm.graph)
        settle_forms(gm.graph)
        settle_tables(gm.graph)
        settle_turns(gm.graph)
        widen_turns(gm.graph)
        found = partition(gm.graph, constants=unwritten(gm.graph))
        comparison = Comparison(gm, options, compiled)
        decisions = decide(found.regions, options, meanwhile=comparison.begin)
        decisions, whole = comparison.settle(decisions)
    except Exception as error:  # whatever the error, Inductor can compile the graph
        why = f"no regions were chosen ({type(error).__name__}: {error})"
        gm.graph.eliminate_dead_code()  # of a form that was not finished
        _complain(why)
        return replace(nothing_taken(phase, gm.graph, why), passing=True)
    taken = [d for d in decisions if d.verdict.taken]
    calls = [Call(d.region, region_operator, (d.key,), region_in_place) for d in taken]
    done = {copy for call in calls for copy in changed(call).values()}
    refused = {n: why for n, why in found.refused.items() if n not in done}
    report = graph_report(phase, decisions, refused, partial(internals.argument_name, names))
    for entry, decision in zip(report.regions, decisions, strict=True):
        if decision.verdict.broken:
            _complain(f"{entry.where} gets no kernels: {decision.verdict.reason}")
    if calls:
        rewrite(gm.graph, calls)
        settle_counters(gm.graph)
        gm.graph.lint()
        gm.recompile()
    passing = not all(d.verdict.lasts for d in decisions) or (whole is not None and whole.passing)
    seconds = time.perf_counter() - start
    return replace(report, whole=whole, seconds=seconds, passing=passing)


def _complain(what: str) -> None:
    message = f"cutesuper: {what}; Inductor compiles it, but please report this"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


cutesuper.reset = internals.forget_cuda_graphs  # pyright: ignore[reportFunctionMemberAccess]
