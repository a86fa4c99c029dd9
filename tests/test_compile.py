"""Compiling: several architectures in one process, workers, errors, the cache in between."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cutesuper.errors import CompileError
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import (
    Artifact,
    CompileRequest,
    compile_kernel,
    compile_many,
)
from tests import kernels

pytest.importorskip("cutlass")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


def test_importing_does_not_import_the_compiler() -> None:
    code = (
        "import sys, cutesuper.runtime.compile, cutesuper.runtime.program, tests.kernels;"
        "assert not {'cutlass', 'torch', 'tvm_ffi'} & set(sys.modules), 'imported'"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_two_architectures_in_one_process(cache: KernelCache) -> None:
    archs = ["sm_90a", "sm_100a", "sm_90a", "sm_120a"]
    artifacts = [
        compile_kernel(kernels.request("scale_add", 1024, i + 1, arch=arch), cache)
        for i, arch in enumerate(archs)
    ]
    for arch, artifact in zip(archs, artifacts, strict=True):
        assert f".target {arch}" in artifact.ptx
        assert artifact.arch == arch
        assert callable(artifact.load())
    # ELF flags hold the architecture: 0x5a = 90 in the old format, 0x64 << 8 in the new one.
    assert artifacts[0].cubin[0x30] == 0x5A
    assert artifacts[1].cubin[0x31] == 0x64


def test_target_while_the_builder_runs(cache: KernelCache) -> None:
    """Atoms made in the builder see the requested architecture, not that of the last compile."""
    for n, arch in enumerate(("sm_90a", "sm_100a", "sm_90a")):
        build = kernels.ArchProbe(arch)
        compile_kernel(CompileRequest(f"probe {n}", arch, "probe", build), cache)
        assert build.seen == arch


def test_a_hit_does_not_build(cache: KernelCache) -> None:
    request = kernels.request("scale_add")
    first = compile_kernel(request, cache)
    second = compile_kernel(replace(request, build=kernels.must_not_build), cache)
    assert second.from_cache
    assert (second.object, second.cubin, second.ptx) == (first.object, first.cubin, first.ptx)
    assert second.compile_s == first.compile_s > 0
    assert second.launches == first.launches
    assert second.load() is first.load()


def test_described_arguments(cache: KernelCache) -> None:
    described = compile_kernel(kernels.request("scale_add"), cache).arguments
    assert described["symbols"] == {"d0": 1, "d1": 8}
    x, z, _, a = described["arguments"]
    assert (x["dtype"], x["shape"], x["stride"], x["align"]) == (
        "bfloat16", ["d0", 1024], [1024, 1], 16,
    )  # fmt: skip
    assert z["stride"] == ["d1", 1]
    assert a == {"kind": "scalar", "dtype": "float32"}


def test_a_refused_kernel_says_why(cache: KernelCache) -> None:
    with pytest.raises(CompileError, match=r"broken.*sm_90a.*no_such_method"):
        compile_kernel(kernels.request("broken"), cache)
    # and the compiler still works
    compile_kernel(kernels.request("scale_add", 1024, 7), cache)


def test_too_much_shared_memory(cache: KernelCache) -> None:
    with pytest.raises(CompileError, match="240000 bytes of shared memory, sm_90 has 232448"):
        compile_kernel(kernels.request("shared_hog", 240000), cache)
    fits = compile_kernel(kernels.request("shared_hog", 232448), cache)
    assert fits.resources.shared_bytes == 232448
    with pytest.raises(CompileError, match="sm_120 has 101376"):
        compile_kernel(kernels.request("shared_hog", 232448, arch="sm_120a"), cache)


@pytest.mark.parametrize("arch", ["90a", "sm_90a --opt-level 0", "sm_9", "", "SM_90A"])
def test_bad_architecture(arch: str) -> None:
    with pytest.raises(CompileError, match="expected a name like sm_90a"):
        CompileRequest(key="", arch=arch, name="k", build=kernels.must_not_build)


@pytest.mark.parametrize("name", ["", "RMS", "a-b", "9a", "a" * 65, "../x"])
def test_bad_name(name: str) -> None:
    with pytest.raises(CompileError, match="kernel name"):
        CompileRequest(key="", arch="sm_90a", name=name, build=kernels.must_not_build)


def test_threads_take_turns(cache: KernelCache) -> None:
    results: list[Artifact | Exception] = []

    def work(steps: int) -> None:
        try:
            results.append(compile_kernel(kernels.request("scale_add", 1024, steps), cache))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work, args=(20 + i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(result, Artifact) for result in results), results
    digests = {result.digest for result in results if isinstance(result, Artifact)}
    assert len(digests) == 4
    fresh = [r for r in results if isinstance(r, Artifact) and not r.from_cache]
    assert len(fresh) == 4


def test_many_in_workers_with_failures(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    requests = [
        kernels.request("cluster_sum"),
        kernels.request("crashing"),
        kernels.request("spilling"),
        kernels.request("broken"),
        kernels.request("cluster_sum"),
        kernels.request("spilling", arch="sm_100a"),
    ]
    results = compile_many(requests, workers=2, cache=cache, keep_errors=True)
    names = [r.name if isinstance(r, Artifact) else "" for r in results]
    assert names == ["cluster_sum", "", "spilling", "", "cluster_sum", "spilling"]
    assert "crashing for sm_90a: the compiler process died (SIGABRT)" in str(results[1])
    assert "no_such_method" in str(results[3])
    good = [request for i, request in enumerate(requests) if i not in (1, 3)]
    again = compile_many([replace(r, build=kernels.must_not_build) for r in good], cache=cache)
    assert [a.from_cache for a in again] == [True] * 4
    with pytest.raises(CompileError, match="no_such_method"):
        compile_many([*good, requests[3]], cache=cache)


def test_processes_share_one_compile(tmp_path: Path) -> None:
    """Processes that ask for the same key at once: one compiles, the others read."""
    code = (
        "import sys; sys.modules['torch'] = None  # TVM-FFI would import it, for two seconds\n"
        "from tests import kernels\n"
        "from cutesuper.runtime.compile import KernelCache, compile_kernel\n"
        "a = compile_kernel(kernels.request('scale_add'), KernelCache(sys.argv[1]))\n"
        "a.load(); print(int(a.from_cache))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    answers = sorted(process.communicate()[0].strip() for process in processes)
    assert answers == ["0", "1", "1"]


def test_a_builder_that_cannot_be_pickled(cache: KernelCache) -> None:
    request = CompileRequest("x", "sm_90a", "local", lambda: kernels.scale_add(512))
    with pytest.raises(CompileError, match="module-level function"):
        compile_many([request], workers=1, cache=cache)


def test_damaged_object_is_compiled_again(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    request = kernels.request("scale_add", 1024, 3)
    first = compile_kernel(request, cache)
    [path] = tmp_path.glob("v1/*/*/kernel.o")
    path.write_bytes(path.read_bytes()[:-1])
    second = compile_kernel(request, cache)
    assert not second.from_cache
    assert second.object == first.object  # compiling is deterministic
    assert compile_kernel(request, cache).from_cache
