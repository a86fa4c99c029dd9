"""RMSNorm + Linear as one kernel: build the graph, look at what was found, run it.

Run it with ``python examples/rmsnorm_linear.py``.
"""

from __future__ import annotations

import torch

import cutesuper as cs


def main() -> None:
    """Optimize, explain, compare with PyTorch."""
    g = cs.new_kernel_graph()
    x = g.new_input(dims=(16, 4096), dtype=cs.float16)
    w = g.new_input(dims=(4096, 6144), dtype=cs.float16)
    g.mark_output(g.matmul(g.rms_norm(x, normalized_shape=(4096,)), w))
    kernel = g.superoptimize()
    print(kernel.explain())

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(16, 4096, device=device, dtype=torch.float16)
    b = torch.randn(4096, 6144, device=device, dtype=torch.float16) / 64
    expected = torch.nn.functional.rms_norm(a, (4096,), eps=1e-6) @ b
    print("largest difference from PyTorch:", (kernel(a, b) - expected).abs().max().item())


if __name__ == "__main__":
    main()
