"""Small CuTe kernels that the runtime tests compile; each has a picklable builder.

This module imports CuTe DSL only inside the builders, so that importing it costs nothing and a
worker process can unpickle a builder without a compiler.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from cutesuper.runtime.compile import CompileRequest

ROW = 1024


def scale_add(n: int = ROW, alpha_steps: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """``y = a * x + z`` for rows of ``n`` bfloat16; M and the row stride of ``z`` are dynamic."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    from tests.kernels_cute import ScaleAdd

    m = cute.sym_int()
    dtype = cutlass.BFloat16

    def compact() -> Any:
        return make_fake_compact_tensor(dtype, (m, n), stride_order=(1, 0), assumed_align=16)

    strided = make_fake_tensor(
        dtype, (m, n), stride=(cute.sym_int64(divisibility=8), 1), assumed_align=16
    )
    launcher = ScaleAdd(n, alpha_steps)
    return launcher, ([compact(), strided], compact(), cutlass.Float32(1.0))


def cluster_sum(n: int = ROW, cluster: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """Row sums in float32 with shared memory, barriers, a cluster launch and dependent launch."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from tests.kernels_cute import ClusterSum

    m = cute.sym_int(divisibility=cluster)
    x = make_fake_compact_tensor(cutlass.Float32, (m, n), stride_order=(1, 0), assumed_align=16)
    y = make_fake_compact_tensor(cutlass.Float32, (m,), assumed_align=4)
    return ClusterSum(n, cluster), (x, y)


def spilling(elements: int = 64) -> tuple[Any, tuple[Any, ...]]:
    """A kernel with a register array indexed at run time, which ptxas must put on the stack."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from tests.kernels_cute import Spilling

    x = make_fake_compact_tensor(cutlass.Float32, (128, elements), stride_order=(1, 0))
    y = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    return Spilling(elements), (x, y)


def shared_hog(size: int) -> tuple[Any, tuple[Any, ...]]:
    """A kernel that asks for ``size`` bytes of dynamic shared memory."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from tests.kernels_cute import SharedHog

    y = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    return SharedHog(size), (y,)


def broken() -> tuple[Any, tuple[Any, ...]]:
    """A kernel that the DSL refuses while it traces."""
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor

    from tests.kernels_cute import Broken

    return Broken(), (make_fake_compact_tensor(cutlass.Float32, (128,)),)


def crashing() -> tuple[Any, tuple[Any, ...]]:
    """A builder that takes its whole process down."""
    import os

    os.abort()


def must_not_build() -> tuple[Any, tuple[Any, ...]]:
    """A builder for requests that have to be served from the cache."""
    raise AssertionError("the builder ran although the kernel was in the cache")


def request(name: str, *args: Any, arch: str = "sm_90a", **fields: Any) -> CompileRequest:
    """A request for the builder called ``name``; the key holds its name and arguments."""
    builder = getattr(sys.modules[__name__], name)
    return CompileRequest(
        key=f'{{"test": "{name}", "args": {list(args)}}}',
        arch=arch,
        name=name,
        build=functools.partial(builder, *args),
        **fields,
    )


class ArchProbe:
    """A builder that notes which architecture the DSL has while it runs."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.seen = ""

    def __call__(self) -> tuple[Any, tuple[Any, ...]]:
        from cutlass.cutlass_dsl import CuTeDSL

        self.seen = CuTeDSL._get_dsl().get_arch_enum().to_string()
        return scale_add()
