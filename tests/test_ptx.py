"""The machine of tests/ptx: what it computes, and what it refuses, by hand-written kernels."""

from __future__ import annotations

import ctypes
import shutil
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.ptx.run import USUAL, Conditions, Launched, PtxError, TooLarge, executable, run_launch

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

HEADER = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8], .param .align 8 .b8 kernel_param_1[8])
.reqntid 128, 1, 1
{
    .reg .pred %p<20>;
    .reg .b32 %r<200>;
    .reg .b64 %rd<40>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, memory;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
"""


def run(
    body: str, x: np.ndarray, y: np.ndarray, *, threads: int = 128, grid: int = 1, cluster: int = 1,
    shared: int = 65536, conditions: Conditions = USUAL,
) -> np.ndarray:  # fmt: skip
    """Run a kernel on x and y, of which it may write y; returns y."""
    tensors = [np.ascontiguousarray(x), np.ascontiguousarray(y)]
    addresses = [t.ctypes.data for t in tensors]
    launch = Launched(
        (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, False,
        tuple(struct.pack("<Q", a) for a in addresses),
    )  # fmt: skip
    memory = [
        (a, t.nbytes, n == 1) for n, (a, t) in enumerate(zip(addresses, tensors, strict=True))
    ]
    run_launch(executable(HEADER + body + "ret;\n}\n"), launch, memory, conditions)
    return tensors[1]


def vector(n: int = 128) -> np.ndarray:
    return np.linspace(-4, 4, n, dtype=np.float32)


def zeros(n: int = 128) -> np.ndarray:
    return np.zeros(n, np.float32)


ELEMENTWISE = [
    ("add.f32 %r5, %r4, %r4;", lambda x: x + x),
    ("fma.rn.f32 %r5, %r4, %r4, 0f3F800000;", lambda x: x * x + 1),
    ("ex2.approx.ftz.f32 %r5, %r4;", np.exp2),
    (("mov.b64 %rd6, {%r4, %r4}; mul.f32x2 %rd7, %rd6, %rd6; add.f32x2 %rd6, %rd7, %rd7;"
     "mov.b64 {%r6, %r5}, %rd6;"), lambda x: 2 * x * x),
    ("cvt.rn.f16.f32 %rs1, 0f40000000; add.rn.f32.f16 %r5, %rs1, %r4;", lambda x: x + 2),
    ("max.f32 %r5, %r4, 0f00000000;", lambda x: np.maximum(x, 0)),
    ("setp.lt.f32 %p1, %r4, 0f00000000; selp.f32 %r5, 0f40000000, %r4, %p1;",
     lambda x: np.where(x < 0, 2, x)),
    ("cvt.rn.bf16x2.f32 %r6, %r4, %r4; mov.b32 {%rs1, _}, %r6; cvt.f32.bf16 %r5, %rs1;",
     lambda x: x),
    ("cvt.rzi.s32.f32 %r6, %r4; cvt.rn.f32.s32 %r5, %r6;", np.trunc),
    ("cvt.rzi.u32.f32 %r6, %r4; cvt.rn.f16.u32 %rs1, %r6; cvt.f32.f16 %r5, %rs1;",
     lambda x: np.trunc(np.maximum(x, 0))),
    (("cvt.rzi.u32.f32 %r6, %r4; cvt.u16.u32 %rs1, %r6; mul.hi.u16 %rs2, %rs1, -21845;"
     "cvt.rn.f32.u16 %r5, %rs2;"), lambda x: np.trunc(np.maximum(x, 0)) * 43691 // 65536),
    (("cvt.rn.f16x2.f32 %r6, 0f3F800000, %r4; setp.gt.f16x2 %p1|%p2, %r6, 0;"
     "selp.f32 %r7, 0f3F800000, 0f00000000, %p1; selp.f32 %r8, 0f40000000, 0f00000000, %p2;"
     "add.f32 %r5, %r7, %r8;"), lambda x: np.where(x > 0, 3, 2)),
    (("cvt.rn.bf16.f32 %rs1, %r4; cvt.rn.bf16.f32 %rs2, 0f3F800000; min.NaN.bf16 %rs3, %rs1, %rs2;"
      "cvt.f32.bf16 %r5, %rs3;"), lambda x: np.minimum(x, 1)),
    ("cvt.rzi.s32.f32 %r6, %r4; min.relu.s32 %r7, %r6, 2; cvt.rn.f32.s32 %r5, %r7;",
     lambda x: np.clip(np.trunc(x), 0, 2)),
    # with 2^24 of the same sign one bit of 2 is lost, towards zero
    ("add.rz.f32 %r6, %r4, 0f4B800000; sub.f32 %r5, %r6, 0f4B800000;",
     lambda x: 2 * np.floor(x / 2) * (x >= 0) + np.floor(x) * (x < 0)),
    # 2^23 has no room for a fraction: what is left is the floor, as exp of the compiler uses it
    ("fma.rm.f32 %r6, %r4, 0f3F800000, 0f4B400000; sub.f32 %r5, %r6, 0f4B400000;", np.floor),
    ((".local .align 4 .b8 mine[8]; mov.b64 %rd6, mine; st.local.b32 [%rd6+4], %r4; bar.sync 0;"
     "ld.local.b32 %r5, [%rd6+4];"), lambda x: x),
    (("cvt.rzi.s32.f32 %r6, %r4; cvt.s64.s32 %rd6, %r6; cvt.rn.f64.s64 %rd7, %rd6;"
     "mul.f64 %rd8, %rd7, 0d3FE0000000000000; cvt.rn.f32.f64 %r5, %rd8;"),
     lambda x: np.trunc(x) / 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), ELEMENTWISE, ids=[t[:12] for t, _ in ELEMENTWISE])
def test_elementwise(text: str, value: Any) -> None:
    body = f".reg .b16 %rs<4>; ld.global.b32 %r4, [%rd4]; {text} st.global.b32 [%rd5], %r5;"
    x = vector()
    np.testing.assert_allclose(
        run(body, x, zeros()), value(x), rtol=1e-2 if "bf16" in text else 1e-6
    )


def test_sums_take_the_carry_of_another_one() -> None:
    """x 2^31 + 2^31 for x = tid - 64 modulo 2^32, in two words of which the upper is stored."""
    body = """
    sub.s32 %r6, %r1, 64;
    mad.lo.cc.u32 %r7, %r6, -2147483648, -2147483648;
    madc.hi.u32 %r8, %r6, -2147483648, 0;
    st.global.b32 [%rd5], %r8;
    """
    x = (np.arange(128).astype(np.uint32) - np.uint32(64)).astype(object)
    found = run(body, vector(), np.zeros(128, np.uint32))
    np.testing.assert_array_equal(found, (x * 2**31 + 2**31) // 2**32)


def test_launches_beyond_the_limit_are_told_apart() -> None:
    spin = "AGAIN: st.global.b32 [%rd5], %r1; bra AGAIN;"
    with pytest.raises(TooLarge, match=r"too many instructions.*AGAIN"):
        run(spin, vector(), zeros(), conditions=Conditions(limit=5000))


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_part_meet_again(seed: int) -> None:
    """A loop of another length in every thread, then an exchange by the whole warp."""
    body = """
    mov.b32 %r4, 0;
AGAIN:
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra OUT;
    add.s32 %r4, %r4, 1;
    bra.uni AGAIN;
OUT:
    shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
    cvt.rn.f32.u32 %r6, %r5;
    st.global.b32 [%rd5], %r6;
    """
    found = run(body, vector(), zeros(), conditions=Conditions(seed))
    np.testing.assert_array_equal(found, np.arange(128) ^ 1)


#: two warps: the second waits for a barrier in shared memory that the first arrives at
HANDSHAKE = """
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
READY:
    bar.sync 0;
    setp.gt.u32 %p2, %r1, 31;
    @%p2 bra WAITING;
    setp.ne.b32 %p3, %r1, 0;
    @%p3 bra DONE;
    st.shared.b32 [%r2+16], 0f40E00000;
    {arrive}
    bra.uni DONE;
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2], {parity};
    @!%p4 bra WAITING;
    ld.shared.b32 %r4, [%r2+16];
    st.global.b32 [%rd5], %r4;
