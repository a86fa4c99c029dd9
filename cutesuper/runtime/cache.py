"""The artifact cache: compiled kernels on disk, keyed by content, shared between processes.

An entry is a directory with the files of one kernel and ``meta.json``, which holds the size and
SHA-256 of each. Entries are written to a temporary directory and renamed, so a reader sees a whole
entry or none; an entry that fails a check is a miss and is replaced. No pickles are written. An
entry is code that runs with the rights of the user who loads it: it is refused if others could have
written it (`cutesuper.runtime.private`).

    <root>/v1/<2 hex>/<64 hex>/{kernel.o, kernel.cubin, kernel.ptx, meta.json}
    <root>/v1/locks/<64 hex>.lock      one writer per key
    <root>/v1/locks/all.lock           shared by writers; who clears the cache has it alone
    <root>/v1/tmp/                     entries being written
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cutesuper.errors import CacheError, OptionError
from cutesuper.ir.arguments import shown
from cutesuper.ir.fingerprint import COVERED
from cutesuper.runtime.private import (
    Exposure,
    checked_temporary,
    exposure,
    make_private,
    read_private,
    write_new,
)
from cutesuper.runtime.toolchain import dsl_versions, host_machine

try:
    import fcntl
except ImportError:  # not on this system; the renames alone keep entries whole
    fcntl = None

OBJECT, CUBIN, PTX, META = "kernel.o", "kernel.cubin", "kernel.ptx", "meta.json"
FILES = (OBJECT, CUBIN, PTX)
FORMAT = 1
#: folder of what compiled models recorded of their regions (`cutesuper.torch.compile.records`)
RECORDS = "regions"
ROOT_VARIABLE = "CUTESUPER_CACHE"

_MAX_META_BYTES = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Compiler settings that do not change its output, so they stay out of the key.
_IRRELEVANT_SETTINGS = {
    f"CUTE_DSL_{name}"
    for name in ("ARCH", "CACHE_DIR", "DUMP_DIR", "KEEP", "LIBS", "LOG_LEVEL", "LOG_TO_CONSOLE",
                 "LOG_TO_FILE", "NO_CACHE", "SHOW_STACKTRACE", "JIT_TIME_PROFILING")
}  # fmt: skip


@dataclass(frozen=True)
class CacheEntry:
    """One compiled kernel, verified when it was read.
    The bytes are kept here, so that another process may clear or replace the directory at any time.

    Attributes:
        digest: the key, 64 hex digits.
        meta: contents of ``meta.json``, without the checksums.
        files: contents by file name (``kernel.o``, ``kernel.cubin``, ``kernel.ptx``).
        path: the entry's directory, or ``None`` when it could not be written.
    """

    digest: str
    meta: Mapping[str, Any]
    files: Mapping[str, bytes]
    path: Path | None


class KernelCache:
    """A directory of compiled kernels. Safe to use from several threads and processes.

    Args:
        root: folder of the entries; default ``$CUTESUPER_CACHE`` or ``~/.cache/cutesuper``. When it
            cannot be written, a temporary directory takes its place for the life of this process
            and one warning says so. A missing folder is made for the user alone (mode 0700).

    Raises:
        CacheError: others can write the directory or put another one in its place; says how to
            mend that.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self._requested = Path(root) if root is not None else default_root()
        self._root = _usable_root(self._requested)

    @property
    def root(self) -> Path:
        """The directory in use (a temporary one when the requested one is not writable)."""
        return self._root

    def digest(self, key: str, arch: str, flavour: str) -> str:
        """The name of an entry: SHA-256 over everything that determines the compiler's output.

        Args:
            key: canonical text of the plan.
            arch: e.g. ``"sm_90a"``.
            flavour: ``"tvm_ffi"`` or ``"plain"``: the calling convention of the object.

        Raises:
            CompileError: when CuTe DSL is not installed, so its version is unknown.
        """
        parts = {
            "format": FORMAT,
            "key": key,
            "arch": arch,
            "flavour": flavour,
            "sources": source_fingerprint(),
            "versions": dsl_versions(),
            "machine": host_machine(),
            "settings": _compiler_settings(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def load(self, digest: str) -> CacheEntry | None:
        """Return the entry, or ``None`` when it is missing or anything about it is not as written.

        Raises:
            CacheError: others can write it.
        """
        # A cache that cannot be written can still be read, e.g. one shared by a whole cluster.
        for root in dict.fromkeys((self._root, self._requested)):
            folder = _entry_folder(root, digest)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                return _read_entry(digest, folder)
        return None

    def store(self, digest: str, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> CacheEntry:
        """Write an entry, replacing a damaged one; a full disk is no error.

        Raises:
            CacheError: when ``files`` does not hold exactly the three files of an entry.
        """
        if sorted(files) != sorted(FILES):
            raise CacheError(f"cache entry {digest}: files {sorted(files)}, expected {FILES}")
        folder = _entry_folder(self._root, digest)
        # Through JSON and back: the entry looks the same now and when it is read again.
        meta = json.loads(json.dumps(dict(meta)))
        try:
            with self._held("all", shared=True):
                self._write(folder, meta, files)
        except OSError as error:
            warn_once(f"cannot write the kernel cache entry {folder}: {error}; going on without")
            return CacheEntry(digest, meta, dict(files), None)
        return CacheEntry(digest, meta, dict(files), folder)

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[None]:
        """Hold the writer lock of one key; look the entry up again once inside.

        If the file system has no locks, this does nothing: two processes may then compile the same
        kernel, and the renames keep the entry whole.
        """
        with self._held(digest):
            yield

    def entries(self) -> Iterator[CacheEntry]:
        """All entries that are intact, in no particular order."""
        for name in self.names():
            if (entry := self.load(name)) is not None:
                yield entry

    def names(self) -> Iterator[str]:
        """The digests of all entries, damaged ones too."""
        for shelf in self._base.glob("[0-9a-f][0-9a-f]"):
            yield from filter(_DIGEST.fullmatch, _listed(shelf))

    def clear(self) -> None:
        """Remove all entries, and what was recorded of regions; loaded kernels stay usable.
        Locks are kept: otherwise a process that waits on one would hold a lock that is invisible to
        others."""
        folders = self._base / "tmp", self._root / RECORDS
        with self._held("all"):
            for folder in (*self._base.glob("[0-9a-f][0-9a-f]"), *folders):
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _base(self) -> Path:
        return self._root / f"v{FORMAT}"

    @contextlib.contextmanager
    def _held(self, name: str, *, shared: bool = False) -> Iterator[None]:
        """Hold a file lock, alone or with others that share it; nothing without such locks."""
        path = self._base / "locks" / f"{name}.lock"
        try:
            if fcntl is None:
                raise OSError("no file locks")
            make_private(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(path, flags, 0o600)
        except OSError:
            yield
            return
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write(self, folder: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        scratch_root = self._base / "tmp"
        make_private(scratch_root)
        make_private(folder.parent)
        scratch = Path(tempfile.mkdtemp(dir=scratch_root))
        try:
            new = scratch / "new"
            new.mkdir(0o700)
            for name, content in files.items():
                write_new(new / name, content)
            record = {
                "format": FORMAT,
                "meta": meta,
                "meta_sha256": _meta_checksum(meta),
                "files": _checksums(files),
            }
            write_new(new / META, json.dumps(record, indent=1, sort_keys=True).encode())
            # A directory cannot be renamed over a non-empty one, so the old one steps aside.
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, scratch / "old")
            try:
                os.rename(new, folder)
            except OSError:
                # Without locks another process may have put the same entry there just now.
                if self.load(folder.name) is None:
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """SHA-256 of the sources that decide an entry: operators, planning, lowering, compiling.

    A key is the text of a plan's program and knobs. The results of planning (roles, fused
    expressions) and the expansion and meaning of operators are in the sources only. Operators that
    were added to the package's own are in the key (`cutesuper.ir.definitions`).
    """
    package = Path(__file__).resolve().parent.parent
    sources = [path for folder in COVERED for path in package.glob(f"{folder}/**/*.py")]
    runtime = ("arguments", "compile", "dsl", "host_module")
    sources += [package / "runtime" / f"{name}.py" for name in runtime]
    digest = hashlib.sha256()
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def default_root() -> Path:
    """``$CUTESUPER_CACHE``, else ``cutesuper`` below the user's cache directory."""
    if root := os.environ.get(ROOT_VARIABLE):
        return Path(os.path.expanduser(root))  # leaves "~nobody" alone where there is no such user
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cutesuper"


def cache_or_default(cache: KernelCache | None) -> KernelCache:
    """The cache that a call was given, or the default one. Raises OptionError for anything else."""
    if cache is None:
        return KernelCache()
    if not isinstance(cache, KernelCache):
        raise OptionError(
            f"cache={shown(cache)}: must be a cutesuper.runtime.cache.KernelCache, or None; "
            f"{ROOT_VARIABLE} in the environment names the default one's folder"
        )
    return cache


def _listed(folder: Path) -> list[str]:
    """The names in a folder; none if another process has just cleared it away."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _entry_folder(root: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise CacheError(f"cache key {digest!r}: expected 64 hexadecimal digits")
    return root / f"v{FORMAT}" / digest[:2] / digest


def _read_entry(digest: str, folder: Path) -> CacheEntry:
    """Read and check an entry; any exception but CacheError means that it is damaged or missing."""
    _refuse_exposed(folder)
    text = read_private(folder / META)
    record = cast("dict[str, Any]", json.loads(text))
    if len(text) > _MAX_META_BYTES or record["format"] != FORMAT:
        raise ValueError("not an entry of this version")
    files = {name: read_private(folder / name) for name in FILES}
    if record["files"] != _checksums(files):
        raise ValueError("a file differs from its checksum")
    meta = record["meta"]
    if not isinstance(meta, dict) or record["meta_sha256"] != _meta_checksum(meta):
        raise ValueError("meta differs from its checksum")
    return CacheEntry(digest, cast("dict[str, Any]", meta), files, folder)


def _checksums(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }


def _meta_checksum(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _compiler_settings() -> dict[str, str]:
    """Environment settings of the compiler that may change its output (line info, options)."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and name not in _IRRELEVANT_SETTINGS
    }


def _refuse_exposed(folder: Path) -> None:
    """Raise CacheError if others can write a folder, OSError if there is none."""
    if problem := exposure(folder):
        raise CacheError(
            f"kernel cache {folder}: {problem}, and kernels are code that would run as you. If "
            f"nobody else has written there, {_remedy(problem)}; or remove the cache, or set "
            f"{ROOT_VARIABLE} to a folder of your own (mode 0700)"
        )


def _remedy(problem: Exposure) -> str:
    return f"run: {problem.mend}" if problem.mend.startswith("ch") else problem.mend


def _usable_root(requested: Path) -> Path:
    try:
        make_private(requested)
        _refuse_exposed(requested)
        with tempfile.TemporaryFile(dir=requested):
            return requested
    except OSError as error:
        warn_once(
            f"cannot write the kernel cache {requested}: {error.strerror or error}; kernels are "
            f"kept for this process only. Set {ROOT_VARIABLE} to a directory that can be written"
        )
        return temporary_root(str(requested))


@functools.cache
def temporary_root(requested: str) -> Path:
    """Return one temporary directory per unusable root, removed when the process ends.

    Raises:
        CacheError: others could exchange it.
    """
    del requested
    root, owner = Path(tempfile.mkdtemp(prefix="cutesuper-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked process ends earlier, and has the same exit handlers
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return checked_temporary(root)


@functools.cache
def warn_once(message: str) -> None:
    """Issue a warning once."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)
