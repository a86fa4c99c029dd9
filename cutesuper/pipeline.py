"""The whole pipeline: graph -> search -> verify -> schedule -> lower -> compile -> callable kernel.

A previously tuned program (`cutesuper.store`) takes the place of the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

from cutesuper import searches, store
from cutesuper.differentiate import gradient_of
from cutesuper.errors import (
    CutesuperError,
    DeviceError,
    LoweringError,
    ScheduleError,
    SearchError,
    VerificationError,
    frameless,
)
from cutesuper.garbage import seldom_collected
from cutesuper.ir.arguments import check_options
from cutesuper.ir.block import MuGraph, TensorSpec
from cutesuper.ir.check import check_graph, check_kernel_graph
from cutesuper.ir.definitions import added, unknown
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import INPUT, lookup
from cutesuper.ir.unseen import followed
from cutesuper.progress import progress_bar
from cutesuper.report import ALTERNATIVES, cut_text, kernel_notes, no_kernels_text, variant_report
from cutesuper.runtime.cache import KernelCache, cache_or_default
from cutesuper.runtime.checks import check_size
from cutesuper.runtime.compile import CompileRequest, compile_many
from cutesuper.runtime.kernel import CompiledStep, Kernel, Variant, bucketed
from cutesuper.search.bounds import TooDear
from cutesuper.search.region_cache import KnownRegions
from cutesuper.search.search import (
    Candidate,
    Progress,
    SearchOptions,
    SearchResult,
    Statistics,
    search,
    structure,
)
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.skeletons.variants import planned
from cutesuper.targets import H200, TARGETS, Target, find_target
from cutesuper.verify.equivalence import Verification, Verifier
from cutesuper.verify.narrowing import narrows

#: programs up to this many multiply-adds, and elements of all values together, are also checked at
#: their real extents (about 1 s; the softmax of 4096x65536 took 110 s)
FULL_CHECK_FLOPS = 4e9
FULL_CHECK_ELEMENTS = 5e7


#: candidates of up to this many times the cheapest one's cost are all found, if it cannot be run
NEAR = 1.02


@dataclass(frozen=True)
class Options:
    """Options of `superoptimize`.

    Attributes:
        target: the GPU.
        dependent_launch: launch kernels before their predecessor in the stream has ended
            (programmatic dependent launch); inputs made with ``constant=True`` are then loaded
            while it still runs.
        seed: of the search. The verifier draws a seed of its own, which its verdict states.
        budget_s: seconds the search may take; None is no limit.
        executor: searches parts of the graph in other processes or on other machines.
        tuned: use the programs stored by `cutesuper.tune`.

    Raises:
        OptionError: a value of another kind.
    """

    target: Target
    dependent_launch: bool = False
    seed: int = 0
    budget_s: float | None = None
    executor: Executor | None = None
    tuned: bool = True

    def __post_init__(self) -> None:
        check_options(
            dependent_launch=self.dependent_launch, seed=self.seed, budget_s=self.budget_s,
            executor=self.executor, tuned=self.tuned,
        )  # fmt: skip


#: results of this process for parts of graphs
_REGIONS = KnownRegions()


@dataclass(frozen=True)
class Choice:
    """A candidate that passed verification, planning and lowering.

    Attributes:
        candidate: from the search.
        plans: of its kernels.
        verification: at small and, where cheap enough, real extents.
        refused: better-priced candidates that no schedule or lowering could run, and why.
        stored: the stored program this choice came from; None if the cost model chose.
    """

    candidate: Candidate
    plans: tuple[KernelPlan, ...]
    verification: Verification
    refused: tuple[str, ...]
    stored: store.Entry | None = None


def superoptimize(
    graph: KernelGraph,
    *,
    target: Target | str | None = None,
    dependent_launch: bool = False,
    seed: int = 0,
    budget_s: float | None = None,
    executor: Executor | None = None,
    tuned: bool = True,
    gradients: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    cache: KernelCache | None = None,
) -> Kernel:
    """Find, verify and compile the best program for a kernel graph.

    Args:
        graph: the definition; at least one output marked.
        target: a `Target`, or a name such as ``"h200"``; None takes the current GPU.
        dependent_launch: see `Options`.
        seed: of the search; equal seeds give equal results.
        budget_s: seconds the search may take; the best program found until then is taken, as
            after Ctrl-C.
        executor: any `concurrent.futures.Executor` (processes, ``dask.distributed``) to search
            with; the result is the same. One search takes seconds: it pays for whole layers.
        tuned: if `cutesuper.tune` has stored a program for this graph, target and launch mode,
            verify and use it without a search. False: always the cost model's choice.
        gradients: make the kernels of gradients at the first call that records them; False: at the
            first ``backward()``, which then runs the program once more.
        on_progress: called with the search's `Progress`; default: a line on standard error, if
            that is a terminal.
        cache: the store of compiled kernels; default ``~/.cache/cutesuper``.

    Returns:
        A `Kernel`: call it with torch tensors.

    Raises:
        GraphError: the graph is not complete.
        OptionError: an option has a value of another kind.
        DeviceError: no such target.
        ShapeError: a tensor is too large for 32-bit offsets.
        SearchError, LoweringError, ScheduleError: no program can be run; says which operator.
        CompileError: the compiler refused the kernel.
        CacheError: others can write the folder of compiled kernels; says how to mend that.
    """
    check_graph("superoptimize", graph)
    check_options(gradients=gradients, on_progress=on_progress)
    options = Options(as_target(target), dependent_launch, seed, budget_s, executor, tuned)
    cache = cache_or_default(cache)
    with progress_bar() as show:
        return Prospect(graph, options, cache, on_progress or show).kernel(gradients)


class Prospect:
    """A kernel whose program has been chosen and priced, but not compiled.

    Args:
        graph: the definition.
        options: see `Options`.
        cache: the store of compiled kernels.
        on_progress: called with the search's `Progress`.

    Attributes:
        graph, options: as given.
        cost_us: predicted, at the hints of the symbols.

    Raises:
        GraphError, ShapeError, SearchError, LoweringError, ScheduleError: as for `superoptimize`.
    """

    def __init__(
        self,
        graph: KernelGraph,
        options: Options,
        cache: KernelCache,
        on_progress: Callable[[Progress], None] | None,
        most_us: float = inf,
    ) -> None:
        check_definition("superoptimize", graph)
        self.graph = graph
        self.options = options
        self._cache = cache
        self._on_progress = on_progress
        self.cost_us, self._found = 0.0, []
        if graph.vacant:
            return
        hints = bucketed(graph)
        found = find(graph.with_hints(hints), options, on_progress, most_us, cache)
        self.cost_us = found[1].candidate.cost_us
        self._found = [(hints, found)]

    def kernel(self, gradients: bool = False) -> Kernel:
        """The compiled kernel; ``gradients`` as for `superoptimize`. Raises CompileError."""
        how = partial(gradient_of, self)
        return Kernel(self.graph, self.options.target, self._variant, how, deferred=not gradients)

    def another(self, graph: KernelGraph, most_us: float = inf) -> Prospect:
        """A prospect for another graph with the same options.
        Raises like `Prospect`, and TooDear if all programs cost more than ``most_us``."""
        return Prospect(graph, self.options, self._cache, self._on_progress, most_us)

    def _variant(self, hints: dict[str, int]) -> Variant:
        if self.graph.vacant:
            return without_kernels(self.graph)
        graph = self.graph.with_hints(hints)
        ready = [f for h, f in self._found if h == hints]
        self._found = []  # the other results of the search are large
        found = (
            ready[0] if ready else find(graph, self.options, self._on_progress, inf, self._cache)
        )
        return compiled(graph, self.options, self._cache, *found)


def without_kernels(graph: KernelGraph) -> Variant:
    """The program for a graph one of whose tensors has no elements: the reference executor's."""
    names = [graph.nodes[i].name for i in graph.inputs]
    made = [f"out{n}" for n in range(len(graph.outputs))]
    nodes = [graph.nodes[i] for i in (*graph.inputs, *graph.outputs)]
    specs = [TensorSpec(k, n.shape, n.dtype) for k, n in zip(names + made, nodes, strict=True)]
    mu = MuGraph({t.name: t for t in specs}, tuple(names), tuple(made), ())
    return Variant(mu, (), lambda: no_kernels_text(graph))


