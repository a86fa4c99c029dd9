"""Write a small model as a library for C++: ``python export.py FOLDER [--target h200]``.

The folder gets ``mlp.so``, ``mlp.h`` and the parameters in one file; ``main.cpp`` runs the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import cutesuper as cs


class MLP(nn.Module):
    """Norm, gated MLP and residual of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def main() -> None:
    """Export the model, for any number of rows up to 4096."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default=None, help="h200, h100: where there is no GPU")
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MLP(args.width).half().eval().requires_grad_(False)
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = cs.superoptimize(
        model, (torch.randn(16, args.width).half(),), dynamic_shapes=({0: rows},),
        target=args.target,
    )  # fmt: skip
    args.folder.mkdir(parents=True, exist_ok=True)
    program.export(args.folder / "mlp.so", header=args.folder / "mlp.h")
    # in the order of the header, which has them between the argument and the result
    with (args.folder / "parameters.bin").open("wb") as file:
        for parameter in model.parameters():
            file.write(parameter.numpy().tobytes())
    print(f"{program}: mlp.so, mlp.h and parameters.bin are in {args.folder}")


if __name__ == "__main__":
    main()
