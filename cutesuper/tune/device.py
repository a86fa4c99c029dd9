"""Devices for the tuner: kernels to launch, recordings to replay, a clock.

`Device` is the interface that `cutesuper.tune.measure` needs; `CudaDevice` is the real one. Tests
inject another that runs on the CPU with scripted times.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Protocol

import torch

from cutesuper.runtime.calling import Launches
from cutesuper.tune.candidates import Program

#: read to evict L2 (50 MB on Hopper)
FLUSH_BYTES = 512 * 10**6


class Recording(Protocol):
    """A sequence of launches that can be replayed."""

    def replay(self) -> None:
        """Run all launches once, asynchronously, in order."""
        ...


class Device(Protocol):
    """The interface to a device that measuring needs."""

    device: torch.device
    l2_bytes: int

    def load(self, program: Program) -> Launches:
        """The compiled kernels of a candidate."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        ...

    def synchronize(self) -> None:
        """Wait for all work; raises RuntimeError if an earlier launch has failed."""
        ...

    def record(self, launch: Callable[[int], None], count: int) -> Recording:
        """Record ``launch(0)`` ... ``launch(count - 1)``."""
        ...

    def time(self, recording: Recording) -> float:
        """Microseconds of one replay; L2 is evicted before it, outside the time."""
        ...

    def describe(self) -> dict[str, str | None]:
        """``gpu``, ``driver`` and ``cuda``, for the stored file."""
        ...


class CudaDevice:
    """CUDA graphs and events on the current device."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)
        self.l2_bytes = int(self._properties.L2_cache_size)
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        self._sum = torch.zeros((), dtype=torch.float32, device=self.device)

    def load(self, program: Program) -> Launches:
        """Load kernels from the compile cache."""
        return program.variant().launches

    def free_bytes(self) -> int:
        """Free device memory, the allocator's unused blocks included."""
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return free + reserved - torch.cuda.memory_allocated(self.device)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def record(self, launch: Callable[[int], None], count: int) -> torch.cuda.CUDAGraph:
        """Capture on a side stream, after launches there that load the code."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for i in range(min(3, count)):
                launch(i)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may call CUDA freely
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(count):
                launch(i)
        self.synchronize()
        return graph

    def time(self, recording: Recording) -> float:
        """Time between events around the replay."""
        # evicts by reading, since dirty lines would be written back later; and the replay must find
        # a busy stream, or its time includes the host's launch
        torch.sum(self._flush, dim=0, out=self._sum)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        recording.replay()
        end.record()
        self.synchronize()
        return begin.elapsed_time(end) * 1e3

    def describe(self) -> dict[str, str | None]:
        """Name, driver, CUDA."""
        return {
            "gpu": self._properties.name,
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }


def _driver() -> str | None:
    """The driver's version, None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
