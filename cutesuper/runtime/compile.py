"""Compilation of launchers to artifacts: objects, cubins and PTX, cached on disk, on any machine.

No GPU is needed to compile, for any architecture. ``compile_kernel`` compiles in this process;
``compile_many`` in several worker processes, because CuTe DSL cannot compile in several threads.

    request = CompileRequest(key=plan.key, arch="sm_90a", name="rms_norm", build=build)
    artifact = compile_kernel(request)
    artifact.resources.spills            # read from the cubin
    kernel = artifact.load()             # kernel(x, w, y): torch tensors, the current stream
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from cutesuper.errors import CompileError, CutesuperError
from cutesuper.garbage import seldom_collected
from cutesuper.runtime import dsl
from cutesuper.runtime.cache import (
    CUBIN,
    OBJECT,
    PTX,
    CacheEntry,
    KernelCache,
    cache_or_default,
    temporary_root,
    warn_once,
)
from cutesuper.runtime.host_module import LaunchFacts
from cutesuper.runtime.programs import Kept
from cutesuper.runtime.resources import (
    Resources,
    arch_number,
    disassemble,
    measure,
    shared_limit,
)
from cutesuper.runtime.toolchain import find_nvdisasm
from cutesuper.runtime.workers import run_in_workers

Flavour = Literal["tvm_ffi", "plain"]
Build = Callable[[], tuple[Any, tuple[Any, ...]]]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ARCH = re.compile(r"sm_\d{2,3}[af]?")

#: loaded kernels, by digest
_loaded: Kept[str, Callable[..., Any]] = Kept()


@dataclass(frozen=True)
class CompileRequest:
    """A kernel to compile.

    Attributes:
        key: canonical text (JSON of the plan) of everything the kernel depends on, apart from
            ``arch`` and cutesuper's own lowering, whose sources are hashed in. Two requests with
            one key must build the same kernel.
        arch: ``"sm_90a"``, ``"sm_100a"``, ...
        name: short readable kernel name, ``[a-z][a-z0-9_]*``, at most 64 characters.
        build: called only on a cache miss. Imports CuTe DSL and returns ``(launcher, arguments)``:
            a ``@cute.jit`` callable object and the fake arguments without the stream;
            ``launcher(*arguments, stream)`` takes the stream last; it needs no annotation.
            At least one argument is a tensor. Compile-time constants live in the launcher.
            For :func:`compile_many` it must be picklable: a module-level function, or a
            ``functools.partial`` of one, from a module other than ``__main__``.
        outputs: positions of the (flattened) arguments that the kernel writes; recorded in
            exported files.
        options: more options for ``cute.compile``, e.g. ``"--ptxas-options '-O2'"``.
        operators: operators added to the table in this process. Other processes do not know
            them, so the kernel is compiled in this one.
        unknown: operators for which a change of definition cannot be detected, with the reason.
            Their kernels are not kept on disk, and ``key`` has to be another one each time.
    """

    key: str
    arch: str
    name: str
    build: Build
    outputs: tuple[int, ...] = ()
    options: str = ""
    operators: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise CompileError(
                f"kernel name {self.name!r}: expected at most 64 characters of [a-z0-9_], "
                "the first a letter"
            )
        if not _ARCH.fullmatch(self.arch):
            raise CompileError(
                f"kernel {self.name}: architecture {self.arch!r}: expected a name like sm_90a"
            )


class Artifact:
    """A compiled kernel: its object, cubin and PTX, its resources, and its loader.

    Attributes:
        name, arch: as requested.
        from_cache: true if an earlier compile was reused.
        compile_s: seconds the compile took, when it was done.
    """

    def __init__(
        self, request: CompileRequest, entry: CacheEntry, cache: KernelCache, *, from_cache: bool
    ) -> None:
        self.request = request
        self.from_cache = from_cache
        self._entry = entry
        self._cache = cache

    def __repr__(self) -> str:
        return f"Artifact({self.name}, {self.arch}, {self.digest[:12]})"

    @property
    def name(self) -> str:
        """The kernel's short name."""
        return self.request.name

    @property
    def arch(self) -> str:
        """The architecture it was compiled for, e.g. ``"sm_90a"``."""
        return self.request.arch

    @property
    def digest(self) -> str:
        """The cache key, 64 hexadecimal digits: the identity of this kernel."""
        return self._entry.digest

    @property
    def compile_s(self) -> float:
        """Seconds the compile took, when it was done."""
        return float(self._entry.meta["compile_s"])

    @property
    def object(self) -> bytes:
        """The relocatable object with a TVM-FFI entry point."""
        return self._entry.files[OBJECT]

    @property
    def cubin(self) -> bytes:
        """The device code, an ELF file."""
        return self._entry.files[CUBIN]

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return self._entry.files[PTX].decode()

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments it takes, see :mod:`cutesuper.runtime.arguments`."""
        return self._entry.meta["arguments"]

    @property
    def launches(self) -> Sequence[LaunchFacts]:
        """Constant facts of its launches: block, cluster, shared memory, dependent launch."""
        return dsl.launches_from_json(self._entry.meta["launches"])

    @functools.cached_property
    def sass(self) -> str:
        """The disassembly; raises :class:`CompileError` (what to install) without nvdisasm."""
        return disassemble(self.cubin)

    @functools.cached_property
    def resources(self) -> Resources:
        """Registers, spills, shared memory and instruction counts; needs no GPU."""
        sass = self.sass if find_nvdisasm() else None
        return measure(self.cubin, self.ptx, self.launches, sass)

    def load(self) -> Callable[..., Any]:
        """The kernel as a TVM-FFI callable, loaded once per process (a few milliseconds).

        It takes torch CUDA tensors, scalars and lists of tensors as given to ``build``, checks
        their types, extents and alignment (``ValueError``/``TypeError`` from TVM-FFI) and launches
        on torch's current stream.

        Raises:
            CompileError: when the object cannot be loaded.
        """
        function = str(self._entry.meta["function"])
        return _loaded.made(self.digest, lambda: dsl.load_tvm_ffi(self.object, function))

    def plain(self) -> CacheEntry:
        """The kernel with a plain C entry point, for `cutesuper.runtime.export`.

        Compiled at the first request, like the kernel itself; then it is in the cache too.

        Raises:
            CompileError: when the compiler refuses the kernel.
        """
        return _entry_of(self.request, self._cache, "plain")[0]


def compile_kernel(request: CompileRequest, cache: KernelCache | None = None) -> Artifact:
    """Compile a kernel in this process, or take it from the cache.

    Compiles take turns: the DSL is not thread-safe. Several processes that ask for one key wait for
    the first and read its result.

    Raises:
        CompileError: when the compiler refuses the kernel or it needs more shared memory than the
            architecture has.
    """
    cache = _cache_of(request, cache_or_default(cache))
    entry, hit = _entry_of(request, cache, "tvm_ffi")
    return Artifact(request, entry, cache, from_cache=hit)


@overload
def compile_many(
    requests: Iterable[CompileRequest],
    workers: int | None = None,
    cache: KernelCache | None = None,
    *,
    keep_errors: Literal[False] = False,
) -> list[Artifact]: ...


@overload
def compile_many(
    requests: Iterable[CompileRequest],
    workers: int | None = None,
    cache: KernelCache | None = None,
    *,
    keep_errors: Literal[True],
) -> list[Artifact | CompileError]: ...


def compile_many(
    requests: Iterable[CompileRequest],
    workers: int | None = None,
    cache: KernelCache | None = None,
    *,
    keep_errors: bool = False,
) -> list[Artifact] | list[Artifact | CompileError]:
    """Compile several kernels in worker processes; results come back through the cache.

    A kernel that crashes the compiler takes down its worker, not this process. A single missing
    kernel is compiled here when ``workers`` is not given: starting a worker costs about a second.

    Args:
        requests: the kernels; ``build`` must be picklable.
        workers: worker processes of this call alone; default: the shared ones, one per processor.
        cache: default :class:`KernelCache`.
        keep_errors: put the error of a kernel in its place of the result instead of raising it.

    Raises:
        CompileError: the first one in the order of ``requests``, after all others are done.
    """
    requests = list(requests)
    cache = cache_or_default(cache)
    digests = [_digest(request, cache, "tvm_ffi") for request in requests]
    missing = {
        digest: request
        for digest, request in zip(digests, requests, strict=True)
        if not request.operators and cache.load(digest) is None
    }
    failures: dict[str, CompileError] = {}
    if len(missing) > 1 or (missing and workers is not None):
        problems = run_in_workers(list(missing.values()), str(cache.root), workers)
        failures = {
            digest: CompileError(problem)
            for digest, problem in zip(missing, problems, strict=True)
            if problem
        }
    results: list[Artifact | CompileError] = []
    for digest, request in zip(digests, requests, strict=True):
        found = failures.get(digest) or _collect(request, cache)
        if isinstance(found, Artifact) and digest in missing:
            found.from_cache = False
        results.append(found)
    errors = [result for result in results if isinstance(result, CompileError)]
    if errors and not keep_errors:
        raise errors[0]
    return results


def _collect(request: CompileRequest, cache: KernelCache) -> Artifact | CompileError:
    try:
        return compile_kernel(request, cache)
    except CompileError as error:
        return error


def _cache_of(request: CompileRequest, cache: KernelCache) -> KernelCache:
    """The cache for a kernel: one of this process alone if operators can change unseen."""
    if not request.unknown:
        return cache
    warn_once(
        f"kernel {request.name} is not kept in the cache, because it cannot be known when an "
        f"operator has changed: {'; '.join(request.unknown)}"
    )
    return KernelCache(temporary_root("operators"))


def _digest(request: CompileRequest, cache: KernelCache, flavour: Flavour) -> str:
    key = f"{request.name}\0{request.options}\0{request.key}"
    return cache.digest(key, request.arch, flavour)


def _entry_of(
    request: CompileRequest, cache: KernelCache, flavour: Flavour
) -> tuple[CacheEntry, bool]:
    """Return the entry, and true if it was in the cache already."""
    digest = _digest(request, cache, flavour)
    entry = cache.load(digest)
    if entry is not None:
        return entry, True
    with cache.lock(digest):
        entry = cache.load(digest)  # another process may have been faster
        if entry is not None:
            return entry, True
        return _compile(request, cache, flavour, digest), False


@seldom_collected()
def _compile(
    request: CompileRequest, cache: KernelCache, flavour: Flavour, digest: str
) -> CacheEntry:
    start = time.perf_counter()
    run = dsl.compile_tvm_ffi if flavour == "tvm_ffi" else dsl.compile_plain
    # The name is unique per kernel, so that any number can be loaded into one process.
    function = f"{request.name}_{digest[:16]}"
    try:
        compiled = run(request.build, request.arch, function, request.options)
    except CutesuperError:
        raise
    except Exception as error:
        raise CompileError(
            f"kernel {request.name} for {request.arch}: the compiler refused it: "
            f"{dsl.reason(error)}"
        ) from error
    _check_shared_memory(request, measure(compiled.cubin, compiled.ptx, compiled.launches))
    meta = {
        "name": request.name,
        "arch": request.arch,
        "flavour": flavour,
        "function": compiled.function,
        "prefix": function,
        "cuda_major": compiled.cuda_major,
        "arguments": compiled.arguments,
        "launches": dsl.launches_to_json(compiled.launches),
        "compile_s": time.perf_counter() - start,
    }
    files = {OBJECT: compiled.object, CUBIN: compiled.cubin, PTX: compiled.ptx.encode()}
    return cache.store(digest, meta, files)


def _check_shared_memory(request: CompileRequest, resources: Resources) -> None:
    limit = shared_limit(request.arch)
    if resources.shared_bytes > limit:
        raise CompileError(
            f"kernel {request.name} for {request.arch}: a block needs {resources.shared_bytes} "
            f"bytes of shared memory, sm_{arch_number(request.arch)} has {limit}; use fewer "
            "stages or smaller tiles"
        )
