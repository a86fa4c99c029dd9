"""The search: kernel graph -> muGraphs, checked and verified.

The search is deterministic: the same graph, target and options give the same candidates in the same
order, in one process or in many (with a time budget, as far as it reaches).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from cutesuper.egraph.clock import OUT_OF_TIME, OutOfTime, limited
from cutesuper.egraph.labelled import Region, label
from cutesuper.egraph.products import matrix_products
from cutesuper.egraph.reductions import rows_meet
from cutesuper.errors import LoweringError, SearchError, frameless
from cutesuper.ir.arguments import check_options
from cutesuper.ir.block import (
    ACCUMULATE,
    CLUSTER_REDUCE,
    GRID_REDUCE,
    LOAD,
    STORE,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    TensorSpec,
    with_names,
)
from cutesuper.ir.border import inside, whole_mugraph, with_copies
from cutesuper.ir.check import check_kernel_graph, check_mugraph
from cutesuper.ir.definitions import added
from cutesuper.ir.graph import KernelGraph
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.search.again import computed_again
from cutesuper.search.bounds import (
    TOGETHER,
    Bounds,
    TooDear,
    least_of_arithmetic_us,
    least_of_form_us,
    least_us,
)
from cutesuper.search.constants import joined_constants
from cutesuper.search.cuts import (
    MAX_SEGMENT,
    Cut,
    Flat,
    Groups,
    Segment,
    Segments,
    cuts,
    preferred,
)
from cutesuper.search.recomputed import recomputed
from cutesuper.search.region import (
    Counts,
    Found,
    SearchOptions,
    Way,
    in_a_chain,
    search_region,
)
from cutesuper.search.region_cache import KnownRegions
from cutesuper.search.shifted import shifted
from cutesuper.search.summed import summed_first
from cutesuper.search.unrelated import Unrelated
from cutesuper.skeletons.cost import Cost, describe
from cutesuper.skeletons.form import needs_positions
from cutesuper.targets import Target
from cutesuper.verify.equivalence import Verification

#: microseconds, and part of its memory or arithmetic, that a kernel of rows may take beside them
#: before its parts are searched: losses of 8192 x 128256 logits with their sum take 837 us in one
#: kernel of an expected 490, and 565 in two
SLACK_US, SLACK = 20.0, 0.3


@dataclass
class Statistics(Counts):
    """Statistics of a search; see also `Counts`.

    Attributes:
        verified, rejected: verdicts of ``verify`` on structures.
        seconds: wall time.
        peak_mb: largest resident memory of this process so far.
        complete: True if everything was searched; False after a budget or an interrupt.
        interrupted: True after an interrupt (Ctrl-C).
    """

    verified: int = 0
    rejected: int = 0
    seconds: float = 0.0
    peak_mb: float = 0.0
    complete: bool = True
    interrupted: bool = False


@dataclass(frozen=True)
class Progress:
    """Progress of a search. ``stage``: ``kernels``, ``verify`` or ``done``."""

    stage: str
    states: int
    pruned: int
    verified: int
    best_cost_us: float | None
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Candidate:
    """A muGraph with its predicted cost and the parts of that cost.

    Attributes:
        mugraph: checked, and verified if the search was given a verifier.
        cost_us: predicted microseconds of all kernels.
        kernels: cost of every kernel of ``mugraph.steps``.
        structure: the kernels as text.
        lowered: True if skeletons of the lowering run every kernel.
    """

    mugraph: MuGraph
    cost_us: float
    kernels: tuple[Cost, ...]
    structure: str
    lowered: bool

    @property
    def breakdown(self) -> dict[str, float]:
        """Microseconds by cause, kernels added up (causes overlap in time)."""
        total: dict[str, float] = {}
        for k in self.kernels:
            for cause, us in k.parts.items():
                total[cause] = total.get(cause, 0.0) + us
        return total


@dataclass(frozen=True)
class SearchResult:
    """Candidates, best first: distinct structures and sizes.

    Attributes:
        candidates: distinct structures and sizes.
        statistics: of the search.
        kept: the place of the candidate that was chosen when the search took place, maybe in
            another process; None if that is now.
    """

    candidates: tuple[Candidate, ...]
    statistics: Statistics
    kept: int | None = None


Verify = Callable[[MuGraph], bool | Verification]

DEFAULTS = SearchOptions()


def search(
    graph: KernelGraph,
    target: Target,
    *,
    options: SearchOptions = DEFAULTS,
    budget_s: float | None = None,
    executor: Executor | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    verify: Verify | None = None,
    known: KnownRegions | None = None,
    near: float = inf,
    most_us: float = inf,
) -> SearchResult:
    """Search the cheapest programs for a graph.

    It is an anytime search: when the budget is used up, or on Ctrl-C, the best candidates so far
    are verified and returned; short kernels are searched first, so that a first candidate exists
    soon.

    Args:
        graph: the graph to compute.
        target: the device to run on.
        options: see `SearchOptions`.
        budget_s: seconds after which the search stops; None: no limit.
        executor: searches the parts of the graph that may become kernels; any
            `concurrent.futures.Executor` whose workers can import cutesuper. None: this process.
        on_progress: called after every part of the graph and every verdict.
        verify: returns True, or a `Verification` that is, if a muGraph computes the graph; called
            once for each structure, and rejected structures are dropped. None: every structure is
            accepted.
        known: results of earlier searches, used if neither a budget nor an executor is given.
        near: least 1. Regions that are only in programs which cost more than this times the
            cheapest, by a bound, are not searched; infinite: all are. The cheapest program is the
            same.
        most_us: a search whose programs are all bound to cost more ends; needs ``near``.

    Raises:
        TooDear: every program costs more than ``most_us``.
        SearchError: an operator that no kernel can run, with the reason; a budget too small; an
            executor that failed; or no program that the verifier accepts.
        LoweringError: a matrix product, and no skeleton for it on this target (only if
            ``options.lowered``); a structure that no skeleton runs, and no other way to cut it.
        GraphError: a graph without inputs or outputs.
        OptionError: an option has a value of another kind.
        KeyboardInterrupt: before anything complete was found.
    """
    check_options(budget_s=budget_s, executor=executor, on_progress=on_progress)
    check_kernel_graph(graph)
    if graph.vacant:
        raise SearchError(
            "a tensor of the graph has an extent of 0, and kernels are for tensors "
            "that have elements; superoptimize(graph) runs it without any"
        )
    found = _Search(graph, target, options, budget_s, executor, on_progress, verify, known, near)
    found.most_us = most_us
    return found.run()


class _Search:
    def __init__(
        self,
        graph: KernelGraph,
        target: Target,
        options: SearchOptions,
        budget_s: float | None,
        executor: Executor | None,
        on_progress: Callable[[Progress], None] | None,
        verify: Verify | None,
        known: KnownRegions | None,
        near: float,
    ) -> None:
        self.whole, self.target, self.options = graph.expanded(), target, options
        self._given, self.border = inside(self.whole)
        self.graph = joined_constants(self._given)
        self.budget_s, self.executor = budget_s, executor
        self.on_progress, self.verify = on_progress, verify
        self.known, self.near = known if budget_s is None else None, near
        self.most_us = inf
        self.statistics = Statistics()
        self.best: float | None = None
        self._start = time.perf_counter()
        self._found: dict[tuple[Region, bool], Found] = {}
        self._interrupt: KeyboardInterrupt | None = None
        self._verdicts: dict[tuple[object, ...], bool | Verification] = {}
        self._parts = (0, 0)
        self._unchained = False
        self._apart: dict[Segments, Unrelated] = {}
        #: the regions of `_wanted` that are no single pieces and between no waists; False for those
        #: that are worth it all the same
        self._doubtful: dict[Region, bool] = {}
        self._asks_why = False  # regions that only tell which operator has no kernel count, too

    def run(self) -> SearchResult:
        candidates: list[Candidate] = []
        try:
            with limited(self._left()):
                self._collect(candidates)
        except KeyboardInterrupt:
            if not candidates:
                raise
            self.statistics.complete, self.statistics.interrupted = False, True
        if not candidates:
            raise SearchError(
                f"search: the verifier rejected all {len(self._verdicts)} structures that were "
                f"found{self._why()}"
            )
        self.statistics.seconds = time.perf_counter() - self._start
        self.statistics.peak_mb = peak_mb()
        self._report("done")
        return SearchResult(tuple(candidates), self.statistics)

    def _collect(self, candidates: list[Candidate]) -> None:
        """The best programs that the verifier accepts, cheapest first.

        For scores that depend on another exponential it cannot verify sums rescaled by a running
        maximum (`FieldAlgebra.nested_exp`): then chained products are run as several kernels.
        """
        self._accept(candidates)
        if not candidates and self.graph is not self._given:
            # it cannot compare all that is equal: a divisor of another sign that may be 0, say
            self.graph = self._given
            self._verdicts.clear()
            self._accept(candidates)
        if self._has_no_value():
            return
        if not candidates and self.near < inf:
            self.near = inf
            self._accept(candidates)
        if not candidates and self.options.lowered:
            self._unchained = True
            # the reason for the rejection is the better message
            with suppress(SearchError, LoweringError):
                self._accept(candidates)

    def _accept(self, candidates: list[Candidate]) -> None:
        """Add candidates that the verifier accepts, up to the requested number."""
        keep = self.options.keep
        for flat, cut in self._cuts(4 * keep):  # more than requested: some may be rejected
            mugraph = whole_mugraph(assemble(flat, cut), self.whole, self.border)
            check_mugraph(mugraph)
            if self._accepted(cut, mugraph):
                candidates.append(_candidate(mugraph, cut))
                self.best = candidates[0].cost_us
            if len(candidates) == keep or (candidates and self._left() <= 0):
                break

    # ------------------------------------------------------------------------------------- graphs

    def _cuts(self, keep: int) -> list[tuple[Flat, Cut]]:
        """Cuts of the graph, of variants that compute shared values again, of copied views."""
        plain = self._flat(self.graph)
        if self.options.lowered:
            self._check_target(plain)
        tried: list[Segments] = []
        found, error = self._cuts_of(map(Segments, self._variants(plain)), keep, tried)
        if not found and not isinstance(error, TooDear) and self._left() > 0:
            self._asks_why = True
            found, error = self._cuts_of(tried, keep, [])
        if not found:
            if self._interrupt is not None:
                raise self._interrupt
            assert error is not None
            raise self._out_of_budget() or error
        return preferred(found, keep)

    def _cuts_of(
        self, variants: Iterable[Segments], keep: int, tried: list[Segments]
    ) -> tuple[list[tuple[Flat, Cut]], SearchError | LoweringError | None]:
        """The cuts of variants, and the reason why one has none. What was tried is added up."""
        found: list[tuple[Flat, Cut]] = []
        error: SearchError | LoweringError | None = None
        for segments in variants:
            if found and segments.flat.last_resort:
                break  # only where nothing else is possible
            if tried and self._left() <= 0:
                self.statistics.complete = False
                break
            tried.append(segments)
            try:
                self._gather(segments)
                found += [(segments.flat, cut) for cut in cuts(segments, self._ways, keep)]
            except (SearchError, LoweringError) as e:
                error = frameless(e) if isinstance(e, TooDear) else error or frameless(e)
        return found, error

    def _variants(self, plain: Flat) -> Iterator[Flat]:
        yield plain
        again = computed_again(self.graph)
        if again is not None:
            yield self._flat(again)
        summed = summed_first(self.graph)
        if summed is not None:
            yield self._flat(summed)
        if self.options.lowered:
            for n, (graph, groups) in enumerate(recomputed(self.graph)):
                yield self._flat(graph, groups=groups, last_resort=n > 0)
        else:
            for groups in _groups(len(self.graph.outputs)):
                graph = self.graph.apart(groups)
                if len(graph.nodes) > len(self.graph.nodes):
                    yield self._flat(graph, groups=groups)
        copied = self._flat(self.graph, copy_all=True)
        if copied.copies != plain.copies:
            yield copied
        safe = shifted(self.graph)
        if safe is not None:
            yield self._flat(safe, last_resort=True)
        if not self.border.whole:
            yield self._flat(with_copies(self.graph, self.border), last_resort=True)

    def _flat(self, graph: KernelGraph, **more: Any) -> Flat:
        return Flat(graph, border=self.border, **more)

    def _check_target(self, flat: Flat) -> None:
        why = self.target.refuses_products()
        if why is None:
            return
        for i in flat.order:
            is_matmul = self.graph.nodes[i].facets.contracts
            if is_matmul and matrix_products(label(flat.segment((i,)).region)):
                raise LoweringError(f"{flat.describe(i)}: {why}")

    # ------------------------------------------------------------------------------------ regions

    def _gather(self, segments: Segments) -> None:
        """Search the regions of a graph that cheap programs may consist of, within the budget.
        Short ones first."""
        if self._interrupt is not None or self._is_one_kernel(segments):
            return
        more, longest = True, 1 if self.options.lowered else MAX_SEGMENT
        while more:
            self._look_at(self._wanted(segments, longest))
            more = self._left() > 0 and self._interrupt is None and segments.divide(self._runs)
        if not self.options.lowered:
            return
        # also where all are searched: a good program is found early, or that there is none
        wanted = self._wanted(segments)
        if self._narrow(segments, wanted) and self.near == inf:
            self._look_at({r: o for r, o in wanted.items() if not self._is_left_out(r)})

    def _narrow(self, segments: Segments, wanted: dict[Region, SearchOptions]) -> bool:
        """Search the regions that the cheapest program may consist of, and programs near to it.
        If there is none and that is all that is left to say, those that tell which operator has no
        kernel. Return True if there may be one."""
        near = TOGETHER if self.near == inf else self.near
        bounds = Bounds(segments, {r: least_us(r, self.target) for r in wanted})
        todo, rough = list(wanted), set(wanted)  # of the latter a tighter bound is not known yet
        while todo and self._interrupt is None and self._left() > 0:
            for region in todo:
                found = self._found.get((region, wanted[region].lowered))
                if found is not None and not self._is_left_out(region):
                    bounds.learn(region, found.ways[0].total if found.ways else inf)
            if self.most_us < bounds.least < inf:
                raise TooDear(bounds.least, self.most_us)
            if bounds.least == inf and not self._asks_why:
                return False
            todo = bounds.below(TOGETHER) or bounds.below(near)
            if loose := rough.intersection(todo):
                for region in loose:
                    if self._is_left_out(region):
                        bounds.learn(region, inf)
                    else:
                        self._tighten(bounds, region, wanted[region])
                rough -= loose
                continue
            # products first: they take milliseconds, rows up to 2 s, and their bounds say less
            todo = list(filter(_multiplies, todo)) or todo
            self._look_at({r: wanted[r] for r in todo})
        self.statistics.complete &= not todo
        if self.near < inf:
            self.statistics.pruned["more to do than cheap programs have"] += bounds.open
        return bounds.least < inf

    def _tighten(self, bounds: Bounds, region: Region, options: SearchOptions) -> None:
        """Replace the bound of a region by that of its form.
        A region that has none is refused as its search would, without one."""
        try:
            bounds.tighten(region, least_of_form_us(region, self.target))
        except OutOfTime:
            self.statistics.complete = False
        except (SearchError, LoweringError) as error:
            if options.lowered:
                refused = Found((), frameless(error), Counts(regions=1))
                refused.counts.pruned[str(error)] += 1
                self._found[region, True] = refused
                self.statistics.add(refused.counts)
                bounds.learn(region, inf)

    def _wanted(
        self, segments: Segments, longest: int = MAX_SEGMENT
    ) -> dict[Region, SearchOptions]:
        """The regions of up to this many pieces that are worth searching, with their options.
        As far as the budget reaches; single pieces always are, so that there is a way. Some are
        not, after all: see `_is_left_out`."""
        wanted: dict[Region, SearchOptions] = {}
        self._doubtful = {}
        leave = self._unrelated(segments) if self.options.lowered else None
        for segment, length, at_waists in segments.all(longest, leave):
            if self._left() <= 0:
                self.statistics.complete = False
                break
            if at_waists or (self.options.lowered and length == 1):
                wanted[segment.region] = self.options
                self._doubtful[segment.region] = False
            elif self.options.lowered:
                wanted.setdefault(segment.region, self.options)
                self._doubtful.setdefault(segment.region, True)
            elif length == 1:
                simple = needs_positions(segment.region) is None
                options = replace(self.options, lowered=True) if simple else self.options
                wanted.setdefault(segment.region, options)
        return wanted

    def _unrelated(self, segments: Segments) -> Unrelated:
        """The test for products of a graph that have nothing in common; made once."""
        if segments not in self._apart:
            self._apart[segments] = Unrelated(segments.flat)
        return self._apart[segments]

    def _is_left_out(self, region: Region) -> bool:
        """True for chained products between no waists.
        To find out takes as long as all else that `_wanted` does, so it waits until a bound says
        that the region may be in a cheap program."""
        if self._doubtful.get(region, False):
            self._doubtful[region] = in_a_chain(region, self.target)
            return self._doubtful[region]
        return False

    def _runs(self, region: Region) -> bool:
        """True if a kernel was found for a region."""
        found = (self._found.get((region, lowered)) for lowered in (False, True))
        return any(f is not None and f.error is None for f in found)

    def _is_one_kernel(self, segments: Segments) -> bool:
        """True if a whole graph is one kernel of rows, which hardly a sequence of kernels beats.
        Then its parts are not searched. The backward pass of a LayerNorm has 135 parts, which took
        two minutes. A kernel that takes much more than its memory and its arithmetic is another
        matter, if there are sums that it waits for: cuts of what is element-wise, as a gated GELU's
        derivative is, move more and save nothing."""
        whole = segments.whole()
        if not self.options.lowered or whole is None or not rows_meet(whole.region):
            return False
        if self.most_us < inf:
            with suppress(SearchError):
                least = least_of_form_us(whole.region, self.target)
                if least > self.most_us:
                    raise TooDear(least, self.most_us)
        self._look_at({whole.region: self.options})
        found = self._found.get((whole.region, True))
        if found is None or found.error is not None or not found.ways:
            return False
        if not any(op.facets.reduces for op in whole.region.ops):
            return True
        bounds = least_us, least_of_arithmetic_us
        least = max(bound(whole.region, self.target) for bound in bounds)
        return found.ways[0].total <= least + max(SLACK_US, SLACK * least)

    def _look_at(self, todo: dict[Region, SearchOptions]) -> None:
        """Search regions, in this process or by the executor; none after an interrupt."""
        if self._interrupt is not None:
            return
        todo = {r: o for r, o in todo.items() if (r, o.lowered) not in self._found}
        self._parts = (0, len(todo))
        try:
            for region, found in self._search_all(todo):
                self._found[region, todo[region].lowered] = found
                self.statistics.add(found.counts)
                self.statistics.complete &= not found.counts.pruned[OUT_OF_TIME]
                self._parts = (self._parts[0] + 1, len(todo))
                self._report("kernels")
        except KeyboardInterrupt as interrupt:
            self._interrupt = interrupt
            self.statistics.complete, self.statistics.interrupted = False, True

    def _search_all(self, todo: dict[Region, SearchOptions]) -> Iterator[tuple[Region, Found]]:
        if self.executor is not None:
            # other processes do not know operators that were added in this one
            here = {r: o for r, o in todo.items() if added(op.kind for op in r.ops)}
            away = {r: o for r, o in todo.items() if r not in here}
            yield from self._elsewhere(away, self.executor)
            todo = here
        for region, options in todo.items():
            if self._left() <= 0:
                self.statistics.complete = False
                return
            if self.known is not None:
                yield region, self.known.search(region, self.target, options)
            else:
                yield region, search_region(region, self.target, options, self._left())

    def _elsewhere(
        self, todo: dict[Region, SearchOptions], executor: Executor
    ) -> Iterator[tuple[Region, Found]]:
        """Results that an executor has when the budget ends. Raises SearchError if it fails."""
        futures: dict[Region, Future[Found]] = {}
        try:
            for region, options in todo.items():
                if self._left() <= 0:
                    self.statistics.complete = False
                    break
                futures[region] = executor.submit(
                    search_region, region, self.target, options, self._left()
                )
            for region, future in futures.items():
                left = None if self.budget_s is None else max(0.0, self._left() + _GRACE_S)
                try:
                    found = future.result(left)
                except TimeoutError:
                    if left is None:
                        raise
                    self.statistics.complete = False
                    continue
                yield region, found
        except Exception as error:  # every kind of executor has its own errors
            raise SearchError(
                f"search: the executor {type(executor).__name__} failed "
                f"({type(error).__name__}: {error}); start another one, or search without"
            ) from error
        finally:
            for future in futures.values():
                future.cancel()

    def _left(self) -> float:
        """Seconds left of the budget."""
        if self.budget_s is None:
            return float("inf")
        return self.budget_s - (time.perf_counter() - self._start)

    def _ways(self, region: Region) -> tuple[Way, ...]:
        """Ways found for a region. Raises SearchError, LoweringError."""
        if self._unchained and in_a_chain(region, self.target):
            raise SearchError("the verifier rejected chained products")
        for lowered in (False, True):
            found = self._found.get((region, lowered))
            if found is not None and found.error is None:
                return found.ways
            if found is not None and not found.counts.pruned[OUT_OF_TIME]:
                assert found.error is not None
                raise found.error
        raise self._out_of_budget() or SearchError(
            "not looked at: it neither starts nor ends where little is stored"
        )

    def _out_of_budget(self) -> SearchError | None:
        """The error to raise if nothing was found for lack of time, or None."""
        if self.statistics.complete or self.budget_s is None:
            return None
        return SearchError(f"the budget of {self.budget_s:g} s is used up; raise budget_s")

    # ----------------------------------------------------------------------------------- verdicts

    def _accepted(self, cut: Cut, mugraph: MuGraph) -> bool:
        if self.verify is None:
            return True
        key = tuple((s.writes, s.region, way.lowered, way.structure) for s, way in cut.steps)
        if key not in self._verdicts:
            self._verdicts[key] = self.verify(mugraph)
            self.statistics.verified += bool(self._verdicts[key])
            self.statistics.rejected += not self._verdicts[key]
            self._report("verify")
        return bool(self._verdicts[key])

    def _has_no_value(self) -> bool:
        """True if the verifier says of each structure that the graph has no value to compare."""
        verdicts = self._verdicts.values()
        return bool(verdicts) and all(isinstance(v, Verification) and v.of_graph for v in verdicts)

    def _why(self) -> str:
        """The first reason of the verifier, if it gave any, and a remedy."""
        refused = [v for v in self._verdicts.values() if isinstance(v, Verification) and v.reason]
        of_graph = [v for v in refused if v.of_graph]
        reason = next((f" ({v.reason})" for v in (*of_graph, *refused)), "")
        return f"{reason}; {'change the graph' if of_graph else 'please report the graph'}"

    def _report(self, stage: str) -> None:
        if self.on_progress is not None:
            s = self.statistics
            self.on_progress(
                Progress(stage, s.classes, s.pruned.total(), s.verified, self.best, *self._parts)
            )


def _multiplies(region: Region) -> bool:
    return any(op.facets.contracts for op in region.ops)


def peak_mb() -> float:
    """Largest resident memory of this process, MiB.

    It is read from /proc where that exists: across ``exec``, ``ru_maxrss`` keeps the maximum of the
    process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


