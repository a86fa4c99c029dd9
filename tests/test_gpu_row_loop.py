"""Row loops on a GPU: every way to load, reduce and sum, odd extents, many launches.

Programs by hand fix the grid, the cluster and the visits (`tests.row_programs`). Outputs and the
memory of partial results are full of NaN before every launch. Kernels are few (some 70) because
each takes seconds to compile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import DType, bfloat16, float16, float32, int32, int64
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.scratch import ScratchMemory
from cutesuper.skeletons.rows.plan import RowLoopPlan
from cutesuper.skeletons.rows.schedule import RowLoopSchedule
from tests import zoo
from tests.row_programs import (
    Case,
    batched_sum,
    causal_softmax,
    column_sum,
    gain_of_columns,
    layer_norm_backward,
    losses,
    maximum_and_sum,
    per_head_backward,
    rms_backward,
    rms_forward,
    row_kernel,
    scaled_heads,
    shares,
    softmax_and_columns,
    softmax_forward,
    squared_error,
)
from tests.test_gpu import check, poisoned, run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results are NaN before a launch: what is read was written by this launch."""
    allot = ScratchMemory.allot

    def poison(self: ScratchMemory, values: Any) -> list[Any]:
        found = allot(self, values)
        for t in found:
            if t.is_floating_point():
                t.fill_(torch.nan)
        return found

    monkeypatch.setattr(ScratchMemory, "allot", poison)


def plan_of(kernel: Kernel) -> RowLoopPlan:
    plan = kernel.kernels[0].plan
    assert isinstance(plan, RowLoopPlan)
    return plan


def counters_are_zero(kernel: Kernel) -> None:
    """Check that counters are as the next launch has to find them, whatever the stream."""
    kept = kernel._main._memory._kept.values()
    assert len(kept) > 0 or not plan_of(kernel).meets
    assert all(not t.any() for tensors, _ in kept for t in tensors)


def same_bits(kernel: Kernel, inputs: list[torch.Tensor], times: int = 3) -> None:
    """Checked against float64 once, and the same in every later launch."""
    first = check(kernel, inputs)
    for _ in range(times):
        again = run(kernel, inputs)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))
    counters_are_zero(kernel)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits as integers, since NaN (the loss of a label that is no class) is not equal to
    itself."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


# -------------------------------------------------------------------------------------- any program

