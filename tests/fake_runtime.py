"""Runs kernels without a GPU and records what they would launch.

    launches = record_launches('''
    from tests.fake_runtime import cuda_tensor
    from cutesuper.runtime.compile import compile_kernel
    kernel = compile_kernel(request).load()
    kernel(cuda_tensor((33, 4096), "bfloat16"), cuda_tensor((33, 4096), "bfloat16"))
    ''')
    assert launches[0].grid == (33, 1, 1)

The script runs in its own process, with a CUDA runtime that only writes down launches
(``fake_cuda.c``) in place of the real one, both for kernels loaded through CuTe DSL
(``Artifact.load``) and for libraries that were exported against it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cutesuper.runtime.toolchain import CUDART_VARIABLE, dsl_versions, require_dialect_archive

REPOSITORY = Path(__file__).resolve().parent.parent
_SOURCE = Path(__file__).with_name("fake_cuda.c")


@dataclass(frozen=True)
class Launch:
    """One recorded launch; ``parameters`` holds bytes when their sizes were given."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    pdl: bool
    cooperative: bool
    stream: int
    parameters: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class FakeRuntime:
    """The two libraries built from ``fake_cuda.c``."""

    dsl_runtime: Path
    cudart_static: Path


@functools.lru_cache(maxsize=1)
def build_fake_runtime() -> FakeRuntime:
    """Builds the libraries once per process; skips the test when there is no gcc."""
    gcc, ar = shutil.which("gcc"), shutil.which("ar")
    if gcc is None or ar is None:
        pytest.skip("recording launches needs gcc and ar to build the fake CUDA runtime")
    folder = Path(tempfile.mkdtemp(prefix="cutesuper-fake-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    code, archive = folder / "fake_cuda.o", folder / "libcudart_static.a"
    # The DSL looks for its runtime under exactly this name.
    library = folder / "libcute_dsl_runtime.so"
    major = 13 if "cu13" in dsl_versions()["flavours"] else 12
    launcher = require_dialect_archive(major)
    _run([gcc, "-O1", "-fPIC", "-c", str(_SOURCE), "-o", str(code)])
    _run([ar, "rcs", str(archive), str(code)])
    whole = ["-Wl,--whole-archive", str(launcher), "-Wl,--no-whole-archive"]
    _run([gcc, "-shared", "-o", str(library), str(code), *whole, "-Wl,--no-undefined"])
    return FakeRuntime(library, archive)


def record_launches(
    script: str,
    *,
    parameter_bytes: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Launch]:
    """Runs Python text against the fake runtime and returns its launches in order.

    Args:
        script: Python source; indentation common to all lines is removed.
        parameter_bytes: sizes of the kernel's parameters, as ``parse_cubin`` gives them; with
            them every launch has ``parameters``. All launches must then have the same sizes.
        environment: more variables, e.g. ``CUTESUPER_CACHE``.

    Raises:
        AssertionError: with the script's output when it fails.
    """
    fake = build_fake_runtime()
    with tempfile.TemporaryDirectory(prefix="cutesuper-fake-") as folder:
        log = Path(folder) / "launches"
        variables = {
            **os.environ,
            "CUTE_DSL_LIBS": str(fake.dsl_runtime),
            CUDART_VARIABLE: str(fake.cudart_static),
            "FAKE_CUDA_LOG": str(log),
            "FAKE_CUDA_PARAMETERS": ",".join(map(str, parameter_bytes)),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            **(environment or {}),
        }
        _run([sys.executable, "-c", _prelude(script) + textwrap.dedent(script)], variables)
        lines = log.read_text().splitlines() if log.exists() else []
    return [_launch(json.loads(line)) for line in lines]


def _prelude(script: str) -> str:
    """Keeps TVM-FFI from importing PyTorch, which takes two seconds; the script itself may."""
    name = "import_without_torch"
    return "" if "torch" in script else f"from cutesuper.runtime.dsl import {name}; {name}()\n"


def cuda_tensor(
    shape: Sequence[int],
    dtype: str,
    stride: Sequence[int] | None = None,
    pointer: int = 0x7F0000000000,
) -> Any:
    """A TVM-FFI tensor that claims to be on CUDA device 0; nothing is allocated.

    Args:
        shape: extents.
        dtype: e.g. ``"bfloat16"``, ``"float32"``, ``"int32"``.
        stride: in elements; default row-major.
        pointer: the address it claims.
    """
    import tvm_ffi

    managed = _managed_tensor(tuple(shape), dtype, stride, pointer)
    _alive.append(managed)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return tvm_ffi.from_dlpack(_Exporter(capsule))


class _Exporter:
    """Speaks the DLPack protocol for a ready capsule on CUDA device 0."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        del options
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)


_CUDA = 2
_DLPACK_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_alive: list[Any] = []


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


def _managed_tensor(
    shape: tuple[int, ...], dtype: str, stride: Sequence[int] | None, pointer: int
) -> _ManagedTensor:
    name = dtype.rstrip("0123456789")
    bits = int(dtype[len(name) :] or 8)
    if stride is None:
        stride = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            stride[axis] = stride[axis + 1] * shape[axis + 1]
    array = ctypes.c_int64 * len(shape)
    extents, strides = array(*shape), array(*stride)
    _alive.extend((extents, strides))
    tensor = _DLTensor(
        data=pointer,
        device_type=_CUDA,
        device_id=0,
        ndim=len(shape),
        code=_DLPACK_CODES[name],
        bits=bits,
        lanes=1,
        shape=extents,
        strides=strides,
        byte_offset=0,
    )
    return _ManagedTensor(tensor=tensor)


def _launch(record: dict[str, Any]) -> Launch:
    return Launch(
        kernel=record["kernel"],
        grid=tuple(record["grid"]),
        block=tuple(record["block"]),
        cluster=tuple(record["cluster"]),
        smem=record["smem"],
        pdl=record["pdl"],
        cooperative=record["cooperative"],
        stream=record["stream"],
        parameters=tuple(bytes.fromhex(text) for text in record["parameters"]),
    )


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{command[:2]} failed:\n{done.stdout}\n{done.stderr}"
