"""A few small kernels for compute-sanitizer; exit code 1 if a result is wrong.

compute-sanitizer --tool memcheck python3 tests/sanitize.py
compute-sanitizer --tool racecheck python3 tests/sanitize.py
compute-sanitizer --tool synccheck python3 tests/sanitize.py

In some runs racecheck reports a few hazards for "attention, lengths" and "attention, pages", always
between the last write before the named barrier of two warpgroups and the read after it, in a block
of which only one warpgroup has a tile. Other runs of the same binary report none.

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 so that every tensor is an allocation of its own, whose ends
memcheck sees. Arguments choose cases by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import cutesuper
from benchmarks.workloads_attention import serving
from cutesuper.ir.dims import Symbol
from cutesuper.ir.evaluate import evaluate
from cutesuper.pipeline import superoptimize
from cutesuper.runtime.compile import compile_kernel
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from tests import zoo
from tests.attention import Attention, serving_inputs
from tests.chains import Chain
from tests.odd_products import of_columns
from tests.plans import Linear, request_of
from tests.row_programs import (
    Case,
    layer_norm_backward,
    losses,
    per_head_backward,
    rms_backward,
    rms_forward,
    row_kernel,
    scaled_heads,
    softmax_and_columns,
    softmax_forward,
    squared_error,
)
from tests.zoo import judge

K, N = 256, 192


def searched(graph: Any) -> Callable[[int], bool]:
    """A graph through the whole road."""

    def case(seed: int) -> bool:
        kernel = superoptimize(graph)
        inputs = zoo.draw(graph, seed, "cuda")
        outputs = kernel(inputs)
        torch.cuda.synchronize()
        return all(judge(graph, inputs, outputs))

    return case


def planned(linear: Linear, dependent: bool = False) -> Callable[[int], bool]:
    """A plan made by hand: the search would not split anything so small over a cluster."""

    def case(seed: int) -> bool:
        assert isinstance(linear.m, int)
        graph = zoo.rms_norm_linear(linear.m, linear.k, linear.n, linear.dtype, linear.gain)
        inputs = zoo.draw(graph, seed, "cuda")
        out = torch.full_like(evaluate(graph, inputs)[0], torch.nan)
        given = dict(zip((graph.nodes[i].name for i in graph.inputs), inputs, strict=True))
        plan = linear.plan(dependent_launch=dependent)
        kernel = compile_kernel(request_of(plan)).load()
        kernel(*[out if a.written else given[a.name] for a in plan.arguments])
        torch.cuda.synchronize()
        return all(judge(graph, inputs, [out], [zoo.eager_norm_linear(inputs)]))

    return case


def chained(chain: Chain, graph: Any) -> Callable[[int], bool]:
    """A chain planned by hand, with a cluster; ``graph`` is what it computes."""

    def case(seed: int) -> bool:
        inputs = zoo.draw(graph, seed, "cuda")
        out = torch.full_like(evaluate(graph, inputs)[0], torch.nan)
        given = dict(zip((graph.nodes[i].name for i in graph.inputs), inputs, strict=True))
        plan = chain.plan()
        kernel = compile_kernel(request_of(plan)).load()
        kernel(*[out if a.written else given[a.name] for a in plan.arguments])
        torch.cuda.synchronize()
        return all(judge(graph, inputs, [out]))

    return case


def attending(attention: Attention, dependent: bool = False) -> Callable[[int], bool]:
    """Attention planned by hand, launched twice: what the first leaves, the second finds."""

    def case(seed: int) -> bool:
        kernel = attention.kernel(dependent)
        inputs = zoo.draw(kernel.graph, seed, "cuda")
        outputs = [kernel(*inputs) for _ in range(2)]
        torch.cuda.synchronize()
        return all(judge(kernel.graph, inputs, outputs[:1])) and torch.equal(*outputs)

    return case


def walking(
    case: Case, schedule: RowLoopSchedule | None = None, dependent: bool = False, rows: int = 0
) -> Callable[[int], bool]:
    """A row loop planned by hand, launched twice: what the first leaves, the second finds."""

    def run_case(seed: int) -> bool:
        kernel = row_kernel(case, dependent, schedule)
        drawn = zoo.draw(kernel.graph, seed, "cuda", {"M": rows} if rows else None)
        inputs = [t if t.is_floating_point() else t.abs() for t in drawn]  # labels that are columns
        first, second = (kernel(inputs) for _ in range(2))
        torch.cuda.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return same and all(judge(kernel.graph, inputs, first))

    return run_case


def served(page: int) -> Callable[[int], bool]:
    """Sequences of mixed lengths, one of them empty, side by side or in pages."""

    def case(seed: int) -> bool:
        kernel = superoptimize(serving(page).graph(cutesuper, (3, 256, 8, 2, 128), "bfloat16"))
        inputs = serving_inputs(kernel.graph, seed, "cuda", [0, 65, 256])
        outputs = kernel(inputs)
        torch.cuda.synchronize()
        return all(judge(kernel.graph, inputs, outputs))

    return case


CASES: dict[str, Callable[[int], bool]] = {
    "one row": searched(zoo.rms_norm_linear(1, K, N)),
    "17 rows": searched(zoo.rms_norm_linear(17, K, N)),
    "gain": searched(zoo.rms_norm_linear(17, K, N, gain=True)),
    "ragged": searched(zoo.rms_norm_linear(17, 264, 200, gain=True)),
    "transposed weight": searched(zoo.rms_norm_linear(17, K, N, transposed=True)),
    "cluster of 2": planned(Linear(m=17, k=K, n=N, tile_k=64, cluster=2)),
    "cluster of 4, gain": planned(Linear(m=1, k=K, n=N, tile_m=8, tile_k=64, cluster=4, gain=True)),
    "dependent": planned(Linear(m=17, k=K, n=N, tile_k=64, cluster=2), dependent=True),
    "staged epilogue": planned(Linear(m=100, k=K, n=N, tile_m=64, tile_k=64)),
    "rows side by side": searched(of_columns(70, 100, 72, "float16")),
    "parts of the grid, copied": searched(of_columns(130, 1500, 65, "float16")),
    "layer norm": searched(zoo.layer_norm_linear(17, 264, 200)),
    "layer norm in a cluster": searched(zoo.layer_norm_linear(3, 1024, N, residual=True)),
    "norm of rows": searched(zoo.rows("rms_norm", (17, 1000))),
    "softmax of odd rows": searched(zoo.rows("softmax", (5, 333), "float32")),
    "two products": searched(zoo.gated_mlp(17, K, N)),
    "two outputs": searched(zoo.projections(17, K, (N, N))),
    "lora, cluster": chained(Chain(m=17, k=K, n=N, rank=8, cluster=2), zoo.lora(17, K, N, 8)),
    "two operands, cluster": chained(
        Chain(m=17, k=K, n=N, rank=40, cluster=2, kind="two"), zoo.two_operands(17, K, N, 40)
    ),
    "dlrm, column cluster": searched(zoo.dlrm(17, K, 200)),
    "attention": attending(Attention(rows=70, keys=300)),
    "attention, keys (d, S)": attending(Attention(rows=20, keys=200, keys_last=True, key_tile=128)),
    "attention, cluster": attending(Attention(rows=20, keys=500, cluster=4)),
    "attention, grid": attending(Attention(group=4, rows=0, keys=500, width=128, grid=3)),
    "attention, cluster and grid": attending(
        Attention(group=4, rows=0, keys=1000, width=128, grid=3, cluster=2)
    ),
    "attention, dependent": attending(
        Attention(group=4, rows=0, keys=1000, width=128, grid=3, cluster=2), dependent=True
    ),
    "attention, causal": attending(
        Attention(group=4, rows=37, row_tile=16, keys=50, causal="bottom_right", cluster=2)
    ),
    "attention, norms": attending(Attention(rows=20, keys=200, norm="QV", cluster=2)),
    "attention, lengths": served(0),
    "attention, pages": served(16),
    "rows, ring": walking(rms_backward(600, 512, 16, 4)),
    "rows, ring, dependent": walking(layer_norm_backward(600, 512, 16, 4), dependent=True),
    "rows, tails of the ring": walking(rms_backward(599, 520, 16, 4)),
    "rows, four stages": walking(
        rms_backward(99, 1024, 16, 4), RowLoopSchedule(64, 8, 2, 2, stages=4, blocks=16)
    ),
    "rows, read again": walking(
        rms_backward(99, 1024, 16, 4), RowLoopSchedule(32, 8, 4, 2, kept=False, blocks=16)
    ),
    "rows, straight": walking(rms_backward(599, 333, 16, 4)),
    "rows, slices": walking(rms_backward(40, 1000, 20, 2)),
    "rows, slices of heads": walking(scaled_heads(40, 4, 72, 8, 4)),
    "rows, heads": walking(per_head_backward(600, 4, 64, 8, 16)),
    "rows, cluster": walking(layer_norm_backward(100, 4096, 8, 1, cluster=2)),
    "rows, parts of several sizes": walking(rms_backward(33, 4104, 4, 1, cluster=4)),
    "rows, loss": walking(squared_error(100, 520, 16, 4)),
    "rows, losses": walking(losses(600, 512)),
    "rows, losses in a cluster": walking(losses(50, 4104, 4)),
    "rows, blocks of a cluster meet": walking(softmax_forward(20, 65536, 8)),
    "rows, tiles of a cluster": walking(
        softmax_forward(20, 32768, 2), RowLoopSchedule(512, 8, 4, 1, blocks=4)
    ),
    "rows, read again in a cluster": walking(
        softmax_forward(20, 32768, 2), RowLoopSchedule(512, 8, 4, 1, kept=False, blocks=4)
    ),
    "rows, sums in a cluster": walking(softmax_and_columns(40, 32768, 4, 1, cluster=2)),
    "rows, one tile in a cluster": walking(
        softmax_forward(200, 16384, 2), RowLoopSchedule(256, 8, 4, 1, stages=0, blocks=0)
    ),
    "rows, symbolic": walking(rms_backward(Symbol("M", 4096), 512, 16, 4), rows=37),
    "rows, forward in a cluster": walking(softmax_forward(20, 8200, 4)),
    "rows, forward, symbolic": walking(rms_forward(Symbol("M", 64), 8192, 2), rows=5),
    "attention, many rows": attending(Attention(rows=200, row_tile=128, keys=200)),
}


def main(names: list[str]) -> int:
    """Run the cases; the exit code."""
    # cuDNN has hazards of its own, and does not end well under synccheck
    torch.backends.cuda.enable_cudnn_sdp(False)
    wrong = [n for n in names or CASES if not run(n)]
    return 1 if wrong else 0


def run(name: str) -> bool:
    """One case, and a line about it."""
    good = CASES[name](1)
    print(f"{name}: {'ok' if good else 'WRONG'}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
