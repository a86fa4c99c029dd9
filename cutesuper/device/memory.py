"""TMA loads and stores, barriers, and exchange through distributed shared memory (Hopper)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

#: L2 eviction hints of bulk copies, in the encoding of createpolicy
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


@cute.jit
def init_barriers(groups: cutlass.Constexpr):
    """Initialise mbarriers: ``groups`` is a list of (pointer, count, arrivals).

    One elected thread and constant addresses: with one lane per barrier the compiler makes a serial
    loop with a proxy fence each, 2000 cycles instead of 600.
    """
    with cute.arch.elect_one():
        for pointer, count, arrivals in groups:
            for i in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(pointer + i, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def bulk_load(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    barrier: cute.Pointer,
    hint: cutlass.Constexpr,
    mask=None,
):
    """Issue one TMA load; the whole warp calls it, the copy elects a lane.

    With a ``mask`` of ranks (bits of an Int16) the bytes go to the same place in all these blocks
    of the cluster, and count on their barriers.
    """
    options = {} if mask is None else {"mcast_mask": mask}
    if cutlass.const_expr(hint is not None):
        options["cache_policy"] = Int64(hint)
    cute.copy(atom, source, target, tma_bar_ptr=barrier, **options)


@cute.jit
def expect_bytes(barrier: cute.Pointer, count: cutlass.Constexpr):
    """Arm a barrier with the bytes that will arrive on it."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count)


@cute.jit
def release_warp(barrier: cute.Pointer, lane: Int32):
    """Release a stage that the warp has read (or written) with ordinary instructions.

    The next TMA load writes it through the asynchronous proxy, so the reads need a proxy fence
    before the arrival. Without it loads overtook reads: row statistics of 64x4096x1024 mixed in
    elements of the stage's next tile in most launches.
    """
    fence_reads()
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def fence_reads():
    """Order a warp's reads and writes of shared memory before later bulk copies."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


def operand(alloc: cutlass.memory.SmemAllocator, dtype: type, layout: cute.ComposedLayout):
    """Allocate shared memory for a tensor-core operand, aligned for every swizzle."""
    return alloc.allocate_tensor(dtype, layout.outer, 1024, layout.inner)


def element(array: cute.Pointer, index: Int32) -> Float32:
    """One element of an array in shared memory."""
    return cute.make_tensor(array + index, cute.make_layout(1))[0]


def float_bits(value: Float32) -> Int32:
    """The bit pattern of a float, the operand of st.async."""
    register = cute.make_rmem_tensor(cute.make_layout(1), Float32)
    register[0] = value
    return cute.recast_tensor(register, Int32)[0]


def push(target: cute.Pointer, values: tuple[Int32, ...], barrier: cute.Pointer, rank: Int32):
    """Send 1, 2 or 4 words to the same address in block ``rank`` of the cluster.

    The receiver's barrier counts the bytes; pushing to the own rank is allowed, so that all slots
    look alike.
    """
    data = values[0] if len(values) == 1 else values
    cute.arch.store_async_dsmem(target.align(4 * len(values)), data, barrier, rank)


def tile_atom(
    tensor: cute.Tensor,
    smem_layout: cute.ComposedLayout,
    tile: tuple[int, ...],
    multicast: bool = False,
):
    """A TMA load atom for tiles of a tensor, and the coordinate tensor to slice."""
    op = (
        cpasync.CopyBulkTensorTileG2SMulticastOp()
        if multicast
        else (cpasync.CopyBulkTensorTileG2SOp())
    )
    return cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tile)


def store_atom(tensor: cute.Tensor, smem_layout: cute.ComposedLayout, tile: tuple[int, ...]):
    """A TMA store atom for tiles of a tensor, and the coordinate tensor to slice."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile)


def partition(atom: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor, tile_rank: int):
    """Shared-memory slots and global tiles in the form of the TMA copy: (bytes of a box,
    index...)."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, tile_rank),
        cute.group_modes(tiles, 0, tile_rank),
    )
