"""The only module that runs CuTe DSL: one traced launcher in, object, cubin and PTX out.

CuTe DSL is imported inside functions, because its import takes half a second and snapshots the
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cutesuper.errors import CompileError
from cutesuper.runtime.arguments import describe_arguments
from cutesuper.runtime.host_module import LaunchFacts, entry_layouts, read_launches
from cutesuper.runtime.private import temporary_folder

# cute.compile keeps the options and the target of the current compile in one global object: four
# threads that compiled at once raised random errors. Tracing, loading and compiling all take this.
DSL_LOCK = threading.RLock()

Build = Callable[[], tuple[Any, tuple[Any, ...]]]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_REASON_LINES = 8


@dataclass(frozen=True)
class Compiled:
    """The output of one run of the compiler.

    Attributes:
        object: relocatable host object with the device code inside.
        cubin, ptx: the device code by itself.
        function: name of the object's entry point.
        arguments: described arguments, see :func:`describe_arguments`; with their memory layouts
            for the plain flavour.
        launches: constant facts of the launches.
        cuda_major: CUDA version of the DSL flavour (12 or 13).
    """

    object: bytes
    cubin: bytes
    ptx: str
    function: str
    arguments: dict[str, Any]
    launches: list[LaunchFacts]
    cuda_major: int


def import_without_torch() -> None:
    """Import TVM-FFI in a process that only compiles, without PyTorch.

    TVM-FFI imports an installed PyTorch in order to exchange tensors with it. That took 1.3 to 2
    seconds in every worker process, the time of four kernels.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment] - importing it raises ImportError
    try:
        with contextlib.suppress(ImportError):  # the compile will name a missing package
            import tvm_ffi  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        del sys.modules["torch"]


def compile_tvm_ffi(build: Build, arch: str, function: str, options: str = "") -> Compiled:
    """Compile to an object with a TVM-FFI entry point called ``function``.

    The stream is not an argument of that entry point: TVM-FFI passes the caller's current one, for
    the device of the first tensor. A launcher that takes only pointers is therefore refused.
    Exceptions of the builder and the compiler come through unchanged.
    """
    return _compile(build, arch, function, options, tvm_ffi=True)


def compile_plain(build: Build, arch: str, function: str, options: str = "") -> Compiled:
    """Compile to an object with a plain C entry point, for linking without TVM-FFI."""
    return _compile(build, arch, function, options, tvm_ffi=False)


def load_tvm_ffi(content: bytes, function: str) -> Callable[..., Any]:
    """Load an object made by :func:`compile_tvm_ffi`; device code follows at the first call.

    Raises:
        CompileError: when the object cannot be loaded.
    """
    with DSL_LOCK, temporary_folder() as folder:
        from cutlass.cute.runtime import load_module

        # From a private copy: the bytes that were verified are the bytes that are loaded.
        path = folder / "kernel.o"
        path.write_bytes(content)
        try:
            return load_module(str(path), enable_tvm_ffi=True)[function]
        except Exception as error:
            raise CompileError(f"kernel {function}: cannot load it: {reason(error)}") from error


def _compile(build: Build, arch: str, function: str, options: str, *, tvm_ffi: bool) -> Compiled:
    with DSL_LOCK, temporary_folder() as folder:
        return _compile_into(folder, build, arch, function, options, tvm_ffi)


def _compile_into(
    folder: Path, build: Build, arch: str, function: str, options: str, tvm_ffi: bool
) -> Compiled:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    _load_runtime_libraries()
    # Every compile has its own dump directory: file names are truncated signatures, and two
    # variants of one kernel may share one.
    flags = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {shlex.quote(str(folder))}"
    flags += " --enable-tvm-ffi" if tvm_ffi else _portable_host()
    with _target(arch):
        launcher, arguments = build()
        # An engine would only run the kernel here; without one, compiling takes half of the time,
        # and any architecture compiles on any machine.
        compiled: Any = cute.compile(
            launcher,
            *arguments,
            make_fake_stream(use_tvm_ffi_env_stream=tvm_ffi),
            options=f"{flags} {options}",
            no_jit_engine=True,
        )
        content = _object(compiled, folder, function, tvm_ffi)
    module = str(compiled.ir_module)
    layouts = None if tvm_ffi else entry_layouts(module, compiled.function_name)
    return Compiled(
        object=content,
        cubin=_artifact(folder, "cubin"),
        ptx=_artifact(folder, "ptx").decode(),
        function=function if tvm_ffi else compiled.function_name,
        arguments=describe_arguments(arguments, layouts),
        launches=read_launches(module, compiled.function_name),
        cuda_major=int(cutlass.CUDA_VERSION.major),
    )


def _object(compiled: Any, folder: Path, function: str, tvm_ffi: bool) -> bytes:
    if not tvm_ffi:
        return compiled.dump_to_object(function)
    path = folder / "kernel.o"
    compiled.export_to_c(object_file_path=str(path), function_name=function)
    return path.read_bytes()


def _artifact(folder: Path, extension: str) -> bytes:
    """The contents of the dumped file.
    It is searched for, since its name follows no rule on some architectures."""
    found = sorted(folder.glob(f"*.{extension}"))
    if len(found) != 1:
        raise CompileError(
            f"the compiler wrote {len(found)} .{extension} files instead of one; a launcher must "
            "be a single @cute.jit callable, and the architecture one that it knows"
        )
    return found[0].read_bytes()


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """Make ``arch`` the target of everything traced inside.

    ``--gpu-arch`` alone is not enough: while the builder runs, the DSL still has the options of the
    *previous* compile, so MMA and copy atoms made there would be checked against its architecture;
    and before the first compile it probes the driver, or takes sm_100a silently.
    """
    from cutlass.base_dsl.compiler import CompileOptions, GPUArch
    from cutlass.cutlass_dsl import CuTeDSL

    dsl: Any = CuTeDSL._get_dsl()
    before = dsl.envar._arch, dsl.compile_options
    dsl.envar.arch = arch
    dsl.compile_options = CompileOptions((GPUArch(arch),))
    try:
        yield
    finally:
        dsl.envar._arch, dsl.compile_options = before


@functools.lru_cache(maxsize=1)
def _load_runtime_libraries() -> None:
    """Make the launch functions visible.
    Without an engine nothing else loads them, and writing an object resolves their names."""
    from cutlass.cute.runtime import find_runtime_libraries

    for path in find_runtime_libraries(enable_tvm_ffi=True):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _portable_host() -> str:
    """Options for portable host code.
    Exported kernels must run anywhere, but the default is tuned to this processor (it uses AVX
    registers for copying descriptors)."""
    import platform

    machine = platform.machine()
    if machine != "x86_64":
        return ""
    target = "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2"
    return f" --host-target {shlex.quote(target)}"


def reason(error: BaseException) -> str:
    """The first lines of an error, without colours; its type when it has no text."""
    lines = [line.rstrip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    text = "\n  ".join(lines[:_REASON_LINES])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def launches_to_json(launches: list[LaunchFacts]) -> list[dict[str, Any]]:
    """Launch facts as JSON objects."""
    return [asdict(launch) for launch in launches]


def launches_from_json(records: list[dict[str, Any]]) -> list[LaunchFacts]:
    """The inverse of :func:`launches_to_json`."""
    return [
        LaunchFacts(
            kernel=record["kernel"],
            grid=tuple(record["grid"]),
            block=tuple(record["block"]),
            cluster=tuple(record["cluster"]),
            shared_bytes=record["shared_bytes"],
            pdl=record["pdl"],
            cooperative=record["cooperative"],
        )
        for record in records
    ]
