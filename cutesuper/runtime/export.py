"""Exports a kernel as a self-contained shared library and loads one back.

The library needs only libc and the CUDA driver: no CuTe DSL, no Python, no nvcc. It holds the
plain launch code with the device code inside, the DSL's static launch runtime and static cudart
(about 1 MB), and exports four symbols with the C interface::

    const char cutesuper_metadata[];                       // JSON, also section .cutesuper
    int cutesuper_load(int device);                        // once per device; cudaError_t
    int cutesuper_launch(void **arguments, int count);     // addresses, the stream's last
    const char *cutesuper_error_text(int status);

An argument is the address of a scalar, or of ``{pointer; dynamic extents; dynamic strides}`` as
``arguments[i].layout`` in the metadata says.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cutesuper.errors import CompileError, DeviceError, FormatError, ShapeError
from cutesuper.runtime.arguments import RawTensor, check_description, pack_argument
from cutesuper.runtime.cache import OBJECT, CacheEntry
from cutesuper.runtime.elf import parse_elf
from cutesuper.runtime.toolchain import (
    require_c_compiler,
    require_cudart_static,
    require_dialect_archive,
    run_tool,
)

if TYPE_CHECKING:
    from cutesuper.runtime.compile import CompileRequest

ABI_VERSION = 1
_SECTION = ".cutesuper"
_MAX_COUNT = 256

# Packed entry points take an array with the address of each argument and then of the result. Init
# and load want one more level: the address of a pointer to the library handle.
_SHIM = r"""
#include <pthread.h>

extern void INIT(void **arguments);
extern void LOAD(void **arguments);
extern void LAUNCH(void **arguments);
extern const char *cudaGetErrorString(int status);

__attribute__((used, section(".cutesuper"))) const char cutesuper_metadata[] = { METADATA, 0 };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static void *library;
static unsigned char ready[256];

int cutesuper_load(int device)
{
    void *slot = &library;
    int status = 0;
    if (device < 0 || device >= 256)
        return 101;  /* cudaErrorInvalidDevice */
    pthread_mutex_lock(&guard);
    if (!library) {
        void *arguments[] = { &slot, &status };
        INIT(arguments);
    }
    if (!status && !ready[device]) {
        void *arguments[] = { &slot, &device, &status };
        LOAD(arguments);
        ready[device] = !status;
    }
    pthread_mutex_unlock(&guard);
    return status;
}

int cutesuper_launch(void **arguments, int count)
{
    void *all[MAX_COUNT + 1];
    int status = 0, i;
    if (count < 0 || count > MAX_COUNT)
        return 1;  /* cudaErrorInvalidValue */
    for (i = 0; i < count; i++)
        all[i] = arguments[i];
    all[count] = &status;
    LAUNCH(all);
    return status;
}

