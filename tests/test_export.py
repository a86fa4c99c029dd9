"""Launches, recorded without a GPU: TVM-FFI callables and kernels from exported libraries."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from cutesuper.errors import CompileError, DeviceError, FormatError
from cutesuper.pipeline import current_target
from cutesuper.runtime import toolchain
from cutesuper.runtime.arguments import RawTensor
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import compile_kernel
from cutesuper.runtime.export import Part, export_library
from cutesuper.runtime.library import load_library, read_metadata
from cutesuper.runtime.resources import parse_cubin
from tests import kernels
from tests.fake_runtime import Launch, build_fake_runtime, record_launches

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if shutil.which("gcc") is None:
    pytest.skip("exporting and recording launches need gcc", allow_module_level=True)

X, Z, Y = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000
PROGRAM = {"verified": {"trials": 3}, "text": 'ü " \\ \n'}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    """A cache where the kernels are compiled, so that recording scripts only load."""
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    for name in ("scale_add", "cluster_sum"):
        compile_kernel(kernels.request(name), cache)
    return cache


@pytest.fixture(scope="module")
def library(cache: KernelCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``scale_add`` exported against the fake runtime."""
    path = tmp_path_factory.mktemp("export") / "scale_add.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        artifact = compile_kernel(kernels.request("scale_add", outputs=(2,)), cache)
        export_library([Part([artifact], PROGRAM)], path)
    return path


@pytest.fixture(scope="module")
def both(cache: KernelCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``scale_add`` for two architectures in one file, against the fake runtime."""
    path = tmp_path_factory.mktemp("export") / "both.so"
    requests = [kernels.request("scale_add", arch=a, outputs=(2,)) for a in ("sm_90a", "sm_100a")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        export_library([Part([compile_kernel(r, cache)], {}) for r in requests], path)
    return path


def _record(cache: KernelCache, script: str, sizes: tuple[int, ...] = ()) -> list[Launch]:
    header = (
        "from tests import kernels\n"
        "from tests.fake_runtime import cuda_tensor\n"
        "from cutesuper.runtime.compile import compile_kernel\n"
        "from cutesuper.runtime.arguments import RawTensor\n"
        "from cutesuper.runtime.library import load_library\n"
    )
    environment = {"CUTESUPER_CACHE": str(cache.root)}
    return record_launches(header + script, parameter_bytes=sizes, environment=environment)


def _parameter_sizes(cache: KernelCache, name: str) -> tuple[int, ...]:
    [kernel] = parse_cubin(compile_kernel(kernels.request(name), cache).cubin).values()
    return kernel.parameter_bytes


def _check_scale_add(launch: Launch, rows: int, stride: int, stream: int) -> None:
    assert "ScaleAdd" in launch.kernel
    assert launch.grid == (rows, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert (launch.smem, launch.pdl, launch.cooperative) == (0, False, False)
    assert launch.stream == stream
    x, z, y, a = launch.parameters
    assert struct.unpack("<Qi", x[:12]) == (X, rows)
    assert struct.unpack("<Qi4xq", z) == (Z, rows, stride)
    assert struct.unpack("<Qi", y[:12]) == (Y, rows)
    assert struct.unpack("<f", a) == (0.5,)


def test_tvm_ffi_launches(cache: KernelCache) -> None:
    script = f"""
import tvm_ffi
kernel = compile_kernel(kernels.request("scale_add", outputs=(2,))).load()
y = cuda_tensor((33, 1024), "bfloat16", pointer={Y})
x = cuda_tensor((33, 1024), "bfloat16", pointer={X})
z = cuda_tensor((33, 1024), "bfloat16", (2048, 1), pointer={Z})
with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77):
    kernel([x, z], y, 0.5)

def refused(text, call):
    try:
        call()
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

refused("dtype", lambda: kernel([cuda_tensor((33, 1024), "float16"), z], y, 0.5))
refused("shape", lambda: kernel([cuda_tensor((33, 1000), "bfloat16"), z], y, 0.5))
refused("shape", lambda: kernel([cuda_tensor((32, 1024), "bfloat16"), z], y, 0.5))
refused("align", lambda: kernel([cuda_tensor((33, 1024), "bfloat16", pointer=2), z], y, 0.5))
"""
    [launch] = _record(cache, script, _parameter_sizes(cache, "scale_add"))
    _check_scale_add(launch, 33, 2048, 0x77)


def test_cluster_and_dependent_launch(cache: KernelCache) -> None:
    script = """
kernel = compile_kernel(kernels.request("cluster_sum")).load()
kernel(cuda_tensor((32, 1024), "float32"), cuda_tensor((32,), "float32"))
"""
    [launch] = _record(cache, script)
    assert launch.grid == (32, 1, 1)
    assert launch.cluster == (2, 1, 1)
    assert launch.smem == 512
    assert launch.pdl
    assert not launch.cooperative


def test_exported_launches(cache: KernelCache, library: Path) -> None:
    script = f"""
