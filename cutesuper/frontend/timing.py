"""Timing of two implementations against each other on a device."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutesuper.tune.device import CudaDevice, Device

#: total bytes of all input sets, so that L2 no longer holds a set when its turn comes
COLD_BYTES = 256 * 10**6
#: launches in a recording
LEAST_SETS, MOST_SETS = 2, 32
#: part of the free memory that inputs may take
MEMORY_SHARE = 0.25
#: replays of each that count, and those before them, which raise the clocks
ROUNDS = 21
WARM_ROUNDS = 5

Call = Callable[[Sequence[Any]], Any]


def device_of(device: torch.device) -> Device | None:
    """The device that times kernels where these tensors are; None if there is none."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return CudaDevice()


def medians(calls: Sequence[Call], draw: Callable[[int], list[Any]], device: Device) -> list[float]:
    """Microseconds of each call.

    Every call is recorded once over several sets of inputs (a CUDA graph), so that the host takes
    no part and inputs come from memory. Recordings are replayed in turn, in a changing order.

    Args:
        calls: take a set of inputs.
        draw: makes set number n.
        device: records and times.

    Raises:
        MemoryError: not even two sets fit.
    """
    first = draw(0)
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    room = int(device.free_bytes() * MEMORY_SHARE) // max(1, size)
    if room < LEAST_SETS:
        raise MemoryError(f"{LEAST_SETS} sets of inputs of {size / 1e6:.0f} MB do not fit")
    wanted = min(max(math.ceil(COLD_BYTES / max(1, size)), LEAST_SETS), MOST_SETS)
    sets = [first, *(draw(n) for n in range(1, min(wanted, room)))]
    recordings = [device.record(lambda n, call=call: call(sets[n]), len(sets)) for call in calls]
    samples: list[list[float]] = [[] for _ in recordings]
    places = list(range(len(recordings)))
    order = random.Random(0)
    for n in range(WARM_ROUNDS + ROUNDS):
        order.shuffle(places)
        for place in places:
            elapsed = device.time(recordings[place]) / len(sets)
            if n >= WARM_ROUNDS:
                samples[place].append(elapsed)
    return [statistics.median(s) for s in samples]


__all__ = ["Call", "device_of", "medians"]