#: seconds that a worker may exceed the budget before its part of the graph is given up
_GRACE_S = 0.3


def _groups(outputs: int) -> Iterator[Groups]:
    """Ways to compute outputs apart from each other: each by itself, and one from the rest."""
    if outputs < 2:
        return
    everyone = tuple(range(outputs))
    yield tuple((n,) for n in everyone)
    if outputs > 2:
        for n in everyone:
            yield (n,), tuple(m for m in everyone if m != n)


def assemble(flat: Flat, cut: Cut) -> MuGraph:
    """A cut as a muGraph: tensors get their names, kernels are called ``k0``, ``k1``, ..."""
    graph = flat.graph
    tensors = {
        n.name: TensorSpec(n.name, n.shape, n.dtype, n.constant)
        for n in (graph.nodes[i] for i in graph.inputs)
    }
    steps: list[KernelStep] = []
    for segment, way in cut.steps:
        names = {f"in{j}": name for j, name in enumerate(segment.reads)}
        names |= {f"out{j}": name for j, name in enumerate(segment.writes)}
        for p in way.programs[0].partials().values():
            name = names[p.name] = flat.fresh(f"partial{len(tensors)}")
            tensors[name] = replace(p, name=name)
        through = {f"in{j}": name for j, name in enumerate(segment.through) if name is not None}
        for p, (base, indices) in zip(segment.region.put, segment.put, strict=True):
            names |= {f"base{p.output}": base, **dict(zip(p.places(), indices, strict=True))}
        for program in way.programs:
            steps.append(KernelStep(f"k{len(steps)}", _renamed(program, names, through)))
        tensors |= _written(segment)
    inputs = tuple(graph.nodes[i].name for i in graph.inputs)
    outputs = tuple(flat.fresh(f"out{i}") for i in range(len(graph.outputs)))
    return MuGraph(tensors, inputs, outputs, tuple(steps))