def best_variant(
    graph: KernelGraph,
    *,
    target: Target | str | None = None,
    scattered: Collection[str] = (),
) -> Variant:
    """The best program for a kernel graph at the hints of its symbols, compiled.

    A `Kernel` finds one for every bucket of extents that it is called with; this function is for
    callers with buckets of their own. The result is correct for all extents.

    Args:
        graph: the definition.
        target: a `Target`, or a name; None takes the current GPU.
        scattered: names of inputs and outputs (``out0``, ...) whose rows lie anywhere: kernels
            take their addresses. There must be one kernel, of rows.

    Raises:
        GraphError, ShapeError, SearchError, LoweringError, ScheduleError, CompileError: as for
            `superoptimize`.
    """
    check_definition("best_variant", graph)
    options = Options(as_target(target))
    with progress_bar() as show:
        result, choice = find(graph, options, show)
    if scattered:
        choice = replace(choice, plans=tuple(p.scattered(scattered) for p in choice.plans))
    return compiled(graph, options, KernelCache(), result, choice)


def best_kernel(graph: KernelGraph, *, target: Target | str | None = None) -> Kernel:
    """A kernel whose one program, the best at the hints of its symbols, serves all extents.

    Arguments and errors are those of `best_variant`; there are no gradients.
    """
    variant = best_variant(graph, target=target)
    return Kernel(graph, as_target(target), lambda hints: variant, single=True)


