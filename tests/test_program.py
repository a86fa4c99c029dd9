"""Exported programs: several kernels in one library, called like the kernel they came from."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import pickle
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutesuper.errors import DTypeError, FormatError, GraphError, ShapeError
from cutesuper.ir.block import MuGraph, TensorSpec
from cutesuper.ir.dims import Dim, Symbol
from cutesuper.ir.dtypes import float16
from cutesuper.ir.evaluate import run_reference
from cutesuper.ir.graph import KernelGraph, new_kernel_graph, symbol
from cutesuper.runtime import toolchain
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import CompileRequest, compile_kernel
from cutesuper.runtime.export import Part, export_library
from cutesuper.runtime.kernel import CompiledStep, Variant
from cutesuper.runtime.library import check_metadata, read_metadata
from cutesuper.runtime.program import _Reader, export_program, load
from cutesuper.runtime.resources import parse_cubin
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import H200
from tests.fake_runtime import REPOSITORY, Launch, build_fake_runtime, record_launches
from tests.mugraphs import Block, rms_linear, rms_linear_fused

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if shutil.which("gcc") is None:
    pytest.skip("exporting and recording launches need gcc", allow_module_level=True)

N, K = 128, 512
X, W, Z, Y = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000, 0x7F0000004000


def fused() -> tuple[KernelGraph, MuGraph]:
    """RMSNorm and Linear in one kernel, K split over a cluster."""
    g = rms_linear(16, K, N)
    return g, rms_linear_fused(g, cluster=2, loop=2, grid=2)


def two_kernels(m: Dim) -> tuple[KernelGraph, MuGraph]:
    """The norm in one kernel, the product in the next; any number of rows."""
    g = new_kernel_graph()
    x, w = g.new_input((m, K), name="X"), g.new_input((K, N), name="W", constant=True)
    g.mark_output(g.matmul(g.rms_norm(x), w))
    rows = None if isinstance(m, Symbol) else m
    a = Block({"M": m, "K": K}, {"M.grid": rows}, {"M": 1, "K": K})
    x = a.load("X", "M", "K")
    mean = a.op("mean", a.op("square", x), over="K")
    a.store("Y", a.op("div", x, a.op("sqrt", a.op("add", mean, a.const(1e-6)))), "M", "K")
    tiles = None if rows is None else -(-rows // 16)
    axes = {"M.grid": tiles, "N.grid": 2, "K.loop": 4}
    b = Block({"M": m, "K": K, "N": N}, axes, {"M": 16, "K": K // 4, "N": N // 2})
    y = b.op("matmul", b.load("Y", "M", "K"), b.load("W", "K", "N"), over="K")
    b.store("Z", b.acc(y, "K.loop"), "M", "N")
    shapes = {"X": (m, K), "W": (K, N), "Z": (m, N), "Y": (m, K)}
    tensors = {n: TensorSpec(n, s, float16, n == "W") for n, s in shapes.items()}
    return g, MuGraph(tensors, ("X", "W"), ("Z",), (a.step("norm"), b.step("linear")))


def compiled(mu: MuGraph, cache: KernelCache, dependent_launch: bool = False) -> Variant:
    steps: list[CompiledStep] = []
    for step in mu.steps:
        plan = make_plan(step, mu.tensors, H200, dependent_launch=dependent_launch)
        from cutesuper.skeletons.build import build

        written = tuple(i for i, a in enumerate(plan.arguments) if a.written)
        request = CompileRequest(
            plan.key, "sm_90a", step.name, functools.partial(build, plan), written
        )
        steps.append(CompiledStep(plan, compile_kernel(request, cache)))
    return Variant(mu, tuple(steps), lambda: "how it was found")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@contextlib.contextmanager
def fake_runtime() -> Iterator[None]:
    """Libraries exported inside launch nothing and record it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        yield


@pytest.fixture(scope="module")
def one(cache: KernelCache, folder: Path) -> Path:
    g, mu = fused()
    with fake_runtime():
        export_program(g, [compiled(mu, cache, dependent_launch=True)], folder / "one.so")
    return folder / "one.so"


@pytest.fixture(scope="module")
def two(cache: KernelCache, folder: Path) -> Path:
    g, mu = two_kernels(symbol("M", 32))
    with fake_runtime():
        export_program(g, [compiled(mu, cache)], folder / "two.so")
    return folder / "two.so"


