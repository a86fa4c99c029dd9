"""Resources read from cubins, SASS, PTX and the host module."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cutesuper.errors import CompileError, FormatError
from cutesuper.runtime import compile as compile_module
from cutesuper.runtime import toolchain
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.compile import Artifact, compile_kernel
from cutesuper.runtime.host_module import entry_layouts
from cutesuper.runtime.resources import (
    arch_number,
    combine,
    count_ptx,
    count_sass,
    measure,
    parse_cubin,
    shared_limit,
)
from tests import kernels

pytest.importorskip("cutlass")
needs_nvdisasm = pytest.mark.skipif(
    toolchain.find_nvdisasm() is None, reason="needs nvdisasm (pip install nvidia-cuda-nvdisasm)"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("cache"))


def _artifact(cache: KernelCache, name: str, *args: object, arch: str = "sm_90a") -> Artifact:
    return compile_kernel(kernels.request(name, *args, arch=arch), cache)


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_streaming_kernel(cache: KernelCache, arch: str) -> None:
    found = _artifact(cache, "scale_add", arch=arch).resources
    assert found.threads == 128
    assert 16 <= found.registers <= 40
    assert found.stack_bytes == 0
    assert not found.spills
    assert found.shared_bytes == 0
    assert found.shared_is_exact
    assert found.barriers == 0
    assert found.code_bytes > 200
    assert found.source == "sass"
    assert found.instructions["LDG.E.128"] == found.instructions["LDG"] == 2
    assert found.instructions["STG.E.128"] == 1
    assert len(found.kernels) == 1


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cluster_kernel(cache: KernelCache, arch: str) -> None:
    artifact = _artifact(cache, "cluster_sum", arch=arch)
    found = artifact.resources
    assert found.shared_bytes == 512  # without the kilobyte that the driver reserves
    assert found.barriers == 1
    assert found.instructions["ACQBULK"] == 1
    assert found.ptx["griddepcontrol.wait"] == 1
    assert found.ptx["griddepcontrol.launch_dependents"] == 1
    [launch] = artifact.launches
    assert launch.kernel == found.kernels[0]
    assert launch.grid == (None, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (2, 1, 1)
    assert launch.pdl
    assert not launch.cooperative


@needs_nvdisasm
def test_spills_are_seen(cache: KernelCache) -> None:
    found = _artifact(cache, "spilling").resources
    assert found.spills
    assert found.stack_bytes >= 256
    assert found.instructions["STL"] > 0


def test_without_nvdisasm(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = compile_kernel(kernels.request("scale_add"), cache)
    monkeypatch.setattr(compile_module, "find_nvdisasm", lambda: None)
    found = fresh.resources
    assert found.source == "ptx"
    assert found.instructions["LDG.E.128"] == 2
    assert found.instructions["STG.E.128"] == 1
    # The stack is in the cubin, so spills show without nvdisasm too.
    assert compile_kernel(kernels.request("spilling"), cache).resources.spills


def test_sass_says_what_to_install(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = compile_kernel(kernels.request("scale_add"), cache)
    monkeypatch.setattr(toolchain, "find_nvdisasm", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvdisasm"):
        _ = artifact.sass


def test_cubin_parameters(cache: KernelCache) -> None:
    [kernel] = parse_cubin(_artifact(cache, "scale_add").cubin).values()
    # {ptr, m}, {ptr, m, stride}, {ptr, m}, a
    assert kernel.parameter_bytes == (16, 24, 16, 4)


def test_every_truncation_of_a_cubin_is_an_error(cache: KernelCache) -> None:
    cubin = _artifact(cache, "scale_add").cubin
    for size in range(0, len(cubin) - 1, 97):
        # Program headers lie behind everything that is read.
        try:
            parse_cubin(cubin[:size])
        except FormatError:
            continue
        assert size > len(cubin) - 600


def test_damaged_cubins_never_raise_anything_else(cache: KernelCache) -> None:
    cubin = _artifact(cache, "cluster_sum").cubin
    generator = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(cubin)
        for _ in range(generator.randint(1, 8)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            measure(bytes(damaged), "")
        except FormatError:
            continue


def test_sass_counts() -> None:
    sass = """
        .section .text.kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P3 LDG.E.128.CONSTANT R8, desc[UR4][R6.64] ;
        /*0020*/             @!UP0 UTMALDG.2D.MULTICAST [UR8], [UR6], UR5 ;
        /*0030*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], !UPT ;
        /*0040*/              @P0  STS.64 [R2], R4 ;
        /*0050*/               @PT LDG.E R4, desc[UR4][R2.64] ;
        /*0060*/                   NOP;
    """
    assert count_sass(sass) == {
        "LDC": 1, "LDG": 2, "LDG.E.128": 1, "UTMALDG": 1, "HGMMA": 1, "STS": 1, "STS.64": 1,
    }  # fmt: skip


def test_ptx_estimates() -> None:
    ptx = """
        wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1;
        wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2, p, 1, 1;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1];
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];
        cp.async.bulk.commit_group;
        ld.global.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
        ex2.approx.ftz.f32 %f1, %f2;
        setmaxnreg.inc.sync.aligned.u32 240;
        griddepcontrol.wait;
    """
    assert count_ptx(ptx) == {
        "HGMMA": 1, "QGMMA": 1, "UTMALDG": 1, "UTMASTG": 1, "UBLKCP": 1, "LDG.E.128": 1,
        "LDG": 1, "MUFU": 1, "USETMAXREG": 1, "ACQBULK": 1,
    }  # fmt: skip


def test_nested_structs_are_padded_as_in_c() -> None:
    module = (
        "llvm.func @_mlir_ciface_f(%arg0: !llvm.struct<(ptr<1>, struct<(struct<(i32)>, "
        "struct<(i32, i64)>)>)>, %arg1: i1, %arg2: !llvm.ptr, %arg3: !llvm.struct<(ptr<1>, "
        "struct<(struct<(i32, i32, i32)>, struct<(i64, i64)>)>)>) -> i32 attributes {}"
    )
    layouts = entry_layouts(module, "f")
    assert [layout.size for layout in layouts] == [32, 1, 8, 40]
    assert [field.offset for field in layouts[0].fields] == [0, 8, 16, 24]
    assert [field.offset for field in layouts[3].fields] == [0, 8, 12, 16, 24, 32]
    with pytest.raises(CompileError, match="no entry point"):
        entry_layouts(module, "g")


def test_architecture_table() -> None:
    assert arch_number("sm_100f") == 100
    assert shared_limit("sm_90a") == shared_limit("sm_100a") == 232448
    assert shared_limit("sm_120a") == 101376
    with pytest.raises(CompileError, match="sm_90a"):
        arch_number("hopper")


def test_toolchain_reads_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CUDART_VARIABLE, str(tmp_path / "missing.a"))
    with pytest.raises(CompileError, match="no such file"):
        toolchain.require_cudart_static()
    with pytest.raises(CompileError, match="ended with 3"):
        toolchain.run_tool(["sh", "-c", "exit 3"], "testing")
    with pytest.raises(CompileError, match="cannot start"):
        toolchain.run_tool([str(tmp_path / "nothing")], "testing")


def test_figures_of_several_kernels_combine(cache: KernelCache) -> None:
    one = _artifact(cache, "scale_add").resources
    two = _artifact(cache, "spilling").resources
    both = combine([one, replace(two, stages=3)])
    assert both.registers == max(one.registers, two.registers)
    assert both.code_bytes == one.code_bytes + two.code_bytes
    assert both.kernels == (*one.kernels, *two.kernels)
    assert both.stages == 3 and both.spills
    key = max(one.instructions, key=lambda k: one.instructions[k])
    assert both.instructions[key] == one.instructions[key] + two.instructions.get(key, 0)
