"""What the search and the schedule need to know of a GPU: counts, peak rates, measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """Constants of the cost model that are fitted to measurements; times in microseconds.

    Values stand with their origin in the file of the architecture (`hopper`, `blackwell`).

    Attributes:
        sm_bytes_per_us: bytes that one SM takes in while the memory is saturated.
        sm_bytes_per_us_idle: the same where the memory is not saturated.
        iteration_us: an iteration of a staged loop: barrier, descriptor, wait.
        exchange_us: a cluster's exchange of partial sums, for each partner.
        exchange_us_per_kb: the same, for each KB that a block sends.
        wave_us: a further wave of blocks: launch and prologue that nothing hides.
        block_us: a block's first barrier, and its reductions across warps.
        tensor_efficiency: part of the peak that the tensor cores reach with accumulators that are
            infinitely large.
        half_area: accumulator elements at which half of the rest is lost to operand traffic.
        lanes_per_us: arithmetic instructions of one SM, one for each lane.
        instructions: instructions per element, by operator; 1 for what is not named.
        prologue_us: an iteration more where the row operand is computed: read, compute, write
            back, synchronise.
        first_stage: part of the first stage that nothing hides.
        exposed: part of the arithmetic of a matmul kernel that asynchronous products do not hide.
        contention: part of it that slows the loads down.
    """

    sm_bytes_per_us: float
    sm_bytes_per_us_idle: float
    iteration_us: float
    exchange_us: float
    exchange_us_per_kb: float
    wave_us: float
    block_us: float
    tensor_efficiency: float
    half_area: float
    lanes_per_us: float
    instructions: Mapping[str, float] = field(hash=False)
    prologue_us: float
    first_stage: float
    exposed: float
    contention: float


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
        rates: the fitted constants of the cost model.
    """

    name: str
    arch: str
    sms: int
    shared_bytes: int
    registers: int
    clusters: Mapping[int, int] = field(hash=False)
    bandwidth: float
    l2_bandwidth: float
    tensor_flops: float
    launch_us: float
    rates: Rates

    def refuses_products(self) -> str | None:
        """Why matrix products cannot be lowered for this GPU; None where they can."""
        if self.arch.startswith("sm_90"):
            return None
        return (
            "matrix products are lowered for Hopper (sm_90a) only, not for "
            f"{self.name} ({self.arch})"
        )
