"""Results of searches on disk: a program that was searched for is not again, in any process.

What is kept are the best candidates and the search's statistics (`cutesuper.runtime.records` says
where). It is data from outside: every field is checked here, and callers verify the programs and
plan them again. Only the comparison at real extents, a second for a product of 1 G multiply-adds,
is not repeated for a program that is the one compared, to the letter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from cutesuper.errors import CutesuperError, FormatError
from cutesuper.ir import serial
from cutesuper.ir.block import MuGraph
from cutesuper.ir.definitions import definitions, names_of
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime import records
from cutesuper.runtime.cache import KernelCache
from cutesuper.search.search import Candidate, SearchOptions, SearchResult, Statistics, structure
from cutesuper.skeletons.cost import Cost
from cutesuper.store import check_border
from cutesuper.targets import Target
from cutesuper.verify.equivalence import Verification

Question = tuple[object, ...]


@dataclass(frozen=True)
class Compared:
    """A program that was compared with its graph at real extents.

    Attributes:
        digest: SHA-256 of the program as text.
        bound_log2: `Verification.real_bound_log2`.
    """

    digest: str
    bound_log2: float | None

    def is_of(self, mu: MuGraph) -> bool:
        """True if it was this program, to the letter."""
        return self.digest == _digest(mu)

    def added(self, verification: Verification) -> Verification:
        """The verification of the program at small extents, with what was compared before."""
        trials, bound = verification.trials + 1, self.bound_log2
        more = replace(verification, trials=trials, real_extents=True, real_bound_log2=bound)
        return more if verification else verification


def _digest(mu: MuGraph) -> str:
    return hashlib.sha256(serial.dumps(mu).encode()).hexdigest()


def question(graph: KernelGraph, target: Target, options: SearchOptions) -> Question:
    """Everything that decides what a search finds, but the package itself and its versions.
    Of the operators that were added to the table it has their code."""
    outside = sorted(definitions(names_of(graph)).items())
    return "search", serial.dumps(graph), outside, repr(target), repr(options)


def known(about: Question, cache: KernelCache | None = None) -> bool:
    """True if a result is kept; it may not be valid any more."""
    with suppress(CutesuperError):
        return records.path_of(about, cache).exists()
    return False


def read(
    about: Question, graph: KernelGraph, cache: KernelCache | None = None
) -> tuple[SearchResult, Compared | None] | None:
    """The result that is kept, and what was compared; None if there is none, or not a legal one.
    Its programs are checked, but neither verified nor planned."""
    record = records.read(about, cache)
    with suppress(CutesuperError, KeyError, TypeError, ValueError):
        if record is not None:
            found = tuple(_candidate(c, graph) for c in record["candidates"])
            place = int(_number(record["chosen"]))
            result = SearchResult(found, _statistics(record["statistics"]), place)
            return result, _compared(record["compared"])
    return None


def keep(
    about: Question,
    result: SearchResult,
    chosen: int = 0,
    cache: KernelCache | None = None,
    verification: Verification | None = None,
) -> None:
    """Keep the result of a search that was not cut short.

    Args:
        about: the question.
        result: at least one candidate.
        chosen: the place of the one that is used; those before it cannot be run.
        cache: its folder is used.
        verification: of the one that is used.
    """
    if result.statistics.complete:
        compared = None
        if verification is not None and verification.real_extents:
            digest = _digest(result.candidates[chosen].mugraph)
            compared = asdict(Compared(digest, verification.real_bound_log2))
        record = {
            "candidates": [_written(c) for c in result.candidates],
            "chosen": chosen,
            "compared": compared,
            "statistics": vars(result.statistics),  # `asdict` cannot copy a counter
        }
        records.write(about, record, cache)


def least_us(about: Question, cache: KernelCache | None = None) -> float:
    """Microseconds below which an earlier search found no program; 0 if there was none."""
    record = records.read(_bound(about), cache)
    with suppress(CutesuperError, KeyError, TypeError):
        if record is not None:
            return float(_number(record["least_us"]))
    return 0.0


def keep_least(about: Question, least_us: float, cache: KernelCache | None = None) -> None:
    """Keep what all programs cost at least, where a search for cheaper ones ended."""
    records.write(_bound(about), {"least_us": least_us}, cache)


def _bound(about: Question) -> Question:
    return "bound", *about


def _written(candidate: Candidate) -> dict[str, Any]:
    return {
        "mugraph": serial.to_dict(candidate.mugraph),
        "cost_us": candidate.cost_us,
        "kernels": [asdict(k) for k in candidate.kernels],
        "lowered": candidate.lowered,
    }


def _candidate(record: Mapping[str, Any], graph: KernelGraph) -> Candidate:
    mugraph = serial.from_dict(record["mugraph"])
    if not isinstance(mugraph, MuGraph):
        raise FormatError("the record of a search has a kernel graph in place of a muGraph")
    check_border(mugraph, graph)
    costs = tuple(Cost(_number(k["total"]), _parts(k["parts"])) for k in record["kernels"])
    if len(costs) != len(mugraph.steps):
        raise FormatError("the record of a search has another number of costs than of kernels")
    lowered = record["lowered"] is True
    return Candidate(mugraph, _number(record["cost_us"]), costs, structure(mugraph), lowered)


def _compared(data: Any) -> Compared | None:
    if data is None:
        return None
    bound = data["bound_log2"]
    return Compared(str(data["digest"]), None if bound is None else _number(bound))


def _parts(data: Mapping[str, Any]) -> dict[str, float]:
    return {str(cause): _number(us) for cause, us in data.items()}


def _statistics(data: Mapping[str, Any]) -> Statistics:
    pruned = Counter({str(why): int(_number(n)) for why, n in data["pruned"].items()})
    names = [f.name for f in fields(Statistics) if f.name != "pruned"]
    return Statistics(**{n: _number(data[n]) for n in names}, pruned=pruned)


def _number(value: Any) -> Any:
    """A finite number (or a truth value). Raises FormatError for anything else."""
    if not isinstance(value, int | float) or not isfinite(value):
        raise FormatError(f"the record of a search has {value!r} in place of a number")
    return value