#: keeps the compiler and TVM-FFI out of a process that loads programs
BLOCKED = """
import sys
for name in ("cutlass", "tvm_ffi", "cuda"):
    sys.modules[name] = None
from cutesuper.runtime.arguments import RawTensor
from cutesuper.runtime.library import check_metadata, read_metadata
from cutesuper.runtime.program import load
def raw(pointer, *shape):
    return RawTensor(pointer, shape, (shape[1], 1), "float16")
"""


def _record(script: str, sizes: tuple[int, ...] = ()) -> list[Launch]:
    return record_launches(BLOCKED + textwrap.dedent(script), parameter_bytes=sizes)


# --- launches ------------------------------------------------------------------------------------


def test_one_kernel(one: Path, cache: KernelCache) -> None:
    [step] = compiled(fused()[1], cache, dependent_launch=True).steps
    [kernel] = parse_cubin(step.artifact.cubin).values()
    script = f"""
    program = load({str(one)!r})
    values = [raw({X}, 16, {K}), raw({W}, {K}, {N}), raw({Z}, 16, {N})]
    program.launch(values, stream=0x1234567890, device=0)
    assert "torch" not in sys.modules
    """
    [launch] = _record(script, kernel.parameter_bytes)
    assert "MatmulKernel" in launch.kernel
    assert launch.grid == (4, 1, 1)  # two tiles, each by a cluster of two blocks
    assert launch.cluster == (2, 1, 1)
    assert launch.block == (step.plan.threads, 1, 1)
    assert launch.smem == step.artifact.launches[0].shared_bytes
    assert launch.pdl
    assert not launch.cooperative
    assert launch.stream == 0x1234567890
    # Inputs go in as descriptors; a plain pointer is left for the output.
    assert struct.pack("<Q", Z) in launch.parameters