FIXED: dict[str, Callable[[], Case]] = {
    "rms backward": lambda: rms_backward(4096, 4096, 128, 2),
    "rms backward, few rows": lambda: rms_backward(128, 4096, 64, 2),
    "rms backward, 512 rows": lambda: rms_backward(512, 4096, 128, 2, dtype=float16),
    "rms backward, one block": lambda: rms_backward(3, 256, 1, 4),
    "rms backward, float16": lambda: rms_backward(1001, 1000, 132, 4, dtype=float16),
    "rms backward, float32": lambda: rms_backward(1000, 1024, 125, 4, dtype=float32),
    "rms backward, long rows": lambda: rms_backward(300, 16384, 66, 1, cluster=2),
    "rms backward, parts of several sizes": lambda: rms_backward(140, 16392, 30, 1, cluster=4),
    "rms backward, 16 blocks a row": lambda: rms_backward(100, 65536, 7, 1, cluster=16),
    "rms backward, parts without columns": lambda: rms_backward(600, 72, 8, 4, cluster=8),
    "rms backward, short rows in a cluster": lambda: rms_backward(600, 64, 8, 4, cluster=8),
    "rms backward, odd rows": lambda: rms_backward(1001, 1001, 132, 4),
    "rms backward, few odd rows": lambda: rms_backward(37, 1001, 37, 1),
    "rms backward, 2 elements": lambda: rms_backward(999, 2, 100, 4),
    "rms backward, 12 elements": lambda: rms_backward(70000, 12, 132, 4, dtype=float32),
    "rms backward, 2056 elements": lambda: rms_backward(777, 2056, 132, 2),
    "rms backward, read again": lambda: rms_backward(600, 28672, 132, 1),
    "rms backward, threads with two rows": lambda: rms_backward(1001, 2048, 132, 4),
    "rms backward, one tile a block": lambda: rms_backward(264, 4096, 132, 2),
    "rms backward, fewer rows than blocks": lambda: rms_backward(1001, 1024, 132, 8),
    "layer norm backward": lambda: layer_norm_backward(1000, 4096, 128, 2),
    "layer norm backward, read again": lambda: layer_norm_backward(99, 65536, 30, 1, cluster=4),
    "layer norm backward, 8 blocks a row": lambda: layer_norm_backward(70, 65536, 15, 1, cluster=8),
    "layer norm backward, long rows": lambda: layer_norm_backward(512, 16384, 66, 1, cluster=2),
    "layer norm backward, float32": lambda: layer_norm_backward(99, 777, 33, 1, dtype=float32),
    "heads": lambda: per_head_backward(4096, 8, 128, 16, 32),
    "heads, few rows": lambda: per_head_backward(100, 4, 64, 33, 1),
    "scaled heads": lambda: scaled_heads(128, 8, 72, 8, 8),
    "scaled heads, many rows": lambda: scaled_heads(2000, 8, 72, 16, 8),
    "batched": lambda: batched_sum(512, 8, 1024, 16, 8),
    "column sum": lambda: column_sum(4096, 4096, 132, 4, dtype=float16),
    "column sum, wide": lambda: column_sum(256, 65536, 16, 2, columns=8192),
    "maximum and sum": lambda: maximum_and_sum(1000, 1001, 125, 4),
    "maximum and sum, few rows": lambda: maximum_and_sum(100, 512, 25, 4, dtype=float32),
    "squared error": lambda: squared_error(4096, 4096, 128, 2),
    "squared error, odd rows": lambda: squared_error(333, 1001, 37, 3, dtype=float32),
    "causal softmax": lambda: causal_softmax(300, 1000),
    "softmax, long rows": lambda: softmax_forward(64, 131072, 8),
    "softmax, odd rows": lambda: softmax_forward(64, 100001, 8),
    "softmax, 64 elements a thread": lambda: softmax_forward(200, 65536, 2),
    "softmax, 64 elements in 8 blocks": lambda: softmax_forward(50, 262144, 8),
    "softmax, 128 elements a thread": lambda: softmax_forward(40, 524288, 8),
    "softmax and columns": lambda: softmax_and_columns(1001, 4096, 132, 2),
    "softmax and columns, long rows": lambda: softmax_and_columns(301, 32768, 60, 1, cluster=2),
    "softmax, float32": lambda: softmax_forward(70, 65536, 2, dtype=float32),
    "rms forward, long rows": lambda: rms_forward(20, 262144, 16),
    "rms forward, weights read for every row": lambda: rms_forward(300, 65536, 2),
}


@pytest.mark.parametrize("name", FIXED)
def test_programs(name: str) -> None:
    kernel = row_kernel(FIXED[name]())
    for seed in range(2):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda"))


@pytest.mark.ptx
def test_functions_of_columns_beside_sums() -> None:
    kernel = row_kernel(gain_of_columns(37, 72, 4, 2))
    same_bits(kernel, zoo.draw(kernel.graph, 0, "cuda"))


