"""Search: from a kernel graph to the cheapest muGraphs.

    graph -> primitive operators -> cuts into kernels -> for each region: labels, form, splits ->
    classes (saturate) -> programs (extract) -> sizes (sizing) -> muGraphs, checked and verified

Deterministic: the same graph, target and options give the same candidates in the same order (with
a time budget, as far as it reaches).
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from cutesuper.errors import LoweringError, SearchError
from cutesuper.graph.block import (
    LOAD,
    STORE,
    BlockOp,
    BlockProgram,
    KernelStep,
    MuGraph,
    TensorSpec,
)
from cutesuper.graph.check import check_block_program, check_kernel_graph, check_mugraph
from cutesuper.graph.kernel import KernelGraph
from cutesuper.graph.target import Target
from cutesuper.search.cost import price
from cutesuper.search.extract import block_program, extract
from cutesuper.search.forms import Form, MatmulForm, find_form, matrix_products
from cutesuper.search.kernels import Cut, Flat, Kernel, cuts
from cutesuper.search.labels import LabelledProgram, Region, label
from cutesuper.search.saturate import TooLarge, saturate
from cutesuper.search.sizing import describe, sized
from cutesuper.search.space import Sealing, Space


@dataclass(frozen=True)
class SearchOptions:
    """Knobs of the search.

    Attributes:
        programs_per_split: structures taken from one split of one region.
        slack: a structure may cost this much more than the cheapest of its split, before sizing.
        max_classes: classes of one split (284 for RMSNorm backward, the largest tried program of
            one kernel); past that the region, and others nearly as long, are searched with more
            values sealed.
        sizes_per_structure: sized programs kept of one structure.
        keep: candidates returned.
        budget_s: stop looking for more after this many seconds; None: never.
        seed: of the random field point that tells classes apart.
    """

    programs_per_split: int = 8
    slack: float = 1.5
    max_classes: int = 500
    sizes_per_structure: int = 8
    keep: int = 16
    budget_s: float | None = None
    seed: int = 0


@dataclass
class Statistics:
    """What the search did.

    Attributes:
        regions: different regions looked at.
        splits, feasible: splits tried, and those under which every output can be computed.
        classes, tried: classes kept, and results formed to find them.
        largest: classes of the largest split.
        programs: structures extracted.
        pruned: regions, structures and sizes that were left out, by reason.
        verified, rejected: verdicts of ``verify`` on structures.
        seconds: wall time.
        peak_mb: largest resident memory of the process so far.
    """

    regions: int = 0
    splits: int = 0
    feasible: int = 0
    classes: int = 0
    tried: int = 0
    largest: int = 0
    programs: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    rejected: int = 0
    seconds: float = 0.0
    peak_mb: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a search is. ``stage``: ``kernels``, ``verify`` or ``done``."""

    stage: str
    states: int
    pruned: int
    verified: int
    best_cost_us: float | None


@dataclass(frozen=True)
class Candidate:
    """A muGraph, what it should cost, and why (microseconds by cause, kernels added up)."""

    mugraph: MuGraph
    cost_us: float
    breakdown: dict[str, float]
    structure: str


@dataclass(frozen=True)
class SearchResult:
    """Candidates, best first: distinct structures and sizes."""

    candidates: tuple[Candidate, ...]
    statistics: Statistics


#: how regions are searched that had too many classes: `Space`
SEALING: tuple[Sealing, ...] = (0, 1, 2)

Verify = Callable[[MuGraph], bool]


def search(
    graph: KernelGraph,
    target: Target,
    *,
    options: SearchOptions = SearchOptions(),
    on_progress: Callable[[Progress], None] | None = None,
    verify: Verify | None = None,
) -> SearchResult:
    """The cheapest programs for a graph.

    Args:
        graph: what to compute.
        target: the device that it will run on.
        options: see `SearchOptions`.
        on_progress: called after every region and every verdict.
        verify: whether a muGraph computes the graph; asked once for each structure, and what it
            rejects is dropped. None: every structure is accepted.

    Raises:
        SearchError: an operator that no kernel can run, with the reason; a budget too small; or
            nothing that the verifier accepts.
        LoweringError: a matrix product, and no skeleton for it on this target.
        GraphError: a graph without inputs or outputs.
    """
    check_kernel_graph(graph)
    return _Search(graph, target, options, on_progress, verify).run()


