"""Exported libraries, read back: their metadata, their kernels, and launches.

The C interface is in `cutesuper.runtime.export`. Nothing here imports PyTorch or CuTe DSL.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from cutesuper.errors import CompileError, DeviceError, FormatError, ShapeError
from cutesuper.ir.arguments import as_path
from cutesuper.runtime.arguments import RawTensor, check_description, pack_argument
from cutesuper.runtime.elf import parse_elf
from cutesuper.runtime.private import exposure

ABI_VERSION = 2
#: arguments of one kernel, the stream among them
MAX_COUNT = 256

_SECTION = ".cutesuper"
_POINTER = struct.Struct("<Q")
_EXTENTS = {"i32": struct.Struct("<i"), "i64": struct.Struct("<q")}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of an exported library, validated, without running any of its code.

    Only each ``program`` is not validated: it belongs to `cutesuper.runtime.program`.

    Raises:
        FormatError: when the file is missing, no exported library, of another version, or others
            than its owner can write it.
    """
    what = as_path("load", path)
    text, _ = _section(_read(what), what)
    refuse_exposed(what)
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: its metadata is damaged: {error!r}; export it again") from error
    check_metadata(metadata, what)
    return metadata


def refuse_exposed(path: str) -> None:
    """Refuse a library that others than its owner can write, or exchange.

    Naming a file implies trust in its owner. In a folder where every user may put files, the owner
    has to be the user, or root.

    Raises:
        FormatError: naming what they can write.
    """
    with suppress(OSError):  # the following read reports it
        if problem := exposure(path, any_owner=True):
            raise FormatError(
                f"{path}: {problem}, and its code would run as you; if nobody else has written "
                f"it, {problem.mend}, or copy it into a folder of your own"
            )


def sealed(content: bytes, place: bytes) -> bytes:
    """A library with its checksum in the position of ``place``.
    SHA-256 of all other bytes, in hexadecimal digits."""
    before, _, after = content.partition(place)
    return before + _checksum(before, after) + after


def check_seal(path: str) -> None:
    """Refuse a library that has changed since it was written.
    Damaged code does not fail, it crashes.

    Raises:
        FormatError: naming the file.
    """
    content = _read(path)
    seal = _section(content, path)[1]
    before, _, after = content.partition(seal)
    if len(seal) != 64 or seal != _checksum(before, after):
        raise FormatError(f"{path}: it is damaged (its checksum differs); export it again")


def _checksum(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).hexdigest().encode()


def _read(path: str) -> bytes:
    """The bytes of a file. Raises FormatError if it cannot be read, or has no end."""
    try:
        file = Path(path)
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise FormatError(f"{path}: cannot read it: a device or a pipe is no library")
        return file.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot read it: {error.strerror or error}") from error


def _section(content: bytes, what: str) -> tuple[bytes, bytes]:
    """Metadata and checksum stored in a library."""
    section = parse_elf(content, what).find(_SECTION)
    if section is None:
        raise FormatError(f"{what}: not exported by cutesuper (it has no section {_SECTION})")
    text, _, seal = section.data.partition(b"\0")
    return text, seal.rstrip(b"\0")


def check_metadata(metadata: Any, what: str) -> None:
    """Validate the result of `read_metadata`. Raises FormatError."""
    _check_fields(metadata, {"abi": int}, what)
    if (abi := metadata["abi"]) != ABI_VERSION:
        raise FormatError(
            f"{what}: exported with interface version {abi}, this is {ABI_VERSION}; export it again"
        )
    _check_fields(metadata, {"version": str, "programs": list}, what)
    if not metadata["programs"]:
        raise FormatError(f"{what}: there is no program in it; export it again")
    for part in metadata["programs"]:
        _check_fields(part, {"arch": str, "kernels": list, "program": dict}, what)
        if not part["kernels"]:
            raise FormatError(f"{what}: there is no kernel in it; export it again")
        for kernel in part["kernels"]:
            _check_kernel(kernel, what)


def _check_kernel(kernel: Any, what: str) -> None:
    _check_fields(kernel, {"name": str, "arguments": dict, "outputs": list}, what)
    arguments = check_description(kernel["arguments"], what)
    if len(arguments) >= MAX_COUNT:
        raise FormatError(f"{what}: {len(arguments)} arguments, at most {MAX_COUNT - 1}")
    for index in kernel["outputs"]:
        if type(index) is not int or not 0 <= index < len(arguments):
            raise FormatError(f"{what}: output {index!r} of {len(arguments)} arguments")


