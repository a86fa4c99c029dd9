"""Layers of a decode step, launched with programmatic dependent launch, for any batch size.

The weights are declared constant, so each kernel loads its weights while its predecessor is still
running. One optimization serves every batch size: variants are made per bucket, when first called.

    python examples/decode_chain.py
"""

from __future__ import annotations

import torch

import cutesuper as cs

WIDTH, LAYERS = 1024, 4


def layer() -> cs.Kernel:
    """silu(rms_norm(x) @ w) + x for any number of tokens."""
    g = cs.new_kernel_graph()
    x = g.new_input(dims=(cs.symbol("tokens", hint=16), WIDTH), dtype=cs.bfloat16)
    gain = g.new_input(dims=(WIDTH,), dtype=cs.bfloat16, constant=True)
    w = g.new_input(dims=(WIDTH, WIDTH), dtype=cs.bfloat16, constant=True)
    g.mark_output(g.silu(g.matmul(g.rms_norm(x, gain), w)) + x)
    return g.superoptimize(dependent_launch=True)


def main() -> None:
    """Run a few layers for several batch sizes and compare with PyTorch in float64."""
    kernel = layer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    weights = [
        (
            torch.rand(WIDTH, device=device, dtype=dtype) + 0.5,
            torch.randn(WIDTH, WIDTH, device=device, dtype=dtype) / WIDTH**0.5,
        )
        for _ in range(LAYERS)
    ]
    for tokens in (1, 7, 16, 40):
        x = torch.randn(tokens, WIDTH, device=device, dtype=dtype)
        y, exact = x, x.double()
        for gain, w in weights:
            y = kernel(y, gain, w)
            normal = torch.nn.functional.rms_norm(exact, (WIDTH,), gain.double(), eps=1e-6)
            exact = torch.nn.functional.silu(normal @ w.double()) + exact
        error = ((y.double() - exact).norm() / exact.norm()).item()
        print(f"{tokens:3d} tokens, {LAYERS} layers: relative error {error:.1e}")


if __name__ == "__main__":
    main()
