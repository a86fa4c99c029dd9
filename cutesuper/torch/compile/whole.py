"""The graph with its regions against Inductor's graph.

A region is taken when it is faster than Inductor's code for the same nodes. In its surroundings it
may lose: its neighbours can no longer be fused with its nodes, values are stored between them, and
layouts may change. So the graph with its regions is timed against the graph without, both compiled
by Inductor, and while it is slower the half of the kinds of regions that saves least is given back.

before: regions that are taken; after: those that are kept, and the times of both graphs.

Inductor needs 18 s for its graph of a step of 32 layers, and then it is 10.1 ms beside 3.8 (Mistral
7B, batch 8, H200). So nothing is compiled for a comparison where regions save more than all that
lies between them and the rest can cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from cutesuper import measure
from cutesuper.torch.aten.table import readers, viewed
from cutesuper.torch.compile import records
from cutesuper.torch.compile.counters import settle_counters
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.region import Region
from cutesuper.torch.compile.region_operator import key_of, program_of, region_in_place
from cutesuper.torch.compile.region_operator import region as region_operator
from cutesuper.torch.compile.rest import bytes_of, fused_us, is_library
from cutesuper.torch.compile.rewrite import Call, rewrite
from cutesuper.torch.compile.selection import Decision, Verdict
from cutesuper.torch.compile.trial import described, lengths_in, moved
from cutesuper.torch.internals import apart, fuses_products, hint_of

#: compiles a graph: takes a graph module, returns a function of the list of its inputs
Compile = Callable[[fx.GraphModule], Callable[[list[Any]], Any]]

#: one trial at a time
_lock = threading.RLock()


@dataclass(frozen=True)
class Whole:
    """The times of a whole graph.

    Attributes:
        ours_us: microseconds with all the regions that are fast alone; None if it was not timed.
        kept_us: the same with those that are kept.
        inductor_us: the same without any.
        given_back: number of regions that are fast alone, and are not kept.
        reason: why nothing was timed, or "".
        passing: whether the next try may end otherwise, as for want of memory.
    """

    ours_us: float | None = None
    kept_us: float | None = None
    inductor_us: float | None = None
    given_back: int = 0
    reason: str = ""
    passing: bool = False


class Comparison:
    """A graph with its regions beside Inductor's.

    Args:
        gm: the graph, functional, with fake tensors in ``meta["val"]``; stays as it is.
        options: of the backend.
        compiled: Inductor.
    """

    def __init__(self, gm: fx.GraphModule, options: BackendOptions, compiled: Compile) -> None:
        self._gm, self._options, self._compiled = gm, options, compiled
        self._theirs = cache(lambda: compiled(variant(gm, ())))
        self._device = _device(gm) if options.take == "faster" else None

    def begin(self, expected: Sequence[tuple[Region, float]]) -> None:
        """Compile Inductor's graph while others search and this process waits.
        Not if it is not timed, or if the regions are ``expected`` to save so much that it will not
        be: microseconds of each."""
        if self._device is None or _clock(self._device) is None:
            return
        with suppress(Exception):  # it is compiled, and the error told, where it is timed
            if expected and _plainly_faster(self._gm.graph, expected, self._device, self._options):
                return
            self._theirs()

    def settle(self, decisions: Sequence[Decision]) -> tuple[list[Decision], Whole | None]:
        """Give back regions until the whole graph is no slower than Inductor's.

        Args:
            decisions: about its regions.

        Returns:
            The decisions, those about regions that are given back changed, and the times; None if
            there is nothing to time.
        """
        taken = [d for d in decisions if d.verdict.taken]
        if not taken or self._device is None:
            return list(decisions), None
        trial = _Trial(self._gm, taken, self._device, self._compiled, self._theirs)
        return _settled(trial, decisions, self._options)


def _plainly_faster(
    graph: fx.Graph,
    saves: Sequence[tuple[Region, float]],
    device: torch.device,
    options: BackendOptions,
) -> str | None:
    """The reason why a graph is faster with its regions, whatever they do to the rest, or None.
    Each region ``saves`` so many microseconds alone.

    Inductor can save what crosses a border: that each tensor is written, and read again by a kernel
    of its own. And regions can make what is outside slower, say by a layout; if they save more than
    all that takes as it is, little can be lost. Calls of libraries are the same with and without
    regions, unless Inductor tunes products and fuses them with others.
    """
    regions, saved = [r for r, _ in saves], sum(us for _, us in saves)
    key = key_of(regions[0].graph, options.target, regions[0].follows)
    target, fuses = program_of(key).target_on(device), fuses_products(options.inductor)
    crossing = _crossing(regions, fuses)
    border = 2 * bytes_of(crossing) / target.bandwidth * 1e6 + len(crossing) * target.launch_us
    outside = fused_us(graph, regions, target, fuses)
    if saved < border + outside:
        return None
    return (
        f"its regions save {saved:.1f} us alone, their borders cost {border:.1f} us at most, and "
        f"what is outside takes {outside:.1f} us"
    )


def _saved_us(verdict: Verdict) -> float:
    ours, theirs = verdict.measured_us, verdict.inductor_us
    return theirs - ours if theirs and ours else 0.0


def _crossing(regions: Sequence[Region], fuses: bool) -> set[fx.Node]:
    """The nodes whose tensors are made in the graph, and cross a border of a region.

    Without inputs that are changed in place; and without tensors between a region and nothing but
    calls of libraries, which Inductor stores too unless it ``fuses`` these.
    """
    changed = {r.node for n in regions for r in n.outputs if r.place in n.graph.continued}
    found = {viewed(node) for r in regions for node in r.border}
    place = {n: r.nodes[0] for r in regions for n in r.nodes}

    def is_fused(n: fx.Node) -> bool:
        return n in place or (n.op == "call_function" and (fuses or not is_library(n)))

    def meets(n: fx.Node) -> int:
        return len({place.get(m, m) for m in (n, *readers(n)) if is_fused(m)})

    return {n for n in found if n.op != "placeholder" and n not in changed and meets(n) > 1}


def _settled(
    trial: _Trial, decisions: Sequence[Decision], options: BackendOptions
) -> tuple[list[Decision], Whole | None]:
    try:
        saves = [(d.region, _saved_us(d.verdict)) for d in trial.taken]
        if (why := _plainly_faster(trial.gm.graph, saves, trial.device, options)) is not None:
            return list(decisions), Whole(reason=why)
        whole, kept = _known_or_tried(trial, options)
    except (torch.OutOfMemoryError, MemoryError) as error:
        why = f"for want of memory: {str(error).splitlines()[0]}"
        return list(decisions), Whole(reason=why, passing=True)
    except Exception as error:  # whatever the error, the regions are faster alone
        return list(decisions), Whole(reason=f"{type(error).__name__}: {error}", passing=True)
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    keeps = {id(d) for d, keep in zip(trial.taken, kept, strict=True) if keep}
    gone = [d.verdict.taken and id(d) not in keeps for d in decisions]
    return [_given_back(d) if g else d for d, g in zip(decisions, gone, strict=True)], whole


def _device(gm: fx.GraphModule) -> torch.device | None:
    """The device of the graph's tensors that has a clock; None if there is none, or several."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    devices = {v.device for v in values if isinstance(v, torch.Tensor) and v.dim()}
    return devices.pop() if len(devices) == 1 else None