DONE:
"""
ARRIVE = "mbarrier.arrive.shared.b64 %rd9, [%r2];"


@pytest.mark.parametrize("seed", range(8))
def test_barrier(seed: int) -> None:
    body = HANDSHAKE.format(arrive=ARRIVE, parity=0)
    found = run(body, vector(), zeros(), conditions=Conditions(seed))
    assert (found[32:] == 7).all()


def refused(body: str, match: str, **options: Any) -> None:
    with pytest.raises(PtxError, match=match):
        run(body, vector(), zeros(), **options)


def test_a_wait_that_nothing_ends() -> None:
    refused(HANDSHAKE.format(arrive="", parity=0), "no warp goes on.*WAITING")


def test_a_wait_for_the_wrong_phase_reads_too_early() -> None:
    """A wait with the other parity returns at once, or never once the phase is over."""
    body = HANDSHAKE.format(arrive=ARRIVE, parity=1)
    refused(body, "no warp goes on")


BAD = {
    "past the end": ("st.global.b32 [%rd5+4], %r1;", "512 bytes from the beginning of tensor 1"),
    "an input": ("st.global.b32 [%rd4], %r1;", "tensor 0, which is an input"),
    "another thread's memory": (
        ".local .align 4 .b8 mine[8]; mov.b64 %rd6, mine; ld.local.b32 %r4, [%rd6+8];",
        "byte 8 of local memory, of which there are 8",
    ),
    "nowhere": ("mov.b64 %rd6, 64; ld.global.b32 %r4, [%rd6];", "outside of all tensors"),
    "misaligned": ("ld.global.b32 %r4, [%rd4+2];", "address .* for 4 bytes"),
    "beyond shared memory": ("st.shared.b32 [%r2+65536], %r1;", "byte 66560 of shared memory"),
    "no barrier": (ARRIVE, "not initialised"),
    "half a warp": (
        ("setp.gt.u32 %p1, %r1, 5; @%p1 bra L; shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1; bra.uni M;"
        "L: bar.sync 0; M:"), "no warp goes on",
    ),
    "too many arrivals": (
        ("setp.ne.b32 %p1, %r1, 0; @%p1 bra L; mbarrier.init.shared.b64 [%r2], 2;"
        "mbarrier.arrive.shared.b64 %rd9, [%r2], 3; L:"), "more arrivals than the 2",
    ),
    "a copy to whoever has left": (
        ("mov.u32 %r5, %cluster_ctarank; setp.eq.b32 %p1, %r5, 1; @%p1 bra L;"
        "mov.b32 %r7, 0; W: add.s32 %r7, %r7, 1; setp.ne.b32 %p2, %r7, 4000; @%p2 bra W;"
        "mapa.shared::cluster.u32 %r6, %r2, 1; ld.shared::cluster.b32 %r4, [%r6]; L:"),
        "block 1 of the cluster, which has ended",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_no_kernel_may_do(name: str) -> None:
    body, match = BAD[name]
    options = {"grid": 2, "cluster": 2} if "left" in name else {}
    refused(body, match, **options)


def test_a_grid_that_no_gpu_launches() -> None:
    nothing = executable(HEADER + "ret;\n}\n")
    for grid in ((1, 65536, 1), (1, 1, 65536)):
        launch = Launched(grid, (128, 1, 1), (1, 1, 1), 0, False, (b"\0" * 8,) * 2)
        with pytest.raises(PtxError, match="two of its sides end at 65535"):
            run_launch(nothing, launch, [], USUAL)


def test_unknown_instructions_are_errors() -> None:
    with pytest.raises(PtxError, match="unknown instruction tex"):
        run("tex.2d.v4.f32.s32 {%r4, %r5, %r6, %r7}, [%r1, {%r2, %r3}];", vector(), zeros())


# ---------------------------------------------------------------------------------------- products

#: C (64, 8) = A (64, 16) B (16, 8) of one warpgroup, both operands along k, without a swizzle
PRODUCT = """
    .reg .b16 %rs<4>;
    mov.b32 %r10, 0;