M = Symbol("M", 4096)
FEW = Symbol("M", 128)
#: no rows to fill a tile, one more than blocks, tails of tiles
EXTENTS = (1, 2, 3, 5, 7, 31, 132, 133, 1000, 4097)
SYMBOLIC: dict[str, tuple[Callable[[], Case], tuple[int, ...]]] = {
    "rms backward": (lambda: rms_backward(M, 1024, 132, 4), (*EXTENTS, 70000)),
    "rms backward, few rows": (lambda: rms_backward(FEW, 2048, 64, 2), EXTENTS),
    "rms backward, cluster": (
        lambda: rms_backward(M, 8192, 66, 1, cluster=2, dtype=float32), EXTENTS,
    ),
    "layer norm backward": (lambda: layer_norm_backward(M, 1024, 132, 8), (*EXTENTS, 70000)),
    "layer norm backward, cluster": (
        lambda: layer_norm_backward(M, 65536, 30, 1, cluster=4), EXTENTS[:-1],
    ),
    "heads": (lambda: per_head_backward(M, 8, 128, 16, 32), EXTENTS),
    "batched": (lambda: batched_sum(M, 8, 512, 16, 8, dtype=float16), EXTENTS),
    "column sum": (lambda: column_sum(M, 1000, 132, 4), (*EXTENTS, 70000)),
    "column sum, float32": (
        lambda: column_sum(M, 520, 132, 4, dtype=float32), (*EXTENTS, 8 * 132 * 16, 70000),
    ),
    "squared error": (lambda: squared_error(M, 1024, 132, 4), (*EXTENTS, 70000)),
    "squared error, cluster": (lambda: squared_error(M, 16384, 66, 1, cluster=2), EXTENTS[:-1]),
    "softmax": (lambda: softmax_forward(M, 16392, 2, dtype=float16), EXTENTS[:-1]),
    "rms forward": (lambda: rms_forward(M, 65536, 4), EXTENTS[:-2]),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMBOLIC)
def test_any_number_of_rows(name: str) -> None:
    make, extents = SYMBOLIC[name]
    kernel = row_kernel(make())
    for seed, m in enumerate(extents):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda", {"M": m}), times=1)


# ------------------------------------------------------------------------------------------ labels


