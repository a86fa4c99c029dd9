"""Programs called from C: the launches that Python makes, checked arguments, an example in C++."""

from __future__ import annotations

import contextlib
import ctypes
import runpy
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutesuper.errors import FormatError
from cutesuper.ir.graph import symbol
from cutesuper.runtime import toolchain
from cutesuper.runtime.c_interface import Wiring, c_interface, name_of
from cutesuper.runtime.cache import PTX, KernelCache
from cutesuper.runtime.library import read_metadata
from cutesuper.runtime.program import export_program, load
from tests.fake_runtime import Launch, build_fake_runtime, record_launches

pytest.importorskip("cutlass")
if shutil.which("gcc") is None:
    pytest.skip("exporting and recording launches need gcc", allow_module_level=True)

N, K = 128, 512
X, W, Z, MEMORY = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000, 0x7F0000004000
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cpp"


@contextlib.contextmanager
def fake_runtime() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        yield


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norm and product in two kernels, any number of rows, with its header."""
    from tests.test_program import compiled, two_kernels

    folder = tmp_path_factory.mktemp("c")
    g, mu = two_kernels(symbol("M", 32))
    with fake_runtime():
        variant = compiled(mu, KernelCache(folder / "cache"))
        export_program(g, [variant], folder / "norm.so", folder / "norm.h")
    return folder / "norm.so"


def recorded(script: str) -> list[Launch]:
    prelude = """
    import sys
    for name in ("cutlass", "tvm_ffi", "cuda", "numpy"):
        sys.modules[name] = None
    from ctypes import CDLL, c_char_p, c_int64, c_void_p
    def opened(path):
        library = CDLL(path)
        library.norm_workspace_bytes.restype = c_int64
        library.norm_error_text.restype = c_char_p
        return library
    def run(library, tensors, rows, workspace, stream=0x77):
        sizes = (c_int64 * 1)(rows) if rows is not None else None
        array = (c_void_p * len(tensors))(*tensors) if tensors else None
        return library.norm_run(array, sizes, c_void_p(workspace), c_void_p(stream))
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(script)
    return record_launches(script, parameter_bytes=(16, 16))


@pytest.mark.parametrize("rows", [1, 33])
def test_launches_are_those_of_python(library: Path, rows: int) -> None:
    ours = recorded(f"""
    library = opened({str(library)!r})
    assert library.norm_workspace_bytes((c_int64 * 1)({rows})) == {-(-rows * K * 2 // 256) * 256}
    status = run(library, [{X}, {W}, {Z}], {rows}, {MEMORY})
    assert status == 0, library.norm_error_text(status)
    """)
    theirs = recorded(f"""
    from cutesuper.runtime.arguments import RawTensor
    from cutesuper.runtime.program import load
    def raw(pointer, *shape):
        return RawTensor(pointer, shape, (shape[1], 1), "float16")
    values = [raw({X}, {rows}, {K}), raw({W}, {K}, {N}), raw({Z}, {rows}, {N})]
    values.append(raw({MEMORY}, {rows}, {K}))
    load({str(library)!r}).launch(values, stream=0x77, device=0)
    """)
    # behind pointer and rows come bytes that nobody sets
    ours, theirs = ([replace(n, parameters=tuple(p[:12] for p in n.parameters)) for n in launches]
                    for launches in (ours, theirs))  # fmt: skip
    assert len(ours) == 2 and ours == theirs