def _written(segment: Segment) -> dict[str, TensorSpec]:
    region = segment.region
    shapes = list(region.output_shapes)
    for p in region.put:
        shapes[p.output] = p.base
    stored = zip(segment.writes, shapes, region.output_dtypes, strict=True)
    return {name: TensorSpec(name, shape, dtype) for name, shape, dtype in stored}


def _renamed(program: BlockProgram, names: dict[str, str], through: dict[str, str]) -> BlockProgram:
    """A program of a region on the graph's tensors.
    Pages are read through their tables, and rows through their indices."""

    def rename(op: BlockOp) -> BlockOp:
        if op.kind not in (LOAD, STORE):
            return op
        tensor = op.attributes["tensor"]
        how = "table" if op.gathering is None else op.gathering.through
        integers = {how: through[tensor]} if tensor in through else {}
        if op.puts:
            own = {k: op.attributes[k] for k in ("index", "base")}
            integers = {k: with_names(v, names.__getitem__) for k, v in own.items()}
        return replace(op, attributes=op.attributes | {"tensor": names[tensor]} | integers)

    return replace(program, ops=tuple(rename(op) for op in program.ops))


def _candidate(mugraph: MuGraph, cut: Cut) -> Candidate:
    return Candidate(
        mugraph,
        cut.cost,
        tuple(cost for _, way in cut.steps for cost in way.costs),
        structure(mugraph),
        all(way.lowered for _, way in cut.steps),
    )