import sys
[kernel] = load_library({str(library)!r}).kernels
def call(rows, stride):
    x = RawTensor({X}, (rows, 1024), (1024, 1), "bfloat16")
    z = RawTensor({Z}, (rows, 1024), (stride, 1), "bfloat16")
    y = RawTensor({Y}, (rows, 1024), (1024, 1), "bfloat16")
    kernel.launch([x, z, y, 0.5], stream=0x1234567890, device=0)
call(33, 2048)
call(0, 2048)      # writes nothing: no launch
call(70000, 1024)
call(1, 3)         # the stride of one row means nothing
assert not {{"cutlass", "tvm_ffi", "torch"}} & set(sys.modules)
"""
    launches = _record(cache, script, _parameter_sizes(cache, "scale_add"))
    assert len(launches) == 3
    _check_scale_add(launches[0], 33, 2048, 0x1234567890)
    _check_scale_add(launches[1], 70000, 1024, 0x1234567890)
    _check_scale_add(launches[2], 1, 8, 0x1234567890)


def test_exported_library_needs_only_libc(library: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "-dW", str(library)], capture_output=True, text=True, check=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"}


def test_a_launch_that_fails(cache: KernelCache, library: Path) -> None:
    script = f"""
import os
from cutesuper.errors import DeviceError
os.environ["FAKE_CUDA_FAIL"] = "700"
[kernel] = load_library({str(library)!r}).kernels
tensor = RawTensor({X}, (4, 1024), (1024, 1), "bfloat16")
try:
    kernel.launch([tensor, tensor, tensor, 1.0], stream=0, device=0)
except DeviceError as error:
    assert "fake failure (CUDA error 700)" in str(error), error
else:
    raise AssertionError("no error")
"""
    assert _record(cache, script) == []


def test_launches_that_would_crash(cache: KernelCache, library: Path) -> None:
    """Called from C with what cannot be right: an error of CUDA's, and nothing is launched."""
    script = f"""
import ctypes, struct
library = ctypes.CDLL({str(library)!r})
launch = library.cutesuper_launch
INVALID, NOT_LOADED = 1, 3

def arguments(x=(0x1000, 4), z=(0x2000, 4, 1024), y=(0x3000, 4)):
    packed = [struct.pack("<Qi4x", *x), struct.pack("<Qi4xq", *z), struct.pack("<Qi4x", *y),
              struct.pack("<f", 1.0), struct.pack("<Q", 0)]
    kept = [ctypes.create_string_buffer(p, len(p)) for p in packed]
    array = (ctypes.c_void_p * 5)(*map(ctypes.addressof, kept))
    array.kept = kept
    return array

good = arguments()
assert launch(0, good, 5) == NOT_LOADED
for device in (-1, 256, -2**31, 2**31 - 1):
    assert library.cutesuper_load(device) == 101
assert library.cutesuper_load(0) == 0
for kernel in (-1, 1, -2**31, 2**31 - 1):
    assert launch(kernel, good, 5) == INVALID
assert launch(0, None, 0) == launch(0, None, 5) == INVALID
for count in (-1, 0, 1, 4, 6, 256, 257, -2**31, 2**31 - 1):
    assert launch(0, good, count) == INVALID, count
for n in range(5):
    hole = arguments()
    hole[n] = None
    assert launch(0, hole, 5) == INVALID, n
negative = dict(x=(0x1000, -1)), dict(z=(0x2000, -2**31, 1024)), dict(y=(0x3000, -4))
nowhere = dict(x=(0, 4)), dict(z=(0, 4, 1024)), dict(y=(0, 4))
for bad in (*negative, *nowhere):
    assert launch(0, arguments(**bad), 5) == INVALID, bad
assert launch(0, good, 5) == 0
assert launch(0, arguments(x=(0, 0), z=(0, 0, 1024), y=(0, 0)), 5) == 0  # CUDA says what it thinks
"""
    launches = _record(cache, script)
    assert [launch.grid for launch in launches] == [(4, 1, 1), (0, 1, 1)]


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_program_for_the_device_is_chosen(
    cache: KernelCache, both: Path, capability: int
) -> None:
    """One of two architectures is picked at the load; another device asks CUDA to run the first."""
    script = f"""
from cutesuper.errors import DeviceError
import os
os.environ["FAKE_CUDA_CAPABILITY"] = "{capability}"
library = load_library({str(both)!r})
hopper, blackwell = library.kernels
assert (hopper.arch, blackwell.arch) == ("sm_90a", "sm_100a")
assert library.program() == {int(capability == 100)}
x, y = (RawTensor(p, (8, 1024), (1024, 1), "bfloat16") for p in ({X}, {Y}))
chosen, other = (hopper, blackwell)[:: -1 if library.program() else 1]
chosen.launch([x, x, y, 0.5], stream=0, device=0)
try:
    other.launch([x, x, y, 0.5], stream=0, device=0)
except DeviceError as error:
    assert "CUDA error 3" in str(error), error
else:
    raise AssertionError("kernels of the other program are not loaded")
"""
    [launch] = _record(cache, script)
    assert "ScaleAdd" in launch.kernel and launch.grid == (8, 1, 1)


