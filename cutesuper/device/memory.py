"""Copies between device and shared memory: bulk copies, tiles (TMA) and single elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as layouts
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind as Kind
from cutlass.cute.nvgpu.warpgroup import make_smem_layout_atom
from cutlass.tensor_utils import LayoutEnum

from cutesuper.device.barriers import Barrier

#: L2 eviction hints of bulk copies, in the encoding of createpolicy
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


def operand(alloc: cutlass.memory.SmemAllocator, dtype: type, layout: cute.ComposedLayout):
    """Allocate shared memory for a tensor-core operand, aligned for every swizzle."""
    return alloc.allocate_tensor(dtype, layout.outer, 1024, layout.inner)


def operand_layout(
    dtype: Any, tile: tuple[int, int], slots: int, along: bool
) -> cute.ComposedLayout:
    """Layout of ``slots`` tiles ``[label, contracted label, slot]`` of a swizzled operand.
    ``along``: the contracted label is the contiguous one. It is the same for WGMMA and for
    tcgen05."""
    order = LayoutEnum.ROW_MAJOR if along else LayoutEnum.COL_MAJOR
    return layouts.make_smem_layout_b(order, (tile[0], *tile), dtype, slots)


def swizzle(dtype: Any, width: int, along: bool) -> Any:
    """The swizzle of rows of ``width`` bytes (32, 64 or 128)."""
    kind = Kind[f"{'K' if along else 'MN'}_SW{width}"]
    return make_smem_layout_atom(kind, dtype).inner


def neighbours(pointer: cute.Pointer, count: int) -> cute.Tensor:
    """View of ``count`` neighbouring elements."""
    return cute.make_tensor(pointer, cute.make_layout(count))


def one(pointer: cute.Pointer) -> cute.Tensor:
    """View of one element."""
    return neighbours(pointer, 1)


def at_address(dtype: Any, address: Int64, alignment: int) -> cute.Pointer:
    """Pointer to device memory at an address, which is a multiple of ``alignment`` bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)


def put(pointer: cute.Pointer, value: Any) -> None:
    """Write one element."""
    one(pointer)[0] = value


def element(array: cute.Pointer, index: Int32) -> Float32:
    """One element of an array in shared memory."""
    return one(array + index)[0]


def transposing_atom(dtype: Any) -> cute.CopyAtom:
    """The atom with which a warp stores four 8x8 blocks of an accumulator fragment, transposed.
    Elements have 16 bits; lane ``8 i + r`` gives the address of row ``r`` of block ``i``."""
    return cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dtype)


def rows_atom(dtype: Any, transposed: bool) -> cute.CopyAtom:
    """The atom with which a warp loads four 8x8 blocks, as products take a first operand.
    Elements have 16 bits; lane ``8 i + r`` gives the address of row ``r`` of block ``i``, which is
    ``transposed`` if the contracted label is not the contiguous one."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), dtype)


def transposed_atom(dtype: Any) -> cute.CopyAtom:
    """The atom with which a warp loads the blocks that `transposing_atom` has stored."""
    return rows_atom(dtype, True)


# -------------------------------------------------------------------------------------- tiles (TMA)


def tile_atom(
    tensor: cute.Tensor,
    smem_layout: cute.ComposedLayout,
    tile: tuple[int, ...],
    multicast: bool = False,
    rounds: bool = False,
):
    """A TMA load atom for tiles of a tensor, and the coordinate tensor to slice.
    If it ``rounds``, fp32 numbers arrive as TF32."""
    op = (
        cpasync.CopyBulkTensorTileG2SMulticastOp()
        if multicast
        else (cpasync.CopyBulkTensorTileG2SOp())
    )
    kind = {"internal_type": cutlass.TFloat32} if rounds else {}
    return cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tile, **kind)


def store_atom(tensor: cute.Tensor, smem_layout: cute.ComposedLayout, tile: tuple[int, ...]):
    """A TMA store atom for tiles of a tensor, and the coordinate tensor to slice."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile)


def ask_for_descriptors(atoms: Iterable[cute.CopyAtom]) -> None:
    """Prefetch the descriptors of TMA atoms.
    While the barriers are made this saves 0.05 to 0.2 us in every kernel."""
    for atom in atoms:
        cpasync.prefetch_descriptor(atom)


def partition(atom: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor, tile_rank: int):
    """Shared-memory slots and global tiles in the form of the TMA copy.
    That is (bytes of a box, index...)."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, tile_rank),
        cute.group_modes(tiles, 0, tile_rank),
    )


@cute.jit
def bulk_load(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    barrier,
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
    cute.copy(atom, source, target, tma_bar_ptr=barrier.pointer, **options)


def bulk_store(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor) -> None:
    """Start one TMA store, a group of its own; called by one warp."""
    cute.copy(atom, source, target)
    cute.arch.cp_async_bulk_commit_group()


def wait_for_stores(left: int) -> None:
    """Wait until this warp's stores but the last ``left`` have read shared memory."""
    cute.arch.cp_async_bulk_wait_group(left, read=True)


# ---------------------------------------------------------------------------- neighbouring elements


def bulk_copy(
    source: cute.Pointer,
    target: cute.Pointer,
    length: int,
    barrier: Barrier,
    hint: int | None = None,
) -> None:
    """Load ``length`` neighbouring elements into shared memory; called by one thread.
    Addresses and size are multiples of 16 bytes."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), target.dtype)
    options = {} if hint is None else {"cache_policy": Int64(hint)}
    ends = neighbours(source, length), neighbours(target, length)
    cute.copy(atom, *ends, mbar_ptr=barrier.pointer, **options)


def element_atom(dtype: Any) -> cute.CopyAtom:
    """The atom of an asynchronous copy of one element of 4 or 8 bytes, for `copy_element`."""
    return cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=dtype.width)


def copy_element(atom: cute.CopyAtom, source: cute.Pointer, target: cute.Pointer) -> None:
    """Copy one element into shared memory; `Barrier.arrive_after_copies` tells when it is there."""
    cute.copy(atom, one(source), one(target))