FILL:
    mad.lo.s32 %r11, %r1, 8, %r10;
    cvt.u64.u32 %rd6, %r11;
    shl.b64 %rd7, %rd6, 2;
    add.s64 %rd8, %rd1, %rd7;
    ld.global.b32 %r12, [%rd8];
    cvt.rn.f16x2.f32 %r13, %r12, %r12;
    mov.b32 {{%rs1, _}}, %r13;
    shr.u32 %r14, %r11, 4;
    and.b32 %r15, %r11, 15;
    shr.u32 %r16, %r14, 3;
    and.b32 %r17, %r14, 7;
    shr.u32 %r18, %r15, 3;
    and.b32 %r19, %r15, 7;
    shl.b32 %r20, %r16, 8;
    shl.b32 %r21, %r18, 7;
    add.s32 %r22, %r20, %r21;
    shl.b32 %r23, %r17, 4;
    add.s32 %r24, %r22, %r23;
    shl.b32 %r25, %r19, 1;
    add.s32 %r26, %r24, %r25;
    add.s32 %r27, %r2, %r26;
    st.shared.b16 [%r27], %rs1;
    add.s32 %r10, %r10, 1;
    setp.ne.b32 %p1, %r10, 8;
    @%p1 bra FILL;
    {fence}
    bar.sync 0;
    shr.u32 %r30, %r2, 4;
    cvt.u64.u32 %rd10, %r30;
    mov.b64 %rd11, 68720001024;
    or.b64 %rd12, %rd10, %rd11;
    wgmma.fence.sync.aligned;
    setp.ne.b32 %p2, %r1, %r1;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
        {{%r40, %r41, %r42, %r43}}, %rd12, %rd12, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {wait}
    shr.u32 %r31, %r1, 5;
    and.b32 %r32, %r1, 31;
    shl.b32 %r33, %r31, 4;
    shr.u32 %r34, %r32, 2;
    add.s32 %r35, %r33, %r34;
    and.b32 %r36, %r1, 3;
    shl.b32 %r37, %r36, 1;
    mad.lo.s32 %r38, %r35, 8, %r37;
    mul.wide.u32 %rd13, %r38, 4;
    add.s64 %rd14, %rd2, %rd13;
    st.global.v2.b32 [%rd14], {{%r40, %r41}};
    st.global.v2.b32 [%rd14+256], {{%r42, %r43}};
    wgmma.wait_group.sync.aligned 0;
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"


