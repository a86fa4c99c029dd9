"""Devices for the tuner: those of `cutesuper.measure` that also load candidates.

`Device` is the interface that `cutesuper.tune.process` needs; `CudaDevice` is the real one. Tests
inject another that runs on the CPU with scripted times.
"""

from __future__ import annotations

import subprocess
from typing import Protocol

import torch

from cutesuper import measure
from cutesuper.runtime.calling import Launches
from cutesuper.tune.candidates import Program


class Device(measure.Device, Protocol):
    """The interface to a device that the tuner needs."""

    def load(self, program: Program) -> Launches:
        """The compiled kernels of a candidate."""
        ...

    def describe(self) -> dict[str, str | None]:
        """``gpu``, ``driver`` and ``cuda``, for the stored file."""
        ...


class CudaDevice(measure.CudaDevice):
    """The current device, and the compile cache."""

    def load(self, program: Program) -> Launches:
        """Load kernels from the compile cache."""
        return program.variant().launches

    def describe(self) -> dict[str, str | None]:
        """Name, driver, CUDA."""
        return {
            "gpu": self.properties.name,
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