def labels_of(m: int, n: int, seed: int = 0, wrong: bool = True) -> torch.Tensor:
    """Labels [M, 1] of m rows: first, last and any columns, -100, and with ``wrong`` others that
    are no column."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(n, (m, 1), generator=generator)
    special = [0, n - 1, -100, *([-1, n, 1 << 31, 1 << 40, -(1 << 40)] if wrong else [])]
    for i, label in enumerate(special):
        found[i::17] = label
    return found


#: rows in registers, in a ring, read again from it, and in clusters; parts of accesses and of rows
LOSSES: dict[str, tuple[Callable[[], Case], int, int]] = {
    "": (lambda: losses(300, 4096), 300, 4096),
    "float16": (lambda: losses(1001, 1024, dtype=float16, labels=int32), 1001, 1024),
    "float32": (lambda: losses(200, 5000, dtype=float32), 200, 5000),
    "odd": (lambda: losses(101, 1001), 101, 1001),
    "odd, float16": (lambda: losses(64, 4097, dtype=float16), 64, 4097),
    "2 classes": (lambda: losses(1000, 2), 1000, 2),
    "12 classes": (lambda: losses(1000, 12), 1000, 12),
    "1000 classes": (lambda: losses(999, 1000), 999, 1000),
    "one block": (lambda: losses(100, 16384), 100, 16384),
    "cluster of 2": (lambda: losses(100, 32768, 2), 100, 32768),
    "cluster of 4, parts of several sizes": (lambda: losses(70, 50264, 4), 70, 50264),
    "cluster of 4, odd": (lambda: losses(70, 50257, 4, float32), 70, 50257),
    "cluster of 8": (lambda: losses(50, 131072, 8), 50, 131072),
    "cluster of 16": (lambda: losses(33, 262144, 16, float16, int32), 33, 262144),
    "parts without columns": (lambda: losses(60, 72, 8), 60, 72),
}


def with_labels(kernel: Kernel, m: int, n: int, dtype: DType, seed: int) -> list[torch.Tensor]:
    """Inputs of `losses`; int32 labels are the same, those that do not fit cut off."""
    x, w, *_ = zoo.draw(kernel.graph, seed, "cuda", {"M": m})
    labels = [labels_of(m, n, seed + k).cuda() for k in range(2)]
    if dtype == int32:
        labels = [t.clamp(-(1 << 31), (1 << 31) - 1) for t in labels]
    return [x, w, *(t.to(dtype.torch) for t in labels)]


@pytest.mark.parametrize("name", LOSSES)
def test_labels(name: str) -> None:
    """Picks of the first and the last column, of any, and of none."""
    make, m, n = LOSSES[name]
    kernel = row_kernel(make())
    assert len(plan_of(kernel).picked) == 2
    dtype = kernel.graph.nodes[kernel.graph.inputs[2]].dtype
    for seed in range(2):
        same_bits(kernel, with_labels(kernel, m, n, dtype, seed))


@pytest.mark.parametrize("cluster", [1, 4])
def test_labels_of_any_number_of_rows(cluster: int) -> None:
    n = 4096 if cluster == 1 else 65536
    kernel = row_kernel(losses(M, n, cluster))
    for seed, m in enumerate(EXTENTS[:-1]):
        same_bits(kernel, with_labels(kernel, m, n, int64, seed), times=1)


@pytest.mark.parametrize("name", ["ring", "read again", "straight"])
def test_labels_with_any_schedule(name: str) -> None:
    """From the stage, and from memory."""
    schedule = {
        "ring": RowLoopSchedule(128, 8, 4, 2, stages=2, blocks=125),
        "read again": RowLoopSchedule(128, 8, 4, 2, stages=2, kept=False, blocks=125),
        "straight": RowLoopSchedule(128, 8, 4, 2, stages=0, blocks=125),
    }[name]
    kernel = row_kernel(losses(1001, 4096), schedule=schedule)
    same_bits(kernel, with_labels(kernel, 1001, 4096, int64, 5))


def test_maxima_of_extremes() -> None:
    """NaN wins, infinities and zeros of both signs are numbers like others; in either half of a
    register."""
    kernel = row_kernel(softmax_forward(64, 1000, 1))
    [x] = zoo.draw(kernel.graph, 3, "cuda")
    x[3, 100], x[4, 101], x[5, 999], x[6, 0] = [torch.nan] * 4
    x[7, 10], x[8, 11], x[9], x[10] = -torch.inf, -torch.inf, -0.0, -1e4
    x[11, 500] = 1e4
    [y] = run(kernel, [x])
    assert y[3:7].isnan().all() and not y[:3].isnan().any() and not y[7:].isnan().any()
    rest = [i for i in range(64) if not 3 <= i < 7]
    torch.testing.assert_close(y[rest].float(), x[rest].float().softmax(-1), rtol=2**-7, atol=1e-5)


def test_long_sums_in_float32() -> None:
    """A thread adds 248 rows. A running sum of n numbers of random signs is off by sqrt(n / 6) u of
    itself, u = 2^-24: 3.8e-7 one after the other, 1.4e-7 in groups of 16."""
    kernel = row_kernel(column_sum(131072, 512, 132, 4, dtype=float32))
    assert plan_of(kernel).carries_sums
    [x] = zoo.draw(kernel.graph, 1, "cuda")
    [y] = run(kernel, [x])
    exact = x.double().sum(0)
    assert (y.double() - exact).norm() < 2e-7 * exact.norm()


def test_32_warps_of_2_blocks() -> None:
    """Values of a block's warps are read 16 bytes at a time, behind 8 bytes that are sent."""
    schedule = RowLoopSchedule(1024, 8, 4, 1, blocks=66)
    kernel = row_kernel(rms_forward(100, 65536, 2), schedule=schedule)
    same_bits(kernel, zoo.draw(kernel.graph, 1, "cuda"))


