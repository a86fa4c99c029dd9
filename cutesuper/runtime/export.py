"""Export of kernels as one self-contained shared library; `cutesuper.runtime.library` loads it.

The library needs only libc and the CUDA driver: no CuTe DSL, no Python, no nvcc. It holds the plain
launch code of every kernel with the device code inside, the DSL's static launch runtime and static
cudart (about 1 MB), and exports five symbols with the C interface::

    const char cutesuper_metadata[];                       // JSON, also section .cutesuper, where
                                                           // the checksum of the file follows it
    int cutesuper_program(int device);                     // the program for it; -1: the current
    int cutesuper_load(int device);                        // once per device; cudaError_t
    int cutesuper_launch(int kernel, void **arguments, int count);
    const char *cutesuper_error_text(int status);

There is one program for each architecture, listed in ``programs`` of the metadata; the first one
serves devices that none is for, if CUDA allows it. ``kernel`` is an index into the ``kernels`` of
all programs in order; those of the device's program are loaded. ``arguments`` are addresses, the
last one that of the stream; each points to a scalar, or to
``{pointer; dynamic extents; dynamic strides}`` in the layout that ``arguments[i].layout`` in the
metadata gives. The metadata of whole programs is described in `cutesuper.runtime.program`, and
functions that run a whole program from C in `cutesuper.runtime.c_interface`.

Loading and launching return 0, or an error of the CUDA runtime (``cudaError_t``). These errors are
found before the GPU is used:

* 1 (``cudaErrorInvalidValue``): there is no such kernel; ``arguments``, or one of them, is NULL;
  ``count`` is not that of the kernel's arguments and the stream; an extent is negative; the pointer
  of a tensor that is not empty is NULL;
* 3 (``cudaErrorInitializationError``): ``cutesuper_load`` was not called before, or the kernel is
  of another program;
* 101 (``cudaErrorInvalidDevice``): there can be no such device.

``dlopen`` looks for a name without a slash in ``LD_LIBRARY_PATH``: open ``./program.so``, or better
a whole path.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutesuper.errors import CompileError
from cutesuper.ir.arguments import as_path
from cutesuper.runtime.c_interface import Interface
from cutesuper.runtime.cache import OBJECT, CacheEntry
from cutesuper.runtime.library import ABI_VERSION, MAX_COUNT, sealed
from cutesuper.runtime.private import replace_file, temporary_folder
from cutesuper.runtime.resources import arch_number
from cutesuper.runtime.toolchain import (
    require_c_compiler,
    require_cudart_static,
    require_dialect_archive,
    run_tool,
)
from cutesuper.version import __version__

if TYPE_CHECKING:
    from cutesuper.runtime.compile import Artifact

# Packed entry points take an array with the address of each argument and then of the result. Init
# and load need one more level: the address of a pointer to the library handle.
_SHIM = r"""
#include <pthread.h>

#define DECLARE(init, load, launch, count, fields) \
    extern void init(void **), load(void **), launch(void **);
#define ENTRY(init, load, launch, count, fields) { init, load, launch, count, fields },

KERNELS(DECLARE)
extern const char *cudaGetErrorString(int status);
extern int cudaGetDevice(int *device);
extern int cudaDeviceGetAttribute(int *value, int attribute, int device);

__attribute__((used, section(".cutesuper"))) const char cutesuper_metadata[] = { METADATA, 0 };

static const struct {
    void (*init)(void **), (*load)(void **), (*launch)(void **);
    int count;  /* arguments and the stream */
    const field *fields;
} kernels[] = { KERNELS(ENTRY) };
enum { KERNEL_COUNT = sizeof kernels / sizeof *kernels };

/* of each program the compute capability, as 90, and its first kernel; ends with KERNEL_COUNT */
static const struct { int capability, first; } programs[] = { PROGRAMS { 0, KERNEL_COUNT } };
enum { PROGRAM_COUNT = sizeof programs / sizeof *programs - 1, MAJOR = 75, MINOR = 76 };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static void *libraries[KERNEL_COUNT];
static unsigned char ready[KERNEL_COUNT][256];

static int load_kernel(int kernel, int device)
{
    void *slot = &libraries[kernel];
    int status = 0;
    if (!libraries[kernel]) {
        void *arguments[] = { &slot, &status };
        kernels[kernel].init(arguments);
    }
    if (!status && !ready[kernel][device]) {
        void *arguments[] = { &slot, &device, &status };
        kernels[kernel].load(arguments);
        ready[kernel][device] = !status;
    }
    return status;
}

