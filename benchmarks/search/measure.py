"""Measurement of the search on one program, and the program's cost without fusion."""

from __future__ import annotations

import resource
import time
from math import inf
from typing import Any

from benchmarks.search.programs import PROGRAMS
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import size
from cutesuper.ir.graph import KernelGraph
from cutesuper.search.cuts import Flat
from cutesuper.search.region import SearchOptions, search_region
from cutesuper.search.search import peak_mb, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import Verifier

TARGET = H200


def measure(name: str) -> dict[str, Any]:
    """Search one of PROGRAMS and verify every structure; plain data, ready for JSON.

    Returns:
        ``wall_s``, ``cpu_s``: of search and verification; ``peak_mb``: of the process, with
        Python and NumPy; ``in_time``: whether ``cpu_s`` is at most ``limit_s``; ``splits``:
        looked at, ``feasible`` of them; ``classes``, ``tried``, ``structures``: see
        `cutesuper.search.region.Counts`; ``verified``, ``rejected``: structures; ``best`` and
        ``unfused``: ``kernels``, ``bytes`` of device memory and ``predicted_us`` of the best
        muGraph and of one kernel for each operator.

    Raises:
        SearchError: nothing was found.
    """
    program = PROGRAMS[name]
    graph = program.build()
    wall, cpu = time.perf_counter(), _cpu_s()
    verifier = Verifier(graph)
    result = search(graph, TARGET, verify=lambda mu: bool(verifier.check(mu, bound=False)))
    wall, cpu = time.perf_counter() - wall, _cpu_s() - cpu
    s, best = result.statistics, result.candidates[0]
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "limit_s": program.seconds,
        "in_time": cpu <= program.seconds,
        "peak_mb": peak_mb(),
        "regions": s.regions,
        "splits": s.splits,
        "feasible": s.feasible,
        "classes": s.classes,
        "tried": s.tried,
        "largest": s.largest,
        "structures": s.programs,
        "verified": s.verified,
        "rejected": s.rejected,
        "pruned": dict(sorted(s.pruned.items())),
        "candidates": len(result.candidates),
        "expected_kernels": program.kernels,
        "best": {
            "kernels": len(best.mugraph.steps),
            "bytes": bytes_moved(best.mugraph),
            "predicted_us": best.cost_us,
            "lowered": best.lowered,
            "structure": best.structure,
        },
        "unfused": unfused(graph),
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def bytes_moved(mugraph: MuGraph) -> int:
    """Bytes that device memory must deliver and receive: each tensor once for every kernel."""
    specs = mugraph.tensors
    return sum(
        size(specs[t].shape) * specs[t].dtype.itemsize
        for step in mugraph.steps
        for t in {*step.reads, *step.writes}
    )


def unfused(graph: KernelGraph) -> dict[str, Any]:
    """One kernel for each primitive operator; every operand is read, every result written.

    Transposes are views and cost nothing, numbers are computed where they are needed. A kernel is
    priced by the best way to run its operator alone, found with the same search and the same model;
    if that is a pair (products over a long dimension), as the pair.

    Returns:
        ``kernels``: operators; ``bytes``; ``predicted_us``: None if an operator cannot run alone,
        ``error``: the reason, then.
    """
    flat = Flat(graph.expanded())
    moved, total, problem = 0, 0.0, None
    for i in flat.order:
        region = flat.segment((i,)).region
        shapes = [*region.inputs, *(flat.graph.nodes[i].shape for _ in region.outputs)]
        dtypes = [*region.input_dtypes, *region.output_dtypes]
        moved += sum(size(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        found = search_region(region, TARGET, SearchOptions())
        total += min((way.total for way in found.ways), default=inf)
        if found.error is not None:
            problem = problem or f"{flat.describe(i)}: {found.error}"
    return {
        "kernels": len(flat.order),
        "bytes": moved,
        "predicted_us": None if problem else total,
        "error": problem,
    }