def _clock(device: torch.device) -> measure.Device | None:
    return apart(partial(measure.device_of, device))


def _given_back(decision: Decision) -> Decision:
    reason = f"given back: the whole graph is slower with it; alone {decision.verdict.reason}"
    return replace(decision, verdict=replace(decision.verdict, taken=False, reason=reason))


# ------------------------------------------------------------------------------------------ records


def _known_or_tried(trial: _Trial, options: BackendOptions) -> tuple[Whole, list[bool]]:
    """The times, and whether each region is kept: recorded by another process, or found out now.
    Raises whatever compiling and timing raise."""
    question = _question(trial, options)
    record = records.read(question)
    with suppress(KeyError, TypeError):
        if record is not None and len(record["kept"]) == len(trial.taken):
            return Whole(**record["whole"]), record["kept"]
    with _lock:
        whole, kept = trial.run()
    records.write(question, {"whole": asdict(whole), "kept": kept})
    return whole, kept


def _question(trial: _Trial, options: BackendOptions) -> tuple[object, ...]:
    gm, device = trial.gm, trial.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    given = [described(n.meta["val"]) for n in gm.graph.nodes if n.op == "placeholder"]
    regions = [(d.key, d.verdict.kernels, [n.name for n in d.region.nodes]) for d in trial.taken]
    return "whole", gm.code, given, regions, str(sorted(options.inductor.items())), name


