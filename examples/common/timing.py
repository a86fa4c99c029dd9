"""Times on a CPU and on a GPU, where what is timed lies in one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

Outputs = dict[str, Tensor]
Call = Callable[[], Outputs]

#: replays before those that are timed
WARM_UP = 3


class Clock:
    """Time between ticks, on the device where it is a GPU: the host need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.ticks: list[float | torch.cuda.Event] = []

    def tick(self) -> None:
        """Remember now, or when the device gets here."""
        if self.cuda:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        """Milliseconds between neighbouring ticks; waits for the device."""
        pairs = list(zip(self.ticks, self.ticks[1:], strict=False))
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


@dataclass(frozen=True)
class Recording:
    """Calls that can be repeated: on a GPU a CUDA graph of them.

    Attributes:
        replay: makes all calls once and returns what the last one gave; on a GPU that is the same
            memory every time.
        calls: how many these are.
    """

    replay: Call
    calls: int

    def ms(self, device: torch.device, replays: int) -> float:
        """Median milliseconds of a call."""
        clock = Clock(device)
        for _ in range(WARM_UP + replays):
            clock.tick()
            self.replay()
        clock.tick()
        return median(clock.intervals_ms()[WARM_UP:]) / self.calls


def record(call: Call, device: torch.device, calls: int = 1) -> Recording:
    """Make a call, which may compile, and on a GPU capture so many of them."""
    if device.type == "cpu":
        call()
        return Recording(call, 1)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    # the first call here too: gradients are added up on the stream of their first pass
    with torch.cuda.stream(side):
        for _ in range(3):  # what is set up late may not be during the capture
            outputs = call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # compilers have threads of their own, which may allocate meanwhile
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(calls):
            outputs = call()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return Recording(replay, calls)
