"""Lower bounds of what kernels cost, and the regions of a graph that they leave worth searching.

A sequence of kernels costs at least what its regions must read and write. Searching first those
regions that the cheapest sequence by bounds consists of, as in shortest paths whose edges are
expensive to evaluate (Dellin and Srinivasa, LazySP, ICAPS 2016), finds the cheapest program without
searching the others: of 484 regions of a layer's projections and norm, backward, 150 are left, and
4.3 s of 61.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf, prod

from cutesuper.egraph.labelled import Region
from cutesuper.errors import SearchError
from cutesuper.ir.dims import extent
from cutesuper.search.cuts import Segments
from cutesuper.search.forms import recognized
from cutesuper.skeletons.cost import SPECIAL
from cutesuper.skeletons.registry import SKELETONS
from cutesuper.targets import Target

#: regions of sequences this near to the cheapest one are searched together, in fewer rounds
TOGETHER = 1.005


def least_us(region: Region, target: Target) -> float:
    """Microseconds below which no kernel of any skeleton is priced: a launch, and its memory."""
    return target.launch_us + _moved(region) / _fastest(target) * 1e6


def least_of_form_us(region: Region, target: Target) -> float:
    """Microseconds below which the skeleton that runs a region prices no kernel.
    It takes 1 ms, and a search of the region up to 2 s. Raises SearchError if none runs it."""
    program, by = recognized(region, target)
    memory_us = _moved(region) / by.skeleton.bandwidth(target) * 1e6
    return by.skeleton.least_us(program, by.form, target, memory_us)


def least_of_arithmetic_us(region: Region, target: Target) -> float:
    """Microseconds that all multiprocessors take for the arithmetic of a region, at least.
    Either for its special functions or for the rest: each has a unit of its own."""
    sizes = [prod(map(extent, s)) for s in (*region.inputs, *(op.shape for op in region.ops))]
    counts = {True: 0.0, False: 0.0}
    for n, op in enumerate(region.ops, len(region.inputs)):
        elements = max(sizes[n], *(sizes[v.value] for v in op.operands), 0)
        each = target.rates.instructions.get(op.kind, 1)
        counts[each >= SPECIAL] += each * elements
    return max(counts.values()) / (target.sms * target.rates.lanes_per_us)


@lru_cache
def _fastest(target: Target) -> float:
    """Bytes that a kernel of any skeleton moves in a second, at most."""
    return max(s.bandwidth(target) for s in SKELETONS)


def _moved(region: Region) -> float:
    """Bytes of the tensors, each read or written once.
    Tensors in pages are left out: their number of pages is not known."""
    pages = {i for i, _ in region.pages}
    read = [(s, t) for i, (s, t) in enumerate(zip(region.inputs, region.input_dtypes, strict=True))
            if i not in pages]  # fmt: skip
    written = zip(region.output_shapes, region.output_dtypes, strict=True)
    return sum(prod(map(extent, s)) * t.itemsize for s, t in (*read, *written))


class TooDear(SearchError):
    """No program costs as little as was asked for.

    Attributes:
        least_us: microseconds that all programs cost at least.
        most_us: microseconds that were allowed.
    """

    def __init__(self, least_us: float, most_us: float) -> None:
        super().__init__(
            f"every program takes at least {least_us:.1f} us, and {most_us:.1f} are allowed"
        )
        self.least_us, self.most_us = least_us, most_us

    def __reduce__(self) -> tuple[type[TooDear], tuple[float, float]]:
        return type(self), (self.least_us, self.most_us)


class Bounds:
    """The sequences of kernels through a graph, and lower bounds of their costs.

    Args:
        segments: of the graph.
        prices: of the regions that may be kernels: what the cheapest kernel costs, at least.
    """

    def __init__(self, segments: Segments, prices: Mapping[Region, float]) -> None:
        self._regions, self._prices = list(prices), list(prices.values())
        self._places = {region: n for n, region in enumerate(prices)}
        self._open = set(range(len(prices)))  # places of the regions whose price is a bound
        #: for each order its length, and start, end and place of its kernels, sorted by start
        self._orders = [(len(order), self._kernels(segments, order)) for order in segments.orders]
        #: the cost of the cheapest sequence through each region; None since a price has changed
        self._known: list[float] | None = None

    @property
    def open(self) -> int:
        """The number of regions of which only a bound is known."""
        return len(self._open)

    @property
    def least(self) -> float:
        """The cost of the cheapest sequence, at least; infinite if none has kernels."""
        return min(self._through(), default=inf)

    def tighten(self, region: Region, least: float) -> None:
        """Replace a bound by another one, if that is higher."""
        self._set(region, max(self._prices[self._places[region]], least))

    def learn(self, region: Region, price: float) -> None:
        """Replace a bound by the price of the cheapest kernel; infinite if there is none."""
        self._set(region, price)
        self._open.discard(self._places[region])

    def _set(self, region: Region, price: float) -> None:
        place = self._places[region]
        if price != self._prices[place]:
            self._prices[place], self._known = price, None

    def below(self, near: float) -> list[Region]:
        """The regions with a bound that are part of a sequence of nearly the lowest cost.
        At most this many times the cost of the cheapest one; if no sequence has kernels, those that
        tell how far kernels reach."""
        through = self._through()
        most = min(through, default=inf) * near
        if most == inf:
            return [self._regions[n] for n in sorted(self._next())]
        return [self._regions[n] for n in sorted(self._open) if through[n] <= most]

    def _next(self) -> set[int]:
        """The places of regions with a bound that begin where a sequence of known kernels ends.
        They end where none does."""
        found = set[int]()
        for _, kernels in self._orders:
            reached = {0}
            for start, end, n in kernels:
                if start in reached and n not in self._open and self._prices[n] < inf:
                    reached.add(end)
            found |= {n for start, end, n in kernels
                      if n in self._open and start in reached and end not in reached}  # fmt: skip
        return found

    def _through(self) -> list[float]:
        """The cost, at least, of the cheapest sequence that contains each region.
        Kept until a price changes: it is asked for four times a round, a tenth of the search of a
        loss whose backward pass has 5,000 regions."""
        if self._known is None:
            self._known = self._cheapest()
        return self._known

    def _cheapest(self) -> list[float]:
        found, prices = [inf] * len(self._prices), self._prices
        for length, kernels in self._orders:
            before = [0.0, *[inf] * length]
            after = [*[inf] * length, 0.0]
            for start, end, n in kernels:  # comparisons: `min` takes twice as long
                if (cost := before[start] + prices[n]) < before[end]:
                    before[end] = cost
            for start, end, n in reversed(kernels):
                if (cost := prices[n] + after[end]) < after[start]:
                    after[start] = cost
            for start, end, n in kernels:
                if (cost := before[start] + prices[n] + after[end]) < found[n]:
                    found[n] = cost
        return found

    def _kernels(self, segments: Segments, order: tuple[int, ...]) -> list[tuple[int, int, int]]:
        found = (
            (start, end, segment.region)
            for n, start in enumerate(segments.marks(order)[:-1])
            for end in segments.ends(order, n)
            if (segment := segments.known(order, start, end)) is not None
        )
        return [(a, b, self._places[r]) for a, b, r in found if r in self._places]
