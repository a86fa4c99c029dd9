"""Search for tools and libraries outside Python: nvdisasm, the C compiler, static archives.

Nothing here imports CuTe DSL. A search returns ``None`` when nothing was found; the ``require_*``
functions turn that into a :class:`CompileError` that names the package to install.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from cutesuper.errors import CompileError

DSL_PACKAGE = "nvidia-cutlass-dsl"
CUDART_VARIABLE = "CUTESUPER_CUDART_STATIC"

_CPU_LEVELS = (
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("v3", {"avx2", "bmi1", "bmi2", "fma", "movbe"}),
    ("v2", {"ssse3", "sse4_1", "sse4_2", "popcnt"}),
)


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=1)
def dsl_versions() -> dict[str, str]:
    """Versions that determine the compiler's output, without importing the compiler.

    Returns:
        ``{"dsl": ..., "flavours": "cu12+...", "tvm_ffi": ...}``.

    Raises:
        CompileError: when CuTe DSL or TVM-FFI is not installed.
    """
    packages = {"dsl": DSL_PACKAGE, "tvm_ffi": "apache-tvm-ffi"}
    found = {name: package_version(package) for name, package in packages.items()}
    missing = " ".join(packages[name] for name, version in found.items() if version is None)
    if missing:
        raise CompileError(
            "compiling a kernel needs CuTe DSL and TVM-FFI, of which this Python has not all; run: "
            f"pip install {missing}"
        )
    flavours = [
        f"{flavour}-{version}"
        for flavour in ("cu12", "cu13")
        if (version := package_version(f"{DSL_PACKAGE}-libs-{flavour}")) is not None
    ]
    return {name: version or "" for name, version in found.items()} | {
        "flavours": "+".join(flavours)
    }


@functools.lru_cache(maxsize=1)
def host_machine() -> str:
    """The processor level that host code is generated for, e.g. ``x86_64-v3``.

    The compiler emits launch code for the processor it runs on (AVX and up), so an object made on
    one machine of a cluster can be illegal on another that shares the home directory.
    """
    machine = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return machine
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())
    level = next((name for name, needed in _CPU_LEVELS if needed <= flags), None)
    return f"{machine}-{level}" if level else machine


def available_processors() -> int:
    """Number of processors this process may use; a container or a batch system may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_nvdisasm() -> Path | None:
    """``nvdisasm`` from the ``nvidia-cuda-nvdisasm`` wheel, from PATH or from a CUDA toolkit."""
    candidates = _wheel_files("nvidia-cuda-nvdisasm", "nvdisasm")
    on_path = shutil.which("nvdisasm")
    toolkits = (root / "bin" / "nvdisasm" for root in _toolkits())
    return _first([*candidates, *([Path(on_path)] if on_path else []), *toolkits])


def require_nvdisasm() -> Path:
    """``nvdisasm`` as in :func:`find_nvdisasm`; raises :class:`CompileError` when there is none."""
    found = find_nvdisasm()
    if found is None:
        raise CompileError(
            "reading SASS needs nvdisasm, which is neither in a wheel nor on PATH nor in a CUDA "
            "toolkit; run: pip install nvidia-cuda-nvdisasm"
        )
    return found


def require_c_compiler() -> str:
    """The C compiler used to link exported kernels (``$CC``, ``cc``, ``gcc`` or ``clang``)."""
    asked = os.environ.get("CC")
    for name in (asked, "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return os.path.abspath(found)
    also = f"CC={asked} is no program, and " if asked else ""
    raise CompileError(
        f"exporting a kernel needs a C compiler to link a shared library; {also}none of cc, gcc, "
        "clang is on PATH; install one or set CC"
    )


def require_cudart_static() -> Path:
    """``libcudart_static.a``: ``$CUTESUPER_CUDART_STATIC``, a toolkit, or the runtime wheel."""
    override = os.environ.get(CUDART_VARIABLE)
    if override:
        if not Path(override).is_file():
            raise CompileError(f"{CUDART_VARIABLE}={override}: no such file")
        return Path(override)
    name = "libcudart_static.a"
    wheels = [
        path
        for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
        for path in _wheel_files(package, name)
    ]
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    toolkits = (root / folder / name for root in _toolkits() for folder in folders)
    found = _first([*wheels, *toolkits])
    if found is None:
        raise CompileError(
            f"exporting a kernel links {name}, which is in no CUDA toolkit or wheel here; run: "
            "pip install nvidia-cuda-runtime (or nvidia-cuda-runtime-cu12), "
            f"or set {CUDART_VARIABLE} to the file"
        )
    return found


def require_dialect_archive(cuda_major: int) -> Path:
    """The static launch runtime inside the DSL wheel for the flavour of one CUDA version."""
    name = "libcuda_dialect_runtime_static.a"
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found = _first(root / f"cu{cuda_major}" / "lib" / name for root in roots)
    if found is None:
        raise CompileError(
            f"exporting a kernel links {name} of the cu{cuda_major} flavour of CuTe DSL, which is "
            f"not installed; run: pip install --force-reinstall {DSL_PACKAGE}"
        )
    return found


def run_tool(command: list[str], what: str) -> str:
    """Run a tool and return its output.

    Raises:
        CompileError: with the first lines of its errors when it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{what}: cannot start {command[0]}: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()[:8]
        reason = "\n  ".join(lines) or "it printed nothing"
        raise CompileError(f"{what}: {command[0]} ended with {done.returncode}:\n  {reason}")
    return done.stdout


def _wheel_files(package: str, name: str) -> Iterator[Path]:
    """Files called ``name`` that an installed distribution owns."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == name:
            yield Path(str(file.locate()))


def _toolkits() -> Iterator[Path]:
    """Roots of CUDA toolkits, those named by the user first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root)
    yield from sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parent.parent


def _first(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)