#: rows in clusters that walk, or have one tile each, as the planner does and as it does not
CLUSTERS: dict[str, tuple[Callable[[], Case], RowLoopSchedule | None]] = {
    "one tile": (lambda: softmax_forward(3000, 65536, 4), None),
    "one tile, 2 blocks": (lambda: softmax_forward(3000, 32768, 2), None),
    "one tile, 16 blocks": (lambda: softmax_forward(700, 262144, 16), None),
    "one tile, any number of rows": (lambda: softmax_forward(M, 65536, 4, dtype=float16), None),
    "one tile, float32": (lambda: softmax_forward(700, 65536, 8, dtype=float32), None),
    "one tile, several rows": (
        lambda: softmax_forward(1001, 8192, 4),
        RowLoopSchedule(64, 8, 4, 4, stages=0, blocks=0),
    ),
    "one tile of a ring": (
        lambda: softmax_forward(301, 32768, 2),
        RowLoopSchedule(512, 8, 4, 1, stages=1, blocks=0),
    ),
    "many tiles": (
        lambda: softmax_forward(3000, 65536, 2),
        RowLoopSchedule(512, 8, 8, 1, blocks=66),
    ),
    "many tiles, read again": (
        lambda: softmax_forward(1001, 32768, 2),
        RowLoopSchedule(512, 8, 4, 1, kept=False, blocks=66),
    ),
    "parts without columns": (lambda: softmax_forward(600, 72, 8), None),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(name: str) -> None:
    """Blocks end as soon as they have what they wait for: many of them, one after the other."""
    make, schedule = CLUSTERS[name]
    kernel = row_kernel(make(), schedule=schedule)
    assert plan_of(kernel).waits_late == (name.startswith("one tile") and "ring" not in name)
    for seed, m in enumerate((1, 2, 133, 1001) if "any number" in name else (1, 2)):
        same_bits(kernel, zoo.draw(kernel.graph, seed, "cuda", {"M": m}))


@pytest.mark.parametrize(("n", "cluster"), [(4096, 1), (65536, 4)])
def test_several_exchanges(n: int, cluster: int) -> None:
    """Exponentials of a norm go into a sum of products, one of them is read by itself."""
    kernel = row_kernel(shares(200, n, cluster))
    for seed in range(2):
        [x, _] = zoo.draw(kernel.graph, seed, "cuda")
        same_bits(kernel, [x, labels_of(200, n, seed).cuda()])


#: where a row is -inf: everywhere, but for one element, in the first or the last block
HIDDEN = (slice(None), slice(1, None), slice(0, -1), slice(0, 20000), slice(-20000, None))


def infinities(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with -inf, +inf, NaN and large numbers in several places, and some without."""
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(3))
    for i, hidden in enumerate(HIDDEN):
        x[i, hidden] = -torch.inf
    x[5, n // 2] = torch.inf
    x[6, 0], x[6, n - 1] = torch.inf, -torch.inf
    x[7, : n // 2], x[7, n - 1] = -torch.inf, torch.inf
    x[8, n - 1] = torch.nan
    x[9, 0], x[9, 1:] = torch.nan, -torch.inf
    x[10] *= 1e4
    x[11, : n // 2] -= 3e4
    return x.to("cuda", dtype)


@pytest.mark.parametrize(("n", "cluster", "dtype"), [
    (65536, 2, bfloat16), (65536, 4, float16), (100001, 8, bfloat16), (65536, 4, float32),
    (28672, 1, bfloat16), (262144, 8, bfloat16), (524288, 8, bfloat16),
])  # fmt: skip
def test_infinities(n: int, cluster: int, dtype: DType) -> None:
    """NaN where PyTorch has it: rows of -inf alone, and those with +inf or NaN."""
    kernel = row_kernel(softmax_forward(32, n, cluster, dtype))
    x = infinities(32, n, dtype.torch)
    [y] = run(kernel, [x])
    want = x.double().softmax(-1)
    assert want[[0, 5, 6, 7, 8, 9]].isnan().all() and not want[1:5].isnan().any()
    assert torch.equal(y.isnan(), want.isnan())
    torch.testing.assert_close(
        y.double(), want, rtol=2**-7 if dtype != float32 else 1e-5, atol=1e-6, equal_nan=True
    )


def test_losses_of_infinities() -> None:
    n = 65536
    kernel = row_kernel(losses(32, n, 4))
    x = infinities(32, n, torch.bfloat16)
    x[12, 77] = -torch.inf
    label = torch.full((32, 1), 77, device="cuda")
    w = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    loss, _ = run(kernel, [x, w, label, label])
    want = torch.nn.functional.cross_entropy(x.double(), label[:, 0], reduction="none")[:, None]
    assert want[12] == torch.inf
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)


def random_case(i: int) -> Case:
    """1 to 3000 rows of 1 to 5000 elements in programs of all kinds."""
    rng = random.Random(i)
    m, n = rng.randint(2, 3000), rng.randint(2, 5000)
    n = n if i % 2 else -(-n // 8) * 8
    dtype = (bfloat16, float16, float32)[i % 3]
    rows, cluster = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 4))
    grid = rng.randint(1, {1: 132, 2: 66, 4: 30}[cluster])
    make = (rms_backward, layer_norm_backward, squared_error)[i // 2 % 3]
    return make(m, n, grid, rows, cluster, dtype)


@pytest.mark.parametrize("number", range(12))
def test_random_extents(number: int) -> None:
    kernel = row_kernel(random_case(number))
    same_bits(kernel, zoo.draw(kernel.graph, number, "cuda"), times=1)


#: schedules that nobody chooses by himself: (rows, elements, schedule)
SCHEDULES: dict[str, RowLoopSchedule] = {
    "one stage": RowLoopSchedule(128, 8, 1, 2, stages=1, blocks=125),
    "four stages": RowLoopSchedule(64, 8, 2, 4, stages=4, blocks=125),
    "a thread has four rows": RowLoopSchedule(128, 8, 1, 1, depth=4, blocks=125),
    "a warp has four rows": RowLoopSchedule(8, 8, 16, 4, stages=2, kept=False, blocks=125),
    "not kept": RowLoopSchedule(32, 8, 4, 4, kept=False, blocks=125),
    "not kept, one group": RowLoopSchedule(128, 8, 1, 1, stages=3, kept=False, blocks=125),
    "16 KB in a stage": RowLoopSchedule(64, 8, 2, 4, depth=1, stages=3, blocks=125),
    "straight": RowLoopSchedule(64, 4, 4, 4, stages=0, blocks=125),
    "sliced": RowLoopSchedule(128, 8, 1, 2, depth=2, stages=0, blocks=125, sliced=True),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    kernel = row_kernel(rms_backward(1001, 1024, 125, 2), schedule=SCHEDULES[name])
    same_bits(kernel, zoo.draw(kernel.graph, 1, "cuda"))


# ---------------------------------------------------------------------------------- resident rows


def normalized(n: int, dtype: DType) -> KernelGraph:
    """LayerNorm, which reads two vectors beside the row."""
    g = cs.new_kernel_graph()
    x, w, b = g.new_input((M, n), dtype), g.new_input((n,), dtype), g.new_input((n,), dtype)
    g.mark_output(g.layer_norm(x, w, b))
    return g


def gated(n: int, dtype: DType) -> KernelGraph:
    """Element-wise: blocks have strips of a row."""
    g = cs.new_kernel_graph()
    x, y = (g.new_input((M, n), dtype) for _ in range(2))
    g.mark_output(g.silu(x) * y)
    return g


def scores(n: int, dtype: DType) -> KernelGraph:
    """Softmax, which needs the row twice."""
    g = cs.new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((M, n), dtype)))
    return g


RESIDENT: dict[str, Callable[[], KernelGraph]] = {
    "layer norm, two blocks of 512": lambda: normalized(16384, bfloat16),
    "layer norm, 12296 elements": lambda: normalized(12296, float16),
    "layer norm, vectors after the row": lambda: normalized(4096, bfloat16),
    "layer norm, float32": lambda: normalized(16384, float32),
    "softmax, two blocks of 512": lambda: scores(16384, bfloat16),
    "softmax, odd": lambda: scores(9999, bfloat16),
    "strips of 2048": lambda: gated(14336, bfloat16),
    "strips of 1024": lambda: gated(5120, float16),
    "strips that end late": lambda: gated(11000, float32),
    "odd strips": lambda: gated(3001, bfloat16),
}


@pytest.mark.parametrize("name", RESIDENT)
def test_resident_rows(name: str) -> None:
    kernel = cs.superoptimize(RESIDENT[name](), tuned=False)
    for seed, m in enumerate((1, 2, 133, 1000)):
        inputs = zoo.draw(kernel.graph, seed, "cuda", {"M": m})
        first = check(kernel, inputs)
        assert same(run(kernel, inputs), first)


# --------------------------------------------------------------------------------- many launches

#: sums of which blocks meet, alone and in clusters
MEETING: dict[str, Callable[[], Case]] = {
    "blocks": lambda: rms_backward(1001, 1024, 132, 4),
    "clusters": lambda: rms_backward(150, 8192, 66, 1, cluster=2),
}
LAUNCHES = [(name, dependent) for name in MEETING for dependent in (False, True)]
launched = pytest.mark.parametrize(
    ("name", "dependent"), LAUNCHES, ids=[f"{n}{', dependent' * d}" for n, d in LAUNCHES]
)


@cache
def meeting(name: str, dependent: bool) -> Kernel:
    """One kernel object for all tests that use it."""
    kernel = row_kernel(MEETING[name](), dependent)
    assert plan_of(kernel).meets
    return kernel


def same(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@launched
def test_many_launches_in_flight(name: str, dependent: bool) -> None:
    kernel = meeting(name, dependent)
    sets = [zoo.draw(kernel.graph, seed, "cuda") for seed in range(4)]
    want = [check(kernel, inputs) for inputs in sets]
    outputs = [poisoned(kernel, sets[i % 4]) for i in range(60)]
    for i, out in enumerate(outputs):
        kernel(sets[i % 4], out=out)
    torch.cuda.synchronize()
    assert all(same(out, want[i % 4]) for i, out in enumerate(outputs))
    counters_are_zero(kernel)


@launched
def test_two_streams_at_once(name: str, dependent: bool) -> None:
    """All blocks of a launch run at once, or none: nobody waits for blocks of the other stream."""
    kernel = meeting(name, dependent)
    sets = [zoo.draw(kernel.graph, seed, "cuda") for seed in (5, 6)]
    want = [check(kernel, inputs) for inputs in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    outputs = [[poisoned(kernel, inputs) for _ in range(60)] for inputs in sets]
    torch.cuda.synchronize()
    for n in range(60):
        for stream, inputs, mine in zip(streams, sets, outputs, strict=True):
            with torch.cuda.stream(stream):
                kernel(inputs, out=mine[n])
    torch.cuda.synchronize()
    for right, mine in zip(want, outputs, strict=True):
        assert all(same(out, right) for out in mine)
    counters_are_zero(kernel)


@launched
def test_capture_and_replay(name: str, dependent: bool) -> None:
    """Twice in a graph, with ordinary calls between the replays."""
    kernel = meeting(name, dependent)
    inputs = zoo.draw(kernel.graph, 7, "cuda")
    outputs = [poisoned(kernel, inputs) for _ in range(2)]
    kernel(inputs, out=outputs[0])  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outputs:
            kernel(inputs, out=out)
    for seed in (8, 9, 10):
        for mine, fresh in zip(inputs, zoo.draw(kernel.graph, seed, "cuda"), strict=True):
            mine.copy_(fresh)
        for t in (*outputs[0], *outputs[1]):
            t.fill_(torch.nan)
        graph.replay()
        between = run(kernel, inputs)
        assert all(zoo.judge(kernel.graph, inputs, between))
        assert all(same(out, between) for out in outputs)


#: what a dependent launch may not read early, in every kernel of row loops
DEPENDENT: dict[str, Callable[[], Case]] = {
    **MEETING,
    "few rows": lambda: rms_backward(128, 2048, 64, 2),
    "forward": lambda: rms_forward(40, 65536, 4),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_dependent_launch_waits_for_its_inputs(name: str) -> None:
    """The inputs come from a slow kernel of PyTorch, launched just before."""
    kernel = row_kernel(DEPENDENT[name](), dependent=True)
    inputs = zoo.draw(kernel.graph, 11, "cuda")
    want = check(kernel, inputs)
    late = [torch.empty_like(t) for t in inputs]
    for _ in range(5):
        for t in late:
            t.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(5_000_000)
        for mine, given in zip(late, inputs, strict=True):
            torch.add(given, 0.0, out=mine)
        assert same(run(kernel, late), want)