def test_arguments_are_checked(library: Path) -> None:
    launches = recorded(f"""
    library = opened({str(library)!r})
    good = [{X}, {W}, {Z}]
    def said(*arguments):
        status = run(library, *arguments)
        assert status < 0
        return library.norm_error_text(status).decode()
    assert said(None, 4, {MEMORY}) == "tensors is NULL"
    assert said(good, None, {MEMORY}) == "sizes is NULL"
    assert said(good, 4, None) == "workspace is NULL, and this program needs one"
    assert said(good, 4, {MEMORY + 16}) == "workspace does not begin at a multiple of 256 bytes"
    assert said([{X}, None, {Z}], 4, {MEMORY}) == "tensors[1] (W) is NULL"
    assert said([{X}, {W}, {Z + 2}], 4, {MEMORY}).endswith("begin at a multiple of 16 bytes")
    for rows in (-1, 2**31, 2**62):
        assert said(good, rows, {MEMORY}) == "sizes[0] (M) is negative or has more than 31 bits"
    assert "(X) would have more than 2147483647 elements" in said(good, 2**22, {MEMORY})
    assert library.norm_workspace_bytes((c_int64 * 1)(2**22)) < 0
    assert library.norm_error_text(-77) == b"no status of this program"
    assert library.norm_error_text(0) == b"no error"
    assert run(library, [None, {W}, None], 0, None) == 0  # nothing to do, so nothing is launched
    """)
    assert launches == []


def test_errors_of_launches_come_back(library: Path) -> None:
    assert (
        recorded(f"""
    import os
    os.environ["FAKE_CUDA_FAIL"] = "700"
    library = opened({str(library)!r})
    assert run(library, [{X}, {W}, {Z}], 4, {MEMORY}) == 700
    assert library.norm_error_text(700) == b"fake failure"
    """)
        == []
    )


def test_a_library_with_functions_of_c_is_one_of_python_too(library: Path) -> None:
    assert load(library).explain() == "how it was found"
    header = library.with_suffix(".h").read_text()
    assert "tensors[1]  input   W  float16 [512, 128]" in header
    assert "sizes[0]  M" in header and "norm_tensors = 3, norm_sizes = 1" in header


def test_the_header_names_the_functions(tmp_path: Path) -> None:
    assert name_of(Path("a/b/Model_2.h")) == "Model_2"
    for name in ("model", "2.h", "mein modell.h", "größe.h", "x.c"):
        with pytest.raises(FormatError, match=r"must be a name in C and end in \.h"):
            name_of(Path(name))


# -------------------------------------------------------------------------------------- the example