class _Search:
    def __init__(
        self,
        graph: KernelGraph,
        target: Target,
        options: SearchOptions,
        on_progress: Callable[[Progress], None] | None,
        verify: Verify | None,
    ) -> None:
        self.graph, self.target, self.options = graph.expanded(), target, options
        self.on_progress, self.verify = on_progress, verify
        self.statistics = Statistics()
        self.best: float | None = None
        self._start = time.perf_counter()
        self._found: dict[Region, list[Kernel] | SearchError] = {}
        self._structures = 0
        #: regions of this many operators are searched with this much sealing
        self._large: list[float] = [0, inf, inf]
        self._verdicts: dict[tuple[object, ...], bool] = {}

    def run(self) -> SearchResult:
        keep = self.options.keep
        flat, found = self._cuts(4 * keep)  # more than asked for: some may be rejected
        candidates: list[Candidate] = []
        for cut in found:
            mugraph = assemble(flat, cut)
            check_mugraph(mugraph)
            if self._accepted(cut, mugraph):
                candidates.append(_candidate(mugraph, cut))
                self.best = candidates[0].cost_us
            if len(candidates) == keep:
                break
        if not candidates:
            raise SearchError(
                f"search: the verifier rejected all {len(self._verdicts)} structures that were "
                "found; please report the graph"
            )
        self.statistics.seconds = time.perf_counter() - self._start
        self.statistics.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._report("done")
        return SearchResult(tuple(candidates), self.statistics)

    # ------------------------------------------------------------------------------------ regions

    def _cuts(self, keep: int) -> tuple[Flat, list[Cut]]:
        """Cuts with transposes as views, or, if there are none, with copies of them."""
        flat = Flat(self.graph)
        self._check_target(flat)
        try:
            return flat, cuts(flat, self._kernels, keep)
        except SearchError as first:
            copied = Flat(self.graph, copy_all=True)
            if copied.copies == flat.copies:
                raise
            try:
                return copied, cuts(copied, self._kernels, keep)
            except SearchError:
                raise first from None

    def _check_target(self, flat: Flat) -> None:
        why = self.target.refuses_products()
        if why is None:
            return
        for i in flat.order:
            is_matmul = self.graph.nodes[i].operator == "matmul"
            if is_matmul and matrix_products(label(flat.segment((i,)).region)):
                raise LoweringError(f"{flat.describe(i)}: {why}")

    def _kernels(self, region: Region) -> list[Kernel]:
        """Kernels of a region, remembered; raises SearchError if there are none."""
        if region not in self._found:
            self._found[region] = self._look(region)
            self._report("kernels")
        found = self._found[region]
        if isinstance(found, SearchError):
            raise found
        return found

    def _look(self, region: Region) -> list[Kernel] | SearchError:
        budget = self.options.budget_s
        if budget is not None and time.perf_counter() - self._start > budget:
            return SearchError(f"the budget of {budget:g} s is used up; raise budget_s")
        self.statistics.regions += 1
        try:
            program = label(region)
            return self._search_region(region, program, find_form(region, program))
        except SearchError as e:
            self.statistics.pruned[str(e)] += 1
            return e

    def _search_region(
        self, region: Region, program: LabelledProgram, form: Form
    ) -> list[Kernel]:
        found: list[Kernel] = []
        for level, least in enumerate(self._large):
            longer = self._large[level + 1 :]
            if len(region.ops) < least or any(len(region.ops) >= n for n in longer):
                continue
            try:
                found = self._programs(region, form, Space(program, SEALING[level]))
                break
            except TooLarge:
                if not longer:
                    raise
                self.statistics.pruned["too many classes: more values sealed"] += 1
                # not one less: the next start of a segment would only find out again
                self._large[level + 1] = 3 * len(region.ops) // 4
        if not found:
            raise SearchError("no structure that the lowering can run fits the device")
        return sorted(found, key=lambda k: k.cost.total)[: 2 * self.options.keep]

    def _programs(self, region: Region, form: Form, space: Space) -> list[Kernel]:
        """Sized programs of all splits of a form."""
        found: list[Kernel] = []
        for split in form.splits(space.program):
            table = saturate(space, split, form, self.options.max_classes, self.options.seed)
            self.statistics.splits += 1
            self.statistics.classes += len(table.classes)
            self.statistics.tried += table.tried
            self.statistics.largest = max(self.statistics.largest, len(table.classes))
            cost = price(table, form, self.target, region.output_dtypes[0].itemsize)
            extracted = extract(table, cost, self.options.programs_per_split, self.options.slack)
            if not extracted:
                break  # a split with one axis more is not feasible either
            self.statistics.feasible += 1
            for e in extracted:
                found += self._sizes(region, form, block_program(table, e))
        return found

    def _sizes(self, region: Region, form: Form, structure: BlockProgram) -> list[Kernel]:
        self.statistics.programs += 1
        reason = form.refuses(structure)
        if reason is not None:
            self.statistics.pruned[reason] += 1
            return []
        check_block_program(structure)
        itemsizes = {f"in{i}": t.itemsize for i, t in enumerate(region.input_dtypes)}
        itemsizes |= {f"out{i}": t.itemsize for i, t in enumerate(region.output_dtypes)}
        self._structures += 1
        found = sized(
            structure, form, self.target, itemsizes, self.options.sizes_per_structure,
            self.statistics.pruned,
        )
        return [Kernel(s.program, s.cost, self._structures) for s in found]

    # ----------------------------------------------------------------------------------- verdicts

    def _accepted(self, cut: Cut, mugraph: MuGraph) -> bool:
        if self.verify is None:
            return True
        key = tuple((segment.writes, kernel.structure) for segment, kernel in cut.steps)
        if key not in self._verdicts:
            self._verdicts[key] = self.verify(mugraph)
            self.statistics.verified += self._verdicts[key]
            self.statistics.rejected += not self._verdicts[key]
            self._report("verify")
        return self._verdicts[key]

    def _report(self, stage: str) -> None:
        if self.on_progress is not None:
            s = self.statistics
            self.on_progress(
                Progress(stage, s.classes, s.pruned.total(), s.verified, self.best)
            )


