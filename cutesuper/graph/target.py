"""What the search and the schedule need to know of a GPU; measured constants say where they are
from. A new architecture is a new entry here and building blocks under ``device/``."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutesuper.errors import DeviceError


@dataclass(frozen=True)
class Target:
    """A GPU.

    Attributes:
        name: ``h200``.
        arch: what the compiler is asked for, ``sm_90a``.
        sms: streaming multiprocessors.
        shared_bytes: shared memory one block may have.
        registers: 32-bit registers of one multiprocessor.
        clusters: blocks per cluster -> clusters that run at once with one block per SM.
        bandwidth: device memory, bytes/s, reading.
        l2_bandwidth: L2 to the SMs, bytes/s.
        tensor_flops: dense 16-bit multiply-adds (as 2 operations) per second.
        launch_us: fixed cost of a kernel in a graph, ramp-up of loads included, microseconds.
    """

    name: str
    arch: str
    sms: int
    shared_bytes: int
    registers: int
    clusters: dict[int, int] = field(hash=False)
    bandwidth: float
    l2_bandwidth: float
    tensor_flops: float
    launch_us: float

    def refuses_products(self) -> str | None:
        """Why matrix products cannot be lowered for this GPU; None where they can."""
        if self.arch.startswith("sm_90"):
            return None
        return (
            "matrix products are lowered for Hopper (sm_90a) only, not for "
            f"{self.name} ({self.arch})"
        )


#: H200: copy 4.23 TB/s, streaming floor 9.6 us for 33.7 MB plain, 8.2 with dependent launch;
#: 66 / 30 / 15 clusters of 2 / 4 / 8 fit at one block per SM (occupancy query); 788 TFLOP/s bf16.
H200 = Target(
    name="h200",
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    clusters={1: 132, 2: 66, 4: 30, 8: 15},
    bandwidth=4.23e12,
    l2_bandwidth=7.0e12,
    tensor_flops=7.5e14,
    launch_us=1.8,
)

#: H100 SXM: the same chip with 3.35 TB/s of memory (datasheet; about 90% of it is reachable).
H100 = Target(
    name="h100",
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    clusters={1: 132, 2: 66, 4: 30, 8: 15},
    bandwidth=3.0e12,
    l2_bandwidth=7.0e12,
    tensor_flops=7.5e14,
    launch_us=1.8,
)

#: B200: datasheet figures, nothing measured yet; kernels without matrix products compile for it.
B200 = Target(
    name="b200",
    arch="sm_100a",
    sms=148,
    shared_bytes=232448,
    registers=65536,
    clusters={1: 148, 2: 74, 4: 32, 8: 16},
    bandwidth=7.0e12,
    l2_bandwidth=1.0e13,
    tensor_flops=1.8e15,
    launch_us=1.8,
)

TARGETS: dict[str, Target] = {t.name: t for t in (H200, H100, B200)}


def find_target(name: str) -> Target:
    """The target called ``name``. Raises DeviceError."""
    if name in TARGETS:
        return TARGETS[name]
    raise DeviceError(f"target {name!r}: unknown; use one of {', '.join(TARGETS)}")