#: stands for CUDA's toolkit where CMake looks for it
TOOLKIT = """
add_library(CUDA::cudart SHARED IMPORTED)
set_target_properties(CUDA::cudart PROPERTIES IMPORTED_LOCATION "{folder}/libcudart.so"
    INTERFACE_INCLUDE_DIRECTORIES "{folder}")
set(CUDAToolkit_FOUND TRUE)
"""
CUDA_HEADER = """
#include <stddef.h>
extern "C" {
typedef struct CUstream_st *cudaStream_t;
enum { cudaMemcpyHostToDevice = 1 };
int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemcpy(void *, const void *, size_t, int);
int cudaStreamCreate(cudaStream_t *), cudaStreamSynchronize(cudaStream_t);
int cudaStreamDestroy(cudaStream_t);
}
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_the_example_in_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported, built by CMake against a CUDA that launches nothing, and run."""
    fake = build_fake_runtime().cudart_static
    out = tmp_path / "out"
    with fake_runtime():
        _export(monkeypatch, str(out), "--target", "h200", "--width", "64")
    (tmp_path / "FindCUDAToolkit.cmake").write_text(TOOLKIT.format(folder=tmp_path))
    (tmp_path / "cuda_runtime_api.h").write_text(CUDA_HEADER)
    whole = ["-Wl,--whole-archive", str(fake), "-Wl,--no-whole-archive"]
    _run("gcc", "-shared", "-Wl,-soname,libcudart.so", "-o", str(tmp_path / "libcudart.so"), *whole)
    _run("cmake", "-S", str(EXAMPLE), "-B", str(out), f"-DCMAKE_MODULE_PATH={tmp_path}")
    _run("cmake", "--build", str(out))
    monkeypatch.setenv("FAKE_CUDA_LOG", str(tmp_path / "launches"))
    said = _run(str(out / "main"), str(out / "parameters.bin"), "64", "40")
    assert said.startswith("ran 40 rows with a workspace of ")
    launches = (tmp_path / "launches").read_text().splitlines()
    assert len(launches) == len(load_steps(out / "mlp.so")) > 0
    failed = subprocess.run([out / "main", out / "parameters.bin", "64", "-1"],
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert failed.returncode == 1
    assert "sizes[0] (rows) is negative or more than 4096" in failed.stderr
    header = (out / "mlp.h").read_text()
    assert "sizes[0]  rows, at most 4096" in header and "float16 [rows, 64]" in header
    with pytest.raises(FormatError, match="exported for C: call it as its header says"):
        load(out / "mlp.so")


def _export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the script of the example that writes the library."""
    monkeypatch.setattr("sys.argv", ["export.py", *arguments])
    runpy.run_path(str(EXAMPLE / "export.py"), run_name="__main__")


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_the_example_in_cpp_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported for this GPU, built by CMake against CUDA, and run on the real driver."""
    _export(monkeypatch, str(tmp_path))
    configure = ["cmake", "-S", str(EXAMPLE), "-B", str(tmp_path)]
    done = subprocess.run(configure, capture_output=True, text=True, check=False)
    if done.returncode and "CUDAToolkit" in done.stderr:
        pytest.skip("needs the CUDA toolkit")
    assert done.returncode == 0, done.stderr
    _run("cmake", "--build", str(tmp_path))
    said = _run(str(tmp_path / "main"), str(tmp_path / "parameters.bin"), "1024", "40")
    assert said.startswith("ran 40 rows with a workspace of ")


def test_the_header_says_the_bounds_of_extents() -> None:
    wiring = Wiring([tensor("x", "n", "m", "k")], [tensor("y", "n", 4)], [], [], [], {}, {},
                    {"n": (3, 4096), "m": (0, 64), "k": (8, None)})  # fmt: skip
    made = c_interface("f", wiring, [])
    for line in ("sizes[0]  n, 3 to 4096", "sizes[1]  m, at most 64", "sizes[2]  k, at least 8"):
        assert line in made.header
    for line in ("s[0] < 3 || s[0] > 4096", "s[1] < 0 || s[1] > 64", "s[2] < 8 || s[2] > INT32"):
        assert line in made.source
    assert "sizes[0] (n) is less than 3 or more than 4096" in made.source


def load_steps(path: Path) -> list[Any]:
    (built,) = read_metadata(path)["programs"]
    return built["program"]["steps"]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------- its numbers


@pytest.mark.gpu
@pytest.mark.ptx
def test_numbers_of_a_traced_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two regions with views between, and tensors between kernels, called from C."""
    import torch

    import cutesuper as cs

    norm, w, v = (torch.randn(*s, device="cuda").half() for s in ((64,), (160, 64), (64, 128)))

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.nn.functional.rms_norm(x, (64,), norm, 1e-6)
        z = x + torch.nn.functional.gelu(h @ w[32:].t()) @ v.t()  # a part of a weight
        return z.sum(1), (z.reshape(-1, 8, 8) * 2).amax(-1)

    x = torch.randn(40, 64, device="cuda").half()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = cs.superoptimize(fn, (x,), dynamic_shapes=({0: tokens},))
    steps = [s for region in program.regions for s in region.kernel.kernels]
    path = tmp_path / "fn.so"
    machine = x.device.type == "cpu"
    with fake_runtime() if machine else contextlib.nullcontext():
        program.export(path, header=tmp_path / "fn.h")
    out = [torch.full(s, torch.nan, device="cuda").half() for s in ((40,), (40, 8))]
    tensors = [x, norm, w, v, *out]
    library, sizes = ctypes.CDLL(str(path)), (ctypes.c_int64 * 1)(40)
    library.fn_workspace_bytes.restype = ctypes.c_int64
    space = torch.full((library.fn_workspace_bytes(sizes) + 256,), 255, device="cuda").byte()
    space = space[-space.data_ptr() % 256 :]
    given = (ctypes.c_void_p * 6)(*[t.data_ptr() for t in tensors])
    if machine:
        handler = on_machine(steps, [*tensors, space])
        address = ctypes.cast(handler, ctypes.c_void_p).value
        monkeypatch.setenv("FAKE_CUDA_HANDLER", str(address))
    assert library.fn_run(given, sizes, ctypes.c_void_p(space.data_ptr()), None) == 0
    if not machine:
        torch.cuda.synchronize()
    for ours, theirs in zip(out, program(x), strict=True):
        assert torch.equal(ours, theirs)


def on_machine(steps: list[Any], tensors: list[Any]) -> Any:
    """The stand-in for CUDA's launch: the machine of tests/ptx runs the kernels, in this order."""
    from tests.ptx import run

    memory = [(t.data_ptr(), t.nbytes, True) for t in tensors]
    texts = iter([step.artifact.plain().files[PTX].decode() for step in steps])

    @run._HANDLER
    def launch(numbers: Any, shared: int, cooperative: int, arguments: Any) -> int:
        ptx = next(texts)
        contents = tuple(
            ctypes.string_at(arguments[k], size) for k, size in enumerate(run.parameter_sizes(ptx))
        )
        grid, block, cluster = (tuple(numbers[3 * k + i] for i in range(3)) for k in range(3))
        launched = run.Launched(grid, block, cluster, shared, bool(cooperative), contents)
        run.run_launch(run.executable(ptx), launched, memory, run.USUAL)
        return 0

    return launch


# ------------------------------------------------------------------------------------ the workspace


def tensor(name: str, *shape: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": "float32", **more}


def test_the_workspace(tmp_path: Path) -> None:
    """Memory that has to be zero comes first and is set to zero, tensors may share a place, and
    rows that stay are copied."""
    wiring = Wiring(
        [tensor("X", "M", 8), tensor('"\\?*/é', 4)], [tensor("Y", "M", 8)],
        [tensor("T", "M", 8), tensor("U", "M", 8)],
        [tensor("part", ["M", 64], 100, zeroed=False), tensor("count", ["M", 64], zeroed=True)],
        [], {4: 3}, {2: 0},
    )  # fmt: skip
    interface = c_interface("x", wiring, [])
    (tmp_path / "run.c").write_text(interface.source + """
#include <stdio.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{ printf("copy %d %d\\n", (int)bytes, to != from); return 0; }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream)
{ printf("zero %d\\n", (int)bytes); return 0; }
int cutesuper_load(int device) { printf("load\\n"); return 0; }
const char *cutesuper_error_text(int status) { return "cuda"; }
int main(void)
{
    static char memory[1 << 20] __attribute__((aligned(256)));
    void *tensors[3] = { memory, memory, memory + 4096 };
    int64_t sizes[1] = { 130 };
    printf("%d\\n", (int)x_workspace_bytes(sizes));
    printf("%d\\n", x_run(tensors, sizes, memory, 0));
    tensors[2] = memory;
    printf("%d\\n", x_run(tensors, sizes, memory, 0));
    printf("%s\\n", x_error_text(-2001));
    return 0;
}
""")  # fmt: skip
    command = ["gcc", "-Wall", "-Werror", "-Wno-unused-function", "run.c", "-o", "run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    out = subprocess.run([tmp_path / "run"], check=True, capture_output=True).stdout.decode()
    size = 256 + 130 * 8 * 4 // 256 * 256 + 256 + -(-3 * 100 * 4 // 256) * 256
    assert out.splitlines() == [
        str(size), "load", "zero 256", f"copy {130 * 8 * 4} 1", "0", "zero 256", "0",
        'tensors[1] ("\\?*/é) is NULL',
    ]  # fmt: skip
