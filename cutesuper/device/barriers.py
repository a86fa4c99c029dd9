"""Barriers of a block or of some of its warps, and fences of ordinary accesses and bulk copies.
Barriers of a block lie in shared memory, where arrivals and bytes count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64


@dataclass(frozen=True)
class Barrier:
    """A barrier in shared memory (mbarrier).
    A phase ends when all arrivals and all expected bytes have come; the first phase is 0, and waits
    for phase 1 pass before it has ended."""

    pointer: cute.Pointer

    def wait(self, phase: Any) -> None:
        """Wait until a phase has ended; all lanes of a warp may call it."""
        cute.arch.mbarrier_wait(self.pointer, phase)

    def arrive(self, rank: Any = None) -> None:
        """Count an arrival of this thread, here or in block ``rank`` of the cluster."""
        if rank is None:
            cute.arch.mbarrier_arrive(self.pointer)
        else:
            cute.arch.mbarrier_arrive(self.pointer, rank)

    def expect(self, count: Any) -> None:
        """Arrive, and expect ``count`` bytes more in this phase; called by one thread.

        Bytes may come before they are expected: the phase cannot end without this arrival.
        """
        cute.arch.mbarrier_arrive_and_expect_tx(self.pointer, count)

    @cute.jit
    def expect_once(self, count):
        """`expect` by one lane of a warp that calls it as a whole."""
        with cute.arch.elect_one():
            self.expect(count)

    @cute.jit
    def arrive_warp(self, lane, blocks: cutlass.Constexpr = 1):
        """Count one arrival of a warp, on the barriers of the first ``blocks`` of the cluster."""
        if cutlass.const_expr(blocks == 1):
            if lane == 0:
                self.arrive()
        elif lane < blocks:
            self.arrive(lane)

    def arrive_after_copies(self) -> None:
        """Count an arrival of this thread once its asynchronous copies (`cp.async`) are there."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.pointer)


@dataclass(frozen=True)
class Barriers:
    """An array of barriers in shared memory.

    Attributes:
        pointer: to the first one.
        count: of barriers.
        arrivals: that end a phase of each.
    """

    pointer: cute.Pointer
    count: int
    arrivals: int = 1

    @staticmethod
    def allocate(
        alloc: cutlass.memory.SmemAllocator, count: int = 1, arrivals: int = 1
    ) -> Barriers:
        """Allocate barriers, which are not initialised."""
        return Barriers(alloc.allocate_array(Int64, count, byte_alignment=8), count, arrivals)

    def __getitem__(self, i: Any) -> Barrier:
        return Barrier(self.pointer + i)

    @property
    def only(self) -> Barrier:
        """The barrier of an array of one."""
        return Barrier(self.pointer)

    def initialise(self) -> None:
        """Initialise all of them; called by one thread, before `publish`."""
        for i in range(self.count):
            cute.arch.mbarrier_init(self.pointer + i, self.arrivals)


def publish() -> None:
    """Make initialised barriers known to bulk copies and to the cluster."""
    cute.arch.mbarrier_init_fence()


@cute.jit
def initialise(arrays: cutlass.Constexpr[Sequence[Barriers]]):
    """Initialise arrays of barriers; called by a whole warp.

    One elected thread and constant addresses: with one lane per barrier the compiler makes a serial
    loop with a proxy fence each, 2000 cycles instead of 600.
    """
    with cute.arch.elect_one():
        for array in arrays:
            array.initialise()
    publish()
    cute.arch.sync_warp()


@dataclass(frozen=True)
class Meeting:
    """A barrier of some warps of a block, in hardware.

    Attributes:
        index: 0 to 15; 0 is that of the whole block.
        threads: that have to come; a multiple of 32.
    """

    index: Any
    threads: int

    def meet(self) -> None:
        """Wait until all threads have come."""
        cute.arch.barrier(barrier_id=self.index, number_of_threads=self.threads)

    def arrive(self) -> None:
        """Come without waiting."""
        cute.arch.barrier_arrive(barrier_id=self.index, number_of_threads=self.threads)


def fence_copies() -> None:
    """Order this thread's accesses of shared memory before later bulk copies and products.
    Those access it through another proxy."""
    cute.arch.fence_proxy("async.shared", space="cta")


def fence_warp() -> None:
    """`fence_copies`, for all lanes of a warp."""
    fence_copies()
    cute.arch.sync_warp()


def fence_reads() -> None:
    """Keep the compiler from moving reads of shared memory behind this place.
    It would issue each just before its use, so that few are in flight."""
    cute.arch.fence_acq_rel_cta()


@cute.jit
def release_warp(barrier, lane: Int32):
    """Arrive for a warp that has read (or written) a stage with ordinary instructions.

    The next bulk load writes it through the asynchronous proxy, so the reads need a proxy fence
    before the arrival. Without it loads overtook reads: row statistics of 64x4096x1024 mixed in
    elements of the stage's next tile in most launches.
    """
    fence_warp()
    barrier.arrive_warp(lane)