@seldom_collected()
def mugraphs(
    graph: KernelGraph,
    *,
    target: Target | str | None = None,
    keep: int = 16,
    seed: int = 0,
    budget_s: float | None = None,
    executor: Executor | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best muGraphs for a graph, verified, even if the lowering cannot run them.

    before: attention; after: one kernel with a running maximum and a cluster over the keys, two
    kernels with partial results (`Candidate.lowered` False), and so on. `superoptimize` chooses
    among those that can be run.

    Args:
        graph: the definition.
        target: a `Target`, or a name; None takes the current GPU.
        keep: how many.
        seed: as for `superoptimize`.
        budget_s: as for `superoptimize`.
        executor: as for `superoptimize`.
        on_progress: as for `superoptimize`.

    Raises:
        GraphError, OptionError, DeviceError, SearchError: as for `superoptimize`.
    """
    check_graph("mugraphs", graph)
    check_options(keep=keep, seed=seed, budget_s=budget_s, executor=executor,
                  on_progress=on_progress)  # fmt: skip
    where, how, verifier = as_target(target), SearchOptions(seed=seed, keep=keep), Verifier(graph)
    about = searches.question(graph, where, how)
    earlier = searches.read(about, graph)
    known = earlier[0] if earlier else None
    if known and all(verifier.check(c.mugraph, bound=False) for c in known.candidates):
        return known
    with progress_bar() as show:
        result = search(
            graph,
            where,
            options=how,
            budget_s=budget_s,
            executor=executor,
            on_progress=on_progress or show,
            verify=lambda mu: verifier.check(mu, bound=False),
        )
    searches.keep(about, result)
    return result


def check_definition(call: str, graph: KernelGraph) -> None:
    """Refuse a graph that no kernel can be made for.

    Raises:
        GraphError: the graph is not complete.
        ShapeError: an extent of an input or output is too large for coordinates of 32 bits. Their
            products may be larger: offsets have 64 bits then.
    """
    check_graph(call, graph)
    check_kernel_graph(graph)
    for node in (graph.nodes[i] for i in (*graph.inputs, *graph.outputs)):
        longest = max((d for d in node.shape if isinstance(d, int)), default=1)
        check_size(f"{call}: a dimension of {node.name}", [longest])


def as_target(target: Target | str | None) -> Target:
    """A target as given, the one of this name, or that of the current GPU. Raises DeviceError."""
    if target is None:
        return current_target()
    return target if isinstance(target, Target) else find_target(target)


def current_target() -> Target:
    """The target of torch's current CUDA device, with its multiprocessors; H200 without a device.
    A GPU that no target is named after has the one with the slowest memory of its architecture.

    Raises:
        DeviceError: a GPU whose architecture has no building blocks.
    """
    import torch

    if not torch.cuda.is_available():
        return H200
    name = torch.cuda.get_device_name().lower()
    sms = torch.cuda.get_device_properties().multi_processor_count
    for target in TARGETS.values():
        if target.name in name:
            return target.with_sms(sms)
    major, minor = torch.cuda.get_device_capability()
    same = [t for t in TARGETS.values() if t.arch.rstrip("af") == f"sm_{major}{minor}"]
    if same:
        return min(same, key=lambda t: t.bandwidth).with_sms(sms)
    known = ", ".join(f"{t.name} ({t.arch})" for t in TARGETS.values())
    raise DeviceError(
        f"GPU {torch.cuda.get_device_name()!r} (sm_{major}{minor}): kernels are written for "
        f"{known}; pass target= to compile for one of them"
    )


@seldom_collected()
def find(
    graph: KernelGraph,
    options: Options,
    on_progress: Callable[[Progress], None] | None = None,
    most_us: float = inf,
    cache: KernelCache | None = None,
) -> tuple[SearchResult, Choice]:
    """The tuned program for a graph if there is one, else the result of `choose`.
    It is the input of `compiled`, and can be pickled. Results are kept in the folder of the cache,
    and used again by any process. Raises like `choose`; TooDear for ``most_us``, see `search`."""
    choice = stored_choice(graph, options) if options.tuned else None
    if choice is not None:
        return SearchResult((choice.candidate,), Statistics()), choice
    about = _about(graph, options)
    if earlier := searches.read(about, graph, cache):
        result, compared = earlier
        choice, _ = _runnable(graph, options, result, compared=compared)
        if choice and len(choice.refused) == result.kept:
            return result, choice
    if most_us < inf and (least := searches.least_us(about, cache)) > most_us:
        raise TooDear(least, most_us)
    try:
        result, choice = choose(graph, options, on_progress, ALTERNATIVES + 1, NEAR, most_us)
    except TooDear as error:
        searches.keep_least(about, error.least_us, cache)
        raise
    place = len(choice.refused)
    shown = result.candidates[: max(place, ALTERNATIVES) + 1]
    shortened = replace(result, candidates=shown)
    searches.keep(about, shortened, place, cache, choice.verification)
    return result, choice


def is_known(graph: KernelGraph, options: Options) -> bool:
    """True if the result of a search for a graph is kept on disk."""
    return searches.known(_about(graph, options))


def _about(graph: KernelGraph, options: Options) -> searches.Question:
    return searches.question(graph, options.target, _search_options(options, SearchOptions.keep))


def _search_options(options: Options, keep: int) -> SearchOptions:
    """The options of a search for kernels that a skeleton runs."""
    launch = options.dependent_launch
    return SearchOptions(seed=options.seed, keep=keep, lowered=True, dependent_launch=launch)


@dataclass(frozen=True)
class Outcome:
    """The end of a search; can be pickled, to come from another process.

    Attributes:
        found: the result of `find`, or its error.
        seconds: that it took.
    """

    found: tuple[SearchResult, Choice] | CutesuperError
    seconds: float

    def result(self) -> tuple[SearchResult, Choice]:
        """The result of `find`. Raises its errors."""
        if isinstance(self.found, CutesuperError):
            raise self.found
        return self.found


def outcome(
    graph: KernelGraph,
    options: Options,
    most_us: float = inf,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """The end of `find` with these arguments."""
    start = time.perf_counter()
    try:
        found = find(graph, options, on_progress, most_us)
    except CutesuperError as error:
        found = frameless(error)
    return Outcome(found, time.perf_counter() - start)


def stored_choice(graph: KernelGraph, options: Options) -> Choice | None:
    """The tuned program for a graph, verified and planned like any candidate.
    None if no valid one is stored. An invalid one is skipped with a warning."""
    for entry in store.find(graph, options.target.arch, options.dependent_launch):
        mu, target = entry.mugraph, options.target
        candidate = Candidate(mu, entry.measured.predicted_us, (), structure(mu), True)
        try:
            tensors = followed(mu)
            plans = tuple(
                planned(step, tensors, target, schedule)
                for step, schedule in zip(mu.steps, entry.schedules, strict=True)
            )
            verification = _verify(Verifier(graph), graph, candidate)
        except CutesuperError as error:
            store.ignore(entry.path, error)
            continue
        return Choice(candidate, plans, verification, (), entry)
    return None


def compiled(
    graph: KernelGraph, options: Options, cache: KernelCache, result: SearchResult, choice: Choice
) -> Variant:
    """Compile a choice, with a report on how it was found."""
    steps = compile_plans(choice, options, cache)
    report = variant_report(graph, options, result, choice, steps)
    candidate = choice.candidate
    return Variant(
        candidate.mugraph, steps, report, candidate.kernels, choice.verification,
        lambda: [kernel_notes(step) for step in steps], cut_text(options, result),
    )  # fmt: skip


def choose(
    graph: KernelGraph,
    options: Options,
    on_progress: Callable[[Progress], None] | None = None,
    keep: int = SearchOptions.keep,
    near: float = inf,
    most_us: float = inf,
) -> tuple[SearchResult, Choice]:
    """The cheapest candidate that verifies and that a schedule and the lowering can run.

    Args:
        graph: the definition.
        options: see `Options`.
        on_progress: called with the search's `Progress`.
        keep: number of candidates requested from the search.
        near: see `search`; if none of its candidates can be run, all regions are searched.
        most_us: see `search`.

    Raises:
        TooDear: every program costs more than ``most_us``.
        SearchError, LoweringError, ScheduleError: there is none; says why the best failed.
    """
    target = options.target
    verifier = Verifier(graph)

    def verify(mu: MuGraph) -> Verification:
        return verifier.check(mu, bound=False)

    result = search(
        graph,
        target,
        options=_search_options(options, keep),
        budget_s=options.budget_s,
        executor=options.executor,
        on_progress=on_progress,
        verify=verify,
        known=_REGIONS,
        near=near,
        most_us=most_us,
    )
    if result.candidates and result.statistics.complete:
        least = result.candidates[0].cost_us
        if least > most_us:
            raise TooDear(least, most_us)  # nobody wants it verified
    choice, first = _runnable(graph, options, result, verifier)
    if choice is not None:
        return result, choice
    if near < inf:
        return choose(graph, options, on_progress)
    raise _none(first, result, options)


def _runnable(
    graph: KernelGraph,
    options: Options,
    result: SearchResult,
    verifier: Verifier | None = None,
    compared: searches.Compared | None = None,
) -> tuple[Choice | None, CutesuperError | None]:
    """The first candidate that verifies and that a schedule and the lowering can run.
    The error of the best one that cannot is the second result. A candidate that was ``compared`` at
    real extents is not again."""
    verifier = verifier or Verifier(graph)
    refused: list[str] = []
    first: CutesuperError | None = None
    for candidate in result.candidates:
        try:
            plans = _plans(candidate, options, options.target)
            verification = _verify(verifier, graph, candidate, compared)
        except (LoweringError, ScheduleError, VerificationError) as error:
            refused.append(f"{candidate.structure}: {error}")
            first = first or frameless(error)
            continue
        return Choice(candidate, plans, verification, tuple(refused)), first
    return None, first


def _none(first: CutesuperError | None, result: SearchResult, options: Options) -> CutesuperError:
    """The error for a graph none of whose candidates can be run; ``first`` is the best one's."""
    if first is None:
        return SearchError("superoptimize: the search returned no program")
    if not result.statistics.complete and options.budget_s is not None:
        return SearchError(
            f"the budget of {options.budget_s:g} s is used up, and no program that was found by "
            f"then can be run: {first}; raise budget_s"
        )
    if isinstance(first, VerificationError):
        return SearchError(f"no program that was found can be run: {first}")
    return first


def _plans(candidate: Candidate, options: Options, target: Target) -> tuple[KernelPlan, ...]:
    mu = candidate.mugraph
    tensors = followed(mu)
    return tuple(
        make_plan(step, tensors, target, dependent_launch=options.dependent_launch)
        for step in mu.steps
    )


def verified(graph: KernelGraph, mu: MuGraph) -> Verification:
    """Verify a muGraph at small extents, and at the real ones if that takes about a second."""
    return _verdict(Verifier(graph), graph, mu)


def _verify(
    verifier: Verifier,
    graph: KernelGraph,
    candidate: Candidate,
    compared: searches.Compared | None = None,
) -> Verification:
    mu = candidate.mugraph
    if compared is not None and compared.is_of(mu):
        verification = compared.added(verifier.check(mu))
    else:
        verification = _verdict(verifier, graph, mu)
    if not verification:
        raise VerificationError(f"{candidate.structure}: {verification.summary()}")
    check_numbers(graph, mu)
    return verification


def fault(graph: KernelGraph, mu: MuGraph) -> str | None:
    """The reason why a muGraph must not be run; None if there is none.
    It computes something else, or rounds too much."""
    verification = verified(graph, mu)
    if not verification:
        return verification.summary()
    try:
        check_numbers(graph, mu)
    except VerificationError as error:
        return str(error)
    return None


def check_numbers(graph: KernelGraph, mu: MuGraph) -> None:
    """Refuse a program that rounds to float16 a value that float16 cannot hold.
    Raises VerificationError."""
    if narrows(mu):
        from cutesuper.verify.rounding import check_rounding  # imports torch: 1.5 s in a worker

        check_rounding(graph, mu)


def _verdict(verifier: Verifier, graph: KernelGraph, mu: MuGraph) -> Verification:
    flops = sum(
        lookup(n.operator).flops([graph.nodes[i].shape for i in n.inputs], n.shape)
        for n in graph.nodes
        if n.operator != INPUT
    )
    elements = sum(prod(extent(d) for d in node.shape) for node in graph.nodes)
    cheap = flops <= FULL_CHECK_FLOPS and elements <= FULL_CHECK_ELEMENTS
    return verifier.check(mu, full=cheap)


def compile_plans(choice: Choice, options: Options, cache: KernelCache) -> tuple[CompiledStep, ...]:
    """Compile every kernel of a choice (several at once in worker processes)."""
    target = options.target
    requests = [
        compile_request(plan, step.name, target)
        for plan, step in zip(choice.plans, choice.candidate.mugraph.steps, strict=True)
    ]
    artifacts = compile_many(requests, cache=cache)
    return tuple(
        CompiledStep(plan, artifact) for plan, artifact in zip(choice.plans, artifacts, strict=True)
    )


def compile_request(plan: KernelPlan, name: str, target: Target) -> CompileRequest:
    """The compile request for a kernel of this name."""
    from cutesuper.skeletons.build import build

    outputs = tuple(i for i, a in enumerate(plan.arguments) if a.written)
    kinds = {op.kind for op in plan.program.ops}
    return CompileRequest(
        plan.key, target.arch, name, partial(build, plan), outputs,
        operators=added(kinds), unknown=tuple(f"{n}: {why}" for n, why in unknown(kinds).items()),
    )  # fmt: skip
