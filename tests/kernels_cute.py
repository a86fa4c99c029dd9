"""The CuTe side of ``tests/kernels.py``: importing this module imports the compiler."""

# No ``from __future__ import annotations`` here: the DSL reads annotations as objects.

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

THREADS = 128


class ScaleAdd:
    """One block per row; every thread takes 8 neighbouring elements (128 bits)."""

    def __init__(self, n: int, steps: int) -> None:
        self.n = n
        self.steps = steps

    @cute.jit
    def __call__(self, ins: list[cute.Tensor], y: cute.Tensor, a: Float32, stream: cuda.CUstream):
        self.kernel(ins, y, a).launch(grid=(y.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, ins: list[cute.Tensor], y: cute.Tensor, a: Float32):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        layout = cute.make_layout((THREADS, 8), stride=(8, 1))
        for i in cutlass.range_constexpr(self.n // (8 * THREADS)):
            values = []
            for source in [ins[0], ins[1], y]:
                part = cute.local_tile(source[row, None], (8 * THREADS,), (i,))
                values.append(cute.composition(part, layout)[thread, None])
            x = cute.make_rmem_tensor_like(values[0])
            z = cute.make_rmem_tensor_like(values[1])
            cute.autovec_copy(values[0], x)
            cute.autovec_copy(values[1], z)
            total = x.load().to(Float32) * a + z.load().to(Float32)
            for _ in cutlass.range_constexpr(self.steps - 1):
                total = total * a
            x.store(total.to(y.element_type))
            cute.autovec_copy(x, values[2])


class ClusterSum:
    """One row per block; blocks of a cluster only meet at a cluster barrier."""

    def __init__(self, n: int, cluster: int) -> None:
        self.n = n
        self.cluster = cluster

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(
            grid=(x.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        partial = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(THREADS), 16
        )
        cute.arch.griddepcontrol_wait()
        total = Float32(0.0)
        for i in cutlass.range(thread, self.n, THREADS):
            total += x[row, i]
        partial[thread] = total
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if thread == 0:
            result = Float32(0.0)
            for i in cutlass.range(THREADS):
                result += partial[i]
            y[row] = result
        cute.arch.griddepcontrol_launch_dependents()


class Spilling:
    """Reads its register array at an index known only at run time."""

    def __init__(self, elements: int) -> None:
        self.elements = elements

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        local = cute.make_rmem_tensor((self.elements,), Float32)
        for i in cutlass.range_constexpr(self.elements):
            local[i] = x[thread, i]
        for i in cutlass.range(thread, self.elements, 7):
            y[i] = local[(i * thread) % self.elements]


class SharedHog:
    """Allocates a given amount of shared memory and touches it."""

    def __init__(self, size: int) -> None:
        self.size = size

    @cute.jit
    def __call__(self, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        memory = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(self.size // 4), 16
        )
        memory[thread] = y[thread]
        cute.arch.sync_threads()
        y[thread] = memory[THREADS - 1 - thread]


class Broken:
    """Calls a method that no tensor has."""

    @cute.jit
    def __call__(self, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, y: cute.Tensor):
        y.no_such_method()


class HalvesSum:
    """Row sums by two blocks of a row: the last one to arrive adds both halves in order, and leaves
    the counter at zero."""

    def __init__(self, n: int) -> None:
        self.half = n // 2

    @cute.jit
    def __call__(
        self, x: cute.Tensor, y: cute.Tensor, parts: cute.Tensor, arrived: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(x, y, parts, arrived).launch(
            grid=(x.shape[0], 2, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, parts: cute.Tensor, arrived: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range(self.half):
                total += x[row, part * self.half + i]
            parts[2 * row + part] = total
            cute.arch.fence_acq_rel_gpu()
            before = cute.arch.atomic_add(arrived.iterator + row, cutlass.Int32(1))
            if before == 1:
                cute.arch.fence_acq_rel_gpu()
                y[row, 0] = parts[2 * row] + parts[2 * row + 1]
                arrived[row] = 0