def structure(mugraph: MuGraph) -> str:
    """The kernels of a muGraph as text."""
    return "; ".join(f"{s.name}: {show(s.program)}" for s in mugraph.steps)


#: longest expression that is written out again in each place where it is used, in characters
MAX_SHOWN = 1000


def show(program: BlockProgram) -> str:
    """A program as one line of expressions; one of more than `MAX_SHOWN` characters gets a name.

    ``out0 = div(acc(matmul(X, W)), sqrt(acc(mean(square(X))))) with N.grid(64) ..., tile ...``
    """
    text: list[str] = []
    named: list[str] = []
    stores: list[str] = []
    for i, op in enumerate(program.ops):
        shown = _shown(op, [text[j] for j in op.inputs])
        if op.kind == STORE:
            stores.append(f"{op.attributes['tensor']} = {shown}")
        elif len(shown) > MAX_SHOWN:
            named.append(f"v{i} = {shown}")
            shown = f"v{i}"
        text.append(shown)
    return f"{', '.join((*named, *stores))} with {describe(program)}"


def _shown(op: BlockOp, operands: list[str]) -> str:
    """An operation as an expression of its operands."""
    args = ", ".join(operands)
    short = {ACCUMULATE: "acc", CLUSTER_REDUCE: "cluster", GRID_REDUCE: "grid"}
    if op.kind == LOAD:
        return op.attributes["tensor"]
    if op.kind == STORE:
        return args
    if op.kind == CONSTANT:
        return f"{op.attributes['value']:g}"
    if op.rescaled:
        return f"rescaled_{short[op.kind]}({operands[0]}, {operands[1]})"
    return f"{short.get(op.kind, op.kind)}({args})"
