"""The practical floor: the fastest kernel we know that only *reads* a given number of bytes.

One warp per multiprocessor keeps a ring of bulk copies (``cp.async.bulk``, one mbarrier per slot)
in flight and drops what arrives. A real kernel also waits, computes and writes, so its time over
this one is its gap to the memory system. The number is a measured reference, not a proof of a
bound: a faster way to stream would lower the floor for all.

Importing this module imports CuTe DSL; nothing else in ``benchmarks`` does.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_ptr

ALIGNMENT = 128  # bytes; required alignment of the source pointer
BOX = 16384  # bytes; larger bulk copies are no faster, 8 KB ones are 4 % slower
IN_FLIGHT = 160 * 1024  # bytes per multiprocessor; dependent launch needs >= 128 KB


@dataclass(frozen=True)
class StreamPlan:
    """The division of ``size`` bytes into bulk copies.

    Block ``b`` of ``blocks`` reads the copies ``b, b + blocks, ...`` of ``chunk`` bytes each; the
    last copy of all is ``tail`` bytes (``tail == chunk`` when it divides).
    """

    size: int
    blocks: int
    chunk: int
    stages: int

    @property
    def chunks(self) -> int:
        """Number of bulk copies, the short one included."""
        return -(-self.size // self.chunk)

    @property
    def tail(self) -> int:
        """Bytes of the last copy, 1..chunk."""
        return self.size - (self.chunks - 1) * self.chunk


def stream_plan(size: int, multiprocessors: int, *, balanced: bool) -> StreamPlan:
    """Cut ``size`` bytes (rounded down to 16, the unit of a bulk copy) for a device.

    ``balanced`` shrinks the copies so that all blocks get the same number (at least two: small
    sizes would otherwise leave multiprocessors idle); otherwise they are BOX bytes each, which are
    aligned to their size. Which is faster depends on the size, so the floor is the better one.

    Raises:
        ValueError: fewer than 16 bytes.
    """
    size -= size % 16
    if size < 16:
        raise ValueError("stream_plan: a bulk copy moves at least 16 bytes")
    chunk = BOX
    if balanced:
        rounds = max(2, -(-size // (multiprocessors * BOX)))
        chunk = -(-size // (multiprocessors * rounds))
        chunk = -(-chunk // ALIGNMENT) * ALIGNMENT
    chunks = -(-size // chunk)
    blocks = min(multiprocessors, chunks)
    stages = min(IN_FLIGHT // chunk, -(-chunks // blocks))
    return StreamPlan(size=size, blocks=blocks, chunk=chunk, stages=stages)


class StreamKernel:
    """A kernel that reads ``plan.size`` bytes and drops them.
    With ``checksum`` it adds them up instead.

    The checksum build shows that every byte is read once (each lane writes the 32-bit wrapping sum
    of the words it saw); the timed build has the same address arithmetic and no shared loads.
    """

    def __init__(self, plan: StreamPlan, *, dependent: bool, checksum: bool = False) -> None:
        self.plan = plan
        self.dependent = dependent
        self.checksum = checksum

    @cute.jit
    def __call__(self, src: cute.Pointer, sums: cute.Pointer, stream: cuda.CUstream) -> None:
        """Launch the kernel."""
        self.kernel(src, sums).launch(
            grid=(self.plan.blocks, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=self.dependent
        )

    @cute.jit
    def request(
        self, src: cute.Pointer, ring: cute.Pointer, full: cute.Pointer, index: Int32, slot: Int32
    ) -> None:
        """Arm the slot's barrier and start the copy of chunk ``index``; one thread calls this."""
        plan = self.plan
        if index == plan.chunks - 1:
            self.copy(src, ring, full, index, slot, plan.tail)
        else:
            self.copy(src, ring, full, index, slot, plan.chunk)

    @cute.jit
    def copy(
        self,
        src: cute.Pointer,
        ring: cute.Pointer,
        full: cute.Pointer,
        index: Int32,
        slot: Int32,
        size: cutlass.Constexpr[int],
    ) -> None:
        """Move ``size`` bytes of chunk ``index`` into ``slot``."""
        words = cute.make_layout(size // 4)
        # 64-bit: the offset in words passes 2^31 for tensors above 8 GB
        at = (src + Int64(index) * (self.plan.chunk // 4)).align(16)
        to = (ring + slot * (self.plan.chunk // 4)).align(16)
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, size)
        cute.copy(
            atom, cute.make_tensor(at, words), cute.make_tensor(to, words), mbar_ptr=full + slot
        )

    @cute.jit
    def add_up(self, ring: cute.Pointer, slot: Int32, index: Int32, total: Int32) -> Int32:
        """Add this lane's share of the words in ``slot`` to ``total``."""
        plan = self.plan
        base = cute.make_tensor(ring, cute.make_layout(plan.stages * plan.chunk // 4))
        words = Int32(plan.chunk // 4)
        if index == plan.chunks - 1:
            words = Int32(plan.tail // 4)
        lane = cute.arch.lane_idx()
        for i in cutlass.range((words - lane + 31) // 32, unroll=1):
            total += base[slot * (plan.chunk // 4) + lane + i * 32]
        return total

    @cute.kernel
    def kernel(self, src: cute.Pointer, sums: cute.Pointer) -> None:
        """One warp per block; lane 0 issues the copies, all lanes wait for them."""
        plan = self.plan
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        memory = cutlass.memory.SmemAllocator()
        ring = memory.allocate_array(Int32, plan.stages * plan.chunk // 4, byte_alignment=128)
        full = memory.allocate_array(Int64, plan.stages, byte_alignment=8)
        count = (plan.chunks - block + plan.blocks - 1) // plan.blocks
        if cutlass.const_expr(self.dependent):
            # nothing here is written by an earlier kernel, so the next grid may start at once
            cute.arch.griddepcontrol_launch_dependents()
        if lane == 0:
            for s in cutlass.range_constexpr(plan.stages):
                cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init_fence()
            for s in cutlass.range_constexpr(plan.stages):
                if s < count:
                    self.request(src, ring, full, block + s * plan.blocks, Int32(s))
        cute.arch.sync_warp()
        slot, phase, total = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full + slot, phase)
            if cutlass.const_expr(self.checksum):
                total = self.add_up(ring, slot, block + i * plan.blocks, total)
                cute.arch.sync_warp()
            if lane == 0 and i + plan.stages < count:
                self.request(src, ring, full, block + (i + plan.stages) * plan.blocks, slot)
            slot += 1
            if slot == plan.stages:
                slot = Int32(0)
                phase = phase ^ 1
        if cutlass.const_expr(self.dependent):
            # keeps the order of the stream transitive: this grid ends after the one before it
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.checksum):
            out = cute.make_tensor(sums, cute.make_layout(plan.blocks * 32))
            out[block * 32 + lane] = total


def pointer(address: int) -> cute.Pointer:
    """A global-memory pointer argument for a compiled stream kernel."""
    return make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT)


def compile_stream(kernel: StreamKernel, options: str = "") -> Callable[..., None]:
    """Compile for the architecture CuTe DSL sees; needs no GPU when CUTE_DSL_ARCH is set.

    The result is called as ``f(pointer(source), pointer(sums), CUstream(stream))``.
    """
    fake = pointer(ALIGNMENT)
    return cute.compile(kernel, fake, fake, make_fake_stream(), options=options)


def verify_stream(plan: StreamPlan, source: torch.Tensor, *, dependent: bool) -> None:
    """Check on the device that the plan reads every byte of ``source`` (uint8) exactly once.

    Raises:
        RuntimeError: the wrapping 32-bit sum of all words differs from PyTorch's.
    """
    sums = torch.zeros(plan.blocks * 32, dtype=torch.int32, device=source.device)
    kernel = compile_stream(StreamKernel(plan, dependent=dependent, checksum=True))
    stream = torch.cuda.current_stream(source.device)
    kernel(pointer(source.data_ptr()), pointer(sums.data_ptr()), cuda.CUstream(stream.cuda_stream))
    pieces = source[: plan.size].view(torch.int32).split(1 << 28)  # a sum makes a copy, in int64
    expected = sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
    if (int(sums.sum(dtype=torch.int64)) - expected) % 2**32:
        raise RuntimeError(f"floor kernel did not read its {plan.size} bytes exactly once: {plan}")


def floor_launcher(
    sources: list[torch.Tensor], size: int, multiprocessors: int, *, balanced: bool, dependent: bool
) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Compile, verify and wrap a floor kernel: the result streams ``sources[i]`` when called.

    ``sources`` are CUDA uint8 tensors of at least ``size`` bytes, aligned to 128 bytes.
    """
    plan = stream_plan(size, multiprocessors, balanced=balanced)
    verify_stream(plan, sources[0], dependent=dependent)
    kernel = compile_stream(StreamKernel(plan, dependent=dependent))
    arguments = [pointer(source.data_ptr()) for source in sources]

    def launch(i: int) -> tuple[torch.Tensor, ...]:
        stream = torch.cuda.current_stream(sources[i].device)
        kernel(arguments[i], arguments[i], cuda.CUstream(stream.cuda_stream))
        return ()

    return launch
