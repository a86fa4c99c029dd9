"""The artifact cache: damage, concurrency, read-only places."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cutesuper.errors import CacheError
from cutesuper.runtime.cache import (
    CUBIN,
    FILES,
    META,
    OBJECT,
    PTX,
    KernelCache,
    default_root,
    source_fingerprint,
)

CONTENT = {OBJECT: b"object" * 100, CUBIN: b"\x7fELF cubin", PTX: b".version 8.8"}


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def _store(cache: KernelCache, key: str = "k") -> tuple[str, Path]:
    digest = cache.digest(key, "sm_90a", "tvm_ffi")
    entry = cache.store(digest, {"name": key, "numbers": (1, 2)}, CONTENT)
    assert entry.path is not None
    return digest, entry.path


def test_what_was_stored_comes_back(cache: KernelCache) -> None:
    digest, path = _store(cache)
    entry = cache.load(digest)
    assert entry is not None
    assert entry.files == CONTENT
    assert entry.meta == {"name": "k", "numbers": [1, 2]}
    assert sorted(os.listdir(path)) == sorted((*FILES, META))
    assert [found.digest for found in cache.entries()] == [digest]


def test_stored_entry_equals_read_entry(cache: KernelCache) -> None:
    digest = cache.digest("k", "sm_90a", "plain")
    assert cache.store(digest, {"t": (1, 2)}, CONTENT) == cache.load(digest)


def test_digest_depends_on_everything_that_is_compiled(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = cache.digest("k", "sm_90a", "tvm_ffi")
    assert base == cache.digest("k", "sm_90a", "tvm_ffi")
    others = [
        cache.digest("k2", "sm_90a", "tvm_ffi"),
        cache.digest("k", "sm_100a", "tvm_ffi"),
        cache.digest("k", "sm_90a", "plain"),
    ]
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    others.append(cache.digest("k", "sm_90a", "tvm_ffi"))
    assert len({base, *others}) == 5
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_120a")
    assert cache.digest("k", "sm_90a", "tvm_ffi") == base


@pytest.mark.parametrize("name", [*FILES, META])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty", "directory"])
def test_a_damaged_file_is_a_miss_and_is_replaced(
    cache: KernelCache, name: str, damage: str
) -> None:
    digest, path = _store(cache)
    file = path / name
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "directory":
            file.mkdir()
    assert cache.load(digest) is None
    assert list(cache.entries()) == []
    _store(cache)
    assert cache.load(digest) is not None


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", "[" * 100_000, '{"format": 99}', '{"format": 1, "files": 3, "meta": {}}'],
)
def test_wrong_metadata_is_a_miss(cache: KernelCache, text: str) -> None:
    digest, path = _store(cache)
    (path / META).write_text(text)
    assert cache.load(digest) is None


def test_a_changed_fact_in_the_metadata_is_a_miss(cache: KernelCache) -> None:
    digest, path = _store(cache)
    record = json.loads((path / META).read_text())
    record["meta"]["name"] = "other"
    (path / META).write_text(json.dumps(record))
    assert cache.load(digest) is None


def test_digests_cannot_leave_the_cache(cache: KernelCache) -> None:
    for digest in ("../../etc/passwd", "", "x" * 64):
        with pytest.raises(CacheError, match="64 hexadecimal digits"):
            cache.load(digest)


def test_an_entry_has_exactly_its_files(cache: KernelCache) -> None:
    digest = cache.digest("k", "sm_90a", "tvm_ffi")
    with pytest.raises(CacheError, match="expected"):
        cache.store(digest, {}, {OBJECT: b""})


def test_clear(cache: KernelCache) -> None:
    digest, _ = _store(cache)
    cache.clear()
    assert cache.load(digest) is None
    assert list(cache.entries()) == []
    _store(cache)
    assert cache.load(digest) is not None


def test_root_that_cannot_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="CUTESUPER_CACHE") as caught:
        cache = KernelCache(blocker / "cache")
    assert len(caught) == 1
    digest, path = _store(cache)
    assert path.is_relative_to(cache.root)
    assert not path.is_relative_to(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = KernelCache(blocker / "cache")
    assert again.load(digest) is not None


def test_a_failed_write_still_gives_the_kernel(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    digest = cache.digest("k", "sm_90a", "tvm_ffi")
    with pytest.warns(RuntimeWarning, match="No space left"):
        entry = cache.store(digest, {}, CONTENT)
    assert entry.path is None
    assert entry.files == CONTENT


def test_read_only_cache_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, _ = _store(KernelCache(tmp_path))
    from cutesuper.runtime import cache as module

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        cache = KernelCache(tmp_path)
    assert cache.root != tmp_path
    assert cache.load(digest) is not None


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTESUPER_CACHE", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.setenv("CUTESUPER_CACHE", "~/x")
    assert default_root() == Path.home() / "x"
    monkeypatch.setenv("CUTESUPER_CACHE", "~there is no such user/x")
    assert default_root() == Path("~there is no such user/x")
    monkeypatch.delenv("CUTESUPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "cutesuper"


_WRITER = """
import sys
from cutesuper.runtime.cache import KernelCache
from tests.test_cache import CONTENT
cache = KernelCache(sys.argv[1])
digest = cache.digest("k", "sm_90a", "tvm_ffi")
for round in range(40):
    if sys.argv[2] == "lock":
        with cache.lock(digest):
            if cache.load(digest) is None:
                cache.store(digest, {"round": round}, CONTENT)
                open(sys.argv[1] + "/writes", "a").write("x")
    else:
        cache.store(digest, {"round": round}, CONTENT)
    entry = cache.load(digest)
    assert sys.argv[2] == "race" or entry.files == CONTENT
    assert entry is None or entry.files == CONTENT
