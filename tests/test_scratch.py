"""Scratch memory of kernels: who shares it, captures, exported programs."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import shutil
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cutesuper as cs
from cutesuper.errors import FormatError
from cutesuper.ir.block import MuGraph, TensorSpec
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import float32
from cutesuper.ir.graph import KernelGraph, new_kernel_graph, symbol
from cutesuper.runtime import scratch, toolchain
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.calling import Program
from cutesuper.runtime.compile import CompileRequest, compile_kernel
from cutesuper.runtime.kernel import CompiledStep, Variant
from cutesuper.runtime.library import read_metadata
from cutesuper.runtime.program import _Reader, export_program, load
from cutesuper.runtime.programs import Kept
from cutesuper.runtime.scratch import CHUNK_BYTES, Need, Pool, ScratchMemory
from cutesuper.skeletons.base import Argument, Scratch
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests.fake_runtime import build_fake_runtime, record_launches
from tests.mugraphs import Block

torch = pytest.importorskip("torch")

COUNTERS = Need((symbol("M"), 4), torch.int32, True)
PARTS = Need((symbol("M"), 2, 8), torch.float32, False)
FLAGS = Need((3,), torch.int32, True)


@dataclass
class Cuda:
    """The part of torch.cuda that the allotment asks."""

    stream: int = 0
    capturing: bool = False
    chunks: int = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Device 0 is the CPU; its pool is new, and its current stream can be chosen."""
    state = Cuda()

    def new_zeros(device: Any, size: int) -> Any:
        assert not state.capturing, "memory that outlives a capture was allocated in it"
        state.chunks += 1
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(scratch, "_pools", Kept())
    monkeypatch.setattr(scratch, "new_zeros", new_zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False
    )
    return state


def call(memory: ScratchMemory, rows: int = 2) -> list[Any]:
    return memory.allot([torch.zeros(5), torch.zeros(rows, 7)])


def spans(tensors: list[Any]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]


def apart(*calls: list[Any]) -> bool:
    """No memory is in two of these tensors."""
    found = sorted(s for tensors in calls for s in spans(tensors))
    return all(a[1] <= b[0] for a, b in itertools.pairwise(found))


def only_zeroed(tensors: list[Any]) -> list[Any]:
    return [t for t in tensors if t.dtype == torch.int32]


# --- sharing -------------------------------------------------------------------------------------


def test_shapes_and_types(cuda: Cuda) -> None:
    counters, parts, flags = call(ScratchMemory([COUNTERS, PARTS, FLAGS], {"M": (1, 0)}), rows=3)
    assert (counters.dtype, parts.dtype, flags.dtype) == (torch.int32, torch.float32, torch.int32)
    assert (parts.shape, flags.shape) == ((48,), (3,))
    assert counters.shape == (16,)  # of four rows, the next power of two
    assert not counters.any() and not flags.any()
    assert apart([counters, flags])
    # of one allocation, and at a line each
    assert (flags.data_ptr() - counters.data_ptr()) % scratch.ALIGNMENT == 0


def test_a_stream_keeps_its_memory(cuda: Cuda) -> None:
    memory = ScratchMemory([COUNTERS, PARTS, FLAGS], {"M": (1, 0)})
    first = only_zeroed(call(memory))
    assert spans(only_zeroed(call(memory))) == spans(first)
    cuda.stream = 7
    second = only_zeroed(call(memory))
    assert apart(first, second)
    assert spans(only_zeroed(call(memory))) == spans(second)
    other = only_zeroed(call(ScratchMemory([FLAGS], {})))
    assert apart(first, second, other)
    assert cuda.chunks == 1


def test_few_lengths_for_many_batch_sizes(cuda: Cuda) -> None:
    memory = ScratchMemory([COUNTERS], {"M": (1, 0)})
    found = {tuple(spans(call(memory, rows))) for rows in range(1, 1025)}
    assert len(found) == 11
    assert all(call(memory, rows)[0].numel() >= 4 * rows for rows in range(1, 1025))


def test_every_captured_call_has_its_own(cuda: Cuda) -> None:
    memory = ScratchMemory([COUNTERS, FLAGS], {"M": (1, 0)})
    calls = [call(memory)]
    cuda.capturing = True
    calls += [call(memory) for _ in range(100)]
    cuda.capturing = False
    calls.append(call(ScratchMemory([COUNTERS], {"M": (1, 0)})))
    assert apart(*calls)
    assert not any(t.any() for c in calls for t in c)
    assert cuda.chunks == 1


