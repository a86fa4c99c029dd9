"""muGraphs from a JSON file of the Mirage project: read, verified, run.

    python examples/mirage_graph.py

The file has three muGraphs for RMSNorm + Linear in Mirage's format, written by hand: a right one,
one that divides by the mean, and one with an operator that no block program has.
"""

from __future__ import annotations

from pathlib import Path

import torch

import cutesuper as cs
from cutesuper.ir.text import mugraph_text
from cutesuper.verify.numeric import execute


def main() -> None:
    """Say of each muGraph whether it is RMSNorm + Linear; run the first."""
    g = cs.new_kernel_graph()
    x = g.new_input(dims=(16, 1024), dtype=cs.float16)
    w = g.new_input(dims=(1024, 512), dtype=cs.float16)
    g.mark_output(g.matmul(g.rms_norm(x, eps=0.0), w))

    found = cs.load_mirage(Path(__file__).with_suffix(".json"), on_error="keep")
    for k, mu in enumerate(found):
        if isinstance(mu, cs.MuGraph):
            print(f"muGraph {k}:", cs.verify(g, mu).summary())
        else:
            print(f"muGraph {k}: refused:", str(mu).rpartition(": ")[2])

    first = found[0]
    assert isinstance(first, cs.MuGraph)
    print("\n" + mugraph_text(first) + "\n")
    a, b = torch.randn(16, 1024), torch.randn(1024, 512) / 32
    (z,) = execute(first, [a, b], torch.float32)
    expected = a / a.square().mean(1, keepdim=True).sqrt() @ b
    print("same as PyTorch:", torch.allclose(z, expected, atol=1e-4))


if __name__ == "__main__":
    main()