const char *cutesuper_error_text(int status)
{
    return cudaGetErrorString(status);
}
"""
_EXPORTS = "{ global: cutesuper_*; local: *; };\n"


# --- writing -------------------------------------------------------------------------------------


def export_kernel(
    request: CompileRequest,
    entry: CacheEntry,
    path: str | os.PathLike[str],
    extra: Mapping[str, Any],
) -> None:
    """Links a plain object from the cache into a shared library at ``path``.

    Raises:
        CompileError: when ``extra`` is not JSON, a tool or library is missing, or linking fails.
    """
    metadata = {
        "abi": ABI_VERSION,
        "name": request.name,
        "arch": request.arch,
        "digest": entry.digest,
        "arguments": entry.meta["arguments"],
        "outputs": list(request.outputs),
        "launches": entry.meta["launches"],
        "extra": dict(extra),
    }
    try:
        text = json.dumps(metadata, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CompileError(f"exporting {request.name}: extra is not JSON: {error}") from error
    target = Path(path)
    with tempfile.TemporaryDirectory(prefix="cutesuper-") as folder:
        built = _link(Path(folder), request.name, entry, text)
        try:
            # A new file under the old name: a process that has the old one loaded keeps it.
            scratch = target.with_name(f".{target.name}.{os.getpid()}")
            scratch.write_bytes(built.read_bytes())
            os.replace(scratch, target)
        except OSError as error:
            raise CompileError(f"exporting {request.name}: cannot write {target}: {error}") from (
                error
            )


def _link(folder: Path, name: str, entry: CacheEntry, metadata: str) -> Path:
    prefix, function = entry.meta["prefix"], entry.meta["function"]
    names = {
        "INIT": f"_mlir_{prefix}_cuda_init",
        "LOAD": f"_mlir_{prefix}_cuda_load_to_device",
        "LAUNCH": f"_mlir_{prefix}__mlir_ciface_{function}",
        "METADATA": ",".join(str(byte) for byte in metadata.encode()),
        "MAX_COUNT": str(_MAX_COUNT),
    }
    (folder / "shim.c").write_text(_SHIM)
    (folder / "names.h").write_text("".join(f"#define {k} {v}\n" for k, v in names.items()))
    (folder / "kernel.o").write_bytes(entry.files[OBJECT])
    (folder / "exports.map").write_text(_EXPORTS)
    built = folder / "kernel.so"
    command = [require_c_compiler(), "-shared", "-fPIC", "-O2", "-s", "-o", str(built)]
    command += ["-include", str(folder / "names.h")]
    command += [str(folder / "shim.c"), str(folder / "kernel.o")]
    command += [str(require_dialect_archive(int(entry.meta["cuda_major"])))]
    command += [str(require_cudart_static())]
    command += ["-ldl", "-lpthread", "-lrt", "-lm", "-Wl,--no-undefined", "-Wl,--gc-sections"]
    command += ["-Wl,-Bsymbolic", f"-Wl,--version-script={folder / 'exports.map'}"]
    run_tool(command, f"exporting {name}")
    return built


# --- reading -------------------------------------------------------------------------------------


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of an exported library, validated, without running any of its code.

    Raises:
        FormatError: when the file is missing, no exported kernel, or of another version.
    """
    what = os.fspath(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{what}: cannot read it: {error.strerror or error}") from error
    section = parse_elf(content, what).find(_SECTION)
    if section is None:
        raise FormatError(f"{what}: not a kernel exported by cutesuper (no {_SECTION} section)")
    try:
        metadata = json.loads(section.data.rstrip(b"\0"))
        abi = metadata["abi"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{what}: its metadata is damaged: {error!r}; export it again") from error
    if abi != ABI_VERSION:
        raise FormatError(
            f"{what}: exported with interface version {abi}, this is {ABI_VERSION}; export it again"
        )
    return _check_metadata(metadata, what)


def _check_metadata(metadata: dict[str, Any], what: str) -> dict[str, Any]:
    types = {"name": str, "arch": str, "arguments": dict, "outputs": list, "extra": dict}
    for key, expected in types.items():
        if not isinstance(metadata.get(key), expected):
            raise FormatError(f"{what}: metadata field {key!r} is missing or not a {expected}")
    arguments = check_description(metadata["arguments"], what)
    if len(arguments) >= _MAX_COUNT:
        raise FormatError(f"{what}: {len(arguments)} arguments, at most {_MAX_COUNT - 1}")
    if any(not isinstance(i, int) or not 0 <= i < len(arguments) for i in metadata["outputs"]):
        raise FormatError(f"{what}: outputs {metadata['outputs']} of {len(arguments)} arguments")
    return metadata


class ExportedKernel:
    """A kernel from a shared library. Call it with torch CUDA tensors (and numbers) in order.

    Attributes:
        metadata: name, arch, arguments, outputs, launches, and ``extra`` as given to ``export``.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self._name = str(metadata["name"])
        self._arguments: list[dict[str, Any]] = metadata["arguments"]["arguments"]
        self._symbols: dict[str, int] = metadata["arguments"]["symbols"]
        self._ready: set[int] = set()
        self._lock = threading.Lock()
        try:
            self._library = ctypes.CDLL(os.path.abspath(path))
            self._launch = self._library.cutesuper_launch
            self._library.cutesuper_error_text.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise CompileError(f"{os.fspath(path)}: cannot load it: {error}") from error

    def __repr__(self) -> str:
        return f"ExportedKernel({self._name}, {self.metadata['arch']})"

    def __call__(self, *arguments: Any) -> None:
        """Launches on torch's current stream of the tensors' device.

        Lists of tensors are flattened. The tensors are not kept alive beyond the call; torch's
        allocator keeps memory of one stream in order.

        Raises:
            ShapeError, DTypeError, LayoutError: when an argument does not fit.
            DeviceError: when tensors are not on one CUDA device, or the launch fails.
        """
        import torch

        values = list(_flatten(arguments))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise DeviceError(
                f"{self._name}: tensors are on {sorted(map(str, devices)) or 'no device'}; "
                "an exported kernel needs all of them on one CUDA device"
            )
        device = next(iter(devices))
        raw = [_raw(value) if isinstance(value, torch.Tensor) else value for value in values]
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            self.launch(raw, stream=stream, device=device.index)

    def launch(self, arguments: Sequence[Any], *, stream: int, device: int) -> None:
        """Launches with :class:`RawTensor` and numbers, for callers without PyTorch.

        Args:
            arguments: one value per argument, lists flattened.
            stream: a ``cudaStream_t`` as an integer; 0 is the default stream.
            device: index of the device, which must be the current one.

        Raises:
            ShapeError, DTypeError, LayoutError: when an argument does not fit.
            DeviceError: when the device refuses the kernel.
        """
        if len(arguments) != len(self._arguments):
            raise ShapeError(
                f"{self._name}: takes {len(self._arguments)} arguments, got {len(arguments)}"
            )
        bound: dict[str, int] = {}
        packed = [
            pack_argument(record, value, self._symbols, bound, f"{self._name} argument {index}")
            for index, (record, value) in enumerate(zip(self._arguments, arguments, strict=True))
        ]
        if self._writes_nothing(arguments):
            return  # CUDA refuses a grid without blocks
        self._load(device)
        packed.append(stream.to_bytes(8, "little"))
        buffers = [ctypes.create_string_buffer(content, len(content)) for content in packed]
        array = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        self._check(self._launch(array, len(buffers)), "launching it")

    def _writes_nothing(self, arguments: Sequence[Any]) -> bool:
        outputs = [arguments[index] for index in self.metadata["outputs"]]
        return bool(outputs) and all(
            isinstance(output, RawTensor) and 0 in output.shape for output in outputs
        )

    def _load(self, device: int) -> None:
        with self._lock:
            if device not in self._ready:
                self._check(self._library.cutesuper_load(device), f"loading it on device {device}")
                self._ready.add(device)

    def _check(self, status: int, what: str) -> None:
        if status:
            text = cast("bytes", self._library.cutesuper_error_text(status)).decode()
            raise DeviceError(
                f"{self._name} ({self.metadata['arch']}): {what} failed: {text} "
                f"(CUDA error {status})"
            )


def load_exported(path: str | os.PathLike[str]) -> ExportedKernel:
    """Loads a library written by ``Artifact.export``. Its code runs: load only what you trust.

    Raises:
        FormatError: when it is not an exported kernel of this version.
        CompileError: when the system cannot load it.
    """
    return ExportedKernel(path, read_metadata(path))


def _raw(tensor: Any) -> RawTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return RawTensor(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype)


def _flatten(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _flatten(cast("Sequence[Any]", argument))
        else:
            yield argument


__all__ = [
    "ABI_VERSION",
    "ExportedKernel",
    "RawTensor",
    "export_kernel",
    "load_exported",
    "read_metadata",
]