int cutesuper_program(int device)
{
    int major = 0, minor = 0, n;
    if (PROGRAM_COUNT == 1 || (device < 0 && cudaGetDevice(&device))
            || cudaDeviceGetAttribute(&major, MAJOR, device)
            || cudaDeviceGetAttribute(&minor, MINOR, device))
        return 0;
    for (n = 0; n < PROGRAM_COUNT; n++)
        if (programs[n].capability == 10 * major + minor)
            return n;
    return 0;
}

int cutesuper_load(int device)
{
    int status = 0, program, kernel;
    if (device < 0 || device >= 256)
        return 101;  /* cudaErrorInvalidDevice */
    program = cutesuper_program(device);
    pthread_mutex_lock(&guard);
    kernel = programs[program].first;
    for (; kernel < programs[program + 1].first && !status; kernel++)
        status = load_kernel(kernel, device);
    pthread_mutex_unlock(&guard);
    return status;
}

/* Whether all arguments are there, no extent is negative, and whatever is not empty has memory. */
static int is_sound(int kernel, void **arguments)
{
    const field *f = kernels[kernel].fields;
    int i, missing = 0;
    for (i = 0; i < kernels[kernel].count; i++)
        if (!arguments[i])
            return 0;
    for (; f->width; f++) {
        const char *place = (const char *)arguments[f->argument] + f->offset;
        long long extent = 0;
        if (f->is_pointer) {
            if (missing)
                return 0;
            missing = !*(void *const *)place && !f->is_empty;
        } else {
            extent = f->width == 4 ? *(const int *)place : *(const long long *)place;
            missing = missing && extent;
        }
        if (extent < 0)
            return 0;
    }
    return !missing;
}

int cutesuper_launch(int kernel, void **arguments, int count)
{
    void *all[MAX_COUNT + 1];
    int status = 0, i;
    if (kernel < 0 || kernel >= KERNEL_COUNT || !arguments || count != kernels[kernel].count
            || !is_sound(kernel, arguments))
        return 1;  /* cudaErrorInvalidValue */
    if (!__atomic_load_n(&libraries[kernel], __ATOMIC_ACQUIRE))
        return 3;  /* cudaErrorInitializationError */
    for (i = 0; i < count; i++)
        all[i] = arguments[i];
    all[count] = &status;
    kernels[kernel].launch(all);
    return status;
}