def assemble(flat: Flat, cut: Cut) -> MuGraph:
    """A cut as a muGraph: tensors get their names, kernels are called ``k0``, ``k1``, ..."""
    graph = flat.graph
    tensors = {
        n.name: TensorSpec(n.name, n.shape, n.dtype, n.constant)
        for n in (graph.nodes[i] for i in graph.inputs)
    }
    steps: list[KernelStep] = []
    for i, (segment, kernel) in enumerate(cut.steps):
        names = {f"in{j}": name for j, name in enumerate(segment.reads)}
        names |= {f"out{j}": name for j, name in enumerate(segment.writes)}
        steps.append(KernelStep(f"k{i}", _renamed(kernel.program, names)))
        region = segment.region
        for name, view, dtype in zip(
            segment.writes, region.outputs, region.output_dtypes, strict=True
        ):
            shape = region.ops[view.value - len(region.inputs)].shape
            tensors[name] = TensorSpec(name, tuple(shape[d] for d in view.order), dtype)
    inputs = tuple(graph.nodes[i].name for i in graph.inputs)
    outputs = tuple(flat.fresh(f"out{i}") for i in range(len(graph.outputs)))
    return MuGraph(tensors, inputs, outputs, tuple(steps))


def _renamed(program: BlockProgram, names: dict[str, str]) -> BlockProgram:
    def rename(op: BlockOp) -> BlockOp:
        if op.kind not in (LOAD, STORE):
            return op
        return replace(op, attributes=op.attributes | {"tensor": names[op.attributes["tensor"]]})

    return replace(program, ops=tuple(rename(op) for op in program.ops))


def _candidate(mugraph: MuGraph, cut: Cut) -> Candidate:
    breakdown: Counter[str] = Counter()
    for _, kernel in cut.steps:
        breakdown.update(kernel.cost.parts)
    lines = [f"{s.name}: {show(s.program)}" for s in mugraph.steps]
    return Candidate(mugraph, cut.cost, dict(breakdown), "; ".join(lines))


def show(program: BlockProgram) -> str:
    """A program as one line of expressions.

    ``out0 = div(acc(matmul(X, W)), sqrt(acc(mean(square(X))))) with N.grid(64) ..., tile ...``
    """
    text: list[str] = []
    stores: list[str] = []
    short = {"accumulate": "acc", "cluster_reduce": "cluster"}
    for op in program.ops:
        args = ", ".join(text[j] for j in op.inputs)
        if op.kind == LOAD:
            text.append(op.attributes["tensor"])
        elif op.kind == STORE:
            stores.append(f"{op.attributes['tensor']} = {args}")
            text.append("")
        elif op.kind == "constant":
            text.append(f"{op.attributes['value']:g}")
        else:
            text.append(f"{short.get(op.kind, op.kind)}({args})")
    return f"{', '.join(stores)} with {describe(program)}"


__all__ = [
    "Candidate",
    "MatmulForm",
    "Progress",
    "SearchOptions",
    "SearchResult",
    "Statistics",
    "assemble",
    "search",
]