def test_a_relative_name_is_a_file_of_the_current_folder(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that the loader finds in LD_LIBRARY_PATH."""
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(path) or real(path))
    shutil.copy(library, tmp_path / "scale_add.so")
    load_library("scale_add.so")
    assert opened == [str(tmp_path / "scale_add.so")]
    (tmp_path / "scale_add.so").unlink()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    with pytest.raises(FormatError, match=r"scale_add\.so: cannot read it: No such file"):
        load_library("scale_add.so")


real = ctypes.CDLL


def test_libraries_that_others_can_write(library: Path, tmp_path: Path) -> None:
    mine = tmp_path / "shared" / "mine.so"
    mine.parent.mkdir()
    shutil.copy(library, mine)
    mine.chmod(0o666)
    with pytest.raises(FormatError, match=r"mine\.so can be written by others \(mode 0666\)"):
        load_library(mine)
    mine.chmod(0o644)
    mine.parent.chmod(0o777)
    with pytest.raises(FormatError, match=r"shared can be written by others .*chmod go-w"):
        load_library(mine)
    mine.parent.chmod(0o1777)
    load_library(mine)
    if os.geteuid() == 0:
        os.chown(mine, 12345, -1)  # whoever may put files there
        with pytest.raises(FormatError, match=r"mine\.so belongs to user 12345"):
            load_library(mine)
        mine.parent.chmod(0o755)
        load_library(mine)  # a name that the user has chosen, in nobody else's folder


def test_exporting_follows_no_link(
    cache: KernelCache, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the file's own nor one that somebody has put where it is written first."""
    monkeypatch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
    target, other = tmp_path / "x.so", tmp_path / "other"
    other.write_text("other")
    target.symlink_to(other)
    (tmp_path / f".x.so.{os.getpid()}").symlink_to(other)
    artifact = compile_kernel(kernels.request("scale_add", outputs=(2,)), cache)
    export_library([Part([artifact], {})], target)
    assert other.read_text() == "other"
    assert not target.is_symlink()
    load_library(target)


def test_the_compiler_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    assert os.path.isabs(toolchain.require_c_compiler())


def test_metadata(library: Path) -> None:
    metadata = read_metadata(library)
    [part] = metadata["programs"]
    [kernel] = part["kernels"]
    assert kernel["name"] == "scale_add"
    assert part["arch"] == "sm_90a"
    assert kernel["outputs"] == [2]
    assert part["program"] == PROGRAM
    assert [argument["kind"] for argument in kernel["arguments"]["arguments"]] == [
        "tensor", "tensor", "tensor", "scalar",
    ]  # fmt: skip
    assert kernel["launches"][0]["block"] == [128, 1, 1]


def test_arguments_are_checked(library: Path) -> None:
    [kernel] = load_library(library).kernels
    good = RawTensor(X, (8, 1024), (1024, 1), "bfloat16")

    def call(*arguments: object) -> None:
        kernel.launch(arguments, stream=0, device=0)

    def changed(**fields: object) -> RawTensor:
        return RawTensor(**{**good.__dict__, **fields})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="takes 4 arguments, got 2"):
        call(good, good)
    with pytest.raises(TypeError, match="argument 1: dtype float16"):
        call(good, changed(dtype="float16"), good, 1.0)
    with pytest.raises(ValueError, match="argument 2: extent 9 of dimension 0: another argument"):
        call(good, good, changed(shape=(9, 1024)), 1.0)
    with pytest.raises(ValueError, match=r"argument 0: extent 512 of dimension 1: .* for 1024"):
        call(changed(shape=(8, 512)), good, good, 1.0)
    with pytest.raises(ValueError, match="argument 0: shape"):
        call(changed(shape=(8192,), stride=(1,)), good, good, 1.0)
    with pytest.raises(ValueError, match=r"argument 0: stride 2048 .*contiguous"):
        call(changed(stride=(2048, 1)), good, good, 1.0)
    with pytest.raises(ValueError, match=r"argument 1: stride 1028 .* multiple of 8"):
        call(good, changed(stride=(1028, 1)), good, 1.0)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        call(changed(pointer=X + 2), good, good, 1.0)
    with pytest.raises(TypeError, match="expected a scalar, got a tensor"):
        call(good, good, good, good)
    with pytest.raises(TypeError, match="expected a tensor, got float"):
        call(1.0, good, good, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        call(good, good, good, "one")


def test_files_that_are_no_exported_kernels(library: Path, tmp_path: Path) -> None:
    content = library.read_bytes()
    broken = tmp_path / "broken.so"
    for size in (0, 10, 64, len(content) // 2, len(content) - 1):
        broken.write_bytes(content[:size])
        with pytest.raises(FormatError, match=r"broken\.so"):
            load_library(broken)
    with pytest.raises(FormatError, match="cannot read it"):
        load_library(tmp_path / "missing.so")
    with pytest.raises(FormatError, match="not exported by cutesuper"):
        load_library(build_fake_runtime().dsl_runtime)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"abi": 2', '"abi": 9'),
        ('"fields"', '"feelds"'),
        ('"outputs": [2]', '"outputs": [7]'),
        ('"symbols"', '"symbolx"'),
        ('"kernels"', '"kennels"'),
        ('"dtype"', '"dtypo"'),
        ('"size": 16', '"size": 11'),
        ('"kind": "scalar"', '"kind": "sculpt"'),
        ('{"abi"', "{{abi}"),
        ('"programs"', '"programz"'),
    ],
)
def test_changed_metadata(library: Path, tmp_path: Path, old: str, new: str) -> None:
    content = library.read_bytes()
    assert old.encode() in content
    broken = tmp_path / "broken.so"
    broken.write_bytes(content.replace(old.encode(), new.encode()))
    with pytest.raises(FormatError, match=r"broken\.so"):
        load_library(broken)