@pytest.mark.parametrize("rows", [1, 33])
def test_two_kernels(two: Path, rows: int) -> None:
    script = f"""
    program = load({str(two)!r})
    assert [t["name"] for t in program.tensors] == ["X", "W", "t3", "Y"]
    assert program.tensors[3] == {{"name": "Y", "shape": ["M", {K}], "dtype": "float16"}}
    values = [raw({X}, {rows}, {K}), raw({W}, {K}, {N}), raw({Z}, {rows}, {N})]
    values.append(raw({Y}, {rows}, {K}))
    program.launch(values, stream=0x77, device=0)
    """
    # Both parameters of the first kernel are {pointer; rows}; the second has at least as much.
    norm, linear = _record(script, (16, 16))
    assert "RowKernel" in norm.kernel
    assert "MatmulKernel" in linear.kernel
    assert [struct.unpack("<Qi", p[:12]) for p in norm.parameters] == [(X, rows), (Y, rows)]
    assert linear.grid == (2, -(-rows // 16), 1)
    assert linear.cluster == norm.cluster == (1, 1, 1)
    assert linear.smem > norm.smem
    assert (norm.pdl, linear.pdl) == (False, False)
    assert norm.stream == linear.stream == 0x77


def test_a_kernel_that_is_launched_twice_is_stored_once(cache: KernelCache, folder: Path) -> None:
    g = new_kernel_graph()
    g.mark_output(g.silu(g.silu(g.new_input((8, 1024), name="X"))))
    blocks = []
    for source, target in (("X", "Y"), ("Y", "Z")):
        block = Block({"M": 8, "K": 1024}, {"M.grid": 8}, {"M": 1, "K": 1024})
        block.store(target, block.op("silu", block.load(source, "M", "K")), "M", "K")
        blocks.append(block.step("silu"))
    tensors = {n: TensorSpec(n, (8, 1024), float16) for n in "XZY"}
    variant = compiled(MuGraph(tensors, ("X",), ("Z",), tuple(blocks)), cache)
    path = folder / "twice.so"
    with fake_runtime():
        export_program(g, [variant], path)
    metadata = read_metadata(path)
    assert len(metadata["programs"][0]["kernels"]) == 1
    script = f"""
    program = load({str(path)!r})
    program.launch([raw(p, 8, 1024) for p in ({X}, {Z}, {Y})], stream=0, device=0)
    """
    launches = _record(script, (8, 8))
    pointers = [tuple(struct.unpack("<Q", p)[0] for p in launch.parameters) for launch in launches]
    assert pointers == [(X, Y), (Y, Z)]


#: CUDA tensors and the few functions of torch.cuda that a call uses, for a machine without a GPU
FAKE_TORCH = """
import contextlib, math
import torch
class Tensor:
    requires_grad = False
    made = []
    def __init__(self, shape, dtype=torch.float16, device=torch.device("cuda", 0)):
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.made.append(self)
    def dim(self): return len(self.shape)
    def numel(self): return math.prod(self.shape)
    def element_size(self): return self.dtype.itemsize
    def stride(self): return tuple(math.prod(self.shape[i + 1:]) for i in range(self.dim()))
    def is_contiguous(self): return True
    def data_ptr(self): return 0x7F0000000000 + 0x100000 * self.made.index(self)
current, entered = [0], []
@contextlib.contextmanager
def use(device):
    before, current[0] = current[0], device.index
    entered.append(device.index)
    yield
    current[0] = before
torch.empty = Tensor
torch.cuda.current_device = lambda: current[0]
torch.cuda.device = use
torch.cuda.get_device_capability = lambda device: (9, 0) if device.index < 4 else (8, 0)
torch._C._cuda_getCurrentRawStream = lambda index: 0x100 + index
"""


def test_calls_with_torch_tensors(two: Path) -> None:
    script = f"""
    x, w, z = Tensor((20, {K})), Tensor(({K}, {N})), Tensor((20, {N}))
    program = load({str(two)!r})
    y = program(x, w)
    assert isinstance(y, Tensor) and y.shape == (20, {N}) and len(Tensor.made) == 5
    [y] = program([x, w])
    [y] = program(inputs=[x, w], out=z)
    assert y is z
    device = torch.device("cuda", 1)
    there = [Tensor((3, {K}), device=device), Tensor(({K}, {N}), device=device)]
    assert program(*there).device == device
    assert entered == [1] and current == [0]
    from cutesuper.errors import DeviceError
    device = torch.device("cuda", 4)
    try:
        program(Tensor((3, {K}), device=device), Tensor(({K}, {N}), device=device))
    except DeviceError as error:
        assert "compiled for sm_90, called with tensors on cuda:4 (sm_80)" in str(error), error
        assert "export it again" in str(error), error
    else:
        raise AssertionError("a kernel for another GPU was launched")
    """
    launches = _record(FAKE_TORCH + textwrap.dedent(script), (16, 16))
    assert len(launches) == 8
    assert [launch.stream for launch in launches] == [0x100] * 6 + [0x101] * 2
    at = [struct.unpack("<Qi", launches[i].parameters[0][:12]) for i in (0, 6)]
    assert at[0] == (0x7F0000000000, 20)
    assert at[1][1] == 3
    # The second kernel's launches of the first and of the third call write different outputs.
    assert {launch.grid for launch in launches[1::2]} == {(2, 2, 1), (2, 1, 1)}


# --- calling -------------------------------------------------------------------------------------


def test_calls_on_the_cpu(one: Path) -> None:
    program = load(one)
    x, w = torch.randn(16, K).half(), torch.randn(K, N).half()
    [expected] = run_reference(fused()[0], [x, w])
    assert torch.equal(program(x, w), expected)
    results = program([x, w])
    assert isinstance(results, list) and torch.equal(results[0], expected)
    out = torch.empty(16, N).half()
    assert program(inputs=[x, w], out=out)[0] is out
    assert torch.equal(out, expected)
    with pytest.raises(ShapeError, match="input X has shape"):
        program(x[:8], w)
    with pytest.raises(DTypeError, match="input W is"):
        program(x, w.float())
    with pytest.raises(GraphError, match="either by position or as inputs="):
        program(x, inputs=[x, w])
    with pytest.raises(ShapeError, match=r"takes 3 tensors \(X, W, t\d+\), got 0"):
        program.launch([], stream=0, device=0)


def test_what_it_says(one: Path) -> None:
    program = load(one)
    assert program.explain() == "how it was found"
    assert program.arch == "sm_90a"
    assert program.version
    assert repr(program) == "ExportedProgram(1 kernel(s): kernel; sm_90a)"


# --- files from outside --------------------------------------------------------------------------


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to open a library fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the library was opened")

    monkeypatch.setattr(ctypes, "CDLL", refuse)


def test_nothing_runs_before_validation(two: Path, tmp_path: Path, unopened: None) -> None:
    content = two.read_bytes()
    for old, new in ((b'"M"', b'"Q"'), (b'"places": [0, 3]', b'"places": [0, 0]'),
                     (b'"graph"', b'"grape"'), (b'"steps"', b'"stops"')):  # fmt: skip
        assert old in content
        broken = tmp_path / "broken.so"
        broken.write_bytes(content.replace(old, new, 1))
        with pytest.raises(FormatError, match=r"broken\.so"):
            load(broken)
    with pytest.raises(AssertionError, match="was opened"):
        load(two)


def test_a_library_that_is_damaged_anywhere_is_refused(
    two: Path, tmp_path: Path, unopened: None
) -> None:
    """Damaged code would not fail, it would end the process."""
    content, broken = two.read_bytes(), tmp_path / "broken.so"
    for place in range(100, len(content), len(content) // 40):
        damaged = bytearray(content)
        damaged[place] ^= 4
        broken.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"broken\.so"):
            load(broken)
    broken.write_bytes(content)
    with pytest.raises(AssertionError, match="was opened"):
        load(broken)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/zero", "a device or a pipe is no library"),  # it has no end
        ("a\0b", "is not the name of a file"),
        ("", "is not the name of a file"),
        (None, r"load\(NoneType\): give it the name of a file"),
        (b"/nothing/there.so", "No such file"),
    ],
)
def test_names_that_are_no_files(path: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load(path)


def test_programs_are_copied_as_themselves_and_not_pickled(two: Path) -> None:
    program = load(two)
    assert copy.deepcopy([program])[0] is program and copy.copy(program) is program
    with pytest.raises(GraphError, match=r"cannot be pickled.*dumps\(program.graph\)"):
        pickle.dumps(program)


def test_a_library_without_a_program(cache: KernelCache, folder: Path) -> None:
    [step] = compiled(fused()[1], cache).steps
    with fake_runtime():
        export_library([Part([step.artifact], {})], folder / "bare.so")
    with pytest.raises(FormatError, match="graph"):
        load(folder / "bare.so")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _places(inner, (*path, key))


@pytest.mark.parametrize("junk", [None, -1, 10**9, 0.5, "x", [], {}, [[]]], ids=repr)
def test_damaged_metadata_is_refused_and_never_crashes(two: Path, junk: Any) -> None:
    metadata = read_metadata(two)
    for path in _places(metadata):
        damaged = copy.deepcopy(metadata)
        inner = functools.reduce(lambda value, key: value[key], path[:-1], damaged)
        inner[path[-1]] = junk
        with contextlib.suppress(FormatError):  # some fields may say anything: reports, hints
            check_metadata(damaged, "damaged.so")
            for part in damaged["programs"]:
                _Reader(part, "damaged.so").read()


def test_a_program_that_writes_an_input(two: Path) -> None:
    [part] = read_metadata(two)["programs"]
    for places in ([0, 0], [3, 0], [3, 3], [0, 2], [0]):
        part["program"]["steps"][0]["places"] = places
        with pytest.raises(FormatError, match="export it again"):
            _Reader(part, "x.so").read()


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one", "two"])
def test_on_a_device(cache: KernelCache, tmp_path: Path, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the plans are for sm_90a")
    g, mu = fused() if name == "one" else two_kernels(symbol("M", 32))
    export_program(g, [compiled(mu, cache, dependent_launch=name == "one")], tmp_path / "real.so")
    script = BLOCKED + textwrap.dedent(f"""
    import torch
    from cutesuper.ir.evaluate import evaluate
    program = load({str(tmp_path / "real.so")!r})
    torch.manual_seed(0)
    for rows in (16,) if {name == "one"} else (1, 16, 33, 300):
        x = torch.randn(rows, {K}, device="cuda").half()
        w = torch.randn({K}, {N}, device="cuda").half() / 16
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            z = program(x, w)
        stream.synchronize()
        [exact] = evaluate(program.graph, [x, w], torch.float64)
        [eager] = evaluate(program.graph, [x, w])
        allowed = 2 * (eager.double() - exact).abs().max() + 2 ** -9 * exact.abs().max()
        assert (z.double() - exact).abs().max() <= allowed, rows
    """)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
