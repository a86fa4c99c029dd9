"""Blocks of a launch that meet in device memory: counters which are 0 before and after."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def arrive_in_grid(counter, block, blocks):
    """Count this block, after all of its stores; called by one thread.

    One block takes from the counter as much as all others add, so it is 0 when all have come, not
    before, and is so again for the next launch.
    """
    step = Int32(1)
    if block == 0:
        step = Int32(1 - blocks)
    cute.arch.atomic_add(counter, step, sem="release", scope="gpu")


@cute.jit
def wait_for_grid(counter):
    """Wait until all blocks have come; called by one thread.
    They must all be resident: the launch is cooperative.

    No second count of the blocks that have left is needed, which would cost each block a round trip
    to L2.
    """
    missing = Int32(1)
    while missing != 0:
        # a fence after relaxed loads would also wait for the stores of the last tile
        missing = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def is_last(counter, parts):
    """Count a part that has been stored; 1 (Int32) for the last one of ``parts`` to come, else 0.
    Called by one thread; no block waits for another. The last one clears the counter."""
    arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
    last = Int32(0)
    if arrived == parts - 1:
        last = Int32(1)
        cute.arch.store(counter, Int32(0))
    return last


def told(flag: Any) -> Int32:
    """A word that another thread of the block has written to shared memory."""
    return cute.arch.load(flag, Int32)


def tell(flag: Any, value: Int32) -> None:
    """Write a word for the other threads of the block."""
    cute.arch.store(flag, value)
