"""The device for measuring: recording, replaying and timing launches.

`Backend` is the interface to a device that the harness needs. `CudaBackend` is the real one; the
tests inject another that runs on the CPU with scripted times, so that everything above it is tested
without a GPU.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from cutesuper.measure import CudaDevice

Outputs = tuple[torch.Tensor, ...]


class Recording(Protocol):
    """A recorded sequence of launches that can be replayed.

    ``kept`` holds the outputs of the launches with requested indices; every replay writes them
    again.
    """

    kept: dict[int, Outputs]

    def replay(self) -> None:
        """Run all launches once, asynchronously, in order."""
        ...


class Backend(Protocol):
    """The interface to a device that the harness needs."""

    device: torch.device
    l2_bytes: int
    multiprocessors: int

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""
        ...

    def synchronize(self) -> None:
        """Wait for the device; raises RuntimeError when an earlier launch has failed."""
        ...

    def record(
        self, launch: Callable[[int], Outputs], count: int, keep: Sequence[int]
    ) -> Recording:
        """Record ``launch(0)`` ... ``launch(count - 1)``, keeping the outputs of ``keep``."""
        ...

    def time_round(self, recordings: Sequence[Recording], flush: bool) -> list[float]:
        """Replay each once, queued back to back, and return microseconds per replay.

        ``flush`` evicts the L2 cache before each replay, outside the measured time.
        """
        ...

    def release(self) -> None:
        """Free the memory of dropped tensors and recordings."""
        ...

    def clocks(self) -> dict[str, Any]:
        """Clocks (MHz), temperature (C) and power (W) now; values are None where unknown."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name and constants of the device and its driver, for the report."""
        ...


@dataclass
class GraphRecording:
    """Launches captured into one CUDA graph."""

    graph: torch.cuda.CUDAGraph
    kept: dict[int, Outputs]

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class CudaBackend(CudaDevice):
    """CUDA graphs and CUDA events on the current device."""

    def __init__(self) -> None:
        super().__init__()
        self.multiprocessors = int(self.properties.multi_processor_count)
        major, minor = torch.cuda.get_device_capability(self.device)
        # CuTe DSL reads this once, at import, and silently assumes sm_100a when it cannot tell
        os.environ.setdefault("CUTE_DSL_ARCH", f"sm_{major}{minor}a")

    def record(  # type: ignore[override]
        self, launch: Callable[[int], Outputs], count: int, keep: Sequence[int]
    ) -> GraphRecording:
        """Capture, keeping outputs."""
        kept: dict[int, Outputs] = {}

        def launch_and_keep(i: int) -> None:
            outputs = launch(i)
            if i in keep:
                kept[i] = outputs

        return GraphRecording(super().record(launch_and_keep, count), kept)

    def time_round(self, recordings: Sequence[Recording], flush: bool) -> list[float]:
        """Time between events around each replay; the host runs ahead of the device throughout."""
        return self.times(recordings, flush)

    def release(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def clocks(self) -> dict[str, Any]:
        """Clocks as read by nvidia-smi (never set)."""
        names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
        keys = ("sm_mhz", "memory_mhz", "temperature_c", "power_w")
        values = self._query(names)
        return {key: _number(value) for key, value in zip(keys, values, strict=True)}

    def describe(self) -> dict[str, Any]:
        """Name, size and driver."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return {
            "gpu": self.properties.name,
            "capability": f"{major}.{minor}",
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self.l2_bytes,
            "memory_bytes": int(self.properties.total_memory),
            "driver": self._query(("driver_version",))[0],
            "cuda": torch.version.cuda,
        }

    def _query(self, names: Sequence[str]) -> list[str | None]:
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        uuid = getattr(self.properties, "uuid", None)
        if uuid is not None:
            command += ["-i", f"GPU-{uuid}"]
        values = [part.strip() for part in _run(command).split("\n")[0].split(",")]
        unknown: list[str | None] = [None] * len(names)
        return [*values] if len(values) == len(names) and all(values) else unknown


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:  # "[N/A]"
        return None


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    """Standard output of a command, or "" when it is missing or fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> dict[str, Any]:
    """Commit of this source tree and whether it was modified; None outside a repository."""
    if "CUTESUPER_COMMIT" in os.environ:  # a copied tree has its commit in this variable
        return {"commit": os.environ["CUTESUPER_COMMIT"], "dirty": None}
    root = Path(__file__).resolve().parent.parent
    head = _run(["git", "rev-parse", "HEAD"], cwd=root).strip()
    if not head:
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": bool(_run(["git", "status", "--porcelain"], cwd=root).strip())}


def environment(backend: Backend) -> dict[str, Any]:
    """Everything a reader needs to repeat or to doubt a measurement."""
    return {
        **backend.describe(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "quack": _version("quack-kernels"),
        "liger": _version("liger-kernel"),
        "flash_attn_4": _version("flash-attn-4"),
        "cutesuper": _version("cutesuper"),
        **commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