"""


def _in_three_processes(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    writers = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]


@pytest.mark.parametrize("mode", ["lock", "race"])
def test_several_processes_on_one_key(cache: KernelCache, mode: str) -> None:
    _in_three_processes(_WRITER, str(cache.root), mode)
    entry = cache.load(cache.digest("k", "sm_90a", "tvm_ffi"))
    assert entry is not None
    assert entry.files == CONTENT
    if mode == "lock":
        assert (cache.root / "writes").read_text() == "x"
    scratch = cache.root / "v1" / "tmp"
    assert list(scratch.iterdir()) == []
    shutil.rmtree(cache.root)


_CLEARER = """
import sys
from cutesuper.runtime.cache import KernelCache
from tests.test_cache import CONTENT
cache = KernelCache(sys.argv[1])
for round in range(60):
    digest = cache.digest(str(round % 8), "sm_90a", "tvm_ffi")
    assert cache.store(digest, {}, CONTENT).path is not None
    assert all(entry.files == CONTENT for entry in cache.entries())
    if round % 6 == 0:
        cache.clear()
"""


def test_another_process_clears_the_cache(cache: KernelCache) -> None:
    _in_three_processes(_CLEARER, str(cache.root))


def test_a_forked_process_leaves_the_temporary_folder() -> None:
    script = (
        "import os, sys\nfrom cutesuper.runtime.cache import temporary_root\n"
        "root = temporary_root('x')\nif not os.fork(): sys.exit()\n"
        "os.wait()\nassert root.is_dir()\nprint(root)"
    )
    root = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    assert not Path(root).exists()


def test_sources_that_decide_the_code_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    read_bytes = Path.read_bytes

    def record(path: Path) -> bytes:
        read.add(path.as_posix().rsplit("/cutesuper/", 1)[-1])
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", record)
    source_fingerprint.__wrapped__()
    operators = {f"ir/operators/{name}.py" for name in ("base", "pointwise", "composite")}
    skeletons = {"skeletons/matmul/plan.py", "skeletons/rows/kernel/rows.py"}
    assert operators | skeletons | {"targets/hopper.py", "device/memory.py"} <= read
    assert "runtime/dsl.py" in read
    assert "runtime/kernel.py" not in read


# ------------------------------------------------------------------------- what others could write


def test_what_the_cache_makes_is_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = KernelCache(tmp_path / "x" / "cache")
        digest, path = _store(cache)
        with cache.lock(digest):
            assert cache.load(digest) is not None
    finally:
        os.umask(before)
    made = [p for p in (tmp_path / "x").rglob("*") if not p.is_symlink()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o644}


def test_a_root_that_others_can_write(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    digest, _ = _store(cache)
    cache.root.chmod(0o777)
    for use in (lambda: KernelCache(cache.root), lambda: cache.load(digest)):
        with pytest.raises(CacheError, match=r"can be written by others \(mode 0777\)") as caught:
            use()
        text = str(caught.value).replace("-R ", "")
        assert f"run: chmod go-w {cache.root}; or remove the cache" in text
        assert "CUTESUPER_CACHE" in str(caught.value)
    cache.root.chmod(0o755)  # as earlier versions made it: others may read
    assert KernelCache(cache.root).load(digest) is not None


def test_a_parent_that_others_can_write(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    KernelCache(parent / "cache")
    parent.chmod(0o777)
    with pytest.raises(CacheError, match=rf"{parent} can be written .*chmod go-w {parent};"):
        KernelCache(parent / "cache")
    parent.chmod(0o1777)
    KernelCache(parent / "cache")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_another_owner(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    digest, path = _store(cache)
    os.chown(path / OBJECT, 12345, -1)
    with pytest.raises(CacheError, match=r"kernel\.o belongs to user 12345.* may hold anything"):
        cache.load(digest)
    os.chown(path / OBJECT, 0, -1)
    os.chown(path, 12345, -1)
    with pytest.raises(CacheError, match=rf"{path} belongs to user 12345.*run: chown -R 0 {path}"):
        cache.load(digest)
    os.chown(cache.root, 12345, -1)
    with pytest.raises(CacheError, match=rf"{cache.root} belongs to user 12345"):
        KernelCache(cache.root)


@pytest.mark.parametrize("name", [*FILES, META])
def test_a_file_that_others_can_write(cache: KernelCache, name: str) -> None:
    digest, path = _store(cache)
    (path / name).chmod(0o666)
    with pytest.raises(CacheError, match=rf"{name} can be written by others"):
        cache.load(digest)


def test_a_folder_inside_that_others_can_write(cache: KernelCache) -> None:
    digest, path = _store(cache)
    path.parent.chmod(0o777)
    with pytest.raises(CacheError, match=rf"{path.parent} can be written by others"):
        cache.load(digest)


def test_a_changed_entry_with_a_new_checksum(cache: KernelCache) -> None:
    """A forged entry differs by who could write it, not by its checksum."""
    digest, path = _store(cache)
    (path / OBJECT).write_bytes(b"other")
    record = json.loads((path / META).read_text())
    sums = {"bytes": 5, "sha256": hashlib.sha256(b"other").hexdigest()}
    record["files"][OBJECT] = sums
    (path / META).write_text(json.dumps(record))
    assert cache.load(digest) is not None
    path.chmod(0o777)
    with pytest.raises(CacheError, match="kernels are code that would run as you"):
        cache.load(digest)


def test_links_in_place_of_files(cache: KernelCache, tmp_path: Path) -> None:
    digest, path = _store(cache)
    os.rename(path / OBJECT, tmp_path / OBJECT)
    (path / OBJECT).symlink_to(tmp_path / OBJECT)
    assert cache.load(digest) is None
    _store(cache)
    assert cache.load(digest) is not None


def test_a_cache_behind_a_link(tmp_path: Path) -> None:
    digest, _ = _store(KernelCache(tmp_path / "cache"))
    (tmp_path / "link").symlink_to("cache")
    assert KernelCache(tmp_path / "link").load(digest) is not None
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CacheError, match="can be written by others"):
        KernelCache(tmp_path / "link")


def test_another_toolchain_is_another_key(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutesuper.runtime import cache as module
    from cutesuper.runtime import toolchain

    versions = {"nvidia-cutlass-dsl": "4.3.0", "apache-tvm-ffi": "0.1"}
    versions |= {"nvidia-cutlass-dsl-libs-cu12": "4.3.0"}
    found: set[str] = set()
    monkeypatch.setattr(module, "dsl_versions", toolchain.dsl_versions.__wrapped__)
    monkeypatch.setattr(toolchain, "package_version", versions.get)
    for name, version in [("", ""), *((n, "9.9") for n in [*versions]),
                          ("nvidia-cutlass-dsl-libs-cu13", "4.3.0")]:  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setitem(versions, name, version)
            found.add(cache.digest("k", "sm_90a", "tvm_ffi"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "host_machine", lambda: "another")
        found.add(cache.digest("k", "sm_90a", "tvm_ffi"))
    assert len(found) == 6
