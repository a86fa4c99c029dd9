"""The clock: how long calls take on a device.

There are two questions, and a function for each.

* `device_us`: the time on the GPU alone. Calls are recorded into a CUDA graph, so that the host
  takes no part, over several sets of inputs that together exceed L2, so that inputs come from
  memory. L2 is evicted before each replay, outside of the time. Recordings take turns, in a
  changing order, so that a drift of the clocks meets all of them; a sample is a replay divided by
  its calls. The median of the samples is returned.
* `called_us`: the time of calls as a model makes them, one after the other without a recording: of
  the host or of the GPU, whichever is longer. The best of several turns is returned.

The tuner (`cutesuper.tune.process`) puts the parts of the first together in a process of its own,
where candidates are also checked and may hang.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any, Protocol, TypeVar

import torch

#: read to evict L2 (50 MB on Hopper)
FLUSH_BYTES = 512 * 10**6
#: launches before a capture: what is set up late may not be in it
WARM_LAUNCHES = 3
#: calls that `called_us` times together, and its turns
CALLS, TURNS = 10, 5

K = TypeVar("K")
#: takes a set of inputs
Call = Callable[[Sequence[Any]], Any]

#: one measurement at a time: two on one GPU would disturb each other
_alone = threading.RLock()


# ----------------------------------------------------------------------------------------- devices


class Recording(Protocol):
    """A sequence of launches that can be replayed."""

    def replay(self) -> None:
        """Run all launches once, asynchronously, in order."""
        ...


class Device(Protocol):
    """The interface to a device that measuring needs; tests have one with scripted times."""

    device: torch.device
    l2_bytes: int

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        ...

    def synchronize(self) -> None:
        """Wait for all work; raises RuntimeError if an earlier launch has failed."""
        ...

    def record(self, launch: Callable[[int], Any], count: int) -> Recording:
        """Record ``launch(0)`` ... ``launch(count - 1)``."""
        ...

    def time(self, recording: Recording) -> float:
        """Microseconds of one replay; L2 is evicted before it, outside the time."""
        ...


class CudaDevice:
    """CUDA graphs and events on the current device."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.properties = torch.cuda.get_device_properties(index)
        self.l2_bytes = int(self.properties.L2_cache_size)
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        self._sum = torch.zeros((), dtype=torch.float32, device=self.device)

    def free_bytes(self) -> int:
        """Free device memory, the allocator's unused blocks included."""
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return free + reserved - torch.cuda.memory_allocated(self.device)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def record(self, launch: Callable[[int], Any], count: int) -> torch.cuda.CUDAGraph:
        """Capture on a side stream, after launches there that load the code."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for i in range(min(WARM_LAUNCHES, count)):
                launch(i)
        self.synchronize()

        def launch_all() -> None:
            for i in range(count):
                launch(i)

        graph = capture(launch_all, stream)
        self.synchronize()
        return graph

    def time(self, recording: Recording) -> float:
        """Time between events around the replay."""
        return self.times([recording])[0]

    def times(self, recordings: Sequence[Recording], flush: bool = True) -> list[float]:
        """Microseconds of a replay of each, queued back to back.

        Args:
            recordings: in this order.
            flush: evict L2 before each, not only before the first.
        """
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for n, recording in enumerate(recordings):
            # also keeps the stream busy: a replay that finds it idle includes the host's launch
            if flush or n == 0:
                self.evict_l2()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            recording.replay()
            end.record()
            pairs.append((begin, end))
        self.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def evict_l2(self) -> None:
        """Fill L2 with other lines by reading, since dirty lines would be written back later."""
        torch.sum(self._flush, dim=0, out=self._sum)


def capture(
    call: Callable[[], Any], stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a call. What the call needs has been made by a call before.

    Args:
        call: launches kernels.
        stream: to capture on, not the default one; the graph may be replayed on any.
        generators: that the call draws from, besides the device's own; replays go on with them.

    Raises:
        Exception: from the call, or from CUDA: it cannot be captured.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        # other threads of the process, such as those of compilers, may call CUDA freely
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            call()
    except Exception:
        # the allocator is not told that a capture has failed, and frees nothing while one is
        # under way: after a failure, 137 of 140 GB stayed allocated unused
        with suppress(RuntimeError):  # "already ended"
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        raise
    return graph


def device_of(device: torch.device) -> Device | None:
    """The device that times kernels where these tensors are; None if there is none."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return CudaDevice()


