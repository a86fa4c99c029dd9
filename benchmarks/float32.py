"""``python -m benchmarks.float32``: products of float32 operands beside cuBLAS, times and errors.

Each line is one product ``X W^T``: both precisions of ours, and cuBLAS' in the same two settings of
`torch.set_float32_matmul_precision`, in microseconds of one run. Errors are the largest one against
float64, in units of the last place (2^-23) of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import cutesuper as cs
from cutesuper.ir.precision import EXACT, PRECISIONS, ROUNDED
from cutesuper.measure import CudaDevice, device_us

#: M, K, N; W is stored (N, K), or (K, N) where N is negative
SHAPES = (
    (1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (128, 4096, 14336), (300, 4096, 4096),
    (512, 4096, 4096), (1024, 4096, 4096), (4096, 4096, 4096), (4096, 4096, -4096),
    (8192, 4096, 14336), (256, 14336, 4096), (4096, 1024, 1024), (4096, 1024, -1024),
    (1000, 4097, 1001), (32768, 64, 1024),
)  # fmt: skip


def ours(m: int, k: int, n: int, precision: str) -> Callable[[Sequence[Any]], Any]:
    """Our product of a set ``[X, W]``."""
    g = cs.new_kernel_graph()
    x = g.new_input((m, k), "float32", "X")
    w = g.new_input((n, k) if n > 0 else (k, -n), "float32", "W")
    g.mark_output(g.matmul(x, g.transpose(w) if n > 0 else w, precision))
    kernel = cs.superoptimize(g)
    return lambda tensors: kernel(*tensors)


def cublas(n: int, precision: str) -> Callable[[Sequence[Any]], Any]:
    """PyTorch's, with the setting that stands when it is recorded."""

    def call(tensors: Sequence[Any]) -> Any:
        x, w = tensors
        torch.set_float32_matmul_precision(precision)
        try:
            return x @ (w.t() if n > 0 else w)
        finally:
            torch.set_float32_matmul_precision(EXACT)

    return call


def error(call: Callable[[Sequence[Any]], Any], tensors: Sequence[torch.Tensor], n: int) -> float:
    """The largest error of a call, in ulp of the largest result."""
    x, w = (t.double() for t in tensors)
    exact = x @ (w.t() if n > 0 else w)
    found = call(list(tensors))
    found = found[0] if isinstance(found, tuple | list) else found
    return ((found - exact).abs().max() / exact.abs().max()).item() * 2**23


def measure(m: int, k: int, n: int) -> str:
    """A line of the table."""

    def draw(_: int) -> list[torch.Tensor]:
        shapes = (m, k), ((n, k) if n > 0 else (k, -n))
        return [torch.randn(s, device="cuda") for s in shapes]

    calls = [make(p) for p in PRECISIONS for make in (
        lambda p: ours(m, k, n, p), lambda p: cublas(n, p))]  # fmt: skip
    times = device_us(calls, draw, CudaDevice())
    tensors = draw(0)
    errors = [error(c, tensors, n) for c in calls]
    cells = (f"{us:8.1f} {e:8.1f}" for us, e in zip(times, errors, strict=True))
    return f"{m}x{k}x{abs(n)}{'' if n > 0 else ' (K, N)'}".ljust(24) + "  ".join(cells)


def main() -> None:
    """Print the table."""
    names = (f"{who} {p}" for p in (EXACT, ROUNDED) for who in ("ours", "cuBLAS"))
    print("us, error in ulp".ljust(24) + "  ".join(name.rjust(17) for name in names), flush=True)
    for shape in SHAPES:
        print(measure(*shape), flush=True)


if __name__ == "__main__":
    main()
