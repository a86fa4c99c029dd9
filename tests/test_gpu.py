"""Compiled kernels on a GPU: right numbers, repeatable, capturable, and cheap to call.

Every output is full of NaN before the call, so that an element that is not written shows.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutesuper as cs
from cutesuper.errors import DeviceError, LayoutError, OperatorError
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.graph import KernelGraph
from cutesuper.runtime.kernel import Kernel
from tests import zoo
from tests.chains import gated_hidden, product_and_maximum, two_updates

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent


# ----------------------------------------------------------------------------------------- helpers


@cache
def norm_linear(
    m: Dim,
    k: int,
    n: int,
    dtype: str = "float16",
    gain: bool = False,
    transposed: bool = False,
    dependent: bool = False,
) -> Kernel:
    """One kernel object for all tests that use it."""
    graph = zoo.rms_norm_linear(m, k, n, dtype, gain, transposed)
    return cs.superoptimize(graph, dependent_launch=dependent)


def poisoned(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs for these inputs, full of NaN."""
    extents = kernel._signature.bind(inputs) or {}
    return [
        torch.full(shape, torch.nan, dtype=dtype, device="cuda")
        for shape, dtype in kernel._signature.output_shapes(extents)
    ]


def run(kernel: Kernel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Call with poisoned outputs and wait."""
    outputs = poisoned(kernel, inputs)
    kernel(inputs, out=outputs)
    torch.cuda.synchronize()
    return outputs


def check(kernel: Kernel, inputs: list[torch.Tensor], eager: Any = None) -> list[torch.Tensor]:
    """Run and hold every output against the acceptance rule."""
    outputs = run(kernel, inputs)
    for n, report in enumerate(zoo.judge(kernel.graph, inputs, outputs, eager)):
        assert report, f"output {n} of {kernel!r}: {report.message}"
    return outputs


def check_norm_linear(kernel: Kernel, m: int, seed: int, transposed: bool = False) -> None:
    inputs = zoo.draw(kernel.graph, seed, "cuda", {"M": m})
    check(kernel, inputs, [zoo.eager_norm_linear(inputs, transposed)])


def small(graph: KernelGraph, **options: Any) -> Kernel:
    return cs.superoptimize(graph, **options)


# ------------------------------------------------------------------------------ RMSNorm and Linear

ROWS = (1, 2, 3, 8, 16, 17, 64, 100, 4096)
SIZES = ((4096, 4096), (4096, 6144), (1024, 1000))


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
@pytest.mark.parametrize("gain", [False, True], ids=["", "gain"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_norm_linear_with_any_number_of_rows(
    size: tuple[int, int], dtype: str, gain: bool, dependent: bool
) -> None:
    """One symbolic kernel; every bucket is compiled when the first batch of its size comes."""
    kernel = norm_linear(cs.symbol("M", 16), *size, dtype, gain, dependent=dependent)
    for seed, m in enumerate(ROWS):
        check_norm_linear(kernel, m, seed)


@pytest.mark.parametrize("transposed", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("size", [(16, 4096, 4096), (16, 4096, 6144), (1, 1024, 1000)], ids=str)
def test_norm_linear_with_fixed_rows(size: tuple[int, int, int], transposed: bool) -> None:
    kernel = norm_linear(*size, transposed=transposed)
    for seed in range(3):
        check_norm_linear(kernel, size[0], seed, transposed)


@pytest.mark.parametrize("gain", [False, True], ids=["", "gain"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_stored_by_columns(dtype: str, gain: bool) -> None:
    kernel = norm_linear(cs.symbol("M", 16), 1024, 1000, dtype, gain, transposed=True)
    for m in (1, 16, 17, 100):
        check_norm_linear(kernel, m, m, transposed=True)


#: less than one tile in one direction or another
TINY = [
    (1, 8, 8),
    (3, 16, 8),
    (300, 2048, 8),
    (2, 8, 2048),
    (65, 72, 64),
    (1, 64, 64),
    (1, 1000, 1000),
    (1, 64, 8),
]


def random_sizes(count: int) -> list[tuple[int, int, int]]:
    rng = random.Random(7)
    return TINY + [
        (rng.randint(1, 300), 8 * rng.randint(1, 256), 8 * rng.randint(1, 256))
        for _ in range(count - len(TINY))
    ]


def few_on_the_machine(sizes: list[tuple[int, int, int]]) -> list[Any]:
    """All of them, the first ones marked for the machine of tests/ptx in CI."""
    few = len(TINY) + 4
    return [pytest.param(i, s, marks=[pytest.mark.ptx] * (i < few)) for i, s in enumerate(sizes)]


@pytest.mark.parametrize(("i", "size"), few_on_the_machine(random_sizes(30)))
def test_norm_linear_of_random_sizes(i: int, size: tuple[int, int, int]) -> None:
    """Sizes that fill no tile, in every combination of options."""
    options = {"gain": bool(i & 1), "transposed": bool(i & 2), "dependent": bool(i & 4)}
    dtype = ("float16", "bfloat16")[i % 3 % 2]
    kernel = norm_linear(*size, dtype, **options)
    check_norm_linear(kernel, size[0], i, options["transposed"])


def test_large_and_small_rows_keep_their_norms() -> None:
    """Rows of very different magnitudes: a norm of another row would show at once."""
    kernel = norm_linear(16, 4096, 4096)
    x, w = zoo.draw(kernel.graph, 1, "cuda")
    x = (x.float() * torch.logspace(-2, 2, 16, device="cuda")[:, None]).half()
    check(kernel, [x, w], [zoo.eager_norm_linear([x, w])])


def test_a_row_of_zeros_and_a_row_of_nan() -> None:
    kernel = norm_linear(16, 4096, 4096)
    x, w = zoo.draw(kernel.graph, 2, "cuda")
    x[3], x[5, 17] = 0, torch.nan
    [z] = run(kernel, [x, w])
    assert (z[3] == 0).all() and z[5].isnan().all()
    others = [i for i in range(16) if i != 5]
    assert z[others].isfinite().all()


# ---------------------------------------------------------------------------------- repeatability


@pytest.mark.parametrize("size", [(16, 4096, 6144), (17, 1000, 200), (4096, 1024, 1024)], ids=str)
def test_every_run_gives_the_same_bits(size: tuple[int, int, int]) -> None:
    kernel = norm_linear(*size)
    inputs = zoo.draw(kernel.graph, 3, "cuda")
    [first] = run(kernel, inputs)
    for _ in range(50):
        [again] = run(kernel, inputs)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


@pytest.mark.parametrize("dependent", [False, True])
def test_capture_and_replay(dependent: bool) -> None:
    kernel = norm_linear(16, 4096, 4096, dependent=dependent)
    inputs = zoo.draw(kernel.graph, 4, "cuda")
    out = poisoned(kernel, inputs)
    kernel(inputs, out=out)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(inputs, out=out)
        kernel(inputs, out=out)
    for seed in (5, 6):
        fresh = zoo.draw(kernel.graph, seed, "cuda")
        for mine, theirs in zip(inputs, fresh, strict=True):
            mine.copy_(theirs)
        out[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(zoo.judge(kernel.graph, inputs, out, [zoo.eager_norm_linear(inputs)]))


def test_another_stream() -> None:
    """The kernel must wait for what its own stream did, and for nothing else."""
    kernel = norm_linear(16, 4096, 4096)
    inputs = zoo.draw(kernel.graph, 7, "cuda")
    [want] = run(kernel, inputs)
    late = torch.full_like(inputs[0], torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        late.copy_(inputs[0])
        z = kernel(late, inputs[1])
    stream.synchronize()
    assert torch.equal(z, want)


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
@pytest.mark.parametrize("gain", [False, True], ids=["", "gain"])
def test_a_chain_of_layers(dependent: bool, gain: bool) -> None:
    """Eight layers in turn on two buffers: each reads what the one before has just written, and
    overwrites what the one before still reads if it does not wait."""
    kernel = norm_linear(16, 2048, 2048, gain=gain, dependent=dependent)
    x, _, *g = zoo.draw(kernel.graph, 8, "cuda")
    weights = [zoo.draw(kernel.graph, 20 + i, "cuda")[1] for i in range(8)]
    want = x
    for w in weights:
        [want] = run(kernel, [want, w, *g])  # waits after every layer
    eager, exact = x, x.double()
    for w in weights:
        eager = zoo.eager_norm_linear([eager, w, *g])
        exact = zoo.eager_norm_linear([exact, w.double(), *(t.double() for t in g)])
    buffers = [torch.empty_like(x), torch.empty_like(x)]
    for _ in range(20):
        buffers[0].fill_(torch.nan)
        buffers[1].fill_(torch.nan)
        source = x
        for i, w in enumerate(weights):
            kernel(source, w, *g, out=buffers[i % 2])
            source = buffers[i % 2]
        torch.cuda.synchronize()
        assert torch.equal(source, want)
    # both chains round after every layer; errors add up in eager just as here
    assert zoo.acceptable(source, exact, eager, cs.float16)


def test_dependent_launch_waits_for_other_kernels() -> None:
    """X comes from a slow kernel of PyTorch, launched just before."""
    kernel = norm_linear(16, 4096, 4096, dependent=True)
    inputs = zoo.draw(kernel.graph, 9, "cuda")
    [want] = run(kernel, inputs)
    late = torch.empty_like(inputs[0])
    for _ in range(5):
        late.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(5_000_000)
        torch.add(inputs[0], 0.0, out=late)
        assert torch.equal(kernel(late, inputs[1]), want)


# ------------------------------------------------------------------------------------ row kernels

ROW_SHAPES = ((1, 8), (7, 33), (64, 4096), (300, 1000), (2, 3, 40))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", zoo.ROWS)
def test_row_kernels(name: str, dtype: str) -> None:
    for seed, shape in enumerate(ROW_SHAPES):
        kernel = small(zoo.rows(name, shape, dtype))
        check(kernel, zoo.draw(kernel.graph, seed, "cuda"))


@pytest.mark.parametrize("length", [8192, 10000, 16384])
def test_long_rows(length: int) -> None:
    kernel = small(zoo.rows("softmax", (5, length), "float32"))
    check(kernel, zoo.draw(kernel.graph, 1, "cuda"))


def test_symbolic_rows() -> None:
    kernel = small(zoo.rows("rms_norm", (cs.symbol("M", 100), 1000)))
    for m in (1, 3, 128, 5000):
        check(kernel, zoo.draw(kernel.graph, m, "cuda", {"M": m}))


# --------------------------------------------------------------------------- other programs

PROGRAMS: dict[str, KernelGraph] = {
    "gated": zoo.gated_mlp(16, 1024, 2048),
    "gated without norm": zoo.gated_mlp(100, 512, 264, norm=False),
    "column sums": zoo.less_column_sums(33, 1000, 520),
    "over the deviation": zoo.over_deviation(33, 1000, 520),
    "queries, keys, values": zoo.projections(16, 1024, (1024, 512, 512)),
    "three of one width": zoo.projections(1, 1000, (520, 520, 520)),
    "two of many rows": zoo.projections(300, 512, (512, 512), "float16", norm=False),
    "two of symbolic rows": zoo.projections(cs.symbol("M", 16), 1024, (256, 256)),
    "linear": zoo.linear(33, 1024, 512),
    "gelu": zoo.linear(16, 1024, 512, "bfloat16", tail="gelu"),
    "residual": zoo.linear(128, 1024, 512, tail="residual"),
    "softmax of a product": zoo.softmax_linear(16, 512, 1000),
    "lora": zoo.lora(16, 1024, 512),
    "relu mlp": zoo.relu_mlp(16, 512, 1024, 256, "bfloat16"),
    "grouped attention": zoo.grouped_attention(4, 16, 128, 64),
    "symbolic mlp": zoo.relu_mlp(cs.symbol("M", 16), 512, 1024, 256),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    kernel = small(PROGRAMS[name])
    for seed in range(2):
        check(kernel, zoo.draw(kernel.graph, seed, "cuda"))
    if "symbolic" in name:
        for m in (1, 100):
            check(kernel, zoo.draw(kernel.graph, m, "cuda", {"M": m}))


#: products after the loop and reductions along the columns, at sizes that fill no tile
CHAINS: dict[str, KernelGraph] = {
    "lora of one row": zoo.lora(1, 1000, 1000, 8),
    "lora (N, K)": zoo.lora(17, 1000, 1000, 8, "bfloat16", transposed=True),
    "lora, scale": zoo.lora(cs.symbol("M", 17), 1000, 1000, 40, scale=0.5, transposed=True),
    "lora, norm": zoo.lora(17, 1000, 1000, 24, "bfloat16", norm=True, scale=2.0),
    "lora of many rows": zoo.lora(100, 1000, 1000, 64),
    "two operands": zoo.two_operands(17, 1000, 1000, 40, "bfloat16"),
    "two operands, relu": zoo.two_operands(100, 1000, 264, 24, act="relu"),
    "small mlp": zoo.relu_mlp(300, 1000, 40, 1000, "bfloat16"),
    "two updates": two_updates("float16"),
    "gated hidden": gated_hidden("bfloat16"),
    "dlrm": zoo.dlrm(cs.symbol("M", 300), 1000, 200),
    "softmax along columns": zoo.softmax_linear(60, 520, 1000, "bfloat16"),
    "norm along columns": zoo.rms_norm_of_product(cs.symbol("M", 100), 1000, 1000),
    "product and maximum": product_and_maximum("float16"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    """Right, and the same bits in every run; it is one kernel for the rows that it was made for (a
    norm along columns for up to 128)."""
    graph = CHAINS[name]
    kernel = small(graph)
    assert len(kernel.kernels) == 1
    symbolic = isinstance(graph.nodes[graph.inputs[0]].shape[0], Symbol)
    for m in (1, 17, 100, 300) if symbolic else (0,):
        inputs = zoo.draw(graph, m, "cuda", {"M": m})
        first = check(kernel, inputs)
        for _ in range(10):
            again = run(kernel, inputs)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.ptx
@pytest.mark.parametrize("between", [False, True], ids=["outermost", "between"])
def test_a_product_is_repeated_along_a_label_that_no_operand_has(between: bool) -> None:
    """Each of the five copies is stored, not only the first."""
    g = cs.new_kernel_graph()
    lead = (2, 1) if between else (1,)
    x, w = g.new_input((*lead, 8, 64), "float16"), g.new_input((64, 72), "float16")
    more = g.new_input((*lead[:-1], 5, 8, 72), "float16")
    g.mark_output(g.matmul(x, w) + more)
    kernel = cs.superoptimize(g)
    check(kernel, zoo.draw(g, 1, "cuda"))


@pytest.mark.parametrize("name", ["lora", "grouped attention", "relu mlp"])
def test_kernels_of_one_program_overlap_safely(name: str) -> None:
    """Dependent launches between the kernels of one program, many calls in flight."""
    kernel = small(PROGRAMS[name], dependent_launch=True)
    inputs = zoo.draw(kernel.graph, 3, "cuda")
    [want] = check(kernel, inputs)
    results = [kernel(inputs)[0] for _ in range(50)]
    torch.cuda.synchronize()
    assert all(torch.equal(r, want) for r in results)


# ----------------------------------------------------------------------------------------- export

SCRIPT = """
import sys
for name in ("cutlass", "tvm_ffi"):
    sys.modules[name] = None
import torch
import cutesuper as cs
program = cs.load(sys.argv[1])
data = torch.load(sys.argv[2])
out = torch.full_like(data["want"], torch.nan)
program(*data["inputs"], out=out)
torch.cuda.synchronize()
assert torch.equal(out, data["want"])
"""


@pytest.mark.parametrize("which", ["norm linear", "relu mlp"])
def test_exported_programs_run_without_the_compiler(which: str, tmp_path: Path) -> None:
    kernel = norm_linear(16, 4096, 4096) if which == "norm linear" else small(PROGRAMS[which])
    try:
        kernel.export(tmp_path / "program.so")
    except cs.errors.CompileError as error:
        pytest.skip(f"cannot link here: {error}")
    inputs = zoo.draw(kernel.graph, 1, "cuda")
    [want] = run(kernel, inputs)
    torch.save({"inputs": inputs, "want": want}, tmp_path / "data.pt")
    files = [str(tmp_path / "program.so"), str(tmp_path / "data.pt")]
    command = [sys.executable, "-c", SCRIPT, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- errors


def test_kernels_for_another_architecture_are_refused() -> None:
    kernel = small(zoo.rows("exp", (4, 64)), target="b200")
    if torch.cuda.get_device_capability() == (10, 0):
        pytest.skip("this is that architecture")
    with pytest.raises(DeviceError, match=r"compiled for sm_100, called with tensors on cuda:0"):
        kernel(torch.zeros(4, 64, dtype=torch.float16, device="cuda"))


def test_a_tangent_is_not_dropped() -> None:
    kernel, x = norm_linear(4, 64, 64), torch.randn(4, 64, dtype=torch.float16, device="cuda")
    w = torch.randn(64, 64, dtype=torch.float16, device="cuda")
    with torch.autograd.forward_ad.dual_level():
        assert kernel(x, w).shape == (4, 64)
        with pytest.raises(OperatorError, match="no forward-mode derivative"):
            kernel(torch.autograd.forward_ad.make_dual(x, x), w)


def test_mixed_devices_and_odd_addresses() -> None:
    kernel = norm_linear(16, 4096, 4096)
    x, w = zoo.draw(kernel.graph, 1, "cuda")
    with pytest.raises(DeviceError, match="input W is on cpu, input X on cuda:0"):
        kernel(x, w.cpu())
    with pytest.raises(DeviceError, match="output 0 is on cpu"):
        kernel(x, w, out=torch.empty(16, 4096, dtype=torch.float16))
    odd = torch.zeros(16 * 4096 + 1, dtype=torch.float16, device="cuda")[1:].view(16, 4096)
    with pytest.raises(LayoutError, match="input X starts at an address that is no"):
        kernel(odd, w)
    with pytest.raises(LayoutError, match="output 0 must be contiguous and aligned"):
        kernel(x, w, out=odd)


# ---------------------------------------------------------------------------------- cost of a call


@pytest.mark.parametrize("given", [False, True], ids=["new output", "out="])
def test_a_call_costs_little_host_time(given: bool) -> None:
    """A small kernel, so that the launch queue never fills up; the best of several rounds."""
    kernel = norm_linear(1, 256, 64)
    inputs = zoo.draw(kernel.graph, 1, "cuda")
    options = {"out": kernel(*inputs)} if given else {}
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            kernel(*inputs, **options)
        best = min(best, (time.perf_counter() - start) / 100)
    print(f"host time of a call: {best * 1e6:.1f} us")
    assert best < 25e-6