# ------------------------------------------------------------------------------------- how to time


@dataclass(frozen=True)
class Sets:
    """The number of sets of tensors that calls of a recording use in turn.

    Attributes:
        cold_bytes: least total size, unless 3 x L2 is more; L2 then no longer holds a set when its
            turn comes.
        least, most: bounds on the number.
        enough: sets that must fit into the memory; of sets that exceed L2 one is enough.
        memory_share: part of the free memory that they may take.
    """

    cold_bytes: int
    least: int
    most: int
    enough: int
    memory_share: float

    def count(self, size: int, device: Device) -> int:
        """The number of sets of ``size`` bytes. Raises MemoryError if too few fit."""
        size, cold = max(1, size), max(self.cold_bytes, 3 * device.l2_bytes)
        enough = 1 if size >= cold else self.enough
        room = int(device.free_bytes() * self.memory_share * self.enough / enough)
        if room < enough * size:
            sets = "a set" if enough == 1 else f"{enough} sets"
            raise MemoryError(
                f"{sets} of inputs and outputs of {size / 1e6:.0f} MB does not fit into the "
                f"{room / 1e6:.0f} MB that may be used"
            )
        return min(max(-(-cold // size), self.least), self.most, room // size)


@dataclass(frozen=True)
class Rounds:
    """The number of samples, and of rounds before them.

    Attributes:
        count: rounds, in each of which every recording is replayed once.
        warm, warm_s: rounds, and seconds of them, that do not count but raise the clocks.
        seconds: no round begins later than this, once there are ``least``.
        least: rounds that are timed even then.
        seed: of the order in which recordings take turns.
    """

    count: int
    warm: int = 0
    warm_s: float = 0.0
    seconds: float = inf
    least: int = 3
    seed: int = 0


#: the trial of a region, or of a demo
TRIAL_SETS = Sets(cold_bytes=256 * 10**6, least=2, most=32, enough=2, memory_share=0.25)
TRIAL_ROUNDS = Rounds(21, warm=5)


def alternate(replays: Mapping[K, Callable[[], float]], rounds: Rounds) -> dict[K, list[float]]:
    """Samples of each: the results of replays that take turns, in an order that changes."""
    begin = time.monotonic()
    names, order = list(replays), Random(rounds.seed)
    samples: dict[K, list[float]] = {name: [] for name in names}
    warm = 0
    while names and (warm < rounds.warm or time.monotonic() - begin < rounds.warm_s):
        for name in names:
            replays[name]()
        warm += 1
    for n in range(rounds.count if names else 0):
        if n >= rounds.least and time.monotonic() - begin > rounds.seconds:
            break
        order.shuffle(names)
        for name in names:
            samples[name].append(replays[name]())
    return samples


# ------------------------------------------------------------------------------------------ asking


def device_us(
    calls: Sequence[Call], draw: Callable[[int], list[Any]], device: Device
) -> list[float]:
    """Microseconds of each call on the GPU, with inputs from memory: see the module.

    Args:
        calls: take a set of inputs; can be captured.
        draw: makes set number n.
        device: records and times.

    Raises:
        MemoryError: not even two sets fit.
        RuntimeError: a call cannot be captured.
    """
    first = draw(0)
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    count = TRIAL_SETS.count(size, device)
    return times_us(calls, [first, *(draw(n) for n in range(1, count))], device)


def times_us(calls: Sequence[Call], sets: Sequence[list[Any]], device: Device) -> list[float]:
    """The same with sets of inputs that are there, and are larger than L2 together."""
    count = len(sets)
    with _alone:
        recordings = [device.record(lambda n, call=call: call(sets[n]), count) for call in calls]
        replays = {i: partial(device.time, r) for i, r in enumerate(recordings)}
        samples = alternate(replays, TRIAL_ROUNDS)
    return [statistics.median(samples[i]) / count for i in replays]


def called_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of a call among others, on the host or on the GPU: see the module."""
    best = inf
    with _alone:
        for _ in range(TURNS):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6