def product(late: bool, fence: str = FENCE, wait: str = WAIT) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product of A and its first eight rows, and the right one."""
    a = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float16).astype(np.float32)
    body = PRODUCT.format(fence=fence, wait=wait)
    found = run(body, a, np.zeros((64, 8), np.float32), conditions=Conditions(5, late))
    return found, a @ a[:8].T


@pytest.mark.parametrize("late", [False, True])
def test_product(late: bool) -> None:
    found, expected = product(late)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_products_want_a_fence_of_the_proxy() -> None:
    with pytest.raises(PtxError, match=r"without a fence\.proxy\.async"):
        product(False, fence="")


def test_results_before_the_wait_are_not_there() -> None:
    found, expected = product(True, wait="")
    assert not np.isclose(found, expected, atol=1e-2).any()


def test_bulk_copies_arrive_when_they_like() -> None:
    """A copy of 512 bytes: who waits for its barrier finds it, in every order."""
    body = """
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], 512;
    add.s32 %r3, %r2, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 512, [%r2];
READY:
    bar.sync 0;
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;
    @!%p4 bra WAITING;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    ld.shared.b32 %r6, [%r5+128];
    st.global.b32 [%rd5], %r6;
    """
    for seed in range(6):
        found = run(body, vector(), zeros(), conditions=Conditions(seed))
        np.testing.assert_array_equal(found, vector())
    without = body.replace("@!%p4 bra WAITING;", "")
    assert any(early(without, seed) for seed in range(20))


def early(body: str, seed: int) -> bool:
    """True if a run is refused, or finds what has not arrived."""
    try:
        return bool((run(body, vector(), zeros(), conditions=Conditions(seed)) != vector()).any())
    except PtxError:
        return True


def test_blocks_that_wait_for_each_other() -> None:
    """A counter of all blocks: without all of them on the device at once nobody goes on."""
    body = """
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra DONE;
    atom.global.add.u32 %r4, [%rd2], 1;
POLL:
    ld.acquire.gpu.global.b32 %r5, [%rd2];
    setp.lt.u32 %p2, %r5, 8;
    @%p2 bra POLL;
DONE:
    """
    counter = np.zeros(1, np.uint32)
    assert run(body, vector(), counter, grid=8, conditions=Conditions(resident=8))[0] == 8
    with pytest.raises(PtxError, match="no warp goes on"):
        run(body, vector(), counter * 0, grid=8, conditions=Conditions(resident=4))


def test_parameters_are_read_as_they_are_passed() -> None:
    module = executable(HEADER + "ret;\n}\n").module
    assert module.parameters == [(0, 8), (8, 8)]
    assert ctypes.sizeof(ctypes.c_uint64) * len(module.parameters) == 16
    names: Sequence[str] = list(module.specials.values())
    assert names == ["tid.x"]
