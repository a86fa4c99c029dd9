"""Candidates of the search that are worth timing: chosen, planned and compiled.

    workload, shape -> search -> `sample` -> plans -> kernels (compiled in worker processes)

Nothing here needs a GPU. Candidates that cannot be planned or compiled stay in the list with the
reason.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

import cutesuper as cs
from benchmarks.entry import describe_error
from benchmarks.peers import Launcher
from benchmarks.problem import Problem
from benchmarks.workloads import Outputs, Shape, Workload
from cutesuper.errors import CompileError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import extent
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import CompileRequest, compile_kernel, compile_many
from cutesuper.runtime.kernel import CompiledStep, Variant
from cutesuper.runtime.toolchain import available_processors
from cutesuper.search.search import Candidate, SearchOptions, search, show
from cutesuper.skeletons.build import build
from cutesuper.skeletons.planner import KernelPlan, make_plan
from cutesuper.targets import Target
from cutesuper.verify.equivalence import Verifier

#: candidates requested from the search, which then takes 0.2 to 4 s
POOL = 512
#: the same if programs of few kernels come first
FEW_POOL = 128
#: sizes of one structure: all that fit (a structure of RMSNorm + Linear has up to 40)
SIZES = 64
#: microseconds of a launch that puts programs of few kernels before all others
DEAR_US = 1e6
#: two predictions for the same sizes that are closer than this are one candidate
TWIN = 0.01
#: processors left to the concurrent measuring process: its launches must not wait
RESERVED_PROCESSORS = 2


@dataclass
class Offer:
    """A candidate with its place in the model's order, and its state on the way to the device.

    Attributes:
        name: ``c007``: the seventh in the model's order.
        position: in the model's order, 1 for its first choice.
        mugraph: the program.
        predicted_us: microseconds by the cost model.
        parts: of them by cause; causes overlap.
        structure: the program of every kernel without extents.
        sizes: axes and tiles of every kernel.
        make: launches the compiled kernels; None until they are compiled.
        refused: why it cannot be launched; "" if it can.
    """

    name: str
    position: int
    mugraph: MuGraph
    predicted_us: float
    parts: dict[str, float]
    structure: str
    sizes: str
    make: Callable[[Problem], Launcher] | None = None
    refused: str = ""


@dataclass
class Prepared:
    """One case, ready to be timed.

    Attributes:
        offers: the sample, in the model's order.
        found: number of candidates that the sample was taken from.
        structures: number of different structures among them.
        search_s: seconds of the searches, verification of the structures included.
        error: why there is nothing to time; "" if there is something.
    """

    workload: Workload
    shape: Shape
    offers: list[Offer] = field(default_factory=list)
    found: int = 0
    structures: int = 0
    search_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class CompiledCandidate:
    """Launcher of a candidate whose kernels are in the cache at ``cache_root``; can be pickled."""

    mugraph: MuGraph
    plans: tuple[KernelPlan, ...]
    requests: tuple[CompileRequest, ...]
    cache_root: str

    def __call__(self, problem: Problem) -> Launcher:
        """Load the kernels; tensors between them are shared by all input sets, as in a stream."""
        cache = KernelCache(self.cache_root)
        steps = tuple(
            CompiledStep(plan, compile_kernel(request, cache))
            for plan, request in zip(self.plans, self.requests, strict=True)
        )
        launches = Variant(self.mugraph, steps).launches
        inputs, outputs = problem.inputs, problem.outputs
        device = inputs[0][0].device
        between = [
            torch.empty([extent(d) for d in shape], dtype=dtype, device=device)
            for shape, dtype in launches.intermediates
        ]

        def launch(i: int) -> Outputs:
            launches.launch([*inputs[i], *outputs[i], *between])
            return outputs[i]

        return Launcher(launch)


def prepare(
    cases: Sequence[tuple[Workload, Shape]], dtype: str, top: int, target: Target
) -> list[Prepared]:
    """Search, sample, plan and compile several cases; all kernels are compiled at once.

    Args:
        cases: what to compute.
        dtype: element type of all tensors.
        top: see `sample`.
        target: the GPU.
    """
    cache = KernelCache()
    prepared = [_searched(workload, shape, dtype, top, target) for workload, shape in cases]
    offers = [offer for p in prepared for offer in p.offers]
    for offer in offers:
        _plan(offer, target, str(cache.root))
    _compile(offers, cache)
    return prepared


def _searched(workload: Workload, shape: Shape, dtype: str, top: int, target: Target) -> Prepared:
    begin = time.perf_counter()
    try:
        offers = pool(workload.graph(cs, shape, dtype), target)
    except Exception as error:  # whatever the error, the other cases must go on
        return Prepared(workload, shape, error=f"search: {describe_error(error)}")
    return Prepared(
        workload,
        shape,
        sample(offers, top),
        found=len(offers),
        structures=len({o.structure for o in offers}),
        search_s=time.perf_counter() - begin,
    )


def pool(graph: KernelGraph, target: Target) -> list[Offer]:
    """Candidates of a graph in the model's order, verified.

    The results of the search, and all sizes of the programs with the fewest kernels. The search
    would return the latter after thousands of others: two kernels have as many candidates as their
    sizes have pairs, and for 4096x4096x4096 all of them come before the third tile of the fused
    kernel.

    Raises:
        SearchError, LoweringError: there is no program; says why.
    """
    verifier = Verifier(graph)

    def candidates(target: Target, keep: int) -> tuple[Candidate, ...]:
        options = SearchOptions(keep=keep, sizes_per_structure=SIZES, lowered=True)
        return search(
            graph,
            target,
            options=options,
            verify=lambda mu: bool(verifier.check(mu, bound=False)),
        ).candidates

    dear = candidates(replace(target, launch_us=DEAR_US), FEW_POOL)
    fewest = min(len(c.mugraph.steps) for c in dear)
    excess = fewest * (DEAR_US - target.launch_us)
    offers = [_offer(c, 0.0) for c in candidates(target, POOL)]
    offers += [_offer(c, excess) for c in dear if len(c.mugraph.steps) == fewest]
    distinct = {(o.structure, o.sizes): o for o in reversed(offers)}
    ordered = sorted(distinct.values(), key=lambda o: o.predicted_us)
    for position, offer in enumerate(ordered, start=1):
        offer.position, offer.name = position, f"c{position:03d}"
    return ordered


def _offer(candidate: Candidate, excess_us: float) -> Offer:
    """A candidate that was priced with launches that cost ``excess_us`` too much in total."""
    steps = candidate.mugraph.steps
    parts = [(s.name, *show(s.program).split(" with ", 1)) for s in steps]
    causes = candidate.breakdown
    return Offer(
        name="",
        position=0,
        mugraph=candidate.mugraph,
        predicted_us=candidate.cost_us - excess_us,
        parts=causes | {"launch": causes["launch"] - excess_us},
        structure="; ".join(f"{name}: {text}" for name, text, _ in parts),
        sizes="; ".join(sizes for _, _, sizes in parts),
    )


def sample(offers: Sequence[Offer], top: int) -> list[Offer]:
    """The candidates to time: ``top`` from the front, half as many from the rest.

    The front alone shows little: programs that take a square root in one kernel or in the next have
    the same sizes and the same cost, and two kernels come in all pairs of their sizes. So:

    * of candidates with the same sizes and (within 1 %) the same prediction, only the first counts;
    * the front is in the model's order, at most half of it from one structure;
    * a quarter of ``top`` are programs of the fewest kernels, evenly spaced over the rest;
    * each other one is the best remaining one of the structure that was taken least often.

    Args:
        offers: in the model's order.
        top: how many from the front.

    Returns:
        At most ``top + top // 2``, in the model's order.
    """
    taken: Counter[str] = Counter()
    rest = _without_twins(offers)
    chosen: list[Offer] = []

    def take(offer: Offer) -> None:
        taken[offer.structure] += 1
        chosen.append(offer)
        rest.remove(offer)

    for offer in tuple(rest):
        if len(chosen) < top and 2 * taken[offer.structure] < top:
            take(offer)
    fewest = min((len(o.mugraph.steps) for o in offers), default=0)
    for offer in _spaced([o for o in rest if len(o.mugraph.steps) == fewest], top // 4):
        take(offer)
    while rest and len(chosen) < top + top // 2:
        take(min(rest, key=lambda o: (taken[o.structure], o.position)))
    return sorted(chosen, key=lambda o: o.position)


def _spaced(offers: Sequence[Offer], count: int) -> list[Offer]:
    """``count`` of them at equal distances, the last one included; all if there are fewer."""
    count = min(count, len(offers))
    return [offers[(i + 1) * len(offers) // count - 1] for i in range(count)]


def _without_twins(offers: Sequence[Offer]) -> list[Offer]:
    kept: list[Offer] = []
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for offer in offers:
        cost = offer.predicted_us
        if all(abs(cost - c) > TWIN * c for c in costs[offer.sizes]):
            costs[offer.sizes].append(cost)
            kept.append(offer)
    return kept


def _plan(offer: Offer, target: Target, cache_root: str) -> None:
    mu = offer.mugraph
    try:
        plans = tuple(make_plan(step, mu.tensors, target) for step in mu.steps)
    except Exception as error:  # as above
        offer.refused = f"plan: {describe_error(error)}"
        return
    requests = tuple(_request(plan, target) for plan in plans)
    offer.make = CompiledCandidate(mu, plans, requests, cache_root)


def _request(plan: KernelPlan, target: Target) -> CompileRequest:
    outputs = tuple(i for i, a in enumerate(plan.arguments) if a.written)
    # one name for all: a kernel that several candidates share is compiled once
    return CompileRequest(plan.key, target.arch, "ranked", partial(build, plan), outputs)


def _compile(offers: Sequence[Offer], cache: KernelCache) -> None:
    made = [(o, r) for o in offers for r in _requests(o)]
    workers = max(1, available_processors() - RESERVED_PROCESSORS)
    artifacts = compile_many([r for _, r in made], workers, cache, keep_errors=True)
    for (offer, _), artifact in zip(made, artifacts, strict=True):
        if isinstance(artifact, CompileError):
            offer.make, offer.refused = None, f"compile: {describe_error(artifact)}"


def _requests(offer: Offer) -> tuple[CompileRequest, ...]:
    return offer.make.requests if isinstance(offer.make, CompiledCandidate) else ()
