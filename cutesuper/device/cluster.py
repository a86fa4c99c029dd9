"""Clusters of blocks: their barrier, and exchange through distributed shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutesuper.device.barriers import Barrier


def rank_in_cluster() -> Int32:
    """Rank of this block in its cluster, the same in all lanes of a warp."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def announce() -> None:
    """Tell the cluster that this block has started and made its barriers.

    Relaxed: the form that releases waits for the bulk loads in flight (3.6 us).
    """
    cute.arch.cluster_arrive_relaxed()


def wait_for_cluster() -> None:
    """Wait until all blocks of the cluster have announced themselves.
    Once for each thread, before it sends to others."""
    cute.arch.cluster_wait()


def leave_together() -> None:
    """Wait for the cluster at the end.
    No block may end while others still load into its shared memory or signal it."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def float_bits(value: Float32) -> Int32:
    """The bit pattern of a float, to be sent."""
    register = cute.make_rmem_tensor(cute.make_layout(1), Float32)
    register[0] = value
    return cute.recast_tensor(register, Int32)[0]


def push(target: cute.Pointer, values: tuple[Int32, ...], barrier: Barrier, rank: Any) -> None:
    """Send 1, 2 or 4 words to the same address in block ``rank`` of the cluster.

    The receiver's barrier counts the bytes; sending to the own rank is allowed, so that all slots
    look alike.
    """
    data = values[0] if len(values) == 1 else values
    cute.arch.store_async_dsmem(target.align(4 * len(values)), data, barrier.pointer, rank)
