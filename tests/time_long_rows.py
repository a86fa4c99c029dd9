"""Times on a GPU of the functions of `tests.test_long_rows` beside Inductor's and PyTorch's, cold
L2: ``python -m tests.time_long_rows [NAME ...]``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutesuper as cs
from cutesuper.measure import device_of, device_us
from tests.test_long_rows import LONGEST

#: besides those that are tested: shapes that took one kernel before, and more of them
MORE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "more than 2^31 elements": (F.silu, ((70001, 32768),)),
    "maximum in the middle, aligned": (lambda x: x.amax(1), ((64, 4096, 4096),)),
    "sum in the middle, many": (lambda x: x.sum(1), ((1024, 2048, 256),)),
    "instance norm": (F.instance_norm, ((16, 256, 64, 64),)),
    "deviation of all": (lambda x: x.std(), ((4096, 4096),)),
    "average pool": (lambda x: x.mean((2, 3)), ((32, 512, 56, 56),)),
    "sum of all": (lambda x: x.sum(), ((4096, 4096),)),
}


def times(f: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]) -> list[float]:
    """Microseconds of ours, Inductor's and PyTorch's."""
    device = torch.device("cuda")

    def draw(n: int) -> list[Any]:
        del n
        return [torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes]

    ours, inductor = cs.superoptimize(f, draw(0)), torch.compile(f)
    on = device_of(device)
    assert on is not None
    calls = [(lambda inputs, g=g: g(*inputs)) for g in (ours, inductor, f)]
    return device_us(calls, draw, on)


def main() -> None:
    """Print a line for each function."""
    cases = LONGEST | MORE
    for name in sys.argv[1:] or cases:
        with torch.no_grad():
            us = times(*cases[name])
        torch.cuda.empty_cache()
        shown = "  ".join(f"{t:9.1f}" for t in us)
        print(f"{name:32} {shown}   {us[0] / min(us[1:]):5.2f} of the best other", flush=True)


if __name__ == "__main__":
    print(f"{'us':32} {'ours':>9}  {'Inductor':>9}  {'PyTorch':>9}")
    main()