def test_memory_on_loan_is_given_back(cuda: Cuda) -> None:
    """One graph after the other has the same memory; meanwhile nobody else has it."""
    memory = ScratchMemory([COUNTERS, FLAGS], {"M": (1, 0)})
    calls = [call(memory)]
    loan, cuda.capturing = scratch.Loan(), True
    found = []
    for _ in range(3):
        with loan.taken():
            found.append([call(memory) for _ in range(4)])
        calls.append(call(memory))
        assert apart(*calls, *found[-1])
        loan.give_back()
    loan.give_back()  # there is nothing to give
    assert len({frozenset(s for c in calls for s in spans(c)) for calls in found}) == 1
    calls += [call(memory) for _ in range(8)]
    assert apart(*calls)


def test_capturing_without_a_call_before(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ScratchMemory([FLAGS], {})
    cuda.capturing = True
    zeroed = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeroed.append(a) or zeros(*a, **k))
    first, second = memory.allot([zeros(5)]), memory.allot([zeros(5)])
    assert zeroed == [(128,), (128,)]  # nodes of the graph
    assert apart(first, second) and not first[0].any()


def test_a_pool_that_runs_low_is_filled_by_the_next_call(cuda: Cuda) -> None:
    large = ScratchMemory([Need((CHUNK_BYTES // 16,), torch.int32, True)], {})  # a quarter of it
    calls = [call(large)]
    chunks = cuda.chunks
    cuda.capturing = True
    calls += [call(large) for _ in range(40)]  # of 64 that it had
    cuda.capturing = False
    assert cuda.chunks == chunks
    assert spans(call(large)) == spans(calls[0])
    assert cuda.chunks == chunks + 1
    cuda.capturing = True
    calls += [call(large) for _ in range(70)]  # more than it has now
    assert cuda.chunks == chunks + 1
    assert apart(*calls)


def test_captured_memory_outlives_the_call_and_the_pool_s_next_chunk(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph knows addresses; nothing else of what a captured call got is left."""
    alive: list[weakref.ref[Any]] = []
    make = scratch.new_zeros

    def watched(device: Any, size: int) -> Any:
        array = np.zeros(size, np.uint8)
        alive.append(weakref.ref(array))
        make(device, 0)
        return torch.from_numpy(array)

    monkeypatch.setattr(scratch, "new_zeros", watched)
    large = ScratchMemory([Need((CHUNK_BYTES // 16,), torch.int32, True)], {})
    for _ in range(3):
        call(large)
        cuda.capturing = True
        for _ in range(64):
            call(large)
        cuda.capturing = False
    call(large)
    assert len(alive) >= 3
    gc.collect()
    assert all(memory() is not None for memory in alive)


def test_more_than_the_pool_ever_holds(cuda: Cuda) -> None:
    huge = ScratchMemory([Need((scratch.LARGEST_RESERVE,), torch.int32, True)], {})
    first = call(huge)
    assert first[0].numel() == scratch.LARGEST_RESERVE
    assert spans(call(huge)) == spans(first)


def test_a_pool_that_was_never_filled_gives_nothing() -> None:
    pool = Pool(torch.device("cpu"))
    assert pool.take([128]) is None


def test_no_zeroed_scratch_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)
    [parts] = call(ScratchMemory([PARTS], {"M": (1, 0)}))
    assert parts.shape == (32,)


# --- programs ------------------------------------------------------------------------------------

K = 64


@dataclass(frozen=True)
class Planned:
    """The part of a plan that calling and exporting need."""

    arguments: tuple[Argument, ...]
    scratch: tuple[Scratch, ...]
    in_place: tuple[tuple[int, int], ...] = ()


def row_sums(m: int | Symbol) -> tuple[KernelGraph, MuGraph]:
    """y[M, 1] = sum of x[M, K]."""
    g = new_kernel_graph()
    y = g.mark_output(g.sum(g.new_input((m, K), dtype="fp32", name="X"), 1))
    rows = None if isinstance(m, Symbol) else m
    b = Block({"M": m, "K": K}, {"M.grid": rows}, {"M": 1, "K": K})
    b.store(y.name, b.op("sum", b.load("X", "M", "K"), over="K"), "M", None)
    tensors = {
        "X": TensorSpec("X", (m, K), float32),
        y.name: TensorSpec(y.name, (m, 1), float32),
    }
    return g, MuGraph(tensors, ("X",), (y.name,), (b.step("halves"),))


def halves(m: int | Symbol) -> tuple[Any, tuple[Any, ...]]:
    """The kernel that two blocks of a row share, with its scratch."""
    from cutesuper.skeletons.kernel.arguments import fake_arguments, fake_scratch
    from tests.kernels_cute import HalvesSum

    plan = planned(m)
    return HalvesSum(K), (*fake_arguments(plan.arguments), *fake_scratch(plan.scratch))


def planned(m: int | Symbol) -> Planned:
    _, mu = row_sums(m)
    x, y = (mu.tensors[n] for n in (*mu.inputs, *mu.outputs))
    arguments = tuple(Argument(t.name, t.shape, "float32", False, t is y) for t in (x, y))
    return Planned(arguments, (Scratch((m, 2), "float32", False), Scratch((m,), "int32", True)))


def compiled(m: int | Symbol, cache: KernelCache) -> Variant:
    pytest.importorskip("cutlass")
    request = CompileRequest(
        f"halves {m}", "sm_90a", "halves", functools.partial(halves, m), outputs=(1,)
    )
    step = CompiledStep(planned(m), compile_kernel(request, cache))  # type: ignore[arg-type]
    return Variant(row_sums(m)[1], (step,))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


@contextlib.contextmanager
def recorded_libraries() -> Iterator[None]:
    """Libraries exported inside launch nothing and record it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        yield


@pytest.fixture(scope="module")
def library(cache: KernelCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("exporting needs gcc")
    path = tmp_path_factory.mktemp("programs") / "halves.so"
    with recorded_libraries():
        export_program(row_sums(symbol("M"))[0], [compiled(symbol("M"), cache)], path)
    return path


def test_kernels_get_scratch_after_their_tensors(cuda: Cuda) -> None:
    m = symbol("M")
    given: list[tuple[Any, ...]] = []
    artifact = SimpleNamespace(load=lambda: lambda *args: given.append(args))
    step = CompiledStep(planned(m), artifact)  # type: ignore[arg-type]
    variant = Variant(row_sums(m)[1], (step, step))
    assert variant.wiring == ((0, 1, 2, 3), (0, 1, 4, 5))
    x, y = torch.zeros(5, K), torch.zeros(5, 1)
    variant.launches.launch([x, y])
    variant.launches.launch([x, y])
    assert all(g[0] is x and g[1] is y and g[2].shape == (10,) and g[3].shape == (8,)
               for g in given)  # fmt: skip
    counters = [[g[3]] for g in given]
    assert apart(*counters[:2])
    assert [spans(c) for c in counters[2:]] == [spans(c) for c in counters[:2]]


def test_exported_launches(library: Path) -> None:
    script = f"""
    import sys
    for name in ("cutlass", "tvm_ffi", "cuda"):
        sys.modules[name] = None
    from cutesuper.runtime.arguments import RawTensor
    from cutesuper.runtime.program import load
    program = load({str(library)!r})
    assert program.tensors[2:] == [
        {{"name": "scratch0", "shape": ["M", 2], "dtype": "float32", "zeroed": False}},
        {{"name": "scratch1", "shape": ["M"], "dtype": "int32", "zeroed": True}},
    ]
    values = [RawTensor(0x1000, (5, {K}), ({K}, 1), "float32"),
              RawTensor(0x2000, (5, 1), (1, 1), "float32"),
              RawTensor(0x3000, (10,), (1,), "float32"), RawTensor(0x4000, (8,), (1,), "int32")]
    program.launch(values, stream=1, device=0)
    """
    [launch] = record_launches(script, parameter_bytes=(16, 16, 16, 16))
    found = [struct.unpack("<Qi", p[:12]) for p in launch.parameters]
    assert found == [(0x1000, 5), (0x2000, 5), (0x3000, 10), (0x4000, 8)]
    assert launch.grid == (5, 2, 1)


def test_exported_programs_allot_it(library: Path, cuda: Cuda) -> None:
    program = load(library)
    launched: list[Any] = []
    program._compact = [(SimpleNamespace(launch=lambda v, s, d: launched.append(v)), places)
                        for _, places in program._compact]  # type: ignore[misc]  # fmt: skip
    x, y = torch.zeros(3, K), torch.zeros(3, 1)
    for _ in range(2):
        program._linked.launch([x, y])
    (_, _, parts, counters), (_, _, _, again) = launched
    assert parts.shape == (6,) and counters.shape == (4,) and not counters.any()
    assert again.data_ptr() == counters.data_ptr()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("scratch",), None),
        (("scratch",), []),
        (("scratch", 0, "shape"), []),
        (("scratch", 0, "shape"), ["M", -2]),
        (("scratch", 0, "shape"), ["Q", 2]),
        (("scratch", 0, "shape"), [2, 2]),
        (("scratch", 0, "dtype"), "int32"),
        (("scratch", 1, "zeroed"), 1),
        (("scratch", 1, "name"), None),
        (("steps", 0, "places"), [0, 1, 2, 2]),
        (("steps", 0, "places"), [0, 1, 3, 2]),
        (("steps", 0, "places"), [0, 2, 1, 3]),
        (("steps", 0, "places"), [0, 1, 2, 4]),
    ],
    ids=repr,
)
def test_damaged_scratch_is_refused(library: Path, path: tuple[Any, ...], value: Any) -> None:
    [part] = copy.deepcopy(read_metadata(library))["programs"]
    _Reader(part, "x.so").read()
    inner = functools.reduce(lambda v, key: v[key], path[:-1], part["program"])
    inner[path[-1]] = value
    with pytest.raises(FormatError, match=r"x\.so.*export it again"):
        _Reader(part, "x.so").read()


def test_scratch_that_nobody_uses_or_that_is_an_output(library: Path) -> None:
    [part] = copy.deepcopy(read_metadata(library))["programs"]
    part["program"]["scratch"].append(dict(part["program"]["scratch"][0], name="more"))
    with pytest.raises(FormatError, match="used by several steps, or by none"):
        _Reader(part, "x.so").read()
    [part] = copy.deepcopy(read_metadata(library))["programs"]
    part["kernels"][0]["outputs"] = [1, 3]
    with pytest.raises(FormatError, match="has scratch memory as its output"):
        _Reader(part, "x.so").read()


# --- on a GPU ------------------------------------------------------------------------------------


class Summing(Program):
    """Calls the kernel like any program."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(row_sums(symbol("M"))[0], "sm_90a")
        self.variant = variant

    def _check_operators(self) -> None:
        """All of its operators are built in."""

    def _launches(self, extents: dict[str, int]) -> Any:
        return self.variant.launches


@pytest.fixture
def summing(cache: KernelCache) -> Summing:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90a")
    return Summing(compiled(symbol("M"), cache))


@pytest.mark.gpu
def test_on_many_streams(summing: Summing) -> None:
    x = torch.randn(300, K, device="cuda")
    torch.cuda.synchronize()
    results = []
    for n in range(200):
        stream = torch.cuda.Stream() if n % 3 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            results.append(summing(x[: n + 1].contiguous()))
    torch.cuda.synchronize()
    for n, y in enumerate(results):
        torch.testing.assert_close(y, x[: n + 1].sum(1, keepdim=True))


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_captured_graphs_may_overlap(
    summing: Summing, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_pools", Kept())
    x = torch.randn(300, K, device="cuda")
    assert summing.variant.functions  # loads the code
    if warm:
        summing(x)
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([summing(x) for _ in range(8)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = summing(x)
    torch.cuda.synchronize()
    expected = x.sum(1, keepdim=True)
    for y in [eager, *(y for ys in outputs for y in ys)]:
        torch.testing.assert_close(y, expected)


@pytest.mark.gpu
def test_in_the_graphs_of_torch_compile(summing: Summing) -> None:
    """Its calls before a capture allocate in a pool of its own, from which scratch must stay
    away."""

    @torch.library.custom_op("cutesuper_tests::row_sums", mutates_args=())
    def sums(x: torch.Tensor) -> torch.Tensor:
        return summing(x)

    @sums.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0], 1)

    scratch._pools.clear()
    step = torch.compile(lambda x: sums(x * 2) + 1, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(256, K, device="cuda")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(step(x).clone(), 2 * x.sum(1, keepdim=True) + 1)


def test_what_several_blocks_write_is_not_written_in_place() -> None:
    """Blocks along the labels of one result repeat the other: a later one would read what an
    earlier one has stored."""
    g = cs.new_kernel_graph()
    for shape in ((64, 32), (16, 24)):
        g.mark_output(g.exp(g.new_input(shape, "float32")))
    mugraphs = [c.mugraph for c in cs.mugraphs(g, target="h200").candidates]
    plans = [[make_plan(s, mu.tensors, H200) for s in mu.steps] for mu in mugraphs]
    assert {(len(p), bool(p[0].in_place)) for p in plans} == {(1, False), (2, True)}