# -------------------------------------------------------------------------------------------- trial


@dataclass(frozen=True)
class _Trial:
    """The search for the regions to keep.

    Attributes:
        gm: the graph.
        taken: the decisions about regions that are fast alone.
        device: of its tensors.
        compiled: Inductor.
        theirs: its graph without regions.
    """

    gm: fx.GraphModule
    taken: Sequence[Decision]
    device: torch.device
    compiled: Compile
    theirs: Callable[[], Callable[[list[Any]], Any]]

    def run(self) -> tuple[Whole, list[bool]]:
        """The times, and for each region whether it is kept. Raises MemoryError, RuntimeError."""
        clock = _clock(self.device)
        if clock is None:
            raise RuntimeError(f"nothing is timed on {self.device.type}")
        theirs = self.theirs()
        first, theirs_us = None, 0.0
        for kept in self._choices():
            chosen = [d for d, keep in zip(self.taken, kept, strict=True) if keep]
            mine = self.compiled(variant(self.gm, chosen))
            ours_us, theirs_us = apart(partial(self._times, [mine, theirs], clock))
            first = ours_us if first is None else first
            if ours_us <= theirs_us:
                return Whole(first, ours_us, theirs_us, kept.count(False)), kept
        return Whole(first, theirs_us, theirs_us, len(self.taken)), [False] * len(self.taken)

    def _choices(self) -> Iterator[list[bool]]:
        """All regions, then the half of the kinds that saves most, and so on down to one kind."""
        saved: dict[str, float] = {}
        for d in self.taken:
            saved[d.key] = saved.get(d.key, 0.0) + _saved_us(d.verdict)
        kinds = sorted(saved, key=saved.__getitem__, reverse=True)
        while kinds:
            yield [d.key in kinds for d in self.taken]
            kinds = kinds[: len(kinds) // 2]

    def _times(
        self, functions: Sequence[Callable[[list[Any]], Any]], clock: measure.Device
    ) -> list[float]:
        memory = Memory(self.gm, self.taken, clock)
        calls = [lambda given, f=f: f(list(given)) for f in functions]
        return measure.times_us(calls, memory.sets(), clock)


def variant(gm: fx.GraphModule, taken: Sequence[Decision]) -> fx.GraphModule:
    """A copy of a graph in which some regions are calls of their kernels, to be timed.
    Its inputs that are integers keep their values."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, new)).meta = dict(gm.graph.output_node().meta)
    calls = [Call(moved(d.region, new), region_operator, (d.key,), region_in_place) for d in taken]
    if calls:
        rewrite(graph, calls)
        settle_counters(graph)
        graph.lint()
    for node in [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]:
        into, value = node.args[:2]
        if into.op == "placeholder" and not into.meta["val"].is_floating_point():
            # a position that goes on with every replay would leave the cache
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


# ------------------------------------------------------------------------------------------- memory

#: part of the free memory that inputs may take; the graphs need the rest for what they compute
_SHARE = 0.4
#: tensors begin at multiples of this many bytes
_ALIGNED = 256
#: numbers that are drawn at once, and stand in a pool again and again
_DRAWN = 1 << 20
#: their scale, that of weights at the begin of training: what a model computes stays finite
_SCALE = 0.02


class Memory:
    """Inputs of a whole graph in memory that is smaller than they are, if need be.

    Weights of a model that fills the GPU do not fit a second time. Floating-point inputs of a type
    share a pool, one behind the other and from its begin again at its end. It exceeds L2, so that
    they are read from memory all the same. Integers have memory of their own: lengths are drawn,
    others 0.

    Args:
        gm: the graph; its placeholders have fake tensors, numbers or symbols.
        taken: decisions about its regions, which say what lengths may be.
        clock: of the device.

    Raises:
        MemoryError: the pools would not exceed L2, or not hold the largest input.
    """

    def __init__(
        self, gm: fx.GraphModule, taken: Sequence[Decision], clock: measure.Device
    ) -> None:
        self._given = [n for n in gm.graph.nodes if n.op == "placeholder"]
        ranges = [lengths_in(d.region).items() for d in taken]
        self._lengths = {_source(n): among for found in ranges for n, among in found}
        self._device = clock.device
        sizes = dict[torch.dtype, list[int]]()
        for value in (n.meta["val"] for n in self._given if self._is_in_pool(n.meta["val"])):
            sizes.setdefault(value.dtype, []).append(_bytes(value))
        total = max(1, sum(map(sum, sizes.values())))
        cold = max(measure.TRIAL_SETS.cold_bytes, 3 * clock.l2_bytes)
        self._count = min(-(-cold // total), measure.TRIAL_SETS.most)
        share = clock.free_bytes() * _SHARE / total
        if share < 1 and share * total < 3 * clock.l2_bytes:
            raise MemoryError(f"inputs of {total / 1e6:.0f} MB in {share * total / 1e6:.0f} MB")
        self._pools = {d: self._pool(d, n, share) for d, n in sizes.items()}
        self._places = dict.fromkeys(sizes, 0)
        self._generator = torch.Generator().manual_seed(0)

    def _is_in_pool(self, value: Any) -> bool:
        tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
        return tensor and value.device == self._device

    def _pool(self, dtype: torch.dtype, sizes: Sequence[int], share: float) -> torch.Tensor:
        size = int(min(self._count, share) * sum(sizes)) // _ALIGNED * _ALIGNED
        if size < max(sizes):
            raise MemoryError(f"an input of {max(sizes) / 1e6:.0f} MB in {size / 1e6:.0f} MB")
        count = size // dtype.itemsize
        drawn = (torch.randn(min(count, _DRAWN), device=self._device) * _SCALE).to(dtype)
        return drawn.repeat(-(-count // max(1, len(drawn))))[:count]

    def sets(self) -> list[list[Any]]:
        """Sets of inputs, which follow each other in the pools."""
        return [[self._value(n) for n in self._given] for _ in range(self._count)]

    def _value(self, node: fx.Node) -> Any:
        like = node.meta["val"]
        if not isinstance(like, torch.Tensor):
            return hint_of(like)
        sizes, strides = _numbers(like.shape), _numbers(like.stride())
        flat = self._part(like) if self._is_in_pool(like) else self._own(node, like)
        return flat.as_strided(sizes, strides)

    def _part(self, like: torch.Tensor) -> torch.Tensor:
        """The next part of a pool, or its first."""
        pool, count = self._pools[like.dtype], _bytes(like) // like.dtype.itemsize
        place = self._places[like.dtype]
        place = place if place + count <= len(pool) else 0
        self._places[like.dtype] = place + count
        return pool[place : place + count]

    def _own(self, node: fx.Node, like: torch.Tensor) -> torch.Tensor:
        size = _bytes(like) // like.dtype.itemsize
        flat = torch.zeros(size, dtype=like.dtype, device=like.device)
        if node in self._lengths:
            low, high = self._lengths[node]
            flat.copy_(torch.randint(low, high + 1, flat.shape, generator=self._generator))
        return flat


def _source(node: fx.Node) -> fx.Node:
    """The input that integers are made of, if it is one alone."""
    while len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return node


def _numbers(extents: Sequence[Any]) -> list[int]:
    return [hint_of(n) or 0 for n in extents]


def _bytes(like: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor, and to where the next one begins."""
    sizes, strides = _numbers(like.shape), _numbers(like.stride())
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    size = (1 + last) * like.dtype.itemsize if all(sizes) else 0
    return -(-size // _ALIGNED) * _ALIGNED