def _check_fields(record: Any, types: Mapping[str, type], what: str) -> None:
    for key, expected in types.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), expected):
            raise FormatError(
                f"{what}: metadata field {key!r} is missing or no {expected.__name__}; "
                "export it again"
            )


class ExportedLibrary:
    """The code of an exported library. Kernels are loaded to a device at their first launch there.

    Attributes:
        metadata: validated, see `read_metadata`.
        kernels: the kernels of all programs, in order.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
        check_seal(as_path("load", path))
        self.metadata = metadata
        self._ready: set[int] = set()
        self._lock = threading.Lock()
        try:
            self._library = ctypes.CDLL(os.path.abspath(os.fsdecode(path)))
            self._launch = self._library.cutesuper_launch
            self._load = self._library.cutesuper_load
            self._library.cutesuper_error_text.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise CompileError(f"{os.fsdecode(path)}: cannot load it: {error}") from error
        records = [(p["arch"], kernel) for p in metadata["programs"] for kernel in p["kernels"]]
        self.kernels = tuple(
            ExportedKernel(self, index, arch, record)
            for index, (arch, record) in enumerate(records)
        )

    def program(self) -> int:
        """The index of the program for the current device; 0 if there is none for it.

        The library asks the CUDA driver if there are several.
        """
        return int(self._library.cutesuper_program(-1))

    def launch(self, kernel: ExportedKernel, addresses: Sequence[int], device: int) -> None:
        """Launch a kernel with the addresses of its arguments, the stream's last.

        Raises:
            DeviceError: when the device refuses the library or the kernel.
        """
        if device not in self._ready:
            self._load_to(device)
        count = len(addresses)
        status = self._launch(kernel.index, (ctypes.c_void_p * count)(*addresses), count)
        if status:
            raise DeviceError(f"{kernel!r}: launching it failed: {self._error_text(status)}")

    def _error_text(self, status: int) -> str:
        text = cast("bytes", self._library.cutesuper_error_text(status)).decode()
        return f"{text} (CUDA error {status})"

    def _load_to(self, device: int) -> None:
        with self._lock:
            status = self._load(device)
            if status:
                names = ", ".join(f"{kernel.name} ({kernel.arch})" for kernel in self.kernels)
                raise DeviceError(
                    f"{names}: loading it on device {device} failed: {self._error_text(status)}"
                )
            self._ready.add(device)


class ExportedKernel:
    """One kernel of an exported library.

    Attributes:
        index: its place in the library.
        arch: that it was compiled for.
        name: as it was compiled.
        arguments: described arguments, see :mod:`cutesuper.runtime.arguments`.
        outputs: indices of the arguments that it writes.
    """

    def __init__(
        self, library: ExportedLibrary, index: int, arch: str, record: Mapping[str, Any]
    ) -> None:
        self.arch = arch
        self.name = str(record["name"])
        self.arguments: list[dict[str, Any]] = record["arguments"]["arguments"]
        self.outputs: list[int] = record["outputs"]
        self._symbols: dict[str, int] = record["arguments"]["symbols"]
        self._library = library
        self.index = index

    def __repr__(self) -> str:
        return f"ExportedKernel({self.name}, {self.arch})"

    def launch(self, values: Sequence[Any], *, stream: int, device: int) -> None:
        """Launch with :class:`RawTensor` and numbers; needs no PyTorch.

        Args:
            values: one for each argument.
            stream: a ``cudaStream_t`` as an integer; 0 is the default stream.
            device: index of the device, which must be the current one.

        Raises:
            ShapeError, DTypeError, LayoutError: when an argument does not fit.
            DeviceError: when the device refuses the kernel.
        """
        if len(values) != len(self.arguments):
            raise ShapeError(
                f"{self.name}: takes {len(self.arguments)} arguments, got {len(values)}"
            )
        bound: dict[str, int] = {}
        packed = [
            pack_argument(record, value, self._symbols, bound, f"{self.name} argument {index}")
            for index, (record, value) in enumerate(zip(self.arguments, values, strict=True))
        ]
        if self._writes_nothing(values):
            return  # CUDA refuses a grid without blocks
        packed.append(_POINTER.pack(stream))
        buffers = [ctypes.create_string_buffer(content, len(content)) for content in packed]
        self._library.launch(self, [ctypes.addressof(buffer) for buffer in buffers], device)

    def _writes_nothing(self, values: Sequence[Any]) -> bool:
        outputs = [values[index] for index in self.outputs]
        return bool(outputs) and all(
            isinstance(output, RawTensor) and 0 in output.shape for output in outputs
        )


#: the place of a number in a call's arguments, its type, and the dimension that it belongs to
_Field = tuple[int, struct.Struct, int]


def _open_axes(numbers: Sequence[int | str]) -> list[int]:
    return [axis for axis, n in enumerate(numbers) if isinstance(n, str)]


class CompactLaunch:
    """Launcher of a kernel on torch tensors that were checked before.
    `fits_compact` when the library was loaded, extents and alignment by the caller. Costs 6 us;
    `ExportedKernel.launch`, which checks everything, costs 22 (three arguments)."""

    def __init__(self, library: ExportedLibrary, kernel: ExportedKernel) -> None:
        self._library = library
        self._kernel = kernel
        self._offsets: list[int] = []
        #: for every argument: the place of its pointer, and the place, type and axis of its extents
        #: and of its strides
        self._fields: list[tuple[int, list[_Field], list[_Field]]] = []
        size = 0
        for record in kernel.arguments:
            (pointer, _), *others = record["layout"]["fields"]
            axes = [_open_axes(record[what]) for what in ("shape", "stride")]
            places = [
                (size + offset, _EXTENTS[kind], axis)
                for (offset, kind), axis in zip(others, [*axes[0], *axes[1]], strict=True)
            ]
            count = len(axes[0])
            self._fields.append((size + pointer, places[:count], places[count:]))
            self._offsets.append(size)
            size += -(-record["layout"]["size"] // 8) * 8
        self._offsets.append(size)  # the stream
        self._size = size + _POINTER.size

    def launch(self, tensors: Sequence[Any], stream: int, device: int) -> None:
        """Launch with one tensor for each argument. Raises DeviceError."""
        buffer = ctypes.create_string_buffer(self._size)
        for tensor, (pointer, extents, strides) in zip(tensors, self._fields, strict=True):
            _POINTER.pack_into(buffer, pointer, tensor.data_ptr())
            for place, kind, axis in extents:
                kind.pack_into(buffer, place, tensor.shape[axis])
            for place, kind, axis in strides:
                kind.pack_into(buffer, place, tensor.stride(axis))
        _POINTER.pack_into(buffer, self._offsets[-1], stream)
        base = ctypes.addressof(buffer)
        self._library.launch(self._kernel, [base + offset for offset in self._offsets], device)


def fits_compact(argument: Mapping[str, Any], symbols: Mapping[str, int], alignment: int) -> bool:
    """True if an argument accepts any compact row-major tensor that starts at ``alignment`` bytes.
    Its strides are read off it where they depend on symbols.

    Args:
        argument: as described.
        symbols: divisibility of the kernel's symbols.
        alignment: bytes.
    """
    if argument["kind"] != "tensor" or alignment % argument["align"]:
        return False
    step, open_ = 1, False  # the known factor of the stride; whether it has another one
    pairs = list(zip(argument["shape"], argument["stride"], strict=True))
    for extent, stride in reversed(pairs):
        known = isinstance(extent, int) or symbols[extent] == 1
        divides = step % (1 if isinstance(stride, int) else symbols[stride]) == 0
        if not known or not divides or (stride != step if not open_ else isinstance(stride, int)):
            return False
        open_ = open_ or not isinstance(extent, int)
        step *= extent if isinstance(extent, int) else 1
    (_, pointer), *extents = argument["layout"]["fields"]
    return pointer == "ptr" and all(kind in _EXTENTS for _, kind in extents)


def load_library(path: str | os.PathLike[str]) -> ExportedLibrary:
    """Load an exported library. Its code runs: load only trusted files.

    Raises:
        FormatError: when it is not an exported library of this version.
        CompileError: when the system cannot load it.
    """
    path = os.path.abspath(as_path("load", path))  # one file, whatever the folder is later
    return ExportedLibrary(path, read_metadata(path))