const char *cutesuper_error_text(int status)
{
    return cudaGetErrorString(status);
}
"""
_FIELD = """typedef struct {
    unsigned short argument, offset;
    unsigned char width, is_pointer, is_empty;
} field;
"""
_EXPORTS = "{{ global: cutesuper_*; {}local: *; }};\n"


@dataclass(frozen=True)
class Part:
    """The program of a library for one architecture.

    Attributes:
        artifacts: one or more kernels for it.
        program: a JSON object to store with them: how they make up the program.
    """

    artifacts: Sequence[Artifact]
    program: Mapping[str, Any]

    @property
    def arch(self) -> str:
        """The architecture. Raises CompileError if there are several."""
        archs = sorted({artifact.arch for artifact in self.artifacts})
        if len(archs) != 1:
            names = " + ".join(artifact.name for artifact in self.artifacts)
            raise CompileError(f"exporting {names}: a program's kernels are for one architecture")
        return archs[0]


def export_library(
    parts: Sequence[Part], path: str | os.PathLike[str], interface: Interface | None = None
) -> None:
    """Link kernels into a shared library at ``path`` (replaced atomically).

    Args:
        parts: one for each architecture; the first one is for other devices as well.
        path: the file to write.
        interface: functions that run the program.

    Raises:
        FormatError: when ``path`` is not the name of a file.
        CompileError: when a program is not JSON, or two are for one architecture; when a C compiler
            or ``libcudart_static.a`` is missing, or compiling, linking or writing fails.
    """
    name = " + ".join(artifact.name for part in parts for artifact in part.artifacts)
    archs = [part.arch for part in parts]
    if len(set(map(arch_number, archs))) < len(archs):
        raise CompileError(
            f"exporting {name}: programs for {', '.join(archs)}; one for each architecture"
        )
    entries = [artifact.plain() for part in parts for artifact in part.artifacts]
    text = _metadata_text(name, parts, entries)
    target = Path(as_path("export", path))
    seal = hashlib.sha256(text.encode()).hexdigest()  # place of the checksum: any such text
    with temporary_folder() as folder:
        extra = _write_interface(folder, interface, target.name)
        names = _programs(parts) + _names(entries, f"{text}\0{seal}")
        built = _link(folder, name, entries, names, extra)
        try:
            # A new file under the old name: a process that has the old one loaded keeps it.
            replace_file(target, sealed(built.read_bytes(), seal.encode()))
        except OSError as error:
            why = error.strerror or error
            raise CompileError(f"exporting {name}: cannot write {target}: {why}") from error


def _metadata_text(name: str, parts: Sequence[Part], entries: Sequence[CacheEntry]) -> str:
    left = iter(entries)
    programs = [
        {
            "arch": part.arch,
            "kernels": [_kernel(artifact, next(left)) for artifact in part.artifacts],
            "program": dict(part.program),
        }
        for part in parts
    ]
    metadata = {"abi": ABI_VERSION, "version": __version__, "programs": programs}
    try:
        return json.dumps(metadata, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CompileError(f"exporting {name}: the program is not JSON: {error}") from error


def _kernel(artifact: Artifact, entry: CacheEntry) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "digest": entry.digest,
        "arguments": entry.meta["arguments"],
        "outputs": list(artifact.request.outputs),
        "launches": entry.meta["launches"],
    }


def _programs(parts: Sequence[Part]) -> str:
    """The definition of the table of programs for the shim."""
    found, first = "", 0
    for part in parts:
        found += f"{{ {arch_number(part.arch)}, {first} }}, "
        first += len(part.artifacts)
    return f"#define PROGRAMS {found}\n"


def _link(
    folder: Path, name: str, entries: Sequence[CacheEntry], names: str, extra: Sequence[str]
) -> Path:
    objects = [folder / f"kernel{index}.o" for index in range(len(entries))]
    for path, entry in zip(objects, entries, strict=True):
        path.write_bytes(entry.files[OBJECT])
    (folder / "shim.c").write_text(_SHIM)
    (folder / "names.h").write_text(names)
    built = folder / "kernels.so"
    command = [require_c_compiler(), "-shared", "-fPIC", "-O2", "-s", "-o", str(built)]
    command += ["-include", str(folder / "names.h"), str(folder / "shim.c"), *map(str, objects)]
    command += [str(require_dialect_archive(int(entries[0].meta["cuda_major"])))]
    command += [str(require_cudart_static())]
    command += ["-ldl", "-lpthread", "-lrt", "-lm", "-Wl,--no-undefined", "-Wl,--gc-sections"]
    command += ["-Wl,-Bsymbolic", f"-Wl,--version-script={folder / 'exports.map'}", *extra]
    run_tool(command, f"exporting {name}")
    return built


def _write_interface(folder: Path, interface: Interface | None, library: str) -> list[str]:
    """Write the symbols to export, and the source of the functions for C, if there are any.

    Returns:
        What to add to the command that links; a program linked with ``library`` looks for this
        name, wherever it was built.
    """
    more = f"{interface.name}_*; " if interface else ""
    (folder / "exports.map").write_text(_EXPORTS.format(more))
    if interface is None:
        return []
    (folder / "run.c").write_text(interface.source)
    return [str(folder / "run.c"), "-Xlinker", "-soname", "-Xlinker", library]


def _names(entries: Sequence[CacheEntry], metadata: str) -> str:
    """Definitions for compiling the shim: its kernels' entry points, and the metadata as bytes."""
    kernels: list[str] = []
    tables: list[str] = []
    for n, entry in enumerate(entries):
        arguments = entry.meta["arguments"]["arguments"]
        tables.append(f"static const field fields{n}[] = {{ {_fields(arguments)} }};\n")
        prefix, function = f"_mlir_{entry.meta['prefix']}_", entry.meta["function"]
        points = ("cuda_init", "cuda_load_to_device", f"_mlir_ciface_{function}")
        names = ", ".join(prefix + point for point in points)
        kernels.append(f"X({names}, {len(arguments) + 1}, fields{n})")
    content = ",".join(str(byte) for byte in metadata.encode())
    return (
        f"{_FIELD}{''.join(tables)}#define KERNELS(X) {' '.join(kernels)}\n"
        f"#define METADATA {content}\n"
        f"#define MAX_COUNT {MAX_COUNT}\n"
    )


def _fields(arguments: Sequence[Mapping[str, Any]]) -> str:
    """For every tensor the place of its pointer, then of its dynamic extents; ends with a zero."""
    found: list[str] = []
    for n, argument in enumerate(arguments):
        if argument["kind"] != "tensor":
            continue
        (start, _), *rest = argument["layout"]["fields"]
        found.append(f"{{ {n}, {start}, 8, 1, {int(0 in argument['shape'])} }}")
        dynamic = [extent for extent in argument["shape"] if isinstance(extent, str)]
        places = zip(dynamic, rest, strict=False)  # strides follow
        found += [f"{{ {n}, {at}, {4 if kind == 'i32' else 8}, 0, 0 }}" for _, (at, kind) in places]
    return ", ".join([*found, "{ 0 }"])