def test_real_cudart_without_a_device(cache: KernelCache, tmp_path: Path) -> None:
    try:
        toolchain.require_cudart_static()
    except CompileError as error:
        pytest.skip(str(error))
    if torch.cuda.is_available():
        pytest.skip("the launch would really happen here")
    artifact = compile_kernel(kernels.request("scale_add", outputs=(2,)), cache)
    path = tmp_path / "real.so"
    export_library([Part([artifact], {})], path)
    [kernel] = load_library(path).kernels
    tensor = RawTensor(X, (4, 1024), (1024, 1), "bfloat16")
    with pytest.raises(DeviceError, match=r"loading it on device 0 failed: .* \(CUDA error \d+\)"):
        kernel.launch([tensor, tensor, tensor, 1.0], stream=0, device=0)
    with pytest.raises(DeviceError, match="CUDA error 101"):
        kernel.launch([tensor, tensor, tensor, 1.0], stream=0, device=300)


def test_export_needs_tools(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = compile_kernel(kernels.request("scale_add"), cache)
    with pytest.raises(CompileError, match="the program is not JSON"):
        export_library([Part([artifact], {"tensor": torch.zeros(1)})], tmp_path / "x.so")
    with pytest.raises(CompileError, match="cannot write"):
        export_library([Part([artifact], {})], tmp_path / "no" / "such" / "folder.so")
    other = compile_kernel(kernels.request("scale_add", arch="sm_100a"), cache)
    with pytest.raises(CompileError, match="kernels are for one architecture"):
        export_library([Part([artifact, other], {})], tmp_path / "x.so")
    with pytest.raises(CompileError, match="for sm_90a, sm_90a; one for each architecture"):
        export_library([Part([artifact], {}), Part([artifact], {})], tmp_path / "x.so")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="needs a C compiler"):
        export_library([Part([artifact], {})], tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exported", [False, True])
def test_on_a_device(cache: KernelCache, tmp_path: Path, exported: bool) -> None:
    arch = current_target().arch
    artifact = compile_kernel(kernels.request("scale_add", arch=arch, outputs=(2,)), cache)
    x = torch.randn(77, 1024, device="cuda", dtype=torch.bfloat16)
    z = torch.randn(77, 2048, device="cuda", dtype=torch.bfloat16)[:, :1024]
    y = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if exported:
        export_library([Part([artifact], {})], tmp_path / "k.so")
        [kernel] = load_library(tmp_path / "k.so").kernels
        raw = [RawTensor(t.data_ptr(), t.shape, t.stride(), "bfloat16") for t in (x, z, y)]
        kernel.launch([*raw, 0.5], stream=stream.cuda_stream, device=x.device.index)
    else:
        with torch.cuda.stream(stream):
            artifact.load()([x, z], y, 0.5)
    stream.synchronize()
    expected = x.double() * 0.5 + z.double()
    assert torch.allclose(y.double(), expected, rtol=2**-8, atol=1e-6)
